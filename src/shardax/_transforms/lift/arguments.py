# SPDX-License-Identifier: Apache-2.0
"""Inputs of lifted calls: arguments, static values, objects in closures.

An argument is split into *roots* (the objects in it) and a *plain* part, a pytree without objects
that JAX can take. Its *template* says how to join it again with other roots: the copies that a
transform made. The path of a root begins with the name of its parameter, so that two models in one
call have different paths.

Arrays are dynamic, and Python's numbers unless asked otherwise. Everything else is static, and
compared by its *settings key* (``_core.graph.settings``): the exact key, and of instances of the
user's own classes the attributes as well, because a program that was compiled for the old ones
would answer for the new.

The function of a call is a root, too: a Module, a method of one, or a ``functools.partial`` with
Modules among its arguments. A callable without a hash is compared by identity.

What a function takes from outside without being given it is found in ``lift.captures``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core.errors import ModuleError, ShardaxError
from shardax._core.graph.flatten import flatten, has_objects, is_object
from shardax._core.graph.handlers import PLAIN, handler_of, has_parts
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.settings import IncomparableError, incomparable_attribute, settings_static
from shardax._core.graph.static import Static
from shardax._core.object import Object, Wrapper
from shardax._transforms.errors import StaticArgumentError, TransformError


def parameters_of(function: object) -> tuple[inspect.Parameter, ...] | None:
    """Returns a function's parameters, or None if it has no signature."""
    # A comparison of the user's own is not run, and could find those of another callable.
    if type(function).__eq__ is not object.__eq__:
        return _find_parameters(function)

    try:
        parameters = _PARAMETERS.get(function, _UNKNOWN)
    except TypeError:  # without a hash, or without weak references
        return _find_parameters(function)
    if parameters is _UNKNOWN:
        parameters = _PARAMETERS[function] = _find_parameters(function)
    return parameters


_UNKNOWN: Any = object()

# Parameters by function, which may close over a model: remembering them keeps nothing alive.
_PARAMETERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _find_parameters(function) -> tuple[inspect.Parameter, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def argument_path(function: object, key: int | str) -> tuple[str, ...]:
    """Returns the path of an argument: its parameter's name."""
    return (parameter_name(function, key) if isinstance(key, int) else key,)


def parameter_name(function: Any, position: int) -> str:
    """Returns the name of a function's positional parameter, for messages."""
    names = positional_names(function)
    return names[position] if position < len(names) else f"args[{position}]"


def by_position(
    function: object,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    most: int | None = None,
    fill: str | None = None,
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Moves keyword arguments to their positions in the signature."""
    # Defaults fill the ``"gaps"`` before the last keyword, ``"all"`` that is missing, or nothing:
    # as an argument of its own, a default would be traced.
    positional, keyword = list(args), dict(kwargs)
    missing = list((parameters_of(function) or ())[len(positional) : most])
    while missing and fill == "gaps" and missing[-1].name not in keyword:
        missing.pop()
    for parameter in missing:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in keyword:
            positional.append(keyword.pop(parameter.name))
        elif (
            fill is not None
            and parameter.default is not parameter.empty
            and (parameter.kind is not parameter.KEYWORD_ONLY)
        ):
            positional.append(parameter.default)
        else:
            break
    if fill == "all":
        named = [p for p in parameters_of(function) or () if p.kind is p.KEYWORD_ONLY]
        keyword = {p.name: p.default for p in named if p.default is not p.empty} | keyword
    return tuple(positional), keyword


def positional_names(function: object) -> list[str]:
    """Returns the names of a function's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters_of(function) or () if p.kind in kinds]


AUTO = "auto"

# The values of the option ``static``; under the second Python's numbers are static, too.
NUMBERS = "numbers"

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.Ref)

NUMBER_TYPES = frozenset({int, float, complex})


def is_dynamic(leaf: object, static_numbers: bool = False) -> bool:
    """Whether a leaf is an input of the program."""
    if type(leaf) in NUMBER_TYPES:
        return not static_numbers
    if isinstance(leaf, enum.Enum):
        return False
    return isinstance(leaf, _ARRAYS) or hasattr(type(leaf), "__jax_array__")


def static_leaf(leaf: object, where: Callable[[], Path] = tuple) -> Static:
    """Returns a static leaf with its settings key."""
    try:
        return settings_static(leaf)
    except IncomparableError as error:
        place = f"at {format_path(where())}"
        raise StaticArgumentError(incomparable_attribute(type(leaf), place, error)) from error
    except TypeError as error:
        path = where()
        place = f" at {format_path(path)}" if path else ""
        raise StaticArgumentError(
            f"What is no array, number or Module is static here (static='auto'), but the "
            f"{type(leaf).__name__}{place} cannot be: {_shortened(leaf)} is not hashable "
            f"({error}). Use tuples or frozensets, a frozen dataclass for configuration, an "
            f"sx.Module for what holds arrays or changes."
        ) from error


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_callable(function: object, name: str) -> None:
    """Raises unless what a transform is given can be called."""
    if not callable(function):
        raise TransformError(
            f"sx.{name} was given {_shortened(function)} of type {type(function).__name__}, which "
            f"cannot be called. Give it a function first: sx.{name}(function, ...)."
        )


def resolve_arguments(
    function: object, argnums: object, argnames: object, kind: str, error: type[ShardaxError]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Resolves positions and names of arguments from each other, as ``jax.jit`` does."""
    positions, names = as_tuple(argnums), as_tuple(argnames)
    wrong = [i for i in positions if isinstance(i, bool) or not hasattr(i, "__index__")]
    for item in (*wrong, *(name for name in names if not isinstance(name, str))):
        raise error(
            f"{kind}_arg{'nums' if item in wrong else 'names'}={item!r} is of type "
            f"{type(item).__name__}; positions are integers, {kind}_argnums=0, and names are "
            f"strings, {kind}_argnames='x'."
        )
    parameters = parameters_of(function)
    if parameters is None or not (positions or names):
        return positions, names
    positional = positional_names(function)
    count = len(positional)
    function_name = getattr(function, "__name__", function)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for position in positions:
        if not variadic and not -count <= position < count:
            raise error(
                f"{kind}_argnums={position} is out of range: {function_name} has {count} "
                f"positional parameters ({', '.join(positional)})."
            )
    parameter_names = [p.name for p in parameters]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in names:
            if name not in parameter_names:
                raise error(
                    f"{kind}_argnames has {name!r}, but {function_name} has only "
                    f"({', '.join(parameter_names)})."
                )
    positions = tuple(p % count if p < 0 else p for p in positions)
    all_positions = {*positions, *(positional.index(n) for n in names if n in positional)}
    all_names = {*names, *(positional[p] for p in positions if p < count)}
    return tuple(sorted(all_positions)), tuple(sorted(all_names))


def check_static_option(static: str | None) -> None:
    """Raises if the option ``static`` has an unknown value."""
    if static not in (None, AUTO, NUMBERS):
        raise StaticArgumentError(
            f"static={static!r}: the option takes 'auto' (all but arrays, numbers and Modules is "
            "static), 'numbers' (Python's numbers, too) or None. To choose arguments, use "
            "static_argnums or static_argnames."
        )


def as_tuple(value: object) -> tuple[PyTree, ...]:
    """Returns None, one entry or several as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def static_argument(value: object, function: object, place: int | str) -> Static:
    """Returns a static argument by its exact key."""
    label = parameter_name(function, place) if isinstance(place, int) else place
    if isinstance(value, Object):
        raise StaticArgumentError(
            f"The argument {label!r} is static, but a {type(value).__name__} was passed: its "
            "values would be frozen into the program. Pass it as an ordinary argument: a Module's "
            "configuration is static by itself."
        )
    try:
        return settings_static(value)
    except IncomparableError as error:
        place = f"given as the static argument {label!r}"
        raise StaticArgumentError(incomparable_attribute(type(value), place, error)) from error
    except TypeError as error:
        raise StaticArgumentError(
            f"The static argument {label!r} of {getattr(function, '__name__', function)} is "
            f"{value!r} of type {type(value).__name__}, which is not hashable ({error}). Pass "
            "arrays as ordinary arguments; use tuples, frozen dataclasses, and an sx.Module for "
            "what holds arrays or changes."
        ) from error


class ArgumentPositions(NamedTuple):
    """Where the arguments of a call stand in the signature."""

    # (position, parameter name) of each dynamic positional argument.
    positional: list[tuple[int, str]]
    static: tuple[tuple[Any, Static], ...]  # (position or name, value) of each static one

    @property
    def labels(self) -> list[str]:
        """Parameter names of the dynamic positional arguments."""
        return [label for _, label in self.positional]

    def insert_static(
        self, args: list[PyTree], kwargs: dict[str, PyTree]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Returns the user's arguments, static ones included."""
        for place, item in self.static:
            if isinstance(place, int):
                args.insert(place, item.value)
            else:
                kwargs[place] = item.value
        return args, kwargs


def check_static(
    function: object, static: set[int | str], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raises if a static argument is a Module or not hashable."""
    for key in static:
        if isinstance(key, int) and -len(args) <= key < len(args):
            static_argument(args[key], function, key)
        elif isinstance(key, str) and key in kwargs:
            static_argument(kwargs[key], function, key)


class RootTemplate(NamedTuple):
    """Template of an object: its position among the roots."""

    position: int


class TreeTemplate(NamedTuple):
    """Template of a pytree argument with objects or static values inside."""

    treedef: Any  # its structure, with objects as leaves
    # (position among the leaves, position among the roots) of each object.
    roots: tuple[tuple[int, int], ...]
    # (position among the leaves, value) of each static leaf.
    static: tuple[tuple[int, Static], ...] = ()


class PlainTemplate(NamedTuple):
    """Template of an argument without objects; JAX flattens it."""


PLAIN_TEMPLATE = PlainTemplate()


class StaticTemplate(NamedTuple):
    """Template of an argument that is static: its value."""

    value: object


def split_argument(
    value: object,
    roots: list[PyTree],
    auto_static: bool = False,
    static_numbers: bool = False,
    label: Callable[[], Path] = tuple,
) -> tuple[PyTree, PyTree]:
    """Splits one argument."""
    if isinstance(value, Object):
        roots.append(value)
        return RootTemplate(len(roots) - 1), None
    if not auto_static and not has_objects(value):
        return PLAIN_TEMPLATE, value
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
        return PLAIN_TEMPLATE, value
    return TreeTemplate(treedef, tuple(places), tuple(static)), plain


@functools.lru_cache(maxsize=512)
def leaf_paths(treedef: Any) -> Sequence[Path]:
    """Returns the path of each leaf of a pytree structure."""
    try:
        marked = treedef.unflatten(range(treedef.num_leaves))
        pairs = jax.tree_util.tree_leaves_with_path(marked)
    except Exception:  # noqa: BLE001 - a class of the user that takes no marks
        return [(position,) for position in range(treedef.num_leaves)]
    return [plain_path(keys) for keys, _ in pairs]


def join_argument(template: PyTree, plain: Leaf, roots: PyTree, with_static: bool = True) -> PyTree:
    """The inverse of ``split_argument``, with other roots."""
    if type(template) is PlainTemplate:
        return plain
    if type(template) is RootTemplate:
        return roots[template.position]
    if type(template) is StaticTemplate:
        return template.value
    places = [(position, roots[root]) for position, root in template.roots]
    places += [(place, item.value if with_static else None) for place, item in template.static]
    leaves = list(plain)
    for position, item in sorted(places, key=operator.itemgetter(0)):
        leaves.insert(position, item)
    return template.treedef.unflatten(leaves)


def join_arguments(
    split: Any,
    plain: Sequence[Leaf],
    plain_named: Mapping[str, Leaf],
    roots: Sequence[PyTree],
    with_static: bool = True,
) -> tuple[list[PyTree], dict[str, PyTree]]:
    """Joins arguments by the ``templates`` and ``named`` of a split call."""
    args = [
        join_argument(template, part, roots, with_static)
        for template, part in zip(split.templates, plain, strict=True)
    ]
    named = {n: join_argument(t, plain_named[n], roots, with_static) for n, t in split.named}
    return args, named


def _registered_types(treedef: Any) -> set[str]:
    """Returns the names of classes, other than Python's containers, in a structure."""
    node = treedef.node_data()
    names = {node[0].__name__} if node and node[0] not in (dict, list, tuple) else set()
    return names.union(*map(_registered_types, treedef.children()))


class SplitArguments:
    """The arguments of one lifted call, taken apart."""

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
        self.roots: list[Any] = []  # the objects found, in order

        def apart(key: int | str, value: object) -> tuple[PyTree, PyTree]:
            if key in static:
                return StaticTemplate(value), None
            where = functools.partial(label, key)
            return split_argument(value, self.roots, auto_static, static_numbers, where)

        pairs = [apart(position, arg) for position, arg in enumerate(args)]
        self.templates = tuple(template for template, _ in pairs)  # one per positional argument
        # The plain parts of the positional arguments.
        self.plain = tuple(plain for _, plain in pairs)
        named = [(name, *apart(name, kwargs[name])) for name in sorted(kwargs)]
        # (name, template) pairs, sorted by name.
        self.named = tuple((name, template) for name, template, _ in named)
        # The plain parts of the keyword arguments.
        self.plain_named = {name: plain for name, _, plain in named}

    def plain_leaves(self) -> tuple[list[Leaf], Leaf]:
        """Returns the plain leaves, and their treedef."""
        return jax.tree.flatten((list(self.plain), self.plain_named))

    def refuse_copies(self) -> None:
        """Raises if flattening a container makes objects anew each time."""
        for template, plain in (
            *zip(self.templates, self.plain, strict=True),
            *((template, self.plain_named[name]) for name, template in self.named),
        ):
            if isinstance(template, TreeTemplate) and template.roots:
                value = join_argument(template, plain, self.roots)
                leaves = jax.tree.leaves(value, is_leaf=is_object)
                if any(leaves[leaf] is not self.roots[root] for leaf, root in template.roots):
                    flatten(value)  # raises with the class whose flattening makes copies
                    kinds = ", ".join(sorted(_registered_types(template.treedef)))
                    raise ModuleError(
                        f"{kinds}: a class registered with JAX as a pytree node makes new "
                        "Variables when JAX puts it together, so what a function writes into them "
                        "would be lost. Let unflatten keep the children that it is given: "
                        "lambda _, children: Node(*children)."
                    )

    def static_values(self) -> Iterator[Any]:
        """Yields every static value inside of the arguments."""
        for template in (*self.templates, *(template for _, template in self.named)):
            if isinstance(template, TreeTemplate):
                for _, item in template.static:
                    yield item.value

    def release(self) -> None:
        """Lets go of objects and plain values; templates remain."""
        self.roots, self.plain, self.plain_named = [], (), {}

    def restore(
        self, plain: Sequence[object], plain_named: Mapping[str, object], roots: Sequence[object]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Puts arguments together from plain parts and roots (a transform's copies, usually)."""
        return join_arguments(self, plain, plain_named, roots)


def as_root(root: object) -> PyTree:
    """Returns a root that can be compared."""
    if isinstance(root, (Object, Wrapper)) or not callable(root):
        return root
    if not isinstance(root, functools.partial):
        return root if _is_hashable(root) else _ByIdentity(root)
    function = as_root(root.func)
    parts = (*root.args, *root.keywords.values())
    if function is root.func and all(_is_comparable(part) for part in parts):
        return root
    leaves, treedef = jax.tree.flatten((root.args, root.keywords), is_leaf=is_object)
    objects = [leaf for leaf in leaves if is_object(leaf)]
    other_leaves = [None if is_object(leaf) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if is_object(leaf)]
    return functools.partial(
        _PartialByIdentity(root, treedef, other_leaves, places), function, tuple(objects)
    )


def _is_comparable(part: object) -> bool:
    """Whether part of a partial is an object or hashable."""
    if not has_parts(part):
        return _is_hashable(part)
    handler = handler_of(part)
    return handler not in PLAIN or all(_is_comparable(item) for _, item in handler.children(part))


def _is_hashable(value: object) -> bool:
    try:
        Static(value)
    except TypeError:
        return False
    return True


class _ByIdentity:
    """A callable that is compared by identity."""

    def __init__(self, held) -> None:
        self.held = held

    def __hash__(self) -> int:
        return hash((type(self), id(self.held)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.held is self.held

    def __call__(self, /, *args: object, **kwargs: object) -> PyTree:
        return self.held(*args, **kwargs)


class _PartialByIdentity(_ByIdentity):
    """A partial without its function and its objects."""

    def __init__(self, held, treedef, others: Sequence[Any], places: Sequence[int]) -> None:
        super().__init__(held)
        self.treedef = treedef
        self.others = others
        self.places = places

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        function, objects, *behind = args
        leaves = list(self.others)
        for place, item in zip(self.places, objects, strict=True):
            leaves[place] = item
        positional, named = self.treedef.unflatten(leaves)
        return function(*positional, *behind, **{**named, **kwargs})


def root_places(label: str, template: object) -> list[tuple[int, Path]]:
    """Returns (position among the roots, path) of each object of an argument."""
    if isinstance(template, RootTemplate):
        return [(template.position, (label,))]
    if not isinstance(template, TreeTemplate):
        return []
    paths = leaf_paths(template.treedef)
    return [(root, (label, *paths[leaf])) for leaf, root in template.roots]


def root_names(labels: Iterable[str], arguments: SplitArguments) -> list[Path]:
    """Returns the path of each root."""
    names: list[Path] = [()] * len(arguments.roots)
    for label, template in [*zip(labels, arguments.templates, strict=True), *arguments.named]:
        for root, path in root_places(label, template):
            names[root] = path
    return names


def plain_paths(template: object, plain: object = None) -> Sequence[Path]:
    """Returns the paths of an argument's arrays, beside objects and static values."""
    if not isinstance(template, TreeTemplate):
        return leaf_paths(jax.tree.structure(plain))
    object_leaves = {leaf for leaf, _ in (*template.roots, *template.static)}
    paths = leaf_paths(template.treedef)
    return [path for leaf, path in enumerate(paths) if leaf not in object_leaves]
