"""The tokenizer of a model: where it is, and the files by which `AutoTokenizer` makes the ids that the model knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fbt_megatron.config.schema import DataConfig
from fbt_megatron.data import storage
from fbt_megatron.data.chat_template import load_chat_template
from fbt_megatron.data.conversations import ConversationLines
from fbt_megatron.data.dataset import DocumentDataset
from fbt_megatron.data.format import DATASET_FILE, DatasetInfo, dataset_from_json
from fbt_megatron.data.shards import Described
from fbt_megatron.data.tokenizer import (
    TOKENIZER_FILE,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    starts_with_bos,
)
from fbt_megatron.data.tokenizer_config import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    read_json,
    token_text,
    tokenizer_folder,
)
from fbt_megatron.errors import CheckpointError, DataError

TOKENIZER_FOLDER = "tokenizer"
"""Of an imported model, beside its checkpoints."""
GENERATION_FILE = "generation_config.json"
NO_TOKENIZER = "none"
BYTE_EOS_TOKEN = "<|endoftext|>"

_PROBE = "a 1"
_NO_IDS_KEYS = ("truncation", "padding", "post_processor")
"""Of a tokenizer's definition: what documents are not subject to, and an export may change."""
_KEPT_KEYS = ("chat_template", "pad_token", "unk_token")


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer, whether its documents start with BOS, and the folder with what else belongs to it."""

    tokenizer: Tokenizer
    add_bos: bool
    folder: Path | None
    chat_template: Path | None = None
    """File with the template of its conversations, where it is not the folder's own."""
    turn_ids: frozenset[int] = frozenset()
    """Ids that end an answer, where the model was trained on conversations."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids that `config.json` and `generation_config.json` name."""

    bos: int | None = None
    eos: int | list[int] | None = None
    pad: int | None = None

    def as_config(self) -> dict[str, Any]:
        """The keys of both files; None stays out."""
        values = {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}
        return {key: value for key, value in values.items() if value is not None}


def find_tokenizer(data: DataConfig, named: str | None, *, beside: Path, vocab_size: int) -> ModelTokenizer | None:
    """The tokenizer that `named` (a path, `bytes`, or `none`) says; None for `none`.

    Without it that of the folder `beside` the checkpoints, where an imported model has its own, else that of the run's
    data. With it comes the template of a run on conversations. Raises CheckpointError where none is found or it has
    more ids than the model, DataError where it, or the template, is damaged or not there.
    """
    if named == NO_TOKENIZER:
        return None
    described = None if data.kind == "chat" else _described(data)
    own = str(beside) if (beside / TOKENIZER_FILE).is_file() else None
    spec = named or own or data.tokenizer or (None if described is None else _spec_of(*described))
    if spec is None:
        raise CheckpointError(
            "the tokenizer: the run's data (data.train) is not at hand and data.tokenizer names none. Name it with "
            f"--tokenizer (a folder, {TOKENIZER_FILE} or bytes), or leave it out with --tokenizer {NO_TOKENIZER}."
        )
    tokenizer = load_tokenizer(spec)
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"tokenizer {spec} has {tokenizer.vocab_size} ids, but the model has {vocab_size}. Name the model's own "
            "with --tokenizer."
        )
    folder = None if spec == "bytes" else tokenizer_folder(spec)
    found = ModelTokenizer(tokenizer, _adds_bos(tokenizer, folder, described), folder)
    return found if data.kind != "chat" else _with_trained_template(found, data, named)


def _with_trained_template(found: ModelTokenizer, data: DataConfig, named: str | None) -> ModelTokenizer:
    """The tokenizer of a run on conversations with the run's template.

    A folder that the user names may hold it where the file of the run is not at hand.
    """
    file = None if data.chat_template is None else Path(data.chat_template)
    if file is not None and not file.is_file():
        if named is None:
            raise DataError(
                f"data.chat_template={file}: the template that the run was trained with is not there. Put it back, or "
                f"name with --tokenizer a folder that holds it as {CHAT_TEMPLATE_FILE} beside {TOKENIZER_FILE}."
            )
        file = None
    found = replace(found, chat_template=file)
    conversations = open_template(found)
    if conversations is None:
        raise DataError(
            f"tokenizer {found.folder or 'bytes'} has no chat template, but the run was trained with one (data.kind: "
            f"chat). Name with --tokenizer a folder that holds it as {CHAT_TEMPLATE_FILE} beside {TOKENIZER_FILE}."
        )
    return replace(found, turn_ids=conversations.end_ids)


def open_template(found: ModelTokenizer) -> ConversationLines | None:
    """What renders and encodes conversations as in training; None for raw bytes and where there is no template.

    Raises DataError where the template cannot be read.
    """
    tokenizer, folder = found.tokenizer, found.folder
    if folder is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    has_own = (folder / CHAT_TEMPLATE_FILE).is_file() or read_json(folder, TOKENIZER_CONFIG_FILE).get("chat_template")
    if found.chat_template is None and not has_own:
        return None
    file = None if found.chat_template is None else str(found.chat_template)
    return ConversationLines(tokenizer, load_chat_template(file, spec=str(folder), tokenizer=tokenizer))


def _adds_bos(tokenizer: Tokenizer, folder: Path | None, described: tuple[str, DatasetInfo] | None) -> bool:
    """As the training data was built; else as the tokenizer's files state, else the rule for new data."""
    if described is not None and described[1].tokenizer.fingerprint == tokenizer.fingerprint:
        return described[1].add_bos
    stated = read_json(folder, TOKENIZER_CONFIG_FILE).get("add_bos_token")
    return starts_with_bos(tokenizer, stated if isinstance(stated, bool) else None)


def _described(data: DataConfig) -> tuple[str, DatasetInfo] | None:
    """Folder and description of the training data, where they can be read."""
    first = data.train if isinstance(data.train, str) else next(iter(data.train), "")
    if not first or storage.is_pipe(first):
        return None
    folder = storage.parent(first) if first.endswith(storage.SHARD_SUFFIXES) else first
    location = storage.join(folder, DATASET_FILE)
    try:
        text = storage.read_bytes_if_there(location)
    except DataError:
        return None
    return None if text is None else (folder, dataset_from_json(text, location))


def _spec_of(folder: str, info: DatasetInfo) -> str | None:
    if info.tokenizer.kind == "bytes":
        return "bytes"
    if info.tokenizer.file is None or storage.is_remote(folder):
        return None
    path = Path(storage.join(folder, info.tokenizer.file))
    if not path.exists():
        return None
    if load_tokenizer(str(path.parent)).fingerprint != info.tokenizer.fingerprint:
        raise DataError(f"{path}: is not the tokenizer that {folder} was built with. Name that one with --tokenizer.")
    return str(path.parent)


def makes_ids_of(tokenizer: Tokenizer, dataset: DocumentDataset) -> bool:
    """Whether a data set's ids are those of `tokenizer`, or of one that gives each text the same, such as its export.

    True where nothing tells. Raises DataError where the tokenizer beside the data cannot be read.
    """
    described, own = dataset.described, dataset.tokenizer
    if described is not None:
        info = described.info
        if info.tokenizer.fingerprint == tokenizer.fingerprint:
            return True
        definition, special = _stored_definition(described), (info.bos_id, info.eos_id)
    elif own is not None:
        definition, special = _definition(own), (own.bos_id, own.eos_id)
    else:
        return True
    if definition is None or special != (tokenizer.bos_id, tokenizer.eos_id):
        return False
    return _what_makes_ids(definition) == _what_makes_ids(_definition(tokenizer))


def _stored_definition(described: Described) -> str | None:
    """Text of the tokenizer that a data set was built with; None where it is not beside the data."""
    if described.info.tokenizer.file is None:
        return _byte_definition()
    found = storage.read_bytes_if_there(storage.join(described.folder, described.info.tokenizer.file))
    return None if found is None else found.decode(errors="replace")


def _definition(tokenizer: Tokenizer) -> str:
    return tokenizer.definition if isinstance(tokenizer, HuggingFaceTokenizer) else _byte_definition()


def _what_makes_ids(definition: str) -> dict[str, Any] | None:
    try:
        return {key: value for key, value in json.loads(definition).items() if key not in _NO_IDS_KEYS}
    except (ValueError, AttributeError):
        return None


def tokenizer_files(found: ModelTokenizer, *, seq_length: int) -> dict[str, str]:
    """Name -> text of the files that belong beside the weights, but for `generation_config.json`.

    `AutoTokenizer` gives with them the ids of `encode`, after BOS where documents start with it, and no EOS.
    """
    kept = read_json(found.folder, TOKENIZER_CONFIG_FILE)
    if found.chat_template is not None:
        kept.pop("chat_template", None)
    if isinstance(found.tokenizer, HuggingFaceTokenizer):
        definition, special = found.tokenizer.definition, found.tokenizer.special_tokens
    else:
        definition, special = _byte_definition(), {"eos_token": BYTE_EOS_TOKEN}
    values = {key: token_text(kept[key]) for key in _KEPT_KEYS if kept.get(key) is not None} | special
    values.setdefault("pad_token", special["eos_token"])
    values |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "add_bos_token": found.add_bos,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        TOKENIZER_FILE: _for_prompts(definition, found),
        TOKENIZER_CONFIG_FILE: json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
    }
    template = found.chat_template or (None if found.folder is None else found.folder / CHAT_TEMPLATE_FILE)
    if template is not None and template.is_file():
        files[CHAT_TEMPLATE_FILE] = template.read_text(encoding="utf-8")
    return files


def end_ids(found: ModelTokenizer) -> int | list[int]:
    """The id that ends a text, or those that a `generation_config.json` beside the tokenizer names.

    And those that end an answer, where the model was trained on conversations.
    """
    stated = read_json(found.folder, GENERATION_FILE).get("eos_token_id")
    ends = stated if isinstance(stated, int | list) else found.tokenizer.eos_id
    listed = ends if isinstance(ends, list) else [ends]
    of_turns = sorted(found.turn_ids.difference(listed))
    return [*listed, *of_turns] if of_turns else ends


def special_ids(found: ModelTokenizer, files: Mapping[str, str]) -> SpecialIds:
    """Ids of BOS, EOS (see `end_ids`) and padding, for a tokenizer with the files of `tokenizer_files`."""
    tokenizer = found.tokenizer
    pad = tokenizers.Tokenizer.from_str(files[TOKENIZER_FILE]).token_to_id(
        json.loads(files[TOKENIZER_CONFIG_FILE])["pad_token"]
    )
    return SpecialIds(tokenizer.bos_id, end_ids(found), tokenizer.eos_id if pad is None else pad)


def _for_prompts(definition: str, found: ModelTokenizer) -> str:
    """The definition itself where it gives the wanted ids, else with another post-processor."""
    tokenizer = tokenizers.Tokenizer.from_str(definition)
    bos_id = found.tokenizer.bos_id
    start = [bos_id] if found.add_bos and bos_id is not None else []
    wanted = [*start, *tokenizer.encode(_PROBE, add_special_tokens=False).ids]
    parsed = json.loads(definition)
    whole_texts = parsed.get("truncation") is None and parsed.get("padding") is None
    if whole_texts and tokenizer.encode(_PROBE).ids == wanted:
        return definition
    parsed |= {"truncation": None, "padding": None}
    parsed["post_processor"] = _starting_with(tokenizer, start[0]) if start else None
    return json.dumps(parsed, ensure_ascii=False, indent=2)


def _starting_with(tokenizer: tokenizers.Tokenizer, token_id: int) -> dict[str, Any]:
    token = tokenizer.id_to_token(token_id)
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _byte_definition() -> str:
    """Raw bytes as a tokenizer of the library: 256 characters, one for each byte, nothing merged, and EOS."""
    characters = {_byte_character(byte): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BYTE_EOS_TOKEN, special=True, normalized=False)])
    return str(tokenizer.to_str(pretty=True))


def _byte_character(byte: int) -> str:
    """The character that byte-level tokenizers write for a byte: itself where it prints, else one from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    return chr(256 + sum(other not in printing for other in range(byte)))
