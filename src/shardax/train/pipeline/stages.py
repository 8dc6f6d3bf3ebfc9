# SPDX-License-Identifier: Apache-2.0
"""Pipelines of different stages: one executable a stage.

The mesh is cut along one axis, and stage i of the model is laid out over part i by the rules, which
may split it along the other axes. What a schedule's table says is done in the order in which it
could begin: programs of a stage are queued on its devices, and activations and their gradients are
copied from one part of the mesh to the next. Nothing waits for a result before all is queued.

The sum of gradients of all microbatches is what ``accumulated_value_and_grad`` computes for the
same model on one device. State that a stage writes goes from one microbatch to the next. Each
microbatch draws its random numbers in each stage from keys of its own; a stream advances as in one
call of the stages. Of what stages sow, that of the last microbatch is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax import (
    Module,
    Param,
    RngState,
    Rules,
    State,
    Variable,
    iter_variables,
    jit,
    shard,
    shardings,
)
from shardax._parallel.microbatches import indivisible
from shardax.errors import PartitionError
from shardax.extend import (
    Path,
    PyTree,
    ResolvedRules,
    RulesLike,
    ScopeSettings,
    format_path,
    mesh_axes_of,
    raise_if_any,
)
from shardax.nn.mlp import Sequential
from shardax.train.metrics import relative_weights, target_weights
from shardax.train.optimizer import Optimizer
from shardax.train.pipeline.chunks import Chunk, ChunkPrograms, Values, apart, joined
from shardax.train.pipeline.schedules import Operation, Schedule


class PipelineStep:
    """Loss and gradients of a model in stages, by a schedule.

    Making one lays the stages out: stage i over part i of the mesh axis, by the rules. For stages
    of one structure, ``nn.Stack`` with a rule for its layers is one program for all stages, and
    also runs inside of other transforms; this is for stages that differ, and for schedules that one
    program cannot have.

    Args:
        stages: The parts of the model in order, Modules or functions: a ``nn.Sequential`` or a
            list. Each is called on what the one before returns, a pytree of arrays.
        loss: Called as ``loss(outputs, targets)`` with what the last stage returns; gives a mean
            over rows, or over the targets that a ``mask`` in a mapping of targets and the ignore
            index -100 leave, a real scalar.
        mesh: The mesh.
        microbatches: In how many parts of equal numbers of rows a batch is cut.
        axis: The mesh axis along which stages are. With several stages for each of its parts, stage
            i is on part i modulo their number.
        rules: Rules for the other mesh axes; None for those in scope. ``"batch"`` is the name of
            the rows of inputs and targets.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero-bubble"``, or a ``Schedule``.
        wrt: Filter of the Variables to differentiate.
        stage_loss: Called as ``stage_loss(stage)`` after each Module's call; a real scalar that is
            added to the loss, such as a weight times ``sx.nn.load_balance_loss(stage)``.

    Attributes:
        stages: The stages, a tuple.
        meshes: Of each stage its part of the mesh.
        schedule: The ``Schedule``; ``print(step.schedule.draw())`` shows it.
        sent_bytes: Bytes that stages sent one another in the last step; None before the first.

    Raises:
        PartitionError: If the mesh, stages, schedule and microbatches do not fit together, stages
            share a Variable, or there are several processes. Nothing is moved.

    Example:
        >>> import jax, jax.numpy as jnp, optax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("stage",))
        >>> up, down = sx.nn.Linear(4, 8, rngs=sx.Rngs(0)), sx.nn.Linear(8, 2, rngs=sx.Rngs(1))
        >>> loss = lambda y, target: jnp.mean((y - target) ** 2)
        >>> step = PipelineStep([up, down], loss, mesh=mesh, microbatches=2, schedule="gpipe")
        >>> optimizers = step.optimizers(optax.sgd(0.01))
        >>> x, target = jnp.ones((4, 4)), jnp.zeros((4, 2))
        >>> first, gradients = step(x, target)
        >>> step.update(optimizers, gradients)
        >>> second, _ = step(x, target)
        >>> bool(second < first)
        True
    """

    def __init__(
        self,
        stages: Any,
        loss: Callable[[PyTree, PyTree], object],
        *,
        mesh: Mesh,
        microbatches: int,
        axis: str = "stage",
        rules: RulesLike | None = None,
        schedule: str | Schedule = "1f1b",
        wrt: Any = Param,
        stage_loss: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        self.stages = tuple(stages.layers if isinstance(stages, Sequential) else stages)
        _check_processes()
        _check_stages(self.stages)

        parts = _parts(mesh, axis)
        if isinstance(schedule, str):
            schedule = Schedule.named(schedule, len(parts), microbatches, len(self.stages))

        numbers = (len(parts), microbatches, len(self.stages))
        of_schedule = (schedule.stages, schedule.microbatches, schedule.chunks)
        if numbers != of_schedule:
            model, table = (
                f"{n[0]} parts of the mesh, {n[1]} microbatches, {n[2]} stages of the model"
                for n in (numbers, of_schedule)
            )
            raise PartitionError(f"The schedule {schedule.name!r} is for {table}, not for {model}.")

        self.schedule = schedule
        self.meshes = tuple(parts[number % len(parts)] for number in range(len(self.stages)))
        self.rules = ResolvedRules(None, rules).rules
        self.sent_bytes: int | None = None

        placed = [
            (stage, stage_mesh)
            for stage, stage_mesh in zip(self.stages, self.meshes, strict=True)
            if isinstance(stage, Module)
        ]
        with ScopeSettings.telling_once(set()):
            for stage, stage_mesh in placed:
                shardings(stage, stage_mesh, self.rules)  # raises before any is moved
            for stage, stage_mesh in placed:
                shard(stage, stage_mesh, self.rules)

        last_number = len(self.stages) - 1
        self._chunks = [
            Chunk(
                stage,
                number,
                stage_mesh,
                self.rules,
                loss if number == last_number else None,
                stage_loss,
                microbatches,
                schedule.splits_backward,
                wrt,
            )
            for number, (stage, stage_mesh) in enumerate(zip(self.stages, self.meshes, strict=True))
        ]

        self._order = [span.operation for span in schedule.simulate()]

    def __call__(self, inputs: object, targets: object) -> tuple[jax.Array, list[State]]:
        """Computes the mean loss and the gradients.

        Args:
            inputs: A pytree of arrays with rows in their first dimension, for the first stage.
            targets: Likewise, for the loss.

        Returns:
            The loss, a scalar on the devices of the last stage; and of each stage its gradients by
            path, laid out as its parameters.

        Raises:
            PartitionError: If rows cannot be cut, or a stage writes its parameters or something
                that does not fit. No Variable was written.
        """
        run = _PipelineRun(self._chunks, self.rules, self.schedule.microbatches, inputs, targets)
        for operation in self._order:
            run.do(operation)
        self.sent_bytes = run.sent_bytes
        return run.finish()

    def predict(self, inputs: object) -> PyTree:
        """Calls the stages one after the other, on the whole batch.

        Args:
            inputs: As for a call.

        Returns:
            What the last stage returns, on its devices. State is written as by any call.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> mesh = jax.make_mesh((1,), ("stage",))
            >>> step = PipelineStep([jnp.sin], jnp.add, mesh=mesh, microbatches=1)
            >>> step.predict(jnp.zeros(2)).tolist()
            [0.0, 0.0]
        """
        x = inputs
        for number, (chunk, mesh) in enumerate(zip(self._chunks, self.meshes, strict=True)):
            x = _placed(x, mesh, self.rules) if number == 0 else _moved(x, mesh)
            with chunk.scope():
                x = chunk.predict(x)
        return x

    def optimizers(self, tx: object, **options: object) -> list[Optimizer | None]:
        """Makes an ``Optimizer`` of each stage.

        Args:
            tx: The transformation, as for ``Optimizer``. What looks at all gradients together, such
                as a global norm, sees those of one stage; for that norm see ``update``.
            **options: As for ``Optimizer``.

        Returns:
            Of each stage its optimizer; None of stages without parameters.
        """
        optimizers: list[Optimizer | None] = []
        for chunk in self._chunks:
            options = {"wrt": chunk.wrt, **options}
            has_some = bool(chunk.now().trained)
            optimizers.append(Optimizer(chunk.stage, tx, **options) if has_some else None)
        return optimizers

    def update(
        self,
        optimizers: Sequence[Optimizer | None],
        gradients: Sequence[State],
        *,
        clip_norm: float | None = None,
    ) -> None:
        """Updates all stages, each by one compiled program on its devices.

        Args:
            optimizers: As ``optimizers`` returns them.
            gradients: As a call returns them; they are not needed after this.
            clip_norm: Scales the gradients of all stages so that their global norm is at most this.

        Raises:
            PartitionError: If there is not one of each for each stage.
        """
        if not len(optimizers) == len(gradients) == len(self.stages):
            raise PartitionError(
                f"There are {len(self.stages)} stages, but {len(optimizers)} optimizers and "
                f"{len(gradients)} gradients. Give those of step.optimizers(tx) and step(...)."
            )

        scales: list[Any] = [None] * len(self.stages)
        if clip_norm is not None:
            norm = self.global_norm(gradients)
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            scales = [_moved(scale, mesh) for mesh in self.meshes]

        for chunk, optimizer, grads, scale in zip(
            self._chunks, optimizers, gradients, scales, strict=True
        ):
            if optimizer is not None:
                with chunk.scope():
                    _update(optimizer, grads, scale)

    def global_norm(self, gradients: Sequence[State]) -> jax.Array:
        """Computes the norm of the gradients of all stages.

        Args:
            gradients: As a call returns them.

        Returns:
            The square root of the sum of all squares, float32, on the devices of the last stage.
        """
        total = jnp.float32(0)
        for chunk, grads in zip(self._chunks, gradients, strict=True):
            with chunk.scope():
                squares = _squares(list(grads.flat().values()))
            total = total + _moved(squares, self.meshes[-1])
        return jnp.sqrt(total)


@functools.partial(jit, donate_argnums=(0,))
def _update(optimizer, gradients, scale: object) -> None:
    if scale is not None:
        gradients = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)
    optimizer.update(gradients)


@jax.jit
def _squares(gradients: object) -> jax.Array:
    leaves = jax.tree.leaves(gradients)
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), jnp.float32(0))


# --- Checks, before anything is changed ---


def _check_processes() -> None:
    count = jax.process_count()
    if count > 1:
        raise PartitionError(
            "A PipelineStep copies arrays between parts of a mesh by jax.device_put, and there are "
            f"{count} processes, of which none has the devices of all parts. Use nn.Stack with a "
            'rule for its layers, {"layers": "stage"}, which is one program of all processes.'
        )


def _shared_variables(stages: Sequence[object]) -> list[str]:
    """Returns the paths of Variables shared by stages."""
    owners: dict[int, list[str]] = {}
    for number, stage in enumerate(stages):
        for path, variable in iter_variables(stage) if isinstance(stage, Module) else ():
            if not isinstance(variable, RngState):  # copies of keys are drawn from by each
                owners.setdefault(id(variable), []).append(f"stages[{number}]{format_path(path)}")
    return [" and ".join(paths) for paths in owners.values() if len(paths) > 1]


def _check_stages(stages: Sequence[object]) -> None:
    wrong = [f"stages[{i}] of {type(s).__name__}" for i, s in enumerate(stages) if not callable(s)]
    if wrong or not stages:
        raise PartitionError(
            f"Stages are Modules or functions, called on what the one before returns; found "
            f"{', '.join(wrong) or 'none'}."
        )
    raise_if_any(
        PartitionError,
        _shared_variables(stages),
        "Stages have devices of their own, so that they cannot share Variables:\n  ",
        "\nGive each stage its own, sx.clone(stage); or use nn.Stack with a rule for its "
        "layers, around which an embedding can be shared with the head.",
        separator="\n  ",
    )


def _parts(mesh: Mesh, axis: str) -> list[Mesh]:
    if not isinstance(mesh, Mesh) or axis not in mesh.shape:
        names = f"the axes {', '.join(map(repr, mesh.shape))}" if isinstance(mesh, Mesh) else "none"
        raise PartitionError(
            f"Stages are along the mesh axis {axis!r}, but the mesh has {names}. Make one with it, "
            f"jax.make_mesh((4, 2), ({axis!r}, 'data')), or say which: axis=..."
        )
    place = mesh.axis_names.index(axis)
    return [
        Mesh(np.take(mesh.devices, [i], axis=place), mesh.axis_names, axis_types=mesh.axis_types)
        for i in range(mesh.shape[axis])
    ]


# --- Arrays between parts of the mesh ---


def _moved(tree, mesh: Mesh):
    """Copies arrays, laid out alike, to a part of the mesh."""

    def place(x) -> NamedSharding:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        has_axes = {axis for entry in spec for axis in mesh_axes_of(entry)} <= set(mesh.axis_names)
        return NamedSharding(mesh, spec if has_axes else PartitionSpec())

    return jax.device_put(tree, jax.tree.map(place, tree))


def _placed(tree: object, mesh: Mesh, rules: Rules):
    """Lays rows out over a part of the mesh."""
    axes = [a for a in mesh_axes_of(rules.assign(("batch",)).entries[0]) if a in mesh.shape]
    spec = PartitionSpec(tuple(axes)) if axes else PartitionSpec()
    return jax.device_put(tree, NamedSharding(mesh, spec))


def _weights_of(targets: list[object], chunk: Chunk) -> list[Any]:
    """Weights of microbatches by their targets; Nones if they count alike."""
    parts = [part if isinstance(part, Mapping) else {"targets": part} for part in targets]
    with chunk.scope():
        weights = _relative_weights(parts)
    return jax.device_put(weights, NamedSharding(chunk.mesh, PartitionSpec()))


@jax.jit
def _relative_weights(parts: list[object]) -> list[Any]:
    weights = [target_weights(part) for part in parts]
    if weights[0] is None:
        return weights
    counts = [jnp.sum(array, dtype=jnp.float32) for array in weights]
    return list(relative_weights(jnp.stack(counts)))


def _microbatches(name: str, batch: object, count: int) -> list[Any]:
    """Cuts rows i, i + count, ... as microbatch i."""
    raise_if_any(
        PartitionError,
        indivisible(name, batch, count),
        f"Rows cannot be cut into {count} microbatches of equal size: ",
        f". The first dimension of every array must be a multiple of {count}.",
    )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)):
        raise PartitionError(
            "A PipelineStep queues programs of several parts of a mesh, so it cannot be inside of "
            "jit or another transform. Call it from Python; nn.Stack with a rule for its layers is "
            "a pipeline inside of one program."
        )

    def rows(number: int) -> Any:
        return jax.tree.map(lambda x: x[number::count], batch)

    return [rows(number) for number in range(count)]


# --- One step ---


class _ChunkStep:
    """State of one stage during a step."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

        stage_parts = chunk.now()
        self.trained = {path: v.value for path, v in stage_parts.trained.items()}
        self.state: Values = {}
        for path, variable in stage_parts.state.items():
            value = variable.value
            self.state[path] = _here(value, chunk.mesh) if chunk.is_random(path) else value

        chunk.check_places({**self.trained, **self.state})

        self.carried: Values = {}
        self.written: Values = {}  # counts of streams, of the last microbatch
        self.sown: dict[Path, Any] = {}

        self.objectives: list[PyTree] = []
        self.held: dict[int, dict[Any, Any]] = {}
        self.compiled: ChunkPrograms | None = None
        self.of_step: dict[Any, Any] = {}
        self.sums: PyTree = None

    def begin(self, number: int, x, targets) -> None:
        """Gives the stage a microbatch."""
        if self.compiled is None:
            compiled = self.compiled = self.chunk.compiled(self.trained, self.state, x, targets)
            self.carried = {path: self.state[path] for path in compiled.carried}
            fixed = {path: v for path, v in self.state.items() if path not in self.carried}
            leaves = jax.tree.leaves((self.trained, fixed))
            self.of_step = dict(zip(compiled.of_step, leaves, strict=True))
            with self.chunk.scope():
                self.sums = compiled.zeros()
        leaves = jax.tree.leaves((np.int32(number), *apart(x), targets))
        self.held[number] = dict(zip(self.compiled.of_microbatch, leaves, strict=True))

    def run(self, place: int, number: int, dy: list[PyTree] | None = None) -> dict[str, PyTree]:
        """Queues a program for a microbatch."""
        assert self.compiled is not None  # a forward pass comes first
        program, live = self.compiled.programs[place], self.held[number]

        if place == 0:  # the state that the microbatch before has left
            leaves = jax.tree.leaves(self.carried)
            live.update(zip(self.compiled.of_state, leaves, strict=True))
        if dy is not None:
            live.update(zip(self.compiled.dy, jax.tree.leaves(dy), strict=True))

        if program.is_empty:
            return {}

        step_values = self.of_step
        values = [live[v] if v in live else step_values[v] for v in program.takes]
        with self.chunk.scope():
            outputs, sums, later = program.call(self.sums if program.adds_up else None, *values)

        if program.adds_up:
            self.sums = sums
        live.update(zip(program.gives, later, strict=True))
        self.held[number] = {v: x for v, x in live.items() if v in program.later}

        if "sum" in outputs:
            self.objectives.append(outputs["sum"])
            for path, value in outputs["written"].items():
                (self.written if self.chunk.is_random(path) else self.carried)[path] = value
            self.sown = outputs["sown"]

        return outputs


class _PipelineRun:
    """One step: its microbatches, and the values between stages."""

    def __init__(self, chunks: Sequence[Chunk], rules: Rules, count: int, inputs, targets) -> None:
        cut_inputs = _microbatches("inputs", inputs, count)
        cut_targets = _microbatches("targets", targets, count)
        self.chunks = chunks
        self.parts = [_ChunkStep(chunk) for chunk in chunks]
        self.inputs: dict[tuple[int, int], PyTree] = {}
        self.gradients: dict[tuple[int, int], list[Any]] = {}
        for number, rows in enumerate(_placed(cut_inputs, chunks[0].mesh, rules)):
            self.inputs[0, number] = rows
        targets = _placed(cut_targets, chunks[-1].mesh, rules)
        self.targets = list(zip(targets, _weights_of(targets, chunks[-1]), strict=True))
        self.last = len(chunks) - 1
        self.sent_bytes = 0

    def do(self, operation: Operation) -> None:
        """Queues an operation of the table."""
        kind, number, chunk = operation
        part, is_last = self.parts[chunk], chunk == self.last

        if kind == "forward":
            targets = self.targets[number] if is_last else None
            part.begin(number, self.inputs.pop((chunk, number)), targets)
            if is_last:
                return  # the loss and its gradient are one program
            outputs = part.run(0, number)
            assert part.compiled is not None  # it just ran
            y = joined(part.compiled.y_tree, outputs["y"], outputs["rest"])
            self.inputs[chunk + 1, number] = self._sent(y, chunk + 1)
            return

        place = {"backward": 1, "input": 1, "weight": 2}[kind] - is_last
        dy = None if is_last or kind == "weight" else self.gradients.pop((chunk, number))

        outputs = part.run(place, number, dy)
        if "inputs" in outputs:
            self.gradients[chunk - 1, number] = self._sent(outputs["inputs"], chunk - 1)

    def _sent(self, tree: object, chunk: int) -> PyTree:
        mesh = self.chunks[chunk].mesh
        if all(x.sharding.device_set == set(mesh.devices.flat) for x in jax.tree.leaves(tree)):
            return tree
        self.sent_bytes += sum(x.nbytes for x in jax.tree.leaves(tree))
        return _moved(tree, mesh)

    def finish(self) -> tuple[jax.Array, list[State]]:
        """Writes state; returns the loss and the gradients."""
        mesh = self.chunks[-1].mesh
        total: Any = None
        gradients: list[State] = []

        for part in self.parts:
            chunk = part.chunk
            if chunk.loss is not None or chunk.stage_loss is not None:
                with chunk.scope():
                    objective = _sum(part.objectives)
                objective = _moved(objective, mesh) if chunk.loss is None else objective
                total = objective if total is None else total + objective

            dtypes = jax.tree.map(lambda x: x.dtype, part.trained)
            grads = jax.tree.map(lambda x, dtype: x.astype(dtype), part.sums, dtypes)
            origins = {path: chunk.now().origins[path] for path in part.trained}
            gradients.append(State.from_flat(grads, origins))

        self._write()
        return total, gradients

    def _write(self) -> None:
        advanced: dict[int, tuple[Variable, Any]] = {}
        for part in self.parts:
            variables = part.chunk.now().state
            for path, value in part.carried.items():
                variables[path].value = value

            for path, value in part.written.items():
                variable = variables[path]
                shared = advanced.get(id(variable))
                if shared is not None:  # a stream that stages share goes on by what all drew
                    added = _moved(value - part.state[path], shared[1].sharding.mesh)
                    value = shared[1] + added
                advanced[id(variable)] = (variable, value)

        for variable, value in advanced.values():
            variable.value = value

        for part in self.parts:
            if part.sown:
                part.chunk.write_sown(part.sown)


@jax.jit
def _sum(values: list[Any]):
    return sum(values[1:], values[0])


def _here(value: object, mesh: Mesh):
    """A value possibly shared by stages, on the devices of one."""
    devices = {device for x in jax.tree.leaves(value) for device in x.sharding.device_set}
    return value if devices == set(mesh.devices.flat) else _moved(value, mesh)
