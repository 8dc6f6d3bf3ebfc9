# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours are SciPy's; distances have the derivatives that calculus gives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import shardax as sx
from examples.nearest_neighbours import CodeBook, main, query, within

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.uniform(size=(30, 3)).astype("float32")
QUERIES = RANDOM.uniform(size=(4, 2, 3)).astype("float32")
EXACT = scipy.spatial.KDTree(POINTS)


def test_program_learns_a_code_book(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = main(["--points", "200", "--codes", "4", "--steps", "20"])
    assert last < 0.8 * first
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("k", [1, 3, 40])
def test_queries_equal_scipy(k: int) -> None:
    ways = [
        query(POINTS, QUERIES, k),
        jax.jit(lambda x: query(POINTS, x, k))(QUERIES),
        jax.jit(lambda points, x: query(points, x, k))(POINTS, QUERIES),
        jax.jit(jax.vmap(lambda x: query(POINTS, x, k)))(QUERIES),
    ]
    exact_distances, exact_indices = EXACT.query(QUERIES, range(1, k + 1))
    for distances, indices, _ in ways:
        assert indices.tolist() == exact_indices.tolist()
        assert indices.dtype == jnp.int32
        np.testing.assert_allclose(distances, exact_distances, rtol=1e-5)


def test_neighbors_beyond_the_bound_are_missing() -> None:
    points = jnp.array([[0.0], [1.0], [5.0]])
    distances, indices, _ = query(points, jnp.array([0.25]), 3, bound=2.0)
    assert (distances.tolist(), indices.tolist()) == ([0.25, 0.75, math.inf], [0, 1, 3])
    finite = jax.grad(lambda x: query(points, x, 2, bound=1.0).distances[0])
    assert finite(jnp.array([0.75])).tolist() == [-1.0]


def test_empty_points_have_no_neighbors() -> None:
    distances, indices, _ = jax.jit(query)(jnp.zeros((0, 2)), jnp.zeros(2))
    assert (distances.tolist(), indices.tolist()) == ([math.inf], [0])


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [2, 12])
def test_balls_equal_scipy_sorted_by_distance(compiled: Any, size: int) -> None:
    radius = np.linspace(0.1, 0.6, 8, dtype="float32").reshape(4, 2)
    ball = compiled(lambda x, r: within(POINTS, x, r, size))(QUERIES, radius)
    for place in np.ndindex(4, 2):
        inside = EXACT.query_ball_point(QUERIES[place], radius[place])
        far = np.linalg.norm(POINTS[inside] - QUERIES[place], axis=-1)
        nearest = [inside[i] for i in np.argsort(far)][:size]
        rest = size - len(nearest)
        assert int(ball.counts[place]) == len(inside)
        assert ball.indices[place].tolist() == nearest + [len(POINTS)] * rest
        expected = [*sorted(far)[:size], *[math.inf] * rest]
        np.testing.assert_allclose(ball.distances[place], expected, rtol=1e-5)


# --- derivatives ----------------------------------------------------------------------------------


def test_distances_have_derivatives_by_queries_and_points() -> None:
    points, x = jnp.asarray(POINTS[:6]), jnp.asarray(QUERIES[0])
    distances = jax.jit(lambda points, x: query(points, x, 2).distances)
    check_grads(distances, (points, x), order=1, atol=0.05, rtol=0.05)


def test_distances_have_second_derivatives() -> None:
    distance = lambda x: query(jnp.zeros((1, 2)), x).distances[0]  # noqa: E731
    curvature = jax.jit(jax.hessian(distance))(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(curvature, [[0.128, -0.096], [-0.096, 0.072]], rtol=1e-5)


def test_distances_within_a_ball_have_derivatives() -> None:
    def energy(x: Any) -> Any:
        distances = within(POINTS, x, 0.5, 16).distances
        distances = jnp.where(jnp.isfinite(distances), distances, 100.0)
        return jnp.exp(-(distances**2)).sum()

    check_grads(jax.jit(energy), (jnp.asarray(QUERIES),), order=1, atol=0.05, rtol=0.05)


def test_at_distance_zero_the_gradient_is_zero() -> None:
    """The norm of zero has none; computed plainly it is not a number, and so is all after it."""
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: query(POINTS, x).distances[0])))
    assert not gradient(POINTS).any()
    assert bool(jnp.isnan(jax.grad(jnp.linalg.norm)(jnp.zeros(3))).all())


# --- in programs ----------------------------------------------------------------------------------


def test_vmap_searches_shared_or_separate_trees() -> None:
    shared = jax.vmap(lambda x: query(POINTS, x, 2).indices)(QUERIES)
    assert shared.tolist() == EXACT.query(QUERIES, 2)[1].tolist()
    many = np.stack([POINTS, POINTS[::-1], POINTS + 1, POINTS])
    own = jax.jit(jax.vmap(lambda points, x: query(points, x).indices[..., 0]))(many, QUERIES)
    exact = [scipy.spatial.KDTree(p).query(x)[1] for p, x in zip(many, QUERIES, strict=True)]
    assert own.tolist() == np.stack(exact).tolist()


def test_shards_search_for_their_own_queries(auto_mesh: Mesh) -> None:
    over = jax.shard_map(
        lambda x: query(POINTS, x)[:2], mesh=auto_mesh, in_specs=P("data"), out_specs=P("data")
    )
    distances, indices = jax.jit(over)(QUERIES)
    assert indices[..., 0].tolist() == EXACT.query(QUERIES)[1].tolist()
    assert distances.shape == (4, 2, 1)


def test_module_searches_its_parameters() -> None:
    book, x = CodeBook(jnp.array([[0.0, 0.0], [4.0, 0.0]])), jnp.array([3.0, 0.0])
    distance, gradient = sx.jit(sx.value_and_grad(lambda book: book(x)))(book)
    assert float(distance) == 1.0
    assert gradient["codes"].tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_float64_points_keep_their_precision() -> None:
    with jax.enable_x64(True):
        points = np.array([[0.0], [1e-12]])
        distances, indices, _ = jax.jit(query)(points, np.array([0.9e-12]))
        assert (distances.dtype, indices.tolist()) == (jnp.float64, [1])
