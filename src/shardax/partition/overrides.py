# SPDX-License-Identifier: Apache-2.0
"""Overrides: layouts of some leaves apart from the rules.

An *override* is a pair of a filter (``shardax._core.state.filters``) and a value for the Variables
that match it: *more rules*, which come before the layout's own (so that moments of an optimizer are
split over a mesh axis that their parameters are not), or an *explicit spec*, a ``PartitionSpec``
over the layout's mesh or a ``NamedSharding``. None leaves a Variable to the rules. The first filter
that matches decides; what none matches is left to the rules, too.

A *memory kind* is which memory of a device holds an array, such as ``"pinned_host"``, for all
arrays or by filter.

A Variable that is reached by several paths is matched by each of them, so an override for
``.head.kernel`` holds for the embedding that is tied to it. Two that disagree are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import format_path
from shardax._core.state.filters import first_match, to_predicates
from shardax._core.state.state import State
from shardax._transforms.lift.prefix import FilterMapping, StateSharding
from shardax.partition.errors import Diagnostic, OverrideError, RulesError
from shardax.partition.inventory import FilterSubject, TreeInventory
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules

OverridesLike = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A mapping or pairs of filter and spec or rules; a ``StateSharding``; a ``State`` of specs."""

MemoryKinds = str | Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A memory kind, or a mapping or pairs of filter and memory kind."""


class Override(NamedTuple):
    """What holds for one leaf apart from the layout's rules."""

    rules: Rules | None = None  # before the layout's
    spec: PartitionSpec | NamedSharding | None = None
    memory_kind: str | None = None
    source: str = ""  # the override as text


def overrides_of(
    inventory: TreeInventory,
    mesh: AnyMesh | None,
    overrides: OverridesLike | None,
    memory_kind: MemoryKinds | None,
) -> tuple[Sequence[Override], list[Diagnostic]]:
    """The override of every leaf, and diagnostics of overrides."""
    values = _FilterTable("overrides", () if overrides is None else overrides, _checked_value)
    kinds = _FilterTable(
        "memory_kind",
        {...: memory_kind} if isinstance(memory_kind, str) or memory_kind is None else memory_kind,
        lambda kind, text: _checked_kind(kind, text, mesh),
    )
    found: list[Override] = []
    diagnostics: list[Diagnostic] = []
    for subject in inventory.filter_subjects():
        at = values.first(subject, diagnostics)
        kind_at = kinds.first(subject, diagnostics)
        kind = None if kind_at is None else kinds.values[kind_at]
        value = None if at is None else values.values[at]
        source = "" if at is None else f"the override {value!r} for {values.filters[at]}"
        rules, spec = (value, None) if isinstance(value, Rules) else (None, value)
        found.append(Override(rules, spec, kind, source))
    return found, [*diagnostics, *values.unused(), *kinds.unused()]


class _FilterTable:
    """Pairs of filter and value; ``convert`` checks one value of ``option``."""

    def __init__(self, option: str, given: Any, convert: Callable[[Any, str], Any]) -> None:
        self.option = option
        pairs = _pairs(option, given)
        self.predicates = to_predicates([item for item, _ in pairs])
        self.filters = [_filter_text(item) for item, _ in pairs]
        self.values = [
            convert(value, f"{option}={{{text}: {value!r}}}")
            for (_, value), text in zip(pairs, self.filters, strict=True)
        ]
        self.used: set[int] = set()

    def first(self, subject: FilterSubject, diagnostics: list[Diagnostic]) -> int | None:
        """The position of the deciding filter; disagreements add a diagnostic."""
        decided: dict[int, Any] = {}
        for path in subject.paths:
            position = first_match(self.predicates, path, subject.like)
            if position is not None:
                self.used.add(position)
                decided.setdefault(position, path)
        decided = {i: path for i, path in decided.items() if self.values[i] is not None}
        first = next(iter(decided), None)
        if first is None or all(self.values[i] == self.values[first] for i in decided):
            return first
        parts = [
            f"{format_path(path)} has {self.values[i]!r} (by {self.filters[i]})"
            for i, path in decided.items()
        ]
        text = (
            f"{format_path(decided[first])}: one Variable, reached by several paths, has more than "
            f"one place by {self.option}: {'; '.join(parts)}. Give it one, by a filter that "
            "matches all of its paths and stands first."
        )
        diagnostics.append(Diagnostic("error", decided[first], "override-conflict", text))
        return None

    def unused(self) -> Iterator[Diagnostic]:
        """Warnings about filters without effect."""
        for position, (text, value) in enumerate(zip(self.filters, self.values, strict=True)):
            if position not in self.used and value is not None:
                message = (
                    f"{self.option} for {text} was used for no Variable: none matches, or "
                    "an earlier filter takes all that do."
                )
                yield Diagnostic("warning", (), "unused-override", message)


_EXAMPLE = "overrides={sx.OptState: {'embed': 'data'}, sx.PathContains('bias'): PartitionSpec()}"


def _pairs(option: str, given: Any) -> list[tuple[Any, Any]]:
    if isinstance(given, State):
        given = StateSharding(given)
    if isinstance(given, FilterMapping):
        return list(zip(given, given.values(), strict=True))
    if isinstance(given, Mapping):
        return list(given.items())
    iterable = isinstance(given, Iterable) and not isinstance(given, str)
    pairs: list[Any] = list(given) if iterable else [None]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise OverrideError(
            f"{option}={given!r} of type {type(given).__name__} is no mapping from filters and no "
            f"list of pairs. Write for instance {_EXAMPLE}."
        )
    return [(item, value) for item, value in pairs]


def _filter_text(item: Any) -> str:
    if item is ...:
        return "..."
    return item.__name__ if isinstance(item, type) else repr(item)


def _checked_value(value: Any, text: str) -> Any:
    if value is None or isinstance(value, (PartitionSpec, NamedSharding, Rules)):
        return value
    if isinstance(value, (Mapping, list)):
        try:
            return Rules(value)
        except RulesError as error:
            raise OverrideError(f"{text} has no rules in it: {error}") from error
    raise OverrideError(
        f"{text}: {value!r} of type {type(value).__name__} is no place. Give a PartitionSpec over "
        "the mesh, a NamedSharding, rules (a mapping, a list of pairs, or Rules) that come before "
        f"the layout's own, or None. For instance {_EXAMPLE}."
    )


def _checked_kind(value: Any, text: str, mesh: AnyMesh | None) -> str | None:
    if value is not None and not isinstance(value, str):
        raise OverrideError(
            f"{text}: {value!r} of type {type(value).__name__} is no memory kind; give a string "
            "such as 'pinned_host' or 'device'."
        )
    if value is not None and mesh is not None:
        try:
            NamedSharding(mesh, PartitionSpec(), memory_kind=value)
        except ValueError as error:
            raise OverrideError(f"{text}: the mesh's devices have no such memory. {error}") from (
                error
            )
    return value
