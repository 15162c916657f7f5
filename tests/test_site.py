"""The site's pages as they stand in nbs/: `make docs` checks them once more as they are
staged. And the checker itself: it finds what is broken.
"""

import ast
import base64
import importlib.util
import io
import json
import os
import re
import shutil
import sys
from html import escape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


colab = script("colab")
modules = script("modules")
docs = script("check_docs")
api = script("api_pages")
script("model_cards")
SETTINGS = docs.settings()
REPOSITORY = SETTINGS["git_url"]
SITE = SETTINGS["doc_host"] + SETTINGS["doc_baseurl"]
COLAB = REPOSITORY.replace("github.com", "colab.research.google.com/github", 1)
COLAB += "/blob/main"


def test_pages_have_no_faults():
    site, faults = docs.check(ROOT / "nbs", docs.find_katex())
    assert faults == []
    # it did look
    assert (
        sum(len(page.formulas) for page in site) > 1000
        and sum(len(page.labels) for page in site) > 50
    )


@pytest.mark.parametrize(
    "tex, text",
    [
        (r"-\partial E/\partial g", "so -∂E/∂g is"),
        (r"\tfrac1D \mathbf 1", "so 1/D 1 is"),
        (r"W_K^{h}, \; x \in \mathbb R^D \tag{3}", "so W_K^h, x ∈ℝ^D is"),
        (r"\begin{aligned}a&=b\\c&<d\end{aligned}", "so a=b c&lt;d is"),
        (r"x", "so x is"),
    ],
)
@pytest.mark.parametrize("marks", [("", ""), (r"\(", r"\)")])
def test_search_shows_formulas_as_people_read_them(tmp_path, tex, text, marks):
    "As KaTeX has them, and between the marks of other methods."
    marked = tex.join(marks)
    page = f'<p>so <span class="math inline">{escape(marked)}</span> is</p>'
    (tmp_path / "a.html").write_text(page)
    in_index = marked.replace("<", "&lt;")
    entry = {"href": "a.html#b", "title": "A", "text": f"so {in_index} is"}
    index = tmp_path / "search.json"
    index.write_text(json.dumps([entry]))
    script("search_text").main(str(index))
    (found,) = json.loads(index.read_text(encoding="utf-8"))
    assert found == entry | {"text": text}


@pytest.mark.parametrize(
    "code, read",
    [
        (r'r"""$M =\n\frac{\partial g}{\partial x}$"""', 'r"""M = ∂g/∂x"""'),
        (r'"$1+\\epsilon$"', '"1+ϵ"'),
        (r'"a $1 or $2\n"', r'"a $1 or $2\n"'),
        ("f'{a}$x$'", "f'{a}$x$'"),
    ],
)
def test_search_shows_formulas_of_code_as_people_read_them(code, read):
    search = script("search_text")
    assert search.IN_CODE.sub(search.read_in_code, code.replace(r"=\n", "=\n")) == read


@pytest.mark.parametrize(
    "page, fault",
    [
        ("<td>::: {.a}</td>", True),
        ("<li>a\n:::</li>", True),
        ("<pre><code>:::</code></pre> <code>:::</code>", False),
    ],
)
def test_a_part_that_is_shown_as_text_is_found(tmp_path, page, fault):
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "search.json").write_text("[]")
    if not fault:
        return script("search_text").main(str(tmp_path / "search.json"))
    with pytest.raises(SystemExit, match="a.html shows"):
        script("search_text").main(str(tmp_path / "search.json"))


def test_every_formula_of_the_book_can_be_searched():
    plain = script("search_text").plain
    site, _ = docs.check(ROOT / "nbs", None)
    read = [plain(formula) for page in site for formula, *_ in page.formulas]
    assert len(read) > 1000 and all(read)


def test_the_address_is_put_where_pages_link_to_the_repository():
    put = script("stage_docs").addressed
    config = SimpleNamespace(git_url="https://host/us/it", branch="main")
    assert put("[How](../CITATION.cff)", config) == (
        "[How](https://host/us/it/blob/main/CITATION.cff)"
    )
    assert put("  href: ../  # it\n  href: api.qmd", config) == (
        "  href: https://host/us/it  # it\n  href: api.qmd"
    )
    assert put("[a](b.ipynb#c) `../x`", config) == "[a](b.ipynb#c) `../x`"


def test_the_landing_page_has_a_card_for_every_chapter(tmp_path):
    table = "## Reading map\n\n| | notebooks |\n|---|---|\n| a | b |\n\nAfter it."
    text = script("stage_docs").with_cards(table, tmp_path)
    assert text.endswith("\n\nAfter it.") and "| a |" not in text
    linked = set(re.findall(r"\]\(([\w-]+\.ipynb)\)", text))
    chapters = {
        p.name for p in (ROOT / "nbs").glob("[0-9]*.ipynb") if p.name[:2] < "58"
    }
    assert linked == {*chapters, "engine_room.ipynb"}
    # below the link what the chapter is for
    said = re.findall(r"^\[!?.*\]\([\w-]+\.ipynb\)\n\n(.+)", text, re.M)
    assert len(said) == len(chapters) and "fig-alt" not in "".join(said)
    pictures = re.findall(r"\((images/cards/[\w-]+\.png)\)", text)
    assert len(pictures) > len(chapters) / 2
    assert len(set(re.findall(r"!\[A figure of “(.+?)”\]", text))) == len(pictures)
    for path in pictures:
        assert Image.open(tmp_path / path).size == (360, 220)
        assert (tmp_path / path).stat().st_size < 60_000
    other = "## Reading it\n\n| a |\n|---|\n"
    assert script("stage_docs").with_cards(other, tmp_path) == other


# --- the checker ---

GOOD = """## A section, *with* `code` & $x^2$

An inline $E = -\\frac{1}{2}$ and one displayed,

$$\\left( a \\right)$$

back to [the section](#a-section-with-code-x2), to [another page](other.qmd#there),
see @fig-curve. A price of \\$5, a `$` in code.

| a | b |
|---|---|
| `x | y` | $P(a|b)$ |

![A picture.](dot.png){fig-alt="One dot"}

::: {.callout-note}
Noted.
:::
"""


CONFIG = """website:
  page-navigation: true
  navbar: {search: true, left: [{href: other.qmd#there}]}
  sidebar: {contents: [{section: One, contents: [01_page.ipynb, other.qmd]}]}
  page-footer: {right: "After [them](other.qmd#there)"}
format:
  html:
    theme: {light: [theme/shared.scss, theme/light.scss], dark: [theme/shared.scss]}
    html-math-method: {method: katex, url: katex/}
"""


def write_style(folder):
    (folder / "katex").mkdir(exist_ok=True)
    (folder / "katex/katex.min.js").touch()
    shutil.copy(ROOT / "nbs/styles.css", folder)
    shutil.copytree(ROOT / "nbs/theme", folder / "theme", dirs_exist_ok=True)


def write_site(
    folder,
    prose=GOOD,
    cell="#| label: fig-curve\n#| fig-cap: A curve.\n#| fig-alt: It falls.\nplot()",
):
    picture = {
        "output_type": "display_data",
        "metadata": {},
        "data": {"image/png": "iVBORw0KGgo="},
    }
    cells = [
        {"cell_type": "markdown", "source": "# page\n\n> What it is for."},
        {"cell_type": "markdown", "source": prose},
        {
            "cell_type": "code",
            "source": colab.install_cell(docs.settings()),
            "outputs": [],
        },
        {"cell_type": "code", "source": cell, "outputs": [picture]},
    ]
    for c in cells:
        c["source"] = c["source"].splitlines(keepends=True)
    (folder / "01_page.ipynb").write_text(json.dumps({"cells": cells}))
    (folder / "other.qmd").write_text(
        "---\ntitle: other\ndescription: Another page.\n---\n\n## There\n\n###"
        " There\n\n[again](#there-1)\n"
    )
    Image.new("RGB", (1, 1)).save(folder / "dot.png")
    (folder / "_quarto.yml").write_text(CONFIG)
    write_style(folder)


def faults(folder, *args, **kw):
    write_site(folder, *args, **kw)
    return docs.check(folder)[1]


def test_a_good_page_passes(tmp_path):
    assert faults(tmp_path) == []


@pytest.mark.parametrize("kind", [0, 1, 3])
@pytest.mark.parametrize(
    "break_it", [lambda lines: "".join(lines), lambda lines: [x.strip() for x in lines]]
)
def test_a_source_without_its_lines_is_found(tmp_path, kind, break_it):
    write_site(tmp_path)
    page = tmp_path / "01_page.ipynb"
    notebook = json.loads(page.read_text())
    notebook["cells"][kind]["source"] = break_it(notebook["cells"][kind]["source"])
    page.write_text(json.dumps(notebook))
    found = [f for f in docs.check(tmp_path)[1] if "a list of lines" in f]
    assert len(found) == 1


@pytest.mark.parametrize("old, new", [("github.com/", "github.com/me-"), ("!pip", "#")])
def test_a_notebook_that_colab_cannot_run_is_found(tmp_path, monkeypatch, old, new):
    said = "on Colab 01_page.ipynb does not install itself"
    write_site(tmp_path)
    page = tmp_path / "01_page.ipynb"
    page.write_text(page.read_text().replace(old, new))
    assert [said in fault for fault in docs.check(tmp_path)[1]] == [True]

    # as staged, where the page has lost the cell and links to the notebook
    (tmp_path / "nbs").mkdir()
    page.rename(tmp_path / "nbs" / page.name)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    linked = docs.Page(tmp_path / "page.qmd", [f"[Colab]({COLAB}/nbs/01_page.ipynb)"])
    monkeypatch.setattr(docs, "settings", lambda: SETTINGS)
    assert [said in fault for fault in docs.check_links(linked, [], tmp_path)] == [True]


@pytest.mark.parametrize("on_colab", [False, True])
def test_the_install_cell_runs_on_colab_alone(tmp_path, monkeypatch, on_colab):
    "Programs that write down how they are called take the place of git and pip."
    for name in ("git", "pip"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/called"\n'
            'if [ "$1" = clone ]; then mkdir -p "$6/nbs"; fi\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    if on_colab:
        monkeypatch.setitem(sys.modules, "google.colab", object())
    InteractiveShell().run_cell(colab.install_cell(SETTINGS)).raise_error()
    if not on_colab:
        assert not (tmp_path / "called").exists() and Path.cwd() == tmp_path
        return
    assert (tmp_path / "called").read_text().splitlines() == [
        f"git clone -q --depth 1 {SETTINGS['git_url']} et_nbdev",
        "pip install -q ./et_nbdev[dev]",
    ]
    assert Path.cwd() == tmp_path / "et_nbdev" / "nbs"
    (tmp_path / "et_nbdev" / "settings.ini").touch()  # once more does nothing
    InteractiveShell().run_cell(colab.install_cell(SETTINGS)).raise_error()
    assert len((tmp_path / "called").read_text().splitlines()) == 2


@pytest.mark.parametrize("photograph", [False, True])
def test_the_first_cell_makes_figures_sharp(photograph, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(InteractiveShell, "enable_gui", lambda *_: None)
    shell = InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    before = plt.get_backend()
    shell.run_cell(colab.install_cell(SETTINGS)).raise_error()
    fig, ax = plt.subplots(figsize=(4, 3))
    if photograph:  # dense it would be too large
        ax.imshow(np.random.default_rng(0).random((300, 400, 3)))
    else:
        ax.plot([0, 1, 0])
    data, metadata = shell.display_formatter.format(fig)
    plt.close(fig)
    plt.switch_backend(before)
    png = base64.b64decode(data["image/png"])
    picture, shown = Image.open(io.BytesIO(png)), metadata["image/png"]
    density = round(picture.width / shown["width"], 1)
    assert (density, picture.mode) == ((1, "RGBA") if photograph else (2, "P"))
    assert len(png) < (300_000 if photograph else 30_000)


@pytest.mark.parametrize(
    "good, bad, said",
    [
        (
            "#a-section-with-code-x2",
            "#a-section",
            "no anchor #a-section on 01_page.ipynb",
        ),
        ("other.qmd#there", "other.qmd#where", "no anchor #where on other.qmd"),
        ("other.qmd#there", "another.qmd", "no such file: another.qmd"),
        ("other.qmd#there", "other.html", "link to the page's source"),
        (
            "other.qmd#there",
            f"{SITE}/block.html",
            "leads away from a preview or a fork",
        ),
        (
            "other.qmd#there",
            f"{REPOSITORY}/blob/main/README.txt",
            "no such file in the repository",
        ),
        ("other.qmd#there", "notebooks/99_none.ipynb", "no such notebook"),
        ("@fig-curve", "@fig-slope", "nothing is labeled fig-slope"),
        ("dot.png", "dots.png", "no such file: dots.png"),
        (
            "other.qmd#there",
            "https://colab.research.google.com/github/some/body/blob/main/nbs/01_page.ipynb",
            "Colab opens another repository",
        ),
        ("(other.qmd#there)", "(another.qmd 'Another')", "no such file: another.qmd"),
        ("(other.qmd#there)", "(another_(one).qmd)", "no such file: another_(one).qmd"),
        (
            "(other.qmd#there)",
            "[there]",
            "no link is defined for [another page][there]",
        ),
        ("Noted.", "[there]: another.qmd", "no such file: another.qmd"),
        (
            "Noted.",
            '<script src="https://cdn.else/a.js"></script>',
            "the page loads https://cdn.else/a.js",
        ),
        (
            "Noted.",
            "```{=html}\n<link href=https://cdn.else/a.css>\n```",
            "the page loads https://cdn.else/a.css",
        ),
        (
            "Noted.",
            '![A picture](https://cdn.else/a.png){fig-alt="Two dots."}',
            "the page loads https://cdn.else/a.png",
        ),
        ("Noted.", f"<{SITE}/another.html>", "leads away from a preview or a fork"),
        ("Noted.", "Noted.[^below]", "no footnote [^below]"),
        ("Noted.", "## Noted {#a}\n\n## Again {#a}", "two headings are called #a"),
        ("Noted.", "By $\\eqref{one}$.", "not read as a formula's number"),
        ("Noted.", "By \\(x\\).", "not read as a formula's number"),
        ("![A picture.]", "![]", "no caption"),
        ('{fig-alt="One dot"}', "", "no alternative text"),
        ('{fig-alt="One dot"}', '{fig-alt=" "}', "no alternative text"),
        ('{fig-alt="One dot"}', '{fig-alt="x"}', "no alternative text"),
        ("\\frac{1}{2}$", "\\frac{1}{2$", "a { that is not closed"),
        ("\\left( a", "( a", "\\left and \\right"),
        ("-\\frac{1}{2}$", "-\\frac{1}{2} $", "a dollar that opens or closes nothing"),
        ("Noted.", "#| echo: false", "a directive outside code"),
        ("Noted.", "A word {#sec-word} here", "attributes that belong to nothing"),
        ("Noted.", "{{< include x >}}", "a shortcode"),
        ("Noted.\n:::", "Noted.", "a ::: that is not closed"),
        (".callout-note", ".callout-node", "no such callout"),
        ("| `x | y` |", "| `x | y` | z |", "a row of 3 cells in a table of 2"),
    ],
)
def test_a_broken_page_is_found(tmp_path, good, bad, said):
    assert good in GOOD
    found = faults(tmp_path, GOOD.replace(good, bad))
    assert found and all(said in fault for fault in found), found


@pytest.mark.parametrize(
    "prose, said",
    [
        ("By Eq. (1) and (2), and Eq. 1–2.", None),
        ("By Eq. (1), or (3).", "no formula carries the number (3): Eq. (1), or (3)"),
        ("By Equation (3) of the paper.", "no formula carries the number (3)"),
        ("By Eqs. 1–3.", "no formula carries the number (3)"),
        ("By Eq. (3) of Ramsauer et al.", None),
        ("$$b \\tag{3}$$\n\nBy Eq. (3).", None),
        ("$$b \\tag{2}$$", "\\tag{2} stands more than once"),
        ("$b \\tag{3}$", "not displayed"),
    ],
)
def test_numbers_of_equations_are_looked_at(tmp_path, prose, said):
    found = faults(tmp_path, GOOD + "\n$$a \\tag{1}$$\n\n$$a \\tag{2}$$\n\n" + prose)
    assert found and all(said in fault for fault in found) if said else found == []


@pytest.mark.parametrize(
    "cell, said",
    [
        (
            "#| fig-cap: A curve.\n#| fig-alt: It falls.\nplot()",
            ["no label", "nothing is labeled fig-curve"],
        ),
        ("#| label: fig-curve\n#| fig-alt: It falls.\nplot()", ["no fig-cap"]),
        ("#| label: fig-curve\n#| fig-cap: A curve.\nplot()", ["no fig-alt"]),
        (
            "#| label: fig-curve\n#| fig-cap: A curve.\n#| fig-alt: x\nplot()",
            ["no fig-alt"],
        ),
        (
            (
                '#| label: fig-curve\n#| fig-cap: "A curve, $\\\\frac{1}{2$"\n#|'
                " fig-alt: It falls.\nplot()"
            ),
            ["a { that is not closed"],
        ),
        (
            (
                "#| label: fig-curve\n#| fig-cap: A curve, [there](another.qmd)\n#|"
                " fig-alt: It falls.\nplot()"
            ),
            ["no such file: another.qmd"],
        ),
        (
            (
                '#| label: fig-curve\n#| fig-cap: "A curve, $\\gamma$"\n#| fig-alt: It'
                " falls.\nplot()"
            ),
            ["cannot read", "no fig-cap", "no fig-alt", "not read", "not read"],
        ),
        (
            (
                '#| label: fig-curve\n#| fig-cap: "A curve, $\\alpha$"\n#| fig-alt: It'
                " falls.\nplot()"
            ),
            ["no fig-cap", "no fig-alt", "not read", "not read"],
        ),
        (
            "#| label: fig-curve\n#| fig-cap: A curve.\nplot()\n#| fig-alt: It falls.",
            ["no fig-alt", "not read"],
        ),
        (
            (
                "#| label: fig-curve\n#| fig-cap: A curve.\n#| fig-alt: It falls.\n#|"
                " code-flod: true\nplot()"
            ),
            ["no directive 'code-flod'"],
        ),
    ],
)
def test_a_broken_figure_is_found(tmp_path, cell, said):
    found = faults(tmp_path, cell=cell)
    assert len(found) == len(said) and all(
        any(s in fault for fault in found) for s in said
    ), found


@pytest.mark.parametrize(
    "html, said",
    [
        (
            '<img src="data:image/png;base64,xx">',
            "a picture in an output has no alternative text",
        ),
        (
            '<img alt="" src="data:image/png;base64,xx">',
            "a picture in an output has no alternative text",
        ),
        (
            '<script src="https://cdn.example.org/plot.js"></script>',
            "an output loads https://cdn.example.org/plot.js",
        ),
        (
            '<link rel="stylesheet"\nhref="https://example.org/font.css">',
            "an output loads https://example.org/font.css",
        ),
        ("<style>@import url(https://example.org/font.css)</style>", "an output loads"),
        (
            '<svg viewBox="0 0 1 1"></svg>',
            "a picture in an output has no alternative text",
        ),
        ('<a href="another.html">there</a>', "no such file: another.html"),
        ("<p>$x$</p>", "a formula in HTML"),
        ('<svg role="img" aria-label="A dot"></svg><script>f = `$a$`</script>', None),
        ('<img alt="A dot" src="data:image/png;base64,xx">', None),
    ],
)
def test_html_outputs_are_looked_at(tmp_path, html, said):
    write_site(tmp_path)
    page = tmp_path / "01_page.ipynb"
    notebook = json.loads(page.read_text())
    notebook["cells"][-1]["outputs"][0]["data"] = {"text/html": html}
    page.write_text(json.dumps(notebook))
    found = docs.check(tmp_path)[1]
    assert [said in fault for fault in found] == [True] if said else found == []


@pytest.mark.parametrize(
    "output, said",
    [
        (
            {
                "output_type": "stream",
                "name": "stderr",
                "text": "Traceback (most recent call last):",
            },
            "a warning was stored",
        ),
        (
            {
                "output_type": "stream",
                "name": "stdout",
                "text": "written to /var/me/out",
            },
            "an output names a file of somebody's machine: /var/me/out",
        ),
        (
            {
                "output_type": "stream",
                "name": "stdout",
                "text": "written to out/var/me, 3/4",
            },
            None,
        ),
    ],
)
def test_text_outputs_are_looked_at(tmp_path, output, said):
    write_site(tmp_path)
    page = tmp_path / "01_page.ipynb"
    notebook = json.loads(page.read_text())
    notebook["cells"][-1]["outputs"].append(output)
    page.write_text(json.dumps(notebook))
    found = docs.check(tmp_path)[1]
    assert [said in fault for fault in found] == [True] if said else found == []


@pytest.mark.parametrize(
    "good, bad, said",
    [
        ("(other.qmd#there)", "(another.qmd)", "no such file: another.qmd"),
        ("(other.qmd#there)", "(other.qmd#where)", "no anchor #where on other.qmd"),
        (
            "left: [{href: other.qmd#there}]",
            "left: [{href: other.qmd}]",
            "highlights other.qmd",
        ),
        ("page-navigation: true", "page-navigation: false", "page-navigation"),
        ("search: true", "search: false", "no search"),
        (", dark: [theme/shared.scss]", "", "no theme for the dark"),
        (
            "dark: [theme/shared.scss]",
            "dark: darkly",
            "the dark theme loads its fonts from elsewhere",
        ),
        (
            "[theme/shared.scss, theme/light.scss]",
            "flatly",
            "the light theme loads its fonts from elsewhere",
        ),
        (
            "{method: katex, url: katex/}",
            "mathjax",
            "formulas are set by a script from elsewhere",
        ),
        (
            "{method: katex, url: katex/}",
            "katex",
            "formulas are set by a script from elsewhere",
        ),
        (
            "url: katex/",
            "url: https://cdn.jsdelivr.net/npm/katex/dist/",
            (
                "formulas are set by a script from elsewhere",
                "_quarto.yml loads https://cdn",
            ),
        ),
    ],
)
def test_a_broken_configuration_is_found(tmp_path, good, bad, said):
    write_site(tmp_path)
    assert good in CONFIG
    (tmp_path / "_quarto.yml").write_text(CONFIG.replace(good, bad))
    found = docs.check(tmp_path)[1]
    said = [said] if isinstance(said, str) else said
    assert found and all(any(part in fault for part in said) for fault in found), found


@pytest.mark.parametrize(
    "name, good, bad, said",
    [
        (
            "styles.css",
            "body {",
            '@import url("https://fonts.googleapis.com/css?family=Lato");\nbody {',
            "styles.css loads https://fonts.googleapis.com",
        ),
        (
            "theme/shared.scss",
            "/*--",
            '@import "//cdn.example.org/font.css";\n/*--',
            "shared.scss loads //cdn.example.org/font.css",
        ),
        (
            "theme/shared.scss",
            "$web-font-path: false",
            "",
            "loads its fonts from elsewhere",
        ),
        (
            "theme/light.scss",
            "$link: #5b3a8c",
            "$link: #18bc9c",
            "$link on $page is 2.4 in the light",
        ),
        (
            "theme/dark.scss",
            "$muted: #b0a8bf",
            "$muted: #6c757d",
            "$muted on $page is 3.9 in the dark",
        ),
        ("theme/dark.scss", "$box: #231d2e", "$box: #f8f9fa", "in the dark theme"),
        (
            "theme/light.scss",
            "$code-comment: #645c70",
            "$code-comment: #999999",
            "$code-comment on $box is 2.6",
        ),
        (
            "theme/dark.scss",
            "$button: #3b3150;",
            "",
            "dark.scss names no color $button",
        ),
        ("theme/shared.scss", "--tip: #{$tip};", "", "does not hand on $tip as --tip"),
        ("styles.css", "var(--muted)", "var(--pale)", "styles.css uses --pale"),
    ],
)
def test_a_style_that_cannot_be_read_is_found(tmp_path, name, good, bad, said):
    write_site(tmp_path)
    style = tmp_path / name
    assert good in style.read_text()
    style.write_text(style.read_text().replace(good, bad, 1))
    found = docs.check(tmp_path)[1]
    assert any(said in fault for fault in found), found


def test_the_fonts_of_the_formulas_are_there():
    folder = ROOT / "nbs/katex"
    css = (folder / "katex.min.css").read_text()
    fonts = set(re.findall(r"fonts/[\w-]+\.woff2", css))
    assert len(fonts) == 20 and all((folder / font).is_file() for font in fonts)
    assert "MIT" in (folder / "LICENSE").read_text()


# --- what staging makes, and what may be wrong with it ---

FRONT = "---\ntitle: norm\ndescription: What it is for.\noutput-file: norm.html\n---"


def staged_cell(kind, source, outputs=None, name="x"):
    cell = {"cell_type": kind, "id": name, "metadata": {}}
    cell["source"] = source.splitlines(keepends=True)
    return cell | ({"outputs": outputs or []} if kind == "code" else {})


def staged_faults(folder, *cells, name="02_norm.ipynb"):
    notebook = {"cells": [staged_cell("raw", FRONT), *cells], "metadata": {}}
    (folder / name).write_text(json.dumps(notebook))
    (folder / "_quarto.yml").write_text(
        CONFIG.replace("01_page.ipynb, other.qmd", name).replace(
            "other.qmd#there", f"{name}#a"
        )
    )
    write_style(folder)
    anchored = docs.read_page(folder / name)
    assert anchored.front["output-file"] == "norm.html"
    return [f for f in docs.check(folder)[1] if "no anchor #a on" not in f]


def printed(text):
    return [{"output_type": "stream", "name": "stdout", "text": text}]


def data(kind, text):
    return [{"output_type": "display_data", "metadata": {}, "data": {kind: text}}]


def drawn_cell(caption):
    said = f"label: fig-x\n#| fig-cap: {caption}\n#| fig-alt: It falls."
    source = f"#| classes: drawn\n#| {said}\nplot()"
    return staged_cell("code", source, data("image/png", "iVBORw0KGgo="))


TEXT = staged_cell("markdown", "Here is the text.")
LONG = "x = " + "1" * 84  # as wide as the column


@pytest.mark.parametrize(
    "cells, said",
    [
        ([TEXT], None),
        # shown lines as wide as the column, and wider
        ([staged_cell("code", LONG, printed(LONG)), TEXT], None),
        ([staged_cell("code", LONG + "1")], "code is 89 characters wide"),
        ([staged_cell("code", f"{LONG}  # noqa: E501")], "code is 102 characters wide"),
        ([staged_cell("code", "x", printed(LONG + "1"))], "an output is 89 characters"),
        ([staged_cell("code", "x", data("text/plain", LONG + "1"))], "an output is 89"),
        ([staged_cell("markdown", f"```python\n{LONG}1\n```")], "code is 89"),
        ([staged_cell("code", f"#| echo: false\n{LONG}1", printed("x"))], None),
        ([staged_cell("code", f"#| fig-cap: {LONG}{LONG}\nx")], None),
        # a colon and what it announces
        ([staged_cell("markdown", "Thus:"), staged_cell("code", "x")], None),
        ([staged_cell("markdown", "Thus:"), staged_cell("markdown", "- a\n- b")], None),
        ([staged_cell("markdown", "Thus:"), staged_cell("markdown", "$$a$$")], None),
        (
            [
                staged_cell("markdown", "Thus:"),
                staged_cell("markdown", "### norm", name="doc-norm"),
            ],
            None,
        ),
        ([staged_cell("markdown", "Thus:"), TEXT], "a colon announces"),
        (
            [
                staged_cell("markdown", "Thus:"),
                staged_cell("markdown", "**Next.** So."),
            ],
            "a colon announces",
        ),
        ([staged_cell("markdown", "Thus:")], "a colon announces"),
        (
            [
                staged_cell("markdown", "Thus:"),
                staged_cell("code", "#| include: false\nx", printed("x")),
                TEXT,
            ],
            "a colon announces",
        ),
        # names that are linked
        (
            [staged_cell("markdown", "### layer_norm\n\n[`layer_norm`](#layer_norm)")],
            None,
        ),
        (
            [staged_cell("markdown", "### exp\n\nIt is [`exp`](#exp).")],
            "something else",
        ),
        (
            [staged_cell("markdown", "### Norm\n\n[`EnergyLayerNorm`](#norm)")],
            "something else",
        ),
        # what Quarto would fetch scripts for, or show as it is
        (
            [staged_cell("code", "x", data("text/html", "<p>x</p>"))],
            "load jQuery and require.js",
        ),
        (
            [staged_cell("code", "x", data("application/javascript", "x()"))],
            "load jQuery and require.js",
        ),
        (
            [
                staged_cell(
                    "code", "x", data("text/markdown", "```{=html}\n<p>x</p>\n```")
                )
            ],
            None,
        ),
        (
            [
                staged_cell(
                    "code",
                    "x",
                    data(
                        "text/markdown",
                        '```{=html}\n<script src="https://cdn.org/x.js"></script>\n```',
                    ),
                )
            ],
            "an output loads https://cdn.org/x.js",
        ),
        (
            [staged_cell("code", "x", data("text/markdown", "| a |\n|---|\n| -0.5 |"))],
            "a hyphen for a minus",
        ),
        (
            [staged_cell("code", "x", data("text/markdown", "| a |\n|---|\n| −0.5 |"))],
            None,
        ),
        (
            [
                staged_cell(
                    "code",
                    "x",
                    data("text/markdown", '```{=html}\n<input type="range">\n```'),
                )
            ],
            "a control has no label",
        ),
        (
            [
                staged_cell(
                    "code",
                    "x",
                    data(
                        "text/markdown",
                        '```{=html}\n<input id="a"><label for="a">a</label>'
                        '<input aria-label="b">\n```',
                    ),
                )
            ],
            None,
        ),
        # signatures as Python prints them
        *[
            (
                [staged_cell("markdown", f"```python\n{signature}\n```")],
                "a signature as Python prints it",
            )
            for signature in (
                "def f(x)->tuple:",
                "def f(x:NoneType=None):",
                "def f(x: jaxlib._jax.Array):",
                "def f(x=__main__.A()):",
                "def f(x=<function <lambda> at 0x7f>):",
            )
        ],
        (
            [staged_cell("markdown", "```python\ndef f(x) -> tuple[int, int]:\n```")],
            None,
        ),
        # lists
        ([staged_cell("markdown", "Try\n\n1. this\n2. that")], None),
        ([staged_cell("markdown", "Try this:\n1. one\n2. two")], "a list that runs on"),
        ([staged_cell("markdown", "Try\n- one\n- two")], "a list that runs on"),
        # options of a cell, as Quarto reads them
        ([staged_cell("code", "#| classes: [drawn, site]\n1")], None),
        ([staged_cell("code", "#| classes: drawn site\n1")], "that are no list"),
        (
            [staged_cell("code", "#| code-fold: show\n#| code-fold: true\n1")],
            "code-fold comes twice",
        ),
        ([staged_cell("code", "#| fig-cap: a: b\n1")], "options of a cell"),
        # what is inverted by night
        ([drawn_cell("The thick line.")], None),
        ([drawn_cell("The black line.")], "its caption says 'black'"),
    ],
)
def test_what_was_wrong_with_a_staged_page_is_found(tmp_path, cells, said):
    found = staged_faults(tmp_path, *cells)
    assert any(said in fault for fault in found) if said else found == [], found


def test_view_source_leads_to_a_file(tmp_path):
    found = staged_faults(tmp_path, TEXT, name="99_none.ipynb")
    assert ["View source" in fault for fault in found] == [True]
    (tmp_path / "99_none.ipynb").unlink()
    page = FRONT.replace("---\ntitle", "---\nrepo-actions: false\ntitle")
    (tmp_path / "api.qmd").write_text(page + "\n\nText.\n")
    config = (tmp_path / "_quarto.yml").read_text().replace("99_none.ipynb", "api.qmd")
    (tmp_path / "_quarto.yml").write_text(config)
    assert not any("View source" in fault for fault in docs.check(tmp_path)[1])


class Config:
    git_url, branch = REPOSITORY, "main"
    doc_host, doc_baseurl = SETTINGS["doc_host"], SETTINGS["doc_baseurl"]


def test_staging_finishes_a_page(tmp_path):
    "What nbdev stages for the page of norm, in small, and what becomes of it."
    stage = script("stage_docs")
    animation = (
        '<link rel="stylesheet"\nhref="https://maxcdn.bootstrapcdn.com/x.css">'
        '<div class="animation"><img id="_anim_img"><i class="fa fa-play"></i>'
        '<input id="_anim_slider0" type="range"></div>'
    )
    shown = "#| code-fold: show\n" + stage.EXPORTED
    exported = shown + (
        "def layer_norm(least: int = 1, **sizes: int):  # pyright: ignore[x]\n"
        '    "Raise."\n'
    )
    long = shown + "class EnergyLayerNorm:\n" + "    x = 1\n" * 40
    cells = [
        staged_cell("raw", FRONT),
        staged_cell(
            "markdown", "By `EnergyLayerNorm`, `exp`, `train`, `$x` and\n`jnp`."
        ),
        staged_cell("code", exported),
        staged_cell("code", "#| echo: false\n#| output: asis\nshow_doc(layer_norm)"),
        staged_cell("code", "#| echo: false\nshow_doc(EnergyLayerNorm)"),
        staged_cell("code", long),
        staged_cell(
            "code", "#| fig-alt: It moves.\nplay()", data("text/html", animation)
        ),
        staged_cell("code", "table", data("text/markdown", "| a |\n|---|\n| -0.5 |\n")),
        staged_cell("code", "print()", printed("a word " * 20)),
    ]
    path = tmp_path / "02_norm.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"widgets": {}}}))
    stage.finish(path, Config)
    notebook = json.loads(path.read_text())
    sources = [cell["source"] for cell in notebook["cells"]]
    assert all(isinstance(source, list) for source in sources)
    assert notebook["metadata"] == {}
    front, links, text, sizes, code, norm, body, film, table, words = [
        "".join(source) for source in sources
    ]
    assert front == FRONT
    assert f"({COLAB}/nbs/02_norm.ipynb)" in links
    assert "(notebooks/02_norm.ipynb)" in links and SITE not in links
    assert text == (
        "By [`EnergyLayerNorm`](#energylayernorm), `exp`, `train`, `$x` and\n`jnp`."
    )
    # code in sight needs no signature above it
    assert sizes.startswith("### layer_norm\n\n[source](") and "```" not in sizes
    assert "code-fold: show" in code and "pyright" not in code
    # code behind a click has one, as it is written
    assert "\n```python\n@signed\nclass EnergyLayerNorm(" in norm
    assert "        dim: int,\n" in norm and "code-fold: true" in body
    shown = notebook["cells"][7]["outputs"][0]["data"]
    assert list(shown) == ["text/markdown"] and film
    html = "".join(shown["text/markdown"])
    assert html.startswith("```{=html}\n") and "maxcdn" not in html
    assert 'aria-label="Frame"' in html and 'alt="It moves."' in html and "▶" in html
    assert "| −0.5 |" in "".join(
        notebook["cells"][8]["outputs"][0]["data"]["text/markdown"]
    )
    assert table and words
    printed_lines = "".join(notebook["cells"][9]["outputs"][0]["text"]).split("\n")
    assert len(printed_lines) == 2 and max(map(len, printed_lines)) <= docs.WIDEST
    # and the check has nothing to say
    again = staged_faults(tmp_path, *notebook["cells"][1:])
    assert not [f for f in again if not re.search("fig|Eq|no formula", f)]


# Figures of the book by their labels, and files: what the dark theme inverts, and what
# it leaves as it is, because it is a photograph or a map.
DRAWINGS = """03_attention:fig-chase 05_block:fig-blocks 50_explorer:fig-dials
    00_one_sitting:fig-one-sitting 11_hopfield_continuous:fig-plane 32_anomaly:fig-why
    35_anomaly_results:fig-margins 40_classification_results:fig-folds
    31_graph_data:fig-graph 04_memory:fig-wells images/walk.png"""
PHOTOGRAPHS = """22_image_train:fig-photographs 20_image_data:fig-task 23_windows:fig-large
    20_image_data:fig-fills 21_image_model:fig-steps 21_image_model:fig-pipeline
    22_image_train:fig-cifar 21_image_model:fig-parts 01_energy:fig-landscape
    24_image_results:fig-photographs images/photographs.png images/descent.gif"""


def picture_of_the_book(name):
    if name.startswith("images/"):
        return Image.open(ROOT / "nbs" / name)
    notebook, label = name.split(":")
    text = (ROOT / f"nbs/{notebook}.ipynb").read_text()
    for cell in json.loads(text)["cells"]:
        if f"#| label: {label}\n" in cell["source"]:
            outputs = map(sys.modules["stage_docs"].stored_picture, cell["outputs"])
            return next(filter(None, outputs))


def test_the_dark_theme_inverts_drawings_and_no_photograph():
    stage = script("stage_docs")
    for labels, inverted in ((DRAWINGS, True), (PHOTOGRAPHS, False)):
        for name in labels.split():
            assert stage.is_drawing(picture_of_the_book(name)) == inverted, name
    # an empty page, and one with a small photograph
    page = np.full((200, 300, 3), 255, np.uint8)
    assert stage.is_drawing(Image.fromarray(page))
    page[20:80, 20:80] = np.random.default_rng(0).integers(0, 256, (60, 60, 3))
    assert not stage.is_drawing(Image.fromarray(page))


def test_no_browser_loads_a_picture_that_the_player_replaces():
    text = '::: {.et-play}\n![It falls.](images/a.gif){fig-alt="A & B"}\n:::\n'
    found = script("stage_docs").unless_played(text)
    image = '<noscript><figure><img src="images/a.gif" alt="A &amp; B">'
    assert image in found and "![" not in found
    index = json.loads((ROOT / "nbs/index.ipynb").read_text())
    own = "\n".join("".join(cell["source"]) for cell in index["cells"])
    assert script("stage_docs").unless_played(own).count("<noscript>") == 1
    assert "images/descent.gif" in (ROOT / "_quarto.yml").read_text()


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
BROKEN = {
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


@pytest.fixture(scope="module")
def browser():
    preview = script("preview_docs")
    sync = pytest.importorskip("playwright.sync_api").sync_playwright
    if (chrome := preview.find_chrome()) is None:
        pytest.skip("no Chromium")
    with sync() as play:
        browser = play.chromium.launch(executable_path=chrome, chromium_sandbox=False)
        yield browser
        browser.close()


def is_well(browser, style, width, scheme, well):
    "What the page in small with this style says of itself."
    html = THEMED.replace("STYLE", style).replace("SCHEME", scheme.split()[0])
    html = html.replace("PALETTES", sys.modules["preview_docs"].palettes())
    html = html.replace("BAR", "67" if width > 991 else "107")
    html = html.replace("INK", "#f8f8f2" if "dark" in scheme else "#545454")
    html = html.replace("CELLS", "<td>a_long_name</td>" * 20)

    def answer(route):
        path = ROOT / "nbs" / route.request.url.removeprefix("http://site.test/")
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


@pytest.mark.parametrize("rule", BROKEN)
def test_the_style_mends_what_the_theme_breaks(browser, rule, monkeypatch):
    "With its style the page is well; without one of its rules it is not."
    monkeypatch.setattr(sys.modules["preview_docs"], "STAGED", ROOT / "nbs")
    style = (ROOT / "nbs/styles.css").read_text()
    less = re.sub(rf"^{re.escape(rule)}.*", "", style, flags=re.M)
    assert is_well(browser, style, *BROKEN[rule])
    assert not is_well(browser, less, *BROKEN[rule])


def test_results_are_folded_on_the_landing_page():
    stage = script("stage_docs")
    figure = staged_cell("code", "#| echo: false\n#| classes: site\nplot()")
    table = data("text/markdown", "| a | b |\n|---|---|\n| 1 | 2 |")
    text = "## Results\n\n**Pictures.** What they are."
    cells = [
        staged_cell("markdown", "## In code"),
        staged_cell("markdown", text),
        staged_cell("code", "#| echo: false\ntable()", table),
        staged_cell("markdown", "*Close.*\n\n**Whole graphs.** Others."),
        figure,
        staged_cell("markdown", "Kept in `results/`.\n\n## Citation"),
    ]
    for cell in cells:
        cell["source"] = "".join(cell["source"])
    found = stage.with_folded_results(cells)
    assert found[2] == figure and "drawn" not in figure["source"]
    sources = [cell["source"] for cell in found]
    assert sources[:2] == ["## In code", "## Results\n\n"]
    assert sources[-1].endswith("## Citation") and len(sources) == 5
    fold = '::: {.callout-note collapse="true"}\n## '
    pictures, graphs = sources[3].split(fold)[1:]
    assert pictures.startswith("Pictures\n\nWhat they are.\n\n| a | b |")
    assert "| 1 | 2 |\n\n*Close.*\n:::" in pictures
    assert graphs == "Whole graphs\n\nOthers.\n:::\n"
    assert stage.with_folded_results(cells[:1]) == cells[:1]


def test_the_readme_has_the_tables_and_not_the_figure():
    text = (ROOT / "README.md").read_text()
    heads = ("MFLOP a picture |", "| CIFAR-10 |", "| seconds |", "| GIN |")
    assert all(head in text for head in heads)
    index = json.loads((ROOT / "nbs/index.ipynb").read_text())
    site = [c for c in index["cells"] if "#| classes: site\n" in c["source"]]
    assert len(site) == 2 and "callout" not in text
    assert "The tables, and what they compare" not in text


def test_staging_says_what_is_drawn(tmp_path):
    stage = script("stage_docs")
    (tmp_path / "images").mkdir()
    outputs, files = {}, {"drawing": "white", "map": "navy"}
    for name, color in files.items():
        path = tmp_path / f"images/{name}.png"
        Image.new("RGB", (30, 20), color).save(path)
        png = base64.b64encode(path.read_bytes()).decode()
        outputs[name] = data("image/png", png)[0]
    cell = lambda *names: dict(source="plot()", outputs=[outputs[n] for n in names])
    assert stage.drawn(cell("drawing")) == "#| classes: drawn\nplot()"
    own = cell("drawing") | {"source": "#| classes: site\nplot()"}
    assert stage.drawn(own) == "#| classes: [drawn, site]\nplot()"
    assert stage.drawn(cell("drawing", "map")) == stage.drawn(cell()) == "plot()"
    text = "![A]({}){{fig-alt="
    for file, said in (
        ("images/drawing.png", "{.drawn fig-alt="),
        ("images/map.png", "{fig-alt="),
        ("images/none.png", "{fig-alt="),
        ("images/other.gif", "{fig-alt="),
    ):
        found = stage.with_drawings(text.format(file), tmp_path)
        assert found == f"![A]({file}){said}"


@pytest.mark.parametrize(
    "name, notebook, place",
    [
        ("EnergyLayerNorm", "02_norm.ipynb", ("02_norm.ipynb", "energylayernorm")),
        ("et_nbdev.norm", "03_attention.ipynb", ("02_norm.ipynb", "")),
        (
            "et_nbdev.graph.energy.EdgeIndex",
            "03_attention.ipynb",
            ("30_graph_energy.ipynb", "edgeindex"),
        ),
        ("Graph.num_nodes", "31_graph_data.ipynb", ("80_graph_readers.ipynb", "graph")),
        ("Graph.nothing", "31_graph_data.ipynb", None),
        ("Split", "80_graph_readers.ipynb", ("80_graph_readers.ipynb", "split")),
        ("split", "80_graph_readers.ipynb", ("80_graph_readers.ipynb", "split-1")),
        ("descend", "07_solvers.ipynb", ("06_dynamics.ipynb", "descend")),  # imported
        ("exp", "03_attention.ipynb", None),  # a kernel's
        ("train", "20_image_data.ipynb", None),  # the split
        ("train", "22_image_train.ipynb", ("22_image_train.ipynb", "train")),
        ("prepare", "32_anomaly.ipynb", None),  # a model's
        ("batches", "61_training.ipynb", None),  # an argument
    ],
)
def test_a_name_means_what_it_means_on_its_page(name, notebook, place):
    assert modules.meaning(name, notebook) == place


def test_signatures_are_as_they_are_written():
    said = []
    for module in modules.modules():
        for name, (node, _) in module.public.items():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = module.signature(name)
                bodied = re.sub(r"(?m)^( *(?:def|\)).*):$", r"\1: ...", text)
                ast.parse(bodied + "\n    ..." * isinstance(node, ast.ClassDef))
                said.append(text)
    assert len(said) > 140
    assert max(len(line) for text in said for line in text.split("\n")) <= docs.WIDEST
    assert not any("pyright" in text or "noqa" in text for text in said)


def one_parameter_a_line(code):
    "Whether it holds for every function and method of a signature."
    bodied = re.sub(r"(?m)^( *(?:def|\)).*):$", r"\1: ...", code)
    tree = ast.parse(bodied + "\n    ..." * ("class " in code))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            a = function.args
            every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
            rows = [p.lineno for p in every if p is not None]
            if len(set(rows)) < len(rows):
                return False
    return True


def test_the_reference_has_every_public_name_with_its_signature():
    pages = api.api_pages(Config)
    names = (ROOT / "tests/public_names.txt").read_text().split()
    rooms = "\n".join(text for page, text in pages.items() if page != "api.qmd")
    headed = re.findall(r"^## (\w+) \{#\1(?:-1)?\}$", rooms, re.M)
    assert sorted(headed) == sorted(name.rpartition(".")[2] for name in names)
    entries = re.split(r"^## \w+ \{#", rooms, flags=re.M)[1:]
    anchors = [text[: text.index("}")] for text in entries]
    assert len({anchor.lower() for anchor in anchors}) == len(anchors)
    for anchor, text in zip(anchors, entries):
        name = anchor.removesuffix("-1")
        code = re.search(r"```python\n(.*?)\n```\n\n(?=\S)", text, re.S)
        assert re.search(rf"^(?:class|def) {name}\b", code[1], re.M), name
        assert one_parameter_a_line(code[1]), code[1]
        assert re.search(r"\]\(\d+\w*\.ipynb#", text), f"{name}: no chapter"
        assert re.search(r"\[source\]\(https://.*#L\d+\)", text), name
        assert f"#{anchor}) |" in pages["api.qmd"]
    site = (ROOT / "_quarto.yml").read_text()
    assert re.findall(r"- (api\w*\.qmd)", site) == list(pages)


@pytest.mark.parametrize(
    "head, split",
    [
        ("def f(x):", None),
        ("def f():", None),
        ("@a(1, 2)\ndef f(x):", None),
        (
            "def f(x, *, y: tuple[int, str] = (1, 'a,b'), **z) -> dict[str, int]:",
            (
                "def f(\n    x,\n    *,\n    y: tuple[int, str] = (1, 'a,b'),\n    **z,\n"
                ") -> dict[str, int]:"
            ),
        ),
        (
            "    @staticmethod\n    def f(x, y):",
            "    @staticmethod\n    def f(\n        x,\n        y,\n    ):",
        ),
        ("def f(\n    x,\n    y,\n):", None),
        (
            "def f(\n    x: str = ',', y=(1, 2)\n):",
            "def f(\n    x: str = ',',\n    y=(1, 2),\n):",
        ),
        ("def f(\n    x,  # said\n):", None),
        ("class A(B, C):", None),
    ],
)
def test_a_parameter_has_a_line_of_its_own(head, split):
    assert modules.one_a_line(head) == (split or head)


@pytest.mark.parametrize("data", [b"", b"a picture"])
def test_a_picture_that_does_not_open_is_found(tmp_path, data):
    write_site(tmp_path)
    (tmp_path / "dot.png").write_bytes(data)
    assert [
        "not a picture that can be opened: dot.png" in fault
        for fault in docs.check(tmp_path)[1]
    ] == [True]


def test_broken_navigation_and_size_are_found(tmp_path):
    write_site(tmp_path)
    (tmp_path / "dot.png").write_bytes(bytes(docs.LARGEST))
    (tmp_path / "left.qmd").write_text("---\ntitle: left\n---\n")
    config = tmp_path / "_quarto.yml"
    config.write_text(
        CONFIG.replace("href: other.qmd", "href: gone.qmd").replace(
            "website:\n", "website:\n  favicon: none.png\n"
        )
    )
    found = "\n".join(docs.check(tmp_path)[1])
    for said in (
        "is more than 3 MB",
        "nothing in the sidebar leads to left.qmd",
        "leads to gone.qmd",
        "no such picture: none.png",
        "left.qmd: the page has no description",
    ):
        assert said in found, said


@pytest.mark.parametrize(
    "tex", [r"\frac{a}{", r"a}", r"\begin{aligned} a \end{align}", r"\left( a", "a \\"]
)
def test_broken_formulas_are_found(tex):
    katex = docs.find_katex()
    assert docs.parse_plain(tex)
    assert katex is None or docs.parse_katex([(tex, True)], katex)[0]


def test_sound_formulas_pass():
    katex = docs.find_katex()
    for tex in (
        r"\{a\} \left\{ b \right.",
        r"\begin{aligned} a &= b \\ c &= d \end{aligned}",
        r"50\,\% \text{ of } x",
    ):
        assert docs.parse_plain(tex) == "" and (
            katex is None or docs.parse_katex([(tex, True)], katex) == [""]
        )


# --- the preview ---


@pytest.fixture
def preview(tmp_path, monkeypatch):
    pytest.importorskip(
        "pypandoc", reason="the preview's Pandoc: pip install -e .[docs]"
    )
    preview = script("preview_docs")
    monkeypatch.setattr(preview, "STAGED", tmp_path / "staged")
    monkeypatch.setattr(preview, "OUT", tmp_path / "preview")
    preview.STAGED.mkdir()
    return preview


def test_the_preview_shows_what_is_on_a_page(preview):
    write_site(
        preview.STAGED,
        GOOD + "\n```python\nprice = '$x$'\n```\n\n[below](other.qmd#there)",
        "#| label: fig-curve\n#| fig-cap: A curve.\n#| fig-alt: It falls.\n#|"
        " code-fold: true\nplot(1 < 2)",
    )
    assert preview.write_pages() == ["other.html", "page.html"]
    page = (preview.OUT / "page.html").read_text()
    for shown in (
        '<h1 class="title">page</h1>',
        'id="a-section-with-code-x2"',
        'href="other.html#there"',
        'src="dot.png"',
        "A picture.</figcaption>",
        "price ",
        "callout-note",
        '<figure id="fig-curve">',
        'href="#fig-curve"',
        "Show the code\n</summary>",
        'class="sourceCode python cell-code"',
        "<code>x | y</code>",
        "A price of $5, a <code>$</code> in code.",
        '<span class="math display">\\left( a \\right)</span>',
    ):
        assert shown in page, shown
    assert 'id="there-1"' in (preview.OUT / "other.html").read_text()
    assert (preview.OUT / "dot.png").is_file()


@pytest.mark.parametrize(
    "prose, said",
    [
        ("Text.", None),
        ("```\n" + "x" * 120 + "\n```", "pixels wider than the column"),
        ("<p style='min-width: 900px'>wide</p>", "wider than the window"),
        ("<p style='color: #bbb'>pale</p>", "a contrast of"),
        (
            "| name |\n|---|\n| [[a name](#x)]{style='display: inline-block; width: 1em'} |",
            "a name that breaks",
        ),
        ("<div style='height: 3000px'></div><button>Play</button>", "3"),
        ("![A drawing of it](dot.png){.drawn fig-alt='It falls.'}", None),
        ("<select style='color: #bbb'><option>pale</select>", "a contrast of"),
        ("::: {.et-walk}\nWhat stands here without a script.\n:::", "does not start"),
        ("[Go](#x){.start-buttons}<div style='height: 11000px'></div>", "pixels high"),
        (
            "![A drawing of it](dot.png){.drawn style='filter: none'}",
            "a drawing that stays white by night",
        ),
    ],
)
def test_what_only_a_browser_sees_is_found(preview, prose, said):
    chrome = preview.find_chrome()
    if chrome is None:
        pytest.skip("no Chromium")
    pytest.importorskip("playwright", reason="pip install -e .[docs]")
    write_site(preview.STAGED, prose)
    (preview.STAGED / "other.qmd").unlink()
    found = preview.look_at(preview.write_pages(), chrome)
    assert any(said in fault for fault in found) if said else found == [], found
