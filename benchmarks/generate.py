# SPDX-License-Identifier: Apache-2.0
"""How many tokens a second generation makes, with 1 and 8 prompts.

Opponents: a loop by hand in raw JAX (baseline), `sx.models.generate`, and `generate` of
transformers with PyTorch where both are installed. All run the same decoder in float32 on the same
cores, greedy, prompts of one length; a call reads the prompts and adds all tokens. The loop by hand
is two compiled functions over a donated cache, a dictionary; its weights are those of the shardax
model, and their tokens must be equal. Those of transformers are random numbers of its own.

Bounds on the median over repeats: shardax takes at most 1.10 of the loop by hand, and less than
transformers.

    python benchmarks/generate.py --json generate.json
"""

import functools
import importlib.util
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Opponent, Report, arguments, compare, measure, table
from raw_decoder import rms_norm, rotate, rotation

import shardax as sx

BOUND = 1.10
BASELINE, OURS, PEER = "by hand", "sx.models.generate", "transformers"
SIZES = {"num_layers": 8, "embed_dim": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
SIZES |= {"mlp_dim": 1408, "vocab_size": 256}
QUICK = SIZES | {"num_layers": 2, "embed_dim": 64, "head_dim": 8, "mlp_dim": 128}
PROMPT, NEW = 32, 128
PEER_MODULES = ("transformers", "torch")

Generate = Callable[[np.ndarray], np.ndarray]


def shardax(model: sx.models.Decoder, new: int) -> Generate:
    """`sx.models.generate`, as a user calls it."""

    def run(prompts: np.ndarray) -> np.ndarray:
        rows = sx.models.generate(model, list(prompts), max_new_tokens=new, temperature=0)
        return np.stack(rows)[:, prompts.shape[1] :]

    return run


def weights_of(model: sx.models.Decoder) -> dict[str, Any]:
    """The parameters of the model as nested dictionaries."""

    def layer(one: Any) -> dict[str, jax.Array]:
        attn, mlp = one.attn, one.mlp
        named = {"q": attn.q, "k": attn.k, "v": attn.v, "out": attn.out}
        named |= {"gate": mlp.gate, "up": mlp.up, "down": mlp.down}
        kernels = {name: linear.kernel[...] for name, linear in named.items()}
        norms = {"attn_norm": one.attn_norm.scale[...], "mlp_norm": one.mlp_norm.scale[...]}
        return kernels | norms

    return {
        "embedding": model.embed.embedding[...],
        "layers": [layer(one) for one in model.layers],
        "norm": model.final_norm.scale[...],
        "head": model.head.kernel[...],
    }


def read(
    params: dict[str, Any], cache: dict[str, Any], tokens: jax.Array, start: Any
) -> tuple[jax.Array, dict[str, Any]]:
    """The likeliest next tokens, and the cache with the keys and values of these ones."""
    time = tokens.shape[1]
    slots = cache["key"][0].shape[1]
    places = start + jnp.arange(time)
    readable = jnp.arange(slots)[None] <= places[:, None]
    x = params["embedding"][tokens]
    turn = rotation(places, params["layers"][0]["q"].shape[-1])
    keys, values = [], []
    for number, layer in enumerate(params["layers"]):
        y = rms_norm(x, layer["attn_norm"])
        query = rotate(jnp.einsum("bte,ehd->bthd", y, layer["q"]), turn)
        key = rotate(jnp.einsum("bte,ehd->bthd", y, layer["k"]), turn)
        value = jnp.einsum("bte,ehd->bthd", y, layer["v"])
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        keys.append(put(cache["key"][number], key))
        values.append(put(cache["value"][number], value))
        heads = jax.nn.dot_product_attention(query, keys[-1], values[-1], mask=readable[None, None])
        x = x + jnp.tensordot(heads, layer["out"], axes=2)
        y = rms_norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    logits = rms_norm(x[:, -1:], params["norm"])[:, 0] @ params["head"]
    return jnp.argmax(logits, -1).astype(np.int32), {"key": keys, "value": values}


def by_hand(model: sx.models.Decoder, new: int) -> Generate:
    """The loop in raw JAX."""
    params = weights_of(model)
    layers, _, heads, head_dim = len(params["layers"]), *params["layers"][0]["k"].shape

    @functools.partial(jax.jit, donate_argnums=1)
    def first(params: Any, cache: Any, tokens: Any) -> Any:
        return read(params, cache, tokens, 0)

    @functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
    def others(params: Any, cache: Any, last: Any, start: int) -> Any:
        def body(step: Any, carry: Any) -> Any:
            cache, last, added = carry
            last, cache = read(params, cache, last[:, None], start + step - 1)
            return cache, last, added.at[:, step].set(last)

        added = jnp.zeros((last.shape[0], new), np.int32).at[:, 0].set(last)
        return jax.lax.fori_loop(1, new, body, (cache, last, added))

    def run(prompts: np.ndarray) -> np.ndarray:
        batch, length = prompts.shape
        shape = (batch, length + new, heads, head_dim)
        cache = {
            name: [jnp.zeros(shape, np.float32) for _ in range(layers)] for name in ("key", "value")
        }
        last, cache = first(params, cache, prompts)
        return np.asarray(others(params, cache, last, length)[2])

    return run


def transformers(sizes: dict[str, int], new: int, threads: int | None) -> Generate:
    """`generate` of a Llama of the same sizes, with PyTorch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if threads is not None:
        torch.set_num_threads(threads)
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["embed_dim"],
        intermediate_size=sizes["mlp_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()

    def run(prompts: np.ndarray) -> np.ndarray:
        tokens = torch.from_numpy(prompts.astype(np.int64))
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        with torch.no_grad():
            rows = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return rows[:, prompts.shape[1] :].numpy()

    return run


def opponents(sizes: dict[str, int], new: int, threads: int | None) -> dict[str, Generate]:
    """Who competes, the baseline first."""
    model = sx.models.Decoder(sx.models.DecoderConfig(**sizes), rngs=sx.Rngs(0))
    found = {BASELINE: by_hand(model, new), OURS: shardax(model, new)}
    if all(map(importlib.util.find_spec, PEER_MODULES)):
        found[PEER] = transformers(sizes, new, threads)
    return found


def repeated(generate: Generate, prompts: np.ndarray) -> Callable[[int], Any]:
    """Generates again and again from the same prompts."""

    def run(calls: int) -> Any:
        for _ in range(calls - 1):
            generate(prompts)
        return generate(prompts)

    return run


def bound_failures(record: dict[str, Any], to_peer: float | None) -> list[str]:
    """Which bounds the record of shardax breaks, as sentences; `to_peer` is its ratio to that."""
    rows, ratio = record["rows"], record["ratio_median"]
    found = []
    if ratio > BOUND:
        found.append(f"{rows} prompts: {ratio:.2f} of the loop by hand, at most {BOUND}")
    if to_peer is not None and to_peer >= 1:
        found.append(f"{rows} prompts: {to_peer:.2f} of transformers, which must be below 1")
    return found


def main() -> int:
    """Measure both batch sizes and check the bounds."""
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--opponents", nargs="*", default=[OURS, PEER])
    parser.add_argument("--torch-threads", type=int, default=None, help="of transformers")
    options = parser.parse_args()
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    sizes, new = (QUICK, 8) if options.quick else (SIZES, NEW)
    report = Report("generate", {"repeats": repeats, "prompt": PROMPT, "new": new, **sizes})
    chosen = {BASELINE, OURS, *options.opponents}
    made = opponents(sizes, new, options.torch_threads)
    found = {name: one for name, one in made.items() if name in chosen}
    rows = []
    for batch in (1, 8):
        random = np.random.default_rng(batch)
        prompts = random.integers(0, sizes["vocab_size"], (batch, PROMPT), np.int32)
        np.testing.assert_array_equal(found[OURS](prompts), found[BASELINE](prompts))
        competing = [Opponent(name, repeated(one, prompts)) for name, one in found.items()]
        samples = measure(competing, repeats=repeats, calls=1)
        for comparison in compare(samples, BASELINE).values():
            speed = batch * new / comparison.samples.median
            record = comparison.record() | {"rows": batch, "tokens_per_second": speed}
            report.records.append(record)
            rows.append([record["name"], batch, f"{speed:,.0f}", f"{record['ratio_median']:.2f}x"])
            if record["name"] == OURS and not options.quick:
                ours = compare(samples, PEER)[OURS].ratios if PEER in found else ()
                peer = statistics.median(ours) if ours else None
                report.failures += bound_failures(record, peer)
    print("\n### Generation: tokens a second\n")
    print(table(["opponent", "prompts", "tokens a second", "median time to by hand"], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
