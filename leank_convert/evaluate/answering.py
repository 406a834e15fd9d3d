"""Greedy answers of several variants from one prefill per batch, of another model, or of an ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor
from transformers import Cache

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME, read_config
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.evaluate.loading import EvaluatedModel, load_evaluated, load_model
from leank_convert.evaluate.prefill import (
    Prefill,
    decode_token,
    likeliest,
    pad_left,
    prefill_stock,
    run_prefill,
)
from leank_convert.evaluate.prompt import Prompt, score
from leank_convert.evaluate.variants import Masked, Variant
from leank_convert.hub import resolve_model
from leank_convert.onnx.description import host_errors, read_description
from leank_convert.onnx.libraries import check_available
from leank_convert.tokenizer import load_tokenizer
from leank_convert.trust import check_code, check_config

AGAINST = "against"
Response = tuple[str, Collection[int], Sequence[Sequence[int]]]
"""What answered a batch, the tokens that end a turn, and the tokens after each prompt."""
Respond = Callable[[Sequence[Prompt]], Iterator[Response]]
"""What answers a batch, one variant after the other."""


@dataclass(frozen=True)
class Answer:
    """What one variant made of one prompt."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    task: str
    length: int  # tokens that were asked for
    index: int  # its place among the prompts of one task and length
    prompt: str  # the prompt's digest
    num_tokens: int  # tokens of the prompt
    variant: str  # what answered
    text: str  # the answer, up to the end of the turn
    score: Annotated[float, Field(ge=0, le=1)]


def answer_prompts(
    evaluated: EvaluatedModel, prompts: Sequence[Prompt], variants: Sequence[Variant], *, batch_size: int
) -> Iterator[list[Answer]]:
    """Answer prompts, those of similar length together, the shortest first.

    Each batch's answers of one variant come as soon as they are there; LeanKError if memory does not suffice.
    """
    yield from _answer(prompts, evaluated.tokenizer, batch_size, partial(_decode, evaluated, variants))


def fill_caches(
    evaluated: EvaluatedModel, prompt: Prompt, variants: Sequence[Variant]
) -> Iterator[tuple[str, Any]]:
    """Yield each variant's cache once a prompt and a token of its answer are fed; as `answer_prompts`."""
    with out_of_memory_for([prompt]):
        prefill = _prefill(evaluated, [prompt], variants)
        for variant in variants:
            model, cache = variant.start(prefill)
            decode_token(model, cache, prefill.next_token, prefill.attention_mask)
            yield variant.name, cache


def find_opponent(name: str, tokenizer: Any, *, trust: bool = False) -> Path:
    """Find the folder of a model, checkpoint or graph to compare with, which takes the same prompts.

    Raises:
        LeanKError: If there is no such model, it has another vocabulary, it is a graph that cannot be run, or
            a checkpoint with other code than a release's.
    """
    folder, runs_own = resolve_model(name), False
    if _is_graph(folder):
        check_available()
        with host_errors():
            read_description(folder).check_graph()
    elif "leank" in read_config(folder):
        check_code(folder, trust=trust)
        runs_own = trust
    else:
        check_config(folder)
    other = load_tokenizer(folder, trust=runs_own)
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
    """Answer prompts by what `find_opponent` found, as `answer_prompts`; a graph runs on the CPU anyway."""
    with host_errors():
        yield from _answer(prompts, tokenizer, batch_size, _open_opponent(folder, device, trust=trust))


def decode_greedily(
    model: Any, past: Cache, token: Tensor, attention_mask: Tensor, num_steps: int
) -> list[list[int]]:
    """Decode from a filled cache, of real columns [B, S] and next tokens [B, 1], until every row has ended.

    Of each row come at most `num_steps` ids; what follows the token that ends a turn means nothing.
    """
    ends = torch.tensor(list(end_tokens(model)), dtype=torch.long, device=model.device)
    tokens = [token]
    ended = torch.isin(token, ends)
    while len(tokens) < num_steps and not bool(ended.all()):
        logits, attention_mask = decode_token(model, past, tokens[-1], attention_mask)
        tokens.append(likeliest(logits))
        ended = ended | torch.isin(tokens[-1], ends)
    rows: list[list[int]] = torch.cat(tokens, dim=1).tolist()
    return rows


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a turn."""
    end = model.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def out_of_memory_for(batch: Sequence[Prompt]) -> AbstractContextManager[None]:
    """Say that memory does not suffice for these prompts, of which the last is the longest."""
    return out_of_memory(
        f"{len(batch)} prompts of up to {len(batch[-1].input_ids)} tokens",
        hint="lower `--batch-size`" if len(batch) > 1 else "take shorter prompts",
    )


def _decode(
    evaluated: EvaluatedModel, variants: Sequence[Variant], batch: Sequence[Prompt]
) -> Iterator[Response]:
    """Answer a batch by each variant in turn, from one prefill."""
    prefill = _prefill(evaluated, batch, variants)
    # One after the other, so that no more than two whole caches exist at a time.
    for variant in variants:
        model, cache = variant.start(prefill)
        num_steps = _most_tokens(batch)
        rows = decode_greedily(model, cache, prefill.next_token, prefill.attention_mask, num_steps)
        yield variant.name, end_tokens(model), rows


def _open_opponent(folder: Path, device: torch.device, *, trust: bool) -> Respond:
    """Load what `find_opponent` found, as what answers a batch."""
    if _is_graph(folder):
        from leank_convert.onnx.leank_onnx import LeanKOnnx

        graph = LeanKOnnx(folder, threads=torch.get_num_threads())

        def respond(batch: Sequence[Prompt]) -> Iterator[Response]:
            inputs = [prompt.input_ids.tolist() for prompt in batch]
            rows = graph.generate(inputs, max_new_tokens=_most_tokens(batch))
            yield AGAINST, graph.description.eos_token_ids, rows

        return respond
    if "leank" in read_config(folder):
        return partial(_decode, load_evaluated(folder, device, trust=trust), [Masked(AGAINST)])
    model = load_model(folder, device, trust_remote_code=False)

    def respond_stock(batch: Sequence[Prompt]) -> Iterator[Response]:
        input_ids, attention_mask = pad_left([prompt.input_ids for prompt in batch], device)
        token, cache = prefill_stock(model, input_ids, attention_mask)
        rows = decode_greedily(model, cache, token, attention_mask, _most_tokens(batch))
        yield AGAINST, end_tokens(model), rows

    return respond_stock


def _answer(
    prompts: Sequence[Prompt], tokenizer: Any, batch_size: int, respond: Respond
) -> Iterator[list[Answer]]:
    """Let `respond` answer prompts of similar length together, the shortest first."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.input_ids))
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        with out_of_memory_for(batch):
            for name, ends, rows in respond(batch):
                yield [
                    _read(row, ends, tokenizer, prompt, name) for prompt, row in zip(batch, rows, strict=True)
                ]


def _read(row: Sequence[int], ends: Collection[int], tokenizer: Any, prompt: Prompt, name: str) -> Answer:
    """Read the answer to a prompt from the tokens after it, and score it."""
    text = tokenizer.decode(list(takewhile(lambda token: token not in ends, row[: prompt.max_new_tokens])))
    return Answer(
        task=prompt.task,
        length=prompt.length,
        index=prompt.index,
        prompt=prompt.digest,
        num_tokens=len(prompt.input_ids),
        variant=name,
        text=text,
        score=score(text, prompt),
    )


def _prefill(evaluated: EvaluatedModel, batch: Sequence[Prompt], variants: Sequence[Variant]) -> Prefill:
    """Run prompts once for all variants."""
    ids = pad_left([prompt.input_ids for prompt in batch], evaluated.model.device)
    window = max((variant.query_window for variant in variants), default=0)
    return run_prefill(evaluated.model, *ids, query_window=window)


def _is_graph(folder: Path) -> bool:
    return (folder / ONNX_DESCRIPTION_NAME).is_file()


def _most_tokens(batch: Sequence[Prompt]) -> int:
    return max(prompt.max_new_tokens for prompt in batch)
