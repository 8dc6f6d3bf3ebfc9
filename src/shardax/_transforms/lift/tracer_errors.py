# SPDX-License-Identifier: Apache-2.0
"""JAX's errors about values that are unknown while tracing.

They keep their type, for ``except``. Their text names the user's function, its arguments and
Variables instead of the flat lists that JAX was given, and says what to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import jax

from shardax._core.graph.paths import format_path

TRACER_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_STATIC = "A setting that never changes can be static: `sx.jit(f, static_argnames=(...))`."
# By the kind of error, the first that fits.
_ADVICE: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: (
        "Python's `if`, `while`, `and` and `or` run once, while tracing, when no array has a value "
        "yet. Choose inside the program: `jnp.where(x > 0, a, b)` for arrays, "
        "`sx.cond(x > 0, f, g, *operands)` for functions; repeat with `sx.while_loop`. "
    ),
    jax.errors.TracerIntegerConversionError: (
        "A Python integer is needed while tracing, when no array has a value yet. Repeat inside "
        "the program: `sx.fori_loop(0, n, body, x)`; take items by `jnp.take(items, i, axis=0)`. "
    ),
    jax.errors.TracerArrayConversionError: (
        "NumPy needs a value while tracing, when no array has one yet. Write `jnp.` for `np.`, or "
        "call NumPy from the program: "
        "`sx.host.host_function(f, out=jax.ShapeDtypeStruct(shape, dtype))(x)`. "
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "How many rows a mask chooses is not known while tracing. Keep the shape: "
        "`jnp.where(mask, x, 0)`. "
    ),
    jax.errors.ConcretizationTypeError: (
        "A Python number is needed while tracing, when no array has a value yet. Keep it an array "
        "(`x.astype(jnp.float32)` for `float(x)`), and read it outside. "
    ),
}


def rewrite(error: Exception, change: Callable[[str], str]) -> None:
    """Changes the text of an error that has nothing but a text."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (change(error.args[0]),)


def add_advice(error: Exception) -> None:
    """Says in an error about a traced value what to write instead."""
    advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), "")
    if advice:
        rewrite(
            error, lambda text: text if advice in text else f"{text.rstrip()}\n{advice}{_STATIC}"
        )


InputForm = Literal["arguments", "leaves", "pair"]
"""How a program takes plain arguments: positional and named, one list of leaves, or one tuple."""


def name_inputs(error: Exception, call: Any, form: InputForm, level: int) -> None:
    """Names arguments and Variables in JAX's text about a traced input."""
    if f"_{level}[" not in str(error):
        return
    paths = call.graph.flat.leaf_paths
    names = {
        f"values_{level}[{position}]": format_path(path).removeprefix(".")
        for position, path in enumerate(paths)
    }
    positional, named = call.arguments.plain, call.arguments.plain_named
    start = {"arguments": ("plain_{}", "named_{}"), "pair": ("plain_{}[0]", "plain_{}[1]")}
    count = 0
    for index, (label, part) in enumerate([*zip(call.labels, positional), *named.items()]):  # noqa: B905
        is_named = index >= len(positional)
        for keys, _ in jax.tree_util.tree_leaves_with_path(part):
            below = jax.tree_util.keystr(keys)
            if form == "leaves":
                key = f"plain_{level}[{count}]"
            else:
                holder = start[form][is_named].format(level)
                key = f"{holder}[{label!r}]{below}" if is_named else f"{holder}[{index}]{below}"
            names[key] = f"{label}{below}"
            count += 1
    place = re.compile(rf"\b(?:values|plain|named)_{level}(?:\[(?:\d+|'[^']*')\])+")

    def name_of(match: re.Match[str]) -> str:
        parts = re.findall(r"^\w+|\[[^\]]*\]", match.group())
        for end in range(len(parts), 0, -1):
            if (name := names.get("".join(parts[:end]))) is not None:
                return name + "".join(parts[end:])
        return match.group()

    def change(text: str) -> str:
        text = re.sub(r"(?<= for )(?:jit|checkpoint / remat)(?=\. This)", f"sx.{call.name}", text)
        return place.sub(name_of, text)

    rewrite(error, change)
