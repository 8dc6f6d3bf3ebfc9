# SPDX-License-Identifier: Apache-2.0
"""The engine that lifts JAX transforms to functions over Modules.

Every lifted call has the same four steps.

1. *Split* (``lift.arguments``): arguments become *roots* (the objects in them) and *plain* values,
   with a hashable *template* to join them again. All roots are flattened together
   (``InputGraph``), so sharing between arguments counts.
2. *Bind* (``bind``): inside the transform the graph is rebuilt as a private copy whose Variables
   hold the transform's tracers, owned by a frame.
3. *Run* the user's function on the copy (``LiftedCall.run``). The transform's own rule for what
   leaves is given a ``RunContext``: all that is known while the frame is open.
4. *Apply* (``record_effects`` inside, ``apply_effects`` outside): ``Effects`` say what the function
   did besides returning arrays: the Variables that it wrote, how the structure of the given
   objects changed, which objects are new, and where objects stand in the result.

A transform adds only how values enter and leave the pure function.

A Variable that a function uses without being given it is *captured*. Reads see the value of the
calling frame. For writes a transform has one of three rules:

- return the value beside the result (``SingleRunCall``): ``grad``, ``remat``;
- make it an input and run again (``retry_captured``): loops and branches, which must know their
  inputs before they run;
- refuse (``SealedFrame``): ``vmap``, ``shard_map``, where one Variable would get many values.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
import numpy as np

from shardax._core import _jax, frames
from shardax._core._jax import Tracer
from shardax._core.errors import AbstractValueError, ConcurrentWriteError, TraceLeakError
from shardax._core.frames import a_kind_of, kind_of, several
from shardax._core.graph import flatten as graphs
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.static import Static
from shardax._core.graph.views import block_parents
from shardax._core.init.lazy import LazyValue, realise_all
from shardax._core.object import Object, epoch
from shardax._core.variable import ArrayAttribute, Variable, has_deleted, is_deleted, refuse_deleted
from shardax._transforms.errors import ArgumentError, ClosureError, OutputError
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.tracer_errors import TRACER_ERRORS, add_advice


class InputGraph:
    """The roots of one lifted call, flattened together."""

    __slots__ = ("flat", "leaves", "read", "roots")

    def __init__(self, roots: Sequence[Any], names: Sequence[Path] | None = None) -> None:
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

    def values(self) -> list[Any]:
        """Reads all values, materialising lazy ones."""
        values = read(self.leaves)
        absent = [
            path
            for path, leaf, value in zip(self.flat.leaf_paths, self.leaves, values, strict=True)
            if not isinstance(value, jax.Array) and leaf.is_abstract
        ]
        if absent:
            raise absent_error(absent)
        if frames.local.frame is None and any(map(is_deleted, values)):
            refuse_deleted(self.flat.leaf_paths, values)
        self.read = values
        return list(values)

    def objects(self) -> list[Any]:
        """Returns the objects in the order of the graph definition."""
        return graphs.walk_objects(self.roots)


def absent_error(paths: Sequence[Path]) -> AbstractValueError:
    """Returns the error of Variables without values."""
    shown = ", ".join(map(format_path, paths[:8])) + (", ..." if len(paths) > 8 else "")
    return AbstractValueError(
        f"{len(paths)} Variables hold only shapes, not arrays: {shown}. Give them numbers "
        f"first, sx.update(model, state), or restore a checkpoint into the model; or look at "
        f"shapes only with sx.eval_shape."
    )


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


def bind(
    frame: frames.Frame,
    graphdef: graphs.GraphDef,
    values: Sequence[Any],
    originals: Sequence[Any],
    leaves: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Rebuilds the graph inside a transform; returns (roots, objects)."""
    roots, copies = graphs.build(graphdef, map(frames.own, values), frame)
    for original, copy in zip(originals, copies, strict=True):
        frame.copies[id(original)] = (original, copy)
    for leaf, position in zip(leaves, graphdef.leaves, strict=True):
        frame.copies[id(leaf)] = (leaf, copies[position])
        if leaf._parent is not None:
            block_parents(frame, leaf)
    return roots, copies


@dataclasses.dataclass(eq=False, slots=True)
class Effects:
    """What a function did besides returning arrays; a pytree without leaves."""

    written: tuple[int, ...]  # positions of the Variables of the graph whose values changed
    updates: dict[int, Any]  # new definitions of given objects whose structure changed
    fresh: tuple[Any, ...]  # definitions of new objects; their positions follow the given ones
    result: Any  # None if the result holds no objects; else its template
    foreign: dict[int, Any]  # outside objects put into the result or an argument, by position
    fresh_ids: tuple[int, ...]  # ``id`` of each new Variable inside, while the trace lasts
    # Declared shardings of (result, written, fresh), set by ``jit``.
    shardings: Any = (None, None, None)

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

    result: Any
    written: list[Any]
    fresh: list[Any]
    effects: Effects


def record_effects(
    frame: frames.Frame,
    graphdef: graphs.GraphDef,
    copies: Sequence[Any],
    bound: Sequence[Any],
    result: Any,
    emit: frozenset[int] = frozenset(),
) -> LiftedOutputs:
    """Records, inside the transform, what the user's function did."""
    walk = continue_walk(frame, copies)
    updates = {}
    for position, (copy, before) in enumerate(zip(copies, graphdef.objects, strict=True)):
        if holds_as_built(copy, before, copies):
            walk.definitions[position] = before
            continue
        after = copy._flatten(lambda child, key: walk.encode(child, ()))
        walk.definitions[position] = after
        if after != before:
            updates[position] = after
    count = len(copies)
    leaves, treedef = jax.tree.flatten(result, is_leaf=graphs.is_object)
    places = tuple(
        (i, walk.visit(leaf, ())) for i, leaf in enumerate(leaves) if isinstance(leaf, Object)
    )
    template = inputs.TreeTemplate(treedef, places) if places else None
    new_objects = [*enumerate(walk.objects)][count:]
    for _, item in new_objects:
        if isinstance(item, Variable) and item._parent is not None:
            raise OutputError(
                f"sx.{frame.name} would return or attach a view of one layer of a stacked "
                f"{type(item._parent).__name__}, which outside would no longer be the stack's. "
                "Return sx.clone(stack[i]), or take the layer outside."
            )
    foreign = {i: item for i, item in new_objects if not _belongs(item, frame)}
    made = [item for i, item in new_objects if i not in foreign and isinstance(item, Variable)]
    fresh = [item.value for item in made]
    written, values = [], []
    for position, (index, before) in enumerate(zip(graphdef.leaves, bound, strict=True)):
        after = copies[index]._value
        if position in emit or not same_value(before, after):
            written.append(position)
            values.append(copies[index].value)
    new = tuple(walk.definitions[count:])
    effects = Effects(tuple(written), updates, new, template, foreign, tuple(map(id, made)))
    arrays = [leaf for leaf in leaves if not isinstance(leaf, Object)] if places else result
    return LiftedOutputs(arrays, values, fresh, effects)


def continue_walk(frame: frames.Frame, copies: Sequence[Any]) -> graphs.GraphWalk:
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
        before = [(key.value, child) for key, child in definition.items]
        return _match(item._items.items(), before, objects)
    return False


_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _match(now: Collection[Any], before: Sequence[Any], objects: Sequence[Any]) -> bool:
    if len(now) != len(before):
        return False
    for (name, value), (key, child) in zip(now, before, strict=True):
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
        if kind is Static and type(value) not in _IMMUTABLE and Static(value) != child:
            return False  # the same object, changed in place
    return True


def _belongs(item: Any, frame: frames.Frame) -> bool:
    owner = item._owner
    return owner is frame or (owner is not None and owner.parent is frame)


def same_value(before: Any, after: Any) -> bool:
    """Whether a Variable holds the arrays that were bound."""
    if before is after:
        return True
    old, old_tree = jax.tree.flatten(before)
    new, new_tree = jax.tree.flatten(after)
    return old_tree == new_tree and all(a is b for a, b in zip(old, new, strict=True))


def apply_effects(graph: InputGraph, outputs: LiftedOutputs) -> Any:
    """Applies, outside the transform, what the function did; returns its result."""
    if not several:
        return _apply(graph, outputs)
    with frames.in_one_step():
        check_unchanged(graph, outputs.effects)
        result = _apply(graph, outputs)
        if graph.read is not None and frames.local.frame is None:
            for position in outputs.effects.written:
                frames.note_write(graph.leaves[position])
        return result


def _is_other(variable: Any, read: Any) -> bool:
    """Whether a Variable holds another value than the one that was read."""
    if variable._parent is None:
        return variable._value is not read
    # A view cuts its part out of the stack at every read, so only what it holds can be compared.
    if has_deleted(read):
        return False  # donated: the part was cut out for this call alone
    return _bits(variable._value) != _bits(read)


def _bits(value: Any) -> list[bytes]:
    leaves = jax.tree.leaves(value)
    is_key = [jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    arrays = [
        jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)
    ]
    return [np.asarray(array).tobytes() for array in arrays]


def check_unchanged(graph: InputGraph, effects: Effects) -> None:
    """Raises if another thread has written or changed what would be overwritten."""
    read = graph.read
    if read is None or not several or frames.local.frame is not None:
        return
    lost = [p for p in effects.written if _is_other(graph.leaves[p], read[p])]
    where = [graph.flat.leaf_paths[position] for position in lost]
    if effects.updates and graph.flat.epoch != epoch.current:
        now = InputGraph(graph.roots).flat.graphdef
        pairs = enumerate(zip(graph.flat.graphdef.objects, now.objects, strict=False))
        where += [graph.flat.paths[i] for i, (old, new) in pairs if old != new]
    if where:
        raise ConcurrentWriteError(
            f"Another thread changed {', '.join(map(format_path, where[:8]))} while this call ran, "
            "which would be lost; nothing was written. Call it in a function made by sx.jit, of "
            "which calls wait for each other; hold one threading.Lock around calls; or give each "
            "thread its own model (sx.clone)."
        )


def _apply(graph: InputGraph, outputs: LiftedOutputs) -> Any:
    # Given objects that come back are the caller's own objects. Nothing is changed if something
    # about it is refused.
    effects = outputs.effects
    if effects.simple:
        for position, value in zip(effects.written, outputs.written, strict=True):
            graph.leaves[position]._value = value
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
        graph.leaves[position]._value = value
    decode = graphs.ChildDecoder(objects)
    for position, definition in effects.updates.items():
        if type(definition) is graphs.VariableDef:
            frames.resolve(objects[position], frames.local.frame)._metadata = definition.metadata
        else:
            objects[position]._unflatten(definition, decode)
    if effects.updates:
        epoch.advance()
    if effects.result is None:
        return outputs.result
    leaves = list(outputs.result)
    for place, position in effects.result.roots:
        item = objects[position]
        leaves.insert(place, item.value if isinstance(item, ArrayAttribute) else item)
    return effects.result.treedef.unflatten(leaves)


def _add_fresh(objects: list[Any], effects: Effects, values: Sequence[Any]) -> None:
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
    here = _jax.trace_state()
    for position, value in zip(outputs.effects.written, outputs.written, strict=True):
        variable = graph.leaves[position]
        path = format_path(graph.flat.leaf_paths[position])
        frames.check_unlocked(variable, f"to the {kind_of(variable)} at {path}")
        if variable._parent is not None:
            variable._check_part(value)
        home = _jax.eager() if variable._owner is None else variable._owner.trace
        if here != home and any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
            raise TraceLeakError(
                f"The {type(variable).__name__} at {path} would be written with a traced value, "
                "inside a plain JAX transform (jax.vmap, jax.grad, jax.jit, ...) that does not "
                "carry Variables. Nothing was written. Use the shardax transform of the same "
                "name, with the Module as its argument."
            )


def check_result(result: Any, name: str) -> None:
    """Raises if a function returned something that is neither arrays nor objects."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=graphs.is_object):
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
            "from outside the transform, or keep it as static configuration of a Module."
        )


class RetraceRequest(Exception):
    """Stops a trace, to start again with other inputs or layouts."""

    def __init__(self, objects: Sequence[Any] = (), drops_program: bool = False) -> None:
        super().__init__(objects)
        self.objects = list(objects)  # used by the function, and passed in by nobody
        self.drops_program = drops_program  # whether it was made for other layouts of results


class CompiledFrame(frames.Frame):
    """The frame of a compiled function."""

    __slots__ = ("wanted",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Where Variables are to be moved before the program runs, by ``id`` of the copy.
        self.wanted: dict[int, Any] = {}


def request_placement(variables: Sequence[Any], shardings: Sequence[Any]) -> None:
    """Asks the compiled function around to have Variables placed before it runs."""
    frame = frames.local.frame
    found = {
        id(variable): sharding for variable, sharding in zip(variables, shardings, strict=True)
    }
    while frame is not None and not isinstance(frame, CompiledFrame):
        outer = {id(copy): original for original, copy in frame.copies.values()}
        above = {key: frames.resolve(outer[key], frame.parent) for key in found if key in outer}
        found = {id(variable): found[key] for key, variable in above.items()}
        frame = frame.parent
    if frame is not None:
        frame.wanted.update(found)


P = ParamSpec("P")


def decorator(transform: Callable[P, Any]) -> Callable[P, Any]:
    """Lets a transform that is given no function return a decorator."""
    call: Callable[..., Any] = transform
    parameters = inspect.signature(call).parameters
    only_by_name = all(
        p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "function"
    )

    def with_options(function: Any = None, *args: Any, **options: Any) -> Any:
        if function is None and not args:
            return functools.partial(with_options, **options)
        inputs.check_callable(function, transform.__name__)
        if only_by_name and (args or not options.keys() <= parameters.keys()):
            name = getattr(transform, "__name__", "")
            unknown = ", ".join(sorted(options.keys() - parameters.keys()))
            example = "init, xs" if name == "scan" else "*arguments"
            raise ArgumentError(
                f"sx.{name} was given {f'the options {unknown}' if unknown else 'arguments'} that "
                f"it does not take. It makes a function of the same arguments: "
                f"sx.{name}(function)({example}), with options by name: "
                f"{', '.join(list(parameters)[1:])}."
            )
        return call(function, *args, **options)

    return functools.wraps(transform)(with_options)


def wraps(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """``functools.wraps``, for functions that may be Modules, whose attributes are not copied."""
    return functools.wraps(function, updated=())


class LiftedCall:
    """The arguments of one lifted call, and its functions."""

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        make_frame: Callable[[str], frames.Frame] = frames.Frame,
        captured: Sequence[Variable[Any]] = (),
        static: Container[int | str] = (),
        auto_static: bool = False,
        static_numbers: bool = False,
    ) -> None:
        self.name = name
        self.functions = tuple(functions)
        self.make_frame = make_frame
        label = functools.partial(inputs.argument_path, functions[0])
        self.arguments = inputs.SplitArguments(
            args, kwargs, auto_static, static, static_numbers, label
        )
        self.captured_count = len(captured)
        count = len(self.arguments.templates)
        # The parameter name of each positional argument.
        self.labels = [inputs.parameter_name(functions[0], i) for i in range(count)]
        self.names: list[Path] = [  # the path of each root of the graph
            *([()] * len(functions)),
            *inputs.root_names(self.labels, self.arguments),
            *(path_of(functions, variable) for variable in captured),
        ]
        self.graph = InputGraph([*functions, *self.arguments.roots, *captured], self.names)
        self.graphdef = self.graph.flat.graphdef
        # Given arguments, returns them as the function shall see them.
        self.enter: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]
        self.enter = lambda args, kwargs: (args, kwargs)
        self._late: list[tuple[weakref.ref[Any], int]] | None = None
        self.new_captures: list[Any] = []  # of a run whose trace had to end

    def run(
        self,
        values: Sequence[Any],
        plain: Sequence[Any],
        plain_named: Mapping[str, Any],
        leave: Callable[[RunContext], Any],
        which: int = 0,
        graphdef: graphs.GraphDef | None = None,
    ) -> Any:
        """Runs a function inside the transform; returns what ``leave`` returns."""
        graphdef = graphdef or self.graphdef
        with self.make_frame(self.name) as frame:
            roots, copies = self._bind(frame, graphdef, values)
            end = len(roots) - self.captured_count
            given, captured = roots[len(self.functions) : end], roots[end:]
            if isinstance(frame, SealedFrame):
                for path, variable in zip(self.names[end:], captured, strict=True):
                    frame.seal(variable, path)
            args, kwargs = self.arguments.restore(plain, plain_named, given)
            # Containers of their own: the function may change those that it is given.
            kept, kept_named = jax.tree.map(lambda leaf: leaf, (list(plain), dict(plain_named)))
            args, kwargs = self.enter(args, kwargs)
            try:
                result = roots[which](*args, **kwargs)
            except TRACER_ERRORS as error:
                add_advice(error)
                raise
            frame.take_in()
            if isinstance(frame, SealedFrame):
                frame.check_unwritten()
            args, kwargs = self.arguments.restore(kept, kept_named, given)
            return leave(RunContext(self, frame, graphdef, copies, values, args, kwargs, result))

    def _bind(
        self, frame: frames.Frame, graphdef: graphs.GraphDef, values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        if self._late is None:
            return bind(frame, graphdef, values, self.graph.objects(), self.graph.leaves)
        roots, copies = graphs.build(graphdef, map(frames.own, values), frame)
        for reference, position in self._late:
            original = reference()
            if original is not None:
                frame.copies[id(original)] = (original, copies[position])
        return roots, copies

    def apply(self, outputs: LiftedOutputs) -> Any:
        """Applies, outside the transform, what a run did; returns its result."""
        check_no_leak(self.graph, outputs)
        return apply_effects(self.graph, outputs)

    def release(self, known: Iterable[tuple[Any, int]]) -> None:
        """Lets go of the caller's objects; later runs are late ones."""
        self._late = [(weakref.ref(original), position) for original, position in known]
        self.arguments.release()
        self.make_frame = LateFrame
        del self.graph


class RunContext(NamedTuple):
    """What is known while the frame of a run is open."""

    call: LiftedCall
    frame: frames.Frame
    graphdef: graphs.GraphDef
    copies: Sequence[Any]  # the private copy, in the order of ``graphdef.objects``
    bound: Sequence[Any]  # the value that was bound to each Variable
    args: Sequence[Any]  # with copies for objects, plain containers as they came
    kwargs: Mapping[str, Any]
    result: Any  # of the user's function

    def record_effects(self, rest: Any, emit: frozenset[int] = frozenset()) -> LiftedOutputs:
        """Records the function's effects; only ``rest`` of the result leaves."""
        return record_effects(self.frame, self.graphdef, self.copies, self.bound, rest, emit)

    def known(self) -> list[tuple[Any, int]]:
        """Returns every original that has a copy, with its position."""
        position = {id(copy): index for index, copy in enumerate(self.copies)}
        pairs = self.frame.copies.values()
        return [(item, position[id(copy)]) for item, copy in pairs if id(copy) in position]

    def here(self, item: Any) -> Any:
        """Returns the copy of an original; anything else as it is."""
        known = self.frame.copies.get(id(item))
        return item if known is None else known[1]

    def variable(self, position: int) -> Variable[Any]:
        """Returns the copy of the Variable at a position."""
        return self.copies[self.graphdef.leaves[position]]

    def captured(self) -> list[frames.CapturedVariable]:
        """Returns the captured Variables that were written or given other metadata."""
        return [
            item
            for item in self.frame.captured
            if not same_value(item.value, item.stand_in._value)
            or item.outer._metadata != item.stand_in._metadata
        ]

    def require_inputs(self) -> None:
        """Raises ``RetraceRequest`` if captured Variables were changed."""
        changed = self.captured()
        if changed:
            raise RetraceRequest([item.outer for item in changed])


def ending_well(
    run: Callable[..., Any], call: LiftedCall, *inputs: Any, otherwise: Any, **options: Any
) -> Any:
    """Returns a traced run's result, ``otherwise`` if it captured writes."""
    # An exception that passes through a trace of JAX 0.10 leaves the trace and its constants in
    # memory for good. So the trace ends, and ``raise_new_captures`` raises after it.
    try:
        return run(*inputs, **options)
    except RetraceRequest as found:
        call.new_captures = found.objects
        return otherwise


def raise_new_captures(call: LiftedCall) -> None:
    """Raises ``RetraceRequest`` if a run that was traced captured what it wrote."""
    if call.new_captures:
        raise RetraceRequest(call.new_captures)


def retry_captured(attempt: Callable[[list[Variable[Any]]], Any]) -> Any:
    """Runs ``attempt`` until no Variable is written that is not an input."""
    captured: list[Variable[Any]] = []
    while True:
        try:
            return attempt(captured)
        except RetraceRequest as found:
            known = {id(item) for item in captured}
            new = [item for item in found.objects if id(item) not in known]
            if not new:
                raise
            captured = [*captured, *new]


def path_of(functions: Sequence[Callable[..., Any]], variable: Variable[Any]) -> Path:
    """Returns the path of a captured Variable, for messages."""
    for function in functions:
        for source in inputs.find_sources(function):
            for item in inputs.objects_in(source.read()):
                flat = graphs.flatten(item)
                for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
                    if leaf is variable or stands_for(variable, leaf):
                        return (source.name, *path)
    return (type(variable).__name__,)


def stands_for(variable: Variable[Any], original: Variable[Any]) -> bool:
    """Whether a Variable is an outer frame's copy of an original."""
    frame = frames.local.frame
    while frame is not None:
        known = frame.copies.get(id(original))
        if known is not None and known[1] is variable:
            return True
        frame = frame.parent
    return False


class LateFrame(frames.Frame):
    """The frame of a run that happens when its call is over."""

    __slots__ = ()

    def capture(self, outer: Any) -> Any:
        """Refuse: the call is over."""
        raise ClosureError(
            f"A function given to sx.{self.name} uses, when differentiated, a "
            f"{type(outer).__name__} that it did not use when called. Pass it as an argument."
        )


class SealedFrame(frames.Frame):
    """A frame in which captured Variables can be read but not written."""

    __slots__ = ("functions", "reason")
    carries_captured = False

    def __init__(self, name: str, functions: Sequence[Callable[..., Any]], reason: str) -> None:
        super().__init__(name)
        self.functions = functions  # the user's functions, to say how they know a Variable
        self.reason = reason  # why a write has no meaning here, and what to do, for the message

    def capture(self, outer: Any) -> Any:
        """Copies the Variable, sealed."""
        stand_in = super().capture(outer)
        self.seal(stand_in, path_of(self.functions, outer))
        return stand_in

    def check_unwritten(self) -> None:
        """Raises if the value of a captured Variable was changed in place."""
        for item in self.captured:
            if not same_value(item.value, item.stand_in._value):
                frames.check_unlocked(item.stand_in, f"to {a_kind_of(item.outer)}")

    def seal(self, stand_in: Any, path: Path) -> None:
        """Makes the copy of a captured Variable refuse writes."""
        label = f"{kind_of(stand_in)} {format_path(path).removeprefix('.')}"
        label = label.replace("{", "{{").replace("}", "}}")
        stand_in._lock = (
            f"Cannot write {{what}} inside sx.{self.name}: the {label} was not passed in, "
            f"{self.reason}"
        )


class SingleRunCall(LiftedCall):
    """A call that runs once, and keeps its effects."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        make_frame: Callable[[str], frames.Frame] = frames.Frame,
        **options: Any,
    ) -> None:
        super().__init__(name, [function], args, kwargs, make_frame, **options)
        self.effects: Effects | None = None
        self.captured: list[frames.CapturedVariable] = []

    def run_once(
        self,
        values: Sequence[Any],
        plain: Sequence[Any],
        plain_named: Mapping[str, Any],
        split: Callable[[Any], tuple[Any, Any]],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Runs the function; returns (what the transform itself needs, what else leaves)."""
        # ``split`` separates these in the function's result; only the rest may hold objects.

        def leave(context: RunContext) -> tuple[Any, tuple[Any, ...]]:
            head, rest = split(context.result)
            result, written, fresh, self.effects = context.record_effects(rest)
            self.captured = context.captured()
            captured = [item.stand_in.value for item in self.captured]
            return head, (result, written, fresh, captured)

        return self.run(values, plain, plain_named, leave)

    def run_whole(self, values: Any, plain: Any, plain_named: Any) -> tuple[Any, ...]:
        """Runs the function; all of its result leaves, arrays and objects."""

        def split(result: Any) -> tuple[None, Any]:
            check_result(result, self.name)
            return None, result

        return self.run_once(values, plain, plain_named, split)[1]

    def finish(self, leaving: tuple[Any, ...]) -> Any:
        """Stores what was written and returns the result, with objects in place."""
        outputs = self._outputs(leaving)
        check_no_leak(self.graph, outputs)
        with frames.in_one_step():
            check_unchanged(self.graph, outputs.effects)
            self._write_captured(leaving[3])
            return apply_effects(self.graph, outputs)

    def _write_captured(self, values: Sequence[Any]) -> None:
        for item in self.captured:
            if item.outer._owner is None and item.outer._value is not item.value:
                raise ConcurrentWriteError(
                    f"Another thread wrote the {type(item.outer).__name__} that sx.{self.name} "
                    "used through a closure while it ran; nothing was written. Pass it as an "
                    "argument of a function made by sx.jit, or hold a threading.Lock around calls."
                )
        for item, value in zip(self.captured, values, strict=True):
            item.outer._write(value)
            if item.outer._metadata != item.stand_in._metadata:
                item.outer._metadata = item.stand_in._metadata
                epoch.advance()

    def finish_on(self, graph: InputGraph, leaving: tuple[Any, ...]) -> Any:
        """Returns the result with the objects of a copied graph."""
        return apply_effects(graph, self._outputs(leaving))

    def _outputs(self, leaving: tuple[Any, ...]) -> LiftedOutputs:
        assert self.effects is not None
        result, written, fresh, _ = leaving
        return LiftedOutputs(result, written, fresh, self.effects)


ARRAY_OR_NUMBER = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def check_operands(
    call: LiftedCall, advice: str = "give it to the functions by functools.partial or a closure"
) -> None:
    """Raises if an argument is neither arrays nor objects."""
    arguments = call.arguments
    positional = zip(call.labels, arguments.templates, arguments.plain, strict=True)
    named = ((name, template, arguments.plain_named[name]) for name, template in arguments.named)
    for label, template, plain in (*positional, *named):
        paths = inputs.plain_paths(template, plain)
        for path, leaf in zip(paths, jax.tree.leaves(plain), strict=True):
            if (
                isinstance(leaf, ARRAY_OR_NUMBER)
                or hasattr(leaf, "dtype")
                or graphs.is_object(leaf)
            ):
                continue
            raise ArgumentError(
                f"{format_path((label, *path))} of sx.{call.name} is a {type(leaf).__name__}, "
                "which is neither an array or number nor a Module, Variable or pytree of these. "
                f"If it is configuration, {advice}."
            )
