# SPDX-License-Identifier: Apache-2.0
"""Initialisation is compiled once, for what it depends on, and keeps nothing alive."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionCheckError
from shardax.partition import initialization as init_programs
from shardax.partition import with_logical_partitioning

RULES = sx.Rules({"embed": None, "mlp": "model"})
UNIFORM = jax.nn.initializers.uniform()


class Counted:
    """An initializer that counts how often it is traced; also one that is a method."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, key: Any, shape: Any = (4, 8), *, scale: Any = 1.0, make: Any = None) -> Any:
        self.traces += 1
        value = UNIFORM(key, shape) * scale
        return with_logical_partitioning(make or (lambda *_: value), ("embed", "mlp"))(key, shape)

    def method(self, key: Any) -> Any:
        """The same."""
        return self(key)


def plain(counted: Counted) -> Callable[..., Any]:
    """A function, for what is found by the identity of one."""
    return lambda *args, **kwargs: counted(*args, **kwargs)


def keys() -> list[jax.Array]:
    """Two different keys."""
    return [jax.random.key(seed) for seed in range(2)]


@pytest.mark.parametrize(
    "take",
    [plain, lambda c: c, lambda c: functools.partial(c, scale=2.0), lambda c: c.method],
    ids=["function", "instance", "partial", "method"],
)
def test_second_call_runs_the_same_program(take: Any, mesh: Mesh) -> None:
    counted = Counted()
    init = take(counted)
    first, again = (sx.initialise(init, key, mesh=mesh, rules=RULES) for key in keys())
    made = counted.traces
    third = sx.initialise(init, keys()[0], mesh=mesh, rules=RULES)
    assert counted.traces == made
    assert first == third and first != again
    assert third.value.sharding == NamedSharding(mesh, P(None, "model"))


@dataclasses.dataclass(frozen=True, slots=True)
class Filled:
    """An initializer that equals another of the same value, and takes no weak reference."""

    value: float

    def __call__(self, key: jax.Array, traces: list[int] = []) -> Any:  # noqa: B006 (counts)
        traces.append(1)
        return sx.Partitioned(self.value * UNIFORM(key, (8,)), ("model",))


def test_equal_initializers_without_weak_references_share_programs(auto_mesh: Mesh) -> None:
    first, again = (sx.initialise(Filled(1.0), key, mesh=auto_mesh) for key in keys())
    traces = Filled.__call__.__defaults__[0]
    count = len(traces)
    assert not np.array_equal(first.value, again.value)
    twice = sx.initialise(Filled(2.0), keys()[1], mesh=auto_mesh)
    np.testing.assert_array_equal(twice.value, 2 * again.value)
    assert len(traces) == 2 * count


def test_bound_methods_reuse_their_compiled_program(auto_mesh: Mesh) -> None:
    counted = Counted()
    for key in keys():
        sx.initialise(counted.method, key, mesh=auto_mesh, rules=RULES)
    assert counted.traces == 2  # once for the shapes, once for the program


def test_initialise_compiles_again_for_what_the_program_depends_on(auto_mesh: Mesh) -> None:
    counted = Counted()
    init, key = plain(counted), jax.random.key(0)
    other_mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])

    def made(*args: Any, mesh: Mesh = auto_mesh, rules: Any = RULES, **kwargs: Any) -> Any:
        before = counted.traces
        box = sx.initialise(init, *args, mesh=mesh, rules=rules, **kwargs)
        return counted.traces > before, box.value.sharding.spec, box.value.shape

    calls: list[Callable[[], Any]] = [
        lambda: made(key),
        lambda: made(key, (4, 16)),
        lambda: made(key, scale=2),
        lambda: made(key, scale=2.0),
        lambda: made(key, scale=np.full((1, 1), 2.0)),
        lambda: made(key, scale=np.ones((4, 8), np.float32)),
        lambda: made(key, mesh=other_mesh),
        lambda: made(key, rules={"embed": "model"}),
        lambda: made(key, make=UNIFORM),
    ]
    split, first = P(None, "model"), [True] * len(calls)
    assert [call()[0] for call in calls] == first
    assert [call() for call in calls] == [
        (False, split, (4, 8)),
        (False, split, (4, 16)),
        *[(False, split, (4, 8))] * 5,
        (False, P("model", None), (4, 8)),
        (False, split, (4, 8)),
    ]


def test_arrays_that_differ_in_their_numbers_are_inputs(auto_mesh: Mesh) -> None:
    init = plain(Counted())
    scales = [np.full((1, 1), number, np.float32) for number in (1, 2)]
    one, two = (
        sx.initialise(init, keys()[0], scale=scale, mesh=auto_mesh, rules=RULES) for scale in scales
    )
    assert np.array_equal(2 * np.asarray(one.value), two.value)


def test_streams_advance_and_modules_enter_by_structure(auto_mesh: Mesh) -> None:
    traces = []

    def init(rngs: sx.Rngs, old: Any) -> Any:
        traces.append(len(old.layers))
        drawn = jax.random.normal(rngs(), (8,)) + sum(layer.value for layer in old.layers)
        return {"w": sx.Param(drawn, axes=("mlp",))}

    class Old(sx.Module):
        def __init__(self, depth: int) -> None:
            self.layers = [sx.Param(jnp.full(8, i + 1.0)) for i in range(depth)]

    def value(rngs: sx.Rngs, depth: int) -> Any:
        return sx.initialise(init, rngs, Old(depth), mesh=auto_mesh, rules=RULES)["w"].value

    rngs, alone = sx.Rngs(0), sx.Rngs(0)
    for depth, offset in ((1, 1.0), (1, 1.0), (2, 3.0)):
        expected = jax.random.normal(alone(), (8,)) + offset
        assert np.allclose(value(rngs, depth), expected)
    assert traces == [1, 1, 2, 2]


def test_initialise_reads_anew_what_a_function_closes_over(auto_mesh: Mesh) -> None:
    scale = sx.Param(jnp.float32(1))

    def init(key: jax.Array) -> Any:
        return sx.Partitioned(UNIFORM(key, (8,)) * scale.value, ("model",))

    one = sx.initialise(init, jax.random.key(0), mesh=auto_mesh)
    scale[...] = jnp.float32(2)
    two = sx.initialise(init, jax.random.key(0), mesh=auto_mesh)
    scale = sx.Param(jnp.float32(3))
    three = sx.initialise(init, jax.random.key(0), mesh=auto_mesh)
    assert np.array_equal(2 * np.asarray(one.value), two.value)
    assert np.allclose(3 * np.asarray(one.value), three.value)


def initialise_twice(mesh: Mesh) -> list[weakref.ref[Any]]:
    """Initialises by functions that close over models; returns references to all of them."""
    model = sx.nn.Linear(4, 8, rngs=sx.Rngs(0))
    old = sx.nn.Linear(4, 8, rngs=sx.Rngs(1))

    def init(key: jax.Array, make: Any, old: Any) -> Any:
        return make(key, model.kernel.value + old.kernel.value)

    def make(key: jax.Array, value: Any) -> Any:
        return sx.Partitioned(value * model.kernel.value, (None, "model"))

    for key in keys():
        sx.initialise(init, key, make, old, mesh=mesh)
    return [weakref.ref(item) for item in (model, old, init, make)]


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_programs_keep_neither_functions_nor_models_alive(auto_mesh: Mesh) -> None:
    gc.collect()
    before = len(init_programs._programs)
    gone = initialise_twice(auto_mesh)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert len(init_programs._programs) == before


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_program_ends_with_any_of_its_functions(auto_mesh: Mesh) -> None:
    gc.collect()
    before = len(init_programs._programs)
    init = plain(Counted())
    for _ in range(3):
        make = lambda key, shape: UNIFORM(key, shape)  # noqa: E731
        sx.initialise(init, jax.random.key(0), make=make, mesh=auto_mesh, rules=RULES)
    gc.collect()
    assert len(init_programs._programs) == before + 1


def test_initialise_remembers_a_limited_number_of_programs(
    auto_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_programs, "MAX_PROGRAMS", 2)
    counted = Counted()
    init = plain(counted)
    for width in (8, 12, 16, 12):
        sx.initialise(init, jax.random.key(0), (4, width), mesh=auto_mesh, rules=RULES)
    assert len(init_programs._programs) == 2 and counted.traces == 6
    sx.initialise(init, jax.random.key(0), (4, 8), mesh=auto_mesh, rules=RULES)
    assert counted.traces == 8


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_unhashable_arguments_and_module_methods_are_not_cached(auto_mesh: Mesh) -> None:
    class Width:
        __hash__ = None  # pyright: ignore[reportAssignmentType] (the point of the test)

    class Maker(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(jnp.float32(3))

        def make(self, key: jax.Array, width: Any) -> Any:
            return sx.Partitioned(jnp.ones(8) * self.scale.value, ("model",))

    gc.collect()
    before = len(init_programs._programs)
    box = sx.initialise(Maker().make, jax.random.key(0), Width(), mesh=auto_mesh)
    assert box == sx.Partitioned(jnp.full(8, 3.0), ("model",))
    ones = lambda width: sx.Partitioned(jnp.ones(8), ("model",))  # noqa: E731
    assert sx.initialise(ones, Width(), mesh=auto_mesh) == ones(None)
    assert len(init_programs._programs) == before


def test_invalid_layout_is_not_cached(auto_mesh: Mesh) -> None:
    init = plain(Counted())
    for _ in range(2):
        with pytest.raises(PartitionCheckError):
            sx.initialise(init, jax.random.key(0), (4, 6), mesh=auto_mesh, rules=RULES)
    assert sx.initialise(init, jax.random.key(0), mesh=auto_mesh, rules=RULES).names is not None
