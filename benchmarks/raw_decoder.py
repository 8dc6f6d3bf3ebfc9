# SPDX-License-Identifier: Apache-2.0
"""A decoder language model by hand in raw JAX: nested dictionaries and pure functions, no library.

It is the opponent of `shardax.models.decoder` for program identity, trace time and initialisation,
so the two compute the same thing. The mathematics, for tokens of shape `(batch, time)`:

    x = embedding[tokens]                                     (batch, time, embed)
    for each layer:
        x = x + attention(rms_norm(x, attention_norm))
        x = x + mlp(rms_norm(x, mlp_norm))
    x = rms_norm(x, final_norm)
    logits = x @ head                (or x @ embedding^T when tied)

- `rms_norm(x, scale) = x / sqrt(mean(x^2, last axis) + 1e-6) * scale`, computed in float32 and cast
  back to the compute dtype; `scale` starts at ones. (Zhang and Sennrich, 2019.)
- attention: `q = x @ q_kernel` with heads, `k, v = x @ k_kernel, x @ v_kernel` with kv heads,
  rotary embedding on q and k, `jax.nn.dot_product_attention(q, k, v, is_causal=True)` (scale `1 /
  sqrt(head_dim)`; each group of `heads / kv_heads` consecutive query heads shares one kv head),
  then `@ out_kernel`.
- rotary embedding (Su et al., 2021), half-split convention: the head's first half is the real part
  and its second half the imaginary part, turned by `position * 10000^(-2 i / head_dim)` for the
  pair `i`, positions `0..time-1`; in float32, cast back to the compute dtype.
- mlp: `(silu(x @ gate) * (x @ up)) @ down` (Shazeer, 2020).
- No biases, no dropout, no scaling of the embedding. Parameters are cast to the compute dtype where
  they are used.
- loss: mean over all positions of `-log_softmax(logits in float32)[target]`, in nats per token.

Kernel shapes: q `(embed, heads, head_dim)`; k, v `(embed, kv_heads, head_dim)`; out `(heads,
head_dim, embed)`; gate, up `(embed, mlp)`; down `(mlp, embed)`; embedding `(vocab, embed)`; head
`(embed, vocab)`.

The dictionaries are ordered, parameters in the order of their use: XLA schedules, and so sizes its
temporary memory, by the order in which it meets them (sorted by name, the same step takes up to
half more or less), and a comparison of programs must not measure that.

    >>> import jax
    >>> config = Config(layers=1)
    >>> params = init(config, jax.random.key(0))
    >>> forward(config, params, jax.numpy.zeros((2, 8), "int32")).shape
    (2, 8, 256)
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]
NORM_EPSILON = 1e-6
ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class Config:
    """Sizes and dtypes of the decoder; the defaults are small enough for a test."""

    vocab: int = 256
    embed: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 192
    tied: bool = False
    param_dtype: str = "float32"
    dtype: str = "float32"


def layer_kernels(config: Config) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], int]]:
    """Shape, logical axes and number of leading input axes of each kernel of one layer, by name."""
    embed, mlp, head_dim = config.embed, config.mlp, config.head_dim
    heads, kv_heads = config.heads, config.kv_heads
    return {
        "q": ((embed, heads, head_dim), ("embed", "heads", "head_dim"), 1),
        "k": ((embed, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), 1),
        "v": ((embed, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), 1),
        "out": ((heads, head_dim, embed), ("heads", "head_dim", "embed"), 2),
        "gate": ((embed, mlp), ("embed", "mlp"), 1),
        "up": ((embed, mlp), ("embed", "mlp"), 1),
        "down": ((mlp, embed), ("mlp", "embed"), 1),
    }


def layer_shapes(config: Config) -> Params:
    """Shape, axis names and number of leading input axes of each array of a layer; 0: a norm."""
    norm = ((config.embed,), ("embed",), 0)
    kernels = layer_kernels(config)
    attention = {name: kernels[name] for name in ("q", "k", "v", "out")}
    mlp = {name: kernels[name] for name in ("gate", "up", "down")}
    return OrderedDict(attention_norm=norm, **attention, mlp_norm=norm, **mlp)


def axes(config: Config) -> Params:
    """The logical axis names of every parameter, in the tree of `init`."""
    names = [(name, names) for name, (_, names, _) in layer_shapes(config).items()]
    tree: Params = OrderedDict(
        embedding=("vocab", "embed"),
        layers=[OrderedDict(names) for _ in range(config.layers)],
        final_norm=("embed",),
    )
    if not config.tied:
        tree["head"] = ("embed", "vocab")
    return tree


def init(config: Config, key: jax.Array) -> Params:
    """All parameters, kernels truncated-normal with variance 1 / fan-in (LeCun), norms one."""
    dtype = jnp.dtype(config.param_dtype)
    shapes = layer_shapes(config)
    keys = iter(jax.random.split(key, 2 + config.layers * len(shapes)))

    def parameter(shape: tuple[int, ...], inputs: int) -> jax.Array:
        if inputs == 0:
            return jnp.ones(shape, dtype)
        fan_in = math.prod(shape[:inputs])
        # The variance of a standard normal cut at two standard deviations is 0.8796^2.
        scale = 1.0 / (math.sqrt(fan_in) * 0.87962566103423978)
        return scale * jax.random.truncated_normal(next(keys), -2.0, 2.0, shape, dtype)

    def layer() -> Params:
        made = [(name, parameter(shape, n)) for name, (shape, _, n) in shapes.items()]
        return OrderedDict(made)

    embedding = jax.random.normal(next(keys), (config.vocab, config.embed), dtype)
    params: Params = OrderedDict(
        embedding=embedding / math.sqrt(config.embed),
        layers=[layer() for _ in range(config.layers)],
        final_norm=jnp.ones((config.embed,), dtype),
    )
    if not config.tied:
        params["head"] = parameter((config.embed, config.vocab), 1)
    return params


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS normalisation of `(batch, time, embed)` over embed, in float32; keeps x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + NORM_EPSILON)
    return (normed * scale.astype(jnp.float32)[None, None, :]).astype(x.dtype)


def rotation(positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles that positions turn a head by.

    Args:
        positions: int32, `(time,)`.
        head_dim: Size of a head, even.

    Returns:
        Two float32 arrays of shape `(1, time, 1, head_dim / 2)`.
    """
    half = head_dim // 2
    frequencies = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[None, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary position embedding.

    Args:
        x: Queries or keys, `(batch, time, heads, head_dim)`.
        turn: Of `rotation`.

    Returns:
        The turned array, of x's shape and dtype.
    """
    cosine, sine = turn
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [real * cosine - imaginary * sine, imaginary * cosine + real * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(
    config: Config, layer: Params, x: jax.Array, turn: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Causal grouped-query self-attention on `(batch, time, embed)`."""
    dtype = jnp.dtype(config.dtype)
    q = rotate(jnp.einsum("bte,ehd->bthd", x, layer["q"].astype(dtype)), turn)
    k = rotate(jnp.einsum("bte,ehd->bthd", x, layer["k"].astype(dtype)), turn)
    v = jnp.einsum("bte,ehd->bthd", x, layer["v"].astype(dtype))
    heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    # An einsum over two letters contracts them in the other order, and XLA then copies both sides.
    return jnp.tensordot(heads, layer["out"].astype(dtype), axes=2)


def mlp(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Gated feed-forward layer on `(batch, time, embed)`."""
    dtype = jnp.dtype(config.dtype)
    gate = jnp.einsum("bte,em->btm", x, layer["gate"].astype(dtype))
    up = jnp.einsum("bte,em->btm", x, layer["up"].astype(dtype))
    return jnp.einsum("btm,me->bte", jax.nn.silu(gate) * up, layer["down"].astype(dtype))


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits of the next token.

    Args:
        config: The sizes that params were made with.
        params: The tree of `init`.
        tokens: int32, `(batch, time)`.

    Returns:
        `(batch, time, vocab)` in the compute dtype.
    """
    dtype = jnp.dtype(config.dtype)
    turn = rotation(jnp.arange(tokens.shape[1], dtype=jnp.int32), config.head_dim)
    embedding = params["embedding"].astype(dtype)
    x = jnp.take(embedding, tokens, axis=0)
    for layer in params["layers"]:
        x = x + attention(config, layer, rms_norm(x, layer["attention_norm"]), turn)
        x = x + mlp(config, layer, rms_norm(x, layer["mlp_norm"]))
    x = rms_norm(x, params["final_norm"])
    if config.tied:
        return jnp.einsum("bte,ve->btv", x, embedding)
    return jnp.einsum("bte,ev->btv", x, params["head"].astype(dtype))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log-likelihood in nats per token, the log-softmax in float32."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)
    return -jnp.mean(chosen)


def loss(config: Config, params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """The training loss on a batch of `inputs` and `targets`, each `(batch, time)` int32."""
    return cross_entropy(forward(config, params, batch["inputs"]), batch["targets"])


def train_step(
    config: Config,
    tx: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    batch: dict[str, jax.Array],
) -> tuple[jax.Array, Params, optax.OptState]:
    """One step: the loss before it, new parameters and new optimizer state."""
    value, grads = jax.value_and_grad(lambda p: loss(config, p, batch))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return value, optax.apply_updates(params, updates), opt_state
