# SPDX-License-Identifier: Apache-2.0
"""``custom_jvp``: functions over Modules with a tangent of their author's.

The rule takes the arguments and their tangents and returns (result, tangent of the result). It runs
in place of the function when that is differentiated, in forward and, if it is linear in the
tangents, in reverse mode.

What differs from ``custom_vjp`` (see ``ruled_call`` for what they share): the rule runs within the
call, or when the call is over, and is not explored before. So what it uses by a closure must have
been used by the function, or be passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.array_ops import dtype_of, is_differentiable
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.state.filters import Filter
from shardax._core.variable import Variable
from shardax._core.variable_types import Param
from shardax._transforms.grad import errors
from shardax._transforms.grad.differentiated import Argnums, DiffPair, refuse_objects
from shardax._transforms.grad.ruled_call import (
    FUNCTION,
    RULE,
    Others,
    Outputs,
    RuledCall,
    RuledFunction,
    split_argnums,
)
from shardax._transforms.lift.effects import returned_pair
from shardax._transforms.lift.engine import RunContext, retry_captured
from shardax._transforms.lift.signatures import by_position
from shardax._transforms.lift.transformed import decorator


@decorator
def custom_jvp(
    function: Callable[..., PyTree] | None = None,
    *,
    nondiff_argnums: Argnums = (),
    wrt: Filter = Param,
) -> CustomJvp:
    """Makes a function over Modules whose tangent is given by ``defjvp``.

    Values that the function, or the rule in its place, writes into Variables are carried back. They
    have no tangent.

    Args:
        function: A function, method or callable Module that returns arrays. Left out: returns a
            decorator.
        nondiff_argnums: Positions of arguments without a tangent: static values, functions,
            Modules, arrays. The rule gets them first. A ``DiffState`` in their place says which
            Variables of that argument have one.
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
    assert function is not None  # ``decorator`` makes a decorator without it
    return CustomJvp(function, nondiff_argnums, wrt)


class CustomJvp(RuledFunction):
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

    __slots__ = ("rule",)
    transform = "custom_jvp"

    def __init__(
        self, function: Callable[..., PyTree], nondiff_argnums: Argnums, wrt: Filter
    ) -> None:
        super().__init__(function, nondiff_argnums, wrt)
        self.rule: Callable[..., tuple[PyTree, PyTree]] | None = None

    def defjvp(
        self, rule: Callable[..., tuple[PyTree, PyTree]]
    ) -> Callable[..., tuple[PyTree, PyTree]]:
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

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if self.rule is None:
            raise errors.without_rule(self, "tangent", "f.defjvp(rule)")

        positional, named = by_position(self.function, args, kwargs, fill="all")
        if named:
            raise errors.by_name_alone(self, sorted(named))

        def attempt(captured: list[Variable]) -> PyTree:
            return _JvpCall(self, positional, captured).run_transformed()

        return retry_captured(attempt)


class _RuleOfArguments:
    """The user's rule as a function of the arguments of a call; the tangents are set beside."""

    def __init__(self, rule: Callable[..., tuple[PyTree, PyTree]], nondiff: Sequence[int]) -> None:
        self.rule = rule
        self.nondiff = nondiff
        self.tangents: tuple[PyTree, ...] = ()

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        nondiff = [args[position] for position in self.nondiff]
        primals = tuple(arg for i, arg in enumerate(args) if i not in self.nondiff)
        return self.rule(*nondiff, primals, self.tangents)


class _JvpCall(RuledCall):
    """One call of a function with a jvp."""

    rule_name = "The rule"

    def __init__(
        self, custom: CustomJvp, args: Sequence[PyTree], captured: Sequence[Variable]
    ) -> None:
        assert custom.rule is not None
        nondiff, _ = split_argnums(custom, len(args))
        self.rule = _RuleOfArguments(custom.rule, nondiff)
        super().__init__(custom, self.rule, args, {}, captured)

    def run_transformed(self) -> PyTree:
        """Runs the call as a function that JAX differentiates by the rule."""
        differentiated, others = self.split_inputs()
        others = self.guard(others, errors.lost_tangent)

        def function(differentiated: DiffPair, others: Others) -> Outputs:
            return self.run(FUNCTION, differentiated, others, self.leave_function)

        def rule(
            primals: tuple[DiffPair, Others], tangents: tuple[DiffPair, Others]
        ) -> tuple[Outputs, Outputs]:
            return self._run_rule(*primals, tangents[0])

        transformed = jax.custom_jvp(function)
        transformed.defjvp(rule)
        result, written, fresh = transformed(differentiated, others)
        written, fresh = jax.lax.stop_gradient((written, fresh))
        return self.finish((result, written, fresh))

    def _run_rule(
        self, differentiated: DiffPair, others: Others, tangents: DiffPair
    ) -> tuple[Outputs, Outputs]:
        """Runs the rule; returns what leaves it, and the tangents of that."""

        def leave(context: RunContext) -> tuple[Outputs, PyTree]:
            source, form = "The rule of sx.custom_jvp", "(result, tangent)"
            result, tangent = returned_pair(context.result, source, form)
            refuse_objects(tangent, self.transform)
            return self.record(context, result), tangent

        self.rule.tangents = self.inputs.arrange(tangents)
        try:
            outputs, tangent = self.run(RULE, differentiated, others, leave)
        finally:
            self.rule.tangents = ()  # tracers, which are not to outlive the trace

        result, written, fresh = outputs
        no_tangents = jax.tree.map(_zero_tangent, (written, fresh))
        return outputs, (_tangent_like(result, tangent), *no_tangents)


def _zero_tangent(array: Leaf) -> Leaf:
    if is_differentiable(array):
        return jnp.zeros_like(array)
    return np.zeros(np.shape(array), jax.dtypes.float0)


def _tangent_like(result: PyTree, tangent: PyTree) -> PyTree:
    """Returns the tangent of a rule's result, with zeros for None and integers."""
    leaves, treedef = jax.tree.flatten(result)
    try:
        tangents = [None] * len(leaves) if tangent is None else treedef.flatten_up_to(tangent)
    except (ValueError, TypeError) as error:
        raise errors.tangent_unlike_result(error) from error

    completed: list[Leaf] = []
    for leaf, of_leaf in zip(leaves, tangents, strict=True):
        if of_leaf is None or not is_differentiable(leaf):
            completed.append(_zero_tangent(leaf))
        else:
            completed.append(jnp.asarray(of_leaf, dtype_of(leaf)))
    return treedef.unflatten(completed)
