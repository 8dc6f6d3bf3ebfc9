# SPDX-License-Identifier: Apache-2.0
"""Layers: Modules with named parameter axes.

A layer is an ordinary Module. It is lazy until used (building it runs no JAX operation), keeps
parameter dtype and compute dtype apart, takes arrays with any batch dimensions in front, and runs
as it is on meshes with Auto and with Explicit axes.
"""

from shardax._parallel.attention_kernels import AttentionChoice as AttentionChoice
from shardax.nn.attention.cache import AttentionCache as AttentionCache
from shardax.nn.attention.cache import ContextCache as ContextCache
from shardax.nn.attention.dot_product import choose_attention as choose_attention
from shardax.nn.attention.dot_product import combine_masks as combine_masks
from shardax.nn.attention.dot_product import dot_product_attention as dot_product_attention
from shardax.nn.attention.dot_product import make_attention_mask as make_attention_mask
from shardax.nn.attention.dot_product import make_causal_mask as make_causal_mask
from shardax.nn.attention.latent import LatentCache as LatentCache
from shardax.nn.attention.latent import MultiHeadLatentAttention as MultiHeadLatentAttention
from shardax.nn.attention.multi_head import MultiHeadAttention as MultiHeadAttention
from shardax.nn.attention.multi_head import QueryKeyValue as QueryKeyValue
from shardax.nn.conv import AdaptiveAvgPool as AdaptiveAvgPool
from shardax.nn.conv import AdaptiveMaxPool as AdaptiveMaxPool
from shardax.nn.conv import Conv as Conv
from shardax.nn.conv import ConvTranspose as ConvTranspose
from shardax.nn.conv import avg_pool as avg_pool
from shardax.nn.conv import max_pool as max_pool
from shardax.nn.dropout import Dropout as Dropout
from shardax.nn.einsum import Einsum as Einsum
from shardax.nn.embedding import Embed as Embed
from shardax.nn.embedding import sinusoidal as sinusoidal
from shardax.nn.kernels.layer import KernelLayer as KernelLayer
from shardax.nn.kernels.layer import KernelMap as KernelMap
from shardax.nn.linear import Linear as Linear
from shardax.nn.mixers.cache import MixerState as MixerState
from shardax.nn.mixers.cache import RecurrentCache as RecurrentCache
from shardax.nn.mixers.cache import RecurrentMixer as RecurrentMixer
from shardax.nn.mixers.convolution import ShortConvolution as ShortConvolution
from shardax.nn.mixers.delta import GatedDeltaNet as GatedDeltaNet
from shardax.nn.mixers.state_space import StateSpaceMixer as StateSpaceMixer
from shardax.nn.mlp import MLP as MLP
from shardax.nn.mlp import PReLU as PReLU
from shardax.nn.mlp import Sequential as Sequential
from shardax.nn.moe import MoE as MoE
from shardax.nn.moe import load_balance_loss as load_balance_loss
from shardax.nn.normalization import BatchNorm as BatchNorm
from shardax.nn.normalization import GroupNorm as GroupNorm
from shardax.nn.normalization import InstanceNorm as InstanceNorm
from shardax.nn.normalization import LayerNorm as LayerNorm
from shardax.nn.normalization import RMSNorm as RMSNorm
from shardax.nn.quantization import QuantizedKernel as QuantizedKernel
from shardax.nn.recurrent import RNN as RNN
from shardax.nn.recurrent import Bidirectional as Bidirectional
from shardax.nn.recurrent import GRUCell as GRUCell
from shardax.nn.recurrent import LSTMCell as LSTMCell
from shardax.nn.recurrent import SimpleCell as SimpleCell
from shardax.nn.reparametrization import SpectralNorm as SpectralNorm
from shardax.nn.reparametrization import WeightNorm as WeightNorm
from shardax.nn.rope import Rope as Rope
from shardax.nn.rope import Rotation as Rotation
from shardax.nn.rope import rotate as rotate
from shardax.nn.rope import rotation as rotation
from shardax.nn.stack import Stack as Stack
from shardax.nn.stack import stack_layers as stack_layers
from shardax.nn.stack import stack_state as stack_state
from shardax.nn.stack import unstack_layers as unstack_layers
from shardax.nn.stack import unstack_state as unstack_state
