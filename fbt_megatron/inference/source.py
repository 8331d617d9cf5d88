"""A model to decode with, and its tokenizer: from a run directory, a checkpoint, or a folder for Hugging Face."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from fbt_megatron.checkpoint.manifest import Manifest, hash_file
from fbt_megatron.checkpoint.reading import StoredWeights, open_weights
from fbt_megatron.config.schema import DataConfig, RunConfig
from fbt_megatron.data.chat_template import Messages
from fbt_megatron.data.conversations import ConversationLines
from fbt_megatron.errors import CheckpointError, DecodeError
from fbt_megatron.hf.export import note_untrained_feedback
from fbt_megatron.hf.folder import CONFIG_FILE, read_config
from fbt_megatron.hf.model_config import model_config
from fbt_megatron.hf.names import exported_name
from fbt_megatron.hf.safetensors_files import DTYPES, PRECISION_DTYPES, StoredTensors, open_tensors, tensor_files
from fbt_megatron.hf.tokenizer_files import TOKENIZER_FOLDER, ModelTokenizer, end_ids, find_tokenizer, open_template
from fbt_megatron.inference.model import DecoderModel, Targets
from fbt_megatron.planner import logical_tensors


@dataclass(frozen=True)
class LoadedModel:
    """A model and how texts become its tokens."""

    model: DecoderModel
    tokenizer: ModelTokenizer
    path: Path
    """The checkpoint or folder that was taken."""
    config: RunConfig | None = None
    """Of the run that wrote the checkpoint; None for an exported folder."""

    def digest(self) -> str:
        """SHA-256 (hex) of the files that the weights came from, which may be replaced under their names.

        Those of a checkpoint are hashed in its manifest; an exported folder is read as a whole. Raises CheckpointError.
        """
        if self.config is not None:
            hashes = {name: record.sha256 for name, record in Manifest.read(self.path).files.items()}
        else:
            try:
                files = [self.path / CONFIG_FILE, *tensor_files(self.path)]
                hashes = {path.name: hash_file(path).sha256 for path in files}
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error}). Copy the model again.") from None
        return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text: that of the tokenizer, or those that a `generation_config.json` beside it names.

        And those that end an answer, where the run was on conversations.
        """
        found = end_ids(self.tokenizer)
        return frozenset(found if isinstance(found, list) else [found])

    @property
    def num_ids(self) -> int:
        """Ids that the tokenizer has; the model may have more."""
        return self.tokenizer.tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, which starts as the documents of the training do: with BOS or without."""
        bos_id = self.tokenizer.tokenizer.bos_id
        start = [bos_id] if self.tokenizer.add_bos and bos_id is not None else []
        return [*start, *self.tokenizer.tokenizer.encode(text)]

    @cached_property
    def conversations(self) -> ConversationLines:
        """What makes a conversation ids, as in training; raises DecodeError where there is no chat template."""
        found = open_template(self.tokenizer)
        if found is None:
            raise DecodeError(
                f"the tokenizer of {self.path} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json). Leave conversations out, or name a folder with one as the tokenizer."
            )
        return found

    def encode_chat(self, messages: Messages) -> list[int]:
        """Ids of a conversation up to the answer that is to follow; raises DecodeError as `conversations` does."""
        return self.conversations.encode_prompt(self.conversations.render_prompt(messages, "this conversation"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self.tokenizer.tokenizer.decode(ids)


def find_device(named: str | None) -> torch.device:
    """The device `named` (default: a GPU where there is one); raises DecodeError where PyTorch cannot compute."""
    name = named or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).split("\n")[0]
        raise DecodeError(f"--device {name}: PyTorch cannot compute there ({reason}). Use cpu, or a GPU.") from None
    return torch.device(name)


def load_model(
    source: Path,
    *,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
    tokenizer: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Read the weights at `source`, one tensor at a time and without optimizer state.

    `source` is a run directory or its checkpoints folder (the newest checkpoint is taken), one step folder, or a folder
    written by `tools/convert_to_hf.py`. `dtype` is `float32` or `bfloat16` (default: fp32 on a CPU, else the type of
    the run or the folder), `tokenizer` as in `find_tokenizer`. `log` gets what to know beside.

    Raises CheckpointError where there is no model or it is damaged, ConfigError where it is no FBT, DataError for a
    tokenizer that cannot be read, DecodeError for another `dtype` or a device that PyTorch cannot compute on.
    """
    if dtype is not None and dtype not in DTYPES:
        raise DecodeError(f"dtype={dtype}: must be one of {', '.join(DTYPES)}.")
    device = find_device(str(device))
    if (source / CONFIG_FILE).is_file():
        return _load_exported(source, dtype=dtype, device=device, tokenizer=tokenizer)
    weights = open_weights(source)
    config = weights.config
    beside = weights.path.parent.parent / TOKENIZER_FOLDER
    found = _tokenizer(config.data, tokenizer, beside=beside, vocab_size=config.model.vocab_size)
    note_untrained_feedback(config, weights.manifest, log)
    model = DecoderModel(
        config.model,
        config.feedback.fusion,
        read=partial(_read_checkpoint, weights, config),
        dtype=_dtype(dtype, device, PRECISION_DTYPES[config.parallel.precision]),
        device=device,
    )
    return LoadedModel(model, found, weights.path, config)


def _load_exported(folder: Path, *, dtype: str | None, device: torch.device, tokenizer: str | None) -> LoadedModel:
    exported = read_config(folder)
    config, fusion = model_config(exported, source=str(folder / CONFIG_FILE))
    found = _tokenizer(DataConfig(), tokenizer, beside=folder, vocab_size=config.vocab_size)
    with open_tensors(folder) as stored:
        model = DecoderModel(
            config,
            fusion,
            read=partial(_read_exported, stored, folder),
            dtype=_dtype(dtype, device, str(exported.get("dtype", "float32"))),
            device=device,
        )
    return LoadedModel(model, found, folder)


def _tokenizer(data: DataConfig, named: str | None, *, beside: Path, vocab_size: int) -> ModelTokenizer:
    found = find_tokenizer(data, named, beside=beside, vocab_size=vocab_size)
    if found is None:
        raise CheckpointError("--tokenizer none: texts need a tokenizer. Name a folder, a tokenizer.json or bytes.")
    return found


def _dtype(named: str | None, device: torch.device, stored: str) -> torch.dtype:
    return DTYPES[named or ("float32" if device.type == "cpu" else stored)]


def _read_checkpoint(weights: StoredWeights, config: RunConfig, targets: Targets) -> None:
    tensors = {tensor.name: tensor for tensor in logical_tensors(config.model, config.feedback)}
    for name, target in targets.items():
        target.copy_(weights.read(tensors[name]))


def _read_exported(stored: StoredTensors, folder: Path, targets: Targets) -> None:
    for name, target in targets.items():
        exported = exported_name(name)
        if exported not in stored.names:
            raise CheckpointError(f"{folder}: {exported} is missing. Copy or export the model again.")
        if stored.shape(exported) != tuple(target.shape):
            raise CheckpointError(
                f"{folder}: {exported} has shape {list(stored.shape(exported))}, but {CONFIG_FILE} asks for "
                f"{list(target.shape)}. Copy or export the model again."
            )
        target.copy_(stored.read(exported))
