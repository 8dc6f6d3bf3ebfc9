# SPDX-License-Identifier: Apache-2.0
"""Binding of a call's objects to private copies, and effects.

``InputGraph`` has the objects of one call, flattened together. ``bind`` rebuilds them inside of the
transform. ``record_effects`` compares the copy with what was bound, inside; ``apply_effects`` does
the same to the caller's objects, outside, or changes nothing where something is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Collection, Container, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core import _jax, frames, threads
from shardax._core._jax import Tracer
from shardax._core.errors import ConcurrentWriteError, DonationError, ModuleError, TraceLeakError
from shardax._core.frames import a_kind_of, is_ref, kind_of
from shardax._core.graph import flatten as graphs
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.settings import SettingsKey
from shardax._core.graph.static import Static
from shardax._core.graph.views import block_parents
from shardax._core.init.lazy import LazyValue, realise_all
from shardax._core.object import Object, epoch
from shardax._core.variable import ArrayAttribute, Variable, has_deleted, is_deleted, refuse_deleted
from shardax._transforms.errors import TransformError
from shardax._transforms.lift import arguments as inputs


class InputGraph:
    """The roots of one lifted call, flattened together."""

    __slots__ = ("flat", "leaves", "read", "roots")

    def __init__(self, roots: Sequence[PyTree], names: Sequence[Path] | None = None) -> None:
        self.read: list[Any] | None = None  # what ``values`` returned
        # The callable, if it is bound to objects, and all objects in the arguments.
        self.roots = [inputs.as_root(root) for root in roots]
        self.flat = graphs.flatten_roots(self.roots, names)  # their joint flattening
        frame = frames.local.frame
        # The Variables that stand for ``flat.leaves`` in the calling frame; what is read and
        # written.
        self.leaves = (
            self.flat.leaves
            if frame is None
            else [frames.resolve(leaf, frame) for leaf in self.flat.leaves]
        )

    def values(self, refs: bool = False, donated: Container[int] = ()) -> list[Leaf]:
        """Reads all values, materialising lazy ones."""
        values = read(self.leaves)
        unusual = [i for i, value in enumerate(values) if not isinstance(value, jax.Array)]
        absent = [self.flat.leaf_paths[i] for i in unusual if self.leaves[i].is_abstract]
        if absent:
            raise absent_error(absent)
        if frames.local.frame is None and any(map(is_deleted, values)):
            refuse_deleted(self.flat.leaf_paths, values)
        self.read = values
        places = [i for i in unusual if is_ref(values[i])]
        if places:
            self._check_refs(places, donated)
        if refs:
            return list(values)
        return [v[...] if i in places else v for i, v in enumerate(values)] if places else [*values]

    def _check_refs(self, places: Sequence[int], donated: Container[int]) -> None:
        """Raises if a ``jax.Ref`` is donated, or held by two Variables."""
        first: dict[int, int] = {}
        for place in places:
            if place in donated:
                raise DonationError(
                    f"The {kind_of(self.leaves[place])} at "
                    f"{format_path(self.flat.leaf_paths[place])} holds a jax.Ref, which is written "
                    f"in place and cannot be donated. Leave the argument out of donate_argnums; "
                    f"or hold arrays: sx.with_vars(model, ref=False)."
                )
            same = first.setdefault(id(self.leaves[place]._value), place)
            if same != place:
                one, two = (format_path(self.flat.leaf_paths[i]) for i in (same, place))
                raise TransformError(
                    f"The Variables at {one} and {two} hold one jax.Ref, and JAX takes a Ref once. "
                    f"Let them be one Variable (model.b = model.a), or give each its own: "
                    f"model.b.value = jax.new_ref(model.a.value)."
                )

    def objects(self) -> list[Any]:
        """Returns the objects in the order of the graph definition."""
        return graphs.walk_objects(self.roots)


def absent_error(paths: Sequence[Path]) -> ModuleError:
    """Returns the error of Variables without values."""
    listed = ", ".join(map(format_path, paths[:8])) + (", ..." if len(paths) > 8 else "")
    return ModuleError(
        f"{len(paths)} Variables hold only shapes, not arrays: {listed}. Give them numbers "
        f"first, sx.update(model, state), or restore a checkpoint into the model; or look at "
        f"shapes only with sx.eval_shape."
    )


def read(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Reads the values of resolved Variables, materialising lazy and NumPy ones."""
    realise_all(leaves)
    return [v.value if isinstance(v._value, (LazyValue, np.ndarray)) else v._value for v in leaves]


def abstract(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns the values of resolved Variables, lazy ones as ``jax.ShapeDtypeStruct``."""
    return [
        jax.ShapeDtypeStruct(v._value.shape, v._value.dtype)
        if isinstance(v._value, LazyValue) or is_ref(v._value)
        else v._value
        for v in leaves
    ]


def bind(
    frame: frames.Frame,
    graphdef: graphs.GraphDef,
    values: Sequence[Leaf],
    originals: Sequence[Any],
    leaves: Sequence[Leaf],
) -> tuple[list[PyTree], list[PyTree]]:
    """Rebuilds the graph inside a transform; returns (roots, objects)."""
    roots, copies = graphs.build(graphdef, map(frames.own, values), frame)
    for original, copy in zip(originals, copies, strict=True):
        frame.copies[id(original)] = (original, copy)
    for leaf, position in zip(leaves, graphdef.leaves, strict=True):
        frame.copies[id(leaf)] = (leaf, copies[position])
        if leaf._parent is not None:
            block_parents(frame, leaf)
    return roots, copies


class MissingInputs(NamedTuple):
    """Objects that a trace used and was not given, weakly: JAX keeps what a trace returned."""

    objects: list[weakref.ref[Object]]
    read: list[weakref.ref[Object]]  # those of them whose values were read or written


@dataclasses.dataclass(eq=False, slots=True)
class Effects:
    """What a function did besides returning arrays; a pytree without leaves."""

    written: tuple[int, ...]  # positions of the Variables of the graph whose values changed
    updates: dict[int, Leaf]  # new definitions of given objects whose structure changed
    fresh: tuple[Leaf, ...]  # definitions of new objects; their positions follow the given ones
    result: PyTree  # None if the result holds no objects; else its template
    foreign: dict[int, Any]  # outside objects put into the result or an argument, by position
    fresh_ids: tuple[int, ...]  # ``id`` of each new Variable inside, while the trace lasts
    # Declared shardings of (result, written, fresh), set by ``jit``.
    shardings: tuple[PyTree, ...] = (None, None, None)
    # What the trace used and was not given; set by ``jit``.
    missing: MissingInputs | None = None

    # By value where that says all, as JAX keeps the trees of traces that are gone.

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Effects)
            and self._compared is not None
            and self._compared == other._compared
        )

    def __hash__(self) -> int:
        return id(self) if self._compared is None else hash(self._compared)

    @property
    def _compared(self) -> Any:
        """The value, None if the effects are those of one trace alone."""
        if self.updates or self.fresh or self.foreign or self.shardings != (None, None, None):
            return None
        if self.missing is not None:
            return None
        return self.written, self.result

    @property
    def tree_key(self) -> Any:
        """What determines the tree of arrays that leaves."""
        return self.written, len(self.fresh_ids), self.result

    @property
    def simple(self) -> bool:
        """Whether carrying back means storing values and nothing else."""
        return self.result is None and not self.updates


jax.tree_util.register_pytree_node(
    Effects, lambda effects: ((), effects), lambda effects, _: effects
)


class LiftedOutputs(NamedTuple):
    """What leaves the pure function."""

    result: PyTree
    written: list[Leaf]
    fresh: list[Leaf]
    effects: Effects


def record_effects(
    frame: frames.Frame,
    graphdef: graphs.GraphDef,
    copies: Sequence[Leaf],
    bound: Sequence[Any],
    result: PyTree,
    emit: frozenset[int] = frozenset(),
) -> LiftedOutputs:
    """Records, inside the transform, what the user's function did."""
    walk = continue_walk(frame, copies)
    # The caller has the very same settings objects: what the trace wrote there is done.
    walk.unchanged = graphs.settings_in(graphdef)
    updates = {}
    for position, (copy, definition) in enumerate(zip(copies, graphdef.objects, strict=True)):
        if holds_as_built(copy, definition, copies):
            walk.definitions[position] = definition
            continue
        new_definition = copy._flatten(lambda child, key: walk.encode(child, ()))
        walk.definitions[position] = new_definition
        if new_definition != definition:
            updates[position] = new_definition
    count = len(copies)
    leaves, treedef = jax.tree.flatten(result, is_leaf=graphs.is_object)
    places = tuple(
        (i, walk.visit(leaf, ())) for i, leaf in enumerate(leaves) if isinstance(leaf, Object)
    )
    texts = tuple((i, Static(leaf)) for i, leaf in enumerate(leaves) if isinstance(leaf, TEXTS))
    template = inputs.TreeTemplate(treedef, places, texts) if places or texts else None
    new_objects = [*enumerate(walk.objects)][count:]
    for _, item in new_objects:
        if isinstance(item, Variable) and item._parent is not None:
            raise TransformError(
                f"sx.{frame.name} would return or attach a view of one layer of a stacked "
                f"{type(item._parent).__name__}, which outside would no longer be the stack's. "
                "Return sx.clone(stack[i]), or take the layer outside."
            )
    foreign = {i: item for i, item in new_objects if not _belongs(item, frame)}
    new_variables = [
        item for i, item in new_objects if i not in foreign and isinstance(item, Variable)
    ]
    fresh = [item.value for item in new_variables]
    written, values = [], []
    for position, (index, bound_value) in enumerate(zip(graphdef.leaves, bound, strict=True)):
        value = copies[index]._value
        if position in emit or not same_value(bound_value, value):
            written.append(position)
            values.append(copies[index].value)
    new = tuple(walk.definitions[count:])
    effects = Effects(
        tuple(written), updates, new, template, foreign, tuple(map(id, new_variables))
    )
    arrays = result
    if template is not None:
        arrays = [leaf for leaf in leaves if not isinstance(leaf, (Object, *TEXTS))]
    return LiftedOutputs(arrays, values, fresh, effects)


def continue_walk(frame: frames.Frame, copies: Sequence[object]) -> graphs.GraphWalk:
    """Returns a walk over new objects that knows the copies."""
    walk = graphs.GraphWalk()
    walk.objects = list(copies)
    walk.definitions = [None] * len(copies)
    walk.paths = [()] * len(copies)
    walk.index = {id(copy): position for position, copy in enumerate(copies)}
    for key, (_, copy) in frame.copies.items():  # an original stands for its copy
        if id(copy) in walk.index:
            walk.index[key] = walk.index[id(copy)]
    return walk


def holds_as_built(item: Any, definition: Any, objects: Sequence[Any]) -> bool:
    """Whether an object holds the very children that it was built with."""
    # A quick check by identity, so that only what changed is described again.
    kind = type(definition)
    if kind is graphs.VariableDef:
        return item._metadata is definition.metadata
    if kind is graphs.ModuleDef:
        return _match(item.__dict__.items(), definition.attributes, objects) and _match(
            item._array_attributes.items(), definition.array_attributes, objects
        )
    if kind is graphs.ListDef:
        return _match([*enumerate(item._items)], [*enumerate(definition.items)], objects)
    if kind is graphs.DictDef:
        children = [(key.value, child) for key, child in definition.items]
        return _match(item._items.items(), children, objects)
    return False


_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _match(now: Collection[Any], children: Sequence[Any], objects: Sequence[Any]) -> bool:
    if len(now) != len(children):
        return False
    for (name, value), (key, child) in zip(now, children, strict=True):
        kind = type(child)
        expected = (
            objects[child.position]
            if kind is graphs.Ref
            else child.value
            if kind is Static
            else now
        )
        if value is not expected or name != key:
            return False
        if kind is not Static or type(value) in _IMMUTABLE or type(child.key) is SettingsKey:
            continue
        if Static(value) != child:
            return False  # the same object, changed in place
    return True


def _belongs(item, frame: frames.Frame) -> bool:
    owner = item._owner
    return owner is frame or (owner is not None and owner.parent is frame)


def same_value(bound: object, current: object) -> bool:
    """Whether a Variable holds the arrays that were bound."""
    if bound is current:
        return True
    old, old_tree = jax.tree.flatten(bound)
    new, new_tree = jax.tree.flatten(current)
    return old_tree == new_tree and all(a is b for a, b in zip(old, new, strict=True))


def apply_effects(graph: InputGraph, outputs: LiftedOutputs) -> PyTree:
    """Applies, outside the transform, what the function did; returns its result."""
    if not threads.several:
        return _apply(graph, outputs)
    with threads.in_one_step():
        check_unchanged(graph, outputs.effects)
        result = _apply(graph, outputs)
        if graph.read is not None and frames.local.frame is None:
            for position in outputs.effects.written:
                threads.note_write(graph.leaves[position])
        return result


def _is_other(variable: Variable, read) -> bool:
    """Whether a Variable holds another value than the one that was read."""
    if variable._parent is None:
        return variable._value is not read
    # A view cuts its part out of the stack at every read, so only what it holds can be compared.
    if has_deleted(read):
        return False  # donated: the part was cut out for this call alone
    return _bits(variable._value) != _bits(read)


def _bits(value) -> list[bytes]:
    leaves = jax.tree.leaves(value)
    is_key = [jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    arrays = [
        jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)
    ]
    return [np.asarray(array).tobytes() for array in arrays]


def _changed_elsewhere(graph: InputGraph, effects: Effects, read: Sequence[Any]) -> list[Path]:
    """Returns what was written or changed since a call read it."""
    lost = [p for p in effects.written if _is_other(graph.leaves[p], read[p])]
    where = [graph.flat.leaf_paths[position] for position in lost]
    if effects.updates and graph.flat.epoch != epoch.current:
        now = InputGraph(graph.roots).flat.graphdef
        pairs = enumerate(zip(graph.flat.graphdef.objects, now.objects, strict=False))
        where += [graph.flat.paths[i] for i, (old, new) in pairs if old != new]
    return where


def check_unchanged(graph: InputGraph, effects: Effects) -> None:
    """Raises if another thread has written or changed what would be overwritten."""
    read = graph.read
    if read is None or not threads.several or frames.local.frame is not None:
        return
    where = _changed_elsewhere(graph, effects, read)
    if where:
        raise ConcurrentWriteError(
            f"Another thread changed {', '.join(map(format_path, where[:8]))} while this call ran, "
            "which would be lost; nothing was written. Call it in a function made by sx.jit, of "
            "which calls wait for each other; hold one threading.Lock around calls; or give each "
            "thread its own model (sx.clone)."
        )


def _apply(graph: InputGraph, outputs: LiftedOutputs):
    # Given objects that come back are the caller's own objects. Nothing is changed if something
    # about it is refused.
    effects = outputs.effects
    if effects.simple:
        for position, value in zip(effects.written, outputs.written, strict=True):
            _store(graph.leaves[position], value)
        return outputs.result
    objects = graph.objects()
    for position in effects.updates:
        item = objects[position]
        if isinstance(item, Variable):
            frames.resolve(item, frames.local.frame)._check_metadata_write(
                f"metadata of a {type(item).__name__}"
            )
        else:
            frames.check_structural_write(item, a_kind_of(item))
    _add_fresh(objects, effects, outputs.fresh)
    for position, value in zip(effects.written, outputs.written, strict=True):
        _store(graph.leaves[position], value)
    decode = graphs.ChildDecoder(objects)
    for position, definition in effects.updates.items():
        if type(definition) is graphs.VariableDef:
            frames.resolve(objects[position], frames.local.frame)._metadata = definition.metadata
        else:
            objects[position]._unflatten(definition, decode)
    if effects.updates:
        epoch.advance(*(objects[position] for position in effects.updates))
    if effects.result is None:
        return outputs.result
    returned = {position: objects[position] for _, position in effects.result.roots}
    roots = {i: v.value if isinstance(v, ArrayAttribute) else v for i, v in returned.items()}
    return inputs.join_argument(effects.result, outputs.result, roots)


def _store(variable: Variable, value) -> None:
    """Stores a written value, in place where the Variable holds a ``jax.Ref``."""
    if is_ref(variable._value):
        variable._write_in_place(value)
    else:
        variable._value = value


def _add_fresh(objects: list[Any], effects: Effects, values: Sequence[object]) -> None:
    """Appends the new objects, owned by the calling frame."""
    count, owner = len(objects), frames.local.frame
    remaining = iter(values)
    for offset, definition in enumerate(effects.fresh):
        if count + offset in effects.foreign:
            objects.append(effects.foreign[count + offset])
        elif type(definition) is graphs.VariableDef:
            objects.append(definition.type._make(next(remaining), definition.metadata, owner))
        else:
            objects.append(definition.type._allocate(owner, None))
    decode = graphs.ChildDecoder(objects)
    for offset, definition in enumerate(effects.fresh):
        if count + offset not in effects.foreign and type(definition) is not graphs.VariableDef:
            objects[count + offset]._unflatten(definition, decode)


def check_no_leak(graph: InputGraph, outputs: LiftedOutputs) -> None:
    """Raises if a write would be lost or leak a tracer."""
    trace = _jax.trace_state()
    for position, value in zip(outputs.effects.written, outputs.written, strict=True):
        variable = graph.leaves[position]
        path = format_path(graph.flat.leaf_paths[position])
        frames.check_unlocked(variable, f"to the {kind_of(variable)} at {path}")
        if variable._parent is not None:
            variable._check_part(value)
        home = _jax.eager() if variable._owner is None else variable._owner.trace
        if trace != home and any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
            raise TraceLeakError(
                f"The {type(variable).__name__} at {path} would be written with a traced value, "
                "inside a plain JAX transform (jax.vmap, jax.grad, jax.jit, ...) that does not "
                "carry Variables. Nothing was written. Use the shardax transform of the same "
                "name, with the Module as its argument."
            )


TEXTS = (str, bytes, enum.Enum)
"""What a compiled function may return besides arrays and objects, as it was when traced."""


def returned_pair(result: object, source: str, form: str) -> tuple[Any, Any]:
    """Returns the result of a function as a pair, or raises."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TransformError(f"{source} must return {form}, but it returned a {type(result).__name__}.")


def check_result(result: object, name: str, others: tuple[type, ...] = ()) -> None:
    """Raises if a function returned something that is neither arrays nor objects."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=graphs.is_object):
        if (
            isinstance(leaf, Object)
            or hasattr(leaf, "dtype")
            or isinstance(leaf, (bool, int, float, complex, *others))
        ):
            continue
        where = jax.tree_util.keystr(key_path) or "the result itself"
        raise TransformError(
            f"The function given to sx.{name} returned {leaf!r} of type {type(leaf).__name__} at "
            f"{where}. A result holds arrays, numbers, Modules and Variables. Return such a value "
            "from outside the transform, or keep it as static configuration of a Module."
        )
