# SPDX-License-Identifier: Apache-2.0
"""``shard_map``: regions of a mesh, specs, and the call."""
