# SPDX-License-Identifier: Apache-2.0
"""Pipelines: the layers of a stack in stages along a mesh axis.

A batch goes through the layers in *microbatches*, parts of equal numbers of rows. Where the rules
lay the stack's dimension over a mesh axis, each *stage*, a part of that axis, holds a run of layers
and hands what it computed to the next stage. At each *tick* every stage works on one microbatch, so
the last of M microbatches leaves the last of S stages at tick M + S - 1; the share of ticks in
which a stage has nothing to do, (S - 1) / (M + S - 1), is the *bubble* (GPipe, arXiv:1811.06965).

In a *circular* schedule stage s has the layers s, s + S, s + 2S, ..., and microbatches go round the
stages in R = L / S rounds of one layer each (the interleaved stages of D. Narayanan and others,
arXiv:2104.04473, section 2.2, one layer a turn). A tick is R times shorter, so that the bubble is
about R times smaller, while R times as many microbatches are handed on. A round takes
max(M, S) ticks: in the first stage a microbatch waits for its turn. Arrays of a model are in the
order of layers, stage by stage; before the first tick each stage sends the layers of others to
them, and their gradients and states come back after the last: with fewer rounds than stages each of
its layers, else 2 (S - 1) / S of their bytes and what the last layers leave free.

Results do not depend on the mesh. Microbatch i of M has the rows i, i + M, i + 2M, ... The state of
a layer goes from one microbatch to the next; each microbatch draws its random numbers from keys of
its own, and a stream advances as in one call. Of what layers sow, rows are put together again, and
numbers are averaged.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardax import Intermediate, RngState, State, iter_modules, iter_variables, merge, remat, split
from shardax._parallel import errors
from shardax._parallel.manual_axes import (
    axis_types,
    mark_varying,
    mesh_of_region,
    sum_over,
    with_auto_axes,
)
from shardax._parallel.microbatches import cut, joined
from shardax.extend import Origin, Path, PyTree, is_prng_key, mesh_axes_of
from shardax.partition import current_rules, resolve_mesh

Run = Callable[[Any, Any, list[Any], int], Any]
"""Runs layers: ``run(stacked, x, given, length)``."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """The mesh axis of the layers."""

    axis: str | None
    count: int

    def index(self) -> Any:
        """Returns the number of the stage, inside of the region."""
        return jnp.int32(0) if self.axis is None else jax.lax.axis_index(self.axis)

    def hand_on(self, tree: object) -> Any:
        """Gives each stage the value of the stage before."""
        if self.axis is None:
            return tree
        ring = [(stage, (stage + 1) % self.count) for stage in range(self.count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, ring), tree)

    def varying(self, tree: object) -> Any:
        """Marks equal values of stages as varying."""
        axis = self.axis
        if axis is None:
            return tree
        return jax.tree.map(lambda x: mark_varying(jnp.asarray(x), (axis,)), tree)

    def gathered(self, values: Mapping[Path, object]) -> dict[Path, Any]:
        """Returns values whole along the axis, if their type has it."""

        def whole(x) -> PyTree:
            sharding = jax.typeof(x).sharding
            if self.axis is None or (*sharding.spec, None)[0] != self.axis:
                return x
            spec = PartitionSpec(None, *sharding.spec[1:])
            return jax.sharding.reshard(x, sharding.update(spec=spec))

        return {path: jax.tree.map(whole, value) for path, value in values.items()}

    def to_rounds(self, tree: object, rounds: int, dim: int = 0) -> Any:
        """Gives each stage its layer of every round, from layers in order."""
        return self._exchanged(tree, rounds, dim, in_order=True)

    def to_layers(self, tree: object, rounds: int, dim: int = 0) -> Any:
        """The inverse of ``to_rounds``."""
        return self._exchanged(tree, rounds, dim, in_order=False)

    def _exchanged(self, tree: object, rounds: int, dim: int, *, in_order: bool):
        if rounds == 1 or self.axis is None:
            return tree

        # Permutations send no padding. Many of them take compilers long, and an exchange of many
        # layers has little padding: none where stages divide rounds.
        how = self._permuted if rounds < self.count else self._all_to_all
        exchange = how(rounds, dim, in_order)

        def exchanged(x: jax.Array) -> jax.Array:
            if is_prng_key(x):
                words = exchanged(jax.random.key_data(x))
                return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
            return exchange(x)

        return jax.tree.map(exchanged, tree)

    def _permuted(self, rounds: int, dim: int, in_order: bool) -> Callable[[jax.Array], jax.Array]:
        """Returns an exchange of layers by permutations of stages."""
        axis, stage, moves = self.axis, self.index(), _moves(self.count, rounds)
        if in_order:
            sent = [(move.slot, move.pairs) for move in moves]
            filled = [move.round for move in moves]
        else:
            back = [[(target, source) for source, target in move.pairs] for move in moves]
            sent = [(move.round, pairs) for move, pairs in zip(moves, back, strict=True)]
            filled = [move.slot for move in moves]

        # In which move each slot of a stage is filled.
        order = jnp.asarray(np.argsort(np.array(filled), axis=0).T)[stage]

        def exchange(x: jax.Array) -> jax.Array:
            parts = []
            for slots, pairs in sent:
                slot = jnp.asarray(slots)[stage]
                part = jax.lax.dynamic_index_in_dim(x, slot, dim, keepdims=False)
                parts.append(jax.lax.ppermute(part, axis, pairs))
            return jnp.take(jnp.stack(parts, dim), order, axis=dim)

        return exchange

    def _all_to_all(
        self, rounds: int, dim: int, in_order: bool
    ) -> Callable[[jax.Array], jax.Array]:
        """Returns an exchange of layers by one all-to-all."""
        # Layer l is in slot l % rounds of stage l // rounds; in rounds in slot l // stages of
        # stage l % stages.
        axis, stage, count = self.axis, self.index(), self.count
        every = np.arange(count)

        # The most layers that one stage has for another; what is less is sent all the same.
        slots = np.arange(-(-rounds // count))
        if in_order:
            first = (every - stage * rounds) % count  # the first slot for each stage
            send = first[:, None] + count * slots[None]
            layer = np.arange(rounds) * count + stage
            source, slot = layer // rounds, layer % rounds // count
        else:
            first = (stage - every * rounds) % count
            send = (every[:, None] * rounds + first[:, None] + count * slots[None]) // count
            layer = stage * rounds + np.arange(rounds)
            source, slot = layer % count, layer % rounds // count

        send = jnp.minimum(send, rounds - 1).reshape(-1)

        def exchange(x: jax.Array) -> jax.Array:
            parts = jnp.take(jnp.moveaxis(x, dim, 0), send, axis=0)
            parts = parts.reshape(count, len(slots), *parts.shape[1:])
            parts = jax.lax.all_to_all(parts, axis, 0, 0, tiled=True)
            return jnp.moveaxis(parts[source, slot], 0, dim)

        return exchange

    def of_last(self, tree: object) -> Any:
        """Returns the last stage's value, in all stages."""
        axis = self.axis
        if axis is None:
            return tree
        is_last = self.index() == self.count - 1

        def chosen(x: jax.Array) -> jax.Array:
            number = x.astype(jnp.int8) if x.dtype == bool else x
            summed = sum_over(jnp.where(is_last, number, jnp.zeros_like(number)), axis)
            return summed.astype(x.dtype)

        return jax.tree.map(chosen, tree)


class _Move(NamedTuple):
    """A layer of each stage on its way into rounds."""

    slot: list[int]  # by stage: of the layer that it sends, among its layers
    pairs: list[tuple[int, int]]  # from, to
    round: list[int]  # by stage: of the layer that it is sent


def _moves(stages: int, rounds: int) -> list[_Move]:
    """Returns permutations of layers from order into rounds."""
    # Layer l is in stage l // R, and goes to stage l % S. Of the layers whose (l % R + l // m) % R
    # is one number, m the least common multiple of R and S, each stage has one and is sent one: all
    # layers of a stage have one l // m, and two layers for one stage differ by a multiple of S, so
    # also of the greatest common divisor, by less than which values of l // m differ.
    multiple = math.lcm(rounds, stages)
    moves: list[_Move] = []
    for number in range(rounds):
        slots = [(number - stage * rounds // multiple) % rounds for stage in range(stages)]
        layers = [stage * rounds + slots[stage] for stage in range(stages)]
        pairs = [(stage, layer % stages) for stage, layer in enumerate(layers)]
        round_of = {layer % stages: layer // stages for layer in layers}
        moves.append(_Move(slots, pairs, [round_of[stage] for stage in range(stages)]))
    return moves


def find_stages(axis_name: str, length: int) -> Stages:
    """Returns the mesh axis of a stack by the rules."""
    mesh, rules = resolve_mesh(), current_rules()
    if mesh is None or not rules:
        return Stages(None, 1)

    types = axis_types(mesh)
    ruled = mesh_axes_of(rules.assign((axis_name,)).entries[0])
    axes = [axis for axis in ruled if types.get(axis, AxisType.Manual) is not AxisType.Manual]
    if len(axes) > 1:
        raise errors.stages_over_several_axes(axis_name, axes)

    count = mesh.shape[axes[0]] if axes else 1
    if length % count:
        raise errors.layers_not_divided(axis_name, axes[0], count, length)
    return Stages(axes[0], count) if count > 1 else Stages(None, 1)


# --- Microbatches ---


def check_rows(x: object, count: int) -> int:
    """Returns the number of rows, if divisible."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(x)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise errors.no_rows(shapes)

    ((rows,),) = sizes
    if rows % count:
        raise errors.rows_not_divided(rows, count)
    return rows


def find_rowwise(
    run: Callable[[PyTree, list[PyTree]], object],
    x: object,
    arguments: list[PyTree],
    rows: int,
    count: int,
) -> list[bool]:
    """Returns the arguments with a row for each row of ``x``."""
    has_rows = [item is not None and np.shape(item)[:1] == (rows,) for item in arguments]
    inner = {size for leaf in jax.tree.leaves(x) for size in np.shape(leaf)[1:]}
    doubtful = [position for position, is_rowwise in enumerate(has_rows) if is_rowwise]
    if count == 1 or rows not in inner or not doubtful:
        return has_rows

    # The first dimension may be another one of the same size, such as time. What fits is taken.
    choices = itertools.product((True, False), repeat=len(doubtful))
    trials = [dict(zip(doubtful, choice, strict=True)) for choice in choices]
    fitting = [trial for trial in trials if _fits(run, x, arguments, trial, count)]
    if len(fitting) != 1:
        shapes = [np.shape(arguments[position]) for position in doubtful]
        raise errors.rows_or_another_dimension(rows, shapes)
    return [fitting[0].get(position, False) for position in range(len(arguments))]


def _fits(
    run: Callable[[PyTree, list[PyTree]], object],
    x: object,
    arguments: list[object],
    trial: Mapping[int, bool],
    count: int,
) -> bool:
    """Whether layers take these arguments cut, those whole."""

    def first(item):
        return jax.tree.map(lambda part: part[0], cut(item, count))

    def one(x, arguments: list[PyTree]) -> PyTree:
        mine = [first(g) if trial.get(position) else g for position, g in enumerate(arguments)]
        return first(x), run(first(x), mine)

    try:
        short, long = jax.eval_shape(one, x, arguments)
    except Exception:  # noqa: BLE001 - whatever a layer raises, it does not take these
        return False
    return jax.tree.map(np.shape, short) == jax.tree.map(np.shape, long)


# --- The layers as a function of arrays ---


class Step:
    """Layers as a function of their values, for one microbatch."""

    def __init__(
        self, stacked: Any, run: Run, is_shared: Callable[[Path, Any], bool], microbatches: int
    ) -> None:
        self.graphdef, state = split(stacked)
        self.values = state.flat()
        self.origins = state.origins()
        self.run = run
        self.microbatches = microbatches

        variables = dict(iter_variables(stacked))
        self.shared = {path for path, v in variables.items() if is_shared(path, v)}
        self.random = {path for path, v in variables.items() if isinstance(v, RngState)}
        self.keys = {path for path in self.random if is_prng_key(self.values[path])}
        self.counts = (self.random - self.keys) & self.shared
        self.sown = {path for path, v in variables.items() if isinstance(v, Intermediate)}
        self.written: set[Path] = set()  # of the layers' own, found by tracing

    def __call__(
        self, values: Mapping[Path, Any], x: Any, arguments: list[PyTree], length: int, number: Any
    ) -> tuple[PyTree, dict[Path, PyTree], dict[Path, PyTree]]:
        """Returns the result, the written state, and the sown values."""
        entering = dict(values)
        if self.microbatches > 1:
            for path in self.keys:
                keys = values[path]
                fold = functools.partial(jax.random.fold_in, data=number)
                for _ in range(keys.ndim):
                    fold = jax.vmap(fold)
                entering[path] = fold(keys)
        model = merge(self.graphdef, State.from_flat(entering, self.origins))

        y = self.run(model, x, arguments, length)

        variables = dict(iter_variables(model))
        lost = values.keys() - variables.keys()
        if lost:
            raise errors.variables_taken_away(lost)

        written: dict[Path, Any] = {}
        sown: dict[Path, Any] = {}
        for path, variable in variables.items():
            if path not in values:
                self.origins[path] = Origin.of(variable)
            if path not in values or path in self.sown:
                sown[path] = _added(values.get(path), variable.value)
            elif path not in self.keys and not _same(entering[path], variable.value):
                written[path] = variable.value

        refused = (written.keys() & self.shared) - self.counts
        if refused:
            raise errors.shared_variables_written(refused)
        return y, written, sown


def _same(left: object, right: object) -> bool:
    pairs = (jax.tree.leaves(left), jax.tree.leaves(right))
    return len(pairs[0]) == len(pairs[1]) and all(map(lambda a, b: a is b, *pairs))


def _added(start, end):
    """Returns the appended items of a tuple, else all."""
    grown = isinstance(start, tuple) and isinstance(end, tuple) and len(end) > len(start)
    return end[len(start) :] if grown else end


# --- The pipeline ---


def run_pipeline(
    stacked: object,
    is_shared: Callable[[Path, Any], bool],
    run: Run,
    run_whole: Run,
    x: object,
    arguments: list[PyTree],
    *,
    policy: object,
    axis_name: str,
    length: int,
    microbatches: int,
    schedule: str,
) -> PyTree:
    """Runs layers over a batch in microbatches, and writes their state.

    Args:
        stacked: The layers as one Module, with a leading dimension.
        is_shared: Filter of the Variables that all layers share.
        run: Runs layers; keeps for the gradient what the policy says.
        run_whole: Likewise; keeps everything.
        x: What goes from layer to layer.
        arguments: What every layer is given, None for those that are not arrays.
        policy: The remat policy.
        axis_name: Name of the leading dimension.
        length: The number of layers.
        microbatches: The number of microbatches.
        schedule: ``"gpipe"`` or ``"circular"``.

    Returns:
        What the last layer returns.
    """
    stages = find_stages(axis_name, length)
    in_rounds = schedule == "circular" and 1 < stages.count < length
    step = Step(stacked, run_whole if in_rounds else run, is_shared, microbatches)
    rows = check_rows(x, microbatches)

    # One call for the whole batch is traced: its types are those of what is joined.
    def whole(x, arguments: list[PyTree]) -> PyTree:
        return step(stages.gathered(step.values), x, arguments, length, 0)

    rowwise = find_rowwise(
        lambda x, arguments: whole(x, arguments)[0], x, arguments, rows, microbatches
    )
    y_type, written_types, sown_types = _result_types(whole, x, arguments)
    step.written = set(written_types) - step.shared
    step.counts &= set(written_types)

    def compute(values: dict[Path, Any], x, arguments: list[PyTree]):
        pairs = list(zip(arguments, rowwise, strict=True))
        parts = [cut(g, microbatches) if of_row else None for g, of_row in pairs]
        same = [None if of_row else g for g, of_row in pairs]

        call = _Pipeline(step, stages, length, microbatches, schedule, policy)
        y, state, sown = call(values, cut(x, microbatches), parts, same)

        size = rows // microbatches
        totals = {
            path: jax.tree.map(functools.partial(_combined, path, size), value, sown_types[path])
            for path, value in sown.items()
        }
        return joined(y), state, totals

    state = tuple({p: step.values[p] for p in paths} for paths in (step.counts, step.written))
    types = y_type, jax.tree.map(jax.typeof, state), sown_types
    layouts = jax.tree.map(operator.attrgetter("sharding"), types)
    run_typed = with_auto_axes(compute, jax.sharding.get_abstract_mesh(), layouts)
    y, (counts, written), sown = run_typed(step.values, x, arguments)
    _write(stacked, {**counts, **written}, sown, step)
    return y


def _result_types(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns what a function would return, as types of JAX."""
    # ``jax.eval_shape`` leaves out the layouts over Explicit axes, which the types have.
    types: PyTree = None

    def note_types(*args: PyTree) -> PyTree:
        nonlocal types
        result = function(*args)
        types = jax.tree.map(jax.typeof, result)
        return result

    jax.eval_shape(note_types, *args)
    return types


class _Pipeline:
    """One call: the work of each stage at each tick."""

    def __init__(
        self, step: Step, stages: Stages, length: int, microbatches: int, schedule: str, policy
    ) -> None:
        self.step = step
        self.stages = stages
        self.policy = policy
        self.microbatches = microbatches

        in_rounds = schedule == "circular" and stages.axis is not None
        self.rounds = length // stages.count if in_rounds else 1
        self.length = length // stages.count // self.rounds  # layers of a tick
        self.period = max(microbatches, stages.count)  # ticks of a round
        self.ticks = _ticks(stages.count, microbatches, self.rounds)

        # What planners and profiles read.
        self.name = (
            f"pipeline(schedule={schedule if self.rounds > 1 else 'gpipe'},stages={stages.count},"
            f"microbatches={microbatches},rounds={self.rounds})"
        )

    def __call__(
        self, values: dict[Path, object], x: object, parts: list[Any], same: list[PyTree]
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Runs all ticks; returns rows by microbatch, state, and sown values."""
        shared = {p: v for p, v in values.items() if p in self.step.shared}
        own_values = {p: v for p, v in values.items() if p not in self.step.shared}
        if self.stages.axis is None:
            return self._region(own_values, shared, x, parts, same)

        by_stage, whole = PartitionSpec(self.stages.axis), PartitionSpec()
        region = jax.shard_map(
            self._region,
            mesh=mesh_of_region(resolve_mesh()),
            in_specs=(by_stage, whole, whole, whole, whole),
            out_specs=(whole, (whole, by_stage), PartitionSpec(None, self.stages.axis)),
            axis_names={self.stages.axis},
        )
        with jax.named_scope(self.name):
            return region(own_values, shared, x, parts, same)

    def _region(self, own_values, shared, x, parts: list[Any], same: list[PyTree]):
        """Returns (rows by microbatch, state, sown values) of a stage."""
        stages, step = self.stages, self.step
        stage, rounds = stages.index(), self.rounds

        # Marked here, so that their gradients are summed as ``mark_varying`` says.
        shared, x, parts, same = stages.varying((shared, x, parts, same))
        counts = {path: jnp.asarray(shared[path]) for path in step.counts}
        own_values = stages.to_rounds(jax.tree.map(jnp.asarray, own_values), rounds)
        written = {path: own_values[path] for path in step.written}
        fresh = step.random - step.shared  # a stream advances as in one call

        def work(own_values, present, entering, arguments: list[PyTree], turn, number):
            """Runs the layers of a round for one microbatch; also returns the state before."""
            x, counts = entering
            layers, state = self._of_round(own_values, turn), self._of_round(present, turn)
            values = {**layers, **state, **shared, **counts}
            values |= {path: layers[path] for path in fresh}
            return *step(values, x, arguments, self.length, number), state

        run: Callable[..., Any] = work
        if rounds > 1:
            # The layers of a round are taken out at each tick: kept for the gradient, there would
            # be a copy of them for each.
            run = remat(work, policy=_keeping(self.policy), prevent_cse=False)

        def tick(carry, time: object):
            arriving, waiting, present, results = carry

            # Which round (``turn``) and microbatch (``number``) the stage works on, if on any.
            begun, ended = time - stage, time - stage - (rounds - 1) * self.period
            turn = jnp.clip(begun // self.period, 0, rounds - 1)
            number = jnp.clip(begun % self.period, 0, self.microbatches - 1)
            at_work = (begun >= 0) & (begun % self.period < self.microbatches)
            at_work &= ended < self.microbatches

            # Idle stages work on what is there: numbers made up, such as zeros, could give a
            # gradient that is not finite.
            arriving, waiting = self._wait(stage, time, arriving, waiting)
            enters = (stage == 0) & (turn == 0)
            entering = _choose(enters, (_part(x, number), counts), arriving)
            arguments = [
                g if part is None else _part(part, number)
                for g, part in zip(same, parts, strict=True)
            ]
            y, new_values, sown, state = run(own_values, present, entering, arguments, turn, number)

            leaving = (y, {path: new_values.get(path, entering[1][path]) for path in counts})
            later = {path: new_values.get(path, value) for path, value in state.items()}
            present = self._with_round(present, turn, _choose(at_work, later, state))

            is_result = at_work & (ended >= 0)
            chosen = _choose(is_result, y, _part(results, number))
            results = _with_part(results, number, chosen)
            carry = (stages.hand_on(leaving), waiting, present, results)
            return carry, (leaving[1], sown)

        start = stages.varying((_part(x, 0), counts))
        waits = self.period - stages.count if rounds > 1 else 0
        waiting = jax.tree.map(lambda array: jnp.stack([array] * waits), start) if waits else None
        results = jax.tree.map(lambda array: jnp.stack([array] * self.microbatches), start[0])
        carry = (start, waiting, written, results)
        carry, (counted, sown) = jax.lax.scan(tick, carry, jnp.arange(self.ticks))

        _, _, written, results = carry
        final = jax.tree.map(lambda c: c[-1], counted)
        y, final = stages.of_last((results, final))
        mine = jax.tree.map(lambda value: self._of_stage(value, stage), sown)
        written = stages.to_layers(written, rounds)
        return y, (final, written), stages.to_layers(mine, rounds, dim=1)

    def _wait(self, stage: object, time, arriving: object, waiting: object) -> tuple[Any, Any]:
        """Keeps arrivals of the first stage until its next round begins."""
        if waiting is None:
            return arriving, None
        slot = time % (self.period - self.stages.count)
        oldest = _part(waiting, slot)
        return _choose(stage == 0, oldest, arriving), _with_part(waiting, slot, arriving)

    def _of_round(self, values: dict[Path, Any], turn) -> dict[Path, Any]:
        """The layers of a round, of those of a stage."""
        if self.rounds == 1:
            return values
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, turn, self.length, 0), values)

    def _with_round(self, values: dict[Path, Any], turn, new_values: dict[Path, Any]):
        if self.rounds == 1:
            return new_values
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, turn, 0), values, new_values
        )

    def _of_stage(self, by_tick: jax.Array, stage) -> jax.Array:
        """Sown values of the ticks of a stage, (microbatches, layers, ...)."""
        if self.rounds == 1:
            return jax.lax.dynamic_slice_in_dim(by_tick, stage, self.microbatches)
        begun = self.period * jnp.arange(self.rounds)[None]
        ticks = stage + begun + jnp.arange(self.microbatches)[:, None]
        return jnp.take(by_tick[:, 0], ticks, axis=0)


_TAKEN = frozenset({"dynamic_slice", "squeeze", "reshape", "convert_element_type", "transpose"})


def _keeping(policy):
    """Returns a policy without saved layers of a round."""
    if policy is None:
        return None

    def keeps(primitive, *arrays, **options):
        return primitive.name not in _TAKEN and policy(primitive, *arrays, **options)

    return keeps


def _ticks(stages: int, microbatches: int, rounds: int) -> int:
    return (rounds - 1) * max(microbatches, stages) + microbatches + stages - 1


def bubble_share(schedule: str, stages: int, microbatches: int, rounds: int) -> float:
    """The share of a pipeline's ticks with idle stages."""
    rounds = rounds if schedule == "circular" else 1
    return 1 - rounds * microbatches / _ticks(stages, microbatches, rounds)


def _part(tree: object, index: object):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _with_part(tree: object, index: object, part: object):
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), tree, part
    )


def _choose(condition, left, right):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), left, right)


# --- What layers leave behind ---


def _combined(path: Path, rows: int, parts: jax.Array, whole: jax.ShapeDtypeStruct) -> jax.Array:
    """Joins the sown values of microbatches, (microbatches, layers, ...)."""
    count, layers, *part = parts.shape
    row_shape = whole.shape[1:]
    if tuple(part) == row_shape:
        if count == 1:
            return parts[0]
        if jnp.issubdtype(parts.dtype, jnp.inexact):
            return jnp.mean(parts, axis=0).astype(parts.dtype)

    # Rows, perhaps several for each row of the input, along the one dimension that differs.
    differ = [k for k, (a, b) in enumerate(zip(part, row_shape, strict=True)) if a != b]
    if len(differ) == 1 and part[differ[0]] * count == row_shape[differ[0]]:
        (k,) = differ
        if part[k] % rows == 0:
            shape = parts.shape
            split_rows = parts.reshape(*shape[: k + 2], rows, part[k] // rows, *shape[k + 3 :])
            return jnp.moveaxis(split_rows, 0, k + 2).reshape(layers, *row_shape)
    raise errors.sown_values_not_joined(path, parts, count, row_shape)


def _write(stacked, state: Mapping[Path, Any], sown: Mapping[Path, Any], step: Step) -> None:
    """Writes state, and sown values, which may be of new Variables, into the layers."""
    variables = dict(iter_variables(stacked))
    for path, value in state.items():
        variables[path].value = value

    owners = dict(iter_modules(stacked))
    for path, value in sown.items():
        if path not in variables:
            variable = step.origins[path].variable_type(value)
            setattr(owners[path[:-1]], str(path[-1]), variable)
            continue

        old_value = variables[path].value
        is_appended = isinstance(old_value, tuple) and isinstance(value, tuple) and old_value
        variables[path].value = (*old_value, *value) if is_appended else value
