"""Training of the shipped model from scratch on its three tasks (one GPU, minutes): `bin/train-testbed`.

Every training sequence is one document and as many questions as fit behind it; only answers count in the
loss. Retrieval circuits do not form on long documents from the start: the length grows from 64 tokens, each
time the loss at the present length falls under a threshold; names of two words join once names of one word
are retrieved from 256 tokens. The last length leaves room behind a document as long as that of a prompt of
2048 tokens, so that the longest prompts asked of the model lie inside what it was trained on.

With `--layers sliding,full` layers take these kinds in turn, and the model is a Qwen3: a Llama that norms
queries and keys, of which transformers knows layers with a sliding window. That is shorter than any document,
so that nothing learns to retrieve there first. Such a model is not shipped.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bin.testbed.held_out import measure_all, render_table
from leank_convert.mask_provenance import package_versions
from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import (
    ASSISTANT,
    BEGIN,
    END,
    IDS,
    MAX_TOKENS,
    PAD,
    TASKS,
    USER,
    VOCABULARY,
    Words,
    build_document,
)
from leank_convert.tokenizer import load_tokenizer

LENGTHS = (64, 128, 256, 512, 1024, 2048, MAX_TOKENS)
_READ_LOSSES_EVERY, _POINT_EVERY = 20, 200  # steps; reading a loss waits for the device
_HELD_OUT_COUNT = 1024  # prompts a cell
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingPlan:
    """The shape of the model and how it is trained."""

    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: str = "full"
    sliding_window: int = 32
    steps: int = 12000
    tokens_per_step: int = 131072
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.01
    warmup_steps: int = 300
    decay_share: float = 0.6
    next_length_below: float = 0.1
    question_share: float = 0.3
    two_word_share: float = 0.5
    seed: int = 0

    @property
    def layer_types(self) -> list[str]:
        """What attention each layer has, by transformers' names: the kinds of `layers` in turn."""
        kinds = itertools.cycle(self.layers.split(","))
        return [f"{kind}_attention" for kind in itertools.islice(kinds, self.num_hidden_layers)]

    def learning_rate_at(self, step: int) -> float:
        """Rise over `warmup_steps`, hold, and fall to zero over the last `decay_share` of the steps."""
        ramp = step / self.warmup_steps
        fall = (self.steps + 1 - step) / (self.decay_share * self.steps)
        return self.learning_rate * min(1.0, ramp, fall)


class Request(NamedTuple):
    """What one batch shall hold."""

    step: int
    length: int
    two_word_share: float


class Batch(NamedTuple):
    """Sequences and where their answers are: `ids` [B, T], the others [A]."""

    ids: torch.Tensor
    answer_positions: torch.Tensor  # in the flattened ids
    answer_ids: torch.Tensor


class Curriculum:
    """Chooses the length of every batch, and moves on once the loss at the present length is low."""

    _LOSSES = 100

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        self.stage = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=self._LOSSES)

    def __iter__(self) -> Iterator[Request]:
        rng = random.Random(f"lengths/{self.plan.seed}")
        for step in range(1, self.plan.steps + 1):
            # Half of the batches at the present length; the rest keep the shorter ones alive.
            stage = self.stage if rng.random() < 0.5 else rng.randrange(self.stage + 1)
            two_words = LENGTHS[self.stage] > 256
            yield Request(step, LENGTHS[stage], self.plan.two_word_share if two_words else 0.0)

    def observe(self, length: int, loss: float) -> None:
        """Take note of one batch's loss; batches that were on their way at the last move do not count."""
        if length != LENGTHS[self.stage]:
            return
        self._losses.append(loss)
        is_full = len(self._losses) == self._LOSSES
        is_low = is_full and sum(self._losses) < self._LOSSES * self.plan.next_length_below
        if is_low and self.stage < len(LENGTHS) - 1:
            self.stage += 1
            self._losses.clear()


class Batches(Dataset[Batch]):
    """Batches of about `tokens_per_step` tokens; a batch is a function of the seed and its request."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan

    def __getitem__(self, request: Request) -> Batch:
        rng = random.Random(f"{self.plan.seed}/{request.step}")
        ids, positions = [], []
        for row in range(self.plan.tokens_per_step // request.length):
            sequence, answered = training_sequence(
                rng, request.length, self.plan.question_share, rng.random() < request.two_word_share
            )
            ids.append(sequence)
            positions += [row * request.length + position for position in answered]
        batch, answer_positions = torch.tensor(ids), torch.tensor(positions)
        return Batch(batch, answer_positions, batch.flatten()[answer_positions])


def training_sequence(
    rng: random.Random, length: int, question_share: float, two_word_names: bool
) -> tuple[list[int], list[int]]:
    """Build the ids [length] of one document with its questions, and the positions of the answers' tokens."""
    task = rng.choice(TASKS)
    document = build_document(
        task, rng, int(length * (1 - question_share)) - 8, two_word_names=two_word_names
    )
    words = [BEGIN, USER, *itertools.chain.from_iterable(document.lines)]
    answered: list[int] = []
    questions = list(document.questions)
    rng.shuffle(questions)
    for turn, question in enumerate(questions):
        asking: Words = (*((USER,) if turn else ()), *question.words, END, ASSISTANT)
        answer: Words = (*question.answer, END)
        if len(words) + len(asking) + len(answer) > length:
            break
        words += asking
        answered += range(len(words), len(words) + len(answer))
        words += answer
    return [IDS[word] for word in words] + [IDS[PAD]] * (length - len(words)), answered


def _answer_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the answer tokens; logits exist for those positions alone."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state.flatten(0, 1)
    # Not `hidden[...]`, whose backward pass sorts the positions.
    logits = model.lm_head(hidden.index_select(0, batch.answer_positions - 1))
    return torch.nn.functional.cross_entropy(logits.float(), batch.answer_ids)


def _build_model(plan: TrainingPlan) -> PreTrainedModel:
    torch.manual_seed(plan.seed)
    config: dict[str, Any] = {
        **{key: getattr(plan, key) for key in _SHAPE},
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": IDS[BEGIN],
        "eos_token_id": IDS[END],
        "pad_token_id": IDS[PAD],
        "tie_word_embeddings": False,
    }
    if "sliding_attention" not in plan.layer_types:
        return LlamaForCausalLM(LlamaConfig(**config))
    sliding: dict[str, Any] = {"layer_types": plan.layer_types, "sliding_window": plan.sliding_window}
    return Qwen3ForCausalLM(Qwen3Config(**config, **sliding, use_sliding_window=True))


def _fit(model: PreTrainedModel, plan: TrainingPlan) -> list[dict[str, float]]:
    """Train `model` in place (fp32 weights, bf16 arithmetic) and return the curve."""
    device = model.device
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=plan.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=plan.weight_decay,
        fused=device.type == "cuda",
    )
    curriculum = Curriculum(plan)
    batches = DataLoader(
        Batches(plan),
        sampler=curriculum,
        batch_size=None,
        num_workers=min(15, (os.cpu_count() or 1) - 1),
        pin_memory=device.type == "cuda",
    )
    curve: list[dict[str, float]] = []
    unread: list[tuple[int, torch.Tensor]] = []
    began = time.monotonic()
    for step, on_host in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate_at(step)
        batch = Batch(*(part.to(device, non_blocking=True) for part in on_host))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = _answer_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        unread.append((batch.ids.shape[1], loss.detach()))
        if step % _READ_LOSSES_EVERY and step < plan.steps:
            continue
        losses = torch.stack([loss for _, loss in unread]).tolist()
        for (length, _), value in zip(unread, losses, strict=True):
            curriculum.observe(length, value)
        unread.clear()
        if step % _POINT_EVERY and step < plan.steps:
            continue
        point = {
            "step": step,
            "seconds": round(time.monotonic() - began, 1),
            "length": LENGTHS[curriculum.stage],
            "loss": round(sum(losses) / len(losses), 5),
        }
        curve.append(point)
        print(json.dumps(point), flush=True)
    return curve


def train_testbed(plan: TrainingPlan, out: Path) -> None:
    """Train by `plan` and write the model (bf16), its tokenizer and `training.json` to `out`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _build_model(plan)
    model.to(device)  # type: ignore[arg-type]
    began = time.monotonic()
    curve = _fit(model, plan)
    seconds = round(time.monotonic() - began, 1)
    model.to(torch.bfloat16).eval()  # type: ignore[arg-type]
    figures = measure_all(model, _HELD_OUT_COUNT)
    model.save_pretrained(out)
    # Of the same words, so it is the shipped one's.
    load_tokenizer(MODEL_DIR).save_pretrained(out)
    record = {
        "plan": asdict(plan),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": package_versions(),
        "training_seconds": seconds,
        "held_out": figures,
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(render_table(figures))


def main() -> None:
    """Parse `--field value` for every field of `TrainingPlan` and `--out`."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write")
    for field in fields(TrainingPlan):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    unknown = set(arguments["layers"].split(",")) - {"full", "sliding"}
    if unknown:
        parser.error(f"--layers: `{min(unknown)}` is neither `full` nor `sliding`")
    if "sliding" in arguments["layers"] and out == MODEL_DIR:
        parser.error(
            "--layers: a model with sliding layers takes the shipped one's place: name another --out"
        )
    train_testbed(TrainingPlan(**arguments), out)


if __name__ == "__main__":
    main()
