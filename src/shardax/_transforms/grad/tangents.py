# SPDX-License-Identifier: Apache-2.0
"""Tangents of Variables: gradients and directions, checked against the values they belong to.

A tangent has the shapes and dtypes of its value. Integers and random keys have none. What was not
given is zero, and stands as None. A Variable that is reached by several paths has one tangent,
whichever of its paths was given it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardax._core.array_ops import (
    AnyArray,
    dtype_of,
    is_differentiable,
    is_weakly_typed,
    wider_dtype,
)
from shardax._core.graph.paths import Path, PyTree
from shardax._core.object import Object
from shardax._core.state.split_merge import state
from shardax._core.state.state import State
from shardax._transforms.grad import errors


def tangents_in(module: Object) -> State:
    """Returns the gradients or tangents that a Module holds; None stands for none."""
    every = state(module)
    present = {path: value for path, value in every.flat().items() if jax.tree.leaves(value)}
    return State.from_flat(present, every.origins())


class Tangents:
    """The tangents of the Variables of one call, by their index in its graph.

    Attributes:
        noun: What messages call a tangent: "tangent" or "gradient".
        values: The value of each Variable of the graph.
        strict: Whether a tangent of an integer is refused; otherwise it is left out.
    """

    def __init__(self, noun: str, values: Sequence[PyTree], strict: bool) -> None:
        self.noun = noun
        self.values = values
        self.strict = strict
        self._given: dict[int, tuple[Path, PyTree]] = {}  # as given, with the path it was given at
        self._fitted: dict[int, PyTree] = {}

    def put(self, index: int, tangent: PyTree | None, path: Path) -> None:
        """Takes the tangent of one Variable."""
        if tangent is None:
            return

        first_path, first_tangent = self._given.setdefault(index, (path, tangent))
        if first_tangent is not tangent:
            raise errors.two_tangents(self.noun, first_path, path)

        leaves, treedef = jax.tree.flatten(self.values[index])
        try:
            tangents = treedef.flatten_up_to(tangent)
        except (ValueError, TypeError) as error:
            raise errors.not_arranged_like_value(self.noun, path, error) from error

        fitted = [self.fit(*pair, path) for pair in zip(tangents, leaves, strict=True)]
        self._fitted[index] = treedef.unflatten(fitted)

    def of(self, index: int) -> PyTree:
        """Returns the tangent of a Variable, like its value; None for an array that has none."""
        if index in self._fitted:
            return self._fitted[index]
        return jax.tree.map(lambda _: None, self.values[index])

    def fit(self, tangent: ArrayLike | None, like: AnyArray, path: Path) -> ArrayLike | None:
        """Returns the tangent of one array in its dtype, or None; raises if it does not fit."""
        if tangent is None:
            return None
        if not (hasattr(tangent, "dtype") or isinstance(tangent, (bool, int, float, complex))):
            raise errors.not_an_array(self.noun, path, tangent)

        dtype = dtype_of(tangent)
        expected = dtype_of(like)
        if not is_differentiable(like):
            if self.strict and dtype != jax.dtypes.float0:
                raise errors.tangent_of_integer(self.noun, path, expected)
            return None

        shape = jnp.shape(tangent)
        fits = dtype == expected
        if is_weakly_typed(tangent):
            fits = wider_dtype(dtype, expected) == expected
        if shape != tuple(jnp.shape(like)) or not fits:
            raise errors.unlike_value(self.noun, path, dtype, shape, expected, jnp.shape(like))

        return tangent if dtype == expected else jnp.asarray(tangent, expected)
