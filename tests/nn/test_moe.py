# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts against a loop over tokens and against transformers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError

DISPATCHES = ("dense", "dropless", "capacity")
X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


def make(**options: Any) -> sx.nn.MoE:
    options = {"num_experts": 4, "top_k": 2, "capacity_factor": 4.0} | options
    return sx.nn.MoE(8, 16, **options, rngs=sx.Rngs(0))


def by_hand(moe: sx.nn.MoE, x: Any, places: int | None = None) -> np.ndarray:
    """Loops over choices and tokens; with ``places``, an expert takes no more."""
    tokens = np.asarray(x).reshape(-1, 8)
    chances = np.asarray(jax.nn.softmax(tokens @ moe.router.kernel.value))
    chosen = np.argsort(-chances, axis=1, kind="stable")[:, : moe.top_k]
    y, used = np.zeros_like(tokens), np.zeros(4, int)
    gate, up, down = (np.asarray(one.value) for one in (moe.gate, moe.up, moe.down))
    for choice in range(moe.top_k):
        for t, e in enumerate(chosen[:, choice]):
            used[e] += 1
            if places is not None and used[e] > places:
                continue
            weight = chances[t, e] / (chances[t, chosen[t]].sum() if moe.normalise else 1)
            gated = tokens[t] @ gate[e]
            y[t] += weight * ((gated / (1 + np.exp(-gated)) * (tokens[t] @ up[e])) @ down[e])
    return y.reshape(x.shape)


def loss(moe: sx.nn.MoE, x: Any) -> Any:
    return (moe(x) ** 2).sum() + sx.nn.load_balance_loss(moe)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_token_is_the_weighted_sum_of_its_experts(dispatch: str, top_k: int, normalise: bool):
    moe = make(dispatch=dispatch, top_k=top_k, normalise=normalise)
    np.testing.assert_allclose(moe(X), by_hand(moe, X), rtol=1e-5, atol=1e-5)


def test_past_capacity_second_choices_then_later_tokens_are_dropped():
    moe = make(dispatch="capacity", capacity_factor=0.75)
    assert not np.allclose(by_hand(moe, X), by_hand(moe, X, places=9), atol=1e-3)
    np.testing.assert_allclose(moe(X), by_hand(moe, X, places=9), rtol=1e-5, atol=1e-5)


def test_the_three_dispatches_have_one_gradient():
    found = [sx.jit(sx.grad(loss))(make(dispatch=one), X) for one in DISPATCHES]
    for other in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found[0], other
        )
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(found[0]))


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_experts_over_a_mesh_axis_change_neither_results_nor_gradients(mesh: Mesh, dispatch: str):
    plain, x = make(dispatch=dispatch), jnp.asarray(X)
    expected, result = sx.jit(sx.value_and_grad(loss))(plain, x), by_hand(plain, X)
    with jax.set_mesh(mesh):
        moe = sx.shard(plain, mesh, {"expert": "model", "embed": "data"})
        found = sx.jit(sx.value_and_grad(loss))(moe, jax.device_put(x, P("data")))
        assert moe.up.sharding.spec == P("model", "data", None)
        y = moe(jax.device_put(x, P("data")))
    np.testing.assert_allclose(y, result, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )


def test_result_and_loss_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="the peer is PyTorch")
    peer = pytest.importorskip(
        "transformers.models.mixtral.modeling_mixtral", reason="the peer is transformers"
    )
    moe = make()
    y, found = moe(X), moe.load_balance_loss.value
    logits = torch.from_numpy(np.array(moe.router(X)).reshape(-1, 4))
    expected = peer.load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    config = peer.MixtralConfig(
        hidden_size=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2
    )
    block = peer.MixtralSparseMoeBlock(config).eval()
    kernels = {name: np.array(getattr(moe, name).value) for name in ("gate", "up", "down")}
    both = np.concatenate([kernels["gate"], kernels["up"]], axis=2).swapaxes(1, 2)
    weights = {
        "gate.weight": np.array(moe.router.kernel.value).T,
        "experts.gate_up_proj": both,
        "experts.down_proj": kernels["down"].swapaxes(1, 2),
    }
    block.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in weights.items()})
    with torch.no_grad():
        result = block(torch.from_numpy(X))
    np.testing.assert_allclose(y, result.numpy(), rtol=1e-5, atol=1e-5)


def test_the_loss_of_padding_is_left_out():
    moe, mask = make(), np.arange(6) >= np.array([[0], [2], [5], [6]])
    y = moe(X, mask=mask)
    np.testing.assert_array_equal(y, moe(X))
    moe(X, mask=mask)
    found = float(sx.nn.load_balance_loss(moe))
    moe(X[mask])
    np.testing.assert_allclose(found, sx.nn.load_balance_loss(moe), rtol=1e-6)
    moe(X, mask=np.zeros((4, 6), bool))
    assert float(sx.nn.load_balance_loss(moe)) == 0
    with pytest.raises(LayerInputError, match=r"mask of shape \(4, 6\)"):
        moe(X, mask=mask[0])


def test_the_record_is_of_the_latest_call_in_training_and_one_per_layer_of_a_stack():
    moe = make()
    assert float(moe.load_balance_loss) == 0
    first, second = (float(loss(make(), x)) - float((make()(x) ** 2).sum()) for x in (X, X[:1]))
    moe(X)
    np.testing.assert_allclose(moe.load_balance_loss, first, rtol=1e-3)
    moe(X[:1])
    np.testing.assert_allclose(moe.load_balance_loss, second, rtol=1e-3)
    moe.eval()
    moe(X)
    np.testing.assert_allclose(moe.load_balance_loss, second, rtol=1e-3)
    assert float(sx.nn.load_balance_loss(moe)) == 0  # what an earlier step left is no loss
    stack = sx.nn.Stack(make, 3)
    sx.jit(lambda stack, x: stack(x))(stack, X)
    assert stack.stacked.load_balance_loss.shape == (3,)
    expected = float(sx.nn.load_balance_loss(stack))
    (popped,) = jax.tree.leaves(sx.pop(stack, sx.Intermediate))
    stack(X)  # makes the record again
    np.testing.assert_allclose(sx.nn.load_balance_loss(stack), expected, rtol=1e-5)
    np.testing.assert_allclose(popped.mean(), expected, rtol=1e-5)


def test_each_pass_of_a_scan_adds_its_own_loss():
    moe = make(dispatch="dense")

    @sx.jit
    def total(moe: sx.nn.MoE, xs: Any) -> Any:
        return sx.scan(lambda carry, x: (carry + loss(moe, x), None))(0.0, xs)[0]

    expected = sum(float(loss(moe, x)) for x in X)
    np.testing.assert_allclose(total(moe, X), expected, rtol=1e-5)
    np.testing.assert_allclose(total(moe, X), expected, rtol=1e-5)
    remat = sx.jit(sx.grad(sx.remat(loss)))(moe, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        remat,
        sx.grad(loss)(moe, X),
    )


def test_a_vmap_over_inputs_has_a_record_each_if_there_was_none():
    moe = make(dispatch="dense")
    with pytest.raises(sx.errors.SharedWriteError, match=r"\.moe\.load_balance_loss is shared"):
        sx.vmap(loss, in_axes=(None, 0))(moe, X)
    expected = [float(loss(moe, x)) for x in X]
    sx.pop(moe, sx.Intermediate)
    np.testing.assert_allclose(sx.vmap(loss, in_axes=(None, 0))(moe, X), expected, rtol=1e-5)
    assert moe.load_balance_loss.shape == (4,)


def test_a_frozen_model_computes_the_same_and_its_loss():
    moe = make()
    frozen = sx.freeze(moe)
    np.testing.assert_allclose(loss(frozen, X), loss(moe, X), rtol=1e-6)


def test_a_model_without_experts_has_no_load_balance_loss():
    with pytest.raises(LayerInputError, match="no MoE in Linear"):
        sx.nn.load_balance_loss(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))


def test_moe_computes_in_its_dtype_and_takes_no_tokens():
    moe = make(dtype="bfloat16")
    assert (moe(X).dtype, moe.up.dtype) == (jnp.bfloat16, jnp.float32)
    for dispatch in DISPATCHES:
        assert make(dispatch=dispatch)(X[:0]).shape == (0, 6, 8)


def test_moe_refuses_wrong_options_and_inputs():
    for options, message in (
        ({"top_k": 5}, "top_k=5 of num_experts=4"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"dispatch": "sparse"}, "dispatch='sparse'"),
        ({"capacity_factor": 0}, "capacity_factor=0"),
        ({"activation": "swish2"}, "MoE has activation='swish2'"),
        ({"axes": ("expert",)}, "3 axis names"),
    ):
        with pytest.raises(LayerConfigError, match=message):
            make(**options)
    with pytest.raises(LayerInputError, match=r"\(\.\.\., 8\)"):
        make()(X[..., :4])
