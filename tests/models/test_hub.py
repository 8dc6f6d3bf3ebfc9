# SPDX-License-Identifier: Apache-2.0
"""Names of a hub: which files are fetched of a server, and what it says if there are none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.models import Decoder, DecoderConfig, from_pretrained, save_pretrained
from tests.values import with_values

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEEDED = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"}
OTHERS = {"README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json"}


class Hub(ThreadingHTTPServer):
    """The answers of a hub with one model, ``org/tiny``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder, self.fetched = folder, list[str]()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        hub: Any = self.server
        path = self.path.partition("?")[0].replace("%2F", "/")
        files = {str(f.relative_to(hub.folder)): f for f in hub.folder.rglob("*") if f.is_file()}
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        headers, status, body = {"X-Repo-Commit": COMMIT}, 200, b""
        if path in [f"/api/models/org/tiny/revision/{each}" for each in ("main", "refs/pr/1")]:
            siblings = [{"rfilename": each} for each in files]
            body = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": each, "size": file.stat().st_size, "oid": each}
                for each, file in files.items()
            ]
            body = json.dumps(entries).encode()
        elif name in files:
            body = files[name].read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            if with_body:
                hub.fetched.append(name)
        elif path.startswith("/mark/"):  # a program says where it is
            hub.fetched.append(path)
        else:
            known = path.startswith("/api/models/org/tiny/revision/")
            code = "RevisionNotFound" if known else "RepoNotFound"
            status, headers = 404, {"X-Error-Code": code}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "published"
    config = DecoderConfig(vocab_size=8, num_layers=1)
    save_pretrained(with_values(Decoder(config, rngs=sx.Rngs(0))), folder)
    words = {"type": "WordLevel", "vocab": {"one": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": words}))
    (folder / "generation_config.json").write_text("{}")
    (folder / "onnx").mkdir()
    for name in OTHERS:
        (folder / name).write_text("{}")
    with Hub(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(program: str, endpoint: str, cache: Path) -> list[str]:
    """Runs a program in a process of its own: huggingface_hub reads these once."""
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env={**os.environ, **given, "HF_HUB_DISABLE_TELEMETRY": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


PROGRAM = """
import os
import urllib.request

import shardax as sx
from tests.models.test_hub import digest

def attempt(name):
    try:
        sx.models.from_pretrained(name)
    except sx.errors.PretrainedError as error:
        print(error)

def mark(name):
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/mark/" + name).read()

def load(name):
    print(digest(sx.models.from_pretrained(name)))
"""


def digest(model: Any) -> str:
    """What a model is: its structure and all numbers."""
    values = sx.state(model).flat().items()
    numbers = [(str(path), np.asarray(value).tobytes()) for path, value in values]
    return hashlib.sha1(repr((model.config, sorted(numbers))).encode()).hexdigest()


def test_names_fetch_only_needed_files_and_keep_them(hub: Hub, tmp_path: Path):
    expected = digest(from_pretrained(hub.folder))
    with_network = """
print(sx.models.load_tokenizer("org/tiny").encode("one").ids)
mark("tokenizer")
load("org/tiny")
mark("model")
load("org/tiny@refs/pr/1")
for name in ("org/other", "org--x/tiny", "org/tiny@v2"):
    attempt(name)
"""
    said = run(with_network, hub.endpoint, tmp_path / "cache")
    ids, first, pinned, other, wrong, revision = said
    assert ids == "[0]"
    assert first == pinned == expected
    assert other.startswith("org/other is no folder here, and on the hub there is none of this")
    assert wrong.startswith("org--x/tiny: the hub says: ")
    assert revision == "org/tiny has no revision v2 on the hub."

    *for_tokenizer, mark = hub.fetched[: len(NEEDED)]
    assert (sorted(for_tokenizer), mark) == (
        sorted(NEEDED - {"model.safetensors"}),
        "/mark/tokenizer",
    )
    assert hub.fetched[len(NEEDED) :] == ["model.safetensors", "/mark/model"]

    without_network = """
print(sx.models.load_tokenizer("org/tiny").encode("one").ids)
load("org/tiny")
attempt("org/unseen")
import huggingface_hub
huggingface_hub.constants.HF_HUB_OFFLINE = True
load("org/tiny")
attempt("org/unseen")
"""
    closed = "http://127.0.0.1:9"
    ids, kept, unreachable, again, offline = run(without_network, closed, tmp_path / "cache")
    assert ids == "[0]"
    assert kept == again == expected
    for said in (unreachable, offline):
        assert said.startswith(
            "org/unseen is no folder here, the hub cannot be reached, and nothing was"
        )
