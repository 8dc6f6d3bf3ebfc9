# SPDX-License-Identifier: Apache-2.0
"""Declared shardings: prefixes, filters, consistency, and what written values keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import PrefixError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Box, Scale, values
from tests.values import with_values

P = PartitionSpec
Sharding = Callable[..., NamedSharding]


@pytest.fixture
def on(mesh: Mesh) -> Sharding:
    """Makes shardings over the mesh, which is once of each kind: ``on("data", None)``."""
    return lambda *names: NamedSharding(mesh, P(*names))


def _by_type(on: Sharding) -> sx.StateSharding:
    return sx.StateSharding({sx.Param: on("data"), ...: on()})


def _step(model: Scale, x: Any) -> Any:
    y = model(x)
    model.factor += 1.0
    return y


def _is(array: Any, sharding: NamedSharding) -> bool:
    return array.sharding.is_equivalent_to(sharding, array.ndim)


# --- what may be declared for an argument ---


def _vector() -> Box:
    model = Box()
    model.a, model.b = sx.Param(jnp.arange(8.0)), sx.Variable(jnp.ones(8))
    return model


def test_in_shardings_entry_covers_every_variable_of_a_module(on: Sharding) -> None:
    compiled = sx.jit(lambda m: m.a * m.b, in_shardings=on("data")).lower(_vector()).compile()
    (state,), _ = compiled.input_shardings
    assert {path: s.spec for path, s in state.flat().items()} == {
        ("a",): P("data"),
        ("b",): P("data"),
    }


@pytest.mark.parametrize("as_state", [True, False])
def test_state_of_shardings_gives_one_per_path(on: Sharding, as_state: bool) -> None:
    tree: Any = {"a": on("data"), "b": on("model")}
    declared = sx.State(tree) if as_state else tree
    run = sx.jit(lambda m: m.a + 0, in_shardings=(declared,), keep_unused=True)
    compiled = run.lower(_vector()).compile()
    (state,), _ = compiled.input_shardings
    assert (state["a"].spec, state["b"].spec) == (P("data"), P("model"))


def test_first_filter_that_matches_decides(on: Sharding) -> None:
    model = _vector()
    model.c = sx.BatchStat(jnp.ones(8))
    declared = sx.StateSharding(
        {sx.PathContains("c"): on("model"), (sx.Param, sx.BatchStat): on("data"), ...: on()}
    )
    run = sx.jit(lambda m: m.a + 0, in_shardings=(declared,), keep_unused=True)
    compiled = run.lower(model).compile()
    (state,), _ = compiled.input_shardings
    specs = {path: s.spec for path, s in state.flat().items()}
    assert specs == {("a",): P("data"), ("b",): P(), ("c",): P("model")}


def test_prefixes_reach_modules_inside_containers(on: Sharding) -> None:
    def run(tree: Any, x: Any) -> Any:
        return tree["models"][0].a + tree["models"][1].a + tree["bias"] + x

    declared = ({"models": [on("data"), _by_type(on)], "bias": on("model")}, on())
    tree = {"models": [_vector(), _vector()], "bias": jnp.ones(8)}
    lowered = sx.jit(run, in_shardings=declared, keep_unused=True).lower(tree, jnp.ones(8))
    compiled = lowered.compile()
    (seen, x), _ = compiled.input_shardings
    assert [seen["models"][i]["b"].spec for i in (0, 1)] == [P("data"), P()]
    assert (seen["bias"].spec, x.spec) == (P("model"), P())
    assert compiled(tree, jnp.ones(8)).tolist() == (2 * jnp.arange(8.0) + 2).tolist()


def test_none_leaves_an_argument_as_it_is_placed(on: Sharding) -> None:
    model = _vector()
    model.a.value = jax.device_put(model.a.value, on("data"))
    result = sx.jit(lambda m, x: m.a * x, in_shardings=(None, None))(model, 2.0)
    assert _is(result, on("data"))


def test_partition_specs_mean_the_mesh_in_scope(mesh: Mesh) -> None:
    declared = sx.StateSharding({sx.Param: P("data"), ...: P()})
    model = Scale(8)
    model.factor.value = jax.device_put(model.factor.value, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        run = sx.jit(_step, in_shardings=(declared, None), out_shardings=P("data"))
        result = run(model, 1.0)
    assert _is(result, NamedSharding(mesh, P("data")))
    assert _is(model.factor, NamedSharding(mesh, P("data")))


def test_sharding_for_all_positional_arguments(on: Sharding) -> None:
    run = sx.jit(lambda m, x: m.a * x, in_shardings=on("data"))
    assert _is(run(_vector(), jnp.ones(8)), on("data"))


def test_static_arguments_may_omit_their_entry(on: Sharding) -> None:
    def run(model: Scale, times: int, x: Any) -> Any:
        return model(x) * times

    for declared in [(_by_type(on), None), (_by_type(on), None, None)]:
        compiled = sx.jit(run, static_argnums=1, in_shardings=declared)
        assert _is(compiled(Scale(8), 2, 1.0), on("data"))


def test_keyword_arguments_keep_their_sharding(on: Sharding) -> None:
    run = sx.jit(lambda model, x: model.a * x, in_shardings=(on("data"),))
    assert _is(run(_vector(), x=jnp.ones(8)), on("data"))


# --- where Variables stay ---


def test_second_call_places_no_variable(on: Sharding) -> None:
    asked: list[Any] = []

    class Asked(sx.Variable[Any]):
        """A Variable whose layout is compared only where it is placed."""

        @property
        def is_abstract(self) -> bool:
            asked.append(self)
            return super().is_abstract

    model = Box()
    model.a = Asked(jnp.arange(8.0))
    run = sx.jit(lambda m, x: m.a * x, in_shardings=(on("data"), None))
    run(model, 1.0)
    asked.clear()

    results = [run(model, 1.0).tolist() for _ in range(3)]
    assert results == [jnp.arange(8.0).tolist()] * 3
    assert asked == []

    model.a.value = jnp.ones(8)
    assert run(model, 2.0).tolist() == [2.0] * 8
    assert _is(model.a, on("data"))


def test_read_only_values_move_once(on: Sharding) -> None:
    model = _vector()
    run = sx.jit(lambda tree, x: tree["m"].a * x, in_shardings=({"m": _by_type(on)}, None))
    run({"m": model}, 1.0)
    assert _is(model.a, on("data")) and _is(model.b, on())
    held = [model.a.value, model.b.value]
    for _ in range(3):
        run({"m": model}, 1.0)
    assert all(v.value is array for v, array in zip([model.a, model.b], held, strict=True))


@pytest.mark.parametrize("calls_before", [1, 2, 3])
def test_arrays_written_between_calls_are_moved_there_too(on: Sharding, calls_before: int) -> None:
    model, run = _vector(), sx.jit(lambda m: m.a * 1, in_shardings=(on("data"),))
    for _ in range(calls_before):
        run(model)
    model.a[...] = jnp.zeros(8)
    model.b[...] = jax.device_put(jnp.zeros(8), jax.devices()[3])
    assert run(model).tolist() == [0.0] * 8
    assert _is(model.a, on("data")) and _is(model.b, on("data"))


def test_lazy_model_materializes_in_its_shards(on: Sharding) -> None:
    def make() -> sx.Module:
        return sx.nn.Linear(8, 16, rngs=sx.Rngs(0))

    whole, model, made = make(), make(), []
    place = sx.StateSharding({sx.PathContains("kernel"): on("data", "model"), ...: on()})
    before = {id(array) for array in jax.live_arrays()}
    sx.jit(lambda m: made.append(m.kernel.shape), in_shardings=(place,))(model)
    new = [a for a in jax.live_arrays() if id(a) not in before and a.shape == (8, 16)]
    assert made == [(8, 16)]
    assert [a.sharding.spec for a in new] == [P("data", "model")]
    assert model.kernel.value.tolist() == whole.kernel.value.tolist()


@pytest.mark.parametrize("declared", ["filter", "state", "one", "inside a list"])
def test_replaced_variable_takes_sharding_of_its_path(on: Sharding, declared: str) -> None:
    entries: dict[str, Any] = {
        "filter": (_by_type(on), None),
        "state": ({"a": on("data"), "b": on()}, None),
        "one": (on("data"), None),
        "inside a list": ([on("data")], None),
    }

    def replace(m: Any, x: Any) -> None:
        inner = m[0] if isinstance(m, list) else m
        inner.a = sx.Param(inner.a + x)
        if declared != "state":  # which has no entry for a new path
            inner.c = sx.Param(jnp.ones(8) * x)

    model = _vector()
    given: Any = [model] if declared == "inside a list" else model
    run = sx.jit(replace, in_shardings=entries[declared])
    for _ in range(2):
        run(given, 1.0)
        assert _is(model.a, on("data"))
    assert declared == "state" or _is(model.c, on("data"))


def test_compiled_program_moves_its_arguments(on: Sharding) -> None:
    compiled = sx.jit(lambda m: m.a * 2, in_shardings=(on("data"),)).lower(_vector()).compile()
    model = _vector()
    assert compiled(model).tolist() == (2 * jnp.arange(8.0)).tolist()
    assert _is(model.a, on("data"))


def test_keyword_arguments_have_the_entries_of_their_positions(on: Sharding) -> None:
    run = sx.jit(lambda model, x: (model.a * 1, x * 1), in_shardings=(on("data"), on()))
    for _ in range(2):
        model = _vector()
        of_model, of_x = run(x=jnp.ones(8), model=model)
        assert _is(of_model, on("data")) and _is(of_x, on()) and _is(model.a, on("data"))
    lowered = run.lower(model=_vector(), x=jnp.ones(8))
    assert [a.tolist() for a in lowered.compile()(x=jnp.ones(8), model=_vector())] == [
        jnp.arange(8.0).tolist(),
        [1.0] * 8,
    ]


# --- what written values and results keep ---


def test_written_values_keep_their_in_shardings(on: Sharding) -> None:
    model = Scale(8)
    step = sx.jit(_step, in_shardings=(_by_type(on), None))
    for _ in range(3):
        step(model, 1.0)
        assert _is(model.factor, on("data")) and _is(model.calls, on())
    assert values(model) == {("factor",): [4.0] * 8, ("calls",): 3}


def test_steady_calls_with_shardings_trace_once(on: Sharding) -> None:
    traces: list[int] = []

    def run(model: Scale, x: Any) -> Any:
        traces.append(1)
        return _step(model, x)

    model = Scale(8)
    model.factor.value = jax.device_put(model.factor.value, on("data"))
    model.calls.value = jax.device_put(model.calls.value, on())
    step = sx.jit(run, in_shardings=(_by_type(on), None), out_shardings=on("data"))
    for _ in range(4):
        step(model, 1.0)
    assert len(traces) == 1


def test_new_modules_get_the_declared_shardings(on: Sharding) -> None:
    make = sx.jit(lambda: Scale(8), out_shardings=_by_type(on))
    for _ in range(2):
        model = make()
        assert _is(model.factor, on("data")) and _is(model.calls, on())


def test_returned_input_modules_get_out_shardings(on: Sharding) -> None:
    def run(model: Scale) -> Any:
        model.calls += 1
        return model, {"double": model.factor * 2}

    model = Scale(8)
    compiled = sx.jit(run, out_shardings=(_by_type(on), on("model")))
    for _ in range(2):
        returned, rest = compiled(model)
        assert returned is model
        assert _is(model.factor, on("data")) and _is(model.calls, on())
        assert _is(rest["double"], on("model"))


def test_out_shardings_override_in_shardings_of_writes(on: Sharding) -> None:
    def run(model: Box) -> Box:
        model.a += 1.0
        return model

    model = _vector()
    sx.jit(run, in_shardings=on("data"), out_shardings=on("model"))(model)
    assert _is(model.a, on("model")) and _is(model.b, on("model"))


def test_plain_results_take_prefixes_of_out_shardings(on: Sharding) -> None:
    def run(model: Box) -> Any:
        return {"x": model.a + 0, "y": [model.b + 0, model.a * 2]}

    shown = sx.jit(run, out_shardings={"x": on("data"), "y": on("model")})(_vector())
    assert [_is(shown["x"], on("data")), *(_is(y, on("model")) for y in shown["y"])] == [True] * 3


def test_changed_result_structure_gets_new_out_shardings(on: Sharding) -> None:
    def run(model: Box, x: Any) -> None:
        if x.ndim:
            model.b += x
        model.a += 1.0

    model = _vector()
    compiled = sx.jit(run, in_shardings=(on("data"), None))
    for x in (jnp.ones(()), jnp.ones(8), jnp.ones(())):
        compiled(model, x)
    assert _is(model.a, on("data")) and _is(model.b, on("data"))
    assert values(model) == {("a",): [x + 3.0 for x in range(8)], ("b",): [2.0] * 8}


# --- sharing ---


def test_shared_variable_with_two_shardings_names_both(on: Sharding) -> None:
    model = _vector()
    shardings = (on("data"), on("model"))
    run = sx.jit(lambda left, right: left.a.sum() + right.a.sum(), in_shardings=shardings)
    with pytest.raises(TransformError) as caught:
        run(model, model)
    message = str(caught.value)
    assert ".left.a: NamedSharding" in message and ".right.a: NamedSharding" in message
    assert "P('data',)" in message and "P('model',)" in message
    assert float(run(_vector(), _vector())) == 56.0


def test_equal_shardings_from_different_mappings_are_accepted(on: Sharding) -> None:
    model = _vector()
    declared = (
        sx.StateSharding({sx.Param: on("data"), ...: on()}),
        sx.StateSharding([(sx.PathContains("a"), on("data")), (sx.Variable, on())]),
    )
    run = sx.jit(lambda left, right: left.a + right.a, in_shardings=declared)
    assert _is(run(model, model), on("data"))


def test_shared_result_with_two_shardings_raises(on: Sharding) -> None:
    run = sx.jit(lambda m: (m, m.a), out_shardings=(on("data"), on("model")))
    with pytest.raises(TransformError, match="out_shardings"):
        run(_vector())


# --- what is refused ---


def test_variable_that_no_filter_matches_is_named(on: Sharding) -> None:
    model = Scale(8)
    run = sx.jit(_step, in_shardings=(sx.StateSharding({sx.Param: on("data")}), None))
    with pytest.raises(PrefixError, match=r"\.model: No filter matches .* at \.calls"):
        run(model, 1.0)
    assert values(model) == {("factor",): [1.0] * 8, ("calls",): 0}


def test_everything_must_come_last(on: Sharding) -> None:
    with pytest.raises(sx.errors.FilterError, match=r"`\.\.\.`, which matches everything"):
        sx.StateSharding({...: on(), sx.Param: on("data")})


def test_unfitting_sharding_names_the_variable(on: Sharding) -> None:
    with pytest.raises(PrefixError, match=r"1 Variables.*\n  \.model\.calls, shape \(\)") as caught:
        sx.jit(_step, in_shardings=(on("data"), None))(Scale(8), 1.0)
    code = "sx.StateSharding({filter: ..., ...: ...})"
    own = run_advice(caught.value, code, {"sx": sx, "filter": sx.Param, "rest": on()})
    sx.jit(_step, in_shardings=(own, None))(Scale(8), 1.0)
    with pytest.raises(PrefixError, match=r"1 Variables.*\n  \.model\.factor, shape \(3,\)"):
        sx.jit(_step, in_shardings=(_by_type(on), None))(Scale(3), 1.0)
    with pytest.raises(PrefixError, match=r"1 arguments:\n  x, shape \(\): .* has more"):
        sx.jit(lambda m, x: m.a * x, in_shardings=(None, on("data")))(_vector(), jnp.ones(()))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            lambda on: ((on(), on()), None),
            r"at \.tree: it has a tuple of 2 where .* a dict of 'm', 'y'",
        ),
        (
            lambda on: ({"m": on()}, None),
            r"at \.tree: it has a dict of 'm' where .* a dict of 'm', 'y'",
        ),
        (lambda on: (on(),), r"in_shardings has 1 entry, but .* 2 .* \(tree, x\)"),
        (lambda on: ({"m": {"a": on()}, "y": on()}, None), r"no entry for the Variable at \.tree"),
        (
            lambda on: (sx.StateSharding({...: on()}), None),
            r"StateSharding for the argument at \.tree\.y, which",
        ),
        (
            lambda on: (on(), sx.StateSharding({...: on()})),
            r"StateSharding for the argument at \.x, which",
        ),
        (lambda on: ({"m": sx.Param(1.0), "y": on()}, None), r"at \.tree\.m, a \w+, is a Param"),
    ],
)
def test_unfitting_prefix_names_the_path(on: Sharding, declared: Any, message: str) -> None:
    run = sx.jit(lambda tree, x: tree["m"].a * x, in_shardings=declared(on))
    with pytest.raises(PrefixError, match=message):
        run({"m": _vector(), "y": jnp.ones(8)}, jnp.ones(8))


def test_filters_for_a_result_without_modules_are_refused(on: Sharding) -> None:
    with pytest.raises(PrefixError, match="out_shardings gives a StateSharding"):
        sx.jit(lambda m: m.a + 0, out_shardings=_by_type(on))(_vector())


# --- from one mesh to another ---


def _model_over_a_mesh(spec: Any) -> Any:
    """A layer over eight devices in a row, and the reference of its output on ones."""
    model = with_values(sx.nn.Linear(16, 16, rngs=sx.Rngs(0)))
    expected = np.ones((8, 16)) @ np.asarray(model.kernel) + np.asarray(model.bias)
    row = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sx.update(model, jax.device_put(sx.state(model), NamedSharding(row, spec)))
    return model, expected


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("spec", "declared"), [(P(), P()), (P("data"), P(("data", "model")))], ids=str
)
def test_model_moves_to_another_mesh(kind: AxisType, spec: Any, declared: Any) -> None:
    model, expected = _model_over_a_mesh(spec)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    places = NamedSharding(mesh, declared), NamedSharding(mesh, P("data"))

    def apply(model: Any, x: Any) -> Any:
        kernel, bias = model.kernel.value, model.bias.value
        if kind is AxisType.Explicit:
            kernel, bias = jax.sharding.reshard((kernel, bias), P())
        return x @ kernel + bias[None]

    with jax.set_mesh(mesh):
        result = sx.jit(apply, in_shardings=places)(model, np.ones((8, 16), np.float32))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert result.sharding.mesh == mesh
    assert model.kernel.sharding == NamedSharding(mesh, declared)


def test_writes_follow_models_between_meshes() -> None:
    model, expected = _model_over_a_mesh(P())
    meshes = [
        jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
        for shape, names in (((2, 4), ("data", "model")), ((8,), ("data",)))
    ]

    def step(model: Any, x: Any) -> Any:
        result = model(x)
        model.bias += 1
        return result

    x = np.ones((8, 16), np.float32)
    calls = [
        sx.jit(step, in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
        for mesh in meshes
    ]
    for number, (call, mesh) in enumerate(zip(calls * 2, meshes * 2, strict=True)):
        np.testing.assert_allclose(call(model, x), expected + number, rtol=1e-5)
        assert model.bias.sharding.mesh == model.kernel.sharding.mesh == mesh


# --- plain products over Explicit mesh axes ---


class _Plain(sx.Module):
    def __init__(self) -> None:
        self.wi = sx.Param(jnp.ones((16, 8)), axes=("embed", "mlp"))
        self.wo = sx.Param(jnp.ones((8, 16)), axes=("mlp", "embed"))

    def __call__(self, x: Any) -> Any:
        return x @ self.wi @ self.wo


@pytest.mark.parametrize("form", ["model", "list", "gradient"])
def test_ambiguous_products_name_params_and_rules(form: str) -> None:
    rules, model = {"batch": "data", "mlp": "model"}, _Plain()
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    sx.shard(model, mesh, rules)
    x = np.ones((8, 16), np.float32)
    step, argument, path = {
        "model": (sx.jit(lambda model, x: model(x)), model, r"\.model\.wi"),
        "list": (sx.jit(lambda models, x: models[0](x)), [model], r"\.models\[0\]\.wi"),
        "gradient": (
            sx.jit(lambda model, x: sx.grad(lambda model: model(x).sum())(model)),
            model,
            r"\.model\.wi",
        ),
    }[form]
    message = rf"(?s){path}, a Param: dimension 1 over 'model', by a rule \('mlp', 'model'\)"
    with jax.set_mesh(mesh), pytest.raises(Exception, match=message) as refused:
        step(argument, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert type(refused.value).__name__ == "ShardingTypeError"
    assert "'embed'" not in str(refused.value)
    # Both remedies.
    hidden = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data", "model")))
    with jax.set_mesh(mesh):
        names = {"jnp": jnp, "x": hidden, "w": model.wo.value, "spec": P("data")}
        product = run_advice(refused.value, "jnp.dot(x, w, out_sharding=spec)", names)
    np.testing.assert_array_equal(product, np.full((8, 16), 8.0))
    make = "jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)"
    auto = run_advice(refused.value, make, {"jax": jax})
    sx.shard(model, auto, rules)
    with jax.set_mesh(auto):
        np.testing.assert_array_equal(
            sx.jit(lambda model: model(x))(model), np.full((8, 16), 16.0 * 8)
        )


def test_result_is_laid_out_as_declared_after_a_trace_that_failed(auto_mesh: Mesh) -> None:
    failures = [ValueError("of the first trace")]
    layout = NamedSharding(auto_mesh, P("model"))
    variable = sx.Param(jnp.ones(8))

    @functools.partial(sx.jit, out_shardings=layout)
    def scaled(variable: sx.Param, x: Any) -> Any:
        if failures:
            raise failures.pop()
        return variable.value * x

    # Inside of a plain program, as part of which it is compiled.
    program = jax.jit(lambda x: scaled(variable, x))
    with pytest.raises(ValueError, match="of the first trace"):
        program(2.0)
    assert program(2.0).sharding == layout


# --- Variables that were moved between calls ---


@pytest.mark.parametrize(
    ("function", "options", "grows"),
    [
        (lambda v: v * 2, {}, False),
        (lambda v: v.__setitem__(..., v + 1), {}, True),
        (lambda v: v.__setitem__(..., v + 1), {"donate_argnums": 0}, True),
    ],
    ids=["reads", "writes", "donates"],
)
def test_variable_that_was_moved_away_is_moved_back(
    mesh: Mesh, on: Sharding, function: Any, options: Any, grows: bool
) -> None:
    v = sx.Param(jnp.zeros((8, 8)))
    step = sx.jit(function, in_shardings=on("data"), **options)

    for _ in range(3):
        v.value = jax.device_put(v.value, on(None, mesh.axis_names[1]))
        step(v)
        step(v)

    assert _is(v.value, on("data"))
    np.testing.assert_array_equal(v.value, np.full((8, 8), 6.0 if grows else 0.0))


def test_variable_returned_elsewhere_is_moved_back_at_every_call(mesh: Mesh, on: Sharding) -> None:
    elsewhere = on(None, mesh.axis_names[1])
    v = sx.Param(jnp.ones((8, 8)))
    function = sx.jit(lambda v: v, in_shardings=on("data"), out_shardings=elsewhere)

    for _ in range(4):
        assert function(v) is v
        assert _is(v.value, elsewhere)


def test_place_is_known_by_the_sharding_not_by_the_address(mesh: Mesh, on: Sharding) -> None:
    v = sx.Variable(jnp.zeros((8, 8)))
    double = sx.jit(lambda v: v * 2, in_shardings=on("data"))
    double(v)

    # An array that is dropped gives its address to the next one.
    for number in range(50):
        v.value = jnp.full((8, 8), float(number))
        v.value = jax.device_put(jnp.full((8, 8), number + 1.0), on(None, mesh.axis_names[1]))
        np.testing.assert_array_equal(double(v), np.full((8, 8), 2 * (number + 1.0)))
