# SPDX-License-Identifier: Apache-2.0
"""Structural changes inside a compiled function are carried back; caching follows the structure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from tests.core.transforms.examples import Box, Scale, Tied, values
from tests.strategies import assert_same_model


def _start() -> Box:
    model = Box()
    model.a = Scale(2)
    model.b = Scale(3, rate=2.0)
    model.layers = [Scale(1), Scale(1)]
    model.named = {"x": sx.Param(jnp.ones(1))}
    model.pair = (sx.Param(jnp.zeros(1)), "static")
    model.array = jnp.arange(2.0)
    model.width = 4
    return model


def _swap(model: Box) -> None:
    model.a, model.b = model.b, model.a


def _set_metadata(model: Box) -> None:
    model.a.factor.set_metadata(axes=("embed",), note=1)


def _write_new(model: Box) -> None:
    model.fresh = Scale(2)
    model.fresh.grow(2.0)
    model.fresh.child = model.a


def _two_new_that_share(model: Box) -> None:
    shared = sx.Param(jnp.ones(2))
    model.first, model.second = shared, shared


def _cycle_of_new(model: Box) -> None:
    model.left, model.right = Box(), Box()
    model.left.other, model.right.other = model.right, model.left


EDITS: dict[str, Callable[[Any], Any]] = {
    "add a Param": lambda m: setattr(m, "extra", sx.Param(m.a.factor * 3)),
    "add an array": lambda m: setattr(m, "extra", m.array + 1),
    "add a Module": lambda m: setattr(m, "extra", Scale(4)),
    "add Modules that refer to old ones": _write_new,
    "add one Variable by two names": _two_new_that_share,
    "add a cycle of new Modules": _cycle_of_new,
    "add static configuration": lambda m: setattr(m, "mode", ("train", 1)),
    "change static configuration": lambda m: setattr(m, "width", 4.0),
    "change static configuration below": lambda m: setattr(m.a, "rate", 9.0),
    "remove an attribute": lambda m: delattr(m, "width"),
    "remove a Variable": lambda m: delattr(m.a, "calls"),
    "remove an array": lambda m: delattr(m, "array"),
    "replace a Variable": lambda m: setattr(m.a, "factor", sx.BatchStat(m.a.factor * 2)),
    "replace a Module": lambda m: setattr(m, "a", Scale(5)),
    "swap": _swap,
    "refer to itself": lambda m: setattr(m, "self", m),
    "refer to its parent": lambda m: setattr(m.a, "parent", m),
    "tie": lambda m: setattr(m.layers[1], "factor", m.layers[0].factor),
    "untie": lambda m: setattr(m.a, "factor", sx.Param(m.a.factor + 0)),
    "append": lambda m: m.layers.append(Scale(6)),
    "pop": lambda m: m.layers.pop(0),
    "reverse": lambda m: m.layers.reverse(),
    "clear": lambda m: m.layers.clear(),
    "assign an item": lambda m: m.layers.__setitem__(0, m.a),
    "add an entry": lambda m: m.named.update(y=sx.Param(m.array * 2)),
    "remove an entry": lambda m: m.named.pop("x"),
    "new container": lambda m: setattr(m, "layers", [m.layers[1], {"z": m.layers[0]}]),
    "new tuple": lambda m: setattr(m, "pair", (m.pair[0], m.a, jnp.ones(1))),
    "metadata": _set_metadata,
    "keep a method": lambda m: setattr(m, "call", m.a.__call__),
    "record": lambda m: m.sow("seen", m.array),
    "pop by filter": lambda m: sx.pop(m.a, sx.Param),
    "modes": lambda m: m.set_attributes(rate=7.0),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit_inside_does_what_it_does_outside(name: str) -> None:
    outside, inside = _start(), _start()
    EDITS[name](outside)

    @sx.jit
    def edit(model: Box) -> None:
        EDITS[name](model)

    edit(inside)
    assert_same_model(inside, outside)


@pytest.mark.parametrize("name", ["append", "record", "swap", "add a Module", "metadata"])
def test_edits_inside_and_outside_may_alternate(name: str) -> None:
    outside, inside = _start(), _start()
    edit = sx.jit(lambda model: EDITS[name](model) and None)
    for _ in range(3):
        EDITS[name](outside)
        edit(inside)
        for model in (outside, inside):
            model.layers.append(sx.Variable(0))
    assert_same_model(inside, outside)


def test_edit_keeps_identity_of_remaining_objects() -> None:
    model = _start()
    a, b, layers, factor = model.a, model.b, model.layers, model.a.factor

    @sx.jit
    def edit(m: Box) -> None:
        _swap(m)
        m.layers.append(m.a)
        m.b.factor[...] = m.b.factor * 5

    edit(model)
    assert model.a is b and model.b is a
    assert model.layers is layers and model.b.factor is factor
    assert layers[2] is b and factor.value.tolist() == [5.0, 5.0]


def test_variables_untied_inside_are_untied_outside() -> None:
    model = Tied()

    @sx.jit
    def untie(m: Tied) -> None:
        m.head = sx.Param(m.embed * 2)

    untie(model)
    assert sx.find_duplicates(model) == []
    assert values(model) == {("embed",): 3.0, ("head",): 6.0}


def test_module_moves_from_one_argument_to_another() -> None:
    donor, taker = _start(), Box()
    moved = donor.a

    @sx.jit
    def move(donor: Box, taker: Box) -> Box:
        taker.a = donor.a
        del donor.a
        return taker

    assert move(donor, taker) is taker
    assert taker.a is moved and not hasattr(donor, "a")


def test_edits_in_nested_compiled_functions_reach_the_caller() -> None:
    @sx.jit
    def inner(model: Box) -> Scale:
        model.added = Scale(2)
        return model.added

    @sx.jit
    def outer(model: Box) -> None:
        inner(model).grow(1.0)
        model.layers.append(model.added)

    model = _start()
    outer(model)
    assert model.layers[2] is model.added
    assert model.added.factor.value.tolist() == [2.0, 2.0]


# --- what is traced again, and what is not ---


def _traced() -> tuple[Any, list[int]]:
    traces: list[int] = []

    @sx.jit
    def forward(model: Any, x: Any) -> Any:
        traces.append(1)
        return model(x)

    return forward, traces


def test_steady_calls_are_not_traced_again() -> None:
    forward, traces = _traced()
    model = Scale()
    for _ in range(5):
        forward(model, 1.0)
        model.factor[...] = model.factor * 2
    assert len(traces) == 1


def test_model_of_equal_structure_is_not_retraced() -> None:
    forward, traces = _traced()
    for _ in range(3):
        forward(Scale(), 1.0)
    forward(sx.clone(Scale()), 1.0)
    forward(copy.deepcopy(Scale()), 1.0)
    assert len(traces) == 1


def test_edit_of_other_model_causes_no_retrace() -> None:
    forward, traces = _traced()
    model, other = Scale(), Scale()
    forward(model, 1.0)
    forward(other, 1.0)
    for number in range(3):
        other.mode = number
        forward(model, 1.0)
    assert len(traces) == 1


def test_undone_edit_finds_its_program_again() -> None:
    forward, traces = _traced()
    model = Scale()
    for rate in (0.5, 0.25, 0.5, 0.25):
        model.rate = rate
        assert forward(model, 1.0).tolist() == [rate, rate]
    assert len(traces) == 2


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m, "rate", 0.25),
        lambda m: setattr(m, "rate", True),
        lambda m: setattr(m, "new", 1),
        lambda m: setattr(m, "factor", sx.BatchStat(m.factor.value)),
        lambda m: m.factor.set_metadata(note=1),
        lambda m: setattr(m, "alias", m.factor),
        lambda m: setattr(m.factor, "value", jnp.ones(3)),
        lambda m: setattr(m.factor, "value", jnp.ones(2, jnp.bfloat16)),
    ],
)
def test_different_structure_shape_or_dtype_retraces_once(edit: Any) -> None:
    forward, traces = _traced()
    model = Scale()
    forward(model, 1.0)
    edit(model)
    forward(model, 1.0)
    forward(model, 1.0)
    assert len(traces) == 2


def test_clear_cache_forgets_what_was_compiled() -> None:
    forward, traces = _traced()
    model = Scale()
    forward(model, 1.0)
    forward.clear_cache()
    forward(model, 1.0)
    assert (len(traces), int(model.calls)) == (2, 2)
