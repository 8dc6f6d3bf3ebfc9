# SPDX-License-Identifier: Apache-2.0
"""Training with states of the optimizer that lie otherwise than their parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import NoMeshError, PartitionCheckError, PartitionError, TrainError
from shardax.models import next_token_loss
from tests.training.train.small_runs import (
    BATCH,
    RULES,
    SEQ,
    TRAIN,
    Bigram,
    Quiet,
    eval_batches,
    make_trainer,
    raw,
    state_of,
)

STEPS = 6
ZERO: dict[str, Any] = {"overrides": {sx.OptState: {"embed": "data"}}}
HOSTED: dict[str, Any] = {**ZERO, "memory_kind": {sx.OptState: "pinned_host"}}
PARAMETERS = {
    ("embed", "embedding"): P("model", None),
    ("head", "kernel"): P(None, "model"),
    ("head", "bias"): P("model"),
}
MOMENTS = {
    ("embed", "embedding"): P("model", "data"),
    ("head", "kernel"): P("data", "model"),
    ("head", "bias"): P("model"),
}


def test_run_warns_once_of_misspelt_names(tmp_path: Path, auto_mesh: Mesh) -> None:
    model = Bigram()
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.adam(1e-2)),
        next_token_loss,
        sx.train.TrainBatches(TRAIN, batch_size=BATCH, seq_len=SEQ),
        directory=tmp_path,
        settings=sx.train.TrainerSettings(steps=2),
        held_out=eval_batches(),
        mesh=auto_mesh,
        rules={"batch": "data", "vocb": "model"},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
        trainer.evaluate()
    (text,) = [str(w.message) for w in caught if "misspelt" in str(w.message)]
    assert "'vocb'" in text


class Layouts(Quiet):
    """A display that asserts after every step where parameters and moments are."""

    def __init__(self, stop_at: int = 0, moments: Any = MOMENTS, kind: str = "device") -> None:
        super().__init__(self.look)
        self.stop_at, self.moments, self.kind = stop_at, moments, kind
        self.trainer: Any = None

    def look(self, step: int) -> None:
        mesh = self.trainer.mesh
        for path, spec in PARAMETERS.items():
            at: dict[Any, Any] = dict(sx.iter_variables(self.trainer.model))
            assert at[path].sharding.is_equivalent_to(NamedSharding(mesh, spec), at[path].ndim)
        for path, variable in sx.iter_variables(self.trainer.optimizer.opt_state):
            spec = self.moments.get(path[-2:], P())
            wanted = NamedSharding(mesh, spec, memory_kind=self.kind)
            assert variable.sharding.is_equivalent_to(wanted, variable.ndim), (step, path)
        if step == self.stop_at:
            raise PowerCutError


class PowerCutError(Exception):
    """Raised in the middle of a run."""


def run(directory: Path, mesh: Mesh, layout: Any, resume: bool = False, **look: Any) -> Any:
    """A run that asserts the layout after every step; with its log of losses."""
    display = Layouts(**look)
    display.trainer = make_trainer(
        directory,
        STEPS,
        mesh=mesh,
        layout=layout,
        held_out=eval_batches(),
        log_every=1,
        checkpoint_every=2,
    )
    display.trainer.run(display=display, resume=resume)
    records = sx.train.read_jsonl(display.trainer.log_path)
    return display.trainer, [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses where moments lie as their parameters."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return run(tmp_path_factory.mktemp("plain"), mesh, None, moments=PARAMETERS)[1]


def test_further_split_moments_stay_and_train_the_same(
    tmp_path: Path, mesh: Mesh, plain: list[float]
) -> None:
    trainer, losses = run(tmp_path, mesh, ZERO)
    assert losses == pytest.approx(plain, rel=1e-6)
    assert losses[-1] < losses[0]
    shares = {
        path[-2:]: variable.sharding.shard_shape(variable.shape)
        for path, variable in sx.iter_variables(trainer.optimizer.opt_state)
        if path[0:2] == (0, "mu")
    }
    assert shares[("embed", "embedding")] == (64, 8)  # of (256, 16)


def test_resumed_run_has_the_same_layout_and_bits(tmp_path: Path, auto_mesh: Mesh) -> None:
    whole, losses = run(tmp_path / "whole", auto_mesh, ZERO)
    with pytest.raises(PowerCutError):
        run(tmp_path / "cut", auto_mesh, ZERO, stop_at=3)
    resumed, again = run(tmp_path / "cut", auto_mesh, ZERO, resume=True)
    assert again == losses
    assert state_of(resumed) == state_of(whole)


def test_host_moments_train_the_same_and_stay_there(
    tmp_path: Path, auto_mesh: Mesh, plain: list[float]
) -> None:
    with pytest.raises(PowerCutError):
        run(tmp_path, auto_mesh, HOSTED, stop_at=3, kind="pinned_host")
    _, losses = run(tmp_path, auto_mesh, HOSTED, resume=True, kind="pinned_host")
    assert losses == pytest.approx(plain, rel=1e-6)


def test_evaluation_alone_places_the_model_as_training_does(
    tmp_path: Path, auto_mesh: Mesh
) -> None:
    def is_head(path: Any, variable: Any) -> bool:
        return path[:2] == (0, "head")

    layout: Any = {"overrides": {is_head: P()}, "memory_kind": {is_head: "pinned_host"}}
    trainer = make_trainer(tmp_path, 1, mesh=auto_mesh, layout=layout, held_out=eval_batches())
    assert trainer.evaluate() == pytest.approx(np.log(256), abs=0.2)
    kernel = trainer.model.head.kernel
    assert kernel.sharding.is_equivalent_to(
        NamedSharding(auto_mesh, P(), memory_kind="pinned_host"), 2
    )


def test_invalid_layouts_are_refused_before_anything_is_made(
    tmp_path: Path, auto_mesh: Mesh
) -> None:
    for layout in (ZERO, {"memory_kind": "pinned_host"}):
        with pytest.raises(TrainError, match=f"{next(iter(layout))}, but no mesh"):
            make_trainer(tmp_path, 1, layout=layout)
    split = make_trainer(tmp_path, 1, mesh=auto_mesh, layout={"overrides": {...: P("dat")}})
    with pytest.raises(PartitionCheckError, match="'dat'"):
        split.run(display=Quiet())
    malformed = make_trainer(tmp_path, 1, mesh=auto_mesh, layout={"overrides": {...: "data"}})
    with pytest.raises(PartitionError):
        malformed.run(display=Quiet())
    assert list(tmp_path.iterdir()) == []
    assert malformed.model.head.kernel.is_lazy


# --- checkpoints ----------------------------------------------------------------------------------


def test_restore_places_a_checkpoint_as_shard_does(tmp_path: Path, mesh: Mesh) -> None:
    saved = Bigram(seed=1)
    sx.train.checkpoint.save(saved, tmp_path / "one")
    smaller = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    overrides = {sx.PathContains("head"): {"embed": "data"}}
    for where in (mesh, smaller):
        model = Bigram()
        sx.train.checkpoint.restore(
            model, tmp_path / "one", where, RULES, overrides=overrides, memory_kind="pinned_host"
        )
        placed = sx.shard(
            Bigram(seed=1), where, RULES, overrides=overrides, memory_kind="pinned_host"
        )
        for (path, one), (_, other) in zip(
            sx.iter_variables(model), sx.iter_variables(placed), strict=True
        ):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim), path
            assert raw(one) == raw(other)


def test_overrides_of_a_restore_need_a_mesh(tmp_path: Path) -> None:
    weight = sx.Param(jnp.ones(4), axes=("embed",))
    sx.train.checkpoint.save(weight, tmp_path / "one")
    with pytest.raises(NoMeshError):
        sx.train.checkpoint.restore(weight, tmp_path / "one", overrides={...: {"embed": "data"}})
