# SPDX-License-Identifier: Apache-2.0
"""Losses of language models, of logits and block by block.

A loss over a large vocabulary is mostly the memory of its logits: (batch, time, vocab) in float32,
several times. ``blockwise_cross_entropy`` computes them for some tokens at a time, and once more in
the backward pass, which keeps one float per token.

A dimension of S tokens that is split D ways is seen as (D, S / D), and a block is a part of the
second dimension, so that no token leaves its device. The last block of a dimension that is no
multiple begins earlier and overlaps with the one before: what it writes again is the same, and its
part in the gradient of the kernel is counted once. Each device sums that gradient over all blocks
before the devices sum theirs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardax._parallel.kernels import ArraySplit, against_loss, is_choosing, loss_sum
from shardax.extend import (
    INLINE,
    AnyMesh,
    align,
    explicit_entries,
    mesh_axes_of,
    varying_axes,
    with_layout,
)
from shardax.nn.arithmetic import as_array, uses_tokamax
from shardax.nn.errors import LayerInputError
from shardax.nn.masks import as_weights
from shardax.nn.parameters import IGNORE_INDEX, as_size
from shardax.partition import current_rules, resolve_mesh


def cross_entropy(
    logits: jax.Array, targets: jax.Array, mask: Any = None, ignore_index: int | None = IGNORE_INDEX
) -> jax.Array:
    """Mean negative log-likelihood of the targets, in nats.

    The log-softmax is in float32.

    Args:
        logits: Shape (..., vocab), floating.
        targets: Integers of shape (...), from 0. One that is no entry of the vocabulary, also a
            negative one, makes the loss NaN, unless it is masked or ignored.
        mask: Booleans or weights of shape (...), which are not negative: the mean is over the
            targets where it is not zero, weighted by it. None: over all.
        ignore_index: The target that is left out as if it were masked; None for none.

    Returns:
        A float32 scalar; 0 if everything is masked or ignored.

    Raises:
        LayerInputError: If the shapes do not fit, or a weight is negative; in a compiled program
            the loss is NaN then.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
        >>> print(f"{cross_entropy(logits, jnp.array([0, 0])):.4f} = (log 2 + log 4) / 2")
        1.0397 = (log 2 + log 4) / 2
    """
    name = "cross_entropy"
    targets, mask = _targets_of_tokens(name, "logits", logits, targets, mask, ignore_index)
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # Over Explicit axes the logits, which are large, stay where they are.
    chosen = _pick(log_probabilities, targets)
    return -jnp.mean(chosen) if mask is None else -_mean(chosen[..., 0], mask)


def blockwise_cross_entropy(
    hidden: object,
    kernel: object,
    targets: object,
    mask: object = None,
    block_size: int = 512,
    ignore_index: int | None = IGNORE_INDEX,
) -> jax.Array:
    """Cross-entropy of ``hidden @ kernel``, without holding all logits.

    The same loss and gradients as ``cross_entropy(hidden @ kernel, targets, mask)``, computed block
    by block over tokens, and again in the backward pass. The memory for logits is that of a block.

    Products are in the dtype of ``hidden``, their sums and the log-softmax in float32. Tokens stay
    on their devices and the vocabulary stays split: over Explicit mesh axes as the types say, over
    Auto axes as rules in scope say of ``batch``, ``seq`` and ``vocab`` where ``hidden`` has three
    dimensions; else as the compiler finds.

    Args:
        hidden: Shape (..., embed), floating: what the head of a model is applied to.
        kernel: Shape (embed, vocab); of a tied head, the transposed embedding.
        targets: Integers of shape (...), as for ``cross_entropy``.
        mask: Booleans or weights of shape (...), as for ``cross_entropy``.
        block_size: At most how many tokens of a device are in work at a time; of all devices
            where nothing says how tokens are split.
        ignore_index: As for ``cross_entropy``.

    Returns:
        A float32 scalar; 0 if everything is masked or ignored.

    Raises:
        LayerInputError: If the shapes do not fit.
        LayerConfigError: If ``block_size`` is not positive.

    Example:
        >>> hidden, kernel = jnp.ones((2, 5, 4)), jnp.ones((4, 100))
        >>> targets = jnp.zeros((2, 5), int)
        >>> print(f"{blockwise_cross_entropy(hidden, kernel, targets, block_size=4):.4f} = log 100")
        4.6052 = log 100
    """
    name = "blockwise_cross_entropy"
    block_size = as_size(name, "block_size", block_size)
    hidden, kernel = as_array(hidden), as_array(kernel)
    if not hidden.ndim or kernel.ndim != 2 or hidden.shape[-1] != kernel.shape[0]:
        raise LayerInputError(
            f"{name} was given hidden of shape {hidden.shape} and a kernel of shape "
            f"{kernel.shape}, which must be (..., embed) and (embed, vocab)."
        )
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise LayerInputError(f"{name} takes floating hidden states, not {hidden.dtype}.")

    if is_choosing("loss"):
        loss = _by_kernel(name, hidden, kernel, targets, mask, ignore_index)
        if loss is not None:
            return loss

    targets, mask = _targets_of_tokens(name, "hidden", hidden, targets, mask, ignore_index)
    blocks = _blocks_of(hidden, kernel, block_size)
    return _mean(_token_losses(blocks, hidden, kernel, targets), mask)


def _by_kernel(
    name: str, hidden: jax.Array, kernel: jax.Array, targets: Any, mask: Any, ignore_index: Any
) -> jax.Array | None:
    """Returns the loss by another library's kernel, if one is taken."""
    mask = None if mask is None else as_array(mask)
    targets, weights = _targets_of_tokens(name, "hidden", hidden, targets, mask, ignore_index)
    mesh, entries, vocab = _layout_of(hidden, kernel)
    parts = tuple(tuple(mesh_axes_of(entry)) for entry in entries)
    split = ArraySplit(mesh, parts)

    around = resolve_mesh()
    refusal = ""
    if vocab is not None:
        refusal = f"the vocabulary is split over {', '.join(mesh_axes_of(vocab))}"
    elif around is not None and around.size > 1 and not any(parts):
        refusal = f"no rules in scope say how the mesh {dict(around.shape)} splits tokens"
    elif around is not None and AxisType.Manual in around.axis_types:
        refusal = "it does not run inside a jax.shard_map or a pipeline"

    if not uses_tokamax(
        "loss", name, hidden, lambda: against_loss(hidden, kernel, mask) or refusal
    ):
        return None

    if weights is None:
        weights = jnp.ones_like(targets, jnp.float32)
    counted = weights != 0
    total = loss_sum(hidden, kernel, targets, counted, split)

    # A target outside of the vocabulary makes the loss NaN, as without the kernel.
    is_missing = counted & ((targets < 0) | (targets >= kernel.shape[1]))
    count = jnp.sum(counted, dtype=jnp.float32)
    mean = jnp.where(count > 0, total / jnp.maximum(count, 1), 0)
    return jnp.where(is_missing.any(), jnp.nan, mean)


def _targets_of_tokens(
    name: str, description: str, array, targets, mask, ignore_index: int | None
) -> tuple[Any, Any]:
    """Returns targets and their weights laid out as the tokens, or raises."""
    shape = array.shape[:-1]
    for argument, values in (("targets", targets), ("mask", mask)):
        if values is not None and jnp.shape(values) != shape:
            raise LayerInputError(
                f"{name} was given {description} of shape {array.shape} and {argument} of shape "
                f"{jnp.shape(values)}, which must be {shape}."
            )

    targets = as_array(targets)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise LayerInputError(f"{name} takes targets that are integers, not {targets.dtype}.")
    if targets.dtype.itemsize < 4:
        targets = targets.astype(jnp.int32)
    weights = None if mask is None else as_weights(name, mask)

    # Over Explicit axes two operands must be laid out alike.
    if explicit_entries(array) is not None:
        leading = range(array.ndim - 1)
        targets = align(targets, array, leading)
        weights = None if weights is None else align(weights, array, leading)

    if ignore_index is None or not _holds(targets.dtype, ignore_index):
        return targets, weights
    counted = (targets != ignore_index).astype(jnp.float32)
    return targets, counted if weights is None else weights * counted


def _holds(dtype: jax.typing.DTypeLike, number: int) -> bool:
    """Whether an integer dtype has a number."""
    limits = jnp.iinfo(dtype)
    return limits.min <= number <= limits.max


def _mean(losses: jax.Array, weights) -> jax.Array:
    if weights is None:
        return jnp.mean(losses)
    # What is masked counts for nothing, even if its target is none.
    losses = jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1)


def _pick(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the entries at the targets, NaN if out of range."""
    if explicit_entries(scores) is None:
        size = scores.shape[-1]
        places = jnp.where(targets < 0, jnp.asarray(size, targets.dtype), targets)
        return jnp.take_along_axis(scores, places[..., None], axis=-1)
    # JAX cannot look up along a dimension that Explicit mesh axes may split.
    return _pick_by_sum(scores, targets)[..., None]


def _pick_by_sum(scores: jax.Array, targets: jax.Array) -> jax.Array:
    # A sum in which all terms but one are zero is exact, and each device sums what it has.
    hits, is_there = _hits(scores, targets)
    return jnp.where(is_there, jnp.sum(jnp.where(hits, scores, 0), axis=-1), jnp.nan)


def _hits(scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the places of the targets, and whether there is one."""
    size = scores.shape[-1]
    shape = (*(1,) * targets.ndim, size)
    vocab = jax.lax.broadcasted_iota(targets.dtype, shape, targets.ndim)
    return vocab == targets[..., None], (targets >= 0) & (targets < size)


class _Blocks(NamedTuple):
    """Blocks of tokens, along each of their dimensions."""

    groups: tuple[int, ...]  # parts that may be on different devices
    sizes: tuple[int, ...]  # of a part
    cuts: tuple[int, ...]  # how many entries of a part are in a block
    counts: tuple[int, ...]  # blocks along it
    mesh: Any = None  # None if nothing says how arrays are split
    entries: tuple[Any, ...] = ()  # mesh axes of the groups
    vocab: Any = None

    def view(self, array: jax.Array) -> jax.Array:
        """Splits each dimension of tokens into groups and their parts."""
        dims = [size for pair in zip(self.groups, self.sizes, strict=True) for size in pair]
        trailing = array.shape[len(self.groups) :]
        return self.lay_out(
            array.reshape(*dims, *trailing), *self.token_entries, *(None for _ in trailing)
        )

    @property
    def token_entries(self) -> tuple[Any, ...]:
        return tuple(axis_entry for entry in self.entries for axis_entry in (entry, None))

    def lay_out(self, array: jax.Array, *entries: Any) -> jax.Array:
        """Constrains an array, if the layout is known."""
        if self.mesh is None:
            return array
        inside = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if inside.empty else inside
        place = NamedSharding(mesh, PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(array, place)

    def starts(self, index) -> tuple[list[Any], list[Any]]:
        """Returns the start of a block, and of its new part."""
        starts, news = [], []
        for axis, (size, cut, count) in enumerate(
            zip(self.sizes, self.cuts, self.counts, strict=True)
        ):
            step = (index // math.prod(self.counts[axis + 1 :])) % count
            news.append(step * cut)
            starts += [np.int32(0), jnp.minimum(step * cut, size - cut)]
        return starts, news

    def take(self, array: jax.Array, index) -> jax.Array:
        """Returns block ``index`` of a view."""
        starts, _ = self.starts(index)
        trailing = array.shape[len(starts) :]
        starts += [np.int32(0)] * len(trailing)
        sizes = [size for pair in zip(self.groups, self.cuts, strict=True) for size in pair]
        return jax.lax.dynamic_slice(array, starts, (*sizes, *trailing))

    def put(self, array: jax.Array, block: jax.Array, index) -> jax.Array:
        """Writes block ``index`` of a view."""
        starts, _ = self.starts(index)
        trailing = [np.int32(0)] * (array.ndim - len(starts))
        return jax.lax.dynamic_update_slice(array, block.astype(array.dtype), [*starts, *trailing])

    def is_new(self, index: object):
        """Returns a mask of the tokens in no block before."""
        is_unseen = jnp.ones((1,) * (2 * len(self.cuts)), bool)
        starts, news = self.starts(index)
        for axis, (cut, new) in enumerate(zip(self.cuts, news, strict=True)):
            shape = [1] * is_unseen.ndim
            shape[2 * axis + 1] = cut
            place = jax.lax.broadcasted_iota(jnp.int32, shape, 2 * axis + 1)
            is_unseen = is_unseen & (place + starts[2 * axis + 1] >= new)
        return is_unseen

    def loop(self, body, carry, *operands: jax.Array):
        """Runs ``body(carry, index)`` over all blocks of operands."""
        # Inside of shard_map what differs between devices does so from the first block on.
        varying = frozenset[str]().union(*map(varying_axes, operands))
        missing = [tuple(varying - varying_axes(leaf)) for leaf in carry]
        carry = tuple(
            jax.lax.pcast(leaf, axes, to="varying") if axes else leaf
            for leaf, axes in zip(carry, missing, strict=True)
        )
        indices = jnp.arange(math.prod(self.counts), dtype=jnp.int32)
        return jax.lax.scan(lambda carry, index: (body(carry, index), None), carry, indices)[0]


def _blocks_of(hidden: jax.Array, kernel: jax.Array, block_size: int) -> _Blocks:
    """Cuts the last dimension of tokens first, then others."""
    shape = hidden.shape[:-1]
    mesh, entries, vocab = _layout_of(hidden, kernel)
    if mesh is None:
        # A split that JAX does not tell of is mostly over the rows, which are cut last.
        parts = [math.gcd(size, jax.device_count()) or 1 for size in shape[:1]]
        groups = [*parts, *(1 for _ in shape[1:])]
    else:
        groups = [_parts(entry, mesh) for entry in entries]

    sizes = [size // count for size, count in zip(shape, groups, strict=True)]
    budget = block_size if mesh is not None else max(block_size // math.prod(groups), 1)

    # The last dimension is cut to what the budget leaves beside whole ones before it.
    cuts: list[int] = []
    for axis in reversed(range(len(sizes))):
        most = min(max(budget // max(math.prod(sizes[:axis]), 1), 1), sizes[axis])
        count = max(-(-sizes[axis] // max(most, 1)), 1)
        cuts.insert(0, -(-sizes[axis] // count))  # evenly

    counts = [-(-size // cut) if cut else 1 for size, cut in zip(sizes, cuts, strict=True)]
    return _Blocks(
        tuple(groups), tuple(sizes), tuple(cuts), tuple(counts), mesh, tuple(entries), vocab
    )


def _layout_of(hidden: jax.Array, kernel: jax.Array) -> tuple[Any, list[Any], Any]:
    """Returns mesh, mesh axes of each dimension of tokens, and of vocab."""
    typed = [explicit_entries(array) for array in (hidden, kernel)]
    rules, names = current_rules(), ("batch", "seq")
    is_ruled = "batch" in rules.names and hidden.ndim == 3

    # Types of arrays say more than rules do, and come first.
    mesh: Any = None
    for array, entries in zip((hidden, kernel), typed, strict=True):
        mesh = jax.typeof(array).sharding.mesh if entries is not None and mesh is None else mesh
    mesh = resolve_mesh() if mesh is None and is_ruled else mesh

    if mesh is None:
        return None, [], None
    rule_entries = list(rules.spec((*names, "vocab")) if is_ruled else (None,) * hidden.ndim)
    rule_entries += [None] * (hidden.ndim - len(rule_entries))
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    # An axis splits one dimension, and only one that it divides.
    used_axes: set[str] = set()
    layout: list[Any] = []
    present = (*(typed[0] or (None,) * hidden.ndim)[:-1], (typed[1] or (None, None))[1])
    for entry, rule, size in zip(
        present, rule_entries, (*hidden.shape[:-1], kernel.shape[1]), strict=True
    ):
        more = [axis for axis in mesh_axes_of(rule) if kinds.get(axis) == AxisType.Auto]
        axes = tuple(axis for axis in mesh_axes_of(entry) or more if axis not in used_axes)
        axes = axes if size % _parts(axes, mesh) == 0 else ()
        used_axes.update(axes)
        layout.append(axes or None)
    return mesh, layout[:-1], layout[-1]


def _parts(entry: Any, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in mesh_axes_of(entry))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(
    blocks: _Blocks, hidden: jax.Array, kernel: jax.Array, targets: jax.Array
) -> jax.Array:
    """Returns the negative log-likelihood of each target."""
    return _forward(blocks, hidden, kernel, targets)[0]


def _token_losses_forward(
    blocks: _Blocks, hidden: jax.Array, kernel: jax.Array, targets: jax.Array
) -> tuple[jax.Array, Any]:
    losses, normalisers = _forward(blocks, hidden, kernel, targets)
    return losses, (hidden, kernel, targets, normalisers)


def _token_losses_backward(blocks: _Blocks, saved, cotangents: jax.Array):
    return (*_backward(blocks, *saved, cotangents), None)


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def _laid_out(function, like: Sequence[tuple[jax.Array, int]], *arrays: jax.Array):
    """Runs a function with Explicit axes as Auto."""
    # Results are laid out as the first dimensions of given arrays.
    if all(explicit_entries(array) is None for array in arrays):
        return function(*arrays)
    mesh = next(
        jax.typeof(array).sharding.mesh for array in arrays if explicit_entries(array) is not None
    )
    specs = [(explicit_entries(array) or (None,) * array.ndim)[:ndim] for array, ndim in like]
    places = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    return with_layout(function, places, *arrays)


# Compiled by themselves, so that outside of a compiled function too each is traced once.
@functools.partial(jax.jit, static_argnums=0, inline=INLINE)
def _forward(blocks: _Blocks, hidden: jax.Array, kernel: jax.Array, targets: jax.Array):
    def run(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> Any:
        x, weights = _operands(blocks, hidden, kernel)
        target_blocks = blocks.view(targets)

        def block(carry, index: object):
            logits = _logits(blocks.take(x, index), weights)
            normaliser = jax.nn.logsumexp(logits, axis=-1)
            loss = normaliser - _pick_by_sum(logits, blocks.take(target_blocks, index))
            return tuple(
                blocks.put(whole, part, index)
                for whole, part in zip(carry, (loss, normaliser), strict=True)
            )

        empty = blocks.lay_out(jnp.zeros(target_blocks.shape, jnp.float32), *blocks.token_entries)
        sums = blocks.loop(block, (empty, empty), x, weights, target_blocks)
        return tuple(block_sums.reshape(targets.shape) for block_sums in sums)

    tokens = (hidden, hidden.ndim - 1)
    return _laid_out(run, (tokens, tokens), hidden, kernel, targets)


@functools.partial(jax.jit, static_argnums=0, inline=INLINE)
def _backward(blocks: _Blocks, *arrays: jax.Array):
    """Returns the cotangents of hidden states and kernel."""

    def run(
        hidden: jax.Array,
        kernel: jax.Array,
        targets: jax.Array,
        normalisers: jax.Array,
        cotangents: jax.Array,
    ) -> Any:
        x, weights = _operands(blocks, hidden, kernel)
        # Scaled to one, as cotangents of a mean are too small for some dtypes of the products.
        scale = jnp.max(jnp.abs(cotangents), initial=0)
        scale = jnp.where(scale > 0, scale, 1)
        target_blocks, offsets, factors = map(
            blocks.view, (targets, normalisers, cotangents / scale)
        )
        axes = tuple(range(x.ndim - 1))
        # Each device has a sum of its own where it is known what they have.
        split_axes = axes[::2] if blocks.mesh is not None else ()
        summed = tuple(axis for axis in axes if axis not in split_axes)

        def block(carry, index):
            rows = blocks.take(x, index)
            logits = _logits(rows, weights)
            hits, is_there = _hits(logits, blocks.take(target_blocks, index))
            probabilities = jnp.exp(logits - blocks.take(offsets, index)[..., None])
            change = probabilities - hits.astype(jnp.float32)
            factor = jnp.where(is_there, blocks.take(factors, index), 0)[..., None]
            change = jnp.where(factor == 0, 0, change * factor)
            for_rows = _dot(change.astype(rows.dtype), weights, ((x.ndim - 1,), (1,)), ((), ()))
            change = jnp.where(blocks.is_new(index)[..., None], change, 0).astype(rows.dtype)
            for_kernel = _dot(rows, change, (summed, summed), (split_axes, split_axes))
            return blocks.put(carry[0], for_rows * scale, index), carry[1] + for_kernel

        shape = (*(x.shape[axis] for axis in split_axes), *kernel.shape)
        sums = blocks.lay_out(jnp.zeros(shape, jnp.float32), *blocks.entries, None, blocks.vocab)
        rows = blocks.view(jnp.zeros_like(hidden))
        rows, sums = blocks.loop(block, (rows, sums), x, weights, target_blocks, factors)
        sums = jnp.sum(sums, axis=tuple(range(len(split_axes)))) * scale
        return rows.reshape(hidden.shape), sums.astype(kernel.dtype)

    hidden, kernel = arrays[:2]
    return _laid_out(run, ((hidden, hidden.ndim), (kernel, 2)), *arrays)


def _operands(blocks: _Blocks, hidden: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns view of hidden states, and kernel, in one dtype."""
    dtype = hidden.dtype if hidden.dtype.itemsize <= 4 else jnp.dtype(jnp.float32)
    weights = blocks.lay_out(kernel.astype(dtype), None, blocks.vocab)
    return blocks.view(hidden.astype(dtype)), weights


def _logits(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    return _dot(rows, kernel, ((rows.ndim - 1,), (0,)), ((), ()))


def _dot(first: jax.Array, second: jax.Array, contracted, batch) -> jax.Array:
    return jax.lax.dot_general(
        first, second, (contracted, batch), preferred_element_type=jnp.float32
    )


def next_token_loss(model: Any, batch: Any, ignore_index: int | None = IGNORE_INDEX) -> jax.Array:
    """The training loss of a language model on one batch.

    Args:
        model: Called on the inputs; returns logits of shape (batch, time, vocab).
        batch: A mapping with ``inputs`` and ``targets``, integers of shape (batch, time), the
            targets being the inputs one position on; and optionally ``mask`` of that shape, as for
            ``cross_entropy``: which targets count, of which the model is told nothing.
            ``input_mask``, booleans of that shape, is the mask of the model: which inputs are
            real. ``segment_ids`` and ``positions``, which packed rows have, are given to it by
            these names.
        ignore_index: As for ``cross_entropy``.

    Returns:
        The mean loss in nats per token, a float32 scalar.

    Raises:
        LayerInputError: If the batch has no ``inputs`` or ``targets``; or it has ``input_mask``,
            ``segment_ids`` or ``positions``, but the model takes none.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.Sequential(
        ...     sx.nn.Embed(256, 8, rngs=sx.Rngs(0)), sx.nn.Linear(8, 256, rngs=sx.Rngs(1)))
        >>> tokens = jnp.arange(20).reshape(2, 10)
        >>> batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        >>> bool(next_token_loss(model, batch) > 0)
        True
    """
    _check_names(batch)
    options = {_OPTIONS[name]: batch[name] for name in _OPTIONS if name in batch}
    if options and not _takes(model, options):
        names = [name for name in _OPTIONS if name in batch]
        raise LayerInputError(
            f"The batch has {' and '.join(names)}, but calling a {type(model).__name__} takes no "
            f"{' and '.join(options)}, so it would read across documents or padding. Give its "
            f"__call__ these keyword arguments, or write a loss."
        )
    logits = model(batch["inputs"], **options)
    return cross_entropy(logits, batch["targets"], batch.get("mask"), ignore_index)


# What of a batch is given to the model, by the name of its argument.
_OPTIONS = {"input_mask": "mask", "segment_ids": "segment_ids", "positions": "positions"}


def _check_names(batch: object) -> None:
    """Raises for a batch without inputs or targets."""
    if not isinstance(batch, Mapping):
        raise LayerInputError(
            f"next_token_loss takes a mapping with inputs and targets, but was given a "
            f"{type(batch).__name__}. Of tokens: "
            f'next_token_loss(model, {{"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}}).'
        )
    if "inputs" in batch and "targets" in batch:
        return

    # Labels of transformers are the tokens themselves, -100 where none counts: its models shift.
    tokens = 'batch["input_ids"]' if "input_ids" in batch else "tokens"
    labels = 'batch["labels"]' if "labels" in batch else tokens
    entries = [f'"inputs": {tokens}[:, :-1]', f'"targets": {labels}[:, 1:]']
    if "attention_mask" in batch:
        entries.append('"input_mask": batch["attention_mask"][:, :-1]')
        if "labels" not in batch:
            entries.append('"mask": batch["attention_mask"][:, 1:]')

    names = ", ".join(map(repr, batch)) or "nothing"
    raise LayerInputError(
        f"next_token_loss reads inputs and targets of a batch, but this one has {names}. Targets "
        f"are the inputs one position on: batch = {{{', '.join(entries)}}}"
    )


def _takes(model, names) -> bool:
    """Whether a call takes these keywords."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return True
    return set(names) <= {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
