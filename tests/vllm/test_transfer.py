"""One engine reads prompts, another answers from its pages."""

import socket

import pytest

from tests.vllm.conftest import LENGTHS, NEW, answers_of, ask, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")
pytest.importorskip("nixl", reason="bin/setup-vllm installs it")


def test_an_engine_answers_from_pages_of_another(checkpoint):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": port, "VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"}
    nixl = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    producer, consumer = (
        ask(checkpoint, new=new, kv_transfer_config={**nixl, "kv_role": f"kv_{role}"})
        for role, new in (("producer", 3), ("consumer", NEW))  # one token would do
    )
    handed_over = [{"do_remote_decode": True, "do_remote_prefill": False}] * len(LENGTHS)
    runs = {"first": {**producer, "transfers": handed_over, "then": consumer}}
    first, said = run_engines(runs, UCX_TLS="tcp,self,sm", **channel).values()
    wanted = answers_of(checkpoint)
    assert first["answers"] == [[answer[:3] for answer in wanted]]
    assert said["answers"] == [wanted]
    assert said["pulled"] == sum(LENGTHS)
