# SPDX-License-Identifier: Apache-2.0
"""A check of compiled calls that users turn on: ``sx.configure(debug_processes=True)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardax._core.graph.paths import PyTree
from shardax._transforms.lift.signatures import parameter_name

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import Jit

# Not empty while calls compare their arguments over processes. Every call is then a slow one.
comparing: list[bool] = []


def compare_over_processes(jit: Jit, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
    """Raises DistributedError if numbers given to a call differ over processes."""
    from shardax.distributed.processes import compare_arguments

    labels = [parameter_name(jit.function, i) for i in range(len(args))]
    arguments_by_name = dict(zip(labels, args, strict=True)) | dict(kwargs)
    compare_arguments(arguments_by_name, f"a call of {jit!r}")
