# SPDX-License-Identifier: Apache-2.0
"""State and checkpoints of unrolled layers serve stacked ones, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import StateMismatchError
from shardax.models import Decoder, DecoderConfig, next_token_loss
from shardax.nn import Stack, stack_state, unstack_state
from shardax.train import Optimizer, checkpoint
from tests.strategies import assert_equal_values

TOKENS = np.random.default_rng(0).integers(0, 16, (2, 6), np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def decoder(scanned: bool, seed: int = 0) -> Decoder:
    config = DecoderConfig(
        vocab_size=16,
        num_layers=3,
        embed_dim=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        mlp_dim=16,
        dropout=0.1,
        scan_layers=scanned,
    )
    return Decoder(config, rngs=sx.Rngs(params=seed, dropout=seed))


def with_optimizer(model: Any, steps: int) -> tuple[Any, Optimizer]:
    optimizer = Optimizer(model, optax.adam(0.01))
    for _ in range(steps):
        _step(model, optimizer)
    return model, optimizer


@sx.jit
def _step(model: Any, optimizer: Any) -> Any:
    loss, gradients = sx.value_and_grad(next_token_loss)(model, BATCH)
    optimizer.update(gradients)
    return loss


def assert_same_state(first: Any, second: Any, rtol: float = 0) -> None:
    one, other = first.flat(), second.flat()
    assert one.keys() == other.keys()
    for path, value in one.items():
        if rtol and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(value, other[path], rtol, 1e-5, err_msg=str(path))
        else:
            assert_equal_values(value, other[path])


def test_layouts_of_one_seed_convert_into_each_other() -> None:
    unrolled, scanned = sx.state(decoder(False)), sx.state(decoder(True))
    assert_same_state(stack_state(unrolled, decoder(True)), scanned)
    assert_same_state(unstack_state(scanned, decoder(True)), unrolled)


def test_conversion_keeps_origins_of_values() -> None:
    model = decoder(True)
    there = unstack_state(sx.state(model), model)
    path = ("layers", 1, "mlp", "up", "kernel")
    assert there.origins()[path].axes == ("embed", "mlp")
    assert there.origins() == sx.state(decoder(False)).origins()
    assert stack_state(there, model).origins() == sx.state(model).origins()


def test_parts_of_a_state_can_be_converted() -> None:
    model = decoder(True)
    kernels = sx.state(decoder(False), sx.PathContains("kernel"))
    assert set(stack_state(kernels, model).flat()) == set(
        sx.state(model, sx.PathContains("kernel")).flat()
    )


@pytest.mark.parametrize("from_scanned", [False, True], ids=["to stacked", "to unrolled"])
def test_checkpoint_of_one_layout_trains_in_the_other(from_scanned: bool, tmp_path: Path) -> None:
    saved = with_optimizer(decoder(from_scanned), 2)
    checkpoint.save(saved, tmp_path / "saved")
    same = with_optimizer(decoder(from_scanned, seed=5), 0)
    checkpoint.restore(same, tmp_path / "saved")
    other = with_optimizer(decoder(not from_scanned, seed=6), 0)
    state = sx.state(same)
    state = unstack_state(state, same) if from_scanned else stack_state(state, other)
    sx.update(other, state)
    losses = [[float(_step(*pair)) for _ in range(2)] for pair in (saved, other)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert int(other[1].step) == 4


def test_nested_stacks_and_shared_streams_convert() -> None:
    stream = sx.Rngs(dropout=0)

    def block(rngs: sx.Rngs) -> Any:
        return sx.nn.Sequential(sx.nn.Linear(2, 2, rngs=rngs), sx.nn.Dropout(0.5, rngs=stream))

    rngs, twin = sx.Rngs(params=0), sx.Rngs(params=0)
    stack = Stack(lambda: Stack(lambda: block(rngs), 2), 3)
    unrolled = {"outer": [[block(twin) for _ in range(2)] for _ in range(3)]}
    tree = {"outer": stack}
    state = unstack_state(sx.state(tree), tree)
    assert_same_state(state, sx.state(unrolled))
    assert_same_state(stack_state(sx.state(unrolled), tree), sx.state(tree))


def test_plain_dict_is_unstacked_too() -> None:
    model = decoder(True)
    state = sx.state(model, sx.Param)
    assert_same_state(unstack_state(state.to_pure_dict(), model), unstack_state(state, model))


def refused() -> dict[str, tuple[Any, str]]:
    missing = sx.state(decoder(False)).flat()
    del missing[("layers", 1, "mlp", "up", "kernel")]
    shape = sx.state(decoder(False)).flat()
    shape[("layers", 2, "mlp", "up", "kernel")] = np.zeros((8, 4), np.float32)
    return {
        "missing": (missing, r"\.layers\.stacked\.mlp\.up\.kernel.*\.layers\[1\]\.mlp\.up\.kernel"),
        "shape": (shape, r"float32\[8, 16\] at \.layers\[0\].*float32\[8, 4\] at \.layers\[2\]"),
    }


@pytest.mark.parametrize("what", ["missing", "shape"])
def test_missing_and_misshapen_layers_are_refused_by_path(what: str) -> None:
    values, message = refused()[what]
    with pytest.raises(StateMismatchError, match=message):
        stack_state(sx.State.from_flat(values), decoder(True))


def test_state_of_ambiguous_stacks_is_refused() -> None:
    def stack(length: int) -> Stack:
        rngs = sx.Rngs(0)
        return Stack(lambda: sx.nn.Linear(2, 2, rngs=rngs), length)

    model = sx.nn.Sequential()
    model.encoder, model.decoder = {"layers": stack(2)}, {"layers": stack(3)}
    state = sx.State.from_flat(
        {("mu", "layers", "stacked", "kernel"): np.zeros((2, 2, 2), np.float32)}
    )
    with pytest.raises(StateMismatchError, match=r"\.mu\.layers"):
        unstack_state(state, model)
    known = sx.State.from_flat(
        {("mu", "encoder", "layers", "stacked", "k"): np.zeros((2, 2), np.float32)}
    )
    assert list(unstack_state(known, model).flat()) == [
        ("mu", "encoder", "layers", i, "k") for i in range(2)
    ]
