"""Writing a file at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fbt_megatron.files import write_durably


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    write_durably(path, "→ two\n")
    assert path.read_bytes() == b"\xe2\x86\x92 two\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_old_content_stays_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_durably(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
