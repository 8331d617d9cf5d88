"""The `README.md` of an exported model: what it is, how it is loaded, what was left out."""

from __future__ import annotations

from fbt_megatron.config.schema import FeedbackConfig, FusionKind, ModelConfig
from fbt_megatron.planner import logical_tensors

PAPER = "[arXiv 2608.08888](https://arxiv.org/abs/2608.08888)"
_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [full-bandwidth-transformer]\n---\n"

_LOADING = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER{trust})
model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
inputs = tokenizer(["Once upon a time"], return_tensors="pt", padding=True)
output = model.generate(**inputs, max_new_tokens=50{mode})
print(tokenizer.batch_decode(output, skip_special_tokens=True))
```
"""

_MODES = """\
`feedback_mode` is one of

| mode | prompt | generated tokens |
|---|---|---|
| `standard` (default) | one pass | without feedback |
| `soft` | one pass | each fed with the state of the token before |
| `fused` | `prefill_passes` passes (2), each fed with the states of the one before | as `soft` |

Prompts of unequal length are padded on the left. Beam search, sampling and several returned sequences work in all
modes; `soft` and `fused` refuse `use_cache=False`, chunked prefill, assisted decoding and static caches.
`model(input_ids, num_passes=2)` gives the logits of two passes over a whole text, as in training. The model runs its
own code: `trust_remote_code=True`. It is tested with the versions of transformers that `modeling_fbt.py` names.
"""


def fbt_card(model: ModelConfig, fusion: FusionKind, *, dtype: str) -> str:
    """Card of a model with its feedback, or of an ordinary transformer of this project (fusion `none`)."""
    what = f"A full-bandwidth transformer (FBT, {PAPER}): the top state of each token feeds the next one.\n"
    if fusion == "none":
        what = f"A transformer trained as a baseline of full-bandwidth transformers ({PAPER}); it has no feedback.\n"
    mode = "" if fusion == "none" else ', feedback_mode="fused"'
    loading = _LOADING.format(trust=", trust_remote_code=True", mode=mode)
    parts = [what, _shape(model, fusion, dtype), loading]
    if fusion != "none":
        parts.append(_MODES)
    return "\n".join([_FRONT, "# Full-bandwidth transformer\n", *parts])


def plain_card(model: ModelConfig, fusion: FusionKind, *, dtype: str, kind: str) -> str:
    """Card of a model exported as a stock architecture."""
    name = {"qwen3": "Qwen3", "llama": "Llama"}[kind]
    what = f"A transformer in the stock {name} architecture, trained with the method of {PAPER}.\n"
    left_out = (
        "The weights of the latent feedback are left out: this is the model as it decodes without feedback. The modes "
        "with feedback need the export that has its own code.\n"
    )
    loading = _LOADING.format(trust="", mode="")
    parts = [what, *([] if fusion == "none" else [left_out]), _shape(model, "none", dtype), loading]
    return "\n".join([_FRONT, f"# {name} architecture\n", *parts])


def _shape(model: ModelConfig, fusion: FusionKind, dtype: str) -> str:
    tensors = logical_tensors(model, FeedbackConfig(fusion=fusion))
    window = "none" if model.sliding_window is None else f"{model.sliding_window:,} keys"
    if model.sliding_window is not None and model.full_attention_every is not None:
        window += f", full attention in every layer number that {model.full_attention_every} divides"
    rows = {
        "parameters": f"{sum(tensor.numel for tensor in tensors):,}",
        "layers": f"{model.num_layers}",
        "hidden width": f"{model.hidden_size:,}",
        "feed-forward width": f"{model.ffn_hidden_size:,}",
        "heads": f"{model.num_attention_heads} for queries, {model.num_query_groups} for keys and values, "
        f"{model.head_dim} wide",
        "sliding window": window,
        "trained row length": f"{model.seq_length:,} tokens",
        "vocabulary": f"{model.vocab_size:,}",
        "feedback": fusion,
        "type": dtype,
    }
    lines = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    return "\n".join(lines) + "\n"
