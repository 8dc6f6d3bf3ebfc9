# SPDX-License-Identifier: Apache-2.0
"""Programs of draws: a sampler of ``jax.random`` behind the next key of the stream.

Each kind of draw is one compiled program, which folds the count of the stream into its base key and
samples, straight into the shards asked for. *Operands* are arrays that may change from draw to draw
without compiling again: bounds, probabilities, choices. *Options* are part of the program: shape,
dtype, axis. What cannot be drawn fails before the draw is taken, so the stream stays where it was.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardax._core.errors import ShardaxError
from shardax._core.init import keys, programs
from shardax._core.init.defaults import as_device, creation_device
from shardax.partition.mesh import resolve_mesh
from shardax.random import errors
from shardax.random.arguments import Device, Placement
from shardax.random.errors import Operand
from shardax.random.stream import current_stream, key_size


class OperandForm(NamedTuple):
    """Name, shape and dtype of an operand."""

    name: str
    shape: tuple[int, ...]
    dtype: Any  # of NumPy, or the dtype of random keys


def draw(
    name: str,
    operands: Mapping[str, Operand] | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
    **options: Hashable,
) -> jax.Array:
    """Takes the next draw of the stream; returns its numbers.

    Args:
        name: A sampler of ``jax.random``; ``"key"`` draws the key itself.
        operands: Arrays by name of the argument.
        device: Device, or its name.
        sharding: Where each part goes.
        **options: Other arguments of the sampler.
    """
    if options.get("shape") is not None:
        options["shape"] = _as_shape(name, options["shape"])
    stream = current_stream(name)
    target = placement(f"shardax.random.{name}", device, sharding)

    operands = operands or {}
    forms = tuple(_form_of(operand_name, array) for operand_name, array in operands.items())
    with stream.drawing() as (impl, words, folds):
        program = _program(name, impl, len(folds), forms, tuple(options.items()), target)

    inputs = words, folds, operands
    if target is not None:
        return program(inputs)
    with creation_device():
        return program(inputs)


def _form_of(name: str, array: Operand) -> OperandForm:
    # Of NumPy's 64 bits JAX makes 32, and warns of it where they are asked for by name.
    dtype = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    return OperandForm(name, array.shape, dtype)


def _as_shape(name: str, shape: object) -> tuple[int, ...]:
    """Returns a shape as a tuple."""
    sizes: tuple[Any, ...] = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    with contextlib.suppress(TypeError):
        checked = tuple(map(operator.index, sizes))
        if all(size >= 0 for size in checked):
            return checked
    raise errors.not_a_shape(name, shape)


@functools.lru_cache(maxsize=1024)
def _program(
    name: str,
    impl: str,
    fold_count: int,
    operands: tuple[OperandForm, ...],
    options: tuple[tuple[str, Hashable], ...],
    target: Sharding | None,
) -> programs.InitializerProgram:
    """Returns the compiled program of a kind of draw."""
    sampler = jax.random.clone if name == "key" else getattr(jax.random, name)

    def sample(inputs: tuple[jax.Array, tuple[jax.Array, ...], dict[str, jax.Array]]) -> jax.Array:
        words, folds, arrays = inputs
        key = jax.random.wrap_key_data(words, impl=impl)
        for fold in folds:
            key = jax.random.fold_in(key, fold)
        return sampler(key, **arrays, **dict(options))

    forms = (
        jax.ShapeDtypeStruct((key_size(impl),), np.uint32),
        (jax.ShapeDtypeStruct((), np.uint32),) * fold_count,
        {form.name: jax.ShapeDtypeStruct(form.shape, form.dtype) for form in operands},
    )
    with jax.sharding.use_abstract_mesh(keys.NO_MESH):
        made = jax.eval_shape(sample, forms)  # raises for wrong arguments

    if not isinstance(target, NamedSharding):
        return programs.InitializerProgram(sample, forms, target)
    try:
        target.shard_shape(made.shape)
    except ValueError as error:
        raise errors.does_not_divide(name, made, target, error) from error
    return programs.program_into(target, sample, forms, programs.cuts_freely(sample, forms, impl))


def placement(
    function: str,
    device: Device | Sharding,
    sharding: Placement,
    error_class: type[ShardaxError] = errors.DrawError,
) -> Sharding | None:
    """Returns the sharding for a new array, or None for the default device.

    Args:
        function: The public function that makes the array, for messages.
        device: Device, its name, or a sharding.
        sharding: A sharding, or a spec over the mesh in scope.
        error_class: Raised for what does not fit.
    """
    if device is not None and sharding is not None:
        raise error_class(errors.device_and_sharding(function, device, sharding))

    given = sharding if device is None else device
    if given is None:
        return None
    if isinstance(given, Sharding):
        return given
    if isinstance(given, PartitionSpec):
        return _over_the_mesh_in_scope(function, given, error_class)
    if device is None:
        raise error_class(errors.not_a_sharding(function, sharding))
    return SingleDeviceSharding(as_device(device))


def _over_the_mesh_in_scope(
    function: str, spec: PartitionSpec, error_class: type[ShardaxError]
) -> NamedSharding:
    mesh = resolve_mesh()
    if mesh is None:
        raise error_class(errors.spec_without_mesh(function, spec))
    return NamedSharding(mesh, spec)
