# SPDX-License-Identifier: Apache-2.0
"""Notes behind pickles: what can be known of one without reading it.

The bytes are the pickle, the note (JSON), the note's length and checksum, and a mark. The note has
the size and the checksum of the pickle, the versions that wrote it, whether it holds code by value,
and for every array that was laid out over a mesh its path, axis names and sharding.
"""

from __future__ import annotations

import importlib.metadata
import json
import struct
import sys
import zlib
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardax.core.errors import PickleReadError
from shardax.core.metadata import Metadata
from shardax.core.paths import Path
from shardax.core.state import Origin, State
from shardax.core.variables import Variable
from shardax.partition.survey import Survey

_MARK = b"shardax pickle 1"
_TAIL = struct.Struct(f"<QI{len(_MARK)}s")
_NOT_OURS = (
    "These bytes do not end as those of sx.host.dumps do: they were cut short, or written by "
    "something else (pickle.loads reads pickles of all kinds)."
)


def note_of(pickled: memoryview, layout: list[dict[str, Any]], code: bool) -> bytes:
    """Returns the note that goes behind a pickle.

    Args:
        pickled: The pickle.
        layout: What ``written_layout`` returned.
        code: Whether it holds code by value.
    """
    note = {
        "bytes": len(pickled),
        "crc32": zlib.crc32(pickled),
        "shardax": importlib.metadata.version("shardax"),
        "jax": jax.__version__,
        "python": list(sys.version_info[:2]),
        "code": code,
        "layout": layout,
    }
    pickled.release()
    text = json.dumps(note).encode()
    return text + _TAIL.pack(len(text), zlib.crc32(text), _MARK)


def read_note(data: Any) -> tuple[dict[str, Any], int]:
    """Returns the note behind a pickle, and the size of the pickle.

    Args:
        data: The bytes of both.

    Raises:
        PickleReadError: If they are not what was written.
    """
    view = memoryview(data)
    if len(view) < _TAIL.size:
        raise PickleReadError(_NOT_OURS)
    length, checksum, mark = _TAIL.unpack(view[-_TAIL.size :])
    start = len(view) - _TAIL.size - length
    if mark != _MARK or start < 0:
        raise PickleReadError(_NOT_OURS)
    text = view[start : -_TAIL.size]
    note = json.loads(bytes(text)) if zlib.crc32(text) == checksum else None
    if note is None or (note["bytes"], note["crc32"]) != (start, zlib.crc32(view[:start])):
        raise PickleReadError(
            "This pickle is not what was written: its size or a checksum differ. Get the bytes "
            "again; reading these could do anything."
        )
    return note, start


def written_layout(tree: Any) -> list[dict[str, Any]]:
    """Returns, as JSON can hold it, how the arrays of a tree are laid out over meshes."""
    rows = []
    for slot, arrays in Survey(tree).arrays():
        for info, array in zip(slot.arrays, arrays, strict=True):
            sharding = getattr(array, "sharding", None)
            if isinstance(sharding, NamedSharding):
                rows.append(_row(info.path, slot.names_of(info), sharding))
    return rows


def layout_in(note: dict[str, Any]) -> State:
    """Returns the layout that a note tells of, as a State of shardings."""
    values, origins = {}, {}
    for row in note["layout"]:
        path = tuple(row["path"])
        types = tuple(AxisType[kind] for kind in row["types"])
        mesh = AbstractMesh(tuple(row["sizes"]), tuple(row["mesh"]), axis_types=types)
        spec = PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in row["spec"]))
        values[path] = NamedSharding(mesh, spec)
        axes = None if row["axes"] is None else tuple(row["axes"])
        origins[path] = Origin(Variable, Metadata(axes, {}))
    return State.from_flat(values, origins)


def _row(path: Path, axes: Any, sharding: NamedSharding) -> dict[str, Any]:
    mesh = sharding.mesh
    return {
        "path": [_step(step) for step in path],
        "axes": None if axes is None else [None if name is None else str(name) for name in axes],
        "mesh": list(mesh.axis_names),
        "sizes": list(mesh.shape.values()),
        "types": [kind.name for kind in mesh.axis_types],
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec],
    }


def _step(step: Any) -> str | int:
    return step if isinstance(step, (str, int)) and not isinstance(step, bool) else repr(step)
