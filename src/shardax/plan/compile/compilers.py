# SPDX-License-Identifier: Apache-2.0
"""Compilers for hardware that need not be there.

A *tier* says how much of a compiler it is. ``"target compiler"`` compiles for the hardware itself:
XLA with libtpu for TPUs, with the CUDA plugin for NVIDIA GPUs, with LLVM for CPUs. A ``"cpu
estimate"`` stands in where that is not installed. *Effort* is how long a compiler may try:
``"screen"`` is for ranking many layouts, ``"full"`` is how the program will be compiled to run.

XLA's partitioner writes to the error stream when it finds no collective from one sharding to
another, and replicates the array to split it anew (*involuntary full rematerialization*). That is
no error, and no figure but the bytes shows it, so the message is read where the stream is a file,
as in processes of the planner.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import importlib.util
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardax.hlo.program import CompilerFailedError, op_name
from shardax.plan.errors import CompilerMissingError, PlanInputError
from shardax.plan.hardware.targets import Target

_STDERR = 2
_REMATERIALIZATION = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to "
    r"(\{.*?\}) efficiently for HLO operation %?\S+ = (\S+?)(?:\{[\d,]*\})? (.*?)\. As the last "
    r"resort"
)


AxisTypes = AxisType | Mapping[str, AxisType] | Sequence[AxisType] | None


@dataclass(frozen=True)
class CompileResult:
    """A compiled program, or why there is none."""

    text: str | None  # the HLO of one device; None if it does not fit
    # By the compiler. Of a program that does not fit, what it asks for, which may leave out
    # the arguments.
    peak_bytes: int | None
    temp_bytes: int | None  # of the peak, what is neither arguments nor results
    out_of_memory: str | None  # the compiler's message, if the program does not fit
    seconds: float
    estimate: bool = False  # whether the text is the partitioner's, still to be rewritten
    full_rematerializations: tuple[tuple[str, str], ...] = ()


class TargetCompiler(abc.ABC):
    """A compiler for a target, made by ``compiler_for``."""

    target: Target
    tier: str = "target compiler"
    screen_options: ClassVar[Mapping[str, Any]] = {}  # of XLA, with the effort "screen"

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def label(self) -> str:
        """Name and version, such as ``"libtpu 0.0.42.1"``."""
        return next(each.label for each in known_compilers() if each.kind == self.target.kind)

    @property
    def devices_needed(self) -> int:
        """CPU devices that the process needs; 0 if any number will do."""
        return 0

    def mesh(self, sizes: Mapping[str, int], axis_types: AxisTypes = None) -> Mesh:
        """Returns a mesh over the target's devices, ``Auto`` by default."""
        self.target.check_mesh(sizes)
        if axis_types is None or isinstance(axis_types, AxisType):
            types = (axis_types or AxisType.Auto,) * len(sizes)
        elif isinstance(axis_types, Mapping):
            types = tuple(axis_types.get(name, AxisType.Auto) for name in sizes)
        else:
            types = tuple(axis_types)
        return Mesh(self._devices(sizes), tuple(sizes), axis_types=types)

    def compile(self, lowered: jax.stages.Lowered, effort: str = "screen") -> CompileResult:
        """Compiles a function that was lowered over this compiler's mesh."""
        if effort not in ("screen", "full"):
            raise PlanInputError(f"effort is 'screen' or 'full', not {effort!r}.")
        messages = record_stderr()
        result = self._compile(lowered, effort)
        # A cached one holds those of its compilation.
        found = result.full_rematerializations or full_rematerializations(messages())
        return dataclasses.replace(result, full_rematerializations=found)

    def environment(self) -> dict[str, str]:
        """Returns environment variables for a process, needed before it imports jax."""
        return {
            "JAX_PLATFORMS": "cpu",
            # Nobody would ever run the programs that JAX's own cache would keep.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            # Warnings are read; that hardware is not found is no news.
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }

    @abc.abstractmethod
    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        """Devices in the form of the mesh."""

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompileResult:
        start = time.perf_counter()
        try:
            compiled = with_options(lowered, self.screen_options if effort == "screen" else {})
        except Exception as error:  # of jaxlib's own class
            seconds = time.perf_counter() - start
            requested = self._requested_bytes(str(error))
            if requested is not None:  # the first lines, without the list of every buffer
                message = "\n".join(str(error).strip().splitlines()[:12])
                return CompileResult(None, requested, None, message, seconds)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            more = f"\n  (and {len(lines) - 20} lines more)" if len(lines) > 20 else ""
            raise CompilerFailedError(
                f"{self.label} ended with: " + "\n".join(lines[:20]) + more
            ) from error
        seconds = time.perf_counter() - start
        peak, temporaries = self._memory(compiled)
        return CompileResult(compiled.as_text(), peak, temporaries, None, seconds)

    def _requested_bytes(self, message: str) -> int | None:
        """The memory that a program asks for, from an out-of-memory error."""
        return None

    def _memory(self, compiled: Any) -> tuple[int, int]:
        """Bytes of the peak and of its temporaries, as XLA allocates them."""
        # Arguments, results that do not take the place of arguments, and one buffer of temporaries
        # are there at the same time.
        found = compiled.memory_analysis()
        own = found.output_size_in_bytes - found.alias_size_in_bytes
        temporaries = int(found.temp_size_in_bytes)
        return int(found.argument_size_in_bytes) + max(int(own), 0) + temporaries, temporaries


def record_stderr() -> Callable[[], str]:
    """Returns a function for what is written to stderr from now on."""

    def size() -> int | None:
        try:
            found = os.fstat(_STDERR)
        except OSError:  # it is closed
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    start = size()

    def written() -> str:
        end = size()
        if start is None or end is None:
            return ""
        try:
            return os.pread(_STDERR, end - start, start).decode(errors="replace")
        except OSError:  # it is open for writing only
            return ""

    return written


def full_rematerializations(text: str) -> tuple[tuple[str, str], ...]:
    """Returns operations or arguments, and changes of sharding, from messages."""
    found: dict[tuple[str, str], None] = {}
    for each in _REMATERIALIZATION.finditer(text):
        found[op_name(each[4]), f"{each[3]} from {each[1]} to {each[2]}"] = None
    return tuple(found)


def rematerialization_warnings(
    found: tuple[tuple[str, str], ...], paths: Mapping[str, str], sources: Mapping[str, str]
) -> list[str]:
    """Returns warnings, with paths of arguments and lines of operations."""
    said: list[str] = []
    for name, change in found:
        is_argument = name and "/" not in name  # operations have that of what they are in
        result = f"The result of {name or 'an operation'}"
        what = paths.get(name, name) if is_argument else result
        where = f" at {sources[name]}" if sources.get(name) else ""
        said.append(
            f"{what}{where} is made whole on every device to be split in another way: XLA knows no "
            "exchange for it. Rules that split the same dimensions before and after, or a "
            f"constraint half-way, avoid that ({change})."
        )
    return list(dict.fromkeys(said))


@dataclass(frozen=True)
class CompilerInfo:
    """A compiler that may be installed."""

    kind: str  # of the targets that it compiles for
    installed: bool
    label: str  # name and version, if it is installed
    install: str  # the command that installs it
    note: str  # what to know before that


def compiler_for(target: Target, *, compiler: str = "auto") -> TargetCompiler:
    """Returns the compiler of a target.

    Args:
        target: The target.
        compiler: ``"auto"``: the target's own if it is installed, else the CPU estimate.
            ``"target"``: the target's own. ``"estimate"``: the CPU estimate; of CPU devices there
            is none.

    Raises:
        CompilerMissingError: The target's own is asked for and not installed; names the extra.

    Example:
        >>> from shardax import plan
        >>> compiler = plan.compiler_for(plan.Target.parse("cpu:8"))
        >>> compiler.tier, compiler.devices_needed
        ('target compiler', 8)
        >>> compiler.mesh({"data": 2, "model": 4}).devices.shape
        (2, 4)
    """
    from shardax.plan.compile import backends

    if compiler not in ("auto", "target", "estimate"):
        raise PlanInputError(f"compiler is 'auto', 'target' or 'estimate', not {compiler!r}.")
    if target.kind == "cpu":
        return backends.CpuCompiler(target)
    info = {each.kind: each for each in known_compilers()}[target.kind]
    if compiler == "estimate" or (compiler == "auto" and not info.installed):
        return backends.EstimateCompiler(target)
    if not info.installed:
        raise CompilerMissingError(
            f"The compiler of {target.text!r} is not installed: {info.install}. {info.note} "
            "compiler='estimate' does without, by XLA's partitioner on virtual CPU devices."
        )
    return backends.TpuCompiler(target) if target.kind == "tpu" else backends.GpuCompiler(target)


def known_compilers() -> tuple[CompilerInfo, ...]:
    """Returns the compilers, whether installed, and how to install them.

    Example:
        >>> from shardax import plan
        >>> [each.kind for each in plan.known_compilers()]
        ['cpu', 'tpu', 'gpu']
    """

    def version(distribution: str, module: str) -> str:
        try:
            found = importlib.util.find_spec(module)
            return metadata.version(distribution) if found else ""
        except (ModuleNotFoundError, metadata.PackageNotFoundError):
            return ""

    libtpu = version("libtpu", "libtpu")
    plugin = ""
    for cuda in ("cuda12", "cuda13"):
        number = version(f"jax-{cuda}-plugin", f"jax_plugins.xla_{cuda}")
        plugin = f"jax-{cuda}-plugin {number}" if number else plugin
    return (
        CompilerInfo("cpu", True, f"XLA:CPU of jaxlib {metadata.version('jaxlib')}", "", ""),
        CompilerInfo(
            "tpu",
            bool(libtpu),
            f"libtpu {libtpu}" if libtpu else "",
            "pip install 'shardax[plan-tpu]'",
            "libtpu is proprietary, under the Google Cloud Platform Terms of Service.",
        ),
        CompilerInfo(
            "gpu",
            bool(plugin),
            f"XLA:GPU of {plugin}" if plugin else "",
            "pip install 'shardax[plan-gpu]'",
            "It needs neither a GPU nor a driver.",
        ),
    )


def with_options(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compiles with options of XLA, or without if it knows none such."""
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except Exception as error:  # of jaxlib's own class
        if options and "No such compile option" in str(error):
            return lowered.compile()
        raise


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str], override: bool = True) -> Iterator[None]:
    """Sets environment variables; those that are set already only to override them."""
    before = {name: os.environ.get(name) for name in variables}
    changed = {name: v for name, v in variables.items() if override or before[name] is None}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: v for name, v in before.items() if v is not None})
