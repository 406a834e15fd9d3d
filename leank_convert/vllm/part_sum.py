"""Sum of what a product left in parts: launch of `sum_kernel`, and its check against plain torch."""

from __future__ import annotations

import functools

import torch

from leank_convert._runtime.decode_kernels_leank import DecodeKernels
from leank_convert._runtime.kernel_key_leank import Product
from leank_convert.vllm.checked import make_checked


class PartSum:
    """The compiled kernel beside some decode kernels."""

    def __init__(self, kernels: DecodeKernels) -> None:
        """Compile, or load from TileLang's cache on disk."""
        from leank_convert.vllm.sum_kernel import compile_sum

        self.kernels = kernels
        self._sum = compile_sum(kernels.arch)

    def __call__(self, product: Product) -> torch.Tensor:
        """Return a product's outputs in fp32 `[T, n]`."""
        output = torch.empty_like(product.vectors[0])
        with torch.cuda.device(output.device):
            self._sum(product.vectors, output, *product.cut)
        return output.flatten(1)


@functools.cache
def find_part_sum(kernels: DecodeKernels | None) -> PartSum | None:
    """Return the kernel beside decode kernels, None without these, or if it fails its check."""
    if kernels is None:
        return None
    told = "Decode steps of several ranks are not fused, and slower"
    return make_checked(PartSum, kernels, is_exact, told)


def is_exact(part_sum: PartSum) -> bool:
    """Whether parts add up to what torch makes of them."""
    key = part_sum.kernels.key
    generator = torch.Generator(key.device).manual_seed(0)
    states, weight = (
        torch.randn(rows, 2048, generator=generator, device=key.device).to(key.dtype) for rows in (3, 1096)
    )
    product = part_sum.kernels.product(states, weight)
    return torch.allclose(part_sum(product), product.outputs(), rtol=1e-6, atol=1e-4)
