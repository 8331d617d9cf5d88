"""Saves in the background: their own step's values, one at a time, tried again, finished, never silently dropped."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from fbt_megatron.checkpoint import writer as writer_module
from fbt_megatron.checkpoint.background import BackgroundWork, HostCopies
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.errors import CheckpointError
from tests.checkpoint.toy import SHAPES, Cut, Run, share, whole_tensors
from tests.distributed import run_distributed


class Gate:
    """Holds every save before its first shard is written, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        save = writer_module.dcp.save

        def held(*args: Any, **kwargs: Any) -> Any:
            self._reached.set()
            self._open.wait()
            return save(*args, **kwargs)

        patch.setattr(writer_module.dcp, "save", held)

    def open(self) -> None:
        self._open.set()

    def wait_until_reached(self) -> None:
        assert self._reached.wait(60)


@pytest.fixture
def run(process_group: None, tmp_path: Path) -> Run:
    """A run with a checkpoint of step 10."""
    run = Run(tmp_path / "checkpoints", in_background=True)
    run.save(10)
    run.log.clear()
    return run


@pytest.fixture
def gate(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()
    run.manager.close()


def test_training_goes_on_and_the_values_are_those_of_the_step(run: Run, gate: Gate) -> None:
    run.begin_save(20)  # which overwrites the values and the manifest's state as soon as it can
    gate.wait_until_reached()
    assert run.manager.poll() is None
    assert run.log == []
    assert run.names() == {"latest", "step_00000010", "step_00000020.tmp"}
    gate.open()
    run.manager.finish()
    assert run.newest() == 20  # compares the values
    assert run.names() == {"latest", "step_00000010", "step_00000020"}


def test_the_end_of_a_save_is_logged_at_the_next_step(run: Run, gate: Gate) -> None:
    run.begin_save(20)
    work = run.manager._saving
    assert work is not None
    gate.open()
    work.wait()
    assert run.log == []
    assert run.manager.poll() is None
    (line,) = run.log
    assert "step_00000020 | 0.0 MB in " in line
    assert "training stood still" in line
    assert run.manager.poll() is None
    assert len(run.log) == 1


def test_a_new_save_waits_for_the_one_before(run: Run, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are those of the save before: values that were copied too early would be in its files."""
    waits, wait = threading.Event(), BackgroundWork.wait

    def noted_wait(work: BackgroundWork[Any]) -> float:
        waits.set()
        return wait(work)

    monkeypatch.setattr(BackgroundWork, "wait", noted_wait)
    run.begin_save(20)
    gate.wait_until_reached()
    second = threading.Thread(target=run.begin_save, args=(30,))
    second.start()
    assert waits.wait(60)
    second.join(0.2)
    assert second.is_alive()
    gate.open()
    second.join(60)
    run.manager.finish()
    assert run.newest() == 30
    assert run.manager.check_one(run.folder / "step_00000020")[1].state == {"counter": 20}
    assert run.log[0].startswith("waited ")
    assert [line.split()[1][-2:] for line in run.log if line.startswith("checkpoint ")] == ["20", "30"]


def test_loading_waits_for_the_save(run: Run, gate: Gate) -> None:
    run.begin_save(20)
    gate.wait_until_reached()
    threading.Timer(0.1, gate.open).start()
    assert run.newest() == 20


class Failures:
    """The first `count` files of shards cannot be opened."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.left = count
        create = FileSystem.create_stream

        def create_or_fail(*args: Any, **kwargs: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return create(*args, **kwargs)

        patch.setattr(FileSystem, "create_stream", create_or_fail)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_failed_save_is_tried_again_with_the_same_values(
    run: Run, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    Failures(monkeypatch, count)
    run.save(20)
    assert run.newest() == 20
    tries = [line for line in run.log if " try " in line]
    assert [line.split(":")[0] for line in tries] == [
        f"checkpoint of step 20, try {number} of 4" for number in range(1, count + 1)
    ]
    assert all("Input/output error" in line for line in tries)
    assert run.names() == {"latest", "step_00000010", "step_00000020"}


def test_after_all_tries_the_error_is_that_of_a_save_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Failures(monkeypatch, 1000)
    with pytest.raises(CheckpointError) as at_once:
        Run(run.folder).save(20)
    with pytest.raises(CheckpointError) as in_background:
        run.save(20)
    assert str(in_background.value) == str(at_once.value)
    assert "newest complete checkpoint is" in str(at_once.value)
    assert run.names() == {"latest", "step_00000010"}
    monkeypatch.undo()
    assert Run(run.folder).newest() == 10


def test_the_error_waits_for_the_next_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given, not raised: all ranks raise it together."""
    Failures(monkeypatch, 1000)
    run.begin_save(20)
    work = run.manager._saving
    assert work is not None
    work.wait()
    assert isinstance(run.manager.poll(), CheckpointError)
    assert run.manager.poll() is None
    assert len([line for line in run.log if " try " in line]) == 3


def test_an_error_of_this_project_is_raised_with_its_trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(writer_module, "hash_file", broken)
    run.begin_save(20)
    with pytest.raises(ZeroDivisionError) as caught:
        run.manager.finish()
    assert caught.traceback[-1].name == "broken"


def test_leaving_finishes_the_save(run: Run, gate: Gate) -> None:
    run.begin_save(20)
    gate.wait_until_reached()
    threading.Timer(0.1, gate.open).start()
    run.manager.close()
    assert run.names() == {"latest", "step_00000010", "step_00000020"}
    run.manager.close()  # nothing is left to do


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ZeroDivisionError("odd")])
def test_leaving_does_not_hide_why_the_run_ended(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def failing(*args: Any) -> None:
        raise error

    monkeypatch.setattr(writer_module, "hash_file", failing)
    run.begin_save(20)
    run.manager.close()
    assert run.log[-1].startswith("the last checkpoint was not completed: ")
    assert str(error).split("] ")[-1] in run.log[-1]


def test_the_thread_uses_no_gpu_of_another_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0: it goes to that of its rank, and does not wait for what training does there."""
    at_once, chosen = Run(run.folder), []

    def stream(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a stream of the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *on: chosen.append((threading.current_thread().name, *on)))
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    with pytest.raises(CheckpointError, match="a stream of the GPU"):
        at_once.save(20)
    assert chosen == []
    run.save(20)
    assert chosen == [("checkpoint", 3)]
    monkeypatch.undo()
    assert run.newest() == 20


def test_a_pause_ends_when_somebody_waits() -> None:
    work = BackgroundWork(lambda work: work.pause(3600.0))
    assert work.wait() < 3000.0
    assert work.done


def test_notes_come_in_order_and_once() -> None:
    def noting(work: BackgroundWork[int]) -> int:
        for text in "abc":
            work.note(text)
        return 7

    work = BackgroundWork(noting)
    work.wait()
    assert (work.notes(), work.notes(), work.result()) == (["a", "b", "c"], [], 7)


def test_host_copies_use_their_memory_again() -> None:
    copies = HostCopies()
    addresses, cut = [], Cut(SHAPES, share(0, 1))
    for step in (1, 2):
        for (name, start, stop), buffer in cut.buffers.items():
            buffer.copy_(whole_tensors(step)[name].reshape(-1)[start:stop])
        taken = copies.take(cut.shards)
        for buffer in cut.buffers.values():
            buffer.fill_(-1.0)
        for name, values in whole_tensors(step).items():
            parts = torch.cat([view.reshape(-1) for view in taken[name].views()])
            assert torch.equal(parts, values.reshape(-1))
        addresses.append([view.data_ptr() for shard in taken.values() for view in shard.views()])
    assert addresses[0] == addresses[1]


# Two ranks


def _while_training_communicates(rank: int, folder: str) -> dict[str, Any]:
    """Sums over the group of training while a save is written, is tried again, and fails on the other rank."""
    run = Run(Path(folder), rank=rank, world_size=2, in_background=True)
    run.save(10)
    found: dict[str, Any] = {"sums": [], "errors": []}

    def train_until_done(manager: CheckpointManager) -> CheckpointError | None:
        """As a run does: rank 0 learns whether any rank has seen the end, and all leave at the same step."""
        work, step = manager._saving, 0
        assert work is not None
        while True:
            step += 1
            total = torch.tensor([float(step * (rank + 1)), float(work.done)])
            dist.all_reduce(total)
            found["sums"].append(float(total[0]) == 3.0 * step)
            if total[1] == 2.0:
                return manager.poll()

    for step, failures in ((20, 0), (30, 2), (40, 1000)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fbt_megatron.checkpoint.manager._PAUSES_SECONDS", (0.0, 0.0, 0.0))
            if rank == 1:
                Failures(patch, failures)
            run.begin_save(step)
            error = train_until_done(run.manager)
            found["errors"].append(None if error is None else str(error))
            dist.barrier()
    found["log"] = run.log
    found["newest"] = Run(Path(folder), rank=rank, world_size=2).newest()
    return found


@pytest.mark.distributed
def test_two_ranks_save_while_they_train(tmp_path: Path) -> None:
    ranks = run_distributed(_while_training_communicates, 2, str(tmp_path))
    assert ranks[0]["errors"] == ranks[1]["errors"]
    assert ranks[0]["errors"][:2] == [None, None]
    assert "Input/output error" in ranks[0]["errors"][2]
    for found in ranks:
        assert all(found["sums"])
        assert found["newest"] == 30
    tries = [line.split(":")[0] for line in ranks[0]["log"] if " try " in line]
    assert tries == [
        *(f"checkpoint of step 30, try {number} of 4" for number in (1, 2)),
        *(f"checkpoint of step 40, try {number} of 4" for number in (1, 2, 3)),
    ]
