"""Small models of every kind, and the recurrence of soft decoding written out without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fbt_megatron.config.schema import ModelConfig, RunConfig
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.model import DecoderModel, Targets
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.parallel.topology import ParallelTopology
from tests.model.reference import Row, Weights, fuse, pass_input, rms_norm, row_losses, stack
from tests.model.toy import tiny_config, whole_tensors

SEQ_LENGTH = 48
WINDOWED = {"sliding_window": 3, "full_attention_every": 2}

CASES: dict[str, RunConfig] = {
    "glu": tiny_config(seq_length=SEQ_LENGTH),
    "glu, windows, untied": tiny_config(seq_length=SEQ_LENGTH, tie_embeddings=False, **WINDOWED),
    "glu, plain embedding, one group": tiny_config(
        seq_length=SEQ_LENGTH, embedding_norm=False, num_query_groups=1, rope_theta=500.0, norm_eps=1e-3, **WINDOWED
    ),
    "concat, windows everywhere": tiny_config(fusion="concat", seq_length=SEQ_LENGTH, sliding_window=5, head_dim=6),
    "add, no gate, no norms beside": tiny_config(
        fusion="add",
        seq_length=SEQ_LENGTH,
        attention_gate=False,
        qk_norm=False,
        post_norm=False,
        residual_scale="none",
        embedding_norm=False,
        tie_embeddings=False,
    ),
    "no feedback": tiny_config(fusion="none", seq_length=SEQ_LENGTH, embedding_norm=False, **WINDOWED),
}
WITH_FEEDBACK = [name for name, config in CASES.items() if config.feedback.fusion != "none"]
MODES = [
    DecodeMode("standard", 1),
    DecodeMode("soft", 1),
    DecodeMode("fused", 2),
    DecodeMode("fused", 3),
]


def trained_model(config: RunConfig, topology: ParallelTopology) -> FBTModel:
    """The trainer's model with random weights; norms are not 1 either, so that none can be left out."""
    model = build_model(config, topology)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.7 + 0.6 * torch.rand(parameter.shape, generator=draw))
    return model


def decoder_model(config: RunConfig, weights: Weights, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """The model for decoding with whole matrices by canonical name."""

    def read(targets: Targets) -> None:
        assert targets.keys() == weights.keys()
        for name, target in targets.items():
            target.copy_(weights[name])

    return DecoderModel(config.model, config.feedback.fusion, read=read, dtype=dtype)


class Pair:
    """One model as the trainer has it and for decoding, in fp32 and in fp64.

    The recurrence of a random model enlarges the smallest difference by half with every token, so what is compared over
    many tokens is computed in fp64.
    """

    def __init__(self, case: str, topology: ParallelTopology) -> None:
        self.config = CASES[case]
        self.trained = trained_model(self.config, topology)
        self.weights = whole_tensors(self.trained)
        self.model = decoder_model(self.config, self.weights)
        self.exact_model = decoder_model(self.config, self.weights, torch.float64)

    def decoder(self, mode: DecodeMode) -> Decoder:
        return Decoder(self.model, mode)

    def exact_decoder(self, mode: DecodeMode) -> Decoder:
        return Decoder(self.exact_model, mode)


def random_prompts(*lengths: int, seed: int = 0, vocab_size: int = 60) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=draw).tolist() for length in lengths]


def reference_logits(
    config: RunConfig, weights: Weights, mode: DecodeMode, prompt: Sequence[int], given: Sequence[int]
) -> Tensor:
    """Logits [1 + given, V] fp64 after the prompt and after each token of `given`, all computed anew for each.

    The prompt's states come from the passes of the mode. After it the recurrence goes on token by token.
    """
    model, fusion = config.model, config.feedback.fusion
    head = weights["embedding.weight" if model.tie_embeddings else "head.weight"]
    if not mode.feedback:
        tokens = [*prompt, *given]
        return row_losses(_row(tokens), weights, model, fusion=fusion)[0][2][len(prompt) - 1 :]
    row, hidden = _row(prompt), None
    for _ in range(mode.prefill_passes):
        inputs = pass_input(row, hidden, weights, model, fusion, None)
        hidden = stack(inputs, weights, model, row.documents, True)
    logits = [head @ hidden[-1]]
    for token in given:
        inputs = torch.cat((inputs, _fused(token, hidden[-1], weights, model, fusion)[None]))
        hidden = stack(inputs, weights, model, [0] * len(inputs), True)
        logits.append(head @ hidden[-1])
    return torch.stack(logits)


def _fused(token: int, state: Tensor, weights: Weights, model: ModelConfig, fusion: str) -> Tensor:
    norm = weights["embedding_norm.weight"]
    embedding = rms_norm(weights["embedding.weight"][token], norm, model.norm_eps)
    return rms_norm(fuse(fusion, state, embedding, weights), norm, model.norm_eps)


def _row(tokens: Sequence[int]) -> Row:
    return Row(list(tokens), [0] * len(tokens), [*tokens[1:], -100])
