# SPDX-License-Identifier: Apache-2.0
"""Programs of several processes: start, agreement, barriers, whole values."""

from shardax.distributed.processes import agree as agree
from shardax.distributed.processes import barrier as barrier
from shardax.distributed.processes import gather as gather
from shardax.distributed.processes import initialize as initialize
from shardax.distributed.processes import is_main as is_main
from shardax.distributed.processes import process_index as process_index
