# SPDX-License-Identifier: Apache-2.0
"""Translation of Flax NNX programs, for ``shardax migrate``."""
