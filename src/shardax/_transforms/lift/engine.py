# SPDX-License-Identifier: Apache-2.0
"""The lift: the one engine that makes JAX's transforms work on functions over Modules.

Every lifted call has the same four steps.

1. *Take apart* (``arguments``): the arguments are split into *roots* (the objects in them) and
   *plain* values, with a hashable *template* that says how to put them together again. The roots
   are flattened together (``Graph``), so sharing between arguments counts.
2. *Bind* (``bind``): inside the transform, the graph is rebuilt as a private copy whose Variables
   hold the transform's tracers, owned by a frame.
3. *Run* the user's function on the copy.
4. *Carry back* (``carry_out`` inside, ``carry_in`` outside): a ``Record`` says what the function
   did besides returning arrays: which Variables it wrote, how the structure of the given objects
   changed, which objects are new, and where objects stand in the result.

A transform adds only what is its own: how values enter and leave the pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core import _jax
from shardax._core._jax import Tracer
from shardax._core.array_ops import realise_all
from shardax._core.containers import unbox_attribute
from shardax._core.errors import AbstractValueError, TraceLeakError
from shardax._core.frames import (
    Frame,
    check_structural_write,
    check_unlocked,
    local,
    resolve,
)
from shardax._core.graph.flatten import (
    ChildDecoder,
    GraphDef,
    GraphWalk,
    VariableDef,
    build,
    flatten_roots,
    is_object,
    walk_objects,
)
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.views import block_parents
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object, epoch
from shardax._core.variable import Variable
from shardax._transforms.errors import OutputError
from shardax._transforms.lift.arguments import PLAIN as PLAIN
from shardax._transforms.lift.arguments import Arguments as Arguments
from shardax._transforms.lift.arguments import Mixed as Mixed
from shardax._transforms.lift.arguments import Plain as Plain
from shardax._transforms.lift.arguments import Root as Root
from shardax._transforms.lift.arguments import as_root
from shardax._transforms.lift.arguments import put_together as put_together

# --- step 1: the graph ----------------------------------------------------------------------------


class Graph:
    """The roots of one lifted call, flattened together, as seen from the calling frame.

    Attributes:
        roots: The callable, if it is bound to objects, and all objects in the arguments.
        flat: Their joint flattening.
        leaves: The Variables that stand for ``flat.leaves`` in the calling frame; what is read and
            written.
    """

    __slots__ = ("flat", "leaves", "roots")

    def __init__(self, roots: Sequence[Any], names: Sequence[Path] | None = None) -> None:
        self.roots = [as_root(root) for root in roots]
        self.flat = flatten_roots(self.roots, names)
        frame = local.frame
        self.leaves = (
            self.flat.leaves
            if frame is None
            else [resolve(leaf, frame) for leaf in self.flat.leaves]
        )

    def values(self) -> list[Any]:
        """Reads all values, materialising lazy ones.

        Raises:
            AbstractValueError: If Variables hold only shapes; all are named.
        """
        values = read(self.leaves)
        absent = [
            format_path(path)
            for path, leaf, value in zip(self.flat.leaf_paths, self.leaves, values, strict=True)
            if not isinstance(value, jax.Array) and leaf.is_abstract
        ]
        if absent:
            raise AbstractValueError(
                f"{len(absent)} Variables hold only shapes, not arrays: {', '.join(absent[:8])}"
                f"{', ...' if len(absent) > 8 else ''}. Materialise the model first (sx.shard, or "
                f"restore a checkpoint), or look at shapes only with sx.eval_shape."
            )
        return values

    def objects(self) -> list[Any]:
        """Returns the objects in the order of the graph definition."""
        return walk_objects(self.roots)


def read(leaves: Sequence[Any]) -> list[Any]:
    """Reads the values of resolved Variables, materialising lazy and NumPy ones."""
    realise_all(leaves)
    return [v.value if isinstance(v._value, (LazyValue, np.ndarray)) else v._value for v in leaves]


def abstract(leaves: Sequence[Any]) -> list[Any]:
    """Returns the values of resolved Variables, lazy ones as ``jax.ShapeDtypeStruct``."""
    return [
        jax.ShapeDtypeStruct(v._value.shape, v._value.dtype)
        if isinstance(v._value, LazyValue)
        else v._value
        for v in leaves
    ]


# --- step 2: bind ---------------------------------------------------------------------------------


def bind(
    frame: Frame,
    graphdef: GraphDef,
    values: Sequence[Any],
    originals: Sequence[Any],
    leaves: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Rebuilds the graph inside a transform; the frame learns which copy stands for what.

    Args:
        frame: The frame of this run.
        graphdef: Structure of the roots.
        values: One value (of tracers) per Variable.
        originals: The caller's objects in the order of ``graphdef.objects``.
        leaves: The Variables that stand for the caller's in the calling frame.

    Returns:
        (roots, objects) of the copy.
    """
    roots, copies = build(graphdef, values, frame)
    for original, copy in zip(originals, copies, strict=True):
        frame.copies[id(original)] = (original, copy)
    for leaf, position in zip(leaves, graphdef.leaves, strict=True):
        frame.copies[id(leaf)] = (leaf, copies[position])
        if leaf._parent is not None:
            block_parents(frame, leaf)
    return roots, copies


# --- step 4: carry back ---------------------------------------------------------------------------


class Record:
    """What a function did besides returning arrays.

    A pytree without leaves, so that it can leave a compiled function.

    Attributes:
        written: Positions, among the graph's Variables, of those whose values changed.
        updates: New definitions of given objects whose structure changed, by position in the graph.
        fresh: Definitions of new objects; their positions follow the given ones.
        result: None if the result holds no objects; else its template.
        foreign: Objects from outside that the function put into its result or arguments, by
            position.
        fresh_ids: ``id`` of each new Variable's stand-in while the trace lasts.
        shardings: Declared shardings of (result, written, fresh), set by transforms that have such.
    """

    __slots__ = ("foreign", "fresh", "fresh_ids", "result", "shardings", "updates", "written")

    def __init__(
        self,
        written: tuple[int, ...],
        updates: dict[int, Any],
        fresh: tuple[Any, ...],
        result: Any,
        foreign: dict[int, Any],
    ) -> None:
        self.written = written
        self.updates = updates
        self.fresh = fresh
        self.result = result
        self.foreign = foreign
        self.fresh_ids: tuple[int, ...] = ()
        self.shardings: Any = (None, None, None)

    @property
    def layout(self) -> Any:
        """What determines the tree of arrays that leaves."""
        return self.written, len(self.fresh_ids), self.result

    @property
    def simple(self) -> bool:
        """Whether carrying back means storing values and nothing else."""
        return self.result is None and not self.updates


jax.tree_util.register_pytree_node(Record, lambda record: ((), record), lambda record, _: record)


class Carried(NamedTuple):
    """What leaves the pure function."""

    result: Any
    written: list[Any]
    fresh: list[Any]
    record: Record


def carry_out(
    frame: Frame,
    graphdef: GraphDef,
    copies: Sequence[Any],
    bound: Sequence[Any],
    result: Any,
    emit: frozenset[int] = frozenset(),
) -> Carried:
    """Records, inside the transform, what the user's function did.

    Args:
        frame: The frame of this run.
        graphdef: The structure that was bound.
        copies: The objects of the copy, in graph order.
        bound: The values that were bound, to see which changed.
        result: What the user's function returned.
        emit: Positions of Variables to hand back even if they were not written.

    Raises:
        OutputError: If a captured object cannot leave.
    """
    walk = _continue_walk(frame, copies)
    for position, copy in enumerate(copies):
        walk.definitions[position] = copy._flatten(lambda child, key: walk.encode(child, ()))
    count = len(copies)
    leaves, treedef = jax.tree.flatten(result, is_leaf=is_object)
    places = tuple(
        (i, walk.visit(leaf, ())) for i, leaf in enumerate(leaves) if isinstance(leaf, Object)
    )
    template = Mixed(treedef, places) if places else None
    for item in walk.objects[len(copies) :]:
        if isinstance(item, Variable) and item._parent is not None:
            raise OutputError(
                f"sx.{frame.name} was to hand out a view of one layer of a stacked "
                f"{type(item._parent).__name__}, as a result or in an attribute. What leaves a "
                f"transform would no longer be the stack's. Return sx.clone(stack[i]), or take the "
                f"layer outside."
            )
    foreign = {
        i: item for i, item in enumerate(walk.objects) if i >= count and not _belongs(item, frame)
    }
    made = [
        item
        for i, item in enumerate(walk.objects)
        if i >= count and i not in foreign and isinstance(item, Variable)
    ]
    fresh = [item.value for item in made]
    updates = {
        i: walk.definitions[i] for i in range(count) if walk.definitions[i] != graphdef.objects[i]
    }
    written, values = [], []
    for position, (index, before) in enumerate(zip(graphdef.leaves, bound, strict=True)):
        after = copies[index]._value
        if position in emit or not same_value(before, after):
            written.append(position)
            values.append(copies[index].value)
    record = Record(tuple(written), updates, tuple(walk.definitions[count:]), template, foreign)
    record.fresh_ids = tuple(map(id, made))
    arrays = [leaf for leaf in leaves if not isinstance(leaf, Object)] if places else result
    return Carried(arrays, values, fresh, record)


def _continue_walk(frame: Frame, copies: Sequence[Any]) -> GraphWalk:
    walk = GraphWalk()
    walk.objects = list(copies)
    walk.definitions = [None] * len(copies)
    walk.paths = [()] * len(copies)
    walk.index = {id(copy): position for position, copy in enumerate(copies)}
    for key, (_, copy) in frame.copies.items():  # an original stands for its copy
        if id(copy) in walk.index:
            walk.index[key] = walk.index[id(copy)]
    return walk


def _belongs(item: Any, frame: Frame) -> bool:
    owner = item._owner
    return owner is frame or (owner is not None and owner.parent is frame)


def same_value(before: Any, after: Any) -> bool:
    """Whether a Variable still holds the very arrays that were bound to it."""
    if before is after:
        return True
    old, old_tree = jax.tree.flatten(before)
    new, new_tree = jax.tree.flatten(after)
    return old_tree == new_tree and all(a is b for a, b in zip(old, new, strict=True))


def carry_in(graph: Graph, carried: Carried) -> Any:
    """Applies, outside the transform, what the function did; returns its result.

    Given objects that come back are the caller's own objects. Nothing is changed if something about
    it is refused.

    Args:
        graph: The caller's objects.
        carried: What left the transform, with arrays in place of tracers.
    """
    record = carried.record
    if record.simple:
        for position, value in zip(record.written, carried.written, strict=True):
            graph.leaves[position]._value = value
        return carried.result
    objects = graph.objects()
    for position in record.updates:
        item = objects[position]
        if isinstance(item, Variable):
            resolve(item, local.frame)._check_metadata_write(f"metadata of a {type(item).__name__}")
        else:
            check_structural_write(item, f"a {type(item).__name__}")
    _add_fresh(objects, record, carried.fresh)
    for position, value in zip(record.written, carried.written, strict=True):
        graph.leaves[position]._value = value
    decode = ChildDecoder(objects)
    for position, definition in record.updates.items():
        if type(definition) is VariableDef:
            resolve(objects[position], local.frame)._metadata = definition.metadata
        else:
            objects[position]._unflatten(definition, decode)
    if record.updates:
        epoch.advance()
    if record.result is None:
        return carried.result
    leaves = list(carried.result)
    for place, position in record.result.roots:
        leaves.insert(place, unbox_attribute(objects[position]))
    return record.result.treedef.unflatten(leaves)


def _add_fresh(objects: list[Any], record: Record, values: Sequence[Any]) -> None:
    """Makes the new objects, owned by the calling frame, and appends them in graph order."""
    count, owner = len(objects), local.frame
    remaining = iter(values)
    for offset, definition in enumerate(record.fresh):
        if count + offset in record.foreign:
            objects.append(record.foreign[count + offset])
        elif type(definition) is VariableDef:
            objects.append(definition.type._make(next(remaining), definition.metadata, owner))
        else:
            objects.append(definition.type._allocate(owner, None))
    decode = ChildDecoder(objects)
    for offset, definition in enumerate(record.fresh):
        if count + offset not in record.foreign and type(definition) is not VariableDef:
            objects[count + offset]._unflatten(definition, decode)


def check_no_leak(graph: Graph, carried: Carried) -> None:
    """Raises if a transform around this call would lose what was written, or leak tracers.

    Raises:
        TraceLeakError: Naming the Variable that was about to be written.
        ForeignMutationError: If it was not passed to a transform around that cannot carry it back.
        ReadOnlyCopyError: If it is a copy inside a plain JAX transform.
    """
    here = _jax.trace_state()
    for position, value in zip(carried.record.written, carried.written, strict=True):
        variable = graph.leaves[position]
        path = format_path(graph.flat.leaf_paths[position])
        check_unlocked(variable, f"to the {type(variable).__name__} at {path}")
        if variable._parent is not None:
            variable._check_part(value)
        home = _jax.eager() if variable._owner is None else variable._owner.trace
        if here != home and any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
            raise TraceLeakError(
                f"The {type(variable).__name__} at {path} would be written with a traced value, "
                f"because this call runs inside a plain JAX transform (jax.vmap, jax.grad, "
                f"jax.jit, ...) that does not carry Variables. Nothing was written. Use the "
                f"shardax transform of the same name outside, with the Module as its argument."
            )


def check_result(result: Any, name: str) -> None:
    """Raises if a function returned something that is neither arrays nor objects.

    Raises:
        OutputError: Naming the place in the result.
    """
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_object):
        if (
            isinstance(leaf, Object)
            or hasattr(leaf, "dtype")
            or isinstance(leaf, (bool, int, float, complex))
        ):
            continue
        where = jax.tree_util.keystr(key_path) or "the result itself"
        raise OutputError(
            f"The function given to sx.{name} returned {leaf!r} of type {type(leaf).__name__} at "
            f"{where}. A result holds arrays, numbers, Modules and Variables. Return such a value "
            f"from outside the transform, or keep it as static configuration of a Module."
        )
