"""The repository agrees with itself: notebooks, exported modules, README, site and
settings.
"""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import typing
import zipfile
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
import readme
import yaml
from flax import nnx

import et_nbdev

ROOT = Path(__file__).resolve().parent.parent
LIB = ROOT / "et_nbdev"
NOTEBOOKS = sorted(
    p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
each_chapter = pytest.mark.parametrize(
    "path",
    [p for p in NOTEBOOKS if p.name[0].isdigit() or p.parent.name == "engine"],
    ids=lambda p: p.stem,
)


def cells(path, kind=None):
    all_cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in all_cells if kind in (None, c["cell_type"])]


def source(cell):
    return "".join(cell["source"])


def modules(folder):
    "Every Python file of a package, as {path in it: text}."
    return {
        str(p.relative_to(folder)): p.read_text(encoding="utf-8")
        for p in sorted(folder.rglob("*.py"))
    }


def shown(output):
    "The text of an output, without its pictures: base64 can spell anything."
    data = [
        value
        for kind, value in output.get("data", {}).items()
        if not kind.startswith("image/")
    ]
    return "".join(
        "\n"
        + (
            value
            if isinstance(value, str)
            else (
                "".join(map(str, value))
                if isinstance(value, list)
                else json.dumps(value)
            )
        )
        for value in [output.get("text", ""), *data]
    )


def project_files():
    """The text files git keeps or would keep, as {path: text}; of a notebook, what a
    reader sees.
    """
    git = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if git.returncode:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, git.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".ipynb":
            text = "\n".join(
                source(c) + "".join(map(shown, c.get("outputs", [])))
                for c in cells(path)
            )
        texts[name] = text
    return texts


def mentions(pattern, files):
    return [
        f"{name}: …{text[max(0, m.start() - 30) : m.end() + 30]!r}"
        for name, text in files.items()
        for m in re.finditer(pattern, text)
    ]


# --- notebooks ---


def test_modules_are_what_the_notebooks_export(tmp_path):
    shutil.copy(ROOT / "settings.ini", tmp_path)
    shutil.copytree(
        ROOT / "nbs",
        tmp_path / "nbs",
        ignore=shutil.ignore_patterns(".ipynb_checkpoints", "images"),
    )
    (tmp_path / LIB.name).mkdir()
    # the only file here that is written by hand
    shutil.copy(LIB / "__init__.py", tmp_path / LIB.name)
    # nbdev exports nothing where it is set
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from nbdev.doclinks import nbdev_export as f; f.__wrapped__()",
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    fresh, here = modules(tmp_path / LIB.name), modules(LIB)
    assert sorted(here) == sorted(fresh), (
        "a module without its notebook, or a notebook not exported: run nbdev_export"
    )
    assert [name for name in here if here[name] != fresh[name]] == [], (
        "out of sync with the notebooks: run nbdev_export"
    )


@each_notebook
def test_notebook_holds_no_errors(path):
    errors = [
        source(c)[:80]
        for c in cells(path, "code")
        for o in c["outputs"]
        if o["output_type"] == "error"
    ]
    assert errors == []


@each_notebook
def test_notebook_cells_have_unique_ids(path):
    ids = [c.get("id") for c in cells(path)]
    assert None not in ids, "a cell has no id: run nbdev_clean"
    assert len(set(ids)) == len(ids)


@each_chapter
def test_chapter_was_run_from_top_to_bottom(path):
    code = [c for c in cells(path, "code") if source(c).strip()]
    assert any(c["outputs"] for c in code), (
        "no outputs stored: run the notebook and save it"
    )
    counts = [c["execution_count"] for c in code]
    if counts[0] is None and "google.colab" in source(code[0]):
        counts = counts[1:]  # of use on Colab alone: scripts/colab.py adds it unrun
    cleaned = [None] * len(counts)  # nbdev_clean and its hooks remove the numbers
    assert counts in (list(range(1, len(counts) + 1)), cleaned), (
        "cells were run out of order, or some were not run"
    )


@each_chapter
def test_chapter_is_under_a_megabyte(path):
    assert path.stat().st_size < 1_000_000


@each_notebook
def test_scripts_that_a_notebook_names_are_there(path):
    text = "".join(map(source, cells(path)))
    named = re.findall(r"\b(?:scripts|experiments|benchmarks)/\w+\.py\b", text)
    assert [name for name in named if not (ROOT / name).is_file()] == []


# --- what is made from other things ---


def test_readme_is_made_from_index():
    made = readme.readme()
    assert (ROOT / "README.md").read_text(encoding="utf-8") == made, "run `make readme`"


def test_the_engine_room_lists_its_chapters():
    made = readme.engine_room()
    room = ROOT / "nbs/engine_room.ipynb"
    assert room.read_text(encoding="utf-8") == made, "run `make readme`"
    linked = set(
        re.findall(
            r"^- \[.*?\]\(([\w/]+\.ipynb)\)", "".join(map(source, cells(room))), re.M
        )
    )
    engine = {f"engine/{p.name}" for p in NOTEBOOKS if p.parent.name == "engine"}
    assert linked == engine | {p.name for p in NOTEBOOKS if "58" <= p.name[:2] < "99"}


def test_readme_links_lead_somewhere():
    text = re.sub(
        r"```.*?```|`[^`\n]*`",
        "",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.S,
    )
    targets = re.findall(r"(?:\]\(|src=\"|href=\")([^)\s\"]+)", text)
    local = [
        t.partition("#")[0] for t in targets if not re.match(r"[a-z][a-z+.-]*:|#", t)
    ]
    assert [t for t in local if not (ROOT / t).exists()] == []


def test_sidebar_lists_the_notebooks_in_order():
    def leaves(contents):
        for entry in contents:
            if isinstance(entry, dict):
                yield from [entry["href"]] if "href" in entry else []
                yield from leaves(entry["contents"])
            else:
                yield entry

    site = yaml.safe_load((ROOT / "nbs/_quarto.yml").read_text(encoding="utf-8"))
    names = [str(p.relative_to(ROOT / "nbs")) for p in NOTEBOOKS]
    listed = list(leaves(site["website"]["sidebar"]["contents"]))
    # other pages are made as the site is; that of the engine room is above its chapters
    assert [name for name in listed if name.endswith(".ipynb")] == sorted(
        names,
        key=lambda n: (
            n != "index.ipynb",
            n[0].isalpha() and not n.startswith("engine"),
            n.replace("engine_room", "57_engine_room"),
        ),
    )
    assert (ROOT / "nbs/_quarto.yml").read_bytes() == (
        ROOT / "_quarto.yml"
    ).read_bytes()


def test_the_version_is_that_of_the_settings():
    config = ConfigParser()
    config.read(ROOT / "settings.ini", encoding="utf-8")
    version = config["DEFAULT"]["version"]
    assert et_nbdev.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation


# --- what a user may rely on ---


@pytest.mark.parametrize(
    "module", sorted(name for name in modules(LIB) if not name.endswith("_modidx.py"))
)
def test_public_names_show_their_own_arguments(module):
    """As help() and the documentation look them up: flax's modules show (*args,
    **kwargs) unless they are `signed`.
    """
    public = importlib.import_module(
        "et_nbdev." + module.removesuffix(".py").replace("/", ".")
    )
    for name in getattr(public, "__all__", ()):
        thing = getattr(public, name)
        if (
            inspect.isfunction(thing)
            or inspect.isclass(thing)
            and issubclass(thing, nnx.Module)
            and thing.__init__ is not object.__init__  # which takes nothing
        ):
            assert "*args" not in str(inspect.signature(thing, eval_str=True)), name


def test_the_wheel_holds_modules_weights_and_pages_and_nothing_else(tmp_path):
    for name in (
        "settings.ini",
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        LIB, tmp_path / LIB.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    want = {
        str(p.relative_to(tmp_path))
        for p in (tmp_path / LIB.name).rglob("*")
        if p.is_file()
    }
    pages = {name for name in want if name.startswith("et_nbdev/explorer/")}
    assert {Path(name).suffix for name in pages} == {".html", ".css", ".js"}
    assert any(name.endswith(".safetensors") for name in want) and all(
        name.endswith((".py", ".safetensors")) for name in want - pages
    )
    for stray in (
        "et_nbdev/vision/notes.txt",
        "et_nbdev/explorer/notes.txt",
        "et_nbdev/run.npz",
        "tests/test_x.py",
        "runs/last.safetensors",
    ):
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / "dist" / run.stdout.split()[-1]) as wheel:
        (info,) = {name.partition("/")[0] for name in wheel.namelist()} - {LIB.name}
        assert {name for name in wheel.namelist() if not name.startswith(info)} == want
        metadata, scripts = (
            wheel.read(f"{info}/{name}").decode()
            for name in ("METADATA", "entry_points.txt")
        )
    config = ConfigParser()
    config.read(ROOT / "settings.ini", encoding="utf-8")
    # where the package is listed, a link into the repository has to name it
    at = re.findall(r"\]\(([^)#]+)", metadata.partition("\n\n")[2])
    assert at and all(link.startswith("https://") for link in at), at
    assert all(
        f"Requires-Dist: {name.partition('>')[0]}" in metadata
        for name in config["DEFAULT"]["requirements"].split()
    )
    for script in config["DEFAULT"]["console_scripts"].split():
        assert script.replace("=", " = ") in scripts
        module, _, name = script.partition("=")[2].partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def public(module):
    """The public functions and classes of a module, the public methods of its classes,
    and both of each as {name: (it, whose docstring also tells)}.
    """
    found = importlib.import_module(
        "et_nbdev." + module.removesuffix(".py").replace("/", ".")
    )
    for name in getattr(found, "__all__", ()):
        thing = getattr(found, name)
        if (
            inspect.isfunction(thing)
            or inspect.isclass(thing)
            and thing.__module__ == found.__name__
        ):
            yield name, thing, None
        for key, value in vars(thing).items() if inspect.isclass(thing) else ():
            value = getattr(value, "__func__", value)
            if (
                inspect.isfunction(value)
                and value.__name__ != "<lambda>"
                and value.__code__.co_filename == found.__file__
                and (not key.startswith("_") or key in ("__init__", "__call__"))
            ):
                yield f"{name}.{key}", value, thing


def said(thing, of):
    return " ".join(getattr(t, "__doc__", None) or "" for t in (thing, of))


# kernels: bodies that a compiler reads, for `graph.energy` alone
each_module = pytest.mark.parametrize(
    "module",
    sorted(
        name
        for name in modules(LIB)
        if not name.endswith(("_modidx.py", "__init__.py", "graph/kernels.py"))
    ),
)
# JAX's own protocol
TREE = {"tree_flatten", "tree_flatten_with_keys", "tree_unflatten"}


@each_module
def test_public_names_have_docstrings(module):
    silent = [
        name
        for name, thing, of in public(module)
        if name.rpartition(".")[2] not in ("__init__", "__call__", *TREE)
        # what a dataclass writes of itself
        and (not thing.__doc__ or thing.__doc__.startswith(f"{thing.__name__}("))
    ]
    assert silent == []


@each_module
def test_public_names_say_what_they_raise(module):
    # KeyboardInterrupt as usual; what argparse turns into a message
    quiet = {"interruptible", "add_options"}
    silent = [
        name
        for name, thing, of in public(module)
        if inspect.isfunction(thing)
        and name not in quiet
        and re.search(r"\braise [A-Z]\w*Error", inspect.getsource(thing))
        and "aise" not in said(thing, of)
    ]
    assert silent == []


@each_module
def test_public_names_give_the_shapes_of_their_arrays(module):
    """An argument has an annotation, with a shape if it is an array, or the docstring
    or a comment beside it says what it is.
    """
    # one thing throughout, or of several types
    free = {
        "self",
        "cls",
        "config",
        "key",
        "dtype",
        "param_dtype",
        "mask",
        "ids",
        "batch",
        "edges",
        "product",
        "axes",
        "mean",
        "std",
        "features",
        "labels",
        "adjacency",
        "default",
        "beta",
        "step_sizes",  # a number or one a head, a number or one a step
        "images",
    }  # `Images`, or an array with the shape of theirs
    # of `neighbor_attention`, in its shapes; of a solver, as `Solver` annotates them
    kernels = {"tangent_queries_xla", "tangent_keys_xla", "scores_and_tangents"}
    parts = kernels | {"init", "step"}
    bare = lambda kind: (
        kind in (inspect.Parameter.empty, jax.Array, np.ndarray)
        or any(
            a in (jax.Array, np.ndarray)
            for a in typing.get_args(kind)
            if isinstance(a, type)
        )
    )
    silent = []
    for name, thing, of in public(module):
        # these take anything, and look at it
        if (
            inspect.isclass(thing)
            or name.startswith(("check_", "assert_"))
            or name.rpartition(".")[2] in TREE | parts
        ):
            continue
        source, text = inspect.getsource(thing), said(thing, of)
        for p in inspect.signature(thing, eval_str=True).parameters.values():
            if (
                p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                or p.name in free
                or not bare(p.annotation)
            ):
                continue
            if not re.search(rf"\b{p.name}\b", text) and not re.search(
                rf"^\s*{p.name}\b.*#", source, re.M
            ):
                silent.append(f"{name}({p.name})")
    assert silent == []


def test_importing_the_library_imports_no_optional_package():
    code = """
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
    # an estimator of scikit-learn, which nothing else imports
    if m.name != "et_nbdev.graph.set_classifier":
        __import__(m.name)
asked += [f"{name} was imported" for name in sorted(optional - {"IPython"} & set(sys.modules))]
sys.exit("\\n".join(asked) or 0)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def lines_of_code(function):
    "Lines of a function's body, without its docstring."
    first, *rest = function.body
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.end_lineno - (rest if text and rest else [first])[0].lineno + 1


@each_notebook
def test_exported_cells_and_functions_are_short(path):
    "35 lines: more only for imports, or for one class or function and its docstring."
    LONG = {"fit": 50}  # what happens beside a training, in one place
    long = []
    for cell in cells(path, "code"):
        if not source(cell).startswith("#| export"):
            continue
        tree = ast.parse(source(cell))
        parts = [
            node
            for node in tree.body
            if not isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        if len(parts) > 1 and len(source(cell).splitlines()) > 35:
            long.append(f"cell {cell['id']}")
        long += [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and lines_of_code(node) > LONG.get(node.name, 35)
        ]
    assert long == []


def test_the_package_offers_a_few_names_each_with_its_home():
    homes = runpy.run_path(str(ROOT / "scripts/public_names.py"))["names"]()
    assert len(homes) <= 135
    offered = {f"{getattr(et_nbdev, n).__module__}.{n}" for n in et_nbdev.__all__}
    assert offered <= set(homes) and len(offered) == len(et_nbdev.__all__) <= 25


def test_public_names_change_only_on_purpose():
    now = runpy.run_path(str(ROOT / "scripts/public_names.py"))["names"]()
    kept = (ROOT / "tests/public_names.txt").read_text(encoding="utf-8").split()
    assert (sorted({*now} - {*kept}), sorted({*kept} - {*now})) == ([], []), (
        "new and lost public names: if that is meant, `python scripts/public_names.py >"
        " tests/public_names.txt`"
    )


def test_the_api_page_says_what_every_public_name_is():
    made, silent = runpy.run_path(str(ROOT / "scripts/modules.py")), []
    for path in LIB.rglob("[!_]*.py"):
        found = made["definitions"](path)
        for name in (
            ast.literal_eval(found["__all__"][0].value) if "__all__" in found else ()
        ):
            node, comment = found[name]
            if not (
                made["first_line"](node)
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                else comment
            ):
                silent.append(f"{path.stem}.{name}")
    assert silent == [], "a docstring, or a comment beside the constant, is missing"


def test_ruff_has_nothing_to_say():
    if find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install -c constraints.txt ruff")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--no-cache",
            "--quiet",
            "--output-format",
            "concise",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_nothing_names_one_machine():
    files = project_files()
    assert mentions(r"(?<![\w.})~-])/(?:work|tmp|root|home|Users)/\w", files) == []
    files.pop(".ci/run")  # the one place that may look beside the repository
    assert mentions(r"\.\./shar[e]d", files) == []


def test_nothing_loads_a_pickle():
    loads = (
        r"\bpickle\.(?:loads?|Unpickler)\b|allow_pickle\s*=\s*True"
        r"|\bjoblib\.load\b|from\s+pickle\s+import"
    )
    assert mentions(loads, project_files()) == []
    # a test may write one, to see it refused
    library = {
        name: text
        for name, text in project_files().items()
        if not name.startswith("tests/")
    }
    assert (
        mentions(
            r"(?m:^)\s*(?:import|from)\s+(?:pickle|cloudpickle|dill|joblib)\b", library
        )
        == []
    )


def test_readme_shows_the_kept_results():
    """Every score in results/ that the README's tables cover stands there as it was
    measured.
    """
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    head = next(row for row in rows if row[1:] == ["digits", "CIFAR-10"])
    for column, name in enumerate(("digits-demo", "cifar10-small"), 1):
        metrics = json.loads((ROOT / "results" / name / "metrics.json").read_text())
        for model, mse in metrics["masked_patch_mse"].items():
            row = next(row for row in rows[rows.index(head) :] if row[0] == model)
            want = f"{mse:.3f} ± {metrics['standard_error'][model]:.3f}"
            assert row[column] == want, (
                f"README.md does not show {name}: {model}; run index.ipynb and `make"
                " readme`"
            )
    # the pair on Tiny ImageNet, over its seeds, and the fills beside it
    said = {row[0]: row[1:] for row in rows[: rows.index(head)] if len(row) == 5}

    def runs_of(name, steps):
        pattern = f"tiny-imagenet-small-64-{name}-{steps}-*.json"
        found = (ROOT / "results/image-pair").glob(pattern)
        return [json.loads(path.read_text()) for path in found]

    def shown(runs):
        error = [run["test_mse"] for run in runs]
        if not error:
            return "–"
        spread = f" ± {np.std(error, ddof=1):.4f}" if len(error) > 1 else ""
        return f"{np.mean(error):.4f}{spread} ({len(error)})"

    for model, name in (
        ("Energy Transformer, a gate", "et-operations"),
        ("Energy Transformer, a size per channel", "et-metric-operations"),
        (
            "Energy Transformer, a size per channel, no decay",
            "decay-0-et-metric-operations",
        ),
        (
            "Energy Transformer, a size per channel, a matrix per step, no decay",
            "decay-0-et-maps-operations",
        ),
        ("transformer", "transformer"),
        ("Hyper-SET, as published", "hyperset-operations"),
    ):
        short, long = runs_of(name, 1_800), runs_of(name, 10_938)
        run = (short + long)[0]
        assert said[model] == [
            shown(short),
            shown(long),
            f"{run['parameters']:,}",
            f"{run['operations'] / 1e6:.0f}",
        ]
    metrics = json.loads((ROOT / "results/tiny-imagenet/metrics.json").read_text())
    for fill in ("nearest open pixel", "biharmonic inpainting"):
        assert said[fill][0] == f"{metrics['masked_patch_mse'][fill]:.4f}"


def test_results_say_where_they_come_from():
    """Configuration, seed, commit, machine and wall time stand beside every kept score,
    and the log reaches its end.
    """
    kept = sorted((ROOT / "results").glob("*/metrics.json"))
    assert kept
    for path in kept:
        metrics = json.loads(path.read_text())
        assert {
            "config",
            "commit",
            "device",
            "cores",
            "jax",
            "date",
            "training_seconds",
            "pictures",
            "split",
            "data",
        } <= set(metrics), path
        assert (
            isinstance(metrics["config"]["seed"], int)
            and metrics["training_seconds"] > 0
        )
    tables = sorted((ROOT / "results/anomaly").glob("*.json"))
    assert tables
    for path in tables:
        line = json.loads(path.read_text())
        assert {
            "config",
            "commit",
            "device",
            "cores",
            "jax",
            "date",
            "data",
            "ratio",
        } <= set(line), path
        splits = [1] if line["line"].startswith("et ") else [5, 10]
        assert len(line["runs"]) in splits, path
        assert [run["seed"] for run in line["runs"]] == list(range(len(line["runs"])))
        assert all(run["seconds"] > 0 for run in line["runs"]), path
