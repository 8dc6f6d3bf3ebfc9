# SPDX-License-Identifier: Apache-2.0
"""What several families share: fields, tensors and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.families.rope import LAYER_TYPES
from shardax.models.family import ConfigEdit, Field, FieldGroup, Taker
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
    "vocab_size": Field("vocab_size"),
    "hidden_size": Field("embed_dim"),
    "intermediate_size": Field("mlp.dim"),
    "num_hidden_layers": Field("num_layers"),
    "num_attention_heads": Field("attention.num_heads"),
}
# Of decoders with rotary positions.
DECODER = {
    **SIZES,
    "attention_dropout": Field("attention.dropout", default=0.0),
    "num_key_value_heads": Field("attention.num_kv_heads", default=None),
    "tie_word_embeddings": Field("output.tied", default=False),
}
# Of those with RMS norms and a gated MLP.
GATED_DECODER = {
    **DECODER,
    "head_dim": Field("attention.head_dim", default=None),
    "hidden_act": Field("activation", default="silu"),
    "rms_norm_eps": Field("norms.epsilon", default=1e-6),
}
ATTENTION_BIAS = {
    "attention_bias": Field("attention.qkv_bias", "attention.out_bias", default=False)
}
ALL_BIASES = {"attention.qkv_bias": True, "attention.out_bias": True, "mlp.bias": True}


def causal_lm(name: str) -> dict[str, dict[str, Any]]:
    """Returns the architectures of a decoder: with its head, and bare."""
    return {f"{name}ForCausalLM": {}, f"{name}Model": {"head": None, "output.tied": True}}


class Labels(FieldGroup):
    """The number of classes, by their names."""

    def __init__(self, path: str = "output.num_classes") -> None:
        self.path = path

    def read(self, take: Taker) -> Mapping[str, Any]:
        names = take("id2label", None, kind=kinds.TABLE.or_null)
        count = take("num_labels", 2, kind=kinds.INTEGER)
        return {self.path: len(names) if names else count}

    def write(self, edit: ConfigEdit) -> None:
        if not edit.changes(self.path) or edit.config.head not in ("first", "each", "classes"):
            return
        labels = {str(index): f"LABEL_{index}" for index in range(edit.value(self.path))}
        edit.content.pop("num_labels", None)
        edit.content["id2label"] = labels
        edit.content["label2id"] = {label: int(index) for index, label in labels.items()}


# --- windows --------------------------------------------------------------------------------------


class WindowsByLayer(FieldGroup):
    """A window of some layers, by ``layer_types`` or else by their numbers."""

    def __init__(
        self, default: int, is_local: Callable[[int], bool], *, needs_size: bool = False
    ) -> None:
        # Some types compute the mask of a window whether a layer has one or not.
        self.default, self.is_local, self.needs_size = default, is_local, needs_size

    def read(self, take: Taker) -> Mapping[str, Any]:
        if self.needs_size:
            take("sliding_window", self.default, kind=kinds.SIZE)
        return read_windows(take, self.default, self.is_local)

    def write(self, edit: ConfigEdit) -> None:
        size = edit.content.get("sliding_window", self.default)
        has_window = edit.config.attention.window is not None
        if self.needs_size and not has_window and edit.changes("attention.window"):
            edit.content["layer_types"] = ["full_attention"] * edit.config.num_layers
            edit.content["sliding_window"] = size
        else:
            write_windows(edit)


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


def read_windows(
    take: Taker, default: int | None, is_local: Callable[[int], bool]
) -> dict[str, Any]:
    """Reads the window, and its layers."""
    return windows_by_layer(
        take, take("sliding_window", default, kind=kinds.SIZE.or_null), is_local
    )


def windows_by_layer(
    take: Taker, window: int | None, is_local: Callable[[int], bool]
) -> dict[str, Any]:
    """Reads the layers that have a window."""
    local = read_layer_types(take, LAYER_TYPES, is_local)
    if window is None or not any(local):
        return {}
    return {"attention.window": window, "attention.local_layers": None if all(local) else local}


def write_windows(edit: ConfigEdit) -> None:
    """Writes the window, and its layers unless they are the default."""
    config, content = edit.config, edit.content
    if edit.changes("attention.window"):
        content["sliding_window"] = config.attention.window
    if edit.changes("attention.window", "attention.local_layers", "num_layers"):
        local = list(map(config.attention.is_local, range(config.num_layers)))
        if "layer_types" in content or local != edit.local_layers_read():
            content["layer_types"] = [LAYER_TYPES[is_local] for is_local in local]


class Window(FieldGroup):
    """A window of all layers, if ``switch`` is no field or true."""

    def __init__(self, default: int | None = None, *, switch: str = "") -> None:
        self.default, self.switch = default, switch

    def read(self, take: Taker) -> Mapping[str, Any]:
        window = take("sliding_window", self.default, kind=kinds.SIZE.or_null)
        if self.switch and not take(self.switch, False, kind=kinds.BOOLEAN.or_null):
            return {}
        types = take("layer_types", None, kind=kinds.TEXTS.or_null)
        kind = "full_attention" if window is None else "sliding_attention"
        limits = f"{kinds.UNNOTICED}: all layers have sliding_window={window!r}"
        kinds.check_supported("layer_types", types, types is None or set(types) == {kind}, limits)
        return {} if window is None else {"attention.window": window}

    def write(self, edit: ConfigEdit) -> None:
        if self.switch and edit.changes("attention.window"):
            edit.content[self.switch] = edit.config.attention.window is not None
        write_windows(edit)


# --- experts --------------------------------------------------------------------------------------


class ExpertLayers(FieldGroup):
    """Layers with experts, behind dense ones, and sizes of experts."""

    def __init__(self, first: int, size: int, shared: int) -> None:
        self.first, self.size, self.shared = first, size, shared

    def read(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_hidden_layers", kind=kinds.SIZE)
        first = take("first_k_dense_replace", self.first, kind=kinds.INTEGER)
        kinds.check_supported("first_k_dense_replace", first, first >= 0, ", it is below 0")
        size = take("moe_intermediate_size", self.size, kind=kinds.SIZE)
        number = take("n_shared_experts", self.shared, kind=kinds.SIZE)
        return {
            "experts.dense_layers": tuple(range(min(first, count))),
            "experts.dim": size,
            "experts.shared_dim": size * number,
        }

    def write(self, edit: ConfigEdit) -> None:
        config, content = edit.config, edit.content
        if edit.changes("experts.dense_layers", "num_layers"):
            content["first_k_dense_replace"] = len(edit.value("experts.dense_layers"))
        if edit.changes("experts.num_experts") and not edit.value("experts.num_experts"):
            # No number of experts means none: that no layer has any is said by the layers.
            content["first_k_dense_replace"] = config.num_layers
            content["n_routed_experts"] = edit.before("experts.num_experts")
        if edit.changes("experts.dim"):
            content["moe_intermediate_size"] = edit.value("experts.dim")
        if edit.changes("experts.dim", "experts.shared_dim") and edit.value("experts.dim"):
            content["n_shared_experts"] = edit.value("experts.shared_dim") // edit.value(
                "experts.dim"
            )


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


def gated_mlp(gate: str = "mlp.gate_proj") -> Tensors:
    """Describes a gated MLP."""
    return (*linear(gate, to="mlp.gate", inputs="embed", outputs="mlp"), *mlp())


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
