"""What is trained is what is deployed: stage 2's forward is the runtime's decoding at flush_size 1."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.data import Question, TrainingSample
from leank_convert.export import export_checkpoint
from leank_convert.families import ARCHITECTURES
from leank_convert.mask import ChannelMask
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.held_out import values_left
from leank_convert.train.packing import pack_sample
from leank_convert.train.passes import follow_context, run_context_pass
from leank_convert.train.split_attention import StoredContext, Student
from leank_convert.windows import Windows
from runtime import modeling_leank
from tests.checks import prune_values
from tests.tiny_families import FAMILIES, TRAINS_LINEAR, three_layers, tiny_model

LAYERS, KV_HEADS, HEAD_DIM = 3, 4, 16
# Tokens of each question on a context, and of its answer.
ONE, SEVERAL = [(0, 15)], [(3, 15), (6, 7)]
PLACES = {
    "middle": (40, 4, 6),
    "no windows": (40, 0, 0),
    "answer longer than the recent window": (12, 4, 6),
    "prompt within the sink": (5, 9, 3),
    "prompt within the windows": (9, 4, 20),
}
# Of families whose masks are not ragged alone.
BEYOND = ["centred keys", "V pruned"]
KINDS = {"gpt_oss": ["ragged", *BEYOND], "phi3": BEYOND[1:]}
KINDS |= dict.fromkeys(("olmo3", "qwen3_next", "smollm3"), BEYOND[:1])
CASES = [
    *(("llama", "ragged", place, SEVERAL) for place in PLACES),
    ("llama", "ragged", "middle", ONE),
    ("llama", "a layer without channels", "middle", SEVERAL),
    *(
        ("llama", kind, place, SEVERAL)
        for kind in BEYOND
        for place in ("middle", "prompt within the windows")
    ),
    *(
        pytest.param(row.id, kind, "middle", SEVERAL, marks=row.marks)
        for row in FAMILIES
        for kind in KINDS.get(row.id, ["ragged"])
    ),
]


@pytest.mark.parametrize(("family", "kind", "place", "sizes"), CASES, ids=str)
def test_answer_pass_equals_decoding_at_flush_size_one(family, kind, place, sizes, tmp_path):
    if "linear_attention" in ARCHITECTURES[family].other_layers and not TRAINS_LINEAR:
        pytest.skip("this release of transformers is too old to train on linear attention")
    num_context, sink_size, recent_size = PLACES[place]
    heads = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": KV_HEADS}
    tokens = {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = tiny_model(family, dtype=torch.float64, **heads, **tokens, **three_layers(family))
    model.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(LAYERS, KV_HEADS, HEAD_DIM, generator=generator) < 0.3
    mask[0, 1], mask[1, 2] = False, True
    if kind == "a layer without channels":
        mask[1] = False
    # As large as keys are; it need not be theirs.
    generator = torch.Generator().manual_seed(5)
    key_mean = (3 * torch.randn(mask.shape, generator=generator)).half() if kind == "centred keys" else None
    wanted = ChannelMask(mask, key_mean=key_mean)
    if kind == "V pruned":
        wanted = prune_values(wanted, tmp_path / "model")
    windows = {"sink_size": sink_size, "recent_size": recent_size, "flush_size": 1}
    export_checkpoint(tmp_path / "model", wanted, tmp_path / "out", **windows)
    generator = torch.Generator().manual_seed(2)
    prefix = torch.randint(3, 90, (num_context,), generator=generator)
    questions = [
        Question(torch.randint(3, 90, (asked + answered,), generator=generator), asked)
        for asked, answered in sizes
    ]
    # torch has no fused product of experts in float64.
    eager = {"experts_implementation": "eager"} if ARCHITECTURES[family].experts else {}
    trained = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation=ATTENTION_NAME, dtype=torch.float64, **eager
    )
    with torch.no_grad():
        packed = pack_sample(TrainingSample("retrieval", prefix, tuple(questions)))
        room = StoredContext(num_context, key_mean=None if key_mean is None else key_mean.float())
        context = run_context_pass(trained, prefix, room)
        teacher = follow_context(trained, context, packed)
        left = values_left(wanted, torch.device("cpu"))
        pruned = Student(Windows(sink_size, recent_size), mask.double(), mask.any(-1), **left)
        student = follow_context(trained, context, packed, pruned)

        model_class = getattr(modeling_leank, f"LeanK{ARCHITECTURES[family].base_class}")
        deployed = model_class.from_pretrained(tmp_path / "out", dtype=torch.float64, **eager)
        decoded = []
        for question in questions:
            prompt = torch.cat([prefix, question.input_ids[: question.answer_start]])
            output = deployed(prompt[None], use_cache=True)
            for token in question.input_ids[question.answer_start :]:
                output = deployed(token[None, None], cache=output[CACHE], use_cache=True)
                decoded.append(output.last_hidden_state[0])
    row = ARCHITECTURES[family]
    # Routers, norms over all heads and linear attention compute in float32, whatever the model's dtype.
    rounded = row.experts or family in ("olmo2", "olmo3")
    in_single = "linear_attention" in row.other_layers or kind == "V pruned"  # whose basis is
    close = 1e-4 if in_single else 1e-5 if rounded else 1e-8
    torch.testing.assert_close(student, torch.cat(decoded), rtol=close, atol=close)
    longest = num_context + max(asked + answered for asked, answered in sizes)
    prunes = longest > sink_size + recent_size + 1
    assert (not torch.allclose(student, teacher[-len(student) :], atol=1e-4)) == prunes
