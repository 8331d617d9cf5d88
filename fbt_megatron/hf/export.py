"""Exports a training checkpoint as a folder for `transformers`, in one process and without a GPU.

A checkpoint of any layout gives the same bytes. Weights pass through memory one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fbt_megatron.checkpoint.manifest import WEIGHTS, Manifest
from fbt_megatron.checkpoint.reading import StoredWeights, open_weights
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.hf.folder import DEFAULT_SHARD_BYTES, ModelFolder, write_folder
from fbt_megatron.hf.model_card import fbt_card
from fbt_megatron.hf.model_config import ARCHITECTURE, exported_config
from fbt_megatron.hf.names import exported_name
from fbt_megatron.hf.plain_export import plain_folder
from fbt_megatron.hf.safetensors_files import PRECISION_DTYPES, Entry
from fbt_megatron.hf.tokenizer_files import TOKENIZER_FOLDER, find_tokenizer
from fbt_megatron.planner import logical_tensors

CODE_FILES = ("configuration_fbt.py", "modeling_fbt.py")
ExportKind = Literal["fbt", "qwen3", "llama"]


@dataclass(frozen=True)
class ExportSummary:
    """What an export wrote."""

    out: str
    source: str
    """The checkpoint that was taken."""
    kind: str
    dtype: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    has_tokenizer: bool


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    kind: ExportKind = "fbt",
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ExportSummary:
    """Write the checkpoint at `source` (see `open_weights`) to the new folder `out`.

    `kind` other than `fbt` writes the model without feedback as that stock architecture. `dtype` is `float32` or
    `bfloat16` (default: the type that the run computed in), `tokenizer` as in `find_tokenizer`. `log` gets what to know
    beside.

    Raises CheckpointError for a checkpoint that is damaged and an `out` that is in use, ConfigError where the stock
    architecture does not have what the model has, DataError for a tokenizer that cannot be read.
    """
    weights = open_weights(source)
    config = weights.config
    dtype = dtype or PRECISION_DTYPES[config.parallel.precision]
    beside = weights.path.parent.parent / TOKENIZER_FOLDER
    found = find_tokenizer(config.data, tokenizer, beside=beside, vocab_size=config.model.vocab_size)
    if kind == "fbt":
        note_untrained_feedback(config, weights.manifest, log)
        content = _fbt_folder(weights, config, dtype)
    else:
        content = plain_folder(weights, config, dtype, kind)
    content = content.with_tokenizer(found)
    num_bytes = write_folder(out, content, max_shard_bytes=max_shard_bytes)
    return ExportSummary(
        out=str(out),
        source=str(weights.path),
        kind=kind,
        dtype=dtype,
        num_tensors=len(content.entries),
        num_parameters=sum(entry.numel for entry in content.entries),
        num_bytes=num_bytes,
        has_tokenizer=found is not None,
    )


def _fbt_folder(weights: StoredWeights, config: RunConfig, dtype: str) -> ModelFolder:
    tensors = logical_tensors(config.model, config.feedback)
    here = Path(__file__).parent
    names = {"AutoConfig": "configuration_fbt.FBTConfig", "AutoModelForCausalLM": f"modeling_fbt.{ARCHITECTURE}"}
    return ModelFolder(
        config={**exported_config(config.model, config.feedback.fusion), "auto_map": names, "use_cache": True},
        entries=[Entry(exported_name(tensor.name), tensor.shape, partial(weights.read, tensor)) for tensor in tensors],
        dtype=dtype,
        card=fbt_card(config.model, config.feedback.fusion, dtype=dtype),
        code={name: (here / name).read_text(encoding="utf-8") for name in CODE_FILES},
        seq_length=config.model.seq_length,
    )


def note_untrained_feedback(config: RunConfig, manifest: Manifest, log: Callable[[str], None]) -> None:
    """The steps with several passes usually come late: a model from before them has feedback weights as drawn.

    Unless it started from a model that had trained them. Of imported weights nobody knows how they were trained.
    """
    step = manifest.step
    if config.feedback.fusion == "none" or manifest.contents == WEIGHTS:
        return
    begun = [
        phase
        for index, phase in enumerate(config.feedback.schedule)
        if index == 0 or config.feedback.schedule[index - 1].last_step(config.train.steps) < step
    ]
    if step == 0 or all(passes == 1 for phase in begun for passes, share in phase.mix.items() if share > 0):
        load = config.checkpoint.load
        doubt = "" if load is None else f"unless the weights of {load} had it, "
        log(
            f"note: up to step {step} this run has trained without feedback; {doubt}modes soft and fused mean nothing "
            "yet."
        )
