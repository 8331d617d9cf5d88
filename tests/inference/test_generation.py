"""Where a text ends, what a batch hands out, and that a request which has ended takes no more work."""

from __future__ import annotations

import pytest
import torch

from fbt_megatron.data.tokenizer import ByteTokenizer
from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.decoder import Decoder, DecodeState
from fbt_megatron.inference.generation import Generator, Request
from fbt_megatron.inference.sampling import Sampling
from fbt_megatron.inference.scoring import score
from fbt_megatron.parallel.topology import ParallelTopology
from tests.inference.toy import MODES, SEQ_LENGTH, Pair, random_prompts, reference_logits


class Letters:
    """Token n is the n-th letter of A-Z, a-z, 0-9 (less two)."""

    LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz01234567"

    def decode(self, ids) -> str:
        return "".join(self.LETTERS[token] for token in ids)


class Counting(Decoder):
    """Counts the rows of every step."""

    rows: list[int]

    def step(self, state: DecodeState, tokens: torch.Tensor) -> None:
        self.rows.append(len(tokens))
        super().step(state, tokens)


@pytest.fixture(scope="module")
def pair(topology: ParallelTopology) -> Pair:
    return Pair("glu, windows, untied", topology)


@pytest.fixture(params=MODES, ids=str)
def generator(pair: Pair, request: pytest.FixtureRequest) -> Generator:
    decoder = Counting(pair.exact_model, request.param)
    decoder.rows = []
    return Generator(decoder, tokenizer=Letters())


def text_of(tokens) -> str:
    return Letters().decode(tokens)


def test_greedy_tokens_and_log_probabilities_are_those_of_the_reference(generator: Generator, pair: Pair) -> None:
    (prompt,) = random_prompts(6, seed=1)
    (done,) = generator.generate([Request(tuple(prompt), max_tokens=8)])
    mode = generator.decoder.mode
    logits = reference_logits(pair.config, pair.weights, mode, prompt, done.tokens[:-1])
    assert list(done.tokens) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)[torch.arange(8), torch.tensor(done.tokens)]
    assert done.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert (done.finish, done.text) == ("length", text_of(done.tokens))
    assert generator.decoder.rows == [1] * 7, "the last token needs no step"


def test_every_way_to_end_in_one_batch(generator: Generator) -> None:
    """The batch's texts are those of each request alone, and rows that have ended leave."""
    prompts = [tuple(prompt) for prompt in random_prompts(5, 9, 2, 7, 40, seed=2)]
    plain = [generator.generate([Request(prompt, max_tokens=20)])[0].tokens for prompt in prompts]

    def ends(tokens: tuple[int, ...], length: int) -> int:
        """The first of the tokens from `length` on that has not occurred before."""
        return next(place for place in range(length, 20) if tokens[place] not in tokens[:place])

    eos_at, stop_at = ends(plain[0], 4), ends(plain[2], 6)
    stop = text_of(plain[2][stop_at - 1 : stop_at + 1])
    requests = [
        Request(prompts[0], max_tokens=20, eos_ids=frozenset({plain[0][eos_at], 777})),
        Request(prompts[1], max_tokens=3),
        Request(prompts[2], max_tokens=20, stop=("never", stop)),
        Request(prompts[3], max_tokens=20, sampling=Sampling(temperature=1.5, top_k=20, seed=4)),
        Request(prompts[4], max_tokens=500),
    ]
    generator.decoder.rows.clear()
    together = generator.generate(requests)
    steps = generator.decoder.rows.copy()
    assert together == [generator.generate([request])[0] for request in requests]
    assert [done.finish for done in together] == ["eos", "length", "stop", "length", "context"]
    assert together[0].tokens == plain[0][: eos_at + 1]
    assert together[0].text == text_of(plain[0][:eos_at])
    assert together[2].tokens == plain[2][: stop_at + 1]
    assert together[2].text == text_of(plain[2][: stop_at - 1])
    assert len(together[4].tokens) == SEQ_LENGTH + 1 - 40
    lengths = [len(done.tokens) for done in together]
    assert steps == [sum(length > step for length in lengths) for step in range(1, max(lengths))]


def test_streaming_hands_out_what_generate_collects(generator: Generator) -> None:
    requests = [Request(tuple(prompt), max_tokens=12, stop=("AB",)) for prompt in random_prompts(3, 6, seed=5)]
    completions = generator.generate(requests)
    seen = [[], []]
    for token in generator.stream(requests):
        assert not seen[token.request] or seen[token.request][-1].finish is None
        seen[token.request].append(token)
    for tokens, done in zip(seen, completions, strict=True):
        assert tuple(token.token for token in tokens) == done.tokens
        assert "".join(token.text for token in tokens) == done.text
        assert tokens[-1].finish == done.finish


def test_batches_of_any_size_give_the_same(generator: Generator) -> None:
    sampling = [Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=seed) for seed in range(5)]
    prompts = random_prompts(3, 8, 1, 4, 6, seed=6)
    requests = [Request(tuple(p), max_tokens=6, sampling=s) for p, s in zip(prompts, sampling, strict=True)]
    expected = generator.generate(requests, batch_size=1)
    assert len({done.tokens for done in expected}) == 5
    for batch_size in (2, 5):
        found = generator.generate(requests, batch_size=batch_size)
        assert [done.tokens for done in found] == [done.tokens for done in expected]


def test_a_full_row_may_be_continued_by_one_token(generator: Generator) -> None:
    (prompt,) = random_prompts(SEQ_LENGTH, seed=7)
    (done,) = generator.generate([Request(tuple(prompt), max_tokens=5)])
    assert (len(done.tokens), done.finish) == (1, "context")


def test_ids_beyond_the_tokenizer_are_never_generated(pair: Pair) -> None:
    decoder = Decoder(pair.model, MODES[1])
    request = Request((1, 2, 3), max_tokens=20, sampling=Sampling(temperature=5.0))
    assert max(Generator(decoder).generate([request])[0].tokens) >= 30
    (done,) = Generator(decoder, num_ids=30).generate([request])
    assert max(done.tokens) < 30
    (scored,) = score(decoder, [(request.prompt, done.tokens)])
    assert done.logprobs == pytest.approx(scored.logprobs, abs=1e-4)


def test_refusals(pair: Pair) -> None:
    generator = Generator(Decoder(pair.model, MODES[0]))
    assert generator.generate([]) == []
    with pytest.raises(DecodeError, match="max tokens=0: must be at least 1"):
        Request((1,), max_tokens=0)
    for request, expected in [
        (Request((1,), stop=("x",)), "stop strings need a tokenizer"),
        (Request(()), "prompt 2 has no tokens"),
        (Request((60,)), "prompt 2 holds token id 60"),
        (Request((1,) * 49), "prompt 2 has 49 tokens"),
    ]:
        with pytest.raises(DecodeError, match=expected):
            generator.generate([Request((1,)), request], batch_size=1)
        with pytest.raises(DecodeError, match=expected):
            generator.stream([Request((1,)), request])


def test_a_byte_tokenizer_streams_whole_characters(pair: Pair) -> None:
    """Token ids of the toy are bytes below 60, which are ASCII."""
    generator = Generator(Decoder(pair.model, MODES[0]), tokenizer=ByteTokenizer())
    (done,) = generator.generate([Request((40, 41), max_tokens=10)])
    assert done.text == bytes(done.tokens).decode()
