# SPDX-License-Identifier: Apache-2.0
"""Data for training: texts, batches with positions, and prefetching."""

from shardax.train.data.batches import DataPosition as DataPosition
from shardax.train.data.batches import EvalBatches as EvalBatches
from shardax.train.data.batches import RowBatches as RowBatches
from shardax.train.data.batches import TrainBatches as TrainBatches
from shardax.train.data.batches import WholeBatches as WholeBatches
from shardax.train.data.prefetch import Positioned as Positioned
from shardax.train.data.prefetch import Prefetch as Prefetch
from shardax.train.data.prefetch import in_device_memory as in_device_memory
from shardax.train.data.prefetch import put_batch as put_batch
from shardax.train.data.text import ByteText as ByteText
from shardax.train.data.text import TextPart as TextPart
from shardax.train.data.text import open_text as open_text
