# SPDX-License-Identifier: Apache-2.0
"""Operators of arrays, for objects that hold one.

Variables, slots and named arrays have the operators and attributes of their array. Each operator
reads ``value`` and gives a plain array, so ``v + 1`` is no Variable. JAX takes such an object as an
array by ``__jax_array__``, wherever it takes one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardax._core import _jax
from shardax._core._jax import Tracer
from shardax._core.errors import ModuleError
from shardax._core.threads import in_one_step


def wider_dtype(first: Any, second: Any) -> Any:
    """Returns what two dtypes promote to, also where a user forbids promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)


def _binary(function: Callable[[Any, Any], object]) -> Callable[[Any, Any], Any]:
    def method(self: ArrayLike, other) -> Any:
        operand = other._operand() if isinstance(other, ArrayLike) else other
        return function(self._operand(), operand)

    return method


def _three_ways(function: Callable[[Any, Any], object]) -> tuple[Callable[[Any, Any], Any], ...]:
    """Returns an operator's methods: plain, reflected and in place."""
    plain = _binary(function)

    def reflected(self: ArrayLike, other: object):
        return function(other, self._operand())

    def in_place(self, other):
        with in_one_step():
            self[...] = plain(self, other)
        return self

    return plain, reflected, in_place


def _unary(function: Callable[[Any], object]) -> Callable[[Any], Any]:
    def method(self: ArrayLike) -> Any:
        return function(self._operand())

    return method


def fetchable(value: Any, what: str) -> Any:
    """Returns a value whose numbers this process can read, or raises."""
    spans = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    if spans and not (value.is_fully_addressable or value.is_fully_replicated):
        raise ModuleError(
            f"{what} needs the numbers of {jax.typeof(value)}, but parts of it are on devices of "
            "other processes. Get all of them in every process, sx.distributed.gather(x), or read "
            "those that are here, x.addressable_shards."
        )
    return value


class ArrayLike:
    """Operators of an object whose ``value`` is an array."""

    __slots__ = ()
    __array_priority__ = 1000  # NumPy arrays on the left then ask the reflected operators below

    @property
    def value(self) -> Any:
        """The array."""
        raise NotImplementedError

    def _shaped(self) -> Any:
        """Returns what has the shape and dtype of the value; the array need not be there yet."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, without materialising it."""
        return tuple(np.shape(self._shaped()))

    @property
    def dtype(self) -> Any:
        """Dtype of the array, without materialising it."""
        return self._shaped().dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions, without materialising."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, without materialising."""
        return math.prod(self.shape)

    @property
    def sharding(self) -> Sharding | None:
        """Sharding of the array, or None if there is none yet."""
        return getattr(self._shaped(), "sharding", None)

    def _operand(self) -> Any:
        """Returns the value as an operator takes it."""
        value = self.value
        if isinstance(value, jax.ShapeDtypeStruct):
            raise ModuleError(
                f"This {type(self).__name__} is abstract ({value.dtype}{list(value.shape)}): it "
                f"has a shape but no numbers. Use the model that this one was made from; or give "
                f"it numbers, sx.update(model, state), or restore a checkpoint into it."
            )
        return value

    @property
    def __jax_array__(self) -> Any:
        refused = _jax.refused_argument(self)
        if refused is not None:
            raise (AttributeError if _jax.asks_from_c() else ModuleError)(refused)
        return self._operand

    def __str__(self) -> str:
        # JAX drops the error above where it looks from C++, and puts this into its own.
        return _jax.refused_argument(self) or repr(self)

    def __array__(
        self, dtype: jax.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        array = np.asarray(fetchable(self._operand(), "np.asarray"), dtype)
        return array.copy() if copy else array

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if hasattr(type(self), name):  # a property that raised AttributeError: says its text
            return object.__getattribute__(self, name)
        operand = self._operand()
        if name in ("tolist", "item"):
            fetchable(operand, name)
        try:
            return getattr(operand, name)
        except AttributeError as error:
            if hasattr(jax.Array, name):
                self._shaped()  # raises if there are several arrays, and says so
            text = self._without_attribute(name)
            if not isinstance(operand, jax.Array):
                text += f" ({error})"
            raise AttributeError(text, name=name, obj=self) from error

    def _without_attribute(self, name: str) -> str:
        """Returns the text of an attribute that neither this nor its value has."""
        return f"{self!r} has no attribute {name!r}, nor has its value."

    def __bool__(self) -> bool:
        return bool(self._operand())

    def __int__(self) -> int:
        return int(self._operand())

    def __float__(self) -> float:
        return float(self._operand())

    def __complex__(self) -> complex:
        return complex(self._operand())

    def __index__(self) -> int:
        return operator.index(self._operand())

    def __len__(self) -> int:
        return len(self._operand())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._operand())

    def __contains__(self, item: Any) -> bool:
        return item in self._operand()

    def __divmod__(self, other: Any) -> Any:
        return divmod(self._operand(), other)

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(other, self._operand())

    def __format__(self, spec: str) -> str:
        return format(self._operand(), spec) if spec else str(self)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._operand(), digits)

    __eq__ = _binary(operator.eq)  # elementwise, like arrays
    __ne__ = _binary(operator.ne)
    __hash__ = object.__hash__
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)

    __add__, __radd__, __iadd__ = _three_ways(operator.add)
    __sub__, __rsub__, __isub__ = _three_ways(operator.sub)
    __mul__, __rmul__, __imul__ = _three_ways(operator.mul)
    __matmul__, __rmatmul__, __imatmul__ = _three_ways(operator.matmul)
    __truediv__, __rtruediv__, __itruediv__ = _three_ways(operator.truediv)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _three_ways(operator.floordiv)
    __mod__, __rmod__, __imod__ = _three_ways(operator.mod)
    __pow__, __rpow__, __ipow__ = _three_ways(operator.pow)
    __and__, __rand__, __iand__ = _three_ways(operator.and_)
    __or__, __ror__, __ior__ = _three_ways(operator.or_)
    __xor__, __rxor__, __ixor__ = _three_ways(operator.xor)
    __lshift__, __rlshift__, __ilshift__ = _three_ways(operator.lshift)
    __rshift__, __rrshift__, __irshift__ = _three_ways(operator.rshift)


# --- dtypes of any arrays ---

# An array, a tracer or a number, or the shape of one.
AnyArray: TypeAlias = "jax.typing.ArrayLike | jax.ShapeDtypeStruct"


def dtype_of(array: AnyArray) -> np.dtype:
    """Returns the dtype of an array, of its shape, or of a Python number."""
    dtype = getattr(array, "dtype", None)
    return jnp.result_type(array) if dtype is None else dtype


def is_weakly_typed(value: object) -> bool:
    """Whether a value takes the dtype of the array beside it, as Python's numbers do."""
    return isinstance(value, (bool, int, float, complex)) or getattr(value, "weak_type", False)


def is_differentiable(array: AnyArray) -> bool:
    """Whether the dtype of an array has derivatives."""
    return jnp.issubdtype(dtype_of(array), jnp.inexact)
