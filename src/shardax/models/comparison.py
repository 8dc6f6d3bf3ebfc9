# SPDX-License-Identifier: Apache-2.0
"""Comparison of an edited model with one built of its config.

What differs is refused by path: a saved model is read back as what it is, or not written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardax import Module, Variable
from shardax.extend import Path, attributes_of, format_path
from shardax.models.convnext import ConvNeXt
from shardax.models.encoder_decoder import EncoderDecoder, names_of_parts
from shardax.models.kinds import PretrainedError
from shardax.models.layers.activations import find_activation
from shardax.models.layers.experts import (
    ChoiceOfGroups,
    ClippedMoE,
    GroupedMoE,
    GroupedSoftmaxMoE,
    InputScaledMoE,
)
from shardax.models.layers.norms import OffsetLayerNorm, OffsetRMSNorm
from shardax.models.layers.transformer_layer import ScaledGateMLP, TransformerBlock
from shardax.models.transformer import Transformer
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.nn.dropout import Dropout
from shardax.nn.quantization import QuantizedKernel
from shardax.nn.stack import Stack

# Attributes of layers that change no logits in evaluation, or follow from shapes.
_FREE_ATTRIBUTES_TEXT = """
capacity_factor config deterministic dtype generation_config implementation in_features
load_balance_loss num_embeddings out_features precision preferred_element_type
"""
_FREE_ATTRIBUTES = frozenset(_FREE_ATTRIBUTES_TEXT.split())
# Places of a Dropout, which may have any rate, or be None.
_DROPOUTS = ("dropout", "embed_dropout")
SAVE_ANY = "sx.train.checkpoint.save(model, folder) saves any model as it is."
# How an edit of the architecture is said.
GIVE_CONFIG = (
    " If the model is meant to be so, give the config that builds it: save_pretrained(model, "
    "folder, config=dataclasses.replace(model.config, ...))."
)
MISSING = object()
# Of two scales of scores that are one: a file may hold a rounded function of it.
SCALE_TOLERANCE = 1e-14


class LayerPlace(NamedTuple):
    """A layer of a model, alone or in a stack."""

    module: Any
    path: Path
    layers: tuple[int, ...]  # those that its Variables hold
    position: int | None  # in the leading dimension of its Variables, if stacked


class ParameterPlace(NamedTuple):
    """A parameter of one layer, by its place in an unrolled model."""

    path: Path  # in the unrolled model
    variable: Any
    layers: tuple[int, ...]
    position: int | None


def layers_of(model: Any) -> list[LayerPlace]:
    """Returns the layers in their order, those of stacks one by one."""
    layers, places = model.layers, list[LayerPlace]()
    if isinstance(layers, Stack):
        stacked, path = layers.stacked, ("layers", "stacked")
        in_block = isinstance(stacked, TransformerBlock)
        block = list(stacked.layers) if in_block else [stacked]
        count = layers.length * len(block)
        for index in range(count):
            kind = index % len(block)
            place = (*path, "layers", kind) if in_block else path
            same = tuple(range(kind, count, len(block)))
            places.append(LayerPlace(block[kind], place, same, index // len(block)))
        remaining = getattr(model, "rest", None) or []
        for index, layer in enumerate(remaining):
            places.append(LayerPlace(layer, ("rest", index), (count + index,), None))
    elif isinstance(layers, Sequence):
        places = [
            LayerPlace(layer, ("layers", index), (index,), None)
            for index, layer in enumerate(layers)
        ]
    else:
        problem = f"layers is a {type(layers).__name__}, neither a list of layers nor a Stack"
        raise refusal([problem])
    return places


def refuse_any(problems: Sequence[str], advice: str = "") -> None:
    """Raises for problems of a model without a published form."""
    if problems:
        raise refusal(problems, advice)


def refusal(problems: Sequence[str], advice: str = "") -> PretrainedError:
    """Returns the error of a model without a published form."""
    listed = "; ".join(problems[:8])
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    return PretrainedError(
        f"The model cannot be written as a published one, and nothing was written: {listed}{more}."
        f"{advice} {SAVE_ANY}"
    )


_COMPUTING = (OffsetRMSNorm, OffsetLayerNorm, ChoiceOfGroups, GroupedMoE, GroupedSoftmaxMoE)
_COMPUTING += (ClippedMoE, InputScaledMoE, ScaledGateMLP)


class ArchitectureCheck:
    """Differences of a model from one built of its config."""

    def __init__(self, is_local_read: bool) -> None:
        free = _FREE_ATTRIBUTES if is_local_read else _FREE_ATTRIBUTES | {"is_local"}
        self.free = free
        self.places: list[ParameterPlace] = []
        self.wrong: dict[Path, str] = {}
        self.advice = GIVE_CONFIG

    def compare(
        self,
        module: Any,
        built: Any,
        place: LayerPlace,
        passed_over: tuple[str, ...] = (),
        path: Path = (),
        within: Path = (),
    ) -> None:
        """Compares a Module with the built one, and their parts."""
        where = (*place.path, *within)
        if self._is_another_class(module, type(built), where):
            return
        attributes = attributes_of(module)
        for name, expected in attributes_of(built).items():
            if name in self.free or name in passed_over:
                continue
            at, below = (*path, name), (*within, name)
            value = attributes.get(name, MISSING)
            if name in _DROPOUTS:
                if value is not None:
                    self._is_another_class(value, Dropout, (*where, name))
            elif isinstance(expected, Module):
                self.compare(value, expected, place, (), at, below)
            elif isinstance(expected, Variable):
                self._take(value, expected, place, at, below)
            elif not _is_same_in(module, name, value, expected):
                text = f"is {text_of(value)}, but {text_of(expected)} in its config.json"
                self.wrong[*place.path, *below] = text
        for name in vars(module).keys() - vars(built).keys():
            if hasattr(type(built), name) and name not in self.free:
                self.wrong[*where, name] = "replaces what is computed"

    def compare_models(self, model: Any, built: Any) -> None:
        """Compares a model with the one that is built of its config."""
        if names := names_of_parts(built):
            self.compare(model, built, LayerPlace(model, (), (), None), names)
            for name in names:
                self._compare_layers(getattr(model, name), getattr(built, name), (name,))
            is_shared = isinstance(built, EncoderDecoder) and (
                built.decoder.embed is built.encoder.embed
            )
            if is_shared and all(isinstance(getattr(model, n), Transformer) for n in names):
                self.take_shared(model)
        elif isinstance(built, ConvNeXt):
            self._compare_stages(model, built)
        else:
            self._compare_layers(model, built, ())

    def _compare_layers(self, model: Any, built: Any, path: Path) -> None:
        """Compares a Transformer at a path of the model, and its layers."""
        place = LayerPlace(model, path, (), None)
        self.compare(model, built, place, ("layers", "rest"), path)
        if not isinstance(model, Transformer):
            return

        # Layers of which there are more or fewer have no counterparts.
        layers = layers_of(model)
        self._check_count(len(layers), len(built.layers), (*path, "layers"))
        for index, (layer, expected) in enumerate(zip(layers, built.layers, strict=True)):
            layer = layer._replace(path=(*path, *layer.path))
            self.compare(layer.module, expected, layer, (), (*path, "layers", index))

    def _compare_stages(self, model: ConvNeXt, built: ConvNeXt) -> None:
        """Compares a ConvNeXt, its stages and their blocks."""

        def compare(part: Any, expected: Any, path: Path, *parts_of: str) -> None:
            self.compare(part, expected, LayerPlace(part, path, (), None), parts_of, path)

        compare(model, built, (), "stages")
        stages = self._sequence_of(model, "stages", ())
        self._check_count(len(stages), len(built.stages), ("stages",))
        for index, (stage, expected) in enumerate(zip(stages, built.stages, strict=True)):
            path = ("stages", index)
            compare(stage, expected, path, "blocks")

            blocks = self._sequence_of(stage, "blocks", path)
            self._check_count(len(blocks), len(expected.blocks), (*path, "blocks"))
            for number, pair in enumerate(zip(blocks, expected.blocks, strict=True)):
                compare(*pair, (*path, "blocks", number))

    def _sequence_of(self, module: object, name: str, path: Path) -> Sequence[Any]:
        """Returns the parts that stand in a list, or raises where there is something else."""
        parts = getattr(module, name, None)
        if isinstance(parts, Sequence):
            return parts
        raise refusal([f"{format_path((*path, name))} is {text_of(parts)}, not a list"])

    def _check_count(self, count: int, expected: int, path: Path) -> None:
        """Raises for another number of layers than the config has."""
        if count != expected:
            problem = f"{format_path(path)} are {count}, but {expected} in its config.json"
            raise refusal([problem], self.advice)

    def take_shared(self, model: EncoderDecoder) -> None:
        """Notes the embedding of both halves once."""
        if model.encoder.embed is not model.decoder.embed:
            text = "is not the encoder's, but families have one for both"
            self.wrong["decoder", "embed"] = text
            self.advice = " Share it: model.decoder.embed = model.encoder.embed."
        shared = ("decoder", "embed", "embedding")
        self.places = [place for place in self.places if place.path != shared]

    def _take(self, variable, expected, place: LayerPlace, path: Path, within: Path) -> None:
        """Notes a parameter, or its fault."""
        where = (*place.path, *within)
        if not isinstance(variable, (Variable, QuantizedKernel)):
            self.wrong[where] = f"is {text_of(variable)}, not a Param"
            return
        shape = tuple(variable.shape)
        shape = shape if place.position is None else shape[1:]
        if shape != tuple(expected.shape):
            self.wrong[where] = f"has the shape {shape}, but {tuple(expected.shape)} in its config"
        elif jnp.dtype(variable.dtype).name not in ("float16", "bfloat16", "float32", "float64"):
            self.wrong[where] = (
                f"has the dtype {variable.dtype}, which is not read back, but float16, bfloat16, "
                f"float32 or float64"
            )
        parts = {(): variable}
        if isinstance(variable, QuantizedKernel):
            parts = {("values",): variable.values, ("scale",): variable.scale}
        for name, part in parts.items():
            at = (*path, *name)
            self.places.append(ParameterPlace(at, part, place.layers, place.position))

    def _is_another_class(self, module: object, expected: type, where: Path) -> bool:
        kind = type(module)
        if not isinstance(module, expected):
            if kind.__name__ == "LoRA":
                self.advice = " Merge adapters first: sx.surgery.merge_lora(model)."
            self.wrong[where] = f"is {text_of(module)}, not a {expected.__name__}"
            return True
        for cls in kind.__mro__[: kind.__mro__.index(expected)]:
            if cls.__module__.startswith("shardax.models.") and cls not in _COMPUTING:
                continue
            for name in vars(cls).keys() - _CLASS_NAMES:
                if hasattr(expected, name):
                    self.wrong[where] = (
                        f"is a {kind.__name__}, whose {name} is not a {expected.__name__}'s"
                    )
                    return True
        return False


# What a subclass may have of its own and compute the same.
_CLASS_NAMES_TEXT = """
__init__ __doc__ __module__ __qualname__ __annotations__ __annotate__ __annotate_func__
__annotations_cache__ __static_attributes__ __firstlineno__ __dict__ __weakref__ __slots__
__parameters__ __orig_bases__ __repr__ _make_layer
"""
_CLASS_NAMES = frozenset(_CLASS_NAMES_TEXT.split())


def _is_same_in(module: Module, name: str, value: object, expected: object) -> bool:
    if name == "scale" and isinstance(module, MultiHeadAttention):
        # None is the root of the size, which some families write as a number.
        plain = module.head_dim**-0.5
        value = plain if value is None else value
        expected = plain if expected is None else expected
        if isinstance(value, float) and isinstance(expected, float):
            return math.isclose(value, expected, rel_tol=SCALE_TOLERANCE)
    return _is_same(name, value, expected)


def _is_same(name: str, value: object, expected: object) -> bool:
    if name == "activation":
        return _function_of(value) is _function_of(expected)
    if name == "dispatch":  # the two compute the same
        return value in ("dense", "dropless")
    if isinstance(value, (Module, Variable)) or value is MISSING:
        return False
    return (
        value is expected
        or (type(value) is type(expected) and bool(value == expected))
        or (
            isinstance(value, (int, float))
            and isinstance(expected, (int, float))
            and value == expected
        )
    )


def _function_of(activation: object):
    if not isinstance(activation, str):
        return activation
    try:
        return find_activation(activation)
    except AttributeError:
        return activation


def text_of(value: object) -> str:
    """Returns what an error calls a value."""
    if value is MISSING:
        return "gone"
    if isinstance(value, (Module, Variable)):
        return f"a {type(value).__name__}"
    if callable(value):
        return f"the function {getattr(value, '__name__', value)}"
    return repr(value)
