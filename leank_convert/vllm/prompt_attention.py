"""Attention of prompts: vLLM's own flash attention where it serves this device, else torch's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from vllm.platforms import current_platform

from leank_convert.vllm.attention import attend_densely

logger = logging.getLogger(__name__)

Attend = Callable[..., Any]
"""Takes the keywords of vLLM's `flash_attn_varlen_func`, and writes to `out`."""

# Of the check: new tokens of each prompt, and all of its tokens. The second was begun in an earlier step.
_NEW, _ALL = (70, 33), (70, 200)


@functools.cache
def find_flash_attention(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, has_sinks: bool
) -> Attend | None:
    """Return vLLM's flash attention, in its version for this device; None where torch's must do.

    The first call for a shape holds it to torch's on two prompts; on a GPU one warning says why it must do.
    """
    if not current_platform.is_cuda():
        return None
    try:
        found = _flash_attention(head_size, dtype, has_sinks)
        device = torch.device(current_platform.device_type)
        error = disagreement(found, (num_heads, num_kv_heads, head_size), dtype, device, has_sinks)
        if error <= 2 * torch.finfo(dtype).eps:
            return found
        reason = f"it disagrees with torch's by {error:.1e} of the output"
    except torch.OutOfMemoryError:
        raise  # it says nothing about the kernel, and may pass
    except Exception as exception:  # another signature, or whatever a driver may raise
        reason = f"{type(exception).__name__}: {str(exception).strip()[-300:]}"
    logger.warning("vLLM's flash attention does not read prompts, torch's is slower: %s", reason)
    return None


def _flash_attention(head_size: int, dtype: torch.dtype, has_sinks: bool) -> Attend:
    """Flash attention of vLLM; ImportError in a build without it, ValueError where it does not serve this."""
    # Both are CUDA's alone.
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    if dtype not in FlashAttentionBackend.supported_dtypes:
        raise ValueError(f"it takes no {dtype}")
    if not FlashAttentionBackend.supports_head_size(head_size):
        raise ValueError(f"it takes no heads of {head_size} channels")
    if has_sinks and not FlashAttentionBackend.supports_sink():
        raise ValueError("on this GPU it takes no attention sinks")
    version = get_flash_attn_version(head_size=head_size)
    if version is None:
        raise ValueError("it has no version for this GPU")
    return functools.partial(flash_attn_varlen_func, fa_version=version)


def disagreement(
    attend: Attend, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, has_sinks: bool
) -> float:
    """Return how far attention to two prompts is from torch's, as a share of the output; NaN counts as 1."""
    num_heads, num_kv_heads, head_size = sizes
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query, output = random(sum(_NEW), num_heads, head_size), random(sum(_NEW), num_heads, head_size)
    # K beside V, as a projection leaves them.
    keys, values = random(sum(_ALL), 2, num_kv_heads, head_size).unbind(1)
    starts, key_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (_NEW, _ALL)
    )
    scale, sinks = head_size**-0.5, random(num_heads) if has_sinks else None
    attend(
        q=query,
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=starts,
        max_seqlen_q=max(_NEW),
        cu_seqlens_k=key_starts,
        max_seqlen_k=max(_ALL),
        softmax_scale=scale,
        causal=True,
        s_aux=sinks,
    )
    parts = zip(query.split(_NEW), keys.split(_ALL), values.split(_ALL), strict=True)
    whole = ([states.float() for states in part] for part in parts)
    expected = torch.cat([attend_densely(q, k, v, scale, sinks) for q, k, v in whole])
    error = float((output.float() - expected).norm() / expected.norm())
    return error if error == error else 1.0
