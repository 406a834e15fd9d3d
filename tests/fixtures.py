"""What holds for every test, and what many rooms share. Uninitialised memory is NaN."""

import contextlib
import fcntl
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from leank_convert.mask import ChannelMask
from leank_convert.testbed import MODEL_DIR
from tests.checks import provenance_of
from tests.tiny_families import random_mask, tiny_folder

torch.set_num_threads(1)  # bits may depend on it, and workers share the cores
POISONED = ("empty", "empty_like", "empty_strided")
# torch remembers, at its first use, which functions `with torch.device(...)` concerns: not these stand-ins.
with torch.device("meta"):
    torch.empty(0)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """What is loaded by now stays, and is not looked through at every collection that a program asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch):
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


@pytest.fixture
def no_device_to_choose(monkeypatch):
    """Kernels are launched on the device that there is, a CPU."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)


@pytest.fixture(scope="session")
def testbed_tokenizer():
    """The shipped model's, a token a word; not to be changed."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL_DIR)
    return tokenizer


@pytest.fixture(scope="session")
def retriever_folder(tmp_path_factory, testbed_tokenizer):
    """A tiny Llama that speaks the testbed's language, with random weights and attention far from uniform."""
    return tiny_folder(tmp_path_factory.mktemp("models") / "retriever", testbed_tokenizer)


@pytest.fixture(scope="session")
def once_per_run(tmp_path_factory):
    """Makes a folder by its name, once for all workers: `once_per_run("name", make)`. Not to be changed."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # what the workers of a run share

    def get(name, make):
        folder = root / "shared" / name
        folder.parent.mkdir(exist_ok=True)
        with (root / "shared" / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                # Below a folder of its own, so that what is written keeps its name.
                partial = Path(tempfile.mkdtemp(dir=folder.parent)) / name
                make(partial)
                partial.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def retriever_mask():
    """For `retriever_folder`: the heads of layer 0 change places, layer 1 has one bucket."""
    return ChannelMask(random_mask([[7, 0], [4, 4]]))


@pytest.fixture(scope="session")
def retriever_mean(retriever_folder, retriever_mask):
    """The same channels, of keys less a large mean, with windows of 3, 6 and 4 tokens."""
    channels = retriever_mask.channel_mask
    mean = 3 * torch.randn(channels.shape, generator=torch.Generator().manual_seed(1))
    known = provenance_of(retriever_folder, sink_size=3, recent_size=6)
    return ChannelMask(channels, provenance=known, key_mean=mean.half())


@pytest.fixture(scope="session")
def retriever_centred(once_per_run, retriever_folder, retriever_mean):
    """A checkpoint of it whose keys are cached less their mean in `checkpoint`, and its graph in `onnx`."""
    from leank_convert.export import export_checkpoint
    from leank_convert.onnx import export_onnx

    def make(out):
        export_checkpoint(retriever_folder, retriever_mean, out / "checkpoint")
        export_onnx(out / "checkpoint", None, out / "onnx")

    return once_per_run("retriever_centred", make)


@pytest.fixture(scope="session")
def shipped_checkpoint(once_per_run):
    """The shipped model with heads of many widths; of prompts below 250 tokens nothing is pruned."""
    from leank_convert.export import export_checkpoint

    widths = [[0, 24, 64, 64], [48, 48, 48, 48], [33, 33, 33, 33], [0, 0, 64, 64]]
    mask = ChannelMask(random_mask(widths, 64))
    sizes = {"sink_size": 8, "recent_size": 242, "flush_size": 2}
    return once_per_run("shipped_checkpoint", lambda out: export_checkpoint(MODEL_DIR, mask, out, **sizes))


@pytest.fixture
def without_report(monkeypatch):
    """Masks are written without their report, which takes longer to draw than a toy to train."""
    monkeypatch.setattr("leank_convert.train.loop.write_report", lambda *_: None)


@pytest.fixture
def copy_of(tmp_path):
    """Copies a folder, so that it may be changed: `copy_of(folder)`."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / folder.name))


@pytest.fixture(scope="session")
def shipped_onnx(once_per_run, shipped_checkpoint):
    """An ONNX folder of it."""
    from leank_convert.onnx import export_onnx

    return once_per_run("shipped_onnx", lambda out: export_onnx(shipped_checkpoint, None, out))
