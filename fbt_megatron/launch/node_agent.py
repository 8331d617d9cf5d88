"""torchrun for one node of a SLURM job: starts the node's processes, hands SIGUSR1 on, keeps their exit status.

srun starts it once per node; MASTER_ADDR and MASTER_PORT say where the nodes meet. torchrun itself has exit status 1
whatever happened, and follows a signal that it hands on by SIGKILL. Run as a file, without the package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
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
    signal.signal(signal.SIGUSR1, _hand_on)
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


def _hand_on(number: int, frame: FrameType | None) -> None:
    """SLURM signals the tasks it started; where it signals their children as well, these get it twice."""
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), number)


if __name__ == "__main__":
    sys.exit(main())
