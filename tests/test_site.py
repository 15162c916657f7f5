"""The site's pages as they stand in nbs/: `make docs` checks them once more as they are
staged. And the checker itself: it finds what is broken.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

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
docs = script("check_docs")
REPOSITORY = docs.settings()["git_url"]
SITE = docs.settings()["doc_host"] + docs.settings()["doc_baseurl"]
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


CONFIG = """website: {page-navigation: true, navbar: {search: true, left: [{href: other.qmd}]},
  sidebar: {contents: [{section: One, contents: [01_page.ipynb, other.qmd]}]},
  page-footer: {right: "After [them](other.qmd#there)"}}
format: {html: {theme: {light: flatly, dark: darkly}}}
"""


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


SETTINGS = docs.settings()


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
        ("other.qmd#there", f"{SITE}/block.html", "no such page"),
        (
            "other.qmd#there",
            f"{REPOSITORY}/blob/main/README.txt",
            "no such file in the repository",
        ),
        ("other.qmd#there", f"{SITE}/notebooks/99_none.ipynb", "no such notebook"),
        ("@fig-curve", "@fig-slope", "nothing is labelled fig-slope"),
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
        ("Noted.", f"<{SITE}/another.html>", "no such page"),
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
            ["no label", "nothing is labelled fig-curve"],
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
            ["no fig-cap", "no fig-alt", "not read", "not read"],
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
        ("page-navigation: true, ", "", "page-navigation"),
        ("search: true", "search: false", "no search"),
        (", dark: darkly", "", "no theme for the dark"),
    ],
)
def test_a_broken_configuration_is_found(tmp_path, good, bad, said):
    write_site(tmp_path)
    assert good in CONFIG
    (tmp_path / "_quarto.yml").write_text(CONFIG.replace(good, bad))
    found = docs.check(tmp_path)[1]
    assert found and all(said in fault for fault in found), found


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
            "website: {", "website: {favicon: none.png, "
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


def test_the_preview_shows_what_is_on_a_page(tmp_path, monkeypatch):
    preview = script("preview_docs")
    monkeypatch.setattr(preview, "STAGED", tmp_path / "staged")
    monkeypatch.setattr(preview, "OUT", tmp_path / "preview")
    preview.STAGED.mkdir()
    write_site(
        preview.STAGED,
        GOOD + "\n```python\nprice = '$x$'\n```\n\n[below](other.qmd#there)",
        "#| label: fig-curve\n#| fig-cap: A curve.\n#| fig-alt: It falls.\n#|"
        " code-fold: true\nplot(1 < 2)",
    )
    assert preview.write_pages() == ["other.html", "page.html"]
    page = (preview.OUT / "page.html").read_text()
    for shown in (
        "<h1>page</h1>",
        'id="a-section-with-code-x2"',
        'href="other.html#there"',
        '<img src="dot.png" alt="One dot">',
        "<figcaption>A picture.</figcaption>",
        "price = '$x$'",
        '<div class="callout">',
        (
            '<figure id="fig-curve"><img alt="It falls."'
            ' src="data:image/png;base64,iVBORw0KGgo=">'
        ),
        'href="#fig-curve"',
        (
            "<details><summary>Show the code</summary><pre><code>plot(1 &lt;"
            " 2)</code></pre></details>"
        ),
        "<td><code>x | y</code></td>",
        "A price of $5, a <code>$</code> in code.",
    ):
        assert shown in page, shown
    # KaTeX keeps the TeX for those who copy it
    assert (
        "\x02" not in page
        and "\x04" not in page
        and "$\\left" not in page
        and "\\left( a" in page
    )
    assert (
        'id="there-1"' in (preview.OUT / "other.html").read_text()
        and (preview.OUT / "dot.png").is_file()
    )
