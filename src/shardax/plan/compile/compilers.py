# SPDX-License-Identifier: Apache-2.0
"""Compilers for hardware that is not there: which one a target has, and what they have in common.

A *tier* says how much of a compiler it is. ``"target compiler"`` is the one that will compile the
program for the hardware: XLA with libtpu for TPUs, with the CUDA plugin for NVIDIA GPUs, with LLVM
for CPUs. ``"cpu estimate"`` stands in where that is not installed: the program as XLA partitions it
for as many virtual CPU devices, with the rewrites that the target's compiler is known to make.

*Effort* is how long a compiler may try. ``"screen"`` is for ranking many layouts, ``"full"`` is how
the program will be compiled to run.

What a compiler says while it works, where that can be read.

XLA's partitioner writes to the error stream when it finds no exchange from one sharding to another,
and makes the array *whole* on every device to cut it anew. That is no error, so no figure but the
bytes shows it. Processes of the planner write into a file that they can read again; where the error
stream is a terminal, the message stays there.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardax.hlo.program import CompilerFailedError, op_name
from shardax.plan.errors import CompilerMissingError, PlanInputError
from shardax.plan.hardware.targets import Target

# --- Compiler messages ---

_STDERR = 2
_WHOLE = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to "
    r"(\{.*?\}) efficiently for HLO operation %?\S+ = (\S+?)(?:\{[\d,]*\})? (.*?)\. As the last "
    r"resort"
)


def listen() -> Callable[[], str]:
    """Returns a function that returns what was written to the error stream since; "" if unknown.

    Example:
        >>> heard = listen()
        >>> isinstance(heard(), str)
        True
    """
    start = _end()

    def heard() -> str:
        end = _end()
        if start is None or end is None:
            return ""
        try:
            return os.pread(_STDERR, end - start, start).decode(errors="replace")
        except OSError:  # it is open for writing only
            return ""

    return heard


def _end() -> int | None:
    """How long the error stream is, if it is a file."""
    try:
        found = os.fstat(_STDERR)
    except OSError:  # it is closed
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def made_whole(text: str) -> tuple[tuple[str, str], ...]:
    """Returns which arrays the partitioner made whole, by what it wrote.

    Args:
        text: What a compiler wrote.

    Returns:
        For each, once: the traced operation or argument that it is the result of, or ""; and its
        type with both shardings, as XLA writes them.

    Example:
        >>> made_whole(
        ...     "W0 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The "
        ...     "compiler cannot go from sharding {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]} "
        ...     "efficiently for HLO operation %a = f32[8,16]{1,0} add(%b, %c), "
        ...     'metadata={op_name="jit(f)/add"}. As the last resort, SPMD will replicate ...'
        ... )
        (('jit(f)/add', 'f32[8,16] from {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]}'),)
    """
    found: dict[tuple[str, str], None] = {}
    for each in _WHOLE.finditer(text):
        found[op_name(each[4]), f"{each[3]} from {each[1]} to {each[2]}"] = None
    return tuple(found)


def whole_warnings(
    found: tuple[tuple[str, str], ...], paths: Mapping[str, str], sources: Mapping[str, str]
) -> list[str]:
    """Returns the warnings for arrays that were made whole.

    Args:
        found: As ``made_whole`` returns them.
        paths: Of arguments, by JAX's name of them.
        sources: Lines of model code, by traced operation.

    Example:
        >>> found = (("jit(f)/add", "f32[8] from {..} to {..}"),)
        >>> whole_warnings(found, {}, {"jit(f)/add": "m.py:3"})[0][:60]
        'The result of jit(f)/add at m.py:3 is made whole on every de'
    """
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


# --- Compilers ---

Which = Literal["auto", "target", "estimate"]
Effort = Literal["screen", "full"]
AxisTypes = AxisType | Mapping[str, AxisType] | Sequence[AxisType] | None

EFFORTS = ("screen", "full")
CHOICES = ("auto", "target", "estimate")


@dataclass(frozen=True)
class CompiledProgram:
    """What a compiler made of a program, or why it made nothing.

    Attributes:
        text: The program of one device in HLO; None if it does not fit.
        peak_bytes: Most memory of a device at a time, by the compiler. Of a program that does not
            fit, what the compiler says it asks for, which may leave out the arguments.
        temp_bytes: What of it is neither arguments nor results.
        out_of_memory: The compiler's words if the program does not fit.
        seconds: How long it took.
        estimate: Whether ``text`` is of the tier ``"cpu estimate"``, still to be rewritten.
        made_whole: Arrays that every device holds whole on the way from one sharding to another, as
            far as the compiler's words could be read; see ``shardax.plan.compile.compilers``.
    """

    text: str | None
    peak_bytes: int | None
    temp_bytes: int | None
    out_of_memory: str | None
    seconds: float
    estimate: bool = False
    made_whole: tuple[tuple[str, str], ...] = ()


class Compiler(abc.ABC):
    """A compiler for a target; made by ``compiler_for``.

    Attributes:
        target: The target.
        label: Its name and version, such as ``"libtpu 0.0.42.1"``.
        tier: ``"target compiler"`` or ``"cpu estimate"``.
    """

    label: str
    tier: str = "target compiler"

    def __init__(self, target: Target) -> None:
        self.target = target

    def mesh(self, sizes: Mapping[str, int], axis_types: AxisTypes = None) -> Mesh:
        """Returns a mesh over the target's devices, which need not be there.

        Args:
            sizes: Sizes of the mesh axes, in order; they multiply to the target's devices.
            axis_types: Of all axes, by axis, or in order; ``Auto`` if None.

        Raises:
            TargetError: The sizes do not fit the target.
        """
        self.target.check_mesh(sizes)
        devices = self._devices(sizes)
        if axis_types is None or isinstance(axis_types, AxisType):
            types = (axis_types or AxisType.Auto,) * len(sizes)
        elif isinstance(axis_types, Mapping):
            types = tuple(axis_types.get(name, AxisType.Auto) for name in sizes)
        else:
            types = tuple(axis_types)
        return Mesh(devices, tuple(sizes), axis_types=types)

    def compile(self, lowered: jax.stages.Lowered, effort: str = "screen") -> CompiledProgram:
        """Compiles a function that was lowered over a mesh of this compiler.

        Args:
            lowered: The lowered function; also one of ``sx.jit``.
            effort: ``"screen"`` or ``"full"``.

        Raises:
            CompilerFailedError: If it ends with an error that is not a lack of memory.
        """
        if effort not in EFFORTS:
            raise PlanInputError(f"effort is 'screen' or 'full', not {effort!r}.")
        heard = listen()
        program = self._compile(lowered, effort)
        # One that was kept knows what was said when it was made.
        said = program.made_whole or made_whole(heard())
        return dataclasses.replace(program, made_whole=said)

    def environment(self) -> dict[str, str]:
        """Returns variables that a process should have before it imports jax.

        They keep it on CPU, let several processes compile at once, keep compilers from writing
        about hardware that they do not find but not from warning, and the programs out of JAX's own
        cache, which nobody would ever run.
        """
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }

    @property
    def devices_needed(self) -> int:
        """How many CPU devices the process needs; 0 if any number will do."""
        return 0

    @abc.abstractmethod
    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        """Devices in the form of the mesh."""

    @abc.abstractmethod
    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompiledProgram:
        """Compiles with a valid effort."""


@dataclass(frozen=True)
class CompilerInfo:
    """A compiler that may be installed.

    Attributes:
        kind: Of the targets that it compiles for.
        installed: Whether it is there.
        label: Its name and version, if it is.
        install: The command that installs it.
        note: What to know before that.
    """

    kind: str
    installed: bool
    label: str
    install: str
    note: str


def compiler_for(target: Target, *, compiler: str = "auto") -> Compiler:
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
    from shardax.plan.compile.cpu import CpuCompiler, EstimateCompiler
    from shardax.plan.compile.gpu import GpuCompiler
    from shardax.plan.compile.tpu import TpuCompiler

    if compiler not in CHOICES:
        raise PlanInputError(f"compiler is 'auto', 'target' or 'estimate', not {compiler!r}.")
    if target.kind == "cpu":
        return CpuCompiler(target)
    info = {each.kind: each for each in known_compilers()}[target.kind]
    if compiler == "estimate" or (compiler == "auto" and not info.installed):
        return EstimateCompiler(target)
    if not info.installed:
        raise CompilerMissingError(
            f"The compiler of {target.text!r} is not installed: {info.install}. {info.note} "
            "compiler='estimate' does without, by XLA's partitioner on virtual CPU devices."
        )
    return TpuCompiler(target) if target.kind == "tpu" else GpuCompiler(target)


def known_compilers() -> tuple[CompilerInfo, ...]:
    """Returns which compilers there are, which are installed, and how to install the others.

    Example:
        >>> from shardax import plan
        >>> [each.kind for each in plan.known_compilers()]
        ['cpu', 'tpu', 'gpu']
    """
    libtpu = _version("libtpu") if importlib.util.find_spec("libtpu") else ""
    plugin = cuda_plugin()
    return (
        CompilerInfo("cpu", True, f"XLA:CPU of jaxlib {_version('jaxlib')}", "", ""),
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


def cuda_plugin() -> str:
    """Returns the name and version of JAX's CUDA plugin, or nothing if there is none."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        module = name.replace("jax-", "jax_plugins.xla_").replace("-plugin", "")
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        version = _version(name) if found else ""
        if version:
            return f"{name} {version}"
    return ""


def required_bytes(compiled: Any) -> tuple[int, int]:
    """Returns the memory that a program takes and its temporaries, as XLA allocates them.

    Arguments, results that do not take the place of arguments, and one buffer of temporaries are
    there at the same time.

    Args:
        compiled: JAX's ``Compiled``, or that of ``sx.jit``.
    """
    found = compiled.memory_analysis()
    own = found.output_size_in_bytes - found.alias_size_in_bytes
    temporaries = int(found.temp_size_in_bytes)
    return int(found.argument_size_in_bytes) + max(int(own), 0) + temporaries, temporaries


def failed(label: str, error: BaseException) -> CompilerFailedError:
    """Returns the error for a compiler that ended with one of its own."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    more = f"\n  (and {len(lines) - 20} lines more)" if len(lines) > 20 else ""
    return CompilerFailedError(f"{label} ended with: " + "\n".join(lines[:20]) + more)


def with_options(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compiles with options of XLA; without them where it is of a version that has none such."""
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except Exception as error:  # of jaxlib's own class
        if options and "No such compile option" in str(error):
            return lowered.compile()
        raise


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
