# SPDX-License-Identifier: Apache-2.0
"""Published models: the logits of ``transformers``, and the same files when written again."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import PretrainedError
from shardax.models import Decoder, DecoderConfig, from_pretrained, save_pretrained
from tests.models import peers
from tests.needs import needs
from tests.values import with_values

pytestmark = needs("torch", "transformers")

TOKENS, MASK = peers.batch()


@sx.jit
def run(model: Any, tokens: Any, mask: Any) -> jax.Array:
    return model(tokens, mask=mask)


def hidden_and_pooled(model: Any, x: Any, *, pooled: bool = True, **options: Any) -> list[Any]:
    found = model(x, **options)
    return [found, model.pool(found)] if pooled else [found]


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor of a folder: dtype, shape and bytes."""
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {name: (each.dtype, each.shape, each.tobytes()) for name, each in found.items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**config_of(folder), **changes}))


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"))


# --- the numbers ----------------------------------------------------------------------------------


# Models whose layers differ, and some whose do not, compute in both forms: in a list and stacked.
# The others compute in one, and that every second time over a mesh.
BOTH_FORMS = {"llama", "qwen2", "mixtral", "qwen3_moe", "gemma2", "gemma3", "gpt2", "bert"}
BOTH_FORMS |= {"smollm3", "cohere2", "olmo3", "deepseek_v3", "gpt_oss"}
BOTH_FORMS |= {"llama4_text", "lfm2", "lfm2-biases", "mamba2", "qwen3_next", "falcon_h1"}
BOTH_FORMS |= {"electra", "modernbert", "mpnet", "roberta"}


@pytest.mark.parametrize("name", peers.CASES)
def test_logits_and_files_equal_those_of_transformers(
    name: str, tmp_path: Path, mesh: jax.sharding.Mesh
):
    peer = peers.make(tmp_path / "peer", name)
    expected = peers.logits(peer, TOKENS, MASK)
    kept = MASK if expected.ndim == 3 else np.array([True, False])  # its first token is padding
    number = list(peers.CASES).index(name)
    on_mesh = number % 2  # the form that is over a mesh
    computes = number // 2 % 2
    for scanned in (False, True):
        where = mesh if scanned == on_mesh else None
        model = from_pretrained(tmp_path / "peer", mesh=where, scan_layers=scanned)
        if name in BOTH_FORMS or scanned == computes:
            found = np.asarray(run(model, TOKENS, MASK))
            assert found.dtype == np.float32
            np.testing.assert_allclose(found[kept], expected[kept], rtol=0, atol=2e-5)
        copy = tmp_path / f"copy {scanned}"
        save_pretrained(model, copy)
        assert tensors(copy) == tensors(tmp_path / "peer")
        assert config_of(copy) == config_of(tmp_path / "peer")
    again = type(peer).from_pretrained(tmp_path / "copy True").eval()
    np.testing.assert_array_equal(peers.logits(again, TOKENS, MASK), expected)


PIXELS = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ViTForImageClassification", {"num_labels": 4, "qkv_bias": False}),
        ("ViTModel", {}),
        ("Dinov2ForImageClassification", {"num_labels": 4, "qkv_bias": False}),
        ("Dinov2Model", {"mlp_ratio": 2, "use_mask_token": False}),
    ],
)
def test_images_have_the_logits_of_transformers(kind: str, options: Any, tmp_path: Path):
    import torch

    family = "ViT" if kind.startswith("ViT") else "Dinov2"
    sizes = {**peers.IMAGES, **options}
    if family == "Dinov2":
        del sizes["intermediate_size"]
    peer = peers.make_model(tmp_path / "peer", f"{family}Config", kind, sizes)
    with torch.no_grad():
        expected = peer(torch.from_numpy(PIXELS.transpose(0, 3, 1, 2)))
    pooled = kind == "ViTModel"
    for scanned in (False, True):
        model = from_pretrained(tmp_path / "peer", scan_layers=scanned)
        results = sx.jit(lambda model: hidden_and_pooled(model, PIXELS, pooled=pooled))(model)
        for result, value in zip(results, expected[: len(results)], strict=True):
            largest = max(1.0, float(value.abs().max()))
            np.testing.assert_allclose(result, value.numpy(), rtol=0, atol=2e-5 * largest)
    save_pretrained(model, tmp_path / "copy")
    assert tensors(tmp_path / "copy") == tensors(tmp_path / "peer")


def test_token_types_and_pooler_equal_transformers(tmp_path: Path):
    import torch

    peer = peers.make(tmp_path, "bert-bare")
    types = np.random.default_rng(1).integers(0, 2, TOKENS.shape)
    with torch.no_grad():
        expected = peer(torch.from_numpy(TOKENS), token_type_ids=torch.from_numpy(types))
    model = from_pretrained(tmp_path)
    found = sx.jit(lambda model: hidden_and_pooled(model, TOKENS, token_types=types))(model)
    for each, wanted in zip(found, expected[:2], strict=True):
        np.testing.assert_allclose(each, wanted.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "scanned"),
    [
        ("llama", False),
        ("gemma3", False),
        ("gemma3", True),
        ("gpt2", True),
        ("gpt_neox", False),
        ("mistral", False),
        ("mistral", True),
        ("cohere2", True),
        ("olmo3", False),
        ("smollm3", True),
        ("qwen2_moe", False),
        ("deepseek_v3", True),
        ("deepseek_v2", False),
        ("gpt_oss", True),
        ("llama4_text", True),
        ("lfm2", False),
        ("lfm2-biases", True),
        ("mamba2", True),
        ("mamba2-biases", False),
        ("falcon_h1", True),
        ("falcon_h1-norms", False),
        ("qwen3_next", True),
        ("qwen3_next-biases", False),
    ],
)
def test_cached_parts_give_logits_of_transformers(name: str, scanned: bool, tmp_path: Path):
    peer = peers.make(tmp_path, name)
    model = from_pretrained(tmp_path, scan_layers=scanned)
    cache = model.make_cache(2, 16)
    step = sx.jit(lambda model, tokens, mask, cache: model(tokens, mask=mask, cache=cache))
    ends = (0, 7, 8, 9, 10, 11, 12)
    parts = [step(model, TOKENS[:, a:b], MASK[:, a:b], cache) for a, b in itertools.pairwise(ends)]
    expected = peers.logits(peer, TOKENS, MASK)
    found = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(found[MASK], expected[MASK], rtol=0, atol=2e-5)


def test_bfloat16_is_kept_unless_dtypes_are_given(tmp_path: Path):
    peer = peers.make(tmp_path / "peer", "gemma2", dtype="bfloat16")
    model = from_pretrained(tmp_path / "peer")
    assert {v.dtype for _, v in sx.iter_variables(model, sx.Param)} == {jnp.dtype("bfloat16")}
    assert sx.eval_shape(run, model, TOKENS, MASK).dtype == jnp.bfloat16
    save_pretrained(model, tmp_path / "copy")
    assert tensors(tmp_path / "copy") == tensors(tmp_path / "peer")
    wide = from_pretrained(tmp_path / "peer", dtype="float32")
    assert {v.dtype for _, v in sx.iter_variables(wide, sx.Param)} == {jnp.dtype("bfloat16")}
    peer = type(peer).from_pretrained(tmp_path / "peer", dtype="float32").eval()
    expected = peers.logits(peer, TOKENS, MASK)
    np.testing.assert_allclose(run(wide, TOKENS, MASK)[MASK], expected[MASK], rtol=0, atol=2e-5)
    cast = from_pretrained(tmp_path / "peer", param_dtype="float32")
    assert {v.dtype for _, v in sx.iter_variables(cast, sx.Param)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "gpt2"])
def test_checkpoints_of_several_files_are_read_and_written(name: str, tmp_path: Path):
    peers.make(tmp_path / "peer", name, max_shard_size="20KB")
    assert len(list((tmp_path / "peer").glob("*.safetensors"))) > 2
    model = from_pretrained(tmp_path / "peer")
    save_pretrained(model, tmp_path / "copy", max_file_bytes=20_000)
    assert tensors(tmp_path / "copy") == tensors(tmp_path / "peer")
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "peer").keys()


def test_saved_tied_head_must_equal_the_embedding(tmp_path: Path):
    from safetensors.numpy import load_file, save_file

    peers.make(tmp_path, "llama-biases")
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    embedding = held["model.embed_tokens.weight"]
    save_file({**held, "lm_head.weight": embedding}, file)
    assert from_pretrained(tmp_path).head is None
    save_file({**held, "lm_head.weight": embedding + 1}, file)
    with pytest.raises(PretrainedError, match=r"and lm_head\.weight are one tensor, but differ"):
        from_pretrained(tmp_path)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "gpt2"])
def test_from_pretrained_reads_only_its_slices_on_each_device(
    name: str, tmp_path: Path, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
):
    peers.make(tmp_path, name)
    read: list[int] = []
    import safetensors

    class Counted:
        def __init__(self, found: Any) -> None:
            self.found = found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.found, name)

        def __getitem__(self, index: Any) -> Any:
            value = self.found[index]
            read.append(value.nbytes)
            return value

    class Opened:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> Any:
            return self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def metadata(self) -> Any:
            return self.file.metadata()

        def get_slice(self, name: str) -> Any:
            return Counted(self.file.get_slice(name))

    opened = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Opened)
    model = from_pretrained(tmp_path, mesh=mesh, scan_layers=True)
    sizes = [v.value.nbytes for _, v in sx.iter_variables(model, sx.Param)]
    assert sum(read) == sum(sizes)
    assert max(read) < sum(sizes) / 6
    spec = model.layers.stacked.attn.q.kernel.sharding.spec
    assert "model" in spec


def test_host_memory_holds_one_slice_besides_the_model(tmp_path: Path, mesh: jax.sharding.Mesh):
    options = {**peers.GROUPED, "vocab_size": 4096, "num_hidden_layers": 6}
    peers.make_model(tmp_path, "LlamaConfig", "LlamaForCausalLM", options)
    from_pretrained(tmp_path, mesh=mesh)  # imports and caches
    tracemalloc.start()
    model = from_pretrained(tmp_path, mesh=mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [v.value.nbytes for _, v in sx.iter_variables(model, sx.Param)]
    assert peak < sum(sizes) + max(sizes)


# --- what is refused ------------------------------------------------------------------------------


def drop(folder: Path, *names: str, **added: np.ndarray) -> None:
    """Writes the tensors of a folder anew, without some and with others."""
    from safetensors.numpy import load_file, save_file

    file = folder / "model.safetensors"
    held = {name: each for name, each in load_file(file).items() if name not in names}
    save_file({**held, **added}, file)


def test_from_pretrained_names_all_unfit_tensors_at_once(tmp_path: Path):
    peers.make(tmp_path, "llama")
    drop(tmp_path, "model.norm.weight", "lm_head.weight", extra=np.ones(3, np.float32))
    change_config(tmp_path, intermediate_size=40)
    with pytest.raises(PretrainedError) as caught:
        from_pretrained(tmp_path)
    for part in (
        "missing are model.norm.weight, lm_head.weight",
        "no place for extra",
        "model.layers.2.mlp.down_proj.weight has the shape (32, 48), but the config says (32, 40)",
    ):
        assert part in str(caught.value)


def test_from_pretrained_without_strict_initialises_missing_parameters(tmp_path: Path):
    peers.make(tmp_path, "llama")
    drop(tmp_path, "lm_head.weight", extra=np.ones(3, np.float32))
    with pytest.warns(UserWarning, match=r"tensor is there: lm_head\.weight; not read, .*: extra"):
        model = from_pretrained(tmp_path, strict=False)
    assert np.std(model.head.kernel.value) > 0
    assert np.isfinite(run(model, TOKENS, MASK)).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "llame"}, "model_type='llame', but known are bart, "),
        ("llama", {"clip_qkv": 8.0, "logit_scale": 2}, "clip_qkv=8.0 is unknown; logit_scale=2"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2 is not supported, only 1"),
        (
            "llama",
            {"quantization_config": {}},
            "quantization_config={} is not supported, only None",
        ),
        ("llama", {"hidden_act": "mish"}, "hidden_act='mish' is none of gelu"),
        (
            "llama",
            {"architectures": ["LlamaForTokenClassification"]},
            "only one of LlamaForCausalLM",
        ),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2]}},
            r"mrope_section=\[2, 2\] is unknown",
        ),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types="),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("bert", {"position_embedding_type": "relative_key"}, "only 'absolute'"),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    peers.make(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(PretrainedError, match=message):
        from_pretrained(tmp_path)


def test_older_config_form_gives_equal_logits(tmp_path: Path):
    peers.make(tmp_path, "llama")
    expected = run(from_pretrained(tmp_path), TOKENS, MASK)
    config = config_of(tmp_path)
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    older = {**config, "rope_theta": theta, "rope_scaling": {**rope, "type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(older))
    np.testing.assert_array_equal(run(from_pretrained(tmp_path), TOKENS, MASK), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: from_pretrained(folder / "nothing"), "neither a folder nor a name"),
        (from_pretrained, "config.json is not there"),
        (lambda folder: save_pretrained(sx.nn.MLP(2, 2, rngs=None), folder), "MLP is of no family"),
        (
            lambda folder: sx.models.register("x", tensors="", wrong=1),
            "given wrong, and lacks fields",
        ),
        (lambda folder: sx.models.register("x", like="y"), "like has model_type='y'"),
    ],
)
def test_missing_or_unknown_model_is_refused(
    make: Callable[[Path], Any], message: str, tmp_path: Path
):
    with pytest.raises(PretrainedError, match=message):
        make(tmp_path)


@pytest.mark.parametrize("kept", [0, 6, -8], ids=["empty", "header cut off", "end cut off"])
def test_damaged_file_is_refused_by_name(kept: int, tmp_path: Path):
    peers.make(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(PretrainedError, match=r"model\.safetensors is damaged: .*Download"):
        from_pretrained(tmp_path)


def test_model_unlike_its_config_is_not_written(tmp_path: Path):
    import dataclasses

    peers.make(tmp_path / "peer", "llama")
    model = from_pretrained(tmp_path / "peer")
    attention = dataclasses.replace(model.config.attention, window=4)
    model.config = dataclasses.replace(model.config, attention=attention)
    with pytest.raises(PretrainedError, match=r"no way to say windows=\(4, 4"):
        save_pretrained(model, tmp_path / "copy")
    with pytest.raises(PretrainedError, match="holds tensors already"):
        save_pretrained(from_pretrained(tmp_path / "peer"), tmp_path / "peer")
    assert not (tmp_path / "copy").exists()


# --- what users add -------------------------------------------------------------------------------


def test_registered_type_is_read_by_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shardax.models.families import registry

    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    peers.make(tmp_path, "llama")
    expected = run(from_pretrained(tmp_path), TOKENS, MASK)
    change_config(tmp_path, model_type="capped", cap=1.5, note="a")
    sx.models.register("capped", like="llama", fields={"cap": "output.softcap"}, harmless=["note"])
    found = run(from_pretrained(tmp_path), TOKENS, MASK)
    np.testing.assert_allclose(found, 1.5 * np.tanh(expected / 1.5), rtol=0, atol=1e-6)


def test_decoder_is_written_as_llama_for_transformers(tmp_path: Path):
    import transformers

    model = with_values(Decoder(DecoderConfig(vocab_size=64, tied_head=True), rngs=sx.Rngs(0)))
    save_pretrained(model, tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = peers.logits(peer, TOKENS, MASK)
    np.testing.assert_allclose(run(model, TOKENS, MASK)[MASK], found[MASK], rtol=0, atol=2e-5)
