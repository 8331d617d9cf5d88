"""A manifest is what was written, or an error: never other values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fbt_megatron.checkpoint.manifest import FileRecord, Manifest, find_damage, hash_file
from fbt_megatron.errors import CheckpointError

MANIFEST = Manifest(
    step=20,
    state={"counters": {"tokens": 4096}, "data": {"cursors": [[0, 1], [2, 3]]}},
    config={"feedback": {"schedule": [{"until": 0.5, "mix": {"1": 1.0}}]}},
    versions={"torch": "2"},
    files={"a": FileRecord(3, "0f" * 32)},
)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_keys_that_json_turns_into_text(tmp_path: Path) -> None:
    """A configuration's mix has whole numbers as keys, which sort otherwise than their texts."""
    numbered = Manifest(1, {}, {"mix": {9: 0.5, 10: 0.5}}, {}, {})
    numbered.write(tmp_path)
    assert Manifest.read(tmp_path).config == {"mix": {"9": 0.5, "10": 0.5}}


def test_no_flipped_bit_changes_a_value(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                assert Manifest.read(tmp_path) == MANIFEST, (place, bit)
            except CheckpointError:
                refused += 1
    assert refused > 0.95 * 8 * len(content)  # spaces between the values may turn into other spaces


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "{", '{"format_version": 1}', "\udcff"])
def test_anything_else_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Manifest.read(tmp_path)


def test_a_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        Manifest.read(tmp_path)


def test_another_format_version(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(content | {"format_version": 2}))
    with pytest.raises(CheckpointError, match="has format version 2; this version reads 1"):
        Manifest.read(tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abcdef")
    record = hash_file(path)
    assert record == FileRecord(6, "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721")
    manifest = Manifest(1, {}, {}, {}, {"a": record})
    assert find_damage(tmp_path, manifest, ["a"]) is None
    path.write_bytes(b"abcdeg")
    assert find_damage(tmp_path, manifest, ["a"]) == "a has changed since it was written (its hash differs)"
    path.write_bytes(b"abc")
    assert find_damage(tmp_path, manifest, ["a"]) == "a has 3 bytes instead of 6"
    path.unlink()
    assert find_damage(tmp_path, manifest, ["a"]) == "a cannot be read (No such file or directory)"
    assert find_damage(tmp_path, manifest, []) is None
