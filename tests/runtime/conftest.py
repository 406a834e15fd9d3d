"""Models built in memory, and DESIGN's decoding rule stated a second time, slowly and without a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from leank_convert._runtime.configuration_leank import CACHE
from runtime import (
    configuration_leank,
    graph_leank,
    layer_leank,
    model_state_leank,
    modeling_leank,
    pages_leank,
)
from tests.runtime.stand_ins import PlainKernels, RecordedGraph
from tests.runtime.tiny_inputs import WIDTHS

VOCAB = 64
HIDDEN, PRUNED, WHOLE = 0, 1, 2


@dataclass
class ModelPair:
    """A LeanK model and the stock dense model with the same weights, eval mode."""

    leank: Any
    dense: Any
    masks: torch.Tensor  # bool [L, H_kv, D]

    @cached_property
    def exact(self) -> Any:
        """The dense model in float64, with the slow re-statement as its attention."""
        exact = copy.deepcopy(self.dense).double()
        exact.set_attn_implementation("slow_leank_restatement")
        return exact

    @property
    def sizes(self) -> tuple[int, int, int]:
        block = self.leank.config.leank
        return block["sink_size"], block["recent_size"], block["flush_size"]


def packed(masks: torch.Tensor) -> list[str]:
    """Masks `[L, H_kv, D]` as a `leank` block has them."""
    return [np.packbits(mask.numpy(), axis=-1).tobytes().hex() for mask in masks]


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
    num_pruned, num_kv_heads, head_dim = masks.shape
    kinds = config.get("layer_types", ["full_attention"] * num_pruned)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": num_kv_heads * groups * 8,
        "intermediate_size": 40,
        "num_hidden_layers": len(kinds),
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
    if family in (
        "Qwen2",
        "Phi3",
        "SmolLM3",
        "Granite",
        "Olmo2",
        "Olmo3",
    ):  # whose config leaves head_dim out
        sizes["hidden_size"] = num_kv_heads * groups * head_dim
    sizes.update(config)
    block = {
        "format_version": 1,
        "widths": masks.sum(-1).tolist(),
        "channel_masks": packed(masks),
        "head_permutation": [list(range(num_kv_heads))] * num_pruned,
        "sink_size": sink,
        "recent_size": recent,
        "flush_size": flush,
        "prune": prune,
    }
    if "layer_types" in config:
        block["layers"] = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    torch.manual_seed(seed)
    dense_class = getattr(transformers, f"{family}ForCausalLM")
    dense = dense_class(dense_class.config_class(**sizes)).eval()
    leank_config = configuration_leank.config_class_of(dense_class.config_class)(**sizes, leank=block)
    leank = getattr(modeling_leank, f"LeanK{family}ForCausalLM")(leank_config).eval()
    leank.load_state_dict(dense.state_dict())
    if hasattr(leank_config, "num_experts_per_tok"):  # torch has no fused product of experts in float64
        for model in (dense, leank):
            model.set_experts_implementation("eager")
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


@pytest.fixture
def model(model_pair: Callable[..., ModelPair], some_masks: Callable[..., torch.Tensor]) -> Any:
    """Of two layers, whose heads keep as many channels as `WIDTHS` says."""
    return model_pair(some_masks(WIDTHS)).leank


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of four tokens."""
    monkeypatch.setattr(pages_leank, "PAGE", 4)


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
    """Attend over a whole row `[1, heads, n, D]`, pruned pairs by their kept channels alone, head by head.

    A layer with a sliding window sees the last tokens within it, whatever the others do.
    """
    full = [i for i, kind in enumerate(kwargs["layer_types"]) if kind == "full_attention"]
    view, window = kwargs["view"], kwargs.get("sliding_window")
    if module.layer_idx in full:
        masks = kwargs["masks"][full.index(module.layer_idx)]
    else:
        age = torch.arange(len(view))[:, None] - torch.arange(len(view))
        view = torch.where((age >= 0) & (age < window), WHOLE, HIDDEN)
        masks = torch.ones_like(kwargs["masks"][0])
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        q, k, v = query[0, head], key[0, head // groups], value[0, head // groups]
        kept = masks[head // groups]
        logits = torch.where(view == WHOLE, q @ k.T, (q * kept) @ k.T) * kwargs["scaling"]
        if not kept.any():
            logits = logits.masked_fill(view == PRUNED, -torch.inf)
        logits = logits.masked_fill(view == HIDDEN, -torch.inf)
        if kwargs.get("s_aux") is not None:  # takes its share, and adds nothing
            beside = kwargs["s_aux"][head].expand(len(logits), 1)
            logits, v = torch.cat([logits, beside], -1), torch.cat([v, torch.zeros_like(v[:1])])
        outputs.append(logits.softmax(-1) @ v)
    return torch.stack(outputs, dim=1)[None], None


AttentionInterface.register("slow_leank_restatement", slow_attention)


@pytest.fixture
def slow_logits() -> Callable[..., torch.Tensor]:
    """Logits of an unpadded row `[n, vocab]` in float64, fed in turns: `slow_logits(pair, ids, turns)`."""

    def compute(pair: ModelPair, ids: torch.Tensor, turns: Sequence[int], masks: Any = None) -> torch.Tensor:
        view = view_of_every_token(turns, *pair.sizes)
        masks = pair.masks if masks is None else masks
        kinds = getattr(pair.dense.config, "layer_types", None) or ["full_attention"] * len(masks)
        with torch.no_grad():
            output = pair.exact(ids[None], use_cache=False, view=view, masks=masks, layer_types=kinds)
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
                    ids, attention_mask=padded, position_ids=positions, use_cache=True, **{CACHE: cache}
                )
            cache = output[CACHE]
            for b in range(len(rows)):
                logits[b].append(output.logits[b][new_mask[b].bool()])
        return [torch.cat(parts) for parts in logits], cache

    return feed


def torchs_error(model: Any) -> float:
    """The error that plain torch makes in a model's dtype: its logits without a cache, against float64."""
    ids = torch.randint(3, VOCAB, (4, 64), generator=torch.Generator().manual_seed(7))
    exact, ids = copy.deepcopy(model).double(), ids.to(model.device)
    exact.set_experts_implementation("eager")  # the grouped product knows no float64
    with torch.no_grad():
        ours, expected = (each(ids, use_cache=False)[0] for each in (model, exact))
    return relative_error(ours, expected)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return float((ours.detach() - expected).abs().max() / expected.abs().max())


@pytest.fixture
def assert_close() -> Callable[[Any, torch.Tensor, torch.Tensor], None]:
    """Hold logits of a model to exact ones: at most twice the error that torch makes in that dtype."""
    errors: dict[int, float] = {}

    def check(model: Any, ours: torch.Tensor, expected: torch.Tensor) -> None:
        assert ours.shape == expected.shape
        if id(model) not in errors:
            errors[id(model)] = torchs_error(model)
        error = relative_error(ours, expected)
        limit = 2 * errors[id(model)]
        assert error <= limit, f"relative error {error:.2e}, twice torch's is {limit:.2e}"

    return check


@pytest.fixture
def graphs(monkeypatch):
    """Capture on the CPU; the returned list holds exceptions that the next captures end with."""
    failures: list[BaseException] = []
    monkeypatch.setattr(RecordedGraph, "failures", failures, raising=False)
    for module in (graph_leank, model_state_leank):
        monkeypatch.setattr(module, "StepGraph", RecordedGraph)
    monkeypatch.setattr(
        layer_leank, "find_kernels", lambda device, dtype, **shape: PlainKernels(**shape), raising=True
    )
    return failures
