# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax Linen inside shardax models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardax import BatchStat, Cache, Intermediate, Param, Perturbation, Rngs, Variable
from shardax.bridge.base import (
    Bridged,
    BridgeError,
    axis_names,
    described,
    leaves_of,
    library,
    nested,
    write_back,
)
from shardax.extend import Path, PyTree, check_rngs

_COLLECTIONS: dict[str, type[Variable]] = {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}


class _FromLinen(Bridged):
    def __init__(self, peer, variables: Mapping[Path, Variable], rngs) -> None:
        super().__init__(peer, variables)
        self.rngs = rngs

    def call(self, method: str, *args, **kwargs):
        linen = library("flax.linen", "from_linen")
        leaves = leaves_of(self.variables)
        old = {path: leaf.value for path, leaf in leaves if not isinstance(leaf, Intermediate)}
        fixed = linen.DenyList(["params", "intermediates"])
        keys = _keys(self.rngs, lambda name: name not in ("default", "params"))

        run = functools.partial(
            self.peer.value.apply, nested(old), *args, mutable=fixed, method=method, **kwargs
        )
        try:
            result, written = run(rngs=keys)
        except library("flax.errors", "from_linen").InvalidRngError:
            # Only where the call draws: what needs no keys leaves the default stream alone.
            default = _keys(self.rngs, lambda name: name == "default")
            if not default:
                raise
            result, written = run(rngs={**keys, "params": default["default"]})

        boxed = dict(leaves_of(written))
        new = {path: linen.unbox(leaf) for path, leaf in boxed.items()}
        write_back(self.variables, old, {**old, **new}, lambda path: _of_linen(path, boxed[path]))
        return result


def _keys(rngs: Rngs | None, chosen: Callable[[str], bool]) -> dict[str, jax.Array]:
    streams = () if rngs is None else rngs.streams()
    return {name: stream() for name, stream in streams if chosen(name)}


def _of_linen(path: Path, leaf) -> Variable:
    """Returns a Variable of a collection's kind, with a box's names."""
    linen = library("flax.linen", "from_linen")
    names = getattr(leaf, "names", None) if isinstance(leaf, linen.meta.AxisMetadata) else None
    value = leaf.value if names is not None else linen.unbox(leaf)
    if isinstance(value, tuple):  # sown
        return Intermediate(value, tag=str(path[0]))
    if path[0] in _COLLECTIONS:
        return _COLLECTIONS[str(path[0])](value, axes=axis_names(names, value))
    return Variable(value, axes=axis_names(names, value), tag=str(path[0]))


def from_linen(module: Any, *example: PyTree, rngs: Any = None, **named: PyTree) -> Bridged:
    """Makes a Module of one of Flax Linen, with its Variables.

    The collections ``params``, ``batch_stats``, ``cache`` and ``perturbations`` become Variables of
    the matching kind, others a ``Variable`` with the collection as its tag; values that are sown,
    other than ``intermediates``, are ``Intermediate``. Names of ``nn.Partitioned`` and
    ``nn.LogicallyPartitioned`` become axes. Calls may write every collection but ``params``.

    Args:
        module: A ``flax.linen.Module``. One that is bound, ``module.bind(variables)``, keeps its
            variables, and needs no example.
        *example: Arguments of the call, with which it is initialised.
        rngs: Random streams, an ``sx.Rngs``. ``params`` initialises. Each call draws a key from
            every other named stream, and from the default one if it needs it.
        **named: Arguments of the call by name, likewise.

    Returns:
        A Module to call like the peer, without its variables and keys.

    Raises:
        BridgeError: If it is no ``flax.linen.Module``.
        ModuleError: If ``rngs`` is a seed or a key, and no ``Rngs``.
        ImportError: If Flax is not installed.

    Example:
        >>> import flax.linen as linen, jax.numpy as jnp, shardax as sx
        >>> norm = linen.BatchNorm(use_running_average=False, momentum=0.5)
        >>> layer = sx.bridge.from_linen(norm, jnp.ones((4, 2)), rngs=sx.Rngs(0))
        >>> _ = layer(jnp.ones((4, 2)))
        >>> layer.variables["batch_stats"]["mean"].value.tolist()
        [0.5, 0.5]
    """
    linen = library("flax.linen", "from_linen")
    if not isinstance(module, linen.Module):
        raise BridgeError(
            f"from_linen takes a flax.linen.Module, but was given {described(module)}."
        )

    rngs = check_rngs(rngs)
    if module.scope is None:
        keys = _keys(rngs, lambda name: True)
        if "default" in keys:
            keys.setdefault("params", keys["default"])
            del keys["default"]
        variables = module.init(keys, *example, **named)
    else:
        module, variables = module.unbind()

    converted = {path: _of_linen(path, leaf) for path, leaf in leaves_of(variables)}
    return _FromLinen(module, converted, rngs)
