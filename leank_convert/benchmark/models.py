"""Models of random weights: ours, the stock class on the same tensors, how far their logits may differ."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leank_convert.benchmark.accuracy import Check, exact_dtype, relative_error
from leank_convert.benchmark.environment import release_memory
from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.subject import Subject

_CHECKED_ROWS = 2
_CHECKED_STEPS = 12  # enough for a step that runs eagerly, one that is captured, and some that are replayed
# Tokens of the checked prompt that lie in the pruned region.
_PRUNED_TOKENS = 256
_FIRST_TOKEN = 3  # the ids before it are special in most vocabularies


@dataclass(frozen=True)
class ModelCheck(Check):
    """How far logits are from those of the same weights in higher precision.

    Attributes:
        pruning_effect: How far exact pruned logits are from exact dense ones. An error far below it shows
            that the right tokens and channels were seen.
    """

    pruning_effect: float

    def describe(self) -> str:
        """One line for a person."""
        verdict = "as close as dense" if self.ok else "WRONG, nothing is measured"
        return (
            f"error of logits {self.error:.1e}, of dense decoding {self.torch_error:.1e}, "
            f"effect of pruning {self.pruning_effect:.1e}: {verdict}"
        )


def stock_config(geometry: Geometry, **changes: Any) -> Any:
    """The stock class's config of a geometry; `changes` are keys of its own."""
    import transformers

    options = {key: value for key, value in geometry.config.items() if key != "model_type"}
    return getattr(transformers, geometry.facts.architecture.config_class)(**options, **changes)


def build_dense(model: Any, geometry: Geometry, attention: str = "sdpa") -> Any:
    """The stock class over the very tensors of a model; random weights need no reordering.

    Args:
        model: A LeanK model, or a stock one.
        geometry: Its shape.
        attention: How the stock class attends, by transformers' name for it.
    """
    import transformers

    with torch.device("meta"):
        dense = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            stock_config(geometry), dtype=model.dtype, attn_implementation=attention
        )
    result = dense.load_state_dict(model.state_dict(), strict=False, assign=True)
    other = [name for name in result.unexpected_keys if not name.endswith(".channel_mask")]
    # Its buffers are no weights, so the meta device left them empty.
    dense.model.rotary_emb = model.model.rotary_emb
    empty = [name for name, tensor in (*dense.named_parameters(), *dense.named_buffers()) if tensor.is_meta]
    assert not (result.missing_keys or other or empty), (result, empty)
    return dense.eval().requires_grad_(False)


def random_prompt(model: Any, batch_size: int, num_tokens: int, seed: int = 0) -> Tensor:
    """Random token ids `[B, S]` on the model's device."""
    return random_ids(model, batch_size, num_tokens, seed).to(model.device)


def random_ids(model: Any, batch_size: int, num_tokens: int, seed: int = 0) -> Tensor:
    """Random token ids `[B, S]` of a model's vocabulary, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_FIRST_TOKEN, model.config.vocab_size, (batch_size, num_tokens), generator=generator)


def check_model(model: Any, subject: Subject, *, prompt_length: int) -> ModelCheck:
    """Hold decoding to the same weights in higher precision, fed the same tokens.

    The exact logits are those of the plain torch path; torch's own error is the dense model's.

    Args:
        model: The LeanK model.
        subject: What it was built from.
        prompt_length: Tokens of the prompt, if the windows need no more to leave something pruned.
    """
    windows = subject.windows
    whole = windows.sink_size + windows.recent_size + windows.flush_size
    tokens = random_prompt(
        model, _CHECKED_ROWS, min(prompt_length, whole + _PRUNED_TOKENS) + _CHECKED_STEPS, seed=1
    )
    ours = forced_logits(model, tokens)
    dense = forced_logits(build_dense(model, subject.geometry), tokens)
    exact = copy.deepcopy(model).to(exact_dtype(model.dtype))
    exact_ours = forced_logits(exact, tokens)
    exact_dense = forced_logits(build_dense(exact, subject.geometry), tokens)
    check = ModelCheck(
        relative_error(ours, exact_ours),
        relative_error(dense, exact_dense),
        relative_error(exact_ours, exact_dense),
    )
    del exact
    release_memory(model.device)
    return check


def forced_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of the prompt's last token and of every step, `[B, 1 + steps, vocabulary]`, tokens given."""
    prompt = tokens.shape[1] - _CHECKED_STEPS
    output = model(tokens[:, :prompt], use_cache=True, logits_to_keep=1)
    logits = [output.logits]
    for column in range(prompt, tokens.shape[1]):
        output = model(tokens[:, column : column + 1], past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
