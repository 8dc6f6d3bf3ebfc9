# SPDX-License-Identifier: Apache-2.0
"""What tests of pickling share: what pickle finds by name, and another process to read in."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import shardax as sx


class Custom(sx.Param):
    """A Variable type of the user's own."""


@dataclasses.dataclass(frozen=True)
class Box(sx.partition.AxisMetadata[Any]):
    """A box of the user's own."""

    value: Any
    names: tuple[Any, ...]

    def add_axis(self, index: int, params: Any) -> Box:
        """Adds a name."""
        return Box(self.value, (*self.names, None))

    def remove_axis(self, index: int, params: Any) -> Box:
        """Removes a name."""
        return Box(self.value, self.names[:-1])


class Holder(sx.Module):
    """A Module that holds whatever it is given."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


class Placed(sx.Module):
    """A Module that holds its mesh and a sharding as configuration."""

    def __init__(self, mesh: Mesh, sharding: NamedSharding) -> None:
        self.mesh = mesh
        self.places = (sharding, {"kernel": sharding}["kernel"])
        self.kernel = Custom(jnp.arange(32.0).reshape(4, 8), axes=("embed", "mlp"))
        self.tied = self.kernel


@sx.jit
def compiled(x: Any) -> Any:
    """Compiled."""
    return x + 1


@sx.vmap
def mapped(x: Any) -> Any:
    """Mapped."""
    return x


@sx.custom_vjp
def ruled(x: Any) -> Any:
    """With a rule."""
    return x


ruled.defvjp(lambda x: (x, None), lambda _, g: (g,))


@jax.custom_vjp
def jax_ruled(x: Any) -> Any:
    """With a rule, by JAX."""
    return x


jax_ruled.defvjp(lambda x: (x, None), lambda _, g: (g,))


@sx.host.host_function(out=jax.ShapeDtypeStruct((), jnp.float32))
def hosted(x: Any) -> Any:
    """On the host."""
    return x


def run(code: str, devices: int, directory: Path) -> str:
    """Runs a program in a process with so many devices, and returns what it printed."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
