"""Every notebook runs from top to bottom, each in a process of its own, as nbdev_test
would run it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICK_FLAGS

NBS = Path(__file__).resolve().parent.parent / "nbs"
NOTEBOOKS = sorted(
    p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
MINUTES = 15
SKIPPED = 77

# These train for long or run large problems; in all others the compiler takes longer
# than what it compiles, and is told to hurry.
COMPUTE = {
    "00_one_sitting",
    "01_recall",
    "22_image_train",
    "kernels",
    "32_anomaly",
    "37_classification",
    "51_performance",
}
# What XLA's older emitters save in compiling, these lose in running.
NEW_EMITTERS = {"kernels", "37_classification", "51_performance"}

# The flags of settings.ini (`tst_flags`) and `#| eval: false` say which cells are left
# out.
RUN = f"""
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
passed, seconds = test_nb(Path(sys.argv[1]), skip_flags=get_config().tst_flags.split())
sys.exit({SKIPPED} if seconds == 0 else not passed)
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path):
    environment = dict(os.environ)
    if path.stem in NEW_EMITTERS and environment.get("XLA_FLAGS") == QUICK_FLAGS:
        del environment["XLA_FLAGS"]
    if path.stem not in COMPUTE:
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    run = subprocess.run(
        [sys.executable, "-c", RUN, path],
        cwd=NBS,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=60 * MINUTES,
    )
    if run.returncode == SKIPPED:
        pytest.skip(f"{path.name} says skip_exec")
    if run.returncode:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout).splitlines()[-40:]
        said = f"{path.name} failed (exit status {run.returncode}):"
        pytest.fail("\n".join([said, *lines]), pytrace=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_the_same_with_and_without_real_data(path):
    "Only what it exports may look for data, where whoever calls it asks for some."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    live = [c for c in code if not re.search(r"^#\|\s*export[si]?\b", c, re.M)]
    assert [c for c in live if "ET_DATA" in c] == []
