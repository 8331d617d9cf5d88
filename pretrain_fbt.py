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
        status = report(error, launch)
        if launch.world_size > 1:
            time.sleep(GRACE_SECONDS)
        return status


def report(error: FBTError, launch: Launch) -> int:
    """Print an error without a stack trace; returns the exit status."""
    # In one write: the lines of several ranks would otherwise run into each other.
    sys.stderr.write(f"{launch.label}{type(error).__name__}: {error}\n")
    sys.stderr.flush()
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
    # Imported here, so that --help and a mistake in the configuration answer at once and not after megatron-core.
    with warnings.catch_warnings(action="ignore"):
        from fbt_megatron.parallel.topology import (
            build_topology,
            init_distributed,
            shutdown_distributed,
            wait_for_peers,
        )
        from fbt_megatron.training.build import open_trainer
        from fbt_megatron.training.resilience import StopSignal

    # megatron-core warns of optional libraries and of its own options; `Kernels.describe` says what is in use.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    with StopSignal() as stop:
        init_distributed(launch)
        try:
            topology = build_topology(config.parallel)
            with open_trainer(config, topology, allowed_changes=allowed_changes) as trainer:
                signal_number = trainer.train(stop)
        except FBTError as error:
            status = report(error, launch)
            wait_for_peers()
            return status
        shutdown_distributed()
    return 128 + signal_number if signal_number else 0


if __name__ == "__main__":
    sys.exit(main())
