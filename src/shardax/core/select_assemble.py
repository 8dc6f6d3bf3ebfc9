# SPDX-License-Identifier: Apache-2.0
"""Putting containers together again from parts, for edits of trees (``core.select_edit``).

What a container is decides how many items may stand where one stood. A *sequence* (list, tuple)
takes any number; what is *keyed* (attributes, dict entries) can lose an item; everything else
(NamedTuple, partial, the node of some other pytree) has a fixed number of parts.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

import jax

from shardax.core.containers import Dict, List, is_boxed
from shardax.core.errors import SelectionError
from shardax.core.frames import owner_here
from shardax.core.modules import Module
from shardax.core.node import Object, Wrapper
from shardax.core.paths import Path, format_path
from shardax.core.select_places import Place
from shardax.core.state import State
from shardax.core.structure import rebuild_tuple

Pairs = Sequence[tuple[Any, Any]]
"""(key, what is stored) for every part of a container, in order; key None for what it wraps."""


def arranged(place: Place, new: Sequence[tuple[Place, Sequence[Any]]]) -> Pairs:
    """Returns the parts of a container after an edit.

    Args:
        place: The container.
        new: For everything directly in it, the items that are to stand there.

    Raises:
        SelectionError: If the container cannot hold that many.
    """
    content = place.content
    is_sequence = isinstance(content, (list, List)) or _is_plain_tuple(content)
    is_keyed = isinstance(content, (Module, Dict, dict, State))
    pairs: list[tuple[Any, Any]] = []
    for child, items in new:
        steps = child.path[len(place.path) :]
        if not is_sequence:
            check_count(child, items, content, removable=is_keyed)
        pairs.extend((steps[0] if steps else None, item) for item in items)
    return pairs


def check_count(child: Place, items: Sequence[Any], content: Any, removable: bool) -> None:
    """Raises if not just one item is to stand where only one can.

    Args:
        child: Where.
        items: What is to stand there.
        content: The container.
        removable: Whether there may also be none.
    """
    if len(items) == 1 or (not items and removable):
        return
    where, kind = format_path(child.path), type(content).__name__
    if items:
        raise SelectionError(
            f"Nothing can be inserted beside {where}: it is part of a {kind}, not an item of a "
            f"list or tuple. Nothing was changed. Let one thing do both: "
            f".apply(lambda old: sx.nn.Sequential(old, new))."
        )
    raise SelectionError(
        f"{where} cannot be removed: it is part of a {kind}, which has a fixed number of parts. "
        f"Nothing was changed. Set something that does nothing: .set(sx.nn.Sequential())."
    )


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def assembled(content: Any, pairs: Pairs) -> Any:
    """Returns an immutable container like another one, with other parts."""
    items = [item for _, item in pairs]
    if isinstance(content, tuple):
        return rebuild_tuple(type(content), items)
    if isinstance(content, (list, dict)):
        made = copy.copy(content)
        fill(made, pairs)
        return made
    if isinstance(content, functools.partial):
        args = [item for key, item in pairs if isinstance(key, int)]
        keywords = {key: item for key, item in pairs if isinstance(key, str)}
        return functools.partial(items[0], *args, **keywords)
    if isinstance(content, types.MethodType):
        return types.MethodType(content.__func__, items[0])
    if isinstance(content, Wrapper):
        return content._wrap(items[0])
    if isinstance(content, State):
        return _assembled_state(content, pairs)
    treedef = jax.tree.structure(content, is_leaf=lambda item: item is not content)
    return treedef.unflatten(items)


def _assembled_state(content: State, pairs: Pairs) -> State:
    values: dict[Path, Any] = {}
    origins = content.origins()
    for key, item in pairs:
        if isinstance(item, State):
            values.update(((key, *path), value) for path, value in item.flat().items())
            origins.update(((key, *path), origin) for path, origin in item.origins().items())
        else:
            values[(key,)] = item
    return State.from_flat(values, origins)


def is_mutable(value: Any) -> bool:
    """Whether an edit can change what a holder holds, other than a Variable its value."""
    return isinstance(value, (Module, List, Dict, list, dict))


def stored_in(holder: Any) -> Pairs:
    """Returns what a mutable holder stores."""
    if isinstance(holder, Module):
        return [*vars(holder).items(), *holder._boxed.items()]
    items: Any = holder._items if isinstance(holder, (List, Dict)) else holder
    return list(items.items()) if isinstance(items, dict) else list(enumerate(items))


def empty_like(holder: Any) -> Any:
    """Returns a mutable holder like another one, to be filled."""
    if isinstance(holder, Object):
        return type(holder)._allocate(owner_here(), None)
    return copy.copy(holder)


def fill(holder: Any, pairs: Pairs) -> None:
    """Gives a mutable holder other contents.

    Args:
        holder: A Module, List, Dict, list or dict.
        pairs: The contents.
    """
    if isinstance(holder, Module):
        attributes, boxed = vars(holder), holder._boxed
        attributes.clear()
        boxed.clear()
        for name, item in pairs:
            (boxed if is_boxed(item) else attributes)[name] = item
        return
    items: Any = dict(pairs) if isinstance(holder, (dict, Dict)) else [item for _, item in pairs]
    if isinstance(holder, (List, Dict)):
        holder._items = items
    elif isinstance(holder, list):
        holder[:] = items
    else:
        holder.clear()
        holder.update(items)
