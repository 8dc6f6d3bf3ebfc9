# SPDX-License-Identifier: Apache-2.0
"""Arrays whose dimensions have names."""

from shardax.named.array import NamedArray as NamedArray
from shardax.named.attention import Attention as Attention
from shardax.named.embedding import Embed as Embed
from shardax.named.functions import dot as dot
from shardax.named.functions import softmax as softmax
from shardax.named.joining import concatenate as concatenate
from shardax.named.joining import split as split
from shardax.named.joining import stack as stack
from shardax.named.joining import unstack as unstack
from shardax.named.joining import where as where
from shardax.named.layout import Constrain as Constrain
from shardax.named.layout import constrain as constrain
from shardax.named.layout import shard as shard
from shardax.named.linear import Linear as Linear
from shardax.named.loops import scan as scan
from shardax.named.make import arange as arange
from shardax.named.make import full as full
from shardax.named.make import normal as normal
from shardax.named.make import ones as ones
from shardax.named.make import randint as randint
from shardax.named.make import random as random
from shardax.named.make import random_split as random_split
from shardax.named.make import uniform as uniform
from shardax.named.make import wrap as wrap
from shardax.named.make import zeros as zeros
from shardax.named.nmap import nmap as nmap
from shardax.named.normalization import LayerNorm as LayerNorm
from shardax.named.normalization import RMSNorm as RMSNorm
