"""What a checkpoint is compared with instead of its own dense model: another model, or an ONNX graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME, read_config
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answering import Answer, answer_by_graph, answer_densely, answer_prompts
from leank_convert.evaluate.prompt import Prompt
from leank_convert.evaluate.subject import load_evaluated, load_tokenizer
from leank_convert.evaluate.variants import Masked
from leank_convert.hub import resolve_model
from leank_convert.onnx.libraries import check_available

AGAINST = "against"
_BLOCK_SIZE = 1 << 24
# What a model answers with: its weights, its config, and the tokens that end a turn.
_IDENTIFYING = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.bin",
    ONNX_DESCRIPTION_NAME,
    "*.onnx",
    "*.onnx.data",
)


def identify(folder: Path) -> str:
    """A digest of what a model answers with."""
    digest = hashlib.sha256()
    for pattern in _IDENTIFYING:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                while block := file.read(_BLOCK_SIZE):
                    digest.update(block)
    return digest.hexdigest()[:16]


def find_opponent(name: str, tokenizer: Any) -> Path:
    """Find the folder of what to compare with, and look whether it takes the same prompts.

    Args:
        name: A model or a checkpoint, as a hub id or a folder, or an ONNX folder.
        tokenizer: The checkpoint's.

    Raises:
        LeanKError: If there is no such model, it has another vocabulary, or it is a graph that cannot be run.
    """
    folder = resolve_model(name)
    graph = _is_graph(folder)
    if graph:
        check_available()
        from leank_convert.onnx.leank_onnx import Description

        with _host_errors():
            Description.read(folder)
    is_checkpoint = not graph and "leank" in read_config(folder)
    _check_tokenizer(load_tokenizer(folder, trust_remote_code=is_checkpoint), tokenizer, name)
    return folder


def answer_against(
    folder: Path, tokenizer: Any, prompts: Sequence[Prompt], device: torch.device, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts by what `find_opponent` found; a graph runs on the CPU, whatever the device.

    Raises:
        LeanKError: If it cannot be loaded, or memory does not suffice.
    """
    if _is_graph(folder):
        from leank_convert.onnx.leank_onnx import LeanKOnnx

        with _host_errors():
            graph = LeanKOnnx(folder, threads=torch.get_num_threads())
            yield from answer_by_graph(graph, tokenizer, prompts, name=AGAINST, batch_size=batch_size)
    elif "leank" in read_config(folder):
        other = load_evaluated(folder, device)
        yield from answer_prompts(other, prompts, [Masked(AGAINST)], batch_size=batch_size)
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        model.to(device).eval()
        yield from answer_densely(model, tokenizer, prompts, name=AGAINST, batch_size=batch_size)


def _is_graph(folder: Path) -> bool:
    return (folder / ONNX_DESCRIPTION_NAME).is_file()


@contextmanager
def _host_errors() -> Iterator[None]:
    """Tell what the graph's own program finds wrong as the command line tells errors."""
    from leank_convert.onnx.leank_onnx import LeanKOnnxError

    try:
        yield
    except LeanKOnnxError as error:
        raise LeanKError(str(error)) from error


def _check_tokenizer(other: Any, tokenizer: Any, name: str) -> None:
    if other.get_vocab() != tokenizer.get_vocab():
        raise LeanKError(
            f"`{name}` has another vocabulary than the checkpoint: the same prompt would be other tokens",
            hint="compare models of one tokenizer",
        )
