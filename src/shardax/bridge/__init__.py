# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax and Equinox inside shardax models, and the reverse."""

from shardax.bridge.base import Bridged as Bridged
from shardax.bridge.base import BridgeError as BridgeError
from shardax.bridge.equinox import from_equinox as from_equinox
from shardax.bridge.linen import from_linen as from_linen
from shardax.bridge.nnx import from_nnx as from_nnx
from shardax.bridge.nnx import to_nnx as to_nnx
