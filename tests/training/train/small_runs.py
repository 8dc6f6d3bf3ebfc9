# SPDX-License-Identifier: Apache-2.0
"""Small training runs, shared by the tests of the trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardax as sx
from shardax.models import next_token_loss

RULES = sx.Rules({"batch": "data", "vocab": "model", "embed": None})
TEXT = sx.train.ByteText.from_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
TRAIN, HELD_OUT = TEXT.split(0.2, block_bytes=256)
BATCH, SEQ = 8, 16


class Quiet:
    """A display that remembers what it was told, and calls ``at_step``."""

    def __init__(self, at_step: Any = None) -> None:
        self.at_step = at_step
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.span = (-1, -1)

    def __call__(self, first: int, total: int) -> Self:
        self.span = (first, total)
        return self

    def step(self, step: int, loss: float | None, speed: str | None) -> None:
        self.steps.append(step)
        if self.at_step is not None:
            self.at_step(step)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def waves(key: Any, shape: Any, dtype: Any) -> Any:
    """An initializer that is compiled sooner than one of random normal numbers."""
    places = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    phase = jax.random.key_data(key).astype(jnp.float32).sum()
    return 0.25 * jnp.cos(0.37 * places**2 + phase).astype(dtype)


class Bigram(sx.Module):
    """Predicts a byte from the one before it, with dropout in between."""

    def __init__(self, dropout: float = 0.0, seed: int = 0, init: Any = waves) -> None:
        rngs = sx.Rngs(seed)
        self.embed = sx.nn.Embed(256, 16, embedding_init=init, rngs=rngs)
        self.dropout = sx.nn.Dropout(dropout, rngs=rngs)
        self.head = sx.nn.Linear(
            16, 256, kernel_init=init, kernel_axes=("embed", "vocab"), rngs=rngs
        )

    def __call__(self, tokens: Any) -> Any:
        return self.head(self.dropout(self.embed(tokens)))


def make_trainer(
    directory: Path,
    steps: int,
    *,
    model: Any = None,
    tx: Any = None,
    loss: Any = next_token_loss,
    batches: Any = None,
    held_out: Any = None,
    batch_size: int = BATCH,
    mesh: Any = None,
    layout: Any = None,
    eval: Any = None,
    callbacks: Any = (),
    resumable: bool = True,
    **settings: Any,
) -> sx.train.Trainer:
    """A trainer of a ``Bigram``; over a mesh by ``RULES`` and what else ``layout`` says."""
    model = Bigram() if model is None else model
    tx = optax.adam(1e-2) if tx is None else tx
    if batches is None:
        batches = sx.train.TrainBatches(TRAIN, batch_size=batch_size, seq_len=SEQ)
    return sx.train.Trainer(
        model,
        sx.train.Optimizer(model, tx),
        loss,
        batches,
        directory=directory,
        settings=sx.train.TrainerSettings(steps=steps, **settings),
        held_out=held_out,
        mesh=mesh,
        rules=RULES,
        eval_metrics=eval,
        callbacks=callbacks,
        resumable=resumable,
        **({} if layout is None else layout),
    )


def eval_batches(**options: Any) -> sx.train.EvalBatches:
    """All held-out text, in batches of which the last is padded."""
    return sx.train.EvalBatches(HELD_OUT, batch_size=BATCH, seq_len=SEQ, **options)


def state_of(trainer: sx.train.Trainer) -> dict[Any, bytes]:
    """The bytes of every Variable that is trained, by path."""
    return {path: raw(v) for path, v in sx.iter_variables(trainer.trained)}


def raw(variable: Any) -> bytes:
    """The bytes of a Variable's array; of a random key its words."""
    value = variable.value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()
