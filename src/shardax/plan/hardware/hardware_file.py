# SPDX-License-Identifier: Apache-2.0
"""Hardware in a TOML file: attributes of ``Hardware``, or those in which it differs from one known.

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

from shardax.partition.errors import did_you_mean
from shardax.plan.errors import HardwareError, PlanFileError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.hardware.known import find_hardware

_TABLES = ("peak_flops", "compiler", "sources")
_COUNTS = (
    "memory_bytes",
    "usable_bytes",
    "torus_dimensions",
    "wraparound",
    "node_size",
    "devices_per_chip",
)
_TEXTS = ("name", "kind", "like")


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
    data = _read(file)
    for key, value in data.items():
        _check(file, key, value)
    like = data.pop("like", None)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    try:
        if like is not None:
            return find_hardware(like).like(**values)
        missing = [each for each in _required() if each not in values]
        if missing:
            raise HardwareError(
                f"{_keys(missing)} missing. Say all of {', '.join(_required())}; or "
                f'like = "h100", and what differs.'
            )
        return Hardware(**values)
    except HardwareError as error:
        raise HardwareError(f"In {str(file)!r}: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    """The file as data."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanFileError(
            f"There is no file {str(file)!r} of hardware; docs/hardware.md says what it holds."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanFileError(f"The file {str(file)!r} of hardware cannot be read: {error}") from None


def _check(file: Path, key: str, value: Any) -> None:
    """Raises if a key is unknown or its value is of a wrong type."""
    known = [each.name for each in dataclasses.fields(Hardware)] + ["like"]
    if key not in known:
        raise HardwareError(
            f"In {str(file)!r}: the key {key!r} is none of hardware.{did_you_mean(key, known)} "
            f"Keys are {', '.join(sorted(known))}."
        )
    wanted, right = _wanted(key, value)
    if not right:
        raise HardwareError(f"In {str(file)!r}: {key} is {value!r}; it is {wanted}.")


def _wanted(key: str, value: Any) -> tuple[str, bool]:
    """What a key's value is, in words, and whether this one is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in _TEXTS:
        return "text", isinstance(value, str)
    if key == "peak_flops":
        right = isinstance(value, Mapping) and all(
            isinstance(each, int | float) for each in value.values()
        )
        return "a table such as {bf16 = 197e12}, with operations a second by dtype", right
    if key == "copy_bandwidth":
        right = isinstance(value, Mapping) and all(
            isinstance(each, int | float) for each in value.values()
        )
        return 'a table such as {"all-reduce" = 1e9}, bytes a second by kind', right
    if key in _TABLES:
        return "a table", isinstance(value, Mapping)
    if key == "shapes":
        right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return 'a list such as ["2x2", "4x4"]', right
    if key == "pod":
        right = isinstance(value, list) and all(isinstance(each, int) for each in value)
        return "a list such as [16, 16]", right
    if key in _COUNTS:
        return "a whole number, without quotes", number and isinstance(value, int)
    return "a number, without quotes", number


def _required() -> list[str]:
    """Attributes without a default."""
    return [
        each.name
        for each in dataclasses.fields(Hardware)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    ]


def _keys(names: list[str]) -> str:
    """Names as the subject of a sentence."""
    return f"the key {names[0]} is" if len(names) == 1 else f"the keys {', '.join(names)} are"
