# SPDX-License-Identifier: Apache-2.0
"""An EMA is a model of averages; the trainer updates, evaluates, saves and shards it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import TrainError
from shardax.train import EMA
from tests.training.train.small_runs import Bigram, Quiet, eval_batches, make_trainer, raw, state_of
from tests.values import with_values


def model_of(dtype: Any) -> Any:
    rngs = sx.Rngs(0)
    linear = sx.nn.Linear(4, 4, param_dtype=dtype, rngs=rngs)
    layers = [linear, sx.nn.BatchNorm(4, rngs=rngs), sx.nn.Dropout(0.1, rngs=rngs)]
    return with_values(sx.nn.Sequential(*layers))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.99, lambda t: jnp.minimum(0.99, (1 + t) / (10 + t))])
def test_averages_follow_the_formula_other_state_is_copied(dtype: Any, decay: Any) -> None:
    model = model_of(dtype)
    ema, optimizer = EMA(model, decay), sx.train.Optimizer(model, optax.sgd(1e-2))

    @sx.jit(donate_argnums=(0, 1, 2))
    def step(model: Any, optimizer: Any, ema: EMA, x: Any) -> None:
        optimizer.update(sx.grad(lambda model: (model(x) ** 2).sum())(model))
        ema.update(model)

    batches = np.random.default_rng(0).normal(size=(20, 2, 4)).astype(dtype)
    expected = {
        path: np.asarray(v[...], np.float64) for path, v in sx.iter_variables(model, sx.Param)
    }
    for number in range(20):
        step(model, optimizer, ema, batches[number])
        share = 1 - float(decay(number) if callable(decay) else decay)
        for path, variable in sx.iter_variables(model, sx.Param):
            expected[path] += share * (np.asarray(variable[...], np.float64) - expected[path])
    rounding = {jnp.float32: 1e-6, jnp.bfloat16: 2**-8}[dtype]
    for path, average in sx.iter_variables(ema.model, sx.Param):
        assert average.dtype == dict(sx.iter_variables(model))[path].dtype
        np.testing.assert_allclose(
            np.asarray(average[...], np.float64), expected[path], rtol=rounding, atol=1e-6
        )
    others = [(path, v) for path, v in sx.iter_variables(model) if not isinstance(v, sx.Param)]
    copies = dict(sx.iter_variables(ema.model))
    assert [path[-1] for path, _ in others] == ["mean", "var", "key", "count"]
    assert all(raw(variable) == raw(copies[path]) for path, variable in others)


@pytest.mark.parametrize("decay", [1.0, -0.1, True, "0.9", None])
def test_decay_that_is_none_is_refused(decay: Any) -> None:
    with pytest.raises(sx.errors.TransformError, match=r"decay=.* must be a number in \[0, 1\)"):
        EMA(model_of(jnp.float32), decay)


def test_ema_refuses_another_model_and_changes_nothing() -> None:
    model, ema = Bigram(), EMA(Bigram())
    before = {path: raw(variable) for path, variable in sx.iter_variables(ema)}
    model.head.bias = None
    with pytest.raises(sx.errors.TrainError, match=r"reshaped; nothing .*: \.head\.bias"):
        ema.update(model)
    assert {path: raw(variable) for path, variable in sx.iter_variables(ema)} == before
    with pytest.raises(sx.errors.TrainError, match="matches wrt=BatchStat"):
        EMA(model, wrt=sx.BatchStat)


MESHES = [None, AxisType.Auto, AxisType.Explicit]


def run(folder: Path, kind: Any, steps: int, **options: Any) -> tuple[Any, Any]:
    """A run with an EMA, over a mesh."""
    axes = {} if kind is None else {"axis_types": (kind, kind)}
    mesh = None if kind is None else jax.make_mesh((2, 2), ("data", "model"), **axes)
    model = Bigram(dropout=0.1)
    trainer = make_trainer(
        folder,
        6,
        model=model,
        mesh=mesh,
        held_out=eval_batches(),
        log_every=1,
        layout={"ema": EMA(model, 0.5)},
    )
    stop = Quiet(lambda step: step == steps and trainer.callbacks.__setattr__("stopping", True))
    return trainer, trainer.run(display=stop, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that were never stopped, by the kind of their mesh; each is made once."""
    return functools.cache(lambda kind: run(tmp_path_factory.mktemp("whole"), kind, 6))


@pytest.mark.parametrize("kind", MESHES, ids=str)
def test_run_evaluates_its_averages_not_its_model(tmp_path: Path, whole: Any, kind: Any) -> None:
    trainer, result = whole(kind)
    assert trainer.ema is not None and int(trainer.ema.average.step) == 6
    kernel, average = trainer.model.head.kernel, trainer.ema.model.head.kernel
    assert average.sharding == kernel.sharding and raw(average) != raw(kernel)
    averages = sx.unshard(sx.clone(trainer.ema.model))
    alone = make_trainer(tmp_path, 1, model=averages, held_out=eval_batches())
    assert result.eval_loss == pytest.approx(alone.evaluate(), rel=1e-5)
    assert trainer.evaluate() == pytest.approx(result.eval_loss)


@pytest.mark.parametrize("kind", MESHES, ids=str)
def test_resumed_run_goes_on_with_its_averages(tmp_path: Path, whole: Any, kind: Any) -> None:
    run(tmp_path, kind, 3)
    resumed, again = run(tmp_path, kind, 6, resume=True)
    trainer, result = whole(kind)
    assert state_of(resumed) == state_of(trainer) and again.eval_loss == result.eval_loss


def test_resuming_with_another_ema_is_refused(tmp_path: Path) -> None:
    run(tmp_path, None, 2)
    for ema, message in (
        (None, r"\.ema\.decay: 0\.5 when saved, nothing now"),
        (EMA(Bigram(dropout=0.1), 0.9), r"\.ema\.decay: 0\.5 when saved, 0\.9 now"),
    ):
        model = Bigram(dropout=0.1)
        trainer = make_trainer(tmp_path, 6, model=model, layout={"ema": ema})
        with pytest.raises(TrainError, match=message):
            trainer.run(resume=True, display=Quiet())
    with pytest.raises(TrainError, match=r"ema is a float, but a Trainer needs EMA\(model"):
        make_trainer(tmp_path / "no", 6, layout={"ema": 0.9})


def layout_of(variable: sx.Variable) -> Any:
    return variable.value.sharding.devices_indices_map(variable.shape)


def test_eager_update_follows_the_formula_and_keeps_layouts() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = model_of(jnp.float32)
    ema = EMA(model, 0.75)
    sx.shard(model, mesh, {"embed": "data"})
    sx.shard(ema.model, mesh, {"embed": "model"})
    layouts = {path: layout_of(v) for path, v in sx.iter_variables(ema.model)}
    expected = {path: v[...] + 7 / 16 for path, v in sx.iter_variables(model, sx.Param)}

    for _, variable in sx.iter_variables(model, sx.Param):
        variable.value = variable.value + 1
    for _ in range(2):
        ema.update(model)

    assert {path: layout_of(v) for path, v in sx.iter_variables(ema.model)} == layouts
    assert int(ema.average.step) == 2
    for path, average in sx.iter_variables(ema.model, sx.Param):
        np.testing.assert_allclose(average[...], expected[path], rtol=1e-6)
