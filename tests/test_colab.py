"""The first cell of every notebook: on Colab it fetches and installs the repository,
anywhere it makes figures sharp.
"""

import base64
import io
import json
import os
import sys
from pathlib import Path

import colab
import modules
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = modules.settings()


def test_every_notebook_has_the_cell():
    "After a change of it: python scripts/colab.py"
    for path in modules.notebooks():
        notebook = json.loads(path.read_text(encoding="utf-8"))
        folder = path.parent.relative_to(ROOT).as_posix()
        cell = colab.install_cell(SETTINGS, folder)
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
    cell = colab.install_cell(SETTINGS)
    run = lambda: InteractiveShell().run_cell(cell).raise_error()
    run()
    assert not (tmp_path / "called").exists() and Path.cwd() == tmp_path
    monkeypatch.setitem(sys.modules, "google.colab", object())
    run()
    run()  # once more does nothing
    assert (tmp_path / "called").read_text().splitlines() == [
        f"git clone -q --depth 1 {SETTINGS['git_url']} et_nbdev",
        "pip install -q ./et_nbdev[dev]",
    ]
    assert Path.cwd() == tmp_path / "et_nbdev" / "nbs"


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
