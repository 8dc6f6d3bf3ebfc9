# SPDX-License-Identifier: Apache-2.0
"""The error of selections, and its texts. Nothing has changed where one is raised."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

from shardax._core.errors import ShardaxError, first_of
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.object import Object


class SelectionError(ShardaxError, ValueError, IndexError):
    """A selection, or an edit of one, without what it asks for."""


def count_of(noun: str, number: int) -> str:
    """Returns "1 place", "2 places"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- finding --------------------------------------------------------------------------------------


def not_an_accessor(item: object) -> SelectionError:
    """Returns the error of an argument of ``at`` that is no function."""
    return SelectionError(
        f"at() takes a function that points at parts, at(lambda m: m.layers[0]), but was given "
        f"{item!r}. For paths there is at_keypaths('.layers[0]')."
    )


def not_a_class(item: object) -> SelectionError:
    """Returns the error of an argument of ``at_instances_of`` that is no class."""
    return SelectionError(
        f"{item!r} is not a class, a union or a tuple of classes. For a filter or a function use "
        f"at_subtrees_where."
    )


def not_comparable(item: object, error: TypeError) -> SelectionError:
    """Returns the error of a value that nothing can be compared with."""
    return SelectionError(
        f"Nothing in a model can be compared with {item!r} of type {type(item).__name__} ({error})."
        f" Use at_subtrees_where(lambda value: ...)."
    )


def wrong_signature(
    function: Callable[..., PyTree], signature: inspect.Signature
) -> SelectionError:
    """Returns the error of a function that takes neither a value nor a path and a value."""
    return SelectionError(
        f"{function!r} takes the arguments {signature}, but a selection calls it with the value, "
        f"or with (path, value). Write it as lambda value: ... or lambda path, value: ..."
    )


def no_place(text: str, near: str | None, selection: str) -> SelectionError:
    """Returns the error of a path that leads nowhere."""
    hint = f" Did you mean {near}?" if near else ""
    return SelectionError(
        f"There is no place {text} at or below what is selected.{hint} Nothing was changed. This "
        f"is a {selection}"
    )


def no_nth_place(n: int, selection: str) -> SelectionError:
    """Returns the error of a position that the selection does not have."""
    return SelectionError(f"There is no place {n} in this: {selection}")


def wrong_count(n: int, selection: str) -> SelectionError:
    """Returns the error of a selection that does not have as many places as it should."""
    return SelectionError(f"There should be {count_of('place', n)}, but this is a {selection}")


def within_another(outer: Path, inner: Path) -> SelectionError:
    """Returns the error of two selected places of which one lies within the other."""
    return SelectionError(
        f"Both {format_path(outer)} and {format_path(inner)} would be selected, but one lies "
        f"within the other, so an edit could not change both. Select them one after the other."
    )


def not_a_selection_of_the_part(value: PyTree, path: Path, returned: object) -> SelectionError:
    """Returns the error of a function given to ``refine`` that selects in something else."""
    return SelectionError(
        f"refine needs a selection of the {type(value).__name__} at {format_path(path)}, but the "
        f"function returned {returned!r}. Write refine(lambda part: sx.select(part).at...)."
    )


# --- accessors ------------------------------------------------------------------------------------


def accessor_returned_no_part(result: object) -> SelectionError:
    """Returns the error of an accessor that returned a plain value."""
    return SelectionError(
        f"The accessor returned {result!r} of type {type(result).__name__}, which is not a part of "
        f"what it was given. Return a part, as in lambda m: m.layers[0].kernel, or several, lambda "
        f"m: (m.a, m.b)."
    )


def accessor_returned_view() -> SelectionError:
    """Returns the error of an accessor that returned a view of one layer of a stack."""
    return SelectionError(
        "The accessor returned a view of one layer of a stack, which is no part of the model: the "
        "stack holds all its layers as one. Select in that, lambda m: m.stack.stacked, which means "
        "every layer; or take the layers apart, sx.nn.unstack_layers(stack), and select among "
        "them; or select in the view, sx.select(stack[i])."
    )


def accessor_returned_other_object(item: Object, start: PyTree, path: Path) -> SelectionError:
    """Returns the error of an accessor that returned an object from elsewhere."""
    return SelectionError(
        f"The accessor returned a {type(item).__name__} that is not in the {type(start).__name__} "
        f"at {format_path(path)}. Return a part of what the accessor is given."
    )


def accessor_changed(path: Path, method: str) -> SelectionError:
    """Returns the error of an accessor that called a method which changes a container."""
    return SelectionError(
        f"The accessor called {method} of {format_path(path)}; it only says which part is meant. "
        "Change a copy: model = sx.clone(model), and call it on that."
    )


def accessor_assigned(name: str) -> SelectionError:
    """Returns the error of an accessor that set an attribute."""
    return SelectionError(
        f"The accessor set .{name}; it only says which part is meant. Edit what is selected: "
        f"sx.select(model).at(lambda m: m.{name}).set(value)."
    )


# --- edits ----------------------------------------------------------------------------------------


def nothing_selected(tree: PyTree) -> SelectionError:
    """Returns the error of an edit of an empty selection."""
    return SelectionError(
        f"Nothing is selected in this {type(tree).__name__}, so the edit would do nothing. Print "
        f"the selection to see the tree; or, if that can be, pass allow_empty=True."
    )


def place_is_gone(path: Path) -> SelectionError:
    """Returns the error of a read of a place that was removed after it was selected."""
    return SelectionError(
        f"The tree has no place {format_path(path)} any more: it was changed after it was "
        f"selected. Select again."
    )


def edited_place_is_gone(path: Path) -> SelectionError:
    """Returns the error of an edit of a place that was removed after it was selected."""
    return SelectionError(
        f"The tree has no place {format_path(path)} any more: it was changed after it was "
        f"selected. Nothing was changed. Select again."
    )


def edited_within_another(path: Path) -> SelectionError:
    """Returns the error of an edit of a place within another edited one."""
    return SelectionError(
        f"What is at {format_path(path)} lies within something else that is selected, so an edit "
        f"could not change both. Nothing was changed. Edit them one after the other."
    )


def wrong_count_of_values(values: int, places: int, selection: str) -> SelectionError:
    """Returns the error of more or fewer values than selected places."""
    return SelectionError(
        f"set_all was given {count_of('value', values)} for {count_of('place', places)}; nothing "
        f"was changed. This is a {selection}"
    )


def value_or_make() -> SelectionError:
    """Returns the error of an insertion of both, or of neither, a value and a function."""
    return SelectionError(
        "Say what to insert either as a value, which is then the same object everywhere: "
        "insert_after(layer); or by a function that makes one for each place: "
        "insert_after(make=lambda old: Layer())."
    )


def cannot_insert(path: Path, kind: str, is_called: bool) -> SelectionError:
    """Returns the error of an insertion beside a part of something keyed or fixed."""
    remedy = "Set one value in place of both: .set(value)"
    if is_called:
        remedy = "Let one thing do both: .apply(lambda old: sx.nn.Sequential(old, new))"
    return SelectionError(
        f"Nothing can be inserted beside {format_path(path)}: it is part of a {kind}, not an item "
        f"of a list or tuple. Nothing was changed. {remedy}."
    )


def cannot_remove(path: Path, kind: str, is_called: bool) -> SelectionError:
    """Returns the error of a removal from something with a fixed number of parts."""
    remedy = "Set another value: .set(value)"
    if is_called:
        remedy = "Set something that does nothing: .set(sx.nn.Sequential())"
    return SelectionError(
        f"{format_path(path)} cannot be removed: it is part of a {kind}, which has a fixed number "
        f"of parts. Nothing was changed. {remedy}."
    )


def array_in_place_of_variable(path: Path, kind: str) -> SelectionError:
    """Returns the error of an array set where a Variable of a kind stands."""
    return _array_in_place_of(
        path,
        kind,
        kind,
        f"Select the value of the {kind}, .at(lambda v: v.value); or give one like it, "
        f".apply(lambda v: v.replace(array))",
    )


def array_in_place_of_slot(path: Path, kind: str) -> SelectionError:
    """Returns the error of an array set where a slot of a Variable of a kind stands."""
    remedy = "Put Variables in first, sx.bind(model, variables)"
    return _array_in_place_of(path, f"slot of a {kind}", kind, remedy)


def _array_in_place_of(path: Path, what: str, kind: str, remedy: str) -> SelectionError:
    return SelectionError(
        f"An array cannot take the place of the {what} at {format_path(path)}: its type and "
        f"metadata would be lost. Nothing was changed. {remedy}; or give a new one, "
        f"sx.{kind}(array)."
    )


def root_in_place(tree: PyTree) -> SelectionError:
    """Returns the error of an edit in place of the tree itself."""
    return SelectionError(
        f"What is to be edited is the tree itself, or a part of it that is in no Module, list or "
        f"dict: a {type(tree).__name__} cannot be changed in place. Leave inplace out, and use the "
        f"tree that is returned."
    )


def would_untie_in_place(first: Path, second: Path) -> SelectionError:
    """Returns the error of an edit in place of one of two paths to an object."""
    return SelectionError(
        f"What is to be edited stands in one object that is reached by both {format_path(first)} "
        f"and {format_path(second)}, so it cannot be changed in place at one of the two. Leave "
        "inplace out: in the new tree they are two."
    )


# --- combining ------------------------------------------------------------------------------------


def nothing_to_combine() -> SelectionError:
    """Returns the error of ``combine`` without parts."""
    return SelectionError("combine() was given nothing: pass all parts, combine(selected, rest).")


def missing_from_all_parts(paths: Sequence[Path]) -> SelectionError:
    """Returns the error of places that are holes in every part."""
    listed = first_of([format_path(path) for path in paths], most=5)
    return SelectionError(
        f"No part has anything at {listed}: every part has a hole there. Pass all parts that "
        f"partition returned."
    )


def parts_differ(path: Path, values: Iterable[object]) -> SelectionError:
    """Returns the error of parts that have different things at one path."""
    listed = " and ".join(f"{value!r}"[:80] for value in values)
    return SelectionError(
        f"The parts differ at {format_path(path)}: {listed}. Where one part has something, all "
        f"others must have a hole; combine what partition returned, with values changed at most."
    )
