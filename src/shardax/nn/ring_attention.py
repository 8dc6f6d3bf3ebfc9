# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that several devices hold in parts.

Keys and values go round the devices of a mesh axis, a part at a time; each device updates a running
softmax of its queries with every part that comes by (H. Liu and others, "Ring Attention with
Blockwise Transformers", arXiv:2310.01889). No device holds more than its own part and one that
travels. The backward pass computes the weights of a part again from the softmax's maximum and sum,
and the gradients of keys and values travel with them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardax.nn.linear import explicit_entries
from shardax.nn.parameters import refuse_input
from shardax.partition.context import current_context, logical_to_mesh_axes
from shardax.partition.mesh import resolve_mesh
from shardax.partition.rules import mesh_axes_of

_NEVER = -0.7 * float(np.finfo(np.float32).max)  # the score of what may not be read


class Ring(NamedTuple):
    """What all steps of a ring have in common."""

    axis: str
    devices: int
    causal: bool
    window: int | None
    scale: float


def ring_axis(query: jax.Array) -> str | None:
    """Returns the mesh axis to go round; None: gather keys."""
    if current_context() != "ring":
        return None
    mesh = resolve_mesh()
    if mesh is None:
        return None
    entries = explicit_entries(query)
    if entries is not None:
        found = mesh_axes_of(entries[-3])
    else:
        found = mesh_axes_of((logical_to_mesh_axes(("seq",)) or PartitionSpec(None))[0])
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        found = tuple(axis for axis in found if kinds.get(axis) is AxisType.Auto)
    found = tuple(axis for axis in found if mesh.shape[axis] > 1)
    if len(found) > 1:
        refuse_input(
            'Attention with context="ring"',
            "a sequence that is split over one mesh axis",
            query,
            f"It is split over {', '.join(found)}: map seq to one of them.",
        )
    return found[0] if found else None


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    ring_over: str,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Attends; arrays are (..., time, heads, head_dim), split by time."""
    mesh = resolve_mesh()
    assert mesh is not None
    count = mesh.shape[ring_over]
    for array in (query, key):
        if array.shape[-3] % count:
            refuse_input(
                'Attention with context="ring"',
                f"sequences of a length divisible by {count}, the devices of {ring_over!r}",
                array,
                "Pad them, and mask the padding.",
            )
    ring = Ring(ring_over, count, causal, window, scale)
    by_time = PartitionSpec(*(None,) * (query.ndim - 3), ring_over)
    rows = PartitionSpec()
    if mask is not None and mask.shape[-2] > 1:
        rows = PartitionSpec(*(None,) * (mask.ndim - 2), ring_over)
    region: Any = jax.shard_map(
        functools.partial(_attend, ring),
        mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
        in_specs=(by_time, by_time, by_time, rows),
        out_specs=by_time,
        axis_names={ring_over},
    )
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(axis for axis, kind in kinds if kind is AxisType.Explicit)
    if explicit:
        place = jax.typeof(query).sharding
        region = jax.sharding.auto_axes(region, axes=explicit, out_sharding=place)
    return region(query, key, value, mask)


def _forward(ring: Ring, query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any]:
    grouped = _grouped(query, key.shape[-2])

    def read(state: Any, key: Any, value: Any, step: Any) -> Any:
        most, total, result = state
        scores = _scores(ring, grouped, key, mask, step)
        larger = jnp.maximum(most, scores.max(-1))
        kept, weights = jnp.exp(most - larger), jnp.exp(scores - larger[..., None])
        found = jnp.einsum("...kgts,...skh->...kgth", weights, value.astype(np.float32))
        return larger, kept * total + weights.sum(-1), kept[..., None] * result + found

    def turn(carry: Any, step: Any) -> Any:
        state, travelling = carry
        travelling = _pass_on(ring, travelling)
        return (read(state, travelling[0], travelling[1], step), travelling), None

    shape = _moved(grouped).shape
    start = (jnp.full(shape[:-1], _NEVER), jnp.zeros(shape[:-1]), jnp.zeros(shape))
    state = read(_own(ring, start), key, value, 0)
    (state, _), _ = jax.lax.scan(turn, (state, (key, value)), jnp.arange(1, ring.devices))
    most, total, result = state
    result = _joined(result / total[..., None]).astype(query.dtype)
    return result, (query, key, value, mask, result, most, total)


def _backward(ring: Ring, saved: Any, given: Any) -> tuple[Any, ...]:
    query, key, value, mask, result, most, total = saved
    grouped = _grouped(query, key.shape[-2]).astype(np.float32)
    upwards = _moved(_grouped(given, key.shape[-2])).astype(np.float32)
    share = (upwards * _moved(_grouped(result, key.shape[-2]))).sum(-1)

    def read(to_query: Any, travelling: Any, step: Any) -> Any:
        key, value, to_key, to_value = travelling
        scores = _scores(ring, grouped, key, mask, step)
        weights = jnp.exp(scores - most[..., None]) / total[..., None]
        to_value += jnp.einsum("...kgts,...kgth->...skh", weights, upwards)
        changes = jnp.einsum("...kgth,...skh->...kgts", upwards, value.astype(np.float32))
        changes = ring.scale * weights * (changes - share[..., None])
        changes = jnp.where(scores == _NEVER, 0, changes)
        to_key += jnp.einsum("...kgts,...tkgh->...skh", changes, grouped)
        to_query += jnp.einsum("...kgts,...skh->...tkgh", changes, key.astype(np.float32))
        return to_query, (key, value, to_key, to_value)

    def turn(carry: Any, step: Any) -> Any:
        to_query, travelling = carry
        return read(to_query, _pass_on(ring, travelling), step), None

    zeros = _own(ring, [jnp.zeros(x.shape) for x in (grouped, key, value)])
    carry = read(zeros[0], (key, value, *zeros[1:]), 0)
    (to_query, travelling), _ = jax.lax.scan(turn, carry, jnp.arange(1, ring.devices))
    to_key, to_value = _pass_on(ring, travelling[2:])  # home
    to_query = to_query.reshape(query.shape).astype(query.dtype)
    return to_query, to_key.astype(key.dtype), to_value.astype(value.dtype), None


def _result(ring: Ring, query: Any, key: Any, value: Any, mask: Any) -> jax.Array:
    return _forward(ring, query, key, value, mask)[0]


_attend: Any = jax.custom_vjp(_result, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _scores(ring: Ring, grouped: Any, key: Any, mask: Any, step: Any) -> jax.Array:
    """Returns scores for the part of the keys that is here."""
    # Of shape (..., kv heads, group, time, other time).
    own = jax.lax.axis_index(ring.axis)
    other = (own - step) % ring.devices  # whose part it is
    scores = jnp.einsum(
        "...tkgh,...skh->...kgts", grouped, key, preferred_element_type=jnp.float32
    ).astype(np.float32)
    scores = scores * ring.scale
    time, others = scores.shape[-2:]
    rows = own * time + jnp.arange(time)[:, None]
    columns = other * others + jnp.arange(others)[None]
    allowed = jnp.ones((time, others), bool)
    if ring.causal:
        allowed &= columns <= rows
    if ring.window is not None:
        allowed &= rows - columns < ring.window
    allowed = jnp.expand_dims(allowed, tuple(range(scores.ndim - 2)))
    if mask is not None:
        if mask.shape[-1] > 1:
            mask = jax.lax.dynamic_slice_in_dim(mask, other * others, others, mask.ndim - 1)
        heads = mask.shape[-3]
        pair = (1, 1) if heads == 1 else scores.shape[-4:-2]
        allowed = allowed & mask.reshape(*mask.shape[:-3], *pair, *mask.shape[-2:])
    return jnp.where(allowed, scores, _NEVER)


def _pass_on(ring: Ring, tree: Any) -> Any:
    """Gives each device what the device before it has."""
    pairs = [(one, (one + 1) % ring.devices) for one in range(ring.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, pairs), tree)


def _own(ring: Ring, tree: Any) -> Any:
    """Marks float32 values that devices have alike as such that may differ."""
    return jax.tree.map(
        lambda x: jax.lax.pcast(x.astype(np.float32), (ring.axis,), to="varying"), tree
    )


def _grouped(x: Any, kv_heads: int) -> Any:
    """Splits heads into groups that share a kv head."""
    return x.reshape(*x.shape[:-2], kv_heads, x.shape[-2] // kv_heads, x.shape[-1])


def _moved(x: Any) -> Any:
    """Moves time from before kv heads and groups to after them."""
    return jnp.moveaxis(x, -4, -2)


def _joined(x: Any) -> Any:
    """The inverse of ``_moved`` and ``_grouped``."""
    x = jnp.moveaxis(x, -2, -4)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
