# SPDX-License-Identifier: Apache-2.0
"""Hardware figures: known, registered, or read from TOML files.

*Device* is what JAX calls one: half a chip of TPU v7x, a whole chip elsewhere. A *fabric* joins
devices closely: the torus of a TPU *slice* (ICI), the switch of a GPU *node* (NVLink). The
*network* joins slices or nodes (DCN, InfiniBand). In a torus a device has two *links* in each
dimension, one to either side; the dimension *wraps round* where its ends are linked too.

Figures are peaks: of dense products, and of bytes in one direction. ``sources`` says for each where
it comes from. Those of known hardware are in ``known.toml``, with the keys of files of one's own:
the attributes of ``Hardware``, or those in which it differs from one known (``docs/hardware.md``)::

    like = "h100"
    name = "h100-roce"
    network_bandwidth = 2.5e10

    [sources]
    network_bandwidth = "measured with nccl-tests"
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardax.extend import did_you_mean
from shardax.plan.errors import HardwareError, PlanFileError

KINDS = ("tpu", "gpu", "cpu")  # each has its compiler

SHORT_NAMES = {  # HLO's, by JAX's
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int8": "s8",
    "f8e4m3fn": "f8",
    "f8e5m2": "f8",
    "float8_e4m3fn": "f8",
    "float8_e5m2": "f8",
    "u8": "s8",
}


def _number(value: Any, kinds: Any = int | float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and value >= 0


def _figures(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _number(number) and number for number in value.values()
    )


def _all(kind: type, value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, kind) for item in value)


_POSITIVE = ("memory_bandwidth", "link_bandwidth", "network_bandwidth")
_COUNTS = ("torus_dimensions", "wraparound", "node_size", "direct_peers", "devices_per_chip")


def _is_figure(value) -> bool:
    return _number(value) and 0 <= value < math.inf


# What the value of an attribute is, in words, and whether one is; of the others a number.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("text", lambda value: isinstance(value, str)),
    "kind": (f"one of {', '.join(map(repr, KINDS))}", lambda value: value in KINDS),
    "peak_flops": (
        "operations a second by dtype, such as {bf16 = 197e12}",
        lambda value: bool(value) and _figures(value),
    ),
    "copy_bandwidth": (
        'bytes a second by kind of collective, such as {"all-reduce" = 1e9}',
        _figures,
    ),
    "time_figures": (
        'figures of the time model by name, such as {"hopper.product_share" = 0.7}',
        lambda value: isinstance(value, Mapping) and all(map(_is_figure, value.values())),
    ),
    **dict.fromkeys(("compiler", "sources"), ("a table", lambda value: isinstance(value, Mapping))),
    "shapes": ('texts such as ["2x2", "4x4"]', functools.partial(_all, str)),
    "pod": ("sizes such as [16, 16]", functools.partial(_all, int)),
    **dict.fromkeys(_COUNTS, ("a whole number", lambda value: _number(value, int))),
    **dict.fromkeys(
        ("memory_bytes", "usable_bytes"),
        ("a whole number above 0", lambda value: _number(value, int) and value > 0),
    ),
    **dict.fromkeys(_POSITIVE, ("a number above 0", lambda value: _number(value) and value > 0)),
}


@dataclass(frozen=True)
class Hardware:
    """Figures of one device, and of the links between devices.

    Attributes:
        name: In targets: ``"v5e"`` of ``"tpu:v5e:4x4"``.
        kind: ``"tpu"``, ``"gpu"`` or ``"cpu"``: which compiler it takes.
        peak_flops: Operations a second of dense matrix products, by dtype as HLO names it
            (``"bf16"``, ``"f32"``, ``"s8"``, ``"f8"``).
        memory_bytes: Memory of a device.
        usable_bytes: What of it a program may use.
        memory_bandwidth: Bytes a second between the memory and the device.
        link_bandwidth: Bytes a second of one link of a torus, or of a device's way into its
            switch, in one direction.
        network_bandwidth: Bytes a second of a device's share of the network, in one direction.
        torus_dimensions: Dimensions of the torus; 0 is a switch.
        wraparound: A torus dimension of this size wraps round; in a torus of three dimensions a
            multiple of it does, if all dimensions are multiples.
        node_size: Devices behind one switch; 0 in a torus.
        direct_peers: Devices of a node to which a device has links of their own, where there is no
            switch: a pair has that part of its links only. 0 behind a switch.
        devices_per_chip: Devices that share the links of one chip.
        chip_bandwidth: Bytes a second between two devices of a chip, in one direction.
        link_latency: Seconds that a message takes over a link at the least.
        network_latency: The same over the network.
        copy_bandwidth: Of devices that are parts of one processor: bytes a second of a collective's
            payload, by its kind. They have no links; whatever the size of the group, each copies
            from the memory of the others. Empty where devices are devices.
        shapes: Sizes of a slice that exist, such as ``"4x4"``; of a torus of three dimensions also
            every multiple of ``wraparound`` up to ``pod``. Empty: every size.
        pod: The largest slice.
        compiler: What the compiler must know of the device: for a TPU ``topology`` (libtpu's name)
            and options of it; for a GPU the fields of XLA's description of one.
        time_figures: Figures of the model of expected times that replace the library's, by name:
            what ``plan.calibrate`` returns.
        sources: Where figures come from, by the name of the attribute.

    Raises:
        HardwareError: A figure is negative, or missing where the kind needs it.

    Example:
        >>> from shardax import plan
        >>> v5e = plan.find_hardware("v5e")
        >>> v5e.usable_bytes / 2**30, v5e.peak("bf16")
        (15.75, 197000000000000.0)
        >>> larger = v5e.like(name="v5e-32", memory_bytes=32 * 2**30, usable_bytes=31 * 2**30)
        >>> larger.memory_bandwidth == v5e.memory_bandwidth
        True
    """

    name: str
    kind: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    torus_dimensions: int = 0
    wraparound: int = 0
    node_size: int = 0
    direct_peers: int = 0
    devices_per_chip: int = 1
    chip_bandwidth: float = 0.0
    link_latency: float = 0.0
    network_latency: float = 0.0
    copy_bandwidth: Mapping[str, float] = field(default_factory=dict, hash=False)
    shapes: tuple[str, ...] = ()
    pod: tuple[int, ...] = ()
    compiler: Mapping[str, Any] = field(default_factory=dict, hash=False)
    time_figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise HardwareError(f"The hardware {self.name!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        for name in (item.name for item in dataclasses.fields(self)):
            expected, is_right = _EXPECTED.get(name, ("a number", _number))
            if not is_right(getattr(self, name)):
                yield f"{name} is {getattr(self, name)!r}; it is {expected}."

        if self.usable_bytes > self.memory_bytes:
            yield (
                f"usable_bytes ({self.usable_bytes}) is more than memory_bytes "
                f"({self.memory_bytes})."
            )
        if self.torus_dimensions not in ((2, 3) if self.kind == "tpu" else (0,)):
            yield (
                f"torus_dimensions is {self.torus_dimensions!r}; it is 2 or 3 for a TPU, and 0 for "
                "what has a switch."
            )
        if self.kind == "gpu" and self.node_size < 1:
            yield "node_size is missing: how many GPUs one NVLink switch joins, such as 8."

    def peak(self, dtype: str) -> float:
        """Returns operations a second of matrix products of a dtype.

        Args:
            dtype: As HLO or JAX names it. Of one that has no figure it is the lowest figure there
                is: narrower types run at the rate of wider ones at the least.
        """
        short = SHORT_NAMES.get(dtype, dtype)
        return self.peak_flops.get(short, min(self.peak_flops.values()))

    def like(self, **changes: object) -> Hardware:
        """Returns hardware with some attributes changed.

        Args:
            **changes: New values by attribute. Sources of what changes are dropped unless given.
        """
        _check_names(changes)
        sources = {name: text for name, text in self.sources.items() if name not in changes}
        return dataclasses.replace(self, **{"sources": sources, **changes})

    def wraps(self, shape: tuple[int, ...], dimension: int) -> bool:
        """Whether a dimension of a slice wraps round.

        Args:
            shape: Sizes of the slice's torus.
            dimension: Which one.
        """
        if not self.wraparound:
            return False
        if self.torus_dimensions == 2:
            return shape[dimension] == self.wraparound
        return all(size % self.wraparound == 0 for size in shape)


def _check_names(names: Iterable[str]) -> None:
    attributes = [item.name for item in dataclasses.fields(Hardware)]
    for name in names:
        if name not in attributes:
            raise HardwareError(
                f"Hardware has no attribute {name!r}; it has {', '.join(sorted(attributes))}."
                f"{did_you_mean(name, attributes)}"
            )


def _made(values: Mapping[str, object]) -> Hardware:
    """Hardware from the values of a TOML table."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    like = fields.pop("like", None)
    if like is not None:
        return find_hardware(str(like)).like(**fields)

    _check_names(fields)
    without = dataclasses.MISSING
    needed = [
        item.name
        for item in dataclasses.fields(Hardware)
        if item.default is without and item.default_factory is without
    ]
    if missing := [name for name in needed if name not in fields]:
        raise HardwareError(
            f"{', '.join(missing)} missing. Say all of {', '.join(needed)}; or "
            'like = "h100", and what differs.'
        )
    return Hardware(**fields)


_TABLE = tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))
HARDWARE = {name: _made({"name": name, **values}) for name, values in _TABLE.items()}
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
    hardware = HARDWARE.get(_OTHER_NAMES.get(name.lower(), name.lower())) or HARDWARE.get(name)
    if hardware is None:
        names = ", ".join(HARDWARE)
        raise HardwareError(
            f"There is no hardware {name!r}.{did_you_mean(name, HARDWARE)} Known are {names}. "
            "Your own: plan.register_hardware(plan.find_hardware('v5e').like(name='mine', ...)), "
            "or a TOML file, as docs/hardware.md says."
        )
    return hardware


def hardware_of(device: Any) -> Hardware | None:
    """Returns the hardware of a JAX device, if it is known."""
    kind = str(device.device_kind)
    for hardware in HARDWARE.values():
        if hardware.kind == "tpu" and kind in _tpu_kinds(hardware):
            return hardware
    # Such as "NVIDIA H100 80GB HBM3" and "NVIDIA A100-SXM4-40GB".
    words = re.split(r"[\s-]+", kind.lower())
    if "nvidia" not in words:
        return None
    for hardware in HARDWARE.values():
        name, _, size = hardware.name.partition("-")
        if hardware.kind == "gpu" and name in words and (not size or f"{size}gb" in words):
            return hardware
    return None


def _tpu_kinds(hardware: Hardware) -> tuple[str, ...]:
    """JAX's names of a TPU; some have two."""
    return str(hardware.compiler.get("device_kind", "")), f"TPU {hardware.name}"


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
    is_taken = new.name in _BUILT_IN or new.name.lower() in _OTHER_NAMES
    if is_taken or ":" in new.name or not new.name:
        why = "is of the table" if is_taken else "cannot stand in a target"
        raise HardwareError(
            f"The name {new.name!r} {why}: give it another, such as "
            f"{(new.name.replace(':', '-') or 'my') + '-2'!r}."
        )
    HARDWARE[new.name] = new
    return new


def load_hardware(path: str | os.PathLike[str]) -> Hardware:
    r"""Returns the hardware described by a TOML file.

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
    try:
        return _made(data)
    except HardwareError as error:
        raise HardwareError(f"In {str(file)!r}: {error}") from None
