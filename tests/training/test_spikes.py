"""Spikes: which numbers stand out, what happens to their step on every rank, and that a resume forgets nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fbt_megatron.config.schema import ParallelConfig, ResilienceConfig, RunConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.spikes import FEWEST, WINDOW, SpikeDetector
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.trainer import Trainer
from tests.distributed import run_distributed
from tests.training.tiny_run import read_records, state_of, tiny_run
from tests.training.toy import COMBINATIONS

CPU = torch.device("cpu")
EVEN, ODD = 2.0, 4.0
"""Numbers of even and odd steps: mean 3, standard deviation a little above 1."""


def trained(factor: float = 6.0, *, num_steps: int = WINDOW, num_passes: int = 1) -> SpikeDetector:
    """A detector after steps whose numbers are all `EVEN` and `ODD` in turn."""
    detector = SpikeDetector(factor)
    for step in range(num_steps):
        value = ODD if step % 2 else EVEN
        assert detector.judge([value] * num_passes, value, device=CPU) == []
    return detector


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (8.9, 8.9, []),
        (9.1, 3.0, ["loss_pass_1"]),
        (3.0, 9.1, ["grad_norm_1"]),
        (9.1, 9.1, ["loss_pass_1", "grad_norm_1"]),
        (math.inf, 3.0, ["loss_pass_1"]),
        (math.nan, 3.0, ["loss_pass_1"]),
        (-100.0, 0.0, []),  # a fall is none
    ],
)
def test_more_than_six_deviations_above_the_mean(topology, loss: float, norm: float, expected: list[str]) -> None:
    found = trained().judge([loss], norm, device=CPU)
    assert [text.split()[0] for text in found] == expected


def test_the_text_of_a_spike(topology) -> None:
    (text,) = trained(2.0).judge([3.0], 12.5, device=CPU)
    assert text == "grad_norm_1 12.5 above 5.008 (mean 3 of 128 steps)"


def test_the_factor(topology) -> None:
    assert trained(5.0).judge([8.1], 3.0, device=CPU)
    assert not trained(5.2).judge([8.1], 3.0, device=CPU)


def test_nothing_is_judged_before_half_a_window(topology) -> None:
    assert trained(num_steps=FEWEST - 1).judge([1e9], 1e9, device=CPU) == []
    assert trained(num_steps=FEWEST).judge([1e9], 1e9, device=CPU) != []
    assert trained(num_steps=0).judge([math.nan], 1.0, device=CPU) == ["loss_pass_1 is not finite"]


def test_numbers_are_compared_with_their_own_kind(topology) -> None:
    """The gradient of a step of two passes is no spike among those of one pass; its first pass is compared."""
    detector = trained(num_passes=1)
    assert detector.judge([3.0, 50.0], 50.0, device=CPU) == []
    (text,) = detector.judge([50.0, 50.0], 50.0, device=CPU)
    assert text.startswith("loss_pass_1 ")


def test_a_level_that_lasts_is_soon_normal(topology) -> None:
    detector = trained()
    spikes = [bool(detector.judge([3.0], 50.0, device=CPU)) for _ in range(10)]
    assert spikes[:2] == [True, True]
    assert not any(spikes[5:])


def test_rounding_is_no_spike(topology) -> None:
    """All steps alike: the standard deviation is 0, or what rounding leaves of it."""
    detector = SpikeDetector(6.0)
    for _ in range(WINDOW):
        assert detector.judge([0.1], 0.3, device=CPU) == []
    assert detector.judge([0.1 * (1 + 5e-3)], 0.3, device=CPU) == []
    assert detector.judge([0.1 * (1 + 7e-3)], 0.3, device=CPU) != []


def test_the_window_forgets(topology) -> None:
    detector = trained()
    for _ in range(WINDOW):
        detector.judge([100.0], 100.0, device=CPU)
    assert detector.state_dict() == {"loss_pass_1": [100.0] * WINDOW, "grad_norm_1": [100.0] * WINDOW}


def test_a_restored_detector_judges_alike(topology) -> None:
    detector, other = trained(num_passes=2), SpikeDetector(6.0)
    other.load_state_dict(detector.state_dict())
    for value in (3.0, 8.0, 9.5, 9.5, 9.5, 30.0):
        losses = [value, value / 3]
        assert other.judge(losses, value, device=CPU) == detector.judge(losses, value, device=CPU)
    assert other.state_dict() == detector.state_dict()


# In a run


class Amplifier:
    """Makes the gradient of one parameter on this rank 100,000 times as large, while it is active."""

    def __init__(self, trainer: Trainer, *, here: bool) -> None:
        self.active = False
        parameter = next(p for name, p in trainer.model.named_parameters() if name.endswith("linear_fc2.weight"))
        if here:
            parameter.register_hook(lambda gradient: gradient * 1e5 if self.active else gradient)


def remember_steps_like(trainer: Trainer, record: Any) -> None:
    """As if 64 steps like one that was trained had gone before."""
    spread = [0.9 + 0.2 * step / (FEWEST - 1) for step in range(FEWEST)]
    values = {f"loss_pass_{k}": loss for k, loss in enumerate(record.losses, start=1)}
    values[f"grad_norm_{record.passes}"] = record.grad_norm
    trainer.spikes.load_state_dict({name: [value * part for part in spread] for name, value in values.items()})


def second_step_is_a_spike(config: RunConfig, topology: ParallelTopology) -> dict[str, Any]:
    """Three steps, the second with a large gradient on the last rank."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        amplifier = Amplifier(trainer, here=topology.rank == topology.world_size - 1)
        first = trainer.train_step()
        trainer.metrics.step(first)
        remember_steps_like(trainer, first)
        before, updates = state_of(trainer), trainer.engine.optimizer.counters()
        amplifier.active = True
        trainer.metrics.step(trainer.train_step())
        amplifier.active = False
        middle, windows = state_of(trainer), trainer.spikes.state_dict()
        found = {
            "changed": [name for name, value in before.items() if not torch.equal(middle[name], value)],
            "updates": trainer.engine.optimizer.counters()["adam"] - updates["adam"],
            "windows": {name: len(values) for name, values in windows.items()},
        }
        trainer.metrics.step(trainer.train_step())
        after = state_of(trainer)
        return found | {
            "counters": trainer.counters.as_dict(),
            "changed by the third": any(not torch.equal(after[name], value) for name, value in middle.items()),
        }


def check_spike(folder: Path, ranks: list[dict[str, Any]], policy: str) -> None:
    """What `second_step_is_a_spike` has to find on every rank, and in the metrics and the log."""
    skipped, spikes = int(policy == "skip"), int(policy != "ignore")
    for found in ranks:
        assert bool(found["changed"]) == (not skipped), found["changed"]
        assert found["updates"] == 1 - skipped
        expected = FEWEST + 1 if spikes else FEWEST
        assert found["windows"] == {"loss_pass_1": expected, "loss_pass_2": expected, "grad_norm_2": expected}
        assert found["counters"]["skipped_steps"] == skipped
        assert found["counters"]["spikes"] == spikes
        assert found["counters"]["consecutive_skips"] == 0
        assert found["changed by the third"]
    first, second, third = read_records(folder)
    assert second["grad_norm"] > 100 * first["grad_norm"]
    assert [record["spikes"] for record in (first, second, third)] == [0, spikes, spikes]
    assert [record["skipped_steps"] for record in (first, second, third)] == [0, skipped, skipped]
    log = (folder / "log.txt").read_text()
    assert (f"step 2 ({'skipped' if skipped else 'spike'}) read row 8: " in log) == bool(spikes)
    assert ("step 2: spike, grad_norm_2 " in log) == bool(spikes)


@pytest.mark.parametrize("policy", ["ignore", "report", "skip"])
def test_a_spike_is_ignored_reported_or_skipped(topology, data: Path, tmp_path: Path, policy: str) -> None:
    config = replace(tiny_run(tmp_path, data, mix={2: 1.0}), resilience=ResilienceConfig(spikes=policy))
    check_spike(tmp_path, [second_step_is_a_spike(config, topology)], policy)


def test_spikes_in_a_row_end_the_run(topology, data: Path, tmp_path: Path) -> None:
    """`max_consecutive_skips` counts them like steps without a finite gradient."""
    limits = ResilienceConfig(spikes="skip", max_consecutive_skips=2)
    config = replace(tiny_run(tmp_path, data, mix={1: 1.0}), resilience=limits)
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        amplifier = Amplifier(trainer, here=True)
        remember_steps_like(trainer, trainer.train_step())
        amplifier.active = True
        with pytest.raises(Exception, match=r"or a spike .* in 2 steps in a row, up to step 3 "):
            trainer.train(StopSignal())


def test_a_resumed_run_remembers_the_steps_before(topology, data: Path, tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "straight", data, mix={1: 0.5, 2: 0.5}, steps=6)
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        trainer.train(StopSignal())
        expected = trainer.spikes.state_dict()
    stopped = replace(config, train=replace(config.train, run_dir=str(tmp_path / "stopped"), stop_step=3))
    for part in (stopped, replace(stopped, train=replace(stopped.train, stop_step=None))):
        with open_trainer(part, topology, allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
            found = trainer.spikes.state_dict()
    assert found == expected
    assert {name: len(values) for name, values in found.items()} == {
        "loss_pass_1": 6,
        "loss_pass_2": 3,
        "grad_norm_1": 3,
        "grad_norm_2": 3,
    }


def test_windows_that_were_not_kept_up_are_no_measure(topology, data: Path, tmp_path: Path) -> None:
    config = tiny_run(tmp_path, data, mix={1: 1.0}, steps=6)
    for spikes, stop_step, kept in (("report", 2, 2), ("ignore", 4, 0), ("report", 6, 2)):
        part = replace(
            config, train=replace(config.train, stop_step=stop_step), resilience=ResilienceConfig(spikes=spikes)
        )
        with open_trainer(part, topology, allowed_changes=["resilience.spikes"]) as trainer:
            trainer.train(StopSignal())
            assert len(trainer.spikes.state_dict().get("loss_pass_1", [])) == kept, spikes


def _on_two_ranks(rank: int, folder: str, data: str) -> dict[Any, Any]:
    topology, found = build_topology(ParallelConfig()), {}
    for zero_stage, precision in COMBINATIONS:
        root = Path(folder) / f"{zero_stage} {precision}"
        config = tiny_run(root, Path(data), mix={2: 1.0}, zero_stage=zero_stage, precision=precision)
        config = replace(config, resilience=ResilienceConfig(spikes="skip"))
        found[zero_stage, precision] = second_step_is_a_spike(config, topology)
    return found


@pytest.mark.distributed
def test_a_spike_on_one_rank_is_skipped_on_both(data: Path, tmp_path: Path) -> None:
    ranks = run_distributed(_on_two_ranks, 2, str(tmp_path), str(data))
    for zero_stage, precision in COMBINATIONS:
        found = [rank[zero_stage, precision] for rank in ranks]
        check_spike(tmp_path / f"{zero_stage} {precision}", found, "skip")
