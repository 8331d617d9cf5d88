"""One step and a whole run of the real trainer: how often things happen, what is divided by what, skips and resumes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.schema import DataConfig, ParallelConfig, RunConfig
from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.errors import CheckpointError, NonFiniteError
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.planner import count_parameters, logical_tensors
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.train_state import Counters, shards_of
from fbt_megatron.training.trainer import Trainer
from tests.distributed import run_distributed
from tests.training.tiny_run import GLOBAL_BATCH, SEQ_LENGTH, read_records, state_of, tiny_run

COMBINATIONS = [(0, "fp32"), (1, "fp32"), (1, "bf16")]


def train(config: RunConfig, topology: ParallelTopology) -> list[dict[str, Any]]:
    """Train to the end; the lines of `metrics.jsonl`."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        assert trainer.train(StopSignal()) == 0
    return read_records(Path(config.train.run_dir))


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_one_update_for_each_global_batch(
    topology: ParallelTopology, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_passes: int
) -> None:
    """Four micro-batches of K passes make one optimizer step and one step of the learning rate."""
    config = tiny_run(tmp_path, data, mix={num_passes: 1.0}, steps=3)
    config = replace(config, lr_schedule=replace(config.lr_schedule, cooldown_fraction=0.0))
    calls: Counter[str] = Counter()

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        counted(trainer.engine.optimizer, "prepare")
        counted(trainer.model, "forward_pass")
        counted(trainer.model, "micro_batch")
        trainer.train(StopSignal())
        updates = trainer.engine.optimizer.counters()
    assert calls == {"prepare": 3, "micro_batch": 3 * 4, "forward_pass": 3 * 4 * num_passes}
    assert updates == {"adam": 3, "adam_feedback": 3 if num_passes > 1 else 0}
    records = read_records(tmp_path)
    assert [record["lr_normuon"] for record in records] == pytest.approx([0.01 * k / 4 for k in (1, 2, 3)])
    assert [record["lr_adam"] for record in records] == pytest.approx([5e-4 * k / 4 for k in (1, 2, 3)])
    assert [record["tokens"] for record in records] == [k * GLOBAL_BATCH * SEQ_LENGTH for k in (1, 2, 3)]
    assert [record["passes"] for record in records] == [num_passes] * 3


def test_the_micro_batch_size_changes_nothing(topology: ParallelTopology, data: Path, tmp_path: Path) -> None:
    runs = {
        size: train(tiny_run(tmp_path / str(size), data, mix={2: 1.0}, steps=3, micro_batch_size=size), topology)
        for size in (1, 2, 4)
    }
    for size in (2, 4):
        for one, other in zip(runs[1], runs[size], strict=True):
            for key in ("loss", "loss_pass_1", "loss_pass_2", "grad_norm"):
                assert other[key] == pytest.approx(one[key], rel=1e-5), (size, one["step"], key)


def test_the_z_loss_is_not_in_the_loss(topology: ParallelTopology, data: Path, tmp_path: Path) -> None:
    """Always on and with a large coefficient: the cross entropy of the first step stays, the gradient does not."""
    config = tiny_run(tmp_path / "without", data, steps=1)
    with_z = replace(config.loss, z_loss=0.1, z_loss_when="always")
    run_dir = replace(config.train, run_dir=str(tmp_path / "with"))
    (plain,), (other,) = train(config, topology), train(replace(config, loss=with_z, train=run_dir), topology)
    assert plain["z_loss"] < 0.01 < other["z_loss"]
    assert other["loss"] == plain["loss"]
    assert other["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(("zero_stage", "precision"), COMBINATIONS)
def test_a_resumed_run_has_the_state_that_was_saved(
    topology: ParallelTopology, data: Path, tmp_path: Path, zero_stage: int, precision: str
) -> None:
    config = tiny_run(tmp_path, data, mix={1: 0.5, 2: 0.5}, zero_stage=zero_stage, precision=precision)
    stopped = replace(config, train=replace(config.train, stop_step=3))
    with open_trainer(stopped, topology, allowed_changes=[]) as trainer:
        trainer.train(StopSignal())
        saved, cursors, updates = state_of(trainer), trainer.loader.state_dict(), trainer.engine.optimizer.counters()
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        loaded = state_of(trainer)
        assert trainer.counters == Counters(step=3, tokens=3 * GLOBAL_BATCH * SEQ_LENGTH)
        assert trainer.loader.state_dict() == cursors
        assert trainer.engine.optimizer.counters() == updates
    assert loaded.keys() == saved.keys()
    assert not [name for name, value in saved.items() if not torch.equal(loaded[name], value)]
    for kind in ("momentum", "row_moment", "exp_avg", "exp_avg_sq"):
        values = [value for name, value in loaded.items() if name.startswith(f"{kind} ")]
        assert values
        assert all(value.any() for value in values), f"{kind} is zero: this run would not show a lost one"


def test_a_checkpoint_without_optimizer_state_is_refused(
    topology: ParallelTopology, data: Path, tmp_path: Path
) -> None:
    config = tiny_run(tmp_path, data, steps=2)
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        trainer.train(StopSignal())
        weights = {name: shard for name, shard in shards_of(trainer.engine).items() if name.startswith("weights/")}
    folder = tmp_path / "checkpoints"
    manager = CheckpointManager(folder, config=config.checkpoint, log=print)
    manager.save(Manifest.read(folder / "step_00000002"), weights)
    with (
        pytest.raises(CheckpointError, match=r"step_00000002 does not fit this run: .*optimizer/"),
        open_trainer(config, topology, allowed_changes=[]),
    ):
        pass


def test_the_optimizer_groups_are_listed(
    topology: ParallelTopology, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A summary on the console, each tensor of the model once in the log."""
    config = tiny_run(tmp_path, data)
    with open_trainer(config, topology, allowed_changes=[]):
        pass
    (summary,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer groups: ")]
    tensors = logical_tensors(config.model, config.feedback)
    matrices = [tensor for tensor in tensors if tensor.kind.value == "matrix"]
    num_normuon = sum(tensor.numel for tensor in matrices)
    assert summary == (
        f"optimizer groups: normuon {len(matrices)} matrices, 0 vectors, {num_normuon:,} parameters | "
        f"adam 1 matrices, {len(tensors) - len(matrices) - 1} vectors, "
        f"{count_parameters(config) - num_normuon:,} parameters"
    )
    logged = [line.split() for line in (tmp_path / "log.txt").read_text().splitlines()]  # date, time, name, kind ...
    groups = {words[2]: words[-3] for words in logged if words[2].endswith(".weight")}
    assert groups == {tensor.name: "normuon" if tensor in matrices else "adam" for tensor in tensors}


def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    topology: ParallelTopology, data: Path, tmp_path: Path
) -> None:
    config = tiny_run(tmp_path, data, steps=2)
    config = replace(config, data=DataConfig(train=str(data), validation=str(data), streams=4))
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        trainer.validate()
        trainer.metrics.step(trainer.train_step())
    records = train(config, topology)
    assert [(record.get("kind"), record["step"]) for record in records] == [
        ("validation", 0),
        (None, 1),
        (None, 2),
        ("validation", 2),
    ]


def test_starts_are_counted(
    topology: ParallelTopology,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of the run, also one that fails before it trains, beside what the launcher says."""
    config = tiny_run(tmp_path, data, steps=2)
    with open_trainer(config, topology, allowed_changes=[]):
        pass
    assert "start 1 of this run" not in capsys.readouterr().out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    records = train(config, topology)
    assert [(record["starts"], record["restarts"]) for record in records] == [(2, 3)] * 2
    assert "start 2 of this run, restart 3 by the launcher" in capsys.readouterr().out
    first, second = (tmp_path / "starts.txt").read_text().splitlines()
    assert first.endswith("restart 0 by the launcher")
    assert "step 0 on " in second


# Two ranks


class Poison:
    """Makes the gradient of one parameter infinite on this rank, in the steps that ask for it."""

    def __init__(self, trainer: Trainer, *, here: bool) -> None:
        self.active = False
        parameter = next(p for name, p in trainer.model.named_parameters() if name.endswith("linear_fc2.weight"))
        if here:
            parameter.register_hook(lambda gradient: gradient * math.inf if self.active else gradient)


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name, value in before.items() if not torch.equal(after[name], value)]


def _skip(config: RunConfig, topology: ParallelTopology) -> dict[str, Any]:
    """Three steps, the second with an infinite gradient on rank 1."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        poison = Poison(trainer, here=topology.rank == 1)
        trainer.metrics.step(trainer.train_step())
        before, updates, cursors = (
            state_of(trainer),
            trainer.engine.optimizer.counters(),
            trainer.loader.state_dict(),
        )
        poison.active = True
        trainer.metrics.step(trainer.train_step())
        poison.active = False
        found = {
            "changed": _changed(before, state_of(trainer)),
            "updates": trainer.engine.optimizer.counters() == updates,
            "data advanced": trainer.loader.state_dict() != cursors,
            "counters": trainer.counters.as_dict(),
        }
        trainer.metrics.step(trainer.train_step())
        return found | {
            "changed by the next step": bool(_changed(before, state_of(trainer))),
            "consecutive": trainer.counters.consecutive_skips,
        }


def _give_up(config: RunConfig, topology: ParallelTopology) -> tuple[str, int, list[str]]:
    """Every step has an infinite gradient on rank 1: message, steps, and what changed."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        Poison(trainer, here=topology.rank == 1).active = True
        before = state_of(trainer)
        try:
            trainer.train(StopSignal())
        except NonFiniteError as error:
            return str(error), trainer.counters.step, _changed(before, state_of(trainer))
    return "finished", 0, []


def _unequal_rows(config: RunConfig, topology: ParallelTopology) -> dict[str, float]:
    """One step in which rank 1 trains few tokens, against sums over tokens made with PyTorch's cross entropy."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        batches = trainer.loader.next_step()
        if topology.rank == 1:
            batches = [_mask_after(batch, 1 + index) for index, batch in enumerate(batches)]
        trainer.loader.next_step = lambda: batches
        sums, num_tokens = torch.zeros(2), 0
        for batch in batches:
            sums = sums + _pass_sums(trainer, batch)
            num_tokens += batch.num_trained_tokens
        totals = torch.cat([sums.detach(), torch.tensor([float(num_tokens)])])
        mean_of_means = (sums.detach() / num_tokens).sum()
        dist.all_reduce(totals)
        dist.all_reduce(mean_of_means)
        gradients = torch.autograd.grad(sums.sum() / totals[2], list(trainer.model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        record = trainer.train_step()
    return {
        "own tokens": num_tokens,
        "loss": record.loss,
        "expected loss": float(totals[:2].sum() / totals[2]),
        "mean of means": float(mean_of_means) / 2,
        "norm": record.grad_norm or 0.0,
        "expected norm": float(flat.norm()),
    }


def _mask_after(batch: TrainBatch, length: int) -> TrainBatch:
    labels = batch.labels.clone()
    labels[:, length:] = IGNORE_INDEX
    return replace(batch, labels=labels)


def _pass_sums(trainer: Trainer, batch: TrainBatch) -> Tensor:
    """[2], summed cross entropy of two passes."""
    micro_batch = trainer.model.micro_batch(**vars(batch))
    sums, hidden = [], None
    for pass_idx in range(2):
        hidden = trainer.model.forward_pass(micro_batch, pass_idx, hidden).hidden
        logits = trainer.model.logits(hidden)[..., : trainer.config.model.vocab_size]
        sums.append(F.cross_entropy(logits.flatten(0, 1), batch.labels.t().flatten(), reduction="sum"))
    return torch.stack(sums)


def _on_two_ranks(rank: int, folder: str, data: str) -> dict[str, Any]:
    topology = build_topology(ParallelConfig())
    root, found = Path(folder), {}
    for zero_stage, precision in COMBINATIONS:
        options = {"mix": {2: 1.0}, "zero_stage": zero_stage, "precision": precision}
        name = f"{zero_stage} {precision}"
        config = tiny_run(root / f"skip {name}", Path(data), **options)
        found["skip", zero_stage, precision] = _skip(config, topology)
        config = tiny_run(root / f"give up {name}", Path(data), max_consecutive_skips=2, **options)
        found["give up", zero_stage, precision] = _give_up(config, topology)
    config = tiny_run(root / "unequal", Path(data), mix={2: 1.0}, jitter=0.0, prefix_mixin="off")
    found["unequal"] = _unequal_rows(config, topology)
    return found


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ranks(run_folder: Path, data: Path) -> list[dict[str, Any]]:
    return run_distributed(_on_two_ranks, 2, str(run_folder), str(data))


@pytest.mark.distributed
@pytest.mark.parametrize(("zero_stage", "precision"), COMBINATIONS)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_both(
    ranks: list[dict[str, Any]], run_folder: Path, zero_stage: int, precision: str
) -> None:
    for found in ranks:
        skip = found["skip", zero_stage, precision]
        assert skip["changed"] == []
        assert skip["updates"]
        assert skip["data advanced"]
        tokens = 2 * GLOBAL_BATCH * SEQ_LENGTH
        first_skipped = 1 * GLOBAL_BATCH // 4  # the second step's data begins there, of four streams
        progress = Counters(
            step=2, tokens=tokens, skipped_steps=1, consecutive_skips=1, first_skipped_cycle=first_skipped
        )
        assert skip["counters"] == asdict(progress)
        assert skip["changed by the next step"]
        assert skip["consecutive"] == 0
    first, second, third = read_records(run_folder / f"skip {zero_stage} {precision}")
    assert second["grad_norm"] is None
    assert [record["skipped_steps"] for record in (first, second, third)] == [0, 1, 1]
    assert third["grad_norm"] > 0.0
    rates = [record["lr_normuon"] for record in (first, second, third)]
    assert rates == pytest.approx([0.01 * k / 4 for k in (1, 2, 3)])


@pytest.mark.distributed
@pytest.mark.parametrize(("zero_stage", "precision"), COMBINATIONS)
def test_too_many_skips_in_a_row_end_the_run_on_both_ranks(
    ranks: list[dict[str, Any]], run_folder: Path, zero_stage: int, precision: str
) -> None:
    outcomes = [found["give up", zero_stage, precision] for found in ranks]
    assert outcomes[0] == outcomes[1]
    message, step, changed = outcomes[0]
    assert "not finite in 2 steps in a row, up to step 2" in message
    assert step == 2
    assert changed == []
    assert [record["grad_norm"] for record in read_records(run_folder / f"give up {zero_stage} {precision}")] == [
        None
    ] * 2


@pytest.mark.distributed
def test_every_token_counts_the_same_whatever_rank_and_row_it_is_in(ranks: list[dict[str, Any]]) -> None:
    one, other = (found["unequal"] for found in ranks)
    assert one["own tokens"] > 4 * other["own tokens"]
    for found in (one, other):
        assert found["loss"] == pytest.approx(found["expected loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(found["expected norm"], rel=1e-5)
        assert found["loss"] != pytest.approx(found["mean of means"], rel=1e-3)
