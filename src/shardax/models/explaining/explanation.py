# SPDX-License-Identifier: Apache-2.0
"""The layers of a family as plain code, made of the parts of layers that are built.

A layer of each kind is built, which computes nothing, as parameters are lazy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from shardax import Rngs
from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXtBlock, ConvNeXtConfig
from shardax.models.decoder import DecoderConfig
from shardax.models.dual_encoder import DualEncoderConfig
from shardax.models.encoder_decoder import EncoderDecoderConfig, ModelConfig, names_of_parts
from shardax.models.explaining.code import BlockCode, LayerCode
from shardax.models.families import registry
from shardax.models.family import REQUIRED, Family
from shardax.models.kinds import PretrainedError, brief
from shardax.models.layers.transformer_layer import TransformerLayer

# Sizes of a family whose config.json must name them, by their path in a config.
STAND_INS: Mapping[str, int] = {
    "vocab_size": 32_000,
    "num_layers": 32,
    "embed_dim": 4096,
    "mlp.dim": 11_008,
    "attention.num_heads": 32,
    "experts.top_k": 2,
}
# The same of fields that a group of them reads, by their name in a config.json.
STAND_INS_OF_GROUPS: Mapping[str, int] = {"intermediate_size": 11_008}


def explain(model: str | ModelConfig | DecoderConfig) -> str:
    """Shows the layers of a family, or of a config, as plain code with shapes.

    The code is made of the parts of built layers, one function for each kind of layer. A parameter
    has its path in the layer, and the shapes behind a line are those of its parameters, in order.
    ``x @ kernel`` sums over the last dimensions of ``x``, as many as match the first ones of the
    kernel. Left out are dropout, the epsilon of norms, and what only meshes, masks and caches need.

    Args:
        model: A type of models as in ``config.json``, also one that was registered; its sizes are
            the defaults of transformers, and 32 layers of 4,096 features with 32 heads where there
            are none. Or a config, such as ``model.config``.

    Returns:
        The code as text, to be printed.

    Raises:
        PretrainedError: If the type is unknown, or a field that it needs has no default; or if what
            was given is no config of a model.

    Example:
        >>> import shardax as sx
        >>> config = sx.models.TransformerConfig(embed_dim=64, parallel=True)
        >>> print(sx.models.explain(config))
        # layers 0 to 1 of 2
        def layer(x):                          # (batch, time, 64)
            h = rms_norm(x) * attn_norm.scale  # (embed=64)
            q = h @ attn.q.kernel              # (embed=64, heads=4, head_dim=16)
            k = h @ attn.k.kernel              # (embed=64, kv_heads=2, head_dim=16)
            v = h @ attn.v.kernel              # (embed=64, kv_heads=2, head_dim=16)
            q, k = rotary(q, k, base=10000)
            y = attend(q, k, v, scale=0.25, causal=True)
            y = y @ attn.out.kernel            # (heads=4, head_dim=16, embed=64)
            result = x + y
            h = rms_norm(x) * mlp_norm.scale   # (embed=64)
            gate = silu(h @ mlp.gate.kernel)   # (embed=64, mlp=192)
            up = h @ mlp.up.kernel             # (embed=64, mlp=192)
            y = (gate * up) @ mlp.down.kernel  # (mlp=192, embed=64)
            return result + y
    """
    config = config_of_family(model) if isinstance(model, str) else model
    sections = list[str]()

    match config:
        case DecoderConfig():
            sections += _layers_of(config.transformer)
        case TransformerConfig():
            sections += _layers_of(config)
        case ConvNeXtConfig():
            sections += _blocks_of(config)
        case DualEncoderConfig() | EncoderDecoderConfig():
            for name in names_of_parts(config):
                sections += _layers_of(getattr(config, name), f"{name}: ")
        case _:
            raise PretrainedError(
                f"explain was given {brief(config)}, and takes the name of a family, such as "
                f"'llama', or the config of a model, such as model.config."
            )
    return "\n\n".join(sections)


# --- configs of families --------------------------------------------------------------------------


def config_of_family(name: str) -> object:
    """Returns the config of a family, with stand-ins for sizes without a default."""
    family = registry.find_family(name, "explain")
    content: dict[str, Any] = {"model_type": name, "architectures": list(family.architectures)[:1]}

    for field_name, field in family.fields.items():
        is_needed = field.default is REQUIRED and field_name not in family.defaults
        if is_needed and field.targets[0] in STAND_INS:
            content[field_name] = STAND_INS[field.targets[0]]
    content |= _needed_by_groups(family, content)

    # What still has no value is named by the reading.
    return family.config(content, f"The config of {name} without a file")


def _needed_by_groups(family: Family, content: Mapping[str, Any]) -> dict[str, int]:
    """Returns stand-ins for the fields without a default that groups of fields read."""
    needed = dict[str, int]()

    def take(name: str, default: Any = REQUIRED, kind: kinds.Kind = kinds.ANYTHING) -> Any:
        value = content[name] if name in content else family.default_of(name, default)
        if value is not REQUIRED:
            return value
        if name in STAND_INS_OF_GROUPS:
            needed[name] = STAND_INS_OF_GROUPS[name]
        return needed.get(name, 1)

    for group in family.groups:
        # Of fields that do not fit together, which the reading of all of them names.
        with contextlib.suppress(PretrainedError):
            group.to(take)
    return needed


# --- kinds of layers ------------------------------------------------------------------------------


def _layers_of(config: TransformerConfig, name: str = "") -> Iterator[str]:
    """Yields the code of each kind of layer, behind the layers that have it."""
    indices_by_code = dict[str, list[int]]()
    for index in range(config.num_layers):
        layer = TransformerLayer(config, index, rngs=Rngs(0))
        code = LayerCode(layer, config).text()
        indices_by_code.setdefault(code, []).append(index)

    for code, indices in indices_by_code.items():
        yield f"# {name}layers {_ranges(indices)} of {config.num_layers}\n{code}"


def _blocks_of(config: ConvNeXtConfig) -> Iterator[str]:
    """Yields the code of the blocks of each stage."""
    for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        block = ConvNeXtBlock(config, width, rngs=Rngs(0))
        yield f"# stage {stage}, {depth} blocks\n{BlockCode(block, width).text()}"


def _ranges(indices: list[int]) -> str:
    """Returns indices as text, such as ``0 to 2, 5``."""
    runs = list[list[int]]()
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])

    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
