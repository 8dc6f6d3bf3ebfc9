# SPDX-License-Identifier: Apache-2.0
"""What ``shardax train`` says of a run that is done: figures, pictures, and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardax import Param, Variable, iter_variables, models, train, view
from shardax.cli import inputs
from shardax.cli.runs import RunSettings
from shardax.extend import format_path

_PICTURED = (".embed.embedding", ".layers[0].mlp.gate.kernel")


def write_report(
    folder: Path,
    settings: RunSettings,
    model: Any,
    result: train.RunResult,
    *,
    table: view.ParameterTable,
    seconds: float,
    token: str,
    sample: str,
    entropy: Mapping[str, float],
    pictures: Mapping[str, str],
) -> Path:
    """Writes the report of a run that is done; returns its path.

    Args:
        folder: The run's.
        settings: The run's.
        model: What was trained.
        result: The result of the run.
        table: The parameters.
        seconds: How long the run took.
        token: What the loss is measured for: "byte" or "token".
        sample: Text that the model wrote.
        entropy: Losses to compare by, by name.
        pictures: HTML by caption.
    """
    unit = f"nats per {token}"
    records = train.read_jsonl(result.log)
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    summary = {
        "text": settings.text or "Python's standard library",
        "mesh": settings.mesh or "one device",
        "steps": f"{result.step:,} of {settings.batch_size} x {settings.seq_len} {token}s",
        "held-out loss": f"{result.eval_loss:.4f} {unit}",
        **{f"{name} entropy": f"{nats:.4f} {unit}" for name, nats in entropy.items()},
        "time": f"{seconds:,.0f} seconds",
        "speed": f"{np.median(speeds):,.0f} {token}s per second" if speeds else "not measured",
        "seed": settings.seed,
    }

    return view.write_report(
        folder / "report.html",
        title=f"shardax run {folder.name}",
        summary=summary,
        facts={
            "Model": _model_facts(model, settings),
            "Optimizer": inputs.optimizer_facts(settings.steps, settings.learning_rate),
        },
        parameters=table,
        pictures=pictures,
        records=records,
        references=entropy,
        sample=sample,
        loss_unit=unit,
    )


def show_shardings(model: Any) -> dict[str, str]:
    """Prints drawings of two parameters and returns them as HTML by caption."""
    by_path = {format_path(path): variable for path, variable in iter_variables(model)}
    pictures: dict[str, str] = {}
    for path in _PICTURED:
        variable = by_path[path]
        print(f"\n{path} {variable.axes} {tuple(variable.shape)} over the devices:")
        view.show_sharding(variable)
        pictures[f"{path} {variable.axes}"] = view.sharding_html(variable)
    return pictures


def byte_entropy(part: Any) -> dict[str, float]:
    """Returns bigram and unigram entropy of a text part, in nats per byte."""
    pairs = np.zeros(256 * 256, np.int64)
    for segment in part.segments():
        pairs += np.bincount(segment[:-1] * np.int64(256) + segment[1:], minlength=256 * 256)
    pairs = pairs.reshape(256, 256)

    def entropy(counts: np.ndarray, totals: np.ndarray) -> float:
        occurs = counts > 0
        information = np.log(np.broadcast_to(totals, counts.shape)[occurs] / counts[occurs])
        return float((counts[occurs] * information).sum() / pairs.sum())

    unigram = entropy(pairs.sum(axis=0), pairs.sum())
    # Rounding may break what holds exactly: context never raises the entropy.
    bigram = min(entropy(pairs, pairs.sum(axis=1, keepdims=True)), unigram)
    return {"bigram": bigram, "unigram": unigram}


def _model_facts(model: Any, settings: RunSettings) -> dict[str, str]:
    """Returns the figures of a model by which people know it, by name."""
    config = model.config
    is_decoder = isinstance(config, models.DecoderConfig)
    heads = config if is_decoder else config.attention
    mlp_dim = config.mlp_dim if is_decoder else getattr(config.mlp, "dim", None)

    facts = {
        "model": settings.source or type(model).__name__,
        "parameters": _size_text([variable for _, variable in iter_variables(model, Param)]),
        "layers": f"{config.num_layers} of width {config.embed_dim}",
        "vocabulary": f"{config.vocab_size:,}",
        "dtype": f"{config.dtype}, parameters {config.param_dtype}",
    }
    if mlp_dim:
        facts["MLP"] = f"of width {mlp_dim}"
    if heads is not None:
        of_queries = f"{heads.num_heads} of size {heads.head_dim}"
        facts["heads"] = f"{of_queries}, {heads.num_kv_heads} of keys and values"
    if settings.lora is not None:
        trained = [variable for _, variable in iter_variables(model, "lora")]
        facts["trained"] = f"{_size_text(trained)}, adapters of rank {settings.lora}"
    if settings.precision is not None:
        facts["precision"] = settings.precision
    return facts


def _size_text(variables: Sequence[Variable]) -> str:
    """Formats the number of elements of parameters."""
    return f"{sum(math.prod(variable.shape) for variable in variables):,}"
