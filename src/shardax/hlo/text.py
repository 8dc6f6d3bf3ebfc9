# SPDX-License-Identifier: Apache-2.0
"""Pieces of the text that HLO is printed in: brackets, quotes, shapes, attributes.

An *attribute* is what stands behind the operands of an instruction, as ``key=value``. A *shape* is
that of one array; results of several arrays are printed as nested tuples, and read flattened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardax.core.errors import HloReadError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[(){}\[\],]')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\[\]]*)\]")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_OPAQUE = frozenset({"token", "opaque"})
_BITS = {"pred": 8, "c64": 64, "c128": 128}
_BITS_OF_NAME = re.compile(r"(?:s|u|f|bf)(\d+)")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The type of one array.

    Attributes:
        dtype: As HLO names it (``"bf16"``, ``"s32"``, ``"pred"``, ``"token"``).
        dims: Sizes of its dimensions; of one that is bounded, the bound.

    Example:
        >>> ArrayShape("bf16", (2, 3)).bytes
        12
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding; of a token none."""
        return -(-self.size * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Returns the bits of an element of a dtype.

    Args:
        dtype: As HLO names it.

    Returns:
        Bits; 0 of a token.

    Raises:
        HloReadError: If there is no such dtype.
    """
    if dtype in _OPAQUE:
        return 0
    if dtype in _BITS:
        return _BITS[dtype]
    found = _BITS_OF_NAME.match(dtype)
    if found is None:
        raise HloReadError(
            f"The program holds an array of dtype {dtype!r}, which is not known, so its bytes "
            "cannot be counted."
        )
    return int(found[1])


def shapes(text: str) -> tuple[ArrayShape, ...]:
    """Returns the shapes of all arrays in the text of a type, flattened."""
    if "/*" in text:
        text = re.sub(r"/\*.*?\*/", "", text)
    return tuple(
        ArrayShape(dtype, tuple(int(each.strip("<= ")) for each in dims.split(",")) if dims else ())
        for dtype, dims in _ARRAY.findall(text)
    )


def balanced(text: str, start: int) -> int:
    """Finds the end of a bracket, outside quotes and comments.

    Args:
        text: Any text.
        start: Where an opening bracket stands.

    Returns:
        The position after the bracket that closes it, or -1 if none does.
    """
    depth = 0
    for found in _TOKEN.finditer(text, start):
        token = found[0]
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth -= 1
            if depth == 0:
                return found.end()
    return -1


def attribute(text: str, key: str) -> str | None:
    """Returns an attribute of an instruction.

    Args:
        text: Attributes of an instruction.
        key: Its name.

    Returns:
        The text of its value, with brackets and quotes; None if there is none.

    Example:
        >>> attribute("kind=kLoop, calls=%add.1, metadata={op_name='a, b'}", "calls")
        '%add.1'
    """
    start = 0
    for comma in _top_commas(text):
        if text.startswith(f"{key}=", start):
            return text[start + len(key) + 1 : comma]
        start = comma + 2
    return text[start + len(key) + 1 :].strip() if text.startswith(f"{key}=", start) else None


def op_name(text: str) -> str:
    """Returns the name of the traced operation in an instruction's metadata, or "".

    Args:
        text: The metadata, or more.

    Example:
        >>> op_name('metadata={op_name="jit(f)/add" stack_frame_id=1}')
        'jit(f)/add'
    """
    found = _OP_NAME.search(text)
    return _ESCAPED.sub(r"\1", found[1]) if found else ""


def split_top(text: str) -> list[str]:
    """Splits a list at its commas, outside brackets, quotes and comments.

    Args:
        text: The list, without the brackets around it.

    Returns:
        Its items, stripped; none of an empty text.
    """
    items, start = [], 0
    for comma in _top_commas(text):
        items.append(text[start:comma].strip())
        start = comma + 1
    items.append(text[start:].strip())
    return items if items != [""] else []


def _top_commas(text: str) -> Iterator[int]:
    """Yields where the commas are that are outside brackets, quotes and comments."""
    depth = 0
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth -= 1
        elif token == "," and depth == 0:
            yield found.start()
