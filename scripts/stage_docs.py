"""Stage the site in _proc/, as Quarto reads it: every notebook without what is hidden,
with the documentation of the names that it exports, and links to open and download it;
the reference; a card for every chapter.
"""

import ast
import base64
import io
import re
import shutil
import textwrap
from functools import partial
from html import escape

import modules
import nbformat
import numpy as np
import yaml
from api_pages import api_pages
from model_cards import page
from modules import NBS, ROOT, WIDEST, in_repository, linked, moved, on_site
from nbformat.v4 import new_markdown_cell as markdown_cell
from PIL import Image, ImageOps

OPEN = 31  # lines of exported code that are shown without a click
CARD = 360, 220  # pixels of a chapter's picture

# --- pictures ---


def is_drawing(picture):
    """Whether a picture can be inverted by night: lines and areas on white paper, all but
    a fiftieth of it in fifty colors. Photographs and maps have more, or less paper.
    """
    picture.seek(getattr(picture, "n_frames", 1) // 2)
    pixels = np.asarray(picture.convert("RGB")) >> 4  # 16 shades of each color
    paper = (pixels == 15).all(-1).mean()
    count = np.sort(np.bincount(pixels.reshape(-1, 3) @ np.array([256, 16, 1])))
    return bool(paper >= 0.7 and count[-50:].sum() >= 0.98 * count.sum())


def pictures(cell):
    "The pictures among the outputs of a cell."
    for output in cell.get("outputs", []):
        for kind, data in output.get("data", {}).items():
            if kind in ("image/png", "image/jpeg"):
                yield Image.open(io.BytesIO(base64.b64decode("".join(data))))


def with_drawings(text):
    "Markdown that says so of the files that it shows."

    def said(m):
        path = NBS / m[1]
        shown = path.suffix == ".png" and path.is_file()
        drawn = ".drawn " if shown and is_drawing(Image.open(path)) else ""
        return f"]({m[1]}){{{drawn}fig-alt"

    return re.sub(r"\]\((images/[^)\s]+)\)\{fig-alt", said, text)


def unless_played(text):
    """Markdown whose pictures of the players are for browsers without scripts alone: all
    others would load them, and show the players in their place.
    """
    still = '```{{=html}}\n<noscript><figure><img src="{}" alt="{}">'
    still += "<figcaption>{}</figcaption></figure></noscript>\n```"
    shown = r'!\[(.*)\]\((\S+)\)\{(?:\.drawn )?fig-alt="([^"]*)"\}$'
    player = r"(^::: \{\.et-(?:puzzle|play)\}\n)" + shown
    write = lambda m: m[1] + still.format(m[3], escape(m[4]), escape(m[2]))
    return re.sub(player, write, text, flags=re.M)


# --- a card for every chapter ---


def opening(name):
    "Title of a notebook, what it is for, and the text below."
    source = nbformat.read(NBS / name, 4).cells[0].source
    return re.match(r"# (.+)\n+> (.+)\n*((?s:.*))", source).groups()


def card(name, folder):
    "Markdown of a link to a chapter: picture, title, and what it is for."
    (title, said, _), shown = opening(name), ""
    found = (p for c in nbformat.read(NBS / name, 4).cells for p in pictures(c))
    if picture := next(found, None):
        drawn = ".drawn " * is_drawing(picture)  # of one that moves the middle
        picture = picture.convert("RGB")
        shrunk = ImageOps.contain(picture, CARD, Image.Resampling.LANCZOS)
        file = f"images/cards/{name.removesuffix('.ipynb')}.png"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        whole = ImageOps.pad(shrunk, CARD, color="white")
        whole.quantize(128).save(folder / file, optimize=True)
        alt = escape(f"A figure of “{title}”")
        shown = f'![{alt}]({file}){{{drawn}fig-alt="{alt}"}} '
    return f"::: {{.chapter-card}}\n[{shown}{title}]({name})\n\n{said}\n:::\n"


def cards(folder):
    """A card for every chapter of the sidebar, section by section; of a section with a
    page of its own, a link to it.
    """
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    parts = []
    for entry in config["website"]["sidebar"]["contents"][1:]:
        section, own = entry["section"], entry.get("href")
        chapters = [n for n in entry["contents"] if str(n)[:1].isdigit()]
        if own:
            parts.append(f"### [{section}]({own})\n\n{opening(own)[1]}\n")
        elif chapters:
            each = "\n".join(card(name, folder) for name in chapters)
            parts.append(f"### {section}\n\n:::: {{.cards}}\n{each}::::\n")
    return "\n".join(parts)


def with_cards(text, folder):
    "The landing page's text with cards in place of the list of its reading map."
    listed = r"(?<=^## Reading map\n\n)- .*?(?=\n\n|\Z)"
    return re.sub(listed, lambda _: cards(folder), text, flags=re.M | re.S)


# --- cells ---


def documentation(module, name, with_signature):
    """What stands where a name is defined: its heading, a link to the source, and its
    documentation. The signature where no source is open beside it.
    """
    code = f"```python\n{module.signature(name)}\n```\n\n" * with_signature
    anchor, said = module.anchor(name), ast.get_docstring(module.public[name][0]) or ""
    own = f" {{#{anchor}}}" if anchor != modules.identifier(name) else ""
    return (
        f"### {name}{own}\n\n[source]({module.source(name)}){{.source-link}}\n\n{code}"
        + linked(said, module.home(name))
    )


def wrapped(text):
    "What a cell printed, broken to fit the column."
    lines = []
    for line in text.split("\n"):
        indent = re.match(" *", line)[0] + "    "
        words = dict(break_long_words=False, break_on_hyphens=False)
        lines += textwrap.wrap(line, WIDEST, subsequent_indent=indent, **words) or [""]
    return "\n".join(lines)


def handed_over(data, folder=""):
    """What an output shows, without the kind that makes Quarto load jQuery and
    require.js from another site: HTML goes as a raw block of Markdown.
    """
    if "text/html" in data:
        html = f"```{{=html}}\n{data['text/html'].strip()}\n```\n"
        return {"text/markdown": html}
    if "text/markdown" in data:
        # a minus in a table of numbers, where Python writes a hyphen
        text = re.sub(r"(?m)(?<=[|(] )-(?=\.?\d)", "−", data["text/markdown"])
        return {**data, "text/markdown": together(addressed(text, folder))}
    if "text/plain" in data:
        return {**data, "text/plain": wrapped(data["text/plain"])}
    return data


def together(text):
    "Text in which a number does not part from its unit or its error, outside of code."
    parts = re.split(r"(?s)(```.*?```|`[^`\n]*`|\$[^$]*\$)", text)
    gap = partial(re.sub, r"(?<=\d) (?=[%±])|(?<=±) (?=\d)", "\N{NBSP}")
    return "".join(part if n % 2 else gap(part) for n, part in enumerate(parts))


def addressed(text, folder=""):
    """The links of a page in a folder of nbs/ as the site has them: its pages lie side
    by side, and files of the repository outside nbs/ have an address.
    """

    def write(path):
        outside = path.startswith("../")
        return in_repository(path[3:]) if outside else on_site(path)

    return moved(text, folder, write)


def staged_code(cell, public, folder):
    "What the page shows of a cell of code: documentation of what it exports, and itself."
    marks = set(re.findall(r"^#\| *([\w-]+)(?!.*:)", cell.source, re.M))
    options = re.findall(r"^#\| *([\w-]+): *(.*)", cell.source, re.M)
    code = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip("\n")
    own, is_open = dict(options), False
    if "exports" in marks:
        is_open = "code-fold" not in own and code.count("\n") < OPEN
        own = {"code-fold": "show" if is_open else "true", **own}
        own |= {"code-summary": '"Exported source"'}
    if marks & {"export", "exports"} and "hide" not in marks:
        for name in (getattr(node, "name", None) for node in ast.parse(code).body):
            if name in public:
                text = documentation(public[name], name, not is_open)
                yield markdown_cell(text, id=f"doc-{name}")
    if marks & {"hide", "export", "exporti"} or not code:
        return
    shown = list(pictures(cell))
    if shown and all(map(is_drawing, shown)):
        own["classes"] = f"[drawn, {own['classes']}]" if "classes" in own else "drawn"
    outputs, cell.outputs = cell.outputs, []
    for output in outputs:  # what was printed in pieces is one text
        if cell.outputs and "text" in output and "text" in cell.outputs[-1]:
            cell.outputs[-1].text += output.text
        else:
            cell.outputs.append(output)
    for output in cell.outputs:
        if "text" in output:
            output.text = wrapped(output.text)
        if "data" in output:
            output.data = nbformat.from_dict(handed_over(output.data, folder))
    fold = []
    if own.get("code-summary") == '"Answer"':  # what it prints is folded with it
        own = {k: v for k, v in own.items() if not k.startswith("code-")}
        fold = ['::: {.callout-note collapse="true" title="Answer"}', ":::"]
    top = "".join(f"#| {name}: {value}\n" for name, value in own.items())
    cell.source = top + modules.without_pragmas(code)
    yield from [*map(markdown_cell, fold[:1]), cell, *map(markdown_cell, fold[1:])]


# --- pages ---


def page_links(name):
    repo = in_repository(f"nbs/{name}")
    colab = repo.replace("github.com", "colab.research.google.com/github", 1)
    chapter = re.match(r"[0-5]\d", name)
    kind = f"Chapter {int(name[:2])}" if chapter else "[Engine room](engine_room.ipynb)"
    return (
        f"::: {{.page-links}}\n{kind} · [Open in Colab]({colab})"
        f" · [Download the notebook](notebooks/{name}){{data-noresolveinput=true}}"
        f" · [See it on GitHub]({repo})\n:::"
    )


def stage(path, folder):
    "A notebook as Quarto reads it."
    notebook, name = nbformat.read(path, 4), path.relative_to(NBS).as_posix()
    inside, own = name.rpartition("/")[0], on_site(name)
    title, said, below = opening(name)
    address = re.sub(r"^\d+[a-z]?_", "", own.removesuffix(".ipynb")) + ".html"
    front = {"title": title, "description": said, "output-file": address}
    if inside:  # Quarto would look for its source beside the others
        front["repo-actions"] = False
    raw = f"---\n{yaml.safe_dump(front, allow_unicode=True)}---"
    cells = [nbformat.v4.new_raw_cell(raw, id="front")]
    if name[0].isdigit() or inside:
        cells.append(markdown_cell(page_links(name), id="page-links"))
    notebook.cells[0].source = below
    public = modules.defined_by(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cells += staged_code(cell, public, inside)
        elif cell.source:
            text = with_drawings(addressed(cell.source, inside))
            text = linked(with_cards(text, folder), name)
            cell.source = together(unless_played(text))
            cells.append(cell)
    notebook.cells = cells
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, folder / own)


def stage_all(folder):
    "Everything that Quarto needs, into a folder that is made anew."
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(NBS, folder, ignore=shutil.ignore_patterns("*.ipynb", ".*"))
    site = folder / "_quarto.yml"
    repository = f"href: {modules.settings()['git_url']}"
    text = site.read_text(encoding="utf-8").replace("href: ../ ", f"{repository} ")
    text = re.sub(r"(?m)(?<=- )(?:engine|records)/\S+", lambda m: on_site(m[0]), text)
    site.write_text(text, encoding="utf-8")
    for name, text in {"models.qmd": page(), **api_pages()}.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in (folder / "records").iterdir():
        text = moved(path.read_text(encoding="utf-8"), "records", on_site)
        own = folder / on_site(f"records/{path.name}")
        _, front, text = text.split("---\n", 2)
        front += f"output-file: {own.stem}.html\n"
        text = f"---\n{front}---\n\n::: {{.record}}\n{text}\n:::\n"
        own.write_text(text, encoding="utf-8")
    shutil.rmtree(folder / "records")
    paths = modules.notebooks()
    for path in paths:
        stage(path, folder)
    print(f"{len(paths)} notebooks staged in {folder.name}/")


if __name__ == "__main__":
    from nbdev.quarto import refresh_quarto_yml

    refresh_quarto_yml()  # title and address of the site, from settings.ini
    stage_all(ROOT / "_proc")
