"""The first token of an answer, where the engine that read the prompt found it.

vLLM's two model runners have interfaces of their own for what changes logits. One class serves both, as which
of them runs is settled after it is named.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotLogitsProcessor

KEY = "first_token"
"""Its name among the `kv_transfer_params` of a request."""


def given_token(params: SamplingParams) -> int | None:
    """Return the token that the other engine found; None where this one has to find it.

    It has to where log-probabilities are asked for, which did not come along.
    """
    given = (params.extra_args or {}).get("kv_transfer_params") or {}
    is_asked = params.logprobs is not None or params.prompt_logprobs is not None
    token = given.get(KEY) if given.get("remote_block_ids") and not is_asked else None
    return token if type(token) is int else None


class FirstToken(LogitsProcessor, SlotLogitsProcessor):
    """Lets no other token than the given one begin an answer."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Have each of several answers to one prompt begin with a token of its own."""
        given = (sampling_params.extra_args or {}).get("kv_transfer_params")
        if sampling_params.n > 1 and isinstance(given, dict):
            given.pop(KEY, None)

    def __init__(self, vllm_config: Any, state_or_device: Any, *_: Any) -> None:
        self._state = state_or_device  # of slots; a device where requests have rows
        self._rows: dict[int, tuple[int, list[int]]] = {}  # its token and what was answered, of each row
        self._slots: dict[int, int] = {}  # its token, of each slot

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests from row to row, until they have a token."""
        process_dict_updates(self._rows, batch_update, _begin)
        self._rows = {row: own for row, own in self._rows.items() if not own[1]}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note the token of a slot, and return whether there is one."""
        token = given_token(sampling_params)
        self._slots.pop(req_idx, None)
        if token is not None:
            self._slots[req_idx] = token
        return token is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Change logits `[rows, vocab_size]` in place; `ctx` says which slots they are of."""
        found = {row: token for row, (token, _) in self._rows.items()}
        if ctx is not None:
            prompts, seen = self._state.prompt_len.np, ctx.seq_lens_upper_bound_np
            found = {
                row: self._slots[slot]
                for row, slot in enumerate(ctx.idx_mapping_np.tolist())
                if slot in self._slots and seen[row] == prompts[slot]
            }
        for row, token in found.items():
            if 0 <= token < logits.shape[1]:
                logits[row] = -torch.inf
                logits[row, token] = 0
        return logits


def _begin(params: SamplingParams, _: Any, answer: list[int]) -> tuple[int, list[int]] | None:
    token = given_token(params)
    return None if token is None else (token, answer)
