# SPDX-License-Identifier: Apache-2.0
"""Eager random numbers from one global, seedable stream.

These are the functions of ``jax.random`` without a key. They refuse to work while a transform is
tracing; ``Rngs`` is the random state that goes into programs.
"""

from shardax.random.draws import bernoulli as bernoulli
from shardax.random.draws import bits as bits
from shardax.random.draws import categorical as categorical
from shardax.random.draws import choice as choice
from shardax.random.draws import key as key
from shardax.random.draws import normal as normal
from shardax.random.draws import permutation as permutation
from shardax.random.draws import randint as randint
from shardax.random.draws import truncated_normal as truncated_normal
from shardax.random.draws import uniform as uniform
from shardax.random.stream import StreamState as StreamState
from shardax.random.stream import get_state as get_state
from shardax.random.stream import isolated as isolated
from shardax.random.stream import seed as seed
from shardax.random.stream import set_state as set_state
