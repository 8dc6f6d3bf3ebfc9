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
from shardax.host.errors import NeighbourError
from shardax.host.kdtree import minkowski_norm

KDTree = sx.host.KDTree

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.uniform(size=(30, 3)).astype("float32")
QUERIES = RANDOM.uniform(size=(4, 2, 3)).astype("float32")
EXACT = scipy.spatial.KDTree(POINTS)


@pytest.mark.parametrize("k", [1, 3, [1], [2, 5], 40])
def test_queries_are_those_of_scipy(k: Any) -> None:
    tree = KDTree(POINTS)
    ways = [
        tree.query(QUERIES, k),
        jax.jit(lambda x: tree.query(x, k))(QUERIES),
        jax.jit(lambda points, x: KDTree(points).query(x, k))(POINTS, QUERIES),
    ]
    exact_distances, exact_indices = EXACT.query(QUERIES, k)
    for distances, indices in ways:
        assert indices.tolist() == exact_indices.tolist()
        assert indices.dtype == jnp.int32
        np.testing.assert_allclose(distances, exact_distances, rtol=1e-5)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
def test_all_norms_and_periods_are_those_of_scipy(p: float) -> None:
    box = (1.0, 0.0, 2.0)
    exact = scipy.spatial.KDTree(POINTS, boxsize=box)
    distances, indices = jax.jit(lambda x: KDTree(POINTS, boxsize=box).query(x, 4, p=p))(QUERIES)
    exact_distances, exact_indices = exact.query(QUERIES, 4, p=p)
    assert indices.tolist() == exact_indices.tolist()
    np.testing.assert_allclose(distances, exact_distances, rtol=1e-5)


def test_neighbours_that_are_too_far_are_missing() -> None:
    tree = KDTree([[0.0], [1.0], [5.0]])
    distances, indices = tree.query(jnp.array([0.25]), 3, distance_upper_bound=2.0)
    assert (distances.tolist(), indices.tolist()) == ([0.25, 0.75, math.inf], [0, 1, 3])
    finite = jax.grad(lambda x: tree.query(x, 2, distance_upper_bound=1.0).distances[0])
    assert finite(jnp.array([0.75])).tolist() == [-1.0]


def test_no_points_have_no_neighbours() -> None:
    distances, indices = jax.jit(KDTree(jnp.zeros((0, 2))).query)(jnp.zeros(2))
    assert (float(distances), int(indices)) == (math.inf, 0)


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [2, 12])
def test_balls_are_those_of_scipy_nearest_first(compiled: Any, size: int) -> None:
    tree, radius = KDTree(POINTS), np.linspace(0.1, 0.6, 8, dtype="float32").reshape(4, 2)
    ball = compiled(lambda x, r: tree.query_ball_point(x, r, size=size))(QUERIES, radius)
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


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_distances_have_derivatives_by_queries_and_points(p: float) -> None:
    def distances(points: Any, x: Any) -> Any:
        return KDTree(points).query(x, 2, p=p).distances

    points, x = jnp.asarray(POINTS[:6]), jnp.asarray(QUERIES[0])
    check_grads(jax.jit(distances), (points, x), order=1, atol=0.05, rtol=0.05)


def test_distances_have_second_derivatives() -> None:
    tree = KDTree([[0.0, 0.0]])
    curvature = jax.jit(jax.hessian(lambda x: tree.query(x).distances))(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(curvature, [[0.128, -0.096], [-0.096, 0.072]], rtol=1e-5)


def test_distances_within_a_ball_have_derivatives() -> None:
    tree = KDTree(POINTS)

    def energy(x: Any) -> Any:
        distances = tree.query_ball_point(x, 0.5, size=16, padding=100.0).distances
        return jnp.exp(-(distances**2)).sum()

    check_grads(jax.jit(energy), (jnp.asarray(QUERIES),), order=1, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("p", [1, 1.5, 2, math.inf])
def test_at_distance_zero_the_gradient_is_zero(p: float) -> None:
    """The norm of zero has none; computed plainly it is not a number, and so is all after it."""
    tree = KDTree(POINTS)
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: tree.query(x, p=p).distances)))
    assert not gradient(POINTS).any()
    assert bool(jnp.isnan(jax.grad(jnp.linalg.norm)(jnp.zeros(3))).all())


def test_the_norm_is_that_of_numpy() -> None:
    v = jnp.asarray(QUERIES)
    for p in (1, 2, 2.5, math.inf):
        norms = (
            np.linalg.norm(QUERIES.reshape(-1, 3), p, axis=-1)
            if p in (1, 2, math.inf)
            else ((np.abs(QUERIES.reshape(-1, 3)) ** p).sum(-1) ** (1 / p))
        )
        np.testing.assert_allclose(minkowski_norm(v, p).ravel(), norms, rtol=1e-5)


# --- in programs ----------------------------------------------------------------------------------


def test_lanes_search_one_tree_or_each_its_own() -> None:
    tree = KDTree(POINTS)
    shared = jax.vmap(lambda x: tree.query(x, 2).indices)(QUERIES)
    assert shared.tolist() == EXACT.query(QUERIES, 2)[1].tolist()
    many = np.stack([POINTS, POINTS[::-1], POINTS + 1, POINTS])
    own = jax.jit(jax.vmap(lambda points, x: KDTree(points).query(x).indices))(many, QUERIES)
    exact = [scipy.spatial.KDTree(p).query(x)[1] for p, x in zip(many, QUERIES, strict=True)]
    assert own.tolist() == np.stack(exact).tolist()
    of_one = jax.jit(jax.vmap(lambda x, points: KDTree(points).query(x).indices, (0, None)))
    assert of_one(QUERIES, POINTS).tolist() == EXACT.query(QUERIES)[1].tolist()


def test_shards_search_for_their_own_queries(auto_mesh: Mesh) -> None:
    tree = KDTree(POINTS)
    over = jax.shard_map(
        lambda x: tree.query(x), mesh=auto_mesh, in_specs=P("data"), out_specs=P("data")
    )
    distances, indices = jax.jit(over)(QUERIES)
    assert indices.tolist() == EXACT.query(QUERIES)[1].tolist()
    assert distances.shape == (4, 2)


def test_a_module_searches_among_what_it_learns() -> None:
    class Codes(sx.Module):
        def __init__(self) -> None:
            self.codes = sx.Param(jnp.array([[0.0, 0.0], [4.0, 0.0]]))
            self.fixed = KDTree(jnp.array([[9.0, 9.0]]))

        def __call__(self, x: Any) -> Any:
            return KDTree(self.codes).query(x).distances + 0 * self.fixed.query(x).distances

    model, x = Codes(), jnp.array([3.0, 0.0])
    distance, gradient = sx.jit(sx.value_and_grad(lambda model: model(x)))(model)
    assert float(distance) == 1.0
    assert gradient["codes"].tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_wide_numbers_are_searched_as_such() -> None:
    with jax.enable_x64(True):
        tree = KDTree(np.array([[0.0], [1e-12]]))
        distances, indices = jax.jit(tree.query)(np.array([0.9e-12]))
        assert (distances.dtype, int(indices)) == (jnp.float64, 1)


def test_what_does_not_fit_is_an_error() -> None:
    tree = KDTree(POINTS)
    for call, told in [
        (lambda: KDTree(jnp.zeros(3)), r"float32\[3\]"),
        (lambda: KDTree(jnp.zeros((3, 1), int)), r"int32\[3, 1\]"),
        (lambda: tree.query(jnp.zeros(2)), r"\(\.\.\., 3\).*float32\[2\]"),
        (lambda: tree.query(QUERIES, 0), "k=0"),
        (lambda: tree.query(QUERIES, []), r"k=\[\]"),
        (lambda: tree.query(QUERIES, p=0.5), r"p=0\.5"),
        (lambda: tree.query_ball_point(QUERIES, 1.0, size=0), "size=0"),
    ]:
        with pytest.raises(NeighbourError, match=told):
            call()
    assert repr(tree) == "KDTree(30 points, 3 dimensions)"
