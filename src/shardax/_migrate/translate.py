# SPDX-License-Identifier: Apache-2.0
"""Translation of a program, with a report.

What has no counterpart of the same meaning is left as it is, and the program then fails when it is
imported: the import of the other library is gone, and a line says what is left to write. So no
program runs that computes something else unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import libcst as cst
from libcst import metadata

from shardax._migrate.arguments import CallPlan, code_of, plan_call
from shardax._migrate.project import Finding, Project, methods_without_import, unhashable_attributes
from shardax._migrate.references import (
    LIBRARIES,
    ParsedProgram,
    Reference,
    dotted,
    imported_names,
    is_variable,
    library_of,
    read,
)
from shardax._migrate.table import HOOKS, LEFT, VARIABLES, Left, Name

_ISINSTANCE = (
    "filters see Variables, but leaves of a State are arrays here, so this is False for them"
)
_TESTS = ("isinstance", "issubclass")
_METHODS = {
    "get_metadata": "v.metadata, a mapping",
    "has_metadata": "name in v.metadata",
    "del_metadata": "v.set_metadata(name=None)",
    "get_raw_value": "v.value",
    "set_raw_value": "v.value = x",
    "flat_state": "state.flat()",
    "initialize_carry": "cell.initial_carry(x)",
    "init_cache": "sx.nn.AttentionCache(batch, length, heads, size), an argument of the call",
}
_ATTRIBUTES = {"raw_value": "v.value", "sharding_names": "v.axes", "out_sharding": "v.axes"}


class Notice(NamedTuple):
    """A place for a person to look at."""

    line: int
    # "left": not translated; "check": translated, but look; "kept": of a library that stays.
    kind: Literal["left", "check", "kept"]
    what: str
    reason: str
    write: str = ""


@dataclass(frozen=True)
class Translation:
    """A translated program."""

    text: str
    notes: tuple[Notice, ...]

    @property
    def left(self) -> int:
        """Number of untranslated places."""
        return sum(note.kind == "left" for note in self.notes)


def translate(text: str, project: Project | None = None) -> Translation:
    """Translates a program of a project; ``libcst.ParserSyntaxError`` for what is none."""
    project = Project() if project is None else project
    wrapper = metadata.MetadataWrapper(cst.parse_module(text))
    program = read(wrapper)
    if program.stars:
        note = Notice(program.stars[0], "left", "import *", "names cannot be told", "import nnx")
        return Translation(text, (note,))
    libraries = program.translated()
    planner = _Planner(program, libraries)
    if "flax.nnx" in libraries:
        planner.note(unhashable_attributes(program, project))
    elif project.uses_nnx:
        planner.note(methods_without_import(program))
    if not libraries:
        return Translation(text, tuple(planner.notes))
    planner.run()
    notes = tuple(sorted(set(planner.notes)))
    left = [note.line for note in notes if note.kind == "left"]
    rewriter = _Rewriter(planner, libraries, left)
    return Translation(wrapper.module.visit(rewriter).code, notes)


Change = Callable[[cst.BaseExpression], cst.BaseExpression]


class _Planner:
    """Plans the translation of every place, before any change."""

    def __init__(self, program: ParsedProgram, libraries: set[str]) -> None:
        self.program = program
        self.libraries = libraries
        self.notes: list[Notice] = []
        self.targets: dict[cst.CSTNode, str] = {}  # references by what they become
        self.calls: dict[cst.CSTNode, CallPlan] = {}
        self.changes: dict[cst.CSTNode, Change] = {}  # of other expressions
        self.statements: dict[cst.CSTNode, Callable[[cst.Call], cst.BaseSmallStatement]] = {}
        self.removed: set[cst.CSTNode] = set()  # decorators
        self.bare_classes: set[cst.CSTNode] = set()  # without pytree=
        self.settled: set[cst.CSTNode] = set()  # references dealt with elsewhere
        self.modules = {"sx"}  # what the new text refers to
        is_taken = "sx" in program.names and "shardax as sx" not in program.imported
        self.alias = "shardax" if is_taken else "sx"
        for library in LIBRARIES:
            if program.uses(library) and library not in libraries:
                line = min(r.line for r in program.references if r.library == library)
                reason = "its Modules are not translated, so all of it stays as it is"
                self.notes.append(Notice(line, "kept", library, reason))

    def note(self, findings: Iterable[Finding]) -> None:
        """Notes places to check."""
        for finding in findings:
            self._note(*finding)

    def run(self) -> None:
        """Plans all places."""
        if "flax.nnx" in self.libraries:
            for function in self.program.functions:
                self._plan_decorators(function)
            for owner in self.program.classes:
                if any(_is_pytree_option(arg) for arg in owner.keywords):
                    self.bare_classes.add(owner)
                    line, what = self.program.lines[owner], f"class {owner.name.value}(pytree=)"
                    self._note(line, what, "every Module is a pytree here, also in lists")
                self._plan_hooks(owner)
            for call in self.program.calls:
                self._plan_method(call)
            for attribute in self.program.attributes:
                name = attribute.attr.value
                if name in _ATTRIBUTES:
                    reason = "if this is of a Variable: it is not offered here"
                    self._note(self.program.lines[attribute], name, reason, _ATTRIBUTES[name])
        for reference in self.program.references:
            if reference.library in self.libraries and reference.node not in self.settled:
                self._plan_reference(reference)

    def _plan_hooks(self, owner: cst.ClassDef) -> None:
        """Leaves hooks of Variables to a person."""
        if not any(self._name(_unsubscripted(base.value)) in VARIABLES for base in owner.bases):
            return
        for method in owner.body.body:
            if isinstance(method, cst.FunctionDef) and method.name.value in HOOKS:
                what = f"{owner.name.value}.{method.name.value}"
                left = Left(
                    "a Variable has no hooks, so nothing calls it", "a property of its Module"
                )
                self._left(self.program.lines[method], what, left)

    def target(self, name: str) -> str:
        """Returns the code of a target, with the aliases of this file."""
        module, _, rest = name.partition(".")
        self.modules.add(module)
        return f"{self.alias if module == 'sx' else module}.{rest}"

    # --- references -------------------------------------------------------------------------------

    def _plan_reference(self, reference: Reference) -> None:
        key = reference.name
        label = f"{reference.library.rpartition('.')[2]}.{key}".rstrip(".")
        call, args, is_partial = self._call_of(reference)
        special = getattr(self, f"_plan_{key.replace('.', '_')}", None)
        if special is not None and reference.library == "flax.nnx":
            problem = special(reference, call)
            if problem:
                self._left(reference.line, label, Left(problem, "see docs/coming-from-flax.md"))
            return
        name = LIBRARIES[reference.library].get(key)
        if name is None:
            unknown = Left("the name is in no table", "see docs/coming-from-flax.md")
            self._left(reference.line, label, LEFT.get(key, unknown))
            return
        try:
            if call is not None:
                plan = plan_call(key, name, args, is_partial)
                self.modules |= {c.partition(".")[0] for c in plan.added.values() if "." in c}
                self.calls.setdefault(call, plan if not is_partial else _behind_first(plan))
                for check in plan.checks:
                    self._note(reference.line, label, check)
            elif isinstance(reference.parent, cst.Decorator) and name.written:
                plan = CallPlan(added=dict(name.written))
                self.changes[reference.node] = lambda node: cst.Call(node, plan.apply([]))
            elif not name.bare:
                raise NotImplementedError(
                    "arguments or defaults differ, so calls through another name are not translated"
                )
        except NotImplementedError as error:
            self._left(reference.line, label, Left(str(error), _usage(name)))
            return
        self.targets[reference.node] = self.target(name.target)
        if key == "GraphDef" and isinstance(reference.parent, cst.Subscript):  # no type of a model
            self.changes[reference.parent] = lambda node: cst.ensure_type(node, cst.Subscript).value
        if name.check and call is not None:
            self._note(reference.line, label, name.check)
        elif call is None and name.target.startswith("sx.nn.") and self._is_value(reference, name):
            words = ", ".join(f"{here}= for {there}=" for there, here in name.renamed.items())
            self._note(reference.line, label, f"calls of this value take {words}")
        elif isinstance(reference.parent, cst.Arg) and name.target.startswith("sx.nn."):
            owner = self.program.parents[reference.parent]
            if isinstance(owner, cst.ClassDef):
                reason = "super().__init__ takes the arguments of the class here"
                self._note(reference.line, f"class {owner.name.value}({label})", reason)

    def _call_of(self, reference: Reference) -> tuple[cst.Call | None, Sequence[cst.Arg], bool]:
        """Returns the call of a reference and its arguments, or a partial's."""
        parent = reference.parent
        if isinstance(parent, cst.Call) and parent.func is reference.node:
            return parent, parent.args, False
        owner = self.program.parents.get(parent)
        if isinstance(parent, cst.Arg) and owner in self.program.partials:
            assert isinstance(owner, cst.Call)
            if owner.args[0] is parent:
                return owner, owner.args[1:], True
        return None, (), False

    def _is_value(self, reference: Reference, name: Name) -> bool:
        """Whether a name with renamed arguments is passed on for calls."""
        if not name.renamed:
            return False
        node, parent = reference.node, reference.parent
        while isinstance(parent, cst.BaseExpression | cst.Arg | cst.Annotation | cst.DictElement):
            if isinstance(parent, cst.Annotation | cst.Attribute):
                return False
            if isinstance(parent, cst.Call):
                return node is not parent.func and dotted(parent.func) not in _TESTS
            node, parent = parent, self.program.parents[parent]
        return not isinstance(parent, cst.ClassDef)

    def _left(self, line: int, what: str, left: Left) -> None:
        self.notes.append(Notice(line, "left", what, left.reason, left.write))

    def _note(self, line: int, what: str, reason: str, write: str = "") -> None:
        self.notes.append(Notice(line, "check", what, reason, write))

    # --- names with a form of their own -----------------------------------------------------------

    def _plan_(self, reference: Reference, call: cst.Call | None) -> str:
        del call
        question = self.program.parents[reference.parent]
        if isinstance(question, cst.Call) and self._asks_for_translated(question):
            self.changes[question] = lambda node: cst.Name("True")
            return ""
        return "the library itself is used as a value"

    def _asks_for_translated(self, call: cst.Call) -> bool:
        """Whether a call is ``hasattr(nnx, "List")``, of a translated name."""
        name = call.args[-1].value
        if dotted(call.func) != "hasattr" or not isinstance(name, cst.SimpleString):
            return False
        return name.evaluated_value in LIBRARIES["flax.nnx"]

    def _plan_data(self, reference: Reference, call: cst.Call | None) -> str:
        if call is None or len(call.args) != 1 or call.args[0].keyword or call.args[0].star:
            return "only of one value: what holds arrays is data here"
        if isinstance(call.args[0].value, cst.Integer | cst.Float) and reference.name == "data":
            reason = "a Python number is configuration here: it is no leaf, and other ones retrace"
            self._note(reference.line, "nnx.data", reason, "sx.Variable(jax.numpy.asarray(x))")
        self.changes[call] = lambda node: cst.ensure_type(node, cst.Call).args[0].value
        return ""

    def _plan_static(self, reference: Reference, call: cst.Call | None) -> str:
        problem = self._plan_data(reference, call)
        if not problem:
            self._note(reference.line, "nnx.static", "an array in it is state here, not static")
        return problem

    def _plan_initializers_zeros_init(self, reference: Reference, call: cst.Call | None) -> str:
        if call is None or call.args:
            return "without a call it is another function: zeros"
        code = self.target(f"jax.nn.initializers.{reference.name.split('.')[1].split('_')[0]}")
        self.changes[call] = lambda node: cst.parse_expression(code)
        return ""

    _plan_initializers_ones_init = _plan_initializers_zeros_init

    def _plan_to_pure_dict(self, reference: Reference, call: cst.Call | None) -> str:
        return self._plan_state_method(call, "to_pure_dict", 1, 1)

    def _plan_filter_state(self, reference: Reference, call: cst.Call | None) -> str:
        return self._plan_state_method(call, "filter", 2, 2)

    def _plan_merge_state(self, reference: Reference, call: cst.Call | None) -> str:
        return self._plan_state_method(call, "merge", 2, 9)

    def _plan_split_state(self, reference: Reference, call: cst.Call | None) -> str:
        # With one filter it returns the State itself there, a tuple here.
        return self._plan_state_method(call, "split", 3, 9)

    def _plan_state_method(self, call: cst.Call | None, method: str, least: int, most: int) -> str:
        if call is None or any(arg.keyword or arg.star for arg in call.args):
            return f"a method of a State here: state.{method}(...)"
        if not least <= len(call.args) <= most:
            return f"state.{method} takes other arguments"

        def change(node: cst.BaseExpression) -> cst.BaseExpression:
            assert isinstance(node, cst.Call)
            state = node.args[0].value
            if not isinstance(state, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
                state = state.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            return node.with_changes(
                func=cst.Attribute(state, cst.Name(method)), args=node.args[1:]
            )

        self.changes[call] = change
        return ""

    # --- methods ----------------------------------------------------------------------------------

    def _plan_method(self, call: cst.Call) -> None:
        line = self.program.lines[call]
        if isinstance(call.func, cst.Name) and call.func.value == "isinstance":
            kinds = [
                reference
                for node, reference in self.program.by_node.items()
                if reference.name in VARIABLES and _is_within(self.program, node, call)
            ]
            if kinds:
                self._note(line, "isinstance", _ISINSTANCE, "state.filter(sx.Param)")
        if not isinstance(call.func, cst.Attribute):
            return
        method, receiver = call.func.attr.value, call.func.value
        plain = [arg for arg in call.args if not arg.keyword and not arg.star]
        if method == "sow" and len(plain) >= 3 and (kind := self._kind(plain[0])):
            self._plan_sow(call, kind)
        elif method == "update" and len(plain) == 2 and self._is_optimizer(receiver, plain):
            if isinstance(self.program.parents[call], cst.Expr):
                self.calls[call] = CallPlan(dropped={0})
            else:
                unused = Left("it returns nothing here", "optimizer.update(grads)")
                self._left(line, "optimizer.update", unused)
        elif method == "get_value" and not call.args:
            if is_variable(self.program, receiver):
                self.changes[call] = _value
            else:
                self._note(line, method, "if this is a Variable: it has no such method", "v.value")
        elif method == "set_value" and len(plain) == len(call.args) == 1:
            is_statement = isinstance(self.program.parents[call], cst.Expr)
            if is_statement and is_variable(self.program, receiver):
                self.statements[self.program.parents[call]] = _assignment
            else:
                reason = "if this is a Variable: it has no such method"
                self._note(line, method, reason, "v.value = x")
        elif method in _METHODS:
            self._note(line, method, "it is not offered here", _METHODS[method])

    def _kind(self, arg: cst.Arg) -> str:
        reference = self.program.by_node.get(arg.value)
        if reference is not None:
            return reference.name if reference.name in VARIABLES else ""
        return "own" if isinstance(arg.value, (cst.Name, cst.Attribute)) else ""

    def _plan_sow(self, call: cst.Call, kind: str) -> None:
        if kind == "Intermediate":
            self.settled.add(call.args[0].value)
            self.calls[call] = CallPlan(dropped={0})
            return

        def change(node: cst.BaseExpression) -> cst.BaseExpression:
            assert isinstance(node, cst.Call)
            first, *others = node.args
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            typed = cst.Arg(
                first.value, keyword=cst.Name("type"), equal=equal, comma=others[1].comma
            )
            middle = others[1].with_changes(comma=comma)
            return node.with_changes(args=[others[0], middle, typed, *others[2:]])

        self.changes[call] = change

    def _is_optimizer(self, receiver: cst.BaseExpression, plain: Sequence[cst.Arg]) -> bool:
        # Those of optax are called with gradients and a state; here they come second.
        if code_of(plain[0].value).lower().startswith("grad"):
            return False
        name = dotted(receiver).rpartition(".")[2]
        return name in self.program.optimizers or "grad" in code_of(plain[1].value).lower()

    def _plan_decorators(self, function: cst.FunctionDef) -> None:
        """Plans ``split_rngs(splits=n)`` over a ``vmap`` of everything."""
        for split, mapped in zip(function.decorators, function.decorators[1:], strict=False):
            call = split.decorator
            if not isinstance(call, cst.Call) or self._name(call.func) != "split_rngs":
                continue
            keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword}
            vmap = mapped.decorator
            options = list(vmap.args) if isinstance(vmap, cst.Call) else []
            is_vmap = self._name(vmap.func if isinstance(vmap, cst.Call) else vmap) == "vmap"
            words = {arg.keyword.value: code_of(arg.value) for arg in options if arg.keyword}
            takes_all = words.get("in_axes", "0") == "0" and len(words) == len(options)
            if not is_vmap or not takes_all or keywords.keys() != {"splits"} or len(call.args) > 1:
                continue
            self.removed.add(split)
            self.settled.add(call.func)
            if "axis_size" in words:
                continue
            size = code_of(keywords["splits"])
            added = CallPlan(added={"axis_size": size})
            if isinstance(vmap, cst.Call):
                plan = plan_call("vmap", LIBRARIES["flax.nnx"]["vmap"], vmap.args)
                plan.added |= added.added
                self.calls[vmap] = plan
            else:
                self.changes[vmap] = lambda node, plan=added: cst.Call(node, plan.apply([]))

    def _name(self, node: cst.CSTNode) -> str:
        reference = self.program.by_node.get(node)
        return reference.name if reference is not None and reference.library == "flax.nnx" else ""


def _unsubscripted(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.value if isinstance(node, cst.Subscript) else node


def _is_pytree_option(arg: cst.Arg) -> bool:
    return arg.keyword is not None and arg.keyword.value == "pytree"


def _without_pytree_option(owner: cst.ClassDef) -> cst.ClassDef:
    keywords = [arg for arg in owner.keywords if not _is_pytree_option(arg)]
    bases = list(owner.bases)
    last = keywords or bases
    if last:
        last[-1] = last[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return owner.with_changes(bases=bases, keywords=keywords)


_VALUE = cst.Name("value")


def _value(node: cst.BaseExpression) -> cst.BaseExpression:
    return cst.ensure_type(node, cst.Call).func.with_changes(attr=_VALUE)


def _assignment(call: cst.Call) -> cst.BaseSmallStatement:
    assert isinstance(call.func, cst.Attribute)
    target = cst.AssignTarget(call.func.with_changes(attr=_VALUE))
    return cst.Assign([target], call.args[0].value)


def _behind_first(plan: CallPlan) -> CallPlan:
    """Returns a plan for the arguments of a partial, behind the function."""
    return CallPlan(
        {position + 1: keyword for position, keyword in plan.keywords.items()},
        {position + 1 for position in plan.dropped},
        {position + 1: change for position, change in plan.values.items()},
        plan.added,
        plan.checks,
    )


def _is_within(program: ParsedProgram, node: cst.CSTNode, owner: cst.CSTNode) -> bool:
    while node in program.parents:
        node = program.parents[node]
        if node is owner:
            return True
    return False


def _usage(name: Name) -> str:
    arguments = name.arguments or ()
    words = [name.renamed.get(word, word) for word in arguments if word not in name.dropped]
    return f"{name.target}({', '.join(words)})"


class _Rewriter(cst.CSTTransformer):
    """Applies the planned changes."""

    def __init__(self, planner: _Planner, libraries: set[str], left: list[int]) -> None:
        super().__init__()
        self.planner = planner
        self.libraries = libraries
        self.left = left
        self.is_guarded = False

    def on_leave(
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        planner = self.planner
        new = super().on_leave(original_node, updated_node)
        if not isinstance(new, cst.CSTNode):
            return new
        if original_node in planner.targets:
            new = _named(planner.targets[original_node], new)
        if original_node in planner.calls:
            assert isinstance(new, cst.Call)
            new = new.with_changes(args=planner.calls[original_node].apply(new.args))
        if original_node in planner.changes:
            assert isinstance(new, cst.BaseExpression)
            new = planner.changes[original_node](new)
        if original_node in planner.statements:
            assert isinstance(new, cst.Expr) and isinstance(new.value, cst.Call)
            new = planner.statements[original_node](new.value)
        if original_node in planner.bare_classes:
            new = _without_pytree_option(cst.ensure_type(new, cst.ClassDef))
        if original_node in planner.removed:
            return cst.RemoveFromParent()
        return new

    # --- imports ----------------------------------------------------------------------------------

    def leave_SimpleStatementLine(  # noqa: N802 (LibCST names it)
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        del original_node
        body: list[cst.BaseSmallStatement] = []
        is_changed = False
        for statement in updated_node.body:
            if not isinstance(statement, (cst.Import, cst.ImportFrom)):
                body.append(statement)
                continue
            kept = [alias for alias, name in imported_names(statement) if not self._goes(name)]
            total = len(imported_names(statement))
            if len(kept) == total and not self._reaches(statement):
                body.append(statement)
                continue
            is_changed = True
            if kept:
                kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                body.append(statement.with_changes(names=kept))
        if not is_changed:
            return updated_node
        new: list[cst.BaseStatement] = [
            cst.parse_statement(f"import {name}\n") for name in self._new_imports()
        ]
        if body:
            new.append(updated_node.with_changes(body=body, leading_lines=[]))
        if not new:
            return cst.RemoveFromParent()
        new[0] = new[0].with_changes(leading_lines=updated_node.leading_lines)
        if not body:
            trailing = updated_node.trailing_whitespace
            new[-1] = new[-1].with_changes(trailing_whitespace=trailing)
        return cst.FlattenSentinel(new)

    def _goes(self, name: str) -> bool:
        """Whether what is imported is of a translated library."""
        if name == "flax":
            return self._reaches_by_flax() and not self.planner.program.other_flax
        return library_of(name) in self.libraries

    def _reaches(self, statement: cst.Import | cst.ImportFrom) -> bool:
        is_flax = any(name == "flax" for _, name in imported_names(statement))
        return is_flax and self._reaches_by_flax()

    def _reaches_by_flax(self) -> bool:
        return any(
            reference.library in self.libraries and dotted(reference.node).startswith("flax.")
            for reference in self.planner.program.references
        )

    def _new_imports(self) -> list[str]:
        present = self.planner.program.imported
        modules = sorted(self.planner.modules - {"sx"} - present)
        ours = "shardax" if self.planner.alias == "shardax" else "shardax as sx"
        return modules + ([] if ours in present else [ours])

    # --- the line that is left --------------------------------------------------------------------

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802 (LibCST names it)
        if not self.left:
            return updated_node
        lines = ", ".join(map(str, self.left[:8])) + (", ..." if len(self.left) > 8 else "")
        places = "1 place" if len(self.left) == 1 else f"{len(self.left)} places"
        text = (
            f"shardax migrate left {places} to write by hand (before, line {lines}): write them, "
            "then remove this line."
        )
        guard = cst.parse_statement(f"raise ImportError({text!r})\n".replace("'", '"'))
        position = _behind_imports(original_node.body, self._has_import)
        # A statement may have become several.
        position += len(updated_node.body) - len(original_node.body)
        body = list(updated_node.body)
        return updated_node.with_changes(body=[*body[:position], guard, *body[position:]])

    def _has_import(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            return any(self._goes(name) for _, name in imported_names(node)) or self._reaches(node)
        return any(self._has_import(child) for child in node.children)


def _named(code: str, node: cst.CSTNode) -> cst.BaseExpression:
    """Returns an expression for code, in the parentheses of another."""
    assert isinstance(node, cst.BaseExpression)
    return cst.parse_expression(code).with_changes(lpar=node.lpar, rpar=node.rpar)


def _behind_imports(body: Sequence[cst.CSTNode], has_import: Callable[[cst.CSTNode], bool]) -> int:
    """Returns the position behind the last statement with a translated import."""
    return max((i + 1 for i, statement in enumerate(body) if has_import(statement)), default=0)
