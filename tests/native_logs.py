# SPDX-License-Identifier: Apache-2.0
"""What processes print to stderr, without what compiled libraries log when JAX loads them."""

from __future__ import annotations

import re

# JAX's CUDA plugin on a machine without CUDA; no setting of its own keeps it quiet.
NATIVE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|[IWE]\d{4} [\d:.]+\s+\d+ \w+\.cc:\d+\]"
)


def without_native_logs(stderr: str) -> str:
    """Drops the lines that compiled libraries wrote."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not NATIVE.match(line))
