"""Greedy answers of several variants from one prefill per batch, of another model, or of an ONNX graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME, read_config
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.evaluate.evaluated import EvaluatedModel, load_evaluated, load_model
from leank_convert.evaluate.prefill import decode_token, pad_left, prefill_stock, run_prefill
from leank_convert.evaluate.prompt import Prompt, score
from leank_convert.evaluate.used_bytes import UsedBytes, used_bytes
from leank_convert.evaluate.variants import Masked, Variant
from leank_convert.hub import resolve_model
from leank_convert.onnx.description import host_errors
from leank_convert.onnx.libraries import check_available
from leank_convert.tokenizer import load_tokenizer
from leank_convert.trust import check_code, check_config

if TYPE_CHECKING:
    from leank_convert.onnx.leank_onnx import LeanKOnnx

AGAINST = "against"


@dataclass(frozen=True)
class Answer:
    """What one variant made of one prompt."""

    task: str
    length: int  # tokens that were asked for
    index: int  # its place among the prompts of one task and length
    prompt: str  # the prompt's digest
    num_tokens: int  # tokens of the prompt
    variant: str  # what answered
    text: str  # the answer, up to the end of the turn
    score: float  # from 0 to 1


def answer_prompts(
    evaluated: EvaluatedModel, prompts: Sequence[Prompt], variants: Sequence[Variant], *, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts, prompts of similar length together, the shortest first.

    Args:
        evaluated: Its model runs the prefill.
        prompts: What is asked.
        variants: What answers.
        batch_size: Prompts run together, padded on the left.

    Yields:
        The answers of one variant to a batch, as soon as they are there; the variants in turn.

    Raises:
        LeanKError: If memory does not suffice.
    """
    for batch in _batches(prompts, batch_size):
        with out_of_memory_for(batch):
            yield from _answer(evaluated, batch, variants)


def measure_bytes(
    evaluated: EvaluatedModel, prompt: Prompt, variants: Sequence[Variant]
) -> dict[str, UsedBytes]:
    """Count, by variant, K and V of one prompt and its first answer token.

    Raises:
        LeanKError: If memory does not suffice.
    """
    used = {}
    with out_of_memory_for([prompt]):
        ids = pad_left([prompt.input_ids], evaluated.model.device)
        window = max(variant.query_window for variant in variants)
        prefill = run_prefill(evaluated.model, *ids, query_window=window)
        for variant in variants:
            model, cache = variant.start(prefill)
            decode_token(model, cache, prefill.next_token, prefill.attention_mask)
            used[variant.name] = used_bytes(cache)
    return used


def find_opponent(name: str, tokenizer: Any, *, trust: bool = False) -> Path:
    """Find the folder of a model to compare with, and check that it takes the same prompts.

    Args:
        name: A model or a checkpoint, as a hub id or a folder, or an ONNX folder.
        tokenizer: The checkpoint's.
        trust: Whether another checkpoint's code runs whatever it is.

    Raises:
        LeanKError: If there is no such model, it has another vocabulary, it is a graph that cannot be run, or
            a checkpoint with other code than a release's.
    """
    folder = resolve_model(name)
    if _is_graph(folder):
        check_available()
        from leank_convert.onnx.leank_onnx import Description

        with host_errors():
            Description.read(folder)
    elif "leank" in read_config(folder):
        check_code(folder, trust=trust)
    else:
        check_config(folder)
    other = load_tokenizer(folder)
    if other.get_vocab() != tokenizer.get_vocab():
        raise LeanKError(
            f"`{name}` has another vocabulary than the checkpoint: the same prompt would be other tokens",
            hint="compare models of one tokenizer",
        )
    return folder


def answer_against(
    folder: Path,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    device: torch.device,
    batch_size: int,
    *,
    trust: bool = False,
) -> Iterator[list[Answer]]:
    """Answer prompts by what `find_opponent` found; a graph runs on the CPU, whatever the device.

    Raises:
        LeanKError: If it cannot be loaded, or memory does not suffice.
    """
    if _is_graph(folder):
        from leank_convert.onnx.leank_onnx import LeanKOnnx

        with host_errors():
            graph = LeanKOnnx(folder, threads=torch.get_num_threads())
            yield from answer_by_graph(graph, tokenizer, prompts, name=AGAINST, batch_size=batch_size)
    elif "leank" in read_config(folder):
        other = load_evaluated(folder, device, trust=trust)
        yield from answer_prompts(other, prompts, [Masked(AGAINST)], batch_size=batch_size)
    else:
        model = load_model(folder, device, trust_remote_code=False)
        yield from answer_densely(model, tokenizer, prompts, name=AGAINST, batch_size=batch_size)


def answer_densely(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, name: str, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts by a stock model of transformers with its own dense cache, as `answer_prompts` does."""
    for batch in _batches(prompts, batch_size):
        with out_of_memory_for(batch):
            input_ids, attention_mask = pad_left([prompt.input_ids for prompt in batch], model.device)
            token, cache = prefill_stock(model, input_ids, attention_mask)
            rows = decode_greedily(model, cache, token, attention_mask, _most_tokens(batch))
        yield _score_rows(end_tokens(model), tokenizer, batch, name, rows)


def answer_by_graph(
    graph: LeanKOnnx, tokenizer: Any, prompts: Sequence[Prompt], *, name: str, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts by an ONNX graph with its own pruned cache, as `answer_prompts` does."""
    ends = graph.description.eos_token_ids
    for batch in _batches(prompts, batch_size):
        inputs = [prompt.input_ids.tolist() for prompt in batch]
        with out_of_memory_for(batch):
            rows = graph.generate(inputs, max_new_tokens=_most_tokens(batch))
        yield _score_rows(ends, tokenizer, batch, name, rows)


def decode_greedily(
    model: Any, past: Cache, token: Tensor, attention_mask: Tensor, num_steps: int
) -> list[list[int]]:
    """Decode from a filled cache until every row has ended.

    Args:
        model: A causal language model, stock or LeanK.
        past: Its cache.
        token: The greedy token after each prompt [B, 1].
        attention_mask: 1 where a column of the cache is real [B, S].
        num_steps: The most tokens of a row, `token` among them.

    Returns:
        Ids of each row; what follows the token that ends a turn means nothing.
    """
    ends = torch.tensor(list(end_tokens(model)), dtype=torch.long, device=model.device)
    tokens = [token]
    ended = torch.isin(token, ends)
    while len(tokens) < num_steps and not bool(ended.all()):
        logits, attention_mask = decode_token(model, past, tokens[-1], attention_mask)
        tokens.append(logits.argmax(-1, keepdim=True))
        ended = ended | torch.isin(tokens[-1], ends)
    rows: list[list[int]] = torch.cat(tokens, dim=1).tolist()
    return rows


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a turn."""
    end = model.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def cut_at_end(row: Sequence[int], ends: Collection[int]) -> list[int]:
    """Cut a row before its first token that ends the turn."""
    stop = next((place for place, token in enumerate(row) if token in ends), len(row))
    return list(row[:stop])


def out_of_memory_for(batch: Sequence[Prompt]) -> AbstractContextManager[None]:
    """Say that memory does not suffice for these prompts, of which the last is the longest."""
    return out_of_memory(
        f"{len(batch)} prompts of up to {len(batch[-1].input_ids)} tokens",
        hint="lower `--batch-size`" if len(batch) > 1 else "take shorter prompts",
    )


def _answer(
    evaluated: EvaluatedModel, batch: Sequence[Prompt], variants: Sequence[Variant]
) -> Iterator[list[Answer]]:
    ids = pad_left([prompt.input_ids for prompt in batch], evaluated.model.device)
    window = max((variant.query_window for variant in variants), default=0)
    prefill = run_prefill(evaluated.model, *ids, query_window=window)
    # One after the other, so that no more than two whole caches exist at a time.
    for variant in variants:
        model, cache = variant.start(prefill)
        num_steps = _most_tokens(batch)
        rows = decode_greedily(model, cache, prefill.next_token, prefill.attention_mask, num_steps)
        yield _score_rows(end_tokens(model), evaluated.tokenizer, batch, variant.name, rows)


def _batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[Sequence[Prompt]]:
    """Prompts of similar length together, the shortest first."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.input_ids))
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]


def _is_graph(folder: Path) -> bool:
    return (folder / ONNX_DESCRIPTION_NAME).is_file()


def _score_rows(
    ends: Collection[int],
    tokenizer: Any,
    batch: Sequence[Prompt],
    variant: str,
    rows: Sequence[Sequence[int]],
) -> list[Answer]:
    answers = []
    for prompt, row in zip(batch, rows, strict=True):
        text = tokenizer.decode(cut_at_end(row[: prompt.max_new_tokens], ends))
        answers.append(
            Answer(
                task=prompt.task,
                length=prompt.length,
                index=prompt.index,
                prompt=prompt.digest,
                num_tokens=len(prompt.input_ids),
                variant=variant,
                text=text,
                score=score(text, prompt),
            )
        )
    return answers


def _most_tokens(batch: Sequence[Prompt]) -> int:
    return max(prompt.max_new_tokens for prompt in batch)
