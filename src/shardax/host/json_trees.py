# SPDX-License-Identifier: Apache-2.0
"""Pytrees as JSON: containers, with the number of each leaf in its place.

Only tuples, lists, dicts with ``str`` or ``int`` keys, and None are written, so that reading needs
neither pickle nor the classes of whoever wrote it.
"""

from __future__ import annotations

from typing import Any

import jax

from shardax.core.errors import ExportError
from shardax.core.paths import Path, format_path


def to_json(treedef: Any, path: Path) -> Any:
    """Returns a pytree structure as JSON values.

    Args:
        treedef: The structure.
        path: Where it stands, for the message.

    Raises:
        ExportError: If it has a node that JSON cannot say; names its path.

    Example:
        >>> import jax
        >>> to_json(jax.tree.structure({"a": 1, "b": (2, None)}), ("x",))
        {'dict': [['a', 0], ['b', {'tuple': [1, None]}]]}
    """
    return _encode(treedef.unflatten(range(treedef.num_leaves)), path)


def _encode(node: Any, path: Path) -> Any:
    if node is None or type(node) is int:
        return node
    if type(node) in (tuple, list):
        items = [_encode(item, (*path, i)) for i, item in enumerate(node)]
        return {type(node).__name__: items}
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        return {"dict": [[key, _encode(item, (*path, key))] for key, item in node.items()]}
    keys = "dict with other keys than str and int" if type(node) is dict else type(node).__name__
    raise ExportError(
        f"Cannot export a {keys} at {format_path(path)}: whoever loads the artifact may not have "
        "the class. Arguments and results of an exported function are arrays in tuples, lists and "
        "dicts. Export a function that takes or returns those, such as lambda x, y: "
        "f(Pair(x, y))._asdict()."
    )


def from_json(tree: Any) -> Any:
    """Returns the pytree of leaf numbers that ``to_json`` wrote.

    Example:
        >>> from_json({"dict": [["a", 0], ["b", {"tuple": [1, None]}]]})
        {'a': 0, 'b': (1, None)}
    """
    if tree is None or type(tree) is int:
        return tree
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {key: from_json(item) for key, item in items}
    return {"tuple": tuple, "list": list}[kind](from_json(item) for item in items)


def structure(tree: Any) -> Any:
    """Returns the treedef of what ``to_json`` wrote."""
    return jax.tree.structure(from_json(tree))
