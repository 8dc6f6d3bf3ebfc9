# SPDX-License-Identifier: Apache-2.0
"""Texts of errors of exports and of loaded functions."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from shardax.extend import Path, did_you_mean, format_path
from shardax.host.errors import ExportError

# --- what cannot be exported ----------------------------------------------------------------------


def export_while_tracing() -> ExportError:
    """Returns the error of ``export`` inside of a transform."""
    return ExportError(
        "Cannot export while a transform is tracing: the state has no numbers. Export outside."
    )


def refused_by_jax(error: Exception) -> ExportError:
    """Returns the error for a program that JAX does not export."""
    return ExportError(f"JAX cannot export the function: {type(error).__name__}: {error}")


def several_meshes(names: Mapping[Mesh, str]) -> ExportError:
    """Returns the error for arrays over several meshes, each with the name of one of its arrays."""
    listed = "; ".join(f"{name}: {mesh}" for mesh, name in names.items())
    return ExportError(
        f"The function uses arrays over {len(names)} meshes ({listed}). A program runs on "
        "one: move all of it there, sx.shard(model, mesh, rules)."
    )


def mixed_argument(name: str) -> ExportError:
    """Returns the error for an argument of arrays and Modules."""
    return ExportError(
        f"The argument {name} holds arrays or containers together with Modules or static "
        "values. What callers pass and what the artifact holds must be apart: pass each "
        "Module as an argument of its own, or close over it."
    )


def structure_changed(paths: Sequence[Path], made: Sequence[str]) -> ExportError:
    """Returns the error for a call that changes structure, by names of new types of Variables."""
    hint = f" It makes new Variables ({', '.join(made)})." if made else ""
    return ExportError(
        f"A call changes the structure of {', '.join(map(format_path, paths))}.{hint} An exported "
        "program writes values only. Let a first call make what is missing (layers that sow or "
        "cache), then export; or export a function that does not change it."
    )


def objects_returned() -> ExportError:
    """Returns the error for a function that returns objects."""
    return ExportError(
        "The function returns Modules or Variables. An exported program returns arrays: return "
        "their values, variable.value or sx.state(module).to_pure_dict()."
    )


def form_changed(path: Path, old: Sequence[str], new: Sequence[str]) -> ExportError:
    """Returns the error for a Variable whose arrays have other forms after a call."""
    return ExportError(
        f"A call turns the Variable at {format_path(path)} from {', '.join(old)} into "
        f"{', '.join(new)}. The state of an artifact keeps its form, so that it can be called "
        "again. Make it the right form before (a cache of the largest size), or pass and return it "
        "instead of holding it."
    )


def python_called(callbacks: Sequence[str]) -> ExportError:
    """Returns the error for a program with callbacks."""
    listed = "".join(f"\n  {name}" for name in callbacks)
    return ExportError(
        f"The function calls Python while it runs, which whoever loads the artifact does not "
        f"have:{listed}\nTake it out of what is exported (debug prints, progress bars), or "
        "compute it with JAX. A function of the host can be called before or after the "
        "loaded one."
    )


def other_effects(effects: Sequence[str]) -> ExportError:
    """Returns the error for a program with other effects."""
    return ExportError(
        f"The function has effects besides its result ({', '.join(effects)}), such as reading or "
        "writing a jax.Ref. Hold the value in a Variable instead: sx.Variable(value)."
    )


def unknown_container(kind: str, path: Path) -> ExportError:
    """Returns the error for a pytree node that JSON cannot hold."""
    return ExportError(
        f"Cannot export a {kind} at {format_path(path)}: whoever loads the artifact may not have "
        "the class. Arguments and results of an exported function are arrays in tuples, lists and "
        "dicts. Export a function that takes or returns those, such as lambda x, y: "
        "f(Pair(x, y))._asdict()."
    )


def not_written(place: pathlib.Path, error: OSError) -> ExportError:
    """Returns the error for an artifact that the disk did not take."""
    return ExportError(
        f"The export was not written to {place}: {error}. Nothing was left there; export again "
        f"when it can be written, or to another place."
    )


# --- dynamic dimensions ---------------------------------------------------------------------------


def constraints_of_nothing(constraints: Sequence[str]) -> ExportError:
    """Returns the error for constraints without dynamic dimensions."""
    return ExportError(
        f"constraints={tuple(constraints)!r} are about dynamic dimensions, and there are "
        "none: dynamic={'batch': 0}."
    )


def no_symbols(names: Sequence[str], constraints: Sequence[str], error: Exception) -> ExportError:
    """Returns the error for names or constraints that JAX does not read."""
    return ExportError(
        f"JAX does not take dynamic={names} with constraints={tuple(constraints)!r}: "
        f"{error}. Names are identifiers, constraints such as 'seq <= 512'."
    )


def no_such_argument(name: str, label: str, labels: Sequence[str]) -> ExportError:
    """Returns the error for a dynamic dimension of an argument that the call does not have."""
    return ExportError(
        f"dynamic={{{name!r}: ...}} is about an argument {label!r}, but the call "
        f"has ({', '.join(labels)}).{did_you_mean(label, labels)}"
    )


def no_such_dimension(name: str, axis: int, where: str, shape: tuple[int, ...]) -> ExportError:
    """Returns the error for a dynamic dimension that an array does not have."""
    return ExportError(
        f"dynamic={{{name!r}: ...}} makes dimension {axis} of {where} dynamic, "
        f"which has the shape {shape}. Say which arguments have it, "
        f"dynamic={{{name!r}: {{'name of the argument': {axis}}}}}."
    )


def two_sizes(name: str, first: tuple[object, str], second: tuple[object, str]) -> ExportError:
    """Returns the error for a dynamic dimension of two sizes, each with the array that has it."""
    (first_size, first_place), (size, place) = first, second
    return ExportError(
        f"The dynamic dimension {name!r} is {first_size} in {first_place} and {size} in {place}, "
        f"but it is one size. Give one of them a name of its own, or leave it as it is: "
        f"dynamic={{{name!r}: {{{first_place.lstrip('.')!r}: ...}}}}."
    )


def dimensions_of_no_array(names: Sequence[str]) -> ExportError:
    """Returns the error for dynamic dimensions of arguments without arrays."""
    return ExportError(
        f"The dynamic dimensions {names} are of no array: the arguments that dynamic= "
        "names have none."
    )


# --- what cannot be loaded ------------------------------------------------------------------------


def damaged(file: pathlib.Path, problem: str) -> ExportError:
    """Returns the error for a file that is not as it was written."""
    return ExportError(
        f"{file} {problem}. Copy the artifact again from where it was written, or export the "
        "function anew; an artifact is not meant to be edited."
    )


def unreadable_signature(file: pathlib.Path, error: Exception) -> ExportError:
    """Returns the error for a signature that lacks something."""
    return ExportError(f"{file} cannot be read ({error!r}). Export the function anew.")


def other_format(place: pathlib.Path, found: tuple[str, int], read: tuple[str, int]) -> ExportError:
    """Returns the error for an artifact of another (format, version) than is read."""
    return ExportError(
        f"{place} has the format {found[0]!r}, version {found[1]!r}; this shardax reads "
        f"{read[0]!r}, version {read[1]}. Load it with the version that "
        "wrote it, or export the function anew."
    )


_OTHER_JAX = "Load it with a JAX of nearer age, or export it anew."


def other_convention(folder: pathlib.Path, exporter: str, written: int) -> ExportError:
    """Returns the error for a calling convention that JAX does not read.

    Args:
        folder: The artifact.
        exporter: The version of JAX that exported it.
        written: The calling convention.
    """
    lowest = jax.export.minimum_supported_calling_convention_version
    highest = jax.export.maximum_supported_calling_convention_version
    return ExportError(
        f"The program in {folder} was exported by JAX {exporter} with the calling "
        f"convention {written}; JAX {jax.__version__} reads calling conventions {lowest} to "
        f"{highest}. {_OTHER_JAX}"
    )


def unreadable_program(folder: pathlib.Path, exporter: str, error: Exception) -> ExportError:
    """Returns the error for a program that JAX does not read."""
    return ExportError(
        f"JAX {jax.__version__} cannot read the program in {folder}, which JAX "
        f"{exporter} exported: {type(error).__name__}: {error}. {_OTHER_JAX}"
    )


def other_number_of_devices(folder: str, count: int, here: int, in_mesh: bool) -> ExportError:
    """Returns the error for too few devices, or another number of them in a mesh."""
    return ExportError(
        f"{folder} runs on {count} devices, and {'in the mesh' if in_mesh else 'here'} are "
        f"{here}. Load it over {count} devices, or export it for {here}."
    )


def other_platform(
    folder: str, platforms: Sequence[str], here: str, exported_as: str
) -> ExportError:
    """Returns the error for devices of a platform that the program was not exported for."""
    return ExportError(
        f"{folder} was exported for {', '.join(platforms)}, and the devices here are "
        f"{here}. Export it with platforms={(*platforms, exported_as)}."
    )


def no_64_bits(folder: str, dtypes: Sequence[str]) -> ExportError:
    """Returns the error for arrays of 64 bits where JAX has 32."""
    return ExportError(
        f"{folder} uses {', '.join(dtypes)}, and JAX has 32 bits here. Before anything else: "
        "sx.configure(x64=True)."
    )


# --- what a loaded function does not do -----------------------------------------------------------


def no_derivatives(name: str) -> ExportError:
    """Returns the error for a derivative of a function that was exported without."""
    return ExportError(
        f"{name} was exported without derivatives. Export it with "
        "vjp_order=1, or more for higher ones."
    )


def constraints_broken(name: str, constraints: Sequence[str], signature: object) -> ExportError:
    """Returns the error for a call of sizes that break the constraints."""
    return ExportError(
        f"The sizes of the call break what {name} was exported under: "
        f"{', '.join(constraints)}. It takes {signature}."
    )


def not_mapped(name: str) -> ExportError:
    """Returns the error for a loaded function under ``vmap``."""
    return ExportError(
        f"{name} cannot be mapped by vmap: an exported program is as it is. Export it with "
        "a dimension for the batch, dynamic={'batch': 0}, or call it in a loop (sx.scan)."
    )


def call_does_not_fit(problem: str, signature: object) -> ExportError:
    """Returns the error for arguments that the program does not take."""
    return ExportError(f"{problem} The artifact takes {signature}. Nothing was run.")
