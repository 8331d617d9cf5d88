"""Pretrain a full-bandwidth transformer.

python pretrain_fbt.py --config configs/quickstart.yaml
torchrun --nproc-per-node=8 pretrain_fbt.py --config configs/fbt_125m.yaml train.steps=20000 train.seed=2
srun --ntasks=16 --ntasks-per-node=8 python pretrain_fbt.py --config configs/fbt_1b.yaml
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.validation import validate_world_size
from fbt_megatron.errors import FBTError
from fbt_megatron.parallel.launcher import ALONE, Launch, find_launch
from fbt_megatron.training.stop_signal import StopSignal

# When a process ends, torch.distributed warns the others with a page of its own stack; they say it in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

GRACE_SECONDS = 3.0
"""A launcher ends the other ranks as soon as one has ended: the time they have to print the same mistake."""


def main() -> int:
    """Exit status: README, "exit status"."""
    arguments = parse_arguments()
    launch = ALONE
    try:
        launch = find_launch(os.environ)
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            return dry_run(config, arguments.world_size)
        validate_world_size(config, launch.world_size)
        return pretrain(config, launch, arguments.allow_config_change)
    except FBTError as error:
        launch.report(error)
        if launch.world_size > 1:
            time.sleep(GRACE_SECONDS)
        return error.exit_status


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys that replace those of the file")
    parser.add_argument("--dry-run", action="store_true", help="print configuration, layout, parameters and pass plan")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="with --dry-run: number of processes")
    parser.add_argument(
        "--allow-config-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this key differs from the checkpoint's (repeatable)",
    )
    return parser.parse_intermixed_args()  # keys may stand before and after options


def dry_run(config: RunConfig, world_size: int) -> int:
    """Print what a run would be, without processes, data or weights."""
    from fbt_megatron.planner import format_dry_run
    from fbt_megatron.rank_plan import format_exchange, format_ranks, plan_ranks

    validate_world_size(config, world_size)
    print(format_dry_run(config, world_size))
    ranks = plan_ranks(config, world_size)
    for title, text in (
        ("Ranks", format_ranks(ranks)),
        ("NorMuon's exchange: bytes that a rank sends per step, and its share of the work", format_exchange(ranks)),
    ):
        print(f"\n{title}\n{'-' * len(title)}\n{text}")
    return 0


def pretrain(config: RunConfig, launch: Launch, allowed_changes: list[str]) -> int:
    """Train; returns the exit status."""
    with StopSignal() as stop:
        # Imported here, so that --help and a mistake in the configuration answer at once and not after megatron-core.
        with warnings.catch_warnings(action="ignore"):
            from fbt_megatron.parallel.topology import build_topology, init_distributed, shutdown_distributed
            from fbt_megatron.training.build import open_trainer
            from fbt_megatron.training.failure import leave
            from fbt_megatron.training.watchdog import collective_timeout, watch

        # megatron-core warns of optional libraries and of its own options; `Kernels.describe` says what is in use.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        timeout = collective_timeout(config.resilience)
        init_distributed(launch, timeout_seconds=timeout)
        watchdog = watch(config, launch)
        try:
            topology = build_topology(config.parallel, timeout_seconds=timeout)
            with open_trainer(config, topology, allowed_changes=allowed_changes) as trainer:
                signal_number = trainer.train(stop)
        except Exception as error:
            os._exit(leave(error, watchdog))  # the interpreter's own end may wait for threads and for other ranks
        watchdog.stop()
        shutdown_distributed()
    return 128 + signal_number if signal_number else 0


if __name__ == "__main__":
    sys.exit(main())
