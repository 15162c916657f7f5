"""The loop every task uses, and the promises of nbs/61_training.ipynb: checkpoints that
are whole or refused, and runs that survive an exception, a full disk, Ctrl-C and
SIGKILL with the very weights of an uninterrupted one.
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
import stat
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import et_nbdev
from et_nbdev.training.checkpoint import (
    CheckpointError,
    _atomic_write,
    _load_checkpoint,
    _provenance,
    _read_meta,
    _save_checkpoint,
)
from et_nbdev.training.command import _as_command, _configure, _out_folder
from et_nbdev.training.fit import _interruptible, _MetricsLog, fit, read_metrics
from et_nbdev.training.loop import (
    OptimConfig,
    Run,
    TrainState,
    _in_parts,
    _learning_rate,
    _make_optimizer,
    _make_step,
    _option,
    train_loop,
)

pytestmark = pytest.mark.usefixtures("compiled_once")


def leaves(tree):
    return [
        (jax.tree_util.keystr(path), np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def same(a, b):
    "Bit for bit: names, dtypes, shapes, bytes."
    a, b = leaves(a), leaves(b)
    return [n for n, _ in a] == [n for n, _ in b] and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for (_, x), (_, y) in zip(a, b)
    )


def weights(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def stored(path):
    "The arrays of a checkpoint, without the library's help."
    return safetensors.numpy.load_file(path)


# --- checkpoints
# --------------------------------------------------------------------------------------

TREE = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32),
    "nested": {
        "deep": [
            jnp.arange(6, dtype=jnp.int32).reshape(2, 3),
            (jnp.asarray(np.pi, jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16)),
        ]
    },
    "step": jnp.int32(7),
    "empty": jnp.zeros((0, 3), jnp.float32),
    "flag": jnp.asarray([True, False]),
    # NaN, signed zero and a denormal keep their bits
    "odd": jnp.asarray([np.nan, np.inf, -np.inf, -0.0, 1e-45], jnp.float32),
}
META = {"config": {"lr": 1e-3, "name": "ä → β", "mean": [0.5], "none": None}, "step": 7}


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    _save_checkpoint(tmp_path / "new" / "folder" / "c.safetensors", TREE, META)
    tree, meta = _load_checkpoint(
        str(tmp_path / "new" / "folder" / "c.safetensors"), TREE
    )
    assert same(tree, TREE) and meta == META == _read_meta(
        tmp_path / "new" / "folder" / "c.safetensors"
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    _save_checkpoint(tmp_path / "bare.safetensors", {"a": jnp.ones(2)})
    assert (
        _load_checkpoint(tmp_path / "bare.safetensors", {"a": jnp.ones(2)})[1]
        == {}
        == _read_meta(tmp_path / "bare.safetensors")
    )


@given(
    st.lists(
        st.sampled_from(
            ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "uint32"]
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, dtypes, shapes, seed):
    draw = np.random.default_rng(seed)
    path = tmp_path_factory.getbasetemp() / "any.safetensors"

    def array(dtype, shape):
        dtype = jnp.dtype(dtype)
        raw = draw.integers(
            0,
            2 if dtype == np.dtype(bool) else 256,
            math.prod(shape) * dtype.itemsize,
            np.uint8,
        )
        return raw.view(dtype).reshape(shape)

    tree = [{"x": array(dtype, shape)} for dtype, shape in zip(dtypes, shapes)]
    _save_checkpoint(path, tree)
    assert same(_load_checkpoint(path, tree)[0], tree)


def test_a_part_of_a_checkpoint_and_abstract_arrays(tmp_path):
    _save_checkpoint(tmp_path / "c.safetensors", TREE)
    part = {"nested": TREE["nested"]}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), part)
    assert same(_load_checkpoint(tmp_path / "c.safetensors", abstract)[0], part)


def test_transposed_and_donated_arrays_are_saved_as_what_they_show(tmp_path):
    tree = {
        "t": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "slice": np.arange(10, dtype=np.int32)[::2],
    }
    _save_checkpoint(tmp_path / "c.safetensors", tree)
    assert same(_load_checkpoint(tmp_path / "c.safetensors", tree)[0], tree)


SMALL = {"w": jnp.asarray([1.5, -2.0], jnp.float32), "n": jnp.int32(3)}


def small(tmp_path):
    path = tmp_path / "c.safetensors"
    _save_checkpoint(path, SMALL, {"config": {"lr": 0.125}, "progress": {"best": 0.25}})
    return path, path.read_bytes()


def refused(path, like=SMALL, read=_load_checkpoint):
    with pytest.raises(CheckpointError) as e:
        read(path, like) if read is _load_checkpoint else read(path)
    assert str(path) in str(e.value)
    return str(e.value)


def test_every_truncation_is_refused(tmp_path):
    path, content = small(tmp_path)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refused(path)
        if length < len(content) - 12:
            refused(path, read=_read_meta)
    path.write_bytes(content + b"\0")
    refused(path)


def test_a_flip_anywhere_is_refused(tmp_path):
    """In every byte: of the data, of names, shapes and dtypes, and of the configuration
    and the progress in the header.
    """
    path, content = small(tmp_path)
    for at in range(len(content)):
        for flip in (1 << at % 8, 255):
            path.write_bytes(
                content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            )
            refused(path)
            # it reads no arrays, so it cannot vouch for them
            try:
                assert isinstance(_read_meta(path), dict)
            except CheckpointError as e:
                assert str(path) in str(e)


def test_tensors_that_traded_their_names_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    tree = {"Wq": jnp.zeros((2, 2)), "Wk": jnp.ones((2, 2))}
    _save_checkpoint(path, tree)
    path.write_bytes(
        path.read_bytes()
        .replace(b'"Wq"', b'"W?"')
        .replace(b'"Wk"', b'"Wq"')
        .replace(b'"W?"', b'"Wk"')
    )
    refused(path, tree)


class Trap:
    "A pickle that would leave a trace."

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "text",
        "json",
        "pickle",
        "npz",
        "foreign",
        "bare",
        "folder",
        "missing",
        "no folder",
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, kind):
    path, sprung = tmp_path / "c.safetensors", tmp_path / "sprung"
    if kind == "empty":
        path.write_bytes(b"")
    if kind == "text":
        path.write_text("these are not the weights you are looking for\n" * 20)
    if kind == "json":
        path.write_text(json.dumps({"w": [1.5, -2.0]}))
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Trap(sprung)))
    if kind == "npz":
        with open(path, "wb") as f:
            np.savez(f, w=np.ones(2, np.float32), n=np.int32(3))
    if kind == "foreign":
        safetensors.numpy.save_file(
            {k: np.asarray(v) for k, v in SMALL.items()}, path, {"format": "pt"}
        )
    if kind == "bare":
        safetensors.numpy.save_file({k: np.asarray(v) for k, v in SMALL.items()}, path)
    if kind == "folder":
        path.mkdir()
    if kind == "no folder":
        path = tmp_path / "nowhere" / "c.safetensors"
    message = refused(path)
    refused(path, read=_read_meta)
    assert not sprung.exists()
    if kind in ("missing", "no folder"):
        assert "no such checkpoint" in message


@pytest.mark.parametrize(
    "like, says",
    [
        ({"other": jnp.ones(2)}, ["'other'", "another model"]),
        ({"w": {"deeper": jnp.ones(2)}}, ["'w.deeper'"]),
        ({"w": jnp.ones(3)}, ["w", "(2,)", "(3,)"]),
        ({"w": jnp.ones((2, 1))}, ["w", "(2,)", "(2, 1)"]),
        ({"w": jnp.ones(2, jnp.bfloat16)}, ["w", "float32", "bfloat16"]),
        ({"n": jnp.float32(0)}, ["n", "int32", "float32"]),
    ],
)
def test_a_checkpoint_of_another_model_names_the_tensor(tmp_path, like, says):
    message = refused(small(tmp_path)[0], like)
    assert all(word in message for word in says), message


# --- writing
# --------------------------------------------------------------------------------------


def test_atomic_write_replaces_only_on_success(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    with _atomic_write(path) as temporary:
        temporary.write_text("old")
        assert temporary.parent == path.parent and not path.exists()
    assert path.read_text() == "old"
    for problem in (ValueError, KeyboardInterrupt, OSError):
        with pytest.raises(problem):
            with _atomic_write(path) as temporary:
                temporary.write_text("half of the n")
                raise problem
        assert path.read_text() == "old" and os.listdir(path.parent) == ["file"]
    with pytest.raises(OSError):
        with _atomic_write(path):
            pass  # nothing was written
    with _atomic_write(str(path)) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    link, file = tmp_path / "link", tmp_path / "far" / "file"
    file.write_text("old")
    link.symlink_to(file)
    with _atomic_write(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink() and file.read_text() == "new"
    assert os.listdir(file.parent) == ["file"]


def test_writers_of_one_name_do_not_meet(tmp_path):
    """Threads, or processes of equal number in two containers: each has a temporary
    file of its own, and the last one's is what remains.
    """
    path = tmp_path / "file"
    with _atomic_write(path) as first, _atomic_write(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["file"]
    (tmp_path / "plain").write_text("")
    # readable for whom any new file is
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(os.name != "posix", reason="folders are not flushed elsewhere")
def test_a_new_name_is_flushed_to_the_disk_after_the_file(tmp_path, monkeypatch):
    flush, seen = os.fsync, []

    def watch(fd):
        seen.append(
            (
                stat.S_ISDIR(os.fstat(fd).st_mode),
                os.fstat(fd).st_ino,
                (tmp_path / "file").exists(),
            )
        )
        flush(fd)

    monkeypatch.setattr(os, "fsync", watch)
    with _atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("x")
    assert seen == [
        (False, (tmp_path / "file").stat().st_ino, False),
        (True, tmp_path.stat().st_ino, True),
    ]


def places(tmp_path):
    """Folders that cannot be written, whoever asks; root may write where permissions
    say no, so they alone prove little.
    """
    (tmp_path / "file").write_text("in the way")
    yield tmp_path / "file"
    yield tmp_path / "file" / "below"
    if Path("/proc/self").is_dir():
        yield Path("/proc/self")


@pytest.mark.parametrize("number", range(3))
def test_an_unwritable_folder_is_named(tmp_path, number):
    found = list(places(tmp_path))
    if number >= len(found):
        pytest.skip("no /proc on this machine")
    folder = found[number]
    for write in (
        lambda: _save_checkpoint(folder / "c.safetensors", TREE),
        lambda: _MetricsLog(folder / "metrics.jsonl"),
        lambda: train_line(folder=folder),
    ):
        with pytest.raises(OSError) as e:
            write()
        assert str(found[min(number, 0)] if number < 2 else folder) in str(e.value)


def test_a_folder_without_permission_is_named(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OSError, match=tmp_path.name):
            _save_checkpoint(tmp_path / "c.safetensors", TREE)
    finally:
        tmp_path.chmod(0o700)


@pytest.fixture(params=["tmpfs", "file size limit"])
def full_disk(request, tmp_path):
    "(folder, fill): a folder with an end to it, and the function that brings it about."
    if request.param == "tmpfs":
        folder = tmp_path / "small"
        folder.mkdir()
        mount = (
            shutil.which("mount")
            and os.geteuid() == 0
            and subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder],
                capture_output=True,
            ).returncode
            == 0
        )
        if not mount:
            pytest.skip("a small tmpfs cannot be mounted here")
        yield folder, lambda: None, errno.ENOSPC
        subprocess.run(["umount", folder], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield (
            tmp_path,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard)),
            errno.EFBIG,
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_old_checkpoint_survives_a_full_disk(full_disk):
    folder, fill, code = full_disk
    path = folder / "last.safetensors"
    _save_checkpoint(path, SMALL, {"step": 1})
    fill()
    with pytest.raises(OSError) as e:
        _save_checkpoint(path, {"w": jnp.zeros(100_000)}, {"step": 2})
    assert e.value.errno == code and str(path) in str(e.value)
    tree, meta = _load_checkpoint(path, SMALL)
    assert (
        same(tree, SMALL)
        and meta == {"step": 1}
        and os.listdir(folder) == ["last.safetensors"]
    )


def test_a_disk_that_fails_while_the_file_is_flushed(tmp_path, monkeypatch):
    path, content = small(tmp_path)

    def fail(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        _save_checkpoint(path, {"w": jnp.zeros(10)})
    assert path.read_bytes() == content and os.listdir(tmp_path) == [path.name]


# --- the log
# --------------------------------------------------------------------------------------


def test_the_log_forgets_what_comes_after_its_step(tmp_path):
    log = _MetricsLog(tmp_path / "metrics.jsonl")
    rows = [{"step": s, "loss": 1 / s} for s in (10, 20, 30)]
    for n, row in enumerate(rows):
        log.append(row)
        assert read_metrics(log.path) == rows[: n + 1]  # on the disk at once
    assert read_metrics(_MetricsLog(log.path, 30).path) == rows
    log = _MetricsLog(log.path, 25)
    assert read_metrics(log.path) == rows[:2]
    log.append(rows[2])
    assert read_metrics(log.path) == rows
    assert read_metrics(_MetricsLog(log.path).path) == []  # a new run


@pytest.mark.parametrize(
    "tail", ['{"step": 30, "lo', '{"step"', "{", '{"step": 30, "loss": 0.1']
)
def test_a_last_line_cut_in_half_is_left_out(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.25}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    assert read_metrics(path) == rows
    log = _MetricsLog(path, 20)
    log.append({"step": 30})
    assert read_metrics(path) == [*rows, {"step": 30}] and path.read_text().endswith(
        '{"step": 30}\n'
    )


def test_a_damaged_line_costs_no_other(tmp_path):
    """One that cannot be read, or whose step is out of order; only a last line cut in
    half goes without a word.
    """
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "loss": 1 / s} for s in range(1, 101)]
    lines = [json.dumps(row).encode() for row in rows]
    for at, damaged in (
        (4, lines[4][:3] + b"\xff" + lines[4][4:]),
        (4, b'{"step": 9995}'),
        (4, b'{"step": 7}'),
        (98, b'{"step": 1}'),
        (0, b'{"step": 77}'),
        (0, b""),
    ):
        path.write_bytes(b"\n".join([*lines[:at], damaged, *lines[at + 1 :]]) + b"\n")
        with pytest.warns(UserWarning, match="metrics.jsonl: 1 of its 100 lines"):
            log = _MetricsLog(path, 80)
        # and is sound again
        assert read_metrics(log.path) == [
            row for row in rows[:at] + rows[at + 1 :] if row["step"] <= 80
        ]


# --- the optimizer
# --------------------------------------------------------------------------------------


def schedule(c, s):
    "Linear to the peak, then half a cosine down to the floor."
    if s < c.warmup:
        return c.lr_floor + (c.lr - c.lr_floor) * s / c.warmup
    return (
        c.lr_floor
        + (c.lr - c.lr_floor)
        * (1 + math.cos(math.pi * min(1, (s - c.warmup) / (c.steps - c.warmup))))
        / 2
    )


@pytest.mark.parametrize(
    "c",
    [
        OptimConfig(),
        OptimConfig(steps=10, warmup=0, lr=1.0, lr_floor=0.0),
        OptimConfig(steps=7, warmup=6, lr=2e-3),
        OptimConfig(steps=1, warmup=0),
        OptimConfig(steps=50, warmup=10, lr=0.1, lr_floor=0.1),
    ],
)
def test_the_schedule(c):
    rate = _learning_rate(c)
    for s in {
        0,
        1,
        c.warmup // 2,
        c.warmup,
        (c.warmup + c.steps) // 2,
        c.steps - 1,
        c.steps,
        2 * c.steps,
    }:
        assert float(rate(s)) == pytest.approx(schedule(c, s), rel=1e-5, abs=1e-9), s
    assert float(rate(c.warmup)) == pytest.approx(c.lr)
    assert float(rate(c.steps)) == pytest.approx(c.lr_floor)


def test_the_defaults_are_the_papers():
    c = OptimConfig()
    assert (c.b1, c.b2, c.weight_decay, c.clip, c.lr, c.lr_floor) == (
        0.9,
        0.99,
        0.05,
        1.0,
        5e-4,
        5e-7,
    )


# optax itself is not written for strict promotion
relaxed = lambda: jax.numpy_dtype_promotion("standard")


def adamw(params, grads, c):
    """AdamW on the clipped gradients, in NumPy, from Loshchilov and Hutter (2019),
    algorithm 2.
    """
    m, v = ({k: np.zeros_like(p) for k, p in params.items()} for _ in range(2))
    for t, g in enumerate(grads, 1):
        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        g = {k: x * min(1.0, c.clip / norm) for k, x in g.items()}
        for k, p in params.items():
            m[k] = c.b1 * m[k] + (1 - c.b1) * g[k]
            v[k] = c.b2 * v[k] + (1 - c.b2) * g[k] ** 2
            step = m[k] / (1 - c.b1**t) / (np.sqrt(v[k] / (1 - c.b2**t)) + 1e-8)
            params = {
                **params,
                k: (
                    p
                    - schedule(c, t - 1)
                    * (step + (c.weight_decay * p if p.ndim > 1 else 0))
                ),
            }
        yield params


@pytest.mark.parametrize(
    "c",
    [
        OptimConfig(steps=8, warmup=3, lr=0.1, lr_floor=0.01),
        OptimConfig(
            steps=8, warmup=0, lr=0.3, b1=0.5, b2=0.7, weight_decay=0.4, clip=0.3
        ),
    ],
)
def test_the_optimizer_is_clipped_adamw_with_a_warm_up_cosine(x64, c):
    draw = np.random.default_rng(3)
    new = lambda scale: {
        "W": draw.normal(size=(3, 4)) * scale,
        "xi": draw.normal(size=(2, 3, 2)) * scale,
        "b": draw.normal(size=4) * scale,
        "s": draw.normal(size=()) * scale,
    }
    # clipped and not
    start, grads = new(1.0), [new(scale) for scale in (3, 0.01, 1, 0.02, 10, 0.1, 1, 1)]
    optimizer = _make_optimizer(c)
    params = jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)
    update = jax.jit(relaxed()(optimizer.update))
    for g, expected in zip(grads, adamw(start, grads, c)):
        updates, state = update(jax.tree.map(jnp.asarray, g), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for k in start:
            np.testing.assert_allclose(
                params[k], expected[k], rtol=1e-6, atol=1e-9, err_msg=k
            )


def test_weight_decay_touches_matrices_only():
    params = {"W": jnp.ones((2, 2)), "b": jnp.ones(2), "s": jnp.ones(())}
    optimizer = _make_optimizer(
        OptimConfig(steps=4, warmup=0, lr=0.5, weight_decay=0.2)
    )
    updates, _ = relaxed()(optimizer.update)(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    np.testing.assert_allclose(updates["W"], -0.1, rtol=1e-6)
    assert not updates["b"].any() and not updates["s"].any()


@pytest.mark.parametrize(
    "bad",
    [
        dict(steps=0),
        dict(warmup=-1),
        dict(steps=10, warmup=11),
        dict(steps=10, warmup=10),
        dict(lr=-1.0),
        dict(lr=1e-8),
        dict(lr_floor=-1e-9),
        dict(lr=math.nan),
        dict(lr=math.inf),
        dict(weight_decay=-0.1),
        dict(weight_decay=math.nan),
        dict(b1=1.0),
        dict(b1=-0.1),
        dict(b2=1.5),
        dict(b2=math.nan),
        dict(clip=0.0),
        dict(clip=-1.0),
        dict(clip=math.nan),
    ],
)
def test_an_impossible_schedule_names_the_field(bad):
    name = list(bad)[-1]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        _learning_rate(OptimConfig(**bad))


# --- the loop
# --------------------------------------------------------------------------------------

TRUTH = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], np.float32)


class Line(nnx.Module):
    "y = x W + b"

    def __init__(self):
        self.W, self.b = nnx.Param(jnp.zeros((3, 2))), nnx.Param(jnp.ones(2))

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
    return {
        "loss": jnp.mean((model(jnp.asarray(x)) - y) ** 2),
        "bias": jnp.abs(model.b[...]).max(),
    }


OPTIM = OptimConfig(steps=20, warmup=4, lr=0.1, lr_floor=1e-3, weight_decay=0.0)


def train_line(
    model=None, loss=line_loss, batches=line_batches, optim=OPTIM, **options
):
    options = dict(validate=line_error, every=5, log_every=2, progress=False) | options
    return fit(model or Line(), loss, batches, optim, **options)


def strip(rows, *more):
    "Rows without what the clock decides."
    return [
        {
            k: v
            for k, v in row.items()
            if k not in ("samples_per_second", "input_wait", "seconds", *more)
        }
        for row in rows
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The uninterrupted run: (what fit returned, its folder)."
    folder = tmp_path_factory.mktemp("whole")
    return train_line(folder=folder), folder


def test_it_learns(tmp_path):
    result = train_line(optim=replace(OPTIM, steps=200), every=100, log_every=20)
    assert [row["step"] for row in result.history] == list(range(20, 201, 20))
    np.testing.assert_allclose(result.model.W[...], TRUTH, atol=0.02)
    losses = [row["loss"] for row in result.history]
    assert losses[-1] < 1e-3  # ten seeds: 0.0001, 0.0002 at most


def test_what_it_logs(whole):
    result, folder = whole
    assert result.history == read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in result.history] == [
        2,
        4,
        5,
        6,
        8,
        10,
        12,
        14,
        15,
        16,
        18,
        20,
    ]
    assert [row["step"] for row in result.history if "validation_loss" in row] == [
        5,
        10,
        15,
        20,
    ]
    for row in result.history:
        assert set(row) - {"validation_loss", "validation_bias"} == {
            "step",
            "loss",
            "grad_norm",
            "samples_per_second",
            "input_wait",
            "seconds",
        }
        assert row["samples_per_second"] > 0 and 0 <= row["input_wait"] <= 1
    seconds = [row["seconds"] for row in result.history]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_the_metrics_are_those_of_the_steps(whole):
    "Row by row, against a loop in NumPy over the library's optimizer."
    params, rows = {"W": jnp.zeros((3, 2)), "b": jnp.ones(2)}, {}
    optimizer = _make_optimizer(OPTIM)
    state = optimizer.init(params)
    for s in range(20):
        x, y = line_batch(s)
        noise = 0.01 * jax.random.normal(
            jax.random.fold_in(jax.random.key(0), s), y.shape
        )
        error = np.asarray(x @ params["W"] + params["b"][None] + noise - y)
        grads = {
            "W": jnp.asarray(2 * x.T @ error / error.size),
            "b": jnp.asarray(2 * error.sum(0) / error.size),
        }
        rows[s + 1] = (
            (error**2).mean(),
            math.sqrt(sum((np.asarray(g) ** 2).sum() for g in grads.values())),
        )
        updates, state = relaxed()(optimizer.update)(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for row in whole[0].history:
        np.testing.assert_allclose(
            (row["loss"], row["grad_norm"]), rows[row["step"]], rtol=1e-3
        )
    np.testing.assert_allclose(
        stored(whole[1] / "last.safetensors")["params.W"],
        params["W"],
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_step_is_compiled_once_and_the_callers_model_is_left_alone():
    model, traces = Line(), []
    before = jax.tree.map(np.array, weights(model))
    train_line(model, lambda *args: (traces.append(1), line_loss(*args))[1])
    assert len(traces) == 1
    assert same(weights(model), before)  # still readable, not donated


def test_a_step_donates_its_state_and_draws_a_key_of_its_own():
    keys = lambda model, batch, key: (
        line_loss(model, batch, key)[0],
        {"key": jax.random.key_data(key)},
    )
    graphdef, params = nnx.split(Line(), nnx.Param)
    optimizer, params = _make_optimizer(OPTIM), nnx.to_pure_dict(params)
    step = _make_step(graphdef, keys, optimizer, seed=5)
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    seen = []
    for s in range(3):
        old = state
        state, metrics = step(old, line_batch(s))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert int(state.step) == s + 1 and state.step.dtype == jnp.int32
        seen.append(np.asarray(metrics["key"]).tolist())
    assert seen == [
        jax.random.key_data(jax.random.fold_in(jax.random.key(5), s)).tolist()
        for s in range(3)
    ]


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

    parted = lambda model, batch: _in_parts(loss, model, batch, size)
    expected = loss(model, batch)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-12), parted(model, batch), expected
    )
    slope = lambda f: jax.jit(nnx.value_and_grad(f, has_aux=True))
    found, grads = slope(parted)(model, batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), found, expected)
    np.testing.assert_allclose(
        grads["W"][...], slope(loss)(model, batch)[1]["W"][...], rtol=1e-12
    )
    # twice the loss has twice the gradient, also of several models at once
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    twice = lambda params: 2 * parted(nnx.merge(graphdef, params, rest), batch)[0]
    two = jax.tree.map(lambda a: jnp.stack([a, a]), params)
    for row in jax.vmap(jax.grad(twice))(two)["W"][...]:
        np.testing.assert_allclose(row, 2 * grads["W"][...], rtol=1e-12)


def test_parts_need_less_memory():
    model = nnx.Linear(50, 1000, rngs=nnx.Rngs(0))
    loss = lambda model, x: (jnp.mean(jnp.tanh(model(x)) ** 2), {})
    x = jnp.ones((256, 50))
    graphdef, params = nnx.split(model, nnx.Param)

    def working(size):
        whole = lambda p: _in_parts(loss, nnx.merge(graphdef, p), x, size)[0]
        compiled = jax.jit(jax.grad(whole)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert working(16) < working(256) / 2


def test_the_seed_decides():
    a, b, c = (train_line(seed=seed, validate=None) for seed in (1, 1, 2))
    assert same(weights(a.model), weights(b.model)) and not same(
        weights(a.model), weights(c.model)
    )


@pytest.mark.parametrize("with_folder", [True, False])
def test_the_best_weights_on_validation_are_kept(tmp_path, with_folder):
    """A validation that asks for what training passes on its way: it improves, then
    gets worse.
    """
    folder = tmp_path / "run" if with_folder else None
    measured = []

    def validate(model):
        value = jnp.abs(model.W[0, 0] - 0.5)
        measured.append((float(value), jax.tree.map(np.array, weights(model))))
        return {"loss": value}

    result = train_line(
        optim=replace(OPTIM, steps=60), every=3, validate=validate, folder=folder
    )
    values = [value for value, _ in measured]
    best = int(np.argmin(values))
    assert 0 < best < len(values) - 4 and values[-1] > 3 * values[best]
    assert same(weights(result.model), measured[best][1]) and result.best_step == 3 * (
        best + 1
    )
    if with_folder:
        assert same(
            _load_checkpoint(folder / "best.safetensors", {"params": measured[0][1]})[
                0
            ],
            {"params": measured[best][1]},
        )
        assert same(
            _load_checkpoint(folder / "last.safetensors", {"params": measured[0][1]})[
                0
            ],
            {"params": measured[-1][1]},
        )
        assert _read_meta(folder / "best.safetensors")["step"] == result.best_step


def test_the_best_weights_can_be_changed():
    model = train_line().model
    model.W[...] = model.W[...].at[0].set(0.0)
    assert (model.W[...][0] == 0).all()


def test_of_equals_the_first_is_best():
    assert train_line(validate=lambda model: {"loss": 1.0}).best_step == 5


def test_without_validation_the_last_weights_are_returned(tmp_path):
    result = train_line(validate=None, folder=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["last.safetensors", "metrics.jsonl"]
    assert result.best_step == 20 and not any(
        "validation_loss" in row for row in result.history
    )
    assert same(
        _load_checkpoint(tmp_path / "last.safetensors", {"params": weights(Line())})[0][
            "params"
        ],
        weights(result.model),
    )


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    result = train_line()
    assert os.listdir(tmp_path) == []
    assert same(weights(result.model), weights(whole[0].model)) and strip(
        result.history
    ) == strip(whole[0].history)


@pytest.mark.parametrize("validate", [line_error, None])
def test_a_finished_run_returns_at_once(tmp_path, validate):
    first = train_line(folder=tmp_path, validate=validate)
    files = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}

    def no_batches(start):
        raise AssertionError("asked for a batch")
        yield

    again = train_line(
        folder=tmp_path, batches=no_batches, validate=validate and (lambda model: 1 / 0)
    )
    assert same(weights(again.model), weights(first.model))
    assert again.history == first.history and again.best_step == first.best_step
    assert files == {
        name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)
    }


def test_it_runs_in_another_thread(whole):
    results = []
    thread = threading.Thread(target=lambda: results.append(train_line()))
    thread.start()
    thread.join()
    assert same(weights(results[0].model), weights(whole[0].model))


def test_the_progress_bar(capsys):
    train_line()
    assert capsys.readouterr().out == ""
    train_line(progress=True)
    out = capsys.readouterr().out
    assert "20/20" in out and "loss" in out and "best" in out and "/s" in out


def test_hooks_see_every_step_add_to_the_rows_and_end_a_run(tmp_path, whole):
    seen = []

    def watch(run):
        seen.append((run.step, run.row is not None))
        if run.row is not None:
            run.row["norm"] = float(jnp.linalg.norm(run.state.params["W"]))
        run.stop |= run.step == 7

    result = train_line(folder=tmp_path, hooks=[watch])
    assert seen == [(s, s in (2, 4, 5, 6)) for s in range(1, 8)]
    assert [row["step"] for row in result.history] == [2, 4, 5, 6]
    assert result.history == read_metrics(tmp_path / "metrics.jsonl")
    assert all(row["norm"] > 0 for row in result.history) and result.best_step == 5
    kept = _read_meta(tmp_path / "last.safetensors")
    assert kept["step"] == 7  # nothing is lost
    # nor the time of the step that has no row
    assert kept["progress"]["seconds"] > result.history[-1]["seconds"]
    assert same(weights(train_line(folder=tmp_path).model), weights(whole[0].model))


def test_what_a_hook_keeps_in_the_progress_comes_back_with_the_state(tmp_path):
    def count(run):
        run.progress["count"] = run.progress.get("count", 0) + 1

    def tear(batch):
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        train_line(folder=tmp_path, hooks=[count], batches=at_step(12, tear))
    train_line(folder=tmp_path, hooks=[count])
    assert _read_meta(tmp_path / "last.safetensors")["progress"]["count"] == 20


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


@pytest.mark.parametrize("bad", [dict(every=0), dict(every=-1), dict(log_every=0)])
def test_impossible_intervals_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        train_line(**bad)


def test_batches_that_end_are_named():
    def three(start):
        yield from (line_batch(s) for s in range(3))

    with pytest.raises(ValueError, match="^batches: ended"):
        train_line(batches=three)


# --- what goes wrong on the way
# --------------------------------------------------------------------------------------


def at_step(n, action):
    "Batches that call action(batch) for the batch of step n."

    def batches(start):
        for s, batch in enumerate(line_batches(start), start + 1):
            yield action(batch) if s == n else batch

    return batches


def nan_input(batch):
    return batch[0] * np.float32(np.nan), batch[1]


@pytest.mark.parametrize("at, kept", [(13, 10), (15, 10), (16, 15)])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoints(
    tmp_path, at, kept, whole
):
    with pytest.raises(FloatingPointError, match=rf"step {at}\b"):
        train_line(folder=tmp_path, batches=at_step(at, nan_input), log_every=1)
    state, meta = _load_checkpoint(
        tmp_path / "last.safetensors", {"params": weights(Line())}
    )
    assert meta["step"] == kept and all(
        np.isfinite(leaf).all() for _, leaf in leaves(state)
    )
    _load_checkpoint(tmp_path / "best.safetensors", {"params": weights(Line())})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(
        range(1, at)
    )
    resumed = train_line(folder=tmp_path)  # repaired, it goes on
    assert same(weights(resumed.model), weights(whole[0].model))


def test_a_hook_that_stops_a_run_saves_no_loss_that_is_not_finite(tmp_path):
    def stop(run):
        run.stop |= run.step == 13  # no step of the log

    with pytest.raises(FloatingPointError, match="step 13"):
        train_line(folder=tmp_path, batches=at_step(13, nan_input), hooks=[stop])
    assert _read_meta(tmp_path / "last.safetensors")["step"] == 10


@pytest.mark.parametrize(
    "at, validate", [(5, line_error), (15, line_error), (15, None)]
)
def test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint(
    tmp_path, at, validate
):
    """√ at 0: the loss is finite, its gradient is not, and the weights of that very
    step are lost.
    """

    def loss(model, batch, key):
        value, metrics = line_loss(model, batch[:2], key)
        return value + jnp.sqrt(1 - batch[2] + 0 * jnp.sum(model.b[...])), metrics

    def batches(start):
        for s, batch in enumerate(line_batches(start), start + 1):
            yield *batch, np.float32(s == at)

    with pytest.raises(FloatingPointError, match=rf"step {at}\b"):
        train_line(folder=tmp_path, loss=loss, batches=batches, validate=validate)
    for name in ("last", "best"):
        path = tmp_path / f"{name}.safetensors"
        assert path.exists() == (at > 5 and (name == "last" or validate is not None))
        if path.exists():
            assert all(np.isfinite(array).all() for array in stored(path).values())


@pytest.mark.parametrize("at", [1, 3])
def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path, at):
    calls = []

    def validate(model):
        calls.append(1)
        return {"loss": math.nan if len(calls) == at else 1 / len(calls)}

    with pytest.raises(FloatingPointError, match=rf"validation.*step {5 * at}\b"):
        train_line(folder=tmp_path, validate=validate)
    assert (tmp_path / "best.safetensors").exists() == (at > 1)
    if at > 1:
        assert (
            _read_meta(tmp_path / "best.safetensors")["step"]
            == 10
            == _read_meta(tmp_path / "last.safetensors")["step"]
        )


def test_a_full_disk_leaves_a_run_that_resumes(tmp_path, monkeypatch, whole):
    """The fifth file cannot be written; with space again, the run ends as if nothing
    had been.
    """
    fsync, calls = os.fsync, []

    def fail(fd):
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            calls.append(fd)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as e:
        train_line(folder=tmp_path)
    assert e.value.errno == errno.ENOSPC and str(tmp_path) in str(e.value)
    assert _read_meta(tmp_path / "last.safetensors")["step"] == 5
    assert same(weights(train_line(folder=tmp_path).model), weights(whole[0].model))


@pytest.mark.parametrize("at", [6, 11])
def test_a_disk_that_fills_up_during_training_ends_it_in_a_line_and_a_run_that_resumes(
    full_disk, whole, at
):
    "A real one, full to the last byte, and a real limit on the size of files."
    folder, _, code = full_disk
    limits, filler = resource.getrlimit(resource.RLIMIT_FSIZE), folder / "filler"

    def fill(batch):
        if code == errno.EFBIG:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        else:
            with contextlib.suppress(OSError), open(filler, "wb", 0) as f:
                while True:
                    f.write(bytes(512))
        return batch

    with pytest.raises(SystemExit) as e, _as_command("tool"):
        try:
            train_line(folder=folder, batches=at_step(at, fill))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        os.strerror(code) in e.value.code
        and str(folder) in e.value.code
        and "\n" not in e.value.code
    )
    filler.unlink(missing_ok=True)
    assert _read_meta(folder / "last.safetensors")["step"] in (5, 10) and sorted(
        os.listdir(folder)
    ) == ["best.safetensors", "last.safetensors", "metrics.jsonl"]
    _load_checkpoint(folder / "best.safetensors", {"params": weights(Line())})
    assert same(weights(train_line(folder=folder).model), weights(whole[0].model))
    equal_runs(folder, whole)


def test_a_write_that_fails_at_any_point_leaves_a_run_that_resumes(
    tmp_path, monkeypatch
):
    """Also between the two checkpoints of one step, in a run whose best weights are not
    its last.
    """
    passing = lambda model: {"loss": jnp.abs(model.W[0, 0] - 0.55)}
    whole = train_line(folder=tmp_path / "whole", validate=passing)
    assert whole.best_step == 10
    replace = os.replace
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
        for name in ("last", "best"):
            if (folder / f"{name}.safetensors").exists():
                _load_checkpoint(
                    folder / f"{name}.safetensors", {"params": weights(Line())}
                )
        again = train_line(folder=folder, validate=passing)
        assert (
            same(weights(again.model), weights(whole.model)) and again.best_step == 10
        )
        for name in ("last.safetensors", "best.safetensors"):
            assert same(stored(folder / name), stored(tmp_path / "whole" / name))
    assert n == 8  # the log, two checkpoints at steps 5 and 10, one at 15 and 20


def equal_runs(folder, whole):
    for name in ("last.safetensors", "best.safetensors"):
        assert same(stored(folder / name), stored(whole[1] / name)), name
    assert strip(read_metrics(folder / "metrics.jsonl")) == strip(whole[0].history)


@pytest.mark.parametrize("at", [1, 3, 5, 6, 11, 20])
def test_torn_apart_and_resumed_it_ends_in_the_same_weights_and_rows(
    tmp_path, at, whole
):
    def tear(batch):
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        train_line(folder=tmp_path, batches=at_step(at, tear))
    result = train_line(folder=tmp_path)
    assert (
        same(weights(result.model), weights(whole[0].model))
        and result.best_step == whole[0].best_step
    )
    assert result.history == read_metrics(tmp_path / "metrics.jsonl")
    equal_runs(tmp_path, whole)


def test_a_resumed_run_asks_for_the_batches_it_lacks(tmp_path):
    def tear(batch):
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError):
        train_line(folder=tmp_path, batches=at_step(12, tear))
    starts = []

    def batches(start):
        starts.append(start)
        return line_batches(start)

    train_line(folder=tmp_path, batches=batches)
    assert starts == [10]


@pytest.mark.parametrize("at", [1, 4, 5, 6, 10, 19, 20])
@pytest.mark.parametrize("with_folder", [True, False])
def test_ctrl_c_stops_cleanly_and_costs_nothing(tmp_path, at, with_folder, whole):
    """Also in the very step of a validation, which must not be lost, and in the last
    one.
    """
    folder = tmp_path if with_folder else None
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(batch):
        signal.raise_signal(signal.SIGINT)
        return batch

    if at < 20:
        with pytest.raises(KeyboardInterrupt, match=rf"step {at}\b") as e:
            train_line(folder=folder, batches=at_step(at, interrupt))
        assert signal.getsignal(signal.SIGINT) is handler
        if not with_folder:
            return
        assert (
            str(tmp_path) in str(e.value)
            and _read_meta(tmp_path / "last.safetensors")["step"] == at
        )
        result = train_line(folder=folder)
    else:
        result = train_line(folder=folder, batches=at_step(at, interrupt))
    assert (
        same(weights(result.model), weights(whole[0].model))
        and result.best_step == whole[0].best_step
    )
    if with_folder:
        rows = [
            row
            for row in read_metrics(tmp_path / "metrics.jsonl")
            if row["step"] in {r["step"] for r in whole[0].history}
        ]
        assert strip(rows) == strip(whole[0].history)
        assert same(
            stored(tmp_path / "last.safetensors"), stored(whole[1] / "last.safetensors")
        )


def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt):
        with _interruptible() as asked:
            signal.raise_signal(signal.SIGINT)
            assert asked.is_set()
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")


# --- whose run is it?
# --------------------------------------------------------------------------------------

MODEL = {"model": {"dim": 3, "beta": 0.5, "kind": "line"}, "data": "noise"}


@pytest.mark.parametrize(
    "change, names, keeps_quiet",
    [
        (
            dict(config={**MODEL, "data": "digits"}),
            ["data", "'noise'", "'digits'"],
            ["kind", "warmup"],
        ),
        (
            dict(config={**MODEL, "model": {**MODEL["model"], "beta": 2.0}}),
            ["beta", "0.5", "2.0"],
            ["kind", "dim", "noise"],
        ),
        (
            dict(optim=replace(OPTIM, lr=0.2)),
            ["lr", "0.1", "0.2"],
            ["warmup", "weight_decay", "kind"],
        ),
        (dict(seed=9), ["seed", "0", "9"], ["warmup", "kind"]),
        (dict(config=None), ["data", "'noise'"], ["warmup"]),
    ],
)
def test_another_configuration_names_the_keys_that_differ(
    tmp_path, change, names, keeps_quiet
):
    train_line(folder=tmp_path, config=MODEL)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with pytest.raises(CheckpointError) as e:
        train_line(folder=tmp_path, **{"config": MODEL, **change})
    message = str(e.value)
    assert str(tmp_path) in message and "another folder" in message
    assert all(word in message for word in names) and not any(
        word in message for word in keeps_quiet
    ), message
    assert before == {
        name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)
    }


def test_a_configuration_cannot_hide_the_optimizer_or_the_seed(tmp_path):
    hidden = {"optim": asdict(OPTIM), "seed": 0}
    train_line(folder=tmp_path, config=hidden)
    with pytest.raises(CheckpointError, match="lr: 0.1 there, 0.2 here"):
        train_line(folder=tmp_path, config=hidden, optim=replace(OPTIM, lr=0.2))
    with pytest.raises(CheckpointError, match="seed: 0 there, 9 here"):
        train_line(folder=tmp_path, config=hidden, seed=9)


def test_a_run_of_an_older_version_goes_on_where_a_new_setting_has_its_default(
    tmp_path, whole
):
    """Before there were `model.slope` and `crop`; also one whose settings are no part
    of the defaults.
    """

    def stop(run):
        run.stop |= run.step == 12

    train_line(folder=tmp_path, config=MODEL, hooks=[stop])
    defaults = {"model": {"beta": 9.0, "slope": (1.0, 2.0)}, "data": "", "crop": 1.0}
    new = {**MODEL, "model": {**MODEL["model"], "slope": (1.0, 2.0)}, "crop": 1.0}
    other = {**new, "model": {**new["model"], "slope": (1.0, 3.0)}}
    options = dict(folder=tmp_path, defaults=defaults)
    with pytest.raises(
        CheckpointError, match=r"slope: \[1.0, 2.0\] there, \[1.0, 3.0\]"
    ):
        train_line(config=other, **options)
    with pytest.raises(CheckpointError, match=r"kind: 'line' there, 'absent' here"):
        gone = {k: v for k, v in new["model"].items() if k != "kind"}
        train_line(config={**new, "model": gone}, **options)
    result = train_line(config=new, **options)
    assert same(weights(result.model), weights(whole[0].model))
    assert _read_meta(tmp_path / "last.safetensors")["config"]["crop"] == 1.0


class Wider(nnx.Module):
    def __init__(self):
        self.W, self.b = nnx.Param(jnp.zeros((3, 4))), nnx.Param(jnp.ones(4))


def test_another_shape_is_told_by_its_configuration_first(tmp_path):
    train_line(folder=tmp_path, config={"dim": 2})
    with pytest.raises(CheckpointError, match="dim: 2 there, 4 here"):
        train_line(Wider(), folder=tmp_path, config={"dim": 4})
    with pytest.raises(CheckpointError, match=r"W\b.*\(3, 2\).*\(3, 4\)"):
        train_line(Wider(), folder=tmp_path, config={"dim": 2})


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "text"])
def test_a_damaged_checkpoint_stops_a_run_before_it_begins(tmp_path, damage):
    train_line(folder=tmp_path)
    path, log = tmp_path / "last.safetensors", (tmp_path / "metrics.jsonl").read_bytes()
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-7])
    if damage == "flipped":
        path.write_bytes(content[:-7] + bytes([content[-7] ^ 16]) + content[-6:])
    if damage == "foreign":
        safetensors.numpy.save_file(stored(path), path)
    if damage == "text":
        path.write_text("oops")
    with pytest.raises(CheckpointError) as e:
        train_line(folder=tmp_path)
    assert (
        str(path) in str(e.value) and (tmp_path / "metrics.jsonl").read_bytes() == log
    )


def test_best_weights_that_are_gone_or_damaged_stop_a_run_before_it_begins(tmp_path):
    def tear(batch):
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError):
        train_line(folder=tmp_path, batches=at_step(12, tear))
    best = tmp_path / "best.safetensors"
    content = best.read_bytes()
    best.write_bytes(content[:-7] + bytes([content[-7] ^ 16]) + content[-6:])
    with pytest.raises(
        CheckpointError, match="best.safetensors: contents do not match"
    ):
        train_line(folder=tmp_path, batches=at_step(11, tear))
    best.unlink()
    with pytest.raises(CheckpointError, match="best.safetensors"):
        train_line(folder=tmp_path, batches=at_step(11, tear))


def test_what_killed_processes_left_is_swept_away(tmp_path):
    (tmp_path / ".last.safetensors.123.partial").write_bytes(b"half of the w")
    train_line(folder=tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "best.safetensors",
        "last.safetensors",
        "metrics.jsonl",
    ]


class Noisy(Line):
    def __init__(self):
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def test_a_model_with_other_state_is_refused():
    with pytest.raises(ValueError, match="^model: .*dropout"):
        train_line(Noisy())


def test_tuples_in_a_configuration_survive_json(tmp_path):
    config = {"mean": (0.1, 0.2), "nested": {"scale": (1, 2)}}
    train_line(folder=tmp_path, config=config)
    train_line(folder=tmp_path, config=config)


def test_provenance():
    p = _provenance()
    json.dumps(p)
    assert p["jax"] == jax.__version__ and p["cores"] == os.cpu_count() and p["commit"]
    assert {"device", "machine", "python", "date"} <= set(p)


# --- the command line
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    "Inside."

    optim: OptimConfig = OptimConfig()
    depth: int = _option(2, "how deep it is")


@dataclass(frozen=True)
class Outer:
    "Outside."

    inner: Inner = Inner()
    shape: Literal["round", "square"] = _option("round", "what it looks like")
    loud: bool = _option(False, "whether it is heard")
    scale: float | None = _option(None, "how large it is")
    hidden: tuple = _option((1,), "no option of the command line")


def configured(*words):
    parser = argparse.ArgumentParser("outer")
    parser.add_argument("--times", type=int, default=1)
    return _configure(
        parser,
        {"small": Outer(), "large": Outer(scale=9.0)},
        "small",
        words,
        omit=("hidden",),
    )


def test_every_field_is_an_option_however_deep():
    config, rest = configured()
    assert config == Outer() and rest.times == 1
    config, rest = configured(
        "--config",
        "large",
        "--inner.optim.lr",
        "0.01",
        "--inner.depth",
        "3",
        "--shape",
        "square",
        "--loud",
        "TRUE",
        "--times",
        "4",
    )
    assert (
        config == Outer(Inner(replace(OptimConfig(), lr=0.01), 3), "square", True, 9.0)
        and rest.times == 4
    )
    assert configured("--config", "large", "--scale", "none")[0] == Outer()


@pytest.mark.parametrize(
    "words, says",
    [
        (["--config", "huge"], "small.*large"),
        (["--shape", "flat"], "round.*square"),
        (["--loud", "2"], "--loud.*bool"),
        (["--inner.depth", "none"], "--inner.depth.*int"),
        (["--hidden", "1"], "--hidden"),
        (["--scale"], "--scale"),
    ],
)
def test_words_that_cannot_be_read_are_named(words, says, capsys):
    with pytest.raises(SystemExit):
        configured(*words)
    assert re.search(says, capsys.readouterr().err.replace("\n", " "))


def test_what_makes_no_sense_is_the_configurations_to_say():
    with pytest.raises(ValueError, match="warmup"):
        configured("--inner.optim.warmup", "9999")


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
    with pytest.raises(SystemExit) as e:
        with _as_command("tool"):
            raise error
    assert e.value.code == message
    with pytest.raises(ZeroDivisionError):
        with _as_command("tool"):
            1 / 0  # a mistake of ours keeps its traceback


@pytest.mark.parametrize(
    "module, main",
    [
        ("vision.train", "_main"),
        ("vision.train", "_demo_main"),
        ("graph._anomaly_command", "_main"),
        ("graph._anomaly_demo", "_demo_main"),
        ("graph.classify", "_main"),
    ],
)
def test_commands_say_at_once_that_out_is_no_folder(module, main, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    for out, says in (
        ("", "got ''"),
        (str(tmp_path / "file"), "is a file"),
        (str(tmp_path / "file/below"), "file is a file"),
    ):
        with pytest.raises(SystemExit) as e:
            getattr(importlib.import_module(f"et_nbdev.{module}"), main)(["--out", out])
        assert e.value.code == 2 and re.search(
            f"argument --out: expected a folder.*{says}", capsys.readouterr().err
        )
    assert (
        _out_folder(str(tmp_path / "new/one")) == tmp_path / "new/one"
        and not (tmp_path / "new").exists()
        and _out_folder(".") == Path()
    )


# --- killing a real process
# --------------------------------------------------------------------------------------

RUN = textwrap.dedent("""
    # Train a tiny Energy Transformer on digits. argv: folder, pause a step, and
    # what to do at the n-th replacement of a file.
    import os, signal, sys, time
    from dataclasses import asdict
    import jax
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    from flax import nnx
    from et_nbdev.training.fit import fit
    from et_nbdev.training.loop import OptimConfig
    from et_nbdev.vision.data import batches
    from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer
    from et_nbdev.vision.train import TrainConfig, evaluate, _loss_for, _prepare

    def config():
        model = ImageConfig(
            image_size=8, patch_size=4, dim=8, num_heads=2, head_dim=4,
            num_memories=16, steps=2, step_size=0.2,
        )
        optim = OptimConfig(steps=120, warmup=10, lr=5e-3, lr_floor=1e-5)
        return _prepare(TrainConfig(
            model, optim, data="digits",
            batch_size=16, flip=0.5, validate_on=20, every=4,
        ))

    def run(folder, pause=0.0):
        c, images = config()
        def slowly(start):
            for batch in batches(images["train"], c.batch_size, seed=c.seed, start=start):
                time.sleep(pause)
                yield batch
        def validate(m):
            held_out = images["validation"]
            errors = evaluate(m, held_out, c.num_occluded, limit=c.validate_on)
            return {"loss": errors.mean()}
        return fit(
            ImageEnergyTransformer(c.model, rngs=nnx.Rngs(c.seed)), _loss_for(c),
            slowly, c.optim, seed=c.seed, folder=folder, validate=validate,
            every=c.every, log_every=3, config=asdict(c), progress=False,
        )

    if __name__ == "__main__":
        folder, pause, torn = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
        replace, seen = os.replace, []
        def die_in_the_middle(source, target):
            seen.append(target)
            if len(seen) == torn:
                os.truncate(source, os.path.getsize(source) // 2)       # as far as the disk had got
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
        os.replace = die_in_the_middle
        run(folder, pause)
""")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """(path of the script, its module, the uninterrupted run's folder, a function that
    starts it in a process of its own)
    """
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    base = tmp_path_factory.mktemp("killed")
    path = base / "run.py"
    path.write_text(RUN)
    module = {"__name__": "run"}
    exec(compile(RUN, str(path), "exec"), module)
    # every process compiles for itself: a program loaded from a compilation cache may
    # differ from a fresh one in the last bit
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(et_nbdev.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }

    def start(folder, torn=0):
        return subprocess.Popen(
            [sys.executable, str(path), str(folder), "0.03", str(torn)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    whole = start(base / "whole")
    _, err = whole.communicate(timeout=120)
    assert whole.returncode == 0, err[-2000:]
    # a finished run: its weights and its log, read back
    return module, base / "whole", module["run"](base / "whole"), start


def wait_for_lines(process, log, n, limit=120):
    "Until the log has n lines."
    until = time.monotonic() + limit
    while not (log.exists() and log.read_bytes().count(b"\n") >= n):
        if process.poll() is not None:
            pytest.fail(
                f"ended with {process.returncode}: {process.stderr.read()[-2000:]}"
            )
        if time.monotonic() > until:
            process.kill()
            pytest.fail(f"{log.name} has not reached {n} lines in {limit} s")
        time.sleep(0.002)


def test_killed_again_and_again_it_ends_in_the_very_weights_of_an_uninterrupted_run(
    tmp_path, script
):
    """SIGKILL at random moments, in the middle of writing a checkpoint, then Ctrl-C;
    resumed after each, and compared bit for bit.
    """
    module, whole, uninterrupted, start = script
    log = tmp_path / "metrics.jsonl"
    last = tmp_path / "last.safetensors"
    best = tmp_path / "best.safetensors"
    like = {"params": weights(uninterrupted.model)}
    steps = lambda: _read_meta(last)["step"]

    def sound():
        """Whatever the moment: every checkpoint that is there is whole, and the log's
        rows are the uninterrupted run's.
        """
        for path in (last, best):
            if path.exists():
                _load_checkpoint(path, like)
        expected = {row["step"]: row for row in strip(uninterrupted.history)}
        for row in strip(read_metrics(log)):
            assert row == expected[row["step"]]

    # killed at a random moment
    process, delay = start(tmp_path), random.SystemRandom().uniform(0, 0.3)
    wait_for_lines(process, log, random.SystemRandom().randint(4, 9))
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    sound()
    first = steps()
    assert 0 < first < 60

    # killed while a checkpoint is being written: replacement 1 is the log's; then best
    # and last take turns
    process = start(tmp_path, torn=random.SystemRandom().randint(3, 8))
    assert process.wait(120) == -signal.SIGKILL, process.stderr.read()[-2000:]
    sound()
    second = steps()
    assert first <= second < 100

    # Ctrl-C
    process = start(tmp_path)
    wait_for_lines(process, log, len(read_metrics(log)) + 2)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode not in (0, -signal.SIGKILL)
        and "KeyboardInterrupt: stopped after step" in err
    ), err[-2000:]
    sound_steps = {row["step"] for row in uninterrupted.history}
    assert second < steps() < 120

    result = module["run"](tmp_path)  # to the end, in this process
    for name in ("last.safetensors", "best.safetensors"):
        assert same(stored(tmp_path / name), stored(whole / name)), name
    assert (
        same(weights(result.model), weights(uninterrupted.model))
        and result.best_step == uninterrupted.best_step
    )
    # and no torn file
    assert sorted(os.listdir(tmp_path)) == [
        "best.safetensors",
        "last.safetensors",
        "metrics.jsonl",
    ]
    # Ctrl-C may add the row it stopped at
    rows = [row for row in read_metrics(log) if row["step"] in sound_steps]
    assert strip(rows) == strip(uninterrupted.history)
    # it did learn
    assert (
        uninterrupted.history[-1]["validation_loss"]
        < uninterrupted.history[1]["validation_loss"]
    )
