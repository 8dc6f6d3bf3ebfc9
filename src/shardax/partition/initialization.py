# SPDX-License-Identifier: Apache-2.0
"""Initialisation of functional parameters by one program.

A *functional initializer* returns parameters in boxes. It is traced for shapes, the boxes give each
value its sharding, and one compiled program computes every value straight into its shards.

A program is found by its function, the types of its arguments, mesh and rules. Arrays, Modules and
Variables among the arguments are *inputs*; everything else, such as widths and other functions, is
*static*. Functions are held weakly, and a program is forgotten with any of its functions: they may
close over whole models. Static arguments that cannot be hashed make a program for one call.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardax._core.frames import is_eager
from shardax._core.graph.flatten import flatten_roots, is_object
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import Static
from shardax._core.object import Object
from shardax._transforms.errors import TransformError
from shardax._transforms.jit.abstract_eval import eval_shape
from shardax._transforms.jit.jit import jit
from shardax._transforms.lift.captures import Functions
from shardax.partition.context import axis_rules, resolve_rules
from shardax.partition.mesh import AnyMesh, check_devices, require_mesh
from shardax.partition.placement import shard
from shardax.partition.resolved import ResolvedRules
from shardax.partition.rules import Rules, RulesLike
from shardax.partition.specs import get_sharding

MAX_PROGRAMS = 64
"""The number of remembered programs; the least recently used is forgotten first."""


def initialise(
    fn: Callable[..., object],
    *args: object,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    **kwargs: object,
) -> Any:
    """Computes the results of a functional initializer straight into their shardings.

    It is compiled once: a call with the same function, mesh and rules, and arguments that differ in
    their numbers only, runs the same program, as with ``jax.jit``.

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
        raise TransformError(
            "initialise places arrays and cannot be called inside a program. Call it outside; or, "
            "inside, call the initializer itself and unbox(result), which constrains the values."
        )
    mesh = check_devices(mesh, "initialise", "get_sharding(jax.eval_shape(fn, ...), mesh)")
    auto_mesh = _with_auto_axes(mesh)
    call = InitializerCall(fn, args, kwargs)
    inputs = [_over_auto_axes(array) for array in call.inputs]

    with jax.set_mesh(auto_mesh), axis_rules(resolve_rules(rules)):
        program = _program_of(call, inputs, auto_mesh, rules)
        result = program.function.run(call, program.compiled, inputs)
    if auto_mesh == mesh:
        return result

    # Over the axes that were given, of the same devices: nothing is moved.
    def over_given_axes(leaf: PyTree) -> PyTree:
        if is_object(leaf):
            return shard(leaf, mesh, rules)
        return jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))

    return jax.tree.map(over_given_axes, result, is_leaf=is_object)


class RememberedProgram(NamedTuple):
    """The compiled program of an initializer."""

    function: CurrentCall
    compiled: Callable[[Any], Any]
    references: list[weakref.ref[Any]]  # to the functions with any of which it is forgotten


_programs: dict[Hashable, RememberedProgram] = {}

# With the programs go the callbacks of their weak references, which would compare keys while the
# interpreter takes the modules apart.
atexit.register(_programs.clear)


def _program_of(
    call: InitializerCall, inputs: Sequence[PyTree], mesh: Mesh, rules: RulesLike | None
) -> RememberedProgram:
    """Returns the program of a call, remembered or new."""
    functions: list[Any] = []
    key = call.key(functions, mesh, ResolvedRules(mesh, rules).rules)
    program = None if key is None else _programs.pop(key, None)
    if program is None:
        shardings = get_sharding(eval_shape(call.run, inputs), mesh, rules)
        function = CurrentCall(call)
        references = [
            weakref.ref(function, lambda _: _programs.pop(key, None)) for function in functions
        ]
        program = RememberedProgram(function, jit(function, out_shardings=shardings), references)

    if key is not None:
        _programs[key] = program  # as the last one used
        while len(_programs) > MAX_PROGRAMS:
            _programs.pop(next(iter(_programs)), None)
    return program


class InitializerCall:
    """A call of an initializer: its function, its inputs, and its static arguments."""

    def __init__(
        self, function: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> None:
        self.function = function
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        self.inputs = [leaf for leaf in self._leaves if _is_input(leaf)]

    def run(
        self, arguments: Sequence[object], function: Callable[..., PyTree] | None = None
    ) -> PyTree:
        """Returns the result of the function, or another one in its place, for other inputs."""
        remaining = iter(arguments)
        leaves = [next(remaining) if _is_input(leaf) else leaf for leaf in self._leaves]
        args, kwargs = self._treedef.unflatten(leaves)
        return (function or self.function)(*args, **kwargs)

    def key(self, functions: list[Any], mesh: Mesh, rules: Rules) -> Hashable | None:
        """Returns the key of the program, or None if the program is for this call alone.

        Args:
            functions: Gets the functions that are in the key by identity, and must outlive the
                program.
            mesh: The mesh of the program.
            rules: The rules over it.
        """
        owner = getattr(self.function, "__self__", None)
        if isinstance(self.function, Object) or isinstance(owner, Object):
            return None
        static = [self.function, *(leaf for leaf in self._leaves if not _is_input(leaf))]
        try:
            static_key = tuple(_key_of(item, functions) for item in static)
            key = (self._treedef, static_key, _types_of(self.inputs), mesh, rules)
            hash(key)
        except TypeError:  # something has no hash, or no weak references
            return None
        return key


def _key_of(item: object, functions: list[object]) -> Hashable:
    """Returns a static value as part of a key."""
    if isinstance(item, types.MethodType):
        return _key_of(item.__func__, functions), _identity(item.__self__, functions)
    if callable(item) and type(item).__hash__ is object.__hash__:
        return _identity(item, functions)
    return Static(item)


def _identity(item: object, functions: list[object]) -> Hashable:
    """Returns what is equal for no other object, while this one is alive."""
    weakref.ref(item)  # raises if there are none
    functions.append(item)
    return id, id(item)


class CurrentCall(Functions):
    """The function of a program, for any call of one initializer."""

    __signature__ = inspect.Signature(
        [inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )

    def __init__(self, call: InitializerCall) -> None:
        self._local = threading.local()
        self._function = _weakly(call.function)

    @property
    def functions(self) -> tuple[Callable[..., PyTree], ...]:
        """See ``Functions.functions``."""
        return (self._function(),)

    def with_functions(
        self, functions: tuple[Callable[..., PyTree], ...]
    ) -> Callable[[Sequence[object]], PyTree]:
        """See ``Functions.with_functions``."""
        return lambda inputs: self._local.call.run(inputs, functions[0])

    def __call__(self, inputs: Sequence[object]) -> PyTree:
        return self._local.call.run(inputs)

    def run(
        self, call: InitializerCall, compiled: Callable[[Any], object], inputs: object
    ) -> PyTree:
        """Runs the compiled program for a call."""
        self._local.call = call
        try:
            return compiled(inputs)
        finally:
            self._local.call = None


def _weakly(function: object) -> Callable[[], Any]:
    """Returns a weak reference to a function or method."""
    if isinstance(function, types.MethodType):
        return weakref.WeakMethod(function)
    try:
        return weakref.ref(function)
    except TypeError:  # a kind of callable without weak references, which closes over nothing
        return lambda: function


def _is_input(leaf: object) -> bool:
    """Whether an argument is an input of the program, and not part of it."""
    return isinstance(leaf, (jax.Array, np.ndarray)) or is_object(leaf)


def _types_of(inputs: Sequence[object]) -> Hashable:
    """Returns the structures of objects, and shapes and dtypes of all arrays."""
    flat = flatten_roots([item for item in inputs if isinstance(item, Object)])
    values = [variable._value for variable in flat.leaves]
    arrays = [item for item in inputs if not isinstance(item, Object)]
    leaves, treedef = jax.tree.flatten((values, arrays))
    return flat.graphdef, treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


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
