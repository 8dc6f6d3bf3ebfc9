# SPDX-License-Identifier: Apache-2.0
"""What becomes of every place of a program, and the notices about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import libcst as cst

from shardax._migrate.arguments import Arguments, UntranslatableError, separated
from shardax._migrate.imports import NewNames, with_lost_comments
from shardax._migrate.kinds import FlaxKind, Kinds
from shardax._migrate.program import (
    Importing,
    Reference,
    SourceProgram,
    code_of,
    dotted,
    is_set,
    keyword_of,
    library_of,
    root_of,
    text_of,
    walk,
)
from shardax._migrate.project import Project
from shardax._migrate.rules import (
    LAYER_ATTRIBUTES,
    LEFT,
    LIBRARIES,
    METHODS,
    MISSING,
    NAMES,
    NNX,
    NOTES,
    SETS,
    Left,
    NameRule,
)

_UNKNOWN = Left("the name is in no table", "see docs/coming-from-flax.md")
_UNSEEN = "whether its object is of Flax cannot be seen here"
_IN_TEXTS = "code and names in texts are not seen"
_NO_RESULT = "this form of it has no counterpart: it returns nothing here"
_ISINSTANCE = (
    "filters see Variables, but leaves of a State are arrays here, so this is False for them"
)
_ANY_MODULE = ("Module", "Object", "Pytree")


class Notice(NamedTuple):
    """A place of a program, with what became of it."""

    line: int
    # "done": translated. "check": translated, but a person must look. "left": not translated.
    # "kept": of a library that stays.
    kind: Literal["done", "check", "left", "kept"]
    what: str
    reason: str
    write: str = ""


class Translator(cst.CSTTransformer):
    """Translates what is certain, and keeps the notices about all else."""

    def __init__(self, program: SourceProgram, project: Project, is_of_flax: bool) -> None:
        super().__init__()
        self.program = program
        self.project = project
        self.kinds = Kinds(program, project)
        self.names = NewNames(program)
        self.is_of_flax = is_of_flax
        self.notices: list[Notice] = []
        self.done: dict[str, list[int]] = {}  # lines by what was done

        # Where references are translated: at the call of a name, or of a partial of it.
        self._places: dict[cst.CSTNode, Reference] = {}
        self.libraries = translated_libraries(program)
        for reference in program.references.values():
            if reference.library in self.libraries:
                self._places[self._place_of(reference.node)] = reference

        # Statements that stand for calls of methods; and `vmap` with the `split_rngs` over it.
        self._statements: dict[cst.CSTNode, str] = {}
        self._splits: dict[cst.CSTNode, cst.Call] = {}
        for function in program.all(cst.FunctionDef):
            self._find_splits(function)

    def _place_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """Returns the call of a name, or of a partial of it, else the name."""
        parent, owner, *_ = [*self.program.around(node), None]
        if isinstance(parent, cst.Call) and parent.func is node:
            return parent
        if isinstance(owner, cst.Call) and owner.args[:1] == (parent,):
            is_partial = self.program.certain(owner.func) == "functools.partial"
            return owner if is_partial else node
        return node

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """Returns what a node becomes; a statement keeps the comments of what it lost."""
        reference = self._places.get(original_node)
        change = self._CHANGES.get(type(original_node))
        new: Any = updated_node
        if reference is not None:
            try:
                new = self._translated(reference, original_node, updated_node)
            except UntranslatableError as error:
                self._report("left", reference.node, reference.label, str(error), error.write)
        elif change is not None:
            new = change(self, original_node, updated_node)
        if isinstance(original_node, Importing):
            self.names.replaced[new] = original_node
        return with_lost_comments(original_node, new)

    def _report(
        self, kind: Literal["check", "left"], node: cst.CSTNode, what: str, *reason: str
    ) -> None:
        self.notices.append(Notice(self.program.line(node), kind, what, *reason))

    def _tell_done(self, node: cst.CSTNode, what: str) -> None:
        self.done.setdefault(what, []).append(self.program.line(node))

    # --- names of libraries -----------------------------------------------------------------------

    def _translated(self, reference: Reference, old: cst.CSTNode, new: Any) -> cst.BaseExpression:
        """Returns what a name becomes, or a call of it.

        Raises:
            UntranslatableError: If it has no counterpart that is certain.
        """
        if old in self._splits.values():  # its decorator goes
            self.names.translated.add(root_of(reference.node))
            return new
        rule = _rule_of(reference)
        self._refuse_places(reference, rule, old)

        # A partial has the function before the arguments.
        is_call = isinstance(old, cst.Call)
        front = 0 if not is_call or reference.node is old.func else 1
        args = (old.args[front:], new.args[front:]) if is_call else ((), ())
        code = self.names.code(rule.target)
        try:
            arguments = Arguments(reference.name, rule, *args, self.names.code)
            if front:
                arguments.refuse_later()
            name = cst.parse_expression(arguments.form(code, new) if rule.is_form else code)
        except UntranslatableError as error:
            raise UntranslatableError(str(error), rule.usage) from None

        self.names.translated.add(root_of(reference.node))
        changed = "".join(f", {change}" for change in arguments.changes)
        self._tell_done(reference.node, f"{reference.label} is {rule.target}{changed}")
        for check in filter(None, [rule.check, *arguments.checks]):
            self._report("check", reference.node, reference.label, check)
        self._check_values(reference, rule, args[0])

        if rule.is_form:
            return name
        if front:
            first = new.args[0].with_changes(value=name)
            return new.with_changes(args=separated([first, *arguments.new], new.args))
        if is_call:
            return new.with_changes(func=name, args=separated(arguments.new, new.args))
        whole = cst.Call(name, arguments.new) if rule.written else name
        return whole.with_changes(lpar=new.lpar, rpar=new.rpar)

    def _refuse_places(self, reference: Reference, rule: NameRule, node: cst.CSTNode) -> None:
        """Refuses a name where it has another meaning here.

        Raises:
            UntranslatableError: If it stands in such a place.
        """
        if not isinstance(node, cst.Call):
            self._refuse_tests(reference, rule)
            if rule.is_only_called or rule.is_form:
                reason = "it is translated only where it is called: arguments differ"
                raise UntranslatableError(reason, rule.usage)

        parent = self.program.parents[node]
        if rule.is_only_scoped and not isinstance(parent, cst.WithItem | cst.Decorator):
            raise UntranslatableError("streams are forked for a block, or a call, here", rule.usage)

        # Filters that choose arrays which no Variable of Flax holds.
        if reference.name in SETS["filtered"]:
            names = {self.program.certain(part) for part in walk(node)}
            if not names.isdisjoint(("jax.Array", f"{NNX}.Variable")):
                raise UntranslatableError(NOTES["filter"], rule.usage)

    def _refuse_tests(self, reference: Reference, rule: NameRule) -> None:
        """Refuses tests of classes that have other subclasses here, and patterns of attributes.

        Raises:
            UntranslatableError: If a name stands in one.
        """
        inner = (cst.BinaryOperation, cst.Tuple, cst.Element, cst.Arg)
        around = self.program.around(reference.node)
        place = next(each for each in around if not isinstance(each, inner))
        if isinstance(place, cst.MatchClass) and (place.patterns or place.kwds):
            raise UntranslatableError("attributes of a pattern may differ", rule.usage)
        if reference.name not in SETS["families"]:
            return

        is_test = isinstance(place, cst.Comparison | cst.ComparisonTarget | cst.MatchClass)
        function = dotted(place.func) if isinstance(place, cst.Call) else ""
        if is_test or function in ("isinstance", "issubclass"):
            raise UntranslatableError(NOTES["family"], rule.usage)
        if isinstance(place, cst.Call | cst.AssignTarget | cst.Assign | cst.DictElement):
            what = f"in a test of classes, {NOTES['family']}"
            self._report("check", reference.node, reference.label, what)

    def _check_values(self, reference: Reference, rule: NameRule, args: Sequence[cst.Arg]) -> None:
        """Tells of arguments that mean something else here, and of layers used as values."""
        name, node, label = reference.name, reference.node, reference.label
        first = args[0].value if args else None
        if first is not None and self._is_number(first):
            if name in SETS["variables"]:
                self._report("check", node, label, NOTES["number"])
            if name == "data":
                self._report("check", node, label, NOTES["configuration"])

        if name == "jit":
            around = self.program.around(node)
            place = next(each for each in around if not isinstance(each, cst.Call | cst.Arg))
            function = self.program.only_binding(first) if isinstance(first, cst.Name) else first
            if isinstance(place, cst.Decorator):
                function = self.program.parents[place]
            if isinstance(function, cst.FunctionDef | cst.Lambda) and self._captures(function):
                self._report("check", node, label, NOTES["capture"])

        parent, owner, *_ = [*self.program.around(node), None]
        is_value = not isinstance(parent, cst.Call | cst.Annotation | cst.Subscript | cst.Attribute)
        given = {*map(keyword_of, args), *rule.arguments[: len(args)]}
        is_other = bool(rule.renamed.keys() - given) or isinstance(owner, cst.ClassDef)
        if is_value and is_other and rule.target.startswith("sx.nn."):
            self._report("check", node, label, f"as a class or value its calls are {rule.usage}")

    def _is_number(self, node: cst.BaseExpression) -> bool:
        """Whether a value is a Python number, or made by NumPy."""
        node = node.expression if isinstance(node, cst.UnaryOperation) else node
        function = self.program.certain(node.func) if isinstance(node, cst.Call) else ""
        is_constant = isinstance(node, cst.BaseNumber) or dotted(node) in ("True", "False")
        return is_constant or function.startswith("numpy.")

    def _captures(self, function: cst.FunctionDef | cst.Lambda) -> bool:
        """Whether a function sees an object of Flax that is not an argument."""
        for name in walk(function.body):
            binding = self.program.only_binding(name)
            if binding is None or function in self.program.around(binding):
                continue
            kind = self.kinds.of(name)
            if kind is not None and kind.family in ("module", "variable", "optimizer"):
                return True
        return False

    # --- methods and attributes -------------------------------------------------------------------

    def _call(self, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
        """Returns what a call becomes, if it is one of a method of Flax."""
        if self.is_of_flax:
            self._look_at(old)
        if not isinstance(old.func, cst.Attribute):
            return new
        kind, method = self.kinds.of(old.func.value), old.func.attr.value
        if kind is not None and (kind.family == "other" or kind.defines(method)):
            return new

        if method == "set_attributes" and self.is_of_flax:
            words = {*map(keyword_of, old.args)} & SETS["unread"] - {"deterministic"}
            for word in sorted(words):
                self._report("left", old, f"{method}({word}=)", "nothing here reads it")

        for family, missing in MISSING.items():
            if method in missing and (kind is None or kind.family == family):
                self._left_of(kind, old, method, "it is not offered here", missing[method])
        for family, rules in METHODS.items():
            if method in rules and self._may_be(family, kind, rules[method], old):
                rule = rules[method]
                try:
                    return self._method(rule, kind, old, new)
                except UntranslatableError as error:
                    self._left_of(kind, old, method, str(error), rule.usage)
        return new

    def _may_be(self, family: str, kind: FlaxKind | None, rule: NameRule, call: cst.Call) -> bool:
        """Whether a call may be one of a method of Flax, by its object, arguments and result."""
        if kind is not None:
            return kind.family == family
        given = [arg for arg in call.args if not arg.star and not arg.keyword]
        if family == "module":
            return len(given) > 2 or (bool(given) and self._is_variable_type(given[0]))
        # What gives two results is no optimizer of Flax, but one of optax.
        statement = self.program.parents[call]
        targets = statement.targets if isinstance(statement, cst.Assign) else ()
        is_pair = bool(targets) and isinstance(targets[0].target, cst.Tuple)
        given += [arg for arg in call.args if keyword_of(arg) in rule.arguments]
        return not is_pair and len(given) == len(rule.arguments)

    def _is_variable_type(self, arg: cst.Arg) -> bool:
        kind = self.kinds.of_class(arg.value)
        return kind is not None and kind.family == "variable"

    def _method(
        self, rule: NameRule, kind: FlaxKind | None, old: cst.Call, new: cst.Call
    ) -> cst.BaseExpression:
        """Returns what a call of a method becomes.

        Raises:
            UntranslatableError: If it has no counterpart, or its object is not known.
        """
        function = cst.ensure_type(new.func, cst.Attribute)
        method, owner = function.attr.value, cst.ensure_type(old.func, cst.Attribute).value
        if kind is None:
            raise UntranslatableError(_UNSEEN)

        # Those with arguments return nothing here.
        is_statement = isinstance(self.program.parents[old], cst.Expr)
        is_plain = not any(keyword_of(arg) in rule.arguments for arg in old.args)
        if rule.arguments and not (is_statement and is_plain):
            raise UntranslatableError(_NO_RESULT)
        if method == "sow" and not self._is_variable_type(old.args[0]):
            raise UntranslatableError(_NO_RESULT)
        if method == "update" and not self.kinds.is_made_of(owner, old.args[0].value):
            reason = "an optimizer updates the model that it was made of, which this may not be"
            raise UntranslatableError(reason)

        arguments = Arguments(method, rule, old.args, new.args, self.names.code)
        code = arguments.form(rule.target, function.value)
        self._tell_done(old, f"{method}() is {rule.usage}")
        if " = " in rule.target:
            self._statements[self.program.parents[old]] = code
            return new
        return cst.parse_expression(code)

    def _expression_statement(self, old: cst.Expr, new: cst.Expr) -> cst.BaseSmallStatement:
        """Returns the assignment that stands for a call of a method."""
        if old not in self._statements:
            return new
        line = cst.parse_statement(self._statements[old])
        return cst.ensure_type(line, cst.SimpleStatementLine).body[0]

    def _attribute(self, old: cst.Attribute, new: cst.Attribute) -> cst.BaseExpression:
        """Returns what an attribute becomes, if it is one of a layer of Flax."""
        kind, name = self.kinds.of(old.value), old.attr.value
        is_called = getattr(self.program.parents[old], "func", None) is old
        if is_called or old in self.program.references:
            return new
        if kind is not None and kind.family == "other":
            return new

        layer = LAYER_ATTRIBUTES.get(kind.name) if kind is not None else None
        missing = MISSING["variable"]
        if kind is not None and name in METHODS.get(kind.family, ()) and not kind.defines(name):
            reason = "a method is translated only where it is called"
            self._left_of(kind, old, name, reason, METHODS[kind.family][name].usage)
        elif name in missing and (kind is None or kind.family == "variable"):
            self._left_of(kind, old, name, "not offered here", missing[name])
        elif kind is None or (kind.name in _ANY_MODULE and kind.owner is None):
            # What a class sets on itself is its own.
            is_own = dotted(old.value) == "self" or not is_set(old, self.program.parents)
            if name in SETS["unread"] and not is_own:
                reason = "if its object is a layer, nothing here reads it"
                self._left_of(kind, old, name, reason, "")
        elif layer is not None and layer.get(name):
            self._tell_done(old, f"{kind.name}.{name} is .{layer[name]}")
            return new.with_changes(attr=cst.Name(layer[name]))
        # What a class of the file has besides is its own.
        elif layer is not None and name not in layer and (not kind.owner or name in SETS["unread"]):
            reason = "the layer has no such attribute here"
            self._report("left", old, f"{kind.name}.{name}", reason)
        return new

    def _left_of(
        self, kind: FlaxKind | None, node: cst.CSTNode, what: str, reason: str, write: str
    ) -> None:
        """Leaves a method or attribute of an object of Flax, or of one that is not known."""
        if kind is not None:
            self._report("left", node, what, reason, write)
            return
        # A file without Flax is told, and ends only where another file may give it the object.
        root = root_of(node.func if isinstance(node, cst.Call) else node)
        binding = self.program.only_binding(root)
        around = self.program.around(binding) if isinstance(binding, cst.Param) else ()
        functions = {each.name.value for each in around if isinstance(each, cst.FunctionDef)}
        is_left = self.is_of_flax or not functions.isdisjoint(self.project.taken)
        write = f"{write}, if it is" if write else ""
        self._report("left" if is_left else "check", node, what, _UNSEEN, write)

    def _assign_target(self, old: cst.AssignTarget, new: cst.AssignTarget) -> cst.AssignTarget:
        """Tells of what a Module holds here otherwise than there."""
        value, target = self.kinds.value_of(old.target), old.target
        kind = self.kinds.of(target.value) if isinstance(target, cst.Attribute) else None
        if kind is None or kind.family != "module" or value is None:
            return new

        if self._is_number(value) and isinstance(value, cst.Call):
            self._report("check", old, dotted(target), NOTES["number"])
        is_plain = isinstance(value, cst.List | cst.Dict | cst.ListComp | cst.DictComp)
        if is_plain and any(map(self._is_state, walk(value))):
            self._report("check", old, dotted(target), NOTES["plain"])
        return new

    def _is_state(self, node: cst.CSTNode) -> bool:
        """Whether a value is made by a call that returns an object of Flax or an array of JAX."""
        if not isinstance(node, cst.Call):
            return False
        kind = self.kinds.of(node)
        is_of_flax = kind is not None and kind.family != "other"
        return is_of_flax or self.program.certain(node.func).startswith("jax.")

    def _aug_assign(self, old: cst.AugAssign, new: cst.AugAssign) -> cst.AugAssign:
        """Tells of operators in place."""
        kind = self.kinds.of(old.target)
        if kind is not None and kind.family == "variable":
            self._report("check", old, dotted(old.target), NOTES["operator"])
        return new

    # --- what the text does not show --------------------------------------------------------------

    def _look_at(self, call: cst.Call) -> None:
        """Tells of calls that see names, the order of leaves, or types of leaves."""
        function, args = dotted(call.func), call.args
        if function in ("exec", "eval", "globals") and self.program.is_builtin(call.func):
            self._report("left", call, function, _IN_TEXTS)
        if function in ("getattr", "setattr", "hasattr", "delattr") and len(args) > 1:
            self._look_at_named_attribute(function, args[0].value, args[1].value)
        if function == "isinstance" and len(args) == 2:
            classes = {self.program.of_nnx(node) for node in walk(args[1].value)}
            if classes & SETS["variables"]:
                self._report("check", call, function, _ISINSTANCE, "state.filter(sx.Param)")

        is_told = any(notice.reason == NOTES["order"] for notice in self.notices)
        if self.program.certain(call.func).startswith(tuple(SETS["ordered"])) and not is_told:
            kinds = [self.kinds.of(arg.value) for arg in args]
            if any(kind is None or kind.family != "other" for kind in kinds):
                self._report("check", call, code_of(call).splitlines()[0][:40], NOTES["order"])

    def _look_at_named_attribute(
        self, function: str, owner: cst.BaseExpression, name: cst.BaseExpression
    ) -> None:
        """Leaves attributes of Flax that stand in texts, as in ``hasattr(x, "use_bias")``."""
        kind = self.kinds.of(owner)
        is_own = kind is not None and kind.owner is not None and kind.name in _ANY_MODULE
        if is_own or (kind is not None and kind.family == "other"):
            return
        if _is_named(text_of(name)):
            self._report("left", name, f"{function}({code_of(name)})", _IN_TEXTS)
        elif not isinstance(name, cst.SimpleString) and function == "setattr":
            reason = "of some names, if its object is a layer, nothing here reads it"
            self._report("check", owner, function, reason)

    def _text(self, old: cst.SimpleString, new: cst.SimpleString) -> cst.SimpleString:
        """Leaves names of Flax that stand in texts, also in annotations."""
        is_name = bool(library_of(text_of(old))) and " " not in text_of(old)
        if self.is_of_flax and (is_name or old in self.program.quoted):
            write = "" if is_name else "it without quotes"
            self._report("left", old, code_of(old), _IN_TEXTS, write)
        return new

    def _pattern(
        self, old: cst.MatchKeywordElement, new: cst.MatchKeywordElement
    ) -> cst.MatchKeywordElement:
        """Leaves attributes of Flax in patterns."""
        if self.is_of_flax and _is_named(old.key.value):
            self._report("left", old, old.key.value, _UNSEEN)
        return new

    def _printed_code(
        self, old: cst.FormattedStringExpression, new: cst.FormattedStringExpression
    ) -> cst.FormattedStringExpression:
        """Tells of ``f"{code=}"``, whose text is the code, where the code is translated."""
        code = code_of(old.expression)
        if old.equal is not None and code != code_of(new.expression):
            reason = "the text is the code, which is another one"
            self._report("check", old, f"{{{code}=}}", reason)
        return new

    # --- classes and decorators -------------------------------------------------------------------

    def _class(self, old: cst.ClassDef, new: cst.ClassDef) -> cst.ClassDef:
        """Returns a class without options of Flax; its hooks are left."""
        kind, name = self.kinds.of_definition(old), old.name.value
        if kind is not None and kind.family == "variable":
            for method in old.body.body:
                if isinstance(method, cst.FunctionDef) and method.name.value in SETS["hooks"]:
                    what = f"{name}.{method.name.value}"
                    reason = "a Variable has no hooks, so nothing calls it"
                    self._report("left", method, what, reason, "a property of its Module")

        rest = [option for option in new.keywords if keyword_of(option) != "pytree"]
        is_module = kind is None or kind.family == "module"
        if len(rest) == len(new.keywords) or not is_module or not self.is_of_flax:
            return new
        reason = "every Module is a pytree here, also in lists"
        self._report("check", old, f"class {name}(pytree=)", reason)
        args = separated([*new.bases, *rest], new.keywords)
        count = len(new.bases)
        return new.with_changes(bases=args[:count], keywords=args[count:])

    def _subscript(self, old: cst.Subscript, new: cst.Subscript) -> cst.BaseExpression:
        """Returns a GraphDef without the type of its model."""
        return new.value if self.program.of_nnx(old.value) == "GraphDef" else new

    def _find_splits(self, function: cst.FunctionDef) -> None:
        """Finds ``split_rngs(splits=n)`` over a ``vmap`` of everything."""
        known = {*NAMES["vmap"].arguments}
        for upper, lower in zip(function.decorators, function.decorators[1:], strict=False):
            split, vmap = upper.decorator, lower.decorator
            if not isinstance(split, cst.Call) or self.program.of_nnx(split.func) != "split_rngs":
                continue
            options = vmap.args if isinstance(vmap, cst.Call) else ()
            words = {keyword_of(arg): code_of(arg.value) for arg in options}
            mapping = vmap.func if isinstance(vmap, cst.Call) else vmap
            takes_all = words.get("in_axes", "0") == "0" and words.keys() <= known
            is_split = [*map(keyword_of, split.args)] == ["splits"]
            if self.program.of_nnx(mapping) == "vmap" and takes_all and is_split:
                self._splits[lower] = split

    def _decorator(self, old: cst.Decorator, new: cst.Decorator) -> Any:
        """Returns a ``vmap`` with the number of the streams that were split over it."""
        if old.decorator in self._splits.values():
            return cst.RemoveFromParent()
        split = self._splits.get(old)
        if split is None:
            return new
        self._tell_done(split, "split_rngs(splits=n) is axis_size=n of vmap")
        call = new.decorator if isinstance(new.decorator, cst.Call) else cst.Call(new.decorator)
        if "axis_size" in map(keyword_of, call.args):
            return new
        size = split.args[0].with_changes(keyword=cst.Name("axis_size"))
        args = separated([*call.args, size], call.args)
        return new.with_changes(decorator=call.with_changes(args=args))

    _CHANGES: ClassVar[dict[type, Any]] = {
        cst.Call: _call,
        cst.Expr: _expression_statement,
        cst.Attribute: _attribute,
        cst.AssignTarget: _assign_target,
        cst.AugAssign: _aug_assign,
        cst.SimpleString: _text,
        cst.MatchKeywordElement: _pattern,
        cst.FormattedStringExpression: _printed_code,
        cst.ClassDef: _class,
        cst.Subscript: _subscript,
        cst.Decorator: _decorator,
    }


def translated_libraries(program: SourceProgram) -> set[str]:
    """Returns the libraries of a file to translate; of some, all names must be known."""
    chosen: set[str] = set()
    for library, rules in LIBRARIES.items():
        names = {each.name for each in program.references.values() if each.library == library}
        if names and (library == NNX or names <= rules.keys()):
            chosen.add(library)
    return chosen


def _rule_of(reference: Reference) -> NameRule:
    """Returns the rule of a name.

    Raises:
        UntranslatableError: If it is not certain, or has none.
    """
    if reference.doubt:
        raise UntranslatableError(reference.doubt)
    if not reference.name:
        raise UntranslatableError("the library itself is used as a value", _UNKNOWN.write)
    rule = LIBRARIES[reference.library].get(reference.name)
    if rule is None:
        raise UntranslatableError(*LEFT.get(reference.name, _UNKNOWN))
    return rule


def _is_named(name: str) -> bool:
    """Whether a text may name an attribute that differs here."""
    return name in MISSING["variable"] or name in SETS["texts"] | SETS["unread"]
