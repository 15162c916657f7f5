"""Every notebook runs from top to bottom, each in a process of its own, as nbdev_test
would run it.
"""

import json
import multiprocessing
import os
import re
from pathlib import Path

import pytest
import run_notebook
from conftest import QUICK_FLAGS

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
