# SPDX-License-Identifier: Apache-2.0
"""Installs packages into the environment of the Python that runs it.

    .venv/bin/python .ci/install.py ARGUMENTS    those of pip install

By uv, in a tenth of pip's time, with the indexes, folders and constraints of pip's settings. By pip
where there is no uv, and where uv fails.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip"]
os.environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_RETRIES": "8"}
# Of pip, by its name, and of uv: its variable, and what stands between values.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "no-index": ("UV_NO_INDEX", " "),
}


def settings_of_pip() -> dict[str, str]:
    """What uv has to be told of pip's settings."""
    listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True)
    # Variables are listed first, and count more than files.
    lines = sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:"))
    found = {}
    for line in lines:
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = ast.literal_eval(value)
    # As pip does, uv then takes the best version of all indexes.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, (variable, between) in SETTINGS.items():
        if name in found:
            variables[variable] = between.join(found[name].split())
    return variables


def main(words: list[str]) -> int:
    """Returns the exit status."""
    if importlib.util.find_spec("uv") is None:
        subprocess.run([*PIP, "install", "-qq", "--only-binary", ":all:", "uv"])
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable]
    done = subprocess.run([*uv, *words], env=os.environ | settings_of_pip())
    return done.returncode and subprocess.run([*PIP, "install", "-qq", *words]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
