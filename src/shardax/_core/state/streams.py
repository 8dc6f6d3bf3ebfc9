# SPDX-License-Identifier: Apache-2.0
"""Random streams of a model, forked, split or broadcast by filter.

A *forked* stream is a new one whose key was drawn from the old one; a *split* stream has several
keys, for ``vmap`` and ``scan``; a *broadcast* stream has one key several times. Each of these takes
one draw from the old stream, so what is drawn later differs from what the new one gives.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core import errors
from shardax._core.checks import Options, is_integer
from shardax._core.errors import ModuleError
from shardax._core.graph import flatten
from shardax._core.graph.paths import Path, PyTree, plain_path
from shardax._core.init.rng import RngStream
from shardax._core.state.filters import (
    Everything,
    Filter,
    Predicate,
    first_match,
    to_predicate,
    to_predicates,
)
from shardax._core.state.split_merge import iter_modules
from shardax._core.state.walk import recursive_map
from shardax._core.threads import OneThread

_options = Options(ModuleError)
_replacing = OneThread("forks or splits the random stream", "and would put its old keys back")
Sizes = int | tuple[int, ...] | Mapping[Filter, int | tuple[int, ...] | None] | None


class _Rule(NamedTuple):
    """What happens to the streams that one option chooses."""

    name: str
    predicates: list[Predicate]
    shapes: list[tuple[int, ...] | None]  # None for streams that are not chosen

    def match(self, path: Path, stream: RngStream) -> tuple[Predicate, tuple[int, ...]] | None:
        """Returns (predicate, shape) for a stream, or None."""
        position = first_match(self.predicates, path, stream.key)
        if position is None:
            return None
        shape = self.shapes[position]
        return None if shape is None else (self.predicates[position], shape)


class _StreamRules:
    """The options of a call, checked."""

    def __init__(self, split: Sizes, fork: Filter, broadcast: Sizes, only: Filter) -> None:
        self.only = to_predicate(only)
        self.rules = [_sizes("split", split), _sizes("broadcast", broadcast)]
        self.rules.append(_Rule("fork", [to_predicate(fork)], [()]))

    def choose(self, path: Path, stream: RngStream) -> bool:
        """Whether a rule matches a stream."""
        return self.only(path, stream.key) and any(rule.match(path, stream) for rule in self.rules)

    def key_for(self, path: Path, stream: RngStream) -> jax.Array | None:
        """Returns the new key of a stream, or None for no rule."""
        if not self.only(path, stream.key):
            return None

        # What chooses the stream by name has precedence over what chooses all.
        by_name: list[tuple[_Rule, tuple[int, ...]]] = []
        for_all: list[tuple[_Rule, tuple[int, ...]]] = []
        for rule in self.rules:
            match = rule.match(path, stream)
            if match is not None:
                predicate, shape = match
                chosen = for_all if isinstance(predicate, Everything) else by_name
                chosen.append((rule, shape))

        candidates = by_name or for_all
        if not candidates:
            return None
        if len(candidates) > 1:
            matching = {rule.name for rule, _ in (*by_name, *for_all)}
            raise errors.stream_chosen_twice(
                path, [rule.name for rule in self.rules if rule.name in matching]
            )

        ((rule, shape),) = candidates
        key = stream()
        match rule.name:
            case "split":
                return jax.random.split(key, shape)
            case "broadcast":
                return jnp.broadcast_to(key, shape)
            case _:
                return key


def _sizes(name: str, sizes: Sizes) -> _Rule:
    """Returns the rule of an option that has sizes, by filter or for all streams."""
    if sizes is None:
        entries = {}
    elif isinstance(sizes, Mapping):
        entries = dict(sizes)
    else:
        entries = {...: sizes}

    shapes: list[tuple[int, ...] | None] = []
    for size in entries.values():
        if size is None:
            shapes.append(None)
            continue
        shape = size if isinstance(size, tuple) else (size,)
        fits = bool(shape) and all(is_integer(number) and number > 0 for number in shape)
        _options.check(
            name,
            sizes,
            fits,
            "numbers of keys",
            f"Write {name}=4, or by filter, {name}={{'dropout': 4}}.",
        )
        shapes.append(tuple(map(int, shape)))
    return _Rule(name, to_predicates(list(entries)), shapes)


def with_rngs(
    tree: object = None,
    *,
    split: Sizes = None,
    fork: Filter = None,
    broadcast: Sizes = None,
    only: Filter = ...,
) -> Any:
    """Makes a model with other random streams, or a decorator.

    Args:
        tree: A Module, ``Rngs`` or pytree of them. Left out: returns a decorator of functions,
            whose arguments have the new streams during the call, in place.
        split: How many keys streams get, on leading axes: a number or a shape for all, or a mapping
            from filters of streams to these. The first that matches decides; None does not split.
        fork: Filter of the streams that are forked. A stream's name is a filter.
        broadcast: How often streams get one key, as for ``split``.
        only: Filter of the streams that are looked at.

    Returns:
        A new tree with new Modules and streams, and with the same Variables otherwise; streams that
        nothing chooses stay. Or a decorator: after a call, also one that raises, the streams go on
        where they were, one draw further.

    Raises:
        FilterError: If two options choose one stream.
        ModuleError: If a size is no number of keys.
        ConcurrentWriteError: In a decorated call, if another thread is in one with its streams.

    Example:
        >>> import shardax as sx
        >>> rngs = sx.Rngs(params=0, dropout=1)
        >>> new = sx.with_rngs(rngs, split={"dropout": 4}, fork="params")
        >>> new.dropout.key.shape, new.params.key.shape, int(rngs.params.count)
        ((4,), (), 1)
        >>> @sx.with_rngs(split={"dropout": 4})
        ... def shape(rngs):
        ...     return rngs.dropout.key.shape
        >>> shape(rngs), rngs.dropout.key.shape
        ((4,), ())
    """
    rules = _StreamRules(split, fork, broadcast, only)
    if tree is None:
        return functools.partial(_around, rules)

    new: dict[int, RngStream | None] = {}  # by ``id`` of the key's Variable, which views share

    def replaced(path: Path, part):
        if not isinstance(part, RngStream):
            return part
        if id(part.key) not in new:
            key = rules.key_for(path, part)
            new[id(part.key)] = None if key is None else RngStream(key, part.name)
        return new[id(part.key)] or part

    return recursive_map(replaced, tree)


def _around(rules: _StreamRules, function: Callable[..., object]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args, **kwargs) -> PyTree:
        with _replaced(signature.bind(*args, **kwargs).arguments, rules):
            return function(*args, **kwargs)

    return run


def fork_rngs(
    tree: object = None, *, split: Sizes = None, broadcast: Sizes = None, only: Filter = ...
) -> Any:
    """Forks the random streams of a model for a block, or those of a function's arguments.

    Args:
        tree: A Module, ``Rngs`` or pytree of them. Left out: returns a decorator of functions,
            whose arguments have forked streams during the call.
        split: Streams that are split instead, and into how many keys, as for ``with_rngs``.
        broadcast: Streams that get one key several times, as for ``with_rngs``.
        only: Filter of the streams that are forked; the others go on.

    Returns:
        A context manager, or a decorator. After the block or call the streams go on where they
        were, one draw further.

    Raises:
        FilterError: If two options choose one stream.
        ModuleError: If a size is no number of keys.
        ConcurrentWriteError: If another thread is in such a block with one of the streams.

    Example:
        >>> import jax, shardax as sx
        >>> rngs = sx.Rngs(0, dropout=1)
        >>> with sx.fork_rngs(rngs, split={"dropout": 3}):
        ...     keys = sx.vmap(lambda rngs: rngs.dropout(), in_axes=(sx.StateAxes(
        ...         {"dropout": 0, ...: None}),), axis_size=3)(rngs)
        >>> keys.shape, int(rngs.dropout.count)
        ((3,), 1)
        >>> @sx.fork_rngs(split={"dropout": 3})
        ... def shape(rngs):
        ...     return rngs.dropout.key.shape
        >>> shape(rngs)
        (3,)
    """
    # What is split or broadcast for all streams leaves none to be forked only.
    chosen_for_all = any(
        ... in sizes if isinstance(sizes, Mapping) else sizes is not None
        for sizes in (split, broadcast)
    )
    rules = _StreamRules(split, None if chosen_for_all else ..., broadcast, only)
    return functools.partial(_around, rules) if tree is None else _replaced(tree, rules)


@contextlib.contextmanager
def _replaced(tree: object, rules: _StreamRules) -> Generator[None]:
    """Gives streams other keys in place, and the old ones back."""
    streams = _streams_in(tree)

    # Another thread would put back what this one replaced.
    chosen_paths = {key: path for key, (path, item) in streams.items() if rules.choose(path, item)}
    with _replacing.hold(chosen_paths):
        new_keys: list[tuple[RngStream, jax.Array]] = []
        for path, stream in streams.values():
            key = rules.key_for(path, stream)
            if key is not None:
                new_keys.append((stream, key))

        # After the draws, so that the streams go on one draw further.
        before = [(v, v.value) for stream, _ in new_keys for v in (stream.key, stream.count)]
        for stream, key in new_keys:
            stream.key.value = key
            stream.count.value = np.zeros(key.shape, np.uint32)
        try:
            yield
        finally:
            for variable, value in before:
                variable.value = value


def _streams_in(tree: object) -> dict[int, tuple[Path, RngStream]]:
    """Returns path and stream of each random stream, by ``id`` of its key's Variable."""
    streams: dict[int, tuple[Path, RngStream]] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=flatten.is_object):
        if not flatten.is_object(leaf):
            continue
        for path, item in iter_modules(leaf):
            if isinstance(item, RngStream):
                streams.setdefault(id(item.key), ((*plain_path(keys), *path), item))
    return streams
