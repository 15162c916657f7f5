"""Formulas in the site's search index as people read them: Quarto leaves TeX there, and
a result should say ∂E/∂g, not \\frac{\\partial E}{\\partial g}. What is a formula is
marked on the pages alone, which lie beside the index, and by dollars in code. Pages that
show the marks of a part as text are found, too.

    python scripts/search_text.py _docs/search.json
"""

import json
import re
import sys
from functools import cache
from html import unescape
from pathlib import Path

from pylatexenc.latex2text import LatexNodes2Text

from et_nbdev.training import atomic_write

FORMULA = re.compile(r'<span class="math (?:inline|display)">(.*?)</span>', re.S)
IN_CODE = re.compile(r"\$(?=\S)((?:(?!\n\n)[^$])+)(?<=\S)\$")
CODE = re.compile(r"<(pre|code|script)\b.*?</\1>", re.S)
READ = LatexNodes2Text(math_mode="text")


def plain(formula: str) -> str:
    "A formula in TeX as a line of text."
    formula = re.sub(r"\\[td]frac", r"\\frac", formula)  # sizes that it does not know
    formula = re.sub(r"\\tag\{.*?\}|(?<!\\)&", "", formula)
    return " ".join(READ.latex_to_text(formula).split())


@cache
def formulas(page: Path) -> dict[str, str]:
    "{the TeX of a formula on a page: how it reads}, the longest first."
    found = map(unescape, FORMULA.findall(page.read_text(encoding="utf-8")))
    bare = lambda tex: re.sub(r"\A\\[(\[]|\\[)\]]\Z", "", tex)
    return {tex: plain(bare(tex)) for tex in sorted(found, key=len, reverse=True)}


def read_in_code(m: re.Match) -> str:
    "A formula between dollars, of a docstring or a label; other text stays."
    tex = re.sub(r"\\\\(?=[\w,;!])", r"\\", m[1])  # a string that is not raw
    return plain(tex) if re.search(r"\\[a-zA-Z]{2}", tex) else m[0]


def readable(entry: dict, folder: Path) -> dict:
    "An entry of a search index with its formulas as text."
    text = entry["text"].replace("&lt;", "<").replace("&gt;", ">")
    text = IN_CODE.sub(read_in_code, text)
    for tex, read in formulas(folder / entry["href"].partition("#")[0]).items():
        text = text.replace(tex, read)
    return entry | {"text": text.replace("<", "&lt;").replace(">", "&gt;")}


def main(path: str):
    index = Path(path)
    for page in index.parent.glob("*.html"):
        if ":::" in CODE.sub("", page.read_text(encoding="utf-8")):
            raise SystemExit(f"{page.name} shows as text what was to be a part of it")
    entries = json.loads(index.read_text(encoding="utf-8"))
    entries = [readable(entry, index.parent) for entry in entries]
    with atomic_write(index) as temporary:
        temporary.write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
