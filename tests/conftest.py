"""What holds for every test: offline, no files outside temporary folders, uninitialised memory is NaN."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Read when huggingface_hub is imported, so they are set before anything imports it.
_HF_HOME = tempfile.mkdtemp(prefix="leank-test-hf-")
atexit.register(shutil.rmtree, _HF_HOME, ignore_errors=True)
os.environ["HF_HOME"] = _HF_HOME
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402
import torch  # noqa: E402

POISONED = ("empty", "empty_like", "empty_strided")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its kin return with NaN, so that reading it shows."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.detach().fill_(float("nan"))
            return tensor

        return wrapper

    for name in POISONED:
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
