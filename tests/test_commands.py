"""Commands: options from fields, errors in one line, and where there is no home folder,
no UTF-8, or not the device.
"""

import argparse
import importlib
import io
import os
import pwd
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import modules
import pytest

from et_nbdev.commands import as_command, configure, out_folder
from et_nbdev.graph import sets
from et_nbdev.graph.data import DATASETS, Graph, load_graph, save_graph
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.training import CheckpointError, OptimConfig, option, read_metrics
from et_nbdev.vision.data import load_images

# --- options


@dataclass(frozen=True)
class Inner:
    "Inside. And more."

    optim: OptimConfig = OptimConfig()
    depth: int = option(2, "how deep it is")


@dataclass(frozen=True)
class Outer:
    "Outside."

    inner: Inner = Inner()
    shape: Literal["round", "square"] = option("round", "what it looks like")
    loud: bool = option(False, "whether it is heard")
    scale: float | None = option(None, "how large it is")
    hidden: tuple = option((1,), "no option of the command line")


def configured(*words):
    parser = argparse.ArgumentParser("outer")
    parser.add_argument("--times", type=int, default=1)
    configs = {"small": Outer(), "large": Outer(scale=9.0)}
    return configure(parser, configs, "small", words, omit=("hidden",))


def test_every_field_is_an_option_however_deep(capsys):
    "How words become a configuration is in nbs/engine/commands.ipynb."
    assert configured("--loud", "TRUE", "--shape", "square")[0] == Outer(
        shape="square", loud=True
    )
    with pytest.raises(SystemExit):
        configured("--config", "large", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--scale FLOAT how large it is (default: 9.0)" in shown
    assert "inner: Inside. --inner.depth" in shown and "{round,square}" in shown
    assert "optim: AdamW with a warm-up" in shown and "optim.steps INT" in shown


@pytest.mark.parametrize(
    "words, says",
    [
        (["--config", "huge"], "small.*large"),
        (["--shape", "flat"], "--shape.*flat.*round.*square"),
        (["--loud", "2"], "--loud.*bool.*2"),
        (["--inner.depth", "none"], "--inner.depth.*int.*none"),
        (["--hidden", "1"], "--hidden"),
    ],
)
def test_words_that_cannot_be_read_are_named(words, says, capsys):
    with pytest.raises(SystemExit):
        configured(*words)
    assert re.search(says, capsys.readouterr().err.strip().split("\n")[-1])


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("no"), "tool: no"),
        (CheckpointError("bad file"), "tool: bad file"),
        (FileNotFoundError("gone"), "tool: gone"),
        (FloatingPointError("lost"), "tool: lost"),
        (ModuleNotFoundError("pip install x"), "tool: pip install x"),
        (KeyboardInterrupt(), "tool: stopped"),
        (KeyboardInterrupt("stopped after step 3"), "tool: stopped after step 3"),
        (MemoryError(), "tool: memory ran out; .*"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 TB"), "tool: memory ran out; .*"),
    ],
)
def test_a_command_ends_in_a_line(error, message):
    with pytest.raises(SystemExit, match=f"^{message}$"), as_command("tool"):
        raise error


def test_a_mistake_of_ours_keeps_its_traceback():
    for ours in (ZeroDivisionError, RuntimeError, AssertionError):
        with pytest.raises(ours), as_command("tool"):
            raise ours
    with pytest.raises(SystemExit, match="^tool: warmup: .*9999"), as_command("tool"):
        configured("--inner.optim.warmup", "9999")


# --- the commands that are installed

COMMANDS = dict(
    line.split("=") for line in modules.settings()["console_scripts"].split()
)
GRAPH = Graph([0, 1], [1, 0], [[1.0], [2.0]], [0, 1])


def main_of(command):
    module, main = COMMANDS[command].split(":")
    return getattr(importlib.import_module(module), main)


def run(command, *arguments, **environment):
    module, main = COMMANDS[command].split(":")
    code = f"import sys; from {module} import {main}; {main}(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        timeout=300,
    )


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"et_score"}))
def test_commands_say_at_once_that_out_is_no_folder(command, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    places = {"": "got ''", "file": "is a file", "file/below": "file is a file"}
    for out, says in places.items():
        with pytest.raises(SystemExit):
            main_of(command)(["--out", out and str(tmp_path / out)])
        said = f"argument --out: expected a folder.*{says}"
        assert re.search(said, capsys.readouterr().err)
    new = tmp_path / "new/one"
    assert out_folder(str(new)) == new and not new.parent.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed_in_any_encoding(command, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    with pytest.raises(SystemExit) as ended:
        main_of(command)(["--help"])
    shown.flush()
    assert not ended.value.code
    assert shown.buffer.getvalue().startswith(f"usage: {command}".encode())


WRONG = [
    ("et_train_images", "--config digits --data nosuchset", "nosuchset digits cifar10"),
    ("et_train_images", "--config digits --model.recipe soup", "soup tiny-imagenet"),
    ("et_train_images", "--config digits --test_on 0", "test_on"),
    ("et_train_anomaly", "--data cora", f"cora {' '.join(DATASETS)} .npz"),
    ("et_train_anomaly", "--config amazon", "Amazon.mat dgl pip install"),
    ("et_train_anomaly", "--train_fraction 0.002", "train_fraction one class only"),
    ("et_train_anomaly", "--seed 4294967295 --splits 2", "seed 4294967296"),
    ("et_train_graphs", "--data rings --lr -1", "lr"),
]


@pytest.mark.parametrize("command, words, says", WRONG)
def test_a_bad_option_is_named_before_anything_is_trained(
    tmp_path, monkeypatch, capsys, command, words, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ET_DATA", raising=False)
    for name in ("dgl", "dgl.data"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        main_of(command)([*words.split(), "--out", str(tmp_path / "out")])
    said = f"{ended.value.code} {capsys.readouterr().err}"
    assert ended.value.code and all(word in said for word in says.split()), said
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.parametrize(
    "command, data, platform",
    [("et_train_images", "digits", "cuda"), ("et_train_anomaly", "digits-knn", "odd")],
)
def test_a_device_that_is_not_there_is_one_line(tmp_path, command, data, platform):
    out = str(tmp_path / "out")
    found = run(command, "--data", data, "--out", out, JAX_PLATFORMS=platform)
    said = found.stderr.decode()
    assert found.returncode == 1 and "Traceback" not in said
    line = f"{command}: JAX_PLATFORMS: {platform!r} names no device of this machine"
    assert line in said.strip().splitlines()[-1]


# --- homes


def test_a_tilde_is_the_home_folder_everywhere(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home / "empty", here):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    save_graph(GRAPH, "~/runs/g.npz")
    assert load_graph("~/runs/g.npz").digest == load_graph(f"{home}/runs/g.npz").digest
    (home / "runs/metrics.jsonl").write_text('{"step": 1}\n')
    assert read_metrics("~/runs/metrics.jsonl") == [{"step": 1}]
    for read in (AnomalyDetector.load, lambda path: sets.load_graphs("MUTAG", path)):
        with pytest.raises((CheckpointError, ValueError, OSError)) as said:
            read("~/runs/absent")
        assert not Path("~").exists(), said
    with pytest.raises(ValueError, match=f"^name: {home}/empty holds no pictures"):
        load_images("~/empty")
    assert not list(here.iterdir())


def test_without_a_home_folder(monkeypatch):
    "As a user id without an entry: containers, systemd units."

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="^~/g.npz: there is no home folder .* set HOME"):
        save_graph(GRAPH, "~/g.npz")
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        sets.load_graphs("SET")


def test_a_command_warns_in_a_line():
    said = lambda: warnings.formatwarning("few pictures", UserWarning, "x.py", 1)
    with as_command("tool"):
        assert said() == "tool: few pictures\n"
    assert said() != "tool: few pictures\n"
