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

from shardax._migrate.program import SourceProgram, dotted, is_set, root_of
from shardax._migrate.project import Project
from shardax._migrate.rules import LAYER_ATTRIBUTES, NAMES, NNX, VARIABLES

# Packages whose functions make nothing of Flax; of others, classes do not.
_OTHERS = ("numpy", "optax", "torch", "tensorflow", "scipy", "pandas")
_OTHER_CLASSES = frozenset({*sys.stdlib_module_names, "jax"})
# Annotations that Modules and Variables satisfy too. As a base they add nothing of Flax.
_ANYTHING = ("typing.", "collections.abc.", "abc.", "types.", "object", "type", "super")
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

    def __init__(self, program: SourceProgram, project: Project, label: str) -> None:
        self.program = program
        self.project = project
        self.label = label
        self._asked: set[cst.CSTNode] = set()
        # Attributes that the file sets, by name; and its calls of setattr.
        self.stores: dict[str, list[cst.Attribute]] = {}
        for attribute in program.all(cst.Attribute):
            if is_set(attribute, program.parents):
                self.stores.setdefault(attribute.attr.value, []).append(attribute)
        calls = program.all(cst.Call)
        self._setattrs = [call for call in calls if dotted(call.func).endswith("setattr")]

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
        kinds = [self._of_base(base.value) for base in owner.bases]
        of_flax = [kind for kind in kinds if kind is not None and kind.family != "other"]
        of_flax.sort(key=lambda kind: kind.name not in LAYER_ATTRIBUTES)
        # What derives from a plain class may be a Module too.
        derived = [self.of_definition(each) for each in self._derived(owner)] if not of_flax else []
        self._asked.discard(owner)
        if of_flax:
            return FlaxKind(of_flax[0].family, of_flax[0].name, owner)
        is_other = all(kind is not None and kind.family == "other" for kind in kinds + derived)
        return FlaxKind("other", "", owner) if is_other else None

    def _of_base(self, node: cst.BaseExpression) -> FlaxKind | None:
        plain = node.value if isinstance(node, cst.Subscript) else node
        origin = self.program.origin_of(plain)
        name = origin.name if origin is not None and not origin.doubt else dotted(plain)
        return OTHER if name.startswith(_ANYTHING) else self.of_class(node)

    def _derived(self, owner: cst.ClassDef) -> list[cst.ClassDef]:
        """Returns the classes of the file of which a class is a base."""
        return [each for each in self.program.all(cst.ClassDef) if owner in self._bases(each)]

    def _bases(self, owner: cst.ClassDef) -> list[cst.CSTNode | None]:
        return [self.program.only_binding(base.value) for base in owner.bases]

    def _is_other(self, node: cst.CSTNode) -> bool:
        """Whether a name is of a builtin class, or of a package that makes nothing of Flax."""
        root = root_of(node)
        bindings = self.program.bindings(root.value, root) if isinstance(root, cst.Name) else []
        if bindings and all(isinstance(b, metadata.BuiltinAssignment) for b in bindings):
            is_class = isinstance(getattr(builtins, dotted(node), None), type)
            return is_class and dotted(node) not in _ANYTHING
        origin = self.program.origin_of(node)
        if origin is None or origin.doubt or origin.name.startswith(_ANYTHING):
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
        taken = self.project.taken
        if len(bindings) != 1 or not all(map(self._is_transform, function.decorators)):
            return None
        if function.name.value in taken or "*" in taken:  # another file may call it
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
        call = node if isinstance(node, cst.Call) else None
        origin = self.program.origin_of(node if call is None else call.func)
        if origin is not None and origin.name == "functools.partial" and call and call.args:
            origin = self.program.origin_of(call.args[0].value)
        return origin is not None and not origin.doubt and origin.name.startswith(("flax.", "jax."))

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
        family = self._family(owner)
        for attribute in self.stores.get(name, ()):
            # Of an object that is not `self`, the class is not asked: it may be this one.
            around = self._around(attribute)[1]
            if dotted(attribute.value) != "self" or around is None or around in family:
                yield self._assigned(attribute)
        for statement in self.program.all(cst.AssignTarget, cst.AnnAssign):
            function, around = self._around(statement)
            if function is None and around in family and dotted(statement.target) == name:
                yield self._assigned(statement.target)
        for each in family:
            # A property, or a base that is not seen, may give anything.
            if defines(each, name) or None in map(self._of_base, [b.value for b in each.bases]):
                yield None
        if self.project.is_set_by_others({each.name.value for each in family}, name, self.label):
            yield None
        for call in self._setattrs:
            text = call.args[1].value if len(call.args) > 1 else None
            if not isinstance(text, cst.SimpleString) or text.evaluated_value == name:
                yield self.of(call.args[2].value) if len(call.args) == 3 else None

    def _family(self, owner: cst.ClassDef) -> list[cst.ClassDef]:
        """Returns the classes of the file that are one's bases, derive from it, and so on."""
        family = [owner]
        for each in family:
            bases = [base for base in self._bases(each) if isinstance(base, cst.ClassDef)]
            family += [new for new in (*bases, *self._derived(each)) if new not in family]
        return family

    def _around(self, node: cst.CSTNode) -> tuple[cst.CSTNode | None, cst.CSTNode | None]:
        """Returns the function and the class in which a node stands."""
        function = None
        while node in self.program.parents:
            node = self.program.parents[node]
            if isinstance(node, cst.ClassDef):
                return function, node
            function = node if isinstance(node, cst.FunctionDef) else function
        return function, None


def defines(owner: cst.ClassDef | None, method: str) -> bool:
    """Whether a class of the file has a method of its own."""
    items = owner.body.body if owner is not None else ()
    return any(isinstance(item, cst.FunctionDef) and item.name.value == method for item in items)


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
