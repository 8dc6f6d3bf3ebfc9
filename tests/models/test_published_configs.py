# SPDX-License-Identifier: Apache-2.0
"""What a config.json says, and what is refused of it; no weights are needed for either."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardax as sx
from shardax.errors import PartitionCheckError, PretrainedError
from shardax.models import (
    DecoderConfig,
    GatedDeltaConfig,
    StateSpaceConfig,
    TransformerConfig,
    from_pretrained,
    save_pretrained,
)
from shardax.models.families import registry
from tests.advice import run_advice
from tests.configs import field_of
from tests.models.published import MODELS, with_layers
from tests.needs import needs
from tests.values import with_values

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MANY = {**SIZES, "hidden_size": 256, "num_attention_heads": 32}
GPT2 = {"vocab_size": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
DISTILBERT = {"vocab_size": 16, "dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2}
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
GLM = {"model_type": "glm4_moe", "num_key_value_heads": 1}
IMAGES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
OWN_SIZES: dict[str, dict[str, Any]] = {"gpt2": GPT2, "distilbert": DISTILBERT, "dinov2": IMAGES}
for _kind in ("clip_vision_model", "siglip_vision_model"):
    OWN_SIZES[_kind] = {**IMAGES, "intermediate_size": 12}
OWN_SIZES |= {"deepseek_v3": {**MANY, "num_key_value_heads": 32}}
OWN_SIZES |= {"deepseek_v2": {**MANY, "num_experts_per_tok": 2}}
OWN_SIZES |= {"mamba2": {**MANY, "head_dim": 4}}
V2 = {"model_type": "deepseek_v2", "num_experts_per_tok": 2}
MAMBA2 = {"model_type": "mamba2", "num_heads": 4, "head_dim": 4, "n_groups": 1}
V3 = {"model_type": "deepseek_v3"}
FALCON = {"model_type": "falcon_h1", "num_key_value_heads": 1, "mamba_n_heads": 4}
FALCON |= {"mamba_d_ssm": 16}
NEXT = {"model_type": "qwen3_next", "num_key_value_heads": 1, "linear_num_key_heads": 2}
OSS = {"model_type": "gpt_oss", "num_key_value_heads": 1}
LLAMA4 = {"model_type": "llama4_text", "num_key_value_heads": 1}
MXFP4 = {"quant_method": "mxfp4"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def read(folder: Path, content: dict[str, Any]) -> TransformerConfig:
    """Reads a config.json beside no tensors."""
    (folder / "config.json").write_text(json.dumps(content))
    save_file({}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that all is initialised
        return from_pretrained(folder, strict=False).config


def refusal(folder: Path, content: dict[str, Any]) -> str:
    with pytest.raises(PretrainedError) as caught:
        read(folder, content)
    return str(caught.value)


@pytest.fixture
def own_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what a test registers."""
    from shardax.models.families import registry

    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))


# --- what is left out -----------------------------------------------------------------------------


DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "attention.num_kv_heads": 32,
        "norms.epsilon": 1e-6,
        "attention.rope.base": 1e4,
        "output.tied": False,
    },
    "mistral": {"attention.window": 4096, "attention.num_kv_heads": 8, "attention.rope.base": 1e4},
    "mixtral": {
        "attention.window": None,
        "experts.num_experts": 8,
        "norms.epsilon": 1e-5,
        "attention.rope.base": 1e6,
    },
    "qwen2": {"attention.window": None, "attention.num_kv_heads": 32},
    "qwen3": {"attention.head_dim": 128, "attention.qkv_bias": False},
    "qwen3_moe": {"experts.num_experts": 128, "experts.top_k": 8, "experts.normalise": False},
    "gemma": {"attention.head_dim": 256, "activation": "gelu", "attention.num_kv_heads": 16},
    "gemma2": {"output.softcap": 30.0, "attention.softcap": 50.0, "attention.window": 4096},
    "gemma3_text": {"output.softcap": None, "attention.rope.base": 1e6, "attention.window": 4096},
    "phi": {"attention.rope.fraction": 0.5, "activation": "gelu", "norms.epsilon": 1e-5},
    "phi3": {"attention.window": None, "norms.epsilon": 1e-5, "dropout": 0.0},
    "olmo2": {"norms.epsilon": 1e-5, "attention.qkv_bias": False},
    "gpt2": {"positions.max_positions": 1024, "dropout": 0.1, "activation": "gelu"},
    "gpt_neox": {
        "attention.rope.fraction": 0.25,
        "activation": "exact_gelu",
        "attention.qkv_bias": True,
    },
    "starcoder2": {"attention.window": None, "attention.num_kv_heads": 2, "output.tied": True},
    "cohere2": {"output.scale": 0.0625, "norms.epsilon": 1e-5, "output.tied": True},
    "deepseek_v2": {
        "attention.latent.query_dim": 1536,
        "experts.num_groups": 1,
        "experts.shared_dim": 2814,
    },
    "deepseek_v3": {"experts.num_groups": 8, "experts.dense_layers": (0, 1), "experts.scale": 2.5}
    | {
        "attention.latent.rope_dim": 64,
        "attention.head_dim": 192,
        "attention.rope.interleaved": True,
        "attention.num_kv_heads": 32,
    },
    "glm4": {
        "attention.head_dim": 128,
        "attention.rope.fraction": 0.5,
        "attention.qkv_bias": True,
        "norms.epsilon": 1.5625e-7,
    },
    "glm4_moe": {
        "experts.num_experts": 128,
        "experts.dense_layers": (0,),
        "experts.shared_dim": 1408,
    },
    "gpt_oss": {
        "experts.num_experts": 128,
        "experts.top_k": 4,
        "attention.rope.kind": "yarn",
        "attention.rope.base": 150000.0,
    }
    | {
        "attention.head_dim": 64,
        "attention.num_kv_heads": 8,
        "attention.window": 128,
        "experts.limit": 7.0,
    }
    | {
        "attention.rope.truncate": False,
        "attention.local_layers": (True, False),
        "attention.qkv_bias": True,
    },
    "granite": {"attention.scale": 1.0, "output.scale": None, "residual_scale": None},
    "lfm2": {
        "attention.rope.base": 1e6,
        "norms.epsilon": 1e-5,
        "output.tied": True,
        "attention.num_kv_heads": 8,
    }
    | {"recurrence": None, "mlp.dim": 256, "attention.qk_norm": "head"},
    "llama4_text": {
        "attention.window": 8192,
        "attention.chunked": True,
        "attention.rope_layers": None,
        "attention.rope.base": 500000.0,
    }
    | {"attention.query_growth": (0.1, 8192.0), "experts.num_experts": 16, "experts.top_k": 1}
    | {
        "attention.qk_norm": "unscaled",
        "attention.rope.interleaved": True,
        "mlp.dim": 16384,
        "experts.dense_layers": (),
    },
    "mamba2": {"norms.epsilon": 1e-5, "output.tied": False, "mlp": None, "attention.rope": None}
    | {"recurrence.mixer": StateSpaceConfig(128, 4, 128, 8)},
    "ministral": {
        "attention.window": 4096,
        "attention.local_layers": None,
        "attention.num_kv_heads": 8,
    },
    "nemotron": {
        "activation": "squared_relu",
        "attention.rope.fraction": 0.5,
        "norms.epsilon": 1e-5,
    },
    "olmo3": {"attention.rope.base": 5e5, "attention.window": 4096, "norms.epsilon": 1e-5},
    "olmoe": {"experts.num_experts": 64, "experts.top_k": 8, "experts.normalise": False},
    "qwen2_moe": {"experts.num_experts": 60, "experts.shared_dim": 5632, "experts.dim": 1408},
    "falcon_h1": {"attention.num_kv_heads": 8, "norms.epsilon": 1e-5, "recurrence.beside": True}
    | {"recurrence.mixer": StateSpaceConfig(128, 8, 256, gate_norm=None), "mlp.gate_scale": 1.0},
    "qwen3_next": {
        "attention.head_dim": 256,
        "attention.num_kv_heads": 2,
        "attention.rope.fraction": 0.25,
        "experts.num_experts": 512,
    }
    | {"experts.top_k": 10, "experts.dim": 512, "experts.shared_dim": 512}
    | {"experts.normalise": True, "recurrence.mixer": GatedDeltaConfig(16, 128, 32, 128)},
    "smollm3": {
        "attention.rope.base": 2e6,
        "attention.num_kv_heads": 4,
        "attention.rope_layers": None,
        "output.tied": True,
    },
    "bert": {"positions.max_positions": 512, "embedding.token_types": 2, "norms.epsilon": 1e-12},
    "roberta": {
        "positions.max_positions": 512,
        "positions.pad_token": 1,
        "embedding.token_types": 2,
        "pool.dense": False,
    },
    "xlm-roberta": {"positions.pad_token": 1, "norms.epsilon": 1e-12, "output.tied": True},
    "distilbert": {"positions.max_positions": 512, "dropout": 0.1, "embedding.token_types": 0},
    "electra": {"embedding.dim": 128, "positions.max_positions": 512, "activation": "exact_gelu"},
    "mpnet": {"positions.relative_buckets": 32, "positions.pad_token": 1, "norms.epsilon": 1e-12},
    "modernbert": {
        "attention.window": 65,
        "attention.rope.base": 160000.0,
        "pool.kind": "first",
        "output.bias": True,
    },
    "vit": {"positions.max_positions": 197, "dropout": 0.0, "attention.qkv_bias": True},
    "dinov2": {"positions.max_positions": 257, "norms.epsilon": 1e-6, "image.mask_patch": True},
    "clip_text_model": {"pool.kind": "end", "pool.end_token": 49407, "positions.max_positions": 77},
    "clip_vision_model": {
        "image.patch_size": 32,
        "positions.max_positions": 50,
        "norms.epsilon": 1e-5,
    },
    "siglip_text_model": {"activation": "gelu", "positions.max_positions": 64, "pool.dim": 0},
    "siglip_vision_model": {"pool.kind": "attention", "positions.max_positions": 196},
}


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path):
    for kind, fields in DEFAULTS.items():
        config = read(tmp_path, {**OWN_SIZES.get(kind, MANY), "model_type": kind})
        for name, value in fields.items():
            assert field_of(config, name) == value, (kind, name)


CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "phi": "Phi",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
    "starcoder2": "Starcoder2",
    "cohere2": "Cohere2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "lfm2": "Lfm2",
    "mamba2": "Mamba2",
    "llama4_text": "Llama4Text",
    "ministral": "Ministral",
    "nemotron": "Nemotron",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe",
    "falcon_h1": "FalconH1",
    "qwen3_next": "Qwen3Next",
    "smollm3": "SmolLM3",
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "mpnet": "MPNet",
    "modernbert": "ModernBert",
    "vit": "ViT",
    "dinov2": "Dinov2",
    "clip_text_model": "CLIPText",
    "clip_vision_model": "CLIPVision",
    "siglip_text_model": "SiglipText",
    "siglip_vision_model": "SiglipVision",
}


@needs("transformers")
@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_equal_those_of_its_class(kind: str, tmp_path: Path):
    import transformers

    sizes = OWN_SIZES.get(kind, {**MANY, "num_hidden_layers": 7})
    whole = getattr(transformers, f"{CLASSES[kind]}Config")(**sizes).to_dict()
    brief = read(tmp_path, {**sizes, "model_type": kind})
    named = read(tmp_path, json.loads(json.dumps(whole)))
    assert dataclasses.replace(brief, source=None) == dataclasses.replace(named, source=None)


def test_published_models_are_read_as_they_are(tmp_path: Path):
    for name, (content, expected) in MODELS.items():
        config = read(tmp_path, with_layers(content, 6))
        assert config.num_layers == 6
        for field, value in expected.items():
            assert field_of(config, field) == value, (name, field)


def test_stacked_experts_need_few_tensors(tmp_path: Path):
    content, _ = MODELS["openai/gpt-oss-120b"]  # more experts than tensors
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "layer_types": None}
    config = read(tmp_path, {**content, **sizes})
    assert (config.num_layers, config.experts.num_experts) == (36, 128)


# --- the rotary embedding -------------------------------------------------------------------------


def test_rope_scaling_goes_before_rope_parameters(tmp_path: Path):
    plain = {"rope_type": "default", "rope_theta": 1e3}
    both = read(tmp_path, {**LLAMA, "rope_parameters": plain, "rope_scaling": YARN}).attention.rope
    assert (both.kind, both.factor, both.base) == ("yarn", 4.0, 1e4)
    beside = {"rope_parameters": plain, "rope_scaling": YARN, "rope_theta": 5e5}
    assert read(tmp_path, {**LLAMA, **beside}).attention.rope.base == 5e5
    empty = read(tmp_path, {**LLAMA, "rope_parameters": plain, "rope_scaling": {}}).attention.rope
    assert (empty.kind, empty.base) == ("default", 1e3)
    for scaling in ({"nonsense": 1}, {"rope_type": "longrope", "factor": 4.0}):
        text = refusal(tmp_path, {**LLAMA, "rope_parameters": plain, "rope_scaling": scaling})
        assert "nonsense=1 is unknown" in text or "rope_type='longrope'" in text
    assert "leave one of them out" in refusal(
        tmp_path, {**LLAMA, "rope_parameters": plain, "rope_theta": 5e5}
    )


def test_rope_of_each_kind_of_layer_is_merged(tmp_path: Path):
    gemma = {**SIZES, "model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 4}
    linear = {"rope_type": "linear", "factor": 8.0}
    config = read(tmp_path, {**gemma, "rope_scaling": linear, "rope_local_base_freq": 100.0})
    rope, local_rope = config.attention.rope, config.attention.local_rope
    assert (rope.kind, rope.base, local_rope.base) == ("linear", 1e6, 100.0)
    assert "is not supported, only tables" in refusal(
        tmp_path, {**gemma, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    )


# --- fields that change nothing -------------------------------------------------------------------


def test_neutral_fields_pass_at_neutral_values(tmp_path: Path):
    harmless = {
        "use_mrope": False,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "_num_labels": 5,
        "num_labels": 3,
        "output_past": True,
        "unsloth_fixed": True,
        "quantization_config": None,
        "finetuning_task": "sst2",
        "problem_type": None,
        "layer_types": ["full_attention"] * 2,
    }
    assert read(tmp_path, {**LLAMA, **harmless}).num_layers == 2
    for name, value in {
        "use_mrope": True,
        "rope_interleaved": True,
        "quantization_config": {"bits": 4},
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
    }.items():
        assert f"{name}={value!r} is not supported" in refusal(tmp_path, {**LLAMA, name: value})


# --- advice ---------------------------------------------------------------------------------------


def advised(text: str) -> str:
    """The call of register that an error advises."""
    call = re.search(r"sx\.models\.register\((?:[^()]|\([^()]*\))*\)", text)
    assert call is not None, text
    return call[0]


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clip_qkv": 8.0, "note": "x"}, "clip_qkv=8.0 is unknown; note='x' is unknown"),
        ({"architectures": ["LlamaForTokenClassification"]}, "without the head"),
        ({"model_type": "llamas", "architectures": ["LikeForCausalLM"]}, "a known type"),
    ],
)
def test_advice_by_kind_runs(changes: dict[str, Any], says: str, tmp_path: Path):
    text = refusal(tmp_path, {**LLAMA, **changes})
    assert says in text
    code = advised(text)
    if "clip_qkv" in changes:
        code = "sx.models.register('llama', like='llama', harmless=['clip_qkv', 'note'])"
    if "known type" in says:
        code = "sx.models.register('llamas', like='llama', architectures={'LikeForCausalLM': {}})"
    run_advice(text, code, {"sx": sx})
    config = read(tmp_path, {**LLAMA, **changes})
    assert config.head == (None if "Token" in str(changes) else "tokens")


# Each has groups that read these fields, whose defaults the type has in transformers.
OF_GROUPS: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
    "modernbert": {"local_attention": 128, "classifier_pooling": "cls"},
    "electra": {"embedding_size": 128},
    "falcon_h1": {"mamba_expand": 2},
}


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize("model_type", OF_GROUPS)
def test_field_that_registered_groups_do_not_read_is_refused(model_type: str, tmp_path: Path):
    sx.models.register("derived", like=model_type, derive=lambda take: {})
    sizes = {**SIZES, "num_hidden_layers": 1, "head_dim": 4}
    text = refusal(tmp_path, {**sizes, "model_type": "derived", **OF_GROUPS[model_type]})
    for name, value in OF_GROUPS[model_type].items():
        assert f"{name}={value!r} is unknown" in text


@pytest.mark.usefixtures("own_families")
def test_field_without_a_type_in_transformers_has_to_be_there(tmp_path: Path):
    llama = registry.FAMILIES["llama"]
    parts = {"tensors": llama.tensors, "architectures": llama.architectures}
    sx.models.register("bare", fields=llama.fields, groups=llama.groups, **parts)
    assert "attention_bias is missing" in refusal(tmp_path, {**SIZES, "model_type": "bare"})


@pytest.mark.usefixtures("own_families")
def test_derived_field_that_the_config_does_not_have_is_refused(tmp_path: Path):
    sx.models.register("dropped", like="bart", derive=lambda take: {"dropout": 0.25})
    content = {"model_type": "dropped", "vocab_size": 16, "d_model": 8}
    for half in ("encoder", "decoder"):
        content |= {f"{half}_layers": 1, f"{half}_attention_heads": 2, f"{half}_ffn_dim": 8}
    assert "EncoderDecoderConfig has no dropout" in refusal(tmp_path, content)


def test_files_of_pytorch_are_named_first(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "clip_qkv": 8.0}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = (
        r"but \.bin, which is not read\. Save the model anew: transformers\.LlamaForCausalLM\."
    )
    with pytest.raises(PretrainedError, match=message):
        from_pretrained(tmp_path)


# --- sizes that a mesh does not divide ------------------------------------------------------------


def test_sizes_that_do_not_divide_stay_whole(tmp_path: Path):
    saved(tmp_path, vocab_size=18)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with pytest.warns(UserWarning, match=r"Each device holds them whole") as caught:
        model = from_pretrained(tmp_path, mesh=mesh)
    text = str(caught[0].message)
    assert "split: vocab of size 18 over the 4 devices of 'model'; heads of size 2" in text
    assert model.embed.embedding.sharding.is_fully_replicated
    assert model.layers[0].mlp.up.kernel.sharding.spec == jax.P(None, "model")
    code = "sx.models.DECODER_RULES.override({'vocab': None, 'heads': None, 'kv_heads': None})"
    rules = run_advice(text, code, {"sx": sx})
    again = from_pretrained(tmp_path, mesh=mesh, rules=rules)
    assert again.layers[0].mlp.up.kernel.sharding == model.layers[0].mlp.up.kernel.sharding
    with pytest.raises(PartitionCheckError, match="vocab"):
        from_pretrained(tmp_path, mesh=mesh, rules=sx.models.DECODER_RULES)


# --- without the head -----------------------------------------------------------------------------


def initialized(folder: Path, content: dict[str, Any]) -> Any:
    """Writes a folder with a small model, and returns the model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file({}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised"):
        model = with_values(from_pretrained(folder, strict=False))
    (folder / "model.safetensors").unlink()
    save_pretrained(model, folder)
    return model


def test_files_without_their_head_are_read_by_advice(tmp_path: Path):
    content = {**SIZES, "model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]}
    bare = {**content, "architectures": ["MPNetModel"]}
    folder = tmp_path / "model"
    written = initialized(folder, bare)  # as sentence-transformers writes it, and says the other
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(PretrainedError, match="Only tensors of the head are missing") as caught:
        from_pretrained(folder)
    names = {"sx": sx, "folder": folder}
    model = run_advice(caught.value, "sx.models.from_pretrained(folder, head=False)", names)
    np.testing.assert_array_equal(model.pooler.kernel, written.pooler.kernel)
    np.testing.assert_array_equal(model.distances.embedding, written.distances.embedding)


@pytest.mark.parametrize(
    "architecture", ["RobertaForMaskedLM", "RobertaForQuestionAnswering", "LlamaForCausalLM"]
)
def test_layers_are_read_without_the_head(architecture: str, tmp_path: Path):
    kind = architecture.partition("For")[0].lower()
    content = {**SIZES, "model_type": kind, "architectures": [architecture]}
    whole = initialized(tmp_path / "model", content)
    bare = from_pretrained(tmp_path / "model", head=False)
    assert (bare.config.head, bare.config.pool.dense, bare.head) == (None, False, None)
    kernels = [model.layers[1].attn.q.kernel.value for model in (bare, whole)]
    np.testing.assert_array_equal(*kernels)


def test_pooler_is_read_without_the_head(tmp_path: Path):
    content = {**SIZES, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    whole = initialized(tmp_path / "model", content)
    bare = from_pretrained(tmp_path / "model", head=False)
    np.testing.assert_array_equal(bare.pooler.kernel, whole.pooler.kernel)
    save_pretrained(bare, tmp_path / "bare")
    assert from_pretrained(tmp_path / "bare").config.pool.dense


def test_from_pretrained_names_other_tensors_than_the_head(tmp_path: Path):
    content = {**SIZES, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
    initialized(tmp_path / "model", content)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "extra": np.ones(2, np.float32)}, file)
    with pytest.raises(PretrainedError, match=r"the model has no place for extra\."):
        from_pretrained(tmp_path / "model", head=False)
    decoder = tensors["roberta.embeddings.word_embeddings.weight"]
    save = lambda value: save_file({**tensors, "lm_head.decoder.weight": value}, file)  # noqa: E731
    save(decoder)
    assert from_pretrained(tmp_path / "model").head is None
    save(decoder + 1)
    with pytest.raises(PretrainedError, match=r"and lm_head\.decoder\.weight are one tensor"):
        from_pretrained(tmp_path / "model")


# --- parameters that no tensor is for -------------------------------------------------------------


def saved(folder: Path, **changes: Any) -> sx.models.Decoder:
    config = DecoderConfig(
        vocab_size=16, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8
    )
    config = dataclasses.replace(config, **changes)
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    save_pretrained(model, folder)
    return model


def test_lenient_read_warns_with_names(tmp_path: Path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors["renamed"] = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(PretrainedError, match=r"strict=False\) initialises what") as refused:
        from_pretrained(tmp_path)
    names = {"sx": sx, "folder": tmp_path}
    with pytest.warns(UserWarning, match="The model is not all of"):
        run_advice(refused.value, "sx.models.from_pretrained(folder, strict=False)", names)
    with pytest.warns(UserWarning, match="The model is not all of") as caught:
        from_pretrained(tmp_path, strict=False)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert f"initialised at random, as no tensor is there: {name};" in text
    assert text.endswith("not read, as the model has no place: renamed.")
    assert caught[0].filename == __file__


def test_stacked_read_names_all_that_is_drawn(tmp_path: Path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.warns(UserWarning, match="The model is not all of") as caught:
        from_pretrained(tmp_path, strict=False, scan_layers=True)
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2))
    assert str(caught[0].message).endswith(
        f"no tensor is there: {second}; initialised with them, as they are stacked in one "
        f"parameter: {first}."
    )


def test_first_bert_names_of_norms_are_read(tmp_path: Path):
    bert = {**SIZES, "model_type": "bert", "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised"):
        model = with_values(from_pretrained(tmp_path, strict=False))
    save_pretrained(model, tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    older = {
        re.sub("LayerNorm.bias", "LayerNorm.beta", name).replace("Norm.weight", "Norm.gamma"): value
        for name, value in load_file(file).items()
    }
    assert any("gamma" in name for name in older)
    heads = {"cls.seq_relationship.weight": (2, 8), "bert.pooler.dense.weight": (8, 8)}
    older |= {name: np.ones(shape, np.float32) for name, shape in heads.items()}
    save_file(older, file)
    again = from_pretrained(tmp_path / "saved")
    norm = again.layers[1].attn_post_norm
    np.testing.assert_array_equal(norm.scale, model.layers[1].attn_post_norm.scale)
    np.testing.assert_array_equal(norm.bias, model.layers[1].attn_post_norm.bias)


# --- hostile folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**9}, "has 1000000000 layers, but its files have 0 tensors"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not positive"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is not an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not positive"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not positive"),
        ({"head_dim": 0}, "head_dim=0 is not positive"),
        ({"vocab_size": 10**30}, "is not an integer"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is not a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a number"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] is not a text"),
        ({"model_type": ["llama"]}, "model_type=['llama'], but known are"),
        ({"architectures": "LlamaForCausalLM"}, "is not a list of texts"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is not true or false"),
        ({"attention_dropout": 2}, "attention_dropout=2"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] is not a table"),
        ({"rope_parameters": {"rope_type": {}}}, "rope_type={} is not supported"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1 is not a positive number"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "factor=0 is not a positive number"),
        ({"rope_scaling": {**YARN, "rope_theta": 1}}, "rope_theta=1 is not above 1"),
        ({"model_type": "mistral", "sliding_window": 1.5}, "sliding_window=1.5 is not an integer"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "takes no notice"),
        ({"model_type": "qwen2", "layer_types": ["x"]}, "layer_types=['x'] is not supported"),
        ({"model_type": "qwen2", "layer_types": 7}, "layer_types=7 is not a list of texts"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "of 1000000000 experts"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "is not positive"),
        ({"model_type": "phi3", "rope_scaling": YARN}, "rope_type='yarn' is not supported"),
        ({"model_type": "gpt_neox", "rope_theta": 5e5}, "takes no notice"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this"),
        ({"model_type": "lfm2", "layer_types": ["mamba"] * 2}, "only 'conv' or 'full_attention'"),
        (
            {"model_type": "lfm2", "block_ffn_dim_multiplier": 1e308},
            "block_ffn_dim_multiplier=1e+308 makes a size of inf, which is too large",
        ),
        (
            {
                "model_type": "lfm2",
                "block_multiple_of": 2**61,
                "block_ffn_dim_multiplier": 2**58 + 1,
            },
            "mlp.dim is 4611686018427387904, which is too large",
        ),
        ({"model_type": "mamba2"}, "num_heads=128 of head_dim=64 are not expand=2 times"),
        ({**MAMBA2, "n_groups": 3}, "n_groups=3 does not divide num_heads=4"),
        ({**MAMBA2, "time_step_limit": [1, 0]}, "only two numbers from 0 up"),
        ({**MAMBA2, "time_step_limit": [0, {"__float__": "NaN"}]}, "only two numbers from 0 up"),
        ({**MAMBA2, "hidden_act": "tanh"}, "hidden_act='tanh' is none of"),
        ({**FALCON, "mamba_d_head": 3}, "mamba_n_heads=4 of mamba_d_head=3 are not 16 in all"),
        ({**FALCON, "mamba_d_head": [4]}, "mamba_n_heads=4 of mamba_d_head=[4] are not 16"),
        ({**FALCON, "mamba_n_groups": 3}, "mamba_n_groups=3 does not divide num_heads=4"),
        ({**FALCON, "ssm_multipliers": [1] * 4}, "[1, 1, 1, 1] is not a list of 5 numbers"),
        ({**FALCON, "mlp_multipliers": ["a", 1]}, "mlp_multipliers=['a', 1] is not a list of 2"),
        ({**FALCON, "key_multiplier": None}, "key_multiplier=None is not a number"),
        (
            {**FALCON, "lm_head_multiplier": 0},
            "lm_head_multiplier=0: OutputConfig needs scale to be another",
        ),
        ({**FALCON, "ssm_in_multiplier": "1"}, "ssm_in_multiplier='1' is not a number"),
        ({**NEXT, "linear_num_value_heads": 3}, "=3 is no multiple of linear_num_key_heads=2"),
        ({**NEXT, "layer_types": ["conv"] * 2}, "only 'linear_attention' or 'full_attention'"),
        ({**NEXT, "full_attention_interval": 0}, "full_attention_interval=0 is not positive"),
        ({**NEXT, "linear_key_head_dim": None}, "linear_key_head_dim=None is not an integer"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling=0 is not positive"),
        ({"model_type": "granite", "residual_multiplier": None}, "is not a number"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "is not supported for 2 layers"),
        ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 2}, "is not supported"),
        ({"model_type": "smollm3", "layer_types": True}, "layer_types=True is not a list of texts"),
        ({"model_type": "olmo3", "sliding_window": None}, "sliding_window=None is not an integer"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 1e4}}, "only tables"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0 is not supported, only None"),
        ({"model_type": "cohere2", "use_parallel_block": False}, "only True"),
        ({"model_type": "cohere2", "sliding_window_pattern": 0}, "is not positive"),
        ({"model_type": "qwen2_moe", "layer_types": ["sliding_attention"] * 2}, "use_sliding"),
        ({"model_type": "glm4_moe", "first_k_dense_replace": -1}, "it is below 0"),
        ({**V2, "num_experts_per_tok": None}, "num_experts_per_tok=None is not an integer"),
        ({**V2, "topk_method": "noaux_tc"}, "only 'greedy', or 'group_limited_greedy' with both"),
        ({**V2, "topk_method": "group_limited_greedy"}, "with n_group=None and topk_group=None"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob=True is not supported, only False"),
        ({**V3, "num_key_value_heads": 1}, "num_key_value_heads=1 is not supported, only 2"),
        ({**V3, "head_dim": 128}, "head_dim=128 is not supported, only 64"),
        ({**V3, "qk_rope_head_dim": 3}, "rope_dim to be even"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({**V3, "rope_scaling": {**YARN, "mscale": "a"}}, "'yarn' with mscale='a' is not"),
        ({**V3, "rope_scaling": {"factor": 2.0, "type": "linear", "mscale": 1}}, "'linear' with"),
        ({**LLAMA4, "attention_chunk_size": None}, "attention_chunk_size=None is not an integer"),
        ({**LLAMA4, "no_rope_layers": [1]}, "no_rope_layers=[1] is not supported for 2 layers"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 2}, "'chunked_attention' for each"),
        ({**LLAMA4, "rope_scaling": YARN}, "rope_type='yarn' is not supported"),
        ({**LLAMA4, "floor_scale": 0}, "floor_scale=0 is not positive"),
        ({**LLAMA4, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step=0 is not positive"),
        ({**OSS, "swiglu_limit": None}, "swiglu_limit=None is not a number"),
        ({**OSS, "swiglu_limit": 0}, "swiglu_limit=0 is not positive"),
        ({**OSS, "swiglu_alpha": None}, "swiglu_alpha=None is not a number"),
        ({**OSS, "hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({**OSS, "sliding_window": None}, "sliding_window=None is not an integer"),
        ({**OSS, "quantization_config": {"quant_method": "fp8"}}, "only quant_method='mxfp4'"),
        ({**OSS, "quantization_config": {**MXFP4, "bits": 4}}, "only quant_method='mxfp4'"),
        ({**OSS, "quantization_config": [1]}, "quantization_config=[1] is not a table"),
        ({**GLM, "n_group": 3}, "n_group=3: ExpertsConfig needs num_groups to be a divisor of 128"),
        ({**GLM, "topk_group": 2}, "topk_group=2: ExpertsConfig needs top_groups to be"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id=None is not an integer"),
        ({"model_type": "roberta", "pad_token_id": -2}, "pad_token=-2"),
        ({"model_type": "roberta", "position_embedding_type": "relative_key"}, "only 'absolute'"),
        ({"model_type": "mpnet", "relative_attention_num_buckets": 16}, "buckets=16 is not"),
        ({"model_type": "dinov2", "use_swiglu_ffn": True}, "use_swiglu_ffn=True is not supported"),
        ({"model_type": "dinov2", "mlp_ratio": 1e300}, "mlp_ratio=1e+300 makes a size of 8e+300"),
        (
            {"model_type": "clip_text_model", "eos_token_id": None},
            "eos_token_id=None is not an int",
        ),
        ({"model_type": "clip_text_model", "eos_token_id": [2, 3]}, "eos_token_id=[2, 3] is not"),
        ({"model_type": "clip_vision_model", "image_size": [4, 4]}, "image_size=[4, 4] is not"),
        ({"model_type": "siglip_vision_model", "vision_use_head": 1}, "is not true or false"),
        ({"model_type": "electra", "embedding_size": 0}, "embedding_size=0 is not positive"),
        ({"model_type": "modernbert", "mlp_dropout": 0.1}, "mlp_dropout=0.1 is not supported"),
        ({"model_type": "modernbert", "classifier_pooling": "max"}, "only 'cls' or 'mean'"),
        ({"model_type": "modernbert", "rope_scaling": YARN}, "only None"),
        ({"model_type": "modernbert", "layer_types": ["x", "y"]}, "is not supported for 2"),
    ],
)
def test_hostile_config_is_refused_by_field(changes: Any, says: str, tmp_path: Path):
    content = {**LLAMA, **changes}
    if "architectures" not in changes:
        del content["architectures"]
    assert says in refusal(tmp_path, content)


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "[1]", "{", '{"a": 1e', ""])
def test_damaged_json_is_refused_by_name(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PretrainedError, match=r"config\.json (is no JSON|holds no table)"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_pointer_of_git_lfs_is_refused_by_name(name: str, tmp_path: Path):
    saved(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(PretrainedError, match=f"{name} is a pointer of Git LFS.*git lfs pull"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("places", [{"a": 3}, [1], "x", None, {"a": ["model.safetensors"]}])
def test_damaged_index_is_refused_by_name(places: Any, tmp_path: Path):
    saved(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(PretrainedError, match="has no weight_map, a table of tensors"):
        from_pretrained(tmp_path)


def test_damaged_tokenizer_is_refused_by_name(tmp_path: Path):
    for text in ("{}", "{", "[" * 1000):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(PretrainedError, match=r"tokenizer\.json is damaged: .*Download"):
            sx.models.load_tokenizer(tmp_path)


def test_tensors_outside_of_the_folder_are_refused(tmp_path: Path):
    folder = tmp_path / "model"
    saved(folder)
    outside = (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = list(load_file(outside))
    index = folder / "model.safetensors.index.json"
    (folder / "link.safetensors").symlink_to(outside)
    for title, says in (
        ("../outside.safetensors", "which is not in the folder"),
        (str(outside), "which is not in the folder"),
        ("link.safetensors", r"is a link to .*, out of the folder.*shutil\.copyfile"),
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, title)}))
        with pytest.raises(PretrainedError, match=says):
            from_pretrained(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    saved(snapshot)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs", file.name))
    assert from_pretrained(snapshot).config.num_layers == 2
    (tmp_path / "link").symlink_to(snapshot)
    assert from_pretrained(tmp_path / "link").config.num_layers == 2


def test_model_of_no_family_has_checkpoints(tmp_path: Path):
    model = with_values(sx.nn.MLP(2, 2, rngs=None))
    with pytest.raises(PretrainedError, match="MLP is of no family") as caught:
        save_pretrained(model, tmp_path)
    names = {"sx": sx, "model": model, "folder": tmp_path / "saved"}
    run_advice(caught.value, "sx.train.checkpoint.save(model, folder)", names)
    sx.train.checkpoint.restore(sx.clone(model), tmp_path / "saved")


def test_soft_caps_that_transformers_ignores_are_refused(tmp_path: Path):
    gemma = {**SIZES, "model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 4}
    assert "attn_logit_softcapping=2.0" in refusal(
        tmp_path, {**gemma, "attn_logit_softcapping": 2.0}
    )
    config = read(tmp_path, {**gemma, "attn_logit_softcapping": None})
    assert (config.attention.softcap, config.output.softcap) == (None, None)
    assert read(tmp_path, {**gemma, "final_logit_softcapping": 2.0}).output.softcap == 2.0
