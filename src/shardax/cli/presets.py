# SPDX-License-Identifier: Apache-2.0
"""Presets: named sizes of model and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardax.core.errors import CommandError
from shardax.models import DecoderConfig


@dataclass(frozen=True)
class Preset:
    """A model and how to train it.

    Attributes:
        model: The decoder's configuration.
        steps: Optimizer steps.
        batch_size: Windows a step.
        seq_len: Bytes a window.
        learning_rate: Peak learning rate.
        eval_batches: Held-out batches an evaluation reads, spread evenly over the text.
    """

    model: DecoderConfig
    steps: int
    batch_size: int
    seq_len: int
    learning_rate: float
    eval_batches: int


def _decoder(layers: int, embed: int, heads: int, kv_heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=256,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=embed // heads,
        mlp_dim=4 * embed,
        tied_head=True,
    )


PRESETS = {
    "tiny": Preset(_decoder(2, 64, 4, 4), 40, 16, 64, 1e-2, 4),
    "demo": Preset(_decoder(3, 128, 8, 4), 240, 16, 128, 6e-3, 64),
    "small": Preset(_decoder(8, 512, 8, 4), 20_000, 64, 512, 1e-3, 64),
}


def find_preset(name: str) -> Preset:
    """Returns a preset by name.

    Raises:
        CommandError: If there is none; the message lists them.

    Example:
        >>> find_preset("demo").model.vocab_size
        256
    """
    if name not in PRESETS:
        raise CommandError(f"--preset {name!r} is unknown; there are: {', '.join(PRESETS)}.")
    return PRESETS[name]


def decoder_optimizer(steps: int, learning_rate: float) -> Any:
    """Returns the transformation of optax that ``shardax train`` trains with.

    Args:
        steps: Optimizer steps of the run.
        learning_rate: The peak.
    """
    import optax

    warmup = max(1, steps // 15)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 20
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
