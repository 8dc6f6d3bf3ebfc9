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
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core import _jax
from shardax._core.graph.paths import PyTree
from shardax._transforms.jit.jaxprs import (
    can_be_shared,
    reads_constants_elsewhere,
    same_jaxpr,
    without_rules,
)
from shardax._transforms.lift.effects import Effects

if TYPE_CHECKING:
    from shardax._core._jax import ClosedJaxpr, Jaxpr

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


# What the pure function takes: values that are kept, values that are donated, plain arguments, and
# perhaps donated plain arguments, arguments by name, and donated ones by name.
FlatInputs = tuple[PyTree, ...]


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
        def call(*flat_inputs: PyTree) -> tuple[Any, ...]:
            result, written, fresh = run(*flat_inputs, constants)
            return result, written, fresh, effects

        self.call = call

    def accepts(self, flat_inputs: FlatInputs) -> bool:
        """Whether the program was traced for such inputs, under the settings of now."""
        try:
            types = _types_of(flat_inputs)
        except TypeError:
            # Of no type that JAX knows: the trace says which argument that is.
            return False
        return self._types == types and self.program.context is current_context()

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
    jaxpr: ClosedJaxpr,
    name: str,
    in_tree: Hashable,
    out_tree: Hashable,
    options: Mapping[str, Any],
    options_key: Hashable,
) -> SharedProgram | None:
    """Returns the program of a jaxpr, made now or before.

    Args:
        jaxpr: A closed jaxpr; its constants become the last inputs of the program.
        name: The name of the program in profiles.
        in_tree: The structure of the other inputs.
        out_tree: The structure of the outputs: the result, written and new Variables.
        options: Options of ``jax.jit``.
        options_key: What these compare by.

    Returns:
        The program; None where no other trace could ever have an equal one.
    """
    if reads_constants_elsewhere(_jax.open_jaxpr(jaxpr)):
        return None

    opened = without_rules(_jax.with_constants_as_inputs(jaxpr))
    context = current_context()
    # Cheap to compute, so that a function that is compiled once pays for no comparison.
    fingerprint = (
        name,
        in_tree,
        out_tree,
        options_key,
        context,
        tuple(str(variable.aval) for variable in opened.invars),
        len(opened.eqns),
    )

    with _lock:
        candidates = list(_programs.get(fingerprint, ()))
    for program in candidates:
        if same_jaxpr(program.jaxpr, opened):
            with _lock:
                if fingerprint in _programs:
                    _programs.move_to_end(fingerprint)
            return program

    if not can_be_shared(opened):
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
    arrays = [array for array in jax.tree.leaves(inputs) if _is_committed(array)]
    committed = [array.sharding.device_set for array in arrays]
    of_constants = [array.sharding.device_set for array in constants if _is_committed(array)]

    # Without a committed array, the program runs on the device of arrays that are made here.
    if not committed and any(len(devices) == 1 for devices in of_constants):
        committed.append(jnp.array(0).sharding.device_set)
    together = [*committed, *of_constants]
    return constants if all(devices == together[0] for devices in together) else None


def _is_committed(value: object) -> bool:
    return isinstance(value, jax.Array) and value.committed


def _copied(constant: Any) -> jax.Array:
    """Returns a copy of a constant, which is committed to no device where that is possible."""
    if not isinstance(constant, jax.Array):
        return jnp.array(constant)

    # By the host: JAX says in no other way that an array may be on any device. There is none for
    # weak types.
    is_on_one = len(constant.sharding.device_set) == 1
    if constant.committed and is_on_one:
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            data = jnp.array(np.asarray(jax.random.key_data(constant)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(constant))
        if not constant.weak_type:
            return jnp.array(np.asarray(constant))
    return jax.device_put(constant, may_alias=False)
