# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._core``, warnings, and lists of names in texts."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
import pickle
import sys
import types
import warnings
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from shardax._core.graph.paths import Path, format_path

_FACE = "shardax.errors"


class ShardaxError(Exception):
    """Base of all errors raised on purpose by shardax.

    Example:
        >>> import shardax as sx
        >>> issubclass(sx.errors.StaticAttributeError, sx.errors.ShardaxError)
        True
    """

    __module__ = _FACE

    def __init_subclass__(cls) -> None:
        """Names errors by ``shardax.errors`` in tracebacks and pickles."""
        super().__init_subclass__()
        if cls.__module__.startswith("shardax."):
            cls.__module__ = _FACE


class ModuleError(ShardaxError, ValueError, TypeError, RuntimeError):
    """A Module, a Variable or random keys cannot be used so."""


def two_with_label(label: Path, first: str, second: str) -> ModuleError:
    """Returns the error of two things, in words, with one label."""
    return ModuleError(
        f"Two have the label {format_path(label)}: {first}, and {second}. A label says which "
        "slot a Variable belongs to, so there must be one for each. Labels are paths: take the "
        "Variables out of the whole tree at once, sx.unbind(tree), rather than out of parts of it "
        "before these are put together."
    )


def unbindable(problems: Sequence[str], count: int) -> ModuleError:
    """Returns the error of some of so many Variables that cannot be put into slots."""
    return ModuleError(
        f"{len(problems)} of {count} Variables cannot be put into the tree; nothing was changed:\n"
        + "\n".join(problems)
        + "\nGive what sx.unbind(tree) returned, or frozen values with those labels; "
        "allow_unused=True leaves out what has no slot."
    )


def no_stateless_callable(kind: type) -> ModuleError:
    """Returns the error of ``stateless_call`` of what cannot be called."""
    return ModuleError(
        f"sx.stateless_call takes a callable Module, or a method of one, as its first argument, "
        f"but was given a {kind.__name__}. Give it slots and values: "
        f"sx.stateless_call(*sx.unbind(model, freeze=True), x)."
    )


def mutable_in_stateless_call(kinds: Sequence[str]) -> ModuleError:
    """Returns the error of ``stateless_call`` with Variables in the place of frozen values."""
    return ModuleError(
        f"stateless_call takes frozen values, but was given {', '.join(kinds)}. Freeze them, "
        f"sx.freeze(variables); or call the model with its Variables in place, "
        f"sx.bind(model, variables)(...)."
    )


def changed_by_stateless_call(paths: Sequence[Path], *, added: bool) -> ModuleError:
    """Returns the error of ``stateless_call`` of what adds Variables or changes structure."""
    change = "added the Variables" if added else "changed the structure of"
    shown = ", ".join(format_path(path) for path in paths[:4])
    return ModuleError(
        f"The functional call {change} {shown}. It returns new values for the slots that were "
        f"filled, and nothing else, so this would be lost. Make such Variables before they are "
        f"taken out (a first call of the model does, where layers sow or cache); or use sx.jit, "
        f"which carries changes of structure back."
    )


def node_of_new_objects(node: type, kind: type, path: Path) -> ModuleError:
    """Returns the error of a pytree node that makes objects anew each time it is flattened."""
    return ModuleError(
        f"Flattening a {node.__name__}, a class registered with JAX as a pytree node, makes a new "
        f"{kind.__name__} at {format_path(path)} each time, so what is written into it would be "
        f"lost. Register a function that returns the Variables which the {node.__name__} holds: "
        f"lambda node: ((node.variable,), None)."
    )


def holds_itself(kind: type, path: Path) -> ModuleError:
    """Returns the error of an object that cannot be replaced from the inside out."""
    return ModuleError(
        f"sx.recursive_map cannot replace the {kind.__name__} at {format_path(path)} from the "
        f"inside out, because it holds itself. Replace its Variables by sx.map(fn, model), or edit "
        f"in place: sx.select(model)."
    )


class ModuleAttributeError(ShardaxError, AttributeError):
    """An attribute is missing, reserved, frozen or not bound."""


class StaticAttributeError(ShardaxError, TypeError):
    """An attribute is neither data (arrays, Variables, Modules) nor hashable configuration."""


def hidden_object(value: Any, where: str, item: object, way: str) -> StaticAttributeError:
    """Returns the error of a value that holds an object which cannot be tracked there.

    Args:
        value: What is, or would be, part of a model.
        where: Its place.
        item: The object inside.
        way: How that is reached from the value, in words.
    """
    kind, item_kind = type(value).__name__, type(item).__name__
    subject = f"a {kind}"
    if isinstance(value, _WITH_NAMES):
        subject = f"the {kind} {value.__qualname__}"

    if callable(value):
        ways = (
            f"make a function a method, and a class of your own a sx.Module, with the {item_kind} "
            f"as an attribute; or write `functools.partial(function, layer)`, whose arguments are "
            f"tracked. Of transforms take those of shardax: `sx.jit(layer)`, `sx.vmap(layer)`, "
            f"`sx.remat(layer)`"
        )
    else:
        ways = (
            "use a list, dict or tuple, such as list(value); make a class of your own a "
            "sx.Module, or register it with JAX (jax.tree_util.register_dataclass)"
        )
    return StaticAttributeError(
        f"Cannot use {subject} as {where}: the {item_kind} that it reaches by {way} cannot be "
        f"tracked there. It would be part of no state, gradient, optimizer or checkpoint, and a "
        f"copy of the model would go on using this very {item_kind}. Ways out: {ways}."
    )


_WITH_NAMES = (types.FunctionType, type)


def unassigned_value(kind: type, path: Path, reason: TypeError) -> StaticAttributeError:
    """Returns the error of a value that came into a model without being assigned.

    Args:
        kind: Its type.
        path: Where it stands.
        reason: Why it has no key.
    """
    return StaticAttributeError(
        f"The {kind.__name__} at {format_path(path)} is neither data nor hashable "
        f"configuration ({reason}), and came there without being assigned as an attribute "
        f"(through vars(), functools.cached_property, or by changing after it was "
        f"assigned). Assign it: model.name = value."
    )


def no_model(tree: object, caller: str) -> ModuleError:
    """Returns the error of a public function that was given something which holds no model."""
    fix = f"{tree.__name__}(...)" if isinstance(tree, type) else "model"
    return ModuleError(
        f"sx.{caller} takes a model as its first argument, a Module, Variable, or tuple, list "
        f"or dict of these, but was given {str(tree)[:80]!r} of type {type(tree).__name__}. "
        f"Give it the object: sx.{caller}({fix}, ...)."
    )


def no_graphdef(kind: type) -> ModuleError:
    """Returns the error of ``merge`` with something else in the place of the structure."""
    return ModuleError(
        f"sx.merge takes a GraphDef as its first argument, but was given a {kind.__name__}. Give "
        f"what sx.split returned, in its order: sx.merge(graphdef, state)."
    )


def stack_beside_view(kind: str, stack: Path, view: Path) -> ModuleError:
    """Returns the error of a stacked Variable and a view of it in one tree."""
    return ModuleError(
        f"The stacked {kind} at {format_path(stack)} stands beside a view of one of its layers, "
        f"at {format_path(view)}: they would be two Variables for one value. Pass the stack and "
        f"take the layer inside, layer = stack[i]; or pass a copy of the layer, "
        f"sx.clone(stack[i])."
    )


def stack_of_passed_view(kind: str) -> ModuleError:
    """Returns the error of a stacked Variable that is used where a view of it was passed."""
    return ModuleError(
        f"A stacked {kind} was used inside a transform that was given a view of one of its "
        f"layers: they would be two Variables for one value. Pass the stack and take the layer "
        f"inside: layer = stack[i]."
    )


def unlike_part(kind: str, part: str, given: str) -> ModuleError:
    """Returns the error of a value that has another form than the part which it replaces."""
    return ModuleError(
        f"Cannot write {given} to a view of one layer of a stacked {kind}, whose part is {part}: "
        f"the layers of a stack are one array. Convert the value, or write the stacked Variable "
        f"whole."
    )


def shared_by_some_layers(kind: str, path: Path, layers: Sequence[int]) -> ModuleError:
    """Returns the error of an object that some layers of a stack share, and others do not."""
    return ModuleError(
        f"The layers of a stack must be alike, but the {kind} at {format_path(path)} is one object "
        f"in the layers {list(layers[:4])} and another in the rest. Share it between all layers, "
        f"or between none."
    )


def unlike_layers(number: int, path: Path, difference: str) -> ModuleError:
    """Returns the error of a layer that differs from the first of a stack in structure."""
    return ModuleError(
        f"The layers of a stack must be alike, but layers 0 and {number} differ at "
        f"{format_path(path)}: {difference}. Build every layer in the same way, with what differs "
        f"in a Variable; or keep the layers in a list."
    )


def unlike_layer_values(kind: str, path: Path, first: str, number: int, other: str) -> ModuleError:
    """Returns the error of a layer whose value has another form than that of the first."""
    return ModuleError(
        f"The layers of a stack must be alike, but the {kind} at {format_path(path)} is {first} in "
        f"layer 0 and {other} in layer {number}."
    )


class TraceLeakError(ShardaxError, RuntimeError):
    """A traced value would escape into a Variable that outlives the trace."""


def used_after_trace(kind: str, transform: str) -> TraceLeakError:
    """Returns the error of a Variable that was made in a run that is over.

    Args:
        kind: What it is, with its article.
        transform: The name of the transform.
    """
    return TraceLeakError(
        f"A{kind[1:]} made inside sx.{transform} was used after that call ended. Its value exists "
        f"only during the trace. Return it from the function (or assign it to an attribute of a "
        f"Module that is an argument); then the caller gets it with a real array."
    )


def write_from_plain_transform(what: str) -> TraceLeakError:
    """Returns the error of a write inside of a plain JAX transform."""
    return TraceLeakError(
        f"Cannot write {what} from inside a plain JAX transform that did not receive it: the write "
        f"would happen once, while tracing, and a traced value would outlive its trace. Use the "
        f"shardax transform of the same name (sx.jit, sx.grad, ...) and pass the Module as an "
        f"argument; or return the new value and write it outside."
    )


def write_to_rebuilt_copy(what: str, kind: str) -> ModuleError:
    """Returns the error of a write to an object that JAX rebuilt inside of a plain transform."""
    return ModuleError(
        f"Cannot write {what}: this {kind} is a copy that JAX rebuilt inside "
        f"a plain transform (jax.jit, jax.grad, jax.vmap, ...), so the write would be lost "
        f"when the function returns. Use the shardax transform of the same name (sx.jit, "
        f"sx.grad, ...), which carries writes back; or, if you return the copy, make it "
        f"writable first:\n\n    model = sx.mutable(model)\n    ...\n    return model"
    )


class ConcurrentWriteError(ShardaxError, RuntimeError):
    """A write would lose what another thread wrote in the meantime."""


def written_since_read(kind: str) -> ConcurrentWriteError:
    """Returns the error of a write that would replace what another thread wrote."""
    return ConcurrentWriteError(
        f"This {kind} was written by another thread after this one read it, "
        f"and that would be lost; nothing was written. Hold one lock around reading and "
        f"writing, with lock: v[...] = v + 1; or update it in one step, v += 1."
    )


def held_by_other_thread(doing: str, where: str, consequence: str) -> ConcurrentWriteError:
    """Returns the error of an object that one thread at a time may use."""
    return ConcurrentWriteError(
        f"Another thread {doing} at {where} now, {consequence}. Let threads take turns by a lock, "
        f"or give each a model of its own, `sx.clone(model)`."
    )


class ForeignMutationError(ShardaxError, RuntimeError):
    """A Module from outside a transform was structurally changed inside it."""


def change_of_captured(
    what: str, transform: str, kind: str, carries_values: bool
) -> ForeignMutationError:
    """Returns the error of a structural change of an object that a function was not given.

    Args:
        what: What was to be changed.
        transform: The name of the transform.
        kind: What messages call the object.
        carries_values: Whether the transform hands back values of captured Variables.
    """
    hint = " (Writing values of its Variables works either way.)" if carries_values else ""
    return ForeignMutationError(
        f"Cannot change the structure of {what} inside sx.{transform}: the {kind} was reached "
        f"through a closure or global, so the change would happen once, while tracing, and not "
        f"when the compiled function runs. Pass the Module as an argument of the function; then "
        f"its structural changes are carried back.{hint}"
    )


class VariableValueError(ShardaxError, TypeError):
    """A Variable was given something other than arrays."""


def ref_of_frozen(path: Path) -> VariableValueError:
    """Returns the error of a frozen value that was to hold a ``jax.Ref``."""
    return VariableValueError(
        f"The value at {format_path(path)} is frozen, and a jax.Ref is there to be written. Make "
        f"it mutable as well: sx.with_vars(model, mutable=True, ref=True)."
    )


def ref_of_tree(kind: type, path: Path, value: object) -> VariableValueError:
    """Returns the error of a Variable that was to hold a ``jax.Ref`` and holds no array."""
    return VariableValueError(
        f"A jax.Ref holds one array, and the {kind.__name__} at {format_path(path)} holds "
        f"{value!r}. Leave it out: only=filter."
    )


class RepeatedKeyError(ShardaxError, RuntimeError):
    """A random key was drawn a second time."""


class FilterError(ShardaxError, ValueError):
    """Filters are invalid, out of order, or miss a Variable."""


def stream_chosen_twice(path: Path, options: Sequence[str]) -> FilterError:
    """Returns the error of a random stream that several options choose."""
    both = " and ".join(f"{option}=" for option in options)
    return FilterError(
        f"The random stream at {format_path(path)} is chosen by {both}. Choose it once, such as "
        f"split={{'dropout': 4}}, fork=sx.Not('dropout')."
    )


class StateMismatchError(ShardaxError, ValueError):
    """A State does not fit a structure: missing, unexpected, or wrong entries."""


def no_mapping(entries: object) -> StateMismatchError:
    """Returns the error of a State that is made of something else than a mapping."""
    return StateMismatchError(
        f"A State is made of a nested mapping, sx.State({{'kernel': array}}), not of a "
        f"{type(entries).__name__}. Of a model take sx.state(model)."
    )


def no_values_by_path(entries: object) -> StateMismatchError:
    """Returns the error of something that says of no value to which path it belongs."""
    return StateMismatchError(
        f"Values are given as a State, a mapping by path (nested, or state.flat()), or a tuple of "
        f"frozen values, but one is {str(entries)[:80]!r} of type {type(entries).__name__}. Of a "
        f"model take sx.state(model); nothing was changed."
    )


def two_frozen_values(label: Path) -> ModuleError:
    """Returns the error of two frozen values for one label."""
    return ModuleError(
        f"Two frozen values have the label {format_path(label)}; nothing was changed. A label "
        f"says which Variable a value belongs to, so there is one for each. Take one of them "
        f"out, or call update twice."
    )


def unremovable(path: Path, holder: str) -> StateMismatchError:
    """Returns the error of a Variable at a path that cannot be removed from its holder."""
    return StateMismatchError(
        f"Cannot pop {format_path(path)}: it is part of {holder}, and removing it there would "
        f"shift or break what is around it. Nothing was removed. Remove it yourself, or narrow the "
        f"filter."
    )


def replaced_twice(path: Path) -> StateMismatchError:
    """Returns the error of a State with two values in the place of one that it had below a path."""
    return StateMismatchError(
        f"Entries below {format_path(path)} stand at several positions of this State, as after "
        f"merge, so it has several parts there, and a function of JAX with is_leaf= put a value in "
        f"the place of each. Bring them together first: state = sx.State(state.to_pure_dict())."
    )


def state_mismatch(
    unexpected: Sequence[Path],
    missing: Sequence[Path],
    misfits: Sequence[tuple[Path, str]],
    count: int,
    known: Sequence[Path],
) -> StateMismatchError:
    """Returns the error of values that do not fit a model.

    Args:
        unexpected: Paths of values that belong to no Variable.
        missing: Paths of Variables without a value.
        misfits: Path of each value that does not fit, and what is wrong with it.
        count: How many values have a path of the model.
        known: All paths of the model.
    """
    parts: list[str] = []
    if unexpected or missing:
        parts.append("The State does not fit the model; nothing was changed.")

    if unexpected:
        entries = "1 entry does" if len(unexpected) == 1 else f"{len(unexpected)} entries do"
        parts.append(f"{entries} not belong to any Variable of the model:")
        parts += [
            f"  {format_path(path)}{nearest_path_hint(path, missing or known)}"
            for path in unexpected
        ]

    if missing:
        values = "1 value is" if len(missing) == 1 else f"{len(missing)} values are"
        parts.append(f"{values} missing (pass every State that split returned):")
        parts += [f"  {format_path(path)}" for path in missing]

    if misfits:
        parts.append(f"{len(misfits)} of {count} values do not fit; nothing was changed:")
        parts += [f"  {format_path(path)}: {problem}" for path, problem in misfits]
        parts.append(
            "To change a shape on purpose, assign to the Variable: model.path.value = array. For "
            "dtypes, cast='param' converts to the Variable's and cast='keep' takes the value's."
        )
    return StateMismatchError("\n".join(parts).replace("changed.\n", "changed. ", 1))


def nearest_path_hint(path: Path, known: Iterable[Path]) -> str:
    """Returns a hint at the nearest of some paths, "" if none is near."""
    near = difflib.get_close_matches(format_path(path), map(format_path, known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class MetadataError(ShardaxError, ValueError):
    """Metadata is unhashable, or axes do not fit the shape."""


class PickleWriteError(ShardaxError, pickle.PicklingError):
    """Something cannot be pickled; names its path where that is known."""


class PickleReadError(ShardaxError, pickle.UnpicklingError):
    """A pickle is damaged, foreign, or needs what is not here."""


class LayoutLostWarning(UserWarning):
    """A pickled layout needs a mesh that this machine does not have."""

    __module__ = "shardax.errors"


class PrecisionLostWarning(UserWarning):
    """Pickled 64-bit numbers were read by a 32-bit process."""

    __module__ = "shardax.errors"


class DonationError(ShardaxError, ValueError):
    """A donated buffer cannot be donated (used twice, or already deleted)."""


def replaced_branch(where: str, kind: str) -> ModuleError:
    """Returns the error about a model rebuilt without the Variables below a place."""
    return ModuleError(
        f"JAX was to rebuild a model with an object of type {kind} in the place of all Variables "
        f"below {where}. A function of JAX with is_leaf= stopped above them, and what it returned "
        f"is no model. The State of a model may hold anything there: "
        f"jax.tree.map(function, sx.state(model), is_leaf=is_leaf)."
    )


_PACKAGE = str(pathlib.Path(__file__).parents[1])


def user_frame() -> types.FrameType:
    """Returns the innermost frame of Python outside of the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        frame = frame.f_back
    return frame


def _is_inside(frame: types.FrameType) -> bool:
    # dataclasses.replace and copy.replace make a config of the package in the user's place, and
    # functools.cached_property computes an attribute that the user reads.
    is_own = frame.f_code.co_filename.startswith(_PACKAGE)
    return is_own or frame.f_globals.get("__name__") in ("copy", "dataclasses", "functools")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the first line outside of the package."""
    # Python shows a text once for each line: inside of the package all users would share one.
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<unknown>")
    at = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *at, module=module, registry=registry)


@contextlib.contextmanager
def naming_package(subject: str, package: str) -> Generator[None]:
    """Names a package to install in an ImportError of a block."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or package).partition(".")[0]
        raise ImportError(f"{subject} needs {missing}: pip install '{package}'.") from error


def first_of(names: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """Joins the first names, and says how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
