"""vLLM cache specs of both groups of pages, and the manager of the window's pages.

Importing this module registers them: a spec that comes from another process brings its manager along, so the
engine core knows both without the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.rule import pruned_tokens_of

HANDED_OVER: set[str] = set()
"""Requests whose prompt another engine read, and whose first token it found; the connector adds them.

Nothing attends to the whole of such a prompt here, so pages that no later token sees do not move.
"""


@dataclass(frozen=True, kw_only=True)
class LeanKKeptSpec(FullAttentionSpec):
    """Kept channels of K and V, of every token."""


# Not a FullAttentionSpec: vLLM groups specs by the class that they are instances of.
@dataclass(frozen=True, kw_only=True)
class LeanKWindowSpec(AttentionSpec):
    """Dropped channels of K and V, of whole tokens."""

    sizes: Windows  # of the window
    # Whether another engine answers, which may have to read a prompt's last token again, and that attends to
    # the whole prompt.
    is_handed_over: bool = False

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of one request: a prompt attends densely to itself, so until it is read it is whole."""
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all of them are windows of the same sizes."""
        return all(
            isinstance(spec, LeanKWindowSpec) and spec.sizes == self.sizes for spec in kv_cache_specs.values()
        )


class LeanKWindowManager(SingleTypeKVCacheManager):
    """Gives back pages between sink and recent tokens once decoding has begun.

    A page that was given back keeps its hash until it is used again. A prompt attends densely to itself, so a
    hit of the prefix cache needs the window's pages of the whole prefix: where some are gone the hit is
    shorter, what is computed is the same.
    """

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the pages that no query behind the processed tokens sees.

        Raises:
            ValueError: If a prompt grew after pages were given back, which its new part needs.
        """
        assert num_prompt_tokens is not None
        held = self.req_to_blocks.get(request_id, ())
        unseen = self._unseen(processed_computed_tokens + 1, num_prompt_tokens)
        is_read = processed_computed_tokens >= num_prompt_tokens - (request_id in HANDED_OVER)
        if not is_read and len(held) > unseen.start and held[unseen.start].is_null:
            raise ValueError(
                f"request {request_id}: a LeanK cache cannot read more of a prompt once it was answered: "
                "send the whole of it as a new request, not as streamed input"
            )
        if not self._spec.is_handed_over:
            self._remove_blocks_in_range(request_id, unseen.start, unseen.stop)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        *given: Any,
        **options: Any,
    ) -> int:
        """Count the pages that a request needs, without those that do not move."""
        count: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *given, **options
        )
        if request_id in HANDED_OVER and request_id not in self.req_to_blocks:
            unseen = self._unseen_from_another(total_computed_tokens)
            count -= len(unseen[max(len(new_computed_blocks) - unseen.start, 0) :])
        return count

    def allocate_external_computed_blocks(
        self, request_id: str, num_local: int, num_external: int, *given: Any, **options: Any
    ) -> None:
        """Take pages for tokens that another engine read, but for those that do not move."""
        if request_id in HANDED_OVER:
            unseen, held = self._unseen_from_another(num_local + num_external), self.req_to_blocks[request_id]
            self._remove_blocks_in_range(request_id, unseen.start, unseen.stop)  # found in the prefix cache
            if unseen:
                held += self.block_pool.get_new_blocks(max(unseen.start - len(held), 0))
                held += [self._null_block] * (unseen.stop - len(held))
        super().allocate_external_computed_blocks(request_id, num_local, num_external, *given, **options)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request: if it comes again it is read here."""
        HANDED_OVER.discard(request_id)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks

    @property
    def _spec(self) -> LeanKWindowSpec:
        assert isinstance(self.kv_cache_spec, LeanKWindowSpec)
        return self.kv_cache_spec

    def _unseen(self, seen: int, prompt: int) -> range:
        """Pages whose dropped channels a query that sees so many tokens does without."""
        sink = self._spec.sizes.sink_size
        pruned = pruned_tokens_of(seen, prompt, self._spec.sizes)
        return range(cdiv(sink, self.block_size), (sink + pruned) // self.block_size)

    def _unseen_from_another(self, num_tokens: int) -> range:
        """The same of a prompt's last token, which is read as if it were the answer's."""
        return self._unseen(num_tokens, num_tokens - 1)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """Find the longest prefix of which all pages are there."""
        assert dcp_world_size == pcp_world_size == 1  # refused before
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        found: list[list[Any]] = []
        for index in range(max_length // size):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                break
            found.append(cached)
        if drop_eagle_block and found:  # its tokens are read again, whose hidden states drafts are made of
            found.pop()
        while len(found) * size % alignment_tokens:
            found.pop()
        columns = tuple([cached[group] for cached in found] for group in range(len(kv_cache_group_ids)))
        return columns, len(found) * size


# The registry fills itself with vLLM's own only while it is empty.
KVCacheSpecRegistry._ensure_registered()
# Layers of a model that drafts are in the kept pages' group: vLLM may read them by the first group's table.
KVCacheSpecRegistry.register(LeanKKeptSpec, FullAttentionManager, uniform_type_base_spec=FullAttentionSpec)
KVCacheSpecRegistry.register(LeanKWindowSpec, LeanKWindowManager, uniform_type_base_spec=LeanKWindowSpec)
