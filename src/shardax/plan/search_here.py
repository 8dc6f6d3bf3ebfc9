# SPDX-License-Identifier: Apache-2.0
"""Who asks the compiler: processes of their own, or this process where it has the devices itself.

Starting processes takes seconds each. A program for as many CPU devices as this process has is
compiled here, unless a number of processes is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import jax

from shardax.plan.cache import ProgramCache, cache_folder
from shardax.plan.compilers import compiler_for
from shardax.plan.evaluate import evaluate
from shardax.plan.inputs import Inputs
from shardax.plan.pool import Answer, Pool
from shardax.plan.records import Layout
from shardax.plan.targets import Target


class Here:
    """Like a ``Pool``, in this process.

    Args:
        inputs: The step and its arguments.
        target: The hardware.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``.
        cache: Folder for compiled programs, ``"default"``, or None.
    """

    def __init__(self, inputs: Inputs, target: Target, compiler: str, cache: Any) -> None:
        folder = cache_folder(cache)
        self._inputs = inputs
        self._options: dict[str, Any] = {"target": target, "compiler": compiler}
        self._cache = None if folder is None else ProgramCache(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends nothing."""

    def take(self, inputs: Inputs) -> None:
        """See ``Pool``."""
        self._inputs = inputs

    def answers(
        self,
        layouts: Iterable[Layout],
        effort: str = "screen",
        *,
        begun: Callable[[Layout], None] | None = None,
    ) -> Iterator[Answer]:
        """See ``Pool``."""
        for index, layout in enumerate(layouts):
            if begun is not None:
                begun(layout)
            before = self._cache.found if self._cache else 0
            report = evaluate(
                self._inputs.step,
                (),
                layout,
                effort=effort,
                inputs=self._inputs,
                cache=self._cache,
                **self._options,
            )
            yield Answer(index, report, bool(self._cache and self._cache.found > before))


def asker(
    inputs: Inputs, target: Target, compiler: str, processes: int | None, cache: Any
) -> Here | Pool:
    """Returns who asks the compiler, as a context manager.

    Args:
        inputs: The step and its arguments.
        target: The hardware.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``.
        processes: How many processes; None for one per core, or none where none is needed.
        cache: Folder for compiled programs, ``"default"``, or None.
    """
    needed = compiler_for(target, compiler=compiler).devices_needed
    if processes is None and 0 < needed <= len(jax.devices("cpu")):
        return Here(inputs, target, compiler, cache)
    return Pool(
        inputs.step, (), target, compiler=compiler, processes=processes, cache=cache, inputs=inputs
    )
