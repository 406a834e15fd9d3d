"""What is trained is what is deployed: stage 2's forward is the runtime's decoding at flush_size 1."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.train.attention import ATTENTION_NAME, AnswerPass, Windows
from leank_convert.train.passes import run_answer_pass, run_dense_pass
from runtime import modeling_leank

FAMILIES = {
    "Llama": (LlamaConfig, {"attention_bias": True}),
    "Mistral": (MistralConfig, {"sliding_window": None}),
    "Qwen2": (Qwen2Config, {}),
    "Qwen3": (Qwen3Config, {}),
}
LAYERS, KV_HEADS, HEAD_DIM = 3, 4, 16


def save_model(family, folder):
    config_class, options = FAMILIES[family]
    config = config_class(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=90,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)


def draw_mask(kind):
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(LAYERS, KV_HEADS, HEAD_DIM, generator=generator) < 0.3
    mask[0, 1] = False
    mask[1, 2] = True
    if kind == "a layer without channels":
        mask[1] = False
    return mask


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "ragged") for family in FAMILIES), ("Llama", "a layer without channels")]
)
@pytest.mark.parametrize(
    ("num_context", "sink_size", "recent_size"),
    [
        pytest.param(40, 4, 6, id="middle"),
        pytest.param(40, 0, 0, id="no windows"),
        pytest.param(12, 4, 6, id="answer longer than the recent window"),
        pytest.param(5, 9, 3, id="prompt within the sink"),
        pytest.param(9, 4, 20, id="prompt within the windows"),
    ],
)
def test_answer_pass_equals_decoding_at_flush_size_one(
    family, kind, num_context, sink_size, recent_size, tmp_path
):
    save_model(family, tmp_path / "model")
    mask = draw_mask(kind)
    export_checkpoint(
        tmp_path / "model",
        ChannelMask(mask),
        tmp_path / "out",
        sink_size=sink_size,
        recent_size=recent_size,
        flush_size=1,
    )
    input_ids = torch.randint(3, 90, (1, num_context + 15), generator=torch.Generator().manual_seed(2))

    trained = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation=ATTENTION_NAME, dtype=torch.float64
    )
    with torch.no_grad():
        dense = run_dense_pass(trained, input_ids, num_context)
        windows = Windows(sink_size, recent_size)
        answer_pass = AnswerPass(dense.context, windows, mask.double(), mask.any(-1))
        student = run_answer_pass(trained, input_ids, answer_pass)

        model_class = getattr(modeling_leank, f"LeanK{family}Model")
        deployed = model_class.from_pretrained(tmp_path / "out", dtype=torch.float64)
        output = deployed(input_ids[:, :num_context], use_cache=True)
        decoded = []
        for token in input_ids[:, num_context:].split(1, dim=1):
            output = deployed(token, past_key_values=output.past_key_values, use_cache=True)
            decoded.append(output.last_hidden_state)
    torch.testing.assert_close(student, torch.cat(decoded, dim=1), rtol=1e-8, atol=1e-8)
    prunes = num_context + 15 > sink_size + recent_size + 1
    assert (not torch.allclose(student, dense.hidden_states, atol=1e-4)) == prunes
