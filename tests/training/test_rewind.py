"""After too many skipped steps the run goes back, passes over their rows, and is the run that never had them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from fbt_megatron.checkpoint.folder import list_checkpoints
from fbt_megatron.checkpoint.manifest import WEIGHTS, Manifest
from fbt_megatron.config.schema import (
    DataConfig,
    FeedbackConfig,
    ParallelConfig,
    ResilienceConfig,
    RunConfig,
    SchedulePhase,
)
from fbt_megatron.errors import NonFiniteError
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.trainer import Trainer
from tests.distributed import run_distributed
from tests.pretrain.runs import TIMES
from tests.training.tiny_run import GLOBAL_BATCH, read_records, state_of, tiny_run

STEPS = 9
ALONE = 1
"""A batch (counted from 0) that is bad by itself: its step is skipped, and that is all."""
BAD = (4, 5)
"""Batches that are bad in a row: two skipped steps make the run go back to the checkpoint of step 3."""
NOT_COMPARED = ("rewinds", *TIMES)


class KilledError(Exception):
    """Ends a run as a kill would: nothing is saved."""


class BadRows:
    """Makes every gradient of one matrix infinite in steps that train certain rows; notes the bad batches it met."""

    def __init__(self, trainer: Trainer, is_bad: Callable[[int], bool]) -> None:
        self.met: list[int] = []
        self._active = False
        original = trainer._next_batches

        def next_batches() -> Any:
            batches, num_tokens = original()
            found = {row // GLOBAL_BATCH for batch in batches for row in batch.rows.tolist()}
            assert len(found) == 1, "a step trains rows of one batch"
            (batch_number,) = found
            self._active = is_bad(batch_number)
            self.met += [batch_number] * self._active
            return batches, num_tokens

        trainer._next_batches = next_batches
        for name, parameter in trainer.model.named_parameters():
            if name.endswith("linear_fc2.weight"):
                parameter.register_hook(lambda gradient: gradient * math.inf if self._active else gradient)


def run_config(folder: Path, data: Path, **options: Any) -> RunConfig:
    """A run that saves every three steps and goes back after two skipped steps, once."""
    limits = {"max_consecutive_skips": 2, "max_rewinds": 1, "spikes": "skip"} | options.pop("limits", {})
    config = tiny_run(folder, data, mix={1: 0.5, 2: 0.5}, steps=STEPS, **options)
    checkpoint = replace(config.checkpoint, every=3)
    return replace(config, checkpoint=checkpoint, resilience=ResilienceConfig(**limits))


def summary(trainer: Trainer) -> dict[str, Any]:
    """All that a run is at its end, on this rank."""
    loader = {} if trainer.loader is None else trainer.loader.state_dict()
    return {
        "tensors": {name: value.numpy().tobytes() for name, value in _plain(state_of(trainer)).items()},
        "updates": trainer.engine.optimizer.counters(),
        "data": {name: value for name, value in loader.items() if name != "passed_over"},
        "windows": trainer.spikes.state_dict(),
        "counters": trainer.counters.as_dict() | {"rewinds": 0},
    }


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}


def train(
    config: RunConfig,
    topology: ParallelTopology,
    *,
    is_bad: Callable[[int], bool],
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> dict[str, Any]:
    """Train to the end (or to a `KilledError`): summary, bad batches that were met, rewinds."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        rows = BadRows(trainer, is_bad)
        prepare(trainer)
        try:
            trainer.train(StopSignal())
        except KilledError:
            return {"met": rows.met}
        return summary(trainer) | {"met": rows.met, "rewinds": trainer.counters.rewinds}


def in_bad_batches(batch: int) -> bool:
    """Bad by itself or in a row."""
    return batch == ALONE or batch in BAD


def without_bad_batches(config: RunConfig, topology: ParallelTopology) -> dict[str, Any]:
    """A run that never goes back: what reads its data leaves the bad batches in a row out."""

    def leave_out(trainer: Trainer) -> None:
        if trainer.loader is None:
            return
        original, given = trainer.loader.next_step, [0]

        def next_step() -> Any:
            if given[0] == BAD[0]:
                for _ in BAD:
                    original()
            given[0] += 1
            return original()

        trainer.loader.next_step = next_step

    limits = replace(config.resilience, max_rewinds=0)
    return train(replace(config, resilience=limits), topology, is_bad=lambda batch: batch == ALONE, prepare=leave_out)


def rewound_and_reference(folder: Path, data: Path, topology: ParallelTopology, **options: Any) -> dict[str, Any]:
    """The run that goes back, the one that leaves the batches out, and the first one killed after it went back."""
    rewound = run_config(folder / "rewound", data, **options)
    reference = run_config(folder / "reference", data, **options)
    killed = run_config(folder / "killed", data, **options)
    found = {
        "rewound": train(rewound, topology, is_bad=in_bad_batches),
        "reference": without_bad_batches(reference, topology),
    }
    steps_seen: list[int] = []
    found["first part"] = train(
        killed, topology, is_bad=in_bad_batches, prepare=lambda trainer: _kill_after_rewind(trainer, steps_seen)
    )
    found["killed"] = train(killed, topology, is_bad=in_bad_batches)
    return found


def _kill_after_rewind(trainer: Trainer, steps_seen: list[int]) -> None:
    """Kill when step 5 comes by for the second time, before the next checkpoint."""
    original = trainer.metrics.step

    def log(record: Any) -> None:
        steps_seen.append(record.step)
        if steps_seen.count(5) == 2:
            raise KilledError
        original(record)

    trainer.metrics.step = log


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` without what may differ."""
    return [{key: value for key, value in record.items() if key not in NOT_COMPARED} for record in read_records(folder)]


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, on one rank."""
    for part in ("updates", "data", "windows", "counters"):
        assert found[part] == expected[part], part
    assert found["tensors"].keys() == expected["tensors"].keys()
    assert not [name for name, value in expected["tensors"].items() if found["tensors"][name] != value]


def check(folder: Path, ranks: list[dict[str, Any]]) -> None:
    """What `rewound_and_reference` has to find."""
    for found in ranks:
        assert found["rewound"]["met"] == [ALONE, *BAD]
        assert found["rewound"]["rewinds"] == 1
        assert found["reference"]["met"] == [ALONE]
        assert_same_run(found["rewound"], found["reference"])
        assert found["first part"]["met"] == [ALONE, *BAD]
        assert found["killed"]["met"] == [], "a start after the rewind met rows that are passed over"
        assert found["killed"]["rewinds"] == 1
        assert_same_run(found["killed"], found["reference"])
    expected = records(folder / "reference")
    assert [record["step"] for record in expected] == list(range(1, STEPS + 1))
    assert [record["skipped_steps"] for record in expected] == [0, *[1] * (STEPS - 1)]
    for name in ("rewound", "killed"):
        assert records(folder / name) == expected
        assert [record["rewinds"] for record in read_records(folder / name)] == [0] * 3 + [1] * (STEPS - 3)
        log = (folder / name / "log.txt").read_text()
        assert log.count("rewind 1 of at most 1: back to ") == 1
        assert "step_00000003 after 2 skipped steps in a row, up to step 6; rows 32 to 47 are passed over" in log
        assert "step 5 (skipped) read row 32: " in log


@pytest.fixture(scope="module")
def reference(topology, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the run that leaves the batches out, on one rank."""
    return without_bad_batches(run_config(tmp_path_factory.mktemp("reference"), data), topology)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 0}, {"precision": "bf16"}], ids=["zero", "plain", "bf16"])
def test_a_rewound_run_is_the_run_without_the_rows(topology, data: Path, tmp_path: Path, options: dict) -> None:
    check(tmp_path, [rewound_and_reference(tmp_path, data, topology, **options)])


def test_readers_pass_over_the_same_rows(topology, data: Path, tmp_path: Path, reference: dict) -> None:
    config = run_config(tmp_path / "rewound", data)
    found = train(replace(config, data=replace(config.data, workers=2)), topology, is_bad=in_bad_batches)
    assert_same_run(found, reference)


def test_saves_in_the_background(topology, data: Path, tmp_path: Path, reference: dict) -> None:
    """The run goes back to a checkpoint whose save may not have ended, and writes it again."""
    config = run_config(tmp_path, data)
    found = train(replace(config, checkpoint=replace(config.checkpoint, async_=True)), topology, is_bad=in_bad_batches)
    assert found["met"] == [ALONE, *BAD]
    assert_same_run(found, reference)
    assert [step for step, _ in list_checkpoints(tmp_path / "checkpoints")] == [9, 6, 3]


def test_a_kill_while_going_back(topology, data: Path, tmp_path: Path, reference: dict) -> None:
    """The checkpoint that knows of the rows is not written yet: the next start meets them and goes back again."""
    config = run_config(tmp_path / "killed", data)

    def fail_to_save(trainer: Trainer) -> None:
        original = trainer.save

        def save() -> None:
            if trainer.counters.rewinds:
                raise KilledError
            original()

        trainer.save = save

    assert train(config, topology, is_bad=in_bad_batches, prepare=fail_to_save)["met"] == [ALONE, *BAD]
    found = train(config, topology, is_bad=in_bad_batches)
    assert found["met"] == list(BAD)
    assert_same_run(found, reference)


def test_a_stop_between_the_skipped_steps(topology, data: Path, tmp_path: Path, reference: dict) -> None:
    """The checkpoint of the stop lies between them: the run goes back behind it, and removes it."""
    config = run_config(tmp_path / "stopped", data)
    train(replace(config, train=replace(config.train, stop_step=5)), topology, is_bad=in_bad_batches)
    steps = [step for step, _ in list_checkpoints(tmp_path / "stopped" / "checkpoints")]
    assert steps == [5, 3, 0]
    found = train(config, topology, is_bad=in_bad_batches)
    assert found["met"] == [BAD[1]]
    assert_same_run(found, reference)
    assert [step for step, _ in list_checkpoints(tmp_path / "stopped" / "checkpoints")] == [9, 6, 3]


def test_bad_rows_at_the_very_beginning(topology, data: Path, tmp_path: Path) -> None:
    """There is a checkpoint of step 0; its validation is in the metrics once."""
    config = run_config(tmp_path, data)
    config = replace(config, data=DataConfig(train=str(data), validation=str(data), streams=4))
    found = train(config, topology, is_bad=lambda batch: batch < 2)
    assert found["met"] == [0, 1]
    assert found["rewinds"] == 1
    lines = [(record.get("kind"), record["step"]) for record in read_records(tmp_path)]
    steps = [(None, step) for step in range(1, STEPS + 1)]
    assert lines == [("validation", 0), *steps, ("validation", STEPS)]


def test_the_checkpoint_keeps_the_rows(topology, data: Path, tmp_path: Path) -> None:
    """And the list of samples does not have them."""
    config = run_config(tmp_path, data)
    train(replace(config, logging=replace(config.logging, samples=True)), topology, is_bad=in_bad_batches)
    samples = [json.loads(line) for line in (tmp_path / "samples" / "rank_00000.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == list(range(1, STEPS + 1))
    assert [int(row) for line in samples for row in line["rows"]] == [*range(32), *range(48, 88)]
    manifest = Manifest.read(tmp_path / "checkpoints" / "step_00000009")
    assert manifest.state["data"]["passed_over"] == [[8, 12]]  # of four streams, two cycles to a batch
    assert manifest.state["data"]["cycle"] == 2 * (STEPS + len(BAD))
    assert manifest.state["counters"]["rewinds"] == 1


def test_a_second_time_is_one_too_many(topology, data: Path, tmp_path: Path) -> None:
    config = run_config(tmp_path, data)
    with pytest.raises(NonFiniteError, match=r"in 2 steps in a row, up to step 7 .*resilience.max_rewinds=1") as caught:
        train(config, topology, is_bad=lambda batch: batch in (4, 5, 7, 8))
    assert caught.value.exit_status == 5
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_the_second_rewind_passes_over_the_rows_of_both(topology, data: Path, tmp_path: Path) -> None:
    config = run_config(tmp_path, data, limits={"max_rewinds": 2})
    found = train(config, topology, is_bad=lambda batch: batch in (4, 5, 7, 8))
    assert found["met"] == [4, 5, 7, 8]
    assert found["rewinds"] == 2
    manifest = Manifest.read(tmp_path / "checkpoints" / "step_00000009")
    assert manifest.state["data"]["passed_over"] == [[8, 12], [14, 18]]


def test_no_checkpoint_from_before_is_left(topology, data: Path, tmp_path: Path) -> None:
    config = run_config(tmp_path, data)

    def lose_checkpoints(trainer: Trainer) -> None:
        original = trainer.checkpoints.find_newest
        trainer.checkpoints.find_newest = lambda folder, **options: original(folder / "nowhere", **options)

    with pytest.raises(NonFiniteError, match=r"no checkpoint of step 4 or before is left to go back to"):
        train(config, topology, is_bad=in_bad_batches, prepare=lose_checkpoints)


# Two ranks


def _on_two_ranks(rank: int, folder: str, data: str) -> dict[str, Any]:
    found = {}
    for axis in ("data", "pipeline"):
        parallel = ParallelConfig(pipeline=2) if axis == "pipeline" else ParallelConfig()
        topology = build_topology(parallel)
        found[axis] = rewound_and_reference(Path(folder) / axis, Path(data), topology, pipeline=parallel.pipeline)
        parallel_state.destroy_model_parallel()  # another layout in the same processes
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two ranks")
    return folder, run_distributed(_on_two_ranks, 2, str(folder), str(data))


@pytest.mark.distributed
@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_two_ranks_go_back_together(two_ranks: tuple[Path, list[dict[str, Any]]], axis: str) -> None:
    folder, ranks = two_ranks
    check(folder / axis, [found[axis] for found in ranks])


@pytest.mark.parametrize("start", ["late feedback", "weights alone"])
def test_a_start_that_lacks_a_part_is_saved_whole(
    tmp_path: Path, data: Path, topology: ParallelTopology, start: str
) -> None:
    """The checkpoint that such a run finds in its folder is none to go back to: it has no fusion, or no optimizer."""
    run = run_config(tmp_path / "run", data)
    begun = replace(run, train=replace(run.train, stop_step=3))
    if start == "late feedback":
        plain = FeedbackConfig(fusion="none", schedule=(SchedulePhase(1.0, {1: 1.0}),))
        train(replace(begun, feedback=plain), topology, is_bad=lambda batch: False)
        late = (SchedulePhase(3, {1: 1.0}), SchedulePhase(1.0, {2: 1.0}))
        run = replace(run, feedback=FeedbackConfig(schedule=late))
    else:
        train(begun, topology, is_bad=lambda batch: False)
        (folder,) = [path for step, path in list_checkpoints(tmp_path / "run" / "checkpoints") if step == 3]
        for _, other in list_checkpoints(folder.parent):
            if other != folder:
                shutil.rmtree(other)
        replace(Manifest.read(folder), contents=WEIGHTS).write(folder)
    found = train(run, topology, is_bad=lambda batch: batch in (3, 4))
    assert found["met"] == [3, 4]
    assert found["rewinds"] == 1
    assert found["counters"]["step"] == STEPS
