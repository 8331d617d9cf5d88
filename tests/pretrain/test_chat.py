"""Pretraining, and then fine-tuning on conversations from its checkpoint, as a user does it."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.data.chats import TEXT, chat, masked_tokens, write_lines
from tests.pretrain.runs import ROOT, environment, pretrain, records, steps, write_config

pytestmark = pytest.mark.training

ANSWERS = {"two plus two?": "Four.", "the capital of France?": "Paris, of course."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with special tokens for turns, a data set built with it, and conversations."""
    folder, draw = tmp_path_factory.mktemp("chat"), random.Random(3)
    text, tokenizer = folder / "text.jsonl", folder / "tok"
    text.write_text("".join(f'{{"text": "{n} {TEXT[:60].split(chr(10))[0]}"}}\n' for n in range(80)))
    vocabulary = ["--vocab-size", "270", "--special-tokens", "<|im_start|>", "<|im_end|>"]
    split = ["--workers", "1", "--validation-fraction", "0.2"]
    tool("train_tokenizer.py", text, "--out", tokenizer, *vocabulary)
    tool("build_shards.py", text, "--out", folder / "data", "--tokenizer", tokenizer, *split)
    for name, count in (("chats/a", 50), ("chats/b", 30), ("held_out", 20)):
        questions = [[draw.choice(list(ANSWERS)) for _ in range(draw.choice((1, 2)))] for _ in range(count)]
        lines = [chat(*[text for question in asked for text in (question, ANSWERS[question])]) for asked in questions]
        write_lines(folder / f"{name}.jsonl", lines)
    return folder


def tool(name: str, *arguments: Path | str) -> None:
    line = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    subprocess.run(line, env=environment(), check=True, capture_output=True)


def test_from_pretraining_to_fine_tuning(folder: Path) -> None:
    """As docs/fine_tuning.md has it, on the tokenizer that lies beside the data."""
    config = write_config(folder / "run.yaml", folder / "data", {"model": {"vocab_size": 270}})
    pretrain(config, folder / "pretrained", "train.steps=4", "lr_schedule.warmup_steps=1", timeout=600.0).check()
    tuned = pretrain(
        config,
        folder / "tuned",
        "data.kind=chat",
        f"data.train={folder}/chats",
        f"data.validation={folder}/held_out.jsonl",
        f"data.tokenizer={folder}/data/tokenizer",
        "data.chat_template=configs/chat_templates/chatml.jinja",
        f"checkpoint.load={folder}/pretrained",
        "checkpoint.load_weights_only=true",
        "feedback.schedule=[{until: 1.0, mix: {2: 1.0}}]",
        "model.seq_length=114",  # the longest conversation
        "train.steps=25",
        "optimizer.adam.lr=0.01",
        "optimizer.normuon.lr=0.02",
        "evaluation.every=25",
        "evaluation.batches=6",
        "logging.samples=true",
        timeout=600.0,
    ).check()
    assert "weights alone from " in tuned.output
    assert [step["step"] for step in steps(folder / "tuned")] == [*range(1, 26)]
    assert {step["passes"] for step in steps(folder / "tuned")} == {2}
    assert {step["cut_conversations"] for step in steps(folder / "tuned")} == {0}
    validations = [record for record in records(folder / "tuned") if record.get("kind") == "validation"]
    first, last = validations[0], validations[-1]
    assert (first["step"], last["step"]) == (0, 25)
    for name in ("val_loss_pass_1", "val_loss_pass_2", "val_loss_pass_3", "val_bpb_pass_1", "val_bpb_pass_2"):
        assert last[name] < 0.6 * first[name], name
    held_out = [json.loads(line)["messages"] for line in (folder / "held_out.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(folder / "tok" / "tokenizer.json"))
    num_tokens = sum(trained for messages in held_out for _, trained in masked_tokens(messages, tokenizer))
    num_bytes = sum(len(message["content"]) for messages in held_out for message in messages[1::2])
    bits = last["val_loss_pass_2"] * num_tokens / math.log(2) / num_bytes
    assert last["val_bpb_pass_2"] == pytest.approx(bits, rel=1e-6)  # of the answers alone
    named = (folder / "tuned" / "samples" / "rank_00000.jsonl").read_text()
    assert "a.jsonl:1" in named
    assert "b.jsonl:1" in named
