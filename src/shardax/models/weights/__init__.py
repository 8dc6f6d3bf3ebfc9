# SPDX-License-Identifier: Apache-2.0
"""Published weights: straight into shards, and back into files."""
