# SPDX-License-Identifier: Apache-2.0
"""What ``shardax migrate`` works with, for the tests of single constructions."""

from shardax._migrate.imports import GUARD as GUARD
from shardax._migrate.program import UnreadableError as UnreadableError
from shardax._migrate.project import Project as Project
from shardax._migrate.rules import LEFT as LEFT
from shardax._migrate.rules import NAMES as NAMES
from shardax._migrate.translate import Translation as Translation
from shardax._migrate.translate import translate as translate
