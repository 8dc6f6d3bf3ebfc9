# SPDX-License-Identifier: Apache-2.0
"""The pure function that JAX differentiates, for ``grad``, ``vjp``, ``jvp`` and the Jacobians.

It takes the differentiated inputs of a call (``DiffInputs``) and returns two parts: what is
differentiated, and what leaves beside it, without a derivative: the auxiliary result, and the
values that the user's function wrote into Variables. JAX calls the latter ``aux``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import PyTree, plain_path
from shardax._core.object import Object
from shardax._transforms.grad import errors
from shardax._transforms.grad.differentiated import DiffInputs
from shardax._transforms.lift.binding import returned_pair
from shardax._transforms.lift.engine import SingleRunCall

# Splits the result of the user's function into (what is differentiated, auxiliary result).
Split = Callable[[PyTree], tuple[PyTree, PyTree]]


def pure_function(
    call: SingleRunCall, inputs: DiffInputs, values: Sequence[PyTree], split: Split
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a pure function of the differentiated inputs of a call.

    Args:
        call: The call; everything else is constant.
        inputs: Its differentiated inputs.
        values: The present values of all its Variables.
        split: Splits the result of the user's function.
    """
    arguments = call.arguments

    def pure(
        of_variables: Sequence[PyTree], of_arguments: Sequence[PyTree]
    ) -> tuple[PyTree, PyTree]:
        pair = of_variables, of_arguments
        all_values, all_plain = inputs.insert(pair, values, arguments.plain)
        return call.run_once(all_values, all_plain, arguments.plain_named, split)

    return pure


def separate_aux(result: PyTree, has_aux: bool, name: str) -> tuple[PyTree, PyTree]:
    """Returns (what is differentiated, auxiliary result) of what a function returned."""
    if not has_aux:
        return result, None
    source = f"With has_aux=True the function given to sx.{name}"
    return returned_pair(result, source, "(result, aux)")


def separate_arrays(result: PyTree, has_aux: bool, name: str) -> tuple[PyTree, PyTree]:
    """Returns (arrays, auxiliary result); raises if an object is among the arrays."""
    arrays, aux = separate_aux(result, has_aux, name)
    refuse_objects(arrays, name)
    return arrays, aux


def refuse_objects(result: PyTree, name: str) -> None:
    """Raises if a result that is differentiated holds objects."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_object):
        if isinstance(leaf, Object):
            raise errors.object_in_result(name, leaf, plain_path(keys))
