# SPDX-License-Identifier: Apache-2.0
"""The objects of a call, flattened together, and the private copy that a transform runs on.

``InputGraph`` has the caller's objects: flattened into a structure and the Variables whose values
enter the transform. ``bind`` builds a copy of them inside, whose Variables hold the transform's
tracers. What the function does to the copy is recorded and applied in ``lift.effects``.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import jax
import numpy as np

from shardax._core import frames
from shardax._core.frames import is_ref, kind_of
from shardax._core.graph import flatten as graphs
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.views import block_parents
from shardax._core.init.lazy import LazyValue, materialize_all
from shardax._core.object import Object
from shardax._core.values import is_deleted, refuse_deleted
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.lift import arguments as inputs


class InputGraph:
    """The caller's objects in one lifted call, flattened together.

    They are flattened together so that an object in two arguments is one object in the copy, too.

    Attributes:
        roots: The callable, if it is bound to objects, and all objects in the arguments.
        flat: Their joint flattening.
        leaves: The Variables of ``flat.leaves`` as the calling frame has them: these are read, and
            written when the effects are applied.
        read: What ``values`` returned; None before.
    """

    __slots__ = ("flat", "leaves", "read", "roots")

    def __init__(self, roots: Sequence[PyTree], names: Sequence[Path] | None = None) -> None:
        self.roots = [inputs.as_root(root) for root in roots]
        self.flat = graphs.flatten_roots(self.roots, names)
        self.leaves: list[Any] = self.flat.leaves
        self.read: list[Leaf] | None = None

        frame = frames.local.frame
        if frame is not None:
            self.leaves = [frames.resolve(leaf, frame) for leaf in self.flat.leaves]

    def values(self, refs: bool = False, donated: Container[int] = ()) -> list[Leaf]:
        """Returns the values of all Variables, lazy ones materialized.

        Args:
            refs: Whether a ``jax.Ref`` itself is returned, and not the array in it.
            donated: Positions of the Variables that the call donates.
        """
        values = read(self.leaves)

        unusual = [i for i, value in enumerate(values) if not isinstance(value, jax.Array)]
        absent = [self.flat.leaf_paths[i] for i in unusual if self.leaves[i].is_abstract]
        if absent:
            raise errors.absent_error(absent)
        if frames.local.frame is None and any(map(is_deleted, values)):
            refuse_deleted(self.flat.leaf_paths, values)
        self.read = values

        ref_positions = [i for i in unusual if is_ref(values[i])]
        self._check_refs(ref_positions, donated)
        entering = list(values)
        if not refs:
            for position in ref_positions:
                entering[position] = values[position][...]
        return entering

    def _check_refs(self, positions: Sequence[int], donated: Container[int]) -> None:
        """Raises if a ``jax.Ref`` is donated, or held by two Variables."""
        first_position: dict[int, int] = {}
        for position in positions:
            variable, path = self.leaves[position], self.flat.leaf_paths[position]
            if position in donated:
                raise errors.donated_ref(kind_of(variable), path)
            first = first_position.setdefault(id(variable._value), position)
            if first != position:
                raise errors.shared_ref(self.flat.leaf_paths[first], path)

    def objects(self) -> list[Object]:
        """Returns the objects in the order of the graph definition."""
        return graphs.walk_objects(self.roots)


def read(variables: Sequence[Variable]) -> list[Leaf]:
    """Returns the values of resolved Variables; lazy and NumPy ones are materialized."""
    materialize_all(variables)
    return [
        variable.value if isinstance(variable._value, (LazyValue, np.ndarray)) else variable._value
        for variable in variables
    ]


def abstract(variables: Sequence[Variable]) -> list[Leaf]:
    """Returns the values of resolved Variables, or their ``jax.ShapeDtypeStruct`` if lazy."""
    return [
        jax.ShapeDtypeStruct(variable._value.shape, variable._value.dtype)
        if isinstance(variable._value, LazyValue) or is_ref(variable._value)
        else variable._value
        for variable in variables
    ]


def bind(
    frame: frames.Frame,
    graphdef: GraphDef,
    values: Sequence[Leaf],
    originals: Sequence[Object],
    leaves: Sequence[Variable],
) -> tuple[list[PyTree], list[Object]]:
    """Returns (roots, objects) of the private copy, made inside a transform.

    Args:
        frame: The frame of the run, which owns the copy.
        graphdef: The structure to build.
        values: What each Variable of the copy holds.
        originals: The caller's objects, in the order of ``graphdef.objects``.
        leaves: ``InputGraph.leaves``.
    """
    roots, copies = graphs.build(graphdef, map(frames.own, values), frame)

    # Where the function reaches an original, by a closure, it shall find the copy.
    for original, copy in zip(originals, copies, strict=True):
        frame.copies[id(original)] = (original, copy)
    for variable, position in zip(leaves, graphdef.leaves, strict=True):
        frame.copies[id(variable)] = (variable, copies[position])
        if variable._parent is not None:
            block_parents(frame, variable)
    return roots, copies
