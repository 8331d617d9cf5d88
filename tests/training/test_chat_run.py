"""Fine-tuning on conversations: from a pretraining run, of the assistant's tokens alone, with exact stops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.batch import IGNORE_INDEX
from fbt_megatron.data.loader import build_train_loader, build_validation_loader
from fbt_megatron.errors import DataError
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.forward_backward import forward_backward
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.trainer import Trainer
from tests.data.chats import chat, masked_tokens, write_chatml, write_lines
from tests.data.datasets import write_dataset
from tests.training.tiny_run import read_records, state_of, tiny_run

VOCAB = 300
SIZE = 48  # of rows: one or two conversations


@contextmanager
def trainer_of(config: RunConfig, topology: Any) -> Iterator[Trainer]:
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        yield trainer


def train(config: RunConfig, topology: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train to the end and save; losses, and what the steps have made of the state."""
    with trainer_of(config, topology) as trainer:
        losses = [trainer.train_step().loss for _ in range(trainer.counters.step, trainer.last_step)]
        trainer.save()
        return losses, state_of(trainer)


@pytest.fixture(scope="module")
def pretrained(topology, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on documents of random tokens."""
    folder, draw = tmp_path_factory.mktemp("pretrained"), random.Random(1)
    documents = [[draw.randrange(VOCAB) for _ in range(30)] for _ in range(20)]
    data = write_dataset(folder / "data", [documents], vocab_size=VOCAB, eos_id=2)
    train(with_vocabulary(tiny_run(folder / "run", data, steps=2)), topology)
    return folder / "run"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and 40 conversations; the answer to a word is the word."""
    folder, draw = tmp_path_factory.mktemp("chats"), random.Random(2)
    write_chatml(folder / "tokenizer")
    words = ["two", "plus", "Paris", "course", "Four", "France"]
    write_lines(folder / "train.jsonl", [chat(*[draw.choice(words)] * 2 * draw.choice((1, 2))) for _ in range(40)])
    return folder


def with_vocabulary(config: RunConfig) -> RunConfig:
    return replace(config, model=replace(config.model, vocab_size=VOCAB))


def tuning(folder: Path, chats: Path, pretrained: Path, **changes: Any) -> RunConfig:
    """Steps of two passes on the conversations, from the weights of the run."""
    config = with_vocabulary(tiny_run(folder, chats, steps=8, mix={2: 1.0}))
    return replace(
        config,
        model=replace(config.model, seq_length=SIZE),
        data=replace(
            config.data, kind="chat", train=str(chats / "train.jsonl"), tokenizer=str(chats / "tokenizer"), streams=4
        ),
        train=replace(config.train, **changes),
        checkpoint=replace(config.checkpoint, load=str(pretrained), load_weights_only=True),
    )


def test_a_stop_changes_nothing(topology, chats: Path, pretrained: Path, tmp_path: Path) -> None:
    losses, state = train(tuning(tmp_path / "straight", chats, pretrained), topology)
    first, _ = train(tuning(tmp_path / "stopped", chats, pretrained, stop_step=3), topology)
    second, stopped_state = train(tuning(tmp_path / "stopped", chats, pretrained), topology)
    assert first + second == losses
    assert stopped_state.keys() == state.keys()
    assert all(torch.equal(stopped_state[name], value) for name, value in state.items())


def test_only_the_assistants_labels_have_a_gradient(topology, chats: Path, tmp_path: Path) -> None:
    """Of the logits of each pass: exactly zero where the next token is not the assistant's, and nowhere else."""
    config = tuning(tmp_path / "run", chats, tmp_path, seed=5)
    messages = [chat("two", "plus"), chat("Paris", "Four", "plus", "course")]
    data = replace(config.data, validation=str(write_lines(tmp_path / "chats.jsonl", messages)), streams=1)
    tokens = [(number, *token) for number, message in enumerate(messages) for token in masked_tokens(message)]
    size = len(tokens) - 1
    config = replace(
        config,
        data=data,
        model=replace(config.model, seq_length=size),
        train=replace(config.train, global_batch_size=1, micro_batch_size=1),
    )
    loader = build_validation_loader(config, dp_rank=0, dp_size=1)
    assert loader is not None
    batches = next(iter(loader))
    answers = [after[2] and after[0] == before[0] for before, after in pairwise(tokens)]
    assert (batches[0].labels != IGNORE_INDEX).tolist() == [answers]

    model, logits = build_model(config, topology), []
    plain_logits = model.logits

    def kept(hidden: Tensor) -> Tensor:
        logits.append(plain_logits(hidden))
        logits[-1].retain_grad()
        return logits[-1]

    model.logits = kept
    forward_backward(
        model,
        batches,
        build_pass_plan(config.feedback, 2),
        num_tokens=sum(answers),
        z_loss=0.1,
        noise=FeedbackNoise(seed=1, jitter=0.0, prefix_mixin="off"),
        topology=topology,
    )
    assert len(logits) == 2
    for of_pass in logits:
        assert of_pass.grad is not None
        assert [bool(gradient.any()) for gradient in of_pass.grad[:, 0]] == answers


def quiet_run(folder: Path, pretrained: Path, pattern: str, **changes: Any) -> RunConfig:
    """Each row is one conversation, as the pattern says: `a` with an answer, `q` with a question that is too long."""
    write_chatml(folder / "tokenizer")
    kinds = {"a": chat("two plus " * 4, "Four"), "q": chat("two plus " * 20, "Four")}
    sizes = {kind: len(masked_tokens(messages)) for kind, messages in kinds.items()}
    assert (SIZE + 1) / 2 < sizes["a"] <= SIZE + 1 < sizes["q"]
    write_lines(folder / "train.jsonl", [kinds[kind] for kind in pattern])
    config = tuning(folder / "run", folder, pretrained, **changes)
    return replace(config, resilience=replace(config.resilience, max_consecutive_skips=3))


def test_a_step_without_an_answer_is_skipped(topology, pretrained: Path, tmp_path: Path) -> None:
    """Its data is used up, and nothing that a step changes is changed; a stop behind it changes nothing either."""
    config = quiet_run(tmp_path, pretrained, "qqqqaaaa" * 4)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    numbers = [sum(batch.num_trained_tokens for batch in loader.next_step()) for _ in range(8)]
    quiet = [number == 0 for number in numbers]
    assert 2 <= sum(quiet) <= 4
    changed, counted = [], []
    with trainer_of(config, topology) as trainer:
        for _ in range(8):
            before, updates = state_of(trainer), trainer.engine.optimizer.counters()
            trainer.metrics.step(trainer.train_step())
            changed.append(any(not torch.equal(before[name], value) for name, value in state_of(trainer).items()))
            counted.append(trainer.engine.optimizer.counters() != updates)
        state, counters = state_of(trainer), trainer.counters
        assert trainer.loader is not None
        assert trainer.loader.state_dict() == loader.state_dict()
    assert changed == counted == [not is_quiet for is_quiet in quiet]
    assert (counters.step, counters.skipped_steps) == (8, sum(quiet))
    records = read_records(tmp_path / "run")
    assert [record["trained_tokens"] for record in records] == numbers
    assert [record["skipped_steps"] for record in records] == [sum(quiet[:step]) for step in range(1, 9)]
    assert [record["loss"] is record["loss_pass_1"] is record["grad_norm"] is None for record in records] == quiet
    assert [record["cut_conversations"] for record in records] == cut_after_each_step(config)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("SKIPPED, no token is trained") == sum(quiet)
    assert log.count("(skipped) read row") == sum(quiet)
    assert log.count("longer than a row (model.seq_length=48)") == 1

    behind = quiet.index(True) + 1
    stopped = replace(config, train=replace(config.train, run_dir=str(tmp_path / "stopped")))
    train(replace(stopped, train=replace(stopped.train, stop_step=behind)), topology)
    _, found = train(stopped, topology)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def cut_after_each_step(config: RunConfig) -> list[int]:
    loader, found = build_train_loader(config, dp_rank=0, dp_size=1), []
    for _ in range(config.train.steps):
        loader.next_step()
        found.append(loader.cut[0])
    return found


def test_steps_without_an_answer_are_bounded(topology, pretrained: Path, tmp_path: Path) -> None:
    config = quiet_run(tmp_path, pretrained, "q" * 8)
    with trainer_of(config, topology) as trainer, StopSignal() as stop:
        with pytest.raises(DataError, match=r"^no token was trained in 3 steps in a row, up to step 3 .*seq_length"):
            trainer.train(stop)
        assert trainer.counters.consecutive_skips == trainer.counters.skipped_steps == 3
