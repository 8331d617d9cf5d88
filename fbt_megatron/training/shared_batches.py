"""One rank of each data-parallel replica reads; its model-parallel peers get the same micro-batches from it.

Every stage and every tensor-parallel rank needs them whole: middle stages for documents and positions, the first one
for tokens, the last one for labels.

Legend: `M` micro-batches of a step, `B` rows of a micro-batch, `S` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.validation import num_microbatches
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.parallel.collectives import broadcast_in
from fbt_megatron.parallel.topology import ParallelTopology


def reads_data(topology: ParallelTopology) -> bool:
    """True on the rank that reads for its data-parallel replica, the first of its model-parallel group."""
    return topology.tp_rank == 0 and topology.pp_rank == 0


def share_batches(batches: Sequence[TrainBatch], config: RunConfig, topology: ParallelTopology) -> list[TrainBatch]:
    """The micro-batches of one global batch that the reading rank passes, on the CPU of every rank of its replica.

    What the other ranks pass is not looked at. All ranks of a replica have to call this together.
    """
    if topology.tp_size * topology.pp_size == 1:
        return list(batches)
    rows, seq_length = config.train.micro_batch_size, config.model.seq_length
    if reads_data(topology):
        packed = torch.stack([_pack(batch) for batch in batches]).to(topology.device)
    else:
        shape = (num_microbatches(config, dp_size=topology.dp_size), rows, 4 * seq_length + 1)
        packed = torch.empty(shape, dtype=torch.int64, device=topology.device)
    broadcast_in(packed, group=topology.pg.mp)
    return [_unpack(part, seq_length) for part in packed.cpu()]


def _pack(batch: TrainBatch) -> Tensor:
    """All numbers of a micro-batch, [B, 4 S + 1] int64."""
    parts = (batch.tokens, batch.labels, batch.positions, batch.document_ids, batch.rows.unsqueeze(1))
    return torch.cat(parts, dim=1)


def _unpack(packed: Tensor, seq_length: int) -> TrainBatch:
    tokens, labels, positions, document_ids = packed[:, :-1].split(seq_length, dim=1)
    return TrainBatch(
        tokens=tokens.contiguous(),
        labels=labels.contiguous(),
        positions=positions.contiguous(),
        document_ids=document_ids.contiguous(),
        rows=packed[:, -1].contiguous(),
    )
