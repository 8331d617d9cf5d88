"""Make a training checkpoint of a Hugging Face model folder: an exported FBT, or a Llama or Qwen3 model.

Examples:
  python tools/convert_from_hf.py exported runs/again
  python tools/convert_from_hf.py Qwen3-0.6B runs/start --fusion glu
  python pretrain_fbt.py --config run.yaml checkpoint.load=runs/start

The second adds feedback to an existing model: a new fusion, to be trained by continued pretraining.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import get_args

from fbt_megatron.config.schema import FusionKind
from fbt_megatron.errors import FBTError, report
from fbt_megatron.hf.importing import ImportSummary, import_model


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        summary = import_model(
            arguments.model,
            arguments.out,
            fusion=arguments.fusion,
            seed=arguments.seed,
            log=partial(print, file=sys.stderr),
        )
    except FBTError as error:
        return report(error)
    print(json.dumps(asdict(summary)) if arguments.json else _describe(summary))
    return 0


def _describe(summary: ImportSummary) -> str:
    lines = [
        f"{summary.out}: {summary.model_type}, {summary.num_parameters:,} numbers in {summary.num_tensors:,} tensors",
        f"start a run from it: checkpoint.load={summary.out}; its model section is in {summary.out}/config.yaml",
    ]
    if summary.fresh:
        lines.append(f"new, not yet trained: {', '.join(summary.fresh)}")
    return "\n".join(lines)


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder with config.json and safetensors files")
    add("out", type=Path, metavar="OUT", help="new run folder for the checkpoint")
    add("--fusion", choices=get_args(FusionKind), help="feedback of a model that has none yet (glu)")
    add("--seed", type=int, default=1234, help="of the new matrices (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
