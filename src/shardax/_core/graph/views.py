# SPDX-License-Identifier: Apache-2.0
"""Views of the layers of stacked objects.

A *view* of a Variable whose value is stacked is a Variable of the same type without a value of its
own: it reads and writes its part of the *parent's* value. A view of a Module or container is an
object of the same type that holds views. The structure of all parts is one, so a view refuses to
change its own and follows changes of the original whenever the structure epoch advances. There is
at most one view of an object and part at a time, so that two ways to it are one Variable. A view
and its parent are two Variables for one value, so no lifted call takes both (``flatten_roots``,
``block_parents``).

How objects are stacked is in ``_core.graph.stacking``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container
from typing import Any

import numpy as np

from shardax._core import errors, threads
from shardax._core.errors import ModuleError
from shardax._core.explain.variable_errors import deleted_read
from shardax._core.frames import Blocked, Frame, resolve
from shardax._core.graph.definitions import VariableDef
from shardax._core.graph.flatten import ChildDecoder, GraphWalk
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.stacked_values import form_of, form_text, part_of, with_part
from shardax._core.graph.static import Metadata
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Encode, Object, epoch
from shardax._core.threads import local
from shardax._core.values import is_abstract, is_deleted
from shardax._core.variable import Variable

VIEW_LOCK = (
    "Cannot change {what}: it is a view of one layer of a stack, and all its layers have one "
    "structure. Change them together, through the stack itself (stack.stacked, stack.eval(), "
    "stack.set_attributes(...)), or take them apart: sx.nn.unstack_layers(stack)."
)


def view(source: Object, index: int, shared: Container[Object] = ()) -> Any:
    """Returns the view of one part of a stacked object.

    Args:
        source: The object that holds all parts, of any type; the view is of the same type.
        index: Which part.
        shared: Objects that are not stacked: they stand for themselves.
    """
    if source in shared:
        return source

    reference = _views.get((id(source), index))
    known = None if reference is None else reference()
    if known is not None:
        return known

    if isinstance(source, Variable):
        variable_view = _view_of_variable(source, index)
        _remember(variable_view, source, index, shared)
        return variable_view

    new_view = type(source)._allocate(source._owner, source._lock or VIEW_LOCK)
    _remember(new_view, source, index, shared)  # before it is filled: it may hold itself
    _fill(new_view, source, index, shared)
    return new_view


# --- views of Variables ---------------------------------------------------------------------------


def _view_of_variable(parent: Variable, index: int) -> Any:
    plain_type = type(parent) if parent._parent is None else parent._plain
    new_view = object.__new__(_view_type(plain_type))
    new_view._parent = parent
    new_view._index = index
    new_view._marked = False
    new_view._stamp = None
    return new_view


@functools.lru_cache(maxsize=256)
def _view_type(plain: type[Variable]) -> type[Any]:
    """Returns the subclass for views of a Variable type."""
    namespace = {
        "__slots__": ("_index", "_parent"),
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__qualname__": plain.__qualname__,
        "_plain": plain,
    }
    metaclass: Any = type(plain)
    return metaclass(plain.__name__, (_ViewOfVariable, plain), namespace)


class _ViewOfVariable:
    """What makes a Variable type a view; everything is the parent's."""

    __slots__ = ()
    _parent: Variable
    _index: int
    _plain: Any  # the Variable type that this is a view of

    @property
    def _owner(self) -> Frame | None:
        return self._parent._owner

    @property
    def _lock(self) -> str | None:
        return self._parent._lock

    @_lock.setter
    def _lock(self, lock: str | None) -> None:
        self._parent._lock = lock

    @property
    def variable_type(self) -> type[Variable]:
        """The type that this is a view of."""
        return self._plain

    @property
    def _metadata(self) -> Metadata:
        return _part_metadata(self._parent._metadata)

    @property
    def _value(self) -> PyTree:
        parent = self._parent
        return part_of(parent._value, self._index, lambda: parent.value)

    @_value.setter
    def _value(self, new: PyTree) -> None:
        self._check_part(new)
        stacked = self._parent._value
        if is_abstract(stacked):
            return  # and so is the new one, of the same form, as checked

        if isinstance(new, LazyValue):
            new = new.compute()
        if not (isinstance(stacked, np.ndarray) and isinstance(new, np.ndarray)):
            stacked = self._parent.value
        self._parent._value = with_part(stacked, self._index, new)

    @property
    def value(self) -> PyTree:
        """The part of the parent's value; setting writes that part."""
        target = resolve(self, local.frame)
        if type(target) is not type(self):  # passed in, so it stands for itself here
            return target.value

        if threads.several and local.frame is None:
            threads.note_read(target)  # pyright: ignore[reportArgumentType]
        stacked = target._parent._here()._read()
        if local.frame is None and is_deleted(stacked):
            raise deleted_read(target)  # pyright: ignore[reportArgumentType]
        return part_of(stacked, target._index)

    @value.setter
    def value(self, value: PyTree) -> None:
        type(self)._plain.value.fset(self, value)

    def _read(self) -> PyTree:
        return part_of(self._parent._read(), self._index)

    @classmethod
    def _make(cls, *contents: Any) -> Any:
        return cls._plain._make(*contents)

    def __reduce_ex__(self, protocol: object) -> Any:
        # A Variable of its own with this part's value, as in every copy of a view.
        plain: Any = self._plain
        return _copied_view, (plain, plain.__getstate__(self))

    def _flatten(self, encode: Encode) -> VariableDef:
        return VariableDef(self._plain, self._metadata)

    def _stand_in(self, frame: Frame) -> Any:
        """Returns the stand-in of a captured view: a view of its parent's."""
        return view(resolve(self._parent, frame), self._index)

    def _check_part(self, new: PyTree) -> None:
        """Raises if a value does not have the form of the part."""
        stacked = self._parent._value
        if form_of(stacked, 1) != form_of(new) or is_abstract(stacked) != is_abstract(new):
            raise errors.unlike_part(self._plain.__name__, form_text(stacked, 1), form_text(new))

    def _check_metadata_write(self, what: str) -> None:
        raise ModuleError(VIEW_LOCK.format(what=what))


def _copied_view(plain: type[Variable], state: object) -> Variable:
    """Returns a Variable with the state of a pickled view."""
    variable = object.__new__(plain)
    variable.__setstate__(state)
    return variable


@functools.lru_cache(maxsize=1024)
def _part_metadata(metadata: Metadata) -> Metadata:
    return metadata.without_axis(0)


# --- views of Modules and containers --------------------------------------------------------------


class _OneLevel(GraphWalk):
    """A walk that does not look into what it meets."""

    def visit(self, item: Object, path: Path) -> int:
        """Returns the object's position."""
        if id(item) not in self.index:
            self.index[id(item)] = len(self.objects)
            self.objects.append(item)
        return self.index[id(item)]


def _fill(new_view: Object, source: Object, index: int, shared: Container[Object]) -> None:
    """Gives a view what its original holds now."""
    # Later changes of the original advance the epoch, and so bring it here again.
    object.__setattr__(source, "_marked", True)

    walk = _OneLevel()
    definition = source._flatten(lambda child, step: walk.encode(child, (step,)))
    views_of_objects = [view(item, index, shared) for item in walk.objects]
    new_view._unflatten(definition, ChildDecoder(views_of_objects))


def _follow(changed: tuple[object, ...]) -> None:
    """Gives the views of changed Modules and containers what these hold now."""
    targets = {id(item) for item in changed}
    for reference in list(_views.values()):
        source_id, index = reference.key
        if source_id not in targets or isinstance(reference.source, Variable):
            continue
        outdated = reference()
        if outdated is not None:
            _fill(outdated, reference.source, index, reference.shared)
            targets.add(id(outdated))  # views of views come after them


epoch.on_advance(_follow)


# --- all views that exist -------------------------------------------------------------------------


class _ViewReference(weakref.ref[Any]):
    """A weak reference to a view, and what it was made of."""

    __slots__ = ("key", "shared", "source")
    key: tuple[int, int]  # ``id`` of the original, and the part
    source: Object  # the original, which lives as long as the view
    shared: Container[Any]


_views: dict[tuple[int, int], _ViewReference] = {}


def _remember(new_view: Object, source: Object, index: int, shared: Container[Object]) -> None:
    reference = _ViewReference(new_view, _forget)
    reference.key = (id(source), index)
    reference.source = source
    reference.shared = shared
    _views[reference.key] = reference


def _forget(
    reference: _ViewReference,
    # Bound here: globals are gone when the interpreter ends.
    views: dict[tuple[int, int], _ViewReference] = _views,
) -> None:
    if views.get(reference.key) is reference:
        del views[reference.key]


# --- views in transforms --------------------------------------------------------------------------


def block_parents(frame: Frame, variable: Variable) -> None:
    """Has a frame that was given a view refuse the view's parents."""
    parent = variable._parent
    while parent is not None:
        frame.copies[id(parent)] = (parent, Blocked(_refuse_parent))
        parent = parent._parent


def _refuse_parent(parent: Variable) -> None:
    raise errors.stack_of_passed_view(type(parent).__name__)
