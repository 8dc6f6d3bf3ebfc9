# SPDX-License-Identifier: Apache-2.0
"""Workers: processes that keep compiled functions and values on devices, and calls to them.

From the ground up: ``messages`` and ``channel`` (what goes over a connection, and how),
``encoding`` (objects as bytes), ``functions`` (what a call runs); in the worker's process
``calls`` and ``server``; in the caller's ``process`` and ``origins`` (where a worker comes from),
``futures``, ``link``, ``kept``, ``worker``, and ``remote`` for any executor.
"""
