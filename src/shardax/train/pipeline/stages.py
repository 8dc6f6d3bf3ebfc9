# SPDX-License-Identifier: Apache-2.0
"""Pipelines of stages that differ: one executable a stage.

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

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.graph.paths import Path, format_path
from shardax._core.module import Module
from shardax._core.object import epoch
from shardax._core.state.split_merge import clone, iter_modules, iter_variables, merge, pop, split
from shardax._core.state.state import Origin, State
from shardax._core.variable import Intermediate, Param, RngState, Variable
from shardax._transforms.jit.jit import jit
from shardax.nn.mlp import Sequential
from shardax.partition.context import axis_rules, resolve_rules
from shardax.partition.placement import shard
from shardax.partition.rules import Rules, RulesLike, mesh_axes_of
from shardax.partition.specs import shardings
from shardax.train.errors import PipelineError
from shardax.train.optimizer import Optimizer
from shardax.train.pipeline.programs import Cut, cut
from shardax.train.pipeline.schedules import Operation, Schedule

Values = dict[Path, Any]


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
            over rows, a real scalar.
        mesh: The mesh.
        microbatches: In how many parts of equal numbers of rows a batch is cut.
        axis: The mesh axis along which stages are. With several stages for each of its parts, stage
            i is on part i modulo their number.
        rules: Rules for the other mesh axes; None for those in scope. ``"batch"`` is the name of
            the rows of inputs and targets.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero-bubble"``, or a ``Schedule``.
        wrt: Filter of the Variables to differentiate.
        stage_loss: Called as ``stage_loss(stage)`` after each stage's call; a real scalar that is
            added to the loss, such as a weight times ``sx.nn.load_balance_loss(stage)``.

    Attributes:
        stages: The stages, a tuple.
        meshes: Of each stage its part of the mesh.
        schedule: The ``Schedule``; ``print(step.schedule.draw())`` shows it.
        sent_bytes: Bytes that stages sent one another in the last step; None before the first.

    Raises:
        PipelineError: If the mesh, stages, schedule and microbatches do not fit together, stages
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
        loss: Callable[[Any, Any], Any],
        *,
        mesh: Mesh,
        microbatches: int,
        axis: str = "stage",
        rules: RulesLike | None = None,
        schedule: str | Schedule = "1f1b",
        wrt: Any = Param,
        stage_loss: Callable[[Any], Any] | None = None,
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
            given, wanted = (
                f"{n[0]} parts of the mesh, {n[1]} microbatches, {n[2]} stages of the model"
                for n in (numbers, of_schedule)
            )
            raise PipelineError(f"The schedule {schedule.name!r} is for {wanted}, not for {given}.")
        self.schedule = schedule
        self.meshes = tuple(parts[number % len(parts)] for number in range(len(self.stages)))
        self.rules = resolve_rules(rules)
        self.sent_bytes: int | None = None
        placed = [
            (stage, where)
            for stage, where in zip(self.stages, self.meshes, strict=True)
            if isinstance(stage, Module)
        ]
        for stage, where in placed:
            shardings(stage, where, self.rules)  # raises before any is moved
        for stage, where in placed:
            shard(stage, where, self.rules)
        last = len(self.stages) - 1
        self._chunks = [
            _Chunk(
                stage,
                number,
                where,
                self.rules,
                loss if number == last else None,
                stage_loss,
                microbatches,
                schedule.splits_backward,
                wrt,
            )
            for number, (stage, where) in enumerate(zip(self.stages, self.meshes, strict=True))
        ]
        self._order = [each.operation for each in schedule.simulate()]

    def __call__(self, inputs: Any, targets: Any) -> tuple[jax.Array, list[State]]:
        """Computes the mean loss and the gradients.

        Args:
            inputs: A pytree of arrays with rows in their first dimension, for the first stage.
            targets: Likewise, for the loss.

        Returns:
            The loss, a scalar on the devices of the last stage; and of each stage its gradients by
            path, laid out as its parameters.

        Raises:
            PipelineError: If rows cannot be cut, or a stage writes its parameters or something that
                does not fit. No Variable was written.
        """
        run = _PipelineRun(self._chunks, self.rules, self.schedule.microbatches, inputs, targets)
        for operation in self._order:
            run.do(operation)
        self.sent_bytes = run.sent_bytes
        return run.finish()

    def predict(self, inputs: Any) -> Any:
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
        for number, (chunk, where) in enumerate(zip(self._chunks, self.meshes, strict=True)):
            x = _placed(x, where, self.rules) if number == 0 else _moved(x, where)
            with chunk.scope():
                x = chunk.predict(x)
        return x

    def optimizers(self, tx: Any, **options: Any) -> list[Optimizer | None]:
        """Makes an ``Optimizer`` of each stage.

        Args:
            tx: The transformation, as for ``Optimizer``. What looks at all gradients together, such
                as a global norm, sees those of one stage; for that norm see ``update``.
            **options: As for ``Optimizer``.

        Returns:
            Of each stage its optimizer; None of stages without parameters.
        """
        made: list[Optimizer | None] = []
        for chunk in self._chunks:
            options = {"wrt": chunk.wrt, **options}
            has_some = bool(chunk.now().trained)
            made.append(Optimizer(chunk.stage, tx, **options) if has_some else None)
        return made

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
            PipelineError: If there is not one of each for each stage.
        """
        if not len(optimizers) == len(gradients) == len(self.stages):
            raise PipelineError(
                f"There are {len(self.stages)} stages, but {len(optimizers)} optimizers and "
                f"{len(gradients)} gradients. Give those of step.optimizers(tx) and step(...)."
            )
        scales: list[Any] = [None] * len(self.stages)
        if clip_norm is not None:
            norm = self.global_norm(gradients)
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
            scales = [_moved(scale, where) for where in self.meshes]
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
def _update(optimizer: Any, gradients: Any, scale: Any) -> None:
    if scale is not None:
        gradients = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)
    optimizer.update(gradients)


@jax.jit
def _squares(gradients: Any) -> jax.Array:
    leaves = jax.tree.leaves(gradients)
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), jnp.float32(0))


# --- Checks, before anything is changed ---


def _check_processes() -> None:
    count = jax.process_count()
    if count > 1:
        raise PipelineError(
            "A PipelineStep copies arrays between parts of a mesh by jax.device_put, and there are "
            f"{count} processes, of which none has the devices of all parts. Use nn.Stack with a "
            'rule for its layers, {"layers": "stage"}, which is one program of all processes.'
        )


def _check_stages(stages: Sequence[Any]) -> None:
    wrong = [f"stages[{i}] of {type(s).__name__}" for i, s in enumerate(stages) if not callable(s)]
    if wrong or not stages:
        raise PipelineError(
            f"Stages are Modules or functions, called on what the one before returns; found "
            f"{', '.join(wrong) or 'none'}."
        )
    owners: dict[int, list[str]] = {}
    for number, stage in enumerate(stages):
        for path, variable in iter_variables(stage) if isinstance(stage, Module) else ():
            if not isinstance(variable, RngState):  # copies of keys are drawn from by each
                owners.setdefault(id(variable), []).append(f"stages[{number}]{format_path(path)}")
    shared = [" and ".join(paths) for paths in owners.values() if len(paths) > 1]
    if shared:
        raise PipelineError(
            "Stages have devices of their own, so that they cannot share Variables:\n  "
            + "\n  ".join(shared)
            + "\nGive each stage its own, sx.clone(stage); or use nn.Stack with a rule for its "
            "layers, around which an embedding can be shared with the head."
        )


def _parts(mesh: Any, axis: str) -> list[Mesh]:
    if not isinstance(mesh, Mesh) or axis not in mesh.shape:
        names = f"the axes {', '.join(map(repr, mesh.shape))}" if isinstance(mesh, Mesh) else "none"
        raise PipelineError(
            f"Stages are along the mesh axis {axis!r}, but the mesh has {names}. Make one with it, "
            f"jax.make_mesh((4, 2), ({axis!r}, 'data')), or say which: axis=..."
        )
    place = mesh.axis_names.index(axis)
    return [
        Mesh(np.take(mesh.devices, [i], axis=place), mesh.axis_names, axis_types=mesh.axis_types)
        for i in range(mesh.shape[axis])
    ]


# --- Arrays between parts of the mesh ---


def _moved(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays, laid out alike, to a part of the mesh."""

    def place(x: Any) -> NamedSharding:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        known = {axis for entry in spec for axis in mesh_axes_of(entry)} <= set(mesh.axis_names)
        return NamedSharding(mesh, spec if known else PartitionSpec())

    return jax.device_put(tree, jax.tree.map(place, tree))


def _placed(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """Lays rows out over a part of the mesh."""
    axes = [a for a in mesh_axes_of(rules.assign(("batch",)).entries[0]) if a in mesh.shape]
    spec = PartitionSpec(tuple(axes)) if axes else PartitionSpec()
    return jax.device_put(tree, NamedSharding(mesh, spec))


def _microbatches(name: str, batch: Any, count: int) -> list[Any]:
    """Cuts rows i, i + count, ... as microbatch i."""
    wrong = [
        f"{name}{jax.tree_util.keystr(key)} of shape {np.shape(leaf)}"
        for key, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
        if not np.shape(leaf) or np.shape(leaf)[0] % count
    ]
    if wrong:
        raise PipelineError(
            f"Rows cannot be cut into {count} microbatches of equal size: {', '.join(wrong)}. The "
            f"first dimension of every array must be a multiple of {count}."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)):
        raise PipelineError(
            "A PipelineStep queues programs of several parts of a mesh, so it cannot be inside of "
            "jit or another transform. Call it from Python; nn.Stack with a rule for its layers is "
            "a pipeline inside of one program."
        )

    def rows(number: int) -> Any:
        return jax.tree.map(lambda x: x[number::count], batch)

    return [rows(number) for number in range(count)]


# --- One stage of the model ---


class _Taken(NamedTuple):
    """A stage as a function of values."""

    graphdef: Any
    origins: dict[Path, Origin]
    trained: dict[Path, Variable[Any]]
    state: dict[Path, Variable[Any]]


class _Chunk:
    """A stage of the model, with its programs."""

    def __init__(
        self,
        stage: Any,
        number: int,
        mesh: Mesh,
        rules: Rules,
        loss: Callable[..., Any] | None,
        stage_loss: Callable[..., Any] | None,
        microbatches: int,
        splits_backward: bool,
        wrt: Any,
    ) -> None:
        self.stage = stage
        self.number = number
        self.mesh = mesh
        self.rules = rules
        self.loss = loss
        self.stage_loss = stage_loss
        self.microbatches = microbatches
        self.splits_backward = splits_backward
        self.wrt = wrt
        self.predict = jit(stage)
        self.sown_types: dict[Path, Any] = {}
        self.y_tree: Any = None  # of what the stage returned when it was last traced
        self._zeros: Any = None
        self._at = -1
        self._taken: _Taken | None = None
        self._compiled: dict[Any, _ChunkPrograms] = {}

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The mesh and the rules of the stage."""
        with jax.set_mesh(self.mesh), axis_rules(self.rules):
            yield

    def is_random(self, path: Path) -> bool:
        """Whether a value is of a stream of random numbers."""
        return isinstance(self.now().state.get(path), RngState)

    def zeros(self, trained: Values) -> Values:
        """Makes sums of gradients, in float32 at least."""
        if self._zeros is None:
            shapes = jax.tree.map(lambda x: (x.shape, _wide(x.dtype)), trained)
            is_shape = lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)  # noqa: E731
            places = jax.tree.map(lambda x: x.sharding, trained)

            def make() -> Values:
                return jax.tree.map(lambda x: jnp.zeros(*x), shapes, is_leaf=is_shape)

            self._zeros = jax.jit(make, out_shardings=places)
        with self.scope():
            return self._zeros()

    def check_places(self, values: Values) -> None:
        """Refuses values that are not on the stage's devices."""
        own = set(self.mesh.devices.flat)
        wrong: list[str] = []
        for path, value in values.items():
            for x in jax.tree.leaves(value):
                sharding = getattr(x, "sharding", None)
                if sharding is None or getattr(sharding, "mesh", None) is self.mesh:
                    continue
                if sharding.device_set != own:
                    wrong.append(self.shown(path))
        if wrong:
            raise PipelineError(
                f"Not on the devices of the stage: {', '.join(wrong[:6])}. Lay it out again: "
                f"sx.shard(step.stages[{self.number}], step.meshes[{self.number}], rules)."
            )

    def write_sown(self, sown: Mapping[Path, Any]) -> None:
        """Leaves what the stage sowed last in its Modules."""
        present, owners = dict(iter_variables(self.stage)), dict(iter_modules(self.stage))
        for path, value in sown.items():
            if path in present:
                present[path].value = value
            else:
                setattr(owners[path[:-1]], str(path[-1]), self.sown_types[path](value))

    def now(self) -> _Taken:
        """Takes the stage apart, anew if its structure changed."""
        if self._taken is not None and self._at == epoch.current:
            return self._taken
        self._at = epoch.current
        if not isinstance(self.stage, Module):
            self._taken = _Taken(None, {}, {}, {})
            return self._taken
        copy = clone(self.stage)
        pop(copy, Intermediate)
        graphdef, state = split(copy)
        variables = dict(iter_variables(self.stage))
        trained = dict(iter_variables(self.stage, self.wrt))
        rest = {p: v for p, v in variables.items() if p in state.flat() and p not in trained}
        wrong = [
            f"stages[{self.number}]{format_path(path)}: {variable.dtype}"
            for path, variable in trained.items()
            if not jnp.issubdtype(variable.dtype, jnp.inexact)
        ]
        if wrong:
            raise PipelineError(
                f"Only real or complex numbers can be differentiated: {', '.join(wrong)}. Leave "
                "others out by wrt=."
            )
        if self._taken is None or self._taken.graphdef != graphdef:
            self._compiled.clear()
            self._zeros = None
        self._taken = _Taken(graphdef, state.origins(), trained, rest)
        return self._taken

    def compiled(self, trained: Values, state: Values, x: Any, targets: Any) -> _ChunkPrograms:
        """Returns the programs for inputs of these types."""
        leaves, treedef = jax.tree.flatten((x, targets))
        places = tuple(leaf.sharding for leaf in leaves)
        key = (treedef, tuple(map(jax.typeof, leaves)), places)
        if key not in self._compiled:
            with self.scope():
                self._compiled[key] = _ChunkPrograms(self, trained, state, x, targets)
        return self._compiled[key]

    def run(self, trained: Values, state: Values, number: Any, x: Any, targets: Any) -> Any:
        """Returns ((floating results, objective), the rest), while traced."""
        taken = self.now()
        if taken.graphdef is None:
            y, written, sown, model = self.stage(x), {}, {}, None
        else:
            entering = {**trained, **state}
            for path, variable in taken.state.items():
                if isinstance(variable, RngState) and _is_key(state[path]):
                    entering[path] = _folded(state[path], self.number, number)
            model = merge(taken.graphdef, State.from_flat(entering, taken.origins))
            y = model(x)
            written, sown = self._written(model, entering)
        objective = jnp.float32(0)
        if self.stage_loss is not None and model is not None:
            objective = objective + self.stage_loss(model)
        if self.loss is not None:
            value = self.loss(y, targets)
            if np.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                raise PipelineError(
                    f"The loss returned {jax.typeof(jnp.asarray(value))}; it must be a real scalar."
                )
            objective, y = objective + value, ()
        floating, rest = _apart(y)
        self.y_tree = jax.tree.structure(y)
        return (floating, objective / self.microbatches), (rest, written, sown)

    def _written(self, model: Any, entering: Values) -> tuple[Values, dict[Path, Any]]:
        taken, written, sown = self.now(), Values(), dict[Path, Any]()
        after = {path: (variable, variable.value) for path, variable in iter_variables(model)}
        problems = [f"{self.shown(path)} was taken away" for path in entering.keys() - after.keys()]
        for path, (variable, value) in after.items():
            if path not in entering and isinstance(variable, Intermediate):
                self.sown_types[path] = type(variable)
                sown[path] = value
            elif path not in entering:
                problems.append(f"{self.shown(path)} was added")
            elif any(a is not b for a, b in _pairs(entering[path], value)):
                before = entering[path]
                if path in taken.trained:
                    problems.append(f"{self.shown(path)} is differentiated, and was written")
                elif _shapes(before) != _shapes(value):
                    problems.append(
                        f"{self.shown(path)} was {_types(before)}, and became {_types(value)}"
                    )
                elif not _is_key(value):  # as strongly typed as before
                    written[path] = jax.tree.map(lambda x: jnp.astype(x, x.dtype), value)
        if problems:
            raise PipelineError(
                "A stage may write state of a lasting type, but here\n  "
                + "\n  ".join(sorted(problems))
                + "\nMake such Variables when the model is made, and keep their types."
            )
        return written, sown

    def shown(self, path: Path) -> str:
        """A path of the stage, for messages."""
        return f"stages[{self.number}]{format_path(path)}"


class _ChunkPrograms:
    """The programs of a stage for inputs of one type."""

    def __init__(self, chunk: _Chunk, trained: Values, state: Values, x: Any, targets: Any) -> None:
        floating, rest = _apart(x)
        self.x_tree = jax.tree.structure(x)
        number = np.int32(0)
        shapes = jax.eval_shape(chunk.run, trained, state, number, x, targets)
        (y, _), (_, written, _) = shapes
        self.y_tree = chunk.y_tree
        self.carried = [path for path in written if not chunk.is_random(path)]
        carried = {path: state[path] for path in self.carried}
        fixed = {path: value for path, value in state.items() if path not in carried}
        is_first, is_last = chunk.number == 0, chunk.loss is not None

        def whole(
            trained: Values,
            fixed: Values,
            carried: Values,
            number: Any,
            floating: list[Any],
            rest: list[Any],
            targets: Any,
            dy: list[Any],
        ) -> Any:
            def of(trained: Values, floating: list[Any]) -> Any:
                x = _joined(self.x_tree, floating, rest)
                return chunk.run(trained, {**fixed, **carried}, number, x, targets)

            if is_first:
                pull_of, given = (lambda trained: of(trained, floating)), (trained,)
            else:
                pull_of, given = of, (trained, floating)
            (y, objective), pull, (more, written, sown) = jax.vjp(pull_of, *given, has_aux=True)
            found = pull((dy, jnp.ones_like(objective)))
            result = {"y": y, "rest": more, "written": written, "sown": sown, "sum": objective}
            inputs = {} if is_first else {"inputs": found[1]}
            weights = {"weights": found[0]}
            if not chunk.splits_backward:
                inputs, weights = inputs | weights, {}
            groups = [result | inputs] if is_last else [result, inputs]
            return (*groups, weights) if weights else tuple(groups)

        args = (trained, fixed, carried, number, floating, rest, targets, y)
        kept = len(jax.tree.leaves((trained, fixed)))
        found = cut(whole, args, kept)
        places = jax.tree.unflatten(jax.tree.structure(args), found.arguments)
        self.of_step = jax.tree.leaves(places[:2])  # trained, fixed
        self.of_state = jax.tree.leaves(places[2])  # carried
        self.of_microbatch = jax.tree.leaves(places[3:7])
        self.dy = jax.tree.leaves(places[7])
        self.programs = [
            _ChunkProgram(found, place, trained) for place in range(len(found.programs))
        ]
        self.sends = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(y))


class _ChunkProgram:
    """A compiled program, and what its values are."""

    def __init__(self, found: Cut, place: int, trained: Values) -> None:
        program, result = found.programs[place], dict(found.results[place])
        weights = result.pop("weights", None)
        later = {v for other in found.programs[place + 1 :] for v in other.takes}
        self.takes = program.takes
        self.gives = [v for v in program.gives if v in later]
        self.later = later
        self.adds_up = weights is not None

        def call(sums: Any, *values: Any) -> Any:
            found = dict(zip(program.gives, program(*values), strict=True))
            weight, made = jax.tree.map(
                lambda item: item.val if hasattr(item, "val") else found[item], (weights, result)
            )
            if weights is not None:
                sums = jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, weight)
            return made, sums, [found[v] for v in self.gives]

        options: dict[str, Any] = {}
        if self.adds_up:
            places = jax.tree.map(lambda x: x.sharding, trained)
            options = {"donate_argnums": (0,), "out_shardings": (None, places, None)}
        self.call = jax.jit(call, **options)
        self.is_empty = not (program.gives or self.adds_up)


# --- One step ---


class _ChunkStep:
    """What a step has of one stage."""

    def __init__(self, chunk: _Chunk) -> None:
        self.chunk = chunk
        taken = chunk.now()
        self.trained = {path: v.value for path, v in taken.trained.items()}
        self.state: Values = {}
        for path, variable in taken.state.items():
            value = variable.value
            self.state[path] = _here(value, chunk.mesh) if chunk.is_random(path) else value
        chunk.check_places({**self.trained, **self.state})
        self.carried: Values = {}
        self.written: Values = {}  # counts of streams, of the last microbatch
        self.sown: dict[Path, Any] = {}
        self.objectives: list[Any] = []
        self.held: dict[int, dict[Any, Any]] = {}
        self.compiled: _ChunkPrograms | None = None
        self.of_step: dict[Any, Any] = {}
        self.sums: Any = None

    def begin(self, number: int, x: Any, targets: Any) -> None:
        """Gives the stage a microbatch."""
        if self.compiled is None:
            made = self.compiled = self.chunk.compiled(self.trained, self.state, x, targets)
            self.carried = {path: self.state[path] for path in made.carried}
            fixed = {path: v for path, v in self.state.items() if path not in self.carried}
            leaves = jax.tree.leaves((self.trained, fixed))
            self.of_step = dict(zip(made.of_step, leaves, strict=True))
            self.sums = self.chunk.zeros(self.trained)
        leaves = jax.tree.leaves((np.int32(number), *_apart(x), targets))
        self.held[number] = dict(zip(self.compiled.of_microbatch, leaves, strict=True))

    def run(self, place: int, number: int, dy: list[Any] | None = None) -> dict[str, Any]:
        """Queues a program for a microbatch."""
        assert self.compiled is not None  # a forward pass comes first
        program, held = self.compiled.programs[place], self.held[number]
        if place == 0:  # the state that the microbatch before has left
            leaves = jax.tree.leaves(self.carried)
            held.update(zip(self.compiled.of_state, leaves, strict=True))
        if dy is not None:
            held.update(zip(self.compiled.dy, jax.tree.leaves(dy), strict=True))
        if program.is_empty:
            return {}
        own = self.of_step
        values = [held[v] if v in held else own[v] for v in program.takes]
        with self.chunk.scope():
            made, sums, rest = program.call(self.sums if program.adds_up else None, *values)
        if program.adds_up:
            self.sums = sums
        held.update(zip(program.gives, rest, strict=True))
        self.held[number] = {v: x for v, x in held.items() if v in program.later}
        if "sum" in made:
            self.objectives.append(made["sum"])
            for path, value in made["written"].items():
                (self.written if self.chunk.is_random(path) else self.carried)[path] = value
            self.sown = made["sown"]
        return made


class _PipelineRun:
    """One step: microbatches, and what is between stages."""

    def __init__(
        self, chunks: Sequence[_Chunk], rules: Rules, count: int, inputs: Any, targets: Any
    ) -> None:
        cut_inputs = _microbatches("inputs", inputs, count)
        cut_targets = _microbatches("targets", targets, count)
        self.chunks = chunks
        self.parts = [_ChunkStep(chunk) for chunk in chunks]
        self.inputs: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], list[Any]] = {}
        for number, rows in enumerate(_placed(cut_inputs, chunks[0].mesh, rules)):
            self.inputs[0, number] = rows
        self.targets = _placed(cut_targets, chunks[-1].mesh, rules)
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
            made = part.run(0, number)
            assert part.compiled is not None  # it just ran
            y = _joined(part.compiled.y_tree, made["y"], made["rest"])
            self.inputs[chunk + 1, number] = self._sent(y, chunk + 1)
            return
        place = {"backward": 1, "input": 1, "weight": 2}[kind] - is_last
        dy = None if is_last or kind == "weight" else self.gradients.pop((chunk, number))
        made = part.run(place, number, dy)
        if "inputs" in made:
            self.gradients[chunk - 1, number] = self._sent(made["inputs"], chunk - 1)

    def _sent(self, tree: Any, chunk: int) -> Any:
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
                    mine = _sum(part.objectives)
                mine = _moved(mine, mesh) if chunk.loss is None else mine
                total = mine if total is None else total + mine
            dtypes = jax.tree.map(lambda x: x.dtype, part.trained)
            found = jax.tree.map(lambda x, dtype: x.astype(dtype), part.sums, dtypes)
            origins = {path: chunk.now().origins[path] for path in part.trained}
            gradients.append(State.from_flat(found, origins))
        self._write()
        return total, gradients

    def _write(self) -> None:
        advanced: dict[int, tuple[Variable[Any], Any]] = {}
        for part in self.parts:
            variables = part.chunk.now().state
            for path, value in part.carried.items():
                variables[path].value = value
            for path, value in part.written.items():
                variable = variables[path]
                before = advanced.get(id(variable))
                if before is not None:  # a stream that stages share goes on by what all drew
                    added = _moved(value - part.state[path], before[1].sharding.mesh)
                    value = before[1] + added
                advanced[id(variable)] = (variable, value)
        for variable, value in advanced.values():
            variable.value = value
        for part in self.parts:
            if part.sown:
                part.chunk.write_sown(part.sown)


@jax.jit
def _sum(values: list[Any]) -> Any:
    return sum(values[1:], values[0])


# --- Values ---


def _apart(tree: Any) -> tuple[list[Any], list[Any]]:
    """Leaves that have a gradient, and the others."""
    leaves = [jnp.asarray(x) if not hasattr(x, "dtype") else x for x in jax.tree.leaves(tree)]
    return (
        [x if _is_floating(x) else None for x in leaves],
        [None if _is_floating(x) else x for x in leaves],
    )


def _joined(treedef: Any, floating: list[Any], rest: list[Any]) -> Any:
    leaves = [b if a is None else a for a, b in zip(floating, rest, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _folded(keys: Any, *numbers: Any) -> Any:
    """Keys of their own for a stage and a microbatch."""
    for number in numbers:
        fold = functools.partial(jax.random.fold_in, data=number)
        for _ in range(keys.ndim):
            fold = jax.vmap(fold)
        keys = fold(keys)
    return keys


def _here(value: Any, mesh: Mesh) -> Any:
    """A value that stages may share, on the devices of one."""
    there = {device for x in jax.tree.leaves(value) for device in x.sharding.device_set}
    return value if there == set(mesh.devices.flat) else _moved(value, mesh)


def _pairs(one: Any, other: Any) -> list[tuple[Any, Any]]:
    leaves = (jax.tree.leaves(one), jax.tree.leaves(other))
    same = len(leaves[0]) == len(leaves[1])
    return list(zip(*leaves, strict=True)) if same else [(one, other)]


def _shapes(value: Any) -> Any:
    return jax.tree.map(lambda x: (np.shape(x), x.dtype), value)


def _types(value: Any) -> str:
    return ", ".join(str(jax.typeof(x)) for x in jax.tree.leaves(value)) or repr(value)
