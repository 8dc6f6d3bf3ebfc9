# SPDX-License-Identifier: Apache-2.0
"""What a process of the planner does: reads a step once, and asks a compiler about layouts of it.

A *task* is a step, its arguments as shapes, a target and how to compile, in the bytes of
``shardax.host.dumps``; it is known by a digest of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardax.core.errors import CompilerMissingError, PlanError
from shardax.host.pickling import loads
from shardax.plan.cache import ProgramCache
from shardax.plan.evaluate import evaluate
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport, to_data


@functools.lru_cache(maxsize=4)
def _task(data: bytes) -> tuple[Inputs, dict[str, Any], ProgramCache | None]:
    step, args, options, folder = loads(data)
    return Inputs(step, args), options, None if folder is None else ProgramCache(Path(folder))


def ask(data: bytes, layout: Layout, effort: str) -> tuple[Mapping[str, Any], bool]:
    """Asks a compiler about a layout.

    Args:
        data: The task.
        layout: The layout.
        effort: ``"screen"`` or ``"full"``.

    Returns:
        The report, as JSON data; whether the compiled program was kept from before.

    Raises:
        PlanError: If the step or its arguments are at fault, whatever the layout.
        CompilerMissingError: If the compiler is not installed.
    """
    inputs, options, cache = _task(data)
    before = cache.found if cache else 0
    try:
        report = evaluate(
            inputs.step, (), layout, effort=effort, inputs=inputs, cache=cache, **options
        )
    except (PlanError, CompilerMissingError):
        raise
    except Exception as error:  # noqa: BLE001 (one layout that breaks a compiler ends no search)
        report = LayoutReport(layout, "failed", f"{type(error).__name__}: {error}")
    return to_data(report), bool(cache and cache.found > before)
