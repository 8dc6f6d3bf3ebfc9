# SPDX-License-Identifier: Apache-2.0
"""One train step of the same decoder, three ways: raw JAX, shardax, Flax NNX.

A `Step` holds the arguments and makes a new compiled function each time it is asked, so that a
benchmark of tracing never meets a cached trace of its own. All three use the loss of `raw_decoder`
on the logits of their own model.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import raw_decoder
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from raw_decoder import Config, cross_entropy

BATCH, TIME = 4, 32
# Every name has a rule: NNX takes a name without one for a mesh axis.
RULES = (
    ("vocab", "model"),
    ("heads", "model"),
    ("kv_heads", "model"),
    ("mlp", "model"),
    ("embed", "data"),
    ("head_dim", None),
)


@dataclass(frozen=True)
class Step:
    """A train step ready to trace.

    Attributes:
        name: Whose it is.
        jit: Makes a new compiled function, with `.trace` and `.lower`.
        args: What to trace it with.
    """

    name: str
    jit: Callable[[], Any]
    args: tuple[Any, ...]


def eight_cpu_devices() -> None:
    """Make this process see 8 virtual CPU devices.

    Raises:
        RuntimeError: JAX was used before and shows other devices.
    """
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # already in use: the check below decides
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()
    if [device.platform for device in devices] != ["cpu"] * 8:
        raise RuntimeError(f"this needs 8 virtual CPU devices, and JAX already shows {devices}")


def mesh_2x4() -> Mesh:
    """The mesh of the sharded measurements: `data` of 2, `model` of 4, both Auto."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)


def raw_shardings(config: Config, mesh: Mesh) -> Any:
    """The sharding that `RULES` give every parameter of `raw_decoder`."""
    rules = dict(RULES)

    def sharding(names: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(rules[name] for name in names)))

    names = raw_decoder.axes(config)
    return jax.tree.map(sharding, names, is_leaf=lambda node: isinstance(node, tuple))


def batch(config: Config, mesh: Mesh | None = None) -> dict[str, jax.Array]:
    """Random tokens: `inputs` and `targets`, each `(BATCH, TIME)` int32, split over `data`."""
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TIME + 1), 0, config.vocab, jnp.int32)
    made = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    return (
        made if mesh is None else jax.device_put(made, NamedSharding(mesh, PartitionSpec("data")))
    )


def raw(
    config: Config, tx: optax.GradientTransformation, donate: bool = False, mesh: Mesh | None = None
) -> Step:
    """Nested dictionaries under `jax.jit`."""
    params = raw_decoder.init(config, jax.random.key(0))
    if mesh is not None:
        params = jax.device_put(params, raw_shardings(config, mesh))

    def make() -> Any:
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            return raw_decoder.train_step(config, tx, params, opt_state, batch)

        return jax.jit(step, donate_argnums=(0, 1) if donate else ())

    return Step("raw jax", make, (params, tx.init(params), batch(config, mesh)))


def shardax(
    config: Config, tx: optax.GradientTransformation, donate: bool = False, mesh: Mesh | None = None
) -> Step:
    """`shardax.models.Decoder` and `shardax.train.Optimizer` under `shardax.jit`."""
    import shardax as sx
    from shardax.train import Optimizer

    model = shardax_decoder(config)
    if mesh is not None:
        sx.shard(model, mesh, RULES)
    optimizer = Optimizer(model, tx)

    def make() -> Any:
        def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
            loss, grads = sx.value_and_grad(lambda model: shardax_loss(model, batch))(model)
            optimizer.update(grads)
            return loss

        return sx.jit(step, donate_argnums=(0, 1) if donate else None)

    return Step("shardax", make, (model, optimizer, batch(config, mesh)))


def shardax_loss(model: Any, batch: Any) -> jax.Array:
    """The loss of shardax's decoder, on its logits."""
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def shardax_decoder(config: Config) -> Any:
    """shardax's decoder with the sizes of `config`; its values are still lazy."""
    import shardax as sx
    from shardax.models import Decoder, DecoderConfig

    sizes = DecoderConfig(
        vocab_size=config.vocab,
        embed_dim=config.embed,
        num_layers=config.layers,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        mlp_dim=config.mlp,
        tied_head=config.tied,
        param_dtype=config.param_dtype,
        dtype=config.dtype,
    )
    return Decoder(sizes, rngs=sx.Rngs(0))


def nnx(config: Config, tx: optax.GradientTransformation, donate: bool = False) -> Step:
    """NNX's own layers and optimizer under `nnx.jit` with default flags."""
    import nnx_decoder
    from flax import nnx as flax_nnx

    with flax_nnx.use_eager_sharding(False):  # one device: no mesh to lay the variables over
        model = nnx_decoder.Decoder(config, flax_nnx.Rngs(0))
        optimizer = flax_nnx.Optimizer(model, tx, wrt=flax_nnx.Param)

    def make() -> Any:
        def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
            def objective(model: Any) -> jax.Array:
                return cross_entropy(model(batch["inputs"]), batch["targets"])

            loss, grads = flax_nnx.value_and_grad(objective)(model)
            optimizer.update(model, grads)
            return loss

        return flax_nnx.jit(step, donate_argnums=(0, 1) if donate else None)

    return Step("nnx", make, (model, optimizer, batch(config)))


MAKERS: dict[str, Callable[..., Step]] = {"raw jax": raw, "shardax": shardax, "nnx": nnx}
