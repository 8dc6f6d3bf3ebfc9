# SPDX-License-Identifier: Apache-2.0
"""The types of Variables: what a Variable's value is for.

Filters, slots and transforms go by the type: ``grad`` differentiates ``Param``, ``pop`` takes
``Intermediate`` away. A type adds no methods to ``Variable``; two types say that their values may
be boxes. Users add types in the same way.
"""

from __future__ import annotations

from typing import TypeVar

from shardax._core.variable import Variable

T = TypeVar("T")


class Param(Variable[T]):
    """A trained parameter; what ``grad`` and ``Optimizer`` select by default.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> w = sx.Param(jnp.float32(3))
        >>> float(sx.grad(lambda w: w**2)(w))
        6.0
    """


class BatchStat(Variable[T]):
    """Running statistics of normalisation layers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> mean = sx.BatchStat(jnp.zeros(2))
        >>> mean[...] = 0.9 * mean + 0.1 * jnp.ones(2)
        >>> mean.value.tolist()
        [0.10000000149011612, 0.10000000149011612]
    """


class Quantized(Variable[T]):
    """Numbers or scales of a quantized kernel, which no optimizer trains.

    Example:
        >>> import shardax as sx
        >>> layer = sx.quantize(sx.nn.Linear(4, 2, rngs=sx.Rngs(0)), "int8")
        >>> sorted(sx.state(layer, sx.Quantized).flat())
        [('kernel', 'scale'), ('kernel', 'values')]
    """


class AmaxHistory(Variable[T]):
    """Largest magnitudes of an operand in earlier calls, for scales of fp8.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(4, 2, precision="fp8-delayed", rngs=sx.Rngs(0))
        >>> y = layer(jnp.array([1.0, -3.0, 0.5, 2.0]))
        >>> float(layer.precision.input[0])
        3.0
    """


class Cache(Variable[T]):
    """Values kept between calls, such as keys and values of attention.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> seen = sx.Cache(jnp.zeros(4, jnp.int32))
        >>> seen[1] = 7
        >>> seen.value.tolist()
        [0, 7, 0, 0]
    """


class Intermediate(Variable[T]):
    """Values recorded while a model runs (``Module.sow``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Square(sx.Module):
        ...     def __call__(self, x):
        ...         self.sow("seen", x)
        ...         return x**2
        >>> square = Square()
        >>> _ = square(jnp.float32(3))
        >>> [float(x) for x in sx.pop(square, sx.Intermediate)["seen"]]
        [3.0]
    """


class Perturbation(Variable[T]):
    """Zeros added to activations so that their gradients can be read (``Module.perturb``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> zero = sx.Perturbation(jnp.zeros(()))
        >>> float(sx.grad(lambda zero: (3 + zero) ** 2, wrt=sx.Perturbation)(zero))
        6.0
    """


class RngState(Variable[T]):
    """Key and counter of a random stream.

    Example:
        >>> import shardax as sx
        >>> [path for path, _ in sx.iter_variables(sx.Rngs(dropout=0), sx.RngState)]
        [('dropout', 'key'), ('dropout', 'count')]
    """


class OptState(Variable[T]):
    """State of an optimizer.

    Example:
        >>> import jax.numpy as jnp, optax, shardax as sx
        >>> optimizer = sx.train.Optimizer(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), optax.sgd(0.1))
        >>> [path for path, _ in sx.iter_variables(optimizer, sx.OptState)]
        [('step',)]
    """

    _holds_boxes = True  # optax maps over boxes, so its states are in them


class MetricState(Variable[T]):
    """Running sums of a metric.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.MetricState(jnp.float32(0))
        >>> total += 2
        >>> float(total)
        2.0
    """


class ArrayAttribute(Variable[T]):
    """Hidden Variable behind an array in an attribute."""

    _kind = "array"  # the class is ours alone
    _holds_boxes = True  # an attribute is what was assigned to it

    # Plain arrays have no identity; this gives the place one, so that arrays in attributes are
    # read, written, lifted and saved exactly as Variables are.
