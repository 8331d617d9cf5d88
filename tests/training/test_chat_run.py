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
from fbt_megatron.data.loader import build_validation_loader
from fbt_megatron.errors import DataError
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.forward_backward import forward_backward
from fbt_megatron.training.trainer import Trainer
from tests.data.chats import chat, masked_tokens, write_chatml, write_lines
from tests.data.datasets import write_dataset
from tests.training.tiny_run import state_of, tiny_run

VOCAB = 300


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


def test_a_step_without_an_answer_is_an_error(topology, pretrained: Path, tmp_path: Path) -> None:
    """Eight rows of questions that are longer than all of them."""
    write_chatml(tmp_path / "tokenizer")
    write_lines(tmp_path / "train.jsonl", [chat("two plus " * 300, "Four") for _ in range(4)])
    config = tuning(tmp_path / "run", tmp_path, pretrained)
    with trainer_of(config, topology) as trainer, pytest.raises(DataError, match="step 1: no token of its rows"):
        trainer.train_step()
