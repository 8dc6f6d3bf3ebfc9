# SPDX-License-Identifier: Apache-2.0
"""Texts of the errors about derivatives, each built by a function that is named after the mistake.

All are ``TransformError``. The functions are in the order of the files that raise them: what is
differentiated, tangents, results, ``jvp``, ``safe_where``, and the rules of ``custom_vjp`` and
``custom_jvp``. A *noun* is what the user gave or gets: "tangent", "gradient".
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._transforms.errors import TransformError

# --- what is differentiated ---


def argnum_out_of_range(argnum: int, count: int) -> TransformError:
    """Returns the error of an argument that the call does not have."""
    return TransformError(
        f"argnums={argnum} is out of range: the call has {count} positional arguments. What can "
        f"only be given by name is not differentiated."
    )


def not_an_argnum(item: object) -> TransformError:
    """Returns the error of an entry of ``argnums`` that names no argument."""
    return TransformError(
        f"argnums has {item!r} of type {type(item).__name__}, but holds positions of arguments or "
        f"DiffStates: argnums=0, argnums=(0, sx.DiffState(1, sx.Param)). To choose Variables of a "
        f"Module, use wrt=..."
    )


def argument_named_twice(argnums: Sequence[int]) -> TransformError:
    """Returns the error of an argument that ``argnums`` names twice."""
    return TransformError(
        f"argnums names an argument twice: {[*argnums]}. Join the filters instead: "
        f"sx.DiffState({argnums[0]}, (filter, other_filter))."
    )


def nothing_to_differentiate(
    label: str, type_name: str, filter_item: object, argnum: int, plain_arrays: str
) -> TransformError:
    """Returns the error of an argument without a Variable that its filter matches."""
    filter_name = getattr(filter_item, "__name__", repr(filter_item))
    return TransformError(
        f"The argument {label!r} ({type_name}) has no Variable that the filter {filter_name} "
        f"matches, so there is nothing to differentiate.{plain_arrays} Choose others: "
        f"`wrt=filter`, or `argnums=sx.DiffState({argnum}, filter)`."
    )


def dtype_without_gradient(kind: str, path: Path, dtype: np.dtype, remedy: str) -> TransformError:
    """Returns the error of a chosen array whose numbers have no gradient."""
    return TransformError(
        f"The {kind} at {format_path(path)} has dtype {dtype}, which has no gradient. {remedy}, or "
        f"pass allow_int=True."
    )


def filters_and_diff_states(wrt: object) -> TransformError:
    """Returns the error of a ``wrt`` that holds both filters and DiffStates."""
    return TransformError(
        f"wrt={wrt!r} mixes filters and DiffStates. Give one filter for all arguments, or only "
        f"DiffStates."
    )


# --- tangents ---


def two_tangents(noun: str, first: Path, second: Path) -> TransformError:
    """Returns the error of a shared Variable with a tangent at two of its paths."""
    return TransformError(
        f"One Variable was given two {noun}s, by two paths:\n  {format_path(first)}\n"
        f"  {format_path(second)}\nA shared Variable is one Variable and has one. Give their sum "
        f"at one of the paths."
    )


def not_arranged_like_value(noun: str, path: Path, error: Exception) -> TransformError:
    """Returns the error of a tangent with another structure than the value of its Variable."""
    return TransformError(
        f"The {noun} for {format_path(path)} is not arranged like its value: {error}"
    )


def not_arranged_like_argument(noun: str, label: str, error: Exception) -> TransformError:
    """Returns the error of a tangent with another structure than its argument."""
    return TransformError(f"The {noun} for the argument {label!r} is not arranged like it: {error}")


def not_an_array(noun: str, path: Path, tangent: object) -> TransformError:
    """Returns the error of a tangent that is no array."""
    return TransformError(
        f"The {noun} for {format_path(path)} is of type {type(tangent).__name__}, but must be an "
        f"array like the value itself."
    )


def tangent_of_integer(noun: str, path: Path, dtype: np.dtype) -> TransformError:
    """Returns the error of a tangent for an array whose dtype has no derivative."""
    return TransformError(
        f"There is a {noun} for {format_path(path)}, which has dtype {dtype} and so no derivative. "
        f"Leave it out, or give None."
    )


def unlike_value(
    noun: str,
    path: Path,
    dtype: np.dtype,
    shape: Sequence[int],
    expected_dtype: np.dtype,
    expected_shape: Sequence[int],
) -> TransformError:
    """Returns the error of a tangent with another shape or dtype than its array."""
    return TransformError(
        f"The {noun} for {format_path(path)} is {dtype}{[*shape]}, but must be "
        f"{expected_dtype}{[*expected_shape]}, like the value itself."
    )


def not_a_state(noun: str, type_name: str, path: Path, tangent: object) -> TransformError:
    """Returns the error of a tangent for a Module that is no State, mapping or Module."""
    return TransformError(
        f"The {noun} for the {type_name} at {format_path(path)} is of type "
        f"{type(tangent).__name__}; it must be a State or a nested mapping by path, such as "
        f"sx.grad returns, a Module of the same structure, or None."
    )


def unlike_state(noun: str, path: Path, error: Exception) -> TransformError:
    """Returns the error of a tangent with paths or shapes that its Module does not have."""
    return TransformError(f"The {noun} for {format_path(path)}: {error}")


def tangent_of_unchosen(noun: str, path_text: str, position: int) -> TransformError:
    """Returns the error of a tangent for a Variable that the filter leaves out."""
    return TransformError(
        f"There is a {noun} for {path_text}, which the filter does not choose to be "
        f"differentiated. Leave it out, or choose it: "
        f"nondiff_argnums=sx.DiffState({position}, filter)."
    )


# --- results ---


def not_a_scalar(value: PyTree, number: PyTree, is_array: bool, kind: str) -> TransformError:
    """Returns the error of a differentiated result that is not one number of a kind."""
    description = f"a {type(value).__name__}"
    if is_array:
        description = f"{jnp.result_type(number)}{list(jnp.shape(number))}"
    return TransformError(
        f"Only a function that returns one {kind} number has a gradient, but it returned "
        f"{description}. Reduce it (loss.mean(), loss.sum()), return more with has_aux=True as "
        f"(loss, aux), or use jax.jacobian for arrays."
    )


def object_in_result(name: str, item: object, path: Path) -> TransformError:
    """Returns the error of a differentiated result that holds an object."""
    where = ".".join(map(str, path)) or "the result itself"
    return TransformError(
        f"The function given to sx.{name} returned a {type(item).__name__} at {where}, but only "
        f"arrays are differentiated. Return its values (variable.value), or return (arrays, "
        f"objects) with has_aux=True; what is written into arguments is carried back without "
        f"being returned."
    )


# --- jvp ---


def not_a_tuple_of_arguments(name: str, value: object) -> TransformError:
    """Returns the error of primals or tangents that are no tuple."""
    return TransformError(
        f"The {name} of sx.jvp are a tuple with one entry per argument, but were given as "
        f"{type(value).__name__}. Write sx.jvp(f, (x,), (direction,))."
    )


def unequal_counts(primals: Sequence[PyTree], tangents: Sequence[PyTree]) -> TransformError:
    """Returns the error of more or fewer tangents than primals."""
    return TransformError(
        f"sx.jvp was given {len(primals)} primals and {len(tangents)} tangents. Give one tangent "
        f"per argument, None for one that does not move."
    )


# --- safe_where ---


def condition_not_boolean(dtype: np.dtype) -> TransformError:
    """Returns the error of a condition that holds numbers."""
    return TransformError(
        f"The condition of sx.safe_where must be boolean, but has dtype {dtype}. Compare it: "
        f"x != 0."
    )


def no_operands() -> TransformError:
    """Returns the error of a call without operands."""
    return TransformError(
        "sx.safe_where was given no operands. What the function finds in a closure cannot be kept "
        "from it; pass it: sx.safe_where(x > 0, jnp.log, x, otherwise=0, stand_in=1)."
    )


def cannot_hold_stand_in(position: int, dtype: np.dtype, stand_in: complex) -> TransformError:
    """Returns the error of an operand whose dtype the stand-in would change."""
    return TransformError(
        f"Operand {position} of sx.safe_where has dtype {dtype} and cannot hold the stand-in "
        f"{stand_in!r}. Give another stand-in, or convert the operand."
    )


# --- rules of custom_vjp and custom_jvp ---


def without_rule(function: object, noun: str, remedy: str) -> TransformError:
    """Returns the error of a call before the rule was given."""
    return TransformError(
        f"{function!r} has no {noun} yet. Give it one before the first call: {remedy}."
    )


def nondiff_out_of_range(argnum: int, count: int) -> TransformError:
    """Returns the error of an entry of ``nondiff_argnums`` that the call does not have."""
    return TransformError(f"nondiff_argnums names the argument {argnum}, but the call has {count}.")


def nondiff_twice(argnum: int) -> TransformError:
    """Returns the error of an argument that ``nondiff_argnums`` names twice."""
    return TransformError(f"nondiff_argnums names the argument {argnum} twice.")


def by_name_alone(function: object, names: Sequence[str]) -> TransformError:
    """Returns the error of arguments that a rule of ``custom_jvp`` cannot take."""
    return TransformError(
        f"{function!r} was given {', '.join(names)} by name alone, and the rule of sx.custom_jvp "
        f"takes them by position. Let the function take them so."
    )


def other_effects(transform: str, rule: str, extra: Sequence[Path]) -> TransformError:
    """Returns the error of a rule with other effects than its function, such as extra writes."""
    difference = "changes structure or metadata"
    if extra:
        difference = f"writes {', '.join(map(format_path, extra))}"
    return TransformError(
        f"{rule} of sx.{transform} {difference}, which the function itself does not in the same "
        f"way. A function may be traced before it is differentiated, so both must agree. Let "
        f"{rule.removeprefix('The ')} call the function, or write the same Variables in both."
    )


def lost_gradient(name: str) -> TransformError:
    """Returns the error of a gradient for an input without one in the rule of ``custom_vjp``."""
    return TransformError(
        f"A gradient is asked for {name}, which a function made by sx.custom_vjp uses but whose "
        f"rule gives none: it would be lost. Make it differentiable (pass it as an argument, "
        f"outside nondiff_argnums, with wrt=... or nondiff_argnums=sx.DiffState(argnum, filter) "
        f"choosing it) and let bwd return its gradient, or None; or cut it before the call with "
        f"jax.lax.stop_gradient."
    )


def partly_lost_gradient(name: str, way: str) -> TransformError:
    """Returns the error of a gradient for a Variable that arrives without one, too."""
    return TransformError(
        f"A gradient is asked for {name}, which a function made by sx.custom_vjp gets twice: in a "
        f"differentiable argument and {way}, for which the rule gives no gradient, so a part of it "
        f"would be lost. Read it by the differentiable argument alone; or pass it by two that are "
        f"not in nondiff_argnums, and let bwd return its whole gradient for one, and None for the "
        f"other."
    )


def lost_tangent(name: str) -> TransformError:
    """Returns the error of a tangent for an input without one in the rule of ``custom_jvp``."""
    return TransformError(
        f"A tangent arrives at {name}, for which the rule of sx.custom_jvp gets none: it would be "
        f"lost. Pass it outside nondiff_argnums, with wrt=... choosing it; or cut it before the "
        f"call with jax.lax.stop_gradient."
    )


def wrong_count_of_gradients(labels: Sequence[str], returned: object) -> TransformError:
    """Returns the error of a ``bwd`` that returned no tuple with one gradient for each argument."""
    count = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
    return TransformError(
        f"bwd of sx.custom_vjp must return a tuple with one gradient for each of "
        f"({', '.join(labels)}), but it returned a {type(returned).__name__}{count}."
    )


def tangent_unlike_result(error: Exception) -> TransformError:
    """Returns the error of a rule's tangent with another structure than its result."""
    return TransformError(
        f"The tangent that the rule of sx.custom_jvp returned is not arranged like its result: "
        f"{error}"
    )
