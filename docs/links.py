"""Checking the links of a built site: every file and every place that they name exists."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LINKS = {"a": "href", "img": "src", "link": "href", "script": "src"}


class _Page(HTMLParser):
    """The links of a page and the places in it that a link can name."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        link = values.get(_LINKS.get(tag, ""))
        if link:
            self.links.append(link)
        self.places |= {value for value in (values.get("id"), values.get("name")) if value}


@cache
def _read(path: Path) -> _Page:
    return _Page(path.read_text())


def broken_links(site: Path) -> list[str]:
    """Return the links inside a site that lead nowhere, each with the page that has it.

    Links to other servers are not followed.
    """
    _read.cache_clear()
    return [
        f"{path.relative_to(site)}: {link}"
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"  # its links begin at the root of the server
        for link in _read(path).links
        if _is_broken(path, link)
    ]


def _is_broken(page: Path, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return True
    place = unquote(parts.fragment)
    return bool(place) and target.suffix == ".html" and place not in _read(target).places
