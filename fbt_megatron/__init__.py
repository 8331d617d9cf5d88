"""Pretraining of full-bandwidth transformers (arXiv 2608.08888) on megatron-core and DeepSpeed."""

__version__ = "0.1.0"
