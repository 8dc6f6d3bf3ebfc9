# SPDX-License-Identifier: Apache-2.0
"""``configure``: the settings of a process in one call.

A *setting* is an argument of ``configure``. All are checked before the first is changed, and if one
fails to change, the others are put back. Only options of ``jax.config`` and shardax's own defaults
are set; nothing in JAX is replaced.

A *platform* is a kind of device: ``cpu``, ``cuda``, ``rocm``, ``tpu``. All but ``cpu`` come with a
plugin, a package in the namespace ``jax_plugins`` (for TPUs, ``libtpu``). JAX's *backend* is its
connection to the devices. It starts with the first array or the first look at the devices; from
then on platform and devices are fixed, though JAX silently accepts later changes of
``jax_platforms``, without effect. So ``platform`` and ``devices`` must come before; the other
settings work at any time.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax

from shardax._core.errors import ShardaxError
from shardax._core.frames import is_eager
from shardax._core.init import defaults
from shardax._core.init.key_reuse import check_whole_process
from shardax._transforms.jit.slow_call import comparing
from shardax.partition.errors import did_you_mean

GPUS = ("cuda", "rocm")
PLATFORMS = ("cpu", "gpu", *GPUS, "tpu")
NVIDIA_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # one of them; the last is of WSL

# Options of ``jax.config``.
PLATFORMS_OPTION = "jax_platforms"
CPU_DEVICES = "jax_num_cpu_devices"
VISIBLE = "jax_{}_visible_devices"
CACHE_DIR = "jax_compilation_cache_dir"
CACHE_SECONDS = "jax_persistent_cache_min_compile_time_secs"
SWITCHES = {
    "x64": "jax_enable_x64",
    "debug_nans": "jax_debug_nans",
    "debug_infs": "jax_debug_infs",
    "debug_key_reuse": "jax_debug_key_reuse",
    "log_compiles": "jax_log_compiles",
}
CHOICES: dict[str, tuple[str, Callable[[Any], Any]]] = {  # with what knows the valid values
    "matmul_precision": ("jax_default_matmul_precision", jax.default_matmul_precision),
    "rank_promotion": ("jax_numpy_rank_promotion", jax.numpy_rank_promotion),
}


class ConfigureError(ShardaxError, ValueError):
    """Settings of the process are not valid; nothing was changed."""


@dataclass(frozen=True, repr=False)
class Configuration:
    """Settings of the process after a call of ``configure``.

    Attributes:
        settings: Value of each setting by name, None for JAX's own choice; a seed only if given.
        given: Names of those that the call set.
        notes: Further remarks on them.
        backend_runs: Whether JAX's backend has started.

    Example:
        >>> import shardax as sx
        >>> configuration = sx.configure(debug_nans=False)
        >>> configuration.given, configuration.settings["x64"]
        (('debug_nans',), False)
    """

    settings: Mapping[str, Any]
    given: tuple[str, ...]
    notes: tuple[str, ...]
    backend_runs: bool

    def __str__(self) -> str:
        started = "runs" if self.backend_runs else "has not started"
        width = max(len(name) for name in self.settings)
        rows = [
            f"{'*' if name in self.given else ' '} {name:{width}}  "
            f"{'default' if value is None else value}"
            for name, value in self.settings.items()
        ]
        title = f"shardax settings (* set by this call); JAX {jax.__version__}, its backend "
        return "\n".join([title + started, *rows, *self.notes])

    __repr__ = __str__


def configure(
    *,
    devices: int | Sequence[int] | None = None,
    platform: str | None = None,
    x64: bool | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    create_on: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_min_seconds: float | None = None,
    seed: Any = None,
    matmul_precision: str | None = None,
    rank_promotion: str | None = None,
    debug_nans: bool | None = None,
    debug_infs: bool | None = None,
    debug_key_reuse: bool | None = None,
    debug_processes: bool | None = None,
    log_compiles: bool | None = None,
) -> Configuration:
    """Sets up the process; called once, at the top of a script.

    Settings that are not given stay as they are. ``devices`` and ``platform`` must come before JAX
    starts its backend, with the first array or ``jax.devices()``; the others may come at any time.
    ``dtype``, ``create_on`` and ``cache_dir`` go back to JAX's own choice with ``"default"``.

    Args:
        devices: How many devices: virtual ones of the processor, unless ``platform`` is another;
            or the numbers of the GPUs to use.
        platform: ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"``, or that of a plugin. The
            processor stays usable beside it, as ``jax.devices("cpu")``.
        x64: Whether arrays may have 64 bits.
        dtype: Floating dtype of what creation helpers make, the functions of ``shardax.random``.
        create_on: Device on which they make it, such as ``"cpu"``, while computations stay on
            JAX's default device.
        cache_dir: Folder in which compiled programs are kept for later processes.
        cache_min_seconds: Programs that compile faster are not kept; JAX's default is 1 second.
        seed: Seed of ``shardax.random``.
        matmul_precision: Precision of products of matrices, as ``jax.default_matmul_precision``.
        rank_promotion: ``"allow"``, ``"warn"`` or ``"raise"``, as ``jax.numpy_rank_promotion``.
        debug_nans: Whether to stop at the operation that makes a NaN.
        debug_infs: Whether to stop at the operation that makes an infinity.
        debug_key_reuse: Whether to stop where a random key is used twice, as
            ``shardax.debug_key_reuse`` in all threads.
        debug_processes: Whether each call of ``sx.jit`` with arrays that span processes compares
            its NumPy arrays and Python numbers over the processes.
        log_compiles: Whether to log what is compiled.

    Returns:
        All settings as they are now; ``print`` it.

    Raises:
        ConfigureError: If a setting is not valid, or if the backend already runs, otherwise than
            asked for. Nothing was changed.

    Example:
        >>> import shardax as sx
        >>> print(sx.configure(debug_infs=False, seed=0))
        shardax settings (* set by this call); JAX ..., its backend ...
          platform ...
        * seed ...
    """
    settings = {name: value for name, value in locals().items() if value is not None}
    if not is_eager():
        raise ConfigureError(
            "shardax.configure was called while a JAX transform is tracing, where settings would "
            "hold for a part of a program. Nothing was changed. Call it at the top of the script."
        )
    runs = backend_runs()
    changes = check_settings(settings, runs)
    if runs:
        _check_not_late(settings)
    _apply(changes)
    return Configuration(_settings_now(seed, runs), tuple(settings), tuple(changes.notes), runs)


def _late_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns settings other than those of JAX's running backend."""
    late = {name: settings[name] for name in ("platform", "devices") if name in settings}
    running = jax.default_backend()
    platform, devices = _platform_of(settings), settings.get("devices")
    if platform != running and not (platform in GPUS and running == "gpu"):
        return late

    late.pop("platform", None)
    visible = [jax.config.values[VISIBLE.format(gpu)] for gpu in GPUS]
    numbers = ",".join(map(str, devices)) if isinstance(devices, Sequence) else None
    if devices == jax.local_device_count() or numbers in visible:
        late.pop("devices", None)
    return late


def _check_not_late(settings: Mapping[str, object]) -> None:
    """Raises for settings after the start of JAX's backend."""
    late = _late_settings(settings)
    if late:
        running, count = jax.default_backend(), jax.local_device_count()
        texts = ", ".join(f"{name}={value!r}" for name, value in late.items())
        raise ConfigureError(
            f"shardax.configure changed nothing: {texts} came too late. JAX's backend already runs "
            f"in this process, on {count} device{'' if count == 1 else 's'} of the platform "
            f"{running!r}, and cannot change. Call shardax.configure at the top of the script, "
            f"before anything makes an array or asks for devices (jax.devices(), jnp.zeros, ...), "
            f"imported modules included; in a notebook, restart the kernel first."
        )


def _apply(changes: Changes) -> None:
    if changes.folder is not None:
        try:
            changes.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigureError(
                f"cache_dir={str(changes.folder)!r}: {error}. Choose another folder."
            ) from error

    old_options = {name: jax.config.values[name] for name in changes.options}
    try:
        for name, value in changes.options.items():
            jax.config.update(name, value)
    except Exception:
        for name, value in old_options.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        raise

    if changes.options.get(CACHE_DIR) != old_options.get(CACHE_DIR):
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()  # otherwise JAX stays with the folder it first used
    for action in changes.actions:
        action()


def _settings_now(seed: object, runs: bool) -> dict[str, Any]:
    options = jax.config.values
    dtype, device = defaults.process_defaults()
    if runs:
        platform, count = jax.default_backend(), jax.local_device_count()
    else:
        platform, count = options[PLATFORMS_OPTION] or None, options[CPU_DEVICES]

    return {
        "platform": platform,
        "devices": count if count >= 0 else None,
        "dtype": None if dtype is None else dtype.name,
        "create_on": device,
        "cache_dir": options[CACHE_DIR],
        "cache_min_seconds": options[CACHE_SECONDS],
        **({} if seed is None else {"seed": seed}),
        **{name: options[option] for name, (option, _) in CHOICES.items()},
        **{name: options[option] for name, option in SWITCHES.items()},
        "debug_processes": bool(comparing),
    }


# --- Checks of settings ---


Problems = Iterator[object]  # a text each, or an error


class Changes:
    """The changes that settings ask for, none made yet."""

    def __init__(self, settings: Mapping[str, Any], runs: bool) -> None:
        self.options: dict[str, Any] = {}  # of ``jax.config``
        self.actions: list[Callable[[], None]] = []  # the rest; cannot fail
        self.folder: Path | None = None  # to be made
        self.notes: list[str] = []  # for the user
        self._settings = settings
        self._backend_runs = runs

    def problems(self) -> Problems:
        """Yields what is wrong with the settings, and takes what is right."""
        yield from self._take_backend()
        yield from self._take_switches()
        yield from self._take_choices()
        yield from self._take_cache()
        yield from self._take_seed()
        yield from self._take_dtype()
        yield from self._take_create_on()

    def _take_backend(self) -> Problems:
        platform, devices = self._settings.get("platform"), self._settings.get("devices")
        if platform is None and devices is None:
            return
        if devices is not None and not _is_count(devices) and not _are_numbers(devices):
            yield (
                f"devices={devices!r} is neither how many, from 1, nor a list of numbers, each "
                "once."
            )
            return
        if self._backend_runs:  # too late to change: what is asked for is compared with what runs
            return

        try:
            name = usable_platform(_platform_of(self._settings))
        except ConfigureError as problem:
            yield problem
            return
        # With one platform alone JAX would not know the processor: jax.devices("cpu") fails.
        self.options[PLATFORMS_OPTION] = "cpu" if name == "cpu" else f"{name},cpu"
        environment = os.environ.get("JAX_PLATFORMS")
        if environment and environment.split(",")[0] != name:
            self.notes.append(
                f"platform: overrides JAX_PLATFORMS={environment} of the environment."
            )

        if devices is None:
            return
        flag = "xla_force_host_platform_device_count"
        if name == "cpu" and flag in os.environ.get("XLA_FLAGS", ""):
            self.notes.append(f"devices: overrides {flag} of XLA_FLAGS.")
        if name == "cpu" and _is_count(devices):
            self.options[CPU_DEVICES] = devices
        elif name == "cpu":
            yield f"devices={devices!r}: processors have no numbers; say how many, devices=8."
        elif name in GPUS:
            numbers = range(devices) if _is_count(devices) else devices
            self.options[VISIBLE.format(name)] = ",".join(map(str, numbers))
        else:
            yield f"devices={devices!r}: JAX does not choose among the devices of {name!r}."

    def _take_switches(self) -> Problems:
        for name in (*SWITCHES, "debug_processes"):
            value = self._settings.get(name)
            if type(value) is not bool:
                if value is not None:  # JAX takes "off" for true
                    yield f"{name}={value!r} is neither True nor False."
                continue

            if name in SWITCHES:
                self.options[SWITCHES[name]] = value
            if name == "debug_key_reuse":
                self.actions.append(partial(check_whole_process, value))
            if name == "debug_processes":
                self.actions.append(partial(comparing.__setitem__, slice(None), [True] * value))

        now = jax.config.values[SWITCHES["x64"]]
        if self._backend_runs and self._settings.get("x64") not in (None, now):
            self.notes.append("x64: arrays that exist keep their dtypes.")

    def _take_choices(self) -> Problems:
        for name, (option, block) in CHOICES.items():
            value = self._settings.get(name)
            if value is None:
                continue
            try:
                with block(value):
                    self.options[option] = value
            except (ValueError, TypeError) as error:
                yield f"{name}={value!r}: {error}"

    def _take_cache(self) -> Problems:
        seconds = self._settings.get("cache_min_seconds")
        if seconds is not None:
            if type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
                yield f"cache_min_seconds={seconds!r} is not a number of seconds, from 0."
            else:
                self.options[CACHE_SECONDS] = float(seconds)

        folder = self._settings.get("cache_dir")
        if folder is None:
            return
        if _is_default(folder):
            self.options[CACHE_DIR] = None
            return
        is_path = isinstance(folder, (str, os.PathLike))
        if not is_path or not os.fspath(folder) or "\0" in os.fspath(folder):
            yield f"cache_dir={folder!r} is not the path of a folder."
            return
        if "://" in os.fspath(folder):  # a bucket, which JAX reaches by itself
            self._cache_in(os.fspath(folder))
            return

        path = Path(folder).expanduser().absolute()
        parent = next(part for part in (path, *path.parents) if part.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            kind = "not writable by this process" if parent.is_dir() else "not a folder"
            yield f"cache_dir={str(folder)!r}: {parent} is {kind}. Choose another folder."
            return
        self.folder = path
        self._cache_in(str(path))
        if path.exists() and _others_can_write(path):
            self.notes.append(
                f"cache_dir: others can write into {path}, from which JAX runs programs. Use a "
                f"folder of your own: chmod 700."
            )

    def _cache_in(self, folder: str) -> None:
        self.options |= {CACHE_DIR: folder, "jax_enable_compilation_cache": True}

    def _take_seed(self) -> Problems:
        seed = self._settings.get("seed")
        if seed is None:
            return
        from shardax.random import stream  # here, so that `import shardax` stays quick

        try:
            stream.as_source(seed)
        except ShardaxError as problem:
            yield f"seed={seed!r}: {problem}"
        else:
            self.actions.append(partial(stream.seed, seed))

    def _take_dtype(self) -> Problems:
        old_dtype, _ = defaults.process_defaults()
        dtype = self._settings.get("dtype", old_dtype)
        if _is_default(dtype):
            self.actions.append(partial(defaults.set_process_dtype, None))
            return
        if dtype is None:
            return

        # On x64, as it will be, it depends whether a dtype is valid.
        x64 = self._settings.get("x64")
        if type(x64) is not bool:
            x64 = jax.config.values[SWITCHES["x64"]]
        try:
            with jax.enable_x64(x64):
                exact = defaults.default_float(dtype)
        except ShardaxError as problem:
            yield f"dtype={dtype!r}{'' if 'dtype' in self._settings else ', set before'}: {problem}"
        else:
            self.actions.append(partial(defaults.set_process_dtype, exact))

    def _take_create_on(self) -> Problems:
        device = self._settings.get("create_on")
        if _is_default(device):
            self.actions.append(partial(defaults.set_process_device, None))
            return
        if device is None:
            return

        try:
            platform, _ = defaults.parse_device(device)
            if self._backend_runs:
                defaults.as_device(device)
        except ShardaxError as problem:
            yield f"create_on={device!r}: {problem}"
            return
        self.actions.append(partial(defaults.set_process_device, device))

        # JAX must know the platform of that device too.
        chosen = self.options.get(PLATFORMS_OPTION, jax.config.values[PLATFORMS_OPTION])
        if chosen and not self._backend_runs and platform not in (*chosen.split(","), "gpu"):
            self.options[PLATFORMS_OPTION] = f"{chosen},{platform}"


def check_settings(settings: Mapping[str, Any], runs: bool) -> Changes:
    """Returns the changes by settings; one ConfigureError lists all problems."""
    changes = Changes(settings, runs)
    problems = [str(problem) for problem in changes.problems()]
    if problems:
        listed = problems[0] if len(problems) == 1 else "\n  ".join(["", *problems])
        raise ConfigureError(f"shardax.configure changed nothing: {listed}")
    return changes


def _platform_of(settings: Mapping[str, object]) -> object:
    """Returns the platform asked for; a number of devices alone means the processor."""
    return settings.get("platform", "cpu" if _is_count(settings.get("devices")) else "gpu")


def _is_count(devices: Any) -> bool:
    return type(devices) is int and devices >= 1


def _are_numbers(devices: object) -> bool:
    return (
        isinstance(devices, Sequence)
        and all(type(number) is int and number >= 0 for number in devices)
        and len(devices) == len(set(devices)) > 0
    )


def _others_can_write(folder: Path) -> bool:
    # Compiled programs are run as they are found, so who writes there runs code here.
    status = folder.stat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return bool(status.st_mode & 0o022) or not is_own


def _is_default(value: object) -> bool:
    """Whether a setting goes back to JAX's own choice."""
    return isinstance(value, str) and value == "default"


# --- Platforms ---


def backend_runs() -> bool:
    """Whether JAX's backend has started, without starting it."""
    old_count = jax.config.values[CPU_DEVICES]
    try:  # JAX refuses to change this once its backend runs, and only then
        jax.config.update(CPU_DEVICES, 1 if old_count < 0 else old_count + 1)
    except RuntimeError:
        return True
    jax.config.update(CPU_DEVICES, old_count)
    return False


def usable_platform(name: object) -> str:
    """Returns a platform as JAX's settings name it; for ``gpu`` the installed one."""
    if not isinstance(name, str):
        raise ConfigureError(f"platform={name!r} is not the name of a platform, such as 'cpu'.")
    if name == "cpu":
        return name

    plugins = installed_plugins()
    if name not in PLATFORMS:
        if name and any(name in plugin for plugin in plugins):
            return name
        raise ConfigureError(
            f"platform={name!r}: JAX has no such platform, and no plugin for it is installed. "
            f"There are {', '.join(PLATFORMS)}.{did_you_mean(name.strip().lower(), PLATFORMS)}"
        )

    if name == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigureError(_not_installed(name))
        return name

    gpus = GPUS if name == "gpu" else (name,)
    installed = [gpu for gpu in gpus if any(gpu in plugin for plugin in plugins)]
    if not installed:
        raise ConfigureError(_not_installed(name))
    if installed[0] == "cuda" and not nvidia_gpu_is_visible():
        raise ConfigureError(
            f"platform={name!r}: there is no NVIDIA GPU here that this process can see (none of "
            f"{', '.join(NVIDIA_FILES)} exists). Use a machine with one, or platform='cpu'."
        )
    return installed[0]


def installed_plugins() -> set[str]:
    """Returns the names of modules of JAX's platform plugins."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    modules = {module.name for module in pkgutil.iter_modules(folders)}
    return modules | {entry.value for entry in entry_points(group="jax_plugins")}


def nvidia_gpu_is_visible() -> bool:
    """Whether this process can reach an NVIDIA GPU."""
    return any(os.path.exists(path) for path in NVIDIA_FILES)


def _not_installed(name: str) -> str:
    package = "jax[rocm7-local]" if name == "rocm" else f"shardax[{name.replace('gpu', 'cuda')}]"
    return (
        f"platform={name!r}: JAX's support for it is not installed. Install it with "
        f"pip install '{package}', or choose platform='cpu'."
    )
