"""The kernels around a sum over ranks, on TileLang's CPU target, against plain torch."""

import functools

import pytest
import torch

pytest.importorskip("tilelang")

from leank_convert._runtime.kernel_glue_leank import add_norm
from leank_convert._runtime.kernel_key_leank import KERNEL_DTYPES, KernelKey
from leank_convert._runtime.kernel_leank import KernelShape
from leank_convert.vllm.rank_kernels import RankKernels, find_fault
from leank_convert.vllm.sum_kernel import compile_sum_kernels, sum_parts
from tests.runtime.cpu_kernels import CpuKernels, compiled_for_cpu

pytestmark = pytest.mark.usefixtures("no_device_to_choose")
whole_add_norm = functools.partial(add_norm, whole=True)
SHAPE = KernelShape(torch.device("cpu"), torch.float32, 32, 2, 16, 3, 8)


class CpuRankKernels(RankKernels):
    def __init__(self, num_programs):
        self.kernels, self.all_reduce = CpuKernels(SHAPE, num_programs), lambda own: 2 * own
        self.product = self.kernels.product
        self._sum = compiled_for_cpu(sum_parts, SHAPE)
        self._add_norm = compiled_for_cpu(whole_add_norm, SHAPE)


@pytest.mark.parametrize("num_programs", [1, 11, 40])
def test_the_sum_of_all_ranks_is_added_and_normed(num_programs):
    ranks = CpuRankKernels(num_programs)
    assert not find_fault(ranks)
    generator, sizes = torch.Generator().manual_seed(3), ((3, 512), (264, 512), (3, 264), (264,))
    states, weight, hidden, scale = (torch.randn(size, generator=generator) for size in sizes)
    summed, normed = ranks.add_norm(hidden, ranks.product(states, weight), scale, 0.1)
    expected = hidden.double() + 2 * states.double() @ weight.double().T
    torch.testing.assert_close(summed, expected.float(), rtol=1e-4, atol=1e-3)
    rms = (expected.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(normed, (expected / rms * scale).float(), rtol=1e-4, atol=1e-3)
    assert ranks.add_norm(hidden, None, scale, 0.1)[0] is hidden


@pytest.mark.parametrize("name", ["_sum", "_add_norm"])
def test_kernels_that_are_not_exact_are_found_out(name):
    ranks = CpuRankKernels(40)
    right = getattr(ranks, name)
    given = {
        "_sum": lambda parts, *rest: (parts[:1], *rest),
        "_add_norm": lambda *rest: (*rest[:6], 0.1, 1, 1),
    }
    setattr(ranks, name, lambda *arguments: right(*given[name](*arguments)))
    assert find_fault(ranks)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_they_compile_for_hopper(dtype):
    key = KernelKey(torch.device("cuda"), dtype, 128, 4, 32, 4, 8)
    sources = [kernel.get_kernel_source() for kernel in compile_sum_kernels(key, "sm_90a")]
    assert all("cudaGridDependencySynchronize" in source for source in sources)
