# SPDX-License-Identifier: Apache-2.0
"""Compilers of absent hardware, and the processes that run them."""
