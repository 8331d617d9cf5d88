"""Any layout goes on from the checkpoint of any other as if it had trained the run from the beginning.

A source trains some steps, saves, and trains on without a stop. A destination, whose model was built with another seed
and has no number left of what a checkpoint should restore, loads that checkpoint and trains the same steps. For each
number of ranks, these start once for all sources and once for all destinations.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fbt_megatron.checkpoint.folder import step_name
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.parallel.logical_tensor import pieces_of
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.engine import TrainEngine, build_engine
from fbt_megatron.training.train_state import load_tensors, shards_of, software_versions
from tests.distributed import run_distributed
from tests.parity.cases import (
    SEED,
    Layout,
    RankResult,
    Training,
    held_parts,
    in_layouts,
    run_config,
    train_step,
)
from tests.parity.compare import KINDS, Tolerance, assert_parameters_follow_weights, assert_same_tensors, whole
from tests.parity.test_layouts import LAYOUTS, ONE

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

PASSES = (2, 3, 1, 3, 1)
SAVED, LAST = 3, 5
"""Steps before the checkpoint, and all: after it comes a step of three passes and one of a single pass."""

ALL_LAYOUTS = (ONE, *LAYOUTS)
TIED, UNTIED, BF16 = Training(PASSES), Training(PASSES, tied=False), Training(PASSES, precision="bf16")


@dataclass(frozen=True)
class Pair:
    """A checkpoint of `source` goes on in `destination`."""

    source: Layout
    destination: Layout
    training: Training = TIED

    def __str__(self) -> str:
        kind = {TIED: "", UNTIED: "-untied", BF16: "-bf16"}[self.training]
        return f"{self.source}-to-{self.destination}{kind}"


def all_pairs() -> Iterator[Pair]:
    """Every pair in fp32 with tied embeddings; of the rest, the layouts that cut or copy the embedding differently."""
    yield from itertools.starmap(Pair, itertools.product(ALL_LAYOUTS, repeat=2))
    few = (ONE, Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2))
    for training in (UNTIED, BF16):
        yield from (Pair(*layouts, training) for layouts in itertools.product(few, repeat=2))


def chosen_pairs() -> Iterator[Pair]:
    """Those of `make test`: each layout of up to four ranks is left once and entered once, some are kept."""
    small = [layout for layout in ALL_LAYOUTS if layout.world_size <= 4]
    for index, source in enumerate(small):
        yield Pair(source, small[(index + 4) % len(small)])
    for kept in (ONE, Layout(pp=2, dp=2), Layout(tp=2, pp=2, sequence=True), Layout(tp=2, dp=2, zero=0)):
        yield Pair(kept, kept)
    yield Pair(Layout(pp=2), Layout(tp=2), UNTIED)
    yield Pair(Layout(tp=2, pp=2), ONE, UNTIED)
    yield Pair(Layout(dp=2), Layout(tp=2, pp=2), BF16)
    yield Pair(Layout(pp=2), Layout(pp=2), BF16)


CHOSEN = frozenset(chosen_pairs())
assert set(all_pairs()) >= CHOSEN


# On the ranks


def checkpoint_folder(root: str, layout: Layout, training: Training) -> Path:
    return Path(root) / f"{layout}-{training}"


def build(layout: Layout, training: Training, topology: ParallelTopology, *, seed: int) -> tuple[FBTModel, TrainEngine]:
    config = run_config(layout, training)
    config = replace(config, train=replace(config.train, seed=seed))
    model = build_model(config, topology)
    return model, build_engine(model, parameter_layouts(model, config, topology), config, topology)


def save_sources(rank: int, root: str, cases: list[tuple[Layout, Training]]) -> list[RankResult]:
    """For each case, what this rank holds at the checkpoint and at the end, and the steps in between."""
    results = []
    for layout, training, topology in in_layouts(cases):
        model, engine = build(layout, training, topology, seed=SEED)
        for step in range(SAVED):
            train_step(model, engine, training.passes_of(step), step, topology, RankResult())
        manager = CheckpointManager(
            checkpoint_folder(root, layout, training), config=CheckpointConfig(), log=lambda text: None
        )
        state = {"optimizer": engine.optimizer.counters()}
        text = format_config(run_config(layout, training))
        manager.save(Manifest(SAVED, state, text, software_versions(), {}), shards_of(engine))
        results.append(train_on(model, engine, training, topology))
    return results


def load_checkpoints(
    rank: int, root: str, cases: dict[tuple[Layout, Training], list[Layout]]
) -> dict[Pair, RankResult]:
    """For each destination, the same from the checkpoint of each of its sources."""
    results = {}
    for destination, training, topology in in_layouts(cases):
        model, engine = build(destination, training, topology, seed=SEED + 1)
        for source in cases[destination, training]:
            forget(model, engine)
            path = checkpoint_folder(root, source, training) / step_name(SAVED)
            load_tensors(path, engine)
            engine.optimizer.load_counters(Manifest.read(path).state["optimizer"])
            results[Pair(source, destination, training)] = train_on(model, engine, training, topology)
    return results


def train_on(model: FBTModel, engine: TrainEngine, training: Training, topology: ParallelTopology) -> RankResult:
    """The steps after the checkpoint."""
    result = RankResult(parts={SAVED: held_parts(model, engine)})
    for step in range(SAVED, LAST):
        train_step(model, engine, training.passes_of(step), step, topology, result)
    result.parts[LAST] = held_parts(model, engine)
    return result


@torch.no_grad()
def forget(model: FBTModel, engine: TrainEngine) -> None:
    """Put NaN in place of every number of every logical tensor, weights and state, and wrong counts of updates."""

    def fill(flat: Tensor, layout: object, **flat_range: int) -> None:
        for piece in pieces_of(layout, **flat_range):  # type: ignore[arg-type]
            piece.view(flat).fill_(torch.nan)

    for name, parameter in model.named_parameters():
        fill(parameter.data.view(-1), engine.layouts[name])
    for fragment, master in engine.master_fragments():
        fill(master, fragment.layout, start=fragment.start, stop=fragment.stop)
    for _, _, pieces in engine.optimizer.state_tensors():
        for _, view in pieces:
            view.fill_(torch.nan)
    engine.optimizer.load_counters({"adam": 1000, "adam_feedback": 1000})


# In the test's process


class Matrix:
    """Starts the ranks of all cases and keeps what they found."""

    def __init__(self, root: Path, pairs: frozenset[Pair]) -> None:
        self._root = str(root)
        self._pairs = pairs
        self._sources: dict[tuple[Layout, Training], list[RankResult]] = {}
        for world_size in sorted({pair.source.world_size for pair in pairs}):
            self._save(world_size)
        self._loaded: dict[Pair, list[RankResult]] = {}
        for world_size in sorted({pair.destination.world_size for pair in pairs}):
            self._load(world_size)

    def uninterrupted(self, pair: Pair) -> list[RankResult]:
        """By rank of the source."""
        return self._sources[pair.source, pair.training]

    def resumed(self, pair: Pair) -> list[RankResult]:
        """By rank of the destination."""
        return self._loaded[pair]

    def _save(self, world_size: int) -> None:
        found = {(pair.source, pair.training) for pair in self._pairs if pair.source.world_size == world_size}
        cases = sorted(found, key=lambda case: (str(case[0]), str(case[1])))
        ranks = run_distributed(save_sources, world_size, self._root, cases, timeout_seconds=300.0 + 60.0 * len(cases))
        self._sources |= {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}

    def _load(self, world_size: int) -> None:
        cases = defaultdict(list)
        for pair in sorted(self._pairs, key=lambda pair: (str(pair.destination), str(pair.training))):
            if pair.destination.world_size == world_size:
                cases[pair.destination, pair.training].append(pair.source)
        num_pairs = sum(map(len, cases.values()))
        ranks = run_distributed(
            load_checkpoints, world_size, self._root, dict(cases), timeout_seconds=300.0 + 60.0 * num_pairs
        )
        self._loaded |= {pair: [rank[pair] for rank in ranks] for pair in ranks[0]}


@pytest.fixture(scope="module")
def matrix_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Matrix]:
    """The matrix of the chosen pairs, or that of all others."""

    @functools.cache
    def matrix(chosen: bool) -> Matrix:
        pairs = CHOSEN if chosen else frozenset(all_pairs()) - CHOSEN
        return Matrix(tmp_path_factory.mktemp("chosen" if chosen else "others"), pairs)

    return matrix


def parameters() -> list[object]:
    return [pytest.param(p, id=str(p), marks=[] if p in CHOSEN else [pytest.mark.slow]) for p in all_pairs()]


EXACT = Tolerance(0.0, 0.0, 0.0, 0.0)
OTHER_LAYOUT = {
    "fp32": Tolerance(1e-4, 1e-4, 1e-4, 1e-4),
    # Activations are rounded in other places: the limits of a first step in tests/parity/test_layouts.py.
    "bf16": Tolerance(5e-3, 3e-2, 5e-3, 1.5e-1, pooled=True),
}


@pytest.mark.parametrize("pair", parameters())
def test_a_checkpoint_goes_on_in_any_layout(matrix_of: Callable[[bool], Matrix], pair: Pair) -> None:
    matrix = matrix_of(pair in CHOSEN)
    expected, found = matrix.uninterrupted(pair), matrix.resumed(pair)
    for kind in KINDS:
        saved, loaded = (whole(ranks, steps=SAVED, kind=kind) for ranks in (expected, found))
        assert_same_tensors(loaded, saved, what=f"{kind} after loading")
        assert all(tensor.any() for tensor in saved.values()), f"a zero {kind} would not show a lost one"
    assert_parameters_follow_weights(found, steps=SAVED, precision=pair.training.precision)
    same_layout = pair.source == pair.destination
    tolerance = EXACT if same_layout else OTHER_LAYOUT[pair.training.precision]
    for rank in found:
        for losses, uninterrupted in zip(rank.losses, expected[0].losses, strict=True):
            assert losses == pytest.approx(uninterrupted, rel=tolerance.losses, abs=0.0)
        assert rank.norms == pytest.approx(expected[0].norms, rel=tolerance.norms, abs=0.0)
    for kind in KINDS:
        ours, theirs = (whole(ranks, steps=LAST, kind=kind) for ranks in (found, expected))
        assert_same_tensors(
            ours, theirs, tolerance=tolerance.of(kind), pooled=tolerance.pooled, what=f"{kind} two steps later"
        )
