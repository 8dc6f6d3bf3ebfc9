# SPDX-License-Identifier: Apache-2.0
"""Figures of kernels, links and software of the time model."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardax.extend import Options
from shardax.plan.errors import HardwareError, PlanInputError
from shardax.plan.hardware.hardware import Hardware, find_hardware

_OPTIONS = Options(PlanInputError)

PEAK_NAMES = {
    "fp16": "f16",
    "fp8": "f8",
    "fp8-row": "f8",
    "mxfp8": "f8",
    "nvfp4": "f4",
    "int8": "s8",
}
"""Dtype of ``Hardware.peak_flops``, by precision."""


@dataclass(frozen=True)
class Figure:
    """A figure of the time model."""

    value: float
    prior: float  # expected before a fit
    bounds: tuple[float, float]  # least and largest plausible value
    unit: str
    source: str  # "fit" is a fit to measured steps
    what: str  # meaning


@functools.cache
def figure_table() -> Mapping[str, Figure]:
    """Returns the figures of ``figures.toml`` by section and name, such as "links.torus_share"."""
    tables = _read("figures.toml")
    return {
        f"{section}.{name}": Figure(
            entry["value"],
            entry["prior"],
            tuple(entry["bounds"]),
            entry["unit"],
            entry["source"],
            entry["what"],
        )
        for section, entries in tables.items()
        for name, entry in entries.items()
    }


@functools.cache
def default_figures() -> Mapping[str, float]:
    """Returns the values of the figures."""
    return {name: figure.value for name, figure in figure_table().items()}


def figures_of(chip: Hardware, changes: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns the values of the figures for hardware, with the user's own."""
    values = dict(default_figures())
    if changes is not None:
        _OPTIONS.instance("figures", changes, Mapping, "a mapping of names to numbers")
    for name, value in {**chip.time_figures, **(changes or {})}.items():
        if name not in values:
            raise PlanInputError(f"There is no figure {name!r}; there are {', '.join(values)}.")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_figure = is_number and math.isfinite(value) and value >= 0
        _OPTIONS.check(name, value, is_figure, "a finite number of at least 0")
        values[name] = value
    return values


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@functools.cache
def _further_chips() -> Mapping[str, Hardware]:
    chips: dict[str, Hardware] = {}
    for name, entry in _read("chips.toml").items():
        changes = dict(entry)
        base = changes.pop("like")
        chip = chips.get(base) or find_hardware(base)
        chips[name] = chip.like(name=name, **changes)
    return chips


def find_chip(name: str) -> Hardware:
    """Returns hardware by its name, known to the compilers or not."""
    short = name.lower().removesuffix("-sxm")
    chip = _further_chips().get(short)
    if chip is not None:
        return chip
    try:
        return find_hardware(short)
    except HardwareError as error:
        further = ", ".join(_further_chips())
        raise HardwareError(f"{error} Of the time model alone: {further}.") from None


@functools.cache
def generation(name: str, kind: str) -> str:
    """Returns the generation of hardware, a middle one by default."""
    family = name.lower().partition("-")[0]
    for title, entry in _read("generations.toml").items():
        if family in entry["chips"]:
            return title
    return "mxu128" if kind == "tpu" else "hopper"


@functools.cache
def gpu_cores(family: str) -> int | None:
    """Returns the streaming multiprocessors of a generation of GPUs, and None of TPUs."""
    return _read("generations.toml")[family].get("cores")


def product_peak(chip: Hardware, precision: str, figures: Mapping[str, float]) -> float:
    """Returns operations a second that large products reach in a precision."""
    title = generation(chip.name, chip.kind)
    peak = chip.peak_flops.get(PEAK_NAMES.get(precision, precision))
    share = figures.get(f"{title}.{precision}_share")
    if peak is None or share is None:
        # A precision that the hardware lacks is computed in the next wider one.
        wider = {"nvfp4": "mxfp8", "mxfp8": "fp8", "fp8-row": "fp8"}.get(precision)
        if wider is not None:
            return product_peak(chip, wider, figures)
        share = figures[f"{title}.product_share"]
        peak = chip.peak("bf16") if peak is None or precision == "f32" else peak
        if precision == "f32":
            peak = chip.peak("f32")
    return peak * share
