# SPDX-License-Identifier: Apache-2.0
"""Creation functions of ``jax.numpy`` with default dtype and device."""

from shardax import random as random
from shardax.numpy.conversion import astype as astype
from shardax.numpy.conversion import from_dlpack as from_dlpack
from shardax.numpy.conversion import frombuffer as frombuffer
from shardax.numpy.conversion import fromstring as fromstring
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
from shardax.numpy.like import empty_like as empty_like
from shardax.numpy.like import full_like as full_like
from shardax.numpy.like import ones_like as ones_like
from shardax.numpy.like import zeros_like as zeros_like
from shardax.numpy.patterns import fromfunction as fromfunction
from shardax.numpy.patterns import geomspace as geomspace
from shardax.numpy.patterns import indices as indices
from shardax.numpy.patterns import logspace as logspace
from shardax.numpy.patterns import tri as tri
