# SPDX-License-Identifier: Apache-2.0
"""Programs of functions over objects, as functions of lists of arrays.

Whoever writes a program into a file, or hands it to another runtime, needs to know of each of its
inputs and outputs what it is: an array of a Variable, by its path; a constant; or a leaf of what a
caller passes. An ``ArrayProgram`` says that, and runs the program on such lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax._core import _jax
from shardax._core.graph.definitions import GraphDef, VariableDef, definition_paths
from shardax._core.graph.paths import Path, PyTree
from shardax._core.variable import Variable
from shardax._transforms.grad.liveness import used_inputs
from shardax._transforms.jit.bound import BoundJit
from shardax._transforms.jit.jit import Jit, jit
from shardax._transforms.jit.slow_call import prepare
from shardax._transforms.jit.specialization import Specialization
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.effects import Effects
from shardax._transforms.lift.input_graph import InputGraph

SELF = ("self",)


class ProgramInput(NamedTuple):
    """One argument of a program that a caller passes."""

    name: str
    by_name: bool
    """Whether it was passed by name."""

    treedef: Any
    """Its structure."""

    leaves: list[Any]
    """Its arrays, or the shapes that stood for them."""

    has_objects: bool
    """Whether there are objects in it, or static values beside the arrays."""


class ProgramVariable(NamedTuple):
    """A Variable that a program was given, or found by a closure."""

    path: Path
    variable: Variable[Any]
    new_value: PyTree
    """The shape of what a call writes into it; None if it writes nothing."""

    is_written: bool


class StructureChange(NamedTuple):
    """What a program does to objects besides writing values."""

    paths: list[Path]
    """The objects that have another structure after a call."""

    new_types: set[type[Any]]
    """The types of the Variables that a call makes."""


class ArrayProgram:
    """The program of a function over objects, as a function of lists of arrays.

    Its *state* is the arrays of the Variables that the function uses, in order, and then its
    constants: arrays that it uses without their being a Variable's.

    Args:
        function: A Module, a method of one, or any function, compiled or not.
        args: Arguments to trace it for; ``jax.ShapeDtypeStruct`` may stand for arrays.
        kwargs: Arguments by name.

    Attributes:
        jaxpr: The program, closed.
        variables: The Variables that it uses, in order.
        constants: Its constants.
        inputs: The arguments that are no objects, in order.
        result: The result, with shapes for arrays.
        change: The objects that a call changes in structure; None if it changes none.
        returns_objects: Whether objects are in the result; then ``result`` lists arrays alone.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class Counter(sx.Module):
        ...     def __init__(self):
        ...         self.count = sx.Variable(jnp.zeros(()))
        ...     def __call__(self, by):
        ...         self.count += by
        ...         return self.count * 10
        >>> program = extend.ArrayProgram(Counter(), (1.0,))
        >>> [(variable.path, variable.is_written) for variable in program.variables]
        [(('count',), True)]
        >>> [argument.name for argument in program.inputs]
        ['by']
        >>> results, written = jax.jit(program)(program.state(), [2.0])
        >>> [array.tolist() for array in (*results, *written)]
        [20.0, 2.0]
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree] = {},
    ) -> None:
        compiled, args = _compiled_call(function, args)

        # Traced first, which finds what the function uses without being given it.
        traced = compiled.trace(*args, **kwargs)
        specialization, graph, arguments = prepare(compiled, args, kwargs)
        result, written, _, effects = traced.lifted_outputs

        self.jaxpr: Any = traced.jaxpr
        self.result: PyTree = result
        self.returns_objects = effects.result is not None
        self.change = _structure_change(effects, specialization.graphdef)
        self.inputs = tuple(_inputs(specialization, arguments))
        self.variables = tuple(_variables(graph, dict(zip(effects.written, written, strict=True))))

        # Scalars stay in the program.
        consts = enumerate(self.jaxpr.consts)
        self._hoisted = [position for position, const in consts if jnp.ndim(const) > 0]
        self.constants = [self.jaxpr.consts[position] for position in self._hoisted]

        self._graph = graph
        self._operands = _operands(specialization, arguments, graph)
        self._results = len(jax.tree.leaves(result))

    @staticmethod
    def known_variables(
        function: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] = {}
    ) -> list[tuple[Path, Variable[Any]]]:
        """Returns (path, Variable) of what a function uses, as far as it is known without a trace.

        Args:
            function: As for the class.
            args: As for the class.
            kwargs: As for the class.
        """
        compiled, args = _compiled_call(function, args)
        _, graph, _ = prepare(compiled, args, kwargs)
        return list(zip(_paths(graph), graph.leaves, strict=True))

    def state(self) -> list[Any]:
        """Returns the arrays of the Variables, lazy ones computed, and the constants.

        Raises:
            ModuleError: If a Variable has a shape only.
        """
        return [*jax.tree.leaves(self._graph.values()), *self.constants]

    def read_state(self) -> set[int]:
        """Returns the positions in the state of the arrays that results depend on."""
        pairs = zip(self._operands, used_inputs(self.jaxpr.jaxpr), strict=True)
        count = len(jax.tree.leaves([each.variable._value for each in self.variables]))
        read = {operand for operand, is_used in pairs if is_used and operand < count}
        return {*read, *range(count, count + len(self.constants))}

    def __call__(
        self, state: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the program.

        Args:
            state: Arrays in the order of ``state()``.
            inputs: The leaves of the inputs, in order.

        Returns:
            The leaves of the result, and those of the new values of the Variables that it writes.
        """
        count = len(state) - len(self.constants)
        consts = list(self.jaxpr.consts)
        for position, constant in zip(self._hoisted, state[count:], strict=True):
            consts[position] = constant

        arrays = [*state[:count], *inputs]
        run = _jax.jaxpr_as_fun(self.jaxpr.replace(consts=consts))
        outputs = run(*(arrays[operand] for operand in self._operands))
        return outputs[: self._results], outputs[self._results :]


def _compiled_call(
    function: Callable[..., PyTree], args: Sequence[PyTree]
) -> tuple[Jit, Sequence[PyTree]]:
    """Returns the compiled function and its positional arguments; a method's has its object."""
    if isinstance(function, BoundJit):
        return function.__func__, (function.__self__, *args)
    return (function if isinstance(function, Jit) else jit(function)), args


def _paths(graph: InputGraph) -> list[Path]:
    """Returns the paths of the Variables; in a compiled method they begin below its object."""
    paths = graph.flat.leaf_paths
    return [path[1:] for path in paths] if all(path[:1] == SELF for path in paths) else list(paths)


def _operands(
    specialization: Specialization, arguments: inputs.SplitArguments, graph: InputGraph
) -> list[int]:
    """Returns the number of each input of a program among the arrays of state and inputs."""
    leaves, treedef = jax.tree.flatten([variable._value for variable in graph.leaves])
    count = len(leaves)
    passed = range(count, count + len(arguments.plain_leaves()[0]))
    inputs_in_order = [*treedef.unflatten(range(count)), *passed]
    return jax.tree.leaves(specialization.partition(inputs_in_order))


def _inputs(
    specialization: Specialization, arguments: inputs.SplitArguments
) -> Iterator[ProgramInput]:
    """Yields the arguments with arrays, or with objects in containers."""
    labels = specialization.positions.labels
    passed = [
        *zip(labels, arguments.templates, arguments.plain, [False] * len(labels), strict=True),
        *((name, t, arguments.plain_named[name], True) for name, t in arguments.named),
    ]
    for name, template, plain, by_name in passed:
        leaves, treedef = jax.tree.flatten(plain)
        has_objects = isinstance(template, inputs.TreeTemplate) and bool(plain or template.roots)
        if has_objects or (isinstance(template, inputs.PlainTemplate) and leaves):
            yield ProgramInput(name, by_name, treedef, leaves, has_objects)


def _variables(graph: InputGraph, new_values: Mapping[int, PyTree]) -> Iterator[ProgramVariable]:
    """Yields the Variables, given what a call writes into them, by position."""
    for position, (path, variable) in enumerate(zip(_paths(graph), graph.leaves, strict=True)):
        is_written = position in new_values
        yield ProgramVariable(path, variable, new_values.get(position), is_written)


def _structure_change(effects: Effects, graphdef: GraphDef) -> StructureChange | None:
    if not effects.updates:
        return None
    paths = definition_paths(graphdef)
    new_types = {
        definition.type for definition in effects.fresh if isinstance(definition, VariableDef)
    }
    return StructureChange([paths[position] for position in sorted(effects.updates)], new_types)
