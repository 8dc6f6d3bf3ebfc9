# SPDX-License-Identifier: Apache-2.0
"""Metadata of Variables: what is known about a value besides its numbers.

*Axes* are the logical names of an array's dimensions, one per dimension, ``None`` for an unnamed
one: ``("embed", "mlp")``. The remaining *entries* are whatever the user attached by keyword. Both
are static: they are part of a model's structure, so they must be hashable, and two models whose
metadata differ are compiled apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from shardax.core.errors import MetadataError
from shardax.core.static import exact_key

AxisName = Hashable
Axes = tuple[AxisName, ...]


class Metadata:
    """Immutable, hashable metadata; Variables share one object until one of them changes its own.

    Attributes:
        axes: Logical axis names, or None when none were given.
        entries: Read-only mapping of the other entries.
    """

    __slots__ = ("_hash", "_key", "axes", "entries")

    def __init__(self, axes: Axes | None, entries: Mapping[str, Any]) -> None:
        self.axes = axes
        self.entries = MappingProxyType(dict(entries))
        try:
            items = sorted(self.entries.items())
            self._key = (
                exact_key(axes),
                tuple((name, exact_key(item)) for name, item in items),
            )
        except TypeError as error:
            culprits = [name for name, item in self.entries.items() if not _is_hashable(item)]
            raise MetadataError(
                f"Metadata entries {culprits or 'axes'} are not hashable ({error}). Metadata is "
                f"part of a model's structure, by "
                f"which compiled programs are found. Use tuples instead of lists, frozen "
                f"dataclasses instead of dicts, and put "
                f"arrays into a Variable of their own."
            ) from error
        self._hash = hash(self._key)

    def replace(self, **changes: Any) -> Metadata:
        """Returns the metadata with entries (or ``axes``) changed."""
        axes = check_axes(changes.pop("axes")) if "axes" in changes else self.axes
        return self._with(axes, {**self.entries, **changes})

    def without_axis(self, position: int, expected: AxisName = None) -> Metadata:
        """Returns the metadata of one part of the array along a dimension: without its name.

        Args:
            position: Which dimension; negative counts from the end.
            expected: The name it should have, or None for any.

        Raises:
            MetadataError: If the dimension has another name than expected, or does not exist.
        """
        if self.axes is None:
            return self
        if not -len(self.axes) <= position < len(self.axes):
            raise MetadataError(f"axes {self.axes} have no dimension {position} to remove.")
        place = position % len(self.axes)
        if expected is not None and self.axes[place] not in (None, expected):
            raise MetadataError(
                f"the dimension {place} of axes {self.axes} is named {self.axes[place]!r}, but the "
                f"transform maps it as {expected!r}. Map the dimension of that name, or give the "
                f"transform the Variable's own name: "
                f"metadata={{sx.partition.PARTITION_NAME: {self.axes[place]!r}}}."
            )
        return self._with((*self.axes[:place], *self.axes[place + 1 :]), self.entries)

    def with_axis(self, position: int, name: AxisName = None) -> Metadata:
        """Returns the metadata of arrays put together along a new dimension: the inverse.

        Args:
            position: Where the new dimension stands; negative counts from the end of the new axes.
            name: Its name, or None.
        """
        if self.axes is None:
            return self
        rank = len(self.axes) + 1
        if not -rank <= position < rank:
            raise MetadataError(f"axes {self.axes} have no place {position} for another dimension.")
        place = position % rank
        return self._with((*self.axes[:place], name, *self.axes[place:]), self.entries)

    def _with(self, axes: Axes | None, entries: Mapping[str, Any]) -> Metadata:
        """Returns metadata of the same kind with other contents."""
        return Metadata(axes, entries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Metadata) and self._hash == other._hash and self._key == other._key

    def __repr__(self) -> str:
        parts = [] if self.axes is None else [f"axes={self.axes}"]
        return ", ".join(parts + [f"{name}={item!r}" for name, item in self.entries.items()])

    def __reduce__(self) -> Any:
        return (Metadata, (self.axes, dict(self.entries)))


def _is_hashable(item: Any) -> bool:
    try:
        exact_key(item)
    except TypeError:
        return False
    return True


def check_axes(axes: Iterable[AxisName] | None) -> Axes | None:
    """Returns ``axes`` as a tuple of hashable names, or None.

    Args:
        axes: Any iterable of names but a string.

    Raises:
        MetadataError: If ``axes`` is a string or holds something unhashable.
    """
    if axes is None:
        return None
    if isinstance(axes, str):
        raise MetadataError(
            f"axes={axes!r} is one string; give one name per dimension: axes=({axes!r},)."
        )
    names = tuple(axes)
    for position, name in enumerate(names):
        if not _is_hashable(name):
            raise MetadataError(
                f"axes[{position}] = {name!r} is not hashable; an axis name is a string or None."
            )
    return names


EMPTY = Metadata(None, {})

PARTITION_NAME = "partition_name"
"""Key, in the ``metadata`` option of ``vmap`` and ``scan``, of the mapped dimension's name."""
