# SPDX-License-Identifier: Apache-2.0
"""Variables: the mutable cells of a model.

A *Variable* is a cell with identity. It holds a *value* (an array, or any pytree of arrays) and
*metadata* (axis names and whatever else the user attached). Its class is its *type*: ``Param`` for
what is trained, ``BatchStat`` for running statistics, and so on; users subclass for their own
kinds, and filters select by class.

Identity is what makes sharing meaningful. The same Variable reached by two paths is one cell: it is
written once, has one gradient and one entry in a checkpoint. Two Variables with equal values are
still two.

A value may be *lazy* (``_core.init.lazy``), materialised by reading it, or *abstract* (a
``jax.ShapeDtypeStruct``), without numbers to read. Inside a lifted transform a Variable reads and
writes the stand-in that the transform made for it (``_core.frames``), so the same code works
whether a Variable was passed in or is reached through a closure.
"""

from __future__ import annotations

import contextlib
import copy as _copy
import sys
import types
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardax._core import _jax
from shardax._core.array_ops import (
    ArrayLike,
    as_value,
    assigned,
    cast_part,
    copied,
    leaf_of,
    part_misfit,
    realise,
    snapshot,
)
from shardax._core.cross_process import packed
from shardax._core.errors import (
    DonationError,
    MetadataError,
    StateMismatchError,
    VariableValueError,
    first_of,
    user_frame,
)
from shardax._core.frames import (
    READ_ONLY,
    Frame,
    Stamp,
    a_kind_of,
    check_trace,
    check_unlocked,
    check_unwritten,
    exclusive,
    in_one_step,
    is_ref,
    kind_of,
    local,
    note_read,
    note_write,
    owner_here,
    realising,
    resolve,
    several,
)
from shardax._core.graph.flatten import VariableDef, flatten, register_variable
from shardax._core.graph.handlers import axes_of, handler_of
from shardax._core.graph.held import ObjectSearch
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.static import EMPTY, Metadata, check_axes
from shardax._core.init.lazy import Init, LazyValue
from shardax._core.object import Object, epoch

if TYPE_CHECKING:
    from shardax._core.frozen import FrozenVariable


T = TypeVar("T")


class _VariableType(type):
    """Gives subclasses empty slots, so that a stray attribute is an error."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, object], **kwargs: object
    ) -> Any:
        namespace.setdefault("__slots__", ())
        return super().__new__(mcs, name, bases, namespace, **kwargs)


_OTHER_NAMES = frozenset(("names", "out_sharding", "sharding", "sharding_names"))


def _without_other_names(kind: type, metadata: Mapping[str, object]) -> dict[str, object]:
    """Entries without names that are None; raises for other names."""
    for option in _OTHER_NAMES.intersection(metadata):
        names = metadata[option]
        if names is None:
            continue
        spec = getattr(names, "spec", names)
        example = repr(tuple(spec)) if isinstance(spec, (tuple, list, PartitionSpec)) else "(...)"
        raise MetadataError(
            f"{kind.__name__}({option}={names!r}): dimensions are named by axes=, with axes of the "
            f"mesh or names that rules map to them: {kind.__name__}(value, axes={example})."
        )
    return {key: entry for key, entry in metadata.items() if key not in _OTHER_NAMES}


def _check_entries(kind: type, entries: Mapping[str, Any]) -> None:
    """Raises if metadata holds Variables or Modules, of which a model would know nothing."""
    for name, entry in entries.items():
        held = None if isinstance(entry, Object) else ObjectSearch().held_by(entry)
        if held is not None:
            raise held.error(entry, f"the metadata entry {name!r} of a {kind.__name__}")


def _with_box(kind: type, axes: object, entries: dict[str, object], init: Init) -> tuple[Any, Any]:
    """Axes and entries with those of the box around an initializer's value."""
    assert init.metadata is not None
    if init.metadata.axes is None and axes is not None:
        return axes, entries  # the box knows no names, and so no rules for these
    names = init.metadata.axes
    if names is not None:
        names += (None,) * (len(init.shape) - len(names))
        _check_names_of_box(kind, axes, names, "an initializer")
    return names, {**init.metadata.entries, **entries}


def _check_names_of_box(kind: type, axes, names: tuple[Any, ...] | None, source: str) -> None:
    if axes is not None and names is not None and tuple(axes) != names:
        raise MetadataError(
            f"A {kind.__name__} with axes={axes!r} was given {source} with the names "
            f"{names} of a box: give the names once, to a new {kind.__name__}."
        )


def _out_of_box(kind: type[Variable], axes: object, value: object) -> tuple[Any, Metadata | None]:
    """The value in a box and its metadata; others as they are."""
    contents = handler_of(value).contents
    if contents is None or kind._holds_boxes:
        return value, None
    inner, metadata = contents(value)
    _check_names_of_box(kind, axes, metadata.axes, "a box")
    return inner, metadata


class Variable(ArrayLike, Object, Generic[T], metaclass=_VariableType):
    """A mutable cell with identity: a value and metadata.

    Args:
        value: An array, a number, a pytree of arrays, an ``Init``, a ``jax.ShapeDtypeStruct``,
            another Variable or a box (whose value is taken; the names of a box become the axes), or
            a ``jax.Ref``, which is then read and written in place, also by plain JAX transforms.
        axes: Logical axis names, one per dimension of the array.
        **metadata: Any hashable entries. ``tag="name"`` (or ``tags=("a", "b")``) can be selected by
            the filter ``"name"``.

    Raises:
        VariableValueError: If the value is not made of arrays.
        MetadataError: If ``axes`` does not fit the array's rank or metadata is not hashable.
        StaticAttributeError: If metadata has a function, or another value, with Variables or
            Modules inside.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> count = sx.Variable(jnp.zeros(3), axes=("cell",), tag="counter")
        >>> count[...] = count + 1
        >>> count.value.tolist(), count.axes
        ([1.0, 1.0, 1.0], ('cell',))
    """

    __slots__ = (
        "__weakref__",
        "_labels",
        "_lock",
        "_marked",
        "_metadata",
        "_owner",
        "_stamp",
        "_value",
    )
    # The labels under which ``_core.state.bind`` took the Variable out of trees; usually unset.
    _labels: tuple[Path, ...]
    # The stacked Variable that this one is a view of (``_core.graph.views``), or None.
    _parent: Any = None
    # Whether the Variable keeps a box as it is, instead of its value and names.
    _holds_boxes = False

    def __init__(self, value: Any, *, axes: Any = None, **metadata: Any) -> None:
        self._owner: Frame | None = owner_here()
        self._lock: str | None = None
        self._marked = False
        self._stamp: Stamp | None = None
        if isinstance(value, Variable):
            value = value.value
        elif not isinstance(value, jax.Array):
            value, boxed = _out_of_box(type(self), axes, value)
            if boxed is not None:
                axes = boxed.axes if axes is None else axes
                metadata = {**boxed.entries, **metadata}
        self._value: Any = as_value(value, kind_of(self))
        if isinstance(value, Init) and value.is_traced:
            self._value = value.compute()
        if isinstance(value, Init) and value.metadata is not None:
            axes, metadata = _with_box(type(self), axes, metadata, value)
        if not _OTHER_NAMES.isdisjoint(metadata):
            metadata = _without_other_names(type(self), metadata)
        if metadata:
            _check_entries(type(self), metadata)
        names = check_axes(axes)
        self._metadata = EMPTY if names is None and not metadata else Metadata(names, metadata)
        _check_rank(self, names)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_variable(cls)

    # --- value -----------------------------------------------------------------------------------

    @property
    def value(self) -> Leaf:
        """The value; reading a lazy one materialises it.

        Setting checks that the write cannot be lost or leak.
        """
        frame = local.frame
        target = self if self._owner is frame else resolve(self, frame)
        if several and frame is None:
            note_read(target)
        value = target._real()
        if frame is None and is_deleted(value):
            refuse_read(target)
        return value

    @value.setter
    def value(self, value: object) -> None:
        if type(value) is Init and value.metadata is not None:
            _with_box(type(self), self.axes or (), {}, value)
        if isinstance(value, Variable):
            _check_frozen(self, value)
        elif not isinstance(value, jax.Array):
            value, _ = _out_of_box(type(self), self.axes or (), value)
        self._write(as_value(value, kind_of(self)), check=True)

    def _real(self):
        """Returns the value, materialised once for all threads."""
        value = self._value
        if isinstance(value, (np.ndarray, LazyValue)):
            with realising:
                value = self._value
                if isinstance(value, (np.ndarray, LazyValue)):
                    value = self._value = realise(value, self._owner)
        return value[...] if is_ref(value) else value

    def _write(self, value: object, check: bool = False) -> None:
        frame = local.frame
        target = self if self._owner is frame else resolve(self, frame)
        if is_ref(target._value) and not is_ref(value):
            target._write_in_place(value)
            return
        if target._lock is not None:
            check_unlocked(target)
        check_trace(target)
        if frame is not None or not several:
            target._value = value
            return
        with exclusive:
            if check:
                check_unwritten(target)

            # Only a thread that makes this value real could store another one over the new one;
            # the initializer of another Variable may run for long, and is not waited for.
            if isinstance(target._value, (np.ndarray, LazyValue)):
                with realising:
                    target._value = value
            else:
                target._value = value

            note_write(target)

    def _write_in_place(self, value: object) -> None:
        """Writes into the ``jax.Ref`` that the Variable holds."""
        # JAX knows of such a write, so it is not lost inside a plain transform.
        if self._lock is not None and self._lock is not READ_ONLY:
            check_unlocked(self)
        ref = self._value
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if (shape, dtype) != (ref.shape, ref.dtype):
            raise VariableValueError(
                f"This {kind_of(self)} holds a jax.Ref of {ref.dtype}{list(ref.shape)}, which is "
                f"written in place and cannot take "
                f"{f'{dtype}{list(shape)}' if shape is not None else f'a {type(value).__name__}'}. "
                f"Give it another one: v.value = jax.new_ref(x)."
            )
        with in_one_step():
            ref[...] = value.compute() if isinstance(value, LazyValue) else value

    def __getitem__(self, index: object) -> Any:
        value = self.value
        return value if index is Ellipsis else value[index]

    def __setitem__(self, index: Any, new: Any) -> None:
        if isinstance(new, Variable):
            if index is Ellipsis:
                _check_frozen(self, new)
            new = new.value
        if index is Ellipsis:
            if type(new) is Init and new.metadata is not None:
                _with_box(type(self), self.axes or (), {}, new)
            if not isinstance(new, jax.Array):
                new, _ = _out_of_box(type(self), self.axes or (), new)
            old = self._here()._value
            old = old[...] if is_ref(old) else old
            with _naming_place(self):
                new = assigned(old, new, kind_of(self))
            self._write(new, check=True)
            return
        with in_one_step():
            value = self._here()._real()  # not as a read, so that v[i] += 1 is checked as a whole
            if isinstance(value, jax.Array):
                with _naming_place(self):
                    new = cast_part(value, new, kind_of(self))
            if hasattr(value, "at"):
                self._write(_with_part(self, value, index, new), check=True)
            elif isinstance(value, (dict, list)):
                value = _copy.copy(value)
                value[index] = new
                self.value = value
            else:
                raise VariableValueError(
                    f"Cannot write at index {index!r} of a value of type {type(value).__name__}; "
                    f"replace it: v.value = new."
                )

    def _without_attribute(self, name: str) -> str:
        if name not in self.metadata:
            return super()._without_attribute(name)
        return (
            f"{self!r} has no attribute {name!r}: it is an entry of its metadata, "
            f"v.metadata[{name!r}]."
        )

    # --- metadata --------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[Any, ...] | None:
        """Logical axis names, one per dimension, or None."""
        return self._here()._metadata.axes

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Read-only mapping of the metadata entries other than ``axes``."""
        return self._here()._metadata.entries

    def set_metadata(self, **changes: object) -> None:
        """Changes metadata entries in place; ``axes=`` renames the dimensions.

        Args:
            **changes: Entries to set.

        Raises:
            MetadataError: If an entry is not hashable or ``axes`` does not fit the rank.
            StaticAttributeError: If an entry is a function, or another value, with Variables or
                Modules inside.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> w = sx.Param(jnp.zeros((2, 3)))
            >>> w.set_metadata(axes=("embed", "mlp"), frozen=True)
            >>> w.axes, dict(w.metadata)
            (('embed', 'mlp'), {'frozen': True})
        """
        changes = _without_other_names(type(self), changes)
        _check_entries(type(self), changes)
        target = self._here()
        target._check_metadata_write(f"metadata of {a_kind_of(self)}")
        check_trace(target, f"metadata of {a_kind_of(self)}")
        metadata = target._metadata.replace(**changes)
        _check_rank(target, metadata.axes)
        if metadata == target._metadata:
            return
        target._metadata = metadata
        if target._marked:
            epoch.advance(target)

    def _check_metadata_write(self, what: str) -> None:
        """Raises if the metadata must not be changed here."""
        if self._lock is not None:
            check_unlocked(self, what)

    # --- what is known without reading ------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, without materialising it."""
        return tuple(np.shape(self._leaf()))

    @property
    def dtype(self) -> Any:
        """Dtype of the array, without materialising it."""
        return self._leaf().dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions, without materialising."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, without materialising."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def sharding(self) -> Any:
        """Sharding of the array, or None if there is none yet."""
        return getattr(self._leaf(), "sharding", None)

    @property
    def is_lazy(self) -> bool:
        """Whether the value is still a recipe."""
        return isinstance(self._here()._value, LazyValue)

    @property
    def is_abstract(self) -> bool:
        """Whether the value is only shapes and dtypes (``jax.ShapeDtypeStruct``)."""
        leaves = jax.tree.leaves(self._here()._value)
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)

    def _here(self) -> Self:
        return self if self._owner is local.frame else resolve(self, local.frame)

    def _leaf(self):
        return leaf_of(self._here()._value, type(self).__name__)

    # --- copies ----------------------------------------------------------------------------------

    def replace(self, value: object) -> Self:
        """Returns a Variable of this type and metadata with another value.

        Args:
            value: As for the constructor.

        Raises:
            VariableValueError: If the value is not made of arrays.
            MetadataError: If its rank does not fit the axes.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> w = sx.Param(jnp.zeros(2), axes=("embed",))
            >>> w.replace(jnp.ones(2)).axes
            ('embed',)
        """
        if type(value) is Init and value.metadata is not None:
            _with_box(type(self), self.axes or (), {}, value)
        variable = self._make(as_value(value, kind_of(self)), self._here()._metadata, owner_here())
        _check_rank(variable, variable._metadata.axes)
        return variable

    def update(self, value: object) -> None:
        """Takes a value of the same shape and dtype.

        Args:
            value: An array, a frozen value, or a Variable, whose value is taken.

        Raises:
            StateMismatchError: If shape or dtype differ, or if it is the frozen value of another
                label than ``unbind`` gave this Variable; nothing is changed.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> w = sx.Param(jnp.zeros(2))
            >>> w.update(sx.Param(jnp.ones(2)).freeze())
            >>> w.value.tolist()
            [1.0, 1.0]
        """
        fitting, problem = fitted(self, value)
        if problem:
            raise StateMismatchError(
                f"The {kind_of(self)} {problem}; nothing was changed. To change shape or "
                f"dtype on purpose, replace the value: v.value = array."
            )
        self._write(fitting)

    def freeze(self) -> FrozenVariable[T]:
        """Returns the present value, immutable, with type and metadata.

        It shares the arrays, which cannot change. Its label is that of the Variable, if ``unbind``
        gave it one, or else the empty path.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> w = sx.Param(jnp.zeros(2), axes=("embed",))
            >>> frozen = w.freeze()
            >>> w[...] = jnp.ones(2)
            >>> frozen.value.tolist(), frozen.axes, frozen.variable_type.__name__
            ([0.0, 0.0], ('embed',), 'Param')
        """
        from shardax._core.frozen import frozen  # what is frozen is a Variable, so it stands above

        return frozen(self, getattr(self, "_labels", ((),))[-1])

    @classmethod
    def _make(cls, value, metadata: Metadata, owner: Frame | None, lock: str | None = None) -> Self:
        """Makes a Variable from parts that are known to be valid."""
        variable = object.__new__(cls)
        variable._owner = owner
        variable._lock = lock
        variable._marked = False
        variable._stamp = None
        variable._value = value
        variable._metadata = metadata
        return variable

    def _copy_into(self, frame: Frame) -> Self:
        return self._make(self._real(), self._metadata, frame)

    def _flatten(self, encode: object) -> VariableDef:
        return VariableDef(type(self), self._metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        target = self._here()
        if has_deleted(target._value):
            refuse_read(target)
        value = jax.tree.map(copied_leaf, target._value)
        copied = self._make(value, target._metadata, owner_here())
        if hasattr(self, "_labels"):
            copied._labels = self._labels
        return copied

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __getstate__(self) -> Any:
        return (packed(self.value), self._metadata, getattr(self, "_labels", None))

    def __setstate__(self, state: Any) -> None:
        self._value, self._metadata, labels = state
        if labels is not None:
            self._labels = labels
        self._owner, self._lock, self._marked, self._stamp = owner_here(), None, False, None

    def __repr__(self) -> str:
        value = self._here()._value
        if isinstance(value, (jax.Array, np.ndarray, LazyValue, jax.ShapeDtypeStruct)):
            form = f"{value.dtype}{list(value.shape)}"
        else:
            form = repr(jax.tree.map(_leaf_form, value))
        lazy = ", lazy" if isinstance(value, LazyValue) else ""
        if isinstance(value, jax.Array) and not isinstance(value, _jax.Tracer):
            owners = sorted({device.process_index for device in value.sharding.device_set})
            lazy = f" over processes {', '.join(map(str, owners))}" if len(owners) > 1 else ""
        metadata = repr(self._metadata)
        return f"{type(self).__name__}({form}{lazy}{', ' + metadata if metadata else ''})"


def _leaf_form(leaf: Leaf) -> Any:
    """Returns dtype and shape of an array; anything else as it is."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else leaf


def is_deleted(leaf: object) -> bool:
    """Whether an array was donated or deleted."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer) and leaf.is_deleted()


def has_deleted(value: object) -> bool:
    """Whether a value or a part of it was donated or deleted."""
    return any(map(is_deleted, jax.tree.leaves(value)))


_OF_DELETED = (
    "A donated array may be used only once; if two models share arrays, as one that was merged "
    "from the state of the other, copy one of them first: sx.clone(model)."
)


def refuse_deleted(paths: Sequence[Path | str], values: Sequence[Leaf]) -> None:
    """Raises if a value was donated or deleted, listing all."""
    pairs = zip(paths, values, strict=True)
    deleted_paths = [path for path, value in pairs if has_deleted(value)]
    if deleted_paths:
        names = [path if isinstance(path, str) else format_path(path) for path in deleted_paths]
        raise DonationError(
            f"{len(names)} Variables hold arrays that were donated or deleted: {first_of(names)}. "
            f"{_OF_DELETED}"
        )


def refuse_read(variable: object) -> NoReturn:
    """Raises the error of a read, with a path in a caller."""
    places = list(_places_of(variable, sys._getframe(1)))
    described = ", ".join([*places[-1:], a_kind_of(variable)])
    raise DonationError(f"Cannot read {described}: its array was donated or deleted. {_OF_DELETED}")


@contextlib.contextmanager
def _naming_place(variable: Variable) -> Generator[None]:
    """Adds the place of a Variable to errors about its value."""
    try:
        yield
    except VariableValueError as error:
        place = _place_of(variable)
        if not place:
            raise
        raise VariableValueError(f"{place}: {error}") from error.__cause__


def _with_part(variable: Variable, value, index: object, new: object):
    """Returns an array with a part replaced, or raises with the place of its Variable."""
    try:
        return value.at[index].set(new)
    except (TypeError, ValueError, IndexError) as error:
        problem = part_misfit(value, index, new) if isinstance(value, jax.Array) else None
        place = _place_of(variable)
        if problem is not None:
            raise VariableValueError(f"{place}: {problem}" if place else problem) from error
        where = f"{place}, " if place else ""
        error.add_note(f"In a write into {where}{a_kind_of(variable)} of shape {value.shape}.")
        raise


def _place_of(variable: Variable) -> str:
    """Returns where what the user's callers hold leads to a Variable, or an empty text."""
    places = list(_places_of(variable, user_frame()))
    return places[-1] if places else ""


def _places_of(variable: object, frame: types.FrameType | None) -> Iterator[str]:
    """Yields where what callers hold leads to a Variable, outermost last."""
    while frame is not None:
        for name, local_value in frame.f_locals.items():
            if isinstance(local_value, Object) and local_value is not variable:
                with contextlib.suppress(Exception):  # of an object that is being made
                    flat = flatten(local_value)
                    for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
                        if leaf is variable:
                            yield name + format_path(path)
        frame = frame.f_back


def copied_leaf(leaf: Leaf) -> Leaf:
    """Copies an array into memory of its own."""
    # So the copy outlives a donation of the original.
    if isinstance(leaf, _jax.Tracer):
        return leaf[...] if is_ref(leaf) else leaf
    if is_ref(leaf):
        return jax.new_ref(jnp.copy(leaf[...]))
    if isinstance(leaf, jax.Array):
        return copied(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _check_rank(variable: Variable, axes: tuple[object, ...] | None) -> None:
    if axes is None or not hasattr(variable._value, "ndim"):
        return
    if axes_of(variable._value) is not None:
        raise MetadataError(
            f"A {type(variable).__name__} was given axes={axes} and a "
            f"{type(variable._value).__name__}, which knows the names of its dimensions. Leave "
            f"axes= out, or give the plain array."
        )
    if len(axes) != variable._value.ndim:
        raise MetadataError(
            f"A {type(variable).__name__} of shape {tuple(variable._value.shape)} has "
            f"{variable._value.ndim} dimensions but was given "
            f"{len(axes)} axis names: {axes}. Give one name per dimension, None for an unnamed one."
        )


def _check_frozen(variable: object, new_variable: Variable) -> None:
    problem = _frozen_mismatch(variable, new_variable)
    if problem:
        raise StateMismatchError(
            f"The {kind_of(variable)} {problem}; nothing was changed. To take the array all the "
            f"same: v.value = frozen.value."
        )


def _frozen_mismatch(variable, new_variable: Variable) -> str | None:
    """Returns what is wrong where a frozen value belongs to another Variable."""
    metadata: Any = new_variable._here()._metadata
    frozen_type = getattr(metadata, "variable_type", None)
    if frozen_type is None:
        return None
    kind = variable._flatten(None).type
    if not issubclass(frozen_type, getattr(variable._metadata, "variable_type", kind)):
        return f"is a {kind.__name__}, and given the frozen value of a {frozen_type.__name__}"
    labels = getattr(variable, "_labels", ())
    if metadata.label and labels and metadata.label not in labels:
        labels_text = (format_path(label) for label in (labels[-1], metadata.label))
        return "has the label {}, given the frozen value of {}".format(*labels_text)
    return None


def fitted(variable: Any, new_value: Any, cast: str | None = None) -> tuple[PyTree, str | None]:
    """Returns a value as a Variable takes it, and what is wrong."""
    if isinstance(new_value, Variable):
        problem = _frozen_mismatch(variable, new_value)
        if problem:
            return None, problem
        new_value = snapshot(new_value._here()._value)
    try:
        value = as_value(new_value, kind_of(variable))
    except VariableValueError as error:
        return None, str(error)
    old = variable._here()._value
    if not hasattr(old, "shape"):
        return value, None
    if not hasattr(value, "shape"):
        return None, f"has shape {tuple(old.shape)}, given a {type(value).__name__}"
    if tuple(old.shape) != tuple(value.shape):
        return None, f"has shape {tuple(old.shape)}, given {tuple(value.shape)}"
    if old.dtype == value.dtype or cast == "keep":
        return value, None
    is_weak = isinstance(new_value, (int, float, complex)) or getattr(value, "weak_type", False)
    is_number = not any(jnp.issubdtype(v.dtype, jax.dtypes.extended) for v in (old, value))
    if is_number and (cast or (is_weak and jnp.result_type(new_value, old.dtype) == old.dtype)):
        if isinstance(value, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(value.shape, old.dtype, sharding=value.sharding), None
        value = value.compute() if isinstance(value, LazyValue) else value
        return value.astype(old.dtype), None
    return None, f"has dtype {old.dtype}, given {value.dtype}"


register_variable(Variable)


class Origin(NamedTuple):
    """What a value of a State came from.

    Attributes:
        variable_type: The type of its Variable.
        all_metadata: The metadata of its Variable; ``axes`` and ``metadata`` are its two parts.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> kernel = sx.Param(jnp.ones((2, 3)), axes=("in", "out"), tag="frozen")
        >>> origin = sx.state(sx.List([kernel])).origins()[(0,)]
        >>> origin.variable_type.__name__, origin.axes, dict(origin.metadata)
        ('Param', ('in', 'out'), {'tag': 'frozen'})
    """

    variable_type: type[Variable]
    all_metadata: Metadata

    @property
    def axes(self) -> tuple[Any, ...] | None:
        """Logical axis names, or None."""
        return self.all_metadata.axes

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata entries other than the axes."""
        return self.all_metadata.entries


class Param(Variable[T]):
    """A trained parameter; what ``grad`` and ``Optimizer`` select by default.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> w = sx.Param(jnp.float32(3))
        >>> float(sx.grad(lambda w: w**2)(w))
        6.0
    """


class BatchStat(Variable[T]):
    """Running statistics of normalisation layers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> mean = sx.BatchStat(jnp.zeros(2))
        >>> mean[...] = 0.9 * mean + 0.1 * jnp.ones(2)
        >>> mean.value.tolist()
        [0.10000000149011612, 0.10000000149011612]
    """


class Quantized(Variable[T]):
    """Numbers or scales of a quantized kernel, which no optimizer trains.

    Example:
        >>> import shardax as sx
        >>> layer = sx.quantize(sx.nn.Linear(4, 2, rngs=sx.Rngs(0)), "int8")
        >>> sorted(sx.state(layer, sx.Quantized).flat())
        [('kernel', 'scale'), ('kernel', 'values')]
    """


class AmaxHistory(Variable[T]):
    """Largest magnitudes of an operand in earlier calls, for scales of fp8.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(4, 2, precision="fp8-delayed", rngs=sx.Rngs(0))
        >>> y = layer(jnp.array([1.0, -3.0, 0.5, 2.0]))
        >>> float(layer.precision.input[0])
        3.0
    """


class Cache(Variable[T]):
    """Values kept between calls, such as keys and values of attention.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> seen = sx.Cache(jnp.zeros(4, jnp.int32))
        >>> seen[1] = 7
        >>> seen.value.tolist()
        [0, 7, 0, 0]
    """


class Intermediate(Variable[T]):
    """Values recorded while a model runs (``Module.sow``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Square(sx.Module):
        ...     def __call__(self, x):
        ...         self.sow("seen", x)
        ...         return x**2
        >>> square = Square()
        >>> _ = square(jnp.float32(3))
        >>> [float(x) for x in sx.pop(square, sx.Intermediate)["seen"]]
        [3.0]
    """


class Perturbation(Variable[T]):
    """Zeros added to activations so that their gradients can be read (``Module.perturb``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> zero = sx.Perturbation(jnp.zeros(()))
        >>> float(sx.grad(lambda zero: (3 + zero) ** 2, wrt=sx.Perturbation)(zero))
        6.0
    """


class RngState(Variable[T]):
    """Key and counter of a random stream.

    Example:
        >>> import shardax as sx
        >>> [path for path, _ in sx.iter_variables(sx.Rngs(dropout=0), sx.RngState)]
        [('dropout', 'key'), ('dropout', 'count')]
    """


class OptState(Variable[T]):
    """State of an optimizer.

    Example:
        >>> import jax.numpy as jnp, optax, shardax as sx
        >>> optimizer = sx.train.Optimizer(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), optax.sgd(0.1))
        >>> [path for path, _ in sx.iter_variables(optimizer, sx.OptState)]
        [('step',)]
    """

    _holds_boxes = True  # optax maps over boxes, so its states are in them


class MetricState(Variable[T]):
    """Running sums of a metric.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.MetricState(jnp.float32(0))
        >>> total += 2
        >>> float(total)
        2.0
    """


class ArrayAttribute(Variable[T]):
    """Hidden Variable behind an array in an attribute."""

    _kind = "array"  # the class is ours alone
    _holds_boxes = True  # an attribute is what was assigned to it

    # Plain arrays have no identity; this gives the place one, so that arrays in attributes are
    # read, written, lifted and saved exactly as Variables are.
