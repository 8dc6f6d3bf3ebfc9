# SPDX-License-Identifier: Apache-2.0
"""Small programs whose collectives and operations are known by hand, for every compiler.

A *case* is a function, shapes of its arguments with their shardings, and the mesh that it runs on;
``lower`` makes of it what a compiler takes, over any eight devices, which need not be here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Place = Callable[..., jax.ShapeDtypeStruct]
"""Makes an abstract array of a shape and the mesh axes of its dimensions."""

BATCH, WIDTH, HIDDEN = 512, 1024, 4096  # of the multi-layer perceptron
LAYERS = 6
EXPERTS, TOKENS = 8, 256


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        mesh: Sizes of mesh axes, in order.
        build: Of a mesh, a dtype and a ``Place``, gives the function and its arguments.
        donate: Numbers of arguments whose memory results take.
    """

    mesh: Mapping[str, int]
    build: Callable[[Mesh, Any, Place], tuple[Callable[..., Any], Sequence[Any]]]
    donate: tuple[int, ...] = ()

    def lower(self, devices: Sequence[Any], dtype: Any = jnp.float32) -> jax.stages.Lowered:
        """Lowers the case over the first devices of a list that fill its mesh."""
        sizes = tuple(self.mesh.values())
        grid = np.array(devices[: int(np.prod(sizes))]).reshape(sizes)
        automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
        mesh = Mesh(grid, tuple(self.mesh), axis_types=automatic)

        def place(shape: tuple[int, ...], *axes: Any, dtype: Any = dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

        function, arguments = self.build(mesh, dtype, place)
        return jax.jit(function, donate_argnums=self.donate).lower(*arguments)


def _hidden(axes: Mapping[str, Any], mesh: Mesh) -> NamedSharding:
    """Where the hidden layer of a perceptron is kept: as the batch, and as the weights' columns."""
    return NamedSharding(mesh, P(axes["x"][0], *axes["up"][1:2]))


def _loss(weights: Any, x: Any, hidden: NamedSharding) -> Any:
    up, down = weights
    h = lax.with_sharding_constraint(x @ up, hidden)
    return jnp.sum((jnp.maximum(h, 0) @ down).astype(jnp.float32) ** 2)


def _mlp(axes: Mapping[str, Any], mesh: Mesh, dtype: Any, place: Place) -> Any:
    """Loss and gradients, of weights and input, of a perceptron of two layers."""
    del dtype
    weights = (place((WIDTH, HIDDEN), *axes["up"]), place((HIDDEN, WIDTH), *axes["down"]))
    x = place((BATCH, WIDTH), *axes["x"])
    shardings = jax.tree.map(lambda array: array.sharding, (weights, x))
    hidden = _hidden(axes, mesh)

    def step(weights: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss, (0, 1))(weights, x, hidden)
        return loss, lax.with_sharding_constraint(gradients, shardings)

    return step, (weights, x)


def _train(axes: Mapping[str, Any], mesh: Mesh, dtype: Any, place: Place) -> Any:
    """A step of gradient descent of a perceptron; float32 weights, computed in the dtype."""
    up = place((WIDTH, HIDDEN), *axes["up"], dtype=jnp.float32)
    down = place((HIDDEN, WIDTH), *axes["down"], dtype=jnp.float32)
    x = place((BATCH, WIDTH), *axes["x"])
    shardings = [up.sharding, down.sharding]
    hidden = _hidden(axes, mesh)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return _loss([each.astype(dtype) for each in weights], x, hidden)

        gradients = lax.with_sharding_constraint(jax.grad(loss)(weights), shardings)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    return step, ([up, down], x)


def _scan(remat: bool, axes: Mapping[str, Any], mesh: Mesh, dtype: Any, place: Place) -> Any:
    """Loss and gradients of the weights of a stack of perceptrons."""
    del dtype
    up = place((LAYERS, WIDTH, WIDTH), None, *axes["up"])
    down = place((LAYERS, WIDTH, WIDTH), None, *axes["down"])
    x = place((BATCH, WIDTH), *axes["x"])
    shardings = [up.sharding, down.sharding]
    hidden, outside = _hidden(axes, mesh), x.sharding

    def layer(x: Any, weights: Any) -> Any:
        up, down = weights
        h = lax.with_sharding_constraint(x @ up, hidden)
        return lax.with_sharding_constraint(x + jnp.tanh(h) @ down, outside), None

    def loss(weights: Any, x: Any) -> Any:
        y, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step(weights: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return value, lax.with_sharding_constraint(gradients, shardings)

    return step, ([up, down], x)


def _experts(mesh: Mesh, dtype: Any, place: Place) -> Any:
    """Tokens go to the device of their expert and come back."""
    del dtype

    def layer(x: Any, w: Any) -> Any:  # [tokens, experts, width] of a device, and its expert
        x = lax.all_to_all(x, "expert", 1, 0, tiled=True)
        y = jnp.einsum("tew,ewv->tev", x, w)
        return lax.all_to_all(y, "expert", 0, 1, tiled=True)

    specs = (P("expert"), P("expert"))
    function = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("expert"))
    x = place((TOKENS, EXPERTS, WIDTH), "expert")
    return function, (x, place((EXPERTS, WIDTH, WIDTH), "expert"))


def _explicit(
    collective: Callable[[Any], Any], out: Any, mesh: Mesh, dtype: Any, place: Any
) -> Any:
    """One collective that is written out, of an array sharded over all axes of the mesh."""
    del dtype
    function = jax.shard_map(
        collective, mesh=mesh, in_specs=P(*mesh.axis_names), out_specs=out, check_vma=False
    )
    return function, (place((BATCH, WIDTH), *mesh.axis_names),)


def _decoder(mesh: Mesh, dtype: Any, place: Place) -> Any:
    """Attention and perceptron in a scan, with weights sharded over both axes."""
    del mesh
    width, heads, head, hidden, length, batch = 256, 8, 32, 512, 128, 8
    f32 = partial(place, dtype=jnp.float32)
    weights = {
        "qkv": f32((LAYERS, 3, width, heads, head), None, None, "data", "model", None),
        "out": f32((LAYERS, heads, head, width), None, "model", None, "data"),
        "up": f32((LAYERS, width, hidden), None, "data", "model"),
        "down": f32((LAYERS, hidden, width), None, "model", "data"),
    }
    x = place((batch, length, width), "data", None, None)
    shardings = jax.tree.map(lambda array: array.sharding, weights)

    def layer(x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda each: each.astype(dtype), w)
        q, k, v = jnp.einsum("blw,cwhd->cblhd", x, w["qkv"])
        scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k), -1)
        x = x + jnp.einsum("bhlm,bmhd,hdw->blw", scores, v, w["out"])
        x = x + jnp.maximum(x @ w["up"], 0) @ w["down"]
        return lax.with_sharding_constraint(x, x_sharding), None

    x_sharding = x.sharding

    def loss(w: Any, x: Any) -> Any:
        y, _ = lax.scan(jax.checkpoint(layer), x, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step(w: Any, x: Any) -> Any:
        gradients = lax.with_sharding_constraint(jax.grad(loss)(w, x), shardings)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)

    return step, (weights, x)


_TWO = {"data": 2, "model": 4}
_RING = [(i, (i + 1) % 4) for i in range(4)]
TENSOR_PARALLEL = {"up": (None, "model"), "down": ("model", None), "x": ("data", None)}
DATA_PARALLEL = {"up": (), "down": (), "x": ("data", None)}
SHARDED = {"up": ("data", None), "down": ("data", None), "x": ("data", None)}

_ROWS = P(("data", "model"), None)
_SLICES = {"slice": 2, "data": 4}
_SLICED = {"up": ("data", None), "down": ("data", None), "x": (("slice", "data"), None)}


def _collective(collective: Callable[[Any], Any], out: Any) -> Case:
    return Case(_TWO, partial(_explicit, collective, out))


def _between(collective: Callable[[Any], Any], out: Any) -> Case:
    return Case(_SLICES, partial(_explicit, collective, out))


CASES: dict[str, Case] = {
    "tensor_parallel": Case(_TWO, partial(_mlp, TENSOR_PARALLEL)),
    "data_parallel": Case({"data": 8}, partial(_train, DATA_PARALLEL), (0,)),
    "fully_sharded": Case({"data": 8}, partial(_train, SHARDED), (0,)),
    "decoder": Case(_TWO, _decoder, (0,)),
    "experts": Case({"expert": 8}, _experts),
    "scan": Case(_TWO, partial(_scan, False, TENSOR_PARALLEL)),
    "remat": Case(_TWO, partial(_scan, True, TENSOR_PARALLEL)),
    "sharded_scan": Case({"data": 8}, partial(_scan, True, SHARDED)),
    "psum": _collective(lambda x: lax.psum(x, "model"), P("data")),
    "psum_all": _collective(lambda x: lax.psum(x, ("data", "model")), P()),
    "all_gather": _collective(lambda x: lax.all_gather(x, "data", tiled=True), P(None, "model")),
    "psum_scatter": _collective(lambda x: lax.psum_scatter(x, "model", tiled=True), _ROWS),
    "all_to_all": _collective(lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True), _ROWS),
    "ppermute": _collective(lambda x: lax.ppermute(x, "model", _RING), P("data", "model")),
}
"""Cases that every compiler has."""

SLICES: dict[str, Case] = {
    "slices_train": Case(_SLICES, partial(_train, _SLICED), (0,)),
    "slices_psum": _between(lambda x: lax.psum(x, "slice"), P(None, "data")),
    "slices_psum_all": _between(lambda x: lax.psum(x, ("slice", "data")), P()),
    "slices_all_gather": _between(
        lambda x: lax.all_gather(x, "slice", tiled=True), P(None, "data")
    ),
    "slices_psum_scatter": _between(
        lambda x: lax.psum_scatter(x, "slice", tiled=True), P("slice", "data")
    ),
    "slices_all_to_all": _between(
        lambda x: lax.all_to_all(x, "slice", 0, 1, tiled=True), P("slice", "data")
    ),
    "slices_ppermute": _between(lambda x: lax.ppermute(x, "slice", [(0, 1)]), P("slice", "data")),
}
"""Cases for two slices of four devices."""
