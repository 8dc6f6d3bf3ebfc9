# SPDX-License-Identifier: Apache-2.0
"""Initializers that return boxes.

Flax and others put an array into a *box* with the names of its dimensions, and have initializers
that do so. A Variable holds the bare array and has the names as its axes. So an initializer is
split here into one of the bare array and the metadata of the box, before any array is made.

Initializers of shardax's own ``partition.with_partitioning`` *announce* their box: the function
that it wraps and the metadata stand in an attribute. Any other function is traced for its shapes,
to see whether it returns a box, but for those of ``jax.nn.initializers``, which return arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import jax
import numpy as np

from shardax._core.errors import ShardaxError
from shardax._core.graph.handlers import handler_of
from shardax._core.graph.static import Metadata, Static
from shardax._core.init.keys import KeyImpl, default_impl, words_type
from shardax._core.init.programs import Initializer, Shape

_ANNOUNCED = "_shardax_announced"

# The globals of the functions in ``jax.nn.initializers``, which need not be traced.
_GLOBALS_OF_JAX = jax.nn.initializers.normal.__globals__


def announce(wrapper: Initializer, plain: Initializer, metadata: Metadata) -> None:
    """Marks an initializer that puts the value of another into a box."""
    # With a reference to whom it is about: functools.wraps copies attributes to other functions.
    setattr(wrapper, _ANNOUNCED, (weakref.ref(wrapper), plain, metadata))


def announced(initializer: Initializer) -> tuple[Initializer, Metadata | None]:
    """Returns the initializer of the bare value, and the announced metadata of the box."""
    if isinstance(initializer, functools.partial):
        plain, metadata = announced(initializer.func)
        if metadata is None:
            return initializer, None
        return functools.partial(plain, *initializer.args, **initializer.keywords), metadata

    announcement = getattr(initializer, _ANNOUNCED, None)
    if announcement is None:
        return initializer, None
    wrapper, plain, metadata = announcement
    if wrapper() is not initializer:
        return initializer, None
    innermost, _ = announced(plain)
    return innermost, metadata


@dataclasses.dataclass(frozen=True)
class UnboxedInitializer:
    """The initializer of what another one puts into a box."""

    boxed: Initializer

    def __call__(self, key: jax.Array | None, shape: Shape, dtype: jax.typing.DTypeLike) -> Any:
        """Returns the array inside the box, or what is no box as it is."""
        value = self.boxed(key, shape, dtype)
        contents = handler_of(value).contents
        if contents is None:
            return value
        array, _ = contents(value)
        return array


def unboxed(
    initializer: Initializer, shape: Shape, dtype: np.dtype, impl: KeyImpl | None
) -> tuple[Initializer, Metadata | None]:
    """Returns the initializer of the bare value, and the metadata of its box, if any.

    Raises:
        ShardaxError: If the box holds another one.
    """
    plain, announced_metadata = announced(initializer)
    function = plain.func if isinstance(plain, functools.partial) else plain
    if getattr(function, "__globals__", None) is _GLOBALS_OF_JAX:
        return plain, announced_metadata

    try:
        # The trace is for the names alone, so a key of any generator does.
        box_metadata = _traced_metadata(Static(plain), shape, dtype, impl or default_impl())
    except Exception:  # noqa: BLE001 - what does not trace fails where its value is asked for
        return plain, announced_metadata

    if box_metadata is None:
        return plain, announced_metadata
    if isinstance(box_metadata, ShardaxError):
        raise box_metadata
    return UnboxedInitializer(plain), announced_metadata or box_metadata


@functools.lru_cache(maxsize=4096)
def _traced_metadata(
    initializer: Static, shape: Shape, dtype: np.dtype, impl: KeyImpl
) -> Metadata | ShardaxError | None:
    """Returns the metadata of the box that an initializer makes, or what is wrong with it."""
    outcome: Metadata | ShardaxError | None = None

    def trace(words: jax.Array) -> None:
        nonlocal outcome
        key = jax.random.wrap_key_data(words, impl=impl)
        value = initializer.value(key, shape, dtype)
        contents = handler_of(value).contents
        if contents is None:
            return
        try:
            _, outcome = contents(value)
        except ShardaxError as error:
            outcome = error

    jax.eval_shape(trace, words_type(impl))
    return outcome
