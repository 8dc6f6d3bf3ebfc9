# SPDX-License-Identifier: Apache-2.0
"""shardax: stateful JAX models, compiled and sharded by name."""

from shardax.core import errors as errors
from shardax.core.containers import Dict as Dict
from shardax.core.containers import List as List
from shardax.core.filters import All as All
from shardax.core.filters import Any as Any
from shardax.core.filters import Not as Not
from shardax.core.filters import PathContains as PathContains
from shardax.core.functional import clone as clone
from shardax.core.functional import find_duplicates as find_duplicates
from shardax.core.functional import graphdef as graphdef
from shardax.core.functional import iter_modules as iter_modules
from shardax.core.functional import iter_variables as iter_variables
from shardax.core.functional import merge as merge
from shardax.core.functional import pop as pop
from shardax.core.functional import split as split
from shardax.core.functional import state as state
from shardax.core.functional import update as update
from shardax.core.lazy import Init as Init
from shardax.core.modules import Module as Module
from shardax.core.pytree import mutable as mutable
from shardax.core.rng import Rngs as Rngs
from shardax.core.rng import RngStream as RngStream
from shardax.core.state import State as State
from shardax.core.structure import GraphDef as GraphDef
from shardax.core.variables import BatchStat as BatchStat
from shardax.core.variables import Cache as Cache
from shardax.core.variables import Intermediate as Intermediate
from shardax.core.variables import MetricState as MetricState
from shardax.core.variables import OptState as OptState
from shardax.core.variables import Param as Param
from shardax.core.variables import Perturbation as Perturbation
from shardax.core.variables import RngState as RngState
from shardax.core.variables import Variable as Variable
