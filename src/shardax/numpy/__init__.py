# SPDX-License-Identifier: Apache-2.0
"""Creation functions of ``jax.numpy`` with default dtype and device."""

from shardax import random as random
from shardax.numpy.creation import arange as arange
from shardax.numpy.creation import array as array
from shardax.numpy.creation import asarray as asarray
from shardax.numpy.creation import empty as empty
from shardax.numpy.creation import eye as eye
from shardax.numpy.creation import full as full
from shardax.numpy.creation import identity as identity
from shardax.numpy.creation import linspace as linspace
from shardax.numpy.creation import ones as ones
from shardax.numpy.creation import zeros as zeros
