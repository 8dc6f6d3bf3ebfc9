# SPDX-License-Identifier: Apache-2.0
"""All errors that shardax raises on purpose.

Each derives from ``ShardaxError`` and, where one fits, from the builtin that a caller would catch:
``except ValueError`` goes on working. Each package defines its own errors; this module collects
them, and imports a package only when one of its errors is first named.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from shardax._core.errors import *  # noqa: F403
    from shardax._parallel.errors import *  # noqa: F403
    from shardax._select.places import *  # noqa: F403
    from shardax._transforms.errors import *  # noqa: F403
    from shardax.cli.inputs import *  # noqa: F403
    from shardax.config.configure import *  # noqa: F403
    from shardax.distributed.errors import *  # noqa: F403
    from shardax.hlo.program import *  # noqa: F403
    from shardax.host.errors import *  # noqa: F403
    from shardax.models.family import *  # noqa: F403
    from shardax.models.generation import *  # noqa: F403
    from shardax.named.base import *  # noqa: F403
    from shardax.nn.errors import *  # noqa: F403
    from shardax.partition.errors import *  # noqa: F403
    from shardax.plan.errors import *  # noqa: F403
    from shardax.random.stream import *  # noqa: F403
    from shardax.train.errors import *  # noqa: F403
    from shardax.view.operations import *  # noqa: F403
    from shardax.view.shardings import *  # noqa: F403

_NAMES = {
    "shardax._core.errors": (
        "AbstractValueError ArrayExpectedError BindError ConcurrentWriteError DeviceError "
        "DonationError DtypeError FilterError ForeignMutationError FrozenVariableError "
        "LabelConflictError LayerViewError LayoutLostWarning MetadataError MissingAttributeError "
        "MissingRngsError NotAddressableError "
        "PickleReadError PickleWriteError PrecisionLostWarning ReadOnlyCopyError "
        "RepeatedKeyError ReservedNameError SeedError ShardaxError StackError StateMismatchError "
        "StatelessCallError StaticAttributeError TraceLeakError TreeError UnboundVariableError "
        "UnknownStreamError VariableValueError"
    ),
    "shardax._parallel.errors": "DataParallelError PipelineError",
    "shardax._select.places": (
        "CombineError EmptySelectionError SelectionCountError SelectionError SelectionIndexError "
        "SelectionPathError StaleSelectionError"
    ),
    "shardax._transforms.errors": (
        "AmbiguousBatchError ArgumentError AxisSizeError BoundedLoopError BranchError "
        "CarryError ClosureError DecisionError DifferentiationError "
        "InconsistentAliasingError MappedShardingError MeshError NoMeshError "
        "OutputError PrefixError SharedWriteError "
        "StaticArgumentError StructureMismatchError TangentError"
    ),
    "shardax.bridge.base": "BridgeError",
    "shardax.cli.inputs": "CommandError",
    "shardax.config.configure": "ConfigureError ConfiguredTooLateError",
    "shardax.distributed.errors": "DisagreementError DistributedError",
    "shardax.hlo.program": "CompilerFailedError HloReadError",
    "shardax.host.errors": (
        "ArtifactCallError ArtifactDamagedError ArtifactEnvironmentError ArtifactExistsError "
        "ArtifactNotFoundError ArtifactVersionError CallCancelledError ExportError "
        "HostFunctionError HostResultError HostSpecError RemoteValueError StaleModuleError "
        "WorkerAuthenticationError WorkerCallError WorkerConfigError WorkerCrashedError "
        "WorkerMessageError WorkerPickleError WorkerStartError WorkerTimeoutError"
    ),
    "shardax.models.family": "PretrainedError",
    "shardax.models.generation": "GenerationError",
    "shardax.named.base": "NamedAxesError NamedIndexError NamesRemainError",
    "shardax.nn.errors": "LayerConfigError LayerInputError",
    "shardax.partition.errors": (
        "AxisConflictError AxisNamesError BoxError ConstraintError NoRulesError OverrideError "
        "ParallelError PartitionCheckError PartitioningUnspecifiedError PlacementError RulesError "
        "UnmappedAxisError"
    ),
    "shardax.plan.errors": (
        "CompilerMissingError HardwareError LayoutAssertionError PlanError PlanFileError "
        "PlanInputError PlanInterrupted TargetError"
    ),
    "shardax.random.stream": "DrawError TracedDrawError",
    "shardax.train.errors": (
        "AccumulationError CheckpointDamagedError CheckpointExistsError CheckpointMismatchError "
        "CheckpointNotFoundError CheckpointValueError CheckpointWriteError "
        "DataPositionError GradientMismatchError LogError MetricError OptimizerStateError "
        "PrefetchError TextNotFoundError TextSourceError TrainerError WindowError"
    ),
    "shardax.view.operations": "OperationsError",
    "shardax.view.shardings": "ShardingViewError",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardax.errors' has no attribute {name!r}")
    found = globals()[name] = getattr(_importlib.import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name[0] != "_"), *_MODULE_OF})
