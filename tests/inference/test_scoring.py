"""Log-likelihoods against the reference: plain passes, N passes, and the recurrence over given tokens."""

from __future__ import annotations

import pytest
import torch

from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.scoring import score
from fbt_megatron.parallel.topology import ParallelTopology
from tests.inference.toy import CASES, MODES, SEQ_LENGTH, WITH_FEEDBACK, Pair, random_prompts, reference_logits
from tests.model.reference import Row, row_losses


def reference_scores(pair: Pair, mode: DecodeMode, context: list[int], continuation: list[int]) -> torch.Tensor:
    """Logits [continuation, V] that predict each token of the continuation."""
    if mode.name == "soft":
        return reference_logits(pair.config, pair.weights, mode, context, continuation[:-1])
    tokens = [*context, *continuation]
    row = Row(tokens, [0] * len(tokens), [-100] * len(tokens))
    passes = row_losses(
        row, pair.weights, pair.config.model, fusion=pair.config.feedback.fusion, num_passes=mode.prefill_passes
    )
    return passes[-1][2][len(context) - 1 : -1]


@pytest.mark.parametrize(
    ("case", "mode"), [(c, m) for c in CASES for m in MODES if c in WITH_FEEDBACK or not m.feedback]
)
def test_scores_are_those_of_the_reference(topology: ParallelTopology, case: str, mode: DecodeMode) -> None:
    """A batch of unequal contexts and continuations; the third one is what the model itself would say."""
    pair = Pair(case, topology)
    decoder = pair.exact_decoder(mode)
    contexts, continuations = random_prompts(5, 1, 7, 2, seed=1), random_prompts(3, 6, 1, 1, seed=2)
    continuations[2] = [int(reference_scores(pair, mode, contexts[2], [0])[0].argmax())]
    scores = score(decoder, list(zip(contexts, continuations, strict=True)))
    for context, continuation, found in zip(contexts, continuations, scores, strict=True):
        logits = reference_scores(pair, mode, context, continuation)
        expected = logits.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)]
        assert found.logprobs == pytest.approx(expected.tolist(), abs=2e-5)
        assert found.total == pytest.approx(expected.sum().item(), abs=1e-4)
        assert found.is_greedy == (logits.argmax(-1).tolist() == continuation)
    assert scores[2].is_greedy
    assert not scores[1].is_greedy


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_longest_pair_and_the_refusals(topology: ParallelTopology, mode: DecodeMode) -> None:
    decoder = Decoder(Pair("glu", topology).model, mode)
    row = random_prompts(SEQ_LENGTH + 1)[0]
    assert len(score(decoder, [(row[:40], row[40:])])[0].logprobs) == 9
    assert score(decoder, []) == []
    for pair, expected in [
        (([], [1]), "pair 2: the context has no tokens"),
        (([1], []), "pair 2: the continuation has no tokens"),
        (([1], [60]), "pair 2: the continuation holds an id outside"),
        ((row[:40], [*row[40:], 1]), "pair 2 has 50 tokens"),
        (([60], [1]), "pair 2: the context holds an id outside"),
    ]:
        with pytest.raises(DecodeError, match=expected):
            score(decoder, [([1], [2]), pair])
