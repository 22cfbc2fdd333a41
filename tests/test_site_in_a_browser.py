"""The documentation's site in a real browser, headless Chromium: no page is wider than a phone or a desktop's window,
no picture is missing or without words for who cannot see it.

Chromium is no package of the environment: Debian's `chromium` does. Without it these tests are skipped.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path (Debian: apt-get install chromium)"),
]
# pixels of a page: a small phone, a desktop
WIDTHS = (360, 1280)
# nothing smaller is read with ease on a phone
LEAST_FONT = 12
# a picture that a phone shows narrower has letters that nobody reads
LEAST_PICTURE = 250
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
# Each page in a frame of each width, one after the other; what was found is left in the document.
CHECK = """<!doctype html><meta charset="utf-8"><title>check</title><pre id="found">unfinished</pre><script>
const pages = PAGES, widths = WIDTHS, found = [];
const settled = () => new Promise(done => setTimeout(done, 300));
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
  await settled();
  const inside = frame.contentDocument, root = inside.documentElement;
  const text = inside.querySelector("article p");
  found.push({
    page, width, over: root.scrollWidth - root.clientWidth,
    font: text ? parseFloat(frame.contentWindow.getComputedStyle(text).fontSize) : null,
    pictures: [...inside.querySelectorAll("article img")].map(each => ({
      from: each.getAttribute("src"), words: each.alt, loaded: each.naturalWidth > 0,
      shown: each.getBoundingClientRect().width,
    })),
  });
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await look(page, width);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def looked_at(site: Path, profile: Path) -> list[dict[str, Any]]:
    """What Chromium finds on every page of a built site."""
    pages = sorted(str(path.relative_to(site).parent) + "/" for path in site.rglob("index.html"))
    check = CHECK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "check.html").write_text(check, encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        # time jumps to the next timer, so that a wait costs none
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET]
        command += [f"--user-data-dir={profile}", "--window-size=1400,1000", "--virtual-time-budget=600000"]
        command += ["--dump-dom", f"http://127.0.0.1:{server.server_port}/check.html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    finally:
        server.shutdown()
        server.server_close()
    shown = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown and shown[1] != "unfinished", done.stderr
    return list(json.loads(html.unescape(shown[1])))


def complaints(found: list[dict[str, Any]]) -> Iterator[str]:
    """What a reader would miss or stumble over."""
    for each in found:
        where = f"{each['page']} at {each['width']} pixels"
        if each["over"] > 0:
            yield f"{where} is {each['over']} pixels too wide"
        if each["font"] is not None and each["font"] < LEAST_FONT:
            yield f"{where} has letters of {each['font']} pixels"
        for picture in each["pictures"]:
            if not picture["loaded"]:
                yield f"{where} misses {picture['from']}"
            if not picture["words"]:
                yield f"{where} has no words for {picture['from']}"
            if picture["shown"] < LEAST_PICTURE:
                yield f"{where} shows {picture['from']} {picture['shown']} pixels wide"


def built(folder: Path, config: str) -> Path:
    """The site of the pages in a folder's docs/. config: of mkdocs."""
    (folder / ".mkdocs.yml").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(folder / ".mkdocs.yml")]
    subprocess.run([*command, "-d", str(folder / "site")], check=True, capture_output=True)
    return folder / "site"


def test_every_page_fits_a_phone_and_a_desktop(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "docs", tmp_path / "docs")
    config = (root / ".mkdocs.yml").read_text(encoding="utf-8")
    found = looked_at(built(tmp_path, config), tmp_path / "profile")
    assert {each["page"] for each in found} >= {f"{page.stem}/" for page in (root / "docs").glob("*.md")} - {"index/"}
    assert list(complaints(found)) == []


def test_what_does_not_fit_or_is_missing_is_found(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("results", "reproduction"))
    wide = '# Glossary\n\n<div style="width: 500px">wide</div>\n\n![](gone.png)\n'
    (tmp_path / "docs/glossary.md").write_text(wide, encoding="utf-8")
    for page in (tmp_path / "docs").glob("*.md"):
        if page.stem not in ("index", "glossary"):
            page.write_text("# A page\n", encoding="utf-8")
    config = (root / ".mkdocs.yml").read_text(encoding="utf-8").replace("strict: true", "strict: false")
    found = looked_at(built(tmp_path, config), tmp_path / "profile")
    said = [each for each in complaints(found) if each.startswith("glossary/")]
    assert any("at 360 pixels is" in each for each in said) and not any("at 1280 pixels is" in each for each in said)
    assert sum("misses" in each for each in said) == sum("no words" in each for each in said) == len(WIDTHS)
