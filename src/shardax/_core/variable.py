# SPDX-License-Identifier: Apache-2.0
"""Variables: the mutable cells of a model.

A *Variable* is a cell with identity. It holds a *value* (an array, or any pytree of arrays) and
*metadata* (axis names and whatever else the user attached). Its class is its *type*: ``Param`` for
what is trained, ``BatchStat`` for running statistics, and so on; users subclass for their own
kinds, and filters select by class.

Identity is what makes sharing meaningful. The same Variable reached by two paths is one cell: it is
written once, has one gradient and one entry in a checkpoint. Two Variables with equal values are
still two.

Inside of a lifted transform the user's code may hold a Variable of outside. Every read and write
first looks up its *stand-in*, the Variable that the transform made for it (``_here``;
``_core.frames``), so the same code works whether a Variable was passed in or is reached through a
closure. Outside of transforms a Variable stands for itself.

A read (``value``) finds the stand-in, computes a value that is *lazy* (``_read``), and refuses an
array that was donated. Who else computes a lazy value, when, on which devices, and what threads do
then, is in ``_core.init.lazy``.

A write (``_write``) finds the stand-in, and refuses what is locked, or would be lost in a trace
(``_core.frames``). Once a second thread has used shardax, it is made under a lock, and refused if
another thread has written since this one read (``_core.threads``). What a value may be, and what
the ways to write keep of it, is in ``_core.values``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import jax

from shardax._core import threads, values
from shardax._core.array_ops import ArrayLike
from shardax._core.cross_process import PickledArray
from shardax._core.explain import variable_errors as errors
from shardax._core.frames import (
    READ_ONLY,
    Frame,
    a_kind_of,
    check_trace,
    check_unlocked,
    is_ref,
    kind_of,
    owner_here,
    resolve,
)
from shardax._core.graph.definitions import VariableDef
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.pytrees import register_variable
from shardax._core.graph.static import Metadata
from shardax._core.init.lazy import Init, LazyValue, is_pending, materialize
from shardax._core.object import Encode, Object, epoch
from shardax._core.threads import Stamp, check_unwritten, in_one_step, local, note_read, note_write
from shardax._core.variable_metadata import check_rank, checked_entries, new_metadata, out_of_box

if TYPE_CHECKING:
    from shardax._core.state.frozen import FrozenVariable

T = TypeVar("T")


class _VariableType(type):
    """Registers classes with JAX; gives them empty slots, so a stray attribute is an error."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> _VariableType:
        namespace.setdefault("__slots__", ())
        variable_type = super().__new__(mcs, name, bases, namespace, **kwargs)
        register_variable(variable_type)
        return variable_type


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
    _value: PyTree
    _metadata: Metadata
    # The labels under which ``_core.state.bind`` took the Variable out of trees; usually unset.
    _labels: tuple[Path, ...]
    # The stacked Variable that this one is a view of (``_core.graph.views``), or None.
    _parent: Variable | None = None
    # Whether the Variable keeps a box as it is, instead of its value and names.
    _holds_boxes = False

    def __init__(self, value: Any, *, axes: Any = None, **metadata: Any) -> None:
        self._owner = owner_here()
        self._lock = None
        self._marked = False
        self._stamp: Stamp | None = None  # of the last write of a thread

        if isinstance(value, Variable):
            value = value.value
        else:
            value, box = out_of_box(type(self), axes, value)
            if box is not None:
                axes = box.axes if axes is None else axes
                metadata = {**box.entries, **metadata}

        # A key that is a tracer is known inside of this trace only.
        if isinstance(value, Init) and value.is_traced:
            value = value.compute()

        self._value = values.as_value(value, kind_of(self))
        self._metadata = new_metadata(self, axes, metadata)

    def _here(self) -> Self:
        """Returns the Variable that stands for this one in the current frame."""
        return self if self._owner is local.frame else resolve(self, local.frame)

    # --- reading ---------------------------------------------------------------------------------

    @property
    def value(self) -> Any:
        """The value; reading a lazy one materialises it.

        Setting checks that the write cannot be lost or leak.
        """
        frame = local.frame
        target = self if self._owner is frame else resolve(self, frame)

        # Before the value is read, so a write of another thread after that is noticed.
        if threads.several and frame is None:
            note_read(target)

        value = target._read()
        if frame is None and values.is_deleted(value):
            raise errors.deleted_read(target)
        return value

    def _read(self) -> Any:
        """Returns the value that this Variable holds itself; a lazy one is computed first."""
        value = self._value
        if is_pending(value):
            value = materialize(self)
        return value[...] if is_ref(value) else value

    def __getitem__(self, index: Any) -> Any:
        value = self.value
        return value if index is Ellipsis else value[index]

    # --- writing ---------------------------------------------------------------------------------

    @value.setter
    def value(self, value: object) -> None:
        new = values.as_value(self._acceptable(value), kind_of(self))
        self._write(new, check=True)

    def __setitem__(self, index: Any, new: Any) -> None:
        if index is Ellipsis:
            self._assign(new)
            return

        if isinstance(new, Variable):
            new = new.value
        with in_one_step():
            # Not read as ``value``: so ``v[i] += 1`` is checked as one read and write.
            value = self._here()._read()
            if hasattr(value, "at"):
                with errors.naming_item_write(self, value.shape):
                    changed = values.with_item(value, index, new, kind_of(self))
            else:
                changed = values.with_entry(value, index, new, kind_of(self))
            self._write(changed, check=True)

    def _assign(self, new: Any) -> None:
        """Writes ``v[...] = new``, which keeps shape and dtype."""
        new = self._acceptable(new)
        old = self._here()._value
        if is_ref(old):
            old = old[...]
        with errors.naming_place(self):
            value = values.assigned(old, new, kind_of(self))
        self._write(value, check=True)

    def _acceptable(self, new: Any) -> Any:
        """Returns a new value without its box; raises if it belongs to another Variable."""
        if isinstance(new, jax.Array):
            return new
        if isinstance(new, Variable):
            problem = new._mismatch_with(self)
            if problem:
                raise errors.other_frozen_value(kind_of(self), problem)
            return new.value
        bare_value, _ = out_of_box(type(self), self.axes or (), new)
        return bare_value

    def _write(self, value: Any, check: bool = False) -> None:
        """Stores a value; with ``check`` not over what another thread wrote, unread by this one."""
        frame = local.frame
        target = self if self._owner is frame else resolve(self, frame)

        if is_ref(target._value) and not is_ref(value):
            target._write_in_place(value)
            return

        # The write must be neither refused nor lost, nor leak a tracer.
        if target._lock is not None:
            check_unlocked(target)
        check_trace(target)

        # Inside of a transform the stand-in is this thread's own.
        if frame is not None or not threads.several:
            target._value = value
            return

        with threads.write_lock:
            if check:
                check_unwritten(target, kind_of(target))

            # A thread that computes the lazy value must not store it over the new one. Otherwise
            # the lock is left alone: the initializer of another Variable may run for long.
            if is_pending(target._value):
                with threads.lazy_lock:
                    target._value = value
            else:
                target._value = value

            note_write(target)

    def _write_in_place(self, value: Any) -> None:
        """Writes into the ``jax.Ref`` that the Variable holds."""
        # JAX knows of such a write, so it is not lost inside a plain transform.
        if self._lock is not None and self._lock is not READ_ONLY:
            check_unlocked(self)

        ref = self._value
        form = getattr(value, "shape", None), getattr(value, "dtype", None)
        if form != (ref.shape, ref.dtype):
            raise errors.ref_misfit(kind_of(self), ref, value)
        with in_one_step():
            ref[...] = value.compute() if isinstance(value, LazyValue) else value

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
        fitting_value, problem = self._fitted(value)
        if problem:
            raise errors.update_misfit(kind_of(self), problem)
        self._write(fitting_value)

    def _fitted(self, new: Any, cast: str | None = None) -> tuple[Any, str | None]:
        """Returns a value as ``update`` takes it, and what is wrong, or None."""
        if isinstance(new, Variable):
            problem = new._mismatch_with(self)
            if problem:
                return None, problem
            new = values.snapshot(new._here()._value)
        return values.fitted(self._here()._value, new, kind_of(self), cast)

    def _mismatch_with(self, target: Variable) -> str | None:
        """Describes why ``target`` must not take this value; None if it may."""
        return None  # a frozen value belongs to one Variable (``_core.state.frozen``)

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
        changes = checked_entries(type(self), changes)
        target = self._here()
        target._check_metadata_write(f"metadata of {a_kind_of(self)}")
        check_trace(target, f"metadata of {a_kind_of(self)}")

        metadata = target._metadata.replace(**changes)
        check_rank(target, metadata.axes)
        if metadata == target._metadata:
            return

        target._metadata = metadata
        if target._marked:
            epoch.advance(target)

    def _check_metadata_write(self, what: str) -> None:
        """Raises if the metadata must not be changed here."""
        if self._lock is not None:
            check_unlocked(self, what)

    def _without_attribute(self, name: str) -> str:
        if name not in self.metadata:
            return super()._without_attribute(name)
        return (
            f"{self!r} has no attribute {name!r}: it is an entry of its metadata, "
            f"v.metadata[{name!r}]."
        )

    # --- what is known without reading ------------------------------------------------------------

    @property
    def variable_type(self) -> type[Variable]:
        """The type that filters and slots know the Variable by."""
        return type(self)

    @property
    def labels(self) -> tuple[Path, ...]:
        """The paths under which ``unbind`` took the Variable out of trees, the latest last."""
        return getattr(self, "_labels", ())

    @property
    def is_lazy(self) -> bool:
        """Whether the value is still a recipe."""
        return isinstance(self._here()._value, LazyValue)

    @property
    def is_abstract(self) -> bool:
        """Whether the value is only shapes and dtypes (``jax.ShapeDtypeStruct``)."""
        return values.is_abstract(self._here()._value)

    def _shaped(self) -> Any:
        return values.only_array(self._here()._value, type(self).__name__)

    def __repr__(self) -> str:
        value = values.describe(self._here()._value)
        metadata = repr(self._metadata)
        return f"{type(self).__name__}({value}{', ' + metadata if metadata else ''})"

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
        bare_value, _ = out_of_box(type(self), self.axes or (), value)
        new = values.as_value(bare_value, kind_of(self))
        variable = self._make(new, self._here()._metadata, owner_here())
        check_rank(variable, variable._metadata.axes)
        return variable

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
        # A frozen value is a Variable, so its module imports this one.
        from shardax._core.state.frozen import frozen

        return frozen(self, self.labels[-1] if self.labels else ())

    @classmethod
    def _make(
        cls, value: PyTree, metadata: Metadata, owner: Frame | None, lock: str | None = None
    ) -> Self:
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
        """Returns a Variable of a frame with the present value of this one."""
        return self._make(self._read(), self._metadata, frame)

    def _flatten(self, encode: Encode) -> VariableDef:
        return VariableDef(type(self), self._metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        target = self._here()
        if values.has_deleted(target._value):
            raise errors.deleted_read(target)
        copied = self._make(values.copy_value(target._value), target._metadata, owner_here())
        if self.labels:
            copied._labels = self.labels
        return copied

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __getstate__(self) -> Any:
        return (PickledArray.in_tree(self.value), self._metadata, self.labels or None)

    def __setstate__(self, state: Any) -> None:
        self._value, self._metadata, labels = state
        if labels is not None:
            self._labels = labels
        self._owner, self._lock, self._marked, self._stamp = owner_here(), None, False, None
