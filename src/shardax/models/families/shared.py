# SPDX-License-Identifier: Apache-2.0
"""What several families share: fields, tensors and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.paths import read_field
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families.rope import LAYER_TYPES
from shardax.models.family import PUBLISHED, REQUIRED, Field, FieldGroup, Taker
from shardax.models.tensors import (
    HEADS,
    AxisLike,
    Tensor,
    Tensors,
    concatenated,
    embedding,
    in_layers,
    linear,
    norm,
)

# --- fields ---------------------------------------------------------------------------------------

# What is left out of a config.json is what it is by default in transformers. Only these sizes,
# which every file has, must be there.
SIZES = {
    "vocab_size": Field("vocab_size", default=REQUIRED),
    "hidden_size": Field("embed_dim", default=REQUIRED),
    "intermediate_size": Field("mlp.dim", default=REQUIRED),
    "num_hidden_layers": Field("num_layers", default=REQUIRED),
    "num_attention_heads": Field("attention.num_heads", default=REQUIRED),
}


def without(fields: Mapping[str, Field], *names: str) -> dict[str, Field]:
    """Returns fields but those of these names."""
    return {name: field for name, field in fields.items() if name not in names}


# Of decoders with rotary positions.
DECODER = {
    **SIZES,
    "attention_dropout": Field("attention.dropout"),
    "num_key_value_heads": Field("attention.num_kv_heads"),
    "tie_word_embeddings": Field("output.tied"),
}
# Of those with RMS norms and a gated MLP.
GATED_DECODER = {
    **DECODER,
    "head_dim": Field("attention.head_dim"),
    "hidden_act": Field("activation"),
    "rms_norm_eps": Field("norms.epsilon"),
}
ATTENTION_BIAS = {"attention_bias": Field("attention.qkv_bias", "attention.out_bias")}
ALL_BIASES = {"attention.qkv_bias": True, "attention.out_bias": True, "mlp.bias": True}


def causal_lm(name: str) -> dict[str, dict[str, Any]]:
    """Returns the architectures of a decoder: with its head, and bare."""
    return {f"{name}ForCausalLM": {}, f"{name}Model": {"head": None, "output.tied": True}}


class Labels(FieldGroup):
    """The number of classes, by their names."""

    older = ("num_labels",)

    def __init__(self, path: str = "output.num_classes") -> None:
        self.path = path

    def to(self, take: Taker) -> Mapping[str, Any]:
        names = take("id2label", None, kind=kinds.TABLE.or_null)
        count = take("num_labels", 2, kind=kinds.INTEGER)
        return {self.path: len(names) if names else count}

    def back(self, config: Any) -> Mapping[str, Any]:
        labels = [f"LABEL_{index}" for index in range(read_field(config, self.path))]
        if not labels:
            return {}
        return {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
        }


# --- windows --------------------------------------------------------------------------------------


class WindowsByLayer(FieldGroup):
    """A window of some layers, by ``layer_types`` or else by their numbers."""

    def __init__(self, is_local: Callable[[int], bool], *, needs_size: bool = False) -> None:
        # Some types compute the mask of a window whether a layer has one or not.
        self.is_local, self.needs_size = is_local, needs_size

    def to(self, take: Taker) -> Mapping[str, Any]:
        if self.needs_size:
            take("sliding_window", PUBLISHED, kind=kinds.SIZE)
        return read_windows(take, self.is_local)

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        fields = window_fields(config)
        if self.needs_size and config.attention.window is None:
            del fields["sliding_window"]
        return fields


def read_layer_types(
    take: Taker, types_known: tuple[str, str], is_local: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Reads the layers without full attention, by ``layer_types`` or their numbers."""
    count = take("num_hidden_layers", kind=kinds.SIZE)
    types = take("layer_types", None, kind=kinds.TEXTS.or_null)
    if types is None:
        return tuple(map(is_local, range(count)))
    fits = set(types) <= {*types_known} and len(types) == count
    limits = f" for {count} layers, only {' or '.join(map(repr, types_known))} for each"
    kinds.check_supported("layer_types", types, fits, limits)
    return tuple(name != "full_attention" for name in types)


def read_rotated_layers(take: Taker, *, may_be_empty: bool = False) -> tuple[bool, ...]:
    """Reads the layers with a rotary embedding."""
    count = take("num_hidden_layers", kind=kinds.SIZE)
    interval = take("no_rope_layer_interval", 4, kind=kinds.SIZE)
    listed = take("no_rope_layers", None, kind=kinds.INTEGERS.or_null)
    if listed is None or (may_be_empty and not listed):
        listed = [(index + 1) % interval for index in range(count)]
    limits = f" for {count} layers, only 0 or 1 for each"
    kinds.check_supported("no_rope_layers", listed, len(listed) >= count, limits)
    return tuple(map(bool, listed[:count]))


def read_windows(take: Taker, is_local: Callable[[int], bool]) -> dict[str, Any]:
    """Reads the window, and its layers."""
    window = take("sliding_window", PUBLISHED, kind=kinds.SIZE.or_null)
    return windows_by_layer(take, window, is_local)


def windows_by_layer(
    take: Taker, window: int | None, is_local: Callable[[int], bool]
) -> dict[str, Any]:
    """Reads the layers that have a window."""
    local = read_layer_types(take, LAYER_TYPES, is_local)
    if window is None or not any(local):
        return {}
    return {"attention.window": window, "attention.local_layers": None if all(local) else local}


def window_fields(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of the window, and of its layers."""
    local = map(config.attention.is_local, range(config.num_layers))
    return {
        "sliding_window": config.attention.window,
        "layer_types": [LAYER_TYPES[is_local] for is_local in local],
    }


class Window(FieldGroup):
    """A window of all layers, if ``switch`` is no field or true."""

    def __init__(self, switch: str = "") -> None:
        self.switch = switch

    def to(self, take: Taker) -> Mapping[str, Any]:
        window = take("sliding_window", PUBLISHED, kind=kinds.SIZE.or_null)
        if self.switch and not take(self.switch, False, kind=kinds.BOOLEAN.or_null):
            return {}
        types = take("layer_types", None, kind=kinds.TEXTS.or_null)
        kind = "full_attention" if window is None else "sliding_attention"
        limits = f"{kinds.UNNOTICED}: all layers have sliding_window={window!r}"
        kinds.check_supported("layer_types", types, types is None or set(types) == {kind}, limits)
        return {} if window is None else {"attention.window": window}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        switch = {self.switch: config.attention.window is not None} if self.switch else {}
        return {**switch, **window_fields(config)}


# --- experts --------------------------------------------------------------------------------------


def experts_or_none(config: TransformerConfig) -> int | None:
    """Returns the number of experts, None where the layers say that none has any."""
    return None if config.experts is None else config.experts.num_experts


class ExpertLayers(FieldGroup):
    """Layers with experts, behind dense ones, and sizes of experts."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_hidden_layers", kind=kinds.SIZE)
        first = take("first_k_dense_replace", PUBLISHED, kind=kinds.INTEGER)
        kinds.check_supported("first_k_dense_replace", first, first >= 0, ", it is below 0")
        size = take("moe_intermediate_size", PUBLISHED, kind=kinds.SIZE)
        number = take("n_shared_experts", PUBLISHED, kind=kinds.SIZE)
        return {
            "experts.dense_layers": tuple(range(min(first, count))),
            "experts.dim": size,
            "experts.shared_dim": size * number,
        }

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        experts = config.experts
        if experts is None:
            return {"first_k_dense_replace": config.num_layers}
        return {
            "first_k_dense_replace": len(experts.dense_layers),
            "moe_intermediate_size": experts.dim,
            "n_shared_experts": experts.shared_dim // max(experts.dim, 1),
        }


# --- tensors --------------------------------------------------------------------------------------


def ends(
    model: str = "model.",
    *,
    tokens: str = "embed_tokens",
    final_norm: str = "norm",
    head: str = "lm_head",
) -> Tensors:
    """Describes embedding, last norm and head."""
    return (
        *embedding(model + tokens, to="embed", axis="vocab"),
        *norm(model + final_norm, to="final_norm"),
        *linear(head, to="head", inputs="embed", outputs="vocab"),
    )


def pre_norms(attn: str = "input_layernorm", mlp: str = "post_attention_layernorm") -> Tensors:
    """Describes the norms before attention and MLP."""
    return (*norm(attn, to="attn_norm"), *norm(mlp, to="mlp_norm"))


def attention(
    q: str = "self_attn.q_proj",
    k: str = "self_attn.k_proj",
    v: str = "self_attn.v_proj",
    out: str = "self_attn.o_proj",
) -> Tensors:
    """Describes the four projections of attention."""
    return (
        *linear(q, to="attn.q", inputs="embed", outputs=HEADS),
        *linear(k, to="attn.k", inputs="embed", outputs=HEADS),
        *linear(v, to="attn.v", inputs="embed", outputs=HEADS),
        *linear(out, to="attn.out", inputs=HEADS, outputs="embed"),
    )


def head_norms(q: str = "self_attn.q_norm", k: str = "self_attn.k_norm") -> Tensors:
    """Describes the norms of each head, for models with ``qk_norm``."""
    # Families without such norms have them for types of users that are like them.
    return (
        Tensor(f"{q}.weight", "attn.query_norm.scale", ("head_dim",)),
        Tensor(f"{k}.weight", "attn.key_norm.scale", ("head_dim",)),
    )


def mlp(up: str = "mlp.up_proj", down: str = "mlp.down_proj") -> Tensors:
    """Describes an MLP without a gate."""
    return (
        *linear(up, to="mlp.up", inputs="embed", outputs="mlp"),
        *linear(down, to="mlp.down", inputs="mlp", outputs="embed"),
    )


def gated_mlp(
    gate: str = "mlp.gate_proj", up: str = "mlp.up_proj", down: str = "mlp.down_proj"
) -> Tensors:
    """Describes a gated MLP."""
    return (*linear(gate, to="mlp.gate", inputs="embed", outputs="mlp"), *mlp(up, down))


def fused_gated_mlp(name: str = "mlp.gate_up_proj") -> Tensors:
    """Describes a gated MLP whose gate stands before ``up`` in one tensor."""
    axes = (concatenated("mlp"), "embed")
    return (
        Tensor(f"{name}.weight", "mlp.gate.kernel", axes, ("embed", "mlp")),
        Tensor(f"{name}.weight", "mlp.up.kernel", axes, ("embed", "mlp")),
        *linear("mlp.down_proj", to="mlp.down", inputs="mlp", outputs="embed"),
    )


def experts(router: str, gate: str, up: str, down: str) -> Tensors:
    """Describes experts, by the names of one's three kernels."""

    def kernel(name: str, to: str, inputs: AxisLike, outputs: AxisLike) -> Tensor:
        return Tensor(name, to, (outputs, inputs), ("expert", str(inputs), str(outputs)))

    return (
        Tensor(router, "mlp.router.kernel", ("expert", "embed"), ("embed", "expert")),
        kernel(gate, "mlp.gate", "embed", "mlp"),
        kernel(up, "mlp.up", "embed", "mlp"),
        kernel(down, "mlp.down", "mlp", "embed"),
    )


def swiglu_experts() -> Tensors:
    """Describes experts as most families name them."""
    return experts(
        router="mlp.gate.weight",
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    )


def shared_expert(name: str) -> Tensors:
    """Describes the expert of all tokens."""
    return (
        *linear(f"{name}.gate_proj", to="shared_mlp.gate", inputs="embed", outputs="mlp"),
        *linear(f"{name}.up_proj", to="shared_mlp.up", inputs="embed", outputs="mlp"),
        *linear(f"{name}.down_proj", to="shared_mlp.down", inputs="mlp", outputs="embed"),
    )


def decoder(*mlp_parts: Tensors, norms: Tensors | None = None) -> Tensors:
    """Describes a decoder as Llama names it, by norms and MLP."""
    layer = (norms or pre_norms(), attention(), head_norms(), *(mlp_parts or (gated_mlp(),)))
    return (*ends(), *in_layers("model.layers", *layer))
