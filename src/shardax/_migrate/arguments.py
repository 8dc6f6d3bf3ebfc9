# SPDX-License-Identifier: Apache-2.0
"""Arguments of translated calls: renamed, left out, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from shardax._migrate.program import code_of, keyword_of
from shardax._migrate.rules import ANY, OBJECTS, OPTIONS, NameRule

_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_SIMPLE = (
    cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BaseNumber | cst.BaseString
) | (cst.List | cst.Dict | cst.Set | cst.BaseComp | cst.Ellipsis)
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


class UntranslatableError(Exception):
    """A place without a counterpart, with the reason and what to write."""

    def __init__(self, reason: str, write: str = "") -> None:
        super().__init__(reason)
        self.write = write


class Arguments:
    """The arguments of a call, translated by a rule.

    Attributes:
        new: The new arguments.
        changes: What happened to them, for the report.
        checks: What a person must look at.

    Args:
        name: The name that is called.
        rule: Its rule.
        old: The arguments of the original.
        updated: The same, with what stands in them translated.
        write: Returns code of the table by the names of the file.

    Raises:
        UntranslatableError: If an argument has no counterpart.
    """

    def __init__(
        self,
        name: str,
        rule: NameRule,
        old: Sequence[cst.Arg],
        updated: Sequence[cst.Arg],
        write: Callable[[str], str],
    ) -> None:
        self.name = name
        self.rule = rule
        self.new: list[cst.Arg] = []
        self.changes: list[str] = []
        self.checks: list[str] = []
        names = [self._name_of(position, arg) for position, arg in enumerate(old)]
        self._given = dict(zip(names, old, strict=True))
        self._updated = dict(zip(names, updated, strict=True))

        for position, (argument, arg) in enumerate(zip(names, updated, strict=True)):
            if arg.star:
                self._keep_starred(arg)
            elif argument in rule.dropped:
                self._drop(argument)
            elif argument in rule.arguments or rule.takes_all:
                self._keep(argument, position, arg)
            else:
                raise UntranslatableError(f"{argument}= has no counterpart")
        for argument, code in rule.written.items():
            if argument not in self._given:
                self._write_out(rule.renamed.get(argument, argument), write(code))

    def _name_of(self, position: int, arg: cst.Arg) -> str:
        """Returns the name of an argument there, empty where it has none."""
        order = self.rule.arguments
        if arg.keyword is not None or arg.star:
            return keyword_of(arg)
        if position < len(order):
            return order[position]
        if self.rule.takes_all:
            return ""
        raise UntranslatableError(f"{self.name} takes fewer arguments here")

    def _keep_starred(self, arg: cst.Arg) -> None:
        is_reordered = self.rule.positional < 99 or self.rule.is_form
        if arg.star == "*" and (is_reordered or self.rule.written):
            raise UntranslatableError("it is called with *arguments")
        if arg.star == "**" and self.rule.written:
            raise UntranslatableError("it is called with **options, and a default differs")
        if arg.star == "**":
            note = "options given as ** keep their names: compare them with those here"
            self.checks.append(note)
        self.new.append(arg)

    def _drop(self, argument: str) -> None:
        code = code_of(self._given[argument].value)
        allowed = list(self.rule.dropped[argument])
        for value in self.rule.dropped[argument]:
            # The value that another argument has.
            if value.startswith("@") and value[1:] in self._given:
                allowed.append(code_of(self._given[value[1:]].value))
        if ANY not in allowed and code.replace(" ", "") not in allowed:
            raise UntranslatableError(f"{argument}={code} has no counterpart")
        self.changes.append(f"without {argument}")

    def _keep(self, argument: str, position: int, arg: cst.Arg) -> None:
        keyword = self.rule.renamed.get(argument, argument)
        for option in (f"{self.name}.{argument}", keyword):
            self.checks += [OPTIONS[option]] if option in OPTIONS else []
        if argument in self.rule.falsy:
            arg = arg.with_changes(value=_or(arg.value, self.rule.falsy[argument]))

        if arg.keyword is None and position >= self.rule.positional:
            arg = arg.with_changes(keyword=cst.Name(keyword), equal=_TIGHT)
        elif arg.keyword is not None and keyword != argument:
            arg = arg.with_changes(keyword=cst.Name(keyword))
            self.changes.append(f"{argument}= is {keyword}=")
        self.new.append(arg)

    def _write_out(self, keyword: str, code: str) -> None:
        value = cst.parse_expression(code)
        self.new.append(cst.Arg(value, keyword=cst.Name(keyword), equal=_TIGHT))
        self.changes.append(f"with {keyword}={code}")

    def refuse_later(self) -> None:
        """Refuses what a later call of a partial may change."""
        for argument in self.rule.written.keys() - self._given.keys():
            raise UntranslatableError(f"a later {argument}= would mean something else")
        is_named = all(arg.keyword is not None for arg in self._given.values())
        if self.rule.positional == 0 and not is_named:
            raise UntranslatableError("its arguments are in another order")

    def form(self, code: str, owner: cst.BaseExpression) -> str:
        """Returns the code that stands for the whole call.

        Args:
            code: The target of the rule.
            owner: The object whose method is called.
        """
        values = {name: arg.value for name, arg in self._updated.items()}
        values |= dict.fromkeys(OBJECTS, owner)
        parts = {name: value for name, value in values.items() if f"{{{name}}}" in code}
        codes: dict[str, str] = {}
        for name, value in parts.items():
            # An argument, or what is assigned, is no part of an operation.
            is_whole = code.partition(f"{{{name}}}")[0].endswith(("(", ", ", "=", "= "))
            is_open = isinstance(value, cst.NamedExpr | cst.GeneratorExp) or "\n" in code_of(value)
            codes[name] = code_of(value) if is_whole and not is_open else _in_parentheses(value)
        rest = [arg for arg in self.new if arg.value not in parts.values()]
        others = [code_of(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for arg in rest]
        try:
            new = code.format_map(codes | {"rest": "".join(f", {other}" for other in others)})
        except KeyError:
            raise UntranslatableError("it is called with other arguments") from None
        if rest and "{rest}" not in code:
            raise UntranslatableError("it is called with other arguments")
        return new


def separated(new: list[cst.Arg], old: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Returns arguments with commas like those of the old ones, and with the old end."""
    if not new or not old:
        return new
    end = old[-1]
    commas = [arg.comma for arg in old[:-1] if isinstance(arg.comma, cst.Comma)]
    between = next((comma for comma in commas if "#" not in code_of(comma)), _COMMA)

    for position, arg in enumerate(new[:-1]):
        if not isinstance(arg.comma, cst.Comma) or arg.comma is end.comma:
            space = cst.SimpleWhitespace("")
            new[position] = arg.with_changes(comma=between, whitespace_after_arg=space)
    new[-1] = new[-1].with_changes(comma=end.comma, whitespace_after_arg=end.whitespace_after_arg)
    return new


def _in_parentheses(node: cst.BaseExpression) -> str:
    """Returns the code of an expression that an operator or a dot can follow."""
    is_simple = isinstance(node, _SIMPLE) and not isinstance(node, cst.GeneratorExp)
    return code_of(node) if is_simple or node.lpar else f"({code_of(node)})"


def _or(node: cst.BaseExpression, code: str) -> cst.BaseExpression:
    """Returns a value, or other code where it is false."""
    if isinstance(node, cst.Integer | cst.Tuple):
        return node
    if code_of(node) == "None":
        return cst.parse_expression(code)
    return cst.parse_expression(f"{_in_parentheses(node)} or {code}")
