# SPDX-License-Identifier: Apache-2.0
"""Steps of ZeRO-2 and of hierarchical sums, beside the same forms by hand.

Each pair is a whole training step of one MLP, donated, over 8 devices: ``shardax``'s transform and
optimizer, and ``jax.jit`` of one ``jax.shard_map`` in which a device computes its gradients, sums
them by collectives, updates its part, and gathers parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

EMBED, HIDDEN, ROWS = 512, 2048, 128
QUICK = {"EMBED": 16, "HIDDEN": 32, "ROWS": 16}
OVER = ("slice", "data")
Case = tuple[str, Callable[[], Any], Callable[[], Any]]


def mesh_of(slices: int) -> jax.sharding.Mesh:
    """Eight devices, as slices of equal size."""
    return jax.make_mesh((slices, 8 // slices), OVER, axis_types=(AxisType.Auto,) * 2)


def batch_of(mesh: jax.sharding.Mesh) -> jax.Array:
    """Rows of random numbers, split over all devices."""
    x = np.random.default_rng(0).normal(size=(ROWS, EMBED)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P(OVER)))


def ours(mesh: jax.sharding.Mesh, split: bool, dtype: str | None) -> Callable[[], Any]:
    """A step by ``data_parallel_value_and_grad``."""
    tx = optax.adam(1e-3) if split else optax.sgd(1e-3)
    model = sx.nn.MLP(EMBED, HIDDEN, rngs=sx.Rngs(0))
    optimizer = sx.train.Optimizer(model, tx)
    rules, zero = {"batch": OVER}, {"embed": "data"}
    where: dict[str, Any] = {"overrides": {sx.OptState: zero}} if split else {}
    pair = sx.shard((model, optimizer), mesh, rules, **where)
    places = sx.shardings(pair, mesh, rules, **where)
    gradient = sx.train.data_parallel_value_and_grad(
        lambda model, x: jnp.mean((model(x) - 1) ** 2),
        OVER,
        layout=zero if split else None,
        reduce_dtype=dtype,
    )

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradients = gradient(model, x)
        optimizer.update(gradients)
        return value

    run, x = sx.jit(step, in_shardings=(*places, None), donate_argnums=(0, 1)), batch_of(mesh)

    def once() -> Any:
        with jax.set_mesh(mesh), sx.axis_rules(rules):
            value = run(model, optimizer, x)
        return jax.block_until_ready((value, model.up.kernel.value))[0]

    return once


def by_hand(mesh: jax.sharding.Mesh, split: bool, dtype: str | None) -> Callable[[], Any]:
    """The same step in one ``jax.shard_map``."""
    tx = optax.adam(1e-3) if split else optax.sgd(1e-3)
    model = sx.nn.MLP(EMBED, HIDDEN, rngs=sx.Rngs(0))
    params = {path[0]: value for path, value in sx.state(model).flat().items()}
    whole = NamedSharding(mesh, P())
    params = {name: jax.device_put(value, whole) for name, value in params.items()}
    places = {name: P(None, "data") if name == "down" else P("data") for name in params}
    inner, count = mesh.shape["data"], mesh.size

    def loss(params: Any, x: Any) -> Any:
        hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
        return jnp.mean((hidden @ params["down"] - 1) ** 2)

    def bits(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def floats(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)

    def scattered(x: Any, axis: str, d: int) -> Any:
        if dtype is None:
            return jax.lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True)
        n = mesh.shape[axis]
        received = floats(jax.lax.all_to_all(bits(x), axis, d, d, tiled=True))
        return received.reshape(*x.shape[:d], n, x.shape[d] // n, *x.shape[d + 1 :]).sum(d)

    def gathered(x: Any, axis: str, d: int) -> Any:
        if dtype is None:
            return jax.lax.all_gather(x, axis, axis=d, tiled=True)
        return floats(jax.lax.all_gather(bits(x), axis, axis=d, tiled=True))

    def add(g: Any, d: int) -> Any:
        g = scattered(g, "data", d)
        if mesh.shape["slice"] > 1:
            if dtype is None:
                g = jax.lax.psum(g, "slice")
            else:
                g = gathered(scattered(g, "slice", d), "slice", d)
        g = g / count
        return g if split else gathered(g, "data", d)

    def local(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        dims = {name: int(split and name == "down") for name in params}
        gradients = {name: add(g, dims[name]) for name, g in gradients.items()}
        if split:
            own = {
                name: jax.lax.dynamic_slice_in_dim(
                    p, jax.lax.axis_index("data") * (p.shape[d] // inner), p.shape[d] // inner, d
                )
                for (name, p), d in zip(params.items(), dims.values(), strict=True)
            }
            updates, state = tx.update(gradients, state, own)
            updates = {
                name: jax.lax.all_gather(u, "data", axis=dims[name], tiled=True)
                for name, u in updates.items()
            }
        else:
            updates, state = tx.update(gradients, state, params)
        return jax.lax.pmean(value, OVER), optax.apply_updates(params, updates), state

    state = tx.init(params)
    by_name = jax.tree_util.tree_map_with_path(
        lambda path, leaf: places[path[-1].key] if split and leaf.ndim else P(), state
    )
    state = jax.tree.map(lambda s, at: jax.device_put(s, NamedSharding(mesh, at)), state, by_name)
    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), by_name, P(OVER)),
        out_specs=(P(), P(), by_name),
        check_vma=False,
    )
    run, x, held = jax.jit(region, donate_argnums=(0, 1)), batch_of(mesh), [params, state]

    def once() -> Any:
        value, *held[:] = run(*held, x)
        return jax.block_until_ready((value, held[0]["up"]))[0]

    return once


CASES = (
    ("ZeRO-2, 8 devices", 1, True, None),
    ("ZeRO-2, 2 slices of 4, bfloat16", 2, True, "bfloat16"),
    ("hierarchical sum, 2 slices of 4", 2, False, None),
    ("hierarchical sum, 2 slices of 4, bfloat16", 2, False, "bfloat16"),
)


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Yields (name, our step, the step by hand), each of one run; quickly, two of these."""
    for name, slices, split, dtype in CASES[1:3] if quick else CASES:
        mesh = mesh_of(slices)
        yield name, ours(mesh, split, dtype), by_hand(mesh, split, dtype)


def main(repeats: int = 15) -> None:
    """Prints ratios of times, taken in turns."""
    for name, ours, hand in cases():
        losses = [[float(f()) for _ in range(3)] for f in (ours, hand)]
        np.testing.assert_allclose(*losses, rtol=1e-3)
        times: list[list[float]] = [[], []]
        for _ in range(repeats):
            for f, found in zip((ours, hand), times, strict=True):
                start = time.perf_counter()
                f()
                found.append(time.perf_counter() - start)
        best = min(times[0]) / min(times[1])
        middle = float(np.median(times[0]) / np.median(times[1]))
        hand_ms = 1e3 * float(np.median(times[1]))
        print(f"{name:45} ratio min {best:.3f} median {middle:.3f} (by hand {hand_ms:.1f} ms)")


if __name__ == "__main__":
    main()
