"""Check the pages of the site as they are staged, before they are rendered: links and
anchors, figures, options of cells, what outputs hold, formulas.

    python scripts/check_docs.py [FOLDER]        _proc, unless another is named

Formulas are parsed by the site's own KaTeX where there is Node, else not at all.
"""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import yaml
from modules import PIECE, ROOT, WIDEST, identifier, settings

# What Quarto reads at the top of a cell. Anything else it shows as code.
OPTIONS = set(
    "label fig-cap fig-alt code-fold code-summary echo eval output include classes".split()
)
LOADS = re.compile(
    r"""(?:<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)\s*=|@import|\bimport\s*\("""
    r"""|\burl\s*\()[\s"']*(?:url\(["']?)?((?:https?:)?//[^"'\s>)]+)"""
    r"""|!\[[^]]*\]\(((?:https?:)?//[^)\s]+)"""
)
LINK = re.compile(r"\]\(\s*<?((?:[^()\s<>]|\([^()\s]*\))*)")
PICTURE = re.compile(r"!\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)(\{[^}]*\})?")
# What Quarto would show as it is written.
AS_WRITTEN = {
    r"(?<!\\)\$": "a dollar that opens or closes nothing",
    r"^\s*#\|": "a directive outside code",
    # Pandoc begins a list after an empty line only
    r"(?<=\n)(?![-*+:|#>\s]|\d+\. ).+\n[-*+] ": "a list that runs on from the line above",
}


def tags(html):
    "[(tag, its attributes)] of a piece of HTML."
    parser, found = HTMLParser(), []
    parser.handle_starttag = lambda tag, own: found.append((tag, dict(own)))
    parser.feed(html)
    return found


class Page:
    "A notebook, or one cell of Markdown; and what is found in it."

    def __init__(self, name, front, cells):
        self.name, self.front, self.cells = name, front, cells
        self.prose, self.formulas = [], []  # text without them; (TeX, if displayed)
        self.html, self.wide, self.anchors, self.faults = [], [], [], []
        for cell in cells:
            if cell.cell_type == "markdown":
                self.read(cell.source)
            else:
                self.read_code(cell)

    def read(self, text):
        "A piece of Markdown: what is prose, and what is not."

        def piece(m):
            if m["fence"]:
                if m["kind"] == "{=html}":
                    self.html.append(m["body"])
                else:
                    self.lines(m["body"])
                return ""
            if m["code"]:
                return "`code`"
            self.formulas.append((m["display"] or m["inline"], bool(m["display"])))
            return "x"

        text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
        whole = PIECE.sub(lambda m: "" if m["fence"] else m[0].strip("`"), text)
        for heading in re.findall(r"^#{1,6}\s+(.+)$", whole, re.M):
            own = re.search(r"\{[^}]*#([\w.:-]+)", heading)
            name = own[1] if own else identifier(heading)
            # a name that is taken gets a number
            same = [a for a in self.anchors if re.fullmatch(rf"{name}(-\d+)?", a)]
            self.anchors.append(f"{name}-{len(same)}" if same and not own else name)
        self.prose.append(PIECE.sub(piece, text))

    def read_code(self, cell):
        "A cell of code: its options, and what its outputs show."
        top = re.match(r"(?:#\|.*(?:\n|\Z))*", cell.source)[0]
        code = cell.source.removeprefix(top)
        fault = self.faults.append
        try:
            options = yaml.safe_load(re.sub(r"^#\|", "", top, flags=re.M)) or {}
        except yaml.YAMLError as error:
            return fault(f"options that Quarto cannot read: {error.problem}")
        names = re.findall(r"^#\| *[\"']?([\w-]+)[\"']?:", top, re.M)
        if len(names) > len(options):
            fault(f"an option that comes twice, which Quarto cannot read: {names}")
        for name, value in options.items():
            if name not in OPTIONS:
                fault(f"Quarto knows no option {name!r}")
            if not str(value).isprintable():  # in double quotes \alpha rings a bell
                fault(f"{name} between double quotes: {value!r}")
        if late := re.search(r"^#\|.*", code, re.M):
            fault(f"an option below the first line of code: {late[0]}")
        if options.get("echo", True):
            self.lines(code)
        html, pictures = len(self.html), False
        for output in cell.outputs:
            data = output.get("data", {})
            kinds = " ".join(data)
            text = output.get("text", "") + data.get("text/plain", "")
            if output.output_type == "error" or output.get("name") == "stderr":
                fault(f"an error or a warning was stored: {text.strip()[:60]}")
            if not re.search("image/|text/markdown", kinds):
                self.lines(text)
            pictures |= "image/" in kinds
            self.read(data.get("text/markdown", ""))
        shown = {tag for tag, _ in tags("".join(self.html[html:]))}
        if pictures or shown & {"img", "svg", "canvas"}:
            label, caption = str(options.get("label", "")), options.get("fig-cap", "")
            if not re.match("fig-.", label) or label in self.anchors:
                fault(f"a figure needs a label of its own, fig-…: {label!r}")
            if not caption or len(options.get("fig-alt", "").split()) < 2:
                fault(f"a figure without fig-cap, or a fig-alt of two words: {label!r}")
            self.anchors.append(label)
            self.read(caption)

    def lines(self, text):
        self.wide += [line for line in text.split("\n") if len(line.rstrip()) > WIDEST]


def read_page(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        front, *cells = nbformat.reads(text, 4).cells
        front = front.source.strip().strip("-")
    else:
        _, front, text = re.split(r"^---\n", text, maxsplit=2, flags=re.M)
        cells = [nbformat.v4.new_markdown_cell(text)]
    return Page(path.name, yaml.safe_load(front), cells)


# --- a page ---


def check_links(page, pages, folder):
    "Links lead to a page and its anchor, a file of the site, or of the repository."
    repository = settings()["git_url"]
    targets = [target for text in page.prose for target in LINK.findall(text)]
    own = (own for text in page.html for _, own in tags(text))
    targets += [each.get("href") or each.get("src") for each in own]
    for target in filter(None, targets):
        file, _, anchor = unquote(target).partition("#")
        file = file.replace("colab.research.google.com/github", "github.com")
        where = pages.get(file or page.name)
        if m := re.match(rf"{repository}/(?:blob|raw|tree)/\w+/(.*)", file):
            if not (ROOT / m[1]).exists():
                yield f"no such file in the repository: {target}"
        elif target.startswith(settings()["doc_host"]):
            yield f"leads away from a fork, where a file's name would do: {target}"
        elif re.match(r"[a-z][a-z+.-]*:", target):
            continue  # somewhere else
        elif where is None:
            home = ROOT / "nbs" if file.startswith("notebooks/") else folder
            if not (home / file.removeprefix("notebooks/")).is_file():
                yield f"no such file: {target}"
        elif anchor and anchor not in where.anchors:
            yield f"no anchor #{anchor} on {where.name}: {target}"


def check_text(text):
    "What Quarto would show as it is written, and what Pandoc makes something else of."
    for pattern, said in AS_WRITTEN.items():
        if m := re.search(pattern, f"\n{text}", re.M):
            yield f"{said}: {text[max(0, m.start() - 30) : m.end() + 30]!r}"
    for caption, own in PICTURE.findall(text):
        if not re.search(r'fig-alt="[^"]*\w +\w', own):
            yield f"a picture without fig-alt of two words: {caption[:60]}"
    for table in re.findall(r"(?:^[ \t]*\|.*(?:\n|\Z))+", text, re.M):
        rows = [row.strip().removesuffix("|") for row in table.strip().split("\n")]
        if len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) > 1:
            yield f"rows of a table with more cells than others: {rows[0][:60]}"


def check_shown(page):
    "What a page shows and loads, and says to those who do not see it."
    for text in page.prose:
        yield from check_text(text)
    fences = re.findall(r"^:::+(.*)$", "\n".join(page.prose), re.M)
    if 2 * sum(bool(rest.strip()) for rest in fences) != len(fences):
        yield "a ::: that is not closed, or closes nothing"
    for m in LOADS.finditer("\n\n".join([*page.html, *page.prose])):
        yield f"the page loads {m[1] or m[2]}"
    for tag, own in (tag for text in page.html for tag in tags(text)):
        alt = own.get("alt") or own.get("aria-label") or ""
        if tag in ("img", "svg") and " " not in alt and "aria-hidden" not in own:
            yield f"a picture in an output without alt of two words: {str(own)[:60]}"
    records = page.name.startswith("records_")  # a command of theirs stays in a line
    for line in page.wide * (not records):
        yield f"{len(line)} characters wide: {line.strip()[:60]}"


# --- the site ---


def check_navigation(pages, config, folder):
    "The sidebar leads to every page, the bar and the footer where they say."

    def leaves(entry):
        if isinstance(entry, str):
            return {entry}
        if isinstance(entry, dict):
            entry = [entry.get(key, []) for key in ("href", "menu", "contents")]
        return set().union(*map(leaves, entry))

    site = config["website"]
    bar = [site["navbar"].get(side, []) for side in ("left", "right")]
    sidebar, bar = leaves(site["sidebar"]), leaves(bar)
    for name in set(pages) - sidebar - {"404.qmd"}:
        yield f"nothing in the sidebar leads to {name}"
    for name in sidebar & bar:
        yield f"Quarto highlights {name} on every page: give it an anchor in the bar"
    names = {name.partition("#")[0] for name in sidebar | bar}
    text = [*(f"[]({name})" for name in names), *site["page-footer"].values()]
    cell = nbformat.v4.new_markdown_cell(" ".join(text))
    yield from check_links(Page("_quarto.yml", {}, [cell]), pages, folder)


def check_formulas(pages):
    formulas = [(page.name, *f) for page in pages for f in page.formulas]
    said = subprocess.run(
        ["node", ROOT / "scripts/katex_check.js", ROOT / "nbs/katex/katex.min.js"],
        input=json.dumps([f[1:] for f in formulas]),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for (name, tex, _), complaint in zip(formulas, json.loads(said)):
        if complaint:
            yield f"{name}: a formula: {complaint} in {tex.strip()[:80]}"


def check(folder):
    "The pages of a folder, and every fault found, as 'page: what is wrong'."
    folder = Path(folder)
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".ipynb", ".qmd"))
    pages = {path.name: read_page(path) for path in paths}
    config = yaml.safe_load((folder / "_quarto.yml").read_text(encoding="utf-8"))
    faults = []
    for page in pages.values():
        said = [*page.faults, *check_links(page, pages, folder), *check_shown(page)]
        if not (page.front.get("title") and page.front.get("description")):
            said.append("no title, or no description")
        faults += [f"{page.name}: {fault}" for fault in said]
    for fault in check_navigation(pages, config, folder):
        faults.append(f"the site: {fault}")
    return pages, faults


def main(folder=ROOT / "_proc"):
    pages, faults = check(folder)
    node = shutil.which("node")
    faults += check_formulas(pages.values()) if node else []
    print(*faults, sep="\n", end="\n" * bool(faults))
    formulas = sum(len(page.formulas) for page in pages.values())
    parsed = "parsed by KaTeX" if node else "NOT checked: no Node here"
    print(f"{len(pages)} pages, {formulas} formulas {parsed}: {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
