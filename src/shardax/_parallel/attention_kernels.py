# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention: the choice by call, the run over meshes.

The kernels are those of ``jax.nn`` (XLA's own fusions, cuDNN), splash attention of
``jax.experimental.pallas.ops`` (TPU), and tokamax, which picks one of its own by the device.

Batches and heads are independent, so a Pallas kernel runs in a region, each device for its batches
and heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardax._parallel.kernels import (
    UNTIMED,
    ArraySplit,
    abstract_mesh,
    against_tokamax,
    dividing,
    placed,
    record_choice,
    run_region,
    split_of,
    tokamax_scope,
)
from shardax.extend import ScopeSettings

_LANES = 128  # a splash block's least size, of queries and of keys
_BLOCKS = (512, 256, _LANES)


class AttentionChoice(NamedTuple):
    """A kernel of attention, and the reasons against others.

    Attributes:
        implementation: ``"xla"``, ``"cudnn"``, ``"splash"`` or ``"tokamax"``.
        reasons: By the name of each kernel that cannot run or was not taken: why.

    Example:
        >>> AttentionChoice("xla", {"splash": "it runs on TPUs, and this is cpu"}).implementation
        'xla'
    """

    implementation: str
    reasons: Mapping[str, str]


class AttentionCall(NamedTuple):
    """Facts of a call by which kernels are chosen."""

    platform: str
    query: Sequence[int]  # shapes
    key: Sequence[int]
    value: Sequence[int]
    dtype: Any
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    options: tuple[str, ...] = ()  # such as "a mask", "a bias": what only some kernels take
    segments: str = ""  # "one" of queries and keys, or a "pair"
    region: ArraySplit = ArraySplit()  # of the query
    interpret: bool = False


def choose(layer: str, implementation: str | None, call: AttentionCall) -> AttentionChoice:
    """Returns the kernel of a call; reasons may be against the one asked for."""
    settings = ScopeSettings.current()
    asked = implementation or settings.attention
    if settings.reference or asked in (None, "xla"):
        return AttentionChoice("xla", {})

    where = f"{layer} of {call.dtype}{list(call.query)}"
    reasons = {kernel: reason(call) for kernel, reason in _REASONS.items()}
    reasons = {kernel: reason for kernel, reason in reasons.items() if reason}
    if asked != "auto":
        record_choice(where, asked, log=False)
        return AttentionChoice(asked, reasons)

    reasons.setdefault("tokamax", UNTIMED)
    chosen = next((kernel for kernel in ("splash", "cudnn") if kernel not in reasons), "xla")
    text = "; ".join(f"not {kernel}: {reason}" for kernel, reason in reasons.items())
    record_choice(where, chosen, text)
    return AttentionChoice(chosen, reasons)


def _against_splash(call: AttentionCall) -> str:
    """Says why splash attention cannot run a call, or nothing."""
    if call.platform != "tpu" and not call.interpret:
        return (
            f"it runs on TPUs, and this is {call.platform}; to check its numbers here, slowly: "
            'sx.kernels(attention="splash", interpret=True)'
        )
    if call.options:
        return f"it takes no {', no '.join(call.options)}"
    if call.dtype not in (jnp.float32, jnp.bfloat16):
        return "it takes float32 and bfloat16"
    if len(call.query) not in (3, 4) or call.key[-1] % _LANES or call.value != call.key:
        return (
            "it takes (batch, time, heads, head_dim) with a head_dim divisible by "
            f"{_LANES}, and here it is {call.key[-1]}"
        )

    time, other_time = call.query[-3], call.key[-3]
    if time % _LANES or other_time % _LANES:
        return f"it takes lengths divisible by {_LANES}, and here are {time} and {other_time}"
    if (call.causal or call.window is not None) and time != other_time:
        return "its causal masks and windows are of as many keys as queries"
    if call.segments == "pair":
        return "it takes segments of one sequence, as a query of no keys has another result"
    return call.region.refusal


def _against_cudnn(call: AttentionCall) -> str:
    """Says why cuDNN's attention is not taken, or nothing."""
    if call.platform != "gpu":
        return f"it runs on NVIDIA GPUs, and this is {call.platform}"
    if jax.default_backend() != "gpu":
        return "JAX asks the GPU of this machine for cuDNN's version, and there is none"

    capability = getattr(jax.local_devices()[0], "compute_capability", "0")
    if float(capability) < 8:
        return f"it needs compute capability 8.0, and this GPU has {capability}"

    if call.options or call.softcap is not None or call.segments:
        has = [*call.options, *(["soft cap"] if call.softcap is not None else [])]
        has += ["segments"] if call.segments else []
        return f"it takes no {', no '.join(has)}, or is not faster with it"
    if call.dtype not in (jnp.float16, jnp.bfloat16):
        return "it takes float16 and bfloat16"

    if call.value != call.key or call.key[-1] % 8 or call.key[-1] > 128:
        return f"it takes a head_dim up to 128, divisible by 8, and here it is {call.key[-1]}"
    if len(call.query) > 4 or call.query[-3] % 64 or call.key[-3] % 64:
        return f"lengths are {call.query[-3]} and {call.key[-3]}, not divisible by 64"
    if call.window is not None and not call.causal:
        return "it has no window to both sides"
    return ""


def _against_tokamax(call: AttentionCall) -> str:
    """Says why tokamax cannot run a call, or nothing."""
    options = [option for option in call.options if option not in ("mask", "bias")]
    if options:
        return f"it takes no {', no '.join(options)}"
    if len(call.query) not in (3, 4) or call.value != call.key:
        return "it takes (batch, time, heads, head_dim), of keys and values alike"
    return against_tokamax(call.platform) or call.region.refusal


_REASONS: dict[str, Callable[[AttentionCall], str]] = {
    "splash": _against_splash,
    "cudnn": _against_cudnn,
    "tokamax": _against_tokamax,
}
assert {*_REASONS, "auto", "xla"} == set(ScopeSettings.choices("attention"))


def region_of(query: jax.Array, names: tuple[str | None, str | None]) -> ArraySplit:
    """Returns the split of a query by batches and heads, whose names are given."""
    batch, heads = names
    split = split_of(query, (batch, "seq", heads, None), "batches and heads")
    if split.mesh is None:
        return split

    *batch_parts, time_parts, head_parts, _ = split.parts
    if time_parts:
        return ArraySplit(refusal=f"the sequence is split over {', '.join(time_parts)}")

    sizes = split.mesh.shape
    by_batch = dividing(batch_parts[0] if batch_parts else (), sizes, query.shape[0])
    by_head = dividing(head_parts, sizes, query.shape[-2])
    return split._replace(parts=(by_batch, (), by_head, ()))


class Operands(NamedTuple):
    """Arrays of a kernel, (batch, time, heads, head_dim)."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    segments: Any = None


def over_region(
    region: ArraySplit, kernel: Callable[[Operands], jax.Array], arrays: Operands
) -> jax.Array:
    """Runs a kernel on each device's batches and heads."""
    if region.mesh is None:
        return kernel(arrays)

    by_head = region.spec()
    batch, _, heads, _ = (axes or None for axes in region.parts)
    if arrays.key.shape[-2] % math.prod(region.mesh.shape[axis] for axis in heads or ()):
        # Fewer heads of keys than devices: those of each group are repeated.
        repeats = arrays.query.shape[-2] // arrays.key.shape[-2]
        key, value = arrays.key, arrays.value
        if abstract_mesh(region.mesh).explicit_axes:  # JAX repeats no dimension that is split
            key, value = (placed(region.mesh, x, PartitionSpec(batch)) for x in (key, value))
        key, value = (jnp.repeat(x, repeats, axis=-2) for x in (key, value))
        arrays = arrays._replace(key=key, value=value)

    def of_scores(x: Any) -> Any:
        """Returns the spec of an array (batch, heads, time, other time), which may be of one."""
        if x is None:
            return None
        rows = batch if x.shape[0] > 1 else None
        return PartitionSpec(rows, heads if x.shape[1] > 1 else None, None, None)

    specs = Operands(
        by_head,
        by_head,
        by_head,
        of_scores(arrays.bias),
        of_scores(arrays.mask),
        None if arrays.segments is None else PartitionSpec(batch, None),
    )
    return run_region(region.mesh, lambda *parts: kernel(Operands(*parts)), arrays, specs, by_head)


def run_kernel(
    choice: str, call: AttentionCall, arrays: Operands, *, scale: float | None
) -> jax.Array:
    """Runs splash attention or tokamax."""
    rank = arrays.query.ndim
    if rank == 3:
        arrays = Operands(*(None if x is None else x[None] for x in arrays))
    scale = 1 / math.sqrt(call.query[-1]) if scale is None else scale
    kernel = _splash if choice == "splash" else _tokamax
    result = over_region(call.region, functools.partial(kernel, call, scale), arrays)
    return result[0] if rank == 3 else result


def _block(length: int) -> int:
    return next(size for size in _BLOCKS if length % size == 0)


def _splash(call: AttentionCall, scale: float, arrays: Operands) -> jax.Array:
    """Runs splash attention on arrays of one device."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays[:3])
    heads, time, other_time = query.shape[1], query.shape[2], key.shape[2]

    shape = (time, other_time)
    name = "full"
    mask: Any = splash.FullMask(shape)
    if call.window is not None:
        later = 0 if call.causal else call.window - 1
        mask = splash.LocalMask(shape, (call.window - 1, later), 0)
        name = f"causal,window={call.window}" if call.causal else f"window={call.window}"
    elif call.causal:
        mask, name = splash.CausalMask(shape), "causal"

    rows, columns = _block(time), _block(other_time)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.softcap,
        interpret=call.interpret,
    )

    segments = None
    if arrays.segments is not None:
        segments = splash.SegmentIds(arrays.segments, arrays.segments)
    scaled = (query * np.asarray(scale, query.dtype)).astype(query.dtype)

    # The planner reads the mask here, which the compiled text does not hold.
    with jax.named_scope(f"splash[{name}]"):
        result: Any = jax.vmap(kernel)(scaled, key, value, segments)
    return jnp.swapaxes(result, 1, 2)


def _tokamax(call: AttentionCall, scale: float, arrays: Operands) -> jax.Array:
    """Runs the kernel of tokamax on arrays of one device."""
    near = None
    if call.window is not None:
        near = (call.window - 1, 0 if call.causal else call.window - 1)

    with tokamax_scope("attention") as tokamax:
        return tokamax.dot_product_attention(
            arrays.query,
            arrays.key,
            arrays.value,
            arrays.bias,
            mask=arrays.mask,
            scale=scale,
            is_causal=call.causal,
            logits_soft_cap=call.softcap,
            local_window_size=near,
        )
