# SPDX-License-Identifier: Apache-2.0
"""Choices and loops inside other transforms, and what they leave behind: nothing."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ForeignMutationError, TransformError
from tests.core.transforms.examples import Mask, Scale


class Dropped(sx.Module):
    """Multiplies by a weight and a random mask, and counts."""

    def __init__(self) -> None:
        self.weight = sx.Param(jnp.arange(1.0, 4.0))
        self.count = sx.Variable(jnp.int32(0))
        self.rngs = sx.Rngs(0)
        self.mask = Mask(self.rngs)

    def __call__(self, x: Any) -> Any:
        self.count += 1
        return self.mask(self.weight * x)


def _by_cond(model: Dropped, x: Any) -> Any:
    return sx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: x, model, x)


def _by_switch(model: Dropped, x: Any) -> Any:
    return sx.switch(1, [lambda x: x, lambda x: model(x)], x)


def _by_fori(model: Dropped, x: Any) -> Any:
    return sx.fori_loop(0, 2, lambda i, x: model(x) + i, x)


def _by_bounded(model: Dropped, x: Any) -> Any:
    def body(carry: Any) -> Any:
        model, x = carry
        return model, model(x) + 1

    return sx.bounded_while_loop(
        lambda carry: carry[0].count < 2, body, (model, x), max_steps=3, differentiable="recompute"
    ).final[1]


KINDS = (_by_cond, _by_switch, _by_fori, _by_bounded)
every_kind = pytest.mark.parametrize("run", KINDS)


@every_kind
def test_remat_replays_the_same_random_numbers(run: Callable[..., Any]) -> None:
    plain, again = Dropped(), Dropped()
    x = jnp.ones(3)
    expected = sx.jit(sx.grad(lambda m: (run(m, x) ** 2).sum()))(plain)
    found = sx.jit(sx.grad(sx.remat(lambda m: (run(m, x) ** 2).sum())))(again)
    assert found["weight"].tolist() == expected["weight"].tolist()
    assert int(again.count) == int(plain.count) > 0
    assert int(again.rngs.default.count) == int(plain.rngs.default.count) > 0


@every_kind
def test_jit_changes_nothing(run: Callable[..., Any]) -> None:
    plain, compiled = Dropped(), Dropped()
    x = jnp.ones(3)
    np.testing.assert_allclose(sx.jit(run)(compiled, x), run(plain, x), rtol=1e-6)
    assert int(compiled.count) == int(plain.count)
    assert int(compiled.rngs.default.count) == int(plain.rngs.default.count)


@every_kind
def test_on_shards_every_shard_has_its_own_state(run: Callable[..., Any], auto_mesh: Any) -> None:
    lanes = sx.vmap(lambda _: Dropped(), axis_size=2)(jnp.zeros(2))
    expected = sx.clone(lanes)
    xs = jnp.arange(1.0, 7.0).reshape(2, 3)

    def one(model: Dropped, x: Any) -> Any:
        return sx.vmap(run)(model, x)

    sharded = sx.shard_map(
        one, mesh=auto_mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    np.testing.assert_allclose(sx.jit(sharded)(lanes, xs), sx.jit(one)(expected, xs), rtol=1e-6)
    assert lanes.count.value.tolist() == expected.count.value.tolist()


def test_cond_takes_only_operands_its_branches_use() -> None:
    model = sx.List([Scale(2), Scale(7)])

    def run(model: Any) -> Any:
        return sx.cond(model[0].calls > 3, lambda m: m[0](1.0), lambda m: m[0].factor.value, model)

    jaxpr = sx.jit(run).trace(model).jaxpr
    (choice,) = [step for step in jaxpr.eqns if step.primitive.name == "cond"]
    assert sorted(str(value.aval) for value in choice.invars) == [
        "float32[2]", "int32[]", "int32[]"
    ]  # fmt: skip


class Partly(sx.Module):
    """Multiplies by one of two weights; the other has dimensions of size 11."""

    def __init__(self) -> None:
        self.weight = sx.Param(jnp.arange(1.0, 4.0))
        self.unused = sx.Param(jnp.ones((11, 11)))
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return jnp.sin(self.weight * x)


def _while(model: Partly, x: Any) -> Any:
    return sx.while_loop(lambda x: x.sum() < 9, lambda x: x + model(x) ** 2, x)


def _fori(model: Partly, x: Any) -> Any:
    return sx.fori_loop(0, 3, lambda i, x: model(x) + i, x)


def _scan(model: Partly, x: Any) -> Any:
    def step(x: Any, row: Any, model: Partly) -> Any:
        return model(x) + row, row

    run = sx.scan(step, in_axes=(sx.Carry, 0, None))
    return run(x, jnp.ones((4, 3)), model)[0]


def _scan_of_closure(model: Partly, x: Any) -> Any:
    return sx.scan(lambda x, row: (model(x) + row, row))(x, jnp.ones((4, 3)))[0]


def _bounded(kind: Any) -> Callable[..., Any]:
    def run(model: Partly, x: Any) -> Any:
        return sx.bounded_while_loop(
            lambda x: x.sum() < 9, model, x, max_steps=4, differentiable=kind
        ).final

    return run


def _taken_in(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of all that goes into conditionals and loops of a program, at any depth."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("cond", "while", "scan"):
            found += [value.aval.shape for value in equation.invars]
        for param in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(param, "jaxpr", param)
            found += _taken_in(inner) if hasattr(inner, "eqns") else []
    return found


TAKEN_IN = {
    "cond": _by_cond,
    "switch": _by_switch,
    "while": _while,
    "fori": _fori,
    "scan": _scan,
    "closure": _scan_of_closure,
    "no": _bounded("no"),
    "store": _bounded("store"),
    "recompute": _bounded("recompute"),
    "scan in cond": lambda m, x: sx.cond(x.sum() > 0, _scan, lambda m, x: x, m, x),
    "cond in scan": lambda m, x: sx.scan(
        lambda x, _, m: (_by_cond(m, x), None), in_axes=(sx.Carry, 0, None)
    )(x, jnp.ones(4), m)[0],
    "while in fori": lambda m, x: sx.fori_loop(0, 3, lambda i, x: _while(m, x), x),
}


ELEMENTS = sx.StateAxes({sx.Param: None, ...: 0})  # weights are shared, counts are not


@functools.cache
def _partly(mapped: bool) -> Partly:
    """A model, or two with shared weights: programs are traced with it, but not run."""
    return sx.vmap(lambda _: Partly(), out_axes=ELEMENTS)(jnp.ones(2)) if mapped else Partly()


# Every construct called; what surrounds it does not depend on the construct, so both take turns.
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "called") for name in TAKEN_IN),
        *zip(TAKEN_IN, itertools.cycle(["mapped", "on shards"]), strict=False),
    ],
)
def test_control_flow_excludes_unused_variables(name: str, form: str, auto_mesh: Any) -> None:
    run, model, x = TAKEN_IN[name], _partly(form == "mapped"), jnp.ones(3)
    if form == "mapped":
        run = sx.vmap(run, in_axes=(ELEMENTS, 0))
        x = jnp.ones((2, 3))
    elif form == "on shards":
        run = sx.shard_map(run, mesh=auto_mesh, in_specs=P(), out_specs=P())
    programs = [sx.make_jaxpr(run)(model, x)]
    if not name.startswith(("while", "no")):  # which have no reverse mode
        programs.append(sx.make_jaxpr(sx.grad(lambda m, x: run(m, x).sum()))(model, x))
    for program in programs:
        shapes = _taken_in(program.jaxpr)
        # A choice that differs between batch elements is a selection of what both branches return.
        assert shapes or (name, form) == ("cond", "mapped")
        assert not [shape for shape in shapes if 11 in shape]


def test_shard_dependent_cond_cannot_write_replicated_state(auto_mesh: Any) -> None:
    model = Scale(1)

    def add(model: Scale) -> None:
        model.calls += 1

    def run(model: Scale, x: Any) -> Any:
        sx.cond(x.sum() > 0, add, lambda model: None, model)
        return x

    sharded = sx.shard_map(run, mesh=auto_mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    with pytest.raises(TransformError, match=r"\.model\.calls"):
        sharded(model, jnp.array([1.0, -1.0]))
    assert int(model.calls) == 0


@every_kind
def test_captured_state_cannot_be_written_under_vmap(run: Callable[..., Any]) -> None:
    model = Dropped()
    with pytest.raises(ForeignMutationError, match=r"model\.(count|rngs)"):
        sx.vmap(lambda x: run(model, x))(jnp.ones((2, 3)))
    assert int(model.count) == 0


@pytest.mark.usefixtures("collecting_only_what_is_new")
@every_kind
@pytest.mark.parametrize("compiled", [False, True])
def test_dropped_model_is_garbage_collected(run: Callable[..., Any], compiled: bool) -> None:
    model = Dropped()
    transformed = sx.jit(run) if compiled else run
    transformed(model, jnp.ones(3))
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None
