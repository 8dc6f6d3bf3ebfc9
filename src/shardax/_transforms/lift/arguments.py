# SPDX-License-Identifier: Apache-2.0
"""Arguments of lifted calls, split into objects, plain values and static values.

``SplitArguments`` splits the arguments of one call. Of each argument there is

- its *roots*: the objects in it, in a list with those of the other arguments;
- a *plain* part: a pytree of what is left, which JAX can take;
- a *template*, hashable, which says how to join the two again, usually with other roots: the copies
  that a transform made.

Arrays are plain, and so are Python's numbers unless asked otherwise. Under ``static="auto"``
everything else is *static* and stands in the template. It is compared by its *settings key*
(``_core.graph.settings``): by type and value, and, for instances of the user's own classes, by
their attributes as well, since a program that was compiled for the old ones would answer for the
new.

The function of a call is a root, too: a Module, a method of one, or a ``functools.partial`` with
Modules among its arguments (``as_root``). What a function takes from outside without being given it
is found in ``lift.captures``.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from shardax._core.graph.flatten import flatten, has_objects, is_object
from shardax._core.graph.handlers import PLAIN, handler_of, has_parts
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.settings import IncomparableError, settings_static
from shardax._core.graph.static import Static
from shardax._core.object import Object, Wrapper
from shardax._transforms import errors
from shardax._transforms.lift.signatures import parameter_name

# --- plain or static --------------------------------------------------------------------------

# The values of the option ``static``; under the second Python's numbers are static, too.
AUTO = "auto"
NUMBERS = "numbers"

NUMBER_TYPES = frozenset({int, float, complex})

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.Ref)


def check_static_option(static: str | None) -> None:
    """Raises StaticArgumentError if the option ``static`` has an unknown value."""
    if static not in (None, AUTO, NUMBERS):
        raise errors.unknown_static_option(static)


def is_dynamic(leaf: object, static_numbers: bool = False) -> bool:
    """Returns whether a leaf is an input of the program under ``static="auto"``."""
    if type(leaf) in NUMBER_TYPES:
        return not static_numbers
    if isinstance(leaf, enum.Enum):
        return False
    return isinstance(leaf, _ARRAYS) or hasattr(type(leaf), "__jax_array__")


def static_leaf(leaf: object, path: Callable[[], Path] = tuple) -> Static:
    """Returns a leaf that is static by ``static="auto"``, with its settings key."""
    try:
        return settings_static(leaf)
    except IncomparableError as error:
        raise errors.incomparable_leaf(leaf, path(), error) from error
    except TypeError as error:
        raise errors.unhashable_leaf(leaf, path(), error) from error


def static_argument(value: object, function: object, place: int | str) -> Static:
    """Returns an argument that an option makes static, by position or name, with its key."""
    label = parameter_name(function, place) if isinstance(place, int) else place
    if isinstance(value, Object):
        raise errors.static_object(label, value)
    try:
        return settings_static(value)
    except IncomparableError as error:
        raise errors.incomparable_argument(label, value, error) from error
    except TypeError as error:
        raise errors.unhashable_argument(label, function, value, error) from error


def check_static(
    function: object,
    static: Iterable[int | str],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Raises StaticArgumentError if a static argument is a Module or not hashable."""
    for key in static:
        if isinstance(key, int) and -len(args) <= key < len(args):
            static_argument(args[key], function, key)
        elif isinstance(key, str) and key in kwargs:
            static_argument(kwargs[key], function, key)


class ArgumentPositions(NamedTuple):
    """Where the arguments of a compiled call stand in the signature."""

    positional: list[tuple[int, str]]
    """(position, parameter name) of each dynamic positional argument."""

    static: tuple[tuple[int | str, Static], ...]
    """(position or name, value) of each static argument."""

    @property
    def labels(self) -> list[str]:
        """The parameter names of the dynamic positional arguments."""
        return [label for _, label in self.positional]

    def insert_static(
        self, args: list[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Returns the user's arguments, static ones included."""
        for place, static in self.static:
            if isinstance(place, int):
                args.insert(place, static.value)
            else:
                kwargs[place] = static.value
        return args, kwargs


# --- templates --------------------------------------------------------------------------------


class RootTemplate(NamedTuple):
    """Template of an argument that is an object."""

    position: int
    """The object's position among the roots."""


class PlainTemplate(NamedTuple):
    """Template of an argument without objects and static leaves; JAX flattens it."""


class StaticTemplate(NamedTuple):
    """Template of an argument that an option makes static."""

    value: Any


class TreeTemplate(NamedTuple):
    """Template of a pytree with objects or static leaves inside."""

    treedef: PyTreeDef
    """Its structure, with objects as leaves."""

    roots: tuple[tuple[int, int], ...]
    """(position among the leaves, position among the roots) of each object."""

    static: tuple[tuple[int, Static], ...] = ()
    """(position among the leaves, value) of each static leaf."""


Template = RootTemplate | PlainTemplate | StaticTemplate | TreeTemplate

PLAIN_TEMPLATE = PlainTemplate()


def split_tree(
    tree: PyTree,
    position_of: Callable[[Object], int],
    static_of: Callable[[Leaf, int, PyTreeDef], Static | None],
) -> tuple[TreeTemplate, list[Leaf]]:
    """Splits a pytree into its template and its plain leaves.

    Args:
        tree: The pytree.
        position_of: Returns the position among the roots of an object.
        static_of: Called with a leaf, its position and the structure of the tree; returns the leaf
            if it is static, else None.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_object)
    roots: list[tuple[int, int]] = []
    static: list[tuple[int, Static]] = []
    plain: list[Leaf] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Object):
            roots.append((position, position_of(leaf)))
            continue
        static_value = static_of(leaf, position, treedef)
        if static_value is None:
            plain.append(leaf)
        else:
            static.append((position, static_value))
    return TreeTemplate(treedef, tuple(roots), tuple(static)), plain


def split_argument(
    value: PyTree,
    roots: list[Object],
    auto_static: bool = False,
    static_numbers: bool = False,
    label: Callable[[], Path] = tuple,
) -> tuple[Template, PyTree]:
    """Returns the template of an argument and its plain part; appends its objects to ``roots``.

    Args:
        value: The argument.
        roots: The objects of the arguments before.
        auto_static: Whether leaves other than arrays and numbers are static.
        static_numbers: Whether Python's numbers are static, too.
        label: Returns the argument's path, for errors.
    """
    if isinstance(value, Object):
        roots.append(value)
        return RootTemplate(len(roots) - 1), None
    if not auto_static and not has_objects(value):
        return PLAIN_TEMPLATE, value

    def add_root(item: Object) -> int:
        roots.append(item)
        return len(roots) - 1

    def static_of(leaf: Leaf, position: int, treedef: PyTreeDef) -> Static | None:
        if not auto_static or is_dynamic(leaf, static_numbers):
            return None
        return static_leaf(leaf, lambda: (*label(), *leaf_paths(treedef)[position]))

    template, plain = split_tree(value, add_root, static_of)
    if not template.roots and not template.static:
        return PLAIN_TEMPLATE, value
    return template, plain


def join_argument(
    template: Template,
    plain: PyTree,
    roots: Sequence[PyTree] | Mapping[int, PyTree],
    with_static: bool = True,
) -> PyTree:
    """Returns an argument of its plain part and roots; the inverse of ``split_argument``.

    Args:
        template: The argument's template.
        plain: Its plain part.
        roots: What stands for each object, by position among the roots.
        with_static: Whether static leaves are those of the template; else None stands for them.
    """
    if isinstance(template, PlainTemplate):
        return plain
    if isinstance(template, RootTemplate):
        return roots[template.position]
    if isinstance(template, StaticTemplate):
        return template.value

    others = [(position, roots[root]) for position, root in template.roots]
    for position, static in template.static:
        others.append((position, static.value if with_static else None))

    leaves = list(plain)
    for position, item in sorted(others, key=operator.itemgetter(0)):
        leaves.insert(position, item)
    return template.treedef.unflatten(leaves)


def join_arguments(
    split: Any,
    plain: Sequence[Leaf],
    plain_named: Mapping[str, Leaf],
    roots: Sequence[PyTree],
    with_static: bool = True,
) -> tuple[list[PyTree], dict[str, PyTree]]:
    """Returns (args, kwargs) by the ``templates`` and ``named`` of a split call."""
    args = [
        join_argument(template, part, roots, with_static)
        for template, part in zip(split.templates, plain, strict=True)
    ]
    kwargs = {
        name: join_argument(template, plain_named[name], roots, with_static)
        for name, template in split.named
    }
    return args, kwargs


# --- paths ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def leaf_paths(treedef: PyTreeDef) -> Sequence[Path]:
    """Returns the path of each leaf of a pytree structure."""
    try:
        marked = treedef.unflatten(range(treedef.num_leaves))
        pairs = jax.tree_util.tree_leaves_with_path(marked)
    except Exception:  # noqa: BLE001 - a class of the user that takes no marks
        return [(position,) for position in range(treedef.num_leaves)]
    return [plain_path(keys) for keys, _ in pairs]


def root_places(label: str, template: Template) -> list[tuple[int, Path]]:
    """Returns (position among the roots, path) of each object of an argument."""
    if isinstance(template, RootTemplate):
        return [(template.position, (label,))]
    if not isinstance(template, TreeTemplate):
        return []
    paths = leaf_paths(template.treedef)
    return [(root, (label, *paths[leaf])) for leaf, root in template.roots]


def root_names(labels: Iterable[str], arguments: SplitArguments) -> list[Path]:
    """Returns the path of each root of the arguments."""
    names: list[Path] = [()] * len(arguments.roots)
    for label, template, _ in arguments.parts(labels):
        for root, path in root_places(label, template):
            names[root] = path
    return names


def plain_paths(template: Template, plain: PyTree = None) -> Sequence[Path]:
    """Returns the path of each leaf of an argument's plain part, from the argument on."""
    if not isinstance(template, TreeTemplate):
        return leaf_paths(jax.tree.structure(plain))
    other_leaves = {leaf for leaf, _ in (*template.roots, *template.static)}
    paths = leaf_paths(template.treedef)
    return [path for leaf, path in enumerate(paths) if leaf not in other_leaves]


# --- a call -----------------------------------------------------------------------------------


class SplitArguments:
    """The arguments of one lifted call, split.

    Args:
        args: The positional arguments.
        kwargs: The arguments by name.
        auto_static: Whether leaves other than arrays and numbers are static.
        static: Positions and names of arguments that are static as a whole.
        static_numbers: Whether Python's numbers are static, too.
        label: Returns the path of an argument by its position or name, for errors.

    Attributes:
        roots: The objects in the arguments, in order.
        templates: The template of each positional argument.
        plain: Their plain parts.
        named: (name, template) of each argument by name, sorted.
        plain_named: Their plain parts, by name.
    """

    __slots__ = ("named", "plain", "plain_named", "roots", "templates")

    def __init__(
        self,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        auto_static: bool = False,
        static: Container[int | str] = (),
        static_numbers: bool = False,
        label: Callable[[int | str], Path] = lambda _: (),
    ) -> None:
        self.roots: list[Any] = []

        def split(key: int | str, value: PyTree) -> tuple[Template, PyTree]:
            if key in static:
                return StaticTemplate(value), None
            path = functools.partial(label, key)
            return split_argument(value, self.roots, auto_static, static_numbers, path)

        positional = [split(position, value) for position, value in enumerate(args)]
        self.templates = tuple(template for template, _ in positional)
        self.plain = tuple(plain for _, plain in positional)

        named = {name: split(name, kwargs[name]) for name in sorted(kwargs)}
        self.named = tuple((name, template) for name, (template, _) in named.items())
        self.plain_named = {name: plain for name, (_, plain) in named.items()}

    def parts(self, labels: Iterable[str]) -> Iterator[tuple[str, Template, PyTree]]:
        """Yields (name, template, plain part) of each argument.

        Args:
            labels: The parameter name of each positional argument.
        """
        names = (*labels, *self.plain_named)
        plain = (*self.plain, *self.plain_named.values())
        yield from zip(names, self._all_templates, plain, strict=True)

    @property
    def _all_templates(self) -> tuple[Template, ...]:
        return (*self.templates, *(template for _, template in self.named))

    def restore(
        self, plain: Sequence[PyTree], plain_named: Mapping[str, PyTree], roots: Sequence[PyTree]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Returns (args, kwargs) of plain parts and roots, usually a transform's copies."""
        return join_arguments(self, plain, plain_named, roots)

    def plain_leaves(self) -> tuple[list[Leaf], PyTreeDef]:
        """Returns the leaves of all plain parts, and their structure."""
        return jax.tree.flatten((list(self.plain), self.plain_named))

    def plain_names(self, labels: Iterable[str]) -> list[str]:
        """Returns what messages call each leaf of ``plain_leaves``, such as ``batch['x'][0]``."""
        names: list[str] = []
        for label, template, plain in self.parts(labels):
            if isinstance(template, TreeTemplate):
                names += [label + format_path(path) for path in plain_paths(template)]
            else:
                pairs = jax.tree_util.tree_leaves_with_path(plain)
                names += [label + jax.tree_util.keystr(keys) for keys, _ in pairs]
        return names

    def static_values(self) -> Iterator[Any]:
        """Yields every static leaf inside of the arguments."""
        for template in self._all_templates:
            if isinstance(template, TreeTemplate):
                for _, static in template.static:
                    yield static.value

    def release(self) -> None:
        """Lets go of objects and plain values; templates remain."""
        self.roots, self.plain, self.plain_named = [], (), {}

    def refuse_copies(self) -> None:
        """Raises ModuleError if flattening a container makes objects anew each time."""
        parts = (*self.plain, *self.plain_named.values())
        for template, plain in zip(self._all_templates, parts, strict=True):
            if not isinstance(template, TreeTemplate) or not template.roots:
                continue
            value = join_argument(template, plain, self.roots)
            leaves = jax.tree.leaves(value, is_leaf=is_object)
            if any(leaves[leaf] is not self.roots[root] for leaf, root in template.roots):
                flatten(value)  # raises with the class whose flattening makes copies
                raise errors.rebuilding_node(sorted(_registered_types(template.treedef)))


def _registered_types(treedef: PyTreeDef) -> set[str]:
    """Returns the names of classes, other than Python's containers, in a structure."""
    names: set[str] = set()
    node = treedef.node_data()
    if node and node[0] not in (dict, list, tuple):
        names.add(node[0].__name__)
    return names.union(*map(_registered_types, treedef.children()))


# --- the function -----------------------------------------------------------------------------


def as_root(root: Any) -> Any:
    """Returns a root that can be compared: a callable without a hash compares by identity."""
    if isinstance(root, (Object, Wrapper)) or not callable(root):
        return root
    if not isinstance(root, functools.partial):
        return root if _is_hashable(root) else _ByIdentity(root)

    function = as_root(root.func)
    arguments = (*root.args, *root.keywords.values())
    if function is root.func and all(_is_comparable(argument) for argument in arguments):
        return root

    # A partial with objects, and with arguments that cannot be compared: the objects are apart.
    leaves, treedef = jax.tree.flatten((root.args, root.keywords), is_leaf=is_object)
    positions = [position for position, leaf in enumerate(leaves) if is_object(leaf)]
    objects = [leaves[position] for position in positions]
    others = [None if is_object(leaf) else leaf for leaf in leaves]
    identity = _PartialByIdentity(root, treedef, others, positions)
    return functools.partial(identity, function, tuple(objects))


def _is_comparable(argument: object) -> bool:
    """Returns whether an argument of a partial is an object, or hashable, or made of such."""
    if not has_parts(argument):
        return _is_hashable(argument)
    handler = handler_of(argument)
    if handler not in PLAIN:
        return True
    return all(_is_comparable(child) for _, child in handler.children(argument))


def _is_hashable(value: object) -> bool:
    try:
        Static(value)
    except TypeError:
        return False
    return True


class _ByIdentity:
    """A callable that is compared by identity."""

    def __init__(self, held: Callable[..., Any]) -> None:
        self.held = held

    def __hash__(self) -> int:
        return hash((type(self), id(self.held)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.held is self.held

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.held(*args, **kwargs)


class _PartialByIdentity(_ByIdentity):
    """A partial without its function and its objects, which it is called with."""

    def __init__(
        self,
        held: functools.partial[Any],
        treedef: PyTreeDef,
        others: Sequence[Leaf],
        positions: Sequence[int],
    ) -> None:
        super().__init__(held)
        self.treedef = treedef
        self.others = others
        self.positions = positions

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        function, objects, *call_args = args
        leaves = list(self.others)
        for position, item in zip(self.positions, objects, strict=True):
            leaves[position] = item
        bound_args, bound_kwargs = self.treedef.unflatten(leaves)
        return function(*bound_args, *call_args, **{**bound_kwargs, **kwargs})
