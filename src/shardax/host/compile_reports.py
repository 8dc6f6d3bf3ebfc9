# SPDX-License-Identifier: Apache-2.0
"""Reports of compilations: programs, times, cache hits.

A *hit* is a program read from JAX's persistent cache, a *miss* one that was compiled although the
cache was asked. A miss is *stored* if it took long enough to compile
(``jax_persistent_cache_min_compile_time_secs``) and calls nothing on the host.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Self

import jax

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"
_STORED = "/jax/compilation_cache/cache_misses"  # JAX counts those that it writes
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"
_SHOWN = 12  # programs in the text of a report


@dataclasses.dataclass
class CompiledProgram:
    """One program, compiled or read from the persistent cache.

    Attributes:
        name: The function's name.
        seconds: How long compiling or reading it took.
        cache: ``"hit"``, ``"stored"``, ``"not stored"``, or ``"off"`` where there is no cache.
        saved: Seconds that a hit saved.

    Example:
        >>> print(CompiledProgram("step", 2.25, "stored"))
        2.250 s  stored      step
    """

    name: str
    seconds: float
    cache: str
    saved: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s  {self.cache:<10}  {self.name}"


class CompileReport:
    """Programs compiled during its run; made by ``compile_report``.

    Attributes:
        programs: Every program, in the order in which they were done.
        trace_seconds: Time spent tracing, by all threads.
        lower_seconds: Time spent lowering.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> with compile_report() as report:
        ...     def triple(x):
        ...         return x * 3
        ...     _ = jax.jit(triple).lower(jnp.ones(2)).compile()
        >>> report.programs[-1].name
        'triple'
    """

    def __init__(self) -> None:
        self.programs: list[CompiledProgram] = []
        self.trace_seconds = 0.0
        self.lower_seconds = 0.0
        self._pending = threading.local()  # what the cache said, until its program is done
        self._running = False

    def start(self) -> Self:
        """Begins to listen, or goes on; returns the report."""
        if not self._running:
            self._running = True
            jax.monitoring.register_event_listener(self._on_event)
            jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def stop(self) -> None:
        """Stops listening; the counts stay."""
        if self._running:
            self._running = False
            jax.monitoring.unregister_event_listener(self._on_event)
            jax.monitoring.unregister_event_duration_listener(self._on_duration)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def hits(self) -> int:
        """Number of programs from the persistent cache."""
        return sum(program.cache == "hit" for program in self.programs)

    @property
    def misses(self) -> int:
        """Number of programs absent from the persistent cache."""
        return sum(program.cache in ("stored", "not stored") for program in self.programs)

    @property
    def stored(self) -> int:
        """Number of misses put into the cache."""
        return sum(program.cache == "stored" for program in self.programs)

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling, or reading from the cache."""
        return sum(program.seconds for program in self.programs)

    @property
    def saved_seconds(self) -> float:
        """Time saved by the hits, from the compile times stored with them."""
        return sum(program.saved for program in self.programs)

    @property
    def seconds(self) -> float:
        """Time spent tracing, lowering and compiling."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    def __str__(self) -> str:
        count = len(self.programs)
        head = (
            f"{_counted(count, 'program', 'programs')} in {self.seconds:.3f} s: "
            f"{self.trace_seconds:.3f} s tracing, {self.lower_seconds:.3f} s lowering, "
            f"{self.compile_seconds:.3f} s compiling"
        )

        if any(program.cache != "off" for program in self.programs):
            cache = (
                f"persistent cache: {_counted(self.hits, 'hit', 'hits')}, which saved "
                f"{self.saved_seconds:.3f} s; {_counted(self.misses, 'miss', 'misses')}, "
                f"{self.stored} of them stored"
            )
        else:
            cache = "persistent cache: not used (sx.configure(cache_dir=...) turns it on)"

        slowest = sorted(self.programs, key=lambda program: -program.seconds)[:_SHOWN]
        omitted = [f"  ... {count - _SHOWN} more"] if count > _SHOWN else []
        return "\n".join([head, cache, *(f"  {program}" for program in slowest), *omitted])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.programs)} programs>"

    # --- events of JAX ---

    def _on_event(self, event: str, **_: object) -> None:
        outcome = {_ASKED: "not stored", _HIT: "hit", _STORED: "stored"}.get(event)
        has_folder = jax.config.values["jax_compilation_cache_dir"] is not None
        if outcome is not None and has_folder:  # JAX asks its cache also where it has none
            self._pending.cache = outcome

    def _on_duration(self, event: str, duration_secs: float, **told: object) -> None:
        if event == _TRACE:
            self.trace_seconds += duration_secs
        elif event == _LOWER:
            self.lower_seconds += duration_secs
        elif event == _SAVED:
            self._pending.saved = duration_secs
        elif event == _COMPILE:
            said = vars(self._pending)
            name = str(told.get("fun_name", "a program"))
            name = name.removeprefix("jit(").removesuffix(")")
            cache, saved = said.get("cache", "off"), said.get("saved", 0.0)
            self.programs.append(CompiledProgram(name, duration_secs, cache, saved))
            said.clear()


def _counted(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def compile_report() -> CompileReport:
    """Reports compilations from now on: programs, times, cache hits.

    Returns:
        A report that has been started. As a context manager it stops with the block; else it goes
        on until its ``stop()``. Printing it shows the totals and the slowest programs.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> with sx.host.compile_report() as report:
        ...     _ = jax.jit(lambda x: x * 5).lower(jnp.ones(2)).compile()
        >>> len(report.programs), report.compile_seconds > 0
        (1, True)
    """
    return CompileReport().start()
