"""One tiny checkpoint that several variants decode from."""

import pytest
import torch

from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.prefill import pad_left, run_prefill
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask


@pytest.fixture(scope="session")
def evaluated(retriever_folder, tmp_path_factory):
    """Random weights of the testbed's language that keep 3 in 10 channels; not to be changed."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    mask = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(2)) < 0.3
    export_checkpoint(retriever_folder, ChannelMask(mask), out, sink_size=2, recent_size=6, flush_size=2)
    return load_evaluated(out, torch.device("cpu"))


@pytest.fixture(scope="module")
def prefill(evaluated, request):
    """Prompts of the lengths that the module names by `LENGTHS`."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(5, 300, (length,), generator=generator) for length in request.module.LENGTHS]
    return run_prefill(evaluated.model, *pad_left(prompts, torch.device("cpu")))
