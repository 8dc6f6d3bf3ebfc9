# SPDX-License-Identifier: Apache-2.0
"""Frozen values and slots: the immutable forms of a Variable.

A Variable has three *forms*. The mutable cell itself is one. Its *frozen value* is its value with
type, metadata and label as an immutable pytree: what a purely functional program passes around. It
reads like the Variable, so layers run on it, and in a Module two places that hold one frozen value
are one leaf, with one gradient. Writing it is an error. By filters it is no longer of the
Variable's type: ``sx.Param`` matches what can be trained, ``Frozen(sx.Param)`` the frozen values
that were Params.

Its *slot* is the empty place that it leaves in a model (``_core.state.bind``), with the Variable's
type and *label*: the path at which the Variable was met first, the same in every process. The slots
of a shared Variable have one label. A slot compares by type and label. To JAX it is a pytree
without leaves; in a Module it is configuration. So a model whose Variables are all taken out is
hashable structure and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import jax

from shardax._core.array_ops import ArrayLike
from shardax._core.errors import ModuleAttributeError
from shardax._core.frames import kind_of, owner_here
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.static import BOX_ENTRY, Axes, Metadata, exact_key
from shardax._core.object import Placeholder, Shown
from shardax._core.values import same_value, snapshot
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute

T = TypeVar("T")


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
        >>> from shardax import extend
        >>> extend.Origin.of(kernel) == origin
        True
    """

    variable_type: type[Variable]
    all_metadata: Metadata

    @classmethod
    def of(cls, variable: Variable[Any]) -> Origin:
        """Returns the type and the metadata of a Variable, of the transform around."""
        return cls(type(variable), variable._here()._metadata)

    def layout_metadata(self, axes: Axes) -> dict[str, Any]:
        """Returns the metadata of another Variable that is laid out as this one is.

        That is the names of its dimensions, and the box that this one was made of, if any, with its
        rules and mesh.

        Args:
            axes: The names of the dimensions of the other Variable.
        """
        box = {BOX_ENTRY: self.metadata[BOX_ENTRY]} if BOX_ENTRY in self.metadata else {}
        return {"axes": axes, **box}

    @property
    def axes(self) -> tuple[Any, ...] | None:
        """Logical axis names, or None."""
        return self.all_metadata.axes

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata entries other than the axes."""
        return self.all_metadata.entries


class FrozenMetadata(Metadata):
    """Metadata of a frozen value, with the Variable's type and label."""

    __slots__ = ("label", "variable_type")

    def __init__(
        self,
        axes: Axes | None,
        entries: Mapping[str, Any],
        variable_type: type[Variable],
        label: Path,
    ) -> None:
        super().__init__(axes, entries)
        self.variable_type = variable_type
        self.label = label  # its path in the tree from which it was taken
        self._key = (self._key, variable_type, exact_key(label))
        self._hash = hash(self._key)

    def _with(self, axes: Axes | None, entries: Mapping[str, object]) -> FrozenMetadata:
        return FrozenMetadata(axes, entries, self.variable_type, self.label)

    def thawed(self) -> Metadata:
        """Returns the metadata of the Variable."""
        return Metadata(self.axes, self.entries)

    def origin(self) -> Origin:
        """Returns what filters of Variables are asked about."""
        return Origin(self.variable_type, self.thawed())

    def __repr__(self) -> str:
        words = []
        if self.variable_type is not ArrayAttribute:  # hidden: users see the array
            words.append(self.variable_type.__name__)
        if self.label:
            words.append(format_path(self.label))
        parts = [" ".join(words), super().__repr__()]
        return ", ".join(part for part in parts if part)

    def __reduce__(self) -> Any:
        return (FrozenMetadata, (self.axes, dict(self.entries), self.variable_type, self.label))


class FrozenVariable(Variable[T]):
    """Immutable value of a Variable, with type, metadata and label.

    Made by ``freeze`` and ``unbind``. Two are equal when type, label, metadata and every number
    are; a comparison with anything else goes element by element, as for arrays.

    Args:
        value: As for ``Variable``.
        variable_type: Type of the Variable that it stands for.
        label: Its path.
        axes: As for ``Variable``.
        **metadata: Likewise.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> frozen = sx.Param(jnp.ones(2), axes=("embed",)).freeze()
        >>> doubled = jax.tree.map(lambda x: 2 * x, frozen)
        >>> doubled
        FrozenVariable(float32[2], Param, axes=('embed',))
        >>> frozen == doubled, doubled.thaw().value.tolist()
        (False, [2.0, 2.0])
    """

    def __init__(
        self,
        value: Any,
        variable_type: type[Variable] = Variable,
        *,
        label: Path = (),
        axes: Any = None,
        **metadata: Any,
    ) -> None:
        super().__init__(value, axes=axes, **metadata)
        axes, entries = self._metadata.axes, self._metadata.entries
        self._metadata = FrozenMetadata(axes, entries, variable_type, label)

    def _frozen_metadata(self) -> FrozenMetadata:
        metadata = self._here()._metadata
        assert isinstance(metadata, FrozenMetadata)  # nothing else is ever given
        return metadata

    @property
    def variable_type(self) -> type[Variable]:
        """The type of the Variable that this is the value of."""
        return self._frozen_metadata().variable_type

    @property
    def label(self) -> Path:
        """The path by which the Variable finds its slot."""
        return self._frozen_metadata().label

    @property
    def labels(self) -> tuple[Path, ...]:
        """The one label."""
        return (self.label,)

    def freeze(self) -> Self:
        """Returns the value itself."""
        return self

    def thaw(self) -> Variable[T]:
        """Returns a new mutable Variable of this value, type and metadata.

        It shares the arrays. Before donating one of the two (``donate_argnums``), make the other by
        ``copy.deepcopy``.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> frozen = sx.Param(jnp.zeros(2)).freeze()
            >>> w = frozen.thaw()
            >>> w[...] = jnp.ones(2)
            >>> frozen.value.tolist(), w.value.tolist()
            ([0.0, 0.0], [1.0, 1.0])
        """
        metadata = self._frozen_metadata()
        value = snapshot(self._here()._value)
        variable = metadata.variable_type._make(value, metadata.thawed(), owner_here())
        variable._labels = (metadata.label,)
        return variable

    def _mismatch_with(self, target: Variable) -> str | None:
        metadata = self._frozen_metadata()
        if not issubclass(metadata.variable_type, target.variable_type):
            frozen_name = metadata.variable_type.__name__
            return f"is a {kind_of(target)}, and given the frozen value of a {frozen_name}"

        labels = target.labels
        if metadata.label and labels and metadata.label not in labels:
            own_label, given_label = format_path(labels[-1]), format_path(metadata.label)
            return f"has the label {own_label}, given the frozen value of {given_label}"
        return None

    def _write(self, value: object, check: bool = False) -> NoReturn:
        self._refuse("the value")

    def __setitem__(self, index: object, new: object) -> NoReturn:
        self._refuse("the value")

    def _check_metadata_write(self, what: str) -> NoReturn:
        self._refuse("metadata")

    def _refuse(self, what: str) -> NoReturn:
        metadata = self._frozen_metadata()
        raise ModuleAttributeError(
            f"Cannot write {what} of the frozen {metadata.variable_type.__name__} with the label "
            f"{format_path(metadata.label)}. Make it mutable again, sx.thaw(model); or run what "
            f"writes it as a function of values, which returns the new ones: "
            f"result, frozen = sx.stateless_call(slots, frozen, ...)."
        )

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if not isinstance(other, FrozenVariable):
            return super().__eq__(other)
        first, second = self._here(), other._here()
        if first._metadata != second._metadata:
            return False
        return same_value(first._value, second._value)

    def __ne__(self, other: object) -> Any:
        if not isinstance(other, FrozenVariable):
            return super().__ne__(other)
        return not self == other

    def __hash__(self) -> int:
        return hash(self._here()._metadata)


class FrozenArray(FrozenVariable[T]):
    """Frozen value of an array attribute; users see the array."""


def frozen(variable: Variable, label: Path) -> FrozenVariable[Any]:
    """Returns the value of a Variable, frozen, under a label."""
    target = variable._here()
    metadata, variable_type = target._metadata, target.variable_type
    frozen_type = FrozenArray if variable_type is ArrayAttribute else FrozenVariable
    frozen_metadata = FrozenMetadata(metadata.axes, metadata.entries, variable_type, label)
    return frozen_type._make(snapshot(target._value), frozen_metadata, owner_here())


# --- slots ----------------------------------------------------------------------------------------


class Slot(ArrayLike, Placeholder, Shown):
    """An empty place for a Variable.

    Args:
        label: Path of the Variable that belongs here.
        variable_type: Its type.

    Example:
        >>> import shardax as sx
        >>> slots, variables = sx.unbind(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> slots.kernel
        Slot(Param, .kernel)
        >>> slots.kernel == sx.Slot(("kernel",), sx.Param), slots.kernel.label
        (True, ('kernel',))
    """

    __slots__ = ("label", "variable_type")
    label: Path
    variable_type: type[Variable]

    def __init__(self, label: Path, variable_type: type[Variable]) -> None:
        object.__setattr__(self, "label", label)
        object.__setattr__(self, "variable_type", variable_type)

    @property
    def value(self) -> NoReturn:
        """Raises: a slot has no value."""
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._refuse()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse()

    def __setitem__(self, index: object, new: object) -> NoReturn:
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def _operand(self) -> NoReturn:
        self._refuse()

    def _shaped(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ModuleAttributeError(
            f"The {self.variable_type.__name__} with the label {format_path(self.label)} was taken "
            f"out of this model; what is here is an empty slot. Put Variables or frozen values in "
            f"first: model = sx.bind(model, variables); or call it with them: "
            f"sx.stateless_call(model, frozen, ...)."
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Hashable, ...]:
        return (self.variable_type, tuple((type(step), step) for step in self.label))

    def __copy__(self) -> Slot:
        return self

    def __deepcopy__(self, memo: object) -> Slot:
        return self

    def __reduce__(self) -> Any:
        return (Slot, (self.label, self.variable_type))

    def __repr__(self) -> str:
        return f"Slot({self.variable_type.__name__}, {format_path(self.label)})"


jax.tree_util.register_pytree_node(Slot, lambda slot: ((), slot), lambda slot, _: slot)
