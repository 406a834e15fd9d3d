"""YAML as recipes hold it: one document of mappings, lists and plain values, within bounds.

Anchors are refused, as a few of them can stand for gigabytes, and so are tags: a recipe needs neither.
Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Any, NoReturn

import yaml

from leank_convert.errors import cut, shorten

MAX_BYTES = 1 << 18  # PyYAML takes a second for them
MAX_DEPTH = 20
_MAX_DIGITS = 40  # a number's; with more of them reading it takes time, and no key wants one
_PLAIN = ("null", "bool", "int", "float")  # dates and merge keys stay text


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without what a recipe has no use for."""

    yaml_implicit_resolvers = {  # noqa: RUF012, as its base declares it
        first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] in _PLAIN]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            _refuse(event, f"`{sign}{shorten(event.anchor)}`: anchors are not read here; write the value out")
        if getattr(event, "tag", None) is not None:
            _refuse(event, f"tag `{shorten(event.tag)}`: tags are not read here; write the value alone")
        if self._depth == MAX_DEPTH:
            _refuse(event, f"it is nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str | int] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if type(key) not in (str, int):
                _refuse(key_node, f"key `{cut(key)}` is no text; put it in quotes")
            if key in seen:  # PyYAML by itself lets the last of equal keys win in silence
                _refuse(key_node, f"key `{shorten(str(key))}` is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        if len(node.value) > _MAX_DIGITS:
            _refuse(node, f"a number of {len(node.value)} digits")
        try:
            read = self.construct_yaml_int if node.tag.endswith("int") else self.construct_yaml_float
            number: float = read(node)
        except ValueError:
            _refuse(node, f"`{node.value}` is no number; text like it stands in quotes")
        return number


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def parse_yaml(text: str) -> object:
    """Read a document.

    Raises:
        ValueError: If it is not YAML, or more of it than a recipe holds; in one sentence, with the line.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 10} KB, which no recipe is")
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: character {cut(text[error.position])} is not allowed") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{place}{shorten(problem, 200)}") from error
    except (ValueError, OverflowError) as error:
        raise ValueError("an escape stands for no character, as `\\UFFFFFFFF` would") from error


def _refuse(place: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
