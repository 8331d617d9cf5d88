"""Ranks of real runs that start in a moment: forked from a server process that has imported everything once.

Importing torch, megatron-core and DeepSpeed takes most of the time of a short run, and all of it again at each restart.
Each rank is a process of its own which runs `pretrain_fbt.main` with a command line and a launcher's variables.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pretrain_fbt
from fbt_megatron.parallel import topology as _topology  # noqa: F401  imported by `pretrain` in the function, late
from fbt_megatron.training import build as _build  # noqa: F401


class Ranks:
    """The processes of one start of a run."""

    def __init__(self, config: Path, run_dir: Path, *overrides: str, world_size: int, output: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        arguments = ["--config", str(config), f"train.run_dir={run_dir}", *overrides]
        port = free_port()
        self.output = output
        self.processes: list[BaseProcess] = [
            context.Process(target=_main, args=(rank, world_size, port, arguments, str(output)), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def running(self) -> bool:
        """True while every rank is there."""
        return all(process.exitcode is None for process in self.processes)

    def wait(self, seconds: float) -> list[int | None]:
        """Wait for the end of all ranks; their exit statuses, with None for those that are still there."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.join()


def _main(rank: int, world_size: int, port: int, arguments: list[str], output: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(output, "a") as file:  # noqa: PTH123  the descriptor is what counts
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["pretrain_fbt.py", *arguments]
    sys.exit(pretrain_fbt.main())


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
