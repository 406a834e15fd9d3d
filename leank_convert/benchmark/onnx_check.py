"""What an ONNX step is held to: the stock model in float64, attending over dense keys by the definition.

Where the graph's weights are quantized, the stock model has the values that they were rounded to: what is
left is that onnxruntime rounds activations to 8 bits, too.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leank_convert.benchmark.accuracy import attend_row, relative_error
from leank_convert.benchmark.onnx_cache import TOKEN, FilledCache
from leank_convert.onnx.graph import attending
from leank_convert.onnx.quantize import round_weights

# What the exported graph's logits may differ by, relative to the exact ones.
TOLERANCE = 1e-4
# Activations of 8 bits before attention as sharp as here: up to 0.09 was seen; a wrong cache is above 1.
QUANTIZED_TOLERANCE = 0.2


@dataclass(frozen=True)
class LogitsCheck:
    """How far logits are from the exact ones, ‖result - exact‖ / ‖exact‖.

    Attributes:
        error: Of the graph.
        torch_error: Of torch in float32.
        pruning_effect: How far exact pruned logits are from exact dense ones; 0 for the dense side.
        tolerance: What the graph's error may be.
    """

    error: float
    torch_error: float
    pruning_effect: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; NaN never is."""
        return self.error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a NaN becomes null."""
        values = {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}
        return {**values, "ok": self.ok}


class ExactLogits:
    """Logits `[vocabulary]` of the step that follows a cache, by side, in float64 and in torch's float32.

    Args:
        model: A stock causal LM.
        cache: What it attends to.
        weights: How the graph's weights are quantized, None if they are not.
    """

    def __init__(self, model: Any, cache: FilledCache, weights: str | None = None) -> None:
        own = copy.deepcopy(model)
        if weights is not None:
            round_weights(own, weights)
        exact = copy.deepcopy(own).double()
        self.exact = {side: _logits(exact, cache, side) for side in ("dense", "leank")}
        self.own = {side: _logits(own, cache, side) for side in ("dense", "leank")}
        self.tolerance = TOLERANCE if weights is None else QUANTIZED_TOLERANCE

    def check(self, side: str, logits: Tensor) -> LogitsCheck:
        """Hold a graph's logits to the exact ones of its side."""
        exact = self.exact[side]
        return LogitsCheck(
            relative_error(logits, exact),
            relative_error(self.own[side], exact),
            relative_error(exact, self.exact["dense"]),
            self.tolerance,
        )


def _logits(model: Any, cache: FilledCache, side: str) -> Tensor:
    subject = cache.subject
    pruned = cache.num_pruned if side == "leank" else 0
    masks = subject.channel_masks

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        keys, values = (
            torch.cat([stored[layer].to(query), new], dim=2)
            for stored, new in ((cache.keys, key), (cache.values, value))
        )
        mask = masks[layer] if side == "leank" else torch.ones_like(masks[layer])
        with sdpa_kernel(SDPBackend.MATH):
            return attend_row(query, keys, values, mask, subject.windows.sink_size, pruned).transpose(
                1, 2
            ), None

    with attending(model, attend), torch.no_grad():
        output = model(
            torch.tensor([[TOKEN]]), position_ids=torch.tensor([[cache.num_tokens]]), use_cache=False
        )
    logits: Tensor = output.logits.flatten()
    return logits
