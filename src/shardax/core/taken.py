# SPDX-License-Identifier: Apache-2.0
"""Trees taken apart, to be rebuilt with other Variables in them.

A *tree* is a Module, or any pytree that holds Modules and Variables. What is rebuilt has new
Modules and containers, so that the given tree stays as it was; Variables are used as they are,
unless something else is put in their *place*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax.core.frames import owner_here
from shardax.core.node import Object
from shardax.core.paths import Path, path_step
from shardax.core.slots import Slot
from shardax.core.static import Static
from shardax.core.structure import (
    Decoder,
    Ref,
    VariableDef,
    Walk,
    definition_children,
    has_parts,
    rebuild,
)


class Place(NamedTuple):
    """A slot, and where it is."""

    path: Path
    slot: Slot


class Taken:
    """A tree taken apart into objects and slots.

    Args:
        tree: A Module, Variable, or pytree of these.

    Attributes:
        walk: The objects, with paths from the top of the tree.
        variables: Positions of the Variables among them.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_part)
        self.walk = Walk()
        self._leaves = [
            (self._encoded(keys, leaf) if has_parts(leaf) else leaf) for keys, leaf in leaves
        ]
        self._paths = [plain_path(keys) for keys, _ in leaves]
        definitions = enumerate(self.walk.definitions)
        self.variables = [i for i, each in definitions if type(each) is VariableDef]

    def _encoded(self, keys: Sequence[Any], leaf: Any) -> _Encoded:
        return _Encoded(self.walk.encode(leaf, plain_path(keys)))

    def bare(self) -> set[int]:
        """Returns the positions of Variables that are leaves of the tree, in no Module."""
        children = (leaf.child for leaf in self._leaves if type(leaf) is _Encoded)
        return {child.position for child in children if type(child) is Ref}

    def places(self) -> Iterator[Place]:
        """Yields every slot, in order."""
        for path, leaf in zip(self._paths, self._leaves, strict=True):
            if type(leaf) is _Encoded:
                yield from _places(leaf.child, path)
        for path, definition in zip(self.walk.paths, self.walk.definitions, strict=True):
            if type(definition) is not VariableDef:
                yield from _below(definition, path)

    def rebuilt(
        self,
        variables: Mapping[int, Any],
        decoder: Callable[[Sequence[Any]], Decoder] = Decoder,
    ) -> Any:
        """Returns the tree with new Modules and containers.

        Args:
            variables: What to put in the places of Variables, by position; the others stay.
            decoder: Turns children into values.
        """
        given = {i: variables.get(i, self.walk.objects[i]) for i in self.variables}
        decode = rebuild(self.walk, given, owner_here(), decoder)
        return self._treedef.unflatten(
            [decode(leaf.child) if type(leaf) is _Encoded else leaf for leaf in self._leaves]
        )


class _Encoded(NamedTuple):
    """A leaf of a tree that holds objects or slots, as a child of the graph."""

    child: Any


def _is_part(value: Any) -> bool:
    return isinstance(value, (Object, Slot))


def plain_path(keys: Sequence[Any]) -> Path:
    """Returns the path that a JAX key path stands for."""
    return tuple(path_step(key) for key in keys)


def _places(child: Any, path: Path) -> Iterator[Place]:
    if type(child) is Static:
        if isinstance(child.value, Slot):
            yield Place(path, child.value)
    elif type(child) is not Ref:
        yield from _below(child, path)


def _below(definition: Any, path: Path) -> Iterator[Place]:
    for key, child in definition_children(definition):
        yield from _places(child, path if key is None else (*path, key))
