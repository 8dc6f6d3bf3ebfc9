# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests call in workers by their import path; a worker imports this file."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import shardax as sx
from tests.tools.host.waiting import wait_for

TRACES = []


@jax.jit
def by_jax(x):
    TRACES.append("by_jax")
    return x * 2


@sx.jit
def by_shardax(model, x):
    TRACES.append("by_shardax")
    return model(x)


def traces():
    return list(TRACES)


def process():
    return os.getpid()


def fails(what):
    raise KeyError(what)


class Unloadable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fails_unloadably():
    raise Unloadable("one", "two")


def leaves():
    raise SystemExit(3)


def crash():
    os.kill(os.getpid(), signal.SIGKILL)


def crash_once(path):
    """Ends the process, the first time."""
    if not Path(path).exists():
        Path(path).touch()
        crash()
    return os.getpid()


def nap(seconds):
    time.sleep(seconds)
    return seconds


def hold(path):
    """Runs until there is a file."""
    wait_for(Path(path).exists)
    return "released"


def count(path, seconds=60):
    """Counts in a file until it is interrupted; the file says how that went."""
    try:
        for step in range(int(seconds * 100)):
            Path(path).write_text(str(step))
            time.sleep(0.01)
    except BaseException as error:
        Path(path).write_text(type(error).__name__)
        raise


def deaf(path):
    """Goes on when it is interrupted."""
    while True:
        try:
            Path(path).touch()
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            continue


def stop_process():
    os.kill(os.getpid(), signal.SIGSTOP)


def tell(x):
    """What arrived, in words."""
    return type(x).__name__, str(x.dtype), np.shape(x), str(getattr(x, "sharding", ""))


def make(size):
    return jnp.zeros(size, "uint8")


def train(model, rate):
    model.kernel[...] = model.kernel - rate
    return float(model.kernel.value.sum())


def settings():
    return jax.local_device_count(), jax.config.jax_enable_x64, jax.config.jax_compilation_cache_dir


def add(x, y):
    return x + y


def process_after(seconds, _):
    time.sleep(seconds)
    return os.getpid()


def thread_name():
    return threading.current_thread().name
