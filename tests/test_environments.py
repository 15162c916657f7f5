"""Commands and paths where there is no home folder, no UTF-8, or not the device."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from et_nbdev.graph import batches, sets
from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyTraining
from et_nbdev.graph.data import Graph, load_graph, save_graph
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.training.checkpoint import CheckpointError
from et_nbdev.training.fit import read_metrics
from et_nbdev.vision.data import load_images

COMMANDS = {
    "et_train_images": "vision.train:_main",
    "et_demo": "vision.train:_demo_main",
    "et_train_anomaly": "graph.detector:train",
    "et_demo_graphs": "graph.detector:demo",
    "et_score": "graph.detector:score",
    "et_train_graphs": "graph.classify:_main",
}
GRAPH = Graph([0, 1], [1, 0], [[1.0], [2.0]], [0, 1])


def run(command, *arguments, **environment):
    module, main = COMMANDS[command].split(":")
    code = f"import sys; from et_nbdev.{module} import {main}; {main}(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        timeout=300,
    )


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed_in_any_encoding(command, encoding):
    found = run(command, "--help", PYTHONIOENCODING=encoding)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"usage: {command}".encode())


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_scores_are_written_where_no_greek_can_be_shown(tmp_path, encoding):
    from dataclasses import replace

    rng = np.random.default_rng(0)
    ring = np.arange(40), np.roll(np.arange(40), 1)
    graph = Graph(*ring, rng.normal(size=(40, 2)), np.arange(40) % 2).symmetric()
    graph = replace(graph, node_names=[f"Ж, {i}" for i in range(40)])
    sizes = dict(dim=8, num_heads=1, head_dim=4, num_memories=8, steps=1)
    optim = replace(AnomalyTraining.optim, steps=2)
    config = AnomalyTraining(model=AnomalyConfig(**sizes), optim=optim, every=1)
    detector = AnomalyDetector(config).fit(graph)
    detector.save(tmp_path / "d.safetensors")
    save_graph(graph, tmp_path / "g.npz")
    arguments = ["--model", "d.safetensors", "--data", "g.npz", "--out", "scores.csv"]
    paths = [a if a[0] == "-" else str(tmp_path / a) for a in arguments]
    found = run("et_score", *paths, PYTHONIOENCODING=encoding, LC_ALL="C")
    assert found.returncode == 0, found.stderr
    assert b"of 40 nodes flagged" in found.stdout
    rows = (tmp_path / "scores.csv").read_text("utf-8").splitlines()
    assert rows[0] == "node,p,flagged" and rows[1].startswith('"Ж, 0",')


@pytest.mark.parametrize("command", ["et_train_images", "et_train_anomaly"])
@pytest.mark.parametrize("platform", ["cuda", "gpu,tpu", "nonsense"])
def test_a_device_that_is_not_there_is_one_line(tmp_path, command, platform):
    data = "digits" if command == "et_train_images" else "digits-knn"
    out = str(tmp_path / "out")
    found = run(command, "--data", data, "--out", out, JAX_PLATFORMS=platform)
    said = found.stderr.decode()
    assert found.returncode == 1 and "Traceback" not in said
    line = f"{command}: JAX_PLATFORMS: {platform!r} names no device of this machine"
    assert line in said.strip().splitlines()[-1]


def homes(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home, here


def test_a_tilde_is_the_home_folder_everywhere(tmp_path, monkeypatch):
    home, here = homes(tmp_path, monkeypatch)
    save_graph(GRAPH, "~/runs/g.npz")
    assert load_graph("~/runs/g.npz").digest == load_graph(f"{home}/runs/g.npz").digest
    (home / "runs/metrics.jsonl").write_text('{"step": 1}\n')
    assert read_metrics("~/runs/metrics.jsonl") == [{"step": 1}]
    for read in (AnomalyDetector.load, sets_load):
        with pytest.raises((CheckpointError, ValueError, OSError)) as said:
            read("~/runs/absent")
        assert not Path("~").exists(), said
    (home / "empty").mkdir()
    with pytest.raises(ValueError, match=f"^name: {home}/empty holds no pictures"):
        load_images("~/empty")
    assert not list(here.iterdir()) and (home / "runs/g.npz").is_file()


def sets_load(path):
    return sets.load_graphs("MUTAG", path)


@pytest.fixture
def homeless(monkeypatch):
    "As a user id without an entry: containers, systemd units."

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_home_folder_positions_are_not_kept_and_are_right(homeless):
    graphs = sets.make_rings(20)
    with pytest.warns(UserWarning, match="positions"):
        found = batches.cached_positions(graphs, 3, least=10)
    np.testing.assert_array_equal(found, batches.cached_positions(graphs, 3))


def test_without_a_home_folder_a_tilde_is_named(homeless):
    with pytest.raises(OSError, match="^~/g.npz: there is no home folder .* set HOME"):
        save_graph(GRAPH, "~/g.npz")
