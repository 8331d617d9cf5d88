"""Throughput of the data loader, over that of the training step that it feeds.

Measured, in turn: tokens per second of the loader alone with 0, 1 and 2 reader processes (reading webdataset shards,
packing documents into rows, collating micro-batches), and tokens per second of the 1-pass step of
configs/quickstart.yaml on random tokens. The data set is made in a temporary folder, from the source of Python's
standard library as bytes. What readers hold ready is drained before the clock starts. Time is wall-clock time.

  python benchmarks/loader_throughput.py [--repetitions N] [--json]
"""

from __future__ import annotations

import email
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common.measure import Row, parse_arguments, ratios, report, wall_seconds
from common.workload import quickstart

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.build import BuildSettings, build_dataset
from fbt_megatron.data.build_folder import TRAIN
from fbt_megatron.data.chunks import TokenizerSpec
from fbt_megatron.data.loader import TrainLoader, build_train_loader

WORKERS = (0, 1, 2)
DRAINED_STEPS = 10
TIMED_STEPS = 200
BYTE_VOCABULARY = 257
TRAINING = "training step"


def main() -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(__doc__, repetitions=5)
    timed_steps = 5 if arguments.quick else TIMED_STEPS
    with tempfile.TemporaryDirectory() as folder, quickstart(quick=arguments.quick) as step:
        data = _build_data(Path(folder), quick=arguments.quick)
        loaders = {_name(workers): _open_loader(step.config, data, workers) for workers in WORKERS}
        speeds: dict[str, list[float]] = {name: [] for name in (*loaders, TRAINING)}
        step.run(1)
        for _ in range(arguments.repetitions):
            for name, loader in loaders.items():
                speeds[name].append(timed_steps * step.num_tokens / _seconds_of_steps(loader, timed_steps))
            speeds[TRAINING].append(step.num_tokens / wall_seconds(lambda: step.run(1)))
        for loader in loaders.values():
            loader.close()
        setting = step.setting
    rows = [Row.over(f"{name}, tokens/s", values) for name, values in speeds.items()]
    rows += [Row.over(f"{name} / {TRAINING}", ratios(speeds[name], speeds[TRAINING])) for name in loaders]
    report("loader_throughput", setting, rows, as_json=arguments.json)
    return 0


def _name(workers: int) -> str:
    return f"loader, {workers} worker{'' if workers == 1 else 's'}"


def _build_data(folder: Path, *, quick: bool) -> Path:
    packages = tuple(str(Path(module.__file__ or "").parent) for module in (email, json))
    settings = BuildSettings(
        inputs=packages if quick else ("python-stdlib",),
        tokenizer=TokenizerSpec("bytes"),
        validation_fraction=0.0,
        num_shards=4,
    )
    build_dataset(settings, folder)
    return folder / TRAIN


def _open_loader(config: RunConfig, data: Path, workers: int) -> TrainLoader:
    config = replace(
        config,
        model=replace(config.model, vocab_size=BYTE_VOCABULARY),
        data=replace(config.data, train=str(data), workers=workers),
    )
    return build_train_loader(config, dp_rank=0, dp_size=1)


def _seconds_of_steps(loader: TrainLoader, number: int) -> float:
    for _ in range(DRAINED_STEPS):
        loader.next_step()
    return wall_seconds(lambda: [loader.next_step() for _ in range(number)])


if __name__ == "__main__":
    sys.exit(main())
