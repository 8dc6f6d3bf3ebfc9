# SPDX-License-Identifier: Apache-2.0
"""Layouts of mapped calls: which entry each Variable and each plain array of a call got.

A *mapped* call runs its function on parts of its arguments: ``vmap`` on lanes, ``scan`` on
iterations, ``shard_map`` on shards. The caller's prefixes say how each argument is taken apart and
how results are put together, one *entry* per array: an axis, a spec, ``None``, ``Carry``.

Before the run, ``Layout`` spreads the in-prefix over the arguments. In the run, ``leaving`` spreads
both prefixes over what the function left behind, so that a new Variable, too, has an entry: that of
its place in the result, or of the argument that it was attached to. A Variable that stands in
arguments and result must get one entry; two different ones are an error with both paths.

JAX's transforms want out-entries before the run, when what leaves is not known yet. But which
entries can occur is known: those of the two prefixes. So values leave sorted by entry
(``Sorted``), one list for each entry that can occur.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax.core.errors import OutputError
from shardax.core.paths import Path
from shardax.core.structure import GraphDef, VariableDef
from shardax.core.variables import Variable
from shardax.transforms.call import Call, Inside
from shardax.transforms.lift import Carried, Record, same_value
from shardax.transforms.prefix import FilterMapping, consistent, expand


class Layout:
    """The entries of one call.

    Args:
        call: The call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        prefixes: One prefix per positional argument.
        named: The entry of all keyword arguments, or a dict with one prefix for each.
        outside: The entry of Variables that the functions are bound to, or that they captured.
        name: The option's name, for messages.

    Attributes:
        leaves: One entry per Variable of the graph.
        plain: One entry per plain leaf, positional arguments first, then by name.
        plain_paths: The path of each plain leaf.
    """

    def __init__(
        self,
        call: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        prefixes: Sequence[Any],
        named: Any,
        outside: Any,
        name: str,
    ) -> None:
        self.call = call
        self.prefixes = prefixes
        self.named = named
        self.name = name
        entries = list(self._spread(args, kwargs, {}))
        self.by_id = consistent(entries, name)
        self.leaves = [
            self.by_id.get(id(leaf), ((), outside))[1] for leaf in call.graph.flat.leaves
        ]
        plain = [(path, entry) for path, leaf, entry in entries if not isinstance(leaf, Variable)]
        self.plain = [entry for _, entry in plain]
        self.plain_paths = [path for path, _ in plain]

    def _spread(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], known: Mapping[int, Any]
    ) -> Iterable[tuple[Path, Any, Any]]:
        for label, prefix, arg in zip(self.call.labels, self.prefixes, args, strict=True):
            yield from expand(prefix, arg, self.name, (label,), known)
        for keyword in sorted(kwargs):
            prefix = self.named[keyword] if isinstance(self.named, dict) else self.named
            yield from expand(prefix, kwargs[keyword], self.name, (keyword,), known)

    @property
    def leaf_paths(self) -> list[Path]:
        """The path of each Variable of the graph."""
        return self.call.graph.flat.leaf_paths

    def leaving(self, inside: Inside, out_prefix: Any, out_name: str) -> Leaving:
        """Returns the entry of everything that leaves.

        Args:
            inside: What is known after the function ran.
            out_prefix: The caller's prefix of the result.
            out_name: The option's name, for messages.
        """
        of_result = [
            (("result", *path), leaf, entry)
            for path, leaf, entry in expand(out_prefix, inside.result, out_name)
        ]
        leaves = enumerate(self.call.graph.flat.leaves)
        given = {  # keep the entries they came with, also where the function moved them
            id(inside.variable(position)): self.by_id[id(leaf)][1]
            for position, leaf in leaves
            if id(leaf) in self.by_id
        }
        around = list(self._spread(inside.args, inside.kwargs, given))
        entries = consistent([*around, *of_result], f"{self.name} and {out_name}")
        plain = [(path, entry) for path, leaf, entry in of_result if not isinstance(leaf, Variable)]
        return Leaving(entries, plain, frozenset(id(leaf) for _, leaf, _ in around))


class Leaving(NamedTuple):
    """Entries of what leaves.

    Attributes:
        by_id: (path, entry) by ``id`` of a Variable inside.
        labels: (path, entry) of each plain leaf of the result; the path begins with "result".
        attached: ``id`` of what the arguments hold.
    """

    by_id: dict[int, tuple[Path, Any]]
    labels: list[tuple[Path, Any]]
    attached: frozenset[int]

    @property
    def plain(self) -> list[Any]:
        """The entry of each plain leaf of the result."""
        return [entry for _, entry in self.labels]


def entries_in(prefix: Any) -> list[Any]:
    """Returns the distinct entries that a prefix can give."""
    leaves = jax.tree.leaves(prefix, is_leaf=lambda item: item is None)
    found: list[Any] = []
    for leaf in leaves:
        values = list(leaf.values()) if isinstance(leaf, FilterMapping) else [leaf]
        found.extend(value for value in values if not any(value == item for item in found))
    return found


class Sorted:
    """Values on their way out, one list per entry.

    Args:
        entries: The entries that can occur, in the order of the lists.
    """

    def __init__(self, entries: Iterable[Hashable]) -> None:
        self.entries = list(dict.fromkeys(entries))
        self.order: list[int] = []

    def sort(self, pairs: Iterable[tuple[Hashable, Any]]) -> tuple[list[Any], ...]:
        """Sorts (entry, value) pairs, inside the transform."""
        place = {entry: position for position, entry in enumerate(self.entries)}
        lists: tuple[list[Any], ...] = tuple([] for _ in self.entries)
        self.order = []
        for entry, value in pairs:
            self.order.append(place[entry])
            lists[place[entry]].append(value)
        return lists

    def restore(self, lists: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the values in their first order, outside the transform."""
        remaining = [iter(values) for values in lists]
        return [next(remaining[place]) for place in self.order]


class Parts:
    """The three kinds of values in a ``Carried``, as one flat list and back.

    Args:
        carried: What leaves the pure function.
    """

    def __init__(self, carried: Carried) -> None:
        self.record = carried.record
        leaves, self.treedef = jax.tree.flatten(carried.result)
        self.counts = (len(leaves), len(carried.written))
        self.values = [*leaves, *carried.written, *carried.fresh]

    def assemble(self, values: Sequence[Any]) -> Carried:
        """Returns the ``Carried`` with other values."""
        result, written = self.counts
        return Carried(
            self.treedef.unflatten(values[:result]),
            list(values[result : result + written]),
            list(values[result + written :]),
            self.record,
        )


def drop_written(carried: Carried, positions: Container[int]) -> Carried:
    """Returns, inside the transform, what leaves without some of the written Variables.

    Args:
        carried: What leaves; its record is changed.
        positions: Positions of the Variables.
    """
    pairs = zip(carried.record.written, carried.written, strict=True)
    kept = [(position, value) for position, value in pairs if position not in positions]
    carried.record.written = tuple(position for position, _ in kept)
    return carried._replace(written=[value for _, value in kept])


def add_written(carried: Carried, more: Mapping[int, Any]) -> Carried:
    """Returns, outside the transform, what left with more written Variables.

    Args:
        carried: What left; its record is changed.
        more: Values by position of the Variable.
    """
    carried.record.written = (*carried.record.written, *more)
    return carried._replace(written=[*carried.written, *more.values()])


def appended(
    inside: Inside, record: Record, is_shared: Callable[[int], bool]
) -> dict[int, tuple[Any, ...]]:
    """Returns what was appended to the tuples of shared Variables, as ``Module.sow`` does.

    Such values have a part per lane or iteration, though the tuple that was there before has none.

    Args:
        inside: What is known after the function ran.
        record: What it did.
        is_shared: Whether the Variable at a position is shared.
    """
    found: dict[int, tuple[Any, ...]] = {}
    for position in record.written:
        before, after = inside.bound[position], inside.variable(position)._value
        if not is_shared(position) or not (isinstance(before, tuple) and type(after) is tuple):
            continue
        count = len(before)
        if len(after) > count and same_value(before, after[:count]):
            found[position] = after[count:]
    return found


def refuse_foreign(record: Record, name: str) -> None:
    """Raises if objects that were not passed in stand in the result.

    Args:
        record: What the function did.
        name: The transform's name, for messages.

    Raises:
        OutputError: Naming the type.
    """
    for item in record.foreign.values():
        raise OutputError(
            f"The function given to sx.{name} returned (or attached to an argument) a "
            f"{type(item).__name__} that was not passed in, so it is one object and has no part "
            f"of its own in each run. Pass it as an argument, or return sx.clone of it."
        )


def map_metadata(graphdef: GraphDef, change: Callable[[int, VariableDef], VariableDef]) -> GraphDef:
    """Returns the structure with changed definitions of Variables.

    Args:
        graphdef: The structure.
        change: Called with the position among the Variables and the definition.
    """
    objects = list(graphdef.objects)
    for position, index in enumerate(graphdef.leaves):
        objects[index] = change(position, objects[index])
    return GraphDef(tuple(objects), graphdef.roots)
