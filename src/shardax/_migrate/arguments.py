# SPDX-License-Identifier: Apache-2.0
"""Arguments of translated calls: renamed, reordered, left out, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from shardax._migrate.table import ANY, AXES_NOTE, AXES_OF, INIT_NOTE, VARIABLES, Name

_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_SHARDING = ('"sharding"', '"sharding_names"', '"out_sharding"')


@dataclass
class CallPlan:
    """Translation of a call's arguments, by position."""

    keywords: dict[int, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    values: dict[int, Callable[[cst.BaseExpression], cst.BaseExpression]] = field(
        default_factory=dict
    )
    added: dict[str, str] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)

    def apply(self, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        """Returns the new arguments; commas and comments between them stay."""
        new = [self._changed(position, arg) for position, arg in enumerate(args)]
        result = [arg for arg in new if arg is not None]
        if result and new[-1] is None:  # the last one ends as the last one did
            result[-1] = result[-1].with_changes(
                comma=args[-1].comma, whitespace_after_arg=args[-1].whitespace_after_arg
            )
        for keyword, code in self.added.items():
            result = _with_argument(result, keyword, code)
        return result

    def _changed(self, position: int, arg: cst.Arg) -> cst.Arg | None:
        if position in self.dropped:
            return None
        if position in self.values:
            arg = arg.with_changes(value=self.values[position](arg.value))
        if position in self.keywords:
            arg = arg.with_changes(
                keyword=cst.Name(self.keywords[position]),
                equal=arg.equal if arg.keyword is not None else _TIGHT,
            )
        return arg


def _with_argument(args: list[cst.Arg], keyword: str, code: str) -> list[cst.Arg]:
    new = cst.Arg(cst.parse_expression(code), keyword=cst.Name(keyword), equal=_TIGHT)
    if not args:
        return [new]
    *front, last = args
    if isinstance(last.comma, cst.Comma):  # a trailing comma, before a line's end
        between = (
            front[-1].comma if front else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        )
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return [*front, last.with_changes(comma=between), new]
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = front[-1].comma if front and isinstance(front[-1].comma, cst.Comma) else comma
    new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
    bare = last.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
    # A keyword cannot follow **options in all places, so it goes before them.
    if last.star == "**":
        return [
            *front,
            new.with_changes(comma=comma, whitespace_after_arg=bare.whitespace_after_arg),
            last,
        ]
    return [*front, bare, new]


def code_of(node: cst.CSTNode) -> str:
    """Returns the code of a node."""
    return cst.Module([]).code_for_node(node).strip()


def plan_call(key: str, name: Name, args: Sequence[cst.Arg], partial: bool = False) -> CallPlan:
    """Plans the arguments of a call, or raises ``NotImplementedError``."""
    bound, positions = _bind(key, name, args)
    plan = CallPlan()
    if key in VARIABLES:
        _plan_variable(plan, bound, args)
    if key == "fork_rngs" and "node" not in bound:
        raise NotImplementedError("as a decorator it is with_rngs here, with fork= and split=")
    if key == "Bidirectional":
        _plan_bidirectional(plan, bound, positions)
    if key == "LinearGeneral":
        _check_last_axes(bound)
    if key == "MultiHeadAttention":
        _plan_attention(plan, bound, positions)
    if key in ("max_pool", "avg_pool"):
        _plan_strides(plan, bound, positions)
    if key in INIT_NOTE and "kernel_init" in bound:
        plan.checks.append(INIT_NOTE[key])
    for argument, value in bound.items():
        position = positions[argument]
        keeps_name = key in ("Bidirectional", "max_pool", "avg_pool")
        if position in plan.dropped or (position in plan.values and not keeps_name):
            continue
        metadata, axes = AXES_OF.get(key, ("", ""))
        if argument == metadata and (names := _axis_names(value)) is not None:
            plan.keywords[position] = axes
            plan.values[position] = names
            plan.checks.append(AXES_NOTE)
            continue
        if argument in name.dropped:
            allowed = name.dropped[argument]
            if ANY not in allowed and code_of(value) not in allowed:
                raise NotImplementedError(f"{argument}={code_of(value)} has no counterpart")
            plan.dropped.add(position)
            continue
        if name.arguments is not None and argument not in name.arguments:
            raise NotImplementedError(f"{argument}= has no counterpart")
        target = name.renamed.get(argument, argument)
        if args[position].keyword is not None or position >= name.positional:
            plan.keywords[position] = target
    if any(arg.star == "**" for arg in args):
        plan.checks.append("options given as ** keep their names: compare them with those here")
    plan.added |= {
        name.renamed.get(keyword, keyword): code
        for keyword, code in name.written.items()
        if keyword not in bound
    }
    if partial and name.positional == 0 and any(arg.keyword is None for arg in args):
        raise NotImplementedError("its arguments are in another order")
    return plan


def _bind(
    key: str, name: Name, args: Sequence[cst.Arg]
) -> tuple[dict[str, cst.BaseExpression], dict[str, int]]:
    """Returns the values and positions of arguments by their names there."""
    bound: dict[str, cst.BaseExpression] = {}
    positions: dict[str, int] = {}
    for position, arg in enumerate(args):
        if arg.star == "**":
            continue
        if arg.star == "*":
            if name.arguments is not None and (name.positional < 99 or name.written):
                raise NotImplementedError("it is called with *arguments")
            continue
        if arg.keyword is not None:
            argument = arg.keyword.value
        elif name.arguments is None:
            continue
        elif position < len(name.arguments):
            argument = name.arguments[position]
        else:
            raise NotImplementedError(f"{key} takes fewer arguments here")
        bound[argument], positions[argument] = arg.value, position
    return bound, positions


def _plan_variable(
    plan: CallPlan, bound: dict[str, cst.BaseExpression], args: Sequence[cst.Arg]
) -> None:
    hooks = [argument for argument in bound if argument.startswith("on_")]
    if hooks:
        raise NotImplementedError(f"{hooks[0]}= has no counterpart: a Variable has no hooks")
    for position, arg in enumerate(args):
        keyword = "" if arg.keyword is None else arg.keyword.value
        if keyword in ("sharding", "sharding_names", "out_sharding"):
            plan.keywords[position] = "axes"
            is_call = isinstance(arg.value, cst.Call)  # such as PartitionSpec("data", None)
            plan.values[position] = _in_tuple if is_call else lambda value: value
            plan.checks.append(AXES_NOTE)


def _in_tuple(value: cst.BaseExpression) -> cst.BaseExpression:
    return cst.Call(cst.Name("tuple"), [cst.Arg(value)])


def _axis_names(
    value: cst.BaseExpression,
) -> Callable[[cst.BaseExpression], cst.BaseExpression] | None:
    """Returns what takes the axis names of metadata, if these are all."""
    if not isinstance(value, cst.Dict) or len(value.elements) != 1:
        return None
    (element,) = value.elements
    if not isinstance(element, cst.DictElement):
        return None
    if code_of(element.key).replace("'", '"') not in _SHARDING:
        return None
    return lambda changed: cst.ensure_type(changed, cst.Dict).elements[0].value


def _check_last_axes(bound: dict[str, cst.BaseExpression]) -> None:
    """Raises NotImplementedError unless a LinearGeneral is over the last dimensions."""
    axis = bound.get("axis")
    if axis is None or code_of(axis) == "-1":
        return
    inputs, count = bound.get("in_features"), 0
    if isinstance(axis, cst.Tuple) and isinstance(inputs, cst.Tuple):
        count = len(inputs.elements)
    expected = [str(position) for position in range(-count, 0)]
    numbers = [code_of(e.value) for e in axis.elements] if isinstance(axis, cst.Tuple) else None
    if not count or numbers != expected:
        raise NotImplementedError(f"axis={code_of(axis)} is not known to be the last dimensions")


def _plan_bidirectional(
    plan: CallPlan, bound: dict[str, cst.BaseExpression], positions: dict[str, int]
) -> None:
    backward = bound.get("backward_rnn")
    is_made_here = isinstance(backward, cst.Call) and code_of(backward.func).endswith("RNN")
    if not is_made_here or backward is None or "reverse" in code_of(backward):
        raise NotImplementedError("backward_rnn= is made elsewhere; it has reverse=True here")
    plan.values[positions["backward_rnn"]] = lambda node: node.with_changes(
        args=_with_argument(list(cst.ensure_type(node, cst.Call).args), "reverse", "True")
    )


def _plan_strides(
    plan: CallPlan, bound: dict[str, cst.BaseExpression], positions: dict[str, int]
) -> None:
    """Plans the strides of a pooling, of which None differs."""
    strides = bound.get("strides")
    if strides is not None and code_of(strides) == "None":
        plan.values[positions["strides"]] = lambda node: cst.Integer("1")
    elif isinstance(strides, (cst.Name, cst.Attribute)):
        plan.checks.append("strides=None means steps of one there, of a whole window here")


def _plan_attention(
    plan: CallPlan, bound: dict[str, cst.BaseExpression], positions: dict[str, int]
) -> None:
    features = code_of(bound["in_features"]) if "in_features" in bound else ""
    for argument in ("qkv_features", "out_features", "in_kv_features"):
        if argument not in bound or code_of(bound[argument]) == "None":
            continue
        if code_of(bound[argument]) == features:
            plan.dropped.add(positions[argument])
        elif argument == "out_features":
            continue
        elif argument == "qkv_features" and "num_heads" in bound:
            heads = bound["num_heads"]
            simple = (cst.Name, cst.Attribute, cst.Integer)
            if not isinstance(heads, simple) or not isinstance(bound[argument], simple):
                raise NotImplementedError("qkv_features= is an expression; write head_dim=")
            plan.dropped.add(positions[argument])
            plan.added["head_dim"] = f"{code_of(bound[argument])} // {code_of(heads)}"
        else:
            raise NotImplementedError(f"{argument}= differs from in_features=")
