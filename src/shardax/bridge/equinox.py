# SPDX-License-Identifier: Apache-2.0
"""Modules of Equinox inside shardax models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardax import BatchStat, Dict, Module, Param, Variable
from shardax.bridge.base import (
    Bridged,
    BridgeError,
    PeerStructure,
    described,
    leaves_of,
    library,
    put,
    write_back,
)
from shardax.extend import Path, PyTree, check_rngs, path_of_keys


class _Structure(PeerStructure):
    """A structure pickled as trees."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        # Equinox reads its own pickled definitions wrongly.
        treedef, paths, leaves, state_treedef = self.value
        return _read, (_numbered(treedef), paths, leaves, _numbered(state_treedef))


def _numbered(treedef: Any) -> PyTree:
    return jax.tree.unflatten(treedef, range(treedef.num_leaves))


def _read(module: PyTree, paths: object, leaves: object, state: PyTree) -> _Structure:
    return _Structure((jax.tree.structure(module), paths, leaves, jax.tree.structure(state)))


class _FromEquinox(Bridged):
    deterministic: bool | None = None

    def __init__(self, peer, variables: Mapping[Path, Variable], state, rngs) -> None:
        super().__init__(None, variables)
        self.peer = _Structure(peer)
        self.state = Dict()
        for path, variable in state.items():
            put(self.state, path, variable)
        self.rngs = rngs
        self.deterministic = None

    def _merged(self):
        treedef, paths, leaves, _ = self.peer.value
        variables = dict(leaves_of(self.variables))
        values = [
            leaf if path is None else variables[path].value
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, values)

    def call(self, method: str, *args, **kwargs):
        function = getattr(self._merged(), method)
        takes = inspect.signature(function).parameters
        if self.rngs is not None and "key" in takes and "key" not in kwargs:
            kwargs["key"] = self.rngs["dropout"]()
        if not len(self.state) or "state" not in takes:
            return function(*args, **kwargs)

        eqx = library("equinox", "from_equinox")
        old = {path: variable.value for path, variable in leaves_of(self.state)}
        state = jax.tree.unflatten(self.peer.value[3], old.values())
        returned = function(*args, state=state, **kwargs)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not is_pair or not isinstance(returned[1], eqx.nn.State):
            raise BridgeError(
                f"{method} of an Equinox module with state returns (result, state), but this one "
                f"returned {returned!r}."
            )

        new = dict(zip(old, jax.tree.leaves(returned[1]), strict=True))
        write_back(self.state, old, new, lambda path: BatchStat(new[path]))
        return returned[0]

    def _switch(self, **modes: bool) -> None:
        eqx = library("equinox", "from_equinox")
        module = eqx.nn.inference_mode(self._merged(), modes["deterministic"])
        structure, _ = _taken_apart(module)
        self.peer = _Structure((*structure, self.peer.value[3]))


def _taken_apart(module: object) -> tuple[tuple[Any, ...], dict[Path, Any]]:
    """Returns a tree's structure, and its arrays by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(module)
    paths: list[Path | None] = []
    static_leaves: list[Any] = []
    arrays: dict[Path, Any] = {}
    for key_path, leaf in leaves:
        path = path_of_keys(key_path)
        is_array = isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
        if is_array:
            arrays[path] = leaf
        paths.append(path if is_array else None)
        static_leaves.append(None if is_array else leaf)
    return (treedef, tuple(paths), tuple(static_leaves)), arrays


def from_equinox(module: object, state: Any = None, *, rngs: object = None) -> Bridged:
    """Makes a Module of one of Equinox.

    Arrays of floating-point and complex numbers become a ``Param``, other arrays a ``Variable``;
    what is no array is static. The state of layers such as ``eqx.nn.BatchNorm`` becomes
    ``BatchStat`` below ``state``; calls pass it on and keep what is returned, so that they return
    the result alone. ``train()`` and ``eval()`` set ``eqx.nn.inference_mode``.

    Args:
        module: An ``equinox.Module``, or a pytree with a call.
        state: The ``eqx.nn.State`` that ``eqx.nn.make_with_state`` returned beside the module.
            None: that with which it was made.
        rngs: Random streams, an ``sx.Rngs``: calls that take ``key`` and are given none draw it
            from ``dropout``.

    Returns:
        A Module to call like the peer, without its state.

    Raises:
        BridgeError: If it cannot be called, or its state is missing.
        ModuleError: If ``rngs`` is a seed or a key, and no ``Rngs``.
        ImportError: If Equinox is not installed.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, shardax as sx
        >>> mlp = sx.bridge.from_equinox(eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0)))
        >>> jax.vmap(mlp)(jnp.ones((5, 2))).shape
        (5, 3)
        >>> [path[1:] for path, _ in sx.iter_variables(mlp, sx.Param)][0]
        ('layers', 0, 'weight')
    """
    eqx = library("equinox", "from_equinox")
    if isinstance(module, (type, Module)) or not callable(module):
        raise BridgeError(f"from_equinox takes an eqx.Module, but was given {described(module)}.")
    if state is None:
        try:
            module, state = eqx.nn.make_with_state(lambda: module)()
        except ValueError as error:
            raise BridgeError(
                f"This {type(module).__name__} has state, which make_with_state took out of it. "
                f"Pass on what it returned: sx.bridge.from_equinox(module, state)."
            ) from error

    structure, arrays = _taken_apart(module)
    leaves: dict[Path, Variable] = {
        path: (Param if eqx.is_inexact_array(leaf) else Variable)(leaf)
        for path, leaf in arrays.items()
    }

    values, names = state.tree_flatten()
    stats: dict[Path, Variable] = {
        (name, *path_of_keys(key_path)): BatchStat(leaf)
        for name, value in zip(names, values, strict=True)
        for key_path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
    }
    return _FromEquinox((*structure, jax.tree.structure(state)), leaves, stats, check_rngs(rngs))
