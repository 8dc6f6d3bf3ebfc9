# SPDX-License-Identifier: Apache-2.0
"""How many tokens a second generation makes, by one model of each kind, with 1 and 8 prompts.

Opponents: a loop by hand in raw JAX (baseline), `sx.models.generate`, and, of the plain decoder,
`generate` of transformers with PyTorch where both are installed. All run the same model in float32
on the same cores, greedy, prompts of one length; a call reads the prompts and adds all tokens. The
loops by hand are in `_decoding_loops.py`; their weights are those of the shardax model, and their
tokens must be equal. The weights of transformers are random numbers of its own.

Kinds: `decoder` is a Llama, `experts` a Mixtral, `hybrid` an LFM2 (short convolutions and
attention), `encoder-decoder` a T5.

A *short call* adds 8 tokens to prompts of 16, by models of 4 layers of 256 features: there what a
call costs besides its tokens counts.

Bounds on the median over repeats: shardax takes at most 1.10 of the loop by hand, in short calls
1.30, and less than transformers.

    python benchmarks/generate.py --json generate.json
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from _decoding_loops import Generate, by_hand
from _harness import Opponent, Report, arguments, compare, measure, table

import shardax as sx

BOUND, SHORT_BOUND = 1.10, 1.30
BASELINE, OURS, PEER = "by hand", "sx.models.generate", "transformers"
PLAIN = sx.models.TransformerConfig(
    num_layers=8,
    embed_dim=512,
    attention=sx.models.AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=64),
    mlp=sx.models.MLPConfig(dim=1408),
)
SMALL = replace(
    PLAIN,
    num_layers=2,
    embed_dim=64,
    attention=replace(PLAIN.attention, head_dim=8),
    mlp=sx.models.MLPConfig(dim=128),
)
# Of short calls, whose fixed cost counts.
MEDIUM = replace(
    PLAIN,
    num_layers=4,
    embed_dim=256,
    attention=replace(PLAIN.attention, head_dim=32),
    mlp=sx.models.MLPConfig(dim=704),
)
PROMPT, NEW = 32, 128
SHORT_PROMPT, SHORT = 16, 8
PEER_MODULES = ("transformers", "torch")


def configs(plain: sx.models.TransformerConfig) -> dict[str, Any]:
    """The config of each kind, with the sizes of the plain one."""
    half = replace(plain, num_layers=plain.num_layers // 2)
    is_recurrent = (*(index % 4 != 3 for index in range(plain.num_layers - 1)), False)
    attention, mlp = replace(plain.attention, rope=None, scale=1.0), replace(plain.mlp, gated=False)
    positions = sx.models.PositionsConfig(relative_buckets=32)
    part = replace(half, attention=attention, mlp=mlp, positions=positions, activation="relu")
    mixer, reading = sx.models.ShortConvolutionConfig(), replace(attention, cross_attention=True)
    return {
        "decoder": plain,
        "experts": replace(half, experts=sx.models.ExpertsConfig(8, plain.mlp.dim)),
        "hybrid": replace(
            plain,
            recurrence=sx.models.RecurrenceConfig(mixer, layers=is_recurrent),
            attention=replace(plain.attention, qk_norm="head"),
        ),
        "encoder-decoder": sx.models.EncoderDecoderConfig(
            replace(part, causal=False, head=None), replace(part, attention=reading)
        ),
    }


def model_of(config: Any) -> Any:
    """A model in evaluation."""
    is_pair = isinstance(config, sx.models.EncoderDecoderConfig)
    make = sx.models.EncoderDecoder if is_pair else sx.models.Transformer
    model = make(config, rngs=sx.Rngs(0))
    model.eval()
    return model


def shardax(model: Any, new: int) -> Generate:
    """`sx.models.generate`, as a user calls it."""
    options = {"max_new_tokens": new, "temperature": 0}

    def run(prompts: np.ndarray) -> np.ndarray:
        rows = list(prompts)
        if isinstance(model, sx.models.EncoderDecoder):
            starts = [[0] for _ in rows]
            return np.stack(sx.models.generate(model, starts, inputs=rows, **options))[:, 1:]
        return np.stack(sx.models.generate(model, rows, **options))[:, prompts.shape[1] :]

    return run


def transformers(sizes: sx.models.TransformerConfig, new: int, threads: int | None) -> Generate:
    """`generate` of a Llama of the same sizes, with PyTorch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if threads is not None:
        torch.set_num_threads(threads)
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.embed_dim,
        intermediate_size=sizes.mlp.dim,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.attention.num_heads,
        num_key_value_heads=sizes.attention.num_kv_heads,
        head_dim=sizes.attention.head_dim,
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


def opponents(kind: str, config: Any, new: int, threads: int | None) -> dict[str, Generate]:
    """Who competes, the baseline first."""
    model = model_of(config)
    found = {BASELINE: by_hand(model, new), OURS: shardax(model, new)}
    if kind == "decoder" and all(map(importlib.util.find_spec, PEER_MODULES)):
        found[PEER] = transformers(config, new, threads)
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
    where, ratio = f"{record['kind']}, {record['rows']} prompts", record["ratio_median"]
    found = []
    bound = SHORT_BOUND if record["new"] == SHORT else BOUND
    if ratio > bound:
        found.append(f"{where}: {ratio:.2f} of the loop by hand, at most {bound}")
    if to_peer is not None and to_peer >= 1:
        found.append(f"{where}: {to_peer:.2f} of transformers, which must be below 1")
    return found


def compared(
    kind: str,
    competing: dict[str, Generate],
    batch: int,
    new: int,
    repeats: int,
    *,
    prompt: int = PROMPT,
    calls: int = 1,
) -> list[dict[str, Any]]:
    """A record of each opponent; that of shardax has its ratio to transformers too."""
    random = np.random.default_rng(batch)
    prompts = random.integers(0, PLAIN.vocab_size, (batch, prompt), np.int32)
    np.testing.assert_array_equal(competing[OURS](prompts), competing[BASELINE](prompts))
    timed = [Opponent(name, repeated(one, prompts)) for name, one in competing.items()]
    samples = measure(timed, repeats=repeats, calls=calls)
    records, least = [], min(one.minimum for one in samples if one.name == BASELINE)
    for name, comparison in compare(samples, BASELINE).items():
        speed = batch * new / comparison.samples.minimum
        record = {"kind": kind, "rows": batch, "new": new, "tokens_per_second": speed}
        record |= {**comparison.record(), "minimum_ratio": comparison.samples.minimum / least}
        if name == OURS and PEER in competing:
            record["to_peer"] = statistics.median(compare(samples, PEER)[OURS].ratios)
        records.append(record)
    return records


def row_of(record: dict[str, Any]) -> Sequence[object]:
    """The row of a record in the table."""
    ratios = [f"{record[name]:.2f}x" for name in ("minimum_ratio", "ratio_median")]
    speed = f"{record['tokens_per_second']:,.0f}"
    sizes = [record["rows"], record["new"]]
    return [record["kind"], record["name"], *sizes, speed, *ratios]


def main() -> int:
    """Measure all kinds and batch sizes, and check the bounds."""
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--opponents", nargs="*", default=[OURS, PEER])
    parser.add_argument("--kinds", nargs="*", default=list(configs(PLAIN)), help="of models")
    parser.add_argument("--torch-threads", type=int, default=None, help="of transformers")
    options = parser.parse_args()
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    plain, new = (SMALL, 8) if options.quick else (PLAIN, NEW)
    report = Report("generate", {"repeats": repeats, "prompt": PROMPT, "new": new})
    report.settings |= {"layers": plain.num_layers, "embed_dim": plain.embed_dim}
    chosen = {BASELINE, OURS, *options.opponents}
    for kind in options.kinds:
        made = opponents(kind, configs(plain)[kind], new, options.torch_threads)
        competing = {name: one for name, one in made.items() if name in chosen}
        for batch in (2,) if options.quick else (1, 8):
            report.records += compared(kind, competing, batch, new, repeats)
        # A short call, of several in a row.
        if not options.quick:
            model = model_of(configs(MEDIUM)[kind])
            competing = {BASELINE: by_hand(model, SHORT), OURS: shardax(model, SHORT)}
            sizes = {"prompt": SHORT_PROMPT, "calls": 8}
            report.records += compared(kind, competing, 1, SHORT, 3 * repeats, **sizes)
    for record in report.records:
        if record["name"] == OURS and not options.quick:
            report.failures += bound_failures(record, record.get("to_peer"))
    print("\n### Generation: tokens a second\n")
    headers = ["kind", "opponent", "prompts", "new", "tokens a second", "of minima", "median"]
    print(table(headers, map(row_of, report.records)))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
