"""Training's kernel in Triton, which this environment has, interpreted on a CPU, against plain torch."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from leank_convert.train import fused

pytest.importorskip("triton", reason="bin/test-vllm runs it")
NAME = "leank_convert.train.gradient_kernel"


@pytest.fixture(params=[8, 9], ids="capability {}".format)
def launch(request, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # heeded where kernels are defined
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    found = SimpleNamespace(major=request.param, multi_processor_count=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield __import__(NAME, fromlist=["launch"]).launch
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "head_dim"), [(2, 70, 300, 64), (3, 129, 700, 96), (1, 1, 5, 128)]
)
def test_the_kernel_finds_the_gradient_of_plain_torch(heads, queries, keys, head_dim, launch):
    torch.manual_seed(0)
    query, gradient = torch.randn(2, 1, heads, queries, head_dim).half()
    around = torch.full((2, 1, heads, keys + 9, head_dim), torch.nan).half()  # what is no key is not read
    around[..., 4:-5, :] = torch.randn(2, 1, heads, keys, head_dim)
    key, value = around[..., 4:-5, :]
    scaling, mean = head_dim**-0.5, torch.randn(1, heads, queries, 1)
    lse = (query.float() @ key.float().mT * scaling).logsumexp(-1) + torch.rand(1, heads, queries)
    lse[0, 0, 0] = torch.inf  # a query that does not see these keys
    found = launch(gradient, query, key, value, mean, lse, scaling)
    singles = (tensor.float() for tensor in (gradient, query, key, value))
    wanted = fused.query_gradient(*singles, mean, lse, scaling=scaling)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    assert not found[0, 0, 0].any()
