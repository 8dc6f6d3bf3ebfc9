# SPDX-License-Identifier: Apache-2.0
"""Pipelines and split sequences by rule, beside the same schedules written by hand in JAX.

The pipelines are the gradient of a stack of residual perceptrons, 4 stages by 2 parts of the batch.
By hand the layers of a circular schedule are stored in the order of rounds, so that none moves;
by rule they are stored in order, and move. The ring is the gradient of one attention, causal, over
a sequence in 8 parts, with the same backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

Case = tuple[str, Callable[[], Any], Callable[[], Any]]

LAYERS, STAGES, MICROBATCHES = 8, 4, 8
ROWS, WIDTH, HIDDEN = 2048, 128, 512
TIME, HEADS, HEAD_DIM = 2048, 4, 32
QUICK = {"ROWS": 64, "WIDTH": 8, "HIDDEN": 16, "TIME": 64, "HEADS": 2, "HEAD_DIM": 4}


class Block(sx.Module):
    """A residual perceptron."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.up = sx.nn.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = sx.nn.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the perceptron's result."""
        return x + self.down(jnp.tanh(self.up(x)))


def block(weights: Any, x: jax.Array) -> jax.Array:
    """The same, of arrays."""
    up, down = weights
    return x + jnp.tanh(x @ up) @ down


def waited(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call without arguments that waits for its result."""
    return lambda: jax.block_until_ready(function(*args))


def pipelines() -> Iterator[Case]:
    """Both schedules."""
    mesh = jax.make_mesh((2, STAGES), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)
    rules = {"layers": "stage", "batch": "data"}
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    for schedule in ("gpipe", "circular"):
        stack = sx.nn.Stack(lambda: Block(sx.Rngs(0)), LAYERS)
        sx.shard(stack, mesh, rules)

        def loss(stack: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(stack(x) ** 2)

        step = sx.jit(sx.value_and_grad(loss))

        def ours(step: Any = step, stack: Any = stack, schedule: str = schedule) -> Any:
            scope = sx.parallel(microbatches=MICROBATCHES, schedule=schedule)
            with jax.set_mesh(mesh), sx.axis_rules(rules), scope:
                return jax.block_until_ready(step(stack, x))

        weights = (stack.stacked.up.kernel.value, stack.stacked.down.kernel.value)
        rounds = 1 if schedule == "gpipe" else LAYERS // STAGES
        # (stages, rounds, layers of a turn, ...)
        shape = (STAGES, rounds, LAYERS // STAGES // rounds)
        order = (1, 0, 2) if rounds > 1 else (0, 1, 2)
        first = tuple(shape[place] for place in order)

        def in_rounds(w: jax.Array, first: Any = first, order: Any = order) -> jax.Array:
            made = w.reshape(*first, *w.shape[1:])
            made = jnp.transpose(made, (*order, *range(3, made.ndim)))
            return jax.device_put(made, NamedSharding(mesh, P("stage")))

        placed = tuple(map(in_rounds, weights))
        by_hand = jax.jit(jax.value_and_grad(functools.partial(raw_pipeline, mesh, rounds)))
        yield schedule, ours, waited(by_hand, placed, x)


def raw_pipeline(mesh: Any, rounds: int, weights: Any, x: jax.Array) -> jax.Array:
    """The loss by a pipeline over a mesh axis, written by hand."""
    period, ticks = MICROBATCHES, rounds * MICROBATCHES + STAGES - 1
    ring = [(stage, (stage + 1) % STAGES) for stage in range(STAGES)]
    waits = period - STAGES if rounds > 1 else 0

    def region(weights: Any, x: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda w: w[0], weights)  # (rounds, layers of a turn, ...)
        stage = jax.lax.axis_index("stage")

        def tick(carry: Any, time: jax.Array) -> Any:
            arriving, waiting, results = carry
            begun = time - stage
            turn = jnp.clip(begun // period, 0, rounds - 1)
            number = jnp.clip(begun % period, 0, MICROBATCHES - 1)
            if waits:
                place = time % waits
                oldest = waiting[place]
                waiting = jax.lax.dynamic_update_index_in_dim(waiting, arriving, place, 0)
                arriving = jnp.where(stage == 0, oldest, arriving)
            enters = (stage == 0) & (turn == 0)
            here = jnp.where(enters, x[number], arriving)
            own = jax.tree.map(lambda w: w[turn], weights)
            y, _ = jax.lax.scan(lambda here, w: (block(w, here), None), here, own)
            final = (begun >= (rounds - 1) * period) & (begun < ticks)
            kept = jnp.where(final, y, results[number])
            results = jax.lax.dynamic_update_index_in_dim(results, kept, number, 0)
            return (jax.lax.ppermute(y, "stage", ring), waiting, results), None

        x = jax.lax.pcast(x, ("stage",), to="varying")
        waiting = jnp.stack([x[0]] * waits) if waits else None
        carry = (x[0], waiting, jnp.stack([x[0]] * MICROBATCHES))
        (_, _, results), _ = jax.lax.scan(tick, carry, jnp.arange(ticks))
        last = jnp.where(stage == STAGES - 1, results, 0)
        return jax.lax.psum(last, "stage")

    parts = jnp.swapaxes(x.reshape(-1, MICROBATCHES, WIDTH), 0, 1)
    y = jax.shard_map(
        region, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P(), axis_names={"stage"}
    )(weights, parts)
    return jnp.mean(y**2)


def rings() -> Iterator[Case]:
    """A causal ring."""
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    rules = {"seq": "context"}
    keys = jax.random.split(jax.random.key(2), 3)
    place = NamedSharding(mesh, P(None, "context"))
    arrays = [
        jax.device_put(jax.random.normal(key, (1, TIME, HEADS, HEAD_DIM)), place) for key in keys
    ]
    layer = sx.nn.MultiHeadAttention(
        HEADS * HEAD_DIM, HEADS, head_dim=HEAD_DIM, causal=True, rngs=sx.Rngs(0)
    )

    @sx.jit
    def step(layer: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(layer.attend(sx.nn.QueryKeyValue(query, key, value))))

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    def ours() -> Any:
        with jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(context="ring"):
            return jax.block_until_ready(step(layer, *arrays))

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        region = jax.shard_map(
            raw_ring, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context")
        )
        return jnp.sum(jnp.sin(region(query, key, value)))

    yield "ring attention", ours, waited(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), *arrays)


def passed_on(tree: Any) -> Any:
    """What the device before has."""
    pairs = [(one, (one + 1) % 8) for one in range(8)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, "context", pairs), tree)


def scores_of(query: jax.Array, key: jax.Array, step: Any) -> jax.Array:
    """Causal scores of the keys that are here after some steps."""
    own = jax.lax.axis_index("context")
    time = query.shape[1]
    rows = own * time + jnp.arange(time)
    columns = (own - step) % 8 * time + jnp.arange(time)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / HEAD_DIM**0.5
    return jnp.where((columns[None] <= rows[:, None])[None, None], scores, -1e30)


@jax.custom_vjp
def raw_ring(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Ring attention, written by hand."""
    return ring_forward(query, key, value)[0]


def ring_forward(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """The result, and what the backward pass needs."""

    def read(state: Any, key: jax.Array, value: jax.Array, step: Any) -> Any:
        most, total, result = state
        scores = scores_of(query, key, step)
        larger = jnp.maximum(most, scores.max(-1))
        kept, weights = jnp.exp(most - larger), jnp.exp(scores - larger[..., None])
        found = jnp.einsum("bnts,bsnh->bnth", weights, value)
        return larger, kept * total + weights.sum(-1), kept[..., None] * result + found

    def turn(carry: Any, step: jax.Array) -> Any:
        state, pair = carry
        pair = passed_on(pair)
        return (read(state, *pair, step), pair), None

    shape = jnp.swapaxes(query, 1, 2).shape
    start = (jnp.full(shape[:-1], -1e30), jnp.zeros(shape[:-1]), jnp.zeros(shape))
    start = jax.tree.map(lambda x: jax.lax.pcast(x, ("context",), to="varying"), start)
    state = read(start, key, value, 0)
    (state, _), _ = jax.lax.scan(turn, (state, (key, value)), jnp.arange(1, 8))
    most, total, result = state
    result = jnp.swapaxes(result / total[..., None], 1, 2)
    return result, (query, key, value, result, most, total)


def ring_backward(saved: Any, given: jax.Array) -> Any:
    """The gradients, which travel with keys and values."""
    query, key, value, result, most, total = saved
    upwards, result = jnp.swapaxes(given, 1, 2), jnp.swapaxes(result, 1, 2)
    share = (upwards * result).sum(-1)

    def read(to_query: jax.Array, travelling: Any, step: Any) -> Any:
        key, value, to_key, to_value = travelling
        weights = jnp.exp(scores_of(query, key, step) - most[..., None]) / total[..., None]
        to_value += jnp.einsum("bnts,bnth->bsnh", weights, upwards)
        changes = jnp.einsum("bnth,bsnh->bnts", upwards, value) - share[..., None]
        changes = weights * changes / HEAD_DIM**0.5
        to_key += jnp.einsum("bnts,btnh->bsnh", changes, query)
        to_query += jnp.einsum("bnts,bsnh->btnh", changes, key)
        return to_query, (key, value, to_key, to_value)

    def turn(carry: Any, step: jax.Array) -> Any:
        to_query, travelling = carry
        return read(to_query, passed_on(travelling), step), None

    zeros = [jnp.zeros_like(x) for x in (query, key, value)]
    carry = read(zeros[0], (key, value, *zeros[1:]), 0)
    (to_query, travelling), _ = jax.lax.scan(turn, carry, jnp.arange(1, 8))
    return to_query, *passed_on(travelling[2:])


raw_ring.defvjp(ring_forward, ring_backward)


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Name, by rule, by hand; all when quick too."""
    yield from pipelines()
    yield from rings()
