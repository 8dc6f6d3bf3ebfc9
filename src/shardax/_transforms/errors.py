# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._transforms``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardax._core.errors import (
    ConcurrentWriteError,
    DonationError,
    ModuleError,
    ShardaxError,
    TraceLeakError,
    first_of,
)
from shardax._core.frames import a_kind_of
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.settings import IncomparableError, incomparable_attribute


class TransformError(ShardaxError, ValueError, TypeError):
    """Arguments, options or results do not fit their transform."""


class PrefixError(ShardaxError, ValueError):
    """A prefix does not fit the argument that it describes."""


class StaticArgumentError(ShardaxError, TypeError):
    """A static argument is a Module or not hashable."""


class ClosureError(ShardaxError, RuntimeError):
    """A captured Variable is used where its value cannot be known."""

    # Whether the traced function has changed what it reaches, so that it must not run once more.
    has_moved_on = False


class NoMeshError(ShardaxError, ValueError):
    """A mesh is needed, none was given, and none is in scope."""


class UncertainCaptureWarning(UserWarning):
    """A compiled function is traced at every call, for what it reaches without being given it."""

    __module__ = "shardax.errors"


# --- captured Variables -----------------------------------------------------------------------


def uncertain_capture(compiled: object, met: Sequence[str]) -> UncertainCaptureWarning:
    """Returns the warning of a function that reaches Variables in no certain way."""
    listed = ", ".join(dict.fromkeys(met[:4])) + (", ..." if len(met) > 4 else "")
    return UncertainCaptureWarning(
        f"{compiled!r} uses {listed}, which it was not given and found in no way that surely leads "
        f"to the same object at the next call, so it is traced again at every call. Pass it as an "
        f"argument: step(model, ...); or make the class whose attribute it is a sx.Module. Certain "
        f"are a name that the function closes over, a global that its own code names, and a "
        f"default value; not an item of a list or dict, a helper function, or an attribute of an "
        f"ordinary object."
    )


def describe_variable(variable: Any) -> str:
    """Returns what messages call a Variable without a path."""
    # Its arrays as they are stored: to read them would resolve the Variable in a frame.
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(variable._value)]
    return f"{a_kind_of(variable)} of shape {', '.join(map(str, shapes))}"


def changed_capture(function: object, variable: Any) -> ClosureError:
    """Returns the error of a Variable that only the first of two traces for a call reached."""
    name = getattr(function, "__name__", type(function).__name__)
    error = ClosureError(
        f"{name} reached {describe_variable(variable)}, which it was not given, in no certain way. "
        f"So it was traced once more for this call, and did not reach it again: it changes, while "
        f"it is traced, by what it finds its Variables (a name that it binds anew, an item of a "
        f"list, an iterator). Pass the Variable as an argument, and return what comes next."
    )
    error.has_moved_on = True
    return error


def uncertain_inside_of_jax(variable: Any) -> ClosureError:
    """Returns the error of a Variable that plain JAX would keep the value of."""
    what = describe_variable(variable)
    return ClosureError(
        f"{what[0].upper()}{what[1:]} was reached inside of a plain "
        f"transform of JAX (jax.lax.scan, jax.jit, ...), by a helper function or a container. JAX "
        f"may keep its trace of that function, and with it the value of now. Pass the Variable, "
        f"or its value, as an argument of the function; or use the shardax transform of the same "
        f"name (sx.scan, sx.jit, ...)."
    )


def late_capture(name: str, variable: Any) -> ClosureError:
    """Returns the error of a derivative rule that uses a Variable which the call did not use."""
    return ClosureError(
        f"A function given to sx.{name} uses, when differentiated, a {type(variable).__name__} "
        f"that it did not use when called. Pass it as an argument."
    )


def unusable_captures(compiled: object, objects: Sequence[object]) -> TransformError:
    """Returns the error of objects that a trace used and that could not become its inputs."""
    kinds = ", ".join(sorted({type(item).__name__ for item in objects}))
    return TransformError(
        f"{compiled!r} used {len(objects)} objects that were not passed in, and could not make "
        f"them inputs ({kinds}). Pass them as arguments."
    )


# --- options and arguments --------------------------------------------------------------------

# What does the work of options that other libraries, or older versions of JAX, have.
_OPTIONS_ELSEWHERE = {
    "jit": {
        "device": "A function runs where its arguments are: jax.device_put(x, device); or declare "
        "it, sx.jit(f, in_shardings=jax.sharding.SingleDeviceSharding(device)). Arrays that it "
        "makes without arguments are where `with jax.default_device(device): ...` says.",
        "backend": "A function runs where its arguments are: "
        "jax.device_put(x, jax.devices(backend)[0]); or declare it, sx.jit(f, "
        "in_shardings=jax.sharding.SingleDeviceSharding(device)). Arrays that it makes without "
        "arguments are where `with jax.default_device(device): ...` says.",
    },
    "shard_map": {
        "check_rep": "JAX has renamed check_rep to check_vma.",
        "auto": "In place of the mesh axes that are left to the compiler, name the others: "
        "axis_names={'data'}.",
    },
}
_OPTIONS_ELSEWHERE["Jitted"] = _OPTIONS_ELSEWHERE["jit"]


def unknown_options(
    name: str, unknown: Sequence[str], known: Sequence[str], makes_function: bool = False
) -> TransformError:
    """Returns the error of options that a transform does not take."""
    # Without unknown options, of arguments that belong to the function it makes.
    what = f"the options {', '.join(sorted(unknown))}" if unknown else "arguments"
    options = ", ".join(option for option in known if option != "function")
    usage = f"It takes {options}."
    if makes_function:
        arguments = "init, xs" if name == "scan" else "*arguments"
        usage = (
            f"It makes a function of the same arguments: sx.{name}(function)({arguments}), with "
            f"options by name: {options}."
        )

    elsewhere = _OPTIONS_ELSEWHERE.get(name, {})
    remedies = [elsewhere[option] for option in unknown if option in elsewhere]
    text = f"sx.{name} was given {what} that it does not take. {usage}"
    return TransformError(" ".join([text, *dict.fromkeys(remedies)]))


def compiler_options_not_named(options: object) -> TransformError:
    """Returns the error of compiler options that are no mapping."""
    return TransformError(
        f"compiler_options={options!r} is of type {type(options).__name__}, but options of XLA "
        "are given by name: compiler_options={'xla_embed_ir_in_executable': True}."
    )


def static_and_donated(arguments: Sequence[int] | Sequence[str]) -> DonationError:
    """Returns the error of arguments that two options of ``jit`` claim."""
    return DonationError(
        f"The arguments {arguments} are both static and donated, but a static argument has no "
        "memory to donate. Take them out of one of the two."
    )


def donated_twice(groups: Sequence[Sequence[Path]]) -> DonationError:
    """Returns the error of Variables that share an array, which is donated."""
    listed = "; ".join(first_of([format_path(path) for path in paths]) for paths in groups)
    return DonationError(
        "Two Variables hold one and the same array, which cannot be donated twice: "
        f"{listed}. Copy one of them: v[...] = jnp.copy(v)."
    )


def not_callable(name: str, function: object) -> TransformError:
    """Returns the error of a transform that was given what cannot be called."""
    return TransformError(
        f"sx.{name} was given {_shortened(function)} of type {type(function).__name__}, which "
        f"cannot be called. Give it a function first: sx.{name}(function, ...)."
    )


def unusable_operand(name: str, path: Path, leaf: object, advice: str) -> TransformError:
    """Returns the error of an argument that is neither arrays nor objects."""
    return TransformError(
        f"{format_path(path)} of sx.{name} is a {type(leaf).__name__}, which is neither an array "
        f"or number nor a Module, Variable or pytree of these. If it is configuration, {advice}."
    )


def other_structure(jit: object, differences: Sequence[str]) -> TransformError:
    """Returns the error of a ``Compiled`` that is called with arguments of another structure."""
    listed = "\n".join(f"  {line}" for line in differences)
    return TransformError(
        f"This Compiled of {jit!r} was called with arguments of another structure than it was "
        f"compiled for (compiled -> given):\n{listed}\nStatic arguments are not passed to a "
        "Compiled. To accept any structure, call the jitted function instead; it compiles again "
        "when needed."
    )


def no_input(name: str, value: object, function: object) -> TransformError:
    """Returns the error of an argument of a compiled function that JAX does not take."""
    shown = getattr(function, "__qualname__", None) or type(function).__name__
    return TransformError(
        f"{name} of {shown} is a {type(value).__name__}, which is neither an array or number nor a "
        "Module, Variable or pytree of these. Make configuration static: "
        "sx.jit(f, static_argnames=...). Register the class of what holds arrays or Modules as a "
        "pytree (jax.tree_util.register_dataclass), or make it a sx.Module."
    )


def rebuilding_node(kinds: Sequence[str]) -> ModuleError:
    """Returns the error of a pytree class that makes new Variables when it is put together."""
    return ModuleError(
        f"{', '.join(kinds)}: a class registered with JAX as a pytree node makes new Variables "
        "when JAX puts it together, so what a function writes into them would be lost. Let "
        "unflatten keep the children that it is given: lambda _, children: Node(*children)."
    )


def absent_error(paths: Sequence[Path]) -> ModuleError:
    """Returns the error of Variables without values."""
    listed = first_of([format_path(path) for path in paths])
    return ModuleError(
        f"{len(paths)} Variables hold only shapes, not arrays: {listed}. Give them numbers "
        f"first, sx.update(model, state), or restore a checkpoint into the model; or look at "
        f"shapes only with sx.eval_shape."
    )


def donated_ref(kind: str, path: Path) -> DonationError:
    """Returns the error of a Variable that is donated and holds a ``jax.Ref``."""
    return DonationError(
        f"The {kind} at {format_path(path)} holds a jax.Ref, which is written in place and cannot "
        f"be donated. Leave the argument out of donate_argnums; or hold arrays: "
        f"sx.with_vars(model, ref=False)."
    )


def shared_ref(first: Path, second: Path) -> TransformError:
    """Returns the error of two Variables with one ``jax.Ref``."""
    return TransformError(
        f"The Variables at {format_path(first)} and {format_path(second)} hold one jax.Ref, and "
        f"JAX takes a Ref once. Let them be one Variable (model.b = model.a), or give each its "
        f"own: model.b.value = jax.new_ref(model.a.value)."
    )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- static arguments -------------------------------------------------------------------------


def unknown_static_option(static: object) -> StaticArgumentError:
    """Returns the error of an unknown value of the option ``static``."""
    return StaticArgumentError(
        f"static={static!r}: the option takes 'auto' (all but arrays, numbers and Modules is "
        "static), 'numbers' (Python's numbers, too) or None. To choose arguments, use "
        "static_argnums or static_argnames."
    )


def incomparable_leaf(leaf: object, path: Path, error: IncomparableError) -> StaticArgumentError:
    """Returns the error of a static leaf with an attribute that cannot be compared."""
    place = f"at {format_path(path)}"
    return StaticArgumentError(incomparable_attribute(type(leaf), place, error))


def unhashable_leaf(leaf: object, path: Path, error: TypeError) -> StaticArgumentError:
    """Returns the error of a leaf that ``static="auto"`` makes static and that has no hash."""
    return StaticArgumentError(
        f"What is no array, number or Module is static here (static='auto'), but the "
        f"{type(leaf).__name__}{_at(path)} cannot be: {_shortened(leaf)} is not hashable "
        f"({error}). Use tuples or frozensets, a frozen dataclass for configuration, an "
        f"sx.Module for what holds arrays or changes."
    )


def static_object(label: str, value: object) -> StaticArgumentError:
    """Returns the error of an object that is given as a static argument."""
    return StaticArgumentError(
        f"The argument {label!r} is static, but a {type(value).__name__} was passed: its "
        "values would be frozen into the program. Pass it as an ordinary argument: a Module's "
        "configuration is static by itself."
    )


def incomparable_argument(
    label: str, value: object, error: IncomparableError
) -> StaticArgumentError:
    """Returns the error of a static argument with an attribute that cannot be compared."""
    place = f"given as the static argument {label!r}"
    return StaticArgumentError(incomparable_attribute(type(value), place, error))


def unhashable_argument(
    label: str, function: object, value: object, error: TypeError
) -> StaticArgumentError:
    """Returns the error of a static argument without a hash."""
    return StaticArgumentError(
        f"The static argument {label!r} of {getattr(function, '__name__', function)} is "
        f"{value!r} of type {type(value).__name__}, which is not hashable ({error}). Pass "
        "arrays as ordinary arguments; use tuples, frozen dataclasses, and an sx.Module for "
        "what holds arrays or changes."
    )


# --- effects and results ----------------------------------------------------------------------


def changed_by_thread(paths: Sequence[Path]) -> ConcurrentWriteError:
    """Returns the error of effects that would overwrite what another thread wrote."""
    listed = first_of([format_path(path) for path in paths])
    return ConcurrentWriteError(
        f"Another thread changed {listed} while this call ran, "
        "which would be lost; nothing was written. Call it in a function made by sx.jit, of "
        "which calls wait for each other; hold one threading.Lock around calls; or give each "
        "thread its own model (sx.clone)."
    )


def captured_changed_by_thread(name: str, variable: object) -> ConcurrentWriteError:
    """Returns the error of a captured Variable that another thread wrote."""
    return ConcurrentWriteError(
        f"Another thread wrote the {type(variable).__name__} that sx.{name} used through a closure "
        "while it ran; nothing was written. Pass it as an argument of a function made by sx.jit, "
        "or hold a threading.Lock around calls."
    )


def leaking_write(kind: str, path: str) -> TraceLeakError:
    """Returns the error of a write that plain JAX around would not carry."""
    return TraceLeakError(
        f"The {kind} at {path} would be written with a traced value, inside a plain JAX transform "
        "(jax.vmap, jax.grad, jax.jit, ...) that does not carry Variables. Nothing was written. "
        "Use the shardax transform of the same name, with the Module as its argument."
    )


def view_leaves(name: str, view: Any) -> TransformError:
    """Returns the error of a view of a stack that would be returned or attached."""
    return TransformError(
        f"sx.{name} would return or attach a view of one layer of a stacked "
        f"{type(view._parent).__name__}, which outside would no longer be the stack's. "
        "Return sx.clone(stack[i]), or take the layer outside."
    )


def not_a_pair(result: object, source: str, form: str) -> TransformError:
    """Returns the error of a function that did not return a pair."""
    return TransformError(
        f"{source} must return {form}, but it returned a {type(result).__name__}."
    )


def unreturnable(name: str, leaf: object, keys: str) -> TransformError:
    """Returns the error of a result that holds what is neither an array nor an object."""
    return TransformError(
        f"The function given to sx.{name} returned {leaf!r} of type {type(leaf).__name__} at "
        f"{keys or 'the result itself'}. A result holds arrays, numbers, Modules and Variables. "
        "Return such a value from outside the transform, or keep it as static configuration of a "
        "Module."
    )


# --- derivatives ------------------------------------------------------------------------------

FORWARD_MODE = (
    "It was given a derivative backward alone, a vjp, and sx.jvp, sx.jacfwd and sx.hessian "
    "differentiate forward (sx.hessian forward over reverse). Differentiate backward throughout: "
    "sx.jacrev(f), and sx.jacrev(sx.jacrev(f)) for second derivatives. Or give it a jvp, which "
    "serves both modes if it is written in JAX."
)


def forward_mode(rule: object) -> TransformError:
    """Returns the error of a derivative backward alone, where one forward is taken."""
    return TransformError(f"{rule!r} cannot be differentiated forward. {FORWARD_MODE}")


# --- prefixes ---------------------------------------------------------------------------------


class DeclaredSpec(NamedTuple):
    """A ``PartitionSpec`` that an option declares for one place."""

    option: str  # "in_shardings" or "out_shardings"
    path: Path  # of an argument, beginning with its name; or within the result
    spec: PartitionSpec


def specs_without_mesh(specs: Sequence[DeclaredSpec]) -> NoMeshError:
    """Returns the error of specs without a mesh in scope."""
    option, path, spec = specs[0]
    place = format_path(path).removeprefix(".")
    if option == "out_shardings":
        place = f"the result at {format_path(path)}" if path else "the result"

    others = ""
    if len(specs) > 1:
        others = f" (and specs for {len(specs) - 1} more)"

    return NoMeshError(
        f"{option} gives {spec} for {place}{others}, but no mesh is in scope, and a PartitionSpec "
        "only names the axes of one. Nothing was changed. Call the function with a mesh in scope, "
        "with jax.set_mesh(mesh): ... (to enter the mesh itself is not enough). Or declare "
        f"shardings in place of specs: jax.NamedSharding(mesh, jax.{spec!r})."
    )


def filter_name(filter_: object) -> str:
    """Returns what messages call a filter."""
    if isinstance(filter_, type):
        return filter_.__name__
    return "..." if filter_ is ... else repr(filter_)


def wrong_entries(entries: object) -> PrefixError:
    """Returns the error of entries that ``sx.prefix`` does not take."""
    return PrefixError(
        f"sx.prefix takes a mapping from filters to entries, sx.prefix(model, "
        f"{{sx.Param: 0, ...: None}}), or a function of path and Variable, but was given "
        f"{entries!r}."
    )


def unfitting_shardings(misfits: Sequence[str]) -> PrefixError:
    """Returns the error of declared shardings that do not fit shapes, a line for each."""
    return PrefixError(
        f"in_shardings does not fit {len(misfits)} Variables; nothing was changed:\n"
        + "\n".join(misfits)
        + "\nGive these a sharding of their own: sx.StateSharding({filter: ..., ...: ...})."
    )


def unfitting_argument_shardings(misfits: Sequence[str]) -> PrefixError:
    """Returns the error of declared shardings that do not fit arrays, a line for each."""
    listed = "\n".join(misfits)
    return PrefixError(f"in_shardings does not fit {len(misfits)} arguments:\n{listed}")


def about_explicit_axes(mesh: Any, lines: Sequence[str]) -> str:
    """Returns what to do where JAX asks for a layout, with a line for each Variable."""
    kinds = f"(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
    make = f"jax.make_mesh({mesh.axis_sizes}, {mesh.axis_names}, axis_types={kinds})"
    layouts = first_of(lines, "\n")
    return (
        "\nOver Explicit mesh axes, an operation whose result has no evident layout has to be told "
        f"it. Split over these axes are\n{layouts}\nLeave layouts to the compiler, over a mesh "
        f"with Auto axes: `{make}`. Or say the layout of the product: "
        "`jnp.dot(x, w, out_sharding=spec)` for `x @ w`; sx.nn.Linear does so by the rules."
    )


def unfitting_prefix(option: str, path: Path, prefix: object, tree: object) -> PrefixError:
    """Returns the error of a prefix with other containers than what it describes."""
    kind = _described_kind(option)
    return PrefixError(
        f"{option} does not fit the {kind}{_at(path)}: it has {_shape(prefix)} where the {kind} "
        f"has {_shape(tree)}. Give one entry for all of it, or the same containers with one entry "
        "each."
    )


def filters_for_arrays(option: str, path: Path, mapping: str) -> PrefixError:
    """Returns the error of a filter mapping for what holds no objects."""
    return PrefixError(
        f"{option} gives a {mapping} for the {_described_kind(option)}{_at(path)}, which holds no "
        "Variables to choose among. Only Modules take one; give plain arrays one entry."
    )


def no_filter_matches(option: str, path: Path, error: Exception) -> PrefixError:
    """Returns the error of a Variable that no filter of a mapping matches."""
    return PrefixError(f"{option} for the {_described_kind(option)}{_at(path)}: {error}")


def no_entry_at(option: str, path: Path, variable: object) -> PrefixError:
    """Returns the error of a Variable whose path is not in a mapping by path."""
    return PrefixError(
        f"{option} has no entry for the {type(variable).__name__} at {format_path(path)}."
    )


def wrong_prefix_of_object(
    option: str, path: Path, prefix: object, described: object
) -> PrefixError:
    """Returns the error of an object whose prefix is of another kind than those it can have."""
    return PrefixError(
        f"{option} for the {_described_kind(option)}{_at(path)}, a {type(described).__name__}, is "
        f"a {type(prefix).__name__}. Give one entry, a State of entries, or a filter mapping."
    )


def two_entries(
    option: str, kind: str, first: tuple[Path, object], second: tuple[Path, object]
) -> TransformError:
    """Returns the error of a Variable with two entries, each given as (path, entry)."""
    return TransformError(
        f"One {kind} is reached by two paths with different {option}:\n  "
        f"{format_path(first[0])}: {first[1]}\n  {format_path(second[0])}: {second[1]}\n"
        f"A shared Variable is one Variable and needs one entry. Give both paths the same, "
        f"or untie them with sx.clone."
    )


def wrong_entry_count(option: str, count: int, labels: Sequence[str]) -> PrefixError:
    """Returns the error of a prefix with more or fewer entries than a call has arguments."""
    entries = f"{count} {'entry' if count == 1 else 'entries'}"
    arguments = f"{len(labels)} positional argument{'' if len(labels) == 1 else 's'}"
    return PrefixError(
        f"{option} has {entries}, but the call has {arguments} ({', '.join(labels)}). "
        f"Give one entry per argument, or one for all."
    )


def arguments_without_entry(
    option: str, names: Sequence[str], missing: Sequence[str]
) -> PrefixError:
    """Returns the error of entries by name of argument that leave some out."""
    return PrefixError(
        f"{option} has entries by name of argument, {', '.join(names)}, and none for "
        f"{', '.join(missing)}. Give one for each argument of the call."
    )


def foreign_object(name: str, kind: str) -> TransformError:
    """Returns the error of an object that a mapped function returns or attaches from outside."""
    return TransformError(
        f"The function given to sx.{name} returned (or attached to an argument) a {kind} that was "
        "not passed in: one object, with no part of its own in each run. Pass it as an argument, "
        "or return sx.clone of it."
    )


def ref_elsewhere(kind: str, form: str, entry: object) -> PrefixError:
    """Returns the error of a Variable with a ``jax.Ref`` that is not where its entry says."""
    return PrefixError(
        f"A {kind} of {form} holds a jax.Ref, which stays where it is, and its entry is {entry!r}. "
        f"Make the Ref there: jax.new_ref(jax.device_put(x, sharding))."
    )


def _described_kind(option: str) -> str:
    return "result" if option.startswith("out_") else "argument"


def _at(path: Path) -> str:
    return f" at {format_path(path)}" if path else ""


def _shape(tree: Any) -> str:
    kind = type(tree).__name__
    if isinstance(tree, Mapping):
        return f"a {kind} of {', '.join(map(repr, tree)) or 'nothing'}"
    if isinstance(tree, (tuple, list)):
        return f"a {kind} of {len(tree)}"
    return f"an array {tree.dtype}{list(tree.shape)}" if hasattr(tree, "dtype") else f"a {kind}"
