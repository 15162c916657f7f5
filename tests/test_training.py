"""Training: checkpoints that are whole or refused, and runs that survive an exception, a
full disk, Ctrl-C and SIGKILL with the very weights of an uninterrupted one.
"""

import argparse
import contextlib
import errno
import importlib
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import et_nbdev
from et_nbdev.training.checkpoint import (
    CheckpointError,
    atomic_write,
    load_checkpoint,
    provenance,
    read_meta,
    save_checkpoint,
)
from et_nbdev.training.command import as_command, configure, out_folder
from et_nbdev.training.fit import MetricsLog, fit, read_metrics
from et_nbdev.training.loop import (
    OptimConfig,
    Run,
    in_parts,
    learning_rate,
    make_optimizer,
    option,
    train_loop,
)

pytestmark = pytest.mark.usefixtures("compiled_once")
# optax itself is not written for strict promotion
relaxed = lambda: jax.numpy_dtype_promotion("standard")


def same(a, b):
    "Bit for bit: names, dtypes, shapes, bytes."
    flat = lambda tree: [
        (jax.tree_util.keystr(path), x.dtype, x.shape, np.asarray(x).tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return flat(a) == flat(b)


def weights(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


# --- checkpoints

SMALL = {"w": jnp.asarray([1.5, -2.0], jnp.float32), "n": jnp.int32(3)}
META = {"config": {"lr": 1e-3, "name": "ä → β", "none": None}, "step": 7}
TYPES = "float32", "bfloat16", "float16", "int32", "uint8", "bool", "uint32"


@given(
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, dtypes, shapes, seed):
    "NaN, signed zeros and denormals too; also a part of it, and from abstract arrays."
    draw = np.random.default_rng(seed)
    path = tmp_path_factory.getbasetemp() / "new/folder/any.safetensors"

    def array(dtype, shape):
        dtype = jnp.dtype(dtype)
        high = 2 if dtype == np.dtype(bool) else 256
        raw = draw.integers(0, high, math.prod(shape) * dtype.itemsize, np.uint8)
        return raw.view(dtype).reshape(shape).T

    tree = [{"x": array(dtype, shape)} for dtype, shape in zip(dtypes, shapes)]
    save_checkpoint(path, {"part": tree, "more": SMALL}, META)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    found, meta = load_checkpoint(str(path), {"part": like})
    assert same(found["part"], tree) and meta == META == read_meta(path)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, SMALL, {"config": {"lr": 0.125}})
    return path


def refused(path, like=SMALL):
    with pytest.raises(CheckpointError) as e:
        load_checkpoint(path, like)
    assert str(path) in str(e.value)
    return str(e.value)


def test_every_truncation_and_every_flip_is_refused(small):
    "In the data, in names, shapes and dtypes, and in the meta."
    content = small.read_bytes()
    cut = [content[:n] for n in range(len(content))] + [content + b"\0"]
    flipped = [
        content[:n] + bytes([content[n] ^ flip]) + content[n + 1 :]
        for n in range(len(content))
        for flip in (1 << n % 8, 255)
    ]
    swapped = content.replace(b'"w"', b'"?"').replace(b'"n"', b'"w"')
    for damaged in (*cut, *flipped, swapped.replace(b'"?"', b'"n"')):
        small.write_bytes(damaged)
        refused(small)
        with contextlib.suppress(CheckpointError):  # it vouches for no arrays
            assert isinstance(read_meta(small), dict)
    small.write_bytes(content.replace(b'"w"', b'"v"'))
    refused(small, {"v": SMALL["w"]})


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    path, sprung = tmp_path / "c.safetensors", tmp_path / "sprung"
    arrays = {k: np.asarray(v) for k, v in SMALL.items()}
    for content in (
        *(b"", b"these are not the weights" * 20, b'{"w": [1.5, -2.0]}'),
        *(pickle.dumps(Trap(sprung)), safetensors.numpy.save(arrays)),
        safetensors.numpy.save(arrays, {"format": "pt"}),
    ):
        path.write_bytes(content)
        refused(path)
        with pytest.raises(CheckpointError):
            read_meta(path)
    assert not sprung.exists()
    for nowhere in (tmp_path, tmp_path / "none", tmp_path / "nowhere/none"):
        assert "no such checkpoint" in refused(nowhere)


@pytest.mark.parametrize(
    "like, says",
    [
        ({"other": jnp.ones(2)}, "'other', so it belongs to another model"),
        ({"w": {"deeper": jnp.ones(2)}}, "'w.deeper'"),
        ({"w": jnp.ones(3)}, r"w is float32\(2,\), this model needs float32\(3,\)"),
        ({"n": jnp.float32(0)}, r"n is int32\(\), this model needs float32"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_tensor(small, like, says):
    assert re.search(says, refused(small, like))


def test_provenance():
    p = json.loads(json.dumps(provenance()))
    assert p["jax"] == jax.__version__ and p["cores"] == os.cpu_count() and p["commit"]
    assert {"device", "machine", "python", "date"} <= set(p)


# --- writing


def test_atomic_write_replaces_only_on_success(tmp_path):
    "Also through a link, and when two write at the same time."
    path, link = tmp_path / "a" / "file", tmp_path / "link"
    link.symlink_to(path)
    with atomic_write(str(path)) as temporary:
        temporary.write_text("old")
        assert temporary.parent == path.parent and not path.exists()
    for problem in (ValueError, KeyboardInterrupt, OSError):
        with pytest.raises(problem), atomic_write(path) as temporary:
            temporary.write_text("half of the n")
            raise problem
        assert path.read_text() == "old" and os.listdir(path.parent) == ["file"]
    with atomic_write(link) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert link.is_symlink() and path.read_text() == "first"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="folders are not flushed elsewhere")
def test_a_new_name_is_flushed_to_the_disk_after_the_file(tmp_path, monkeypatch):
    flush, seen, path = os.fsync, [], tmp_path / "file"

    def watch(fd):
        seen.append((os.fstat(fd).st_ino, path.exists()))
        flush(fd)

    monkeypatch.setattr(os, "fsync", watch)
    with atomic_write(path) as temporary:
        temporary.write_text("x")
    assert seen == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_an_unwritable_folder_is_named(tmp_path):
    "A file in its place, whoever asks: root may write where permissions say no."
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        for write in (
            lambda: save_checkpoint(folder / "c.safetensors", SMALL),
            lambda: train_line(folder=folder),
        ):
            with pytest.raises(OSError, match=str(tmp_path / "file")):
                write()


@pytest.fixture(params=["tmpfs", "file size limit"])
def full_disk(request, tmp_path):
    "(a folder, the function that fills its disk to the end and returns a way back)."
    if request.param == "file size limit":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, limits[1]))
        yield tmp_path, lambda: limit(200) or (lambda: limit(limits[0]))
        return limit(limits[0])
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    able = shutil.which("mount") and os.geteuid() == 0
    if not able or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")

    def fill():
        with contextlib.suppress(OSError), open(folder / "filler", "wb", 0) as f:
            while True:
                f.write(bytes(512))
        return (folder / "filler").unlink

    yield folder, fill
    subprocess.run(["umount", folder], check=True)


# --- the log


@pytest.mark.parametrize("tail", ["", '{"step": 30, "lo', "{", "17", "\xff"])
def test_the_log_forgets_what_comes_after_its_step(tmp_path, tail):
    "On the disk at once; a last line cut in half goes without a word."
    log = MetricsLog(tmp_path / "metrics.jsonl")
    rows = [{"step": s, "loss": 1 / s} for s in (10, 20, 30)]
    for n, row in enumerate(rows):
        log.append(row)
        assert read_metrics(log.path) == rows[: n + 1]
    with open(log.path, "a") as f:
        f.write(tail)
    assert read_metrics(log.path) == rows
    log = MetricsLog(str(log.path), 25)
    log.append(rows[2])
    assert read_metrics(log.path) == log.rows == rows
    assert read_metrics(MetricsLog(log.path).path) == []  # a new run


LINES = b"17", b"null", b"[1]", b'{"loss": 1}', b'{"step": "3"}', b"\xff", b"[" * 10**5


@pytest.mark.parametrize("damaged", LINES)
def test_a_damaged_line_costs_no_other(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 4}\n')
    with pytest.warns(UserWarning, match="metrics.jsonl: 1 of its 3 lines"):
        assert read_metrics(path) == [{"step": 1}, {"step": 4}]


# --- the optimizer


def schedule(c, s):
    "Linear to the peak, then half a cosine down to the floor."
    if s < c.warmup:
        return c.lr_floor + (c.lr - c.lr_floor) * s / c.warmup
    done = min(1, (s - c.warmup) / (c.steps - c.warmup))
    return c.lr_floor + (c.lr - c.lr_floor) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize(
    "c",
    [
        OptimConfig(),
        OptimConfig(steps=10, warmup=0, lr=1.0, lr_floor=0.0),
        OptimConfig(steps=7, warmup=6, lr=2e-3),
        OptimConfig(steps=1, warmup=0),
    ],
)
def test_the_schedule(c):
    for s in {0, 1, c.warmup // 2, c.warmup, c.steps - 1, c.steps, 2 * c.steps}:
        expected = pytest.approx(schedule(c, s), rel=1e-5, abs=1e-9)
        assert float(learning_rate(c)(s)) == expected, s


def adamw(params, grads, c):
    """AdamW on the clipped gradients, in NumPy, from Loshchilov and Hutter (2019),
    algorithm 2; only matrices decay.
    """
    m, v = ({k: np.zeros_like(p) for k, p in params.items()} for _ in range(2))
    for t, g in enumerate(grads, 1):
        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        for k, p in params.items():
            clipped = g[k] * min(1.0, c.clip / norm)
            m[k] = c.b1 * m[k] + (1 - c.b1) * clipped
            v[k] = c.b2 * v[k] + (1 - c.b2) * clipped**2
            move = m[k] / (1 - c.b1**t) / (np.sqrt(v[k] / (1 - c.b2**t)) + 1e-8)
            decay = c.weight_decay * p if p.ndim > 1 else 0
            params = {**params, k: p - schedule(c, t - 1) * (move + decay)}
        yield params


@pytest.mark.parametrize(
    "b1, b2, decay, clip", [(0.9, 0.99, 0.05, 1), (0.5, 0.7, 0.4, 0.3)]
)
def test_the_optimizer_is_clipped_adamw_with_a_warm_up_cosine(x64, b1, b2, decay, clip):
    c = OptimConfig(8, 3, 0.1, 0.01, weight_decay=decay, b1=b1, b2=b2, clip=float(clip))
    draw, shapes = np.random.default_rng(3), {"W": (3, 4), "b": (4,), "s": ()}
    new = lambda scale: {k: draw.normal(size=s) * scale for k, s in shapes.items()}
    # clipped and not
    start, grads = new(1.0), [new(scale) for scale in (3, 0.01, 1, 0.02, 10, 0.1, 1, 1)]
    optimizer, params = make_optimizer(c), jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)
    for g, expected in zip(grads, adamw(start, grads, c)):
        g = jax.tree.map(jnp.asarray, g)
        updates, state = relaxed()(optimizer.update)(g, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for k in start:
            np.testing.assert_allclose(params[k], expected[k], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "name, bad",
    [
        *(
            ("steps", 0),
            ("warmup", -1),
            ("warmup", 1000),
            ("lr", -1.0),
            ("lr_floor", 1.0),
        ),
        *(("lr", math.nan), ("lr", math.inf), ("lr_floor", -1e-9), ("b1", 1.0)),
        *(
            ("b1", -0.1),
            ("b2", 1.5),
            ("b2", math.nan),
            ("clip", 0.0),
            ("clip", math.nan),
        ),
        *(("weight_decay", -0.1), ("weight_decay", math.nan), ("steps", 1.5)),
    ],
)
def test_an_impossible_schedule_names_the_field(name, bad):
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected.*{bad}"):
        OptimConfig(**{name: bad})


# --- the loop


@pytest.mark.parametrize("at", [None, 4])
def test_the_loop_calls_hooks_in_order_and_closes_its_batches(at):
    "Whatever the step is, and also after an error."
    events = []

    def numbers(start):
        try:
            yield from range(start, 9)
        finally:
            events.append("closed")

    def second(run):
        events.append(run.step)
        if run.step == at:
            raise ZeroDivisionError

    run = Run(100, steps=5, step=3)
    add = lambda state, n: (state + n, {"n": n})
    with pytest.raises(ZeroDivisionError) if at == 4 else contextlib.nullcontext():
        train_loop(run, add, numbers, [lambda run: events.append(run.metrics), second])
    whole = [{"n": 3}, 4, {"n": 4}, 5, "closed"]
    assert events == (whole if at is None else whole[:2] + whole[-1:])
    assert run.state == (107 if at is None else 103) and run.due(7) == (at is None)


@pytest.mark.parametrize("size", [1, 3, 12])
def test_parts_of_a_batch_are_the_batch(x64, size):
    draw = np.random.default_rng(0).normal
    W = nnx.Param(jnp.asarray(draw(size=(5, 2))))
    model = nnx.Dict(W=W, offset=nnx.Variable(jnp.asarray(0.5)))
    batch = {"x": jnp.asarray(draw(size=(12, 5))), "i": jnp.arange(12)}

    def loss(model, batch):
        y = jnp.tanh(batch["x"] @ model["W"][...]) + model["offset"][...]
        each = jnp.sum(y**2, -1) * batch["i"].astype(y.dtype)
        return each.mean(), {"first": y[:, 0].mean()}

    close = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-12))
    parted = lambda model, batch: in_parts(loss, model, batch, size)
    slope = lambda f: jax.jit(nnx.value_and_grad(f, has_aux=True))(model, batch)
    close(jax.jit(parted)(model, batch), loss(model, batch))
    (value, grads), (expected, wanted) = slope(parted), slope(loss)
    close(value, expected)
    close(grads["W"][...], wanted["W"][...])
    # twice the loss has twice the gradient, also of several models at once
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    twice = lambda params: 2 * parted(nnx.merge(graphdef, params, rest), batch)[0]
    two = jax.tree.map(lambda a: jnp.stack([a, a]), params)
    for row in jax.vmap(jax.grad(twice))(two)["W"][...]:
        close(row, 2 * wanted["W"][...])


def test_parts_need_less_memory():
    model, x = nnx.Linear(50, 1000, rngs=nnx.Rngs(0)), jnp.ones((256, 50))
    loss = lambda model, x: (jnp.mean(jnp.tanh(model(x)) ** 2), {})
    graphdef, params = nnx.split(model, nnx.Param)

    def working(size):
        whole = lambda p: in_parts(loss, nnx.merge(graphdef, p), x, size)[0]
        compiled = jax.jit(jax.grad(whole)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert working(16) < working(256) / 2


# --- fit

TRUTH = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], np.float32)
OPTIM = OptimConfig(steps=20, warmup=4, lr=0.1, lr_floor=1e-3, weight_decay=0.0)


class Line(nnx.Module):
    "y = x W + b"

    def __init__(self, width=2):
        self.W, self.b = nnx.Param(jnp.zeros((3, width))), nnx.Param(jnp.ones(width))

    def __call__(self, x):
        return x @ self.W[...] + self.b[...][None]


def line_loss(model, batch, key):
    x, y = batch
    return jnp.mean((model(x) + 0.01 * jax.random.normal(key, y.shape) - y) ** 2), {}


def line_batch(s):
    x = np.random.default_rng([7, s]).normal(size=(16, 3)).astype(np.float32)
    return x, x @ TRUTH


def line_batches(start):
    while True:
        yield line_batch(start)
        start += 1


def line_error(model):
    x, y = line_batch(10**6)
    return {"loss": jnp.mean((model(jnp.asarray(x)) - y) ** 2)}


def train_line(
    model=None, loss=line_loss, batches=line_batches, optim=OPTIM, **options
):
    options = dict(validate=line_error, every=5, log_every=2, progress=False) | options
    return fit(model or Line(), loss, batches, optim, **options)


def at_step(n, action):
    "Batches that call action(batch) for the batch of step n."

    def batches(start):
        for s, batch in enumerate(line_batches(start), start + 1):
            yield action(batch) if s == n else batch

    return batches


def tear(batch):
    raise RuntimeError("torn")


def nan_input(batch):
    return batch[0] * np.float32(np.nan), batch[1]


def strip(rows):
    "Rows without what the clock decides."
    clock = "samples_per_second", "input_wait", "seconds"
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def step_of(folder, name="last"):
    return read_meta(folder / f"{name}.safetensors")["step"]


def equal_runs(folder, whole):
    for name in ("last.safetensors", "best.safetensors"):
        one, two = (safetensors.numpy.load_file(f / name) for f in (folder, whole[1]))
        assert same(one, two), name
    steps = {row["step"] for row in whole[0].history}
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["step"] in steps]
    assert strip(rows) == strip(whole[0].history)
    files = ["best.safetensors", "last.safetensors", "metrics.jsonl"]
    assert sorted(os.listdir(folder)) == files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The uninterrupted run: (what fit returned, its folder)."
    folder = tmp_path_factory.mktemp("whole")
    return train_line(folder=folder), folder


def test_what_it_logs_and_learns(whole):
    "Row by row, against a loop in NumPy over the library's optimizer."
    result, folder = whole
    params, rows = {"W": jnp.zeros((3, 2)), "b": jnp.ones(2)}, {}
    optimizer = make_optimizer(OPTIM)
    state, key = optimizer.init(params), jax.random.key(0)
    for s in range(20):
        x, y = line_batch(s)
        noise = 0.01 * jax.random.normal(jax.random.fold_in(key, s), y.shape)
        error = np.asarray(x @ params["W"] + params["b"][None] + noise - y)
        grads = {"W": 2 * x.T @ error / error.size, "b": 2 * error.sum(0) / error.size}
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        rows[s + 1] = ((error**2).mean(), norm)
        grads = jax.tree.map(jnp.asarray, grads)
        updates, state = relaxed()(optimizer.update)(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for row in result.history:
        found = row["loss"], row["grad_norm"]
        np.testing.assert_allclose(found, rows[row["step"]], rtol=1e-3)
        assert row["samples_per_second"] > 0 and 0 <= row["input_wait"] <= 1
    stored = safetensors.numpy.load_file(folder / "last.safetensors")
    np.testing.assert_allclose(stored["params.W"], params["W"], rtol=1e-4, atol=1e-5)
    assert result.history == read_metrics(folder / "metrics.jsonl")
    steps = [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20]
    assert [row["step"] for row in result.history] == steps
    judged = [row["step"] for row in result.history if "validation_loss" in row]
    assert judged == [5, 10, 15, 20] and rows[20][0] < rows[1][0]


def test_a_step_is_compiled_once_and_the_callers_model_is_left_alone():
    model, traces = Line(), []
    before = jax.tree.map(np.array, weights(model))
    one = train_line(model, lambda *args: (traces.append(1), line_loss(*args))[1])
    assert len(traces) == 1 and same(weights(model), before)  # readable, not donated
    two, three = (train_line(validate=None, seed=seed).model for seed in (0, 1))
    assert not same(weights(two), weights(three))
    one.model.W[...] = one.model.W[...].at[0].set(0.0)  # what it returns can be changed


@pytest.mark.parametrize("with_folder", [True, False])
def test_the_best_weights_on_validation_are_kept(tmp_path, with_folder):
    "A validation that asks for what training passes on its way. Of equals, the first."
    folder, measured = tmp_path / "run" if with_folder else None, []

    def validate(model):
        value = jnp.round(jnp.abs(model.W[0, 0] - 0.5), 1)
        measured.append((float(value), jax.tree.map(np.array, weights(model))))
        return {"loss": value}

    options = dict(every=3, validate=validate, folder=folder)
    result = train_line(optim=replace(OPTIM, steps=60), **options)
    best = int(np.argmin([value for value, _ in measured]))
    assert 0 < best < len(measured) - 4 and result.best_step == 3 * (best + 1)
    assert same(weights(result.model), measured[best][1])
    if with_folder:
        for name, n in (("best", best), ("last", -1)):
            path, like = folder / f"{name}.safetensors", {"params": measured[0][1]}
            assert same(load_checkpoint(path, like)[0]["params"], measured[n][1])
        assert step_of(folder, "best") == result.best_step


def test_without_validation_or_folder(tmp_path, monkeypatch, whole):
    result = train_line(validate=None, folder=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["last.safetensors", "metrics.jsonl"]
    like = {"params": weights(Line())}
    last, _ = load_checkpoint(tmp_path / "last.safetensors", like)
    assert result.best_step == 20 and same(last["params"], weights(result.model))
    assert train_line(validate=lambda model: {"loss": 1.0}).best_step == 5
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    found = []  # in another thread, too, which gets no Ctrl-C
    thread = threading.Thread(target=lambda: found.append(train_line()))
    thread.start()
    thread.join()
    assert os.listdir() == [] and strip(found[0].history) == strip(whole[0].history)
    assert same(weights(found[0].model), weights(whole[0].model))


def test_a_finished_run_returns_at_once(whole, capsys):
    result, folder = whole
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    nothing = dict(batches=lambda start: iter([]), validate=lambda model: 1 / 0)
    again = train_line(folder=folder, progress=True, **nothing)
    assert same(weights(again.model), weights(result.model))
    assert again.history == result.history and again.best_step == result.best_step
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert "20/20" in capsys.readouterr().out
    with pytest.raises(ValueError, match="^batches: ended"):
        train_line(batches=nothing["batches"], progress=True)
    train_line(progress=True)
    out = capsys.readouterr().out
    assert "20/20" in out and "loss" in out and "best" in out and "/s" in out


def test_hooks_see_every_step_add_to_the_rows_and_end_a_run(tmp_path, whole):
    seen = []

    def watch(run):
        seen.append((run.step, run.row is not None))
        run.progress["count"] = run.progress.get("count", 0) + 1
        if run.row is not None:
            run.row["norm"] = float(jnp.linalg.norm(run.state.params["W"]))
        run.stop |= run.step == 7

    result = train_line(folder=tmp_path, hooks=[watch])
    assert seen == [(s, s in (2, 4, 5, 6)) for s in range(1, 8)]
    assert [row["step"] for row in result.history if row["norm"] > 0] == [2, 4, 5, 6]
    assert result.history == read_metrics(tmp_path / "metrics.jsonl")
    progress = read_meta(tmp_path / "last.safetensors")["progress"]
    # nothing is lost, nor the time of the step that has no row
    assert (
        step_of(tmp_path) == 7 and progress["seconds"] > result.history[-1]["seconds"]
    )
    starts = []
    batches = lambda start: starts.append(start) or line_batches(start)
    again = train_line(folder=tmp_path, batches=batches, hooks=[watch])
    assert same(weights(again.model), weights(whole[0].model)) and starts == [7]
    assert read_meta(tmp_path / "last.safetensors")["progress"]["count"] == 20


class Network(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(*s, rngs=rngs) for s in ((3, 8), (8, 2))])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.drop(jnp.tanh(self.norm(self.layers[0](x)))))


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 20), momentum=0.9),
    "several": lambda: optax.MultiSteps(optax.lion(1e-2), 2).gradient_transformation(),
    "plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_module_and_any_optimizer_resume_to_the_bit(tmp_path, name):
    """Dropout draws anew in every step, and the statistics of the batch norm are kept
    with the weights that they belong to.
    """
    train = partial(train_line, loss=line_loss, optim=OPTIMIZERS[name](), steps=20)
    drawn = []

    def validate(model):
        assert model.drop.deterministic and model.norm.use_running_average
        drawn.append(np.asarray(model.norm.mean[...]))
        return {"loss": float(len(drawn) != 2)}  # the second is best

    whole = train(Network(), folder=tmp_path / "whole", validate=validate)
    assert not np.array_equal(drawn[0], drawn[1]) and whole.best_step == 10
    np.testing.assert_array_equal(whole.model.norm.mean[...], drawn[1])
    assert not whole.model.drop.deterministic  # as it came
    drawn.clear()
    with pytest.raises(RuntimeError):
        train(
            Network(),
            folder=tmp_path / "torn",
            validate=validate,
            batches=at_step(13, tear),
        )
    train(Network(), folder=tmp_path / "torn", validate=validate)
    equal_runs(tmp_path / "torn", (whole, tmp_path / "whole"))


def test_dropout_draws_from_the_seed_and_the_step():
    masks = []

    def loss(model, batch, key):
        kept = model.drop(jnp.ones(64)) > 0
        jax.debug.callback(lambda m: masks.append(m.tobytes()), kept)
        return jnp.mean(model(batch[0])), {}

    for seed in (0, 0, 1):
        train_line(Network(), loss, seed=seed, validate=None)
        jax.effects_barrier()
    assert len(set(masks)) == 40 and set(masks[:20]) == set(masks[20:40])


@pytest.mark.parametrize(
    "bad",
    [dict(every=0), dict(log_every=-1), dict(steps=5), dict(optim=optax.sgd(0.1))],
)
def test_impossible_arguments_are_named(bad):
    name = "steps" if "optim" in bad else next(iter(bad))
    with pytest.raises(ValueError, match=f"^{name}: "):
        train_line(**bad)


# --- what goes wrong on the way


@pytest.mark.parametrize("at, kept", [(13, 10), (15, 10), (16, 15)])
@pytest.mark.parametrize("stop", [False, True])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoints(
    tmp_path, at, kept, stop, whole
):
    "Also where a hook stops the run at that step, which is none of the log."

    def hook(run):
        run.stop |= stop and run.step == at

    with pytest.raises(FloatingPointError, match=rf"step {at}; lower.*lr = 0.1"):
        options = dict(hooks=[hook], log_every=3 if stop else 1)
        train_line(folder=tmp_path, batches=at_step(at, nan_input), **options)
    assert step_of(tmp_path) == kept
    train_line(folder=tmp_path, log_every=2)  # repaired, it goes on
    last = safetensors.numpy.load_file(tmp_path / "last.safetensors")
    assert same(last, safetensors.numpy.load_file(whole[1] / "last.safetensors"))


@pytest.mark.parametrize("at, validate", [(5, line_error), (15, None)])
def test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint(
    tmp_path, at, validate
):
    "√ at 0: the loss is finite, its gradient is not, and the weights are lost."

    def loss(model, batch, key):
        value, metrics = line_loss(model, batch[:2], key)
        return value + jnp.sqrt(1 - batch[2] + 0 * jnp.sum(model.b[...])), metrics

    def batches(start):
        for s, batch in enumerate(line_batches(start), start + 1):
            yield *batch, np.float32(s == at)

    with pytest.raises(FloatingPointError, match=rf"step {at}\b"):
        train_line(folder=tmp_path, loss=loss, batches=batches, validate=validate)
    for path in tmp_path.glob("*.safetensors"):
        stored = safetensors.numpy.load_file(path)
        assert at > 5 and all(np.isfinite(array).all() for array in stored.values())


def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path):
    losses = iter([0.5, 0.25, math.nan])
    with pytest.raises(FloatingPointError, match=r"validation.*step 15\b"):
        train_line(folder=tmp_path, validate=lambda model: {"loss": next(losses)})
    assert step_of(tmp_path, "best") == 10 == step_of(tmp_path)


@pytest.mark.parametrize("at", [3, 6, 11])
def test_a_full_disk_ends_a_run_in_a_line_and_it_resumes(full_disk, whole, at):
    "A real one, full to the last byte, and a real limit on the size of files."
    folder, fill = full_disk
    undo = []
    with pytest.raises(SystemExit) as e, as_command("tool"):
        try:
            full = at_step(at, lambda batch: undo.append(fill()) or batch)
            train_line(folder=folder, batches=full)
        finally:
            undo[0]()
    reasons = "|".join(os.strerror(n) for n in (errno.ENOSPC, errno.EFBIG))
    assert re.fullmatch(rf"tool: .*({reasons}).*{folder}[^\n]*", e.value.code)
    assert not [*folder.glob(".*")] and (at < 5 or step_of(folder) in (5, 10))
    train_line(folder=folder)
    equal_runs(folder, whole)


def test_a_write_that_fails_at_any_point_leaves_a_run_that_resumes(
    tmp_path, monkeypatch
):
    """Also between the two checkpoints of one step, in a run whose best weights are not
    its last.
    """
    passing = lambda model: {"loss": jnp.abs(model.W[0, 0] - 0.55)}
    result = train_line(folder=tmp_path / "whole", validate=passing)
    whole, replace = (result, tmp_path / "whole"), os.replace
    assert result.best_step == 10
    for n in range(1, 9):
        folder, calls = tmp_path / str(n), []

        def fail(source, target):
            calls.append(target)
            if len(calls) == n:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            try:
                train_line(folder=folder, validate=passing)
            except OSError as e:
                assert str(calls[-1]) in str(e)
            else:
                break  # it writes no more than n - 1 files
        again = train_line(folder=folder, validate=passing)
        assert same(weights(again.model), weights(result.model))
        equal_runs(folder, whole)
    assert n == 8  # the log, two checkpoints at steps 5 and 10, one at 15 and 20


@pytest.mark.parametrize("at", [1, 5, 6, 11, 20])
def test_torn_apart_and_resumed_it_ends_in_the_same_weights_and_rows(
    tmp_path, at, whole
):
    (tmp_path / ".last.safetensors.123.partial").write_bytes(b"of a killed process")
    with pytest.raises(RuntimeError, match="torn"):
        train_line(folder=tmp_path, batches=at_step(at, tear))
    result = train_line(folder=tmp_path)
    assert same(weights(result.model), weights(whole[0].model))
    assert result.best_step == whole[0].best_step
    equal_runs(tmp_path, whole)


@pytest.mark.parametrize("at", [1, 4, 5, 19, 20])
def test_ctrl_c_stops_cleanly_and_costs_nothing(tmp_path, at, whole):
    "Also in the very step of a validation, which must not be lost, and in the last."
    handler = signal.getsignal(signal.SIGINT)
    interrupt = at_step(at, lambda batch: signal.raise_signal(signal.SIGINT) or batch)
    says = rf"after step {at}; run again to go on from {tmp_path}"
    with (
        pytest.raises(KeyboardInterrupt, match=says)
        if at < 20
        else (contextlib.nullcontext())
    ):
        train_line(folder=tmp_path, batches=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler and step_of(tmp_path) == at
    train_line(folder=tmp_path)
    equal_runs(tmp_path, whole)


def test_a_second_ctrl_c_interrupts_at_once():
    def twice(batch):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="^$"):
        train_line(batches=at_step(3, twice))


# --- whose run is it?

MODEL = {"model": {"dim": 3, "beta": 0.5, "kind": "line"}, "data": "noise", "a": (1,)}


@pytest.mark.parametrize(
    "change, says",
    [
        (
            dict(config={**MODEL, "data": "digits"}),
            "data: 'noise' there, 'digits' here",
        ),
        (
            dict(config={**MODEL, "model": {**MODEL["model"], "beta": 2.0}}),
            "model.beta: 0.5 there, 2.0 here",
        ),
        (dict(optim=replace(OPTIM, lr=0.2)), "optim.lr: 0.1 there, 0.2 here"),
        # a configuration cannot hide the seed
        (dict(seed=9, config={**MODEL, "seed": 0}), "seed: 0 there, 9 here"),
    ],
)
def test_another_configuration_names_the_keys_that_differ(tmp_path, change, says):
    stop = lambda run: setattr(run, "stop", run.step == 12)
    train_line(folder=tmp_path, config=MODEL, hooks=[stop])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError) as e:
        train_line(folder=tmp_path, **{"config": MODEL, **change})
    message = f"{tmp_path}: holds a run of another configuration ({says}); choose"
    assert str(e.value).startswith(message)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_a_run_of_an_older_version_goes_on_where_a_new_setting_has_its_default(
    tmp_path, whole
):
    "Before there were `model.slope` and `crop`."
    stop = lambda run: setattr(run, "stop", run.step == 12)
    train_line(folder=tmp_path, config=MODEL, hooks=[stop])
    defaults = {"model": {"beta": 9.0, "slope": (1.0, 2.0)}, "data": "", "crop": 1.0}
    new = {**MODEL, "model": {**MODEL["model"], "slope": (1.0, 2.0)}, "crop": 1.0}
    other = {**new, "model": {**new["model"], "slope": (1.0, 3.0)}}
    options = dict(folder=tmp_path, defaults=defaults)
    with pytest.raises(
        CheckpointError, match=r"slope: \[1.0, 2.0\] there, \[1.0, 3.0\]"
    ):
        train_line(config=other, **options)
    train_line(config=new, **options)
    equal_runs(tmp_path, whole)


def test_another_model_or_a_damaged_file_stops_a_run_before_it_begins(tmp_path):
    with pytest.raises(RuntimeError):
        train_line(folder=tmp_path, batches=at_step(12, tear))
    log = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"W\b.*\(3, 2\).*\(3, 4\)"):
        train_line(Line(4), folder=tmp_path)
    for name in ("last", "best"):
        path = tmp_path / f"{name}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-7] + bytes([content[-7] ^ 16]) + content[-6:])
        with pytest.raises(
            CheckpointError, match=f"{name}.safetensors: contents do not"
        ):
            train_line(folder=tmp_path)
        path.write_bytes(content)
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(CheckpointError, match="best.safetensors: no such"):
        train_line(folder=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


# --- the command line


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
    config, rest = configured()
    assert config == Outer() and rest.times == 1
    words = "--config large --inner.optim.lr 0.01 --inner.depth 3 --shape square"
    config, rest = configured(*words.split(), "--loud", "TRUE", "--times", "4")
    inner = Inner(replace(OptimConfig(), lr=0.01), 3)
    assert config == Outer(inner, "square", True, 9.0) and rest.times == 4
    assert configured("--config", "large", "--scale", "none")[0] == Outer()
    with pytest.raises(SystemExit):
        configured("--config", "large", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--scale FLOAT how large it is (default: 9.0)" in shown
    assert "inner: Inside. " in shown and "{round,square}" in shown


@pytest.mark.parametrize(
    "words, says",
    [
        (["--config", "huge"], "small.*large"),
        (["--shape", "flat"], "--shape.*flat.*round.*square"),
        (["--loud", "2"], "--loud.*bool.*2"),
        (["--inner.depth", "none"], "--inner.depth.*int.*none"),
        (["--hidden", "1"], "--hidden"),
        (["--scale"], "--scale"),
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
        (KeyboardInterrupt(), "tool: stopped"),
        (KeyboardInterrupt("stopped after step 3"), "tool: stopped after step 3"),
    ],
)
def test_a_command_ends_in_a_line(error, message):
    with pytest.raises(SystemExit, match=f"^{message}$"), as_command("tool"):
        raise error
    with pytest.raises(SystemExit, match="^tool: warmup: .*9999"), as_command("tool"):
        configured("--inner.optim.warmup", "9999")
    with pytest.raises(ZeroDivisionError), as_command("tool"):
        1 / 0  # a mistake of ours keeps its traceback


COMMANDS = {
    "vision.train": ("_main", "_demo_main"),
    "graph.detector": ("train", "demo"),
    "graph.classify": ("_main",),
}


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_say_at_once_that_out_is_no_folder(module, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    places = {"": "got ''", "file": "is a file", "file/below": "file is a file"}
    for name in COMMANDS[module]:
        main = getattr(importlib.import_module(f"et_nbdev.{module}"), name)
        for out, says in places.items():
            with pytest.raises(SystemExit):
                main(["--out", out and str(tmp_path / out)])
            said = f"argument --out: expected a folder.*{says}"
            assert re.search(said, capsys.readouterr().err)
    new = tmp_path / "new/one"
    assert out_folder(str(new)) == new and not new.parent.exists()


# --- killing a real process

RUN = textwrap.dedent("""
    # argv: folder, seconds a step, the replacement of a file at which to die half-way
    import os, signal, sys, time
    import numpy as np
    import jax, jax.numpy as jnp
    from flax import nnx
    from et_nbdev.block import EnergyTransformer
    from et_nbdev.dynamics import descend
    from et_nbdev.training.fit import fit
    from et_nbdev.training.loop import OptimConfig

    def run(folder, pause=0.0):
        def batches(start):
            for s in range(start, 120):
                time.sleep(pause)
                yield np.random.default_rng(s).normal(size=(8, 4, 8)).astype(np.float32)
        def loss(block, x, key):
            noisy = x + 0.5 * jax.random.normal(key, x.shape)
            return jnp.mean((descend(block, noisy, 2)[0] - x) ** 2), {}
        def validate(block):
            return {"loss": loss(block, next(batches(119)), jax.random.key(0))[0]}
        block = EnergyTransformer(8, 2, 4, 16, rngs=nnx.Rngs(0))
        optim = OptimConfig(steps=120, warmup=10, lr=5e-3)
        options = dict(validate=validate, every=4, log_every=3, progress=False)
        return fit(block, loss, batches, optim, folder=folder, **options)

    if __name__ == "__main__":
        folder, pause, torn = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
        replace, seen = os.replace, []
        def die_in_the_middle(source, target):
            seen.append(target)
            if len(seen) == torn:
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
        os.replace = die_in_the_middle
        run(folder, pause)
""")


def test_killed_again_and_again_it_ends_in_the_very_weights_of_an_uninterrupted_run(
    tmp_path,
):
    """SIGKILL at a random moment, in the middle of writing a checkpoint, then Ctrl-C;
    resumed after each, and compared bit for bit.
    """
    program, folder, draw = tmp_path / "run.py", tmp_path / "a", random.SystemRandom()
    program.write_text(RUN)
    # every process compiles for itself: a program loaded from a compilation cache may
    # differ from a fresh one in the last bit
    paths = [str(Path(et_nbdev.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(folder, torn=0):
        words = [sys.executable, program, folder, "0.02", str(torn)]
        return subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)

    def stop(process, signum, lines):
        "Send a signal at some moment after the log has so many lines."
        log = folder / "metrics.jsonl"
        while not (log.exists() and log.read_bytes().count(b"\n") >= lines):
            assert process.poll() is None, process.stderr.read()[-2000:]
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signum)
        return process.communicate()[1]

    def sound():
        "Whatever the moment: every file is whole, and the rows are the other run's."
        steps = [step_of(folder, name) for name in ("best", "last")]
        rows = read_metrics(folder / "metrics.jsonl")
        assert all(row in uninterrupted for row in strip(rows))
        return steps[1]

    other = start(tmp_path / "whole")
    assert other.wait() == 0, other.stderr.read()[-2000:]
    uninterrupted = strip(read_metrics(tmp_path / "whole/metrics.jsonl"))
    stop(process := start(folder), signal.SIGKILL, draw.randint(4, 9))
    assert process.returncode == -signal.SIGKILL and 0 < (first := sound()) < 100
    # replacement 1 is the log's; then best and last
    process = start(folder, torn=draw.randint(2, 6))
    assert process.wait() == -signal.SIGKILL and first <= (second := sound()) < 110
    lines = len(read_metrics(folder / "metrics.jsonl")) + 2
    said = stop(process := start(folder), signal.SIGINT, lines)
    assert process.returncode not in (0, -signal.SIGKILL), said
    assert "KeyboardInterrupt: stopped after step" in said and step_of(folder) > second
    assert start(folder).wait() == 0
    for name in ("last.safetensors", "best.safetensors"):
        one, two = (
            safetensors.numpy.load_file(f / name) for f in (folder, tmp_path / "whole")
        )
        assert same(one, two), name
    assert {p.name for p in folder.iterdir()} == {
        p.name for p in (tmp_path / "whole").iterdir()
    }
    # Ctrl-C may add the row it stopped at
    rows = strip(read_metrics(folder / "metrics.jsonl"))
    assert [row for row in rows if row in uninterrupted] == uninterrupted
    assert uninterrupted[-1]["validation_loss"] < uninterrupted[1]["validation_loss"]
