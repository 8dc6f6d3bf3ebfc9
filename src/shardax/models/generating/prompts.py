# SPDX-License-Identifier: Apache-2.0
"""What generation reads: rows of tokens, from lists of any lengths or from padded arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from shardax.extend import warn_user
from shardax.models.generating import errors
from shardax.models.generating.errors import GenerationError

# Integers of one row, without padding.
Row: TypeAlias = np.ndarray
TokenRows: TypeAlias = "Sequence[object] | np.ndarray | jax.Array"
TokenMask: TypeAlias = "Sequence[object] | np.ndarray | jax.Array | None"


def read_rows(tokens: TokenRows, mask: TokenMask = None, *, name: str = "prompt") -> list[Row]:
    """Returns the real tokens of each row, as int32.

    Args:
        tokens: Sequences of integers, of any lengths; or, with a mask, of one length.
        mask: True, or 1, for real tokens.
        name: What a row is, for messages.

    Returns:
        A list of arrays of one dimension.

    Raises:
        GenerationError: If a row is empty or holds other than integers from 0 up; or the mask does
            not fit, or has padding between real tokens.
    """
    hint = f"Give a list of {name}s, each a sequence of integers; of a text list(text.encode())."
    if isinstance(tokens, Mapping):
        raise errors.table_of_a_tokenizer([str(name) for name in tokens])
    if isinstance(tokens, (str, bytes)) or not hasattr(tokens, "__iter__"):
        raise GenerationError(f"The {name}s must be a list, but are {tokens!r}. {hint}")

    # An array is copied to the host as a whole, and not row by row.
    rows = [np.asarray(row) for row in _on_host(tokens)]
    if not rows:
        raise GenerationError(f"There are no {name}s. {hint}")
    if mask is not None:
        rows = _real_tokens(rows, mask, "mask" if name == "prompt" else f"{name}_mask")

    for row in rows:
        if row.ndim == 1 and row.size == 0:
            after = " to continue from" if name == "prompt" else ""
            article = "A" if name == "prompt" else "An"
            raise GenerationError(f"{article} {name} is empty; give at least one token{after}.")
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            raise GenerationError(
                f"Each {name} must be a sequence of integers, one per token, but one is an array "
                f"of shape {row.shape} and dtype {row.dtype}. {hint}"
            )
        if row.min() < 0:
            raise GenerationError(f"Tokens must not be negative, but a {name} has {row.min()}.")
        if row.max() > np.iinfo(np.int32).max:
            raise GenerationError(f"Tokens are int32, but a {name} has {row.max()}.")
    return [row.astype(np.int32) for row in rows]


def _on_host(tokens: TokenRows) -> TokenRows:
    return np.asarray(tokens) if hasattr(tokens, "ndim") else tokens


def _real_tokens(rows: list[Row], mask: TokenMask, name: str) -> list[Row]:
    """Returns the rows without what a mask says is padding."""
    lengths = {row.shape for row in rows}
    if len(lengths) > 1:
        raise errors.mask_of_ragged_rows(name)

    flags = np.asarray(mask)
    if flags.shape != (len(rows), *lengths.pop()):
        raise errors.misfit_of_mask(name, flags.shape, (len(rows), *rows[0].shape))
    is_real = flags.astype(bool)
    if flags.dtype != bool:
        wrong = flags[(flags != 0) & (flags != 1)]
        if wrong.size or not np.issubdtype(flags.dtype, np.integer):
            example = (wrong if wrong.size else flags).flat[0].item()
            raise errors.no_boolean_mask(name, flags.dtype, example)

    for index, row in enumerate(is_real):
        places = np.flatnonzero(row)
        if not places.size:
            raise errors.empty_row(name, index)
        if places[-1] - places[0] + 1 != places.size:
            raise errors.mask_with_holes(name, index, row.tolist())
    return [row[real] for row, real in zip(rows, is_real, strict=True)]


def warn_of_padding(tokens: TokenRows, pad: int | None, ends: Sequence[int], name: str) -> None:
    """Warns if rows of an array differ in how much padding they begin or end with."""
    if pad is None or getattr(tokens, "ndim", 0) != 2:
        return

    is_pad = np.asarray(tokens) == pad
    is_text = ~is_pad
    width = is_pad.shape[1]
    has_text = is_text.any(axis=1)
    before = np.where(has_text, is_text.argmax(axis=1), width)
    behind = np.where(has_text, is_text[:, ::-1].argmax(axis=1), width)

    # A text may well end with its end, which is padding too in many models.
    allowed = 1 if pad in ends else 0
    rows = np.flatnonzero(np.maximum(before, behind) > allowed)
    are_alike = len({*zip(before.tolist(), behind.tolist(), strict=True)}) == 1
    if rows.size and not are_alike:
        warn_user(errors.padding_as_text(pad, rows.tolist(), name))
