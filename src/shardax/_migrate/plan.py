# SPDX-License-Identifier: Apache-2.0
"""What becomes of every place of a program, decided before any change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import libcst as cst
from libcst import metadata

from shardax._migrate.arguments import CallPlan, Change, UntranslatableError, keyword_of, plan_call
from shardax._migrate.kinds import FlaxKind, Kinds, defines
from shardax._migrate.program import (
    Reference,
    SourceProgram,
    bound_name,
    code_of,
    dotted,
    dotted_words,
    imported_names,
    is_guard,
    is_set,
    library_of,
    root_of,
    walk,
)
from shardax._migrate.project import Project
from shardax._migrate.rules import (
    CAPTURE_NOTE,
    FAMILIES,
    FAMILY_NOTE,
    FILTER_NOTE,
    FILTERED,
    FORMS,
    HOOKS,
    LAYER_ATTRIBUTES,
    LEFT,
    LIBRARIES,
    METHODS,
    NAMED_IN_TEXTS,
    NNX,
    NUMBER_NOTE,
    ORDER_NOTE,
    ORDERED,
    STATE_FUNCTIONS,
    UNREAD,
    VARIABLE_ATTRIBUTES,
    VARIABLES,
    Left,
    Name,
)

_UNKNOWN = Left("the name is in no table", "see docs/coming-from-flax.md")
_UNSEEN = "whether its object is of Flax cannot be seen here"
_IN_TEXTS = "code and names in texts are not seen"
_OTHER_FILE = "it is of Flax, by way of another file"
_SET_UNREAD = "if its object is a layer, nothing here reads it"
_ANOTHER_MODEL = "an optimizer updates the model that it was made of, which this may not be"
_ANY_MODULE = ("Module", "Object", "Pytree")
_ISINSTANCE = (
    "filters see Variables, but leaves of a State are arrays here, so this is False for them"
)
_CODE_OF_TEXT = ("exec", "eval", "globals")
_IMPORTERS = ("import_module", "__import__", "importorskip", "find_spec", "patch")


class Notice(NamedTuple):
    """A place of a program, with what became of it."""

    line: int
    # "done": translated. "check": translated, but a person must look. "left": not translated.
    # "kept": of a library that stays.
    kind: Literal["done", "check", "left", "kept"]
    what: str
    reason: str
    write: str = ""


class MigrationPlan:
    """The changes of a program, and the notices about them."""

    def __init__(self, program: SourceProgram, project: Project, label: str) -> None:
        self.program = program
        self.project = project
        self.kinds = Kinds(program, project, label)
        self.libraries = program.translated()
        self.notices: list[Notice] = []
        self.done: dict[str, list[int]] = {}  # lines by what was done

        self.targets: dict[cst.CSTNode, str] = {}  # references by the name that they become
        self.calls: dict[cst.CSTNode, CallPlan] = {}
        self.changes: dict[cst.CSTNode, Change] = {}  # of other expressions
        self.assignments: set[cst.CSTNode] = set()  # statements `v.set_value(x)`
        self.removed: set[cst.CSTNode] = set()  # decorators, and options of classes
        self.handled: set[cst.CSTNode] = set()  # first names of what is translated
        # A file of which something was left is one of Flax still.
        is_left = any(map(is_guard, program.module.body))
        self._is_of_flax = NNX in self.libraries or is_left
        self._plan()

    def _plan(self) -> None:
        for library in LIBRARIES.keys() - self.libraries:
            lines = [r.line for r in self.program.references if r.library == library]
            if lines:
                reason = "its Modules are not translated, so all of it stays as it is"
                self.notices.append(Notice(min(lines), "kept", library, reason))
        self._plan_names_of_other_files()

        calls = self.program.all(cst.Call)
        if self._is_of_flax or self.project.uses_nnx:
            for call in calls:
                self._plan_method(call)
            for attribute in self.program.all(cst.Attribute):
                self._plan_attribute(attribute)
        if NNX in self.libraries:
            for call in calls:
                self._plan_text(call)
                self._plan_isinstance(call)
                self._plan_named_attribute(call)
            self._plan_arrays()
            self._plan_order()
            for element in self.program.all(cst.MatchKeywordElement):
                if element.key.value in NAMED_IN_TEXTS:
                    self._left(element, element.key.value, _UNSEEN)
            for function in self.program.all(cst.FunctionDef):
                self._plan_decorators(function)
            for owner in self.program.all(cst.ClassDef):
                self._plan_class(owner)
            for annotation in self.program.all(cst.Annotation):
                self._plan_quoted(annotation)

        for reference in self.program.references:
            is_planned = root_of(reference.node) in self.handled
            if reference.library in self.libraries and not is_planned:
                self._plan_reference(reference)
        self._plan_printed_code()

    # --- notices ----------------------------------------------------------------------------------

    def _left(self, node: cst.CSTNode, what: str, reason: str, write: str = "") -> None:
        self.notices.append(Notice(self.program.line(node), "left", what, reason, write))

    def _check(self, node: cst.CSTNode, what: str, reason: str, write: str = "") -> None:
        self.notices.append(Notice(self.program.line(node), "check", what, reason, write))

    def _done(self, node: cst.CSTNode, what: str) -> None:
        self.done.setdefault(what, []).append(self.program.line(node))

    def _left_of(
        self, kind: FlaxKind | None, node: cst.CSTNode, what: str, reason: str, write: str
    ) -> None:
        """Leaves a method or attribute of an object of Flax, or of one that is not known."""
        if kind is not None:
            self._left(node, what, reason, write)
        elif self._is_of_flax or self._is_given_by_others(node):
            self._left(node, what, _UNSEEN, f"{write}, if it is" if write else "")
        else:
            self._check(node, what, _UNSEEN, f"{write}, if it is" if write else "")

    def _is_given_by_others(self, node: cst.CSTNode) -> bool:
        """Whether an object is an argument of a function that another file takes."""
        place = node.func if isinstance(node, cst.Call) else node
        binding = self.program.only_binding(root_of(place))
        function = binding
        while function is not None and not isinstance(function, cst.FunctionDef):
            function = self.program.parents.get(function)
        is_taken = function is not None and function.name.value in self.project.taken
        return is_taken and isinstance(binding, cst.Param)

    # --- references -------------------------------------------------------------------------------

    def _plan_reference(self, reference: Reference) -> None:
        key, node = reference.name, reference.node
        label = f"{reference.library.rpartition('.')[2]}.{key}".rstrip(".")
        if doubt := self.program.doubt(reference):
            self._left(node, label, doubt)
            return

        name = LIBRARIES[reference.library].get(key)
        try:
            if reference.library == NNX and key in FORMS:
                self._plan_form(reference)
                self._done(node, f"{label} has another form here")
            elif not key:
                raise UntranslatableError("the library itself is used as a value")
            elif name is not None:
                self._plan_name(reference, name, label)
            else:
                left = LEFT.get(key, _UNKNOWN)
                self._left(node, label, left.reason, left.write)
                return
        except UntranslatableError as error:
            self._left(node, label, str(error), name.usage if name else _UNKNOWN.write)
            return
        self.handled.add(root_of(node))

    def _plan_name(self, reference: Reference, name: Name, label: str) -> None:
        """Plans a name of a table, with the arguments of its call."""
        node, parent = reference.node, reference.parent
        call, args, is_partial = self._call_of(reference)
        changed = ""
        if reference.name == "fork_rngs" and not isinstance(
            self.program.parents.get(call or node), cst.WithItem | cst.Decorator
        ):
            raise UntranslatableError("streams are forked for a block, or a call, here")
        if reference.name in FILTERED and call is not None:
            self._plan_filters(reference, call, label)
        if call is None:
            self._plan_test(reference, label)
        if reference.name == "jit" and self._captures(reference, call):
            self._check(node, label, CAPTURE_NOTE)
        if reference.name in VARIABLES and args and self._is_number(args[0].value):
            self._check(node, label, NUMBER_NOTE)
        if call is not None:
            plan = plan_call(reference.name, name, args, is_partial)
            self.calls[call] = plan.behind_first() if is_partial else plan
            changed = plan.summary(args)
            for check in [*plan.checks, name.check] if name.check else plan.checks:
                self._check(node, label, check)
        elif isinstance(parent, cst.Decorator) and name.written:
            plan = CallPlan(added=dict(name.written))
            self.changes[node] = lambda node: cst.Call(node, plan.apply([]))
        elif not name.bare:
            raise UntranslatableError("it is translated only where it is called: arguments differ")

        self.targets[node] = name.target
        self._done(node, f"{label} is {name.target}{changed}")
        if reference.name == "GraphDef" and isinstance(parent, cst.Subscript):  # no type of a model
            self.changes[parent] = lambda node: cst.ensure_type(node, cst.Subscript).value
        if (call is None or is_partial) and name.target.startswith("sx.nn."):
            given = [*map(keyword_of, args), *(name.arguments or ())[: len(args)]]
            renamed = {word: here for word, here in name.renamed.items() if word not in given}
            self._plan_class_as_value(reference, renamed, label)

    def _plan_class_as_value(
        self, reference: Reference, renamed: dict[str, str], label: str
    ) -> None:
        """Tells what differs in calls of a layer's class that stand elsewhere."""
        parent = reference.parent
        owner = self.program.parents.get(parent)
        if isinstance(parent, cst.Arg) and isinstance(owner, cst.ClassDef):
            what = f"class {owner.name.value}({label})"
            self._check(parent, what, "super().__init__ takes the arguments of the class here")
        elif renamed and not isinstance(parent, cst.Annotation | cst.Subscript | cst.Attribute):
            words = ", ".join(f"{here}= for {there}=" for there, here in renamed.items())
            self._check(reference.node, label, f"calls of this value take {words}")

    def _plan_test(self, reference: Reference, label: str) -> None:
        """Leaves tests of classes that have other subclasses here, and patterns of attributes."""
        place = reference.parent
        while isinstance(place, cst.BinaryOperation | cst.Tuple | cst.Element):
            place = self.program.parents[place]
        owner = self.program.parents.get(place)
        if isinstance(place, cst.MatchClass) and (place.patterns or place.kwds):
            raise UntranslatableError("attributes of a pattern may differ")
        is_given = isinstance(place, cst.Arg) and isinstance(owner, cst.Call)
        function = dotted(owner.func) if isinstance(owner, cst.Call) else ""
        is_test = isinstance(place, cst.Comparison | cst.ComparisonTarget | cst.MatchClass)
        if reference.name not in FAMILIES:
            return
        if is_test or (is_given and function in ("isinstance", "issubclass")):
            raise UntranslatableError(FAMILY_NOTE)
        if is_given or isinstance(place, cst.AssignTarget | cst.Assign | cst.DictElement):
            self._check(reference.node, label, f"in a test of classes, {FAMILY_NOTE}")

    def _plan_filters(self, reference: Reference, call: cst.Call, label: str) -> None:
        """Tells of filters that see plain arrays otherwise than there."""
        for arg in call.args:
            for node in walk(arg):
                origin = self.program.origin_of(node) if dotted(node) else None
                if origin is not None and origin.name in ("jax.Array", f"{NNX}.Variable"):
                    if FILTERED[reference.name] == "left":
                        raise UntranslatableError(FILTER_NOTE)
                    self._check(reference.node, label, FILTER_NOTE)

    def _is_number(self, node: cst.BaseExpression) -> bool:
        """Whether a value is a Python number, or made by NumPy."""
        node = node.expression if isinstance(node, cst.UnaryOperation) else node
        origin = self.program.origin_of(node.func) if isinstance(node, cst.Call) else None
        is_numpy = origin is not None and origin.name.startswith("numpy.")
        return is_numpy or isinstance(node, cst.BaseNumber) or dotted(node) in ("True", "False")

    def _plan_arrays(self) -> None:
        """Tells of arrays of NumPy that a Module holds."""
        for attribute in itertools.chain(*self.kinds.stores.values()):
            place = self.program.parents[attribute]
            made = self.program.parents[place] if isinstance(place, cst.AssignTarget) else place
            value, kind = getattr(made, "value", None), self.kinds.of(attribute.value)
            is_of_module = kind is not None and kind.family == "module"
            if is_of_module and isinstance(value, cst.Call) and self._is_number(value):
                self._check(attribute, dotted(attribute), NUMBER_NOTE)

    def _captures(self, reference: Reference, call: cst.Call | None) -> bool:
        """Whether a compiled function sees an object of Flax that is not an argument."""
        function = call.args[0].value if call is not None and call.args else None
        if isinstance(function, cst.Name):
            function = self.program.only_binding(function)
        if isinstance(reference.parent, cst.Decorator):
            function = self.program.parents[reference.parent]
        if not isinstance(function, cst.Lambda | cst.FunctionDef):
            return False
        nodes = list(walk(function.body))
        inside = {self.program.scopes.get(node) for node in nodes}
        for name in [node for node in nodes if isinstance(node, cst.Name)]:
            kind = self.kinds.of(name)
            if kind is not None and kind.family in ("module", "variable", "optimizer"):
                bindings = self.program.bindings(name.value, name)
                if not any(binding.scope in inside for binding in bindings):
                    return True
        return False

    def _plan_order(self) -> None:
        """Tells once that leaves have another order here."""
        loops = self.program.all(cst.For, cst.CompFor)
        places = [loop.iter for loop in loops if self._is_state(loop.iter)]
        for call in self.program.all(cst.Call):
            origin = self.program.origin_of(call.func)
            values = [arg.value for arg in call.args]
            if origin is not None and origin.name.startswith(ORDERED):
                kinds = [self.kinds.of(value) for value in values]
                places += [call] if any(k is None or k.family != "other" for k in kinds) else []
            elif dotted(call.func) in ("list", "tuple", "enumerate", "zip", "next", "iter"):
                places += [call] if any(map(self._is_state, values)) else []
        for place in sorted(places, key=self.program.line)[:1]:
            self._check(place, code_of(place).splitlines()[0][:40], ORDER_NOTE)

    def _is_state(self, node: cst.BaseExpression) -> bool:
        """Whether a value is a State, or its items, keys or values."""
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and not node.args:
            node = node.func.value
        kind = self.kinds.of(node)
        return kind is not None and kind.family == "state"

    def _call_of(self, reference: Reference) -> tuple[cst.Call | None, Sequence[cst.Arg], bool]:
        """Returns the call of a reference and its arguments, or a partial's."""
        parent = reference.parent
        if isinstance(parent, cst.Call) and parent.func is reference.node:
            return parent, parent.args, False
        owner = self.program.parents.get(parent)
        if isinstance(owner, cst.Call) and owner.args and owner.args[0] is parent:
            origin = self.program.origin_of(owner.func)
            if origin is not None and origin.name == "functools.partial" and not origin.doubt:
                return owner, owner.args[1:], True
        return None, (), False

    def _plan_quoted(self, annotation: cst.Annotation) -> None:
        """Leaves names of Flax in quotes, such as ``"nnx.Module"``."""
        text = annotation.annotation
        for word in dotted_words(text.value) if isinstance(text, cst.SimpleString) else ():
            origin = self.program.origin(word, text)
            if origin is not None and library_of(origin.name) == NNX:
                self._left(text, code_of(text), _IN_TEXTS, "it without quotes")

    # --- names with a form of their own -----------------------------------------------------------

    def _plan_form(self, reference: Reference) -> None:
        key, parent = reference.name, reference.parent
        call = parent if isinstance(parent, cst.Call) and parent.func is reference.node else None
        args = call.args if call is not None else ()
        is_plain = call is not None and not any(arg.keyword or arg.star for arg in args)
        if call is None or not is_plain:
            raise UntranslatableError("only a call of plain values has a counterpart")

        if key in STATE_FUNCTIONS:
            method, least, most = STATE_FUNCTIONS[key]
            if not least <= len(args) <= most:
                raise UntranslatableError(f"state.{method} takes other arguments")
            self.changes[call] = _method_call(method)
        elif key in ("data", "static") and len(args) == 1:
            if key == "static":
                self._check(call, "nnx.static", "an array in it is state here, not static")
            elif isinstance(args[0].value, cst.Integer | cst.Float):
                reason = "a Python number is configuration here: no leaf, and other ones retrace"
                self._check(call, "nnx.data", reason, "sx.Variable(jax.numpy.asarray(x))")
            self.changes[call] = lambda node: cst.ensure_type(node, cst.Call).args[0].value
        elif key.startswith("initializers.") and not args:
            self.targets[call] = f"jax.nn.{key.removesuffix('_init')}"
        else:
            raise UntranslatableError("it is called with other arguments")

    # --- methods and attributes -------------------------------------------------------------------

    def _plan_method(self, call: cst.Call) -> None:
        if not isinstance(call.func, cst.Attribute) or call.func in self.program.by_node:
            return
        kind, method = self.kinds.of(call.func.value), call.func.attr.value
        if kind is not None and (kind.family == "other" or defines(kind.owner, method)):
            return

        plain = [arg for arg in call.args if not arg.keyword and not arg.star]
        statement = self.program.parents[call]
        is_statement = isinstance(statement, cst.Expr)
        if method == "update" and len(plain) == 2:
            # What gives two results is no optimizer of Flax, but one of optax.
            is_pair = isinstance(statement, cst.Assign) and isinstance(
                statement.targets[0].target, cst.Tuple
            )
            if not is_pair and self._knows(
                kind, "optimizer", call, "optimizer.update(grads)", is_statement
            ):
                if not self._is_model_of(call.func.value, plain[0].value):
                    self._left(call, method, _ANOTHER_MODEL, "optimizer.update(grads), if not")
                    return
                self.calls[call] = CallPlan(dropped={0})
                self._done(call, "optimizer.update(model, grads) is optimizer.update(grads)")
        elif method == "get_value" and not call.args:
            if self._knows(kind, "variable", call, "v.value"):
                self.changes[call] = _value_of
                self._done(call, "v.get_value() is v.value")
        elif method == "set_value" and len(plain) == len(call.args) == 1:
            if self._knows(kind, "variable", call, "v.value = x", is_statement):
                self.assignments.add(statement)
                self._done(call, "v.set_value(x) is v.value = x")
        elif method == "sow" and plain and (len(plain) > 2 or self._is_variable_type(plain[0])):
            is_seen = is_statement and self._is_variable_type(plain[0]) and len(plain) == 3
            if self._knows(kind, "module", call, 'self.sow("name", x, type=kind)', is_seen):
                self._plan_sow(call)
        elif method == "set_attributes":
            for word in sorted(
                {keyword_of(arg) for arg in call.args} & (UNREAD - {"deterministic"})
            ):
                self._left(call, f"{method}({word}=)", "nothing here reads it")
        else:
            for family, methods in METHODS.items():
                if method in methods and (kind is None or kind.family == family):
                    self._left_of(kind, call, method, "it is not offered here", methods[method])

    def _knows(
        self, kind: FlaxKind | None, family: str, call: cst.Call, write: str, fits: bool = True
    ) -> bool:
        """Whether an object is of a kind, and its call fits; tells where that is not so."""
        method = cst.ensure_type(call.func, cst.Attribute).attr.value
        is_of_it = kind is not None and kind.family == family
        if kind is None or (is_of_it and not fits):
            reason = "this form of it has no counterpart: it returns nothing here"
            self._left_of(kind, call, method, reason, write)
        return is_of_it and fits

    def _is_model_of(self, optimizer: cst.BaseExpression, model: cst.BaseExpression) -> bool:
        """Whether an optimizer was made of a model, as far as the file makes it."""
        if isinstance(optimizer, cst.Name):
            bound = self.program.bindings(optimizer.value, optimizer)
            targets = [getattr(binding, "node", None) for binding in bound]
        else:
            name = cst.ensure_type(optimizer, cst.Attribute).attr.value
            targets = self.kinds.stores.get(name, [])
        return all(self._makes_of(target, model) for target in targets)

    def _makes_of(self, target: cst.CSTNode | None, model: cst.BaseExpression) -> bool:
        """Whether a target gets an Optimizer of a model that stays what it was."""
        place = self.program.parents.get(target) if target is not None else None
        if not isinstance(place, cst.AssignTarget) or target is None:
            return isinstance(target, cst.Name | cst.Param)  # annotated: its makers are told
        made = cst.ensure_type(self.program.parents[place], cst.Assign).value
        args = made.args if isinstance(made, cst.Call) else ()
        models = [arg.value for arg in args if keyword_of(arg) == "model"]
        models = models or [arg.value for arg in args[:1] if arg.keyword is None]
        if not models or not dotted(model) or dotted(models[0]) != dotted(model):
            return False
        roots = [root_of(models[0]), root_of(model)]
        here, there = (self.program.bindings(dotted(root), root) for root in roots)
        name = model.attr.value if isinstance(model, cst.Attribute) else ""
        return here == there and len(here) < 2 and len(self.kinds.stores.get(name, ())) < 2

    def _is_variable_type(self, arg: cst.Arg) -> bool:
        kind = self.kinds.of_class(arg.value)
        return kind is not None and kind.family == "variable"

    def _plan_sow(self, call: cst.Call) -> None:
        self._done(call, "sow(type, name, value) is sow(name, value, type=type)")
        kind = call.args[0].value
        if self.program.certain(kind) == "Intermediate":
            self.handled.add(root_of(kind))
            self.calls[call] = CallPlan(dropped={0})
        else:
            self.changes[call] = _with_type_last

    def _plan_attribute(self, attribute: cst.Attribute) -> None:
        name, parent = attribute.attr.value, self.program.parents[attribute]
        if isinstance(parent, cst.Call) and parent.func is attribute:
            return
        kind = self.kinds.of(attribute.value)
        layer = LAYER_ATTRIBUTES.get(kind.name) if kind is not None else None
        if attribute in self.program.by_node or (kind is not None and kind.family == "other"):
            return

        if name in VARIABLE_ATTRIBUTES and (kind is None or kind.family == "variable"):
            self._left_of(kind, attribute, name, "not offered here", VARIABLE_ATTRIBUTES[name])
        elif kind is None or (kind.name in _ANY_MODULE and kind.owner is None):
            # What a class sets on itself is its own.
            is_own = dotted(attribute.value) == "self"
            if name in UNREAD and is_set(attribute, self.program.parents) and not is_own:
                self._left_of(kind, attribute, name, _SET_UNREAD, "")
        elif layer is not None and layer.get(name):
            self._done(attribute, f"{kind.name}.{name} is .{layer[name]}")
            self.changes[attribute] = lambda node: node.with_changes(attr=cst.Name(layer[name]))
        elif layer is not None and name not in layer and (kind.owner is None or name in UNREAD):
            self._left(attribute, f"{kind.name}.{name}", "the layer has no such attribute here")

    def _plan_isinstance(self, call: cst.Call) -> None:
        if dotted(call.func) != "isinstance" or len(call.args) != 2:
            return
        kinds = call.args[1].value
        elements = kinds.elements if isinstance(kinds, cst.Tuple) else ()
        values = [element.value for element in elements] or [kinds]
        if any(self.program.certain(value) in VARIABLES for value in values):
            self._check(call, "isinstance", _ISINSTANCE, "state.filter(sx.Param)")

    def _plan_named_attribute(self, call: cst.Call) -> None:
        """Leaves attributes of Flax that stand in texts, as in ``hasattr(x, "use_bias")``."""
        function = dotted(call.func)
        if function not in ("getattr", "setattr", "hasattr", "delattr") or len(call.args) < 2:
            return
        kind, text = self.kinds.of(call.args[0].value), call.args[1].value
        is_own = kind is not None and kind.owner is not None and kind.name in _ANY_MODULE
        if is_own or (kind is not None and kind.family == "other"):
            return
        if not isinstance(text, cst.SimpleString):
            if function == "setattr":
                self._check(call, function, f"of some names, {_SET_UNREAD}")
        elif text.evaluated_value in NAMED_IN_TEXTS:
            self._left(call, f"{function}({code_of(text)})", _IN_TEXTS)

    def _plan_printed_code(self) -> None:
        """Tells of ``f"{code=}"``, whose text is the code, where the code is translated."""
        changed = {*self.targets, *self.calls, *self.changes, *self.assignments}
        for expression in self.program.all(cst.FormattedStringExpression):
            if expression.equal is not None and not changed.isdisjoint(walk(expression)):
                code = code_of(expression.expression)
                self._check(
                    expression, f"{{{code}=}}", "the text is the code, which is another one"
                )

    def _plan_text(self, call: cst.Call) -> None:
        """Leaves code and names of Flax that stand in texts."""
        name = dotted(call.func)
        bindings = self.program.bindings(name, call.func) if name in _CODE_OF_TEXT else []
        if any(isinstance(binding, metadata.BuiltinAssignment) for binding in bindings):
            self._left(call, name, _IN_TEXTS)
        text = call.args[0].value if call.args else None
        value = str(text.evaluated_value) if isinstance(text, cst.SimpleString) else ""
        if name.rpartition(".")[2] in _IMPORTERS and library_of(value) is not None:
            self._left(call, code_of(call), _IN_TEXTS)

    # --- classes and decorators -------------------------------------------------------------------

    def _plan_class(self, owner: cst.ClassDef) -> None:
        kind = self.kinds.of_definition(owner)
        for option in owner.keywords:
            if keyword_of(option) == "pytree" and (kind is None or kind.family == "module"):
                self.removed.add(option)
                what = f"class {owner.name.value}(pytree=)"
                self._check(owner, what, "every Module is a pytree here, also in lists")
        for method in owner.body.body if kind is not None and kind.family == "variable" else ():
            if isinstance(method, cst.FunctionDef) and method.name.value in HOOKS:
                what = f"{owner.name.value}.{method.name.value}"
                reason = "a Variable has no hooks, so nothing calls it"
                self._left(method, what, reason, "a property of its Module")

    def _plan_decorators(self, function: cst.FunctionDef) -> None:
        """Plans ``split_rngs(splits=n)`` over a ``vmap`` of everything."""
        for split, mapped in zip(function.decorators, function.decorators[1:], strict=False):
            call, vmap = split.decorator, mapped.decorator
            if not isinstance(call, cst.Call) or self.program.certain(call.func) != "split_rngs":
                continue
            options = vmap.args if isinstance(vmap, cst.Call) else ()
            words = {keyword_of(arg): code_of(arg.value) for arg in options}
            mapping = vmap.func if isinstance(vmap, cst.Call) else vmap
            takes_all = words.get("in_axes", "0") == "0" and "" not in words
            is_split = [keyword_of(arg) for arg in call.args] == ["splits"]
            if self.program.certain(mapping) != "vmap" or not takes_all or not is_split:
                continue

            self.removed.add(split)
            self.handled |= {root_of(call.func), root_of(mapping)}
            self._done(split, "split_rngs(splits=n) is axis_size=n of vmap")
            self.targets[mapping] = "sx.vmap"
            size = {"axis_size": code_of(call.args[0].value)} if "axis_size" not in words else {}
            plan = plan_call("vmap", LIBRARIES[NNX]["vmap"], options)
            plan.added |= size
            if isinstance(vmap, cst.Call):
                self.calls[vmap] = plan
            else:
                self.changes[vmap] = lambda node, plan=plan: cst.Call(node, plan.apply([]))

    # --- names of other files ---------------------------------------------------------------------

    def _plan_names_of_other_files(self) -> None:
        """Leaves names of Flax that come from a file of the project."""
        for node in self.program.imports():
            for alias, name in imported_names(node):
                if self.project.gives(name):
                    self._left(node, bound_name(alias), _OTHER_FILE, "its own import")
        for attribute in self.program.all(cst.Attribute) if self.project.exports else ():
            origin = self.program.origin_of(attribute)
            if origin is not None and self.project.gives(origin.name):
                self._left(attribute, dotted(attribute), _OTHER_FILE, "its own import")


def _value_of(node: cst.BaseExpression) -> cst.BaseExpression:
    """Returns ``v.value`` for a call of a method of ``v``."""
    return cst.ensure_type(node, cst.Call).func.with_changes(attr=cst.Name("value"))


def _method_call(method: str) -> Change:
    """Returns what makes a call of a method of its first argument."""

    def change(node: cst.BaseExpression) -> cst.BaseExpression:
        call = cst.ensure_type(node, cst.Call)
        state = call.args[0].value
        if not isinstance(state, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
            state = state.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return call.with_changes(func=cst.Attribute(state, cst.Name(method)), args=call.args[1:])

    return change


def _with_type_last(node: cst.BaseExpression) -> cst.BaseExpression:
    """Returns ``sow(name, value, type=type)`` for ``sow(type, name, value)``."""
    call = cst.ensure_type(node, cst.Call)
    plan = CallPlan(dropped={0}, added={"type": code_of(call.args[0].value)})
    return call.with_changes(args=plan.apply(call.args))
