"""Misuse: damaged files for every reader, two runs in one folder. Killed processes and full
disks are in test_training.py.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path

import doors
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import et_nbdev
from et_nbdev.commands import as_command
from et_nbdev.graph import anomaly, classify
from et_nbdev.graph.data import Graph, load_graph, save_graph
from et_nbdev.graph.sets import read_tu
from et_nbdev.training import (
    CheckpointError,
    OptimConfig,
    alone,
    fit,
    load_checkpoint,
    read_metrics,
    save_checkpoint,
)
from et_nbdev.vision import model
from et_nbdev.vision.data import load_images

ROOT = Path(et_nbdev.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compile_quickly")


# --- damaged files


def sound_graph(path):
    ends = np.random.default_rng(0).integers(0, 12, (2, 20))
    features = np.arange(36.0).reshape(12, 3)
    save_graph(Graph(*ends, features, np.arange(12) % 3 - 1, name="sound"), path)


def sound_mat(path):
    from scipy.io import savemat
    from scipy.sparse import csc_array

    nets = {f"net_{n}": csc_array(np.eye(5, k=k)) for n, k in (("a", 1), ("b", 2))}
    labels = np.array([[0, 1, 0, 1, 0]])
    arrays = {"features": np.eye(5), "label": labels, **nets}
    savemat(path, arrays, do_compression=True, appendmat=False)


def sound_set(path):
    text = dict(graph_indicator="1\n1\n2\n2\n", graph_labels="-1\n7\n")
    text |= dict(A="1, 2\n2, 1\n3, 4\n4, 3\n", node_attributes="1\n.5\n-3e2\n4\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for part, content in text.items():
            z.writestr(f"SET/SET_{part}.txt", content)


def sound_picture(path):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    for i in range(3):
        Image.fromarray(pixels).save(path.with_name(f"{i}.png"))
    Image.fromarray(pixels).save(path)


def sound_weights(path):
    shutil.copy(ROOT / "et_nbdev/vision/weights/digits.safetensors", path)


def sound_log(path):
    rows = [json.dumps({"step": s, "loss": 1 / s}) for s in range(1, 6)]
    path.write_text("\n".join(rows) + "\n")


def log(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(isinstance(row["step"], int) for row in read_metrics(path))


DRILL = {  # a sound file, what reads it, and the error that is right
    "graph.npz": (sound_graph, lambda p: load_graph(str(p)), ValueError),
    "graph.mat": (sound_mat, lambda p: load_graph(str(p)), ValueError),
    "SET.zip": (sound_set, lambda p: read_tu(p, "SET"), ValueError),
    "picture.png": (sound_picture, lambda p: load_images(p.parent)[:], ValueError),
    "model.safetensors": (sound_weights, model.load_model, CheckpointError),
    "metrics.jsonl": (sound_log, log, ()),
}


@pytest.mark.parametrize("name", DRILL)
def test_a_damaged_file_is_read_soundly_or_refused_by_name(tmp_path, name):
    write, read, error = DRILL[name]
    path = tmp_path / name
    write(path)
    read(path)
    sound = path.read_bytes()

    @examples(10 if name == "model.safetensors" else 60)
    @given(st.data())
    def drill(data):
        "Some bytes are others, or gone, or the file ends early."
        raw = bytearray(sound)
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["other", "gone", "end"]))
        other = data.draw(st.binary(min_size=1, max_size=8))
        raw[at : None if how == "end" else at + len(other)] = (
            other if how == "other" else b""
        )
        path.write_bytes(raw)
        try:
            with doors.unchecked():
                read(path)
        except error as e:
            assert name in str(e)

    drill()


WIDE = {"num_features": 3, "num_nodes": 12}
CLASSES = {"num_features": 3, "num_classes": 2}
LOADS = model.load_model, anomaly.load_anomaly_model, classify.load_classifier
IMAGE, ODD = asdict(model.ImageConfig()), asdict(anomaly.AnomalyConfig())
GRAPHS = asdict(classify.ClassifyConfig())
KINDS = "holds no (image model|anomaly model|graph classifier)"
CLAIMS = [  # meta of a checkpoint of two numbers, what reads it, and the answer
    *((meta, LOADS, "not a readable checkpoint") for meta in (3, "config", [[[]]])),
    *(({"config": c}, LOADS, KINDS) for c in (3, None, {"model": 3}, {"sizes": []})),
    ({"config": {"model": {"wings": 2}, "graph": {}, "sizes": {}}}, LOADS, KINDS),
    # sizes that a small file only claims would be built, a terabyte at a time
    (
        {"config": {"model": IMAGE | {"image_size": 16 * 10**6}}},
        LOADS[:1],
        "larger than the file",
    ),
    (
        {"config": {"model": ODD, "graph": WIDE | {"kinds": 10**9}}},
        LOADS[1:2],
        "more blocks than the file has bytes",
    ),
    (
        {"config": {"model": GRAPHS | {"blocks": 10**9}, "sizes": CLASSES}},
        LOADS[2:],
        "more blocks than the file has bytes",
    ),
    (
        {"config": {"model": GRAPHS, "sizes": CLASSES | {"num_features": 10**9}}},
        LOADS[2:],
        "holds no 'params.adjacency",
    ),
]


@pytest.mark.parametrize("meta, loads, says", CLAIMS)
def test_a_checkpoint_that_claims_what_cannot_be_is_refused(
    tmp_path, meta, loads, says
):
    path = tmp_path / "c.safetensors"
    with doors.unchecked():
        save_checkpoint(path, {"params": {"w": np.ones(2)}}, meta)
    for load in loads:
        with pytest.raises(CheckpointError, match=f"c.safetensors: .*{says}"):
            load(path)


# --- two runs in one folder

OTHER = """
import sys, time
from pathlib import Path
import numpy as np
from et_nbdev.training import save_checkpoint
from et_nbdev.training import alone
path = Path(sys.argv[1])
with alone(path.parent):
    print("held", flush=True)
    sys.stdin.readline()
    for n in range(60): save_checkpoint(path, {"w": np.full(20_000, 1, np.int32)}, {"by": 1})
    print("written", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="locks as POSIX has them")
def test_one_run_at_a_time_in_a_folder_and_a_killed_one_lets_go(tmp_path):
    """And should two processes write one file all the same, it is whole at any moment,
    whoever's it is.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    path, like = tmp_path / "last.safetensors", {"w": np.zeros(20_000, np.int32)}
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    words = [sys.executable, "-c", OTHER, str(path)]
    other = subprocess.Popen(words, env=os.environ | env, text=True, **pipes)
    partial = tmp_path / ".last.safetensors.1.partial"  # which the other is writing
    try:
        assert other.stdout.readline() == "held\n", other.stderr.read()
        partial.touch()
        line = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        with pytest.raises(SystemExit) as e, as_command("tool"):
            fit(
                line,
                lambda *_: None,
                lambda start: iter(()),
                OptimConfig(),
                folder=tmp_path,
            )
        busy = f"tool: .*another run is training in this folder.*{tmp_path}[^\n]*"
        assert re.fullmatch(busy, e.value.code)
        assert os.listdir(tmp_path) == [partial.name], "the other's files were touched"
        print("go", file=other.stdin, flush=True)
        for _ in range(60):
            save_checkpoint(path, {"w": np.full(20_000, 2, np.int32)}, {"by": 2})
            tree, meta = load_checkpoint(path, like)
            assert (np.asarray(tree["w"]) == meta["by"]).all()
        assert other.stdout.readline() == "written\n", other.stderr.read()
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    with alone(tmp_path):
        with pytest.raises(OSError, match="another run"), alone(tmp_path):
            pytest.fail("also within one process")
    with pytest.raises(ZeroDivisionError), alone(tmp_path):
        1 / 0
    with alone(tmp_path):  # given back after an error, too
        assert sorted(os.listdir(tmp_path)) == [partial.name, path.name]  # no lock file


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with alone(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
