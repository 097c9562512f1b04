"""The site that `make docs` has built into build/site: nothing comes from another host, links lead somewhere, and a
browser shows a page of it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}  # what a browser fetches


class Page(HTMLParser):
    """What a page loads and links to, the names of its headings, and the text of its paragraphs outside code."""

    def __init__(self, path: Path):
        super().__init__()
        self.loaded, self.links, self.names, self.text, self._code, self._open = [], [], set(), [], 0, 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names |= {found["id"]} if found.get("id") else set()
        self._open += tag == "p"
        self._code += tag in ("code", "pre", "script", "style")
        if tag in LOADED and found.get(LOADED[tag]) and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found[LOADED[tag]])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])

    def handle_endtag(self, tag):
        self._open -= tag == "p"
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data):
        if self._open and not self._code:
            self.text.append(data)


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    if not SITE.is_dir():
        pytest.skip("there is no build/site: run make docs")
    return {path: Page(path) for path in sorted(SITE.rglob("*.html"))}


def test_nothing_is_loaded_from_another_host(pages):
    loaded = {(path.name, url) for path, page in pages.items() for url in page.loaded}
    assert loaded
    assert not {(name, url) for name, url in loaded if urlsplit(url).netloc}
    files = {SITE / url.lstrip("/") if url.startswith("/") else path.parent / url for path, url in _loaded(pages)}
    assert not {str(file) for file in files if not file.exists()}
    styles = [path.read_text(encoding="utf-8") for path in SITE.rglob("*.css")]
    assert styles
    assert not [
        found for text in styles for found in re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//[^)\"']+", text)
    ]


def _loaded(pages):
    return [(path, unquote(urlsplit(url).path)) for path, page in pages.items() for url in page.loaded]


def test_links_lead_to_files_and_headings(pages):
    dead = []
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            names = pages[target].names if target in pages else set()
            if not target.exists() or (parts.fragment and target in pages and unquote(parts.fragment) not in names):
                dead.append((path.relative_to(SITE).as_posix(), link))
    assert not dead


def test_all_documents_are_pages_and_have_become_html(pages):
    repository = SITE.parents[1]
    for source in (repository / "docs").rglob("*.md"):
        built = source.with_name("index.md" if source.name == "README.md" else source.name).with_suffix(".html")
        assert SITE / built.relative_to(repository) in pages, source
    for path, page in pages.items():
        raw = re.findall(r"(?:^|\n)(?:- |\|.*\||#+ )[^\n]*|\]\([^)\s]+\)|```", "".join(page.text))
        assert not raw, (path.name, raw[:3])  # a list, table, heading, link or block that stayed text
