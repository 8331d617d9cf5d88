"""Checkpoints are complete or invisible: damage, crashes at every stage of a save, retention, failing writes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from fbt_megatron.checkpoint import writer as writer_module
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.errors import CheckpointError
from tests.checkpoint.toy import DAMAGES, Cut, Run
from tests.distributed import run_distributed

FILES = (".metadata", "__0_0.distcp", "manifest.json")


@pytest.fixture(params=[False, True], ids=["at once", "in the background"])
def in_background(request: pytest.FixtureRequest) -> bool:
    """How checkpoints are saved: everything below holds for both."""
    return request.param


@pytest.fixture
def run(process_group: None, tmp_path: Path, in_background: bool) -> Run:
    """A run with checkpoints of steps 10 and 20."""
    run = Run(tmp_path / "checkpoints", in_background=in_background)
    run.save(10)
    run.save(20)
    return run


def test_what_is_saved_is_found(run: Run) -> None:
    assert run.newest() == 20
    assert run.names() == {"latest", "step_00000010", "step_00000020"}
    assert (run.folder / "latest").read_text() == "step_00000020\n"
    assert {path.name for path in (run.folder / "step_00000020").iterdir()} == set(FILES)
    assert run.skipped() == []


def test_the_manifest_and_the_log_of_a_save(run: Run) -> None:
    values: dict[str, Any] = {"state": {"counter": 1}, "config": "a: 1", "versions": {"torch": "2"}}
    tensors = Cut({"m": (512, 512)}, {"m": [(0, 512 * 512)]}, {"m": torch.ones(512, 512)})
    run.manager.save(Manifest(30, files={}, **values), tensors.shards)
    run.manager.finish()
    path = run.folder / "step_00000030"
    manifest = Manifest.read(path)
    assert (manifest.step, manifest.state, manifest.config, manifest.versions) == (30, *values.values())
    stall = ", training stood still [0-9.]+s" if run.manager.config.async_ else ""
    assert re.fullmatch(rf"checkpoint {path} \| 1\.1 MB in [0-9.]+s{stall}", run.log[-1])
    assert len([line for line in run.log if line.startswith("checkpoint ")]) == 3


def test_no_checkpoints(process_group: None, tmp_path: Path) -> None:
    assert Run(tmp_path / "empty").newest() is None
    assert Run(tmp_path / "other").manager.find_newest(tmp_path / "nowhere") is None


def test_going_back_to_a_step(run: Run) -> None:
    """The newest undamaged checkpoint up to a step; what is later is removed, a save in the background included."""

    def newest_up_to(last_step: int) -> int | None:
        found = run.manager.find_newest(run.folder, last_step=last_step)
        return None if found is None else found[1].step

    run.begin_save(30)
    assert [newest_up_to(step) for step in (9, 10, 29, 30, 99)] == [None, 10, 20, 30, 30]
    (run.folder / "step_00000030" / FILES[0]).unlink()
    assert newest_up_to(39) == 20
    run.begin_save(40)
    run.manager.discard_after(20)
    assert run.names() == {"latest", "step_00000020"}
    assert run.newest() == 20
    run.save(20)
    assert (run.folder / "latest").read_text() == "step_00000020\n"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_checkpoint_is_passed_over(run: Run, name: str, damage: str) -> None:
    DAMAGES[damage](run.folder / "step_00000020" / name)
    assert run.newest() == 10
    (line,) = run.skipped()
    assert "step_00000020 skipped" in line
    assert name in line
    with pytest.raises(CheckpointError, match=f"step_00000020 cannot be loaded.*{name}"):
        run.manager.check_one(run.folder / "step_00000020")
    assert run.manager.check_one(run.folder / "step_00000010")[1].step == 10


def test_all_damaged(run: Run) -> None:
    DAMAGES["flipped"](run.folder / "step_00000020" / "__0_0.distcp")
    DAMAGES["removed"](run.folder / "step_00000010" / ".metadata")
    with pytest.raises(CheckpointError) as caught:
        run.newest()
    message = str(caught.value)
    assert "step_00000020: __0_0.distcp has changed" in message
    assert "step_00000010: .metadata cannot be read" in message
    assert "train.run_dir" in message


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"step_0000", b"../../etc", b"step_00000099\n"])
def test_a_missing_or_garbled_pointer(run: Run, content: bytes | None) -> None:
    pointer = run.folder / "latest"
    pointer.unlink()
    if content is not None:
        pointer.write_bytes(content)
    assert run.newest() == 20


def test_the_pointer_decides_after_a_run_went_back(run: Run) -> None:
    run.save(15)
    assert run.newest() == 15
    assert run.names() >= {"step_00000010", "step_00000020"}
    run.save(20, values_of=7)
    assert run.newest() == 20
    assert Manifest.read(run.folder / "step_00000020").state == {"counter": 7}


def test_later_checkpoints_are_the_last_resort(run: Run) -> None:
    run.save(15)
    for step in (10, 15):
        DAMAGES["truncated"](run.folder / f"step_{step:08d}" / "manifest.json")
    assert run.newest() == 20
    assert len(run.skipped()) == 2


def test_a_checkpoint_that_the_pointer_names_and_that_is_gone_is_reported(run: Run) -> None:
    shutil.rmtree(run.folder / "step_00000020")
    assert run.newest() == 10
    (line,) = run.skipped()
    assert "step_00000020 skipped" in line
    assert "manifest.json is missing" in line


def test_saving_a_step_again_replaces_it(run: Run) -> None:
    run.save(20, values_of=5)
    assert run.newest() == 20
    assert Manifest.read(run.folder / "step_00000020").state == {"counter": 5}
    assert run.names() == {"latest", "step_00000010", "step_00000020"}


class Crash(BaseException):
    """The end of a process: nothing catches it."""


def _crash(*args: Any, **kwargs: Any) -> None:
    raise Crash


def _then_crash(action: Callable[..., Any]) -> Callable[..., Any]:
    def crashing(*args: Any, **kwargs: Any) -> None:
        action(*args, **kwargs)
        raise Crash

    return crashing


_rename = Path.rename


def _crash_after_renaming_a_checkpoint(path: Path, target: Path) -> None:
    _rename(path, target)
    if path.name.startswith("step_"):  # torch renames a file of its own before
        raise Crash


STAGES: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "before the shards": (writer_module.dcp, "save", _crash),
    "after the shards": (writer_module, "hash_file", _crash),
    "after the manifest": (Manifest, "write", _then_crash(Manifest.write)),
    "after the first rename": (Path, "rename", _crash_after_renaming_a_checkpoint),
    "after all renames": (writer_module, "sync_folder", _crash),
    "after the pointer": (writer_module, "write_durably", _then_crash(writer_module.write_durably)),
    "in the removal": (writer_module.shutil, "rmtree", _crash),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("step", [20, 30])
def test_a_crash_in_a_save(
    run: Run, in_background: bool, monkeypatch: pytest.MonkeyPatch, stage: str, step: int
) -> None:
    """Step 30 is new, step 20 is there already; keep=1 makes every save remove something."""
    crashing = Run(run.folder, keep=1, in_background=in_background)
    with monkeypatch.context() as patch:
        patch.setattr(*STAGES[stage])
        with pytest.raises(Crash):
            crashing.save(step, values_of=7)
    restarted = Run(run.folder)  # prepares the folder
    newest = restarted.newest()
    assert newest in {20, step}
    if stage in {"after the pointer", "in the removal"}:
        assert newest == step
    assert restarted.skipped() == []
    assert not [name for name in restarted.names() if name.endswith((".tmp", ".old"))]
    restarted.save(step, values_of=8)
    assert restarted.newest() == step
    assert Manifest.read(run.folder / f"step_{step:08d}").state == {"counter": 8}


def test_a_checkpoint_is_readable_by_others_while_its_save_is_unfinished(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing prepares a folder that only `checkpoint.load` names: what a crash left must be ignored."""
    monkeypatch.setattr(*STAGES["after the manifest"])
    with pytest.raises(Crash):
        run.save(30)
    assert run.names() >= {"step_00000030.tmp"}
    assert run.newest() == 20


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(1, None, [6]), (2, None, [5, 6]), (9, None, [1, 2, 3, 4, 5, 6]), (1, 2, [2, 4, 6]), (2, 4, [4, 5, 6])],
)
def test_retention(
    process_group: None, tmp_path: Path, in_background: bool, keep: int, keep_every: int | None, kept: list[int]
) -> None:
    run = Run(tmp_path, keep=keep, keep_every=keep_every, in_background=in_background)
    for step in range(1, 7):
        run.save(step)
    assert run.names() == {"latest", *(f"step_{step:08d}" for step in kept)}


def _complete(folder: Path) -> list[str]:
    """Checkpoints whose manifest names files that are all there, with their sizes; one being replaced counts."""
    found = []
    for path in [*folder.glob("step_????????"), *folder.glob("step_????????.old")]:
        try:
            files = json.loads((path / "manifest.json").read_text())["files"]
            if all((path / name).stat().st_size == record["bytes"] for name, record in files.items()):
                found.append(path.name)
        except FileNotFoundError:
            continue
    return found


def test_there_is_a_complete_checkpoint_at_every_moment(
    process_group: None, tmp_path: Path, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for after every change that the save makes to the folder."""
    run = Run(tmp_path, keep=1, in_background=in_background)
    run.save(1)
    seen: list[int] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            seen.append(len(_complete(tmp_path)))
            return result

        return changing

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    run.save(2)
    run.save(2, values_of=3)  # takes the place of one with the same name
    assert len(seen) >= 16
    assert min(seen) >= 1
    assert _complete(tmp_path) == ["step_00000002"]


def test_what_cannot_be_removed_does_not_stop_the_run(
    run: Run, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(writer_module.shutil, "rmtree", busy)
    Run(run.folder, keep=1, in_background=in_background).save(30)
    assert run.newest() == 30
    monkeypatch.undo()
    assert Run(run.folder).names() == {"latest", "step_00000030"}


def test_a_full_disk_when_the_pointer_moves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the checkpoint from which the next start goes on."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module, "write_durably", full)
    with pytest.raises(CheckpointError, match=r"No space left.*newest complete checkpoint is .*step_00000020\."):
        run.save(30)
    assert run.newest() == 20


def test_a_folder_that_cannot_be_made(process_group: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Cannot write a checkpoint.*Not a directory.*no earlier checkpoint"):
        Run(tmp_path / "file" / "checkpoints")


def _fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save_error(run: Run, step: int, failing: bool, target: tuple[object, str]) -> tuple[str, set[str]]:
    """Message of a save in which this rank fails or not, and what is left in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        if failing:
            patch.setattr(*target, _fail)
        try:
            run.save(step)
        except CheckpointError as error:
            message = str(error)
        else:
            message = "saved"
    dist.barrier()
    names = run.names()
    dist.barrier()
    return message, names


def _on_two_ranks(rank: int, folder: str, in_background: bool) -> dict[str, Any]:
    root = Path(folder)
    run = Run(root / "full", rank=rank, world_size=2, in_background=in_background)
    run.save(10)
    found: dict[str, Any] = {"files": sorted(path.name for path in (run.folder / "step_00000010").iterdir())}
    targets = {"write": (FileSystem, "create_stream"), "hash": (writer_module, "hash_file")}
    for failing_rank in (0, 1):
        for label, target in targets.items():
            found[label, failing_rank] = _save_error(run, 20, rank == failing_rank, target)
    run.save(20)
    found["newest"] = run.newest()
    for name in found["files"]:
        for damage in DAMAGES:
            copy = root / f"{name} {damage}"
            if rank == 0:
                shutil.copytree(run.folder, copy)
                DAMAGES[damage](copy / "step_00000020" / name)
            dist.barrier()
            damaged = Run(copy, rank=rank, world_size=2)
            found["damage", name, damage] = damaged.newest(), damaged.log
    return found


def _both_ways(rank: int, folder: str) -> dict[bool, dict[str, Any]]:
    return {way: _on_two_ranks(rank, f"{folder}/{way}", way) for way in (False, True)}


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> list[dict[bool, dict[str, Any]]]:
    return run_distributed(_both_ways, 2, str(tmp_path_factory.mktemp("ranks")))


@pytest.fixture
def ranks(both_ways: list[dict[bool, dict[str, Any]]], in_background: bool) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return [found[in_background] for found in both_ways]


@pytest.mark.distributed
@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("stage", ["write", "hash"])
def test_a_write_that_fails_on_one_rank(ranks: list[dict[str, Any]], stage: str, failing_rank: int) -> None:
    messages = [found[stage, failing_rank][0] for found in ranks]
    assert messages[0] == messages[1]
    assert "No space left on device" in messages[0]
    assert "step_00000010" in messages[0]
    for found in ranks:
        assert found[stage, failing_rank][1] == {"latest", "step_00000010"}
        assert found["newest"] == 20


@pytest.mark.distributed
def test_damage_of_each_file_of_two_ranks(ranks: list[dict[str, Any]]) -> None:
    files = ranks[0]["files"]
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    for name in files:
        for damage in DAMAGES:
            outcomes = [found["damage", name, damage] for found in ranks]
            assert outcomes[0] == outcomes[1]
            newest, log = outcomes[0]
            assert newest == 10
            assert len(log) == 1
            assert name in log[0]
