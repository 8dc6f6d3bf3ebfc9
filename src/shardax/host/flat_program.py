# SPDX-License-Identifier: Apache-2.0
"""Flat programs: a function over objects as a function of lists of arrays.

What an artifact has in place of objects is lists: the arrays that the function holds (*state*: the
values of its Variables, and the *constants*, arrays that it uses without their being a Variable's)
and those that a caller passes. The program returns the arrays of the result and the new values of
what it writes.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core._jax import jaxpr_as_fun
from shardax.core.errors import ExportError
from shardax.core.paths import Path, format_path
from shardax.host.array_form import ArrayForm, all_from_words, from_words, to_words
from shardax.host.json_trees import to_json
from shardax.host.refusals import (
    check_form_is_kept,
    check_program,
    check_random_state,
    check_record,
)
from shardax.host.signature import Input, StateEntry
from shardax.transforms.arguments import Arguments, Mixed, Plain
from shardax.transforms.lift import Graph
from shardax.transforms.liveness import used_inputs
from shardax.transforms.plan import Plan

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
        plan, graph, arguments = jit.prepare(args, kwargs)  # again: tracing finds hidden inputs
        record = traced._record
        check_record(record, plan.graphdef)
        self._jaxpr = check_program(traced.jaxpr)
        self._leaves = arguments.plain_leaves()[0]
        self.inputs = _inputs(plan, arguments)
        result, written, _, _ = traced._stage.out_info
        self.output = to_json(jax.tree.structure(result), ("result",))
        self.output_forms = tuple(map(ArrayForm.of, jax.tree.leaves(result)))
        values = graph.values()
        self._operands = _operands(plan, arguments, values)
        self._hoisted = [i for i, item in enumerate(self._jaxpr.consts) if jnp.ndim(item) > 0]
        constants = [self._jaxpr.consts[i] for i in self._hoisted]
        everything = [
            *_entries(graph, values, record.written, written),
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


def _operands(plan: Plan, arguments: Arguments, values: Sequence[Any]) -> list[int]:
    """Returns, for each input of a plan's program, its number among the values and the inputs."""
    leaves, treedef = jax.tree.flatten(values)
    count = len(leaves)
    numbered = copy.copy(arguments)
    inputs, tree = arguments.plain_leaves()
    plain, numbered.plain_named = tree.unflatten(range(count, count + len(inputs)))
    numbered.plain = tuple(plain)
    return jax.tree.leaves(plan.pack(treedef.unflatten(range(count)), numbered))


def _nothing(form: ArrayForm) -> Any:
    """Returns an array in place of one that the program does not read."""
    words = form.words()
    return from_words(jnp.zeros(words.shape, words.dtype), form)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    words = jax.eval_shape(to_words, value)
    form = ArrayForm.of(value)
    sharding = None if form.spec is None else form.sharding(value.sharding.mesh)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


def _inputs(plan: Plan, arguments: Arguments) -> tuple[Input, ...]:
    labels = [label for _, label in plan.layout.positional]
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
    if isinstance(template, Mixed) and (plain or template.roots):
        raise ExportError(
            f"The argument {name} holds arrays or containers together with Modules or static "
            "values. What callers pass and what the artifact holds must be apart: pass each Module "
            "as an argument of its own, or close over it."
        )
    return isinstance(template, Plain) and bool(jax.tree.leaves(plain))


def _entries(
    graph: Graph, values: Sequence[Any], written: Sequence[int], results: Sequence[Any]
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
