# SPDX-License-Identifier: Apache-2.0
"""Flat programs: a function over objects as a function of lists of arrays.

What an artifact has in place of objects is lists: the arrays that the function holds (*state*: the
values of its Variables, and the *constants*, arrays that it uses without their being a Variable's)
and those that a caller passes. The program returns the arrays of the result and the new values of
what it writes.

What cannot be exported, and how it is said.

An exported program is arrays in, arrays out, without the process that made it. So it has no
*callbacks* (calls of Python while it runs), cannot change the structure of a model, returns no
Modules, and its state keeps shapes and dtypes.
"""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core._jax import jaxpr_as_fun, user_line
from shardax._core.graph.flatten import GraphDef, VariableDef, definition_paths
from shardax._core.graph.paths import Path, format_path
from shardax._core.variable import RngState
from shardax._transforms.grad.custom_vjp import used_inputs
from shardax._transforms.jit.specialization import Specialization
from shardax._transforms.lift.arguments import PlainTemplate, SplitArguments, TreeTemplate
from shardax._transforms.lift.engine import Effects, InputGraph
from shardax.host.errors import ExportError
from shardax.host.export.signature import (
    ArrayForm,
    Input,
    StateEntry,
    all_from_words,
    from_words,
    to_json,
    to_words,
)

# --- Refusals ---


def check_random_state(graph: InputGraph) -> None:
    """Raises if a random stream has no seed: it is only a shape.

    Raises:
        ExportError: Names the streams.
    """
    unseeded = [
        format_path(path)
        for path, leaf in zip(graph.flat.leaf_paths, graph.leaves, strict=True)
        if isinstance(leaf, RngState) and leaf.is_abstract
    ]
    if unseeded:
        raise ExportError(
            f"Random state without a seed: {', '.join(unseeded)} are shapes only, and whoever "
            "loads the artifact could not draw. Seed the model first: build it with sx.Rngs(0), or "
            "restore a checkpoint into it."
        )


def check_effects(effects: Effects, graphdef: GraphDef) -> None:
    """Raises if a call does more than return arrays and write Variables.

    Raises:
        ExportError: Names what it changes or returns.
    """
    if effects.updates:
        paths = definition_paths(graphdef)
        changed = ", ".join(format_path(paths[position]) for position in sorted(effects.updates))
        sown = {
            definition.type.__name__
            for definition in effects.fresh
            if type(definition) is VariableDef
        }
        made = f" It makes new Variables ({', '.join(sorted(sown))})." if sown else ""
        raise ExportError(
            f"A call changes the structure of {changed}.{made} An exported program writes values "
            "only. Let a first call make what is missing (layers that sow or cache), then export; "
            "or export a function that does not change it."
        )
    if effects.result is not None:
        raise ExportError(
            "The function returns Modules or Variables. An exported program returns arrays: return "
            "their values, variable.value or sx.state(module).to_pure_dict()."
        )


def check_form_is_kept(path: Path, before: Any, after: Any) -> None:
    """Raises if what a call writes into a Variable has another form than what was there.

    Raises:
        ExportError: Names the Variable and both forms.
    """
    forms = [
        [str(ArrayForm.of(leaf)) for leaf in jax.tree.leaves(value)] for value in (before, after)
    ]
    if forms[0] != forms[1] or jax.tree.structure(before) != jax.tree.structure(after):
        was, becomes = (", ".join(each) for each in forms)
        raise ExportError(
            f"A call turns the Variable at {format_path(path)} from {was} into {becomes}. The "
            "state of an artifact keeps its form, so that it can be called again. Make it the "
            "right form before (a cache of the largest size), or pass and return it instead of "
            "holding it."
        )


def check_program(jaxpr: Any) -> Any:
    """Raises if a program calls Python, or has other effects; returns it.

    Raises:
        ExportError: Lists the callbacks, with the lines that made them.
    """
    found = list(dict.fromkeys(_callbacks(jaxpr.jaxpr)))
    if found:
        listed = "".join(f"\n  {item}" for item in found)
        raise ExportError(
            f"The function calls Python while it runs, which whoever loads the artifact does not "
            f"have:{listed}\nTake it out of what is exported (debug prints, progress bars), or "
            "compute it with JAX. A function of the host can be called before or after the "
            "loaded one."
        )
    if jaxpr.effects:
        shown = ", ".join(sorted(map(str, jaxpr.effects)))
        raise ExportError(
            f"The function has effects besides its result ({shown}), such as reading or writing a "
            "jax.Ref. Hold the value in a Variable instead: sx.Variable(value)."
        )
    return jaxpr


def _callbacks(jaxpr: Any, around: str = "") -> Iterator[str]:
    """Yields what calls Python in a program; ``around`` is the line of the call that it is in."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        line = user_line(equation) or around
        if "callback" in name or name == "debug_print":
            yield _described(equation, name) + (f" at {line}" if line else "")
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _callbacks(inner, line)


def _described(equation: Any, name: str) -> str:
    if name == "debug_print":
        return f"jax.debug.print({equation.params.get('fmt', '')!r}, ...)"
    # The text of a callback has the function's name: <function log at 0x...>
    names = re.findall(r"<(?:bound method|function) ([^ ]+)", str(equation.params.get("callback")))
    own = [item for item in names if "<locals>" not in item]
    return name + (f" of {own[0]}" if own else "")


# --- Flat program ---

CONSTANT = "Constant"
"""What a signature calls the type of an array that is not a Variable's."""


class FlatProgram:
    """A function over objects, traced for some arguments.

    Args:
        jit: The function, as a ``Jit``.
        args: Positional arguments; shapes for the arrays that callers will pass.
        kwargs: Keyword arguments, likewise.

    Attributes:
        inputs: What callers pass.
        state: What the function holds.
        values: The arrays of ``state``.
        output: Pytree of the result, as JSON.
        output_forms: Its arrays.

    Raises:
        ExportError: If the function does something that an exported program cannot.
    """

    def __init__(self, jit: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        check_random_state(jit.prepare(args, kwargs)[1])
        traced = jit.trace(*args, **kwargs)
        specialization, graph, arguments = jit.prepare(
            args, kwargs
        )  # again: tracing finds hidden inputs
        effects = traced._effects
        check_effects(effects, specialization.graphdef)
        self._jaxpr = check_program(traced.jaxpr)
        self._leaves = arguments.plain_leaves()[0]
        self.inputs = _inputs(specialization, arguments)
        result, written, _, _ = traced._stage.out_info
        self.output = to_json(jax.tree.structure(result), ("result",))
        self.output_forms = tuple(map(ArrayForm.of, jax.tree.leaves(result)))
        values = graph.values()
        self._operands = _operands(specialization, arguments, values)
        self._hoisted = [i for i, item in enumerate(self._jaxpr.consts) if jnp.ndim(item) > 0]
        constants = [self._jaxpr.consts[i] for i in self._hoisted]
        everything = [
            *_entries(graph, values, effects.written, written),
            *(
                StateEntry(f"constants[{i}]", ArrayForm.of(constant), CONSTANT, None, False)
                for i, constant in enumerate(constants)
            ),
        ]
        self._forms = [entry.form for entry in everything]
        self._held = self._used(everything)
        self.state = _with_unique_paths([everything[i] for i in self._held])
        arrays = [*jax.tree.leaves(values), *constants]
        self.values = [arrays[i] for i in self._held]

    def _used(self, entries: Sequence[StateEntry]) -> list[int]:
        """Returns the positions of the arrays that a call reads or writes."""
        flags = zip(self._operands, used_inputs(self._jaxpr.jaxpr), strict=True)
        read = {operand for operand, is_used in flags if is_used}
        return [
            i
            for i, entry in enumerate(entries)
            if i in read or entry.written or entry.type == CONSTANT
        ]

    def __call__(self, state: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the program, usually on tracers.

        Args:
            state: Words of what ``self.state`` says.
            inputs: Words of the inputs' arrays.

        Returns:
            (arrays of the result, new values of the written state), as words.
        """
        given = dict(zip(self._held, state, strict=True))
        held = [
            _nothing(form) if i not in given else from_words(given[i], form)
            for i, form in enumerate(self._forms)
        ]
        forms = [form for item in self.inputs for form in item.forms]
        count = len(held) - len(self._hoisted)
        consts = list(self._jaxpr.consts)
        for i, constant in zip(self._hoisted, held[count:], strict=True):
            consts[i] = constant
        operands = [*held[:count], *all_from_words(inputs, forms)]
        flat = [operands[i] for i in self._operands]
        words = [to_words(item) for item in jaxpr_as_fun(self._jaxpr.replace(consts=consts))(*flat)]
        return words[: len(self.output_forms)], words[len(self.output_forms) :]

    def shapes(self) -> tuple[list[Any], list[Any]]:
        """Returns what ``jax.export`` shall trace it for: (state, inputs) as shapes of words."""
        state = [_shape(value) for value in self.values]
        return state, [_shape(leaf) for leaf in self._leaves]


def _operands(
    specialization: Specialization, arguments: SplitArguments, values: Sequence[Any]
) -> list[int]:
    """Returns, for each input of a specialization's program, its number among the values and the inputs."""
    leaves, treedef = jax.tree.flatten(values)
    count = len(leaves)
    numbered = copy.copy(arguments)
    inputs, tree = arguments.plain_leaves()
    plain, numbered.plain_named = tree.unflatten(range(count, count + len(inputs)))
    numbered.plain = tuple(plain)
    return jax.tree.leaves(specialization.pack(treedef.unflatten(range(count)), numbered))


def _nothing(form: ArrayForm) -> Any:
    """Returns an array in place of one that the program does not read."""
    words = form.words()
    return from_words(jnp.zeros(words.shape, words.dtype), form)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    words = jax.eval_shape(to_words, value)
    form = ArrayForm.of(value)
    sharding = None if form.spec is None else form.sharding(value.sharding.mesh)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


def _inputs(specialization: Specialization, arguments: SplitArguments) -> tuple[Input, ...]:
    labels = [label for _, label in specialization.positions.positional]
    given = [
        *zip(labels, arguments.templates, arguments.plain, [False] * len(labels), strict=True),
        *((name, t, arguments.plain_named[name], True) for name, t in arguments.named),
    ]
    return tuple(
        _input(name, plain, by_name)
        for name, template, plain, by_name in given
        if _is_passed(name, template, plain)
    )


def _input(name: str, plain: Any, by_name: bool) -> Input:
    leaves, treedef = jax.tree.flatten(plain)
    return Input(name, by_name, to_json(treedef, (name,)), tuple(map(ArrayForm.of, leaves)))


def _is_passed(name: str, template: Any, plain: Any) -> bool:
    """Whether callers pass an argument: what has no arrays of its own belongs to the artifact."""
    if isinstance(template, TreeTemplate) and (plain or template.roots):
        raise ExportError(
            f"The argument {name} holds arrays or containers together with Modules or static "
            "values. What callers pass and what the artifact holds must be apart: pass each Module "
            "as an argument of its own, or close over it."
        )
    return isinstance(template, PlainTemplate) and bool(jax.tree.leaves(plain))


def _entries(
    graph: InputGraph, values: Sequence[Any], written: Sequence[int], results: Sequence[Any]
) -> Iterator[StateEntry]:
    """Describes the arrays of a graph's Variables.

    Args:
        graph: The objects that the function uses.
        values: The value of each Variable.
        written: Positions of those that a call writes.
        results: What it writes, as shapes.
    """
    after = dict(zip(written, results, strict=True))
    paths = _without_self(graph.flat.leaf_paths)
    for position, (path, leaf, value) in enumerate(zip(paths, graph.leaves, values, strict=True)):
        if position in after:
            check_form_is_kept(path, value, after[position])
        for keys, array in jax.tree_util.tree_leaves_with_path(value):
            text = format_path(path) + jax.tree_util.keystr(keys)
            kind = type(leaf).__name__
            yield StateEntry(text, ArrayForm.of(array), kind, leaf.axes, position in after)


def _without_self(paths: Sequence[Path]) -> Sequence[Path]:
    """A compiled method has its object as its first argument; paths begin below it."""
    return [path[1:] for path in paths] if all(p[:1] == ("self",) for p in paths) else paths


def _with_unique_paths(state: Sequence[StateEntry]) -> list[StateEntry]:
    """Gives entries of one path different names; a closure and an argument may agree in theirs."""
    counts: collections.Counter[str] = collections.Counter()
    named = []
    for entry in state:
        counts[entry.path] += 1
        suffix = "" if counts[entry.path] == 1 else f"#{counts[entry.path]}"
        named.append(entry._replace(path=entry.path + suffix))
    return named
