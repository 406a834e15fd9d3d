"""`generate` of a LeanK model: the stock class's, from a LeanK cache, less what such a cache cannot do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig

from .cache_leank import LeanKCache
from .configuration_leank import CACHE, KV_DTYPES
from .windows_leank import PRUNE_MODES, check_choice

# `dynamic_full` is what older releases of transformers ask of a drafting model; the hybrid ones stand in
# Gemma's generation config, for the cache of the model's own kinds of layers.
_OWN_CACHE = (None, "dynamic", "dynamic_full", "hybrid", "hybrid_chunked")
# With these the first pass is the prompt and drafted tokens, or a part of the prompt, or may be.
_DRAFTING = ("assistant_model", "prompt_lookup_num_tokens")
_SPLITTING = (*_DRAFTING, "prefill_chunk_size", "custom_generate")
# `prune` and `kv_dtype` of a `generate` call, for what it runs without its cache: Phi-3 begins with a new one
# where its rope changes, guidance reads a second prompt.
KIND: ContextVar[tuple[str | None, str | None]] = ContextVar("KIND", default=(None, None))


class GenerateMixin:
    """What a LeanK model with a head adds to `generate`."""

    build_cache: Callable[..., LeanKCache]
    _checked_cache: Callable[..., LeanKCache]

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        prune: str | None = None,
        kv_dtype: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as the stock class does, from a LeanK cache.

        `prune` and `kv_dtype` (`auto`, `fp8`, `int4`) are as for `build_cache`. By default a `cache` that is
        given and holds tokens keeps its own; else they are the generation config's fields of these names,
        else the config's. Raises a ValueError if another kind of cache or a draft by early exit is asked for.
        """
        configs = (generation_config, self.generation_config)  # type: ignore[attr-defined]
        for option, drafter in (
            ("assistant_early_exit", "a model of fewer layers"),
            ("use_mtp", "a model's own extra layers"),
        ):
            if _first_given(kwargs, configs, option) not in (None, False):
                raise ValueError(
                    f"{option}: {drafter} cannot draft on a LeanK cache; draft with `assistant_model` or "
                    "`prompt_lookup_num_tokens`"
                )
        implementation = _first_given(kwargs, configs, "cache_implementation")
        if implementation not in _OWN_CACHE:
            raise ValueError(
                f"cache_implementation {implementation!r} is a dense cache; a LeanK model decodes from its "
                "own, so leave it out, also in generation_config.json"
            )
        given = {"prune": prune, "kv_dtype": kv_dtype}
        defaults = {name: _first_given({}, configs, name) for name in given}
        for name, choices in (("prune", PRUNE_MODES), ("kv_dtype", KV_DTYPES)):
            for value in (given[name], defaults[name]):
                if value is not None:
                    check_choice(value, choices, f"`{name}`")
        cache, earlier_name = kwargs.pop("cache", None), kwargs.pop("past_key_values", None)
        cache = earlier_name if cache is None else cache
        if _first_given(kwargs, configs, "use_cache") is False:
            # Training leaves it in the model's own config; for embeddings transformers takes a cache anyway.
            is_asked = kwargs.get("use_cache") is False or configs[1].use_cache is not False
            if is_asked and cache is None and kwargs.get("inputs_embeds") is None:
                return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]
            kwargs["use_cache"] = True
        # transformers takes a cache or the name of one.
        if getattr(generation_config, "cache_implementation", None) is not None:
            generation_config = copy.copy(generation_config)
            generation_config.cache_implementation = None  # type: ignore[union-attr]
        if kwargs.pop("cache_implementation", None) or configs[1].cache_implementation:
            kwargs["cache_implementation"] = None
        is_assistant = _first_given(kwargs, configs, "is_assistant")
        if cache is None:
            chosen = {name: defaults[name] if value is None else value for name, value in given.items()}
            cache = self.build_cache(**chosen)
            record: Any = getattr(cache, "activate_past_recording", None)
            if is_assistant and record is not None:
                record()  # as transformers does with a cache of its own
        else:
            self._checked_cache(cache, is_filled=True)
            if held := cache.get_seq_length():
                _check_goes_on(held, _prompt_columns(inputs, kwargs), kwargs, configs)
            for name, value in given.items():
                if value is not None:
                    setattr(cache, name, value)
                elif defaults[name] is not None and not cache.get_seq_length():
                    setattr(cache, name, defaults[name])
        splits = args or any(_first_given(kwargs, configs, name) for name in _SPLITTING)
        # PEFT takes this method's place, and puts virtual tokens in front of the prompt there.
        owner = getattr(self.prepare_inputs_for_generation, "__self__", None)  # type: ignore[attr-defined]
        if splits and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "drafts and chunks need to know where the prompt ends, and prompt tuning adds tokens to it; "
                f"leave {', '.join(_SPLITTING)} out"
            )
        columns = _prompt_columns(inputs, kwargs)
        asked = KIND.set((cache.prune, cache.kv_dtype))
        try:
            cache.rows.begins_turn = True
            # Elsewhere all columns of the first pass are the prompt's, virtual tokens too.
            if splits or cache.get_seq_length():
                cache.prefill_length = columns
            if columns:
                num_columns = _columns_to_reserve(columns, kwargs, configs)
                if num_columns is not None:
                    cache.reserve(max(num_columns, cache.rows.num_reserved))
            return super().generate(  # type: ignore[misc]
                inputs, generation_config, *args, **kwargs, **{CACHE: cache}
            )
        finally:
            KIND.reset(asked)
            cache.prefill_length, cache.rows.begins_turn = None, False
            for layer in cache.other_layers.values():
                if hasattr(layer, "record_past"):  # which assisted decoding leaves on
                    layer.record_past = bool(is_assistant)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a ValueError: continuous batching has a paged cache of its own, which is dense."""
        raise ValueError(
            "continuous batching keeps a dense paged cache and is not supported by a LeanK model; call "
            "`generate`, or serve without continuous batching"
        )


def _first_given(kwargs: dict[str, Any], configs: tuple[GenerationConfig | None, ...], name: str) -> Any:
    """Return an option from where `generate` would take it: arguments, then generation configs."""
    values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def _prompt_columns(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> int | None:
    """Return the columns that the prompt of a `generate` call will have filled, earlier turns included."""
    candidates = [kwargs.get("attention_mask"), kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids")]
    tensors = (each for each in candidates if isinstance(each, torch.Tensor))
    return next((each.shape[1] for each in tensors if each.ndim >= 2), None)


def _check_goes_on(
    held: int,
    prompt: int | None,
    kwargs: dict[str, Any],
    configs: tuple[GenerationConfig | None, ...],
) -> None:
    """Raise a ValueError if transformers would run a prompt again behind the tokens that a cache holds."""
    for name in _DRAFTING:
        if _first_given(kwargs, configs, name) is not None:
            raise ValueError(
                f"{name}: drafts begin with an empty cache, and this one holds {held} tokens; leave `cache` "
                "out, and pass the whole conversation"
            )
    if prompt is not None and prompt <= held and kwargs.get("inputs_embeds") is None:
        raise ValueError(
            f"the cache holds {held} tokens, and the prompt has {prompt}: pass the whole conversation, which "
            "has more than the cache holds, or crop or reset the cache"
        )


def _columns_to_reserve(
    prompt: int, kwargs: dict[str, Any], configs: tuple[GenerationConfig | None, ...]
) -> int | None:
    """Return the columns that a call may fill, None if many more than its prompt: it may end long before."""
    answer = _first_given(kwargs, configs, "max_new_tokens")
    limit = _first_given(kwargs, configs, "max_length") if answer is None else prompt + answer
    if limit is not None and prompt < limit <= prompt + max(prompt // 8, 256):
        return int(limit)
    return None
