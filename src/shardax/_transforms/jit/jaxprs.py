# SPDX-License-Identifier: Apache-2.0
"""Jaxprs, as programs that several traces may share.

Two jaxprs that differ in nothing but the names of their variables are one program (``same_jaxpr``).
A parameter that belongs to one trace, such as a function of the user's, keeps a jaxpr from being
shared (``can_be_shared``). Rules of derivatives, which would be such parameters, are taken out
first (``without_rules``): a shared program is never differentiated.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardax._core import _jax

if TYPE_CHECKING:
    from shardax._core._jax import Jaxpr, JaxprEqn, Var

# --- comparing jaxprs -----------------------------------------------------------------------------


def same_jaxpr(first: Jaxpr, second: Jaxpr) -> bool:
    """Returns whether two open jaxprs differ in nothing but the names of their variables."""
    if first is second:
        return True
    if len(first.eqns) != len(second.eqns):
        return False

    # The variable of the second for each of the first.
    renamed: dict[Any, Any] = {}
    inputs = ([*jaxpr.constvars, *jaxpr.invars] for jaxpr in (first, second))
    if not _bind(renamed, *inputs):
        return False

    for one, other in zip(first.eqns, second.eqns, strict=True):
        is_same = (
            one.primitive is other.primitive
            and _same_atoms(renamed, one.invars, other.invars)
            and _bind(renamed, one.outvars, other.outvars)
            and one.effects == other.effects
            and one.ctx == other.ctx
            and _same_value(one.params, other.params)
        )
        if not is_same:
            return False
    return _same_atoms(renamed, first.outvars, second.outvars)


def _bind(renamed: dict[Any, Any], first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Notes which variables correspond; returns whether they have the same types."""
    if len(first) != len(second):
        return False
    renamed.update(zip(first, second, strict=True))
    pairs = zip(first, second, strict=True)
    return all(one.aval == other.aval and type(one) is type(other) for one, other in pairs)


def _same_atoms(renamed: Mapping[Any, Any], first: Sequence[Any], second: Sequence[Any]) -> bool:
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if type(one) is not type(other):
            return False
        if isinstance(one, _jax.Literal):
            if one.aval != other.aval or not _same_value(one.val, other.val):
                return False
        elif renamed.get(one) is not other:
            return False
    return True


def _same_value(first: Any, second: Any) -> bool:
    """Returns whether two parameters of a primitive are certainly equal."""
    kind = type(first)

    if first is second:
        return True
    if kind is not type(second):
        return False
    if _jax.is_jaxpr(first):
        return _same_constants(first, second) and same_jaxpr(
            _jax.open_jaxpr(first), _jax.open_jaxpr(second)
        )
    if issubclass(kind, (tuple, list)):
        return len(first) == len(second) and all(map(_same_value, first, second))
    if issubclass(kind, Mapping):
        return first.keys() == second.keys() and all(
            _same_value(first[name], second[name]) for name in first
        )
    if issubclass(kind, (float, complex, np.ndarray, np.generic)):
        # By their bits: 0.0 is not -0.0, and a NaN is equal to itself.
        one, other = np.asarray(first), np.asarray(second)
        return (
            (one.dtype, one.shape) == (other.dtype, other.shape)
            and not one.dtype.hasobject
            and one.tobytes() == other.tobytes()
        )
    if isinstance(first, jax.Array) or _is_python_function(first):
        return False
    return _is_equal(first, second)


def _is_equal(first: object, second: object) -> bool:
    """Returns whether ``==`` says so."""
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001 - what cannot be compared is another value
        return False


def _same_constants(first: Any, second: Any) -> bool:
    """Returns whether two jaxprs inside of others hold the very same constants."""
    ours, theirs = getattr(first, "consts", ()), getattr(second, "consts", ())
    return len(ours) == len(theirs) and all(map(_same_value, ours, theirs))


# --- what makes a jaxpr one trace's own -----------------------------------------------------------


def reads_constants_elsewhere(jaxpr: Jaxpr) -> bool:
    """Returns whether an equation reads a constant under another mesh than the one in scope.

    ``jax.sharding.auto_axes`` makes such equations. A constant has no mesh in its type, but as an
    input it would have the mesh in scope, which these equations refuse.
    """
    constants = {*jaxpr.constvars}
    mesh = jax.sharding.get_abstract_mesh()
    if not constants:
        return False

    return any(
        equation.ctx.cur_abstract_mesh != mesh and not constants.isdisjoint(_variables(equation))
        for equation in jaxpr.eqns
    )


def _variables(equation: JaxprEqn) -> list[Var]:
    """Returns the variables that an equation reads."""
    return [atom for atom in equation.invars if not isinstance(atom, _jax.Literal)]


def can_be_shared(jaxpr: Jaxpr) -> bool:
    """Returns whether another trace can have an equal jaxpr, and sharing keeps nothing alive."""
    for equation in jaxpr.eqns:
        for value in _values_in(equation.params):
            if _jax.is_jaxpr(value):
                # Arrays that an inner ``jax.jit`` closed over are part of its program. Those of
                # NumPy may even be changed in place.
                if getattr(value, "consts", ()):
                    return False
                if not can_be_shared(_jax.open_jaxpr(value)):
                    return False
            elif isinstance(value, jax.Array) or _is_python_function(value):
                return False
    return True


def _values_in(value: Any) -> Iterator[Any]:
    """Yields the values in nested parameters of a primitive."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _values_in(item)
    else:
        yield value


def _is_python_function(value: object) -> bool:
    """Returns whether a parameter is a function that may belong to one trace."""
    if hasattr(type(value), "call_wrapped"):  # what JAX makes of a derivative rule
        return True
    # Meshes can be called too: they are decorators.
    if isinstance(value, (type, jax.sharding.Mesh)) or not callable(value):
        return False
    # Functions of JAX's own modules, such as those of a random number generator.
    is_constant = isinstance(value, types.FunctionType) and value.__closure__ is None
    return not (is_constant and value.__globals__.get("__name__", "").partition(".")[0] == "jax")


# --- rules of derivatives and batches -------------------------------------------------------------

# Primitives that call a jaxpr and have rules for transforms, and their parameter with the jaxpr.
_RULED_CALLS = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


def without_rules(jaxpr: Jaxpr) -> Jaxpr:
    """Returns an open jaxpr that computes the same, without rules to differentiate or map it.

    A shared program is called with arrays and never transformed: under ``jax.grad``, a function
    has a program of its own. Its rules, which are functions made for each trace, would make every
    jaxpr another one, and keep alive what they close over.
    """
    equations: list[Any] = []
    # Where an inlined call returns one of its inputs: what stands for the result.
    replaced: dict[Any, Any] = {}
    is_changed = False
    for equation in jaxpr.eqns:
        if replaced:
            inputs = [_replacement(replaced, atom) for atom in equation.invars]
            equation = equation.replace(invars=inputs)

        inner = _inner_of_custom_call(equation)
        if inner is None:
            plain = _without_rules_inside(equation)
            is_changed = is_changed or plain is not equation
            equations.append(plain)
        else:
            is_changed = True
            equations.extend(_inlined(without_rules(inner), equation, replaced))

    if not is_changed:
        return jaxpr
    outputs = [_replacement(replaced, atom) for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=equations, outvars=outputs)


def _replacement(replaced: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, _jax.Literal) else replaced.get(atom, atom)


def _inner_of_custom_call(equation: Any) -> Jaxpr | None:
    """Returns the open jaxpr that an equation calls, if it has derivative rules of its own."""
    name = _RULED_CALLS.get(equation.primitive.name)
    if name is None or equation.effects:
        return None
    inner = equation.params[name]
    return None if getattr(inner, "consts", ()) else _jax.open_jaxpr(inner)


def _inlined(inner: Jaxpr, equation: Any, replaced: dict[Any, Any]) -> Iterator[Any]:
    """Yields the equations of an inner jaxpr, on the inputs and outputs of the outer equation."""
    # One inner jaxpr may be called twice. Equations are evaluated in order, so a variable inside of
    # it is given its second value after the last use of its first one.
    renamed = dict(zip(inner.invars, equation.invars, strict=True))
    results: dict[Any, Any] = {}
    for inside, outside in zip(inner.outvars, equation.outvars, strict=True):
        is_computed = not isinstance(inside, _jax.Literal) and inside not in renamed
        if is_computed and inside not in results:
            results[inside] = outside
        else:
            replaced[outside] = results[inside] if is_computed else _replacement(renamed, inside)
    renamed |= results

    for each in inner.eqns:
        yield each.replace(
            invars=[_replacement(renamed, atom) for atom in each.invars],
            outvars=[renamed.get(variable, variable) for variable in each.outvars],
        )


def _without_rules_inside(equation: Any) -> Any:
    """Returns an equation whose inner jaxprs have no derivative rules."""
    params = {name: _without_rules_in_value(value) for name, value in equation.params.items()}
    if "policy" in params and "prevent_cse" in params:
        # Of ``jax.checkpoint``: what to keep for the derivative.
        params["policy"] = None
    if all(params[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=params)


def _without_rules_in_value(value: Any) -> Any:
    if _jax.is_jaxpr(value):
        opened = _jax.open_jaxpr(value)
        plain = without_rules(opened)
        return value if plain is opened else _jax.with_inner(value, plain)
    if type(value) is tuple:
        items = tuple(map(_without_rules_in_value, value))
        return value if all(map(lambda a, b: a is b, items, value)) else items
    return value
