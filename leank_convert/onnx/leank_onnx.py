"""Generate text with a model exported by leank-convert; needs numpy, onnxruntime and tokenizers.

    python leank_onnx.py FOLDER "Why is the sky blue?"

    model = LeanKOnnx("FOLDER", threads=2)
    answers = model.generate(["Why is the sky blue?"], max_new_tokens=64)
    print(model.decode(answers[0]))

To be copied into any program, together with `leank_onnx_session.py` and `leank_onnx_cache.py`: `LeanKOnnx` is
the model with its tokenizer and chat template, and `main` the command.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer

sys.dont_write_bytecode |= __name__ == "__main__"  # the command leaves its folder as it is
if __package__:  # that of a program which has these files
    from .leank_onnx_cache import MODEL_FILE, Description, LeanKOnnxError, read_object, require
    from .leank_onnx_session import DEFAULT_PROMPT_CHUNK, Rows, Session, TokenIds, load_graph
else:
    from leank_onnx_cache import MODEL_FILE, Description, LeanKOnnxError, read_object, require  # type: ignore
    from leank_onnx_session import DEFAULT_PROMPT_CHUNK, Rows, Session, TokenIds, load_graph  # type: ignore

_MAX_PROMPT = 1 << 24  # characters of standard input, more than any context has room for

__all__ = ["LeanKOnnx", "LeanKOnnxError", "Session"]


class LeanKOnnx:
    """An exported model.

    Attributes:
        description: Its shapes, windows and buckets.
        graph: Its graph, a session of onnxruntime.
        tokenizer: Its tokenizer; None where the folder has no tokenizer.json.
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        """Load a folder that `leank-convert export-onnx` wrote.

        Args:
            folder: The folder.
            threads: Threads that share a product of matrices; None for onnxruntime's choice.

        Raises:
            LeanKOnnxError: If a file is missing, or the graph is not the one that is described.
        """
        self.folder = Path(folder)
        self.description = Description(self.folder)
        self.description.check_graph()
        self.graph = load_graph(self.folder / MODEL_FILE, threads)
        self.tokenizer: Tokenizer | None = None
        if (path := self.folder / "tokenizer.json").is_file():
            try:
                self.tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers' errors have no class of their own
                raise LeanKOnnxError(f"`{path}` cannot be read: {error}; copy it again") from None
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        Raises:
            LeanKOnnxError: If the model has no tokenizer, or the text holds bytes that are no characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LeanKOnnxError(
                f"the text is not UTF-8: {text[error.start : error.end]!a} at character {error.start}"
            ) from None
        return list(self._tokenizer().encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens))

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, None where it has none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except ValueError as error:
                raise LeanKOnnxError(f"`{file}` is no text: {error}; copy it again") from None
        template = self._tokenizer_config().get("chat_template")
        if isinstance(template, list):
            # Several by name, as older files hold them.
            named = (entry for entry in template if isinstance(entry, dict))
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation that the model is to answer; needs jinja2.

        Args:
            messages: A list of `{"role": "user", "content": "..."}` and so on.

        Raises:
            LeanKOnnxError: If the model has no chat template, it fails, or jinja2 is not installed.
        """
        require(isinstance(messages, list | tuple), "messages is no list: pass one of role and content")
        template = self.chat_template
        if template is None:
            raise LeanKOnnxError(f"`{self.folder}` has no chat template: pass plain text, or tokens")
        try:
            # Older files write a token with its properties.
            tokens = {
                name: token["content"] if isinstance(token, dict) else token
                for name, token in self._tokenizer_config().items()
                if name in ("bos_token", "eos_token", "pad_token", "unk_token") and token is not None
            }
            text = _render(
                template,
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **tokens,
            )
        except LeanKOnnxError:
            raise
        except Exception as error:  # a template may do what any program may
            raise LeanKOnnxError(f"the chat template of `{self.folder}` failed: {error}") from None
        return self.encode(text, add_special_tokens=False)

    def start(self) -> Session:
        """Return an empty session."""
        return Session(self)

    def generate(self, prompts: Rows, **options: Any) -> list[list[int]]:
        """Answer prompts of any lengths at once and return the new tokens of each.

        Args:
            prompts: Texts or tokens.
            options: As for `Session.generate`.

        Raises:
            LeanKOnnxError: If an argument cannot be.
        """
        return self.start().generate(prompts, **options)

    def token_rows(self, prompts: Rows, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of texts; tokens stay as they are.

        Raises:
            LeanKOnnxError: If it is no list, or a token is none of the vocabulary.
        """
        is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | dict)
        require(is_list, "prompts is no list: pass a list of them")
        rows, size = [], self.description.vocab_size
        given: Sequence[str | TokenIds] = prompts
        for number, prompt in enumerate(given):
            if isinstance(prompt, str):
                row = self.encode(prompt, add_special_tokens)
            else:
                try:
                    row = [index(token) for token in prompt]
                except TypeError:
                    raise LeanKOnnxError(
                        f"prompts[{number}] is {prompt!r:.60}: pass a text, or a list of whole numbers"
                    ) from None
            for token in row:
                require(
                    0 <= token < size,
                    f"prompts[{number}] has token {token}: the vocabulary is 0 to {size - 1}",
                )
            rows.append(row)
        return rows

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise LeanKOnnxError(f"`{self.folder}` has no tokenizer.json: pass tokens instead of text")
        return self.tokenizer

    def _tokenizer_config(self) -> dict[str, Any]:
        file = self.folder / "tokenizer_config.json"
        return read_object(file, "copy it again") if file.is_file() else {}


def _render(template: str, **variables: Any) -> str:
    """Render a chat template as transformers does."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise LeanKOnnxError(
            "a chat template needs jinja2, which is not installed: `pip install jinja2`, or pass plain text "
            "(--plain), or tokens"
        ) from None

    class Generation(Extension):
        # Marks for training what the model says; in a prompt its content stands by itself.
        tags = {"generation"}  # noqa: RUF012, as its base declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)

    def refuse(message: str) -> None:
        raise LeanKOnnxError(f"the chat template says: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(template).render(**variables)


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as everything else is told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message:.300}\nhint: see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one prompt on the command line, as it is made, and return the exit code."""
    parser = _Parser(description="Answer a prompt with a model that leank-convert exported.")
    parser.add_argument("folder", help="what `leank-convert export-onnx` wrote")
    parser.add_argument("prompt", help="text of the user; - reads standard input")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--temperature", type=float, help="with --sample")
    parser.add_argument("--top-p", type=float, help="with --sample")
    parser.add_argument("--seed", type=int, help="with --sample")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--prompt-chunk", type=int, default=DEFAULT_PROMPT_CHUNK, help="tokens read at a time"
    )
    parser.add_argument("--plain", action="store_true", help="pass the prompt without the chat template")
    given = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may say what the terminal's encoding has no bytes for.
        sys.stdout.reconfigure(errors="replace")
    try:
        _answer(given)
    except (LeanKOnnxError, MemoryError) as error:
        sys.stderr.write(f"error: {str(error) or 'memory does not suffice'}\n")
        return 2
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    except OSError as error:
        if error.filename is None:  # standard output's: what is still buffered must not fail when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever reads has enough
            return 141  # as the signal would
        file = str(error.filename or "standard input or output")
        sys.stderr.write(f"error: `{file:.200}`: {error.strerror}\n")
        return 2
    return 0


def _answer(given: argparse.Namespace) -> None:
    model = LeanKOnnx(given.folder, given.threads)
    prompt = _read_standard_input() if given.prompt == "-" else given.prompt
    if given.plain or model.chat_template is None:
        ids = model.encode(prompt)
    else:
        ids = model.encode_chat([{"role": "user", "content": prompt}])
    known, most = model.description.max_position_embeddings, len(ids) + given.max_new_tokens
    require(
        given.max_new_tokens <= known,
        f"max_new_tokens is {given.max_new_tokens}: the model's max_position_embeddings is {known}, pass no "
        "more",
    )
    if most > known:
        sys.stderr.write(
            f"note: prompt and answer may have {most} tokens, the model's max_position_embeddings is "
            f"{known}: what lies beyond may make no sense\n"
        )
    answer: list[int] = []
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        sys.stdout.write(text[len(shown) :])
        sys.stdout.flush()
        shown = text

    def show_token(_: int, token: int) -> None:
        answer.append(token)
        text = model.decode(answer)
        # Half of a character decodes to U+FFFD: wait for the other half.
        if not text.endswith("\ufffd"):
            show(text)

    model.generate(
        [ids],
        max_new_tokens=given.max_new_tokens,
        do_sample=given.sample,
        temperature=given.temperature,
        top_p=given.top_p,
        seed=given.seed,
        prompt_chunk=given.prompt_chunk,
        streamer=show_token,
    )
    show(model.decode(answer) + "\n")  # with a half character, where the answer ends in one


def _read_standard_input() -> str:
    require(sys.stdin is not None, "standard input is closed: pass the prompt as an argument")
    try:
        text = sys.stdin.read(_MAX_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise LeanKOnnxError(f"standard input is no text: {error}") from None
    require(len(text) <= _MAX_PROMPT, f"standard input has more than {_MAX_PROMPT} characters: pass fewer")
    return text


if __name__ == "__main__":
    sys.exit(main())
