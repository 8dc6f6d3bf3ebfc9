# SPDX-License-Identifier: Apache-2.0
"""Quantized kernels in the places of selected ones, and precisions of products."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardax import All, Param, Variable, iter_modules, select
from shardax.errors import SelectionError
from shardax.extend import Options, Path, PyTree, format_path, raise_if_any
from shardax.nn.arithmetic import DelayedScaling, take_precision
from shardax.nn.kernels.layer import KernelLayer, KernelMap
from shardax.nn.quantization import RANGES, Format, QuantizedKernel
from shardax.nn.reparametrization import SpectralNorm, WeightNorm
from shardax.surgery import errors

_FORMATS = (*RANGES, None)
_LAYERS = "Linear, Einsum, Embed, MoE and convolutions"


class _FormatRule(NamedTuple):
    """A filter of kernels and their format."""

    key: Any
    predicate: All
    format: Any


class _KernelPlace(NamedTuple):
    """A kernel, and how its layer multiplies by it."""

    path: Path
    kernel: Any
    layer: KernelLayer
    map: KernelMap


def quantize(
    model: PyTree, formats: Format | Mapping[Any, Format | None], *, tile_size: int | None = None
) -> PyTree:
    """Stores kernels in 8 or 4 bits, with scales.

    The kernels are those of each ``Linear`` (also of ``sx.named``), ``Einsum``, ``Embed``,
    convolution, ``MoE`` and other ``nn.KernelLayer``. Layers compute with the numbers times their
    scales, in the dtype that they computed in before. Biases, norms, and parameters of other
    Modules stay as they are.

    Args:
        model: A model, also an abstract one.
        formats: ``"int8"``, ``"int4"`` or ``"fp8"`` for all kernels; or one for each filter of
            kernels, of which the first that matches decides, and None for kernels to leave.
        tile_size: How many inputs of a channel share a scale; None for all. Each kernel has to be
            divisible.

    Returns:
        The model with ``nn.QuantizedKernel`` in the places of kernels, which are not trained. All
        else is shared with the given one, which stays as it is. A kernel that several layers share
        is shared again.

    Raises:
        SelectionError: If a filter matches no kernel, or a kernel that cannot be quantized.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.MLP(64, 256, rngs=sx.Rngs(0))
        >>> small = sx.quantize(model, {sx.PathContains("down"): "int8", ...: "int4"})
        >>> small.down.kernel.values.dtype.name, small.up.kernel.values.dtype.name
        ('int8', 'int4')
        >>> x = jnp.ones((2, 64))
        >>> bool(jnp.abs(small(x) - model(x)).max() < 0.2 * jnp.abs(model(x)).max())
        True
    """
    rules = _rules_of(formats)
    if tile_size is not None:
        Options(SelectionError, "quantize").integers(tile_size=tile_size)

    places = list(_kernel_places(model))
    chosen = _chosen(model, places, rules, tile_size)

    # A kernel that several layers share is rounded once, and shared again.
    new: dict[int, QuantizedKernel] = {}
    for place, number_format in chosen:
        if id(place.kernel) not in new:
            new[id(place.kernel)] = place.map.quantized(place.kernel, number_format, tile_size)

    kernels = select(model).at_instances_of(Variable).where(lambda _, v: id(v) in new)
    return kernels.apply(lambda _, v: new[id(v)], allow_empty=True)


def dequantize(model: PyTree) -> PyTree:
    """Makes the quantized kernels of a model parameters again.

    Args:
        model: A model with quantized kernels.

    Returns:
        The model of the original structure, whose kernels have the numbers that the quantized one
        computes with. All else is shared.

    Raises:
        SelectionError: If there are none.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.MLP(8, 16, rngs=sx.Rngs(0))
        >>> again = sx.dequantize(sx.quantize(model, "int8"))
        >>> sx.graphdef(again) == sx.graphdef(model), type(again.up.kernel).__name__
        (True, 'Param')
    """
    parameters: dict[int, Param[Any]] = {}

    def parameter(kernel: QuantizedKernel) -> Param[Any]:
        return parameters.setdefault(id(kernel), kernel.as_param())

    return select(model).at_instances_of(QuantizedKernel).apply(parameter)


def with_precision(model: PyTree, precisions: Any) -> PyTree:
    """Sets the precision of the products with chosen kernels.

    Args:
        model: A model.
        precisions: As ``precision=`` of ``nn.Linear``, such as ``"fp8"``; or one for each filter of
            kernels of ``Linear``, ``Einsum``, ``Embed`` and other layers with
            ``takes_precision``, of which the first that matches decides, and None for those to
            leave. All kernels of a layer get one.

    Returns:
        The model with copies of these layers. All Variables are shared with the given one, so an
        optimizer of it trains both; ``"fp8-delayed"`` adds an ``AmaxHistory`` of each operand.

    Raises:
        SelectionError: If a filter matches no kernel of such a layer, or filters give the kernels
            of one layer several precisions.
        LayerConfigError: If it is no precision.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.MLP(8, 16, rngs=sx.Rngs(0))
        >>> trained = sx.surgery.with_precision(model, {sx.PathContains("down"): None, ...: "fp8"})
        >>> trained.up.precision, trained.down.precision, trained.up.kernel is model.up.kernel
        ('fp8', None, True)
    """
    entries = precisions if isinstance(precisions, Mapping) else {...: precisions}
    rules = [_FormatRule(key, All(key), value) for key, value in entries.items()]
    new, used = dict[int, KernelLayer](), set[int]()
    decided: dict[int, tuple[Path, object]] = {}  # by the layer, its first kernel with a precision

    places = [place for place in _kernel_places(model) if place.layer.takes_precision]
    for place in places:
        number = _matching(place, rules)
        if number is not None:
            used.add(number)
        precision = None if number is None else rules[number].format

        # A layer has one precision, for all of its kernels.
        first = decided.setdefault(id(place.layer), (place.path, precision))
        if precision != first[1]:
            raise errors.two_precisions(first, (place.path, precision))
        if precision is None or id(place.layer) in new:
            continue

        layer: Any = copy.copy(place.layer)
        take_precision(layer, precision, None)
        if isinstance(layer.precision, DelayedScaling):
            layer.precision = DelayedScaling(*place.map.dimensions_of_stacks(place.kernel))
        new[id(place.layer)] = layer

    for number, rule in enumerate(rules):
        if number not in used:
            raise SelectionError(
                f"The filter {rule.key!r} of with_precision decides about no kernel. Linear, "
                f"Einsum and Embed have such kernels, here {_some_paths(places)}. For all of them: "
                f"sx.surgery.with_precision(model, {rule.format!r})."
            )

    # A selection has the outermost layers alone. One within them is chosen in the next turn: the
    # copy of the outer one holds it still.
    changed = model
    while (chosen := select(changed).at_subtrees_where(lambda part: id(part) in new)).get_all():
        changed = chosen.apply(lambda _, layer: new[id(layer)])
    return changed


def _rules_of(formats: object) -> list[_FormatRule]:
    """Returns filters with their formats, or raises."""
    options = Options(SelectionError)
    if isinstance(formats, str):
        options.choice("formats", formats, tuple(RANGES))
        return [_FormatRule(..., All(...), formats)]

    if not isinstance(formats, Mapping) or not formats:
        raise SelectionError(
            f"quantize takes a format, or formats by filters, and not {formats!r}: "
            f'sx.quantize(model, {{sx.PathContains("mlp"): "int8"}}).'
        )

    for key, value in formats.items():
        options.choice(f"formats[{key!r}]", value, _FORMATS)
    return [_FormatRule(key, All(key), value) for key, value in formats.items()]


def _kernel_places(model: object) -> Iterator[_KernelPlace]:
    """Yields the kernels of a model's layers."""
    for path, layer in iter_modules(model):
        if isinstance(layer, KernelLayer):
            for name, kernel_map in layer.kernel_maps().items():
                kernel = getattr(layer, name, None)
                yield _KernelPlace((*path, name), kernel, layer, kernel_map)


def _chosen(
    model: object, places: list[_KernelPlace], rules: list[_FormatRule], tile_size: int | None
) -> list[tuple[_KernelPlace, Format]]:
    """Returns kernels with their formats, or raises by path."""
    chosen, problems, used = list[tuple[_KernelPlace, Format]](), list[str](), set[int]()
    normalized = [p for p, m in iter_modules(model) if isinstance(m, (WeightNorm, SpectralNorm))]

    # Where each kernel was met first, and the format that it got there.
    first: dict[int, tuple[_KernelPlace, Any]] = {}
    for place in places:
        number = _matching(place, rules)
        if number is None:
            continue
        used.add(number)

        number_format = rules[number].format
        other, other_format = first.setdefault(id(place.kernel), (place, number_format))
        problem = None if number_format is None else _problem(place, tile_size, normalized)
        first_way = other.map.quantized_along, other_format
        if first_way != (place.map.quantized_along, number_format):
            problem = f"is the kernel of {format_path(other.path)}, too, and would be quantized in "
            problem += "another way there: give both one format, or None"

        if problem is not None:
            problems.append(f"{format_path(place.path)} {problem}")
        elif number_format is not None:
            chosen.append((place, number_format))

    raise_if_any(SelectionError, problems, "quantize: ", ".", separator="; ")
    for number, rule in enumerate(rules):
        if number not in used and rule.format is not None:
            raise SelectionError(
                f"The filter {rule.key!r} of quantize decides about no kernel. {_LAYERS} have "
                f"kernels, here {_some_paths(places)}. For all of them: "
                f"sx.quantize(model, {rule.format!r})."
            )
    return chosen


def _matching(place: _KernelPlace, rules: list[_FormatRule]) -> int | None:
    """Returns the number of the first filter that matches a kernel."""
    variable = place.kernel
    if isinstance(variable, QuantizedKernel):
        variable = variable.values
    if not isinstance(variable, Variable):
        return None
    matches = (number for number, rule in enumerate(rules) if rule.predicate(place.path, variable))
    return next(matches, None)


def _problem(place: _KernelPlace, tile_size: int | None, normalized: list[Path]) -> str | None:
    """Says why a kernel cannot be quantized, if so."""
    kernel, dimensions = place.kernel, place.map.quantized_along
    if isinstance(kernel, QuantizedKernel):
        return "is quantized already: make it a Param again first, sx.dequantize(model)"
    if not isinstance(kernel, Param) or not jnp.issubdtype(kernel.dtype, jnp.floating):
        return f"is a {type(kernel).__name__} of {kernel.dtype}, not a Param of floating numbers"
    if any(place.path[: len(path)] == path for path in normalized):
        return "is normalized in each call by the layer around it: leave it out, with None"
    if not place.map.fits(kernel):
        return f"has the shape {kernel.shape}, which does not end with {place.map.shape}"
    if not dimensions:
        return "is summed over no dimension: leave it out, with None"

    size = kernel.shape[dimensions[-1]]
    if tile_size is not None and size % tile_size:
        return f"has {size} inputs, which tile_size={tile_size} does not divide"
    return None


def _some_paths(places: list[_KernelPlace]) -> str:
    paths = [format_path(place.path) for place in places[:4]]
    return ", ".join(paths) + (", ..." if len(places) > 4 else "") or "no path"
