# SPDX-License-Identifier: Apache-2.0
"""The settings: which there are, what each may be, and what each changes.

A *setting* is an argument of ``shardax.configure``. Checking one changes nothing; it returns
*changes*: values for options of ``jax.config``, and things of shardax to set. *Backend settings*
(``platform``, ``devices``) have an effect only until JAX's backend starts; the others at any time.

Platforms: what JAX may run on here, found out without starting it.

A *platform* is a kind of device: ``cpu``, ``cuda``, ``rocm``, ``tpu``. All but ``cpu`` come with a
*plugin*, a package in the namespace ``jax_plugins`` (for TPUs, ``libtpu``). JAX's *backend* is its
connection to the devices. It starts with the first array or the first look at the devices, and
from then on platform and devices stay as they are; JAX accepts later changes of its setting
``jax_platforms`` all the same, without a word and without effect.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax

from shardax._core.errors import ShardaxError
from shardax._core.init.defaults import (
    as_device,
    default_float,
    parse_device,
    process_defaults,
    set_process_device,
    set_process_dtype,
)
from shardax._core.init.rng import check_whole_process
from shardax.partition.findings import did_you_mean


class ConfigureError(ShardaxError, ValueError):
    """Settings of the process are not valid; nothing was changed."""


class ConfiguredTooLateError(ConfigureError):
    """Settings can no longer take effect, because JAX's backend runs; nothing was changed."""


# --- Platforms ---

GPUS = ("cuda", "rocm")
KNOWN = ("cpu", "gpu", *GPUS, "tpu")
_CPU_DEVICES = "jax_num_cpu_devices"
_NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""One of these is there wherever an NVIDIA GPU can be used; the last is that of WSL."""


def backend_runs() -> bool:
    """Whether JAX's backend has started. JAX has no function that says so without starting it."""
    before: Any = jax.config.values[_CPU_DEVICES]
    try:  # JAX refuses to change this once its backend runs, and only then
        jax.config.update(_CPU_DEVICES, 1 if before < 0 else before + 1)
    except RuntimeError:
        return True
    jax.config.update(_CPU_DEVICES, before)
    return False


def usable_platform(name: Any) -> str:
    """Returns the platform as JAX names it in its settings, for ``gpu`` that which is installed.

    Args:
        name: The name of a platform.

    Raises:
        ConfigureError: If JAX could not start it here.

    Example:
        >>> usable_platform("cpu")
        'cpu'
    """
    if not isinstance(name, str):
        raise ConfigureError(f"platform={name!r} is not the name of a platform, such as 'cpu'.")
    plugins = installed_plugins()
    if name == "cpu" or (name not in KNOWN and any(name in plugin for plugin in plugins if name)):
        return name
    if name not in KNOWN:
        raise ConfigureError(
            f"platform={name!r}: JAX has no such platform, and no plugin for it is installed. "
            f"There are {', '.join(KNOWN)}.{did_you_mean(name.strip().lower(), KNOWN)}"
        )
    if name == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigureError(_not_installed(name))
        return name
    wanted = GPUS if name == "gpu" else (name,)
    installed = [gpu for gpu in wanted if any(gpu in plugin for plugin in plugins)]
    if not installed:
        raise ConfigureError(_not_installed(name))
    if installed[0] == "cuda" and not nvidia_gpu_is_visible():
        raise ConfigureError(
            f"platform={name!r}: there is no NVIDIA GPU here that this process can see (none of "
            f"{', '.join(_NVIDIA)} exists). Run it on a machine with one, or choose "
            f"platform='cpu'."
        )
    return installed[0]


def installed_plugins() -> set[str]:
    """Returns the names of the modules that bring platforms to JAX."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = {module.name for module in pkgutil.iter_modules(folders)}
    return found | {entry.value for entry in entry_points(group="jax_plugins")}


def nvidia_gpu_is_visible() -> bool:
    """Whether this process can reach an NVIDIA GPU. Without one JAX would go on without a word."""
    return any(os.path.exists(path) for path in _NVIDIA)


def _not_installed(name: str) -> str:
    package = "jax[rocm7-local]" if name == "rocm" else f"shardax[{name.replace('gpu', 'cuda')}]"
    return (
        f"platform={name!r}: JAX's support for it is not installed. Install it with "
        f"pip install '{package}', or choose platform='cpu'."
    )


# --- Settings ---

SWITCHES = {
    "x64": "jax_enable_x64",
    "debug_nans": "jax_debug_nans",
    "debug_infs": "jax_debug_infs",
    "debug_key_reuse": "jax_debug_key_reuse",
    "log_compiles": "jax_log_compiles",
}
"""Settings that are on or off, and the options of JAX that they switch."""

CHOICES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "matmul_precision": ("jax_default_matmul_precision", jax.default_matmul_precision),
    "rank_promotion": ("jax_numpy_rank_promotion", jax.numpy_rank_promotion),
}
"""Settings with a few values, the option of JAX, and what knows the values that there are."""

CACHE_DIR = "jax_compilation_cache_dir"
CACHE_SECONDS = "jax_persistent_cache_min_compile_time_secs"
PLATFORMS = "jax_platforms"
CPU_DEVICES = "jax_num_cpu_devices"
VISIBLE = "jax_{}_visible_devices"
BACKEND_SETTINGS = ("platform", "devices")


@dataclass
class Changes:
    """What settings change; nothing is changed before ``shardax.config.apply`` does it.

    Attributes:
        options: Options of ``jax.config`` with their new values.
        actions: What is to be done apart from options; may not fail.
        folder: A folder to be made, or None.
        notes: What the user should know.
    """

    options: dict[str, Any] = field(default_factory=dict)
    actions: list[Callable[[], None]] = field(default_factory=list)
    folder: Path | None = None
    notes: list[str] = field(default_factory=list)


def check_settings(given: Mapping[str, Any], runs: bool) -> Changes:
    """Checks all settings.

    Args:
        given: The settings by name.
        runs: Whether JAX's backend runs, so that backend settings are left out of the changes.

    Returns:
        What they change.

    Raises:
        ConfigureError: If any is not valid; says of each what is wrong.
    """
    changes, problems = Changes(), []
    for check in (_backend, _switches, _choices, _cache, _seed, _dtype, _create_on):
        problems += [str(problem) for problem in check(given, runs, changes)]
    if problems:
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  {line}" for line in problems)
        raise ConfigureError(f"shardax.configure changed nothing: {listed}")
    return changes


Problems = Iterator[object]


def _backend(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    platform, devices = given.get("platform"), given.get("devices")
    if platform is None and devices is None:
        return
    if devices is not None and not _is_count(devices) and not _are_numbers(devices):
        yield (
            f"devices={devices!r} is neither how many devices, from 1, nor a list of their "
            f"numbers, each once."
        )
        return
    if runs:  # too late to change: what is asked for is compared with what runs
        return
    try:
        name = usable_platform(platform_of(given))
    except ConfigureError as problem:
        yield problem
        return
    # With one platform alone JAX would not know the processor: jax.devices("cpu") fails.
    changes.options[PLATFORMS] = "cpu" if name == "cpu" else f"{name},cpu"
    _note_environment(name, devices, changes)
    if devices is None:
        return
    if name == "cpu" and _is_count(devices):
        changes.options[CPU_DEVICES] = devices
    elif name == "cpu":
        yield f"devices={devices!r}: processors have no numbers; say how many, devices=8."
    elif name in GPUS:
        numbers = range(devices) if _is_count(devices) else devices
        changes.options[VISIBLE.format(name)] = ",".join(map(str, numbers))
    else:
        yield f"devices={devices!r}: JAX does not choose among the devices of {name!r}."


def platform_of(given: Mapping[str, Any]) -> Any:
    """Returns the platform that settings ask for: a number of devices means the processor."""
    return given.get("platform", "cpu" if _is_count(given.get("devices")) else "gpu")


def _is_count(devices: Any) -> bool:
    return type(devices) is int and devices >= 1


def _are_numbers(devices: Any) -> bool:
    return (
        isinstance(devices, Sequence)
        and all(type(number) is int and number >= 0 for number in devices)
        and len(devices) == len(set(devices)) > 0
    )


def _note_environment(platform: str, devices: Any, changes: Changes) -> None:
    wanted = os.environ.get("JAX_PLATFORMS")
    if wanted and wanted.split(",")[0] != platform:
        changes.notes.append(f"platform: overrides JAX_PLATFORMS={wanted} of the environment.")
    flag = "xla_force_host_platform_device_count"
    if platform == "cpu" and devices is not None and flag in os.environ.get("XLA_FLAGS", ""):
        changes.notes.append(f"devices: overrides {flag} of XLA_FLAGS.")


def _switches(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    for name, option in SWITCHES.items():
        value = given.get(name)
        if value is None:
            continue
        if type(value) is not bool:  # JAX takes "off" for true
            yield f"{name}={value!r} is neither True nor False."
            continue
        changes.options[option] = value
    if type(given.get("debug_key_reuse")) is bool:
        changes.actions.append(partial(check_whole_process, given["debug_key_reuse"]))
    if runs and given.get("x64") not in (None, jax.config.values[SWITCHES["x64"]]):
        changes.notes.append("x64: arrays that exist keep their dtypes.")


def _choices(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    for name, (option, block) in CHOICES.items():
        value = given.get(name)
        if value is None:
            continue
        try:
            with block(value):
                changes.options[option] = value
        except (ValueError, TypeError) as error:
            yield f"{name}={value!r}: {error}"


def _cache(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    seconds, folder = given.get("cache_min_seconds"), given.get("cache_dir")
    if seconds is not None:
        if type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
            yield f"cache_min_seconds={seconds!r} is not a number of seconds, from 0."
        else:
            changes.options[CACHE_SECONDS] = float(seconds)
    if folder is None:
        return
    if _is_default(folder):
        changes.options[CACHE_DIR] = None
        return
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        yield f"cache_dir={folder!r} is not the path of a folder."
        return
    if "://" in os.fspath(folder):  # a bucket, which JAX reaches by itself
        place = os.fspath(folder)
    else:
        path = Path(folder).expanduser().absolute()
        there = next(part for part in (path, *path.parents) if part.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            kind = "not a folder" if not there.is_dir() else "not writable by this process"
            yield f"cache_dir={str(folder)!r}: {there} is {kind}. Choose another folder."
            return
        changes.folder, place = path, str(path)
        if path.exists():
            changes.notes += _strangers(path)
    changes.options |= {CACHE_DIR: place, "jax_enable_compilation_cache": True}


def _strangers(path: Path) -> Iterator[str]:
    """Compiled programs are run as they are found, so who writes there runs code here."""
    status = path.stat()
    others = status.st_mode & 0o022
    if others or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
        yield (
            f"cache_dir: others can write into {path}, and JAX runs the programs that it finds "
            f"there. Use a folder of your own: chmod 700."
        )


def _seed(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    if (seed := given.get("seed")) is None:
        return
    from shardax.random import stream  # here, so that `import shardax` stays quick

    try:
        stream.as_source(seed)
    except ShardaxError as problem:
        yield f"seed={seed!r}: {problem}"
    else:
        changes.actions.append(partial(stream.seed, seed))


def _dtype(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    dtype, x64 = given.get("dtype", process_defaults()[0]), given.get("x64")
    if _is_default(dtype):
        changes.actions.append(partial(set_process_dtype, None))
    elif dtype is not None:
        try:  # with the new x64, on which it depends whether a dtype is valid
            with jax.enable_x64(x64 if type(x64) is bool else jax.config.values[SWITCHES["x64"]]):
                exact = default_float(dtype)
        except ShardaxError as problem:
            yield f"dtype={dtype!r}{'' if 'dtype' in given else ', set before'}: {problem}"
        else:
            changes.actions.append(partial(set_process_dtype, exact))


def _create_on(given: Mapping[str, Any], runs: bool, changes: Changes) -> Problems:
    device = given.get("create_on")
    if _is_default(device):
        changes.actions.append(partial(set_process_device, None))
    elif device is not None:
        try:
            platform, _ = parse_device(device)
            if runs:
                as_device(device)
        except ShardaxError as problem:
            yield f"create_on={device!r}: {problem}"
            return
        changes.actions.append(partial(set_process_device, device))
        chosen = changes.options.get(PLATFORMS, jax.config.values[PLATFORMS])
        if chosen and not runs and platform not in (*chosen.split(","), "gpu"):
            changes.options[PLATFORMS] = f"{chosen},{platform}"


def _is_default(value: Any) -> bool:
    """Whether a setting goes back to JAX's own choice."""
    return isinstance(value, str) and value == "default"
