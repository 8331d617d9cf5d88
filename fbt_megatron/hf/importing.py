"""Makes a training checkpoint of a model folder: an exported FBT bit for bit, a Llama or Qwen3 model with a new fusion.

The checkpoint holds weights only. A run starts from it with `checkpoint.load`: at step 0, with a fresh optimizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fbt_megatron.checkpoint.folder import CHECKPOINTS_NAME
from fbt_megatron.checkpoint.logical_shards import LogicalShards
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import WEIGHTS, Manifest
from fbt_megatron.config.loader import format_config, save_config
from fbt_megatron.config.schema import CheckpointConfig, FeedbackConfig, FusionKind, ParallelConfig, RunConfig
from fbt_megatron.data.tokenizer import TOKENIZER_FILE
from fbt_megatron.data.tokenizer_config import (
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    read_json,
)
from fbt_megatron.errors import CheckpointError, ConfigError
from fbt_megatron.hf.folder import CONFIG_FILE, check_free, read_config
from fbt_megatron.hf.model_config import MODEL_TYPE, model_config
from fbt_megatron.hf.names import exported_name, plain_name
from fbt_megatron.hf.plain_import import plain_model_config
from fbt_megatron.hf.safetensors_files import StoredTensors, open_tensors
from fbt_megatron.hf.tokenizer_files import GENERATION_FILE, TOKENIZER_FOLDER
from fbt_megatron.model.initialization import draw_tensor
from fbt_megatron.parallel.logical_tensor import LogicalTensor, Rect
from fbt_megatron.planner import logical_tensors

CONFIG_NAME = "config.yaml"
_PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
_DERIVED = ".rotary_emb.inv_freq"
_NAMED = 8
"""Tensors that an error lists by name."""


@dataclass(frozen=True)
class ImportSummary:
    """What an import wrote."""

    out: str
    model_type: str
    num_tensors: int
    num_parameters: int
    fresh: tuple[str, ...]
    """Canonical names of the tensors that the model did not have."""


def import_model(
    source: Path,
    out: Path,
    *,
    fusion: FusionKind | None = None,
    seed: int = 1234,
    log: Callable[[str], None] = lambda line: None,
) -> ImportSummary:
    """Write a checkpoint of step 0 with the weights of the folder `source` to the new run folder `out`.

    `fusion` (default `glu`) is for models that have none: its matrices are drawn from `seed`, and the norm on fused
    inputs gets the scale of the embedding, so that they are as large as plain ones. The weights are in memory once, as
    fp32. `log` gets what to know beside.

    Raises ConfigError for a model that this project cannot express, CheckpointError where `source` is damaged or lacks
    tensors, or `out` is in use.
    """
    exported = read_config(source)
    model_type = str(exported.get("model_type"))
    config = _run_config(exported, fusion, source=str(source / CONFIG_FILE))
    check_free(out)
    own = exported_name if model_type == MODEL_TYPE else plain_name
    tensors = logical_tensors(config.model, config.feedback)
    fresh = [] if model_type == MODEL_TYPE else [tensor for tensor in tensors if tensor.feedback]
    end_ids = read_json(source, GENERATION_FILE).get("eos_token_id", exported.get("eos_token_id"))
    with open_tensors(source) as stored:
        names = {own(tensor.name): tensor for tensor in tensors if tensor not in fresh}
        _check_tensors(stored, names, source, tied_head=config.model.tie_embeddings)
        values = {tensor.name: stored.read(name) for name, tensor in names.items()}
    values |= _draw(fresh, values["embedding.weight"], seed=seed, init_std=config.model.init_std)
    _save(out, config, tensors, values)
    try:
        save_config(config, out / CONFIG_NAME)
        _copy_tokenizer(source, out / TOKENIZER_FOLDER, end_ids, log)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}. Free the disk.") from None
    return ImportSummary(
        out=str(out),
        model_type=model_type,
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel for tensor in tensors),
        fresh=tuple(tensor.name for tensor in fresh),
    )


def _run_config(exported: Mapping[str, Any], fusion: FusionKind | None, *, source: str) -> RunConfig:
    """A configuration of which model, fusion and precision matter."""
    if exported.get("model_type") == MODEL_TYPE:
        if fusion is not None:
            raise ConfigError(
                source, [f"--fusion {fusion}: this model is an FBT, with what it has. Leave --fusion out."]
            )
        model, own_fusion = model_config(exported, source=source)
    else:
        model, own_fusion = plain_model_config(exported, source=source), fusion or "glu"
    dtype = exported.get("dtype") or exported.get("torch_dtype") or "float32"
    if dtype not in _PRECISIONS:
        raise ConfigError(source, [f"dtype={dtype!r}: must be one of {', '.join(_PRECISIONS)}."])
    return RunConfig(
        model=model,
        feedback=FeedbackConfig(fusion=own_fusion),
        parallel=ParallelConfig(precision=_PRECISIONS[dtype]),
    )


def _check_tensors(stored: StoredTensors, names: Mapping[str, LogicalTensor], source: Path, *, tied_head: bool) -> None:
    """Raise CheckpointError unless the folder has exactly these tensors, in their shapes.

    Some models come with a head beside the embedding that it is tied to; it must be the same.
    """
    found = {name for name in stored.names if not name.endswith(_DERIVED)}
    embedding, head = plain_name("embedding.weight"), plain_name("head.weight")
    if tied_head and {embedding, head} <= found and torch.equal(stored.read(embedding), stored.read(head)):
        found.remove(head)
    problems = []
    for what, wrong in (
        ("lacks", names.keys() - found),
        ("has, beside what its config.json says,", found - names.keys()),
    ):
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            problems.append(f"it {what} {', '.join(sorted(wrong)[:_NAMED])}{more}")
    problems += [
        f"{name} has shape {stored.shape(name)} instead of {tensor.shape}"
        for name, tensor in names.items()
        if name in found and stored.shape(name) != tensor.shape
    ]
    if problems:
        raise CheckpointError(f"{source} is not the model that its {CONFIG_FILE} describes: {'; '.join(problems)}.")


def _draw(fresh: list[LogicalTensor], embedding: Tensor, *, seed: int, init_std: float) -> dict[str, Tensor]:
    drawn = {tensor.name: draw_tensor(tensor, seed=seed, init_std=init_std) for tensor in fresh}
    if "embedding_norm.weight" in drawn:
        drawn["embedding_norm.weight"].fill_(float(embedding.square().mean().sqrt()))
    return drawn


def _save(out: Path, config: RunConfig, tensors: list[LogicalTensor], values: Mapping[str, Tensor]) -> None:
    shards = {}
    for tensor in tensors:
        whole = Rect(0, 0, tensor.rows, tensor.cols)
        view = values[tensor.name].view(tensor.rows, tensor.cols)
        shards[f"weights/{tensor.name}"] = LogicalShards(tensor.shape, [(whole, view)])
    versions = {"torch": str(torch.__version__)}
    manifest = Manifest(0, {}, format_config(config), versions, files={}, contents=WEIGHTS)
    with _one_process():
        manager = CheckpointManager(out / CHECKPOINTS_NAME, config=CheckpointConfig(), log=lambda line: None)
        manager.prepare()
        manager.save(manifest, shards)


@contextmanager
def _one_process() -> Iterator[None]:
    """The process group that saving asks for, of this process alone."""
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if started_here:
            dist.destroy_process_group()


def _copy_tokenizer(source: Path, folder: Path, end_ids: Any, log: Callable[[str], None]) -> None:
    """Keep the tokenizer for a later export: its files, and the ids that end a text."""
    if not (source / TOKENIZER_FILE).is_file():
        log(f"note: {source} has no {TOKENIZER_FILE}, so the tokenizer is left out.")
        return
    folder.mkdir()
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if end_ids is not None:
        (folder / GENERATION_FILE).write_text(json.dumps({"eos_token_id": end_ids}) + "\n", encoding="utf-8")
