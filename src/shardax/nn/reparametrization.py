# SPDX-License-Identifier: Apache-2.0
"""Weight and spectral normalization of a layer's kernels.

The layer is called with normalized copies of its kernels. Its own are left as they are, and
gradients go to them, through the normalization.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import (
    BatchStat,
    Dict,
    Init,
    Module,
    Param,
    PathContains,
    Quantized,
    Rngs,
    Variable,
    iter_modules,
    iter_variables,
    select,
)
from shardax.extend import ModuleWrapper, Path, align, explicit_sharding, with_layout
from shardax.nn import parameters
from shardax.nn.arithmetic import at_least_float32
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import Initializer

_KERNELS = PathContains("kernel")


class _NormalizedWeights(ModuleWrapper):
    """Base of wrappers around a layer with normalized kernels."""

    def __init__(self, layer, wrt: Any, epsilon: float) -> None:
        Module.__init__(self)
        name = type(self).__name__
        if not isinstance(layer, Module) or not callable(layer):
            raise LayerConfigError(
                f"{name} wraps a layer, a Module that is called, not {layer!r}. For example "
                f"sx.nn.{name}(sx.nn.Linear(in_features, out_features, rngs=rngs), rngs=rngs)."
            )
        self.body = layer
        self.wrt = wrt
        self.epsilon = parameters.check_epsilon(name, epsilon)

    def _kernels(self, least_ndim: int) -> dict[Path, Variable]:
        """Returns the normalized kernels, by path."""
        pairs = iter_variables(self.body, self.wrt)
        kernels = {path: v for path, v in pairs if v.ndim >= least_ndim}

        if any(isinstance(kernel, Quantized) for kernel in kernels.values()):
            raise LayerConfigError(
                f"{type(self).__name__} normalizes kernels in each call, and that of "
                f"{type(self.body).__name__} is quantized. Make it a parameter first: "
                f"sx.dequantize(layer)."
            )

        if not kernels:
            raise LayerConfigError(
                f"{type(self).__name__}(wrt={self.wrt!r}) normalizes no kernel of "
                f"{type(self.body).__name__}, which has none of {least_ndim} dimensions that the "
                f"filter matches. Give another: wrt=sx.Param."
            )
        return kernels

    def _call_with(
        self, values: Mapping[Path, jax.Array], args: tuple[object, ...], kwargs: dict[str, object]
    ):
        """Calls a layer with some values replaced."""
        own = dict(iter_variables(self.body))
        new = {id(own[path]): own[path].replace(value) for path, value in values.items()}
        chosen = select(self.body).at_instances_of(Variable).where(lambda _, v: id(v) in new)
        layer = chosen.apply(lambda _, v: new[id(v)])
        result = layer(*args, **kwargs)
        _hand_back(layer, self.body, new)
        return result


def _hand_back(layer: object, body: object, new: Mapping[int, Variable]) -> None:
    """Sets new attributes, such as sown values, on the layer itself."""
    # Variables are shared, so that writes to them need nothing; attributes are those of copies.
    replaced, originals = {id(variable) for variable in new.values()}, dict(iter_modules(body))
    for path, module in iter_modules(layer):
        before = vars(originals.get(path, module))
        for name, value in vars(module).items():
            is_kept = isinstance(value, (Variable, bool, int, float, str))
            if is_kept and value is not before.get(name) and id(value) not in replaced:
                setattr(originals[path], name, value)


class WeightNorm(_NormalizedWeights):
    """A layer with kernels of norm 1 times a scale, by feature.

    ``kernel * scale / sqrt(sum(kernel**2) + epsilon)``, summed over all dimensions but those of the
    features; Salimans and Kingma, "Weight Normalization", 2016.

    Args:
        layer: A Module that is called.
        feature_axes: Dimensions of a kernel that are not summed over; None for none, a single norm
            of the whole kernel.
        use_scale: Whether to multiply by a learnt scale.
        scale_init: Initializer of the scales.
        epsilon: Added to the sum of squares, against division by zero.
        wrt: Which Variables are normalized, a filter.
        param_dtype: Dtype of the scales.
        rngs: Random streams; only needed by a ``scale_init`` that draws.

    Attributes:
        body: The layer.
        scale: Scale of each kernel, a ``Dict`` of ``Param`` by path (``"kernel"``).

    Raises:
        LayerConfigError: If it is no layer, or has no kernel to normalize.

    Example:
        >>> import jax.numpy as jnp, numpy as np, shardax as sx
        >>> layer = sx.nn.WeightNorm(sx.nn.Linear(2, 2, use_bias=False, rngs=sx.Rngs(0)))
        >>> layer.body.kernel.value = np.array([[3.0, 1.0], [4.0, 0.0]], np.float32)
        >>> np.allclose(layer(jnp.eye(2)), [[0.6, 1.0], [0.8, 0.0]])
        True
    """

    _own = frozenset({"body", "wrt", "epsilon", "feature_axes", "scale"})

    def __init__(
        self,
        layer: Any,
        *,
        feature_axes: int | Sequence[int] | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = parameters.ones,
        epsilon: float = 1e-12,
        wrt: Any = _KERNELS,
        param_dtype: jax.typing.DTypeLike = np.float32,
        rngs: Rngs | None = None,
    ) -> None:
        super().__init__(layer, wrt, epsilon)

        axes: Any = feature_axes if isinstance(feature_axes, (tuple, list)) else (feature_axes,)
        self.feature_axes: tuple[int, ...] = () if feature_axes is None else tuple(axes)

        scales: dict[str, Param] = {}
        for path, kernel in self._kernels(least_ndim=1).items():
            dims = self._feature_dims(kernel)
            names = [None if kernel.axes is None else kernel.axes[dim] for dim in dims]
            shape = tuple(kernel.shape[dim] for dim in dims)
            if use_scale:
                scale = parameters.make_parameter(scale_init, shape, param_dtype, names, rngs)
                scales[_key(path)] = scale

        self.scale = Dict(scales)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer with normalized kernels."""
        values = {
            path: self._normalized(kernel, self.scale.get(_key(path)))
            for path, kernel in self._kernels(least_ndim=1).items()
        }
        return self._call_with(values, args, kwargs)

    def _feature_dims(self, kernel: Variable) -> tuple[int, ...]:
        ndim = kernel.ndim
        if not all(-ndim <= dim < ndim for dim in self.feature_axes):
            raise LayerConfigError(
                f"WeightNorm(feature_axes={self.feature_axes}) meets a kernel of shape "
                f"{kernel.shape}, which has no such dimension. Give feature_axes=-1."
            )
        return tuple(sorted(dim % ndim for dim in self.feature_axes))

    def _normalized(self, kernel: Variable, scale: Param | None) -> jax.Array:
        wide, dims = kernel.value.astype(at_least_float32(kernel.dtype)), self._feature_dims(kernel)
        summed = tuple(dim for dim in range(wide.ndim) if dim not in dims)
        squares = jnp.sum(jnp.square(wide), axis=summed, keepdims=True)
        unit = wide * jax.lax.rsqrt(squares + self.epsilon)
        if scale is not None:
            factor = align(scale.value.astype(unit.dtype), unit, dims)
            unit = unit * jax.lax.expand_dims(factor, summed)
        return unit.astype(kernel.dtype)


class SpectralNorm(_NormalizedWeights):
    """A layer with kernels of largest singular value 1.

    The singular value is approximated by power iteration, which goes on from call to call; Miyato
    et al., "Spectral Normalization for Generative Adversarial Networks", 2018. A kernel of more
    than two dimensions counts as a matrix with all but the last in front; vectors stay as they are.
    ``model.train()`` and ``model.eval()`` choose by ``use_running_average`` whether the iteration
    is kept.

    Args:
        layer: A Module that is called.
        n_steps: Steps of power iteration in each call.
        epsilon: Added to squared norms, against division by zero.
        wrt: Which Variables are normalized, a filter.
        use_running_average: Whether it starts in evaluation.
        param_dtype: Dtype of the singular vectors.
        rngs: Random streams; ``params`` is used.

    Attributes:
        body: The layer.
        u: Right singular vector of each kernel, a ``Dict`` of ``BatchStat`` by path
            (``"kernel"``).
        sigma: Largest singular value of each kernel at the last call in training, likewise.
        use_running_average: Whether the vectors stay as they are.

    Raises:
        LayerConfigError: If it is no layer, has no kernel to normalize, or a number is out of
            range.

    Example:
        >>> import jax.numpy as jnp, numpy as np, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> layer = sx.nn.SpectralNorm(sx.nn.Linear(2, 2, rngs=rngs), n_steps=20, rngs=rngs)
        >>> layer.body.kernel.value = np.array([[4.0, 0.0], [0.0, 1.0]], np.float32)
        >>> np.round(layer(jnp.eye(2)), 2).tolist(), round(float(layer.sigma["kernel"]), 2)
        ([[1.0, 0.0], [0.0, 0.25]], 4.0)
    """

    _own = frozenset({"body", "wrt", "epsilon", "n_steps", "use_running_average", "u", "sigma"})

    def __init__(
        self,
        layer: Any,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        wrt: Any = Param,
        use_running_average: bool = False,
        param_dtype: jax.typing.DTypeLike = np.float32,
        rngs: Rngs,
    ) -> None:
        super().__init__(layer, wrt, epsilon)
        self.n_steps = parameters.as_size("SpectralNorm", "n_steps", n_steps)
        self.use_running_average = bool(use_running_average)

        normal = jax.nn.initializers.normal()
        self.u = Dict(
            {
                _key(path): BatchStat(
                    Init(normal, kernel.shape[-1:], param_dtype, rngs=rngs),
                    axes=(None if kernel.axes is None else kernel.axes[-1],),
                )
                for path, kernel in self._kernels(least_ndim=2).items()
            }
        )
        self.sigma = Dict({key: BatchStat(np.ones((), param_dtype)) for key in self.u})

    def __call__(self, *args: Any, use_running_average: bool | None = None, **kwargs: Any) -> Any:
        """Calls the layer with normalized kernels, and in training keeps the iteration.

        Args:
            *args: For the layer.
            use_running_average: Overrides the attribute for this call.
            **kwargs: For the layer.

        Returns:
            What the layer returns.
        """
        fixed = self.use_running_average if use_running_average is None else use_running_average
        values: dict[Path, jax.Array] = {}
        for path, kernel in self._kernels(least_ndim=2).items():
            vector, sigma = self.u[_key(path)], self.sigma[_key(path)]
            values[path], new, value = self._normalized(kernel.value, vector.value)
            if not fixed:
                vector.value = align(new.astype(vector.dtype), vector.value)
                sigma.value = value.astype(sigma.dtype)
        return self._call_with(values, args, kwargs)

    def _normalized(
        self, kernel: jax.Array, u: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns a kernel over its largest singular value, its vector, and the value."""
        product = functools.partial(jnp.matmul, precision="highest")

        def run(kernel: jax.Array, u: jax.Array) -> Any:
            wide = kernel.astype(at_least_float32(kernel.dtype))
            matrix, v = wide.reshape(-1, wide.shape[-1]), u
            u = u.astype(wide.dtype)
            for _ in range(self.n_steps):
                v = self._unit(product(matrix, u))
                u = self._unit(product(v, matrix))
            u, v = jax.lax.stop_gradient((u, v))
            value = product(v, product(matrix, u))
            normalized = (wide / jnp.where(value == 0, 1, value)).astype(kernel.dtype)
            return normalized, u, jax.lax.stop_gradient(value)

        layout = explicit_sharding(kernel)
        if layout is None:
            return run(kernel, u)
        vector = NamedSharding(layout.mesh, PartitionSpec(layout.spec[-1]))
        layouts = layout, vector, NamedSharding(layout.mesh, PartitionSpec())
        result: Any = with_layout(run, layouts, kernel, u)
        return result

    def _unit(self, vector: jax.Array) -> jax.Array:
        return vector * jax.lax.rsqrt(jnp.sum(jnp.square(vector)) + self.epsilon)


def _key(path: Path) -> str:
    return ".".join(map(str, path))
