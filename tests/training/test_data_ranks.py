"""Two ranks on one data set: equal work for any length of run, the same rows for peers, samples and losses counted."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from fbt_megatron.config.schema import ParallelConfig, RunConfig
from fbt_megatron.data.loader import build_train_loader
from fbt_megatron.errors import DataError
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from tests.data.datasets import spoil_document, write_dataset
from tests.distributed import run_distributed
from tests.training.samples import expected_samples, read_samples_log
from tests.training.tiny_run import GLOBAL_BATCH, SEQ_LENGTH, read_records, tiny_run

pytestmark = pytest.mark.distributed

MAX_STEPS = 12
EOS = 256
UNEVEN = (5, 3, 1)


def write_uneven(folder: Path, counts: tuple[int, ...]) -> Path:
    """Documents of one row each; document d of the data set is d and EOS."""
    numbers = iter(range(sum(counts)))
    return write_dataset(folder, [[[next(numbers)] * (SEQ_LENGTH - 1) + [EOS] for _ in range(n)] for n in counts])


def write_damaged(folder: Path) -> Path:
    """60 documents of which 4 are damaged, 2 in each half; 12 steps read them twice."""
    draw = random.Random(7)
    documents = [[draw.randrange(256) for _ in range(draw.randint(8, 16))] + [EOS] for _ in range(60)]
    write_dataset(folder, [documents[:30], documents[30:]])
    for number in (4, 21, 33, 50):
        spoil_document(folder / f"shard-{number // 30:05d}.tar", documents[number])
    return folder


def run_of(folder: Path, data: Path, *, steps: int, layout: str = "data", **changes: Any) -> RunConfig:
    """A tiny run of two ranks: two replicas, or one of two ranks."""
    config = tiny_run(folder, data, steps=steps)
    tensor, pipeline = {"data": (1, 1), "tensor": (2, 1), "pipeline": (1, 2)}[layout]
    return replace(
        config,
        parallel=ParallelConfig(zero_stage=1, precision="fp32", tensor=tensor, pipeline=pipeline),
        data=replace(config.data, streams=8, **changes),
        logging=replace(config.logging, samples=True),
    )


def regroup(config: RunConfig) -> ParallelTopology:
    """The process groups of the run's layout."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return build_topology(config.parallel)


def _on_two_ranks(rank: int, root: str) -> dict[str, Any]:
    folder = Path(root)
    return {
        "uneven": _every_length(folder / "uneven", folder / "uneven data", workers=2),
        "one shard": _every_length(folder / "one shard", folder / "one shard data", workers=0),
        "peers": {
            layout: _batches(folder / layout, folder / "uneven data", layout) for layout in ("tensor", "pipeline")
        },
        "skip": _skip(folder / "skip", folder / "damaged"),
        "too much": _lose_too_much(folder / "too much", folder / "damaged"),
        "layouts": _change_layouts(folder / "layouts", folder / "uneven data"),
    }


def _every_length(run_dir: Path, data: Path, *, workers: int) -> list[tuple[int, int, int]]:
    """Runs that end after each step, with a validation; step, micro-batches and trained tokens of each."""
    config = run_of(run_dir, data, steps=MAX_STEPS, workers=workers, validation=str(data))
    config = replace(config, evaluation=replace(config.evaluation, every=1, batches=3))
    ends = []
    with open_trainer(config, regroup(config), allowed_changes=[]) as trainer:
        for max_steps in range(1, MAX_STEPS + 1):
            trainer.config = replace(config, train=replace(config.train, stop_step=max_steps))
            trainer.train(StopSignal())
            ends.append((trainer.counters.step, trainer.loader.num_micro_batches, trainer.counters.tokens))
    return ends


def _batches(run_dir: Path, data: Path, layout: str) -> list[list[dict[str, Any]]]:
    """The micro-batches of three steps as this rank gets them."""
    config = run_of(run_dir, data, steps=3, layout=layout)
    with open_trainer(config, regroup(config), allowed_changes=[]) as trainer:
        steps = [trainer._next_batches()[0] for _ in range(3)]
    return [[{name: value.tolist() for name, value in vars(batch).items()} for batch in step] for step in steps]


def _skip(run_dir: Path, data: Path) -> tuple[int, int]:
    """A run over damaged documents with a restart; the documents that this rank alone passed over before and after."""
    config = run_of(run_dir, data, steps=MAX_STEPS, on_error="skip", max_skipped=0.1)
    own = []
    for stop_step in (5, None):
        stopped = replace(config, train=replace(config.train, stop_step=stop_step))
        with open_trainer(stopped, regroup(config), allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
            own.append(trainer.loader.skipped[0])
    return own[0], own[1]


def _lose_too_much(run_dir: Path, data: Path) -> str:
    """Two of 60 documents are allowed, and neither rank loses more than two."""
    config = run_of(run_dir, data, steps=MAX_STEPS, on_error="skip", max_skipped=0.04)
    with open_trainer(config, regroup(config), allowed_changes=[]) as trainer:
        try:
            trainer.train(StopSignal())
        except DataError as error:
            return f"step {trainer.counters.step}, own {trainer.loader.skipped[0]}: {error}"
    return "finished"


def _change_layouts(run_dir: Path, data: Path) -> None:
    """Two replicas, one replica of two ranks, two replicas again; each but the last trains steps that are lost."""
    for layout, stop_step, lost_steps in (("data", 1, 3), ("tensor", 3, 1), ("data", None, 0)):
        config = run_of(run_dir, data, steps=5, layout=layout)
        stopped = replace(config, train=replace(config.train, stop_step=stop_step))
        with open_trainer(stopped, regroup(config), allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
            for _ in range(lost_steps):
                trainer.metrics.step(trainer.train_step())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_uneven(folder / "uneven data", UNEVEN)
    write_uneven(folder / "one shard data", (9,))
    write_damaged(folder / "damaged")
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_distributed(_on_two_ranks, 2, str(root))


@pytest.mark.parametrize("name", ["uneven", "one shard"])
def test_a_run_ends_after_any_number_of_steps(ranks: list[dict[str, Any]], root: Path, name: str) -> None:
    """Nine documents for eight streams, of which each rank has four, in two micro-batches of two."""
    for found in ranks:
        assert found[name] == [(step, 2, step * GLOBAL_BATCH * SEQ_LENGTH) for step in range(1, MAX_STEPS + 1)]
    records = read_records(root / name)
    assert [record["step"] for record in records if "kind" not in record] == list(range(1, MAX_STEPS + 1))
    assert [record["step"] for record in records if "kind" in record] == list(range(MAX_STEPS + 1))
    samples = read_samples_log(root / name)
    assert samples == expected_samples(run_of(root / name, root / f"{name} data", steps=MAX_STEPS))
    seen = Counter(key for _, _, keys in samples for key in keys)
    assert len(seen) == sum(UNEVEN)
    assert min(seen.values()) >= MAX_STEPS // 2


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_peers_of_a_replica_see_the_same_rows(ranks: list[dict[str, Any]], root: Path, layout: str) -> None:
    one, other = (found["peers"][layout] for found in ranks)
    assert one == other
    loader = build_train_loader(run_of(root / layout, root / "uneven data", steps=3), dp_rank=0, dp_size=1)
    steps = [loader.next_step() for _ in range(3)]
    assert one == [[{name: value.tolist() for name, value in vars(batch).items()} for batch in step] for step in steps]


def test_what_is_passed_over_is_summed_over_ranks_and_starts(ranks: list[dict[str, Any]], root: Path) -> None:
    config = run_of(root / "skip", root / "damaged", steps=MAX_STEPS, on_error="skip", max_skipped=0.1)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    expected, tokens = [], []
    for _ in range(MAX_STEPS):
        loader.next_step()
        documents, num_tokens = loader.skipped
        expected.append(documents)
        tokens.append(num_tokens)
    assert [record["skipped_documents"] for record in read_records(root / "skip")] == expected
    assert expected[-1] > 4 > expected[4] > 0
    owns = [found["skip"] for found in ranks]
    assert [sum(own) for own in zip(*owns, strict=True)] == [expected[4], expected[-1]]
    assert all(own[1] > 0 for own in owns)
    lines = [line for line in (root / "skip" / "log.txt").read_text().splitlines() if "passed over" in line]
    assert [line.partition("over: ")[2] for line in lines] == [
        f"{after - before} in step {step}, {after} ({num_tokens:,} tokens) in the run"
        for step, (before, after, num_tokens) in enumerate(zip([0, *expected[:-1]], expected, tokens, strict=True), 1)
        if after > before
    ]
    assert read_samples_log(root / "skip") == expected_samples(config)


def test_what_all_ranks_lost_together_stops_both(ranks: list[dict[str, Any]]) -> None:
    messages = [found["too much"].partition(": ") for found in ranks]
    assert messages[0][2] == messages[1][2]
    assert messages[0][2].startswith("data.on_error=skip: ")
    assert "of the 60 documents of the epochs begun so far were passed over" in messages[0][2]
    owns = [int(message[0].rpartition(" ")[2]) for message in messages]
    assert max(owns) <= 2 < sum(owns)
    assert messages[0][0].partition(",")[0] == messages[1][0].partition(",")[0]


def test_the_sample_log_survives_changes_of_the_layout(ranks: list[dict[str, Any]], root: Path) -> None:
    assert ranks
    folder = root / "layouts"
    assert read_samples_log(folder) == expected_samples(run_of(folder, root / "uneven data", steps=5))
    steps = {
        path.name: [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for path in (folder / "samples").iterdir()
    }
    assert steps == {"rank_00000.jsonl": [1, 2, 3, 4, 5], "rank_00001.jsonl": [1, 4, 5]}
