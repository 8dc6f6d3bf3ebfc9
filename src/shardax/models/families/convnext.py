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
from shardax.models.family import PUBLISHED, Family, Field, FieldGroup, Taker
from shardax.models.kinds import PretrainedError
from shardax.models.tensors import Tensor, Tensors, linear, norm, part


class StageSizes(FieldGroup):
    """The width and depth of each stage."""

    older = BackboneStages.older  # one for each stage, which are made anew

    def to(self, take: Taker) -> Mapping[str, Any]:
        widths = take("hidden_sizes", PUBLISHED, kind=kinds.INTEGERS)
        depths = take("depths", PUBLISHED, kind=kinds.INTEGERS)
        count = take("num_stages", PUBLISHED, kind=kinds.SIZE)
        if not count == len(widths) == len(depths) or min([*widths, *depths], default=0) < 1:
            raise PretrainedError(
                f"num_stages={count}, hidden_sizes={widths} and depths={depths} are not positive "
                f"sizes of as many stages"
            )
        return {"widths": tuple(widths), "depths": tuple(depths)}

    def back(self, config: ConvNeXtConfig) -> Mapping[str, Any]:
        depths = [*config.depths]
        return {"hidden_sizes": [*config.widths], "depths": depths, "num_stages": len(depths)}


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
    model: str, name: str, fields: dict[str, Field], fixed: dict[str, Any]
) -> ConvNextFamily:
    return ConvNextFamily(
        fields={
            "num_channels": Field("channels"),
            "patch_size": Field("patch_size"),
            "hidden_act": Field("activation"),
            "layer_norm_eps": Field("norm_epsilon"),
            **fields,
        },
        fixed=fixed,
        groups=[StageSizes(), shared.Labels("num_classes")],
        architectures={
            f"{name}ForImageClassification": {"head": "classes"},
            f"{name}Model": {"head": None},
        },
        # In evaluation a rate of paths changes nothing, but training would differ.
        # Images of any size are read.
        harmless=("image_size", "tie_word_embeddings", *BackboneStages.older),
        prefix=f"{model}.",
        buffers=(),
        tensors=(
            *_convolution(f"{model}.embeddings.patch_embeddings", to="patches"),
            *norm(f"{model}.embeddings.layernorm", to="patch_norm"),
            *norm(f"{model}.layernorm", to="final_norm"),
        ),
        head_tensors={"classes": linear("classifier", "head", inputs="embed", outputs="class")},
    )


# Whether blocks are scaled is said by the first value of their scales.
_LAYER_SCALE = Field(
    "layer_scale",
    kind=kinds.NUMBER,
    to=lambda value: value > 0,
    back=lambda config: 1e-6 if config.layer_scale else 0.0,
)
_V2 = {"layer_scale": False, "response_norm": True}
CONVNEXT = _family("convnext", "ConvNext", {"layer_scale_init_value": _LAYER_SCALE}, {})
CONVNEXT_V2 = _family("convnextv2", "ConvNextV2", {}, _V2)
