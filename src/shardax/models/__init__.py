# SPDX-License-Identifier: Apache-2.0
"""Models built of ``shardax.nn``, their losses, and generation."""

from shardax.models import tensors as tensors
from shardax.models.config import TransformerConfig as TransformerConfig
from shardax.models.convnext import ConvNeXt as ConvNeXt
from shardax.models.convnext import ConvNeXtConfig as ConvNeXtConfig
from shardax.models.decoder import DECODER_RULES as DECODER_RULES
from shardax.models.decoder import Decoder as Decoder
from shardax.models.decoder import DecoderConfig as DecoderConfig
from shardax.models.decoder import DecoderLayer as DecoderLayer
from shardax.models.dual_encoder import DualEncoder as DualEncoder
from shardax.models.dual_encoder import DualEncoderConfig as DualEncoderConfig
from shardax.models.dual_encoder import DualEncoderOutput as DualEncoderOutput
from shardax.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from shardax.models.encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
from shardax.models.families.registry import register as register
from shardax.models.generation import generate as generate
from shardax.models.layers.pooling import pool_tokens as pool_tokens
from shardax.models.layers.recurrent import GatedDeltaConfig as GatedDeltaConfig
from shardax.models.layers.recurrent import ShortConvolutionConfig as ShortConvolutionConfig
from shardax.models.layers.recurrent import StateSpaceConfig as StateSpaceConfig
from shardax.models.layers.transformer_layer import TransformerLayer as TransformerLayer
from shardax.models.losses import blockwise_cross_entropy as blockwise_cross_entropy
from shardax.models.losses import cross_entropy as cross_entropy
from shardax.models.losses import next_token_loss as next_token_loss
from shardax.models.transformer import Transformer as Transformer
from shardax.models.weights import from_pretrained as from_pretrained
from shardax.models.weights import load_tokenizer as load_tokenizer
from shardax.models.weights import save_pretrained as save_pretrained
from shardax.nn.rope import Rope as Rope
