"""Attention of prompts: vLLM's own flash attention where it serves this device, else torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform

from leank_convert._runtime.find_kernels_leank import make_checked
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.attention import attend_densely
from leank_convert.vllm.rows import Prompt, PromptRun, place_requests

Attend = Callable[..., Any]
"""Takes the keywords of vLLM's `flash_attn_varlen_func`, and writes to `out`."""

# Of the check. The second was begun in an earlier step.
_PROMPTS = [Prompt(0, 0, 70, 70), Prompt(1, 70, 103, 200)]


def attend_to_run(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    run: PromptRun,
    output: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None,
    flash_attention: Attend | None,
) -> None:
    """Attend to a run's prompts, new tokens `[T, H, D]` to all `[n, H_kv, D]`; torch does without flash."""
    if flash_attention is not None:
        flash_attention(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=run.starts,
            max_seqlen_q=run.longest,
            cu_seqlens_k=run.key_starts,
            max_seqlen_k=run.longest_keys,
            softmax_scale=softmax_scale,
            causal=True,
            s_aux=sinks,
        )
        return
    first = 0
    for part in run.parts:
        own = slice(first, first + part.num_tokens)
        tokens = slice(part.first - run.tokens.start, part.stop - run.tokens.start)
        output[tokens] = attend_densely(query[tokens], keys[own], values[own], softmax_scale, sinks)
        first += part.num_tokens


@functools.cache
def find_flash_attention(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, has_sinks: bool
) -> Attend | None:
    """Return vLLM's flash attention, in its version for this device; None where torch's must do.

    The first call for a shape holds it to torch's on two prompts; on a GPU one warning says why it must do.
    """
    if not current_platform.is_cuda():
        return None

    def find_fault(found: Attend) -> str:
        sizes, device = (num_heads, num_kv_heads, head_size), torch.device(current_platform.device_type)
        error = disagreement(found, sizes, dtype, device, has_sinks)
        is_near = error <= 2 * torch.finfo(dtype).eps
        return "" if is_near else f"it disagrees with torch's by {error:.1e} of the output"

    told = "vLLM's flash attention does not read prompts, torch's is slower"
    return make_checked(lambda: _flash_attention(head_size, dtype, has_sinks), find_fault, told)


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

    nothing = torch.empty(0, device=device)
    with torch.device("cpu"):  # whatever torch's default device is
        _, (run,) = place_requests([[], []], [_PROMPTS], nothing, nothing, Windows())
    query, output = (random(run.tokens.stop, num_heads, head_size) for _ in range(2))
    # K beside V, as a projection leaves them.
    keys, values = random(run.num_keys, 2, num_kv_heads, head_size).unbind(1)
    scale, sinks = head_size**-0.5, random(num_heads) if has_sinks else None
    attend_to_run(query, keys, values, run, output, scale, sinks, attend)
    expected = torch.empty_like(output, dtype=torch.float32)
    attend_to_run(query.float(), keys.float(), values.float(), run, expected, scale, sinks, None)
    error = float((output.float() - expected).norm() / expected.norm())
    return error if error == error else 1.0
