# SPDX-License-Identifier: Apache-2.0
"""Overrides: what the caller of a layout says of some leaves, by filter.

An *override* is a pair of a filter and a value for the Variables that match it. The value is *more
rules*, which come before the layout's own (so that moments of an optimizer are split over a mesh
axis that their parameters are not), or an *explicit spec*, a ``PartitionSpec`` over the layout's
mesh or a ``NamedSharding``. None leaves a Variable to the rules. A *memory kind*, such as
``"pinned_host"``, is given for all arrays or by filter in the same way.

``overrides_of`` takes three steps:

1. Values and filters are checked, before any leaf is looked at.
2. For each leaf the first filter that matches decides. A Variable reached by several paths is
   matched by each of them; two paths that disagree are an error.
3. A filter that decided about no leaf is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import Path, format_path
from shardax._core.state.filters import first_match, to_predicates
from shardax._core.state.state import State
from shardax._transforms.lift.filter_mappings import FilterMapping, StateSharding
from shardax.partition import errors, findings
from shardax.partition.errors import Diagnostic, PartitionError
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules
from shardax.partition.tree.inventory import FilterSubject, TreeInventory

V = TypeVar("V")

OverridesLike = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A mapping or pairs of filter and spec or rules; a ``StateSharding``; a ``State`` of specs."""

MemoryKinds = str | Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A memory kind, or a mapping or pairs of filter and memory kind."""


class Override(NamedTuple):
    """What was said of one leaf; None in each place for nothing."""

    rules: Rules | None = None  # before the layout's
    spec: PartitionSpec | NamedSharding | None = None  # instead of rules
    memory_kind: str | None = None
    source: str = ""  # the override of rules or spec as text


def overrides_of(
    inventory: TreeInventory,
    mesh: AnyMesh | None,
    overrides: OverridesLike | None,
    memory_kind: MemoryKinds | None,
) -> tuple[list[Override], list[Diagnostic]]:
    """Returns the ``Override`` of every leaf, and diagnostics of the filters."""
    if overrides is None:
        overrides = ()
    placements = _FilterTable("overrides", overrides, _checked_value)

    def checked_kind(value: object, text: str) -> str | None:
        return _checked_memory_kind(value, text, mesh)

    if isinstance(memory_kind, str) or memory_kind is None:
        memory_kind = {...: memory_kind}
    memory_kinds = _FilterTable("memory_kind", memory_kind, checked_kind)

    overrides_by_leaf: list[Override] = []
    diagnostics: list[Diagnostic] = []
    for subject in inventory.filter_subjects():
        kind_index = memory_kinds.deciding_filter(subject, diagnostics)
        kind = None if kind_index is None else memory_kinds.values[kind_index]

        index = placements.deciding_filter(subject, diagnostics)
        if index is None:
            overrides_by_leaf.append(Override(memory_kind=kind))
            continue
        value = placements.values[index]
        source = f"the override {value!r} for {placements.filter_texts[index]}"
        if isinstance(value, Rules):
            overrides_by_leaf.append(Override(value, None, kind, source))
        else:
            overrides_by_leaf.append(Override(None, value, kind, source))

    diagnostics += placements.unused_filters()
    diagnostics += memory_kinds.unused_filters()
    return overrides_by_leaf, diagnostics


class _FilterTable(Generic[V]):
    """Pairs of a filter and a checked value, in order of priority.

    Args:
        option: The option that they were given for.
        option_value: What was given.
        check: Returns a value as it is used, or raises, given the value and the pair as text.
    """

    def __init__(
        self, option: str, option_value: Any, check: Callable[[Any, str], V | None]
    ) -> None:
        self.option = option
        pairs = _pairs(option, option_value)
        self.predicates = to_predicates([item for item, _ in pairs])
        self.filter_texts = [_filter_text(item) for item, _ in pairs]
        self.values: list[V | None] = []
        for filter_text, (_, value) in zip(self.filter_texts, pairs, strict=True):
            self.values.append(check(value, f"{option}={{{filter_text}: {value!r}}}"))
        self.used: set[int] = set()

    def deciding_filter(self, subject: FilterSubject, diagnostics: list[Diagnostic]) -> int | None:
        """Returns the index of the filter that decides about a leaf, or None.

        Paths that disagree add a diagnostic, and none decides.
        """
        path_by_index: dict[int, Path] = {}
        for path in subject.paths:
            index = first_match(self.predicates, path, subject.like)
            if index is not None:
                self.used.add(index)
                if self.values[index] is not None:
                    path_by_index.setdefault(index, path)
        if not path_by_index:
            return None

        first_index = next(iter(path_by_index))
        first_value = self.values[first_index]
        if all(self.values[index] == first_value for index in path_by_index):
            return first_index

        decisions = [
            f"{format_path(path)} has {self.values[index]!r} (by {self.filter_texts[index]})"
            for index, path in path_by_index.items()
        ]
        path = path_by_index[first_index]
        diagnostics.append(findings.override_conflict(path, self.option, decisions))
        return None

    def unused_filters(self) -> Iterator[Diagnostic]:
        """Yields a warning for each filter that decided about no leaf."""
        for index, (filter_text, value) in enumerate(
            zip(self.filter_texts, self.values, strict=True)
        ):
            if index not in self.used and value is not None:
                yield findings.unused_override(self.option, filter_text)


def _pairs(option: str, option_value: Any) -> list[tuple[Any, Any]]:
    """Returns the pairs of filter and value that were given for an option."""
    if isinstance(option_value, State):
        option_value = StateSharding(option_value)
    if isinstance(option_value, FilterMapping):
        return list(zip(option_value, option_value.values(), strict=True))
    if isinstance(option_value, Mapping):
        return list(option_value.items())

    is_sequence = isinstance(option_value, Iterable) and not isinstance(option_value, str)
    pairs: list[Any] = list(option_value) if is_sequence else [None]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise errors.no_overrides(option, option_value)
    return [(item, value) for item, value in pairs]


def _filter_text(item: object) -> str:
    if item is ...:
        return "..."
    return item.__name__ if isinstance(item, type) else repr(item)


def _checked_value(value: object, text: str) -> Rules | PartitionSpec | NamedSharding | None:
    """Returns the value of an override; a mapping or list becomes Rules."""
    if value is None or isinstance(value, (PartitionSpec, NamedSharding, Rules)):
        return value
    if isinstance(value, (Mapping, list)):
        try:
            return Rules(value)
        except PartitionError as error:
            raise errors.no_rules_in_override(text, error) from error
    raise errors.no_place_in_override(text, value)


def _checked_memory_kind(value: object, text: str, mesh: AnyMesh | None) -> str | None:
    """Returns the memory kind, if the devices of the mesh have such a memory."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise errors.no_memory_kind(text, value)
    if mesh is not None:
        try:
            NamedSharding(mesh, PartitionSpec(), memory_kind=value)
        except ValueError as error:
            raise errors.unknown_memory_kind(text, error) from error
    return value
