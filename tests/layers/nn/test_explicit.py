# SPDX-License-Identifier: Apache-2.0
"""Which layout results get over Explicit mesh axes, found from the operands' types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardax.nn import arithmetic
from shardax.partition import explicit


@pytest.fixture(autouse=True)
def scope(explicit_mesh: Mesh) -> Iterator[None]:
    with jax.set_mesh(explicit_mesh):
        yield


WHOLE = P()


def array(*shape: int, spec: P = WHOLE) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32), spec)


def spec_of(x: Any) -> P:
    return jax.typeof(x).sharding.spec


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        (P("data"), P(None, "model"), P("data", None, "model")),  # data and tensor parallel
        (P("data", None, "model"), P("model"), P("data", None, None)),  # sum over a split dimension
        (P("data"), P("data", "model"), P("data", None, "model")),  # parameters split by the batch
        (P("data"), P(None, "data"), P("data", None, None)),  # both want data: the input has it
        (P(("data", "model")), P(None, "model"), P(("data", "model"), None, None)),
        (P(), P(None, "model"), P(None, None, "model")),
        (P(), P(), P(None, None, None)),
    ],
)
def test_contraction_keeps_layouts_of_remaining_dimensions(left: P, right: P, result: P):
    x, kernel = array(8, 3, 8, spec=left), array(8, 8, spec=right)
    for found in (
        arithmetic.contract(x, kernel, (0,)),
        arithmetic.einsum("bte,em->btm", x, kernel),
    ):
        assert spec_of(found) == result
        assert (np.asarray(found) == 8).all()


def test_gradients_have_the_layout_of_their_operands():
    x, kernel = array(8, 3, 8, spec=P("data")), array(8, 8, spec=P("data", "model"))
    gradient = jax.jit(jax.grad(lambda x, k: arithmetic.contract(x, k, (0,)).sum(), argnums=(0, 1)))
    assert [spec_of(one) for one in gradient(x, kernel)] == [spec_of(x), spec_of(kernel)]


def test_auto_axes_give_no_sharding(auto_mesh: Mesh):
    with jax.set_mesh(auto_mesh):
        x = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(auto_mesh, P("data")))
        assert explicit.explicit_entries(x) is None
        assert explicit.explicit_sharding(x) is None
        assert explicit.joined_sharding(((x, (0, 1)),)) is None
        row = x[0]
        assert explicit.align(row, x) is row


def test_contraction_inside_shard_map_has_no_layout(explicit_mesh: Mesh):
    def body(x: jax.Array, kernel: jax.Array) -> jax.Array:
        assert explicit.explicit_entries(x) is None
        return jax.lax.psum(arithmetic.contract(x, kernel, (0,)), "model")

    mapped = jax.shard_map(
        body, in_specs=(P("data", "model"), P("model", None)), out_specs=P("data", None)
    )
    found = jax.jit(mapped)(array(4, 8, spec=P("data", "model")), array(8, 5, spec=P("model")))
    np.testing.assert_array_equal(found, np.full((4, 5), 8))


def test_parameters_take_the_layout_they_meet():
    scale, x = array(8, spec=P("data")), array(4, 3, 8, spec=P("data"))
    assert spec_of(explicit.align(scale, x)) == P(None)
    assert explicit.align(scale, array(3, 8, spec=P(None, "data"))) is scale
    assert spec_of(explicit.align(scale, array(8, 4, spec=P("model")), (0,))) == P("model")
