"""The site: its pages as they are staged have no faults, and the checker finds what is
broken; what staging makes of a chapter; the search; the style in a browser.
"""

import ast
import json
import re
import shutil
from html import escape

import api_pages as api
import check_docs as docs
import modules
import nbformat
import numpy as np
import pytest
import search_text as search
import stage_docs as stage
from PIL import Image

from et_nbdev import explore

SETTINGS = modules.settings()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    stage.stage_all(folder)
    return folder


def test_pages_have_no_faults(site):
    pages, faults = docs.check(site)
    assert faults == []
    if shutil.which("node"):
        assert list(docs.check_formulas(pages.values())) == []
    formulas = [tex for page in pages.values() for tex, _ in page.formulas]
    assert len(formulas) > 1000  # it did look
    assert all(map(search.plain, formulas))  # each can be searched


# --- the checker ---

GOOD = """## A section, *with* `code` & $x^2$

An inline $E = -\\frac{1}{2}$ and one displayed, Eq. (1),

$$\\left( a \\right) \\tag{1}$$

back to [the section](#a-section-with-code-x2), to [another page](other.qmd#there-1), to
[a file](https://REPO/blob/main/README.md). A price of \\$5, a `$`.

| a | b |
|---|---|
| `x | y` | $P(a|b)$ |

![A picture.](dot.png){fig-alt="One dot"}

::: {.callout-note}
Noted.
:::
"""
OTHER = """---
title: other
description: Another page.
---

## There

### There

[again](#there-1)
"""
CONFIG = """website:
  navbar: {left: [{href: other.qmd#there}]}
  sidebar: {contents: [{section: One, contents: [01_page.ipynb, other.qmd]}]}
  page-footer: {right: "After [them](other.qmd#there)"}
"""
SITE = {
    "front": "---\ntitle: page\ndescription: What it is for.\noutput-file: page.html\n---",
    "prose": GOOD.replace("REPO", SETTINGS["git_url"].removeprefix("https://")),
    "code": "#| label: fig-curve\n#| fig-cap: A curve.\n#| fig-alt: It falls.\nplot()",
    "html": '```{=html}\n<img alt="A dot" src="data:image/png;base64,xx">\n```',
    "printed": "saved in out/var/me",
    "stream": "stdout",
    "other.qmd": OTHER,
    "_quarto.yml": CONFIG,
}
WIDE = "x = " + "1" * 85  # a character more than the column holds
BROKEN = {
    "prose": [
        ("#a-section-with-code-x2", "#a-section", "no anchor #a-section on 01_page"),
        ("other.qmd#there-1", "other.qmd#there-2", "no anchor #there-2 on other"),
        ("other.qmd#there-1", "another.qmd", "no such file: another"),
        ("other.qmd#there-1", "an_(other).qmd", "no such file: an_(other).qmd"),
        ("other.qmd#there-1", SETTINGS["doc_host"], "leads away from a fork"),
        ("README.md", "READYOU.md", "no such file in the repository"),
        ("other.qmd#there-1", "notebooks/99_none.ipynb", "no such file"),
        ("dot.png", "dots.png", "no such file: dots.png"),
        ("Noted.", '<script src="https://cdn.else/a.js"></script>', "page loads"),
        ("(dot.png)", "(https://cdn.else/a.png)", "page loads https:"),
        ('{fig-alt="One dot"}', '{fig-alt="dot"}', "without fig-alt of two words"),
        ("\\frac{1}{2}$", "\\frac{1}{2} $", "a dollar that opens"),
        ("Noted.", "#| echo: false", "a directive outside code"),
        ("Noted.", "Try\n- one\n- two", "a list that runs on"),
        ("Noted.\n:::", "Noted.", "a ::: that is not closed"),
        ("| `x | y` |", "| `x | y` | z |", "with more cells than others"),
        ("Noted.", f"```\n{WIDE}\n```", "89 characters wide"),
    ],
    "html": [
        ("<img", "<style>@import url(//cdn.else/a.css)</style><img", "loads //"),
        ("<img", "<link\nhref=https://cdn.else/a.css><img", "page loads https:"),
        ('"A dot"', '""', "without alt of two words"),
        ('<img alt="A dot"', "<svg", "without alt of two words"),
    ],
    "code": [
        ("#| label: fig-curve\n", "", "a figure needs a label"),
        ("label: fig-curve", "label: curve", "a figure needs a label"),
        ("#| fig-cap: A curve.\n", "", "a figure without fig-cap"),
        ("It falls.", "x", "a figure without fig-cap, or a fig-alt"),
        ("A curve.", '"A curve, [there](another.qmd)"', "no such file: another"),
        ("A curve.", '"A curve, $\\gamma$"', "options that Quarto cannot read"),
        ("A curve.", '"A curve, $\\alpha$"', "fig-cap between double quotes"),
        ("plot", "#| echo: true\n#| echo: true\nplot", "an option that comes twice"),
        ("plot", "#| code-flod: true\nplot", "Quarto knows no option 'code-flod'"),
        ("plot()", "plot()\n#| echo: false", "below the first line of code"),
        ("plot", '#| echo: true\n#| "echo": true\nplot', "an option that comes twice"),
        ("plot", "#| classes: [drawn, site]\nplot", None),
        ("plot()", WIDE, "89 characters wide"),
        ("plot()", f"#| echo: false\n{WIDE}", None),
    ],
    "printed": [("saved", WIDE, "characters wide")],
    "stream": [("stdout", "stderr", "an error or a warning was stored")],
    "front": [("description: What", "subtitle: What", "no description")],
    "_quarto.yml": [
        (", other.qmd]", "]", "in the sidebar leads to other"),
        ("other.qmd]", "other.qmd, no.qmd]", "the site: no such file"),
        ("(other.qmd", "(no.qmd", "the site: no such file"),
        ("other.qmd#there}", "other.qmd}", "Quarto highlights other.qmd"),
    ],
}
ROWS = [(part, *row) for part, rows in BROKEN.items() for row in rows]
ROWS.append(("prose", "", "", None))  # as it is


def faults(folder, part, old, new):
    "What is found on a small site, a part of which is different."
    assert old in SITE[part]
    made = SITE | {part: SITE[part].replace(old, new, 1)}
    for name in filter(re.compile(r".*\.").match, SITE):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(made[name])
    Image.new("RGB", (1, 1)).save(folder / "dot.png")
    new_output = nbformat.v4.new_output
    outputs = [
        new_output("display_data", {"image/png": "iVBORw0KGgo="}),
        new_output("display_data", {"text/markdown": made["html"]}),
        new_output("stream", name=made["stream"], text=made["printed"]),
    ]
    cells = [
        nbformat.v4.new_raw_cell(made["front"]),
        nbformat.v4.new_markdown_cell(made["prose"]),
        nbformat.v4.new_code_cell(made["code"], outputs=outputs),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "01_page.ipynb")
    return docs.check(folder)[1]


@pytest.mark.parametrize("part, old, new, said", ROWS)
def test_what_is_broken_is_found(tmp_path, part, old, new, said):
    found = faults(tmp_path, part, old, new)
    assert any(said in fault for fault in found) if said else found == [], found


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize(
    "tex", [r"\frac{a}{", r"a}", r"\begin{aligned} a \end{align}", r"\left( a", "a \\"]
)
def test_broken_formulas_are_found(tex):
    good = r"\{a\} \left\{ b \right."
    page = docs.Page("x", {}, [])
    page.formulas = [(tex, True), (good, False)]
    assert len(list(docs.check_formulas([page]))) == 1


# --- staging ---


def staged(site, name):
    return nbformat.read(site / name, 4).cells


def test_a_chapter_shows_what_it_exports(site):
    cells = staged(site, "03_norm.ipynb")
    sources = {cell.get("id"): cell.source for cell in cells}
    assert "output-file: norm.html" in sources["front"]
    repo = SETTINGS["git_url"].replace("github.com", "colab.research.google.com/github")
    assert f"({repo}/blob/main/nbs/03_norm.ipynb)" in sources["page-links"]
    said = sources["doc-EnergyLayerNorm"]
    assert re.match(r"### EnergyLayerNorm\n\n\[source\]\(http\S+/norm.py#L\d+\)", said)
    # code behind a click has a signature above it, code in sight has none
    for cell, after in zip(cells, cells[1:]):
        if str(cell.get("id")).startswith("doc-") and after.cell_type == "code":
            opened = after.source.startswith("#| code-fold: show")
            assert opened == ("```python\n" not in cell.source)
            assert opened == (after.source.count("\n") < stage.OPEN + 2)
    assert all(cell.source for cell in cells)
    assert not re.search("nbdev_export|sharp_figures|pyright", str(cells))
    # what stands below the title, which nbdev leaves out
    assert "## Which public code" in str(staged(site, "52_errata.ipynb"))


def test_a_page_of_the_engine_room_lies_beside_the_others(site):
    sources = {cell.get("id"): cell.source for cell in staged(site, "engine_toy.ipynb")}
    assert "output-file: engine_toy.html" in sources["front"]
    assert "(notebooks/engine/toy.ipynb)" in sources["page-links"]
    assert "[Layer normalization](03_norm.ipynb)" in sources["8d1e5701"]
    assert "(engine_toy.ipynb)" in str(staged(site, "32_anomaly.ipynb"))
    # of two chapters that make a module
    place = modules.meaning("et_nbdev.vision.model.complete", "x")
    assert place == ("engine/pictures.ipynb", "complete")
    assert modules.linked("`et_nbdev.toy`", "x") == "[`et_nbdev.toy`](engine_toy.ipynb)"
    text = (
        "![A](../images/a.png) [b](c.ipynb#d) [e](../../results/f) [g](#h) `](i)` $]($"
    )
    assert stage.addressed(text, "engine") == (
        "![A](images/a.png) [b](engine_c.ipynb#d)"
        f" [e]({modules.in_repository('results/f')}) [g](#h) `](i)` $]($"
    )


def test_long_lines_are_broken():
    assert stage.wrapped("  " + "a word " * 14) == (
        f"  {'a word ' * 12}a\n      word a word"
    )
    table = stage.handed_over({"text/markdown": "| -0.5 | [a](../b) |"})
    assert table["text/markdown"] == f"| −0.5 | [a]({modules.in_repository('b')}) |"


def test_the_landing_page_has_cards_and_players(site):
    text = "\n".join(cell.source for cell in staged(site, "index.ipynb"))
    chapters = sorted(p.name for p in modules.NBS.glob("[0-5]*.ipynb") if p.name < "58")
    card = r"^::: \{\.chapter-card\}\n\[.*\]\((.*)\)\n\n.+\n:::"
    assert re.findall(card, text, re.M) == chapters
    pictures = re.findall(r"\((images/cards/\S+)\)", text)
    assert len(pictures) > len(chapters) / 2
    assert all(Image.open(site / path).size == (360, 220) for path in pictures)
    assert "- **Start**" not in text and "(engine_room.ipynb)" in text
    # without a script the pictures of the players, which no other browser loads
    assert text.count("<noscript><figure><img") == 2 and "![Photographs" not in text


# Figures of the book by their labels, and files: what the dark theme inverts, and what
# it leaves as it is, because it is a photograph or a map.
DRAWINGS = """04_attention:fig-chase 06_block:fig-blocks 50_explorer:fig-dials
    00_one_sitting:fig-first 01_recall:fig-plane 32_anomaly:fig-why
    35_anomaly_results:fig-margins 40_classification_results:fig-folds
    32_anomaly:fig-graph 05_memory:fig-wells"""
PHOTOGRAPHS = """22_image_train:fig-photographs 20_image_data:fig-task 23_larger:fig-large
    20_image_data:fig-fills 21_image_model:fig-pipeline
    22_image_train:fig-cifar 21_image_model:fig-parts
    24_image_results:fig-reconstructions"""


def test_the_dark_theme_inverts_drawings_and_no_photograph(site):
    for labels, inverted in ((DRAWINGS, True), (PHOTOGRAPHS, False)):
        for notebook, label in (name.split(":") for name in labels.split()):
            sources = [cell.source for cell in staged(site, f"{notebook}.ipynb")]
            (cell,) = (text for text in sources if f"#| label: {label}\n" in text)
            assert bool(re.search("^#.*classes:.*drawn", cell, re.M)) == inverted, label
    page = np.full((200, 300, 3), 255, np.uint8)  # empty, then with a small photograph
    assert stage.is_drawing(Image.fromarray(page))
    page[20:80, 20:80] = np.random.default_rng(0).integers(0, 256, (60, 60, 3))
    assert not stage.is_drawing(Image.fromarray(page))
    shown = "![A](images/{}){{{}fig-alt="
    for file, drawn in (("walk.png", ".drawn "), ("card.jpg", "")):
        assert stage.with_drawings(shown.format(file, "")) == shown.format(file, drawn)


# --- what a name means, every public name, and what the search is given to read


@pytest.mark.parametrize(
    "name, notebook, place",
    [
        ("EnergyLayerNorm", "03_norm", "03_norm.ipynb#energylayernorm"),
        ("et_nbdev.norm", "04_attention", "03_norm.ipynb#"),
        ("Graph.num_nodes", "32_anomaly", "engine/graph_readers.ipynb#graph"),
        ("Graph.nothing", "32_anomaly", None),
        ("split", "engine/graph_readers", "engine/graph_readers.ipynb#split-1"),
        ("descend", "08_solvers", "07_dynamics.ipynb#descend"),  # imported
        ("exp", "04_attention", None),  # a kernel's
        ("train", "20_image_data", None),  # the split
        ("train", "22_image_train", "22_image_train.ipynb#train"),
    ],
)
def test_a_name_means_what_it_means_on_its_page(name, notebook, place):
    found = modules.meaning(name, f"{notebook}.ipynb")
    assert (found and "#".join(found)) == place


def test_names_in_prose_are_linked():
    for text, linked in (
        ("`EnergyLayerNorm` of `x`", "[`EnergyLayerNorm`](#energylayernorm) of `x`"),
        ("`descend()`, `exp`, `$x` and\n`jnp`", None),  # the page does not import it
        ("# `EnergyLayerNorm`\n\n[`EnergyLayerNorm`](a.qmd) $`EnergyLayerNorm`$", None),
        ("```\n`EnergyLayerNorm`\n```", None),
    ):
        assert modules.linked(text, "03_norm.ipynb") == (linked or text)


def test_the_reference_has_every_public_name_its_signature_and_its_arguments():
    pages = api.api_pages()
    names = (modules.ROOT / "tests/public_names.txt").read_text().split()
    rooms = "\n".join(text for page, text in pages.items() if page != "api.qmd")
    _, *entries = re.split(r"^## ", rooms, flags=re.M)
    heads = [re.match(r"(\w+) \{#(\1(?:-1)?)\}\n", text).groups() for text in entries]
    assert sorted(n for n, _ in heads) == sorted(n.rpartition(".")[2] for n in names)
    for text in pages.values():
        anchors = re.findall(r"^## \w+ \{#(\S+)\}$", text.lower(), re.M)
        assert len({*anchors}) == len(anchors)
    for (name, anchor), text in zip(heads, entries):
        code = re.search(r"```python\n(.*?)\n```\n\n(?=\S)", text, re.S)[1]
        bodied = re.sub(r"(?m)^( *(?:def|\)).*):$", r"\1: ...", code)
        node = ast.parse(bodied + "\n    ..." * code.startswith(("class", "@"))).body[0]
        assert node.name == name and not re.search("pyright|noqa", code)
        assert re.search(
            r"\]\((\d+|engine_)\w*\.ipynb#.*\[source\]\(https://.*#L\d+\)", text
        ), name
        assert f"#{anchor}) |" in pages["api.qmd"] and "` |  |" not in text, name
    assert ") |  |" not in pages["api.qmd"], "a docstring or a comment is missing"
    site = (modules.ROOT / "_quarto.yml").read_text()
    assert re.findall(r"- (api\w*\.qmd)", site) == list(pages)


@pytest.mark.parametrize("marks", [("", ""), (r"\(", r"\)")])
@pytest.mark.parametrize(
    "tex, text",
    [
        (r"-\partial E/\partial g", "so -∂E/∂g is"),
        (r"\tfrac1D \mathbf 1", "so 1/D 1 is"),
        (r"W_K^{h}, \; x \in \mathbb R^D \tag{3}", "so W_K^h, x ∈ℝ^D is"),
        (r"\begin{aligned}a&=b\\c&<d\end{aligned}", "so a=b c&lt;d is"),
    ],
)
def test_search_shows_formulas_as_people_read_them(tmp_path, tex, text, marks):
    "As KaTeX has them, and between the marks of other methods."
    marked = tex.join(marks)
    page = f'<p>so <span class="math inline">{escape(marked)}</span> is</p>'
    (tmp_path / "a.html").write_text(page)
    entry = {"href": "a.html#b", "title": "A", "text": f"so {marked} is"}
    entry["text"] = entry["text"].replace("<", "&lt;")
    (tmp_path / "search.json").write_text(json.dumps([entry]))
    search.main(str(tmp_path / "search.json"))
    (found,) = json.loads((tmp_path / "search.json").read_text(encoding="utf-8"))
    assert found == entry | {"text": text}


@pytest.mark.parametrize(
    "code, read",
    [
        ('r"""$M =\n\\frac{\\partial g}{\\partial x}$"""', 'r"""M = ∂g/∂x"""'),
        (r'"$1+\\epsilon$"', '"1+ϵ"'),
        (r'"a $1 or $2\n"', None),
        ("f'{a}$x$'", None),
    ],
)
def test_search_shows_formulas_of_code_as_people_read_them(code, read):
    assert search.IN_CODE.sub(search.read_in_code, code) == (read or code)


def test_a_part_that_is_shown_as_text_is_found(tmp_path):
    (tmp_path / "search.json").write_text("[]")
    (tmp_path / "a.html").write_text("<pre><code>:::</code></pre> <code>:::</code>")
    search.main(str(tmp_path / "search.json"))
    (tmp_path / "a.html").write_text("<td>::: {.a}</td>")
    with pytest.raises(SystemExit, match="a.html shows"):
        search.main(str(tmp_path / "search.json"))


# --- the style: what is read stands out by day and by night

NAMED = r"^\$([\w-]+): (#[0-9a-f]{6});"
COLORS = {
    mode: dict(
        re.findall(NAMED, (modules.NBS / f"theme/{mode}.scss").read_text(), re.M)
    )
    for mode in ("light", "dark")
}

# What is written on what, by the names of the colors in nbs/theme.
READ = {
    "page": "text muted link link-hover accent note tip warning caution important",
    "box": "text muted link link-hover chip-text code-keyword code-string code-number"
    " code-function code-operator code-comment",
    "button": "button-text",
    "primary-button": "primary-button-text",
    "bar": "bar-text bar-hover",
}


def luminance(color):
    "Of #rrggbb, as WCAG defines it."
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts))


def contrast(one, other):
    a, b = sorted(map(luminance, (one, other)))
    return (b + 0.05) / (a + 0.05)


@pytest.mark.parametrize("mode", COLORS)
def test_what_is_read_stands_out(mode):
    "By at least 4.5, which is WCAG's level AA."
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#18bc9c", "#ffffff") == pytest.approx(2.4, abs=0.05)
    for ground, texts in READ.items():
        for text in texts.split():
            found = contrast(COLORS[mode][text], COLORS[mode][ground])
            assert found >= 4.5, f"{text} on {ground}"


@pytest.mark.parametrize("mode", COLORS)
def test_the_explorers_key_stands_out(mode):
    "Its signs are letters in the colors of curves, mixed with those of the page."
    text, page = COLORS[mode]["text"], COLORS[mode]["page"]
    key = explore._key(["E", "attention", "memory", "a", "b"])
    for color, share in re.findall(r"srgb, (#\w+) (\d+)%", key):
        mix = lambda i: int(share) * int(color[i : i + 2], 16) / 100
        rest = lambda i: (100 - int(share)) * int(text[i : i + 2], 16) / 100
        mixed = "#" + "".join(f"{round(mix(i) + rest(i)):02x}" for i in (1, 3, 5))
        assert contrast(mixed, page) >= 4.5, color


def test_every_color_is_named_in_both_themes_and_handed_on():
    assert COLORS["light"].keys() == COLORS["dark"].keys()
    shared = (modules.NBS / "theme/shared.scss").read_text()
    handed = set(re.findall(r"--([\w-]+): #\{\$\1\};", shared))
    assert handed == COLORS["light"].keys()
    for path in (modules.NBS / "styles.css", *modules.NBS.glob("play/*.css")):
        css = path.read_text()
        own = {"n"}  # of the board: how many columns
        assert set(re.findall(r"var\(--([\w-]+)", css)) - own <= handed, path.name


def test_the_fonts_of_the_formulas_are_there():
    folder = modules.NBS / "katex"
    fonts = re.findall(r"fonts/[\w-]+\.woff2", (folder / "katex.min.css").read_text())
    assert len({*fonts}) == 20 and all((folder / font).is_file() for font in fonts)


# --- the style in a browser

# A page as Quarto 1.7 renders it, in small, with the rules of its theme that have hidden
# or broken something: bar, sidebar, a section, code, a table, and a drawing opened large.
THEMED = """<!doctype html><style>
html { scroll-behavior: auto } body { margin: 0; padding-top: 107px }
.fixed-top { position: fixed; top: 0; left: 0; right: 0; height: BARpx; z-index: 1030 }
#quarto-sidebar { position: fixed; overflow: auto }
#quarto-sidebar .sidebar-menu-container { white-space: nowrap; min-width: 225px }
.sidebar-item-container { display: flex; justify-content: space-between }
section:target::before { content: ""; display: block; height: BARpx; margin: -BARpx 0 0 }
h2 { margin: 2.2rem 0 1rem } pre { white-space: pre-wrap } table { width: 100% }
pre > code.sourceCode > span, code span, code span.ex { color: INK }
td { white-space: nowrap }
PALETTES</style><style>STYLE</style><body class="quarto-SCHEME">
<header id="quarto-header" class="fixed-top"></header>
<nav id="quarto-sidebar" class="sidebar floating overflow-auto">
<div class="sidebar-menu-container"><ul><li class="sidebar-item">
<div class="sidebar-item-container"><a class="sidebar-item-text sidebar-link">
<span class="menu-text">A chapter with a title that is as long as titles may be, or more
</span></a></div></li></ul></div></nav><main id="quarto-document-content">
<div class="sourceCode"><pre class="sourceCode"><code class="sourceCode python"><span
id="cb1-1"><span class="ex">make</span> f(x)<span>: ...</span></span></code></pre></div>
<table class="table"><tr>CELLS</tr></table>
<figure class="drawn"><img src="images/walk.png"></figure><p style="height: 2000px"></p>
<section id="a"><h2 class="anchored">A</h2><p style="height: 2000px"></p></section></main>
<script type="module" src="play/page.js"></script>"""
FITS = "document.documentElement.scrollWidth <= innerWidth"
BELOW = """(() => { location.hash = "a";
  const { top } = document.querySelector("h2").getBoundingClientRect();
  const { bottom } = document.querySelector("#quarto-header").getBoundingClientRect();
  return bottom <= top && top < bottom + 40; })()"""
NARROW = "document.querySelector('#quarto-sidebar').offsetWidth <= innerWidth"
OWN = """[...document.querySelectorAll("pre span")].every((span) =>
  !["rgb(84, 84, 84)", "rgb(248, 248, 242)"].includes(getComputedStyle(span).color))"""
LARGE = """new Promise((done) => {
  document.body.insertAdjacentHTML("beforeend",
    `<div class="glightbox-container"><img src="images/walk.png"></div>`);
  const large = document.querySelector(".glightbox-container img");
  large.onload = () => done(getComputedStyle(large).filter.includes("invert")); })"""
REACHED = """(() => { const link = document.querySelector(".skip-link");
  link.focus();
  return link.getBoundingClientRect().top >= 0; })()"""
RULES = {
    "html { scroll-padding-top: 5.5rem": (1280, "light", BELOW),
    "  html { scroll-padding-top: 8rem": (820, "light", BELOW),
    "section:target::before": (1280, "light", BELOW),
    "main pre code span { color: inherit": (1280, "light", OWN),
    "main pre code span:is(.fu": (1280, "dark print", OWN),
    "main pre > code.sourceCode > span {": (1280, "dark print", OWN),
    "#quarto-sidebar": (390, "light", NARROW),
    "body.quarto-dark .glightbox-container": (1280, "dark", LARGE),
    ".skip-link:focus": (1280, "light", REACHED),
    "  main table { display: block": (820, "light", FITS),
}


def palettes():
    "The colors of both themes, as Quarto hands them on."
    rules = []
    for mode, selector in (("light", ":root"), ("dark", "body.quarto-dark")):
        named = " ".join(f"--{k}: {v};" for k, v in COLORS[mode].items())
        rules.append(f"{selector} {{{named}}}")
    return "\n".join(rules)


def is_well(browser, style, width, scheme, well):
    "What the page in small with this style says of itself."
    html = THEMED.replace("STYLE", style).replace("SCHEME", scheme.split()[0])
    html = html.replace("PALETTES", palettes())
    html = html.replace("BAR", "67" if width > 991 else "107")
    html = html.replace("INK", "#f8f8f2" if "dark" in scheme else "#545454")
    html = html.replace("CELLS", "<td>a_long_name</td>" * 20)

    def answer(route):
        path = modules.NBS / route.request.url.removeprefix("http://site.test/")
        if path.is_file():
            route.fulfill(path=path)
        else:
            route.fulfill(body=html, content_type="text/html")

    page = browser.new_page(viewport={"width": width, "height": 900})
    page.route("http://site.test/**", answer)
    page.goto("http://site.test/")
    if "print" in scheme:
        page.emulate_media(media="print")
    found = page.evaluate(well)
    page.close()
    return found


@pytest.mark.parametrize("rule", RULES)
def test_the_style_mends_what_the_theme_breaks(browser, rule):
    "With its style the page is well; without one of its rules it is not."
    style = (modules.NBS / "styles.css").read_text()
    less = re.sub(rf"^{re.escape(rule)}.*", "", style, flags=re.M)
    assert is_well(browser, style, *RULES[rule])
    assert not is_well(browser, less, *RULES[rule])
