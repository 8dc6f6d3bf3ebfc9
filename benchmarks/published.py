# SPDX-License-Identifier: Apache-2.0
"""Predicted training steps beside published, measured ones.

Every row says a model, a layout and hardware; `plan.predict` gets these and never the row's result.
The opponent is the rule of thumb: 6 N operations a token plus attention, at 45 % of the peak in
bf16.

Words: *error* is the absolute difference over the measured seconds. A *pair* is two rows of one
model on one hardware whose seconds a token and chip differ by over 15 %; it is in order if the
prediction puts the same one first. A *half* is every second group; groups are sources, or pairs of
a model and hardware.

    python benchmarks/published.py --rows steps.jsonl                  # the tables
    python benchmarks/published.py --rows steps.jsonl --json out.json  # one prediction a row
    python benchmarks/published.py --rows steps.jsonl --halves         # errors of fits on halves
    python benchmarks/published.py --rows steps.jsonl --fit FIGURES    # fit all, write the figures
    python benchmarks/published.py --rows steps.jsonl --plot OUT.svg   # predicted over published
    python benchmarks/published.py --rows steps.jsonl --table OUT.json # what published_steps reads
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardax import plan
from shardax.plan.errors import PlanError

Row = Mapping[str, Any]
Prediction = dict[str, Any]
CLEAR = 0.15
RULE_OF_THUMB = 0.45


def predict_row(row: Row, figures: Mapping[str, float] | None = None) -> Prediction:
    """Returns the prediction of a row; `skipped` says why there is none."""
    result: Prediction = {"id": row.get("id"), "skipped": None}
    try:
        model, step, hardware, software = plan.read_row(row)
        estimate = plan.predict(model, step, hardware, software=software, figures=figures)
    except (PlanError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        empty = dict.fromkeys(("seconds", "low", "high", "memory_bytes"))
        return {**result, **empty, "skipped": f"{type(error).__name__}: {error}"}
    return {
        "id": row.get("id"),
        "seconds": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "memory_bytes": estimate.memory_bytes,
        "skipped": None,
        "fits": estimate.fits,
        "software": software,
        "waits_for": estimate.waits_for,
        # Rounded, so that equal work stays equal.
        "rule_of_thumb": float(f"{estimate.seconds * estimate.mfu / RULE_OF_THUMB:.9g}"),
    }


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Returns the rows of files with one JSON object a line."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.strip()]


def error_of(row: Row, prediction: Prediction, name: str = "seconds") -> float:
    """Returns the relative error of a prediction."""
    return abs(prediction[name] / row["step_seconds"] - 1)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def pairs_in_order(
    rows: Sequence[Row], predictions: Sequence[Prediction], name: str = "seconds"
) -> tuple[int, int]:
    """Returns the pairs in order, and all that differ clearly, by seconds a token and chip."""
    groups: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        work = row["global_batch_seqs"] * row["seq_len"] / row["chips"]
        times = row["step_seconds"] / work, prediction[name] / work
        groups.setdefault((row["model"], row["hw"]), []).append(times)
    right = total = 0
    for times in groups.values():
        for (first, guess), (second, guess_2) in itertools.combinations(times, 2):
            if max(first, second) > (1 + CLEAR) * min(first, second):
                total += 1
                right += (first - second) * (guess - guess_2) > 0
    return right, total


def summary(rows: Sequence[Row], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Returns the figures that the aims are about."""
    ran = [
        (row, prediction)
        for row, prediction in zip(rows, predictions, strict=True)
        if row.get("step_seconds") and not prediction["skipped"]
    ]
    timed, guesses = [row for row, _ in ran], [prediction for _, prediction in ran]
    errors = [error_of(row, prediction) for row, prediction in ran]
    thumb = [error_of(row, prediction, "rule_of_thumb") for row, prediction in ran]
    inside = [guess["low"] <= row["step_seconds"] <= guess["high"] for row, guess in ran]
    right, total = pairs_in_order(timed, guesses)
    right_thumb, _ = pairs_in_order(timed, guesses, "rule_of_thumb")
    return {
        "rows": len(rows),
        "predicted": sum(not prediction["skipped"] for prediction in predictions) / len(rows),
        "median error": statistics.median(errors),
        "p90 error": quantile(errors, 0.9),
        "inside band": sum(inside) / len(inside),
        "band ratio": statistics.median(guess["high"] / guess["low"] for guess in guesses),
        "pairs": total,
        "pairs in order": right / max(1, total),
        "rule of thumb: median error": statistics.median(thumb),
        "rule of thumb: p90 error": quantile(thumb, 0.9),
        "rule of thumb: pairs in order": right_thumb / max(1, total),
    }


def memory_summary(rows: Sequence[Row], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns errors of memory, and rows whose fit is predicted wrongly."""
    errors: list[float] = []
    misses: dict[str, int] = {"oom": 0, "oom as fitting": 0, "ran": 0, "ran as not fitting": 0}
    for row, prediction in zip(rows, predictions, strict=True):
        if prediction["skipped"]:
            continue
        memory = row.get("memory_per_chip")
        if memory and row.get("outcome") == "ran":
            scale = 2**30 if "gib" in str(memory.get("unit")).lower() else 1e9
            errors.append(abs(prediction["memory_bytes"] / (memory["value"] * scale) - 1))
        outcome = "oom" if row.get("outcome") == "oom" else "ran"
        misses[outcome] += 1
        misses["oom as fitting" if outcome == "oom" else "ran as not fitting"] += prediction[
            "fits"
        ] == (outcome == "oom")
    within = sum(error <= 0.1 for error in errors)
    return {
        "rows with memory": len(errors),
        "median error": statistics.median(errors) if errors else None,
        "within 10 %": within,
        **misses,
    }


def size_class(row: Row) -> str:
    """Returns the class of a job's size."""
    chips = row["chips"]
    return next((f"to {bound} chips" for bound in (8, 64, 512) if chips <= bound), "over 512 chips")


def print_tables(rows: Sequence[Row], predictions: Sequence[Prediction]) -> None:
    """Prints the errors by kind of row, and the worst rows."""
    for name, value in summary(rows, predictions).items():
        print(f"{name:32} {value:8.3f}" if isinstance(value, float) else f"{name:32} {value:8}")
    print("memory:", json.dumps(memory_summary(rows, predictions)))
    ran = [
        (row, prediction)
        for row, prediction in zip(rows, predictions, strict=True)
        if row.get("step_seconds") and not prediction["skipped"]
    ]
    kinds: dict[str, Callable[[Row, Prediction], str]] = {
        "hardware": lambda row, _: row["hw"],
        "form": lambda row, _: row["form"],
        "software": lambda _, prediction: prediction["software"],
        "size": lambda row, _: size_class(row),
    }
    for kind, label in kinds.items():
        groups: dict[str, list[float]] = {}
        for row, prediction in ran:
            groups.setdefault(str(label(row, prediction)), []).append(error_of(row, prediction))
        print(f"\n{kind:28} {'rows':>5} {'median':>7} {'p90':>7}")
        for group, errors in sorted(groups.items()):
            print(
                f"{group:28} {len(errors):5} {statistics.median(errors):7.1%} "
                f"{quantile(errors, 0.9):7.1%}"
            )
    print(f"\n{'worst ten':26} {'predicted':>9} {'measured':>9}  waits for")
    for row, prediction in sorted(ran, key=lambda pair: -error_of(*pair))[:10]:
        print(
            f"{row['id']:26} {prediction['seconds']:9.3f} {row['step_seconds']:9.3f}  "
            f"{prediction['waits_for']}: "
            f"{row['model']}, {row['hw']} x {row['chips']}, {row['form']}"
        )
    for row, prediction in zip(rows, predictions, strict=True):
        if prediction["skipped"]:
            print(f"skipped {row['id']}: {prediction['skipped']}")


def test_on_halves(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Fits on half of the groups and tests on the other half, both ways round."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    keys: dict[str, Callable[[Row], str]] = {
        "sources": lambda row: str(row["group"]),
        "models on hardware": lambda row: f"{row['model']} {row['hw']}",
    }
    for title, key in keys.items():
        groups = sorted({key(row) for row in rows})
        halves = [
            [row for row in rows if groups.index(key(row)) % 2 == number] for number in (0, 1)
        ]
        for number in (0, 1):
            train, test = halves[number], halves[1 - number]
            figures = plan.calibrate(train, from_priors=True)
            results[f"{title}, half {number + 1}"] = {
                part: summary(part_rows, [predict_row(row, figures) for row in part_rows])
                for part, part_rows in (("train", train), ("test", test))
            }
    return results


def write_figures(figures: Mapping[str, float], path: Path) -> None:
    """Writes fitted values into a file of figures."""
    section, lines = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        name = f"{section}.{line.partition(' ')[0]}"
        if name in figures:
            line = re.sub(r"value = [^,]+", f"value = {figures[name]:.4g}", line)
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


COLUMNS = (
    *("model", "billion parameters", "hardware", "chips", "layout", "sequence", "precision"),
    *("tokens per second and chip", "MFU, %", "source"),
)


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Writes the measured rows as the table of `plan.published_steps`."""
    table: list[list[Any]] = []
    for row in rows:
        if row.get("outcome") != "ran" or not row.get("step_seconds"):
            continue
        try:
            model, step, hardware, software = plan.read_row(row)
            estimate = plan.predict(model, step, hardware, software=software)
        except PlanError:
            continue
        tokens = step.global_batch * step.sequence / row["step_seconds"] / row["chips"]
        mfu = estimate.mfu * estimate.seconds / row["step_seconds"]
        table.append(
            [
                *(row["model"], round(model.parameters / 1e9, 2), hardware.name),
                *(int(row["chips"]), row.get("form") or "", step.sequence, step.precision),
                *(round(tokens), round(100 * mfu, 1), row["source"].partition("@")[0]),
            ]
        )
    table.sort(key=lambda entry: (entry[2], entry[0], entry[3]))
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in table)
    text = f'{{"columns": {json.dumps(COLUMNS)},\n "rows": [\n{lines}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def draw(rows: Sequence[Row], predictions: Sequence[Prediction], path: Path) -> None:
    """Draws predicted over published seconds, by hardware."""
    from matplotlib import style
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, float]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        if row.get("step_seconds") and not prediction["skipped"]:
            label = re.sub(r"-\d+$", "", plan.read_row(row)[2].name.removesuffix("-hbm2e-96"))
            points.setdefault(label, []).append((row["step_seconds"], prediction["seconds"]))

    ends = [f(value for pairs in points.values() for pair in pairs for value in pair)
            for f in (min, max)]  # fmt: skip
    # Whatever the user's settings of matplotlib say.
    with style.context(["default", {"svg.hashsalt": "published", "font.size": 9}]):
        figure = Figure(figsize=(6.4, 5.2))
        axes = figure.subplots()
        for (label, pairs), marker in zip(sorted(points.items()), itertools.cycle("os^Dv<>PX*hd")):
            axes.scatter(*zip(*pairs, strict=True), s=14, marker=marker, alpha=0.7, label=label)
        axes.plot(ends, ends, color="0.4", linewidth=1)
        for factor in (0.8, 1.25):
            bounds = [factor * end for end in ends]
            axes.plot(ends, bounds, color="0.6", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="published step, s", ylabel="predicted step, s")
        axes.legend(ncols=2, frameon=False)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rows", required=True, type=Path, nargs="+", help="published steps, one JSON a line"
    )
    parser.add_argument("--json", type=Path, help="where the predictions go")
    parser.add_argument("--halves", action="store_true", help="train and test error apart")
    parser.add_argument("--fit", type=Path, help="file of figures that gets the fitted values")
    parser.add_argument("--plot", type=Path, help="picture of predicted over published seconds")
    parser.add_argument("--table", type=Path, help="table of measured steps that is written")
    parser.add_argument("--all", action="store_true", help="also rows that are not complete")
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    if options.json:
        names = ("id", "seconds", "low", "high", "memory_bytes", "skipped")
        predictions = [predict_row(row) for row in rows]
        text = json.dumps(
            [{name: prediction[name] for name in names} for prediction in predictions], indent=1
        )
        options.json.write_text(text + "\n", encoding="utf-8")
        return 0
    if not options.all:
        rows = [row for row in rows if row.get("complete_strict")]
    if options.fit:
        write_figures(plan.calibrate(rows, from_priors=True, rounds=20), options.fit)
    elif options.table:
        write_table(rows, options.table)
    elif options.plot:
        draw(rows, [predict_row(row) for row in rows], options.plot)
    elif options.halves:
        for title, parts in test_on_halves(rows).items():
            for part, values in parts.items():
                shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
                print(f"{title}, {part}: {shown}")
    else:
        print_tables(rows, [predict_row(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
