# SPDX-License-Identifier: Apache-2.0
"""Filters of Variables.

A *filter* is one of: a Variable type (matches by ``isinstance``); a string (matches a metadata
``tag``); ``...`` or ``True`` (everything); ``None`` or ``False`` (nothing); a callable ``(path,
variable) -> bool``; a list or tuple of filters (any of them); or a combination made of ``All``,
``Any``, ``Not``, ``PathContains``. Where several are given, the first that matches decides. A
*predicate* is a filter turned into a callable ``(path, variable) -> bool``.
"""

from __future__ import annotations

import builtins
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardax._core.errors import FilterError
from shardax._core.graph.paths import Path, format_path
from shardax._core.object import Placeholder
from shardax._core.state.frozen import FrozenMetadata, Origin
from shardax._core.variable import Variable

Predicate = Callable[[Path, typing.Any], bool]
Filter = typing.Any


@dataclass(frozen=True)
class OfType:
    """Matches Variables of a type or its subclasses."""

    type: builtins.type

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        if _is_origin(variable):
            return issubclass(variable.variable_type, self.type)
        return isinstance(variable, self.type)


def _is_origin(variable: typing.Any) -> bool:
    """Whether a filter is asked about what stands for a Variable: an Origin, or a slot."""
    return not isinstance(variable, Variable) and hasattr(variable, "variable_type")


@dataclass(frozen=True)
class WithTag:
    """Matches Variables whose metadata has ``tag=name`` or ``name`` among ``tags=(...)``."""

    tag: str

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        if isinstance(variable, Placeholder):  # it has no metadata, and says so by an error
            return False
        metadata = getattr(variable, "metadata", None)
        if not isinstance(metadata, Mapping):  # a Module, say: selections ask about everything
            return False

        tags = metadata.get("tags", ())
        if isinstance(tags, str):
            tags = (tags,)
        return self.tag == metadata.get("tag") or self.tag in tags


@dataclass(frozen=True)
class Everything:
    """Matches every Variable (``...`` or ``True``)."""

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return True


@dataclass(frozen=True)
class Nothing:
    """Matches no Variable (``None`` or ``False``)."""

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return False


@dataclass(frozen=True)
class PathContains:
    """Matches Variables whose path has ``key`` as one of its steps.

    Args:
        key: An attribute name, list position or dict key.
        exact: If False, a string step that merely contains ``key`` as a substring matches too.

    Example:
        >>> import shardax as sx
        >>> sx.PathContains("attn")(("layers", 0, "attn", "kernel"), None)
        True
    """

    key: typing.Any
    exact: bool = True

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        if self.exact:
            return any(type(step) is type(self.key) and step == self.key for step in path)
        return any(str(self.key) in str(step) for step in path)


class _Combination:
    """Filters as predicates, hashable as configuration."""

    def __init__(self, *filters: Filter) -> None:
        self.predicates = tuple(to_predicate(item) for item in filters)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Combination)
            and type(self) is type(other)
            and self.predicates == other.predicates
        )

    def __hash__(self) -> int:
        return hash((type(self), self.predicates))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"


class All(_Combination):
    """Matches Variables that every one of the filters matches.

    Example:
        >>> import shardax as sx
        >>> f = sx.All(sx.Param, sx.PathContains("attn"))
        >>> f == sx.All(sx.Param, sx.PathContains("attn"))
        True
    """

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return all(predicate(path, variable) for predicate in self.predicates)


class Any(_Combination):
    """Matches Variables that at least one of the filters matches.

    Example:
        >>> import shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> [p for p, _ in sx.iter_variables(layer, sx.Any(sx.BatchStat, sx.PathContains("bias")))]
        [('bias',)]
    """

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return any(predicate(path, variable) for predicate in self.predicates)


class Not(_Combination):
    """Matches Variables that the filter does not match.

    Example:
        >>> import shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> [path for path, _ in sx.iter_variables(layer, sx.Not(sx.PathContains("bias")))]
        [('kernel',)]
    """

    def __init__(self, negated: Filter) -> None:
        super().__init__(negated)

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return not self.predicates[0](path, variable)


class Frozen:
    """Filter of the frozen values of what a filter matches.

    Args:
        filter: A filter of Variables; by default all.

    Example:
        >>> import shardax as sx
        >>> layer = sx.freeze(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), sx.PathContains("bias"))
        >>> [path for path, _ in sx.iter_variables(layer, sx.Frozen(sx.Param))]
        [('bias',)]
        >>> [path for path, _ in sx.iter_variables(layer, sx.Param)]
        [('kernel',)]
    """

    def __init__(self, filter: Filter = ...) -> None:
        self.predicate = to_predicate(filter)

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        metadata = variable.all_metadata if isinstance(variable, Origin) else variable._metadata
        if not isinstance(metadata, FrozenMetadata):
            return False
        return self.predicate(path, metadata.origin())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.predicate == other.predicate

    def __hash__(self) -> int:
        return hash((Frozen, self.predicate))

    def __repr__(self) -> str:
        return f"Frozen({self.predicate!r})"


def to_predicate(item: Filter) -> Predicate:
    """Turns a filter into a predicate."""
    if item is ... or item is True:
        return Everything()
    if item is None or item is False:
        return Nothing()
    if isinstance(item, str):
        return WithTag(item)
    if isinstance(item, type):
        return OfType(item)
    if isinstance(item, (list, tuple)):
        return Any(*item)
    if callable(item):
        return typing.cast(Predicate, item)

    raise FilterError(
        f"{item!r} of type {type(item).__name__} is not a filter. Use a Variable type (sx.Param), "
        f"a tag string, ..., None, a "
        f"callable (path, variable) -> bool, or sx.All / sx.Any / sx.Not / sx.PathContains."
    )


def to_predicates(filters: Sequence[Filter]) -> list[Predicate]:
    """Turns filters into predicates, checking that a filter for everything comes last."""
    predicates = [to_predicate(item) for item in filters]
    for position, predicate in enumerate(predicates):
        if not isinstance(predicate, Everything):
            continue
        later = predicates[position + 1 :]
        if not all(isinstance(other, (Everything, Nothing)) for other in later):
            raise FilterError(
                f"Filter {position + 1} of {len(filters)} is `...`, which matches everything, so "
                f"{filters[position + 1]!r} after it could never match. Put `...` last."
            )
    return predicates


def first_match(predicates: Sequence[Predicate], path: Path, variable: typing.Any) -> int | None:
    """Returns the position of the first predicate that matches, or None."""
    for position, predicate in enumerate(predicates):
        if predicate(path, variable):
            return position
    return None


def group_by_filter(
    filters: Sequence[Filter], pairs: Iterable[tuple[Path, typing.Any]], complete: bool = False
) -> list[list[int]]:
    """Returns for each filter the positions of what it matches first.

    Every split of a model or a State into groups is this one.

    Args:
        filters: The filters.
        pairs: (path, Variable) of each entry.
        complete: Whether what no filter matches is refused; otherwise it is left out.

    Raises:
        FilterError: If a filter could never match, or if an entry matches none.
    """
    predicates = to_predicates(filters)
    groups: list[list[int]] = [[] for _ in predicates]
    for position, (path, variable) in enumerate(pairs):
        group = first_match(predicates, path, variable)
        if group is not None:
            groups[group].append(position)
        elif complete:
            raise no_match_error(path, variable, filters)
    return groups


def matching(filters: Sequence[Filter], pairs: Iterable[tuple[Path, typing.Any]]) -> list[int]:
    """Returns the positions of what any of the filters matches."""
    return sorted(itertools.chain(*group_by_filter(filters, pairs)))


def no_match_error(path: Path, variable: typing.Any, filters: Sequence[Filter]) -> FilterError:
    """Makes the error for a Variable that no filter matches."""
    kind = variable.variable_type if _is_origin(variable) else type(variable)
    shown = ", ".join(item.__name__ if isinstance(item, type) else repr(item) for item in filters)
    return FilterError(
        f"No filter matches the {kind.__name__} at {format_path(path)}; the filters are ({shown}). "
        f"Add `...` as the last filter to take what remains."
    )
