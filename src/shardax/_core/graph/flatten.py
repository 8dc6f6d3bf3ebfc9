# SPDX-License-Identifier: Apache-2.0
"""Graph definitions, flattening, and Modules as JAX pytrees.

*Flattening* walks from some *roots* and splits what is found into a ``GraphDef`` and a list of
Variables. The walk is depth first, in the order in which attributes were first set, and sees each
object once, so shared objects and cycles are ordinary. A *definition* describes one object by its
type and its children; a child is a ``Ref`` to another object of the graph, a ``Static`` value, or a
``NodeDef``, a container of such (``_core.graph.handlers``). ``assemble`` is the inverse: it makes
new objects from definitions. Everything that splits models and puts them together again is built on
these two.

Flattening a single Module or container is remembered, on the object itself, until the structure
epoch advances (``_core.object``), or until a settings object in it (``_core.graph.settings``) holds
something else: these are listed, as nothing tells when they change.

To JAX a Module (or tracked container) is one pytree: its leaves are the values of its Variables,
each shared Variable once, in nodes for the steps of their paths (``_core.graph.key_levels``), and
its structure is static. So ``jax.jit``, ``jax.grad``, ``jax.tree.map`` and the rest work on models
as they are, and tied weights get their one summed gradient. A Variable on its own is a node with
its value as the child. What JAX rebuilds inside a plain transform is a *read-only copy*, whatever
it holds: a write would be lost when the function returns, so it is refused
(``_core.frames.READ_ONLY``). What JAX rebuilds outside, from concrete arrays, is an ordinary model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.tree_util import DictKey

from shardax._core._jax import Tracer, rebuilds_arguments
from shardax._core.errors import ModuleError, StaticAttributeError
from shardax._core.frames import READ_ONLY, PlainTrace, local, owner_here, resolve
from shardax._core.graph.handlers import LEAF, PLACEHOLDER, Handler, NodeType, handler_of, has_parts
from shardax._core.graph.held import ObjectSearch, set_aside
from shardax._core.graph.key_levels import Child, KeyLevel
from shardax._core.graph.paths import (
    KeyEntry,
    Leaf,
    Path,
    PyTree,
    attribute_key,
    format_path,
    item_key,
)
from shardax._core.graph.settings import (
    IncomparableError,
    Setting,
    SettingsKey,
    have_changed,
    incomparable_attribute,
    settings_key,
)
from shardax._core.graph.static import EMPTY, Metadata, Static
from shardax._core.init.lazy import LazyValue, materialize_all
from shardax._core.object import Object, Shown, epoch


class Ref(NamedTuple):
    """A child that is an object: its position in the graph's ``objects``."""

    position: int
    kind: str = "ref"


class NodeDef(NamedTuple):
    """A child that is a container without identity, with objects somewhere inside."""

    handler: Handler
    config: Any  # what the container is besides its children
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class ModuleDef(NamedTuple):
    """A Module: its class, its attributes, and its array attributes, in order."""

    type: type
    attributes: tuple[tuple[str, Any], ...]
    array_attributes: tuple[tuple[str, Any], ...]


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

    __slots__ = ("__weakref__", "_hash", "_key_level", "_paths", "leaves", "objects", "roots")

    def __init__(self, objects: tuple[Any, ...], roots: tuple[PyTree, ...]) -> None:
        self.objects = objects
        self.roots = roots
        self.leaves = tuple(i for i, item in enumerate(objects) if type(item) is VariableDef)
        self._hash = hash((objects, roots))
        self._paths: list[Path] | None = None
        self._key_level: KeyLevel | None = None

    @property
    def leaf_paths(self) -> list[Path]:
        """First path of every Variable, in the order of ``leaves``."""
        if self._paths is None:
            found = definition_paths(self)
            self._paths = [found[index] for index in self.leaves]
        return self._paths

    @property
    def key_level(self) -> KeyLevel:
        """Keys of the nodes that JAX sees in a model of one root."""
        if self._key_level is None:
            self._key_level = _KeyLevels(self).root()
        return self._key_level

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
        for definition in (*self.roots, *self.objects):
            for _, value in static_values(definition, ()):
                yield value

    def __repr__(self) -> str:
        return f"GraphDef({len(self.objects)} objects, {len(self.leaves)} variables)"

    def __reduce__(self) -> Any:
        return (GraphDef, (self.objects, self.roots))


set_aside(GraphDef)


def definition_paths(graphdef: GraphDef, names: Sequence[Path] = ()) -> dict[int, Path]:
    """Returns the path of every object by its first occurrence."""
    found: dict[int, Path] = {}

    def visit(child: object, path: Path) -> None:
        if type(child) is Ref:
            if child.position not in found:
                found[child.position] = path
                for key, below in definition_children(graphdef.objects[child.position]):
                    visit(below, (*path, key))
        elif type(child) is NodeDef:
            for key, below in definition_children(child):
                visit(below, path if key is None else (*path, key))

    for position, root in enumerate(graphdef.roots):
        visit(root, names[position] if names else ())
    return found


class _KeyLevels:
    """Finds the key levels of a structure of one root; a Variable is at its first occurrence."""

    def __init__(self, graphdef: GraphDef) -> None:
        self.graphdef = graphdef
        self.seen: set[int] = set()  # positions of objects
        self.count = 0  # of Variables

    def root(self) -> KeyLevel:
        """Returns the level of the root's node."""
        (root,) = self.graphdef.roots
        self.seen.add(root.position)
        return self._level(self.graphdef.objects[root.position])

    def _level(self, definition: object) -> KeyLevel:
        start = self.count
        keys: list[KeyEntry] = []
        below: list[KeyLevel | None] = []
        self._add_children(definition, keys, below)
        return KeyLevel(keys, below, start, self.count)

    def _add_children(
        self, definition: object, keys: list[KeyEntry], below: list[KeyLevel | None]
    ) -> None:
        for key, child in _keyed_children(definition):
            if type(child) is Ref:
                if child.position in self.seen:
                    continue
                self.seen.add(child.position)
                child = self.graphdef.objects[child.position]

            if type(child) is VariableDef:
                keys.append(key)
                below.append(None)
                self.count += 1
            elif key is None:  # no step, as from a partial to its function
                self._add_children(child, keys, below)
            else:
                level = self._level(child)
                if level.keys:
                    keys.append(key)
                    below.append(level)


def _keyed_children(definition: object) -> Iterator[tuple[KeyEntry | None, Any]]:
    """Yields JAX's key and the definition of each child that is not static; None is no step."""
    match definition:
        case ModuleDef():
            for name, child in definition_children(definition):
                if type(child) is not Static:
                    yield attribute_key(name), child
        case ListDef():
            for position, child in enumerate(definition.items):
                if type(child) is not Static:
                    yield item_key(position), child
        case DictDef():
            for key, child in definition.items:
                if type(child) is not Static:
                    yield DictKey(key.value), child
        case NodeDef():
            entries = definition.handler.key_entries(definition.config, definition.keys)
            for entry, child in zip(entries, definition.items, strict=True):
                if type(child) is not Static:
                    yield entry, child


def definition_children(definition: object) -> Iterable[tuple[Any, Any]]:
    """Yields (key, child) pairs of a definition; key None is no step."""
    match definition:
        case ModuleDef():
            yield from definition.attributes
            yield from definition.array_attributes
        case ListDef():
            yield from enumerate(definition.items)
        case DictDef():
            yield from ((key.value, child) for key, child in definition.items)
        case NodeDef():
            yield from zip(definition.keys, definition.items, strict=True)


def static_values(child: object, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields (path, value) of every static value in a child or definition."""
    if type(child) is Static:
        yield path, child.value
    for key, below in definition_children(child):
        yield from static_values(below, path if key is None else (*path, key))


def settings_in(graphdef: GraphDef) -> dict[int, Static]:
    """Returns the settings objects of a structure, as static values, by ``id``."""
    found: dict[int, Static] = {}

    def visit(child: object) -> None:
        if type(child) is Static:
            if type(child.key) is SettingsKey:
                found[id(child.value)] = child
            return
        for _, below in definition_children(child):
            visit(below)

    for definition in graphdef.objects:
        visit(definition)
    return found


class Flat:
    """What flattening found."""

    __slots__ = ("_leaf_paths", "epoch", "graphdef", "leaves", "paths", "settings")

    def __init__(
        self,
        graphdef: GraphDef,
        leaves: list[Leaf],
        paths: list[Path],
        at: int,
        settings: list[Setting],
    ) -> None:
        self.graphdef = graphdef
        self.leaves = leaves  # the Variables, in the order of graphdef.leaves
        self.paths = paths  # first path of every object, in the order of graphdef.objects
        self.epoch = at  # the structure epoch at which this was true
        self.settings = settings  # the settings objects, which change without a new epoch
        self._leaf_paths: list[Path] | None = None

    @property
    def leaf_paths(self) -> list[Path]:
        """Path of every Variable, in the order of ``leaves``."""
        if self._leaf_paths is None:
            self._leaf_paths = [self.paths[index] for index in self.graphdef.leaves]
        return self._leaf_paths


_NEVER = -1  # an epoch that does not come
_COMMON_TYPES = frozenset({bool, int, str, type(None)})


@functools.lru_cache(maxsize=4096, typed=True)  # configuration repeats from layer to layer
def _common_static(value: object) -> Static:
    return Static(value)


class GraphWalk:
    """One walk over objects; from further roots it sees what they share."""

    def __init__(self, marking: bool = False) -> None:
        self.marking = marking  # whether the result will be remembered, see _core.object
        self.volatile = False  # whether it met something that may change without notice
        self.objects: list[Any] = []
        self.definitions: list[Any] = []
        self.paths: list[Path] = []
        self.index: dict[int, int] = {}
        self.settings: list[Setting] = []
        # By ``id``, static values that are what they were, whatever was changed in them in place.
        self.unchanged: Mapping[int, Static] = {}
        # What stands in objects is searched for others that the walk does not find.
        self._depth = 0  # of the objects around
        self._search = ObjectSearch()

    def encode(self, value: Any, path: Path, *, is_root: bool = False) -> Leaf:
        """Returns ``value`` as a child, walking into it if it holds objects."""
        if type(value) in _COMMON_TYPES:
            return _common_static(value)
        handler = handler_of(value)
        if handler.is_object:
            return Ref(self.visit(value, path))
        if handler is not LEAF and handler is not PLACEHOLDER and has_parts(value):
            self.volatile |= handler.volatile
            pairs = handler.children(value)
            keys = tuple(key for key, _ in pairs)
            items = (self.encode(item, path if k is None else (*path, k)) for k, item in pairs)
            config = handler.config(value)
            if self._depth:
                hidden = self._search.beside_children(value, config)
                if hidden is not None:
                    raise hidden.error(value, f"what stands at {format_path(path)}")
            if type(config) is NodeType and type(config.static.key) is SettingsKey:
                self.settings.append(Setting(path, config.static.value, config.static.key))
            return NodeDef(handler, config, keys, tuple(items))
        if self._depth and handler is not PLACEHOLDER and id(value) not in self.unchanged:
            hidden = self._search.held_by(value)
            if hidden is not None:
                raise hidden.error(value, f"what stands at {format_path(path)}")
        try:
            # What a function reads from where it was made is what it was when it was traced.
            return Static(value) if is_root else self._static(value, path)
        except IncomparableError as error:
            raise StaticAttributeError(
                incomparable_attribute(type(value), f"at {format_path(path)}", error)
            ) from error
        except TypeError as error:
            raise StaticAttributeError(
                f"The {type(value).__name__} at {format_path(path)} is neither data nor hashable "
                f"configuration ({error}), and came there without being assigned as an attribute "
                f"(through vars(), functools.cached_property, or by changing after it was "
                f"assigned). Assign it: model.name = value."
            ) from error

    def _static(self, value: object, path: Path) -> Static:
        known = self.unchanged.get(id(value))
        if known is not None:
            return known
        key = settings_key(value)
        if type(key) is SettingsKey:
            self.settings.append(Setting(path, value, key))
        return Static(value, key)

    def visit(self, item: Object, path: Path) -> int:
        """Returns the object's position; walks into it the first time."""
        known = self.index.get(id(item))
        if known is not None:
            return known
        position = self.index[id(item)] = len(self.objects)
        self.objects.append(item)
        self.paths.append(path)
        self.definitions.append(None)
        if self.marking:  # before looking inside, so that no edit by another thread goes unnoticed
            object.__setattr__(item, "_marked", True)
        self._depth += 1
        self.definitions[position] = item._flatten(
            lambda child, key: self.encode(child, (*path, key))
        )
        self._depth -= 1
        return position


def flatten_roots(roots: Sequence[object], names: Sequence[Path] | None = None) -> Flat:
    """Flattens several roots together, with what they share."""
    at = epoch.current  # before walking: an edit during the walk then invalidates the result
    walk = GraphWalk(marking=True)
    paths = names or [()] * len(roots)
    pairs = zip(roots, paths, strict=True)
    children = tuple(walk.encode(root, path, is_root=True) for root, path in pairs)
    graphdef = GraphDef(tuple(walk.definitions), children)
    at = _NEVER if walk.volatile else at
    leaves = [walk.objects[i] for i in graphdef.leaves]
    flat = Flat(graphdef, leaves, walk.paths, at, walk.settings)
    _check_views(flat)
    return flat


def _check_views(flat: Flat) -> None:
    """Raises if a Variable stands beside the stacked one that it views."""
    views = [(i, leaf) for i, leaf in enumerate(flat.leaves) if leaf._parent is not None]
    if not views:
        return
    place = {id(leaf): position for position, leaf in enumerate(flat.leaves)}
    for position, leaf in views:
        parent = leaf._parent
        while parent is not None:
            if id(parent) in place:
                paths = [flat.leaf_paths[i] for i in (place[id(parent)], position)]
                raise ModuleError(
                    f"The stacked {type(parent).__name__} at {format_path(paths[0])} stands beside "
                    f"a view of one of its layers, at {format_path(paths[1])}: they would be two "
                    f"Variables for one value. Pass the stack and take the layer inside, "
                    f"layer = stack[i]; or pass a copy of the layer, sx.clone(stack[i])."
                )
            parent = parent._parent


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_NO_TREES = (type, str, bytes, int, float, complex, GraphDef, *_FUNCTIONS)


def check_tree(tree: object, caller: str) -> None:
    """Raises if a public function was given something that holds no model."""
    if isinstance(tree, _NO_TREES):
        fix = f"{tree.__name__}(...)" if isinstance(tree, type) else "model"
        raise ModuleError(
            f"sx.{caller} takes a model as its first argument, a Module, Variable, or tuple, list "
            f"or dict of these, but was given {str(tree)[:80]!r} of type {type(tree).__name__}. "
            f"Give it the object: sx.{caller}({fix}, ...)."
        )


def walk_objects(roots: Sequence[object]) -> list[Any]:
    """Returns all objects reachable from ``roots``, in the order of ``GraphDef.objects``."""
    walk = GraphWalk()
    for root in roots:
        walk.encode(root, (), is_root=True)
    return walk.objects


def flatten(root: Object) -> Flat:
    """Flattens one object; of Modules and containers the result is remembered."""
    # On the root, so that it keeps nothing alive: static values in a structure may lead back to the
    # model (a function that closes over it).
    known: Flat | None = getattr(root, "_flat", None)
    if (
        known is not None
        and known.epoch == epoch.current
        and not (known.settings and have_changed(known.settings))
    ):
        return known
    flat = flatten_roots((root,))
    if type(flat.graphdef.objects[0]) is not VariableDef:
        object.__setattr__(root, "_flat", flat)
    return flat


class ChildDecoder:
    """Turns children back into values, given the graph's objects."""

    __slots__ = ("objects",)

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def __call__(self, child: Any) -> PyTree:
        kind = type(child)
        if kind is Ref:
            return self.objects[child.position]
        if kind is Static:
            return child.value
        items = map(self, child.items)
        return child.handler.rebuild(child.config, zip(child.keys, items, strict=True))


def assemble(
    definitions: Sequence[Any],
    given: Mapping[int, Any],
    owner: Any,
    lock: str | None = None,
    decoder: Callable[[list[Any]], ChildDecoder] = ChildDecoder,
) -> ChildDecoder:
    """Makes the objects of definitions; Variables, at least, are given."""
    objects = [
        given[i] if i in given else definition.type._allocate(owner, lock)
        for i, definition in enumerate(definitions)
    ]
    decode = decoder(objects)
    for i, definition in enumerate(definitions):
        if i not in given:
            objects[i]._unflatten(definition, decode)
    return decode


def build(
    graphdef: GraphDef, values: Iterable[object], owner: object, lock: str | None = None
) -> tuple[list[Any], list[Any]]:
    """Returns new (roots, objects) from a structure and values."""
    definitions = graphdef.objects
    given = {}
    for position, value in zip(graphdef.leaves, values, strict=True):
        definition = definitions[position]
        given[position] = definition.type._make(value, definition.metadata, owner, lock)
    decode = assemble(definitions, given, owner, lock)
    return [decode(root) for root in graphdef.roots], decode.objects


# --- pytrees --------------------------------------------------------------------------------------

M = TypeVar("M")


def has_objects(tree: object) -> bool:
    """Whether a pytree holds a Module, container or Variable anywhere."""
    # At the speed of JAX's own flattening. It does not stop at the first object: JAX's flattening
    # counts its depth and loses count when it is left by an exception.
    local.probing, local.found = True, False
    try:
        jax.tree.structure(tree)
        return local.found
    finally:
        local.probing = False


def flatten_plain(tree: object) -> tuple[list[Leaf], Leaf] | None:
    """Flattens a pytree by ``jax.tree.flatten``; None if it holds objects."""
    local.probing, local.found = True, False
    try:
        flat = jax.tree.flatten(tree)
        return None if local.found else flat
    finally:
        local.probing = False


def is_object(value: object) -> bool:
    """Whether ``value`` is a Module, container or Variable; for ``is_leaf=``."""
    return isinstance(value, Object)


def values_of(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Reads Variables as seen from the current frame; lazy values materialise."""
    frame = local.frame
    targets = [v if frame is None else resolve(v, frame) for v in leaves]
    values = [target._value for target in targets]
    if any(isinstance(value, (LazyValue, np.ndarray)) for value in values):
        materialize_all(targets)
        values = [target._read() for target in targets]
    return values


def _rebuilt_here(children: Sequence[object]) -> tuple[Any, str | None]:
    """Returns owner and lock of what JAX rebuilds."""
    owner = owner_here()
    is_lost = (
        isinstance(owner, PlainTrace)
        or any(isinstance(leaf, Tracer) for child in children for leaf in jax.tree.leaves(child))
        or (owner is None and rebuilds_arguments())
    )
    return owner, READ_ONLY if is_lost else None


_PROBED: Any = None  # result of flattening while a pytree is only being searched


class ModelForm:
    """What JAX knows of a model besides its Branches and values."""

    __slots__ = ("graphdef",)

    def __init__(self, graphdef: GraphDef) -> None:
        self.graphdef = graphdef

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelForm):
            return NotImplemented
        if self.graphdef == other.graphdef:
            return True
        # Where Branches differ, the models do. JAX shall find it there, and name the place.
        level, other_level = self.graphdef.key_level, other.graphdef.key_level
        return level.keys == other_level.keys and level != other_level

    def __hash__(self) -> int:
        return hash(self.graphdef.key_level.keys)

    def __repr__(self) -> str:
        keys = "".join(map(str, self.graphdef.key_level.keys))
        return f"{self.graphdef!r} of {keys}"


def _flatten_graph(root) -> tuple[Sequence[Child], ModelForm]:
    if local.probing:
        local.found = True
        return [], _PROBED
    flat = flatten(root)
    graphdef = flat.graphdef
    return graphdef.key_level.children(values_of(flat.leaves)), ModelForm(graphdef)


def _flatten_graph_with_keys(root) -> tuple[list[tuple[KeyEntry, Child]], ModelForm]:
    children, form = _flatten_graph(root)
    return list(zip(form.graphdef.key_level.keys, children, strict=True)), form


def _unflatten_graph(form: ModelForm, children: Iterable[Child]):
    values = form.graphdef.key_level.leaves(children)
    return build(form.graphdef, values, *_rebuilt_here(values))[0][0]


def register_graph(cls: type) -> None:
    """Registers a Module or container class with JAX as one node."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_graph_with_keys, _unflatten_graph, _flatten_graph
    )


def register_variable(cls: Any) -> None:
    """Registers a Variable class with JAX; the value is its child."""

    def flatten_variable(variable) -> tuple[list[Leaf], Metadata]:
        if local.probing:
            local.found = True
            return [], EMPTY
        return values_of((variable,)), resolve(variable, local.frame)._metadata

    def flatten_with_keys(variable) -> tuple[list[tuple[KeyEntry, Any]], Metadata]:
        values, metadata = flatten_variable(variable)
        return [(attribute_key("value"), values[0])], metadata

    def unflatten_variable(metadata: Metadata, children: Iterable[Any]):
        values = list(children)
        return cls._make(values[0], metadata, *_rebuilt_here(values))

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
                    object.__setattr__(item, "_lock", None)
    return tree
