# SPDX-License-Identifier: Apache-2.0
"""What becomes of every place of a program, decided before any change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import libcst as cst

from shardax._migrate.arguments import CallPlan, Change, UntranslatableError, plan_call
from shardax._migrate.kinds import Kind, Kinds
from shardax._migrate.program import (
    Origin,
    Program,
    Reference,
    bound_name,
    code_of,
    dotted,
    dotted_words,
    imported_names,
    library_of,
    root_of,
)
from shardax._migrate.project import Project
from shardax._migrate.rules import (
    FORMS,
    HOOKS,
    LAYER_ATTRIBUTES,
    LEFT,
    LIBRARIES,
    METHODS,
    NNX,
    STATE_FUNCTIONS,
    UNREAD,
    VARIABLE_ATTRIBUTES,
    VARIABLES,
    Left,
    Name,
)

_PAGE = "see docs/coming-from-flax.md"
_UNKNOWN = "the name is in no table"
_UNSEEN = "what it is cannot be seen here; if it is of Flax"
_ISINSTANCE = (
    "filters see Variables, but leaves of a State are arrays here, so this is False for them"
)
_CALLS_ONLY = "arguments or defaults differ, so calls through another name are not translated"
_WRITES = cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.Del
_VALUE = cst.Name("value")


class Notice(NamedTuple):
    """A place of a program, with what became of it."""

    line: int
    # "done": translated. "check": translated, but a person must look. "left": not translated.
    # "kept": of a library that stays.
    kind: Literal["done", "check", "left", "kept"]
    what: str
    reason: str
    write: str = ""


class Plan:
    """The changes of a program, and the notices about them."""

    def __init__(self, program: Program, project: Project) -> None:
        self.program = program
        self.project = project
        self.kinds = Kinds(program)
        self.libraries = program.translated()
        self.notices: list[Notice] = []
        self.done: dict[str, list[int]] = {}  # lines by what was done

        self.targets: dict[cst.CSTNode, str] = {}  # references by the name that they become
        self.calls: dict[cst.CSTNode, CallPlan] = {}
        self.changes: dict[cst.CSTNode, Change] = {}  # of other expressions
        self.quoted: dict[cst.CSTNode, str] = {}  # annotations in quotes
        self.assignments: set[cst.CSTNode] = set()  # statements `v.set_value(x)`
        self.removed: set[cst.CSTNode] = set()  # decorators
        self.bare_classes: set[cst.CSTNode] = set()  # without pytree=
        self.handled: set[cst.CSTNode] = set()  # first names of what is translated

        # Of an object that is not known, what a file without Flax does with it is only told.
        self._unseen: Literal["left", "check"] = "left" if NNX in self.libraries else "check"
        self._plan()

    def _plan(self) -> None:
        for library in LIBRARIES:
            if self.program.uses_library(library) and library not in self.libraries:
                lines = [r.line for r in self.program.references if r.library == library]
                reason = "its Modules are not translated, so all of it stays as it is"
                self.notices.append(Notice(min(lines), "kept", library, reason))
        for node, code in self.program.by_text if self.libraries else ():
            self._left(self.program.line(node), code, "code and names in texts are not seen")
        self._plan_names_of_other_files()

        if NNX in self.libraries or self.project.uses_nnx:
            for call in self.program.calls:
                self._plan_method(call)
            for attribute in self.program.attributes:
                self._plan_attribute(attribute)
        if NNX in self.libraries:
            for function in self.program.functions:
                self._plan_decorators(function)
            for owner in self.program.classes:
                self._plan_class(owner)
            for call in self.program.calls:
                self._plan_isinstance(call)
            for text in self.program.annotations:
                self._plan_quoted(text)

        for reference in self.program.references:
            is_planned = root_of(reference.node) in self.handled
            if reference.library in self.libraries and not is_planned:
                self._plan_reference(reference)

    # --- notices ----------------------------------------------------------------------------------

    def _left(self, line: int, what: str, reason: str, write: str = "") -> None:
        self.notices.append(Notice(line, "left", what, reason, write))

    def _check(self, line: int, what: str, reason: str, write: str = "") -> None:
        self.notices.append(Notice(line, "check", what, reason, write))

    def _done(self, line: int, what: str) -> None:
        self.done.setdefault(what, []).append(line)

    def _handle(self, node: cst.CSTNode) -> None:
        self.handled.add(root_of(node))

    # --- references -------------------------------------------------------------------------------

    def _plan_reference(self, reference: Reference) -> None:
        key, line = reference.name, reference.line
        label = f"{reference.library.rpartition('.')[2]}.{key}".rstrip(".")
        if doubt := self.program.doubt(reference):
            self._left(line, label, doubt)
            return

        name = LIBRARIES[reference.library].get(key)
        try:
            if reference.library == NNX and (key in FORMS or not key):
                self._plan_form(reference)
                self._done(line, f"{label} has another form here")
            elif name is not None:
                self._plan_name(reference, name, label)
            else:
                left = LEFT.get(key, Left(_UNKNOWN, _PAGE))
                self._left(line, label, left.reason, left.write)
                return
        except UntranslatableError as error:
            self._left(line, label, str(error), _usage(name))
            return
        self._handle(reference.node)

    def _plan_name(self, reference: Reference, name: Name, label: str) -> None:
        """Plans a name of a table, with the arguments of its call."""
        key, line = reference.name, reference.line
        call, args, is_partial = self._call_of(reference)
        changed = ""
        if call is not None:
            plan = plan_call(key, name, args, is_partial)
            self.calls[call] = plan.behind_first() if is_partial else plan
            changed = _summary(plan, args)
            for check in plan.checks:
                self._check(line, label, check)
        elif isinstance(reference.parent, cst.Decorator) and name.written:
            plan = CallPlan(added=dict(name.written))
            self.changes[reference.node] = lambda node: cst.Call(node, plan.apply([]))
        elif not name.bare:
            raise UntranslatableError(_CALLS_ONLY)

        self.targets[reference.node] = name.target
        self._done(line, f"{label} is {name.target}{changed}")
        if key == "GraphDef" and isinstance(reference.parent, cst.Subscript):  # no type of a model
            self.changes[reference.parent] = lambda node: cst.ensure_type(node, cst.Subscript).value
        if name.check and call is not None:
            self._check(line, label, name.check)
        elif call is None and name.target.startswith("sx.nn."):
            self._plan_layer_as_value(reference, name, label)

    def _plan_layer_as_value(self, reference: Reference, name: Name, label: str) -> None:
        """Tells what differs in calls of a layer's class that stand elsewhere."""
        parent = reference.parent
        owner = self.program.parents.get(parent)
        if isinstance(parent, cst.Arg) and isinstance(owner, cst.ClassDef):
            reason = "super().__init__ takes the arguments of the class here"
            self._check(reference.line, f"class {owner.name.value}({label})", reason)
            return
        is_test = isinstance(owner, cst.Call) and dotted(owner.func) in ("isinstance", "issubclass")
        is_type = isinstance(parent, cst.Annotation | cst.Subscript | cst.Attribute)
        if name.renamed and not is_test and not is_type:
            words = ", ".join(f"{here}= for {there}=" for there, here in name.renamed.items())
            self._check(reference.line, label, f"calls of this value take {words}")

    def _call_of(self, reference: Reference) -> tuple[cst.Call | None, Sequence[cst.Arg], bool]:
        """Returns the call of a reference and its arguments, or a partial's."""
        parent = reference.parent
        if isinstance(parent, cst.Call) and parent.func is reference.node:
            return parent, parent.args, False
        owner = self.program.parents.get(parent)
        if isinstance(parent, cst.Arg) and isinstance(owner, cst.Call) and owner.args[0] is parent:
            origin = self._origin(owner.func)
            if origin is not None and origin.name == "functools.partial" and not origin.doubt:
                return owner, owner.args[1:], True
        return None, (), False

    def _origin(self, node: cst.CSTNode) -> Origin | None:
        code = dotted(node)
        return self.program.origin(code, root_of(node)) if code else None

    def _plan_quoted(self, text: cst.SimpleString) -> None:
        """Plans the names of an annotation in quotes, such as ``"nnx.Module"``."""
        code = text.value
        for word in dotted_words(code):
            origin = self.program.origin(word, text)
            library = library_of(origin.name) if origin is not None else None
            if origin is None or library not in self.libraries or library is None:
                continue
            name = LIBRARIES[library].get(origin.name.removeprefix(f"{library}."))
            if origin.doubt or name is None or not name.target.startswith("sx."):
                self._left(self.program.line(text), code, origin.doubt or _UNKNOWN)
                return
            code = code.replace(word, name.target)
        if code != text.value:
            self._done(self.program.line(text), f"{text.value} is {code}")
            self.quoted[text] = code
            self.handled.add(text)

    # --- names with a form of their own -----------------------------------------------------------

    def _plan_form(self, reference: Reference) -> None:
        key, parent = reference.name, reference.parent
        call = parent if isinstance(parent, cst.Call) and parent.func is reference.node else None
        if not key:
            self._plan_library(reference)
        elif key in STATE_FUNCTIONS:
            self._plan_state_function(call, *STATE_FUNCTIONS[key])
        elif key in ("data", "static"):
            self._plan_data(reference, call)
        elif call is None or call.args:
            raise UntranslatableError(f"without a call it is another function: {key[13:-5]}")
        else:
            self.targets[call] = f"jax.nn.{key.removesuffix('_init')}"

    def _plan_library(self, reference: Reference) -> None:
        """Plans ``hasattr(nnx, "List")``, which is true of a translated name."""
        call = self.program.parents[reference.parent]
        if isinstance(call, cst.Call) and dotted(call.func) == "hasattr" and len(call.args) == 2:
            name = call.args[1].value
            if isinstance(name, cst.SimpleString) and name.evaluated_value in LIBRARIES[NNX]:
                self.changes[call] = lambda node: cst.Name("True")
                return
        raise UntranslatableError("the library itself is used as a value")

    def _plan_data(self, reference: Reference, call: cst.Call | None) -> None:
        if call is None or len(call.args) != 1 or call.args[0].keyword or call.args[0].star:
            raise UntranslatableError("only of one value: what holds arrays is data here")
        if reference.name == "static":
            self._check(reference.line, "nnx.static", "an array in it is state here, not static")
        elif isinstance(call.args[0].value, cst.Integer | cst.Float):
            reason = "a Python number is configuration here: it is no leaf, and other ones retrace"
            self._check(reference.line, "nnx.data", reason, "sx.Variable(jax.numpy.asarray(x))")
        self.changes[call] = lambda node: cst.ensure_type(node, cst.Call).args[0].value

    def _plan_state_function(
        self, call: cst.Call | None, method: str, least: int, most: int
    ) -> None:
        if call is None or any(arg.keyword or arg.star for arg in call.args):
            raise UntranslatableError(f"a method of a State here: state.{method}(...)")
        if not least <= len(call.args) <= most:
            raise UntranslatableError(f"state.{method} takes other arguments")

        def change(node: cst.BaseExpression) -> cst.BaseExpression:
            node = cst.ensure_type(node, cst.Call)
            state = node.args[0].value
            if not isinstance(state, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
                state = state.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            function = cst.Attribute(state, cst.Name(method))
            return node.with_changes(func=function, args=node.args[1:])

        self.changes[call] = change

    # --- methods and attributes -------------------------------------------------------------------

    def _plan_method(self, call: cst.Call) -> None:
        if not isinstance(call.func, cst.Attribute) or call.func in self.program.by_node:
            return
        kind = self.kinds.of(call.func.value)
        method, is_plain = call.func.attr.value, not any(a.keyword or a.star for a in call.args)
        if kind is not None and (kind.family == "other" or _defines(kind.owner, method)):
            return

        plain = [arg for arg in call.args if not arg.keyword and not arg.star]
        if method == "update" and len(plain) == 2:
            self._plan_update(call, kind)
        elif method == "get_value" and not call.args:
            if self._is_known(kind, "variable", call, "v.value"):
                self.changes[call] = lambda node: _value_of(cst.ensure_type(node, cst.Call))
        elif method == "set_value" and is_plain and len(call.args) == 1:
            self._plan_set_value(call, kind)
        elif method == "sow" and plain and (len(plain) > 2 or self._is_variable_type(plain[0])):
            if self._is_known(kind, "module", call, 'self.sow("name", value, type=kind)'):
                self._plan_sow(call, plain)
        elif method == "set_attributes":
            words = {arg.keyword.value for arg in call.args if arg.keyword is not None}
            for word in sorted(words & (UNREAD - {"deterministic"})):
                self._left(self.program.line(call), f"{method}({word}=)", "nothing here reads it")
        else:
            for family, methods in METHODS.items():
                is_possible = kind is None or kind.family == family
                if method in methods and is_possible:
                    self._tell(call, method, kind, "it is not offered here", methods[method])

    def _is_known(self, kind: Kind | None, family: str, call: cst.Call, write: str) -> bool:
        """Whether the object of a method is of a kind; tells where that is not known."""
        if kind is None:
            method = cst.ensure_type(call.func, cst.Attribute).attr.value
            self._tell(call, method, kind, "", write)
        return kind is not None and kind.family == family

    def _tell(
        self, node: cst.CSTNode, what: str, kind: Kind | None, reason: str, write: str
    ) -> None:
        """Leaves a method or attribute of an object of Flax, or of one that is not known."""
        level = self._unseen if kind is None else "left"
        reason = _UNSEEN if kind is None else reason
        self.notices.append(Notice(self.program.line(node), level, what, reason, write))

    def _plan_update(self, call: cst.Call, kind: Kind | None) -> None:
        statement = self.program.parents[call]
        # What gives two results is no optimizer of Flax, but one of optax.
        if isinstance(statement, cst.Assign) and isinstance(statement.targets[0].target, cst.Tuple):
            return
        if not self._is_known(kind, "optimizer", call, "optimizer.update(grads)"):
            return
        line = self.program.line(call)
        if not isinstance(statement, cst.Expr):
            self._left(
                line, "optimizer.update", "it returns nothing here", "optimizer.update(grads)"
            )
            return
        self.calls[call] = CallPlan(dropped={0})
        self._done(line, "optimizer.update(model, grads) is optimizer.update(grads)")

    def _plan_set_value(self, call: cst.Call, kind: Kind | None) -> None:
        if not self._is_known(kind, "variable", call, "v.value = x"):
            return
        statement = self.program.parents[call]
        if isinstance(statement, cst.Expr):
            self.assignments.add(statement)
            self._done(self.program.line(call), "v.set_value(x) is v.value = x")
        else:
            self._tell(
                call, "set_value", kind, "an assignment here is no expression", "v.value = x"
            )

    def _is_variable_type(self, arg: cst.Arg) -> bool:
        kind = self.kinds.of_class(arg.value)
        return kind is not None and kind.family == "variable"

    def _plan_sow(self, call: cst.Call, plain: Sequence[cst.Arg]) -> None:
        if not self._is_variable_type(plain[0]):
            self._left(
                self.program.line(call), "sow", _UNSEEN, 'self.sow("name", value, type=kind)'
            )
            return
        self._done(self.program.line(call), "sow(type, name, value) is sow(name, value, type=type)")
        reference = self.program.by_node.get(plain[0].value)
        if reference is not None and reference.name == "Intermediate":
            self._handle(plain[0].value)
            self.calls[call] = CallPlan(dropped={0})
            return

        def change(node: cst.BaseExpression) -> cst.BaseExpression:
            node = cst.ensure_type(node, cst.Call)
            first, name, value, *others = node.args
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            space = cst.SimpleWhitespace("")
            kind = first.with_changes(
                keyword=cst.Name("type"), equal=cst.AssignEqual(space, space), comma=value.comma
            )
            return node.with_changes(args=[name, value.with_changes(comma=comma), kind, *others])

        self.changes[call] = change

    def _plan_attribute(self, attribute: cst.Attribute) -> None:
        name, parent = attribute.attr.value, self.program.parents[attribute]
        is_write = isinstance(parent, _WRITES) and getattr(parent, "value", None) is not attribute
        is_called = isinstance(parent, cst.Call) and parent.func is attribute
        kind = None if is_called else self.kinds.of(attribute.value)
        if is_called or (kind is not None and kind.family == "other"):
            return

        if name in VARIABLE_ATTRIBUTES and (kind is None or kind.family == "variable"):
            self._tell(attribute, name, kind, "not offered here", VARIABLE_ATTRIBUTES[name])
        layer = LAYER_ATTRIBUTES.get(kind.name) if kind is not None else None
        if layer is not None and kind is not None and name in layer:
            if layer[name]:
                self._done(self.program.line(attribute), f"{kind.name}.{name} is .{layer[name]}")
                self.changes[attribute] = _renamed(layer[name])
        elif layer is not None and kind is not None and (kind.owner is None or name in UNREAD):
            what = f"{kind.name}.{name}"
            self._tell(attribute, what, kind, "the layer has no such attribute here", "")
        elif kind is None and is_write and name in UNREAD and dotted(attribute.value) != "self":
            self._tell(attribute, name, None, "", "")

    def _plan_isinstance(self, call: cst.Call) -> None:
        if dotted(call.func) != "isinstance" or len(call.args) != 2:
            return
        kinds = call.args[1].value
        elements = kinds.elements if isinstance(kinds, cst.Tuple) else ()
        for kind in [element.value for element in elements] or [kinds]:
            if self.program.certain(kind) in VARIABLES:
                self._check(
                    self.program.line(call), "isinstance", _ISINSTANCE, "state.filter(sx.Param)"
                )
                return

    # --- classes and decorators -------------------------------------------------------------------

    def _plan_class(self, owner: cst.ClassDef) -> None:
        line = self.program.line(owner)
        if any(_is_pytree_option(arg) for arg in owner.keywords):
            self.bare_classes.add(owner)
            what = f"class {owner.name.value}(pytree=)"
            self._check(line, what, "every Module is a pytree here, also in lists")

        kind = self.kinds.of_definition(owner)
        for method in owner.body.body if kind is not None and kind.family == "variable" else ():
            if isinstance(method, cst.FunctionDef) and method.name.value in HOOKS:
                what = f"{owner.name.value}.{method.name.value}"
                reason = "a Variable has no hooks, so nothing calls it"
                self._left(self.program.line(method), what, reason, "a property of its Module")

    def _plan_decorators(self, function: cst.FunctionDef) -> None:
        """Plans ``split_rngs(splits=n)`` over a ``vmap`` of everything."""
        for split, mapped in zip(function.decorators, function.decorators[1:], strict=False):
            call, vmap = split.decorator, mapped.decorator
            if not isinstance(call, cst.Call) or self.program.certain(call.func) != "split_rngs":
                continue
            splits = {arg.keyword.value: arg.value for arg in call.args if arg.keyword}
            options = list(vmap.args) if isinstance(vmap, cst.Call) else []
            words = {arg.keyword.value: code_of(arg.value) for arg in options if arg.keyword}
            is_vmap = (
                self.program.certain(vmap.func if isinstance(vmap, cst.Call) else vmap) == "vmap"
            )
            takes_all = words.get("in_axes", "0") == "0" and len(words) == len(options)
            if not is_vmap or not takes_all or splits.keys() != {"splits"} or len(call.args) > 1:
                continue

            self.removed.add(split)
            self._handle(call.func)
            self._done(self.program.line(split), "split_rngs(splits=n) is axis_size=n of vmap")
            added = {} if "axis_size" in words else {"axis_size": code_of(splits["splits"])}
            if isinstance(vmap, cst.Call):
                plan = plan_call("vmap", LIBRARIES[NNX]["vmap"], vmap.args)
                plan.added |= added
                self.calls[vmap] = plan
                self.targets[vmap.func] = "sx.vmap"
                self._handle(vmap.func)
            else:
                plan = CallPlan(added=added)
                self.changes[vmap] = lambda node, plan=plan: cst.Call(node, plan.apply([]))

    # --- names of other files ---------------------------------------------------------------------

    def _plan_names_of_other_files(self) -> None:
        """Leaves names of Flax that come from a file of the project, or go to one."""
        for node in self.program.imports:
            line = self.program.line(node)
            for alias, name in imported_names(node):
                if self.project.gives(name):
                    what = bound_name(alias)
                    self._left(
                        line, what, "it is of Flax, by way of another file", "its own import"
                    )
        for attribute in self.program.attributes if self.project.exports else ():
            origin = self._origin(attribute)
            if origin is not None and self.project.gives(origin.name):
                reason = "it is of Flax, by way of another file"
                self._left(
                    self.program.line(attribute), dotted(attribute), reason, "its own import"
                )


def _usage(name: Name | None) -> str:
    """Returns how a name that is left is written here."""
    if name is None:
        return _PAGE
    words = [name.renamed.get(argument, argument) for argument in name.arguments or ("...",)]
    return f"{name.target}({', '.join(words)})"


def _summary(plan: CallPlan, args: Sequence[cst.Arg]) -> str:
    """Returns what happens to the arguments of a call, for the report."""
    parts = [
        f"{args[position].keyword.value}= is {new}="
        for position, new in plan.keywords.items()
        if args[position].keyword is not None and args[position].keyword.value != new
    ]
    parts += [
        f"without {code_of(args[position].value)}"
        if args[position].keyword is None
        else f"without {args[position].keyword.value}="
        for position in sorted(plan.dropped)
    ]
    parts += [f"with {keyword}={code}" for keyword, code in plan.added.items()]
    return "".join(f", {part}" for part in parts)


def _defines(owner: cst.ClassDef | None, method: str) -> bool:
    """Whether a class of the file has a method of its own."""
    items = owner.body.body if owner is not None else ()
    return any(isinstance(item, cst.FunctionDef) and item.name.value == method for item in items)


def _is_pytree_option(arg: cst.Arg) -> bool:
    return arg.keyword is not None and arg.keyword.value == "pytree"


def _value_of(call: cst.Call) -> cst.Attribute:
    """Returns ``v.value`` for a call of a method of ``v``."""
    return cst.ensure_type(call.func, cst.Attribute).with_changes(attr=_VALUE)


def _renamed(name: str) -> Change:
    return lambda node: node.with_changes(attr=cst.Name(name))
