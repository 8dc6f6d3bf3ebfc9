# SPDX-License-Identifier: Apache-2.0
"""``export``: a function with its state as a folder that other processes, without its source, run.

The program is exported by ``jax.export`` as a pure function of state and inputs, so that one
program serves any weights, and a call's new state can be stored by whoever loaded it.

Dynamic dimensions: sizes that an exported function leaves open.

A *dynamic dimension* has a name in place of a size. The program is traced once for all sizes, so
whatever needs the number itself (a Python loop over it, an ``if`` about it) is an error of JAX.
*Constraints* (``"seq <= 512"``, ``"batch = 8*rows"``) say what JAX may count on.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardax._core._jax import is_eager
from shardax._core.errors import ShardaxError
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import format_path, path_step
from shardax._core.object import Object
from shardax._transforms.jit.jit import BoundJit, Jit, jit
from shardax._transforms.lift.arguments import parameter_name
from shardax.host.errors import ExportError
from shardax.host.export import artifact
from shardax.host.export.artifact import check_fixed_sizes, write_snapshot
from shardax.host.export.flat_program import FlatProgram
from shardax.host.export.loading import load
from shardax.host.export.signature import MeshForm, Signature, plain_dtype, to_words
from shardax.partition.findings import did_you_mean
from shardax.partition.mesh import resolve_mesh

# --- Dynamic ---

Dynamic = Mapping[str, int | Mapping[str, int | Sequence[int]]]
"""Dimension by name: one for all arrays in the arguments, or one or several by parameter name."""


def abstract_arguments(
    jit: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Dynamic,
    constraints: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with shapes for arrays, dynamic dimensions among them.

    Args:
        jit: The ``Jit`` that they are for; its static arguments stay as they are.
        args: The positional arguments.
        kwargs: The keyword arguments.
        dynamic: Which dimensions are dynamic.
        constraints: What JAX may count on.

    Raises:
        ExportError: If ``dynamic`` names what is not there, or sizes of one name differ.
    """
    labelled: dict[Any, str] = {
        i: parameter_name(jit.__wrapped__, i)
        for i in range(len(args))
        if i not in jit.static_positions
    }
    labelled |= {name: name for name in kwargs if name not in jit.static_names}
    given = {**dict(enumerate(args)), **kwargs}
    dimensions = _Dimensions(dynamic, constraints, list(labelled.values()))
    for key, label in labelled.items():
        given[key] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, label=label: dimensions.abstract(label, path, leaf),
            given[key],
            is_leaf=is_object,
        )
    dimensions.check_used()
    return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}


class _Dimensions:
    """The dynamic dimensions of one export.

    Args:
        dynamic: As for ``abstract_arguments``.
        constraints: Likewise.
        labels: Names of the arguments.
    """

    def __init__(self, dynamic: Dynamic, constraints: Sequence[str], labels: Sequence[str]) -> None:
        self.dynamic = dynamic
        self.sizes: dict[str, tuple[Any, str]] = {}  # the first size of a name, and where it was
        self.symbols: dict[str, Any] = {}
        self._make_symbols(constraints)
        for name, where in dynamic.items():
            for label in where if isinstance(where, Mapping) else ():
                if label not in labels:
                    raise ExportError(
                        f"dynamic={{{name!r}: ...}} is about an argument {label!r}, but the call "
                        f"has ({', '.join(labels)}).{did_you_mean(label, labels)}"
                    )

    def _make_symbols(self, constraints: Sequence[str]) -> None:
        names = list(self.dynamic)
        if not names and constraints:
            raise ExportError(
                f"constraints={tuple(constraints)!r} are about dynamic dimensions, and there are "
                "none: dynamic={'batch': 0}."
            )
        if names:
            try:
                found = jax.export.symbolic_shape(", ".join(names), constraints=tuple(constraints))
            except Exception as error:
                raise ExportError(
                    f"JAX does not take dynamic={names} with constraints={tuple(constraints)!r}: "
                    f"{error}. Names are identifiers, constraints such as 'seq <= 512'."
                ) from error
            self.symbols = dict(zip(names, found, strict=True))

    def abstract(self, label: str, path: Any, leaf: Any) -> Any:
        """Returns one array of an argument as shape and dtype; anything else as it is."""
        if isinstance(leaf, Object) or not hasattr(leaf, "dtype"):
            return leaf
        where = format_path((label, *map(path_step, path)))
        shape = list(leaf.shape)
        for name, symbol in self.symbols.items():
            for axis in self._axes(name, label):
                if not -len(shape) <= axis < len(shape):
                    raise ExportError(
                        f"dynamic={{{name!r}: ...}} makes dimension {axis} of {where} dynamic, "
                        f"which has the shape {tuple(leaf.shape)}. Say which arguments have it, "
                        f"dynamic={{{name!r}: {{'name of the argument': {axis}}}}}."
                    )
                self._note_size(name, leaf.shape[axis], where)
                shape[axis] = symbol
        return jax.ShapeDtypeStruct(
            tuple(shape),
            plain_dtype(leaf.dtype),
            sharding=_layout(leaf, shape),
            weak_type=getattr(leaf, "weak_type", False),
        )

    def _axes(self, name: str, label: str) -> tuple[int, ...]:
        where = self.dynamic[name]
        axes = where.get(label, ()) if isinstance(where, Mapping) else where
        return (axes,) if isinstance(axes, int) else tuple(axes)

    def _note_size(self, name: str, size: Any, where: str) -> None:
        known, first = self.sizes.setdefault(name, (size, where))
        if size != known:
            raise ExportError(
                f"The dynamic dimension {name!r} is {known} in {first} and {size} in {where}, but "
                f"it is one size. Give one of them a name of its own, or leave it as it is: "
                f"dynamic={{{name!r}: {{{first.lstrip('.')!r}: ...}}}}."
            )

    def check_used(self) -> None:
        """Raises if a name was given that no array has."""
        unused = [name for name in self.symbols if name not in self.sizes]
        if unused:
            raise ExportError(
                f"The dynamic dimensions {unused} are of no array: the arguments that dynamic= "
                "names have none."
            )


def _layout(leaf: Any, shape: Sequence[Any]) -> Any:
    """The sharding over a mesh, if the array or its stand-in has one that fits the shape.

    JAX does not split dynamic dimensions, because nobody knows that they divide. The compiler then
    finds the layout, and callers may pass the array split.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    split = zip(shape, sharding.spec, strict=False)
    return None if any(e is not None and type(s) is not int for s, e in split) else sharding


# --- Exporting ---


def export(
    function: Callable[..., Any],
    /,
    *args: Any,
    to: Any,
    dynamic: Dynamic | None = None,
    constraints: Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
    snapshot: bool = False,
    **kwargs: Any,
) -> pathlib.Path:
    """Exports a function with the state that it uses; ``load`` makes it callable again.

    Needs ``pip install 'shardax[export]'``.

    Args:
        function: A Module, a method of one, or any function, compiled or not. The Variables of all
            Modules that it uses (its own, those in arguments, those in closures) are the state.
            Layouts are those of its arrays; shardings that were declared to ``jit`` are not kept.
        *args: Arguments to trace it for: arrays or ``jax.ShapeDtypeStruct``, in tuples, lists and
            dicts. Callers of the loaded function pass these; arguments without arrays (Modules,
            static arguments of a compiled function, None) belong to the artifact.
        to: The folder to write, which must not exist. It appears when it is complete.
        dynamic: Dimensions whose size stays open: ``{"batch": 0}`` is dimension 0 of every array
            that is passed, ``{"batch": {"x": 0, "mask": 1}}`` says it by parameter name.
        constraints: What holds for these sizes, such as ``"seq <= 512"``.
        platforms: Where it is to run: ``("cpu", "cuda", "tpu")``. None: the platform here.
        vjp_order: How often the loaded function can be differentiated.
        snapshot: Whether to add the compiled program, for machines like this one. Loading it runs
            code, so ``load`` has to be told to (``host.export.artifact``).
        **kwargs: Keyword arguments to trace it for.

    Returns:
        The folder's absolute path.

    Raises:
        ExportError: If the function cannot do without this process, by name: callbacks, random
            state without a seed, structure that changes, state that changes its form.
        AbstractValueError: If the state holds shapes only.
        ArtifactExistsError: If there is something at ``to``.
        ImportError: If ``flatbuffers`` or ``safetensors`` is missing.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> x = jax.ShapeDtypeStruct((1, 2), jnp.float32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sx.host.export(layer, x, to=f"{folder}/layer", dynamic={"batch": 0})
        ...     loaded = sx.host.load(path)
        >>> print(loaded.signature)
        Linear(x: float32[batch,2]) -> float32[batch,3]
        >>> bool((loaded(jnp.ones((5, 2))) == layer(jnp.ones((5, 2)))).all())
        True
    """
    artifact.require_extras()
    if not is_eager():
        raise ExportError(
            "Cannot export while a transform is tracing: the state has no numbers. Export outside."
        )
    place = artifact.free_place(to)
    compiled, given = _as_jit(function, args)
    shapes, named = abstract_arguments(compiled, given, kwargs, dynamic or {}, constraints)
    program = _traced(compiled, shapes, named, dynamic or {})
    mesh = _mesh_of(program)
    exported = _exported(program, platforms)
    signature = Signature(
        name=_name(function),
        inputs=program.inputs,
        output=program.output,
        output_forms=program.output_forms,
        state=tuple(program.state),
        mesh=None if mesh is None or mesh.size != exported.nr_devices else MeshForm.of(mesh),
        devices=exported.nr_devices,
        platforms=tuple(exported.platforms),
        vjp_order=vjp_order,
        constraints=tuple(constraints),
    )
    if snapshot:
        check_fixed_sizes(signature)
    with artifact.written_at(place) as folder:
        (folder / artifact.PROGRAM).write_bytes(exported.serialize(vjp_order=vjp_order))
        words = map(to_words, program.values)
        names = [entry.path for entry in program.state]
        artifact.write_weights(folder / artifact.WEIGHTS, dict(zip(names, words, strict=True)))
        entries = {
            "signature": signature.as_json(),
            "jax": jax.__version__,
            "calling_convention": exported.calling_convention_version,
        }
        if snapshot:
            artifact.write_signature(folder, entries)
            program = load(folder, verify=False).program
            entries["snapshot"] = write_snapshot(folder, program.compiled(), program.devices)
        artifact.write_signature(folder, entries)
    return place


def _as_jit(function: Any, args: Sequence[Any]) -> tuple[Jit, tuple[Any, ...]]:
    """Returns the function as a ``Jit``, with the arguments for it."""
    if isinstance(function, BoundJit):
        return function.__func__, (function.__self__, *args)
    return (function if isinstance(function, Jit) else jit(function)), tuple(args)


def _traced(
    compiled: Jit, args: Sequence[Any], kwargs: dict[str, Any], dynamic: Dynamic
) -> FlatProgram:
    try:
        return FlatProgram(compiled, args, kwargs)
    except Exception as error:
        if dynamic and not isinstance(error, ShardaxError):
            error.add_note(
                f"shardax traced the function for any size of {', '.join(dynamic)} (dynamic=). "
                "What needs the number itself, such as a Python loop or an if, cannot be exported "
                "so: leave that size as it is, or write it with shapes alone (jnp.arange(x.shape[0]"
                "), sx.scan)."
            )
        raise


def _name(function: Any) -> str:
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def _exported(program: FlatProgram, platforms: Sequence[str] | None) -> Any:
    names = None if platforms is None else tuple(platforms)
    try:
        return jax.export.export(jax.jit(program.__call__), platforms=names)(*program.shapes())
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ExportError(
            f"JAX cannot export the function: {type(error).__name__}: {error}"
        ) from error


def _mesh_of(program: FlatProgram) -> Mesh | None:
    """Returns the mesh that state and inputs are laid out over, else the one in scope.

    Raises:
        ExportError: If there are two.
    """
    meshes: dict[Any, str] = {}
    state, inputs = program.shapes()
    names = [entry.path for entry in program.state]
    names += [f"an array of {item.name}" for item in program.inputs for _ in item.forms]
    for name, shape in zip(names, (*state, *inputs), strict=True):
        if isinstance(shape.sharding, NamedSharding):
            meshes.setdefault(shape.sharding.mesh, name)
    if len(meshes) > 1:
        listed = "; ".join(f"{name}: {mesh}" for mesh, name in meshes.items())
        raise ExportError(
            f"The function uses arrays over {len(meshes)} meshes ({listed}). A program runs on "
            "one: move all of it there, sx.shard(model, mesh, rules)."
        )
    scope = resolve_mesh()
    return next(iter(meshes), scope if isinstance(scope, Mesh) else None)
