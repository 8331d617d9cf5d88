"""What a user can get wrong: one message that says what to do, no stack trace, an exit status, on every rank."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint.disk import PAGE, small_disk
from tests.pretrain.runs import Outcome, pretrain, steps, write_config

pytestmark = pytest.mark.training


def _refused(outcome: Outcome, status: int, *messages: str) -> None:
    outcome.check(status)
    assert "Traceback" not in outcome.output
    for message in messages:
        assert message in outcome.output, outcome.output


# Mistakes that are found before anything heavy is imported.
@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["optimizer.normuon.momentun=0.9"], ["optimizer.normuon.momentun", "Did you mean optimizer.normuon.momentum"]),
        (["modle.num_layers=2"], ["modle", "model"]),
        (["train.steps=many"], ["train.steps", "many"]),
        (["train.steps=true"], ["train.steps"]),
        (["train.global_batch_size=10"], ["train.global_batch_size (10)", "data.streams=8"]),
        (["model.num_query_groups=3"], ["model.num_query_groups=3", "num_attention_heads"]),
        (["parallel.zero_stage=0", "parallel.precision=bf16"], ["zero_stage"]),
        (["parallel.tensor=3"], ["num_attention_heads=4", "parallel.tensor (3)"]),
        (["parallel.pipeline=3"], ["model.num_layers=2", "parallel.pipeline (3)"]),
        (["parallel.sequence=true"], ["parallel.sequence=true", "parallel.tensor is 1"]),
        (["parallel.context=2"], ["parallel.context: context parallelism is not available"]),
        (["feedback.schedule=[{until: 0.5, mix: {1: 1.0}}]"], ["feedback.schedule"]),
        (["train.steps=0", "model.head_dim=7"], ["2 problems", "train.steps=0", "model.head_dim=7"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_configuration(config: Path, tmp_path: Path, overrides: list[str], messages: list[str]) -> None:
    outcome = pretrain(config, tmp_path / "run", *overrides)
    _refused(outcome, 2, *messages)
    assert not (tmp_path / "run").exists()


def test_missing_configuration_file(tmp_path: Path) -> None:
    _refused(pretrain(tmp_path / "none.yaml", tmp_path / "run"), 2, "none.yaml", "No such file")


@dataclass(frozen=True)
class BadData:
    """A way to spoil a copy of the data set, and what the message must say."""

    name: str
    spoil: Callable[[Path], None]
    messages: tuple[str, ...]


def _first_shard(train: Path) -> Path:
    return sorted(train.glob("*.tar"))[0]


def _truncate(train: Path) -> None:
    shard = _first_shard(train)
    os.truncate(shard, shard.stat().st_size // 2)


def _remove_shard(train: Path) -> None:
    _first_shard(train).unlink()


def _remove_everything(train: Path) -> None:
    shutil.rmtree(train)


def _no_documents(train: Path) -> None:
    info = json.loads((train / "dataset.json").read_text())
    info |= {"shards": [], "num_documents": 0, "num_tokens": 0, "num_bytes": 0}
    (train / "dataset.json").write_text(json.dumps(info))


def _large_token_ids(train: Path) -> None:
    """Overwrite the first token of every sample of one shard with id 60000; sizes stay."""
    shard = _first_shard(train)
    content = bytearray(shard.read_bytes())
    position = content.find(b".tokens")
    while position >= 0:
        start = position - position % 512 + 512
        content[start : start + 2] = (60000).to_bytes(2, "little")
        position = content.find(b".tokens", start)
    shard.write_bytes(content)


def _damage_first_documents(shard: Path, count: int) -> None:
    """Flip a bit in each of the first documents of a shard; the ids stay valid ones."""
    content = bytearray(shard.read_bytes())
    position = 0
    for _ in range(count):
        position = content.index(b".tokens", position) + 512
        content[position - position % 512] ^= 1
    shard.write_bytes(content)


def _large_token_ids_without_checksums(train: Path) -> None:
    """Shards that another program made."""
    _large_token_ids(train)
    (train / "dataset.json").unlink()


BAD_DATA = [
    BadData("truncated", _truncate, ("shard-00000.tar", "bytes")),
    BadData("missing shard", _remove_shard, ("shard-00000.tar",)),
    BadData("missing folder", _remove_everything, ("data.train",)),
    BadData("no documents", _no_documents, ("document",)),
    BadData("changed tokens", _large_token_ids, ("shard-00000.tar", "sample", "checksum")),
    BadData("token id", _large_token_ids_without_checksums, ("60000", "shard-00000.tar", "257")),
]


@pytest.mark.parametrize("bad", BAD_DATA, ids=lambda bad: bad.name)
def test_data(bad: BadData, data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    bad.spoil(copy / "train")
    config = write_config(tmp_path / "tiny.yaml", copy)
    _refused(pretrain(config, tmp_path / "run"), 3, *bad.messages)


def test_documents_that_may_be_passed_over(data: Path, tmp_path: Path) -> None:
    """A few are counted and the run goes on; a whole shard is too much."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for shard in (copy / "train").glob("*.tar"):  # eight streams read a few documents each: one is sure to be met
        _damage_first_documents(shard, 3)
    config = write_config(tmp_path / "tiny.yaml", copy)
    keys = ["data.on_error=skip", "data.max_skipped=0.2", "train.steps=12", "evaluation.every=12"]
    outcome = pretrain(config, tmp_path / "run", *keys).check()
    skipped = [record["skipped_documents"] for record in steps(tmp_path / "run")]
    assert skipped == sorted(skipped)
    assert skipped[-1] > 0
    assert "data.on_error=skip passes over document " in outcome.output
    assert "the tokens do not match their checksum" in outcome.output
    assert f"{skipped[-1]} (" in (tmp_path / "run" / "log.txt").read_text()
    _remove_shard(copy / "train")
    outcome = pretrain(config, tmp_path / "other", "data.on_error=skip")
    _refused(
        outcome, 3, "shard-00000.tar: not found", "DataError: data.on_error=skip: ", "data.max_skipped=0.01 allows"
    )


def test_vocabulary_of_another_tokenizer(config: Path, tmp_path: Path) -> None:
    _refused(pretrain(config, tmp_path / "run", "model.vocab_size=300"), 3, "300", "257")


def test_row_longer_than_the_data(config: Path, tmp_path: Path) -> None:
    _refused(pretrain(config, tmp_path / "run", "model.seq_length=1000000"), 3, "model.seq_length=1000000")


def test_run_directory_that_cannot_be_made(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _refused(pretrain(config, tmp_path / "file" / "run"), 2, "train.run_dir", "Not a directory")


def test_two_runs_in_one_directory(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _refused(pretrain(config, run_dir), 2, "another run is writing there")


def test_changed_configuration_against_a_checkpoint(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    pretrain(config, run_dir, "train.stop_step=1").check()
    changes = ["train.seed=9", "optimizer.grad_clip=0.5"]
    _refused(pretrain(config, run_dir, *changes), 2, "2 problems", "train.seed=9", "optimizer.grad_clip=0.5")
    allowed = ["--allow-config-change", "optimizer.grad_clip"]
    pretrain(config, run_dir, changes[1], *allowed, "train.stop_step=2").check()


def test_nothing_to_load(config: Path, tmp_path: Path) -> None:
    outcome = pretrain(config, tmp_path / "run", f"checkpoint.load={tmp_path / 'none'}")
    _refused(outcome, 4, "checkpoint.load", "there is no checkpoint")


def test_wrong_number_of_processes(config: Path, tmp_path: Path) -> None:
    outcome = pretrain(config, tmp_path / "run", processes=3)
    assert outcome.status != 0
    for rank in range(3):
        assert f"[rank {rank}] TopologyError: 3 processes (tensor 1 x pipeline 1 x data 3)" in outcome.output


@pytest.mark.parametrize("layout", ["parallel.tensor=1", "parallel.pipeline=2"])
def test_data_error_on_every_rank(data: Path, tmp_path: Path, layout: str) -> None:
    """A sample that only one rank reads stops both, with the same words; in a pipeline one rank reads at all."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    _large_token_ids(copy / "train")
    config = write_config(tmp_path / "tiny.yaml", copy)
    outcome = pretrain(config, tmp_path / "run", layout, processes=2)
    assert outcome.status != 0
    first, second = (
        next(line for line in outcome.output.splitlines() if line.startswith(f"[rank {rank}] DataError"))
        for rank in (0, 1)
    )
    assert first.removeprefix("[rank 0] ") == second.removeprefix("[rank 1] ")


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of `request.param` pages."""
    with small_disk(tmp_path / "disk") as disk:
        disk.resize(request.param)
        yield disk.path


@pytest.mark.parametrize("disk", [300 * 1024 // PAGE], indirect=True)
def test_full_disk_while_saving(config: Path, disk: Path) -> None:
    run_dir = disk / "run"
    _refused(
        pretrain(config, run_dir), 4, "Cannot write a checkpoint", "No space left", "There is no earlier checkpoint"
    )
    assert not list((run_dir / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("disk", [16 * 1024 // PAGE], indirect=True)
@pytest.mark.parametrize("tensorboard", ["true", "false"])
def test_full_disk_while_logging(config: Path, disk: Path, tensorboard: str) -> None:
    """Rank 0 alone writes the log; both ranks stop, before the first checkpoint."""
    outcome = pretrain(config, disk / "run", "checkpoint.every=20", f"logging.tensorboard={tensorboard}", processes=2)
    assert outcome.status != 0
    assert "Exception in thread" not in outcome.output  # of one that writes for TensorBoard
    for rank in (0, 1):
        lines = [line for line in outcome.output.splitlines() if line.startswith(f"[rank {rank}] RunDirError")]
        assert len(lines) == 1
        assert "cannot be written: No space left on device" in lines[0]


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "config.yaml"])
def test_file_that_cannot_be_written(config: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    outcome = pretrain(config, tmp_path / "run", processes=2)
    for rank in (0, 1):
        assert any(
            line.startswith(f"[rank {rank}] RunDirError") and name in line for line in outcome.output.splitlines()
        )


def test_unknown_key_to_allow(config: Path, tmp_path: Path) -> None:
    pretrain(config, tmp_path / "run", "train.stop_step=1").check()
    _refused(pretrain(config, tmp_path / "run", "--allow-config-change", "train.sede"), 2, "train.sede: unknown key")
