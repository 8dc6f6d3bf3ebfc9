# SPDX-License-Identifier: Apache-2.0
"""Failures of flax.nnx 0.12.8 in compiled functions and gradients, each with the right outcome.

The numbers are those of the project's list of reproduced defects; those of other areas (logical
rules, vmap, scan, boxes) are tested where these areas are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shardax as sx
from shardax.errors import ModuleError
from tests.advice import run_advice
from tests.core.transforms.examples import Box, Scale, Tied, values

P = PartitionSpec


def test_07_metadata_set_inside_jit_is_kept() -> None:
    model = Scale()

    @sx.jit
    def annotate(m: Scale) -> None:
        m.factor.set_metadata(axes=("embed",), note="inside")
        m.calls.set_metadata(tag="statistics")

    annotate(model)
    assert model.factor.axes == ("embed",) and dict(model.factor.metadata) == {"note": "inside"}
    assert list(sx.state(model, "statistics").flat()) == [("calls",)]


def test_08_structural_edits_inside_jit_are_kept() -> None:
    model, closed_over = Scale(), Scale()

    @sx.jit
    def edit(m: Scale) -> None:
        m.new, m.rate = sx.Param(m.factor * 2), 2.0
        del m.calls

    edit(model)
    assert values(model) == {("factor",): [1.0, 1.0], ("new",): [2.0, 2.0]} and model.rate == 2.0
    sx.jit(lambda: setattr(closed_over, "rate", 2.0))()  # as if it had been passed
    assert closed_over.rate == 2.0
    with pytest.raises(ModuleError):
        jax.jit(lambda m: setattr(m, "rate", 3.0))(model)


def test_09_args_info_of_a_compiled_is_reported() -> None:
    compiled = sx.jit(lambda m, x: m(x)).lower(Scale(), jnp.ones(2)).compile()
    (model, x), named = compiled.args_info
    assert {path: info.shape for path, info in model.flat().items()} == {
        ("factor",): (2,),
        ("calls",): (),
    }
    assert (x.shape, named) == ((2,), {})


def test_10_function_compiles_for_another_device() -> None:
    device = jax.devices()[3]
    model = Scale()
    there = SingleDeviceSharding(device)
    result = sx.jit(lambda m: m(2.0), in_shardings=there, out_shardings=there)(model)
    assert result.devices() == model.calls.devices() == {device}


def test_12_lowering_with_static_arguments_and_shardings(mesh: Mesh) -> None:
    declared = sx.StateSharding(
        {sx.Param: NamedSharding(mesh, P("data")), ...: NamedSharding(mesh, P())}
    )

    def run(model: Scale, times: int, x: Any) -> Any:
        return model(x) * times

    compiled = sx.jit(run, static_argnums=1, in_shardings=(declared, None)).lower(Scale(8), 3, 2.0)
    model = Scale(8)
    assert compiled.compile()(model, 2.0).tolist() == [3.0] * 8
    assert int(model.calls) == 1


def test_12_keywords_take_shardings_of_their_positions(mesh: Mesh) -> None:
    whole = NamedSharding(mesh, P())
    run = sx.jit(lambda model, x: model(x), in_shardings=(whole,))
    assert run(Scale(), x=2.0).tolist() == run(model=Scale(), x=2.0).tolist() == [1.0, 1.0]


def test_13_compiled_method_has_stages_on_instances() -> None:
    class Model(Scale):
        @sx.jit(donate_argnames="x")
        def run(self, x: Any) -> Any:
            return self(x)

    model = Model()
    assert model.run.lower(jnp.ones(2)).compile()(model, jnp.ones(2)).tolist() == [0.5, 0.5]
    assert model.run.trace(jnp.ones(2)).jaxpr is not None
    assert model.run.eval_shape(jnp.ones(2)).shape == (2,)
    model.run.clear_cache()
    assert int(model.calls) == 1


def test_20_plain_jax_transforms_keep_tied_parameters() -> None:
    model = Tied(3.0)

    def loss(m: Tied) -> Any:
        return m.embed * m.head

    plain, lifted = jax.grad(loss)(model), sx.grad(loss)(model)
    assert float(plain.embed) == float(plain.head) == float(lifted["embed"]) == 6.0
    assert plain.embed is plain.head
    returned = jax.jit(lambda m: m)(model)
    assert returned.embed is returned.head
    doubled = jax.tree.map(lambda x: 2 * x, model)
    assert doubled.embed is doubled.head and float(doubled.head) == 6.0


PLAIN_TRANSFORMS = {
    "jit": lambda run, model: jax.jit(run)(model),
    "grad": lambda run, model: jax.grad(lambda m: run(m).sum())(model),
    "vmap": lambda run, model: jax.vmap(run)(model),
    "checkpoint": lambda run, model: jax.checkpoint(run)(model),
    "linearize": jax.linearize,
    "eval_shape": jax.eval_shape,
}


@pytest.mark.parametrize("name", PLAIN_TRANSFORMS)
def test_20_write_under_plain_jax_transform_raises(name: str) -> None:
    model = Box()
    model.w = sx.Param(jnp.ones(2))

    def run(m: Box) -> Any:
        m.w[...] = m.w * 2
        return m.w * 1

    with pytest.raises(ModuleError) as caught:
        PLAIN_TRANSFORMS[name](run, model)
    assert model.w.value.tolist() == [1.0, 1.0]

    def run_writable(model: Box) -> Any:
        return run(run_advice(caught.value, "sx.mutable(model)", {"sx": sx, "model": model}))

    PLAIN_TRANSFORMS[name](run_writable, model)
    assert model.w.value.tolist() == [1.0, 1.0]


def test_21_new_optimizer_does_not_recompile(compilations: Any) -> None:
    import optax

    class Optimizer(sx.Module):
        def __init__(self, model: Scale) -> None:
            schedule = optax.cosine_decay_schedule(1e-2, 100)
            self.transformation = optax.chain(
                optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4)
            )
            self.state = sx.OptState(self.transformation.init(sx.state(model, sx.Param)))
            self.activation = lambda x: x * 2

    @sx.jit
    def train(model: Scale, optimizer: Optimizer) -> None:
        gradient = sx.grad(lambda m: m(1.0).sum())(model)
        params = sx.state(model, sx.Param)
        updates, optimizer.state.value = optimizer.transformation.update(
            gradient, optimizer.state.value, params
        )
        sx.update(model, jax.tree.map(jnp.add, params, updates))

    model = Scale()
    train(model, Optimizer(model))
    Optimizer(model)  # whose own operations JAX compiles
    compilations()
    for _ in range(3):  # functions made anew, so it is traced anew
        train(model, Optimizer(model))
    assert compilations() == 0 and int(model.calls) == 4


# --- aliasing ---


def test_aliases_in_arguments_and_results_are_allowed() -> None:
    model = Tied(3.0)

    @sx.jit
    def run(a: Tied, b: Any, c: Any) -> Any:
        c["v"][...] = c["v"] + 1
        return a, a.head, b, (c["v"], a)

    first, head, second, (variable, third) = run(model, model, {"v": model.embed})
    assert first is second is third is model
    assert head is variable is model.embed and float(model.head) == 4.0


def test_captured_variable_may_be_returned() -> None:
    captured = sx.Param(jnp.ones(2))
    assert sx.jit(lambda: captured)() is captured


def test_bound_method_can_be_compiled() -> None:
    model = Scale()
    assert sx.jit(model.__call__)(2.0).tolist() == [1.0, 1.0]


def test_copied_clone_can_be_donated() -> None:
    model = Scale()
    copy = sx.clone(model)
    run = sx.jit(lambda m: m.grow(1.0), donate_argnums=0)
    run(model)
    run(copy)
    assert values(model) == values(copy) == {("factor",): [2.0, 2.0], ("calls",): 0}


def test_lambdas_as_attributes_do_not_compile_again(compilations: Any) -> None:
    @sx.jit
    def run(model: Box) -> Any:
        return model.activation(model.x)

    def make() -> Box:
        model = Box()
        model.x, model.activation = jnp.ones(2), lambda x: x * 2
        return model

    assert run(make()).tolist() == [2.0, 2.0]
    compilations()
    for _ in range(3):  # functions made anew, so it is traced anew
        assert run(make()).tolist() == [2.0, 2.0]
    assert compilations() == 0


def test_jax_vmap_over_compiled_function_reads_model() -> None:
    model = Box()
    model.w = sx.Param(jnp.full(2, 3.0))
    run = sx.jit(lambda m, x: m.w * x)
    assert jax.vmap(run, in_axes=(None, 0))(model, jnp.arange(3.0)).tolist() == [
        [0.0, 0.0],
        [3.0, 3.0],
        [6.0, 6.0],
    ]


def test_compiled_program_uses_as_much_memory_as_jax() -> None:
    def run(m: Scale, x: Any) -> Any:
        m.factor += x
        return m.factor * 2

    model, x = Scale(1024), jnp.ones(1024)
    mine = sx.jit(run, donate_argnums=0).lower(model, x).compile().memory_analysis()
    plain = jax.jit(lambda w, n, x: ((w + x) * 2, w + x, n), donate_argnums=(0, 1))
    plain = plain.lower(model.factor.value, model.calls.value, x).compile().memory_analysis()
    for field in ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes"):
        assert getattr(mine, field) == getattr(plain, field)
