# SPDX-License-Identifier: Apache-2.0
"""Configs of the MLP of a layer and of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shardax.extend import Options
from shardax.models.config.paths import ConfigPart
from shardax.nn.errors import LayerConfigError
from shardax.nn.moe import Dispatch
from shardax.nn.parameters import as_size

SCORES = ("softmax", "sigmoid", "grouped_softmax", "input_sigmoid")


@dataclass(frozen=True)
class MLPConfig(ConfigPart):
    """Size and form of the feed-forward network of a layer.

    Its activation is that of the model.

    Attributes:
        dim: Size of the hidden layer.
        gated: Whether it is gated.
        bias: Whether it has biases.
        gate_scale: Multiplies the gate, before the activation.
        out_scale: Multiplies the result, also that of experts.

    Raises:
        LayerConfigError: If the size is not positive, or an ungated one has a factor of the gate.

    Example:
        >>> import shardax as sx
        >>> mlp = sx.models.MLPConfig(dim=256, gated=False, bias=True)
        >>> config = sx.models.TransformerConfig(num_layers=1, activation="gelu", mlp=mlp)
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0].mlp.up.kernel.shape
        (64, 256)
    """

    dim: int = 192
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    absent: ClassVar = {"dim": 0}

    def __post_init__(self) -> None:
        where = type(self).__name__
        as_size(where, "dim", self.dim)
        fits = self.gated or self.gate_scale == 1
        Options(LayerConfigError, where).check("gate_scale", self.gate_scale, fits, "1 if ungated")


@dataclass(frozen=True)
class ExpertsConfig(ConfigPart):
    """Number, choice and sizes of experts, in place of an MLP.

    Attributes:
        num_experts: Number of experts of a layer.
        dim: Size of an expert's hidden layer.
        top_k: How many of them a token goes to.
        normalise: Whether the weights of a token's experts add up to 1. None, which becomes true
            or false: with several experts a token, as for ``nn.MoE``.
        scores: ``"softmax"``, ``"sigmoid"`` with a bias of the choice, ``"grouped_softmax"``, or
            ``"input_sigmoid"``, which multiplies what experts read.
        num_groups: But of a plain softmax: number of groups of experts.
        top_groups: But of a plain softmax: how many of them a token's experts are of.
        scale: But of a plain softmax: multiplies the weights.
        bias: Whether the router and the experts have biases.
        limit: Bound of an expert's gate, and on both sides of what it multiplies, to which 1 is
            added then; None for plain gated units.
        gate_factor: Beside a limit: units have ``gate * sigmoid(gate_factor * gate)`` in place of
            the activation of the gate; None for the activation.
        shared_dim: Size of the hidden layer of an expert for all tokens; 0 for none.
        shared_gate: Whether what it adds is multiplied by the sigmoid of a linear map.
        dispatch: How tokens get to them, as for ``nn.MoE``.
        load_balance_weight: What a training loss multiplies ``sx.nn.load_balance_loss`` by.
        dense_layers: The layers that have an MLP nevertheless.

    Raises:
        LayerConfigError: If the number is not positive, groups do not divide it, a limit stands
            beside other scores than a softmax, or a factor of gates stands without a limit.

    Example:
        >>> import shardax as sx
        >>> experts = sx.models.ExpertsConfig(num_experts=8, dim=32, dense_layers=(0,))
        >>> model = sx.models.Transformer(
        ...     sx.models.TransformerConfig(experts=experts), rngs=sx.Rngs(0))
        >>> [type(layer.mlp).__name__ for layer in model.layers]
        ['MLP', 'MoE']
    """

    num_experts: int
    dim: int
    top_k: int = 2
    normalise: bool | None = None
    scores: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False
    limit: float | None = None
    gate_factor: float | None = None
    shared_dim: int = 0
    shared_gate: bool = False
    dispatch: Dispatch = "dense"
    load_balance_weight: float = 0.0
    dense_layers: tuple[int, ...] = ()
    absent: ClassVar = {"num_experts": 0, "dim": 0}

    def __post_init__(self) -> None:
        where = type(self).__name__
        as_size(where, "num_experts", self.num_experts)
        if self.normalise is None:
            object.__setattr__(self, "normalise", self.top_k > 1)

        options = Options(LayerConfigError, where)
        options.choice("scores", self.scores, SCORES)
        if self.scores != "softmax":
            self._check_groups(options)

        # Of the units of experts chosen by a softmax alone.
        if self.limit is not None:
            fits, need = self.limit > 0, "positive"
            if self.scores != "softmax":
                fits, need = False, f"None with scores={self.scores!r}"
            options.check("limit", self.limit, fits, need)
        fits = self.gate_factor is None or self.limit is not None
        options.check("gate_factor", self.gate_factor, fits, "None without a limit")

    def _check_groups(self, options: Options) -> None:
        """Raises for groups of unequal or too few experts."""
        groups, count = self.num_groups, self.num_experts
        least = 2 if self.scores == "sigmoid" else 1
        fits = groups == 1 or (groups > 0 and count % groups == 0 and count >= least * groups)
        need = f"a divisor of {count}" + " with two experts a group" * (least == 2)
        options.check("num_groups", groups, fits, need)
        least = math.ceil(self.top_k * groups / count)
        fits = least <= self.top_groups <= groups
        need = f"from {least} up to {groups}, for {self.top_k} experts"
        options.check("top_groups", self.top_groups, fits, need)

    def in_layer(self, index: int) -> bool:
        """Returns whether a layer has experts.

        Args:
            index: Which layer.

        Returns:
            Whether it has.
        """
        return index not in self.dense_layers
