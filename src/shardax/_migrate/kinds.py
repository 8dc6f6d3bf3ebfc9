# SPDX-License-Identifier: Apache-2.0
"""What values of a program are known to be: Modules, Variables, States and optimizers of Flax.

A value is known where it is made in the file, annotated, or ``self`` of a class of the file;
``other`` is known to be none of Flax. All else is not known.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from typing import Literal, NamedTuple

import libcst as cst

from shardax._migrate.program import SourceProgram, dotted, keyword_of, root_of
from shardax._migrate.project import Project
from shardax._migrate.rules import LAYER_ATTRIBUTES, NAMES, SETS

# Packages whose functions make nothing of Flax; of others, classes do not.
_OTHERS = ("numpy", "optax", "torch", "tensorflow", "scipy", "pandas")
_OTHER_CLASSES = frozenset({*sys.stdlib_module_names, "jax"})
# Annotations that Modules and Variables satisfy too. As a base they add nothing of Flax.
_ANYTHING = ("typing.", "collections.abc.", "abc.", "types.", "object", "type", "super")
_LITERALS = (
    cst.Dict | cst.List | cst.Set | cst.Tuple | cst.BaseString | cst.BaseNumber | cst.BaseComp
)


class FlaxKind(NamedTuple):
    """What a value, or an instance of a class, is known to be."""

    family: Literal["module", "variable", "state", "optimizer", "other"]
    name: str = ""  # of the class of Flax
    owner: cst.ClassDef | None = None  # the class of the file

    def defines(self, method: str) -> bool:
        """Whether the class of the file has a method of its own."""
        items = self.owner.body.body if self.owner is not None else ()
        functions = [item for item in items if isinstance(item, cst.FunctionDef)]
        return any(function.name.value == method for function in functions)


OTHER = FlaxKind("other")


class Kinds:
    """The kinds of values of one program."""

    def __init__(self, program: SourceProgram, project: Project) -> None:
        self.program = program
        self.project = project
        self._asked: set[cst.CSTNode] = set()

    # --- values -----------------------------------------------------------------------------------

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
        if isinstance(node, cst.Call):
            return self._made_by(node)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if self.program.is_builtin(node):
            return self.of_class(node)
        if dotted(node) in self.program.hidden:
            return None
        return _same(map(self._of_target, self.targets(node)))

    def targets(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Returns all that sets a name, or an attribute of its name, as far as it is seen."""
        found: list[cst.CSTNode] = []
        if isinstance(node, cst.Attribute):
            stores = self.program.stores
            found += [*stores.get(node.attr.value, []), *stores.get("", [])]
        else:
            found += [getattr(binding, "node", node) for binding in self.program.bindings(node)]
        # An operator in place makes no other kind of a value.
        parents = self.program.parents
        return [each for each in found if not isinstance(parents.get(each), cst.AugAssign)]

    def _of_target(self, target: cst.CSTNode) -> FlaxKind | None:
        """Returns the kind of what a target gets, or of a parameter."""
        parent = self.program.parents.get(target)
        if isinstance(parent, cst.AnnAssign):
            return self.of_class(parent.annotation.annotation)
        if isinstance(target, cst.Param):
            return self._of_parameter(target)
        value = self.value_of(target)
        return self.of(value) if value is not None else None

    def value_of(self, target: cst.CSTNode) -> cst.BaseExpression | None:
        """Returns what a target gets, also one of several: ``a, b = x, y``; None if not seen."""
        parent = self.program.parents.get(target)
        if isinstance(parent, cst.NamedExpr):
            return parent.value
        if isinstance(parent, cst.AssignTarget):
            return cst.ensure_type(self.program.parents[parent], cst.Assign).value
        if not isinstance(parent, cst.Element):
            return None

        # One value for each target, and none of them starred.
        row = self.program.parents[parent]
        values = self.value_of(row)
        if not isinstance(row, cst.Tuple) or not isinstance(values, cst.Tuple):
            return None
        pairs = [*zip(row.elements, values.elements, strict=False)]
        is_paired = len(row.elements) == len(values.elements) and all(
            isinstance(element, cst.Element) for pair in pairs for element in pair
        )
        found = [value.value for place, value in pairs if place is parent]
        return found[0] if is_paired else None

    def _of_parameter(self, node: cst.Param) -> FlaxKind | None:
        if node.annotation is not None:
            return self.of_class(node.annotation.annotation)
        parameters, function, _, owner, *_ = [*self.program.around(node), None, None, None]
        if not isinstance(function, cst.FunctionDef) or not isinstance(owner, cst.ClassDef):
            return None
        decorators = {dotted(decorator.decorator) for decorator in function.decorators}
        is_first = isinstance(parameters, cst.Parameters) and parameters.params[:1] == (node,)
        is_self = is_first and not decorators & {"staticmethod", "classmethod"}
        return self.of_definition(owner) if is_self else None

    def _made_by(self, call: cst.Call) -> FlaxKind | None:
        name = self.program.of_nnx(call.func)
        if name == "clone" and call.args:
            return self.of(call.args[0].value)
        if name in ("state", "variables") and len(call.args) < 3:
            return FlaxKind("state", "State")
        # Of a function of the file, what it is annotated to return.
        defined = self.program.only_binding(call.func)
        if isinstance(defined, cst.FunctionDef) and defined.returns is not None:
            return self.of_class(defined.returns.annotation)
        return self.of_class(call.func)

    def _of_attribute(self, node: cst.Attribute) -> FlaxKind | None:
        owner, name = self.of(node.value), node.attr.value
        if owner is None:
            return None
        family = self._family(owner.owner) if owner.owner is not None else []
        names = {each.name.value for each in family}
        # A base that is not seen may give anything.
        bases = [self._of_base(base.value) for each in family for base in each.bases]
        if None in bases or self.project.is_set_by_others(names, name, self.program):
            return None

        targets = [target for target in self.targets(node) if self._may_set(target, family)]
        found = [*map(self._of_target, targets)]
        if name in LAYER_ATTRIBUTES.get(owner.name, {}) and name in SETS["parameters"]:
            found.append(FlaxKind("variable", "Param"))
        return _same(found)

    def _may_set(self, target: cst.CSTNode, family: list[cst.ClassDef]) -> bool:
        """Whether a target may be of an object of some classes: no other class's own."""
        owners = [each for each in self.program.around(target) if isinstance(each, cst.ClassDef)]
        is_self = isinstance(target, cst.Attribute) and dotted(target.value) == "self"
        is_own = is_self or not isinstance(target, cst.Attribute | cst.Call)
        return not is_own or not owners or owners[0] in family

    def is_made_of(self, optimizer: cst.BaseExpression, model: cst.BaseExpression) -> bool:
        """Whether an optimizer was made of a model that stays what it was, as far as is seen."""
        for target in self.targets(optimizer):
            if isinstance(target, cst.Param):  # annotated: a check tells where it is made
                continue
            made = self.value_of(target)
            args = made.args if isinstance(made, cst.Call) else ()
            models = [arg.value for arg in args if keyword_of(arg) == "model"]
            models = models or [arg.value for arg in args[:1] if arg.keyword is None]
            if not models or not dotted(model) or dotted(models[0]) != dotted(model):
                return False

            here, there = (self.program.bindings(root_of(each)) for each in (models[0], model))
            is_set_again = isinstance(model, cst.Attribute) and len(self.targets(model)) > 1
            if here != there or len(here) > 1 or is_set_again:
                return False
        return True

    # --- classes ----------------------------------------------------------------------------------

    def of_class(self, node: cst.CSTNode) -> FlaxKind | None:
        """Returns the kind of instances of a class, from an expression or annotation."""
        if isinstance(node, cst.Subscript):
            return self.of_class(node.value)
        if name := self.program.of_nnx(node):
            return _kind_of_flax(name)
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
        # What derives from a plain class may be a Module too.
        if not of_flax:
            kinds += [self.of_definition(each) for each in self._derived(owner)]
        self._asked.discard(owner)

        of_flax.sort(key=lambda kind: kind.name not in LAYER_ATTRIBUTES)
        if of_flax:
            return of_flax[0]._replace(owner=owner)
        is_other = all(kind is not None and kind.family == "other" for kind in kinds)
        return FlaxKind("other", "", owner) if is_other else None

    def _of_base(self, node: cst.BaseExpression) -> FlaxKind | None:
        plain = node.value if isinstance(node, cst.Subscript) else node
        name = self.program.certain(plain) or dotted(plain)
        return OTHER if name.startswith(_ANYTHING) else self.of_class(node)

    def _family(self, owner: cst.ClassDef) -> list[cst.ClassDef]:
        """Returns the classes of the file that are one's bases, derive from it, and so on."""
        family = [owner]
        for each in family:
            bases = [self.program.only_binding(base.value) for base in each.bases]
            own = [base for base in bases if isinstance(base, cst.ClassDef)]
            family += [new for new in (*own, *self._derived(each)) if new not in family]
        return family

    def _derived(self, owner: cst.ClassDef) -> list[cst.ClassDef]:
        """Returns the classes of the file of which a class is a base."""
        bases = [(each, base) for each in self.program.all(cst.ClassDef) for base in each.bases]
        return [each for each, base in bases if self.program.only_binding(base.value) is owner]

    def _is_other(self, node: cst.CSTNode) -> bool:
        """Whether a name is of a builtin class, or of a package that makes nothing of Flax."""
        name = dotted(node)
        if self.program.is_builtin(node):
            return isinstance(getattr(builtins, name, None), type) and name not in _ANYTHING
        name = self.program.certain(node)
        package, last = name.partition(".")[0], name.rpartition(".")[2]
        is_class = package in _OTHER_CLASSES and last[:1].isupper()
        return not name.startswith(_ANYTHING) and (package in _OTHERS or is_class)


def _same(kinds: Iterable[FlaxKind | None]) -> FlaxKind | None:
    """Returns the kind that all are."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else None


def _kind_of_flax(name: str) -> FlaxKind | None:
    """Returns the kind of instances of a class of Flax."""
    if name in SETS["variables"]:
        return FlaxKind("variable", name)
    if name == "State":
        return FlaxKind("state", name)
    if name in ("Optimizer", "ModelAndOptimizer"):
        return FlaxKind("optimizer", name)
    is_layer = name[:1].isupper() and name in NAMES and NAMES[name].target.startswith("sx.nn.")
    return FlaxKind("module", name) if is_layer or name in SETS["modules"] else None
