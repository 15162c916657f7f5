"""Formulas in the site's search index as people read them: Quarto leaves TeX there, and
a result should say ∂E/∂g, not \\frac{\\partial E}{\\partial g}.

    python scripts/search_text.py _docs/search.json
"""

import json
import re
import sys
from pathlib import Path

from pylatexenc.latex2text import LatexNodes2Text

from et_nbdev.training.checkpoint import _atomic_write

FORMULA = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$", re.DOTALL)
READ = LatexNodes2Text(math_mode="text")


def plain(formula: str) -> str:
    "A formula in TeX as a line of text."
    formula = re.sub(r"\\[td]frac", r"\\frac", formula)  # sizes that it does not know
    formula = re.sub(r"\\tag\{.*?\}|(?<!\\)&", "", formula)
    return " ".join(READ.latex_to_text(formula).split())


def readable(entries: list[dict]) -> list[dict]:
    "The entries of a search index with their formulas as text."
    put = lambda match: plain(next(filter(None, match.groups())))
    return [entry | {"text": FORMULA.sub(put, entry["text"])} for entry in entries]


def main(path: str):
    entries = readable(json.loads(Path(path).read_text(encoding="utf-8")))
    with _atomic_write(Path(path)) as temporary:
        temporary.write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
