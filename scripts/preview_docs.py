"""See the staged pages without Quarto: set by Pandoc, as Quarto's are, in _preview/, and
looked at by a browser, on a desk and on a phone, by day and by night.

    python scripts/preview_docs.py             every page, without pictures
    python scripts/preview_docs.py norm api    these, with pictures in _preview/shots/
    python scripts/preview_docs.py all         every page, with pictures: minutes

Text, formulas, code, outputs and figures are in the site's own style sheet and colors;
the search and the bars of the site are Quarto's alone. The browser is a Chromium: on
the PATH, or named by the environment variable CHROME.
"""

import base64
import json
import os
import re
import shutil
import sys
from html import escape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from check_docs import (
    ROOT,
    classes,
    colors,
    directives,
    hidden,
    html_of,
    markdown_of,
    read_site,
)

STAGED, OUT = ROOT / "_proc", ROOT / "_preview"
TEMPLATE, LOOK = (ROOT / "scripts" / f"preview.{kind}" for kind in ("html", "js"))
WIDTHS, HIGHEST = (1280, 390), 12000  # pixels; Chromium takes no picture much higher
FENCE = "`" * 8

# --- pages ---


def shown_output(output, found, name):
    "Markdown of an output; a picture is written into the folder of its page."
    data = output.get("data", {})
    picture = next((kind for kind in data if kind.startswith("image/")), None)
    if picture:
        path = OUT / f"{name}.{picture.partition('/')[2].partition('+')[0]}"
        path.parent.mkdir(exist_ok=True)
        content = "".join(data[picture])
        svg = picture.endswith("xml")
        path.write_bytes(content.encode() if svg else base64.b64decode(content))
        alt, label = escape(found.get("fig-alt", "")), found.get("label", "")
        own = f'#{label} alt="{alt}"' if label else f'alt="{alt}"'
        if width := output.get("metadata", {}).get(picture, {}).get("width"):
            own += f" width={width}"
        where = path.relative_to(OUT)
        return f"![{found.get('fig-cap', '')}]({where}){{{own}}}", "display"
    text = html_of(output)
    text = f"{FENCE}{{=html}}\n{text}\n{FENCE}\n" if text else markdown_of(output)
    if text:
        label, caption = found.get("label"), found.get("fig-cap", "")
        return (
            f"::: {{#{label}}}\n{text}\n\n{caption}\n:::" if label else text
        ), "display"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"{FENCE}\n{text.rstrip()}\n{FENCE}", "stdout"


def shown_cell(cell, name):
    "Markdown of a cell of a notebook, with the classes that Quarto gives its parts."
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source if cell["cell_type"] == "markdown" else ""
    found, _ = directives(source)
    if hidden(found):
        return ""
    lines = [line for line in source.split("\n") if not line.startswith("#|")]
    code, parts = "\n".join(lines).strip(), []
    if code and found.get("echo") != "false":
        parts.append(f"{FENCE}{{.python .cell-code}}\n{code}\n{FENCE}")
        if fold := found.get("code-fold"):
            opened = " open" if fold == "show" else ""
            said = found.get("code-summary", "Show the code")
            parts.insert(
                0, f'<details class="code-fold"{opened}><summary>{said}</summary>\n'
            )
            parts.append("</details>")
    for i, output in enumerate(cell["outputs"]):
        text, kind = shown_output(output, found, f"{name}-{i}")
        parts.append(f"::: {{.cell-output .cell-output-{kind}}}\n{text}\n:::")
    own = "".join(f" .{name}" for name in classes(found))
    return f"::: {{.cell{own}}}\n" + "\n\n".join(parts) + "\n:::"


def palettes():
    "The colors of both themes, as Quarto would hand them on."
    rules = []
    for mode, selector in (("light", ":root"), ("dark", "body.quarto-dark")):
        named = colors(STAGED / f"theme/{mode}.scss").items()
        rules.append(f"{selector} {{{' '.join(f'--{k}: {v};' for k, v in named)}}}")
    return "\n".join(rules)


def write_page(page, pages):
    import pypandoc

    text = page.path.read_text(encoding="utf-8")
    if page.path.suffix == ".ipynb":
        stem = f"{page.path.stem}_files"
        cells = enumerate(json.loads(text)["cells"])
        text = "\n\n".join(shown_cell(cell, f"{stem}/{i}") for i, cell in cells)
    else:
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    numbers = {label: i + 1 for i, label in enumerate(page.labels)}
    text = re.sub(
        r"(?<![\w@])@(fig-[\w-]+)",
        lambda m: f"[Figure {numbers.get(m[1], '?')}](#{m[1]})",
        text,
    )
    args = ["--standalone", f"--template={TEMPLATE}", "--katex=katex/"]
    args += [
        f"--metadata={k}={page.front.get(k, '')}" for k in ("title", "description")
    ]
    args += [f"--variable=pages={Path(html).stem}" for html in pages.values()]
    args.append(f"--variable=palettes={palettes()}")
    html = pypandoc.convert_text(text, "html5", format="markdown", extra_args=args)
    for file, name in pages.items():
        html = re.sub(rf'href="{re.escape(file)}(?=[#"])', f'href="{name}', html)
    (OUT / page.html).write_text(html, encoding="utf-8")


def write_pages():
    if not STAGED.is_dir():
        raise SystemExit(f"{STAGED} is not there: run scripts/stage_docs.py first")
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(
        STAGED,
        OUT,
        ignore=shutil.ignore_patterns("*.ipynb", "*.qmd", "*.yml", "_docs", ".*"),
    )
    site = read_site(STAGED)
    for page in site:
        write_page(page, {p.path.name: p.html for p in site})
    print(f"{len(site)} pages in _preview/index.html")
    return sorted(page.html for page in site)


# --- what only a browser sees ---


def find_chrome():
    names = [
        os.environ.get("CHROME") or "chromium",
        "chromium-browser",
        "google-chrome",
    ]
    return next(filter(None, map(shutil.which, [*names, "chrome"])), None)


# where the browser finds them: from a file no script loads
HOME = "http://preview.test/"


def answer(route):
    "A file of the preview for the browser that asks for it."
    path = OUT / unquote(route.request.url.removeprefix(HOME).partition("?")[0])
    route.fulfill(path=path) if path.is_file() else route.fulfill(status=404)


def look_at(names, chrome, pictures=False):
    "What is wrong with the pages in a browser; where asked for, pictures of them."
    from playwright.sync_api import sync_playwright

    look, faults = LOOK.read_text(encoding="utf-8"), {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chrome, chromium_sandbox=False)
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.route(HOME + "**", answer)
            asked = []
            page.on("request", lambda r, asked=asked: asked.append(r.url))
            for name in names:
                page.goto(HOME + name)
                for scheme in ("light", "dark"):
                    page.evaluate(f"document.body.className = 'quarto-{scheme}'")
                    height, found = page.evaluate(look, width == WIDTHS[0])
                    for fault in found:
                        faults.setdefault((name, fault), f"{width} pixels, {scheme}")
                    if pictures:
                        picture(page, f"{Path(name).stem}-{width}-{scheme}", height)
                for url in asked:
                    if re.match("https?:", url) and not url.startswith(HOME):
                        faults.setdefault((name, f"it loads {url}"), f"{width} pixels")
                asked.clear()
            page.close()
        browser.close()
    return [f"{name} ({where}): {fault}" for (name, fault), where in faults.items()]


def picture(page, name, height):
    (OUT / "shots").mkdir(exist_ok=True)
    width = page.viewport_size["width"]
    for top in range(0, height, HIGHEST):
        clip = {"x": 0, "y": top, "width": width, "height": min(height - top, HIGHEST)}
        path = OUT / "shots" / f"{name}{f'-{top}' * bool(top)}.jpg"
        page.screenshot(path=path, quality=70, full_page=True, clip=clip)


def main(*asked):
    missing = [name for name in ("pypandoc", "playwright") if find_spec(name) is None]
    if "pypandoc" in missing:
        print("No preview: pypandoc is missing (pip install -e .[docs] brings it)")
        return 0
    names, chrome = write_pages(), find_chrome()
    if chrome is None or missing:
        lacks = (
            "Chromium (on the PATH, or named by CHROME)" if not chrome else missing[0]
        )
        print(f"No {lacks}: what only a browser sees was NOT checked")
        return 0
    if asked:
        names = [name for name in names if Path(name).stem in asked or "all" in asked]
    faults = look_at(names, chrome, bool(asked))
    for fault in faults:
        print(fault)
    print(
        f"{len(names)} pages looked at, {WIDTHS[0]} and {WIDTHS[1]} pixels wide, light"
        f" and dark: {len(faults) or 'no'} fault{'s' * (len(faults) != 1)}"
    )
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
