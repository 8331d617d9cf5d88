"""Train a byte-level BPE tokenizer on text.

Examples:
  python tools/train_tokenizer.py python-stdlib --vocab-size 4096 --out quickstart_data/tokenizer
  python tools/train_tokenizer.py books/ web.jsonl.zst --vocab-size 32768 --out tokenizer
  python tools/train_tokenizer.py books/ --vocab-size 32768 --out tokenizer --special-tokens '<|im_start|>' '<|im_end|>'
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from fbt_megatron.data.tokenizer_training import TokenizerTraining, TrainedTokenizer, train_tokenizer
from fbt_megatron.errors import FBTError, report


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    training = TokenizerTraining(
        tuple(arguments.inputs),
        arguments.vocab_size,
        text_key=arguments.text_key,
        max_bytes=arguments.max_bytes,
        special_tokens=tuple(arguments.special_tokens),
    )
    try:
        outcome = train_tokenizer(training, arguments.out, restart=arguments.restart)
    except FBTError as error:
        return report(error)
    print(json.dumps(asdict(outcome)) if arguments.json else _describe(outcome))
    return 0


def _describe(outcome: TrainedTokenizer) -> str:
    verb = "is already there" if outcome.already_complete else "written"
    return (
        f"{outcome.file} {verb}: {outcome.vocab_size} tokens, learned from {outcome.num_documents} documents "
        f"({outcome.num_bytes} bytes of text)"
    )


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    defaults = TokenizerTraining((), 0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "inputs", nargs="+", help="text, .jsonl[.gz|.zst] and .parquet files, folders, or python-stdlib"
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="number of ids, 256 bytes and special tokens included"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument(
        "--text-key", default=defaults.text_key, help="JSON key or Parquet column of the text (%(default)s)"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=defaults.max_bytes,
        help="sample larger inputs to about this size (%(default)s)",
    )
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=defaults.special_tokens,
        metavar="TOKEN",
        help="beside <|endoftext|>, such as those of a chat template",
    )
    parser.add_argument("--restart", action="store_true", help="replace a tokenizer that is already in --out")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
