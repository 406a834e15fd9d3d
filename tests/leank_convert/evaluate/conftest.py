"""One tiny checkpoint that several variants decode from."""

import pytest
import torch

from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.prefill import decode_token, pad_left, run_prefill
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask


@pytest.fixture(scope="session")
def export_retriever(retriever_folder, tmp_path_factory):
    """Exports random weights of the testbed's language with 3 in 10 channels, by a name and options."""
    mask = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(2)) < 0.3
    options = {"sink_size": 2, "recent_size": 6, "flush_size": 2}
    folder = tmp_path_factory.mktemp("evaluated")
    return lambda name, **own: export_checkpoint(
        retriever_folder, ChannelMask(mask), folder / name, **options, **own
    )


@pytest.fixture(scope="session")
def evaluated(export_retriever):
    """Such a checkpoint, not to be changed."""
    return load_evaluated(export_retriever("out"), torch.device("cpu"))


@pytest.fixture(scope="module")
def prefill(evaluated, request):
    """Prompts of the lengths that the module names by `LENGTHS`, and queries of its `QUERY_WINDOW`."""
    module, generator = request.module, torch.Generator().manual_seed(4)
    prompts = [torch.randint(5, 300, (length,), generator=generator) for length in module.LENGTHS]
    options = {"query_window": module.QUERY_WINDOW} if hasattr(module, "QUERY_WINDOW") else {}
    return run_prefill(evaluated.model, *pad_left(prompts, torch.device("cpu")), **options)


def feed_steps(model, cache, attention_mask, tokens):
    """The logits of steps that feed these tokens [B, 1] behind a prefill [steps, B, vocabulary]."""
    steps = []
    for token in tokens:
        logits, attention_mask = decode_token(model, cache, token, attention_mask)
        steps.append(logits)
    return torch.stack(steps) if steps else None
