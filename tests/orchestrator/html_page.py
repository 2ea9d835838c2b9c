"""Reads a page as a browser would, and fails on tags that are not closed in order."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "line", "br", "path", "circle", "rect", "input"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; text by the id of the element it is in."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.ids: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self._texts: dict[str, str] = {}
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        name = dict(attrs).get("id")
        if name is not None:
            self.ids.append(name)
        if tag not in VOID:
            self._open.append((tag, name))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        for _, name in self._open:
            if name is not None:
                self._texts[name] = self._texts.get(name, "") + data

    def external(self) -> list[tuple[str, str | None]]:
        """Attributes that would load or run something, or lead off the page."""
        leaving = [a for a in self.attributes if a[0] == "href" and not (a[1] or "").startswith("#")]
        loading = ("src", "srcset", "action", "formaction", "data", "poster", "background", "style", "xlink:href")
        return leaving + [a for a in self.attributes if a[0] in loading or a[0].startswith("on")]

    def links(self) -> list[str]:
        """The places on the page that its links lead to."""
        return [value[1:] for key, value in self.attributes if key == "href" and value]

    def text_at(self, name: str, limit: int = 30) -> str:
        """The text of the element with this id, without line breaks."""
        assert name in self.ids, f"nothing has the id {name}"
        return self._texts[name].replace("\n", "")[:limit]
