# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layer, an activation with a parameter, and layers in sequence.

Gated (Shazeer, "GLU Variants Improve Transformer", 2020): ``down(activation(gate(x)) * up(x))``;
with the activation silu this is SwiGLU. Not gated: ``down(activation(up(x)))``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Init, Module, Param, Rngs
from shardax._parallel.kernels import against_gated_unit, gated_unit, is_choosing, rows_split
from shardax.extend import ModuleWrapper, align
from shardax.nn.arithmetic import as_array, cast_all, result_dtype, take_features, uses_tokamax
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.linear import Linear
from shardax.nn.parameters import Initializer, as_axes, as_size, canonical_dtype, zeros
from shardax.nn.stack import Stack

Activation = str | Callable[[Any], Any]


class MLP(Module):
    """Feed-forward layer with one hidden layer, gated by default.

    Args:
        features: Size of the last dimension of the input.
        hidden_features: Size of the hidden layer.
        out_features: Size of the output; None for ``features``.
        activation: Name of a function of ``jax.nn``, such as ``"silu"`` or ``"gelu"``; or a
            function. A name can be pickled; some functions cannot.
        gated: Whether the hidden layer is gated.
        use_bias: Whether the linear maps have biases.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        bias_init: Initializer of the biases.
        axes: Axis names of the features and of the hidden layer.
        precision: As for ``Linear``, of every linear map.
        preferred_element_type: As for ``Linear``, of every linear map.
        rngs: Random streams; ``params`` is used.

    Attributes:
        gate: ``Linear`` from features to hidden, or None if not gated.
        up: ``Linear`` from features to hidden.
        down: ``Linear`` from hidden to output.

    Raises:
        LayerConfigError: If a size is not positive or the activation is unknown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> mlp = sx.nn.MLP(4, 8, rngs=sx.Rngs(0))
        >>> mlp(jnp.ones((2, 4))).shape, mlp.up.kernel.axes, mlp.down.kernel.axes
        ((2, 4), ('embed', 'mlp'), ('mlp', 'embed'))
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        out_features: int | None = None,
        activation: Activation = "silu",
        gated: bool = True,
        use_bias: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        axes: Sequence[str | None] = ("embed", "mlp"),
        precision: object = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        rngs: Rngs | None,
    ) -> None:
        features = as_size("MLP", "features", features)
        hidden = as_size("MLP", "hidden_features", hidden_features)
        outputs = features if out_features is None else as_size("MLP", "out_features", out_features)
        outer, inner = as_axes("MLP", "axis names", axes, 2)
        find_activation(activation)

        linear = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            precision=precision,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
        )
        self.gate = linear(features, hidden, kernel_axes=(outer, inner)) if gated else None
        self.up = linear(features, hidden, kernel_axes=(outer, inner))
        self.down = linear(hidden, outputs, kernel_axes=(inner, outer))
        self.activation = activation

    def __call__(self, x: Any, *, out_sharding: Any = None) -> jax.Array:
        """Maps an input.

        Args:
            x: Shape (..., features).
            out_sharding: Sharding of the result over Explicit mesh axes; by default each dimension
                that remains keeps its own.

        Returns:
            Shape (..., out_features), in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``.
        """
        activate = find_activation(self.activation)
        if self.gate is not None and is_choosing("gated"):
            hidden = self._by_kernel(x, activate)
            if hidden is not None:
                return self.down(hidden, out_sharding=out_sharding)

        gate = None if self.gate is None else activate(self.gate(x))
        hidden = activate(self.up(x)) if gate is None else gate * self.up(x)
        return self.down(hidden, out_sharding=out_sharding)

    def _by_kernel(self, x: object, activate: Callable[[Any], Any]) -> jax.Array | None:
        """Returns the hidden layer by another library's kernel, if one is taken."""
        maps: list[Any] = [self.gate, self.up]
        options = [type(each).__name__ for each in maps if type(each) is not Linear]
        for option in ("bias", "precision", "preferred_element_type"):
            if any(getattr(each, option, None) is not None for each in maps):
                options.append(option)

        x, names, kernels = as_array(x), None, []
        if not options:
            kernels, names = [each.kernel.value for each in maps], self.up.kernel.axes
            x = take_features("MLP", x, kernels[0].shape[:1])
            x, *kernels = cast_all(self.up.dtype, x, *kernels)

        split = rows_split(x, names[0] if names else None)
        reason = functools.partial(
            against_gated_unit, x, self.activation, list(dict.fromkeys(options)), split
        )
        if not uses_tokamax("gated", "MLP", x, reason):
            return None
        return gated_unit(x, kernels[0], kernels[1], activate, split, names)


class PReLU(Module):
    """Rectified linear unit with a learnt slope below zero.

    ``x`` where it is at least 0, else ``negative_slope * x``; He et al., "Delving Deep into
    Rectifiers", 2015.

    Args:
        negative_slope_init: What the slope begins with.
        features: Size of the last dimension, for a slope of each feature; None for a single slope.
        dtype: Compute dtype, that of the result; None promotes input and slope.
        param_dtype: Parameter dtype.
        axes: Axis name of the slopes of features.

    Attributes:
        negative_slope: ``Param`` of no dimensions, or of shape (features,).

    Raises:
        LayerConfigError: If ``features`` is not positive.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.PReLU(0.5)(jnp.array([-4.0, 3.0])).tolist()
        [-2.0, 3.0]
    """

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        features: int | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        axes: Sequence[str | None] = ("embed",),
    ) -> None:
        shape = () if features is None else (as_size("PReLU", "features", features),)
        names = () if features is None else as_axes("PReLU", "axis names", axes, 1)
        init = jax.nn.initializers.constant(negative_slope_init)
        self.negative_slope = Param(Init(init, shape, param_dtype), axes=names)
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: Any) -> jax.Array:
        """Scales negative values.

        Args:
            x: Any shape; with ``features`` (..., features).

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``.
        """
        slope = self.negative_slope.value
        x = take_features("PReLU", x, slope.shape) if slope.ndim else as_array(x)
        x, slope = cast_all(result_dtype(self.dtype, x, slope), x, slope)
        slope = jax.lax.expand_dims(align(slope, x), range(x.ndim - slope.ndim))
        return jnp.where(x >= 0, x, slope * x)


def find_activation(activation: Activation, layer: str = "MLP") -> Callable[[Any], Any]:
    """Returns a function of ``jax.nn`` by name, or the function itself."""
    function = getattr(jax.nn, activation, None) if isinstance(activation, str) else activation
    if not callable(function):
        raise LayerConfigError(
            f"{layer} has activation={activation!r}, which is neither a function nor the name of "
            f"one in jax.nn, such as 'silu', 'gelu' or 'relu'."
        )
    return function


class Sequential(Module):
    """Layers called one after the other.

    Each is called on the result of the one before. Further arguments of the call, such as a mask or
    positions, are given by name and reach every layer that has a parameter of that name; of a
    ``Sequential``, ``Stack``, ``Jitted`` or ``Remat`` among the layers, what is in it decides. The
    ``mask`` of a ``LayerNorm``, ``RMSNorm`` or ``GroupNorm`` is given by calling it.

    Args:
        *layers: Modules or functions, called with one argument and those that they take by name.

    Attributes:
        layers: The layers, a tracked list: append to it, replace items, slice it.

    Raises:
        LayerConfigError: If something that cannot be called is among them.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> model = sx.nn.Sequential(
        ...     sx.nn.Linear(2, 8, rngs=rngs), jax.nn.relu, sx.nn.Linear(8, 1, rngs=rngs))
        >>> model(jnp.ones((5, 2))).shape, model.layers[2].kernel.shape
        ((5, 1), (8, 1))
        >>> scaled = sx.nn.Sequential(jax.nn.relu, lambda x, scale: scale * x)
        >>> scaled(jnp.array([-1.0, 2.0]), scale=10).tolist()
        [0.0, 20.0]
    """

    def __init__(self, *layers: Callable[[Any], Any]) -> None:
        for position, layer in enumerate(layers):
            if not callable(layer):
                hint = " Write Sequential(*layers)." if isinstance(layer, (list, tuple)) else ""
                raise LayerConfigError(
                    f"Sequential calls its layers, but the one at {position} is {layer!r} of type "
                    f"{type(layer).__name__}, which cannot be called.{hint}"
                )
        self.layers = list(layers)

    def __call__(self, x: Any, *args: Any, **side_inputs: Any) -> Any:
        """Returns the result of the last layer; of no layers, the input.

        Args:
            x: Given to the first layer.
            *args: None: further arguments are given by name.
            **side_inputs: Each is given to all layers that have a parameter of that name.

        Returns:
            What the last layer returns.

        Raises:
            LayerInputError: If a further argument is given by position, or no layer takes it (None
                may be given to none).
        """
        if not args and not side_inputs:
            for layer in self.layers:
                x = layer(x)
            return x

        names = [_side_inputs(layer, side_inputs) for layer in self.layers]
        passed = {name for name, value in side_inputs.items() if value is not None}
        unknown = sorted(passed.difference(*names))

        if args or unknown:
            problem = f"no layer takes {', '.join(unknown)}" if unknown else "they have no names"
            raise LayerInputError(
                f"Sequential gives further arguments to the layers that have a parameter of that "
                f"name, but {problem}. Its layers are "
                f"{', '.join(getattr(x, '__name__', type(x).__name__) for x in self.layers)}. "
                f"Call it as model(x, mask=mask), where a layer is called as layer(x, mask=mask)."
            )

        for layer, accepted in zip(self.layers, names, strict=True):
            x = layer(x, **{name: side_inputs[name] for name in accepted})
        return x


def _parameters(layer: Callable[..., object]) -> list[inspect.Parameter]:
    """Returns the parameters of a layer's call; of one without a signature, none."""
    try:
        return list(inspect.signature(layer).parameters.values())
    except (TypeError, ValueError):  # as of some functions written in C
        return []


def _side_inputs(layer: Callable[..., object], names: Collection[str]) -> set[str]:
    """Returns the names taken by a layer besides its input."""
    if isinstance(layer, Sequential):
        return {name for inner in layer.layers for name in _side_inputs(inner, names)}
    if isinstance(layer, (ModuleWrapper, Stack)):
        body = layer.stacked if isinstance(layer, Stack) else layer.body
        return set() if body is None else _side_inputs(body, names)

    names = set(names).difference(getattr(type(layer), "direct_inputs", ()))
    parameters = _parameters(layer)[1:]

    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(names)
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return {
        parameter.name for parameter in parameters if parameter.kind not in unnamed
    }.intersection(names)
