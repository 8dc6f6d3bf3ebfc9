# SPDX-License-Identifier: Apache-2.0
"""Flattening: from objects to their structure and Variables, and back.

``GraphWalk`` walks from some *roots*, depth first, in the order in which attributes were first set.
It meets each object once, and describes it by a definition (``_core.graph.definitions``).
``flatten_roots`` makes a ``Flat`` of such a walk: the ``GraphDef`` and the Variables in order.
``assemble`` and ``build`` are the inverse: they make new objects from definitions. Everything that
splits models and puts them together again is built on these.

``flatten`` remembers the ``Flat`` of a single Module or container, on the object itself, until the
structure epoch advances (``_core.object``), or until a settings object in it
(``_core.graph.settings``) holds something else: these are listed, as nothing tells when they
change.

How JAX sees a model is in ``_core.graph.pytrees``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from shardax._core import errors
from shardax._core.frames import Frame, local
from shardax._core.graph.definitions import Child, Definition, GraphDef, NodeDef, Ref, VariableDef
from shardax._core.graph.handlers import PLACEHOLDER, Handler, NodeType, handler_of, has_parts
from shardax._core.graph.held import HiddenObject, ObjectSearch
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.settings import (
    IncomparableError,
    Setting,
    SettingsKey,
    have_changed,
    incomparable_attribute,
    settings_key,
)
from shardax._core.graph.static import Static
from shardax._core.object import Object, epoch

# --- from objects to definitions ------------------------------------------------------------------

_COMMON_TYPES = frozenset({bool, int, str, type(None)})


@functools.lru_cache(maxsize=4096, typed=True)  # configuration repeats from layer to layer
def _common_static(value: bool | int | str | None) -> Static:
    return Static(value)


class GraphWalk:
    """One walk over objects; from further roots it sees what they share.

    Attributes:
        objects: Every object, in the order in which they were met.
        definitions: The definition of each; None while the walk is still inside of it.
        paths: The path of each, by its first occurrence.
        index: The position of each, by its ``id``.
        settings: The settings objects that were met.
        volatile: Whether something was met that may change without notice.
        unchanged: By ``id``, static values that are what they were, whatever was changed in them
            in place.
    """

    def __init__(self, marking: bool = False) -> None:
        self._marking = marking  # whether the result will be remembered, see _core.object
        self.volatile = False
        self.objects: list[Any] = []
        self.definitions: list[Any] = []
        self.paths: list[Path] = []
        self.index: dict[int, int] = {}
        self.settings: list[Setting] = []
        self.unchanged: Mapping[int, Static] = {}
        self._depth = 0  # how many objects are around what is encoded
        self._search = ObjectSearch()

    def visit(self, item: Object, path: Path) -> int:
        """Returns the object's position; walks into it the first time."""
        known = self.index.get(id(item))
        if known is not None:
            return known

        position = self.index[id(item)] = len(self.objects)
        self.objects.append(item)
        self.paths.append(path)
        self.definitions.append(None)

        if self._marking:  # before looking inside: no edit by another thread goes unnoticed
            object.__setattr__(item, "_marked", True)

        self._depth += 1
        self.definitions[position] = item._flatten(
            lambda value, step: self.encode(value, (*path, step))
        )
        self._depth -= 1
        return position

    def encode(self, value: Any, path: Path, *, is_root: bool = False) -> Child:
        """Returns ``value`` as a child, walking into it if it holds objects."""
        if type(value) in _COMMON_TYPES:
            return _common_static(value)

        handler = handler_of(value)
        if handler.is_object:
            return Ref(self.visit(value, path))
        if handler is not PLACEHOLDER:
            if has_parts(value):
                return self._encode_container(handler, value, path)
            hidden = self._search_static(value)
            if hidden is not None:
                raise hidden.error(value, f"what stands at {format_path(path)}")

        try:
            # What a function reads from where it was made is what it was when it was traced.
            return Static(value) if is_root else self._encode_static(value, path)
        except IncomparableError as error:
            raise errors.StaticAttributeError(
                incomparable_attribute(type(value), f"at {format_path(path)}", error)
            ) from error
        except TypeError as error:
            raise errors.unassigned_value(type(value), path, error) from error

    def _encode_container(self, handler: Handler, value: Any, path: Path) -> NodeDef:
        """Returns a container, with objects somewhere inside, as a child."""
        self.volatile |= handler.volatile
        pairs = handler.children(value)
        items = [self.encode(item, path if key is None else (*path, key)) for key, item in pairs]

        config = handler.config(value)
        hidden = self._search.beside_children(value, config) if self._depth else None
        if hidden is not None:
            raise hidden.error(value, f"what stands at {format_path(path)}")
        if type(config) is NodeType and type(config.static.key) is SettingsKey:
            self.settings.append(Setting(path, config.static.value, config.static.key))

        return NodeDef(handler, config, tuple(key for key, _ in pairs), tuple(items))

    def _encode_static(self, value: object, path: Path) -> Static:
        known = self.unchanged.get(id(value))
        if known is not None:
            return known
        key = settings_key(value)
        if type(key) is SettingsKey:
            self.settings.append(Setting(path, value, key))
        return Static(value, key)

    def _search_static(self, value: object) -> HiddenObject | None:
        """Returns the first object inside of a static value, or None."""
        # Only of what stands in objects: outside of models, static values may hold what they like.
        if not self._depth or id(value) in self.unchanged:
            return None
        return self._search.held_by(value)


def walk_objects(roots: Sequence[object]) -> list[Any]:
    """Returns all objects reachable from ``roots``, in the order of ``GraphDef.objects``."""
    walk = GraphWalk()
    for root in roots:
        walk.encode(root, (), is_root=True)
    return walk.objects


# --- what flattening returns ----------------------------------------------------------------------

_NEVER = -1  # an epoch that does not come


class Flat:
    """A model taken apart: its structure and its Variables.

    Attributes:
        graphdef: The structure.
        leaves: The Variables, in the order of ``graphdef.leaves``.
        paths: First path of every object, in the order of ``graphdef.objects``.
        epoch: The structure epoch at which this was true.
        settings: The settings objects, which change without a new epoch.
    """

    def __init__(self, graphdef: GraphDef, walk: GraphWalk, at_epoch: int) -> None:
        self.graphdef = graphdef
        self.leaves: list[Leaf] = [walk.objects[position] for position in graphdef.leaves]
        self.paths = walk.paths
        self.epoch = _NEVER if walk.volatile else at_epoch
        self.settings = walk.settings

    @functools.cached_property
    def leaf_paths(self) -> list[Path]:
        """Path of every Variable, in the order of ``leaves``."""
        return [self.paths[position] for position in self.graphdef.leaves]

    def is_current(self) -> bool:
        """Whether flattening the same object again would find the same."""
        if self.epoch != epoch.current:
            return False
        return not (self.settings and have_changed(self.settings))

    def check_views(self) -> None:
        """Raises if a Variable stands beside the stacked one that it views."""
        views = [leaf for leaf in self.leaves if leaf._parent is not None]
        if not views:
            return

        path_of = dict(zip(map(id, self.leaves), self.leaf_paths, strict=True))
        for view in views:
            parent = view._parent
            while parent is not None:
                if id(parent) in path_of:
                    kind = type(parent).__name__
                    raise errors.stack_beside_view(kind, path_of[id(parent)], path_of[id(view)])
                parent = parent._parent


def flatten(root: Object) -> Flat:
    """Flattens one object; of Modules and containers the result is remembered."""
    # On the root, so that it keeps nothing alive: static values in a structure may lead back to the
    # model (a function that closes over it).
    known: Flat | None = getattr(root, "_flat", None)
    if known is not None and known.is_current():
        return known

    flat = flatten_roots((root,))
    if type(flat.graphdef.objects[0]) is not VariableDef:
        object.__setattr__(root, "_flat", flat)
    return flat


def flatten_roots(roots: Sequence[object], names: Sequence[Path] | None = None) -> Flat:
    """Flattens several roots together, with what they share.

    Args:
        roots: Objects, or containers of objects.
        names: The path of each; by default the empty one.
    """
    at_epoch = epoch.current  # before walking: an edit during the walk then invalidates the result
    walk = GraphWalk(marking=True)

    paths = names or [()] * len(roots)
    pairs = zip(roots, paths, strict=True)
    children = tuple(walk.encode(root, path, is_root=True) for root, path in pairs)

    flat = Flat(GraphDef(tuple(walk.definitions), children), walk, at_epoch)
    flat.check_views()
    return flat


# --- from definitions to objects ------------------------------------------------------------------


class ChildDecoder:
    """Turns children back into values, given the graph's objects."""

    __slots__ = ("objects",)

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def __call__(self, child: Child) -> PyTree:
        if isinstance(child, Ref):
            return self.objects[child.position]
        if isinstance(child, Static):
            return child.value
        items = map(self, child.items)
        return child.handler.rebuild(child.config, zip(child.keys, items, strict=True))


def assemble(
    definitions: Sequence[Definition],
    given: Mapping[int, Any],
    owner: Frame | None,
    lock: str | None = None,
    decoder: Callable[[list[Any]], ChildDecoder] = ChildDecoder,
) -> ChildDecoder:
    """Returns a decoder with the new objects of definitions.

    Args:
        definitions: What to make, in the order of positions.
        given: By position, objects that are there already; Variables, at least, are.
        owner: The frame that owns the new objects.
        lock: Why they must not be written, or None.
        decoder: Makes the decoder of the list of objects.
    """
    objects = [
        given[position] if position in given else definition.type._allocate(owner, lock)
        for position, definition in enumerate(definitions)
    ]

    # All of them are there before the first is filled: they may refer to each other.
    decode = decoder(objects)
    for position, definition in enumerate(definitions):
        if position not in given:
            objects[position]._unflatten(definition, decode)
    return decode


def build(
    graphdef: GraphDef, values: Iterable[object], owner: Frame | None, lock: str | None = None
) -> tuple[list[Any], list[Any]]:
    """Returns new (roots, objects) from a structure and the values of its Variables."""
    definitions = graphdef.objects
    variables = {}
    for position, value in zip(graphdef.leaves, values, strict=True):
        definition = definitions[position]
        variables[position] = definition.type._make(value, definition.metadata, owner, lock)

    decode = assemble(definitions, variables, owner, lock)
    return [decode(root) for root in graphdef.roots], decode.objects


# --- trees of the user's --------------------------------------------------------------------------

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_NO_TREES = (type, str, bytes, int, float, complex, GraphDef, *_FUNCTIONS)


def check_tree(tree: object, caller: str) -> None:
    """Raises if a public function was given something that holds no model."""
    if isinstance(tree, _NO_TREES):
        raise errors.no_model(tree, caller)


def is_object(value: object) -> bool:
    """Whether ``value`` is a Module, container or Variable; for ``is_leaf=``."""
    return isinstance(value, Object)


def has_objects(tree: object) -> bool:
    """Whether a pytree holds a Module, container or Variable anywhere."""
    # At the speed of JAX's own flattening: while probing, objects are nodes without children, which
    # note that they were met (_core.graph.pytrees). It does not stop at the first one: JAX's
    # flattening counts its depth, and loses count when it is left by an exception.
    local.probing, local.found = True, False
    try:
        jax.tree.structure(tree)
        return local.found
    finally:
        local.probing = False
