# SPDX-License-Identifier: Apache-2.0
"""Checks of what control flow is given: what *decides* how it goes, and what it works on.

A predicate, an index or a bound decides. It is one number: a Python number, an array of shape (),
or a Variable that holds one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import ArgumentError, DecisionError
from shardax.core.paths import format_path
from shardax.core.pytree import is_object
from shardax.core.variables import Variable
from shardax.transforms.call import Call
from shardax.transforms.lift import Mixed
from shardax.transforms.naming import leaf_paths, plain_paths

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def as_predicate(value: Any, what: str) -> Any:
    """Returns a predicate as a boolean of shape ().

    Args:
        value: What was given; a number counts as true unless it is zero, as in Python.
        what: How messages call it.

    Raises:
        DecisionError: If it is not one boolean or real number.
    """
    number = _one_number(value, what, "one boolean", "Reduce it: x.all(), x.any(), x[0] > 0.")
    kind = jnp.result_type(number)
    if kind == jnp.bool_:
        return number
    if jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating):
        return number != 0
    raise DecisionError(f"{what} must be one boolean, but has dtype {kind}. Compare it: x != y.")


def as_integer(value: Any, what: str) -> Any:
    """Returns an index or bound, an integer of shape ().

    Args:
        value: What was given.
        what: How messages call it.

    Raises:
        DecisionError: If it is not one integer.
    """
    number = _one_number(value, what, "one integer", "Take one of them: x[0].")
    kind = jnp.result_type(number)
    if jnp.issubdtype(kind, jnp.integer):
        return number
    hint = "jnp.int32(x)" if kind == jnp.bool_ else "x.astype(int)"
    raise DecisionError(f"{what} must be one integer, but has dtype {kind}. Convert it: {hint}.")


def _one_number(value: Any, what: str, wanted: str, hint: str) -> Any:
    number = value.value if isinstance(value, Variable) else value
    if not isinstance(number, _NUMBERS):
        raise DecisionError(f"{what} must be {wanted}, but is a {type(value).__name__}.")
    if jnp.shape(number) != ():
        raise DecisionError(f"{what} must be {wanted}, but has shape {jnp.shape(number)}. {hint}")
    return number


def check_operands(
    call: Call, advice: str = "give it to the functions by functools.partial or a closure"
) -> None:
    """Raises if an argument is neither arrays nor objects.

    Args:
        call: The call.
        advice: What to do if it is configuration, for the message.

    Raises:
        ArgumentError: Naming it.
    """
    arguments = call.arguments
    positional = zip(call.labels, arguments.templates, arguments.plain, strict=True)
    named = ((name, template, arguments.plain_named[name]) for name, template in arguments.named)
    for label, template, plain in (*positional, *named):
        leaves, treedef = jax.tree.flatten(plain)
        paths = plain_paths(template) if isinstance(template, Mixed) else leaf_paths(treedef)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, _NUMBERS) or hasattr(leaf, "dtype") or is_object(leaf):
                continue
            raise ArgumentError(
                f"{format_path((label, *path))} of sx.{call.name} is a {type(leaf).__name__}, "
                f"which is neither an array or number nor a Module, Variable or pytree of these. "
                f"If it is configuration, {advice}."
            )
