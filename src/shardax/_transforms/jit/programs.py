# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, shared by their jaxpr.

A function that is made anew is traced anew. Its program is then looked up among those that were
compiled before, for a function of the same name and with the same options. Two jaxprs that differ
in nothing but the names of their variables are one program. The constants of a jaxpr (arrays that
the function closed over) are inputs of its program, so they are no part of the comparison. Nothing
of Python's code is compared. A Python number that the function read stands in its jaxpr as a
literal, so each number is a program of its own, and what a function read from plain Python is as
old as its trace.

A ``SharedProgram`` serves one jaxpr in one *context* (settings of JAX, the mesh in scope), and
refuses every other signature by ``NeedsSlowCall``. It holds no function of the user's. Programs
that call one (``jax.pure_callback``) are never equal to those of another trace, and are not shared.
"""

from __future__ import annotations

import threading
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core import _jax
from shardax._core.graph.paths import PyTree
from shardax._transforms.lift.effects import Effects

if TYPE_CHECKING:
    from shardax._core._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Var

# How many programs are kept; the least recently used one is dropped.
MAX_PROGRAMS = 256


class NeedsSlowCall(Exception):
    """Nothing is known that would serve a call: the slow way has to make it.

    A shared program raises it for other types, or another context, than it is for.
    """


@jax.tree_util.register_static
class _Context:
    """One combination of JAX's settings and the mesh in scope, compared by identity."""


@jax.jit
def _make_context() -> _Context:
    return _Context()


def current_context() -> _Context:
    """Returns the token of the settings that JAX would trace a function anew for."""
    # JAX does not say what its traces depend on, but it traces this function once for each.
    return jax.eval_shape(_make_context)


class SharedProgram:
    """The compiled program of one jaxpr, as a function of its inputs and constants."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        name: str,
        context: _Context,
        in_tree: Hashable,
        out_tree: Any,
        options: Mapping[str, Any],
    ) -> None:
        # Open, with constants among the inputs.
        self.jaxpr = jaxpr
        self.context = context
        self.in_tree = in_tree
        # The structure of the result, of written Variables, and of new ones.
        self.out_tree = out_tree

        # Named as the inputs of a specialization's own function, for errors of JAX.
        def program(*flat: PyTree) -> tuple[PyTree, ...]:
            return self._evaluate(flat)

        program.__name__ = program.__qualname__ = name
        self.call: Any = jax.jit(program, **options)

    def _evaluate(self, inputs: PyTree) -> tuple[PyTree, ...]:
        *inputs, constants = inputs
        leaves, in_tree = jax.tree.flatten(tuple(inputs))
        # Constants are those of an equal jaxpr. (A NumPy array is of another type once it is on a
        # device, where a mesh is in scope.)
        types_expected = [variable.aval for variable in self.jaxpr.invars[len(constants) :]]
        is_mine = (
            in_tree == self.in_tree
            and [jax.typeof(leaf) for leaf in leaves] == types_expected
            and current_context() is self.context
        )
        if not is_mine:
            raise NeedsSlowCall

        return self.out_tree.unflatten(_jax.evaluate(self.jaxpr, [*constants, *leaves]))


# What the pure function takes: the inputs that are kept, and those that are donated.
FlatInputs = tuple[list[PyTree], list[PyTree]]


class SharedCall:
    """A shared program with what one trace adds to it: constants and effects."""

    __slots__ = ("_constants", "_types", "call", "program")

    def __init__(
        self,
        program: SharedProgram,
        constants: list[jax.Array],
        effects: Effects,
        flat_inputs: FlatInputs,
    ) -> None:
        self.program = program
        self._constants = constants
        self._types = _types_of(flat_inputs)
        run = program.call

        # A function, since calling an instance takes longer.
        def call(kept: list[PyTree], donated: list[PyTree]) -> tuple[Any, ...]:
            result, written, fresh = run(kept, donated, constants)
            return result, written, fresh, effects

        self.call = call

    def accepts(self, flat_inputs: FlatInputs) -> bool:
        """Whether the program was traced for such inputs, under the settings of now."""
        try:
            input_types = _types_of(flat_inputs)
        except TypeError:
            # Of no type that JAX knows: the trace says which argument that is.
            return False
        return self._types == input_types and self.program.context is current_context()

    def compile(self, flat_inputs: FlatInputs) -> None:
        """Compiles for inputs without running."""
        self.program.call.lower(*flat_inputs, self._constants).compile()


class OwnCall:
    """The ``jax.jit`` of a specialization's own pure function."""

    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        self.call = call

    def compile(self, flat_inputs: FlatInputs) -> None:
        """Compiles for inputs without running."""
        self.call.lower(*flat_inputs).compile()


def _types_of(tree: PyTree) -> Hashable:
    """Returns the structure of a tree and the JAX type of each leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(map(jax.typeof, leaves))


# Programs with one fingerprint, the least recently used fingerprint first.
_programs: OrderedDict[Hashable, list[SharedProgram]] = OrderedDict()
_lock = threading.Lock()


def shared_program(
    jaxpr: ClosedJaxpr, name: str, in_tree: Hashable, out_tree: Hashable, options: Mapping[str, Any]
) -> SharedProgram | None:
    """Returns the program of a jaxpr, made now or before.

    Args:
        jaxpr: A closed jaxpr; its constants become the last inputs of the program.
        name: The name of the program in profiles.
        in_tree: The structure of the other inputs.
        out_tree: The structure of the outputs: the result, written and new Variables.
        options: Options of ``jax.jit``.

    Returns:
        The program; None where no other trace could ever have an equal one.
    """
    if _reads_constants_elsewhere(_jax.open_jaxpr(jaxpr)):
        return None

    opened = _without_rules(_jax.with_constants_as_inputs(jaxpr))
    context = current_context()
    # Cheap to compute, so that a function that is compiled once pays for no comparison.
    fingerprint = (
        name,
        in_tree,
        out_tree,
        _key_of_options(options),
        context,
        tuple(str(variable.aval) for variable in opened.invars),
        len(opened.eqns),
    )

    with _lock:
        candidates = list(_programs.get(fingerprint, ()))
    for program in candidates:
        if _same_jaxpr(program.jaxpr, opened):
            with _lock:
                if fingerprint in _programs:
                    _programs.move_to_end(fingerprint)
            return program

    if not _can_be_shared(opened):
        return None
    program = SharedProgram(opened, name, context, in_tree, out_tree, options)
    with _lock:
        _programs.setdefault(fingerprint, []).append(program)
        _programs.move_to_end(fingerprint)
        while sum(map(len, _programs.values())) > MAX_PROGRAMS:
            oldest, programs = next(iter(_programs.items()))
            programs.pop(0)
            if not programs:
                del _programs[oldest]
    return program


def _key_of_options(options: Mapping[str, Any]) -> Hashable:
    """Returns what options of ``jax.jit`` compare by."""
    leaves, treedef = jax.tree.flatten(dict(options), is_leaf=lambda entry: entry is None)
    return (treedef, *((type(leaf), leaf) for leaf in leaves))


def forget_program(program: SharedProgram) -> None:
    """Drops a program, so that an equal jaxpr is compiled anew."""
    program.call.clear_cache()
    with _lock:
        for fingerprint, programs in [*_programs.items()]:
            if program in programs:
                programs.remove(program)
                if not programs:
                    del _programs[fingerprint]


def constants_of(jaxpr: ClosedJaxpr, inputs: PyTree) -> list[jax.Array] | None:
    """Returns copies of the constants of a closed jaxpr, of which none is a ``jax.Ref``.

    To JAX a constant is a part of the program: it is what it was when it was traced, though its
    array be donated or changed in place, and it is wherever the program runs.

    Args:
        jaxpr: The jaxpr.
        inputs: The inputs of the first call.

    Returns:
        The arrays; None where one is committed to other devices than the program would run on.
    """
    constants = [_copied(constant) for constant in jaxpr.consts]
    of_constants = _committed_devices(constants)
    of_inputs = _committed_devices(jax.tree.leaves(inputs))

    # Without a committed input, the program runs on the device of arrays that are made here.
    if of_constants and not of_inputs:
        of_inputs = {frozenset(jnp.array(0).sharding.device_set)}
    return constants if of_constants <= of_inputs else None


def _committed_devices(values: Sequence[Any]) -> set[frozenset[jax.Device]]:
    """Returns the devices that arrays among values are committed to."""
    arrays = [value for value in values if isinstance(value, jax.Array) and value.committed]
    return {frozenset(array.sharding.device_set) for array in arrays}


def _copied(constant: Any) -> jax.Array:
    """Returns a copy of a constant."""
    if isinstance(constant, jax.Array):
        return jax.device_put(constant, may_alias=False)
    return jnp.array(constant)


# --- comparing jaxprs -----------------------------------------------------------------------------


def _same_jaxpr(first: Jaxpr, second: Jaxpr) -> bool:
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
        return _same_constants(first, second) and _same_jaxpr(
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


def _reads_constants_elsewhere(jaxpr: Jaxpr) -> bool:
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


def _can_be_shared(jaxpr: Jaxpr) -> bool:
    """Returns whether another trace can have an equal jaxpr, and sharing keeps nothing alive."""
    for equation in jaxpr.eqns:
        for value in _values_in(equation.params):
            if _jax.is_jaxpr(value):
                # Arrays that an inner ``jax.jit`` closed over are part of its program. Those of
                # NumPy may even be changed in place.
                if getattr(value, "consts", ()):
                    return False
                if not _can_be_shared(_jax.open_jaxpr(value)):
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


def _without_rules(jaxpr: Jaxpr) -> Jaxpr:
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
            equations.extend(_inlined(_without_rules(inner), equation, replaced))

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
        plain = _without_rules(opened)
        return value if plain is opened else _jax.with_inner(value, plain)
    if type(value) is tuple:
        items = tuple(map(_without_rules_in_value, value))
        return value if all(map(lambda a, b: a is b, items, value)) else items
    return value
