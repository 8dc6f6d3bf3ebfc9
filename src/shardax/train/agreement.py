# SPDX-License-Identifier: Apache-2.0
"""Agreement of the processes of a run before its first step.

A difference that no error would tell of: other packages, settings, random seeds, loaded values,
shardings, batches, another checkpoint, another program. The first comparison comes before any
array is placed, for placing takes all processes; that of the program and of the copies after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import secrets
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardax import abstract, distributed
from shardax.distributed import arrays, processes
from shardax.extend import LazyValue, stored_value
from shardax.train.checkpoint_format import contents_of
from shardax.train.data import prefetch, sources
from shardax.train.data.batches import WholeBatches
from shardax.train.errors import TrainError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardax.train.run.start import RunStart
    from shardax.train.trainer import Trainer

_PACKAGES = ("shardax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
_CONFIG = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")
_MARKER = ".processes"
_SHARED_SECONDS = 10  # that a shared file system may take to show a file


def check_mesh(mesh: Mesh | None) -> None:
    """Raises TrainError unless the mesh spans all processes."""
    if jax.process_count() == 1:
        return
    have = set() if mesh is None else {device.process_index for device in mesh.devices.flat}
    if without := sorted(set(range(jax.process_count())) - have):
        mesh_text = "no mesh" if mesh is None else f"a mesh without devices of processes {without}"
        raise TrainError(
            f"There are {jax.process_count()} processes, but the Trainer has {mesh_text}. Give a "
            f"mesh over all devices, such as jax.make_mesh(({jax.device_count()},), ('data',))."
        )


def check_shared(folder: Path) -> None:
    """Raises TrainError in all processes if one does not see the folder."""
    blind = _processes_without(folder)
    if blind:
        raise TrainError(
            f"The folder {folder} of processes {blind} is another one than that of process 0. All "
            "must write into one folder: give a path on a file system that they share."
        )


def _processes_without(folder: Path) -> list[int]:
    """Returns the processes without access to the folder of process 0."""
    token = processes.from_main(secrets.token_hex(8), "the run's folder")
    file = folder / _MARKER
    if distributed.is_main():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    distributed.barrier("the run's folder is marked")
    limit = time.monotonic() + _SHARED_SECONDS
    while not (seen := _content(file) == token) and time.monotonic() < limit:
        time.sleep(0.1)
    blind = [i for i, text in enumerate(processes.exchange(str(seen), "folder")) if text != "True"]
    if distributed.is_main():
        file.unlink(missing_ok=True)
    return blind


def _content(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def facts_of(trainer: Trainer, start: RunStart) -> dict[str, str]:
    """Returns facts by name, equal in all processes, before placing."""
    trained, mesh = trainer.trained, trainer.mesh
    assert mesh is not None  # ``check_mesh`` has refused a run of several processes without one
    facts = {"python": platform.python_version()}
    facts |= {name: metadata.version(name) for name in _PACKAGES}
    facts |= {name: str(getattr(jax.config, name)) for name in _CONFIG}
    facts |= {f"setting {path}": text for path, text in trainer.run_settings.items()}
    facts |= {k: repr(v) for k, v in dataclasses.asdict(trainer.settings).items()}
    facts["profile"] = str(trainer.profile and (trainer.profile.first, trainer.profile.last))
    facts["callbacks"] = ", ".join(type(f).__name__ for f in trainer.callbacks.functions)

    devices = [device.id for device in mesh.devices.flat]
    facts["mesh"] = f"{dict(mesh.shape)} of devices {devices}"
    # Into abstract values, which hold the layout that ``shard`` would choose.
    for array in contents_of(abstract(trained, mesh, trainer.rules, **trainer.where)).arrays:
        facts[f"sharding of {array.path}"] = f"{array.shape} {array.dtype} {array.value.sharding}"

    if start.description is None:
        facts |= _initial_values(trained)
    facts["checkpoint"] = f"step {start.step}, {_digest(start.description)}"

    source = trainer.batches
    # Each process has its own position in local batches.
    position = source.batch_size if hasattr(source, "local_rows") else source.state()
    facts["batches"] = f"{type(source).__name__} {json.dumps(position, default=repr)}"
    facts["batch"] = _batch_text(source)

    if trainer.held_out is not None:
        facts["held-out batch"] = _batch_text(trainer.held_out)
    return facts


def _initial_values(tree: object) -> dict[str, str]:
    """Returns random seeds of lazy values, and digests of the others."""
    facts: dict[str, str] = {}
    for array in contents_of(tree).arrays:
        value: Any = stored_value(array.variable)

        # Of a lazy value that is made of random keys, these are the keys.
        recipe: Any = value
        if isinstance(value, LazyValue) and getattr(recipe, "is_known", False):
            roots = [
                (source.root if isinstance(source.root, int) else processes.array_text(source.root))
                for source in recipe.sources
            ]
            folds = [source.folds for source in recipe.sources]
            facts[f"random key of {array.path}"] = f"seed {roots} {folds}"
        elif isinstance(value, LazyValue):
            continue  # made from other values, such as an optimizer's state from its parameters
        elif getattr(array.value, "is_fully_addressable", isinstance(array.value, np.ndarray)):
            facts[f"value of {array.path}"] = processes.array_text(array.value)
    return facts


def _batch_text(source) -> str:
    """Returns shapes, dtypes and digests of a batch."""
    prefetch.require_rows(source)

    def peeking():
        is_positioned = isinstance(source, sources.Positioned)
        return sources.peeking(source) if is_positioned else contextlib.nullcontext()

    with peeking():
        text = str(jax.tree.map(str, prefetch.first_batch(source)))
    if hasattr(source, "local_rows"):
        return text

    # One row, which each process can read; of whole batches all, for each process reads all.
    with peeking():
        first = iter(source) if isinstance(source, WholeBatches) else source.by_rows(np.arange(1))
        batch = next(iter(first), None)
        return text + str(jax.tree.map(lambda leaf: processes.array_text(np.asarray(leaf)), batch))


def compare_programs(trainer: Trainer, sharding: Any) -> None:
    """Raises DistributedError if the processes would run different steps."""
    source = trainer.batches
    with sources.peeking(source):
        batch = prefetch.first_batch(source)
    shapes = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        batch,
        jax.tree.broadcast(sharding, batch),
    )
    step: Any = trainer.train_step
    text = step.lower(*trainer.trained, shapes).as_text()
    processes.compare({"program of a step": _digest(text)}, "before the first step")


def compare_copies(trainer: Trainer, when: str) -> None:
    """Raises DistributedError if copies of trained arrays differ."""
    names = ("model", "optimizer", "ema")
    arrays.compare_replicas(dict(zip(names, trainer.trained, strict=False)), when)


def _digest(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree_to_start(trainer: Trainer, start: RunStart) -> None:
    """Raises DistributedError in every process if the runs would differ."""
    check_shared(trainer.directory)
    processes.compare(facts_of(trainer, start), "before placing")
