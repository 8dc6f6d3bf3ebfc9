# SPDX-License-Identifier: Apache-2.0
"""Sums along manual mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shardax._parallel.manual_axes import mark_varying, sum_over


def test_sums_of_narrow_floats_have_gradients_beside_auto_axes() -> None:
    # Beside an axis of the compiler, also where the gradient of a value is summed.
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def region(x: Any, w: Any) -> Any:
        return sum_over(x @ mark_varying(w, ("data",)), ("data",))

    summed = jax.shard_map(
        region, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"}
    )
    for dtype in ("bfloat16", "float32"):
        x, w = jnp.arange(8.0, dtype=dtype).reshape(2, 4), jnp.ones((4, 4), dtype)
        found, back = jax.vjp(lambda w, x=x: jax.jit(summed)(x, w), w)
        (gradient,) = back(jnp.ones_like(found))
        assert (found.dtype, gradient.dtype) == (dtype, dtype)
        assert found.tolist() == [[28.0] * 4]
        assert gradient.tolist() == [[4.0] * 4, [6.0] * 4, [8.0] * 4, [10.0] * 4]
