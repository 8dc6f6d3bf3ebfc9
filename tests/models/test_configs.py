# SPDX-License-Identifier: Apache-2.0
"""Configs by part, and their checks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.errors import LayerConfigError
from shardax.models import (
    AttentionConfig,
    ExpertsConfig,
    FeaturesConfig,
    ImageConfig,
    LatentConfig,
    MLPConfig,
    PositionsConfig,
    RecurrenceConfig,
    ShortConvolutionConfig,
    TransformerConfig,
)
from tests.configs import make_config

PARTS = {
    "attention": "AttentionConfig", "mlp": "MLPConfig", "experts": "ExpertsConfig",
    "recurrence": "RecurrenceConfig", "norms": "NormConfig", "embedding": "EmbeddingConfig",
    "positions": "PositionsConfig", "image": "ImageConfig", "features": "FeaturesConfig",
    "output": "OutputConfig", "pool": "PoolConfig",
}  # fmt: skip
MIXER = ShortConvolutionConfig()
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


def test_runs_record_configs_by_path(tmp_path: Path):
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
    assert '".model.config.attention.window":"4"' in recorded
    assert '".model.config.attention.num_heads":"4"' in recorded
