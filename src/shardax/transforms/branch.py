# SPDX-License-Identifier: Apache-2.0
"""``cond`` and ``switch``: functions over Modules of which one is run.

A *branch* is one of the functions. All are traced, once each, and one is run. A Variable that any
branch writes leaves all of them; one that does not write it hands on the value it was given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax.core.errors import BranchError
from shardax.core.variables import Variable
from shardax.transforms.agree import Outcome, check_agreement, outline_of
from shardax.transforms.call import Call, Inside, retry_captured
from shardax.transforms.decide import as_integer, as_predicate, check_operands
from shardax.transforms.kinds import result_kinds
from shardax.transforms.lift import Carried, Record, carry_in, check_no_leak, check_result
from shardax.transforms.repeat import vary_alike


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Runs one of two functions over Modules, as ``jax.lax.cond`` does.

    Branches may write Variables, passed or reached through a closure, draw random numbers, and
    return the Modules they were given. Both are traced; inside ``vmap`` both are run and the
    results selected, as in JAX.

    Args:
        pred: A boolean of shape (); a number counts as true unless it is zero.
        true_fun: Called as ``true_fun(*operands)`` if the predicate is true.
        false_fun: Called if it is false.
        *operands: Arrays, Modules, Variables and pytrees of these.

    Returns:
        The result of the branch that was taken.

    Raises:
        DecisionError: If the predicate is not one boolean or real number.
        BranchError: If branches differ in what they return, in the form of a Variable, or in how
            they change the structure of the Modules.

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
    _check_callable("cond", {"true_fun": true_fun, "false_fun": false_fun})
    decision = as_predicate(pred, "pred of sx.cond")

    def choose(branches: Sequence[Callable[[], Any]]) -> Any:
        return jax.lax.cond(decision, *branches)

    labels = ["true_fun", "false_fun"]
    return _run("cond", [true_fun, false_fun], labels, operands, decision, choose)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Runs one of several functions over Modules, as ``jax.lax.switch`` does; see ``cond``.

    Args:
        index: An integer of shape (); one that is out of range counts as the nearest in range.
        branches: The functions, each called as ``branch(*operands)``.
        *operands: Arrays, Modules, Variables and pytrees of these.

    Returns:
        The result of the branch that was taken.

    Raises:
        DecisionError: If the index is not one integer.
        BranchError: As for ``cond``; also if there are no branches.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> experts = [sx.Param(jnp.float32(i)) for i in (10, 20, 30)]
        >>> apply = [lambda x, e=expert: e * x for expert in experts]
        >>> [float(sx.switch(i, apply, jnp.float32(2))) for i in (0, 1, 7)]
        [20.0, 40.0, 60.0]
    """
    functions = list(branches)
    labels = [f"branches[{i}]" for i in range(len(functions))]
    if not functions:
        raise BranchError("sx.switch was given no branches; give a sequence of at least one.")
    _check_callable("switch", dict(zip(labels, functions, strict=True)))
    decision = as_integer(index, "index of sx.switch")

    def choose(branches: Sequence[Callable[[], Any]]) -> Any:
        return jax.lax.switch(decision, branches)

    return _run("switch", functions, labels, operands, decision, choose)


def _check_callable(name: str, functions: dict[str, Any]) -> None:
    for label, function in functions.items():
        if not callable(function):
            raise BranchError(
                f"{label} of sx.{name} is a {type(function).__name__}, which cannot be called. A "
                f"branch is a function of the operands: lambda *operands: value."
            )


def _run(
    name: str,
    functions: Sequence[Callable[..., Any]],
    labels: Sequence[str],
    operands: Sequence[Any],
    decision: Any,
    choose: Callable[..., Any],
) -> Any:
    def attempt(captured: list[Variable[Any]]) -> Any:
        call = Call(name, functions, operands, {}, captured=captured)
        return _Choice(call, labels).run(decision, choose)

    return retry_captured(attempt)


class _Choice:
    """One call of ``cond`` or ``switch``."""

    def __init__(self, call: Call, labels: Sequence[str]) -> None:
        check_operands(call)
        self.call = call
        self.labels = labels
        self.values = call.graph.values()
        self.done: dict[int, tuple[Record, Any, Any]] = {}
        self.union: tuple[int, ...] = ()
        # Compiled as a unit so that JAX traces it once, for its shapes and for the choice.
        self.ones = [
            jax.jit(functools.partial(self._one, which), inline=True)
            for which in range(len(labels))
        ]

    # --- inside ----------------------------------------------------------------------------------

    def _one(self, which: int, values: list[Any], plain: tuple[Any, ...]) -> Any:
        """Runs a branch; returns (arrays of its result, written values by position, new values)."""

        def leave(inside: Inside) -> Any:
            inside.require_inputs()
            check_result(inside.result, self.call.name)
            carried = inside.carry_out(inside.result)
            record = carried.record
            leaves, treedef = jax.tree.flatten(carried.result)
            self.done[which] = record, outline_of(inside.result, record), treedef
            return (
                leaves,
                dict(zip(record.written, carried.written, strict=True)),
                carried.fresh,
            )

        return self.call.run(values, plain, {}, leave, which=which)

    def _branch(self, which: int, targets: Sequence[_Target], values: Any, plain: Any) -> Any:
        """Runs a branch and returns, flat, what leaves every branch."""
        leaves, written, fresh = self.ones[which](values, plain)
        everything = self._joined(leaves, written, fresh, values)
        return [
            target.convert(leaf)
            for target, leaf in zip(targets, jax.tree.leaves(everything), strict=True)
        ]

    def _joined(self, leaves: Any, written: dict[int, Any], fresh: Any, values: Any) -> Any:
        return leaves, [written.get(p, values[p]) for p in self.union], fresh

    # --- outside ---------------------------------------------------------------------------------

    def run(self, decision: Any, choose: Callable[..., Any]) -> Any:
        """Traces the branches, runs the one that is chosen, and carries back what it did.

        Args:
            decision: What decides. Inside ``shard_map``, where it may differ between shards, so may
                all that leaves; JAX does not count it in.
            choose: Runs one of the branches on arrays.
        """
        differ = functools.partial(vary_alike, other=decision)
        inputs = jax.tree.map(differ, (self.values, self.call.arguments.plain))
        outcomes = []
        for which, label in enumerate(self.labels):
            leaves, written, fresh = result_kinds(self.ones[which], *inputs)
            record, outline, _ = self.done[which]
            outcomes.append(Outcome(label, record, outline, leaves, written, fresh))
        check_agreement(self.call, outcomes, self.values)
        self.union = tuple(sorted({position for item in outcomes for position in item.written}))
        rows = [
            self._joined(item.arrays, item.written, item.fresh, self.values) for item in outcomes
        ]
        columns = zip(*map(jax.tree.leaves, rows), strict=True)
        targets = [_Target(types, decision) for types in columns]
        # Values are closed over, not passed: JAX then takes in those that a branch uses, so that a
        # large model of which little is used costs nothing when the choice is differentiated.
        branches = [
            functools.partial(self._branch, which, targets, *inputs)
            for which in range(len(self.labels))
        ]
        flat = choose(branches)
        leaves, written, fresh = jax.tree.unflatten(jax.tree.structure(rows[0]), flat)
        record, _, treedef = self.done[0]
        record.written = self.union
        carried = Carried(treedef.unflatten(leaves), written, fresh, record)
        check_no_leak(self.call.graph, carried)
        return carry_in(self.call.graph, carried)


class _Target:
    """The type in which one array leaves every branch.

    Shape and dtype agree. What may differ without meaning anything is whether JAX counts the dtype
    as weak, and, in ``shard_map``, along which mesh axes the array is known to be the same.

    Args:
        types: The array, or its shape, as each branch leaves it.
        decision: What decides.
    """

    def __init__(self, types: Sequence[Any], decision: Any) -> None:
        found = [jax.typeof(item) for item in types]
        self.dtype = found[0].dtype
        self.weak = all(getattr(item, "weak_type", False) for item in found)
        self.others = [*types, decision]

    def convert(self, leaf: Any) -> Any:
        """Returns the array in the type, inside a branch."""
        if getattr(jax.typeof(leaf), "weak_type", False) and not self.weak:
            leaf = jax.lax.convert_element_type(leaf, self.dtype)
        for other in self.others:
            leaf = vary_alike(leaf, other)
        return leaf
