# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes, arrays apart.

Objects are pickled, by cloudpickle where that is installed, so that functions and classes of a
script or a notebook travel by value. Arrays do not go through the pickle: their memory is sent as
it is (*out of band*, protocol 5). Arrays of NumPy are copied before, because the caller may write
into them while they are being sent; those of JAX cannot be written. Arrays that are laid out over a
mesh say how (``shardax._core.cross_process``), and are laid out so at the other side, if it can.

Whoever loads a pickle runs what its writer chose. That is what workers are for, and why nothing is
loaded from a peer without the key.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardax._core._jax import Tracer
from shardax._core.cross_process import PickledArray, reduced
from shardax._transforms.jit.jit import Jit
from shardax.host.errors import WorkerPickleError

Reference = Callable[[Any], Any]


def encode(value: Any, refer: Reference | None = None, watch: Reference | None = None) -> list[Any]:
    """Returns an object as buffers.

    Args:
        value: The object.
        refer: Given an object, returns what stands for it at the other side, or None if it goes
            itself.
        watch: Called with every object that is neither an array nor of a builtin type.

    Returns:
        The pickle, and the buffers of the arrays.

    Raises:
        WorkerPickleError: If a part of it cannot be pickled.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _pickler_class()(file, protocol=5, buffer_callback=buffers.append)
    pickler.refer, pickler.watch = refer, watch
    try:
        pickler.dump(value)
    except WorkerPickleError:
        raise
    except Exception as error:
        raise WorkerPickleError(
            f"{_shown(value)} cannot be sent to another process: {type(error).__name__}: "
            f"{error}.{_advice()}"
        ) from error
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def encode_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], refer: Reference | None = None
) -> list[Any]:
    """Returns the arguments of a call as buffers.

    Raises:
        WorkerPickleError: If one of them cannot be pickled; names it.
    """
    try:
        return encode((tuple(args), dict(kwargs)), refer)
    except WorkerPickleError:
        named = [(f"argument {place}", value) for place, value in enumerate(args)]
        named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        for name, value in named:
            try:
                encode(value, refer)
            except WorkerPickleError as error:
                raise WorkerPickleError(f"The {name} of a call: {error}") from error.__cause__
        raise


def decode(parts: Sequence[Any], resolve: Reference | None = None) -> Any:
    """Returns the object that ``encode`` was given. Runs code of whoever encoded it.

    Args:
        parts: The buffers.
        resolve: Returns the object that a reference stands for.
    """
    unpickler = _Unpickler(io.BytesIO(parts[0]), buffers=parts[1:])
    unpickler.resolve = resolve
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    resolve: Reference | None = None

    def persistent_load(self, pid: Any) -> Any:
        if self.resolve is None:
            raise pickle.UnpicklingError(f"a reference to {pid!r}, where none can be")
        return self.resolve(pid)


@functools.cache
def _pickler_class() -> Any:
    try:
        from cloudpickle import Pickler as CloudPickler
    except ImportError:
        base: Any = pickle.Pickler
    else:
        base = CloudPickler

    class Pickler(base):
        refer: Reference | None = None
        watch: Reference | None = None

        def persistent_id(self, obj: Any) -> Any:
            return None if self.refer is None else self.refer(obj)

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, jax.Array):
                return _reduce_jax(obj)
            if type(obj) is PickledArray:
                return _reduce_jax(obj.array)
            if type(obj) is np.ndarray and not obj.dtype.hasobject:
                return _to_numpy, _raw(np.array(obj))
            if self.watch is not None:
                self.watch(obj)
            if callable(obj) and not isinstance(obj, (type, types.FunctionType)):
                name = _import_name(obj)
                if name is not None:
                    return name
            if isinstance(obj, Jit):  # without what it has compiled
                return Jit, (obj.__wrapped__, obj.options)
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(obj)

    return Pickler


def _import_name(obj: Any) -> str | None:
    """The name under which a callable stands in its module, as jitted functions do; else None."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or module == "__main__":
        return None
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
    return name if found is obj else None


def _raw(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Memory, dtype and shape; not every dtype has a buffer, but bytes do."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return pickle.PickleBuffer(flat.view(np.uint8).data), array.dtype, array.shape


def _to_numpy(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    octets: Any = np.frombuffer(buffer, np.uint8)
    return octets.view(dtype).reshape(shape)


def _reduce_jax(array: jax.Array) -> Any:
    if isinstance(array, Tracer) or array.is_deleted() or not array.is_fully_addressable:
        return reduced(array)  # which raises
    if isinstance(array.sharding, NamedSharding):
        return reduced(array)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _to_keys, (jax.random.key_data(array), str(jax.random.key_impl(array)))
    if array.weak_type:  # JAX's own form keeps that, in band; such arrays are small
        return array.__reduce__()
    return _to_jax, _raw(np.asarray(array))


def _to_jax(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    array = jnp.asarray(_to_numpy(buffer, dtype, shape))
    if array.dtype != dtype:
        raise WorkerPickleError(
            f"An array {np.dtype(dtype).name}{list(shape)} came to a process in which JAX has no "
            f"64-bit arrays. Start the worker with x64: sx.host.Worker(configure={{'x64': True}}), "
            f"or here sx.configure(x64=True)."
        )
    return array


def _to_keys(words: jax.Array, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=impl)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"An object of the type {type(value).__qualname__}"


def _advice() -> str:
    try:
        import cloudpickle  # noqa: F401 (is it there?)
    except ImportError:
        return (
            " Without the package cloudpickle only functions that can be imported by name travel: "
            "pip install 'shardax[code]'."
        )
    return ""
