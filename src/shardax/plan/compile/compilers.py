# SPDX-License-Identifier: Apache-2.0
"""XLA's compilers of CPUs, TPUs and GPUs, for absent devices too.

TPU slices are described to libtpu, and GPUs to JAX's CUDA plugin, by
``jax.experimental.topologies``; neither hardware, driver nor toolkit is needed. These are of the
*tier* ``"target compiler"``. Where they are not installed, the *CPU estimate* takes the program
right after XLA's partitioner, which is the same code for all compilers; ``shardax.hlo`` applies the
rewrites that they are known to make, and estimates memory from what is live.

*Effort* is how long a compiler may try: ``"screen"`` is for ranking many layouts, ``"full"`` is how
the program will be compiled to run. Fast compiles of libtpu leave operations and collectives as
they are; their peak was 4 to 21 % lower for a decoder's training step (libtpu 0.0.42.1). A program
that does not fit is an error of libtpu; one for GPUs is compiled, and compared with the target's
memory, from which what CUDA, NCCL and cuDNN take is not deducted. Without a GPU kernels are not
autotuned.

XLA's partitioner writes to the error stream when it finds no collective from one sharding to
another, and replicates the array to split it anew (*involuntary full rematerialization*). That is
no error, and no figure but the bytes shows it, so the message is read where the stream is a file,
as in processes of the planner.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import stat
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardax.hlo.errors import compiler_ended, description_refused
from shardax.hlo.estimate import rewritten
from shardax.hlo.live_memory import peak_bytes
from shardax.hlo.partitioner import partitioned_text
from shardax.hlo.program import op_name, parse
from shardax.plan.errors import CompilerMissingError, PlanInputError, TargetError
from shardax.plan.hardware.hardware import Hardware
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
        return next(
            compiler.label for compiler in known_compilers() if compiler.kind == self.target.kind
        )

    @property
    def devices_needed(self) -> int:
        """CPU devices needed in the process; 0 if any number will do."""
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
        """Compiles a function lowered over this compiler's mesh."""
        if effort not in ("screen", "full"):
            raise PlanInputError(f"effort is 'screen' or 'full', not {effort!r}.")
        messages = record_stderr()
        result = self._compile(lowered, effort)
        # A cached one holds those of its compilation.
        changes = result.full_rematerializations or full_rematerializations(messages())
        return dataclasses.replace(result, full_rematerializations=changes)

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
    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray:
        """Devices in the form of the mesh."""

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompileResult:
        start = time.perf_counter()
        try:
            compiled = with_options(lowered, self.screen_options if effort == "screen" else {})
        except Exception as error:  # of jaxlib's own class
            seconds = time.perf_counter() - start
            lines = str(error).strip().splitlines() or [type(error).__name__]
            requested = self._requested_bytes(str(error))
            if requested is not None:  # the first lines, without the list of every buffer
                return CompileResult(None, requested, None, "\n".join(lines[:12]), seconds)
            raise compiler_ended(self.label, lines) from error

        seconds = time.perf_counter() - start
        peak, temporaries = self._memory(compiled)
        return CompileResult(compiled.as_text(), peak, temporaries, None, seconds)

    def _requested_bytes(self, message: str) -> int | None:
        """The memory needed by a program, from an out-of-memory error."""
        return None

    def _memory(self, compiled) -> tuple[int, int]:
        """Bytes of the peak and of its temporaries, as XLA allocates them."""
        # Arguments, results that do not take the place of arguments, and one buffer of temporaries
        # are there at the same time.
        analysis = compiled.memory_analysis()
        arguments = int(analysis.argument_size_in_bytes)
        results = int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
        temporaries = int(analysis.temp_size_in_bytes)
        return arguments + max(results, 0) + temporaries, temporaries


def record_stderr() -> Callable[[], str]:
    """Returns a function for the text written to stderr from now on."""

    def size() -> int | None:
        try:
            status = os.fstat(_STDERR)
        except OSError:  # it is closed
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

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
    changes: dict[tuple[str, str], None] = {}
    for match in _REMATERIALIZATION.finditer(text):
        changes[op_name(match[4]), f"{match[3]} from {match[1]} to {match[2]}"] = None
    return tuple(changes)


def rematerialization_warnings(
    changes: tuple[tuple[str, str], ...], paths: Mapping[str, str], sources: Mapping[str, str]
) -> list[str]:
    """Returns warnings, with paths of arguments and lines of operations."""
    said: list[str] = []
    for name, change in changes:
        is_argument = name and "/" not in name  # operations have that of what they are in
        result = f"The result of {name or 'an operation'}"
        array = paths.get(name, name) if is_argument else result
        where = f" at {sources[name]}" if sources.get(name) else ""
        said.append(
            f"{array}{where} is made whole on every device to be split in another way: XLA knows "
            "no exchange for it. Rules that split the same dimensions before and after, or a "
            f"constraint half-way, avoid that ({change})."
        )
    return list(dict.fromkeys(said))


@dataclass(frozen=True)
class CompilerInfo:
    """A compiler, installed or not."""

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
    if compiler not in ("auto", "target", "estimate"):
        raise PlanInputError(f"compiler is 'auto', 'target' or 'estimate', not {compiler!r}.")
    if target.kind == "cpu":
        return CpuCompiler(target)
    info = {info.kind: info for info in known_compilers()}[target.kind]
    if compiler == "estimate" or (compiler == "auto" and not info.installed):
        return EstimateCompiler(target)
    if not info.installed:
        raise CompilerMissingError(
            f"The compiler of {target.text!r} is not installed: {info.install}. {info.note} "
            "compiler='estimate' does without, by XLA's partitioner on virtual CPU devices."
        )
    return TpuCompiler(target) if target.kind == "tpu" else GpuCompiler(target)


def known_compilers() -> tuple[CompilerInfo, ...]:
    """Returns the compilers, installed or not, and their installation.

    Example:
        >>> from shardax import plan
        >>> [each.kind for each in plan.known_compilers()]
        ['cpu', 'tpu', 'gpu']
    """

    def version(distribution: str, module: str) -> str:
        try:
            spec = importlib.util.find_spec(module)
            return metadata.version(distribution) if spec else ""
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
def temporary_environment(variables: Mapping[str, str], override: bool = True) -> Generator[None]:
    """Sets environment variables; those already set only to override them."""
    old_values = {name: os.environ.get(name) for name in variables}
    changed = {name: v for name, v in variables.items() if override or old_values[name] is None}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: v for name, v in old_values.items() if v is not None})


class CpuCompiler(TargetCompiler):
    """XLA for the CPU devices of a process."""

    # Without LLVM's optimizations; the program in HLO and its memory stay as they are.
    screen_options: ClassVar = {"xla_backend_optimization_level": 0}

    def environment(self) -> dict[str, str]:
        return super().environment() | {"JAX_NUM_CPU_DEVICES": str(self.target.device_count)}

    @property
    def devices_needed(self) -> int:
        return self.target.device_count

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray:
        needed, devices = self.devices_needed, jax.devices("cpu")
        if len(devices) < needed:
            raise PlanInputError(
                f"To plan for {self.target.text!r} with {self.label} this process needs {needed} "
                f"CPU devices and has {len(devices)}. Before anything else: sx.configure(devices="
                f"{needed}), or JAX_NUM_CPU_DEVICES={needed} in the environment. plan.compare and "
                "plan.search do it in processes of their own."
            )
        grid = np.empty(needed, dtype=object)
        grid[:] = devices[:needed]
        return grid.reshape(tuple(sizes.values()))


class EstimateCompiler(CpuCompiler):
    """XLA's partitioner in place of the compiler of a TPU or GPU."""

    tier = "cpu estimate"

    @property
    def label(self) -> str:
        return f"{known_compilers()[0].label}, estimate"

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompileResult:
        del effort  # the partitioner has one
        start = time.perf_counter()
        text = partitioned_text(lowered)
        seconds = time.perf_counter() - start
        peak = peak_bytes(rewritten(parse(text)))
        return CompileResult(text, peak, None, None, seconds, estimate=True)


_LIBTPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Read for the machine's own TPU only, of which there is none; without it libtpu complains.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # Warnings to the error stream, where they are read, and nothing into files of libtpu's own.
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REQUESTED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.I),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM", re.I),
)


class TpuCompiler(TargetCompiler):
    """XLA with libtpu."""

    screen_options: ClassVar = {"exec_time_optimization_effort": -1.0}

    def environment(self) -> dict[str, str]:
        return super().environment() | _LIBTPU_ENVIRONMENT

    def devices(self) -> list[Any]:
        """Returns the target's devices in libtpu's order."""
        return list(_tpu_devices(self.target).values())

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray:
        by_place = _tpu_devices(self.target)
        places = self.target.arrangement(sizes).places
        devices = np.empty(len(places), dtype=object)
        for number, place in enumerate(places):
            devices[number] = by_place[place]
        return devices.reshape(tuple(sizes.values()))

    def _requested_bytes(self, message: str) -> int | None:
        for pattern in _REQUESTED:
            match = pattern.search(message)
            if match:
                return round(float(match[1]) * _UNITS[match[2].upper()])
        return None

    def _memory(self, compiled) -> tuple[int, int]:
        analysis = compiled.memory_analysis()
        return int(analysis.peak_memory_in_bytes), int(analysis.temp_size_in_bytes)


@functools.lru_cache(maxsize=8)
def _tpu_devices(target: Target) -> dict[tuple[int, ...], Any]:
    """Devices by slice, coordinates and core of the chip."""
    from jax.experimental import topologies

    chip = target.hardware
    named = ("topology", "device_kind")
    options = {name: value for name, value in chip.compiler.items() if name not in named}
    if "topology" not in chip.compiler:
        raise TargetError(
            f"The hardware {chip.name!r} does not say what libtpu calls it: "
            "compiler={'topology': 'v5e'}, or like='v5e'."
        )
    if len(target.topology) == 2 and (target.topology[0] < 2 or target.topology[1] < 2):
        options["chips_per_host_bounds"] = [*target.topology, 1]
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{chip.compiler['topology']}:{'x'.join(map(str, target.topology))}"
    try:
        # libtpu reads it when it is loaded.
        with temporary_environment(_LIBTPU_ENVIRONMENT, override=False):
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            ).devices
    except Exception as error:  # of jaxlib's own class
        raise TargetError(
            f"libtpu has no topology {name!r} for {target.text!r}: {str(error).strip()}"
        ) from error
    width = len(target.topology)
    places: dict[tuple[int, ...], Any] = {}
    for device in devices:
        coords = (*tuple(device.coords)[:width], *(0,) * (3 - width))
        number = getattr(device, "slice_index", 0) or 0
        places[number, *coords, device.core_on_chip] = device
    return places


_CUDA_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_DESCRIBED = (
    "major",
    "core_count",
    "fpus_per_core",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "l2_cache_size",
    "clock_rate_ghz",
)
# The same for every GPU since compute capability 8.
_SINCE_AMPERE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}


class GpuCompiler(TargetCompiler):
    """XLA with the CUDA plugin."""

    def environment(self) -> dict[str, str]:
        return super().environment() | _CUDA_ENVIRONMENT

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray:
        devices = np.array(_gpu_devices(self.target), dtype=object)
        return devices.reshape(tuple(sizes.values()))

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompileResult:
        result = super()._compile(lowered, effort)
        peak, limit = result.peak_bytes or 0, self.target.limit_bytes
        if peak <= limit:
            return result
        message = (
            f"The program needs {peak / 2**30:.2f} GiB of a GPU's memory, and a program may "
            f"use {limit / 2**30:.2f} GiB ({limit / self.target.hardware.memory_bytes:.0%}; "
            "XLA_PYTHON_CLIENT_MEM_FRACTION sets it, and @0.9 after a target says it here)."
        )
        return dataclasses.replace(result, out_of_memory=message)


def target_config(chip: Hardware) -> str:
    """Returns XLA's description of a GPU, as protocol buffer text."""
    missing = [name for name in _DESCRIBED if name not in chip.compiler]
    if missing:
        raise TargetError(
            f"The GPU {chip.name!r} cannot be described to its compiler: {', '.join(missing)} "
            'missing in `compiler`. Start from a GPU that is known: like = "h100" in TOML, or '
            "plan.find_hardware('h100').like(...)."
        )

    fields = _SINCE_AMPERE | {name: chip.compiler[name] for name in _DESCRIBED if name != "major"}
    fields |= {
        "memory_bandwidth": int(chip.memory_bandwidth),
        "device_memory_size": int(chip.memory_bytes),
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())

    minor = chip.compiler.get("minor", 0)
    return (
        "gpu_device_info {\n"
        f"  cuda_compute_capability {{ major: {chip.compiler['major']} minor: {minor} }}\n"
        f"{lines}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        f'device_description_str: "{chip.compiler.get("description", chip.name)}"\n'
    )


@functools.lru_cache(maxsize=8)
def _gpu_devices(target: Target) -> tuple[Any, ...]:
    """Devices in the order of nodes and their GPUs."""
    from jax.experimental import topologies

    config = target_config(target.hardware)
    nodes, gpus = target.topology
    try:
        with temporary_environment(_CUDA_ENVIRONMENT, override=False):
            described = topologies.get_topology_desc(
                "", platform="cuda", target_config=config, topology=f"1x{nodes}x{gpus}"
            )
    except Exception as error:  # of jaxlib's own class
        raise description_refused(target.text, error) from error
    return tuple(sorted(described.devices, key=lambda device: device.id))
