# SPDX-License-Identifier: Apache-2.0
"""Ready-made edits of selected layers: recordings, patches, adapters, linear approximations."""

from shardax.surgery.edits import Linearised as Linearised
from shardax.surgery.edits import LoRA as LoRA
from shardax.surgery.edits import SavedActivation as SavedActivation
from shardax.surgery.edits import linearise as linearise
from shardax.surgery.edits import lora as lora
from shardax.surgery.edits import merge_lora as merge_lora
from shardax.surgery.edits import save_activations as save_activations
from shardax.surgery.patching import Patched as Patched
from shardax.surgery.patching import patch as patch
from shardax.surgery.quantizing import with_precision as with_precision
from shardax.surgery.recording import Recording as Recording
from shardax.surgery.recording import record as record
