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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import published

from shardax.plan.timing.figures import default_figures, figure_table
from shardax.plan.timing.fit import Measurement, fit, read_measurements

SURE = 1.35
Row = published.Row
Prediction = published.Prediction
HEADERS = (
    *("left out", "software", "rows", "factor", "median", "90th", "inside", "high over low"),
    *("sure", "pairs in order"),
)


def predictions_without(
    measurements: Sequence[Measurement],
    rows: Sequence[Row],
    is_left_out: Callable[[Measurement], bool],
    start: Mapping[str, float],
    rounds: int,
) -> list[tuple[Row, Prediction]]:
    """Returns the rows left out of a fit, each with its prediction."""
    kept = [measurement for measurement in measurements if not is_left_out(measurement)]
    beforehand = {
        name: figure.prior for name, figure in figure_table().items() if figure.source == "fit"
    }
    # From the fit to all, as the rows that are left do not depend on where it starts.
    figures = {**beforehand, **fit(kept, from_priors=True, rounds=rounds, start=start)}
    return [
        (row, published.predict_row(row, figures))
        for row, measurement in zip(rows, measurements, strict=True)
        if is_left_out(measurement)
    ]


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
    parser.add_argument("--by", choices=("source", "software"), nargs="+", help="what is left out")
    parser.add_argument("--rounds", type=int, default=4, help="of each fit, from that to all")
    options = parser.parse_args(arguments)
    rows = [row for row in published.read_rows(options.rows) if row.get("complete_strict")]
    rows = [row for row in rows if row.get("step_seconds") and row.get("outcome") == "ran"]
    measurements = read_measurements(rows)
    if len(measurements) != len(rows):
        raise SystemExit("Rows that are complete, and ran, can all be read; some could not be.")
    start = dict(default_figures())

    results: dict[str, list[tuple[Row, Prediction]]] = {}
    print("| " + " | ".join(HEADERS) + " |\n|" + "---|" * len(HEADERS))
    for kind, key in (
        ("source", lambda measurement: measurement.source),
        ("software", lambda measurement: measurement.software),
    ):
        if options.by and kind not in options.by:
            continue
        every: list[tuple[Row, Prediction]] = []
        for name in sorted({key(measurement) for measurement in measurements}):
            pairs = predictions_without(
                measurements,
                rows,
                lambda measurement, key=key, name=name: key(measurement) == name,
                start,
                options.rounds,
            )
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
