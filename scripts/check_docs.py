"""Check the pages of the site before they are rendered: links, anchors, images,
figures, directives, tables, formulas, size.

    python scripts/check_docs.py [FOLDER]        FOLDER is _proc (what
    scripts/stage_docs.py wrote) unless another is named

Formulas are parsed by the site's own KaTeX where there is Node, else by a plainer
check of braces and environments.
"""

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import yaml
from colab import first_code, install_cell
from modules import WIDEST, identifier, meaning, without_pragmas, wrapped
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 3_000_000  # bytes of a page, the pictures it shows included

# What Quarto reads at the top of a code cell. Anything else is shown as code, or was
# meant for nbdev and left over.
QUARTO = {
    "label",
    "fig-cap",
    "fig-alt",
    "fig-align",
    "fig-width",
    "fig-height",
    "fig-subcap",
    "tbl-cap",
    "code-fold",
    "code-summary",
    "code-overflow",
    "echo",
    "eval",
    "output",
    "include",
    "warning",
    "error",
    "classes",
    "layout-ncol",
    "layout-nrow",
    "layout",
    "column",
    "lightbox",
}
NBDEV = {
    "default_exp",
    "export",
    "exports",
    "exporti",
    "hide",
    "hide_line",
    "filter_stream",
    "exec_doc",
    "eval:",
    "slow",
    "gpu",
}
RICHER = {"text/html", "text/markdown"}  # shown instead of text/plain
CALLOUTS = {"note", "tip", "warning", "important", "caution"}
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})[^\n]*\n.*?^\1?\2[ \t]*$", re.M | re.S)
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
EQUATIONS = re.compile(
    r"\bEq(?:s?\.|uations?)\s+(\(?\d+\)?(?:(?:–|, or |, | and | or )\(?\d+\)?)*)"
)
RAW = re.compile(r"^```\{=html\}\n(.*?)\n```$", re.M | re.S)
NAMED = re.compile(r"\[`([A-Za-z_][\w.]*)(?:\(\))?`\]\(([\w.-]*)#([\w.-]+)\)")
# Pandoc's rule: an opening dollar has no space after it; a closing one has none before
# it and no digit after it.
MATH = re.compile(
    r"(?<!\\)\$\$(.+?)\$\$|(?<![\\$])\$(?![\s$])((?:\\.|[^$\\]|\n(?!\n))*?)(?<![\s\\])\$(?![\d$])",
    re.S,
)


# --- pages ---


@dataclass
class Page:
    """One page: its prose (markdown cells and markdown outputs, code removed), its
    cells, and what others may link to.
    """

    path: Path
    prose: list[str] = field(default_factory=list)  # without code, with formulas
    # (TeX, whether it is displayed)
    formulas: list[tuple[str, bool]] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of figures
    front: dict = field(default_factory=dict)
    code: list[dict] = field(default_factory=list)
    fences: list[str] = field(default_factory=list)  # code in the prose
    named: list[tuple] = field(default_factory=list)  # (link, name, file, anchor)
    flow: list[tuple[str, str]] = field(default_factory=list)  # (kind, text) of cells
    html_outputs: list[str] = field(default_factory=list)  # what of them is seen
    faults: list[str] = field(default_factory=list)

    @property
    def html(self):
        "The page's file name on the site; nbdev drops a notebook's number."
        return (
            self.front.get("output-file")
            or re.sub(r"^\d+[a-z]?_", "", self.path.stem) + ".html"
        )


def add_prose(page, text):
    "Record what a piece of markdown shows, links to and offers as an anchor."
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    page.fences += [m[0] for m in FENCE.finditer(text) if not RAW.match(m[0])]
    raw = "\n".join(m[0] for m in FENCE.finditer(text) if RAW.match(m[0]))
    page.faults += [f"the page loads {m[1]}" for m in re.finditer(LOADS, raw)]
    text = FENCE.sub("", text)
    page.named += [(m[0], *m.groups()) for m in NAMED.finditer(text)]
    for line in re.findall(r"^#{1,6}\s+(.+)$", CODE.sub(r"\2", text), re.M):
        own = re.search(r"\{[^}]*#([\w.:-]+)", line)
        name = base = own[1] if own else identifier(line)
        if own and name.lower() in map(str.lower, page.anchors):
            page.faults.append(f"two headings are called #{name}")
        n = 0
        while name in page.anchors:
            n += 1
            name = f"{base}-{n}"
        page.anchors.append(name)
    text = CODE.sub("`code`", text)
    page.formulas += [
        (m[1], True) if m[1] is not None else (m[2], False) for m in MATH.finditer(text)
    ]
    page.prose.append(text)


class Strict(yaml.SafeLoader):
    "YAML as Quarto reads it: a key that comes twice is an error."

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"{min(twice)} comes twice")
        return super().construct_mapping(node, deep)


def unreadable(source):
    "What Quarto cannot read of a cell's options; None where it reads them."
    lines = re.match(r"(?:\s*\n|#\|.*(?:\n|\Z))*", source)[0].split("\n")
    named = [line[2:].strip() for line in lines if re.match(r"#\|\s*[\w-]+:", line)]
    try:
        yaml.load("\n".join(named), Strict)
    except yaml.YAMLError as error:
        return " ".join(str(error).split())


def classes(found):
    "The classes that the options of a cell give it."
    return re.findall(r"[\w-]+", found.get("classes", ""))


def directives(source):
    """{name: value} of the `#|` lines at the top of a cell, and those that come too
    late to be read.
    """
    lines, found, late = source.split("\n"), {}, []
    top = True
    for line in lines:
        m = re.match(r"#\|\s*([\w-]+)(:?)\s*(.*)$", line)
        if not m:
            top = top and not line.strip()
            continue
        try:
            value = yaml.safe_load(m[3]) if m[3][:1] in ("'", '"') else m[3].strip()
        except yaml.YAMLError:
            value = "\a"
        # between double quotes \alpha rings a bell, and \gamma is no escape
        top = top and value.isprintable()
        if top:
            found[m[1]] = value
        else:
            late.append(line)
    return found, late


def read_page(path):
    "Any page of the site: a notebook, staged or not, or a Quarto file."
    page = Page(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        m = re.match(r"\A---\n(.*?)\n---\n", text, re.S)
        page.front = yaml.safe_load(m[1]) if m else {}
        add_prose(page, text[m.end() :] if m else text)
        return page
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["source"] != source.splitlines(keepends=True):
            page.faults.append(
                "a source that is not a list of lines with their ends, which Quarto"
                f" joins into one line: {source[:60]!r}"
            )
        if cell["cell_type"] == "raw" and source.startswith("---"):
            page.front = yaml.safe_load(source.strip().strip("-")) or {}
        elif cell["cell_type"] == "markdown":
            # not staged: nbdev makes these the front matter
            if not page.front and (
                m := re.match(r"#\s+(.+)\n(?:\s*\n>\s*(.+))?", source)
            ):
                page.front, source = {"title": m[1], "description": m[2]}, m[2] or ""
            add_prose(page, source)
            kind = "doc" if str(cell.get("id")).startswith("doc-") else "text"
            page.flow.append((kind, re.sub(r"<!--.*?-->", "", source, flags=re.S)))
        elif cell["cell_type"] == "code":
            found, late = directives(source)
            if said := unreadable(source):
                page.faults.append(f"options of a cell that Quarto cannot read: {said}")
            if len(classes(found)) > 1 and found["classes"][0] != "[":
                page.faults.append(f"classes that are no list: {found['classes']}")
            seen = shows_something(found, source, cell.get("outputs"))
            page.flow.append(("code" if seen else "hidden", source))
            page.code.append(
                {
                    "source": source,
                    "directives": found,
                    "late": late,
                    "outputs": cell.get("outputs", []),
                }
            )
            if found.get("label", "").startswith("fig-"):
                page.labels.append(found["label"])
            # not staged: nbdev shows each of these under a heading of its name
            if {"export", "exports"} & set(found) and "hide" not in found:
                page.anchors += [
                    node.name.lower()
                    for node in ast.parse(source).body
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                    and not node.name.startswith("_")
                ]
            if hidden(found):
                continue
            for name in ("fig-cap", "tbl-cap"):
                add_prose(page, found.get(name, ""))
            for output in cell.get("outputs", []):
                add_prose(page, markdown_of(output))
                page.html_outputs.append(visible(html_of(output)))
    return page


def html_of(output):
    "HTML that an output shows, also as staging hands it over: in Markdown."
    data = output.get("data", {})
    raw = RAW.findall("".join(data.get("text/markdown", "")))
    return "".join(data.get("text/html", "")) + "\n".join(raw)


def markdown_of(output):
    return RAW.sub("", "".join(output.get("data", {}).get("text/markdown", "")))


def hidden(found):
    return (
        bool({"hide", "export", "default_exp"} & set(found))
        or found.get("include") == "false"
        or found.get("output") == "false"
    )


def shows_something(found, source, outputs):
    "Whether the page has anything of a cell: code, output or documentation of a name."
    if {"hide", "default_exp"} & set(found) or found.get("include") == "false":
        return False
    if "export" in found:
        return any(
            isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
            for node in ast.parse(source).body
        )
    return found.get("echo") != "false" or bool(outputs)


def shown_code(cell, staged):
    "The lines of code that the page shows of a cell."
    found = cell["directives"]
    if hidden(found) or found.get("echo") == "false":
        return []
    code = cell["source"] if staged else without_pragmas(cell["source"])
    return [line for line in code.split("\n") if not line.startswith("#|")]


def shown_text(cell, staged):
    """The lines that the page shows of what a cell printed or is worth. Staging breaks
    those that are too wide; nobody reads on through more than three pieces of one.
    """

    def shown(text):
        for line in "".join(text).split("\n"):
            broken = [line] if staged else wrapped(line).split("\n")
            yield from broken if len(broken) < 4 else [line]

    if hidden(cell["directives"]):
        return
    for output in cell["outputs"]:
        data = output.get("data", {})
        if not any(k.startswith("image/") or k in RICHER for k in data):
            yield from shown(output.get("text", ""))
            yield from shown(data.get("text/plain", ""))


def read_site(folder):
    return [
        read_page(p)
        for p in sorted(Path(folder).iterdir())
        if p.suffix in (".ipynb", ".qmd")
    ]


# --- what a page links to ---


def settings():
    config = ConfigParser()
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


LINK = re.compile(
    r"""(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?((?:[^()\s>]|\([^()\s]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)(\{[^}]*\})?"""
)
DEFINITION = re.compile(r"^ {0,3}\[([^\[\]]+)\]:\s*<?([^\s>]+)", re.M)


def visible(html):
    """What an output in HTML shows: without its scripts, its style sheets and the
    pictures that it brings along.
    """
    return re.sub(
        r"(?s)<(script|style)\b.*?</\1>|data:[\w/+;-]+,[\w+/=%-]*",
        lambda m: "" if m[1] else "data:",
        html,
    )


def says(alt):
    "Whether it describes anything: two words at least."
    return len((alt or "").split()) > 1


def targets(text):
    """What the prose of a page links to or shows: (target, whether it is a picture, its
    alternative text).
    """
    plain = MATH.sub("", text)
    for name, target in DEFINITION.findall(plain):
        if name[0] != "^":
            yield target, False, ""
    for target in re.findall(r"<(https?:[^\s<>]+)>", plain):
        yield target, False, ""
    for m in LINK.finditer(plain):
        if "](" in m[2]:
            yield from targets(m[2])  # a picture that is a link
        alt = re.search(r"fig-alt=\"([^\"]+)\"", m[4] or "")
        yield m[3], bool(m[1]), alt[1] if alt else ""
    for m in re.finditer(
        r"<(img|a)\b[^>]*?\b(?:src|href)=[\"']([^\"']+)[\"'][^>]*>", plain
    ):
        alt = re.search(r"\balt=[\"']([^\"']+)", m[0])
        yield m[2], m[1] == "img", alt[1] if alt else ""


def check_links(page, site, folder):
    config = settings()
    home, repo = config["doc_host"] + config["doc_baseurl"], config["git_url"]
    by_file = {p.path.name: p for p in site}
    by_html = {p.html: p for p in site}

    def anchor(where, name, target):
        if name and name not in where.anchors and name not in where.labels:
            yield f"no anchor #{name} on {where.path.name}: {target}"

    shown = [t for text in page.prose for t in targets(text)]
    # check_html looks at their pictures
    in_html = [
        (target, False, "")
        for text in page.html_outputs
        for target, _, _ in targets(text)
    ]
    for target, picture, alt in shown + in_html:
        file, _, name = unquote(target).partition("#")
        if picture and not says(alt):
            yield (
                "a picture has no alternative text (fig-alt) of two words or more:"
                f" {target}"
            )
        if not target:
            yield "an empty link"
        elif target.startswith("#"):
            yield from anchor(page, name, target)
        elif file.startswith(home):
            yield f"leads away from a preview or a fork, where a file's name would do: {target}"
        elif file.startswith("notebooks/"):
            if not (ROOT / "nbs" / file.removeprefix("notebooks/")).is_file():
                yield f"no such notebook to download: {target}"
        elif m := re.match(
            rf"(?:{re.escape(repo)}|https://colab\.research\.google\.com/github/{re.escape(repo.split('github.com/')[1])})/(?:blob|raw|tree)/\w+/(.*)",
            file,
        ):
            if not (ROOT / m[1]).exists():
                yield f"no such file in the repository: {target}"
            elif "colab." in file:
                yield from check_colab(ROOT / m[1])
        elif file.startswith("https://colab.research.google.com"):
            yield f"Colab opens another repository: {target}"
        elif re.match(r"[a-z][a-z+.-]*:", target):
            continue  # somewhere else
        elif file in by_file:
            yield from anchor(by_file[file], name, target)
        elif file in by_html:
            yield (
                "link to the page's source, which holds in Jupyter and on GitHub too:"
                f" {target}"
            )
        elif not (Path(folder) / file).is_file():
            yield f"no such file: {target}"
        elif Path(file).suffix in (".ipynb", ".qmd"):
            yield f"no such page: {target}"
        elif picture and not opens(Path(folder) / file):
            yield f"not a picture that can be opened: {target}"


def check_names(page):
    """A link from a name leads to what the name means on that page. Where the notebook
    itself has the link its author said so.
    """
    written = ROOT / "nbs" / page.path.name
    written = written.read_text(encoding="utf-8") if written.is_file() else ""
    for link, name, file, anchor in page.named:
        if json.dumps(link, ensure_ascii=False)[1:-1] in written:
            continue
        if meaning(name, page.path.name) != (file or page.path.name, anchor):
            yield f"a name that is linked means something else here: {link}"


def check_colab(path):
    "Colab opens a notebook alone: its first cell of code fetches and installs the rest."
    code = first_code(json.loads(path.read_text(encoding="utf-8")))
    if code is not None and code != install_cell(settings()):
        yield f"on Colab {path.name} does not install itself: run scripts/colab.py"


def opens(path):
    if path.suffix == ".svg":
        return path.stat().st_size > 0
    try:
        Image.open(path).verify()
    except Exception:
        return False
    return True


def check_colons(page):
    """What a colon announces is there: the next thing that the page shows is code, a
    figure, documentation, or a list, table or formula.
    """
    seen = [(kind, text.strip()) for kind, text in page.flow if kind != "hidden"]
    seen = [(kind, text) for kind, text in seen if text]
    for (kind, text), (after, said) in zip(seen, [*seen[1:], ("end", "")]):
        if kind != "text" or not re.search(r"(?<!:):$", text):
            continue
        if after == "end" or (
            after == "text"
            and not re.match(r"[-*+] |[|>]|\d+\. |\$\$|```|!\[|<|:::", said)
        ):
            yield f"a colon announces what the page does not show: …{text[-60:]}"


def check_references(page):
    everything = MATH.sub("", "\n\n".join(page.prose))
    defined = {name.lower() for name, _ in DEFINITION.findall(everything)}
    for words, name in re.findall(r"\[([^\[\]]+)\]\[([^\[\]]*)\]", everything):
        if (name or words).lower() not in defined:
            yield f"no link is defined for [{words}][{name}]"
    for name in re.findall(r"\[(\^[^\[\]\s]+)\](?!:)", everything):
        if name.lower() not in defined:
            yield f"no footnote [{name}]"
    for text in page.prose:
        for name in re.findall(
            r"(?<![\w@\\])@((?:fig|tbl|eq|sec|lst)-[\w-]+)", MATH.sub("", text)
        ):
            if name not in page.labels and name not in page.anchors:
                yield f"nothing is labeled {name}"
    twice = {label for label in page.labels if page.labels.count(label) > 1}
    if twice:
        yield f"labeled more than once: {sorted(twice)}"


def check_equations(site):
    """Each number of the paper stands at one formula of the site, and whatever the text
    calls Eq. (n) is there, unless it says in whose paper.
    """
    tags = [
        (page, tag, displayed)
        for page in site
        for tex, displayed in page.formulas
        for tag in re.findall(r"\\tag\{(.*?)\}", tex)
    ]
    numbers = [tag for _, tag, _ in tags]
    for page, tag, displayed in tags:
        if numbers.count(tag) > 1:
            yield page, f"\\tag{{{tag}}} stands more than once on the site"
        if not displayed:
            yield page, f"\\tag{{{tag}}} in a formula that is not displayed"
    for page in site:
        for text in (*page.prose, *(cell["source"] for cell in page.code)):
            for m in EQUATIONS.finditer(text):
                if re.match(r" of (?!the paper|Appendix|Hoover)", text[m.end() :]):
                    continue
                for first, last in re.findall(r"(\d+)\)?(?:–\(?(\d+))?", m[1]):
                    for n in range(int(first), int(last or first) + 1):
                        if str(n) not in numbers:
                            yield page, f"no formula carries the number ({n}): {m[0]}"


# --- what a page shows ---


def check_figures(page, staged):
    for cell in page.code:
        if hidden(cell["directives"]):
            continue
        html = "".join(map(html_of, cell["outputs"]))
        yield from check_html(html, staged)
        if not re.search("<(?:img|svg|canvas)\\b", html) and not any(
            kind.startswith("image/")
            for o in cell["outputs"]
            for kind in o.get("data", {})
        ):
            continue
        first = next(
            (
                line
                for line in cell["source"].split("\n")
                if line.strip() and not line.startswith("#|")
            ),
            "",
        )
        if "drawn" in classes(cell["directives"]) and (
            m := re.search(
                r"(?i)\b(?:black|white|dark|light)\b",
                cell["directives"].get("fig-cap", ""),
            )
        ):
            yield f"a drawing is inverted by night, and its caption says {m[0]!r}"
        for name in ("label", "fig-cap", "fig-alt"):
            said = cell["directives"].get(name, "")
            if not (says(said) if name == "fig-alt" else said.strip()):
                yield f"a figure has no {name}: {first[:60]}"
        if not cell["directives"].get("label", "fig-").startswith("fig-"):
            yield f"a figure's label begins with fig-: {cell['directives']['label']}"


LOADS = (
    r"(?:<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)\s*=|@import|\bimport\s*\("
    r"|\burl\s*\()[\s\"']*((?:url\()?[\"']?(?:https?:)?//[^\"'\s>)]+)"
)


def check_html(html, staged):
    """An output in HTML needs nothing from another site, and says in words what its
    pictures show; staging mends matplotlib's animations.
    """
    if not staged and "_anim_img" in html:
        return
    for m in re.finditer(LOADS, html):
        yield f"an output loads {m[1]}"
    for m in re.finditer(r"<(?:img|svg)\b[^>]*>", html):
        alt = re.search(r"\b(?:alt|aria-label)=(?:\"([^\"]*)\"|'([^']*)')", m[0])
        if "aria-hidden" not in m[0] and not (alt and says(alt[1] or alt[2])):
            yield f"a picture in an output has no alternative text: {m[0][:60]}"
    for m in re.finditer(r"<input\b[^>]*>", html):
        own = re.search(r"\bid=[\"']([^\"']+)", m[0])
        if "aria-label" not in m[0] and not (
            own
            and re.search(rf"<label\b[^>]*\bfor=[\"']{re.escape(own[1])}[\"']", html)
        ):
            yield f"a control has no label: {m[0][:60]}"
    for m in MATH.finditer(visible(html)):
        yield f"a formula in HTML stays as it is written: {m[0][:60]}"


def check_rendering(page, staged):
    "What Quarto would show as it is written."
    for text in page.prose:
        plain = MATH.sub("x", text)
        for m in re.finditer(LOADS + r"|!\[[^]]*\]\(<?((?:https?:)?//[^)\s>]+)", text):
            yield f"the page loads {m[1] or m[2]}"
        if m := re.search(r"!\[\s*\]\([^)]*\)", plain):
            yield f"a picture has no caption: {m[0]}"
        if m := re.search(r"\\(?:eq)?ref\{[^}]*\}|\\\(.{0,40}", text):
            yield f"not read as a formula's number, or as a formula: {m[0]}"
        for line in plain.split("\n"):
            if m := re.search(r"(?<![\\\\])\$", line):
                yield (
                    "a dollar that opens or closes nothing:"
                    f" {line[max(0, m.start() - 40) : m.end() + 20]}"
                )
            if re.match(r"\s*#\|", line):
                yield f"a directive outside code: {line}"
            attributes = re.sub(
                r"(^#{1,6} .*|\)|\]|^:::+|^\$\$|x)\s*\{[#.\w][^}]*\}", "", line
            )
            if m := re.search(r"\{[#.][\w-]+[^}]*\}", attributes):
                yield f"attributes that belong to nothing: {m[0]}"
            if re.search(r"\{\{<.*?>\}\}", line):
                yield f"a shortcode: {line.strip()}"
            if m := re.match(r"(#{1,6})[^\s#|!]", line):
                yield f"a heading without a space: {line[:40]}"
        depth = 0
        for rest in re.findall(r"^:::+[ \t]*(.*)$", plain, re.M):
            depth += 1 if rest.strip() else -1
            if kind := re.search(r"\.callout-(\w+)", rest):
                if kind[1] not in CALLOUTS:
                    yield f"no such callout: {kind[0]}"
            if depth < 0:
                break
        if depth:
            yield "a ::: that is not closed, or closes nothing"
        yield from check_tables(plain)
        yield from check_lists(plain)
    for code in page.fences:
        for line in code.split("\n"):
            if len(line.rstrip()) > WIDEST:
                yield f"code is {len(line.rstrip())} characters wide: {line.strip()[:60]}"
        if m := re.search(r"__main__\.|<lambda>|:NoneType=|jaxlib\._jax|\)->", code):
            yield f"a signature as Python prints it, not as it is written: {m[0]}"
    for cell in page.code:
        for said, text in (
            ("code", shown_code(cell, staged)),
            ("an output", shown_text(cell, staged)),
        ):
            for line in text:
                if len(line.rstrip()) > WIDEST:
                    yield f"{said} is {len(line.rstrip())} characters wide: {line.strip()[:60]}"
        for line in cell["late"]:
            yield (
                "a directive is not read, below the first line of code or for its"
                f" quotes: {line}"
            )
        known = QUARTO if staged else QUARTO | NBDEV
        for name in set(cell["directives"]) - known:
            yield f"Quarto knows no directive {name!r}"
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"an error was stored: {output.get('ename')}"
            loads = {"text/html", "application/javascript"} & set(
                output.get("data", {})
            )
            if staged and loads and not hidden(cell["directives"]):
                yield (
                    "an output that makes Quarto load jQuery and require.js from"
                    f" elsewhere: {sorted(loads)[0]}"
                )
            if staged and (
                m := re.search(r"(?m)[|(] -\.?\d[\d.]*", markdown_of(output))
            ):
                yield f"a hyphen for a minus: {m[0]}"
            shown = "".join(output.get("text", "")) + "".join(
                output.get("data", {}).get("text/plain", "")
            )
            if output.get("name") == "stderr" and not hidden(cell["directives"]):
                yield f"a warning was stored: {shown.strip()[:60]}"
            if m := re.search(r"(?<![\w.])/(?:tmp|home|root|Users|var)/\S+", shown):
                yield f"an output names a file of somebody's machine: {m[0]}"


def check_lists(text):
    "Pandoc begins a list after an empty line only; without one its items run on."
    item = r"\s*(?:[-*+]|\d+\.)\s+\S"
    above = ""
    for line in text.split("\n"):
        if (
            re.match(item, line)
            and (line.lstrip()[0] in "-*+" or above.rstrip().endswith((".", ":")))
            and above.strip()
            and not re.match(rf"{item}|\s{{2,}}\S|#|\||:::|>", above)
        ):
            yield f"a list that runs on from the line above it: {line.strip()[:60]}"
        above = line


def check_tables(text):
    """Pandoc fills or cuts rows that have another number of cells than the head, in
    silence.
    """
    rows = []
    for line in [*text.split("\n"), ""]:
        if line.lstrip().startswith("|"):
            rows.append(line.strip())
            continue
        if len(rows) > 1:
            count = [
                len(re.findall(r"(?<!\\)\|", row.rstrip("|").rstrip())) for row in rows
            ]
            for row, n in zip(rows, count):
                if n != count[0]:
                    yield f"a row of {n} cells in a table of {count[0]}: {row[:70]}"
            if not re.fullmatch(r"[\s|:-]+", rows[1]):
                yield f"a table without the line below its head: {rows[0][:70]}"
        rows = []


def size(page, folder):
    "Bytes of the page with its pictures, about what a browser loads."
    total = page.path.stat().st_size if page.path.exists() else 0
    for target, picture, _ in (t for text in page.prose for t in targets(text)):
        if picture and (Path(folder) / target).is_file():
            total += (Path(folder) / target).stat().st_size
    return total


def check_page(page, site, folder, staged):
    for name in ("title", "description"):
        if not page.front.get(name):
            yield f"the page has no {name}"
    yield from page.faults
    yield from check_links(page, site, folder)
    yield from check_references(page)
    yield from check_colons(page)
    if staged:
        if not page.path.name.startswith(
            "api"
        ):  # each name is what it is in its module
            yield from check_names(page)
        if (
            page.front.get("repo-actions") is not False
            and not (ROOT / "nbs" / page.path.name).is_file()
        ):
            yield "View source leads to a file that is not in the repository"
    yield from check_figures(page, staged)
    yield from check_rendering(page, staged)
    if not staged and re.match(r"\d.*\.ipynb", page.path.name):
        yield from check_colab(page.path)  # staging links it to Colab
    if (n := size(page, folder)) > LARGEST:
        yield f"{n / 1e6:.1f} MB is more than {LARGEST / 1e6:.0f} MB"


def check_configuration(site, folder):
    """The sidebar leads to every page, the bars and the footer where they say; the
    pictures they name are there; a reader can search, turn pages and read in the dark.
    """
    whole = yaml.safe_load((Path(folder) / "_quarto.yml").read_text(encoding="utf-8"))
    config = whole["website"]
    theme = whole.get("format", {}).get("html", {}).get("theme", {})
    if not (isinstance(theme, dict) and {"light", "dark"} <= set(theme)):
        yield "no theme for the dark"
    if not config["navbar"].get("search"):
        yield "no search"
    if not config.get("page-navigation"):
        yield "no links to the pages before and after (page-navigation)"
    footer = Page(Path(folder) / "_quarto.yml")
    for text in config.get("page-footer", {}).values():
        add_prose(footer, text)
    yield from check_links(footer, site, folder)

    def leaves(entry):
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, list):
            for e in entry:
                yield from leaves(e)
        else:
            for key in ("href", "menu", "contents"):
                yield from leaves(entry.get(key, []))

    sidebar = set(leaves(config["sidebar"]))
    navbar = {
        n for side in ("left", "right") for n in leaves(config["navbar"].get(side, []))
    }
    names = {p.path.name for p in site}
    for name in sorted(sidebar | navbar):
        if (
            not re.match(r"[a-z]+:|\.\./$", name)
            and name.partition("#")[0] not in names
        ):
            yield f"the navigation leads to {name}, which is not there"
    for name in sorted(sidebar & navbar):
        yield f"Quarto highlights {name} in the bar of every page: give it an anchor there"
    for name in sorted(names - sidebar - {"404.qmd"}):
        yield f"nothing in the sidebar leads to {name}"
    cards = [
        c.get("image")
        for c in (config.get("open-graph"), config.get("twitter-card"))
        if isinstance(c, dict)
    ]
    for name in filter(None, [config.get("favicon"), config.get("image"), *cards]):
        if not (Path(folder) / name).is_file():
            yield f"no such picture: {name}"
    taken = {}
    for p in site:
        if p.html in taken:
            yield f"{p.path.name} and {taken[p.html]} are both rendered as {p.html}"
        taken[p.html] = p.path.name


def luminance(color):
    "Of #rrggbb, as WCAG defines it."
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts))


# What is written on what, by the names of the colors in nbs/theme.
ON_PAGE = "text muted link link-hover accent note tip warning caution important"
IN_CODE = "keyword string number function operator comment"
READ = [
    *((name, "page") for name in ON_PAGE.split()),
    *((name, "box") for name in "text muted link link-hover chip-text".split()),
    *((f"code-{name}", "box") for name in IN_CODE.split()),
    ("button-text", "button"),
    ("primary-button-text", "primary-button"),
    ("bar-text", "bar"),
    ("bar-hover", "bar"),
]
LEAST = 4.5  # contrast of text, by WCAG's level AA


def colors(path):
    "{name: #rrggbb} of one of the two palettes in nbs/theme."
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return dict(re.findall(r"^\$([\w-]+): (#[0-9a-f]{6});", text, re.M))


def contrast(one, other):
    "Of two colors #rrggbb, as WCAG defines it: 1 to 21."
    a, b = sorted(map(luminance, (one, other)))
    return (b + 0.05) / (a + 0.05)


def check_palette(path, mode, shared):
    "Both palettes name the same colors; each is handed on; all text can be read."
    found = colors(path)
    for name in sorted({name for pair in READ for name in pair} - set(found)):
        yield f"theme/{path.name} names no color ${name}"
    for name in found:
        if f"--{name}: #{{${name}}};" not in shared:
            yield f"theme/shared.scss does not hand on ${name} as --{name}"
    for text, ground in READ:
        if text in found and ground in found:
            ratio = contrast(found[text], found[ground])
            if ratio < LEAST:
                yield (
                    f"the contrast of ${text} on ${ground} is {ratio:.1f} in the"
                    f" {mode} theme"
                )


def check_style(folder):
    """Formulas, fonts and scripts come with the site, and what is read is dark enough,
    or light enough, in both themes.
    """
    config = (Path(folder) / "_quarto.yml").read_text(encoding="utf-8")
    html = yaml.safe_load(config).get("format", {}).get("html", {})
    math = html.get("html-math-method")
    url = math.get("url", "") if isinstance(math, dict) else ""
    if not url or not (Path(folder) / url / "katex.min.js").is_file():
        yield f"formulas are set by a script from elsewhere: html-math-method {math}"
    theme = html.get("theme", {})
    for mode, files in theme.items() if isinstance(theme, dict) else ():
        files = [files] if isinstance(files, str) else files
        rules = [Path(folder) / name for name in files if name.endswith(".scss")]
        if not any(
            "$web-font-path: false" in r.read_text(encoding="utf-8") for r in rules
        ):
            yield f"the {mode} theme loads its fonts from elsewhere: $web-font-path"
    texts = {"_quarto.yml": config}
    styles = [
        p
        for kind in ("*.css", "play/*.css", "theme/*.scss")
        for p in Path(folder).glob(kind)
    ]
    for path in styles:
        texts[path.name] = path.read_text(encoding="utf-8")
    for name, text in texts.items():
        for m in re.finditer(
            r"(?:@import|url\(|\bsrc=|<link\b[^>]*href=)[\s\"'(]*(?:url\()?[\"']?((?:https?:)?//[^\s\"')>]+)"
            r"|(https?://[^\s\"']*(?:cdn|unpkg|googleapis|gstatic|jsdelivr|polyfill)[^\s\"']*)",
            text,
        ):
            yield f"{name} loads {m[1] or m[2]}"
    shared = texts.get("shared.scss", "")
    for mode in ("light", "dark"):
        yield from check_palette(Path(folder) / f"theme/{mode}.scss", mode, shared)
    named = set(re.findall(r"--([\w-]+): #\{", shared))
    for name in ("styles.css", "play.css"):
        for used in sorted(set(re.findall(r"var\(--([\w-]+)", texts.get(name, "")))):
            if used not in named:
                yield f"{name} uses --{used}, which no theme has"


# --- formulas ---

PARSE = """
const katex = require(process.argv[1]);
let text = '';
const complaint = ([tex, displayMode]) => {
  try {
    katex.renderToString(tex, {displayMode, throwOnError: true, strict: 'ignore'});
    return '';
  } catch (e) { return e.message; }
};
process.stdin.on('data', d => text += d).on('end', () =>
  console.log(JSON.stringify(JSON.parse(text).map(complaint))));
"""


@functools.cache
def find_katex():
    "The site's own KaTeX, where there is a Node to run it; or None."
    katex = ROOT / "nbs/katex/katex.min.js"
    return katex if shutil.which("node") and katex.is_file() else None


def parse_katex(formulas, katex):
    "KaTeX's complaint about each formula, empty where there is none."
    run = subprocess.run(
        ["node", "-e", PARSE, str(katex)],
        input=json.dumps(formulas),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


def parse_plain(tex):
    """A complaint about braces, delimiters or environments that do not match, empty
    where there is none.
    """
    bare = re.sub(r"\\[{}\\%$&_#,;:!| ]", " ", tex)
    depth = 0
    for c in bare:
        depth += (c == "{") - (c == "}")
        if depth < 0:
            return "a } that closes nothing"
    if depth:
        return "a { that is not closed"
    if len(re.findall(r"\\left\b", bare)) != len(re.findall(r"\\right\b", bare)):
        return "\\left and \\right do not match"
    stack = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+\*?)\}", bare):
        if kind == "begin":
            stack.append(name)
        elif not stack or stack.pop() != name:
            return f"\\end{{{name}}} closes nothing"
    if stack:
        return f"\\begin{{{stack[-1]}}} is not closed"
    if "\n\n" in tex:
        return "an empty line"
    if bare.endswith("\\"):
        return "a backslash at the end"
    return ""


def check_formulas(site, katex):
    formulas = [(page, *f) for page in site for f in page.formulas]
    said = (
        parse_katex([f[1:] for f in formulas], katex)
        if katex
        else [parse_plain(tex) for _, tex, _ in formulas]
    )
    for (page, tex, _), complaint in zip(formulas, said):
        if complaint:
            yield page, f"a formula: {complaint} in {tex.strip()[:80]}"


# --- all of it ---


def check(folder, katex=None):
    "Every fault found on the pages of `folder`, as 'page: what is wrong'."
    site = read_site(folder)
    staged = any("output-file" in page.front for page in site)
    if not staged:  # staging writes the reference and the model cards
        config = (Path(folder) / "_quarto.yml").read_text(encoding="utf-8")
        site += [
            Page(
                Path(folder) / name,
                front={"title": "Made", "description": "As the site is."},
            )
            for name in sorted(set(re.findall(r"\b(?:api\w*|models)\.qmd", config)))
        ]
    faults = [
        f"{page.path.name}: {fault}"
        for page in site
        for fault in check_page(page, site, folder, staged)
    ]
    faults += [f"_quarto.yml: {fault}" for fault in check_configuration(site, folder)]
    faults += [f"the site's style: {fault}" for fault in check_style(folder)]
    faults += [
        f"{page.path.name}: {fault}"
        for page, fault in (*check_equations(site), *check_formulas(site, katex))
    ]
    return site, faults


def main(folder=ROOT / "_proc"):
    katex = find_katex()
    site, faults = check(folder, katex)
    for fault in faults:
        print(fault)
    formulas = sum(len(page.formulas) for page in site)
    if not katex:
        print(
            "There is no Node here to run the site's KaTeX, so formulas were NOT checked"
            " beyond their braces and environments"
        )
    print(
        f"{len(site)} pages, {formulas} formulas"
        f" {'parsed by KaTeX' if katex else 'looked at'}, largest page"
        f" {max(size(page, folder) for page in site) / 1e6:.2f} MB:"
        f" {len(faults) or 'no'} fault{'s' * (len(faults) != 1)}"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
