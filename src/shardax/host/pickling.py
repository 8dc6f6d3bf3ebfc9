# SPDX-License-Identifier: Apache-2.0
"""Pickling models for another process of the same program.

``dumps`` writes a trailer behind the pickle: JSON with its checksum and the versions that wrote it,
which ``loads`` checks before it reads anything. ``pickle.loads`` stops where the pickle ends, so it
reads these bytes too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import json
import os
import pickle
import struct
import sys
import sysconfig
import time
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from shardax import graphdef, iter_variables
from shardax.errors import PickleReadError, PickleWriteError
from shardax.extend import Object, Path, PickledArray, PyTree, format_path, path_of_keys

_MARK = b"shardax pickle 1"
_TAIL = struct.Struct(f"<QI{len(_MARK)}s")  # length and checksum of the trailer's JSON
_INSTALLED = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PROGRAMS = ("__main__", "__mp_main__")  # their source travels by value
# File systems count time in steps, of up to two seconds: files that are younger are read again.
_SETTLED_NANOSECONDS = 10 * 10**9
Sources = dict[str, tuple[str, str]]  # file and digest, by module
_ADVICE = (
    "Define it at the top level of a module, so that it has a name; or install cloudpickle, "
    "which writes the code itself (by_value=True); or keep the numbers alone: "
    "sx.train.checkpoint.save, or sx.state(model)."
)


def dumps(tree: object, *, by_value: bool | None = None) -> bytes:
    """Pickles a model, or any tree of models, arrays and shardings.

    Arrays go as their numbers, gathered on the host, with the sharding they had: the names of mesh
    axes, not devices. Lazy Variables are materialised. Sharing is kept.

    Args:
        tree: What to write. All in one call: what two pickles share is two things when read.
        by_value: Whether functions and classes without an importable name are written as code, by
            cloudpickle. None: if cloudpickle is installed.

    Returns:
        The bytes, for ``loads``. They are no key for a cache: equal things need not have equal
        bytes.

    Raises:
        PickleWriteError: If something cannot be pickled (a compiled function, an open file, a
            traced or deleted array); names its path.

    Example:
        >>> import jax, shardax as sx
        >>> model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> twin = sx.host.loads(sx.host.dumps(model))
        >>> type(twin).__name__, bool((twin.kernel == model.kernel).all())
        ('Linear', True)
    """
    target = io.BytesIO()
    pickler = _pickler(by_value)(target, protocol=5)

    try:
        pickler.dump(tree)
    except Exception as error:
        raise _explained(tree, by_value, error) from error

    with target.getbuffer() as pickled:
        trailer = _trailer(pickled, pickler.wrote_code)
    target.write(trailer)
    return target.getvalue()


def loads(data: bytes | bytearray | memoryview, mesh: Mesh | None = None) -> PyTree:
    """Reads bytes of ``dumps``; reading runs code, so trust their source.

    Arrays are laid out as they were, if the mesh that they were laid out over is here: one in scope
    with the same axes, or one of as many devices. Otherwise they are whole, on the default device,
    and a warning says so.

    Args:
        data: The bytes.
        mesh: A mesh to lay arrays out over instead, by the names of its axes; sizes may differ.

    Returns:
        The tree.

    Raises:
        PickleReadError: If the bytes are damaged or not of ``dumps``, were written with code by
            another Python version, need a module or name that is not here, or were laid out over
            axes that ``mesh`` does not have.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
        >>> weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        >>> data = sx.host.dumps(sx.shard(weight, mesh, {"mlp": "model"}))
        >>> sx.host.loads(data).sharding.spec
        P(None, 'model')
    """
    view = memoryview(data)
    written = _checked_trailer(view)

    running = list(sys.version_info[:2])
    if written["code"] and written["python"] != running:
        wrote, reads = (".".join(map(str, version)) for version in (written["python"], running))
        raise PickleReadError(
            f"This pickle holds code, as Python {wrote} runs it, and this is Python {reads}. Read "
            f"it there; or write it with by_value=False, which tells what goes as code."
        )

    try:
        with PickledArray.landing_on(mesh):
            return pickle.loads(view[: written["bytes"]])
    except PickleReadError:
        raise
    except (ImportError, AttributeError) as error:
        raise PickleReadError(
            f"This pickle refers to something by its name that is not here: {error}. It was "
            f"written by shardax {written['shardax']} and JAX {written['jax']}. Make the module "
            f"importable that defines it, under the name that it had."
        ) from error


# --- the trailer ---


def _trailer(pickled: memoryview, code: bool) -> bytes:
    facts = {
        "bytes": len(pickled),
        "crc32": zlib.crc32(pickled),
        "shardax": importlib.metadata.version("shardax"),
        "jax": jax.__version__,
        "python": list(sys.version_info[:2]),
        "code": code,  # whether there is code by value
    }
    text = json.dumps(facts).encode()
    return text + _TAIL.pack(len(text), zlib.crc32(text), _MARK)


def _checked_trailer(view: memoryview) -> dict[str, Any]:
    """Read the trailer, and check the bytes against it."""
    length, checksum, mark = 0, 0, b""
    if len(view) >= _TAIL.size:
        length, checksum, mark = _TAIL.unpack(view[-_TAIL.size :])

    start = len(view) - _TAIL.size - length
    if mark != _MARK or start < 0:
        raise PickleReadError(
            "These bytes do not end as those of sx.host.dumps do: they were cut short, or written "
            "by something else (pickle.loads reads pickles of all kinds)."
        )

    text = view[start : -_TAIL.size]
    facts = json.loads(bytes(text)) if zlib.crc32(text) == checksum else None
    if facts is None or (facts["bytes"], facts["crc32"]) != (start, zlib.crc32(view[:start])):
        raise PickleReadError(
            "This pickle is not what was written: its size or a checksum differ. Get the bytes "
            "again; reading these could do anything."
        )
    return facts


# --- writing ---


def _pickler(by_value: bool | None) -> type[Any]:
    """Return the class of pickler: of names only, or also of code."""
    if by_value is not False:
        try:
            import cloudpickle
        except ImportError as error:
            if by_value:
                raise PickleWriteError(
                    "by_value=True writes code by cloudpickle, which is not installed: "
                    "pip install cloudpickle."
                ) from error
        else:
            return _with_arrays(cloudpickle.Pickler)
    return _with_arrays(pickle.Pickler)


def _with_arrays(base: type[Any]) -> type[Any]:
    class TreePickler(base):
        """Write arrays with their layouts, and record code by value."""

        wrote_code = False

        def reducer_override(self, obj):
            if isinstance(obj, jax.Array):
                return PickledArray.of(obj).__reduce__()
            if isinstance(obj, jax.Device):
                return _device, (obj.platform, obj.id)
            parent_reducer = getattr(super(), "reducer_override", None)
            reduction = NotImplemented if parent_reducer is None else parent_reducer(obj)
            if reduction is not NotImplemented and isinstance(obj, (type, types.FunctionType)):
                self.wrote_code = True
            return reduction

    return TreePickler


def _device(platform: str, number: int):
    """Return the device here in place of a pickled one."""
    matching = [d for d in jax.devices() if (d.platform, d.id) == (platform, number)]
    return matching[0] if matching else jax.devices()[0]


# --- errors ---


def _explained(tree: object, by_value: bool | None, error: Exception) -> PickleWriteError:
    """Return the error naming the first value impossible to write."""
    for path, value in _places(tree):
        try:
            _pickler(by_value)(io.BytesIO(), protocol=5).dump(value)
        except Exception as refusal:  # noqa: BLE001 (whatever a class raises when it is pickled)
            name = getattr(value, "__qualname__", None) or type(value).__name__
            text = str(refusal)
            advice = "" if isinstance(refusal, PickleWriteError) else f" {_ADVICE}"
            return PickleWriteError(
                f"Cannot pickle {name!r} at {format_path(path)}: {text.rstrip('.')}.{advice}"
            )
    return PickleWriteError(f"Cannot pickle this {type(tree).__name__}: {error}. {_ADVICE}")


def _places(tree: object) -> Iterator[tuple[Path, Any]]:
    """Yield the separately pickled parts of a tree, with paths."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Object))
    for key_path, leaf in pairs:
        place = path_of_keys(key_path)
        if isinstance(leaf, Object):
            parts = (*iter_variables(leaf), *graphdef(leaf).static_parts())
            yield from (((*place, *path), value) for path, value in parts)
        else:
            yield place, leaf


# --- sources ---


def own_sources(modules: Mapping[str, Any]) -> Sources:
    """Source file and digest of each module outside of installed packages."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in modules.items()}
    return {
        name: (file, digest_of_file(file))
        for name, file in files.items()
        if file.endswith(".py") and not file.startswith(_INSTALLED) and name not in _PROGRAMS
    }


def digest_of_file(file: str) -> str:
    """The digest of what a file holds, or "missing"."""
    try:
        status = os.stat(file)
        times = (status.st_mtime_ns, status.st_ctime_ns)  # the first can be set, the other cannot
        is_settled = time.time_ns() - max(times) > _SETTLED_NANOSECONDS
        return (_digest_at if is_settled else _digest_at.__wrapped__)(file, status.st_ino, *times)
    except OSError:
        return "missing"


@functools.lru_cache(4096)
def _digest_at(file: str, *identity: int) -> str:
    with open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()
