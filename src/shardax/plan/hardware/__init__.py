# SPDX-License-Identifier: Apache-2.0
"""Hardware and targets: what devices can do, and how long a program may take."""
