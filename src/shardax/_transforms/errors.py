# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._transforms``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardax._core.errors import ShardaxError
from shardax._core.frames import a_kind_of
from shardax._core.graph.paths import Path, format_path


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


def unusable_captures(compiled: object, objects: Sequence[object]) -> TransformError:
    """Returns the error of objects that a trace used and that could not become its inputs."""
    kinds = ", ".join(sorted({type(item).__name__ for item in objects}))
    return TransformError(
        f"{compiled!r} used {len(objects)} objects that were not passed in, and could not make "
        f"them inputs ({kinds}). Pass them as arguments."
    )


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


FORWARD_MODE = (
    "It was given a derivative backward alone, a vjp, and sx.jvp, sx.jacfwd and sx.hessian "
    "differentiate forward (sx.hessian forward over reverse). Differentiate backward throughout: "
    "sx.jacrev(f), and sx.jacrev(sx.jacrev(f)) for second derivatives. Or give it a jvp, which "
    "serves both modes if it is written in JAX."
)


def forward_mode(rule: object) -> TransformError:
    """Returns the error of a derivative backward alone, where one forward is taken."""
    return TransformError(f"{rule!r} cannot be differentiated forward. {FORWARD_MODE}")


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
