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

from shardax._core.checks import Options, is_integer
from shardax._core.errors import FilterError, ModuleError
from shardax._core.graph import flatten
from shardax._core.graph.paths import Path, PyTree, format_path, plain_path
from shardax._core.init.rng import RngStream
from shardax._core.state.filters import Everything, Filter, first_match, to_predicate, to_predicates
from shardax._core.state.split_merge import iter_modules
from shardax._core.state.walk import recursive_map
from shardax._core.threads import OneThread

_options = Options(ModuleError)
_replacing = OneThread("forks or splits the random stream", "and would put its old keys back")
Sizes = int | tuple[int, ...] | Mapping[Filter, int | tuple[int, ...] | None] | None


class _Rule(NamedTuple):
    """What happens to the streams that one option chooses."""

    name: str
    predicates: list[Any]
    shapes: list[tuple[int, ...] | None]  # None for streams that are not chosen

    def match(self, path: Path, stream: RngStream) -> tuple[Any, Any] | None:
        """Returns (predicate, shape) for a stream, or None."""
        position = first_match(self.predicates, path, stream.key)
        if position is None or self.shapes[position] is None:
            return None
        return self.predicates[position], self.shapes[position]


class _StreamRules:
    """The options of a call, checked."""

    def __init__(self, split: Sizes, fork: Filter, broadcast: Sizes, only: Filter) -> None:
        self.only = to_predicate(only)
        self.rules = [_sizes("split", split), _sizes("broadcast", broadcast)]
        self.rules.append(_Rule("fork", [to_predicate(fork)], [()]))

    def choose(self, path: Path, stream: RngStream) -> bool:
        """Whether a rule matches a stream."""
        return self.only(path, stream.key) and any(rule.match(path, stream) for rule in self.rules)

    def key_for(self, path: Path, stream: RngStream) -> Any:
        """Returns the new key of a stream, or None for no rule."""
        if not self.only(path, stream.key):
            return None
        matches = [(rule, match) for rule in self.rules if (match := rule.match(path, stream))]
        named = [pair for pair in matches if not isinstance(pair[1][0], Everything)]
        if len(named) > 1 or (matches and not named and len(matches) > 1):
            both = " and ".join(f"{rule.name}=" for rule, _ in matches)
            raise FilterError(
                f"The random stream at {format_path(path)} is chosen by {both}. Choose it once, "
                f"such as split={{'dropout': 4}}, fork=sx.Not('dropout')."
            )
        if not matches:
            return None
        rule, (_, shape) = (named or matches)[0]
        key = stream()
        if rule.name == "split":
            return jax.random.split(key, shape)
        return jnp.broadcast_to(key, shape) if rule.name == "broadcast" else key


def _sizes(name: str, sizes: Sizes) -> _Rule:
    entries = {} if sizes is None else dict(sizes) if isinstance(sizes, Mapping) else {...: sizes}
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
    tree: object, *, split: Sizes = None, broadcast: Sizes = None, only: Filter = ...
) -> contextlib.AbstractContextManager[None]:
    """Forks the random streams of a model for a block.

    Args:
        tree: A Module, ``Rngs`` or pytree of them.
        split: Streams that are split instead, and into how many keys, as for ``with_rngs``.
        broadcast: Streams that get one key several times, as for ``with_rngs``.
        only: Filter of the streams that are forked; the others go on.

    Returns:
        A context manager. After the block the streams go on where they were, one draw further.

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
    """
    return _replaced(tree, _StreamRules(split, ..., broadcast, only))


@contextlib.contextmanager
def _replaced(tree: object, rules: _StreamRules) -> Generator[None]:
    """Gives streams other keys in place, and the old ones back."""
    streams: dict[int, tuple[Path, RngStream]] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=flatten.is_object):
        for path, item in iter_modules(leaf) if flatten.is_object(leaf) else ():
            if isinstance(item, RngStream):
                streams.setdefault(id(item.key), ((*plain_path(keys), *path), item))
    # Another thread would put back what this one replaced.
    chosen_paths = {key: path for key, (path, item) in streams.items() if rules.choose(path, item)}
    with _replacing.hold(chosen_paths):
        pairs = [(stream, rules.key_for(path, stream)) for path, stream in streams.values()]
        chosen = [(stream, key) for stream, key in pairs if key is not None]
        before = [(v, v.value) for stream, _ in chosen for v in (stream.key, stream.count)]
        for stream, key in chosen:
            stream.key.value = key
            stream.count.value = np.zeros(key.shape, np.uint32)
        try:
            yield
        finally:
            for variable, value in before:
                variable.value = value
