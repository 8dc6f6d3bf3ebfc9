# SPDX-License-Identifier: Apache-2.0
"""Training models with experts: their load-balance loss, in steps that are compiled once."""

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
from shardax.models import (
    AttentionConfig,
    ExpertsConfig,
    Transformer,
    TransformerConfig,
    next_token_loss,
    save_pretrained,
)
from tests.configs import with_fields
from tests.models import peers
from tests.models.published import initialised
from tests.models.small import with_equal_values
from tests.needs import needs
from tests.training.train.small_runs import eval_batches, make_trainer

TOKENS = np.random.default_rng(0).integers(0, 64, (8, 9))
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
RULES = {"expert": "model", "batch": "data"}
EXPERTS: dict[str, Any] = {"num_experts": 4, "dim": 8, "load_balance_weight": 0.1}


def make(**changes: Any) -> Transformer:
    """A model with changed fields of itself, or of its experts."""
    of_model = {
        name: changes.pop(name)
        for name in ("num_layers", "scan_layers", "remat")
        if name in changes
    }
    config = TransformerConfig(
        embed_dim=16,
        attention=AttentionConfig(num_heads=2, head_dim=8),
        experts=ExpertsConfig(**{**EXPERTS, **changes}),
        **of_model,
    )
    return with_equal_values(Transformer(config, rngs=sx.Rngs(0)))


def balance(model: Any) -> Any:
    return model.config.experts.load_balance_weight * sx.nn.load_balance_loss(model)


SGD, TRACES = optax.sgd(0.1), list[int]()


@sx.jit
def step(model: Any, optimizer: Any, batch: Any) -> Any:
    def loss(model: Any) -> Any:
        TRACES.append(1)
        return next_token_loss(model, batch) + balance(model)

    value, grads = sx.value_and_grad(loss)(model)
    optimizer.update(grads)
    return value


def train(model: Any) -> tuple[list[float], int]:
    """Three compiled steps: the losses, and how often the loss was traced."""
    optimizer = sx.train.Optimizer(model, SGD)
    TRACES.clear()
    losses = [float(step(model, optimizer, BATCH)) for _ in range(3)]
    return losses, len(TRACES)


@functools.cache
def unrolled() -> tuple[Transformer, list[float]]:
    """A model after training with its layers in turn on one device, and its losses."""
    model = make()
    losses, traces = train(model)
    assert traces == 1
    return model, losses


@pytest.mark.parametrize(
    "layout",
    [
        {"scan_layers": True},
        {"remat": "nothing_saveable"},
        {"scan_layers": True, "remat": "nothing_saveable"},
    ],
    ids=str,
)
def test_layouts_have_equal_losses_and_one_trace(layout: dict[str, Any]):
    losses, traces = train(make(**layout))
    assert traces == 1
    np.testing.assert_allclose(losses, unrolled()[1], rtol=1e-5)


def router_of(model: Any) -> np.ndarray:
    return np.asarray(jax.tree.leaves(sx.state(model, sx.Param))[-1])


def assert_balanced(model: Any, losses: list[float], **layout: Any) -> None:
    """Compares with training without the load-balance loss."""
    plain = make(**layout, load_balance_weight=0.0)
    without, _ = train(plain)
    assert losses[0] - without[0] == pytest.approx(0.1 * 2, rel=0.1)  # top_k if balanced
    assert not np.array_equal(router_of(model), router_of(plain))


@pytest.mark.parametrize("scanned", [False, True])
def test_load_balance_loss_counts_real_tokens_alone(scanned: bool):
    model = make(scan_layers=scanned)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 8))
    padded, real = np.pad(tokens, ((0, 0), (0, 8)), constant_values=3), np.arange(16) < 8
    real = np.broadcast_to(real, padded.shape)

    @sx.jit
    def balance(model: Any, batch: Any) -> Any:
        sx.models.next_token_loss(model, batch)
        return sx.nn.load_balance_loss(model)

    expected = balance(model, {"inputs": tokens, "targets": tokens})
    batch = {"inputs": padded, "targets": padded}
    segments = real.astype(np.int32)
    for known in (
        {"input_mask": real},
        {"input_mask": segments},
        {"segment_ids": segments},
        {"segment_ids": segments, "input_mask": np.ones_like(real)},
        {"segment_ids": np.ones_like(segments), "input_mask": real},
    ):
        np.testing.assert_allclose(balance(model, batch | known), expected, rtol=1e-5)

    # Which targets count says nothing of the inputs: those of a prompt are read and routed.
    of_all = balance(model, batch)
    assert abs(of_all - expected) > 1e-3
    np.testing.assert_allclose(balance(model, batch | {"mask": real}), of_all, rtol=1e-6)


def test_experts_config_normalises_several_experts_a_token():
    chosen = {top_k: ExpertsConfig(4, 8, top_k=top_k).normalise for top_k in (1, 2)}
    assert chosen == {1: False, 2: True}
    model = make(top_k=1)
    assert model.layers[0].mlp.normalise is False
    gradient = sx.grad(lambda model: (model(np.arange(6)[None]) ** 2).sum())(model)
    assert jnp.abs(gradient["layers"][0]["mlp"]["router"]["kernel"]).max() > 0


def test_load_balance_loss_trains_the_router():
    assert_balanced(*unrolled())
    mixed: dict[str, Any] = {"scan_layers": True, "num_layers": 3, "dense_layers": (1,)}
    model = make(**mixed)
    losses, traces = train(model)
    assert traces == 1
    assert_balanced(model, losses, **mixed)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (AxisType.Auto, {}),
        (AxisType.Auto, {"scan_layers": True, "dispatch": "dropless"}),
        (AxisType.Explicit, {"scan_layers": True}),
    ],
    ids=str,
)
def test_mesh_has_equal_losses_and_one_trace(kind: Any, layout: dict[str, Any]):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        model = sx.shard(make(**layout), mesh, RULES)
        losses, traces = train(model)
    np.testing.assert_allclose(losses, unrolled()[1], rtol=1e-5)
    assert traces == 1


@sx.jit
def logits_of(model: Any, tokens: Any) -> Any:
    return model(tokens)


SCALED = {"num_layers": 1, "scores": "input_sigmoid", "bias": True, "shared_dim": 8}


@functools.cache
def scaled_losses() -> list[float]:
    return train(make(**SCALED))[0]


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_scaled_inputs_of_experts_train_alike(kind: Any):
    if kind is None:
        losses, _ = train(make(dispatch="dropless", **SCALED))
        roomy = make(dispatch="capacity", **SCALED)
        roomy.set_attributes(capacity_factor=4.0)
        logits, expected = (logits_of(model, TOKENS[:2]) for model in (roomy, make(**SCALED)))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    else:
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            model = sx.shard(make(dispatch="dropless", **SCALED), mesh, RULES)
            losses, _ = train(model)
    np.testing.assert_allclose(losses, scaled_losses(), rtol=1e-5)


GROUPED = {"num_layers": 1, "num_experts": 8, "scores": "sigmoid", "num_groups": 4}
GROUPED |= {"top_groups": 2, "shared_dim": 8, "shared_gate": True}


@functools.cache
def grouped_losses() -> list[float]:
    return train(make(**GROUPED))[0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_grouped_experts_train_alike_over_a_mesh(kind: Any):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        model = sx.shard(make(dispatch="dropless", **GROUPED), mesh, RULES)
        losses, traces = train(model)
    np.testing.assert_allclose(losses, grouped_losses(), rtol=1e-5)
    assert traces == 1


@pytest.mark.parametrize(("scanned", "parts"), [(False, 1), (True, 2)])
def test_trainer_traces_one_step_and_evaluates_without_balance(
    scanned: bool, parts: int, tmp_path: Path
):
    model, traces = make(scan_layers=scanned, load_balance_weight=100.0), []

    def loss(model: Any, batch: Any) -> Any:
        found = {each.deterministic for _, each in sx.iter_modules(model) if is_moe(each)}
        traces.append(found)
        return next_token_loss(model, batch) + balance(model)

    options = {"held_out": eval_batches(), "eval_every": 1, "grad_accumulation": parts}
    result = make_trainer(tmp_path, 3, model=model, loss=loss, **options).run()
    assert traces == [{False}, {True}]
    assert result.loss > 200 - 10  # 100 * top_k, if balanced
    assert result.eval_loss < np.log(256) + 1


def test_checkpoints_hold_parameters_and_no_record(tmp_path: Path):
    trained, expected = unrolled()
    model, other = sx.clone(trained), make()
    sx.train.checkpoint.save((model,), tmp_path / "trained")
    sx.pop(model, sx.Intermediate)
    sx.train.checkpoint.save((model,), tmp_path / "popped")
    for name in ("trained", "popped"):
        sx.train.checkpoint.restore((other,), tmp_path / name)
        jax.tree.map(
            np.testing.assert_array_equal, sx.state(model, sx.Param), sx.state(other, sx.Param)
        )
    losses, traces = train(other)
    assert losses[0] < expected[-1]
    assert traces <= 1  # none where the program of the trained one is still held


@sx.jit
def of_known(model: Any, tokens: Any, mask: Any, known: Any) -> Any:
    """The loss of the tokens that follow a real one, with that of the balance."""
    logits = model(tokens, mask=mask)
    return sx.models.cross_entropy(logits[:, :-1], tokens[:, 1:], known[:, 1:]) + balance(model)


ONE_LAYER = {"num_hidden_layers": 1, "router_aux_loss_coef": 0.5}
SEVERAL = {"output_router_logits": True}


@needs("torch", "transformers")
@pytest.mark.parametrize(  # every two of the three together
    ("name", "scanned", "changes"),
    [
        ("mixtral", False, ONE_LAYER),
        ("mixtral", True, SEVERAL),
        ("qwen3_moe", False, SEVERAL),
        ("qwen3_moe", True, ONE_LAYER),
        ("gpt_oss", False, {**ONE_LAYER, "layer_types": ["sliding_attention"]}),
    ],
)
def test_training_loss_equals_that_of_transformers(
    name: str, scanned: bool, changes: dict[str, Any], tmp_path: Path
):
    import torch

    tokens, mask = peers.batch()
    given = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask).long()}
    known = np.concatenate([mask[:, :1] & False, mask[:, 1:] & mask[:, :-1]], axis=1)
    labels = torch.tensor(np.where(known, tokens, -100))  # of tokens that follow a real one
    config, kind, options = peers.CASES[name]
    peer = peers.make_model(tmp_path, config, kind, {**options, **changes})
    model = sx.models.from_pretrained(tmp_path, scan_layers=scanned)
    model.train()
    assert model.config.experts.load_balance_weight == changes.get("router_aux_loss_coef", 0.001)
    found = of_known(model, tokens, mask, known)
    with torch.no_grad():
        result = peer(**given, labels=labels, output_router_logits=True)
    if "num_hidden_layers" in changes:  # several layers it averages before it multiplies
        expected = result.loss
    else:
        module = __import__(type(peer).__module__, fromlist=["*"])
        each = [
            module.load_balancing_loss_func((router,), 4, 2, given["attention_mask"])
            for router in result.router_logits
        ]
        expected = result.loss + 0.001 * (sum(each) / len(each) - result.aux_loss)
    np.testing.assert_allclose(found, float(expected), rtol=1e-5)


@pytest.mark.parametrize("scanned", [False, True])
def test_adapters_of_clipped_experts_are_merged(scanned: bool, tmp_path: Path):
    content = {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_key_value_heads": 2,
        "swiglu_limit": 0.5,
    }
    content |= {**peers.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    save_pretrained(initialised(tmp_path, content), tmp_path / "model")
    model = sx.models.from_pretrained(tmp_path / "model", scan_layers=scanned)
    layers = sx.select(model).at_instances_of((sx.nn.Linear, sx.nn.MoE))
    adapted = sx.surgery.lora(layers.where(lambda path, _: path[-1] in ("mlp", "q", "out")), rank=2)
    for number, (_, variable) in enumerate(sx.iter_variables(adapted, "lora")):
        variable.value = 0.1 * np.random.default_rng(number).normal(size=variable.shape)
    run = functools.partial(logits_of, tokens=TOKENS[:2])
    merged = sx.surgery.merge_lora(adapted)
    result = np.asarray(run(adapted))
    assert np.abs(result - run(model)).max() > 0.05
    np.testing.assert_allclose(result, run(merged), rtol=0, atol=2e-5)
    save_pretrained(merged, tmp_path / "merged")
    again = sx.models.from_pretrained(tmp_path / "merged", scan_layers=scanned)
    np.testing.assert_array_equal(run(again), run(merged))


@pytest.mark.parametrize("alpha", [1.702, 0.5, -1, 0])
def test_factor_of_clipped_experts_is_a_number_like_any_other(alpha: float, tmp_path: Path):
    content = {"model_type": "gpt_oss", "head_dim": 8, "num_key_value_heads": 2}
    content |= {**peers.SIZES, "num_local_experts": 2, "num_experts_per_tok": 2}
    content |= {"num_hidden_layers": 1, "swiglu_alpha": alpha, "swiglu_limit": 0.5}
    save_pretrained(initialised(tmp_path, content), tmp_path / "model")
    model = sx.models.from_pretrained(tmp_path / "model")
    layer = model.layers[0].mlp
    found = layer(x := np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32))

    def of_all(name: str, x: Any) -> np.ndarray:
        bias = np.asarray(getattr(layer, f"{name}_bias").value)
        return x @ np.asarray(getattr(layer, name).value) + bias[:, None]

    gate, up = np.minimum(of_all("gate", x), 0.5), np.clip(of_all("up", x), -0.5, 0.5)
    results = of_all("down", gate / (1 + np.exp(-alpha * gate)) * (up + 1))
    weights = np.exp(np.asarray(layer.router(x)))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("te,etd->td", weights, results), atol=2e-6)

    # An edited model is written with its factor, and read with it.
    model.layers[0].mlp.gate_factor = 3.0
    config = with_fields(model.config, {"experts.gate_factor": 3.0})
    save_pretrained(model, tmp_path / "edited", config)
    again = sx.models.from_pretrained(tmp_path / "edited")
    assert again.config.experts.gate_factor == 3.0


def is_moe(module: Any) -> bool:
    return isinstance(module, sx.nn.MoE)
