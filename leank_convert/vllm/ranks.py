"""Ranks of tensor parallelism decode alike: each by kernels, fused or not, that no other one lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

from leank_convert._runtime.decode_kernels_leank import DecodeKernels
from leank_convert.vllm.rank_kernels import RankKernels, find_rank_kernels


def fused_kernels(kernels: DecodeKernels | None) -> DecodeKernels | RankKernels | None:
    """Return what runs a fused step, in one of several ranks with sums over them; None without kernels."""
    if get_tp_group().world_size == 1:
        return kernels
    return find_rank_kernels(kernels, tensor_model_parallel_all_reduce)


def agree_on_kernels(attentions: Sequence[Any]) -> None:
    """Take from a rank's layers what another rank lacks: ranks that differ wait for each other in vain.

    All of them capture as many graphs, and add up over ranks the same numbers in the same order.
    """
    decodes = all(attention.kernels is not None for attention in attentions)
    fuses = decodes and attentions[0].is_fused and fused_kernels(attentions[0].kernels) is not None
    able = torch.tensor([decodes, fuses], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(able, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
    all_decode, all_fuse = able.tolist()
    for attention in attentions:
        attention.is_fused = bool(all_fuse)
        if not all_decode:
            attention.kernels = None
