"""Tokenizers of the awkward kinds, small and trained on the spot."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from leank_convert.data.grammar import draw_sentence
from leank_convert.recipe import DataSection

SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def corpus():
    rng = random.Random(0)
    return [draw_sentence(rng) for _ in range(300)] + [f"{rng.getrandbits(64):x}" for _ in range(50)]


def wrap(tokenizer, template):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=10**6,
    )
    fast.chat_template = template
    return fast


def byte_level():
    """GPT-2's kind: leading spaces belong to words, digits merge freely."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    return wrap(tokenizer, PLAIN_TEMPLATE)


def metaspace():
    """SentencePiece's kind: a space is put before every text, and merges run across words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    alphabet = [chr(code) for code in range(32, 127)]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    # What no piece covers, such as a newline, is spelt out in bytes.
    described = json.loads(tokenizer.to_str())
    pieces = described["model"]["vocab"]
    for byte in range(256):
        pieces[f"<0x{byte:02X}>"] = len(pieces)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer, PLAIN_TEMPLATE)


def with_bos():
    """Llama 3's kind: the template writes the BOS, and the tokenizer adds one too where it is asked to."""
    fast = byte_level()
    bos = fast.convert_tokens_to_ids("<s>")
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    fast.chat_template = "{{ bos_token }}" + PLAIN_TEMPLATE
    return fast


def trailing_text():
    """A template that trims the user's words and goes on after them."""
    fast = byte_level()
    fast.chat_template = (
        "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}\n\n(Be brief.){% endfor %}"
        "{% if add_generation_prompt %}</s><|turn|>assistant{% endif %}"
    )
    return fast


def unsplit():
    """Merges over words, lines and paragraphs: a token may span document and question."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    alphabet = ["\n", *(chr(code) for code in range(32, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=SPECIAL, initial_alphabet=alphabet, max_token_length=24
    )
    ends = ["7.\n\nWhich code opens locker ", ".\n\nWhich parcels", ".\n\nWhat did telegram number 3 read?"]
    tokenizer.train_from_iterator([*corpus(), *ends * 200], trainer)
    return wrap(tokenizer, PLAIN_TEMPLATE)


TOKENIZERS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "with_bos": with_bos,
    "trailing_text": trailing_text,
    "unsplit": unsplit,
}


@pytest.fixture(scope="session", params=TOKENIZERS)
def tokenizer(request):
    """Each kind; not to be changed."""
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="session")
def unsplit_tokenizer():
    """The kind that knows no borders; not to be changed."""
    return unsplit()


@pytest.fixture
def plain_tokenizer():
    """GPT-2's kind, to change at will."""
    return byte_level()


@pytest.fixture(scope="session")
def section():
    """Makes a recipe's data section of short samples."""

    def make(**values):
        return DataSection(**{"min_length": 2000, "max_length": 4000, **values})

    return make
