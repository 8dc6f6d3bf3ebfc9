# SPDX-License-Identifier: Apache-2.0
"""Calls as plain bytes, for executors of other libraries.

Any process that has shardax can run one, and keeps the functions that it has run, as a worker does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardax.host.workers.encoding import decode, encode, encode_arguments
from shardax.host.workers.functions import FunctionForm, FunctionTable, describe

_FUNCTIONS = FunctionTable(128)


def pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, ...]:
    """Returns a call as bytes, for ``run_packed``.

    Raises:
        WorkerPickleError: If something cannot be pickled.
    """
    form = describe(function)
    head = pickle.dumps((form.name, form.key, form.modules, len(form.parts)))
    return (head, *map(bytes, (*form.parts, *encode_arguments(args, kwargs))))


def run_packed(head: bytes, *parts: bytes) -> tuple[bytes, ...]:
    """Runs a packed call, and returns its result packed. Runs code of whoever packed it."""
    name, key, modules, count = pickle.loads(head)
    form = FunctionForm(name, key, modules, list(parts[:count]))
    result = _FUNCTIONS.run(form, lambda: decode(parts[count:]))
    return tuple(map(bytes, encode(result)))


def unpack(result: Sequence[bytes]) -> Any:
    """Returns the result of a packed call."""
    return decode(result)
