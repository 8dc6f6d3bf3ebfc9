# SPDX-License-Identifier: Apache-2.0
"""Pickling of arrays, meshes and decorated functions for other processes.

Pickle writes a JAX array as its numbers, and so forgets how it was laid out; a mesh it cannot write
at all, since a device belongs to one machine. So an array is written as its numbers, on the host,
and its sharding, which is a mesh and a spec; and a mesh as the names, sizes and types of its axes,
and the numbers of its devices. It is restored as the first of these meshes that exists:

1. the one that the reader gave (``PickledArray.landing_on``);
2. one in scope with the same axes, names and sizes;
3. one of the same devices, which is the same mesh in the process that wrote it;
4. one of as many of the devices that there are.

Otherwise the machine is smaller than the one that wrote. Then the mesh becomes an ``AbstractMesh``,
which still has names and sizes; arrays that were laid out over it are whole, on the default device;
and a warning says so.
"""

from __future__ import annotations

import contextlib
import copyreg
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardax._core import errors
from shardax._core._jax import Tracer, is_prng_key, jit_options
from shardax._core.errors import warn
from shardax._core.graph.paths import PyTree

_landing: ContextVar[Mesh | None] = ContextVar("landing", default=None)
# The stand-in of each array that is pickled now, by ``id`` of the array.
_stand_ins: WeakValueDictionary[int, PickledArray] = WeakValueDictionary()


# --- arrays ---------------------------------------------------------------------------------------


class PickledArray:
    """Stand-in for an array in a pickle, read back as the array with its layout.

    A class that holds arrays has stand-ins for them in what its ``__reduce__`` or ``__getstate__``
    returns.

    Args:
        array: The array.

    Attributes:
        array: The array.

    Example:
        >>> import pickle, jax, jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from shardax import extend
        >>> mesh = jax.make_mesh((2,), ("data",))
        >>> x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("data")))
        >>> pickled = pickle.dumps(extend.PickledArray.in_tree({"x": x}))
        >>> pickle.loads(pickled)["x"].sharding.spec
        P('data',)
    """

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: jax.Array) -> None:
        self.array = array

    @classmethod
    def of(cls, array: jax.Array) -> PickledArray:
        """Returns the one stand-in of an array, so pickles share it."""
        # The stand-in keeps the array alive, so no other array has its id.
        return _stand_ins.setdefault(id(array), cls(array))

    @classmethod
    def in_tree(cls, tree: PyTree) -> PyTree:
        """Returns a tree with stand-ins for its arrays.

        Args:
            tree: What is to be pickled.
        """

        def stand_in(leaf: object) -> object:
            return cls.of(leaf) if isinstance(leaf, jax.Array) else leaf

        return jax.tree.map(stand_in, tree)

    @staticmethod
    @contextlib.contextmanager
    def landing_on(mesh: Mesh | None) -> Generator[None]:
        """Sets the mesh over which arrays are laid out that are read in the block.

        Args:
            mesh: The mesh; None to find the one that each array had.
        """
        token = _landing.set(mesh)
        try:
            yield
        finally:
            _landing.reset(token)

    def __reduce__(self) -> Any:
        return reduced(self.array)

    def __deepcopy__(self, memo: dict[int, Any]) -> jax.Array:
        return jnp.copy(self.array)


def reduced(array: jax.Array) -> tuple[Any, ...]:
    """Returns how to make an array again, for ``__reduce__``."""
    if isinstance(array, Tracer):
        raise errors.PickleWriteError(
            f"Cannot pickle {jax.typeof(array)}: it is being traced, so it has no numbers yet. "
            f"Return it from the compiled function and pickle the result."
        )
    if array.is_deleted():
        raise errors.PickleWriteError(
            f"Cannot pickle the array {jax.typeof(array)}: it was deleted, usually by being "
            f"donated to a compiled function. Pickle what that function returned."
        )
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise errors.PickleWriteError(
            f"Cannot pickle the array {jax.typeof(array)}: parts of it are on devices of other "
            f"processes. Write a checkpoint from all of them, sx.train.checkpoint.save; or "
            f"gather it first, sx.distributed.gather(array)."
        )

    sharding = array.sharding if isinstance(array.sharding, NamedSharding) else None
    dtype = str(array.dtype)
    impl = None
    if is_prng_key(array):
        impl = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)

    # JAX's own way keeps a weak type, which NumPy does not know, and no sharding.
    make, arguments = np.asarray, (np.asarray(array),)
    if sharding is None or array.weak_type:
        make, arguments = array.__reduce__()
    return _restored_array, (make, arguments, sharding, impl, dtype)


def _restored_array(
    make: Callable[..., jax.Array | np.ndarray],
    arguments: tuple[Any, ...],
    sharding: NamedSharding | None,
    impl: str | None,
    dtype: str,
) -> jax.Array:
    """Restores an array, with its layout if the mesh exists here."""
    with jax.ensure_compile_time_eval():  # also where something is being traced
        array = make(*arguments)
        if impl is not None:
            array = jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
        array = _laid_out(array, sharding)

    if str(array.dtype) != dtype:
        warn(
            f"An array {dtype}{list(array.shape)} was read as {array.dtype}: this process has no "
            f"64-bit numbers. Begin it with sx.configure(x64=True) to keep them.",
            errors.PrecisionLostWarning,
        )
    return array


def _laid_out(array: jax.Array | np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """Returns an array over the devices of a sharding, if there are such devices."""
    if sharding is None or not isinstance(sharding.mesh, Mesh):
        return jnp.asarray(array)  # the warning came with the mesh

    try:
        sharding.shard_shape(array.shape)
    except ValueError:
        _warn(
            f"An array {array.dtype}{list(array.shape)} was laid out as {sharding.spec}, "
            f"which does not divide over the mesh {format_mesh(sharding.mesh)}."
        )
        return jnp.asarray(array)
    return jax.device_put(array, sharding)


def _warn(problem: str) -> None:
    warn(
        f"{problem} It is whole, on the default device. Lay the model out over a mesh that is "
        f"here: sx.shard(model, mesh, rules).",
        errors.LayoutLostWarning,
    )


# --- meshes ---------------------------------------------------------------------------------------


def format_mesh(mesh: Any) -> str:
    """Formats the axes of a mesh: sizes, and types other than Auto."""
    texts = []
    for (axis, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True):
        other = "" if kind is jax.sharding.AxisType.Auto else f" ({kind.name})"
        texts.append(f"{axis}={size}{other}")
    return ", ".join(texts)


def _reduce_mesh(mesh: Mesh) -> Any:
    devices = tuple((device.platform, device.id) for device in mesh.devices.flat)
    kinds = tuple(kind.name for kind in mesh.axis_types)
    return restored_mesh, (mesh.axis_names, mesh.devices.shape, kinds, devices)


def restored_mesh(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    kinds: tuple[str, ...],
    devices: tuple[tuple[str, int], ...],
) -> Mesh | AbstractMesh:
    """Returns the mesh that stands here for one that was pickled."""
    # 1. The mesh of the reader.
    reader_mesh = _landing.get()
    if reader_mesh is not None:
        return _with_axes(reader_mesh, names)

    # 2. One in scope with the same axes. While it traces, JAX does not name its devices.
    mesh_in_scope = jax.sharding.get_abstract_mesh()
    axes_in_scope = mesh_in_scope.axis_names, mesh_in_scope.axis_sizes
    if not mesh_in_scope.empty and axes_in_scope == (names, sizes):
        with contextlib.suppress(ValueError):
            return jax.sharding.get_mesh()

    # 3. One of the same devices.
    axis_types = tuple(AxisType[kind] for kind in kinds)
    devices_here = {(device.platform, device.id): device for device in jax.devices()}
    if all(device in devices_here for device in devices):
        grid = np.array([devices_here[device] for device in devices]).reshape(sizes)
        return Mesh(grid, names, axis_types=axis_types)

    # 4. One of as many devices.
    if math.prod(sizes) <= len(devices_here):
        return jax.make_mesh(sizes, names, axis_types=axis_types)

    mesh = AbstractMesh(sizes, names, axis_types=axis_types)
    _warn(
        f"What was pickled was laid out over the mesh {format_mesh(mesh)} of {math.prod(sizes)} "
        f"devices; here there are {len(devices_here)}."
    )
    return mesh


def _with_axes(mesh: Mesh, names: Sequence[str]) -> Mesh:
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise errors.PickleReadError(
            f"What was pickled was laid out over mesh axes {tuple(names)}, but the mesh given has "
            f"{mesh.axis_names} and no {', '.join(missing)}. Load it without a mesh, and lay it "
            f"out by rules: sx.shard(model, mesh, rules)."
        )
    return mesh


# --- functions ------------------------------------------------------------------------------------


class PickledByName:
    """Base of decorated functions that are pickled by their name, where they have one.

    Attributes:
        function: The function inside.

    Example:
        >>> import functools, pickle, sys, types
        >>> from shardax import extend
        >>> class Logged(extend.PickledByName):
        ...     def __init__(self, function):
        ...         functools.update_wrapper(self, function)
        ...         self.function = function
        >>> def double(x):
        ...     return 2 * x
        >>> double.__module__ = "functions"
        >>> functions = sys.modules["functions"] = types.ModuleType("functions")
        >>> functions.double = Logged(double)
        >>> pickle.loads(pickle.dumps(functions.double)) is functions.double
        True
    """

    # The function inside has that name too, but is not what the name means. What they run by is in
    # slots: ``functools.wraps`` may write all attributes of the instance, which are only shown.

    __slots__ = ()
    function: Callable[..., PyTree]  # the function inside

    def __reduce_ex__(self, protocol: Any) -> Any:
        return name_of(self) or super().__reduce_ex__(protocol)


def name_of(item: object) -> str | None:
    """Returns the name of something in its module, or None."""
    # A script (__main__) is no such module: another process has another one.
    name, module = getattr(item, "__qualname__", None), getattr(item, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or module == "__main__":
        return None

    named_object = sys.modules.get(module)
    for attribute in name.split("."):
        named_object = getattr(named_object, attribute, None)
    return name if named_object is item else None


def _reduce_rule(function: jax.custom_jvp[Any] | jax.custom_vjp[Any]) -> Any:
    name = name_of(function)
    if name is not None:
        return name
    state = dict(vars(function))
    arguments = (type(function), state.pop("fun"), state.pop("nondiff_argnums"))
    return _restored_rule, arguments, state


def _restored_rule(
    rule_type: Callable[..., Any], function: Callable[..., Any], nondiff_argnums: Sequence[int]
) -> Any:
    return rule_type(function, nondiff_argnums)


def _reduce_jitted(function: Any) -> Any:
    # JAX's own state of one leaves out what it traces with.
    name = name_of(function)
    return name or (_restored_jitted, (function.__wrapped__, jit_options(function)))


def _restored_jitted(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(function, **options)


# Pickle asks this table before the class, for these types and no others. They are types that it
# fails on; how JAX's arrays are pickled outside of shardax's own classes stays as it is.
copyreg.pickle(Mesh, _reduce_mesh)
copyreg.pickle(type(jax.jit(_restored_rule)), _reduce_jitted)
copyreg.pickle(jax.custom_jvp, _reduce_rule)
copyreg.pickle(jax.custom_vjp, _reduce_rule)
