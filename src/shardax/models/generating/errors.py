# SPDX-License-Identifier: Apache-2.0
"""Errors of generation, and their texts."""

from __future__ import annotations

from collections.abc import Sequence

from shardax.errors import ShardaxError


class GenerationError(ShardaxError, ValueError):
    """Tokens cannot be generated.

    A prompt is empty or has tokens that the model has not, an option is out of range, or logits are
    NaN.
    """


def inside_a_program() -> GenerationError:
    """Returns the error of a call that is traced."""
    return GenerationError(
        "generate was called while a function is traced, such as by sx.jit or jax.jit. It runs two "
        "compiled programs and returns NumPy arrays of different lengths, so call it outside. For "
        "a loop of one's own, within a program, there is model.make_cache."
    )


def no_token(token: object) -> GenerationError:
    """Returns the error of a ``GenerationConfig`` with something else than a token."""
    return GenerationError(
        f"GenerationConfig has the token {token!r}, but tokens are integers from 0 up, in int32."
    )


def no_generation_config(config: object) -> GenerationError:
    """Returns the error of a model whose ``generation_config`` is something else."""
    return GenerationError(
        f"model.generation_config is a {type(config).__name__}, but it is read as a "
        "sx.models.GenerationConfig. Set one: `model.generation_config = "
        "sx.models.GenerationConfig(stop=(2,))`."
    )


def table_of_a_tokenizer(names: Sequence[str]) -> GenerationError:
    """Returns the error of a mapping where prompts were expected."""
    listed = ", ".join(names)
    return GenerationError(
        f"The prompts are a mapping with {listed}. Give its arrays: generate(model, "
        f"batch['input_ids'], mask=batch['attention_mask'], ...)."
    )


def misfit_of_mask(name: str, mask: Sequence[int], tokens: Sequence[int]) -> GenerationError:
    """Returns the error of a mask that is not of the tokens' shape."""
    return GenerationError(
        f"{name} has the shape {tuple(mask)}, but the tokens have the shape {tuple(tokens)}. A "
        f"mask has one entry for each token: True, or 1, for the real ones."
    )


def mask_of_ragged_rows(name: str) -> GenerationError:
    """Returns the error of a mask beside rows of different lengths."""
    return GenerationError(
        f"{name} is for tokens that are padded to one length, but the rows differ in length. Leave "
        f"it out: of rows of different lengths all tokens are real."
    )


def no_boolean_mask(name: str, dtype: object, example: object) -> GenerationError:
    """Returns the error of a mask of other values than true and false."""
    return GenerationError(
        f"{name} has the dtype {dtype} and the value {example!r}. It has True, or 1, for real "
        f"tokens and False, or 0, for padding; of an additive mask give mask == 0."
    )


def mask_with_holes(name: str, row: int, mask: Sequence[bool]) -> GenerationError:
    """Returns the error of a row with padding between real tokens."""
    text = "".join("01"[bool(is_real)] for is_real in mask[:64])
    more = "..." if len(mask) > 64 else ""
    return GenerationError(
        f"{name} has padding between the real tokens of row {row}: {text}{more}. A prompt is read "
        f"as one text; pad on the left or on the right."
    )


def empty_row(name: str, row: int) -> GenerationError:
    """Returns the error of a row without real tokens."""
    return GenerationError(
        f"{name} has no real token in row {row}; a prompt has at least one token to continue from."
    )


def mask_of_inputs() -> GenerationError:
    """Returns the error of a mask of prompts where there are none."""
    return GenerationError(
        "mask= is of the prompts, and there are none. Padding of the inputs is said by input_mask=."
    )


def padding_as_text(token: int, rows: Sequence[int], name: str = "prompts") -> str:
    """Returns the warning of tokens of padding that are read as text."""
    listed = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return (
        f"The {name} {listed} begin or end with the token {token}, which is the model's padding "
        f"(generation_config.pad), and no mask says so: it is read as text. Give mask={name} != "
        f"{token}, or the attention_mask of the tokenizer."
    )
