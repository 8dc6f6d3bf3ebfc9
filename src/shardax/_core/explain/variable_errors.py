# SPDX-License-Identifier: Apache-2.0
"""Errors about Variables, and where a Variable stands.

Each function returns the error of one mistake, and its name says which. The errors of a read or a
write name the *place* of the Variable: the local name of a caller, and the path from there, such as
``model.layers[0].kernel``.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardax._core.errors import (
    DonationError,
    MetadataError,
    StateMismatchError,
    VariableValueError,
    first_of,
    user_frame,
)
from shardax._core.frames import a_kind_of
from shardax._core.graph.flatten import flatten
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.object import Object

if TYPE_CHECKING:
    from shardax._core.values import ArrayValue
    from shardax._core.variable import Variable

# --- values ---------------------------------------------------------------------------------------


def ref_in_tree(kind_name: str) -> VariableValueError:
    """Returns the error of a value that is a pytree with a ``jax.Ref`` in it."""
    return VariableValueError(
        f"A {kind_name} holds one jax.Ref or a pytree of arrays, but was given a pytree with a "
        f"jax.Ref in it. Make a {kind_name} of each: {kind_name}(jax.new_ref(x))."
    )


def not_an_array(leaf: object, kind_name: str) -> VariableValueError:
    """Returns the error of a value with a leaf that is no array."""
    return VariableValueError(
        f"A {kind_name} holds arrays, but was given {leaf!r} of type {type(leaf).__name__}. Assign "
        f"configuration to a plain attribute of the Module instead: self.name = {leaf!r}."
    )


def not_numbers(dtype: np.dtype, kind_name: str) -> VariableValueError:
    """Returns the error of a NumPy array of a dtype that JAX does not have."""
    return VariableValueError(
        f"A {kind_name} holds arrays of numbers, but was given an array of dtype {dtype}. "
        f"JAX has no such dtype; encode it as integers first."
    )


def too_large(number: int, dtype: np.dtype) -> VariableValueError:
    """Returns the error of a Python integer beyond JAX's widest integer."""
    return VariableValueError(
        f"The number {number} does not fit into {np.dtype(dtype).name}, the widest integer that "
        f"JAX uses now. Give the dtype yourself, as in np.uint32({number}), use a float, or "
        f"enable 64 bits: jax.config.update('jax_enable_x64', True)."
    )


def assignment_misfit(old: ArrayValue, kind_name: str, problem: str) -> VariableValueError:
    """Returns the error of ``v[...] = x`` where shape or dtype does not fit."""
    return VariableValueError(
        f"v[...] = x keeps shape and dtype, but a {kind_name} of {old.dtype}{list(old.shape)} was "
        f"given {problem}; nothing was written. To replace the value write v.value = x."
    )


def other_structure(old: PyTree, new: PyTree, kind_name: str) -> VariableValueError:
    """Returns the error of ``v[...] = x`` where the pytrees differ in structure."""
    return VariableValueError(
        f"v[...] = x keeps the structure of a value, but a {kind_name} of "
        f"{jax.tree.structure(old)} was given "
        f"{jax.tree.structure(new)}; nothing was written. To replace the value write "
        f"v.value = x."
    )


def no_index(value: PyTree, index: object) -> VariableValueError:
    """Returns the error of ``v[i] = x`` where the value takes no items."""
    return VariableValueError(
        f"Cannot write at index {index!r} of a value of type {type(value).__name__}; "
        f"replace it: v.value = new."
    )


def ref_misfit(kind_name: str, ref: jax.Ref, new: PyTree) -> VariableValueError:
    """Returns the error of a write into a ``jax.Ref`` of another shape or dtype."""
    shape = getattr(new, "shape", None)
    given = f"a {type(new).__name__}" if shape is None else f"{new.dtype}{list(shape)}"
    return VariableValueError(
        f"This {kind_name} holds a jax.Ref of {ref.dtype}{list(ref.shape)}, which is "
        f"written in place and cannot take {given}. "
        f"Give it another one: v.value = jax.new_ref(x)."
    )


def no_single_array(count: int, kind_name: str) -> AttributeError:
    """Returns the error of ``v.shape`` and the like where the value has several arrays."""
    return AttributeError(
        f"This {kind_name} holds a pytree of {count} arrays, which has no single shape or dtype; "
        f"look at jax.tree.leaves(v.value)."
    )


def update_misfit(kind_name: str, problem: str) -> StateMismatchError:
    """Returns the error of ``v.update(x)`` where ``x`` does not fit."""
    return StateMismatchError(
        f"The {kind_name} {problem}; nothing was changed. To change shape or "
        f"dtype on purpose, replace the value: v.value = array."
    )


def other_frozen_value(kind_name: str, problem: str) -> StateMismatchError:
    """Returns the error of a frozen value that belongs to another Variable."""
    return StateMismatchError(
        f"The {kind_name} {problem}; nothing was changed. To take the array all the "
        f"same: v.value = frozen.value."
    )


# --- axes and metadata ----------------------------------------------------------------------------


def names_by_another_option(
    variable_type: type[Variable], option: str, names: object
) -> MetadataError:
    """Returns the error of names that were not given by ``axes=``."""
    spec = getattr(names, "spec", names)
    example = repr(tuple(spec)) if isinstance(spec, (tuple, list, PartitionSpec)) else "(...)"
    kind_name = variable_type.__name__
    return MetadataError(
        f"{kind_name}({option}={names!r}): dimensions are named by axes=, with axes of the "
        f"mesh or names that rules map to them: {kind_name}(value, axes={example})."
    )


def names_twice(
    variable_type: type[Variable], axes: object, names: tuple[object, ...], source: str
) -> MetadataError:
    """Returns the error of axes that are not the names of a box."""
    kind_name = variable_type.__name__
    return MetadataError(
        f"A {kind_name} with axes={axes!r} was given {source} with the names "
        f"{names} of a box: give the names once, to a new {kind_name}."
    )


def axes_of_named_array(
    variable_type: type[Variable], axes: object, value: object
) -> MetadataError:
    """Returns the error of axes for a value that knows the names of its dimensions."""
    return MetadataError(
        f"A {variable_type.__name__} was given axes={axes} and a "
        f"{type(value).__name__}, which knows the names of its dimensions. Leave "
        f"axes= out, or give the plain array."
    )


def axes_of_other_rank(
    variable_type: type[Variable], axes: tuple[object, ...], shape: tuple[int, ...]
) -> MetadataError:
    """Returns the error of more or fewer axes than dimensions."""
    return MetadataError(
        f"A {variable_type.__name__} of shape {shape} has "
        f"{len(shape)} dimensions but was given "
        f"{len(axes)} axis names: {axes}. Give one name per dimension, None for an unnamed one."
    )


# --- donated and deleted arrays -------------------------------------------------------------------

_ABOUT_DONATION = (
    "A donated array may be used only once; if two models share arrays, as one that was merged "
    "from the state of the other, copy one of them first: sx.clone(model)."
)


def deleted_values(paths: Sequence[Path | str]) -> DonationError:
    """Returns the error of Variables that hold arrays which were donated or deleted."""
    names = [path if isinstance(path, str) else format_path(path) for path in paths]
    return DonationError(
        f"{len(names)} Variables hold arrays that were donated or deleted: {first_of(names)}. "
        f"{_ABOUT_DONATION}"
    )


def deleted_read(variable: Variable) -> DonationError:
    """Returns the error of a read, with the place of the Variable."""
    places = list(_places_of(variable, sys._getframe(1)))
    described = ", ".join([*places[-1:], a_kind_of(variable)])
    return DonationError(
        f"Cannot read {described}: its array was donated or deleted. {_ABOUT_DONATION}"
    )


# --- the place of a Variable ----------------------------------------------------------------------


def place_of(variable: Variable) -> str:
    """Returns how the user's outermost caller reaches a Variable, or an empty text."""
    places = list(_places_of(variable, user_frame()))
    return places[-1] if places else ""


def _places_of(variable: Variable, frame: types.FrameType | None) -> Iterator[str]:
    """Yields how the local names of a frame and its callers reach a Variable."""
    while frame is not None:
        for name, local_value in frame.f_locals.items():
            if not isinstance(local_value, Object) or local_value is variable:
                continue
            with contextlib.suppress(Exception):  # of an object that is being made
                flat = flatten(local_value)
                for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
                    if leaf is variable:
                        yield name + format_path(path)
        frame = frame.f_back


@contextlib.contextmanager
def naming_place(variable: Variable) -> Generator[None]:
    """Puts the place of a Variable before the text of an error about its value."""
    try:
        yield
    except VariableValueError as error:
        place = place_of(variable)
        if not place:
            raise
        raise VariableValueError(f"{place}: {error}") from error.__cause__


@contextlib.contextmanager
def naming_item_write(variable: Variable, shape: tuple[int, ...]) -> Generator[None]:
    """Adds the Variable, its place and shape to the errors of JAX at ``v[i] = x``."""
    try:
        with naming_place(variable):
            yield
    except VariableValueError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        place = place_of(variable)
        subject = f"{place}, {a_kind_of(variable)}" if place else a_kind_of(variable)
        error.add_note(f"In a write into {subject} of shape {shape}.")
        raise
