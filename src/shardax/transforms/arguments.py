# SPDX-License-Identifier: Apache-2.0
"""Arguments of a lifted call, taken apart: the first step of the lift.

An argument is split into *roots* (the objects in it) and a *plain* part, a pytree without objects
that JAX can take. Its *template* says how to put it together again, with other roots: the copies
that a transform made.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax.core.node import Object
from shardax.core.paths import Path, path_step
from shardax.core.pytree import has_objects, is_object
from shardax.core.static import Static
from shardax.transforms.static_leaves import is_dynamic, static_leaf


class Root(NamedTuple):
    """Template of an argument that is an object: its position among the roots."""

    position: int


class Mixed(NamedTuple):
    """Template of a pytree argument with objects or static values inside.

    Attributes:
        treedef: Its structure, with objects as leaves.
        roots: (position among the leaves, position among the roots) of each object.
        static: (position among the leaves, value) of each static leaf.
    """

    treedef: Any
    roots: tuple[tuple[int, int], ...]
    static: tuple[tuple[int, Static], ...] = ()


class Plain(NamedTuple):
    """Template of an argument without objects; JAX flattens it."""


PLAIN = Plain()


class Fixed(NamedTuple):
    """Template of an argument that is static: its value."""

    value: Any


def take_apart(
    value: Any,
    roots: list[Any],
    auto_static: bool = False,
    static_numbers: bool = False,
    label: Callable[[], Path] = tuple,
) -> tuple[Any, Any]:
    """Splits one argument.

    Args:
        value: The argument.
        roots: Collects the objects.
        auto_static: Whether leaves that are neither arrays nor objects are static.
        static_numbers: Whether Python's numbers are static, too.
        label: Returns the path of the argument, for messages.

    Returns:
        (template, plain part): the plain part is a pytree without objects.

    Raises:
        StaticArgumentError: If a leaf would be static but is not hashable.
    """
    if isinstance(value, Object):
        roots.append(value)
        return Root(len(roots) - 1), None
    if not auto_static and not has_objects(value):
        return PLAIN, value
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_object)

    def path_of(position: int) -> Path:
        return (*label(), *leaf_paths(treedef)[position])

    places, static, plain = [], [], []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Object):
            places.append((position, len(roots)))
            roots.append(leaf)
        elif auto_static and not is_dynamic(leaf, static_numbers):
            static.append((position, static_leaf(leaf, functools.partial(path_of, position))))
        else:
            plain.append(leaf)
    if not places and not static:
        return PLAIN, value
    return Mixed(treedef, tuple(places), tuple(static)), plain


@functools.lru_cache(maxsize=512)
def leaf_paths(treedef: Any) -> Sequence[Path]:
    """Returns the path of each leaf of a pytree structure."""
    marked = treedef.unflatten(range(treedef.num_leaves))
    pairs = jax.tree_util.tree_leaves_with_path(marked)
    return [tuple(path_step(key) for key in keys) for keys, _ in pairs]


def put_together(template: Any, plain: Any, roots: Sequence[Any], with_static: bool = True) -> Any:
    """The inverse of ``take_apart``, with other roots; static leaves are left out on request."""
    if type(template) is Plain:
        return plain
    if type(template) is Root:
        return roots[template.position]
    if type(template) is Fixed:
        return template.value
    places = [(position, roots[root]) for position, root in template.roots]
    places += [(place, item.value if with_static else None) for place, item in template.static]
    leaves = list(plain)
    for position, item in sorted(places, key=operator.itemgetter(0)):
        leaves.insert(position, item)
    return template.treedef.unflatten(leaves)


class Arguments:
    """The arguments of one lifted call, taken apart.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        auto_static: Whether leaves that are neither arrays nor objects are static.
        static: Positions and names of arguments that are static as a whole.
        static_numbers: Whether Python's numbers are static, too.
        label: Returns the path of the argument of a position or name, for messages.

    Attributes:
        templates: One per positional argument.
        named: (name, template) pairs, sorted by name.
        plain: The plain parts of the positional arguments.
        plain_named: The plain parts of the keyword arguments.
        roots: The objects found, in order.
    """

    __slots__ = ("named", "plain", "plain_named", "roots", "templates")

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        auto_static: bool = False,
        static: Container[int | str] = (),
        static_numbers: bool = False,
        label: Callable[[int | str], Path] = lambda _: (),
    ) -> None:
        self.roots: list[Any] = []

        def apart(key: int | str, value: Any) -> tuple[Any, Any]:
            if key in static:
                return Fixed(value), None
            where = functools.partial(label, key)
            return take_apart(value, self.roots, auto_static, static_numbers, where)

        pairs = [apart(position, arg) for position, arg in enumerate(args)]
        self.templates = tuple(template for template, _ in pairs)
        self.plain = tuple(plain for _, plain in pairs)
        named = [(name, *apart(name, kwargs[name])) for name in sorted(kwargs)]
        self.named = tuple((name, template) for name, template, _ in named)
        self.plain_named = {name: plain for name, _, plain in named}

    def plain_leaves(self) -> tuple[list[Any], Any]:
        """Returns the leaves of all plain parts, and the treedef of (positional, by name)."""
        return jax.tree.flatten((list(self.plain), self.plain_named))

    def release(self) -> None:
        """Lets go of the objects and plain values; what remains is how to put them together."""
        self.roots, self.plain, self.plain_named = [], (), {}

    def restore(
        self, plain: Sequence[Any], plain_named: Mapping[str, Any], roots: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Puts arguments together from plain parts and roots (a transform's copies, usually)."""
        args = [put_together(t, p, roots) for t, p in zip(self.templates, plain, strict=True)]
        kwargs = {name: put_together(t, plain_named[name], roots) for name, t in self.named}
        return args, kwargs
