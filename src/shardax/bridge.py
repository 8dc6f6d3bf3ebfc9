# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax and Equinox inside shardax models, and shardax models inside Flax.

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
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardax._core.containers import Dict
from shardax._core.errors import ShardaxError
from shardax._core.graph.paths import Path, format_path, plain_path
from shardax._core.graph.static import exact_key
from shardax._core.init.lazy import check_rngs
from shardax._core.init.rng import Rngs, RngStream
from shardax._core.module import Module
from shardax._core.state import split_merge
from shardax._core.variable import (
    BatchStat,
    Cache,
    Intermediate,
    MetricState,
    OptState,
    Param,
    Perturbation,
    RngState,
    Variable,
)

__all__ = ["BridgeError", "Bridged", "from_equinox", "from_linen", "from_nnx", "to_nnx"]

_KINDS = (Param, BatchStat, Cache, Intermediate, Perturbation, RngState, OptState, MetricState)
"""Variable types that NNX has too, under the same names."""

_COLLECTIONS: dict[str, type[Variable[Any]]] = {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}
_MODES = frozenset({"deterministic", "use_running_average"})
_INSTALL = {"flax": "flax>=0.12.8", "equinox": "equinox>=0.13.8"}


class BridgeError(ShardaxError, ValueError):
    """Something that no bridge between libraries can carry.

    Example:
        >>> import equinox as eqx, jax, shardax as sx
        >>> norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
        >>> sx.bridge.from_equinox(norm)
        Traceback (most recent call last):
            ...
        shardax.errors.BridgeError: This BatchNorm has state, which make_with_state took out...
    """


def _library(name: str, caller: str) -> Any:
    """Imports a peer, or tells how to install it."""
    package = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"sx.bridge.{caller} needs {package}: pip install '{_INSTALL[package]}'."
        ) from error


class _Static:
    """A peer's structure, equal to another one of equal content."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = _content_key(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key

    def __reduce__(self) -> Any:
        return _Static, (self.value,)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def _content_key(value: Any) -> Hashable:
    def by_hash(value: Any) -> Hashable:
        hash(value)
        return value

    for key in (exact_key, by_hash):
        try:
            found = key(value)
            hash(found)
        except TypeError:
            continue
        return found
    if isinstance(value, tuple):
        return tuple(_content_key(item) for item in value)
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

    def __init__(self, peer: Any, variables: Mapping[Path, Variable[Any]]) -> None:
        self.peer = _Static(peer)
        self.variables = Dict()
        for path, variable in variables.items():
            _put(self.variables, path, variable)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _MODES and value is not None:
            self._switch(**{name: value})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the peer, and keeps what it writes."""
        return self.call("__call__", *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the peer by name, and keeps what it writes.

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


def _put(holder: Dict[Any, Any], path: Path, variable: Any) -> None:
    for key in path[:-1]:
        holder = holder.setdefault(key, Dict())
    holder[path[-1]] = variable


def _leaves(holder: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the Variables in nested Dicts and streams, by path."""
    if isinstance(holder, (Dict, Mapping)):
        for key, item in holder.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(holder, RngStream):
        yield from (((*path, name), getattr(holder, name)) for name in ("count", "key"))
    else:
        yield path, holder


def _nested(flat: Mapping[Path, Any]) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for path, value in flat.items():
        holder = nested
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = value
    return nested


def _same(old: Any, new: Any) -> bool:
    """Whether two values are the same arrays."""
    if old is new:
        return True
    olds, news = jax.tree.flatten(old), jax.tree.flatten(new)
    return olds[1] == news[1] and all(a is b for a, b in zip(olds[0], news[0], strict=True))


def _write_back(
    holder: Dict[Any, Any],
    old: Mapping[Path, Any],
    new: Mapping[Path, Any],
    make: Callable[[Path], Variable[Any]],
) -> None:
    """Writes the values that differ, adds new ones and removes those that are gone."""
    variables = dict(_leaves(holder))
    for path, value in new.items():
        present = variables.get(path)
        if present is None:
            _put(holder, path, make(path))
        elif path not in old:  # sown, which starts empty in each call
            present.value = (*present.value, *value)
        elif not _same(old[path], value):
            present.value = value
    for path in old.keys() - new.keys():
        inner = functools.reduce(lambda part, key: part[key], path[:-1], holder)
        del inner[path[-1]]


def _axes(names: Any, value: Any) -> tuple[Any, ...] | None:
    """Axis names of an array from a peer's names or spec of it."""
    names = getattr(names, "spec", names)
    if not names or not hasattr(value, "ndim"):
        return None
    return (*names, *[None] * (value.ndim - len(names)))


# --- Flax NNX -------------------------------------------------------------------------------------


class _FromNNX(Bridged):
    deterministic: bool | None = None
    use_running_average: bool | None = None

    def __init__(self, peer: Any, variables: Mapping[Path, Variable[Any]]) -> None:
        super().__init__(peer, variables)
        self.deterministic = None
        self.use_running_average = None

    def _merged(self) -> tuple[Any, dict[Path, Any]]:
        held = _leaves(self.variables)
        old = {path: item.value for path, item in held if not isinstance(item, Intermediate)}
        return _library("flax.nnx", "from_nnx").merge(self.peer.value, _nested(old)), old

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        nnx = _library("flax.nnx", "from_nnx")
        module, old = self._merged()
        result = getattr(module, method)(*args, **kwargs)
        sown = dict(nnx.to_flat_state(nnx.pop(module, nnx.Intermediate)))
        peer, state = nnx.split(module)
        found = {**dict(nnx.to_flat_state(state)), **sown}
        new = {path: _nnx_value(item) for path, item in found.items()}
        _write_back(self.variables, old, new, lambda path: _of_nnx(found[path]))
        self._keep(peer)
        return result

    def _keep(self, peer: Any) -> None:
        if (kept := _Static(peer)) != self.peer:
            self.peer = kept

    def _switch(self, **modes: bool) -> None:
        module, _ = self._merged()
        module.set_attributes(raise_if_not_found=False, **modes)
        self._keep(_library("flax.nnx", "from_nnx").graphdef(module))


def _nnx_value(item: Any) -> Any:
    return item.get_raw_value() if hasattr(item, "get_raw_value") else item


def _of_nnx(item: Any) -> Variable[Any]:
    """Returns a Variable of the kind, value and axes of one of NNX."""
    nnx = _library("flax.nnx", "from_nnx")
    value = _nnx_value(item)
    if not isinstance(item, nnx.Variable):
        return Variable(value)
    metadata = item.get_metadata()
    kind, known = _matching(
        type(item), {getattr(nnx, each.__name__, None): each for each in _KINDS}
    )
    tag = metadata.get("tag") or (None if known else type(item).__name__)
    axes = _axes(metadata.get("out_sharding"), value)
    return kind(value, axes=axes, **({} if tag is None else {"tag": tag}))


def _matching(kind: type, table: Mapping[Any, type]) -> tuple[Any, bool]:
    """Returns what the nearest base stands for, and whether that is all of the type."""
    for base in kind.__mro__:
        if base in table:
            return table[base], base is kind or issubclass(table[base], RngState)
    return Variable, kind.__name__ == "Variable"


def from_nnx(module: Any) -> Bridged:
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
    nnx = _library("flax.nnx", "from_nnx")
    if not isinstance(module, nnx.Module):
        raise BridgeError(f"from_nnx takes an nnx.Module, but was given {_described(module)}.")
    peer, state = nnx.split(module)
    made: dict[Path, Any] = {path: _of_nnx(item) for path, item in nnx.to_flat_state(state)}
    bridged = _FromNNX(peer, made)
    for path, item in made.items():
        key = made.get((*path[:-1], "key"))
        if path[-1] == "count" and isinstance(item, RngState) and isinstance(key, RngState):
            _put(bridged.variables, path[:-1], _stream(key, item))
    return bridged


def _stream(key: RngState[Any], count: RngState[Any]) -> RngStream:
    """Returns a stream of an NNX stream's state, which transforms split as one of ours."""
    stream = RngStream(key.value, str(key.metadata.get("tag", "default")))
    stream.key, stream.count = key, count
    return stream


def _described(value: Any) -> str:
    name = f"{value.__module__}.{value.__name__}" if isinstance(value, type) else None
    return f"the class {name}: make an instance" if name else f"a {type(value).__name__}"


@functools.cache
def _nnx_class() -> Any:
    """Returns the class of NNX modules around models; made when Flax is there."""
    nnx = _library("flax.nnx", "to_nnx")

    class FromShardax(nnx.Module):
        def __init__(self, model: Any) -> None:
            self.variables = nnx.Dict()
            self._take(model, {})

        def _take(self, model: Any, old: Mapping[Path, Any]) -> None:
            structure = _Static(split_merge.graphdef(model))
            if getattr(self, "structure", None) != structure:
                self.structure = structure
            for path, variable in split_merge.iter_variables(model):
                if path not in old:
                    _nest(nnx, self.variables, path, _to_nnx(nnx, variable))
                elif not _same(old[path], variable.value):
                    _at(self.variables, path).set_value(variable.value)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            graphdef = self.structure.value
            old = {path: _at(self.variables, path).get_value() for path in graphdef.leaf_paths}
            model = split_merge.merge(graphdef, split_merge.State.from_flat(old))
            result = model(*args, **kwargs)
            self._take(model, old)
            return result

    FromShardax.__qualname__ = "FromShardax"
    return FromShardax


def _to_nnx(nnx: Any, variable: Variable[Any]) -> Any:
    table = {each: getattr(nnx, each.__name__, nnx.Variable) for each in _KINDS}
    bases = type(variable).__mro__
    kind = next((table[base] for base in bases if base in table), nnx.Variable)
    metadata: dict[str, Any] = {"eager_sharding": False}
    if variable.axes is not None:
        metadata["out_sharding"] = variable.axes
    if "tag" in variable.metadata:
        metadata["tag"] = variable.metadata["tag"]
    return kind(variable.value, **metadata)


def _nest(nnx: Any, holder: Any, path: Path, variable: Any) -> None:
    for key in path[:-1]:
        if not hasattr(holder, str(key)):
            setattr(holder, str(key), nnx.Dict())
        holder = getattr(holder, str(key))
    setattr(holder, str(path[-1]), variable)


def _at(holder: Any, path: Path) -> Any:
    return functools.reduce(lambda part, key: getattr(part, str(key)), path, holder)


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
        BridgeError: If it is no Module, or has Variables at paths that NNX cannot name.
        ImportError: If Flax is not installed.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from flax import nnx
        >>> layer = sx.bridge.to_nnx(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> gradients = nnx.grad(lambda layer: layer(jnp.ones((1, 2))).sum())(layer)
        >>> gradients["variables"]["kernel"].get_value().shape
        (2, 3)
    """
    made = _nnx_class()
    if not isinstance(model, Module):
        raise BridgeError(f"to_nnx takes a shardax Module, but was given {_described(model)}.")
    return made(model)


# --- Flax Linen -----------------------------------------------------------------------------------


class _FromLinen(Bridged):
    def __init__(self, peer: Any, variables: Mapping[Path, Variable[Any]], rngs: Any) -> None:
        super().__init__(peer, variables)
        self.rngs = rngs

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        linen = _library("flax.linen", "from_linen")
        held = dict(_leaves(self.variables))
        old = {path: item.value for path, item in held.items() if not _is_sown(item)}
        fixed = linen.DenyList(["params", "intermediates"])
        keys = _keys(self.rngs, lambda name: name not in ("default", "params"))
        run = functools.partial(
            self.peer.value.apply, _nested(old), *args, mutable=fixed, method=method, **kwargs
        )
        try:
            result, written = run(rngs=keys)
        except _library("flax.errors", "from_linen").InvalidRngError:
            # Only where the call draws: what needs no keys leaves the default stream alone.
            if not (others := _keys(self.rngs, lambda name: name == "default")):
                raise
            result, written = run(rngs={**keys, "params": others["default"]})
        found = {path: linen.unbox(value) for path, value in _leaves(written)}
        new = {**{path: old[path] for path in old if path[0] == "params"}, **found}
        gone = {path: value for path, value in old.items() if path not in new}
        boxed = dict(_leaves(written))
        _write_back(self.variables, old, {**new, **gone}, lambda path: _of_linen(path, boxed[path]))
        return result


def _keys(rngs: Rngs | None, chosen: Callable[[str], bool]) -> dict[str, jax.Array]:
    streams = () if rngs is None else rngs.streams()
    return {name: stream() for name, stream in streams if chosen(name)}


def _is_sown(variable: Any) -> bool:
    return isinstance(variable, Intermediate)


def _of_linen(path: Path, leaf: Any) -> Variable[Any]:
    """Returns a Variable of the kind of a collection, with the names in a box."""
    linen = _library("flax.linen", "from_linen")
    names = getattr(leaf, "names", None) if isinstance(leaf, linen.meta.AxisMetadata) else None
    value = leaf.value if names is not None else linen.unbox(leaf)
    if isinstance(value, tuple):  # sown
        return Intermediate(value, tag=str(path[0]))
    if path[0] in _COLLECTIONS:
        return _COLLECTIONS[str(path[0])](value, axes=_axes(names, value))
    return Variable(value, axes=_axes(names, value), tag=str(path[0]))


def from_linen(module: Any, *example: Any, rngs: Any = None, **named: Any) -> Bridged:
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
        SeedError: If ``rngs`` is a seed or a key, and no ``Rngs``.
        ImportError: If Flax is not installed.

    Example:
        >>> import flax.linen as linen, jax.numpy as jnp, shardax as sx
        >>> norm = linen.BatchNorm(use_running_average=False, momentum=0.5)
        >>> layer = sx.bridge.from_linen(norm, jnp.ones((4, 2)), rngs=sx.Rngs(0))
        >>> _ = layer(jnp.ones((4, 2)))
        >>> layer.variables["batch_stats"]["mean"]
        BatchStat(Array([0.5, 0.5], dtype=float32))
    """
    linen = _library("flax.linen", "from_linen")
    if not isinstance(module, linen.Module):
        raise BridgeError(
            f"from_linen takes a flax.linen.Module, but was given {_described(module)}."
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
    made = {path: _of_linen(path, leaf) for path, leaf in _leaves(variables)}
    return _FromLinen(module, made, rngs)


# --- Equinox --------------------------------------------------------------------------------------


class _FromEquinox(Bridged):
    deterministic: bool | None = None

    def __init__(
        self, peer: Any, variables: Mapping[Path, Variable[Any]], state: Any, rngs: Any
    ) -> None:
        super().__init__(peer, variables)
        self.state = Dict()
        for path, variable in state.items():
            _put(self.state, path, variable)
        self.rngs = rngs
        self.deterministic = None

    def _merged(self) -> Any:
        treedef, paths, leaves, _ = self.peer.value
        held = dict(_leaves(self.variables))
        values = [
            leaf if path is None else held[path].value
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, values)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self._merged(), method)
        takes = inspect.signature(function).parameters
        if self.rngs is not None and "key" in takes and "key" not in kwargs:
            kwargs["key"] = self.rngs["dropout"]()
        if not len(self.state) or "state" not in takes:
            return function(*args, **kwargs)
        eqx = _library("equinox", "from_equinox")
        old = {path: item.value for path, item in _leaves(self.state)}
        state = jax.tree.unflatten(self.peer.value[3], old.values())
        returned = function(*args, state=state, **kwargs)
        if not (
            isinstance(returned, tuple)
            and len(returned) == 2
            and isinstance(returned[1], eqx.nn.State)
        ):
            raise BridgeError(
                f"{method} of an Equinox module with state returns (result, state), but this one "
                f"returned {returned!r}."
            )
        new = dict(zip(old, jax.tree.leaves(returned[1]), strict=True))
        _write_back(self.state, old, new, lambda path: BatchStat(new[path]))
        return returned[0]

    def _switch(self, **modes: bool) -> None:
        eqx = _library("equinox", "from_equinox")
        module = eqx.nn.inference_mode(self._merged(), modes["deterministic"])
        structure, _ = _taken_apart(module)
        self.peer = _Static((*structure, self.peer.value[3]))


def _taken_apart(module: Any) -> tuple[tuple[Any, ...], dict[Path, Any]]:
    """Returns tree definition, paths of arrays and other leaves; and the arrays by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(module)
    paths: list[Path | None] = []
    others: list[Any] = []
    arrays: dict[Path, Any] = {}
    for key_path, leaf in leaves:
        path = plain_path(key_path)
        is_array = isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
        if is_array:
            arrays[path] = leaf
        paths.append(path if is_array else None)
        others.append(None if is_array else leaf)
    return (treedef, tuple(paths), tuple(others)), arrays


def from_equinox(module: Any, state: Any = None, *, rngs: Any = None) -> Bridged:
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
        SeedError: If ``rngs`` is a seed or a key, and no ``Rngs``.
        ImportError: If Equinox is not installed.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, shardax as sx
        >>> mlp = sx.bridge.from_equinox(eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0)))
        >>> jax.vmap(mlp)(jnp.ones((5, 2))).shape
        (5, 3)
        >>> [path[1:] for path, _ in sx.iter_variables(mlp, sx.Param)][0]
        ('layers', 0, 'weight')
    """
    eqx = _library("equinox", "from_equinox")
    if isinstance(module, (type, Module)) or not callable(module):
        raise BridgeError(f"from_equinox takes an eqx.Module, but was given {_described(module)}.")
    if state is None:
        try:
            module, state = eqx.nn.make_with_state(lambda: module)()
        except ValueError as error:
            raise BridgeError(
                f"This {type(module).__name__} has state, which make_with_state took out of it. "
                f"Pass it on: module, state = eqx.nn.make_with_state({type(module).__name__})(...); "
                f"sx.bridge.from_equinox(module, state)."
            ) from error
    structure, arrays = _taken_apart(module)
    made: dict[Path, Variable[Any]] = {
        path: (Param if eqx.is_inexact_array(leaf) else Variable)(leaf)
        for path, leaf in arrays.items()
    }
    values, names = state.tree_flatten()
    kept: dict[Path, Variable[Any]] = {
        (name, *plain_path(key_path)): BatchStat(leaf)
        for name, value in zip(names, values, strict=True)
        for key_path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
    }
    return _FromEquinox((*structure, jax.tree.structure(state)), made, kept, check_rngs(rngs))
