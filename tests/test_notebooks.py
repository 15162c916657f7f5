"""Every notebook runs from top to bottom, each in a process of its own, as nbdev_test
would run it; on Colab its first cell fetches and installs the repository.
"""

import json
import multiprocessing
import os
import re
import sys
from pathlib import Path

import colab
import modules
import pytest
import run_notebook
from conftest import QUICK_FLAGS
from IPython.core.interactiveshell import InteractiveShell

NBS = Path(__file__).resolve().parent.parent / "nbs"
NOTEBOOKS = sorted(
    p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
MINUTES = 15
# its children are forked with these imported already
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["nbdev.test", "et_nbdev.testing", "et_nbdev.vision.train", "et_nbdev.graph.nodes"]
)

# These train for long or run large problems; in all others the compiler takes longer
# than what it compiles, and is told to hurry.
COMPUTE = {
    "00_one_sitting",
    "01_recall",
    "22_image_train",
    "kernels",
    "32_anomaly",
    "37_classification",
    "42_puzzles",
    "51_performance",
}
# What XLA's older emitters save in compiling, these lose in running.
NEW_EMITTERS = {"kernels", "37_classification", "51_performance"}
# Less training, fewer pictures or fewer seeds, for the same checks; `-m long` runs them
# whole.
SHORTER = {
    "00_one_sitting": {"steps = 4000": "steps = 480", "20_000": "4_000"},
    "01_recall": {"sets=6": "sets=2"},
    "22_image_train": {
        "steps=300, warmup=50": "steps=150, warmup=25",
        'setting = (images["test"],': 'setting = (images["test"][:100],',
    },
    "37_classification": {", right(seed=2)]": "]"},
    "equilibria": {"photographs(32)": "photographs(32)[:2]"},
}


def runs(path, tmp_path):
    flags = os.environ.get("XLA_FLAGS", "")
    if path.stem in NEW_EMITTERS and flags == QUICK_FLAGS:
        flags = ""
    quick, said = path.stem not in COMPUTE, tmp_path / "said"
    given = path, NBS, said, flags, quick
    process = SERVER.Process(target=run_notebook.run, args=given)
    process.start()
    process.join(60 * MINUTES)
    if process.exitcode is None:
        process.kill()
    if process.exitcode == run_notebook.SKIPPED:
        pytest.skip(f"{path.name} says skip_exec")
    if process.exitcode != 0:
        text = re.sub(r"\x1b\[[0-9;]*m", "", said.read_text(errors="replace"))
        first = f"{path.name} failed (exit status {process.exitcode}):"
        lines = [first, *text.splitlines()[-40:]]
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path):
    if path.stem in SHORTER:
        text = path.read_text(encoding="utf-8")
        for whole, part in SHORTER[path.stem].items():
            whole, part = (json.dumps(code)[1:-1] for code in (whole, part))
            assert text.count(whole) == 1, f"{whole} is not what it was"
            text = text.replace(whole, part)
        path = tmp_path / "nbs" / path.name
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        (tmp_path / "results").symlink_to(NBS.parent / "results")
    runs(path, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", SHORTER)
def test_a_notebook_runs_whole(name, tmp_path):
    runs(next(NBS.rglob(f"{name}.ipynb")), tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_the_same_with_and_without_real_data(path):
    "Only what it exports may look for data, where whoever calls it asks for some."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    live = [c for c in code if not re.search(r"^#\|\s*export[si]?\b", c, re.M)]
    assert [c for c in live if "ET_DATA" in c] == []


def test_every_notebook_has_the_cell():
    "After a change of it: python scripts/colab.py"
    for path in modules.notebooks():
        notebook = json.loads(path.read_text(encoding="utf-8"))
        folder = path.parent.relative_to(NBS.parent).as_posix()
        cell = colab.install_cell(modules.settings(), folder)
        assert colab.with_cell(notebook, cell) == notebook, path.name


def test_the_install_cell_runs_on_colab_alone(tmp_path, monkeypatch):
    "Programs that write down how they are called take the place of git and pip."
    (tmp_path / "bin").mkdir()
    for name in ("git", "pip"):
        program = tmp_path / "bin" / name
        program.write_text(
            f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/called"\n'
            'if [ "$1" = clone ]; then mkdir -p "$6/nbs"; touch "$6/settings.ini"; fi\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    cell = colab.install_cell(modules.settings())
    run = lambda: InteractiveShell().run_cell(cell).raise_error()
    run()
    assert not (tmp_path / "called").exists() and Path.cwd() == tmp_path
    monkeypatch.setitem(sys.modules, "google.colab", object())
    run()
    run()  # once more does nothing
    assert (tmp_path / "called").read_text().splitlines() == [
        f"git clone -q --depth 1 {modules.settings()['git_url']} et_nbdev",
        "pip install -q ./et_nbdev[dev]",
    ]
    assert Path.cwd() == tmp_path / "et_nbdev" / "nbs"
