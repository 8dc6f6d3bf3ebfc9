# SPDX-License-Identifier: Apache-2.0
"""``cond`` and ``switch``: conditional execution of functions over Modules.

A call has these steps (``_BranchingCall.run``):

1. All branches are traced, once each (``TracedFunction``). What one captures and writes becomes an
   input, and the call starts again (``retry_captured`` in ``lift.engine``).
2. Their *outcomes* are compared (``outcomes``): one program comes out of all branches, so results,
   new objects and changes of structure must agree in all but numbers, and a written value must have
   the form of the old one. Branches may write different Variables.
3. One branch is run. A Variable that any branch writes leaves all of them; a branch that does not
   write it returns the value that it had.
4. What the branch did is stored (``LiftedCall.apply``). Nothing before writes to the caller's
   objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax

from shardax._core.array_ops import is_weakly_typed
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.variable import Variable
from shardax._transforms.control import errors, numbers
from shardax._transforms.control.forms import vary_alike
from shardax._transforms.control.outcomes import (
    BranchOutcome,
    BranchOutputs,
    OutcomeComparison,
    result_outline,
)
from shardax._transforms.control.traced import TracedFunction
from shardax._transforms.jit import eager
from shardax._transforms.lift import engine
from shardax._transforms.lift.effects import LiftedOutputs, check_result

# Runs one of several functions without arguments; returns its result.
Choose = Callable[[Sequence[Callable[[], list[Leaf]]]], list[Leaf]]


def cond(
    pred: object,
    true_fun: Callable[..., object],
    false_fun: Callable[..., object],
    *operands: object,
    **named_operands: object,
) -> PyTree:
    """Runs one of two functions over Modules, as ``jax.lax.cond`` does.

    Branches may write Variables, passed or reached through a closure, draw random numbers, and
    return the Modules they were given. Both are traced; inside ``vmap`` both are run and the
    results selected, as in JAX.

    Args:
        pred: A boolean of shape (); a number counts as true unless it is zero.
        true_fun: Called as ``true_fun(*operands)`` if the predicate is true.
        false_fun: Called if it is false.
        *operands: Arrays, Modules, Variables and pytrees of these.
        **named_operands: Likewise, given to the branches by name.

    Returns:
        The result of the branch that was taken.

    Raises:
        TransformError: If the predicate is not one boolean or real number; if branches differ in
            what they return, in the form of a Variable, or in how they change the structure of the
            Modules.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jnp.float32(0))
        >>> def add(total, x):
        ...     total += x
        ...     return x
        >>> results = [float(sx.cond(x > 0, add, lambda total, x: -x, total, x))
        ...            for x in jnp.array([1.0, -2.0, 3.0])]
        >>> results, float(total)
        ([1.0, 2.0, 3.0], 4.0)
    """
    functions = (true_fun, false_fun)
    labels = ("true_fun", "false_fun")
    return eager.run(_cond, functions, labels, (pred, *operands), named_operands)


def switch(
    index: object,
    branches: Sequence[Callable[..., object]],
    *operands: object,
    **named_operands: object,
) -> PyTree:
    """Runs one of several functions over Modules, as ``jax.lax.switch`` does; see ``cond``.

    Args:
        index: An integer of shape (); one that is out of range counts as the nearest in range.
        branches: The functions, each called as ``branch(*operands)``.
        *operands: Arrays, Modules, Variables and pytrees of these.
        **named_operands: Likewise, given to the branches by name.

    Returns:
        The result of the branch that was taken.

    Raises:
        TransformError: If the index is not one integer; as for ``cond``; also if there are no
            branches.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> experts = [sx.Param(jnp.float32(i)) for i in (10, 20, 30)]
        >>> apply = [lambda x, e=expert: e * x for expert in experts]
        >>> [float(sx.switch(i, apply, jnp.float32(2))) for i in (0, 1, 7)]
        [20.0, 40.0, 60.0]
    """
    functions = tuple(branches)
    if not functions:
        raise errors.no_branches()
    labels = tuple(f"branches[{position}]" for position in range(len(functions)))
    return eager.run(_switch, functions, labels, (index, *operands), named_operands)


# Called by ``eager.run``; the options are the labels of the branches. JAX shows the names of these
# functions in profiles.


def _cond(
    functions: Sequence[Callable[..., PyTree]],
    labels: Sequence[str],
    args: Sequence[PyTree],
    named_operands: Mapping[str, PyTree],
) -> PyTree:
    pred, *operands = args
    decision = numbers.as_predicate(pred, "pred of sx.cond")

    def choose(branches: Sequence[Callable[[], list[Leaf]]]) -> list[Leaf]:
        return jax.lax.cond(decision, *branches)

    return _run("cond", functions, labels, operands, named_operands, decision, choose)


def _switch(
    functions: Sequence[Callable[..., PyTree]],
    labels: Sequence[str],
    args: Sequence[PyTree],
    named_operands: Mapping[str, PyTree],
) -> PyTree:
    index, *operands = args
    decision = numbers.as_integer(index, "index of sx.switch")

    def choose(branches: Sequence[Callable[[], list[Leaf]]]) -> list[Leaf]:
        return jax.lax.switch(decision, branches)

    return _run("switch", functions, labels, operands, named_operands, decision, choose)


def _run(
    name: str,
    functions: Sequence[Callable[..., PyTree]],
    labels: Sequence[str],
    operands: Sequence[PyTree],
    named_operands: Mapping[str, PyTree],
    decision: numbers.Number,
    choose: Choose,
) -> PyTree:
    for label, function in zip(labels, functions, strict=True):
        if not callable(function):
            raise errors.branch_is_not_callable(label, function, name)

    def attempt(captured: list[Variable]) -> PyTree:
        call = engine.LiftedCall(name, functions, operands, named_operands, captured=captured)
        return _BranchingCall(call, labels).run(decision, choose)

    return engine.retry_captured(attempt)


class _BranchingCall:
    """One call of ``cond`` or ``switch``."""

    def __init__(self, call: engine.LiftedCall, labels: Sequence[str]) -> None:
        engine.check_operands(call)
        self.call = call
        self.labels = labels  # how the caller knows the branches
        self.values = call.graph.values()
        self.outcomes: dict[int, BranchOutcome] = {}  # known when the branches were traced
        self.branches = [
            TracedFunction(
                call, functools.partial(self._leave, which), BranchOutputs([], {}, []), which
            )
            for which in range(len(labels))
        ]

    def run(self, decision: numbers.Number, choose: Choose) -> PyTree:
        """Traces all branches, runs one, stores what it did, and returns its result."""
        # Inside ``shard_map``, what is chosen varies over mesh axes as the decision does.
        plain, _ = self.call.arguments.plain_leaves()
        values, plain = jax.tree.map(lambda leaf: vary_alike(leaf, decision), (self.values, plain))

        types = [branch.types(values, plain) for branch in self.branches]
        first = self.outcomes[0]
        for which in range(1, len(types)):
            OutcomeComparison(
                self.call, self.values, first, types[0], self.outcomes[which], types[which]
            ).check_alike()

        # What leaves every branch, and the types that each of its arrays has in the branches.
        positions = sorted({position for outputs in types for position in outputs.written})
        leaving = [_with_unwritten(outputs, positions, self.values) for outputs in types]
        types_of_arrays = list(zip(*map(jax.tree.leaves, leaving), strict=True))

        def without_arguments(branch: TracedFunction) -> Callable[[], list[Leaf]]:
            # Values are closed over, not passed: JAX then takes in those that a branch uses, so
            # that a large model of which little is used costs nothing when the choice is
            # differentiated.
            def run_branch() -> list[Leaf]:
                outputs = branch(values, plain)
                arrays = jax.tree.leaves(_with_unwritten(outputs, positions, values))
                return [
                    _to_common_type(array, types_of_array, decision)
                    for array, types_of_array in zip(arrays, types_of_arrays, strict=True)
                ]

            return run_branch

        arrays = choose([without_arguments(branch) for branch in self.branches])
        result, written, fresh = jax.tree.unflatten(jax.tree.structure(leaving[0]), arrays)
        first.effects.written = tuple(positions)
        result = first.treedef.unflatten(result)
        return self.call.apply(LiftedOutputs(result, written, fresh, first.effects))

    def _leave(self, which: int, context: engine.RunContext) -> BranchOutputs:
        """Returns the arrays that leave a branch; notes what else it did."""
        check_result(context.result, self.call.name)
        outputs = context.record_effects(context.result)
        effects = outputs.effects
        arrays, treedef = jax.tree.flatten(outputs.result)
        outline = result_outline(context.result, effects)
        self.outcomes[which] = BranchOutcome(self.labels[which], effects, outline, treedef)
        written = dict(zip(effects.written, outputs.written, strict=True))
        return BranchOutputs(arrays, written, outputs.fresh)


def _with_unwritten(
    outputs: BranchOutputs, positions: Sequence[int], values: Sequence[PyTree]
) -> tuple[list[Leaf], list[PyTree], list[PyTree]]:
    """Returns what leaves every branch, with the old values of what one did not write."""
    written = [outputs.written.get(position, values[position]) for position in positions]
    return outputs.result, written, outputs.fresh


def _to_common_type(array: Leaf, types: Sequence[Leaf], decision: numbers.Number) -> Leaf:
    """Returns an array in the type in which it leaves every branch, inside one."""
    # Shape and dtype agree. What may differ without meaning anything is whether JAX counts the
    # dtype as weak, and, in ``shard_map``, along which mesh axes the array is known to be the same.
    is_weak_in_all = all(is_weakly_typed(item) for item in types)
    if is_weakly_typed(array) and not is_weak_in_all:
        array = jax.lax.convert_element_type(array, jax.typeof(types[0]).dtype)
    for other in (*types, decision):
        array = vary_alike(array, other)
    return array
