"""What lies beside `tokenizer.json`: the names of special tokens, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fbt_megatron.errors import DataError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


def read_json(folder: Path | None, name: str) -> dict[str, Any]:
    """The content of a JSON file that may be absent; raises DataError where it cannot be read."""
    if folder is None or not (folder / name).is_file():
        return {}
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name}: cannot be read ({error}). Repair or remove it.") from None
    return content if isinstance(content, dict) else {}


def tokenizer_folder(spec: str) -> Path:
    """The folder of a tokenizer that is named by itself or by its file."""
    path = Path(spec)
    return path if path.is_dir() else path.parent


def token_text(value: Any) -> Any:
    """A special token may be written as text, or as an object with its text in `content`."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def named_tokens(folder: Path) -> dict[str, str]:
    """Names (`eos_token`, ...) and texts of the special tokens of a tokenizer; of two `tokenizer_config.json` counts.

    Raises:
        DataError: a file cannot be read.
    """
    names: dict[str, str] = {}
    for file in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
        for key, value in read_json(folder, file).items():
            text = token_text(value)
            if key.endswith("_token") and isinstance(text, str) and text:
                names[key] = text
    return names
