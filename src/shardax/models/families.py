# SPDX-License-Identifier: Apache-2.0
"""Families of published models, as tables.

A family says what the fields of a ``config.json`` mean, and where each parameter stands in the
files. A row of the table of tensors has three columns: a path here (``layers`` stands for a layer),
the name of a tensor (``#`` is the layer, ``@`` the expert), and how the tensor's axes become those
here. In ``(heads dim) embed -> embed heads dim`` the first axis of the tensor is heads and their
dimensions in one. ``0/3`` is the first of three equal parts, which axes alternate over; ``+``
before an axis says that the parts in it stand one after the other, in the order of the rows.

What a config says and no table knows is refused by name: a field either changes the model, is known
to change nothing, or may only have the value that changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardax._core.errors import ShardaxError
from shardax.models.transformer import TransformerConfig
from shardax.nn.rope import Rope


class PretrainedError(ShardaxError, ValueError):
    """A published model cannot be read, or a model be written.

    The type of the model or a field of its config is unknown or unsupported, or tensors are
    missing, left over or of another shape.
    """


# Fields of any config.json that change nothing in what a model computes.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id classifier_dropout
cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
forced_eos_token_id gradient_checkpointing id2label initializer_range keys_to_ignore_at_inference
label2id length_penalty max_length max_position_embeddings max_window_layers min_length model_type
no_repeat_ngram_size num_beams num_return_sequences output_attentions output_hidden_states
output_router_logits output_scores pad_token_id prefix problem_type remove_invalid_values
repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p unk_token_id use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pretraining_tp": (1,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
    "use_bidirectional_attention": (None, False),
}
ACTIVATION_NAMES = {
    "gelu": "exact_gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "truncate",
    ),
}

Taker = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """What is known of a type of models."""

    # By field of ``config.json`` those of ``TransformerConfig`` that it sets, separated by spaces.
    fields: Mapping[str, str]
    # The table of tensors.
    tensors: str
    # Fields of ``TransformerConfig`` that all models of the family share.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Values of fields of ``config.json`` that may be left out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Called with a function that takes a field by name; returns fields of ``TransformerConfig``.
    derive: Callable[[Taker], Mapping[str, Any]] | None = None
    # By name of the class the fields of ``TransformerConfig`` that it sets.
    architectures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Fields of ``config.json`` that may only have one of these values.
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Fields that change nothing.
    harmless: Iterable[str] = ()
    # Of the names of tensors, in all models but those without a head.
    prefix: str = "model."
    # Ends of the names of tensors that are no parameters.
    buffers: Iterable[str] = ("rotary_emb.inv_freq",)

    def config(self, given: Mapping[str, Any], where: str) -> TransformerConfig:
        """Reads a ``config.json``, or raises with all that is wrong in it."""
        left, wrong = dict(given), []
        missing = object()

        def take(name: str, *default: Any) -> Any:
            value = left.pop(name, given.get(name, missing))
            if value is missing:
                value = self.defaults.get(name, *default) if name in self.defaults or default else 1
                if not default and name not in self.defaults:
                    wrong.append(f"{name} is missing")
            return value

        values: dict[str, Any] = dict(self.fixed)
        values.update(self._of_architecture(given, wrong))
        for name, targets in self.fields.items():
            value = take(name)
            if "activation" in targets.split():
                if name in given and value not in ACTIVATION_NAMES:
                    wrong.append(f"{name}={value!r} is none of {', '.join(ACTIVATION_NAMES)}")
                value = ACTIVATION_NAMES.get(value, "silu")
            values.update(dict.fromkeys(targets.split(), value))
        if self.derive is not None:
            try:
                values.update(self.derive(take))
            except PretrainedError as error:
                wrong.append(str(error))
        for name, allowed in {**NEUTRAL, **self.neutral}.items():
            value = left.pop(name, allowed[0])
            if value not in allowed:
                wrong.append(f"{name}={value!r} is not supported, only {allowed[0]!r}")
        known = HARMLESS | set(self.harmless)
        wrong += [
            f"{name}={value!r} is unknown" for name, value in left.items() if name not in known
        ]
        if wrong:
            raise PretrainedError(
                f"{where} describes a model that cannot be read: {'; '.join(wrong)}. If a field "
                f"changes nothing, say so: sx.models.register({given.get('model_type')!r}, "
                f"like={given.get('model_type')!r}, harmless=[NAME])."
            )
        values["num_kv_heads"] = values.get("num_kv_heads") or values["num_heads"]
        if not values.get("head_dim"):
            values["head_dim"] = values["embed_dim"] // values["num_heads"]
        return TransformerConfig(**values, source=json.dumps(given))

    def _of_architecture(self, given: Mapping[str, Any], wrong: list[str]) -> Mapping[str, Any]:
        names = given.get("architectures") or [next(iter(self.architectures))]
        if len(names) == 1 and names[0] in self.architectures:
            return self.architectures[names[0]]
        known = ", ".join(self.architectures)
        wrong.append(f"architectures={names!r} is not supported, only one of {known}")
        return {}


# --- what several families share ------------------------------------------------------------------


def _rope(take: Taker, values: Mapping[str, Any] | None = None, **options: Any) -> Rope:
    """Reads the rotary embedding in today's form or the older one."""
    if values is None:
        values = take("rope_parameters", None)
        scaling = take("rope_scaling", None) or {}
        theta, part = take("rope_theta", None), take("partial_rotary_factor", None)
        if values is None:
            values = dict[str, Any](scaling)
        values = {**({} if theta is None else {"rope_theta": theta}), **values}
        if part is not None:
            values.setdefault("partial_rotary_factor", part)
    left = {name: value for name, value in values.items() if value is not None}
    kind = left.pop("rope_type", left.pop("type", "default"))
    left.pop("type", None)
    found: dict[Any, Any] = {
        "base": float(left.pop("rope_theta", options.get("base", 10_000.0))),
        "fraction": float(left.pop("partial_rotary_factor", options.get("fraction", 1.0))),
    }
    names = _ROPE_FIELDS.get(kind)
    if names is None:
        known = ", ".join(_ROPE_FIELDS)
        raise PretrainedError(f"rope_type={kind!r} is not supported, only one of {known}")
    if kind in ("llama3", "yarn") and "original_max_position_embeddings" not in left:
        left["original_max_position_embeddings"] = take("max_position_embeddings")
    if kind == "yarn":
        left = {"beta_slow": 1.0, "beta_fast": 32.0, **left}
    here = {
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "beta_slow": "low",
        "beta_fast": "high",
        "original_max_position_embeddings": "length",
    }
    found |= {here.get(name, name): left.pop(name) for name in names if name in left}
    absent = {"factor", "low_freq_factor", "high_freq_factor"} & set(names) - set(values)
    if left or absent:
        what = [f"{name}={value!r} is unknown" for name, value in left.items()]
        what += [f"{name} is missing" for name in sorted(absent)]
        raise PretrainedError(f"the rotary embedding of rope_type={kind!r}: {', '.join(what)}")
    return Rope(kind=kind, **found)


def _windows(take: Taker, layers: Callable[[int, int], bool] | None = None) -> dict[str, Any]:
    """Reads the window, and which layers have it."""
    window, types = take("sliding_window", None), take("layer_types", None)
    count = take("num_hidden_layers")
    if types is not None:
        other = sorted(set(types) - {"full_attention", "sliding_attention"})
        if other or len(types) != count:
            raise PretrainedError(f"layer_types={types!r} is not supported for {count} layers")
        local = tuple(each == "sliding_attention" for each in types)
    elif layers is not None:
        local = tuple(layers(index, count) for index in range(count))
    else:
        local = None
    if window is None or (local is not None and not any(local)):
        return {}
    return {"window": window, "local_layers": None if local is None or all(local) else local}


def _rotary(take: Taker) -> dict[str, Any]:
    return {"rope": _rope(take)}


def _rotary_windows(take: Taker) -> dict[str, Any]:
    return {"rope": _rope(take), **_windows(take)}


def _qwen(take: Taker) -> dict[str, Any]:
    most, used = take("max_window_layers", 28), take("use_sliding_window", False)
    found = _windows(take, lambda index, _: index >= most)
    return {"rope": _rope(take), **(found if used else {})}


def _experts(take: Taker) -> dict[str, Any]:
    """Reads the experts of Qwen, and the layers without."""
    step, plain = take("decoder_sparse_step", 1), take("mlp_only_layers", [])
    count = take("num_hidden_layers")
    used = take("use_sliding_window", False)
    experts = take("num_local_experts", None)
    experts = take("num_experts", 128) if experts is None else experts
    take("num_experts", None)
    dense = tuple(i for i in range(count) if i in (plain or ()) or (i + 1) % step)
    windows = _windows(take) if used else {}
    if not used:
        take("sliding_window", None)
    return {"rope": _rope(take), "num_experts": experts, "dense_layers": dense, **windows}


def _gemma(take: Taker) -> dict[str, Any]:
    name, size = take("hidden_activation", None), take("hidden_size")
    older = take("hidden_act", "gelu_pytorch_tanh")
    name = older if name is None else name
    if name not in ACTIVATION_NAMES or name == "gelu":
        raise PretrainedError(
            f"hidden_act={name!r} is not supported, as it meant other functions in other versions; "
            f"write hidden_activation='gelu_pytorch_tanh'"
        )
    return {"activation": ACTIVATION_NAMES[name], "embed_scale": size**0.5}


def _gemma1(take: Taker) -> dict[str, Any]:
    return {"rope": _rope(take), **_gemma(take)}


def _gemma2(take: Taker) -> dict[str, Any]:
    scale = take("query_pre_attn_scalar") ** -0.5
    windows = _windows(take, lambda index, _: index % 2 == 0)
    return {"rope": _rope(take), "attention_scale": scale, **_gemma(take), **windows}


def _gemma3(take: Taker) -> dict[str, Any]:
    every = take("sliding_window_pattern", None) or take("_sliding_window_pattern", 6)
    take("_sliding_window_pattern", None)
    found = _windows(take, lambda index, _: (index + 1) % every > 0)
    given = take("rope_parameters", None)
    if given is not None and "full_attention" in given:
        ropes = [
            _rope(take, given[name], base=base)
            for name, base in (("full_attention", 1e6), ("sliding_attention", 1e4))
        ]
    else:
        local = take("rope_local_base_freq", 10_000.0)
        ropes = [_rope(take, None, base=1e6), Rope(local)]
    scale = take("query_pre_attn_scalar") ** -0.5
    found |= {"rope": ropes[0], "local_rope": ropes[1]}
    return {"attention_scale": scale, **_gemma(take), **found}


def _neox(take: Taker) -> dict[str, Any]:
    older = {"base": take("rotary_emb_base", 10_000.0), "fraction": take("rotary_pct", 0.25)}
    return {"rope": _rope(take, None, **older), "parallel": take("use_parallel_residual", True)}


def _phi(take: Taker) -> dict[str, Any]:
    return {"rope": _rope(take, None, fraction=0.5)}


def _gpt2(take: Taker) -> dict[str, Any]:
    inner, size = take("n_inner", None), take("n_embd")
    scale = None if take("scale_attn_weights", True) else 1.0
    return {"mlp_dim": 4 * size if inner is None else inner, "attention_scale": scale}


def _labels(take: Taker) -> dict[str, Any]:
    names = take("id2label", None)
    return {"num_classes": len(names) if names else take("num_labels", 2)}


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
_UNTIED = {"tie_word_embeddings": False, "attention_dropout": 0.0, "head_dim": None}
_TIED = {**_UNTIED, "tie_word_embeddings": True}
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
    given = {"p": p, "l": layer, "a": layer + "self_attn.", "o": "o_proj", "e": "embed_tokens"}
    given |= {"n": "norm", "h": "lm_head", "u": layer + "mlp.up_proj", "d": layer + "mlp.down_proj"}
    return "".join(parts).format(**{**given, **names})


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
_SOFTCAPS = {
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "final_softcap",
}

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
        defaults={
            **_UNTIED,
            "attention_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": None,
        },
        derive=_rotary,
        architectures=_heads("LlamaForCausalLM"),
    ),
    "mistral": Family(
        _SILU,
        _LLAMA_TENSORS,
        defaults=_UNTIED,
        derive=_rotary_windows,
        architectures=_heads("MistralForCausalLM"),
    ),
    "qwen2": Family(
        _SILU,
        _LLAMA_TENSORS,
        fixed={"qkv_bias": True},
        defaults=_UNTIED,
        derive=_qwen,
        architectures=_heads("Qwen2ForCausalLM"),
    ),
    "qwen3": Family(
        {**_SILU, **_BIASED},
        _LLAMA_TENSORS,
        fixed={"qk_norm": "head"},
        defaults=_UNTIED,
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
        defaults={**_UNTIED, "router_aux_loss_coef": 0.001},
        derive=_rotary_windows,
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
        defaults={**_UNTIED, "router_aux_loss_coef": 0.001},
        derive=_experts,
        architectures=_heads("Qwen3MoeForCausalLM"),
    ),
    "gemma": Family(
        _GEMMA_FIELDS,
        _LLAMA_TENSORS,
        fixed={"norm": "rms_offset"},
        defaults={**_TIED, "attention_bias": False, "head_dim": 256},
        derive=_gemma1,
        architectures=_heads("GemmaForCausalLM"),
    ),
    "gemma2": Family(
        {**_GEMMA_FIELDS, **_SOFTCAPS},
        _GEMMA_TENSORS,
        fixed={"norm": "rms_offset", "norm_placement": "sandwich"},
        defaults={**_TIED, "attention_bias": False, "head_dim": 256},
        derive=_gemma2,
        architectures=_heads("Gemma2ForCausalLM"),
        harmless=("cache_implementation",),
    ),
    "gemma3_text": Family(
        {**_GEMMA_FIELDS, **_SOFTCAPS},
        _GEMMA_TENSORS,
        fixed={"norm": "rms_offset", "norm_placement": "sandwich", "qk_norm": "head"},
        defaults={**_TIED, "attention_bias": False, "head_dim": 256}
        | dict.fromkeys(_SOFTCAPS, None),
        derive=_gemma3,
        architectures=_heads("Gemma3ForCausalLM", "Gemma3TextModel"),
        harmless=("cache_implementation",),
    ),
    "phi3": Family(
        {**_SILU, "embd_pdrop": "embed_dropout", "resid_pdrop": "dropout"},
        _table(_ENDS, _NORMS, _PHI3_LAYERS),
        defaults={**_UNTIED, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        derive=_rotary_windows,
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
        defaults={**_UNTIED, "num_key_value_heads": None},
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
        defaults={**_UNTIED, "attention_bias": False, "num_key_value_heads": None},
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
        defaults={"tie_word_embeddings": True},
        derive=_gpt2,
        architectures=_heads("GPT2LMHeadModel", "GPT2Model"),
        neutral={"scale_attn_by_inverse_layer_idx": (False,)},
        harmless=(
            *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
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
        defaults={**_UNTIED, "attention_bias": True, "hidden_dropout": 0.0},
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
        defaults={**_TIED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        derive=_rotary_windows,
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
        derive=_labels,
        architectures={
            "BertForMaskedLM": {"head_transform": True, "head_bias": True, "tied_head": True},
            "BertModel": {"head": None, "pooler": True},
            "BertForSequenceClassification": {"head": "first", "pooler": True},
        },
        neutral={"position_embedding_type": ("absolute",), "tie_word_embeddings": (True,)},
        prefix="bert.",
        buffers=(
            "embeddings.position_ids",
            "predictions.decoder.weight",
            "predictions.decoder.bias",
        ),
    ),
    "vit": Family(
        {
            **{name: there for name, there in _ENCODER_FIELDS.items() if name != "vocab_size"},
            "image_size": "image_size",
            "patch_size": "patch_size",
            "num_channels": "channels",
            "qkv_bias": "qkv_bias",
        },
        _encoder(_VIT_ENDS, _ENCODER_LAYERS, p="vit.", h="classifier"),
        fixed=_ENCODER_FIXED,
        derive=_vit,
        architectures={
            "ViTForImageClassification": {"head": "first"},
            "ViTModel": {"head": None, "pooler": True},
        },
        neutral={"pooler_act": ("tanh",)},
        harmless=("encoder_stride", "pooler_output_size"),
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
    known = {each.name: each for each in dataclasses.fields(Family)}
    wrong = sorted(set(parts) - set(known))
    base = find_family(like, "like") if like is not None else None
    missing = [name for name in ("fields", "tensors") if base is None and name not in parts]
    if wrong or missing:
        raise PretrainedError(
            f"register({model_type!r}) was given {', '.join(wrong) or 'nothing unknown'}, and "
            f"lacks {', '.join(missing) or 'nothing'}. The parts of a family are "
            f"{', '.join(known)}; with like='llama' those left out are llama's."
        )
    if base is not None:
        for name, value in parts.items():
            own = getattr(base, name)
            if isinstance(own, Mapping):
                parts[name] = {**own, **value}
            elif name in ("harmless", "buffers"):
                parts[name] = (*own, *value)
        parts = {**{name: getattr(base, name) for name in known}, **parts}
    FAMILIES[model_type] = Family(**parts)


def find_family(model_type: Any, where: str) -> Family:
    """Returns the family of a type of models, or raises."""
    if model_type not in FAMILIES:
        raise PretrainedError(
            f"{where} has model_type={model_type!r}, but known are {', '.join(sorted(FAMILIES))}. "
            f"Others can be added: sx.models.register({model_type!r}, like=..., ...)."
        )
    return FAMILIES[model_type]
