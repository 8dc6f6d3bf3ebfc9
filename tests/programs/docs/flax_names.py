# SPDX-License-Identifier: Apache-2.0
"""Names that the codes of flax_rows.txt use. Those with ``lib`` work in both libraries."""

# ruff: noqa: F401 (the codes use all of these names)

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.core import meta
from jax.sharding import SingleDeviceSharding

import shardax as sx
from shardax import nn, partition, train

KINDS = ("Variable", "Param", "BatchStat", "Cache", "Intermediate", "Perturbation")
RULES = (("embed", "data"), ("mlp", None))
ADDED = {"partition_name": "layers"}
P, mesh, ones = (
    jax.P,
    jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,)),
    jax.nn.initializers.ones,
)
x = jnp.linspace(-1, 1, 8).reshape(2, 4) ** 3
picture = jnp.sin(jnp.arange(2 * 6 * 6 * 4.0)).reshape(2, 6, 6, 4)
hidden = np.tri(36, 8, dtype=bool).reshape(3, 3, 4, 8)


def call(layer: Any, x: Any) -> Any:
    return layer(x)


def loss(layer: Any, x: Any) -> Any:
    return jnp.sum(layer(x) ** 2)


def pure(state: Any) -> Any:
    return nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state.to_pure_dict()


def fill(module: Any, *parts: Any) -> Any:
    for place, part in enumerate(parts):
        setattr(module, f"part{place}", part)
    return module


def kinds(lib: Any) -> Any:
    module = lib.Module()
    for kind in KINDS:
        setattr(module, kind, getattr(lib, kind)(jnp.ones(2)))
    module.marked = lib.Param(jnp.ones(2), tag="mark")
    return module


def leaf_counts(*states: Any) -> list[int]:
    return [len(jax.tree.leaves(state)) for state in states]


def tied(lib: Any) -> Any:
    module = lib.Module()
    module.a = linear(lib)
    module.b = lib.Module()
    module.b.kernel = module.a.kernel
    return module


def layers(lib: Any) -> Any:
    return nn if lib is sx else nnx


def linear(lib: Any) -> Any:
    layer = layers(lib).Linear(4, 3, rngs=lib.Rngs(0))
    return with_bias(lib, with_values(layer), np.arange(3, dtype=np.float32))


def waves(start: int, shape: tuple[int, ...]) -> Any:
    """Numbers by their places, of NumPy: they take no program."""
    return np.sin(start + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def with_values(layer: Any) -> Any:
    """Gives parameters values by their shapes."""
    values = {
        path: jnp.asarray(waves(0, value.shape), value.dtype) for path, value in flat(layer).items()
    }
    if isinstance(layer, sx.Module):
        sx.update(layer, sx.State.from_flat(values))
        return layer
    for path, value in values.items():
        target = layer
        for part in path:
            target = target[part] if isinstance(part, int) else getattr(target, part)
        target.set_value(value)
    return layer


def flat(layer: Any) -> dict[Any, Any]:
    if isinstance(layer, nnx.Module):
        return {path: v[...] for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    return dict(sx.state(layer, sx.Param).flat())


def run(layer: Any, *args: Any, **options: Any) -> Any:
    """The result of a layer whose parameters have values by their shapes."""
    return compiled(with_values(layer), *args, **options)


def compiled(layer: Any, *args: Any, **options: Any) -> Any:
    """The result of a call as one program, instead of one for each of its operations."""
    lib = nnx if isinstance(layer, nnx.Module) else sx
    return lib.jit(lambda layer, *args: layer(*args, **options))(layer, *args)


def with_bias(lib: Any, layer: Any, bias: Any) -> Any:
    new = lib.clone(layer)
    new.bias = lib.Param(jnp.asarray(bias))
    return new


def draw(rngs: Any) -> Any:
    return jax.random.normal(rngs.params())


def distinct(numbers: Any) -> int:
    return len(set(np.asarray(numbers).tolist()))


def forked(lib: Any) -> Any:
    rngs = lib.Rngs(params=0)
    with lib.fork_rngs(rngs):
        inside = draw(rngs)
    return bool(inside == draw(rngs)), rngs.params.key.shape


def sows(lib: Any) -> Any:
    class Sows(lib.Module):
        def __call__(self, x: Any) -> Any:
            first = () if lib is sx else (lib.Intermediate,)
            self.sow(*first, "seen", 2 * x)
            return x + 1

    return Sows()


def total(lib: Any) -> Any:
    class Total(lib.Module):
        def __call__(self, x: Any) -> Any:
            first = () if lib is sx else (lib.Intermediate,)
            self.sow(*first, "total", x.sum(), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            return x

    module = Total()
    module(module(x + 1))
    return module.total[...]


def perturbs(lib: Any) -> Any:
    class Perturbs(lib.Module):
        def __call__(self, x: Any) -> Any:
            return 3 * self.perturb("change", x)

    return Perturbs()


def perturbed(lib: Any) -> Any:
    module = perturbs(lib)
    module(x)
    module.change[...] = jnp.ones_like(x)
    return module(x)


def dropped(lib: Any) -> Any:
    return layers(lib).Dropout(0.5, rngs=lib.Rngs(dropout=0))


def reseed(module: Any) -> None:
    for stream in sx.select(module).at_instances_of(sx.RngStream).get_all():
        sx.update(stream, sx.state(sx.Rngs(dropout=1).dropout))


def scale(lib: Any) -> Any:
    class Scale(lib.Module):
        def __init__(self) -> None:
            self.by = lib.Variable(jnp.float32(3))

        def __call__(self, x: Any) -> Any:
            return self.by[...] * x

    return Scale()


def checked(result: Any) -> Any:
    error, y = result
    return error.get() is None, y


def by_custom_vjp(lib: Any) -> Any:
    """The gradient by a rule that doubles that of the bias."""

    @lib.custom_vjp
    def scaled(layer: Any, x: Any) -> Any:
        return layer(x)

    def fwd(layer: Any, x: Any) -> Any:
        return layer(x), layer

    def theirs(layer: Any, cotangents: Any) -> Any:
        (changes, _), ct = cotangents
        changes["bias"].set_value(2 * ct.sum(0))
        changes["kernel"].set_value(jnp.zeros((4, 3)))
        return changes, jnp.zeros_like(x)

    def ours(layer: Any, ct: Any) -> Any:
        del layer
        return {"bias": 2 * ct.sum(0)}, None

    scaled.defvjp(fwd, ours if lib is sx else theirs)
    return pure(lib.grad(lambda layer: scaled(layer, x).sum())(linear(lib)))["bias"]


def by_custom_jvp(kind: Callable[..., Any]) -> Any:
    function = kind(lambda x: jnp.sin(x))
    function.defjvp(lambda primals, tangents: (jnp.sin(*primals), 2 * tangents[0]))
    return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


def with_rules(scope: Any, function: Callable[[], Any]) -> Any:
    with scope(RULES):
        return function()


def constrained(constraint: Any) -> Any:
    with mesh:
        place = constraint(jnp.ones((8, 4)), ("embed", None), rules=RULES, mesh=mesh)
    return place.sharding.spec


def stacked_names(lib: Any) -> Any:
    """Axis names of a layer that is mapped over a new axis."""
    if lib is sx:
        options = {"axis_size": 3, "metadata": {partition.PARTITION_NAME: "layers"}}
        make = sx.vmap(lambda rngs: nn.Linear(4, 3, kernel_axes=("a", "b"), rngs=rngs), **options)
        return make(sx.Rngs(0)).kernel.axes
    mapped = linen.vmap(
        linen.Dense,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        metadata_params={"partition_name": "layers"},
    )
    dense = mapped(3, kernel_init=linen.with_partitioning(ones, ("a", "b")))
    variables: Any = dense.init(jax.random.key(0), jnp.ones((3, 2, 4)))
    return variables["params"]["kernel"].names


class Positive(sx.Module):
    def __init__(self, log: Any) -> None:
        self.log = sx.Param(log)

    kernel = property(lambda self: jnp.exp(self.log[...]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


def attention(layer: Any) -> Any:
    """Gives attention of either library values by its parts."""
    is_theirs = isinstance(layer, nnx.Module)
    parts = ("query", "key", "value", "out") if is_theirs else ("q", "k", "v", "out")
    for place, part in enumerate(map(layer.__getattribute__, parts)):
        for name in ("kernel", "bias"):
            variable = getattr(part, name)
            variable[...] = jnp.asarray(waves(place, variable.shape))
    return layer


def attend(layer: Any, *args: Any, is_causal: bool = False) -> Any:
    attention(layer)
    return compiled(layer, *args, **({"is_causal": True} if is_causal else {}))


def decoded(lib: Any) -> Any:
    """Three tokens, one at a time."""
    tokens = picture[0, :1, :3]
    if lib is nnx:
        layer = attention(nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0)))
        layer.init_cache(tokens.shape)
        step = nnx.jit(call)
        return [step(layer, tokens[:, place : place + 1]) for place in range(3)]
    layer = attention(nn.MultiHeadAttention(4, 2, use_bias=True, causal=True, rngs=sx.Rngs(0)))
    cache = nn.AttentionCache(1, 3, 2, 2)
    step = sx.jit(lambda layer, token, cache: layer(token, cache=cache))
    return [step(layer, tokens[:, place : place + 1], cache) for place in range(3)]


def recur(layer: Any, xs: Any) -> Any:
    """The outputs with kernels that are the same for all gates, and no biases."""
    lib = nnx if isinstance(layer, nnx.Module) else sx
    for path, part in lib.iter_graph(layer):
        if isinstance(part, lib.Param):
            is_kernel = path[-1] == "kernel"
            rows = waves(1, part.shape[:1]) if is_kernel else np.zeros(1, np.float32)
            values = np.broadcast_to(rows.reshape(-1, *[1] * (part.ndim - 1)), part.shape)
            part[...] = jnp.asarray(values)
    return compiled(layer, xs)


def lora_sum(layer: Any) -> Any:
    """The sum of a layer and of its term of low rank, all of ones."""
    lib = nnx if isinstance(layer, nnx.Module) else sx
    for _, part in lib.iter_graph(layer):
        if isinstance(part, lib.Param):
            part[...] = jnp.asarray(np.ones(part.shape, np.float32))
    return compiled(layer, x)


class TheirSum(nnx.Module):
    num_feature_axes = 1

    def initialize_carry(self, input_shape: Any, rngs: Any = None) -> Any:
        del rngs
        return jnp.zeros(input_shape)

    def __call__(self, carry: Any, x: Any) -> Any:
        return carry + x, carry + x


class OurSum(sx.Module):
    def initial_carry(self, x: Any) -> Any:
        return jnp.zeros_like(x)

    def __call__(self, carry: Any, x: Any) -> Any:
        return carry + x, carry + x


def halved(x: Any, kernel: Any, *args: Any, **options: Any) -> Any:
    return jax.lax.dot_general(x, kernel, *args, **options) / 2


class Halved(sx.Module):
    def __init__(self) -> None:
        self.kernel = sx.Param(jnp.ones((4, 3)))
        self.bias = sx.Param(jnp.ones(3))

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel / 2 + self.bias[None]


def names(*codes: str) -> dict[str, Any]:
    """The names of this file, with new objects of both libraries that the codes use."""
    makers = {
        "their_linear": lambda: linear(nnx),
        "our_linear": lambda: linear(sx),
        "their_embed": lambda: nnx.Embed(5, 4, rngs=nnx.Rngs(0)),
        "our_embed": lambda: nn.Embed(5, 4, rngs=sx.Rngs(0)),
        "their_box": lambda: meta.Partitioned(x, ("a", None)),
        "our_box": lambda: partition.Partitioned(x, ("a", None)),
        "their_named": lambda: nnx.Param(
            jnp.ones((8, 8)), out_sharding=("embed", None), eager_sharding=False
        ),
        "our_named": lambda: sx.Param(jnp.ones((8, 8)), axes=("embed", None)),
    }
    used = [name for name in makers if any(name in code for code in codes)]
    return {**globals(), **{name: makers[name]() for name in used}}
