# SPDX-License-Identifier: Apache-2.0
"""How layers multiply by their kernels."""
