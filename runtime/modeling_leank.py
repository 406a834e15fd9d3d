"""Models of converted checkpoints: each family's stock classes of transformers, decoding from a LeanK cache.

What is added is the same for every family: the registered attention function, and a LeanK cache wherever the
stock class would have built a dense one. Which channels it keeps is said by the config. So no family is named
here: `LeanK<X>` is made of transformers' `<X>` when it is asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from .attention_leank import ATTENTION_NAME
from .cache_leank import LeanKCache, cache_class
from .capture_leank import GraphMemory
from .configuration_leank import CACHE, config_class_of, read_settings, stock_class
from .files_leank import MASK_FILE, OTHER_HEADS, carry_mask_file, find_mask_file, fits_heads
from .fused_step_leank import own_storages
from .generate_leank import KIND, GenerateMixin
from .parts_leank import load_part

logger = logging.get_logger(__name__)

# Requests that mean "the usual attention": prompts run through SDPA, decoding through the LeanK cache.
_USUAL_ATTENTION = (None, ATTENTION_NAME, "sdpa", "eager")


def _cpu_has_bfloat16() -> bool:
    """Return whether torch can multiply in bfloat16 on this CPU; True where it does not say."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return ask is None or bool(ask())


class LeanKMixin:
    """What a LeanK model adds to a stock model, with or without a head.

    Attributes:
        key_means: What comes off keys of every pruned layer, `[1, H_kv, D]` each; None for nothing, or where
            no checkpoint was loaded.
        value_bases: What V is rotated into as it is stored, `[H_kv, D, D]` each; None likewise.
    """

    config: Any
    key_means: list[torch.Tensor] | None
    value_bases: list[torch.Tensor] | None
    mask_file: Path | None  # where `from_pretrained` found it

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the stock model, or raise a ValueError if the config has no valid `leank` block."""
        settings = read_settings(config)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if settings.has_scales:
            load_part("model_constants").add_scales(self._pruned_attentions(), settings)
        self.key_means = self.value_bases = self.mask_file = None
        self.graph_memory = GraphMemory()
        self.register_state_dict_post_hook(own_storages)  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as the stock class does.

        Raises a ValueError if a scale is missing, or if the mean of keys or a basis of V is, or makes no
        sense.
        """
        model, info = super().from_pretrained(  # type: ignore[misc]
            *args, output_loading_info=True, **kwargs
        )
        config = model.config
        settings = read_settings(config)
        model.mask_file = find_mask_file(config.name_or_path, config, kwargs)
        if settings.has_constants:
            part = load_part("model_constants")
            part.check_loaded(info["missing_keys"], model.name_or_path)
            found = part.load_mask_tensors(config.leank, settings, model.mask_file, config.name_or_path)
            model.key_means, model.value_bases = found
        if model.dtype == torch.bfloat16 and model.device.type == "cpu" and not _cpu_has_bfloat16():
            logger.warning(
                "this CPU has no instructions for bfloat16, in which the model was loaded: with "
                '`dtype="float32"` it is several times faster'
            )
        if len(places := set(getattr(model, "hf_device_map", {}).values())) > 1:
            logger.warning(
                f"the model lies on {len(places)} devices, so its decode steps cannot be captured: where one "
                'GPU holds it, `device_map="cuda"` makes them several times faster'
            )
        return (model, info) if output_loading_info else model

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Return `leank` for any usual request; others, which would decode densely, raise a ValueError."""
        if requested_attention not in _USUAL_ATTENTION:
            raise ValueError(
                f"attn_implementation {requested_attention!r} does not know the pruned cache; leave it out, "
                "or load the checkpoint with its stock class to run it densely"
            )
        if requested_attention == "eager":
            logger.warning_once(
                "attn_implementation `eager`: prompts of a LeanK model run through SDPA, attention weights "
                "are not available"
            )
        return ATTENTION_NAME

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as the stock class does, and carry the mask's file along.

        transformers copies weights, config and these files. Where the mask's file is no longer where the
        model was loaded from, or is another one by now, the saved config does not name it. If it holds the
        mean of keys or a basis of V, that raises a ValueError: answers need them, or adapters.
        """
        block = self.config.leank
        if not self.config.model_type.startswith("leank_"):
            raise ValueError(
                "this model is pruned in memory alone: save it behind the `with` block of `prune_model`, "
                "where it is the original again; `leank-convert export` writes a pruned checkpoint"
            )
        files = dict(block.get("files", {}))
        found = self.mask_file or find_mask_file(self.config.name_or_path, self.config, {})
        if not carry_mask_file(found, block, Path(save_directory)):
            settings = read_settings(self.config)
            if settings.has_key_mean or settings.value_widths is not None:
                raise ValueError(
                    f"`{MASK_FILE}`, which holds the mean of keys or a basis of V, is no longer in "
                    f"`{self.config.name_or_path}`, or is another file: put it back, then save"
                )
            files.pop(MASK_FILE, None)
        self.config.leank = {**block, "files": files} if "files" in block else block
        try:
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.config.leank = block

    def load_adapter(self, peft_model_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as the stock class does, or raise a ValueError if it would change other heads."""
        if not fits_heads(
            peft_model_id, self.config.leank, {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
        ):
            raise ValueError(f"load_adapter: {OTHER_HEADS}, and load NEW")
        return super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]

    def build_cache(
        self, prune: str | None = None, use_graphs: bool = True, kv_dtype: str | None = None
    ) -> LeanKCache:
        """Return an empty cache for this model, to pass as `cache`.

        `prune="eager"` prunes after every forward pass of several tokens, one layer at a time, so the full
        cache of a long prompt never exists for all layers; `deferred` keeps the input whole until decoding
        begins, so a prompt in chunks gives what it gives in one piece. `use_graphs` allows that decode steps
        on a CUDA device are captured and replayed as one graph. `kv_dtype="fp8"` stores keys and values in
        eight bits, by the checkpoint's scales where it has some, else by those of every row's prompt; `int4`
        in four bits; `auto` as they come. None is the config's. Scales, a mean of keys or a basis of V that
        are wrong or missing raise a ValueError.
        """
        settings, constants, bases = read_settings(self.config), None, self.value_bases
        if settings.has_constants or self.key_means is not None:
            find = load_part("model_constants").constants_of
            constants = find(self._pruned_attentions(), settings, self.key_means, bases)
        return cache_class(self.config)(self.config, prune, use_graphs, kv_dtype, constants, bases)

    def _pruned_attentions(self) -> list[Any]:
        """Return the attention modules of the layers that are pruned."""
        layers = self.base_model.layers  # type: ignore[attr-defined]
        return [layers[number].self_attn for number in read_settings(self.config).layers]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the stock model, on a LeanK cache if on any; arguments and output as in the stock class."""
        output_attentions = kwargs.pop("output_attentions", None)
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError(
                "output_attentions: attention weights of a pruned cache are never formed; load the "
                'checkpoint with its stock class and attn_implementation="eager" to see dense ones'
            )
        if self.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(
                f"attention implementation was changed to {self.config._attn_implementation!r}, which does "
                'not know the pruned cache; call `model.set_attn_implementation("leank")`'
            )
        given = past_key_values if cache is None else cache  # what earlier releases call it
        training: bool = self.training  # type: ignore[attr-defined]
        if training and (use_cache or given is not None):
            raise ValueError(
                "the model is in training mode and was asked to use a cache, which cannot be trained "
                "through; call `model.eval()` first, or pass `use_cache=False`"
            )
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not training
        kwargs.update(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)
        if given is not None or use_cache:
            return self._forward_with_cache(given, use_cache, attention_mask, kwargs)
        return super().forward(attention_mask=attention_mask, use_cache=False, **kwargs)  # type: ignore[misc]

    # torch.compile runs this as it is: the cache's counters change with every token, and traced code would be
    # compiled again for each of them.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_with_cache(
        self,
        given: Cache | None,
        use_cache: bool,
        attention_mask: torch.Tensor | None,
        inputs: dict[str, Any],
    ) -> Any:
        if given is None:
            prune, kv_dtype = KIND.get()
            cache = self.build_cache(prune, kv_dtype=kv_dtype)
        else:
            cache = self._checked_cache(given)
        tokens = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
        if tokens is None:
            raise ValueError("neither input_ids nor inputs_embeds is given: pass one of them")
        if attention_mask is not None:
            if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
                raise ValueError(
                    "attention_mask is not a 2-D padding mask [batch, tokens], all that a LeanK cache takes; "
                    "pass one, or `use_cache=False` for a custom mask"
                )
            (rows, total), (its_rows, covered) = tokens.shape[:2], attention_mask.shape
            total += cache.get_seq_length()
            if (its_rows, covered) != (rows, total):
                raise ValueError(
                    f"attention_mask covers {covered} tokens of {its_rows} rows, cache and input hold "
                    f"{total} of {rows}; pass the mask of the whole conversation"
                )
        if hasattr(cache, "take_mask"):  # not what tools pass in a cache's place, of which all is pruned
            attention_mask = cache.take_mask(attention_mask, tokens.shape[1])
        routes = inputs.get("output_router_logits")
        if routes is None:
            routes = getattr(self.config, "output_router_logits", False)
        # The loss of routers reads the mask, of which mixed layers have several in a step of their own.
        takes_step = not (routes and getattr(cache, "other_layers", None))
        if takes_step and cache.takes_step(tokens.shape[1]):
            return self._decode_step(cache, use_cache, attention_mask, inputs, tokens)
        return super().forward(  # type: ignore[misc]
            use_cache=use_cache, attention_mask=attention_mask, **inputs, **{CACHE: cache}
        )

    def _decode_step(
        self,
        cache: LeanKCache,
        use_cache: bool | None,
        attention_mask: torch.Tensor | None,
        inputs: dict[str, Any],
        tokens: torch.Tensor,
    ) -> Any:
        """Run a step, of whose mask only the new columns are read: all before them are in the cache."""
        stock_forward = super().forward  # type: ignore[misc]

        def forward(arguments: dict[str, Any]) -> Any:
            output = stock_forward(
                use_cache=use_cache, attention_mask=cache.step_mask, **arguments, **{CACHE: cache}
            )
            cache.settle()
            return output

        valid = padding = None
        if attention_mask is not None:
            valid = attention_mask[:, -tokens.shape[1] :]
            padding = cache.rows.padding_with(attention_mask, tokens.shape[1])
        cache.prepare_step(tokens.shape[1], attention_mask)
        try:
            output = cache.graph.run(self, cache, inputs, valid, forward)
        finally:
            cache.rows.next_valid = None
        if padding is not None:
            cache.rows.padding = padding
        return output

    def _checked_cache(self, given: object, *, is_filled: bool = False) -> LeanKCache:
        """Return what was given as a cache if this model can go on with it, else raise a ValueError.

        One that holds tokens is looked at with `is_filled` alone.
        """
        # Not isinstance: the cache may come from another copy of these files.
        if hasattr(given, "prefill_length"):
            cache: LeanKCache = given  # type: ignore[assignment]
            # Only once: in every step it would cost more than the step's other work on the host.
            is_checked = is_filled or not cache.get_seq_length()
            is_centred = self.key_means is not None
            if is_checked and not cache.is_made_for(read_settings(self.config), is_centred):
                raise ValueError(
                    "the cache was built for a model that keeps other channels, or centres keys otherwise; "
                    "build one with this model's `model.build_cache()`"
                )
            return cache
        # An empty dense cache is refused too: its owner would go on with it, and it would stay empty.
        held = given.get_seq_length() if type(given) is DynamicCache else 0
        raise ValueError(
            f"cache is a {type(given).__name__}"
            + (f" with {held} tokens of a dense model" if held else "")
            + ", which a LeanK model cannot use; leave it out, or pass `model.build_cache()`"
            + (" and run the prompt through this model" if held else "")
        )


class LeanKForCausalLMMixin(GenerateMixin, LeanKMixin):
    """A LeanK model with a language-modelling head."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the stock model on a LeanK cache; arguments and output as in the stock class."""
        kwargs.update(labels=labels, logits_to_keep=logits_to_keep, past_key_values=past_key_values)
        return super().forward(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, **kwargs
        )


def __getattr__(name: str) -> type[PreTrainedModel]:
    """Make `LeanK<X>Model` or `LeanK<X>ForCausalLM` of transformers' class when it is first asked for."""
    kinds = {"Model": LeanKMixin, "ForCausalLM": LeanKForCausalLMMixin}
    mixin = next((mixin for ending, mixin in kinds.items() if name.endswith(ending)), None)
    if mixin is None or not name.startswith("LeanK"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = stock_class(name)
    config_class = config_class_of(stock.config_class)
    _share_conversions(stock, name, config_class.model_type)
    fields = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__}, decoding from a LeanK cache.",
        "config_class": config_class,
    }
    # With this base of its own: else transformers makes another class of this name, which cannot be pickled.
    bases = (mixin, stock, GenerationMixin) if issubclass(stock, GenerationMixin) else (mixin, stock)
    made: type[PreTrainedModel] = type(name, bases, fields)
    globals()[name] = made
    return made


def _share_conversions(stock: Any, name: str, model_type: str) -> None:
    """Let weights be read and saved as the stock class does: transformers lays experts side by side."""
    for known, own in ((stock.__name__, name), (stock.config_class.model_type, model_type)):
        conversions = conversion_mapping.get_checkpoint_conversion_mapping(known)  # type: ignore[no-untyped-call]
        if conversions is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(own, conversions, overwrite=True)
