# SPDX-License-Identifier: Apache-2.0
"""``scan``, and the body that all loops share.

The *body* is the user's function, run once per *iteration*. The *carry* is what one iteration hands
to the next: plain arrays that the body returns, and the values of Variables that it writes.
Variables that it only reads are constants of the loop, which cost no memory per step when the loop
is differentiated. The carry keeps its *form*: pytree structure, shapes and dtypes.

Which Variables the body writes is found by tracing it for its shapes. The body is one ``jax.jit``,
so JAX keeps that trace and the loop does not run the user's code again.

In ``scan`` each argument has an *entry* that says what an iteration sees of it:

- ``Carry``: it goes from one iteration to the next. An argument that is carried must be returned in
  the place where ``out_axes`` has ``Carry``, a Module as the object that it is.
- an axis: each iteration sees its own slice along that axis. Slices of Variables that are written
  are put together along it again.
- ``None``: every iteration sees the same. A Variable is one object in all iterations, so for it
  ``Carry`` and ``None`` mean the same: what one iteration writes the next one reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from shardax._core._jax import INLINE, varying_axes
from shardax._core.frames import kind_of
from shardax._core.graph.flatten import GraphDef, ModuleDef, VariableDef, is_object
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.object import Object
from shardax._core.state.state import State
from shardax._core.variable import Variable
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.jit import eager
from shardax._transforms.lift import binding, engine, prefix
from shardax._transforms.vmap import axes as mapped


def abstract_eval(function: Callable[..., object], *args: object) -> PyTree:
    """Returns shapes and dtypes, with layouts over Explicit axes."""
    traceable: Any = function if hasattr(function, "trace") else jax.jit(function)
    report_trace = traceable.trace(*args)
    shapes, treedef = jax.tree.flatten(report_trace.out_info)
    kinds = [_typed(*pair) for pair in zip(shapes, report_trace.jaxpr.out_avals, strict=True)]
    return treedef.unflatten(kinds)


def _typed(shape: jax.ShapeDtypeStruct, kind: object) -> jax.ShapeDtypeStruct:
    layout = getattr(kind, "sharding", None)
    if shape.sharding is not None or layout is None or layout.mesh.empty:
        return shape
    # JAX reads over which Manual axes a value varies beside the mesh that has them.
    typed = any(kind is not AxisType.Auto for kind in layout.mesh.axis_types)
    return shape.update(sharding=layout) if typed else shape


class LoopBody:
    """The body of one loop."""

    def __init__(
        self,
        call: engine.LiftedCall,
        carry_of: Callable[[engine.RunContext], tuple[Any, Any]],
        label: str,
        carried_plain: Sequence[int] | None = None,
        values: list[Leaf] | None = None,
    ) -> None:
        self.call = call
        self.carry_of = carry_of
        self.label = label
        # The structure that one iteration sees, where its metadata differ.
        self.graphdef: GraphDef | None = None
        self.values = call.graph.values() if values is None else values
        self.plain, self.plain_tree = call.arguments.plain_leaves()
        self.carried_plain = range(len(self.plain)) if carried_plain is None else carried_plain
        # Configuration, by position: not arrays, so they do not enter the compiled body.
        self.static_plain: dict[int, Leaf] = {}
        self.carried_variables: tuple[int, ...] = ()
        self.carry_keys: list[tuple[Any, ...]] = []
        # Effects and structure of the result; the arrays of a trace do not outlive it.
        self.effects: binding.Effects | None = None
        self.result_tree: Any = None
        # A unit, so that JAX traces it once, for its shapes and for the loop; put into the program
        # of the loop, which is then smaller and quicker to differentiate.
        self.one = jax.jit(call.program(self._one, "leaves"), inline=INLINE)

    def _one(
        self, values: list[object], plain: list[object]
    ) -> tuple[list[PyTree], dict[int, PyTree], PyTree]:
        """Runs one iteration."""
        plain = [self.static_plain.get(index, leaf) for index, leaf in enumerate(plain)]
        positional, named = self.plain_tree.unflatten(plain)
        return engine.ending_well(
            self.call.run,
            self.call,
            values,
            positional,
            named,
            self._leave,
            graphdef=self.graphdef,
            otherwise=([], {}, None),
        )

    def _leave(self, context: engine.RunContext) -> tuple[list[PyTree], dict[int, PyTree], PyTree]:
        name = self.call.name
        context.require_inputs()
        binding.check_result(context.result, name)
        carry, returned = self.carry_of(context)
        returned = jax.tree.map(context.here, returned, is_leaf=is_object)
        self.carry_keys, leaves = matching_leaves(carry, returned, self.label, name)
        outputs, extra, apart = self.record(context)
        self.effects, self.result_tree = outputs.effects, jax.tree.structure(outputs.result)
        written = zip(outputs.effects.written, outputs.written, strict=True)
        return leaves, {p: v for p, v in written if p not in apart}, extra

    def record(
        self, context: engine.RunContext
    ) -> tuple[binding.LiftedOutputs, PyTree, Collection[int]]:
        """Records what the body did, and what leaves every iteration: here, nothing."""
        outputs = context.record_effects(context.result)
        refuse_changes(self.call, outputs, outputs.effects.updates)
        if outputs.effects.fresh:
            raise TransformError(
                f"The body of sx.{self.call.name} returned a new object where what is carried must "
                f"come back as it was given. Write into the given Module and return it."
            )
        return outputs, None, ()

    def discover(self, values: Sequence[Leaf], plain: Sequence[Leaf]) -> Any:
        """Finds which Variables are carried, and checks that their form stays."""
        leaves, written, extra = abstract_eval(self.one, list(values), list(plain))
        engine.raise_new_captures(self.call)
        self.carried_variables = tuple(sorted(written))
        paths = self.call.graph.flat.leaf_paths
        for position in self.carried_variables:
            if not keeps_form(values[position], written[position]):
                title = f"The {kind_of(self.call.graph.leaves[position])} at "
                title += format_path(paths[position])
                refuse_form(title, values[position], written[position], self.call.name)
        for keys, index, new in zip(self.carry_keys, self.carried_plain, leaves, strict=True):
            if not keeps_form(plain[index], new):
                title = f"The array at {format_path((self.label, *plain_path(keys)))}"
                refuse_form(title, plain[index], new, self.call.name)
        if self._vary([written[position] for position in self.carried_variables], leaves):
            return self.discover(*self.inputs(self.start(), replaced=(values, plain)))
        return extra

    def _vary(self, written: Sequence[object], leaves: Sequence[object]) -> bool:
        """Makes the carry differ between shards where the body makes it differ."""
        # Inside ``shard_map``, JAX counts this to the type, which must be the same in all
        # iterations.
        changed = False
        for inputs, positions, kinds in (
            (self.values, self.carried_variables, written),
            (self.plain, self.carried_plain, leaves),
        ):
            for position, kind in zip(positions, kinds, strict=True):
                old = inputs[position]
                inputs[position] = jax.tree.map(vary_alike, old, kind)
                changed |= not binding.same_value(old, inputs[position])
        return changed

    def differ_like(self, decision: Any) -> bool:
        """Makes the carry differ between shards where what ends the loop does."""
        # Inside ``shard_map`` shards may then run for different numbers of iterations, which JAX
        # does not count to the types of what comes out.
        values, plain = jax.tree.map(lambda _: decision, self.start())
        changed = self._vary(values, plain)
        if changed:
            self.discover(self.values, self.plain)
        return changed

    def start(self) -> tuple[list[PyTree], list[PyTree]]:
        """Returns what goes into the first iteration: (values of Variables, plain leaves)."""
        return (
            [self.values[position] for position in self.carried_variables],
            [self.plain[index] for index in self.carried_plain],
        )

    def step(
        self,
        carry: tuple[Sequence[PyTree], Sequence[PyTree]],
        values: Mapping[int, Leaf] | None = None,
        plain: Mapping[int, Leaf] | None = None,
    ) -> tuple[tuple[list[PyTree], list[PyTree]], PyTree]:
        """Runs one iteration, inside the loop."""
        all_values, all_plain = self.inputs(carry, values, plain)
        leaves, written, extra = self.one(all_values, all_plain)
        new_carry = [written[position] for position in self.carried_variables], leaves
        return jax.tree.map(vary_alike, new_carry, tuple(carry)), extra

    def inputs(
        self,
        carry: tuple[Sequence[PyTree], Sequence[PyTree]],
        values: Mapping[int, Leaf] | None = None,
        plain: Mapping[int, Leaf] | None = None,
        replaced: tuple[Sequence[Any], Sequence[Any]] | None = None,
    ) -> tuple[list[PyTree], list[PyTree]]:
        """Returns all values and plain leaves that an iteration sees."""
        all_values, all_plain = map(list, replaced or (self.values, self.plain))
        for position, value in [
            *zip(self.carried_variables, carry[0], strict=True),
            *(values or {}).items(),
        ]:
            all_values[position] = value
        for index, leaf in [
            *zip(self.carried_plain, carry[1], strict=True),
            *(plain or {}).items(),
        ]:
            all_plain[index] = leaf
        return all_values, all_plain

    def finish(self, carry: tuple[Sequence[PyTree], Sequence[PyTree]]) -> binding.LiftedOutputs:
        """Returns the outputs of a loop that returns only the carry."""
        assert self.effects is not None
        effects = self.effects
        final = dict(zip(self.carried_variables, carry[0], strict=True))
        written = [final[position] for position in effects.written]
        return binding.LiftedOutputs(self.result_tree.unflatten(carry[1]), written, [], effects)


def vary_alike(leaf: object, like: object) -> Any:
    """Returns an array that varies over another's manual mesh axes."""
    missing = varying_axes(like) - varying_axes(leaf)
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


def matching_leaves(
    carry: object, returned: object, label: str, name: str
) -> tuple[list[tuple[Any, ...]], list[Leaf]]:
    """Returns keys and arrays of a carry, or raises if changed."""
    outline = functools.partial(jax.tree.map, lambda _: ARRAY, is_leaf=is_object)
    difference = structure_difference(outline(carry), outline(returned), (label,))
    if difference is not None:
        path, old_form, new_form = difference
        raise TransformError(
            f"What is carried in sx.{name} must come back with the structure it was given, but at "
            f"{format_path(path)} {old_form} came back as {new_form}. Return every part of it, in "
            f"the same containers."
        )
    pairs = jax.tree_util.tree_leaves_with_path(carry, is_leaf=is_object)
    new_leaves = jax.tree.leaves(returned, is_leaf=is_object)
    array_keys, plain = [], []
    for (keys, old_leaf), new_leaf in zip(pairs, new_leaves, strict=True):
        kinds = [
            type(x).__name__ if isinstance(x, Object) else "array" for x in (old_leaf, new_leaf)
        ]
        if kinds != ["array", "array"] and old_leaf is not new_leaf:
            path = format_path((label, *plain_path(keys)))
            raise TransformError(
                f"The {kinds[0]} at {path}, which is carried in sx.{name}, came back "
                f"as another {kinds[1]}. A Module is carried as the object it is: write into it "
                f"(v[...] = new, sx.update(model, new)) and return it."
            )
        if not isinstance(old_leaf, Object):
            array_keys.append(keys)
            plain.append(new_leaf)
    return array_keys, plain


# Stands in an outline, a tree of integers, for an array; an object is its position.
ARRAY = -1


def structure_difference(first: object, second: object, path: Path) -> tuple[Path, str, str] | None:
    """Returns the outermost place where two trees of integers have another structure."""
    if jax.tree.structure(first) == jax.tree.structure(second):
        return None
    both = (first, second)
    children = [prefix.one_level(item) for item in both]
    keys = [[key for key, _ in below] for below in children]
    if type(first) is type(second) and keys[0] == keys[1]:
        for (key, child), (_, other) in zip(*children, strict=True):
            difference = structure_difference(child, other, (*path, *key))
            if difference is not None:
                return difference
    first_text, second_text = map(_container, both, keys)
    return (
        path,
        first_text,
        f"{second_text} with other static fields" if first_text == second_text else second_text,
    )


def _container(item: object, children: Sequence[Path]) -> str:
    if isinstance(item, int):
        return "an array" if item == ARRAY else "an object"
    if item is None:
        return "None"
    if isinstance(item, (dict, State)):
        keys = ", ".join(repr(key) for (key,) in children)
        return f"a {type(item).__name__} with keys {keys or '(none)'}"
    return f"a {type(item).__name__} of {len(children)}"


def form(value: Any) -> str:
    """Returns the form of a value for messages, like ``float32[2,3]``."""
    # Over Explicit mesh axes the layout is part of the type, and of the form.
    forms = jax.tree.map(
        lambda leaf: f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]", value
    )
    text = forms if isinstance(forms, str) else str(forms).replace("'", "")
    specs = {explicit_spec(leaf) for leaf in jax.tree.leaves(value)} - {""}
    return text + "".join(f" sharded as {spec}" for spec in sorted(specs))


def explicit_spec(leaf: Leaf) -> str:
    """Returns an array's spec over Explicit mesh axes, or ""."""
    spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
    return "" if spec is None or all(entry is None for entry in spec) else str(spec)


def keeps_form(old: object, new: object) -> bool:
    """Whether the form of a carry is the same."""
    return jax.tree.structure(old) == jax.tree.structure(new) and all(
        _same_type(a, b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    )


def refuse_form(title: str, old: object, new: object, name: str) -> NoReturn:
    """Raises because the form of the carry changed."""
    explicit = any(explicit_spec(leaf) for leaf in jax.tree.leaves((old, new)))
    hint = ", jax.sharding.reshard(new, spec)" if explicit else ""
    raise TransformError(
        f"{title} changes its form in the body of sx.{name}: from {form(old)} to {form(new)}. "
        f"All iterations share one program, so what goes from one to the next keeps structure, "
        f"shape and dtype. Start with the form it will have, or convert what is written: "
        f"new.astype(old.dtype){hint}."
    )


def _same_type(old, new) -> bool:
    if jnp.shape(old) != jnp.shape(new) or explicit_spec(old) != explicit_spec(new):
        return False
    old_dtype, new_dtype = jnp.result_type(old), jnp.result_type(new)
    # What starts as a Python number takes the dtype of what the body makes of it, as in JAX.
    weak = isinstance(old, (bool, int, float, complex)) or getattr(old, "weak_type", False)
    return old_dtype == new_dtype or (weak and jnp.result_type(old, new) == new_dtype)


def refuse_changes(
    call: engine.LiftedCall,
    outputs: binding.LiftedOutputs,
    changed: Sequence[int] | Mapping[int, object],
) -> None:
    """Raises if a body changed the structure of its Modules."""
    effects = outputs.effects
    for index in changed:
        path = format_path(call.graph.flat.paths[index])
        old, new = call.graph.flat.graphdef.objects[index], effects.updates[index]
        raise TransformError(
            f"The body of sx.{call.name} changes the structure of the {old.type.__name__} at "
            f"{path}: {describe_change(old, new)}. The body is traced once for all iterations, so "
            f"the change would happen once. Make it before the loop; in the body, write values of "
            f"Variables (v[...] = new)."
        )


def describe_change(old: Any, new: Any) -> str:
    """Returns, for messages, how the definition of an object changed."""
    old_attributes, new_attributes = (
        getattr(old, "attributes", None),
        getattr(new, "attributes", None),
    )
    if old_attributes is None or new_attributes is None:
        same = getattr(old, "metadata", None) == getattr(new, "metadata", None)
        return "its items change" if same else "its metadata change"
    first = dict([*old_attributes, *old.array_attributes])
    second = dict([*new_attributes, *new.array_attributes])
    changes = [
        *(f".{name} is new" for name in second if name not in first),
        *(f".{name} is removed" for name in first if name not in second),
        *(f".{name} is set" for name in first if name in second and first[name] != second[name]),
    ]
    return ", ".join(changes) or "its type or order of attributes changes"


@engine.decorator
def scan(
    function: Any = None,
    *,
    in_axes: PyTree = (prefix.Carry, 0),
    out_axes: PyTree = (prefix.Carry, 0),
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    metadata: Mapping[str, Any] | None = None,
) -> PyTree:
    """Makes a function over Modules run once per slice.

    The function is traced once, whatever the number of iterations. What is sown
    (``Module.sow``) leaves stacked, with one row per iteration.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        in_axes: One entry for all positional arguments, or a tuple of one each: ``Carry`` (at most
            one argument), an axis, ``None``; for a Module also ``StateAxes`` or a ``State`` of
            entries, for a container the same container with axes. An argument given by name has the
            entry of its position, or axis 0. What is no array, such as a text or a function, has
            None.
        out_axes: A prefix of the result: ``Carry`` at the top level, for the carried argument, and
            axes along which the rest is stacked.
        length: The number of iterations, if no argument has an axis.
        reverse: Whether to go through the slices from the last to the first.
        unroll: As in ``jax.lax.scan``.
        metadata: ``{sx.partition.PARTITION_NAME: "layers"}`` names the scanned dimension in the
            ``axes`` of Variables and in boxes. Without it, a new dimension is unnamed.

    Returns:
        A function of the same arguments.

    Raises:
        TransformError: If ``Carry`` is given twice, nested, or only on one side; when called, if
            what goes from one iteration to the next changes its structure, shape or dtype; if
            ``unroll`` or ``reverse`` is of another kind, or if it is given ``init`` and ``xs``, as
            ``jax.lax.scan`` is, or if ``length`` is no size; when called, if what is carried is no
            array, if an array has no such axis, or sizes differ.
        PrefixError: If a prefix does not fit.
        PartitionError: When called, if a box cannot lose or gain the dimension, or must have a name
            for it; names its path.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jnp.float32(0))
        >>> @sx.scan
        ... def add(total, x):
        ...     total += x
        ...     return total, total * 10
        >>> same, rows = add(total, jnp.arange(4.0))
        >>> same is total, float(total), rows.tolist()
        (True, 6.0, [0.0, 10.0, 30.0, 60.0])
    """
    check_unroll("scan", unroll)
    if not isinstance(reverse, (bool, np.bool_)):
        raise TransformError(f"reverse of sx.scan is {reverse!r}; give True or False.")
    has_carry = _check_axes(prefix.entries_by_name(function, in_axes), out_axes)
    length = mapped.as_count(length, "length")
    mapped.mapped_params(metadata, "scan")

    options = (in_axes, out_axes, has_carry, length, reverse, unroll, metadata)

    @engine.wraps(function)
    def scanned(*args: object, **kwargs: object):
        return eager.run(_scan, (function,), options, args, kwargs)

    return scanned


def _scan(
    functions: Sequence[Any],
    options: tuple[Any, ...],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
):
    in_axes, out_axes, has_carry, length, reverse, unroll, metadata = options
    assigned = prefix.assign(functions[0], in_axes, args, kwargs, "in_axes", 0)

    def attempt(captured: list[Variable]):
        call = engine.LiftedCall(
            "scan", functions, assigned.args, assigned.kwargs, captured=captured
        )
        loop = _Scan(call, assigned, out_axes, has_carry, metadata)
        return loop.run(length, reverse, unroll)

    return engine.retry_captured(attempt)


def check_unroll(name: str, unroll: object) -> None:
    """Raises unless an option says how many iterations one turn runs."""
    is_count = isinstance(unroll, (int, np.integer)) and unroll >= 1
    if not (is_count or isinstance(unroll, (bool, np.bool_))):
        raise TransformError(
            f"unroll of sx.{name} is {unroll!r}; give the number of iterations that one turn of "
            f"the loop runs, an integer of at least 1, or True for all."
        )


def _check_axes(in_axes: object, out_axes: object) -> bool:
    """Checks both prefixes and returns whether an argument is carried."""
    carried = {}
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        prefix.check_axes_only(axes, name, carry=True)
        top = list(axes) if isinstance(axes, (tuple, list)) else [axes]
        below = [entry for entry in top if entry is not prefix.Carry]
        if len(top) - len(below) > 1:
            raise TransformError(
                f"{name} of sx.scan has sx.Carry {len(top) - len(below)} times. One argument is "
                f"carried; put what is carried together in a tuple or dict."
            )
        inside = [e for e in below if any(leaf is prefix.Carry for leaf in jax.tree.leaves(e))]
        if inside:
            raise TransformError(
                f"{name} of sx.scan has sx.Carry inside {inside[0]!r}. A whole argument is "
                f"carried; to carry some Variables of a Module, use "
                f"sx.StateAxes({{filter: sx.Carry, ...: None}})."
            )
        carried[name] = len(below) < len(top)
    if carried["in_axes"] != carried["out_axes"]:
        has, lacks = sorted(carried, key=carried.__getitem__, reverse=True)
        raise TransformError(
            f"{has} of sx.scan has sx.Carry, but {lacks} has none. What is carried comes in as an "
            f"argument and goes out in the result: in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0)."
        )
    entries = prefix.entries_in(below)
    if prefix.Carry in entries:
        raise TransformError(
            "out_axes of sx.scan has sx.Carry in a filter mapping. Variables are carried where "
            "their Module comes in; out_axes says how new ones are stacked."
        )
    if None in entries:
        raise PrefixError(
            f"out_axes of sx.scan gives None ({out_axes!r}), but every iteration has a result "
            f"of its own, so there is no one value to return. Give it an axis, carry it, or write "
            f"it into a Variable."
        )
    return carried["in_axes"]


class _Scan(LoopBody):
    """One call of ``scan``: a loop body with slices and rows."""

    def __init__(
        self,
        call: engine.LiftedCall,
        assigned: prefix.AssignedPrefixes,
        out_axes,
        has_carry: bool,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self.out_axes = out_axes
        args, kwargs, prefixes, named = assigned
        self.carry_position = prefixes.index(prefix.Carry) if has_carry else None
        if prefixes.count(prefix.Carry) > 1:
            raise TransformError(
                f"in_axes=sx.Carry is for a function of one argument, but the call has "
                f"{len(prefixes)} ({', '.join(call.labels)}). Give one entry each: in_axes="
                f"(sx.Carry, 0)."
            )
        assignment = prefix.EntryAssignment(call, args, kwargs, prefixes, named, None, "in_axes")
        axes, plain = assignment.leaves, assignment.plain
        self.mapped = mapped.MappedCall(
            assignment, (out_axes, "out_axes", None), (), lambda p: prefix.is_axis(axes[p])
        )
        self.streams = self.mapped.streams
        carry = [i for i, entry in enumerate(plain) if entry is prefix.Carry]
        label = "" if self.carry_position is None else call.labels[self.carry_position]
        super().__init__(call, self._carry, label, carry, self.mapped.values)
        for index, (path, entry) in enumerate(zip(assignment.plain_paths, plain, strict=True)):
            leaf = self.plain[index]
            if isinstance(leaf, engine.ARRAY_OR_NUMBER) or hasattr(leaf, "dtype"):
                continue
            if entry is prefix.Carry:
                raise TransformError(
                    f"{format_path(path)} of sx.scan is a {type(leaf).__name__}, which is no array "
                    f"or number, so it cannot go from one iteration to the next. Give it as an "
                    f"argument of its own with None in in_axes."
                )
            if entry is None:
                self.static_plain[index], self.plain[index] = leaf, None
        self.sliced = {
            p: 0 if p in self.streams else a for p, a in enumerate(axes) if prefix.is_axis(a)
        }
        self.sliced_plain = {i: axis for i, axis in enumerate(plain) if prefix.is_axis(axis)}
        self.arrays = mapped.entering_arrays(assignment, self.streams, self.values, self.plain)
        self.params = mapped.mapped_params(metadata, "scan")
        self.graphdef = mapped.element_graphdef(assignment, self.streams, self.params)
        self.mapped.boxes = mapped.MappedBoxes(assignment, self.params)
        call.enter = self.mapped.boxes.enter
        self.result_axes: list[Any] = []
        self.axes_of_new: list[int] = []

    def _carry(self, context: engine.RunContext) -> tuple[PyTree, PyTree]:
        """Returns what was given for the carried argument, and what came back."""
        if self.carry_position is None:
            return None, None
        carry, result = context.args[self.carry_position], context.result
        if self.out_axes is prefix.Carry:
            return carry, result
        place = [entry is prefix.Carry for entry in self.out_axes].index(True)
        if not isinstance(result, (tuple, list)) or len(result) != len(self.out_axes):
            description = f"{type(result).__name__}" + (
                f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
            )
            raise TransformError(
                f"With out_axes={self.out_axes!r} the body of sx.scan returns a tuple of "
                f"{len(self.out_axes)}, the carry at position {place}, but it returned a "
                f"{description}."
            )
        return carry, result[place]

    def record(
        self, context: engine.RunContext
    ) -> tuple[binding.LiftedOutputs, PyTree, Collection[int]]:
        """Records the rows of results and of sliced, sown, new Variables, too."""
        outputs, leaving, sown = self.mapped.record(context, lambda p: p not in self.sliced)
        new = [item.entry for item in leaving if item.new]
        self._check_changes(context, outputs, new)
        for item in leaving:
            mapped.check_new_axis(item.value, item.entry, item.path, "scan")
        self.axes_of_new = [axis if prefix.is_axis(axis) else 0 for axis in new]
        mapped.name_new_dimensions(
            self.mapped.assignment, self.streams, outputs, self.axes_of_new, self.params
        )
        results = [item for item in leaving if item.kind == "result" and not item.new]
        self.result_axes = [item.entry for item in results]
        rows = [item.value for item in results if item.entry is not prefix.Carry]
        written = zip(outputs.effects.written, outputs.written, strict=True)
        slices = {position: value for position, value in written if position in self.sliced}
        return outputs, (rows, slices, sown, outputs.fresh), self.sliced

    def _check_changes(
        self, context: engine.RunContext, outputs: binding.LiftedOutputs, new: Sequence[object]
    ) -> None:
        """Raises if the body changed structure other than by sowing."""
        refused = self._unstackable_changes(context, outputs, new)
        if refused:
            refuse_changes(self.call, outputs, refused)

    def _unstackable_changes(
        self, context: engine.RunContext, outputs: binding.LiftedOutputs, new: Sequence[object]
    ) -> list[int]:
        """Returns objects with changes besides stacked results."""
        effects = outputs.effects
        objects = context.graphdef.objects
        count = len(objects)
        entries = iter(zip(new, outputs.fresh, strict=True))
        stackable = set()
        for offset, definition in enumerate(effects.fresh):
            if type(definition) is VariableDef:
                axis, value = next(entries)
                if prefix.is_axis(axis) or isinstance(value, tuple):
                    stackable.add(count + offset)
            else:
                stackable.add(count + offset)
        return [
            index
            for index, changed in effects.updates.items()
            if not _only_adds(objects[index], changed, stackable)
        ]

    def run(self, length: int | None, reverse: bool, unroll: int | bool) -> PyTree:
        """Runs the loop and carries back what it did."""
        size = mapped.common_size(self.arrays, length, "scan")
        mapped.refuse_split(self.arrays, "scan")
        values = self.streams.split_keys(self.values, size)
        slices = (
            {p: _to_front(values[p], axis) for p, axis in self.sliced.items()},
            {i: _to_front(self.plain[i], axis) for i, axis in self.sliced_plain.items()},
        )
        first = jax.tree.map(_first_row, slices)
        self.discover(*self.inputs(self.start(), *first))

        def one(carry, part) -> PyTree:
            return self.step(carry, *part)

        if size == 1 and unroll is True:  # no loop at all
            carry, row = one(self.start(), jax.tree.map(lambda leaf: leaf[0], slices))
            rows = jax.tree.map(lambda leaf: leaf[None], row)
        else:
            carry, rows = jax.lax.scan(
                one, self.start(), slices, length=size, reverse=reverse, unroll=unroll
            )
        return self.mapped.apply_outputs(self._assemble(carry, rows), rows[2])

    def _assemble(self, carry, rows) -> binding.LiftedOutputs:
        """Puts together what went around and what left every iteration."""
        assert self.effects is not None
        results, slices, _, fresh = rows
        final = dict(zip(self.carried_variables, carry[0], strict=True))
        for position, stacked in slices.items():
            final[position] = _from_front(stacked, self.sliced[position])
        carry_leaves, row_leaves = iter(carry[1]), iter(results)
        leaves = [
            next(carry_leaves) if axis is prefix.Carry else _from_front(next(row_leaves), axis)
            for axis in self.result_axes
        ]
        written = [final[position] for position in self.effects.written]
        return binding.LiftedOutputs(
            self.result_tree.unflatten(leaves),
            written,
            [*map(_from_front, fresh, self.axes_of_new)],
            self.effects,
        )


def _only_adds(old: object, new: object, stackable: set[int]) -> bool:
    """Whether a Module only gained attributes that have a row per iteration."""
    if type(old) is not ModuleDef or type(new) is not ModuleDef:
        return False
    for old_items, new_items in (
        (old.attributes, new.attributes),
        (old.array_attributes, new.array_attributes),
    ):
        old_children = dict(old_items)
        for name, child in new_items:
            if name in old_children:
                if old_children[name] != child:
                    return False
            elif getattr(child, "position", None) not in stackable:
                return False
        if not set(old_children) <= {name for name, _ in new_items}:
            return False
    return True


def _first_row(leaf):
    """The type of one row, without computing it."""
    if not leaf.shape[0]:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return abstract_eval(lambda x: jax.lax.index_in_dim(x, 0, keepdims=False), leaf)


def _to_front(value: object, axis: int):
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0) if axis else leaf, value)


def _from_front(value: object, axis: int):
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, axis) if axis else leaf, value)
