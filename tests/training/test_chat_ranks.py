"""Fine-tuning on two ranks with different numbers of trained tokens, or none: the steps of one process, resumed too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.loader import build_train_loader
from fbt_megatron.parallel.topology import build_topology
from fbt_megatron.training.build import open_trainer
from tests.data.chats import TEXT, chat, write_chatml, write_lines
from tests.distributed import run_distributed
from tests.training.tiny_run import read_records, tiny_run

pytestmark = pytest.mark.distributed

STEPS = 6
SIZE = 64


def run_of(folder: Path, root: Path, *, stop_step: int | None = None, data: str = "chats", **layout: int) -> RunConfig:
    """Two passes on conversations."""
    config = tiny_run(folder, root, steps=STEPS, mix={2: 1.0})
    return replace(
        config,
        model=replace(config.model, vocab_size=300, seq_length=SIZE),
        parallel=replace(config.parallel, **layout),
        data=replace(
            config.data, kind="chat", train=str(root / f"{data}.jsonl"), tokenizer=str(root / "tokenizer"), streams=8
        ),
        train=replace(config.train, stop_step=stop_step),
    )


def train(config: RunConfig) -> list[float]:
    """Losses of the steps that are left to do; saves at the end."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    with open_trainer(config, build_topology(config.parallel), allowed_changes=[]) as trainer:
        records = [trainer.train_step() for _ in range(trainer.counters.step, trainer.last_step)]
        for record in records:
            trainer.metrics.step(record)
        trainer.save()
    return [record.loss for record in records]


def _on_two_ranks(rank: int, root: str) -> dict[str, list[float]]:
    folder = Path(root)
    return {
        "data": train(run_of(folder / "data", folder)),
        "stopped": train(run_of(folder / "stopped", folder, stop_step=2)),
        "tensor": train(run_of(folder / "tensor", folder, tensor=2)),
        "pipeline": train(run_of(folder / "pipeline", folder, pipeline=2)),
        "quiet data": train(run_of(folder / "quiet data", folder, data="quiet")),
        "quiet pipeline": train(run_of(folder / "quiet pipeline", folder, data="quiet", pipeline=2)),
    }


def _on_one_rank(rank: int, root: str) -> dict[str, list[float]]:
    folder = Path(root)
    return {
        "straight": train(run_of(folder / "straight", folder)),
        "rest": train(run_of(folder / "stopped", folder)),
        "quiet": train(run_of(folder / "quiet", folder, data="quiet")),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows without an answer and with a long one in turns in half of the streams, and short answers in the other half;
    in the file `quiet` all streams have rows without an answer at the same time."""
    root = tmp_path_factory.mktemp("chat")
    write_chatml(root / "tokenizer")
    long, short, question = chat("two", TEXT[:60]), chat(TEXT[:20], "Four."), chat("two plus " * 30, "Four.")
    first, second = ([question] * count + [long] * (5 - count) for count in (3, 2))
    write_lines(root / "chats.jsonl", first * 4 + second * 4 + [short] * 40)
    write_lines(root / "quiet.jsonl", first * 16)
    return root


@pytest.fixture(scope="module")
def losses(root: Path) -> dict[str, Any]:
    two = run_distributed(_on_two_ranks, 2, str(root))
    assert repr(two[0]) == repr(two[1])  # NaN is not equal to itself
    return {**two[0], **run_distributed(_on_one_rank, 1, str(root))[0]}


def test_the_ranks_have_different_numbers_of_trained_tokens(root: Path) -> None:
    """And there are micro-batches, and ranks, that have none while others have some."""
    numbers = []
    for rank in range(2):
        loader = build_train_loader(run_of(root / "x", root), dp_rank=rank, dp_size=2)
        numbers.append([[batch.num_trained_tokens for batch in loader.next_step()] for _ in range(STEPS)])
    steps = list(zip(*numbers, strict=True))
    assert all(max(map(sum, ranks)) > 1.2 * min(map(sum, ranks)) for ranks in steps)
    assert any(min(micro_batches) == 0 < max(micro_batches) for ranks in steps for micro_batches in ranks)
    assert any(min(map(sum, ranks)) == 0 < max(map(sum, ranks)) for ranks in steps)
    assert any(min(map(sum, ranks)) > 0 for ranks in steps)


@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_layouts_train_alike(losses: dict[str, Any], layout: str) -> None:
    assert losses[layout] == pytest.approx(losses["straight"], rel=1e-5)


@pytest.mark.parametrize("run", ["data", "tensor", "pipeline", "stopped"])
def test_counts_are_those_of_all_ranks_and_starts(losses: dict[str, Any], root: Path, run: str) -> None:
    found, expected = (
        [[record[name] for name in ("trained_tokens", "cut_conversations", "cut_tokens")] for record in records]
        for records in (read_records(root / run), read_records(root / "straight"))
    )
    assert found == expected
    assert 4 == expected[0][1] < expected[-1][1] < expected[-1][2]


def test_one_rank_goes_on_from_two(losses: dict[str, Any]) -> None:
    assert len(losses["rest"]) == STEPS - 2
    assert losses["stopped"] + losses["rest"] == pytest.approx(losses["straight"], rel=1e-5)


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_all_ranks_skip_a_step_without_an_answer(losses: dict[str, Any], layout: str) -> None:
    quiet = [math.isnan(loss) for loss in losses["quiet"]]
    assert 0 < sum(quiet) < STEPS
    assert losses[f"quiet {layout}"] == pytest.approx(losses["quiet"], rel=1e-5, nan_ok=True)
