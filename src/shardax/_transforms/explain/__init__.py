# SPDX-License-Identifier: Apache-2.0
"""What errors and reports say about a call, in the user's names."""
