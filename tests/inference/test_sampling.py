"""Filters against plain Python over sorted lists and against `transformers`; what a request draws, and from what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.sampling import Sampler, Sampling, filter_logits

DISTINCT_LOGITS = st.lists(st.integers(-300, 300), min_size=2, max_size=40, unique=True).map(
    lambda values: [value / 25.0 for value in values]
)
FILTERS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.sampled_from([0.05, 0.5, 0.83, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)


def sampler(settings: Sequence[Sampling], *, vocab_size: int, prompts=None, num_ids: int | None = None) -> Sampler:
    return Sampler(
        settings,
        prompts or [[0]] * len(settings),
        vocab_size=vocab_size,
        num_ids=num_ids or vocab_size,
        device=torch.device("cpu"),
    )


def kept_ids(logits: list[float], one: Sampling) -> set[int]:
    """The definition of each filter, over a sorted list."""
    left = sorted(range(len(logits)), key=lambda token: -logits[token])
    if one.top_k is not None:
        left = left[: one.top_k]

    def share() -> list[float]:
        weights = [math.exp((logits[token] - logits[left[0]]) / one.temperature) for token in left]
        return [weight / sum(weights) for weight in weights]

    total, count = 0.0, 0
    for part in share():
        if total >= one.top_p - 1e-12:
            break
        total, count = total + part, count + 1
    left = left[:count] if one.top_p < 1 else left
    parts = share()
    return {token for token, part in zip(left, parts, strict=True) if part >= one.min_p * parts[0] * (1 - 1e-9)}


def ids_of(logits: list[float], one: Sampling) -> set[int]:
    values, ids = filter_logits(torch.tensor([logits], dtype=torch.float64), one)
    columns = torch.isfinite(values[0]).nonzero()[:, 0]
    return set((columns if ids is None else ids[0, columns]).tolist())


@settings(deadline=None, max_examples=150)
@given(logits=DISTINCT_LOGITS, one=FILTERS)
def test_filters_keep_what_they_are_defined_to_keep(logits: list[float], one: Sampling) -> None:
    assert ids_of(logits, one) == kept_ids(logits, one)


@settings(deadline=None, max_examples=100)
@given(logits=DISTINCT_LOGITS, one=FILTERS, seed=st.integers(0, 2**63 - 1))
def test_a_drawn_token_has_passed_the_filters(logits: list[float], one: Sampling, seed: int) -> None:
    chosen, _ = sampler(
        [Sampling(temperature=one.temperature, top_k=one.top_k, top_p=one.top_p, min_p=one.min_p, seed=seed)],
        vocab_size=len(logits),
    ).choose(torch.tensor([logits]))
    assert chosen.item() in kept_ids(logits, one)


def test_filters_are_those_of_transformers() -> None:
    """The same probabilities as the library's own processors in the library's order."""
    from transformers.generation import logits_process as processors  # takes seconds to import

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    prompt = [3, 3, 17, 49]
    one = Sampling(repetition_penalty=1.3, temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
    expected = logits.clone()
    for processor in (
        processors.RepetitionPenaltyLogitsProcessor(1.3),
        processors.TemperatureLogitsWarper(0.8),
        processors.TopKLogitsWarper(20),
        processors.TopPLogitsWarper(0.9),
        processors.MinPLogitsWarper(0.05),
    ):
        expected = processor(torch.tensor([prompt]), expected)
    rows = [replace(one, seed=seed) for seed in range(20_000)]
    drawn = Counter(
        sampler(rows, vocab_size=50, prompts=[prompt] * 20_000).choose(logits.expand(20_000, -1))[0].tolist()
    )
    probabilities = expected.softmax(-1)[0]
    assert set(drawn) <= set(probabilities.nonzero()[:, 0].tolist())
    for token in range(50):  # five standard deviations
        p = probabilities[token].item()
        assert abs(drawn[token] / 20_000 - p) <= 5 * math.sqrt(p * (1 - p) / 20_000) + 1e-12, token


def test_what_a_row_draws_does_not_depend_on_its_batch() -> None:
    draw = torch.Generator().manual_seed(1)
    steps = [torch.randn(4, 30, generator=draw) for _ in range(25)]
    rows = [
        Sampling(temperature=1.0, seed=5),
        Sampling(temperature=0.0, seed=5),
        Sampling(temperature=1.5, top_k=7, repetition_penalty=1.2, seed=6),
        Sampling(temperature=1.0, seed=7),
    ]
    together = sampler(rows, vocab_size=30)
    found = [together.choose(logits)[0].tolist() for logits in steps[:10]]
    together.select([3, 0])
    later = [together.choose(logits[[3, 0]])[0].tolist() for logits in steps[10:]]
    for row, one in enumerate(rows):
        alone = sampler([one], vocab_size=30)
        expected = [alone.choose(logits[row : row + 1])[0].item() for logits in steps]
        assert [tokens[row] for tokens in found] == expected[:10]
        if row in (3, 0):
            assert [tokens[(3, 0).index(row)] for tokens in later] == expected[10:]
    assert [tokens[0] for tokens in found] != [tokens[3] for tokens in found]


def test_the_repetition_penalty_counts_prompt_and_text() -> None:
    """Logits 4, 3.9, -1, -1.1: with penalty 2 the prompt's token 0 falls to 2, then 1 to 1.95, -1 to -2."""
    one = Sampling(repetition_penalty=2.0)
    row = sampler([one], vocab_size=4, prompts=[[0]])
    logits = torch.tensor([[4.0, 3.9, -1.0, -1.1]])
    assert [row.choose(logits)[0].item() for _ in range(2)] == [1, 0]
    assert row.choose(torch.tensor([[0.5, 0.5, -1.0, -1.5]]))[0].item() == 0
    assert row.choose(torch.tensor([[-1.0, -1.2, -1.9, -1.8]]))[0].item() == 3
    assert row.choose(torch.tensor([[-1.0, -1.2, -1.9, -1.8]]))[0].item() == 2


@pytest.mark.parametrize("one", [Sampling(), Sampling(temperature=5.0), Sampling(temperature=5.0, top_k=9, top_p=0.99)])
def test_ids_that_no_tokenizer_has_are_never_chosen(one: Sampling) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 50.0, 60.0]])
    row = sampler([one], vocab_size=5, num_ids=3)
    chosen = {row.choose(logits)[0].item() for _ in range(200)}
    assert chosen == ({2} if one.temperature == 0 else {0, 1, 2})
    token, logprob = row.choose(torch.tensor([[0.0, 0.0, 1000.0, 50.0, 2000.0]]))
    assert (token.item(), logprob.item()) == (2, -1000.0)


@pytest.mark.parametrize("num_ids", [3, 4, 5])
def test_log_probabilities_are_the_models_own(num_ids: int) -> None:
    """Over all of its ids, whichever the tokenizer knows."""
    logits = torch.tensor([[1.0, 2.0, 4.0, 3.5, 3.9]])
    for one in (Sampling(), Sampling(temperature=0.01), Sampling(temperature=3.0, top_k=1, repetition_penalty=1.01)):
        tokens, logprobs = sampler([one], vocab_size=5, prompts=[[1, 4]], num_ids=num_ids).choose(logits)
        assert tokens.item() == 2
        assert logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 2].item(), abs=1e-6)


def test_extreme_temperatures_are_finite() -> None:
    logits = torch.tensor([[100.0, 101.0, -torch.inf]])
    assert sampler([Sampling(temperature=1e-300)], vocab_size=3).choose(logits)[0].item() == 1
    row = sampler([Sampling(temperature=1e30, seed=1)], vocab_size=3)
    assert {row.choose(logits)[0].item() for _ in range(50)} == {0, 1}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must not be negative"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": 1.5}, "min_p=1.5: must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition penalty=0.0: must be greater than 0"),
    ],
)
def test_refusals(values: dict[str, float], expected: str) -> None:
    with pytest.raises(DecodeError, match=expected):
        Sampling(**values)
