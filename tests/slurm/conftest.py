"""A cluster of two nodes for the tests of this folder, where SLURM is installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.pretrain.conftest import config, data
from tests.slurm.cluster import Cluster, missing_daemons, start_cluster

__all__ = ["cluster", "config", "data"]

REQUIRED = "FBT_REQUIRE_SLURM"
"""Set where daemons do start, so that a mistake in how the tests start them is no skip."""


@pytest.fixture(scope="session")
def _running_cluster() -> Iterator[Cluster]:
    missing = missing_daemons()
    required = bool(os.environ.get(REQUIRED))
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        give_up = pytest.fail if required else pytest.skip
        give_up(f"SLURM is not installed here: {', '.join(missing)} missing (Debian, Ubuntu: {packages})")
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(start_cluster(nodes=2))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            # A machine may have SLURM and still not let its daemons start: no rights, no cgroup file system.
            if required:
                raise
            pytest.skip(f"SLURM's daemons do not start here: {error}")
        yield cluster


@pytest.fixture
def cluster(_running_cluster: Cluster) -> Cluster:
    """The cluster with nothing to do."""
    _running_cluster.wait_idle()
    return _running_cluster
