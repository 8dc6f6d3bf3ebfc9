# SPDX-License-Identifier: Apache-2.0
"""Forms of parallelism within a step, below layers and training."""
