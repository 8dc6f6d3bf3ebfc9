# SPDX-License-Identifier: Apache-2.0
"""Stages: tracing, lowering and compiling ahead of time, and what each stage reports."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import TransformError
from tests.core.transforms.examples import Box, Scale, values

P = PartitionSpec


def _forward(model: Scale, x: Any) -> Any:
    return model(x)


def _stages(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    traced = function.trace(*args, **kwargs)
    lowered = traced.lower()
    return {"Traced": traced, "Lowered": lowered, "Compiled": lowered.compile()}


# --- everything that JAX's stages offer ---

JAX_STAGES = _stages(jax.jit(lambda w, x: w * x), jnp.ones(2), 2.0)
OFFERS = [
    (stage, name)
    for stage, instance in JAX_STAGES.items()
    for name in dir(instance)
    if not name.startswith("_")
]
NEXT = {"lower", "compile", "call"}


def _outcome(stage: Any, name: str) -> str:
    """Says what reading (and calling, where it takes no argument) gives."""
    try:
        value = getattr(stage, name)
        if callable(value) and name not in NEXT:
            value = value()
    except Exception as error:  # noqa: BLE001 (the class is what is compared)
        return type(error).__name__
    return "works"


@pytest.mark.parametrize(("stage", "name"), OFFERS)
def test_stages_have_the_attributes_of_jax(stage: str, name: str) -> None:
    mine = _stages(sx.jit(_forward), Scale(), 2.0)[stage]
    assert _outcome(mine, name) == _outcome(JAX_STAGES[stage], name)
    assert hasattr(type(mine), name) or hasattr(mine, name)


def test_program_and_cost_match_plain_jax() -> None:
    plain = jax.jit(lambda w, n, x: (0.5 * w * x, n + 1))
    model = Scale(64)
    expected = _stages(plain, model.factor.value, model.calls.value, jnp.ones(64))
    mine = _stages(sx.jit(_forward), model, jnp.ones(64))
    assert len(mine["Traced"].jaxpr.eqns) == len(expected["Traced"].jaxpr.eqns)
    costs = [stage["Compiled"].cost_analysis() for stage in (mine, expected)]
    assert [c["flops"] for c in costs] == [costs[1]["flops"]] * 2
    assert [c["bytes accessed"] for c in costs] == [costs[1]["bytes accessed"]] * 2
    memory = [stage["Compiled"].memory_analysis() for stage in (mine, expected)]
    assert memory[0].argument_size_in_bytes == memory[1].argument_size_in_bytes
    assert memory[0].output_size_in_bytes == memory[1].output_size_in_bytes
    assert "HloModule jit__forward" in mine["Compiled"].as_text()


# --- what is reported is arranged as the user passed it ---


def test_arguments_and_results_are_reported_as_passed() -> None:
    def run(tree: Any, *, x: Any) -> Any:
        tree["m"].extra = sx.BatchStat(x)
        return {"model": tree["m"], "y": [tree["m"](x)]}

    tree = {"m": Scale(3), "b": jnp.ones((), jnp.int32)}
    for stage in _stages(sx.jit(lambda tree, x: run(tree, x=x)), tree, jnp.ones(3)).values():
        (seen, x), named = stage.args_info
        assert named == {} and (x.shape, x.dtype, x.donated) == ((3,), jnp.float32, False)
        assert {path: a.shape for path, a in seen["m"].flat().items()} == {
            ("factor",): (3,),
            ("calls",): (),
        }
        assert seen["b"].dtype == jnp.int32
        assert list(seen["m"].filter(sx.Param).flat()) == [("factor",)]
        out = stage.out_info
        assert out["y"][0].shape == (3,)
        assert {path: a.shape for path, a in out["model"].flat().items()} == {
            ("calls",): (),
            ("extra",): (3,),
        }
        assert stage.in_tree == jax.tree.structure(stage.args_info)
        assert stage.out_tree == jax.tree.structure(stage.out_info)
        assert stage.in_avals[0][1].shape == (3,)


def test_keyword_arguments_are_reported_by_name() -> None:
    for stage in _stages(sx.jit(_forward), x=jnp.ones(3), model=Scale(3)).values():
        positional, named = stage.args_info
        assert positional == ()
        assert named["x"].shape == (3,)
        assert list(named["model"].flat()) == [("factor",), ("calls",)]


def test_donated_arguments_are_reported() -> None:
    for stage in _stages(sx.jit(_forward, donate_argnums=0), Scale(), jnp.ones(2)).values():
        (model, x), _ = stage.args_info
        assert [a.donated for a in model.flat().values()] == [True, True] and not x.donated
        assert stage.donate_argnums == (0, 1)


def test_shardings_and_formats_are_reported_as_passed(mesh: Mesh) -> None:
    data, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    run = sx.jit(
        _forward,
        in_shardings=(sx.StateSharding({sx.Param: data, ...: whole}), None),
        out_shardings=data,
    )
    compiled = run.lower(Scale(8), 2.0).compile()
    (model, _), _ = compiled.input_shardings
    assert (model["factor"].spec, model["calls"].spec) == (P("data"), P())
    assert compiled.output_shardings.spec == P("data")
    (model, _), _ = compiled.input_formats
    assert model["factor"].sharding.spec == P("data")
    assert compiled.output_formats.sharding.spec == P("data")


def test_shared_variable_is_one_input_at_all_paths() -> None:
    model = Scale()
    model.alias = model.factor
    traced = sx.jit(lambda a, b: a.factor * b.alias).trace(model, model)
    assert len(traced.jaxpr.in_avals) == 2
    (first, second), _ = traced.args_info
    assert list(first.flat()) == list(second.flat()) == [("factor",), ("calls",)]


# --- calling a Compiled ---


def test_compiled_writes_state_into_the_given_model() -> None:
    made_for, other = Scale(), Scale()
    compiled = sx.jit(_forward).lower(made_for, 2.0).compile()
    for _ in range(2):
        assert compiled(other, 2.0).tolist() == [1.0, 1.0]
    assert compiled.call(made_for, 4.0).tolist() == [2.0, 2.0]
    assert (int(made_for.calls), int(other.calls)) == (1, 2)


def test_compiled_carries_back_structure_and_identity() -> None:
    def edit(model: Scale) -> Scale:
        model.extra = sx.Param(model.factor * 2)
        return model

    compiled = sx.jit(edit).lower(Scale()).compile()
    model = Scale()
    assert compiled(model) is model
    assert values(model)[("extra",)] == [2.0, 2.0]


def test_compiled_uses_current_captured_models() -> None:
    model = Scale()
    compiled = sx.jit(lambda x: model(x)).lower(2.0).compile()
    model.factor[...] = model.factor * 3
    assert compiled(2.0).tolist() == [3.0, 3.0]
    assert int(model.calls) == 1


def test_lowering_with_static_arguments_shardings_and_donation(mesh: Mesh) -> None:
    data, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def run(model: Scale, times: int, x: Any, *, mode: str) -> Any:
        assert mode == "train"
        model.factor += 1.0
        return model(x) * times

    declared = sx.StateSharding({sx.Param: data, ...: whole})
    compiled = (
        sx.jit(
            run,
            static_argnums=1,
            static_argnames="mode",
            in_shardings=(declared, None),
            out_shardings=data,
            donate_argnums=0,
        )
        .lower(Scale(8), 2, 2.0, mode="train")
        .compile()
    )
    model = Scale(8)
    before = model.factor.value
    assert compiled(model, 2.0).tolist() == [4.0] * 8
    assert before.is_deleted() or not before.sharding.is_equivalent_to(data, 1)
    assert model.factor.sharding.spec == P("data")
    placed = model.factor.value
    assert compiled(model, 2.0).tolist() == [6.0] * 8
    assert placed.is_deleted()


def test_methods_lower_bound_or_through_class() -> None:
    class Model(Scale):
        @sx.jit
        def run(self, x: Any) -> Any:
            return self(x)

    model, other = Model(), Model()
    for lowered in (model.run.lower(2.0), Model.run.lower(model, 2.0)):
        compiled = lowered.compile()
        assert compiled(other, 2.0).tolist() == [1.0, 1.0]
    assert sx.jit(model.__call__).lower(2.0).compile()(2.0).tolist() == [1.0, 1.0]
    assert model.run.trace(2.0).out_info.shape == (2,)
    assert model.run.eval_shape(2.0).shape == (2,)
    assert (int(model.calls), int(other.calls)) == (1, 2)


def test_compiled_of_a_bound_method_is_bound() -> None:
    class Model(Scale):
        @sx.jit
        def run(self, x: Any, y: Any = 0.0) -> Any:
            self.calls += 1
            return self.factor * x + y

        @functools.partial(sx.jit, static_argnames="mode")
        def moded(self, x: Any, mode: str) -> Any:
            return self.factor * x

    model, other = Model(), Model()
    other.factor[...] = other.factor * 3
    compiled = model.run.lower(2.0, y=1.0).compile()
    ran = [compiled(2.0, y=1.0), compiled(other, 2.0, y=1.0), compiled.call(2.0, y=0.0)]
    expected = [model.factor * 2 + 1, other.factor * 2 + 1, model.factor * 2]
    assert [y.tolist() for y in ran] == [y.tolist() for y in expected]
    assert (int(model.calls), int(other.calls)) == (2, 1)
    static = model.moded.lower(2.0, mode="a").compile()
    assert static(3.0).tolist() == (model.factor * 3).tolist()
    with pytest.raises(TransformError, match=r"1 positional arguments given, compiled for 2"):
        compiled()
    with pytest.raises(TransformError, match="positional arguments given"):
        Model.run.lower(model, 2.0).compile()(2.0)
    assert model.run.trace(2.0).lower().compile()(2.0).tolist() == (model.factor * 2).tolist()


def test_names_of_nnx_are_read_only_properties() -> None:
    model = Scale(8)
    jitted = sx.jit(_forward)
    compiled = jitted.lower(model, 2.0).compile()
    assert jitted.inner is _forward and compiled.input_layouts == compiled.input_formats
    assert sx.StateSharding({sx.Param: 1, ...: None}).filters == (sx.Param, ...)
    assert sx.StateSharding({sx.Param: 1, ...: None}).shardings == (1, None)
    assert sx.StateAxes([(sx.Param, 0)]).filters == (sx.Param,)
    assert sx.StateAxes([(sx.Param, 0)]).axes == (0,)

    class Model(Scale):
        @sx.jit
        def run(self, x: Any) -> Any:
            return self.factor * x

    bound = Model(8)
    assert bound.run.inner(2.0).tolist() == bound.run(2.0).tolist()
    for item, name in (
        (jitted, "inner"),
        (compiled, "input_layouts"),
        (sx.StateSharding({...: None}), "filters"),
        (sx.StateSharding({...: None}), "shardings"),
        (sx.StateAxes({...: None}), "axes"),
    ):
        with pytest.raises(AttributeError):
            setattr(item, name, None)


# --- lowering allocates nothing ---


class Lazy(sx.Module):
    """One lazy Param."""

    def __init__(self) -> None:
        self.kernel = sx.Param(
            sx.Init(jax.nn.initializers.normal(), (4, 4), rngs=sx.Rngs(0)), axes=("in", "out")
        )


def test_lowering_a_lazy_model_keeps_it_lazy() -> None:
    model, x = Lazy(), jax.ShapeDtypeStruct((4,), jnp.float32)
    run = sx.jit(lambda m, x: m.kernel @ x)
    compiled = run.lower(model, x).compile()
    assert run.eval_shape(model, x).shape == (4,)
    assert model.kernel.is_lazy
    assert compiled(model, jnp.ones(4)).shape == (4,)
    assert not model.kernel.is_lazy


def test_program_of_abstract_model_runs_on_real_one() -> None:
    model = sx.eval_shape(Lazy)
    assert model.kernel.is_abstract
    run = sx.jit(lambda m, x: m.kernel @ x)
    compiled = run.lower(model, jnp.ones(4)).compile()
    assert compiled(Lazy(), jnp.ones(4)).shape == (4,)
    with pytest.raises(sx.errors.ModuleError, match=r"1 Variables .* \.m\.kernel\."):
        run(model, jnp.ones(4))
    with pytest.raises(sx.errors.ModuleError, match=r"1 Variables .* \.m\.kernel\."):
        compiled(model, jnp.ones(4))


def test_tracing_changes_nothing() -> None:
    model = Scale()

    def run(model: Scale) -> Any:
        model.factor += 1.0
        model.mode = "changed"
        return model

    sx.jit(run).trace(model)
    sx.jit(run).lower(model).compile()
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}
    assert not hasattr(model, "mode")


# --- what does not fit ---


def _other_rate(model: Scale) -> None:
    model.rate = 0.25


def _new_attribute(model: Scale) -> None:
    model.extra = sx.Param(jnp.ones(1))


def _tie(model: Scale) -> None:
    model.calls = model.factor


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_other_rate, r"\n  \.model\.rate: 0\.5 \(float\) -> 0\.25 \(float\)\n"),
        (_new_attribute, r"\n  \.model\.extra: absent -> Param\n"),
        (_tie, r"\n  \.model\.calls: Variable -> same as \.model\.factor\n"),
        (lambda m: delattr(m, "calls"), r"\n  \.model\.calls: Variable -> absent\n"),
        (lambda m: m.factor.set_metadata(note=1), r"\n  \.model\.factor: Param -> Param\(note=1\)"),
        (lambda m: setattr(m.factor, "value", jnp.ones(3)), r"'model\.factor' .*float32\[3\]"),
    ],
)
def test_model_of_other_structure_raises_with_path(edit: Any, message: str) -> None:
    compiled = sx.jit(_forward).lower(Scale(), 1.0).compile()
    model = Scale()
    edit(model)
    with pytest.raises(TransformError, match=message):
        compiled(model, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c(Scale()), r"1 positional arguments given, compiled for 2 \(model, x\)"),
        (lambda c: c(Scale(), 1.0, 2.0), r"3 positional arguments given, compiled for 2"),
        (lambda c: c(Box(), 1.0), r"\.model: Scale -> Box"),
        (lambda c: c(Scale(), x=1.0), r"1 positional arguments given"),
        (lambda c: c(Scale(), jnp.ones(2)), r"'x' compiled with float32\[\] .* float32\[2\]"),
        (lambda c: c([Scale()], 1.0), r"the arguments have other containers"),
    ],
)
def test_compiled_with_other_arguments_says_what_was_expected(call: Any, message: str) -> None:
    compiled = sx.jit(_forward).lower(Scale(), 1.0).compile()
    with pytest.raises(TransformError, match=message):
        call(compiled)


def test_stages_show_their_function() -> None:
    traced = sx.jit(_forward).trace(Scale(), 1.0)
    lowered = traced.lower()
    assert [repr(stage) for stage in (traced, lowered, lowered.compile())] == [
        "<Traced of <sx.jit of _forward>>",
        "<Lowered of <sx.jit of _forward>>",
        "<Compiled of <sx.jit of _forward>>",
    ]
    with pytest.raises(AttributeError, match=r"^_params$"):
        _ = traced._params


def test_compiled_refuses_what_is_no_array() -> None:
    compiled = sx.jit(lambda x: x).lower(1.0).compile()
    with pytest.raises(
        TypeError, match=r"^Argument 'one' of type <class 'str'> is not a valid JAX"
    ):
        compiled("one")
