# SPDX-License-Identifier: Apache-2.0
"""Views: one part of stacked objects, to be read and written in place.

A *view* of a Variable whose value is stacked (``core.stacked``) is a Variable of the same type that
holds no value of its own: reading it takes its part of the *parent's* value, writing it writes that
part. A view of a Module or container is an object of the same type that holds views of what the
original holds. The structure of all parts is one, so a view refuses to change its own; it follows
changes of the original, whenever the structure epoch advances.

There is at most one view of an object and part at a time, so that two ways to it are one Variable.
A view and its parent are two Variables for one value, so they cannot be given to one lifted call
together (``core.structure.flatten_roots``, ``block_parents``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container
from typing import Any

import jax
import numpy as np

from shardax.core import epoch
from shardax.core.errors import LayerViewError
from shardax.core.frames import Blocked, Frame, local, resolve
from shardax.core.lazy import LazyValue
from shardax.core.metadata import Metadata
from shardax.core.node import Object
from shardax.core.stacked import part_of, with_part
from shardax.core.structure import Decoder, VariableDef, Walk
from shardax.core.variables import Variable

_LOCK = (
    "Cannot change {what}: it is a view of one layer of a stack, and all its layers have one "
    "structure. Change them together, through the stack itself (stack.stacked, stack.eval(), "
    "stack.set_attributes(...)), or take them apart: sx.nn.unstack_layers(stack)."
)


class _ViewOfVariable:
    """What makes a Variable type a view; everything is the parent's."""

    __slots__ = ()
    _parent: Variable[Any]
    _index: int

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
    def _metadata(self) -> Metadata:
        return _part_metadata(self._parent._metadata)

    @property
    def _value(self) -> Any:
        parent = self._parent
        return part_of(parent._value, self._index, lambda: parent.value)

    @_value.setter
    def _value(self, new: Any) -> None:
        self._check_part(new)
        old = self._parent._value
        if isinstance(old, jax.ShapeDtypeStruct):
            return  # a shape of the same form, as checked
        if isinstance(new, LazyValue):
            new = new.compute()
        if not (isinstance(old, np.ndarray) and isinstance(new, np.ndarray)):
            old = self._parent.value
        self._parent._value = with_part(old, self._index, new)

    @property
    def value(self) -> Any:
        """The part of the parent's value; setting writes that part."""
        target: Any = resolve(self, local.frame)
        if type(target) is not type(self):  # passed in, so it stands for itself here
            return target.value
        return part_of(target._parent.value, target._index)

    @value.setter
    def value(self, value: Any) -> None:
        type(self)._plain.value.fset(self, value)

    _plain: Any
    """The Variable type that this is a view of."""

    @classmethod
    def _make(cls, *parts: Any) -> Any:
        return cls._plain._make(*parts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A Variable of its own with this part's value, as in every copy of a view.
        plain: Any = self._plain
        return _copied_view, (plain, plain.__getstate__(self))

    def _describe(self, encode: Any) -> VariableDef:
        return VariableDef(self._plain, self._metadata)

    def _stand_in(self, frame: Frame) -> Any:
        return stand_in(self, frame)

    def _check_part(self, new: Any) -> None:
        """Raises if a value does not have the form of the part that it is to replace."""
        old = self._parent._value
        if _form(old, 1) != _form(new) or _is_abstract(old) != _is_abstract(new):
            raise LayerViewError(
                f"Cannot write {_shown(new)} to a view of one layer of a stacked "
                f"{self._plain.__name__}, whose part is {_shown(old, 1)}: the layers of a stack "
                f"are one array. Convert the value, or write the stacked Variable whole."
            )

    def _check_metadata_write(self, what: str) -> None:
        raise LayerViewError(_LOCK.format(what=what))


def _copied_view(plain: Any, state: Any) -> Variable[Any]:
    """Returns a Variable with the state that a view had when it was pickled."""
    variable = object.__new__(plain)
    variable.__setstate__(state)
    return variable


@functools.lru_cache(maxsize=1024)
def _part_metadata(metadata: Metadata) -> Metadata:
    return metadata.without_axis(0)


def _form(value: Any, lead: int = 0) -> Any:
    """Structure, shapes and dtypes of a value; without the leading dimensions."""
    leaves, treedef = jax.tree.flatten(value)
    return treedef, [(tuple(leaf.shape[lead:]), leaf.dtype) for leaf in leaves]


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _shown(value: Any, lead: int = 0) -> str:
    shown = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[lead:])}", value)
    abstract = "the abstract " if _is_abstract(value) else ""
    return abstract + (shown if isinstance(shown, str) else str(shown).replace("'", ""))


@functools.lru_cache(maxsize=256)
def _view_type(plain: type[Variable[Any]]) -> Any:
    """Returns the type of views of a Variable type; a subclass of it, of the same name."""
    namespace = {
        "__slots__": ("_index", "_parent"),
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__qualname__": plain.__qualname__,
        "_plain": plain,
    }
    metaclass: Any = type(plain)
    return metaclass(plain.__name__, (_ViewOfVariable, plain), namespace)


class _Known(weakref.ref[Any]):
    """A view that exists, and what it was made of."""

    __slots__ = ("key", "shared", "source")
    key: tuple[int, int]
    source: Object
    shared: Container[Any]


_known: dict[tuple[int, int], _Known] = {}
"""Every view, by ``id`` of the original and part. An entry keeps the original alive."""


def _remember(made: Any, source: Object, index: int, shared: Container[Any]) -> None:
    ref = _Known(made, _forget)
    ref.key, ref.source, ref.shared = (id(source), index), source, shared
    _known[ref.key] = ref


def _forget(ref: Any, known: dict[tuple[int, int], _Known] = _known) -> None:
    if known.get(ref.key) is ref:  # bound above: globals are gone when the interpreter ends
        del known[ref.key]


def view(source: Any, index: int, shared: Container[Any] = ()) -> Any:
    """Returns the view of one part of a stacked object.

    Args:
        source: A Module, container or Variable, of which every array has a leading dimension.
        index: Which part, from 0.
        shared: Objects below that are not stacked; the view holds them themselves.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> stacked = sx.Param(jnp.zeros((2, 3)), axes=("layers", "embed"))
        >>> second = view(stacked, 1)
        >>> second[...] = jnp.ones(3)
        >>> stacked.value.tolist(), second.axes, view(stacked, 1) is second
        ([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], ('embed',), True)
    """
    if source in shared:
        return source
    known = _known.get((id(source), index))
    made: Any = None if known is None else known()
    if made is not None:
        return made
    if isinstance(source, Variable):
        made = object.__new__(_view_type(_plain_type(source)))
        made._parent, made._index, made._marked = source, index, False
        _remember(made, source, index, shared)
        return made
    made = type(source)._allocate(source._owner, source._lock or _LOCK)
    _remember(made, source, index, shared)
    _fill(made, source, index, shared)
    return made


def _plain_type(variable: Any) -> Any:
    return type(variable) if variable._parent is None else variable._plain


class _Shallow(Walk):
    """A walk that does not look into what it meets."""

    def visit(self, item: Object, path: Any) -> int:
        """Returns the object's position."""
        if id(item) not in self.index:
            self.index[id(item)] = len(self.objects)
            self.objects.append(item)
        return self.index[id(item)]


def _fill(made: Any, source: Any, index: int, shared: Container[Any]) -> None:
    """Gives a view what its original holds now, and has later changes of that advance the epoch."""
    source._marked = True
    walk = _Shallow()
    definition = source._describe(lambda child, key: walk.encode(child, (key,)))
    made._fill(definition, Decoder([view(child, index, shared) for child in walk.objects]))


def _follow() -> None:
    """Gives all views of Modules and containers what their originals hold now."""
    for ref in list(_known.values()):
        made: Any = ref()
        if made is not None and not isinstance(made, Variable):
            _fill(made, ref.source, ref.key[1], ref.shared)


epoch.on_advance(_follow)


def stand_in(variable: Any, frame: Frame) -> Any:
    """Returns what stands in a frame for a view that was not passed in: a view of its parent's.

    Args:
        variable: The view, as the calling frame has it.
        frame: The frame.
    """
    return view(resolve(variable._parent, frame), variable._index)


def block_parents(frame: Frame, variable: Any) -> None:
    """Has a frame that was given a view refuse the view's parents.

    Args:
        frame: The frame.
        variable: The view that was passed in.
    """
    parent = variable._parent
    while parent is not None:
        frame.copies[id(parent)] = (parent, Blocked(_refuse_parent))
        parent = parent._parent


def _refuse_parent(parent: Any) -> None:
    raise LayerViewError(
        f"A stacked {type(parent).__name__} was used inside a transform that was given a view of "
        f"one of its layers: they would be two Variables for one value. Pass the stack and take "
        f"the layer inside: layer = stack[i]."
    )
