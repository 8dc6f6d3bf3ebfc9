# SPDX-License-Identifier: Apache-2.0
"""shardax: stateful JAX models, compiled and sharded by name."""

import importlib as _importlib
import typing as _typing

from shardax import partition as partition
from shardax.core import display as _display
from shardax.core import errors as errors
from shardax.core.binding import bind as bind
from shardax.core.binding import freeze as freeze
from shardax.core.binding import thaw as thaw
from shardax.core.binding import unbind as unbind
from shardax.core.containers import Dict as Dict
from shardax.core.containers import List as List
from shardax.core.defaults import default_device as default_device
from shardax.core.defaults import default_dtype as default_dtype
from shardax.core.filters import All as All
from shardax.core.filters import Any as Any
from shardax.core.filters import Not as Not
from shardax.core.filters import PathContains as PathContains
from shardax.core.forms import Frozen as Frozen
from shardax.core.forms import FrozenVariable as FrozenVariable
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
from shardax.core.key_reuse import debug_key_reuse as debug_key_reuse
from shardax.core.lazy import Init as Init
from shardax.core.modules import Module as Module
from shardax.core.pytree import mutable as mutable
from shardax.core.rng import Rngs as Rngs
from shardax.core.rng import RngStream as RngStream
from shardax.core.slots import Slot as Slot
from shardax.core.state import State as State
from shardax.core.stateless import stateless_call as stateless_call
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
from shardax.partition import LogicallyPartitioned as LogicallyPartitioned
from shardax.partition import Partitioned as Partitioned
from shardax.partition import Rules as Rules
from shardax.partition import abstract as abstract
from shardax.partition import axis_rules as axis_rules
from shardax.partition import check as check
from shardax.partition import constrain as constrain
from shardax.partition import initialise as initialise
from shardax.partition import partition_specs as partition_specs
from shardax.partition import shard as shard
from shardax.partition import shardings as shardings
from shardax.partition import unbox as unbox
from shardax.partition import unshard as unshard
from shardax.transforms.autodiff import DiffState as DiffState
from shardax.transforms.autodiff import grad as grad
from shardax.transforms.autodiff import value_and_grad as value_and_grad
from shardax.transforms.batch import vmap as vmap
from shardax.transforms.batch_axes import Batch as Batch
from shardax.transforms.batch_axes import BatchAxes as BatchAxes
from shardax.transforms.batch_axes import BatchRow as BatchRow
from shardax.transforms.batch_axes import batch_axes as batch_axes
from shardax.transforms.branch import cond as cond
from shardax.transforms.branch import switch as switch
from shardax.transforms.custom_vjp import CustomVjp as CustomVjp
from shardax.transforms.custom_vjp import custom_vjp as custom_vjp
from shardax.transforms.explain import explain_retraces as explain_retraces
from shardax.transforms.jaxprs import make_jaxpr as make_jaxpr
from shardax.transforms.jit import Jit as Jit
from shardax.transforms.jit import jit as jit
from shardax.transforms.jitted import Jitted as Jitted
from shardax.transforms.loops import fori_loop as fori_loop
from shardax.transforms.loops import while_loop as while_loop
from shardax.transforms.prefix import Carry as Carry
from shardax.transforms.prefix import StateAxes as StateAxes
from shardax.transforms.prefix import StateSharding as StateSharding
from shardax.transforms.remat import remat as remat
from shardax.transforms.rematted import Remat as Remat
from shardax.transforms.safe_where import safe_where as safe_where
from shardax.transforms.scan import scan as scan
from shardax.transforms.shapes import eval_shape as eval_shape
from shardax.transforms.stages import Compiled as Compiled
from shardax.transforms.stages import Lowered as Lowered
from shardax.transforms.stages import Traced as Traced
from shardax.transforms.vjp import jvp as jvp
from shardax.transforms.vjp import vjp as vjp

if _typing.TYPE_CHECKING:
    from shardax import host as host
    from shardax import models as models
    from shardax import named as named
    from shardax import nn as nn
    from shardax import random as random
    from shardax import train as train
    from shardax import view as view
    from shardax.config.configure import Configuration as Configuration
    from shardax.config.configure import configure as configure
    from shardax.core.select_combine import Hole as Hole
    from shardax.core.select_combine import combine as combine
    from shardax.core.selection import Selection as Selection
    from shardax.core.selection import select as select
    from shardax.transforms.bounded import WhileResult as WhileResult
    from shardax.transforms.bounded_while import bounded_while_loop as bounded_while_loop
    from shardax.transforms.shard_map import shard_map as shard_map

_ON_FIRST_USE = frozenset({"host", "models", "named", "nn", "plan", "random", "train", "view"})
"""Subpackages imported when first named, so that ``import shardax`` is quick."""

_MODULE_OF = {
    "Configuration": "shardax.config.configure",
    "Hole": "shardax.core.select_combine",
    "Selection": "shardax.core.selection",
    "WhileResult": "shardax.transforms.bounded",
    "bounded_while_loop": "shardax.transforms.bounded_while",
    "combine": "shardax.core.select_combine",
    "configure": "shardax.config.configure",
    "select": "shardax.core.selection",
    "shard_map": "shardax.transforms.shard_map",
}
"""Names whose module is imported when they are first used, likewise."""

# What shows objects in notebooks stands above them, so they are told here where to find it.
_display.renderer = lambda: _importlib.import_module("shardax.view.notebook")


def __getattr__(name: str) -> _typing.Any:
    if name in _ON_FIRST_USE:
        return _importlib.import_module(f"shardax.{name}")
    if name in _MODULE_OF:
        found = globals()[name] = getattr(_importlib.import_module(_MODULE_OF[name]), name)
        return found
    raise AttributeError(f"module 'shardax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE, *_MODULE_OF})
