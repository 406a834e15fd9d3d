"""Small model folders as a hub would hold them, and tokenizers of the awkward kinds, trained on the spot."""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from leank_convert.data import SampleSource
from leank_convert.data.grammar import draw_sentence
from leank_convert.mask import ChannelMask
from leank_convert.onnx import export_onnx
from leank_convert.train.model import find_model, load_model
from tests.checks import short_recipe
from tests.tiny_families import random_mask, tiny_folder, tiny_model

FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
}
PRINTED = [chr(code) for code in range(32, 127)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def learn_pieces(tokenizer, num_pieces, alphabet, texts=(), **options):
    """Merge characters by what is frequent in sentences, numbers and the texts."""
    rng = random.Random(0)
    corpus = [draw_sentence(rng) for _ in range(300)] + [f"{rng.getrandbits(64):x}" for _ in range(50)]
    options |= {"vocab_size": num_pieces, "special_tokens": SPECIAL, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator([*corpus, *texts], trainers.BpeTrainer(**options))


def wrap(tokenizer, template):
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=10**6, **special)
    fast.chat_template = template
    return fast


def byte_level():
    """GPT-2's kind: leading spaces belong to words, digits merge freely."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learn_pieces(tokenizer, 600, pre_tokenizers.ByteLevel.alphabet())
    return wrap(tokenizer, PLAIN_TEMPLATE)


def metaspace():
    """SentencePiece's kind: a space is put before every text, and merges run across words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    learn_pieces(tokenizer, 1000, PRINTED)
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
    ends = ["7.\n\nWhich code opens locker ", ".\n\nWhich parcels", ".\n\nWhat did telegram number 3 read?"]
    learn_pieces(tokenizer, 800, ["\n", *PRINTED], ends * 200, max_token_length=24)
    return wrap(tokenizer, PLAIN_TEMPLATE)


TOKENIZERS = {make.__name__: make for make in (byte_level, metaspace, with_bos, trailing_text, unsplit)}


@pytest.fixture
def source_model(tmp_path):
    """Write a random model of one family: 3 layers, 8 query heads, 4 KV heads, hidden size 32."""

    def build(family="llama", *, dtype="float32", shards=True, **config):
        sizes = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
        tokens = {"bos_token_id": 1, "eos_token_id": 2}
        options = {**sizes, **tokens, **FAMILIES.get(family, {}), **config}
        model = tiny_model(family, seed=5, std=0.3, dtype=getattr(torch, dtype), **options)
        folder = tmp_path / f"{family}-model"
        model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text('{"added": 1}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        return folder

    return build


@pytest.fixture
def source(source_model):
    """Its Llama, in several shards."""
    return source_model()


@pytest.fixture
def out(tmp_path):
    """Where a test writes to: nothing is there yet."""
    return tmp_path / "out"


@pytest.fixture(scope="session")
def retriever_onnx(retriever_centred):
    """An ONNX folder of its checkpoint, with windows of 3, 6 and 4 tokens."""
    return retriever_centred / "onnx"


@pytest.fixture(scope="session")
def retriever_half(once_per_run, retriever_folder, retriever_mean):
    """One in float16 of the model itself and its mask."""
    return once_per_run(
        "retriever_half",
        lambda out: export_onnx(retriever_folder, retriever_mean, out, dtype="float16"),
    )


@pytest.fixture(scope="session")
def retriever_int8(once_per_run, testbed_tokenizer):
    """An ONNX folder of one such layer under another rope, its weights quantized, the rest in float16."""
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    options = {"dtype": "float16", "weights": "int8", "config_overrides": rope}

    def make(out):
        source = tiny_folder(out / "source", testbed_tokenizer, num_hidden_layers=1)
        export_onnx(source, ChannelMask(random_mask([[7, 0]])), out / "onnx", **options)

    return once_per_run("retriever_int8", make) / "onnx"


@pytest.fixture
def load(retriever_folder):
    """A model as training loads it, and the samples of a recipe: `load(folder, **changes)`."""

    def run(folder=retriever_folder, **changes):
        recipe = short_recipe(**changes)
        loaded = load_model(find_model(folder, recipe), recipe, torch.device("cpu"))
        return loaded, SampleSource(loaded.tokenizer, recipe.data, recipe.seed)

    return run


@pytest.fixture(scope="session", params=TOKENIZERS)
def tokenizer(request):
    """Each kind of tokenizer; not to be changed."""
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="session")
def byte_level_tokenizer():
    """GPT-2's kind of tokenizer; not to be changed."""
    return byte_level()


@pytest.fixture
def plain_tokenizer():
    """GPT-2's kind of tokenizer, to change at will."""
    return byte_level()
