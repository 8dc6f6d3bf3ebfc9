# SPDX-License-Identifier: Apache-2.0
"""``configure``: the settings of a process in one call, at the top of a script.

All settings are checked before the first is changed, and if something fails on the way, what was
changed is put back. Only options of ``jax.config`` and shardax's own defaults are set; nothing in
JAX is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardax._core._jax import is_eager
from shardax._core.init.defaults import process_defaults
from shardax.config.settings import (
    BACKEND_SETTINGS,
    CACHE_DIR,
    CACHE_SECONDS,
    CHOICES,
    CPU_DEVICES,
    GPUS,
    PLATFORMS,
    SWITCHES,
    VISIBLE,
    Changes,
    ConfiguredTooLateError,
    ConfigureError,
    backend_runs,
    check_settings,
    platform_of,
)


@dataclass(frozen=True, repr=False)
class Configuration:
    """The settings of the process, as ``configure`` found and left them; printing shows them all.

    Attributes:
        settings: The value of each setting by name, None where the choice is JAX's. A seed is there
            only if it was given.
        given: The names of those that the call set.
        notes: What else to know about them.
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
        title = (
            f"shardax settings (* set by this call); JAX {jax.__version__}, its backend {started}"
        )
        return "\n".join([title, *rows, *self.notes])

    __repr__ = __str__


def configure(
    *,
    devices: int | Sequence[int] | None = None,
    platform: str | None = None,
    x64: bool | None = None,
    dtype: Any = None,
    create_on: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_min_seconds: float | None = None,
    seed: Any = None,
    matmul_precision: str | None = None,
    rank_promotion: str | None = None,
    debug_nans: bool | None = None,
    debug_infs: bool | None = None,
    debug_key_reuse: bool | None = None,
    log_compiles: bool | None = None,
) -> Configuration:
    """Sets up the process: call it once at the top of a script.

    What is not given stays as it is. ``devices`` and ``platform`` must come before JAX starts its
    backend, which the first array does, or ``jax.devices()``; the others may come at any time.
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
        log_compiles: Whether to log what is compiled.

    Returns:
        All settings as they are now; ``print`` it.

    Raises:
        ConfigureError: If a setting is not valid. Nothing was changed.
        ConfiguredTooLateError: If the backend already runs, otherwise than asked for. Nothing was
            changed.

    Example:
        >>> import shardax as sx
        >>> print(sx.configure(debug_infs=False, seed=0))
        shardax settings (* set by this call); JAX ..., its backend ...
          platform ...
        * seed ...
    """
    given = {name: value for name, value in locals().items() if value is not None}
    if not is_eager():
        raise ConfigureError(
            "shardax.configure was called while a JAX transform is tracing, where settings would "
            "hold for a part of a program. Nothing was changed. Call it at the top of the script."
        )
    runs = backend_runs()
    changes = check_settings(given, runs)
    if runs:
        _check_not_late(given)
    _apply(changes)
    return Configuration(_settings_now(seed, runs), tuple(given), tuple(changes.notes), runs)


def _check_not_late(given: Mapping[str, Any]) -> None:
    late = {name: given[name] for name in BACKEND_SETTINGS if name in given}
    running, count = jax.default_backend(), jax.local_device_count()
    platform, devices, options = platform_of(given), given.get("devices"), jax.config.values
    if platform == running or (platform in GPUS and running == "gpu"):
        late.pop("platform", None)
        if devices == count or _visible(devices) in [options[VISIBLE.format(gpu)] for gpu in GPUS]:
            late.pop("devices", None)
    if late:
        asked = ", ".join(f"{name}={value!r}" for name, value in late.items())
        raise ConfiguredTooLateError(
            f"shardax.configure changed nothing: {asked} came too late. JAX's backend already runs "
            f"in this process, on {count} device{'' if count == 1 else 's'} of the platform "
            f"{running!r}, and cannot change. Call shardax.configure at the top of the script, "
            f"before anything makes an array or asks for devices (jax.devices(), jnp.zeros, ...), "
            f"modules that are imported before included; in a notebook, restart the kernel first."
        )


def _visible(devices: Any) -> str | None:
    """The numbers of devices as JAX's options have them."""
    return ",".join(map(str, devices)) if isinstance(devices, Sequence) else None


def _apply(changes: Changes) -> None:
    if changes.folder is not None:
        changes.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = {name: jax.config.values[name] for name in changes.options}
    try:
        for name, value in changes.options.items():
            jax.config.update(name, value)
    except Exception:
        for name, value in before.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        raise
    if changes.options.get(CACHE_DIR) != before.get(CACHE_DIR):
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()  # otherwise JAX stays with the folder it first used
    for action in changes.actions:
        action()


def _settings_now(seed: Any, runs: bool) -> dict[str, Any]:
    options = jax.config.values
    dtype, device = process_defaults()
    count = options[CPU_DEVICES]
    return {
        "platform": jax.default_backend() if runs else options[PLATFORMS] or None,
        "devices": jax.local_device_count() if runs else count if count >= 0 else None,
        "dtype": None if dtype is None else dtype.name,
        "create_on": device,
        "cache_dir": options[CACHE_DIR],
        "cache_min_seconds": options[CACHE_SECONDS],
        **({} if seed is None else {"seed": seed}),
        **{name: options[option] for name, (option, _) in CHOICES.items()},
        **{name: options[option] for name, option in SWITCHES.items()},
    }
