# SPDX-License-Identifier: Apache-2.0
"""Devices and meshes as the command line names them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from shardax.core.errors import CommandError
from shardax.partition.findings import did_you_mean


def use_devices(count: int | None) -> None:
    """Makes this process use ``count`` virtual CPU devices; None leaves JAX's own choice.

    Args:
        count: Number of devices.

    Raises:
        CommandError: If JAX already runs with another number of devices.
    """
    if count is None:
        return
    if count < 1:
        raise CommandError(f"--devices {count}: give at least 1.")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend is up: fine if it is what was asked for
        pass
    if jax.device_count() != count:
        raise CommandError(
            f"--devices {count}, but JAX already runs with {jax.device_count()} in this process. "
            f"Set it in a new process."
        )


def mesh_sizes(text: str, axes: Sequence[str] | None = None) -> dict[str, int]:
    """Reads the sizes of mesh axes from a text such as ``data=2,model=4``.

    Args:
        text: Comma-separated ``name=size``.
        axes: The names that rules use. One that the text leaves out has size 1. None: any names.

    Raises:
        CommandError: If the text cannot be read, or names another axis.

    Example:
        >>> mesh_sizes("model=4", ("data", "model"))
        {'model': 4, 'data': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip().isidentifier() or not size.strip().isdigit() or int(size) < 1:
            raise CommandError(
                f"--mesh {text!r}: {part!r} is not name=size, as in --mesh data=2,model=4."
            )
        if axes is not None and name.strip() not in axes:
            raise CommandError(
                f"--mesh {text!r}: no rule lays anything out over an axis {name.strip()!r}; the "
                f"axes are {', '.join(axes)}.{did_you_mean(name.strip(), axes)}"
            )
        if name.strip() in sizes:
            raise CommandError(f"--mesh {text!r}: the axis {name.strip()!r} is given twice.")
        sizes[name.strip()] = int(size)
    sizes.update({name: 1 for name in axes or () if name not in sizes})
    return sizes


def parse_mesh(text: str, axes: Sequence[str] | None) -> Mesh | None:
    """Makes the mesh that a text such as ``data=2,model=4`` describes, with Auto axes.

    Args:
        text: Comma-separated ``name=size``; empty: no mesh.
        axes: As in ``mesh_sizes``.

    Raises:
        CommandError: If the text cannot be read, names another axis, or the devices do not suffice.

    Example:
        >>> dict(parse_mesh("data=1", ("data", "model")).shape)
        {'data': 1, 'model': 1}
    """
    if not text:
        return None
    sizes = mesh_sizes(text, axes)
    needed = math.prod(sizes.values())
    if needed > jax.device_count():
        raise CommandError(
            f"--mesh {text} needs {needed} devices, but there are {jax.device_count()}. For "
            f"virtual CPU devices add --devices {needed}."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:needed],
    )
