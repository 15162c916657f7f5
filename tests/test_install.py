"""The Makefile, continuous integration and what they install agree with settings.ini:
Pythons, requirements, address.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import modules
import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = modules.settings()
PYTHONS = SETTINGS["pythons"].split()
EXTRAS = ("demo", "images", "graphs", "dev", "dgl", "check")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def required(*extras):
    "The requirements of the library and of the lists named, as they are written."
    lists = ["requirements", *(f"{extra}_requirements" for extra in extras)]
    return [Requirement(line) for name in lists for line in SETTINGS[name].split()]


# --- one statement of each ---


def test_the_pythons_are_stated_once():
    assert PYTHONS == [f"3.{minor}" for minor in range(11, 11 + len(PYTHONS))]
    assert SETTINGS["min_python"] == PYTHONS[0]
    tested = yaml.safe_load(read(".github/workflows/test.yml"))["jobs"]["test"]
    assert tested["strategy"]["matrix"]["python"] == PYTHONS
    said = f"Python {PYTHONS[0]} to {PYTHONS[-1]}"
    assert said in read("README.md") and said in read("CONTRIBUTING.md")
    for name in (".github/workflows/docs.yml", "pyproject.toml"):
        found = re.findall(r"ython-?[vV]ersion\W+(3\.\d+)", read(name))
        assert found and set(found) <= set(PYTHONS), name


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_one_tested_version(python):
    env = {"python_version": python, "platform_system": "Linux"}
    pins = {}
    lines = [line.partition("#")[0] for line in read("constraints.txt").split("\n")]
    for line in filter(str.strip, lines):
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(env):
            (version,) = pin.specifier
            assert version.operator == "==" and pin.name not in pins, line
            pins[pin.name.lower().replace("_", "-")] = version.version
    for wanted in required(*EXTRAS):
        if wanted.marker is None or wanted.marker.evaluate(env):
            version = pins.get(wanted.name.lower().replace("_", "-"))
            assert version and wanted.specifier.contains(version), (wanted, version)


def test_both_ends_of_jax_are_tested():
    (bounds,) = (r.specifier for r in required() if r.name == "jax")
    low, high = sorted(re.findall(r"^jax==([\d.]+)", read("constraints.txt"), re.M))
    least, above = sorted(s.version for s in bounds)
    assert low.startswith(f"{least}.")
    assert high.startswith(f"0.{int(above.split('.')[1]) - 1}.")


def test_the_address_is_stated_once():
    """What holds it otherwise is made from it: the settings of the site, the index of
    the names, and the cell that
    scripts/colab.py writes into notebooks.
    """
    home, repository = SETTINGS["doc_host"], SETTINGS["git_url"]
    made = yaml.safe_load(read("nbs/nbdev.yml"))["website"]
    assert made["repo-url"] == repository
    assert made["site-url"] == home + SETTINGS["doc_baseurl"]
    git = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if git.returncode:
        pytest.skip("not a git checkout")
    assert f"git clone {repository}\n" in read("README.md")
    holds = []
    for name in filter(None, git.stdout.split("\0")):
        content = (ROOT / name).read_bytes()
        if name in ("nbs/nbdev.yml", "et_nbdev/_modidx.py") or b"\0" in content:
            continue  # made from the settings, or no text
        text = content.decode()
        if name.endswith(".ipynb"):
            each = ("".join(c["source"]) for c in json.loads(text)["cells"])
            text = "\n".join(each)
            text = text.replace(f"!git clone -q --depth 1 {repository} ", "")
        text = text.replace(f"git clone {repository}\n", "")  # of the front page
        if any(part.partition("//")[2] in text for part in (home, repository)):
            holds.append(name)
    assert holds == []


# --- what is installed where ---


@pytest.fixture
def alone(tmp_path):
    "A folder with what the Makefile reads, and no .venv."
    read = "Makefile settings.ini setup.py pyproject.toml constraints.txt"
    for name in read.split():
        shutil.copy(ROOT / name, tmp_path)
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return tmp_path


def make(folder, *words, **env):
    # what a make around the tests was told is not for this one
    told = re.compile("MAKE|(DATA|ARGS|DGL|PYTHON)$")
    env = {k: v for k, v in os.environ.items() if not told.match(k)} | env
    return subprocess.run(
        ["make", *words], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "words, extras",
    [
        (["demo"], ["demo"]),
        (["demo", "DATA=cifar10"], ["images"]),
        (["check"], ["dev", "check"]),
        (["test"], ["dev"]),
        (["test", "DGL=1"], ["dev", "dgl"]),
        (["docs"], ["dev"]),
    ],
)
def test_each_target_installs_what_it_needs_and_no_more(alone, words, extras):
    run = make(alone, "-n", *words)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"-e '\.\[(\w+)\]'", run.stdout) == extras


def test_a_level_that_holds_others_spares_their_install(alone):
    (alone / ".venv").mkdir()
    for stamp in (".made", ".demo"):
        (alone / ".venv" / stamp).touch()
    assert "pip install" not in make(alone, "-n", "demo").stdout
    assert "'.[dev]'" in make(alone, "-n", "test").stdout
    assert (
        "touch .venv/.demo .venv/.images .venv/.dev" in make(alone, "-n", "test").stdout
    )
    later = (alone / ".venv/.demo").stat().st_mtime + 10
    os.utime(alone / "constraints.txt", (later, later))
    assert "'.[demo]'" in make(alone, "-n", "demo").stdout


def test_without_a_suitable_python_make_says_which(alone):
    run = make(alone, "demo", "PYTHON=/bin/false")
    assert run.returncode and f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in run.stderr
    assert "/bin/false" in run.stderr and not (alone / ".venv").exists()


@pytest.mark.parametrize(
    "asked, said", [("other", "is 3.99"), ("/bin/false", "is no Python that runs")]
)
def test_a_python_that_is_not_that_of_the_environment_is_refused(alone, asked, said):
    (alone / ".venv/bin").mkdir(parents=True)
    for path, version in (
        (alone / ".venv/bin/python", "3.11"),
        (alone / "other", "3.99"),
    ):
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    asked = str(alone / asked)  # an absolute path stays what it is
    run = make(alone, "test", f"PYTHON={asked}")
    assert run.returncode and f"Python 3.11, and PYTHON={asked} {said}" in run.stderr
    assert not (alone / ".venv/.made").exists()
    assert make(alone, "-n", "distclean", f"PYTHON={asked}").returncode == 0


def test_words_that_are_empty_or_zero_say_nothing(alone):
    assert ".dgl" not in make(alone, "-n", "test", "DGL=0").stdout
    assert '--data "digits"' in make(alone, "-n", "demo", "DATA=").stdout


def test_the_development_set_leaves_dgl_and_torch_out():
    names = {r.name for extra in EXTRAS if extra != "dgl" for r in required(extra)}
    assert not {"dgl", "torch"} & names
    assert {"dgl", "torch"} <= {r.name for r in required("dgl")}
    assert not {"datasets", "numba", "nbdev"} & {r.name for r in required("demo")}


# --- continuous integration ---


@pytest.mark.parametrize("data", [None, "given", "beside"])
def test_continuous_integration_goes_the_newcomers_way_first(tmp_path, data):
    shutil.copytree(ROOT / ".ci", tmp_path / "clone/.ci")
    for name in ("bin", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/make").write_text(
        "#!/bin/sh\n"
        'echo "$(ls -A "$HOME" | wc -l) $HOME|${ET_DATA-unset}|$*" >> "$LOG"\n'
    )
    (tmp_path / "bin/make").chmod(0o755)
    (tmp_path / "home/.pyenv").touch()
    env = {k: v for k, v in os.environ.items() if k != "ET_DATA"}
    env |= dict(HOME=str(tmp_path / "home"), LOG=str(tmp_path / "log"), HF_HOME="full")
    env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    folder = tmp_path / ("real" if data == "given" else "shared/data")
    if data:
        folder.mkdir(parents=True)
    if data == "given":
        env["ET_DATA"] = str(folder)
    subprocess.run([tmp_path / "clone/.ci/run"], env=env, check=True)
    calls = [row.split("|") for row in (tmp_path / "log").read_text().splitlines()]
    (home, _, install), *tests = calls
    assert home == f"1 {tmp_path / 'home'}" and ".venv/.dgl" in install
    assert all(home.startswith("0 ") and "home" not in home for home, *_ in tests)
    assert not Path(tests[0][0][2:]).exists()
    expected = [["unset", "test DGL=1"], [str(folder), "test DGL=1 ARGS=-m data"]]
    assert [rest for _, *rest in tests] == expected[: 1 + bool(data)]


# --- the scripts that are installed ---


def test_a_script_that_trained_ends_with_status_0(tmp_path):
    "The installed script hands what its function returns to sys.exit."
    few = "--optim.steps 2 --optim.warmup 1 --every 2 --model.dim 8 --model.hidden 8"
    script = Path(sysconfig.get_path("scripts"), "et_train_anomaly")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # it compiles longer than it runs
    command = [script, *few.split(), "--out", tmp_path]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "metrics.json").read_text())["commit"]
    for line in SETTINGS["console_scripts"].split():  # the others end alike
        module, _, name = line.partition("=")[2].partition(":")
        assert callable(getattr(importlib.import_module(module), name))
