# SPDX-License-Identifier: Apache-2.0
"""Derivatives of host functions.

JAX cannot look into a host function, so its author says how the result moves with the arguments
(a *jvp rule*) or how gradients come back to them (a *vjp rule*). Rules are part of the program, as
any function of JAX arrays is; a rule that needs the host is a host function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.graph.flatten import flatten, is_object
from shardax._core.graph.paths import Path, format_path, path_step
from shardax._core.state.state import State
from shardax._transforms.control.loops import vary_alike
from shardax._transforms.errors import DifferentiationError, TangentError
from shardax._transforms.grad.targets import DiffArgument, DiffState, Tangents, is_differentiable
from shardax._transforms.lift.engine import LateFrame, LiftedCall
from shardax.host.callback import HostProgram

_FLOAT0 = jax.dtypes.float0


def stopped(leaf: Any) -> Any:
    """Returns a leaf without a derivative."""
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, Tracer) else leaf


def refused(name: str, leaves: Sequence[Any], paths: Sequence[Path]) -> list[Any]:
    """Returns leaves that it is an error to differentiate.

    Args:
        name: The host function's name.
        leaves: The leaves.
        paths: What each is part of.
    """

    @jax.custom_jvp
    def same(*leaves: Any) -> Any:
        return leaves

    def refuse(primals: Any, tangents: Any) -> Any:
        zero = jax.custom_derivatives.SymbolicZero
        moving = [p for p, t in zip(paths, tangents, strict=True) if not isinstance(t, zero)]
        shown = ", ".join(format_path(path) for path in dict.fromkeys(moving))
        raise DifferentiationError(
            f"The host function {name} is differentiated by {shown}, but JAX cannot look into it, "
            f"and no derivative was given. Give one, host_function(..., vjp=rule) or jvp=rule; or "
            f"say that it has none, nondiff=True; or stop gradients before the call, "
            f"jax.lax.stop_gradient(x)."
        )

    same.defjvp(refuse, symbolic_zeros=True)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return list(leaves)
    return [
        new if is_differentiable(leaf) else stopped(leaf)
        for leaf, new in zip(leaves, same(*leaves), strict=True)
    ]


def forward(
    rule: Callable[..., Any],
    call: LiftedCall,
    program: HostProgram,
    run: Callable[[Sequence[Any]], list[Any]],
    leaves: Sequence[Any],
) -> list[Any]:
    """Runs a program's function so that it is differentiated by a jvp rule.

    Args:
        rule: Called as ``rule(args, result, tangents)``.
        call: The call that the program was taken from.
        program: The program.
        run: Runs it on leaves.
        leaves: Its leaves.
    """
    targets = [DiffArgument(call, DiffState(i, ...)) for i in range(len(program.templates))]

    @jax.custom_jvp
    def apply(*leaves: Any) -> list[Any]:
        return run(leaves)

    @apply.defjvp
    def moved(primals: Any, tangents: Any) -> Any:
        results = apply(*primals)
        with LateFrame("host_function") as frame:
            _, args, kwargs = program.restore(primals, frame)
            directions = _arranged(targets, program, [_some(tangent) for tangent in tangents])
            given = rule(tuple(args), program.out_tree.unflatten(results), directions, **kwargs)
        return results, _fitted(program, given, results)

    return apply(*(leaf if is_differentiable(leaf) else stopped(leaf) for leaf in leaves))


def _some(tangent: Any) -> Any:
    return None if getattr(tangent, "dtype", None) == _FLOAT0 else tangent


def _arranged(
    targets: Sequence[DiffArgument], program: HostProgram, tangents: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns the tangents of the leaves, one for each positional argument and arranged like it."""
    values, plain, _ = program.treedef.unflatten(tangents)
    by_index = dict(enumerate(values))
    return tuple(target.gradient(by_index, plain[target.position]) for target in targets)


def _fitted(program: HostProgram, given: Any, results: Sequence[Any]) -> list[Any]:
    """Returns what a jvp rule returned as one tangent for each leaf of the result."""
    try:
        parts = program.out_tree.flatten_up_to(given)
    except (ValueError, TypeError) as error:
        raise TangentError(
            f"jvp of the host function {program.name} returned a tangent that is not arranged like "
            f"the result: {error}"
        ) from error
    tangents = Tangents("tangent", [], strict=False)
    fitted = []
    for part, result, path in zip(parts, results, out_paths(program), strict=True):
        tangent = tangents.fit(part, result, ("result", *path))
        if not is_differentiable(result):
            fitted.append(np.zeros(result.shape, _FLOAT0))
        else:
            tangent = jnp.zeros(result.shape, result.dtype) if tangent is None else tangent
            fitted.append(vary_alike(tangent, result))
    return fitted


def out_paths(program: HostProgram) -> list[Path]:
    """Returns the path of each leaf of a program's result."""
    marked = program.out_tree.unflatten(range(program.out_tree.num_leaves))
    pairs = jax.tree_util.tree_leaves_with_path(marked)
    return [tuple(path_step(key) for key in keys) for keys, _ in pairs]


def backward(
    name: str, rule: Callable[..., Any], args: tuple[Any, ...], result: Any, cotangent: Any
) -> tuple[Any, ...]:
    """Calls a vjp rule, with None for the cotangents of integers.

    Returns:
        One gradient for each argument.

    Raises:
        DifferentiationError: If the rule returned no tuple.
    """
    given = rule(args, result, jax.tree.map(_some, cotangent))
    if isinstance(given, (tuple, list)):
        return tuple(given)
    raise DifferentiationError(
        f"vjp of the host function {name} must return a tuple with one gradient for each argument "
        f"(None: zero), but it returned a {type(given).__name__}."
    )


# --- what rules on the host promise ---------------------------------------------------------------


def tangent_like(args: tuple[Any, ...], result: Any, tangents: Any, **kwargs: Any) -> Any:
    """Shape rule of jvp rules: a tangent is like the result, None for integers."""
    return if_differentiable(result)


def gradients_like(
    static: Container[int | str],
    args: tuple[Any, ...],
    result: Any,
    cotangent: Any,
    **kwargs: Any,
) -> Any:
    """Shape rule of vjp rules: a gradient is like the argument, for a Module a dict by path.

    Args:
        static: Positions of static arguments, among other keys.
        args: As the rule gets them.
        result: Likewise.
        cotangent: Likewise.
        **kwargs: Likewise.
    """
    moving = tuple(arg for position, arg in enumerate(args) if position not in static)
    return if_differentiable(jax.tree.map(_by_path, moving, is_leaf=is_object))


def _by_path(leaf: Any) -> Any:
    if not is_object(leaf):
        return leaf
    flat = flatten(leaf)
    values = {p: v._value for p, v in zip(flat.leaf_paths, flat.leaves, strict=True)}
    return State.from_flat(values).to_pure_dict()


def if_differentiable(tree: Any) -> Any:
    """Returns a tree of shapes and dtypes with None for what has no derivative."""
    return jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "dtype") and is_differentiable(leaf) else None, tree
    )
