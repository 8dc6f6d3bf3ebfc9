# SPDX-License-Identifier: Apache-2.0
"""Programs of several processes: start, agreement, barriers, whole values."""

from shardax.distributed.arrays import gather as gather
from shardax.distributed.processes import agree as agree
from shardax.distributed.processes import barrier as barrier
from shardax.distributed.startup import initialize as initialize
from shardax.distributed.startup import is_main as is_main
from shardax.distributed.startup import process_index as process_index
