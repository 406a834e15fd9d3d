"""Decoding on a CUDA device by plain torch: the CPU's tokens, and no decode step waits for the device."""

import pytest
import torch

from leank_convert.families import ARCHITECTURES
from tests.runtime.on_gpu import MASK_WIDTHS, no_waiting
from tests.runtime.tiny_inputs import ids, padded
from tests.tiny_families import OPTIONS

pytestmark = pytest.mark.gpu

GREEDY = {"do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30, "pad_token_id": 0}
MIXED = ("gpt_oss", "gemma3_text")


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(3, 50), "attention_mask": padded(50, 22, rows=3)}


ROUNDED = [
    {"kv_dtype": kv_dtype, **beams} for kv_dtype in ("fp8", "int4") for beams in ({}, {"num_beams": 3})
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, options) for family in ("llama", *MIXED) for options in ({}, {"num_beams": 3})),
        *(("llama", options) for options in ({"prefill_chunk_size": 16}, *ROUNDED)),
    ],
    ids=str,
)
def test_it_generates_what_the_cpu_generates(family, options, model_pair):
    pair = model_pair(MASK_WIDTHS, ARCHITECTURES[family].stem, head_dim=64, **OPTIONS.get(family, {}))
    model = pair.leank.double()
    expected = model.generate(**batch(), **GREEDY, **options)
    prompt = {name: tensor.cuda() for name, tensor in batch().items()}
    assert model.cuda().generate(**prompt, **GREEDY, **options).tolist() == expected.tolist()


# PyTorch calls the mode a prototype when it is switched on.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int4"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
def test_a_decode_step_never_waits_for_the_device(is_padded, kv_dtype, model_pair):
    model = model_pair(MASK_WIDTHS, head_dim=64).leank.cuda()
    prompt = {name: tensor.cuda() for name, tensor in batch().items()}
    mask = prompt["attention_mask"] if is_padded else None
    token = torch.full((3, 1), 7, device="cuda")
    position = torch.full((3, 1), 50, device="cuda")
    with torch.no_grad():
        cache = model.build_cache(kv_dtype=kv_dtype)
        model(prompt["input_ids"], attention_mask=mask, cache=cache)
        with no_waiting():
            for step in range(30):
                mask = None if mask is None else torch.cat([mask, torch.ones_like(token)], dim=1)
                model(token, attention_mask=mask, position_ids=position + step, cache=cache)
    assert cache.get_seq_length() == 80
