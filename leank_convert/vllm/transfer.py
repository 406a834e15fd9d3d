"""NIXL's connector, with the first token of an answer handed over beside the pages of its prompt.

vLLM has the engine that answers read a prompt's last token again, which attends to the whole prompt. With the
next token known nothing has to: kept pages move, and of the window's those of the sink and the recent tokens.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector

from leank_convert.vllm.cache import HANDED_OVER, LeanKWindowSpec
from leank_convert.vllm.configs import FIRST_TOKEN
from leank_convert.vllm.first_token import KEY, given_token

_PROMPT = "prompt_digest"


class NixlConnector(connector.NixlConnector):
    """Moves what the answer sees; all pages where the first token is to be found anew."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        model = vllm_config.model_config
        has_window = any(
            isinstance(group.kv_cache_spec, LeanKWindowSpec) for group in kv_cache_config.kv_cache_groups
        )
        takes_over = has_window and FIRST_TOKEN in (model.logits_processors or ())
        self._num_tokens = model.get_vocab_size() if takes_over else 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Count the tokens of a prompt that the other engine read: none of another prompt's."""
        params = request.kv_transfer_params or {}
        told = params.pop(_PROMPT, None)
        if told is not None and told != _digest(request):
            params["do_remote_prefill"] = False
            params.pop(KEY, None)
        count, is_later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        token = given_token(request.sampling_params) if count else None
        if token is not None and 0 <= token < self._num_tokens:
            HANDED_OVER.add(request.request_id)
        return count, is_later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Ask for the pages that have a place here."""
        params = request.kv_transfer_params
        if request.request_id in HANDED_OVER and params.get("remote_block_ids"):
            params["remote_block_ids"] = [
                [page for page, own in zip(pages, held, strict=False) if not own.is_null]
                for pages, held in zip(params["remote_block_ids"], blocks.blocks, strict=False)
            ]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand over the first token with the numbers of the pages."""
        is_held, params = super().request_finished_all_groups(request, block_ids)
        if is_held and params is not None and request.output_token_ids:
            params.update({KEY: request.output_token_ids[0], _PROMPT: _digest(request)})
        return is_held, params


def _digest(request: Any) -> int:
    """Tell a prompt from others, with which a client may have sent its pages."""
    return zlib.crc32(array("q", request.prompt_token_ids or ()))
