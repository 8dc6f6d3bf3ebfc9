# SPDX-License-Identifier: Apache-2.0
"""``python -m shardax`` is the ``shardax`` command."""

import sys

from shardax.cli import main

if __name__ == "__main__":
    sys.exit(main())
