# SPDX-License-Identifier: Apache-2.0
"""Operations of each Module of a model, from the program that the compiler makes of a call.

The program's instructions keep the names of the scopes (``jax.named_scope``) in which they were
traced. So the call is traced on a copy of the model whose Modules open a scope when one of their
methods runs, and what an instruction takes counts for every Module in whose methods it was traced.
The copy is abstract: nothing is allocated, and nothing is run.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardax.core.errors import OperationsError
from shardax.core.functional import iter_modules, iter_variables
from shardax.core.modules import Module
from shardax.core.paths import Path, format_path
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import RulesLike
from shardax.partition.specs import abstract
from shardax.transforms.call import wraps
from shardax.transforms.jit import jit
from shardax.view.operations import operations

_SCOPE = re.compile(r"shardax_module_(\d+)")


def module_operations(
    tree: Any,
    inputs: Sequence[Any],
    call: Callable[..., Any] | None = None,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
) -> dict[Path, int]:
    """Counts what the program of one call takes, by Module.

    Args:
        tree: A Module or pytree of Modules.
        inputs: The arguments of the call: arrays, or ``jax.ShapeDtypeStruct``.
        call: What is called, as ``call(tree, *inputs)``; by default the Module itself.
        mesh: The mesh over which the model is laid out; None for how it is.
        rules: Rules; None for those in scope.

    Returns:
        For the path of each Module, the operations that one device runs for it and what it calls,
        () being the whole. See ``shardax.view.operations`` for what is an operation.

    Raises:
        OperationsError: If there is nothing to call, or the mesh has no devices to compile for.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> mlp = sx.nn.MLP(2, 3, rngs=sx.Rngs(0))
        >>> counts = module_operations(mlp, [jnp.ones((1, 2))])
        >>> counts[("up",)], counts[("down",)]
        (12, 12)
    """
    planned = abstract(tree, mesh, rules)
    _check(planned, call)
    paths = [path for path, _ in iter_modules(planned)]
    for number, (_, module) in enumerate(list(iter_modules(planned))):
        module.shardax_module_number = number
        object.__setattr__(module, "__class__", _scoped(type(module)))
    run = call or (lambda model, *arguments: model(*arguments))
    compiled = jit(run).lower(planned, *inputs).compile()
    counts = dict.fromkeys([(), *paths], 0)
    for name, count in operations(compiled.as_text()).items():
        known = {paths[int(number)] for number in _SCOPE.findall(name)}
        for path in known | {()}:
            counts[path] += count
    return counts


def _check(planned: Any, call: Callable[..., Any] | None) -> None:
    if call is None and not callable(planned):
        raise OperationsError(
            f"A {type(planned).__name__} cannot be called, so there is no program whose operations "
            "to count. Say what to call: sx.view.table(model, inputs=(x,), "
            "call=lambda model, x: model.layer(x))."
        )
    for path, variable in iter_variables(planned):
        for leaf in jax.tree.leaves(variable.value):
            if isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh):
                raise OperationsError(
                    f"The mesh of {format_path(path)} has no devices, and operations are counted "
                    "in a program that is compiled for some. Use a mesh of devices; virtual ones "
                    'will do: jax.config.update("jax_num_cpu_devices", 8) before anything else.'
                )


@functools.cache
def _scoped(kind: type[Module]) -> type[Module]:
    """Returns the class of Modules that open a scope in their methods; its instances change to it.

    There is one for each class, for good: JAX keeps the classes of its pytrees.
    """
    methods = {
        name: _in_scope(method)
        for base in reversed(kind.__mro__)
        if issubclass(base, Module) and base is not Module
        for name, method in vars(base).items()
        if isinstance(method, types.FunctionType) and (name == "__call__" or name[0] != "_")
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), methods | names)


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(f"shardax_module_{self.shardax_module_number}"):
            return method(self, *args, **kwargs)

    return call
