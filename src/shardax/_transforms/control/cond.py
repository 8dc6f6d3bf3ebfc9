# SPDX-License-Identifier: Apache-2.0
"""``cond`` and ``switch``: conditional execution of functions over Modules.

All branches are traced, once each, and one is run. The *outcome* of a branch is all that it leaves
behind: its result, the Variables that it wrote, how it changed the structure of the objects it was
given, and what it made. One program comes out of all branches, so outcomes must agree in everything
but numbers. A Variable that any branch writes leaves all of them; a branch that does not write it
returns the value it had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core.graph import flatten
from shardax._core.graph.paths import Path, format_path, plain_path
from shardax._core.graph.static import Static
from shardax._core.variable import Variable
from shardax._transforms.control import loops, scan
from shardax._transforms.errors import BranchError
from shardax._transforms.lift import engine
from shardax._transforms.lift.prefix import one_level


class ResultLeaf(NamedTuple):
    """A leaf of a result: an array, or an object's position."""

    position: int | None = None


class BranchOutcome(NamedTuple):
    """What one branch leaves."""

    label: str  # how the caller knows the branch
    effects: engine.Effects
    outline: Any  # its result with a ``ResultLeaf`` for every leaf
    arrays: Sequence[Any]  # shapes of the arrays in the result
    written: dict[int, Any]  # shapes of the values of written Variables, by position
    fresh: Sequence[Any]  # shapes of the values of new Variables


def _result_outline(result: Any, effects: engine.Effects) -> Any:
    leaves, treedef = jax.tree.flatten(result, is_leaf=flatten.is_object)
    positions = {} if effects.result is None else dict(effects.result.roots)
    return treedef.unflatten([ResultLeaf(positions.get(place)) for place in range(len(leaves))])


class _Comparison:
    """Outcomes of two branches, which must agree in all but numbers."""

    def __init__(self, call: engine.LiftedCall, first: BranchOutcome, other: BranchOutcome) -> None:
        self.call, self.first, self.other = call, first, other
        self.graphdef, self.paths = call.graph.flat.graphdef, call.graph.flat.paths

    def check(self, before: Sequence[Any]) -> None:
        """Raises if they differ, given the values before the choice."""
        self._check_structure()
        self._check_result()
        self._check_new()
        self._check_written(before)

    def _check_structure(self) -> None:
        first, other = self.first, self.other
        for position, old in enumerate(self.graphdef.objects):
            mine = first.effects.updates.get(position, old)
            theirs = other.effects.updates.get(position, old)
            if mine == theirs:
                continue
            shown = [
                scan.describe_change(old, new) if new != old else "nothing changes"
                for new in (mine, theirs)
            ]
            if shown[0] == shown[1]:
                shown = [
                    self._describe_attributes(first, mine, theirs),
                    self._describe_attributes(other, theirs, mine),
                ]
            raise BranchError(
                f"The branches of sx.{self.call.name} change the {old.type.__name__} at "
                f"{format_path(self.paths[position])} differently: in {first.label} {shown[0]}; in "
                f"{other.label} {shown[1]}. One program comes out of both, so they must leave one "
                f"structure. Make the same change in every branch (sow the same names, set the "
                f"same attributes in the same order), or change it before the choice and only "
                f"write values inside."
            )

    def _describe_attributes(self, outcome: BranchOutcome, new: Any, against: Any) -> str:
        """Returns the attributes in which one definition differs from another."""
        mine, theirs = (
            {key: child for key, child in flatten.definition_children(item) if isinstance(key, str)}
            if isinstance(item, flatten.ModuleDef)
            else {}
            for item in (new, against)
        )
        shown = []
        for name, child in mine.items():
            if child == theirs.get(name):
                continue
            what = "another container"
            if isinstance(child, flatten.Ref):
                what = self._describe(outcome, ResultLeaf(child.position))
            elif isinstance(child, Static):
                what = repr(child.value)[:40]
            shown.append(f".{name} is {what}")
        if shown:
            return ", ".join(shown)
        return f"the order is {', '.join(mine)}" if mine else "it is another"

    def _check_result(self) -> None:
        first, other, name = self.first, self.other, f"sx.{self.call.name}"
        found = _difference(first.outline, other.outline, ())
        if found is not None:
            path, mine, theirs = found
            raise BranchError(
                f"The branches of {name} return different structures{_at(path)}: {first.label} "
                f"{mine}, {other.label} {theirs}. Return the same containers with the same keys "
                f"from every branch."
            )
        arrays = iter(zip(first.arrays, other.arrays, strict=True))
        leaves = [_outline_leaves(outcome.outline) for outcome in (first, other)]
        for (path, mine), (_, theirs) in zip(*leaves, strict=True):
            if mine != theirs:
                raise BranchError(
                    f"The branches of {name} return different objects{_at(path)}: {first.label} "
                    f"{self._describe(first, mine)}, {other.label} "
                    f"{self._describe(other, theirs)}. An object is chosen while tracing, before "
                    f"it is known which branch is taken. Return the same object from every branch "
                    f"and write values into it, or return arrays."
                )
            if mine.position is not None:
                continue
            one, two = map(scan.form, next(arrays))
            if one != two:
                raise BranchError(
                    f"The branches of {name} return different types{_at(path)}: {first.label} "
                    f"{one}, {other.label} {two}. Convert in one of them: x.astype(dtype), "
                    f"x.reshape(shape)."
                )

    def _describe(self, outcome: BranchOutcome, leaf: ResultLeaf) -> str:
        if leaf.position is None:
            return "an array"
        if leaf.position < len(self.paths):
            kind = self.graphdef.objects[leaf.position].type.__name__
            return f"the {kind} at {format_path(self.paths[leaf.position])}"
        return f"a new {outcome.effects.fresh[leaf.position - len(self.paths)].type.__name__}"

    def _check_new(self) -> None:
        """Compares the objects that branches made, whose positions follow the given ones."""
        both, count = (self.first, self.other), len(self.graphdef.objects)
        values = [iter(outcome.fresh) for outcome in both]
        for offset in range(max(len(outcome.effects.fresh) for outcome in both)):
            made, shown = [], []
            for outcome, fresh in zip(both, values, strict=True):
                definitions = outcome.effects.fresh[offset : offset + 1]
                kind = f"a {definitions[0].type.__name__}" if definitions else "nothing"
                if count + offset in outcome.effects.foreign:
                    kind += " from outside"
                elif definitions and type(definitions[0]) is flatten.VariableDef:
                    kind += f" {scan.form(next(fresh))}"
                made.append((definitions, kind, id(outcome.effects.foreign.get(count + offset))))
                shown.append(f"{outcome.label} {kind}")
            if made[0] == made[1]:
                continue
            paths = [self._paths_after(outcome).get(count + offset) for outcome in both]
            also = ", but another one" if made[0][1] == made[1][1] else ""
            raise BranchError(
                f"The branches of sx.{self.call.name} leave different objects at "
                f"{format_path(paths[0] or paths[1] or ())}: {shown[0]}, {shown[1]}{also}. Make "
                f"the same in every branch, with the same shapes, dtypes and metadata, or make it "
                f"before the choice."
            )

    def _paths_after(self, outcome: BranchOutcome) -> dict[int, Path]:
        """Returns the path of every object after a branch."""
        objects = [
            outcome.effects.updates.get(i, old) for i, old in enumerate(self.graphdef.objects)
        ]
        returned = [
            (("result", *path), flatten.Ref(leaf.position))
            for path, leaf in _outline_leaves(outcome.outline)
            if leaf.position is not None
        ]
        roots = (*self.graphdef.roots, *(ref for _, ref in returned))
        names = [*self.call.names, *(path for path, _ in returned)]
        return flatten.definition_paths(
            flatten.GraphDef((*objects, *outcome.effects.fresh), roots), names
        )

    def _check_written(self, before: Sequence[Any]) -> None:
        flat = self.call.graph.flat
        for position in sorted({*self.first.written, *self.other.written}):
            forms, shown = [], []
            for outcome in (self.first, self.other):
                is_written = position in outcome.written
                forms.append(
                    scan.form(outcome.written[position] if is_written else before[position])
                )
                verb = "writes" if is_written else "leaves it as"
                shown.append(f"{outcome.label} {verb} {forms[-1]}")
            if forms[0] != forms[1]:
                kind = type(self.call.graph.leaves[position]).__name__
                raise BranchError(
                    f"The {kind} at {format_path(flat.leaf_paths[position])} leaves the branches "
                    f"of sx.{self.call.name} in different forms: {shown[0]}, {shown[1]}. Keep one "
                    f"structure, shape and dtype: v[...] = new.astype(v.dtype)."
                )


def _outline_leaves(outline: Any) -> list[tuple[Path, ResultLeaf]]:
    pairs = jax.tree_util.tree_leaves_with_path(outline, is_leaf=_is_result_leaf)
    return [(plain_path(keys), leaf) for keys, leaf in pairs]


def _is_result_leaf(item: Any) -> bool:
    return isinstance(item, ResultLeaf)


def _at(path: Path) -> str:
    return f" at {format_path(path)} of the result" if path else ""


def _difference(first: Any, other: Any, path: Path) -> tuple[Path, str, str] | None:
    """Returns the outermost place where two outlines have another structure."""
    trees = [jax.tree.structure(item, is_leaf=_is_result_leaf) for item in (first, other)]
    if trees[0] == trees[1]:
        return None
    both = (first, other)
    children = [{} if _is_result_leaf(item) else dict(one_level(item)) for item in both]
    if type(first) is type(other) and list(children[0]) == list(children[1]):
        for key, child in children[0].items():
            found = _difference(child, children[1][key], (*path, *key))
            if found is not None:
                return found
    shown = [_container(item, below) for item, below in zip(both, children, strict=True)]
    if shown[0] == shown[1]:
        shown[1] += " with other static fields"
    return path, shown[0], shown[1]


def _container(item: Any, children: dict[Any, Any]) -> str:
    if _is_result_leaf(item):
        return "an array" if item.position is None else "an object"
    if item is None:
        return "None"
    if isinstance(item, dict):
        keys = ", ".join(repr(key) for (key,) in children)
        return f"a {type(item).__name__} with keys {keys or '(none)'}"
    return f"a {type(item).__name__} of {len(children)}"


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    **named_operands: Any,
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
        **named_operands: Likewise, given to the branches by name.

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
    functions = {"true_fun": true_fun, "false_fun": false_fun}
    _check_callable("cond", functions)
    decision = loops.as_predicate(pred, "pred of sx.cond")
    given = (operands, named_operands)
    return _run(
        "cond", functions, given, decision, lambda branches: jax.lax.cond(decision, *branches)
    )


def switch(
    index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, **named_operands: Any
) -> Any:
    """Runs one of several functions over Modules, as ``jax.lax.switch`` does; see ``cond``.

    Args:
        index: An integer of shape (); one that is out of range counts as the nearest in range.
        branches: The functions, each called as ``branch(*operands)``.
        *operands: Arrays, Modules, Variables and pytrees of these.
        **named_operands: Likewise, given to the branches by name.

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
    functions = {f"branches[{i}]": branch for i, branch in enumerate(branches)}
    if not functions:
        raise BranchError("sx.switch was given no branches; give a sequence of at least one.")
    _check_callable("switch", functions)
    decision = loops.as_integer(index, "index of sx.switch")
    choose = functools.partial(jax.lax.switch, decision)
    return _run("switch", functions, (operands, named_operands), decision, choose)


def _check_callable(name: str, functions: dict[str, Any]) -> None:
    for label, function in functions.items():
        if not callable(function):
            raise BranchError(
                f"{label} of sx.{name} is a {type(function).__name__}, which cannot be called. A "
                f"branch is a function of the operands: lambda *operands: value."
            )


def _run(
    name: str,
    functions: dict[str, Callable[..., Any]],
    operands: tuple[Sequence[Any], dict[str, Any]],
    decision: Any,
    choose: Callable[..., Any],
) -> Any:
    def attempt(captured: list[Variable[Any]]) -> Any:
        branches = [*functions.values()]
        call = engine.LiftedCall(name, branches, *operands, captured=captured)
        return _BranchingCall(call, [*functions]).run(decision, choose)

    return engine.retry_captured(attempt)


class _BranchingCall:
    """One call of ``cond`` or ``switch``."""

    def __init__(self, call: engine.LiftedCall, labels: Sequence[str]) -> None:
        engine.check_operands(call)
        self.call = call
        self.labels = labels
        self.values = call.graph.values()
        self.done: dict[int, tuple[engine.Effects, Any, Any]] = {}
        self.union: tuple[int, ...] = ()
        # Compiled as a unit so that JAX traces it once, for its shapes and for the choice.
        self.ones = [
            jax.jit(functools.partial(self._one, which), inline=True)
            for which in range(len(labels))
        ]

    def _one(self, which: int, values: list[Any], plain: tuple[Any, dict[str, Any]]) -> Any:
        """Runs a branch; returns result arrays, written and new values."""

        def leave(context: engine.RunContext) -> Any:
            context.require_inputs()
            engine.check_result(context.result, self.call.name)
            outputs = context.record_effects(context.result)
            effects = outputs.effects
            leaves, treedef = jax.tree.flatten(outputs.result)
            self.done[which] = effects, _result_outline(context.result, effects), treedef
            return (leaves, dict(zip(effects.written, outputs.written, strict=True)), outputs.fresh)

        return self.call.run(values, *plain, leave, which=which)

    def _branch(self, which: int, targets: Sequence[_OutputType], values: Any, plain: Any) -> Any:
        """Runs a branch and returns, flat, what leaves every branch."""
        leaves, written, fresh = self.ones[which](values, plain)
        everything = self._joined(leaves, written, fresh, values)
        return [
            target.convert(leaf)
            for target, leaf in zip(targets, jax.tree.leaves(everything), strict=True)
        ]

    def _joined(self, leaves: Any, written: dict[int, Any], fresh: Any, values: Any) -> Any:
        return leaves, [written.get(p, values[p]) for p in self.union], fresh

    def run(self, decision: Any, choose: Callable[..., Any]) -> Any:
        """Traces all branches, runs the chosen one, and applies its effects."""
        differ = functools.partial(scan.vary_alike, other=decision)
        arguments = self.call.arguments
        plain = (arguments.plain, arguments.plain_named)
        inputs = jax.tree.map(differ, (self.values, plain))
        outcomes = []
        for which, label in enumerate(self.labels):
            leaves, written, fresh = scan.abstract_eval(self.ones[which], *inputs)
            effects, outline, _ = self.done[which]
            outcomes.append(BranchOutcome(label, effects, outline, leaves, written, fresh))
        for other in outcomes[1:]:
            _Comparison(self.call, outcomes[0], other).check(self.values)
        self.union = tuple(sorted({position for item in outcomes for position in item.written}))
        rows = [
            self._joined(item.arrays, item.written, item.fresh, self.values) for item in outcomes
        ]
        columns = zip(*map(jax.tree.leaves, rows), strict=True)
        targets = [_OutputType(types, decision) for types in columns]
        # Values are closed over, not passed: JAX then takes in those that a branch uses, so that a
        # large model of which little is used costs nothing when the choice is differentiated.
        branches = [
            functools.partial(self._branch, which, targets, *inputs)
            for which in range(len(self.labels))
        ]
        flat = choose(branches)
        leaves, written, fresh = jax.tree.unflatten(jax.tree.structure(rows[0]), flat)
        effects, _, treedef = self.done[0]
        effects.written = self.union
        outputs = engine.LiftedOutputs(treedef.unflatten(leaves), written, fresh, effects)
        return self.call.apply(outputs)


class _OutputType:
    """The type in which one array leaves every branch."""

    # Shape and dtype agree. What may differ without meaning anything is whether JAX counts the
    # dtype as weak, and, in ``shard_map``, along which mesh axes the array is known to be the same.

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
            leaf = scan.vary_alike(leaf, other)
        return leaf
