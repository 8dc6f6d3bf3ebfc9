# SPDX-License-Identifier: Apache-2.0
"""Partitioning of arrays over a device mesh by axis names.

Read ``rules`` first: its top says in which order a spec comes about.

- One array: ``assignment`` (which rule each name gets), ``rules``, ``resolved`` (its spec and
  diagnostics), ``entries`` (mesh axes of dimensions, whoever gave them).
- A tree: ``tree``, from its leaves to their specs and diagnostics.
- What uses the layout of a tree: ``specs``, ``placement``, ``initialization``, ``tree.check``.
- Inside of programs: ``constraints``, ``explicit``, ``marks``. In scope: ``mesh``, ``context``.
- Parameters that carry their names themselves: ``boxes``.
- Texts: ``findings``, ``errors``.
"""

from shardax._core.graph.static import PARTITION_NAME as PARTITION_NAME
from shardax.partition.assignment import UNCONSTRAINED as UNCONSTRAINED
from shardax.partition.boxes.axis_metadata import AxisMetadata as AxisMetadata
from shardax.partition.boxes.initializers import logical_axis_rules as logical_axis_rules
from shardax.partition.boxes.initializers import with_logical_constraint as with_logical_constraint
from shardax.partition.boxes.initializers import (
    with_logical_partitioning as with_logical_partitioning,
)
from shardax.partition.boxes.initializers import with_partitioning as with_partitioning
from shardax.partition.boxes.partitioned import LogicallyPartitioned as LogicallyPartitioned
from shardax.partition.boxes.partitioned import Partitioned as Partitioned
from shardax.partition.boxes.trees import add_axis as add_axis
from shardax.partition.boxes.trees import is_axis_metadata as is_axis_metadata
from shardax.partition.boxes.trees import is_box as is_box
from shardax.partition.boxes.trees import map_axis_meta as map_axis_meta
from shardax.partition.boxes.trees import remove_axis as remove_axis
from shardax.partition.boxes.trees import replace_boxed as replace_boxed
from shardax.partition.boxes.trees import unbox as unbox
from shardax.partition.boxes.variable_box import VariableBox as VariableBox
from shardax.partition.boxes.variable_box import to_boxes as to_boxes
from shardax.partition.boxes.variable_box import to_variables as to_variables
from shardax.partition.constraints import constrain as constrain
from shardax.partition.context import axis_rules as axis_rules
from shardax.partition.context import current_rules as current_rules
from shardax.partition.context import kernels as kernels
from shardax.partition.context import logical_to_mesh_axes as logical_to_mesh_axes
from shardax.partition.context import parallel as parallel
from shardax.partition.errors import Diagnostic as Diagnostic
from shardax.partition.initialization import initialise as initialise
from shardax.partition.mesh import resolve_mesh as resolve_mesh
from shardax.partition.placement import shard as shard
from shardax.partition.placement import unshard as unshard
from shardax.partition.rules import Rules as Rules
from shardax.partition.specs import abstract as abstract
from shardax.partition.specs import batch_sharding as batch_sharding
from shardax.partition.specs import get_partition_spec as get_partition_spec
from shardax.partition.specs import get_sharding as get_sharding
from shardax.partition.specs import logical_to_mesh as logical_to_mesh
from shardax.partition.specs import logical_to_mesh_sharding as logical_to_mesh_sharding
from shardax.partition.specs import partition_specs as partition_specs
from shardax.partition.specs import shardings as shardings
from shardax.partition.tree.check import check as check
