# SPDX-License-Identifier: Apache-2.0
"""``Linear``: an affine map from some named axes to others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardax.core.dtypes import canonical_dtype, cast_all
from shardax.core.errors import LayerConfigError
from shardax.core.lazy import Initializer
from shardax.core.modules import Module
from shardax.core.rng import Rngs
from shardax.named.array import NamedArray
from shardax.named.functions import dot
from shardax.named.layer_parts import (
    Axes,
    AxisSizes,
    beside,
    check_axes,
    check_input,
    parameter,
    zeros,
)


class Linear(Module):
    """An affine map that puts axes in the place of others: ``dot(x, kernel, input_axes) + bias``.

    The map is the same along all other axes of the input.

    Args:
        input_axes: The axes that are summed over, sizes by name.
        output_axes: The axes that take their place.
        batch_axes: Axes that stay, along which there are as many maps: ``{"expert": 8}``.
        use_bias: Whether to add a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        rngs: Random streams; ``params`` is used.

    Attributes:
        kernel: ``Param`` whose axes are those of batch, input and output, in this order. One that
            is both an input and an output, ``"embed"``, is named ``"embed_out"`` as an output.
        bias: ``Param`` whose axes are those of batch and output, or None.

    Raises:
        LayerConfigError: If axes are not sizes by name, or a name is a batch axis and another.

    Example:
        >>> import shardax as sx
        >>> heads = sx.named.Linear({"embed": 8}, {"heads": 4, "head": 2}, rngs=sx.Rngs(0))
        >>> heads(sx.named.ones({"batch": 3, "embed": 8})).axes
        {'batch': 3, 'heads': 4, 'head': 2}
        >>> heads.kernel.axes, heads.bias.axes
        (('embed', 'heads', 'head'), ('heads', 'head'))
    """

    def __init__(
        self,
        input_axes: Axes,
        output_axes: Axes,
        *,
        batch_axes: Axes | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        rngs: Rngs | None,
    ) -> None:
        inputs = self.input_axes = check_axes("Linear", "input_axes", input_axes)
        outputs = self.output_axes = check_axes("Linear", "output_axes", output_axes, empty=True)
        batch = self.batch_axes = check_axes("Linear", "batch_axes", batch_axes or {}, empty=True)
        twice = [name for name in batch.names if name in (*inputs.names, *outputs.names)]
        if twice:
            raise LayerConfigError(
                f"{self._shown()} has the axis {twice[0]!r} among batch_axes, which stay, and "
                f"among those that it sums over or makes. It can be one of these."
            )
        if kernel_init is None:
            kernel_init = _lecun_normal(batch, inputs, outputs)
        self.kernel = parameter(
            kernel_init,
            AxisSizes(
                (*batch.names, *inputs.names, *self._out_names().values()),
                (*batch.sizes, *inputs.sizes, *outputs.sizes),
            ),
            param_dtype,
            rngs,
        )
        bias = AxisSizes((*batch.names, *outputs.names), (*batch.sizes, *outputs.sizes))
        self.bias = parameter(bias_init, bias, param_dtype, rngs) if use_bias else None
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps an input.

        Args:
            x: Has the input axes and the batch axes, and not the output axes.

        Returns:
            An array with the output axes in the place of the input axes, in the compute dtype.
            Positional dimensions stay.

        Raises:
            LayerInputError: If an axis is missing, has another size, or is there already.
        """
        inputs, batch = self.input_axes, self.batch_axes
        expected = AxisSizes((*inputs.names, *batch.names), (*inputs.sizes, *batch.sizes))
        names = self._out_names()
        made = dict.fromkeys(n for n in (*names, *names.values()) if n not in inputs.names)
        x = check_input(self._shown(), x, expected, made)
        data, kernel = cast_all(self.dtype, x.data, self.kernel.value)
        dims = (*batch.names, *inputs.names, *names.values())
        y = dot(NamedArray._make(data, x.dims), NamedArray._make(kernel, dims), inputs.names)
        y = y.rename({new: name for name, new in names.items() if new != name})
        return y if self.bias is None else y + beside(self.bias, y, y.dtype)

    def _out_names(self) -> dict[Any, Any]:
        """Returns the names of the output axes in the kernel."""
        return {
            name: (f"{name}_out" if isinstance(name, str) else (name, "out"))
            if name in self.input_axes.names
            else name
            for name in self.output_axes.names
        }

    def _shown(self) -> str:
        batch = f", batch_axes={self.batch_axes}" if self.batch_axes.names else ""
        return f"Linear(input_axes={self.input_axes}, output_axes={self.output_axes}{batch})"


def _lecun_normal(batch: AxisSizes, inputs: AxisSizes, outputs: AxisSizes) -> Initializer:
    """LeCun et al., "Efficient BackProp", 1998: variance 1 / fan-in."""
    counts = [len(each.names) for each in (batch, inputs, outputs)]
    first, second, last = counts[0], counts[0] + counts[1], sum(counts)
    return jax.nn.initializers.lecun_normal(
        in_axis=tuple(range(first, second)),
        out_axis=tuple(range(second, last)),
        batch_axis=tuple(range(first)),
    )
