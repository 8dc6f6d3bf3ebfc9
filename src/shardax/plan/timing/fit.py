# SPDX-License-Identifier: Apache-2.0
"""Figures of the time model, fitted to measured steps.

Least squares over the logarithms of predicted over measured seconds, robust against single rows.
Figures stay within their bounds and depart from their priors at a price, so that few rows change
few figures. Rows of one source share what it does not say, and many of them are no more than a
few: where there are several sources, a large one weighs little more than a small one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardax.extend import Options
from shardax.plan.errors import HardwareError, PlanInputError, RowError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.figures import default_figures, figure_table, generation
from shardax.plan.timing.rows import Row, check_fields, missing_sizes, read_row
from shardax.plan.timing.step import step_parts
from shardax.plan.timing.transformer import TrainingStep, TransformerShape

_OPTIONS = Options(PlanInputError)

SPREAD = 0.08  # of a measurement, as a logarithm
PRIORS = 8.0  # spread of a prior between its bounds: one part of so many
ALIKE = 10.0  # rows of a source, of several, after which more of them add little


@dataclass(frozen=True)
class Measurement:
    """A measured step."""

    model: TransformerShape
    step: TrainingStep
    hardware: Hardware
    software: str
    seconds: float
    source: str = ""  # who published it

    def predicted(self, figures: Mapping[str, float]) -> float:
        """Returns the predicted seconds."""
        parts = step_parts(self.model, self.step, self.hardware, self.software, figures)
        return sum(vars(parts).values())

    @property
    def sections(self) -> set[str]:
        """Sections of the figures that have a part in the prediction."""
        family = generation(self.hardware.name, self.hardware.kind)
        sections = {"kernels", "links", "jobs", family, self.software}
        if family.startswith("mxu"):
            sections.add("xla")
        if self.step.attention_kernel == "cudnn":
            sections.add("megatron")
        return sections


def calibrate(
    rows: Iterable[Row], *, from_priors: bool = False, rounds: int = 12
) -> dict[str, float]:
    """Fits the figures of the time model to measured steps.

    Args:
        rows: Measured steps in the form of published ones: ``arch``, ``layout``, ``hw``,
            ``seq_len``, ``global_batch_seqs``, ``step_seconds`` and what else is known. Rows that
            did not run, or lack a size, are left out.
        from_priors: Whether the library's own fit is forgotten.
        rounds: Steps of the fit at most.

    Returns:
        Figures for ``plan.predict(figures=...)``: those that have a part in the rows' predictions.

    Raises:
        PlanInputError: No row can be predicted.
        RowError: A row has a name, a word or a value that is not known, or is of a CPU, whether it
            ran or not. The text has the row's number, from 0.

    Example:
        >>> from shardax import plan
        >>> row = {
        ...     "arch": dict(layers=32, embed=4096, mlp_hidden=14336, heads=32, vocab=32000),
        ...     "hw": "h100", "chips": 8, "seq_len": 4096, "global_batch_seqs": 16,
        ...     "layout": {"dp": 8, "fsdp": 8, "zero": 3}, "step_seconds": 0.9,
        ... }
        >>> figures = plan.calibrate([row], rounds=2)
        >>> 0 < figures["hopper.product_share"] < 1
        True
    """
    if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
        raise PlanInputError(f"rows is a {type(rows).__name__}, not a list of rows.")
    _OPTIONS.integers(rounds=rounds)
    measurements = read_measurements(rows)
    if not measurements:
        raise PlanInputError(
            "No row can be predicted: each needs arch, hw, seq_len, global_batch_seqs and "
            "step_seconds."
        )
    return fit(measurements, from_priors=from_priors, rounds=rounds)


def read_measurements(rows: Iterable[Row]) -> list[Measurement]:
    """Returns the rows that ran and say enough.

    A row with a name or a value that is not known is an error, whether it ran or not.
    """
    measurements: list[Measurement] = []
    for number, row in enumerate(rows):
        try:
            check_fields(row)
            measurement = _read_measurement(row)
        except (PlanInputError, HardwareError) as error:
            raise RowError(f"Row {number}: {error}") from error
        if measurement is not None:
            measurements.append(measurement)
    return measurements


def _read_measurement(row: Row) -> Measurement | None:
    """Returns a row as a measured step; None if it did not run, or lacks a size."""
    seconds = row.get("step_seconds")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number and seconds is not None:
        raise RowError(f"step_seconds is {seconds!r}; it is a number, or None.")

    if missing_sizes(row):
        return None
    model, step, hardware, software = read_row(row)
    if hardware.kind == "cpu":
        raise RowError(
            f"hw is {row.get('hw')!r}; the time model is of GPUs and TPUs. For a CPU's rates there "
            "is plan.calibrate_cpu."
        )
    if seconds is None or not 0 < seconds < math.inf:
        return None
    source = str(row.get("group") or row.get("source") or "")
    return Measurement(model, step, hardware, software, seconds, source)


def fit(
    measurements: Sequence[Measurement],
    *,
    from_priors: bool = False,
    rounds: int = 12,
    start: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Returns the figures of the least sum of squares, searched for from ``start``."""
    table = figure_table()
    sections = set().union(*(measurement.sections for measurement in measurements))
    names = [
        name
        for name, figure in table.items()
        if name.partition(".")[0] in sections and figure.source == "fit"
    ]
    base = dict(default_figures())
    if from_priors:
        base = {name: figure.prior for name, figure in table.items()}
    center = np.log([base[name] for name in names])
    low = np.log([table[name].bounds[0] for name in names])
    high = np.log([table[name].bounds[1] for name in names])
    spread = (high - low) / PRIORS
    begin = center if start is None else np.log([start.get(name, base[name]) for name in names])
    rows_of = [
        [
            number
            for number, measurement in enumerate(measurements)
            if name.partition(".")[0] in measurement.sections
        ]
        for name in names
    ]

    # As if errors had a part that all rows of a source share.
    counts = Counter(measurement.source for measurement in measurements)
    shared = ALIKE if len(counts) > 1 else math.inf
    spreads = np.array(
        [SPREAD * math.sqrt(1 + counts[each.source] / shared) for each in measurements]
    )

    def figures_at(point: np.ndarray) -> dict[str, float]:
        return {**base, **dict(zip(names, np.exp(point).tolist(), strict=True))}

    def errors(point: np.ndarray) -> np.ndarray:
        figures = figures_at(point)
        logs = [
            math.log(measurement.predicted(figures) / measurement.seconds)
            for measurement in measurements
        ]
        return np.array(logs) / spreads

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(point), (point - center) / spread])

    def derivatives(point: np.ndarray) -> np.ndarray:
        figures = figures_at(point)
        before = [measurement.predicted(figures) for measurement in measurements]
        matrix = np.zeros((len(measurements) + len(names), len(names)))
        for column, name in enumerate(names):
            moved = {**figures, name: figures[name] * 1.01}
            for row in rows_of[column]:
                change = measurements[row].predicted(moved) / before[row]
                matrix[row, column] = math.log(change) / math.log(1.01) / spreads[row]
            matrix[len(measurements) + column, column] = 1 / spread[column]
        return matrix

    # Slow to import, and needed by nothing else of the planner.
    import scipy.optimize

    margin = 1e-6 * (high - low)
    result = scipy.optimize.least_squares(
        residuals,
        np.clip(begin, low + margin, high - margin),
        jac=derivatives,  # pyright: ignore[reportArgumentType]
        bounds=(low, high),
        loss="soft_l1",
        max_nfev=rounds,
    )
    return dict(zip(names, np.exp(result.x).tolist(), strict=True))
