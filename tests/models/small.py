# SPDX-License-Identifier: Apache-2.0
"""A decoder small enough to compile many times, and a batch for it."""

from __future__ import annotations

import numpy as np

from shardax.models import DecoderConfig

SMALL = DecoderConfig(
    vocab_size=32, num_layers=1, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32
)
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (4, 9), np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
