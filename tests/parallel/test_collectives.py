"""What one rank knows, every rank learns: values, agreements and errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fbt_megatron.errors import CheckpointError, ConfigError, DataError, FBTError
from fbt_megatron.parallel.collectives import (
    agree_on_errors,
    agree_on_rank_zero,
    any_rank_true,
    broadcast_object,
    gather_across,
    gather_objects,
    max_across,
    raise_together,
    sum_across,
)
from tests.distributed import run_distributed

pytestmark = pytest.mark.distributed


def _outcome(action: Callable[[], Any]) -> tuple[str, Any]:
    """The value of an action, or type and message of its error."""
    try:
        return "value", action()
    except FBTError as error:
        return type(error).__name__, str(error)


def _fails_on(failing: int, error: FBTError) -> Callable[[], int]:
    def action() -> int:
        if dist.get_rank() == failing:
            raise error
        return dist.get_rank() + 10

    return action


def _collect_config_error() -> tuple[list[str], int]:
    """What arrives on every rank of an error that only rank 1 raised."""
    try:
        agree_on_errors(_fails_on(1, ConfigError("run.yaml", ["a=1: no.", "b=2: no."])))
    except ConfigError as error:
        return error.problems, error.exit_status
    raise AssertionError("no error arrived")


def _on_each_rank(rank: int) -> dict[str, Any]:
    values = torch.tensor([1.0 + rank, -float(rank)])
    cpu = torch.device("cpu")
    called: list[int] = []
    return {
        "sum": sum_across(values).tolist(),
        "max": max_across(values).tolist(),
        "all": gather_across(values).tolist(),
        "input": values.tolist(),
        "any": [any_rank_true(flag, device=cpu) for flag in (False, rank == 1, True)],
        "gather": gather_objects({"rank": rank}),
        "broadcast": broadcast_object("from 0" if rank == 0 else None),
        "raise nothing": _outcome(lambda: raise_together(None)),
        "raise on 1": _outcome(lambda: raise_together(DataError("shard 7") if rank == 1 else None)),
        "raise on both": _outcome(lambda: raise_together(DataError(f"rank {rank}"))),
        "no error": _outcome(lambda: agree_on_errors(_fails_on(-1, DataError("")))),
        "error on 0": _outcome(lambda: agree_on_errors(_fails_on(0, DataError("first")))),
        "error on 1": _outcome(lambda: agree_on_errors(_fails_on(1, CheckpointError("second")))),
        "zero": _outcome(lambda: agree_on_rank_zero(lambda: (called.append(rank), "made")[1])),
        "called": called,
        "zero none": _outcome(lambda: agree_on_rank_zero(lambda: None)),
        "zero fails": _outcome(lambda: agree_on_rank_zero(_fails_on(0, DataError("rank 0 cannot")))),
        "problems": _collect_config_error(),
        "still together": gather_objects(rank),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(_on_each_rank, 2)


def test_reductions_leave_their_input(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["sum"] == [3.0, -1.0]
        assert found["max"] == [2.0, 0.0]
        assert found["all"] == [[1.0, 0.0], [2.0, -1.0]]
        assert found["input"] == [1.0 + rank, -float(rank)]
        assert found["any"] == [False, True, True]


def test_objects_reach_every_rank_in_rank_order(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["gather"] == [{"rank": 0}, {"rank": 1}]
        assert found["broadcast"] == "from 0"
        assert found["still together"] == [0, 1]


def test_an_error_of_one_rank_is_raised_on_both_in_the_same_words(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["raise nothing"] == ("value", None)
        assert found["raise on 1"] == ("DataError", "shard 7")
        assert found["raise on both"] == ("DataError", "rank 0")


def test_agree_on_errors(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["no error"] == ("value", rank + 10)
        assert found["error on 0"] == ("DataError", "first")
        assert found["error on 1"] == ("CheckpointError", "second")


def test_agree_on_rank_zero_runs_there_alone(ranks: list[dict[str, Any]]) -> None:
    assert [found["called"] for found in ranks] == [[0], []]
    for found in ranks:
        assert found["zero"] == ("value", "made")
        assert found["zero none"] == ("value", None)
        assert found["zero fails"] == ("DataError", "rank 0 cannot")


def test_a_config_error_keeps_its_problems_across_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["problems"] == (["a=1: no.", "b=2: no."], 2)


def test_a_config_error_survives_pickling() -> None:
    error = ConfigError("run.yaml", ["a=1: no.", "b=2: no."])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems, copy.source) == (ConfigError, str(error), error.problems, "run.yaml")
    assert str(copy).startswith("2 problems in run.yaml\n  a=1")
