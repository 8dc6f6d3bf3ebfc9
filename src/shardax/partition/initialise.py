# SPDX-License-Identifier: Apache-2.0
"""Initialisation in the functional style: parameters made where they belong, by one program.

A *functional initializer* is a function of random keys, shapes and the like that returns parameters
in boxes. It is traced for shapes, the boxes say where each value goes, and one compiled program
computes every value straight into its shards, so that no device holds more than it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from shardax.core._jax import is_eager
from shardax.core.errors import MeshError
from shardax.core.pytree import is_object
from shardax.partition.box_layout import get_sharding
from shardax.partition.init_programs import Call, Program, Runner, find
from shardax.partition.mesh import AnyMesh
from shardax.partition.placement import shard
from shardax.partition.rules import Rules, RulesLike
from shardax.partition.scope import axis_rules, resolve_rules
from shardax.partition.tree_layout import require_mesh
from shardax.transforms.jit import jit
from shardax.transforms.shapes import eval_shape


def initialise(
    fn: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    **kwargs: Any,
) -> Any:
    """Computes what a functional initializer returns straight into its shardings.

    It is compiled once: a call with the same function, arguments that differ in their numbers only,
    the same mesh and rules runs the program of the one before, as with ``jax.jit``.

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
        What ``fn`` returns, the values laid out as ``get_sharding`` says.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        MeshError: If the mesh has no devices, or the call is inside a program.
        NoRulesError: If there are logical names and no rules.
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
    where = _usable(require_mesh(mesh, "initialise"))
    chosen = resolve_rules(rules)
    automatic = _automatic(where)
    call = Call(fn, args, kwargs)
    inputs = [_over_automatic(array) for array in call.inputs]

    def make() -> Program:
        places = get_sharding(eval_shape(call.run, inputs), automatic, chosen)
        runner = Runner(call)
        return Program(runner, jit(runner, out_shardings=places))

    with jax.set_mesh(automatic), axis_rules(chosen):
        program = find(call.key(automatic, chosen), make)
        result = program.runner.run(call, program.compiled, inputs)
    if automatic == where:
        return result
    return jax.tree.map(lambda leaf: _over(leaf, where, chosen), result, is_leaf=is_object)


def _usable(mesh: AnyMesh) -> Mesh:
    if not is_eager():
        raise MeshError(
            "initialise places arrays and cannot be called inside a program. Call it outside; or, "
            "inside, call the initializer itself and unbox(result), which constrains the values."
        )
    if not isinstance(mesh, Mesh) or AxisType.Manual in mesh.axis_types:
        raise MeshError(
            f"initialise cannot place arrays over {mesh}: it has no devices, or Manual axes, which "
            "are for the inside of jax.shard_map. Pass a mesh such as "
            "jax.make_mesh((2, 4), ('data', 'model')). For specs alone, use "
            "get_sharding(jax.eval_shape(fn, ...), mesh)."
        )
    return mesh


def _automatic(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes throughout."""
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _over(leaf: Any, mesh: Mesh, rules: Rules) -> Any:
    """Says that an array is laid out over a mesh that has the same devices; moves nothing."""
    if is_object(leaf):
        return shard(leaf, mesh, rules)
    return jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))


def _over_automatic(array: Any) -> Any:
    """Says that an input is laid out over Auto axes, as the program will be; moves nothing."""
    now = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(now, NamedSharding) or not isinstance(now.mesh, Mesh):
        return array
    automatic = _automatic(now.mesh)
    return (
        array
        if automatic == now.mesh
        else jax.device_put(array, NamedSharding(automatic, now.spec))
    )
