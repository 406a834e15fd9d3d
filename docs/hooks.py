"""mkdocs hook: files outside docs/.

In the repository a link from a page to such a file opens it. The site does not hold the file, so there the
link becomes its path. The changelog's page becomes the changelog itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Replace `[text](../path)` by the text and the path, and the changelog's page by the changelog.

    Raises:
        PluginError: If there is no such file.
    """
    if page.file.src_uri == "changelog.md":
        return (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    def replace(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (_ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_uri}: `{path}` does not exist")
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)
