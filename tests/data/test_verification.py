"""Every byte of a data set is compared, and every damaged file named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fbt_megatron.data.verification import verify_dataset
from fbt_megatron.errors import DataError
from tests.data.datasets import write_dataset
from tests.data.range_server import serve
from tools import verify_shards

SHARDS = [[[1, 2, 256], [3, 256]], [[7, 256]]]
FILES = ("token_bytes.bin", "shard-00000.index", "shard-00000.tar", "shard-00001.index", "shard-00001.tar")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", SHARDS)


def flip_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_whole_data_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify_dataset(str(folder), workers=2)
    assert (found.num_files, found.damaged) == (5, ())
    assert found.num_bytes == sum((folder / name).stat().st_size for name in FILES)
    assert "eta 0s" in capsys.readouterr().err
    with serve(folder) as server:
        assert verify_dataset(server.url).damaged == ()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_one_bit_anywhere(folder: Path, name: str, part: float) -> None:
    flip_bit(folder / name, round(part * ((folder / name).stat().st_size - 1)))
    found = verify_dataset(str(folder)).damaged
    assert found == (f"{folder}/{name}: has changed since it was written (its SHA-256 differs)",)


def test_the_tool_names_all_damaged_files_of_all_data_sets(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_dataset(tmp_path / "other", SHARDS)
    (folder / "shard-00000.tar").unlink()
    (folder / "shard-00001.tar").write_bytes(b"short")
    flip_bit(other / "shard-00001.index", 3)
    arguments = [str(folder), str(other), str(tmp_path / "none"), "--workers", "1"]
    assert verify_shards.main(arguments) == DataError.exit_status
    captured = capsys.readouterr()
    assert f"{folder}: 5 files, " in captured.out
    assert "2 damaged" in captured.out
    for message in (
        f"{folder}/shard-00000.tar: is missing",
        f"{folder}/shard-00001.tar: has 5 bytes instead of 10,240",
        f"{other}/shard-00001.index: has changed since it was written",
        f"{tmp_path}/none/dataset.json: not found",
    ):
        assert message in captured.err


def test_the_tool_says_that_all_is_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_shards.main([str(folder), "--workers", "1"]) == 0
    assert "5 files" in capsys.readouterr().out
    assert verify_shards.main([str(folder), "--workers", "1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["num_files"], found["damaged"]) == (5, [])
    assert verify_shards.main([str(folder), "--workers", "0"]) == DataError.exit_status
