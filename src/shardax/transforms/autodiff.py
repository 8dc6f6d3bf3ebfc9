# SPDX-License-Identifier: Apache-2.0
"""Differentiation of functions over Modules.

What is differentiated is chosen by argument and, for a Module, by filter: its ``Param`` Variables
unless told otherwise. The gradient of a Module is a ``State`` with the paths of those Variables; a
Variable that is reached twice is one, so it has one gradient, the sum over all its uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import DifferentiationError
from shardax.core.filters import to_predicate
from shardax.core.paths import Path, format_path
from shardax.core.state import Origin, State
from shardax.core.structure import flatten
from shardax.core.variables import Param, Variable
from shardax.transforms.closures import parameter_name
from shardax.transforms.lift import Mixed, Root
from shardax.transforms.naming import leaf_paths, plain_paths, template_roots
from shardax.transforms.once import Once


@dataclass(frozen=True)
class DiffState:
    """Which argument to differentiate, and which of its Variables.

    Attributes:
        argnum: Position of the argument.
        filter: Filter of the Variables (``core.filters``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> stats = sx.BatchStat(jnp.float32(3))
        >>> float(sx.grad(lambda v: v.value**2, argnums=sx.DiffState(0, sx.BatchStat))(stats))
        6.0
    """

    argnum: int
    filter: Any = Param


class _Target:
    """One differentiated argument: which Variables of the graph, and which plain part."""

    def __init__(self, once: Once, chosen: DiffState, function: Any) -> None:
        arguments = once.arguments
        count = len(arguments.templates)
        if not -count <= chosen.argnum < count:
            raise DifferentiationError(
                f"argnums={chosen.argnum} is out of range: the call has {count} positional "
                f"arguments. Arguments to differentiate must be "
                f"passed by position."
            )
        self.position = chosen.argnum % count
        self.template = arguments.templates[self.position]
        self.label = parameter_name(function, self.position)
        self.roots = [arguments.roots[i] for i in template_roots(self.template)]
        self.has_plain = not isinstance(self.template, Root)
        self.states = [self._choose(once, root, to_predicate(chosen.filter)) for root in self.roots]
        if self.roots and not any(self.states) and not self.has_plain:
            shown = getattr(chosen.filter, "__name__", repr(chosen.filter))
            raise DifferentiationError(
                f"The argument {self.label!r} ({type(self.roots[0]).__name__}) has no Variable "
                f"that the filter {shown} matches, so there is nothing to "
                f"differentiate. Choose others with wrt=... or "
                f"argnums=sx.DiffState({chosen.argnum}, filter)."
            )

    def _choose(
        self, once: Once, root: Any, predicate: Callable[[Path, Any], bool]
    ) -> list[tuple[Path, Variable[Any], int]]:
        index = {id(leaf): i for i, leaf in enumerate(once.graph.flat.leaves)}
        flat = flatten(root)
        pairs = zip(flat.leaf_paths, flat.leaves, strict=True)
        if isinstance(root, Variable):
            return [(path, leaf, index[id(leaf)]) for path, leaf in pairs]
        return [(path, leaf, index[id(leaf)]) for path, leaf in pairs if predicate(path, leaf)]

    def check_differentiable(self, once: Once, allow_int: bool, holomorphic: bool) -> None:
        """Raises, naming the path, if a chosen Variable holds numbers that have no gradient."""
        wanted = jnp.complexfloating if holomorphic else jnp.inexact
        if not allow_int:
            self._check_plain(once.arguments.plain[self.position], wanted)
        for path, leaf, index in (entry for state in self.states for entry in state):
            for value in jax.tree.leaves(once.graph.leaves[index]._value):
                if not allow_int and not jnp.issubdtype(value.dtype, wanted):
                    raise DifferentiationError(
                        f"The {type(leaf).__name__} at "
                        f".{self.label}{format_path(path) if path else ''} has dtype "
                        f"{value.dtype}, which has no "
                        f"gradient. Leave it out by a filter (wrt=...), give it a Variable type of "
                        f"its own, or pass allow_int=True."
                    )

    def _check_plain(self, plain: Any, wanted: Any) -> None:
        leaves, treedef = jax.tree.flatten(plain)
        mixed = isinstance(self.template, Mixed)
        paths = plain_paths(self.template) if mixed else leaf_paths(treedef)
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int)):
                continue  # floats have gradients, and what is not a number JAX refuses itself
            dtype = jnp.result_type(leaf)
            if jnp.issubdtype(dtype, wanted):
                continue
            where = format_path((self.label, *path))
            raise DifferentiationError(
                f"The array at {where} has dtype {dtype}, which has no gradient. Pass it as an "
                f"argument of its own that argnums leaves out, convert it to a float, or pass "
                f"allow_int=True."
            )

    def gradient(self, by_index: dict[int, Any], plain: Any) -> Any:
        """Arranges gradients like the argument.

        A State per Module, a value per Variable, plain parts as they are.
        """
        found: list[Any] = []
        for root, state in zip(self.roots, self.states, strict=True):
            if isinstance(root, Variable):
                found.append(by_index[state[0][2]])
                continue
            values = {path: by_index[index] for path, _, index in state}
            origins = {path: Origin(type(leaf), leaf._metadata) for path, leaf, _ in state}
            found.append(State.from_flat(values, origins))
        if isinstance(self.template, Root):
            return found[0]
        if isinstance(self.template, Mixed):
            leaves = list(plain)
            for (place, _), item in zip(self.template.roots, found, strict=True):
                leaves.insert(place, item)
            return self.template.treedef.unflatten(leaves)
        return plain


def _value_and_grad(
    function: Callable[..., Any],
    chosen: Sequence[DiffState],
    has_aux: bool,
    options: dict[str, Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Any, Any, list[Any]]:
    """Returns (value, aux, one gradient per chosen argument)."""
    once = Once("grad", function, args, kwargs)
    targets = [_Target(once, item, function) for item in chosen]
    for target in targets:
        target.check_differentiable(once, options["allow_int"], options["holomorphic"])
    values, plain = once.graph.values(), list(once.arguments.plain)
    indices = sorted(
        {index for target in targets for state in target.states for _, _, index in state}
    )
    positions = [target.position for target in targets if target.has_plain]

    def pure(some_values: list[Any], some_plain: list[Any]) -> tuple[Any, Any]:
        all_values, all_plain = list(values), list(plain)
        for index, value in zip(indices, some_values, strict=True):
            all_values[index] = value
        for position, item in zip(positions, some_plain, strict=True):
            all_plain[position] = item
        return once.run(all_values, all_plain, once.arguments.plain_named, split)

    def split(result: Any) -> tuple[Any, Any]:
        if not has_aux:
            return _scalar(result, options["holomorphic"]), None
        if not (isinstance(result, tuple) and len(result) == 2):
            raise DifferentiationError(
                f"With has_aux=True the function must return (value, aux), but it returned "
                f"{type(result).__name__}."
            )
        return _scalar(result[0], options["holomorphic"]), result[1]

    transformed = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True, **options)
    (value, leaving), (value_grads, plain_grads) = transformed(
        [values[i] for i in indices], [plain[p] for p in positions]
    )
    aux = once.finish(leaving)
    by_index = dict(zip(indices, value_grads, strict=True))
    by_position = dict(zip(positions, plain_grads, strict=True))
    return (
        value,
        aux,
        [target.gradient(by_index, by_position.get(target.position)) for target in targets],
    )


def _scalar(value: Any, holomorphic: bool) -> Any:
    """Returns the number that is differentiated.

    Raises:
        DifferentiationError: If the function returned something else.
    """
    number = value.value if isinstance(value, Variable) else value
    wanted = jnp.complexfloating if holomorphic else jnp.floating
    is_array = isinstance(number, (jax.Array, np.ndarray, np.generic, float, complex))
    if is_array and jnp.ndim(number) == 0 and jnp.issubdtype(jnp.result_type(number), wanted):
        return number
    shown = (
        f"{jnp.result_type(number)}{list(jnp.shape(number))}"
        if is_array
        else f"a {type(value).__name__}"
    )
    raise DifferentiationError(
        f"Only a function that returns one {'complex' if holomorphic else 'real'} number has a "
        f"gradient, but it returned {shown}. Reduce it (loss.mean(), loss.sum()), return more "
        f"with has_aux=True as (loss, aux), or use jax.jacobian for arrays."
    )


def _chosen(argnums: Any, wrt: Any) -> tuple[list[DiffState], bool]:
    """Returns the arguments to differentiate and whether the caller gave a sequence of them."""
    many = isinstance(argnums, (tuple, list))
    items = [
        item if isinstance(item, DiffState) else DiffState(int(item), wrt)
        for item in (argnums if many else [argnums])
    ]
    positions = [item.argnum for item in items]
    if len(set(positions)) != len(positions):
        raise DifferentiationError(
            f"argnums names an argument twice: {positions}. Join the filters instead: "
            f"sx.DiffState({positions[0]}, (sx.Param, ...))."
        )
    return items, many


def value_and_grad(
    function: Callable[..., Any] | None = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    wrt: Any = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Makes a function that returns the value and the gradient of a scalar function over Modules.

    Values that the function writes into Variables are carried back, as by every lifted transform.

    Args:
        function: Returns a real scalar, or (scalar, aux) with ``has_aux``. Left out: returns a
            decorator.
        argnums: Position of the argument to differentiate, a ``DiffState``, or a sequence of these.
        has_aux: Whether the function returns (value, aux); aux may hold Modules and Variables.
        wrt: Filter of the Variables to differentiate in Module arguments given by position alone.
        holomorphic: As in ``jax.value_and_grad``.
        allow_int: As in ``jax.value_and_grad``.

    Returns:
        A function of the same arguments that returns (value, gradient), or ((value, aux),
        gradient). The gradient of a Module is a ``State``; of a Variable, an array like its value;
        of anything else, as in JAX. A sequence of argnums gives a tuple.

    Raises:
        DifferentiationError: When called, if nothing matches the filter or a matching Variable is
            not of a differentiable dtype.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 1, rngs=sx.Rngs(0))
        >>> layer.kernel[...] = jnp.ones((2, 1))
        >>> loss = lambda layer, x: layer(x).sum()
        >>> value, grads = sx.value_and_grad(loss)(layer, jnp.array([1.0, 2.0]))
        >>> float(value), grads["kernel"].ravel().tolist()
        (3.0, [1.0, 2.0])
    """
    if function is None:
        return functools.partial(
            value_and_grad,
            argnums=argnums,
            has_aux=has_aux,
            wrt=wrt,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
    chosen, many = _chosen(argnums, wrt)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}

    @functools.wraps(function)
    def value_and_grad_function(*args: Any, **kwargs: Any) -> Any:
        value, aux, gradients = _value_and_grad(function, chosen, has_aux, options, args, kwargs)
        return ((value, aux) if has_aux else value), (tuple(gradients) if many else gradients[0])

    return value_and_grad_function


def grad(
    function: Callable[..., Any] | None = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    wrt: Any = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Makes a function that returns the gradient of a scalar function; see ``value_and_grad``.

    Args:
        function: As for ``value_and_grad``.
        argnums: As for ``value_and_grad``.
        has_aux: As for ``value_and_grad``; the result is then (gradient, aux).
        wrt: As for ``value_and_grad``.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.

    Returns:
        A function of the same arguments that returns the gradient, or (gradient, aux).

    Raises:
        DifferentiationError: As for ``value_and_grad``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> w = sx.Param(jnp.float32(3))
        >>> float(sx.grad(lambda w: w**2)(w))
        6.0
    """
    if function is None:
        return functools.partial(
            grad,
            argnums=argnums,
            has_aux=has_aux,
            wrt=wrt,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
    chosen, many = _chosen(argnums, wrt)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}

    @functools.wraps(function)
    def grad_function(*args: Any, **kwargs: Any) -> Any:
        _, aux, gradients = _value_and_grad(function, chosen, has_aux, options, args, kwargs)
        gradient = tuple(gradients) if many else gradients[0]
        return (gradient, aux) if has_aux else gradient

    return grad_function
