# SPDX-License-Identifier: Apache-2.0
"""Generation continues each prompt by what the model says of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import GenerationError
from shardax.models import DECODER_RULES, Decoder, DecoderConfig, generate
from tests.conftest import make_mesh
from tests.models.small import with_equal_values
from tests.needs import needs

PROMPTS = [[104, 101, 108, 108, 111], [7], list(range(20, 31)), [1, 2, 3]]
SIZES: dict[str, Any] = {"num_layers": 2, "embed_dim": 32, "num_kv_heads": 4, "head_dim": 8}


@functools.cache
def decoder(**options: Any) -> Decoder:
    """A decoder that tests share: none changes it."""
    return with_equal_values(Decoder(DecoderConfig(**(SIZES | options)), rngs=sx.Rngs(0)))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


class Plain(sx.Module):
    """A model that is only called, without a cache."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Any) -> Any:
        return self.model(tokens)


class Weights(sx.Module):
    """Gives tokens fixed probabilities, whatever it sees."""

    def __init__(self, *probabilities: float) -> None:
        self.logits = np.log(np.array(probabilities, np.float32))

    def __call__(self, tokens: Any) -> Any:
        return jnp.broadcast_to(self.logits, (*tokens.shape, self.logits.size))


def lists(arrays: Any) -> list[list[int]]:
    return [array.tolist() for array in arrays]


@functools.cache
def greedy_rows(count: int) -> list[list[int]]:
    """Takes the likeliest token of the whole sequence, one by one."""
    model, rows = decoder(), [list(prompt) for prompt in PROMPTS]
    longest = max(map(len, rows)) + count  # of one length, whose end no token before it reads
    logits = sx.jit(lambda tokens: model(tokens))
    for tokens in rows:
        for _ in range(count):
            padded = np.array([tokens + [0] * (longest - len(tokens))])
            tokens.append(int(np.argmax(logits(padded)[0, len(tokens) - 1])))
    return rows


@pytest.mark.parametrize("kind", ["listed", "stacked", "without cache"])
def test_greedy_generation_takes_each_likeliest_token(model: Decoder, kind: str) -> None:
    asked = {"listed": model, "stacked": decoder(scan_layers=True), "without cache": Plain(model)}
    found = generate(asked[kind], PROMPTS, max_new_tokens=5, temperature=0)
    assert all(one.dtype == np.int32 for one in found)
    assert lists(found) == greedy_rows(5)


WINDOW = {"sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6}
LATENT |= {"v_head_dim": 5, "num_key_value_heads": 4, "n_routed_experts": 4}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
GREEDY: dict[str, dict[str, int | None]] = {
    "llama": {},
    "mistral": WINDOW,
    "cohere2": {**WINDOW, "num_hidden_layers": 4},
    "deepseek_v2": {**LATENT, "n_group": None},
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {**WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "llama4_text": {"attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.5, "head_dim": 8}
    | {"num_local_experts": 4, "intermediate_size_mlp": 40, "num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 5},
    "ministral": {**WINDOW, "head_dim": 8},
    "nemotron": {},
    "olmo3": {**WINDOW, "num_hidden_layers": 4},
    "olmoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 8, "mamba_d_state": 6, "key_multiplier": 0.4}
    | {"mamba_chunk_size": 5, "mlp_multipliers": [0.8, 0.6], "ssm_in_multiplier": 1.2}
    | {"ssm_multipliers": [0.3, 1.5, 0.7, 1.4, 0.6], "attention_out_multiplier": 0.7},
    "qwen3_next": {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
    | {"linear_value_head_dim": 8, "num_hidden_layers": 4, "head_dim": 8},
    "smollm3": {"num_hidden_layers": 4},
}


@needs("torch", "transformers")
@pytest.mark.parametrize("family", GREEDY)
def test_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        **GREEDY[family],
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    for one in peer.parameters():  # far from zero, so that the likeliest token is clear
        torch.nn.init.normal_(one, std=0.3)
    peer.save_pretrained(tmp_path)
    ours = sx.models.from_pretrained(tmp_path)
    prompts, new = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18], [5]], 24
    for penalty in [None, 1.3] if family == "mistral" else [None]:
        expected = [
            peer.generate(
                torch.tensor([prompt]),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=11,
                pad_token_id=0,
                repetition_penalty=penalty or 1.0,
            )[0].tolist()
            for prompt in prompts
        ]
        options = {"max_new_tokens": new, "stop": 11, "repetition_penalty": penalty}
        assert lists(generate(ours, prompts, temperature=0, **options)) == expected


@needs("torch", "transformers")
def test_filters_keep_the_tokens_of_transformers() -> None:
    import torch
    from transformers import generation as process

    logits = np.random.default_rng(0).normal(size=40).astype(np.float32) * 2
    probabilities = np.exp(logits) / np.exp(logits).sum()
    scores = torch.tensor(logits)[None] / 0.8
    cases = {
        "top_k": (7, process.TopKLogitsWarper),
        "top_p": (0.6, process.TopPLogitsWarper),
        "min_p": (0.15, process.MinPLogitsWarper),
    }
    for name, (value, warper) in cases.items():
        kept = set(torch.isfinite(warper(value)(None, scores))[0].nonzero()[:, 0].tolist())
        options = {"max_new_tokens": 50, "temperature": 0.8, name: value}
        rows = generate(Weights(*probabilities), [[0]] * 40, **options, seed=0)
        assert 1 < len(kept) < 30 and {int(t) for row in rows for t in row[1:]} == kept


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_token_frequencies_follow_the_tempered_probabilities(temperature: float) -> None:
    share = np.array([0.5, 0.3, 0.2])
    options: dict[str, Any] = {"max_new_tokens": 50, "temperature": temperature, "seed": 0}
    rows = generate(Weights(*share), [[0]] * 40, **options)
    drawn = np.concatenate([row[1:] for row in rows])
    expected = share ** (1 / temperature)
    found = np.bincount(drawn, minlength=3) / drawn.size
    # Three standard deviations of a frequency over 2000 draws are at most 0.034.
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.034)


def test_kernel_of_attention_holds_for_one_call() -> None:
    model = Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
    options = {"max_new_tokens": 2, "temperature": 0}
    (plain,) = sx.models.generate(model, [[1, 2]], **options)
    (chosen,) = sx.models.generate(model, [[1, 2]], **options, attention="auto")
    np.testing.assert_array_equal(chosen, plain)
    with pytest.raises(sx.errors.LayerInputError, match="runs on TPUs"):
        sx.models.generate(model, [[1, 2]], **options, attention="splash")


def test_repeated_token_becomes_less_likely() -> None:
    prompts = [[0], [2, 0]]
    options = {"max_new_tokens": 3, "temperature": 0, "repetition_penalty": 10.0}
    found = generate(Weights(0.5, 0.3, 0.2), prompts, **options)
    assert lists(found) == [[0, 1, 2, 0], [2, 0, 1, 0, 0]]


def test_samples_depend_on_seed_and_row_only(model: Decoder) -> None:
    options = {"max_new_tokens": 9, "temperature": 1.5}
    one, same, other = (lists(generate(model, PROMPTS, seed=seed, **options)) for seed in (1, 1, 2))
    assert one == same != other
    short = lists(generate(model, PROMPTS, seed=1, **(options | {"max_new_tokens": 4})))
    assert short == [row[: len(row) - 5] for row in one]
    equal = lists(generate(model, [[5]] * 4, seed=1, **options))
    assert len({tuple(row) for row in equal}) == 4


def test_rows_and_stream_end_at_stop_tokens(model: Decoder) -> None:
    whole = lists(generate(model, PROMPTS, max_new_tokens=12, temperature=0))
    stops = [row[len(prompt) + 2] for row, prompt in zip(whole, PROMPTS, strict=True)][:2]
    expected = []
    for row, prompt in zip(whole, PROMPTS, strict=True):
        at = [i for i in range(len(prompt), len(row)) if row[i] in stops]
        expected.append(row[: at[0] + 1] if at else row)
    options = {"max_new_tokens": 12, "temperature": 0, "stop": stops}
    assert lists(generate(model, PROMPTS, **options)) == expected
    stream = list(generate(model, PROMPTS, **options, stream=True))
    added = [row[len(prompt) :] for row, prompt in zip(expected, PROMPTS, strict=True)]
    assert len(stream) == max(map(len, added))
    assert [[t for t in row.tolist() if t >= 0] for row in np.stack(stream, 1)] == added


def test_stream_yields_the_tokens_of_a_run(model: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.9, "seed": 3}
    found = np.stack(list(generate(model, PROMPTS, stream=True, **options)), axis=1)
    rows = zip(PROMPTS, lists(found), strict=True)
    assert [[*prompt, *new] for prompt, new in rows] == lists(generate(model, PROMPTS, **options))


def test_generate_compiles_nothing_for_other_lengths_of_a_bucket(model: Decoder) -> None:
    sampling = {"temperature": 0.3, "top_p": 0.9}
    generate(model, [[1, 2], [3]], max_new_tokens=16, **sampling)
    compiled: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    for prompts, count in (([[1] * 16, [2]], 3), ([[4], [5, 6, 7]], 11)):
        sampling = {"temperature": 1.2, "top_p": 0.5, "stop": [1, 2], "seed": count}
        generate(model, prompts, max_new_tokens=count, **sampling)
        list(generate(model, prompts, max_new_tokens=count, stream=True, **sampling))
    assert compiled == []
    generate(model, [[1] * 17, [2]], max_new_tokens=1, **sampling)  # the next bucket
    assert compiled


def sampled(model: Any, counts: tuple[int, ...] = (4, 1)) -> list[list[list[int]]]:
    """Samples for some counts of prompts."""
    options: dict[str, Any] = {
        "max_new_tokens": 6, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "seed": 0,
    }  # fmt: skip
    return [
        lists(generate(model, rows, **options))
        for rows in map(PROMPTS.__getitem__, map(slice, counts))
    ]


@functools.cache
def sampled_on_one_device(scan_layers: bool) -> list[list[list[int]]]:
    return sampled(decoder(scan_layers=scan_layers))


def test_stacked_layers_sample_the_tokens_of_listed() -> None:
    assert sampled_on_one_device(True) == sampled_on_one_device(False)


@pytest.mark.parametrize(  # every two of the three together
    ("scan_layers", "rules_in_scope", "kind"),
    [
        (False, False, AxisType.Auto),
        (False, True, AxisType.Explicit),
        (True, False, AxisType.Explicit),
        (True, True, AxisType.Auto),
    ],
)
def test_model_on_a_mesh_generates_the_same(
    scan_layers: bool, rules_in_scope: bool, kind: AxisType
) -> None:
    model = sx.clone(decoder(scan_layers=scan_layers))
    sx.shard(model, make_mesh(kind), DECODER_RULES)
    expected = sampled_on_one_device(scan_layers)
    if rules_in_scope:  # one prompt cannot be split by the batch's axis
        with sx.axis_rules(DECODER_RULES):
            assert sampled(model) == expected
    else:
        assert sampled(model, (4,)) == expected[:1]


def test_models_without_a_head_of_tokens_are_refused() -> None:
    config = sx.models.TransformerConfig(num_layers=1, head=None)
    model = sx.models.Transformer(config, rngs=sx.Rngs(0))
    with pytest.raises(GenerationError, match="a model with head='tokens'"):
        generate(model, [[1]], max_new_tokens=1)


class Returning(sx.Module):
    """A model of tokens with another result than logits."""

    def __init__(self, model: Any, change: Any) -> None:
        self.model, self.change = model, change

    def __call__(self, tokens: Any) -> Any:
        return self.change(self.model(tokens))


class ReturningWithCache(Returning):
    def make_cache(self, *sizes: Any, **options: Any) -> Any:
        return self.model.make_cache(*sizes, **options)

    def __call__(self, tokens: Any, **options: Any) -> Any:
        return self.change(self.model(tokens, **options))


@pytest.mark.parametrize("kind", [Returning, ReturningWithCache])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda logits: logits[:, -1], r"returned float32\[1, 256\]"),  # features of a sequence
        (lambda logits: logits.argmax(-1), r"returned int32\[1, \d+\]"),
        (lambda logits: jnp.round(logits).astype(int), r"returned int32\[1, \d+, 256\]"),
        (lambda logits: logits[0], r"returned float32\[\d+, 256\]"),
        (lambda logits: jnp.concatenate([logits] * 2), r"returned float32\[2, \d+, 256\]"),
        (lambda logits: {"logits": logits}, "returned a dict"),
    ],
)
def test_models_that_return_no_logits_are_refused(
    kind: Any, change: Any, says: str, model: Decoder
) -> None:
    other = kind(model, change)
    with pytest.raises(GenerationError, match=r"by logits, floats of shape .*, vocab\), but"):
        generate(other, [[1, 2]], max_new_tokens=2)
    with pytest.raises(GenerationError, match=says):
        next(generate(other, [[1, 2]], max_new_tokens=2, stream=True))


def test_recorded_model_is_refused_by_name(model: Decoder) -> None:
    recorded = sx.surgery.record(model, lambda model: model.at_instances_of(sx.nn.MLP))
    with pytest.raises(GenerationError, match=r"Of what sx\.surgery\.record made"):
        generate(recorded, [[1, 2]], max_new_tokens=2)


def test_nothing_to_add_gives_the_prompts_back(model: Decoder) -> None:
    prompts = [np.array([1, 2], np.int64), [3]]
    assert lists(generate(model, prompts, max_new_tokens=0)) == [[1, 2], [3]]
    assert list(generate(model, prompts, max_new_tokens=0, stream=True)) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt is empty"),
        ([[1.5]], {}, r"dtype float64\..*list\(text.encode\(\)\)"),
        ("hello", {}, "must be a list"),
        ([1, 2], {}, "list of prompts"),
        ([[-1]], {}, "negative"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([[1]], {"temperature": -0.1}, r"temperature=-0\.1"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"temperature": float("inf")}, "finite"),
        ([[1]], {"top_k": 0}, "top_k=0"),
        ([[1]], {"top_p": 0.0}, r"top_p=0\.0"),
        ([[1]], {"min_p": 1.5}, r"min_p=1\.5"),
        ([[1]], {"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ([[1]], {"stop": [-1]}, r"stop=\[-1\]"),
        ([[1]], {"stop": 2**32 + 31}, r"stop=4294967327.* below"),
        ([[1]], {"seed": 2**32 + 3}, r"seed=4294967299.* from 0 to 2\*\*32 - 1"),
        ([[1]], {"seed": 1.5}, "seed=1.5"),
        ([[1]], {"seed": "a"}, "seed='a'"),
        ([[1]], {"seed": jax.random.key(0)}, "seed="),
    ],
)
def test_invalid_prompts_and_options_are_refused(
    prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        generate(Weights(0.5, 0.5), prompts, **{"max_new_tokens": 1, **options})
