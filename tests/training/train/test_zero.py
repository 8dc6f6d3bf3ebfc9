# SPDX-License-Identifier: Apache-2.0
"""ZeRO by rules: what of training is split over the data axis; and what is kept by the host."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import LayerConfigError, PartitionError, TrainError
from shardax.hlo import read_program
from shardax.train import data_parallel_value_and_grad
from tests.training.train.small_runs import RULES as RUN_RULES
from tests.training.train.small_runs import Quiet, make_trainer
from tests.values import with_values

KINDS = [AxisType.Auto, AxisType.Explicit]
EMBED, HIDDEN, ROWS = 64, 128, 16
RULES = {"batch": "data"}
ZERO = {sx.OptState: {"embed": "data"}}
WEIGHTS = 3 * EMBED * HIDDEN * 4  # bytes of the MLP's kernels


def make(dtype: Any = "float32", tx: Any = None) -> Any:
    model = with_values(sx.nn.MLP(EMBED, HIDDEN, param_dtype=dtype, rngs=sx.Rngs(0)))
    wide = {"master_dtype": "float32"} if dtype == "bfloat16" else {}
    tx = optax.adam(1e-2) if tx is None else tx
    return model, sx.train.Optimizer(model, tx, **wide)


def loss(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1) ** 2)


def make_batch(mesh: Any = None) -> Any:
    x = np.random.default_rng(0).normal(size=(ROWS, EMBED)).astype(np.float32)
    return x if mesh is None else jax.device_put(x, NamedSharding(mesh, P("data")))


LEVELS: dict[int, dict[str, Any]] = {
    0: {"rules": RULES},
    1: {"rules": RULES, "overrides": ZERO},
    2: {"rules": RULES, "overrides": ZERO, "split": True},
    3: {"rules": {**RULES, "embed": "data"}},
}


def placed(level: int, mesh: Any, dtype: Any = "float32") -> Any:
    """A model and an optimizer at a level of ZeRO, their shardings and a step of training."""
    where = dict(LEVELS[level])
    gradient = sx.value_and_grad(loss)
    if where.pop("split", False):
        gradient = data_parallel_value_and_grad(loss, "data", layout=ZERO[sx.OptState])
    pair = make(dtype)
    sx.shard(pair, mesh, **where)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradients = gradient(model, x)
        optimizer.update(gradients)
        return value

    places = sx.shardings(pair, mesh, **where)
    return pair, places, sx.jit(step, in_shardings=(*places, None), donate_argnums=(0, 1))


@functools.cache
def mesh_of(count: int = 8, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """A mesh of data-parallel devices."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=devices)


@functools.cache
def compiled(level: int, count: int) -> Any:
    """The compiled step at a level, over so many devices."""
    mesh = mesh_of(count)
    pair, _, run = placed(level, mesh)
    with jax.set_mesh(mesh), sx.axis_rules(LEVELS[level]["rules"]):
        return run.lower(*pair, make_batch(mesh)).compile()


def train(level: int, mesh: Any, dtype: Any = "float32") -> Any:
    """Parameters after some updates at a level, all of which stay where they are."""
    pair, places, run = placed(level, mesh, dtype)
    with jax.set_mesh(mesh), sx.axis_rules(LEVELS[level]["rules"]):
        for _ in range(3):
            run(*pair, make_batch(mesh))
    for tree, at in zip(pair, places, strict=True):
        for path, variable in sx.iter_variables(tree):
            wanted = at.flat().get(path)
            assert wanted is None or variable.sharding.is_equivalent_to(wanted, variable.ndim)
    return sx.state(pair[0])


@functools.cache
def on_one_device(dtype: str) -> Any:
    """Parameters after as many updates of one device."""
    model, optimizer = make(dtype)

    @sx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(sx.grad(loss)(model, x))

    for _ in range(3):
        step(model, optimizer, make_batch())
    return sx.state(model)


# Each level under both kinds of axes and with both types; each kind with both types.
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zero_trains_as_one_device_at_all_levels(kind: AxisType, level: int) -> None:
    dtype = ["float32", "bfloat16"][(KINDS.index(kind) + level // 2) % 2]
    found = train(level, mesh_of(kind=kind), dtype)
    for path, value in on_one_device(dtype).flat().items():
        numbers = (np.asarray(each, np.float32) for each in (found.flat()[path], value))
        apart = np.abs(np.subtract(*numbers))
        # Adam takes a whole step by the sign of a gradient that is next to nothing.
        assert apart.max() < 1e-5 if dtype == "float32" else apart.mean() < 1e-4


@pytest.mark.parametrize("count", [2, 8])
def test_zero_holds_a_share_of_more_at_each_level(count: int) -> None:
    held = {
        level: compiled(level, count).memory_analysis().argument_size_in_bytes for level in LEVELS
    }
    rest = ROWS // count * EMBED * 4 + 2 * 4  # rows, and two counts of steps
    moments = 2 * WEIGHTS
    assert held == {
        0: WEIGHTS + moments + rest,
        1: WEIGHTS + moments // count + rest,
        2: WEIGHTS + moments // count + rest,
        3: WEIGHTS // count + moments // count + rest,
    }


def test_split_gradients_halve_reduction_traffic_and_memory() -> None:
    mesh = mesh_of()
    sent: dict[int, dict[str, float]] = {}
    for level in (0, 2):
        sent[level] = {}
        for each in read_program(compiled(level, 8).as_text(), {"data": 8}).collectives:
            sent[level][each.kind] = sent[level].get(each.kind, 0) + each.wire_bytes
    share, of_loss = 7 / 8 * WEIGHTS, 2 * 7 / 8 * 4
    assert sent[0] == {"all-reduce": 2 * share + of_loss}
    # The updates are gathered; in all, as much travels as in an all-reduce.
    assert sent[2] == {"reduce-scatter": share, "all-gather": share, "all-reduce": of_loss}

    def temporary(layout: Any) -> int:
        model = make()[0]
        sx.shard(model, mesh, RULES)
        with jax.set_mesh(mesh), sx.axis_rules(RULES):
            step = data_parallel_value_and_grad(loss, "data", layout=layout, steps=2)
            analysis = sx.jit(step).lower(model, make_batch(mesh)).compile().memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    # Whole they are summed once over microbatches, and once over devices.
    assert temporary(None) - temporary({"embed": "data"}) > WEIGHTS


def losses_and_norms(
    folder: Path, kind: AxisType, layout: Any, masters: bool, **settings: Any
) -> list[Any]:
    """What a run logs whose batches are split over two axes."""
    mesh = jax.make_mesh((2, 2, 2), ("slice", "data", "model"), axis_types=(kind,) * 3)
    trainer = make_trainer(folder, 4, mesh=mesh, layout=layout, log_every=1, **settings)
    trainer.rules = RUN_RULES.override({"batch": OVER})
    if masters:
        model = trainer.model
        trainer.optimizer = sx.train.Optimizer(model, optax.adam(1e-2), master_dtype="float64")
    trainer.run(display=Quiet())
    records = sx.train.read_jsonl(trainer.log_path)
    return [[record[key] for record in records] for key in ("loss", "grad_norm")]


@pytest.fixture(scope="module")
def unreduced(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same, of a run whose gradients the compiler sums."""
    return losses_and_norms(tmp_path_factory.mktemp("plain"), AxisType.Auto, None, False)


OVER = ("slice", "data")
WHOLE: dict[str, Any] = {"reduce_over": OVER}
NARROW: dict[str, Any] = {"reduce_over": OVER, "reduce_dtype": "bfloat16"}
PARTS: dict[str, Any] = {"reduce_over": OVER, "grad_accumulation": 2}


# Each pair of settings, kind of axes, and masters or none.
@pytest.mark.parametrize(
    ("kind", "masters", "settings", "tolerance"),
    [
        (AxisType.Auto, False, WHOLE, 1e-5),
        (AxisType.Explicit, True, WHOLE, 1e-5),
        (AxisType.Auto, True, NARROW, 1e-2),
        (AxisType.Explicit, False, NARROW, 1e-2),
        (AxisType.Auto, False, PARTS, 1e-5),
        (AxisType.Explicit, True, PARTS, 1e-5),
    ],
    ids=str,
)
def test_reduced_gradients_train_as_those_of_the_compiler(
    tmp_path: Path,
    unreduced: list[Any],
    kind: AxisType,
    masters: bool,
    settings: dict[str, Any],
    tolerance: float,
) -> None:
    layout = {"overrides": {sx.OptState: {"embed": OVER}}}
    found = losses_and_norms(tmp_path, kind, layout, masters, **settings)
    np.testing.assert_allclose(found, unreduced, rtol=tolerance)


def test_invalid_reduction_settings_are_refused(tmp_path: Path, auto_mesh: Any) -> None:
    with pytest.raises(TrainError, match="reduce_over="):
        sx.train.TrainerSettings(steps=1, reduce_dtype="bfloat16")
    with pytest.raises(TrainError, match="no axis 'slice'"):
        make_trainer(tmp_path, 1, mesh=auto_mesh, reduce_over=("slice", "data"))


# --- Memory of the host ---


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("in_jit", [True, False], ids=["compiled", "eager"])
def test_update_uses_optimizer_state_in_host_memory(kind: AxisType, in_jit: bool) -> None:
    mesh = mesh_of(kind=kind)
    hosted: dict[str, Any] = {"overrides": ZERO, "memory_kind": {sx.OptState: "pinned_host"}}

    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(sx.grad(loss)(model, x))

    pair, plain = make(), make()
    sx.shard(pair, mesh, RULES, **hosted)
    sx.shard(plain, mesh, RULES, overrides=ZERO)
    places = sx.shardings(pair, mesh, RULES, **hosted)
    run = sx.jit(step, in_shardings=(*places, None), donate_argnums=(0, 1)) if in_jit else step
    expected = sx.jit(step)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        for _ in range(2):
            run(*pair, make_batch(mesh))
            expected(*plain, make_batch(mesh))
    for one, other in zip(*map(jax.tree.leaves, (sx.state(pair), sx.state(plain))), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    kinds = {v.sharding.memory_kind for _, v in sx.iter_variables(pair[1].opt_state)}
    assert kinds == {"pinned_host"}
    assert {v.sharding.memory_kind for _, v in sx.iter_variables(pair[0])} == {"device"}


def test_unknown_memory_is_refused_before_anything_moves() -> None:
    model = sx.nn.MLP(EMBED, HIDDEN, rngs=sx.Rngs(0))
    pair = model, sx.train.Optimizer(model, optax.adam(1e-2))
    with pytest.raises(PartitionError, match="no such memory"):
        sx.shard(pair, mesh_of(), RULES, memory_kind={sx.OptState: "remote_host"})
    assert all(variable.is_lazy for _, variable in sx.iter_variables(pair[1]))


POLICIES: list[Any] = [
    {"attention": "device"},
    {"layer_input": "pinned_host"},
    {"layer_input": "pinned_host", "attention": "device"},
]


@pytest.mark.parametrize("scanned", [False, True], ids=["layers", "scanned"])
def test_named_activations_are_saved_in_their_memory(scanned: bool) -> None:
    tokens = np.random.default_rng(0).integers(0, 64, (2, 17))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = sx.jit(sx.value_and_grad(sx.models.next_token_loss))
    layers, found = 2, []
    for remat in (None, *POLICIES):
        config = sx.models.DecoderConfig(
            vocab_size=64, num_layers=layers, scan_layers=scanned, remat=remat
        )
        model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
        found.append(step(model, batch))
        # CPU has one memory; the program for TPU says what goes where.
        text = step.trace(model, batch).lower(lowering_platforms=("tpu",)).as_text()
        hosted = text.count("pinned_host")
        expected = "pinned_host" in dict(remat or {}).values()
        assert hosted == (0 if not expected else 1 if scanned else layers), remat
    for each in found[1:]:
        for one, other in zip(*map(jax.tree.leaves, (each, found[0])), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_names_and_kinds_that_say_nothing_are_refused() -> None:
    with pytest.raises(
        LayerConfigError, match=r"the name 'mpl'.*'layer_input', 'attention', 'mlp'"
    ):
        sx.models.DecoderConfig(remat={"mpl": "device"})
    for wrong in ({"mlp": "disk"}, {}, [("mlp",)], 3):
        with pytest.raises(LayerConfigError, match=r"memory kinds by name"):
            sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), 2, remat=wrong)
    config = sx.models.DecoderConfig(remat={"mlp": "device"})
    assert config == sx.models.DecoderConfig(remat=[["mlp", "device"]])  # as JSON has it
    assert hash(config) == hash(sx.models.DecoderConfig(remat=config.remat))
