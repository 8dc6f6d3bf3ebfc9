# SPDX-License-Identifier: Apache-2.0
"""Programs of the tests with several processes: functions from JSON to JSON.

Processes run one after another, so each leaves settings as they were.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax.models import next_token_loss
from tests.advice import run_advice
from tests.models import forms
from tests.training.distributed.processes import SECONDS
from tests.training.train import small_runs
from tests.values import with_values


def mesh_of(sizes: dict[str, int], *, transposed: bool = False) -> Any:
    """A mesh over all devices; transposed: neighbors along the first axis share a process."""
    devices = np.array(jax.devices())
    order = devices.reshape(tuple(sizes.values())[::-1]).T if transposed else devices
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.sharding.Mesh(order.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


@functools.cache
def replicate(mesh: Any) -> Any:
    """A function that gives each device of a mesh all numbers of arrays."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def whole(tree: Any) -> Any:
    """All numbers of arrays over one mesh, as lists."""
    mesh = jax.tree.leaves(tree)[0].sharding.mesh
    return jax.tree.map(lambda x: np.asarray(x).tolist(), replicate(mesh)(tree))


def read_rows(start: int, stop: int) -> dict[str, Any]:
    """Rows that hold their own numbers."""
    rows = np.arange(start, stop)
    return {"row": rows, "pair": np.stack([rows, -rows], axis=1)}


def batches_on_meshes(meshes: list[Any], folder: Path) -> list[Any]:
    """For each mesh: the numbers of two batches, which rows were read here, and the position."""
    found = []
    rows: Any = None
    for sizes, transposed in meshes:
        mesh = mesh_of(sizes, transposed=transposed)
        read: list[int] = []

        def source(start: int, stop: int, read: list[int] = read) -> Any:
            read.extend(range(start, stop))
            return read_rows(start, stop)

        rows = NamedSharding(mesh, PartitionSpec("data"))
        pairs = NamedSharding(mesh, PartitionSpec("data", "model" if "model" in sizes else None))
        batches = sx.train.RowBatches(source, batch_size=8)
        with sx.train.Prefetch(batches, {"row": rows, "pair": pairs}) as taken:
            values = [whole(next(taken)) for _ in range(2)]
            state = taken.state()
        found.append([values, sorted({row for row in read if row < 8}), state["step"]])
    same_everywhere = [read_rows(0, 8), read_rows(8, 16)]
    with sx.train.Prefetch(sx.train.WholeBatches(same_everywhere, batch_size=8), rows) as taken:
        found.append([whole(batch) for batch in taken])
    try:
        sx.train.Prefetch(same_everywhere, rows)
    except sx.errors.DataError as error:
        found.append(str(error))
    return found


def digest_of(trainer: sx.train.Trainer) -> str:
    """The digest of all values of model and optimizer, wherever their parts are."""
    found = hashlib.sha256()
    for path, variable in sx.iter_variables((trainer.model, trainer.optimizer)):
        value = sx.distributed.gather(variable)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        found.update(str(path).encode() + np.asarray(value).tobytes())
    return found.hexdigest()


def elastic_trainer(folder: Path, steps: int, mesh: Any) -> sx.train.Trainer:
    """The trainer of one run, on another mesh each time."""
    return small_runs.make_trainer(
        folder / "run", steps, mesh=mesh, model=small_runs.Bigram(dropout=0.1), log_every=1
    )


def resumed(settings: dict[str, Any], folder: Path) -> list[Any]:
    """Digests of what was restored and of what the run came to, and the position of the data."""
    trainer = elastic_trainer(folder, settings["steps"], mesh_of(settings["mesh"]))
    again = elastic_trainer(folder, settings["steps"], trainer.mesh)
    checkpoints = sx.train.Checkpoints(folder / "run" / "checkpoints")
    state = (again.model, again.optimizer)
    checkpoints.restore(state, mesh=again.mesh, rules=small_runs.RULES)
    trainer.run(resume=True)
    return [digest_of(again), digest_of(trainer), trainer.batches.state()["step"]]


class Large(sx.Module):
    """One array of many rows."""

    def __init__(self, rows: int) -> None:
        def numbered(key: Any, shape: Any, dtype: Any) -> Any:
            return jax.lax.broadcasted_iota(dtype, shape, 0)

        self.rows = sx.Param(
            sx.Init(numbered, (rows, 1024), rngs=sx.Rngs(0)), axes=("vocab", "embed")
        )


def restored_large(settings: dict[str, Any], folder: Path) -> list[Any]:
    """How many bytes restoring took here at most, how many are held, and the first row here."""
    del folder
    model, mesh = Large(settings["rows"]), mesh_of({"data": 1, "model": jax.device_count()})
    jnp.zeros(1).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sx.train.checkpoint.restore(model, settings["path"], mesh=mesh, rules=small_runs.RULES)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (shard,) = model.rows.value.addressable_shards
    return [1024 * (after - before), shard.data.nbytes, float(shard.data[0, 0])]


def trained(meshes: list[Any], folder: Path) -> list[Any]:
    """For each mesh: the digest of model and optimizer here, the parameters, and the result."""
    found = []
    for number, (sizes, transposed) in enumerate(meshes):
        trainer = small_runs.make_trainer(
            folder / f"run{number}",
            4,
            mesh=mesh_of(sizes, transposed=transposed),
            held_out=small_runs.eval_batches(max_batches=2),
            model=small_runs.Bigram(dropout=0.1),
            log_every=1,
            check_replicas_every=2,
        )
        result = trainer.run()
        kernel = sx.distributed.gather(trainer.model)[".head.kernel"]
        found.append([digest_of(trainer), kernel.tolist(), result.loss, result.eval_loss])
    return found


def reduced(arguments: Any, folder: Path) -> list[Any]:
    """Losses where gradients are summed within processes and then between them."""
    over, dtype = ("slice", "data"), arguments
    trainer = small_runs.make_trainer(
        folder / "run",
        4,
        mesh=mesh_of({"slice": 2, "data": 2, "model": 1}),
        layout={"overrides": {sx.OptState: {"embed": over}}},
        log_every=1,
        reduce_over=over,
        reduce_dtype=dtype,
    )
    trainer.rules = small_runs.RULES.override({"batch": over})
    trainer.run(display=small_runs.Quiet())
    kernel = sx.distributed.gather(trainer.model)[".head.kernel"]
    return [digest_of(trainer), kernel.tolist()]


def in_forms(names: list[str], folder: Path) -> list[Any]:
    """Loss and gradients of one model under forms of parallelism."""
    found = []
    for form in forms.FORMS:
        if form.name in names:
            mesh, scope = mesh_of(form.sizes), sx.parallel(**form.settings)
            model = sx.shard(with_values(sx.clone(forms.whole())), mesh, form.rules)
            with jax.set_mesh(mesh), sx.axis_rules(form.rules), scope:
                loss, gradients = forms.step(model, forms.make_batch())
            arrays = {str(path): each for path, each in gradients.flat().items()}
            found.append([float(loss), whole(arrays)])
    return found


def stopped_by_one(meshes: list[Any], folder: Path) -> list[Any]:
    """Where a run ends that the last process stops, its held-out numbers, its best checkpoint."""
    found = []
    for number, (sizes, transposed) in enumerate(meshes):

        def last_stops(event: sx.train.Event) -> None:
            if event.step >= 3 and jax.process_index() == jax.process_count() - 1:
                event.stop()

        best = sx.train.BestCheckpoint("eval_accuracy", mode="max")
        trainer = small_runs.make_trainer(
            folder / f"run{number}",
            9,
            mesh=mesh_of(sizes, transposed=transposed),
            held_out=small_runs.eval_batches(max_batches=2),
            eval={"accuracy": sx.train.metrics.Accuracy()},
            callbacks=(last_stops, best),
            eval_every=1,
            log_every=2,
            checkpoint_every=4,
        )
        result = trainer.run()
        found.append([result.step, result.eval_loss, best.step, best.best])
    return found


class Scaled(sx.Module):
    """A model with a value that each process makes itself."""

    def __init__(self, scale: float, seed: int = 0) -> None:
        self.embed = sx.nn.Embed(256, 256, rngs=sx.Rngs(seed))
        self.scale = sx.Param(np.full((2,), scale, np.float32))

    def __call__(self, tokens: Any) -> Any:
        return self.embed(tokens) * self.scale.value.mean()


def changed_copy(mesh: Any, other: bool) -> Scaled:
    """A sharded model of which the process ``other`` holds another copy of ``scale``."""
    made = Scaled(2.0)
    sx.shard(made, mesh, small_runs.RULES)
    if other:
        array = made.scale.value
        parts = [jnp.full_like(each.data, 3.0) for each in array.addressable_shards]
        parts = [jax.device_put(x, s.device) for x, s in zip(parts, array.addressable_shards)]  # noqa: B905
        made.scale.value = jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, parts
        )
    return made


def advised(name: str, error: Exception, model: Scaled) -> dict[str, Any]:
    """What the code gives that some errors of ``disagreeing`` advise."""
    array = model.embed.embedding.value
    names = {"sx": sx, "model": model, "x": array, "array": array}
    if name == "tolist":
        return {"gathered": len(run_advice(error, "sx.distributed.gather(x)", names))}
    if name == "unshard":
        return {"arrays": sorted(run_advice(error, "sx.distributed.gather(model)", names))}
    if name == "pickle":
        whole_array = run_advice(error, "sx.distributed.gather(array)", names)
        return {"pickled": len(sx.host.loads(sx.host.dumps(whole_array)))}
    return {}


def disagreeing(_: Any, folder: Path) -> dict[str, Any]:
    """The messages of runs of which process 1 does something else."""
    other = sx.distributed.process_index() == 1
    mesh = mesh_of({"data": 2, "model": 2})
    made = changed_copy(mesh, other)
    spans = sx.Param(made.embed.embedding.value)

    def run(name: str, **options: Any) -> None:
        small_runs.make_trainer(folder / name, 2, **{"mesh": mesh, **options}).run()

    def other_loss(model: Any, batch: Any) -> Any:
        loss = next_token_loss(model, batch)
        return jnp.exp(jnp.log(loss)) if other else loss

    rate = 1e-2 if not other else 2e-2
    rows = np.zeros((8, 17), np.int32) + (1 if other else 0)
    whole = [{"inputs": rows[:, :-1], "targets": rows[:, 1:]}]
    attempts: dict[str, Any] = {
        "learning rate": lambda: run("rate", tx=optax.sgd(rate)),
        "seed": lambda: run("seed", model=small_runs.Bigram(seed=1 if other else 0)),
        "batch size": lambda: run("batch", batch_size=8 if not other else 16),
        "layout": lambda: run(
            "layout", layout={"overrides": {sx.OptState: {"vocab": None}}} if other else None
        ),
        "steps": lambda: run("steps", log_every=1 if not other else 2),
        "value": lambda: run("value", model=Scaled(2.0 if not other else 3.0)),
        "whole batches": lambda: run("whole", batches=Repeated(whole)),
        "program": lambda: run("program", loss=other_loss),
        "copies": lambda: run("copies", model=made),
        "folder": lambda: run(f"own{int(other)}"),
        "no mesh": lambda: run("none", mesh=None),
        "part of a mesh": lambda: run(
            "part", mesh=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        ),
        "np.asarray": lambda: np.asarray(spans),
        "tolist": lambda: sx.freeze(spans).tolist(),
        "named": lambda: np.asarray(sx.named.wrap(spans.value)),
        "host": lambda: sx.host.host_function(np.square, out=lambda x: x, nondiff=True)(
            spans.value
        ),
        "pickle": lambda: sx.host.dumps(spans),
        "unshard": lambda: sx.unshard(made),
        "agree": lambda: sx.distributed.agree("width", {"a": 1, "b": [2, 3 if other else 4]}),
        "barrier": lambda: sx.distributed.barrier("here" if other else "there"),
    }

    @sx.jit
    def scaled(array: Any, options: Any, *, shift: Any = 0.0) -> Any:
        return array * options["rate"] + shift

    rate_here = np.float32(0.5 if other else 0.25)
    attempts |= {
        "numpy": lambda: scaled(spans, {"rate": rate_here}),
        "number": lambda: scaled(spans, {"rate": 1.0}, shift=2.0 if other else 3.0),
        # Nothing spans processes, and nothing differs.
        "own numpy": lambda: scaled(jnp.ones(2), {"rate": rate_here}),
        "equal numpy": lambda: scaled(spans, {"rate": np.float32(1)}),
    }
    found: dict[str, Any] = {}
    for name, attempt in attempts.items():
        sx.configure(debug_processes="num" in name)
        begin = time.monotonic()
        try:
            attempt()
            found[name] = "nothing was raised"
        except sx.errors.ShardaxError as error:
            found[name] = f"{type(error).__name__}: {error}"
            found |= advised(name, error, made)
        assert time.monotonic() - begin < SECONDS / 2
    found["repr"] = repr(spans)
    with contextlib.redirect_stdout(io.StringIO()) as picture:
        sx.view.show_sharding(spans)
    found["picture"] = picture.getvalue()
    found["page"] = sx.view.sharding_html(spans)
    assert sx.distributed.agree("width", {"a": 1}) == {"a": 1}
    sx.distributed.barrier("the end")
    with contextlib.suppress(sx.errors.DistributedError):
        sx.distributed.initialize()  # once more changes nothing
        found["again"] = str(jax.process_count())
    sx.configure(debug_processes=False)
    return found


def numbered_rows(count: int = 96) -> list[Any]:
    """Rows of tokens, of which no two are equal."""
    tokens = np.random.default_rng(0).integers(0, 256, (count, 17))
    return [{"inputs": row[:-1], "targets": row[1:]} for row in tokens]


def rows_of_this_process(local_rows: int) -> Any:
    """A dataset of grain that gives each process its own rows, and reads on at another pace."""
    import grain

    other = sx.distributed.process_index()
    kept = [row for i, row in enumerate(numbered_rows()) if i % 2 == other]
    dataset = grain.MapDataset.source(kept).seed(1).shuffle().repeat().to_iter_dataset()
    return dataset.filter(lambda row: not other or row["inputs"][0] % 3 > 0).batch(local_rows)


def local_run(settings: dict[str, Any], folder: Path) -> Any:
    """Runs over rows of each process: one that dies, or the rest of it and all of another."""

    def trainer(name: str, steps: int, callbacks: Any = (), **options: Any) -> Any:
        batches = sx.train.LocalBatches(rows_of_this_process(4), batch_size=8)
        options = {"batches": batches, "mesh": mesh_of({"data": 4, "model": 1})} | options
        return small_runs.make_trainer(
            folder / name, steps, callbacks=callbacks, log_every=1, checkpoint_every=2, **options
        )

    def die(event: sx.train.Event) -> None:
        if event.kind == "step" and event.step == 4:
            # Checkpoints are completed beside the steps: that of step 2 may not be yet.
            checkpoints = sx.train.Checkpoints(folder / "run" / "checkpoints")
            limit = time.monotonic() + SECONDS / 2
            while not checkpoints.steps() and time.monotonic() < limit:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    if settings["dies"]:
        trainer("run", 5, callbacks=(die,)).run()
    found = []
    for name, resume in (("run", True), ("whole", False)):
        own = trainer(name, 5)
        own.run(resume=resume)
        found.append(digest_of(own))
    uneven = sx.train.LocalBatches(
        rows_of_this_process(2 + 2 * sx.distributed.process_index()), batch_size=8
    )
    shared = mesh_of({"data": 2, "model": 2}, transposed=True)  # both hold all rows
    for attempt in (
        lambda: sx.train.Prefetch(own.batches, NamedSharding(shared, PartitionSpec("data"))),
        lambda: trainer("uneven", 2, batches=uneven).run(),
    ):
        try:
            attempt()
        except sx.errors.ShardaxError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class Repeated(sx.train.WholeBatches):
    """Whole batches, over and over."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches, batch_size=8)

    def state(self) -> Any:
        return {}

    def restore(self, state: Any) -> None:
        pass


def long_run(settings: dict[str, Any], folder: Path) -> Any:
    """A run of many steps, of which one process may fail."""
    batches: Any = sx.train.TrainBatches(small_runs.TRAIN, batch_size=8, seq_len=16)
    if settings.get("fails") == sx.distributed.process_index():
        build = batches.batch_at

        def batch_at(step: int, rows: Any = None) -> Any:
            if step == 3:
                raise OSError("the disk of this process is gone")
            return build(step, rows)

        batches.batch_at = batch_at
    trainer = small_runs.make_trainer(
        folder / "run",
        settings["steps"],
        batches=batches,
        mesh=mesh_of({"data": 4, "model": 1}),
        log_every=1,
        checkpoint_every=settings.get("checkpoint_every", 0),
    )
    resume = (folder / "run" / "checkpoints").is_dir()
    result = trainer.run(resume=resume)
    embedding = sx.distributed.gather(trainer.model.embed.embedding)
    digest = hashlib.sha256(embedding.tobytes()).hexdigest()
    return [result.step, str(result.stopped), digest]
