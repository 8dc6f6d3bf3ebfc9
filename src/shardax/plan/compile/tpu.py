# SPDX-License-Identifier: Apache-2.0
"""The TPU compiler, libtpu, for slices that are not there.

``jax.experimental.topologies`` describes a slice to it. A program that does not fit is an error
after less than a second; one that does comes with the most memory that is live at a time, which is
less than arguments and temporaries together.

The fast compiles of ``"screen"`` leave operations and collectives as those of ``"full"``; their
peak was 4 to 21 % lower for a decoder's training step (libtpu 0.0.42.1).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardax.plan.compile.compilers import (
    CompiledProgram,
    Compiler,
    failed,
    known_compilers,
    with_options,
)
from shardax.plan.errors import TargetError
from shardax.plan.hardware.targets import Target

_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Read for the machine's own TPU only, of which there is none; without it libtpu complains.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # Warnings to the error stream, where they are read, and nothing into files of libtpu's own.
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
}
_FAST = {"exec_time_optimization_effort": -1.0}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.I),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM", re.I),
)


class TpuCompiler(Compiler):
    """XLA with libtpu."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.label = next(each.label for each in known_compilers() if each.kind == "tpu")

    def environment(self) -> dict[str, str]:
        return super().environment() | _ENVIRONMENT

    def devices(self) -> list[Any]:
        """Returns the target's devices in libtpu's order."""
        return list(_topology(self.target).values())

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        by_place = _topology(self.target)
        places = self.target.arrangement(sizes).places
        devices = np.empty(len(places), dtype=object)
        for number, place in enumerate(places):
            devices[number] = by_place[place]
        return devices.reshape(tuple(sizes.values()))

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompiledProgram:
        start = time.perf_counter()
        try:
            compiled = with_options(lowered, _FAST if effort == "screen" else {})
        except Exception as error:  # of jaxlib's own class
            seconds = time.perf_counter() - start
            needed = requested_bytes(str(error))
            if needed is None:
                raise failed(self.label, error) from error
            return CompiledProgram(None, needed, None, _first_paragraph(str(error)), seconds)
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        peak, temporaries = int(memory.peak_memory_in_bytes), int(memory.temp_size_in_bytes)
        return CompiledProgram(compiled.as_text(), peak, temporaries, None, seconds)


def requested_bytes(message: str) -> int | None:
    """Returns the memory that a program asks for, by the message that it does not fit.

    Args:
        message: Of the error that libtpu ended with.

    Returns:
        Bytes, or None if the error is not a lack of a device's main memory.

    Example:
        >>> requested_bytes("... HLO temporaries (43.40G) exceeds available HBM (15.75G).") // 2**20
        44441
    """
    for pattern in _NEEDED:
        found = pattern.search(message)
        if found:
            return round(float(found[1]) * _UNITS[found[2].upper()])
    return None


def _first_paragraph(message: str, lines: int = 12) -> str:
    """The verdict and what follows it, without the list of every buffer."""
    return "\n".join(message.strip().splitlines()[:lines])


@functools.lru_cache(maxsize=8)
def _topology(target: Target) -> dict[tuple[int, ...], Any]:
    """The absent devices of a target by slice, coordinates and device of the chip."""
    from jax.experimental import topologies

    chip = target.hardware
    options = {
        name: value
        for name, value in chip.compiler.items()
        if name not in ("topology", "device_kind")
    }
    if "topology" not in chip.compiler:
        raise TargetError(
            f"The hardware {chip.name!r} does not say what libtpu calls it: "
            "compiler={'topology': 'v5e'}, or like='v5e'."
        )
    if len(target.topology) == 2 and (target.topology[0] < 2 or target.topology[1] < 2):
        options["chips_per_host_bounds"] = [*target.topology, 1]
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{chip.compiler['topology']}:{'x'.join(map(str, target.topology))}"
    try:
        with _for_now(_ENVIRONMENT):
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            ).devices
    except Exception as error:  # of jaxlib's own class
        raise TargetError(
            f"libtpu has no topology {name!r} for {target.text!r}: {str(error).strip()}"
        ) from error
    width = len(target.topology)
    return {_place(device, width): device for device in devices}


def _place(device: Any, width: int) -> tuple[int, ...]:
    """Where a device stands, as an arrangement says it."""
    in_slice = (*device.coords, 0, 0)[:width] if width < 3 else tuple(device.coords)
    padding = (0,) * (3 - width)
    number = getattr(device, "slice_index", 0) or 0
    return (number, *in_slice, *padding, device.core_on_chip)


@contextlib.contextmanager
def _for_now(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are not set; libtpu reads them when it is loaded."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
