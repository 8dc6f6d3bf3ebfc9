# SPDX-License-Identifier: Apache-2.0
"""Arguments of translated calls: renamed, reordered, left out, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from shardax._migrate.program import code_of
from shardax._migrate.rules import ANY, AXES, AXES_NOTE, OPTIONS, VARIABLES, Name

Change = Callable[[cst.BaseExpression], cst.BaseExpression]
_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_SIMPLE = (cst.Name, cst.Attribute, cst.Integer, cst.Call, cst.Subscript)
_SHARDING = ("sharding", "sharding_names", "out_sharding")


class UntranslatableError(Exception):
    """A call whose arguments have no counterpart, with the reason."""


def keyword_of(arg: cst.Arg) -> str:
    """Returns the keyword of an argument, empty where it has none."""
    return arg.keyword.value if arg.keyword is not None else ""


@dataclass
class CallPlan:
    """Translation of a call's arguments, by position."""

    keywords: dict[int, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    values: dict[int, Change] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)

    def behind_first(self) -> CallPlan:
        """Returns the plan for the arguments of a partial, behind the function."""
        keywords = {position + 1: keyword for position, keyword in self.keywords.items()}
        values = {position + 1: change for position, change in self.values.items()}
        dropped = {position + 1 for position in self.dropped}
        return CallPlan(keywords, dropped, values, self.added, self.checks)

    def summary(self, args: Sequence[cst.Arg]) -> str:
        """Returns what happens to the arguments of a call, for the report."""
        names = {position: keyword_of(arg) for position, arg in enumerate(args)}
        parts = [
            f"{names[position]}= is {new}="
            for position, new in self.keywords.items()
            if names[position] not in ("", new)
        ]
        dropped = sorted(self.dropped)
        parts += [f"without {names[p] or code_of(args[p].value)}" for p in dropped]
        parts += [f"with {keyword}={code}" for keyword, code in self.added.items()]
        return "".join(f", {part}" for part in parts)

    def apply(self, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        """Returns the new arguments; commas and line breaks between them stay."""
        kept = [position for position in range(len(args)) if position not in self.dropped]
        new = [self._changed(position, args[position]) for position in kept]
        for keyword, code in self.added.items():
            arg = cst.Arg(cst.parse_expression(code), keyword=cst.Name(keyword), equal=_TIGHT)
            # A keyword cannot follow **options in all places, so it goes before them.
            is_behind = not new or new[-1].star != "**"
            new.insert(len(new) - (not is_behind), arg)
        return _separated(new, args)

    def _changed(self, position: int, arg: cst.Arg) -> cst.Arg:
        if position in self.values:
            arg = arg.with_changes(value=self.values[position](arg.value))
        if position in self.keywords:
            equal = arg.equal if arg.keyword is not None else _TIGHT
            arg = arg.with_changes(keyword=cst.Name(self.keywords[position]), equal=equal)
        return arg


def _separated(new: list[cst.Arg], old: Sequence[cst.Arg]) -> list[cst.Arg]:
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


@dataclass
class _BoundCall:
    """A call of a name of another library, whose arguments are planned."""

    key: str
    name: Name
    args: Sequence[cst.Arg]
    values: dict[str, cst.BaseExpression] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    plan: CallPlan = field(default_factory=CallPlan)

    def code(self, argument: str) -> str:
        """Returns the code of an argument, empty where it is not given."""
        return code_of(self.values[argument]) if argument in self.values else ""

    def bind(self) -> None:
        """Finds the arguments by their names there."""
        order = self.name.arguments
        for position, arg in enumerate(self.args):
            if arg.star == "*":
                if order is not None and (self.name.positional < 99 or self.name.written):
                    raise UntranslatableError("it is called with *arguments")
                continue
            if arg.star == "**":
                if self.name.written:
                    raise UntranslatableError("it is called with **options, and a default differs")
                note = "options given as ** keep their names: compare them with those here"
                self.plan.checks.append(note)
                continue
            if arg.keyword is not None:
                argument = arg.keyword.value
            elif order is None:
                continue
            elif position < len(order):
                argument = order[position]
            else:
                raise UntranslatableError(f"{self.key} takes fewer arguments here")
            self.values[argument], self.positions[argument] = arg.value, position

    def plan_argument(self, argument: str, value: cst.BaseExpression) -> None:
        """Plans an argument that nothing special is done with."""
        name, plan, position = self.name, self.plan, self.positions[argument]
        if note := OPTIONS.get(f"{self.key}.{argument}"):
            plan.checks.append(note)

        there, here = AXES.get(self.key, ("", ""))
        if argument == there and (axes := _axis_names(value)) is not None:
            plan.keywords[position] = here
            plan.values[position] = axes
            plan.checks.append(AXES_NOTE)
            return

        if argument in name.dropped:
            allowed = name.dropped[argument]
            if ANY not in allowed and code_of(value) not in allowed:
                raise UntranslatableError(f"{argument}={code_of(value)} has no counterpart")
            plan.dropped.add(position)
            return

        if name.arguments is not None and argument not in name.arguments:
            raise UntranslatableError(f"{argument}= has no counterpart")
        if self.args[position].keyword is not None or position >= name.positional:
            plan.keywords[position] = name.renamed.get(argument, argument)


def plan_call(key: str, name: Name, args: Sequence[cst.Arg], partial: bool = False) -> CallPlan:
    """Plans the arguments of a call.

    Raises:
        UntranslatableError: If an argument has no counterpart.
    """
    call = _BoundCall(key, name, args)
    call.bind()
    if key in VARIABLES:
        _plan_variable(call)
    elif key in _SPECIAL:
        _SPECIAL[key](call)

    for argument, value in call.values.items():
        if call.positions[argument] not in call.plan.dropped:
            call.plan_argument(argument, value)
    for keyword, code in name.written.items():
        if keyword not in call.values:
            call.plan.added[name.renamed.get(keyword, keyword)] = code
    if partial and (later := name.written.keys() - call.values.keys()):
        raise UntranslatableError(f"a later {sorted(later)[0]}= would mean something else")
    if partial and name.positional == 0 and any(arg.keyword is None for arg in args):
        raise UntranslatableError("its arguments are in another order")
    return call.plan


def _axis_names(value: cst.BaseExpression) -> Change | None:
    """Returns what takes the axis names of metadata, if these are all."""
    if not isinstance(value, cst.Dict) or len(value.elements) != 1:
        return None
    (element,) = value.elements
    if not isinstance(element, cst.DictElement) or code_of(element.key)[1:-1] not in _SHARDING:
        return None
    return lambda changed: cst.ensure_type(changed, cst.Dict).elements[0].value


# --- calls with rules of their own ----------------------------------------------------------------


def _plan_variable(call: _BoundCall) -> None:
    hooks = [argument for argument in call.values if argument.startswith("on_")]
    if hooks:
        raise UntranslatableError(f"{hooks[0]}= has no counterpart: a Variable has no hooks")
    for argument in call.values.keys() & set(_SHARDING):
        call.plan.checks.append(AXES_NOTE)
        if isinstance(call.values[argument], cst.Call):  # such as PartitionSpec("data", None)
            tuple_of: Change = lambda value: cst.Call(cst.Name("tuple"), [cst.Arg(value)])  # noqa: E731
            call.plan.values[call.positions[argument]] = tuple_of


def _plan_last_axes(call: _BoundCall) -> None:
    """Refuses a LinearGeneral unless it is over the last dimensions."""
    axis, inputs = call.values.get("axis"), call.values.get("in_features")
    if axis is None or code_of(axis) == "-1":
        return
    count = len(inputs.elements) if isinstance(inputs, cst.Tuple) else 0
    numbers = [code_of(e.value) for e in axis.elements] if isinstance(axis, cst.Tuple) else []
    if not count or numbers != [str(position) for position in range(-count, 0)]:
        raise UntranslatableError(f"axis={code_of(axis)} is not known to be the last dimensions")


def _plan_bidirectional(call: _BoundCall) -> None:
    backward = call.values.get("backward_rnn")
    is_made_here = isinstance(backward, cst.Call) and code_of(backward.func).endswith("RNN")
    if not is_made_here or "reverse" in call.code("backward_rnn"):
        raise UntranslatableError("backward_rnn= is made elsewhere; it has reverse=True here")
    reverse = CallPlan(added={"reverse": "True"})

    def change(node: cst.BaseExpression) -> cst.BaseExpression:
        made = cst.ensure_type(node, cst.Call)
        return made.with_changes(args=reverse.apply(made.args))

    call.plan.values[call.positions["backward_rnn"]] = change


def _plan_strides(call: _BoundCall) -> None:
    """Plans the strides of a pooling: those that are false mean steps of one there."""
    strides = call.values.get("strides")
    if strides is None or isinstance(strides, cst.Integer | cst.Tuple):
        return

    def change(node: cst.BaseExpression) -> cst.BaseExpression:
        if code_of(node) == "None":
            return cst.Integer("1")
        if not isinstance(node, _SIMPLE):
            node = node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        space = cst.SimpleWhitespace(" ")
        return cst.BooleanOperation(node, cst.Or(space, space), cst.Integer("1"))

    call.plan.values[call.positions["strides"]] = change


def _plan_attention(call: _BoundCall) -> None:
    features = call.code("in_features")
    for argument in ("qkv_features", "out_features", "in_kv_features"):
        code = call.code(argument)
        if code in ("", "None"):
            continue
        if code == features:
            call.plan.dropped.add(call.positions[argument])
        elif argument == "qkv_features" and "num_heads" in call.values:
            simple = (cst.Name, cst.Attribute, cst.Integer)
            values = call.values[argument], call.values["num_heads"]
            if not all(isinstance(value, simple) for value in values):
                raise UntranslatableError("qkv_features= is an expression; write head_dim=")
            call.plan.dropped.add(call.positions[argument])
            call.plan.added["head_dim"] = f"{code} // {call.code('num_heads')}"
        elif argument != "out_features":
            raise UntranslatableError(f"{argument}= differs from in_features=")


_SPECIAL: dict[str, Callable[[_BoundCall], None]] = {
    "LinearGeneral": _plan_last_axes,
    "Bidirectional": _plan_bidirectional,
    "max_pool": _plan_strides,
    "avg_pool": _plan_strides,
    "MultiHeadAttention": _plan_attention,
}
