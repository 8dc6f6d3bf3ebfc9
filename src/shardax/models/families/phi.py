# SPDX-License-Identifier: Apache-2.0
"""Phi and Phi-3.

Sources: ``models/{phi,phi3}`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from shardax.models.families.rope import Rotary
from shardax.models.families.shared import (
    ALL_BIASES,
    DECODER,
    GATED_DECODER,
    Window,
    attention,
    causal_lm,
    ends,
    mlp,
    pre_norms,
)
from shardax.models.family import Family, Field
from shardax.models.tensors import HEADS, Tensor, concatenated, in_layers, linear, norm

# Attention and MLP read the same norm; half of a head is turned by its position.
PHI = Family(
    fields={
        **DECODER,
        "embd_pdrop": Field("embed_dropout", default=0.0),
        "hidden_act": Field("activation", default="gelu_new"),
        "layer_norm_eps": Field("norm_epsilon", default=1e-5),
        "resid_pdrop": Field("dropout", default=0.0),
    },
    fixed={
        **ALL_BIASES,
        "norm": "layer",
        "gated": False,
        "parallel": True,
        "shared_norm": True,
        "head_bias": True,
    },
    groups=[Rotary(fraction=0.5)],
    architectures=causal_lm("Phi"),
    neutral={"qk_layernorm": (False,)},
    tensors=(
        *ends(final_norm="final_layernorm"),
        *in_layers(
            "model.layers",
            norm("input_layernorm", to="attn_norm"),
            attention(out="self_attn.dense"),
            mlp(up="mlp.fc1", down="mlp.fc2"),
        ),
    ),
)

_QKV_AXES = {"axes": (concatenated(*HEADS), "embed"), "parameter_axes": ("embed", *HEADS)}
_GATE_UP_AXES = {"axes": (concatenated("mlp"), "embed"), "parameter_axes": ("embed", "mlp")}

# Queries, keys and values are one tensor, gate and up another.
PHI3 = Family(
    fields={
        **GATED_DECODER,
        "embd_pdrop": Field("embed_dropout", default=0.0),
        "resid_pdrop": Field("dropout", default=0.0),
        "rms_norm_eps": Field("norm_epsilon", default=1e-5),
    },
    groups=[Rotary(kinds=["default"], max_positions=4096), Window()],
    architectures=causal_lm("Phi3"),
    neutral={"attention_bias": (False,)},
    harmless=("original_max_position_embeddings",),
    tensors=(
        *ends(),
        *in_layers(
            "model.layers",
            pre_norms(),
            (
                Tensor("self_attn.qkv_proj.weight", "attn.q.kernel", **_QKV_AXES),
                Tensor("self_attn.qkv_proj.weight", "attn.k.kernel", **_QKV_AXES),
                Tensor("self_attn.qkv_proj.weight", "attn.v.kernel", **_QKV_AXES),
                Tensor("mlp.gate_up_proj.weight", "mlp.gate.kernel", **_GATE_UP_AXES),
                Tensor("mlp.gate_up_proj.weight", "mlp.up.kernel", **_GATE_UP_AXES),
            ),
            linear("self_attn.o_proj", to="attn.out", inputs=HEADS, outputs="embed"),
            linear("mlp.down_proj", to="mlp.down", inputs="mlp", outputs="embed"),
        ),
    ),
)
