"""Compare every byte of finished data sets with their dataset.json, and name the files that are damaged.

Examples:
  python tools/verify_shards.py quickstart_data/train quickstart_data/validation
  python tools/verify_shards.py https://host/data/train --workers 8 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from fbt_megatron.data.verification import Verification, verify_dataset
from fbt_megatron.errors import DataError, FBTError, report


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        found = [verify_dataset(folder, workers=arguments.workers) for folder in arguments.folders]
    except FBTError as error:
        return report(error)
    print(json.dumps([asdict(one) for one in found]) if arguments.json else "\n".join(map(_describe, found)))
    damaged = [file for one in found for file in one.damaged]
    if damaged:
        print("\n".join(["damaged files; copy them again, or build the data set again:", *damaged]), file=sys.stderr)
        return DataError.exit_status
    return 0


def _describe(found: Verification) -> str:
    outcome = f"{len(found.damaged)} damaged" if found.damaged else "all as they were written"
    return f"{found.folder}: {found.num_files:,} files, {found.num_bytes:,} bytes, {outcome}"


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder or URL prefix with a dataset.json")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes that read (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
