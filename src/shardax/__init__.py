# SPDX-License-Identifier: Apache-2.0
"""shardax: stateful JAX models, compiled and sharded by name."""

import importlib as _importlib
import typing as _typing

# First: it refuses a JAX that is too old for the other imports.
from shardax._core import _jax as _checked  # noqa: F401

# isort: split
from shardax import errors as errors
from shardax import partition as partition
from shardax._core import object as _display
from shardax._core.containers import Dict as Dict
from shardax._core.containers import List as List
from shardax._core.graph.definitions import GraphDef as GraphDef
from shardax._core.graph.pytrees import mutable as mutable
from shardax._core.init.defaults import default_device as default_device
from shardax._core.init.defaults import default_dtype as default_dtype
from shardax._core.init.key_reuse import debug_key_reuse as debug_key_reuse
from shardax._core.init.lazy import Init as Init
from shardax._core.init.rng import Rngs as Rngs
from shardax._core.init.rng import RngStream as RngStream
from shardax._core.module import Module as Module
from shardax._core.state.bind import bind as bind
from shardax._core.state.bind import freeze as freeze
from shardax._core.state.bind import stateless_call as stateless_call
from shardax._core.state.bind import thaw as thaw
from shardax._core.state.bind import unbind as unbind
from shardax._core.state.filters import All as All
from shardax._core.state.filters import Any as Any
from shardax._core.state.filters import Frozen as Frozen
from shardax._core.state.filters import Not as Not
from shardax._core.state.filters import PathContains as PathContains
from shardax._core.state.frozen import FrozenVariable as FrozenVariable
from shardax._core.state.frozen import Slot as Slot
from shardax._core.state.split_merge import clone as clone
from shardax._core.state.split_merge import find_duplicates as find_duplicates
from shardax._core.state.split_merge import graphdef as graphdef
from shardax._core.state.split_merge import iter_modules as iter_modules
from shardax._core.state.split_merge import iter_variables as iter_variables
from shardax._core.state.split_merge import merge as merge
from shardax._core.state.split_merge import pop as pop
from shardax._core.state.split_merge import split as split
from shardax._core.state.split_merge import state as state
from shardax._core.state.split_merge import update as update
from shardax._core.state.state import State as State
from shardax._core.state.streams import fork_rngs as fork_rngs
from shardax._core.state.streams import with_rngs as with_rngs
from shardax._core.state.walk import iter_graph as iter_graph
from shardax._core.state.walk import map as map  # noqa: A004 (its name in Flax)
from shardax._core.state.walk import recursive_map as recursive_map
from shardax._core.state.walk import with_vars as with_vars
from shardax._core.variable import Variable as Variable
from shardax._core.variable_types import AmaxHistory as AmaxHistory
from shardax._core.variable_types import BatchStat as BatchStat
from shardax._core.variable_types import Cache as Cache
from shardax._core.variable_types import Intermediate as Intermediate
from shardax._core.variable_types import MetricState as MetricState
from shardax._core.variable_types import OptState as OptState
from shardax._core.variable_types import Param as Param
from shardax._core.variable_types import Perturbation as Perturbation
from shardax._core.variable_types import Quantized as Quantized
from shardax._core.variable_types import RngState as RngState
from shardax._transforms.capture import capture as capture
from shardax._transforms.checkify import checkify as checkify
from shardax._transforms.control.cond import cond as cond
from shardax._transforms.control.cond import switch as switch
from shardax._transforms.control.loops import fori_loop as fori_loop
from shardax._transforms.control.loops import while_loop as while_loop
from shardax._transforms.control.scan import scan as scan
from shardax._transforms.explain.retraces import explain_retraces as explain_retraces
from shardax._transforms.grad.custom_jvp import CustomJvp as CustomJvp
from shardax._transforms.grad.custom_jvp import custom_jvp as custom_jvp
from shardax._transforms.grad.custom_vjp import CustomVjp as CustomVjp
from shardax._transforms.grad.custom_vjp import custom_vjp as custom_vjp
from shardax._transforms.grad.differentiated import DiffState as DiffState
from shardax._transforms.grad.grad import grad as grad
from shardax._transforms.grad.grad import value_and_grad as value_and_grad
from shardax._transforms.grad.jacobian import hessian as hessian
from shardax._transforms.grad.jacobian import jacfwd as jacfwd
from shardax._transforms.grad.jacobian import jacrev as jacrev
from shardax._transforms.grad.safe_where import safe_where as safe_where
from shardax._transforms.grad.vjp import jvp as jvp
from shardax._transforms.grad.vjp import vjp as vjp
from shardax._transforms.jit.abstract_eval import eval_shape as eval_shape
from shardax._transforms.jit.abstract_eval import make_jaxpr as make_jaxpr
from shardax._transforms.jit.jit import Jit as Jit
from shardax._transforms.jit.jit import jit as jit
from shardax._transforms.jit.stages import Compiled as Compiled
from shardax._transforms.jit.stages import Lowered as Lowered
from shardax._transforms.jit.stages import Traced as Traced
from shardax._transforms.lift.filter_mappings import Carry as Carry
from shardax._transforms.lift.filter_mappings import StateAxes as StateAxes
from shardax._transforms.lift.filter_mappings import StateSharding as StateSharding
from shardax._transforms.lift.prefixes import prefix as prefix
from shardax._transforms.vmap.batch_axes import Batch as Batch
from shardax._transforms.vmap.batch_axes import BatchAxes as BatchAxes
from shardax._transforms.vmap.batch_axes import BatchRow as BatchRow
from shardax._transforms.vmap.batch_axes import batch_axes as batch_axes
from shardax._transforms.vmap.vmap import vmap as vmap
from shardax._transforms.wrappers import Jitted as Jitted
from shardax._transforms.wrappers import Remat as Remat
from shardax._transforms.wrappers import remat as remat
from shardax.partition import LogicallyPartitioned as LogicallyPartitioned
from shardax.partition import Partitioned as Partitioned
from shardax.partition import Rules as Rules
from shardax.partition import abstract as abstract
from shardax.partition import axis_rules as axis_rules
from shardax.partition import check as check
from shardax.partition import constrain as constrain
from shardax.partition import initialise as initialise
from shardax.partition import kernels as kernels
from shardax.partition import parallel as parallel
from shardax.partition import partition_specs as partition_specs
from shardax.partition import shard as shard
from shardax.partition import shardings as shardings
from shardax.partition import unbox as unbox
from shardax.partition import unshard as unshard

if _typing.TYPE_CHECKING:
    from shardax import bridge as bridge
    from shardax import distributed as distributed
    from shardax import extend as extend
    from shardax import host as host
    from shardax import models as models
    from shardax import named as named
    from shardax import nn as nn
    from shardax import numpy as numpy
    from shardax import random as random
    from shardax import surgery as surgery
    from shardax import train as train
    from shardax import view as view
    from shardax._select.combine import Hole as Hole
    from shardax._select.combine import combine as combine
    from shardax._select.selection import Selection as Selection
    from shardax._select.selection import select as select
    from shardax._transforms.control.bounded import WhileResult as WhileResult
    from shardax._transforms.control.bounded import bounded_while_loop as bounded_while_loop
    from shardax._transforms.shard_map.shard_map import shard_map as shard_map
    from shardax.config.configure import Configuration as Configuration
    from shardax.config.configure import configure as configure
    from shardax.surgery.quantizing import dequantize as dequantize
    from shardax.surgery.quantizing import quantize as quantize
    from shardax.view.tabulation import tabulate as tabulate


_ON_FIRST_USE = frozenset(
    {
        "distributed",
        "extend",
        "host",
        "models",
        "named",
        "nn",
        "numpy",
        "plan",
        "random",
        "surgery",
        "train",
    }
    | {"bridge", "view"}
)
"""Subpackages imported when first named, so that ``import shardax`` is quick."""

_MODULE_OF = {
    "Configuration": "shardax.config.configure",
    "Hole": "shardax._select.combine",
    "Selection": "shardax._select.selection",
    "WhileResult": "shardax._transforms.control.bounded",
    "bounded_while_loop": "shardax._transforms.control.bounded",
    "combine": "shardax._select.combine",
    "configure": "shardax.config.configure",
    "dequantize": "shardax.surgery.quantizing",
    "quantize": "shardax.surgery.quantizing",
    "select": "shardax._select.selection",
    "shard_map": "shardax._transforms.shard_map.shard_map",
    "tabulate": "shardax.view.tabulation",
}
"""Names whose module is imported when they are first used, likewise."""

# What shows objects in notebooks stands above them, so they are told here where to find it.
_display.renderer = lambda: _importlib.import_module("shardax.view.display")


def __getattr__(name: str) -> _typing.Any:
    if name in _ON_FIRST_USE:
        return _importlib.import_module(f"shardax.{name}")
    if name in _MODULE_OF:
        found = globals()[name] = getattr(_importlib.import_module(_MODULE_OF[name]), name)
        return found
    raise AttributeError(f"module 'shardax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE, *_MODULE_OF})
