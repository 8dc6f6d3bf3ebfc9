# SPDX-License-Identifier: Apache-2.0
"""A stage of a pipeline as programs: forward, and backward in parts.

A stage is traced once for inputs of a type, forward and backward passes as one function of values,
which is then cut into programs (``programs``). What it writes and sows is among the results.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardax import (
    Intermediate,
    Module,
    RngState,
    Rules,
    State,
    Variable,
    axis_rules,
    iter_modules,
    iter_variables,
    jit,
    merge,
    pop,
    split,
)
from shardax.errors import PartitionError
from shardax.extend import (
    Origin,
    Path,
    PyTree,
    format_path,
    is_prng_key,
    raise_if_any,
    structure_epoch,
)
from shardax.nn.arithmetic import at_least_float32
from shardax.train.metrics import weighted
from shardax.train.pipeline.programs import Cut, cut

Values = dict[Path, Any]


class _TakenStage(NamedTuple):
    """A stage as a function of values."""

    graphdef: Any
    origins: dict[Path, Origin]
    trained: dict[Path, Variable]
    state: dict[Path, Variable]


class Chunk:
    """A stage of the model, with its programs."""

    def __init__(
        self,
        stage: Any,
        number: int,
        mesh: Mesh,
        rules: Rules,
        loss: Callable[..., PyTree] | None,
        stage_loss: Callable[..., PyTree] | None,
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

        self._at = -1
        self._taken: _TakenStage | None = None
        self._compiled: dict[Any, ChunkPrograms] = {}

    @contextlib.contextmanager
    def scope(self) -> Generator[None]:
        """The mesh and the rules of the stage."""
        with jax.set_mesh(self.mesh), axis_rules(self.rules):
            yield

    def is_random(self, path: Path) -> bool:
        """Whether a value is of a stream of random numbers."""
        return isinstance(self.now().state.get(path), RngState)

    def _is_elsewhere(self, value: object) -> bool:
        """Whether arrays are off the stage's devices."""
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(value)]
        return any(
            sharding is not None
            and getattr(sharding, "mesh", None) is not self.mesh
            and sharding.device_set != set(self.mesh.devices.flat)
            for sharding in shardings
        )

    def check_places(self, values: Values) -> None:
        """Refuses values off the stage's devices."""
        raise_if_any(
            PartitionError,
            [self.shown(path) for path, value in values.items() if self._is_elsewhere(value)],
            "Not on the devices of the stage: ",
            ". Lay it out again: "
            f"sx.shard(step.stages[{self.number}], step.meshes[{self.number}], rules).",
        )

    def write_sown(self, sown: Mapping[Path, object]) -> None:
        """Leaves the values sown last by the stage in its Modules."""
        present, owners = dict(iter_variables(self.stage)), dict(iter_modules(self.stage))
        for path, value in sown.items():
            if path in present:
                present[path].value = value
            else:
                setattr(owners[path[:-1]], str(path[-1]), self.sown_types[path](value))

    def now(self) -> _TakenStage:
        """Takes the stage apart, anew if its structure changed."""
        if self._taken is not None and self._at == structure_epoch():
            return self._taken

        self._at = structure_epoch()
        if not isinstance(self.stage, Module):
            self._taken = _TakenStage(None, {}, {}, {})
            return self._taken

        copy = merge(*split(self.stage))  # with the same arrays
        pop(copy, Intermediate)
        graphdef, state = split(copy)

        variables = dict(iter_variables(self.stage))
        trained = dict(iter_variables(self.stage, self.wrt))
        untrained = {p: v for p, v in variables.items() if p in state.flat() and p not in trained}

        wrong = [
            f"stages[{self.number}]{format_path(path)}: {variable.dtype}"
            for path, variable in trained.items()
            if not jnp.issubdtype(variable.dtype, jnp.inexact)
        ]
        head = "Only real or complex numbers can be differentiated: "
        raise_if_any(PartitionError, wrong, head, ". Leave others out by wrt=.")

        if self._taken is None or self._taken.graphdef != graphdef:
            self._compiled.clear()
        self._taken = _TakenStage(graphdef, state.origins(), trained, untrained)
        return self._taken

    def compiled(self, trained: Values, state: Values, x: object, targets: object) -> ChunkPrograms:
        """Returns the programs for inputs of these types."""
        leaves, treedef = jax.tree.flatten((trained, state, x, targets))
        places = tuple(leaf.sharding for leaf in leaves)
        key = (treedef, tuple(map(jax.typeof, leaves)), places)
        if key not in self._compiled:
            with self.scope():
                self._compiled[key] = ChunkPrograms(self, trained, state, x, targets)
        return self._compiled[key]

    def run(
        self, trained: Values, state: Values, number: object, x: Any, targets: PyTree
    ) -> PyTree:
        """Returns ((floating results, objective), the rest), while traced."""
        stage_parts = self.now()

        if stage_parts.graphdef is None:
            y, written, sown, model = self.stage(x), {}, {}, None
        else:
            entering = {**trained, **state}
            for path, variable in stage_parts.state.items():
                if isinstance(variable, RngState) and is_prng_key(state[path]):
                    entering[path] = _folded(state[path], self.number, number)
            model = merge(stage_parts.graphdef, State.from_flat(entering, stage_parts.origins))
            y = model(x)
            written, sown = self._written(model, entering)

        objective = jnp.float32(0)
        if self.stage_loss is not None and model is not None:
            objective = objective + self.stage_loss(model)

        if self.loss is not None:
            targets, weight = targets
            value = self.loss(y, targets)
            if np.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                raise PartitionError(
                    f"The loss returned {jax.typeof(jnp.asarray(value))}; it must be a real scalar."
                )
            value = value if weight is None else weighted(jnp.asarray(value), weight)
            objective, y = objective + value, ()

        floating, nonfloating = apart(y)
        self.y_tree = jax.tree.structure(y)
        return (floating, objective / self.microbatches), (nonfloating, written, sown)

    def _written(self, model: object, entering: Values) -> tuple[Values, dict[Path, Any]]:
        stage_parts, written, sown = self.now(), Values(), dict[Path, Any]()
        final = {path: (variable, variable.value) for path, variable in iter_variables(model)}

        problems = [f"{self.shown(path)} was taken away" for path in entering.keys() - final.keys()]

        for path, (variable, value) in final.items():
            if path not in entering and isinstance(variable, Intermediate):
                self.sown_types[path] = type(variable)
                sown[path] = value
            elif path not in entering:
                problems.append(f"{self.shown(path)} was added")
            elif any(a is not b for a, b in _pairs(entering[path], value)):
                old_value = entering[path]
                if path in stage_parts.trained:
                    problems.append(f"{self.shown(path)} is differentiated, and was written")
                elif _shapes(old_value) != _shapes(value):
                    problems.append(
                        f"{self.shown(path)} was {_types(old_value)}, and became {_types(value)}"
                    )
                elif not is_prng_key(value):  # as strongly typed as before
                    written[path] = jax.tree.map(lambda x: jnp.astype(x, x.dtype), value)

        raise_if_any(
            PartitionError,
            sorted(problems),
            "A stage may write state of a lasting type, but here\n  ",
            "\nMake such Variables when the model is made, and keep their types.",
            separator="\n  ",
        )

        return written, sown

    def shown(self, path: Path) -> str:
        """A path of the stage, for messages."""
        return f"stages[{self.number}]{format_path(path)}"


class ChunkPrograms:
    """The programs of a stage for inputs of one type."""

    def __init__(
        self, chunk: Chunk, trained: Values, state: Values, x: Any, targets: PyTree
    ) -> None:
        floating, nonfloating = apart(x)
        x_tree = jax.tree.structure(x)
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
            number,
            floating: list[Any],
            nonfloating: list[Any],
            targets,
            dy: list[PyTree],
        ) -> PyTree:
            def of(trained: Values, floating: list[Any]) -> Any:
                x = joined(x_tree, floating, nonfloating)
                return chunk.run(trained, {**fixed, **carried}, number, x, targets)

            if is_first:
                pull_of, primals = (lambda trained: of(trained, floating)), (trained,)
            else:
                pull_of, primals = of, (trained, floating)
            (y, objective), pull, (y_rest, written, sown) = jax.vjp(pull_of, *primals, has_aux=True)
            grads = pull((dy, jnp.ones_like(objective)))
            result = {"y": y, "rest": y_rest, "written": written, "sown": sown, "sum": objective}
            inputs = {} if is_first else {"inputs": grads[1]}
            weights = {"weights": grads[0]}
            if not chunk.splits_backward:
                inputs, weights = inputs | weights, {}
            groups = [result | inputs] if is_last else [result, inputs]
            return (*groups, weights) if weights else tuple(groups)

        args = (trained, fixed, carried, number, floating, nonfloating, targets, y)
        constant_count = len(jax.tree.leaves((trained, fixed)))
        program_cut = cut(whole, args, constant_count)
        places = jax.tree.unflatten(jax.tree.structure(args), program_cut.arguments)
        self.of_step = jax.tree.leaves(places[:2])  # trained, fixed
        self.of_state = jax.tree.leaves(places[2])  # carried
        self.of_microbatch = jax.tree.leaves(places[3:7])
        self.dy = jax.tree.leaves(places[7])
        self.programs = [
            ChunkProgram(program_cut, place, trained) for place in range(len(program_cut.programs))
        ]
        sums = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, at_least_float32(x.dtype)), trained
        )
        # Makes sums of gradients, in float32 at least.
        self.zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
            out_shardings=jax.tree.map(lambda x: x.sharding, trained),
        )


class ChunkProgram:
    """A compiled program, with the roles of its values."""

    def __init__(self, program_cut: Cut, place: int, trained: Values) -> None:
        program, result = program_cut.programs[place], dict(program_cut.results[place])
        weights = result.pop("weights", None)
        later = {v for p in program_cut.programs[place + 1 :] for v in p.takes}
        self.takes = program.takes
        self.gives = [v for v in program.gives if v in later]
        self.later = later
        self.adds_up = weights is not None

        def call(sums, *values):
            values_of = dict(zip(program.gives, program(*values), strict=True))
            weight, outputs = jax.tree.map(
                lambda v: v.val if hasattr(v, "val") else values_of[v], (weights, result)
            )
            if weights is not None:
                sums = jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, weight)
            return outputs, sums, [values_of[v] for v in self.gives]

        options: dict[str, Any] = {}
        if self.adds_up:
            places = jax.tree.map(lambda x: x.sharding, trained)
            options = {"donate_argnums": (0,), "out_shardings": (None, places, None)}
        self.call = jax.jit(call, **options)
        self.is_empty = not (program.gives or self.adds_up)


# --- Values ---


def apart(tree: object) -> tuple[list[PyTree], list[PyTree]]:
    """Leaves with a gradient, and the others."""
    leaves = [jnp.asarray(x) if not hasattr(x, "dtype") else x for x in jax.tree.leaves(tree)]
    return (
        [x if _is_floating(x) else None for x in leaves],
        [None if _is_floating(x) else x for x in leaves],
    )


def joined(treedef: object, floating: list[Any], nonfloating: list[Any]) -> PyTree:
    """The inverse of ``apart``, given the tree's structure."""
    leaves = [b if a is None else a for a, b in zip(floating, nonfloating, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def _is_floating(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _folded(keys, *numbers):
    """Keys of their own for a stage and a microbatch."""
    for number in numbers:
        fold = functools.partial(jax.random.fold_in, data=number)
        for _ in range(keys.ndim):
            fold = jax.vmap(fold)
        keys = fold(keys)
    return keys


def _pairs(left: object, right: object) -> list[tuple[Any, Any]]:
    leaves = (jax.tree.leaves(left), jax.tree.leaves(right))
    same = len(leaves[0]) == len(leaves[1])
    return list(zip(*leaves, strict=True)) if same else [(left, right)]


def _shapes(value: object):
    return jax.tree.map(lambda x: (np.shape(x), x.dtype), value)


def _types(value: object) -> str:
    return ", ".join(str(jax.typeof(x)) for x in jax.tree.leaves(value)) or repr(value)
