"""A device that cannot be used is told before anything is loaded."""

import pytest
import torch

from leank_convert.device import choose_device
from leank_convert.errors import LeanKError


@pytest.mark.parametrize("device", ["foo", "", "cuda:-1", "cuda:99", "meta", "privateuseone"])
def test_what_cannot_compute_here_is_refused(device):
    with pytest.raises(LeanKError, match=f"device `{device}` cannot be used: .") as caught:
        choose_device(device)
    assert "\n" not in str(caught.value)
    assert "`cpu`" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_without_a_gpu():
    with pytest.raises(LeanKError, match="device `cuda` cannot be used"):
        choose_device("cuda")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_usable_device_is_given_back(device):
    assert choose_device(device) == torch.device("cpu")


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "cuda"), (False, "cpu")])
def test_without_a_choice_it_is_cuda_if_there_is_any(monkeypatch, has_cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device(None) == torch.device(expected)
