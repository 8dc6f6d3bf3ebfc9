# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence split over devices.

Keys and values go round the devices of a mesh axis, a part at a time; each device updates a running
softmax of its queries with every part that comes by (H. Liu and others, "Ring Attention with
Blockwise Transformers", arXiv:2310.01889). No device holds more than its own part and one that
travels. The backward pass computes the weights of a part again from the softmax's maximum and sum,
and the gradients of keys and values travel with them. A causal window ends the round where no
device reads the parts that would follow.

In causal attention the device with the last part reads n parts where the first reads one, and all
wait for it. In *zig-zag* order device i of n has the i-th and the (2n - 1 - i)-th of 2n *chunks*:
from every part that comes by, each device then reads one half, by both of its chunks, or the whole,
by its later chunk (the order in which Llama 3 was trained, arXiv:2407.21783, section 3.3.2). Rows
are brought into this order and back here: inputs and results of a model are in order of position.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from shardax._parallel.manual_axes import axis_types, mesh_of_region, vary, with_auto_axes
from shardax.extend import ScopeSettings, explicit_entries, mesh_axes_of
from shardax.partition import logical_to_mesh_axes, resolve_mesh

_NEVER = -0.7 * float(np.finfo(np.float32).max)  # the score of what may not be read


class Ring(NamedTuple):
    """Settings of all steps of a ring."""

    axis: str
    devices: int
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    zigzag: bool

    @property
    def parts(self) -> int:
        """The number of equal parts of a sequence."""
        return 2 * self.devices if self.zigzag else self.devices


class Part(NamedTuple):
    """Keys and values of one device, sent round the ring."""

    key: Any
    value: Any
    segments: Any


def ring_axes(query: jax.Array) -> tuple[str, ...]:
    """Mesh axes of a split sequence; none where keys are gathered."""
    mesh = resolve_mesh()
    if ScopeSettings.current().context == "all-gather" or mesh is None:
        return ()

    entries = explicit_entries(query)
    axes = () if entries is None else mesh_axes_of(entries[-3])
    if not axes:  # the compiler decides, or the tokens came unplaced: what the rules say
        ruled = mesh_axes_of((logical_to_mesh_axes(("seq",)) or PartitionSpec(None))[0])
        used_axes = {axis for entry in entries or () for axis in mesh_axes_of(entry)}
        types = axis_types(mesh)
        free = [axis for axis, kind in types.items() if kind is not AxisType.Manual]
        axes = tuple(axis for axis in ruled if axis in free and axis not in used_axes)
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def make_ring(
    query: jax.Array,
    key: jax.Array,
    axis: str,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Ring:
    """Ring over a mesh axis, in the order of the scope."""
    mesh = resolve_mesh()
    assert mesh is not None

    # Without an order every device reads all, and in a window each reads as much: balanced as is.
    same_length = query.shape[-3] == key.shape[-3]
    zigzag = (
        ScopeSettings.current().context == "ring-zigzag"
        and causal
        and window is None
        and same_length
    )
    return Ring(axis, mesh.shape[axis], causal, window, scale, softcap, zigzag)


def ring_attention(
    ring: Ring,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Attends; arrays are (..., time, heads, head_dim), split by time.

    Args:
        ring: The ring.
        query: The queries.
        key: The keys.
        value: The values.
        mask: What may be read, or None.
        segments: Those of queries and of keys, (..., time), or None.
    """
    mesh = resolve_mesh()
    assert mesh is not None

    # Gradients differ along all manual axes that any array does, and have the types of the arrays.
    around = jax.sharding.get_abstract_mesh().manual_axes
    query, key, value = (vary(x, around) for x in (query, key, value))
    query_segments, key_segments = (None, None) if segments is None else segments

    attend = with_auto_axes(functools.partial(_attend, ring), mesh, jax.typeof(query).sharding)
    return attend(query, Part(key, value, key_segments), mask, query_segments)


def _region(ring: Ring, function, in_specs: object, out_specs: object):
    """Runs a function on each device's part of the ring."""
    # A loop around that is differentiated takes what does not depend on its values, such as zeros
    # and masks, out of its body and so out of the region, which it must not where that is within
    # another one. What is to be recomputed is not taken out; nothing here is computed twice.
    function = jax.checkpoint(functools.partial(function, ring), prevent_cse=False)
    return jax.shard_map(
        function,
        mesh=mesh_of_region(resolve_mesh()),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={ring.axis},
    )


def _split(ring: Ring, x, dim: int):
    """The spec of a split array, or None."""
    if x is None or x.shape[dim] == 1:
        return PartitionSpec()
    return PartitionSpec(*(None,) * (x.ndim + dim), ring.axis)


class Saved(NamedTuple):
    """Values for the backward pass, in the order of the ring."""

    query: Any
    part: Part
    mask: Any
    segments: Any
    result: Any
    most: Any
    total: Any


class _Specs(NamedTuple):
    """How the arguments of a ring, and what it saves of them, are split."""

    query: PartitionSpec
    part: Part
    mask: PartitionSpec
    segments: PartitionSpec

    @classmethod
    def of(cls, ring: Ring, query, part: Part, mask: object, segments: object) -> _Specs:
        by_time = _split(ring, query, -3)
        by_segment = PartitionSpec() if segments is None else by_time
        key, value = (_split(ring, x, -3) for x in (part.key, part.value))
        return cls(by_time, Part(key, value, by_segment), _split(ring, mask, -2), by_segment)

    def saved(self, ring: Ring, query) -> Saved:
        """Returns the specs of what is saved for the backward pass."""
        numbers = PartitionSpec(*(None,) * (query.ndim - 1), ring.axis)
        return Saved(*self, result=self.query, most=numbers, total=numbers)


# The derivative is that of the whole, and no region is differentiated: within another manual region
# (a pipeline) JAX cannot hand on what the forward pass of an inner one saves.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, query: object, part: Part, mask: object, segments: object) -> jax.Array:
    return _forward(ring, query, part, mask, segments)[0]


def _forward(ring: Ring, query, part: Part, mask: object, segments: object) -> tuple[Any, Saved]:
    specs = _Specs.of(ring, query, part, mask, segments)
    # Where a policy keeps nothing inside of the region (``outside_inner_regions``) it can keep the
    # results, as values with a name, and arguments with a name are those of outside.
    args = _named((query, part, mask, segments))
    region = _region(ring, _read, tuple(specs), (specs.query, specs.saved(ring, query)))
    return _named(region(*args))


def _named(values):
    return jax.tree.map(lambda x: checkpoint_name(x, "ring"), values)


def _backward(ring: Ring, saved: Saved, cotangents: object) -> tuple[Any, ...]:
    specs = _Specs.of(ring, saved.query, saved.part, saved.mask, saved.segments)
    in_specs = specs.saved(ring, saved.query), specs.query
    out_specs = specs.query, (specs.part.key, specs.part.value)
    region = _region(ring, _differentiate, in_specs, out_specs)
    to_query, (to_key, to_value) = region(saved, cotangents)
    return to_query, Part(to_key, to_value, None), None, None


_attend.defvjp(_forward, _backward)


def _to_order(ring: Ring, query, part: Part, mask, segments) -> tuple[Any, ...]:
    """Brings a device's part into the order of the ring."""
    if not ring.zigzag:
        return query, part, mask, segments

    in_order = functools.partial(_zigzag, ring)
    query, key, value = (in_order(x, x.ndim - 3) for x in (query, part.key, part.value))
    query_segments, key_segments = (
        None if x is None else in_order(x, x.ndim - 1) for x in (segments, part.segments)
    )

    if mask is not None and mask.shape[-2] > 1:
        mask = in_order(mask, mask.ndim - 2)
    return query, Part(key, value, key_segments), mask, query_segments


def _back(ring: Ring, x) -> Any:
    return _zigzag(ring, x, x.ndim - 3, back=True) if ring.zigzag else x


def _zigzag(ring: Ring, x, dim: int, back: bool = False) -> Any:
    """Brings the chunks of a dimension into zig-zag order, or back."""
    # Device i has the chunks 2i and 2i + 1; those of even and of odd number each go to as many
    # devices as there are, so each of both moves is a permutation.
    n = ring.devices
    device_of = [chunk if chunk < n else 2 * n - 1 - chunk for chunk in range(2 * n)]
    moves = [[(i, device_of[2 * i + odd]) for i in range(n)] for odd in (0, 1)]
    halves = jnp.split(x, 2, dim)

    # The earlier chunk of device i is that of number i.
    is_odd = jax.lax.axis_index(ring.axis) % 2 == 1
    if back:
        halves = _swapped(is_odd, halves)
        moves = [[(target, source) for source, target in pairs] for pairs in moves]

    halves = [
        jax.lax.ppermute(half, ring.axis, pairs) for half, pairs in zip(halves, moves, strict=True)
    ]
    return jnp.concatenate(halves if back else _swapped(is_odd, halves), dim)


def _swapped(condition, pair) -> list[Any]:
    left, right = pair
    return [jnp.where(condition, right, left), jnp.where(condition, left, right)]


def _last_turn(ring: Ring, query, key) -> int:
    """Returns the number of sends until all parts are read."""
    if not ring.causal or ring.window is None or query.shape[-3] != key.shape[-3]:
        return ring.devices - 1
    return min(ring.devices - 1, -(-(ring.window - 1) // key.shape[-3]))


def _half(x, dim: int, later: int) -> Any:
    size = x.shape[dim] // 2
    return jax.lax.slice_in_dim(x, later * size, (later + 1) * size, axis=dim)


def _with_half(x, dim: int, later: int, new_half) -> Any:
    halves = [_half(x, dim, 0), _half(x, dim, 1)]
    halves[later] = new_half
    return jnp.concatenate(halves, dim)


def _read(ring: Ring, query, part: Part, mask, segments) -> tuple[Any, Saved]:
    """Attends to a part of the queries."""
    query, part, mask, segments = _to_order(ring, query, part, mask, segments)
    grouped, by_head = _by_head(query, part)
    positions = _positions(ring, query.shape[-3], 0)

    def update(state, grouped, part: Part, rows, columns, query_segments) -> Any:
        most, total, result = state
        scores = _scores(ring, grouped, part, mask, query_segments, rows, columns)
        larger = jnp.maximum(most, scores.max(-1))
        scale, weights = jnp.exp(most - larger), jnp.exp(scores - larger[..., None])
        weighted = jnp.einsum("...kgts,...ksh->...kgth", weights, part.value.astype(np.float32))
        return larger, scale * total + weights.sum(-1), scale[..., None] * result + weighted

    def read(state, part: Part, step) -> Any:
        columns = _positions(ring, part.key.shape[-2], step)
        if not ring.zigzag or isinstance(step, int):
            return update(state, grouped, part, positions, columns, segments)

        def earlier(state: object) -> Any:
            """All queries read the earlier chunk of the part."""
            half = _half(columns, 0, 0)
            return update(state, grouped, _first_half(part), positions, half, segments)

        def later(state) -> Any:
            """The queries of the later chunk read the whole part."""
            pairs = [(x, x.ndim - less) for x, less in zip(state, (1, 1, 2), strict=True)]
            updated = update(
                tuple(_half(x, dim, 1) for x, dim in pairs),
                _half(grouped, grouped.ndim - 2, 1),
                part,
                _half(positions, 0, 1),
                columns,
                None if segments is None else _half(segments, segments.ndim - 1, 1),
            )
            return tuple(
                _with_half(x, dim, 1, y) for (x, dim), y in zip(pairs, updated, strict=True)
            )

        return jax.lax.cond(_from_earlier(ring, step), earlier, later, state)

    def turn(carry, step: object) -> Any:
        state, travelling = carry
        travelling = _pass_on(ring, travelling)
        return (read(state, travelling, step), travelling), None

    # The softmax's running maximum and sum, and the sum of weighted values.
    shape = grouped.shape
    start = (jnp.full(shape[:-1], _NEVER), jnp.zeros(shape[:-1]), jnp.zeros(shape))
    state = read(_own(ring, start), by_head, 0)
    turns = jnp.arange(1, 1 + _last_turn(ring, query, part.key))
    (state, _), _ = jax.lax.scan(turn, (state, by_head), turns)

    most, total, result = state
    result = _joined(result / total[..., None]).astype(query.dtype)
    return _back(ring, result), Saved(query, part, mask, segments, result, most, total)


def _differentiate(ring: Ring, saved: Saved, cotangent) -> tuple[Any, ...]:
    """Returns the gradients of a part of the queries, keys and values."""
    query, part, mask, segments, result, most, total = saved
    if ring.zigzag:
        cotangent = _zigzag(ring, cotangent, cotangent.ndim - 3)

    heads = part.key.shape[-2]
    grouped, by_head = _by_head(query, part)
    grouped, upwards, of_result = (
        x.astype(np.float32) for x in (grouped, _grouped(cotangent, heads), _grouped(result, heads))
    )
    share = (upwards * of_result).sum(-1)

    positions = _positions(ring, query.shape[-3], 0)
    same_length = query.shape[-3] == part.key.shape[-3]
    narrowed = ring.window is not None and not same_length
    # A row that reads nothing has weights all the same; a soft cap has no slope at ``_NEVER``.
    cleared = narrowed or any(option is not None for option in (mask, segments, ring.softcap))

    rows = (grouped, upwards, share, most, total)  # what each query has, with its dimension
    dims = [x.ndim - less for x, less in zip(rows, (2, 2, 1, 1, 1), strict=True)]

    def update(rows, part: Part, row_positions, columns, query_segments) -> Any:
        grouped, upwards, share, most, total = rows
        scores = _scores(ring, grouped, part, mask, query_segments, row_positions, columns)
        weights = jnp.exp(scores - most[..., None]) / total[..., None]

        to_value = jnp.einsum("...kgts,...kgth->...ksh", weights, upwards)
        changes = jnp.einsum("...kgth,...ksh->...kgts", upwards, part.value.astype(np.float32))
        changes = ring.scale * weights * (changes - share[..., None])
        if ring.softcap is not None:
            changes = changes * (1 - (scores / ring.softcap) ** 2)
        if cleared:
            changes = jnp.where(scores == _NEVER, 0, changes)

        to_key = jnp.einsum("...kgts,...kgth->...ksh", changes, grouped)
        to_query = jnp.einsum("...kgts,...ksh->...kgth", changes, part.key.astype(np.float32))
        return to_query, to_key, to_value

    def read(sums, part: Part, step) -> Any:
        columns = _positions(ring, part.key.shape[-2], step)
        if not ring.zigzag or isinstance(step, int):
            return jax.tree.map(jnp.add, sums, update(rows, part, positions, columns, segments))
        time = part.key.ndim - 2

        def earlier(sums) -> Any:
            added = update(rows, _first_half(part), positions, _half(columns, 0, 0), segments)
            whole = [
                _with_half(x, time, 0, _half(x, time, 0) + y)
                for x, y in zip(sums[1:], added[1:], strict=True)
            ]
            return (sums[0] + added[0], *whole)

        def later(sums) -> Any:
            query_segments = None if segments is None else _half(segments, segments.ndim - 1, 1)
            mine = [_half(x, dim, 1) for x, dim in zip(rows, dims, strict=True)]
            added = update(mine, part, _half(positions, 0, 1), columns, query_segments)
            whole = _with_half(sums[0], dims[0], 1, _half(sums[0], dims[0], 1) + added[0])
            return (whole, sums[1] + added[1], sums[2] + added[2])

        return jax.lax.cond(_from_earlier(ring, step), earlier, later, sums)

    def turn(carry, step: object) -> Any:
        to_query, *travelling = carry
        part, to_part = _pass_on(ring, travelling)
        to_query, *to_part = read((to_query, *to_part), part, step)
        return (to_query, part, tuple(to_part)), None

    # Gradients of keys and values travel with them, and are added to by each device.
    zeros = _own(ring, [jnp.zeros(x.shape) for x in (grouped, by_head.key, by_head.value)])
    to_query, *to_part = read(tuple(zeros), by_head, 0)
    last = _last_turn(ring, query, part.key)
    carry, _ = jax.lax.scan(turn, (to_query, by_head, tuple(to_part)), jnp.arange(1, 1 + last))

    to_query, _, to_part = carry
    to_key, to_value = _pass_on(ring, to_part, ring.devices - last)  # home
    to_query = _joined(to_query).astype(query.dtype)
    to_key = jnp.swapaxes(to_key, -3, -2).astype(part.key.dtype)
    to_value = jnp.swapaxes(to_value, -3, -2).astype(part.value.dtype)
    return _back(ring, to_query), (_back(ring, to_key), _back(ring, to_value))


def _first_half(part: Part) -> Part:
    segments = None if part.segments is None else _half(part.segments, part.segments.ndim - 1, 0)
    key, value = (_half(x, x.ndim - 2, 0) for x in (part.key, part.value))
    return Part(key, value, segments)


def _from_earlier(ring: Ring, step) -> Any:
    """Whether the part here is of a device before this one."""
    return jax.lax.axis_index(ring.axis) >= step


def _positions(ring: Ring, time: int, step) -> jax.Array:
    """Returns the positions of the present part after some steps."""
    device = (jax.lax.axis_index(ring.axis) - step) % ring.devices
    if not ring.zigzag:
        return device * time + jnp.arange(time)
    size = time // 2
    chunks = jnp.stack([device, 2 * ring.devices - 1 - device])
    return (chunks[:, None] * size + jnp.arange(size)[None]).reshape(-1)


def _scores(ring: Ring, grouped, part: Part, mask, query_segments, rows, columns) -> jax.Array:
    """Returns scores for the present keys, by their positions."""
    # Of shape (..., kv heads, group, time, other time).
    scores = jnp.einsum(
        "...kgth,...ksh->...kgts", grouped, part.key, preferred_element_type=jnp.float32
    ).astype(np.float32)
    scores = scores * ring.scale
    if ring.softcap is not None:
        scores = ring.softcap * jnp.tanh(scores / ring.softcap)

    rows, columns = rows[:, None], columns[None]
    allowed = jnp.ones((rows.shape[0], columns.shape[1]), bool)
    if ring.causal:
        allowed &= columns <= rows
    if ring.window is not None:
        allowed &= rows - columns < ring.window
    allowed = jnp.expand_dims(allowed, tuple(range(scores.ndim - 2)))

    if query_segments is not None:
        same = query_segments[..., :, None] == part.segments[..., None, :]
        allowed = allowed & same[..., None, None, :, :]
    if mask is not None:
        if mask.shape[-1] > 1:
            mask = jnp.take(mask, columns[0], axis=-1)
        if mask.shape[-2] > rows.shape[0]:  # of the later chunk alone
            mask = _half(mask, mask.ndim - 2, 1)
        heads = mask.shape[-3]
        pair = (1, 1) if heads == 1 else scores.shape[-4:-2]
        allowed = allowed & mask.reshape(*mask.shape[:-3], *pair, *mask.shape[-2:])
    return jnp.where(allowed, scores, _NEVER)


def _pass_on(ring: Ring, tree: object, far: int = 1) -> Any:
    """Sends parts on to the next device of the ring."""
    if far % ring.devices == 0:
        return tree
    pairs = [(device, (device + far) % ring.devices) for device in range(ring.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, pairs), tree)


def _own(ring: Ring, tree: object) -> Any:
    """Marks equal float32 values of devices as varying."""
    return jax.tree.map(lambda x: vary(x.astype(np.float32), (ring.axis,)), tree)


def _by_head(query: object, part: Part) -> tuple[Any, Part]:
    """Queries in groups and keys, with time after heads."""
    # Products then merge and transpose nothing.
    key, value = (jnp.swapaxes(x, -3, -2) for x in (part.key, part.value))
    return _grouped(query, part.key.shape[-2]), Part(key, value, part.segments)


def _grouped(x, kv_heads: int) -> Any:
    """Splits heads into groups of a kv head, with time last."""
    x = x.reshape(*x.shape[:-2], kv_heads, x.shape[-2] // kv_heads, x.shape[-1])
    return jnp.moveaxis(x, -4, -2)


def _joined(x) -> Any:
    """The inverse of ``_grouped``."""
    x = jnp.moveaxis(x, -2, -4)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
