# SPDX-License-Identifier: Apache-2.0
"""The decoder: the mathematics and the program of the hand-written one, over any mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from shardax.models import DECODER_RULES, Decoder, DecoderConfig
from tests.models.small import BATCH, SMALL, TOKENS
from tests.values import with_values


def make(**changes: Any) -> Decoder:
    """A decoder with drawn parameters."""
    config = dataclasses.replace(SMALL, **changes)
    return with_values(Decoder(config, rngs=sx.Rngs(params=0, dropout=1)))


@sx.jit
def run(model: Decoder, tokens: Any, **options: Any) -> jax.Array:
    """The logits, by a compiled call."""
    return model(tokens, **options)


def train(model: Decoder, batch: Any, steps: int = 2) -> list[float]:
    """Losses of a few steps of gradient descent."""

    @sx.jit
    def step(model: Decoder, batch: Any) -> jax.Array:
        loss, gradients = sx.value_and_grad(sx.models.next_token_loss)(model, batch)
        sx.update(model, jax.tree.map(lambda p, g: p - g, sx.state(model, sx.Param), gradients))
        return loss

    return [float(step(model, batch)) for _ in range(steps)]


# --- against the hand-written one ----------------------------------------------------------------


@pytest.fixture
def raw() -> Any:
    """The hand-written decoder among the benchmarks."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    import raw_decoder

    return raw_decoder


def raw_config(raw: Any, config: DecoderConfig) -> Any:
    return raw.Config(
        vocab=config.vocab_size,
        embed=config.embed_dim,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.mlp_dim,
        tied=config.tied_head,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


def raw_params(model: Decoder) -> dict[str, Any]:
    """The model's parameters as the hand-written decoder takes them."""

    def layer_params(layer: Any) -> dict[str, Any]:
        linears = {name: getattr(layer.attn, name) for name in ("q", "k", "v", "out")}
        linears |= {name: getattr(layer.mlp, name) for name in ("gate", "up", "down")}
        norms = {"attention_norm": layer.attn_norm, "mlp_norm": layer.mlp_norm}
        return {name: linear.kernel.value for name, linear in linears.items()} | {
            name: norm.scale.value for name, norm in norms.items()
        }

    params = {
        "embedding": model.embed.embedding.value,
        "layers": [layer_params(layer) for layer in model.layers],
        "final_norm": model.final_norm.scale.value,
    }
    return params if model.head is None else params | {"head": model.head.kernel.value}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_loss_equal_the_hand_written_decoder(raw: Any, tied: bool, dtype: str):
    model = make(tied_head=tied, dtype=dtype)
    config, params = raw_config(raw, model.config), raw_params(model)

    @sx.jit
    def ours(model: Decoder, batch: Any) -> Any:
        return model(batch["inputs"]), sx.models.next_token_loss(model, batch)

    @jax.jit
    def by_hand(params: Any, batch: Any) -> Any:
        return raw.forward(config, params, batch["inputs"]), raw.loss(config, params, batch)

    logits, loss = ours(model, BATCH)
    expected_logits, expected_loss = by_hand(params, BATCH)
    assert (logits.shape, logits.dtype) == ((4, 8, 32), jnp.dtype(dtype))
    np.testing.assert_array_equal(logits, expected_logits)
    np.testing.assert_array_equal(loss, expected_loss)


def primitives(jaxpr: Any) -> Counter[str]:
    """How often each primitive occurs, also inside others."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda node: hasattr(node, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            found += primitives(inner) if hasattr(inner, "eqns") else Counter()
    return found


def test_traced_program_adds_no_operation_to_hand_written(raw: Any):
    model = make(num_layers=2)
    config, params = raw_config(raw, model.config), raw_params(model)
    by_hand = jax.make_jaxpr(jax.grad(lambda params: raw.loss(config, params, BATCH)))(params)
    ours = jax.make_jaxpr(jax.grad(lambda model: sx.models.next_token_loss(model, BATCH)))(model)
    found, expected = primitives(ours.jaxpr), primitives(by_hand.jaxpr)
    del found["name"]  # names for policies of remat, of which nothing is lowered
    # Attention, a jit of its own, leaves out what is unused. The loss leaves out targets of -100,
    # whatever they give, and ids below 0 give NaN: not so in the hand-written one.
    beside = Counter(mul=2, ne=1, convert_element_type=1, jit=1, squeeze=1, gt=1, is_finite=1)
    beside += Counter(["and", "not"])
    assert found - expected == beside
    assert found["dot_general"] == expected["dot_general"] > 30


# --- what it is ----------------------------------------------------------------------------------


def test_paths_shapes_and_axes_of_the_parameters():
    found = {path: (variable.shape, variable.axes) for path, variable in sx.iter_variables(make())}
    assert found == {
        ("embed", "embedding"): ((32, 16), ("vocab", "embed")),
        ("layers", 0, "attn_norm", "scale"): ((16,), ("embed",)),
        ("layers", 0, "attn", "q", "kernel"): ((16, 8, 4), ("embed", "heads", "head_dim")),
        ("layers", 0, "attn", "k", "kernel"): ((16, 4, 4), ("embed", "kv_heads", "head_dim")),
        ("layers", 0, "attn", "v", "kernel"): ((16, 4, 4), ("embed", "kv_heads", "head_dim")),
        ("layers", 0, "attn", "out", "kernel"): ((8, 4, 16), ("heads", "head_dim", "embed")),
        ("layers", 0, "mlp_norm", "scale"): ((16,), ("embed",)),
        ("layers", 0, "mlp", "gate", "kernel"): ((16, 32), ("embed", "mlp")),
        ("layers", 0, "mlp", "up", "kernel"): ((16, 32), ("embed", "mlp")),
        ("layers", 0, "mlp", "down", "kernel"): ((32, 16), ("mlp", "embed")),
        ("final_norm", "scale"): ((16,), ("embed",)),
        ("head", "kernel"): ((16, 32), ("embed", "vocab")),
    }


def test_tied_head_multiplies_by_the_embedding():
    model = make(tied_head=True)
    assert model.head is None
    assert ("head", "kernel") not in dict(sx.iter_variables(model))
    hidden, logits = sx.jit(lambda model: (model.hidden_states(TOKENS), model(TOKENS)))(model)
    expected = np.asarray(hidden) @ np.asarray(model.embed.embedding.value).T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("without_collections")
def test_building_a_large_model_computes_and_allocates_nothing():
    before = len(jax.live_arrays())
    config = dataclasses.replace(SMALL, num_layers=48, embed_dim=8192, mlp_dim=32768)
    model = Decoder(config, rngs=sx.Rngs(0))
    assert all(variable.is_lazy for _, variable in sx.iter_variables(model))
    assert len(jax.live_arrays()) == before


def test_logits_do_not_depend_on_later_tokens():
    model, changed = make(), BATCH["inputs"].copy()
    changed[:, 5:] = 0
    logits, others = run(model, BATCH["inputs"]), run(model, changed)
    np.testing.assert_allclose(logits[:, :5], others[:, :5], rtol=1e-5, atol=1e-5)
    assert not np.allclose(logits[:, 5:], others[:, 5:], atol=1e-3)


def test_single_sequence_and_given_positions():
    model, tokens = make(), BATCH["inputs"]
    expected = run(model, tokens)
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(run(model, tokens[1]), np.asarray(expected)[1], **close)
    shifted = run(model, tokens, positions=np.arange(8) + 100)
    np.testing.assert_allclose(shifted, expected, **close)
    rows = np.arange(8) + np.arange(4)[:, None]
    np.testing.assert_allclose(run(model, tokens, positions=rows), expected, **close)
    assert not np.allclose(run(model, tokens, positions=np.arange(8) * 3), expected, atol=1e-3)


def test_dropout_is_on_while_training_only():
    model, tokens = make(dropout=0.5), BATCH["inputs"]
    expected = run(make(), tokens)
    model.eval()
    np.testing.assert_array_equal(run(model, tokens), expected)
    model.train()
    assert not np.allclose(run(model, tokens), expected, atol=1e-2)
    assert {tuple(path[-2:]) for path, _ in sx.iter_variables(model, sx.RngState)} == {
        ("stream", "key"),
        ("stream", "count"),
    }


def test_pickled_model_has_equal_logits():
    model = make()
    twin = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(run(twin, BATCH["inputs"]), run(model, BATCH["inputs"]))


# --- configuration and input ---------------------------------------------------------------------


def test_config_is_hashable_and_knows_dtypes_by_name():
    config = DecoderConfig(dtype=jnp.bfloat16)  # pyright: ignore[reportArgumentType]
    assert config == DecoderConfig(dtype="bfloat16")
    assert hash(config) == hash(DecoderConfig(dtype="bfloat16"))
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"num_kv_heads": 3}, "num_heads=8 is not divisible by num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"dropout": 1.5}, r"dropout=1\.5"),
        ({"norm_epsilon": -1.0}, r"norm_epsilon=-1\.0"),
        ({"rope_base": 0.0}, r"rope_base=0\.0"),
        ({"dtype": "float33"}, "dtype='float33', not a dtype"),
        ({"param_dtype": "int32"}, "param_dtype='int32'"),
    ],
)
def test_config_refuses_what_does_not_fit(changes: dict[str, Any], message: str):
    with pytest.raises(LayerConfigError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_tokens_of_other_rank_or_dtype_are_refused():
    with pytest.raises(LayerInputError, match=r"Decoder takes tokens .* int32\[1, 4, 9\]"):
        make()(TOKENS[None])
    with pytest.raises(LayerInputError, match=r"takes integers to look up"):
        make()(TOKENS.astype(np.float32))


# --- meshes --------------------------------------------------------------------------------------

LAYOUTS = {
    "tensor parallel, rules in scope": ({}, DECODER_RULES, True),
    "parameters split by the batch too": ({}, DECODER_RULES.override({"embed": "data"}), False),
    "whole kv heads, tied, rules in scope": (
        {"num_kv_heads": 2, "tied_head": True},
        DECODER_RULES.override({"kv_heads": None}),
        True,
    ),
}


@functools.cache
def losses_of_one_device(**changes: Any) -> list[float]:
    return train(make(**changes), BATCH)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_training_over_a_mesh_equals_one_device(mesh: Mesh, layout: str):
    changes, rules, in_scope = LAYOUTS[layout]
    expected = losses_of_one_device(**changes)
    model = sx.shard(make(**changes), mesh, rules)
    placed = sx.partition.shardings(model, mesh, rules)
    batch = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    with contextlib.ExitStack() as scope:
        if in_scope:
            scope.enter_context(jax.set_mesh(mesh))
            scope.enter_context(sx.axis_rules(rules))
        found = train(model, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[-1] < expected[0] - 0.1
    pairs = zip(sx.state(model).flat().items(), placed.flat().values(), strict=True)
    for (path, value), wanted in pairs:
        assert value.sharding.is_equivalent_to(wanted, value.ndim), path


def logits_spec(model: Decoder, tokens: Any) -> PartitionSpec:
    return jax.typeof(sx.jit(model)(tokens)).sharding.spec


def test_rules_with_batch_axis_lay_activations_out(explicit_mesh: Mesh):
    model = sx.shard(make(), explicit_mesh, DECODER_RULES)
    tokens = jax.device_put(TOKENS, NamedSharding(explicit_mesh, PartitionSpec()))
    with jax.set_mesh(explicit_mesh):
        assert logits_spec(model, tokens) == PartitionSpec(None, None, "model")
        with sx.axis_rules({"mlp": "model"}):
            assert logits_spec(model, tokens) == PartitionSpec(None, None, "model")
        with sx.axis_rules(DECODER_RULES):
            assert logits_spec(model, tokens) == PartitionSpec("data", None, "model")
            assert logits_spec(model, tokens[:1]) == PartitionSpec(None, None, "model")


def test_rules_fit_every_parameter():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    findings = sx.partition.check(make(), mesh, DECODER_RULES)
    assert [finding for finding in findings if finding.severity == "error"] == []
