# SPDX-License-Identifier: Apache-2.0
"""One call of a mapped transform: ``vmap``, ``scan`` or ``shard_map``.

A mapped transform runs a function several times: once per batch element (``vmap``), per iteration
(``scan``) or per shard (``shard_map``). Each of these is a *run*. Every Variable and every array
has an *entry*, given by ``in_axes`` or ``in_specs``:

- It is *mapped* if its entry is an axis, or a PartitionSpec that names mesh axes. Each run sees its
  own *slice*.
- It is *shared* if its entry is None, or ``P()``. All runs see the same value.
- It is *carried* if its entry is ``Carry``, in ``scan`` only.

A call has three steps.

1. *Enter*: values are cut into slices. A mapped random stream with one key is split (``streams``).
   Names of the mapped dimension are taken off (``names``).
2. *Run*: the function runs on a slice (``LiftedCall.run`` in ``lift.engine``), a private copy of
   the objects. ``MappedCall.record`` says what leaves the run, each value with an entry. The
   transform accepts or refuses it: ``_VmapCall._settle_shared`` (``vmap.vmap``),
   ``_ScanCall.leave`` (``control.scan``), ``_ShardMapCall._leave`` (``shard_map.shard_map``).
3. *Leave*: ``MappedCall.group`` puts the values into one list per entry. JAX stacks each list, and
   ``MappedCall.apply`` stores what was written. Nothing before it writes to the caller's objects (a
   lazy value that is read becomes an array, and ``shard_map`` moves arrays to their shards). So
   after an error in a run or in a check they hold what they held.

A value *differs* between runs if JAX computes one for each run, whatever the numbers are: it
depends on something that is mapped, and no collective such as ``jax.lax.pmean`` made it one again.

What a write to a Variable does:

=============  ============================  =========================  ============================
The Variable   ``vmap``                      ``scan``                   ``shard_map``
=============  ============================  =========================  ============================
is mapped      The written slices are        As in ``vmap``.            The written shards are put
               stacked along its axis.                                  together by its spec.
is shared,     It is written once, with the  The next iteration reads   It is written once, with the
or carried     value equal in all batch      what this one wrote.       value equal in all shards;
               elements; if they differ:                                if they differ:
               ``TransformError``.                                      ``TransformError``.
was not        ``ForeignMutationError``.     As if it were shared.      ``ForeignMutationError``.
passed in
=============  ============================  =========================  ============================

A new Variable leaves by the entry of its place in the result, or of the argument that it was
attached to. What is attached to a shared Module, or appended to the tuple of a shared Variable
(``Module.sow``), is stacked along axis 0: in ``vmap`` if it differs between batch elements, in
``scan`` always (but there only tuples may be attached to what is shared).
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

import jax

from shardax._core.graph.definitions import VariableDef
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._transforms.errors import foreign_object
from shardax._transforms.lift.effects import Effects, LiftedOutputs, check_result, holds_same_arrays
from shardax._transforms.lift.engine import RunContext
from shardax._transforms.lift.entries import EntryAssignment, OutputEntries
from shardax._transforms.lift.filter_mappings import is_axis
from shardax._transforms.mapped import dimension
from shardax._transforms.mapped.names import DimensionNames, Params
from shardax._transforms.mapped.streams import SplitStreams


class LeavingValue(NamedTuple):
    """A value that leaves one run, with its entry."""

    # "result": returned. "written": the new value of a given Variable. "attached": a new Variable
    # on a given Module, or what was appended to the tuple of a shared Variable.
    source: Literal["result", "written", "attached"]
    path: Path
    entry: PyTree
    value: PyTree
    new_type: str = ""  # the name of its type, if it is a new Variable


class RunEffects(NamedTuple):
    """All that one run leaves behind."""

    context: RunContext
    outputs: LiftedOutputs
    appended: dict[int, tuple[Leaf, ...]]  # to tuples of shared Variables, by their position
    leaving: list[LeavingValue]  # in the order of the arrays in ``outputs`` and ``appended``


class MappedCall(abc.ABC):
    """One call whose function runs on slices of its arguments."""

    out_name: str  # the option with the prefix of the result
    shared_entry: Hashable  # the entry of what has no place in the arguments or the result

    def __init__(
        self, assignment: EntryAssignment, out_prefix: PyTree, entries: Iterable[Hashable]
    ) -> None:
        self.assignment = assignment
        self.call = assignment.call
        self.out_prefix = out_prefix
        self.entries = list(dict.fromkeys(entries))  # all that can occur
        self.values = self.call.graph.values()
        self.streams = SplitStreams(
            self.call, self.values, lambda position: self.is_mapped(assignment.leaves[position])
        )

        # Known after the function ran: the tree of the arrays that leave, and for each of them the
        # index of its entry.
        self._tree: jax.tree_util.PyTreeDef | None = None
        self._entry_indices: list[int] = []

    @abc.abstractmethod
    def is_mapped(self, entry: PyTree) -> bool:
        """Whether an entry gives each run a slice of its own."""

    def stacks_appended(self, position: int) -> bool:
        """Whether what is appended to the tuple of a Variable has a slice per run."""
        return False

    def result_outside(self, result: PyTree, entries: OutputEntries) -> PyTree:
        """Returns the result of a run as it is described outside."""
        return result

    def record(self, context: RunContext) -> RunEffects:
        """Returns, inside a run, what it did: each value with the entry of its place."""
        check_result(context.result, self.call.name)
        self.streams.separate_held_by_new_objects(context)
        entries = self.assignment.output_entries(context, self.out_prefix, self.out_name)
        outputs = context.record_effects(self.result_outside(context.result, entries))
        effects = outputs.effects
        for item in effects.foreign.values():
            raise foreign_object(self.call.name, type(item).__name__)

        # The caller's streams move on by one draw, whatever the runs drew.
        outputs = self.streams.without_counters(outputs)
        appended = self._appended(context, effects)
        outputs = outputs.without_written(appended)

        # The result.
        results = zip(entries.of_plain, jax.tree.leaves(outputs.result), strict=True)
        leaving = [LeavingValue("result", path, entry, value) for (path, entry), value in results]

        # Given Variables that were written, each with the entry that it came with.
        for position, value in zip(effects.written, outputs.written, strict=True):
            path, entry = self._path_and_entry(position)
            leaving.append(LeavingValue("written", path, entry, value))

        # New Variables.
        types = [item.type.__name__ for item in effects.fresh if type(item) is VariableDef]
        for key, new_type, value in zip(effects.fresh_ids, types, outputs.fresh, strict=True):
            path, entry = entries.by_id.get(key, ((), self.shared_entry))
            is_attached = key in entries.attached or key not in entries.by_id
            source = "attached" if is_attached else "result"
            leaving.append(LeavingValue(source, path, entry, value, new_type))

        # What was appended to tuples of shared Variables.
        for position, items in appended.items():
            path, entry = self._path_and_entry(position)
            leaving.append(LeavingValue("attached", path, entry, items))
        return RunEffects(context, outputs, appended, leaving)

    def _appended(self, context: RunContext, effects: Effects) -> dict[int, tuple[Leaf, ...]]:
        """Returns what was appended to the tuples of shared Variables, by position."""
        # It has a part per run, though the tuple that was there before has none.
        appended: dict[int, tuple[Leaf, ...]] = {}
        for position in effects.written:
            before = context.bound[position]
            after = context.variable(position)._value
            is_tuple = isinstance(before, tuple) and type(after) is tuple
            if not is_tuple or not self.stacks_appended(position):
                continue
            count = len(before)
            if len(after) > count and holds_same_arrays(before, after[:count]):
                appended[position] = after[count:]
        return appended

    def _path_and_entry(self, position: int) -> tuple[Path, PyTree]:
        """Returns the path and the entry of a given Variable."""
        return self.assignment.leaf_paths[position], self.assignment.leaves[position]

    def group(self, effects: RunEffects, entries: Iterable[Hashable]) -> tuple[list[Leaf], ...]:
        """Returns, inside a run, the arrays that leave it: one list per entry of ``entries``.

        Args:
            effects: What the run did.
            entries: The entry of each array that leaves.
        """
        # JAX is given the entry of each list before the run. What leaves is known only after it.
        arrays, self._tree = jax.tree.flatten((effects.outputs, effects.appended))
        self._entry_indices = [self.entries.index(entry) for entry in entries]
        lists: tuple[list[Leaf], ...] = tuple([] for _ in self.entries)
        for index, array in zip(self._entry_indices, arrays, strict=True):
            lists[index].append(array)
        return lists

    def apply(self, lists: Sequence[Sequence[Leaf]]) -> PyTree:
        """Stores, outside, the stacked arrays of each entry; returns the result of the call."""
        assert self._tree is not None  # the function ran
        remaining = [iter(arrays) for arrays in lists]
        arrays = [next(remaining[index]) for index in self._entry_indices]
        outputs, appended = self._tree.unflatten(arrays)

        extended = {
            position: (*self.values[position], *items) for position, items in appended.items()
        }
        outputs = outputs.with_written(extended)
        return self.call.apply(self.streams.advance(outputs))


class AxisMappedCall(MappedCall):
    """A mapped call whose entries are axes: of ``vmap`` and ``scan``."""

    out_name = "out_axes"
    shared_entry = None

    def __init__(
        self,
        assignment: EntryAssignment,
        out_axes: PyTree,
        entries: Iterable[Hashable],
        metadata: Params | None,
        declared_size: int | None,
    ) -> None:
        super().__init__(assignment, out_axes, entries)
        self.plain, self.plain_tree = self.call.arguments.plain_leaves()
        self.entering = dimension.entering_arrays(assignment, self.streams, self.values, self.plain)
        self.size = dimension.common_size(self.entering, declared_size, self.call.name)

        # In a run, metadata and boxes do not have the name of the mapped dimension.
        self.names = DimensionNames(assignment, self.streams, metadata or {})
        self.slice_graphdef = self.names.slice_graphdef()
        self.call.enter = self.names.enter

    def is_mapped(self, entry: PyTree) -> bool:
        """See ``MappedCall.is_mapped``."""
        return is_axis(entry)

    def stacks_appended(self, position: int) -> bool:
        """See ``MappedCall.stacks_appended``."""
        return not is_axis(self.assignment.leaves[position])

    def result_outside(self, result: PyTree, entries: OutputEntries) -> PyTree:
        """See ``MappedCall.result_outside``: boxes have the mapped dimension again."""
        return self.names.leave(result, entries)

    def group_by_axis(
        self, effects: RunEffects, leaving: Sequence[LeavingValue]
    ) -> tuple[list[Leaf], ...]:
        """Returns, inside a run, the arrays that leave it, each in the list of its axis.

        Args:
            effects: What the run did. Metadata of new Variables get the mapped dimension.
            leaving: What leaves, with the axes by which the transform stacks it.
        """
        for item in leaving:
            dimension.check_new_axis(item.value, item.entry, item.path, self.call.name)

        axes_of_new = [item.entry for item in leaving if item.new_type]
        self.names.name_new_variables(effects.outputs, axes_of_new)
        self.names.name_changed_variables(effects.outputs)
        entries = [item.entry for item in leaving for _ in jax.tree.leaves(item.value)]
        return self.group(effects, entries)
