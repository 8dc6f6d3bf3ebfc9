# SPDX-License-Identifier: Apache-2.0
"""Which family of layouts a search finds by itself, and why: three cases of one small decoder.

A *family* is by what the activations are split: the batch (with parameters whole: data parallel;
split too: fully sharded), the sequence, or an inner dimension (tensor parallel). The mesh has one
axis of eight devices, so that each candidate is of one family, or of two at once. The searches are
those of ``docs/plan-cases.md``, which every run of the tests executes; here is more of why.
"""

from __future__ import annotations

from typing import Any

import optax
import pytest
from tests.plan.test_accuracy import MESH, Perceptron, rows, train

import shardax as sx
from shardax import plan
from shardax.models import DECODER_RULES, Decoder, DecoderConfig, next_token_loss
from shardax.plan import searching
from shardax.train import Optimizer

DEVICES = [{"model": 8}]


@sx.jit(donate_argnums=(0, 1))
def step(model: Any, optimizer: Any, batch: Any) -> Any:
    loss, gradients = sx.value_and_grad(next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def inputs(batch: int, length: int) -> tuple[Any, ...]:
    config = DecoderConfig(
        vocab_size=4000,
        num_layers=4,
        embed_dim=256,
        num_heads=16,
        num_kv_heads=16,
        head_dim=16,
        mlp_dim=1024,
        scan_layers=True,
        remat="full",
        dtype="bfloat16",
    )
    model = Decoder(config, rngs=sx.Rngs(0))
    tokens = plan.NamedShape((batch, length), "int32", ("batch", "seq"))
    return model, Optimizer(model, optax.adamw(1e-3)), {"inputs": tokens, "targets": tokens}


def found(batch: int, length: int, **fix: Any) -> dict[tuple[str, ...], plan.LayoutReport]:
    """Reports of a search, best first, by the names that the layout splits."""
    result = plan.search(
        step,
        inputs(batch, length),
        "tpu:v5e:2x4",
        meshes=DEVICES,
        fix=fix,
        top=None,
        effort="screen",
        compiler="estimate",
        cache=None,
        progress=False,
    )
    return {
        _family(tuple(name for name, axes in each.layout.rules if axes)): each
        for each in result
        if each.time is not None
    }


def _family(names: tuple[str, ...]) -> tuple[str, ...]:
    inner = {"vocab", "heads", "kv_heads", "mlp"}
    return tuple(dict.fromkeys("inner" if name in inner else name for name in names))


def band(report: plan.LayoutReport) -> plan.TimeBand:
    assert report.time is not None
    return report.time


@pytest.mark.slow
def test_large_batches_are_fully_sharded_since_gathering_weights_is_less_than_keeping_them() -> (
    None
):
    reports = found(256, 128, seq=None)
    assert list(reports)[:2] == [("batch", "embed"), ("batch",)]
    sharded, whole, tensor = (reports[k] for k in [("batch", "embed"), ("batch",), ("inner",)])
    assert sharded.argument_bytes["optimizer"] < 1.01 * whole.argument_bytes["optimizer"] / 8
    assert sharded.peak_bytes is not None and whole.peak_bytes is not None
    assert sharded.peak_bytes < 0.75 * whole.peak_bytes
    # Gathering weights twice instead of once: half as much again as sums of gradients.
    assert 1.2 < sharded.total_wire_bytes / whole.total_wire_bytes < 1.6
    assert tensor.total_wire_bytes > 20 * sharded.total_wire_bytes  # activations travel
    assert all(each.replicated_compute < 1.05 for each in (sharded, whole, tensor))


@pytest.mark.slow
def test_small_batches_are_tensor_parallel_since_activations_are_less_than_weights() -> None:
    reports = found(8, 16, seq=None, embed=None)
    best, *others = reports
    assert best == ("inner",)
    tensor = reports[best]
    for other in others:
        assert reports[other].total_wire_bytes > 2 * tensor.total_wire_bytes
        assert band(reports[other]).lower > band(tensor).upper  # no tie
    # Sums of gradients of weights that every device has are what data parallelism sends.
    whole = reports["batch",]
    weights = 2 * 4000 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    assert whole.total_wire_bytes == pytest.approx(2 * (7 / 8) * weights * 2, rel=0.01)


@pytest.mark.slow
def test_long_sequences_are_split_where_a_batch_of_one_cannot_be() -> None:
    reports = found(1, 4096, embed=None)
    assert next(iter(reports))[0] == "seq"
    assert not any("batch" in names for names in reports)
    tensor, sequence = reports["inner",], reports["seq",]
    # A token's vector, summed by all, against its keys and values, gathered by all.
    assert sequence.total_wire_bytes < tensor.total_wire_bytes
    assert sequence.flops == pytest.approx(tensor.flops, rel=0.05)


def test_rules_that_take_the_batchs_axis_for_parameters_first_are_warned_of() -> None:
    """The trap: ``override`` puts its rules first, so activations lose their batch."""
    wrong = DECODER_RULES.override({"embed": "data"})
    right = sx.Rules([(n, "data" if n == "embed" else axes) for n, axes in DECODER_RULES])
    result = plan.compare(
        step,
        inputs(16, 64),
        {"wrong": wrong, "right": right},
        {"data": 8, "model": 1},
        "tpu:v5e:2x4",
        compiler="estimate",
        cache=None,
    )
    assert result.best().layout.name == "right"
    assert result["right"].warnings == ()
    [warning] = [each for each in result["wrong"].warnings if "'batch'" in each]
    assert "'data' goes to 'embed', whose rule comes first" in warning
    assert "Put the rule of 'batch' before it." in warning
    assert result["wrong"].total_wire_bytes > 2 * result["right"].total_wire_bytes


def perceptron_search(monkeypatch: pytest.MonkeyPatch, **options: Any) -> plan.Plan:
    monkeypatch.setattr(searching, "FEW", 1)
    return plan.search(
        train,
        (Perceptron("float32"), rows("float32")),
        "cpu:8",
        meshes=[MESH],
        top=options.pop("top", None),
        effort="screen",
        cache=None,
        progress=False,
        **options,
    )


def test_of_many_candidates_those_that_promise_least_are_left_out_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = perceptron_search(monkeypatch, within=None)
    compiled = [each.layout.name for each in every if each.outcome == "fits"]
    few = perceptron_search(monkeypatch, within=1.0, finalists=0)
    left = [each for each in few if "rough estimate" in each.reason]
    assert {each.outcome for each in left} == {"rejected"}
    kept = [each.layout.name for each in few if each.outcome == "fits"]
    assert kept and left
    assert {*kept, *(each.layout.name for each in left)} == set(compiled)
    assert any(f"left out by a rough estimate: {len(left)}" in note for note in few.notes)


def test_more_are_compiled_until_as_many_fit_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(perceptron_search(monkeypatch, within=1.0, top=3, finalists=0)) == 3
