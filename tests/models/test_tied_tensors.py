# SPDX-License-Identifier: Apache-2.0
"""Tensors that are one are read under any of their names, as each library keeps another."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import numpy as numpy_files

import shardax as sx
from shardax.errors import PretrainedError
from shardax.models import from_pretrained, save_pretrained
from tests.needs import needs
from tests.values import with_values

SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
TIED = {"tie_word_embeddings": True, "num_key_value_heads": 2}
HALVES: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
HALVES |= {"encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "encoder_attention_heads": 2}
HALVES |= {"decoder_attention_heads": 2}
T5: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1}
T5 |= {"num_heads": 2}
DECODER = ("model.embed_tokens.weight", "lm_head.weight")

# By type: the class, fields of config.json, and the names of one tensor, first that which is read.
FAMILIES: dict[str, tuple[str, dict[str, Any], list[tuple[str, ...]]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, **TIED}, [DECODER]),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, **TIED, "head_dim": 4}, [DECODER]),
    "gemma": ("GemmaForCausalLM", {**SIZES, "head_dim": 4, "num_key_value_heads": 2}, [DECODER]),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2},
        [("transformer.wte.weight", "lm_head.weight")],
    ),
    "bert": (
        "BertForMaskedLM",
        SIZES,
        [
            ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ],
    ),
    "roberta": (
        "RobertaForMaskedLM",
        SIZES,
        [
            ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
            ("lm_head.bias", "lm_head.decoder.bias"),
        ],
    ),
    "mpnet": (
        "MPNetForMaskedLM",
        SIZES,
        [("mpnet.embeddings.word_embeddings.weight", "lm_head.decoder.weight")],
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 16, "dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2},
        [("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight")],
    ),
    "electra": (
        "ElectraForMaskedLM",
        {**SIZES, "embedding_size": 8},
        [("electra.embeddings.word_embeddings.weight", "generator_lm_head.weight")],
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**SIZES, "pad_token_id": 0},
        [("model.embeddings.tok_embeddings.weight", "decoder.weight")],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        T5,
        [
            (
                "shared.weight",
                "lm_head.weight",
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
            )
        ],
    ),
    "bart": (
        "BartForConditionalGeneration",
        HALVES,
        [
            (
                "model.shared.weight",
                "lm_head.weight",
                "model.encoder.embed_tokens.weight",
                "model.decoder.embed_tokens.weight",
            )
        ],
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**HALVES, "num_mel_bins": 4, "max_source_positions": 3, "max_target_positions": 10}
        | {"decoder_start_token_id": 0},
        [("model.decoder.embed_tokens.weight", "proj_out.weight")],
    ),
}


def written(folder: Path, family: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes a small model; returns its parameters by path, and the tensors of its file."""
    name, sizes, _ = FAMILIES[family]
    content = {"model_type": family, "architectures": [name], **sizes, **fields}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    numpy_files.save_file({}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all is initialised
        model = with_values(from_pretrained(folder, strict=False))
    (folder / "model.safetensors").unlink()
    save_pretrained(model, folder)
    return parameters(model), numpy_files.load_file(folder / "model.safetensors")


def parameters(model: Any) -> dict[str, Any]:
    return {
        ".".join(map(str, path)): np.asarray(v.value)
        for path, v in sx.iter_variables(model, sx.Param)
    }


def assert_reads(folder: Path, expected: dict[str, Any], **options: Any) -> None:
    found = parameters(from_pretrained(folder, **options))
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_tensor_is_read_under_each_of_its_names(family: str, tmp_path: Path) -> None:
    expected, tensors = written(tmp_path / "model", family)
    file = tmp_path / "model" / "model.safetensors"
    for names in FAMILIES[family][2]:
        held = tensors[names[0]]
        others = {name: value for name, value in tensors.items() if name not in names}

        # Alone under any name, and under all of them.
        for present in (*((name,) for name in names), names):
            numpy_files.save_file({**others, **dict.fromkeys(present, held)}, file)
            assert_reads(tmp_path / "model", expected)

        # Two that differ cannot both be it. A head of T5 that differs is its own, as it has been
        # for transformers, so there it is the embeddings that differ.
        pair = (names[0], names[-1])
        numpy_files.save_file({**others, pair[0]: held, pair[1]: held + 1}, file)
        with pytest.raises(PretrainedError, match=r"are one tensor.*but differ") as caught:
            from_pretrained(tmp_path / "model")
        assert " and ".join(pair) in str(caught.value)


def test_tied_tensor_is_read_as_safetensors_says_it_was_kept(tmp_path: Path) -> None:
    # Of any tensors: save_model of safetensors writes into the metadata what it left out.
    folder = tmp_path / "model"
    expected, tensors = written(folder, "llama", tie_word_embeddings=False)
    norms = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    del tensors[norms[0]]
    head = tensors.pop("lm_head.weight")
    expected["head.kernel"] = tensors["model.embed_tokens.weight"].T
    expected["final_norm.scale"] = tensors[norms[1]]
    kept = {norms[0]: norms[1], "lm_head.weight": "model.embed_tokens.weight", "format": "pt"}
    numpy_files.save_file(tensors, folder / "model.safetensors", metadata=kept)
    assert_reads(folder, expected)
    assert head.shape == (16, 8)

    # What is there counts before what the metadata says.
    tensors["lm_head.weight"] = head
    numpy_files.save_file(tensors, folder / "model.safetensors", metadata=kept)
    assert_reads(folder, {**expected, "head.kernel": head.T})


def test_head_of_its_own_is_no_copy(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _, tensors = written(folder, "llama", tie_word_embeddings=False)
    del tensors["model.embed_tokens.weight"]
    numpy_files.save_file(tensors, folder / "model.safetensors")
    for head in (True, False):
        with pytest.raises(PretrainedError, match=r"missing are model\.embed_tokens\.weight"):
            from_pretrained(folder, head=head)


def test_layers_alone_read_the_embedding_under_the_name_of_the_head(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected, tensors = written(folder, "llama")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    numpy_files.save_file(tensors, folder / "model.safetensors")
    assert_reads(folder, expected, head=False)


def test_difference_of_tied_tensors_says_how_to_untie_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected, tensors = written(folder, "llama")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    numpy_files.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PretrainedError, match=r'with "tie_word_embeddings": false in config\.json'):
        from_pretrained(folder)
    with pytest.warns(UserWarning, match=r"the model has no place: lm_head\.weight"):
        assert_reads(folder, expected, strict=False)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": False}))
    assert_reads(folder, {**expected, "head.kernel": tensors["lm_head.weight"].T})


@needs("torch", "transformers")
def test_file_of_save_model_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_model

    for family in ("llama", "gpt2", "roberta", "modernbert", "t5", "bart"):
        folder = tmp_path / family
        written(folder, family)
        auto = getattr(transformers, FAMILIES[family][0])
        peer = auto.from_pretrained(folder, dtype="float32").eval()
        expected = parameters(from_pretrained(folder))
        save_model(peer, str(folder / "model.safetensors"))
        assert_reads(folder, expected)
        again = auto.from_pretrained(folder, dtype="float32")
        for (name, one), two in zip(peer.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two), name
