"""The topology of one process, which DeepSpeed and megatron-core need even alone, and data for tiny runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from fbt_megatron.parallel.topology import ParallelTopology
from tests.one_process import one_process
from tests.training.tiny_run import write_data


@pytest.fixture(scope="module")
def topology() -> Iterator[ParallelTopology]:
    """One rank; torch.distributed runs while the module's tests do."""
    with one_process() as topology:
        gc.freeze()  # DeepSpeed collects garbage several times per engine: what was imported is not looked at again
        yield topology
        gc.unfreeze()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training data of `tiny_run`."""
    return write_data(tmp_path_factory.mktemp("data") / "train")
