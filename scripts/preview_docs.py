"""See the staged pages without Quarto: plain pages in _preview/ and, as wide as a desk
and as a phone, a picture of each in _preview/shots/.

    python scripts/preview_docs.py

It shows text, formulas, code, outputs and figures, in the site's style sheet; the
theme, the search and the bars of the site are Quarto's alone. Formulas need KaTeX (`npm
install -g katex`), the pictures a Chromium: on the PATH, or named by the environment
variable CHROME.
"""

import base64
import json
import os
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

from check_docs import (
    CODE,
    FENCE,
    MATH,
    ROOT,
    directives,
    find_katex,
    hidden,
    read_site,
)
from markdown_it import MarkdownIt

STAGED, OUT = ROOT / "_proc", ROOT / "_preview"
WIDTHS, HIGHEST = (1280, 390), 12000  # pixels; Chromium takes no picture much higher
STYLE = """body {
  font: 17px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 820px; padding: 0 12px 80px;
}
nav { font-size: 14px; padding: 8px 0; }
pre { overflow-x: auto; background: #f6f6f6; padding: 8px; font-size: 13.6px; }
code { font-size: .875em; background: #f6f6f6; }
table { border-collapse: collapse; }
td, th {
  border-bottom: 1px solid #ccc; padding: 4px 8px;
  text-align: left; vertical-align: top;
}
figure { margin: 16px 0; text-align: center; }
figcaption { font-size: 14px; }
img { max-width: 100%; height: auto; }
details, .callout { border-left: 4px solid #0d6efd; padding: 2px 12px; margin: 12px 0; }
.katex-display { overflow-x: auto; overflow-y: hidden; }
.katex .tag, .katex .katex-tag { position: static !important; padding-left: 2em; }"""
TYPESET = """const katex = require('katex'); let text = '';
const set = ([tex, displayMode]) =>
  katex.renderToString(tex, {displayMode, throwOnError: false, strict: 'ignore'});
process.stdin.on('data', d => text += d).on('end', () =>
  console.log(JSON.stringify(JSON.parse(text).map(set))));"""
# What is wider than the window although nothing around it scrolls or cuts.
TOO_WIDE = """document.fonts.ready.then(() => {
  const juts = e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let a = e.parentElement; a; a = a.parentElement)
      if (getComputedStyle(a).overflowX != 'visible') return false;
    return true;
  };
  const name = e =>
    e.tagName.toLowerCase() + ' ' + e.textContent.trim().slice(0, 40);
  const all = [...document.body.querySelectorAll('*')];
  const height = Math.ceil(document.body.getBoundingClientRect().height) + 40;
  const wide = document.documentElement.scrollWidth > innerWidth;
  return [height, wide ? all.filter(juts).slice(-3).map(name) : null];
})"""


# --- pages ---


class Preview:
    """Markdown as Quarto reads it, as far as these pages go. Formulas are kept in
    `formulas`, and set all at once when every page is written.
    """

    def __init__(self, pages):
        self.pages, self.formulas, self.parser = (
            {p.path.name: p.html for p in pages},
            [],
            MarkdownIt("commonmark", {"html": True}).enable("table"),
        )

    def markdown(self, text):
        blocks, spans = [], []  # of code, in which nothing else is read

        def keep(m):
            blocks.append(m[0])
            return f"\x02{len(blocks) - 1}\x03"

        def span(m):
            spans.append(f"<code>{escape(m[2].strip())}</code>")
            return f"\x06{len(spans) - 1}\x07"

        def formula(m):
            self.formulas.append((m[1] or m[2], m[1] is not None))
            return f"\x04{len(self.formulas) - 1}\x05"

        text = re.sub(
            "\x02(\\d+)\x03",
            lambda m: blocks[int(m[1])],
            MATH.sub(formula, CODE.sub(span, FENCE.sub(keep, text))),
        )
        text = re.sub(
            r"^::: *\{\.([\w-]+)[^}]*\}",
            lambda m: f'<div class="{"callout" if "callout" in m[1] else m[1]}">\n',
            text,
            flags=re.M,
        )
        text = re.sub(r"^:::$", "\n</div>\n", text, flags=re.M)
        text = re.sub(
            r"!\[([^\]]*)\]\(([^)]*)\)\{fig-alt=\"([^\"]*)\"\}",
            r'<figure><img src="\2" alt="\3"><figcaption>\1</figcaption></figure>',
            text,
        )
        text = re.sub(r"(?<![\w@])@(fig-[\w-]+)", r'<a href="#\1">figure</a>', text)
        html = re.sub(
            "\x06(\\d+)\x07", lambda m: spans[int(m[1])], self.parser.render(text)
        )
        html = re.sub(
            r"<h(\d)>", lambda m: f'<h{m[1]} id="{next(self.anchors, "")}">', html
        )
        return re.sub(
            r'href="([\w-]+\.(?:ipynb|qmd))',
            lambda m: f'href="{self.pages.get(m[1], m[1])}',
            html,
        )

    def cell(self, cell):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            return self.markdown(source)
        if cell["cell_type"] != "code":
            return ""
        found, _ = directives(source)
        if hidden(found):
            return ""
        code = "\n".join(
            line for line in source.split("\n") if not line.startswith("#|")
        ).strip()
        html = (
            f"<pre><code>{escape(code)}</code></pre>"
            if code and found.get("echo") != "false"
            else ""
        )
        if html and found.get("code-fold") == "true":
            summary = found.get("code-summary", "Show the code")
            html = f"<details><summary>{summary}</summary>{html}</details>"
        for output in cell["outputs"]:
            data = {
                kind: "".join(text)
                for kind, text in output.get(
                    "data", {"text/plain": output.get("text", "")}
                ).items()
            }
            picture = next((kind for kind in data if kind.startswith("image/")), None)
            if picture:
                shown = (
                    f'<img alt="{escape(found.get("fig-alt", ""))}"'
                    f' src="data:{picture};base64,{data[picture].strip()}">'
                )
            elif "text/html" in data:
                shown = data["text/html"]
            elif "text/markdown" in data:
                shown = self.markdown(data["text/markdown"])
            else:
                shown = f"<pre>{escape(data.get('text/plain', ''))}</pre>"
            if "fig-cap" in found:
                caption = self.markdown(found["fig-cap"])
                shown = (
                    f'<figure id="{found.get("label", "")}">{shown}'
                    f"<figcaption>{caption}</figcaption></figure>"
                )
            html += f'<div class="cell-output cell-output-display">{shown}</div>'
        return html and f'<div class="cell">{html}</div>'

    def page(self, page):
        self.anchors = iter(page.anchors)
        text = page.path.read_text(encoding="utf-8")
        if page.path.suffix == ".ipynb":
            body = "\n".join(map(self.cell, json.loads(text)["cells"]))
        else:
            body = self.markdown(re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S))
        title, about = page.front.get("title", ""), page.front.get("description", "")
        links = " · ".join(
            f'<a href="{html}">{html.removesuffix(".html")}</a>'
            for html in self.pages.values()
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta'
            ' name="viewport" content="width=device-width,'
            f' initial-scale=1"><title>{escape(title)}</title>'
            '<link rel="stylesheet"'
            f' href="katex/katex.min.css"><style>{STYLE}</style><link rel="stylesheet"'
            ' href="styles.css"></head><body>'
            f"<nav><details><summary>Pages</summary>{links}</details></nav><main><h1>{escape(title)}</h1>{self.markdown(about)}{body}</main></body></html>"
        )


def write_pages():
    if not STAGED.is_dir():
        raise SystemExit(f"{STAGED} is not there: run scripts/stage_docs.py first")
    pages = read_site(STAGED)
    preview = Preview(pages)
    texts = {page.html: preview.page(page) for page in pages}
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(
        STAGED,
        OUT,
        ignore=shutil.ignore_patterns("*.ipynb", "*.qmd", "*.yml", "_docs", ".*"),
    )
    katex = find_katex()
    if katex:
        where = subprocess.run(
            ["node", "-p", "require('path').dirname(require.resolve('katex'))"],
            env=katex,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        shutil.copytree(where, OUT / "katex")
        done = subprocess.run(
            ["node", "-e", TYPESET],
            input=json.dumps(preview.formulas),
            env=katex,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    formulas = (
        json.loads(done.stdout)
        if katex
        else [f"<code>{escape(tex)}</code>" for tex, _ in preview.formulas]
    )
    for name, text in texts.items():
        (OUT / name).write_text(
            re.sub("\x04(\\d+)\x05", lambda m: formulas[int(m[1])], text),
            encoding="utf-8",
        )
    how = (
        "set by KaTeX"
        if katex
        else "as they are written, since KaTeX is not installed (npm install -g katex)"
    )
    print(f"{len(texts)} pages in _preview/index.html, formulas {how}")
    return sorted(texts)


# --- pictures of them ---


def find_chrome():
    return next(
        filter(
            None,
            map(
                shutil.which,
                [
                    os.environ.get("CHROME") or "chromium",
                    "chromium-browser",
                    "google-chrome",
                    "chrome",
                ],
            ),
        ),
        None,
    )


class Browser:
    """Chromium without a window, driven by its own protocol over two pipes: messages of
    JSON, a null byte after each.
    """

    def __init__(self, chrome):
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [
                "sh",
                "-c",
                f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}',
                "sh",
                chrome,
                "--headless",
                "--disable-gpu",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                "--remote-debugging-pipe",
                *sandbox,
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.send, self.receive, self.count, self.session, self.rest = (
            os.fdopen(ours_out, "wb", 0),
            ours_in,
            0,
            None,
            b"",
        )
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self("Page.enable")

    def __call__(self, method, until=None, **params):
        "What the browser answers; with `until`, when that event has come."
        self.count += 1
        self.send.write(
            json.dumps(
                {
                    "id": self.count,
                    "method": method,
                    "params": params,
                    **({"sessionId": self.session} if self.session else {}),
                }
            ).encode()
            + b"\0"
        )
        answer = None
        while answer is None or until:
            while b"\0" not in self.rest:
                more = os.read(self.receive, 1 << 20)
                if not more:
                    raise RuntimeError("the browser has ended")
                self.rest += more
            text, _, self.rest = self.rest.partition(b"\0")
            said = json.loads(text)
            if said.get("id") == self.count:
                answer = said
            if said.get("method") == until:
                until = None
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]


def photograph(names, chrome):
    "Pages that are too wide for a window, with what makes them so."
    (OUT / "shots").mkdir()
    browser, faults = Browser(chrome), []
    try:
        for name in names:
            for width in WIDTHS:
                browser(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=900,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                browser(
                    "Page.navigate",
                    url=(OUT / name).as_uri(),
                    until="Page.loadEventFired",
                )
                height, wide = browser(
                    "Runtime.evaluate",
                    expression=TOO_WIDE,
                    awaitPromise=True,
                    returnByValue=True,
                )["result"]["value"]
                if wide is not None:
                    faults.append(f"{name}: wider than {width} pixels: {wide}")
                for top in range(0, height, HIGHEST):
                    clip = {
                        "x": 0,
                        "y": top,
                        "width": width,
                        "height": min(height - top, HIGHEST),
                        "scale": 1,
                    }
                    shot = browser(
                        "Page.captureScreenshot",
                        format="jpeg",
                        quality=75,
                        captureBeyondViewport=True,
                        clip=clip,
                    )["data"]
                    (
                        OUT
                        / "shots"
                        / f"{Path(name).stem}-{width}{f'-{top}' * bool(top)}.jpg"
                    ).write_bytes(base64.b64decode(shot))
    finally:
        browser.process.kill()
        browser.process.wait()
    return faults


def main():
    names, chrome = write_pages(), find_chrome()
    faults = photograph(names, chrome) if chrome else []
    for fault in faults:
        print(fault)
    if chrome:
        print(
            f"Pictures of {len(names)} pages at {WIDTHS[0]} and {WIDTHS[1]} pixels in"
            f" _preview/shots/: {len(faults) or 'none'} too wide"
        )
    else:
        print(
            "No Chromium was found (on the PATH, or by the environment variable"
            " CHROME): no pictures were taken, and widths were NOT checked"
        )
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
