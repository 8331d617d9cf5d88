"""How long training stands still for a checkpoint: saved in the background over saved at once.

Measured: wall-clock time from the call of a save until training may go on, for the weights and the optimizer state of
one model, in turn within each repetition. At once that is the whole save: shards, hashes, manifest, flushes to the
disk, publishing, removal of the checkpoint before. In the background it is the copy to host memory; the rest of the
save is waited for outside the measurement, as if the next save came later. The first save makes its buffers and stands
alone. Both write to the same folder for temporary files.

  python benchmarks/async_save.py [--repetitions N] [--json]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common.measure import Row, parse_arguments, ratios, report, wall_seconds
from common.workload import TrainingStep, quickstart

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.training.train_state import shards_of, software_versions

AT_ONCE, IN_BACKGROUND = "at once", "in the background"
WIDE = ["model.num_layers=8", "model.hidden_size=512", "model.ffn_hidden_size=1536"]
MIB = 2**20


def main() -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(__doc__, repetitions=7)
    with quickstart(quick=arguments.quick, overrides=WIDE) as step, tempfile.TemporaryDirectory() as folder:
        savers = {name: Saver(step, Path(folder) / name, name == IN_BACKGROUND) for name in (AT_ONCE, IN_BACKGROUND)}
        first = {name: saver.save() for name, saver in savers.items()}
        stalls: dict[str, list[float]] = {name: [] for name in savers}
        for repetition in range(arguments.repetitions):
            for name in savers if repetition % 2 == 0 else reversed(savers):
                stalls[name].append(savers[name].save())
        size = sum(path.stat().st_size for path in (Path(folder) / AT_ONCE).rglob("*.distcp")) / MIB
    rows = [Row.over(f"{name}, seconds", values) for name, values in stalls.items()]
    rows.append(Row.over(f"{IN_BACKGROUND} / {AT_ONCE}", ratios(stalls[IN_BACKGROUND], stalls[AT_ONCE])))
    rows.append(Row.over(f"{IN_BACKGROUND} / {AT_ONCE}, first save", [first[IN_BACKGROUND] / first[AT_ONCE]]))
    report("async_save", f"{step.setting}; a checkpoint is {size:,.1f} MiB", rows, as_json=arguments.json)
    return 0


class Saver:
    """Saves the state of a training step again and again, and keeps the last one."""

    def __init__(self, step: TrainingStep, folder: Path, in_background: bool) -> None:
        self._step = step
        self._number = 0
        config = CheckpointConfig(keep=1, async_=in_background)
        self._manager = CheckpointManager(folder, config=config, log=lambda line: None)
        self._manager.prepare()

    def save(self) -> float:
        """Save; returns the seconds for which training would stand still."""
        self._number += 1
        manifest = Manifest(self._number, {}, format_config(self._step.config), software_versions(), files={})
        seconds = wall_seconds(lambda: self._manager.save(manifest, shards_of(self._step.engine)))
        self._manager.finish()
        return seconds


if __name__ == "__main__":
    sys.exit(main())
