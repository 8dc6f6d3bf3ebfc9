# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: random models and random edits of them, for laws about structure.

A *random model* is an object graph of a few Modules and Variables, any of which may be reached by
several paths or through a cycle, with containers, arrays and static values of many types. An
*edit* is a description of one change, applied by ``apply_edit``; it names its targets by position,
so that the same edit does the same to any two models of equal structure.

Hypothesis looks into every strategy that it meets for the first time, which takes longer than to
draw from it. So each is made once, and what an example has of its own (which Modules there are) is
drawn as a ``Pick`` and put in afterwards.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import shardax as sx
from shardax._core.graph.flatten import walk_objects

# --- what models are made of (at module level, so that pickle finds it) ---


class Node(sx.Module):
    """A Module without attributes of its own."""


class OtherNode(sx.Module):
    """Another class of Module, with a method that can be an attribute elsewhere."""

    def act(self, x: Any) -> Any:
        """Returns its argument."""
        return x


class Custom(sx.Param):
    """A Variable type of the user's own."""


class Pair(NamedTuple):
    """A NamedTuple that may hold anything."""

    first: Any
    second: Any


class Color(enum.Enum):
    """An enumeration."""

    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Frozen configuration."""

    width: Any
    name: str = "a"


def activation(x: Any) -> Any:
    """A function as configuration."""
    return x


VARIABLE_TYPES = (sx.Variable, sx.Param, sx.BatchStat, sx.Cache, sx.OptState, Custom)
NAMES = ("a", "kernel", "layers", "b2", "_hidden")

# --- static values ---

_ATOMS = st.one_of(
    st.integers(-2, 2),
    st.booleans(),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf"), 1j, b"x", None, ...]),
    st.sampled_from(["relu", "", "0", "1"]),
    st.sampled_from([Color.RED, Color.BLUE, int, np.dtype("float32"), jnp.bfloat16]),
    st.sampled_from([activation, jax.nn.gelu, functools.partial(activation, 1), range(2)]),
    st.sampled_from([slice(0, 1), frozenset({1, "a"})]),
)


@functools.cache
def statics() -> st.SearchStrategy[Any]:
    """Hashable configuration, nested in tuples, frozen dataclasses and partials."""
    return st.recursive(
        _ATOMS,
        lambda inner: st.one_of(
            st.tuples(inner, inner),
            st.builds(Config, inner),
            st.builds(Pair, inner, inner),
            st.builds(lambda x: functools.partial(activation, x), inner),
        ),
        max_leaves=3,
    )


# --- data ---


_FLAGS = st.booleans()
_SHAPES = st.sampled_from([(), (2,), (2, 3), (0,)])
_DTYPES = st.sampled_from([np.float32, np.int32, np.uint32, np.bool_, jnp.bfloat16])
_OFFSETS = st.integers(0, 3)


@functools.cache
@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """A small NumPy or JAX array of a random dtype and shape."""
    shape, dtype, offset = draw(_SHAPES), draw(_DTYPES), draw(_OFFSETS)
    array = (np.arange(np.prod(shape, dtype=int)) + offset).reshape(shape).astype(dtype)
    return jnp.asarray(array) if draw(_FLAGS) else array


def _lazy(seed: int, shape: tuple[int, ...]) -> sx.Init:
    return sx.Init(jax.nn.initializers.normal(), shape, rngs=sx.Rngs(seed))


@functools.cache
def values() -> st.SearchStrategy[Any]:
    """What a Variable may hold: arrays, numbers, lazy values, random keys, pytrees."""
    array = arrays()
    return st.one_of(
        array,
        array,
        st.floats(0, 1, width=32),
        st.builds(_lazy, st.integers(0, 2), st.sampled_from([(), (2,), (2, 2)])),
        st.builds(jax.random.key, st.integers(0, 2)),
        st.fixed_dictionaries({"m": array, "v": st.tuples(array)}),
        st.lists(array, max_size=2),
    )


_TYPES = st.sampled_from(VARIABLE_TYPES)
_TAGS = st.sampled_from(["slow", "fast"])


@functools.cache
@st.composite
def variables(draw: st.DrawFn) -> sx.Variable[Any]:
    """A Variable of a random type with a random value, axes and metadata."""
    variable = draw(_TYPES)(draw(values()))
    if draw(_FLAGS) and hasattr(variable._value, "ndim"):
        variable.set_metadata(axes=("embed", "mlp", None)[: variable.ndim])
    if draw(_FLAGS):
        variable.set_metadata(tag=draw(_TAGS), extra=draw(statics()))
    return variable


# --- models ---


@dataclasses.dataclass(frozen=True)
class Pick:
    """Stands for an object of the model that is being drawn: the one at a position, modulo."""

    kind: str
    position: int


_MODULE_TYPES = st.sampled_from([Node, OtherNode])
_ATTRIBUTES = st.lists(st.sampled_from(NAMES), max_size=4)


@functools.cache
@st.composite
def models(draw: st.DrawFn, *, max_modules: int = 4, max_variables: int = 4) -> Node:
    """A random object graph; the root is a ``Node``."""
    modules: list[sx.Module] = [Node()]
    for _ in range(draw(st.integers(0, max_modules - 1))):
        modules.append(draw(_MODULE_TYPES)())
    shared = [draw(variables()) for _ in range(draw(st.integers(0, max_variables)))]
    for module in modules:
        for position, name in enumerate(draw(_ATTRIBUTES)):
            setattr(module, f"{name}{position}", _put_in(draw(children()), modules, shared))
    root = modules[0]
    assert isinstance(root, Node)
    if len(modules) > 1 and draw(_FLAGS):
        root.child = modules[1]
    return root


@functools.cache
def children() -> st.SearchStrategy[Any]:
    """What an attribute may be: a ``Pick`` of any object, other data, containers, configuration."""
    positions = st.integers(0, 7)
    parts = [
        *(st.builds(Pick, st.just(kind), positions) for kind in ("module", "variable")),
        arrays(),
        statics(),
        variables(),
        st.builds(sx.Rngs, st.integers(0, 2)),
        *(st.builds(Pick, st.just(kind), positions) for kind in ("method", "partial")),
    ]
    return st.recursive(
        st.one_of(parts),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["x", "y z", 0, True]), inner, max_size=2),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=4,
    )


def _put_in(drawn: Any, modules: list[sx.Module], shared: list[sx.Variable[Any]]) -> Any:
    """What was drawn, with the objects that it picks. Where there is none, a Module is picked."""
    match drawn:
        case Pick(kind, position):
            return _picked(kind, position, modules, shared)
        case list():
            return [_put_in(item, modules, shared) for item in drawn]
        case dict():
            return {key: _put_in(item, modules, shared) for key, item in drawn.items()}
        case Pair():
            return Pair(*(_put_in(item, modules, shared) for item in drawn))
        case tuple():
            return tuple(_put_in(item, modules, shared) for item in drawn)
        case _:
            return drawn


def _picked(
    kind: str, position: int, modules: list[sx.Module], shared: list[sx.Variable[Any]]
) -> Any:
    methods = [module.act for module in modules if isinstance(module, OtherNode)]
    if kind == "method" and methods:
        return methods[position % len(methods)]
    if kind == "partial" and shared:
        return functools.partial(activation, shared[position % len(shared)])
    if kind == "variable" and shared:
        return shared[position % len(shared)]
    return modules[position % len(modules)]


# --- edits ---


class Edit(NamedTuple):
    """One change of a model: what to do, to which objects (by position, modulo), and with what."""

    kind: str
    target: int
    other: int
    payload: Any


EDITS = (
    "write", "new variable", "new array", "set static", "delete", "share", "append", "remove item",
    "set entry", "metadata", "swap", "self reference",
)  # fmt: skip


@functools.cache
def edits() -> st.SearchStrategy[list[Edit]]:
    """A short sequence of edits; the payload is a small integer."""
    position = st.integers(0, 7)
    edit = st.builds(Edit, st.sampled_from(EDITS), position, position, st.integers(0, 3))
    return st.lists(edit, min_size=1, max_size=5)


def apply_edit(model: sx.Module, edit: Edit) -> None:
    """Applies an edit; does nothing where the model has no target for it."""
    objects = walk_objects((model,))
    modules = [item for item in objects if isinstance(item, (Node, OtherNode))]
    module = modules[edit.target % len(modules)]
    match edit.kind:
        case "new variable":
            setattr(module, f"new{edit.payload}", sx.Param(jnp.full((2,), float(edit.payload))))
        case "new array":
            setattr(module, f"array{edit.payload}", jnp.full((2,), edit.other))
        case "set static":
            setattr(module, f"static{edit.payload}", (edit.other, bool(edit.payload)))
        case "self reference":
            module.itself = module
        case "share":
            module.shared = objects[edit.other % len(objects)]
        case "delete":
            names = sorted({*vars(module), *module._array_attributes})
            if names:
                delattr(module, names[edit.other % len(names)])
        case "swap":
            first, second = module, modules[edit.other % len(modules)]
            first.swapped, second.swapped = second, first
        case _:
            _edit_inside(objects, edit)


def _edit_inside(objects: list[Any], edit: Edit) -> None:
    def pick(kind: Any) -> Any:
        found = [item for item in objects if isinstance(item, kind)]
        return found[edit.target % len(found)] if found else None

    if edit.kind in ("write", "metadata"):
        variable = pick((sx.Param, sx.BatchStat))
        if variable is not None and edit.kind == "metadata":
            variable.set_metadata(note=edit.payload)
        elif variable is not None and isinstance(variable.value, jax.Array):
            variable.value = jnp.zeros_like(variable.value)
    elif edit.kind == "set entry":
        entries = pick(sx.Dict)
        if entries is not None:
            entries[f"entry{edit.other}"] = sx.BatchStat(jnp.full((), edit.payload))
    else:
        items = pick(sx.List)
        if items is not None and edit.kind == "append":
            items.append(sx.Param(jnp.full((3,), edit.payload)))
        elif items:
            del items[edit.other % len(items)]


# --- comparing models ---


def assert_equal_values(first: Any, second: Any) -> None:
    """Asserts that two pytrees of arrays are equal to the last bit, dtypes and all."""
    leaves, tree = jax.tree.flatten(first)
    others, other_tree = jax.tree.flatten(second)
    assert tree == other_tree
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.dtype == other.dtype and leaf.shape == other.shape
        assert _bits(leaf) == _bits(other)


def _bits(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same_model(first: Any, second: Any) -> None:
    """Asserts that two models have equal structure, sharing and values."""
    assert sx.graphdef(first) == sx.graphdef(second)
    assert sx.find_duplicates(first) == sx.find_duplicates(second)
    mine, other = sx.state(first).flat(), sx.state(second).flat()
    assert list(mine) == list(other)
    for path, value in mine.items():
        assert_equal_values(value, other[path])


def objects_of(model: Any) -> list[Any]:
    """Returns every object of a model, each once."""
    return walk_objects((model,))
