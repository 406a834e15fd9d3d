"""What training is measured against: full sequences through the stock model.

The step is what one writes with transformers alone: the teacher's forward pass over the whole sequence, the
student's with an attention function that scales the answer's rows, its backward pass with gradient
checkpointing. A prefill is the stock model's own. Neither shares code with `leank_convert.train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.models import build_dense
from leank_convert.data import TrainingSample
from leank_convert.train.step import Student

_ATTENTION_NAME = "leank_full_sequence"
DEFAULT = "sdpa"
# Torch's own choice, and the one that is faster on Hopper; the others are what it falls back to.
_BACKENDS: Mapping[str, tuple[SDPBackend, ...] | None] = MappingProxyType(
    {
        DEFAULT: None,
        "sdpa-cudnn": (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ),
    }
)


def name_backends(device: torch.device) -> tuple[str, ...]:
    """The ways of running SDPA that differ on a device."""
    return tuple(_BACKENDS) if device.type == "cuda" else (DEFAULT,)


@contextmanager
def sdpa_backend(name: str) -> Iterator[None]:
    """Let SDPA try a backend before others, in backward passes too."""
    backends = _BACKENDS[name]
    if backends is None:
        yield
        return
    with sdpa_kernel(list(backends), set_priority=True):
        yield


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor) -> Any:
    """The stock model's prefill `[1, S]` without logits; returns its cache."""
    return model.base_model(input_ids, use_cache=True).past_key_values


@dataclass(frozen=True)
class _Rows:
    """What the attention function needs of a student.

    Attributes:
        student: Windows and scaling factors.
        answer_start: Rows from here on are the answer's.
    """

    student: Student
    answer_start: int


def full_sequence_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rows: _Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dense causal rows by SDPA, the answer's in plain torch with scaled logits on middle keys.

    Args:
        module: The attention module.
        query: `[B, H, S, D]`.
        key: `[B, H_kv, S, D]`.
        value: `[B, H_kv, S, D]`.
        attention_mask: None.
        scaling: The softmax scale.
        dropout: 0.
        rows: The student.
        **kwargs: What else the model's family passes.

    Returns:
        `[B, S, H, D]`, and None for the attention weights.
    """
    assert rows is not None and attention_mask is None and scaling is not None
    student, start = rows.student, rows.answer_start
    context, _ = sdpa_attention_forward(
        module,
        query[:, :, :start],
        key[:, :, :start],
        value[:, :, :start],
        None,
        scaling=scaling,
        is_causal=True,
    )
    groups = query.shape[1] // key.shape[1]
    factors = student.scaling_factors[module.layer_idx].repeat_interleave(groups, dim=0)[:, None]
    answer, keys = query[:, :, start:], repeat_kv(key, groups).mT
    full = answer @ keys * scaling
    middle = (answer * factors).to(answer.dtype) @ keys * scaling
    if student.sees_middle is not None:
        hidden = ~student.sees_middle[module.layer_idx].repeat_interleave(groups)
        middle = middle.masked_fill(hidden[:, None, None], float("-inf"))
    j = torch.arange(query.shape[2], device=query.device)
    p = j[start:, None]
    keeps_all = (j < student.windows.sink_size) | (j >= p - student.windows.recent_size)
    logits = torch.where(keeps_all, full, middle).masked_fill(j > p, float("-inf"))
    precise = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.softmax(-1, dtype=precise).to(query.dtype)
    pruned = (weights @ repeat_kv(value, groups)).transpose(1, 2)
    return torch.cat([context, pruned], dim=1), None


AttentionInterface.register(_ATTENTION_NAME, full_sequence_attention)


class FullSequence:
    """Teacher and student on the tensors of one model.

    Attributes:
        teacher: The stock model, which also prefills.
    """

    def __init__(self, model: Any, geometry: Geometry) -> None:
        self.teacher = build_dense(model, geometry)
        self._student = build_dense(model, geometry, _ATTENTION_NAME)
        # Only a model in training mode is checkpointed; its dropout is 0.
        self._student.train()
        # Newer releases of transformers deprecate the older name, which earlier ones have alone.
        enable = getattr(self._student, "activation_checkpointing_enable", None)
        (enable or self._student.gradient_checkpointing_enable)({"use_reentrant": False})

    def distil(self, sample: TrainingSample, student: Student) -> Tensor:
        """Loss of a sample, each of its questions a sequence of its own."""
        losses = [self._distil_question(sample, index, student) for index in range(len(sample.questions))]
        return torch.stack(losses).mean()

    def _distil_question(self, sample: TrainingSample, index: int, student: Student) -> Tensor:
        prompt, answer = sample.prompt_ids(index), sample.answer_ids(index)
        input_ids = torch.cat([prompt, answer])[None].to(self.teacher.device)
        start = len(prompt)
        with torch.no_grad():
            target = self.teacher.base_model(input_ids, use_cache=False).last_hidden_state[:, start:].clone()
        rows = _Rows(student, start)
        hidden = self._student.base_model(input_ids, use_cache=False, rows=rows).last_hidden_state[:, start:]
        precise = torch.promote_types(hidden.dtype, torch.float32)
        loss: Tensor = (target.to(precise) - hidden.to(precise)).square().mean()
        return loss
