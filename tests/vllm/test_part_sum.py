"""The kernel that adds up the parts of a product, on TileLang's CPU target, against plain torch."""

import contextlib

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang

from leank_convert._runtime.kernel_leank import KernelShape
from leank_convert.vllm.part_sum import PartSum, is_exact
from leank_convert.vllm.sum_kernel import sum_parts
from tests.runtime.cpu_kernels import CpuKernels, compiled_for_cpu


class CpuPartSum(PartSum):
    def __init__(self, num_programs):
        shape = KernelShape(torch.device("cpu"), torch.float32, 32, 2, 16, 3, 8)
        self.kernels = CpuKernels(shape, num_programs)
        self._sum = compiled_for_cpu(sum_parts)


@pytest.fixture(autouse=True)
def no_device_to_choose(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)


@pytest.mark.parametrize("num_programs", [1, 11, 40])
def test_parts_add_up_however_a_product_is_cut(num_programs):
    assert is_exact(CpuPartSum(num_programs))


def test_a_sum_that_lacks_a_part_is_found_out():
    part_sum = CpuPartSum(40)
    added = part_sum._sum
    part_sum._sum = lambda parts, output, *cut: added(parts[:1], output, *cut)
    assert not is_exact(part_sum)


def test_it_compiles_for_hopper():
    tilelang.compile(sum_parts(), target={"kind": "cuda", "arch": "sm_90a"}).get_kernel_source()
