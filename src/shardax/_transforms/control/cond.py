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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from shardax._core._jax import INLINE
from shardax._core.frames import kind_of
from shardax._core.graph import flatten
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.static import Static
from shardax._core.variable import Variable
from shardax._transforms.control import loops, scan
from shardax._transforms.errors import TransformError
from shardax._transforms.jit import eager
from shardax._transforms.lift import binding, engine


class BranchOutcome(NamedTuple):
    """What one branch leaves."""

    label: str  # how the caller knows the branch
    effects: binding.Effects
    outline: object  # its result with an integer for every leaf
    arrays: Sequence[Leaf]  # shapes of the arrays in the result
    written: dict[int, Leaf]  # shapes of the values of written Variables, by position
    fresh: Sequence[Leaf]  # shapes of the values of new Variables


def _result_outline(result: object, effects: binding.Effects):
    leaves, treedef = jax.tree.flatten(result, is_leaf=flatten.is_object)
    positions = {} if effects.result is None else dict(effects.result.roots)
    return treedef.unflatten([positions.get(place, scan.ARRAY) for place in range(len(leaves))])


class _Comparison:
    """Outcomes of two branches, which must agree in all but numbers."""

    def __init__(
        self, call: engine.LiftedCall, first: BranchOutcome, second: BranchOutcome
    ) -> None:
        self.call = call
        self.both = (first, second)
        self.graphdef, self.paths = call.graph.flat.graphdef, call.graph.flat.paths

    def check(self, values: Sequence[Leaf]) -> None:
        """Raises if they differ, given the values before the choice."""
        self._check_structure()
        self._check_result()
        self._check_new()
        self._check_written(values)

    def _refuse(self, problem: str, descriptions: Sequence[str], advice: str) -> NoReturn:
        first, second = self.both
        raise TransformError(
            f"The branches of sx.{self.call.name} {problem}: {first.label} {descriptions[0]}, "
            f"{second.label} {descriptions[1]}. {advice}"
        )

    def _check_structure(self) -> None:
        for position, old in enumerate(self.graphdef.objects):
            mine, theirs = (item.effects.updates.get(position, old) for item in self.both)
            if mine == theirs:
                continue
            descriptions = [
                scan.describe_change(old, new) if new != old else "nothing changes"
                for new in (mine, theirs)
            ]
            if descriptions[0] == descriptions[1]:
                pairs = zip(self.both, ((mine, theirs), (theirs, mine)), strict=True)
                descriptions = [
                    self._describe_attributes(outcome, *pair) for outcome, pair in pairs
                ]
            self._refuse(
                f"change the {old.type.__name__} at {format_path(self.paths[position])} "
                "differently",
                descriptions,
                "One program comes out of both, so they must leave one structure. Make the same "
                "change in every branch (sow the same names, set the same attributes in the same "
                "order), or change it before the choice and only write values inside.",
            )

    def _describe_attributes(self, outcome: BranchOutcome, new: object, against: object) -> str:
        """Returns the attributes in which one definition differs from another."""
        mine, theirs = (
            {key: child for key, child in flatten.definition_children(item) if isinstance(key, str)}
            if isinstance(item, flatten.ModuleDef)
            else {}
            for item in (new, against)
        )
        changes = []
        for name, child in mine.items():
            if child == theirs.get(name):
                continue
            description = "another container"
            if isinstance(child, flatten.Ref):
                description = self._describe(outcome, child.position)
            elif isinstance(child, Static):
                description = repr(child.value)[:40]
            changes.append(f".{name} is {description}")
        if changes:
            return ", ".join(changes)
        return f"the order is {', '.join(mine)}" if mine else "it is another"

    def _check_result(self) -> None:
        outlines = [outcome.outline for outcome in self.both]
        difference = scan.structure_difference(outlines[0], outlines[1], ())
        if difference is not None:
            path, *descriptions = difference
            advice = "Return the same containers with the same keys from every branch."
            self._refuse(f"return different structures{_at(path)}", descriptions, advice)
        arrays = iter(zip(*(outcome.arrays for outcome in self.both), strict=True))
        for (path, mine), (_, theirs) in zip(*map(_outline_leaves, outlines), strict=True):
            if mine != theirs:
                self._refuse(
                    f"return different objects{_at(path)}",
                    [self._describe(*pair) for pair in zip(self.both, (mine, theirs), strict=True)],
                    "An object is chosen while tracing, before it is known which branch is taken. "
                    "Return the same object from every branch and write values into it, or return "
                    "arrays.",
                )
            if mine == scan.ARRAY:
                forms = [*map(scan.form, next(arrays))]
                if forms[0] != forms[1]:
                    advice = "Convert in one of them: x.astype(dtype), x.reshape(shape)."
                    self._refuse(f"return different types{_at(path)}", forms, advice)

    def _describe(self, outcome: BranchOutcome, position: int) -> str:
        if position == scan.ARRAY:
            return "an array"
        if position < len(self.paths):
            kind = self.graphdef.objects[position].type.__name__
            return f"the {kind} at {format_path(self.paths[position])}"
        return f"a new {outcome.effects.fresh[position - len(self.paths)].type.__name__}"

    def _new_object(
        self, outcome: Any, offset: int, fresh: Iterator[Leaf]
    ) -> tuple[tuple[Any, ...], str]:
        """Returns outline and kind of a new object of a branch."""
        definitions = outcome.effects.fresh[offset : offset + 1]
        outside = outcome.effects.foreign.get(len(self.graphdef.objects) + offset)
        kind = f"a {definitions[0].type.__name__}" if definitions else "nothing"
        if outside is not None:
            kind += " from outside"
        elif definitions and type(definitions[0]) is flatten.VariableDef:
            kind += f" {scan.form(next(fresh))}"
        return (definitions, id(outside)), kind

    def _check_new(self) -> None:
        """Compares the objects that branches made, whose positions follow the given ones."""
        count = len(self.graphdef.objects)
        values = [iter(outcome.fresh) for outcome in self.both]
        for offset in range(max(len(outcome.effects.fresh) for outcome in self.both)):
            outlines, descriptions = [], []
            for outcome, fresh in zip(self.both, values, strict=True):
                outline, kind = self._new_object(outcome, offset, fresh)
                outlines.append(outline)
                descriptions.append(kind)
            if outlines[0] == outlines[1] and descriptions[0] == descriptions[1]:
                continue
            paths = [self._paths_after(outcome).get(count + offset) for outcome in self.both]
            if descriptions[0] == descriptions[1]:
                descriptions[1] += ", but another one"
            self._refuse(
                f"leave different objects at {format_path(paths[0] or paths[1] or ())}",
                descriptions,
                "Make the same in every branch, with the same shapes, dtypes and metadata, or make "
                "it before the choice.",
            )

    def _paths_after(self, outcome: BranchOutcome) -> dict[int, Path]:
        """Returns the path of every object after a branch."""
        updates = outcome.effects.updates
        objects = [updates.get(i, old) for i, old in enumerate(self.graphdef.objects)]
        leaves = _outline_leaves(outcome.outline)
        returned = [(path, flatten.Ref(place)) for path, place in leaves if place != scan.ARRAY]
        roots = (*self.graphdef.roots, *(ref for _, ref in returned))
        names = [*self.call.names, *(("result", *path) for path, _ in returned)]
        return flatten.definition_paths(
            flatten.GraphDef((*objects, *outcome.effects.fresh), roots), names
        )

    def _check_written(self, values: Sequence[object]) -> None:
        for position in sorted({p for outcome in self.both for p in outcome.written}):
            forms = [scan.form(item.written.get(position, values[position])) for item in self.both]
            if forms[0] != forms[1]:
                verbs = ["writes" if position in x.written else "leaves it as" for x in self.both]
                path = self.call.graph.flat.leaf_paths[position]
                self._refuse(
                    f"leave the {kind_of(self.call.graph.leaves[position])} at "
                    f"{format_path(path)} in different forms",
                    [f"{verb} {form}" for verb, form in zip(verbs, forms, strict=True)],
                    "Keep one structure, shape and dtype: v[...] = new.astype(v.dtype).",
                )


def _outline_leaves(outline: object) -> list[tuple[Path, int]]:
    pairs = jax.tree_util.tree_leaves_with_path(outline)
    return [(plain_path(keys), leaf) for keys, leaf in pairs]


def _at(path: Path) -> str:
    return f" at {format_path(path)} of the result" if path else ""


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
    return eager.run(_cond, (true_fun, false_fun), None, (pred, *operands), named_operands)


def _cond(
    functions: Sequence[object],
    _: None,
    args: Sequence[object],
    named_operands: Mapping[str, object],
):
    pred, *operands = args
    branches: dict[str, Any] = dict(zip(("true_fun", "false_fun"), functions, strict=True))
    _check_callable("cond", branches)
    decision = loops.as_predicate(pred, "pred of sx.cond")
    choose = functools.partial(_choose, decision)
    return _run("cond", branches, (operands, named_operands), decision, choose)


def _choose(decision: object, branches: Sequence[Callable[[], object]]):
    return jax.lax.cond(decision, *branches)


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
    return eager.run(_switch, tuple(branches), None, (index, *operands), named_operands)


def _switch(
    functions: Sequence[Any], _: None, args: Sequence[PyTree], named_operands: Mapping[str, PyTree]
):
    index, *operands = args
    if not functions:
        raise TransformError("sx.switch was given no branches; give a sequence of at least one.")
    branches = {f"branches[{i}]": branch for i, branch in enumerate(functions)}
    _check_callable("switch", branches)
    decision = loops.as_integer(index, "index of sx.switch")
    choose = functools.partial(jax.lax.switch, decision)
    return _run("switch", branches, (operands, named_operands), decision, choose)


def _check_callable(name: str, functions: Mapping[str, object]) -> None:
    for label, function in functions.items():
        if not callable(function):
            raise TransformError(
                f"{label} of sx.{name} is a {type(function).__name__}, which cannot be called. A "
                f"branch is a function of the operands: lambda *operands: value."
            )


def _run(
    name: str,
    functions: Mapping[str, Callable[..., PyTree]],
    operands: tuple[Sequence[object], Mapping[str, object]],
    decision: object,
    choose: Callable[..., object],
):
    def attempt(captured: list[Variable]):
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
        self.done: dict[int, tuple[binding.Effects, Any, Any]] = {}
        self.union: tuple[int, ...] = ()
        # Compiled as a unit so that JAX traces it once, for its shapes and for the choice.
        self.ones = [
            jax.jit(call.program(functools.partial(self._one, which), "pair", which), inline=INLINE)
            for which in range(len(labels))
        ]

    def _one(self, which: int, values: list[object], plain: tuple[object, dict[str, object]]):
        """Runs a branch; returns result arrays, written and new values."""

        def leave(context: engine.RunContext):
            context.require_inputs()
            binding.check_result(context.result, self.call.name)
            outputs = context.record_effects(context.result)
            effects = outputs.effects
            leaves, treedef = jax.tree.flatten(outputs.result)
            self.done[which] = effects, _result_outline(context.result, effects), treedef
            return (leaves, dict(zip(effects.written, outputs.written, strict=True)), outputs.fresh)

        return engine.ending_well(
            self.call.run, self.call, values, *plain, leave, which=which, otherwise=([], {}, [])
        )

    def _branch(self, which: int, targets: Sequence[_OutputType], values: object, plain: object):
        """Runs a branch and returns, flat, what leaves every branch."""
        leaves, written, fresh = self.ones[which](values, plain)
        everything = self._joined(leaves, written, fresh, values)
        return [
            target.convert(leaf)
            for target, leaf in zip(targets, jax.tree.leaves(everything), strict=True)
        ]

    def _joined(self, leaves, written: dict[int, Leaf], fresh, values) -> PyTree:
        return leaves, [written.get(p, values[p]) for p in self.union], fresh

    def run(self, decision, choose: Callable[..., PyTree]) -> PyTree:
        """Traces all branches, runs the chosen one, and applies its effects."""
        differ = functools.partial(scan.vary_alike, like=decision)
        arguments = self.call.arguments
        plain = (arguments.plain, arguments.plain_named)
        inputs = jax.tree.map(differ, (self.values, plain))
        outcomes = []
        for which, label in enumerate(self.labels):
            leaves, written, fresh = scan.abstract_eval(self.ones[which], *inputs)
            engine.raise_new_captures(self.call)
            effects, outline, _ = self.done[which]
            outcomes.append(BranchOutcome(label, effects, outline, leaves, written, fresh))
        for outcome in outcomes[1:]:
            _Comparison(self.call, outcomes[0], outcome).check(self.values)
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
        outputs = binding.LiftedOutputs(treedef.unflatten(leaves), written, fresh, effects)
        return self.call.apply(outputs)


class _OutputType:
    """The type in which one array leaves every branch."""

    # Shape and dtype agree. What may differ without meaning anything is whether JAX counts the
    # dtype as weak, and, in ``shard_map``, along which mesh axes the array is known to be the same.

    def __init__(self, types: Sequence[Any], decision) -> None:
        avals = [jax.typeof(item) for item in types]
        self.dtype = avals[0].dtype
        self.weak = all(getattr(item, "weak_type", False) for item in avals)
        self.others = [*types, decision]

    def convert(self, leaf):
        """Returns the array in the type, inside a branch."""
        if getattr(jax.typeof(leaf), "weak_type", False) and not self.weak:
            leaf = jax.lax.convert_element_type(leaf, self.dtype)
        for other in self.others:
            leaf = scan.vary_alike(leaf, other)
        return leaf
