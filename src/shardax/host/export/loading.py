# SPDX-License-Identifier: Apache-2.0
"""Loading of exported functions as Modules with their state.

A program maps lists of *words* (``host.export.signature``) to lists of words and has no state.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardax import (
    AmaxHistory,
    BatchStat,
    Cache,
    Intermediate,
    MetricState,
    Module,
    OptState,
    Param,
    Perturbation,
    Quantized,
    RngState,
    Variable,
    jit,
)
from shardax._files import PathNotFoundError
from shardax.errors import PickleWriteError, TransformError
from shardax.extend import PyTree, is_eager
from shardax.host.export import errors
from shardax.host.export import signature as signatures
from shardax.host.export.signature import ArrayForm, Signature

_KINDS = (
    AmaxHistory,
    BatchStat,
    Cache,
    Intermediate,
    MetricState,
    OptState,
    Param,
    Perturbation,
    Quantized,
    RngState,
)
_KIND_BY_NAME: dict[str, type[Variable]] = {kind.__name__: kind for kind in _KINDS}
"""Types of Variables that an artifact names; any other one is a ``Variable`` when it is loaded."""


class LoadedProgram:
    """The program of an artifact, on devices of this process."""

    def __init__(self, exported: Any, signature: Signature, mesh: Mesh | None) -> None:
        self.signature = signature
        self.mesh = mesh  # the exporting mesh over these devices; None for the default device
        written = [self.sharding_of(entry.form) for entry in signature.state if entry.written]
        results = [None] * len(signature.output_forms)
        self.step = jit(lambda function, inputs: function._run(inputs))  # of a LoadedFunction

        shardings = None if mesh is None else (results, written)
        # Words of (state, inputs) to words of (results, new values of the written state).
        self.run = jax.jit(self._differentiable(exported.call), out_shardings=shardings)

    def __deepcopy__(self, memo: object) -> LoadedProgram:
        return self  # it has no state

    def __reduce__(self) -> Any:
        raise PickleWriteError(
            f"The loaded {self.signature} cannot be pickled: its program belongs to this process. "
            "Send the path of the artifact and load it there, sx.host.load(path); its state is "
            "sx.state(loaded)."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.signature}>"

    def _differentiable(self, call):
        """Return the program, made to refuse derivatives if it was exported without."""
        program = jax.custom_jvp(lambda state, inputs: tuple(call(state, inputs)))

        @program.defjvp
        def _refuse(primals: object, tangents: object):
            raise errors.no_derivatives(self.signature.name)

        return program if self.signature.vjp_order == 0 else program.fun

    def sharding_of(self, form: ArrayForm) -> NamedSharding | None:
        """The sharding of a state array; None for the default device."""
        return None if self.mesh is None else form.sharding(self.mesh)

    def explained(self, error: Exception) -> Exception:
        """Return JAX's error about exported programs in terms of ``export``."""
        text, name = str(error), self.signature.name
        if "refining shapes" in text and self.signature.constraints:
            return errors.constraints_broken(name, self.signature.constraints, self.signature)
        if "atching rule" in text:
            return errors.not_mapped(name)
        return error


class LoadedFunction(Module):
    """An exported function with its state; made by ``load``.

    Variables are of the classes of shardax; one of a user's class is a ``Variable`` here.

    Attributes:
        variables: What it holds, as Variables by the text of their paths (``".layers[0].kernel"``).
        program: The program that it runs.

    Example:
        >>> import tempfile, jax.numpy as jnp, shardax as sx
        >>> class Counter(sx.Module):
        ...     def __init__(self):
        ...         self.count = sx.Variable(jnp.zeros(()))
        ...     def __call__(self, by):
        ...         self.count += by
        ...         return self.count * 10
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = sx.host.load(sx.host.export(Counter(), 1.0, to=f"{folder}/counter"))
        >>> float(loaded(2.0)), float(loaded(3.0)), float(loaded.variables[".count"])
        (20.0, 50.0, 5.0)
    """

    def __init__(self, program: LoadedProgram, variables: dict[str, Variable]) -> None:
        self.program = program
        self.variables = variables

    @property
    def signature(self) -> Signature:
        """Inputs, output and state; prints as ``name(inputs) -> result``."""
        return self.program.signature

    def __call__(self, /, *args: object, **kwargs: object) -> PyTree:
        """Run the program and store its new state."""
        inputs = self.signature.take(args, kwargs)
        try:
            return self.program.step(self, inputs) if is_eager() else self._run(inputs)
        except (ValueError, NotImplementedError) as error:
            raise self.program.explained(error) from error

    def _run(self, inputs: Sequence[object]):
        state = [signatures.to_words(variable.value) for variable in self.variables.values()]
        results, written = self.program.run(state, list(inputs))

        pairs = zip(self.signature.state, self.variables.values(), strict=True)
        targets = [(entry, variable) for entry, variable in pairs if entry.written]
        for (entry, variable), words in zip(targets, written, strict=True):
            variable.value = signatures.from_words(words, entry.form)
        leaves = signatures.all_from_words(results, self.signature.output_forms)
        return signatures.structure(self.signature.output).unflatten(leaves)


def load(path: object, mesh: Mesh | None = None, *, verify: bool = True) -> LoadedFunction:
    """Loads an artifact of ``export``, without its Python code.

    Needs ``pip install 'shardax[export]'``. The compiler gets the program as it is in the folder,
    so load only what comes from somebody trusted not to attack it.

    Args:
        path: The folder.
        mesh: A mesh of as many devices as it was exported for; names and sizes of its axes may
            differ, since only its devices are used, in order. None: the first devices here.
        verify: Whether to compare all files with their checksums.

    Returns:
        A Module to call; its Variables are the state.

    Raises:
        PathNotFoundError: If there is no artifact at ``path``.
        ExportError: If a file is missing or is not what was written, or if it was written by a
            shardax or JAX that this one does not read, or if devices, platform or 64 bits are
            missing here.
        ImportError: If ``flatbuffers`` or ``safetensors`` is missing.

    Example:
        >>> import tempfile, jax.numpy as jnp, shardax as sx
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     scaled = lambda x, by: x * by
        ...     loaded = sx.host.load(sx.host.export(scaled, jnp.ones(3), 1.0, to=f"{folder}/f"))
        >>> loaded(jnp.arange(3.0), by=2.0).tolist()
        [0.0, 2.0, 4.0]
    """
    signatures.require_extras()
    from safetensors import safe_open

    folder, entries = read_signature(path, verify)
    try:
        signature = Signature.from_json(entries["signature"])
    except (KeyError, TypeError, ValueError) as error:
        raise errors.unreadable_signature(folder / signatures.SIGNATURE, error) from error

    exported = _program(folder, entries)
    devices = _devices(signature, mesh, str(folder))
    program = LoadedProgram(exported, signature, _mesh(signature, devices, mesh))

    variables: dict[str, Variable] = {}
    with safe_open(folder / signatures.WEIGHTS, "numpy") as weights:
        for entry in signature.state:
            form = entry.form
            words = read_array(weights, entry.path, form.words(), program.sharding_of(form))
            variable_type = _KIND_BY_NAME.get(entry.type, Variable)
            variables[entry.path] = variable_type(
                signatures.from_words(words, form), axes=entry.axes
            )
    return LoadedFunction(program, variables)


def read_signature(path: Any, verify: bool) -> tuple[pathlib.Path, dict[str, Any]]:
    """Reads the signature of an artifact, and checks its files."""
    folder = pathlib.Path(os.path.abspath(path))
    file = folder / signatures.SIGNATURE
    if not file.is_file():
        absence = "no artifact (a folder with signature.json)" if folder.exists() else "nothing"
        raise PathNotFoundError(f"There is {absence} at {folder}.")

    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        version = entries["format"], entries["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.damaged(file, f"cannot be read ({error!r})") from error
    if version != (signatures.FORMAT, signatures.VERSION):
        raise errors.other_format(folder, version, (signatures.FORMAT, signatures.VERSION))

    if entries.get("checksum") != signatures.own_checksum(entries):
        raise errors.damaged(file, "was changed after it was written")
    for name, checksum in entries["checksums"].items():
        if not (folder / name).is_file():
            raise errors.damaged(folder / name, "is missing")
        if verify and signatures.checksum(folder / name) != checksum:
            raise errors.damaged(folder / name, "is not what was written (its checksum differs)")
    return folder, entries


def read_array(weights: Any, name: str, form: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    """Returns an array of safetensors; over a mesh, each device reads its part only."""
    # A slice has at least one number.
    stored = weights.get_slice(name) if form.size and form.shape else weights.get_tensor(name)

    def part(index: Any) -> np.ndarray:
        array = np.asarray(stored[index])
        # Dtypes that safetensors lacks are bytes, in one dimension more.
        return array.view(form.dtype).reshape(array.shape[: len(form.shape)])

    everything = (slice(None),) * len(form.shape)
    if sharding is None:
        return jax.numpy.array(part(everything))
    return jax.make_array_from_callback(form.shape, sharding, part)


def _program(folder, entries):
    """Read the program."""
    written = entries["calling_convention"]
    lowest = jax.export.minimum_supported_calling_convention_version
    highest = jax.export.maximum_supported_calling_convention_version
    if not lowest <= written <= highest:
        raise errors.other_convention(folder, entries["jax"], written)

    try:
        return jax.export.deserialize(bytearray((folder / signatures.PROGRAM).read_bytes()))
    except Exception as error:
        raise errors.unreadable_program(folder, entries["jax"], error) from error


def _devices(signature: Signature, mesh: object, folder: str) -> list[Any]:
    """Returns the devices to run on."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TransformError(
            f"mesh={mesh!r} is not a mesh of devices. Make one: "
            f"jax.make_mesh(({signature.devices},), ('x',))."
        )

    devices = list(jax.devices() if mesh is None else mesh.devices.flat)
    count = signature.devices
    if len(devices) < count or (mesh is not None and len(devices) != count):
        raise errors.other_number_of_devices(folder, count, len(devices), mesh is not None)

    platform: str = devices[0].platform
    kinds = {"gpu": ("cuda", "rocm")}.get(platform, (platform,))
    if not {*kinds, platform} & {*signature.platforms}:
        raise errors.other_platform(folder, signature.platforms, platform, kinds[0])

    forms = [entry.form for entry in signature.state]
    forms += [form for argument in signature.inputs for form in argument.forms]
    wide = sorted({form.dtype for form in forms if form.is_wide})
    if wide and jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise errors.no_64_bits(folder, wide)
    return devices[:count]


def _mesh(signature: Signature, devices: Sequence[object], mesh: object) -> Mesh | None:
    """The exporting mesh over other devices; None for the default device."""
    if signature.devices == 1 and mesh is None:
        return None
    form = signature.mesh or signatures.MeshForm(("devices",), (len(devices),), ("Auto",))
    types = tuple(AxisType[kind] for kind in form.types)
    arranged = np.asarray(devices, dtype=object).reshape(form.sizes)
    return Mesh(arranged, form.names, axis_types=types)
