"""Kernels of a fused step in one of several ranks, whose products of o and down are to be added up."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from leank_convert._runtime.decode_kernels_leank import DecodeKernels
from leank_convert._runtime.find_kernels_leank import make_checked
from leank_convert._runtime.kernel_key_leank import LANES, Product


class RankKernels:
    """Decode kernels whose `add_norm` adds what all ranks' products gave.

    Attributes:
        all_reduce: Adds up `[T, n]` over ranks, out of place.
    """

    def __init__(self, kernels: DecodeKernels, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compile, or load from TileLang's cache on disk."""
        from leank_convert.vllm.sum_kernel import compile_sum_kernels

        self.kernels, self.all_reduce = kernels, all_reduce
        self.product, self.gated_product = kernels.product, kernels.gated_product
        self._sum, self._add_norm = compile_sum_kernels(kernels.key, kernels.arch)

    def sum_parts(self, product: Product) -> torch.Tensor:
        """Return a product's outputs in the model's dtype `[T, n]`."""
        output = torch.empty_like(product.parts[0], dtype=self.kernels.key.dtype)
        with torch.cuda.device(output.device):
            self._sum(product.vectors, output.view(len(output), -1, LANES), *product.cut)
        return output

    def add_norm(
        self, hidden: torch.Tensor, delta: Product | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what a block gave in all ranks to the hidden states, and norm the sum, as decode kernels do."""
        if delta is None:
            return self.kernels.add_norm(hidden, None, weight, eps)
        return self.add_whole(hidden, self.all_reduce(self.sum_parts(delta)), weight, eps)

    def add_whole(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of a delta `[T, n]` that is added up."""
        shape = (len(hidden), -1, LANES)
        summed, normed = (torch.empty_like(hidden) for _ in range(2))
        states = hidden.view(shape), delta.view(1, -1, LANES), weight.detach().view(-1, LANES)
        with torch.cuda.device(hidden.device):
            self._add_norm(*states, summed.view(shape), normed.view(shape), 1, eps, 1, 1)
        return summed, normed


@functools.cache
def find_rank_kernels(
    kernels: DecodeKernels | None, all_reduce: Callable[[torch.Tensor], torch.Tensor]
) -> RankKernels | None:
    """Return what serves ranks beside decode kernels, None without these, or if it fails its check."""
    if kernels is None:
        return None
    told = "Decode steps of several ranks are not fused, and slower"
    return make_checked(functools.partial(RankKernels, kernels, all_reduce), find_fault, told)


def find_fault(ranks: RankKernels) -> str:
    """Look whether parts add up as in torch, and sums as decode kernels add parts; return what is wrong."""
    key = ranks.kernels.key
    generator = torch.Generator(key.device).manual_seed(0)
    states, weight, hidden, scale = (
        torch.randn(size, generator=generator, device=key.device, dtype=torch.float32).to(key.dtype)
        for size in ((3, 2048), (1096, 2048), (3, 1096), (1096,))
    )
    product, eps = ranks.kernels.product(states, weight), torch.finfo(key.dtype).eps
    whole = ranks.sum_parts(product)
    ours = ranks.add_whole(hidden, whole, scale, 1e-5)
    theirs = ranks.kernels.add_norm(hidden, Product(whole.float()[None], 1, 1), scale, 1e-5)
    is_near = (whole.float() - product.outputs()).abs().max() <= eps * product.outputs().abs().max()
    return "" if is_near and all(map(torch.equal, ours, theirs)) else "they disagree with plain torch"
