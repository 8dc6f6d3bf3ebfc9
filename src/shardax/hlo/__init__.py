# SPDX-License-Identifier: Apache-2.0
"""Reading compiled programs: instructions, operations, bytes and collectives."""

from shardax.hlo.analyze import ProgramFacts as ProgramFacts
from shardax.hlo.analyze import matmul_flops as matmul_flops
from shardax.hlo.analyze import model_flops as model_flops
from shardax.hlo.analyze import read_program as read_program
from shardax.hlo.collectives import Collective as Collective
from shardax.hlo.products import MatrixProduct as MatrixProduct
from shardax.hlo.program import ArrayShape as ArrayShape
from shardax.hlo.program import Computation as Computation
from shardax.hlo.program import Instruction as Instruction
from shardax.hlo.program import Program as Program
from shardax.hlo.program import parse as parse
