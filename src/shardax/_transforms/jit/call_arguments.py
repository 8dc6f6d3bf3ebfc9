# SPDX-License-Identifier: Apache-2.0
"""Arguments of a compiled call, sorted by type.

A call whose arguments are arrays, numbers and objects needs a look at the type of each argument
alone. Under ``static="auto"`` all arguments are flattened by JAX, and each leaf is sorted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.graph.flatten import flatten_plain
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.graph.settings import settings_key
from shardax._core.object import Object
from shardax._transforms.jit import specialization as special
from shardax._transforms.lift import arguments as inputs

# Types of arguments that are surely plain; JAX's concrete array type joins when first met.
ARRAY_TYPES: set[type] = {np.ndarray, bool, int, float, complex, type(None)}


def note_types(arg: object) -> bool:
    """Learns JAX's concrete array type; returns whether the argument holds tracers."""
    if isinstance(arg, jax.Array) and not isinstance(arg, Tracer):
        ARRAY_TYPES.add(type(arg))
        return False
    leaves = jax.tree.leaves(arg)
    if ARRAY_TYPES.issuperset(map(type, leaves)):
        return False
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            ARRAY_TYPES.add(type(leaf))
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def all_dynamic(args: Sequence[object], static: frozenset[type]) -> bool:
    """Whether all arguments are known to be dynamic."""
    for arg in args:  # no generator: it would cost as much as a short call
        kind = type(arg)
        if (kind not in ARRAY_TYPES or kind in static) and not isinstance(arg, Object):
            return False
    return True


# Types whose values are keys by themselves, the type beside them.
_COMPARED_BY_VALUE = frozenset({str, bool, int, bytes})


class FlatCall(NamedTuple):
    """A call with its leaves sorted."""

    # What the call is remembered by: positions and identities of objects, the containers, and the
    # static leaves.
    key: list[Any]
    args: list[PyTree]  # the positional arguments, None for objects
    dynamic: list[Leaf]  # the dynamic leaves of all arguments


def flatten_call(
    args: Sequence[object], kwargs: Mapping[str, object], static_types: frozenset[type]
) -> FlatCall | None:
    """Sorts the leaves of a call."""
    plain_args = [None if isinstance(arg, Object) else arg for arg in args]
    key: list[Any] = [id(arg) if isinstance(arg, Object) else 0 for arg in args]
    flat = flatten_plain((plain_args, kwargs) if kwargs else plain_args)
    if flat is None:
        return None
    leaves, treedef = flat
    key.append(treedef)
    dynamic: list[Leaf] = []
    for leaf in leaves:
        kind = type(leaf)
        if kind in ARRAY_TYPES and kind not in static_types:
            dynamic.append(leaf)
        elif kind in _COMPARED_BY_VALUE:
            key += (len(dynamic), kind, leaf)
        elif isinstance(leaf, Tracer):
            return None
        elif kind not in static_types and inputs.is_dynamic(leaf):
            note_types(leaf)
            dynamic.append(leaf)
        else:
            try:
                key += (len(dynamic), kind, settings_key(leaf))
            except TypeError:
                return None
    return FlatCall(key, plain_args, dynamic)


Spans = tuple[Sequence[slice | None], Sequence[tuple[str, slice | None]]]


def leaf_spans(
    program: special.Specialization, args: Sequence[object], kwargs: Mapping[str, object]
) -> Spans:
    """Returns the span of each argument among the dynamic leaves."""
    start = 0

    def span(template: object, value: object) -> slice | None:
        nonlocal start
        count = jax.tree.structure(value).num_leaves
        if not isinstance(template, inputs.TreeTemplate):
            start += count
            return None
        start += count - len(template.static)
        return slice(start - count + len(template.static), start)

    positional = [span(*pair) for pair in zip(program.templates, args, strict=True)]
    return positional, [(name, span(t, kwargs[name])) for name, t in program.named]


def plain_parts(
    call: FlatCall, kwargs: Mapping[str, object], spans: Spans
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the plain parts of a call: (positional, by name)."""
    positional, named = spans
    plain, dynamic = call.args, call.dynamic
    for position, span in enumerate(positional):
        if span is not None:
            plain[position] = dynamic[span]
    if not named:
        return plain, {}
    return plain, {n: kwargs[n] if span is None else dynamic[span] for n, span in named}
