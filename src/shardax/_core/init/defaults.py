# SPDX-License-Identifier: Apache-2.0
"""Default dtype and device of new arrays.

A *creation helper* is a function that makes an array of nothing but its arguments, and only outside
of programs: those of ``shardax.random``. Where it is given no dtype or device, defaults apply, the
innermost first: those of a ``with`` block (``default_dtype``, ``default_device``), which belong to
the thread that entered it; then those of the process (``shardax.configure``); then JAX's own. What
also works inside of programs takes no part: a compiled program would keep the default of its trace.

``default_device`` is that of JAX, for JAX's own functions and for computations too. The device of
the process is for creation helpers alone, so that data may be made in the host's memory while
computations stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.errors import ModuleError


class _Process:
    """Defaults of the process."""

    dtype: np.dtype | None = None
    device: str | None = None  # by name, for no backend may run yet


_block_dtype: ContextVar[np.dtype | None] = ContextVar("shardax_default_dtype", default=None)


def exact_dtype(dtype: Any) -> np.dtype:
    """Returns a dtype that JAX would not narrow."""
    try:
        exact = jnp.dtype(dtype)
    except TypeError as error:
        raise ModuleError(
            f"{dtype!r} is not a dtype. Give one such as jnp.float32, or its name."
        ) from error

    # Python's own types mean JAX's default. By identity, for NumPy's float64 calls itself equal to
    # float.
    canonical = jax.dtypes.canonicalize_dtype(exact)
    if canonical != exact and not any(dtype is each for each in (float, int, complex)):
        raise ModuleError(
            f"The dtype {exact.name} needs 64 bits, which JAX has switched off; it would become "
            f"{canonical.name}. Switch them on at the top of the script, "
            f"shardax.configure(x64=True), "
            f"or for a block of code, with jax.enable_x64(True)."
        )
    return canonical


def float_dtype(dtype: jax.typing.DTypeLike | None = None) -> np.dtype:
    """Returns the dtype given, else the default of floats."""
    if dtype is None:
        dtype = _block_dtype.get() or _Process.dtype or float
    return exact_dtype(dtype)


def default_float(dtype: Any) -> np.dtype:
    """Returns a dtype that may be the default of floats."""
    exact = exact_dtype(dtype)
    if not jnp.issubdtype(exact, jnp.floating):
        raise ModuleError(
            f"The default dtype of floats cannot be {exact.name}. Give one such as jnp.float32 or "
            f"'bfloat16'; other dtypes are given where an array is made: dtype={exact.name!r}."
        )
    return exact


@contextlib.contextmanager
def default_dtype(dtype: jax.typing.DTypeLike) -> Generator[np.dtype]:
    """Sets the default dtype of new float arrays in a block.

    It belongs to the thread that enters the block. Functions of ``jax.numpy`` have defaults of
    their own, which this leaves alone.

    Args:
        dtype: A floating dtype or its name.

    Yields:
        The dtype.

    Raises:
        ModuleError: If it is not floating, or has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> with sx.default_dtype("bfloat16"):
        ...     sx.random.normal(3).dtype.name
        'bfloat16'
    """
    exact = default_float(dtype)
    token = _block_dtype.set(exact)
    try:
        yield exact
    finally:
        _block_dtype.reset(token)


@contextlib.contextmanager
def default_device(device: str | jax.Device) -> Generator[jax.Device]:
    """Sets the device of new arrays and computations in a block.

    It is ``jax.default_device`` with devices by name, and belongs to the thread that enters the
    block. Arrays are not committed to the device: they may be used together with others.

    Args:
        device: A ``jax.Device``, or its platform with or without a number, such as ``"cpu"`` or
            ``"gpu:1"``.

    Yields:
        The ``jax.Device``.

    Raises:
        ModuleError: If there is no such device.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> with sx.default_device("cpu:0") as device:
        ...     sx.random.normal(3).devices() == jnp.zeros(3).devices() == {device}
        True
    """
    jax_device = as_device(device)
    with jax.default_device(jax_device):
        yield jax_device


def as_device(device: object) -> jax.Device:
    """Returns a device by name; starts JAX's backend."""
    if isinstance(device, jax.Device):
        return device

    platform, number = parse_device(device)
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ModuleError(
            f"There is no device {device!r}: JAX runs without the platform {platform!r}. Its own "
            f"choice is {jax.default_backend()!r}. Several are chosen at the top of the script: "
            f"shardax.configure(platform={platform!r})."
        ) from error
    if number >= len(devices):
        raise ModuleError(
            f"There is no device {device!r}: {platform!r} has {len(devices)} here, "
            f"{platform}:0 to {platform}:{len(devices) - 1}."
        )
    return devices[number]


def parse_device(name: object) -> tuple[str, int]:
    """Reads the name of a device, without starting JAX's backend."""
    text = name if isinstance(name, str) else ""
    platform, colon, number = text.partition(":")
    if not platform.isidentifier() or (colon and not number.isdecimal()):
        raise ModuleError(
            f"{name!r} does not name a device. Give a jax.Device, or a platform with or without a "
            f"number, such as 'cpu' or 'gpu:1'."
        )
    return platform, int(number or 0)


def set_process_dtype(dtype: jax.typing.DTypeLike | None) -> None:
    """Sets the dtype of the process; None for JAX's own."""
    _Process.dtype = None if dtype is None else default_float(dtype)


def set_process_device(name: str | None) -> None:
    """Sets the device of the process by name; None for JAX's own."""
    if name is not None:
        parse_device(name)
    _Process.device = name


def process_defaults() -> tuple[np.dtype | None, str | None]:
    """Returns dtype and device of the process, None for JAX's own."""
    return _Process.dtype, _Process.device


def creation_device() -> contextlib.AbstractContextManager[Any]:
    """Returns the context for creating an array without a given device."""
    if _Process.device is None or getattr(jax.config, "jax_default_device", None) is not None:
        return contextlib.nullcontext()
    return jax.default_device(as_device(_Process.device))
