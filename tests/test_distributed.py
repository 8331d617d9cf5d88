"""The ranks that tests start are gone when their test is, however it ended."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import run_distributed

ROOT = Path(__file__).parent.parent
WORLD_SIZE = 2
LIMIT_SECONDS = 120.0


def _stay(rank: int, port: int) -> None:
    """Run until the test hangs up."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.recv(1)


def start_ranks(port: int) -> None:
    """Ranks that stay, each with a connection to the port."""
    run_distributed(_stay, WORLD_SIZE, port, timeout_seconds=2 * LIMIT_SECONDS)


@pytest.mark.distributed
def test_ranks_end_with_the_process_that_started_them() -> None:
    """Killed, it can end nobody. A connection ends with its rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_SECONDS)
        program = f"from tests.test_distributed import start_ranks; start_ranks({server.getsockname()[1]})"
        caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        ranks = []
        try:
            ranks = [server.accept()[0] for _ in range(WORLD_SIZE)]
            assert caller.poll() is None
            caller.kill()
            for rank in ranks:
                rank.settimeout(LIMIT_SECONDS)
                assert rank.recv(1) == b""
        finally:
            caller.kill()
            caller.wait()
            for rank in ranks:
                rank.close()
