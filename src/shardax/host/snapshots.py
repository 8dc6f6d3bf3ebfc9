# SPDX-License-Identifier: Apache-2.0
"""Snapshots: compiled programs inside artifacts, for machines like the one that made them.

A snapshot saves loading an artifact all of compilation. It is the machine code itself: it fits one
version of JAX, one kind of device and of host, and one number of devices, which its *fingerprint*
says. JAX stores it with pickle, so reading one can run any code. Hence ``export`` writes a snapshot
only on request, and ``load`` reads it only where the caller says that the folder is to be trusted
as a program is.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax.core.errors import ArtifactDamagedError, ExportError
from shardax.host import artifact
from shardax.host.signature import Signature


def fingerprint(devices: Sequence[Any]) -> dict[str, Any]:
    """Returns what must agree between the machine that made a snapshot and the one that runs it.

    Args:
        devices: The devices that the program runs on.
    """
    client = devices[0].client
    return {
        "jax": jax.__version__,
        "platform": client.platform,
        "platform_version": client.platform_version,
        "device": devices[0].device_kind,
        "devices": [device.id for device in devices],
        "machine": platform.machine(),
        "processor": _processor(),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    """Returns a digest of what the processor can do: programs for the CPU use all of it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def check_fixed_sizes(signature: Signature) -> None:
    """Raises if a program is not for one size of its inputs.

    Raises:
        ExportError: Names the dynamic dimensions.
    """
    forms = [form for item in signature.inputs for form in item.forms]
    open_sizes = sorted({size for form in forms for size in form.shape if isinstance(size, str)})
    if open_sizes:
        raise ExportError(
            f"A snapshot is compiled for one size, and {', '.join(open_sizes)} are dynamic. Export "
            "without snapshot=True (the persistent cache keeps what is compiled for each size), or "
            "without dynamic=."
        )


def write_snapshot(folder: pathlib.Path, compiled: Any, devices: Sequence[Any]) -> dict[str, Any]:
    """Writes a compiled program into the folder of its artifact.

    Args:
        folder: The folder.
        compiled: The program, a ``jax.stages.Compiled``.
        devices: The devices that it is for.

    Returns:
        The fingerprint.

    Raises:
        ExportError: If JAX cannot store it.
    """
    from jax.experimental.serialize_executable import serialize

    try:
        data, _, _ = serialize(compiled)
    except (ValueError, NotImplementedError) as error:
        raise ExportError(f"JAX cannot store the compiled program: {error}") from error
    (folder / artifact.SNAPSHOT).write_bytes(data)
    return fingerprint(devices)


def read_snapshot(
    folder: pathlib.Path, made_on: Any, devices: Sequence[Any], trees: tuple[Any, Any]
) -> tuple[Callable[..., Any] | None, str]:
    """Reads a snapshot. This runs what is in the file.

    Args:
        folder: The artifact.
        made_on: The fingerprint in its signature, or None if it has no snapshot.
        devices: The devices to run on.
        trees: Structure of the program's (arguments, results).

    Returns:
        (the program, or None; why it is not used, or "").

    Raises:
        ArtifactDamagedError: If the file cannot be read.
    """
    from jax.experimental.serialize_executable import deserialize_and_load

    if made_on is None:
        return None, "the artifact has no snapshot"
    here = fingerprint(devices)
    other = [name for name in here if here[name] != made_on.get(name)]
    if other:
        listed = "; ".join(f"{name}: {made_on.get(name)!r} -> {here[name]!r}" for name in other)
        return None, f"it was made on another machine ({listed})"
    data = (folder / artifact.SNAPSHOT).read_bytes()
    in_tree, out_tree = trees
    try:
        return (
            deserialize_and_load(data, in_tree, out_tree, execution_devices=list(devices)),
            "",
        )
    except Exception as error:
        raise ArtifactDamagedError(
            f"The snapshot in {folder} cannot be loaded: {type(error).__name__}: {error}. Load the "
            "artifact without trust_snapshot=True, which compiles its program."
        ) from error
