# SPDX-License-Identifier: Apache-2.0
"""Arrays over processes: their whole values, and whether copies of a shard are equal."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import numpy as np

from shardax._core._jax import is_prng_key
from shardax._core.checks import raise_if_any
from shardax._core.graph.paths import Leaf, PyTree, format_path
from shardax._core.object import Object
from shardax._core.state.split_merge import iter_variables
from shardax._core.variable import Variable
from shardax.distributed import errors
from shardax.distributed.processes import MOST_SHOWN, compare, digest_of, rows_of_all


def gather(x: PyTree) -> PyTree:
    """Returns whole values in every process; every process must call it.

    Args:
        x: A tree of arrays, Variables and Modules, whose parts may be on devices of other
            processes.

    Returns:
        The same tree of NumPy arrays (random keys stay JAX arrays), the same in each process. A
        Module gives a dict of its Variables by path.

    Example:
        >>> import jax.numpy as jnp
        >>> gather({"weights": jnp.arange(3)})
        {'weights': array([0, 1, 2], dtype=int32)}
    """
    return jax.tree.map(_gathered, x, is_leaf=lambda leaf: isinstance(leaf, Object))


def _gathered(leaf: Leaf) -> PyTree:
    if isinstance(leaf, Variable):
        return gather(leaf.value)
    if isinstance(leaf, Object):
        return {format_path(path): gather(variable) for path, variable in iter_variables(leaf)}
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)

    if is_prng_key(leaf):
        words = _gathered(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)

    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(leaf, tiled=True)


# --- copies of shards -----------------------------------------------------------------------------

# Start and end of a shard in each dimension.
ShardKey = tuple[tuple[int, int], ...]


def compare_replicas(tree: PyTree, at: str) -> None:
    """Raises DistributedError if copies of one shard differ between processes."""
    # Each process knows which shards any other has copies of, so all send tables of one form: a
    # digest of each such shard, of zeros where a process has none.
    names: list[str] = []
    digests: list[bytes] = []
    for path, variable in iter_variables(tree):
        for leaf in jax.tree.leaves(variable.value):
            if isinstance(leaf, jax.Array):
                for label, digest in _digests_of_shared_shards(leaf):
                    names.append(f"{format_path(path)}{label}")
                    digests.append(digest)

    compare({"copies of shards": str(len(digests))}, at)
    if not digests:
        return

    rows = rows_of_all(b"".join(digests), at).reshape(jax.process_count(), -1, 8)
    differences: list[str] = []
    for column, name in enumerate(names):
        digests_of_shard = [row[column].tobytes() for row in rows]
        if len({digest for digest in digests_of_shard if any(digest)}) > 1:
            texts = [digest.hex() for digest in digests_of_shard]
            differences.append(f"  {name}: {errors.by_process(texts)}")
    raise_if_any(
        errors.DistributedError,
        differences,
        "Copies of one array differ between processes, by checksum:\n",
        f"\nThis was found {at}. The values given to each process, or what it read, differ.",
        separator="\n",
        most=MOST_SHOWN,
    )


def _digests_of_shared_shards(array: jax.Array) -> Iterator[tuple[str, bytes]]:
    """Yields a label and the digest here of each shard that several processes have copies of."""
    holders: dict[ShardKey, set[int]] = {}  # the processes with a copy of each shard
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        holders.setdefault(_key_of(index), set()).add(device.process_index)
    shared = sorted(key for key, processes in holders.items() if len(processes) > 1)
    if not shared:
        return

    local: dict[ShardKey, list[bytes]] = {key: [] for key in shared}
    for shard in array.addressable_shards:
        key = _key_of(shard.index)
        if key in local:
            local[key].append(digest_of(shard.data))

    for key in shared:
        label = str(list(key)) if len(holders) > 1 else ""
        if len(set(local[key])) > 1:
            # Copies of one process that differ give what no other process can have.
            yield label, os.urandom(8)
        else:
            yield label, local[key][0] if local[key] else bytes(8)


def _key_of(index: tuple[slice, ...]) -> ShardKey:
    key: list[tuple[int, int]] = []
    for part in index:
        stop = -1 if part.stop is None else part.stop
        key.append((part.start or 0, stop))
    return tuple(key)
