"""A device that cannot be used is told before anything is loaded."""

import pytest
import torch

from leank_convert.device import choose_device
from leank_convert.errors import LeanKError


@pytest.mark.parametrize("device", ["foo", "", "cuda:-1", "cuda:99", "meta", "privateuseone"])
def test_what_cannot_compute_here_is_refused(device):
    with pytest.raises(LeanKError, match=f"device `{device}` cannot be used: .") as caught:
        choose_device(device)
    assert "\n" not in caught.value.message
    assert "`cpu`" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_usable_device_is_given_back(device):
    assert choose_device(device) == torch.device("cpu")
    assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
