# SPDX-License-Identifier: Apache-2.0
"""Arrays with named dimensions."""

from shardax.named.array import NamedArray as NamedArray
from shardax.named.functions import dot as dot
from shardax.named.functions import einsum as einsum
from shardax.named.functions import nmap as nmap
from shardax.named.functions import scan as scan
from shardax.named.functions import softmax as softmax
from shardax.named.layers import Attention as Attention
from shardax.named.layers import Embed as Embed
from shardax.named.layers import LayerNorm as LayerNorm
from shardax.named.layers import Linear as Linear
from shardax.named.layers import RMSNorm as RMSNorm
from shardax.named.layout import Constrain as Constrain
from shardax.named.layout import constrain as constrain
from shardax.named.layout import shard as shard
from shardax.named.make import arange as arange
from shardax.named.make import concatenate as concatenate
from shardax.named.make import full as full
from shardax.named.make import normal as normal
from shardax.named.make import ones as ones
from shardax.named.make import randint as randint
from shardax.named.make import random as random
from shardax.named.make import random_split as random_split
from shardax.named.make import split as split
from shardax.named.make import stack as stack
from shardax.named.make import uniform as uniform
from shardax.named.make import unstack as unstack
from shardax.named.make import where as where
from shardax.named.make import wrap as wrap
from shardax.named.make import zeros as zeros
