"""Dense decode attention of others over keys and values `[B, H_kv, S, D]`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from leank_convert.errors import LeanKError

# Takes query, keys and values; returns a call that attends `[B, H, 1, D]`.
Prepare = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]

_FLASHINFER_PAGE = 16
_FLASHINFER_WORKSPACE = 256 << 20


def _sdpa(backend: SDPBackend | None) -> Prepare:
    def prepare(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        if backend is None:
            return attend

        def attend_with_backend() -> Tensor:
            with sdpa_kernel(backend):
                return attend()

        return attend_with_backend

    return prepare


def _flex(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    """FlexAttention as its documentation calls it."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, keys, values, enable_gqa=True)


def _flashinfer(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's paged batch decode on tensor cores, planned for graphs; its plan is made beforehand."""
    import flashinfer

    batch_size, num_heads, _, head_dim = query.shape
    num_kv_heads, num_tokens = keys.shape[1:3]
    if num_tokens % _FLASHINFER_PAGE:
        raise ValueError(f"{num_tokens} tokens are no whole number of pages of {_FLASHINFER_PAGE}")
    per_row = num_tokens // _FLASHINFER_PAGE

    def pages(states: Tensor) -> Tensor:
        split = states.view(batch_size, num_kv_heads, per_row, _FLASHINFER_PAGE, head_dim)
        return split.transpose(1, 2).flatten(0, 1).contiguous()  # [pages, H_kv, page, D]

    cache = pages(keys), pages(values)
    device = query.device
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * per_row
    indices = torch.arange(batch_size * per_row, dtype=torch.int32, device=device)
    last = torch.full((batch_size,), _FLASHINFER_PAGE, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        starts,
        indices,
        last,
        num_heads,
        num_kv_heads,
        head_dim,
        _FLASHINFER_PAGE,
        q_data_type=query.dtype,
        kv_data_type=keys.dtype,
    )
    flat = query.squeeze(2)
    return lambda: wrapper.run(flat, cache).unsqueeze(2)


PEERS: Mapping[str, Prepare] = MappingProxyType(
    {
        "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa": _sdpa(None),
        "flex": _flex,
        "flashinfer": _flashinfer,
    }
)
OWN_DENSE = "leank-all-channels"
# What a reader of a peer's figure has to know.
REMARKS: Mapping[str, str] = MappingProxyType({"flex": "called plainly, no settings were searched for"})
_CUDA_ONLY = ("sdpa-cudnn", "sdpa-flash", "flex", "flashinfer")


def choose_peers(names: str | None, device: torch.device) -> tuple[str, ...]:
    """The peers named, else those that can be expected to run on a device.

    Raises:
        LeanKError: If a name is unknown.
    """
    if names is not None:
        return check_peers(names, (OWN_DENSE, *PEERS))
    if device.type != "cuda":
        return (OWN_DENSE, *(name for name in PEERS if name not in _CUDA_ONLY))
    # What torch's own dispatch takes is one of its backends, named here on their own.
    named = tuple(name for name in PEERS if name not in ("sdpa", "flashinfer"))
    found = ("flashinfer",) if importlib.util.find_spec("flashinfer") else ()
    return (OWN_DENSE, *named, *found)


def check_peers(names: str, known: Collection[str]) -> tuple[str, ...]:
    """Read a list of names between commas, `none` for no peers.

    Raises:
        LeanKError: If one is unknown.
    """
    if names == "none":
        return ()
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in known:
            raise LeanKError(
                f"there is no peer `{name}`", hint="known: " + ", ".join(f"`{peer}`" for peer in known)
            )
    return chosen
