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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardax.hlo import errors

_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[(){}\[\],]')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\[\]]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
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
        return -(-self.size * _bits(self.dtype) // 8)


def _bits(dtype: str) -> int:
    """Returns the bits of an element of a dtype."""
    if dtype in _OPAQUE:
        return 0
    if dtype in _BITS:
        return _BITS[dtype]

    match = _BITS_OF_NAME.match(dtype)
    if match is None:
        raise errors.unknown_dtype(dtype)
    return int(match[1])


def _shapes(text: str) -> tuple[ArrayShape, ...]:
    """Returns the shapes of all arrays in a type, flattened."""
    shapes: list[ArrayShape] = []
    for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text)):
        sizes = dims.split(",") if dims else ()
        shapes.append(ArrayShape(dtype, tuple(int(size.strip("<= ")) for size in sizes)))
    return tuple(shapes)


def _brackets(text: str, start: int = 0) -> Iterator[tuple[re.Match[str], int]]:
    """Yields brackets, commas and whole quotes, each with the depth of brackets after it."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if match[0] in "({[":
            depth += 1
        elif match[0] in ")}]":
            depth -= 1
        yield match, depth


def balanced(text: str, start: int) -> int:
    """Returns the position after the bracket that closes the first one, or -1."""
    for match, depth in _brackets(text, start):
        if depth == 0 and match[0] in ")}]":
            return match.end()
    return -1


def _items(text: str) -> Iterator[str]:
    """Yields the parts of a text between the commas outside brackets and quotes."""
    start = 0
    for match, depth in _brackets(text):
        if depth == 0 and match[0] == ",":
            yield text[start : match.start()]
            start = match.end()
    yield text[start:]


# Frames of Python's stack.

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages|src|git)/"
    r"(?P<path>(?:jax|jaxlib|shardax|optax|flax|chex)/.*\.py)$"
)


class _StackFrames:
    """Sources of instructions by their innermost frames."""

    def __init__(self, tables: Mapping[str, Mapping[int, str]]) -> None:
        locations = {number: _fields(text) for number, text in tables["FileLocations"].items()}
        frames = {number: _fields(text) for number, text in tables["StackFrames"].items()}

        # Compilers of 2025 and 2026 print the parent's number plus one, so that the first frame,
        # which has none, seems to be its own parent.
        parents = {number: frame.get("parent_frame_id", 0) for number, frame in frames.items()}
        offset = 1 if any(number == parent for number, parent in parents.items()) else 0
        self._parents = {number: parent - offset for number, parent in parents.items()}

        self._lines: dict[int, tuple[str, int | None]] = {}
        for number, frame in frames.items():
            location = locations.get(frame.get("file_location_id", 0), {})
            file = tables["FileNames"].get(location.get("file_name_id", 0), "")
            self._lines[number] = file.strip('"'), location.get("line")
        self._sources: dict[int, str] = {}

    def source(self, frame: int) -> str:
        """Returns the source, such as ``"model.py:12"``; "" of an unknown frame."""
        if frame not in self._sources:
            self._sources[frame] = self._find_source(frame)
        return self._sources[frame]

    def _find_source(self, frame: int) -> str:
        stack: list[tuple[str, int]] = []
        seen: set[int] = set()
        while frame in self._lines and frame not in seen:
            seen.add(frame)
            file, line = self._lines[frame]
            if file and line is not None:
                stack.append((file, line))
            frame = self._parents[frame]

        # Model code, else our own, else anything.
        model_lines = [line for line in stack if not _is_library(line[0])]
        own_lines = [line for line in stack if "/shardax/" in line[0]]
        lines = model_lines or own_lines or stack
        return _line_name(*lines[0]) if lines else ""


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(text)}


def _is_library(file: str) -> bool:
    match = _LIBRARY.search(file)
    return match is not None and not match["path"].startswith("shardax/models/")


def _line_name(file: str, line: int) -> str:
    """A line after its file's name, or its path in a library."""
    match = _LIBRARY.search(file)
    name = match["path"] if match else file.rpartition("/")[2]
    return f"{name}:{line}"


# Instructions.

VIEWS = frozenset({"bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape"})
"""Opcodes that give what they take, in another layout at most."""
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
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


def op_name(text: str) -> str:
    """Returns the traced operation in an instruction's metadata, or ""."""
    match = _OP_NAME.search(text)
    return _ESCAPED.sub(r"\1", match[1]) if match else ""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Its name in the computation.
        opcode: What it does (``"all-reduce"``).
        shapes: Types of its results, flattened.
        operands: Names of the instructions whose results it takes.
        attributes: The text after the operands.
        op_name: The traced operation that it comes from (``jit(f)/dot_general``), or "".
        source: The line of model code that it comes from (``model.py:12``), or "".
        is_root: Whether its result is that of its computation.
        literal: Of a constant its value as text, of a parameter its number, else "".

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
        if f"{key}=" not in self.attributes:
            return None
        for item in _items(self.attributes):
            name, _, value = item.strip().partition("=")
            if name == key:
                return value
        return None

    def computations(self, *keys: str) -> tuple[str, ...]:
        """Returns the names of computations in attributes.

        Args:
            *keys: Names of attributes, such as ``"calls"`` or ``"branch_computations"``.
        """
        names: list[str] = []
        for key in keys:
            value = self.attribute(key) or ""
            names += [name.strip().removeprefix("%") for name in value.strip("{}").split(",")]
        return tuple(name for name in names if name)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, without a conditional's branches."""
        match self.opcode.removesuffix("-start"):
            case "fusion" | "async":
                return self.computations("calls")
            case "call":
                return self.computations("to_apply", "calls")
            case "while":
                return self.computations("body", "condition")
            case "custom-call":
                return self.computations("called_computations", "calls")
            case _:
                return ()

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the branches of a conditional, of which one runs; none of others."""
        if self.opcode != "conditional":
            return ()
        return self.computations("branch_computations", "true_computation", "false_computation")

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
        >>> x = Instruction("x", "parameter", (), (), "", literal="0")
        >>> y = Instruction("y", "negate", (), ("x",), "", is_root=True)
        >>> computation = Computation("main", (x, y))
        >>> computation.root.name, [each.name for each in computation.operands(y)]
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
        return {int(op.literal): op for op in self.instructions if op.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Users of each instruction's result, in order."""
        users: dict[str, list[Instruction]] = {op.name: [] for op in self.instructions}
        for user in self.instructions:
            for name in dict.fromkeys(user.operands):
                users[name].append(user)
        return {name: tuple(user_ops) for name, user_ops in users.items()}

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions behind the operands of one."""
        return tuple(self.by_name[name] for name in instruction.operands)


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
            for computation in self.computations.values()
            for op in computation.instructions
            if op.op_name and op.source
        }

    @property
    def device_count(self) -> int:
        """Number of devices of the program."""
        counts = [pattern.search(self.header) for pattern in (_PARTITIONS, _REPLICAS)]
        return math.prod(int(count[1]) for count in counts if count)

    def reached(self, names: Iterable[str]) -> set[str]:
        """Returns the names of computations, and of all that they may run."""
        reached = set(names)
        pending = list(reached)
        while pending:
            for op in self.computations[pending.pop()].instructions:
                new = {*op.called, *op.branches} - reached
                reached |= new
                pending += new
        return reached


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
    heads = (number for number, line in enumerate(lines) if line.startswith("HloModule "))
    head = next(heads, None)
    if head is None:
        raise errors.no_program()
    frames, first = _read_frames(lines, head + 1)

    computations: dict[str, Computation] = {}
    entry = ""
    body: _Body | None = None
    for number, line in _joined_lines(lines, first):
        if body is None:
            match = _COMPUTATION.match(line)
            if match is None:
                raise errors.unread_line(line, number, "the head of a computation")
            body = _Body(match[2], frames)
            if match[1]:
                entry = body.name
        elif line.startswith("}"):
            computations[body.name] = body.computation(number)
            body = None
        else:
            body.read(line, number)

    if body is not None:
        raise errors.open_computation(body.name)
    if entry not in computations:
        raise errors.no_entry()
    return Program(computations, entry, lines[head])


def _read_frames(lines: Sequence[str], first: int) -> tuple[_StackFrames, int]:
    """Reads tables of frames; returns these, and the number of the first line behind them."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    rows: dict[int, str] | None = None
    while first < len(lines):
        line = lines[first]
        row = _ROW.match(line)
        if line in tables:
            rows = tables[line]
        elif rows is not None and row:
            rows[int(row[1])] = row[2]
        elif line.strip():
            break
        first += 1
    return _StackFrames(tables), first


_SETTINGS = ("frontend_attributes={", "backend_config={")  # in the order of the text


def _joined_lines(lines: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    """Yields lines with their numbers from 1, a kernel's settings joined to its first line."""
    number = first
    while number < len(lines):
        start, line = number + 1, lines[number]
        number += 1

        # Settings may be JSON of several lines, such as those of Pallas's kernels with a cost.
        for settings in _SETTINGS:
            position = line.find(settings)
            if position < 0 or balanced(line, position) >= 0:
                continue
            parts = [line]
            while number < len(lines) and balanced("\n".join(parts), position) < 0:
                parts.append(lines[number].strip())
                number += 1
            line = " ".join(parts)

        if line.strip():
            yield start, line


class _Body:
    """A computation that is being read."""

    def __init__(self, name: str, frames: _StackFrames) -> None:
        self.name = name
        self._frames = frames
        self._instructions: list[Instruction] = []
        self._types: dict[str, str] = {}  # of results, as text, by name

    def computation(self, number: int) -> Computation:
        """Returns the computation that the line with this number closes."""
        if not self._instructions:
            raise errors.empty_computation(self.name, number)
        whole = Computation(self.name, tuple(_begun_with_operands(self._instructions)))

        for op in whole.instructions:
            missing = [name for name in op.operands if name not in whole.by_name]
            if missing:
                raise errors.missing_operand(op, missing[0], whole)
        if sorted(whole.parameters) != list(range(len(whole.parameters))):
            raise errors.missing_parameter(whole)
        return whole

    def read(self, line: str, number: int) -> None:
        """Adds the instruction of a line, behind the elements of tuples that it takes."""
        head = _INSTRUCTION.match(line)
        if head is None:
            raise errors.unread_line(line, number, "an instruction")
        start = head.end()
        end = balanced(line, start) if line.startswith("(", start) else line.find(" ", start)
        opcode = _OPCODE.match(line, end) if end > 0 else None
        close = balanced(line, opcode.end() - 1) if opcode else -1
        if opcode is None or close < 0:
            raise errors.unread_line(line, number, "an instruction")

        content = line[opcode.end() : close - 1]
        is_literal = opcode[1] in ("constant", "parameter")
        operands = [] if is_literal else _operands(content)
        if operands is None:
            raise errors.unread_line(line, number, "an instruction")

        attributes = line[close:].removeprefix(",").strip()
        if opcode[1] == "call-start":
            attributes = attributes.replace("to_apply=", "calls=", 1)
        origin, source = _origin(attributes, self._frames)
        op = Instruction(
            head[2],
            _IN_FULL.get(opcode[1], opcode[1]),
            _shapes(line[start:end]),
            tuple(operands),
            attributes,
            origin,
            source,
            is_root=bool(head[1]),
            literal=content if is_literal else "",
        )
        for name in op.operands:
            self._add_element(name, line, number)
        self._instructions.append(op)
        self._types[op.name] = line[start:end]

    def _add_element(self, name: str, line: str, number: int) -> None:
        """Adds the instructions for ``%loop#1``, an element of a tuple, once."""
        source, separator, index = name.rpartition("#")
        if not separator or name in self._types:
            return
        self._add_element(source, line, number)

        # Inside of the parentheses of a tuple's type.
        text = self._types.get(source, "")
        elements = list(_items(text[1:-1])) if text.startswith("(") else []
        if not index.isdigit() or int(index) >= len(elements):
            expected = f"an instruction that takes element {index} of {source!r}"
            raise errors.unread_line(line, number, expected)

        self._types[name] = elements[int(index)].strip()
        shapes = _shapes(self._types[name])
        self._instructions.append(
            Instruction(name, "get-tuple-element", shapes, (source,), f"index={index}")
        )


def _operands(text: str) -> list[str] | None:
    """Returns the names between parentheses; None if they are no such."""
    if "%" in text:
        names = _NAME.findall(text)
        return None if "#" in _NAME.sub("", text) else names

    # Types may stand before them.
    return [item.split()[-1] for item in _items(text) if item.strip()]


def _origin(attributes: str, frames: _StackFrames) -> tuple[str, str]:
    """Returns the traced operation and the source line of an instruction."""
    metadata = _METADATA.search(attributes)
    if metadata is None:
        return "", ""
    frame = _FRAME.search(metadata[1])
    source = frames.source(int(frame[1])) if frame else ""
    file, line = _FILE.search(metadata[1]), _LINE.search(metadata[1])
    if not source and file and line:
        source = _line_name(file[1], int(line[1]))
    return op_name(metadata[1]), source


def _begun_with_operands(instructions: Collection[Instruction]) -> Iterator[Instruction]:
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
