# SPDX-License-Identifier: Apache-2.0
"""Facts about the files of one project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import libcst as cst
from libcst import matchers

from shardax._migrate.references import ParsedProgram, dotted, last_name

# A place for a person to look at: the line, what it is, the reason, what to write.
Finding = tuple[int, str, str, str]


@dataclass(frozen=True)
class Project:
    """Facts about all files of a project."""

    uses_nnx: bool = False
    unhashable: frozenset[str] = frozenset()  # dataclasses whose objects have no hash


def survey(texts: Iterable[str]) -> Project:
    """Reads the files of a project."""
    uses_nnx, unhashable = False, set[str]()
    for text in texts:
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):  # the translation refuses it
            continue
        uses_nnx |= any(_imports_nnx(node) for node in nodes)
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        unhashable |= {node.name for node in classes if _has_no_hash(node)}
    return Project(uses_nnx, frozenset(unhashable))


def _imports_nnx(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = [f"{module}.{alias.name}" for alias in node.names] if not node.level else []
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any(name == "flax.nnx" or name.startswith("flax.nnx.") for name in names)


def _has_no_hash(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass with equality and without a hash."""
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    if node.bases or len(node.decorator_list) != 1 or methods & {"__hash__", "__eq__"}:
        return False
    (decorator,) = node.decorator_list
    options = decorator.keywords if isinstance(decorator, ast.Call) else []
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    if ast.unparse(name) not in ("dataclass", "dataclasses.dataclass"):
        return False
    values = {option.arg: ast.unparse(option.value) for option in options}
    return values.get("eq") != "False" and "True" not in (
        values.get("frozen"),
        values.get("unsafe_hash"),
    )


def unhashable_attributes(program: ParsedProgram, project: Project) -> Iterator[Finding]:
    """Yields attributes of Modules with unhashable dataclasses."""
    for owner in program.classes:
        for method in owner.body.body if owner.bases else ():
            if not isinstance(method, cst.FunctionDef):
                continue
            known = _unhashable_parameters(method, project.unhashable)
            for node in matchers.findall(method, matchers.Assign()):
                statement = cst.ensure_type(node, cst.Assign)
                value = statement.value
                if isinstance(value, cst.Call):
                    name = last_name(value.func)
                    kind = name if name in project.unhashable else ""
                else:
                    kind = known.get(value.value, "") if isinstance(value, cst.Name) else ""
                target = statement.targets[0].target
                if kind and dotted(target).startswith("self."):
                    reason = (
                        f"a Module refuses objects of {kind}: they are no data and have no hash"
                    )
                    write = "@dataclasses.dataclass(frozen=True)"
                    yield program.lines[target], dotted(target), reason, write


def _unhashable_parameters(method: cst.FunctionDef, unhashable: frozenset[str]) -> dict[str, str]:
    """Returns the parameters annotated with unhashable classes, with the class."""
    params = [*method.params.params, *method.params.kwonly_params]
    pairs = {p.name.value: cst.Module([]).code_for_node(p.annotation.annotation)
             for p in params if p.annotation is not None}  # fmt: skip
    kinds = {name: set(re.findall(r"\w+", code)) & unhashable for name, code in pairs.items()}
    return {name: min(found) for name, found in kinds.items() if found}


_VARIABLE = "if this is a Variable: it has no such method"
_METHODS = {"get_value": "v.value", "set_value": "v.value = x", "get_raw_value": "v.value"}


def methods_without_import(program: ParsedProgram) -> Iterator[Finding]:
    """Yields calls of methods of NNX, in files without it."""
    for call in program.calls:
        if not isinstance(call.func, cst.Attribute):
            continue
        name, line = call.func.attr.value, program.lines[call]
        plain = [arg for arg in call.args if not arg.keyword and not arg.star]
        if name in _METHODS:
            yield line, name, _VARIABLE, _METHODS[name]
        elif name == "update" and len(plain) == 2 and "grad" in last_name(plain[1].value).lower():
            reason = "if this is an Optimizer of NNX: it takes the gradients alone here"
            yield line, name, reason, "optimizer.update(grads)"
        elif name == "sow" and len(plain) >= 3:
            yield line, name, "the type is an option here", 'self.sow("name", value, type=kind)'
