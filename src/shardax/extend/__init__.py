# SPDX-License-Identifier: Apache-2.0
"""For those who write layers, transforms, containers, boxes and tools outside of the core.

The layers, models and tools of the library are written with these names and with the public ones.
Users of models need none of them. ``docs/extend.md`` has five examples: a layer, a transform, a
container, a box and a capture of one's own.
"""

from shardax._core.checks import Options as Options
from shardax._core.cross_process import PickledArray as PickledArray
from shardax._core.cross_process import PickledByName as PickledByName
from shardax._core.explain.drawing import Drawing as Drawing
from shardax._core.frames import Frame as Frame
from shardax._core.graph.static import Static as Static
from shardax._core.init.lazy import LazyValue as LazyValue
from shardax._core.object import Object as Object
from shardax._core.object import ShownArray as ShownArray
from shardax._core.state.frozen import Origin as Origin
from shardax._transforms.flat_call import FlatCall as FlatCall
from shardax._transforms.jit.array_program import ArrayProgram as ArrayProgram
from shardax._transforms.wrappers import ModuleWrapper as ModuleWrapper
from shardax.extend.layouts import AnyMesh as AnyMesh
from shardax.extend.layouts import RulesLike as RulesLike
from shardax.extend.layouts import align as align
from shardax.extend.layouts import axis_names_in as axis_names_in
from shardax.extend.layouts import byte_count as byte_count
from shardax.extend.layouts import explicit_entries as explicit_entries
from shardax.extend.layouts import explicit_sharding as explicit_sharding
from shardax.extend.layouts import gathered as gathered
from shardax.extend.layouts import joined_sharding as joined_sharding
from shardax.extend.layouts import mesh_axes_of as mesh_axes_of
from shardax.extend.layouts import mesh_text as mesh_text
from shardax.extend.layouts import require_addressable as require_addressable
from shardax.extend.layouts import with_layout as with_layout
from shardax.extend.options import align_columns as align_columns
from shardax.extend.options import did_you_mean as did_you_mean
from shardax.extend.options import join_first as join_first
from shardax.extend.options import needs_package as needs_package
from shardax.extend.options import raise_if_any as raise_if_any
from shardax.extend.options import warn_user as warn_user
from shardax.extend.programs import INLINE as INLINE
from shardax.extend.programs import function_of_jaxpr as function_of_jaxpr
from shardax.extend.programs import is_eager as is_eager
from shardax.extend.programs import is_prng_key as is_prng_key
from shardax.extend.programs import open_jaxpr as open_jaxpr
from shardax.extend.programs import varying_axes as varying_axes
from shardax.extend.stacks import StackedObjects as StackedObjects
from shardax.extend.transforms import lift as lift
from shardax.extend.transforms import transformed as transformed
from shardax.extend.transforms import wrap_methods as wrap_methods
from shardax.extend.trees import Path as Path
from shardax.extend.trees import PyTree as PyTree
from shardax.extend.trees import describe_plain_arrays as describe_plain_arrays
from shardax.extend.trees import format_path as format_path
from shardax.extend.trees import has_objects as has_objects
from shardax.extend.trees import path_of_keys as path_of_keys
from shardax.extend.trees import register_container as register_container
from shardax.extend.trees import structure_epoch as structure_epoch
from shardax.extend.trees import values_by_path as values_by_path
from shardax.extend.variables import attributes_of as attributes_of
from shardax.extend.variables import check_rngs as check_rngs
from shardax.extend.variables import stored_value as stored_value
from shardax.partition.context import ScopeSettings as ScopeSettings
from shardax.partition.marks import AxisNameMarks as AxisNameMarks
from shardax.partition.resolved import ResolvedRules as ResolvedRules
from shardax.partition.tree.inventory import TreeInventory as TreeInventory
from shardax.partition.tree.layout import TreeLayout as TreeLayout
from shardax.partition.tree.reduced_states import dimensions_of_state as dimensions_of_state
