# SPDX-License-Identifier: Apache-2.0
"""What values hold: the search for objects that no walk over a model finds.

A walk finds what stands in attributes, and in containers with a handler. It does not find a layer
inside a function: in a cell that it closes over, a default, an attribute. Such a layer would be
part of no state, gradient, optimizer or checkpoint, and a copy of the model would go on calling the
original. So static values are searched for objects when they are assigned, and whenever a structure
is walked, since a name that a function closes over may be bound later.

Looked at is what Python itself shows, without calling anything of the user's: cells, defaults and
attributes of functions; what methods and partials are bound to; items of containers; local names of
generators; attributes in ``__dict__`` and ``__slots__``; attributes of the user's own classes.
There is no limit of depth or number. The search does not go into what belongs to the program and
not to the model: globals of functions, modules, loggers, classes of Modules and of libraries. It
cannot go into what code in C shows to nobody.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import logging
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core._jax import never_changes_closures
from shardax._core.errors import StaticAttributeError, hidden_object
from shardax._core.graph import handlers
from shardax._core.graph.settings import attributes_of, is_of_library, package_of
from shardax._core.graph.static import PROGRAMS_ATTRIBUTE, Static
from shardax._core.object import Object, Placeholder, Wrapper


class Held(NamedTuple):
    """An object that a value holds."""

    item: Object | Placeholder
    steps: tuple[str, ...]  # how it is reached from the value, in words

    def error(self, value: object, where: str) -> StaticAttributeError:
        """Returns the error of the value, which is, or would be, part of a model."""
        shown = self.steps
        if len(shown) > _MOST_SHOWN:
            between = f"{len(shown) - _MOST_SHOWN} more steps"
            shown = (*shown[: _MOST_SHOWN - 1], between, shown[-1])
        return hidden_object(value, where, self.item, ", there by ".join(shown))


# How many steps an error shows.
_MOST_SHOWN = 6

# A part of a value, and how it is reached from there.
_Part = tuple[str, Any]

# How a value was reached: the way to what holds it, and the last step; None at first.
_Way = tuple[Any, str] | None

# Types of values that hold nothing, or what belongs to the program.
_ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, bytearray, range, slice),
        *(type(None), type(Ellipsis), type(NotImplemented), np.dtype, np.ufunc),
        *(types.ModuleType, types.CodeType, logging.Logger),
    }
)

# Attributes of functions in which shardax keeps programs, which hold no object of the user's.
_KEPT_PROGRAMS = frozenset({PROGRAMS_ATTRIBUTE})


class ObjectSearch:
    """A search through values; what several of them share is looked at once."""

    def __init__(self) -> None:
        # What was looked at, by ``id``.
        self._met: dict[int, Any] = {}

    def held_by(self, value: object) -> Held | None:
        """Returns the first object inside of a static value, or None."""
        if type(value) in _ATOMS or _is_bare(value):
            return None
        # An activation of JAX stands in many layers, and never changes if it is JAX's all through.
        is_of_jax = callable(value) and _is_of_jax(value)
        if is_of_jax and _is_known_empty(value):
            return None
        is_first = not self._met
        found = self._search([("", value)])
        if found is None and is_of_jax and is_first and all(map(_is_of_jax, self._met.values())):
            _note_empty(value)
        return found

    def beside_children(self, value: object, config: object) -> Held | None:
        """Returns the first object in a container that is none of its children, or None.

        Args:
            value: A container, of which a walk finds the children.
            config: All that the container is besides, by its handler.
        """
        return self._search(_parts_beside_children(value, config))

    def hidden_in(self, value: object) -> Held | None:
        """Returns the first object in an attribute's value that a walk does not find, or None."""
        handler = handlers.handler_of(value)
        if handler.is_object or handler is handlers.PLACEHOLDER:
            return None
        if not handlers.has_parts(value):
            return self.held_by(value)
        found = self.beside_children(value, handler.config(value))
        for _, child in handler.children(value):
            found = found or self.hidden_in(child)
        return found

    def _search(self, starts: Sequence[_Part]) -> Held | None:
        """Returns the object that is nearest to the starts, or None."""
        waiting = collections.deque[tuple[Any, _Way]]()
        waiting.extend((value, (None, step) if step else None) for step, value in starts)
        while waiting:
            value, way = waiting.popleft()
            kind = type(value)
            if issubclass(kind, (Object, Placeholder)):
                return Held(value, _steps_of(way))
            if kind in _ATOMS or id(value) in self._met or _is_bare(value):
                continue
            self._met[id(value)] = value
            waiting.extend((part, (way, step)) for step, part in _parts_of(value))
        return None


# Callables of JAX in which nothing was found, by ``id``.
_empty: dict[int, weakref.ref[Any]] = {}


def _is_known_empty(value: object) -> bool:
    known = _empty.get(id(value))
    return known is not None and known() is value


def _note_empty(value: object) -> None:
    key = id(value)
    with contextlib.suppress(TypeError):  # it cannot be known when it is gone
        _empty[key] = weakref.ref(value, lambda _: _empty.pop(key, None))


def _is_of_jax(value: Any) -> bool:
    """Whether a value is a callable of JAX, or part of one that never changes."""
    kind = type(value)
    if kind is types.FunctionType:
        return never_changes_closures(value)
    if kind is tuple:
        return all(map(_is_of_jax, value))
    return kind in _ATOMS or kind is types.CellType or package_of(kind) in ("jax", "jaxlib")


def _steps_of(way: _Way) -> tuple[str, ...]:
    steps: list[str] = []
    while way is not None:
        way, step = way
        if step:
            steps.append(step)
    return tuple(reversed(steps))


def _parts_beside_children(value: Any, config: object) -> list[_Part]:
    """Returns what a container, of which a walk finds the children, is besides them."""
    if isinstance(config, handlers.NodeType):
        return [("its static part", config.static.value)]
    if isinstance(config, Static):  # the function of a method
        return [("the attribute '__func__'", config.value)]
    if isinstance(value, Wrapper):
        return list(_parts_beside_function(value))
    if not isinstance(value, (tuple, list, dict, functools.partial)):
        return []  # what its handler lists is all that the value is
    parts = list(_named("attribute", attributes_of(value)))
    if isinstance(value, dict):
        parts.extend(("a key", key) for key in list(dict.keys(value)))
    return parts


def _is_bare(value: Any) -> bool:
    """Whether a value is a function of its code and its globals alone."""
    return (
        type(value) is types.FunctionType
        and value.__closure__ is None
        and value.__defaults__ is None
        and value.__kwdefaults__ is None
        and not value.__dict__
    )


# --- parts ----------------------------------------------------------------------------------------


_Parts = Callable[[Any], Iterable[_Part]]

_parts_by_type: weakref.WeakKeyDictionary[type, _Parts] = weakref.WeakKeyDictionary()


def _parts_of(value: object) -> Iterable[_Part]:
    """Returns everything that a value shows of what it holds."""
    kind = type(value)
    parts = _parts_by_type.get(kind)
    if parts is None:
        parts = _parts_by_type[kind] = _find_parts(kind)
    return parts(value)


def _find_parts(kind: type) -> _Parts:
    """Returns the function that lists the parts of instances of a class."""
    for known, parts in _PARTS_OF_KNOWN:
        if issubclass(kind, known):
            return parts
    if issubclass(kind, type):
        return _parts_of_class
    if issubclass(kind, Iterator) and package_of(kind) in _WITH_ITERATORS:
        return _parts_of_iterator
    if package_of(kind) in ("jax", "jaxlib"):
        return _parts_of_jax
    return _parts_of_instance


def set_aside(kind: type) -> None:
    """Leaves instances of a class, which describe models and hold none, out of searches."""
    _parts_by_type[kind] = _parts_of_nothing


def _parts_of_function(function: types.FunctionType) -> Iterator[_Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        for _, content in _parts_of_cell(cell):
            yield f"the closed-over name {name!r}", content

    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for name, default in zip(code.co_varnames[first:], defaults, strict=False):
        yield f"the default of {name!r}", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"the default of {name!r}", default

    yield from _named("attribute", function.__dict__)


def _parts_of_cell(cell: types.CellType) -> Iterator[_Part]:
    try:
        yield "", cell.cell_contents
    except ValueError:  # a name that is not bound yet: a later walk looks again
        return


def _parts_of_method(method: types.MethodType) -> Iterator[_Part]:
    yield "the attribute '__self__'", method.__self__
    yield "the attribute '__func__'", method.__func__


def _parts_of_builtin(method: Any) -> Iterator[_Part]:
    yield "the attribute '__self__'", method.__self__


def _parts_of_partial(partial: functools.partial[Any]) -> Iterator[_Part]:
    yield "the attribute 'func'", partial.func
    for index, argument in enumerate(partial.args):
        yield f"the argument {index}", argument
    yield from _named("argument", partial.keywords)
    yield from _parts_of_instance(partial)


def _parts_of_wrapper(wrapper: Wrapper) -> Iterator[_Part]:
    yield "the function that it runs", wrapper.function
    yield from _parts_beside_function(wrapper)


def _parts_beside_function(wrapper: Wrapper) -> Iterator[_Part]:
    yield from _named("option", wrapper._options_held())
    # ``functools.wraps`` writes ``__wrapped__``, which is only shown.
    attributes: dict[str, Any] = getattr(wrapper, "__dict__", {})
    yield from _named(
        "attribute", {name: item for name, item in attributes.items() if name != "__wrapped__"}
    )


def _parts_of_generator(generator: Any) -> Iterator[_Part]:
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        frame = getattr(generator, name, None)
        if frame is not None:
            yield from _named("local name", frame.f_locals)


def _parts_of_iterator(iterator: object) -> Iterator[_Part]:
    # Iterators of Python itself show what they iterate over to the garbage collector alone.
    for part in gc.get_referents(iterator):
        yield "what it iterates over", part


def _parts_of_call(call: Any) -> Iterator[_Part]:
    # An ``operator.methodcaller`` shows its arguments to ``pickle`` alone.
    for part in call.__reduce__()[1:]:
        yield "an argument", part


def _parts_of_dict(value: Any) -> Iterator[_Part]:
    # By the native class: methods of a class of the user may make what they return.
    native: Any = dict if isinstance(value, dict) else types.MappingProxyType
    for key, item in list(native.items(value)):
        yield "a key", key
        yield f"the entry {key!r}" if type(key) in _ATOMS else "an entry", item
    if isinstance(value, collections.defaultdict):
        yield "the attribute 'default_factory'", value.default_factory
    yield from _parts_of_instance(value)


def _parts_of_sequence(value: Any) -> Iterator[_Part]:
    native: Any = next(kind for kind in _SEQUENCES if isinstance(value, kind))
    for index, item in enumerate(list(native.__iter__(value))):
        yield f"the item {index}", item
    yield from _parts_of_instance(value)


def _parts_of_set(value: Any) -> Iterator[_Part]:
    native: Any = set if isinstance(value, set) else frozenset
    for item in list(native.__iter__(value)):
        yield "an item", item
    yield from _parts_of_instance(value)


def _parts_of_view(view: Iterable[object]) -> Iterator[_Part]:
    for item in list(view):
        yield "an item", item


def _parts_of_array(array: np.ndarray[Any, Any]) -> Iterator[_Part]:
    if array.dtype.hasobject:
        for item in np.ndarray.ravel(array).tolist():
            yield "an item", item
    yield from _parts_of_instance(array)


def _parts_of_descriptor(descriptor: Any) -> Iterator[_Part]:
    for name in ("__func__", "fget", "fset", "fdel"):
        yield f"the attribute {name!r}", getattr(descriptor, name, None)
    yield from _parts_of_instance(descriptor)


def _parts_of_class(kind: type) -> Iterator[_Part]:
    """Yields what a class of the user's own has; it may derive from others."""
    if issubclass(kind, Object) or is_of_library(kind):
        return
    yield from _named("class attribute", vars(kind))
    for base in kind.__bases__:
        yield "", base


def _parts_of_instance(value: object) -> Iterator[_Part]:
    yield from _named("attribute", attributes_of(value))
    if not is_of_library(type(value)):
        yield "", type(value)


def _parts_of_jax(value: Any) -> Iterator[_Part]:
    """Yields the function that JAX made a callable of, and its rules."""
    # Its other instances are large (programs, meshes) and hold nothing of the user's.
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None and callable(value):
        yield "the attribute '__wrapped__'", wrapped
        public = {
            name: part for name, part in attributes_of(value).items() if not name.startswith("_")
        }
        yield from _named("attribute", public)


def _named(what: str, parts: Any) -> Iterator[_Part]:
    for name, part in list(parts.items()):
        if name not in _KEPT_PROGRAMS:
            yield f"the {what} {name!r}", part


def _parts_of_nothing(value: object) -> tuple[_Part, ...]:
    return ()


_SEQUENCES = (list, tuple, collections.deque)
# Packages of Python's own iterators.
_WITH_ITERATORS = frozenset({"builtins", "itertools", "collections", "_collections"})


# Parts of instances of known classes; the first that fits decides.
_PARTS_OF_KNOWN: tuple[tuple[Any, _Parts], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.CellType, _parts_of_cell),
    (types.MethodType, _parts_of_method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _parts_of_builtin),
    (functools.partial, _parts_of_partial),
    (Wrapper, _parts_of_wrapper),
    ((staticmethod, classmethod, property), _parts_of_descriptor),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _parts_of_generator),
    ((operator.attrgetter, operator.itemgetter, operator.methodcaller), _parts_of_call),
    ((dict, types.MappingProxyType), _parts_of_dict),
    (_SEQUENCES, _parts_of_sequence),
    ((set, frozenset), _parts_of_set),
    ((type({}.keys()), type({}.values()), type({}.items())), _parts_of_view),
    (np.ndarray, _parts_of_array),
    (jax.Array, _parts_of_nothing),
)
