# SPDX-License-Identifier: Apache-2.0
"""Operations of a compiled call, by Module.

They are counted in the program's text after all of XLA's passes, so they are those of one device. A
multiplication and the addition that follows are two; elementwise floating-point computations are
one for each element; moving, comparing and counting are none. Conditions of loops are not counted.

Instructions keep the names of the scopes (``jax.named_scope``) in which they were traced. So the
call is traced on an abstract copy of the model whose Modules open a scope in their methods, and an
instruction counts for every Module in whose methods it was traced.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh

from shardax import abstract, iter_modules, iter_variables, jit
from shardax._module_scopes import compiled_with_names, set_scope
from shardax.extend import AnyMesh, Path, RulesLike, format_path
from shardax.hlo.execution_counts import count_executions
from shardax.hlo.products import own_flops
from shardax.hlo.program import Computation, Instruction, Program, parse
from shardax.view.errors import ViewError

_FLOATING = re.compile(r"(?:f|bf|c)\d")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_SCOPE = re.compile(r"shardax_module_(\d+)")

_ELEMENTWISE = re.compile(
    "abs|add|atan2|cbrt|ceil|cosine|divide|erf|exponential|exponential-minus-one|floor|log|"
    "log-plus-one|logistic|maximum|minimum|multiply|negate|power|remainder|round-nearest-afz|"
    "round-nearest-even|rsqrt|sign|sine|sqrt|subtract|tan|tanh"
)


def module_operations(
    tree: object,
    inputs: Sequence[object],
    call: Callable[..., object] | None = None,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
) -> dict[Path, int]:
    """Counts one device's operations of a call, by Module."""
    # The whole is at the path ().
    planned = abstract(tree, mesh, rules)
    _check_call(planned, call)
    modules = list(iter_modules(planned))
    for number, (_, module) in enumerate(modules):
        set_scope(module, f"shardax_module_{number}")
    run = call or (lambda model, *arguments: model(*arguments))
    with compiled_with_names():
        compiled = jit(run).lower(planned, *inputs).compile()
    counts = dict.fromkeys([(), *(path for path, _ in modules)], 0)
    for name, count in operations(compiled.as_text()).items():
        paths = {modules[int(number)][0] for number in _SCOPE.findall(name)}
        for path in paths | {()}:
            counts[path] += count
    return counts


def _check_call(planned: object, call: Callable[..., object] | None) -> None:
    if call is None and not callable(planned):
        raise ViewError(
            f"A {type(planned).__name__} cannot be called, so there is no program whose operations "
            "to count. Say what to call: sx.view.table(model, inputs=(x,), "
            "call=lambda model, x: model.layer(x))."
        )
    for path, variable in iter_variables(planned):
        for leaf in jax.tree.leaves(variable.value):
            if isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh):
                raise ViewError(
                    f"The mesh of {format_path(path)} has no devices, and operations are counted "
                    "in a program that is compiled for some. Use a mesh of devices; virtual ones "
                    'will do: jax.config.update("jax_num_cpu_devices", 8) before anything else.'
                )


def operations(text: str) -> Counter[str]:
    """Counts the operations of a program's text by their origin."""
    program = parse(text)
    counts: Counter[str] = Counter()
    runs_by_name = count_executions(program, _own_operations).counts
    skipped = _conditions(program)
    for name, runs in runs_by_name.items():
        if name in skipped:
            continue
        inside = program.computations[name]
        for instruction in inside.instructions:
            count = _own_operations(inside, instruction)
            if count:
                counts[_origin(instruction, inside, program)] += runs * int(count)
    return counts


def _conditions(program: Program) -> set[str]:
    """Names of the computations of loop conditions."""
    instructions = [op for c in program.computations.values() for op in c.instructions]
    return program.reached(name for op in instructions for name in op.computations("condition"))


def _origin(instruction: Instruction, inside: Computation, program: Program) -> str:
    """The name of an instruction's origin."""
    # Instructions that the compiler rewrites may have no name; their first user still has one.
    if instruction.op_name:
        return instruction.op_name
    for user in inside.instructions:
        if instruction.name not in user.operands:
            continue
        if user.opcode != "fusion":
            return _origin(user, inside, program)
        fused = program.computations[user.called[0]]
        parameter = fused.parameters[user.operands.index(instruction.name)]
        return _origin(dataclasses.replace(parameter, op_name=""), fused, program)
    return ""


def _own_operations(inside: Computation, instruction: Instruction) -> float:
    """The operations of an instruction, without those of called computations."""
    size = math.prod(instruction.shapes[0].dims) if instruction.shapes else 1
    is_floating = bool(instruction.shapes and _FLOATING.match(instruction.shapes[0].dtype))
    operands = [op.shapes[0].dims for op in inside.operands(instruction) if op.shapes]
    if _ELEMENTWISE.fullmatch(instruction.opcode):
        return size * is_floating
    if instruction.opcode == "reduce" and operands:
        return math.prod(operands[0]) * is_floating

    if instruction.opcode == "reduce-window":
        window = _WINDOW.search(instruction.attributes)
        each_window = math.prod(map(int, window[1].split("x"))) if window else 0
        return size * each_window * is_floating
    if instruction.opcode in ("convolution", "custom-call") and len(operands) > 1:
        labels = _LABELS.search(instruction.attributes)
        if labels:  # padding counts like any input
            kernel = operands[1]
            return 2 * size * math.prod(kernel) // kernel[labels[1].index("o")]
    return own_flops(inside, instruction)
