# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours by SciPy inside JAX programs, with derivatives.

The search runs on the host (``sx.host.host_function``), by ``scipy.spatial.KDTree``. Its ``jvp``
rule says how distances move with points and queries, with zero at distance zero, where the norm has
no derivative. Written in JAX, it gives gradients and higher derivatives too. The example learns a
code book: codes that are near to many random points.

    python examples/nearest_neighbours.py --points 2000 --codes 16 --steps 60
"""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import KDTree

import shardax as sx


class Neighbours(NamedTuple):
    """Distances and indices, nearest first.

    Where there is no neighbour they are infinity and the number of points. ``counts``, of
    ``within`` only, is how many points are in each ball, also beyond ``size``.
    """

    distances: Any
    indices: Any
    counts: Any = None


def _moved(args: tuple[Any, ...], result: Neighbours, tangents: Any, **_: Any) -> Neighbours:
    """The derivative of distances by points and queries."""
    points, x = map(jnp.asarray, args[:2])
    d_points, d_x = tangents[:2]
    apart = jnp.isfinite(result.distances) & (result.distances > 0)
    indices = jnp.where(result.indices < len(points), result.indices, 0)
    between = x[..., None, :] - points[indices]
    change = d_x[..., None, :] - d_points[indices]
    # A root or quotient at zero would be infinite, so its argument is selected, not its result.
    rate = (between * change).sum(-1) / jnp.where(apart, result.distances, 1)
    return Neighbours(jnp.where(apart, rate, 0), None, None)


def _form(points: Any, x: Any, *_: Any, k: int = 0, size: int = 0, **__: Any) -> Neighbours:
    shape = x.shape[:-1]
    row = (*shape, k or size)
    counts = jax.ShapeDtypeStruct(shape, int) if size else None
    return Neighbours(jax.ShapeDtypeStruct(row, x.dtype), jax.ShapeDtypeStruct(row, int), counts)


@functools.partial(sx.host.host_function, out=_form, jvp=_moved, static_argnames=("k", "bound"))
def _query(points: Any, x: Any, *, k: int, bound: float) -> Neighbours:
    found = KDTree(points).query(x, k=range(1, k + 1), distance_upper_bound=bound)
    return Neighbours(*found)


@functools.partial(sx.host.host_function, out=_form, jvp=_moved, static_argnames="size")
def _within(points: Any, x: Any, r: Any, *, size: int) -> Neighbours:
    tree = KDTree(points)
    counts = np.asarray(tree.query_ball_point(x, r, return_length=True))
    distances, indices = tree.query(x, k=range(1, size + 1))
    inside = np.arange(size) < counts[..., None]
    return Neighbours(
        np.where(inside, distances, math.inf), np.where(inside, indices, tree.n), counts
    )


def query(points: Any, x: Any, k: int = 1, bound: float = math.inf) -> Neighbours:
    """The ``k`` nearest points of each query within a bound."""
    return _query(points, x, k=k, bound=bound)


def within(points: Any, x: Any, r: Any, size: int) -> Neighbours:
    """The points in a ball around each query, at most ``size``."""
    radius = jnp.broadcast_to(jnp.asarray(r, x.dtype), x.shape[:-1])
    return _within(points, x, jax.lax.stop_gradient(radius), size=size)


class CodeBook(sx.Module):
    """Codes that stand for the points near to them."""

    def __init__(self, codes: Any) -> None:
        self.codes = sx.Param(codes)

    def __call__(self, x: Any) -> Any:
        return query(self.codes.value, x).distances[..., 0]


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Learns codes; returns the first and the last mean squared distance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--codes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    x = jax.random.uniform(jax.random.key(0), (options.points, 2))
    book = CodeBook(x[: options.codes])

    @sx.jit
    def step(book: CodeBook) -> Any:
        loss, gradients = sx.value_and_grad(lambda book: jnp.mean(book(x) ** 2))(book)
        book.codes[...] -= 0.25 * options.codes * gradients["codes"]
        return loss

    losses = [float(step(book)) for _ in range(options.steps)]
    print(f"mean squared distance to the nearest code: {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
