# SPDX-License-Identifier: Apache-2.0
"""Reading compiled programs: instructions, operations, bytes and collectives."""

from shardax.hlo.facts import Collective as Collective
from shardax.hlo.facts import ProgramFacts as ProgramFacts
