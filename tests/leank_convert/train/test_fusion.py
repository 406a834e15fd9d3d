"""Compiled layers change nothing but the context pass's time."""

import functools
import logging
from unittest.mock import Mock

import pytest
import torch

from leank_convert.train import passes
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.fusion import fuse_layers
from leank_convert.train.packing import pack_sample
from leank_convert.train.passes import distil, run_context_pass
from leank_convert.train.split_attention import Student
from leank_convert.windows import Windows
from tests.leank_convert.train.conftest import draw_sample
from tests.tiny_families import tiny_model

ASKED = [(3, 5)]  # question and answer tokens


@pytest.fixture(params=["llama", "qwen3"])
def model(request):
    layers = {"num_hidden_layers": 9}  # more than the compiler's limit of variants of one function
    sizes = {"head_dim": 8, "vocab_size": 90, **layers}
    return tiny_model(request.param, attn_implementation=ATTENTION_NAME, **sizes)


def loss_and_gradient(model, sample):
    factors = torch.full((9, 2, 8), 0.7, requires_grad=True)
    loss = distil(model, pack_sample(sample), Student(Windows(4, 8), factors, factors.any(-1)))
    loss.backward()
    return loss.detach(), factors.grad


def test_only_the_context_pass_is_compiled_a_few_times_whatever_the_layers_and_lengths(model, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(passes, "BLOCK_SIZE", 64)
    samples = [draw_sample(length, ASKED) for length in (64, 150, 37, 191, 200)]
    expected = [loss_and_gradient(model, sample) for sample in samples]
    torch._dynamo.reset()
    fuse_layers(model)
    graphs.clear()
    found = [loss_and_gradient(model, sample) for sample in samples]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert 0 < len(graphs) <= 12
    before = len(graphs)
    run_context_pass(model, draw_sample(123, ASKED).prefix_ids)
    assert len(graphs) == before


def test_where_nothing_can_be_compiled_training_goes_on_with_a_warning(model, monkeypatch, caplog):
    refuse = Mock(side_effect=RuntimeError("Failed to find C compiler.\nmore"))
    sample = draw_sample(60, ASKED)
    expected = loss_and_gradient(model, sample)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", refuse)
        with caplog.at_level(logging.WARNING, logger="leank_convert"):
            fuse_layers(model)
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile does not work here, so training is a tenth slower: Failed to find C compiler."
    ]
    torch.testing.assert_close(loss_and_gradient(model, sample), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_layers_on_a_device_are_as_exact_as_others(model, monkeypatch):
    monkeypatch.setattr(passes, "BLOCK_SIZE", 64)
    prefix = draw_sample(200, ASKED).prefix_ids
    exact = run_context_pass(model.double(), prefix).load(8)[0]
    model.bfloat16().cuda()
    own = run_context_pass(model, prefix).load(8)[0]
    fuse_layers(model)
    ours = run_context_pass(model, prefix).load(8)[0]
    assert not torch.equal(ours, own)  # what was fused is rounded less often
    error, own_error = ((t.cpu().double() - exact).norm() / exact.norm() for t in (ours, own))
    assert error <= 2 * own_error
