# SPDX-License-Identifier: Apache-2.0
"""Definitions: the structure of a model as hashable values.

A *definition* describes one object, a Module, tracked container or Variable, by its type and its
*children*. A child is one of three:

- a ``Ref`` to another object of the graph, by position, so that shared objects and cycles are
  ordinary;
- a ``Static`` value (``_core.graph.static``);
- a ``NodeDef``, a container without identity that has objects somewhere inside.

A ``GraphDef`` has the definitions of all objects that were reached from some *roots*, and the roots
themselves as children. It holds no array and no object. ``_core.graph.flatten`` makes GraphDefs of
objects, and objects of GraphDefs.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.tree_util import DictKey

from shardax._core.graph.handlers import Handler
from shardax._core.graph.held import set_aside
from shardax._core.graph.key_levels import KeyLevel
from shardax._core.graph.paths import KeyEntry, Path, attribute_key, item_key
from shardax._core.graph.settings import SettingsKey
from shardax._core.graph.static import Metadata, Static
from shardax._core.object import Object, Shown

# --- children -------------------------------------------------------------------------------------


class Ref(NamedTuple):
    """A child that is an object: its position in the graph's ``objects``."""

    position: int


class NodeDef(NamedTuple):
    """A child that is a container without identity, with objects somewhere inside."""

    handler: Handler
    config: Any  # what the container is besides its children
    keys: tuple[Hashable, ...]
    items: tuple[Child, ...]

    def children(self) -> Iterable[tuple[Hashable, Child]]:
        """Returns (step, child) pairs; the step None adds nothing to a path."""
        return zip(self.keys, self.items, strict=True)

    def key_entries(self) -> Sequence[KeyEntry | None]:
        """Returns JAX's key of each child; None is no step."""
        return self.handler.key_entries(self.config, self.keys)


Child: TypeAlias = Ref | NodeDef | Static


# --- definitions of objects -----------------------------------------------------------------------


class ModuleDef(NamedTuple):
    """A Module: its class, its attributes, and its array attributes, in order."""

    type: type[Object]
    attributes: tuple[tuple[str, Child], ...]
    array_attributes: tuple[tuple[str, Child], ...]

    def children(self) -> Iterable[tuple[str, Child]]:
        """Returns (name, child) pairs."""
        return (*self.attributes, *self.array_attributes)

    def key_entries(self) -> Sequence[KeyEntry]:
        """Returns JAX's key of each child."""
        return [attribute_key(name) for name, _ in self.children()]


class ListDef(NamedTuple):
    """A tracked list."""

    type: type[Object]
    items: tuple[Child, ...]

    def children(self) -> Iterable[tuple[int, Child]]:
        """Returns (position, child) pairs."""
        return enumerate(self.items)

    def key_entries(self) -> Sequence[KeyEntry]:
        """Returns JAX's key of each child."""
        return [item_key(position) for position in range(len(self.items))]


class DictDef(NamedTuple):
    """A tracked dict: (key, child) pairs in order."""

    type: type[Object]
    items: tuple[tuple[Static, Child], ...]

    def children(self) -> Iterable[tuple[Hashable, Child]]:
        """Returns (key, child) pairs, each key as the user wrote it."""
        return [(key.value, child) for key, child in self.items]

    def key_entries(self) -> Sequence[KeyEntry]:
        """Returns JAX's key of each child."""
        return [DictKey(key.value) for key, _ in self.items]


class VariableDef(NamedTuple):
    """A Variable without its value."""

    type: type[Object]
    metadata: Metadata

    def children(self) -> Iterable[tuple[Hashable, Child]]:
        """Returns no pairs: a Variable holds no objects."""
        return ()

    def key_entries(self) -> Sequence[KeyEntry]:
        """Returns no keys."""
        return ()


Definition: TypeAlias = ModuleDef | ListDef | DictDef | VariableDef


def definition_children(part: Definition | Child) -> Iterable[tuple[Any, Child]]:
    """Returns (step, child) pairs of a definition or container; the step None is no step.

    A ``Ref`` has none: what the object holds says its own definition.
    """
    if isinstance(part, (Ref, Static)):
        return ()
    return part.children()


def static_values(part: Definition | Child, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields (path, value) of every static value in a definition or child at a path."""
    if isinstance(part, Static):
        yield path, part.value
    for step, child in definition_children(part):
        yield from static_values(child, path if step is None else (*path, step))


# --- the whole graph ------------------------------------------------------------------------------


@jax.tree_util.register_static
class GraphDef(Shown):
    """Structure of a model: hashable, comparable, without any value.

    To JAX it is static: functions under transforms take and return it as it is.

    Attributes:
        objects: One definition per object, in walking order.
        roots: What was flattened, as children.
        leaves: Positions in ``objects`` of the Variables, in order.

    Example:
        >>> import shardax as sx
        >>> graphdef, state = sx.split(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> graphdef == sx.graphdef(sx.nn.Linear(2, 3, rngs=sx.Rngs(1)))
        True
    """

    def __init__(self, objects: tuple[Any, ...], roots: tuple[Any, ...]) -> None:
        self.objects = objects
        self.roots = roots
        self.leaves = tuple(
            position for position, part in enumerate(objects) if type(part) is VariableDef
        )
        self._hash = hash((objects, roots))

    @functools.cached_property
    def leaf_paths(self) -> list[Path]:
        """First path of every Variable, in the order of ``leaves``."""
        paths = definition_paths(self)
        return [paths[position] for position in self.leaves]

    @functools.cached_property
    def key_level(self) -> KeyLevel:
        """Keys of the nodes that JAX sees in a model of one root."""
        return _KeyLevels(self).root()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, GraphDef):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.roots == other.roots
            and self.objects == other.objects
        )

    def static_values(self) -> Iterator[Any]:
        """Yields every static value."""
        for part in (*self.roots, *self.objects):
            for _, value in static_values(part, ()):
                yield value

    def static_parts(self) -> Iterator[tuple[Path, Any]]:
        """Yields the class of every Module and container, and every static value, by path."""
        for position, path in definition_paths(self).items():
            definition = self.objects[position]
            if not isinstance(definition, VariableDef):
                yield path, definition.type
                yield from static_values(definition, path)

    def __repr__(self) -> str:
        return f"GraphDef({len(self.objects)} objects, {len(self.leaves)} variables)"

    def __reduce__(self) -> Any:
        return (GraphDef, (self.objects, self.roots))


set_aside(GraphDef)


def definition_paths(graphdef: GraphDef, names: Sequence[Path] = ()) -> dict[int, Path]:
    """Returns the path of every object by its position: that of its first occurrence.

    Args:
        graphdef: The structure.
        names: The path of each root; by default the empty one.
    """
    paths: dict[int, Path] = {}

    def visit(child: Child, path: Path) -> None:
        part: Definition | Child = child
        if isinstance(child, Ref):
            if child.position in paths:
                return
            paths[child.position] = path
            part = graphdef.objects[child.position]

        for step, below in definition_children(part):
            visit(below, path if step is None else (*path, step))

    for position, root in enumerate(graphdef.roots):
        visit(root, names[position] if names else ())
    return paths


def settings_in(graphdef: GraphDef) -> dict[int, Static]:
    """Returns the settings objects of a structure, as static values, by ``id``."""
    settings: dict[int, Static] = {}

    def visit(part: Definition | Child) -> None:
        if isinstance(part, Static) and type(part.key) is SettingsKey:
            settings[id(part.value)] = part
        for _, child in definition_children(part):
            visit(child)

    for definition in graphdef.objects:
        visit(definition)
    return settings


class _KeyLevels:
    """Finds the key levels of a structure of one root; a Variable is at its first occurrence."""

    def __init__(self, graphdef: GraphDef) -> None:
        self._graphdef = graphdef
        self._met: set[int] = set()  # positions of objects
        self._variables = 0  # how many were met

    def root(self) -> KeyLevel:
        """Returns the level of the root's node."""
        (root,) = self._graphdef.roots
        self._met.add(root.position)
        return self._level(self._graphdef.objects[root.position])

    def _level(self, part: Definition | NodeDef) -> KeyLevel:
        start = self._variables
        keys: list[KeyEntry] = []
        below: list[KeyLevel | None] = []
        self._add_children(part, keys, below)
        return KeyLevel(keys, below, start, self._variables)

    def _add_children(
        self, part: Definition | NodeDef, keys: list[KeyEntry], below: list[KeyLevel | None]
    ) -> None:
        for key, (_, child) in zip(part.key_entries(), part.children(), strict=True):
            if isinstance(child, Static):
                continue
            if isinstance(child, Ref):
                if child.position in self._met:
                    continue
                self._met.add(child.position)
                holder = self._graphdef.objects[child.position]
            else:
                holder = child

            if isinstance(holder, VariableDef):
                keys.append(key)
                below.append(None)
                self._variables += 1
            elif key is None:  # no step, as from a partial to its function
                self._add_children(holder, keys, below)
            else:
                level = self._level(holder)
                if level.keys:
                    keys.append(key)
                    below.append(level)
