"""Greedy answers of several variants to the same prompts, all from one prefill a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from leank_convert.errors import LeanKError, first_line
from leank_convert.evaluate.prefill import pad_left, positions_of, prefill_stock, run_prefill
from leank_convert.evaluate.prompt import Prompt, score
from leank_convert.evaluate.subject import EvaluatedModel
from leank_convert.evaluate.variants import Variant

if TYPE_CHECKING:
    from leank_convert.onnx.leank_onnx import LeanKOnnx


@dataclass(frozen=True)
class Answer:
    """What one variant made of one prompt.

    Attributes:
        task: The prompt's.
        length: The prompt's.
        index: The prompt's.
        prompt: The prompt's digest.
        num_tokens: Tokens of the prompt.
        variant: Who answered.
        text: The answer, up to the end of the turn.
        score: From 0 to 1.
    """

    task: str
    length: int
    index: int
    prompt: str
    num_tokens: int
    variant: str
    text: str
    score: float


def answer_prompts(
    evaluated: EvaluatedModel, prompts: Sequence[Prompt], variants: Sequence[Variant], *, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts, prompts of similar length together, the shortest first.

    Args:
        evaluated: Whose model runs the prefill.
        prompts: What is asked.
        variants: Who answers.
        batch_size: Prompts run together, padded on the left.

    Yields:
        The answers of a batch, all variants' to a prompt in turn.

    Raises:
        LeanKError: If memory does not suffice.
    """
    for batch in _batches(prompts, batch_size):
        with memory_errors(batch):
            yield _answer(evaluated, batch, variants)


def answer_densely(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, name: str, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts by a stock model with its own dense cache, in the order of `answer_prompts`.

    Args:
        model: A causal language model of transformers.
        tokenizer: Of these prompts.
        prompts: What is asked.
        name: What its column is called.
        batch_size: Prompts run together, padded on the left.

    Yields:
        The answers of a batch.

    Raises:
        LeanKError: If memory does not suffice.
    """
    for batch in _batches(prompts, batch_size):
        with memory_errors(batch), torch.no_grad():
            input_ids, attention_mask = pad_left([prompt.input_ids for prompt in batch], model.device)
            token, cache = prefill_stock(model, input_ids, attention_mask)
            rows = _decode(model, cache, token, attention_mask, batch)
        yield _score_rows(_end_tokens(model), tokenizer, batch, name, rows)


def answer_by_graph(
    graph: LeanKOnnx, tokenizer: Any, prompts: Sequence[Prompt], *, name: str, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts by an ONNX graph with its own pruned cache, in the order of `answer_prompts`.

    Args:
        graph: The exported folder, loaded.
        tokenizer: Of these prompts.
        prompts: What is asked.
        name: What its column is called.
        batch_size: Prompts run together.

    Yields:
        The answers of a batch.

    Raises:
        LeanKError: If memory does not suffice.
    """
    ends = graph.description.eos_token_ids
    for batch in _batches(prompts, batch_size):
        num_steps = max(prompt.max_new_tokens for prompt in batch)
        with memory_errors(batch):
            rows = graph.generate([prompt.input_ids.tolist() for prompt in batch], max_new_tokens=num_steps)
        yield _score_rows(ends, tokenizer, batch, name, rows)


@torch.no_grad()
def _answer(evaluated: EvaluatedModel, batch: Sequence[Prompt], variants: Sequence[Variant]) -> list[Answer]:
    input_ids, attention_mask = pad_left([prompt.input_ids for prompt in batch], evaluated.model.device)
    window = max((variant.query_window for variant in variants), default=0)
    prefill = run_prefill(evaluated.model, input_ids, attention_mask, query_window=window)
    answers = []
    # One after the other, so that no more than two whole caches exist at a time.
    for variant in variants:
        model, cache = variant.start(prefill)
        rows = _decode(model, cache, prefill.next_token, attention_mask, batch)
        answers += _score_rows(_end_tokens(model), evaluated.tokenizer, batch, variant.name, rows)
    return answers


def _batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[Sequence[Prompt]]:
    """Prompts of similar length together, the shortest first."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.input_ids))
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]


@contextmanager
def memory_errors(batch: Sequence[Prompt]) -> Iterator[None]:
    """Tell of prompts, the longest last, that memory does not suffice for.

    Raises:
        LeanKError: In place of torch's error, or of a graph's host.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LeanKError(
            f"memory does not suffice for {len(batch)} prompts of up to {len(batch[-1].input_ids)} "
            f"tokens: {first_line(error)}",
            hint="lower `--batch-size`" if len(batch) > 1 else "take shorter prompts",
            exit_code=1,
        ) from error


def _score_rows(
    ends: Collection[int],
    tokenizer: Any,
    batch: Sequence[Prompt],
    variant: str,
    rows: Sequence[Sequence[int]],
) -> list[Answer]:
    texts = [
        tokenizer.decode(_until(row[: prompt.max_new_tokens], ends))
        for prompt, row in zip(batch, rows, strict=True)
    ]
    return [
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
        for prompt, text in zip(batch, texts, strict=True)
    ]


def _decode(
    model: Any, past: Cache, token: Tensor, attention_mask: Tensor, batch: Sequence[Prompt]
) -> list[list[int]]:
    """Decode greedily from a filled cache, until every row has ended: rows [B] of ids."""
    num_steps = max(prompt.max_new_tokens for prompt in batch)
    ends = torch.tensor(list(_end_tokens(model)), dtype=torch.long, device=model.device)
    tokens = [token]
    ended = torch.isin(token, ends)
    while len(tokens) < num_steps and not bool(ended.all()):
        attention_mask = torch.cat([attention_mask, torch.ones_like(token)], dim=1)
        logits = model(
            input_ids=token,
            attention_mask=attention_mask,
            position_ids=positions_of(attention_mask)[:, -1:],
            past_key_values=past,
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
        ended = ended | torch.isin(token, ends)
    rows: list[list[int]] = torch.cat(tokens, dim=1).tolist()
    return rows


def _end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a turn."""
    end = model.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def _until(row: Sequence[int], ends: Collection[int]) -> list[int]:
    """Cut a row before its first token that ends the turn."""
    stop = next((place for place, token in enumerate(row) if token in ends), len(row))
    return list(row[:stop])
