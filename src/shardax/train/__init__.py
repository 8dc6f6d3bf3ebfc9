# SPDX-License-Identifier: Apache-2.0
"""Training: data, optimizer, metrics, checkpoints, logs, and the loop over them."""

from shardax.train import checkpoint as checkpoint
from shardax.train import metrics as metrics
from shardax.train.accumulation import accumulated_value_and_grad as accumulated_value_and_grad
from shardax.train.callbacks import BestCheckpoint as BestCheckpoint
from shardax.train.callbacks import EarlyStopping as EarlyStopping
from shardax.train.callbacks import Event as Event
from shardax.train.checkpoint import Checkpoints as Checkpoints
from shardax.train.data.batches import DataPosition as DataPosition
from shardax.train.data.batches import EvalBatches as EvalBatches
from shardax.train.data.batches import LocalBatches as LocalBatches
from shardax.train.data.batches import RowBatches as RowBatches
from shardax.train.data.batches import TrainBatches as TrainBatches
from shardax.train.data.batches import WholeBatches as WholeBatches
from shardax.train.data.packing import PackedBatches as PackedBatches
from shardax.train.data.prefetch import Prefetch as Prefetch
from shardax.train.data.prefetch import in_device_memory as in_device_memory
from shardax.train.data.prefetch import put_batch as put_batch
from shardax.train.data.sources import Positioned as Positioned
from shardax.train.data.text import ByteText as ByteText
from shardax.train.data.text import TextPart as TextPart
from shardax.train.data.text import open_text as open_text
from shardax.train.data.tokens import TokenFile as TokenFile
from shardax.train.ema import EMA as EMA
from shardax.train.gradients.data_parallel import (
    data_parallel_value_and_grad as data_parallel_value_and_grad,
)
from shardax.train.log import JsonlLog as JsonlLog
from shardax.train.log import TensorBoardLog as TensorBoardLog
from shardax.train.log import Tracker as Tracker
from shardax.train.log import read_jsonl as read_jsonl
from shardax.train.optimizer import Optimizer as Optimizer
from shardax.train.pipeline.schedules import Schedule as Schedule
from shardax.train.pipeline.stages import PipelineStep as PipelineStep
from shardax.train.run.steps import RunResult as RunResult
from shardax.train.trainer import Trainer as Trainer
from shardax.train.trainer import TrainerSettings as TrainerSettings
