# SPDX-License-Identifier: Apache-2.0
"""Configs by part: their checks, and the flat names of version 0.1."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax import models
from shardax.errors import LayerConfigError
from shardax.models import (
    AttentionConfig,
    ExpertsConfig,
    FeaturesConfig,
    ImageConfig,
    LatentConfig,
    MLPConfig,
    NormConfig,
    PoolConfig,
    PositionsConfig,
    RecurrenceConfig,
    Rope,
    ShortConvolutionConfig,
    StateSpaceConfig,
    TransformerConfig,
)
from tests.advice import run_advice
from tests.configs import make_config, with_fields

PARTS = {
    "attention": "AttentionConfig", "mlp": "MLPConfig", "experts": "ExpertsConfig",
    "recurrence": "RecurrenceConfig", "norms": "NormConfig", "embedding": "EmbeddingConfig",
    "positions": "PositionsConfig", "image": "ImageConfig", "features": "FeaturesConfig",
    "output": "OutputConfig", "pool": "PoolConfig",
}  # fmt: skip
MIXER = ShortConvolutionConfig()
# By flat name: the path, and a value other than the default.
FLAT: dict[str, tuple[str, Any]] = {
    "num_heads": ("attention.num_heads", 8),
    "num_kv_heads": ("attention.num_kv_heads", 4),
    "head_dim": ("attention.head_dim", 8),
    "qkv_bias": ("attention.qkv_bias", True),
    "key_bias": ("attention.key_bias", False),
    "out_bias": ("attention.out_bias", True),
    "qk_norm": ("attention.qk_norm", "head"),
    "attention_scale": ("attention.scale", 0.5),
    "attention_softcap": ("attention.softcap", 5.0),
    "attention_sinks": ("attention.sinks", True),
    "attention_gate": ("attention.gate", True),
    "attention_in_scale": ("attention.in_scale", 2.0),
    "attention_out_scale": ("attention.out_scale", 3.0),
    "attention_dropout": ("attention.dropout", 0.1),
    "rope": ("attention.rope", None),
    "local_rope": ("attention.local_rope", Rope(100.0)),
    "rope_layers": ("attention.rope_layers", (True, False)),
    "query_growth": ("attention.query_growth", (0.1, 8.0)),
    "window": ("attention.window", 4),
    "chunked": ("attention.chunked", True),
    "local_layers": ("attention.local_layers", (False, True)),
    "cross_attention": ("attention.cross_attention", True),
    "latent_dim": ("attention.latent.dim", 12),
    "query_latent_dim": ("attention.latent.query_dim", 6),
    "rope_dim": ("attention.latent.rope_dim", 4),
    "value_dim": ("attention.latent.value_dim", 5),
    "mlp_dim": ("mlp.dim", 32),
    "gated": ("mlp.gated", False),
    "mlp_bias": ("mlp.bias", True),
    "mlp_gate_scale": ("mlp.gate_scale", 2.0),
    "mlp_out_scale": ("mlp.out_scale", 0.5),
    "num_experts": ("experts.num_experts", 8),
    "expert_dim": ("experts.dim", 16),
    "experts_per_token": ("experts.top_k", 3),
    "normalise_experts": ("experts.normalise", False),
    "expert_scores": ("experts.scores", "sigmoid"),
    "expert_groups": ("experts.num_groups", 2),
    "groups_per_token": ("experts.top_groups", 2),
    "expert_scale": ("experts.scale", 2.5),
    "expert_bias": ("experts.bias", True),
    "expert_limit": ("experts.limit", 7.0),
    "shared_expert_dim": ("experts.shared_dim", 8),
    "shared_expert_gate": ("experts.shared_gate", True),
    "expert_dispatch": ("experts.dispatch", "dropless"),
    "load_balance_weight": ("experts.load_balance_weight", 0.1),
    "dense_layers": ("experts.dense_layers", (0,)),
    "recurrent": ("recurrence.mixer", ShortConvolutionConfig(5)),
    "recurrent_layers": ("recurrence.layers", (True, False)),
    "recurrent_beside": ("recurrence.beside", True),
    "recurrent_in_scale": ("recurrence.in_scale", 2.0),
    "recurrent_out_scale": ("recurrence.out_scale", 2.0),
    "norm": ("norms.kind", "layer"),
    "norm_placement": ("norms.placement", "post"),
    "norm_epsilon": ("norms.epsilon", 1e-5),
    "first_norm": ("norms.first", False),
    "shared_norm": ("norms.shared", True),
    "token_dim": ("embedding.dim", 8),
    "embed_scale": ("embedding.scale", 8.0),
    "embed_norm": ("embedding.norm", True),
    "token_types": ("embedding.token_types", 2),
    "embed_dropout": ("embedding.dropout", 0.1),
    "max_positions": ("positions.max_positions", 32),
    "position_offset": ("positions.offset", 0),
    "pad_token": ("positions.pad_token", 1),
    "relative_buckets": ("positions.relative_buckets", 8),
    "farthest_distance": ("positions.farthest_distance", 64),
    "image_size": ("image.size", 16),
    "patch_size": ("image.patch_size", 2),
    "channels": ("image.channels", 1),
    "patch_bias": ("image.patch_bias", False),
    "first_vector": ("image.first_vector", False),
    "mask_patch": ("image.mask_patch", True),
    "feature_size": ("features.size", 12),
    "tied_head": ("output.tied", True),
    "head_bias": ("output.bias", True),
    "logit_scale": ("output.scale", 0.5),
    "final_softcap": ("output.softcap", 30.0),
    "num_classes": ("output.num_classes", 3),
    "projection_dim": ("output.projection_dim", 6),
    "head_transform": ("output.transform", True),
    "head_transform_norm": ("output.transform_norm", False),
    "head_transform_bias": ("output.transform_bias", False),
    "head_activation": ("output.activation", "gelu"),
    "pooling": ("pool.kind", "mean"),
    "end_token": ("pool.end_token", 5),
    "pooled_norm": ("pool.norm", True),
    "pooler": ("pool.dense", True),
    "pooler_dim": ("pool.dim", 6),
    "pooler_activation": ("pool.activation", "relu"),
}
# A config that has the part, where the default has none.
LATENT = LatentConfig(dim=8, rope_dim=2, value_dim=4)
OF_PART: dict[str, TransformerConfig] = {
    "attention.latent": make_config({"attention.num_kv_heads": 4, "attention.latent": LATENT}),
    "experts": TransformerConfig(experts=ExpertsConfig(num_experts=4, dim=8, top_k=2)),
    "recurrence": TransformerConfig(recurrence=RecurrenceConfig(MIXER)),
    "image": TransformerConfig(head=None, causal=False, image=ImageConfig(size=8, patch_size=4)),
    "features": TransformerConfig(
        head=None,
        causal=False,
        features=FeaturesConfig(size=10),
        positions=PositionsConfig(max_positions=6),
    ),
}


@pytest.mark.parametrize("name", FLAT)
def test_flat_name_warns_and_is_its_path(name: str):
    path, value = FLAT[name]
    config = OF_PART.get(path.rpartition(".")[0], TransformerConfig())
    expected = with_fields(config, {path: value})
    with pytest.warns(DeprecationWarning, match=rf"{name} of TransformerConfig") as warned:
        flat = dataclasses.replace(config, **{name: value})
    assert flat == expected
    assert [warning.filename for warning in warned] == [__file__]
    text = str(warned[0].message)
    code = text[text.index("dataclasses.replace(config") : text.index(". The flat names")]
    names = {**vars(models), "config": config, "dataclasses": dataclasses}
    assert run_advice(text, code, names) == expected
    with pytest.warns(DeprecationWarning, match=rf"read config\.{path}\.") as warned:
        assert getattr(flat, name) == value
    assert [warning.filename for warning in warned] == [__file__]


def test_transformer_config_of_many_flat_names_warns_once():
    with pytest.warns(DeprecationWarning, match="deprecated") as warned:
        config = TransformerConfig(
            num_layers=1, num_heads=8, window=4, num_experts=4, expert_dim=8, norm="layer"
        )
    assert len(warned) == 1
    code = (
        "TransformerConfig(attention=AttentionConfig(num_heads=8, window=4), "
        "experts=ExpertsConfig(num_experts=4, dim=8), norms=NormConfig(kind='layer'))"
    )
    named = run_advice(str(warned[0].message), code, vars(models))
    assert dataclasses.replace(named, num_layers=1) == config


FREE = [
    name
    for name, (path, _) in FLAT.items()
    if path.partition(".")[0] in ("norms", "output", "pool", "embedding")
]


@settings(max_examples=30)
@given(chosen=st.sets(st.sampled_from(FREE), min_size=1), beside=st.booleans())
def test_flat_names_of_any_parts_give_equal_configs(chosen: set[str], beside: bool) -> None:
    flat = {name: FLAT[name][1] for name in chosen}
    expected = make_config(dict(FLAT[name] for name in chosen))
    nested = {"norms": NormConfig(), "pool": PoolConfig()} if beside else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert TransformerConfig(**flat, **nested) == expected
        assert dataclasses.replace(TransformerConfig(), **flat) == expected
        assert all(getattr(expected, name) == value for name, value in flat.items())


def test_flat_name_goes_before_its_part():
    with pytest.warns(DeprecationWarning, match="deprecated"):
        config = TransformerConfig(attention=AttentionConfig(num_heads=8, window=4), num_heads=2)
    assert config.attention == AttentionConfig(num_heads=2, window=4)


def test_flat_sizes_of_nothing_take_parts_away():
    flat = {"num_experts": 0, "experts_per_token": 3}
    mamba = {"recurrent": StateSpaceConfig(8, 16, 4), "mlp_dim": 0, "gated": False}
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert dataclasses.replace(OF_PART["experts"], **flat) == TransformerConfig()
    recurrence = RecurrenceConfig(StateSpaceConfig(8, 16, 4))
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert TransformerConfig(**mamba) == TransformerConfig(mlp=None, recurrence=recurrence)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert dataclasses.replace(OF_PART["recurrence"], recurrent=None) == TransformerConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_experts", 0), ("expert_dim", 0), ("experts_per_token", 2), ("dense_layers", ())),
        *(("image_size", 0), ("feature_size", 0), ("latent_dim", 0), ("recurrent", None)),
    ],
)
def test_flat_names_of_absent_parts_are_read(name: str, value: Any):
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert getattr(TransformerConfig(), name) == value


@pytest.mark.parametrize(
    ("flat", "says"),
    [
        ({"expert_dim": 8}, r"experts=None.* Give experts=ExpertsConfig\(num_experts=\.\.\."),
        ({"query_latent_dim": 8}, r"attention\.latent=None, so there is no query_dim"),
        ({"recurrent_beside": True}, r"recurrence=None.* Give recurrence=RecurrenceConfig\(mixer"),
        ({"patch_size": 4}, r"image=None"),
        ({"num_experts": 4}, "ExpertsConfig needs dim too"),
        ({"num_heads": 3}, "num_heads=3 is not divisible by num_kv_heads=2"),
    ],
)
def test_flat_names_without_their_part_are_refused(flat: dict[str, Any], says: str):
    with pytest.raises(LayerConfigError, match=says):
        TransformerConfig(**flat)


def test_unknown_names_are_refused_with_the_others():
    says = r"no num_hads\. Its fields are vocab_size, .*; those of attention are num_heads, "
    unknown: dict[str, Any] = {"num_hads": 4}
    with pytest.raises(TypeError, match=says):
        TransformerConfig(**unknown)
    with pytest.raises(TypeError, match=says):
        dataclasses.replace(TransformerConfig(), **unknown)
    with pytest.raises(AttributeError, match=says):
        TransformerConfig().num_hads  # noqa: B018


def test_parts_are_given_by_name() -> None:
    sizes: tuple[Any, ...] = (256, 2, 64, 4)  # the fourth was num_heads
    with pytest.raises(TypeError, match="takes from 1 to 4 positional arguments"):
        TransformerConfig(*sizes)
    with pytest.warns(DeprecationWarning, match=r"read config\.attention\.has_rope"):
        has_rope: Any = TransformerConfig().has_rope  # pyright: ignore[reportAttributeAccessIssue]
    assert has_rope(0)


def test_configs_are_copied_and_pickled():
    config = OF_PART["experts"]
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config and hash(again) == hash(config)


# --- checks of parts and of the whole -------------------------------------------------------------

BUCKETS = PositionsConfig(relative_buckets=8)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 0}, "TransformerConfig needs vocab_size to be a positive integer"),
        ({"head": "logits"}, "TransformerConfig needs head to be"),
        ({"dropout": 1.0}, "TransformerConfig needs dropout to be from 0"),
        ({"mlp": None}, "TransformerConfig needs mlp to be an MLPConfig"),
        ({"attention.dropout": 1.0}, "AttentionConfig needs dropout to be from 0"),
        ({"attention.window": 0}, "AttentionConfig needs window to be a positive integer"),
        ({"attention.qk_norm": "layer"}, "AttentionConfig needs qk_norm to be a kind"),
        ({"attention.rope_layers": (True,)}, r"attention\.rope_layers to be 2 booleans"),
        ({"attention.local_layers": (True,)}, r"attention\.local_layers to be 2 booleans"),
        ({"attention.latent": LATENT}, "num_kv_heads to be 4, with latent"),
        ({"experts": ExpertsConfig(4, 8), "mlp": None}, "needs mlp to be an MLPConfig"),
        ({"recurrence": RecurrenceConfig(MIXER), "causal": False}, "causal to be True, with rec"),
        ({"recurrence": RecurrenceConfig(MIXER), "parallel": True}, "parallel to be False, with"),
        ({"recurrence": RecurrenceConfig(MIXER, (True,))}, r"recurrence\.layers to be 2 booleans"),
        (
            {"recurrence": RecurrenceConfig(MIXER), "positions": BUCKETS},
            r"relative_buckets to be 0",
        ),
        ({"norms.kind": "batch"}, "NormConfig needs kind to be 'rms', "),
        ({"norms.placement": "within"}, "NormConfig needs placement to be 'pre', "),
        ({"norms.epsilon": -1.0}, "NormConfig needs epsilon to be at least 0"),
        ({"embedding.dropout": -0.1}, "EmbeddingConfig needs dropout to be from 0"),
        ({"positions.pad_token": -2}, "PositionsConfig needs pad_token to be a token, or -1"),
        ({"head": "first"}, r"with head='first' needs output\.num_classes."),
        ({"head": "embedding"}, r"with head='embedding' needs output\.projection_dim."),
        (
            {"head": "each", "output.num_classes": "3"},
            r"needs output\.num_classes to be a positive",
        ),
        (
            {"head": "each", "output.num_classes": 2.5},
            r"needs output\.num_classes to be a positive",
        ),
        (
            {"head": "each", "output.num_classes": True},
            r"needs output\.num_classes to be a positive",
        ),
        ({"output.scale": 0}, "OutputConfig needs scale to be another number than 0"),
        ({"pool.kind": "max"}, "PoolConfig needs kind to be 'first', "),
        ({"pool.kind": "end"}, "PoolConfig needs end_token to be a token"),
        (
            {"positions": BUCKETS, "attention.window": 4},
            r"TransformerConfig needs positions\.relative_buckets to be 0 with this attention",
        ),
    ],
    ids=str,
)
def test_unfit_fields_are_refused_by_path(fields: dict[str, Any], says: str):
    with pytest.raises(LayerConfigError, match=says):
        make_config(fields)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LatentConfig(0, 2, 4), "LatentConfig needs dim to be a positive integer"),
        (lambda: LatentConfig(8, 3, 4), "LatentConfig needs rope_dim to be even"),
        (lambda: LatentConfig(8, 2, 4, 0), "LatentConfig needs query_dim to be a positive"),
        (lambda: MLPConfig(dim=0), "MLPConfig needs dim to be a positive integer"),
        (lambda: ExpertsConfig(0, 8), "ExpertsConfig needs num_experts to be a positive"),
        (lambda: ExpertsConfig(4, 8, scores="max"), "ExpertsConfig needs scores to be 'softmax'"),
        (lambda: ExpertsConfig(4, 8, limit=0.0), "ExpertsConfig needs limit to be positive"),
        (lambda: ImageConfig(8, 9), "ImageConfig needs patch_size to be from 1 up to 8"),
        (lambda: FeaturesConfig(0), "FeaturesConfig needs size to be a positive integer"),
        (lambda: RecurrenceConfig("conv"), "mixer is a str, but RecurrenceConfig needs"),  # type: ignore[arg-type]
    ],
)
def test_unfit_parts_are_refused_by_name(make: Any, says: str):
    with pytest.raises(LayerConfigError, match=says):
        make()


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("value", [{"dim": 8}, 8, "rms", LatentConfig, LatentConfig(8, 2, 4)])
def test_parts_of_other_classes_are_refused(path: str, value: Any):
    kind = PARTS[path]
    says = rf"^{path} is a .*, but TransformerConfig needs an object of sx\.models\.{kind}"
    with pytest.raises(LayerConfigError, match=says):
        TransformerConfig(**{path: value})
    with pytest.raises(LayerConfigError, match=says):
        dataclasses.replace(TransformerConfig(), **{path: value})


@pytest.mark.parametrize("name", ["latent", "rope", "local_rope"])
def test_parts_of_attention_are_checked_too(name: str):
    fields: Any = {name: 1e4}
    with pytest.raises(LayerConfigError, match=f"{name} is a float, but AttentionConfig needs"):
        AttentionConfig(**fields)


# --- records of runs ------------------------------------------------------------------------------


def test_runs_record_configs_by_flat_names(tmp_path: Path):
    import optax

    config = TransformerConfig(num_layers=1, embed_dim=8, attention=AttentionConfig(window=4))
    model = sx.models.Transformer(config, rngs=sx.Rngs(0))
    tokens = np.zeros((1, 4), np.int32)
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.sgd(0.1)),
        sx.models.next_token_loss,
        [{"inputs": tokens, "targets": tokens}],
        directory=tmp_path / "run",
        settings=sx.train.TrainerSettings(steps=1),
        resumable=False,
    )
    trainer.run()
    texts = [path.read_text() for path in (tmp_path / "run").rglob("*.json")]
    recorded = next(text for text in texts if ".model.config." in text)
    assert '".model.config.window":"4"' in recorded
    assert '".model.config.num_heads":"4"' in recorded
    assert ".model.config.attention." not in recorded
