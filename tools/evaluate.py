"""Loss and bits per byte of a model on shards: after each pass, and in the three decode modes.

Examples:
  python tools/evaluate.py runs/quickstart
  python tools/evaluate.py exported --data shards/validation --passes 4 --json
  python tools/evaluate.py runs/fbt_1b/checkpoints/step_00050000 --limit 500 --skip-soft --batch-size 32
  torchrun --nproc-per-node=8 tools/evaluate.py runs/fbt_1b --data shards/validation
  python tools/evaluate.py runs/quickstart --rows     # the rows of the run's own validation
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from fbt_megatron.config.schema import DataConfig
from fbt_megatron.data.conversations import open_conversations
from fbt_megatron.data.dataset import DocumentDataset, open_dataset
from fbt_megatron.data.format import DATASET_FILE
from fbt_megatron.data.loader import build_validation_loader
from fbt_megatron.errors import DataError, DecodeError, FBTError, report
from fbt_megatron.evaluation.document_loss import (
    DocumentLosses,
    ModeLoss,
    Piece,
    document_losses,
    document_pieces,
    row_pieces,
)
from fbt_megatron.hf.tokenizer_files import makes_ids_of
from fbt_megatron.inference.decoder import FUSED_PASSES
from fbt_megatron.inference.source import LoadedModel, find_device, load_model
from fbt_megatron.parallel.collectives import agree_on_errors
from fbt_megatron.parallel.launcher import ALONE, Launch, find_launch

T = TypeVar("T")

_LONGEST_WAIT_SECONDS = 86400.0
"""Processes meet when all have done their shares: the last one may be on a slower device, or on one that is shared."""


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    launch = ALONE
    try:
        launch = find_launch(os.environ)
        with _process_group(launch):
            loaded = _together(launch, lambda: _load(arguments, launch))
            losses, data = evaluate(loaded, arguments, launch)
    except FBTError as error:
        if launch.world_size == 1:
            return report(error)
        launch.report(error)
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if launch.rank > 0:
        return 0
    if arguments.json:
        print(json.dumps(_as_json(losses, loaded, data)))
    else:
        print("\n".join(_table(losses, loaded, data)))
    return 0


@contextmanager
def _process_group(launch: Launch) -> Iterator[None]:
    """torch.distributed while several processes share the work; raises FBTError where they do not meet."""
    if launch.world_size == 1:
        yield
        return
    with warnings.catch_warnings(action="ignore"):  # megatron-core takes a while to import, and warns
        from fbt_megatron.parallel.topology import init_distributed, shutdown_distributed
    init_distributed(launch, timeout_seconds=_LONGEST_WAIT_SECONDS)
    try:
        yield
    except FBTError:  # on all of them: another error leaves the rest where they would not hear of the end
        shutdown_distributed()
        raise
    shutdown_distributed()


def _together(launch: Launch, action: Callable[[], T]) -> T:
    """Run `action` in every process; an FBTError of one is raised in all, which would wait for it otherwise."""
    return action() if launch.world_size == 1 else agree_on_errors(action)


def _load(arguments: argparse.Namespace, launch: Launch) -> LoadedModel:
    return load_model(
        arguments.model,
        dtype=arguments.dtype,
        device=str(find_device(arguments.device)),
        tokenizer=arguments.tokenizer,
        log=partial(print, file=sys.stderr) if launch.rank == 0 else lambda line: None,
    )


def evaluate(loaded: LoadedModel, arguments: argparse.Namespace, launch: Launch = ALONE) -> tuple[DocumentLosses, str]:
    """The losses, and the name of the data that they are of, alike in each process; raises FBTError."""
    has_feedback = loaded.model.fusion != "none"
    passes = arguments.passes or (FUSED_PASSES if has_feedback else 1)
    pieces, total, token_bytes, data = _together(
        launch, lambda: _rows(loaded, arguments) if arguments.rows else _documents(loaded, arguments)
    )
    share = None if total is None else total // launch.world_size
    with tqdm(total=share, unit="tok", unit_scale=True, disable=launch.rank > 0 or None, file=sys.stderr) as bar:
        losses = document_losses(
            loaded.model,
            pieces,
            num_passes=passes,
            soft=has_feedback and not arguments.skip_soft,
            token_bytes=token_bytes,
            batch_size=arguments.batch_size,
            process=launch.rank,
            num_processes=launch.world_size,
            progress=bar.update,
        )
    return losses, data


def _documents(
    loaded: LoadedModel, arguments: argparse.Namespace
) -> tuple[Iterator[Piece], int | None, Tensor | None, str]:
    """Pieces of whole documents, how many tokens there are at most, bytes per token, name of the data."""
    config = loaded.config
    spec = arguments.data or (config.data.validation if config is not None else None)
    if not spec:
        raise DataError(f"{loaded.path} names no data for validation (data.validation). Name some with --data.")
    is_chat = (arguments.kind or (config.data.kind if config is not None else "documents")) == "chat"
    key, vocab_size = "--data" if arguments.data else "data.validation", loaded.model.config.vocab_size
    if is_chat:
        if arguments.text_tokenizer:
            raise DecodeError(
                "--text-tokenizer: conversations are read with the model's own tokenizer. Leave it out, or name "
                "another one for both with --tokenizer."
            )
        data = replace(_chat_data(loaded, arguments), validation=spec)
        dataset = open_conversations(data, "validation", vocab_size=vocab_size, on_error="stop", key=key)
    else:
        tokenizer = arguments.text_tokenizer or (config.data.tokenizer if config is not None else None)
        dataset = open_dataset(spec, tokenizer=tokenizer, vocab_size=vocab_size, key=key)
        _check_tokenizer(loaded, dataset, key, spec)
    pieces = document_pieces(dataset, seq_length=loaded.model.config.seq_length, limit=arguments.limit)
    total = None if arguments.limit or is_chat else dataset.num_tokens  # lines are not encoded before they are read
    return pieces, total, _bytes_of(dataset), spec if isinstance(spec, str) else ", ".join(spec)


def _check_tokenizer(loaded: LoadedModel, dataset: DocumentDataset, key: str, spec: str | Sequence[str]) -> None:
    """Raises DataError for ids of another tokenizer: they stand for other texts, and losses of them for nothing."""
    if makes_ids_of(loaded.tokenizer.tokenizer, dataset):
        return
    described = dataset.described
    made = "--text-tokenizer" if described is None else described.info.tokenizer.file or "raw bytes"
    where = "" if described is None else f" ({DATASET_FILE} in {described.folder})"
    raise DataError(
        f"{key}={spec}: its ids are those of another tokenizer, {made}{where}, than the model's, "
        f"{loaded.tokenizer.folder or 'raw bytes'}. Name data of the model's tokenizer, or with --tokenizer the one "
        "that the model was trained with."
    )


def _chat_data(loaded: LoadedModel, arguments: argparse.Namespace) -> DataConfig:
    """Tokenizer and template of conversations: those of the run, else those of the model's folder."""
    if loaded.config is not None and loaded.config.data.kind == "chat":
        data, template = loaded.config.data, loaded.tokenizer.chat_template
        named = None if template is None else str(template)
        return replace(data, tokenizer=arguments.tokenizer or data.tokenizer, chat_template=named)
    folder = loaded.tokenizer.folder
    return DataConfig(kind="chat", tokenizer=arguments.tokenizer or ("bytes" if folder is None else str(folder)))


def _rows(loaded: LoadedModel, arguments: argparse.Namespace) -> tuple[Iterator[Piece], int | None, Tensor | None, str]:
    """The same for the rows of the run's own validation."""
    config = loaded.config
    if config is not None and config.data.kind == "chat":
        config = replace(config, data=_chat_data(loaded, arguments))
    loader = None if config is None else build_validation_loader(config, dp_rank=0, dp_size=1)
    if config is None or loader is None:
        raise DataError(f"--rows: {loaded.path} belongs to no run with data.validation. Name documents with --data.")
    if not config.data.reset_attention_mask:
        raise DecodeError(
            "--rows: the run was trained with data.reset_attention_mask: false, so the documents of its rows see each "
            "other, and decoding takes them one by one. Leave --rows out."
        )
    total = len(loader) * config.train.global_batch_size * config.model.seq_length
    return row_pieces(loader), total, loader.token_bytes, f"{len(loader)} batches of the run's validation"


def _bytes_of(dataset: DocumentDataset) -> Tensor | None:
    return None if dataset.token_bytes is None else torch.from_numpy(dataset.token_bytes)


def _table(losses: DocumentLosses, loaded: LoadedModel, data: str) -> Iterator[str]:
    text = "" if losses.num_bytes is None else f", {losses.num_bytes:,} bytes of text"
    yield f"{loaded.path} on {data}"
    yield f"{losses.num_documents:,} documents, {losses.num_tokens:,} predicted tokens{text}"
    yield f"{'mode':20} {'loss':>9} {'bits/byte':>10} {'to standard':>22} {'hidden delta':>13}"
    for one in losses.modes:
        bits = "" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}"
        delta = "" if one.hidden_delta is None else f"{one.hidden_delta:.4f}"
        yield f"{_name(one):20} {one.loss:9.4f} {bits:>10} {_difference(one):>22} {delta:>13}".rstrip()
    if len(losses.modes) > 1:
        yield "after +-: one standard error, with documents as the independent cases"


def _name(one: ModeLoss) -> str:
    passes = one.mode.prefill_passes
    return f"pass {passes} (fused)" if passes > 1 else "soft" if one.mode.feedback else "pass 1 (standard)"


def _difference(one: ModeLoss) -> str:
    if not one.mode.feedback:
        return ""
    error = "" if math.isnan(one.difference_error) else f" +- {one.difference_error:.4f}"
    return f"{one.difference:+.4f}{error}"


def _as_json(losses: DocumentLosses, loaded: LoadedModel, data: str) -> dict[str, Any]:
    modes = [
        {
            "mode": one.mode.name,
            "prefill_passes": one.mode.prefill_passes,
            "loss": one.loss,
            "bits_per_byte": one.bits_per_byte,
            "difference": one.difference,
            "difference_error": None if math.isnan(one.difference_error) else one.difference_error,
            "hidden_delta": one.hidden_delta,
        }
        for one in losses.modes
    ]
    return {
        "model": str(loaded.path),
        "data": data,
        "num_documents": losses.num_documents,
        "num_tokens": losses.num_tokens,
        "num_bytes": losses.num_bytes,
        "modes": modes,
    }


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="run directory, step_* folder, or exported folder")
    add("--data", metavar="DATA", help="shards, tars, or .jsonl files of chats (default: the run's data.validation)")
    add("--kind", choices=("documents", "chat"), help="what the data holds (as the run's; documents for a folder)")
    add("--rows", action="store_true", help="the rows of the run's own validation: the losses of its metrics.jsonl")
    add("--passes", type=int, metavar="N", help=f"passes 1 to N ({FUSED_PASSES}; 1 without feedback)")
    add("--skip-soft", action="store_true", help="leave out mode soft, which goes token by token")
    add("--limit", type=int, metavar="DOCUMENTS", help="the first documents only")
    add("--batch-size", type=int, default=16, help="pieces of documents computed together (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    add("--text-tokenizer", metavar="TOKENIZER", help="of tars that hold text (default: the run's data.tokenizer)")
    add("--tokenizer", help="folder, tokenizer.json or bytes, in place of the model's own")
    add("--dtype", choices=("float32", "bfloat16"), help="type to compute in (float32 on a CPU)")
    add("--device", help="device of PyTorch, e.g. cpu or cuda:1 (a GPU where there is one)")
    arguments = parser.parse_args(argv)
    for name in ("passes", "limit", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.rows and (arguments.data or arguments.limit or arguments.kind or arguments.text_tokenizer):
        parser.error(
            "--rows takes the run's validation as it is: leave --data, --limit, --kind and --text-tokenizer out"
        )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
