# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax NNX inside shardax models, and shardax models inside NNX."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from shardax import (
    BatchStat,
    Cache,
    Intermediate,
    MetricState,
    Module,
    OptState,
    Param,
    Perturbation,
    RngState,
    RngStream,
    State,
    Variable,
    clone,
    iter_variables,
    merge,
    pop,
)
from shardax import graphdef as graphdef_of
from shardax.bridge.base import (
    Bridged,
    BridgeError,
    PeerStructure,
    axis_names,
    described,
    leaves_of,
    library,
    nested,
    put,
    same,
    sown_on,
    write_back,
)
from shardax.extend import Path, PyTree, format_path

_KINDS = (Param, BatchStat, Cache, Intermediate, Perturbation, RngState, OptState, MetricState)
"""Variable types that NNX has too, under the same names."""


class _FromNNX(Bridged):
    deterministic: bool | None = None
    use_running_average: bool | None = None

    def __init__(self, peer, variables: Mapping[Path, Variable]) -> None:
        super().__init__(peer, variables)
        self.deterministic = None
        self.use_running_average = None

    def _merged(self) -> tuple[Any, dict[Path, Any]]:
        leaves = leaves_of(self.variables)
        old = {path: leaf.value for path, leaf in leaves if not isinstance(leaf, Intermediate)}
        return library("flax.nnx", "from_nnx").merge(self.peer.value, nested(old)), old

    def call(self, method: str, *args, **kwargs):
        nnx = library("flax.nnx", "from_nnx")
        module, old = self._merged()
        result = getattr(module, method)(*args, **kwargs)
        sown = dict(nnx.to_flat_state(nnx.pop(module, nnx.Intermediate)))
        peer, state = nnx.split(module)
        peers = {**dict(nnx.to_flat_state(state)), **sown}
        new = {path: _nnx_value(peer_variable) for path, peer_variable in peers.items()}
        write_back(self.variables, old, new, lambda path: _of_nnx(peers[path]))
        self._keep(peer)
        return result

    def _keep(self, peer: object) -> None:
        structure = PeerStructure(peer)
        if structure != self.peer:
            self.peer = structure

    def _switch(self, **modes: bool) -> None:
        module, _ = self._merged()
        module.set_attributes(raise_if_not_found=False, **modes)
        self._keep(library("flax.nnx", "from_nnx").graphdef(module))


def _nnx_value(leaf):
    return leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf


def _of_nnx(peer) -> Variable:
    """Returns a Variable like one of NNX."""
    nnx = library("flax.nnx", "from_nnx")
    value = _nnx_value(peer)
    if not isinstance(peer, nnx.Variable):
        return Variable(value)
    metadata = peer.get_metadata()
    kind, is_exact = _matching(
        type(peer), {getattr(nnx, base.__name__, None): base for base in _KINDS}
    )
    tag = metadata.get("tag") or (None if is_exact else type(peer).__name__)
    axes = axis_names(metadata.get("out_sharding"), value)
    return kind(value, axes=axes, **({} if tag is None else {"tag": tag}))


def _matching(kind: type, table: Mapping[Any, type]) -> tuple[Any, bool]:
    """Returns the nearest base's counterpart, and whether it says all."""
    for base in kind.__mro__:
        if base in table:
            return table[base], base is kind or issubclass(table[base], RngState)
    return Variable, kind.__name__ == "Variable"


def from_nnx(module: object) -> Bridged:
    """Makes a Module of one of Flax NNX.

    Its Variables become Variables of the matching kind: ``nnx.Param`` a ``Param``, and likewise
    ``BatchStat``, ``Cache``, ``Intermediate``, ``Perturbation``, ``RngState`` and ``OptState``,
    with their subclasses, whose names become tags; any other is a ``Variable``. Names in their
    metadata become axes. ``train()`` and ``eval()`` reach the layers of the peer.

    Args:
        module: An ``nnx.Module``, also an abstract one. Its arrays are shared, not copied; it is
            not changed by calls.

    Returns:
        A Module to call like the peer.

    Raises:
        BridgeError: If it is no ``nnx.Module``.
        ImportError: If Flax is not installed.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from flax import nnx
        >>> class Model(sx.Module):
        ...     def __init__(self):
        ...         self.layer = sx.bridge.from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        ...     def __call__(self, x):
        ...         return self.layer(x)
        >>> gradients = sx.grad(lambda model: model(jnp.ones((1, 2))).sum())(Model())
        >>> gradients["layer"]["variables"]["bias"].tolist()
        [1.0, 1.0, 1.0]
    """
    nnx = library("flax.nnx", "from_nnx")
    if not isinstance(module, nnx.Module):
        raise BridgeError(f"from_nnx takes an nnx.Module, but was given {described(module)}.")
    peer, state = nnx.split(module)
    leaves: dict[Path, Any] = {path: _of_nnx(leaf) for path, leaf in nnx.to_flat_state(state)}
    bridged = _FromNNX(peer, leaves)
    for path, leaf in leaves.items():
        key = leaves.get((*path[:-1], "key"))
        if path[-1] == "count" and isinstance(leaf, RngState) and isinstance(key, RngState):
            put(bridged.variables, path[:-1], _stream(key, leaf))
    return bridged


def _stream(key: RngState[Any], count: RngState[Any]) -> RngStream:
    """Returns a stream of an NNX stream's state, split by transforms."""
    stream = RngStream(key.value, str(key.metadata.get("tag", "default")))
    stream.key, stream.count = key, count
    return stream


@functools.cache
def _part_class():
    """Returns the class of holders of Variables under names."""
    nnx = library("flax.nnx", "to_nnx")
    return type("Part", (nnx.Module,), {"__module__": __name__})


@functools.cache
def _nnx_class():
    """Returns the class of NNX modules around models."""
    nnx = library("flax.nnx", "to_nnx")

    class FromShardax(nnx.Module):
        def __init__(self, model) -> None:
            self.variables = _part_class()()
            self._take(clone(model), {})

        def _take(self, model: object, old: Mapping[Path, object]) -> None:
            sown = pop(model, Intermediate)
            structure = PeerStructure(graphdef_of(model))
            if getattr(self, "structure", None) != structure:
                self.structure = structure
            for path, variable in iter_variables(model):
                if path not in old:
                    _nest(self.variables, path, _to_nnx(nnx, variable))
                elif not same(old[path], variable.value):
                    _at(self.variables, path).set_value(variable.value)
            for path, value in sown.flat().items():
                present = _at(self.variables, path)
                old_sown = () if present is None else present.get_value()
                intermediate = Intermediate(sown_on(old_sown, value))
                _nest(self.variables, path, _to_nnx(nnx, intermediate))

        def __call__(self, *args: object, **kwargs: object) -> PyTree:
            graphdef = self.structure.value
            old = {path: _at(self.variables, path).get_value() for path in graphdef.leaf_paths}
            model = merge(graphdef, State.from_flat(old))
            result = model(*args, **kwargs)
            self._take(model, old)
            return result

    FromShardax.__qualname__ = "FromShardax"
    return FromShardax


def _to_nnx(nnx, variable: Variable):
    table = {base: getattr(nnx, base.__name__, nnx.Variable) for base in _KINDS}
    bases = type(variable).__mro__
    kind = next((table[base] for base in bases if base in table), nnx.Variable)
    metadata: dict[str, Any] = {"eager_sharding": False}
    if variable.axes is not None:
        metadata["out_sharding"] = variable.axes
    if "tag" in variable.metadata:
        metadata["tag"] = variable.metadata["tag"]
    return kind(variable.value, **metadata)


def _nest(holder: object, path: Path, variable: object) -> None:
    for key in path[:-1]:
        if str(key) not in vars(holder):
            setattr(holder, str(key), _part_class()())
        holder = getattr(holder, str(key))
    setattr(holder, str(path[-1]), variable)


def _at(holder, path: Path) -> Any:
    # Not getattr, which finds methods too: a layer may be called "items".
    return functools.reduce(
        lambda part, key: None if part is None else vars(part).get(str(key)), path, holder
    )


def _check_names(model: Module) -> None:
    """Raises if two Variables would have one name in NNX."""
    names: dict[tuple[str, ...], Path] = {}
    for path, _ in iter_variables(model):
        first_path = names.setdefault(tuple(map(str, path)), path)
        if first_path != path or [*map(type, first_path)] != [*map(type, path)]:
            raise BridgeError(
                f"to_nnx names Variables by strings, but {format_path(first_path)} and "
                f"{format_path(path)} then have one name. Rename a key of the model."
            )


def to_nnx(model: Module) -> Any:
    """Makes a Flax NNX module of a shardax model.

    It holds the model's arrays as ``nnx.Variable`` of the matching kind (``Param`` an
    ``nnx.Param``, ...), below ``variables`` at the paths of the model, with the axes as
    ``out_sharding``. Calls run the model and keep what it writes.

    Args:
        model: A Module that can be called. Its arrays are shared, not copied; it is not changed.

    Returns:
        An ``nnx.Module`` to call like the model.

    Raises:
        BridgeError: If it is no Module, or has two Variables of one name but for the
            types of its parts, such as 0 and "0".
        ImportError: If Flax is not installed.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from flax import nnx
        >>> layer = sx.bridge.to_nnx(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> gradients = nnx.grad(lambda layer: layer(jnp.ones((1, 2))).sum())(layer)
        >>> gradients["variables"]["kernel"].get_value().shape
        (2, 3)
    """
    nnx_class = _nnx_class()
    if not isinstance(model, Module):
        raise BridgeError(f"to_nnx takes a shardax Module, but was given {described(model)}.")
    _check_names(model)
    return nnx_class(model)
