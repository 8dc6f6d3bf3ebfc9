# SPDX-License-Identifier: Apache-2.0
"""What JAX's operations do to the dimensions of arrays: which of the result are which of operands.

A rule is given the classes, the equation and the dimensions of its operands, and returns those of
its results. An operation without a rule has results whose dimensions are unrelated to anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardax.plan.dimension_classes import DimensionClasses, matching_groups

Dims = tuple[int, ...]
Rule = Callable[[DimensionClasses, Any, Sequence[Dims]], list[Dims]]


def fresh(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    """Dimensions that are unrelated to those of operands."""
    return [classes.new(getattr(out.aval, "shape", ())) for out in equation.outvars]


def _elementwise(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    results = fresh(classes, equation, operands)
    for out in results:
        for operand in operands:
            if len(operand) == len(out):
                classes.join_same_sizes(operand, out)
    return results


def _one_to_one(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    return list(operands[: len(equation.outvars)])


def _transpose(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    return [tuple(operands[0][i] for i in equation.params["permutation"])]


def _broadcast(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    (out,) = fresh(classes, equation, operands)
    places = equation.params["broadcast_dimensions"]
    classes.join_same_sizes(operands[0], [out[i] for i in places])
    return [out]


def _reduce(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    gone = {int(axis) for axis in equation.params["axes"]}
    kept = [tuple(d for i, d in enumerate(dims) if i not in gone) for dims in operands]
    return kept[: len(equation.outvars)]


def _squeeze(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    gone = {int(axis) for axis in equation.params["dimensions"]}
    return [tuple(d for i, d in enumerate(operands[0]) if i not in gone)]


def _reshape(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    (out,) = fresh(classes, equation, operands)
    given = operands[0]
    sizes = [classes.size(d) for d in given]
    if equation.params.get("dimensions") is not None:
        return [out]
    for taken, made in matching_groups(sizes, [classes.size(d) for d in out]):
        sources, targets = [given[i] for i in taken], [out[i] for i in made]
        if len(sources) == len(targets) == 1:
            classes.join(sources[0], targets[0])
        elif len(sources) == 1:
            classes.make_whole(sources[0], targets)
        elif len(targets) == 1:
            classes.make_whole(targets[0], sources)
    return [out]


def _resized(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    """Slices, pads, concatenations: a dimension stays what it is, whatever its size becomes."""
    results = fresh(classes, equation, operands)
    for out in results:
        for operand in operands:
            if len(operand) == len(out):
                for one, other in zip(operand, out, strict=True):
                    classes.join(one, other)
    return results


def _dynamic_slice(
    classes: DimensionClasses, equation: Any, operands: Sequence[Dims]
) -> list[Dims]:
    return _resized(classes, equation, operands[:1])


def _dynamic_update(
    classes: DimensionClasses, equation: Any, operands: Sequence[Dims]
) -> list[Dims]:
    return _resized(classes, equation, operands[:2])


def _top_k(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    results = fresh(classes, equation, operands)
    for out in results:
        classes.join_same_sizes(operands[0][:-1], out[:-1])
    return results


def _gather(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    """Rows of an operand by indices, whose last dimension is that of one index."""
    numbers = equation.params["dimension_numbers"]
    operand, indices = operands[0], operands[1]
    (out,) = fresh(classes, equation, operands)
    batching = tuple(numbers.operand_batching_dims)
    gone = {*numbers.collapsed_slice_dims, *batching}
    kept = [d for i, d in enumerate(operand) if i not in gone]
    classes.join_same_sizes(kept, [out[i] for i in numbers.offset_dims])
    rows = [d for i, d in enumerate(out) if i not in set(numbers.offset_dims)]
    classes.join_same_sizes(indices[:-1], rows)
    _join_batching(classes, operand, indices, batching, numbers.start_indices_batching_dims)
    return [out]


def _scatter(classes: DimensionClasses, equation: Any, operands: Sequence[Dims]) -> list[Dims]:
    """The reverse of a gather: updates of rows, by indices."""
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates = operands[0], operands[1], operands[2]
    batching = tuple(numbers.operand_batching_dims)
    gone = {*numbers.inserted_window_dims, *batching}
    kept = [d for i, d in enumerate(operand) if i not in gone]
    window = set(numbers.update_window_dims)
    classes.join_same_sizes(kept, [d for i, d in enumerate(updates) if i in window])
    rows = [d for i, d in enumerate(updates) if i not in window]
    classes.join_same_sizes(indices[:-1], rows)
    _join_batching(classes, operand, indices, batching, numbers.scatter_indices_batching_dims)
    return [operand]


def _join_batching(
    classes: DimensionClasses, operand: Dims, indices: Dims, one: Any, other: Any
) -> None:
    for a, b in zip(one, other, strict=True):
        classes.join(operand[a], indices[b])


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
cumlogsumexp cummax cummin cumprod cumsum digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
lt_to max min mul name ne neg nextafter not or polygamma population_count pow pvary
random_gamma_grad real reduce_precision regularized_incomplete_beta rem reshard rev round rsqrt
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
sort sqrt square stop_gradient sub tan tanh xor zeta mesh_cast layout_constraint
"""

_REDUCTIONS = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
"""

_PAIRWISE = """
optimization_barrier psum psum2 psum_invariant pmax pmin ppermute pbroadcast pcast device_put
"""

_SCATTERS = """
scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max
scatter_max
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(_PAIRWISE.split(), _one_to_one),
    **dict.fromkeys(["slice", "pad", "concatenate", "split"], _resized),
    **dict.fromkeys(_SCATTERS.split(), _scatter),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "top_k": _top_k,
    "gather": _gather,
}  # fmt: skip
"""Rules by the name of the primitive."""

KEEPS_ARGUMENT = frozenset(
    ["convert_element_type", "name", "transpose", "reshape", "squeeze", "slice", "copy", "copy_p",
     "dynamic_slice", "reduce_precision", "sharding_constraint", "reshard", "pvary", "device_put"]
)  # fmt: skip
"""Operations whose result is still their first operand, in another form."""


def convolution_dims(
    classes: DimensionClasses, equation: Any, operands: Sequence[Dims]
) -> tuple[Dims, list[tuple[str, int]], float]:
    """Dimensions of a convolution.

    Args:
        classes: The classes.
        equation: Of the primitive ``conv_general_dilated``.
        operands: Dimensions of image and kernel.

    Returns:
        Dimensions of the result; those of the product, with their roles; its operations: two for
        each element of the result and each of the kernel's that it is a sum over.
    """
    numbers = equation.params["dimension_numbers"]
    left, right = operands[0], operands[1]
    (out,) = fresh(classes, equation, operands)
    batch, feature, *spatial = numbers.lhs_spec
    out_feature, in_feature, *window = numbers.rhs_spec
    out_batch, made, *places = numbers.out_spec
    classes.join(left[batch], out[out_batch])
    classes.join(right[out_feature], out[made])
    for one, other in zip(spatial, places, strict=True):
        classes.join(left[one], out[other])
    grouped = equation.params["feature_group_count"] * equation.params["batch_group_count"]
    if grouped == 1:
        classes.join(left[feature], right[in_feature])
    dims = [("left", left[batch]), ("right", right[out_feature]), ("sum", right[in_feature])]
    dims += [("left", out[i]) for i in places]
    elements = math.prod(classes.size(d) for d in out)
    terms = math.prod(classes.size(right[i]) for i in (in_feature, *window))
    return out, dims, 2.0 * elements * terms
