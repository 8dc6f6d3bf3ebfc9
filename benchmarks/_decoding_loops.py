# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding by hand in raw JAX, for one model of each kind, beside `generate.py`.

A loop is two compiled functions over a donated cache, a dictionary: one reads the prompts, the
other adds all tokens. Weights are those of a shardax model, as nested dictionaries. Experts are
computed as the number of tokens suggests: choice after choice where these are few, else all of them
for all tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from raw_decoder import rms_norm, rotate, rotation

import shardax as sx

Generate = Callable[[np.ndarray], np.ndarray]
Params = dict[str, Any]


def weights_of(model: Any) -> Params:
    """The parameters of a model as nested dictionaries; those of stacked or frozen ones are not."""
    params: Params = {}
    for path, variable in sx.iter_variables(model):
        if isinstance(variable, sx.Param):
            *parents, last = map(str, path)
            places = params
            for name in parents:
                places = places.setdefault(name, {})
            places[last] = variable[...]
    return params


def norm(x: jax.Array, params: Params) -> jax.Array:
    """RMS normalization over the last dimension."""
    if x.ndim == 3:
        return rms_norm(x, params["scale"])
    return rms_norm(x.reshape(x.shape[0], -1, x.shape[-1]), params["scale"]).reshape(x.shape)


def heads_of(x: jax.Array, params: Params) -> jax.Array:
    """Queries, keys or values, `(batch, time, heads, head_dim)`."""
    return jnp.einsum("bte,ehd->bthd", x, params["kernel"])


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, params: Params, **options: Any
) -> jax.Array:
    """What attention adds."""
    read = jax.nn.dot_product_attention(query, key, value, **options)
    return jnp.tensordot(read, params["out"]["kernel"], axes=2)


def write(cache: Params, name: str, value: jax.Array, start: Any) -> jax.Array:
    """The cached keys or values, with those of these tokens."""
    cache[name] = jax.lax.dynamic_update_slice_in_dim(cache[name], value, start, axis=1)
    return cache[name]


def convolve(x: jax.Array, params: Params, cache: Params) -> jax.Array:
    """A short convolution between two gates; the cache has its last inputs."""
    gates = jnp.einsum("bte,egc->btgc", x, params["into"]["kernel"])
    before, after, value = (gates[:, :, index] for index in range(3))
    kernel = params["kernel"]
    padded = jnp.concatenate([cache["window"], before * value], axis=1)
    terms = [kernel[i][None, None] * padded[:, i : i + x.shape[1]] for i in range(len(kernel))]
    cache["window"] = padded[:, x.shape[1] :]
    return (after * functools.reduce(jnp.add, terms)) @ params["out"]["kernel"]


def feed(x: jax.Array, params: Params) -> jax.Array:
    """The feed-forward layer: gated, plain with ReLU, or of experts."""
    if "router" in params:
        return experts(x.reshape(-1, x.shape[-1]), params).reshape(x.shape)
    up, down = params["up"]["kernel"], params["down"]["kernel"]
    if "gate" in params:
        return (jax.nn.silu(x @ params["gate"]["kernel"]) * (x @ up)) @ down
    return jax.nn.relu(x @ up) @ down


def experts(x: jax.Array, params: Params, top_k: int = 2) -> jax.Array:
    """Two gated experts of each token."""
    scores, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]["kernel"]), top_k)
    weights = scores / scores.sum(axis=-1, keepdims=True)
    kernels = [params[name] for name in ("gate", "up", "down")]
    if 2 * chosen.size <= len(kernels[0]):

        def one(choice: Any) -> jax.Array:
            row, weight, expert = choice
            gate, up, down = (kernel[expert] for kernel in kernels)
            return weight * ((jax.nn.silu(row @ gate) * (row @ up)) @ down)

        choices = (jnp.repeat(x, top_k, axis=0), weights.ravel(), chosen.ravel())
        return jax.lax.map(one, choices).reshape(*chosen.shape, -1).sum(axis=1)
    count = len(kernels[0])
    shares = (jax.nn.one_hot(chosen, count) * weights[..., None]).sum(axis=1).T[..., None]
    rows = jnp.broadcast_to(x, (count, *x.shape))
    gate, up = (jnp.einsum("etd,edh->eth", rows, kernel) for kernel in kernels[:2])
    return jnp.einsum("eth,ehd->td", jax.nn.silu(gate) * up * shares, kernels[2])


def layers_of(params: Params) -> list[Params]:
    """The layers, in their order."""
    return [params["layers"][name] for name in sorted(params["layers"], key=int)]


def read(params: Params, caches: Any, tokens: jax.Array, start: Any) -> tuple[jax.Array, Any]:
    """The likeliest next tokens of a decoder, and its caches with these ones."""
    places = start + jnp.arange(tokens.shape[1])
    x, new = params["embed"]["embedding"][tokens], []
    for layer, old in zip(layers_of(params), caches, strict=True):
        y, cache = norm(x, layer["attn_norm"]), dict(old)
        if "mixer" in layer:
            x = x + convolve(y, layer["mixer"], cache)
        else:
            attn = layer["attn"]
            query, key, value = (heads_of(y, attn[name]) for name in "qkv")
            if "query_norm" in attn:
                query, key = norm(query, attn["query_norm"]), norm(key, attn["key_norm"])
            turn = rotation(places, query.shape[-1])
            key = write(cache, "key", rotate(key, turn), start)
            value = write(cache, "value", value, start)
            readable = jnp.arange(key.shape[1])[None] <= places[:, None]
            x = x + attend(rotate(query, turn), key, value, attn, mask=readable[None, None])
        x = x + feed(norm(x, layer["mlp_norm"]), layer["mlp"])
        new.append(cache)
    logits = norm(x[:, -1:], params["final_norm"])[:, 0] @ params["head"]["kernel"]
    return jnp.argmax(logits, -1).astype(np.int32), new


def buckets(distance: jax.Array, count: int, farthest: int = 128) -> jax.Array:
    """The bucket of each distance to one side: exact ones, then by the logarithm (T5)."""
    exact = count // 2
    growth = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(farthest / exact)
    far = jnp.minimum(exact + (growth * (count - exact)).astype(np.int32), count - 1)
    return jnp.where(distance < exact, distance, far)


def encode(params: Params, tokens: jax.Array) -> jax.Array:
    """The states of T5's encoder."""
    table = params["distances"]["embedding"]
    half = len(table) // 2
    distance = jnp.arange(tokens.shape[1])[None, :] - jnp.arange(tokens.shape[1])[:, None]
    chosen = buckets(jnp.abs(distance), half) + half * (distance > 0)
    bias = table[chosen].transpose(2, 0, 1)[None]
    x = params["embed"]["embedding"][tokens]
    for layer in layers_of(params):
        y = norm(x, layer["attn_norm"])
        query, key, value = (heads_of(y, layer["attn"][name]) for name in "qkv")
        x = x + attend(query, key, value, layer["attn"], bias=bias, scale=1.0)
        x = x + feed(norm(x, layer["mlp_norm"]), layer["mlp"])
    return norm(x, params["final_norm"])


def read_with_context(
    params: Params, caches: Any, tokens: jax.Array, start: Any, states: Any = None
) -> tuple[jax.Array, Any]:
    """The likeliest next tokens of T5's decoder; states are read once, into the caches."""
    table, places = params["distances"]["embedding"], start + jnp.arange(tokens.shape[1])
    x, new, bias, readable = params["embed"]["embedding"][tokens], [], None, None
    for layer, old in zip(layers_of(params), caches, strict=True):
        attn, cross, cache = layer["attn"], layer["cross_attn"], dict(old)
        y = norm(x, layer["attn_norm"])
        query, key, value = (heads_of(y, attn[name]) for name in "qkv")
        key, value = write(cache, "key", key, start), write(cache, "value", value, start)
        if bias is None:
            distance = places[:, None] - jnp.arange(key.shape[1])[None]
            readable = (distance >= 0)[None, None]
            bias = table[buckets(jnp.maximum(distance, 0), len(table))].transpose(2, 0, 1)[None]
        x = x + attend(query, key, value, attn, bias=bias, mask=readable, scale=1.0)
        y = norm(x, layer["cross_norm"])
        if states is not None:
            cache["context_key"] = heads_of(states, cross["k"])
            cache["context_value"] = heads_of(states, cross["v"])
        context = (cache["context_key"], cache["context_value"])
        x = x + attend(heads_of(y, cross["q"]), *context, cross, scale=1.0)
        x = x + feed(norm(x, layer["mlp_norm"]), layer["mlp"])
        new.append(cache)
    logits = norm(x[:, -1:], params["final_norm"])[:, 0] @ params["head"]["kernel"]
    return jnp.argmax(logits, -1).astype(np.int32), new


def caches_of(params: Params, batch: int, slots: int) -> list[Params]:
    """Empty caches of the layers of a decoder."""
    caches = []
    for layer in layers_of(params):
        if "mixer" in layer:
            kernel = layer["mixer"]["kernel"]
            shape = (batch, len(kernel) - 1, kernel.shape[1])
            caches.append({"window": np.zeros(shape, kernel.dtype)})
        else:
            kernel = layer["attn"]["k"]["kernel"]
            shape = (batch, slots, *kernel.shape[1:])
            caches.append({name: np.zeros(shape, kernel.dtype) for name in ("key", "value")})
    return jax.tree.map(jnp.asarray, caches)


def by_hand(model: Any, new: int) -> Generate:
    """The loop for a model, from prompts; of an `EncoderDecoder` from inputs, after the token 0."""
    params = weights_of(model)
    is_pair = isinstance(model, sx.models.EncoderDecoder)
    if is_pair:  # one Variable, found under its first path
        params["decoder"]["embed"] = params["encoder"]["embed"]
    step = read_with_context if is_pair else read

    @functools.partial(jax.jit, donate_argnums=1)
    def first(params: Params, caches: Any, tokens: jax.Array) -> Any:
        if not is_pair:
            return read(params, caches, tokens, 0)
        states = encode(params["encoder"], tokens)
        return step(params["decoder"], caches, jnp.zeros_like(tokens[:, :1]), 0, states)

    @functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
    def others(params: Params, caches: Any, last: jax.Array, start: int) -> Any:
        def body(index: Any, carry: Any) -> Any:
            caches, last, added = carry
            last, caches = step(params, caches, last[:, None], start + index - 1)
            return caches, last, added.at[:, index].set(last)

        added = jnp.zeros((last.shape[0], new), np.int32).at[:, 0].set(last)
        return jax.lax.fori_loop(1, new, body, (caches, last, added))

    def run(prompts: np.ndarray) -> np.ndarray:
        decoder = params["decoder"] if is_pair else params
        start = 1 if is_pair else prompts.shape[1]
        caches = caches_of(decoder, len(prompts), start + new)
        last, caches = first(params, caches, prompts)
        return np.asarray(others(decoder, caches, last, start)[2])

    return run
