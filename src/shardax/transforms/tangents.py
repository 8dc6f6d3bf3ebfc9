# SPDX-License-Identifier: Apache-2.0
"""Tangents: directions and gradients that a caller gives for Variables and arrays.

They must have the shapes of what they belong to, and its dtypes; integers and random keys have
none. What was not given is zero, and stands as None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.errors import InconsistentAliasingError, TangentError
from shardax.core.paths import Path, format_path


class Tangents:
    """Tangents on their way to the Variables they belong to.

    Args:
        noun: What they are, for messages.
        values: One value per Variable of the graph, or its shapes and dtypes.
        strict: Whether a tangent for integers is an error; else it is left out.

    Attributes:
        by_index: The tangent of each Variable that was given one, by its place in the graph; None
            where one of its arrays has none.
    """

    def __init__(self, noun: str, values: Sequence[Any], strict: bool) -> None:
        self.noun = noun
        self.values = values
        self.strict = strict
        self.by_index: dict[int, Any] = {}
        self._given: dict[int, tuple[Path, Any]] = {}

    def put(self, index: int, given: Any, path: Path) -> None:
        """Takes the tangent of one Variable.

        Raises:
            InconsistentAliasingError: If another was given by another path.
            TangentError: If it does not fit.
        """
        if given is None:
            return
        first, known = self._given.setdefault(index, (path, given))
        if known is not given:
            raise InconsistentAliasingError(
                f"One Variable was given two {self.noun}s, by two paths:\n  {format_path(first)}\n"
                f"  {format_path(path)}\nA shared Variable is one Variable and has one. Give their "
                f"sum at one of the paths."
            )
        leaves, treedef = jax.tree.flatten(self.values[index])
        try:
            parts = treedef.flatten_up_to(given)
        except (ValueError, TypeError) as error:
            raise TangentError(
                f"The {self.noun} for {format_path(path)} is not arranged like its value: {error}"
            ) from error
        fitted = [self.fit(part, leaf, path) for part, leaf in zip(parts, leaves, strict=True)]
        self.by_index[index] = treedef.unflatten(fitted)

    def fit(self, given: Any, like: Any, path: Path) -> Any:
        """Returns a tangent for one array, or None.

        Raises:
            TangentError: If shape or dtype do not fit.
        """
        if given is None:
            return None
        if not (hasattr(given, "dtype") or isinstance(given, (bool, int, float, complex))):
            raise TangentError(
                f"The {self.noun} for {format_path(path)} is of type {type(given).__name__}, but "
                f"must be an array like the value itself."
            )
        dtype = dtype_of(given)
        if not is_differentiable(like):
            if not self.strict or dtype == jax.dtypes.float0:
                return None
            raise TangentError(
                f"There is a {self.noun} for {format_path(path)}, which has dtype "
                f"{dtype_of(like)} and so no derivative. Leave it out, or give None."
            )
        shape, wanted = jnp.shape(given), dtype_of(like)
        weak = not hasattr(given, "dtype") or (
            isinstance(given, jax.Array) and jax.typeof(given).weak_type
        )
        fits = dtype == wanted or (weak and jnp.promote_types(dtype, wanted) == wanted)
        if shape == tuple(jnp.shape(like)) and fits:
            return given if dtype == wanted else jnp.asarray(given, wanted)
        raise TangentError(
            f"The {self.noun} for {format_path(path)} is {dtype}{list(shape)}, but must be "
            f"{wanted}{list(jnp.shape(like))}, like the value itself."
        )


def is_differentiable(leaf: Any) -> bool:
    """Whether an array, or its shape and dtype, is of numbers that have derivatives."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array, its shape, or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
