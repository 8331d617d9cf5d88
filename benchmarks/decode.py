"""Cost of decoding with feedback, and the speed of decoding beside `transformers`.

Measured with random weights in the shape of configs/fbt_125m.yaml, fp32, one request: the time of one token in modes
soft and fused over that in standard; the time of two prefill passes over one; and tokens per second, greedy, prompt
included, over `generate` of the stock Qwen3 of the same shape, which has neither gates nor norms behind the branches.
Time is processor time on a CPU and wall-clock time on a GPU.

  python benchmarks/decode.py [--repetitions N] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.measure import Row, parse_arguments, ratios, report, time_in_turn
from torch import Tensor

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.inference.decoder import MODES, DecodeMode, Decoder
from fbt_megatron.inference.generation import Generator, Request
from fbt_megatron.inference.model import DecoderModel, Targets

_CONFIG = Path(__file__).parents[1] / "configs" / "fbt_125m.yaml"
_ROUNDS_PER_SEQUENCE = 5
"""Rounds of single tokens for each round of whole prompts and texts."""


def main() -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(__doc__, repetitions=40)
    config = load_config(_CONFIG).model
    prompt_length, text_length = 256, 32
    if arguments.quick:
        config = replace(config, num_layers=2, hidden_size=64, ffn_hidden_size=128, vocab_size=512, sliding_window=8)
        prompt_length, text_length = 32, 8
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DecoderModel(config, "glu", read=partial(_draw, config), device=device)
    decoders = {name: Decoder(model, DecodeMode.of(name)) for name in MODES}
    prompt = torch.randint(0, config.vocab_size, (prompt_length,), generator=torch.Generator().manual_seed(0)).tolist()
    rounds = max(2, arguments.repetitions // _ROUNDS_PER_SEQUENCE)

    steps = {name: _stepper(decoder, prompt[:32], arguments.repetitions + 1) for name, decoder in decoders.items()}
    step_times = time_in_turn(steps, repetitions=arguments.repetitions)
    prefill: dict[str, Callable[[], object]] = {
        name: partial(decoders[name].prefill, [prompt], max_new_tokens=1) for name in ("standard", "fused")
    }
    prefill_times = time_in_turn(prefill, repetitions=rounds)
    request = Request(tuple(prompt[:32]), max_tokens=text_length)
    texts: dict[str, Callable[[], object]] = {
        "here": partial(Generator(decoders["standard"]).generate, [request]),
        "transformers": _stock_generate(config, request, device),
    }
    text_times = time_in_turn(texts, repetitions=rounds)

    rows = [Row.over(f"{name}, seconds per token", times) for name, times in step_times.items()]
    rows += [
        Row.over(f"{name} / standard, time per token", ratios(step_times[name], step_times["standard"]))
        for name in ("soft", "fused")
    ]
    rows.append(Row.over("fused / standard, prefill", ratios(prefill_times["fused"], prefill_times["standard"])))
    for name, times in text_times.items():
        rows.append(Row.over(f"{name}, tokens per second", [text_length / seconds for seconds in times]))
    rows.append(
        Row.over("here / transformers, tokens per second", ratios(text_times["transformers"], text_times["here"]))
    )
    setting = (
        f"{model.num_parameters:,} parameters, fp32, one request; steps after 32 tokens, prefill of {prompt_length}, "
        f"texts of {text_length} tokens after 32; sequences measured in {rounds} rounds"
    )
    report("decode", setting, rows, as_json=arguments.json)
    return 0


def _draw(config: ModelConfig, targets: Targets) -> None:
    """Random weights; norms of 1."""
    draw = torch.Generator().manual_seed(0)
    for target in targets.values():
        if target.dim() == 1:
            target.fill_(1.0)
        else:
            target.copy_(torch.empty(target.shape).normal_(0.0, config.init_std, generator=draw))


def _stepper(decoder: Decoder, prompt: list[int], num_steps: int) -> Callable[[], object]:
    """A function that decodes one more token, greedily; it can be called `num_steps` times."""
    state = decoder.prefill([prompt], max_new_tokens=num_steps)

    def step() -> Tensor:
        tokens = decoder.logits(state).argmax(dim=-1)
        decoder.step(state, tokens)
        return tokens

    return step


def _stock_generate(config: ModelConfig, request: Request, device: str) -> Callable[[], Any]:
    """Greedy `generate` of Qwen3 with random weights, as long as the request asks for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    stock = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            head_dim=config.head_dim,
            max_position_embeddings=config.seq_length,
            tie_word_embeddings=config.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).to(device)
    stock.eval()
    ids = torch.tensor([request.prompt], device=device)
    return partial(
        stock.generate,
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_tokens,
        min_new_tokens=request.max_tokens,
        do_sample=False,
    )


if __name__ == "__main__":
    sys.exit(main())
