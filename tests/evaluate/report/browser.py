"""A headless Chromium on a page, without a driver: another page frames it, measures, and is dumped.

The frame is as wide as asked, so that the page's media queries see a phone or a desk. The framed
page has no script of its own and cannot run any; the framing one does.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_FRAME = """<!DOCTYPE html><meta charset="utf-8"><title>frame</title><pre id="found"></pre><script>
const frame = document.createElement("iframe");
frame.style = "border:0;width:%(width)dpx;height:800px";
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const measure = (node) => {
    const box = node.getBoundingClientRect();
    return [Math.round(box.left), Math.round(box.right), Math.round(box.height)];
  };
  const shown = (nodes) => [...nodes].map(measure);
  document.getElementById("found").textContent = JSON.stringify({
    width: root.clientWidth,
    scrollWidth: root.scrollWidth,
    drawings: shown(page.querySelectorAll("figure svg")),
    texts: [...page.querySelectorAll("figure svg text")].map(
      (node) => Math.round(10 * node.getBoundingClientRect().height) / 10),
    figures: [...page.querySelectorAll("figure")].map((figure) => ({
      id: figure.id,
      caption: figure.querySelector("figcaption").innerText,
      rows: figure.querySelectorAll("details tbody tr").length,
      labels: [...figure.querySelectorAll("svg text")].map((text) => text.textContent),
    })),
    outside: [...page.querySelectorAll("body *")].filter((node) => {
      const box = node.getBoundingClientRect();
      return box.right > root.clientWidth + 1 && !node.closest(".scroll") && !node.closest("svg");
    }).map((node) => node.tagName),
    scrollable: [...page.querySelectorAll(".scroll")].every(
      (node) => getComputedStyle(node).overflowX === "auto"),
    background: getComputedStyle(page.body).backgroundColor,
    columns: getComputedStyle(page.querySelector("#load")).gridTemplateColumns.split(" ").length,
  });
};
frame.srcdoc = %(page)s;
document.body.append(frame);
</script>
"""


def find() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def measure(browser: str, page: Path, folder: Path, *, width: int, **settings: str) -> Any:
    """Renders a page that wide; what the framing page found, and `messages` of the console."""
    framed = folder / "frame.html"
    text = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/")
    framed.write_text(_FRAME % {"width": width, "page": text}, encoding="utf-8")
    done = run(
        browser,
        folder,
        "--enable-logging=stderr",
        "--hide-scrollbars",
        "--virtual-time-budget=5000",
        "--dump-dom",
        *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items()),
        framed.as_uri(),
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None and found[1], done.stderr
    measured = json.loads(html.unescape(found[1]))
    measured["messages"] = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return measured


def run(browser: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the browser with a profile of its own."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",  # which root cannot have
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
