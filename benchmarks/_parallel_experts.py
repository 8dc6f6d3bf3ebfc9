# SPDX-License-Identifier: Apache-2.0
"""Train steps of a layer of experts over 8 devices, beside the same exchange written by hand.

The opponent is one ``jax.shard_map`` with the exchange of CPU, padded all-to-alls there and back,
and JAX's own gradient of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

FEATURES, HIDDEN, EXPERTS, TOP_K = 128, 256, 8, 2
BATCH, TIME, FACTOR, RATE = 16, 128, 1.25, 1e-3
QUICK = {"FEATURES": 8, "HIDDEN": 16, "TIME": 16}

Case = tuple[str, Callable[[], Any], Callable[[], Any]]


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Yields a name, a step of the layer, and one by hand; quickly, one of each mesh."""
    for sizes, batch, quickly in (
        ({"expert": 8}, ("expert",), "dropless"),
        ({"data": 2, "expert": 4}, ("data", "expert"), "capacity"),
    ):
        for dispatch in [quickly] if quick else ["dropless", "capacity"]:
            name = f"experts, {dispatch}, " + " x ".join(f"{a}={n}" for a, n in sizes.items())
            yield name, *_pair(dispatch, sizes, batch)


def _pair(
    dispatch: Any, sizes: dict[str, int], batch: tuple[str, ...]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    rules = {"batch": batch, "expert": "expert"}
    layer = sx.nn.MoE(
        FEATURES,
        HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dispatch=dispatch,
        capacity_factor=FACTOR,
        rngs=sx.Rngs(0),
    )
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, FEATURES))
    x = jax.device_put(x, NamedSharding(mesh, P(batch)))
    sx.shard(layer, mesh, rules)
    kernels = {n: getattr(layer, n).value for n in ("gate", "up", "down")}
    parameters = jax.tree.map(jnp.copy, {"router": layer.router.kernel.value, **kernels})

    @functools.partial(sx.jit, donate_argnums=0)
    def step(layer: Any, x: jax.Array) -> jax.Array:
        def loss(layer: Any) -> jax.Array:
            return jnp.mean(layer(x) ** 2) + 0.01 * sx.nn.load_balance_loss(layer)

        value, gradients = sx.value_and_grad(loss)(layer)
        for path, gradient in gradients.flat().items():
            variable = functools.reduce(getattr, path, layer)
            variable.value = variable.value - RATE * gradient
        return value

    def ours() -> Any:
        with jax.set_mesh(mesh), sx.axis_rules(rules):
            return jax.block_until_ready(step(layer, x))

    by_hand = _step_by_hand(dispatch, mesh, batch)
    held = [parameters]

    def theirs() -> Any:
        with jax.set_mesh(mesh):
            value, held[0] = by_hand(held[0], x)
            return jax.block_until_ready(value)

    return ours, theirs


def _step_by_hand(dispatch: str, mesh: Any, batch: tuple[str, ...]) -> Any:
    devices, everyone = mesh.shape["expert"], mesh.size
    local, tokens = EXPERTS // devices, BATCH * TIME // everyone
    places = math.ceil(FACTOR * TOP_K * BATCH * TIME / EXPERTS)
    chunk = tokens * min(TOP_K, local)
    received = devices * chunk
    if dispatch == "capacity":
        chunk = min(chunk, local * places)
        received = min(received, devices * chunk, local * places)

    def region(x: Any, logits: Any, gate: Any, up: Any, down: Any) -> Any:
        x, logits = x.reshape(-1, FEATURES), logits.reshape(-1, EXPERTS)
        chances = jax.nn.softmax(logits)
        weights, experts = jax.lax.top_k(chances, TOP_K)
        chosen = jax.nn.one_hot(experts, EXPERTS)
        shares, means = jax.lax.psum((chosen.sum((0, 1)), chances.sum(0)), batch)
        balance = EXPERTS * jnp.vdot(shares, means) / (BATCH * TIME) ** 2
        weights = weights / weights.sum(-1, keepdims=True)
        if dispatch == "capacity":
            first = chosen.swapaxes(0, 1).astype(jnp.int32)
            order = jnp.cumsum(first, axis=1)
            counts = jax.lax.all_gather(order[:, -1], batch).reshape(everyone, TOP_K, EXPERTS)
            flat = counts.swapaxes(0, 1).reshape(-1, EXPERTS)
            before = (jnp.cumsum(flat, 0) - flat).reshape(TOP_K, everyone, EXPERTS)
            place = order + before[:, jax.lax.axis_index(batch)][:, None] - 1
            kept = ((place * first).sum(-1) < places).T
            experts = jnp.where(kept, experts, EXPERTS)
        key = experts.reshape(-1)
        order = jnp.argsort(key, stable=True)
        sizes = jnp.bincount(key, length=EXPERTS)
        table = jax.lax.all_gather(sizes, "expert").reshape(devices, devices, local)
        me = jax.lax.axis_index("expert")
        going, coming = table[me].sum(-1), table[:, me]
        starts = jnp.cumsum(going) - going
        rows = x[order // TOP_K]
        number = jnp.arange(chunk)[None]
        index = jnp.where(number < going[:, None], starts[:, None] + number, len(rows))
        sent = rows.at[index].get(mode="fill", fill_value=0)
        came = jax.lax.all_to_all(sent, "expert", 0, 0, tiled=True).reshape(-1, FEATURES)
        # The expert of each row that came, and its place when they are sorted.
        expert = (number[..., None] >= jnp.cumsum(coming, 1)[:, None]).sum(-1).reshape(-1)
        back = jnp.argsort(expert, stable=True)[:received]
        given = came[back]
        groups = coming.sum(0).astype(jnp.int32)
        real = jnp.arange(received)[:, None] < groups.sum()

        def multiply(x: Any, kernel: Any) -> Any:
            return jnp.where(real, jax.lax.ragged_dot(x, kernel, groups), 0)

        hidden = jax.nn.silu(multiply(given, gate)) * multiply(given, up)
        y = jnp.zeros_like(came).at[back].set(multiply(hidden, down), unique_indices=True)
        y = jax.lax.all_to_all(y.reshape(devices, chunk, -1), "expert", 0, 0, tiled=True)
        place = jnp.arange(len(rows))
        device = jnp.minimum(key[order] // local, devices - 1)
        index = jnp.where(key[order] < EXPERTS, device * chunk + place - starts[device], len(came))
        y = y.reshape(-1, FEATURES).at[index].get(mode="fill", fill_value=0)
        y = y * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(x).at[order // TOP_K].add(y), balance

    def loss(parameters: Any, x: Any) -> Any:
        y, balance = jax.shard_map(
            region,
            in_specs=(P(batch), P(batch), P("expert"), P("expert"), P("expert")),
            out_specs=(P(batch), P()),
        )(x, x @ parameters["router"], *(parameters[n] for n in ("gate", "up", "down")))
        return jnp.mean(y**2) + 0.01 * balance

    @functools.partial(jax.jit, donate_argnums=0)
    def step(parameters: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    return step
