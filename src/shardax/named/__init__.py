# SPDX-License-Identifier: Apache-2.0
"""Named axes."""

from shardax.named.array import NamedArray as NamedArray
