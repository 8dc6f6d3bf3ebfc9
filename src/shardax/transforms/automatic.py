# SPDX-License-Identifier: Apache-2.0
"""Quick calls where static leaves are found automatically (``static="auto"``).

Every call decides anew which leaves are static. In a steady call that takes one flattening of all
arguments by JAX, and a look at the type of each leaf: arrays go into a flat list, static leaves
into the *quick key* by which the call is remembered. What has objects inside of containers, or
tracers, takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax.core._jax import Tracer
from shardax.core.node import Object
from shardax.core.pytree import flatten_plain
from shardax.transforms.arguments import Mixed
from shardax.transforms.plain import ARRAY_TYPES, note_types
from shardax.transforms.static_leaves import argument_key, is_dynamic

_COMPARED_BY_VALUE = frozenset({str, bool, int, bytes})
"""Types whose values are keys by themselves, the type beside them."""


class QuickCall(NamedTuple):
    """A call with its leaves sorted.

    Attributes:
        key: What the call is remembered by: positions and identities of objects, the containers,
            and the static leaves.
        args: The positional arguments, None for objects.
        dynamic: The dynamic leaves of all arguments.
    """

    key: list[Any]
    args: list[Any]
    dynamic: list[Any]


def quick_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], static_types: frozenset[type]
) -> QuickCall | None:
    """Sorts the leaves of a call.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        static_types: Types that are static although JAX takes them: bool, perhaps numbers.

    Returns:
        The call; None if it has to take the ordinary way, also to explain what is wrong with it.
    """
    given = [None if isinstance(arg, Object) else arg for arg in args]
    key: list[Any] = [id(arg) if isinstance(arg, Object) else 0 for arg in args]
    flat = flatten_plain((given, kwargs) if kwargs else given)
    if flat is None:
        return None
    leaves, treedef = flat
    key.append(treedef)
    dynamic: list[Any] = []
    for leaf in leaves:
        kind = type(leaf)
        if kind in ARRAY_TYPES and kind not in static_types:
            dynamic.append(leaf)
        elif kind in _COMPARED_BY_VALUE:
            key += (len(dynamic), kind, leaf)
        elif isinstance(leaf, Tracer):
            return None
        elif kind not in static_types and is_dynamic(leaf):
            note_types(leaf)
            dynamic.append(leaf)
        else:
            try:
                key += (len(dynamic), kind, argument_key(leaf))
            except TypeError:
                return None
    return QuickCall(key, given, dynamic)


Spans = tuple[Sequence[slice | None], Sequence[tuple[str, slice | None]]]


def spans_of(
    templates: Sequence[Any],
    named: Sequence[tuple[str, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Spans:
    """Returns where the dynamic leaves of each argument stand among those of the call.

    Args:
        templates: Template of each positional argument.
        named: (name, template) of each keyword argument.
        args: Positional arguments, None for objects.
        kwargs: Keyword arguments.

    Returns:
        The slice of each positional argument, and (name, slice) of each keyword argument; None for
        an argument that is passed as it is.
    """
    start = 0

    def span(template: Any, value: Any) -> slice | None:
        nonlocal start
        count = jax.tree.structure(value).num_leaves
        if not isinstance(template, Mixed):
            start += count
            return None
        start += count - len(template.static)
        return slice(start - count + len(template.static), start)

    positional = [span(template, arg) for template, arg in zip(templates, args, strict=True)]
    return positional, [(name, span(template, kwargs[name])) for name, template in named]


def pack(
    call: QuickCall, kwargs: Mapping[str, Any], spans: Spans
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the plain parts of a call, as ``Arguments`` has them: (positional, by name)."""
    positional, named = spans
    plain, dynamic = call.args, call.dynamic
    for position, span in enumerate(positional):
        if span is not None:
            plain[position] = dynamic[span]
    if not named:
        return plain, {}
    return plain, {n: kwargs[n] if span is None else dynamic[span] for n, span in named}
