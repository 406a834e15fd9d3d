"""Exact match of greedy answers: dense, pruned, and from the window alone, all three from one prefill.

Prefill is dense in every case, so one prefill serves all: its keys and values go, whole, into a dense cache
for the stock model class and stay, pending, in the LeanK cache; only what is decoded differs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache

from leank_convert.architectures import Architecture
from leank_convert.checkpoint_io import open_checkpoint, read_leank_config, read_leank_facts
from leank_convert.data import SampleSource, TrainingSample
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.comparison import CacheBytes, Comparison, Outcome
from leank_convert.recipe import DataSection

_logger = logging.getLogger("leank_convert")

# Room to be wrong in: a right answer ends here at the latest.
_EXTRA_TOKENS = 4


def evaluate_checkpoint(
    checkpoint: Path,
    data: DataSection,
    *,
    num_samples: int,
    seed: int,
    device: str | torch.device | None = None,
    batch_size: int = 8,
) -> Comparison:
    """Compare a checkpoint's pruned answers with those of its own weights in the stock class.

    Args:
        checkpoint: A folder that `export` wrote.
        data: Which samples are drawn.
        num_samples: How many.
        seed: Of the samples; take another than the training's.
        device: Default: CUDA if there is any, else the CPU.
        batch_size: Prompts decoded together, padded on the left.

    Returns:
        The comparison.

    Raises:
        LeanKError: If `checkpoint` is no LeanK checkpoint, samples cannot be drawn for its tokenizer,
            or all of them are too short for anything to be pruned.
    """
    config, leank = read_leank_config(checkpoint)
    facts = read_leank_facts(config, checkpoint)
    open_checkpoint(checkpoint)  # a damaged shard is told better here than while loading
    chosen = choose_device(device)
    pruned: Any = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    pruned.to(chosen)
    dense = _as_stock(pruned, facts.architecture)
    # Without trust_remote_code transformers asks on the terminal, as the config is remote code too.
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    source = SampleSource(tokenizer, data.model_copy(update={"questions_per_context": 1}), seed)
    source.check()
    # Of one question the prefix is the whole prompt.
    samples = sorted((source.draw(index) for index in range(num_samples)), key=lambda s: s.num_tokens)
    whole_size = leank["sink_size"] + leank["recent_size"]
    num_whole = sum(len(sample.prefix_ids) <= whole_size for sample in samples)
    if num_whole == num_samples:
        raise LeanKError(
            f"nothing of any prompt would be pruned: the longest has {len(samples[-1].prefix_ids)} tokens, "
            f"`{checkpoint}` keeps the first {leank['sink_size']} and the last {leank['recent_size']} whole",
            hint="raise `data.min_length` and `data.max_length`, or export with a smaller `--recent-size`",
        )
    if num_whole:
        _logger.warning(
            "%d of %d prompts have at most %d tokens, of which nothing is pruned",
            num_whole,
            num_samples,
            whole_size,
        )

    outcomes: list[Outcome] = []
    for start in range(0, num_samples, batch_size):
        batch = samples[start : start + batch_size]
        answers, cache = _answer(dense, pruned, batch)
        for row, sample in enumerate(batch):
            expected = tokenizer.decode(sample.answer_ids()).strip()
            right = [tokenizer.decode(rows[row]).strip() == expected for rows in answers]
            outcomes.append(Outcome(sample.task, len(sample.prefix_ids), *right))
    return Comparison(
        checkpoint=str(checkpoint),
        seed=seed,
        pruning_ratio_asked=leank["pruning_ratio_asked"],
        pruning_ratio=leank["pruning_ratio"],
        num_whole=num_whole,
        outcomes=tuple(outcomes),
        cache=_count_bytes(cache, len(batch) - 1),
    )


def _as_stock(pruned: Any, architecture: Architecture) -> Any:
    """The stock model on the same weights: what the checkpoint is when it is loaded by its stock class."""
    config_class = getattr(transformers, architecture.config_class)
    values = {**pruned.config.to_dict(), "model_type": architecture.model_type, "attn_implementation": "sdpa"}
    with init_empty_weights():
        dense = getattr(transformers, architecture.causal_lm_class)(config_class.from_dict(values))
    weights = {key: value for key, value in pruned.state_dict().items() if not key.endswith(".channel_mask")}
    dense.load_state_dict(weights, assign=True)
    return dense.to(pruned.device).eval()


@torch.no_grad()
def _answer(dense: Any, pruned: Any, batch: Sequence[TrainingSample]) -> tuple[list[list[list[int]]], Any]:
    """Answer a batch dense, pruned and from the window alone, each up to its end-of-turn token.

    Returns:
        Token ids of the three, per row, and the pruned cache.
    """
    num_steps = max(sample.num_answer_tokens for sample in batch) + _EXTRA_TOKENS
    prompts = [sample.prefix_ids for sample in batch]
    input_ids, attention_mask = (part.to(pruned.device) for part in _pad_left(prompts))
    cache = pruned.build_cache("deferred")
    prefill = pruned(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=_positions(attention_mask),
        past_key_values=cache,
        logits_to_keep=1,
    )
    first = prefill.logits[:, -1].argmax(-1, keepdim=True)

    def decode(model: Any, past: Cache) -> list[list[int]]:
        return _decode(model, past, first, attention_mask, num_steps, _end_tokens(pruned))

    # One after the other, so that no more than two whole caches exist at a time.
    dense_answers = decode(dense, _dense_copy(cache))
    window_answers = decode(pruned, _window_copy(cache))
    return [dense_answers, decode(pruned, cache), window_answers], cache


def _dense_copy(cache: Any) -> Cache:
    """A dense cache of the keys and values that wait in a LeanK cache."""
    dense = DynamicCache()
    for index, layer in enumerate(cache.layers):
        dense.update(*layer.pending, index)
    return dense


def _window_copy(cache: Any) -> Any:
    """A LeanK cache of the same input that will prune every channel."""
    window = copy.deepcopy(cache)
    for layer in window.layers:
        layer.set_channel_mask(torch.zeros_like(layer.channel_mask[0]))
    return window


def _decode(
    model: Any, past: Cache, token: Tensor, attention_mask: Tensor, num_steps: int, end_tokens: set[int]
) -> list[list[int]]:
    """Decode greedily from a filled cache; rows [B] of ids, each up to its end-of-turn token."""
    tokens = [token]
    for _ in range(num_steps - 1):
        attention_mask = torch.cat([attention_mask, torch.ones_like(token)], dim=1)
        logits = model(
            input_ids=token,
            attention_mask=attention_mask,
            position_ids=_positions(attention_mask)[:, -1:],
            past_key_values=past,
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
    rows = torch.cat(tokens, dim=1).tolist()
    return [_until(row, end_tokens) for row in rows]


def _pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack prompts to ids and padding mask [B, S]."""
    length = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), length, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, length - len(prompt) :] = prompt
        attention_mask[row, length - len(prompt) :] = 1
    return input_ids, attention_mask


def _positions(attention_mask: Tensor) -> Tensor:
    """Positions [B, S] counted from each row's first real token."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def _end_tokens(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set(end) if isinstance(end, list) else {end} - {None}


def _until(row: list[int], end_tokens: set[int]) -> list[int]:
    """Cut a row before its first end-of-turn token."""
    end = next((place for place, token in enumerate(row) if token in end_tokens), len(row))
    return row[:end]


def _count_bytes(cache: Any, row: int) -> CacheBytes:
    """What one row's tokens use."""
    cache.batch_select_indices(torch.tensor([row]))
    memory = cache.memory()
    return CacheBytes(
        num_tokens=int(cache.layers[0].rows.lengths[0]),
        key_dense=memory.dense_keys,
        key_pruned=memory.keys.used,
        value_dense=memory.dense_values,
        value_pruned=memory.values.used,
    )
