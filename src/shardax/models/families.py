# SPDX-License-Identifier: Apache-2.0
"""Families of published models, as tables.

A family says what the fields of a ``config.json`` mean, and where each parameter stands in the
files. A row of the table of tensors has three columns: a path here (``layers`` stands for a layer),
the name of a tensor (``#`` is the layer, ``@`` the expert), and how the tensor's axes become those
here. In ``(heads dim) embed -> embed heads dim`` the first axis of the tensor is heads and their
dimensions in one. ``0/3`` is the first of three equal parts, which axes alternate over; ``+``
before an axis says that the parts in it stand one after the other, in the order of the rows.

``Family`` and the reading of a ``config.json`` are in ``shardax.models.family``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from shardax.models.family import ACTIVATION_NAMES, Family, PretrainedError, Taker, brief, read_rope

# --- what several families share ------------------------------------------------------------------


def _windows(take: Taker, layers: Callable[[int, int], bool]) -> dict[str, Any]:
    """Reads the window, and its layers."""
    window, types = take("sliding_window", None), take("layer_types", None)
    count = take("num_hidden_layers")
    if types is not None:
        unknown_types = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown_types or len(types) != count:
            raise PretrainedError(
                f"layer_types={brief(types)} is not supported for {count} layers, only "
                f"'full_attention' or 'sliding_attention' for each"
            )
        local = tuple(kind == "sliding_attention" for kind in types)
    else:
        local = tuple(layers(index, count) for index in range(count))
    if window is None or not any(local):
        return {}
    return {"window": window, "local_layers": None if all(local) else local}


def _window(take: Taker) -> dict[str, Any]:
    """Reads the window of a family with equal layers."""
    window, types = take("sliding_window", None), take("layer_types", None)
    kind = "full_attention" if window is None else "sliding_attention"
    if types is not None and set(types) != {kind}:
        raise PretrainedError(
            f"layer_types={brief(types)} is not supported, as transformers takes no notice of it: "
            f"all layers have sliding_window={window!r}"
        )
    return {} if window is None else {"window": window}


def _rotary(take: Taker) -> dict[str, Any]:
    return {"rope": read_rope(take)}


def _rotary_window(take: Taker, base: float = 10_000.0) -> dict[str, Any]:
    return {"rope": read_rope(take, base=base), **_window(take)}


def _qwen(take: Taker) -> dict[str, Any]:
    most, used = take("max_window_layers"), take("use_sliding_window")
    windows = _windows(take, lambda index, _: index >= most)
    return {"rope": read_rope(take), **(windows if used else {})}


def _experts(take: Taker) -> dict[str, Any]:
    """Reads the experts of Qwen, and the layers without."""
    step, plain = take("decoder_sparse_step"), take("mlp_only_layers") or ()
    count = take("num_hidden_layers")
    experts, older = take("num_experts"), take("num_local_experts", None)
    windows = _window(take) if take("use_sliding_window") else {}
    take("sliding_window", None)
    dense = tuple(i for i in range(count) if i in plain or (i + 1) % step)
    return {
        "rope": read_rope(take),
        "num_experts": experts if older is None else older,
        "dense_layers": dense,
        **windows,
    }


def _gemma(take: Taker, name: str = "hidden_activation") -> dict[str, Any]:
    """Reads the common fields of Gemma; ``name`` is the activation's."""
    size, activation = take("hidden_size"), take(name)
    alias = take({"hidden_act", "hidden_activation"}.difference([name]).pop(), None)
    names = {function for function in (activation, alias) if function is not None}
    # The first files say "gelu" and mean its approximation, as transformers reads them.
    names = {"gelu_pytorch_tanh" if function == "gelu" else function for function in names}
    functions = {ACTIVATION_NAMES.get(function) for function in names}
    if len(functions) != 1 or None in functions:
        raise PretrainedError(
            f"{name}={brief(activation)} beside {brief(alias)} is not supported: write "
            f"{name}='gelu_pytorch_tanh' alone"
        )
    return {"activation": functions.pop(), "embed_scale": size**0.5}


def _gemma1(take: Taker) -> dict[str, Any]:
    return {"rope": read_rope(take), **_gemma(take, "hidden_act")}


def _gemma2(take: Taker) -> dict[str, Any]:
    scale = take("query_pre_attn_scalar") ** -0.5
    windows = _windows(take, lambda index, _: index % 2 == 0)
    return {"rope": read_rope(take), "attention_scale": scale, **_gemma(take), **windows}


def _gemma3(take: Taker) -> dict[str, Any]:
    every = take("sliding_window_pattern", None) or 6
    newer, types = take("_sliding_window_pattern", None), take("layer_types", None)
    if types is None and newer not in (None, every):
        raise PretrainedError(
            f"_sliding_window_pattern={newer!r} is not supported without layer_types, as "
            f"transformers takes no notice of it: write sliding_window_pattern"
        )
    windows = _windows(take, lambda index, _: (index + 1) % every > 0)
    scaling, parameters = take("rope_scaling", None) or {}, take("rope_parameters", None) or {}
    theta, local = take("rope_theta", None), take("rope_local_base_freq", None)
    kinds = ("full_attention", "sliding_attention")
    wrong = [name for name in parameters if name not in kinds]
    wrong += [name for name in kinds if not isinstance(parameters.get(name) or {}, dict)]
    if wrong:
        raise PretrainedError(
            f"rope_parameters with {', '.join(map(brief, wrong))} is not supported, only tables "
            f"of {' and '.join(kinds)}"
        )
    full, sliding = (parameters.get(name) or {} for name in kinds)
    scale = take("query_pre_attn_scalar") ** -0.5
    ropes = {
        "rope": read_rope(take, {**full, **scaling}, base=theta or 1e6),
        "local_rope": read_rope(take, sliding, base=local or 1e4),
    }
    return {"attention_scale": scale, **_gemma(take), **windows, **ropes}


def _neox(take: Taker) -> dict[str, Any]:
    older = {"base": take("rotary_emb_base", 10_000.0), "fraction": take("rotary_pct", 0.25)}
    old_fields = {"rope_theta": take("rope_theta", None)}
    old_fields["partial_rotary_factor"] = take("partial_rotary_factor", None)

    def without(name: str, *default: Any) -> Any:
        return None if name in old_fields else take(name, *default)

    rope = read_rope(without, None, **older)
    for name, value in zip(old_fields, (rope.base, rope.fraction), strict=True):
        if old_fields[name] not in (None, value):
            raise PretrainedError(
                f"{name}={old_fields[name]!r} is not supported, as transformers takes no notice of "
                f"it: write rope_parameters={{{name!r}: {old_fields[name]!r}}}"
            )
    return {"rope": rope, "parallel": take("use_parallel_residual")}


def _phi(take: Taker) -> dict[str, Any]:
    return {"rope": read_rope(take, None, fraction=0.5)}


def _phi3(take: Taker) -> dict[str, Any]:
    return {"rope": read_rope(take, kinds=["default"]), **_window(take)}


def _gpt2(take: Taker) -> dict[str, Any]:
    inner, size = take("n_inner", None), take("n_embd")
    scale = None if take("scale_attn_weights") else 1.0
    return {"mlp_dim": 4 * size if inner is None else inner, "attention_scale": scale}


def _labels(take: Taker) -> dict[str, Any]:
    names, count = take("id2label", None), take("num_labels", 2)
    return {"num_classes": len(names) if names else count}


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_DECODER = {
    **_SIZES,
    "num_key_value_heads": "num_kv_heads",
    "tie_word_embeddings": "tied_head",
    "attention_dropout": "attention_dropout",
}
_RMS = {**_DECODER, "rms_norm_eps": "norm_epsilon", "head_dim": "head_dim"}
_SILU = {**_RMS, "hidden_act": "activation"}
_BIASED = {"attention_bias": "qkv_bias out_bias"}
# What is left out of a config.json is what it is by default in transformers. Only the sizes that
# every file has must be there: vocabulary, width, MLP, layers and heads.
_UNTIED = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
}
_TIED = {**_UNTIED, "tie_word_embeddings": True}
_QWEN = {
    **_UNTIED,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_MISTRAL = {**_UNTIED, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_GEMMA = {
    **_TIED,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
}
_GEMMA2 = {**_GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256}
_GEMMA2 |= {"hidden_activation": _GEMMA2.pop("hidden_act"), "sliding_window": 4096}
_ALL_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def _heads(name: str, base: str = "") -> dict[str, dict[str, Any]]:
    base = base or name.replace("ForCausalLM", "Model")
    return {name: {}, base: {"head": None, "tied_head": True}}


_ATTENTION = """
layers.attn.q.kernel | {a}q_proj.weight | (h d) e -> e h d
layers.attn.q.bias | {a}q_proj.bias | (h d) -> h d
layers.attn.k.kernel | {a}k_proj.weight | (h d) e -> e h d
layers.attn.k.bias | {a}k_proj.bias | (h d) -> h d
layers.attn.v.kernel | {a}v_proj.weight | (h d) e -> e h d
layers.attn.v.bias | {a}v_proj.bias | (h d) -> h d
layers.attn.out.kernel | {a}{o}.weight | e (h d) -> h d e
layers.attn.out.bias | {a}{o}.bias | e
layers.attn.query_norm.scale | {a}q_norm.weight | d
layers.attn.key_norm.scale | {a}k_norm.weight | d
"""
_PLAIN_MLP = """
layers.mlp.up.kernel | {u}.weight | m e -> e m
layers.mlp.up.bias | {u}.bias | m
layers.mlp.down.kernel | {d}.weight | e m -> m e
layers.mlp.down.bias | {d}.bias | e
"""
_GATED_MLP = """
layers.mlp.gate.kernel | {l}mlp.gate_proj.weight | m e -> e m
layers.mlp.gate.bias | {l}mlp.gate_proj.bias | m
"""
_NORMS = """
layers.attn_norm.scale | {l}input_layernorm.weight | e
layers.attn_norm.bias | {l}input_layernorm.bias | e
layers.mlp_norm.scale | {l}post_attention_layernorm.weight | e
layers.mlp_norm.bias | {l}post_attention_layernorm.bias | e
"""
_ENDS = """
embed.embedding | {p}{e}.weight | v e
final_norm.scale | {p}{n}.weight | e
final_norm.bias | {p}{n}.bias | e
head.kernel | {h}.weight | v e -> e v
head.bias | {h}.bias | v
"""


def _table(*parts: str, **names: str) -> str:
    p = names.pop("p", "model.")
    layer = p + "layers.#."
    templates = {"p": p, "l": layer, "a": layer + "self_attn.", "o": "o_proj", "e": "embed_tokens"}
    templates |= {
        "n": "norm",
        "h": "lm_head",
        "u": layer + "mlp.up_proj",
        "d": layer + "mlp.down_proj",
    }
    return "".join(parts).format(**{**templates, **names})


_LLAMA_TENSORS = _table(_ENDS, _NORMS, _ATTENTION, _GATED_MLP, _PLAIN_MLP)
_EXPERT_TENSORS = """
layers.mlp.router.kernel | {l}{m}.gate.weight | x e -> e x
layers.mlp.gate | {l}{m}.experts.@.{eg}.weight | m e -> x e m
layers.mlp.up | {l}{m}.experts.@.{eu}.weight | m e -> x e m
layers.mlp.down | {l}{m}.experts.@.{ed}.weight | e m -> x m e
"""
_MIXTRAL_NAMES = {"eg": "w1", "eu": "w3", "ed": "w2"}
_QWEN_NAMES = {"eg": "gate_proj", "eu": "up_proj", "ed": "down_proj"}
_SANDWICH = """
layers.attn_norm.scale | {l}input_layernorm.weight | e
layers.attn_post_norm.scale | {l}post_attention_layernorm.weight | e
layers.mlp_norm.scale | {l}pre_feedforward_layernorm.weight | e
layers.mlp_post_norm.scale | {l}post_feedforward_layernorm.weight | e
"""
_GEMMA_TENSORS = _table(_ENDS, _SANDWICH, _ATTENTION, _GATED_MLP, _PLAIN_MLP)
_GEMMA_FIELDS = {**_RMS, **_BIASED}
_FINAL_SOFTCAP = {"final_logit_softcapping": "final_softcap"}
_SOFTCAPS = {"attn_logit_softcapping": "attention_softcap", **_FINAL_SOFTCAP}

_PHI3_LAYERS = """
layers.attn.q.kernel | {a}qkv_proj.weight | +(h d) e -> e h d
layers.attn.k.kernel | {a}qkv_proj.weight | +(h d) e -> e h d
layers.attn.v.kernel | {a}qkv_proj.weight | +(h d) e -> e h d
layers.attn.out.kernel | {a}o_proj.weight | e (h d) -> h d e
layers.mlp.gate.kernel | {l}mlp.gate_up_proj.weight | +m e -> e m
layers.mlp.up.kernel | {l}mlp.gate_up_proj.weight | +m e -> e m
layers.mlp.down.kernel | {l}mlp.down_proj.weight | e m -> m e
"""
_OLMO2_LAYERS = """
layers.attn_post_norm.scale | {l}post_attention_layernorm.weight | e
layers.mlp_post_norm.scale | {l}post_feedforward_layernorm.weight | e
layers.attn.query_norm.scale | {a}q_norm.weight | (h d) -> h d
layers.attn.key_norm.scale | {a}k_norm.weight | (h d) -> h d
"""
_GPT2_TENSORS = """
embed.embedding | transformer.wte.weight | v e
positions.embedding | transformer.wpe.weight | p e
layers.attn_norm.scale | transformer.h.#.ln_1.weight | e
layers.attn_norm.bias | transformer.h.#.ln_1.bias | e
layers.attn.q.kernel | transformer.h.#.attn.c_attn.weight | e (0/3 h d) -> e h d
layers.attn.k.kernel | transformer.h.#.attn.c_attn.weight | e (1/3 h d) -> e h d
layers.attn.v.kernel | transformer.h.#.attn.c_attn.weight | e (2/3 h d) -> e h d
layers.attn.q.bias | transformer.h.#.attn.c_attn.bias | (0/3 h d) -> h d
layers.attn.k.bias | transformer.h.#.attn.c_attn.bias | (1/3 h d) -> h d
layers.attn.v.bias | transformer.h.#.attn.c_attn.bias | (2/3 h d) -> h d
layers.attn.out.kernel | transformer.h.#.attn.c_proj.weight | (h d) e -> h d e
layers.attn.out.bias | transformer.h.#.attn.c_proj.bias | e
layers.mlp_norm.scale | transformer.h.#.ln_2.weight | e
layers.mlp_norm.bias | transformer.h.#.ln_2.bias | e
layers.mlp.up.kernel | transformer.h.#.mlp.c_fc.weight | e m
layers.mlp.up.bias | transformer.h.#.mlp.c_fc.bias | m
layers.mlp.down.kernel | transformer.h.#.mlp.c_proj.weight | m e
layers.mlp.down.bias | transformer.h.#.mlp.c_proj.bias | e
final_norm.scale | transformer.ln_f.weight | e
final_norm.bias | transformer.ln_f.bias | e
head.kernel | lm_head.weight | v e -> e v
"""
_NEOX_LAYERS = """
layers.attn.q.kernel | {a}query_key_value.weight | (h 0/3 d) e -> e h d
layers.attn.k.kernel | {a}query_key_value.weight | (h 1/3 d) e -> e h d
layers.attn.v.kernel | {a}query_key_value.weight | (h 2/3 d) e -> e h d
layers.attn.q.bias | {a}query_key_value.bias | (h 0/3 d) -> h d
layers.attn.k.bias | {a}query_key_value.bias | (h 1/3 d) -> h d
layers.attn.v.bias | {a}query_key_value.bias | (h 2/3 d) -> h d
layers.attn.out.kernel | {a}dense.weight | e (h d) -> h d e
layers.attn.out.bias | {a}dense.bias | e
"""
_NEOX_NAMES = {
    "p": "gpt_neox.",
    "a": "gpt_neox.layers.#.attention.",
    "e": "embed_in",
    "n": "final_layer_norm",
    "h": "embed_out",
    "u": "gpt_neox.layers.#.mlp.dense_h_to_4h",
    "d": "gpt_neox.layers.#.mlp.dense_4h_to_h",
}
_ENCODER_LAYERS = """
layers.attn.q.kernel | {a}query.weight | (h d) e -> e h d
layers.attn.q.bias | {a}query.bias | (h d) -> h d
layers.attn.k.kernel | {a}key.weight | (h d) e -> e h d
layers.attn.k.bias | {a}key.bias | (h d) -> h d
layers.attn.v.kernel | {a}value.weight | (h d) e -> e h d
layers.attn.v.bias | {a}value.bias | (h d) -> h d
layers.attn.out.kernel | {l}attention.output.dense.weight | e (h d) -> h d e
layers.attn.out.bias | {l}attention.output.dense.bias | e
layers.mlp.up.kernel | {l}intermediate.dense.weight | m e -> e m
layers.mlp.up.bias | {l}intermediate.dense.bias | m
layers.mlp.down.kernel | {l}output.dense.weight | e m -> m e
layers.mlp.down.bias | {l}output.dense.bias | e
pooler.kernel | {p}pooler.dense.weight | o e -> e o
pooler.bias | {p}pooler.dense.bias | o
head.kernel | {h}.weight | o e -> e o
head.bias | {h}.bias | o
"""
_BERT_ENDS = """
embed.embedding | {p}embeddings.word_embeddings.weight | v e
positions.embedding | {p}embeddings.position_embeddings.weight | p e
types.embedding | {p}embeddings.token_type_embeddings.weight | t e
embed_norm.scale | {p}embeddings.LayerNorm.weight | e
embed_norm.bias | {p}embeddings.LayerNorm.bias | e
layers.attn_post_norm.scale | {l}attention.output.LayerNorm.weight | e
layers.attn_post_norm.bias | {l}attention.output.LayerNorm.bias | e
layers.mlp_post_norm.scale | {l}output.LayerNorm.weight | e
layers.mlp_post_norm.bias | {l}output.LayerNorm.bias | e
head_dense.kernel | cls.predictions.transform.dense.weight | o e -> e o
head_dense.bias | cls.predictions.transform.dense.bias | o
head_norm.scale | cls.predictions.transform.LayerNorm.weight | e
head_norm.bias | cls.predictions.transform.LayerNorm.bias | e
head_bias | cls.predictions.bias | v
"""
_VIT_ENDS = """
first | {p}embeddings.cls_token | 0/1 0/1 e -> e
positions.embedding | {p}embeddings.position_embeddings | 0/1 p e -> p e
patches.kernel | {p}embeddings.patch_embeddings.projection.weight | e c y x -> y x c e
patches.bias | {p}embeddings.patch_embeddings.projection.bias | e
layers.attn_norm.scale | {l}layernorm_before.weight | e
layers.attn_norm.bias | {l}layernorm_before.bias | e
layers.mlp_norm.scale | {l}layernorm_after.weight | e
layers.mlp_norm.bias | {l}layernorm_after.bias | e
final_norm.scale | {p}layernorm.weight | e
final_norm.bias | {p}layernorm.bias | e
"""
_ENCODER_FIELDS = {
    **_SIZES,
    "hidden_act": "activation",
    "layer_norm_eps": "norm_epsilon",
    "hidden_dropout_prob": "dropout embed_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_ENCODER = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
}
_ENCODER_FIXED = {**_ALL_BIASES, "norm": "layer", "gated": False, "causal": False, "rope": None}


def _encoder(*parts: str, p: str, h: str) -> str:
    layer = f"{p}encoder.layer.#."
    attention = layer + ("attention.attention." if p == "vit." else "attention.self.")
    return _table(*parts, p=p, l=layer, a=attention, h=h)


def _vit(take: Taker) -> dict[str, Any]:
    patches = (take("image_size") // max(take("patch_size"), 1)) ** 2
    return {"vocab_size": 0, "max_positions": patches + 1, **_labels(take)}


FAMILIES: dict[str, Family] = {
    "llama": Family(
        {**_SILU, **_BIASED, "mlp_bias": "mlp_bias"},
        _LLAMA_TENSORS,
        defaults={**_UNTIED, "mlp_bias": False},
        derive=_rotary,
        architectures=_heads("LlamaForCausalLM"),
    ),
    "mistral": Family(
        _SILU,
        _LLAMA_TENSORS,
        defaults={**_MISTRAL, "sliding_window": 4096},
        derive=_rotary_window,
        architectures=_heads("MistralForCausalLM"),
    ),
    "qwen2": Family(
        _SILU,
        _LLAMA_TENSORS,
        fixed={"qkv_bias": True},
        defaults=_QWEN,
        derive=_qwen,
        architectures=_heads("Qwen2ForCausalLM"),
    ),
    "qwen3": Family(
        {**_SILU, **_BIASED},
        _LLAMA_TENSORS,
        fixed={"qk_norm": "head"},
        defaults={**_QWEN, "head_dim": 128},
        derive=_qwen,
        architectures=_heads("Qwen3ForCausalLM"),
    ),
    "mixtral": Family(
        {
            **_SILU,
            "intermediate_size": "mlp_dim expert_dim",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "router_aux_loss_coef": "load_balance_weight",
        },
        _table(_ENDS, _NORMS, _ATTENTION, _EXPERT_TENSORS, m="block_sparse_moe", **_MIXTRAL_NAMES),
        defaults={
            **_MISTRAL,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "router_aux_loss_coef": 0.001,
        },
        derive=functools.partial(_rotary_window, base=1e6),
        architectures=_heads("MixtralForCausalLM"),
        neutral={"router_jitter_noise": (0.0,)},
    ),
    "qwen3_moe": Family(
        {
            **_SILU,
            **_BIASED,
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_dim",
            "norm_topk_prob": "normalise_experts",
            "router_aux_loss_coef": "load_balance_weight",
        },
        _table(
            _ENDS,
            _NORMS,
            _ATTENTION,
            _GATED_MLP,
            _PLAIN_MLP,
            _EXPERT_TENSORS,
            m="mlp",
            **_QWEN_NAMES,
        ),
        fixed={"qk_norm": "head"},
        defaults={
            **_QWEN,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "router_aux_loss_coef": 0.001,
        },
        derive=_experts,
        architectures=_heads("Qwen3MoeForCausalLM"),
    ),
    "gemma": Family(
        _GEMMA_FIELDS,
        _LLAMA_TENSORS,
        fixed={"norm": "rms_offset"},
        defaults=_GEMMA,
        derive=_gemma1,
        architectures=_heads("GemmaForCausalLM"),
    ),
    "gemma2": Family(
        {**_GEMMA_FIELDS, **_SOFTCAPS},
        _GEMMA_TENSORS,
        fixed={"norm": "rms_offset", "norm_placement": "sandwich"},
        defaults={**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        derive=_gemma2,
        architectures=_heads("Gemma2ForCausalLM"),
        harmless=("cache_implementation",),
    ),
    "gemma3_text": Family(
        # ``transformers`` knows a soft cap of attention here, and leaves it out of the computation.
        {**_GEMMA_FIELDS, **_FINAL_SOFTCAP},
        _GEMMA_TENSORS,
        fixed={"norm": "rms_offset", "norm_placement": "sandwich", "qk_norm": "head"},
        defaults={**_GEMMA2, **dict.fromkeys(_FINAL_SOFTCAP), "max_position_embeddings": 131072},
        derive=_gemma3,
        architectures=_heads("Gemma3ForCausalLM", "Gemma3TextModel"),
        harmless=("cache_implementation",),
    ),
    "phi3": Family(
        {**_SILU, "embd_pdrop": "embed_dropout", "resid_pdrop": "dropout"},
        _table(_ENDS, _NORMS, _PHI3_LAYERS),
        defaults={
            **_UNTIED,
            "embd_pdrop": 0.0,
            "max_position_embeddings": 4096,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-5,
        },
        derive=_phi3,
        architectures=_heads("Phi3ForCausalLM"),
        neutral={"attention_bias": (False,)},
        harmless=("original_max_position_embeddings",),
    ),
    "phi": Family(
        {
            **_DECODER,
            "hidden_act": "activation",
            "layer_norm_eps": "norm_epsilon",
            "resid_pdrop": "dropout",
            "embd_pdrop": "embed_dropout",
        },
        _table(
            _ENDS,
            _NORMS,
            _ATTENTION,
            _PLAIN_MLP,
            o="dense",
            n="final_layernorm",
            u="model.layers.#.mlp.fc1",
            d="model.layers.#.mlp.fc2",
        ),
        fixed={
            **_ALL_BIASES,
            "norm": "layer",
            "gated": False,
            "parallel": True,
            "shared_norm": True,
            "head_bias": True,
        },
        defaults={
            **_UNTIED,
            "embd_pdrop": 0.0,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "resid_pdrop": 0.0,
        },
        derive=_phi,
        architectures=_heads("PhiForCausalLM"),
        neutral={"qk_layernorm": (False,)},
    ),
    "olmo2": Family(
        {**_SILU, **_BIASED},
        _table(
            _ENDS,
            _OLMO2_LAYERS,
            _ATTENTION.partition("layers.attn.query")[0],
            _GATED_MLP,
            _PLAIN_MLP,
        ),
        fixed={"norm_placement": "post", "qk_norm": "all"},
        defaults={**_UNTIED, "rms_norm_eps": 1e-5},
        derive=_rotary,
        architectures=_heads("Olmo2ForCausalLM"),
    ),
    "gpt2": Family(
        {
            "vocab_size": "vocab_size",
            "n_embd": "embed_dim",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_positions": "max_positions",
            "activation_function": "activation",
            "layer_norm_epsilon": "norm_epsilon",
            "resid_pdrop": "dropout",
            "embd_pdrop": "embed_dropout",
            "attn_pdrop": "attention_dropout",
            "tie_word_embeddings": "tied_head",
        },
        _GPT2_TENSORS,
        fixed={**_ALL_BIASES, "norm": "layer", "gated": False, "rope": None},
        defaults={
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        },
        derive=_gpt2,
        architectures=_heads("GPT2LMHeadModel", "GPT2Model"),
        neutral={"scale_attn_by_inverse_layer_idx": (False,)},
        harmless=(
            *("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"),
            *("summary_activation", "summary_first_dropout"),
            *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
        ),
        prefix="transformer.",
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    "gpt_neox": Family(
        {
            **_SIZES,
            **_BIASED,
            "hidden_act": "activation",
            "layer_norm_eps": "norm_epsilon",
            "hidden_dropout": "dropout embed_dropout",
            "attention_dropout": "attention_dropout",
            "tie_word_embeddings": "tied_head",
        },
        _table(_ENDS, _NORMS, _NEOX_LAYERS, _PLAIN_MLP, **_NEOX_NAMES),
        fixed={"mlp_bias": True, "norm": "layer", "gated": False},
        defaults={
            **_UNTIED,
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_dropout": 0.0,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
        },
        derive=_neox,
        architectures=_heads("GPTNeoXForCausalLM"),
        prefix="gpt_neox.",
        buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    "starcoder2": Family(
        {
            **_DECODER,
            "hidden_act": "activation",
            "norm_epsilon": "norm_epsilon",
            "use_bias": "qkv_bias out_bias mlp_bias",
            "residual_dropout": "dropout",
            "embedding_dropout": "embed_dropout",
        },
        _table(
            _ENDS,
            _NORMS,
            _ATTENTION,
            _PLAIN_MLP,
            u="model.layers.#.mlp.c_fc",
            d="model.layers.#.mlp.c_proj",
        ),
        fixed={"norm": "layer", "gated": False},
        defaults={
            **_TIED,
            "embedding_dropout": 0.0,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "residual_dropout": 0.0,
            "use_bias": True,
        },
        derive=_rotary_window,
        architectures=_heads("Starcoder2ForCausalLM"),
        neutral={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ),
    "bert": Family(
        {
            **_ENCODER_FIELDS,
            "max_position_embeddings": "max_positions",
            "type_vocab_size": "token_types",
        },
        _encoder(_BERT_ENDS, _ENCODER_LAYERS, p="bert.", h="classifier"),
        fixed={**_ENCODER_FIXED, "norm_placement": "after", "embed_norm": True},
        defaults={**_ENCODER, "max_position_embeddings": 512, "type_vocab_size": 2},
        derive=_labels,
        architectures={
            "BertForMaskedLM": {"head_transform": True, "head_bias": True, "tied_head": True},
            "BertModel": {"head": None, "pooler": True},
            "BertForSequenceClassification": {"head": "first", "pooler": True},
        },
        neutral={"position_embedding_type": ("absolute",), "tie_word_embeddings": (True,)},
        harmless=(
            *("directionality", "pooler_fc_size", "pooler_num_attention_heads"),
            *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
        ),
        prefix="bert.",
        buffers=(
            "embeddings.position_ids",
            "predictions.decoder.weight",
            "predictions.decoder.bias",
            # Of the heads that the first checkpoints have beside the one that they are named by.
            "seq_relationship.weight",
            "seq_relationship.bias",
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
        ),
    ),
    "vit": Family(
        {
            **{name: targets for name, targets in _ENCODER_FIELDS.items() if name != "vocab_size"},
            "image_size": "image_size",
            "patch_size": "patch_size",
            "num_channels": "channels",
            "qkv_bias": "qkv_bias",
        },
        _encoder(_VIT_ENDS, _ENCODER_LAYERS, p="vit.", h="classifier"),
        fixed=_ENCODER_FIXED,
        defaults={
            **_ENCODER,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
            "image_size": 224,
            "num_channels": 3,
            "patch_size": 16,
            "qkv_bias": True,
        },
        derive=_vit,
        architectures={
            "ViTForImageClassification": {"head": "first"},
            "ViTModel": {"head": None, "pooler": True},
        },
        neutral={"pooler_act": ("tanh",)},
        harmless=("encoder_stride", "pooler_output_size", "tie_word_embeddings", "vocab_size"),
        prefix="vit.",
        buffers=(),
    ),
}


def register(model_type: str, *, like: str | None = None, **parts: Any) -> None:
    """Makes a type of models known to ``from_pretrained``.

    Args:
        model_type: As in ``config.json``. A type that is known already is replaced.
        like: A known type, of which everything is taken that is not given; mappings and lists are
            added to its own.
        **parts: ``fields``, ``tensors``, ``fixed``, ``defaults``, ``derive``, ``architectures``,
            ``neutral``, ``harmless``, ``prefix``, ``buffers``; see ``docs/pretrained.md``.

    Raises:
        PretrainedError: If a part is unknown or missing, or ``like`` is no known type.

    Example:
        >>> import shardax as sx
        >>> sx.models.register(
        ...     "my_llama",
        ...     like="llama",
        ...     fixed={"final_softcap": 30.0},
        ...     architectures={"MyLlamaForCausalLM": {}},
        ...     harmless=["my_note"],
        ... )
    """
    parts_of_family = {field.name: field for field in dataclasses.fields(Family)}
    wrong = sorted(set(parts) - set(parts_of_family))
    base = find_family(like, "like") if like is not None else None
    missing = [name for name in ("fields", "tensors") if base is None and name not in parts]
    if wrong or missing:
        raise PretrainedError(
            f"register({model_type!r}) was given {', '.join(wrong) or 'nothing unknown'}, and "
            f"lacks {', '.join(missing) or 'nothing'}. The parts of a family are "
            f"{', '.join(parts_of_family)}; with like='llama' those left out are llama's."
        )
    if base is not None:
        for name, value in parts.items():
            base_part = getattr(base, name)
            if isinstance(base_part, Mapping):
                parts[name] = {**base_part, **value}
            elif name in ("harmless", "buffers"):
                parts[name] = (*base_part, *value)
        parts = {**{name: getattr(base, name) for name in parts_of_family}, **parts}
    FAMILIES[model_type] = Family(**parts)


def find_family(model_type: Any, where: str) -> Family:
    """Returns the family of a type of models, or raises."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise PretrainedError(
        f"{where} has model_type={brief(model_type)}, but known are {', '.join(sorted(FAMILIES))}."
    )


def family_of(content: Mapping[str, Any], where: str) -> Family:
    """Returns the family of a ``config.json``, or raises with advice."""
    kind, names = content.get("model_type"), content.get("architectures")
    try:
        return find_family(kind, where)
    except PretrainedError as error:
        if not isinstance(kind, str):
            raise
        like = next(iter(difflib.get_close_matches(kind, FAMILIES, 1, 0.0)), "llama")
        parts = {name: {} for name in names} if isinstance(names, list) else {}
        raise PretrainedError(
            f"{error} If its layers and tensors are those of a known type, say of which, such as "
            f"sx.models.register({kind!r}, like={like!r}, architectures={parts!r}); if they "
            f"differ, docs/pretrained.md says how to describe them."
        ) from None
