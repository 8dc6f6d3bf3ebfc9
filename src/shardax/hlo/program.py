# SPDX-License-Identifier: Apache-2.0
"""Parsed compiled programs: computations and their instructions.

A *program* is what a compiler prints (``compiled.as_text()``): it holds *computations*, one of
which is the entry, and these hold *instructions* in the order in which they run, if the program is
scheduled. An instruction has an *opcode* (``"dot"``), *operands* (names of others in its
computation) and *attributes* (``key=value`` after the operands), which stay text here. XLA's CPU,
GPU and TPU compilers print one format with different layouts, attributes and names. A *shape* is
that of one array; tuples of results are flattened.

XLA of JAX 0.12 prints an element of a tuple where it is taken (``%loop#1``) in place of a
``get-tuple-element`` before. Such an element is read as that instruction, called ``loop#1``.

A program lists at its top the *frames* of Python's stack in which its operations were traced. The
*source* of an instruction is the innermost line of model code: code of users, and of
``shardax.models``, which is read and changed like a user's. Code of JAX, of the layers and of
optimizers is *library* code, and is the source of nothing unless the stack holds nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardax.errors import ShardaxError


class CompilerFailedError(ShardaxError, RuntimeError):
    """A compiler failed for another reason than a lack of memory."""


class HloReadError(ShardaxError, ValueError):
    """A compiled program holds something unknown; names the instruction.

    It is an error because what was left out would be counted as nothing.
    """


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
    """Returns the bits of an element of a dtype."""
    if dtype in _OPAQUE:
        return 0
    if dtype in _BITS:
        return _BITS[dtype]
    match = _BITS_OF_NAME.match(dtype)
    if match is None:
        raise HloReadError(
            f"The program holds an array of dtype {dtype!r}, which is not known, so its bytes "
            "cannot be counted."
        )
    return int(match[1])


def shapes(text: str) -> tuple[ArrayShape, ...]:
    """Returns the shapes of all arrays in a type, flattened."""
    if "/*" in text:
        text = re.sub(r"/\*.*?\*/", "", text)
    return tuple(
        ArrayShape(dtype, tuple(int(size.strip("<= ")) for size in dims.split(",")) if dims else ())
        for dtype, dims in _ARRAY.findall(text)
    )


def balanced(text: str, start: int) -> int:
    """Returns the position after a closing bracket, or -1."""
    depth = 0
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth -= 1
            if depth == 0:
                return match.end()
    return -1


def attribute(text: str, key: str) -> str | None:
    """Returns the value of an attribute, with brackets and quotes."""
    start = 0
    for comma in _top_commas(text):
        if text.startswith(f"{key}=", start):
            return text[start + len(key) + 1 : comma]
        start = comma + 2
    return text[start + len(key) + 1 :].strip() if text.startswith(f"{key}=", start) else None


def op_name(text: str) -> str:
    """Returns the traced operation in an instruction's metadata, or ""."""
    match = _OP_NAME.search(text)
    return _ESCAPED.sub(r"\1", match[1]) if match else ""


def _items(text: str) -> Iterator[str]:
    """Yields the parts between top commas."""
    start = 0
    for comma in (*_top_commas(text), len(text)):
        yield text[start:comma]
        start = comma + 1


def _top_commas(text: str) -> Iterator[int]:
    """Yields the places of commas outside brackets, quotes and comments."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth -= 1
        elif token == "," and depth == 0:
            yield match.start()


_ROW = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages|src|git)/"
    r"(?P<path>(?:jax|jaxlib|shardax|optax|flax|chex)/.*\.py)$"
)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class _Frames:
    """Sources of instructions by their innermost frames."""

    def __init__(self, tables: dict[str, list[str]]) -> None:
        rows = {
            name: {int(row[1]): row[2] for row in map(_ROW.match, tables.get(name, [])) if row}
            for name in _TABLES
        }
        files = {number: text.strip('"') for number, text in rows["FileNames"].items()}
        places = {number: _fields(text) for number, text in rows["FileLocations"].items()}
        frames = {number: _fields(text) for number, text in rows["StackFrames"].items()}
        parents = {number: frame.get("parent_frame_id", 0) for number, frame in frames.items()}
        # Compilers of 2025 and 2026 print the parent's number plus one, so that the first frame,
        # which has none, seems to be its own parent.
        offset = 1 if any(number == parent for number, parent in parents.items()) else 0
        self._parents = {number: parent - offset for number, parent in parents.items()}
        self._places = {}
        for number, frame in frames.items():
            place = places.get(frame.get("file_location_id", 0), {})
            self._places[number] = (files.get(place.get("file_name_id", 0), ""), place.get("line"))
        self._sources: dict[int, str] = {}

    def source(self, frame: int) -> str:
        """Returns the source, such as ``"model.py:12"``; "" of an unknown frame."""
        if frame not in self._sources:
            stack, seen, frame_id = [], set(), frame
            while frame_id in self._places and frame_id not in seen:
                seen.add(frame_id)
                file, line = self._places[frame_id]
                if file and line is not None:
                    stack.append((file, line))
                frame_id = self._parents[frame_id]
            user_places = [place for place in stack if not _is_library(place[0])]
            best = user_places or [place for place in stack if "/shardax/" in place[0]] or stack
            self._sources[frame] = _line_name(*best[0]) if best else ""
        return self._sources[frame]


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(text)}


def _is_library(file: str) -> bool:
    match = _LIBRARY.search(file)
    return match is not None and not match["path"].startswith("shardax/models/")


def _line_name(file: str, line: int) -> str:
    """A line after its file's name, or its path in a library."""
    match = _LIBRARY.search(file)
    return f"{match['path'] if match else file.rpartition('/')[2]}:{line}"


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" *([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_METADATA = re.compile(r'\bmetadata=\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"\bsource_line=(\d+)")
# Where all that runs meanwhile is a call, it is printed in short.
_IN_FULL = {f"call-{stage}": f"async-{stage}" for stage in ("start", "update", "done")}
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_REPLICAS = re.compile(r"\breplica_count=(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Its name in the computation.
        opcode: What it does (``"all-reduce"``).
        shapes: Types of its results, flattened.
        operands: Names of what it takes; of a parameter its number.
        attributes: The text after the operands.
        op_name: The traced operation that it comes from (``jit(f)/dot_general``), or "".
        source: The line of model code that it comes from (``model.py:12``), or "".
        is_root: Whether its result is that of its computation.
        literal: Of a constant its value as text, else "".

    Example:
        >>> each = Instruction("a.1", "add", (ArrayShape("f32", ()),), ("x", "y"), "kind=loop")
        >>> each.attribute("kind"), each.bytes
        ('loop', 4)
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: str
    op_name: str = ""
    source: str = ""
    is_root: bool = False
    literal: str = ""

    def attribute(self, key: str) -> str | None:
        """Returns the text of an attribute, such as ``"%add.1"`` of ``to_apply=%add.1``."""
        return attribute(self.attributes, key) if f"{key}=" in self.attributes else None

    def computations(self, *keys: str) -> tuple[str, ...]:
        """Returns the names of computations in attributes.

        Args:
            *keys: Names of attributes, such as ``"calls"`` or ``"branch_computations"``.
        """
        values = [self.attribute(key) or "" for key in keys]
        return tuple(
            name.strip().removeprefix("%")
            for value in values
            for name in value.strip("{}").split(",")
            if name.strip()
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the instructions behind its operands."""
        return () if self.opcode in ("parameter", "constant") else self.operands

    @property
    def element(self) -> int:
        """Of a ``get-tuple-element`` the number of the element."""
        return int(self.attribute("index") or 0)

    @property
    def call_target(self) -> str:
        """The name of a ``custom-call``'s target."""
        return (self.attribute("custom_call_target") or "").strip('"')

    @property
    def bytes(self) -> int:
        """Bytes of all its results."""
        return sum(shape.bytes for shape in self.shapes)


@dataclass(frozen=True)
class Computation:
    """A computation of a module: instructions in order.

    Attributes:
        name: Its name in the program.
        instructions: In the program's order.

    Example:
        >>> x = Instruction("x", "parameter", (), ("0",), "")
        >>> y = Instruction("y", "negate", (), ("x",), "", is_root=True)
        >>> inside = Computation("main", (x, y))
        >>> inside.root.name, [each.name for each in inside.operands(y)]
        ('y', ['x'])
    """

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by name."""
        return {op.name: op for op in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction with the computation's result."""
        return next((op for op in self.instructions if op.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Its parameters by number."""
        return {int(i.operands[0]): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Users of each instruction's result, in order."""
        users: dict[str, list[Instruction]] = {op.name: [] for op in self.instructions}
        for user in self.instructions:
            for name in dict.fromkeys(user.inputs):
                users[name].append(user)
        return {name: tuple(user_ops) for name, user_ops in users.items()}

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions behind the operands of one."""
        return tuple(self.by_name[name] for name in instruction.operands if name in self.by_name)


@dataclass(frozen=True)
class Program:
    r"""A compiled program.

    Attributes:
        computations: By name.
        entry: Name of the computation that runs first.
        header: First line of the text, with what holds for the whole program.

    Example:
        >>> text = "HloModule f, num_partitions=8\n\nENTRY %f () -> s32[] {\n"
        >>> program = parse(text + "  ROOT %one = s32[] constant(1)\n}\n")
        >>> program.device_count, program.main.root.literal
        (8, '1')
    """

    computations: Mapping[str, Computation]
    entry: str
    header: str

    @property
    def main(self) -> Computation:
        """The entry computation."""
        return self.computations[self.entry]

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Lines of model code by traced operation."""
        return {
            op.op_name: op.source
            for inside in self.computations.values()
            for op in inside.instructions
            if op.op_name and op.source
        }

    @property
    def device_count(self) -> int:
        """Number of devices of the program."""
        counts = [pattern.search(self.header) for pattern in (_PARTITIONS, _REPLICAS)]
        return math.prod(int(count[1]) for count in counts if count)


def parse(text: str) -> Program:
    """Reads the text of a program.

    Args:
        text: As printed by XLA's CPU, GPU or TPU compiler (``compiled.as_text()``), or dumped by
            XLA after one of its passes.

    Returns:
        The program.

    Raises:
        HloReadError: If the text is not a whole program, or a line of it cannot be read.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4))).compile()
        >>> program = parse(compiled.as_text())
        >>> [(each.opcode, each.shapes[0].dims) for each in program.main.instructions]
        [('parameter', (2, 3)), ('parameter', (3, 4)), ('dot', (2, 4))]
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if start is None:
        raise HloReadError(
            "The text holds no line that starts with 'HloModule', so it is no compiled program. "
            "Pass what compiled.as_text() returns."
        )
    tables: dict[str, list[str]] = {}
    rows: list[str] | None = None
    first = start + 1
    while first < len(lines):  # tables of stack frames, up to the first computation
        line = lines[first]
        if line in _TABLES:
            rows = tables[line] = []
        elif rows is not None and line[:1].isdigit():
            rows.append(line)
        elif line.strip():
            break
        first += 1
    frames = _Frames(tables)
    computations: dict[str, Computation] = {}
    entry = ""
    name: str | None = None
    instructions: list[Instruction] = []
    types: dict[str, str] = {}  # of results, by name
    for number, line in _instruction_lines(lines, first):
        if name is None:
            head = _COMPUTATION.match(line)
            if head is None:
                raise _unread("the head of a computation", line, number)
            name, instructions, types = head[2], [], {}
            entry = name if head[1] else entry
        elif not line.startswith("}"):
            instruction, text = _instruction(line, number, frames)
            for element in instruction.inputs:
                instructions += _elements(element, types, line, number)
            instructions.append(instruction)
            types[instruction.name] = text
        elif not instructions:
            raise HloReadError(f"Computation {name!r}, closed in line {number}, is empty.")
        else:
            computations[name] = Computation(name, tuple(_begun_with_operands(instructions)))
            _check_whole(computations[name])
            name = None
    if name is not None:
        raise HloReadError(f"The text ends inside computation {name!r}; it is not a whole program.")
    if entry not in computations:
        raise HloReadError("The text holds no computation marked ENTRY; it is not whole.")
    return Program(computations, entry, lines[start])


_SETTINGS = ("frontend_attributes={", "backend_config={")  # in the order of the text


def _instruction_lines(lines: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    """Yields numbered lines, a kernel's settings joined to its first."""
    number = first
    while number < len(lines):
        start, line = number + 1, lines[number]
        number += 1
        # Settings may be JSON of several lines, such as those of Pallas's kernels with a cost.
        for settings in _SETTINGS:
            place = line.find(settings)
            if place >= 0 and balanced(line, place) < 0:
                parts = [line]
                while number < len(lines) and balanced("\n".join(parts), place) < 0:
                    parts.append(lines[number].strip())
                    number += 1
                line = " ".join(parts)
        if line.strip():
            yield start, line


def _begun_with_operands(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yields instructions, starts without operands moved to their operands."""
    updates = {
        op.operands[0]: op
        for op in instructions
        if op.opcode == "async-update" and len(op.operands) > 1
    }
    starts = {op.name: op for op in instructions if op.name in updates and not op.operands}
    for op in instructions:
        start = starts.get(op.operands[0]) if op.operands else None
        if start and op is updates[start.name]:
            operands = op.operands[1:]
            yield dataclasses.replace(start, name=op.name, shapes=op.shapes, operands=operands)
        elif op.name not in starts:
            yield op


def _elements(name: str, types: dict[str, str], line: str, number: int) -> Iterator[Instruction]:
    """Yields the instructions for ``%loop#1``, an element of a tuple, once."""
    source, separator, index = name.rpartition("#")
    if not separator or name in types:
        return
    yield from _elements(source, types, line, number)
    text = types.get(source, "")
    # Inside of the parentheses of a tuple's type.
    elements = list(_items(text[1:-1])) if text.startswith("(") else []
    if not index.isdigit() or int(index) >= len(elements):
        raise _unread(f"an instruction that takes element {index} of {source!r}", line, number)
    types[name] = elements[int(index)].strip()
    result = shapes(types[name])
    yield Instruction(name, "get-tuple-element", result, (source,), f"index={index}")


def _instruction(line: str, number: int, frames: _Frames) -> tuple[Instruction, str]:
    """Reads an instruction, and the text of its type."""
    match = _INSTRUCTION.match(line)
    if match is None:
        raise _unread("an instruction", line, number)
    place = match.end()
    end = balanced(line, place) if line.startswith("(", place) else line.find(" ", place)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    close = balanced(line, opcode.end() - 1) if opcode else -1
    if opcode is None or close < 0:
        raise _unread("an instruction", line, number)
    inside = line[opcode.end() : close - 1]
    attributes = line[close:].removeprefix(",").strip()
    origin, source = _origin(attributes, frames)
    is_constant = opcode[1] == "constant"
    operands: list[str] = []
    if not is_constant and "%" in inside:
        operands = _NAME.findall(inside)
        if "#" in _NAME.sub("", inside):
            raise _unread("an instruction", line, number)
    elif not is_constant:  # names, or the number of a parameter, may stand behind types
        operands = [item.split()[-1] for item in _items(inside) if item.strip()]
    if opcode[1] == "call-start":
        attributes = attributes.replace("to_apply=", "calls=", 1)
    read = Instruction(
        match[2],
        _IN_FULL.get(opcode[1], opcode[1]),
        shapes(line[place:end]),
        tuple(operands),
        attributes,
        origin,
        source,
        bool(match[1]),
        inside if is_constant else "",
    )
    return read, line[place:end]


def _origin(attributes: str, frames: _Frames) -> tuple[str, str]:
    """The traced operation and the source line of an instruction."""
    metadata = _METADATA.search(attributes)
    if metadata is None:
        return "", ""
    frame = _FRAME.search(metadata[1])
    source = frames.source(int(frame[1])) if frame else ""
    file, line = _FILE.search(metadata[1]), _LINE.search(metadata[1])
    if not source and file and line:
        source = _line_name(file[1], int(line[1]))
    return op_name(metadata[1]), source


def _check_whole(inside: Computation) -> None:
    for op in inside.instructions:
        missing = [name for name in op.operands if name not in inside.by_name]
        if missing and op.opcode != "parameter":
            raise HloReadError(
                f"{op.opcode} {op.name!r} takes {missing[0]!r}, which is not in computation "
                f"{inside.name!r}; the text is cut or changed."
            )
    if sorted(inside.parameters) != list(range(len(inside.parameters))):
        raise HloReadError(
            f"Computation {inside.name!r} has parameters {sorted(inside.parameters)}, so one is "
            "missing; the text is cut or changed."
        )


def _unread(expected: str, line: str, number: int) -> HloReadError:
    excerpt = line.strip()
    excerpt = excerpt if len(excerpt) <= 120 else f"{excerpt[:117]}..."
    return HloReadError(
        f"Line {number} of the program should be {expected}, but cannot be read: {excerpt!r}. The "
        "text is cut or changed, or a version of XLA printed it that shardax does not know."
    )
