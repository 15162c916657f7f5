"""The examples of CONTRIBUTING.md run as they stand, and the model cards say what is
measured.
"""

import re
from pathlib import Path

import model_cards
import nbformat
import pytest
from test_project import export, python

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", TEXT, flags=re.M)[1:]
}


def example(section):
    return re.search(r"```python\n(.*?)```", SECTIONS[section], re.S)[1]


@pytest.mark.parametrize(
    "section", ["A term", "A norm", "A solver", "A data set", "A model"]
)
def test_an_example_runs(section, tmp_path, monkeypatch, compile_quickly):
    monkeypatch.chdir(tmp_path)
    code = example(section)
    found = {}
    exec(compile(code, section, "exec"), found)
    if section == "A data set":
        assert found["path"].num_nodes == 3
    elif section == "A model":
        assert (tmp_path / "parity/metrics.jsonl").exists()
    else:
        assert (
            found["path"].energies.total[-1].max() < found["path"].energies.total.max()
        )
    body = [line for line in code.splitlines() if line and "import" not in line]
    assert len(body) <= (12 if section != "A model" else 17)


def test_the_front_pages_code_prints_what_stands_below_it():
    "Numbers with a point to within one, all else as it is."
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.S)
    code, said = map("".join, zip(*pairs, strict=True))
    for found, kept in zip(python(code).split(), said.split(), strict=True):
        if "." in kept:
            assert float(found) == pytest.approx(float(kept), abs=1)
        else:
            assert found == kept


def test_the_chapter_becomes_a_module(tmp_path):
    (tmp_path / "nbs").mkdir()
    parts = example("How a chapter becomes a module").split("# %%\n")[1:]
    cells = [nbformat.v4.new_code_cell(part.rstrip()) for part in parts]
    chapter = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(chapter, tmp_path / "nbs/33_spring.ipynb")
    export(tmp_path)
    found = {}
    exec((tmp_path / "et_nbdev/spring.py").read_text(), found)
    assert found["__all__"] == ["spring"]
    exec(parts[-1], found)


def test_it_is_one_page_whose_links_lead_somewhere():
    assert len(TEXT.split()) < 1500
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), target
    named = re.findall(r"\b(?:scripts|experiments|benchmarks)/\w+\.py\b", TEXT)
    assert named and all((ROOT / name).is_file() for name in named)


def test_the_model_cards_are_those_of_the_weights():
    "After a change of weights or results: python scripts/model_cards.py"
    text = (ROOT / "results/model_cards.md").read_text(encoding="utf-8")
    assert text == f"# Model cards\n\n{model_cards.cards()}"
    for path in (ROOT / "et_nbdev").rglob("*.safetensors"):
        assert f'`from_pretrained("{path.stem}")`' in text
