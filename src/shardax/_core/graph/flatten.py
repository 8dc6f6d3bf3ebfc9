# SPDX-License-Identifier: Apache-2.0
"""Structure: everything about a model but its values, as one hashable thing.

To *flatten* is to walk from some *roots* and split what is found into a ``GraphDef`` and a list of
Variables. The walk is depth first, in the order in which attributes were first set, and sees each
object once, so shared objects and cycles are ordinary. A *definition* describes one object by its
type and its children; a child is a ``Ref`` to another object of the graph, a ``Static`` value, or
an immutable container of such. ``build`` is the inverse: it makes new objects from a ``GraphDef``
and values.

Flattening a single Module or container is remembered, on the object itself, until the structure
epoch advances (``_core.epoch``).

Models as JAX pytrees.

A Module (or tracked container) is one pytree node: its children are the values of its Variables,
each shared Variable once, and its structure is static. So ``jax.jit``, ``jax.grad``,
``jax.tree.map`` and the rest work on models as they are, and tied weights get their one summed
gradient. A Variable on its own is a node with its value as the child.

What JAX rebuilds inside a plain transform is a *read-only copy*: reading works, but a write would
be lost when the function returns, so it is refused (``_core.frames.READ_ONLY``). What JAX rebuilds
outside, from concrete arrays, is an ordinary model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from shardax._core import epoch
from shardax._core._jax import Tracer
from shardax._core.array_ops import realise_all
from shardax._core.errors import LayerViewError, StaticAttributeError
from shardax._core.frames import (
    READ_ONLY,
    local,
    owner_here,
    resolve,
)
from shardax._core.graph.paths import Path, PathKey, format_path
from shardax._core.graph.static import EMPTY, Metadata, Static
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object, Placeholder, Shown, Wrapper

# --- Structure ---


class Ref(NamedTuple):
    """A child that is an object: its position in the graph's ``objects``."""

    position: int
    kind: str = "ref"


class TupleDef(NamedTuple):
    """A child that is a tuple (among the roots also a list) with objects somewhere inside."""

    type: type
    items: tuple[Any, ...]


class MethodDef(NamedTuple):
    """A child that is a method bound to an object."""

    function: Static
    owner: Any


class PartialDef(NamedTuple):
    """A child that is a ``functools.partial`` with objects somewhere inside."""

    function: Any
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]


class WrapperDef(NamedTuple):
    """A child that is a ``Wrapper`` of something with objects inside.

    Attributes:
        pattern: A wrapper to copy.
        wrapped: What is wrapped.
    """

    pattern: Pattern
    wrapped: Any


class Pattern:
    """A wrapper as configuration: equal when type and what it adds are equal."""

    __slots__ = ("key", "wrapper")

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.key = (type(wrapper), wrapper._wrapping())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.key == other.key


class MappingDef(NamedTuple):
    """A plain dict among the roots, with objects somewhere inside.

    Attributes hold tracked dicts instead.
    """

    type: type
    items: tuple[tuple[Static, Any], ...]


class ModuleDef(NamedTuple):
    """A Module: its class, its attributes, and its array attributes (``boxed``), in order."""

    type: type
    attributes: tuple[tuple[str, Any], ...]
    boxed: tuple[tuple[str, Any], ...]


class ListDef(NamedTuple):
    """A tracked list."""

    type: type
    items: tuple[Any, ...]


class DictDef(NamedTuple):
    """A tracked dict: (key, child) pairs in order."""

    type: type
    items: tuple[tuple[Static, Any], ...]


class VariableDef(NamedTuple):
    """A Variable without its value."""

    type: type
    metadata: Metadata


class GraphDef(Shown):
    """The structure of some roots: hashable, comparable, and without any value.

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

    __slots__ = ("_aliases", "_hash", "_paths", "leaves", "objects", "roots")

    def __init__(self, objects: tuple[Any, ...], roots: tuple[Any, ...]) -> None:
        self.objects = objects
        self.roots = roots
        self.leaves = tuple(i for i, item in enumerate(objects) if type(item) is VariableDef)
        self._hash = hash((objects, roots))
        self._paths: list[Path] | None = None
        self._aliases: Any = None  # of transforms.aliases; kept here, where it keeps nothing alive

    @property
    def leaf_paths(self) -> list[Path]:
        """Path of every Variable by its first occurrence, in the order of ``leaves``."""
        if self._paths is None:
            found = definition_paths(self)
            self._paths = [found[index] for index in self.leaves]
        return self._paths

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

    def __repr__(self) -> str:
        return f"GraphDef({len(self.objects)} objects, {len(self.leaves)} variables)"

    def __reduce__(self) -> Any:
        return (GraphDef, (self.objects, self.roots))


def definition_paths(graphdef: GraphDef, names: Sequence[Path] = ()) -> dict[int, Path]:
    """Returns the path of every object, by walking definitions as objects were walked."""
    found: dict[int, Path] = {}

    def visit(child: Any, path: Path) -> None:
        if type(child) is Ref:
            if child.position not in found:
                found[child.position] = path
                for key, below in definition_children(graphdef.objects[child.position]):
                    visit(below, (*path, key))
        elif type(child) in (TupleDef, MappingDef, PartialDef, WrapperDef):
            for key, below in definition_children(child):
                visit(below, path if key is None else (*path, key))
        elif type(child) is MethodDef:
            visit(child.owner, path)

    for position, root in enumerate(graphdef.roots):
        visit(root, names[position] if names else ())
    return found


def definition_children(definition: Any) -> Iterable[tuple[Any, Any]]:
    """Yields (key, child) of a definition in walking order; key None adds no step to the path."""
    match definition:
        case ModuleDef():
            yield from definition.attributes
            yield from definition.boxed
        case ListDef() | TupleDef():
            yield from enumerate(definition.items)
        case DictDef() | MappingDef():
            yield from ((key.value, child) for key, child in definition.items)
        case WrapperDef():
            yield None, definition.wrapped
        case PartialDef():
            yield None, definition.function
            yield from enumerate(definition.args)
            yield from definition.keywords


class Flat:
    """What flattening found.

    Attributes:
        graphdef: The structure.
        leaves: The Variables, in the order of ``graphdef.leaves``.
        paths: Path of every object, by its first occurrence, in the order of ``graphdef.objects``.
        epoch: The structure epoch at which this was true.
    """

    __slots__ = ("_leaf_paths", "epoch", "graphdef", "leaves", "paths")

    def __init__(self, graphdef: GraphDef, leaves: list[Any], paths: list[Path], at: int) -> None:
        self.graphdef = graphdef
        self.leaves = leaves
        self.paths = paths
        self.epoch = at
        self._leaf_paths: list[Path] | None = None

    @property
    def leaf_paths(self) -> list[Path]:
        """Path of every Variable, in the order of ``leaves``."""
        if self._leaf_paths is None:
            self._leaf_paths = [self.paths[index] for index in self.graphdef.leaves]
        return self._leaf_paths


_COMMON_TYPES = frozenset({bool, int, str, type(None)})


@functools.lru_cache(maxsize=4096, typed=True)  # configuration repeats from layer to layer
def _common_static(value: Any) -> Static:
    return Static(value)


class Walk:
    """One walk over objects; continued from further roots, it sees what they share.

    Args:
        marking: Whether to mark every object that is met (``_core.epoch``), because the result will
            be remembered.
    """

    def __init__(self, marking: bool = False) -> None:
        self.marking = marking
        self.objects: list[Any] = []
        self.definitions: list[Any] = []
        self.paths: list[Path] = []
        self.index: dict[int, int] = {}

    def encode(self, value: Any, path: Path) -> Any:
        """Returns ``value`` as a child, walking into it if it holds objects."""
        if type(value) in _COMMON_TYPES:
            return _common_static(value)
        if isinstance(value, Object):
            return Ref(self.visit(value, path))
        if isinstance(value, (tuple, list)) and has_parts(value):
            return TupleDef(
                type(value),
                tuple(self.encode(item, (*path, i)) for i, item in enumerate(value)),
            )
        if isinstance(value, dict) and has_parts(value):
            items = ((Static(key), self.encode(item, (*path, key))) for key, item in value.items())
            return MappingDef(type(value), tuple(items))
        if isinstance(value, types.MethodType) and isinstance(value.__self__, Object):
            return MethodDef(Static(value.__func__), Ref(self.visit(value.__self__, path)))
        if isinstance(value, Wrapper) and has_parts(value):
            return WrapperDef(Pattern(value), self.encode(value.__wrapped__, path))
        if isinstance(value, functools.partial) and has_parts(value):
            return PartialDef(
                self.encode(value.func, path),
                tuple(self.encode(item, (*path, i)) for i, item in enumerate(value.args)),
                tuple(
                    (name, self.encode(item, (*path, name)))
                    for name, item in value.keywords.items()
                ),
            )
        try:
            return Static(value)
        except TypeError as error:
            raise StaticAttributeError(
                f"The {type(value).__name__} at {format_path(path)} is neither data nor hashable "
                f"configuration ({error}), and came there "
                f"without being assigned as an attribute (through vars(), "
                f"functools.cached_property, or by changing after it was "
                f"assigned). Assign it: model.name = value."
            ) from error

    def visit(self, item: Object, path: Path) -> int:
        """Returns the object's position, walking into it the first time it is met."""
        known = self.index.get(id(item))
        if known is not None:
            return known
        position = self.index[id(item)] = len(self.objects)
        self.objects.append(item)
        self.paths.append(path)
        self.definitions.append(None)
        if self.marking:  # before looking inside, so that no edit by another thread goes unnoticed
            item._marked = True
        self.definitions[position] = item._describe(
            lambda child, key: self.encode(child, (*path, key))
        )
        return position

    def finish(self, roots: Iterable[Any], at: int) -> Flat:
        """Returns what was found."""
        graphdef = GraphDef(tuple(self.definitions), tuple(roots))
        return Flat(graphdef, [self.objects[i] for i in graphdef.leaves], self.paths, at)


def has_parts(value: Any) -> bool:
    """Whether an immutable container holds an object, or a place for one, at any depth."""
    if isinstance(value, (Object, Placeholder)):
        return True
    if isinstance(value, (tuple, list)):
        return any(has_parts(item) for item in value)
    if isinstance(value, dict):
        return any(has_parts(item) for item in value.values())
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, Object)
    if isinstance(value, Wrapper):
        return has_parts(value.__wrapped__)
    if isinstance(value, functools.partial):
        return any(has_parts(item) for item in (value.func, *value.args, *value.keywords.values()))
    return False


def flatten_roots(roots: Sequence[Any], names: Sequence[Path] | None = None) -> Flat:
    """Flattens several roots together, so that an object shared between them is one.

    Args:
        roots: Objects, immutable containers of them, or static values.
        names: Path of each root; by default empty.
    """
    at = (
        epoch.current
    )  # read before walking: an edit during the walk then invalidates what is remembered
    walk = Walk(marking=True)
    paths = names or [()] * len(roots)
    flat = walk.finish(
        [walk.encode(root, path) for root, path in zip(roots, paths, strict=True)], at
    )
    _check_views(flat)
    return flat


def _check_views(flat: Flat) -> None:
    """Raises if a Variable stands beside the stacked one that it is a view of (``_core.graph.views``)."""
    views = [(i, leaf) for i, leaf in enumerate(flat.leaves) if leaf._parent is not None]
    if not views:
        return
    place = {id(leaf): position for position, leaf in enumerate(flat.leaves)}
    for position, leaf in views:
        parent = leaf._parent
        while parent is not None:
            if id(parent) in place:
                paths = [flat.leaf_paths[i] for i in (place[id(parent)], position)]
                raise LayerViewError(
                    f"The stacked {type(parent).__name__} at {format_path(paths[0])} stands beside "
                    f"a view of one of its layers, at {format_path(paths[1])}: they would be two "
                    f"Variables for one value. Pass the stack and take the layer inside, "
                    f"layer = stack[i]; or pass a copy of the layer, sx.clone(stack[i])."
                )
            parent = parent._parent


def walk_objects(roots: Sequence[Any]) -> list[Any]:
    """Returns all objects reachable from ``roots``, in the order of ``GraphDef.objects``."""
    walk = Walk()
    for root in roots:
        walk.encode(root, ())
    return walk.objects


def flatten(root: Object) -> Flat:
    """Flattens one object; for Modules and containers remembered while the structure epoch stays.

    The memory is kept on the root, so that it keeps nothing alive: static values in a structure may
    lead back to the model (a function that closes over it).
    """
    known: Flat | None = getattr(root, "_flat", None)
    if known is not None and known.epoch == epoch.current:
        return known
    flat = flatten_roots((root,))
    if type(flat.graphdef.objects[0]) is not VariableDef:
        object.__setattr__(root, "_flat", flat)
    return flat


class Decoder:
    """Turns children back into values, given the graph's objects."""

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects

    def __call__(self, child: Any) -> Any:
        kind = type(child)
        if kind is Ref:
            return self.objects[child.position]
        if kind is Static:
            return child.value
        if kind is TupleDef:
            return rebuild_tuple(child.type, [self(item) for item in child.items])
        if kind is MappingDef:
            return {key.value: self(item) for key, item in child.items}
        if kind is WrapperDef:
            return child.pattern.wrapper._wrap(self(child.wrapped))
        if kind is MethodDef:
            return types.MethodType(child.function.value, self(child.owner))
        keywords = {name: self(item) for name, item in child.keywords}
        return functools.partial(self(child.function), *map(self, child.args), **keywords)


def rebuild_tuple(kind: type, items: list[Any]) -> Any:
    """Makes a tuple of the given type, which may be a NamedTuple."""
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def rebuild(
    walk: Walk,
    given: Mapping[int, Any],
    owner: Any,
    decoder: Callable[[Sequence[Any]], Decoder] = Decoder,
) -> Decoder:
    """Makes new Modules and containers like those of a walk.

    Args:
        walk: What was walked.
        given: By position, what to put in place of objects; all Variables are among them.
        owner: The frame that will own the objects, or None.
        decoder: Makes what turns children into values, from the new objects.

    Returns:
        The decoder, with the objects in the order of the walk.
    """
    new = [(i, each) for i, each in enumerate(walk.definitions) if i not in given]
    objects: list[Any] = [given.get(position) for position in range(len(walk.objects))]
    for position, definition in new:
        objects[position] = definition.type._allocate(owner, None)
    decode = decoder(objects)
    for position, definition in new:
        objects[position]._fill(definition, decode)
    return decode


def build(
    graphdef: GraphDef, values: Sequence[Any], owner: Any, lock: str | None = None
) -> tuple[list[Any], list[Any]]:
    """Makes new objects from a structure and values: the inverse of flattening.

    Args:
        graphdef: The structure.
        values: One value per Variable, in the order of ``graphdef.leaves``.
        owner: The frame that will own the objects, or None.
        lock: Why the objects must not be written, or None.

    Returns:
        (roots, objects), the latter in the order of ``graphdef.objects``.
    """
    remaining = iter(values)
    objects: list[Any] = []
    for definition in graphdef.objects:
        if type(definition) is VariableDef:
            objects.append(definition.type._make(next(remaining), definition.metadata, owner, lock))
        else:
            objects.append(definition.type._allocate(owner, lock))
    decode = Decoder(objects)
    for item, definition in zip(objects, graphdef.objects, strict=True):
        if type(definition) is not VariableDef:
            item._fill(definition, decode)
    return [decode(root) for root in graphdef.roots], objects


# --- Pytree ---

M = TypeVar("M")


def has_objects(tree: Any) -> bool:
    """Whether a pytree holds a Module, container or Variable anywhere.

    Runs at the speed of JAX's own flattening. It does not stop at the first object: JAX's
    flattening counts its depth and loses count when it is left by an exception.
    """
    local.probing, local.found = True, False
    try:
        jax.tree.structure(tree)
        return local.found
    finally:
        local.probing = False


def flatten_plain(tree: Any) -> tuple[list[Any], Any] | None:
    """Flattens a pytree, as ``jax.tree.flatten``; None if there are objects anywhere in it."""
    local.probing, local.found = True, False
    try:
        flat = jax.tree.flatten(tree)
        return None if local.found else flat
    finally:
        local.probing = False


def is_object(value: Any) -> bool:
    """Whether ``value`` is a Module, container or Variable; for ``is_leaf=``."""
    return isinstance(value, Object)


def values_of(leaves: Iterable[Any]) -> list[Any]:
    """Reads the values of Variables as seen from the current frame, as JAX arrays.

    Lazy ones materialise, NumPy ones convert.
    """
    frame = local.frame
    targets = [v if frame is None else resolve(v, frame) for v in leaves]
    values = [target._value for target in targets]
    if any(isinstance(value, (LazyValue, np.ndarray)) for value in values):
        realise_all(targets)
        values = [target.value for target in targets]
    return values


def _lock_for(children: Sequence[Any]) -> str | None:
    traced = any(isinstance(leaf, Tracer) for child in children for leaf in jax.tree.leaves(child))
    return READ_ONLY if traced else None


_PROBED = GraphDef((), ())
"""What flattening gives while a pytree is only being searched; nobody looks at it."""


def _flatten_graph(root: Any) -> tuple[list[Any], GraphDef]:
    if local.probing:
        local.found = True
        return [], _PROBED
    flat = flatten(root)
    return values_of(flat.leaves), flat.graphdef


def _flatten_graph_with_keys(root: Any) -> tuple[list[tuple[PathKey, Any]], GraphDef]:
    values, graphdef = _flatten_graph(root)
    return list(zip(map(PathKey, flatten(root).leaf_paths), values, strict=True)), graphdef


def _unflatten_graph(graphdef: GraphDef, children: Iterable[Any]) -> Any:
    values = list(children)
    return build(graphdef, values, owner_here(), _lock_for(values))[0][0]


def register_graph(cls: type) -> None:
    """Registers a Module or container class with JAX as one node."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_graph_with_keys, _unflatten_graph, _flatten_graph
    )


def register_variable(cls: Any) -> None:
    """Registers a Variable class with JAX: the value is the child, type and metadata are static."""

    def flatten_variable(variable: Any) -> tuple[list[Any], Metadata]:
        if local.probing:
            local.found = True
            return [], EMPTY
        return values_of((variable,)), resolve(variable, local.frame)._metadata

    def flatten_with_keys(variable: Any) -> tuple[list[tuple[PathKey, Any]], Metadata]:
        values, metadata = flatten_variable(variable)
        return [(PathKey(("value",)), values[0])], metadata

    def unflatten_variable(metadata: Metadata, children: Iterable[Any]) -> Any:
        values = list(children)
        return cls._make(values[0], metadata, owner_here(), _lock_for(values))

    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, unflatten_variable, flatten_variable
    )


def mutable(tree: M) -> M:
    """Makes copies that JAX rebuilt inside a plain transform writable, in place.

    Use it when the function returns the copy; a write to a copy that is not returned is lost.

    Args:
        tree: A Module, Variable, container, or pytree of them.

    Returns:
        The same objects, writable.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> @jax.jit
        ... def double(w):
        ...     w = sx.mutable(w)
        ...     w[...] = 2 * w
        ...     return w
        >>> double(sx.Param(jnp.ones(2))).value.tolist()
        [2.0, 2.0]
    """
    for root in jax.tree.leaves(tree, is_leaf=is_object):
        if isinstance(root, Object):
            for item in walk_objects((root,)):
                if item._lock is READ_ONLY:
                    item._lock = None
    return tree
