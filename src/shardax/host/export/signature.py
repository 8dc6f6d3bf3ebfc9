# SPDX-License-Identifier: Apache-2.0
"""Artifacts on disk: folders with a signature, a program and arrays.

| file | what it is |
| --- | --- |
| `signature.json` | inputs, result and state by path, versions, checksums of the other files |
| `program.bin` | the program: StableHLO, as `jax.export` serializes it |
| `weights.safetensors` | the arrays that the function holds, by path |

Random keys are *words* to everything outside of JAX: the numbers they are made of, ``uint32`` with
one dimension more. Pytrees are containers with the number of each leaf in its place. Only tuples,
lists, dicts with ``str`` or ``int`` keys, and None are written, so that reading needs neither
pickle nor the classes of whoever wrote it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax.extend import Path, format_path, is_prng_key, needs_package, path_of_keys
from shardax.host.errors import ExportError
from shardax.host.export import errors

FORMAT = "shardax artifact"
VERSION = 1
"""Version of the folder; a reader refuses those that it does not know."""

SIGNATURE = "signature.json"
PROGRAM = "program.bin"
WEIGHTS = "weights.safetensors"


def require_extras() -> None:
    """Raise if a library for artifacts is missing."""
    with needs_package("An artifact", "shardax[export]"):
        import flatbuffers  # noqa: F401 (jax.export serializes with it)
        import safetensors  # noqa: F401


def checksum(file: pathlib.Path) -> str:
    """Return the SHA-256 of a file, as text."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def own_checksum(entries: Mapping[str, object]) -> str:
    """Return the checksum of a signature's other entries."""
    contents = {key: value for key, value in entries.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


# --- arrays ---


class ArrayForm(NamedTuple):
    """Shape, dtype and place of one array."""

    shape: tuple[int | str, ...]  # a dynamic dimension is its name, or an expression of names
    dtype: str  # of random keys such as "key<fry>"
    key: str | None = None  # implementation of the random keys that it holds
    spec: tuple[Any, ...] | None = None  # mesh axes of each dimension, if it is over a mesh

    @classmethod
    def of(cls, value: Any) -> ArrayForm:
        """The form of an array, its stand-in, or a number."""
        shape = tuple(s if type(s) is int else str(s) for s in np.shape(value))
        if is_prng_key(value):
            return cls(shape, str(value.dtype), _key_impl(value), _spec_of(value))
        return cls(shape, str(jnp.result_type(value)), None, _spec_of(value))

    @property
    def is_wide(self) -> bool:
        """Whether JAX has to be configured for its 64 bits."""
        return self.dtype in ("int64", "uint64", "float64", "complex128")

    def words(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of its words; all sizes must be known."""
        shape = tuple(map(int, self.shape))
        if self.key is None:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        key_words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=self.key)))
        return jax.ShapeDtypeStruct((*shape, *key_words.shape), key_words.dtype)

    def sharding(self, mesh: Any) -> NamedSharding:
        """Return the layout of its words over a mesh."""
        entries = self.spec or ()
        if self.key is not None:  # words have one dimension more
            entries = (*entries, *(None,) * (len(self.shape) - len(entries)), None)
        return NamedSharding(mesh, PartitionSpec(*entries))

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def _key_impl(keys: object) -> str:
    """The implementation of random keys."""
    # JAX tells it for arrays only, so one is traced.
    names: list[str] = []
    jax.eval_shape(lambda keys: names.append(str(jax.random.key_impl(keys))), keys)
    return names[0]


def _spec_of(value: object) -> tuple[Any, ...] | None:
    sharding = getattr(value, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def plain_dtype(dtype: jax.typing.DTypeLike) -> Any:
    """JAX's dtype for an array."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def to_words(value: Any) -> Any:
    """Replace random keys by their words."""
    return jax.random.key_data(value) if is_prng_key(value) else value


def from_words(words: Any, form: ArrayForm) -> Any:
    """Return an array as callers have it."""
    return words if form.key is None else jax.random.wrap_key_data(words, impl=form.key)


def all_from_words(words: Sequence[object], forms: Sequence[ArrayForm]) -> list[Any]:
    """Return several arrays as callers have them."""
    return [from_words(array_words, form) for array_words, form in zip(words, forms, strict=True)]


# --- pytrees ---


def to_json(treedef: Any, path: Path) -> Any:
    """Return a pytree structure as JSON values."""
    return _encode(treedef.unflatten(range(treedef.num_leaves)), path)


def _encode(node, path: Path):
    if node is None or type(node) is int:
        return node
    if type(node) in (tuple, list):
        items = [_encode(child, (*path, i)) for i, child in enumerate(node)]
        return {type(node).__name__: items}
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        return {"dict": [[key, _encode(child, (*path, key))] for key, child in node.items()]}
    keys = "dict with other keys than str and int" if type(node) is dict else type(node).__name__
    raise errors.unknown_container(keys, path)


def from_json(tree: Any) -> Any:
    """Return the pytree of leaf numbers written by ``to_json``."""
    if tree is None or type(tree) is int:
        return tree
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {key: from_json(child) for key, child in items}
    return {"tuple": tuple, "list": list}[kind](from_json(child) for child in items)


def structure(tree: object) -> Any:
    """Return the treedef written by ``to_json``."""
    return jax.tree.structure(from_json(tree))


# --- functions ---


class ExportedInput(NamedTuple):
    """One argument of a caller."""

    name: str
    by_name: bool  # whether it is passed by name only
    tree: object  # its pytree, as JSON
    forms: tuple[ArrayForm, ...]

    def __str__(self) -> str:
        return f"{self.name}: {shown_tree(self.tree, self.forms)}"


class StateEntry(NamedTuple):
    """One array of the function's state."""

    path: str  # also its name in the file of weights
    form: ArrayForm
    type: str  # class name of its Variable, or "Constant"
    axes: tuple[Any, ...] | None  # axis names of its Variable
    written: bool  # whether a call gives it a new value


class MeshForm(NamedTuple):
    """Names, sizes and types of mesh axes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    types: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> MeshForm:
        """Return the form of a mesh."""
        types = tuple(kind.name for kind in mesh.axis_types)
        return cls(tuple(mesh.axis_names), tuple(mesh.shape.values()), types)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Description of an artifact's function.

    Attributes:
        name: The function's name.
        inputs: What a caller passes, in order.
        output: Pytree of the result, as JSON.
        output_forms: Arrays of the result.
        state: Arrays that the function holds.
        mesh: Mesh that it was exported over, or None.
        devices: Number of devices that it runs on.
        platforms: Platforms that it was lowered for.
        vjp_order: How often it can be differentiated.
        constraints: What holds for the sizes of dynamic dimensions.

    Example:
        >>> import tempfile, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sx.host.export(layer, jnp.ones((1, 2)), to=f"{folder}/layer")
        ...     signature = sx.host.load(path).signature
        >>> print(signature, signature.platforms, [entry.path for entry in signature.state])
        Linear(x: float32[1,2]) -> float32[1,3] ('cpu',) ['.kernel', '.bias']
    """

    name: str
    inputs: tuple[ExportedInput, ...]
    output: object
    output_forms: tuple[ArrayForm, ...]
    state: tuple[StateEntry, ...]
    mesh: MeshForm | None
    devices: int
    platforms: tuple[str, ...]
    vjp_order: int
    constraints: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the signature as JSON values."""
        return _to_plain({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> Signature:
        """Returns the signature written by ``as_json``."""
        read = _with_tuples(entry)
        inputs = (ExportedInput(**i)._replace(forms=_forms(i["forms"])) for i in read["inputs"])
        state = (StateEntry(**e)._replace(form=ArrayForm(**e["form"])) for e in read["state"])
        return dataclasses.replace(
            cls(**read),
            inputs=tuple(inputs),
            output_forms=_forms(read["output_forms"]),
            state=tuple(state),
            mesh=read["mesh"] and MeshForm(**read["mesh"]),
        )

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"{self.name}({inputs}) -> {shown_tree(self.output, self.output_forms)}"

    def take(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        """Returns the arrays of a call's arguments, random keys as words.

        Raises:
            ExportError: If they are not what the function was exported for.
        """
        sizes: dict[str, tuple[int, str]] = {}
        leaves: list[Any] = []
        values = self._in_order(args, kwargs)

        for argument, expected, value in zip(self.inputs, self._structures, values, strict=True):
            actual = jax.tree.structure(value)
            if expected != actual:
                raise self._refusal(f"{argument.name} is made like {actual}, not like {expected}.")

            pairs = jax.tree_util.tree_leaves_with_path(value)
            for (keys, leaf), form in zip(pairs, argument.forms, strict=True):
                path = (argument.name, *path_of_keys(keys))
                where = format_path(path).removeprefix(".")
                array = self._admitted(leaf, form, where)
                self._check_shape(array, form, where, sizes)
                leaves.append(to_words(array))
        return leaves

    @functools.cached_property
    def _structures(self) -> list[Any]:
        return [structure(argument.tree) for argument in self.inputs]

    def _in_order(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        positional = [argument.name for argument in self.inputs if not argument.by_name]
        values = dict(zip(positional, args, strict=False))
        twice = sorted(values.keys() & kwargs.keys())
        if len(args) > len(positional) or twice:
            excess = f"{', '.join(twice)} twice" if twice else f"{len(args)} positional arguments"
            raise self._refusal(f"The call gives {excess}.")

        values.update(kwargs)
        names = [argument.name for argument in self.inputs]
        missing = [name for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            parts = [f"lacks {', '.join(missing)}"] if missing else []
            parts += [f"has the unknown {', '.join(unknown)}"] if unknown else []
            raise self._refusal(f"The call {' and '.join(parts)}.")
        return [values[name] for name in names]

    def _admitted(self, leaf, form: ArrayForm, where: str):
        """Return an argument's array in the dtype of the program."""
        if form.key is not None:
            if ArrayForm.of(leaf)._replace(shape=(), spec=None) != form._replace(
                shape=(), spec=None
            ):
                keys = f"jax.random.key(0, impl={form.key!r})"
                raise self._refusal(f"{where} is {ArrayForm.of(leaf)}; it takes keys as {keys}.")
            return leaf

        dtype = jnp.dtype(form.dtype)
        if isinstance(leaf, (bool, int, float, complex)):
            leaf_dtype = jnp.result_type(leaf, dtype)
            leaf = jnp.asarray(leaf, dtype) if leaf_dtype == dtype else leaf
        else:
            if not hasattr(leaf, "dtype"):
                raise self._refusal(f"{where} is {leaf!r}, not an array.")
            leaf_dtype = plain_dtype(leaf.dtype)

        if leaf_dtype != dtype:
            raise self._refusal(
                f"{where} is {leaf_dtype}; the program takes {form.dtype}: jnp.asarray({where}, "
                f"jnp.{form.dtype})."
            )
        return leaf

    def _check_shape(
        self, array, form: ArrayForm, where: str, sizes: dict[str, tuple[int, str]]
    ) -> None:
        shape = jnp.shape(array)
        fits = len(shape) == len(form.shape)
        for size, dim in zip(shape, form.shape, strict=fits):
            if not isinstance(dim, str):
                fits = fits and size == dim
            elif dim.isidentifier():
                first_size, first = sizes.setdefault(dim, (size, where))
                if size != first_size:
                    raise self._refusal(
                        f"{dim} is {first_size} in {first} and {size} in {where}; it is one size."
                    )
        if not fits:
            raise self._refusal(f"{where} has the shape {tuple(shape)}, not that of {form}.")

    def _refusal(self, problem: str) -> ExportError:
        return errors.call_does_not_fit(problem, self)


def _to_plain(value) -> Any:
    """Return records and tuples as JSON values."""
    if hasattr(value, "_asdict"):  # defaults, which are None, are left out
        defaults = value._field_defaults
        value = {k: v for k, v in value._asdict().items() if k not in defaults or v is not None}
    if isinstance(value, dict):
        return {key: _to_plain(child) for key, child in value.items()}
    return list(map(_to_plain, value)) if isinstance(value, (tuple, list)) else value


def _with_tuples(value: object) -> Any:
    """Return JSON values with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(child) for key, child in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _forms(entries: Sequence[Any]) -> tuple[ArrayForm, ...]:
    return tuple(ArrayForm(**entry) for entry in entries)


def shown_tree(tree: object, forms: Sequence[ArrayForm]) -> str:
    """Return a pytree of arrays as text: ``{'a': float32[3]}``."""
    return repr(structure(tree).unflatten(forms))
