# SPDX-License-Identifier: Apache-2.0
"""Arguments of a lifted call, taken apart: the first step of the lift.

An argument is split into *roots* (the objects in it) and a *plain* part, a pytree without objects
that JAX can take. Its *template* says how to put it together again, with other roots: the copies
that a transform made.

Callables as roots of a lifted call.

The function of a call is a root of its graph, because it may be a Module, a method of one, or a
``functools.partial`` with Modules among its arguments. Whatever else it holds is configuration of
the program, and configuration must be hashable to be compared. A partial with an array, and an
instance of a class without a hash, are not; such a callable is *held*: compared by identity, its
objects still in sight.

Names of places in a call: where each root stands, as the user would write it.

The path of a root begins with the name of the parameter it was passed for, so that the Variables of
two models in one call have different paths: ``.teacher.kernel`` and ``.student.kernel``.

Quick calls where static leaves are found automatically (``static="auto"``).

Every call decides anew which leaves are static. In a steady call that takes one flattening of all
arguments by JAX, and a look at the type of each leaf: arrays go into a flat list, static leaves
into the *quick key* by which the call is remembered. What has objects inside of containers, or
tracers, takes the ordinary way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core._jax import Tracer
from shardax._core.graph.flatten import flatten_plain, has_objects, is_object
from shardax._core.graph.handlers import has_parts
from shardax._core.graph.paths import Path, path_step
from shardax._core.graph.static import Static
from shardax._core.object import Object, Wrapper
from shardax._transforms.lift.functions import (
    ARRAY_TYPES,
    argument_key,
    is_dynamic,
    note_types,
    static_leaf,
)

# --- Arguments ---


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


# --- Callables ---


def as_root(root: Any) -> Any:
    """Returns a root of a graph that can be compared; everything but a few callables as it is."""
    if isinstance(root, (Object, Wrapper)) or not callable(root):
        return root
    if not isinstance(root, functools.partial):
        return root if _is_hashable(root) else _Held(root)
    function = as_root(root.func)
    parts = (*root.args, *root.keywords.values())
    if function is root.func and all(_is_comparable(part) for part in parts):
        return root
    leaves, treedef = jax.tree.flatten((root.args, root.keywords), is_leaf=is_object)
    objects = [leaf for leaf in leaves if is_object(leaf)]
    others = [None if is_object(leaf) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if is_object(leaf)]
    return functools.partial(_HeldPartial(root, treedef, others, places), function, tuple(objects))


def _is_comparable(part: Any) -> bool:
    """Whether part of a partial can stand in a structure: objects, and what is hashable."""
    if not has_parts(part):
        return _is_hashable(part)
    if isinstance(part, (tuple, list)):
        return all(_is_comparable(item) for item in part)
    return not isinstance(part, dict) or all(_is_comparable(item) for item in part.values())


def _is_hashable(value: Any) -> bool:
    try:
        Static(value)
    except TypeError:
        return False
    return True


class _Held:
    """A callable that is compared by identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return hash((type(self), id(self.held)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.held is self.held

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


class _HeldPartial(_Held):
    """A partial without its function and its objects, which it is called with."""

    def __init__(
        self,
        held: Any,
        treedef: Any,
        others: Sequence[Any],
        places: Sequence[int],
    ) -> None:
        super().__init__(held)
        self.treedef = treedef
        self.others = others
        self.places = places

    def __call__(
        self, function: Callable[..., Any], objects: Sequence[Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        leaves = list(self.others)
        for place, item in zip(self.places, objects, strict=True):
            leaves[place] = item
        given, named = self.treedef.unflatten(leaves)
        return function(*given, *args, **{**named, **kwargs})


# --- Naming ---


def template_roots(template: Any) -> list[int]:
    """Returns the positions among the roots that an argument's template uses."""
    if isinstance(template, Root):
        return [template.position]
    return [root for _, root in template.roots] if isinstance(template, Mixed) else []


def root_places(label: str, template: Any) -> list[tuple[int, Path]]:
    """Returns (position among the roots, path) of each object of an argument."""
    if isinstance(template, Root):
        return [(template.position, (label,))]
    if not isinstance(template, Mixed):
        return []
    paths = leaf_paths(template.treedef)
    return [(root, (label, *paths[leaf])) for leaf, root in template.roots]


def root_names(labels: Iterable[str], arguments: Arguments) -> list[Path]:
    """Returns the path of each root.

    Args:
        labels: Name of the parameter of each positional argument.
        arguments: The arguments.
    """
    names: list[Path] = [()] * len(arguments.roots)
    for label, template in [*zip(labels, arguments.templates, strict=True), *arguments.named]:
        for root, path in root_places(label, template):
            names[root] = path
    return names


def plain_paths(template: Mixed) -> list[Path]:
    """Returns the paths of the arrays that stand beside the objects of an argument."""
    others = {leaf for leaf, _ in (*template.roots, *template.static)}
    paths = leaf_paths(template.treedef)
    return [path for leaf, path in enumerate(paths) if leaf not in others]


# --- Automatic ---

_COMPARED_BY_VALUE = frozenset({str, bool, int, bytes})
"""Types whose values are keys by themselves, the type beside them."""


class QuickCall(NamedTuple):
    """A call with its leaves sorted.

    Attributes:
        key: What the call is remembered by: positions and identities of objects, the containers,
            and the static leaves.
        args: The positional arguments, None for objects.
        dynamic: The dynamic leaves of all arguments.
    """

    key: list[Any]
    args: list[Any]
    dynamic: list[Any]


def quick_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], static_types: frozenset[type]
) -> QuickCall | None:
    """Sorts the leaves of a call.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        static_types: Types that are static although JAX takes them: bool, perhaps numbers.

    Returns:
        The call; None if it has to take the ordinary way, also to explain what is wrong with it.
    """
    given = [None if isinstance(arg, Object) else arg for arg in args]
    key: list[Any] = [id(arg) if isinstance(arg, Object) else 0 for arg in args]
    flat = flatten_plain((given, kwargs) if kwargs else given)
    if flat is None:
        return None
    leaves, treedef = flat
    key.append(treedef)
    dynamic: list[Any] = []
    for leaf in leaves:
        kind = type(leaf)
        if kind in ARRAY_TYPES and kind not in static_types:
            dynamic.append(leaf)
        elif kind in _COMPARED_BY_VALUE:
            key += (len(dynamic), kind, leaf)
        elif isinstance(leaf, Tracer):
            return None
        elif kind not in static_types and is_dynamic(leaf):
            note_types(leaf)
            dynamic.append(leaf)
        else:
            try:
                key += (len(dynamic), kind, argument_key(leaf))
            except TypeError:
                return None
    return QuickCall(key, given, dynamic)


Spans = tuple[Sequence[slice | None], Sequence[tuple[str, slice | None]]]


def spans_of(
    templates: Sequence[Any],
    named: Sequence[tuple[str, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Spans:
    """Returns where the dynamic leaves of each argument stand among those of the call.

    Args:
        templates: Template of each positional argument.
        named: (name, template) of each keyword argument.
        args: Positional arguments, None for objects.
        kwargs: Keyword arguments.

    Returns:
        The slice of each positional argument, and (name, slice) of each keyword argument; None for
        an argument that is passed as it is.
    """
    start = 0

    def span(template: Any, value: Any) -> slice | None:
        nonlocal start
        count = jax.tree.structure(value).num_leaves
        if not isinstance(template, Mixed):
            start += count
            return None
        start += count - len(template.static)
        return slice(start - count + len(template.static), start)

    positional = [span(template, arg) for template, arg in zip(templates, args, strict=True)]
    return positional, [(name, span(template, kwargs[name])) for name, template in named]


def pack(
    call: QuickCall, kwargs: Mapping[str, Any], spans: Spans
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the plain parts of a call, as ``Arguments`` has them: (positional, by name)."""
    positional, named = spans
    plain, dynamic = call.args, call.dynamic
    for position, span in enumerate(positional):
        if span is not None:
            plain[position] = dynamic[span]
    if not named:
        return plain, {}
    return plain, {n: kwargs[n] if span is None else dynamic[span] for n, span in named}
