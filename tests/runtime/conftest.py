"""Models built in memory, and DESIGN's decoding rule stated a second time, slowly and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from runtime import configuration_leank, modeling_leank

VOCAB = 64
HIDDEN, PRUNED, WHOLE = 0, 1, 2


@dataclass
class ModelPair:
    """A LeanK model and the stock dense model with the same weights, eval mode."""

    leank: Any
    dense: Any
    masks: torch.Tensor  # bool [L, H_kv, D]

    @property
    def sizes(self) -> tuple[int, int, int]:
        block = self.leank.config.leank
        return block["sink_size"], block["recent_size"], block["flush_size"]


def build_pair(
    masks: torch.Tensor,
    family: str = "Llama",
    groups: int = 2,
    sink: int = 3,
    recent: int = 6,
    flush: int = 4,
    prune: str = "eager",
    seed: int = 0,
    **config: Any,
) -> ModelPair:
    num_layers, num_kv_heads, head_dim = masks.shape
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": num_kv_heads * groups * 8,
        "intermediate_size": 40,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads * groups,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        # Large weights make attention sharp, so that a wrong logit shows.
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "Mistral":
        sizes["sliding_window"] = None
    if family == "Qwen2":
        sizes["hidden_size"] = num_kv_heads * groups * head_dim
    sizes.update(config)
    block = {
        "format_version": 1,
        "widths": masks.sum(-1).tolist(),
        "head_permutation": [list(range(num_kv_heads))] * num_layers,
        "sink_size": sink,
        "recent_size": recent,
        "flush_size": flush,
        "prune": prune,
    }
    torch.manual_seed(seed)
    dense_config = getattr(transformers, f"{family}Config")(**sizes)
    dense = getattr(transformers, f"{family}ForCausalLM")(dense_config).eval()
    leank_config = getattr(configuration_leank, f"LeanK{family}Config")(**sizes, leank=block)
    leank = getattr(modeling_leank, f"LeanK{family}ForCausalLM")(leank_config).eval()
    state = {f"model.layers.{i}.self_attn.channel_mask": mask for i, mask in enumerate(masks)}
    leank.load_state_dict(dense.state_dict() | state)
    return ModelPair(leank, dense, masks)


@pytest.fixture
def model_pair() -> Callable[..., ModelPair]:
    return build_pair


@pytest.fixture
def some_masks() -> Callable[..., torch.Tensor]:
    """Random masks: `some_masks([[0, 5, 16], …])` keeps so many channels per head."""

    def make(widths: Sequence[Sequence[int]], head_dim: int = 16, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.zeros(len(widths), len(widths[0]), head_dim, dtype=torch.bool)
        for layer, row in enumerate(widths):
            for head, width in enumerate(row):
                mask[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
        return mask

    return make


def view_of_every_token(
    turns: Sequence[int], sink_size: int, recent_size: int, flush_size: int
) -> torch.Tensor:
    """How each token of a row sees each other one, by moving tokens between three Python lists.

    Args:
        turns: Tokens fed by each forward pass; the first one is the prompt.
        sink_size, recent_size, flush_size: Window sizes.

    Returns:
        HIDDEN, PRUNED or WHOLE `[n, n]`, query by key.
    """
    total = sum(turns)
    view = torch.full((total, total), HIDDEN)
    sink: list[int] = []
    pruned: list[int] = []
    recent: list[int] = []

    def append(token: int) -> None:
        if len(sink) < sink_size:
            sink.append(token)
            return
        if len(recent) == recent_size + flush_size:
            for _ in range(flush_size):
                pruned.append(recent.pop(0))
        recent.append(token)

    def look(query: int, others: Sequence[int] = ()) -> None:
        view[query, pruned] = PRUNED
        view[query, [*sink, *recent, *others]] = WHOLE

    token = 0
    for count in turns:
        new = list(range(token, token + count))
        token += count
        if not new:
            continue
        if new[0] == 0:
            for query in new:
                look(query, new[: query + 1])
            sink = new[:sink_size]
            rest = new[sink_size:]
            num_recent = min(len(rest), recent_size)
            pruned = rest[: len(rest) - num_recent]
            recent = rest[len(rest) - num_recent :]
        elif count == 1:
            append(new[0])
            look(new[0])
        else:
            for position, query in enumerate(new):
                look(query, new[: position + 1])
            for query in new:
                append(query)
    return view


def slow_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend over a whole row `[1, heads, n, D]`, pruned pairs by their kept channels alone, head by head."""
    view, masks = kwargs["view"], kwargs["masks"][module.layer_idx]
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        q, k, v = query[0, head].double(), key[0, head // groups].double(), value[0, head // groups].double()
        kept = masks[head // groups]
        logits = torch.where(view == WHOLE, q @ k.T, (q * kept) @ k.T) * kwargs["scaling"]
        if not kept.any():
            logits = logits.masked_fill(view == PRUNED, -torch.inf)
        logits = logits.masked_fill(view == HIDDEN, -torch.inf)
        outputs.append((logits.softmax(-1) @ v).to(query.dtype))
    return torch.stack(outputs, dim=1)[None], None


AttentionInterface.register("slow_leank_restatement", slow_attention)


@pytest.fixture
def slow_logits() -> Callable[..., torch.Tensor]:
    """Logits of one unpadded row `[n, vocab]`, fed in the given turns: `slow_logits(pair, ids, turns)`."""

    def compute(pair: ModelPair, ids: torch.Tensor, turns: Sequence[int], masks: Any = None) -> torch.Tensor:
        view = view_of_every_token(turns, *pair.sizes)
        pair.dense.set_attn_implementation("slow_leank_restatement")
        try:
            with torch.no_grad():
                output = pair.dense(
                    ids[None], use_cache=False, view=view, masks=pair.masks if masks is None else masks
                )
        finally:
            pair.dense.set_attn_implementation("sdpa")
        return output.logits[0]

    return compute


@pytest.fixture
def fed_logits() -> Callable[..., tuple[list[torch.Tensor], Any]]:
    """Feed rows to a LeanK model turn by turn, padded; logits of each row's real tokens, and the cache."""

    def feed(
        model: Any,
        rows: Sequence[torch.Tensor],
        turns: Sequence[Sequence[int]],
        side: str = "left",
        cache: Any = None,
    ) -> tuple[list[torch.Tensor], Any]:
        """`turns[t][b]` tokens of row b are fed in pass t."""
        done = [0] * len(rows)
        mask = torch.zeros(len(rows), 0, dtype=torch.long)
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        for counts in turns:
            width = max(counts)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            new_mask = torch.zeros_like(ids)
            for b, count in enumerate(counts):
                columns = slice(width - count, width) if side == "left" else slice(0, count)
                ids[b, columns] = rows[b][done[b] : done[b] + count]
                new_mask[b, columns] = 1
                done[b] += count
            mask = torch.cat([mask, new_mask], dim=1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
            padded = None if bool(mask.all()) else mask
            with torch.no_grad():
                output = model(
                    ids, attention_mask=padded, position_ids=positions, past_key_values=cache, use_cache=True
                )
            cache = output.past_key_values
            for b in range(len(rows)):
                logits[b].append(output.logits[b][new_mask[b].bool()])
        return [torch.cat(parts) for parts in logits], cache

    return feed


@pytest.fixture
def assert_close_logits() -> Callable[[torch.Tensor, torch.Tensor], None]:
    def check(ours: torch.Tensor, expected: torch.Tensor) -> None:
        assert ours.shape == expected.shape
        error = (ours - expected).abs().max() / expected.abs().max()
        assert error < 2e-5, f"relative error {error:.2e}"

    return check
