# SPDX-License-Identifier: Apache-2.0
"""What ``custom_vjp`` and ``custom_jvp`` share: functions whose derivative is a *rule* of the user.

The user's *rule* is one or two functions that run in place of the function when that is
differentiated. One call goes through these steps:

1. The arguments are taken apart (``RuledCall``). *Differentiated* inputs have a derivative by the
   rule: chosen Variables, and the plain parts of arguments that are not in ``nondiff_argnums``. The
   *others* have none: other Variables, captured ones, and arguments in ``nondiff_argnums``. Those
   of them that hold no arrays or objects are static.
2. The others are guarded (``guard``): a derivative by one of them would be lost, so it is an error.
3. JAX is given pure functions of (differentiated, others). ``RuledCall.run`` runs the function or
   its rule on private copies; ``RuledCall.record`` records what it wrote. JAX may run either, or
   both, and expects outputs of one form, so all runs must have the same effects.
4. ``RuledCall.finish`` applies these effects, once, and lets go of the caller's objects. JAX may
   still run the rule after that: a compiled function is differentiated when its trace has ended.
   By then the rule can use only what it was given.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jax

from shardax._core._jax import Tracer
from shardax._core.array_ops import is_differentiable
from shardax._core.cross_process import PickledByName
from shardax._core.frames import Frame, kind_of
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, PyTree, format_path
from shardax._core.object import Object
from shardax._core.state.filters import Filter
from shardax._core.variable import Variable
from shardax._transforms.errors import TransformError
from shardax._transforms.grad import errors
from shardax._transforms.grad.differentiated import (
    Argnums,
    DiffArgument,
    DiffInputs,
    DiffPair,
    DiffState,
    refuse_objects,
)
from shardax._transforms.lift import engine
from shardax._transforms.lift.effects import Effects, LiftedOutputs, check_result
from shardax._transforms.lift.transformed import wraps

# Which of the two functions of a ``RuledCall`` runs.
FUNCTION, RULE = 0, 1

# All values with None for differentiated ones, all plain parts likewise, and those by name.
Others = tuple[Sequence[PyTree], Sequence[PyTree], Mapping[str, PyTree]]
# What leaves a run: the result, the values that were written, those of new Variables.
Outputs = tuple[PyTree, list[PyTree], list[PyTree]]


class RuledFunction(PickledByName):
    """A function with a derivative of its author's; base of ``CustomVjp`` and ``CustomJvp``."""

    # Apart from what is only shown, which ``functools.wraps`` may overwrite.
    __slots__ = ("__dict__", "__weakref__", "function", "nondiff_argnums", "wrt")
    transform: str  # as users write it behind ``sx.``

    def __init__(
        self, function: Callable[..., PyTree], nondiff_argnums: Argnums, wrt: Filter
    ) -> None:
        wraps(function)(self)
        self.function = function
        self.nondiff_argnums = nondiff_argnums
        self.wrt = wrt

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., PyTree]:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        raise NotImplementedError

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", self.function)
        return f"<{self.transform} of {name}>"


def split_argnums(custom: RuledFunction, count: int) -> tuple[list[int], list[DiffState]]:
    """Returns the positions without a derivative, and what is differentiated in the others."""
    argnums = custom.nondiff_argnums
    items = argnums if isinstance(argnums, (tuple, list)) else [argnums]
    filters: dict[int, Filter] = {}
    nondiff: list[int] = []

    for item in items:
        argnum = item.argnum if isinstance(item, DiffState) else int(item)
        if not -count <= argnum < count:
            raise errors.nondiff_out_of_range(argnum, count)

        position = argnum % count
        if position in filters or position in nondiff:
            raise errors.nondiff_twice(argnum)

        if isinstance(item, DiffState):
            filters[position] = item.filter
        else:
            nondiff.append(position)

    chosen = [
        DiffState(position, filters.get(position, custom.wrt))
        for position in range(count)
        if position not in nondiff
    ]
    return sorted(nondiff), chosen


class RuledCall:
    """One call of a function with a rule; base of the calls of both transforms.

    Attributes:
        call: The lifted call; its functions are the user's function and then the rule.
        nondiff: Positions of the arguments without a derivative.
        static: The static arguments, by position or name.
        inputs: The differentiated inputs.
        effects: What the function did besides returning arrays; None before the first run.
    """

    rule_name: str  # what messages call the rule

    def __init__(
        self,
        custom: RuledFunction,
        rule: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        captured: Sequence[Variable],
        make_frame: Callable[[str], Frame] = Frame,
    ) -> None:
        self.transform = custom.transform
        self.nondiff, chosen = split_argnums(custom, len(args))
        without_derivative = {position: args[position] for position in self.nondiff} | dict(kwargs)
        self.static = {
            key: value for key, value in without_derivative.items() if not _holds_data(value)
        }
        self.call = engine.LiftedCall(
            custom.transform,
            [custom.function, rule],
            args,
            kwargs,
            make_frame,
            captured,
            static=self.static.keys(),
            auto_static=True,
        )
        self.inputs = DiffInputs([DiffArgument(self.call, item) for item in chosen])

        self.effects: Effects | None = None
        # Paths and kinds of Variables, which messages need when the graph was let go of.
        self.paths = list(self.call.graph.flat.leaf_paths)
        self.kinds = [kind_of(leaf) for leaf in self.call.graph.leaves]
        # Variables that are outputs of every run, also of one that does not write them.
        self.always_written: frozenset[int] = frozenset()
        # Every original with a copy, for runs when the call is over (``LiftedCall.release``).
        self.originals: list[tuple[Object, int]] = []

    def split_inputs(self) -> tuple[DiffPair, Others]:
        """Returns the present values of the differentiated inputs, and of the others."""
        values, arguments = self.call.graph.values(), self.call.arguments
        values_of_others, plain_of_others = self.inputs.others(values, arguments.plain)
        others = values_of_others, plain_of_others, arguments.plain_named
        return self.inputs.take(values, arguments.plain), others

    def run(
        self,
        which: int,
        differentiated: DiffPair,
        others: Others,
        leave: Callable[[engine.RunContext], PyTree],
    ) -> PyTree:
        """Runs ``FUNCTION`` or ``RULE``; returns what ``leave`` makes of the run."""
        values_of_others, plain_of_others, named = others
        values, plain = self.inputs.insert(differentiated, values_of_others, plain_of_others)
        return self.call.run(values, plain, named, leave, which)

    def leave_function(self, context: engine.RunContext) -> Outputs:
        """Returns what leaves a run of the user's function itself."""
        return self.record(context, context.result)

    def arrays_of(self, context: engine.RunContext, result: PyTree) -> LiftedOutputs:
        """Returns the arrays and effects of a run whose result holds arrays alone."""
        refuse_objects(result, self.transform)
        check_result(result, self.transform)
        engine.retrace_with(context.frame.captured)
        return context.record_effects(result, self.always_written)

    def record(self, context: engine.RunContext, result: PyTree) -> Outputs:
        """Returns what leaves a run of the function or its rule.

        Args:
            context: The run.
            result: The part of what it returned that is the result of the function.

        Raises:
            TransformError: If another run had other effects.
        """
        outputs = self.arrays_of(context, result)
        if self.effects is None:
            self.effects = outputs.effects
            self.always_written = frozenset(outputs.effects.written)
            self.originals = self.originals or context.known()
        else:
            self._check_same_effects(self.effects, outputs.effects)
        return outputs.result, outputs.written, outputs.fresh

    def _check_same_effects(self, first: Effects, effects: Effects) -> None:
        is_same = (
            effects.written == first.written
            and effects.updates == first.updates
            and effects.fresh == first.fresh
        )
        if not is_same:
            extra = [self.paths[i] for i in effects.written if i not in first.written]
            raise errors.other_effects(self.transform, self.rule_name, extra)

    def finish(self, outputs: Outputs) -> PyTree:
        """Applies the effects to the caller's objects, and lets go of these; returns the result."""
        assert self.effects is not None
        result = self.call.apply(LiftedOutputs(*outputs, self.effects))
        originals, self.originals = self.originals, []
        self.call.release(originals)
        return result

    def guard(
        self,
        others: Others,
        lost: Callable[[str], TransformError],
        used: Sequence[bool] | None = None,
    ) -> Others:
        """Returns the others such that differentiating one of them is an error.

        Args:
            others: The inputs without a derivative in the rule.
            lost: Returns the error, given the name of the input.
            used: For each of their arrays whether the function uses it; None if all count.
        """
        values, plain, named = others
        sources: list[int | str] = []  # of each array: the index of its Variable, or a label
        for index, value in enumerate(values):
            sources += [index] * len(jax.tree.leaves(value))
        for label, part in (*zip(self.call.labels, plain, strict=True), *sorted(named.items())):
            sources += [label] * len(jax.tree.leaves(part))

        def guarded(leaf: Leaf, source: int | str, is_used: bool) -> Leaf:
            if not is_used:
                return leaf
            return refuse_derivative(leaf, lambda: lost(self.name_of(source)))

        leaves, treedef = jax.tree.flatten(others)
        if used is None:
            used = [True] * len(leaves)
        return treedef.unflatten(map(guarded, leaves, sources, used))

    def name_of(self, source: int | str) -> str:
        """Returns the name of an input in messages: a Variable by index, an argument by label."""
        if isinstance(source, str):
            return f"the argument {source!r}"
        return f"the {self.kinds[source]} at {format_path(self.paths[source])}"


def refuse_derivative(value: Leaf, make_error: Callable[[], TransformError]) -> Leaf:
    """Returns a value that it is an error to differentiate."""
    # ``jax.custom_vjp(symbolic_zeros=True)`` would tell the rule what is differentiated, but is not
    # implemented in an eager ``jax.shard_map`` (0.10.2).
    if not isinstance(value, Tracer) or not is_differentiable(value):
        return value

    @jax.custom_jvp
    def identity(value: jax.Array) -> jax.Array:
        return value

    @identity.defjvp
    def refuse(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> NoReturn:
        raise make_error()

    return identity(value)


def _holds_data(value: PyTree) -> bool:
    """Whether a value holds objects or arrays."""
    leaves = jax.tree.leaves(value, is_leaf=is_object)
    return any(isinstance(leaf, Object) or hasattr(leaf, "dtype") for leaf in leaves)
