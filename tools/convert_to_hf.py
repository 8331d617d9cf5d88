"""Export a training checkpoint for Hugging Face transformers: safetensors, code, tokenizer, model card.

Examples:
  python tools/convert_to_hf.py runs/quickstart exported
  python tools/convert_to_hf.py runs/fbt_1b/checkpoints/step_00050000 exported --dtype bfloat16 --max-shard-size 2GB
  python tools/convert_to_hf.py runs/plain exported_qwen3 --as qwen3

Needs one process and no GPU, whatever layout the run was trained in.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fbt_megatron.errors import FBTError, report
from fbt_megatron.hf.export import ExportSummary, export_checkpoint
from fbt_megatron.hf.folder import DEFAULT_SHARD_BYTES

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        summary = export_checkpoint(
            arguments.checkpoint,
            arguments.out,
            kind=arguments.kind,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_size,
            tokenizer=arguments.tokenizer,
            log=partial(print, file=sys.stderr),
        )
    except FBTError as error:
        return report(error)
    print(json.dumps(asdict(summary)) if arguments.json else _describe(summary))
    return 0


def _describe(summary: ExportSummary) -> str:
    tokenizer = "with its tokenizer" if summary.has_tokenizer else "without a tokenizer"
    return (
        f"{summary.out}: {summary.source} as {summary.kind}, {tokenizer}\n"
        f"{summary.num_parameters:,} numbers in {summary.num_tensors:,} tensors, {summary.dtype}, "
        f"{summary.num_bytes / 1e6:,.1f} MB"
    )


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="run directory (its newest checkpoint) or a step_* folder")
    add("out", type=Path, metavar="OUT", help="new folder for the model")
    add(
        "--as",
        dest="kind",
        choices=("fbt", "qwen3", "llama"),
        default="fbt",
        help="qwen3, llama: the model without feedback, as that stock architecture where it fits (%(default)s)",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="type of the weights (that in which the run computed)")
    add(
        "--max-shard-size",
        type=_size,
        default=DEFAULT_SHARD_BYTES,
        metavar="SIZE",
        help="largest file of weights, e.g. 500MB or 2GiB (5GB)",
    )
    add("--tokenizer", help="folder, tokenizer.json or bytes, in place of the run's own; none: leave it out")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?i?B|)", text, flags=re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of bytes, e.g. 5000000, 500MB or 2GiB")
    return size


if __name__ == "__main__":
    sys.exit(main())
