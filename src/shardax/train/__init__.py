# SPDX-License-Identifier: Apache-2.0
"""Training: data, optimizer, metrics, checkpoints, logs, and the loop over them."""

from shardax.train import checkpoint as checkpoint
from shardax.train import metrics as metrics
from shardax.train.accumulation import accumulated_value_and_grad as accumulated_value_and_grad
from shardax.train.callbacks import BestCheckpoint as BestCheckpoint
from shardax.train.callbacks import EarlyStopping as EarlyStopping
from shardax.train.callbacks import Event as Event
from shardax.train.checkpoint import Checkpoints as Checkpoints
from shardax.train.data import ByteText as ByteText
from shardax.train.data import DataPosition as DataPosition
from shardax.train.data import EvalBatches as EvalBatches
from shardax.train.data import Positioned as Positioned
from shardax.train.data import Prefetch as Prefetch
from shardax.train.data import RowBatches as RowBatches
from shardax.train.data import TextPart as TextPart
from shardax.train.data import TrainBatches as TrainBatches
from shardax.train.data import WholeBatches as WholeBatches
from shardax.train.data import in_device_memory as in_device_memory
from shardax.train.data import open_text as open_text
from shardax.train.data import put_batch as put_batch
from shardax.train.log import JsonlLog as JsonlLog
from shardax.train.log import read_jsonl as read_jsonl
from shardax.train.optimizer import Optimizer as Optimizer
from shardax.train.trainer import RunResult as RunResult
from shardax.train.trainer import Trainer as Trainer
from shardax.train.trainer import TrainerSettings as TrainerSettings
