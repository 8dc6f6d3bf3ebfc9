# SPDX-License-Identifier: Apache-2.0
"""Known hardware: public figures with their sources, registered hardware, and TOML files.

Where a vendor's sheet gives a chip's links in both directions together, it is divided by the
number of links and by two. Usable memory of TPUs is what libtpu 0.0.42.1 itself names as available
when a program does not fit. That of GPUs is the 75 % that JAX takes unless
``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise: what CUDA, NCCL and cuDNN keep for themselves
comes out of the rest, and is not counted. Latencies are orders of magnitude, not measurements; they
matter for arrays of kilobytes.

A TOML file has the attributes of ``Hardware``, or those in which it differs from one known::

    like = "h100"
    name = "h100-roce"
    network_bandwidth = 2.5e10

    [sources]
    network_bandwidth = "measured with nccl-tests"
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardax.partition.findings import did_you_mean
from shardax.plan.errors import HardwareError, PlanFileError
from shardax.plan.hardware.hardware import Hardware

_COUNTS = (
    *("memory_bytes", "usable_bytes", "torus_dimensions", "wraparound", "node_size"),
    "devices_per_chip",
)
_GIB = 2**30
_BOOK = "jax-ml.github.io/scaling-book"
_CLOUD = "docs.cloud.google.com/tpu/docs"
_LIBTPU = "named as available by libtpu 0.0.42.1 when a program does not fit"
_F32_ON_TPU = "f32 at JAX's default precision multiplies in bf16 on TPU"
_F32_ON_GPU = "f32 at JAX's default precision multiplies in TF32 on GPU"
_XLA = "github.com/openxla/xla, xla/backends/gpu/target_config/specs"
_JAX_POOL = "75 % of the memory, which JAX takes by default (docs.jax.dev, GPU memory allocation)"
_ASSUMED = "an order of magnitude, not a measurement"

_FLAT_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SOLID_SHAPES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


def _tpu(
    name: str,
    *,
    bf16: float,
    narrow: dict[str, float],
    memory: float,  # GiB
    usable: float,
    bandwidth: float,
    link: float,
    network: float,
    pod: tuple[int, ...],
    sources: dict[str, str],
    topology: dict[str, str],
    devices_per_chip: int = 1,
    chip_bandwidth: float = 0.0,
) -> Hardware:
    flat = len(pod) == 2
    return Hardware(
        name=name,
        kind="tpu",
        peak_flops={"bf16": bf16, "f32": bf16, **narrow},
        memory_bytes=int(memory * _GIB),
        usable_bytes=int(usable * _GIB),
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        network_bandwidth=network,
        torus_dimensions=len(pod),
        wraparound=16 if flat else 4,
        devices_per_chip=devices_per_chip,
        chip_bandwidth=chip_bandwidth,
        link_latency=1e-6,
        network_latency=1e-5,
        shapes=_FLAT_SHAPES if flat else _SOLID_SHAPES,
        pod=pod,
        compiler=topology,
        sources={
            "usable_bytes": _LIBTPU,
            "wraparound": f"{_BOOK}/tpus: a full axis of 16, or multiples of 4 in three dimensions",
            "link_latency": f"{_BOOK}/sharding: about 1 us a hop",
            "network_latency": _ASSUMED,
            "shapes": f"{_CLOUD}, slice sizes",
            **sources,
        },
    )


_V4 = _tpu(
    "v4",
    bf16=2.75e14,
    narrow={"s8": 2.75e14},
    memory=32,
    usable=30.75,
    bandwidth=1.2e12,
    link=4.5e10,
    network=6.25e9,
    pod=(16, 16, 16),
    topology={"topology": "v4", "chip_config_name": "megacore", "device_kind": "TPU v4"},
    sources={
        "peak_flops": f"{_BOOK}/tpus, table of chips; {_F32_ON_TPU}",
        "memory_bytes": f"{_BOOK}/tpus, table of chips",
        "memory_bandwidth": f"{_BOOK}/tpus, table of chips",
        "link_bandwidth": f"{_BOOK}/tpus, table of links",
        "network_bandwidth": f"{_BOOK}/tpus: 25 GB/s a host, of 4 chips",
    },
)

_V5E = _tpu(
    "v5e",
    bf16=1.97e14,
    narrow={"s8": 3.94e14},
    memory=16,
    usable=15.75,
    bandwidth=8.1e11,
    link=4.5e10,
    network=3.125e9,
    pod=(16, 16),
    topology={"topology": "v5e", "device_kind": "TPU v5 lite"},
    sources={
        "peak_flops": f"{_CLOUD}/v5e: 197 TFLOP/s in bf16; {_BOOK}/tpus for int8; {_F32_ON_TPU}",
        "memory_bytes": f"{_CLOUD}/v5e: 16 GB",
        "memory_bandwidth": f"{_BOOK}/tpus, table of chips; {_CLOUD}/v5e says 819 GB/s",
        "link_bandwidth": f"{_BOOK}: 45 GB/s; {_CLOUD}/v5e says 400 GB/s a chip, 50 a link",
        "network_bandwidth": f"{_CLOUD}/v5e: 6.4 Tbit/s for a pod of 256 chips",
    },
)

_V5P = _tpu(
    "v5p",
    bf16=4.59e14,
    narrow={"s8": 9.18e14},
    memory=96,
    usable=95.74,
    bandwidth=2.8e12,
    link=9e10,
    network=6.25e9,
    pod=(16, 20, 28),
    topology={"topology": "v5p", "device_kind": "TPU v5"},
    sources={
        "peak_flops": f"{_CLOUD}/tpu7x, comparison: 459 TFLOP/s in bf16; {_BOOK}/tpus for int8; "
        f"{_F32_ON_TPU}",
        "memory_bytes": f"{_BOOK}/tpus, table of chips; {_CLOUD}/tpu7x says 95 GiB",
        "memory_bandwidth": f"{_BOOK}/tpus, table of chips; {_CLOUD}/tpu7x says 2765 GB/s",
        "link_bandwidth": f"{_BOOK}: 90 GB/s; {_CLOUD}/tpu7x says 1200 GB/s a chip, 100 a link",
        "network_bandwidth": f"{_CLOUD}/tpu7x, comparison: 50 Gbit/s a chip",
    },
)

_V6E = _tpu(
    "v6e",
    bf16=9.18e14,
    narrow={"s8": 1.836e15},
    memory=32,
    usable=31.25,
    bandwidth=1.6e12,
    link=9e10,
    network=1.25e10,
    pod=(16, 16),
    topology={"topology": "v6e", "device_kind": "TPU v6 lite"},
    sources={
        "peak_flops": f"{_CLOUD}/tpu7x, comparison: 918 TFLOP/s in bf16; {_BOOK}/tpus for int8; "
        f"{_F32_ON_TPU}",
        "memory_bytes": f"{_CLOUD}/tpu7x, comparison: 32 GiB",
        "memory_bandwidth": f"{_BOOK}/tpus, table of chips; {_CLOUD}/tpu7x says 1638 GB/s",
        "link_bandwidth": f"{_BOOK}: 90 GB/s; {_CLOUD}/tpu7x says 800 GB/s a chip, 100 a link",
        "network_bandwidth": f"{_CLOUD}/tpu7x, comparison: 100 Gbit/s a chip",
    },
)

_V7X = _tpu(
    "v7x",
    bf16=2.307e15 / 2,
    narrow={"f8": 4.614e15 / 2},
    memory=96,
    usable=94.75,
    bandwidth=7.38e12 / 2,
    link=5e10,
    network=6.25e9,
    pod=(16, 24, 24),
    devices_per_chip=2,
    chip_bandwidth=6e11,
    topology={"topology": "tpu7x", "device_kind": "TPU7x"},
    sources={
        "peak_flops": f"{_CLOUD}/tpu7x: 2307 TFLOP/s a chip in bf16, 4614 in fp8, two devices a "
        f"chip; {_F32_ON_TPU}",
        "memory_bytes": f"{_CLOUD}/tpu7x: 192 GiB a chip, two devices",
        "memory_bandwidth": f"{_CLOUD}/tpu7x: 7380 GB/s a chip, two devices",
        "link_bandwidth": f"{_CLOUD}/tpu7x: 1200 GB/s a chip, so 100 a link and direction, shared "
        "by two devices",
        "chip_bandwidth": f"{_CLOUD}/tpu7x: six times a link",
        "network_bandwidth": f"{_CLOUD}/tpu7x: 100 Gbit/s a chip, two devices",
    },
)


def _gpu(
    name: str,
    *,
    dense: dict[str, float],
    memory: int,  # bytes, as the driver reports it
    bandwidth: float,
    nvlink: float,
    network: float,
    description: dict[str, float | str],
    sheet: str,
    system: str,
) -> Hardware:
    return Hardware(
        name=name,
        kind="gpu",
        peak_flops=dense,
        memory_bytes=memory,
        usable_bytes=int(memory * 0.75),
        memory_bandwidth=bandwidth,
        link_bandwidth=nvlink,
        network_bandwidth=network,
        node_size=8,
        link_latency=1e-6,
        network_latency=5e-6,
        compiler=description,
        sources={
            "peak_flops": f"{sheet}, dense; {_F32_ON_GPU}",
            "memory_bytes": f"{_XLA}, as the driver reports it",
            "usable_bytes": _JAX_POOL,
            "memory_bandwidth": sheet,
            "link_bandwidth": f"{sheet}: NVLink, half of what is said for both directions",
            "network_bandwidth": f"{system}: one adapter a GPU",
            "link_latency": _ASSUMED,
            "network_latency": _ASSUMED,
            "compiler": _XLA,
        },
    )


_AMPERE: dict[str, float | str] = {
    "major": 8,
    "core_count": 108,
    "fpus_per_core": 64,
    "shared_memory_per_core": 167936,
    "shared_memory_per_block_optin": 166912,
    "l2_cache_size": 41943040,
    "clock_rate_ghz": 1.41,
}
_HOPPER: dict[str, float | str] = {
    "major": 9,
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
}
_BLACKWELL: dict[str, float | str] = {
    "major": 10,
    "core_count": 148,
    "fpus_per_core": 128,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "l2_cache_size": 132644864,
    "clock_rate_ghz": 1.965,
}
_AMPERE_FLOPS = {"bf16": 3.12e14, "f16": 3.12e14, "f32": 1.56e14, "s8": 6.24e14}
_HOPPER_FLOPS = {
    "bf16": 9.89e14,
    "f16": 9.89e14,
    "f32": 4.945e14,
    "s8": 1.979e15,
    "f8": 1.979e15,
}

_A100_40 = _gpu(
    "a100-40",
    dense=_AMPERE_FLOPS,
    memory=42331013120,
    bandwidth=1.555e12,
    nvlink=3e11,
    network=2.5e10,
    description=_AMPERE | {"description": "NVIDIA A100-SXM4-40GB"},
    sheet="NVIDIA A100 data sheet (SXM)",
    system="NVIDIA DGX A100 data sheet, 200 Gbit/s",
)
_A100_80 = _gpu(
    "a100-80",
    dense=_AMPERE_FLOPS,
    memory=85100068864,
    bandwidth=2.039e12,
    nvlink=3e11,
    network=2.5e10,
    description=_AMPERE | {"description": "NVIDIA A100-SXM4-80GB"},
    sheet="NVIDIA A100 data sheet (SXM)",
    system="NVIDIA DGX A100 data sheet, 200 Gbit/s",
)
_H100 = _gpu(
    "h100",
    dense=_HOPPER_FLOPS,
    memory=84942979072,
    bandwidth=3.35e12,
    nvlink=4.5e11,
    network=5e10,
    description=_HOPPER | {"description": "NVIDIA H100 80GB HBM3"},
    sheet="NVIDIA H100 data sheet (SXM)",
    system="NVIDIA DGX H100 data sheet, 400 Gbit/s",
)
_H200 = _gpu(
    "h200",
    dense=_HOPPER_FLOPS,
    memory=151397597184,
    bandwidth=4.8e12,
    nvlink=4.5e11,
    network=5e10,
    description=_HOPPER | {"description": "NVIDIA H200 141GB HBM3e"},
    sheet="NVIDIA H200 data sheet (SXM)",
    system="NVIDIA DGX H200 data sheet, 400 Gbit/s",
)
_B200 = _gpu(
    "b200",
    dense={"bf16": 2.25e15, "f16": 2.25e15, "f32": 1.1e15, "s8": 4.5e15, "f8": 4.5e15},
    memory=191514411008,
    bandwidth=8e12,
    nvlink=9e11,
    network=5e10,
    description=_BLACKWELL | {"description": "NVIDIA B200"},
    sheet="NVIDIA Blackwell architecture brief (HGX B200)",
    system="NVIDIA DGX B200 data sheet, 400 Gbit/s",
)

_ONE_MACHINE = (
    "measured once, 8 virtual devices that shared two cores; plan.calibrate_cpu() measures this one"
)
_CPU = Hardware(
    name="cpu",
    kind="cpu",
    peak_flops={"f32": 4.9e10},
    memory_bytes=16 * _GIB,
    usable_bytes=16 * _GIB,
    memory_bandwidth=8.6e8,
    link_bandwidth=3.5e9,
    network_bandwidth=3.5e9,
    sources=dict.fromkeys(
        ("peak_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth"), _ONE_MACHINE
    )
    | {
        "memory_bytes": "a placeholder; a target of CPU devices takes this machine's memory",
        "usable_bytes": "a placeholder; a target of CPU devices takes this machine's memory",
    },
)

# By name; ``register_hardware`` adds to it.
HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (_V4, _V5E, _V5P, _V6E, _V7X, _A100_40, _A100_80, _H100, _H200, _B200, _CPU)
}
_BUILT_IN = frozenset(HARDWARE)
_OTHER_NAMES = {
    "a100": "a100-80",
    "tpu7x": "v7x",
    "ironwood": "v7x",
    "trillium": "v6e",
    "v5litepod": "v5e",
}


def find_hardware(name: str) -> Hardware:
    """Returns hardware by its name.

    Args:
        name: Such as ``"v5e"`` or ``"h100"``.

    Raises:
        HardwareError: There is none of that name; lists those that there are.

    Example:
        >>> from shardax import plan
        >>> plan.find_hardware("h100").link_bandwidth
        450000000000.0
    """
    found = HARDWARE.get(_OTHER_NAMES.get(name.lower(), name.lower())) or HARDWARE.get(name)
    if found is None:
        known = ", ".join(HARDWARE)
        raise HardwareError(
            f"There is no hardware {name!r}.{did_you_mean(name, HARDWARE)} Known are {known}. "
            "Your own: plan.register_hardware(plan.find_hardware('v5e').like(name='mine', ...)), "
            "or a TOML file, as docs/hardware.md says."
        )
    return found


def register_hardware(new: Hardware) -> Hardware:
    """Makes hardware known by its name, to targets of this process.

    A target holds its hardware, so it needs no registration in other processes.

    Args:
        new: The hardware. One that is known under the name is replaced if it was registered; those
            of the table are not.

    Returns:
        The hardware.

    Raises:
        HardwareError: The name is one of the table.

    Example:
        >>> from shardax import plan
        >>> mine = plan.find_hardware("h100").like(name="h100-roce", network_bandwidth=2.5e10)
        >>> _ = plan.register_hardware(mine)
        >>> plan.Target.parse("gpu:h100-roce:2x8").hardware.network_bandwidth
        25000000000.0
    """
    taken = new.name in _BUILT_IN or new.name.lower() in _OTHER_NAMES
    if taken or ":" in new.name or not new.name:
        why = "is of the table" if taken else "cannot stand in a target"
        raise HardwareError(
            f"The name {new.name!r} {why}: give it another, such as "
            f"{(new.name.replace(':', '-') or 'my') + '-2'!r}."
        )
    HARDWARE[new.name] = new
    return new


def load_hardware(path: str | os.PathLike[str]) -> Hardware:
    r"""Returns the hardware that a TOML file describes.

    Args:
        path: The file. Its keys are the attributes of ``Hardware``. With ``like``, the name of
            known hardware, it says only what differs.

    Raises:
        PlanFileError: There is no such file, or it is not TOML; names the line.
        HardwareError: A key is unknown, missing, or of a wrong type; names the key and the file.

    Example:
        >>> import pathlib, tempfile
        >>> from shardax import plan
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "mine.toml"
        >>> _ = path.write_text('like = "h100"\nname = "mine"\nnetwork_bandwidth = 2.5e10\n')
        >>> plan.load_hardware(path).network_bandwidth
        25000000000.0
    """
    file = Path(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanFileError(
            f"There is no file {str(file)!r} of hardware; docs/hardware.md says what it holds."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanFileError(f"The file {str(file)!r} of hardware cannot be read: {error}") from None
    fields = dataclasses.fields(Hardware)
    known = [each.name for each in fields] + ["like"]
    for key, value in data.items():
        if key not in known:
            raise HardwareError(
                f"In {str(file)!r}: the key {key!r} is none of hardware."
                f"{did_you_mean(key, known)} Keys are {', '.join(sorted(known))}."
            )
        wanted, right = _expected(key, value)
        if not right:
            raise HardwareError(f"In {str(file)!r}: {key} is {value!r}; it is {wanted}.")
    like = data.pop("like", None)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    try:
        if like is not None:
            return find_hardware(like).like(**values)
        without = dataclasses.MISSING
        needed = [f.name for f in fields if f.default is without and f.default_factory is without]
        missing = [each for each in needed if each not in values]
        if missing:
            keys = "the key" if len(missing) == 1 else "the keys"
            are = "is" if len(missing) == 1 else "are"
            raise HardwareError(
                f"{keys} {', '.join(missing)} {are} missing. Say all of {', '.join(needed)}; or "
                f'like = "h100", and what differs.'
            )
        return Hardware(**values)
    except HardwareError as error:
        raise HardwareError(f"In {str(file)!r}: {error}") from None


def _expected(key: str, value: Any) -> tuple[str, bool]:
    """What a key's value is, in words, and whether this one is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    table = isinstance(value, Mapping)
    figures = table and all(isinstance(each, int | float) for each in value.values())
    match key:
        case "name" | "kind" | "like":
            return "text", isinstance(value, str)
        case "peak_flops":
            text = "a table such as {bf16 = 197e12}, with operations a second by dtype"
            return text, figures
        case "copy_bandwidth":
            return 'a table such as {"all-reduce" = 1e9}, bytes a second by kind', figures
        case "compiler" | "sources":
            return "a table", table
        case "shapes":
            right = isinstance(value, list) and all(isinstance(each, str) for each in value)
            return 'a list such as ["2x2", "4x4"]', right
        case "pod":
            right = isinstance(value, list) and all(isinstance(each, int) for each in value)
            return "a list such as [16, 16]", right
        case _ if key in _COUNTS:
            return "a whole number, without quotes", number and isinstance(value, int)
        case _:
            return "a number, without quotes", number
