# SPDX-License-Identifier: Apache-2.0
"""Forms of parallelism within a program: what layers run over a mesh."""
