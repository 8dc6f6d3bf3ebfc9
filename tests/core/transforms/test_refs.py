# SPDX-License-Identifier: Apache-2.0
"""Variables that hold a ``jax.Ref``: written in place by JAX, like any Variable by shardax."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax import nn, train
from shardax.errors import (
    DonationError,
    PartitionCheckError,
    PrefixError,
    TransformError,
    VariableValueError,
)
from tests.advice import run_advice
from tests.strategies import Node


def _model(ref: bool = True) -> Node:
    model = Node()
    model.w = sx.Param(jnp.array([1.0, 2.0]), axes=("embed",))
    model.tied, model.scale = model.w, sx.Variable(jnp.float32(3))
    return sx.with_vars(model, ref=ref)


def _is_ref(variable: Any) -> bool:
    return isinstance(variable._value, jax.Ref)


def _step(model: Any, x: Any) -> Any:
    model.w[0] = model.w[0] + x
    model.scale[...] = model.scale * 2
    return (model.tied * model.scale).sum()


def _scanned(model: Any, x: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total + _step(model, x), None), 0.0, jnp.full(2, x))[0]


def _branched(model: Any, x: Any) -> Any:
    return jax.lax.cond(x > 0, lambda: _step(model, x), lambda: _step(model, 2 * x))


@pytest.mark.parametrize("body", [_step, _scanned, _branched])
def test_plain_jax_writes_in_place(body: Any) -> None:
    model, arrays, ref = _model(), _model(ref=False), jax.new_ref(jnp.array([1.0, 2.0]))
    model.w.value = ref
    for _ in range(2):
        count = 2 if body is _scanned else 1
        expected = [_step(arrays, jnp.float32(1)) for _ in range(count)]
        result = jax.jit(body)(model, jnp.float32(1))
        assert float(result) == float(sum(expected))
    assert ref[...].tolist() == model.tied.tolist() == arrays.w.tolist()
    assert _is_ref(model.w) and model.w.axes == ("embed",) and model.w.shape == (2,)


@settings(max_examples=12)
@given(
    st.sampled_from(["jit", "scan", "cond", "loop", "remat", "grad", "vmap", "closure", "eager"])
)
def test_shardax_treats_refs_as_any_variable(name: str) -> None:
    def run(model: Any) -> Any:
        x = jnp.float32(1)
        if name == "scan":
            return sx.scan(lambda c, x: (c + _step(model, x), x))(0.0, jnp.ones(2))[0]
        if name == "cond":
            return sx.cond(x > 0, _step, _step, model, x)
        if name == "loop":
            return sx.fori_loop(0, 3, lambda i, total: total + _step(model, x), 0.0)
        if name == "grad":
            return sx.grad(_step, argnums=(0, 1))(model, x)
        if name == "vmap":
            axes = sx.StateAxes({sx.Param: 0, ...: None})
            return sx.vmap(lambda model, x: model.w * x * model.scale, in_axes=(axes, None))(
                model, x
            )
        if name == "closure":
            return sx.jit(lambda x: _step(model, x))(x)
        around = {"jit": sx.jit, "remat": sx.remat}.get(name, lambda f: f)
        return around(_step)(model, x)

    results = []
    for ref in (True, False):
        model = _model(ref=ref)
        outputs = run(model), run(model)
        results.append(jax.tree.map(np.asarray, (outputs, sx.state(model).flat())))
        assert _is_ref(model.w) is _is_ref(model.scale) is ref
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_training_updates_refs_in_place() -> None:
    layers = [sx.with_vars(nn.Linear(2, 1, rngs=sx.Rngs(0)), ref=ref) for ref in (True, False)]

    @sx.jit
    def step(layer: Any, optimizer: Any) -> None:
        optimizer.update(sx.grad(lambda layer: (layer(jnp.ones(2)) ** 2).sum())(layer))

    for layer in layers:
        optimizer = train.Optimizer(layer, optax.adam(0.1))
        for _ in range(2):
            step(layer, optimizer)
    assert layers[0].kernel.tolist() == layers[1].kernel.tolist()
    assert _is_ref(layers[0].kernel)


def test_refs_do_not_slow_down_or_retrace_calls() -> None:
    traces: list[int] = []

    @sx.jit
    def step(model: Any) -> None:
        traces.append(1)
        _step(model, 1.0)

    model = _model()
    ref = model.w._value
    for _ in range(3):
        step(model)
    assert (len(traces), model.w._value is ref, ref[...].tolist()) == (1, True, [4.0, 2.0])


def test_states_and_copies_are_independent_of_the_ref() -> None:
    model = _model()
    state, frozen, clone = sx.state(model), sx.freeze(model), sx.clone(model)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), sx.merge(*sx.split(model))]
    sx.update(model, {"w": jnp.zeros(2)})
    assert _is_ref(model.w) and model.w.tolist() == [0.0, 0.0]
    assert state["w"].tolist() == frozen.w.tolist() == clone.w.tolist() == [1.0, 2.0]
    assert [other.w.tolist() for other in others] == [[1.0, 2.0]] * 3
    assert _is_ref(clone.w) and clone.w is clone.tied and not _is_ref(others[1].w)


def test_with_vars_changes_chosen_variables_alone() -> None:
    model = _model(ref=False)
    new = sx.with_vars(model, ref=True, only=sx.Param)
    assert (_is_ref(new.w), new.tied is new.w, new.scale is model.scale) == (True, True, True)
    back = sx.with_vars(new, ref=False)
    assert not _is_ref(back.w) and back.w.axes == ("embed",) and back.w.tolist() == [1.0, 2.0]
    model.pair = sx.Variable((jnp.ones(1), jnp.ones(1)))
    with pytest.raises(VariableValueError, match=r"holds one array, and the Variable at \.pair"):
        sx.with_vars(model, ref=True)


def test_ref_variable_refuses_what_a_ref_cannot_do(auto_mesh: Mesh) -> None:
    model = _model()
    with pytest.raises(DonationError, match=r"The Param at \.model\.w holds a jax\.Ref") as caught:
        sx.jit(lambda model: model.w.sum(), donate_argnums=0)(model)
    names: dict[str, Any] = {"sx": sx, "model": model, "mesh": auto_mesh}
    arrays = run_advice(caught.value, "sx.with_vars(model, ref=False)", names)
    assert not _is_ref(arrays.w)
    with pytest.raises(VariableValueError, match=r"jax\.Ref of float32\[2\].*take float32\[3\]"):
        model.w.value = jnp.ones(3)
    with pytest.raises(VariableValueError, match="or a pytree of arrays, but was given a pytree"):
        sx.Variable((jax.new_ref(jnp.ones(2)),))
    with pytest.raises(PartitionCheckError, match=r"\.w: holds a jax\.Ref, which stays") as caught:
        sx.shard(model, auto_mesh, {"embed": "data"})
    names["model"] = nn.Linear(2, 2, rngs=sx.Rngs(0))
    placed = run_advice(caught.value, "sx.with_vars(sx.shard(model, mesh), ref=True)", names)
    assert _is_ref(placed.kernel)
    over = NamedSharding(auto_mesh, PartitionSpec("data"))
    with pytest.raises(PrefixError, match="which stays where it is, and its entry is"):
        sx.jit(
            lambda model: model.w.sum(),
            in_shardings=(sx.StateSharding({sx.Param: over, ...: None}),),
        )(model)
    model.other = sx.Param(model.w._value)
    for transform in (sx.jit, sx.grad):
        with pytest.raises(TransformError, match=r"\.w and .*\.other hold one jax\.Ref"):
            transform(lambda model: model.w.sum())(model)


def test_with_vars_freezes_and_thaws() -> None:
    model = _model(ref=False)
    frozen = sx.with_vars(model, mutable=False, only=sx.Param)
    assert (frozen.w.variable_type, frozen.tied is frozen.w, frozen.scale is model.scale) == (
        sx.Param,
        True,
        True,
    )
    again = sx.with_vars(frozen, mutable=True, ref=True, only=sx.Param)
    assert (type(again.w), _is_ref(again.w), again.tied is again.w) == (sx.Param, True, True)
    assert sx.with_vars(again, mutable=False).w == frozen.w
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "must be given, or mutable="),
        ({"mutable": False, "ref": True}, "ref=True must be None with mutable=False"),
        ({"mutable": 1}, "mutable=1 must be True, False or None"),
    )
    for options, match in cases:
        with pytest.raises(VariableValueError, match=match):
            sx.with_vars(model, **options)
    with pytest.raises(VariableValueError, match=r"value at \.w is frozen") as caught:
        sx.with_vars(frozen, ref=True)
    names: dict[str, Any] = {"sx": sx, "model": frozen}
    advice = "sx.with_vars(model, mutable=True, ref=True)"
    assert _is_ref(run_advice(caught.value, advice, names).w)


@pytest.mark.parametrize("transform", [sx.grad, sx.value_and_grad, sx.vjp, sx.remat])
def test_captured_ref_is_written_inside_of_a_transform(transform: Any) -> None:
    counter = sx.Variable(jax.new_ref(jnp.float32(0)))

    def step(x: Any) -> Any:
        counter[...] = counter + 1
        return x * 2

    if transform is sx.vjp:
        transform(step, 1.0)
    else:
        transform(step)(1.0)
    assert float(counter) == 1.0
