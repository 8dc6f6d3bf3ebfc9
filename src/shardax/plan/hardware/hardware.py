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
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardax.partition.errors import did_you_mean
from shardax.plan.errors import HardwareError, PlanFileError

KINDS = ("tpu", "gpu", "cpu")  # each has its compiler

_SHORT_NAMES = {
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


_POSITIVE = (
    *("memory_bytes", "usable_bytes", "memory_bandwidth"),
    *("link_bandwidth", "network_bandwidth"),
)
_COUNTS = (
    *("memory_bytes", "usable_bytes", "torus_dimensions", "wraparound", "node_size"),
    "devices_per_chip",
)


@dataclass(frozen=True)
class Hardware:
    """What one device can do, and how devices are joined.

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
    devices_per_chip: int = 1
    chip_bandwidth: float = 0.0
    link_latency: float = 0.0
    network_latency: float = 0.0
    copy_bandwidth: Mapping[str, float] = field(default_factory=dict, hash=False)
    shapes: tuple[str, ...] = ()
    pod: tuple[int, ...] = ()
    compiler: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise HardwareError(f"The hardware {self.name!r}: {problem}")

    def _problems(self) -> list[str]:
        if self.kind not in KINDS:
            return [f"kind is {self.kind!r}; it is one of {', '.join(map(repr, KINDS))}."]
        found = [
            f"{name} is {value!r}; it is a number above 0."
            for name in _POSITIVE
            if not _positive(value := getattr(self, name))
        ]
        if not self.peak_flops or not all(map(_positive, self.peak_flops.values())):
            found.append(
                f"peak_flops is {dict(self.peak_flops)!r}; it says operations a second by dtype, "
                'such as {"bf16": 197e12}.'
            )
        if not all(map(_positive, self.copy_bandwidth.values())):
            found.append(
                f"copy_bandwidth is {dict(self.copy_bandwidth)!r}; it says bytes a second by kind "
                'of collective, such as {"all-reduce": 1e9}.'
            )
        if not found and self.usable_bytes > self.memory_bytes:
            found.append(
                f"usable_bytes ({self.usable_bytes}) is more than memory_bytes "
                f"({self.memory_bytes})."
            )
        dimensions = (2, 3) if self.kind == "tpu" else (0,)
        if self.torus_dimensions not in dimensions:
            found.append(
                f"torus_dimensions is {self.torus_dimensions!r}; it is 2 or 3 for a TPU, and 0 for "
                "what has a switch."
            )
        if self.kind == "gpu" and self.node_size < 1:
            found.append("node_size is missing: how many GPUs one NVLink switch joins, such as 8.")
        return found

    def peak(self, dtype: str) -> float:
        """Returns operations a second of matrix products of a dtype.

        Args:
            dtype: As HLO or JAX names it. Of one that has no figure it is the lowest figure there
                is: narrower types run at the rate of wider ones at the least.
        """
        short = _SHORT_NAMES.get(dtype, dtype)
        return self.peak_flops.get(short, min(self.peak_flops.values()))

    def like(self, **changes: Any) -> Hardware:
        """Returns hardware that differs in some attributes.

        Args:
            **changes: New values by attribute. Sources of what changes are dropped unless given.
        """
        known = {each.name for each in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise HardwareError(
                    f"Hardware has no attribute {name!r}; it has {', '.join(sorted(known))}."
                )
        kept = {name: text for name, text in self.sources.items() if name not in changes}
        return dataclasses.replace(self, **{"sources": kept, **changes})

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


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _made(values: Mapping[str, Any]) -> Hardware:
    """Hardware from the values of a TOML table."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    like = fields.pop("like", None)
    return Hardware(**fields) if like is None else find_hardware(like).like(**fields)


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
    try:
        without = dataclasses.MISSING
        needed = [f.name for f in fields if f.default is without and f.default_factory is without]
        missing = [name for name in needed if name not in data]
        if missing and "like" not in data:
            keys = "the key" if len(missing) == 1 else "the keys"
            are = "is" if len(missing) == 1 else "are"
            raise HardwareError(
                f"{keys} {', '.join(missing)} {are} missing. Say all of {', '.join(needed)}; or "
                f'like = "h100", and what differs.'
            )
        return _made(data)
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
