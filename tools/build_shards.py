"""Tokenize text and write it as shards for training and validation.

Examples:
  python tools/build_shards.py python-stdlib --tokenizer quickstart_data/tokenizer --out quickstart_data --workers 2
  python tools/build_shards.py books/ web.jsonl.zst wiki.parquet --tokenizer bytes --out data --shards 64

A build that was stopped goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from fbt_megatron.data.build import BuildSettings, BuildSummary, SplitSummary, build_dataset
from fbt_megatron.data.build_folder import TRAIN, VALIDATION
from fbt_megatron.data.chunks import TokenizerSpec
from fbt_megatron.errors import FBTError, report

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        summary = build_dataset(
            _settings(arguments), arguments.out, workers=arguments.workers, restart=arguments.restart
        )
    except FBTError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted: finished work is kept, give the same command to go on", file=sys.stderr)
        return INTERRUPTED
    print(json.dumps(asdict(summary)) if arguments.json else _describe(summary, arguments.out))
    return 0


def _settings(arguments: argparse.Namespace) -> BuildSettings:
    return BuildSettings(
        inputs=tuple(arguments.inputs),
        tokenizer=TokenizerSpec(arguments.tokenizer, arguments.eos_token, arguments.bos_token),
        add_bos=arguments.bos,
        text_key=arguments.text_key,
        on_error=arguments.on_error,
        validation_fraction=arguments.validation_fraction,
        shard_tokens=arguments.shard_tokens,
        num_shards=arguments.shards,
        seed=arguments.seed,
    )


def _describe(summary: BuildSummary, out: Path) -> str:
    lines = [f"{out}: already complete, nothing to do"] if summary.already_complete else []
    lines.append(_split_line(TRAIN, summary.train))
    if summary.validation is not None:
        lines.append(_split_line(VALIDATION, summary.validation))
    lines.append(f"vocabulary {summary.vocab_size}, ids stored as {summary.dtype}")
    lines.append(
        f"{summary.num_input_files} input files; {summary.num_ignored_files} of unknown kind ignored, "
        f"{summary.num_empty_documents} empty documents dropped, {summary.num_skipped_documents} skipped"
    )
    return "\n".join([*lines, *(f"skipped: {message}" for message in summary.skipped)])


def _split_line(name: str, split: SplitSummary) -> str:
    return (
        f"{name:<12}{split.num_documents:>12,} documents {split.num_tokens:>16,} tokens "
        f"{split.num_bytes:>16,} bytes of text {split.num_shards:>7,} shards"
    )


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="+", help="text, .jsonl[.gz|.zst] and .parquet files, folders, or python-stdlib")
    add("--tokenizer", required=True, help="tokenizer.json, a folder with one, or bytes")
    add("--out", type=Path, required=True, help="folder for train/, validation/ and tokenizer/")
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes (%(default)s); same result with any",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--shards", type=int, help="number of training shards")
    size.add_argument(
        "--shard-tokens", type=int, default=BuildSettings.shard_tokens, help="tokens per shard, about (%(default)s)"
    )
    add(
        "--validation-fraction",
        type=float,
        default=BuildSettings.validation_fraction,
        help="share of the documents for validation (%(default)s); 0 for none",
    )
    add("--seed", type=int, default=BuildSettings.seed, help="of the split and the shuffle (%(default)s)")
    add("--text-key", default=BuildSettings.text_key, help="JSON key or Parquet column of the text (%(default)s)")
    add("--eos-token", help="token that ends a document, where the tokenizer's files do not name it")
    add("--bos-token", help="token that starts a document, where the tokenizer's files do not name it")
    add(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="start documents with BOS (where the tokenizer has one that is not its EOS)",
    )
    add("--on-error", choices=("stop", "skip"), default=BuildSettings.on_error, help="unreadable input (%(default)s)")
    add("--restart", action="store_true", help="throw away a build with other settings in --out")
    add("--json", action="store_true", help="print the counts as one JSON object")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
