"""Print how many steps and tokens of a run see 1, 2, 3, ... passes, and what that costs in one-pass tokens.

Examples:
  python tools/plan_passes.py --config configs/fbt_1b.yaml train.steps=100000 --plot plan.png
  python tools/plan_passes.py --tokens 200e9 --shares 75/22/3 --batch-tokens 300000 --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import FeedbackConfig, LRScheduleConfig
from fbt_megatron.errors import FBTError, report
from fbt_megatron.model.pass_schedule import build_pass_schedule
from fbt_megatron.optim.lr_schedule import WSDSchedule
from fbt_megatron.planner import PassBudget, format_pass_plan, plan_budget, plan_run, schedule_of_shares

BATCH_TOKENS = 300_000
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        if arguments.config:
            config = load_config(arguments.config, arguments.overrides)
            budget, seed = plan_run(config), config.train.seed
            feedback, lr_schedule = config.feedback, config.lr_schedule
        else:
            batch_tokens = BATCH_TOKENS if arguments.batch_tokens is None else arguments.batch_tokens
            budget = plan_budget(arguments.tokens, arguments.shares, batch_tokens=batch_tokens)
            feedback, lr_schedule = FeedbackConfig(schedule=schedule_of_shares(arguments.shares)), LRScheduleConfig()
            seed = 0
        if arguments.plot:
            plot_plan(budget, feedback, lr_schedule, seed=seed, path=arguments.plot)
    except FBTError as error:
        return report(error)
    except OSError as error:
        print(f"{arguments.plot}: the picture cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(json.dumps(budget.to_dict()) if arguments.json else format_pass_plan(budget))
    return 0


def plot_plan(
    budget: PassBudget, feedback: FeedbackConfig, lr_schedule: LRScheduleConfig, *, seed: int, path: Path
) -> None:
    """Write a picture of the share of each number of passes and of the learning-rate factor over the run's steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = sum(budget.steps.values())
    schedule, factors = build_pass_schedule(feedback, steps=steps, seed=seed), WSDSchedule(lr_schedule, steps)
    num_bins = min(max(steps // 20, 1), 100)
    edges = [round(steps * part / num_bins) for part in range(num_bins + 1)]
    shares: dict[int, list[float]] = {passes: [] for passes in budget.tokens}
    for start, stop in itertools.pairwise(edges):
        seen = [schedule.plan(step).num_passes for step in range(start + 1, stop + 1)]
        for passes, values in shares.items():
            values.append(seen.count(passes) / len(seen))
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    labels = [f"{passes} pass{'es' if passes > 1 else ''}" for passes in shares]
    heights = [[*values, values[-1]] for values in shares.values()]  # the last edge closes the last bin
    axes.stackplot(edges, heights, labels=labels, step="post", alpha=0.6)
    sampled = sorted({1, steps, *(max(1, round(steps * part / 1000)) for part in range(1001))})
    axes.plot(sampled, [factors.factor(step) for step in sampled], color="black", label="learning rate / peak")
    axes.set(xlabel="optimizer step", ylabel="share of steps, learning-rate factor", xlim=(0, steps), ylim=(0, 1.02))
    axes.set_title(f"{budget.token_equivalents:,} token equivalents for {sum(budget.tokens.values()):,} tokens")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=150)


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="plan the run of this configuration file")
    source.add_argument("--tokens", type=_whole_number, help="plan this many training tokens, e.g. 200e9")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings over those of --config")
    parser.add_argument("--shares", type=_shares, help="with --tokens: percent with 1, 2, 3, ... passes, e.g. 75/22/3")
    parser.add_argument(
        "--batch-tokens",
        type=_whole_number,
        help=f"with --tokens: tokens per step (default: {BATCH_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help=f"also write a picture of passes and learning rate ({', '.join(PICTURE_SUFFIXES)})",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.tokens is not None and (arguments.shares is None or arguments.overrides):
        parser.error("--tokens needs --shares, and takes no section.key=value settings")
    if arguments.config is not None and arguments.shares is not None:
        parser.error("--shares goes with --tokens; the shares of a configuration are its feedback.schedule")
    if arguments.config is not None and arguments.batch_tokens is not None:
        parser.error("--batch-tokens goes with --tokens; a configuration has train.global_batch_size rows a step")
    return arguments


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: the name must end in {' or '.join(PICTURE_SUFFIXES)}")
    return path


def _whole_number(text: str) -> int:
    value = _number(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, e.g. 200e9")
    return int(value)


def _shares(text: str) -> list[float]:
    return [_number(part) for part in text.split("/")]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


if __name__ == "__main__":
    sys.exit(main())
