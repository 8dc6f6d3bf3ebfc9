# SPDX-License-Identifier: Apache-2.0
"""JAX's errors about values that are unknown while tracing.

They keep their type, for ``except``. Their text names the user's function, its arguments and
Variables instead of the flat lists that JAX was given (``name_inputs``), and says what to write
(``add_advice``). The engine of the lift knows this file by these two functions alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax

from shardax._core.graph.paths import format_path

if TYPE_CHECKING:
    from shardax._transforms.lift.engine import LiftedCall

TRACER_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_STATIC = "A setting that never changes can be static: `sx.jit(f, static_argnames=(...))`."
# By the class of the error; the first that it is an instance of.
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


InputForm = Literal["arguments", "leaves"]
"""How a program takes plain arguments: positional and named, or one list of leaves."""


def rewrite(error: Exception, change: Callable[[str], str]) -> None:
    """Changes the text of an error that has nothing but a text."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (change(error.args[0]),)


def add_advice(error: Exception) -> None:
    """Says in an error about a traced value what to write instead, once."""
    advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), "")

    def add(text: str) -> str:
        return text if advice in text else f"{text.rstrip()}\n{advice}{_STATIC}"

    rewrite(error, add)


def name_inputs(error: Exception, call: LiftedCall, form: InputForm, level: int) -> None:
    """Replaces JAX's names of a program's inputs in the text of an error.

    Args:
        error: The error.
        call: The call of the program.
        form: How the program takes plain arguments.
        level: What JAX's names of its inputs end with; see ``LiftedCall.program``.
    """
    if f"_{level}[" not in str(error):
        return

    names = _names_of_inputs(call, form, level)
    jax_name = re.compile(rf"\b(?:values|plain|named)_{level}(?:\[(?:\d+|'[^']*')\])+")

    def name_of(match: re.Match[str]) -> str:
        # ``plain_0[1]['x'][2]``: the longest beginning that is an input; what follows is kept.
        steps = re.findall(r"^\w+|\[[^\]]*\]", match.group())
        for end in range(len(steps), 0, -1):
            name = names.get("".join(steps[:end]))
            if name is not None:
                return name + "".join(steps[end:])
        return match.group()

    def change(text: str) -> str:
        text = re.sub(r"(?<= for )(?:jit|checkpoint / remat)(?=\. This)", f"sx.{call.name}", text)
        return jax_name.sub(name_of, text)

    rewrite(error, change)


def _names_of_inputs(call: LiftedCall, form: InputForm, level: int) -> dict[str, str]:
    """Returns the user's name of each input of a program, by the name that JAX has for it."""
    names = {
        f"values_{level}[{position}]": format_path(path).removeprefix(".")
        for position, path in enumerate(call.graph.flat.leaf_paths)
    }

    call_arguments = call.arguments
    steps: list[str] = []
    if form == "arguments":
        steps += [f"plain_{level}[{position}]" for position in range(len(call_arguments.plain))]
        steps += [f"named_{level}[{name!r}]" for name in call_arguments.plain_named]

    leaf_count = 0
    for index, (label, _, plain) in enumerate(call_arguments.parts(call.labels)):
        for keys, _ in jax.tree_util.tree_leaves_with_path(plain):
            below = jax.tree_util.keystr(keys)
            jax_name = f"{steps[index]}{below}" if steps else f"plain_{level}[{leaf_count}]"
            names[jax_name] = f"{label}{below}"
            leaf_count += 1
    return names
