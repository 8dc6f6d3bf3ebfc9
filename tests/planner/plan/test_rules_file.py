# SPDX-License-Identifier: Apache-2.0
"""Rules in TOML: what is written is read back, and what is wrong is named by file and key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from shardax.errors import PartitionError
from shardax.partition.rules import Rules
from shardax.plan.rules_file import (
    NamedRules,
    entry_from_data,
    entry_to_data,
    parse_rules,
    read_rules,
    rules_text,
    write_rules,
)

TEXTS = st.text(max_size=6) | st.sampled_from(["data", "model", 'a"b', "a\\", "a\nb", "\x7f", "é"])
TARGETS = st.one_of(
    st.none(),
    st.just(PartitionSpec.UNCONSTRAINED),
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(tuple),
)
RULES = st.builds(
    Rules,
    st.lists(st.tuples(TEXTS, TARGETS), max_size=4),
    st.sampled_from(["first", "error"]),
    st.sampled_from(["replicate", "error"]),
)
MESHES = st.none() | st.dictionaries(TEXTS, st.integers(1, 2**40), max_size=3).map(
    lambda sizes: tuple(sizes.items())
)
ENTRIES = st.builds(NamedRules, TEXTS, RULES, MESHES, st.lists(st.text(max_size=9)).map(tuple))


@given(st.lists(ENTRIES, min_size=1, max_size=3, unique_by=lambda entry: entry.name))
def test_written_rules_are_read_back_in_order(entries: list[NamedRules]) -> None:
    assert parse_rules(rules_text(entries, ["found by\nthe planner\x00"])) == tuple(entries)


@given(ENTRIES)
def test_layout_as_plain_data_comes_back(entry: NamedRules) -> None:
    assert entry_from_data(entry_to_data(entry), "run.json", entry.name) == entry


def test_comments_stand_above_what_they_are_about(tmp_path: Path) -> None:
    rules = Rules([("batch", ("data", "model")), ("embed", None)], on_unmapped="error")
    entry = NamedRules("both 4x2", rules, (("data", 4), ("model", 2)), ("peak 9.1 GiB",))
    file = write_rules(tmp_path / "best.toml", [entry], ["target tpu:v5e:2x4"])
    assert file.read_text() == (
        "# target tpu:v5e:2x4\n"
        "\n"
        "# peak 9.1 GiB\n"
        '[layouts."both 4x2"]\n'
        'mesh = { "data" = 4, "model" = 2 }\n'
        'on_unmapped = "error"\n'
        "rules = [\n"
        '    ["batch", ["data", "model"]],\n'
        '    ["embed", []],\n'
        "]\n"
    )
    assert read_rules(file) == (entry,)
    assert list(tmp_path.iterdir()) == [file]


def test_handwritten_file_may_omit_layouts(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[mesh]\ndata = 2\n[rules]\nbatch = "data"\nembed = []\n')
    assert read_rules(file) == (
        NamedRules("mine", Rules([("batch", "data"), ("embed", None)]), (("data", 2),)),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules = [", "f.toml: not TOML: "),
        ('rule = [["a", "b"]]', "f.toml: unknown key rule; a layout has rules, mesh, on_conflict"),
        ('rule = [["a", "b"]]', "Did you mean 'rules'?"),
        ("mesh = {data = 2}", "f.toml: rules is missing. Write rules = ["),
        ("rules = 3", "f.toml: rules: Rules are made of pairs or a mapping, not of 3"),
        ('rules = [["a"]]', "Rule 0 is ['a'], not a pair"),
        ('rules = [["a", 3]]', "Rule 0 for 'a' has the target 3"),
        ('rules = [["a", ["x", "x"]]]', "which holds a mesh axis twice"),
        ('rules = []\non_conflict = "last"', "on_conflict='last' must be 'first' or 'error'"),
        ("rules = []\nmesh = 8", "f.toml: mesh is 8, not sizes by mesh axis"),
        ("rules = []\nmesh = {data = 0}", "f.toml: mesh.data is 0; the size of a mesh axis"),
        ("rules = []\nmesh = {data = true}", "f.toml: mesh.data is True; the size"),
        ("[layouts]", "'layouts' is {}, not a table of at least one layout"),
        ("layouts = 3", "'layouts' is 3, not a table of at least one layout"),
        ("[layouts]\nfsdp = 3", 'f.toml: layouts."fsdp" is 3, not a table with rules'),
        ("[layouts.fsdp]\nmesh = {data = 2}", 'f.toml: layouts."fsdp".rules is missing'),
        ("rules = []\n[layouts.a]\nrules = []", "'rules' beside 'layouts'"),
    ],
)
def test_invalid_entry_error_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(PartitionError) as caught:
        read_rules(tmp_path / "f.toml")
    assert str(caught.value).startswith(str(tmp_path / "f.toml") + ": ")
    assert said in str(caught.value)


def test_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PartitionError, match=r"f\.toml: not a text file"):
        read_rules(tmp_path / "f.toml")


def test_write_rules_refuses_what_no_file_can_hold(tmp_path: Path) -> None:
    one = NamedRules("a", Rules())
    for layouts in ([], [one, one], [NamedRules("\ud800", Rules())]):
        with pytest.raises(PartitionError):
            write_rules(tmp_path / "f.toml", layouts)
    assert list(tmp_path.iterdir()) == []


def test_names_of_all_characters_are_valid_toml() -> None:
    name = "".join(map(chr, range(0x100)))
    assert list(tomllib.loads(rules_text([NamedRules(name, Rules())]))["layouts"]) == [name]
