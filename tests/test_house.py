"""The house stays small and its imports run downwards: sizes that may fall and not rise,
names of files, and who may import whom.
"""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIB = ROOT / "et_nbdev"

# What no row may exceed. Lower a number where it has fallen.
LIMITS = {
    "lines of the library": 8_616,
    "files of the library": 31,
    "lines of tests": 11_000,
    "lines of scripts, experiments and benchmarks": 5_000,
    "lessons": 34,
    "chapters of the engine room": 16,
    "words of prose in lessons": 20_000,
    "words of the front page": 600,
    "rows of tables on the front page": 24,
    "public names": 109,
    "private names that another file imports": 5,
}

QUIET = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()
OWNERS = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def python(*folders):
    paths = (path for name in folders for path in (ROOT / name).rglob("*.py"))
    return [p for p in paths if p.name != "_modidx.py"]


def lines_of_code(text):
    "Lines that hold a token that is neither a comment nor part of a docstring."
    said, code = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, OWNERS) and ast.get_docstring(node, False) is not None:
            said |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in QUIET:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - said)


def lines(*folders):
    return sum(lines_of_code(p.read_text(encoding="utf-8")) for p in python(*folders))


def words_of(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = ("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    dull = r"(?m)\$[^$]*\$|<[^>]*>|^\|.*$|:::.*"
    return sum(len(re.sub(dull, " ", text).split()) for text in prose)


def imports(path):
    "What a file imports from the library: (module, name)."
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = [*path.relative_to(ROOT).parts[: -node.level]] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            if module.startswith("et_nbdev"):
                yield from ((module, alias.name) for alias in node.names)


def measured():
    numbered = [p for p in (ROOT / "nbs").glob("*.ipynb") if "58" <= p.name[:2] < "99"]
    engine = numbered + [*(ROOT / "nbs/engine").glob("*.ipynb")]
    lessons = [p for p in (ROOT / "nbs").glob("*.ipynb") if p not in engine]
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = re.sub(r"(?s)```.*?```", " ", front)
    private = [n for p in python("et_nbdev", "tests") for _, n in imports(p)]
    return {
        "lines of the library": lines("et_nbdev"),
        "files of the library": len(list(LIB.rglob("[!_]*.py"))),
        "lines of tests": lines("tests"),
        "lines of scripts, experiments and benchmarks": lines(
            "scripts", "experiments", "benchmarks"
        ),
        "lessons": len(lessons),
        "chapters of the engine room": len(engine),
        "words of prose in lessons": sum(map(words_of, lessons)),
        "words of the front page": len(plain.split()),
        "rows of tables on the front page": len(re.findall(r"(?m)^\|", front)),
        "public names": len((ROOT / "tests/public_names.txt").read_text().split()),
        "private names that another file imports": sum(n[0] == "_" for n in private),
    }


def test_nothing_grows():
    found = measured()
    assert found.keys() == LIMITS.keys()
    over = {name: (n, LIMITS[name]) for name, n in found.items() if n > LIMITS[name]}
    assert over == {}, "what grew, and how large it may be"


def test_files_are_named_for_what_they_hold():
    names = [p.name for p in python("et_nbdev") if p.name != "__init__.py"]
    assert [n for n in names if n[0] == "_" or "engine" in n] == []


# Below first: a file imports from its own floor or from those below it.
FLOORS = (
    "checks scores toy stepping energy norm",
    "attention memory",
    "block dynamics solvers equilibria",
    "hopfield training commands",
    "vision graph puzzle",
    "explorer explore testing",
)
FLOOR = {name: n for n, names in enumerate(FLOORS) for name in names.split()}


@pytest.mark.parametrize("path", python("et_nbdev"), ids=lambda p: p.stem)
def test_imports_run_downwards(path):
    room = path.relative_to(LIB).with_suffix("").parts[0]
    if room == "__init__":
        return
    rooms = {module.split(".")[1] for module, _ in imports(path) if "." in module}
    assert rooms | {room} <= FLOOR.keys(), "a room that is on no floor"
    assert [other for other in rooms if FLOOR[other] > FLOOR[room]] == []
    tasks = {"vision", "graph", "puzzle"} & (rooms | {room})
    assert len(tasks) < 2 or room.startswith("explore"), "tasks import each other"
