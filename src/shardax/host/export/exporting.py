# SPDX-License-Identifier: Apache-2.0
"""Export of functions with their state, to run without their source.

The program is exported by ``jax.export`` as a pure function of lists of arrays: the state (the
values of Variables, and constants, arrays that it uses without their being a Variable's) and what a
caller passes, to the arrays of the result and the new values of what it writes. What cannot do
without the process that made it, or changes structure, is an error here.

A *dynamic dimension* has a name in place of a size. *Constraints* (``"seq <= 512"``) say what JAX
may count on.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardax import Jit, RngState, Variable, jit
from shardax._files import (
    PathExistsError,
    draft_folder,
    flush,
    flush_folder,
    require_free,
    write_tensors,
)
from shardax.errors import ShardaxError
from shardax.extend import (
    ArrayProgram,
    Object,
    Path,
    PyTree,
    format_path,
    is_eager,
    open_jaxpr,
    path_of_keys,
    raise_if_any,
    stored_value,
)
from shardax.host.errors import ExportError
from shardax.host.export import errors, signature
from shardax.host.export.signature import ArrayForm, StateEntry
from shardax.partition import resolve_mesh

CONSTANT = "Constant"
"""What a signature calls the type of an array that is not a Variable's."""

Dynamic = Mapping[str, int | Mapping[str, int | Sequence[int]]]
"""Dimension by name: one for all arrays in the arguments, or one or several by parameter name."""


def export(
    function: Callable[..., PyTree],
    /,
    *args: PyTree,
    to: Any,
    dynamic: Dynamic | None = None,
    constraints: Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
    **kwargs: PyTree,
) -> pathlib.Path:
    """Exports a function with the state it uses.

    Needs ``pip install 'shardax[export]'``.

    Args:
        function: A Module, a method of one, or any function, compiled or not. The Variables of all
            Modules that it uses (its own, those in arguments, those in closures) are the state.
            Layouts are those of its arrays; shardings that were declared to ``jit`` are not kept.
        *args: Arguments to trace it for: arrays or ``jax.ShapeDtypeStruct``, in tuples, lists and
            dicts. Callers of the loaded function pass these; arguments without arrays (Modules,
            static arguments of a compiled function, None) belong to the signature.
        to: The folder to write, which must not exist. It appears when it is complete.
        dynamic: Dimensions whose size stays open: ``{"batch": 0}`` is dimension 0 of every array
            that is passed, ``{"batch": {"x": 0, "mask": 1}}`` says it by parameter name.
        constraints: What holds for these sizes, such as ``"seq <= 512"``.
        platforms: Where it is to run: ``("cpu", "cuda", "tpu")``. None: the platform here.
        vjp_order: How often the loaded function can be differentiated.
        **kwargs: Keyword arguments to trace it for.

    Returns:
        The folder's absolute path.

    Raises:
        ExportError: If the function cannot do without this process, by name: callbacks, random
            state without a seed, structure that changes, state that changes its form.
        ModuleError: If the state holds shapes only.
        PathExistsError: If there is something at ``to``.
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
    signature.require_extras()
    if not is_eager():
        raise errors.export_while_tracing()

    place = free_place(to)
    compiled, arguments = _compiled_call(function, args)
    shapes, named = abstract_arguments(compiled, arguments, kwargs, dynamic or {}, constraints)
    program = _traced(compiled, shapes, named, dynamic or {})

    mesh = _mesh_of(program)
    try:
        lowered = jax.export.export(jax.jit(program.__call__), platforms=platforms)
        exported = lowered(*program.shapes())
    except (ValueError, TypeError, NotImplementedError) as error:
        raise errors.refused_by_jax(error) from error

    devices = exported.nr_devices
    described = signature.Signature(
        name=getattr(function, "__name__", type(function).__name__),
        inputs=program.inputs,
        output=program.output,
        output_forms=program.output_forms,
        state=tuple(program.state),
        mesh=None if mesh is None or mesh.size != devices else signature.MeshForm.of(mesh),
        devices=devices,
        platforms=tuple(exported.platforms),
        vjp_order=vjp_order,
        constraints=tuple(constraints),
    )

    with written_at(place) as folder:
        (folder / signature.PROGRAM).write_bytes(exported.serialize(vjp_order=vjp_order))
        words = map(signature.to_words, program.values)
        names = [entry.path for entry in program.state]
        write_weights(folder / signature.WEIGHTS, dict(zip(names, words, strict=True)))

        entries = {
            "signature": described.as_json(),
            "jax": jax.__version__,
            "calling_convention": exported.calling_convention_version,
        }
        write_signature(folder, entries)
    return place


def _compiled_call(
    function: Callable[..., PyTree], args: Sequence[PyTree]
) -> tuple[Jit, Sequence[PyTree]]:
    """The compiled function and its positional arguments; a method's has its object."""
    method = getattr(function, "__func__", None)
    if isinstance(method, Jit):
        return method, (getattr(function, "__self__", None), *args)
    return (function if isinstance(function, Jit) else jit(function)), args


def _traced(
    compiled: Jit, args: Sequence[object], kwargs: dict[str, object], dynamic: Dynamic
) -> FlatProgram:
    try:
        return FlatProgram(compiled, args, kwargs)
    except Exception as error:
        if dynamic and not isinstance(error, ShardaxError):
            error.add_note(
                f"The function was traced for any size of {', '.join(dynamic)} (dynamic=). What "
                "needs the number itself, such as a Python loop or an if, cannot be exported so: "
                "leave that size as it is, or use shapes alone (jnp.arange(x.shape[0]), sx.scan)."
            )
        raise


def _mesh_of(program: FlatProgram) -> Mesh | None:
    """The mesh of state and inputs, else the one in scope."""
    meshes: dict[Any, str] = {}  # with the name of the first array over each
    state, inputs = program.shapes()
    names = [entry.path for entry in program.state]
    names += [f"an array of {argument.name}" for argument in program.inputs for _ in argument.forms]
    for name, shape in zip(names, (*state, *inputs), strict=True):
        if isinstance(shape.sharding, NamedSharding):
            meshes.setdefault(shape.sharding.mesh, name)

    if len(meshes) > 1:
        raise errors.several_meshes(meshes)

    scope = resolve_mesh()
    return next(iter(meshes), scope if isinstance(scope, Mesh) else None)


# --- dynamic dimensions ---


def abstract_arguments(
    jit: Any,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    dynamic: Dynamic,
    constraints: Sequence[str],
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return the arguments with shapes for arrays, dynamic dimensions among them."""
    dynamic_count = sum(position not in jit.static_positions for position in range(len(args)))
    labelled: dict[Any, str] = dict(jit.positional(dynamic_count))
    labelled |= {name: name for name in kwargs if name not in jit.static_names}

    by_key = {**dict(enumerate(args)), **kwargs}
    dimensions = _DynamicSizes(dynamic, constraints, list(labelled.values()))
    for key, label in labelled.items():
        by_key[key] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, label=label: dimensions.abstract(label, path, leaf),
            by_key[key],
            is_leaf=lambda leaf: isinstance(leaf, Object),
        )

    dimensions.check_used()
    return tuple(by_key[i] for i in range(len(args))), {name: by_key[name] for name in kwargs}


class _DynamicSizes:
    """The dynamic dimensions of one export."""

    def __init__(self, dynamic: Dynamic, constraints: Sequence[str], labels: Sequence[str]) -> None:
        self.dynamic = dynamic
        self.sizes: dict[str, tuple[Any, str]] = {}  # the first size of a name, and where it was
        self.symbols: dict[str, Any] = {}

        names = list(dynamic)
        if not names and constraints:
            raise errors.constraints_of_nothing(constraints)

        if names:
            try:
                sizes = jax.export.symbolic_shape(", ".join(names), constraints=tuple(constraints))
            except Exception as error:
                raise errors.no_symbols(names, constraints, error) from error
            self.symbols = dict(zip(names, sizes, strict=True))

        for name, places in dynamic.items():
            for label in places if isinstance(places, Mapping) else ():
                if label not in labels:
                    raise errors.no_such_argument(name, label, labels)

    def abstract(self, label: str, path, leaf):
        """Replace an array of an argument by its shape and dtype."""
        if isinstance(leaf, Object) or not hasattr(leaf, "dtype"):
            return leaf

        where = format_path((label, *path_of_keys(path)))
        shape = list(leaf.shape)
        for name, symbol in self.symbols.items():
            for axis in self._axes(name, label):
                if not -len(shape) <= axis < len(shape):
                    raise errors.no_such_dimension(name, axis, where, tuple(leaf.shape))

                size = leaf.shape[axis], where
                first = self.sizes.setdefault(name, size)
                if size[0] != first[0]:
                    raise errors.two_sizes(name, first, size)
                shape[axis] = symbol

        return jax.ShapeDtypeStruct(
            tuple(shape),
            signature.plain_dtype(leaf.dtype),
            sharding=_layout(leaf, shape),
            weak_type=getattr(leaf, "weak_type", False),
        )

    def _axes(self, name: str, label: str) -> tuple[int, ...]:
        places = self.dynamic[name]
        axes = places.get(label, ()) if isinstance(places, Mapping) else places
        return (axes,) if isinstance(axes, int) else tuple(axes)

    def check_used(self) -> None:
        """Raise if no array has a dynamic dimension."""
        unused = [name for name in self.symbols if name not in self.sizes]
        if unused:
            raise errors.dimensions_of_no_array(unused)


def _layout(leaf: object, shape: Sequence[object]):
    """The sharding of an array, if it fits the shape."""
    # JAX does not split dynamic dimensions, because nobody knows that they divide. The compiler
    # then finds the layout, and callers may pass the array split.
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    split = zip(shape, sharding.spec, strict=False)
    return None if any(e is not None and type(s) is not int for s, e in split) else sharding


# --- writing ---


def free_place(path: Any) -> pathlib.Path:
    """Return the absolute path of an artifact to write."""
    place = pathlib.Path(os.path.abspath(path))
    require_free(place, "An artifact")
    return place


@contextlib.contextmanager
def written_at(place: pathlib.Path) -> Generator[pathlib.Path]:
    """Write a folder under a temporary name, and rename it when complete."""
    try:
        with draft_folder(place) as draft:
            yield draft
            flush_folder(draft)
            free_place(place)  # somebody may have been faster
            draft.rename(place)
            flush(place.parent)
    except PathExistsError:
        raise
    except OSError as error:
        raise errors.not_written(place, error) from error


def write_signature(folder: pathlib.Path, entries: Mapping[str, object]) -> None:
    """Write the signature of a folder with complete other files."""
    names = sorted(file.name for file in folder.iterdir() if file.name != signature.SIGNATURE)
    body = {
        "format": signature.FORMAT,
        "version": signature.VERSION,
        **entries,
        "checksums": {name: signature.checksum(folder / name) for name in names},
    }
    body["checksum"] = signature.own_checksum(body)
    (folder / signature.SIGNATURE).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def write_weights(path: pathlib.Path, arrays: Mapping[str, object]) -> None:
    """Write arrays by name, as safetensors."""
    foreign = [
        name for name, array in arrays.items() if not getattr(array, "is_fully_addressable", True)
    ]
    raise_if_any(
        ExportError,
        foreign,
        "Other processes hold parts of ",
        ". Export from one process that holds all: restore a checkpoint there.",
    )

    host_arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    plain = {name: _as_numbers(array) for name, array in host_arrays.items()}
    write_tensors(path, plain)


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """View dtypes foreign to safetensors as bytes."""
    if array.dtype.name in _TAKEN:
        return array
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.dtype.itemsize)


_TAKEN = frozenset(
    [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
    ]
)
"""Dtypes that are written as they are; of the rest, the bytes."""


# --- the function of lists of arrays ---


class FlatProgram:
    """A function over objects, traced for some arguments, as a function of words."""

    def __init__(self, jit: Jit, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
        check_random_state(ArrayProgram.known_variables(jit, args, kwargs))
        self._program = program = ArrayProgram(jit, args, kwargs)
        check_effects(program)
        check_program(program.jaxpr)
        self.inputs = tuple(_inputs(program))
        self._leaves = [leaf for argument in program.inputs for leaf in argument.leaves]
        self.output = signature.to_json(jax.tree.structure(program.result), ("result",))
        self.output_forms = tuple(map(ArrayForm.of, jax.tree.leaves(program.result)))

        arrays = program.state()
        entries = [*_entries(program, arrays), *_entries_of_constants(program)]
        self._forms = [entry.form for entry in entries]
        # Positions of the arrays that a call reads or writes.
        read = program.read_state()
        self._held = [i for i, entry in enumerate(entries) if i in read or entry.written]
        self.state = _with_unique_paths([entries[i] for i in self._held])
        self.values = [arrays[i] for i in self._held]

    def __call__(
        self, state: Sequence[object], inputs: Sequence[object]
    ) -> tuple[list[PyTree], list[PyTree]]:
        """Run the program, usually on tracers."""
        by_position = dict(zip(self._held, state, strict=True))
        arrays = [
            signature.from_words(by_position[i] if i in by_position else _zeros(form), form)
            for i, form in enumerate(self._forms)
        ]
        forms = [form for argument in self.inputs for form in argument.forms]
        results, written = self._program(arrays, signature.all_from_words(inputs, forms))
        return list(map(signature.to_words, results)), list(map(signature.to_words, written))

    def shapes(self) -> tuple[list[Any], list[Any]]:
        """Shapes of the words of state and inputs."""
        return list(map(_shape, self.values)), list(map(_shape, self._leaves))


def _zeros(form: ArrayForm) -> Any:
    """Words in place of an unread array."""
    words = form.words()
    return jnp.zeros(words.shape, words.dtype)


def _shape(value) -> jax.ShapeDtypeStruct:
    words = jax.eval_shape(signature.to_words, value)
    form = ArrayForm.of(value)
    sharding = None if form.spec is None else form.sharding(value.sharding.mesh)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


def _inputs(program: ArrayProgram) -> Iterator[signature.ExportedInput]:
    """Describe the arguments of callers; one without arrays belongs to the signature."""
    for name, by_name, treedef, leaves, has_objects in program.inputs:
        if has_objects:
            raise errors.mixed_argument(name)
        tree = signature.to_json(treedef, (name,))
        yield signature.ExportedInput(name, by_name, tree, tuple(map(ArrayForm.of, leaves)))


def _entries(program: ArrayProgram, arrays: Sequence[object]) -> Iterator[StateEntry]:
    """Describe the arrays of the Variables."""
    remaining = iter(arrays)
    for path, variable, new_value, is_written in program.variables:
        leaves, treedef = jax.tree.flatten(stored_value(variable))
        value = treedef.unflatten([next(remaining) for _ in leaves])
        if is_written:
            check_form_is_kept(path, value, new_value)

        axes = None if variable.axes is None else tuple(map(_axis_text, variable.axes))
        kind = type(variable).__name__
        for keys, array in jax.tree_util.tree_leaves_with_path(value):
            text = format_path(path) + jax.tree_util.keystr(keys)
            yield StateEntry(text, ArrayForm.of(array), kind, axes, is_written)


def _axis_text(name: object) -> str | None:
    return name if isinstance(name, str | None) else repr(name)


def _entries_of_constants(program: ArrayProgram) -> Iterator[StateEntry]:
    for position, constant in enumerate(program.constants):
        form = ArrayForm.of(constant)
        yield StateEntry(f"constants[{position}]", form, CONSTANT, None, written=False)


def _with_unique_paths(state: Sequence[StateEntry]) -> list[StateEntry]:
    """Number the entries of one path."""
    # A closure and an argument may have the same.
    counts: collections.Counter[str] = collections.Counter()
    named = []
    for entry in state:
        counts[entry.path] += 1
        suffix = "" if counts[entry.path] == 1 else f"#{counts[entry.path]}"
        named.append(entry._replace(path=entry.path + suffix))
    return named


# --- unsupported programs ---


def check_random_state(variables: Sequence[tuple[Path, Variable]]) -> None:
    """Raise if a random stream has no seed."""
    unseeded = [
        format_path(path)
        for path, variable in variables
        if isinstance(variable, RngState) and variable.is_abstract
    ]
    raise_if_any(
        ExportError,
        unseeded,
        "Random state without a seed: ",
        " are shapes only, and whoever loads the artifact could not draw. Seed the model first: "
        "build it with sx.Rngs(0), or restore a checkpoint into it.",
    )


def check_effects(program: ArrayProgram) -> None:
    """Raise if a call does more than return arrays and write Variables."""
    if program.change is not None:
        made = sorted(kind.__name__ for kind in program.change.new_types)
        raise errors.structure_changed(program.change.paths, made)
    if program.returns_objects:
        raise errors.objects_returned()


def check_form_is_kept(path: Path, old: object, new: object) -> None:
    """Raise if a call changes the form of a Variable."""
    forms = [[str(ArrayForm.of(leaf)) for leaf in jax.tree.leaves(value)] for value in (old, new)]
    if forms[0] != forms[1] or jax.tree.structure(old) != jax.tree.structure(new):
        raise errors.form_changed(path, *forms)


def check_program(jaxpr: Any) -> None:
    """Raise if a program calls Python, or has other effects."""
    callbacks = list(dict.fromkeys(_callbacks(jaxpr.jaxpr)))
    if callbacks:
        raise errors.python_called(callbacks)
    if jaxpr.effects:
        raise errors.other_effects(sorted(map(str, jaxpr.effects)))


def _callbacks(jaxpr, outer_line: str = "") -> Iterator[str]:
    """Yield the callbacks in a program."""
    # `outer_line` is the source line of the call that the program is in.
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        line = _user_line(equation) or outer_line
        if "callback" in name or name == "debug_print":
            yield _described(equation, name) + (f" at {line}" if line else "")
        for inner in _inner_programs(equation):
            yield from _callbacks(inner, line)


def _described(equation, name: str) -> str:
    if name == "debug_print":
        return f"jax.debug.print({equation.params.get('fmt', '')!r}, ...)"
    # The text of a callback has the function's name: <function log at 0x...>
    names = re.findall(r"<(?:bound method|function) ([^ ]+)", str(equation.params.get("callback")))
    named = [function for function in names if "<locals>" not in function]
    return name + (f" of {named[0]}" if named else "")


def _user_line(equation: object) -> str:
    """Returns the user's file and line behind an equation, or ""."""
    # 0.10 to 0.12.
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    package = pathlib.Path(__file__).parents[2]
    inside = (str(pathlib.Path(jax.__file__).parent), str(package))
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(inside):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _inner_programs(equation: Any) -> Iterator[Any]:
    """Yields the programs inside an equation."""
    for value in jax.tree.leaves(list(equation.params.values())):
        inner = open_jaxpr(value)
        if hasattr(inner, "eqns"):
            yield inner
