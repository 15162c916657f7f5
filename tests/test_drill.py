"""Misuse: damaged files for every reader, two runs in one folder, no network. Killed
processes and full disks are in test_training.py.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import doors
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import et_nbdev
from et_nbdev.training.checkpoint import (
    CheckpointError,
    _load_checkpoint,
    _read_meta,
    _save_checkpoint,
)
from et_nbdev.training.command import _as_command
from et_nbdev.training.fit import _alone, fit
from et_nbdev.training.loop import OptimConfig

ROOT = Path(et_nbdev.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location(
        "fuzz", Path(__file__).resolve().parent.parent / "scripts/fuzz.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- damaged files
# --------------------------------------------------------------------------------------

# inputs for each reader; scripts/fuzz.py takes as many, and survives a crash
MANY = int(os.environ.get("ET_FUZZ", 0))
# DGL: test_graph_data.py
FEW = {
    "npz": 60,
    "mat": 60,
    "tu": 60,
    "pictures": 40,
    "parquet": 6,
    "safetensors": 8,
    "config": 12,
    "estimator": 12,
    "log": 40,
    "fold": 40,
}
NEEDS = {
    "pictures": "PIL",
    "parquet": "datasets",
    "mat": "scipy",
    "estimator": "sklearn",
}


@pytest.mark.parametrize("reader", FEW)
def test_a_damaged_file_is_read_soundly_or_refused_by_name(
    tmp_path, fuzz, reader, monkeypatch
):
    if reader in NEEDS:
        pytest.importorskip(NEEDS[reader])
    if reader == "parquet":
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    ended = set()

    @examples(MANY or FEW[reader])
    @given(st.integers(0, 2**32))
    def drill(n):
        # some of what it writes down is wrong on purpose
        with doors.unchecked():
            ended.add(fuzz.one(reader, n, tmp_path))

    drill()
    assert "read" in ended if reader == "log" else "refused" in ended


def test_the_fuzzer_tells_clean_from_unclean(tmp_path, fuzz, monkeypatch):
    "An error of another kind, or one that does not name the file, is a failure."

    def reader(name, read):
        monkeypatch.setitem(
            fuzz.READERS, name, fuzz.Reader("x.bin", lambda: [b"sound"], read)
        )

    def bad(path):
        raise KeyError("x")

    def anonymous(path):
        raise ValueError("no")

    def named(path):
        raise ValueError(f"{path}: no")

    (
        reader("bad", bad),
        reader("anonymous", anonymous),
        reader("named", named),
        reader("sound", lambda path: path),
    )
    assert (
        fuzz.one("named", 0, tmp_path) == "refused"
        and fuzz.one("sound", 0, tmp_path) == "read"
    )
    for name in ("bad", "anonymous"):
        with pytest.raises(AssertionError, match=f"{name}, input 0"):
            fuzz.one(name, 0, tmp_path)


@pytest.mark.parametrize("meta", [[], 3, "config", None, [[[]]]])
def test_a_checkpoint_whose_meta_is_no_object_is_refused(tmp_path, meta):
    from et_nbdev.graph import anomaly, classify
    from et_nbdev.vision import model

    path = tmp_path / "c.safetensors"
    loads = (model.load_model, anomaly._load_detector, classify.load_classifier)
    with doors.unchecked():
        _save_checkpoint(path, {"params": {"w": np.ones(2)}}, meta)
    for read in (_read_meta, *loads) if meta else ():
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
            _save_checkpoint(path, {"params": {"w": np.ones(2)}}, odd)
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
    _save_checkpoint(
        path,
        params,
        {
            "config": {
                "model": (
                    asdict(model.ImageConfig(position_init="waves"))
                    | {"image_size": 16 * 10**6}
                )
            }
        },
    )
    with pytest.raises(CheckpointError, match="larger than the file"):
        model.load_model(path)
    _save_checkpoint(
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
        anomaly._load_detector(path)
    for features, blocks, says in (
        (10**9, 2, "holds no 'params.adjacency"),
        (3, 10**9, "more blocks than the file has bytes"),
    ):
        _save_checkpoint(
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
from et_nbdev.training.checkpoint import _save_checkpoint
from et_nbdev.training.fit import _alone
path = Path(sys.argv[1])
with _alone(path.parent):
    print("held", flush=True)
    sys.stdin.readline()
    for n in range(60): _save_checkpoint(path, {"w": np.full(20_000, 1, np.int32)}, {"by": 1})
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
        with pytest.raises(SystemExit) as e, _as_command("tool"):
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
            _save_checkpoint(path, {"w": np.full(20_000, 2, np.int32)}, {"by": 2})
            tree, meta = _load_checkpoint(path, like)
            assert (np.asarray(tree["w"]) == meta["by"]).all()
            by.add(meta["by"])
        assert other.stdout.readline() == "written\n", other.stderr.read()
        with pytest.raises(OSError, match="another run"), _alone(tmp_path):
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    with _alone(tmp_path):
        with pytest.raises(OSError, match="another run"), _alone(tmp_path):
            pytest.fail("also within one process")
    with pytest.raises(ZeroDivisionError), _alone(tmp_path):
        1 / 0
    with _alone(tmp_path):
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
    with _alone(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()


# --- no network
# --------------------------------------------------------------------------------------


def test_without_a_network_what_is_here_works_and_the_rest_says_so(
    tmp_path, monkeypatch
):
    from et_nbdev.graph.data import load_graph
    from et_nbdev.graph.sets import load_graphs
    from et_nbdev.vision._model_engine import _pretrained
    from et_nbdev.vision.data import load_images
    from et_nbdev.vision.model import from_pretrained

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
