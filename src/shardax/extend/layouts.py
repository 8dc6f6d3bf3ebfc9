# SPDX-License-Identifier: Apache-2.0
"""Layouts of arrays over a mesh, for layers, kernels and tools.

Over *Explicit* mesh axes the sharding is part of an array's type, and JAX refuses an operation
whose result could be laid out in several ways. The first six functions find the layout from the
operands. Over Auto axes, on one device and inside ``shard_map`` types have no sharding, and these
functions return what they were given, or None.

``AnyMesh`` is a ``jax.sharding.Mesh`` or ``AbstractMesh``; ``RulesLike`` is what functions take as
rules: ``sx.Rules``, pairs or a mapping.

>>> import jax
>>> from shardax import extend
>>> mesh: extend.AnyMesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
>>> rules: extend.RulesLike = {"embed": "model"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardax._core import array_ops
from shardax._core.cross_process import format_mesh
from shardax._core.graph.paths import PyTree
from shardax.partition import assignment, explicit
from shardax.partition import mesh as meshes
from shardax.partition.mesh import AnyMesh as AnyMesh
from shardax.partition.rules import RulesLike as RulesLike
from shardax.partition.tree import inventory


def explicit_entries(array: jax.Array) -> tuple[Any, ...] | None:
    """Returns the mesh axes of each dimension in an array's type, or None.

    Args:
        array: An array or a tracer.

    Returns:
        One entry of a ``PartitionSpec`` for each dimension; None if no dimension is split over an
        Explicit mesh axis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> from shardax import extend
        >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
        >>> x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, PartitionSpec("data")))
        >>> extend.explicit_entries(x), extend.explicit_entries(jnp.ones((4, 3)))
        (('data', None), None)
    """
    return explicit.explicit_entries(array)


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Returns the sharding in an array's type, or None.

    Args:
        array: An array or a tracer.

    Returns:
        The sharding, as ``out_sharding=`` of JAX's operations takes it; None if no dimension is
        split over an Explicit mesh axis.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardax import extend
        >>> extend.explicit_sharding(jnp.ones(3)) is None
        True
    """
    return explicit.explicit_sharding(array)


def joined_sharding(parts: Iterable[tuple[jax.Array, Sequence[int]]]) -> NamedSharding | None:
    """Returns the sharding of a result that has dimensions of several operands.

    Args:
        parts: Pairs of an operand and those of its dimensions that the result has, in the order of
            the result. Where two dimensions want one mesh axis, the earlier has it.

    Returns:
        The sharding, for ``out_sharding=``; None if no operand is split over Explicit mesh axes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> from shardax import extend
        >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
        >>> x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, PartitionSpec("data")))
        >>> kernel = jnp.ones((3, 5))
        >>> extend.joined_sharding([(x, [0]), (kernel, [1])]).spec
        P('data', None)
    """
    return explicit.joined_sharding(parts)


def align(parameter: jax.Array, x: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Returns a parameter laid out like the dimensions that it meets elementwise.

    Args:
        parameter: The parameter, such as a bias.
        x: The array that it is combined with.
        dimensions: For each dimension of the parameter, that of ``x``; None for the last ones.

    Returns:
        The parameter, resharded if it was laid out otherwise over Explicit mesh axes.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardax import extend
        >>> bias, x = jnp.ones(3), jnp.ones((4, 3))
        >>> (x + extend.align(bias, x)[None]).shape
        (4, 3)
    """
    return explicit.align(parameter, x, dimensions)


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """Returns an array that every device holds whole along one dimension.

    Args:
        x: The array.
        axis: The dimension.

    Returns:
        The array, resharded if the dimension is split over Explicit mesh axes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> from shardax import extend
        >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
        >>> x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, PartitionSpec("data")))
        >>> extend.explicit_entries(extend.gathered(x, 0)) is None
        True
    """
    return explicit.gathered(x, axis)


def with_layout(
    function: Callable[..., jax.Array], out_sharding: Any, *arrays: PyTree
) -> jax.Array:
    """Runs a function whose inner layouts are left to the compiler.

    Args:
        function: A function of arrays, which runs with Explicit mesh axes as Auto.
        out_sharding: The sharding of its result, as ``explicit_sharding`` and ``joined_sharding``
            return it; None to call the function as it is.
        *arrays: Its arguments.

    Returns:
        The result.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardax import extend
        >>> x = jnp.arange(6.0)
        >>> extend.with_layout(lambda x: x[::-1], extend.explicit_sharding(x), x).tolist()
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """
    return explicit.with_layout(function, out_sharding, *arrays)


# --- rules, specs and meshes ----------------------------------------------------------------------


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a ``PartitionSpec``, major to minor.

    Args:
        entry: An axis, a tuple of axes, None, or ``PartitionSpec.UNCONSTRAINED``.

    Returns:
        The axes; ``()`` where the dimension is not split.

    Example:
        >>> from shardax import extend
        >>> extend.mesh_axes_of("data"), extend.mesh_axes_of(("data", "model"))
        (('data',), ('data', 'model'))
        >>> extend.mesh_axes_of(None)
        ()
    """
    return assignment.mesh_axes_of(entry)


def axis_names_in(names: Iterable[Any]) -> Iterator[str]:
    """Yields the logical names of an array's dimensions, those of merged dimensions one by one.

    Args:
        names: One entry for each dimension: a name, a tuple of names, None or ``UNCONSTRAINED``.

    Yields:
        The names.

    Example:
        >>> from shardax import extend
        >>> list(extend.axis_names_in(("batch", None, ("heads", "head_dim"))))
        ['batch', 'heads', 'head_dim']
    """
    return assignment.strings(tuple(names))


def mesh_text(
    sizes: AnyMesh | Mapping[str, int] | Iterable[tuple[str, int]], separator: str = ", "
) -> str:
    """Returns the sizes of mesh axes as text.

    Args:
        sizes: The size of each axis, such as ``mesh.shape``; or a mesh, whose text also has the
            types of axes other than Auto.
        separator: The text between two axes.

    Returns:
        The text, such as ``"data=2, model=4"``.

    Example:
        >>> import jax
        >>> from shardax import extend
        >>> extend.mesh_text({"data": 2, "model": 4})
        'data=2, model=4'
        >>> extend.mesh_text(jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,)))
        'data=2 (Explicit)'
    """
    if isinstance(sizes, (Mesh, AbstractMesh)):
        return format_mesh(sizes)
    return meshes.mesh_text(sizes, separator)


def byte_count(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array on a device.

    Args:
        shape: The shape.
        dtype: The dtype, also one of random keys or of fewer than eight bits.

    Returns:
        The number of bytes, rounded up.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardax import extend
        >>> extend.byte_count((3, 5), jnp.dtype("int4"))
        8
    """
    return inventory.byte_count(shape, dtype)


def require_addressable(array: Any, action: str) -> Any:
    """Returns an array whose numbers this process can read, or raises.

    Args:
        array: An array; anything else is returned as it is.
        action: What needs the numbers, for the text.

    Returns:
        The same array.

    Raises:
        ModuleError: If devices of other processes hold a part of it.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardax import extend
        >>> extend.require_addressable(jnp.ones(2), "tolist").tolist()
        [1.0, 1.0]
    """
    return array_ops.fetchable(array, action)
