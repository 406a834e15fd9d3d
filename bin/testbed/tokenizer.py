"""The shipped model's tokenizer: one token a word, as a fast tokenizer with its chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from leank_convert.testbed.tasks import BEGIN, END, IDS, MAX_TOKENS, PAD, SPECIAL_TOKENS, UNKNOWN

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: words are separated by spaces, ids are places in `VOCABULARY`."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (BEGIN, END, PAD, UNKNOWN)],
        padding_side="left",
        model_max_length=MAX_TOKENS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
