# SPDX-License-Identifier: Apache-2.0
"""``export``: a function with its state as a folder that other processes, without its source, run.

The program is exported by ``jax.export`` as a pure function of state and inputs, so that one
program serves any weights, and a call's new state can be stored by whoever loaded it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardax.core._jax import is_eager
from shardax.core.errors import ExportError, ShardaxError
from shardax.host import artifact
from shardax.host.array_form import to_words
from shardax.host.dynamic import Dynamic, abstract_arguments
from shardax.host.flat_program import FlatProgram
from shardax.host.loading import load
from shardax.host.signature import MeshForm, Signature
from shardax.host.snapshots import check_fixed_sizes, write_snapshot
from shardax.partition.mesh import resolve_mesh
from shardax.transforms.bound import BoundJit
from shardax.transforms.jit import Jit, jit


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
            code, so ``load`` has to be told to (``host.snapshots``).
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
