# SPDX-License-Identifier: Apache-2.0
"""``custom_jvp``: functions over Modules with a tangent of their author's.

The *rule* takes the arguments and their tangents and returns (result, tangent of the result); it
runs in place of the function when that is differentiated, in forward and, if it is linear in the
tangents, in reverse mode. JAX may run it when the call is over, so what it uses by a closure must
have been used by the function, or be passed in.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.cross_process import PickledByName
from shardax._core.frames import kind_of
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.object import Object
from shardax._core.variable import Param, Variable
from shardax._transforms.errors import TransformError
from shardax._transforms.grad import grad as diff
from shardax._transforms.grad.vjp import refuse_objects
from shardax._transforms.lift import binding, engine
from shardax._transforms.lift.arguments import by_position


@engine.decorator
def custom_jvp(function: Any = None, *, nondiff_argnums: Any = (), wrt: Any = Param) -> Any:
    """Makes a function over Modules whose tangent is given by ``defjvp``.

    Values that the function, or the rule in its place, writes into Variables are carried back. They
    have no tangent.

    Args:
        function: A function, method or callable Module that returns arrays. Left out: returns a
            decorator.
        nondiff_argnums: Positions of arguments without a tangent: static values, functions,
            Modules, arrays. The rule gets them first.
        wrt: Filter of the Variables that have a tangent in other Module arguments.

    Returns:
        A function of the same arguments, with a method ``defjvp``.

    Raises:
        TransformError: When called without ``defjvp``, or when something is differentiated
            that has no tangent in the rule.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> @sx.custom_jvp
        ... def apply(layer, x):
        ...     return layer(x)
        >>> @apply.defjvp
        ... def rule(primals, tangents):
        ...     (layer, x), (of_layer, of_x) = primals, tangents
        ...     return layer(x), 10 * of_layer["bias"] + of_x @ layer.kernel.value
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> sx.grad(lambda layer: apply(layer, jnp.ones(2)).sum())(layer)["bias"].tolist()
        [10.0, 10.0, 10.0]
    """
    return CustomJvp(function, nondiff_argnums, wrt)


class CustomJvp(PickledByName):
    """A function made by ``custom_jvp``.

    Args:
        function: The user's function.
        nondiff_argnums: As for ``custom_jvp``.
        wrt: As for ``custom_jvp``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> @sx.custom_jvp
        ... def straight_through(x):
        ...     return jnp.round(x)
        >>> @straight_through.defjvp
        ... def rule(primals, tangents):
        ...     return jnp.round(primals[0]), tangents[0]
        >>> float(sx.grad(straight_through)(1.7))
        1.0
    """

    # Apart from what is only shown, which ``functools.wraps`` may overwrite.
    __slots__ = ("__dict__", "__weakref__", "function", "nondiff_argnums", "rule", "wrt")

    def __init__(self, function: Callable[..., PyTree], nondiff_argnums: Any, wrt: Any) -> None:
        engine.wraps(function)(self)
        self.function = function
        is_sequence = isinstance(nondiff_argnums, (tuple, list))
        self.nondiff_argnums = tuple(nondiff_argnums if is_sequence else [nondiff_argnums])
        self.wrt = wrt
        self.rule: Callable[..., PyTree] | None = None

    def defjvp(self, rule: Callable[..., object]) -> Callable[..., Any]:
        """Gives the tangent.

        Args:
            rule: Called as ``rule(*nondiff, primals, tangents)``: the arguments that are not in
                ``nondiff_argnums``, and for each of these its tangent, arranged as ``grad`` does: a
                ``State`` for a Module, an array for a Variable, for anything else the same pytree.
                It returns (result, tangent), the tangent arranged like the result; None for zero.
                It should write the Variables that the function writes.

        Returns:
            The rule, so that ``defjvp`` is a decorator.

        Example:
            >>> import shardax as sx
            >>> double = sx.custom_jvp(lambda x: 2 * x)
            >>> _ = double.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))
            >>> float(sx.jvp(double, (1.0,), (1.0,))[1])
            3.0
        """
        self.rule = rule
        return rule

    def __get__(self, instance: object, owner: object = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: object, **kwargs: object) -> PyTree:
        if self.rule is None:
            raise TransformError(
                f"{self!r} has no tangent yet. Give it one before the first call: f.defjvp(rule)."
            )
        positional, named = by_position(self.function, args, kwargs, fill="all")
        if named:
            raise TransformError(
                f"{self!r} was given {', '.join(sorted(named))} by name alone, and the rule of "
                f"sx.custom_jvp takes them by position. Let the function take them so."
            )

        def attempt(captured: list[Variable]):
            return _CustomJvpCall(self, positional, captured).run()

        return engine.retry_captured(attempt)

    def __repr__(self) -> str:
        return f"<custom_jvp of {getattr(self.function, '__qualname__', self.function)}>"


class _RuleRunner:
    """The rule as a function of the arguments of a call."""

    def __init__(self, rule: Callable[..., PyTree], nondiff: Sequence[int]) -> None:
        self.rule = rule
        self.nondiff = nondiff
        self.tangents: tuple[Any, ...] = ()

    def __call__(self, *args: object) -> PyTree:
        primals = tuple(arg for i, arg in enumerate(args) if i not in self.nondiff)
        return self.rule(*(args[i] for i in self.nondiff), primals, self.tangents)


class _CustomJvpCall:
    """One call."""

    def __init__(
        self, custom: CustomJvp, args: Sequence[PyTree], captured: Sequence[Variable]
    ) -> None:
        assert custom.rule is not None
        count = len(args)
        nondiff = sorted({nondiff_position(n, count) for n in custom.nondiff_argnums})
        self.runner = _RuleRunner(custom.rule, nondiff)
        static = {i for i in nondiff if not _holds_data(args[i])}
        self.call = engine.LiftedCall(
            "custom_jvp",
            [custom.function, self.runner],
            args,
            {},
            captured=captured,
            static=static,
            auto_static=True,
        )
        chosen = [diff.DiffState(i, custom.wrt) for i in range(count) if i not in nondiff]
        self.targets = [diff.DiffArgument(self.call, item) for item in chosen]
        self.indices = sorted({entry.leaf for target in self.targets for entry in target.entries})
        self.positions = [target.position for target in self.targets if target.has_plain]
        self.paths = list(self.call.graph.flat.leaf_paths)
        self.kinds = [kind_of(leaf) for leaf in self.call.graph.flat.leaves]
        self.effects: binding.Effects | None = None
        self.emit: frozenset[int] = frozenset()
        self.known: list[tuple[Any, int]] = []

    def run(self) -> PyTree:
        values, plain = self.call.graph.values(), list(self.call.arguments.plain)
        moving = ([values[i] for i in self.indices], [plain[p] for p in self.positions])
        fixed = (
            diff.replaced(values, self.indices, [None] * len(self.indices)),
            diff.replaced(plain, self.positions, [None] * len(self.positions)),
        )
        transformed = jax.custom_jvp(functools.partial(self._run, 0, self._leave))
        transformed.defjvp(self._rule, symbolic_zeros=True)
        result, written, fresh = transformed(moving, fixed)
        written, fresh = jax.lax.stop_gradient((written, fresh))
        assert self.effects is not None
        out = self.call.apply(binding.LiftedOutputs(result, written, fresh, self.effects))
        known, self.known = self.known, []
        self.call.release(known)
        return out

    def _run(self, which: int, leave: Callable[[engine.RunContext], PyTree], moving, fixed):
        values = diff.replaced(fixed[0], self.indices, moving[0])
        plain = diff.replaced(fixed[1], self.positions, moving[1])
        return self.call.run(values, plain, {}, leave, which)

    def _leave(self, context: engine.RunContext):
        outputs = self._record_effects(context, context.result)
        return outputs.result, outputs.written, outputs.fresh

    def _rule(self, primals, tangents) -> PyTree:
        moving, fixed = primals
        self._check_fixed(tangents[1])
        of_values, of_plain = jax.tree.map(_instantiated, tangents[0], is_leaf=_is_zero)
        by_position = dict(zip(self.positions, of_plain, strict=True))
        self.runner.tangents = diff.arrange_gradients(
            self.targets, self.indices, of_values, by_position
        )

        def leave(context: engine.RunContext):
            source = "The rule of sx.custom_jvp"
            pair = binding.returned_pair(context.result, source, "(result, tangent)")
            refuse_objects(pair[1], "custom_jvp")
            outputs = self._record_effects(context, pair[0])
            return (outputs.result, outputs.written, outputs.fresh), pair[1]

        try:
            result, tangent = self._run(1, leave, moving, fixed)
        finally:
            self.runner.tangents = ()  # a rule keeps no tracers
        of_result = _tangent_like(result[0], tangent)
        return result, (of_result, *jax.tree.map(_zero_tangent, result[1:]))

    def _check_fixed(self, tangents) -> None:
        """Raises if something without a tangent in the rule moves."""
        values, plain = tangents
        pairs = zip(self.kinds, self.paths, strict=True)
        names = [f"the {kind} at {format_path(path)}" for kind, path in pairs]
        names += [f"the argument {label!r}" for label in self.call.labels]
        for name, part in zip(names, [*values, *plain], strict=True):
            for leaf in jax.tree.leaves(part, is_leaf=_is_zero):
                is_integer = getattr(leaf, "dtype", None) == jax.dtypes.float0
                if not (_is_zero(leaf) or is_integer):
                    raise TransformError(
                        f"A tangent arrives at {name}, for which the rule of sx.custom_jvp gets "
                        f"none: it would be lost. Pass it outside nondiff_argnums, with wrt=... "
                        f"choosing it; or cut it before the call with jax.lax.stop_gradient."
                    )

    def _record_effects(self, context: engine.RunContext, result: object) -> binding.LiftedOutputs:
        outputs = record_arrays(context, result, "custom_jvp", self.emit)
        if self.effects is None:
            self.effects = outputs.effects
            self.emit = frozenset(outputs.effects.written)
            self.known = context.known()
        else:
            effects = outputs.effects
            check_same_effects(self.effects, effects, self.paths, "The rule", "custom_jvp")
        return outputs


def nondiff_position(argnum: int, count: int) -> int:
    """Returns a position of ``nondiff_argnums``, or raises."""
    if not -count <= argnum < count:
        raise TransformError(
            f"nondiff_argnums names the argument {argnum}, but the call has {count}."
        )
    return argnum % count


def record_arrays(
    context: engine.RunContext, result: object, name: str, emit: frozenset[int]
) -> binding.LiftedOutputs:
    """Records effects and arrays of a run with its own derivative."""
    refuse_objects(result, name)
    binding.check_result(result, name)
    engine.retrace_with(context.frame.captured)
    return context.record_effects(result, emit)


def check_same_effects(
    first: binding.Effects, effects: binding.Effects, paths: Sequence[Path], rule: str, caller: str
) -> None:
    """Raises for a rule with other effects than its function."""
    did, does = ((e.written, e.updates, e.fresh) for e in (first, effects))
    if did != does:
        extra = [format_path(paths[p]) for p in effects.written if p not in first.written]
        difference = f"writes {', '.join(extra)}" if extra else "changes structure or metadata"
        raise TransformError(
            f"{rule} of sx.{caller} {difference}, which the function itself does not in the same "
            f"way. A function may be traced before it is differentiated, so both must agree. Let "
            f"{rule.removeprefix('The ')} call the function, or write the same Variables in both."
        )


def _holds_data(value: object) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=is_object)
    return any(isinstance(leaf, Object) or hasattr(leaf, "dtype") for leaf in leaves)


def _is_zero(leaf) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


def _instantiated(leaf):
    if not _is_zero(leaf):
        return leaf
    if leaf.dtype == jax.dtypes.float0:
        return np.zeros(leaf.shape, leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _zero_tangent(leaf):
    if diff.is_differentiable(leaf):
        return jnp.zeros_like(leaf)
    return np.zeros(np.shape(leaf), jax.dtypes.float0)


def _tangent_like(result: object, tangent: object):
    """Returns a rule's tangent with zeros for None and integers."""
    leaves, treedef = jax.tree.flatten(result)
    try:
        parts = [None] * len(leaves) if tangent is None else treedef.flatten_up_to(tangent)
    except (ValueError, TypeError) as error:
        raise TransformError(
            f"The tangent that the rule of sx.custom_jvp returned is not arranged like its result: "
            f"{error}"
        ) from error
    pairs = zip(leaves, parts, strict=True)
    return treedef.unflatten(
        _zero_tangent(leaf)
        if part is None or not diff.is_differentiable(leaf)
        else jnp.asarray(part, diff.dtype_of(leaf))
        for leaf, part in pairs
    )
