# SPDX-License-Identifier: Apache-2.0
"""Texts of the errors of loops and branches."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.frames import kind_of
from shardax._core.graph.definitions import ModuleDef
from shardax._core.graph.differences import Difference
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Object
from shardax._transforms.control.forms import form_text
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.lift.effects import Effects
from shardax._transforms.lift.engine import LiftedCall

# --- loops ----------------------------------------------------------------------------------------


def carry_structure_changed(difference: Difference, name: str) -> TransformError:
    """Returns the error of a carry that came back in other containers."""
    old, new = difference.texts
    return TransformError(
        f"What is carried in sx.{name} must come back with the structure it was given, but at "
        f"{format_path(difference.path)} {old} came back as {new}. Return every part of it, in the "
        f"same containers."
    )


def carried_object_replaced(path: Path, old: object, new: object, name: str) -> TransformError:
    """Returns the error of a carry in which another object, or an array, came back."""
    old_kind, new_kind = (
        type(item).__name__ if isinstance(item, Object) else "array" for item in (old, new)
    )
    return TransformError(
        f"The {old_kind} at {format_path(path)}, which is carried in sx.{name}, came back as "
        f"another {new_kind}. A Module is carried as the object it is: write into it (v[...] = "
        f"new, sx.update(model, new)) and return it."
    )


def body_returns_new_object(name: str) -> TransformError:
    """Returns the error of a body that returned an object that it made."""
    return TransformError(
        f"The body of sx.{name} returned a new object where what is carried must come back as it "
        f"was given. Write into the given Module and return it."
    )


def body_changes_structure(call: LiftedCall, effects: Effects, index: int) -> TransformError:
    """Returns the error of a body that changed the structure of an object."""
    old, new = call.graph.flat.graphdef.objects[index], effects.updates[index]
    path = format_path(call.graph.flat.paths[index])
    return TransformError(
        f"The body of sx.{call.name} changes the structure of the {old.type.__name__} at {path}: "
        f"{describe_change(old, new)}. The body is traced once for all iterations, so the change "
        f"would happen once. Make it before the loop; in the body, write values of Variables "
        f"(v[...] = new)."
    )


def describe_change(old: object, new: object) -> str:
    """Returns, for messages, how the definition of an object changed."""
    if not isinstance(old, ModuleDef) or not isinstance(new, ModuleDef):
        is_metadata = getattr(old, "metadata", None) != getattr(new, "metadata", None)
        return "its metadata change" if is_metadata else "its items change"
    before = dict([*old.attributes, *old.array_attributes])
    after = dict([*new.attributes, *new.array_attributes])
    changes = [
        *(f".{name} is new" for name in after if name not in before),
        *(f".{name} is removed" for name in before if name not in after),
        *(f".{name} is set" for name in before if name in after and before[name] != after[name]),
    ]
    return ", ".join(changes) or "its type or order of attributes changes"


def carry_changes_form(kind: str, difference: Difference, name: str) -> TransformError:
    """Returns the error of a Variable, or an array, of the carry that changes its form."""
    old, new = difference.texts
    return TransformError(
        f"The {kind} at {format_path(difference.path)} changes its form in the body of sx.{name}: "
        f"from {old} to {new}. All iterations share one program, so what goes from one to the next "
        f"keeps structure, shape and dtype. Start with the form it will have, or convert what is "
        f"written: new.astype(old.dtype); over Explicit mesh axes also jax.sharding.reshard(new, "
        f"spec)."
    )


def writes_but_only_reads(role: str, item: object, path: Path, name: str) -> TransformError:
    """Returns the error of a condition or history function that wrote."""
    return TransformError(
        f"The {role} of sx.{name} changes the {kind_of(item)} at {format_path(path)}, but it only "
        f"reads: it may be asked at other times than the body runs. Write in the body (draw random "
        f"numbers there, too), and keep what it needs in the carry."
    )


def not_an_unroll(unroll: object, name: str) -> TransformError:
    """Returns the error of an ``unroll`` that is no number of iterations."""
    return TransformError(
        f"unroll of sx.{name} is {unroll!r}; give the number of iterations that one turn of the "
        f"loop runs, an integer of at least 1, or True for all."
    )


# --- scan -----------------------------------------------------------------------------------------


def carried_twice(option: str, count: int) -> TransformError:
    """Returns the error of a prefix with several ``Carry`` at the top level."""
    return TransformError(
        f"{option} of sx.scan has sx.Carry {count} times. One argument is carried; put what is "
        f"carried together in a tuple or dict."
    )


def carry_is_nested(option: str, entry: PyTree) -> TransformError:
    """Returns the error of a prefix with ``Carry`` inside a container."""
    return TransformError(
        f"{option} of sx.scan has sx.Carry inside {entry!r}. A whole argument is carried; to carry "
        f"some Variables of a Module, use sx.StateAxes({{filter: sx.Carry, ...: None}})."
    )


def carry_on_one_side(with_carry: str, without_carry: str) -> TransformError:
    """Returns the error of ``Carry`` in one of ``in_axes`` and ``out_axes`` only."""
    return TransformError(
        f"{with_carry} of sx.scan has sx.Carry, but {without_carry} has none. What is carried "
        f"comes in as an argument and goes out in the result: in_axes=(sx.Carry, 0), "
        f"out_axes=(sx.Carry, 0)."
    )


def carry_in_a_filter_mapping() -> TransformError:
    """Returns the error of ``Carry`` in a filter mapping of ``out_axes``."""
    return TransformError(
        "out_axes of sx.scan has sx.Carry in a filter mapping. Variables are carried where their "
        "Module comes in; out_axes says how new ones are stacked."
    )


def result_without_axis(out_axes: PyTree) -> PrefixError:
    """Returns the error of None in ``out_axes`` of ``scan``."""
    return PrefixError(
        f"out_axes of sx.scan gives None ({out_axes!r}), but every iteration has a result of its "
        f"own, so there is no one value to return. Give it an axis, carry it, or write it into a "
        f"Variable."
    )


def one_carry_for_several_arguments(labels: Sequence[str], count: int) -> TransformError:
    """Returns the error of ``in_axes=Carry`` for a call with several arguments."""
    return TransformError(
        f"in_axes=sx.Carry is for a function of one argument, but the call has {count} "
        f"({', '.join(labels)}). Give one entry each: in_axes=(sx.Carry, 0)."
    )


def carried_value_is_no_array(path: Path, value: object) -> TransformError:
    """Returns the error of a carried argument that holds something else than arrays."""
    return TransformError(
        f"{format_path(path)} of sx.scan is a {type(value).__name__}, which is no array or number, "
        f"so it cannot go from one iteration to the next. Give it as an argument of its own with "
        f"None in in_axes."
    )


def result_has_no_carry(
    out_axes: Sequence[PyTree], carry_position: int, result: PyTree
) -> TransformError:
    """Returns the error of a body whose result is no tuple as ``out_axes`` says."""
    description = type(result).__name__
    if isinstance(result, (tuple, list)):
        description += f" of {len(result)}"
    return TransformError(
        f"With out_axes={out_axes!r} the body of sx.scan returns a tuple of {len(out_axes)}, the "
        f"carry at position {carry_position}, but it returned a {description}."
    )


# --- branches -------------------------------------------------------------------------------------


def no_branches() -> TransformError:
    """Returns the error of ``switch`` without branches."""
    return TransformError("sx.switch was given no branches; give a sequence of at least one.")


def branch_is_not_callable(label: str, branch: object, name: str) -> TransformError:
    """Returns the error of a branch that is no function."""
    return TransformError(
        f"{label} of sx.{name} is a {type(branch).__name__}, which cannot be called. A branch is a "
        f"function of the operands: lambda *operands: value."
    )


def branches_differ(
    name: str, problem: str, labels: Sequence[str], difference: Difference, advice: str
) -> TransformError:
    """Returns the error of two branches that do not leave the same in everything but numbers."""
    path = format_path(difference.path)
    first, second = map(" ".join, zip(labels, difference.texts, strict=True))
    return TransformError(
        f"The branches of sx.{name} {problem} at {path}: {first}, {second}. {advice}"
    )


# --- bounded loops --------------------------------------------------------------------------------


def max_steps_is_an_array() -> TransformError:
    """Returns the error of a limit that is known only when the program runs."""
    return TransformError(
        "max_steps of sx.bounded_while_loop is an array, but it is the size of the history and "
        "must be known before the program runs. Give a Python integer; inside sx.jit, make it a "
        "static argument."
    )


def not_max_steps(max_steps: object) -> TransformError:
    """Returns the error of a limit that is no number of steps."""
    return TransformError(
        f"max_steps of sx.bounded_while_loop is {max_steps!r}; give an integer of at least 0."
    )


def history_is_no_array(path: Path, value: object) -> TransformError:
    """Returns the error of a history function that returned something else than arrays."""
    where = format_path(path) if path else "itself"
    return TransformError(
        f"The history function of sx.bounded_while_loop returned a {type(value).__name__} at "
        f"{where}. A row of the history holds arrays: return the values to keep, "
        f"lambda model: model.kernel.value."
    )


def padding_is_no_prefix(padding: PyTree, types: PyTree) -> TransformError:
    """Returns the error of a padding that has other containers than a row."""
    return TransformError(
        f"padding={padding!r} of sx.bounded_while_loop is not a prefix of a row of the history, "
        f"which is {form_text(types)}. Give one number, or one each in its containers."
    )


def padding_has_another_dtype(
    path: Path, value: Leaf, array: jax.Array | np.ndarray, dtype: jax.typing.DTypeLike
) -> TransformError:
    """Returns the error of a padding that the dtype of a row cannot hold."""
    is_number = array.ndim == 0 and not isinstance(value, Tracer)
    description = f"{value!r}" if is_number else array.dtype
    return TransformError(
        f"padding={description} cannot stand in the history{_at(path)}, which has dtype {dtype}. "
        f"Give a padding of that dtype, or convert what the history function returns."
    )


def padding_has_another_shape(
    path: Path, shape: tuple[int, ...], row_shape: tuple[int, ...]
) -> TransformError:
    """Returns the error of a padding that has no shape of a row."""
    return TransformError(
        f"padding of shape {shape} does not fit a row of the history{_at(path)}, which has shape "
        f"{row_shape}."
    )


def _at(path: Path) -> str:
    return f" at {format_path(path)}" if path else ""
