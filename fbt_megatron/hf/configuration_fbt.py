"""Configuration of a full-bandwidth transformer for `transformers`. This file goes with every exported model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class FBTConfig(PreTrainedConfig):
    """Shape and architecture of the model. The defaults are those of a small model, for tests.

    `sliding_window` is the number of keys that a query of a windowed layer sees, itself included; layers whose 1-based
    number `full_attention_every` divides attend to all. `fusion` is `glu`, `concat`, `add`, or `none` for a model
    without feedback. `residual_scale` is `depth` (`x + branch / sqrt(2 * num_hidden_layers)`) or `none`.
    """

    model_type = "fbt"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        hidden_size: int = 64,
        intermediate_size: int = 160,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 16,
        max_position_embeddings: int = 256,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        qk_norm: bool = True,
        attention_gate: bool = True,
        sliding_window: int | None = None,
        full_attention_every: int | None = None,
        post_norm: bool = True,
        residual_scale: str = "depth",
        embedding_norm: bool = True,
        fusion: str = "glu",
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.qk_norm = qk_norm
        self.attention_gate = attention_gate
        self.sliding_window = sliding_window
        self.full_attention_every = full_attention_every
        self.post_norm = post_norm
        self.residual_scale = residual_scale
        self.embedding_norm = embedding_norm
        self.fusion = fusion
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        # `transformers` reads this where it makes a cache.
        kwargs.pop("layer_types", None)
        self.layer_types = [
            "full_attention" if self.window_of(layer) is None else "sliding_attention"
            for layer in range(num_hidden_layers)
        ]
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def window_of(self, layer: int) -> int | None:
        """Keys that a query of `layer` (from 0) sees, itself included; None: all before it."""
        every = self.full_attention_every
        attends_to_all = every is not None and (layer + 1) % every == 0
        return None if attends_to_all else self.sliding_window
