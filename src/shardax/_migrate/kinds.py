# SPDX-License-Identifier: Apache-2.0
"""What values of a program are known to be: Modules, Variables, States and optimizers of Flax.

A value is known where it is made in the file, annotated, ``self`` of a class of the file, or an
argument that every call in the file gives the same. ``other`` is known to be none of Flax.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import libcst as cst
from libcst import metadata

from shardax._migrate.program import SourceProgram, dotted, root_of
from shardax._migrate.rules import LAYER_ATTRIBUTES, NAMES, NNX, VARIABLES

# Packages whose functions make nothing of Flax; of others, classes do not.
_OTHERS = ("numpy", "optax", "torch", "tensorflow", "scipy", "pandas")
_OTHER_CLASSES = frozenset({*sys.stdlib_module_names, "jax"})
_LITERALS = (
    cst.Dict | cst.List | cst.Set | cst.Tuple | cst.BaseString | cst.BaseNumber | cst.BaseComp
)
_PARAMETERS = ("kernel", "bias", "scale", "embedding", "mean", "var", "negative_slope")


@dataclass(frozen=True)
class FlaxKind:
    """What a value, or an instance of a class, is known to be."""

    family: Literal["module", "variable", "state", "optimizer", "other"]
    name: str = ""  # of the class of Flax
    owner: cst.ClassDef | None = None  # the class of the file


OTHER = FlaxKind("other")


class Kinds:
    """The kinds of values of one program."""

    def __init__(self, program: SourceProgram) -> None:
        self.program = program
        self._asked: set[cst.CSTNode] = set()

    def of(self, node: cst.CSTNode) -> FlaxKind | None:
        """Returns the kind of a value, or None where it is not known."""
        # A value that is made of itself, as in `x = f(x)`, is not known.
        if node in self._asked:
            return None
        self._asked.add(node)
        try:
            return self._of(node)
        finally:
            self._asked.discard(node)

    def _of(self, node: cst.CSTNode) -> FlaxKind | None:
        if isinstance(node, _LITERALS):
            return OTHER
        if isinstance(node, cst.Name):
            return _same(self._bound_to(b) for b in self.program.bindings(node.value, node))
        if isinstance(node, cst.Call):
            return self._made_by(node)
        if isinstance(node, cst.Attribute):
            return self._attribute(node)
        kind = self.of(node.value) if isinstance(node, cst.Subscript) else None
        return kind if kind is not None and kind.family == "state" else None

    def of_class(self, node: cst.CSTNode) -> FlaxKind | None:
        """Returns the kind of instances of a class, from an expression or annotation."""
        if isinstance(node, cst.Subscript):
            return self.of_class(node.value)
        if isinstance(node, cst.SimpleString):
            origin = self.program.origin(str(node.evaluated_value), node)
            name = origin.name if origin is not None and not origin.doubt else ""
            return _kind_of_flax(name.removeprefix(f"{NNX}."))
        if node in self.program.by_node:
            return _kind_of_flax(self.program.certain(node))
        defined = self.program.only_binding(node)
        if isinstance(defined, cst.ClassDef):
            return self.of_definition(defined)
        return OTHER if self._is_other(node) else None

    def of_definition(self, owner: cst.ClassDef) -> FlaxKind | None:
        """Returns the kind of instances of a class of the file."""
        if owner in self._asked:
            return None
        self._asked.add(owner)
        kinds = [self.of_class(base.value) for base in owner.bases]
        self._asked.discard(owner)
        of_flax = [kind for kind in kinds if kind is not None and kind.family != "other"]
        if of_flax:
            return FlaxKind(of_flax[0].family, of_flax[0].name, owner)
        return FlaxKind("other", "", owner) if None not in kinds else None

    def _is_other(self, node: cst.CSTNode) -> bool:
        """Whether a name is of a builtin class, or of a package that makes nothing of Flax."""
        root = root_of(node)
        bindings = self.program.bindings(root.value, root) if isinstance(root, cst.Name) else []
        if bindings and all(isinstance(b, metadata.BuiltinAssignment) for b in bindings):
            return (
                isinstance(getattr(builtins, dotted(node), None), type) and dotted(node) != "super"
            )
        origin = self.program.origin_of(node)
        if origin is None or origin.doubt:
            return False
        package, last = origin.name.partition(".")[0], origin.name.rpartition(".")[2]
        return package in _OTHERS or (package in _OTHER_CLASSES and last[:1].isupper())

    # --- names ------------------------------------------------------------------------------------

    def _bound_to(self, binding: metadata.BaseAssignment) -> FlaxKind | None:
        node = getattr(binding, "node", None)
        if node is None:
            return OTHER if isinstance(getattr(builtins, binding.name, None), type) else None
        if binding.name in self.program.hidden:
            return None
        if isinstance(node, cst.Param):
            return self._parameter(node)
        return self._assigned(node) if isinstance(node, cst.Name) else None

    def _assigned(self, target: cst.CSTNode) -> FlaxKind | None:
        """Returns the kind of what a target gets, also one of several: ``a, b = x, y``."""
        parent = self.program.parents[target]
        if isinstance(parent, cst.AnnAssign):
            return self.of_class(parent.annotation.annotation)
        if isinstance(parent, cst.NamedExpr):
            return self.of(parent.value)
        if isinstance(parent, cst.AssignTarget):
            return self.of(cst.ensure_type(self.program.parents[parent], cst.Assign).value)

        row = self.program.parents[parent]
        place = self.program.parents.get(row)
        if not isinstance(row, cst.Tuple) or not isinstance(place, cst.AssignTarget):
            return None
        value = cst.ensure_type(self.program.parents[place], cst.Assign).value
        values = value.elements if isinstance(value, cst.Tuple) else ()
        elements = [*row.elements, *values]
        if len(elements) != 2 * len(values) or any(
            isinstance(e, cst.StarredElement) for e in elements
        ):
            return None
        position = next(i for i, element in enumerate(row.elements) if element is parent)
        return self.of(values[position].value)

    def _parameter(self, node: cst.Param) -> FlaxKind | None:
        if node.annotation is not None:
            return self.of_class(node.annotation.annotation)
        parameters = self.program.parents[node]
        function = self.program.parents[parameters]
        if not isinstance(parameters, cst.Parameters) or not isinstance(function, cst.FunctionDef):
            return None

        owner = self.program.parents.get(self.program.parents[function])
        position = next((i for i, p in enumerate(parameters.params) if p is node), -1)
        if not isinstance(owner, cst.ClassDef):
            return self._given(function, node.name.value, position)
        decorators = {dotted(decorator.decorator) for decorator in function.decorators}
        is_self = position == 0 and not decorators & {"staticmethod", "classmethod"}
        return self.of_definition(owner) if is_self else None

    def _given(self, function: cst.FunctionDef, name: str, position: int) -> FlaxKind | None:
        """Returns the kind that every call in the file gives to a parameter of a function."""
        bindings = self.program.bindings(function.name.value, function)
        if len(bindings) != 1 or not all(map(self._is_transform, function.decorators)):
            return None
        kinds: list[FlaxKind | None] = []
        for access in cast(Any, bindings[0]).references:
            call = self.program.parents.get(access.node)
            if not isinstance(call, cst.Call) or call.func is not access.node:
                return None
            named = [a.value for a in call.args if a.keyword and a.keyword.value == name]
            plain = [a.value for a in call.args if not a.keyword and not a.star]
            values = named or plain[position : position + 1]
            is_seen = values and not any(a.star for a in call.args)
            kinds.append(self.of(values[0]) if is_seen else None)
        return _same(kinds)

    def _is_transform(self, decorator: cst.Decorator) -> bool:
        """Whether a decorator is of Flax or JAX, also by ``functools.partial``."""
        node = decorator.decorator
        node = node.func if isinstance(node, cst.Call) else node
        origin = self.program.origin_of(node)
        return origin is not None and origin.name.startswith(("flax.", "jax.", "functools."))

    # --- calls and attributes ---------------------------------------------------------------------

    def _made_by(self, call: cst.Call) -> FlaxKind | None:
        name = self.program.certain(call.func)
        if name == "clone" and call.args:
            return self.of(call.args[0].value)
        if name in ("state", "variables") and len(call.args) < 3:
            return FlaxKind("state", "State")
        # Of a function of the file, what it is annotated to return.
        defined = self.program.only_binding(call.func)
        if isinstance(defined, cst.FunctionDef) and defined.returns is not None:
            return self.of_class(defined.returns.annotation)
        return self.of_class(call.func)

    def _attribute(self, node: cst.Attribute) -> FlaxKind | None:
        owner, name = self.of(node.value), node.attr.value
        if owner is None:
            return None
        if owner.owner is not None and (values := list(self._values_of(owner.owner, name))):
            return _same(values)
        is_parameter = name in LAYER_ATTRIBUTES.get(owner.name, {}) and name in _PARAMETERS
        return FlaxKind("variable", "Param") if is_parameter else None

    def _values_of(self, owner: cst.ClassDef, name: str) -> Iterable[FlaxKind | None]:
        """Yields the kinds of all that the file sets an attribute to, on objects of a class."""
        for statement in self.program.all(cst.AssignTarget, cst.AnnAssign, cst.AugAssign):
            function, around = self._around(statement)
            targets = statement.target
            elements = targets.elements if isinstance(targets, cst.Tuple) else ()
            for target in [element.value for element in elements] or [targets]:
                # Of an object that is not `self`, the class is not asked: it may be this one.
                is_of_other = isinstance(target, cst.Attribute) and dotted(target.value) != "self"
                is_of_class = around is owner or self._derives(around, owner)
                code = name if function is None else f"self.{name}"
                if is_of_other:
                    is_it = cst.ensure_type(target, cst.Attribute).attr.value == name
                else:
                    is_it = is_of_class and dotted(target) == code
                if is_it:
                    yield self._assigned(target)

    def _derives(self, around: cst.CSTNode | None, owner: cst.ClassDef) -> bool:
        """Whether a class of the file has another one as its base."""
        bases = around.bases if isinstance(around, cst.ClassDef) else ()
        return any(self.program.only_binding(base.value) is owner for base in bases)

    def _around(self, node: cst.CSTNode) -> tuple[cst.CSTNode | None, cst.CSTNode | None]:
        """Returns the function and the class in which a node stands."""
        function = None
        while node in self.program.parents:
            node = self.program.parents[node]
            if isinstance(node, cst.ClassDef):
                return function, node
            function = node if isinstance(node, cst.FunctionDef) else function
        return function, None


def _same(kinds: Iterable[FlaxKind | None]) -> FlaxKind | None:
    """Returns the kind that all are."""
    found = list(kinds)
    return found[0] if found and all(kind == found[0] for kind in found) else None


def _kind_of_flax(name: str) -> FlaxKind | None:
    """Returns the kind of instances of a class of Flax."""
    if name in VARIABLES:
        return FlaxKind("variable", name)
    if name == "State":
        return FlaxKind("state", name)
    if name in ("Optimizer", "ModelAndOptimizer"):
        return FlaxKind("optimizer", name)
    is_layer = name[:1].isupper() and name in NAMES and NAMES[name].target.startswith("sx.nn.")
    is_module = name in ("Module", "Object", "Pytree", "List", "Dict", "Rngs", "MultiMetric")
    return (
        FlaxKind("module", name) if is_layer or is_module or name.startswith("metrics.") else None
    )
