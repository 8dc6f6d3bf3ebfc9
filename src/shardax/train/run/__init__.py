# SPDX-License-Identifier: Apache-2.0
"""One run of a Trainer: where it starts, and its steps until its result."""
