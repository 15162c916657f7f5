"""The site: its pages as they are staged have no faults, and the checker finds what is
broken; what staging makes of a chapter; the search; the style in a browser.
"""

import re
import shutil

import check_docs as docs
import modules
import nbformat
import numpy as np
import pytest
import search_text as search
import stage_docs as stage
from PIL import Image

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
PHOTOGRAPHS = """22_image_train:fig-photographs 20_image_data:fig-task 23_windows:fig-large
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
