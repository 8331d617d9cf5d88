"""A full-bandwidth transformer for `transformers`: the top state of a token feeds the next one.

This file goes with every exported model and needs torch and transformers only.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**inputs, feedback_mode="fused")

Three ways to decode. `standard`: without feedback, an ordinary transformer. `soft`: the prompt plain, feedback for
generated tokens. `fused`: the prompt in `prefill_passes` passes (2), then as soft. In the last two the first forward on
an empty `FBTCache` is the prompt; every token after it is fed with the state of the token before it, one at a time.

Legend: `B` rows, `S` tokens given, `T` tokens with those in the cache, `H` hidden, `N` query heads, `G` key/value
heads, `D` head width, `V` vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_fbt import FBTConfig

TRANSFORMERS_VERSIONS = ("5.0.0", "5.24.0")
"""Oldest and newest version that this file is tested with. Older ones are refused, newer ones warned about."""

FEEDBACK_MODES = ("standard", "soft", "fused")

logger = logging.getLogger(__name__)

# What older versions call `past_key_values` is `cache` in newer ones; both names are taken here.
_CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


class FBTCache(DynamicCache):
    """Keys and values of the layers, and the top state of each token, which feeds the next one.

    The states are kept for all tokens and not only the last, H numbers each, so that `crop` can go back to any of them.
    """

    def __init__(self, config: FBTConfig, feedback_mode: str = "soft", prefill_passes: int | None = None) -> None:
        """An empty cache for one prompt.

        `prefill_passes` counts all passes over the prompt of mode `fused`, at least 2 (the default).
        Raises ValueError for another mode, for one that the model cannot do, or for passes that do not go with it.
        """
        if feedback_mode not in FEEDBACK_MODES:
            raise ValueError(f"feedback_mode={feedback_mode!r}: must be one of {', '.join(FEEDBACK_MODES)}.")
        if config.fusion == "none" and feedback_mode != "standard":
            raise ValueError(f"feedback_mode={feedback_mode!r}: this model has no feedback. Use standard.")
        if prefill_passes is not None and feedback_mode != "fused":
            raise ValueError(f"prefill_passes goes with feedback_mode='fused'; {feedback_mode} has one pass.")
        if prefill_passes is not None and prefill_passes < 2:
            raise ValueError(f"prefill_passes={prefill_passes}: counts all passes, so that fused has at least 2.")
        super().__init__(config=config)
        self.feedback_mode = feedback_mode
        self.prefill_passes = (prefill_passes or 2) if feedback_mode == "fused" else 1
        self.states: Tensor | None = None
        """[B, T, H]; None in mode `standard` and before the prompt."""

    def add_states(self, states: Tensor) -> None:
        """Append top states [B, S, H]."""
        self.states = states if self.states is None else torch.cat((self.states, states), dim=1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.states is not None:
            self.states = self.states.index_select(0, beam_idx.to(self.states.device))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)  # how many to keep, or to remove, depending on the version
        if self.states is not None:
            self.states = self.states[:, : self.get_seq_length()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.states is not None:
            self.states = self.states.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.states is not None:
            self.states = self.states[indices]

    def reset(self) -> None:
        super().reset()
        self.states = None


class _Context:
    """What all layers need to know of the tokens of one forward through the stack: rotary angles, who sees whom."""

    def __init__(
        self, config: FBTConfig, positions: Tensor, attention_mask: Tensor | None, past: int, dtype: torch.dtype
    ) -> None:
        """For `positions` [B, S] after `past` cached tokens, and a mask [B, T] that is 0 at padding."""
        self.config = config
        self.positions = positions
        self.attention_mask = attention_mask
        self.past = past
        channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = config.rope_theta ** (-channels / config.head_dim)
        angles = positions[:, None, :, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)  # [B, 1, S, D]
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of `x` [B, heads, S, D]."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def mask(self, window: int | None, num_keys: int) -> Tensor | None:
        """[B or 1, 1, S, num_keys] bool, True where visible; None: all that is before a token."""
        if (window, num_keys) not in self._masks:
            self._masks[window, num_keys] = self._build_mask(window, num_keys)
        return self._masks[window, num_keys]

    def _build_mask(self, window: int | None, num_keys: int) -> Tensor | None:
        num_queries = self.positions.shape[1]
        total = self.past + num_queries
        if window is not None and window >= total:
            window = None
        documents = (self.positions == 0).cumsum(-1)
        one_document = self.past > 0 or num_queries == 1 or bool((documents[:, :1] == documents).all())
        only_causal = window is None and self.attention_mask is None and one_document
        if only_causal and (self.past == 0 or num_queries == 1):
            return None
        # The keys are the last ones: a windowed layer's cache forgets the others.
        query = torch.arange(self.past, total, device=self.positions.device)[:, None]
        key = torch.arange(total - num_keys, total, device=self.positions.device)[None, :]
        visible = key <= query
        if window is not None:
            visible = visible & (query - key < window)
        visible = visible[None]
        if not one_document:  # packed rows: positions begin anew at each document
            visible = visible & (documents[:, :, None] == documents[:, None, :])
        if self.attention_mask is not None:
            visible = visible & self.attention_mask[:, None, total - num_keys : total].bool()
            visible = visible | (key == query)  # padding sees itself: a softmax over nothing is not a number
        return visible[:, None]


class FBTAttention(nn.Module):
    """`W_O (gate_n * softmax(rot(q_n) rot(k)' / sqrt(D)) v)`, `gate_n = sigmoid((W x)_n)` with x the input."""

    def __init__(self, config: FBTConfig, layer: int) -> None:
        super().__init__()
        hidden, heads, groups, width = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.layer, self.width, self.window = layer, width, config.window_of(layer)
        self.q_proj = nn.Linear(hidden, heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, groups * width, bias=False)
        self.v_proj = nn.Linear(hidden, groups * width, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)
        self.gate = nn.Linear(hidden, heads, bias=False) if config.attention_gate else None
        self.q_norm = nn.RMSNorm(width, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(width, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: _Context, cache: DynamicCache | None) -> Tensor:
        """Output [B, S, H] for the normed `x` [B, S, H]."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = context.rotate(query), context.rotate(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        mask = context.mask(self.window, key.shape[-2])
        heads = _heads(query, key, value, mask).transpose(1, 2)
        if self.gate is not None:
            heads = heads * torch.sigmoid(self.gate(x)).unsqueeze(-1)
        return self.o_proj(heads.flatten(2))


def _heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Heads [B, N, S, D] for query [B, N, S, D], and key and value [B, G, T, D]."""
    groups = key.shape[1]
    if query.shape[2] == 1:
        # The query heads of a group see the same keys, as if they were queries of several tokens: nothing is copied.
        grouped = query.reshape(len(query), groups, -1, query.shape[-1])
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).reshape(query.shape)
    repeated = _repeats_heads(query, mask)
    if repeated:
        shared = query.shape[1] // groups
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=not repeated
    )


def _repeats_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Flash attention takes grouped heads, but no mask and no fp32; without it CUDA may hold all scores at once."""
    return query.is_cuda and (mask is not None or query.dtype == torch.float32)


class FBTMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: FBTConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] for [B, S, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FBTLayer(nn.Module):
    """`x + c norm(attention(norm(x)))`, then the same with the feed-forward block; the outer norms are optional."""

    def __init__(self, config: FBTConfig, layer: int) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(2 * config.num_hidden_layers) if config.residual_scale == "depth" else 1.0
        self.self_attn = FBTAttention(config, layer)
        self.mlp = FBTMLP(config)
        self.input_layernorm = _norm(config)
        self.pre_feedforward_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config) if config.post_norm else None
        self.post_feedforward_layernorm = _norm(config) if config.post_norm else None

    def forward(self, x: Tensor, context: _Context, cache: DynamicCache | None) -> Tensor:
        """[B, S, H] for [B, S, H]."""
        branch = self.self_attn(self.input_layernorm(x), context, cache)
        x = self._add(x, branch, self.post_attention_layernorm)
        branch = self.mlp(self.pre_feedforward_layernorm(x))
        return self._add(x, branch, self.post_feedforward_layernorm)

    def _add(self, x: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        return torch.add(x, branch if norm is None else norm(branch), alpha=self.scale)


class FBTFusion(nn.Module):
    """`glu`: `(W_U h) * sigmoid(W_G e)`; `concat`: `W [h; e]`; `add`: `W_U h + W_E e`.

    `h` is the state of the token before, `e` the normed embedding. Source: arXiv 2608.08888, eq. 4.
    """

    def __init__(self, config: FBTConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.kind = config.fusion
        if self.kind == "concat":
            self.w = nn.Linear(2 * hidden, hidden, bias=False)
            return
        self.w_u = nn.Linear(hidden, hidden, bias=False)
        if self.kind == "glu":
            self.w_g = nn.Linear(hidden, hidden, bias=False)
        else:
            self.w_e = nn.Linear(hidden, hidden, bias=False)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """[B, S, H] for two of [B, S, H]."""
        if self.kind == "glu":
            return self.w_u(state) * torch.sigmoid(self.w_g(embedding))
        if self.kind == "concat":
            return self.w(torch.cat((state, embedding), dim=-1))
        return self.w_u(state) + self.w_e(embedding)


def _norm(config: FBTConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class FBTPreTrainedModel(PreTrainedModel):
    """What the library has to know of the model."""

    config_class = FBTConfig
    base_model_prefix = "model"
    _no_split_modules = ["FBTLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: FBTConfig, *args: Any, **kwargs: Any) -> None:
        _check_version()
        super().__init__(config, *args, **kwargs)
        if self.config._attn_implementation not in (None, "sdpa"):
            raise ValueError(
                f"attn_implementation={self.config._attn_implementation!r}: this model has its own attention on top of "
                "torch's scaled_dot_product_attention. Leave attn_implementation out, or set it to 'sdpa'."
            )


class FBTModel(FBTPreTrainedModel):
    """Embedding, fusion, layers and final norm: one pass, or several, or one with the state in a cache."""

    def __init__(self, config: FBTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        needs_norm = config.embedding_norm or config.fusion != "none"
        self.embedding_norm = _norm(config) if needs_norm else None
        self.fusion = FBTFusion(config) if config.fusion != "none" else None
        self.layers = nn.ModuleList([FBTLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = _norm(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        cache: DynamicCache | None,
        num_passes: int,
    ) -> Tensor:
        """Top states [B, S, H] of tokens with embeddings `embedded` [B, S, H] at `positions` [B, S].

        Without feedback in the cache: `num_passes` passes, the last of which fills the cache. With it: the prompt where
        the cache is empty, else tokens that are fed one by one.
        """
        past = 0 if cache is None else int(cache.get_seq_length())
        feedback = cache if isinstance(cache, FBTCache) and cache.feedback_mode != "standard" else None
        if feedback is not None:
            if past:
                return self._continue(embedded, positions, attention_mask, feedback, past)
            num_passes = feedback.prefill_passes
        context = _Context(self.config, positions, attention_mask, past, embedded.dtype)
        plain_input = self.plain_input(embedded)
        x, states = plain_input, embedded
        for number in range(1, num_passes + 1):
            if number > 1:
                before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)
                x = self.fused_input(before, embedded, plain_input, self._starts(positions))
            states = self._stack(x, context, cache if number == num_passes else None)
        if feedback is not None:
            feedback.add_states(states)
        return states

    def plain_input(self, embedded: Tensor) -> Tensor:
        """Input of the stack without feedback, [B, S, H]."""
        return self._normed(embedded) if self.config.embedding_norm else embedded

    def fused_input(self, before: Tensor, embedded: Tensor, plain_input: Tensor, plain: Tensor) -> Tensor:
        """Input of the stack where the state `before` each token feeds it, but for tokens where `plain` [B, S]."""
        assert self.fusion is not None
        before = before.masked_fill(plain.unsqueeze(-1), 0.0)  # not even an infinite state comes through
        fused = self._normed(self.fusion(before, self._normed(embedded)))
        return torch.where(plain.unsqueeze(-1), plain_input, fused)

    def _normed(self, x: Tensor) -> Tensor:
        assert self.embedding_norm is not None
        return self.embedding_norm(x)

    def _starts(self, positions: Tensor) -> Tensor:
        """[B, S] bool: the first token of a row, and of each document in it, has nothing before it."""
        starts = positions == 0
        starts[:, 0] = True
        return starts

    def _continue(
        self, embedded: Tensor, positions: Tensor, attention_mask: Tensor | None, cache: FBTCache, past: int
    ) -> Tensor:
        result = []
        for index in range(embedded.shape[1]):
            total = past + index + 1
            mask = None if attention_mask is None else attention_mask[:, :total]
            one, position = embedded[:, index : index + 1], positions[:, index : index + 1]
            context = _Context(self.config, position, mask, total - 1, embedded.dtype)
            assert cache.states is not None
            x = self.fused_input(cache.states[:, -1:], one, self.plain_input(one), position == 0)
            states = self._stack(x, context, cache)
            cache.add_states(states)
            result.append(states)
        return torch.cat(result, dim=1)

    def _stack(self, x: Tensor, context: _Context, cache: DynamicCache | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, context, cache)
        return self.norm(x)


class FBTForCausalLM(FBTPreTrainedModel, GenerationMixin):
    """The model with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FBTConfig) -> None:
        super().__init__(config)
        self.model = FBTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: DynamicCache | None = None,
        num_passes: int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, S or those kept, V], and with `labels` [B, S] (-100: not trained) the loss.

        `num_passes` (1) runs that many passes over the tokens, each fed with the states of the one before, as in
        training without noise; the result is that of the last one. `attention_mask` [B, T] is 0 at padding. Rows may
        hold several documents where `position_ids` begin at 0 in each and there is no cache.

        `past_key_values` (`cache` in newer versions) is a `DynamicCache`, or an `FBTCache`, which has the mode and its
        states. Raises ValueError for arguments that do not go together.
        """
        unknown = [
            name
            for name, value in kwargs.items()
            if name not in _UNUSED_ARGUMENTS and value is not None and value is not False
        ]
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: this model has no such argument.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        cache = past_key_values if cache is None else cache
        embedded = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self._use_cache(use_cache, cache, num_passes)
        if use_cache and cache is None:
            cache = FBTCache(self.config, "standard")
        self._check(embedded, attention_mask, cache, num_passes)
        past = 0 if cache is None else int(cache.get_seq_length())
        # To look into the mask makes a GPU wait: once per prompt is cheap, once per training step is not.
        is_cheap = past == 0 and not self.training and not torch.compiler.is_compiling()
        if attention_mask is not None and is_cheap and bool(attention_mask.all()):
            attention_mask = None  # no padding: causal attention needs no mask
        positions = _positions(embedded, attention_mask, position_ids, past)
        states = self.model(embedded, positions, attention_mask, cache, num_passes or 1)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept])
        loss = None
        if labels is not None:
            count = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=count)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE_NAME: cache if use_cache else None})
        return output.to_tuple() if return_dict is False else output

    def _use_cache(self, use_cache: bool | None, cache: DynamicCache | None, num_passes: int | None) -> bool:
        if use_cache is not None:
            return use_cache
        return cache is not None or (self.config.use_cache and not self.training and num_passes is None)

    def _check(
        self, embedded: Tensor, attention_mask: Tensor | None, cache: DynamicCache | None, num_passes: int | None
    ) -> None:
        past = 0 if cache is None else int(cache.get_seq_length())
        if cache is not None and not isinstance(cache, DynamicCache):
            raise ValueError(f"{type(cache).__name__}: this model takes a DynamicCache or an FBTCache.")
        if num_passes is not None and num_passes < 1:
            raise ValueError(f"num_passes={num_passes}: must be at least 1.")
        if num_passes is not None and num_passes > 1:
            if self.model.fusion is None:
                raise ValueError(f"num_passes={num_passes}: this model has no feedback, so it has one pass.")
            if cache is not None:
                raise ValueError("num_passes goes without a cache; an FBTCache has passes of its own.")
        expected = (embedded.shape[0], past + embedded.shape[1])
        if attention_mask is not None and tuple(attention_mask.shape) != expected:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; must be {expected}: rows, and tokens with "
                "those in the cache."
            )

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        feedback_mode: str = "standard",
        prefill_passes: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """`GenerationMixin.generate` in one of the three modes.

        `prefill_passes` counts the passes over the prompt of mode `fused` (2). Prompts of unequal length are padded on
        the left. With a filled `FBTCache` of the same mode the tokens that are not in it are fed with feedback. Raises
        ValueError for a mode that the model cannot do, a cache of another mode, and in `soft` and `fused` for what
        would not know where the prompt ends.
        """
        own = FBTCache(self.config, feedback_mode, prefill_passes)
        given = kwargs.pop("past_key_values", None)
        given = kwargs.pop("cache", given)
        if feedback_mode != "standard":
            self._check_options(generation_config or self.generation_config, args, kwargs)
            given = own if given is None else given
        if feedback_mode != "standard" or isinstance(given, FBTCache):  # a cache alone would choose the mode
            given = _same_mode(given, own)
        if given is not None:
            kwargs[_CACHE_NAME] = given
        return super().generate(inputs, generation_config, *args, **kwargs)

    def _check_options(self, config: GenerationConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what feeds the prompt in parts or anew, or guesses tokens ahead."""
        if args:
            raise ValueError("with feedback, give the arguments of generate() after generation_config by name.")

        def chosen(name: str) -> Any:
            return kwargs[name] if name in kwargs else getattr(config, name, None)

        refused = [name for name in _NOT_WITH_FEEDBACK if chosen(name) is not None]
        if chosen("use_cache") is False:
            refused.append("use_cache=False")
        if chosen("cache_implementation") not in (None, "dynamic"):
            refused.append(f"cache_implementation={chosen('cache_implementation')!r}")
        if chosen("guidance_scale") not in (None, 1, 1.0):
            refused.append("guidance_scale")
        if refused:
            raise ValueError(f"{', '.join(refused)}: not with feedback_mode 'soft' or 'fused'. Leave it out.")
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("attention_mask is 0 at the end of a row: pad prompts on the left (padding_side='left').")


_UNUSED_ARGUMENTS = ("cache_position", "num_items_in_batch")
"""What the library hands over beside the arguments of `forward`."""

_NOT_WITH_FEEDBACK = (
    "prefill_chunk_size",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "use_mtp",
    "custom_generate",
    "dola_layers",
    "penalty_alpha",
    "inputs_embeds",
    "negative_prompt_ids",
)
"""Arguments of generate() that feed the prompt in parts or anew, or guess tokens ahead."""


def _same_mode(given: Any, own: FBTCache) -> FBTCache:
    mode = (own.feedback_mode, own.prefill_passes)
    if not isinstance(given, FBTCache) or (given.feedback_mode, given.prefill_passes) != mode:
        raise ValueError(
            f"the cache is not an FBTCache of mode {own.feedback_mode!r} with its number of passes. Give the "
            "feedback_mode and prefill_passes that the cache was made with."
        )
    return given


def _positions(embedded: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: int) -> Tensor:
    """[B, S]: as given, else counted from the first token of each row that is not padding."""
    rows, length = embedded.shape[:2]
    if position_ids is not None:
        return position_ids[:, -length:].expand(rows, -1)
    if attention_mask is not None:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past, past + length, device=embedded.device).expand(rows, -1)


@functools.cache
def _check_version() -> None:
    oldest, newest = (_version_numbers(version) for version in TRANSFORMERS_VERSIONS)
    installed = _version_numbers(transformers.__version__)
    tested = f"{TRANSFORMERS_VERSIONS[0]} to {TRANSFORMERS_VERSIONS[1]}"
    if installed < oldest:
        raise ImportError(f"transformers {transformers.__version__}: this model needs {tested}.")
    if installed > newest:
        logger.warning("transformers %s: this model is tested with %s.", transformers.__version__, tested)


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


__all__ = ["FBTCache", "FBTForCausalLM", "FBTModel", "FBTPreTrainedModel"]
