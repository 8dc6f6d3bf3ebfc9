# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax and Equinox inside shardax models, and the reverse.

A *bridged* module keeps the arrays of its peer as Variables, and beside them the rest of it as a
static value: the graph definition of NNX, the module of Linen, the tree definition of Equinox. A
call puts both together, runs the peer's own code, and writes back the arrays that it replaced. So
every transform, sharding and checkpoint sees Variables alone, and no peer sees a transform.

Only arrays that the peer replaced are written: what it leaves alone is read and no more, so that
parameters stay readable where they must not be written.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax

from shardax import Dict, Module, RngStream, Variable
from shardax.errors import ShardaxError
from shardax.extend import Path, Static, needs_package

_MODES = frozenset({"deterministic", "use_running_average"})
_INSTALL = {"flax": "flax>=0.12.8", "equinox": "equinox>=0.13.8"}


class BridgeError(ShardaxError, ValueError):
    """Something no bridge between libraries can carry.

    Example:
        >>> import equinox as eqx, jax, shardax as sx
        >>> norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
        >>> sx.bridge.from_equinox(norm)
        Traceback (most recent call last):
            ...
        shardax.errors.BridgeError: This BatchNorm has state, which make_with_state took out...
    """


def library(name: str, caller: str) -> Any:
    """Returns the module of a peer, or raises with the command to install it."""
    with needs_package(f"sx.bridge.{caller}", _INSTALL[name.split(".")[0]]):
        return importlib.import_module(name)


class PeerStructure:
    """A peer's structure, equal to another one of equal content."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = _content_key(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerStructure) and self.key == other.key

    def __reduce__(self) -> Any:
        return PeerStructure, (self.value,)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def _content_key(value: object) -> Hashable:
    def by_hash(value: object) -> Hashable:
        hash(value)
        return value

    for key in (Static, by_hash):
        try:
            content = key(value)
            hash(content)
        except TypeError:
            continue
        return content
    if isinstance(value, tuple):
        return tuple(_content_key(part) for part in value)
    return id(value)


class Bridged(Module):
    """A module of another library; made by ``from_nnx``, ``from_linen`` or ``from_equinox``.

    Attributes:
        variables: Nested ``Dict`` of Variables, at the paths that the peer gives its arrays.

    Example:
        >>> import flax.linen as linen, jax.numpy as jnp, shardax as sx
        >>> layer = sx.bridge.from_linen(linen.Dense(3), jnp.ones((1, 2)), rngs=sx.Rngs(0))
        >>> isinstance(layer, sx.bridge.Bridged), layer.variables["params"]["kernel"].shape
        (True, (2, 3))
    """

    variables: Dict[Any, Any]

    def __init__(self, peer: Any, variables: Mapping[Path, Variable]) -> None:
        self.peer = PeerStructure(peer)
        self.variables = Dict()
        for path, variable in variables.items():
            put(self.variables, path, variable)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _MODES and value is not None:
            self._switch(**{name: value})

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the peer, and keeps its new state."""
        return self.call("__call__", *args, **kwargs)

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """Calls a method of the peer, and keeps its new state.

        Args:
            method: Name of the method.
            *args: Its arguments.
            **kwargs: Likewise.

        Returns:
            What the method returns.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> from flax import nnx
            >>> table = sx.bridge.from_nnx(nnx.Embed(5, 2, rngs=nnx.Rngs(0)))
            >>> table.call("attend", jnp.ones((1, 2))).shape
            (1, 5)
        """
        raise NotImplementedError(method)

    def _switch(self, **modes: bool) -> None:
        """Puts the peer into a mode of training or evaluation."""
        raise NotImplementedError(modes)


# --- trees of Variables ---------------------------------------------------------------------------


def put(holder: Dict[Any, Any], path: Path, variable: Any) -> None:
    """Puts a Variable into nested Dicts."""
    for key in path[:-1]:
        holder = holder.setdefault(key, Dict())
    holder[path[-1]] = variable


def leaves_of(holder: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the Variables in nested Dicts and streams, by path."""
    if isinstance(holder, (Dict, Mapping)):
        for key, child in holder.items():
            yield from leaves_of(child, (*path, key))
    elif isinstance(holder, RngStream):
        yield from (((*path, name), getattr(holder, name)) for name in ("count", "key"))
    else:
        yield path, holder


def nested(flat: Mapping[Path, object]) -> dict[Any, Any]:
    """Returns nested dicts of values by path."""
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        holder = root
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = value
    return root


def same(old: Any, new: Any) -> bool:
    """Whether two values are the same arrays."""
    if old is new:
        return True
    old_leaves, old_treedef = jax.tree.flatten(old)
    new_leaves, new_treedef = jax.tree.flatten(new)
    pairs = zip(old_leaves, new_leaves, strict=False)
    return old_treedef == new_treedef and all(leaf is other for leaf, other in pairs)


def sown_on(old: Any, sown: Any) -> Any:
    """Returns earlier and newly sown values, together."""
    are_tuples = isinstance(old, tuple) and isinstance(sown, tuple)
    return (*old, *sown) if are_tuples else sown


def write_back(
    holder: Dict[Any, Any],
    old: Mapping[Path, object],
    new: Mapping[Path, object],
    make: Callable[[Path], Variable],
) -> None:
    """Writes changed values, adds new ones and removes others."""
    variables = dict(leaves_of(holder))
    for path, value in new.items():
        present = variables.get(path)
        if present is None:
            put(holder, path, make(path))
        elif path not in old:  # sown, which starts empty in each call
            present.value = sown_on(present.value, value)
        elif not same(old[path], value):
            present.value = value
    for path in old.keys() - new.keys():
        inner = functools.reduce(lambda part, key: part[key], path[:-1], holder)
        del inner[path[-1]]


def axis_names(names: Any, value: Any) -> tuple[Any, ...] | None:
    """Returns the axis names of an array from a peer's names or spec."""
    names = getattr(names, "spec", names)
    if not names or not hasattr(value, "ndim"):
        return None
    return (*names, *[None] * (value.ndim - len(names)))


def described(value: Any) -> str:
    """Returns the text of a given value, for errors."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__name__}: make an instance"
    return f"a {type(value).__name__}"
