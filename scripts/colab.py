"""Colab opens a notebook alone. Its first cell of code fetches the repository around it
and installs it. There and anywhere else the cell makes figures sharp.

    python scripts/colab.py        writes that cell into every notebook with code
"""

import json

from modules import NBS, dumped, notebooks, settings

ID = "c01ab000"
CELL = """#| hide
# On Google Colab: fetch the repository of this notebook and install it. Then anywhere:
# figures at twice the density.
import os
import sys

if "google.colab" in sys.modules and not os.path.exists("{up}/settings.ini"):
    !git clone -q --depth 1 {git_url} {lib_name}
    !pip install -q "./{lib_name}[dev]"
    os.chdir("{lib_name}/{folder}")

from {lib_name}.toy import sharp_figures

sharp_figures()
"""


def install_cell(config, folder="nbs"):
    "The source of the cell in a folder, which the address of settings.ini completes."
    up = "/".join(".." for _ in folder.split("/"))
    return CELL.format(**config, folder=folder, up=up).rstrip("\n")


def with_cell(notebook, source):
    "The notebook with the cell, new or renewed, before its first cell of code."
    cells = list(notebook["cells"])
    first = next((i for i, c in enumerate(cells) if c["cell_type"] == "code"), None)
    if first is None:
        return notebook
    cell = {"cell_type": "code", "id": ID, "metadata": {}, "outputs": []}
    cell["execution_count"] = None
    if cells[first].get("id") == ID:
        cell = cells.pop(first)
    cells.insert(first, {**cell, "source": source.splitlines(keepends=True)})
    return {**notebook, "cells": cells}


def main():
    for path in notebooks():
        folder = path.parent.relative_to(NBS.parent).as_posix()
        source = install_cell(settings(), folder)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(dumped(with_cell(notebook, source)), encoding="utf-8")


if __name__ == "__main__":
    main()
