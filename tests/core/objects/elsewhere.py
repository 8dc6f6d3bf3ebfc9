# SPDX-License-Identifier: Apache-2.0
"""What another process makes of the same seeds: keys, and a model without its values."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from typing import Any

PROGRAM = """
import jax, numpy as np, pickle, sys, shardax as sx
rngs = sx.Rngs(0, dropout=1)
rngs.dropout()
keys = [rngs(), rngs.dropout(), rngs.scope("block").dropout(), rngs.fork().params()]
words = [np.asarray(jax.random.key_data(key)).tolist() for key in keys]
unbound = sx.unbind(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)), freeze=True)
sys.stdout.buffer.write(pickle.dumps({"keys": words, "unbound": unbound}))
"""


@functools.cache
def in_another_process() -> dict[str, Any]:
    """Returns ``keys``, as words, and ``unbound``, slots and frozen values of an MLP."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    return pickle.loads(done.stdout)
