"""torchrun for one node of a SLURM job: starts the node's processes, hands SIGUSR1 on, keeps their exit status.

srun starts it once per node; MASTER_ADDR and MASTER_PORT say where the nodes meet. torchrun itself has exit status 1
whatever happened, and follows a signal that it hands on by SIGKILL. Run as a file, without the package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(argv: list[str] | None = None) -> int:
    """Run the node's processes to their end; returns the exit status of the one that failed first, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="processes of this node")
    parser.add_argument("script", help="what each process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGUSR1, partial(_hand_on, _faults_of_ended_children()))
    try:
        launch = elastic_launch(_launch_config(arguments.processes), entrypoint=sys.executable)
        launch("-u", arguments.script, *arguments.arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        host = socket.gethostname()
        print(f"[rank {rank} on {host}] ended first, with exit status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def _launch_config(processes: int) -> LaunchConfig:
    """Every node at once, no restarts: what has crashed goes back to SLURM."""
    environment = os.environ
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id=f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        # Said, not guessed from host names, which nodes may have several of.
        rdzv_configs={"is_host": environment["SLURM_NODEID"] == "0"},
        max_restarts=0,
    )


def _hand_on(faults_at_start: int, number: int, frame: FrameType | None) -> None:
    """SLURM signals the tasks it started; where it signals their children as well, these get it twice.

    While the nodes meet there is nobody to tell: the agent then ends as the processes would. After the last of them has
    ended there is nobody to tell either, and their exit status stands.
    """
    children = list(_children())
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
    if not children and _faults_of_ended_children() == faults_at_start:
        with contextlib.suppress(OSError):
            os.write(2, f"[{socket.gethostname()}] told to stop before the processes were started\n".encode())
        os._exit(128 + number)


def _children() -> Iterator[int]:
    """Processes that run, and those that have ended and were not yet waited for."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            yield from map(int, (thread / "children").read_text().split())


def _faults_of_ended_children() -> int:
    """Page faults of all children that were waited for. No process runs without one, so a child makes this grow."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


if __name__ == "__main__":
    sys.exit(main())
