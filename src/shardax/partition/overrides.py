# SPDX-License-Identifier: Apache-2.0
"""Overrides: places that are said of some Variables apart from the rules.

An *override* is a pair of a filter (``shardax._core.state.filters``) and what holds for the Variables that
match it. That is either *more rules*, which come before the layout's own (so that moments of an
optimizer are split over a mesh axis that their parameters are not), or a *place*: a
``PartitionSpec`` over the layout's mesh, or a ``NamedSharding``. None leaves a Variable to the
rules. The first filter that matches decides; what none matches is left to the rules, too.

A *memory kind* is which memory of a device holds an array, such as ``"pinned_host"``. It can be
said for all arrays, or by filter as well.

A Variable that is reached by several paths is asked about by each of them, so an override for
``.head.kernel`` holds for the embedding that is tied to it. Two that disagree are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import format_path
from shardax._core.state.filters import first_match, to_predicates
from shardax._core.state.state import State
from shardax._transforms.lift.prefix import FilterMapping, StateSharding
from shardax.partition.errors import OverrideError, RulesError
from shardax.partition.findings import Finding
from shardax.partition.inventory import Subject, Survey
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules

OverridesLike = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A mapping or pairs of filter and place or rules; a ``StateSharding``; a ``State`` of places."""

MemoryKinds = str | Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A memory kind, or a mapping or pairs of filter and memory kind."""


class Choice(NamedTuple):
    """What was said of one slot apart from the layout's rules.

    Attributes:
        more_rules: Rules that come before the layout's, or None.
        place: A ``PartitionSpec`` or ``NamedSharding``, or None.
        memory_kind: Or None for the default.
        source: The override as text, for messages.
    """

    more_rules: Rules | None = None
    place: PartitionSpec | NamedSharding | None = None
    memory_kind: str | None = None
    source: str = ""


FREE = Choice()
"""Nothing was said."""


class _Entry(NamedTuple):
    """One pair, checked: the value, and its text for messages."""

    value: Any
    text: str


class _Table:
    """Pairs of filter and value, asked about slots.

    Args:
        option: The option's name, for messages.
        given: What the user gave.
        convert: Checks and converts one value.
    """

    def __init__(self, option: str, given: Any, convert: Callable[[Any, str], Any]) -> None:
        self.option = option
        pairs = _pairs(option, given)
        self.predicates = to_predicates([item for item, _ in pairs])
        self.entries = [
            _Entry(convert(value, f"{option}={{{_named(item)}: {value!r}}}"), _named(item))
            for item, value in pairs
        ]
        self.used: set[int] = set()

    def ask(self, subject: Subject) -> tuple[_Entry | None, Finding | None]:
        """Returns the entry for a slot, and an error if its paths have different ones."""
        found: dict[int, Any] = {}
        for path in subject.paths:
            position = first_match(self.predicates, path, subject.like)
            if position is not None:
                self.used.add(position)
                found.setdefault(position, path)
        chosen = {p: path for p, path in found.items() if self.entries[p].value is not None}
        values = [self.entries[position].value for position in chosen]
        if any(value != values[0] for value in values):
            return None, self._disagreement(chosen)
        position = next(iter(chosen), None)
        return (None if position is None else self.entries[position]), None

    def _disagreement(self, chosen: Mapping[int, Any]) -> Finding:
        parts = [
            f"{format_path(path)} has {self.entries[position].value!r} (by "
            f"{self.entries[position].text})"
            for position, path in chosen.items()
        ]
        path = next(iter(chosen.values()))
        text = (
            f"{format_path(path)}: one Variable, reached by several paths, has more than one place "
            f"by {self.option}: {'; '.join(parts)}. Give it one, by a filter that matches all of "
            "its paths and stands first."
        )
        return Finding("error", path, "override-conflict", text)

    def unused(self) -> Iterable[Finding]:
        """Warnings about filters that decided about nothing."""
        for position, entry in enumerate(self.entries):
            if position not in self.used and entry.value is not None:
                text = (
                    f"{self.option} for {entry.text} was used for no Variable: none matches, or "
                    "an earlier filter takes all that do."
                )
                yield Finding("warning", (), "unused-override", text)


def choices(
    survey: Survey,
    mesh: AnyMesh | None,
    overrides: OverridesLike | None,
    memory_kind: MemoryKinds | None,
) -> tuple[Sequence[Choice], list[Finding]]:
    """Says for every slot of a survey what holds apart from the rules.

    Args:
        survey: The survey.
        mesh: The mesh, whose devices say which memory kinds there are.
        overrides: See the module docstring.
        memory_kind: A memory kind for all arrays, or by filter; None for the devices' default.

    Returns:
        One choice per slot, and findings: one Variable with two places, an override never used.

    Raises:
        OverrideError: If an override is no pair of a filter and a place or rules, or the devices
            have no such memory.
        FilterError: If something is no filter.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from jax.sharding import PartitionSpec as P
        >>> survey = Survey({"w": sx.Param(jnp.ones(4)), "m": sx.OptState(jnp.ones(4))})
        >>> found, _ = choices(survey, None, {sx.OptState: P("data")}, None)
        >>> [(slot.path, choice.place) for slot, choice in zip(survey.slots, found)]
        [(('m',), P('data',)), (('w',), None)]
    """
    if overrides is None and memory_kind is None:
        return [FREE] * len(survey.slots), []
    places = _Table("overrides", () if overrides is None else overrides, _checked_place)
    kinds = _Table(
        "memory_kind",
        {...: memory_kind} if isinstance(memory_kind, str) or memory_kind is None else memory_kind,
        lambda kind, text: _checked_kind(kind, text, mesh),
    )
    found: list[Choice] = []
    findings: list[Finding] = []
    for subject in survey.subjects():
        entry, wrong = places.ask(subject)
        kind, twice = kinds.ask(subject)
        findings += [finding for finding in (wrong, twice) if finding is not None]
        found.append(_choice(entry, None if kind is None else kind.value))
    return found, [*findings, *places.unused(), *kinds.unused()]


def _choice(entry: _Entry | None, kind: str | None) -> Choice:
    value = None if entry is None else entry.value
    source = "" if entry is None else f"the override {value!r} for {entry.text}"
    if isinstance(value, Rules):
        return Choice(value, None, kind, source)
    return Choice(None, value, kind, source)


# --- what the user gave ---------------------------------------------------------------------------


_EXAMPLE = "overrides={sx.OptState: {'embed': 'data'}, sx.PathContains('bias'): PartitionSpec()}"


def _pairs(option: str, given: Any) -> list[tuple[Any, Any]]:
    if isinstance(given, State):
        given = StateSharding(given)
    if isinstance(given, FilterMapping):
        return list(zip(given, given.values(), strict=True))
    if isinstance(given, Mapping):
        return list(given.items())
    pairs = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    well_formed = all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs)
    if isinstance(given, str) or not isinstance(given, Iterable) or not well_formed:
        raise OverrideError(
            f"{option}={given!r} of type {type(given).__name__} is no mapping from filters and no "
            f"list of pairs. Write for instance {_EXAMPLE}."
        )
    return [(item, value) for item, value in pairs]


def _checked_place(value: Any, text: str) -> Any:
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


def _checked_kind(value: Any, text: str, mesh: AnyMesh | None) -> Any:
    if value is None:
        return None
    if not isinstance(value, str):
        raise OverrideError(
            f"{text}: {value!r} of type {type(value).__name__} is no memory kind; give a string "
            "such as 'pinned_host' or 'device'."
        )
    if mesh is not None:
        try:
            NamedSharding(mesh, PartitionSpec(), memory_kind=value)
        except ValueError as error:
            raise OverrideError(f"{text}: the mesh's devices have no such memory. {error}") from (
                error
            )
    return value


def _named(item: Any) -> str:
    if item is ...:
        return "..."
    return item.__name__ if isinstance(item, type) else repr(item)
