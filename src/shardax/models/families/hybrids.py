# SPDX-License-Identifier: Apache-2.0
"""Decoders with recurrent layers: LFM2, Mamba 2, Falcon-H1 and Qwen3-Next.

Sources: ``models/{lfm2,mamba2,falcon_h1,qwen3_next}`` of transformers 5, ``configuration_*.py`` for
fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from shardax.models import kinds
from shardax.models.config.recurrent import (
    GatedDeltaConfig,
    MixerConfig,
    ShortConvolutionConfig,
    StateSpaceConfig,
)
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.qwen import SparseLayers
from shardax.models.families.rope import Rotary
from shardax.models.family import PUBLISHED, REQUIRED, Family, Field, FieldGroup, Taker
from shardax.models.kinds import PretrainedError, brief
from shardax.models.tensors import (
    HEADS,
    Tensor,
    Tensors,
    concatenated,
    in_layers,
    linear,
    norm,
    part,
)


def _mixer_of(config: TransformerConfig) -> MixerConfig | None:
    return None if config.recurrence is None else config.recurrence.mixer


def _options_of_mixer(take: Taker, names: Mapping[str, str]) -> dict[str, Any]:
    """Reads sizes and switches of a mixer, by their names in its config and in ``config.json``."""
    return {
        name: take(field, PUBLISHED, kind=kinds.BOOLEAN if name.endswith("bias") else kinds.SIZE)
        for name, field in names.items()
    }


def _convolution(name: str, channels: Mapping[str, Sequence[str]]) -> list[Tensor]:
    """Describes the kernels of one convolution, by the axes of the arrays that it runs over."""
    return [
        Tensor(
            f"{name}.weight",
            f"mixer.convolution.{array}_kernel",
            (concatenated(*axes), part(0, of=1), "time"),
            ("time", *axes),
        )
        for array, axes in channels.items()
    ]


class MixerLayers(FieldGroup):
    """A mixer of some layers, and the layers that have it.

    Attributes:
        kind: What ``layer_types`` calls these layers.
        mixer_class: The config of the mixer.
        names: The fields of ``config.json`` by those of that config.
    """

    kind: ClassVar[str]
    mixer_class: ClassVar[type[MixerConfig]]
    names: ClassVar[Mapping[str, str]]

    def read_layers(self, take: Taker, is_recurrent: Callable[[int], bool]) -> Mapping[str, Any]:
        """Reads the layers, and returns the fields of ``TransformerConfig``."""
        options = _options_of_mixer(take, self.names)
        chosen = shared.read_layer_types(take, (self.kind, "full_attention"), is_recurrent)
        if not any(chosen):
            return {}
        layers = None if all(chosen) else chosen
        return {"recurrence.mixer": self.mixer_class(**options), "recurrence.layers": layers}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        layers = map(config.is_recurrent, range(config.num_layers))
        kinds_of_layers = [self.kind if is_chosen else "full_attention" for is_chosen in layers]
        mixer = _mixer_of(config)
        is_own = isinstance(mixer, self.mixer_class)
        sizes = {field: getattr(mixer, name) for name, field in self.names.items() if is_own}
        return {"layer_types": kinds_of_layers, **sizes}


class ConvolutionLayers(MixerLayers):
    """Short convolutions, and the layers that have them."""

    older = ("full_attn_idxs",)
    kind: ClassVar = "conv"
    mixer_class: ClassVar = ShortConvolutionConfig
    names: ClassVar = {"size": "conv_L_cache", "use_bias": "conv_bias"}

    def to(self, take: Taker) -> Mapping[str, Any]:
        full = take("full_attn_idxs", None, kind=kinds.INTEGERS.or_null)
        return self.read_layers(take, lambda index: full is not None and index not in full)


class AdjustedMLP(FieldGroup):
    """The size of the MLP, two thirds of a field rounded up."""

    older = ("block_ff_dim",)

    def to(self, take: Taker) -> Mapping[str, Any]:
        size = take("intermediate_size", kind=kinds.SIZE)
        size = take("block_ff_dim", size, kind=kinds.SIZE)
        is_adjusted = take("block_auto_adjust_ff_dim", PUBLISHED, kind=kinds.BOOLEAN)
        factor = take("block_ffn_dim_multiplier", PUBLISHED, kind=kinds.NUMBER.positive.or_null)
        multiple = take("block_multiple_of", PUBLISHED, kind=kinds.SIZE)
        if is_adjusted:
            size = int(2 * size / 3)
            if factor is not None:
                name = f"block_ffn_dim_multiplier={factor!r}"
                size = -(-kinds.whole(name, factor * size) // multiple) * multiple
        return {"mlp.dim": size}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        if config.mlp is None:
            return {}
        return {"intermediate_size": config.mlp.dim, "block_auto_adjust_ff_dim": False}


class TiedHead(FieldGroup):
    """The older name of ``tie_word_embeddings``, which goes before it."""

    older = ("tie_embedding",)

    def to(self, take: Taker) -> Mapping[str, Any]:
        tied = take("tie_embedding", None, kind=kinds.BOOLEAN.or_null)
        return {} if tied is None else {"output.tied": tied}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"tie_word_embeddings": config.output.tied}


def _is_convolutional(config: TransformerConfig) -> bool:
    return config.mlp is not None and isinstance(_mixer_of(config), ShortConvolutionConfig)


# --- LFM2 -----------------------------------------------------------------------------------------

LFM2 = Family(
    fields={
        # Its attention has no dropout.
        **shared.without(shared.DECODER, "attention_dropout", "intermediate_size"),
        "head_dim": Field("attention.head_dim"),
        "norm_eps": Field("norms.epsilon"),
        "num_key_value_heads": Field("attention.num_kv_heads"),
        "tie_word_embeddings": Field("output.tied"),
    },
    fixed={"attention.qk_norm": "head"},
    groups=[Rotary(base=1e6), ConvolutionLayers(), AdjustedMLP(), TiedHead()],
    architectures=shared.causal_lm("Lfm2"),
    has_parts=_is_convolutional,
    neutral={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
    harmless=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
        *("num_heads", "theta"),
    ),
    tensors=(
        *shared.ends(final_norm="embedding_norm"),
        *in_layers(
            "model.layers",
            shared.pre_norms("operator_norm", "ffn_norm"),
            shared.attention(out="self_attn.out_proj"),
            shared.head_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
            linear("conv.in_proj", to="mixer.into", inputs="embed", outputs=("gate", "mlp")),
            (
                Tensor(
                    "conv.conv.weight",
                    "mixer.kernel",
                    ("mlp", part(0, of=1), "time"),
                    ("time", "mlp"),
                ),
                Tensor("conv.conv.bias", "mixer.bias", ("mlp",)),
            ),
            linear("conv.out_proj", to="mixer.out", inputs="mlp", outputs="embed"),
            shared.gated_mlp("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
        ),
    ),
)

# --- Mamba 2 --------------------------------------------------------------------------------------


class StateSpace(FieldGroup):
    """The mixer of all layers."""

    # Of fields of ``StateSpaceConfig``, but for the heads.
    names: ClassVar[dict[str, str]] = {
        "num_groups": "n_groups",
        "state_dim": "state_size",
        "size": "conv_kernel",
        "chunk": "chunk_size",
        "use_bias": "use_bias",
        "conv_bias": "use_conv_bias",
    }

    def to(self, take: Taker) -> Mapping[str, Any]:
        heads, size = self.read_heads(take)
        options = _options_of_mixer(take, self.names)
        activation = take("hidden_act", PUBLISHED, kind=kinds.TEXT)
        options["step_limits"] = _limits(take("time_step_limit", [0.0, math.inf]))
        options["activation"] = kinds.known_activation("hidden_act", activation)
        if heads % options["num_groups"]:
            groups = f"{self.names['num_groups']}={options['num_groups']}"
            raise PretrainedError(f"{groups} does not divide num_heads={heads}")
        options |= self.read_more(take)
        return {"recurrence.mixer": StateSpaceConfig(heads, size, **options)}

    def read_heads(self, take: Taker) -> tuple[int, int]:
        """Reads number and size of heads."""
        heads = take("num_heads", PUBLISHED, kind=kinds.SIZE)
        size = take("head_dim", PUBLISHED, kind=kinds.SIZE)
        embed = take("hidden_size", kind=kinds.SIZE)
        expand = take("expand", PUBLISHED, kind=kinds.SIZE)
        if embed * expand != heads * size:
            raise PretrainedError(
                f"num_heads={heads} of head_dim={size} are not expand={expand} times "
                f"hidden_size={embed}"
            )
        return heads, size

    def read_more(self, take: Taker) -> Mapping[str, Any]:
        """Reads further fields of ``StateSpaceConfig``."""
        return {}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        mixer = _mixer_of(config)
        is_own = isinstance(mixer, StateSpaceConfig)
        return self.written(mixer, config.embed_dim) if is_own else {}

    def written(self, mixer: StateSpaceConfig, embed: int) -> dict[str, Any]:
        """Returns the fields of a mixer."""
        low, high = mixer.step_limits
        return {
            **{field: getattr(mixer, name) for name, field in self.names.items()},
            "hidden_act": kinds.published_activation(mixer.activation),
            "time_step_limit": [low, {"__float__": "Infinity"} if high == math.inf else high],
            "num_heads": mixer.num_heads,
            "head_dim": mixer.head_dim,
            "expand": mixer.num_heads * mixer.head_dim // embed,
        }


def _limits(value: object) -> tuple[float, float]:
    """Reads bounds of steps, the second perhaps a table."""
    names = {"Infinity": math.inf}
    numbers: list[Any] = [
        names.get(str(x.get("__float__"))) if isinstance(x, dict) and len(x) == 1 else x
        for x in (value if isinstance(value, list) else ())
    ]
    is_pair = len(numbers) == 2 and all(type(x) in (int, float) for x in numbers)
    fits = is_pair and 0 <= numbers[0] < numbers[1]
    limits = ", only two numbers from 0 up, of which the second may be Infinity"
    kinds.check_supported("time_step_limit", value, fits, limits)
    return float(numbers[0]), float(numbers[1])


def _state_space(mixer: str) -> Tensors:
    """Describes a mixer: one projection of five arrays, one convolution of three."""
    outputs = {
        "gate": HEADS,
        "value": HEADS,
        "write": ("groups", "state"),
        "read": ("groups", "state"),
        "step": ("heads",),
    }

    # The arrays stand behind one another, in this order.
    pairs = [
        linear(f"{mixer}.in_proj", f"mixer.{name}", "embed", concatenated(*axes))
        for name, axes in outputs.items()
    ]

    channels = {name: outputs[name] for name in ("value", "write", "read")}
    biases = [
        Tensor(f"{mixer}.conv1d.bias", f"mixer.convolution.{name}_bias", (concatenated(*axes),))
        for name, axes in channels.items()
    ]
    return (
        *(tensor for pair in zip(*pairs, strict=True) for tensor in pair),
        *_convolution(f"{mixer}.conv1d", channels),
        *biases,
        Tensor(f"{mixer}.dt_bias", "mixer.step_bias", ("heads",)),
        Tensor(f"{mixer}.A_log", "mixer.decay_log", ("heads",)),
        Tensor(f"{mixer}.D", "mixer.skip", ("heads",)),
        Tensor(f"{mixer}.norm.weight", "mixer.norm.scale", (HEADS,)),
        *linear(f"{mixer}.out_proj", to="mixer.out", inputs=HEADS, outputs="embed"),
    )


def _has_state_space(config: TransformerConfig) -> bool:
    return isinstance(_mixer_of(config), StateSpaceConfig)


# A layer is a mixer alone. That residuals are kept in float32 changes rounding of narrower dtypes.
MAMBA2 = Family(
    fields={
        "vocab_size": Field("vocab_size", default=REQUIRED),
        "hidden_size": Field("embed_dim", default=REQUIRED),
        "num_hidden_layers": Field("num_layers", default=REQUIRED),
        "layer_norm_epsilon": Field("norms.epsilon"),
        "tie_word_embeddings": Field("output.tied"),
    },
    fixed={
        "mlp.dim": 0,
        "attention.rope": None,
        "attention.num_heads": 1,
        "attention.num_kv_heads": 1,
        "attention.head_dim": 1,
    },
    groups=[StateSpace()],
    architectures=shared.causal_lm("Mamba2"),
    has_parts=lambda config: _has_state_space(config) and not config.recurrence.beside,
    harmless=(
        *("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max"),
        *("time_step_min", "time_step_rank", "time_step_init_scheme", "time_step_scale"),
        # Which its modeling file does not read.
        *("norm_before_gate", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    ),
    neutral={"rms_norm": (True,)},
    prefix="backbone.",
    tensors=(
        *shared.ends("backbone.", tokens="embeddings", final_norm="norm_f"),
        *in_layers("backbone.layers", norm("norm", to="attn_norm"), _state_space("mixer")),
    ),
)

# --- Falcon-H1 ------------------------------------------------------------------------------------


class ScaledStateSpace(StateSpace):
    """The mixer beside attention, with factors of its projections."""

    names: ClassVar[dict[str, str]] = {
        "num_groups": "mamba_n_groups",
        "state_dim": "mamba_d_state",
        "size": "mamba_d_conv",
        "chunk": "mamba_chunk_size",
        "use_bias": "mamba_proj_bias",
        "conv_bias": "mamba_conv_bias",
        "out_bias": "projectors_bias",
    }

    def read_heads(self, take: Taker) -> tuple[int, int]:
        heads = take("mamba_n_heads", PUBLISHED, kind=kinds.SIZE)
        expand = take("mamba_expand", PUBLISHED, kind=kinds.SIZE)
        inner = take("mamba_d_ssm", PUBLISHED, kind=kinds.SIZE.or_null)
        width = expand * take("hidden_size", kind=kinds.SIZE) if inner is None else inner

        size = take("mamba_d_head", PUBLISHED)
        size = width // heads if size == "auto" else size
        if type(size) is not int or size < 1 or size * heads != width:
            raise PretrainedError(
                f"mamba_n_heads={heads} of mamba_d_head={brief(size)} are not {width} in all, as "
                f"mamba_d_ssm or mamba_expand say"
            )
        return heads, size

    def read_more(self, take: Taker) -> Mapping[str, Any]:
        has_norm = take("mamba_rms_norm", PUBLISHED, kind=kinds.BOOLEAN)
        is_before = take("mamba_norm_before_gate", PUBLISHED, kind=kinds.BOOLEAN)
        place = "before" if is_before else "behind"
        scales = read_factors(take, "ssm_multipliers", 5)
        return {"gate_norm": place if has_norm else None, "scales": scales}

    def written(self, mixer: StateSpaceConfig, embed: int) -> dict[str, Any]:
        fields = super().written(mixer, embed)
        del fields["num_heads"], fields["head_dim"], fields["expand"]
        width = mixer.num_heads * mixer.head_dim
        fields |= {"mamba_n_heads": mixer.num_heads, "mamba_d_head": mixer.head_dim}
        fields |= {"mamba_d_ssm": width, "ssm_multipliers": list(mixer.scales)}
        fields |= {"mamba_rms_norm": mixer.gate_norm is not None}
        return fields | {"mamba_norm_before_gate": mixer.gate_norm == "before"}


class Factors(FieldGroup):
    """Factors of keys, by the scale of scores, and of the MLP."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        gate, out = read_factors(take, "mlp_multipliers", 2)
        heads, size = take("num_attention_heads", kind=kinds.SIZE), take("head_dim", None)
        size = take("hidden_size", kind=kinds.SIZE) // heads if size is None else size
        scale = take("key_multiplier", PUBLISHED, kind=kinds.NUMBER)
        plain = size**-0.5 if type(size) is int and size > 0 else 1.0
        return {"attention.scale": scale * plain, "mlp.gate_scale": gate, "mlp.out_scale": out}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        plain = config.attention.head_dim**-0.5
        scale = plain if config.attention.scale is None else config.attention.scale
        factor = scale / plain
        near = (factor, math.nextafter(factor, -math.inf), math.nextafter(factor, math.inf))
        exact = [number for number in near if number * plain == scale]
        fields: dict[str, Any] = {"key_multiplier": exact[0] if exact else factor}
        if config.mlp is not None:
            fields["mlp_multipliers"] = [config.mlp.gate_scale, config.mlp.out_scale]
        return fields


def read_factors(take: Taker, name: str, count: int) -> tuple[float, ...]:
    """Reads a list of factors, or raises."""
    value = take(name, None)
    factors = [1.0] * count if value is None else value
    is_list = isinstance(factors, list) and len(factors) == count
    if not is_list or any(kinds.NUMBER.problem(name, factor) for factor in factors):
        raise PretrainedError(f"{name}={brief(value)} is not a list of {count} numbers")
    return tuple(map(float, factors))


FALCON_H1 = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "attention_in_multiplier": Field("attention.in_scale"),
        "attention_out_multiplier": Field("attention.out_scale"),
        "embedding_multiplier": Field("embedding.scale"),
        "lm_head_multiplier": Field("output.scale"),
        "mlp_bias": Field("mlp.bias"),
        "ssm_in_multiplier": Field("recurrence.in_scale"),
        "ssm_out_multiplier": Field("recurrence.out_scale"),
    },
    fixed={"recurrence.beside": True},
    groups=[Rotary(), ScaledStateSpace(), Factors()],
    architectures=shared.causal_lm("FalconH1"),
    has_parts=lambda config: _has_state_space(config) and config.recurrence.beside,
    harmless=(
        *("mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep"),
        *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
    ),
    tensors=(
        *shared.ends(final_norm="final_layernorm"),
        *in_layers(
            "model.layers",
            shared.pre_norms("input_layernorm", "pre_ff_layernorm"),
            shared.attention(),
            _state_space("mamba"),
            shared.gated_mlp(*(f"feed_forward.{name}_proj" for name in ("gate", "up", "down"))),
        ),
    ),
)

# --- Qwen3-Next -----------------------------------------------------------------------------------


class DeltaLayers(MixerLayers):
    """The gated delta rule, and its layers."""

    older = ("full_attention_interval",)
    kind: ClassVar = "linear_attention"
    mixer_class: ClassVar = GatedDeltaConfig
    names: ClassVar = {
        "num_heads": "linear_num_key_heads",
        "head_dim": "linear_key_head_dim",
        "num_value_heads": "linear_num_value_heads",
        "value_dim": "linear_value_head_dim",
        "size": "linear_conv_kernel_dim",
    }

    def to(self, take: Taker) -> Mapping[str, Any]:
        interval = take("full_attention_interval", 4, kind=kinds.SIZE)
        heads = take("linear_num_key_heads", PUBLISHED, kind=kinds.SIZE)
        values = take("linear_num_value_heads", PUBLISHED, kind=kinds.SIZE)
        if values % heads:
            raise PretrainedError(
                f"linear_num_value_heads={values} is no multiple of linear_num_key_heads={heads}"
            )
        return self.read_layers(take, lambda index: (index + 1) % interval > 0)


_DELTA_KEYS, _DELTA_VALUES = HEADS, ("heads", "values", "value_dim")


def _delta_rule() -> Tensors:
    """Describes the mixer, its projections head by head."""
    outputs = {"query": "head_dim", "key": "head_dim", "value": "values value_dim"}
    outputs["gate"] = outputs["value"]

    # For each head anew.
    wide = [
        linear(
            "linear_attn.in_proj_qkvz",
            to=f"mixer.{name}",
            inputs="embed",
            outputs=concatenated(*axes.split(), within=["heads"]),
        )[0]
        for name, axes in outputs.items()
    ]
    narrow = [
        linear(
            "linear_attn.in_proj_ba",
            to=f"mixer.{name}",
            inputs="embed",
            outputs=("heads", part(index, of=2), "values"),
        )[0]
        for index, name in enumerate(("beta", "step"))
    ]

    channels = {"query": _DELTA_KEYS, "key": _DELTA_KEYS, "value": _DELTA_VALUES}
    return (
        *wide,
        *narrow,
        *_convolution("linear_attn.conv1d", channels),
        Tensor("linear_attn.dt_bias", "mixer.step_bias", (("heads", "values"),)),
        Tensor("linear_attn.A_log", "mixer.decay_log", (("heads", "values"),)),
        Tensor("linear_attn.norm.weight", "mixer.norm.scale", ("value_dim",)),
        linear("linear_attn.out_proj", to="mixer.out", inputs=_DELTA_VALUES, outputs="embed")[0],
    )


QWEN3_NEXT = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "moe_intermediate_size": Field("experts.dim"),
        "norm_topk_prob": Field("experts.normalise"),
        "num_experts_per_tok": Field("experts.top_k"),
        "router_aux_loss_coef": Field("experts.load_balance_weight"),
        "shared_expert_intermediate_size": Field("experts.shared_dim"),
    },
    fixed={
        "attention.gate": True,
        "norms.kind": "rms_offset",
        "attention.qk_norm": "head",
        "experts.shared_gate": True,
    },
    groups=[Rotary(fraction=0.25), SparseLayers(), DeltaLayers()],
    architectures=shared.causal_lm("Qwen3Next"),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            *(
                linear("self_attn.q_proj", to, "embed", ("heads", part(index, of=2), "head_dim"))
                for index, to in enumerate(("attn.q", "attn.gate"))
            ),
            shared.attention()[2:],  # without the queries
            shared.head_norms(),
            _delta_rule(),
            shared.gated_mlp(),  # of the layers without experts
            shared.swiglu_experts(),
            shared.shared_expert("mlp.shared_expert"),
            linear("mlp.shared_expert_gate", to="shared_gate", inputs="embed", outputs="one"),
        ),
    ),
)
