# SPDX-License-Identifier: Apache-2.0
"""A type of published models, and the reading of its ``config.json``.

What a config says and no table knows is refused by name: a field either changes the model, is known
to change nothing, or may only have the value that changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardax._core.errors import ShardaxError
from shardax.models.transformer import TransformerConfig, find_activation
from shardax.nn.errors import LayerConfigError
from shardax.nn.rope import Rope


class PretrainedError(ShardaxError, ValueError):
    """A published model cannot be read, or a model be written.

    The type of the model or a field of its config is unknown or unsupported, or tensors are
    missing, left over or of another shape.
    """


# --- fields of any config.json ---

# Fields that change nothing in what a model computes.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
_num_labels architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens
bos_token_id classifier_dropout cross_attention_hidden_size decoder_start_token_id
diversity_penalty do_sample dtype early_stopping eos_token_id exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
initializer_range is_llama_config keys_to_ignore_at_inference label2id length_penalty mask_token_id
max_length max_position_embeddings max_sequence_length max_window_layers min_length
model_max_length model_type no_repeat_ngram_size num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_past output_router_logits output_scores pad_token
pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sentence_transformers sep_token_id suppress_tokens task_specific_params
temperature tokenizer_class tokenizer_model_max_length tokenizer_padding_side top_k top_p
torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
unsloth_fixed unsloth_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
# Fields that change nothing at these values, where a family does not read them itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "chunk_size_feed_forward": (0,),
    "final_logit_softcapping": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "pruned_heads": ({}, None),
    "qk_layernorm": (False, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
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


def activation_name(function: Any) -> str | None:
    """Returns the name of an activation in ``TransformerConfig``, or None."""
    names = sorted(set(ACTIVATION_NAMES.values()))
    if isinstance(function, str):
        return function if function in names else None
    return next((name for name in names if find_activation(name) is function), None)


def published_activation(name: str) -> str:
    """Returns the name in ``config.json`` of an activation."""
    published = {"exact_gelu": "gelu", "gelu": "gelu_pytorch_tanh"}
    return published.get(name, name)


# --- types ---


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (type(value) is float and math.isfinite(value))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (_is_boolean, "true or false"),
    "float": (_is_number, "a number"),
    "int": (_is_integer, "an integer"),
    "str": (_is_text, "a text"),
    "dict": (_is_table, "a table of fields"),
    "texts": (_is_list_of(_is_text), "a list of texts"),
    "integers": (_is_list_of(_is_integer), "a list of integers"),
}
# Of fields that families compute with: the type, and ? where null is a value.
_TYPES = {
    name: kind
    for kind, names in {
        "bool": "scale_attn_weights use_parallel_residual",
        "bool?": "use_sliding_window",
        "dict?": "id2label rope_parameters rope_scaling",
        "float": "query_pre_attn_scalar rotary_emb_base rotary_pct",
        "float?": "partial_rotary_factor rope_local_base_freq rope_theta",
        "int": "decoder_sparse_step hidden_size image_size max_position_embeddings "
        "max_window_layers n_embd num_hidden_layers num_labels patch_size",
        "int?": "_sliding_window_pattern n_inner num_experts num_local_experts sliding_window "
        "sliding_window_pattern",
        "integers?": "mlp_only_layers",
        "str?": "hidden_act hidden_activation model_type",
        "texts?": "architectures layer_types",
    }.items()
    for name in names.split()
}
# The type of each field of TransformerConfig, as it is annotated.
_TARGETS = {field.name: str(field.type) for field in dataclasses.fields(TransformerConfig)}
_POSITIVE = frozenset(
    [
        *("channels", "embed_dim", "expert_dim", "experts_per_token", "head_dim", "image_size"),
        *("mlp_dim", "num_heads", "num_kv_heads", "num_layers", "patch_size", "vocab_size"),
        "window",
    ]
)
_POSITIVE_FIELDS = frozenset(
    [
        *("_sliding_window_pattern", "decoder_sparse_step", "hidden_size", "image_size", "n_embd"),
        *("num_hidden_layers", "patch_size", "query_pre_attn_scalar", "sliding_window"),
        "sliding_window_pattern",
    ]
)


def type_problem(name: str, value: Any, target: str | None = None) -> str | None:
    """Describes a wrong type or size of a field, or returns None."""
    # The target is the field of TransformerConfig that it sets, if it sets one.
    if target == "activation":
        kind = "str"
    elif target is not None:
        kind = _TARGETS[target].replace(" | None", "?")
    else:
        kind = _TYPES.get(name, "")
    check, text = _CHECKS.get(kind.removesuffix("?"), (None, ""))
    if check is None or (value is None and kind.endswith("?")):
        return None
    if value is None and (target in ("num_kv_heads", "head_dim") or (target and kind == "bool")):
        return None  # as if it were left out, or false
    if not check(value):
        return f"{name}={brief(value)} is not {text}"
    is_size = target in _POSITIVE or name in _POSITIVE_FIELDS
    if is_size and value is not None and value <= 0:
        return f"{name}={value!r} is not positive"
    return None


def brief(value: Any) -> str:
    """Returns the ``repr`` of a value, cut if long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an integer of many digits
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 120 else text[:120] + "..."


def is_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool | None:
    """Whether a field is neutral at its value, None if never."""
    if name == "layer_types":  # of a family without kinds of layers
        return value is None or set(value) <= {"full_attention"}
    return value in neutral[name] if name in neutral else None


# --- families ---

Taker = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """A type of published models."""

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

    def config(
        self, content: Mapping[str, Any], where: str, tensors: int | None = None
    ) -> TransformerConfig:
        """Reads a ``config.json``, or raises with all problems of it."""
        # The number of tensors in the files bounds layers and experts.
        return _Reading(self, content, where, tensors).config

    def fields_read(self, content: Mapping[str, Any]) -> set[str]:
        """Returns the fields of a valid ``config.json`` with meaning for the model."""
        return _Reading(self, content, "config.json", None).taken

    @property
    def bare(self) -> str:
        """The architecture without a head."""
        return next(
            (name for name, parts in self.architectures.items() if parts.get("head", "") is None),
            next(iter(self.architectures)),
        )


# Fewer layers, and experts of all layers, are read whatever the files have: the check of the
# tensors names what is missing.
_FEW_LAYERS, _FEW_EXPERTS = 256, 4096


class _Reading:
    """One ``config.json``, read field by field."""

    def __init__(
        self, family: Family, content: Mapping[str, Any], where: str, tensors: int | None
    ) -> None:
        self.family, self.content, self.where = family, content, where
        self.tensors = tensors
        self.taken: set[str] = set()
        self.problems: list[str] = []
        self.advice: list[str] = []
        self.config = self._read()

    def take(self, name: str, *default: Any) -> Any:
        """Returns the value of a field, or its default."""
        self.taken.add(name)
        if name in self.content:
            problem = type_problem(name, self.content[name])
            if problem is None:
                return self.content[name]
            self._note(problem)
        if name in self.family.defaults:
            return self.family.defaults[name]
        if default:
            return default[0]
        if name not in self.content:
            self._note(f"{name} is missing")
        return 1

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _read(self) -> TransformerConfig:
        family = self.family
        values: dict[str, Any] = {**family.fixed, **self._of_architecture()}
        for name, targets in family.fields.items():
            values.update(self._of_field(name, targets.split()))
        self._check_counts(values)
        if family.derive is not None:
            try:
                values.update(family.derive(self.take))
            except PretrainedError as error:
                self._note(str(error))
        self._check_others()
        if self.problems:
            raise self._error()
        self._check_counts(values)
        if values.get("num_kv_heads") is None:
            values["num_kv_heads"] = values["num_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = values["embed_dim"] // values["num_heads"]
        try:
            return TransformerConfig(**values, source=json.dumps(self.content))
        except (LayerConfigError, ValueError) as error:
            self._note(str(error).removesuffix("."))
            raise self._error() from error

    def _of_field(self, name: str, targets: list[str]) -> dict[str, Any]:
        value = self.take(name)
        if name in self.content:
            for problem in filter(None, (type_problem(name, value, target) for target in targets)):
                self._note(problem)
                return {}
        if "activation" in targets:
            if value not in ACTIVATION_NAMES:
                self._note(f"{name}={brief(value)} is none of {', '.join(ACTIVATION_NAMES)}")
            value = ACTIVATION_NAMES.get(value, "silu")
        if value is None and isinstance(self.family.defaults.get(name), bool):
            value = False
        return dict.fromkeys(targets, value)

    def _check_counts(self, values: Mapping[str, Any]) -> None:
        """Raises for more layers or experts than the files have."""
        if self.tensors is None:
            return
        layers, experts = values.get("num_layers", 0), values.get("num_experts", 0)
        for count, least, counts in (
            (layers, _FEW_LAYERS, f"{layers} layers"),
            (layers * experts, _FEW_EXPERTS, f"{layers} layers of {experts} experts"),
        ):
            if type(count) is int and count > max(self.tensors, least):
                raise PretrainedError(
                    f"{self.where} says that the model has {counts}, but its files have "
                    f"{self.tensors} tensors in all. Download or save the model again."
                )

    def _check_others(self) -> None:
        """Notes fields not read by the family, unless they change nothing."""
        family, neutral = self.family, {**NEUTRAL, **self.family.neutral}
        harmless, unknown = HARMLESS | set(family.harmless), []
        for name, value in self.content.items():
            if name in self.taken:
                continue
            problem = type_problem(name, value)
            neutral_here = is_neutral(name, value, neutral) if problem is None else None
            if neutral_here is False:
                only = f", only {neutral[name][0]!r}" if name in neutral else " for this family"
                self._note(f"{name}={brief(value)} is not supported{only}")
            elif problem is not None:
                self._note(problem)
            elif neutral_here is None and name not in harmless:
                self._note(f"{name}={brief(value)} is unknown")
                unknown.append(name)
        if unknown:
            kind = self.content.get("model_type")
            self.advice.append(
                f"If {', '.join(unknown)} changes nothing in what the model computes, say so: "
                f"sx.models.register({kind!r}, like={kind!r}, harmless={unknown!r})."
            )

    def _of_architecture(self) -> Mapping[str, Any]:
        architectures = self.family.architectures
        names = self.take("architectures", None) or [next(iter(architectures))]
        if len(names) == 1 and names[0] in architectures:
            return architectures[names[0]]
        self._note(
            f"architectures={brief(names)} is not supported, only one of {', '.join(architectures)}"
        )
        kind, bare = self.content.get("model_type"), dict(architectures[self.family.bare])
        self.advice.append(
            f"The layers alone, without the head, are read after sx.models.register({kind!r}, "
            f"like={kind!r}, architectures={{{names[0]!r}: {bare!r}}}), by "
            f"sx.models.from_pretrained(folder, strict=False)."
        )
        return {}

    def _error(self) -> PretrainedError:
        text = f"{self.where} describes a model that cannot be read: {'; '.join(self.problems)}."
        return PretrainedError(" ".join([text, *self.advice]))


# --- the rotary embedding ---


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


def read_rope(
    take: Taker,
    values: Mapping[str, Any] | None = None,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    kinds: Iterable[str] = tuple(_ROPE_FIELDS),
) -> Rope:
    """Reads the rotary embedding, as transformers 5 does."""
    # That takes rope_scaling or else rope_parameters, and rope_theta where the table has none.
    table = values
    if table is None:
        scaling, parameters = take("rope_scaling", None), take("rope_parameters", None)
        theta, part = take("rope_theta", None), take("partial_rotary_factor", None)
        base, fraction = theta if theta else base, fraction if part is None else part
        table = dict[str, Any](scaling or parameters or {})
        if theta and table.get("rope_theta") not in (None, theta):
            raise PretrainedError(
                f"rope_theta={theta!r} stands beside a table with rope_theta="
                f"{table['rope_theta']!r}, which transformers takes: leave one of them out"
            )
    left = {name: value for name, value in table.items() if value is not None}
    kind = left.pop("rope_type", left.get("type", "default"))
    left.pop("type", None)
    if kind not in tuple(kinds):
        raise PretrainedError(
            f"rope_type={brief(kind)} is not supported, only one of {', '.join(kinds)}"
        )
    names = _ROPE_FIELDS[kind]
    if kind in ("llama3", "yarn") and "original_max_position_embeddings" not in left:
        left["original_max_position_embeddings"] = take("max_position_embeddings")
    numbers = {"rope_theta": base, "partial_rotary_factor": fraction}
    numbers |= {"beta_slow": 1.0, "beta_fast": 32.0} if kind == "yarn" else {}
    numbers |= {
        name: left.pop(name)
        for name in ("rope_theta", "partial_rotary_factor", *names)
        if name in left
    }
    wrong = [f"{name}={brief(value)} is unknown" for name, value in left.items()]
    absent = {"factor", "low_freq_factor", "high_freq_factor"} & set(names) - set(numbers)
    wrong += [f"{name} is missing" for name in sorted(absent)]
    truncate: Any = numbers.pop("truncate", True)
    if not isinstance(truncate, bool):
        wrong.append(f"truncate={brief(truncate)} is not true or false")
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            wrong.append(f"{name}={brief(value)} is not a positive number")
    if not wrong:
        wrong = _rope_problems(kind, numbers)
    if wrong:
        raise PretrainedError(f"the rotary embedding of rope_type={kind!r}: {', '.join(wrong)}")
    fields = {
        "rope_theta": "base",
        "partial_rotary_factor": "fraction",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "beta_slow": "low",
        "beta_fast": "high",
        "original_max_position_embeddings": "length",
    }
    options: dict[str, Any] = {fields.get(name, name): v for name, v in numbers.items()}
    options |= {"base": float(options["base"]), "fraction": float(options["fraction"])}
    return Rope(kind=kind, truncate=truncate, **options)


def _rope_problems(kind: str, numbers: Mapping[str, Any]) -> list[str]:
    """Returns the fields with a division by zero."""
    problems = []
    if numbers["partial_rotary_factor"] > 1:
        problems.append(f"partial_rotary_factor={numbers['partial_rotary_factor']!r} is above 1")
    if kind == "yarn" and numbers["rope_theta"] <= 1:
        problems.append(f"rope_theta={numbers['rope_theta']!r} is not above 1")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        problems.append("low_freq_factor is not below high_freq_factor")
    return problems


def rope_fields(rope: Rope) -> dict[str, Any]:
    """Returns the ``rope_parameters`` of a rotary embedding."""
    fields = {
        "factor": rope.factor,
        "low_freq_factor": rope.low,
        "high_freq_factor": rope.high,
        "beta_slow": rope.low,
        "beta_fast": rope.high,
        "original_max_position_embeddings": rope.length,
        "attention_factor": rope.attention_factor,
        "truncate": rope.truncate,
    }
    return {
        "rope_type": rope.kind,
        "rope_theta": rope.base,
        **({} if rope.fraction == 1 else {"partial_rotary_factor": rope.fraction}),
        **{name: fields[name] for name in _ROPE_FIELDS[rope.kind] if fields[name] is not None},
    }
