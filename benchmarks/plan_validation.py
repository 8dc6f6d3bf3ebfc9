# SPDX-License-Identifier: Apache-2.0
"""Predicted steps of sources, and of software, that were not fitted.

Each source (and then each software) is left out in turn: the figures are fitted to all others, from
what was expected beforehand, and its steps are predicted. A source that is the only one of its
software is predicted with what was expected of that software. The bands are those of the library,
whose widths come from this table.

*Pairs* are two rows of one source, model and hardware whose seconds a token and chip differ by over
15 %. *Sure* are steps of known software whose band is at most 1.35 wide.

    python benchmarks/plan_validation.py --rows steps.jsonl more.jsonl           # the tables
    python benchmarks/plan_validation.py --rows steps.jsonl more.jsonl --json F  # each prediction
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import published
import scipy.optimize

from shardax.plan.timing.figures import default_figures, figure_table
from shardax.plan.timing.fit import ALIKE, PRIORS, SPREAD, Measurement, read_measurements

SURE = 1.35
Row = published.Row
Prediction = published.Prediction
HEADERS = (
    *("left out", "software", "rows", "factor", "median", "90th", "inside", "high over low"),
    *("sure", "pairs in order"),
)


class Refits:
    """Fits to a part of measured steps, by the derivatives at the fit to all of them.

    The error of a step is taken to be linear in the logarithms of the figures, from the fit to all
    on; predictions are those of the model itself. The figures of what no step is left of are those
    that were expected beforehand.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self.measurements = measurements
        table = figure_table()
        self.names = [name for name, figure in table.items() if figure.source == "fit"]
        self.figures = dict(default_figures())
        self.center = np.log([table[name].prior for name in self.names])
        self.low = np.log([table[name].bounds[0] for name in self.names])
        self.high = np.log([table[name].bounds[1] for name in self.names])
        self.point = np.log([self.figures[name] for name in self.names])
        predicted = self._predicted(self.figures)
        self.errors = np.log(predicted / [each.seconds for each in measurements])
        self.derivatives = np.stack(
            [
                np.log(
                    self._predicted({**self.figures, name: 1.01 * self.figures[name]}) / predicted
                )
                / math.log(1.01)
                for name in self.names
            ],
            axis=1,
        )

    def _predicted(self, figures: Mapping[str, float]) -> np.ndarray:
        return np.array([measurement.predicted(figures) for measurement in self.measurements])

    def without(self, left_out: np.ndarray) -> dict[str, float]:
        """Returns the figures of a fit to all steps but some."""
        kept = np.flatnonzero(~left_out)
        counts = Counter(self.measurements[number].source for number in kept)
        weights = np.array(
            [
                1 / (SPREAD * math.sqrt(1 + counts[self.measurements[number].source] / ALIKE))
                for number in kept
            ]
        )
        spread = (self.high - self.low) / PRIORS
        matrix = self.derivatives[kept] * weights[:, None]
        errors = self.errors[kept] * weights

        def residuals(point: np.ndarray) -> np.ndarray:
            changed = errors + matrix @ (point - self.point)
            return np.concatenate([changed, (point - self.center) / spread])

        jacobian = np.vstack([matrix, np.diag(1 / spread)])
        margin = 1e-6 * (self.high - self.low)
        result = scipy.optimize.least_squares(
            residuals,
            np.clip(self.point, self.low + margin, self.high - margin),
            jac=lambda point: jacobian,
            bounds=(self.low, self.high),
            loss="soft_l1",
            max_nfev=60,
        )
        fitted = dict(zip(self.names, np.exp(result.x).tolist(), strict=True))
        return {**self.figures, **fitted}


def summary(title: str, pairs: Sequence[tuple[Row, Prediction]]) -> list[str]:
    """Returns the cells of a line of the table."""
    rows = [row for row, _ in pairs]
    guesses = [guess for _, guess in pairs]
    ratios = [guess["seconds"] / row["step_seconds"] for row, guess in pairs]
    errors = [abs(ratio - 1) for ratio in ratios]
    inside = [guess["low"] <= row["step_seconds"] <= guess["high"] for row, guess in pairs]
    widths = [guess["high"] / guess["low"] for guess in guesses]
    sure = [ok for ok, width in zip(inside, widths, strict=True) if width <= SURE + 1e-6]
    right = total = 0
    for source in {row["group"] for row in rows}:
        own = [(row, guess) for row, guess in pairs if row["group"] == source]
        ordered, counted = published.pairs_in_order(
            [row for row, _ in own], [guess for _, guess in own]
        )
        right, total = right + ordered, total + counted
    return [
        title,
        ", ".join(sorted({guess["software"] for guess in guesses})),
        str(len(rows)),
        f"{math.exp(statistics.mean(map(math.log, ratios))):.2f}",
        f"{statistics.median(errors):.1%}",
        f"{published.quantile(errors, 0.9):.1%}",
        f"{sum(inside) / len(inside):.0%}",
        f"{statistics.median(widths):.2f} ({max(widths):.2f})",
        f"{sum(sure)} of {len(sure)}",
        f"{right} of {total}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", required=True, type=Path, nargs="+", help="published steps")
    parser.add_argument("--json", type=Path, help="where the predictions go")
    options = parser.parse_args(arguments)
    rows = [row for row in published.read_rows(options.rows) if row.get("complete_strict")]
    rows = [row for row in rows if row.get("step_seconds") and row.get("outcome") == "ran"]
    measurements = read_measurements(rows)
    if len(measurements) != len(rows):
        raise SystemExit("Rows that are complete, and ran, can all be read; some could not be.")
    refits = Refits(measurements)

    results: dict[str, list[tuple[Row, Prediction]]] = {}
    print("| " + " | ".join(HEADERS) + " |\n|" + "---|" * len(HEADERS))
    for kind, key in (
        ("source", lambda measurement: measurement.source),
        ("software", lambda measurement: measurement.software),
    ):
        every: list[tuple[Row, Prediction]] = []
        for name in sorted({key(measurement) for measurement in measurements}):
            left_out = np.array([key(measurement) == name for measurement in measurements])
            figures = refits.without(left_out)
            pairs = [
                (row, published.predict_row(row, figures))
                for row, is_out in zip(rows, left_out, strict=True)
                if is_out
            ]
            every += pairs
            print("| " + " | ".join(summary(name, pairs)) + " |", flush=True)
        print("| " + " | ".join(summary(f"every {kind}", every)) + " |", flush=True)
        results[kind] = every

    if options.json:
        data = {
            kind: [{**guess, "step_seconds": row["step_seconds"]} for row, guess in pairs]
            for kind, pairs in results.items()
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
