# SPDX-License-Identifier: Apache-2.0
"""Partitioning by name: rules map the axis names of arrays to the axes of a device mesh."""

from shardax.core.metadata import PARTITION_NAME as PARTITION_NAME
from shardax.partition.assignment import UNCONSTRAINED as UNCONSTRAINED
from shardax.partition.constraints import constrain as constrain
from shardax.partition.findings import Finding as Finding
from shardax.partition.mesh import resolve_mesh as resolve_mesh
from shardax.partition.placement import shard as shard
from shardax.partition.rules import Rules as Rules
from shardax.partition.scope import axis_rules as axis_rules
from shardax.partition.scope import current_rules as current_rules
from shardax.partition.scope import logical_to_mesh_axes as logical_to_mesh_axes
from shardax.partition.specs import abstract as abstract
from shardax.partition.specs import batch_sharding as batch_sharding
from shardax.partition.specs import check as check
from shardax.partition.specs import partition_specs as partition_specs
from shardax.partition.specs import shardings as shardings
