# SPDX-License-Identifier: Apache-2.0
"""Texts of errors of recordings, patches, adapters and precisions."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from shardax.errors import GenerationError, SelectionError
from shardax.extend import Path, format_path, join_first

# --- record ---------------------------------------------------------------------------------------


def selection_of_another_tree() -> SelectionError:
    """Returns the error of ``record`` for layers of another model."""
    return SelectionError(
        "record takes layers of the model that it calls, and a selection is of another tree. "
        "Select in the model: `sx.surgery.record(model, "
        "sx.select(model).at_instances_of(sx.nn.Linear))`."
    )


def nothing_to_record() -> SelectionError:
    """Returns the error of ``record`` without layers."""
    return SelectionError(
        "record was given no layers to record. Select some: `sx.surgery.record(model, "
        "sx.nn.Linear)`."
    )


def layer_as_selection(layer: object, path: Path | None) -> SelectionError:
    """Returns the error of ``record`` for a layer in place of a selection.

    Args:
        layer: The layer.
        path: Where it is in the model, if it is there.
    """
    return SelectionError(
        f"record takes selections of layers, and not a {type(layer).__name__} itself. Select "
        f"it by its path: `sx.surgery.record(model, sx.select(model).at_keypaths({path or '...'}))`"
        "."
    )


def no_input(edit: str, layer: object, first: object) -> SelectionError:
    """Returns the error for a layer whose first argument is not made of arrays.

    Args:
        edit: Name of the function that was to read or change it.
        layer: The layer.
        first: Its first argument; None where it has none.
    """
    given = "no argument" if first is None else f"a {type(first).__name__} first"
    name = getattr(layer, "__name__", type(layer).__name__)
    return SelectionError(
        f"With inputs=True, {edit} takes the first argument of a layer, an array or a pytree of "
        f"arrays, and a call gives {name} {given}. Select a layer that gets the array first, or "
        "take results: inputs=False."
    )


def unusable_unrolled_paths(layer: object, problem: str) -> SelectionError:
    """Returns the error for what ``unrolled_paths`` of a layer returned.

    Args:
        layer: The layer.
        problem: What is wrong with it.
    """
    return SelectionError(
        f"unrolled_paths of {type(layer).__name__} {problem}. It returns, by the path of layers "
        "below it, the path of each in an unrolled model: "
        '`{("looped",): [("layers", index) for index in range(3)]}`.'
    )


def wrong_number_of_paths(path: Path, given: int, layers: int) -> SelectionError:
    """Returns the error for a stack whose ``unrolled_paths`` are more or fewer than its layers.

    Args:
        path: Where the layer that holds the stack is, in an unrolled model.
        given: The number of paths.
        layers: The number of layers.
    """
    return SelectionError(
        f"unrolled_paths of the layer at {format_path(path)} gives {given} paths for layers below, "
        f"of which {layers} were called. Give one path for each."
    )


def not_recorded() -> GenerationError:
    """Returns the error of ``Recording.generate`` for what has no finished texts to read."""
    return GenerationError(
        "Recording.generate reads the finished texts of a causal model. For a stream or an "
        "EncoderDecoder, generate first and call the recording on the result, as the model: "
        "`recording(tokens)`."
    )


# --- patch ----------------------------------------------------------------------------------------


def nothing_to_patch() -> SelectionError:
    """Returns the error of ``patch`` without values."""
    return SelectionError(
        "patch was given no values. Give arrays by path, as sx.surgery.record returns them: "
        '`sx.surgery.patch(model, {("layers", 0, "mlp"): array})`.'
    )


def no_such_layer(model: object, path: Path, known: Sequence[Path]) -> SelectionError:
    """Returns the error of ``patch`` for a path at which a model has nothing.

    Args:
        model: The model.
        path: The path that was given.
        known: Paths of what it has.
    """
    paths = join_first([*map(format_path, known)]) if known else "none"
    return SelectionError(
        f"patch was given a value for {format_path(path)}, and the {type(model).__name__} has no "
        f"such layer. Layers have the paths that sx.surgery.record returns: {paths}."
    )


def shape_of_patch(path_text: str, new: object, old: object) -> SelectionError:
    """Returns the error for a value that does not fit what a layer returns, or is given.

    Args:
        path_text: Where the layer is.
        new: What ``how`` returned.
        old: What it was given.
    """
    return SelectionError(
        f"The patch of {path_text} makes {new} of {old}. It has to have that structure, and shapes "
        "that are broadcast to those. In a call with a cache a later token is alone: a value for "
        "all of them has one position, or none."
    )


def shapes_in_stack(path_text: str, one: jax.Array, other: jax.Array) -> SelectionError:
    """Returns the error for values of layers of a stack that differ in shape."""
    return SelectionError(
        f"The values for layers at {path_text} have the shapes {one.shape} and {other.shape}. "
        "These layers are one stack, so their values have one shape. Broadcast them before, or "
        "take the stack apart: sx.nn.unstack_layers."
    )


# --- lora -----------------------------------------------------------------------------------------


def two_precisions(one: tuple[Path, object], other: tuple[Path, object]) -> SelectionError:
    """Returns the error of ``with_precision`` for a layer whose kernels would get two."""
    (first, first_precision), (second, second_precision) = one, other
    return SelectionError(
        "A layer has one precision for all of its kernels, but the filters give "
        f"{first_precision!r} to {format_path(first)} and {second_precision!r} to "
        f"{format_path(second)}. Choose them by one filter, as for all layers: "
        "sx.surgery.with_precision(model, 'fp8')."
    )


def no_known_kernel(where: str) -> SelectionError:
    """Returns the error of ``LoRA`` for what is no ``nn.KernelLayer``."""
    return SelectionError(
        f"{where} has no kernel that LoRA knows. Give the sizes of its input and result: "
        f"sx.surgery.LoRA(layer, 2, in_features=8, out_features=4)."
    )


def no_low_rank(where: str, layer: object, problem: str) -> SelectionError:
    """Returns the error of ``LoRA`` for a layer whose kernels have no low-rank terms.

    Args:
        where: Path of the layer, or the name of its class.
        layer: The layer.
        problem: What its ``low_rank_problem`` returns.
    """
    return SelectionError(
        f"{where} is a {type(layer).__name__} {problem}. Leave it out: selection.where(...)."
    )


def call_of_its_own(where: str, layer: object, method: str) -> SelectionError:
    """Returns the error of ``LoRA`` for a subclass that computes otherwise than its base.

    Args:
        where: Path of the layer, or the name of its class.
        layer: The layer.
        method: The method that the subclass overrides.
    """
    # The term is added to what the base computes: such a layer would not equal its merged one.
    return SelectionError(
        f"{where} is a {type(layer).__name__}, whose {method} is its own, so shardax does not "
        f"know what a low-rank term of its kernel adds. Make it a Module that calls the layer, "
        f"or leave it out: selection.where(...)."
    )


def not_callable(layer: object) -> SelectionError:
    """Returns the error of a ``LoRA`` with sizes around what is not called."""
    return SelectionError(
        f"A LoRA with sizes is around a Module that is called, or alone, but was given "
        f"{layer!r}. Alone it is sx.surgery.LoRA(None, 2, in_features=8, out_features=4)."
    )


def adapted_already(path: Path) -> SelectionError:
    """Returns the error of ``lora`` for a layer in a ``LoRA`` at a path."""
    return SelectionError(
        f"{format_path(path)} has an adapter already. Merge it first, "
        f"sx.surgery.merge_lora(model), or leave the layer out: selection.where(...)."
    )


def mapped_over_another_axis(
    path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> SelectionError:
    """Returns the error of ``lora`` for a kernel whose first dimensions are not those of a stack.

    Args:
        path: Where the layer is.
        shape: Shape of its kernel.
        expected: Shape of the kernel of one layer.
    """
    return SelectionError(
        f"{format_path(path)} has a kernel of shape {shape}, which does not "
        f"end with {expected}: its layers were mapped over another axis than the first. "
        f"Map them with out_axes=0, or adapt a layer before it is mapped."
    )


def no_kernel_to_merge_into(layer: object) -> SelectionError:
    """Returns the error of ``merge_lora`` for a ``LoRA`` with sizes around a layer."""
    return SelectionError(
        f"A LoRA with sizes is around a {type(layer).__name__}, and does not know to which "
        f"kernel its term belongs. Keep it, or adapt the layers inside: "
        f"sx.surgery.lora(sx.select(model), rank=2)."
    )
