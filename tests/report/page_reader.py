"""Reads a page as a browser would: elements, and the text inside each."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """`spans`: (classes, text) of the answer's tokens; `scripts`, `styles`: contents; `tags`: all (tag, attributes)."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.words = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag == "span" and self._is_inside("text"):
            self.spans.append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag = self._open[-1][0]
        if tag == "script":
            self.scripts[-1] += data
        elif tag == "span" and self._is_inside("text"):
            self.spans[-1] = (self.spans[-1][0], self.spans[-1][1] + data)
        elif tag != "style":
            self.words += data

    def _is_inside(self, name: str) -> bool:
        return any(attributes.get("id") == name for _, attributes in self._open)

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))

    @property
    def answer(self) -> str:
        return "".join(text for _, text in self.spans)
