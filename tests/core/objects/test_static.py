# SPDX-License-Identifier: Apache-2.0
"""Exact keys: equal only for values of the same types all the way down."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import shardax as sx
from shardax._core.graph.static import Static, exact_key
from tests.strategies import statics


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: Any
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class OtherFrozen:
    size: Any
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class ComparedInPart:
    size: int
    note: str = dataclasses.field(default="", compare=False)


class Pair(NamedTuple):
    first: Any
    second: Any


class Switch(enum.IntFlag, boundary=enum.KEEP):
    ON = 1


class Level(enum.IntEnum):
    LOW = 1


def scale_by(factor: Any) -> Callable[[Any], Any]:
    def scale(x: Any) -> Any:
        return x * factor

    return scale


def with_default(value: Any) -> Callable[..., Any]:
    def function(x: Any, y: Any = value, *, z: Any = value) -> Any:
        return x + y + z

    return function


def recursive() -> Callable[[int], int]:
    def countdown(n: int) -> int:
        return countdown(n - 1) if n else 0

    return countdown


class Identity:
    """Compares by identity, as objects do by default."""


# --- what must be told apart ---

TOLD_APART = [
    (1, True),
    (1, 1.0),
    (True, 1.0),
    (0, False),
    (0.0, -0.0),
    (1.0, 1 + 0j),
    (0j, complex(-0.0, 0.0)),
    ("1", b"1"),
    (np.float32(1), np.float64(1)),
    (np.int32(1), 1),
    (np.float32(0.0), np.float32(-0.0)),
    (Level.LOW, 1),
    (Switch(8), Switch(16)),
    (slice(0, 1), slice(False, True)),
    (slice(1), slice(2)),
    (Pair(1, 2), (1, 2)),
    (Frozen(1), OtherFrozen(1)),
    (ComparedInPart(1, "a"), ComparedInPart(1, "b")),
    (frozenset({1}), frozenset({True})),
    (jnp.float32, np.dtype("float32")),
    (None, ...),
    ((), None),
    (len, max),
]


@pytest.mark.parametrize(("one", "other"), TOLD_APART, ids=repr)
def test_values_of_different_type_or_sign_differ(one: Any, other: Any) -> None:
    assert exact_key(one) != exact_key(other)
    assert Static(one) != Static(other)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x,),
        lambda x: ((0, (x,)),),
        lambda x: Pair(x, 0),
        Frozen,
        lambda x: Frozen((x,)),
        lambda x: frozenset({("a", x)}),
        lambda x: functools.partial(max, x),
        lambda x: functools.partial(max, key=x),
        lambda x: functools.partial(functools.partial(max), x),
        scale_by,
        with_default,
        lambda x: (slice(None, x),),
        lambda x: functools.partial(scale_by(x), Frozen((x,))),
    ],
    ids=[
        "tuple",
        "nested tuple",
        "NamedTuple",
        "frozen dataclass",
        "tuple in dataclass",
        "frozenset",
        "partial",
        "partial keyword",
        "nested partial",
        "closure",
        "default",
        "slice",
        "all at once",
    ],
)
def test_difference_counts_at_every_depth(wrap: Callable[[Any], Any]) -> None:
    assert exact_key(wrap(1)) == exact_key(wrap(1))
    keys = [exact_key(wrap(x)) for x in (1, True, 1.0, 0.0, -0.0, 2)]
    assert len(set(keys)) == 6


@given(value=statics())
def test_key_is_reflexive_hashable_and_survives_copying(value: Any) -> None:
    key = exact_key(value)
    assert key == exact_key(value)
    assert hash(key) == hash(exact_key(value))
    assert exact_key(copy.deepcopy(value)) == key
    assert pickle.loads(pickle.dumps(Static(value))) == Static(value)


@given(one=statics(), other=statics())
def test_equal_keys_mean_equal_values_of_equal_type(one: Any, other: Any) -> None:
    if exact_key(one) == exact_key(other):
        assert type(one) is type(other)
        assert repr(one) == repr(other)  # equality would stumble over NaN


def test_nan_equals_itself_and_compiles_once() -> None:
    assert exact_key(float("nan")) == exact_key(float("nan"))
    assert exact_key((np.float32("nan"),)) == exact_key((np.float32("nan"),))


# --- functions ---


def test_exact_key_is_equal_for_same_def_run_twice() -> None:
    assert scale_by(2) is not scale_by(2)
    assert exact_key(scale_by(2)) == exact_key(scale_by(2))
    assert exact_key(recursive()) == exact_key(recursive())


def test_functions_that_do_different_things_have_different_keys() -> None:
    assert exact_key(scale_by(2)) != exact_key(scale_by(3))
    assert exact_key(scale_by(scale_by(2))) != exact_key(scale_by(scale_by(3)))
    assert exact_key(with_default(1)) != exact_key(with_default(2))
    assert exact_key(lambda x: x + 1) != exact_key(lambda x: x + 2)


def test_function_closing_over_nonstatic_value_equals_only_itself() -> None:
    array, variable, mutable = jnp.ones(2), sx.Param(1.0), [1]
    for content in (array, variable, mutable):
        function = scale_by(content)
        assert exact_key(function) == exact_key(function)
        assert exact_key(function) != exact_key(scale_by(content))


def test_function_with_unbound_cell_equals_only_itself() -> None:
    def make() -> Callable[[], Any]:
        def early() -> Any:
            return late

        keys.append(exact_key(early))
        late = 1
        return early

    keys: list[Any] = []
    make(), make()
    assert keys[0] != keys[1]


def test_function_with_attributes_equals_only_itself() -> None:
    one, other = scale_by(2), scale_by(2)
    one.mode = "fast"  # pyright: ignore[reportFunctionMemberAccess] (functions take attributes)
    assert exact_key(one) != exact_key(other)


def test_optimizers_with_equal_settings_have_equal_keys() -> None:
    def schedule(rate: float) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(rate, 10), weight_decay=0.1)

    assert exact_key(optax.adam(1e-3)) == exact_key(optax.adam(1e-3))
    assert exact_key(optax.adam(1e-3)) != exact_key(optax.adam(1e-2))
    assert exact_key(schedule(1e-3)) == exact_key(schedule(1e-3))
    assert exact_key(schedule(1e-3)) != exact_key(schedule(1e-2))


def test_initializers_made_twice_have_equal_keys() -> None:
    initializers = jax.nn.initializers
    assert exact_key(initializers.normal(0.1)) == exact_key(initializers.normal(0.1))
    assert exact_key(initializers.normal(0.1)) != exact_key(initializers.normal(0.2))


# --- what is no static value ---


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, {1}, ([1],), Frozen([1]), functools.partial(max, [1]), np.ones(2), bytearray()],
    ids=repr,
)
def test_unhashable_values_have_no_key(value: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        exact_key(value)


def test_objects_are_data_and_have_no_key() -> None:
    with pytest.raises(TypeError, match="Param is not a static value"):
        exact_key((sx.Param(1.0),))


def test_objects_of_plain_classes_equal_only_themselves() -> None:
    one = Identity()
    assert exact_key(one) == exact_key(one) != exact_key(Identity())


def test_static_shows_as_its_value() -> None:
    assert repr(Static("relu")) == "'relu'"
    assert Static(1) != 1
