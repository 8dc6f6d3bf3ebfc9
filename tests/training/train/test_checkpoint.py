# SPDX-License-Identifier: Apache-2.0
"""A checkpoint brings all values back, onto any mesh, into lazy models, or says why it cannot."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import shardax as sx
from shardax.errors import (
    CheckpointError,
    DataError,
    ModuleError,
    PartitionCheckError,
    PathExistsError,
    PathNotFoundError,
)
from shardax.train import ByteText, Checkpoints, Optimizer, TrainBatches, checkpoint_format
from shardax.train.checkpoint import restore, save
from tests.advice import run_advice
from tests.training.train.small_runs import waves

RULES = sx.Rules({"vocab": "model", "embed": None, "mlp": "model"})


class Block(sx.Module):
    def __init__(self, rngs: sx.Rngs, width: int, dtype: Any, init: Any) -> None:
        self.kernel = sx.Param(sx.Init(init, (8, width), dtype, rngs=rngs), axes=("embed", "mlp"))
        self.bias = sx.Param(sx.Init(init, (width,), rngs=rngs), axes=("mlp",))


class Net(sx.Module):
    """Tied weights, random streams, counters, several dtypes, a pytree, an empty array."""

    def __init__(
        self, seed: int = 0, *, width: int = 8, dtype: Any = jnp.bfloat16, init: Any = waves
    ) -> None:
        rngs = sx.Rngs(params=seed)
        self.embed = sx.Param(sx.Init(init, (16, 8), rngs=rngs), axes=("vocab", "embed"))
        self.blocks = [Block(rngs, width, dtype, init) for _ in range(2)]
        self.head = self.embed
        self.rngs = sx.Rngs(dropout=seed + 1)
        self.count = sx.Variable(0)
        self.mask = sx.Variable(np.array([True, False]))
        self.nothing = sx.Variable(np.zeros((0, 3), np.float32))
        self.pair = sx.Variable({"a": np.ones(2, np.float32), "b": (np.arange(3),)})

    def __call__(self, tokens: Any) -> Any:
        self.count += 1
        noise = jax.random.normal(self.rngs.dropout(), (8,))
        x = self.embed.value[tokens] + noise[None]
        for block in self.blocks:
            x = jnp.tanh(x @ block.kernel.astype(jnp.float32) + block.bias[None])
        return x


@sx.jit
def train_step(model: Any, optimizer: Any) -> Any:
    tokens = np.arange(4)
    grads = sx.grad(lambda model: jnp.mean((model(tokens) - 1) ** 2))(model)
    optimizer.update(grads)


def refuses(key: Any, shape: Any, dtype: Any) -> Any:
    raise AssertionError("an initializer ran")


def values_of(tree: Any) -> dict[Any, Any]:
    """Returns the numbers of a tree by path, random keys as integers."""
    found = {}
    for path, variable in sx.iter_variables(tree):
        leaves = jax.tree.leaves(variable.value)
        for i, leaf in enumerate(leaves):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            found[(*path, i)] = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return found


def assert_same(a: Any, b: Any) -> None:
    a, b = values_of(a), values_of(b)
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


@functools.cache
def trained_once(steps: int) -> tuple[Net, Optimizer]:
    model = Net()
    optimizer = Optimizer(model, optax.adamw(1e-2))
    for _ in range(steps):
        train_step(model, optimizer)
    return model, optimizer


def trained(steps: int = 2) -> tuple[Net, Optimizer]:
    """A model and its optimizer after some steps."""
    return sx.clone(trained_once(steps))


def lazy(**options: Any) -> tuple[Net, Optimizer]:
    model = Net(seed=9, **options)
    return model, Optimizer(model, optax.adamw(1e-2))


# --- round trips ----------------------------------------------------------------------------------


def test_lazy_model_is_restored_without_running_initializers(tmp_path: Path) -> None:
    saved = trained()
    save(saved, tmp_path / "checkpoint")
    model, optimizer = lazy(init=refuses)
    restore((model, optimizer), tmp_path / "checkpoint")
    assert_same((model, optimizer), saved)
    assert model.head is model.embed and optimizer.model is model
    assert model.blocks[0].kernel.dtype == jnp.bfloat16
    key = model.rngs.dropout.key.value
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert sx.graphdef((model, optimizer)) == sx.graphdef(lazy())


def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    straight = trained(4)
    save(trained(2), tmp_path / "checkpoint")
    resumed = lazy()
    restore(resumed, tmp_path / "checkpoint")
    for _ in range(2):
        train_step(*resumed)
    assert_same(resumed, straight)


def test_unused_lazy_model_is_saved_as_initialized(tmp_path: Path) -> None:
    save(Net(3), tmp_path / "checkpoint")
    model = Net(4)
    restore(model, tmp_path / "checkpoint")
    assert_same(model, Net(3))


def test_tied_weight_is_stored_once(tmp_path: Path) -> None:
    save(Net(), tmp_path / "checkpoint")
    stored = [array["path"] for array in description(tmp_path / "checkpoint")["arrays"]]
    assert ".embed" in stored and ".head" not in stored


def files_in(path: Path) -> list[Path]:
    return [item for item in path.rglob("*") if item.is_file()]


def description(path: Path) -> dict[str, Any]:
    return json.loads((path / "description.json").read_text())


def test_description_says_what_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Small(sx.Module):
        def __init__(self) -> None:
            self.kernel = sx.Param(jnp.ones((2, 3), jnp.bfloat16), axes=("embed", None))
            self.key = sx.RngState(jax.random.key(0))
            self.values = sx.Variable({"a": jnp.ones(2)})

    save({"model": Small(), "data": {"step": 3}}, tmp_path / "checkpoint", extra=[1, "x"])
    found = description(tmp_path / "checkpoint")
    files = found.pop("files")
    present = {str(f.relative_to(tmp_path / "checkpoint")) for f in files_in(tmp_path)}
    assert present == {*files, "description.json"}
    assert all(len(file["sha256"]) == 64 and file["bytes"] > 0 for file in files.values())
    assert len(found.pop("sha256")) == 64
    assert found == {
        "format": "shardax",
        "version": 2,
        "step": None,
        "arrays": [
            {
                "path": ".model.kernel",
                "shape": [2, 3],
                "dtype": "bfloat16",
                "axes": ["embed", None],
            },
            {"path": ".model.key", "shape": [], "dtype": "key<fry>", "key": "threefry2x32"},
            {"path": ".model.values['a']", "shape": [2], "dtype": "float32"},
        ],
        "positions": {".data": {"step": 3}},
        "extra": [1, "x"],
    }


@pytest.mark.parametrize(
    "value",
    [
        jnp.array([1 + 2j]),
        jnp.ones(3, jnp.int8),
        jnp.ones(3, jnp.float8_e4m3fn),
        jnp.zeros((0, 4)),
        jax.random.split(jax.random.key(1, impl="rbg"), 3),
        jax.random.split(jax.random.key(1), 0),
    ],
    ids=["complex", "int8", "float8", "empty", "rbg keys", "no keys"],
)
def test_kinds_of_arrays_survive(value: Any, tmp_path: Path) -> None:
    save(sx.Variable(value), tmp_path / "checkpoint")
    template = sx.Variable(jax.ShapeDtypeStruct(value.shape, value.dtype))
    restore(template, tmp_path / "checkpoint")
    assert template.dtype == value.dtype and template.shape == value.shape
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(template.value) == jax.random.key_impl(value)
    assert_same(template, sx.Variable(value))


# --- meshes ---------------------------------------------------------------------------------------


def make_mesh(*shape: int) -> Mesh:
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def assert_laid_out(tree: Any, mesh: Mesh, rules: Any) -> None:
    for part in tree if isinstance(tree, tuple) else (tree,):
        expected = jax.tree.leaves(sx.shardings(part, mesh, rules))
        for array, sharding in zip(jax.tree.leaves(sx.state(part)), expected, strict=True):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_checkpoint_of_one_mesh_is_restored_onto_another(tmp_path: Path, mesh: Mesh) -> None:
    saved = trained()
    sx.shard(saved, make_mesh(4, 2), RULES)
    save(saved, tmp_path / "checkpoint")
    other_rules = {"embed": "data", "vocab": "model", "mlp": None}
    for rules in (RULES, other_rules):
        found = lazy(init=refuses)
        restore(found, tmp_path / "checkpoint", mesh, rules)
        assert_laid_out(found, mesh, rules)
        assert_same(found, saved)
    one_device = lazy(init=refuses)
    restore(one_device, tmp_path / "checkpoint")
    assert_same(one_device, saved)


def test_restoring_onto_a_mesh_keeps_only_shards(tmp_path: Path) -> None:
    save(Net(), tmp_path / "checkpoint")
    mesh, model = make_mesh(2, 4), Net(init=refuses)
    before = {id(array) for array in jax.live_arrays()}
    restore(model, tmp_path / "checkpoint", mesh, RULES)
    new = [array for array in jax.live_arrays() if id(array) not in before]
    held = {id(leaf) for leaf in jax.tree.leaves(sx.state(model))}
    keys = [a for a in new if id(a) not in held]  # a random key also holds its integers
    assert all(array.nbytes <= 16 for array in keys)
    kernel = model.blocks[0].kernel.value
    assert [s.data.shape for s in kernel.addressable_shards] == [(8, 2)] * 8


def test_restore_without_mesh_follows_the_shardings_in_place(tmp_path: Path) -> None:
    saved = trained()
    save(saved, tmp_path / "checkpoint")
    mesh = make_mesh(2, 4)
    placed = lazy()
    sx.shard(placed[0], mesh, RULES)  # the optimizer is still lazy
    restore(placed, tmp_path / "checkpoint")
    assert_laid_out(placed[0], mesh, RULES)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(sx.state(placed)))
    planned = sx.abstract(lazy(), mesh, RULES)
    restore(planned, tmp_path / "checkpoint")
    assert_laid_out(planned, mesh, RULES)
    assert_same(planned, saved)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "tx", [optax.adam(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)], ids=["adam", "rows"]
)
def test_optimizer_state_follows_its_parameters_read_or_not(
    tx: Any, kind: AxisType, tmp_path: Path
) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def placed() -> tuple[Any, ...]:
        model = sx.shard(sx.nn.MLP(16, 32, rngs=sx.Rngs(0)), mesh, {"embed": "data"})
        return model, Optimizer(model, tx, master_dtype="float32"), sx.train.EMA(model, 0.9)

    def layout(tree: Any) -> list[Any]:
        leaves = jax.tree.leaves(sx.state(tree))
        return [(leaf.shape, leaf.sharding.devices_indices_map(leaf.shape)) for leaf in leaves]

    saved = placed()
    expected = layout(saved)
    save(saved, tmp_path / "checkpoint")
    again = placed()
    assert all(value.is_lazy for _, value in sx.iter_variables(again[1].opt_state))
    restore(again, tmp_path / "checkpoint")
    assert layout(again) == expected

    (tmp_path / "alone").mkdir()
    save({"state": saved[1].opt_state}, tmp_path / "alone" / "checkpoint")
    alone = placed()[1].opt_state
    restore({"state": alone}, tmp_path / "alone" / "checkpoint")
    assert layout(alone) == layout(saved[1].opt_state)


def test_mesh_and_rules_in_scope_count(tmp_path: Path) -> None:
    save(Net(), tmp_path / "checkpoint")
    mesh, model = make_mesh(2, 4), Net()
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        restore(model, tmp_path / "checkpoint")
    assert_laid_out(model, mesh, RULES)


def test_impossible_layout_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(Net(width=6), tmp_path / "checkpoint")
    model = Net(width=6, init=refuses)
    with pytest.raises(
        PartitionCheckError, match=r"\.blocks\[0\]\.kernel.*\n.*\.blocks\[0\]\.bias"
    ):
        restore(model, tmp_path / "checkpoint", make_mesh(2, 4), RULES)
    assert model.embed.is_lazy


# --- mismatches -----------------------------------------------------------------------------------


def test_restore_lists_every_mismatch_and_changes_nothing(tmp_path: Path) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__(width=4, dtype=jnp.float32, init=refuses)
            self.embedd = self.head = self.embed
            del self.embed
            self.scale = sx.Param(sx.Init(refuses, (3,)))

    save((Net(),), tmp_path / "checkpoint")
    model, position = Other(), {"step": 1}
    with pytest.raises(CheckpointError) as caught:
        restore((model, position), tmp_path / "checkpoint")
    assert str(caught.value).splitlines()[1:-1] == [
        "2 not in the checkpoint:",
        "  [0].head",
        "  [0].scale",
        "1 in the checkpoint only:",
        "  [0].embed",
        "4 of another shape:",
        "  [0].blocks[0].bias: (4,), stored (8,)",
        "  [0].blocks[0].kernel: (8, 4), stored (8, 8)",
        "  [0].blocks[1].bias: (4,), stored (8,)",
        "  [0].blocks[1].kernel: (8, 4), stored (8, 8)",
        "2 of another dtype:",
        "  [0].blocks[0].kernel: float32, stored bfloat16",
        "  [0].blocks[1].kernel: float32, stored bfloat16",
        "1 positions not in the checkpoint:",
        "  [1]",
    ]
    assert model.head.is_lazy and position == {"step": 1}


def test_near_names_are_suggested(tmp_path: Path) -> None:
    class Renamed(sx.Module):
        def __init__(self, name: str) -> None:
            setattr(self, name, sx.Param(jnp.ones(2)))

    save(Renamed("projection"), tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"\.projektion \(near: \.projection\)"):
        restore(Renamed("projektion"), tmp_path / "checkpoint")


def test_part_of_a_checkpoint_can_be_restored(tmp_path: Path) -> None:
    saved = trained()
    save((*saved, {"step": 2}), tmp_path / "checkpoint")
    model = Net(init=refuses)
    with pytest.raises(CheckpointError, match=r"\[1\]\.opt_state"):
        restore((model,), tmp_path / "checkpoint")
    restore((model,), tmp_path / "checkpoint", partial=True)
    assert_same(model, saved[0])


def test_floating_arrays_can_be_converted_when_asked(tmp_path: Path) -> None:
    save(Net(dtype=jnp.float32), tmp_path / "checkpoint")
    model = Net(dtype=jnp.bfloat16, init=refuses)
    with pytest.raises(CheckpointError, match="bfloat16, stored float32"):
        restore(model, tmp_path / "checkpoint")
    restore(model, tmp_path / "checkpoint", make_mesh(2, 4), RULES, cast=True)
    expected = Net(dtype=jnp.float32).blocks[0].kernel.value.astype(jnp.bfloat16)
    assert model.blocks[0].kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(model.blocks[0].kernel.value, expected)


# --- positions ------------------------------------------------------------------------------------


def make_batches(seed: int = 0) -> TrainBatches:
    train, _ = ByteText.from_bytes(b"the quick brown fox " * 200).split(0.1)
    return TrainBatches(train, batch_size=2, seq_len=8, seed=seed)


def test_positions_of_data_are_put_back(tmp_path: Path) -> None:
    batches, position = make_batches(), {"phase": "warm", "seen": [1, 2]}
    for _ in range(3):
        next(batches)
    save(
        {"model": Net(), "data": batches, "own": position}, tmp_path / "checkpoint", extra={"n": 1}
    )
    expected = next(batches)
    model, again, own = Net(1), make_batches(), {"phase": "none"}
    extra = restore({"model": model, "data": again, "own": own}, tmp_path / "checkpoint")
    assert extra == {"n": 1} and own == position
    np.testing.assert_array_equal(next(again)["inputs"], expected["inputs"])


def test_data_that_refuses_its_position_changes_nothing(tmp_path: Path) -> None:
    save((Net(), make_batches(seed=0), {"step": 1}), tmp_path / "checkpoint")
    model, own = Net(init=refuses), {"step": 0}
    with pytest.raises(DataError):
        restore((model, make_batches(seed=1), own), tmp_path / "checkpoint")
    assert model.embed.is_lazy and own == {"step": 0}


def test_positions_before_a_refused_one_are_put_back(tmp_path: Path) -> None:
    first, second = make_batches(), make_batches()
    next(first)
    save({"model": Net(), "first": first, "second": second}, tmp_path / "checkpoint")
    fresh, other = make_batches(), make_batches(seed=1)
    with pytest.raises(DataError):
        restore({"model": Net(), "first": fresh, "second": other}, tmp_path / "checkpoint")
    assert (fresh.step, other.step) == (0, 0)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"a": [1, np.int64(2)]}, r"extra\['a'\]\[1\].*int64"),
        ({"a": (1, 2)}, r"extra\['a'\].*tuple"),
        ({1: 2}, "extra is .*dict"),
    ],
)
def test_save_refuses_what_json_would_change(extra: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        save(Net(), tmp_path / "checkpoint", extra=extra)
    assert not (tmp_path / "checkpoint").exists()


# --- what cannot be saved or found ----------------------------------------------------------------


def test_tree_of_something_else_is_refused(tmp_path: Path) -> None:
    for tree in ((Net(), 3), [Net(), object()], {"a": jnp.ones(2), "b": 3}):
        with pytest.raises(CheckpointError, match="made of Modules"):
            save(tree, tmp_path / "checkpoint")
    abstract = sx.abstract(Net().blocks[0])
    with pytest.raises(ModuleError, match=r"\.kernel") as caught:
        save(abstract, tmp_path / "checkpoint")
    names = {"sx": sx, "model": abstract, "state": sx.state(Net().blocks[0])}
    run_advice(caught.value, "sx.update(model, state)", names)
    save(abstract, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="frozen") as refused:
        restore(sx.freeze(Net().blocks[0]), tmp_path / "checkpoint")
    tree = run_advice(
        refused.value, "sx.thaw(tree)", {"sx": sx, "tree": sx.freeze(Net(1).blocks[0])}
    )
    restore(tree, tmp_path / "checkpoint")
    assert_same(tree, abstract)


def test_checkpoint_never_overwrites_another(tmp_path: Path) -> None:
    save(Net(0), tmp_path / "checkpoint")
    with pytest.raises(PathExistsError):
        save(Net(1), tmp_path / "checkpoint")
    model = Net(1)
    restore(model, tmp_path / "checkpoint")
    assert_same(model, Net(0))


def test_missing_checkpoint_error_names_what_is_nearby(tmp_path: Path) -> None:
    with pytest.raises(PathNotFoundError, match="nothing at"):
        restore(Net(), tmp_path / "a" / "b")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(PathNotFoundError, match="no complete checkpoint in"):
            checkpoints.restore(Net())
        checkpoints.save(7, Net())
    with pytest.raises(PathNotFoundError, match=r"nearby: .*00000007"):
        restore(Net(), tmp_path)


def test_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_format, "FORMAT_VERSION", 3)
    save(Net(), tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="version 3"):
        restore(Net(), tmp_path / "checkpoint")


class Holder(sx.Module):
    """A Module that holds its data."""

    def __init__(self) -> None:
        self.scale = sx.Param(jnp.ones(2))
        self.batches = TrainBatches(ByteText.from_bytes(bytes(99)).whole, batch_size=2, seq_len=4)
        self.sources = {"more": [self.batches], "other": self.batches}


@pytest.mark.parametrize("through", ["save", "checkpoints"])
def test_positions_in_modules_are_warned_of(through: str, tmp_path: Path) -> None:
    model = Holder()
    checkpoints = Checkpoints(tmp_path / "all")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if through == "save":
            save({"model": model}, tmp_path / "one")
        else:
            checkpoints.save(1, {"model": model})
    checkpoints.close()
    (warning,) = caught
    assert warning.filename == __file__
    assert ": .model.batches, .model.sources.more[0], .model.sources.other. " in str(
        warning.message
    )
    names = {"save": save, "restore": restore, "model": Net(), "batches": model.batches}
    names["path"] = tmp_path / "beside"
    text = Exception(str(warning.message))
    run_advice(text, "save((model, batches), path)", names)
    start = model.batches.state()
    next(iter(model.batches))
    assert model.batches.state() != start
    run_advice(text, "restore((model, batches), path)", names)
    assert model.batches.state() == start
