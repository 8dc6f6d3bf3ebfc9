# SPDX-License-Identifier: Apache-2.0
"""Kernels of other libraries: the choice by scope, the run over meshes.

The kernels are those of kept libraries. One that computes something else for a call, or cannot run
it, is not taken: ``"auto"`` passes over it and says why, and a kernel asked for by name is refused
with the same reason. ``attention_kernels.py`` has those of attention; here are what they share, and
the kernels of experts, gated units, losses and norms, which are all tokamax's.

XLA splits its own operations over a mesh; a Pallas kernel is one operation that it cannot split. So
such a kernel runs in a region, a ``jax.shard_map``, each device for its part, by the types of
arrays over Explicit axes and by rules else.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import logging
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax._parallel.manual_axes import mesh_of_region
from shardax.extend import PyTree, ScopeSettings, explicit_entries, mesh_axes_of
from shardax.partition import logical_to_mesh_axes, resolve_mesh

LOG = logging.getLogger("shardax.kernels")
INSTALL_TOKAMAX = "pip install 'shardax[kernels]'"
MeshAxes = tuple[str, ...]
_FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)
UNTIMED = "it is taken only by name: it was never timed here"
_LOSS_COLUMNS = 2048  # of a block; tokamax 0.0.12 counts the columns that fill the last one up
_LOSS_ROWS = 1024


# --- the choice ---


def platform_in_scope() -> str:
    """Returns the platform of the mesh in scope, else the default one."""
    mesh = resolve_mesh()
    device = None if mesh is None else abstract_mesh(mesh).abstract_device

    config: Any = jax.config
    default = config.jax_default_device  # a device, or the name of a platform
    platform = getattr(device, "platform", None) or getattr(default, "platform", default)
    platform = platform or jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm", "gpu") else str(platform)


def against_tokamax(platform: str, compiles: Sequence[str] = ()) -> str:
    """Says why tokamax cannot run on a platform, or nothing.

    Args:
        platform: The platform of the program.
        compiles: Those for which it makes programs without such a device.
    """
    if importlib.util.find_spec("tokamax") is None:
        return f"it is not installed: {INSTALL_TOKAMAX}"
    present = jax.default_backend()
    if platform not in (present, *compiles):
        return f"it chooses by the device of this machine, {present}, not for an absent {platform}"
    return ""


def _compiles(kind: str) -> tuple[str, ...]:
    """Platforms for which tokamax makes programs without such a device."""
    # Later versions ask an absent GPU for the generation of its TPU.
    with contextlib.suppress(metadata.PackageNotFoundError):
        return ("gpu",) if kind == "experts" and metadata.version("tokamax") == "0.0.12" else ()
    return ()


_choices: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def recorded_choices() -> Generator[list[str]]:
    """Collects the kernels chosen by calls inside, with reasons against others."""
    choices: list[str] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def record_choice(call: str, kernel: str, reasons: str = "", *, log: bool = True) -> None:
    """Notes the kernel of a call."""
    text = f"{kernel} ({reasons})" if reasons else kernel
    if log:
        LOG.info("%s: %s", call, text)
    if (choices := _choices.get()) is not None:
        choices.append(text)


def is_choosing(kind: str) -> bool:
    """Whether the scope asks for another kernel than XLA's."""
    settings = ScopeSettings.current()
    return settings.kernel(kind) not in (None, "xla") and not settings.reference


def takes_tokamax(kind: str, layer: str, x: Any, reason: str) -> tuple[bool, str]:
    """Returns whether tokamax runs a call, and if it was asked for by name, why not.

    Args:
        kind: The kind of kernel.
        layer: Name of the layer.
        x: Its input.
        reason: Why tokamax cannot compute what the layer does, or nothing.
    """
    asked, platform = ScopeSettings.current().kernel(kind), platform_in_scope()
    reason = reason or against_tokamax(platform, _compiles(kind))
    call = f"{layer} of {x.dtype}{list(x.shape)}, {kind}"
    if asked == "tokamax":
        if not reason:
            record_choice(call, "tokamax", log=False)
        return not reason, reason

    # XLA for GPUs multiplies each row by the kernels of all experts.
    if not reason and (kind != "experts" or platform != "gpu"):
        reason = UNTIMED
    if reason:
        record_choice(call, "xla", f"not tokamax: {reason}")
    else:
        record_choice(call, "tokamax")
    return not reason, ""


@contextlib.contextmanager
def tokamax_scope(kind: str) -> Generator[Any]:
    """The library, in the settings of its calls."""
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():  # else tokamax 0.0.12 parses the program's own options
        flags.FLAGS(sys.argv[:1])
    is_absent = platform_in_scope() == "gpu" and jax.default_backend() != "gpu"
    absent = tokamax.config.cross_compile(True) if is_absent else contextlib.nullcontext()
    # The planner reads the kind here. Tokamax joins arrays of different rank.
    with absent, jax.numpy_rank_promotion("allow"), jax.named_scope(f"tokamax[{kind}]"):
        yield tokamax


# --- the run over a mesh ---


class ArraySplit(NamedTuple):
    """The mesh in scope, and its axes along each dimension."""

    mesh: Any = None
    parts: tuple[MeshAxes, ...] = ()
    refusal: str = ""  # why a kernel cannot run over the mesh

    def spec(self) -> PartitionSpec:
        """The parts as a spec."""
        return PartitionSpec(*(axes or None for axes in self.parts))

    @property
    def unused(self) -> list[str]:
        """Axes along no dimension."""
        used = {axis for axes in self.parts for axis in axes}
        sizes = {} if self.mesh is None else self.mesh.shape
        return [axis for axis, size in sizes.items() if size > 1 and axis not in used]


def split_of(x: jax.Array, names: Sequence[Any], description: str) -> ArraySplit:
    """Returns the split of an array, by its type or by rules.

    Args:
        x: The array.
        names: Of its dimensions; the last ones, if it has fewer.
        description: What is split, for the refusal.
    """
    mesh = resolve_mesh()
    if mesh is None or mesh.size == 1:
        return ArraySplit()

    sizes = dict(mesh.shape)
    if any(sizes[axis] > 1 for axis in abstract_mesh(mesh).manual_axes):
        return ArraySplit(refusal="it does not run inside a jax.shard_map or a pipeline")

    entries = explicit_entries(x)
    if entries is None:
        entries = tuple(logical_to_mesh_axes(names) or ())
        entries = (*entries, *(None,) * (len(names) - len(entries)))[-x.ndim :]
        if not any(entries):
            return ArraySplit(
                refusal=f"no rules in scope say how the mesh {sizes} splits {description}"
            )

    parts = (tuple(a for a in mesh_axes_of(entry) if sizes.get(a, 1) > 1) for entry in entries)
    return ArraySplit(mesh, tuple(parts))


def rows_split(x: jax.Array, features: Any) -> ArraySplit:
    """Returns the split of rows, for a kernel of whole rows."""
    named = ("batch", "seq")[: x.ndim - 1]
    names = (*named, *(None,) * (x.ndim - 1 - len(named)), features)
    split = split_of(x, names, "rows")
    if split.mesh is None:
        return split

    if split.parts[-1]:
        return ArraySplit(refusal=f"its features are split over {', '.join(split.parts[-1])}")
    if len(named) < x.ndim - 1 and explicit_entries(x) is None and split.unused:
        # Heads may be split, for one; the region would gather them.
        axes = ", ".join(split.unused)
        return ArraySplit(refusal=f"no rules say which of {x.ndim} dimensions {axes} split")

    sizes = split.mesh.shape
    pairs = zip(split.parts, x.shape, strict=True)
    return split._replace(parts=tuple(dividing(axes, sizes, size) for axes, size in pairs))


def dividing(axes: MeshAxes, sizes: Mapping[str, int], size: int) -> MeshAxes:
    """Mesh axes, if they divide a dimension evenly; else none."""
    return axes if size % math.prod(sizes[axis] for axis in axes) == 0 else ()


def abstract_mesh(mesh: Any) -> AbstractMesh:
    """A mesh without its devices."""
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def placed(mesh: Any, x: Any, spec: PartitionSpec) -> Any:
    """Lays an array out over Explicit mesh axes; None stays."""
    return x if x is None else jax.sharding.reshard(x, NamedSharding(mesh, spec))


def run_region(
    mesh: Any, kernel: Callable[..., PyTree], arrays: Sequence[Any], specs: Any, out_specs: Any
) -> PyTree:
    """Runs a kernel on each device's part of the arrays."""
    if abstract_mesh(mesh).explicit_axes:
        arrays = [placed(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
    return jax.shard_map(
        kernel,
        mesh=mesh_of_region(mesh),
        in_specs=tuple(specs),
        out_specs=out_specs,
        check_vma=False,  # Pallas's kernels do not say along which axes their results vary
    )(*arrays)


# --- norms ---


def against_arrays(x: jax.Array, options: Sequence[str], split: ArraySplit) -> str:
    """Says why tokamax takes no such input, or nothing."""
    if options:
        return f"it takes no {', no '.join(options)}"
    if x.dtype not in _FLOATS:
        return "it takes float16, bfloat16 and float32"
    return split.refusal


def normalized(
    x: jax.Array,
    scale: Any,
    bias: Any,
    split: ArraySplit,
    *,
    epsilon: float,
    scale_offset: float,
    subtract_mean: bool,
) -> jax.Array:
    """Runs tokamax's norm of the last dimension, in the dtype of ``x``."""

    def kernel(x: jax.Array, scale: Any, bias: Any) -> jax.Array:
        with tokamax_scope("norms") as tokamax:
            return tokamax.layer_norm(
                x,
                scale,
                bias,
                epsilon=epsilon,
                scale_offset=scale_offset,
                subtract_mean=subtract_mean,
            )

    if split.mesh is None:
        return kernel(x, scale, bias)
    specs = split.spec(), PartitionSpec(), PartitionSpec()
    return run_region(split.mesh, kernel, (x, scale, bias), specs, specs[0])


# --- gated units ---

# Computed for each number alone, so that a block of the hidden layer is enough.
_ELEMENTWISE = ("silu", "swish", "gelu", "relu", "sigmoid", "tanh", "relu6", "squareplus", "mish")


def against_gated_unit(
    x: jax.Array, activation: object, options: Sequence[str], split: ArraySplit
) -> str:
    """Says why tokamax's gated unit is another calculation, or nothing."""
    if not options and activation not in _ELEMENTWISE:
        return f"it takes an activation by one of the names {', '.join(_ELEMENTWISE)}"
    return against_arrays(x, options, split)


def gated_unit(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    activation: Callable[[Any], Any],
    split: ArraySplit,
    names: Sequence[Any] | None,
) -> jax.Array:
    """Runs tokamax's ``activation(x @ gate) * (x @ up)``."""

    def kernel(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        with tokamax_scope("gated") as tokamax:
            rows = x if x.ndim > 1 else x[None]
            # It has kernels for GPUs alone, and logs each that it tries elsewhere as an error.
            implementation = None if platform_in_scope() == "gpu" else "xla"
            result = tokamax.gated_linear_unit(
                rows, (gate, up), activation=activation, implementation=implementation
            )
            return result if x.ndim > 1 else result[0]

    if split.mesh is None:
        return kernel(x, gate, up)

    # Columns of the kernels, so of the hidden layer, are split where rows are not.
    sizes = split.mesh.shape
    entries = explicit_entries(gate)
    if entries is None:
        entries = tuple(logical_to_mesh_axes(names) or (None, None))
    taken = {axis for axes in split.parts for axis in axes}
    hidden = tuple(a for a in mesh_axes_of(entries[-1]) if sizes.get(a, 1) > 1 and a not in taken)
    columns = dividing(hidden, sizes, gate.shape[-1]) or None

    rows, by_column = split.spec(), PartitionSpec(None, columns)
    out = PartitionSpec(*rows[:-1], columns)
    return run_region(split.mesh, kernel, (x, gate, up), (rows, by_column, by_column), out)


# --- experts ---


def against_experts(dispatch: str, axes: Sequence[str] | None) -> str:
    """Says why tokamax cannot run experts, or nothing.

    Args:
        dispatch: That of the layer.
        axes: Mesh axes over which a region splits tokens and experts; None without a region.
    """
    if dispatch == "dense" or (dispatch == "capacity" and axes is None):
        return f'dispatch="{dispatch}" has no products by group; dispatch="dropless" has'

    mesh = resolve_mesh()
    sizes = {} if mesh is None else mesh.shape
    left = [axis for axis, size in sizes.items() if size > 1 and axis not in (axes or ())]
    if left:
        return f"no rules say that {', '.join(left)} split its tokens, experts or hidden layer"
    return ""


def ragged_product(x: jax.Array, kernel: jax.Array, sizes: jax.Array, tokamax: bool) -> jax.Array:
    """Multiplies rows, sorted by group, by the kernels of their groups."""
    # What is past the last group is undefined on some platforms, also in gradients.
    is_valid = jnp.arange(len(x))[:, None] < sizes.sum()
    if not tokamax:
        return jnp.where(is_valid, jax.lax.ragged_dot(x, kernel, sizes), 0)
    product = _ragged_tokamax(jnp.where(is_valid, x, 0), kernel, sizes)
    return jnp.where(is_valid, product, 0)


@jax.custom_vjp
def _ragged_tokamax(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    return _ragged_forward(x, kernel, sizes)[0]


def _ragged_forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return tokamax.ragged_dot(x, kernel, group_sizes=sizes)

    with tokamax_scope("experts") as tokamax:
        return jax.vjp(multiply, x, kernel)


def _ragged_backward(pull: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    # Tokamax asks for the device here again, so the settings of the scope count here, too.
    with tokamax_scope("experts"):
        return (*pull(cotangent), None)


_ragged_tokamax.defvjp(_ragged_forward, _ragged_backward)


# --- the loss over a vocabulary ---


def against_loss(hidden: jax.Array, kernel: jax.Array, mask: Any) -> str:
    """Says why tokamax's loss is another calculation, or nothing."""
    if mask is not None and mask.dtype != bool:
        return "it takes a mask of booleans, and no weights"
    if hidden.dtype not in _FLOATS:
        return "it takes float16, bfloat16 and float32"
    vocab = kernel.shape[1]
    if platform_in_scope() == "tpu" and (vocab % _LOSS_COLUMNS or len(kernel) % 8):
        return (
            f"on TPUs it takes a vocabulary divisible by {_LOSS_COLUMNS} and features by 8, and "
            f"here are {vocab} and {len(kernel)}"
        )
    return ""


def loss_sum(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, counted: jax.Array, split: ArraySplit
) -> jax.Array:
    """Runs tokamax's loss, summed over the tokens that count."""
    is_tpu = platform_in_scope() == "tpu"

    def of_device(hidden: jax.Array, kernel: jax.Array, targets: Any, counted: Any) -> jax.Array:
        # Hidden states of zeros have the loss log(vocab) and give no gradient to the kernel.
        rows = jnp.where(counted[..., None], hidden, 0).astype(jnp.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        labels = jnp.where(counted, targets, 0).reshape(-1).astype(jnp.int32)
        missing = -len(rows) % _LOSS_ROWS if is_tpu else 0
        rows, labels = jnp.pad(rows, ((0, missing), (0, 0))), jnp.pad(labels, (0, missing))

        with tokamax_scope("loss") as tokamax:
            # By itself tokamax 0.0.12 takes the operations of XLA on TPUs too.
            total = tokamax.linear_softmax_cross_entropy_loss(
                rows,
                labels,
                kernel.astype(jnp.float32),
                implementation="mosaic_tpu" if is_tpu else "xla",
            )

        left_out = len(rows) - counted.sum(dtype=jnp.float32)
        return (total - left_out * math.log(kernel.shape[1]))[None]

    arrays = hidden, kernel, targets, counted
    if split.mesh is None:
        return of_device(*arrays)[0]

    tokens = split.spec()
    axes = tuple(axis for part in split.parts for axis in part)
    rows = PartitionSpec(*tokens, None)
    specs = rows, PartitionSpec(), tokens, tokens
    return jnp.sum(run_region(split.mesh, of_device, arrays, specs, PartitionSpec(axes or None)))
