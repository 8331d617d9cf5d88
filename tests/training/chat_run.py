"""A short run on conversations, which answers one thing, by a template of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from fbt_megatron.config.schema import EvaluationConfig, RunConfig
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.resilience import StopSignal
from tests.data.chats import CHATML, CHATML_TOKENS, bpe, chat, write_lines, write_tokenizer
from tests.training.tiny_run import read_records, tiny_run

END_OF_TEXT, END_OF_TURN = 0, 2
ANSWER = "Four."
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\n"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""That of the run, in a file: ChatML with marks."""
WORDS = ("two", "plus", "What", "France", "naïve", "capital")


class ChatRun:
    """Rows of 48 tokens, the tokenizer's EOS is not the end of a turn, and its folder has a template that is no use."""

    def __init__(self, folder: Path, topology: ParallelTopology) -> None:
        draw = random.Random(4)
        self.run, self.template, self.tokenizer = folder / "run", folder / "trained.jinja", folder / "tokenizer"
        self.template.write_text(TEMPLATE)
        write_tokenizer(self.tokenizer, bpe(CHATML_TOKENS), "Another: " + CHATML, eos_token="<|endoftext|>")
        asked = [[draw.choice(WORDS) for _ in range(draw.choice((1, 2)))] for _ in range(60)]
        write_lines(folder / "train.jsonl", [chat(*[text for word in one for text in (word, ANSWER)]) for one in asked])
        self.validation = folder / "held_out.jsonl"
        self.held_out = [
            chat("two plus two?", ANSWER, "And France?", "Paris. naïve"),
            chat("What", "", system="Be brief."),
            chat("What is two?", "two plus two"),
            chat("capital", ANSWER),
            chat("the capital", "of France"),
        ]
        write_lines(self.validation, self.held_out)
        with open_trainer(self._config(folder), topology, allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
        self.record = [line for line in read_records(self.run) if line.get("kind") == "validation"][-1]

    def _config(self, folder: Path) -> RunConfig:
        config = tiny_run(self.run, folder / "train.jsonl", steps=40, mix={2: 1.0})
        adam = replace(config.optimizer.adam, lr=0.02)
        return replace(
            config,
            model=replace(config.model, vocab_size=300, seq_length=48),
            optimizer=replace(config.optimizer, adam=adam, normuon=replace(config.optimizer.normuon, lr=0.05)),
            data=replace(
                config.data,
                kind="chat",
                tokenizer=str(self.tokenizer),
                chat_template=str(self.template),
                validation=str(self.validation),
            ),
            evaluation=EvaluationConfig(every=40, batches=1, extra_passes=1),
        )
