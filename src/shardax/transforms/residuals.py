# SPDX-License-Identifier: Apache-2.0
"""Residuals: what a forward rule hands to its backward rule.

They may hold Modules and Variables beside arrays, and static values (numbers of Python, strings).
On the way from one rule to the other only arrays exist; structure and static values go with them as
the static part of one pytree node, ``Packed``. The backward rule gets copies of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from shardax.core.frames import Frame
from shardax.core.structure import GraphDef, build
from shardax.transforms.arguments import put_together, take_apart
from shardax.transforms.lift import Graph


class Packed:
    """Anything made of arrays, objects and static values, as a pytree of its arrays.

    Attributes:
        values: The values of all Variables.
        plain: The other arrays.
        graphdef: The structure of the objects.
        template: How objects, arrays and static values stand together.
    """

    __slots__ = ("graphdef", "plain", "template", "values")

    def __init__(self, values: Any, plain: Any, graphdef: GraphDef, template: Any) -> None:
        self.values = values
        self.plain = plain
        self.graphdef = graphdef
        self.template = template

    def unpack(self, frame: Frame) -> Any:
        """Returns what was packed, with new objects that a frame owns."""
        roots, _ = build(self.graphdef, self.values, frame)
        return put_together(self.template, self.plain, roots)


def pack(item: Any) -> Packed:
    """Packs an item with the values that its Variables have in the current frame.

    Raises:
        StaticArgumentError: If it holds something that is not hashable and no array.
    """
    roots: list[Any] = []
    template, plain = take_apart(item, roots, auto_static=True, static_numbers=True)
    graph = Graph(roots)
    return Packed(graph.values(), plain, graph.flat.graphdef, template)


def _flatten(packed: Packed) -> tuple[tuple[Any, Any], tuple[GraphDef, Any]]:
    return (packed.values, packed.plain), (packed.graphdef, packed.template)


def _unflatten(static: tuple[GraphDef, Any], children: Iterable[Any]) -> Packed:
    values, plain = children
    return Packed(values, plain, *static)


jax.tree_util.register_pytree_node(Packed, _flatten, _unflatten)
