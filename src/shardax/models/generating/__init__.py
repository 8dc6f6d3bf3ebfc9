# SPDX-License-Identifier: Apache-2.0
"""Generation: what it reads, what a model says of its texts, and the programs."""
