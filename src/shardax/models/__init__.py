# SPDX-License-Identifier: Apache-2.0
"""Models built of ``shardax.nn``, their losses, and generation."""

from shardax.models.decoder import DECODER_RULES as DECODER_RULES
from shardax.models.decoder import Decoder as Decoder
from shardax.models.decoder import DecoderConfig as DecoderConfig
from shardax.models.decoder import DecoderLayer as DecoderLayer
from shardax.models.generation import cross_entropy as cross_entropy
from shardax.models.generation import generate as generate
from shardax.models.generation import next_token_loss as next_token_loss
