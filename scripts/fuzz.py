"""Hand damaged files to everything that reads files. Each has to give something sound,
or the one kind of error that its docstring names, with the name of the file in it:
never a crash, a hang, another kind of error, or memory without bounds.

    python scripts/fuzz.py --reader npz --inputs 10000      # input n depends on n
    alone; what fails is kept in --out

The readers run in processes of their own, so that a crash ends no more than an input;
tests/test_drill.py takes a few inputs of each.
"""

import argparse
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

SECONDS = 60  # for one input
MEBIBYTES = 2304  # at most, beyond what sound files take; DGL is given two gibibytes


class Reader(NamedTuple):
    file: str  # what the damaged file is called
    seeds: Callable[[], list[bytes]]  # sound files
    read: Callable[[Path], object]
    error: Callable[[], type[Exception]] = lambda: ValueError
    # damage that checksums do not see
    inside: Callable[[bytes, random.Random], bytes] | None = None


# --- damage
# --------------------------------------------------------------------------------------

EXTREMES = [
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\0" * 8,
    b"\xff" * 8,
    b"-1",
    b"nan",
    b"1e999",
    b"99999999999",
]
ODD = [
    None,
    True,
    -1,
    0,
    1,
    0.5,
    1e308,
    10**12,
    2**63,
    float("nan"),
    float("inf"),
    "",
    "x",
    "-1",
    [],
    [None],
    [[1]],
    {},
    {"a": 1},
    "relu",
    10**400,
]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped; bytes overwritten, removed, inserted, repeated, moved; the end cut
    off. Mostly a little of it.
    """
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, n = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64, 1000))
        piece = bytes(data[at : at + n])
        match rng.randrange(8):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at : at + len(extreme)] = (extreme := rng.choice(EXTREMES))
            case 3:
                del data[at:]
            case 4:
                del data[at : at + n]
            case 5:
                data[at:at] = rng.randbytes(n)
            case 6:
                data[at:at] = piece * rng.choice((1, 2, 20))
            case 7:
                data[(to := rng.randrange(len(data) + 1)) : to + n] = piece
    return bytes(data)


def damage_json(value, rng: random.Random):
    "One entry replaced, removed or added, somewhere."
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.05:
            return {**value, rng.choice(("wings", "", "dim", "model")): rng.choice(ODD)}
        return {**value, key: damage_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], damage_json(value[i], rng), *value[i + 1 :]]
    return rng.choice(ODD)


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        return {name: z.read(name) for name in z.namelist()}


def zipped(files: dict[str, bytes], compression=zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as z:
        for name, data in files.items():
            z.writestr(zipfile.ZipInfo(name), data, compression)
    return out.getvalue()


def inside_zip(data: bytes, rng: random.Random) -> bytes:
    files = members(data)
    name = rng.choice(sorted(files))
    return zipped(files | {name: damage(files[name], rng)})


# --- sound files
# --------------------------------------------------------------------------------------


def written(write: Callable[[str], object], name: str = "sound") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(str(Path(folder, name)))
        return Path(folder, name).read_bytes()


@cache
def graph():
    from et_nbdev.graph.data import from_relations

    rng = np.random.default_rng(0)
    relations = {
        kind: tuple(rng.integers(0, 12, (2, 20))) for kind in ("net_a", "net_b")
    }
    return from_relations(
        relations, rng.normal(size=(12, 3)), np.arange(12) % 3 == 0, "seed"
    )


def npz_seeds():
    from et_nbdev.graph.data import save_graph

    g = graph()
    platonov = dict(
        edges=np.stack(g.edges, 1),
        node_features=g.features,
        node_labels=g.labels.astype(np.int64),
    )
    return [
        written(lambda path: save_graph(g, path)),
        written(lambda path: np.savez_compressed(path, **platonov), "sound.npz"),
    ]


def mat_seeds():
    import scipy.io
    import scipy.sparse as sp

    g = graph()
    nets = {
        kind: sp.csc_array((np.ones(len(edges[0])), edges), shape=(12, 12))
        for kind, edges in g.relations.items()
    }
    content = {
        "features": sp.csc_array(g.features.astype(float)),
        "label": g.labels[None].astype(float),
        "note": "of no interest",
        **nets,
    }
    dense = content | {
        "features": g.features.astype(float),
        "label": g.labels[:, None].astype(bool),
    }
    return [
        written(lambda path: scipy.io.savemat(path, c, do_compression=z), "sound.mat")
        for c, z in ((content, False), (dense, False), (content, True))
    ]


def tu_seeds():
    text = dict(
        graph_indicator="1\n1\n2\n2\n2\n3\n",
        graph_labels="-1\n7\n7\n",
        A="1, 2\n2, 1\n3, 4\n4, 3\n",
        node_labels="0\n3\n3\n0\n0\n3\n",
        node_attributes="1, 2\n.5, -1e2\n-3e2, 4\n0, 0\n1, 1\n2, 2\n",
        edge_labels="1\n1\n0\n0\n",
        edge_attributes="0.5\n0.5\n.25\n.25\n",
    )
    return [
        zipped(
            {f"SET/SET_{part}.txt": content.encode() for part, content in text.items()},
            compression,
        )
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    ]


def dgl_seeds():
    code = (
        "import sys; import numpy as np; import dgl, torch\nfrom et_nbdev.graph.data"
        " import _from_npz\ng = _from_npz(sys.argv[1])\nd ="
        " dgl.graph((torch.tensor(g.senders), torch.tensor(g.receivers)),"
        " num_nodes=g.num_nodes)\nd.ndata['feature'], d.ndata['label'] ="
        " torch.tensor(g.features),"
        " torch.tensor(g.labels)\ndgl.save_graphs(sys.argv[2], [d])"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "g.npz").write_bytes(npz_seeds()[0])

        def write(path):
            subprocess.run(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-c",
                    code,
                    str(Path(folder, "g.npz")),
                    path,
                ],
                check=True,
                env=os.environ | {"DGLBACKEND": "pytorch"},
            )

        return [written(write)]


def picture_seeds():
    from PIL import Image

    rng = np.random.default_rng(0)

    def encoded(kind, shape=(12, 12, 3), **options):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(
            out, kind, **options
        )
        return out.getvalue()

    rotated = Image.Exif()
    rotated[274] = 6
    return [
        encoded("PNG"),
        encoded("JPEG", exif=rotated),
        encoded("JPEG", (99, 70, 3), progressive=True),
        encoded("GIF", (12, 12)),
        encoded("BMP"),
        encoded("WEBP", (12, 12, 4)),
        encoded("WEBP", lossless=True),
        encoded("TIFF", compression="tiff_lzw"),
        encoded("TIFF", (9, 12)),
        encoded("PPM"),
        encoded("PNG", (20, 9, 4)),
    ]


def parquet_seeds():
    import datasets

    pictures = picture_seeds()[0]
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": pictures, "path": None}] * 12, "label": [0, 1, 2] * 4},
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.Value("int64")}
        ),
    )
    table = rows.data.table
    import pyarrow.parquet as pq

    return [
        written(lambda path: pq.write_table(table, path, **options))
        for options in (
            dict(compression="none", use_dictionary=False),
            dict(compression="snappy"),
            dict(compression="zstd", row_group_size=4),
        )
    ]


@cache
def models():
    """(path of a small checkpoint, its tree, its meta, the function that loads it) for
    each kind of model.
    """
    from dataclasses import asdict

    from flax import nnx

    from et_nbdev.graph import anomaly, classify
    from et_nbdev.vision import model as vision

    def kept(model, config, load):
        return (
            {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))},
            json.loads(json.dumps({"config": config, "step": 5})),
            load,
        )

    c = vision.ImageConfig(
        image_size=8,
        patch_size=4,
        dim=4,
        num_heads=2,
        head_dim=2,
        num_memories=4,
        steps=2,
    )
    a = anomaly.AnomalyConfig(
        dim=4, num_heads=2, head_dim=2, num_memories=4, hidden=4, steps=2
    )
    g = classify.ClassifyConfig(
        dim=4, num_heads=2, head_dim=2, num_memories=4, num_positions=2
    )
    sizes = {"num_features": 3, "num_nodes": 12, "kinds": 1}
    shapes = {"num_features": 3, "num_classes": 2, "num_edge_features": 1}
    return [
        kept(
            vision._image_model(c, rngs=nnx.Rngs(0)),
            {"model": asdict(c)},
            vision.load_model,
        ),
        kept(
            anomaly.AnomalyEnergyTransformer(config=a, **sizes, rngs=nnx.Rngs(0)),
            {"model": asdict(a), "graph": sizes | {"digest": "0"}},
            anomaly._load_detector,
        ),
        kept(
            classify.GraphClassifier(config=g, **shapes, rngs=nnx.Rngs(0)),
            {"model": asdict(g), "sizes": shapes},
            classify.load_classifier,
        ),
    ]


def safetensors_seeds():
    from et_nbdev.training.checkpoint import _save_checkpoint

    return [
        written(lambda path: _save_checkpoint(path, tree, meta))
        for tree, meta, _ in models()
    ]


def damaged_meta(data: bytes, rng: random.Random) -> bytes:
    "A checkpoint whose configuration is odd, but whose checksum is right."
    from et_nbdev.training.checkpoint import _save_checkpoint

    tree, meta, _ = models()[seeds("config").index(data)]
    for _ in range(rng.choice((1, 1, 2, 5))):
        meta = damage_json(meta, rng)
    return written(lambda path: _save_checkpoint(path, tree, meta))


def read_checkpoint(path: Path):
    from et_nbdev.training.checkpoint import (
        CheckpointError,
        _load_checkpoint,
        _read_meta,
    )

    loaded, error = 0, None
    for tree, _, load in models():
        for read in (_read_meta, load, lambda path: _load_checkpoint(path, tree)):
            try:
                loaded += read(path) is not None and read is load
            except CheckpointError as e:
                error = e
    if not loaded:
        raise error


@cache
def estimators():
    "A trained one of each kind that people keep in a file."
    from et_nbdev.graph.data import load_graph
    from et_nbdev.graph.detector import AnomalyDetector
    from et_nbdev.graph.set_classifier import GraphSetClassifier
    from et_nbdev.graph.sets import _make_rings

    small = dict(dim=4, num_heads=2, head_dim=2, num_memories=4, steps=1)
    detector = AnomalyDetector(**small, hidden=4, scale="both", training_steps=2)
    classifier = GraphSetClassifier(**small, num_positions=2, epochs=1)
    return [
        detector.fit(load_graph("digits-knn")),
        classifier.fit(_make_rings(num_graphs=40)),
    ]


def estimator_seeds():
    return [written(fitted.save) for fitted in estimators()]


def damaged_estimator(data: bytes, rng: random.Random) -> bytes:
    "What it says of itself is odd, but its checksum is right."
    from flax.traverse_util import unflatten_dict
    from safetensors.numpy import load

    from et_nbdev.training.checkpoint import _read_meta, _save_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        path.write_bytes(data)
        meta = _read_meta(path)
    for _ in range(rng.choice((1, 1, 2, 5))):
        meta = damage_json(meta, rng)
    tree = unflatten_dict(load(data), sep=".")
    return written(lambda path: _save_checkpoint(path, tree, meta))


def read_estimator(path: Path):
    from et_nbdev.training.checkpoint import CheckpointError

    for fitted in estimators():
        try:
            return type(fitted).load(path).get_params()
        except CheckpointError as e:
            error = e
    raise error


def log_seeds():
    return [
        b"".join(
            json.dumps({"step": s, "loss": 1 / s, "seconds": 0.5}).encode() + b"\n"
            for s in (1, 2, 3, 4, 5)
        )
    ]


def read_log(path: Path):
    "Whatever has become of a log, it stops no run: it is read as far as it is one."
    from et_nbdev.training.fit import _MetricsLog, read_metrics

    before = read_metrics(path)
    assert all(isinstance(row["step"], int) for row in before)
    log = _MetricsLog(path, 3)
    log.append({"step": 6})
    assert read_metrics(path) == [row for row in before if row["step"] <= 3] + [
        {"step": 6}
    ]


SETTINGS = {"data": "rings", "seed": 0, "candidates": [{"model": {"dim": 8}}]}


def fold_seeds():
    row = {
        "fold": 0,
        "test_accuracy": 0.75,
        "test_correct": 3,
        "test_graphs": 4,
        "chosen": 0,
        "candidates": [{"epoch": 1}],
        "predictions": [1, 0, 1, 1],
        "settings": SETTINGS,
        "seconds": 1.5,
    }
    return [json.dumps(row).encode()]


def read_fold(path: Path):
    from et_nbdev.graph.crossval import read_fold, summary

    row = read_fold(path, SETTINGS)
    assert "%" not in summary([row, row]) and 0 <= row["test_accuracy"] <= 1


def inside_json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = damage_json(value, rng)
    return json.dumps(value).encode()


# --- readers
# --------------------------------------------------------------------------------------


def read_npz(path):
    from et_nbdev.graph.data import _from_npz

    _from_npz(path).symmetric().simple()


def read_mat(path):
    from et_nbdev.graph.data import _from_mat

    _from_mat(path).symmetric().simple()


def _read_tu(path):
    from et_nbdev.graph.sets import _read_tu

    _read_tu(path).undirected()


def read_dgl(path):
    """DGL takes seconds to import: here it is imported once, and every file is read in
    a copy of this process instead of in a new one.
    """
    from et_nbdev.graph import data

    os.environ["DGLBACKEND"] = "pytorch"
    import dgl  # noqa: F401

    def run(command, timeout, **_):
        with tempfile.TemporaryFile() as err:
            if not (child := os.fork()):
                os.dup2(err.fileno(), 2)
                try:
                    data._dgl_worker(*command[3:])
                except SystemExit as e:
                    print(e, file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            until = time.monotonic() + min(timeout, SECONDS / 2)
            while not (done := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    raise subprocess.TimeoutExpired(command, timeout)
                time.sleep(0.001)
            err.seek(0)
            return SimpleNamespace(
                returncode=os.waitstatus_to_exitcode(done[1]),
                stderr=err.read().decode(errors="replace"),
            )

    real, data.subprocess = (
        data.subprocess,
        SimpleNamespace(
            run=run,
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
        ),
    )
    try:
        data._from_dgl_file(path)
    finally:
        data.subprocess = real


def read_pictures(path):
    "The damaged one among sound ones."
    from et_nbdev.vision.data import load_images

    for i, sound in enumerate(
        picture_seeds()[:3] if not (path.parent / "0.png").exists() else ()
    ):
        (path.parent / f"{i}.png").write_bytes(sound)
    for split in ("train", "validation", "test"):
        load_images(path.parent, split)[:]


def read_parquet(path):
    import datasets

    from et_nbdev.vision.data import load_images

    datasets.disable_progress_bars()
    images = load_images(path)
    images[:]


def checkpoint_error():
    from et_nbdev.training.checkpoint import CheckpointError

    return CheckpointError


READERS = {
    "npz": Reader("x.npz", npz_seeds, read_npz, inside=inside_zip),
    "mat": Reader("x.mat", mat_seeds, read_mat),
    "tu": Reader("x.zip", tu_seeds, _read_tu, inside=inside_zip),
    "dgl": Reader("x.bin", dgl_seeds, read_dgl),
    "pictures": Reader("x.jpg", picture_seeds, read_pictures),
    "parquet": Reader("x.parquet", parquet_seeds, read_parquet),
    "safetensors": Reader(
        "x.safetensors", safetensors_seeds, read_checkpoint, checkpoint_error
    ),
    "config": Reader(
        "x.safetensors",
        safetensors_seeds,
        read_checkpoint,
        checkpoint_error,
        inside=damaged_meta,
    ),
    "estimator": Reader(
        "x.safetensors",
        estimator_seeds,
        read_estimator,
        checkpoint_error,
        inside=damaged_estimator,
    ),
    "log": Reader(
        "metrics.jsonl",
        log_seeds,
        read_log,
        inside=lambda data, rng: (
            b"\n".join(
                inside_json(line, rng) if rng.random() < 0.3 else line
                for line in data.splitlines()
            )
            + b"\n"
        ),
    ),
    "fold": Reader("fold-0.json", fold_seeds, read_fold, inside=inside_json),
}


# --- one input, and many
# --------------------------------------------------------------------------------------

seeds = cache(lambda reader: READERS[reader].seeds())


def one(reader: str, n: int, folder: Path) -> str:
    """Read input n of a reader, written into `folder`. Returns how it ended; raises
    AssertionError where that is not clean.
    """
    r, rng = READERS[reader], random.Random(f"{reader}/{n}")
    content = rng.choice(seeds(reader))
    content = (
        r.inside(content, rng)
        if r.inside and rng.random() < (0.9 if reader == "config" else 0.5)
        else damage(content, rng)
    )
    path = folder / r.file
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL warns of what it can do without
        try:
            r.read(path)
        except r.error() as e:
            assert path.name in str(e), (
                f"{reader}, input {n}: the file is not named: {type(e).__name__}: {e}"
            )
            return "refused"
        except Exception as e:
            raise AssertionError(f"{reader}, input {n}: {type(e).__name__}: {e}") from e
    return "read"


def work(reader: str, first: int, inputs: int, folder: Path):
    "In a process of its own: a line a failure, and one at the end."
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    r, ended = READERS[reader], Counter()
    if reader == "parquet":
        import datasets

        datasets.config.HF_DATASETS_CACHE = folder / "cache"
    for content in seeds(reader):
        (folder / r.file).write_bytes(content)
        r.read(folder / r.file)
    usual = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(first, inputs):
        (folder / "at").write_text(str(n))
        signal.alarm(SECONDS)  # not handled, so that it ends the process wherever it is
        try:
            ended[one(reader, n, folder)] += 1
        except AssertionError as e:
            print(
                json.dumps(
                    {
                        "input": n,
                        "error": str(e),
                        "where": (
                            traceback.format_exception(e.__cause__ or e)[-2].strip()
                        ),
                    }
                ),
                flush=True,
            )
        signal.alarm(0)
        if reader == "parquet" and n % 200 == 0:
            import shutil

            shutil.rmtree(folder / "cache", ignore_errors=True)
    most = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        json.dumps({"ended": ended, "usual": usual // 1024, "most": most // 1024}),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser("fuzz.py", description=__doc__.splitlines()[0])
    parser.add_argument("--reader", choices=list(READERS), required=True)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first input"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/fuzz"),
        help="where inputs are kept that a reader did not survive",
    )
    parser.add_argument(
        "--record",
        type=Path,
        help="a JSON file that keeps the outcome, such as results/fuzz.json",
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.reader, args.first, args.inputs, args.worker)
    begin = time.perf_counter()
    first = args.first
    ended = Counter()
    failures = []
    most = (0, 0)
    with tempfile.TemporaryDirectory() as folder:
        while first < args.inputs:
            Path(folder, "at").write_text("-1")
            run = subprocess.run(
                [
                    sys.executable,
                    __file__,
                    "--reader",
                    args.reader,
                    "--inputs",
                    str(args.inputs),
                    "--first",
                    str(first),
                    "--worker",
                    folder,
                ],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
            )
            for line in map(json.loads, run.stdout.splitlines()):
                if "ended" in line:
                    ended = ended + Counter(line["ended"])
                    most = max(most, (line["most"] - line["usual"], line["usual"]))
                else:
                    failures.append(line)
            n = int(Path(folder, "at").read_text())
            if run.returncode == 0:
                break
            if n < 0:
                sys.exit(f"{args.reader}: a sound file could not be read")
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{args.reader}-{n}").write_bytes(
                Path(folder, READERS[args.reader].file).read_bytes()
            )
            failures.append(
                {
                    "input": n,
                    "error": (
                        f"ended the process with {run.returncode}"
                        + (
                            f": no answer within {SECONDS} s"
                            if run.returncode == -signal.SIGALRM
                            else ""
                        )
                    ),
                }
            )
            first = n + 1
    for where, count in Counter(
        f["error"].split(": ", 1)[-1][:160] + " @ " + f.get("where", "")[:300]
        for f in failures
    ).most_common(20):
        print(f"{count:6d} × {where}")
    if args.record:
        from et_nbdev.training.checkpoint import _atomic_write, _provenance

        rows = json.loads(args.record.read_text()) if args.record.exists() else {}
        rows[args.reader] = {
            "inputs": args.inputs - args.first,
            "ended": dict(ended),
            "failures": len(failures),
            "usual_MiB": most[1],
            "more_MiB": most[0],
            "seconds": round(time.perf_counter() - begin),
            **_provenance(),
        }
        with _atomic_write(args.record) as path:
            path.write_text(json.dumps(rows, indent=1) + "\n")
    print(
        f"{args.reader}: {args.inputs - args.first} inputs in"
        f" {time.perf_counter() - begin:.0f} s: {dict(ended)}, {len(failures)}"
        f" failures{', first ' + str(failures[0]['input']) if failures else ''};"
        f" {most[0]} MiB more than the {most[1]} MiB that sound files take"
    )
    sys.exit(bool(failures) or most[0] > MEBIBYTES)


if __name__ == "__main__":
    main()
