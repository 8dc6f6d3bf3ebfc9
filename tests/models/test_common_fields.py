# SPDX-License-Identifier: Apache-2.0
"""Fields that ``transformers`` writes into any ``config.json``: read past, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as numpy_files

import shardax as sx
from shardax import models
from shardax.errors import PretrainedError
from shardax.models import from_pretrained, save_pretrained
from shardax.models.config import common_fields
from shardax.models.families import shared
from shardax.models.families.registry import FAMILIES
from tests.models.common_fields import defaults_of_types
from tests.needs import needs

# Defaults in transformers, from version 2 to 5, of what it has written into files of any type.
WRITTEN: dict[str, Any] = {
    "_commit_hash": None,
    "_name_or_path": "",
    "add_cross_attention": False,
    "attn_implementation": None,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dtype": None,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_past": True,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torch_dtype": None,
    "torchscript": False,
    "transformers_version": "4.30.2",
    "typical_p": 1.0,
    "use_bfloat16": False,
    "use_cache": True,
    "xla_device": None,
}


def decoder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Writes a small decoder; returns its parameters, and its ``config.json``."""
    config = models.DecoderConfig(vocab_size=16, num_layers=1, num_kv_heads=4)
    model = models.Decoder(config, rngs=sx.Rngs(0))
    save_pretrained(model, folder)
    return values(model), json.loads((folder / "config.json").read_text())


def values(model: Any) -> list[np.ndarray]:
    return [np.asarray(variable.value) for _, variable in sx.iter_variables(model, sx.Param)]


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))


def test_fields_that_transformers_writes_are_read_past(tmp_path: Path) -> None:
    expected, content = decoder(tmp_path / "model")
    write(tmp_path / "model", {**content, **WRITTEN})
    for one, other in zip(values(from_pretrained(tmp_path / "model")), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fields_of_each_part_of_a_pair_are_read_past(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 16, "num_layers": 1, "embed_dim": 8, "head": None}
    attention = models.AttentionConfig(
        num_heads=2, num_kv_heads=2, head_dim=4, rope=None, qkv_bias=True, out_bias=True
    )
    sizes |= {"activation": "quick_gelu", "attention": attention}
    sizes |= {"mlp": models.MLPConfig(dim=8, gated=False, bias=True)}
    sizes |= {"norms": models.NormConfig(kind="layer")}
    text = models.TransformerConfig(
        **sizes,
        positions=models.PositionsConfig(max_positions=8),
        pool=models.PoolConfig(kind="end", end_token=15),
    )
    image = models.TransformerConfig(
        **sizes,
        causal=False,
        image=models.ImageConfig(size=4, patch_size=2, patch_bias=False),
        positions=models.PositionsConfig(max_positions=5),
        embedding=models.EmbeddingConfig(norm=True),
        pool=models.PoolConfig(norm=True),
    )
    pair = models.DualEncoder(
        models.DualEncoderConfig(text, image, projection_dim=4), rngs=sx.Rngs(0)
    )
    save_pretrained(pair, tmp_path / "pair")
    content = json.loads((tmp_path / "pair" / "config.json").read_text())

    # transformers 4 wrote each part whole, and once more under an older name.
    common = {**WRITTEN, "tie_word_embeddings": True}
    parts = {name: {**content[name], **common} for name in ("text_config", "vision_config")}
    older = {f"{name}_dict": part for name, part in parts.items()}
    write(tmp_path / "pair", {**content, **common, **parts, **older})
    for one, other in zip(values(from_pretrained(tmp_path / "pair")), values(pair), strict=True):
        np.testing.assert_array_equal(one, other)


def test_settings_of_training_and_generation_may_have_any_value(tmp_path: Path) -> None:
    _, content = decoder(tmp_path / "model")
    settings = {"tf_legacy_loss": True, "xla_device": "cpu", "top_k": 1, "torchscript": True}
    settings |= {"num_beams": 4, "output_attentions": True, "min_p": 0.1, "max_new_tokens": 8}
    settings |= {"prompt_lookup_num_tokens": 3, "_experts_implementation": "eager"}
    write(tmp_path / "model", {**content, **settings})
    from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_cross_attention", True),
        ("chunk_size_feed_forward", 4),
        ("is_decoder", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("tie_encoder_decoder", True),
        ("use_bfloat16", True),
    ],
)
def test_fields_of_another_model_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    _, content = decoder(tmp_path / "model")
    write(tmp_path / "model", {**content, name: value})
    with pytest.raises(PretrainedError, match=f"{name}=.* is not supported"):
        from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [("router_jitter_noise", 0.0, 0.1), ("pretraining_tp", 1, 2), ("sliding_window", None, 4)],
)
def test_unread_field_must_have_the_default_of_its_type(
    name: str, default: Any, other: Any
) -> None:
    family = FAMILIES["mixtral"] if name == "router_jitter_noise" else FAMILIES["llama"]
    sizes = {**dict.fromkeys(shared.SIZES, 16), "num_attention_heads": 8}
    family.config({**sizes, name: default}, "config.json")
    with pytest.raises(PretrainedError, match=f"{name}={other} is not supported, only {default}"):
        family.config({**sizes, name: other}, "config.json")


@needs("transformers")
def test_defaults_of_types_are_those_of_transformers() -> None:
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    sources = [path.read_text() for path in folder.glob("*/configuration_*.py")]
    defaults = json.loads(json.dumps(defaults_of_types(sources, {*FAMILIES})))
    assert defaults == common_fields.DEFAULTS


@needs("transformers")
def test_configs_of_transformers_are_read_whole(tmp_path: Path) -> None:
    import transformers

    write_whole = transformers.PretrainedConfig().to_dict()
    expected, content = decoder(tmp_path / "model")
    write(tmp_path / "model", {**write_whole, **content})
    for one, other in zip(values(from_pretrained(tmp_path / "model")), expected, strict=True):
        np.testing.assert_array_equal(one, other)

    # Of each type all fields, of which files have those that are not defaults.
    numpy_files.save_file({}, tmp_path / "model" / "model.safetensors")
    for kind in ("bert", "bart", "clip", "gemma3_text", "gpt_oss", "siglip", "t5", "whisper"):
        config = transformers.AutoConfig.for_model(kind)
        config.to_json_file(tmp_path / "model" / "config.json", use_diff=False)
        with pytest.raises(PretrainedError, match=r"The tensors in .* missing are"):
            from_pretrained(tmp_path / "model")
