# SPDX-License-Identifier: Apache-2.0
"""Objects of one structure that are held as one, such as the layers of a network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from shardax._core.graph import stacked_values, views
from shardax._core.graph.flatten import GraphWalk
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.stacking import stack_objects, unstack_objects
from shardax._core.graph.static import AxisName
from shardax._core.object import Object, epoch
from shardax._transforms.lift.captures import objects_in, places_of


class StackedObjects:
    """Objects of one structure, stacked: every Variable has a leading dimension for them.

    What is one and the same object in all of them, such as a random stream that they draw from
    together, is *shared*: it stays one, and is not stacked. Lazy values stay lazy.

    Args:
        root: The object that holds all of them, of their type.
        shared: Paths below it of what they share.
        length: How many they are.

    Attributes:
        root: The object that holds all of them.
        shared: Paths below it of what they share.
        length: How many they are.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> rngs = sx.Rngs(0)
        >>> layers = [sx.nn.Linear(2, 4, use_bias=False, rngs=rngs) for _ in range(3)]
        >>> stacked = extend.StackedObjects.of(layers, "layers")
        >>> stacked.root.kernel.shape, stacked.root.kernel.axes
        ((3, 2, 4), ('layers', 'in', 'out'))
        >>> bool((stacked.view(1).kernel == layers[1].kernel).all())
        True
        >>> [layer.kernel.shape for layer in stacked.unstack()]
        [(2, 4), (2, 4), (2, 4)]
    """

    __slots__ = ("length", "root", "shared")

    def __init__(self, root: Any, shared: tuple[Path, ...], length: int) -> None:
        self.root = root
        self.shared = shared
        self.length = length

    @classmethod
    def of(cls, objects: Sequence[Any], axis_name: AxisName) -> StackedObjects:
        """Returns the stack of some objects, at least one.

        Args:
            objects: The objects; they are left as they are.
            axis_name: The name of the leading dimension.

        Raises:
            ModuleError: If they differ in structure, or in shape or dtype of a value; names the
                path.
        """
        return cls._of(objects, axis_name, ())

    @classmethod
    def build(
        cls,
        make: Callable[[], Any],
        length: int,
        axis_name: AxisName,
        check: Callable[[Sequence[Any]], None] = lambda objects: None,
    ) -> StackedObjects:
        """Builds objects and returns their stack.

        Args:
            make: Builds one object, a new one at every call.
            length: How many there are.
            axis_name: The name of the leading dimension.
            check: Called with the objects before they are stacked; raises if they are not right.

        Raises:
            ModuleError: As for ``of``.
        """
        # Several objects show by themselves what they share. A single one shares what ``make`` had
        # before it was built, such as its random streams.
        older = set(map(id, _objects_around(make))) if length == 1 else ()
        objects = [make() for _ in range(length)]
        check(objects)
        return cls._of(objects, axis_name, older)

    @classmethod
    def _of(
        cls, objects: Sequence[Any], axis_name: AxisName, older: Collection[int]
    ) -> StackedObjects:
        root, shared = stack_objects(objects, axis_name, older)
        return cls(root, shared, len(objects))

    def view(self, index: int) -> Any:
        """Returns one of the objects, whose Variables read and write their part of the stack.

        Args:
            index: Which one.
        """
        return views.view(self.root, index, _SharedObjects(self.root, self.shared))

    def unstack(self) -> list[Any]:
        """Returns new objects with Variables of their own, but for what they share."""
        return unstack_objects(self.root, self.shared, self.length)

    @staticmethod
    def stack_values(values: Sequence[PyTree]) -> PyTree:
        """Returns the stacked value of values of one shape and dtype; lazy ones stay lazy."""
        return stacked_values.stack_values(values)

    @staticmethod
    def part_of(value: PyTree, index: int) -> PyTree:
        """Returns one part of a stacked value: the inverse of ``stack_values``."""
        return stacked_values.part_of(value, index)


class _SharedObjects:
    """The objects that are shared, for views."""

    def __init__(self, root: Object, paths: Collection[Path]) -> None:
        self.root = root
        self.paths = frozenset(paths)
        self._objects_by_id: dict[int, Object] = {}
        self._epoch = -1

    def __contains__(self, item: object) -> bool:
        if not self.paths:
            return False
        if self._epoch != epoch.current:
            self._epoch = epoch.current
            walk = GraphWalk(marking=True)
            walk.visit(self.root, ())
            pairs = zip(walk.paths, walk.objects, strict=True)
            self._objects_by_id = {id(item): item for path, item in pairs if path in self.paths}
        return id(item) in self._objects_by_id


def _objects_around(make: Callable[[], object]) -> Iterator[Object]:
    """Yields the objects that a function reaches by itself, and what they hold."""
    walk = GraphWalk()
    if callable(make):  # else calling it says what is wrong
        walk.encode(make, (), is_root=True)
    for place in places_of(make):
        for item in objects_in(place.read()):
            walk.visit(item, ())
    yield from walk.objects
