"""Run by itself, under another version of transformers: an exported folder gives what was noted beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

MODES = ("standard", "soft", "fused")


def observe(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Logits of three passes, and greedy, sampled-in-beams and continued texts of each mode."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    seen: dict[str, Any] = {"ids": inputs.input_ids.tolist()}
    with torch.no_grad():
        for num_passes in (1, 2, 3):
            logits = model(inputs.input_ids[:1], num_passes=num_passes).logits
            seen[f"logits {num_passes}"] = logits.flatten().tolist()
    for mode in MODES:
        options = {"max_new_tokens": 20, "do_sample": False, "feedback_mode": mode}
        seen[mode] = model.generate(**inputs, **options).tolist()
        seen[f"{mode} beams"] = model.generate(**inputs, **options, num_beams=3).tolist()
        cache = model.generate.__globals__["FBTCache"](model.config, mode)
        with torch.no_grad():
            model(inputs.input_ids[:1, :9], past_key_values=cache)
            cache.crop(-2)
            logits = model(inputs.input_ids[:1, 7:9], past_key_values=cache).logits
        seen[f"{mode} cropped"] = logits.flatten().tolist()
    try:
        model.generate(**inputs, max_new_tokens=2, feedback_mode="soft", use_cache=False)
    except ValueError as error:
        seen["refused"] = str(error)
    return seen


def main() -> None:
    folder, noted, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    assert transformers.__version__ == version, transformers.__version__
    expected = json.loads(noted.read_text())
    seen = observe(folder, expected.pop("texts"))
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        if "logits" in name or "cropped" in name:
            assert torch.allclose(torch.tensor(seen[name]), torch.tensor(value), atol=1e-4, rtol=0.0), name
        else:
            assert seen[name] == value, name


if __name__ == "__main__":
    main()
