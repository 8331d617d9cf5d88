"""The model class `fbt` of lm-evaluation-harness: what its tasks ask of a model, in one decode mode.

Truncation is the harness's own convention: where a context and what follows it are longer than a row of the training,
the front of the context is left out. An empty context is the token that starts a text, or else the one that ends it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.benchmark import draw_seed
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.generation import Generator, Request
from fbt_megatron.inference.sampling import Sampling
from fbt_megatron.inference.scoring import score
from fbt_megatron.inference.source import load_model

logger = logging.getLogger(__name__)

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_ARGUMENTS = "pretrained, mode, prefill_passes, batch_size, max_gen_toks, seed, tokenizer, dtype, device"
_OTHER_KEYS = ("until", "max_gen_toks", "do_sample")
_LENGTH_NAMES = ("max_new_tokens", "max_tokens", "max_completion_tokens")
"""Other names of `max_gen_toks`, which the harness turns into that one."""

Item = TypeVar("Item")


class FBTHarnessModel(TemplateLM):
    """A model of this project in one decode mode."""

    def __init__(
        self,
        pretrained: str = "",
        mode: str = "standard",
        prefill_passes: int | None = None,
        *,
        batch_size: int | str = 16,
        max_gen_toks: int = 256,
        seed: int = 0,
        tokenizer: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **unknown: Any,
    ) -> None:
        """Load the model; the arguments are those of `--model_args`, and of the harness's `--batch_size`, `--device`.

        `pretrained` is a run directory, a checkpoint or an exported folder. `seed` gives each request other
        draws, also where one text is asked for again. Raises FBTError.
        """
        super().__init__()
        del max_batch_size  # of automatic batch sizes only
        if unknown:
            raise EvaluationError(
                f"--model_args: {', '.join(unknown)}: not known to the model class `fbt`, which takes {_ARGUMENTS}."
            )
        if not pretrained:
            raise EvaluationError("--model_args: name the model with pretrained=PATH.")
        self.batch_size = _number("batch_size", batch_size, least=1)
        self._max_gen_toks = _number("max_gen_toks", max_gen_toks, least=1)
        self._seed = _number("seed", seed)
        passes = None if prefill_passes is None else _number("prefill_passes", prefill_passes, least=1)
        decode_mode = DecodeMode.of(mode, prefill_passes=passes)
        self._loaded = load_model(
            Path(str(pretrained)),
            dtype=dtype,
            device=_device(device),
            tokenizer=tokenizer,
            log=logger.warning,
        )
        self._decoder = Decoder(self._loaded.model, decode_mode)
        self._generator = Generator(self._decoder, tokenizer=self._loaded, num_ids=self._loaded.num_ids)
        self._device = self._loaded.model.device
        self._uses_chat_template = False
        self._has_warned = False

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> FBTHarnessModel:
        """The model of `--model_args`, which also decide where the harness's own options say something else."""
        options = {key: value for key, value in (additional_config or {}).items() if value is not None}
        return cls(**(options | arg_dict))

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at once."""
        return self._loaded.model.config.seq_length

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self._loaded.tokenizer.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id that stands for an empty context."""
        found = self._loaded.tokenizer
        return found.tokenizer.bos_id if found.add_bos and found.tokenizer.bos_id is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """What tells requests of this tokenizer from those of another."""
        return self._loaded.tokenizer.tokenizer.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        """What the results say about the model."""
        mode, model = self._decoder.mode, self._loaded.model
        return {
            "model_source": str(self._loaded.path),
            "mode": mode.name,
            "prefill_passes": mode.prefill_passes,
            "model_num_parameters": model.num_parameters,
            "model_dtype": str(model.dtype),
        }

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template of the model; raises DecodeError where it has none, EvaluationError where one is named."""
        if isinstance(chat_template, str):
            raise EvaluationError(
                f"--apply_chat_template {chat_template}: a model has one template here, that of its training or of "
                "its tokenizer's folder. Leave the name out."
            )
        return self._loaded.conversations.template_source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text, in which special tokens count where the template has written them.

        Without `add_generation_prompt` the last message is the beginning of the answer.
        """
        self._uses_chat_template = True
        said, begun = (chat_history, "") if add_generation_prompt else (chat_history[:-1], chat_history[-1]["content"])
        return self._loaded.conversations.render_prompt(said, "a conversation of the task", begun=begun)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, begun as the documents of the training are unless `add_special_tokens` is False."""
        if self._uses_chat_template:
            return self._loaded.conversations.encode_text(string)
        if add_special_tokens is False:
            return self._loaded.tokenizer.tokenizer.encode(string)
        return self._loaded.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness does, but that neither part is ever left without tokens."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if not continuation_ids:  # it has become one token with the end of the context
            continuation_ids = self.tok_encode(continuation, add_special_tokens=False)
        return context_ids or [self.prefix_token_id], continuation_ids

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        lengths = [len(context) + len(continuation) for context, continuation in pairs]
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for numbers in self._batches(lengths, "loglikelihood", disable_tqdm):
            for number, found in zip(numbers, score(self._decoder, [pairs[n] for n in numbers]), strict=True):
                results[number] = (found.total, found.is_greedy)
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: every token once, in windows as long as a row of the training.

        A window begins where the one before has ended, with the last token of that one as its context, and the first
        with the token of an empty context; the last one is filled up with context.
        """
        windows: list[tuple[Any, list[int], list[int]]] = []
        ends: list[int] = []
        for request in requests:
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *utils.make_disjoint_window(window)) for window in rolling]
            ends.append(len(windows))
        scores = [total for total, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        sums = [sum(scores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        for request, found in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to its stop strings."""
        asked: Counter[str] = Counter()
        prepared = []
        for request in requests:
            context, settings = request.args
            prepared.append(self._request(context, settings, seed=draw_seed(self._seed, context, asked[context])))
            asked[context] += 1
        texts = [""] * len(requests)
        for numbers in self._batches([len(one.prompt) for one in prepared], "generate_until", disable_tqdm):
            batch = [prepared[number] for number in numbers]
            for number, done in zip(numbers, self._generator.generate(batch, batch_size=len(batch)), strict=True):
                texts[number] = done.text
                self.cache_hook.add_partial("generate_until", requests[number].args, done.text)
        return texts

    def _request(self, context: str, settings: dict[str, Any], *, seed: int) -> Request:
        unknown = sorted(set(settings) - {*_SAMPLING_KEYS, *_OTHER_KEYS, *_LENGTH_NAMES})
        if unknown:
            raise EvaluationError(
                f"generation_kwargs: {', '.join(unknown)}: not known to the model class `fbt`, which takes "
                f"{', '.join((*_OTHER_KEYS, *_SAMPLING_KEYS))}. Change the task, or set others with --gen_kwargs."
            )
        chosen: dict[str, Any] = dict(normalize_gen_kwargs(settings, self._max_gen_toks))
        max_tokens, room = chosen["max_gen_toks"], self.max_length + 1 - chosen["max_gen_toks"]
        if room < 1:
            raise EvaluationError(
                f"max_gen_toks={max_tokens}: the model was trained on rows of {self.max_length} (model.seq_length), so "
                "there is no room for a prompt. Lower it with --gen_kwargs max_gen_toks=N."
            )
        sampling = {key: chosen[key] for key in _SAMPLING_KEYS if chosen.get(key) is not None}
        if not chosen["do_sample"]:
            sampling["temperature"] = 0.0
        elif "temperature" not in settings:
            sampling["temperature"] = 1.0
        encode = self._loaded.conversations.encode_prompt if self._uses_chat_template else self.tok_encode
        ids = encode(context) or [self.prefix_token_id]
        return Request(
            tuple(self._cut(ids, room)),
            max_tokens,
            Sampling(seed=seed, **sampling),
            eos_ids=self._loaded.eos_ids,
            stop=tuple(text for text in chosen["until"] if text),
        )

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise EvaluationError(
                f"a continuation has {len(continuation):,} tokens, but the model was trained on rows of "
                f"{self.max_length:,} (model.seq_length). Leave the task out, or shorten its texts."
            )
        return self._cut(context, room), continuation

    def _cut(self, ids: list[int], room: int) -> list[int]:
        if len(ids) > room and not self._has_warned:
            self._has_warned = True
            logger.warning("a context is longer than the model's %d tokens: its front is left out", self.max_length)
        return ids[-room:]

    def _batches(self, lengths: Sequence[int], title: str, quiet: bool) -> Iterator[list[int]]:
        """Numbers of requests, the longest first: if memory does not suffice, that is known at once."""
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        with tqdm(total=len(order), desc=f"{title}, {self._decoder.mode.name}", disable=quiet) as bar:
            for batch in _chunks(order, self.batch_size):
                yield batch
                bar.update(len(batch))


def register() -> None:
    """Make the class known to the harness as `fbt`."""
    from lm_eval.api.registry import model_registry

    if "fbt" not in model_registry:
        register_model("fbt")(FBTHarnessModel)


def _device(named: str | None) -> str:
    """The harness names the first GPU where its user has named nothing: a machine without one is not a mistake."""
    if named is not None and (named != "cuda:0" or torch.cuda.is_available()):
        return str(named)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _number(key: str, value: object, *, least: int | None = None) -> int:
    """A model argument, which comes as the harness reads it: as a number, a text or anything else."""
    text = str(value)
    if not text.removeprefix("-").isdecimal() or (least is not None and int(text) < least):
        at_least = "" if least is None else f" of at least {least}"
        raise EvaluationError(f"{key}={value}: must be a number{at_least}, without a fraction.")
    return int(text)


def _chunks(items: Sequence[Item], size: int) -> Iterable[list[Item]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))
