# SPDX-License-Identifier: Apache-2.0
"""Which names are being mapped over here.

Inside a function lifted by ``nmap`` every argument has lost its names. A named array that still has
one of them did not come in as an argument: it was captured by a closure, whole, and combining it
with the slices that the function works on would give every slice all of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from shardax.core.errors import ClosureError
from shardax.named.names import Dims, Name


class _Local(threading.local):
    names: frozenset[Name] = frozenset()
    """The names that the functions around this code are mapped over, in this thread."""


local = _Local()


@contextlib.contextmanager
def mapping(names: Iterable[Name]) -> Iterator[None]:
    """Marks names as mapped while the body runs.

    Example:
        >>> with mapping(["batch"]):
        ...     print(sorted(local.names))
        ['batch']
    """
    before = local.names
    local.names = before | frozenset(names)
    try:
        yield
    finally:
        local.names = before


def refuse_mapped(dims: Dims) -> None:
    """Raises if an array with these dims has a name that is mapped here.

    Raises:
        ClosureError: If it has.
    """
    clashing = [name for name in dims if name is not None and name in local.names]
    if clashing:
        raise ClosureError(
            f"A NamedArray with dims {dims} is used inside a function that nmap runs along "
            f"{', '.join(map(repr, clashing))}, where each run sees one slice. It was captured by "
            f"closure, so it is still whole. Pass it as an argument, nmap(f)(x, captured), and "
            f"nmap takes its slices too; or, if each run shall see all of it, unwrap it: "
            f"captured.unwrap(...)."
        )
