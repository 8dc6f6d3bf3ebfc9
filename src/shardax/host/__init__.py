# SPDX-License-Identifier: Apache-2.0
"""Host functions inside programs, exported programs, pickles and workers."""

from shardax.host.callback import host_exception as host_exception
from shardax.host.callback import host_exceptions as host_exceptions
from shardax.host.compile_reports import CompiledProgram as CompiledProgram
from shardax.host.compile_reports import CompileReport as CompileReport
from shardax.host.compile_reports import compile_report as compile_report
from shardax.host.connections import WorkerFuture as WorkerFuture
from shardax.host.export.exporting import export as export
from shardax.host.export.loading import LoadedFunction as LoadedFunction
from shardax.host.export.loading import load as load
from shardax.host.export.signature import Signature as Signature
from shardax.host.host_function import HostFunction as HostFunction
from shardax.host.host_function import host_function as host_function
from shardax.host.pickling import dumps as dumps
from shardax.host.pickling import loads as loads
from shardax.host.torch_function import from_torch as from_torch
from shardax.host.worker import Remote as Remote
from shardax.host.worker import RemoteFunction as RemoteFunction
from shardax.host.worker import Worker as Worker
from shardax.host.worker import remote as remote
