# SPDX-License-Identifier: Apache-2.0
"""Operations of a compiled program: how many it takes, and where in the source they come from.

Read from the program's text, as XLA prints it after all its passes, so what is counted is what one
device runs. A multiplication and the addition that follows are two operations; what is computed in
floating point element by element is one for each element, whatever it is; moving, comparing and
counting are none. Of a loop whose length the compiler does not know one iteration is counted, of
branches the longest.

Operations of each Module of a model, from the program that the compiler makes of a call.

The program's instructions keep the names of the scopes (``jax.named_scope``) in which they were
traced. So the call is traced on a copy of the model whose Modules open a scope when one of their
methods runs, and what an instruction takes counts for every Module in whose methods it was traced.
The copy is abstract: nothing is allocated, and nothing is run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardax._core.graph.paths import Path, format_path
from shardax._core.module import Module
from shardax._core.state.split_merge import iter_modules, iter_variables
from shardax._transforms.jit.jit import jit
from shardax._transforms.lift.engine import wraps
from shardax.hlo.execution_counts import branches, called, trip_count
from shardax.hlo.program import (
    Computation,
    Instruction,
    Program,
    parse,
)
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import RulesLike
from shardax.partition.specs import abstract
from shardax.view.pictures import OperationsError

# --- Operations ---

_FLOATING = re.compile(r"(?:f|bf|c)\d")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d",]*)')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")

_ELEMENTWISE = re.compile(
    "abs|add|atan2|cbrt|ceil|cosine|divide|erf|exponential|exponential-minus-one|floor|log|"
    "log-plus-one|logistic|maximum|minimum|multiply|negate|power|remainder|round-nearest-afz|"
    "round-nearest-even|rsqrt|sign|sine|sqrt|subtract|tan|tanh"
)

Shape = tuple[int, ...]


def operations(program: str) -> Counter[str]:
    """Counts the operations of a program by the names of what they come from.

    Args:
        program: Its text (``compiled.as_text()``).

    Returns:
        For each name (such as ``jit(f)/layer/dot_general``), how many operations one device runs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4))).compile()
        >>> operations(compiled.as_text()).total()  # 2 x 4 sums of 3 products
        48
    """
    read = parse(program)
    return _count(read, read.main)


def _count(program: Program, inside: Computation) -> Counter[str]:
    counts: Counter[str] = Counter()
    for each in inside.instructions:
        own = _own_operations(each, inside)
        if own:
            counts[_source(each, inside, program)] += own
        for found, times in _called(each, inside, program):
            for source, number in found.items():
                counts[source] += times * number
    return counts


def _source(each: Instruction, inside: Computation, program: Program) -> str:
    """What an instruction comes from.

    Some that the compiler rewrites lose their names; what uses their results first still says it.
    """
    if each.op_name:
        return each.op_name
    for user in inside.instructions:
        if each.name not in user.operands:
            continue
        if user.opcode != "fusion":
            return _source(user, inside, program)
        fused = program.computations[called(user)[0]]
        parameter = fused.parameters[user.operands.index(each.name)]
        return _source(dataclasses.replace(parameter, op_name=""), fused, program)
    return ""


def _called(
    each: Instruction, inside: Computation, program: Program
) -> Iterator[tuple[Counter[str], int]]:
    """Yields the counts of the computations that an instruction runs, and how often it does."""
    if each.opcode == "conditional":
        counts = [_count(program, program.computations[name]) for name in branches(each)]
        yield max(counts, key=lambda count: count.total()), 1
        return
    trips = trip_count(program, inside, each) if each.opcode == "while" else 1
    names = each.computations("body") if each.opcode == "while" else called(each)
    for name in names:
        yield _count(program, program.computations[name]), 1 if trips is None else trips


def _own_operations(each: Instruction, inside: Computation) -> int:
    """The operations of an instruction, without those of what it calls."""
    results = each.shapes[0].dims if each.shapes else ()
    is_floating = bool(each.shapes and _FLOATING.match(each.shapes[0].dtype))
    size = math.prod(results)
    operands = [found.shapes[0].dims for found in inside.operands(each) if found.shapes]
    if _ELEMENTWISE.fullmatch(each.opcode):
        return size * is_floating
    if each.opcode == "reduce" and operands:
        return math.prod(operands[0]) * is_floating
    if each.opcode == "reduce-window":
        window = _WINDOW.search(each.attributes)
        each_window = math.prod(map(int, window[1].split("x"))) if window else 0
        return size * each_window * is_floating
    if each.opcode in ("dot", "convolution", "custom-call") and len(operands) > 1:
        return 2 * size * _products(each.attributes, *operands[:2])
    return 0


def _products(rest: str, left: Shape, right: Shape) -> int:
    """How many products are summed for one element of a dot or convolution; 0 for neither."""
    labels, contracted = _LABELS.search(rest), _CONTRACTED.search(rest)
    if labels:
        return math.prod(right) // right[labels[1].index("o")]
    if contracted:
        return math.prod(left[int(d)] for d in re.findall(r"\d+", contracted[1]))
    return 0


# --- Module operations ---

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
