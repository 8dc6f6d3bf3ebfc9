# SPDX-License-Identifier: Apache-2.0
"""Exceptions of host functions, on their way out of a program.

A program that fails raises ``jax.errors.JaxRuntimeError``: JAX knows the text of what a host
function raised, and no more. The text carries a number here, by which the exception itself is found
again. Some of the latest exceptions are kept for that.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import threading
import traceback
from collections.abc import Iterator

import jax

from shardax.core.errors import HostFunctionError

_KEPT = 16
_NUMBER = re.compile(r"\[host exception (\d+)\]")
_numbers = itertools.count(1)
_latest: collections.OrderedDict[int, Exception] = collections.OrderedDict()
_lock = threading.Lock()


def wrapped(name: str, error: Exception) -> HostFunctionError:
    """Keeps an exception and returns the error that tells of it in the program's.

    Args:
        name: The host function's name.
        error: What it raised.
    """
    with _lock:
        number = next(_numbers)
        _latest[number] = error
        while len(_latest) > _KEPT:
            _latest.popitem(last=False)
    told = "".join(traceback.format_exception(error)).rstrip()
    return HostFunctionError(
        f"The host function {name} raised {type(error).__name__}: {error}\n\n{told}\n\n"
        f"The exception itself is sx.host.host_exception(error); "
        f"`with sx.host.host_exceptions():` around the call raises it. [host exception {number}]"
    )


def host_exception(error: BaseException) -> Exception | None:
    """Returns the exception of a host function that made a program fail.

    Args:
        error: What the program raised, usually a ``jax.errors.JaxRuntimeError``.

    Returns:
        The exception, with its own type and traceback; None if no host function raised, or if many
        have since.

    Example:
        >>> import jax, numpy as np, shardax as sx
        >>> solve = sx.host.host_function(np.linalg.inv, out=lambda a: a)
        >>> try:
        ...     _ = jax.jit(solve)(np.zeros((2, 2), "float32")).block_until_ready()
        ... except jax.errors.JaxRuntimeError as error:
        ...     print(repr(sx.host.host_exception(error)))
        LinAlgError('Singular matrix')
    """
    found = _NUMBER.findall(str(error))
    return _latest.get(int(found[-1])) if found else None


@contextlib.contextmanager
def host_exceptions() -> Iterator[None]:
    """Raises what a host function raised, instead of the error of the program around it.

    Programs run on after they have been called; wait for the result inside,
    ``jax.block_until_ready(result)``, if it is not used there.

    Example:
        >>> import jax, numpy as np, shardax as sx
        >>> solve = jax.jit(sx.host.host_function(np.linalg.inv, out=lambda a: a))
        >>> with sx.host.host_exceptions():
        ...     solve(np.zeros((2, 2), "float32")).block_until_ready()
        Traceback (most recent call last):
            ...
        numpy.linalg.LinAlgError: Singular matrix
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, HostFunctionError) as error:
        original = host_exception(error)
        if original is None:
            raise
        raise original from None
