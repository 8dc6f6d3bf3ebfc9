# SPDX-License-Identifier: Apache-2.0
"""What a host function promises and what it returns.

A program has to know shapes and dtypes before it runs, so a host function makes a *promise*: a
pytree of ``jax.ShapeDtypeStruct``, given as it is or by a *shape rule*, a function of the shapes
and dtypes of the arguments. What the function then returns is checked against it, leaf by leaf.

Libraries for the host compute in 64 bits. A promise is taken in the dtypes that JAX has at the time
(``float64`` is ``float32`` without ``jax_enable_x64``), and a result is converted to the promised
dtype if that is of the same kind: floats may round, integers must fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import HostResultError, HostSpecError
from shardax.core.paths import Path, format_path, path_step

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Kinds of numbers; each one can stand for those before it."""


def promise(
    name: str, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
    """Returns what a host function promises for arguments of some shapes and dtypes.

    Args:
        name: The function's name, for messages.
        out: A pytree of whatever has a shape and a dtype, or a shape rule.
        args: The positional arguments, with ``jax.ShapeDtypeStruct`` for arrays.
        kwargs: The keyword arguments, likewise.

    Returns:
        (leaves, treedef).

    Raises:
        HostSpecError: If a leaf has no shape or a dtype that JAX does not have; names it.
    """
    found = out(*args, **kwargs) if is_rule(out) else out
    pairs, treedef = jax.tree_util.tree_flatten_with_path(found, is_leaf=_has_form)
    return tuple(_form(name, _path(keys), leaf) for keys, leaf in pairs), treedef


def is_rule(out: Any) -> bool:
    """Whether ``out`` is a shape rule and no promise by itself."""
    return callable(out) and not _has_form(out)


def _has_form(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _form(name: str, path: Path, leaf: Any) -> jax.ShapeDtypeStruct:
    if not _has_form(leaf) or isinstance(leaf, type):
        raise HostSpecError(
            f"out of the host function {name} promises {leaf!r}{_at(path)}, which has no shape and "
            f"dtype. Promise jax.ShapeDtypeStruct((), 'float32') for a number, "
            f"jax.ShapeDtypeStruct(x.shape, x.dtype) for an array like x."
        )
    try:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        _kind(dtype)
    except (TypeError, ValueError) as error:
        raise HostSpecError(
            f"out of the host function {name} promises the dtype {leaf.dtype}{_at(path)}, which a "
            f"function on the host cannot return. Promise numbers: random keys as uint32 words "
            f"(jax.random.key_data), texts as integers."
        ) from error
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _kind(dtype: Any) -> int:
    for rank, kind in enumerate(_KINDS):
        if jnp.issubdtype(dtype, kind):
            return rank
    raise TypeError(f"{dtype} is no dtype of numbers")


def _at(path: Path) -> str:
    return f" at {format_path(path)} of the result" if path else ""


def _path(keys: Sequence[Any]) -> Path:
    return tuple(path_step(key) for key in keys)


# --- what is returned -----------------------------------------------------------------------------


class Promised:
    """A promise to hold results against.

    Args:
        name: The function's name.
        forms: The promised leaves.
        treedef: Their structure.
        fills: Whether None, and what is left out of a dict, stands for zeros.
    """

    def __init__(
        self, name: str, forms: Sequence[jax.ShapeDtypeStruct], treedef: Any, fills: bool
    ) -> None:
        self.name = name
        self.tree = treedef.unflatten(list(forms))
        self.fills = fills

    def check(self, returned: Any, batch: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the leaves of a result as NumPy arrays of the promised dtypes.

        Args:
            returned: What the function returned.
            batch: Leading dimensions that each leaf has beyond its promise.

        Raises:
            HostResultError: If a leaf is missing, too many, or of another shape or kind.
        """
        return [
            self._leaf(path, form, given, (*batch, *form.shape))
            for path, form, given in self._matched((), self.tree, returned)
        ]

    def _matched(
        self, path: Path, promised: Any, given: Any
    ) -> Iterator[tuple[Path, jax.ShapeDtypeStruct, Any]]:
        if isinstance(promised, jax.ShapeDtypeStruct):
            yield path, promised, given
            return
        below = _children(promised)
        if given is None and self.fills:
            items: Sequence[Any] = [None] * len(below)
        elif isinstance(promised, dict) and isinstance(given, Mapping):
            self._check_keys(path, promised, given)
            items = [given.get(key[0]) for key, _ in below]
        elif isinstance(promised, (tuple, list)) and isinstance(given, (tuple, list)):
            items = given
        elif type(given) is type(promised):
            items = [item for _, item in _children(given)]
        else:
            self._refuse(path, _shown(promised), f"a {type(given).__name__}")
        if len(items) != len(below):
            self._refuse(path, _shown(promised), f"{len(items)} values")
        for (step, item), value in zip(below, items, strict=True):
            yield from self._matched((*path, *step), item, value)

    def _check_keys(
        self, path: Path, promised: Mapping[Any, Any], given: Mapping[Any, Any]
    ) -> None:
        missing = [] if self.fills else [key for key in promised if key not in given]
        if missing or any(key not in promised for key in given):
            self._refuse(path, _shown(promised), f"a dict with the keys {list(given)}")

    def _leaf(self, path: Path, form: Any, given: Any, shape: tuple[int, ...]) -> np.ndarray:
        wanted = f"{form.dtype}{list(shape)}"
        if given is None and self.fills:
            return np.zeros(shape, form.dtype)
        if isinstance(given, jax.Array):
            raise HostResultError(
                f"The host function {self.name} returned a JAX array{_at(path)}, so it computes "
                f"with JAX. It runs while a program does, and JAX may then wait for itself without "
                f"end. Compute with NumPy, or call the function in the program as it is."
            )
        try:
            array = np.asarray(given)
            kind = _kind(array.dtype)
        except Exception as error:  # any library may refuse in its own way
            raise self._mismatch(path, wanted, f"a {type(given).__name__} ({error})") from error
        if array.shape != shape or kind > _kind(form.dtype):
            self._refuse(path, wanted, f"{array.dtype}{list(array.shape)}")
        with np.errstate(over="ignore"):
            fitted = array.astype(form.dtype, copy=False)
        if kind == _kind(np.integer) == _kind(form.dtype) and not np.array_equal(fitted, array):
            span = f"{array.dtype} numbers from {array.min()} to {array.max()}"
            self._refuse(path, wanted, span)
        return fitted

    def _refuse(self, path: Path, promised: str, given: str) -> NoReturn:
        raise self._mismatch(path, promised, given)

    def _mismatch(self, path: Path, promised: str, given: str) -> HostResultError:
        return HostResultError(
            f"The host function {self.name} promises {promised}{_at(path)}, but returned {given}. "
            f"Change what it returns, or what out=... promises."
        )


def _children(node: Any) -> list[tuple[Path, Any]]:
    """Returns (path, child) of each child of one container."""
    pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda item: item is not node)
    return [(_path(keys), child) for keys, child in pairs]


def _shown(promised: Any) -> str:
    if isinstance(promised, dict):
        return f"a dict with the keys {list(promised)}"
    if promised is None:
        return "None"
    return f"a {type(promised).__name__} of {len(_children(promised))}"
