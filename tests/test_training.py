"""Training: checkpoints that are whole or refused, and runs that survive an exception, a
full disk, Ctrl-C and SIGKILL with the very weights of an uninterrupted one.
"""

import contextlib
import errno
import math
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from et_nbdev.commands import as_command
from et_nbdev.training import (
    CheckpointError,
    OptimConfig,
    Run,
    atomic_write,
    fit,
    in_parts,
    load_checkpoint,
    make_optimizer,
    read_meta,
    read_metrics,
    save_checkpoint,
    train_loop,
)

pytestmark = pytest.mark.usefixtures("compiled_once")
load_file = safetensors.numpy.load_file


def same(a, b):
    "Bit for bit: names, dtypes, shapes, bytes."
    flat = lambda tree: [
        (jax.tree_util.keystr(path), x.dtype, x.shape, np.asarray(x).tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return flat(a) == flat(b)


# --- checkpoints

SMALL = {"w": jnp.asarray([1.5, -2.0], jnp.float32), "n": jnp.int32(3)}
META = {"config": {"lr": 1e-3, "name": "ä → β", "none": None}, "step": 7}
TYPES = "float32", "bfloat16", "float16", "int32", "uint8", "bool", "uint32"


@given(
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=20)
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
    flip = lambda n, by: content[:n] + bytes([content[n] ^ by]) + content[n + 1 :]
    flipped = [flip(n, by) for n in range(len(content)) for by in (1 << n % 8, 255)]
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
    foreign = safetensors.numpy.save
    for content in (
        *(b"", b"not weights" * 20, b'{"w": [1.5]}', pickle.dumps(Trap(sprung))),
        *(foreign(arrays), foreign(arrays, {"format": "pt"})),
    ):
        path.write_bytes(content)
        refused(path)
        with pytest.raises(CheckpointError):
            read_meta(path)
    assert not sprung.exists()
    for nowhere in (tmp_path, tmp_path / "nowhere/none"):
        assert "no such checkpoint" in refused(nowhere)


@pytest.mark.parametrize(
    "like, says",
    [
        ({"other": jnp.ones(2)}, "'other', so it belongs to another model"),
        ({"w": jnp.ones(3)}, r"w is float32\(2,\), this model needs float32\(3,\)"),
        ({"n": jnp.float32(0)}, r"n is int32\(\), this model needs float32"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_tensor(small, like, says):
    assert re.search(says, refused(small, like))


def test_atomic_write_replaces_only_on_success(tmp_path, monkeypatch):
    "Also through a link, and when two write at once. The name is flushed last."
    path, link, flush, seen = tmp_path / "a/file", tmp_path / "link", os.fsync, []
    link.symlink_to(path)

    def watch(fd):
        seen.append((os.fstat(fd).st_ino, path.exists()))
        flush(fd)

    with monkeypatch.context() as patch, atomic_write(str(path)) as temporary:
        patch.setattr(os, "fsync", watch)
        temporary.write_text("old")
        assert temporary.parent == path.parent and not path.exists()
    if os.name == "posix":  # folders are not flushed elsewhere
        made = path.stat().st_ino, path.parent.stat().st_ino
        assert seen == [(made[0], False), (made[1], True)]
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


# --- the optimizer


def schedule(c, s):
    "Linear to the peak, then half a cosine down to the floor."
    if s < c.warmup:
        return c.lr_floor + (c.lr - c.lr_floor) * s / c.warmup
    done = min(1, (s - c.warmup) / (c.steps - c.warmup))
    return c.lr_floor + (c.lr - c.lr_floor) * (1 + math.cos(math.pi * done)) / 2


def test_the_optimizer_has_the_numbers_of_its_configuration(x64):
    "What AdamW does with them is optax's; only matrices decay."
    c = OptimConfig(8, 3, 0.1, 0.01, weight_decay=0.4, b1=0.5, b2=0.7, clip=0.3)
    draw = np.random.default_rng(3).normal
    new = lambda scale: {n: scale * draw(size=(3, 4)[:n]) for n in range(3)}
    start, grads = new(1.0), [new(scale) for scale in (3, 0.01, 1, 0.02, 10, 0.1, 1, 1)]
    wanted = optax.chain(
        optax.clip_by_global_norm(0.3),
        optax.scale_by_adam(0.5, 0.7),
        optax.add_decayed_weights(0.4, mask={0: False, 1: False, 2: True}),
        optax.scale_by_schedule(lambda s: -schedule(c, s)),
    )

    def path(optimizer):
        params, state = start, optimizer.init(start)
        for g in grads:
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(g, state, params)
            params = jax.tree.map(jnp.add, params, updates)
            yield params

    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
    jax.tree.map(close, [*path(make_optimizer(c))], [*path(wanted)])


# --- the loop


@pytest.mark.parametrize("at", [None, 4])
def test_the_loop_calls_hooks_in_order_and_closes_its_batches(at):
    "Whatever the step is, and also after an error."
    events, run = [], Run(100, steps=5, step=3)
    add = lambda state, n: (state + n, {"n": n})
    hooks = [lambda run: events.append(run.metrics), lambda run: 1 / (run.step != at)]

    def numbers(start):
        try:
            yield from range(start, 9)
        finally:
            events.append("closed")

    with pytest.raises(ZeroDivisionError) if at else contextlib.nullcontext():
        train_loop(run, add, numbers, hooks)
    assert events == [{"n": n} for n in (3, 4)[: 1 if at else 2]] + ["closed"]
    assert run.state == (103 if at else 107) and run.due(7) == (at is None)


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
    (value, grads), (expected, wanted) = slope(parted), slope(loss)
    close((value, grads["W"][...]), (expected, wanted["W"][...]))
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


# --- fit: a small network with all kinds of state

TRUTH = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], np.float32)
OPTIM = OptimConfig(steps=20, warmup=4, lr=0.1, lr_floor=1e-3, weight_decay=0.0)


class Network(nnx.Module):
    def __init__(self, width=8):
        rngs = nnx.Rngs(0)
        sizes = (3, width), (width, 2)
        self.layers = nnx.List([nnx.Linear(*s, rngs=rngs) for s in sizes])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.drop(jnp.tanh(self.norm(self.layers[0](x)))))


class Line(nnx.Module):
    def __init__(self):
        self.W, self.b = nnx.Param(jnp.zeros((3, 2))), nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return x @ self.W[...] + self.b[...][None]


def weights(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((model(x) + 0.01 * jax.random.normal(key, y.shape) - y) ** 2), {}


def numbers(s):
    x = np.random.default_rng([7, s]).normal(size=(16, 3)).astype(np.float32)
    return x, x @ TRUTH


def batches(start, at=None, action=lambda batch: batch):
    "For ever, with action(batch) in place of that of step `at`."
    while True:
        start += 1
        yield action(numbers(start)) if start == at else numbers(start)


def at_step(at, action):
    return partial(batches, at=at, action=action)


def error(model):
    x, y = numbers(10**6)
    return {"loss": jnp.mean((model(jnp.asarray(x)) - y) ** 2)}


def train(model=None, loss=loss, batches=batches, optim=OPTIM, **options):
    options = dict(validate=error, every=5, log_every=2, progress=False) | options
    return fit(model or Network(), loss, batches, optim, **options)


def tear(batch):
    raise RuntimeError("torn")


def without_clock(rows):
    clock = "samples_per_second", "seconds"
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def step_of(folder, name="last"):
    return read_meta(folder / f"{name}.safetensors")["step"]


def equal_runs(folder, whole):
    "The same files; a stop may have added the row of its step."
    for name in ("last.safetensors", "best.safetensors"):
        assert same(load_file(folder / name), load_file(whole[1] / name)), name
    steps = {row["step"] for row in whole[0].history}
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["step"] in steps]
    assert without_clock(rows) == without_clock(whole[0].history)
    files = ["best.safetensors", "last.safetensors", "metrics.jsonl"]
    assert sorted(os.listdir(folder)) == files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The uninterrupted run: (what fit returned, its folder)."
    folder = tmp_path_factory.mktemp("whole")
    return train(folder=folder), folder


def test_what_it_logs_and_learns():
    "Row by row, against a loop in NumPy over the library's optimizer."
    params, rows = {"W": jnp.zeros((3, 2)), "b": jnp.ones(2)}, {}
    optimizer, result = make_optimizer(OPTIM), train(Line())
    state, key = optimizer.init(params), jax.random.key(0)
    for s in range(20):
        x, y = numbers(s + 1)
        noise = 0.01 * jax.random.normal(jax.random.fold_in(key, s), y.shape)
        off = np.asarray(x @ params["W"] + params["b"][None] + noise - y)
        grads = {"W": 2 * x.T @ off / off.size, "b": 2 * off.sum(0) / off.size}
        rows[s + 1] = (off**2).mean(), optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):
            grads = jax.tree.map(jnp.asarray, grads)
            updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for row in result.history:
        found = row["loss"], row["grad_norm"]
        np.testing.assert_allclose(found, rows[row["step"]], rtol=1e-3)
        assert row["samples_per_second"] > 0
    assert [row["step"] for row in result.history] == [
        *(2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20)
    ]
    judged = [row["step"] for row in result.history if "validation_loss" in row]
    assert judged == [5, 10, 15, 20] and rows[20][0] < rows[1][0]


def test_a_step_is_compiled_once_and_the_callers_model_is_left_alone():
    model, traces = Network(), []
    before = jax.tree.map(np.array, weights(model))
    one = train(model, lambda *args: (traces.append(1), loss(*args))[1])
    assert len(traces) == 1 and same(weights(model), before)  # readable, not donated
    one.model.norm.scale[...] = one.model.norm.scale[...].at[0].set(0.0)  # ours now
    found = []  # in another thread, which gets no Ctrl-C; without files or validation
    run = lambda: found.append(train(Network(), validate=None, seed=1))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0].best_step == 20 and not same(
        weights(found[0].model), weights(train(validate=None).model)
    )


@pytest.mark.parametrize("with_folder", [True, False])
def test_the_best_state_on_validation_is_kept(tmp_path, with_folder):
    """Of equals, the first: the statistics of the batch norm with the weights that they
    belong to. Validation is without dropout, and training goes on with it.
    """
    folder, seen = tmp_path / "run" if with_folder else None, []

    def validate(model):
        assert model.drop.deterministic and model.norm.use_running_average
        seen.append(jax.tree.map(np.array, (weights(model), model.norm.mean[...])))
        return {"loss": float(len(seen) not in (2, 3))}

    result = train(validate=validate, folder=folder)
    assert result.best_step == 10 and not result.model.drop.deterministic
    found = weights(result.model), result.model.norm.mean[...]
    assert same(found, seen[1]) and not same(seen[1][1], seen[2][1])
    if with_folder:
        for name, n in (("best", 1), ("last", -1)):
            path, like = folder / f"{name}.safetensors", {"params": seen[0][0]}
            assert same(load_checkpoint(path, like)[0]["params"], seen[n][0])
        assert step_of(folder, "best") == 10


def test_a_finished_run_returns_at_once(whole, capsys):
    result, folder = whole
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    nothing = dict(batches=lambda start: iter([]), validate=lambda model: 1 / 0)
    again = train(folder=folder, progress=True, **nothing)
    assert same(weights(again.model), weights(result.model))
    assert again.history == result.history == read_metrics(folder / "metrics.jsonl")
    assert again.best_step == result.best_step
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ValueError, match="^batches: ended"):
        train(batches=nothing["batches"])
    train(progress=True)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("20/20", "loss", "best", "/s"))


def test_hooks_see_every_step_add_to_the_rows_and_end_a_run(tmp_path, whole):
    seen, starts = [], []

    def watch(run):
        seen.append((run.step, run.row is not None))
        run.progress["count"] = run.progress.get("count", 0) + 1
        if run.row is not None:
            run.row["extra"] = 1.0
        run.stop |= run.step == 7

    result = train(folder=tmp_path, hooks=[watch])
    assert seen == [(s, s in (2, 4, 5, 6)) for s in range(1, 8)]
    assert [row["step"] for row in result.history if row["extra"]] == [2, 4, 5, 6]
    assert result.history == read_metrics(tmp_path / "metrics.jsonl")
    progress = read_meta(tmp_path / "last.safetensors")["progress"]
    # nothing is lost, nor the time of the step that has no row
    assert progress["seconds"] > result.history[-1]["seconds"]
    count = lambda start: starts.append(start) or batches(start)
    train(folder=tmp_path, batches=count, hooks=[watch])
    last = "last.safetensors"
    assert starts == [7] and same(
        load_file(tmp_path / last), load_file(whole[1] / last)
    )
    assert read_meta(tmp_path / last)["progress"]["count"] == 20


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 20), momentum=0.9),
    "several": lambda: optax.MultiSteps(optax.lion(1e-2), 2).gradient_transformation(),
    "plateau": lambda: optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_resumes_to_the_bit(tmp_path, name):
    "Torn apart, or ended after half of the steps and asked for more."
    run = partial(train, optim=OPTIMIZERS[name](), steps=20)
    whole = run(folder=tmp_path / "whole"), tmp_path / "whole"
    with pytest.raises(RuntimeError):
        run(folder=tmp_path / "torn", batches=at_step(13, tear))
    run(folder=tmp_path / "torn")
    assert run(folder=tmp_path / "longer", steps=10).history[-1]["step"] == 10
    run(folder=tmp_path / "longer")
    for name in ("torn", "longer"):
        equal_runs(tmp_path / name, whole)
    with pytest.raises(CheckpointError, match="a run of 20 steps, and 10 are asked"):
        run(folder=tmp_path / "longer", steps=10)


def test_dropout_draws_from_the_seed_and_the_step():
    "Also where the loss works on a copy, and the model's own count stays."
    masks = []

    def dropping(model, batch, key):
        model = nnx.clone(model)
        kept = model.drop(jnp.ones(64)) > 0
        jax.debug.callback(lambda m: masks.append(m.tobytes()), kept)
        return jnp.mean(model(batch[0])), {}

    for seed in (0, 0, 1):
        train(Network(), dropping, seed=seed, validate=None)
        jax.effects_barrier()
    assert len(set(masks)) == 40 and set(masks[:20]) == set(masks[20:40])


@pytest.mark.parametrize(
    "bad",
    [dict(every=0), dict(log_every=-1), dict(steps=5), dict(optim=optax.sgd(0.1))],
)
def test_impossible_arguments_are_named(bad):
    name = "steps" if "optim" in bad else next(iter(bad))
    with pytest.raises(ValueError, match=f"^{name}: "):
        train(**bad)


# --- what goes wrong on the way


@pytest.mark.parametrize("at", [4, 5, 20])
def test_ctrl_c_stops_cleanly_and_costs_nothing(tmp_path, at, whole):
    "Also in the very step of a validation, which must not be lost, and in the last."
    handler = signal.getsignal(signal.SIGINT)
    interrupt = at_step(at, lambda batch: signal.raise_signal(signal.SIGINT) or batch)
    says = rf"after step {at}; run again to go on from {tmp_path}"
    stopped = pytest.raises(KeyboardInterrupt, match=says)
    with stopped if at < 20 else contextlib.nullcontext():
        train(folder=tmp_path, batches=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler and step_of(tmp_path) == at
    train(folder=tmp_path)
    equal_runs(tmp_path, whole)


def test_a_second_ctrl_c_interrupts_at_once():
    twice = lambda batch: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt, match="^$"):
        train(batches=at_step(3, twice))


@pytest.mark.parametrize("at, kept, stop", [(13, 10, 0), (15, 10, 0), (16, 15, 1)])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoints(
    tmp_path, at, kept, stop, whole
):
    "Also where a hook stops the run at that step, which is none of the log."

    def hook(run):
        run.stop |= stop and run.step == at

    broken = at_step(at, lambda batch: (batch[0] * np.float32(np.nan), batch[1]))
    with pytest.raises(FloatingPointError, match=rf"step {at}; lower.*lr = 0.1"):
        log_every = 3 if stop else 1
        train(folder=tmp_path, batches=broken, hooks=[hook], log_every=log_every)
    assert step_of(tmp_path) == kept
    train(folder=tmp_path)  # repaired, it goes on
    last = "last.safetensors"
    assert same(load_file(tmp_path / last), load_file(whole[1] / last))


def test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint(tmp_path):
    "√ at 0: the loss is finite, its gradient is not, and the weights are lost."

    def cusp(model, batch, key):
        value, metrics = loss(model, batch[:2], key)
        zero = 0 * jnp.sum(model.norm.bias[...])
        return value + jnp.sqrt(1 - batch[2] + zero), metrics

    def stream(start):
        for s, batch in enumerate(batches(start), start + 1):
            yield *batch, np.float32(s == 15)

    with pytest.raises(FloatingPointError, match=r"step 15\b"):
        train(folder=tmp_path, loss=cusp, batches=stream)
    for path in tmp_path.glob("*.safetensors"):
        assert step_of(tmp_path, path.stem) <= 10
        assert all(np.isfinite(array).all() for array in load_file(path).values())


def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path):
    losses = iter([0.5, 0.25, math.nan])
    with pytest.raises(FloatingPointError, match=r"validation.*step 15\b"):
        train(folder=tmp_path, validate=lambda model: {"loss": next(losses)})
    assert step_of(tmp_path, "best") == 10 == step_of(tmp_path)


def test_an_unwritable_folder_is_named(tmp_path):
    "A file in its place, whoever asks: root may write where permissions say no."
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=str(tmp_path / "file")):
            train(folder=folder)


@pytest.mark.parametrize("at", [3, 11])
def test_a_full_disk_ends_a_run_in_a_line_and_it_resumes(tmp_path, whole, at):
    "A limit on the size of files, which the system refuses to pass, is as good."
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    full = at_step(at, lambda batch: limit(200) or batch)
    with pytest.raises(SystemExit) as e, as_command("tool"):
        try:
            train(folder=tmp_path, batches=full)
        finally:
            limit(soft)
    said = rf"tool: .*{os.strerror(errno.EFBIG)}.*{tmp_path}[^\n]*"
    assert re.fullmatch(said, e.value.code) and not [*tmp_path.glob(".*")]
    assert at < 5 or step_of(tmp_path) in (5, 10)
    train(folder=tmp_path)
    equal_runs(tmp_path, whole)


def test_a_write_that_fails_at_any_point_leaves_a_run_that_resumes(
    tmp_path, monkeypatch
):
    """Also between the two checkpoints of one step, in a run whose best weights are not
    its last.
    """
    kept = []
    keep = lambda run: run.step == 10 and kept.append(jax.device_get(run.state.params))
    train(hooks=[keep])
    gap = lambda model: jax.tree.map(jnp.subtract, weights(model), kept[0])
    passing = lambda model: {"loss": optax.tree.norm(gap(model))}
    result = train(folder=tmp_path / "whole", validate=passing)
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
                train(folder=folder, validate=passing)
            except OSError as e:
                assert str(calls[-1]) in str(e)
            else:
                break  # it writes no more than n - 1 files
        train(folder=folder, validate=passing)
        equal_runs(folder, whole)
    assert n == 8  # the log, two checkpoints at steps 5 and 10, one at 15 and 20


# --- whose run is it?

MODEL = {"model": {"dim": 3, "beta": 0.5, "kind": "line"}, "data": "noise", "a": (1,)}
MODEL_2 = {**MODEL, "model": {**MODEL["model"], "beta": 2.0}}
stop = lambda run: setattr(run, "stop", run.step == 12)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(config=MODEL | {"data": "b"}), "data: 'noise' there, 'b' here"),
        (dict(config=MODEL_2), "model.beta: 0.5 there, 2.0 here"),
        (dict(optim=replace(OPTIM, lr=0.2)), "optim.lr: 0.1 there, 0.2 here"),
        (dict(optim=replace(OPTIM, steps=40)), "optim.steps: 20 there, 40 here"),
        # a configuration cannot hide the seed
        (dict(seed=9, config={**MODEL, "seed": 0}), "seed: 0 there, 9 here"),
    ],
)
def test_another_configuration_names_the_keys_that_differ(tmp_path, change, says):
    train(folder=tmp_path, config=MODEL, hooks=[stop])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(CheckpointError) as e:
        train(folder=tmp_path, **{"config": MODEL, **change})
    message = f"{tmp_path}: holds a run of another configuration ({says}); choose"
    assert str(e.value).startswith(message)
    assert ("to train on, give the model" in str(e.value)) == ("steps" in says)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_another_model_or_a_damaged_file_stops_a_run_before_it_begins(tmp_path):
    train(folder=tmp_path, hooks=[stop])
    log = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"\(8,\).*\(9,\)"):
        train(Network(9), folder=tmp_path)
    for name in ("last", "best"):
        path = tmp_path / f"{name}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-7] + bytes([content[-7] ^ 16]) + content[-6:])
        with pytest.raises(CheckpointError, match=f"{path.name}: contents do not"):
            train(folder=tmp_path)
        path.write_bytes(content)
    (tmp_path / "best.safetensors").unlink()
    with pytest.raises(CheckpointError, match="best.safetensors: no such"):
        train(folder=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


LINES = b"17", b"null", b"[1]", b'{"loss": 1}', b'{"step": "3"}', b"\xff", b"[" * 10**5


def test_a_damaged_line_costs_no_other_row(tmp_path):
    "A last line cut in half goes without a word."
    path = tmp_path / "metrics.jsonl"
    for damaged in LINES:
        path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 4}\n')
        with pytest.warns(UserWarning, match="metrics.jsonl: 1 of its 3 lines"):
            assert read_metrics(path) == [{"step": 1}, {"step": 4}]
    for tail in (b"", b'{"step": 30, "lo', b"{", b"17", b"\xff"):
        path.write_bytes(b'{"step": 1}\n' + tail)
        assert read_metrics(path) == [{"step": 1}]


# --- killing a real process

# of the folder, of which replacement of a file to die half-way
RUN = """
import os, signal, sys, time
from test_training import OPTIM, batches, replace, train

folder, torn, move, seen = sys.argv[1], int(sys.argv[2]), os.replace, []

def die_in_the_middle(source, target):
    seen.append(target)
    if len(seen) == torn:
        os.truncate(source, os.path.getsize(source) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    move(source, target)

def slowly(start):
    for batch in batches(start):
        time.sleep(0.02)
        yield batch

os.replace, optim = die_in_the_middle, replace(OPTIM, steps=120, warmup=10)
train(batches=slowly, optim=optim, folder=folder, every=4, log_every=3)
"""


def test_killed_again_and_again_it_ends_in_the_very_weights_of_an_uninterrupted_run(
    tmp_path,
):
    """SIGKILL at a random moment, then in the middle of writing a checkpoint; resumed after
    each, and compared bit for bit.
    """
    folder, draw = tmp_path / "a", random.SystemRandom()
    # every process compiles for itself: a program loaded from a compilation cache may
    # differ from a fresh one in the last bit
    own = str(Path(et_nbdev.__file__).parents[1]), str(Path(__file__).parent)
    paths = [*own, os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(folder, torn=0):
        words = [sys.executable, "-c", RUN, folder, str(torn)]
        return subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)

    def sound():
        "Whatever the moment: every file is whole, and the rows are the other run's."
        steps = [step_of(folder, name) for name in ("best", "last")]
        rows = read_metrics(folder / "metrics.jsonl")
        assert all(row in uninterrupted for row in without_clock(rows))
        return steps[1]

    other = start(tmp_path / "whole")
    assert other.wait() == 0, other.stderr.read()[-2000:]
    uninterrupted = without_clock(read_metrics(tmp_path / "whole/metrics.jsonl"))
    process, log, lines = start(folder), folder / "metrics.jsonl", draw.randint(4, 9)
    while not (log.exists() and log.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, process.stderr.read()[-2000:]
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.2))
    process.kill()
    assert process.wait() == -signal.SIGKILL and 0 < (first := sound()) < 100
    # replacement 1 is the log's; then best and last
    process = start(folder, torn=draw.randint(2, 6))
    assert process.wait() == -signal.SIGKILL and first <= sound() < 110
    assert start(folder).wait() == 0
    for name in ("last.safetensors", "best.safetensors"):
        assert same(load_file(folder / name), load_file(tmp_path / "whole" / name)), (
            name
        )
    assert len(list(folder.iterdir())) == 3
    assert without_clock(read_metrics(log)) == uninterrupted


def test_a_loss_that_returns_a_number_alone_is_refused():
    wrong = lambda model, batch, key: loss(model, batch, key)[0]
    with pytest.raises(TypeError, match="loss: expected .mean loss, .metric: value.."):
        fit(Network(), wrong, batches, OptimConfig(steps=2, warmup=0), progress=False)
