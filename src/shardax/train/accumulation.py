# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: the gradient of a large batch from several small ones.

A microbatch is one of the equal parts that a batch is cut into. Only one is in work at a time, so
the memory for activations is that of a microbatch. The loss of a batch is the mean over its rows,
or over its targets where a mask or ``ignore_index`` leaves some of them out. So the mean over
microbatches, weighted by their numbers of targets, is the same number, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardax import Carry, Param, eval_shape, jit, scan, value_and_grad
from shardax._parallel.microbatches import cut, indivisible
from shardax.extend import INLINE, Options, PyTree, has_objects, raise_if_any
from shardax.nn.arithmetic import at_least_float32
from shardax.train.errors import TrainError
from shardax.train.metrics import counted_by, relative_weights, target_weights, weighted


def accumulated_value_and_grad(
    function: Callable[..., object],
    steps: int,
    *,
    has_aux: bool = False,
    wrt: object = Param,
    reduce: str = "mean",
    count: Callable[[PyTree], object] | None = None,
) -> Callable[..., Any]:
    """Makes ``sx.value_and_grad(function)`` run over a batch in microbatches.

    State that the function writes (running statistics, random streams) goes from one microbatch to
    the next. Sums are kept in float32 at least. The loop is one ``lax.scan``, so the program does
    not grow with ``steps``.

    Args:
        function: Called as ``function(model, batch, *args)``; returns a real scalar, or (scalar,
            aux) with ``has_aux``. The scalar is a mean over rows or targets (or, for
            ``reduce="sum"``, a sum).
        steps: Number of microbatches. With 1 this is ``sx.value_and_grad``.
        has_aux: Whether the function returns (value, aux); aux holds arrays only.
        wrt: Filter of the Variables to differentiate.
        reduce: ``"mean"`` or ``"sum"``: what becomes of the values and gradients of the
            microbatches.
        count: Called on a microbatch; returns the number of targets of which the function is the
            mean, by which means are weighted. None: of a batch that is a mapping, what its ``mask``
            and the ignore index -100 leave of its ``targets``; of others, rows.

    Returns:
        A function of ``(model, batch, *args)``, where ``batch`` is a pytree of arrays with rows in
        their first dimension. It returns (value, gradient), or ((value, aux), gradient) with aux
        stacked: each array has a new first dimension of size ``steps``.

    Raises:
        TrainError: Here if ``steps``, ``reduce`` or ``count`` is not valid; when called, if rows
            cannot be divided by ``steps``, or ``count`` returns no real number.
        TransformError: When called, if the function changes the structure, a shape or a dtype of
            the model; as in ``sx.scan``, what it sows is stacked.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax.train.accumulation import accumulated_value_and_grad
        >>> weight = sx.Variable(jnp.float32(2))
        >>> loss = lambda weight, x: jnp.mean(weight * x)
        >>> value, gradient = accumulated_value_and_grad(loss, 2, wrt=...)(weight, jnp.arange(4.0))
        >>> float(value), float(gradient)
        (3.0, 1.5)
    """
    differentiated = value_and_grad(function, has_aux=has_aux, wrt=wrt)
    return accumulate(differentiated, steps, has_aux, reduce, count)


def accumulate(
    function: Callable[..., PyTree],
    steps: int,
    has_aux: bool = False,
    reduce: str = "mean",
    count: Callable[[PyTree], object] | None = None,
) -> Callable[..., Any]:
    """Makes a function of (value, gradient) run in microbatches."""
    options = Options(TrainError)
    options.integers(steps=steps)
    options.choice("reduce", reduce, ("mean", "sum"))
    has_weights = count is None or reduce == "mean"
    remedy = "By count means are weighted; sums are not."
    options.check("count", count, has_weights, f"None with reduce={reduce!r}", remedy)
    example = 'count=lambda microbatch: microbatch["mask"].sum()'
    expected = f"a function of a microbatch, by which means are weighted: {example}"
    options.check("count", count, count is None or callable(count), expected)
    if steps == 1:
        return _with_leading_dimension(function) if has_aux else function

    scale = 1.0 if reduce == "sum" else 1.0 / steps

    @functools.wraps(function)
    def accumulated(model, batch, *args):
        parts = split_batch(batch, steps)
        weights = _weights_of(parts, count) if reduce == "mean" else None
        # Arguments without Variables are closed over: they may be static, such as texts.
        lifted = [index for index, arg in enumerate(args) if has_objects(arg)]

        @functools.partial(jit, inline=INLINE)  # traced once, for its shapes and for the loop
        def once(model, microbatch, *objects) -> Any:
            by_index = dict(zip(lifted, objects, strict=True))
            items = (by_index.get(index, arg) for index, arg in enumerate(args))
            value, gradient = function(model, microbatch, *items)
            value, aux = value if has_aux else (value, None)
            return (value, gradient), aux

        def body(total, part, *objects):
            microbatch, weight = part
            head, aux = once(objects[0], microbatch, *objects[1:])
            head = head if weight is None else weighted(head, weight)
            return jax.tree.map(lambda t, h: t + h.astype(t.dtype), total, head), aux

        objects = (model, *(args[index] for index in lifted))
        first = jax.tree.map(lambda part: part[0], parts)
        shapes, _ = eval_shape(once, model, first, *objects[1:])
        in_axes = (Carry, 0, *(None for _ in objects))
        loop = scan(body, in_axes=in_axes, out_axes=(Carry, 0))
        total, aux = loop(jax.tree.map(_zeros_for_sum, shapes), (parts, weights), *objects)
        value, gradient = jax.tree.map(lambda t, s: (t * scale).astype(s.dtype), total, shapes)
        return ((value, aux) if has_aux else value), gradient

    return accumulated


def _weights_of(parts: object, count: Callable[[PyTree], object] | None) -> jax.Array | None:
    """Returns weights of microbatches, or None if they count alike."""
    if count is None:
        weights = target_weights(parts)
        if weights is None:
            return None
        return relative_weights(jnp.sum(weights, axis=range(1, weights.ndim), dtype=jnp.float32))
    return relative_weights(jax.vmap(lambda part: counted_by(count, part))(parts))


def split_batch(batch: object, steps: int) -> PyTree:
    """Cuts arrays of a batch into (steps, rows / steps, ...)."""
    if has_objects(batch):
        raise TrainError(
            "The batch (the second argument) holds a Module or Variable, which cannot be cut into "
            "microbatches. Pass it as a later argument, which every microbatch is given whole."
        )
    raise_if_any(
        TrainError,
        indivisible("batch", batch, steps),
        f"Cannot cut the batch into {steps} microbatches of equal size: ",
        f". The first dimension of every array must be a multiple of {steps}.",
    )

    return cut(batch, steps)


def _zeros_for_sum(shape: jax.ShapeDtypeStruct) -> jax.Array:
    dtype = shape.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = at_least_float32(dtype)
    # Under Explicit mesh axes the sharding is part of the type, and what is summed must start with
    # it.
    return jnp.zeros(shape.shape, dtype, out_sharding=shape.sharding)


def _with_leading_dimension(function: Callable[..., PyTree]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_stacked_aux(*args):
        (value, aux), gradient = function(*args)
        return (value, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], aux)), gradient

    return with_stacked_aux
