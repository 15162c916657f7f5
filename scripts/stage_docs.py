"""Stage the notebooks for the site in _proc/, as nbdev_docs does before it calls
Quarto, and add what nbdev does not make: links to open and download each notebook, pages
that list every public name, documentation from the source's own text.
"""

import ast
import base64
import io
import json
import os
import re
from html import escape

import numpy as np
import yaml
from api_pages import api_pages, linked
from model_cards import page
from modules import ROOT, identifier, modules, without_pragmas, wrapped
from PIL import Image, ImageOps

OPEN = 32  # lines of exported code that are shown without a click


# --- drawings, which the dark theme inverts ---


def is_drawing(picture):
    """Whether a picture can be inverted by night: lines and areas on white paper, all but
    a fiftieth of it in fifty colors. Photographs and maps have more, or less paper.
    """
    picture.seek(getattr(picture, "n_frames", 1) // 2)
    pixels = np.asarray(picture.convert("RGB")) >> 4  # 16 shades of each color
    paper = (pixels == 15).all(-1).mean()
    count = np.sort(np.bincount(pixels.reshape(-1, 3) @ np.array([256, 16, 1])))
    return bool(paper >= 0.7 and count[-50:].sum() >= 0.98 * count.sum())


def stored_picture(output):
    "The picture of an output of a cell; None without one."
    data = output.get("data", {})
    kind = next((k for k in data if k in ("image/png", "image/jpeg")), None)
    if kind is not None:
        return Image.open(io.BytesIO(base64.b64decode("".join(data[kind]))))


def drawn(cell):
    "The source of a cell of code that says so where all of its pictures are drawings."
    pictures = [stored_picture(output) for output in cell.get("outputs", [])]
    pictures = [picture for picture in pictures if picture is not None]
    if not pictures or not all(map(is_drawing, pictures)):
        return cell["source"]
    if own := re.search(r"(?<=^#\| classes: ).*", cell["source"], re.M):
        # a list: of two words Quarto takes the first for a class, the rest for text
        listed = f"[drawn, {own[0]}]"
        return cell["source"][: own.start()] + listed + cell["source"][own.end() :]
    return "#| classes: drawn\n" + cell["source"]


def with_drawings(text, folder):
    "Markdown that says so of the files that it shows."

    def said(m):
        path = folder / m[1]
        if (
            path.suffix != ".png"
            or not path.is_file()
            or not is_drawing(Image.open(path))
        ):
            return m[0]
        return m[0].replace("{fig-alt", "{.drawn fig-alt")

    return re.sub(r"\]\((images/[^)\s]+)\)\{fig-alt", said, text)


PLAYER = re.compile(
    r'(?<=^::: \{\.et-play\}\n)!\[(.*)\]\((\S+)\)\{fig-alt="([^"]*)"\}$', re.M
)


def unless_played(text):
    """Markdown whose picture of the player is for browsers without scripts alone: all
    others would load it, and show the player in its place.
    """
    still = (
        '```{{=html}}\n<noscript><figure><img src="{}" alt="{}">'
        "<figcaption>{}</figcaption></figure></noscript>\n```"
    )
    return PLAYER.sub(lambda m: still.format(m[2], escape(m[3]), escape(m[1])), text)


# --- a card for every chapter ---

CARD = 360, 220  # pixels of its picture


def first_picture(notebook):
    "The first picture among the outputs of a notebook; None without one."
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if picture := stored_picture(output):
                return picture


def card_picture(picture):
    "A picture shrunk onto white, whole; of one that moves, the middle."
    picture.seek(getattr(picture, "n_frames", 1) // 2)
    shrunk = ImageOps.contain(picture.convert("RGB"), CARD, Image.Resampling.LANCZOS)
    return ImageOps.pad(shrunk, CARD, color="white")


def card(path, folder):
    "Markdown of a link to a chapter: picture, title, and what it is for."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    title, said = re.match(
        r"# (.+)\n+> (.+)", "".join(notebook["cells"][0]["source"])
    ).groups()
    picture, shown = first_picture(notebook), ""
    if picture is not None:
        (folder / "images/cards").mkdir(parents=True, exist_ok=True)
        file = f"images/cards/{path.stem}.png"
        card_picture(picture).quantize(128).save(folder / file, optimize=True)
        drawn = ".drawn " * is_drawing(picture)
        alt = escape(f"A figure of “{title}”")
        shown = f'![{alt}]({file}){{{drawn}fig-alt="{alt}"}} '
    return f"::: {{.chapter-card}}\n[{shown}{title}]({path.name})\n\n{said}\n:::\n"


def cards(folder):
    """A card for every chapter of the sidebar, section by section; of a section with a
    page of its own, a link to it.
    """
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    parts = []
    for entry in config["website"]["sidebar"]["contents"]:
        if not isinstance(entry, dict):
            continue
        if "href" in entry:
            path = ROOT / "nbs" / entry["href"]
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            said = re.search(r"^> (.+)", "".join(cells[0]["source"]), re.M)[1]
            parts.append(f"### [{entry['section']}]({path.name})\n\n{said}\n")
            continue
        chapters = [name for name in entry["contents"] if isinstance(name, str)]
        notebooks = [ROOT / "nbs" / name for name in chapters if name[:1].isdigit()]
        if notebooks:
            own = "\n".join(card(path, folder) for path in notebooks)
            parts.append(f"### {entry['section']}\n\n:::: {{.cards}}\n{own}::::\n")
    return "\n".join(parts)


def with_cards(text, folder):
    "The landing page's text with cards in place of the table of its reading map."
    return re.sub(
        r"(?<=^## Reading map\n\n)\|.*?(?=\n\n|\Z)",
        lambda _: cards(folder),
        text,
        flags=re.M | re.S,
    )


# --- the landing page's results ---

SITE = re.compile(r"^#\| classes: site$", re.M)  # a cell that the README leaves out


def with_folded_results(cells):
    """The cells with what the README has of results in folds, a fold for each text that
    begins in bold with its tables; above them what the site alone has: a figure.
    """
    texts = [c["source"] if c["cell_type"] == "markdown" else "" for c in cells]
    start = next((i for i, t in enumerate(texts) if t.startswith("## Results")), None)
    if start is None:
        return cells
    end = next(
        i for i, t in enumerate(texts) if i > start and re.search("^## ", t, re.M)
    )
    within = cells[start:end]
    above = [c for c in within if SITE.search(c["source"])]
    folds = []
    for cell in within:
        if cell["cell_type"] == "markdown":
            folds.append(cell["source"])
        elif cell not in above:
            folds += ["".join(o["data"]["text/markdown"]) for o in cell["outputs"]]
    heading, *folds = re.split(r"^\*\*([^*\n]+)\.\*\* ", "\n\n".join(folds), flags=re.M)
    fold = '::: {{.callout-note collapse="true"}}\n## {}\n\n{}\n:::\n'
    pairs = zip(folds[::2], map(str.strip, folds[1::2]))
    text = "\n".join(fold.format(*pair) for pair in pairs)
    top = [markdown_cell("results", heading), *above, markdown_cell("folds", text)]
    return [*cells[:start], *top, *cells[end:]]


# --- what nbdev staged ---


def lines(source):
    """The lines of a cell's source with their ends. Quarto splits a source that is one
    string, and joins its lines again without their ends.
    """
    return "".join(source).splitlines(keepends=True)


def markdown_cell(name, text):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def documentation(module, name, config, with_signature):
    """What stands where a name is defined: its heading, a link to the source, and its
    documentation. The signature where no source is open beside it.
    """
    node = module.public[name][0]
    file = module.path.relative_to(ROOT).as_posix()
    source = f"{config.git_url}/blob/{config.branch}/{file}#L{node.lineno}"
    signature = f"```python\n{module.signature(name)}\n```\n\n"
    anchor = module.anchor(name)
    own = f" {{#{anchor}}}" if anchor not in (identifier(name), "") else ""
    return (
        f"### {name}{own}\n\n[source]({source}){{.source-link}}\n\n"
        + signature * with_signature
        + linked(ast.get_docstring(node) or "", module.home(name))
    )


EXPORTED = '#| code-summary: "Exported source"\n'  # by nbdev, with a fold that is open
FOLD = re.compile(r"^#\| code-fold: \w+\n", re.M)


def folded_once(source):
    """A cell of exported code with one fold, its own where it has one: nbdev puts another
    above it, and Quarto stops at an option that comes twice.
    """
    own = FOLD.findall(source)[-1]
    return own + FOLD.sub("", source)


def documented(cells, module, config):
    """The cells with what is said of each name in place of nbdev's show_doc, above the
    code that defines it. Long code opens at a click, and the signature stands above it.
    """
    placed, done = set(), []
    for cell in cells:
        if EXPORTED in cell["source"]:
            cell["source"] = folded_once(cell["source"])
            for node in ast.parse(cell["source"]).body:
                if getattr(node, "name", None) in module.public:
                    placed.add(node.name)
    for cell in cells:
        if named := re.search(r"^show_doc\((\w+)\)$", cell["source"], re.M):
            names = [named[1]] if named[1] not in placed else []
            is_open = False
        elif EXPORTED in cell["source"]:
            names = [getattr(n, "name", None) for n in ast.parse(cell["source"]).body]
            fold = "#| code-fold: show\n"
            is_open = fold in cell["source"] and cell["source"].count("\n") <= OPEN
        else:
            names = []
        for name in names:
            if name in module.public:
                text = documentation(module, name, config, not is_open)
                done.append(markdown_cell(f"doc-{name}", text))
        if not named:
            if names and not is_open:
                cell["source"] = FOLD.sub("#| code-fold: true\n", cell["source"], 1)
            done.append(cell)
    return done


# What matplotlib's animations take from a font on another site.
SIGNS = {
    "minus": "−",
    "plus": "+",
    "fast-backward": "«",
    "step-backward": "‹",
    "play fa-flip-horizontal": "◀",
    "pause": "‖",
    "play": "▶",
    "step-forward": "›",
    "fast-forward": "»",
}


def self_contained(html, alt):
    """An animation of matplotlib without anything from another site, and with words for
    those who cannot see it.
    """
    html = re.sub(r"<link rel=\"stylesheet\"\s+href=\"https://maxcdn[^>]*>", "", html)
    html = re.sub(r"<i class=\"fa fa-([\w -]+)\"></i>", lambda m: SIGNS[m[1]], html)
    html = html.replace("<img id=", f'<img alt="{escape(alt)}" id=')
    return html.replace(
        '<input id="_anim_slider', '<input aria-label="Frame" id="_anim_slider'
    )


def handed_over(data, alt):
    """What an output shows, without the kind that makes Quarto load jQuery and
    require.js from another site: HTML goes as a raw block of Markdown.
    """
    if "text/html" in data:
        html = self_contained("".join(data["text/html"]), alt).strip()
        return {"text/markdown": f"```{{=html}}\n{html}\n```\n"}
    if "text/markdown" in data:
        # a minus in a table of numbers, where Python writes a hyphen
        text = "".join(data["text/markdown"])
        return {**data, "text/markdown": re.sub(r"(?m)(?<=[|(] )-(?=\.?\d)", "−", text)}
    if "text/plain" in data:
        return {**data, "text/plain": wrapped("".join(data["text/plain"]))}
    return data


def links(name, config):
    repo = config.git_url.removeprefix("https://github.com/")
    number = int(name[:2])
    return (
        f"::: {{.page-links}}\n{'Chapter' if number < 60 else 'Engine room'} {number}"
        " · [Open in"
        f" Colab](https://colab.research.google.com/github/{repo}/blob/{config.branch}/nbs/{name})"
        f" · [Download the notebook](notebooks/{name}){{data-noresolveinput=true}} · [See it on"
        f" GitHub]({config.git_url}/blob/{config.branch}/nbs/{name})\n:::"
    )


def addressed(text, config):
    "Links to the repository and to its files outside nbs/ get its address."
    text = re.sub(r"^(\s*href: )\.\./(?=\s)", rf"\1{config.git_url}", text, flags=re.M)
    return text.replace("](../", f"]({config.git_url}/blob/{config.branch}/")


def exported_by(notebook):
    """The module that a notebook writes, or adds public names to; None without one."""
    here = {m: [m.home(name) for name in m.public].count(notebook) for m in modules()}
    mine = [m for m in here if here[m] or m.notebook == notebook]
    return max(mine, key=here.get, default=None)


def finish(path, config):
    "A page as Quarto reads it."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["metadata"].pop("widgets", None)
    cells = notebook["cells"]
    for cell in cells:
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if path.name == "index.ipynb":
                cell["source"] = with_cards(cell["source"], path.parent)
            text = with_drawings(cell["source"], ROOT / "nbs")
            text = unless_played(linked(text, path.name))
            cell["source"] = addressed(text, config)
        alt = re.search(
            r"^#\|\s*fig-alt:\s*[\"']?(.*?)[\"']?\s*$", cell["source"], re.M
        )
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = wrapped("".join(output["text"]))
            if "data" in output:
                data = handed_over(output["data"], alt[1] if alt else "")
                if "text/markdown" in data:
                    data["text/markdown"] = addressed(data["text/markdown"], config)
                output["data"] = data
    if path.name == "index.ipynb":
        cells = with_folded_results(cells)
    if module := exported_by(path.name):
        cells = documented(cells, module, config)
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["source"] = without_pragmas(drawn(cell))
    if path.name[0].isdigit():
        cells.insert(1, markdown_cell("page-links", links(path.name, config)))
    for cell in cells:
        cell["source"] = lines(cell["source"])
    notebook["cells"] = cells
    path.write_text(
        json.dumps(notebook, indent=1, ensure_ascii=False), encoding="utf-8"
    )


def finish_all(staged, config):
    "Finish every page that nbdev staged, and add the reference and the cards."
    sources = sorted((ROOT / "nbs").glob("*.ipynb"))
    for path in sources:
        copy = staged / path.name
        if (
            not copy.exists()
            or not json.loads(copy.read_text(encoding="utf-8"))["cells"]
        ):
            raise SystemExit(f"{path.name} was not staged")
        finish(copy, config)
    site = staged / "_quarto.yml"
    text = addressed(site.read_text(encoding="utf-8"), config)
    site.write_text(text, encoding="utf-8")
    (staged / "models.qmd").write_text(page(), encoding="utf-8")
    for name, text in api_pages(config).items():
        (staged / name).write_text(text, encoding="utf-8")
    print(f"{len(sources)} notebooks staged in {staged.name}/")


def main():
    from nbdev.config import get_config
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs

    if any(part.startswith(".") for part in ROOT.parts):
        raise SystemExit(
            f"nbdev stages nothing below a folder whose name begins with a dot: {ROOT}"
        )
    os.chdir(ROOT)
    refresh_quarto_yml()
    finish_all(proc_nbs(force=True), get_config())


if __name__ == "__main__":  # nbdev starts worker processes that import this file again
    main()
