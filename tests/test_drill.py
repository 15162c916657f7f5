"""Misuse: damaged files for every reader, two runs in one folder, no network. Killed
processes and full disks are in test_training.py.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import doors
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import et_nbdev
from et_nbdev.graph.data import Graph, load_graph, save_graph
from et_nbdev.graph.sets import load_graphs, read_tu
from et_nbdev.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_meta,
    save_checkpoint,
)
from et_nbdev.training.command import as_command
from et_nbdev.training.fit import alone, fit, read_metrics
from et_nbdev.training.loop import OptimConfig
from et_nbdev.vision.data import load_images
from et_nbdev.vision.model import load_model

ROOT = Path(et_nbdev.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compile_quickly")


# --- damaged files
# --------------------------------------------------------------------------------------


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
    "model.safetensors": (sound_weights, load_model, CheckpointError),
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


@pytest.mark.parametrize("meta", [[], 3, "config", None, [[[]]]])
def test_a_checkpoint_whose_meta_is_no_object_is_refused(tmp_path, meta):
    from et_nbdev.graph import anomaly, classify
    from et_nbdev.vision import model

    path = tmp_path / "c.safetensors"
    loads = (model.load_model, anomaly.load_anomaly_model, classify.load_classifier)
    with doors.unchecked():
        save_checkpoint(path, {"params": {"w": np.ones(2)}}, meta)
    for read in (read_meta, *loads) if meta else ():
        with pytest.raises(
            CheckpointError, match="c.safetensors: not a readable checkpoint"
        ):
            read(path)
    for odd in (
        {},
        {"config": meta},
        {"config": {"model": meta, "graph": meta, "sizes": meta}},
        {"config": {"model": {"wings": 2}, "graph": {}, "sizes": {}}},
    ):
        with doors.unchecked():
            save_checkpoint(path, {"params": {"w": np.ones(2)}}, odd)
        for load in loads:
            with pytest.raises(
                CheckpointError,
                match=(
                    "c.safetensors: holds no (image model|anomaly model|graph"
                    " classifier)"
                ),
            ):
                load(path)


def test_a_model_larger_than_its_file_is_never_made(tmp_path):
    """Sizes that a small file only claims would otherwise be built, a terabyte at a
    time.
    """
    from dataclasses import asdict

    from et_nbdev.graph import anomaly, classify
    from et_nbdev.vision import model

    path, params = tmp_path / "c.safetensors", {"params": {"w": np.ones(2)}}
    save_checkpoint(
        path,
        params,
        {
            "config": {
                "model": (
                    asdict(model.ImageConfig("waves"))
                    | {"image_size": 16 * 10**6}
                )
            }
        },
    )
    with pytest.raises(CheckpointError, match="larger than the file"):
        model.load_model(path)
    save_checkpoint(
        path,
        params,
        {
            "config": {
                "model": asdict(anomaly.AnomalyConfig()),
                "graph": {"num_features": 3, "num_nodes": 12, "kinds": 10**9},
            }
        },
    )
    with pytest.raises(CheckpointError, match="more blocks than the file has bytes"):
        anomaly.load_anomaly_model(path)
    for features, blocks, says in (
        (10**9, 2, "holds no 'params.adjacency"),
        (3, 10**9, "more blocks than the file has bytes"),
    ):
        save_checkpoint(
            path,
            params,
            {
                "config": {
                    "model": asdict(classify.ClassifyConfig(blocks=blocks)),
                    "sizes": {"num_features": features, "num_classes": 2},
                }
            },
        )
        with pytest.raises(CheckpointError, match=says):
            classify.load_classifier(path)


# --- two runs in one folder
# --------------------------------------------------------------------------------------

OTHER = """
import sys, time
from pathlib import Path
import numpy as np
from et_nbdev.training.checkpoint import save_checkpoint
from et_nbdev.training.fit import alone
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
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
    }
    path, like = tmp_path / "last.safetensors", {"w": np.zeros(20_000, np.int32)}
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n", other.stderr.read()
        (tmp_path / ".last.safetensors.1.partial").write_bytes(
            b"which the other is writing"
        )
        with pytest.raises(SystemExit) as e, as_command("tool"):
            fit(
                nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
                None,
                lambda start: iter(()),
                OptimConfig(),
                folder=tmp_path,
            )
        assert (
            "tool: " in e.value.code
            and "another run is training in this folder" in e.value.code
            and str(tmp_path) in e.value.code
            and "\n" not in e.value.code
        )
        assert os.listdir(tmp_path) == [".last.safetensors.1.partial"], (
            "the other's files were touched"
        )
        print("go", file=other.stdin, flush=True)
        by = set()
        for _ in range(60):
            save_checkpoint(path, {"w": np.full(20_000, 2, np.int32)}, {"by": 2})
            tree, meta = load_checkpoint(path, like)
            assert (np.asarray(tree["w"]) == meta["by"]).all()
            by.add(meta["by"])
        assert other.stdout.readline() == "written\n", other.stderr.read()
        with pytest.raises(OSError, match="another run"), alone(tmp_path):
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    with alone(tmp_path):
        with pytest.raises(OSError, match="another run"), alone(tmp_path):
            pytest.fail("also within one process")
    with pytest.raises(ZeroDivisionError), alone(tmp_path):
        1 / 0
    with alone(tmp_path):
        pass  # given back after an error, too
    assert sorted(os.listdir(tmp_path)) == [".last.safetensors.1.partial", path.name], (
        "a lock must leave no file"
    )


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    import errno
    import fcntl

    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with alone(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()


# --- no network
# --------------------------------------------------------------------------------------


def test_without_a_network_what_is_here_works_and_the_rest_says_so(
    tmp_path, monkeypatch
):
    from et_nbdev.vision.model import from_pretrained
    from et_nbdev.vision.model import pretrained as _pretrained

    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

    def blocked(*_, **__):
        raise OSError("the network is blocked")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, blocked)
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, blocked)
    for name, folder in (
        ("XDG_CACHE_HOME", "cache"),
        ("DGL_DOWNLOAD_DIR", "dgl"),
        ("HF_HOME", "hf"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("ET_DATA", raising=False)
    assert (
        len(load_images("digits"))
        and load_graph("digits-knn").num_nodes == 1797
        and len(load_graphs("rings")) == 240
    )
    assert from_pretrained(_pretrained()[0]).config.num_tokens
    with pytest.raises(
        FileNotFoundError, match="MUTAG.*(?s:.)*blocked|blocked.*(?s:.)*MUTAG"
    ):
        load_graphs("MUTAG")
    with pytest.raises(FileNotFoundError, match="tolokers.*not found"):
        load_graph("tolokers")
