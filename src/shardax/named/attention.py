# SPDX-License-Identifier: Apache-2.0
"""Attention along a named axis.

Vaswani et al., "Attention Is All You Need", 2017. Grouped queries (Ainslie et al., 2023) are more
than keys: a further axis, the group, is on queries only, so that all of a group share a key.
Positions that read and positions that are read are one axis of the input, but two of the weights;
there, the latter is named ``"time_read"`` if the former is ``"time"``.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._transforms.errors import LayerConfigError
from shardax.named.array import NamedArray
from shardax.named.base import Axes, shown
from shardax.named.functions import dot, softmax
from shardax.named.layers import Linear, check_axes, check_input
from shardax.named.make import arange, where
from shardax.nn.linear import at_least_float32
from shardax.nn.parameters import LayerInputError


class Attention(Module):
    """Multi-head attention along one axis, to itself or to another array.

    Args:
        axes: The axes of features, of input and output.
        heads: The axis of heads, sizes by name.
        head: The axis of features within a head.
        group: The axis of queries that share a key, or None.
        along: The name of the axis whose positions read from each other.
        causal: Whether a position reads only from itself and earlier ones.
        use_bias: Whether the four projections have biases.
        dtype: Compute dtype; None promotes input and parameters. Weights are computed in float32 or
            wider.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        rngs: Random streams; ``params`` is used.

    Attributes:
        q: ``Linear`` from features to heads, group and head.
        k: ``Linear`` from features to heads and head.
        v: Likewise.
        out: ``Linear`` from heads, group and head to features.

    Raises:
        LayerConfigError: If axes are not sizes by name, or a name occurs twice among them.

    Example:
        >>> import shardax as sx
        >>> attention = sx.named.Attention(
        ...     {"embed": 16}, {"heads": 4}, {"head": 8}, causal=True, rngs=sx.Rngs(0))
        >>> attention(sx.named.ones({"batch": 2, "time": 5, "embed": 16})).axes
        {'batch': 2, 'time': 5, 'embed': 16}
        >>> attention.q.kernel.axes
        ('embed', 'heads', 'head')
    """

    def __init__(
        self,
        axes: Axes,
        heads: Axes,
        head: Axes,
        *,
        group: Axes | None = None,
        along: Any = "time",
        causal: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        rngs: Rngs | None,
    ) -> None:
        self.axes = check_axes("Attention", "axes", axes)
        self.head = check_axes("Attention", "head", head)
        self.along, self.causal = along, bool(causal)
        self._read = f"{along}_read" if isinstance(along, str) else (along, "read")
        shared = check_axes("Attention", "heads", heads)
        queries = check_axes("Attention", "group", group or {}, empty=True)
        names = (*self.axes.names, *shared.names, *queries.names, *self.head.names)
        if len(set(names)) < len(names) or {along, self._read} & set(names):
            raise LayerConfigError(
                f"Attention needs different names for features, heads, group, head and the axis "
                f"{along!r}, along which it reads {self._read!r}, but was given {names}."
            )
        keys = {**dict(shared.items()), **dict(self.head.items())}
        all_heads = {**dict(shared.items()), **dict(queries.items()), **dict(self.head.items())}
        options: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "rngs": rngs,
        }
        self.q = Linear(axes, all_heads, **options)
        self.k = Linear(axes, keys, **options)
        self.v = Linear(axes, keys, **options)
        self.out = Linear(all_heads, axes, **options)

    def __call__(
        self, x: NamedArray, context: NamedArray | None = None, *, mask: NamedArray | None = None
    ) -> NamedArray:
        """Attends.

        Args:
            x: Has the features' axes and the axis to read along: where queries come from.
            context: Likewise: where keys and values come from; None for ``x``. Other axes of the
                two meet by name.
            mask: Booleans with any of the axes of the weights: which positions may read which. The
                positions that are read have the axis ``"time_read"``, if the axis is ``"time"``.

        Returns:
            The axes of ``x``, in the compute dtype.

        Raises:
            LayerInputError: If an axis is missing, has another size, or is there already; or if the
                mask is not of booleans.
        """
        source = x if context is None else context
        for each in (x, source):
            self._check(each)
        read = {self.along: self._read}
        query, key, value = self.q(x), self.k(source).rename(read), self.v(source).rename(read)
        wide = at_least_float32(query.dtype)
        scale = 1 / math.sqrt(math.prod(self.head.sizes))
        logits = dot(query * scale, key, self.head.names, dtype=wide)
        allowed = self._allowed(logits, mask)
        if allowed is not None:
            # Not infinite: a position that may read nothing then reads all alike, and not NaN.
            logits = where(allowed, logits, -0.7 * float(jnp.finfo(wide).max))
        weights = softmax(logits, self._read).astype(value.dtype)
        return self.out(dot(weights, value, [self._read]))

    def _allowed(self, logits: NamedArray, mask: NamedArray | None) -> NamedArray | None:
        """Returns which positions may read which, or None for all."""
        if mask is not None:
            known = isinstance(mask, NamedArray) and set(mask.dims) <= set(logits.dims)
            if not known or mask.dtype != jnp.bool_:
                found = (
                    f"{mask.dtype}{shown(mask.dims, mask.shape)}"
                    if isinstance(mask, NamedArray)
                    else type(mask).__name__
                )
                raise LayerInputError(
                    f"{self._shown()} takes a mask of booleans with axes among those of the "
                    f"weights, {shown(logits.dims, logits.shape)}, but was given {found}."
                )
        if not self.causal:
            return mask
        own, other = (logits.axes[name] for name in (self.along, self._read))
        causal = arange({self.along: own}) >= arange({self._read: other})
        return causal if mask is None else causal & mask

    def _check(self, x: NamedArray) -> None:
        x = check_input(self._shown(), x, self.axes, [self._read])
        if self.along not in x.axes:
            raise LayerInputError(
                f"{self._shown()} was given {x.dtype}{shown(x.dims, x.shape)}:\n  axis "
                f"{self.along!r}: expected any size, found no such axis\nIt reads along this axis; "
                f"Attention(..., along=...) chooses another."
            )

    def _shown(self) -> str:
        return f"Attention(axes={self.axes}, along={self.along!r})"
