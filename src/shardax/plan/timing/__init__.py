# SPDX-License-Identifier: Apache-2.0
"""Step times and memory of transformers, from their sizes and layouts alone."""
