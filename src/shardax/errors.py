# SPDX-License-Identifier: Apache-2.0
"""All errors that shardax raises on purpose.

Each derives from ``ShardaxError`` and, where one fits, from the builtin that a caller would catch:
``except ValueError`` goes on working. Each package defines its own errors; this module collects
them, and imports a package only when one of its errors is first named. A class that stands for
several kinds of mistakes derives from the builtin of each.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from shardax._core.errors import *  # noqa: F403
    from shardax._files import *  # noqa: F403
    from shardax._select.errors import *  # noqa: F403
    from shardax._transforms.errors import *  # noqa: F403
    from shardax.cli.inputs import *  # noqa: F403
    from shardax.config.configure import *  # noqa: F403
    from shardax.distributed.errors import *  # noqa: F403
    from shardax.hlo.errors import *  # noqa: F403
    from shardax.host.errors import *  # noqa: F403
    from shardax.models.generating.errors import *  # noqa: F403
    from shardax.models.kinds import *  # noqa: F403
    from shardax.named.base import *  # noqa: F403
    from shardax.nn.errors import *  # noqa: F403
    from shardax.partition.errors import *  # noqa: F403
    from shardax.plan.errors import *  # noqa: F403
    from shardax.random.errors import *  # noqa: F403
    from shardax.train.errors import *  # noqa: F403
    from shardax.view.parameter_table import *  # noqa: F403

_NAMES = {
    "shardax._core.errors": (
        "ConcurrentWriteError DonationError FilterError ForeignMutationError LayoutLostWarning "
        "MetadataError ModuleAttributeError ModuleError PickleReadError PickleWriteError "
        "PrecisionLostWarning RepeatedKeyError ShardaxError StateMismatchError "
        "StaticAttributeError TraceLeakError VariableValueError"
    ),
    "shardax._files": "PathExistsError PathNotFoundError",
    "shardax._select.errors": "SelectionError",
    "shardax._transforms.errors": (
        "ClosureError NoMeshError PrefixError StaticArgumentError TransformError "
        "UncertainCaptureWarning"
    ),
    "shardax.bridge.base": "BridgeError",
    "shardax.cli.inputs": "CommandError",
    "shardax.config.configure": "ConfigureError",
    "shardax.distributed.errors": "DistributedError",
    "shardax.hlo.errors": "CompilerFailedError HloReadError",
    "shardax.host.errors": (
        "CallCancelledError ExportError HostFunctionError WorkerAuthenticationError "
        "WorkerCrashedError WorkerError WorkerTimeoutError"
    ),
    "shardax.models.kinds": "PretrainedError",
    "shardax.models.generating.errors": "GenerationError",
    "shardax.named.base": "NamedAxesError NamedIndexError",
    "shardax.nn.errors": "LayerConfigError LayerInputError",
    "shardax.partition.errors": "PartitionCheckError PartitionError",
    "shardax.plan.errors": (
        "CompilerMissingError HardwareError LayoutAssertionError PlanError PlanFileError "
        "PlanInputError PlanInterrupted RowError TargetError"
    ),
    "shardax.random.errors": "DrawError",
    "shardax.train.errors": (
        "CheckpointDamagedError CheckpointError CheckpointWriteError DataError TrainError"
    ),
    "shardax.view.errors": "ViewError",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardax.errors' has no attribute {name!r}")
    error = globals()[name] = getattr(_importlib.import_module(_MODULE_OF[name]), name)
    return error


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name[0] != "_"), *_MODULE_OF})
