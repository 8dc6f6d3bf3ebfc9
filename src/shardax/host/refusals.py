# SPDX-License-Identifier: Apache-2.0
"""What cannot be exported, and how it is said.

An exported program is arrays in, arrays out, without the process that made it. So it has no
*callbacks* (calls of Python while it runs), cannot change the structure of a model, returns no
Modules, and its state keeps shapes and dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax

from shardax.core._jax import user_line
from shardax.core.errors import ExportError
from shardax.core.paths import Path, format_path
from shardax.core.structure import GraphDef, VariableDef, definition_paths
from shardax.core.variables import RngState
from shardax.host.array_form import ArrayForm
from shardax.transforms.lift import Graph, Record


def check_random_state(graph: Graph) -> None:
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


def check_record(record: Record, graphdef: GraphDef) -> None:
    """Raises if a call does more than return arrays and write Variables.

    Raises:
        ExportError: Names what it changes or returns.
    """
    if record.updates:
        paths = definition_paths(graphdef)
        changed = ", ".join(format_path(paths[position]) for position in sorted(record.updates))
        sown = {
            definition.type.__name__
            for definition in record.fresh
            if type(definition) is VariableDef
        }
        made = f" It makes new Variables ({', '.join(sorted(sown))})." if sown else ""
        raise ExportError(
            f"A call changes the structure of {changed}.{made} An exported program writes values "
            "only. Let a first call make what is missing (layers that sow or cache), then export; "
            "or export a function that does not change it."
        )
    if record.result is not None:
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
