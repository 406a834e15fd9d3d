"""Refusals of vLLM options that a LeanK checkpoint cannot be served with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from leank_convert._runtime.kernel_key_leank import MAX_DRAFT
from leank_convert.families import LEANK_PREFIX
from leank_convert.vllm import FP8_NAMES
from leank_convert.vllm.configs import CONFIG_CLASSES, version_of
from leank_convert.vllm.pages import STEP

# Drafts of no model, and of one that has a cache of its own.
_DRAFTS = ("ngram", "ngram_gpu", "suffix")
_MODEL_DRAFTS = ("draft_model", "eagle", "eagle3", "mtp")
# Files of a model's state, which holds parameters alone.
_STATES = ("sharded_state", "runai_streamer_sharded")
# Families that vLLM refuses in float16, by names that a checkpoint's is not among.
_OVERFLOWING = ("gemma3_text", "glm4")
# What the kernels are written in; vLLM asks for an older one, and does without for these models.
_TILELANG = (0, 1, 15)


def check_options(vllm_config: Any) -> None:
    """Raise ValueError unless a LeanK cache can be kept with the options of an engine's `VllmConfig`."""
    for message in _problems(vllm_config):
        raise ValueError(f"a LeanK checkpoint cannot be served so: {message}")


def has_drafter(vllm_config: Any) -> bool:
    """Whether drafts come from a model with a cache of its own."""
    drafts = vllm_config.speculative_config
    return drafts is not None and drafts.method in _MODEL_DRAFTS


def choose_cache_dtype(vllm_config: Any) -> str:
    """Return the dtype of pages as vLLM names it: with `auto` the checkpoint's own, if it says one."""
    asked: str = vllm_config.cache_config.cache_dtype
    own: str | None = (vllm_config.model_config.hf_config.leank or {}).get("kv_dtype")
    return own or asked if asked == "auto" else asked


def _problems(vllm_config: Any) -> Iterator[str]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", *FP8_NAMES):
        yield f"--kv-cache-dtype {cache.cache_dtype}: channels are stored as they come, or in `fp8` (e4m3)"
    block = vllm_config.model_config.hf_config.leank or {}
    wanted = choose_cache_dtype(vllm_config)
    # Of the dtypes that pages may have, the model's: kernels serve no other.
    plain = "float16" if str(vllm_config.model_config.dtype) == "torch.float16" else "bfloat16"
    if wanted == "int4":
        yield (
            "this checkpoint's cache is int4, which `generate` alone decodes from: add --kv-cache-dtype "
            f"{plain}, or export it with `--kv-dtype fp8`"
        )
    if wanted in FP8_NAMES and block.get("kv_scales") is None:
        yield (
            f"a cache in {wanted} needs measured scales, as requests share pages, and this checkpoint has "
            f"none: make it with `leank-convert export --kv-dtype fp8`, or add --kv-cache-dtype {plain}"
        )
    if "layers" in block and wanted in FP8_NAMES:
        yield (
            f"a cache in {wanted} beside layers that are not pruned, for which there are no scales: add "
            f"--kv-cache-dtype {plain}"
        )
    if (stages := parallel.pipeline_parallel_size) > 1 and ("layers" in block or has_drafter(vllm_config)):
        why = "a stage may have no layer that is pruned"
        if has_drafter(vllm_config):
            why = "only the last stage has the model that drafts, so its pages would lie otherwise"
        yield f"--pipeline-parallel-size {stages}: {why}; use --tensor-parallel-size instead"
    load_format = vllm_config.load_config.load_format
    if load_format in _STATES and (wanted in FP8_NAMES or {"key_mean", "value_basis"} & block.keys()):
        yield (
            f"--load-format {load_format}: such files lack the mean of keys, the basis of V and scales of a "
            "cache in FP8; serve the checkpoint itself"
        )
    if vllm_config.model_config.model_weights and {"key_mean", "value_basis"} & block.keys():
        yield (
            f"model {vllm_config.model_config.model_weights}: vLLM fetches no mean of keys and no basis of V "
            "from object storage; download the checkpoint, and name its folder"
        )
    if cache.kv_cache_dtype_skip_layers:
        yield "--kv-cache-dtype-skip-layers: a page holds all layers, in one dtype; leave it out"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill: no layer's keys are another's; leave it out"
    if cache.user_specified_block_size and cache.block_size % STEP:
        yield f"--block-size {cache.block_size}: pages are of a multiple of {STEP} tokens"
    # Before the next, which vLLM asks for itself with some connectors.
    if vllm_config.kv_transfer_config is not None:
        if "layers" in block:
            yield "--kv-transfer-config beside layers not pruned: NIXL cannot cut padded pages; leave it out"
        yield from _problems_of_transfer(vllm_config)
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield "--disable-hybrid-kv-cache-manager: a LeanK cache is two groups; leave it out"
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, option)) > 1:
            yield f"--{option.replace('_', '-')} {size}: use --tensor-parallel-size instead"
    if parallel.use_ubatching:
        yield "--enable-dbo, or --ubatch-size: halves of a batch are not told their prompts' lengths"
    if vllm_config.weight_transfer_config is not None:
        yield "--weight-transfer-config: the original's heads are in another order; export what was trained"
    attention = vllm_config.attention_config
    if attention.backend is not None:
        yield f"--attention-backend {attention.backend.name} reads another cache; leave it out"
    if (own := attention.backend_per_kind.get("full_attention")) is not None:
        yield f"--attention-config backend_per_kind full_attention={own.name}: another cache; leave it out"
    if vllm_config.structured_outputs_config.reasoning_parser == "openai_gptoss":
        yield "--reasoning-parser openai_gptoss: it stops at `model_type` leank_gpt_oss; leave it out"
    drafts = vllm_config.speculative_config
    kinds = getattr(vllm_config.model_config.hf_config, "layer_types", None) or ()
    if drafts is not None and "linear_attention" in kinds:
        yield "drafts beside linear attention were never run with a LeanK cache: leave them out"
    if drafts is not None and drafts.num_speculative_tokens >= MAX_DRAFT:
        yield f"{drafts.num_speculative_tokens} draft tokens: decode kernels take {MAX_DRAFT - 1} at most"
    if drafts is not None and drafts.method == "draft_model":
        if "layers" in block:
            yield (
                "speculative method `draft_model` beside layers that are not pruned: vLLM would read the "
                "draft's pages by another group's table; take a head (method `eagle3`)"
            )
        if isinstance(drafts.draft_model_config.hf_config, CONFIG_CLASSES):
            yield f"speculative model `{drafts.model}`: what drafts keeps a dense cache; name the original"
    if drafts is not None and drafts.method not in (*_DRAFTS, *_MODEL_DRAFTS):
        yield (
            f"speculative method `{drafts.method}`: it was never run with a LeanK cache; served are "
            f"{', '.join((*_DRAFTS, *_MODEL_DRAFTS))}"
        )
    family = str(getattr(vllm_config.model_config.hf_config, "model_type", ""))
    if family.removeprefix(LEANK_PREFIX) in _OVERFLOWING and plain == "float16":
        yield "--dtype float16: models of this family overflow in it; add --dtype bfloat16"
    found = version_of("tilelang")
    numbers = tuple(map(int, re.findall(r"\d+", found or "")[:3]))
    if vllm_config.device_config.device_type == "cuda" and found and numbers < _TILELANG:
        yield f'tilelang {found} cannot compile the kernels: pip install --no-deps "tilelang==0.1.15"'
    if vllm_config.model_config.attention_chunk_size is not None:
        yield "`attention_chunk_size` in config.json: only full attention can be pruned"


def _problems_of_transfer(vllm_config: Any) -> Iterator[str]:
    transfer, ranks = vllm_config.kv_transfer_config, vllm_config.parallel_config.world_size
    if transfer.kv_connector != "NixlConnector":
        yield (
            f"--kv-transfer-config with `{transfer.kv_connector}`, or --kv-offloading-size: of connectors "
            "NixlConnector alone is known to move pages of two groups"
        )
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        yield (
            f"--kv-transfer-config: `kv_role` is {transfer.kv_role}, and what reads prompts gives no pages "
            "back: name kv_producer there, and kv_consumer on the other side"
        )
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        yield "--kv-transfer-config: `bidirectional_kv_xfer`: pages of what was answered are not whole"
    if ranks > 1:
        yield f"--kv-transfer-config with {ranks} ranks: the other side may deal heads to ranks otherwise"
    if has_drafter(vllm_config):
        yield "--kv-transfer-config with drafts of a model: it was never run; take n-grams (method `ngram`)"
