# SPDX-License-Identifier: Apache-2.0
"""Throughput says what it counts; utilization, traces and recompilations of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import TrainError
from shardax.train.speed import Throughput, utilization_of
from tests.training.train.small_runs import BATCH, SEQ, Bigram, Quiet, eval_batches, make_trainer


class Rows:
    """Endless batches from a list, with a position."""

    def __init__(self, *batches: Any) -> None:
        self.batches, self.number = batches, 0

    def state(self) -> int:
        return self.number

    def restore(self, state: int) -> None:
        self.number = state

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.number += 1
        return self.batches[(self.number - 1) % len(self.batches)]


IMAGES = {"image": np.ones((2, 4, 4, 3), np.float32), "label": np.zeros(2, np.int32)}
VECTORS = (np.ones((2, 3), np.float32), np.ones((2,), np.float32))
CLASSES = {"inputs": np.ones((2, 3), np.float32), "targets": np.zeros(2, np.int32)}
TOKENS = {"inputs": np.ones((2, 3), np.int32), "targets": np.zeros((2, 3), np.int32)}


@pytest.mark.parametrize(
    ("batch", "kind", "number"),
    [
        (TOKENS, "tokens", 6),
        ({"inputs": TOKENS["inputs"]}, "tokens", 6),
        (IMAGES, "images", 2),
        (VECTORS, "rows", 2),
        (CLASSES, "rows", 2),
        (VECTORS[0], "rows", 2),
    ],
)
def test_throughput_is_named_by_what_it_counts(
    tmp_path: Path, batch: Any, kind: str, number: int
) -> None:
    class Net(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(jnp.ones(()))

    def loss(model: Any, batch: Any) -> Any:
        return model.scale * sum(jnp.mean(x).astype(jnp.float32) for x in jax.tree.leaves(batch))

    trainer = make_trainer(
        tmp_path, 3, model=Net(), tx=optax.sgd(0.0), loss=loss, batches=Rows(batch), log_every=1
    )
    shown: list[str | None] = []
    display = Quiet()
    display.step = lambda step, loss, speed: shown.append(speed)  # type: ignore[method-assign]
    trainer.run(display=display)
    records = sx.train.read_jsonl(trainer.log_path)
    speeds = [{n: v for n, v in r.items() if n.endswith("_per_second")} for r in records]
    assert [list(each) for each in speeds] == [[], *[[f"{kind}_per_second"]] * 2]
    assert shown == [None, *(f"{s[f'{kind}_per_second']:,.0f} {kind}/s" for s in speeds[1:])]
    throughput = Throughput()
    for _ in range(3):
        throughput.count(batch, jnp.zeros(()))
    assert throughput._counted == 2 * number


FLOPS = 3 * 2 * BATCH * SEQ * 16 * 256  # the head's product, and two for its gradients


@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("parts", [1, 2])
def test_utilization_is_the_share_of_the_peak(tmp_path: Path, mesh: Any, parts: int) -> None:
    devices = 1 if mesh is None else 4
    trainer = make_trainer(
        tmp_path,
        3,
        mesh=None if mesh is None else jax.make_mesh(mesh, ("data", "model")),
        log_every=1,
        grad_accumulation=parts,
        peak_flops=1e12,
    )
    trainer.run(display=Quiet())
    first, *others = sx.train.read_jsonl(trainer.log_path)
    assert "mfu" not in first
    for record in others:
        steps_per_second = record["tokens_per_second"] / (BATCH * SEQ)
        assert record["mfu"] == pytest.approx(FLOPS * steps_per_second / devices / 1e12)


def test_trainer_without_known_peak_logs_no_utilization(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 2, log_every=1)
    trainer.run(display=Quiet())
    assert not any("mfu" in record for record in sx.train.read_jsonl(trainer.log_path))
    for peak in (0, -1.0, "1e12"):
        with pytest.raises(TrainError, match=r"peak_flops to be a number above 0.*peak_flops="):
            sx.train.TrainerSettings(steps=1, peak_flops=peak)  # type: ignore[arg-type]


def test_utilization_excludes_recomputation_and_counts_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    spec = jax.P("data")

    def rows(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w) @ w

    def loss(w: Any, x: Any, remat: bool) -> Any:
        return (jax.checkpoint(rows) if remat else rows)(x, w).sum()

    def mapped(w: Any, x: Any) -> Any:
        return jax.shard_map(rows, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)(x, w)

    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    split = jax.device_put(x, jax.NamedSharding(mesh, spec))
    one = 2 * 16 * 8 * 8
    for step, products in (
        (lambda: jax.jit(jax.value_and_grad(loss), static_argnums=2).lower(w, x, False), 5),
        (lambda: jax.jit(jax.value_and_grad(loss), static_argnums=2).lower(w, x, True), 5),
        (lambda: jax.jit(mapped).lower(w, split), 2),
    ):
        assert utilization_of(step, [jax.devices()[0]] * 4, 1e3) == (products * one / 4 / 1e3, "")


class _Device:
    """A device of JAX, as far as its kind is asked."""

    def __init__(self, kind: str, platform: str) -> None:
        self.device_kind, self.platform = kind, platform


@pytest.mark.parametrize(
    ("kind", "platform", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", 989e12),
        ("NVIDIA H200", "gpu", 989e12),
        ("NVIDIA A100-SXM4-40GB", "gpu", 312e12),
        ("TPU v5 lite", "tpu", 197e12),
        ("TPU v5e", "tpu", 197e12),
        ("TPU v5p", "tpu", 459e12),
        ("TPU v6 lite", "tpu", 918e12),
        ("NVIDIA GeForce RTX 4090", "gpu", None),
        ("cpu", "cpu", None),
    ],
)
def test_peak_of_known_devices_depends_on_dtype(
    kind: str, platform: str, peak: float | None
) -> None:
    x = jnp.ones((4, 4), jnp.bfloat16)
    found, why = utilization_of(
        lambda: jax.jit(jnp.dot).lower(x, x), [_Device(kind, platform)], None
    )
    assert why == "" and found == (None if peak is None else pytest.approx(2 * 4**3 / peak, 0.01))


# Of jaxlib 0.12 on Python 3.13, where an error would end the process.
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_trace_has_chosen_steps_and_operations_by_module(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 6, model=Bigram(dropout=0.1), layout={"profile": (3, 4)})
    display = Quiet()
    trainer.run(display=display)
    assert f"the trace of steps 3 to 4 is in {tmp_path / 'profile'}" in display.notes
    (file,) = tmp_path.glob("profile/**/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    events = [
        (event.name, dict(event.stats))
        for plane in data.planes
        for line in plane.lines
        for event in line.events
    ]
    assert sorted(stats["step_num"] for name, stats in events if name == "train") == [3, 4]
    ran = {stats.get("hlo_module") for _, stats in events}
    assert any(str(module).endswith("train_step") for module in ran)
    # The trace has the programs that ran, whose instructions have names of scopes.
    names = {text.decode() for text in re.findall(rb"jit\(\w+\)/[\w()./\[\]-]+", file.read_bytes())}
    assert any(re.search(r"jvp\(head\)+/.*dot_general", name) for name in names)
    assert any("jvp(embed)" in name for name in names)
    assert any("/optimizer/" in name for name in names)


def test_traced_run_trains_as_an_untraced_one(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path / "plain", 3)
    traced = make_trainer(tmp_path / "traced", 3, layout={"profile": (1, 3)})
    results = [trainer.run(display=Quiet()) for trainer in (plain, traced)]
    assert results[0].loss == results[1].loss
    assert [type(module) for _, module in sx.iter_modules(traced.model)] == [
        type(module) for _, module in sx.iter_modules(plain.model)
    ]
    for wrong in ((0, 3), (2, 1), (1, 4), (1,), 3, (1.0, 2)):
        with pytest.raises(TrainError, match=r"profile=.* must be the first and the last step"):
            make_trainer(tmp_path / "wrong", 3, layout={"profile": wrong})


def test_recompiled_step_says_why_once(tmp_path: Path) -> None:
    def batch(rows: int) -> Any:
        tokens = np.zeros((rows, SEQ), np.int32)
        return {"inputs": tokens, "targets": tokens}

    display = Quiet()
    batches = Rows(batch(8), batch(8), batch(4), batch(2))
    make_trainer(tmp_path / "a", 8, batches=batches, held_out=eval_batches()).run(display=display)
    told = [note for note in display.notes if "compiled again" in note]
    assert len(told) == 1
    assert told[0].startswith("step 3: train_step was compiled again, because ")
    assert "int32[8,16] -> int32[4,16]" in told[0]
    display = Quiet()
    make_trainer(tmp_path / "b", 3, held_out=eval_batches(), eval_every=1).run(display=display)
    assert not [note for note in display.notes if "compiled again" in note]
