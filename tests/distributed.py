"""Runs a function on several gloo ranks: started once per call, so put many cases into one function."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PRELOADED = ["fbt_megatron.training.build", "deepspeed", __name__]


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 300.0) -> list[Any]:
    """Results of `fn(rank, *args)` on `world_size` gloo ranks, in rank order.

    `fn` is a module-level function; arguments and results are pickled. An exception in a rank fails the caller with the
    trace of that rank. Ranks have the environment variables that the first call of the session found.
    """
    # Ranks are forked from a server that has done the imports, which take longer than most tests.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    results = context.SimpleQueue()
    port = free_port()
    # No daemons, which could not have reader processes of their own; they end with this process all the same.
    processes = [
        context.Process(target=_rank_main, args=(fn, rank, world_size, port, results, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, timeout_seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(processes: list[Any], results: Any, timeout_seconds: float) -> list[Any]:
    outcomes: dict[int, Any] = {}
    deadline = timeout_seconds
    while len(outcomes) < len(processes):
        if results._reader.poll(0.2):
            rank, ok, value = results.get()
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            outcomes[rank] = pickle.loads(value)
            continue
        deadline -= 0.2
        silent = [
            r
            for r, p in enumerate(processes)
            if r not in outcomes and p.exitcode is not None and not results._reader.poll(0)
        ]
        if silent:
            raise AssertionError(
                f"ranks {silent} ended without a result (exit {[processes[r].exitcode for r in silent]})"
            )
        if deadline < 0:
            raise AssertionError(
                f"no result from ranks {sorted(set(range(len(processes))) - set(outcomes))} in {timeout_seconds} s"
            )
    return [outcomes[rank] for rank in range(len(processes))]


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: tuple[Any, ...]
) -> None:
    _end_with_caller()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        value = fn(rank, *args)
        results.put((rank, True, pickle.dumps(value)))  # tensors as bytes: shared ones end with their process
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_caller() -> None:
    """End this rank as soon as the process that asked the server for it is gone, even if that was killed."""
    caller = mp.parent_process()
    assert caller is not None

    def wait() -> None:
        caller.join()
        os._exit(1)

    threading.Thread(target=wait, name="caller", daemon=True).start()


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
