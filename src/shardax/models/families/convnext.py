# SPDX-License-Identifier: Apache-2.0
"""ConvNeXt: stages of convolutional blocks.

Sources: ``models/{convnext,convnextv2}`` of transformers 5, ``configuration_*.py`` for fields and
defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardax.models import kinds
from shardax.models.convnext import ConvNeXtConfig
from shardax.models.families import shared
from shardax.models.families.encoders import BackboneStages
from shardax.models.family import ConfigEdit, Family, Field, FieldGroup, Taker
from shardax.models.kinds import PretrainedError
from shardax.models.tensors import Tensor, Tensors, linear, norm, part


class StageSizes(FieldGroup):
    """The width and depth of each stage."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        widths = take("hidden_sizes", [96, 192, 384, 768], kind=kinds.INTEGERS)
        depths = take("depths", [3, 3, 9, 3], kind=kinds.INTEGERS)
        count = take("num_stages", 4, kind=kinds.SIZE)
        if not count == len(widths) == len(depths) or min([*widths, *depths], default=0) < 1:
            raise PretrainedError(
                f"num_stages={count}, hidden_sizes={widths} and depths={depths} are not positive "
                f"sizes of as many stages"
            )
        return {"widths": tuple(widths), "depths": tuple(depths)}

    def write(self, edit: ConfigEdit) -> None:
        config: Any = edit.config
        if edit.changes("widths", "depths"):
            edit.content["hidden_sizes"], edit.content["depths"] = (
                [*config.widths],
                [*config.depths],
            )
            edit.content["num_stages"] = len(config.depths)
            for name in BackboneStages.NAMES:  # one for each stage, which are made anew
                edit.content.pop(name, None)


class LayerScale(FieldGroup):
    """Whether blocks are scaled, by the first value of their scales."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        return {"layer_scale": take("layer_scale_init_value", 1e-6, kind=kinds.NUMBER) > 0}

    def write(self, edit: ConfigEdit) -> None:
        if edit.changes("layer_scale"):
            edit.content["layer_scale_init_value"] = 1e-6 if edit.config.layer_scale else 0.0


@dataclass(frozen=True)
class ConvNextFamily(Family):
    """A type of published models with stages of convolutional blocks."""

    config_class: ClassVar[type] = ConvNeXtConfig

    def tensors_for(self, config: Any) -> Tensors:
        """Returns the tensors of all stages."""
        tensors = list(self.tensors)
        for stage, depth in enumerate(config.depths):
            name, to = f"{self.prefix}encoder.stages.{stage}", f"stages.{stage}"
            if stage > 0:
                tensors += norm(f"{name}.downsampling_layer.0", to=f"{to}.norm")
                tensors += _convolution(f"{name}.downsampling_layer.1", f"{to}.reduction")
            for block in range(depth):
                layer, place = f"{name}.layers.{block}", f"{to}.blocks.{block}"
                tensors += [
                    replace(t, name=f"{layer}.{t.name}", to=f"{place}.{t.to}") for t in _BLOCK
                ]
        return tuple(tensors)


def _convolution(name: str, to: str) -> Tensors:
    kernel = ("output", "input", "row", "column")
    return (
        Tensor(f"{name}.weight", f"{to}.kernel", kernel, ("row", "column", "input", "output")),
        Tensor(f"{name}.bias", f"{to}.bias", ("output",)),
    )


_ONE = part(0, of=1)
_BLOCK = (
    *_convolution("dwconv", to="conv"),
    *norm("layernorm", to="norm"),
    *linear("pwconv1", to="up", inputs="embed", outputs="mlp"),
    Tensor("grn.weight", "responses.scale", (_ONE, _ONE, _ONE, "mlp")),
    Tensor("grn.bias", "responses.bias", (_ONE, _ONE, _ONE, "mlp")),
    *linear("pwconv2", to="down", inputs="mlp", outputs="embed"),
    Tensor("layer_scale_parameter", "scale", ("embed",)),
)


def _family(
    model: str, name: str, groups: list[FieldGroup], fixed: dict[str, Any]
) -> ConvNextFamily:
    return ConvNextFamily(
        fields={
            "num_channels": Field("channels", default=3),
            "patch_size": Field("patch_size", default=4),
            "hidden_act": Field("activation", default="gelu"),
            "layer_norm_eps": Field("norm_epsilon", default=1e-12),
        },
        fixed=fixed,
        groups=[StageSizes(), *groups, shared.Labels("num_classes")],
        architectures={
            f"{name}ForImageClassification": {"head": "classes"},
            f"{name}Model": {"head": None},
        },
        # In evaluation a rate of paths changes nothing, but training would differ.
        neutral={"drop_path_rate": (0.0, 0)},
        # Images of any size are read.
        harmless=("image_size", "tie_word_embeddings", *BackboneStages.NAMES),
        prefix=f"{model}.",
        buffers=(),
        tensors=(
            *_convolution(f"{model}.embeddings.patch_embeddings", to="patches"),
            *norm(f"{model}.embeddings.layernorm", to="patch_norm"),
            *norm(f"{model}.layernorm", to="final_norm"),
        ),
        head_tensors={"classes": linear("classifier", "head", inputs="embed", outputs="class")},
    )


_V2 = {"layer_scale": False, "response_norm": True}
CONVNEXT = _family("convnext", "ConvNext", [LayerScale()], {})
CONVNEXT_V2 = _family("convnextv2", "ConvNextV2", [], _V2)
