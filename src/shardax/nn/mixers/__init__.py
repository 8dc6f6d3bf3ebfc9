# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers of tokens, called and cached as attention is."""
