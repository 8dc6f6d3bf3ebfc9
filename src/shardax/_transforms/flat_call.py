# SPDX-License-Identifier: Apache-2.0
"""Calls taken apart into arrays, and put together again somewhere else.

A transform whose function runs in another place than its call, such as on the host while a program
runs, hands over arrays alone. A ``FlatCall`` takes a call apart into these and a ``CallForm``, from
which the function and its arguments are built anew around other arrays. The form holds no array and
no object of the caller's, is hashable, and equal for calls that are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.array_ops import is_differentiable
from shardax._core.frames import Frame
from shardax._core.graph.definitions import GraphDef, VariableDef
from shardax._core.graph.flatten import build
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.static import Static
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute
from shardax._transforms.control.forms import vary_alike
from shardax._transforms.errors import StaticArgumentError
from shardax._transforms.grad.differentiated import DiffArgument, DiffState
from shardax._transforms.grad.errors import tangent_unlike_result
from shardax._transforms.grad.tangents import Tangents
from shardax._transforms.lift.arguments import Template, join_arguments, leaf_paths, static_argument
from shardax._transforms.lift.engine import LiftedCall
from shardax._transforms.lift.frames import LateFrame
from shardax._transforms.lift.signatures import resolve_arguments

Restored = tuple[Callable[..., PyTree], list[PyTree], dict[str, PyTree]]
"""A function, its positional arguments, and those by name."""


class StoredVariable(Variable[Any]):
    """A Variable that is read as it is stored, such as a NumPy array."""

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: object) -> None:
        self._write(value)


class StoredAttribute(StoredVariable, ArrayAttribute[Any]):
    """An array attribute that is read as it is stored."""


@dataclasses.dataclass(frozen=True)
class CallForm:
    """A call without its arrays.

    Attributes:
        graphdef: The structure of the function and of the objects in the arguments.
        templates: How each positional argument is put together.
        named: Name and template of each argument by name.
        static: Keys of the arguments that are static as a whole.
        treedef: The structure of the leaves: values of Variables, plain parts, those by name.
    """

    graphdef: GraphDef
    templates: tuple[Template, ...]
    named: tuple[tuple[str, Template], ...]
    static: tuple[tuple[int | str, Static], ...]
    treedef: Any

    def restore(
        self, leaves: Sequence[Leaf], frame: Frame, *, as_stored: str | None = None
    ) -> Restored:
        """Returns the function and its arguments, around other leaves.

        Args:
            leaves: What stands for the leaves, in order: arrays, tracers or shapes.
            frame: The frame in which they are used, which is entered.
            as_stored: Has Variables read as they are stored, so that arrays of NumPy stay such, and
                never written: the text of that error, with ``{what}`` for what was to be written.
        """
        values, plain, plain_named = self.treedef.unflatten(list(leaves))
        graphdef = self.graphdef if as_stored is None else _of_stored_variables(self.graphdef)
        (function, *objects), _ = build(graphdef, values, frame, as_stored)
        args, kwargs = join_arguments(self, plain, plain_named, objects)
        return function, args, kwargs


def _of_stored_variables(graphdef: GraphDef) -> GraphDef:
    """Returns the structure of the same objects with Variables that are read as stored."""
    definitions: list[Any] = []
    for definition in graphdef.objects:
        if isinstance(definition, VariableDef):
            is_attribute = issubclass(definition.type, ArrayAttribute)
            kind = StoredAttribute if is_attribute else StoredVariable
            definition = VariableDef(kind, definition.metadata)
        definitions.append(definition)
    return GraphDef(tuple(definitions), graphdef.roots)


class FlatCall:
    """A call taken apart into arrays and a form.

    What is neither array, number nor object is static.

    Args:
        name: The name of the transform, for errors.
        function: The function, method or callable Module.
        args: Its arguments.
        kwargs: Its arguments by name.
        static: Positions and names of arguments that are static as a whole.

    Attributes:
        leaves: The arrays: values of Variables, then those of the arguments.
        paths: The path of each leaf.
        form: The call without its arrays.

    Raises:
        StaticArgumentError: If a static argument is not hashable.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> scale = lambda weight, x: weight * x
        >>> call = extend.FlatCall("doubled", scale, (sx.Param(jnp.ones(2)), 3.0), {})
        >>> call.paths
        [('weight',), ('x',)]
        >>> doubled = [2 * leaf for leaf in call.leaves]
        >>> with extend.Frame("doubled") as frame:
        ...     function, args, kwargs = call.form.restore(doubled, frame)
        ...     function(*args, **kwargs).tolist()
        [12.0, 12.0]
    """

    Form: TypeAlias = CallForm

    def __init__(
        self,
        name: str,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        static: Container[int | str] = (),
    ) -> None:
        keys = [*enumerate(args), *sorted(kwargs.items())]
        static_arguments = tuple(
            (key, static_argument(value, function, key)) for key, value in keys if key in static
        )
        self._call = LiftedCall(name, [function], args, kwargs, static=static, auto_static=True)

        arguments, flat = self._call.arguments, self._call.graph.flat
        parts = (self._call.graph.values(), list(arguments.plain), arguments.plain_named)
        self.leaves, treedef = jax.tree.flatten(parts)
        self.form = CallForm(
            flat.graphdef, arguments.templates, arguments.named, static_arguments, treedef
        )

        # Of a leaf in a container the path of its argument.
        starts: list[Any] = [flat.leaf_paths, [(label,) for label in self._call.labels]]
        starts.append({name: (name,) for name in arguments.plain_named})
        self.paths: list[Path] = []
        for path in leaf_paths(treedef):
            part: Any = path[0]
            self.paths.append(starts[part][path[1]])

    @staticmethod
    def static_keys(
        function: Callable[..., PyTree], argnums: int | Sequence[int], argnames: str | Sequence[str]
    ) -> frozenset[int | str]:
        """Returns the positions and names of static arguments, as ``jax.jit`` finds them.

        Args:
            function: The function.
            argnums: Positions, one or several.
            argnames: Names, one or several.

        Raises:
            StaticArgumentError: If the function has no such arguments.
        """
        positions, names = resolve_arguments(
            function, argnums, argnames, "static", StaticArgumentError
        )
        return frozenset((*positions, *names))

    def derivative(self, rule: Callable[..., PyTree]) -> CallDerivative:
        """Returns the derivative of the call by a rule of its author's; it holds no array.

        Args:
            rule: Called as ``rule(args, result, tangents, **kwargs)``, returns the tangent of the
                result; None is zero.
        """
        return CallDerivative(self, rule)


class CallDerivative:
    """The derivative of a call, forward, by a rule of its author's.

    Args:
        call: The call.
        rule: As for ``FlatCall.derivative``.
    """

    def __init__(self, call: FlatCall, rule: Callable[..., PyTree]) -> None:
        self.form = call.form
        self.rule = rule
        self._name = call._call.name
        self._arguments = [
            DiffArgument(call._call, DiffState(position, ...))
            for position in range(len(call.form.templates))
        ]

    def tangents(
        self, primals: Sequence[Leaf], tangents: Sequence[Leaf | None], result: PyTree
    ) -> list[Leaf]:
        """Returns the tangents of the leaves of a result.

        The rule gets the tangent of an argument arranged as ``sx.grad`` arranges gradients: a State
        for a Module. It may use no Variable that is not among the arguments.

        Args:
            primals: The leaves of the call.
            tangents: The tangent of each; None for one that has none.
            result: What the call returned.

        Raises:
            TransformError: If the rule returns what is not arranged like the result, or has other
                shapes or dtypes.
        """
        with LateFrame(self._name) as frame:
            _, args, kwargs = self.form.restore(primals, frame)
            values, plain, _ = self.form.treedef.unflatten(list(tangents))
            by_index = dict(enumerate(values))
            of_arguments = tuple(
                argument.gradient(by_index, plain[argument.position])
                for argument in self._arguments
            )
            returned = self.rule(tuple(args), result, of_arguments, **kwargs)
        return _fitted_tangents(returned, result)


def _fitted_tangents(returned: PyTree, result: PyTree) -> list[Leaf]:
    """Returns the tangents that a rule returned, one for each leaf of the result."""
    leaves, treedef = jax.tree.flatten(result)
    try:
        parts = treedef.flatten_up_to(returned)
    except (ValueError, TypeError) as error:
        raise tangent_unlike_result(error) from error

    tangents = Tangents("tangent", [], strict=False)
    fitted: list[Leaf] = []
    for part, leaf, path in zip(parts, leaves, leaf_paths(treedef), strict=True):
        tangent = tangents.fit(part, leaf, ("result", *path))
        if not is_differentiable(leaf):
            fitted.append(np.zeros(leaf.shape, jax.dtypes.float0))
        elif tangent is None:
            fitted.append(vary_alike(jnp.zeros(leaf.shape, leaf.dtype), leaf))
        else:
            fitted.append(vary_alike(tangent, leaf))
    return fitted
