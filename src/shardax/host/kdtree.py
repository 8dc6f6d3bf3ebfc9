# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours by ``scipy.spatial.KDTree``, inside JAX programs.

A search is two things. *Which* points are near is found on the host, and has no derivative. *How
far* they are is computed in the program from the points that were found, so distances have
derivatives of every order, by the queries and by the points.

A neighbour that does not exist (fewer points than asked for, or none near enough) has as its index
the number of points, as in SciPy, and as its distance a *padding* that nothing moves, infinite by
default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.variable import Variable
from shardax.host.errors import NeighbourError
from shardax.host.host_function import host_function


class Neighbours(NamedTuple):
    """Neighbours of some queries, the nearest first.

    Attributes:
        distances: Floats, the padding where there is no neighbour.
        indices: ``int32`` positions among the points, their number where there is no neighbour.

    Example:
        >>> import shardax as sx
        >>> distances, indices = sx.host.KDTree([[0.0], [5.0]]).query([1.0])
        >>> float(distances), int(indices)
        (1.0, 0)
    """

    distances: jax.Array
    indices: jax.Array


class Ball(NamedTuple):
    """The points in a ball around each of some queries, the nearest first.

    Attributes:
        distances: Shape (..., size), the padding past the last point.
        indices: Likewise, ``int32``; the number of points past the last one.
        counts: Shape (...), how many points there are in the ball. If that is more than ``size``,
            the farthest are left out.

    Example:
        >>> import shardax as sx
        >>> ball = sx.host.KDTree([[0.0], [5.0], [6.0]]).query_ball_point([5.0], 2.0, size=3)
        >>> ball.indices.tolist(), ball.distances.tolist(), int(ball.counts)
        ([1, 2, 3], [0.0, 1.0, inf], 2)
    """

    distances: jax.Array
    indices: jax.Array
    counts: jax.Array


class KDTree:
    """Finds the nearest among some points; distances have derivatives.

    Points that are known when this is made are sorted into a tree once, and are constants of the
    programs that search it. Points that a program computes (tracers) are sorted whenever it runs.
    It may be an attribute of a Module, where it is configuration.

    Args:
        points: Floats of shape (points, dimensions): an array or a Variable, whose value counts as
            of now.
        leafsize: As in ``scipy.spatial.KDTree``.
        boxsize: Period of the space: one number, or one per dimension with 0 for none. Points must
            lie between 0 and it.

    Raises:
        NeighbourError: If the points are no matrix of floats.
        ImportError: If SciPy is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> tree = sx.host.KDTree(jnp.array([[0.0, 0.0], [3.0, 4.0]]))
        >>> @jax.jit
        ... def nearest(x):
        ...     return tree.query(x).distances
        >>> x = jnp.array([3.0, 2.0])
        >>> float(nearest(x)), jax.grad(nearest)(x).tolist()
        (2.0, [0.0, -1.0])
        >>> jax.grad(nearest)(jnp.zeros(2)).tolist()
        [0.0, 0.0]
    """

    def __init__(
        self, points: Any, *, leafsize: int = 10, boxsize: float | Sequence[float] | None = None
    ) -> None:
        value = jnp.asarray(points.value if isinstance(points, Variable) else points)
        if value.ndim != 2 or not jnp.issubdtype(value.dtype, jnp.floating):
            raise NeighbourError(
                f"Points are a matrix of floats, one row for each, but were given as "
                f"{value.dtype}{list(value.shape)}. Reshape them, or convert them: "
                f"points.astype('float32')."
            )
        self.points = value
        self.boxsize = boxsize
        make = functools.partial(_make_tree, leafsize=leafsize, boxsize=boxsize)
        fixed = None if isinstance(value, Tracer) else make(np.asarray(value))
        self._moving = value if fixed is None else None
        options = {"vmap": "vectorized", "nondiff": True}
        self._query = host_function(
            functools.partial(_nearest, fixed, make),
            out=lambda points, x, *, k, **_: jax.ShapeDtypeStruct(
                (*x.shape[:-1], *_rows(k)), "int32"
            ),
            static_argnames=("k", "p", "eps", "bound"),
            **options,
        )
        self._ball = host_function(
            functools.partial(_within, fixed, make),
            out=lambda points, x, r, *, size, **_: (
                jax.ShapeDtypeStruct((*x.shape[:-1], size), "int32"),
                jax.ShapeDtypeStruct(x.shape[:-1], "int32"),
            ),
            static_argnames=("size", "p", "eps"),
            **options,
        )

    def __repr__(self) -> str:
        count, dimensions = self.points.shape
        return f"KDTree({count} points, {dimensions} dimensions)"

    def query(
        self,
        x: Any,
        k: int | Sequence[int] = 1,
        *,
        p: float = 2.0,
        eps: float = 0.0,
        distance_upper_bound: float = math.inf,
        padding: float = math.inf,
    ) -> Neighbours:
        """Returns the nearest points.

        Args:
            x: Queries, floats of shape (..., dimensions).
            k: How many, or which (1 is the nearest) in a sequence.
            p: Which Minkowski norm measures distances, 1 to infinity.
            eps: How far from the true ones the neighbours may be: a factor of 1 + eps.
            distance_upper_bound: Neighbours at this distance or farther do not count.
            padding: The distance where there is no neighbour. A finite one is safer where a
                function of it is differentiated: that may have no derivative at infinity.

        Returns:
            Distances and indices of shape (..., k), for ``k=1`` of shape (...).

        Raises:
            NeighbourError: If ``x``, ``k`` or ``p`` does not fit.

        Example:
            >>> import shardax as sx
            >>> tree = sx.host.KDTree([[0.0], [5.0], [7.0]])
            >>> tree.query([[4.0], [8.0]], k=2).indices.tolist()
            [[1, 2], [2, 1]]
        """
        x = self._checked(x, p)
        ranks = k if isinstance(k, int) else tuple(int(rank) for rank in k)
        if min([ranks] if isinstance(ranks, int) else ranks, default=0) < 1:
            raise NeighbourError(f"k={k!r} of a query; give at least 1, the nearest.")
        bound = float(distance_upper_bound)
        indices = self._query(self._moving, x, k=ranks, p=float(p), eps=float(eps), bound=bound)
        lifted = x if not _rows(ranks) else x[..., None, :]
        return Neighbours(self._distances(lifted, indices, p, padding), indices)

    def query_ball_point(
        self,
        x: Any,
        r: Any,
        *,
        size: int,
        p: float = 2.0,
        eps: float = 0.0,
        padding: float = math.inf,
    ) -> Ball:
        """Returns the points within a distance, at most ``size`` of them for each query.

        Args:
            x: Queries, floats of shape (..., dimensions).
            r: The distance: a number, or an array that broadcasts to shape (...). It has no
                derivative.
            size: Room for points; a program has to know it. ``counts`` says whether it was enough.
            p: As for ``query``.
            eps: Likewise.
            padding: Likewise.

        Returns:
            Distances and indices of shape (..., size), and the counts.

        Raises:
            NeighbourError: If ``x``, ``size`` or ``p`` does not fit.

        Example:
            >>> import jax, jax.numpy as jnp, shardax as sx
            >>> tree = sx.host.KDTree([[0.0], [1.0], [2.0], [9.0]])
            >>> ball = jax.jit(lambda x: tree.query_ball_point(x, 1.5, size=2))(jnp.array([1.1]))
            >>> ball.indices.tolist(), int(ball.counts)
            ([1, 2], 3)
        """
        x = self._checked(x, p)
        if not isinstance(size, int) or size < 1:
            raise NeighbourError(f"size={size!r} of a ball; give a Python integer of at least 1.")
        radius = jnp.broadcast_to(jnp.asarray(r, x.dtype), x.shape[:-1])
        indices, counts = self._ball(self._moving, x, radius, size=size, p=float(p), eps=float(eps))
        return Ball(self._distances(x[..., None, :], indices, p, padding), indices, counts)

    def _checked(self, x: Any, p: float) -> jax.Array:
        x = jnp.asarray(x.value if isinstance(x, Variable) else x)
        dimensions = self.points.shape[1]
        if x.ndim < 1 or x.shape[-1] != dimensions or not jnp.issubdtype(x.dtype, jnp.floating):
            raise NeighbourError(
                f"Queries are floats of shape (..., {dimensions}), one coordinate for each "
                f"dimension of the points, but were given as {x.dtype}{list(x.shape)}."
            )
        if p < 1:
            raise NeighbourError(f"p={p!r}: Minkowski norms have p of at least 1.")
        return x

    def _distances(self, x: jax.Array, indices: jax.Array, p: float, padding: float) -> jax.Array:
        """Returns how far ``x`` is from the points that were found for it."""
        count = self.points.shape[0]
        missing = indices >= count
        if count == 0:
            return jnp.full(indices.shape, padding, x.dtype)
        between = x - self.points[jnp.where(missing, 0, indices)]
        if self.boxsize is not None:
            box = jnp.broadcast_to(jnp.asarray(self.boxsize, x.dtype), between.shape)
            turns = jnp.round(between / jnp.where(box > 0, box, jnp.inf))
            between = between - box * jax.lax.stop_gradient(turns)
        return jnp.where(missing, padding, minkowski_norm(between, p))


def minkowski_norm(vectors: jax.Array, p: float) -> jax.Array:
    """Returns the norm of vectors along the last axis, with gradient 0 at the vector 0.

    It is ``sum(abs(v) ** p) ** (1 / p)``; for ``p=inf``, the largest component.

    Args:
        vectors: Floats of shape (..., dimensions).
        p: 1 to infinity.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.host.kdtree import minkowski_norm
        >>> v = jnp.array([3.0, 4.0])
        >>> [float(minkowski_norm(v, p)) for p in (1, 2, float("inf"))]
        [7.0, 5.0, 4.0]
    """
    # JAX's derivative of abs is 1 at 0, which would favour one side.
    sizes = jnp.where(vectors == 0, 0, jnp.abs(vectors))
    if p == math.inf:
        return jnp.max(sizes, axis=-1)
    if p == 1:
        return jnp.sum(sizes, axis=-1)
    powers = jnp.square(vectors) if p == 2 else sizes**p
    total = jnp.sum(powers, axis=-1)
    # The root has an infinite slope at 0. Selecting after it would give 0 * infinity, so its
    # argument is selected, too.
    root = jnp.where(total > 0, total, 1) ** (1 / p)
    return jnp.where(total > 0, root, 0)


def _rows(k: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimension that neighbours add to the result."""
    if isinstance(k, tuple):
        return (len(k),)
    return () if k == 1 else (k,)


# --- on the host ----------------------------------------------------------------------------------


def _make_tree(points: np.ndarray, leafsize: int, boxsize: Any) -> Any:
    try:
        from scipy.spatial import KDTree as Tree
    except ImportError as error:
        raise ImportError("KDTree needs SciPy. Install it: pip install scipy") from error
    return Tree(points, leafsize=leafsize, boxsize=boxsize)


def _nearest(
    tree: Any, make: Any, points: Any, x: np.ndarray, *, k: Any, p: float, eps: float, bound: float
) -> np.ndarray:
    def search(tree: Any, x: np.ndarray) -> np.ndarray:
        return tree.query(x, k=k, p=p, eps=eps, distance_upper_bound=bound)[1]

    return _each(search, tree, make, points, x)


def _within(
    tree: Any,
    make: Any,
    points: Any,
    x: np.ndarray,
    r: np.ndarray,
    *,
    size: int,
    p: float,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    def search(tree: Any, x: np.ndarray, r: np.ndarray) -> np.ndarray:
        count = np.asarray(tree.query_ball_point(x, r, p=p, eps=eps, return_length=True))
        found = tree.query(x, k=range(1, size + 1), p=p, eps=eps)[1]
        found = np.where(np.arange(size) < count[..., None], found, tree.n)
        return np.concatenate([found, count[..., None]], axis=-1)

    found = _each(search, tree, make, points, x, r)
    return found[..., :-1], found[..., -1]


def _each(search: Callable[..., Any], tree: Any, make: Any, points: Any, *queries: Any) -> Any:
    """Searches the tree, or that of the points of each lane; lanes may share their points."""
    if tree is not None:
        return search(tree, *queries)
    batch = points.shape[:-2]
    if not any(points.strides[: len(batch)]):
        return search(make(points[(0,) * len(batch)]), *queries)
    lanes = [
        search(make(points[lane]), *(query[lane] for query in queries))
        for lane in np.ndindex(batch)
    ]
    return np.stack(lanes).reshape(*batch, *np.shape(lanes[0]))
