# SPDX-License-Identifier: Apache-2.0
"""Every error that shardax raises on purpose.

An error here says four things: what was found, at which path (both paths where two things collide),
why it cannot work, and the code that would. Each class stands under ``ShardaxError`` and under the
builtin exception that a caller would naturally catch (``ValueError``, ``TypeError``, ...). All
survive pickling, because errors cross process boundaries (workers, data loaders).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardax.core.error_base import ShardaxError as ShardaxError
from shardax.core.host_errors import ArtifactCallError as ArtifactCallError
from shardax.core.host_errors import ArtifactDamagedError as ArtifactDamagedError
from shardax.core.host_errors import ArtifactEnvironmentError as ArtifactEnvironmentError
from shardax.core.host_errors import ArtifactExistsError as ArtifactExistsError
from shardax.core.host_errors import ArtifactNotFoundError as ArtifactNotFoundError
from shardax.core.host_errors import ArtifactVersionError as ArtifactVersionError
from shardax.core.host_errors import CallCancelledError as CallCancelledError
from shardax.core.host_errors import ExportError as ExportError
from shardax.core.host_errors import HostFunctionError as HostFunctionError
from shardax.core.host_errors import HostResultError as HostResultError
from shardax.core.host_errors import HostSpecError as HostSpecError
from shardax.core.host_errors import LayoutLostWarning as LayoutLostWarning
from shardax.core.host_errors import NeighbourError as NeighbourError
from shardax.core.host_errors import PickleReadError as PickleReadError
from shardax.core.host_errors import PickleWriteError as PickleWriteError
from shardax.core.host_errors import PrecisionLostWarning as PrecisionLostWarning
from shardax.core.host_errors import RemoteValueError as RemoteValueError
from shardax.core.host_errors import StaleModuleError as StaleModuleError
from shardax.core.host_errors import WorkerAuthenticationError as WorkerAuthenticationError
from shardax.core.host_errors import WorkerCallError as WorkerCallError
from shardax.core.host_errors import WorkerConfigError as WorkerConfigError
from shardax.core.host_errors import WorkerCrashedError as WorkerCrashedError
from shardax.core.host_errors import WorkerMessageError as WorkerMessageError
from shardax.core.host_errors import WorkerPickleError as WorkerPickleError
from shardax.core.host_errors import WorkerProtocolError as WorkerProtocolError
from shardax.core.host_errors import WorkerStartError as WorkerStartError
from shardax.core.host_errors import WorkerTimeoutError as WorkerTimeoutError
from shardax.core.plan_errors import CompilerFailedError as CompilerFailedError
from shardax.core.plan_errors import CompilerMissingError as CompilerMissingError
from shardax.core.plan_errors import HardwareError as HardwareError
from shardax.core.plan_errors import HloReadError as HloReadError
from shardax.core.plan_errors import LayoutAssertionError as LayoutAssertionError
from shardax.core.plan_errors import PlanError as PlanError
from shardax.core.plan_errors import PlanFileError as PlanFileError
from shardax.core.plan_errors import PlanInputError as PlanInputError
from shardax.core.plan_errors import PlanInterrupted as PlanInterrupted
from shardax.core.plan_errors import TargetError as TargetError

# --- objects -------------------------------------------------------------------------------------


class StaticAttributeError(ShardaxError, TypeError):
    """An attribute is neither data (arrays, Variables, Modules) nor hashable configuration."""


class ReadOnlyCopyError(ShardaxError, RuntimeError):
    """A copy rebuilt inside a plain JAX transform was written; the write would be lost."""


class TraceLeakError(ShardaxError, RuntimeError):
    """A traced value would have escaped into a Variable that outlives the trace."""


class ForeignMutationError(ShardaxError, RuntimeError):
    """A Module from outside a transform was structurally changed inside it."""


class AbstractValueError(ShardaxError, TypeError):
    """A Variable that holds only a shape and dtype was used where an array is needed."""


class MissingRngsError(ShardaxError, ValueError):
    """A lazy value needs a random key and was made without a key stream."""


class LayerViewError(ShardaxError, ValueError):
    """A view of one layer of a stack was used where it cannot stand for its part of the stack."""


class StackError(ShardaxError, ValueError):
    """Layers that were to be stacked are not alike."""


class UnknownStreamError(ShardaxError, AttributeError):
    """A random stream was asked for that ``Rngs`` does not hold and that has no default."""


class VariableValueError(ShardaxError, TypeError):
    """A Variable was given a value that is not an array or a pytree of arrays."""


class FrozenVariableError(ShardaxError, AttributeError):
    """A frozen value was written; it cannot change."""


class UnboundVariableError(ShardaxError, AttributeError):
    """A slot was used as if it had a value; the Variable that belongs there was taken out."""


class LabelConflictError(ShardaxError, ValueError):
    """Two different Variables, slots or frozen values have one label; names both paths."""


class BindError(ShardaxError, ValueError):
    """Variables do not fit the slots of a tree: without a label, a slot, or of another type."""


class StatelessCallError(ShardaxError, RuntimeError):
    """A functional call changed more than values, and what it changed would be lost."""


class ReservedNameError(ShardaxError, AttributeError):
    """An attribute name is reserved by shardax."""


class MissingAttributeError(ShardaxError, AttributeError):
    """No chosen Module has an attribute that was to be set."""


class SeedError(ShardaxError, TypeError):
    """A random stream was given something that is neither an integer seed nor a random key."""


class TracedDrawError(ShardaxError, RuntimeError):
    """The global stream of random numbers was used while a JAX transform is tracing."""


class DrawError(ShardaxError, ValueError):
    """Random numbers cannot be drawn as asked: a shape, range, probability or place is wrong."""


class RepeatedKeyError(ShardaxError, RuntimeError):
    """A key was drawn a second time from a stream that was copied, or made of an equal seed."""


class DtypeError(ShardaxError, TypeError):
    """A dtype is none, is of the wrong kind, or has 64 bits while JAX uses 32."""


class DeviceError(ShardaxError, ValueError):
    """There is no device of a name."""


class ConfigureError(ShardaxError, ValueError):
    """Settings of the process are not valid; nothing was changed."""


class ConfiguredTooLateError(ConfigureError):
    """Settings can no longer take effect, because JAX's backend runs; nothing was changed."""


# --- structure and state -------------------------------------------------------------------------


class FilterError(ShardaxError, ValueError):
    """Filters do not cover a Variable, or are out of order, or are not filters."""


class StateMismatchError(ShardaxError, ValueError):
    """A State does not fit a structure: missing, unexpected, or wrong entries."""


class MetadataError(ShardaxError, ValueError):
    """Metadata of a Variable is invalid (unhashable, or axes that do not fit the shape)."""


# --- selections ----------------------------------------------------------------------------------


class SelectionError(ShardaxError, ValueError):
    """A selection cannot be made as asked, or what was selected cannot be edited so."""


class EmptySelectionError(SelectionError):
    """A selection was edited that has no places."""


class SelectionCountError(SelectionError):
    """A selection has more places than were asked for, or fewer."""


class SelectionPathError(SelectionError, LookupError):
    """There is no place at a path, or it is not among what is selected."""


class SelectionIndexError(SelectionError, IndexError):
    """A selection was asked for a place by a number that it does not have."""


class StaleSelectionError(SelectionError, LookupError):
    """What was selected is no longer in the tree."""


class CombineError(SelectionError):
    """Parts of a tree do not make a whole: something is missing, or they differ."""


# --- transforms ----------------------------------------------------------------------------------


class PrefixError(ShardaxError, ValueError):
    """A prefix (sharding, axis, filter mapping) does not fit the argument it describes."""


class InconsistentAliasingError(ShardaxError, ValueError):
    """A Variable reached by two paths was given two different prefixes."""


class AxisSizeError(ShardaxError, ValueError):
    """An axis to map over is missing, cannot be divided, or its sizes differ between arguments."""


class AmbiguousBatchError(ShardaxError, ValueError):
    """The batch of a problem cannot be found by sizes alone; names the arrays in doubt."""


class MappedShardingError(ShardaxError, ValueError):
    """Arrays that are mapped together are split over the Explicit axes of a mesh in two ways."""


class SharedWriteError(ShardaxError, ValueError):
    """A Variable that all lanes or shards share was given a value that differs between them."""


class CarryError(ShardaxError, TypeError):
    """What goes from one iteration of a loop to the next changes its type, or is given wrongly."""


class DecisionError(ShardaxError, TypeError):
    """What decides (predicate, index, condition) is not one number, or does more than decide."""


class BoundedLoopError(ShardaxError, ValueError):
    """A bounded loop cannot be made: its limit, mode, history or padding is not valid."""


class BranchError(ShardaxError, TypeError):
    """The branches of a choice differ in what they return, write or change."""


class ArgumentError(ShardaxError, TypeError):
    """An argument is neither arrays nor objects, or not such as the function takes."""


class StaticArgumentError(ShardaxError, TypeError):
    """A static argument is not hashable, or a Module was passed as a static argument."""


class DonationError(ShardaxError, ValueError):
    """A donated buffer cannot be donated (used twice, or already deleted)."""


class OutputError(ShardaxError, TypeError):
    """A transformed function returned something that cannot leave the transform."""


class DifferentiationError(ShardaxError, TypeError):
    """The differentiated argument or the output has no gradient."""


class TangentError(ShardaxError, ValueError):
    """A tangent, gradient or cotangent does not fit what it belongs to."""


class ClosureError(ShardaxError, RuntimeError):
    """A function uses a Variable that it was not given, where its value cannot be known."""


class StructureMismatchError(ShardaxError, ValueError):
    """A compiled function was called with arguments of another structure."""


# --- partitioning --------------------------------------------------------------------------------


class RulesError(ShardaxError, ValueError):
    """Rules are malformed: not pairs, not a target, or not a policy."""


class AxisNamesError(ShardaxError, ValueError):
    """The logical names of one array are malformed, or one name occurs twice."""


class AxisConflictError(ShardaxError, ValueError):
    """Two names of one array want one mesh axis, and the rules say that this is an error."""


class UnmappedAxisError(ShardaxError, ValueError):
    """No rule mentions a logical name, and the rules say that this is an error."""


class MeshError(ShardaxError, TypeError):
    """Something that is not a mesh was given where a mesh belongs, or a mesh of another kind."""


class NoMeshError(ShardaxError, ValueError):
    """A mesh is needed, none was given, and none is in scope."""


class NoRulesError(ShardaxError, ValueError):
    """Rules are needed, none were given, and none are in scope."""


class BoxError(ShardaxError, ValueError):
    """A box of axis metadata cannot do what it is asked for: names, positions, or static data."""


class PartitioningUnspecifiedError(ShardaxError, ValueError):
    """A dimension is added to or removed from a box, and nothing says what it is called."""


class ConstraintError(ShardaxError, ValueError):
    """An array inside a program cannot be constrained as asked."""


class PartitionCheckError(ShardaxError, ValueError):
    """A tree cannot be laid out by these rules over this mesh; lists every offending array.

    Attributes:
        findings: The findings of severity ``"error"``, each with its path.
    """

    def __init__(self, findings: Iterable[Any]) -> None:
        self.findings: tuple[Any, ...] = tuple(findings)
        super().__init__(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        problems = f"{count} problem{'' if count == 1 else 's'}"
        lines = "".join(f"\n  {finding}" for finding in self.findings)
        return f"The layout has {problems}; nothing was moved.{lines}"


class OverrideError(ShardaxError, ValueError):
    """What was said about places apart from the rules is malformed: an override, a memory kind."""


class PlacementError(ShardaxError, RuntimeError):
    """A device refused an array while a model was being placed; every array is still valid."""


class ShardingViewError(ShardaxError, ValueError):
    """There is no sharding to show: the value is not laid out, or only inside a program."""


class OperationsError(ShardaxError, ValueError):
    """The operations of a call cannot be counted: nothing to call, or no devices to compile for."""


# --- text, batches and logs ----------------------------------------------------------------------


class TextNotFoundError(ShardaxError, FileNotFoundError):
    """There is no file or folder at the path that text was to be read from."""


class TextSourceError(ShardaxError, ValueError):
    """A text is empty, cannot be gathered, or cannot be cut as asked."""


class WindowError(ShardaxError, ValueError):
    """Batches of windows cannot be drawn: too little text, or sizes that do not divide."""


class DataPositionError(ShardaxError, ValueError):
    """A saved data position belongs to other data, another seed, or other batch sizes."""


class PrefetchError(ShardaxError, RuntimeError):
    """A prefetch is closed, or its source has no position to save or restore."""


class LogError(ShardaxError, ValueError):
    """A log record has no standard JSON form or goes back in steps, or a log file is damaged."""


# --- running a training job ----------------------------------------------------------------------


class TrainerError(ShardaxError, RuntimeError):
    """A training run cannot start or go on: bad settings, a used directory, a loss not finite."""


class GenerationError(ShardaxError, ValueError):
    """Tokens cannot be generated: empty prompt, or a length, window or temperature out of range."""


class CommandError(ShardaxError, ValueError):
    """A command line asks for something that cannot be done; the message says what would."""


# --- training ------------------------------------------------------------------------------------


class GradientMismatchError(ShardaxError, ValueError):
    """Gradients do not fit the parameters that an optimizer trains; lists every path."""


class OptimizerStateError(ShardaxError, ValueError):
    """An optimizer's state does not fit its model, or there is nothing to train."""


class AccumulationError(ShardaxError, ValueError):
    """Gradients cannot be accumulated (rows that do not divide, state that changes its form)."""


class MetricError(ShardaxError, ValueError):
    """A metric lacks an argument that it needs, or was merged with one of another kind."""


# --- checkpoints ---------------------------------------------------------------------------------


class CheckpointMismatchError(ShardaxError, ValueError):
    """A checkpoint does not fit what it is to be restored into; lists every path."""


class CheckpointNotFoundError(ShardaxError, FileNotFoundError):
    """There is no complete checkpoint at a path."""


class CheckpointExistsError(ShardaxError, FileExistsError):
    """A checkpoint would overwrite another."""


class CheckpointWriteError(ShardaxError, OSError):
    """A checkpoint could not be written to the end; those before it are whole."""


class CheckpointValueError(ShardaxError, TypeError):
    """Something cannot be saved in a checkpoint, or a checkpoint has a form that is not known."""


# --- named axes ----------------------------------------------------------------------------------


class NamedAxesError(ShardaxError, ValueError):
    """The axes of named arrays do not fit: an unknown name, two sizes, or too many dimensions."""


class NamedIndexError(ShardaxError, IndexError):
    """A position that is known before a program runs is out of range for its axis."""


class NamesRemainError(ShardaxError, TypeError):
    """A named array was used as a plain one while it has names, which would be lost."""


# --- layers ---------------------------------------------------------------------------------------


class LayerConfigError(ShardaxError, ValueError):
    """A layer or model cannot be built: sizes, names or options that do not fit."""


class LayerInputError(ShardaxError, ValueError):
    """A layer was called on an input of a wrong shape, rank or dtype."""
