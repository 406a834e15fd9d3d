"""What evaluations tell of prompts that memory does not suffice for."""

from types import SimpleNamespace

import pytest
import torch

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answering import answer_against
from leank_convert.evaluate.prompt import Prompt
from leank_convert.onnx.leank_onnx_cache import LeanKOnnxMemoryError


@pytest.mark.parametrize(
    ("batch_size", "told", "hint"),
    [
        (4, "3 prompts of up to 30", "lower `--batch-size`"),
        (1, "1 prompts of up to 10", "take shorter prompts"),
    ],
)
def test_a_graph_that_runs_out_of_memory_is_told_with_what_to_lower(
    batch_size, told, hint, tmp_path, monkeypatch
):
    def generate(rows, **options):
        raise LeanKOnnxMemoryError("too little")

    graph = SimpleNamespace(generate=generate, description=SimpleNamespace(eos_token_ids={2}))
    monkeypatch.setattr("leank_convert.onnx.leank_onnx.LeanKOnnx", lambda folder, threads: graph)
    (tmp_path / ONNX_DESCRIPTION_NAME).touch()
    prompts = [Prompt("task", 64, i, torch.arange(n), ("7",), "exact", 8) for i, n in enumerate((20, 10, 30))]
    with pytest.raises(LeanKError, match=f"memory does not suffice for {told} tokens: too little") as caught:
        list(answer_against(tmp_path, None, prompts, torch.device("cpu"), batch_size))
    assert caught.value.hint == hint
    assert caught.value.exit_code == 1
