# SPDX-License-Identifier: Apache-2.0
"""Values: what a Variable holds in its slot ``_value``.

A value is one of six kinds:

=========  ================================  =====================  ===================
kind       what it is                        ``v.value`` gives      a copy
=========  ================================  =====================  ===================
array      ``jax.Array``, also a tracer      it                     in memory of its own
NumPy      ``np.ndarray``                    the array, from now    in memory of its own
                                             on in the slot
lazy       ``LazyValue``                     likewise               the same lazy value
abstract   ``jax.ShapeDtypeStruct``          it                     the same
ref        ``jax.Ref``                       what it holds now      a Ref of its own
tree       a pytree of the first four        it                     leaf by leaf
=========  ================================  =====================  ===================

Values enter by ``as_value``, which makes numbers NumPy arrays of JAX's canonical dtype: making a
Variable must not run a JAX operation. Each other function here is one operation, and tells the
kinds apart for it. The kind is not stored beside the value, because a compiled call stores arrays
straight into the slots of hundreds of Variables, and a second slot would double that.

Four ways to write differ in what they keep: ``v.value = x`` replaces the value; ``v[...] = x``
keeps shape and dtype, and broadcasts and casts (``assigned``); ``v[i] = x`` does so for a part
(``with_item``); ``v.update(x)`` keeps both and casts numbers alone (``fitted``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardax._core._jax import Tracer, is_prng_key
from shardax._core.array_ops import ArrayLike, is_weakly_typed
from shardax._core.errors import VariableValueError
from shardax._core.explain import variable_errors as errors
from shardax._core.frames import is_eager, is_ref
from shardax._core.graph.paths import Path, PyTree
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object

# The value of one array.
ArrayValue = jax.Array | np.ndarray | LazyValue | jax.ShapeDtypeStruct
_ARRAY_VALUES = (jax.Array, np.ndarray, LazyValue, jax.ShapeDtypeStruct)

Number = bool | int | float | complex | np.generic
_NUMBERS = (bool, int, float, complex, np.generic)

DType = jax.typing.DTypeLike

# --- what a Variable is given ---------------------------------------------------------------------


def as_value(value: PyTree, kind_name: str) -> PyTree:
    """Returns what a Variable holds when it is given ``value``; raises if that has no arrays."""
    if isinstance(value, (jax.Array, LazyValue, jax.ShapeDtypeStruct)):
        return value
    if isinstance(value, (np.ndarray, *_NUMBERS)):
        return _canonical(value, kind_name)
    if is_ref(value):
        return value

    def as_leaf(leaf: object) -> ArrayValue:
        if isinstance(leaf, ArrayLike):  # a Variable stands for its value
            return leaf.value
        if is_ref(leaf):
            raise errors.ref_in_tree(kind_name)
        if not isinstance(leaf, (*_ARRAY_VALUES, *_NUMBERS)):
            raise errors.not_an_array(leaf, kind_name)
        return as_value(leaf, kind_name)

    return jax.tree.map(as_leaf, value, is_leaf=lambda item: isinstance(item, Object))


def _canonical(value: np.ndarray | Number, kind_name: str) -> np.ndarray:
    """Returns a NumPy array of its own, of the dtype that JAX uses for it."""
    array = np.asarray(value)
    if array.dtype.kind in "OUSMm" or array.dtype.names is not None:
        raise errors.not_numbers(array.dtype, kind_name)

    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if isinstance(value, int) and int(array.astype(dtype)) != value:
        raise errors.too_large(value, dtype)

    # The caller may go on writing into its NumPy array; a Variable changes only when it is written.
    return array.astype(dtype, copy=isinstance(value, np.ndarray))


# --- what is known without reading ----------------------------------------------------------------


def only_array(value: PyTree, kind_name: str) -> PyTree:
    """Returns the one array of a value, which has a shape and dtype; raises if it has several."""
    if hasattr(value, "shape"):
        return value
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1:
        raise errors.no_single_array(len(leaves), kind_name)
    return leaves[0]


def is_abstract(value: PyTree) -> bool:
    """Whether a value, or an array of a tree, is a shape and dtype alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


def is_deleted(leaf: object) -> bool:
    """Whether an array was donated or deleted."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def has_deleted(value: PyTree) -> bool:
    """Whether a value, or an array of a tree, was donated or deleted."""
    return any(map(is_deleted, jax.tree.leaves(value)))


def refuse_deleted(paths: Sequence[Path | str], values: Sequence[PyTree]) -> None:
    """Raises if a value was donated or deleted, listing all."""
    pairs = zip(paths, values, strict=True)
    deleted_paths = [path for path, value in pairs if has_deleted(value)]
    if deleted_paths:
        raise errors.deleted_values(deleted_paths)


def describe(value: PyTree) -> str:
    """Returns dtype and shape of a value, and what else ``repr`` of a Variable says of it."""
    if isinstance(value, LazyValue):
        return f"{_dtype_and_shape(value)}, lazy"
    if not isinstance(value, _ARRAY_VALUES):
        return repr(jax.tree.map(_dtype_and_shape, value))
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return _dtype_and_shape(value)

    processes = sorted({device.process_index for device in value.sharding.device_set})
    if len(processes) == 1:
        return _dtype_and_shape(value)
    return f"{_dtype_and_shape(value)} over processes {', '.join(map(str, processes))}"


def _dtype_and_shape(leaf: PyTree) -> PyTree:
    """Returns a text for an array; anything else as it is."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else leaf


# --- equality -------------------------------------------------------------------------------------


def same_value(first: PyTree, second: PyTree) -> bool:
    """Whether two values are known to be the same, to the last bit; never raises."""
    leaves, treedef = jax.tree.flatten(first)
    other_leaves, other_treedef = jax.tree.flatten(second)
    return treedef == other_treedef and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(first: PyTree, second: PyTree) -> bool:
    if first is second:
        return True

    with_numbers = (jax.Array, np.ndarray, np.generic, LazyValue)
    if not (isinstance(first, with_numbers) and isinstance(second, with_numbers)):
        return type(first) is type(second) and first == second  # shapes, shardings, numbers
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    first_bytes = _bytes_of(first)
    return first_bytes is not None and first_bytes == _bytes_of(second)


def _bytes_of(leaf: ArrayValue | np.generic) -> bytes | None:
    """Returns the bytes of an array; None if they are not here."""
    if isinstance(leaf, LazyValue):
        if not is_eager():
            return None
        leaf = leaf.compute()
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, Tracer) or leaf.is_deleted() or not leaf.is_fully_addressable:
            return None
        if is_prng_key(leaf):
            leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


# --- copies ---------------------------------------------------------------------------------------


def snapshot(value: PyTree) -> PyTree:
    """Returns a value that cannot change in place; JAX arrays are shared."""
    if isinstance(value, (jax.Array, LazyValue)):
        return value
    if is_ref(value):
        return value[...]
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


def copy_value(value: PyTree) -> PyTree:
    """Returns a value whose arrays have memory of their own, so it outlives a donation."""
    return jax.tree.map(_copy_leaf, value)


def _copy_leaf(leaf: PyTree) -> PyTree:
    # While a transform is tracing nothing is copied: what a program donates is decided where it is
    # called.
    if isinstance(leaf, Tracer):
        return leaf[...] if is_ref(leaf) else leaf
    if is_ref(leaf):
        return jax.new_ref(jnp.copy(leaf[...]))
    if isinstance(leaf, jax.Array):
        return _copy_array(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _copy_array(array: jax.Array) -> jax.Array:
    """Copies an array, outside of traces without a program."""
    # jnp.copy compiles a program for each shape, and lays out over a mesh in scope what has no
    # layout. Of random keys device_put loses the layout.
    is_plain = isinstance(array.dtype, np.dtype) and array.is_fully_addressable
    keeps_layout = (
        isinstance(array.sharding, NamedSharding) or jax.sharding.get_abstract_mesh().empty
    )
    if is_plain and keeps_layout and is_eager():
        return jax.device_put(array, may_alias=False)
    return jnp.copy(array)


# --- v[...] = x: shape and dtype are kept ---------------------------------------------------------


def assigned(old: PyTree, new: PyTree, kind_name: str) -> PyTree:
    """Returns what ``v[...] = new`` stores in the place of ``old``."""
    if not isinstance(old, _ARRAY_VALUES):
        return _assigned_tree(old, new, kind_name)
    if isinstance(new, jax.Array) and new.dtype == old.dtype and new.shape == old.shape:
        return new

    value = as_value(new, kind_name)
    problem = _misfit_of_shape(old, value) or _misfit_of_dtype(old, new, value)
    if problem:
        raise errors.assignment_misfit(old, kind_name, problem)

    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=value.sharding)
    if value.shape == old.shape and value.dtype == old.dtype:
        return value  # also one that is lazy

    array = value.compute() if isinstance(value, LazyValue) else value
    if array.dtype != old.dtype:
        array = array.astype(old.dtype)
    return _laid_out_as(old, jnp.broadcast_to(array, old.shape))


def _assigned_tree(old: PyTree, new: PyTree, kind_name: str) -> PyTree:
    """Returns ``assigned`` of a pytree, leaf by leaf."""
    value = as_value(new, kind_name)
    if not jax.tree.leaves(old):
        return value  # there is no structure to keep
    if jax.tree.structure(value) == jax.tree.structure(old):
        return jax.tree.map(lambda old, new: assigned(old, new, kind_name), old, value)
    if hasattr(old, "at"):  # a named array aligns by names
        return old.at[...].set(new)
    raise errors.other_structure(old, value, kind_name)


def _laid_out_as(old: ArrayValue, array: jax.Array) -> jax.Array:
    """Returns an array that was broadcast, in the layout of the one that it replaces."""
    if isinstance(old, Tracer):
        sharding = jax.typeof(old).sharding
        is_explicit = any(entry is not None for entry in sharding.spec)
        return jax.sharding.reshard(array, sharding) if is_explicit else array
    if isinstance(old, jax.Array) and old.committed and not isinstance(array, Tracer):
        return jax.device_put(array, old.sharding)
    return array


def _broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of a shape broadcasts to another one."""
    if len(shape) > len(target):
        return False
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return all(size in (1, wide) for size, wide in sizes)


def _misfit_of_shape(old: ArrayValue, value: PyTree) -> str | None:
    """Describes a value that does not broadcast to an array."""
    if not isinstance(value, _ARRAY_VALUES):
        return f"a {type(value).__name__}"
    if not _broadcasts_to(value.shape, old.shape):
        return f"the shape {list(value.shape)}, which does not broadcast to it"
    return None


def _misfit_of_dtype(old: ArrayValue, new: PyTree, value: ArrayValue) -> str | None:
    """Describes numbers that an array's dtype cannot hold; ``value`` is ``new`` as a value."""
    if value.dtype == old.dtype or _is_castable(new, value.dtype, old.dtype):
        return None
    if isinstance(new, _NUMBERS):
        return f"the number {new}, which it cannot hold"
    return f"{value.dtype}, which it cannot hold (v[...] = x.astype(v.dtype) casts nevertheless)"


def _is_castable(new: PyTree, dtype: DType, target: DType) -> bool:
    """Whether a cast loses no kind of number."""
    if any(jnp.issubdtype(each, jax.dtypes.extended) for each in (dtype, target)):
        return False  # random keys

    # A number is looked at itself.
    if isinstance(new, _NUMBERS) and jnp.issubdtype(target, jnp.integer):
        limits = jnp.iinfo(target)
        is_real = not isinstance(new, (complex, np.complexfloating))
        number: Any = new
        return is_real and limits.min <= number <= limits.max and number == int(number)
    if isinstance(new, _NUMBERS) and jnp.issubdtype(target, jnp.bool_):
        return new in (0, 1)

    return _rank_of(dtype) <= _rank_of(target)


def _rank_of(dtype: DType) -> int:
    """Returns the position of a dtype among booleans, integers, floats and complex numbers."""
    ranks = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(rank for rank, kind in enumerate(ranks) if jnp.issubdtype(dtype, kind))


# --- v[i] = x: a part is written ------------------------------------------------------------------


def with_item(array: PyTree, index: PyTree, new: PyTree, kind_name: str) -> PyTree:
    """Returns an array with the item at an index replaced, in its dtype."""
    if not isinstance(array, jax.Array):  # a named array aligns by names
        return array.at[index].set(new)

    new = _cast_item(array, new, kind_name)
    try:
        return array.at[index].set(new)
    except (TypeError, ValueError, IndexError) as error:
        problem = _item_misfit(array, index, new)
        if problem is None:
            raise
        raise VariableValueError(problem) from error


def with_entry(container: PyTree, key: PyTree, new: PyTree, kind_name: str) -> PyTree:
    """Returns a copy of a dict or list with one entry replaced."""
    if not isinstance(container, (dict, list)):
        raise errors.no_index(container, key)
    changed = copy.copy(container)
    changed[key] = new
    return as_value(changed, kind_name)


def _cast_item(old: jax.Array, new: PyTree, kind_name: str) -> PyTree:
    """Returns a value in the dtype of an array; raises for numbers that this cannot hold."""
    value = as_value(new, kind_name)
    if not isinstance(value, _ARRAY_VALUES) or value.dtype == old.dtype:
        return new

    problem = _misfit_of_dtype(old, new, value)
    if problem:
        raise errors.assignment_misfit(old, kind_name, problem)
    array: Any = value.compute() if isinstance(value, LazyValue) else value
    return array.astype(old.dtype)


def _item_misfit(old: jax.Array, index: object, new: PyTree) -> str | None:
    """Describes a value that does not fit into an item of an array; None for other misfits."""
    try:
        item = jax.eval_shape(lambda array: array[index], old)
    except Exception:  # noqa: BLE001 (then it is the index that JAX refuses)
        return None

    shape = np.shape(new)
    if _broadcasts_to(shape, item.shape):
        return None
    dtype = getattr(new, "dtype", None)
    given = f"the shape {list(shape)}" if dtype is None else f"{dtype}{list(shape)}"
    return (
        f"v[{index_text(index)}] = x writes {item.dtype}{list(item.shape)}, but x has {given}, "
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


# --- v.update(x): shape and dtype are kept, and only numbers are cast -----------------------------


def fitted(
    old: PyTree, new: PyTree, kind_name: str, cast: str | None = None
) -> tuple[PyTree, str | None]:
    """Returns what ``v.update(new)`` stores in the place of ``old``, and what is wrong, or None.

    Args:
        old: The value now.
        new: The value to take.
        kind_name: Name of the Variable's type.
        cast: ``"param"`` casts any numbers to the dtype of ``old``, ``"keep"`` leaves another dtype
            as it is, None casts numbers of Python alone and refuses others.
    """
    try:
        value = as_value(new, kind_name)
    except VariableValueError as error:
        return None, str(error)

    # Of a tree or Ref any value is taken that has arrays.
    if not hasattr(old, "shape"):
        return value, None
    if not hasattr(value, "shape"):
        return None, f"has shape {tuple(old.shape)}, given a {type(value).__name__}"
    if tuple(old.shape) != tuple(value.shape):
        return None, f"has shape {tuple(old.shape)}, given {tuple(value.shape)}"
    if old.dtype == value.dtype or cast == "keep":
        return value, None

    problem = f"has dtype {old.dtype}, given {value.dtype}"
    if any(jnp.issubdtype(each.dtype, jax.dtypes.extended) for each in (old, value)):
        return None, problem  # random keys
    if not cast:
        is_number = is_weakly_typed(new) or is_weakly_typed(value)
        if not is_number or jnp.result_type(new, old.dtype) != old.dtype:
            return None, problem

    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, old.dtype, sharding=value.sharding), None
    array = value.compute() if isinstance(value, LazyValue) else value
    return array.astype(old.dtype), None
