# SPDX-License-Identifier: Apache-2.0
"""Values of Variables and the operators of arrays.

A *value* is a JAX array (or tracer), a NumPy array, a lazy value, an abstract
``jax.ShapeDtypeStruct``, or a pytree of these. Numbers become NumPy arrays of JAX's canonical
dtype, because making a Variable must not run a JAX operation.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardax._core import _jax
from shardax._core._jax import Tracer
from shardax._core.errors import ModuleError, VariableValueError
from shardax._core.frames import in_one_step, is_eager, is_ref
from shardax._core.init.lazy import LazyValue, on_device
from shardax._core.object import Object

_NUMBERS = (bool, int, float, complex, np.generic)


def as_value(value: object, owner: str) -> Any:
    """Returns ``value`` as what a Variable may hold."""
    if isinstance(value, (jax.Array, LazyValue, jax.ShapeDtypeStruct)):
        return value
    if isinstance(value, (np.ndarray, *_NUMBERS)):
        return _canonical(value, owner)
    if is_ref(value):
        return value
    return jax.tree.map(
        lambda leaf: _as_leaf(leaf, owner), value, is_leaf=lambda item: isinstance(item, Object)
    )


def _as_leaf(leaf: object, owner: str):
    if isinstance(leaf, (jax.Array, LazyValue, jax.ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, (np.ndarray, *_NUMBERS)):
        return _canonical(leaf, owner)
    if isinstance(leaf, ArrayLike):  # a Variable stands for its value
        return leaf.value
    if is_ref(leaf):
        raise VariableValueError(
            f"A {owner} holds one jax.Ref or a pytree of arrays, but was given a pytree with a "
            f"jax.Ref in it. Make a {owner} of each: {owner}(jax.new_ref(x))."
        )
    raise VariableValueError(
        f"A {owner} holds arrays, but was given {leaf!r} of type {type(leaf).__name__}. Assign "
        f"configuration to a plain attribute of the Module instead: self.name = {leaf!r}."
    )


def _canonical(value: object, owner: str) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "OUSMm" or array.dtype.names is not None:
        raise VariableValueError(
            f"A {owner} holds arrays of numbers, but was given an array of dtype {array.dtype}. "
            f"JAX has no such dtype; encode it as integers first."
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if isinstance(value, int) and int(array.astype(dtype)) != value:
        raise VariableValueError(
            f"The number {value} does not fit into {np.dtype(dtype).name}, the widest integer that "
            f"JAX uses now. Give the dtype yourself, as in np.uint32({value}), use a float, or "
            f"enable 64 bits: jax.config.update('jax_enable_x64', True)."
        )
    # The caller may go on writing into its NumPy array; a Variable changes only when it is written.
    return array.astype(dtype, copy=isinstance(value, np.ndarray))


def realise(value: np.ndarray | LazyValue, owner: object) -> Any:
    """Turns a lazy or NumPy value into a JAX array."""
    is_free = is_eager()
    # Without an owner concrete, even while a transform is tracing. Where none is, it would run the
    # parts of an initializer one by one.
    is_concrete = owner is None and not is_free
    with jax.ensure_compile_time_eval() if is_concrete else contextlib.nullcontext():
        if isinstance(value, LazyValue):
            return value.compute()
        # jnp.asarray compiles a program for each shape. With a mesh in scope it lays the array out.
        if is_free and jax.sharding.get_abstract_mesh().empty:
            return on_device(value)
        return jnp.asarray(value)


def copied(array: jax.Array) -> jax.Array:
    """Copies an array, outside of traces without a program."""
    # jnp.copy compiles one for each shape. With a mesh in scope it lays out what has no layout.
    if not (is_eager() and array.is_fully_addressable):
        return jnp.copy(array)
    if not isinstance(array.dtype, np.dtype):  # of keys device_put loses the layout
        return jnp.copy(array)
    if isinstance(array.sharding, NamedSharding) or jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(array, may_alias=False)
    return jnp.copy(array)


def assigned(old: Any, new: Any, owner: str) -> Any:
    """Returns the value of ``old[...] = new``, in the old form."""
    if not isinstance(old, _ARRAYS):
        return _assigned_tree(old, new, owner)
    if isinstance(new, jax.Array) and new.dtype == old.dtype and new.shape == old.shape:
        return new
    value = as_value(new, owner)
    problem = _misfit_of_shape(old, value) or _misfit_of_dtype(old, new, value)
    if problem:
        _refuse_assignment(old, owner, problem)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=value.sharding)
    if value.shape == old.shape and value.dtype == old.dtype:
        return value  # also one that is lazy
    array = value.compute() if isinstance(value, LazyValue) else value
    array = array if array.dtype == old.dtype else array.astype(old.dtype)
    return _placed_like(jnp.broadcast_to(array, old.shape), old)


def cast_part(old: jax.Array, new: object, owner: str) -> Any:
    """Returns what ``old[i] = new`` writes, in the old dtype."""
    value = as_value(new, owner)
    if not isinstance(value, _ARRAYS) or value.dtype == old.dtype:
        return new
    problem = _misfit_of_dtype(old, new, value)
    if problem:
        _refuse_assignment(old, owner, problem)
    array: Any = value.compute() if isinstance(value, LazyValue) else value
    return array.astype(old.dtype)


def part_misfit(old: Any, index: object, new: Any) -> str | None:
    """Describes a value that does not fit into a part of an array; None for other misfits."""
    try:
        part = jax.eval_shape(lambda array: array[index], old)
    except Exception:  # noqa: BLE001 (then it is the index that JAX refuses)
        return None
    shape = np.shape(new)
    sizes = zip(reversed(shape), reversed(part.shape), strict=False)
    if len(shape) <= len(part.shape) and all(size in (1, wide) for size, wide in sizes):
        return None
    dtype = getattr(new, "dtype", None)
    given = f"the shape {list(shape)}" if dtype is None else f"{dtype}{list(shape)}"
    return (
        f"v[{index_text(index)}] = x writes {part.dtype}{list(part.shape)}, but x has {given}, "
        "which does not broadcast to it; nothing was written. To replace the whole value write "
        "v.value = x."
    )


def index_text(index: object) -> str:
    """Returns an index as it is written, shortened."""
    if isinstance(index, tuple):
        return ", ".join(map(index_text, index))
    if isinstance(index, slice):
        ends = [index.start, index.stop, *([] if index.step is None else [index.step])]
        return ":".join("" if end is None else str(end) for end in ends)
    if index is Ellipsis:
        return "..."
    shape = getattr(index, "shape", ())
    return f"<{type(index).__name__}{list(shape)}>" if shape else repr(index)[:40]


def _refuse_assignment(old, owner: str, problem: str) -> NoReturn:
    raise VariableValueError(
        f"v[...] = x keeps shape and dtype, but a {owner} of {old.dtype}{list(old.shape)} was "
        f"given {problem}; nothing was written. To replace the value write v.value = x."
    )


_ARRAYS = (jax.Array, np.ndarray, LazyValue, jax.ShapeDtypeStruct)


def _assigned_tree(old, new, owner: str):
    """Returns ``assigned`` of a pytree, leaf by leaf."""
    value = as_value(new, owner)
    leaves, structure = jax.tree.flatten(old)
    if not leaves:
        return value  # there is no form to keep
    if jax.tree.structure(value) == structure:
        return jax.tree.map(lambda leaf, part: assigned(leaf, part, owner), old, value)
    if hasattr(old, "at"):
        return old.at[...].set(new)  # by names
    raise VariableValueError(
        f"v[...] = x keeps the structure of a value, but a {owner} of {structure} was given "
        f"{jax.tree.structure(value)}; nothing was written. To replace the value write "
        f"v.value = x."
    )


def _misfit_of_shape(old, value) -> str | None:
    """Describes a value that does not broadcast to an array."""
    if not isinstance(value, _ARRAYS):
        return f"a {type(value).__name__}"
    sizes = zip(reversed(value.shape), reversed(old.shape), strict=False)
    if len(value.shape) > len(old.shape) or any(size not in (1, wide) for size, wide in sizes):
        return f"the shape {list(value.shape)}, which does not broadcast to it"
    return None


def _misfit_of_dtype(old, new, value) -> str | None:
    """Describes numbers that an array's dtype cannot hold."""
    if value.dtype == old.dtype or _is_castable(new, value.dtype, old.dtype):
        return None
    if isinstance(new, _NUMBERS):
        return f"the number {new}, which it cannot hold"
    return f"{value.dtype}, which it cannot hold (v[...] = x.astype(v.dtype) casts nevertheless)"


def _is_castable(new, dtype: jax.typing.DTypeLike, target) -> bool:
    """Whether a cast loses no kind of number."""
    if any(jnp.issubdtype(kind, jax.dtypes.extended) for kind in (dtype, target)):
        return False  # keys of random numbers
    if isinstance(new, _NUMBERS) and jnp.issubdtype(target, jnp.integer):
        limits = jnp.iinfo(target)
        number: Any = new
        is_real = not isinstance(new, complex)
        return is_real and limits.min <= number <= limits.max and number == int(number)
    if isinstance(new, _NUMBERS) and jnp.issubdtype(target, jnp.bool_):
        return new in (0, 1)
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank, target_rank = (
        next(rank for rank, kind in enumerate(kinds) if jnp.issubdtype(number_type, kind))
        for number_type in (dtype, target)
    )
    return rank <= target_rank


def _placed_like(value: jax.Array, old: object) -> jax.Array:
    """Lays a value that was broadcast out as the old one."""
    if isinstance(old, Tracer):
        sharding = jax.typeof(old).sharding
        is_explicit = any(entry is not None for entry in sharding.spec)
        return jax.sharding.reshard(value, sharding) if is_explicit else value
    if isinstance(old, jax.Array) and old.committed and not isinstance(value, Tracer):
        return jax.device_put(value, old.sharding)
    return value


def wider_dtype(first: Any, second: Any) -> Any:
    """Returns what two dtypes promote to, also where a user forbids promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)


def snapshot(value: Any) -> Any:
    """Copies a value that could change in place."""
    if isinstance(value, (jax.Array, LazyValue)):
        return value
    if is_ref(value):
        return value[...]
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


def leaf_of(value: object, owner: str) -> Any:
    """Returns the one array of a value, for ``.shape`` and the like."""
    if hasattr(value, "shape"):
        return value
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1:
        return leaves[0]
    raise AttributeError(
        f"This {owner} holds a pytree of {len(leaves)} arrays, which has no single shape or dtype; "
        f"look at jax.tree.leaves(v.value)."
    )


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

    def _operand(self):
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
                leaf_of(operand, type(self).__name__)  # says why there is no such thing
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


def is_differentiable(array: AnyArray) -> bool:
    """Whether the dtype of an array has derivatives."""
    return jnp.issubdtype(dtype_of(array), jnp.inexact)
