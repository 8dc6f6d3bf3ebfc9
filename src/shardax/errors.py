# SPDX-License-Identifier: Apache-2.0
"""All errors that shardax raises on purpose.

Each derives from ``ShardaxError`` and, where one fits, from the builtin that a caller would catch:
``except ValueError`` goes on working. Each package defines its own errors; this module collects
them, and imports a package only when one of its errors is first named.
"""

import importlib as _importlib
import typing as _typing

from shardax._core.errors import AbstractValueError as AbstractValueError
from shardax._core.errors import BindError as BindError
from shardax._core.errors import DeviceError as DeviceError
from shardax._core.errors import DtypeError as DtypeError
from shardax._core.errors import FilterError as FilterError
from shardax._core.errors import ForeignMutationError as ForeignMutationError
from shardax._core.errors import FrozenVariableError as FrozenVariableError
from shardax._core.errors import LabelConflictError as LabelConflictError
from shardax._core.errors import LayerViewError as LayerViewError
from shardax._core.errors import LayoutLostWarning as LayoutLostWarning
from shardax._core.errors import MetadataError as MetadataError
from shardax._core.errors import MissingAttributeError as MissingAttributeError
from shardax._core.errors import MissingRngsError as MissingRngsError
from shardax._core.errors import PickleReadError as PickleReadError
from shardax._core.errors import PickleWriteError as PickleWriteError
from shardax._core.errors import PrecisionLostWarning as PrecisionLostWarning
from shardax._core.errors import ReadOnlyCopyError as ReadOnlyCopyError
from shardax._core.errors import RepeatedKeyError as RepeatedKeyError
from shardax._core.errors import ReservedNameError as ReservedNameError
from shardax._core.errors import SeedError as SeedError
from shardax._core.errors import ShardaxError as ShardaxError
from shardax._core.errors import StackError as StackError
from shardax._core.errors import StatelessCallError as StatelessCallError
from shardax._core.errors import StateMismatchError as StateMismatchError
from shardax._core.errors import StaticAttributeError as StaticAttributeError
from shardax._core.errors import TraceLeakError as TraceLeakError
from shardax._core.errors import UnboundVariableError as UnboundVariableError
from shardax._core.errors import UnknownStreamError as UnknownStreamError
from shardax._core.errors import VariableValueError as VariableValueError
from shardax._transforms.errors import AmbiguousBatchError as AmbiguousBatchError
from shardax._transforms.errors import ArgumentError as ArgumentError
from shardax._transforms.errors import AxisSizeError as AxisSizeError
from shardax._transforms.errors import BoundedLoopError as BoundedLoopError
from shardax._transforms.errors import BoxError as BoxError
from shardax._transforms.errors import BranchError as BranchError
from shardax._transforms.errors import CarryError as CarryError
from shardax._transforms.errors import ClosureError as ClosureError
from shardax._transforms.errors import DecisionError as DecisionError
from shardax._transforms.errors import DifferentiationError as DifferentiationError
from shardax._transforms.errors import DonationError as DonationError
from shardax._transforms.errors import InconsistentAliasingError as InconsistentAliasingError
from shardax._transforms.errors import LayerConfigError as LayerConfigError
from shardax._transforms.errors import MappedShardingError as MappedShardingError
from shardax._transforms.errors import MeshError as MeshError
from shardax._transforms.errors import NoMeshError as NoMeshError
from shardax._transforms.errors import OutputError as OutputError
from shardax._transforms.errors import PartitioningUnspecifiedError as PartitioningUnspecifiedError
from shardax._transforms.errors import PrefixError as PrefixError
from shardax._transforms.errors import SharedWriteError as SharedWriteError
from shardax._transforms.errors import StaticArgumentError as StaticArgumentError
from shardax._transforms.errors import StructureMismatchError as StructureMismatchError
from shardax._transforms.errors import TangentError as TangentError
from shardax.partition.errors import AxisConflictError as AxisConflictError
from shardax.partition.errors import AxisNamesError as AxisNamesError
from shardax.partition.errors import ConstraintError as ConstraintError
from shardax.partition.errors import NoRulesError as NoRulesError
from shardax.partition.errors import OverrideError as OverrideError
from shardax.partition.errors import PartitionCheckError as PartitionCheckError
from shardax.partition.errors import PlacementError as PlacementError
from shardax.partition.errors import RulesError as RulesError
from shardax.partition.errors import UnmappedAxisError as UnmappedAxisError

if _typing.TYPE_CHECKING:
    from shardax._select.places import CombineError as CombineError
    from shardax._select.places import EmptySelectionError as EmptySelectionError
    from shardax._select.places import SelectionCountError as SelectionCountError
    from shardax._select.places import SelectionError as SelectionError
    from shardax._select.places import SelectionIndexError as SelectionIndexError
    from shardax._select.places import SelectionPathError as SelectionPathError
    from shardax._select.places import StaleSelectionError as StaleSelectionError
    from shardax.cli.inputs import CommandError as CommandError
    from shardax.config.configure import ConfiguredTooLateError as ConfiguredTooLateError
    from shardax.config.configure import ConfigureError as ConfigureError
    from shardax.hlo.program import CompilerFailedError as CompilerFailedError
    from shardax.hlo.program import HloReadError as HloReadError
    from shardax.host.errors import ArtifactCallError as ArtifactCallError
    from shardax.host.errors import ArtifactDamagedError as ArtifactDamagedError
    from shardax.host.errors import ArtifactEnvironmentError as ArtifactEnvironmentError
    from shardax.host.errors import ArtifactExistsError as ArtifactExistsError
    from shardax.host.errors import ArtifactNotFoundError as ArtifactNotFoundError
    from shardax.host.errors import ArtifactVersionError as ArtifactVersionError
    from shardax.host.errors import CallCancelledError as CallCancelledError
    from shardax.host.errors import ExportError as ExportError
    from shardax.host.errors import HostFunctionError as HostFunctionError
    from shardax.host.errors import HostResultError as HostResultError
    from shardax.host.errors import HostSpecError as HostSpecError
    from shardax.host.errors import RemoteValueError as RemoteValueError
    from shardax.host.errors import StaleModuleError as StaleModuleError
    from shardax.host.errors import WorkerAuthenticationError as WorkerAuthenticationError
    from shardax.host.errors import WorkerCallError as WorkerCallError
    from shardax.host.errors import WorkerConfigError as WorkerConfigError
    from shardax.host.errors import WorkerCrashedError as WorkerCrashedError
    from shardax.host.errors import WorkerMessageError as WorkerMessageError
    from shardax.host.errors import WorkerPickleError as WorkerPickleError
    from shardax.host.errors import WorkerStartError as WorkerStartError
    from shardax.host.errors import WorkerTimeoutError as WorkerTimeoutError
    from shardax.models.generate import GenerationError as GenerationError
    from shardax.named.base import NamedAxesError as NamedAxesError
    from shardax.named.base import NamedIndexError as NamedIndexError
    from shardax.named.base import NamesRemainError as NamesRemainError
    from shardax.nn.parameters import LayerInputError as LayerInputError
    from shardax.plan.errors import CompilerMissingError as CompilerMissingError
    from shardax.plan.errors import HardwareError as HardwareError
    from shardax.plan.errors import LayoutAssertionError as LayoutAssertionError
    from shardax.plan.errors import PlanError as PlanError
    from shardax.plan.errors import PlanFileError as PlanFileError
    from shardax.plan.errors import PlanInputError as PlanInputError
    from shardax.plan.errors import PlanInterrupted as PlanInterrupted
    from shardax.plan.errors import TargetError as TargetError
    from shardax.random.stream import DrawError as DrawError
    from shardax.random.stream import TracedDrawError as TracedDrawError
    from shardax.train.errors import AccumulationError as AccumulationError
    from shardax.train.errors import CheckpointExistsError as CheckpointExistsError
    from shardax.train.errors import CheckpointMismatchError as CheckpointMismatchError
    from shardax.train.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from shardax.train.errors import CheckpointValueError as CheckpointValueError
    from shardax.train.errors import CheckpointWriteError as CheckpointWriteError
    from shardax.train.errors import DataPositionError as DataPositionError
    from shardax.train.errors import GradientMismatchError as GradientMismatchError
    from shardax.train.errors import LogError as LogError
    from shardax.train.errors import MetricError as MetricError
    from shardax.train.errors import OptimizerStateError as OptimizerStateError
    from shardax.train.errors import PrefetchError as PrefetchError
    from shardax.train.errors import TextNotFoundError as TextNotFoundError
    from shardax.train.errors import TextSourceError as TextSourceError
    from shardax.train.errors import TrainerError as TrainerError
    from shardax.train.errors import WindowError as WindowError
    from shardax.view.operations import OperationsError as OperationsError
    from shardax.view.shardings import ShardingViewError as ShardingViewError

_MODULES = {
    "shardax.random.stream": ("DrawError", "TracedDrawError"),
    "shardax.config.configure": ("ConfigureError", "ConfiguredTooLateError"),
    "shardax._select.places": (
        "CombineError",
        "EmptySelectionError",
        "SelectionCountError",
        "SelectionError",
        "SelectionIndexError",
        "SelectionPathError",
        "StaleSelectionError",
    ),
    "shardax.view.operations": ("OperationsError",),
    "shardax.view.shardings": ("ShardingViewError",),
    "shardax.train.errors": (
        "AccumulationError",
        "CheckpointExistsError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "CheckpointValueError",
        "CheckpointWriteError",
        "DataPositionError",
        "GradientMismatchError",
        "LogError",
        "MetricError",
        "OptimizerStateError",
        "PrefetchError",
        "TextNotFoundError",
        "TextSourceError",
        "TrainerError",
        "WindowError",
    ),
    "shardax.models.generate": ("GenerationError",),
    "shardax.cli.inputs": ("CommandError",),
    "shardax.named.base": ("NamedAxesError", "NamedIndexError", "NamesRemainError"),
    "shardax.nn.parameters": ("LayerInputError",),
    "shardax.host.errors": (
        "ArtifactCallError",
        "ArtifactDamagedError",
        "ArtifactEnvironmentError",
        "ArtifactExistsError",
        "ArtifactNotFoundError",
        "ArtifactVersionError",
        "CallCancelledError",
        "ExportError",
        "HostFunctionError",
        "HostResultError",
        "HostSpecError",
        "RemoteValueError",
        "StaleModuleError",
        "WorkerAuthenticationError",
        "WorkerCallError",
        "WorkerConfigError",
        "WorkerCrashedError",
        "WorkerMessageError",
        "WorkerPickleError",
        "WorkerStartError",
        "WorkerTimeoutError",
    ),
    "shardax.plan.errors": (
        "CompilerMissingError",
        "HardwareError",
        "LayoutAssertionError",
        "PlanError",
        "PlanFileError",
        "PlanInputError",
        "PlanInterrupted",
        "TargetError",
    ),
    "shardax.hlo.program": ("CompilerFailedError", "HloReadError"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardax.errors' has no attribute {name!r}")
    found = globals()[name] = getattr(_importlib.import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
