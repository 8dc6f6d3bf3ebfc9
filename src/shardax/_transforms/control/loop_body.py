# SPDX-License-Identifier: Apache-2.0
"""``Loop``: the body that ``while_loop``, ``fori_loop``, ``bounded_while_loop`` and ``scan`` run.

The *body* is the user's function. It runs once per *iteration*. A value that it uses is one of:

- the *carry*, which one iteration hands to the next: the plain arrays of the carried argument, and
  every Variable that the body writes, wherever the body got it from;
- a *slice*, which one iteration sees alone: the index of ``fori_loop``, and what ``scan`` maps;
- a *constant*, which all iterations see: all else, also Variables that are only read. Constants
  cost no memory per iteration when the loop is differentiated.

The steps of a loop:

1. *Find the carry* (``Loop.find_carry``). Which Variables the body writes is known when it was
   traced (``TracedFunction``). What the body captures and writes becomes an input, and the call
   starts again (``retry_captured`` in ``lift.engine``). What is carried must keep its *form*:
   structure, shape and dtype (``control.forms``); only what starts as a number of Python takes the
   dtype that it becomes.
2. *Run*: JAX's own loop calls ``Loop.step``, with the first carry of ``Loop.first_carry``.
3. *Store*: ``Loop.apply`` writes the last carry to the caller's objects. Nothing before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from shardax._core.frames import kind_of
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, Path, PyTree, plain_path
from shardax._core.object import Object
from shardax._transforms.control import errors
from shardax._transforms.control.forms import ARRAY, form_difference, outline_difference, vary_alike
from shardax._transforms.control.traced import TracedFunction
from shardax._transforms.lift import engine
from shardax._transforms.lift.effects import Effects, LiftedOutputs, check_result, holds_same_arrays
from shardax._transforms.lift.frames import path_of


class LoopCarry(NamedTuple):
    """What one iteration hands to the next."""

    variables: Sequence[PyTree]  # values of the written Variables, in the order of the graph
    plain: Sequence[Leaf]  # arrays of the carried argument


class LoopSlices(NamedTuple):
    """What one iteration sees alone."""

    variables: dict[int, PyTree]  # values by position of the Variable
    plain: dict[int, Leaf]  # by position among the plain leaves of the arguments


NO_SLICES = LoopSlices({}, {})


class Loop:
    """One loop: its body, and what goes into each iteration."""

    def __init__(
        self,
        call: engine.LiftedCall,
        carried_argument: int | None,
        values: Sequence[PyTree] | None = None,
    ) -> None:
        self.call = call
        self.carried_argument = carried_argument  # its position
        self.label = "" if carried_argument is None else call.labels[carried_argument]

        # What goes into the first iteration.
        self.values = call.graph.values() if values is None else list(values)
        self.plain, _ = call.arguments.plain_leaves()
        self.slices = NO_SLICES  # of the first iteration, or their types

        # The carry, by position.
        self.carried_plain = self._plain_positions(carried_argument)
        self.carried_variables: tuple[int, ...] = ()  # known when the body was traced

        # Known when the body was traced: what it did, and the path of each carried array. The
        # arrays of a trace do not outlive it.
        self._effects: Effects | None = None
        self._result_tree: jax.tree_util.PyTreeDef | None = None
        self._carry_paths: list[Path] = []

        self.body = TracedFunction(call, self._leave, otherwise=([], {}, None))

    def _plain_positions(self, argument: int | None) -> range:
        """Returns the positions of an argument's arrays among all plain leaves."""
        if argument is None:
            return range(0)
        counts = [len(jax.tree.leaves(plain)) for plain in self.call.arguments.plain]
        first = sum(counts[:argument])
        return range(first, first + counts[argument])

    # --- the body ---------------------------------------------------------------------------------

    def _leave(self, context: engine.RunContext) -> tuple[list[Leaf], dict[int, PyTree], PyTree]:
        """Returns the carried arrays, the written carried Variables, and a row of the results."""
        check_result(context.result, self.call.name)

        carried, returned = None, None
        if self.carried_argument is not None:
            carried = context.args[self.carried_argument]
            returned = jax.tree.map(
                context.here, self.returned_carry(context.result), is_leaf=is_object
            )
        self._check_structure(carried, returned)
        arrays = self._check_objects(carried, returned)

        outputs, row = self.record(context)
        written = zip(outputs.effects.written, outputs.written, strict=True)
        carried_values = {
            position: value for position, value in written if position not in self.slices.variables
        }
        return arrays, carried_values, row

    def returned_carry(self, result: PyTree) -> PyTree:
        """Returns the carry in the result of the body: all of it."""
        return result

    def record(self, context: engine.RunContext) -> tuple[LiftedOutputs, PyTree]:
        """Records what the body did; returns it, and a row of results: here, none."""
        outputs = context.record_effects(context.result)
        for index in outputs.effects.updates:
            raise errors.body_changes_structure(self.call, outputs.effects, index)
        if outputs.effects.fresh:
            raise errors.body_returns_new_object(self.call.name)
        self._effects = outputs.effects
        self._result_tree = jax.tree.structure(outputs.result)
        return outputs, None

    def _check_structure(self, carried: PyTree, returned: PyTree) -> None:
        """Raises if the carry came back in other containers."""
        carried_outline = jax.tree.map(lambda _: ARRAY, carried, is_leaf=is_object)
        returned_outline = jax.tree.map(lambda _: ARRAY, returned, is_leaf=is_object)

        difference = outline_difference(carried_outline, returned_outline, (self.label,))
        if difference is not None:
            raise errors.carry_structure_changed(difference, self.call.name)

    def _check_objects(self, carried: PyTree, returned: PyTree) -> list[Leaf]:
        """Returns the returned arrays; raises if an object did not come back as itself."""
        before = jax.tree_util.tree_leaves_with_path(carried, is_leaf=is_object)
        after = jax.tree.leaves(returned, is_leaf=is_object)
        arrays = []
        self._carry_paths = []
        for (keys, old), new in zip(before, after, strict=True):
            path = (self.label, *plain_path(keys))
            if old is not new and (isinstance(old, Object) or isinstance(new, Object)):
                raise errors.carried_object_replaced(path, old, new, self.call.name)
            if not isinstance(old, Object):
                self._carry_paths.append(path)
                arrays.append(new)
        return arrays

    # --- before the loop --------------------------------------------------------------------------

    def find_carry(self) -> None:
        """Traces the body: finds which Variables are carried, and checks that their form stays."""
        arrays, written, _ = self.body.types(*self.inputs(self.first_carry()))
        self.carried_variables = tuple(sorted(written))

        for position, new in sorted(written.items()):
            path = self.call.graph.flat.leaf_paths[position]
            difference = form_difference(self.values[position], new, path)
            if difference is not None:
                kind = kind_of(self.call.graph.leaves[position])
                raise errors.carry_changes_form(kind, difference, self.call.name)
        for path, index, new in zip(self._carry_paths, self.carried_plain, arrays, strict=True):
            difference = form_difference(self.plain[index], new, path)
            if difference is not None:
                raise errors.carry_changes_form("array", difference, self.call.name)

        values = [written[position] for position in self.carried_variables]
        if self._vary_like(LoopCarry(values, arrays)):
            self.find_carry()

    def first_carry(self) -> LoopCarry:
        """Returns the carry that goes into the first iteration."""
        return LoopCarry(
            [self.values[position] for position in self.carried_variables],
            [self.plain[index] for index in self.carried_plain],
        )

    def differ_like(self, decision: Leaf) -> bool:
        """Makes the carry differ between shards as a number that ends the loop does.

        Inside ``shard_map``, shards may then run for different numbers of iterations, which JAX
        does not count to the types of what comes out. Returns whether the carry changed.
        """
        changed = self._vary_like(jax.tree.map(lambda _: decision, self.first_carry()))
        if changed:
            self.find_carry()
        return changed

    def _vary_like(self, like: LoopCarry) -> bool:
        """Makes the first carry vary over mesh axes as another; returns whether it changed."""
        # Inside ``shard_map``, JAX counts this to the type, which is the same in all iterations.
        before = self.first_carry()
        after = jax.tree.map(vary_alike, before, like)
        for position, value in zip(self.carried_variables, after.variables, strict=True):
            self.values[position] = value
        for index, leaf in zip(self.carried_plain, after.plain, strict=True):
            self.plain[index] = leaf
        return not holds_same_arrays(before, after)

    # --- in the loop, and after it ----------------------------------------------------------------

    def inputs(
        self, carry: LoopCarry, slices: LoopSlices | None = None
    ) -> tuple[list[PyTree], list[Leaf]]:
        """Returns all values of Variables, and all plain leaves, that an iteration sees."""
        slices = self.slices if slices is None else slices
        values, plain = list(self.values), list(self.plain)

        for position, value in zip(self.carried_variables, carry.variables, strict=True):
            values[position] = value
        for position, value in slices.variables.items():
            values[position] = value

        for index, leaf in zip(self.carried_plain, carry.plain, strict=True):
            plain[index] = leaf
        for index, leaf in slices.plain.items():
            plain[index] = leaf
        return values, plain

    def step(self, carry: LoopCarry, slices: LoopSlices | None = None) -> tuple[LoopCarry, PyTree]:
        """Runs one iteration, inside the loop; returns the next carry and a row of results."""
        arrays, written, row = self.body(*self.inputs(carry, slices))
        new_carry = LoopCarry([written[position] for position in self.carried_variables], arrays)
        return jax.tree.map(vary_alike, new_carry, carry), row

    def next_carry(self, carry: LoopCarry) -> LoopCarry:
        """Runs one iteration of a loop without slices."""
        return self.step(carry)[0]

    def apply(self, carry: LoopCarry) -> PyTree:
        """Stores what the loop wrote; returns the result of the call."""
        assert self._effects is not None  # the body was traced
        assert self._result_tree is not None
        value_of = dict(zip(self.carried_variables, carry.variables, strict=True))
        written = [value_of[position] for position in self._effects.written]
        result = self._result_tree.unflatten(carry.plain)
        return self.call.apply(LiftedOutputs(result, written, [], self._effects))


class ReadOnlyFunction:
    """A function of the carry that must not write: a condition, or the history of a loop."""

    def __init__(
        self, loop: Loop, which: int, role: str, convert: Callable[[PyTree], PyTree]
    ) -> None:
        self.loop = loop
        self.role = role
        self.convert = convert  # what it returned, to what the loop needs
        self._function = TracedFunction(loop.call, self._leave, which=which)

    def __call__(self, carry: LoopCarry) -> PyTree:
        return self._function(*self.loop.inputs(carry))

    def _leave(self, context: engine.RunContext) -> PyTree:
        call = self.loop.call
        for captured in context.captured():
            path = path_of(call.functions, captured.outer)
            raise errors.writes_but_only_reads(self.role, captured.outer, path, call.name)

        effects = context.record_effects(None).effects
        for position in effects.written:
            variable, path = call.graph.leaves[position], call.graph.flat.leaf_paths[position]
            raise errors.writes_but_only_reads(self.role, variable, path, call.name)
        for index in effects.updates:
            item, path = call.graph.objects()[index], call.graph.flat.paths[index]
            raise errors.writes_but_only_reads(self.role, item, path, call.name)
        return self.convert(context.result)
