# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level language model over a mesh, and compare it with counts of bytes.

A whole program to start from: text and its held-out part, a decoder, its layout by name, training
with checkpoints and a log, the held-out loss, and a sample. Beside the loss stand four baselines in
nats per byte. The entropies of the held-out text are the losses of the best models that look at
nothing (unigram) or at one byte (bigram), so a model below the latter uses more context; they are
Shannon's F1 and F2 ("Prediction and Entropy of Printed English", 1951). The fitted ones are the
losses of such models counted on the training text.

    python examples/byte_language_model.py --steps 160
    JAX_NUM_CPU_DEVICES=8 python examples/byte_language_model.py --mesh 2 4 --text my_folder
"""

from __future__ import annotations

import argparse
import tempfile

import jax
import numpy as np
import optax

import shardax as sx


def pair_counts(part: sx.train.TextPart) -> np.ndarray:
    """Counts of consecutive bytes, int64 (256, 256): how often byte b follows byte a."""
    counts = np.zeros(256 * 256, np.int64)
    for segment in part.segments():  # no pair reaches across two segments
        counts += np.bincount(segment[:-1] * np.int64(256) + segment[1:], minlength=256 * 256)
    if not counts.any():
        raise ValueError(f"No byte of {part!r} has a predecessor: there is nothing to predict.")
    return counts.reshape(256, 256)


def byte_entropy(part: sx.train.TextPart) -> dict[str, float]:
    """Unigram and bigram entropy of a text in nats per predicted byte, from its own counts."""
    pairs = pair_counts(part)

    def entropy(counts: np.ndarray, totals: np.ndarray) -> float:
        some = counts > 0
        information = np.log(np.broadcast_to(totals, counts.shape)[some] / counts[some])
        return float((counts[some] * information).sum() / pairs.sum())

    unigram = entropy(pairs.sum(axis=0), pairs.sum())
    bigram = entropy(pairs, pairs.sum(axis=1, keepdims=True))
    # Rounding may break what holds exactly: context never raises the entropy.
    return {"unigram": unigram, "bigram": min(bigram, unigram)}


def fitted_loss(
    training: sx.train.TextPart, held_out: sx.train.TextPart, concentration: float = 32.0
) -> dict[str, float]:
    """Held-out loss of the unigram and the bigram model counted on training text.

    One half is added to every count (Krichevsky and Trofimov, 1981). The bigram model backs off to
    the unigram model with a Dirichlet prior (MacKay and Peto, 1995): after ``concentration``
    occurrences of a byte, its own counts weigh as much.
    """
    seen, judged = pair_counts(training), pair_counts(held_out)
    unigram = (seen.sum(axis=0) + 0.5) / (seen.sum() + 128.0)
    contexts = seen.sum(axis=1, keepdims=True)
    bigram = (seen + concentration * unigram) / (contexts + concentration)
    return {
        "unigram": float(-(judged.sum(axis=0) * np.log(unigram)).sum() / judged.sum()),
        "bigram": float(-(judged * np.log(bigram)).sum() / judged.sum()),
    }


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains, prints losses, baselines and a sample, and returns the numbers by name."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model.")
    parser.add_argument("--text", help="file or folder; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--mesh", type=int, nargs=2, default=(1, 1), metavar=("DATA", "MODEL"))
    parser.add_argument("--out", help="folder for checkpoints and log; default: a temporary one")
    options = parser.parse_args(argv)

    training, held_out = sx.train.open_text(options.text).split()
    window = {"batch_size": 16, "seq_len": 64}
    evaluation = sx.train.EvalBatches(held_out, **window, max_batches=16)
    mesh = jax.make_mesh(tuple(options.mesh), ("data", "model"))

    config = sx.models.DecoderConfig(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192)
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))  # lazy: no array exists yet
    schedule = optax.cosine_onecycle_schedule(max(4, options.steps), 1e-2)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = sx.train.Trainer(
            model,
            sx.train.Optimizer(model, optax.adamw(schedule)),
            sx.models.next_token_loss,
            sx.train.TrainBatches(training, **window),
            held_out=evaluation,
            directory=options.out or temporary,
            settings=sx.train.TrainerSettings(steps=options.steps, log_every=40),
            mesh=mesh,
            rules=sx.models.DECODER_RULES,  # batch over data; heads, mlp and vocab over model
        )
        result = trainer.run()

    entropy = byte_entropy(evaluation.part)
    fitted = fitted_loss(training, evaluation.part)
    numbers = {"training loss": result.loss, "held-out loss": result.eval_loss or float("nan")}
    numbers |= {f"{name} entropy": value for name, value in entropy.items()}
    numbers |= {f"fitted {name} model": value for name, value in fitted.items()}
    for name, value in numbers.items():
        print(f"{name:22} {value:.4f} nats per byte")

    model.eval()
    (tokens,) = sx.models.generate(model, [list(b"def ")], max_new_tokens=120, temperature=0.7)
    print(f"\n{bytes(tokens.tolist()).decode(errors='replace')}")
    return numbers


if __name__ == "__main__":
    main()
