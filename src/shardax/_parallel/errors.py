# SPDX-License-Identifier: Apache-2.0
"""Texts of errors of pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from shardax.errors import ModuleError
from shardax.extend import Path, format_path


def stages_over_several_axes(axis_name: str, axes: Sequence[str]) -> ModuleError:
    """Returns the error for rules that lay a stack over several mesh axes."""
    return ModuleError(
        f"The rules lay {axis_name!r} over the mesh axes {', '.join(map(repr, axes))}, but a "
        f"pipeline has its stages along one. Give it one: ({axis_name!r}, {axes[0]!r})."
    )


def layers_not_divided(axis_name: str, axis: str, count: int, length: int) -> ModuleError:
    """Returns the error for ``length`` layers over a mesh axis of ``count`` stages."""
    return ModuleError(
        f"The rules lay {axis_name!r} over the mesh axis {axis!r} of {count} stages, but "
        f"{length} layers cannot be divided over them. Make a stack of a multiple of {count} "
        f"layers, or take {axis_name!r} out of the rules."
    )


def no_rows(shapes: Sequence[tuple[int, ...]]) -> ModuleError:
    """Returns the error for an input of arrays that have not one number of rows."""
    return ModuleError(
        f"A stack with microbatches cuts its input into rows, but was given arrays of the "
        f"shapes {', '.join(map(str, shapes)) or 'of none'}, which have no first dimension of "
        "one size."
    )


def rows_not_divided(rows: int, count: int) -> ModuleError:
    """Returns the error for rows that cannot be cut into microbatches."""
    return ModuleError(
        f"{rows} rows cannot be cut into {count} microbatches of equal size. Give the stack a "
        f"batch of a multiple of {count} rows, or another number of microbatches."
    )


def rows_or_another_dimension(rows: int, shapes: Sequence[tuple[int, ...]]) -> ModuleError:
    """Returns the error for arguments of which it is not known whether they have rows."""
    return ModuleError(
        f"The input of the stack has {rows} rows and another dimension of size {rows}, so it does "
        f"not show whether arguments of the shapes {', '.join(map(str, shapes))} have a row for "
        "each of its rows. Give those that all rows share a first dimension of size 1, such as "
        "mask[None]; or use another batch size."
    )


def variables_taken_away(paths: Iterable[Path]) -> ModuleError:
    """Returns the error for layers that delete Variables."""
    return ModuleError(
        f"The layers of a stack with microbatches took away {_listed(paths)}. They may "
        "write Variables and add some, but take none away."
    )


def shared_variables_written(paths: Iterable[Path]) -> ModuleError:
    """Returns the error for layers that write what they share."""
    return ModuleError(
        f"The layers of a stack with microbatches wrote {_listed(paths)}, which they "
        "share. A later microbatch is in work while an earlier one still writes it, so the "
        "order would be another one. Give each layer its own, or take microbatches= away."
    )


def sown_values_not_joined(
    path: Path, parts: jax.Array, count: int, shape: Sequence[int]
) -> ModuleError:
    """Returns the error for sown values that are neither rows nor numbers to average.

    Args:
        path: Where they were sown.
        parts: Those of the microbatches, (microbatches, layers, ...).
        count: The number of microbatches.
        shape: Shape of the value of one layer for a whole batch.
    """
    return ModuleError(
        f"Layers of a stack sowed {parts.dtype}{[*parts.shape[2:]]} at {format_path(path)} for "
        f"each of {count} microbatches, and {[*shape]} for a whole batch: neither rows, which are "
        "put together again, nor real numbers, which are averaged. Sow something else, or take "
        "microbatches= away."
    )


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(format_path, sorted(paths, key=str)))
