# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers: their call, and the cache of their states.

The size of a cache does not depend on how many tokens were read. The position of the last token is
there as in the cache of attention, so a model that has both counts positions by either of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Cache, Init, Module
from shardax.extend import explicit_entries, explicit_sharding, gathered, with_layout
from shardax.nn.arithmetic import as_array
from shardax.nn.attention.cache import laid_out
from shardax.nn.attention.multi_head import positions_within
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.masks import as_mask
from shardax.nn.parameters import as_size, refuse_input


@dataclass(frozen=True)
class MixerState:
    """An array that a mixer keeps of each row.

    Attributes:
        shape: Its shape, without the batch.
        axes: A name for each dimension.
        dtype: Its dtype; None for that of the cache.

    Example:
        >>> MixerState((2, 8), (None, "mlp")).dtype is None
        True
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = None


class RecurrentCache(Module):
    """States of one recurrent mixer, kept between calls.

    It is lazy and has axis names, so ``sx.shard(cache, mesh, rules)`` makes it where the model is.
    A mixer makes the one that fits it: ``mixer.make_cache(batch)``.

    Args:
        batch: How many rows.
        states: What is kept of each row, by name.
        dtype: Dtype of states that name none, a floating one.
        num_layers: Size of a leading dimension, for the layers of a ``Stack``; None for one layer.
        axis_name: Name of that dimension; that of the ``Stack``.

    Attributes:
        states: A ``Cache`` for each state: the batch, then its shape; zeros at first.
        position: ``Cache`` of shape (batch, 1): the position of the last token, or -1.

    Raises:
        LayerConfigError: If a size is not positive, or for a dtype of integers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.ShortConvolution(8, rngs=sx.Rngs(0))
        >>> cache, x = layer.make_cache(1), jnp.arange(32.0).reshape(1, 4, 8)
        >>> parts = [layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)]
        >>> bool(jnp.allclose(jnp.concatenate(parts, 1), layer(x), atol=1e-4))
        True
        >>> cache.states["window"].shape, cache.position[...].tolist()
        ((1, 2, 8), [[3]])
    """

    def __init__(
        self,
        batch: int,
        states: Mapping[str, MixerState],
        *,
        dtype: Any = np.float32,
        num_layers: int | None = None,
        axis_name: str = "layers",
    ) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise LayerConfigError(
                f"RecurrentCache has dtype={jnp.dtype(dtype)}, but it must be a floating dtype: "
                f"rounded states would be read by all later tokens."
            )
        count = as_size("RecurrentCache", "batch", batch)
        layers = (
            () if num_layers is None else (as_size("RecurrentCache", "num_layers", num_layers),)
        )

        def make(fill: int, state: MixerState) -> Cache[Any]:
            shape = (*layers, count, *state.shape)
            kind = dtype if state.dtype is None else state.dtype
            init = Init(jax.nn.initializers.constant(fill), shape, kind, rngs=None)
            return Cache(init, axes=(*(axis_name,) * len(layers), "batch", *state.axes))

        self.states: Any = {name: make(0, state) for name, state in states.items()}
        self.position = make(-1, MixerState((1,), ("cache",), np.int32))

    def check(self, mixer: Any, x: jax.Array, segment_ids: object) -> None:
        """Raises if it does not fit a mixer and its input.

        Args:
            mixer: The mixer.
            x: Its input.
            segment_ids: Those of the call, which a cache is not for.
        """
        name = type(mixer).__name__
        if segment_ids is not None or x.ndim != 3:
            reason = "an input without batch" if segment_ids is None else "segment ids"
            refuse_input(f"A cache of {name}", f"no call with {reason}", x, "Call it without.")

        shapes = {key: (len(x), *state.shape) for key, state in mixer.states().items()}
        if {key: variable.shape for key, variable in self.states.items()} != shapes:
            raise LayerInputError(
                f"{name} takes a cache with states of the shapes {shapes}, but was given another. "
                f"Make it with mixer.make_cache({len(x)}), one for each layer."
            )

        if jax.typeof(self.position.value).sharding.mesh.empty and explicit_entries(x) is not None:
            raise LayerInputError(
                f"The RecurrentCache is on one device, but the input is {jax.typeof(x)} over "
                f"Explicit mesh axes. Lay it out as the model: sx.shard(cache, mesh, rules)."
            )

    def read(self, name: str, dtype: Any) -> jax.Array:
        """Returns a state in a dtype.

        Args:
            name: That of the state.
            dtype: The dtype.

        Returns:
            Its array.
        """
        return self.states[name].value.astype(dtype)

    def update(self, values: Mapping[str, jax.Array], time: int, real: Any = None) -> None:
        """Writes the states behind new tokens.

        Args:
            values: The states, by name.
            time: How many tokens were read.
            real: Booleans of shape (batch, time), True for real tokens; None for all.
        """
        for name, value in values.items():
            variable = self.states[name]
            variable.value = laid_out(value.astype(variable.dtype), variable.value)

        count: Any = real if real is None else jnp.sum(real, -1, keepdims=True, dtype=np.int32)
        position = self.position.value
        self.position.value = position + (laid_out(count, position) if real is not None else time)


class MixerInput(NamedTuple):
    """The input of a mixer, the real tokens of each row first."""

    x: jax.Array  # (batch, time, features)
    real: jax.Array | None  # (batch, time), None for all
    segments: jax.Array | None  # (batch, time)
    order: jax.Array | None  # where tokens came from

    @classmethod
    def of(cls, mixer: Any, x: jax.Array, mask: Any, segment_ids: Any, cache: Any) -> MixerInput:
        """Takes the arguments of a mixer, or raises."""
        name, features = type(mixer).__name__, mixer.features
        if x.ndim not in (2, 3) or x.shape[-1] != features:
            refuse_input(
                name,
                f"an input of shape (batch, time, {features}) or (time, {features})",
                x,
                "Reshape further batch dimensions into one, or use vmap.",
            )

        if cache is not None:
            cache.check(mixer, x, segment_ids)
        x = gathered(x if x.ndim == 3 else x[None], -2)
        batch, time = x.shape[:2]

        if mask is not None:
            shapes = ((batch, time), (batch, 1, 1, time), (1, 1, time))
            shape = f"of shape {shapes[0]}"
            hint = "A recurrent mixer reads all earlier tokens; the mask says which are real."
            mask = as_mask(name, mask, shape, hint)
            if mask.shape not in shapes:
                refuse_input(name, f"a mask of booleans {shape}", mask, hint)
            mask = mask.reshape(batch, time)

        if segment_ids is not None:
            segment_ids = jnp.asarray(segment_ids)
            is_integer = jnp.issubdtype(segment_ids.dtype, np.integer)
            if not is_integer or segment_ids.size != batch * time:
                hint = "There is one for each position."
                refuse_input(
                    name, f"segment_ids, integers of shape {(batch, time)}", segment_ids, hint
                )
            segment_ids = segment_ids.reshape(batch, time)

        if mask is None:
            return cls(x, None, segment_ids, None)

        # Real tokens come first, in their order.
        order = jnp.argsort(~mask, axis=1, stable=True)
        segments = None if segment_ids is None else taken_rows(segment_ids, order)
        return cls(taken_rows(x, order), taken_rows(mask, order), segments, order)

    @property
    def places(self) -> jax.Array | None:
        """Positions within segments, None without segments."""
        return None if self.segments is None else positions_within(self.segments)

    @property
    def starts(self) -> jax.Array | None:
        """Where segments begin, None without segments."""
        places = self.places
        return None if places is None else places == 0

    def last(self, padded: jax.Array, size: int) -> jax.Array:
        """Returns the last real positions of a padded array."""
        if self.real is None:
            return padded[:, padded.shape[1] - size :]
        count = jnp.sum(self.real, axis=1, dtype=np.int32, keepdims=True)
        return taken_rows(padded, count + jnp.arange(size, dtype=np.int32)[None])

    def in_order(self, y: jax.Array) -> jax.Array:
        """Returns results at the places of the tokens."""
        return y if self.order is None else taken_rows(y, jnp.argsort(self.order, axis=1))


class RecurrentMixer(Module):
    """Base of recurrent mixers: their call and cache.

    A mixer has an attribute ``features``, says what it keeps of a row (``states``), and computes
    results and states of tokens, brought together without padding (``_mix``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.GatedDeltaNet(8, num_heads=2, head_dim=4, rngs=sx.Rngs(0))
        >>> x, real = jnp.ones((1, 4, 8)), jnp.array([[False, True, False, True]])
        >>> isinstance(layer, sx.nn.RecurrentMixer), layer(x, mask=real).shape
        (True, (1, 4, 8))
    """

    features: int

    def __call__(
        self,
        x: Any,
        *,
        mask: Any = None,
        positions: Any = None,
        segment_ids: Any = None,
        cache: RecurrentCache | None = None,
    ) -> jax.Array:
        """Mixes each position with those before it.

        Args:
            x: Shape (batch, time, features), or (time, features).
            mask: Booleans of shape (batch, time), or (batch, 1, 1, time) as for attention with a
                cache, True for real tokens; None for all. Others are passed over, wherever they
                stand: real tokens get what they get without them.
            positions: Not read: the order of tokens is all that counts. Layers of attention have
                them in the same call.
            segment_ids: Integers of shape (batch, time); no position reads another segment.
                A number that comes back after another begins a new one.
            cache: What ``make_cache`` returned: what earlier calls left, written anew.

        Returns:
            The shape of ``x``, in the compute dtype.

        Raises:
            LayerInputError: If a shape does not fit, or segments come with a cache.
        """
        x = as_array(x)
        tokens = MixerInput.of(self, x, mask, segment_ids, cache)
        y, states = self._mix(tokens, cache)
        if cache is not None:
            cache.update(states, x.shape[-2], tokens.real)
        return tokens.in_order(y).reshape(x.shape)

    def states(self) -> dict[str, MixerState]:
        """Describes the states of a row between calls.

        Returns:
            Shapes, axis names and dtypes, by name.

        Example:
            >>> import shardax as sx
            >>> sx.nn.ShortConvolution(8, rngs=sx.Rngs(0)).states()["window"].shape
            (2, 8)
        """
        raise NotImplementedError

    def make_cache(self, batch: int, **options: Any) -> RecurrentCache:
        """Makes a cache of it, lazy.

        Args:
            batch: How many rows.
            **options: As for ``RecurrentCache``.

        Returns:
            The cache.

        Example:
            >>> import shardax as sx
            >>> sx.nn.ShortConvolution(8, rngs=sx.Rngs(0)).make_cache(3).position.shape
            (3, 1)
        """
        return RecurrentCache(batch, self.states(), **options)

    def _mix(
        self, tokens: MixerInput, cache: RecurrentCache | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns results of the tokens, and the states behind them."""
        raise NotImplementedError


def taken_rows(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Takes positions of each row, (batch, time, ...) by (batch, count)."""

    def take(x: jax.Array, positions: jax.Array) -> jax.Array:
        positions = positions.reshape(*positions.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, positions, axis=1)

    return with_layout(take, explicit_sharding(x), x, positions)
