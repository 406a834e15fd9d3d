"""One engine reads prompts, another answers from its pages."""

import json
from types import SimpleNamespace

import pytest
import torch

from leank_convert._runtime.windows_leank import Windows
from tests.vllm.conftest import (
    LENGTHS,
    NEAR,
    NEW,
    NGRAMS,
    SIZES,
    answers_of,
    ask,
    gaps_of,
    prompts_of,
    run_engines,
)

pytest.importorskip("vllm", reason="bin/test-vllm runs it")
pytest.importorskip("nixl", reason="bin/setup-vllm installs it")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from leank_convert.vllm.first_token import KEY, FirstToken, given_token
from leank_convert.vllm.rule import pruned_tokens_of


def hand_over(folder, *, lengths=LENGTHS, then_prompts=None, **consumer):
    """What both engines say, one of which reads prompts and the other answers; maybe other prompts."""
    nixl = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    first, second = (
        ask(folder, lengths=lengths, **options, kv_transfer_config={**nixl, "kv_role": f"kv_{role}"})
        for role, options in (("producer", {"new": 3}), ("consumer", consumer))  # one token would do
    )
    second["prompts"] = then_prompts or second["prompts"]
    handed_over = [{"do_remote_decode": True, "do_remote_prefill": False}] * len(lengths)
    runs = {"first": {**first, "transfers": handed_over, "then": second}}
    return run_engines(runs, UCX_TLS="tcp,self,sm", VLLM_NIXL_SIDE_CHANNEL_HOST="localhost").values()


def test_pages_of_another_prompt_are_not_taken(checkpoint):
    """As where a client sends several prompts in one request: one's parameters come back for all."""
    prompts = prompts_of(checkpoint, (500, 500))[::-1]
    _, said = hand_over(checkpoint, lengths=(500, 500), new=NEW, then_prompts=prompts)
    assert said["answers"] == [answers_of(checkpoint, lengths=(500, 500))[::-1]]
    assert said["moved"] == said["pulled"] == 0


def bytes_of(said, *, whole):
    """Bytes of all prompts' pages, or of those that a prompt's last token sees as if it were the answer's."""
    (_, kept), (_, window) = said["groups"]
    count = 0
    for length in LENGTHS:
        sizes = Windows(**SIZES)
        pruned = 0 if whole else pruned_tokens_of(length, length - 1, sizes)
        first = -(-sizes.sink_size // window)
        count += -(-length // kept) + -(-length // window)
        count -= max((sizes.sink_size + pruned) // window - first, 0)
    return count * said["page_bytes"]


def test_an_engine_answers_from_pages_of_another(checkpoint):
    # Too few blocks for all answers at once: those that are preempted are read again by the second engine.
    first, said = hand_over(checkpoint, new=NEW, num_gpu_blocks_override=76)
    wanted = answers_of(checkpoint)
    assert first["answers"] == [[answer[:3] for answer in wanted]]
    assert said["answers"] == [wanted]
    assert said["pulled"] == sum(LENGTHS)
    assert said["preemptions"][0] > 0
    assert said["moved"] == bytes_of(said, whole=False) < 0.9 * bytes_of(said, whole=True)


def test_pages_in_fp8_give_the_answers_of_one_engine(in_fp8):
    _, said = hand_over(in_fp8, new=NEW)
    # Of a short prompt all pages are seen, so its last token is read again, from what was rounded.
    is_long = [length > 150 for length in LENGTHS]
    assert gaps_of(in_fp8, said["answers"][0])[is_long].max() < NEAR
    assert said["moved"] == bytes_of(said, whole=False)


@pytest.mark.parametrize("asked", [{"scores": True}, {"speculative_config": NGRAMS}], ids=json.dumps)
def test_all_pages_move_where_the_first_token_is_found_anew(asked, checkpoint):
    _, said = hand_over(checkpoint, new=NEW, **asked)
    assert said["answers"] == [answers_of(checkpoint)]
    assert said["moved"] == bytes_of(said, whole=True)


def given(token, **options):
    params = {KEY: token, "remote_block_ids": [[1], [1]]}
    return SamplingParams(extra_args={"kv_transfer_params": params}, **options)


def chosen(logits):
    """Of each row the only token that is left; None where more are."""
    left = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    return [own[0] if len(own) == 1 else None for own in left]


def test_the_given_token_begins_an_answer_and_no_more():
    """As the model runner on CPUs tells of requests, by rows."""
    processor, answers = FirstToken(None, torch.device("cpu"), False), [[], [], [7], []]
    asked = [given(3), given(4, logprobs=1), given(5), given(100)]  # the third is answered again
    added = [(row, params, None, answers[row]) for row, params in enumerate(asked)]
    processor.update_state(BatchUpdate(4, removed=[], added=added, moved=[]))
    assert chosen(processor.apply(torch.zeros(4, 10))) == [3, None, None, None]
    answers[0].append(3)
    processor.update_state(None)
    assert chosen(processor.apply(torch.zeros(4, 10))) == [None] * 4


@pytest.mark.parametrize("token", ["7", True, 7.0, None, [7]])
def test_what_is_no_token_is_none(token):
    assert given_token(given(7)) == 7 and given_token(given(token)) is None
    alone = SamplingParams(extra_args={"kv_transfer_params": {KEY: 7}})  # no page came along
    assert given_token(alone) is None


def test_each_of_several_answers_begins_with_a_token_of_its_own():
    one, several = given(7), given(7, n=2)
    for params in (one, several):
        FirstToken.validate_params(params)
    assert (given_token(one), given_token(several)) == (7, None)


def test_the_given_token_begins_an_answer_in_slots_too():
    """As the newer model runner tells of them."""
    lengths = torch.tensor([0, 20, 30, 40], dtype=torch.int32)
    processor = FirstToken(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths.numpy())))
    asked = {1: given(3), 2: SamplingParams(), 3: given(4)}
    assert [processor.add_request(slot, params) for slot, params in asked.items()] == [True, False, True]
    slots = torch.tensor([3, 1, 2])

    def apply(*seen):
        context = SimpleNamespace(idx_mapping_np=slots.numpy(), seq_lens_upper_bound_np=seen)
        return chosen(processor.apply(torch.zeros(3, 10), context))

    assert apply(40, 20, 30) == [4, 3, None]
    assert apply(41, 20, 31) == [None, 3, None]
    assert not processor.add_request(1, SamplingParams())  # whose slot it was
    assert apply(40, 20, 30) == [4, None, None]
