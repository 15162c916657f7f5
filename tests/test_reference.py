"""The reference of the site: what a name means on a page, every public name with its
signature; and what the search is given to read.
"""

import ast
import json
import re
from html import escape
from pathlib import Path

import api_pages as api
import modules
import pytest
import search_text as search

ROOT = Path(__file__).resolve().parent.parent


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
    names = (ROOT / "tests/public_names.txt").read_text().split()
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
    site = (ROOT / "_quarto.yml").read_text()
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
