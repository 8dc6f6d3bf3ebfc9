# SPDX-License-Identifier: Apache-2.0
"""``scan``: a function over Modules, run once per slice.

A run is one *iteration*. ``scan`` is a loop (``control.loop_body``) whose slices and rows are those
of a mapped call (``mapped.call``). What an iteration sees of a Variable, and what a write to it
does, depends on its entry in ``in_axes``:

- An axis (mapped): an iteration sees its own slice, and no other iteration sees what it writes. The
  written slices leave stacked along the axis, as a row of each iteration. They may have another
  shape and dtype.
- ``Carry``: an iteration sees what the one before it wrote, and the last value is stored.
  Structure, shape and dtype must stay; else ``TransformError``, before the loop runs
  (``Loop.find_carry``). The carried argument must come back in the result, where ``out_axes`` has
  ``Carry``: arrays in the same containers, a Module as the object that it is.
- None, or no entry, because the body reached the Variable through a closure: as for ``Carry``, but
  nothing must come back in the result. A written Variable of a closure becomes an input, and the
  body is traced once more (``retry_captured`` in ``lift.engine``).

The written Variables that are not mapped go to the next iteration in the carry of the loop
(``Loop.find_carry``, ``Loop._leave``); ``_ScanCall.leave`` makes the row of stacked values. Two
more rules:

- A Variable that is not mapped and that the body only reads is a constant of the loop, whatever its
  entry.
- A new Variable leaves stacked if it is in the result, attached to a mapped Module, or holds a
  tuple (``Module.sow``); so does what is appended to such a tuple. The axis is 0 where the entry is
  none. Any other change of structure in the body is a ``TransformError``.

A plain array has one entry, too: it is sliced, or goes through the result of every iteration
(``Carry``), or is the same in all iterations (None). When the loop has ended,
``_ScanLoop._apply_rows`` stores all that was written at once; an exception before that leaves the
caller's objects as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.graph.definitions import ModuleDef, VariableDef
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.variable import Variable
from shardax._transforms.control import errors
from shardax._transforms.control.forms import abstract_eval
from shardax._transforms.control.loop_body import Loop, LoopCarry, LoopSlices
from shardax._transforms.control.loops import check_unroll
from shardax._transforms.errors import TransformError
from shardax._transforms.jit import eager
from shardax._transforms.lift import engine
from shardax._transforms.lift.effects import LiftedOutputs
from shardax._transforms.lift.entries import EntryAssignment, assign, entries_by_name
from shardax._transforms.lift.filter_mappings import Carry, check_axes_only, entries_in, is_axis
from shardax._transforms.lift.transformed import decorator, wraps
from shardax._transforms.mapped import dimension
from shardax._transforms.mapped.call import AxisMappedCall, RunEffects
from shardax._transforms.mapped.names import Params, check_metadata


@decorator
def scan(
    function: Callable[..., PyTree] | None = None,
    *,
    in_axes: PyTree = (Carry, 0),
    out_axes: PyTree = (Carry, 0),
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
    assert function is not None  # ``decorator`` makes a decorator without it
    check_unroll(unroll, "scan")
    if not isinstance(reverse, (bool, np.bool_)):
        raise TransformError(f"reverse of sx.scan is {reverse!r}; give True or False.")
    has_carry = _check_axes(entries_by_name(function, in_axes), out_axes)
    length = dimension.as_count(length, "length")
    check_metadata(metadata, "scan")
    options = (in_axes, out_axes, has_carry, length, reverse, unroll, metadata)

    @wraps(function)
    def scanned(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return eager.run(_scan, (function,), options, args, kwargs)

    return scanned


def _check_axes(in_axes: PyTree, out_axes: PyTree) -> bool:
    """Checks both prefixes; returns whether an argument is carried."""
    is_carried_in = _check_carry(in_axes, "in_axes")
    is_carried_out = _check_carry(out_axes, "out_axes")
    if is_carried_in and not is_carried_out:
        raise errors.carry_on_one_side("in_axes", "out_axes")
    if is_carried_out and not is_carried_in:
        raise errors.carry_on_one_side("out_axes", "in_axes")

    stacked = [entry for entry in _top_level(out_axes) if entry is not Carry]
    entries = entries_in(stacked)
    if Carry in entries:
        raise errors.carry_in_a_filter_mapping()
    if None in entries:
        raise errors.result_without_axis(out_axes)
    return is_carried_in


def _check_carry(axes: PyTree, option: str) -> bool:
    """Returns whether a prefix has ``Carry``; raises unless it has it once, at the top level."""
    check_axes_only(axes, option, carry=True)
    entries = _top_level(axes)
    count = sum(entry is Carry for entry in entries)
    if count > 1:
        raise errors.carried_twice(option, count)
    for entry in entries:
        if entry is not Carry and Carry in jax.tree.leaves(entry):
            raise errors.carry_is_nested(option, entry)
    return count == 1


def _top_level(axes: PyTree) -> list[PyTree]:
    return list(axes) if isinstance(axes, (tuple, list)) else [axes]


def _scan(
    functions: Sequence[Callable[..., PyTree]],
    options: Sequence[Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    in_axes, out_axes, has_carry, length, reverse, unroll, metadata = options
    assigned = assign(functions[0], in_axes, args, kwargs, "in_axes", 0)

    def attempt(captured: list[Variable]) -> PyTree:
        call = engine.LiftedCall(
            "scan", functions, assigned.args, assigned.kwargs, captured=captured
        )
        if assigned.prefixes.count(Carry) > 1:
            raise errors.one_carry_for_several_arguments(call.labels, len(assigned.prefixes))
        carried_argument = assigned.prefixes.index(Carry) if has_carry else None
        assignment = EntryAssignment(call, *assigned, None, "in_axes")
        _check_carried_are_arrays(assignment)

        scan_call = _ScanCall(assignment, out_axes, metadata, length)
        return _ScanLoop(scan_call, carried_argument).run(reverse, unroll)

    return engine.retry_captured(attempt)


def _check_carried_are_arrays(assignment: EntryAssignment) -> None:
    """Raises if the carried argument holds something else than arrays and objects."""
    plain, _ = assignment.call.arguments.plain_leaves()
    for path, leaf, entry in zip(assignment.plain_paths, plain, assignment.plain, strict=True):
        if entry is Carry and not _is_array(leaf):
            raise errors.carried_value_is_no_array(path, leaf)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, engine.ARRAY_OR_NUMBER) or hasattr(leaf, "dtype")


class _ScanCall(AxisMappedCall):
    """One call of ``scan``: the slices that enter iterations, and the rows that leave them."""

    def __init__(
        self,
        assignment: EntryAssignment,
        out_axes: PyTree,
        metadata: Params | None,
        length: int | None,
    ) -> None:
        declared = entries_in((assignment.prefixes, assignment.named, out_axes))
        self.axes = list(dict.fromkeys([*filter(is_axis, declared), 0]))
        super().__init__(assignment, out_axes, [*self.axes, Carry], metadata, length)
        dimension.refuse_split(self.entering)

        # The axis of each mapped Variable and array, by position. Split streams have axis 0.
        self.variable_axes = {
            position: 0 if position in self.streams else entry
            for position, entry in enumerate(assignment.leaves)
            if is_axis(entry)
        }
        self.plain_axes = {
            index: entry for index, entry in enumerate(assignment.plain) if is_axis(entry)
        }

    def slices(self) -> LoopSlices:
        """Returns the mapped values, with the mapped dimension in front."""
        values = self.streams.split_keys(self.values, self.size)
        return LoopSlices(
            {p: _axis_to_front(values[p], axis) for p, axis in self.variable_axes.items()},
            {i: _axis_to_front(self.plain[i], axis) for i, axis in self.plain_axes.items()},
        )

    def leave(self, context: engine.RunContext) -> tuple[LiftedOutputs, list[list[Leaf]]]:
        """Returns what an iteration did, and its row: for each axis the arrays to be stacked."""
        effects = self.record(context)
        self._check_changes(effects)

        leaving = []
        for item in effects.leaving:
            if not is_axis(item.entry):
                # A written Variable and the carried result go to the next iteration. What is new,
                # or was appended to a shared tuple, has one value per iteration.
                is_new = item.new_type or item.source == "attached"
                item = item._replace(entry=0 if is_new else Carry)
            leaving.append(item)

        # The last list has no axis: ``Loop._leave`` gives its values to the next iteration.
        *row, _ = self.group_by_axis(effects, leaving)
        return effects.outputs, row

    def _check_changes(self, effects: RunEffects) -> None:
        """Raises if the body changed structure other than by attaching what can be stacked."""
        recorded = effects.outputs.effects
        new_variables = (item for item in effects.leaving if item.new_type)
        given = effects.context.graphdef.objects
        stackable = set()
        for position, definition in enumerate(recorded.fresh, start=len(given)):
            if type(definition) is VariableDef:
                # Sown values are tuples; they are stacked whatever the entry of their Module.
                item = next(new_variables)
                if not is_axis(item.entry) and not isinstance(item.value, tuple):
                    continue
            stackable.add(position)

        for index, changed in recorded.updates.items():
            if not _only_adds(given[index], changed, stackable):
                raise errors.body_changes_structure(self.call, recorded, index)


def _only_adds(old: object, new: object, stackable: set[int]) -> bool:
    """Whether a Module only gained attributes, whose objects are at stackable positions."""
    if not isinstance(old, ModuleDef) or not isinstance(new, ModuleDef):
        return False
    for old_items, new_items in (
        (old.attributes, new.attributes),
        (old.array_attributes, new.array_attributes),
    ):
        before, after = dict(old_items), dict(new_items)
        if any(name not in after or after[name] != child for name, child in before.items()):
            return False
        added = [child for name, child in after.items() if name not in before]
        if any(getattr(child, "position", None) not in stackable for child in added):
            return False
    return True


class _ScanLoop(Loop):
    """The loop of one scan."""

    def __init__(self, scan_call: _ScanCall, carried_argument: int | None) -> None:
        super().__init__(scan_call.call, carried_argument, scan_call.values)
        self.scan_call = scan_call
        self.body.graphdef = scan_call.slice_graphdef

        # Texts, functions and the like under None do not enter the program.
        for index, entry in enumerate(scan_call.assignment.plain):
            leaf = self.plain[index]
            if entry is None and not _is_array(leaf):
                self.body.static[index] = leaf
                self.plain[index] = None

    def run(self, reverse: bool, unroll: int | bool) -> PyTree:
        """Runs the loop; stores what it wrote, and returns the result of the call."""
        size = self.scan_call.size
        slices = self.scan_call.slices()
        self.slices = jax.tree.map(_type_of_first, slices)
        self.find_carry()

        if size == 1 and unroll is True:  # no loop at all
            carry, row = self.step(self.first_carry(), jax.tree.map(lambda leaf: leaf[0], slices))
            rows = jax.tree.map(lambda leaf: leaf[None], row)
        else:
            carry, rows = jax.lax.scan(
                self.step, self.first_carry(), slices, length=size, reverse=reverse, unroll=unroll
            )
        return self._apply_rows(carry, rows)

    def returned_carry(self, result: PyTree) -> PyTree:
        """See ``Loop.returned_carry``: the part of the result where ``out_axes`` has ``Carry``."""
        out_axes = self.scan_call.out_prefix
        if out_axes is Carry:
            return result
        position = [entry is Carry for entry in out_axes].index(True)
        if not isinstance(result, (tuple, list)) or len(result) != len(out_axes):
            raise errors.result_has_no_carry(out_axes, position, result)
        return result[position]

    def record(self, context: engine.RunContext) -> tuple[LiftedOutputs, PyTree]:
        """See ``Loop.record``: what the iteration did, and the row that leaves it."""
        return self.scan_call.leave(context)

    def _apply_rows(self, carry: LoopCarry, rows: Sequence[Sequence[Leaf]]) -> PyTree:
        """Stores what went around and what was stacked; returns the result of the call."""
        lists = [
            [_axis_from_front(leaf, axis) for leaf in leaves]
            for axis, leaves in zip(self.scan_call.axes, rows, strict=True)
        ]
        # In the order in which they left the body: the result comes before what was written.
        lists.append([*carry.plain, *jax.tree.leaves(carry.variables)])
        return self.scan_call.apply(lists)


def _type_of_first(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of the first slice of an array, without computing it."""
    if not leaf.shape[0]:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return abstract_eval(lambda x: jax.lax.index_in_dim(x, 0, keepdims=False), leaf)


def _axis_to_front(value: PyTree, axis: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0) if axis else leaf, value)


def _axis_from_front(leaf: jax.Array, axis: int) -> jax.Array:
    return jnp.moveaxis(leaf, 0, axis) if axis else leaf
