"""Malicious names and values, and the content that a page must not have because of them."""

from __future__ import annotations

from html.parser import HTMLParser

from tests.effort import IS_THOROUGH

_MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "</textarea></title><svg onload=alert(1)>",
    "{{ 7 * 191 }}{% include 'signin.html' %}",
]
_PATHS = ["../../etc/passwd", "a/b%2F?c=d&e#f"]
_CELLS = ["\u202edrawkcab\x00\x1b[31m", "=cmd|' /C calc'!A0"]
HOSTILE = [
    *(text for kind in (_MARKUP, _PATHS, _CELLS) for text in (kind if IS_THOROUGH else ["".join(kind)])),
    "javascript:alert(1)",
    "x" * 1_500,
]
"""A usual run joins the strings of a kind into one: each of them closes any context that surrounds it."""
ADDRESSES = ("href", "src", "action", "formaction", "data-watch")


class Forms(HTMLParser):
    """The hidden fields of a page, and whatever could run or look as another site wants."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.hidden: dict[str, str] = {}
        self.suspect: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "input" and named.get("type") == "hidden":
            self.hidden[named["name"] or ""] = named.get("value") or ""
        if tag in ("style", "iframe", "object", "embed", "base", "marquee", "img", "b0"):
            self.suspect.append(tag)
        if tag == "script" and not (named.get("src") or "").endswith("/static/page.js"):
            self.suspect.append("script")
        for name, value in attrs:
            runs = name in ADDRESSES and (value or "").strip().lower().startswith("javascript:")
            if name.startswith("on") or name == "style" or runs:
                self.suspect.append(f"{tag} {name}={value}")
