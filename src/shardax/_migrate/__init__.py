# SPDX-License-Identifier: Apache-2.0
"""Translation of programs that use Flax NNX, for ``shardax migrate``."""
