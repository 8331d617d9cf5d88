"""Fine-tuning on two ranks with different numbers of trained tokens: the steps of one process, and going on there."""

from __future__ import annotations

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
from tests.training.tiny_run import tiny_run

pytestmark = pytest.mark.distributed

STEPS = 6


def run_of(folder: Path, root: Path, *, stop_step: int | None = None, **layout: int) -> RunConfig:
    """Two passes on conversations; the second half of the streams has much shorter answers."""
    config = tiny_run(folder, root, steps=STEPS, mix={2: 1.0})
    return replace(
        config,
        model=replace(config.model, vocab_size=300, seq_length=32),
        parallel=replace(config.parallel, **layout),
        data=replace(
            config.data, kind="chat", train=str(root / "chats.jsonl"), tokenizer=str(root / "tokenizer"), streams=8
        ),
        train=replace(config.train, stop_step=stop_step),
    )


def train(config: RunConfig) -> list[float]:
    """Losses of the steps that are left to do; saves at the end."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    with open_trainer(config, build_topology(config.parallel), allowed_changes=[]) as trainer:
        losses = [trainer.train_step().loss for _ in range(trainer.counters.step, trainer.last_step)]
        trainer.save()
    return losses


def _on_two_ranks(rank: int, root: str) -> dict[str, list[float]]:
    folder = Path(root)
    return {
        "data": train(run_of(folder / "data", folder)),
        "stopped": train(run_of(folder / "stopped", folder, stop_step=2)),
        "tensor": train(run_of(folder / "tensor", folder, tensor=2)),
    }


def _on_one_rank(rank: int, root: str) -> dict[str, list[float]]:
    folder = Path(root)
    return {"straight": train(run_of(folder / "straight", folder)), "rest": train(run_of(folder / "stopped", folder))}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    write_chatml(root / "tokenizer")
    long, short = chat("two", TEXT[:60]), chat(TEXT[:20], "Four.")
    write_lines(root / "chats.jsonl", [long] * 40 + [short] * 40)
    return root


@pytest.fixture(scope="module")
def losses(root: Path) -> dict[str, Any]:
    two = run_distributed(_on_two_ranks, 2, str(root))
    assert two[0] == two[1]
    return {**two[0], **run_distributed(_on_one_rank, 1, str(root))[0]}


def test_the_ranks_have_different_numbers_of_trained_tokens(root: Path) -> None:
    numbers = []
    for rank in range(2):
        loader = build_train_loader(run_of(root / "x", root), dp_rank=rank, dp_size=2)
        numbers.append([sum(batch.num_trained_tokens for batch in loader.next_step()) for _ in range(STEPS)])
    assert all(max(pair) > 1.2 * min(pair) > 0 for pair in zip(*numbers, strict=True))


@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_layouts_train_alike(losses: dict[str, Any], layout: str) -> None:
    assert losses[layout] == pytest.approx(losses["straight"], rel=1e-5)


def test_one_rank_goes_on_from_two(losses: dict[str, Any]) -> None:
    assert len(losses["rest"]) == STEPS - 2
    assert losses["stopped"] + losses["rest"] == pytest.approx(losses["straight"], rel=1e-5)
