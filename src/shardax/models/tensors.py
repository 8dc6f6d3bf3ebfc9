# SPDX-License-Identifier: Apache-2.0
"""Published tensors and the parameters that they hold.

A ``Tensor`` says which parameter it goes to, and which axes of the parameter each of its own axes
is made of. Names have ``{layer}`` and ``{expert}`` for numbers.

Axis of a tensor:
    A name such as ``"embed"``, several such as ``("heads", "head_dim")`` from the outside where
    they are flattened into one, ``part(0, of=3)`` among them where several parameters take turns,
    or ``concatenated("heads", "head_dim")`` where one stands behind the other, which may be so
    ``within`` others: of each head in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EqualPart:
    """One of several equal parts.

    Attributes:
        index: Which part, from 0.
        count: How many there are.
    """

    index: int
    count: int


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor.

    Attributes:
        parts: The axes of the parameter in it, and parts of equal size, from the outside.
        is_concatenated: Whether several parameters stand in it one behind the other.
        outer: How many of the parts they do so within, that is for each of their elements.
    """

    parts: tuple[str | EqualPart, ...]
    is_concatenated: bool = False
    outer: int = 0

    def factors(self, ranges: Mapping[str, tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Returns size, first and end of each part.

        Args:
            ranges: The same of each axis of the parameter.

        Returns:
            A list, from the outside.
        """
        return [
            ranges[part] if isinstance(part, str) else (part.count, part.index, part.index + 1)
            for part in self.parts
        ]


AxisLike = str | EqualPart | Axis | Sequence[str | EqualPart]
HEADS = ("heads", "head_dim")


def part(index: int, of: int) -> EqualPart:
    """Returns a part of an axis over which several parameters take turns.

    Args:
        index: Which part, from 0.
        of: How many there are.

    Returns:
        The part, to be used among the names of an axis.

    Example:
        >>> ("heads", part(1, of=3), "head_dim")[1]
        EqualPart(index=1, count=3)
    """
    return EqualPart(index, of)


def concatenated(*names: str, within: Sequence[str] = ()) -> Axis:
    """Returns an axis in which parameters stand one behind the other.

    Their order is that of the tensors of this name in the description.

    Args:
        *names: Axes of the parameter, from the outside.
        within: Axes that all of them share, outside of these: one parameter stands behind the
            other for each of their elements, such as for each head.

    Returns:
        The axis.

    Example:
        >>> concatenated("heads", "head_dim").is_concatenated
        True
        >>> concatenated("head_dim", within=["heads"]).parts
        ('heads', 'head_dim')
    """
    return Axis((*within, *names), is_concatenated=True, outer=len(within))


@dataclass(frozen=True)
class Tensor:
    """A tensor of the files, or one parameter's part of it.

    Attributes:
        name: Its name; ``{layer}`` and ``{expert}`` are numbers.
        to: The path of the parameter, with ``layers`` for any layer.
        axes: Its axes.
        parameter_axes: The axes of the parameter; empty for those of ``axes``, in their order.

    Example:
        >>> tensor = Tensor("lm_head.weight", "head.kernel", ("vocab", "embed"), ("embed", "vocab"))
        >>> tensor.axes[0]
        Axis(parts=('vocab',), is_concatenated=False, outer=0)
    """

    name: str
    to: str
    axes: Sequence[AxisLike]
    parameter_axes: Sequence[str] = ()

    def __post_init__(self) -> None:
        axes = tuple(map(_as_axis, self.axes))
        names = [part for axis in axes for part in axis.parts if isinstance(part, str)]
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "parameter_axes", tuple(self.parameter_axes or names))

    @property
    def tensor_axes(self) -> tuple[Axis, ...]:
        """The axes, each an ``Axis``."""
        return tuple(map(_as_axis, self.axes))

    @property
    def is_of_expert(self) -> bool:
        """Whether it is one expert's."""
        return "{expert}" in self.name

    def numbered(self, layer: int, expert: int = 0) -> str:
        """Returns the name for a layer.

        Args:
            layer: The number of the layer.
            expert: The number of the expert.

        Returns:
            The name in the files.
        """
        return self.name.replace("{layer}", str(layer)).replace("{expert}", str(expert))


Tensors = tuple[Tensor, ...]


def _as_axis(axis: AxisLike) -> Axis:
    if isinstance(axis, Axis):
        return axis
    return Axis((axis,) if isinstance(axis, (str, EqualPart)) else tuple(axis))


def _names(*axes: AxisLike) -> tuple[str, ...]:
    parts = [part for axis in axes for part in _as_axis(axis).parts]
    return tuple(part for part in parts if isinstance(part, str))


def linear(name: str, to: str, inputs: AxisLike, outputs: AxisLike) -> Tensors:
    """Describes weight and bias of a linear layer of PyTorch, ``(outputs, inputs)``.

    Args:
        name: The layer's name in the files.
        to: The path of the layer.
        inputs: The axis that it reads.
        outputs: The axis that it makes.

    Returns:
        Both tensors.

    Example:
        >>> weight, bias = linear("o_proj", "attn.out", HEADS, "embed")
        >>> weight.name, weight.parameter_axes, bias.to
        ('o_proj.weight', ('heads', 'head_dim', 'embed'), 'attn.out.bias')
    """
    weight = Tensor(f"{name}.weight", f"{to}.kernel", (outputs, inputs), _names(inputs, outputs))
    return weight, Tensor(f"{name}.bias", f"{to}.bias", (outputs,))


def conv1d(name: str, to: str, inputs: AxisLike, outputs: AxisLike) -> Tensors:
    """Describes weight and bias of a linear layer of GPT-2, ``(inputs, outputs)``.

    Args:
        name: The layer's name in the files.
        to: The path of the layer.
        inputs: The axis that it reads.
        outputs: The axis that it makes.

    Returns:
        Both tensors.

    Example:
        >>> conv1d("mlp.c_fc", "mlp.up", "embed", "mlp")[0].parameter_axes
        ('embed', 'mlp')
    """
    weight = Tensor(f"{name}.weight", f"{to}.kernel", (inputs, outputs))
    return weight, Tensor(f"{name}.bias", f"{to}.bias", (outputs,))


def norm(name: str, to: str) -> Tensors:
    """Describes weight and bias of a normalization.

    Args:
        name: The layer's name in the files.
        to: The path of the layer.

    Returns:
        Both tensors.

    Example:
        >>> [tensor.to for tensor in norm("model.norm", "final_norm")]
        ['final_norm.scale', 'final_norm.bias']
    """
    return (
        Tensor(f"{name}.weight", f"{to}.scale", ("embed",)),
        Tensor(f"{name}.bias", f"{to}.bias", ("embed",)),
    )


def embedding(name: str, to: str, axis: str) -> Tensors:
    """Describes the weight of an embedding.

    Args:
        name: The layer's name in the files.
        to: The path of the layer.
        axis: What is embedded.

    Returns:
        The tensor, alone in a tuple.

    Example:
        >>> embedding("model.embed_tokens", "embed", "vocab")[0].name
        'model.embed_tokens.weight'
    """
    return (Tensor(f"{name}.weight", f"{to}.embedding", (axis, "embed")),)


def in_layers(prefix: str, *groups: Tensors) -> Tensors:
    """Puts descriptions of one layer under the names of all layers.

    Args:
        prefix: The list of layers in the files, such as ``"model.layers"``.
        *groups: Tensors of a layer.

    Returns:
        All of them, in their order.

    Example:
        >>> in_layers("model.layers", norm("input_layernorm", "attn_norm"))[0].name
        'model.layers.{layer}.input_layernorm.weight'
    """
    return tuple(
        replace(tensor, name=f"{prefix}.{{layer}}.{tensor.name}", to=f"layers.{tensor.to}")
        for group in groups
        for tensor in group
    )
