"""lm-evaluation-harness with the model class `fbt`: its own command line, all its tasks, the three decode modes.

    python -m fbt_megatron.evaluation.harness --model fbt --model_args pretrained=runs/fbt_1b,mode=fused --tasks gsm8k

Everything but the model class is the harness's own; `--help` is too. `docs/evaluation.md` lists the model's arguments.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from fbt_megatron.errors import EvaluationError, FBTError, report
from fbt_megatron.parallel.launcher import find_launch

VERSION = "0.4.13"
"""Of lm_eval: later ones may ask something else of a model class."""


def main(argv: list[str] | None = None) -> int:
    """Run the harness with `argv` (default: the process's arguments); returns the exit status."""
    try:
        _check_surroundings()
        _run(sys.argv[1:] if argv is None else argv)
    except FBTError as error:
        return report(error)
    return 0


def _run(arguments: list[str]) -> None:
    from lm_eval.__main__ import cli_evaluate

    from fbt_megatron.evaluation import harness_model

    harness_model.register()
    before, sys.argv = sys.argv, ["lm-eval", *arguments]  # the harness reads these
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _check_surroundings() -> None:
    try:
        found = importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise EvaluationError(
            f"lm_eval: {found} is installed, but the model class `fbt` is written for {VERSION}. "
            "Install it with `pip install -r requirements-eval.txt`."
        )
    launch = find_launch(os.environ)
    if launch.world_size > 1:
        raise EvaluationError(
            f"{launch.launcher} started {launch.world_size} processes: every process would compute the same, because "
            "the model class runs in one. Start the harness alone, and give each GPU tasks of its own (device=cuda:1)."
        )


if __name__ == "__main__":
    sys.exit(main())
