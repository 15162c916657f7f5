"""The first cell of every notebook: on Colab it fetches and installs the repository."""

import json
import os
import sys
from pathlib import Path

import colab
import modules
from IPython.core.interactiveshell import InteractiveShell

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
