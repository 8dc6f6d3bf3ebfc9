# SPDX-License-Identifier: Apache-2.0
"""What must be set before JAX's backend starts, in processes in which it has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
import jax
import shardax as sx
from shardax.config.configure import backend_runs

def refused(**settings):
    before = dict(jax.config.values)
    try:
        sx.configure(**settings)
    except sx.errors.ConfigureError as error:
        assert dict(jax.config.values) == before
        return type(error).__name__

found = {"ran at first": backend_runs()}
rngs = sx.Rngs(params=0, dropout=1)
layer = lambda: sx.nn.Sequential(sx.nn.MLP(8, 16, rngs=rngs), sx.nn.Dropout(0.5, rngs=rngs.fork()))
stack = sx.nn.Stack(layer, 3)
found["kernel"] = repr(stack.stacked.layers[0].up.kernel)
found["kernel of a layer"] = repr(stack[1].layers[0].up.kernel)
found["ran after building"] = backend_runs()
found["shown"] = str(sx.configure()).splitlines()[0].split(", ")[-1]
found["not valid"] = refused(devices=3, x64="yes")
configuration = sx.configure(
    devices=3, x64=True, seed=4, create_on="cpu:2", cache_dir=sys.argv[1], cache_min_seconds=0
)
found["notes"] = configuration.notes
found["ran after configure"] = backend_runs()
found["devices"] = [[device.platform, device.id] for device in jax.devices()]
found["ran in the end"] = backend_runs()
found["too late"] = refused(devices=2)
drawn = sx.random.normal(2)
found["drawn"] = [str(drawn.dtype), [device.id for device in drawn.devices()]]
sx.random.seed(4)
found["as seeded"] = bool((sx.random.normal(2) == drawn).all())
sx.configure(devices=3, platform="cpu")
print(json.dumps(found))
"""


def run(program: str, *arguments: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_new_process_builds_lazily_and_runs_as_configured(tmp_path: Path) -> None:
    flag = "--xla_force_host_platform_device_count=5"
    assert run(PROGRAM, str(tmp_path / "cache"), JAX_PLATFORMS="tpu", XLA_FLAGS=flag) == {
        "ran at first": False,
        "kernel": "Param(float32[3, 8, 16], lazy, axes=('layers', 'embed', 'mlp'))",
        "kernel of a layer": "Param(float32[8, 16], lazy, axes=('embed', 'mlp'))",
        "ran after building": False,  # building models runs no operation of JAX
        "shown": "its backend has not started",
        "not valid": "ConfigureError",
        "notes": [
            "platform: overrides JAX_PLATFORMS=tpu of the environment.",
            "devices: overrides xla_force_host_platform_device_count of XLA_FLAGS.",
        ],
        "ran after configure": False,
        "devices": [["cpu", number] for number in range(3)],
        "ran in the end": True,
        "too late": "ConfigureError",
        "drawn": ["float64", [2]],
        "as seeded": True,
    }
    assert any((tmp_path / "cache").iterdir())
