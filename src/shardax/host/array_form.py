# SPDX-License-Identifier: Apache-2.0
"""Array forms: what an artifact says of one array.

Random keys are *words* to everything outside of JAX: the numbers they are made of, ``uint32`` with
one dimension more. Files and exported programs have words; whoever calls has keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


class ArrayForm(NamedTuple):
    """Shape, dtype and place of one array.

    Attributes:
        shape: Sizes; a dynamic dimension is the text of its name, or an expression of names.
        dtype: Name of the dtype; of random keys such as ``key<fry>``.
        key: Implementation of the random keys that it holds, or None.
        spec: Mesh axes of each dimension, or None if it is not laid out over a mesh.

    Example:
        >>> import jax.numpy as jnp
        >>> print(ArrayForm.of(jnp.zeros((2, 3))), ArrayForm(("batch", 4), "int32"))
        float32[2,3] int32[batch,4]
    """

    shape: tuple[int | str, ...]
    dtype: str
    key: str | None = None
    spec: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, value: Any) -> ArrayForm:
        """Returns the form of an array, a stand-in for one, or a number."""
        shape = tuple(s if type(s) is int else str(s) for s in np.shape(value))
        if holds_keys(value):
            return cls(shape, str(value.dtype), _key_impl(value), _spec_of(value))
        return cls(shape, str(jnp.result_type(value)), None, _spec_of(value))

    @classmethod
    def from_json(cls, entry: Any) -> ArrayForm:
        """Returns the form that ``as_json`` wrote."""
        spec = entry.get("spec")
        spec = None if spec is None else tuple(tuple(e) if type(e) is list else e for e in spec)
        return cls(tuple(entry["shape"]), entry["dtype"], entry.get("key"), spec)

    def as_json(self) -> dict[str, Any]:
        """Returns the form as JSON values."""
        entry: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if self.key is not None:
            entry["key"] = self.key
        if self.spec is not None:
            entry["spec"] = [list(e) if isinstance(e, tuple) else e for e in self.spec]
        return entry

    @property
    def is_wide(self) -> bool:
        """Whether its numbers have 64 bits (or 128, if complex), which JAX has to be told of."""
        return self.dtype in ("int64", "uint64", "float64", "complex128")

    def words(self) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of its words; all sizes must be known."""
        shape = tuple(map(int, self.shape))
        if self.key is None:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=self.key)))
        return jax.ShapeDtypeStruct((*shape, *one.shape), one.dtype)

    def sharding(self, mesh: Any) -> NamedSharding:
        """Returns the layout of its words over a mesh."""
        entries = self.spec or ()
        if self.key is not None:  # words have one dimension more
            entries = (*entries, *(None,) * (len(self.shape) - len(entries)), None)
        return NamedSharding(mesh, PartitionSpec(*entries))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def _key_impl(keys: Any) -> str:
    """Returns the implementation of keys; JAX tells it for arrays only, so one is traced."""
    found: list[str] = []
    jax.eval_shape(lambda keys: found.append(str(jax.random.key_impl(keys))), keys)
    return found[0]


def _spec_of(value: Any) -> tuple[Any, ...] | None:
    sharding = getattr(value, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def holds_keys(value: Any) -> bool:
    """Whether a value is an array of random keys, or stands for one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def plain_dtype(dtype: Any) -> Any:
    """Returns the dtype that JAX gives to an array of a dtype: of 32 bits, if it uses these."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def to_words(value: Any) -> Any:
    """Returns an array as programs and files have it: the words of random keys."""
    return jax.random.key_data(value) if holds_keys(value) else value


def from_words(words: Any, form: ArrayForm) -> Any:
    """Returns an array as callers have it."""
    return words if form.key is None else jax.random.wrap_key_data(words, impl=form.key)


def all_from_words(words: Sequence[Any], forms: Sequence[ArrayForm]) -> list[Any]:
    """Returns several arrays as callers have them."""
    return [from_words(item, form) for item, form in zip(words, forms, strict=True)]
