# SPDX-License-Identifier: Apache-2.0
"""``eval_shape``: what a function would return, computing and changing nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.frames import Adopted, Frame, owner_here
from shardax.core.lazy import LazyValue
from shardax.core.structure import build
from shardax.transforms.lift import Graph, abstract
from shardax.transforms.once import Once


class AbstractFrame(Frame):
    """A frame that makes up values for Variables without any that were not passed in.

    Lazy values are computed and abstract ones filled as part of the trace, which allocates nothing.
    """

    __slots__ = ()

    def adopt(self, outer: Any) -> Any:
        """See ``Frame.adopt``."""
        value = outer._value
        if isinstance(value, LazyValue):
            value = value.compute()
        elif any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value)):
            value = jax.tree.map(_filled, value)
        else:
            return super().adopt(outer)
        stand_in = type(outer)._make(value, outer._metadata, self)
        self.adopted.append(Adopted(outer, stand_in, stand_in._value))
        return stand_in


def _filled(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def eval_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the shapes and dtypes of what a function would return.

    Args:
        function: A function over Modules; it may write Variables, but the given Modules are not
            changed.
        *args: Its arguments: Modules (lazy ones stay lazy), arrays, or ``jax.ShapeDtypeStruct``.
        **kwargs: Its keyword arguments.

    Returns:
        The result with ``jax.ShapeDtypeStruct`` in place of arrays. A Module in it is an abstract
        copy: it knows shapes, dtypes and axes, and counts as the model for ``partition_specs``,
        ``shardings``, ``checkpoint.restore`` and the like.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> batch = jax.ShapeDtypeStruct((8, 2), jnp.float32)
        >>> sx.eval_shape(lambda layer, x: layer(x), layer, batch).shape, layer.kernel.is_lazy
        ((8, 3), True)
    """
    once = Once("eval_shape", function, args, kwargs, AbstractFrame)

    def pure(values: Any, plain: Any, plain_named: Any) -> Any:
        return once.run(values, plain, plain_named, lambda result: (None, result))[1]

    leaving = jax.eval_shape(pure, *abstract_inputs(once))
    return once.finish_on(abstract_copy(once), leaving)


def abstract_inputs(once: Once) -> tuple[Any, ...]:
    """Returns what a call's pure function takes, lazy values as ``jax.ShapeDtypeStruct``."""
    plain, named = list(once.arguments.plain), once.arguments.plain_named
    return abstract(once.graph.leaves), plain, named


def abstract_copy(once: Once) -> Graph:
    """Returns a copy of a call's objects without arrays, for what the function did to them."""
    shapes = jax.eval_shape(lambda values: values, abstract(once.graph.leaves))
    return Graph(build(once.call.graphdef, shapes, owner_here())[0])
