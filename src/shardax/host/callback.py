# SPDX-License-Identifier: Apache-2.0
"""Calls of host functions from JAX programs.

A ``HostProgram`` is a host function with the static part of its arguments: on the host it rebuilds
the arguments with NumPy arrays, runs the function, and checks the result against the *promise*, a
pytree of ``jax.ShapeDtypeStruct``. Modules become *host copies*, whose Variables cannot be written.

Programs for the CPU hand over their own buffers, which are copied at once. ``jax.pure_callback``
would copy the arguments into JAX arrays first, by threads that the running program may itself
occupy: large arguments then wait for ever (with one core, or with ``shard_map`` over as many
devices as there are threads). Programs for other devices use it.

A program that fails raises ``jax.errors.JaxRuntimeError``, which has the text of what a host
function raised, and no more. The text carries a number, by which the exception itself is found
among the latest ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import re
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.buffer_callback import buffer_callback

from shardax._parallel.manual_axes import vary
from shardax.errors import ClosureError, TransformError
from shardax.extend import (
    FlatCall,
    Frame,
    Path,
    PyTree,
    format_path,
    is_eager,
    path_of_keys,
    require_addressable,
    varying_axes,
)
from shardax.host.errors import HostFunctionError

# --- promised results ---

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Kinds of numbers; each one can stand for those before it."""


def promise(
    name: str, out: PyTree, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
    """Leaves and structure of a host function's promise."""
    forms = out(*args, **kwargs) if is_rule(out) else out
    pairs, treedef = jax.tree_util.tree_flatten_with_path(forms, is_leaf=_has_form)
    return tuple(_form(name, path_of_keys(keys), leaf) for keys, leaf in pairs), treedef


def is_rule(out: object) -> bool:
    """Whether ``out`` is a shape rule and no promise by itself."""
    return callable(out) and not _has_form(out)


def _has_form(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _form(name: str, path: Path, leaf) -> jax.ShapeDtypeStruct:
    if not _has_form(leaf) or isinstance(leaf, type):
        raise HostFunctionError(
            f"out of the host function {name} promises {leaf!r}{_at(path)}, which has no shape and "
            f"dtype. Promise jax.ShapeDtypeStruct((), 'float32') for a number, "
            f"jax.ShapeDtypeStruct(x.shape, x.dtype) for an array like x."
        )
    try:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        _kind(dtype)
    except (TypeError, ValueError) as error:
        raise HostFunctionError(
            f"out of the host function {name} promises the dtype {leaf.dtype}{_at(path)}, which a "
            f"function on the host cannot return. Promise numbers: random keys as uint32 words "
            f"(jax.random.key_data), texts as integers."
        ) from error
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _kind(dtype: jax.typing.DTypeLike) -> int:
    for rank, kind in enumerate(_KINDS):
        if jnp.issubdtype(dtype, kind):
            return rank
    raise TypeError(f"{dtype} is no dtype of numbers")


def _at(path: Path) -> str:
    return f" at {format_path(path)} of the result" if path else ""


class Promised:
    """A promise to hold results against."""

    def __init__(
        self, name: str, forms: Sequence[jax.ShapeDtypeStruct], treedef: Any, fills: bool
    ) -> None:
        self.name = name
        self.tree = treedef.unflatten(list(forms))
        self.fills = fills

    def convert(self, returned: object, batch: tuple[int, ...]) -> list[np.ndarray]:
        """Convert the leaves of a result to the promised dtypes."""
        return [
            self._leaf(path, form, leaf, (*batch, *form.shape))
            for path, form, leaf in self._matched((), self.tree, returned)
        ]

    def _matched(
        self, path: Path, promised: object, returned: object
    ) -> Iterator[tuple[Path, jax.ShapeDtypeStruct, Any]]:
        if isinstance(promised, jax.ShapeDtypeStruct):
            yield path, promised, returned
            return

        below = _children(promised)
        if returned is None and self.fills:
            items: Sequence[Any] = [None] * len(below)
        elif isinstance(promised, dict) and isinstance(returned, Mapping):
            missing = not self.fills and promised.keys() - returned.keys()
            if missing or returned.keys() - promised.keys():
                keys = f"a dict with the keys {list(returned)}"
                raise self._mismatch(path, _shown(promised), keys)
            items = [returned.get(key[0]) for key, _ in below]
        elif isinstance(promised, (tuple, list)) and isinstance(returned, (tuple, list)):
            items = returned
        elif type(returned) is type(promised):
            items = [child for _, child in _children(returned)]
        else:
            raise self._mismatch(path, _shown(promised), f"a {type(returned).__name__}")

        if len(items) != len(below):
            raise self._mismatch(path, _shown(promised), f"{len(items)} values")
        for (step, child), value in zip(below, items, strict=True):
            yield from self._matched((*path, *step), child, value)

    def _leaf(self, path: Path, form, leaf, shape: tuple[int, ...]) -> np.ndarray:
        expected = f"{form.dtype}{list(shape)}"
        if leaf is None and self.fills:
            return np.zeros(shape, form.dtype)
        if isinstance(leaf, jax.Array):
            raise HostFunctionError(
                f"The host function {self.name} returned a JAX array{_at(path)}, so it computes "
                f"with JAX. It runs while a program does, and JAX may then wait for itself without "
                f"end. Compute with NumPy, or call the function in the program as it is."
            )

        try:
            array = np.asarray(leaf)
            kind = _kind(array.dtype)
        except Exception as error:  # any library may refuse in its own way
            raise self._mismatch(path, expected, f"a {type(leaf).__name__} ({error})") from error

        if array.shape != shape or kind > _kind(form.dtype):
            raise self._mismatch(path, expected, f"{array.dtype}{list(array.shape)}")

        with np.errstate(over="ignore"):
            fitted = array.astype(form.dtype, copy=False)
        if kind == _kind(np.integer) == _kind(form.dtype) and not np.array_equal(fitted, array):
            span = f"{array.dtype} numbers from {array.min()} to {array.max()}"
            raise self._mismatch(path, expected, span)
        return fitted

    def _mismatch(self, path: Path, promised: str, returned: str) -> HostFunctionError:
        return HostFunctionError(
            f"The host function {self.name} promises {promised}{_at(path)}, but returned "
            f"{returned}. Change what it returns, or what out=... promises."
        )


def _children(node: object) -> list[tuple[Path, Any]]:
    """Return (path, child) of each child of one container."""
    pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda leaf: leaf is not node)
    return [(path_of_keys(keys), child) for keys, child in pairs]


def _shown(promised) -> str:
    if isinstance(promised, dict):
        return f"a dict with the keys {list(promised)}"
    if promised is None:
        return "None"
    return f"a {type(promised).__name__} of {len(_children(promised))}"


# --- exceptions ---

_KEPT = 16
_NUMBER = re.compile(r"\[host exception (\d+)\]")
_numbers = itertools.count(1)
_latest: collections.OrderedDict[int, Exception] = collections.OrderedDict()
_lock = threading.Lock()


def wrapped(name: str, error: Exception) -> HostFunctionError:
    """Remember an exception, and make an error with its number."""
    with _lock:
        number = next(_numbers)
        _latest[number] = error
        while len(_latest) > _KEPT:
            _latest.popitem(last=False)

    trace_text = "".join(traceback.format_exception(error)).rstrip()
    return HostFunctionError(
        f"The host function {name} raised {type(error).__name__}: {error}\n\n{trace_text}\n\n"
        f"The exception itself is sx.host.host_exception(error); "
        f"`with sx.host.host_exceptions():` around the call raises it. [host exception {number}]"
    )


def host_exception(error: BaseException) -> Exception | None:
    """Returns the host function's exception behind a program's error.

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
    numbers = _NUMBER.findall(str(error))
    return _latest.get(int(numbers[-1])) if numbers else None


@contextlib.contextmanager
def host_exceptions() -> Generator[None]:
    """Raises the exceptions of host functions, instead of the program's error.

    Programs run on after they have been called; wait for the result inside,
    ``jax.block_until_ready(result)``, if it is not used there.

    Yields:
        None: the context has no value.

    Raises:
        Exception: What the host function raised, with its own type and traceback.

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


# --- host copies ---

LOCK = (
    "Cannot write {what} inside a host function: it works on a copy, and may run any number of "
    "times. Return the new value, and write it in the program: model.count[...] = f(model, x)."
)


class HostFrame(Frame):
    """A frame on the host, without capture of Variables."""

    __slots__ = ()

    def capture(self, outer: object) -> NoReturn:
        """See ``Frame.capture``."""
        raise ClosureError(
            f"The host function {self.name} uses a {type(outer).__name__} that it was not given. "
            f"It runs while a program does, when that Variable may have an old value or none. Pass "
            f"it, or the Module that holds it, as an argument."
        )


class _Thread(threading.local):
    is_on_host = False


_thread = _Thread()


@contextlib.contextmanager
def _on_host() -> Generator[None]:
    """Notes that a host function runs in this thread."""
    before = _thread.is_on_host
    _thread.is_on_host = True
    try:
        yield
    finally:
        _thread.is_on_host = before


def is_on_host() -> bool:
    """Whether a host function runs in this thread."""
    return _thread.is_on_host


# --- programs ---

VMAP_METHODS = {"sequential": "sequential", "vectorized": "expand_dims"}  # JAX's names


@dataclasses.dataclass(frozen=True)
class HostProgram:
    """A host function with the forms of its arguments and results."""

    name: str  # of the function, for messages
    call: FlatCall.Form
    forms: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves, without a batch
    vmap: str
    fills: bool  # whether None in the result stands for zeros
    out_forms: tuple[jax.ShapeDtypeStruct, ...] = ()
    out_tree: Any = None

    def run(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the function on the host."""
        pairs = list(zip(leaves, self.forms, strict=True))
        batch = np.broadcast_shapes(*(leaf.shape[: leaf.ndim - len(f.shape)] for leaf, f in pairs))
        arrays = [_arrived(leaf, (*batch, *form.shape), form.dtype) for leaf, form in pairs]

        with HostFrame(self.name) as frame, _on_host():
            function, args, kwargs = self.call.restore(arrays, frame, as_stored=LOCK)
            returned = function(*args, **kwargs)
        return Promised(self.name, self.out_forms, self.out_tree, self.fills).convert(
            returned, batch
        )

    def run_in_program(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the function, remembering an exception besides JAX's text of it."""
        try:
            return self.run(leaves)
        except Exception as error:
            raise wrapped(self.name, error) from error

    def stage(self, *leaves: object) -> list[Any]:
        """Add the call to the program under trace."""
        return jax.lax.platform_dependent(*leaves, cpu=self._by_buffers, default=self._by_callback)

    def _by_buffers(self, *leaves: object) -> list[Any]:
        def callback(context, outs: Sequence[PyTree], *buffers) -> None:
            results = self.run_in_program([np.asarray(buffer).copy() for buffer in buffers])
            for out, result in zip(outs, results, strict=True):
                np.asarray(out)[...] = result

        callback.__qualname__ = self.name
        method = VMAP_METHODS[self.vmap]
        return buffer_callback(callback, list(self.out_forms), vmap_method=method)(*leaves)

    def _by_callback(self, *leaves: object) -> list[Any]:
        def callback(*arrays) -> list[np.ndarray]:
            return self.run_in_program([np.array(array) for array in arrays])

        callback.__qualname__ = self.name
        method = VMAP_METHODS[self.vmap]
        return jax.pure_callback(callback, list(self.out_forms), *leaves, vmap_method=method)


def program_of(name: str, call: FlatCall, vmap: str, fills: bool) -> HostProgram:
    """Make the program of a call, without a promise."""
    pairs = zip(call.leaves, call.paths, strict=True)
    forms = tuple(_form_on_host(name, leaf, path) for leaf, path in pairs)
    return HostProgram(name, call.form, forms, vmap, fills)


def _dtype_of(leaf: Any) -> Any:
    """The dtype of an array or of a Python number."""
    return jnp.result_type(leaf) if getattr(leaf, "dtype", None) is None else leaf.dtype


def is_differentiable(leaf: Any) -> bool:
    """Whether the dtype of an array, or of its shape, has derivatives."""
    return jnp.issubdtype(_dtype_of(leaf), jnp.inexact)


def _form_on_host(name: str, leaf, path: Path) -> jax.ShapeDtypeStruct:
    dtype = _dtype_of(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(words.shape, words.dtype)
    if dtype == jax.dtypes.float0:
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TransformError(
            f"The host function {name} was given an array of dtype {dtype} at {format_path(path)}, "
            f"which JAX does not have. Encode it as integers; or pass it as a tuple, which is "
            f"handed on as it is: tuple(array.tolist())."
        )
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(dtype))


def staged(program: HostProgram) -> Callable[..., list[Any]]:
    """Make a function of ``program.stage``, traced once by JAX."""
    # The program is no argument of it, because JAX keeps static arguments alive for good.
    return jax.jit(lambda *leaves: program.stage(*leaves))


def call_on_host(
    program: HostProgram, in_program: Callable[..., list[Any]], leaves: Sequence[object]
) -> list[Any]:
    """Run a function at once, or in the traced program."""
    if not program.out_forms:
        return []

    shipped = [_shipped(leaf, form) for leaf, form in zip(leaves, program.forms, strict=True)]
    if is_eager() and not any(isinstance(leaf, Tracer) for leaf in leaves):
        return [jnp.array(result) for result in _run_now(program, shipped)]

    # The results differ over every mesh axis over which an argument does. JAX takes them for equal.
    axes = sorted(frozenset[str]().union(*map(varying_axes, shipped)))
    return [vary(result, axes) for result in in_program(*shipped)]


def _run_now(program: HostProgram, leaves: Sequence[object]) -> list[np.ndarray]:
    arrays = [
        np.array(
            require_addressable(leaf, f"the host function {program.name}"),
            None if form.dtype == jax.dtypes.float0 else form.dtype,
        )
        for leaf, form in zip(leaves, program.forms, strict=True)
    ]
    try:
        return program.run(arrays)
    except Exception as error:
        forms = ", ".join(f"{form.dtype}{list(form.shape)}" for form in program.forms)
        error.add_note(f"In the host function {program.name}, called with {forms or 'no arrays'}.")
        raise


def _shipped(leaf, form: jax.ShapeDtypeStruct):
    """Return a leaf in sendable form: random keys as their words."""
    if form.dtype == jax.dtypes.float0:
        return np.zeros(form.shape, bool)
    if jnp.issubdtype(_dtype_of(leaf), jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _arrived(array: np.ndarray, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Return a leaf as the function sees it."""
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)
    return array if array.shape == shape else np.broadcast_to(array, shape)
