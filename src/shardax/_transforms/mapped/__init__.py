# SPDX-License-Identifier: Apache-2.0
"""What ``vmap``, ``scan`` and ``shard_map`` share: a function that runs on slices."""
