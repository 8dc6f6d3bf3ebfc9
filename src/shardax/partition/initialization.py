# SPDX-License-Identifier: Apache-2.0
"""Initialisation of functional parameters by one program.

A *functional initializer* returns parameters in boxes. It is traced for shapes, the boxes give each
value its sharding, and one compiled program computes every value straight into its shards.

Arrays, Modules and Variables among the arguments are *inputs* of the program. Everything else, such
as widths and other functions, is *static*: what it is shows in the trace. Each call traces the
initializer; ``jit`` looks up the program by its jaxpr, so equal initializers are compiled once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardax._core.frames import is_eager
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import PyTree
from shardax._transforms.jit.abstract_eval import eval_shape
from shardax._transforms.jit.jit import jit
from shardax._transforms.lift.captures import Functions
from shardax.partition import errors
from shardax.partition.context import axis_rules, resolve_rules
from shardax.partition.mesh import AnyMesh, check_devices, require_mesh
from shardax.partition.placement import shard
from shardax.partition.rules import RulesLike
from shardax.partition.specs import get_sharding


def initialise(
    fn: Callable[..., object],
    *args: object,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    **kwargs: object,
) -> Any:
    """Computes the results of a functional initializer straight into their shardings.

    Each call traces the function. A call that differs from an earlier one in nothing but the
    numbers of arrays runs the program that was compiled then.

    The mesh and the rules are in scope while ``fn`` is traced, also for the constraints in it. Over
    a mesh with Explicit axes ``fn`` is traced as over Auto ones, for only then may the compiler
    compute a value in parts; the results are laid out over the mesh as it is.

    Args:
        fn: A function that returns a pytree of boxes (``Partitioned``, ``LogicallyPartitioned``,
            Variables), and of arrays, which are replicated: parameters, or a whole training state
            of parameters, optimizer state and step counter.
        *args: Its arguments. Arrays are inputs of the program; everything else is part of it.
        mesh: The mesh; None for the one in scope.
        rules: Rules for logical names; None for the current rules.
        **kwargs: Its keyword arguments.

    Returns:
        The results of ``fn``, laid out by ``get_sharding``.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        TransformError: If the mesh has no devices, or the call is inside a program.
        PartitionError: If there are logical names and no rules.
        PartitionCheckError: If an array cannot be laid out so; lists all by path, and nothing was
            compiled.

    Example:
        >>> import jax, shardax as sx
        >>> def init(key, widths):
        ...     normal = jax.nn.initializers.normal()
        ...     make = sx.partition.with_partitioning(normal, (None, "model"))
        ...     return [make(key, shape) for shape in zip(widths, widths[1:])]
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> layers = initialise(init, jax.random.key(0), (4, 8, 2), mesh=mesh)
        >>> layers[0].value.sharding.spec, layers[0].names
        (P(None, 'model'), (None, 'model'))
    """
    mesh = require_mesh(mesh, "initialise")
    if not is_eager():
        raise errors.initialise_in_program()
    mesh = check_devices(mesh, "initialise", "get_sharding(jax.eval_shape(fn, ...), mesh)")
    auto_mesh = _with_auto_axes(mesh)
    call = _InitializerCall(fn, args, kwargs)
    inputs = [_over_auto_axes(array) for array in call.inputs]

    with jax.set_mesh(auto_mesh), axis_rules(resolve_rules(rules)):
        shardings = get_sharding(eval_shape(call, inputs), auto_mesh, rules)
        result = jit(call, out_shardings=shardings)(inputs)
    if auto_mesh == mesh:
        return result

    # Over the axes that were given, of the same devices: nothing is moved.
    def over_given_axes(leaf: PyTree) -> PyTree:
        if is_object(leaf):
            return shard(leaf, mesh, rules)
        return jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))

    return jax.tree.map(over_given_axes, result, is_leaf=is_object)


class _InitializerCall(Functions):
    """A call of an initializer, as a function of its inputs.

    Args:
        function: The initializer.
        args: Its arguments, inputs and static ones.
        kwargs: Its keyword arguments.
    """

    __signature__ = inspect.Signature(
        [inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )

    def __init__(
        self, function: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> None:
        self._function = function
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        self.inputs = [leaf for leaf in self._leaves if _is_input(leaf)]

    @property
    def functions(self) -> tuple[Callable[..., PyTree], ...]:
        """See ``Functions.functions``."""
        return (self._function,)

    def with_functions(
        self, functions: tuple[Callable[..., PyTree], ...]
    ) -> Callable[[Sequence[PyTree]], PyTree]:
        """See ``Functions.with_functions``."""
        return lambda inputs: self._run(functions[0], inputs)

    def __call__(self, inputs: Sequence[PyTree]) -> PyTree:
        return self._run(self._function, inputs)

    def _run(self, function: Callable[..., PyTree], inputs: Sequence[PyTree]) -> PyTree:
        """Returns the result of a function of the arguments with these inputs."""
        remaining = iter(inputs)
        leaves = [next(remaining) if _is_input(leaf) else leaf for leaf in self._leaves]
        args, kwargs = self._treedef.unflatten(leaves)
        return function(*args, **kwargs)


def _is_input(leaf: object) -> bool:
    """Whether an argument is an input of the program, and not part of it."""
    return isinstance(leaf, (jax.Array, np.ndarray)) or is_object(leaf)


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with Auto axes throughout."""
    if all(axis_type is AxisType.Auto for axis_type in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _over_auto_axes(array: PyTree) -> PyTree:
    """Returns an input over Auto axes, as in the program; moves nothing."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    auto_mesh = _with_auto_axes(sharding.mesh)
    if auto_mesh == sharding.mesh:
        return array
    return jax.device_put(array, NamedSharding(auto_mesh, sharding.spec))
