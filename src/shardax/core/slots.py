# SPDX-License-Identifier: Apache-2.0
"""Slots: empty places for Variables.

A *slot* stands in a model where a Variable was taken out (``core.binding``). It holds no value,
only the Variable's type and its *label*: the path at which the Variable was met first, by which it
finds its way back. Labels are paths, so they are the same in every process; the slots of a shared
Variable have one label.

A slot is immutable and compares by type and label. To JAX it is a pytree without leaves; in a
Module it is configuration. So a model whose Variables are all taken out is hashable structure and
nothing else.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from shardax.core.arraylike import ArrayLike
from shardax.core.display import Shown
from shardax.core.errors import UnboundVariableError
from shardax.core.node import Placeholder
from shardax.core.paths import Path, format_path


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
    variable_type: Any

    def __init__(self, label: Path, variable_type: Any) -> None:
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

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse()

    def __setitem__(self, index: Any, new: Any) -> NoReturn:
        self._refuse()

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def _operand(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnboundVariableError(
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

    def _key(self) -> Any:
        return (self.variable_type, tuple((type(step), step) for step in self.label))

    def __copy__(self) -> Slot:
        return self

    def __deepcopy__(self, memo: Any) -> Slot:
        return self

    def __reduce__(self) -> Any:
        return (Slot, (self.label, self.variable_type))

    def __repr__(self) -> str:
        return f"Slot({self.variable_type.__name__}, {format_path(self.label)})"


jax.tree_util.register_pytree_node(Slot, lambda slot: ((), slot), lambda slot, _: slot)
