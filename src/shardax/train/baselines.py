# SPDX-License-Identifier: Apache-2.0
"""What a loss must be compared with: the entropy of the held-out text itself.

A language model's loss is the mean, over the *predicted bytes*, of minus the log of the probability
that it gave. A predicted byte is any byte that has a predecessor in its segment; the *pairs* are
(predecessor, predicted byte). Over exactly these, with counts ``c(a, b)`` of pairs, ``c(b)`` of
predicted bytes, ``c(a)`` of predecessors and ``n`` of all pairs:

- *unigram entropy*  ``H1 = -sum_b c(b)/n log(c(b)/n)``: the loss of the best model that looks at
  nothing;
- *bigram entropy*  ``H2 = -sum_ab c(a,b)/n log(c(a,b)/c(a))``: the loss of the best model that
  looks at one byte.

They are Shannon's ``F_1`` and ``F_2`` ("Prediction and Entropy of Printed English", 1951), in nats,
taken from the counts of the text on which they are the baseline (plug-in estimates). No unigram or
bigram model, however trained, has a lower loss on that text; so a model below H2 certainly uses
more than one byte of context. Always ``0 <= H2 <= H1 <= log 256``.

A *fitted* baseline is fair where these are generous: the loss of a model counted on training text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardax.train.errors import TextSourceError
from shardax.train.text import ByteText, TextPart

Counts = npt.NDArray[np.int64]
Source = TextPart | ByteText | bytes

_CHUNK = 1 << 20


@dataclass(frozen=True)
class ByteBaselines:
    """Two losses to beat, in nats per predicted byte.

    Attributes:
        unigram: Without context.
        bigram: With the previous byte as context.
        targets: How many predicted bytes they are means over.

    Example:
        >>> ByteBaselines(unigram=3.0, bigram=2.2, targets=1000).bigram
        2.2
    """

    unigram: float
    bigram: float
    targets: int


def pair_counts(text: Source) -> Counts:
    """Count the pairs of consecutive bytes, reading the text once in pieces.

    Args:
        text: Bytes, a text, or a part of one; no pair reaches across two segments.

    Returns:
        int64 array (256, 256): how often byte ``b`` follows byte ``a``, at ``[a, b]``.

    Example:
        >>> int(pair_counts(b"abab")[ord("a"), ord("b")])
        2
    """
    counts = np.zeros(256 * 256, dtype=np.int64)
    for segment in _segments(text):
        for start in range(0, segment.size - 1, _CHUNK):
            piece = segment[start : start + _CHUNK + 1].astype(np.uint16)
            counts += np.bincount(piece[:-1] * np.uint16(256) + piece[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


def byte_entropy(text: Source) -> ByteBaselines:
    """Unigram and bigram entropy of a text: what no model with so little context can beat on it.

    Args:
        text: The (held-out) text: bytes, a text, or a part of one. To compare with a limited
            evaluation, pass the ``part`` of its ``EvalBatches``.

    Returns:
        The plug-in entropies H1 and H2 of the module's docstring.

    Raises:
        TextSourceError: The text has no two consecutive bytes.

    Example:
        >>> entropy = byte_entropy(b"abababab")
        >>> round(entropy.unigram, 3), entropy.bigram, entropy.targets
        (0.683, 0.0, 7)
    """
    pairs = _nonempty(pair_counts(text), text)
    targets = int(pairs.sum())
    unigram = _neg_sum_c_log_c_over(pairs.sum(axis=0), np.array(targets)) / targets
    bigram = _neg_sum_c_log_c_over(pairs, pairs.sum(axis=1, keepdims=True)) / targets
    # Rounding may break what holds exactly: conditioning never raises the entropy.
    return ByteBaselines(unigram, min(bigram, unigram), targets)


def fitted_loss(train: Source, held_out: Source, *, concentration: float = 32.0) -> ByteBaselines:
    """Loss on held-out text of the unigram and the bigram model counted on training text.

    The unigram model adds one half to every count (Krichevsky and Trofimov, 1981). The bigram model
    backs off to it: ``p(b|a) = (c(a,b) + k p(b)) / (c(a) + k)``, the Dirichlet prior of MacKay and
    Peto ("A hierarchical Dirichlet language model", 1995).

    Args:
        train: Text to count on.
        held_out: Text to judge on.
        concentration: ``k`` above: after how many occurrences of a byte its own counts weigh as
            much as the unigram model.

    Returns:
        The two losses, each at least the ``byte_entropy`` of ``held_out``.

    Raises:
        TextSourceError: One of the texts has no two consecutive bytes, or ``concentration`` is not
            above 0.

    Example:
        >>> losses = fitted_loss(b"abcd" * 100, b"abcd" * 10)
        >>> losses.bigram < losses.unigram
        True
    """
    if not concentration > 0:
        raise TextSourceError(
            f"concentration must be above 0, got {concentration}. For example 32.0."
        )
    seen = _nonempty(pair_counts(train), train)
    judged = _nonempty(pair_counts(held_out), held_out)
    unigram = (seen.sum(axis=0) + 0.5) / (seen.sum() + 128.0)
    contexts = seen.sum(axis=1, keepdims=True)
    bigram = (seen + concentration * unigram) / (contexts + concentration)
    targets = int(judged.sum())
    return ByteBaselines(
        unigram=float(-(judged.sum(axis=0) * np.log(unigram)).sum() / targets),
        bigram=float(-(judged * np.log(bigram)).sum() / targets),
        targets=targets,
    )


def _segments(text: Source) -> Iterable[npt.NDArray[np.uint8]]:
    if isinstance(text, TextPart):
        return text.segments()
    if isinstance(text, ByteText):
        return [text.data]
    return [np.frombuffer(text, dtype=np.uint8)]


def _nonempty(pairs: Counts, text: Source) -> Counts:
    if not pairs.any():
        raise TextSourceError(
            f"No byte of {text!r} has a predecessor, so there is nothing to predict. Pass a text "
            "with segments of two bytes or more."
        )
    return pairs


def _neg_sum_c_log_c_over(counts: Counts, totals: Counts) -> float:
    """-sum c log(c / total) over the counts above 0; totals broadcast to them."""
    present = counts > 0
    some = counts[present]
    return float((some * np.log(np.broadcast_to(totals, counts.shape)[present] / some)).sum())
