# SPDX-License-Identifier: Apache-2.0
"""Stacks of like objects and views of their layers.

To *stack* values is to put them together along a new first dimension; a *part* is one of them
again. Lazy values stay lazy: a ``LazyStack`` is the recipes of its parts, which one program runs
together where they are alike, each with keys of its own, so the numbers are those of the parts to
the last bit. NumPy arrays and shapes alone stay what they are, so stacking what was just built runs
no JAX operation.

A *view* of a Variable whose value is stacked is a Variable of the same type without a value of its
own: it reads and writes its part of the *parent's* value. A view of a Module or container is an
object of the same type that holds views. The structure of all parts is one, so a view refuses to
change its own and follows changes of the original whenever the structure epoch advances. There is
at most one view of an object and part at a time, so that two ways to it are one Variable. A view
and its parent are two Variables for one value, so no lifted call takes both (``flatten_roots``,
``block_parents``).

Stacking objects of one structure gives one object whose Variables hold the stacked values, with the
name of the new dimension before their axes. An object that is one and the same in all of them, such
as a random stream that they draw from together, is *shared*: it stays as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax._core._jax import Tracer
from shardax._core.errors import ModuleError
from shardax._core.explain.variable_errors import deleted_read
from shardax._core.frames import Blocked, Frame, local, note_read, owner_here, resolve, several
from shardax._core.graph import flatten
from shardax._core.graph.handlers import knows_names
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.static import Metadata, Static
from shardax._core.init.keys import KeySource
from shardax._core.init.lazy import LazyValue, Recipe
from shardax._core.init.programs import InitializerProgram
from shardax._core.object import Object, epoch
from shardax._core.values import is_deleted
from shardax._core.variable import Variable


class LazyStack(Recipe):
    """Lazy values of one shape and dtype, stacked."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LazyValue]) -> None:
        self.parts = tuple(parts)
        self.shape = (len(self.parts), *self.parts[0].shape)
        self.dtype = self.parts[0].dtype

    @property
    def sources(self) -> tuple[KeySource, ...]:
        recipes = [part for part in self.parts if isinstance(part, Recipe)]
        return tuple(source for recipe in recipes for source in recipe.sources)

    @property
    def is_known(self) -> bool:
        return super().is_known and self.likeness is not self

    @property
    def likeness(self) -> Hashable:
        first = self.parts[0]
        if not isinstance(first, Recipe) or first.likeness is first:
            return self
        for part in self.parts[1:]:
            if type(part) is not type(first) or part.likeness != first.likeness:
                return self
        return len(self.parts), type(first), first.likeness

    def program(
        self, sharding: Sharding | None = None, lead: tuple[int, ...] = ()
    ) -> InitializerProgram:
        first = self.parts[0]
        assert isinstance(first, Recipe)
        return first.program(sharding, (*lead, len(self.parts)))

    def run(self, program: InitializerProgram, words: Sequence[Leaf]) -> jax.Array:
        """Runs the program."""
        if not words:
            return program(None)
        stacked = jnp.stack(words) if _is_traced(words) else np.stack(words)
        return program(stacked.reshape(*self._lead(), -1))

    def _lead(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (len(self.parts), *(first._lead() if isinstance(first, LazyStack) else ()))

    def compute(self, sharding: Sharding | None = None) -> jax.Array:
        if self.likeness is not self:
            return super().compute(sharding)
        if isinstance(sharding, NamedSharding):
            part_sharding = without_lead(sharding)
            return _stack_program(sharding)([part.compute(part_sharding) for part in self.parts])
        stacked = jnp.stack([part.compute() for part in self.parts])
        return stacked if sharding is None else jax.device_put(stacked, sharding)


class LazyPart(LazyValue):
    """One part of a lazy value that is no stack of parts."""

    __slots__ = ("index", "read")

    def __init__(self, read: Callable[[], Any], whole: LazyValue, index: int) -> None:
        self.read = read  # returns the stacked array
        self.index = index
        self.shape = whole.shape[1:]
        self.dtype = whole.dtype

    def compute(self, sharding: Sharding | None = None) -> jax.Array:
        part = self.read()[self.index]
        return part if sharding is None else jax.device_put(part, sharding)


# --- stacking values ------------------------------------------------------------------------------


def stack_values(values: Sequence[Leaf]) -> Leaf:
    """Stacks the values of like Variables."""
    first = values[0]
    if not _is_leaf(first):
        return jax.tree.map(lambda *leaves: stack_values(leaves), first, *values[1:])
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return _stacked_struct(values)
    if all(isinstance(value, LazyValue) for value in values):
        return LazyStack(values)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values)
    arrays = [value.compute() if isinstance(value, LazyValue) else value for value in values]
    sharding = None if _is_traced(arrays) else named_sharding(arrays[0])
    if sharding is None:
        return jnp.stack(arrays)
    return _stack_program(with_lead(sharding))(arrays)


def _is_leaf(value: object) -> bool:
    return isinstance(value, (LazyValue, jax.ShapeDtypeStruct)) or jax.tree_util.all_leaves(
        (value,)
    )


def _is_traced(values: Sequence[object]) -> bool:
    return any(isinstance(value, Tracer) for value in values)


def named_sharding(value: object) -> NamedSharding | None:
    """Returns an array's sharding over a mesh of devices, or None."""
    if isinstance(value, (LazyValue, Tracer)):
        return None
    sharding = getattr(value, "sharding", None)
    is_named = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if is_named else None


def with_lead(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of stacked arrays: parts are where they were."""
    spec = PartitionSpec(None, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def without_lead(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of one part of a stacked array."""
    spec = PartitionSpec(*sharding.spec[1:])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _stacked_struct(values: Sequence[Leaf]) -> jax.ShapeDtypeStruct:
    part_shardings = [named_sharding(value) for value in values]
    sharding = next((with_lead(item) for item in part_shardings if item is not None), None)
    shape = (len(values), *values[0].shape)
    return jax.ShapeDtypeStruct(shape, values[0].dtype, sharding=sharding)


@functools.lru_cache(maxsize=256)
def _stack_program(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda arrays: jnp.stack(arrays), out_shardings=sharding)


# --- parts of values ------------------------------------------------------------------------------


def part_of(value: Any, index: int, read: Callable[[], object] | None = None) -> Leaf:
    """Returns one part of a stacked value; lazy ones stay lazy."""
    if not _is_leaf(value):
        return jax.tree.map(lambda leaf: part_of(leaf, index), value)
    if isinstance(value, LazyStack):
        return value.parts[index]
    if isinstance(value, LazyValue):
        return LazyPart(read or value.compute, value, index)
    if isinstance(value, jax.ShapeDtypeStruct):
        own_sharding = named_sharding(value)
        sharding = None if own_sharding is None else without_lead(own_sharding)
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype, sharding=sharding)
    return np.array(value[index]) if isinstance(value, np.ndarray) else value[index]


def with_part(value: object, index: int, new: object) -> Any:
    """Returns a stacked value with one part replaced."""
    return jax.tree.map(lambda leaf, part: _with_part(leaf, index, part), value, new)


def _with_part(leaf: object, index: int, part: object):
    if isinstance(leaf, np.ndarray) and isinstance(part, np.ndarray):
        changed = leaf.copy()
        changed[index] = part
        return changed
    leaf = jnp.asarray(leaf)
    sharding = None if _is_traced([leaf, part]) else named_sharding(leaf)
    if sharding is None:
        return leaf.at[index].set(part)
    part = jax.device_put(part, without_lead(sharding))
    return _write_program(sharding)(leaf, part, index)


@functools.lru_cache(maxsize=256)
def _write_program(sharding: NamedSharding) -> Callable[..., jax.Array]:
    def write(leaf: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(leaf, part, index, 0)

    return jax.jit(write, out_shardings=sharding)


# --- views ----------------------------------------------------------------------------------------

VIEW_LOCK = (
    "Cannot change {what}: it is a view of one layer of a stack, and all its layers have one "
    "structure. Change them together, through the stack itself (stack.stacked, stack.eval(), "
    "stack.set_attributes(...)), or take them apart: sx.nn.unstack_layers(stack)."
)


class _ViewOfVariable:
    """What makes a Variable type a view; everything is the parent's."""

    __slots__ = ()
    _parent: Variable
    _index: int

    @property
    def _owner(self) -> Frame | None:
        return self._parent._owner

    @property
    def _lock(self) -> str | None:
        return self._parent._lock

    @_lock.setter
    def _lock(self, lock: str | None) -> None:
        self._parent._lock = lock

    @property
    def _metadata(self) -> Metadata:
        return _part_metadata(self._parent._metadata)

    @property
    def _value(self) -> Leaf:
        parent = self._parent
        return part_of(parent._value, self._index, lambda: parent.value)

    @_value.setter
    def _value(self, new) -> None:
        self._check_part(new)
        old = self._parent._value
        if isinstance(old, jax.ShapeDtypeStruct):
            return  # a shape of the same form, as checked
        if isinstance(new, LazyValue):
            new = new.compute()
        if not (isinstance(old, np.ndarray) and isinstance(new, np.ndarray)):
            old = self._parent.value
        self._parent._value = with_part(old, self._index, new)

    @property
    def value(self) -> Leaf:
        """The part of the parent's value; setting writes that part."""
        target = resolve(self, local.frame)
        if type(target) is not type(self):  # passed in, so it stands for itself here
            return target.value
        if several and local.frame is None:
            note_read(target)
        whole = target._parent._here()._read()
        if local.frame is None and is_deleted(whole):
            raise deleted_read(target)
        return part_of(whole, target._index)

    def _read(self):
        return part_of(self._parent._read(), self._index)

    @value.setter
    def value(self, value) -> None:
        type(self)._plain.value.fset(self, value)

    _plain: Any  # the Variable type that this is a view of

    @classmethod
    def _make(cls, *parts) -> Any:
        return cls._plain._make(*parts)

    def __reduce_ex__(self, protocol: object) -> Any:
        # A Variable of its own with this part's value, as in every copy of a view.
        plain: Leaf = self._plain
        return _copied_view, (plain, plain.__getstate__(self))

    def _flatten(self, encode: object) -> flatten.VariableDef:
        return flatten.VariableDef(self._plain, self._metadata)

    def _stand_in(self, frame: Frame):
        return stand_in(self, frame)

    def _check_part(self, new: object) -> None:
        """Raises if a value does not have the form of the part."""
        old = self._parent._value
        if _form(old, 1) != _form(new) or _is_abstract(old) != _is_abstract(new):
            raise ModuleError(
                f"Cannot write {_shown(new)} to a view of one layer of a stacked "
                f"{self._plain.__name__}, whose part is {_shown(old, 1)}: the layers of a stack "
                f"are one array. Convert the value, or write the stacked Variable whole."
            )

    def _check_metadata_write(self, what: str) -> None:
        raise ModuleError(VIEW_LOCK.format(what=what))


def _copied_view(plain, state: object) -> Variable:
    """Returns a Variable with the state of a pickled view."""
    variable = object.__new__(plain)
    variable.__setstate__(state)
    return variable


@functools.lru_cache(maxsize=1024)
def _part_metadata(metadata: Metadata) -> Metadata:
    return metadata.without_axis(0)


def _form(value: object, lead: int = 0):
    """Structure, shapes and dtypes of a value; without the leading dimensions."""
    leaves, treedef = jax.tree.flatten(value)
    return treedef, [(tuple(leaf.shape[lead:]), leaf.dtype) for leaf in leaves]


def _is_abstract(value: object) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _shown(value, lead: int = 0) -> str:
    text = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[lead:])}", value)
    abstract = "the abstract " if _is_abstract(value) else ""
    return abstract + (text if isinstance(text, str) else str(text).replace("'", ""))


@functools.lru_cache(maxsize=256)
def _view_type(plain: type[Variable]):
    """Returns the subclass for views of a Variable type."""
    namespace = {
        "__slots__": ("_index", "_parent"),
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__qualname__": plain.__qualname__,
        "_plain": plain,
    }
    metaclass: Any = type(plain)
    return metaclass(plain.__name__, (_ViewOfVariable, plain), namespace)


class _Known(weakref.ref[Any]):
    """A view that exists, and what it was made of."""

    __slots__ = ("key", "shared", "source")
    key: tuple[int, int]
    source: Object
    shared: Container[Any]


# Every view, by ``id`` of the original and part. An entry keeps the original alive.
_known: dict[tuple[int, int], _Known] = {}
# Those of Modules and containers, which have to follow their originals.
_filled: dict[tuple[int, int], _Known] = {}


def _remember(new_view, source: Object, index: int, shared: Container[Any]) -> None:
    ref = _Known(new_view, _forget)
    ref.key, ref.source, ref.shared = (id(source), index), source, shared
    _known[ref.key] = ref
    if not isinstance(source, Variable):
        _filled[ref.key] = ref


def _forget(ref, tables: tuple[dict[tuple[int, int], _Known], ...] = (_known, _filled)) -> None:
    for views in tables:  # bound above: globals are gone when the interpreter ends
        if views.get(ref.key) is ref:
            del views[ref.key]


def view(source: Any, index: int, shared: Container[Any] = ()) -> Any:
    """Returns the view of one part of a stacked object."""
    if source in shared:
        return source
    reference = _known.get((id(source), index))
    new_view: Any = None if reference is None else reference()
    if new_view is not None:
        return new_view
    if isinstance(source, Variable):
        new_view = object.__new__(_view_type(_plain_type(source)))
        new_view._parent, new_view._index, new_view._marked, new_view._stamp = (
            source,
            index,
            False,
            None,
        )
        _remember(new_view, source, index, shared)
        return new_view
    new_view = type(source)._allocate(source._owner, source._lock or VIEW_LOCK)
    _remember(new_view, source, index, shared)
    _fill(new_view, source, index, shared)
    return new_view


def _plain_type(variable: Variable):
    return type(variable) if variable._parent is None else variable._plain


class _Shallow(flatten.GraphWalk):
    """A walk that does not look into what it meets."""

    def visit(self, item: Object, path: object) -> int:
        """Returns the object's position."""
        if id(item) not in self.index:
            self.index[id(item)] = len(self.objects)
            self.objects.append(item)
        return self.index[id(item)]


def _fill(new_view, source, index: int, shared: Container[Any]) -> None:
    """Gives a view what its original holds now."""
    # Later changes of the original advance the epoch, and so bring it here again.
    object.__setattr__(source, "_marked", True)
    walk = _Shallow()
    definition = source._flatten(lambda child, key: walk.encode(child, (key,)))
    new_view._unflatten(
        definition, flatten.ChildDecoder([view(child, index, shared) for child in walk.objects])
    )


def _follow(changed: tuple[object, ...]) -> None:
    """Gives the views of changed Modules and containers what these hold now."""
    # Views of views come after them.
    targets = {id(item) for item in changed}
    for ref in list(_filled.values()):
        new_view = ref() if ref.key[0] in targets else None
        if new_view is not None:
            _fill(new_view, ref.source, ref.key[1], ref.shared)
            targets.add(id(new_view))


epoch.on_advance(_follow)


def stand_in(variable: Any, frame: Frame) -> Any:
    """Returns the stand-in of a captured view: a view of its parent's."""
    return view(resolve(variable._parent, frame), variable._index)


def block_parents(frame: Frame, variable: Any) -> None:
    """Has a frame that was given a view refuse the view's parents."""
    parent = variable._parent
    while parent is not None:
        frame.copies[id(parent)] = (parent, Blocked(_refuse_parent))
        parent = parent._parent


def _refuse_parent(parent: object) -> None:
    raise ModuleError(
        f"A stacked {type(parent).__name__} was used inside a transform that was given a view of "
        f"one of its layers: they would be two Variables for one value. Pass the stack and take "
        f"the layer inside: layer = stack[i]."
    )


# --- stacking objects -----------------------------------------------------------------------------


class Stacked(NamedTuple):
    """What stacking made."""

    root: PyTree  # the object that holds all layers
    shared: tuple[Path, ...]  # paths, below it, of objects that are not stacked


def stack_objects(
    roots: Sequence[Object], axis_name: object, older: Collection[int] = ()
) -> Stacked:
    """Stacks objects of one structure."""
    walks = [_walk(root) for root in roots]
    for number, walk in enumerate(walks):
        _check_alike(walks[0], walk, number)
    first = walks[0]
    shared = _shared(walks, older)

    def stacked(position: int, definition: flatten.VariableDef) -> tuple[Leaf, Metadata]:
        values = _values([walk.objects[position] for walk in walks], first, position)
        named = definition.metadata.axes is None and knows_names(values[0])
        metadata = definition.metadata.with_axis(0, axis_name, knows_names=named)
        return stack_values(values), metadata

    root = _rebuilt(first, shared, stacked)
    return Stacked(root, tuple(first.paths[position] for position in sorted(shared)))


def unstack_objects(root: Object, shared: Collection[Path], count: int) -> list[Any]:
    """Takes stacked objects apart: the inverse of ``stack_objects``."""
    walk = _walk(root)
    kept_positions = {position for position, path in enumerate(walk.paths) if path in shared}

    def part(index: int, position: int, definition: flatten.VariableDef) -> tuple[Leaf, Metadata]:
        whole = resolve(walk.objects[position], local.frame)._value
        return part_of(whole, index), definition.metadata.without_axis(0)

    return [
        _rebuilt(walk, kept_positions, functools.partial(part, index)) for index in range(count)
    ]


def _walk(root: Object) -> flatten.GraphWalk:
    walk = flatten.GraphWalk()
    walk.visit(root, ())
    return walk


def _rebuilt(
    walk: flatten.GraphWalk,
    kept_positions: Collection[int],
    variable: Callable[[int, flatten.VariableDef], tuple[object, Metadata]],
):
    """Builds the objects of a walk anew."""
    owner = owner_here()
    objects_by_position = {position: walk.objects[position] for position in kept_positions}
    for position, definition in enumerate(walk.definitions):
        if position not in objects_by_position and type(definition) is flatten.VariableDef:
            objects_by_position[position] = definition.type._make(
                *variable(position, definition), owner
            )
    return flatten.assemble(walk.definitions, objects_by_position, owner).objects[0]


def _shared(walks: Sequence[flatten.GraphWalk], older: Collection[int]) -> set[int]:
    """Returns the positions of objects that all walks share."""
    shared = set()
    for position, item in enumerate(walks[0].objects):
        ids = [id(walk.objects[position]) for walk in walks]
        if len(walks) == 1:
            if ids[0] in older:
                shared.add(position)
        elif len(set(ids)) == 1:
            shared.add(position)
        elif len(set(ids)) < len(ids):
            twins = [i for i, object_id in enumerate(ids) if ids.count(object_id) > 1]
            raise ModuleError(
                f"The layers of a stack must be alike, but the {type(item).__name__} at "
                f"{_where(walks[0].paths[position])} is one object in the layers {twins[:4]} and "
                f"another in the rest. Share it between all layers, or between none."
            )
    return shared


# --- what must be alike ---------------------------------------------------------------------------


def _first_difference(first: flatten.GraphWalk, second: flatten.GraphWalk) -> tuple[Path, str]:
    """Returns path and difference of the first differing objects."""
    pairs = zip(first.paths, first.definitions, second.definitions, strict=False)
    found = (each for pair in pairs for each in _differences(*pair, (first, second)))
    return next(found, ((), "the structure"))


def _check_alike(first: flatten.GraphWalk, second: flatten.GraphWalk, number: int) -> None:
    """Raises if two objects differ in structure; says where."""
    if first.definitions == second.definitions:
        return
    path, difference = _first_difference(first, second)
    raise ModuleError(
        f"The layers of a stack must be alike, but layers 0 and {number} differ at {_where(path)}: "
        f"{difference}. Build every layer in the same way, with what differs in a Variable; or "
        f"keep the layers in a list."
    )


def _differences(
    path: Path, first, second, walks: tuple[flatten.GraphWalk, flatten.GraphWalk]
) -> Iterator[tuple[Path, str]]:
    """Yields the paths at which two definitions differ, and how."""
    if type(first) is not type(second) or getattr(first, "type", None) is not getattr(
        second, "type", None
    ):
        yield path, f"{_kind(first)} against {_kind(second)}"
    elif not isinstance(first, flatten.VariableDef):
        yield from _differences_of_children(path, first, second, walks)
    elif first != second:
        yield path, f"metadata ({first.metadata!r}) against ({second.metadata!r})"


def _differences_of_children(
    path: Path, first, second, walks: tuple[flatten.GraphWalk, flatten.GraphWalk]
) -> Iterator[tuple[Path, str]]:
    ours, theirs = (
        {(type(key), key): child for key, child in flatten.definition_children(definition)}
        for definition in (first, second)
    )
    for step in {**ours, **theirs}:
        below = path if step[1] is None else (*path, step[1])
        if step not in ours or step not in theirs:
            yield below, "only one of them has it"
        elif _are_alike_outside(ours[step], theirs[step]):
            yield from _differences(below, ours[step], theirs[step], walks)
        else:
            texts = [
                _child(children[step], below, walk)
                for children, walk in zip((ours, theirs), walks, strict=True)
            ]
            if ours[step] != theirs[step] and texts != ["an object"] * 2:
                yield below, f"{texts[0]} against {texts[1]}"
    arrays, other_arrays = (dict(getattr(each, "array_attributes", ())) for each in (first, second))
    for name in {**arrays, **other_arrays}:  # in order, the same in every process
        texts = ["an array" if name in each else "an object" for each in (arrays, other_arrays)]
        if texts[0] != texts[1]:
            yield (*path, name), f"{texts[0]} against {texts[1]}"
    if list(ours) != list(theirs):
        texts = [", ".join(str(key) for _, key in children) for children in (ours, theirs)]
        yield path, f"the order ({texts[0]}) against ({texts[1]})"


def _are_alike_outside(first: object, second: object) -> bool:
    """Whether two children are containers, alike but for their items."""
    return (
        isinstance(first, flatten.NodeDef)
        and isinstance(second, flatten.NodeDef)
        and (first.handler, first.config) == (second.handler, second.config)
    )


def _kind(definition) -> str:
    kind = getattr(definition, "type", type(definition))
    return f"a {kind.__name__}"


def _child(child, path: Path, walk: flatten.GraphWalk) -> str:
    if isinstance(child, Static):
        return repr(child.value)
    if isinstance(child, flatten.Ref):
        place = walk.paths[child.position]
        return "an object" if place == path else f"the object at {_where(place)}"
    return f"a {getattr(child.config, '__name__', child.handler.name)}"


def _where(path: Path) -> str:
    return format_path(path) if path else "the top"


def _values(variables: Sequence[Variable], walk: flatten.GraphWalk, position: int) -> list[Any]:
    """Returns the values of like Variables."""
    values = [resolve(variable, local.frame)._value for variable in variables]
    first = values[0]
    for number, value in enumerate(values):
        if _form(value) != _form(first):
            kind, path = walk.definitions[position].type.__name__, walk.paths[position]
            raise ModuleError(
                f"The layers of a stack must be alike, but the {kind} at {_where(path)} is "
                f"{_shown(first)} in layer 0 and {_shown(value)} in layer {number}."
            )
    return values
