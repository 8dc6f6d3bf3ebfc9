# SPDX-License-Identifier: Apache-2.0
"""A reader of the code that ``explain`` prints: its names, as plain NumPy-like arithmetic."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import shardax as sx
from shardax.models.layers.activations import ACTIVATIONS
from shardax.nn.rope import Rope, rotate

# Dimensions that the code names.
AXES = {"heads": -2, "head_dim": -1, "rows": 1, "columns": 2, "channels": -1}


class Tensor:
    """An array whose ``@`` sums over as many dimensions as match the kernel's first ones."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __matmul__(self, kernel: Tensor) -> Tensor:
        x, y = self.values, kernel.values
        if isinstance(kernel, Chosen):
            return Tensor(np.einsum("bti,btio->bto", x, y))
        count = next(n for n in range(y.ndim - 1, 0, -1) if x.shape[-n:] == y.shape[:n])
        return Tensor(np.tensordot(x, y, count))

    def __getitem__(self, index: Tensor) -> Tensor:
        if index.values.ndim == 3:  # the scores of all experts that a token goes to
            return Tensor(np.take_along_axis(self.values, index.values, -1))
        return Chosen(self.values[index.values])

    def __add__(self, other: Any) -> Tensor:
        return Tensor(self.values + values_of(other))

    def __mul__(self, other: Any) -> Tensor:
        return Tensor(self.values * values_of(other))

    def __truediv__(self, other: Any) -> Tensor:
        return Tensor(self.values / values_of(other))

    def __floordiv__(self, other: Any) -> Tensor:
        return Tensor(self.values // values_of(other))

    __radd__, __rmul__ = __add__, __mul__


class Chosen(Tensor):
    """The kernel of each token's expert."""


class Parameters:
    """The parameters of a module, by attribute."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return Tensor(value.value) if isinstance(value, sx.Param) else Parameters(value)


def values_of(value: Any) -> Any:
    return value.values if isinstance(value, Tensor) else value


def of_values(function: Any) -> Any:
    """The same function of Tensors."""
    return lambda *arguments, **options: Tensor(
        function(*map(values_of, arguments), **{k: values_of(v) for k, v in options.items()})
    )


def rms_norm(x: Any, axes: tuple[int, ...] = (-1,)) -> Any:
    return x / np.sqrt(np.mean(x**2, axes, keepdims=True) + 1e-6)


def layer_norm(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)


def attend(
    q: Any,
    k: Any,
    v: Any,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    bias: Any = 0.0,
) -> Any:
    """Attention of all heads, by all of its scores."""
    k, v = (np.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = scores + bias

    query, key = np.ogrid[: q.shape[1], : k.shape[1]]
    may_read = np.ones((q.shape[1], k.shape[1]), bool)
    if causal:
        may_read &= key <= query
    if window is not None:
        may_read &= abs(query - key) < window
    if chunk is not None:
        may_read &= query // chunk == key // chunk
    scores = np.where(may_read, scores, -np.inf)

    if sinks is not None:
        own = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, own], -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]]
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


def rotary(*arrays: Tensor, last: int | None = None, **rope: Any) -> Any:
    """Turns heads, or their last components, as the options of a ``Rope`` say."""
    results = []
    for array in arrays:
        x = array.values if array.values.ndim == 4 else array.values[..., None, :]
        plain, turned = (x[..., :0], x) if last is None else (x[..., :-last], x[..., -last:])
        rotation = Rope(**rope).rotation(np.arange(x.shape[1]), turned.shape[-1])
        turned = rotate(turned, rotation, interleaved=rope.get("interleaved", False))
        results.append(Tensor(np.concatenate([plain, turned], -1)))
    return results[0] if len(results) == 1 else results


def split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [Tensor(part) for part in np.split(x.values, [sizes[0]], -1)]


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    shape = (*x.values.shape[:-1], y.values.shape[-1])
    return Tensor(np.concatenate([x.values, np.broadcast_to(y.values, shape)], -1))


def top_k(scores: Tensor, count: int) -> list[Tensor]:
    return [Tensor(part) for part in jax.lax.top_k(scores.values, count)]


def by_choice(weights: Tensor, experts: Tensor) -> Any:
    """The weight and the expert of each token, choice by choice."""
    for index in range(experts.values.shape[-1]):
        yield Tensor(weights.values[..., index : index + 1]), Tensor(experts.values[..., index])


def run(code: str, layer: Any, **names: Any) -> Any:
    """Runs the printed code of a layer on arrays by their names in it."""

    def in_groups(scores: Any, groups: int, of_best: int) -> Any:
        parts = scores.reshape(*scores.shape[:-1], groups, -1)
        sums = jax.lax.top_k(parts, layer.mlp.least_size)[0].sum(-1)
        is_best = sums >= jax.lax.top_k(sums, of_best)[0][..., -1:]
        return np.where(is_best[..., None], parts, -np.inf).reshape(scores.shape)

    known: dict[str, Any] = {
        name: of_values(getattr(jax.nn, name))
        for name in ("silu", "gelu", "relu", "sigmoid", "softmax", "tanh")
    }
    known |= {name: of_values(function) for name, function in ACTIVATIONS.items()}
    known |= {name: of_values(getattr(np, name)) for name in ("clip", "minimum", "log")}
    known |= AXES
    known |= {
        "rms_norm": of_values(rms_norm),
        "layer_norm": of_values(layer_norm),
        "attend": of_values(attend),
        "rotary": rotary,
        "split": split,
        "concatenate": concatenate,
        "top_k": top_k,
        "indices_of_top_k": lambda scores, count: top_k(scores, count)[1],
        "in_groups": of_values(in_groups),
        "sum": of_values(lambda x: x.sum(-1, keepdims=True)),
        "zip": by_choice,
        "position": Tensor(np.arange(names["x"].shape[1])[:, None, None]),
    }
    # A mixer is one call in the code.
    for name in ("short_convolution", "state_space_mixer", "gated_delta_net"):
        known[name] = lambda x, *parameters: Tensor(layer.mixer(x.values))

    for name, value in vars(layer).items():
        known[name] = Tensor(value.value) if isinstance(value, sx.Param) else Parameters(value)
    known |= {name: Tensor(value) for name, value in names.items() if name == "bias_of_distances"}
    exec(code, known)
    arguments = {name: Tensor(value) for name, value in names.items() if name not in known}
    return known["layer"](**arguments).values
