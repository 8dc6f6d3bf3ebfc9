# SPDX-License-Identifier: Apache-2.0
"""Function calls as bytes, and tables of functions by digest.

Objects are pickled, by cloudpickle where that is installed, with arrays out of band. What the
caller may write into while it is being sent, such as arrays of NumPy, is copied first.

A function's *key* is a digest of what travels, closures and defaults included, and of the source
files of the modules it refers to. Equal keys mean equal functions. The reverse does not hold, which
costs a compilation and never a wrong result. *Own modules* are those with a source file outside of
the standard library and of installed packages: a process that has imported one cannot notice that
its file has changed, so calls say which sources they mean, those of when they are made.

Loading a pickle runs code of whoever wrote it: nothing is loaded from an unauthenticated peer.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardax.extend import PickledArray, is_prng_key
from shardax.host.errors import WorkerError
from shardax.host.pickling import Sources, digest_of_file, own_sources

Reference = Callable[[Any], Any]


# --- objects as buffers ---


def encode(value: Any, refer: Reference | None = None, watch: Reference | None = None) -> list[Any]:
    """Encode an object as a pickle and the buffers of its arrays."""
    # `refer` returns what stands for an object in the other process, or None if it goes itself;
    # `watch` sees every object that is neither an array nor of a builtin type.
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _pickler_class()(file, protocol=5, buffer_callback=buffers.append)
    pickler.refer, pickler.watch = refer, watch

    try:
        pickler.dump(value)
    except WorkerError:
        raise
    except Exception as error:
        text = repr(value)
        title = text if len(text) <= 80 else f"An object of the type {type(value).__qualname__}"
        advice = ""
        if _pickler_class().__base__ is pickle.Pickler:
            advice = (
                " Without the package cloudpickle only functions that can be imported by name "
                "travel: pip install 'shardax[code]'."
            )
        raise WorkerError(
            f"{title} cannot be sent to another process: {type(error).__name__}: {error}.{advice}"
        ) from error

    # Bytes and arrays, not memoryviews: before Python 3.12.5 the garbage collector crashes on a
    # reference cycle with one of those, as exceptions and their tracebacks make.
    return [file.getvalue(), *map(_octets, buffers)]


def _octets(buffer: pickle.PickleBuffer) -> np.ndarray:
    """Returns the bytes of a buffer that nobody writes into any more."""
    raw = buffer.raw()
    octets = np.frombuffer(raw, np.uint8)
    return octets if raw.readonly else octets.copy()


def encode_arguments(
    args: Sequence[object], kwargs: Mapping[str, object], refer: Reference | None = None
) -> list[Any]:
    """Encode the arguments of a call; an error names the argument."""
    try:
        return encode((tuple(args), dict(kwargs)), refer)
    except WorkerError:
        named = [(f"argument {position}", value) for position, value in enumerate(args)]
        named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        for name, value in named:
            try:
                encode(value, refer)
            except WorkerError as error:
                raise WorkerError(f"The {name} of a call: {error}") from error.__cause__
        raise


def decode(parts: Sequence[Any], resolve: Reference | None = None) -> Any:
    """Decode the parts of ``encode``; runs code of their writer."""
    unpickler = _Unpickler(io.BytesIO(parts[0]), buffers=parts[1:])
    unpickler.resolve = resolve
    return unpickler.load()


def check_size(parts: Sequence[Any], limit: int) -> None:
    """Check the size of a call or a result."""
    total = sum(memoryview(part).nbytes for part in parts)
    if total > limit:
        raise WorkerError(
            f"What a call takes to a worker, or brings back, is {total} bytes, and the limit is "
            f"{limit}. Start the worker with a higher one, sx.host.Worker(max_message={total}), or "
            f"keep large values in it: worker.put(value), worker.request(f, keep=True)."
        )


class _Unpickler(pickle.Unpickler):
    resolve: Reference | None = None

    def persistent_load(self, pid: object):
        if self.resolve is None:
            raise pickle.UnpicklingError(f"a reference to {pid!r}, where none can be")
        return self.resolve(pid)


@functools.cache
def _pickler_class():
    base: Any = pickle.Pickler
    with contextlib.suppress(ImportError):
        import cloudpickle

        base = cloudpickle.Pickler

    class CallPickler(base):
        refer: Reference | None = None
        watch: Reference | None = None

        def persistent_id(self, obj: object):
            return None if self.refer is None else self.refer(obj)

        def reducer_override(self, obj: object):
            if isinstance(obj, jax.Array):
                return _reduce_jax(obj)
            if type(obj) is PickledArray:
                return _reduce_jax(obj.array)
            if type(obj) is np.ndarray and not obj.dtype.hasobject:
                # ``_octets`` copies what can be written. Others may write what this array reads.
                return _to_numpy, _raw(obj if obj.flags.writeable else np.array(obj))
            if self.watch is not None:
                self.watch(obj)
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(obj)

    return CallPickler


def _raw(array: np.ndarray) -> tuple[Any, ...]:
    # Not every dtype has a buffer, but bytes do.
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return pickle.PickleBuffer(octets.data), array.dtype, array.shape


def _to_numpy(buffer, dtype: jax.typing.DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
    octets = np.frombuffer(buffer, np.uint8)
    return octets.view(dtype).reshape(shape)


def _reduce_jax(array: jax.Array):
    if isinstance(array, Tracer) or array.is_deleted() or not array.is_fully_addressable:
        return PickledArray.of(array).__reduce__()  # which raises
    if is_prng_key(array) or array.weak_type or isinstance(array.sharding, NamedSharding):
        return PickledArray.of(array).__reduce__()
    return _to_jax, _raw(np.asarray(array))


def _to_jax(buffer, dtype: jax.typing.DTypeLike, shape: tuple[int, ...]) -> jax.Array:
    array = jnp.asarray(_to_numpy(buffer, dtype, shape))
    if array.dtype != dtype:
        raise WorkerError(
            f"An array {np.dtype(dtype).name}{list(shape)} came to a process in which JAX has no "
            f"64-bit arrays. Start the worker with x64: sx.host.Worker(configure={{'x64': True}}), "
            f"or here sx.configure(x64=True)."
        )
    return array


# --- functions and their keys ---


class FunctionForm(NamedTuple):
    """An encoded function."""

    name: str  # for messages
    key: str
    modules: dict[str, str]  # digest of the source of each own module that it refers to
    sources: dict[str, str]  # digest of each own source file of its process; no part of the key
    parts: list[Any]


def describe(function: Callable[..., object]) -> FunctionForm:
    """Encode a function, with its key."""
    module_names: set[str] = set()

    def note_module(obj: object) -> None:
        if isinstance(obj, types.ModuleType):
            module_names.add(obj.__name__)
        elif isinstance(name := getattr(obj, "__module__", None), str):
            module_names.add(name)

    parts = encode(function, watch=note_module)
    own = own_sources(sys.modules.copy())  # other threads may import meanwhile
    modules = {name: own[name][1] for name in sorted(module_names & own.keys())}

    digest = hashlib.sha256(repr(modules).encode())
    for part in parts:
        digest.update(part)
    return FunctionForm(name_of(function), digest.hexdigest(), modules, dict(own.values()), parts)


def name_of(function: object) -> str:
    """The name of a function in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


@dataclass
class KeptFunction:
    """A function in a table, with its compilations by JAX."""

    name: str
    call: Callable[..., Any]
    calls: int = 0


class FunctionTable:
    """Functions of a process, least recently used first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: collections.OrderedDict[str, KeptFunction] = collections.OrderedDict()
        self._lock = threading.RLock()
        self._own: Sources = {}  # with the digests of when they were imported
        self._seen: set[str] = set()
        self.record_modules()

    def record_modules(self) -> None:
        """Record the own modules imported since the last time."""
        with self._lock:  # executors of threads run calls beside each other
            modules = sys.modules.copy()  # other threads may import meanwhile
            self._own |= own_sources({name: modules[name] for name in modules.keys() - self._seen})
            self._seen |= modules.keys()

    def _check_modules(self, form: FunctionForm) -> None:
        """Check imported modules against the sources that a call means."""
        for name, (file, imported) in self._own.items():
            # The caller's digest comes first: the file may have changed after the call was made.
            meant = form.sources.get(file) or digest_of_file(file)
            if not imported == meant == form.modules.get(name, meant):
                raise WorkerError(
                    f"The module {name} that the worker has imported ({file}) is not that of the "
                    f"call: its source was changed between them, or it is another file. Start the "
                    f"worker's process anew, without its functions and values, worker.restart(), "
                    f"and make the call again."
                )

    def find(self, form: FunctionForm) -> KeptFunction:
        """Look up a function, decoding it unless it is kept already."""
        with self._lock:
            function = self._kept.get(form.key)
            if function is None:
                function = KeptFunction(form.name, decode(form.parts))
                self.record_modules()

            self._check_modules(form)

            self._kept[form.key] = function
            self._kept.move_to_end(form.key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
            function.calls += 1
            return function

    def run(self, head: bytes, parts: Sequence[object], resolve: Reference | None = None) -> Any:
        """Run a packed call."""
        name, key, modules, sources, count = pickle.loads(head)
        form = FunctionForm(name, key, modules, sources, list(parts[:count]))
        function = self.find(form).call

        try:
            args, kwargs = decode(parts[count:], resolve)  # which may import modules, too
            return function(*args, **kwargs)
        finally:
            self.record_modules()

    def summary(self) -> list[dict[str, Any]]:
        """Name and calls of each function, the latest last."""
        with self._lock:
            return [{"name": f.name, "calls": f.calls} for f in self._kept.values()]


# --- packed calls ---


def pack(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    refer: Reference | None = None,
) -> tuple[bytes, list[Any]]:
    """Encode a call as a head and buffers."""
    form = describe(function)
    head = pickle.dumps((*form[:-1], len(form.parts)))
    return head, [*form.parts, *encode_arguments(args, kwargs, refer)]


@functools.cache
def _functions_here() -> FunctionTable:
    return FunctionTable(128)


def run_packed(head: bytes, *parts: bytes) -> tuple[bytes, ...]:
    """Run a packed call in any process, and encode its result."""
    return tuple(map(bytes, encode(_functions_here().run(head, parts))))
