# SPDX-License-Identifier: Apache-2.0
"""Variables, seen without reading them.

``variable.value`` computes a lazy value. Tools that only need shapes, layouts or identity look at
the value as it is stored.
"""

from __future__ import annotations

from typing import Any

from shardax._core.init import lazy
from shardax._core.module import Module
from shardax._core.variable import Variable


def stored_value(variable: Variable[Any]) -> Any:
    """Returns the value of a Variable as it is stored: a lazy one is not computed.

    Args:
        variable: A Variable.

    Returns:
        The array, the ``LazyValue``, the ``jax.ShapeDtypeStruct``, the ``jax.Ref`` or the pytree of
        these, in the transform around.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> layer = sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0))
        >>> isinstance(extend.stored_value(layer.kernel), extend.LazyValue)
        True
        >>> _ = layer.kernel.value
        >>> isinstance(extend.stored_value(layer.kernel), extend.LazyValue)
        False
    """
    return variable._here()._value


def attributes_of(module: Module) -> dict[str, Any]:
    """Returns the attributes of a Module by name, those that are arrays as Variables.

    A Module keeps an array that is assigned to it in a Variable of its own, which ``vars`` does not
    show: ``module.name`` is the array.

    Args:
        module: The Module.

    Returns:
        The attributes, those that are arrays last.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class Scale(sx.Module):
        ...     def __init__(self):
        ...         self.factor = jnp.ones(2)
        ...         self.name = "scale"
        >>> attributes = extend.attributes_of(Scale())
        >>> list(attributes), attributes["factor"].value.tolist()
        (['name', 'factor'], [1.0, 1.0])
    """
    return {**vars(module), **module._array_attributes}


def check_rngs(rngs: Any) -> Any:
    """Returns ``rngs`` if it is an ``Rngs`` or None.

    Args:
        rngs: What a layer was given.

    Returns:
        The same object.

    Raises:
        ModuleError: If it is something else, such as a seed or a key; the text has the code that
            makes an ``Rngs`` of it.

    Example:
        >>> from shardax import extend
        >>> extend.check_rngs(0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shardax.errors.ModuleError: rngs takes random streams by name, an sx.Rngs, but was given ...
    """
    return lazy.check_rngs(rngs)
