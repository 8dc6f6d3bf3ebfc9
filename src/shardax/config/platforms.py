# SPDX-License-Identifier: Apache-2.0
"""Platforms: what JAX may run on here, found out without starting it.

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
from importlib.metadata import entry_points
from typing import Any

import jax

from shardax.core.errors import ConfigureError
from shardax.partition.findings import did_you_mean

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
