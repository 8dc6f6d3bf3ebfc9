# SPDX-License-Identifier: Apache-2.0
"""Partitioning by name: rules map the axis names of arrays to the axes of a device mesh."""

from shardax._core.graph.static import PARTITION_NAME as PARTITION_NAME
from shardax.partition.boxes.boxes import AxisMetadata as AxisMetadata
from shardax.partition.boxes.boxes import LogicallyPartitioned as LogicallyPartitioned
from shardax.partition.boxes.boxes import Partitioned as Partitioned
from shardax.partition.boxes.boxes import logical_axis_rules as logical_axis_rules
from shardax.partition.boxes.boxes import with_logical_constraint as with_logical_constraint
from shardax.partition.boxes.boxes import (
    with_logical_partitioning as with_logical_partitioning,
)
from shardax.partition.boxes.boxes import with_partitioning as with_partitioning
from shardax.partition.boxes.trees import VariableBox as VariableBox
from shardax.partition.boxes.trees import add_axis as add_axis
from shardax.partition.boxes.trees import is_box as is_box
from shardax.partition.boxes.trees import remove_axis as remove_axis
from shardax.partition.boxes.trees import replace_boxed as replace_boxed
from shardax.partition.boxes.trees import to_boxes as to_boxes
from shardax.partition.boxes.trees import to_variables as to_variables
from shardax.partition.boxes.trees import unbox as unbox
from shardax.partition.constraints import constrain as constrain
from shardax.partition.context import axis_rules as axis_rules
from shardax.partition.context import current_rules as current_rules
from shardax.partition.context import logical_to_mesh_axes as logical_to_mesh_axes
from shardax.partition.errors import Diagnostic as Diagnostic
from shardax.partition.initialization import initialise as initialise
from shardax.partition.mesh import resolve_mesh as resolve_mesh
from shardax.partition.placement import shard as shard
from shardax.partition.placement import unshard as unshard
from shardax.partition.rules import UNCONSTRAINED as UNCONSTRAINED
from shardax.partition.rules import Rules as Rules
from shardax.partition.specs import abstract as abstract
from shardax.partition.specs import batch_sharding as batch_sharding
from shardax.partition.specs import get_partition_spec as get_partition_spec
from shardax.partition.specs import get_sharding as get_sharding
from shardax.partition.specs import logical_to_mesh as logical_to_mesh
from shardax.partition.specs import logical_to_mesh_sharding as logical_to_mesh_sharding
from shardax.partition.specs import partition_specs as partition_specs
from shardax.partition.specs import shardings as shardings
from shardax.partition.tree_check import check as check
