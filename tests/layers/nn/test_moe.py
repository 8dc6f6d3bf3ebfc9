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
from tests.needs import needs
from tests.values import with_values

DISPATCHES = ("dense", "dropless", "capacity")
X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


def make(**options: Any) -> sx.nn.MoE:
    options = {"num_experts": 4, "top_k": 2, "capacity_factor": 4.0} | options
    return with_values(sx.nn.MoE(8, 16, **options, rngs=sx.Rngs(0)))


@sx.jit
def call(moe: Any, x: Any, mask: Any = None) -> Any:
    return moe(x) if mask is None else moe(x, mask=mask)


def by_hand(moe: sx.nn.MoE, x: Any, places: int | None = None) -> np.ndarray:
    """Loops over choices and tokens; with ``places``, an expert takes no more."""
    tokens = np.asarray(x).reshape(-1, 8)
    router = moe.router
    chances = np.exp(router(tokens) if moe.gate_bias is not None else tokens @ router.kernel.value)
    chances /= chances.sum(-1, keepdims=True)
    chosen = np.argsort(-chances, axis=1, kind="stable")[:, : moe.top_k]
    y, used = np.zeros_like(tokens), np.zeros(4, int)
    gate, up, down = (np.asarray(one.value) for one in (moe.gate, moe.up, moe.down))
    pairs = zip((moe.gate_bias, moe.up_bias, moe.down_bias), (16, 16, 8), strict=True)
    biases = [np.zeros((4, size)) if bias is None else np.asarray(bias) for bias, size in pairs]
    for choice in range(moe.top_k):
        for t, e in enumerate(chosen[:, choice]):
            used[e] += 1
            if places is not None and used[e] > places:
                continue
            weight = chances[t, e] / (chances[t, chosen[t]].sum() if moe.normalise else 1)
            gated, other = tokens[t] @ gate[e] + biases[0][e], tokens[t] @ up[e] + biases[1][e]
            y[t] += weight * ((gated / (1 + np.exp(-gated)) * other) @ down[e] + biases[2][e])
    return y.reshape(x.shape)


def loss(moe: sx.nn.MoE, x: Any) -> Any:
    return (moe(x) ** 2).sum() + sx.nn.load_balance_loss(moe)


value_and_grad = sx.jit(sx.value_and_grad(loss))
"""Of the parameters."""


def assert_close(found: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=atol),
        found,
        expected,
    )


# Each pair of a dispatch, a number of experts, and normalised weights or not.
@pytest.mark.filterwarnings("ignore:MoE.top_k=1, normalise=True")
@pytest.mark.parametrize(
    ("dispatch", "top_k", "normalise"),
    [
        (dispatch, top_k, (place + top_k) % 2 == 0 if top_k < 4 else place != 1)
        for place, dispatch in enumerate(DISPATCHES)
        for top_k in (1, 2, 4)
    ],
)
def test_token_is_the_weighted_sum_of_its_experts(dispatch: str, top_k: int, normalise: bool):
    moe = make(dispatch=dispatch, top_k=top_k, normalise=normalise)
    np.testing.assert_allclose(call(moe, X), by_hand(moe, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_biases_of_experts_are_added(dispatch: str):
    moe = make(dispatch=dispatch, use_bias=True)
    assert [variable.axes for variable in (moe.gate_bias, moe.up_bias, moe.down_bias)] == [
        ("expert", "mlp"),
        ("expert", "mlp"),
        ("expert", "embed"),
    ]
    np.testing.assert_allclose(call(moe, X), by_hand(moe, X), rtol=1e-5, atol=1e-5)
    gradient, expected = (value_and_grad(m, X)[1] for m in (moe, make(use_bias=True)))
    assert_close(gradient, expected)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_moe_of_one_token_in_evaluation_equals_a_loop(dispatch: str):
    moe, x = make(dispatch=dispatch, use_bias=True), X[:1, :1]  # 2 choices of 4 experts
    moe.eval()
    np.testing.assert_allclose(call(moe, x), by_hand(moe, x), rtol=1e-5, atol=1e-5)


def test_few_tokens_have_their_results_among_many():
    experts = sx.models.ExpertsConfig(num_experts=4, dim=16, scores="input_sigmoid")
    config = sx.models.TransformerConfig(num_layers=1, embed_dim=8, experts=experts)
    moe = with_values(sx.models.Transformer(config, rngs=sx.Rngs(0))).layers[0].mlp
    moe.eval()
    np.testing.assert_allclose(call(moe, X[:1, :1]), call(moe, X)[:1, :1], rtol=1e-5, atol=1e-5)
    moe.activation = "tanh"
    changed = call(moe, X[:1, :1])
    np.testing.assert_allclose(changed, call(moe, X)[:1, :1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [0, 3])
def test_capacity_gives_masked_tokens_no_place(before: int) -> None:
    moe, x = make(dispatch="capacity", capacity_factor=0.75), X[:1]
    padding = [(0, 0), (before, 4 - before), (0, 0)]
    padded = np.pad(x, padding, constant_values=1.0)
    is_real = np.pad(np.ones((1, 6), bool), padding[:2])

    alone, y = call(moe, x), np.asarray(call(moe, padded, is_real))
    np.testing.assert_allclose(y[is_real], alone[0], rtol=1e-5, atol=1e-6)
    assert not y[~is_real].any()
    assert not np.allclose(call(moe, padded)[is_real], alone[0])  # they would take some


def test_past_capacity_second_choices_and_later_tokens_drop():
    moe = make(dispatch="capacity", capacity_factor=0.75)
    assert not np.allclose(by_hand(moe, X), by_hand(moe, X, places=9), atol=1e-3)
    np.testing.assert_allclose(call(moe, X), by_hand(moe, X, places=9), rtol=1e-5, atol=1e-5)


def test_three_dispatches_have_one_gradient():
    found = [value_and_grad(make(dispatch=one), X)[1] for one in DISPATCHES]
    for other in found[1:]:
        assert_close(found[0], other)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(found[0]))


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_split_experts_equal_one_device(mesh: Mesh, dispatch: str):
    plain = make(dispatch=dispatch)
    expected, result = value_and_grad(plain, X), by_hand(plain, X)
    with jax.set_mesh(mesh):
        moe = sx.shard(plain, mesh, {"expert": "model", "embed": "data"})
        x = jax.device_put(X, P("data"))
        found, y = value_and_grad(moe, x), call(moe, x)
        assert moe.up.sharding.spec == P("model", "data", None)
    assert_close(y, result)
    assert_close(found, expected, atol=1e-4)


@needs("torch", "transformers")
def test_result_and_loss_equal_transformers():
    import torch
    from transformers.models.mixtral import modeling_mixtral as peer

    moe = make()
    y = call(moe, X)
    found = moe.load_balance_loss.value
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


def test_loss_leaves_padding_out():
    moe, mask = make(), np.arange(6) >= np.array([[0], [2], [5], [6]])
    y = call(moe, X, mask)
    found = float(sx.nn.load_balance_loss(moe))
    np.testing.assert_array_equal(y, call(moe, X))
    call(moe, X[mask])
    np.testing.assert_allclose(found, sx.nn.load_balance_loss(moe), rtol=1e-6)
    call(moe, X, np.zeros((4, 6), bool))
    assert float(sx.nn.load_balance_loss(moe)) == 0
    with pytest.raises(LayerInputError, match=r"mask of booleans of shape \(4, 6\)"):
        moe(X, mask=mask[0])


def test_router_of_one_expert_a_token_is_trained_by_default():
    options: dict[str, Any] = {"num_experts": 4, "top_k": 1}
    results_alone = sx.grad(lambda moe: (moe(X) ** 2).sum())
    for dispatch in DISPATCHES:
        moe = make(**options, dispatch=dispatch)
        assert moe.normalise is False
        assert jnp.abs(results_alone(moe)["router"]["kernel"]).max() > 1e-3
    assert make(num_experts=4, top_k=2).normalise is True

    # Where the one weight is to be 1, the layer says what that means for the router.
    moe = make(**options, normalise=True)
    with pytest.warns(UserWarning, match=r"no gradient reaches the router.*normalise=False"):
        gradients = results_alone(moe)
    assert jnp.abs(gradients["router"]["kernel"]).max() < 1e-5
    moe.eval()
    moe(X)  # says nothing


def test_loss_is_recorded_by_the_latest_training_call():
    moe = make()
    assert float(moe.load_balance_loss) == 0
    record = sx.jit(lambda moe, x: loss(moe, x) - (moe(x) ** 2).sum())
    first, second = float(record(make(), X)), float(record(make(), X[:1]))
    assert first != second
    call(moe, X)
    np.testing.assert_allclose(moe.load_balance_loss, first, rtol=1e-3)
    call(moe, X[:1])
    np.testing.assert_allclose(moe.load_balance_loss, second, rtol=1e-3)
    moe.eval()
    call(moe, X)
    np.testing.assert_allclose(moe.load_balance_loss, second, rtol=1e-3)
    assert float(sx.nn.load_balance_loss(moe)) == 0  # what an earlier step left is no loss
    stack = with_values(sx.nn.Stack(make, 3))
    call(stack, X)
    assert stack.stacked.load_balance_loss.shape == (3,)
    expected = float(sx.nn.load_balance_loss(stack))
    (popped,) = jax.tree.leaves(sx.pop(stack, sx.Intermediate))
    call(stack, X)  # makes the record again
    np.testing.assert_allclose(sx.nn.load_balance_loss(stack), expected, rtol=1e-5)
    np.testing.assert_allclose(np.mean(popped), expected, rtol=1e-5)


def test_moe_adds_its_loss_in_each_pass_of_a_scan():
    moe = make(dispatch="dense")

    @sx.jit
    def total(moe: sx.nn.MoE, xs: Any) -> Any:
        return sx.scan(lambda carry, x: (carry + loss(moe, x), None))(0.0, xs)[0]

    expected = sum(float(value_and_grad(moe, x)[0]) for x in X)
    np.testing.assert_allclose(total(moe, X), expected, rtol=1e-5)
    np.testing.assert_allclose(total(moe, X), expected, rtol=1e-5)
    remat = sx.jit(sx.grad(sx.remat(loss)))(moe, X)
    assert_close(remat, value_and_grad(moe, X)[1], 1e-5, 1e-6)


def test_vmap_over_inputs_records_a_loss_each():
    moe = make(dispatch="dense")
    mapped = sx.jit(sx.vmap(loss, in_axes=(None, 0)))
    with pytest.raises(sx.errors.TransformError, match=r"\.moe\.load_balance_loss is shared"):
        mapped(moe, X)
    expected = [float(value_and_grad(moe, x)[0]) for x in X]
    sx.pop(moe, sx.Intermediate)
    np.testing.assert_allclose(mapped(moe, X), expected, rtol=1e-5)
    assert moe.load_balance_loss.shape == (4,)


def test_frozen_model_computes_an_equal_loss():
    moe = make()
    frozen = sx.freeze(moe)
    value = sx.jit(loss)
    np.testing.assert_allclose(value(frozen, X), value(moe, X), rtol=1e-6)


def test_model_without_experts_has_no_load_balance_loss():
    with pytest.raises(LayerInputError, match="no MoE in Linear"):
        sx.nn.load_balance_loss(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))


def test_moe_computes_in_its_dtype_without_tokens_too():
    moe = make(dtype="bfloat16")
    y = call(moe, X)
    assert (y.dtype, moe.up.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(y, np.float32), call(make(), X), atol=0.1)
    for dispatch in DISPATCHES:
        assert call(make(dispatch=dispatch), X[:0]).shape == (0, 6, 8)


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
