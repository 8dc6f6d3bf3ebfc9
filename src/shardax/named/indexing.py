# SPDX-License-Identifier: Apache-2.0
"""Indexing of named arrays: reading parts, and new arrays with parts replaced.

``x[{"batch": 0, "time": slice(2)}]`` indexes by name; ``x[0]``, ``x[..., 1:]`` and ``x[mask]``
index the positional dimensions, along all names. What an index by name may hold, and what becomes
of the axes, says ``shardax.named.index_plan``. ``x.at[index].set(value)`` and its relatives return
a new array; the value meets the part that the index takes by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardax.core.errors import NamedAxesError
from shardax.named.align import Operand, check_sizes, expand, joined
from shardax.named.base import Stored, transposed
from shardax.named.index_plan import Plan, is_by_place, new_names, plan_index
from shardax.named.lift import run_lifted
from shardax.named.names import shown
from shardax.named.operators import operand_of


class Indexing(Stored):
    """Indexing."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Mapping) and not is_by_place(index):
            return run_lifted(self._make, lambda array, at: array[at], (self, index), {})
        array = Operand(*self._parts())
        index, added = new_names(array, index)
        plan = plan_index(array, index)
        data = transposed(array.data, plan.permutation)[plan.entries]
        if added:
            data = jax.lax.expand_dims(data, range(len(added)))
        return self._make(data, (*added, *plan.dims))

    @property
    def at(self) -> At:
        """Updates of parts: ``x.at[index].set(value)`` returns a new array.

        Besides ``set`` there are ``add``, ``subtract``, ``multiply``, ``divide``, ``power``,
        ``min``, ``max``, ``apply`` and ``get``, with the options that ``jax.Array.at`` has.
        """
        return At(self)


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """What ``x.at`` is: give it an index.

    Attributes:
        array: The named array.
    """

    array: Any

    def __getitem__(self, index: Any) -> Update:
        return Update(self.array, index)


def _update(name: str) -> Callable[..., Any]:
    def method(self: Update, value: Any, **options: Any) -> Any:
        return self._run(lambda part, given: getattr(part, name)(given, **options), value)

    method.__name__ = name
    return method


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What ``x.at[index]`` is: give it a value.

    Attributes:
        array: The named array.
        index: The index.
    """

    array: Any
    index: Any

    set, add, subtract = _update("set"), _update("add"), _update("subtract")
    multiply, divide, power = _update("multiply"), _update("divide"), _update("power")
    min, max = _update("min"), _update("max")

    def apply(self, function: Callable[[Any], Any], **options: Any) -> Any:
        """Returns the array with a function applied to the elements of the part."""
        return self._run(lambda part, _: part.apply(function, **options), 0)

    def get(self, **options: Any) -> Any:
        """Returns the part, with JAX's options for positions out of range."""
        reference, plan, _ = self._reference()
        return self.array._make(reference.get(**options), plan.dims)

    def _reference(self) -> tuple[Any, Plan, Operand]:
        array = Operand(*self.array._parts())
        plan = plan_index(array, self.index)
        return transposed(array.data, plan.permutation).at[plan.entries], plan, array

    def _run(self, change: Callable[[Any, Any], Any], value: Any) -> Any:
        reference, plan, array = self._reference()
        part = jax.ShapeDtypeStruct(plan.shape, array.data.dtype)
        data = change(reference, _fitting(value, Operand(part, plan.dims)))
        if plan.permutation is not None:
            data = transposed(data, tuple(map(plan.permutation.index, range(data.ndim))))
        return self.array._make(data, array.dims)


def _fitting(value: Any, part: Operand) -> Any:
    """Returns a value with the dimensions of the part that it goes into."""
    found = operand_of(value, part)
    if found is NotImplemented:
        raise NamedAxesError(
            f"A part of a NamedArray cannot be set to {value!r} of type {type(value).__name__}."
        )
    if not isinstance(found, Operand):
        return found
    check_sizes((part, found))
    if joined(part.dims, found.dims) != part.dims:
        raise NamedAxesError(
            f"A value with axes {shown(found.dims, found.data.shape)} does not fit into a part "
            f"with axes {shown(part.dims, part.data.shape)}: it may lack axes, along which it is "
            f"repeated, but not have more."
        )
    return expand(found, part.dims)
