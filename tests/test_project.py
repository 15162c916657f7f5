"""The repository agrees with itself: notebooks, exported modules, README, site, settings
and results.
"""

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
import zipfile
from pathlib import Path

import jax
import model_cards
import modules as pages
import nbformat
import numpy as np
import public_names
import pytest
import readme
import yaml
from flax import nnx

import et_nbdev

ROOT = Path(__file__).resolve().parent.parent
LIB, NBS = ROOT / "et_nbdev", ROOT / "nbs"
NOTEBOOKS = pages.notebooks()
SETTINGS = pages.settings()


def cells(path, kind=None):
    all_cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in all_cells if kind in (None, c["cell_type"])]


def source(cell):
    return "".join(cell["source"])


def python(code, folder=ROOT, **more):
    "Run a program, whose end must be a good one; what it printed."
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# --- notebooks ---


def export(folder):
    "What nbdev makes of the notebooks of a folder."
    shutil.copy(ROOT / "settings.ini", folder)
    (folder / LIB.name).mkdir()
    # the only file there that is written by hand
    shutil.copy(LIB / "__init__.py", folder / LIB.name)
    # nbdev exports nothing where it is set
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    python(
        "from nbdev.doclinks import nbdev_export as f; f.__wrapped__()", folder, env=env
    )


def test_modules_are_what_the_notebooks_export(tmp_path):
    left = shutil.ignore_patterns(".ipynb_checkpoints", "images")
    shutil.copytree(NBS, tmp_path / "nbs", ignore=left)
    export(tmp_path)
    fresh, here = (
        {str(p.relative_to(lib)): p.read_text("utf-8") for p in lib.rglob("*.py")}
        for lib in (tmp_path / LIB.name, LIB)
    )
    assert sorted(here) == sorted(fresh), "a module without its notebook"
    differ = [name for name in here if here[name] != fresh[name]]
    assert differ == [], "out of sync with the notebooks: run nbdev_export"


def lines_of_code(function):
    "Lines of a function's body, without its docstring."
    first, *rest = function.body
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.end_lineno - (rest if text and rest else [first])[0].lineno + 1


def too_long(cell):
    """35 lines: more only for imports, or for one class or function and its docstring;
    and functions of more than 35.
    """
    parts = ast.parse(source(cell)).body
    parts = [p for p in parts if not isinstance(p, (ast.Import, ast.ImportFrom))]
    if len(parts) > 1 and len(source(cell).splitlines()) > 35:
        yield f"cell {cell['id']}"
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, ast.FunctionDef):
            if lines_of_code(node) > 35:
                yield node.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_whole(path):
    "Run from top to bottom, clean, of a size that loads, in cells that one can read."
    code = [c for c in cells(path, "code") if source(c).strip()]
    kinds = [out["output_type"] for c in code for out in c["outputs"]]
    assert "error" not in kinds
    ids = [c.get("id") for c in cells(path)]
    assert None not in ids and len({*ids}) == len(ids), "run nbdev_clean"
    exported = [c for c in code if re.search(r"^#\| export", source(c), re.M)]
    assert [part for c in exported for part in too_long(c)] == []
    text = "".join(map(source, cells(path)))
    named = re.findall(r"\b(?:scripts|experiments|benchmarks)/\w+\.py\b", text)
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert path.stat().st_size < 1_000_000
    if path.name[0].isdigit() or path.parent.name == "engine":
        assert kinds, "no outputs stored: run the notebook and save it"
        counts = [c["execution_count"] for c in code]
        if counts[0] is None and "google.colab" in source(code[0]):
            counts = counts[1:]  # of use on Colab alone: scripts/colab.py adds it unrun
        # nbdev_clean and its hooks remove the numbers
        in_order = list(range(1, len(counts) + 1)), [None] * len(counts)
        assert counts in in_order, "cells were run out of order, or some were not run"


# --- what is made from other things ---


def test_what_is_made_from_the_front_page_and_the_sidebar_is_up_to_date():
    for path, text in readme.made().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run `make readme`"
    room = source(cells(NBS / "engine_room.ipynb")[1])
    listed = re.findall(r"^- \[.*?\]\(([\w/]+\.ipynb)\)", room, re.M)
    engine = [p for p in NOTEBOOKS if p.parent != NBS or "58" <= p.name[:2] < "99"]
    assert {*listed} == {p.relative_to(NBS).as_posix() for p in engine}


def test_links_of_the_front_page_and_for_contributors_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text("utf-8")
        text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
        link = r"(?:\]\(|src=\"|href=\")(?![a-z][a-z+.-]*:|#)([^)\s\"]+)"
        local = {target.partition("#")[0] for target in re.findall(link, text)}
        assert local and [t for t in local if not (ROOT / t).exists()] == []


def test_sidebar_lists_the_notebooks_in_order():
    def leaves(contents):
        for entry in contents:
            if isinstance(entry, dict):
                yield from [entry["href"]] if "href" in entry else []
                yield from leaves(entry["contents"])
            else:
                yield entry

    site = yaml.safe_load((NBS / "_quarto.yml").read_text(encoding="utf-8"))
    listed = list(leaves(site["website"]["sidebar"]["contents"]))
    # other pages are made as the site is
    listed = [name for name in listed if name.endswith(".ipynb")]
    assert len(listed) == len(NOTEBOOKS)  # which are they is in test_site.py
    numbered = [name for name in listed if name[0].isdigit()]
    assert numbered == sorted(numbered) and listed[0] == "index.ipynb"
    engine = listed.index("engine_room.ipynb")  # above its chapters, after the lessons
    assert engine == 1 + len([n for n in numbered if n < "58"])
    assert (NBS / "_quarto.yml").read_bytes() == (ROOT / "_quarto.yml").read_bytes()


def test_the_version_is_that_of_the_settings():
    version = SETTINGS["version"]
    assert et_nbdev.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


# --- what a user may rely on ---


def imported(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return importlib.import_module(name.removesuffix(".__init__"))


def public(module):
    """The public functions and classes of a module, the public methods of its classes,
    and both of each as (name, it, whose docstring also tells).
    """
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if not inspect.isclass(thing) and not inspect.isfunction(thing):
            continue
        if thing.__module__ != module.__name__:
            continue
        yield name, thing, None
        for key, value in vars(thing).items() if inspect.isclass(thing) else ():
            value = getattr(value, "__func__", value)
            if not inspect.isfunction(value) or value.__name__ == "<lambda>":
                continue
            own = value.__code__.co_filename == module.__file__
            if own and (not key.startswith("_") or key in ("__init__", "__call__")):
                yield f"{name}.{key}", value, thing


# JAX's own protocol
TREE = {"tree_flatten", "tree_flatten_with_keys", "tree_unflatten"}
# KeyboardInterrupt as usual; what argparse turns into a message
QUIET = {"interruptible", "add_options"}
# One thing throughout, or of several types: `Images` or an array with their shape, a
# number or one a head.
FREE = set(
    "self cls config key dtype param_dtype mask ids batch edges product axes mean std"
    " features labels adjacency default beta step_sizes images".split()
)


def bare(kind):
    "Is this annotation one of an array without a shape, or none?"
    parts = [a for a in typing.get_args(kind) if isinstance(a, type)]
    arrays = jax.Array, np.ndarray
    return kind in (inspect.Parameter.empty, *arrays) or {*parts} & {*arrays}


def unsaid(name, thing, text):
    """What the documentation of a function leaves out: that it raises, and arguments
    that neither an annotation nor a comment beside them describes.
    """
    code = inspect.getsource(thing)
    if name not in QUIET and "aise" not in text:
        yield from re.findall(r"\braise [A-Z]\w*Error", code)
    last = name.rpartition(".")[2]
    # these take anything, and look at it; a solver's are annotated by `Solver`
    if name.startswith(("check_", "assert_")) or last in TREE | {"init", "step"}:
        return
    for p in inspect.signature(thing, eval_str=True).parameters.values():
        several = p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if not several and p.name not in FREE and bare(p.annotation):
            beside = re.search(rf"^\s*{p.name}\b.*#", code, re.M)
            if not beside and not re.search(rf"\b{p.name}\b", text):
                yield f"the argument {p.name}"


# kernels are bodies that a compiler reads
EACH = [p for p in LIB.rglob("*.py") if p.name not in ("_modidx.py", "kernels.py")]


@pytest.mark.parametrize("path", sorted(EACH), ids=lambda p: p.stem)
def test_public_names_are_documented(path):
    silent = []
    for name, thing, of in public(imported(path)):
        said = thing.__doc__ or ""
        written = not said or said.startswith(f"{thing.__name__}(")  # by a dataclass
        if written and name.rpartition(".")[2] not in {"__init__", "__call__", *TREE}:
            silent.append(name)
        if inspect.isfunction(thing):
            text = " ".join(getattr(t, "__doc__", None) or "" for t in (thing, of))
            silent += [f"{name}: {what}" for what in unsaid(name, thing, text)]
        made = inspect.isclass(thing) and issubclass(thing, nnx.Module)
        if made and thing.__init__ is object.__init__:
            continue  # which takes nothing
        if made or of is None and inspect.isfunction(thing):
            # flax's modules show (*args, **kwargs) unless they are `signed`
            shown = str(inspect.signature(thing, eval_str=True))
            silent += [f"{name}{shown}"] * ("*args" in shown)
    assert silent == []


def test_public_names_are_few_have_a_home_and_change_on_purpose():
    homes = public_names.names()
    offered = {f"{getattr(et_nbdev, n).__module__}.{n}" for n in et_nbdev.__all__}
    assert offered <= {*homes} and len(offered) == len(et_nbdev.__all__) <= 25
    kept = (ROOT / "tests/public_names.txt").read_text(encoding="utf-8").split()
    assert (sorted({*homes} - {*kept}), sorted({*kept} - {*homes})) == ([], []), (
        "new and lost public names: if that is meant, `python scripts/public_names.py >"
        " tests/public_names.txt`"
    )


def test_the_wheel_holds_modules_weights_and_pages_and_nothing_else(tmp_path):
    names = "settings.ini setup.py pyproject.toml MANIFEST.in README.md LICENSE"
    for name in [*names.split(), "constraints.txt"]:
        shutil.copy(ROOT / name, tmp_path)
    own = tmp_path / LIB.name
    shutil.copytree(LIB, own, ignore=shutil.ignore_patterns("__pycache__"))
    want = {str(p.relative_to(tmp_path)) for p in own.rglob("*") if p.is_file()}
    ends = {Path(name).suffix for name in want if "/explorer/" in name}
    assert ends == {".css", ".js"}
    assert {Path(n).suffix for n in want} - ends == {".py", ".safetensors"}
    strays = "et_nbdev/vision/notes.txt et_nbdev/explorer/notes.txt et_nbdev/run.npz"
    for stray in [*strays.split(), "tests/test_x.py", "runs/last.safetensors"]:
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("")
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    name = python(code, tmp_path).split()[-1]
    with zipfile.ZipFile(tmp_path / "dist" / name) as wheel:
        (info,) = {name.partition("/")[0] for name in wheel.namelist()} - {LIB.name}
        assert {name for name in wheel.namelist() if not name.startswith(info)} == want
        files = (f"{info}/{name}" for name in ("METADATA", "entry_points.txt"))
        metadata, scripts = (wheel.read(name).decode() for name in files)
    # where the package is listed, a link into the repository has to name it
    at = re.findall(r"\]\(([^)#]+)", metadata.partition("\n\n")[2])
    assert at and all(link.startswith("https://") for link in at), at
    for need in SETTINGS["requirements"].split():
        assert f"Requires-Dist: {need.partition('>')[0]}" in metadata
    for script in SETTINGS["console_scripts"].split():
        assert script.replace("=", " = ") in scripts


def test_importing_the_library_imports_no_optional_package():
    python("""
import builtins, pkgutil, sys
optional = set(
    "torch dgl numba xgboost datasets PIL matplotlib sklearn skimage pandas networkx"
    " grain dm_pix IPython nbdev".split()
)
real, asked = builtins.__import__, []
def watch(name, globals=None, *rest, **kw):
    # By who asks, not by what is loaded: flax itself loads IPython where it is installed.
    who = (globals or {}).get("__name__", "")
    if name.partition(".")[0] in optional and who.startswith("et_nbdev"):
        asked.append(f"{who} imports {name}")
    return real(name, globals, *rest, **kw)
builtins.__import__ = watch
import et_nbdev
for m in pkgutil.walk_packages(et_nbdev.__path__, "et_nbdev."):
    # estimators of scikit-learn, which nothing else imports
    if m.name not in ("et_nbdev.graph.set_classifier", "et_nbdev.graph.detector"):
        __import__(m.name)
loaded = sorted(optional - {"IPython"} & set(sys.modules))
asked += [f"{name} was imported" for name in loaded]
sys.exit("\\n".join(asked) or 0)
""")


# --- every file ---


def shown(output):
    "The text of an output, without its pictures: base64 can spell anything."
    data = output.get("data", {})
    words = [output.get("text", "")]
    words += [data[kind] for kind in data if not kind.startswith("image/")]
    return "\n".join(w if isinstance(w, str) else json.dumps(w) for w in words)


@pytest.fixture(scope="module")
def files():
    """The text files git keeps or would keep, as {path: text}; of a notebook, what a
    reader sees.
    """
    command = "git ls-files -z --cached --others --exclude-standard".split()
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, git.stdout.split("\0")):
        path = ROOT / name
        if path.suffix == ".ipynb" and path.is_file():
            each = [(source(c), *map(shown, c.get("outputs", []))) for c in cells(path)]
            texts[name] = "\n".join(text for parts in each for text in parts)
        elif path.is_file():
            texts[name] = path.read_bytes().decode(errors="ignore")
    return texts


# (what no file says, which files may)
BANNED = {
    "one machine": (r"(?<![\w.})~-])/(?:work|tmp|root|home|Users)/\w", ()),
    "beside the repository": (r"\.\./shar[e]d", (".ci/run",)),
    "loads a pickle": (r"\bpickle\.(?:loads?|Unpickler)\b|allow_pickle\s*=\s*True", ()),
    "imports pickle": (  # a test may write one, to see it refused
        r"(?m:^)\s*(?:import|from)\s+(?:pickle|cloudpickle|dill|joblib)\b",
        ("tests/",),
    ),
}


@pytest.mark.parametrize("what", BANNED)
def test_no_file_says(files, what):
    pattern, may = BANNED[what]
    binary = (".png", ".npz", ".npy", ".safetensors", ".gif", ".jpg", ".woff2")
    found = [
        f"{name}: …{text[max(0, m.start() - 30) : m.end() + 30]!r}"
        for name, text in files.items()
        if not name.startswith(may) and not name.endswith(binary)
        for m in re.finditer(pattern, text)
    ]
    assert found == []


def test_ruff_has_nothing_to_say():
    pytest.importorskip("ruff")
    command = "-m ruff check --no-cache --quiet --output-format concise".split()
    command = [sys.executable, *command]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


# --- results ---


def kept(pattern):
    "{path: what it holds} of files of results/."
    found = {p: json.loads(p.read_text()) for p in (ROOT / "results").glob(pattern)}
    assert found
    return found


def test_readme_shows_the_kept_results():
    "The front page's tables are made by its notebook; here a number of each is read."
    over = lambda pattern, f: np.mean([f(row) for row in kept(pattern).values()])
    line = "image-pair/tiny-imagenet-small-64-decay-0-et-maps-operations-10938-*.json"
    auprc = lambda row: np.mean([run["test"]["auprc"] for run in row["runs"]])
    folds = "graph-classification/NCI1/et/fold-*.json"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"additions** | {over(line, lambda row: row['test_mse']):.4f} ± " in text
    for score in (
        over("anomaly/tolokers-0.01-et.json", auprc),
        over(folds, lambda row: row["test_accuracy"]),
    ):
        assert f"| Energy Transformer | {100 * score:.1f} |" in text


def test_results_say_where_they_come_from():
    """Configuration, seed, commit, machine and wall time stand beside every kept score,
    and the log reaches its end.
    """
    origin = set("config commit device cores jax date data".split())
    for path, row in kept("*/metrics.json").items():
        assert origin | {"training_seconds", "pictures", "split"} <= {*row}, path
        assert isinstance(row["config"]["seed"], int) and row["training_seconds"] > 0
    for path, row in kept("anomaly/*.json").items():
        assert origin | {"ratio"} <= {*row}, path
        splits = [1] if row["line"].startswith("et ") else [5, 10]
        assert len(row["runs"]) in splits, path
        assert [run["seed"] for run in row["runs"]] == [*range(len(row["runs"]))]
        assert all(run["seconds"] > 0 for run in row["runs"]), path


# --- CONTRIBUTING.md: its examples run as they stand; and the model cards

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", GUIDE, flags=re.M)[1:]
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


def test_the_guide_is_one_page_and_names_scripts_that_exist():
    named = re.findall(r"\b(?:scripts|experiments|benchmarks)/\w+\.py\b", GUIDE)
    assert named and all((ROOT / name).is_file() for name in named)
    assert len(GUIDE.split()) < 1500


def test_the_model_cards_are_those_of_the_weights():
    "After a change of weights or results: python scripts/model_cards.py"
    text = (ROOT / "results/model_cards.md").read_text(encoding="utf-8")
    assert text == f"# Model cards\n\n{model_cards.cards()}"
    for path in (ROOT / "et_nbdev").rglob("*.safetensors"):
        assert f'`from_pretrained("{path.stem}")`' in text
