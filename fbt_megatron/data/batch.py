"""One micro-batch of packed rows, as the model takes it.

Legend: `B` rows of the micro-batch, `S` tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that is not trained (the default `ignore_index` of PyTorch's cross entropy)."""


@dataclass(frozen=True)
class TrainBatch:
    """Packed rows with everything that depends on where documents begin and end."""

    tokens: Tensor
    """[B, S] int64, input tokens."""
    labels: Tensor
    """[B, S] int64, the token after each input token; `IGNORE_INDEX` where that one belongs to another document or
    is not trained."""
    positions: Tensor
    """[B, S] int64, position inside the document's part of the row: 0 at every row start and document start."""
    document_ids: Tensor
    """[B, S] int64, 0 for the first document of a row, rising by one at each document start."""
    rows: Tensor
    """[B] int64, global row numbers of the run: what random draws are keyed by, never by a rank."""

    @property
    def num_trained_tokens(self) -> int:
        """Number of labels that count in the loss. On an accelerator this waits for the device."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch with every tensor on `device`."""
        return TrainBatch(
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
            rows=self.rows.to(device, non_blocking=True),
        )
