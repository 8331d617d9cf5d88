"""Three ranks of which one fails: what each prints, how it exits, and that none waits for ever."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron import activity
from fbt_megatron.config.schema import ResilienceConfig
from fbt_megatron.training.failure import is_lost_connection
from fbt_megatron.training.watchdog import collective_timeout
from tests.pretrain.runs import ROOT, environment
from tests.training.faulty_ranks import LIMIT_SECONDS, SUSPENDED_SECONDS, End

HOST = socket.gethostname()
CULPRITS = pytest.mark.parametrize("culprit", [0, 1])


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `faulty_ranks` prints."""
    command = [sys.executable, "-m", "tests.training.faulty_ranks"]
    # pretrain_fbt.py sets the same log level.
    variables = environment(TORCH_CPP_LOG_LEVEL="ERROR")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=400.0)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def ends(report: dict[str, Any]) -> dict[str, list[End]]:
    """How the three ranks of each case ended."""
    return {name: [End(**end) for end in of] for name, of in report["ends"].items()}


def _statuses(ends: list[End], culprit: int) -> tuple[int, list[int]]:
    """Exit status of the culprit and of the others."""
    return ends[culprit].status, [end.status for rank, end in enumerate(ends) if rank != culprit]


pytestmark = pytest.mark.distributed


def test_a_good_end(ends: dict[str, list[End]]) -> None:
    assert [(end.status, end.output) for end in ends["none-0"]] == [(0, "")] * 3


@CULPRITS
def test_a_killed_rank_ends_the_others_with_one_line_that_names_it(ends: dict[str, list[End]], culprit: int) -> None:
    found = ends[f"killed-{culprit}"]
    assert _statuses(found, culprit) == (-signal.SIGKILL, [7, 7])
    gone = f"rank {culprit} on {HOST} has ended without a word"
    if culprit == 0:
        gone = "the connection to the other ranks broke, and the process where all met is gone"
    for rank, end in enumerate(found):
        if rank != culprit:
            (line,) = end.output.splitlines()
            assert line.startswith(f"[rank {rank}] PeerError: {gone}")
            assert "This rank was in: step 3, waiting in sum_across" in line


@CULPRITS
def test_an_unexpected_exception_ends_all(ends: dict[str, list[End]], culprit: int) -> None:
    """The trace is printed where it happened, with rank and host; the others say who failed and how."""
    found = ends[f"bug-{culprit}"]
    assert _statuses(found, culprit) == (1, [7, 7])
    trace = found[culprit].output.splitlines()
    assert trace[0] == f"[rank {culprit}] on {HOST}: Traceback (most recent call last):"
    assert trace[-1] == f"[rank {culprit}] KeyError: 'a fault of this program'"
    for rank, end in enumerate(found):
        if rank != culprit:
            (line,) = end.output.splitlines()
            expected = f"rank {culprit} on {HOST} has ended the run: KeyError: 'a fault of this program'."
            assert line.startswith(f"[rank {rank}] PeerError: {expected}")


@CULPRITS
def test_an_error_of_one_rank_alone_ends_all(ends: dict[str, list[End]], culprit: int) -> None:
    found = ends[f"alone-{culprit}"]
    assert _statuses(found, culprit) == (3, [7, 7])
    assert found[culprit].output == f"[rank {culprit}] DataError: a shard is gone.\n"
    for rank, end in enumerate(found):
        if rank != culprit:
            (line,) = end.output.splitlines()
            assert f"PeerError: rank {culprit} on {HOST} has ended the run: DataError: a shard is gone." in line


def test_an_error_that_all_ranks_know_of_stays_what_it_is(ends: dict[str, list[End]]) -> None:
    found = [(end.status, end.output) for end in ends["together-1"]]
    assert found == [(3, f"[rank {rank}] DataError: a shard is gone.\n") for rank in range(3)]


def test_a_rank_that_stands_still_is_shown_with_its_stack(ends: dict[str, list[End]]) -> None:
    found = ends["stuck-1"]
    assert [end.status for end in found] == [6, 6, 6]
    for rank, end in enumerate(found):
        place = "step 3, reading its batches" if rank == 1 else "step 3, waiting in sum_across"
        assert f"[rank {rank}] the run stands still; this rank, on {HOST}, is in: {place}. Its threads:" in end.output
        assert f"[rank {rank}] HangError: rank " in end.output
        assert "no progress for 6 s (resilience.hang_timeout_seconds)." in end.output
        assert "Current thread" in end.output
    assert "in _read_for_ever" in found[1].output
    assert "in sum_across" in found[0].output
    summaries = [end.output for end in found if "Where the ranks are" in end.output]
    assert summaries
    for summary in summaries:
        lines = [line.split("] ", 1)[1] for line in summary.splitlines()]
        first = lines.index("Where the ranks are, those to look at first:")
        assert lines[first + 1].startswith("  rank 1: step 3, reading its batches")
        assert lines[first + 2].startswith("  ranks 0, 2: step 3, waiting in sum_across")


@CULPRITS
def test_a_rank_that_cannot_even_report_is_named(ends: dict[str, list[End]], culprit: int) -> None:
    """Stopped: no thread of it runs. The first rank holds the store, so without it nobody can compare."""
    found = ends[f"stopped-{culprit}"]
    assert _statuses(found, culprit) == (-signal.SIGKILL, [6, 6])
    others = [end.output for rank, end in enumerate(found) if rank != culprit]
    assert all("is in: step 3, waiting in sum_across. Its threads:" in output for output in others)
    if culprit == 1:
        assert any(f"  rank 1 on {HOST}: no answer (killed, stopped, or node lost)" in output for output in others)
    else:
        assert all("the process where they met, rank 0 or torchrun, does not answer" in output for output in others)


def test_the_last_collectives_are_kept(report: dict[str, Any]) -> None:
    traces = report["traces"]["stuck-1"]
    assert sorted(traces) == ["trace_0.json", "trace_1.json", "trace_2.json"]
    for rank in range(3):
        last = json.loads(traces[f"trace_{rank}.json"])["entries"][-1]
        assert last["profiling_name"] == "gloo:all_reduce"
        assert last["collective_seq_id"] == (2 if rank == 1 else 3)
    assert report["traces"]["bug-1"] == {}


def test_a_suspended_run_has_not_stood_still(ends: dict[str, list[End]]) -> None:
    found = ends["suspended-1"]
    assert [(end.status, end.output) for end in found] == [(0, "")] * 3
    assert all(end.seconds > SUSPENDED_SECONDS for end in found)


def test_nobody_waits_for_a_timeout_of_torch(ends: dict[str, list[End]]) -> None:
    assert all(end.seconds < LIMIT_SECONDS / 2 for of in ends.values() for end in of)


STANDS_STILL = """
import time
from pathlib import Path
from fbt_megatron import activity
from fbt_megatron.parallel.launcher import ALONE
from fbt_megatron.training.watchdog import Watchdog
Watchdog(ALONE, hang_timeout=1.0, roll_call=None, trace_folder=Path("none")).start()
for _ in range(20):
    activity.advance("working")
    time.sleep(0.1)
activity.begin("step 7")
time.sleep(300.0)
"""


def test_a_process_on_its_own_that_stands_still() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STANDS_STILL], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 6
    assert 3.0 < time.monotonic() - start < 200.0
    assert f"the run stands still; this rank, on {HOST}, is in: step 7. Its threads:" in done.stderr
    assert "HangError: rank 0" in done.stderr


def test_a_process_that_nobody_can_hear_ends_as_well() -> None:
    with Path("/dev/full").open("wb") as full:  # every write to it finds a full disk
        done = subprocess.run([sys.executable, "-c", STANDS_STILL], cwd=ROOT, env=environment(), stderr=full)
    assert done.returncode == 6


UNHEARD = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from fbt_megatron.parallel.launcher import Launch
from fbt_megatron.parallel.roll_call import RollCall
from fbt_megatron.training.failure import leave
from fbt_megatron.training.watchdog import Watchdog
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
other, own = (RollCall(store, rank=rank, world_size=2) for rank in range(2))
launch = Launch("torchrun", world_size=2, rank=1, local_rank=1, address="127.0.0.1", port=store.port)
watchdog = Watchdog(launch, hang_timeout=None, roll_call=own, trace_folder=Path("none"))
watchdog.start()
print("a line that is still in the buffer of standard output")
status = leave(KeyError("odd"), watchdog)
Path(sys.argv[1]).write_text(other.heard().text)
os._exit(status)
"""


def test_a_failure_that_cannot_be_printed_is_told_to_the_others(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    with Path("/dev/full").open("wb") as full:  # every write to it finds a full disk
        command = [sys.executable, "-c", UNHEARD, str(heard)]
        variables = environment(PYTHONUNBUFFERED="")
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=full, stderr=full)
    assert (done.returncode, heard.read_text()) == (1, "KeyError: 'odd'.")


def test_torch_gives_up_later_than_the_watchdog() -> None:
    assert collective_timeout(ResilienceConfig(hang_timeout_seconds=None)) == 1800.0
    assert collective_timeout(ResilienceConfig(hang_timeout_seconds=60.0)) == 1800.0
    assert collective_timeout(ResilienceConfig(hang_timeout_seconds=3600.0)) == 3900.0


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:46798. GLHF!", True),
        ("[/gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:1: Connection reset by peer", True),
        ("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited (ncclRemoteError: ...)", True),
        ("[/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_which_errors_mean_that_a_peer_is_gone(message: str, lost: bool) -> None:
    assert is_lost_connection(RuntimeError(message)) == lost
    assert not is_lost_connection(ValueError(message))


def test_the_activity_in_words() -> None:
    activity.begin("step 12, update")
    assert activity.describe() == "step 12, update"
    with activity.communicating("sum_across"):
        assert activity.describe() == "step 12, update, waiting in sum_across"
    activity.advance("half")
    assert activity.describe() == "step 12, update, half, after sum_across"
    with pytest.raises(RuntimeError), activity.communicating("max_across"):
        raise RuntimeError
    assert activity.describe() == "step 12, update, half, waiting in max_across"
    activity.begin("step 13")
    assert activity.describe() == "step 13"
