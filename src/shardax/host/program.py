# SPDX-License-Identifier: Apache-2.0
"""One call of a host function, as part of a program.

The arguments are taken apart into *leaves*, the arrays that travel to the host, and all else, which
is static: a ``HostProgram``. On the host it puts the arguments together again with NumPy arrays,
runs the function and checks what comes back.

There are two ways to the host. ``jax.pure_callback`` copies the arguments into JAX arrays first, by
threads that the running program may itself occupy: on the CPU large arguments then wait for ever
(with one core, or with ``shard_map`` over as many devices as there are threads). So programs for
the CPU hand over their own buffers, which are copied at once; others use ``jax.pure_callback``.

Under ``vmap`` the leaves of a *vectorized* function have further leading dimensions, the *batch*.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from shardax.core import _jax
from shardax.core._jax import Tracer, is_eager
from shardax.core.errors import ArgumentError
from shardax.core.frames import Frame
from shardax.core.paths import Path, format_path
from shardax.core.static import Static
from shardax.core.structure import GraphDef, build
from shardax.host.raised import wrapped
from shardax.host.results import Promised
from shardax.host.values import LOCK, HostFrame, on_host
from shardax.transforms.arguments import put_together
from shardax.transforms.call import Call
from shardax.transforms.naming import leaf_paths
from shardax.transforms.repeat import vary_alike
from shardax.transforms.tangents import dtype_of

VMAP_METHODS = {"sequential": "sequential", "vectorized": "expand_dims"}
"""JAX's name for each way of batching a host function."""


@dataclasses.dataclass(frozen=True)
class HostProgram:
    """A host function with the form of its arguments and results; equal ones do the same.

    Attributes:
        name: The function's name, for messages.
        graphdef: Structure of the function and the objects in the arguments.
        templates: How each positional argument is put together.
        named: (name, template) of each keyword argument.
        static: Exact keys of static arguments.
        treedef: Structure of the leaves: (values of Variables, plain parts, those by name).
        forms: Shape and dtype of each leaf, as the function sees it without a batch.
        out_forms: Those of the results.
        out_tree: Their structure.
        vmap: ``"sequential"`` or ``"vectorized"``.
        fills: As for ``Promised``.
    """

    name: str
    graphdef: GraphDef
    templates: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    static: tuple[tuple[Any, Static], ...]
    treedef: Any
    forms: tuple[jax.ShapeDtypeStruct, ...]
    vmap: str
    fills: bool
    out_forms: tuple[jax.ShapeDtypeStruct, ...] = ()
    out_tree: Any = None

    def restore(
        self, leaves: Sequence[Any], frame: Frame | None, host: bool = False
    ) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """Puts a function and its arguments together.

        Args:
            leaves: The arrays, or their forms.
            frame: The frame that owns the new objects.
            host: Whether the objects are host copies.
        """
        values, plain, plain_named = self.treedef.unflatten(list(leaves))
        graphdef = on_host(self.graphdef) if host else self.graphdef
        (function, *objects), _ = build(graphdef, values, frame, LOCK if host else None)
        args = [put_together(t, p, objects) for t, p in zip(self.templates, plain, strict=True)]
        kwargs = {name: put_together(t, plain_named[name], objects) for name, t in self.named}
        return function, args, kwargs

    def run(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the function on the host.

        Args:
            leaves: Arrays of its own, which the function may keep.
        """
        pairs = list(zip(leaves, self.forms, strict=True))
        batch = np.broadcast_shapes(*(leaf.shape[: leaf.ndim - len(f.shape)] for leaf, f in pairs))
        given = [_arrived(leaf, (*batch, *form.shape), form.dtype) for leaf, form in pairs]
        with HostFrame(self.name) as frame:
            function, args, kwargs = self.restore(given, frame, host=True)
            returned = function(*args, **kwargs)
        return Promised(self.name, self.out_forms, self.out_tree, self.fills).check(returned, batch)

    def run_in_program(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Like ``run``; an exception is kept, because JAX loses all but its text."""
        try:
            return self.run(leaves)
        except Exception as error:
            raise wrapped(self.name, error) from error

    def stage(self, *leaves: Any) -> list[Any]:
        """Puts the call into the program that is being traced."""
        return jax.lax.platform_dependent(*leaves, cpu=self._by_buffers, default=self._by_callback)

    def _by_buffers(self, *leaves: Any) -> list[Any]:
        def callback(context: Any, outs: Sequence[Any], *buffers: Any) -> None:
            results = self.run_in_program([np.asarray(buffer).copy() for buffer in buffers])
            for out, result in zip(outs, results, strict=True):
                np.asarray(out)[...] = result

        callback.__qualname__ = self.name
        method = VMAP_METHODS[self.vmap]
        return buffer_callback(callback, list(self.out_forms), vmap_method=method)(*leaves)

    def _by_callback(self, *leaves: Any) -> list[Any]:
        def callback(*arrays: Any) -> list[np.ndarray]:
            return self.run_in_program([np.array(array) for array in arrays])

        callback.__qualname__ = self.name
        method = VMAP_METHODS[self.vmap]
        return jax.pure_callback(callback, list(self.out_forms), *leaves, vmap_method=method)


def take(
    name: str, call: Call, static: Sequence[tuple[Any, Static]], vmap: str, fills: bool
) -> tuple[HostProgram, list[Any], list[Path]]:
    """Takes a call apart.

    Returns:
        (the program, without results yet; the leaves; the Variable or argument that each is of).
    """
    arguments, flat = call.arguments, call.graph.flat
    parts = (call.graph.values(), list(arguments.plain), arguments.plain_named)
    leaves, treedef = jax.tree.flatten(parts)
    labels = (flat.leaf_paths, [(label,) for label in call.labels])
    where: list[Any] = [(part, key) for part, key, *_ in leaf_paths(treedef)]
    paths = [(key,) if part == 2 else labels[part][key] for part, key in where]
    forms = tuple(_form_on_host(name, *pair) for pair in zip(leaves, paths, strict=True))
    program = HostProgram(
        name,
        flat.graphdef,
        arguments.templates,
        arguments.named,
        tuple(static),
        treedef,
        forms,
        vmap,
        fills,
    )
    return program, leaves, paths


def _form_on_host(name: str, leaf: Any, path: Path) -> jax.ShapeDtypeStruct:
    dtype = dtype_of(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(words.shape, words.dtype)
    if dtype == jax.dtypes.float0:
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise ArgumentError(
            f"The host function {name} was given an array of dtype {dtype} at {format_path(path)}, "
            f"which JAX does not have. Encode it as integers; or pass it as a tuple, which is "
            f"handed on as it is: tuple(array.tolist())."
        )
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(dtype))


def staged(program: HostProgram) -> Callable[..., list[Any]]:
    """Returns ``program.stage`` as a function that JAX traces once.

    It is made for each program, and the program is no argument of it, because JAX keeps static
    arguments alive for good.
    """
    return jax.jit(lambda *leaves: program.stage(*leaves))


def call_on_host(
    program: HostProgram, in_program: Callable[..., list[Any]], leaves: Sequence[Any]
) -> list[Any]:
    """Runs a program's function: here and now if nothing is traced, else when the program runs.

    Args:
        program: The program.
        in_program: What ``staged`` made of it.
        leaves: Its leaves.

    Returns:
        The leaves of the result, as JAX arrays.
    """
    if not program.out_forms:
        return []
    shipped = [_shipped(leaf, form) for leaf, form in zip(leaves, program.forms, strict=True)]
    if is_eager() and not any(isinstance(leaf, Tracer) for leaf in leaves):
        return [jnp.array(result) for result in _run_now(program, shipped)]
    # The results differ over every mesh axis over which an argument does. JAX takes them for equal.
    return [
        functools.reduce(vary_alike, [leaf for leaf in shipped if _jax.varying_axes(leaf)], result)
        for result in in_program(*shipped)
    ]


def _run_now(program: HostProgram, leaves: Sequence[Any]) -> list[np.ndarray]:
    given = [
        np.array(leaf, None if form.dtype == jax.dtypes.float0 else form.dtype)
        for leaf, form in zip(leaves, program.forms, strict=True)
    ]
    try:
        return program.run(given)
    except Exception as error:
        shown = ", ".join(f"{form.dtype}{list(form.shape)}" for form in program.forms)
        error.add_note(f"In the host function {program.name}, called with {shown or 'no arrays'}.")
        raise


def _shipped(leaf: Any, form: jax.ShapeDtypeStruct) -> Any:
    """Returns a leaf as what can travel: random keys as their words."""
    if form.dtype == jax.dtypes.float0:
        return np.zeros(form.shape, bool)
    if jnp.issubdtype(dtype_of(leaf), jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _arrived(array: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a leaf as the function sees it."""
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)
    return array if array.shape == shape else np.broadcast_to(array, shape)
