# SPDX-License-Identifier: Apache-2.0
"""The code of one layer, with the shapes of its parameters.

It follows the loop of ``TransformerLayer``: for each part the norm of what it reads, its modules,
and how their result is added. A module without code of its own here is one call with all of its
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from shardax import Module, Param, iter_variables
from shardax.extend import format_path
from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXtBlock
from shardax.models.layers.experts import ChoiceOfGroups, ClippedMoE, GroupedMoE, InputScaledMoE
from shardax.models.layers.norms import HeadsRMSNorm, OffsetLayerNorm, OffsetRMSNorm
from shardax.models.layers.transformer_layer import LayerPart, ScaledGateMLP, TransformerLayer
from shardax.nn.attention.latent import MultiHeadLatentAttention
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.nn.linear import Linear
from shardax.nn.mlp import MLP
from shardax.nn.moe import MoE
from shardax.nn.normalization import LayerNorm
from shardax.nn.rope import Rope

# Shapes stand one below the other, but for those behind longer lines.
_LONG = 56


class _Code:
    """Lines of code about a module, and the shapes of the parameters in them."""

    def __init__(self, module: Module, arguments: str, shape: str) -> None:
        self.shapes = dict[str, str]()
        for path, variable in iter_variables(module, Param):
            self.shapes[format_path(path).removeprefix(".")] = _shape_text(variable)
        # Each with the shapes behind it.
        self.lines = [(f"def layer({arguments}):", shape)]

    def add(self, line: str) -> None:
        """Adds a line, with the shapes of the parameters that are named in it."""
        names = re.findall(r"[a-z_]\w*(?:\.\w+)*", line)
        shapes = [self.shapes[name] for name in names if name in self.shapes]
        self.lines.append((f"    {line}", ", ".join(shapes)))

    def call(self, result: str, function: str, source: str, path: str) -> None:
        """Adds a call with all parameters below a path, one a line."""
        self.add(f"{result} = {function}(")
        self.add(f"    {source},")
        for name in self.shapes:
            if name.startswith(f"{path}."):
                self.add(f"    {name},")
        self.add(")")

    def text(self) -> str:
        """Returns the lines as one text, the shapes one below the other."""
        commented = [len(code) for code, comment in self.lines if comment]
        column = max(length for length in commented if length <= _LONG) + 2
        lines = list[str]()
        for code, comment in self.lines:
            lines.append(f"{code:<{column - 2}}  # {comment}" if comment else code)
        return "\n".join(lines)

    def linear(self, source: str, path: str, layer: Linear) -> str:
        """Returns a linear map of a source."""
        bias = "" if layer.bias is None else f" + {path}.bias"
        return f"{source} @ {path}.kernel{bias}"

    def norm(self, source: str, path: str, norm: Any) -> str:
        """Returns the norm of a source."""
        name = "layer_norm" if isinstance(norm, LayerNorm) else "rms_norm"
        axes = ", axes=(heads, head_dim)" if isinstance(norm, HeadsRMSNorm) else ""
        text = f"{name}({source}{axes})"

        if norm.scale is not None:
            has_offset = isinstance(norm, (OffsetRMSNorm, OffsetLayerNorm))
            text += f" * (1 + {path}.scale)" if has_offset else f" * {path}.scale"
        if getattr(norm, "bias", None) is not None:
            text += f" + {path}.bias"
        return text


def _shape_text(parameter: Any) -> str:
    """Returns the dimensions of a parameter, with their names."""
    names = parameter.axes or (None,) * len(parameter.shape)
    dimensions = [
        str(size) if name is None else f"{name}={size}"
        for name, size in zip(names, parameter.shape, strict=True)
    ]
    return f"({', '.join(dimensions)})"


def _times(factor: float | None, source: str) -> str:
    """Returns a source times a factor of a config."""
    return source if factor in (None, 1) else f"{factor:.4g} * {source}"


def _activation(module: Any) -> str:
    activation = module.activation
    return activation if isinstance(activation, str) else activation.__name__


class BlockCode(_Code):
    """The code of a block of a ``ConvNeXt``."""

    def __init__(self, block: ConvNeXtBlock, width: int) -> None:
        super().__init__(block, "x", f"(batch, rows, columns, {width})")
        self.add("h = depthwise_convolution(x, conv.kernel) + conv.bias")
        self.add(f"h = {self.norm('h', 'norm', block.norm)}")
        self.add(f"h = {_activation(block)}({self.linear('h', 'up', block.up)})")
        if block.responses is not None:
            self.add("r = l2_norm(h, axes=(rows, columns))")
            self.add("r = h * r / mean(r, axis=channels)")
            self.add("h = h + r * responses.scale + responses.bias")
        self.add(f"y = {self.linear('h', 'down', block.down)}")
        self.add("return x + y" if block.scale is None else "return x + y * scale")


class LayerCode(_Code):
    """The code of a layer of a transformer, by the parts that it has."""

    def __init__(self, layer: TransformerLayer, config: TransformerConfig) -> None:
        arguments = "x" if layer.cross_attn is None else "x, context"
        super().__init__(layer, arguments, f"(batch, time, {config.embed_dim})")
        self.layer, self.config = layer, config

        # The loop of ``TransformerLayer.__call__``, written out.
        parts: Mapping[str, Callable[[str], None]] = {
            "attn": self._read_sequence,
            "cross": self._read_context,
            "mlp": self._feed_forward,
        }
        normed = target = "x"
        for index, part in enumerate(layer.parts):
            if not layer.parallel:
                normed = "x"
            norm = part.norm_of(layer)
            if norm is not None:
                self.add(f"h = {self.norm('x', f'{part.name}_norm', norm)}")
                normed = "h"
            parts[part.name](normed)
            is_last = index == len(layer.parts) - 1
            self._join(part, target, is_last)
            target = "result" if layer.parallel else "x"

    def _join(self, part: LayerPart, target: str, is_last: bool) -> None:
        """Adds the lines by which the result of a part is added."""
        layer, post_norm = self.layer, part.post_norm_of(self.layer)
        path = f"{part.name}_post_norm"
        if part.scale_of(layer) is not None:
            self.add(f"y = y * {part.name}_scale")
        if post_norm is not None and not layer.norm_after:
            self.add(f"y = {self.norm('y', path, post_norm)}")

        joined = f"{target} + {_times(layer.residual_scale, 'y')}"
        if layer.norm_after and not layer.parallel:
            joined = self.norm(joined, path, post_norm)
        if is_last:
            self.add(f"return {joined}")
        else:
            self.add(f"{'result' if layer.parallel else 'x'} = {joined}")

    # What parts read, as the functions of the same names beside ``TransformerLayer``.

    def _read_sequence(self, source: str) -> None:
        layer = self.layer
        if layer.attn is not None:
            self._attention("attn", layer.attn, _times(layer.attention_in_scale, source))
            self._scale_result(layer.attention_out_scale)
        if layer.mixer is None:
            return

        result = "y" if layer.attn is None else "z"
        name = _snake(type(layer.mixer).__name__)
        self.call(result, name, _times(layer.recurrent_in_scale, source), "mixer")
        if layer.attn is not None:
            self.add(f"y = y + {_times(layer.recurrent_out_scale, 'z')}")
        else:
            self._scale_result(layer.recurrent_out_scale)

    def _read_context(self, source: str) -> None:
        self._attention("cross_attn", self.layer.cross_attn, source, context="context")

    def _feed_forward(self, source: str) -> None:
        layer = self.layer
        if isinstance(layer.mlp, MoE):
            self._experts("mlp", layer.mlp, source)
        else:
            self._mlp("mlp", layer.mlp, source)
        if layer.shared_mlp is not None:
            self._mlp("shared_mlp", layer.shared_mlp, source, result="z")
            gate = ""
            if layer.shared_gate is not None:
                gate = f"sigmoid({self.linear(source, 'shared_gate', layer.shared_gate)}) * "
            self.add(f"y = y + {gate}z")
        self._scale_result(layer.mlp_out_scale)

    def _scale_result(self, factor: float) -> None:
        if factor != 1:
            self.add(f"y = {_times(factor, 'y')}")

    # Modules.

    def _attention(
        self, path: str, attention: MultiHeadAttention, source: str, context: str | None = None
    ) -> None:
        """Adds the lines of attention, to the sequence itself or to a context."""
        if isinstance(attention, MultiHeadLatentAttention):
            self._latent_projections(path, attention, source)
        else:
            self._projections(path, attention, source, context or source)

        options = self._attention_options(path, attention, is_own=context is None)
        self.add(f"y = attend(q, k, v{''.join(f', {option}' for option in options)})")
        if attention.gate is not None:
            self.add(f"y = y * sigmoid({self.linear(source, f'{path}.gate', attention.gate)})")
        self.add(f"y = {self.linear('y', f'{path}.out', attention.out)}")

    def _projections(
        self, path: str, attention: MultiHeadAttention, source: str, context: str
    ) -> None:
        """Adds the lines of queries, keys and values."""
        self.add(f"q = {self.linear(source, f'{path}.q', attention.q)}")
        self.add(f"k = {self.linear(context, f'{path}.k', attention.k)}")
        self.add(f"v = {self.linear(context, f'{path}.v', attention.v)}")
        if attention.query_norm is not None:
            self.add(f"q = {self.norm('q', f'{path}.query_norm', attention.query_norm)}")
        if attention.key_norm is not None:
            self.add(f"k = {self.norm('k', f'{path}.key_norm', attention.key_norm)}")

        if attention.query_growth is not None:
            factor, length = attention.query_growth
            self.add(f"q = q * (1 + {factor:g} * log(1 + (position + 1) // {length:g}))")
        rope = _rope_of(attention)
        if rope is not None:
            self.add(f"q, k = rotary(q, k, {_rope_text(rope)})")

    def _latent_projections(
        self, path: str, attention: MultiHeadLatentAttention, source: str
    ) -> None:
        """Adds the lines of queries, and of keys and values made of a latent."""
        # There are no ``q_down`` and ``q_up`` where queries are made without a latent.
        down: Any = getattr(attention, "q_down", None)
        if down is None:
            self.add(f"q = {self.linear(source, f'{path}.q', attention.q)}")
        else:
            norm = attention.q_latent_norm
            self.add(f"q = {self.linear(source, f'{path}.q_down', down)}")
            self.add(f"q = {self.norm('q', f'{path}.q_latent_norm', norm)}")
            self.add(f"q = {self.linear('q', f'{path}.q_up', attention.q_up)}")

        sizes = f"[{attention.latent_dim}, {attention.rope_dim}]"
        made = self.linear(source, f"{path}.kv_down", attention.kv_down)
        self.add(f"latent, rotated = split({made}, {sizes})")
        self.add(f"latent = {self.norm('latent', f'{path}.latent_norm', attention.latent_norm)}")
        made = self.linear("latent", f"{path}.kv_up", attention.kv_up)
        plain = attention.head_dim - attention.rope_dim
        self.add(f"k, v = split({made}, [{plain}, {attention.value_dim}])")

        rope = _rope_of(attention)
        if rope is not None:
            options = f"{_rope_text(rope)}, last={attention.rope_dim}"
            self.add(f"q = rotary(q, {options})")
            self.add(f"k = concatenate(k, rotary(rotated, {_rope_text(rope)}))")

    def _attention_options(
        self, path: str, attention: MultiHeadAttention, is_own: bool
    ) -> Iterator[str]:
        """Yields the options of attention that say more than its defaults."""
        scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
        yield f"scale={scale:.4g}"
        if attention.causal:
            yield "causal=True"
        if attention.window is not None:
            yield f"{'chunk' if attention.chunked else 'window'}={attention.window}"
        if attention.softcap is not None:
            yield f"softcap={attention.softcap:g}"
        if attention.sinks is not None:
            yield f"sinks={path}.sinks"
        if is_own and self.config.positions.relative_buckets:
            yield "bias=bias_of_distances"

    def _mlp(self, path: str, mlp: Any, source: str, result: str = "y") -> None:
        """Adds the lines of a feed-forward network, gated or not."""
        if not isinstance(mlp, MLP):
            self.call(result, _snake(type(mlp).__name__), source, path)
            return

        activation, up = _activation(mlp), self.linear(source, f"{path}.up", mlp.up)
        if mlp.gate is None:
            self.add(f"hidden = {activation}({up})")
            self.add(f"{result} = {self.linear('hidden', f'{path}.down', mlp.down)}")
            return

        gate = self.linear(source, f"{path}.gate", mlp.gate)
        if isinstance(mlp, ScaledGateMLP):
            gate = f"{mlp.gate_scale:.4g} * ({gate})"
        self.add(f"gate = {activation}({gate})")
        self.add(f"up = {up}")
        self.add(f"{result} = {self.linear('(gate * up)', f'{path}.down', mlp.down)}")

    def _experts(self, path: str, experts: MoE, source: str) -> None:
        """Adds the lines of experts: the choice, and the sum of what the chosen ones return."""
        scores = self.linear(source, f"{path}.router", experts.router)
        self._choice(path, experts, scores)

        read = f"w * {source}" if isinstance(experts, InputScaledMoE) else source
        biases = experts.router.bias is not None
        self.add("y = 0")
        self.add("for w, e in zip(weights, experts):")
        gate = f"{read} @ {path}.gate[e]" + (f" + {path}.gate_bias[e]" if biases else "")
        up = f"{read} @ {path}.up[e]" + (f" + {path}.up_bias[e]" if biases else "")
        down = f"@ {path}.down[e]" + (f" + {path}.down_bias[e]" if biases else "")
        self.add(f"    gate = {gate}")
        self.add(f"    up = {up}")
        if isinstance(experts, ClippedMoE):
            limit = experts.limit
            self.add(
                f"    gate, up = minimum(gate, {limit:g}), clip(up, -{limit:g}, {limit:g}) + 1"
            )
        factor = experts.gate_factor if isinstance(experts, ClippedMoE) else None
        activated = f"{_activation(experts)}(gate)"
        if factor is not None:
            activated = f"gate * sigmoid({factor:g} * gate)"
        result = f"({activated} * up) {down}"
        self.add(f"    y += {result if isinstance(experts, InputScaledMoE) else f'w * ({result})'}")

    def _choice(self, path: str, experts: MoE, scores: str) -> None:
        """Adds the lines by which experts are chosen and weighed."""
        if isinstance(experts, InputScaledMoE):
            self.add(f"scores, experts = top_k({scores}, {experts.top_k})")
            self.add("weights = sigmoid(scores)")
            return

        function = "sigmoid" if isinstance(experts, GroupedMoE) else "softmax"
        self.add(f"scores = {function}({scores})")
        choice = f"scores + {path}.choice_bias" if isinstance(experts, GroupedMoE) else "scores"
        if isinstance(experts, ChoiceOfGroups) and experts.num_groups > 1:
            groups = f"groups={experts.num_groups}, of_best={experts.top_groups}"
            choice = f"in_groups({choice}, {groups})"
        self.add(f"experts = indices_of_top_k({choice}, {experts.top_k})")
        self.add("weights = scores[experts]")
        if experts.normalise:
            self.add("weights = weights / sum(weights)")
        if isinstance(experts, ChoiceOfGroups) and experts.scale != 1:
            self.add(f"weights = {experts.scale:g} * weights")


def _snake(name: str) -> str:
    """Returns the name of a class as that of a function."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _rope_of(attention: MultiHeadAttention) -> Rope | None:
    """Returns the rotary embedding of attention, or None."""
    if attention.rope_base is None:
        return None
    return attention.rope or Rope(attention.rope_base)


def _rope_text(rope: Rope) -> str:
    """Returns the fields of a rotary embedding that say more than its defaults."""
    plain = Rope(rope.base)
    options = [f"base={rope.base:.9g}"]
    for field in fields(rope):
        value = getattr(rope, field.name)
        if value != getattr(plain, field.name):
            options.append(f"{field.name}={value!r}")
    return ", ".join(options)
