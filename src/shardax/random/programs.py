# SPDX-License-Identifier: Apache-2.0
"""How a draw becomes an array: one compiled program for each kind of draw.

*Operands* are arrays that may change from draw to draw without compiling again: bounds,
probabilities, what is chosen from. *Options* are part of the program: shape, dtype, axis. The
program folds the count of the draw into the base key and samples, in one call, and writes straight
into the shards it is asked for. The numbers are those of the function of the same name in
``jax.random``, whatever the sharding.

What cannot be drawn fails before the draw is taken, so the stream stays where it was.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardax.core.defaults import as_device, creation_device
from shardax.core.errors import DrawError
from shardax.core.initializers import InitializerProgram, cuts_freely, program_into
from shardax.core.keys import NO_MESH
from shardax.partition.mesh import resolve_mesh
from shardax.random.stream import current, key_size

Operands = Mapping[str, Any]


def draw(
    name: str,
    operands: Operands | None = None,
    *,
    device: Any = None,
    sharding: Any = None,
    **options: Hashable,
) -> jax.Array:
    """Takes the next draw of the stream.

    Args:
        name: Of the function here and in ``jax.random``; ``"key"`` for the key itself.
        operands: Arrays by the name of the argument.
        device: See ``placement``.
        sharding: See ``placement``.
        **options: Other arguments.

    Raises:
        TracedDrawError: While a transform is tracing.
        DrawError: If the array cannot be placed so.
        DeviceError: If there is no such device.
    """
    stream = current(name)
    operands = operands or {}
    place = placement(name, device, sharding)
    specs = tuple((name, array.shape, array.dtype) for name, array in operands.items())
    chosen = tuple(options.items())
    with stream.drawing() as drawn:
        program = _program(name, drawn.impl, len(drawn.folds), specs, chosen, place)
    given = (drawn.words, drawn.folds, operands)
    if place is not None:
        return program(given)
    with creation_device():
        return program(given)


@functools.lru_cache(maxsize=1024)
def _program(
    name: str,
    impl: str,
    folds: int,
    operands: tuple[tuple[str, tuple[int, ...], Any], ...],
    options: tuple[tuple[str, Hashable], ...],
    place: Sharding | None,
) -> InitializerProgram:
    sampler = jax.random.clone if name == "key" else getattr(jax.random, name)

    def sample(given: tuple[Any, ...]) -> jax.Array:
        words, counts, arrays = given
        key = jax.random.wrap_key_data(words, impl=impl)
        for count in counts:
            key = jax.random.fold_in(key, count)
        return sampler(key, **arrays, **dict(options))

    given = (
        jax.ShapeDtypeStruct((key_size(impl),), np.uint32),
        (jax.ShapeDtypeStruct((), np.uint32),) * folds,
        {operand: jax.ShapeDtypeStruct(shape, dtype) for operand, shape, dtype in operands},
    )
    with jax.sharding.use_abstract_mesh(NO_MESH):
        made = jax.eval_shape(sample, given)  # what is wrong with the arguments is said here
    if not isinstance(place, NamedSharding):
        return InitializerProgram(sample, given, place)
    try:
        place.shard_shape(made.shape)
    except ValueError as error:
        raise DrawError(
            f"shardax.random.{name} cannot lay out {made.dtype}{list(made.shape)} by {place}: "
            f"{error} Choose a shape that the mesh divides, or another sharding."
        ) from error
    return program_into(place, sample, given, cuts_freely(sample, given, impl))


def placement(name: str, device: Any, sharding: Any) -> Sharding | None:
    """Returns where an array goes, None for the default device.

    Args:
        name: Of the public function, for errors.
        device: A ``jax.Device`` or its name, such as ``"cpu"``, or a sharding as in ``jax.numpy``.
        sharding: A ``jax.sharding.Sharding``; or a ``PartitionSpec`` over the mesh in scope.

    Raises:
        DrawError: If both are given, or they are something else.
        DeviceError: If there is no such device.
    """
    if device is None and sharding is None:
        return None
    if device is not None and sharding is not None:
        raise DrawError(
            f"shardax.random.{name} was given device={device!r} and sharding={sharding!r}; a "
            f"sharding names its devices, so give one of them."
        )
    place = sharding if device is None else device
    if isinstance(place, Sharding):
        return place
    if isinstance(place, PartitionSpec):
        mesh = resolve_mesh()
        if mesh is None:
            raise DrawError(
                f"shardax.random.{name} was given sharding={place}, which needs a mesh, and none "
                f"is in scope. Put one there with jax.set_mesh(mesh), or give a "
                f"NamedSharding(mesh, {place})."
            )
        return NamedSharding(mesh, place)
    if device is None:
        raise DrawError(
            f"shardax.random.{name} was given sharding={sharding!r} of type "
            f"{type(sharding).__name__}. Give a jax.sharding.Sharding, or a PartitionSpec over the "
            f"mesh in scope; for a device there is device=."
        )
    return SingleDeviceSharding(as_device(device))
