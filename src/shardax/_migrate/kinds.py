# SPDX-License-Identifier: Apache-2.0
"""What values of a program are known to be: Modules, Variables, States and optimizers of Flax.

A value is known where it is made in the file, annotated, ``self`` of a class of the file, or an
argument that every call in the file gives the same. ``other`` is known to be none of Flax.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import libcst as cst
from libcst import metadata

from shardax._migrate.program import Program, dotted, root_of
from shardax._migrate.rules import LAYER_ATTRIBUTES, NAMES, NNX, VARIABLES

# Packages whose functions and classes make nothing of Flax.
_OTHERS = {"jax", "jaxlib", "numpy", "optax", "orbax", "torch", "tensorflow", "scipy", "pandas"}
_LITERALS = (
    cst.Dict | cst.List | cst.Set | cst.Tuple | cst.BaseString | cst.BaseNumber | cst.BaseComp
)
_PARAMETERS = ("kernel", "bias", "scale", "embedding", "mean", "var", "negative_slope")


@dataclass(frozen=True)
class Kind:
    """What a value, or an instance of a class, is known to be."""

    family: Literal["module", "variable", "state", "optimizer", "other"]
    # The class of Flax, if any, and the class of the file.
    name: str = ""
    owner: cst.ClassDef | None = None


OTHER = Kind("other")


class Kinds:
    """The kinds of values of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._asked: set[cst.CSTNode] = set()

    def of(self, node: cst.CSTNode) -> Kind | None:
        """Returns the kind of a value, or None where it is not known."""
        # A value that is made of itself, as in `x = f(x)`, is not known.
        if node in self._asked:
            return None
        self._asked.add(node)
        try:
            return self._of(node)
        finally:
            self._asked.discard(node)

    def _of(self, node: cst.CSTNode) -> Kind | None:
        if isinstance(node, _LITERALS):
            return OTHER
        if isinstance(node, cst.Name):
            return self._same(self._bound_to(b) for b in self.program.bindings(node.value, node))
        if isinstance(node, cst.Call):
            return self._made_by(node)
        if isinstance(node, cst.Attribute):
            return self._attribute(node)
        if isinstance(node, cst.Subscript):
            kind = self.of(node.value)
            return kind if kind is not None and kind.family == "state" else None
        return None

    def of_class(self, node: cst.CSTNode) -> Kind | None:
        """Returns the kind of instances of a class, from an expression or annotation."""
        if isinstance(node, cst.Subscript):
            return self.of_class(node.value)
        if node in self.program.by_node:
            return _kind_of_flax(self.program.certain(node))
        if isinstance(node, cst.SimpleString):
            return self._quoted(node)
        if not isinstance(node, cst.Name | cst.Attribute):
            return None

        root = cast(cst.Name, root_of(node))
        bindings = self.program.bindings(root.value, root) if isinstance(root, cst.Name) else []
        if isinstance(node, cst.Name) and len(bindings) == 1:
            defined = getattr(bindings[0], "node", None)
            if isinstance(defined, cst.ClassDef):
                return self.of_definition(defined)
        return OTHER if bindings and all(self._is_other(b) for b in bindings) else None

    def of_definition(self, owner: cst.ClassDef) -> Kind | None:
        """Returns the kind of instances of a class of the file."""
        if owner in self._asked:
            return None
        self._asked.add(owner)
        kinds = [self.of_class(base.value) for base in owner.bases]
        self._asked.discard(owner)
        for kind in kinds:
            if kind is not None and kind.family != "other":
                return Kind(kind.family, kind.name, owner)
        return Kind("other", "", owner) if None not in kinds else None

    def _quoted(self, node: cst.SimpleString) -> Kind | None:
        text = node.evaluated_value
        origin = self.program.origin(text, node) if isinstance(text, str) else None
        if origin is not None and origin.name.startswith(f"{NNX}.") and not origin.doubt:
            return _kind_of_flax(origin.name.removeprefix(f"{NNX}."))
        bindings = self.program.bindings(str(text), node)
        defined = getattr(bindings[0], "node", None) if len(bindings) == 1 else None
        return self.of_definition(defined) if isinstance(defined, cst.ClassDef) else None

    def _same(self, kinds: Iterable[Kind | None]) -> Kind | None:
        """Returns the kind that all are."""
        found = list(kinds)
        return found[0] if found and all(kind == found[0] for kind in found) else None

    def _is_other(self, binding: metadata.BaseAssignment) -> bool:
        """Whether a name is a builtin, or of a package that makes nothing of Flax."""
        if isinstance(binding, metadata.BuiltinAssignment):
            return True
        node = getattr(binding, "node", None)
        if isinstance(node, cst.ImportFrom):
            package = dotted(node.module).partition(".")[0] if node.module is not None else ""
            return not node.relative and _is_other_package(package)
        if isinstance(node, cst.Import):
            names = {dotted(alias.name).partition(".")[0] for alias in node.names}
            return all(map(_is_other_package, names))
        return False

    # --- names ------------------------------------------------------------------------------------

    def _bound_to(self, binding: metadata.BaseAssignment) -> Kind | None:
        if binding.name in self.program.hidden:
            return None
        node = getattr(binding, "node", None)
        if self._is_other(binding):
            return OTHER
        if isinstance(node, cst.Param):
            return self._parameter(node)
        parent = self.program.parents.get(node) if node is not None else None
        if isinstance(parent, cst.AnnAssign):
            return self.of_class(parent.annotation.annotation)
        if isinstance(parent, cst.NamedExpr):
            return self.of(parent.value)
        if isinstance(parent, cst.AssignTarget):
            return self.of(cst.ensure_type(self.program.parents[parent], cst.Assign).value)
        return None

    def _parameter(self, node: cst.Param) -> Kind | None:
        if node.annotation is not None:
            return self.of_class(node.annotation.annotation)
        parameters = self.program.parents[node]
        function = self.program.parents[parameters]
        if not isinstance(parameters, cst.Parameters) or not isinstance(function, cst.FunctionDef):
            return None

        position = next((i for i, p in enumerate(parameters.params) if p is node), None)
        owner = _class_of_method(self.program, function)
        decorators = {dotted(d.decorator) for d in function.decorators}
        if owner is not None:
            is_self = position == 0 and not decorators & {"staticmethod", "classmethod"}
            return self.of_definition(owner) if is_self else None
        return self._given(function, node.name.value, position)

    def _given(self, function: cst.FunctionDef, name: str, position: int | None) -> Kind | None:
        """Returns the kind that every call in the file gives to a parameter of a function."""
        bindings = self.program.bindings(function.name.value, function)
        if len(bindings) != 1 or not all(map(self._is_transform, function.decorators)):
            return None
        kinds: list[Kind | None] = []
        for access in cast(Any, bindings[0]).references:
            call = self.program.parents.get(access.node)
            if not isinstance(call, cst.Call) or call.func is not access.node:
                return None
            kinds.append(self._argument(call.args, name, position))
        return self._same(kinds)

    def _argument(self, args: Sequence[cst.Arg], name: str, position: int | None) -> Kind | None:
        if any(arg.star for arg in args):
            return None
        for index, arg in enumerate(args):
            is_named = arg.keyword is not None and arg.keyword.value == name
            if is_named or (arg.keyword is None and index == position):
                return self.of(arg.value)
        return None

    def _is_transform(self, decorator: cst.Decorator) -> bool:
        """Whether a decorator is of Flax or JAX, also by ``functools.partial``."""
        node = decorator.decorator
        if isinstance(node, cst.Call):
            node = node.func
        if node in self.program.by_node:
            return True
        root = root_of(node)
        bindings = self.program.bindings(root.value, root) if isinstance(root, cst.Name) else []
        return bool(bindings) and all(map(self._is_other, bindings))

    # --- calls and attributes ---------------------------------------------------------------------

    def _made_by(self, call: cst.Call) -> Kind | None:
        name = self.program.certain(call.func)
        if name == "clone" and call.args:
            return self.of(call.args[0].value)
        if name in ("state", "variables") and len(call.args) < 3:
            return Kind("state", "State")
        kind = self.of_class(call.func)
        if kind is not None:
            return kind

        # Of a function of the file, what it is annotated to return.
        if isinstance(call.func, cst.Name):
            bindings = self.program.bindings(call.func.value, call.func)
            defined = getattr(bindings[0], "node", None) if len(bindings) == 1 else None
            if isinstance(defined, cst.FunctionDef) and defined.returns is not None:
                return self.of_class(defined.returns.annotation)
        return None

    def _attribute(self, node: cst.Attribute) -> Kind | None:
        owner = self.of(node.value)
        name = node.attr.value
        if owner is None:
            return None
        if owner.family == "other" and owner.owner is None:
            return OTHER
        if owner.owner is not None and (values := self._values_of(owner.owner, name)):
            return self._same(values)
        is_parameter = name in LAYER_ATTRIBUTES.get(owner.name, {}) and name in _PARAMETERS
        return Kind("variable", "Param") if is_parameter else None

    def _values_of(self, owner: cst.ClassDef, name: str) -> list[Kind | None]:
        """Returns the kinds of all that a class of the file sets an attribute to."""
        kinds: list[Kind | None] = []
        for target in self.program.targets:
            function, around = self._around(target)
            code = dotted(target) if around is owner else ""
            if code != (name if function is None else f"self.{name}"):
                continue
            parent = self.program.parents[target]
            if isinstance(parent, cst.AnnAssign):
                kinds.append(self.of_class(parent.annotation.annotation))
            elif isinstance(parent, cst.AssignTarget):
                statement = cst.ensure_type(self.program.parents[parent], cst.Assign)
                kinds.append(self.of(statement.value))
            else:
                kinds.append(None)
        return kinds

    def _around(self, node: cst.CSTNode) -> tuple[cst.FunctionDef | None, cst.CSTNode | None]:
        """Returns the function and the class in which a node stands."""
        function = None
        while (node := self.program.parents.get(node)) is not None:
            if isinstance(node, cst.ClassDef):
                return function, node
            if isinstance(node, cst.FunctionDef):
                function = node
        return function, None


def _class_of_method(program: Program, function: cst.FunctionDef) -> cst.ClassDef | None:
    block = program.parents[function]
    owner = program.parents.get(block)
    return owner if isinstance(owner, cst.ClassDef) else None


def _is_other_package(package: str) -> bool:
    return package in _OTHERS or package in sys.stdlib_module_names


def _kind_of_flax(name: str) -> Kind | None:
    """Returns the kind of instances of a class of Flax."""
    if name in VARIABLES:
        return Kind("variable", name)
    if name == "State":
        return Kind("state", name)
    if name in ("Optimizer", "ModelAndOptimizer"):
        return Kind("optimizer", name)
    target = NAMES[name].target if name in NAMES else ""
    is_layer = target.startswith(("sx.nn.", "sx.train.metrics.")) and name[:1].isupper()
    is_module = name in ("Module", "Object", "Pytree", "List", "Dict", "Rngs", "metrics.Metric")
    return Kind("module", name) if is_layer or is_module or name.startswith("metrics.") else None
