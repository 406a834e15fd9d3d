"""Training loss of a sample in three forward passes: context, dense answers, pruned answers."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import __version__ as transformers_version

from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError
from leank_convert.train.attention import ContextIsStored, ContextPass, FollowingPass, Observer
from leank_convert.train.linear import carry_states, linear_layers
from leank_convert.train.packing import PackedSample, plan_rows
from leank_convert.train.scaling import distillation_loss
from leank_convert.train.split_attention import StoredContext, Student, plan_regions

# What a layer holds beside keys and values, some 100 KB a token in an 8B model, stays small, and PyTorch is
# as fast in blocks of this size as in one piece.
BLOCK_SIZE = 16384


def distil(
    model: PreTrainedModel,
    packed: PackedSample,
    student: Student,
    *,
    key_mean: Tensor | None = None,
    offload: bool = False,
) -> Tensor:
    """Loss of a sample, a scalar: the mean over its questions of the paper's, without the penalty.

    The context is run once, dense; every question sees it and its own tokens alone. A sample on the CPU is
    taken to the model, frozen and loaded with `ATTENTION_NAME`, without waiting for it: while the context
    runs there, what follows is launched. Keys are taken less a mean [L, H_kv, D], if one is given.
    """
    room = StoredContext(packed.sizes.context, offload, key_mean=key_mean)
    context = run_context_pass(model, packed.context_ids, room)
    return distil_answers(model, context, packed, student)


def distil_answers(
    model: PreTrainedModel, context: StoredContext, packed: PackedSample, student: Student
) -> Tensor:
    """Loss of a sample whose context is stored already; as `distil`."""
    teacher = follow_context(model, context, packed)[packed.sizes.questions :]
    hidden_states = follow_context(model, context, packed, student)
    loss = distillation_loss(teacher, hidden_states, packed.answer_owners)
    # Of a model that is spread over devices, the last layer lies elsewhere.
    return loss.to(student.scaling_factors.device)


@torch.no_grad()
def run_context_pass(
    model: PreTrainedModel,
    input_ids: Tensor,
    context: StoredContext | None = None,
    observe: Observer | None = None,
) -> StoredContext:
    """Run the dense model over a context [P] and keep every layer's keys and values, or its state.

    Context queries are dense in training as in deployment, so what is kept does not depend on the scaling
    factors and serves every question. No hidden state is kept and the language-modelling head is not run.
    Where they are kept says what comes off the keys; `observe` looks on at every layer with full attention.
    """
    num_tokens = len(input_ids)
    context = context or StoredContext(num_tokens)
    context.states = DynamicCache(config=model.config)  # layers with full attention leave it empty
    positions = torch.arange(num_tokens, device=input_ids.device)
    size = num_tokens if rotates_by_length(model) else BLOCK_SIZE
    for start in range(0, num_tokens, size):
        block = slice(start, start + size)
        context.num_seen = start
        with suppress(ContextIsStored):
            _run(model, input_ids[block], positions[block], ContextPass(context, observe))
    return context


def follow_context(
    model: PreTrainedModel, context: StoredContext, packed: PackedSample, student: Student | None = None
) -> Tensor:
    """Run what follows a context: final-norm hidden states [N, hidden_size].

    The dense model runs all T tokens of questions and answers, without gradient, and the context takes the
    questions' keys and values; the teacher's states are those of answers. Of a student the R tokens of
    answers run alone, with gradient.
    """
    device = model.device  # where its layers are spread, that of the first
    num_tokens = len(packed.input_ids) if student is None else packed.sizes.answers
    slides = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    following = FollowingPass(
        context,
        packed.sizes.questions,
        plan_regions(packed, num_tokens, None if student is None else student.windows, device),
        plan_regions(packed, num_tokens, None, device, model.config.sliding_window) if slides else None,
        plan_rows(packed, num_tokens) if linear_layers(model) else None,
        student,
    )
    learns = student is not None and torch.is_grad_enabled()
    # Layers as they are written, where some are compiled.
    with torch.set_grad_enabled(learns), torch.compiler.set_stance("force_eager"):
        return _run(model, packed.input_ids[-num_tokens:], packed.positions[-num_tokens:], following)


def check_layers(facts: ModelFacts, name: str) -> None:
    """Refuse, by a LeanKError, layers with states that this transformers cannot go on from."""
    if facts.has_states and not hasattr(Cache, "get_recurrent_state"):
        raise LeanKError(
            f"model `{name}` has layers with linear attention, and transformers {transformers_version} is "
            "too old to train on them",
            hint="`pip install 'transformers>=5.23'`, or take a method that trains nothing: "
            "`--method static-norm` with `--set held_out_samples=0` and `--set key_mean=false`",
        )


def rotates_by_length(model: PreTrainedModel) -> bool:
    """Whether a token's rotary embedding depends on how many tokens run: then a block is not the whole's."""
    ropes = model.config.rope_parameters
    kinds = [ropes] if "rope_type" in ropes else ropes.values()  # one for each kind of layers
    return any("dynamic" in rope["rope_type"] or rope["rope_type"] == "longrope" for rope in kinds)


def _run(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, leank_pass: ContextPass | FollowingPass
) -> Tensor:
    """Final-norm hidden states [N, hidden_size] of tokens at some positions, both [N]."""
    ids, position_ids = (t[None].to(model.device, non_blocking=True) for t in (input_ids, positions))
    with carry_states(model, leank_pass):
        output = model.base_model(
            input_ids=ids, position_ids=position_ids, use_cache=False, leank_pass=leank_pass
        )
    hidden_states: Tensor = output.last_hidden_state[0]
    return hidden_states
