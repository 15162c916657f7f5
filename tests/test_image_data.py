"""Pictures as tokens: nbs/20_image_data.ipynb and the readers of
nbs/engine/pictures.ipynb, on arrays, on real files and, where there are any, on real
data.
"""

import contextlib
import io
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from et_nbdev.vision import data
from et_nbdev.vision.data import (
    FILLS,
    batches,
    channel_statistics,
    decode,
    denormalize,
    fills_from,
    load_images,
    normalize,
    occlude,
    patchify,
    unpatchify,
)
from et_nbdev.vision.train import augment

datasets = pytest.importorskip("datasets")
pq = pytest.importorskip("pyarrow.parquet")
SPLITS = ("train", "validation", "test")
OFFLINE = datasets.config.HF_HUB_OFFLINE
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No data but the test's own, and an empty cache. A test of real data asks for
    `et_data`, which keeps the folder.
    """
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def encode(img, format="PNG", **options):
    if isinstance(img, np.ndarray):
        img = Image.fromarray(img)
    file = io.BytesIO()
    img.save(file, format, **options)
    return file.getvalue()


def color(n, size=8):
    return [rng.integers(0, 256, (size, size, 3), np.uint8) for _ in range(n)]


@pytest.fixture
def asked(monkeypatch):
    "Names that were looked up on the network, which fails."
    names = []

    def getaddrinfo(host, *_, **__):
        names.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def folder_of(tmp_path, files: dict, name="pics"):
    for file, content in files.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / name


def write_parquet(file, pictures, column="image", **more):
    import pyarrow as pa

    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [
        (
            None
            if p is None
            else {"bytes": p if isinstance(p, bytes) else encode(p), "path": None}
        )
        for p in pictures
    ]
    pq.write_table(
        pa.table({"label": list(range(len(cells))), column: cells, **more}), file
    )
    return file


def all_rows(name, **options):
    return {s: load_images(name, s, **options) for s in SPLITS}


def as_set(images):
    return {x.tobytes() for x in images[:]}


# ------------------------------------------------------------------------------------
# arrays


@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["uint8", "float32"]),
)
def test_patches_are_where_the_formula_says_and_the_inverse_is_exact(
    batch, n, p, C, dtype
):
    S = n * p
    x = np.arange(np.prod([*batch, S, S, C])).astype(dtype).reshape(*batch, S, S, C)
    tokens = patchify(x, p)
    assert tokens.shape == (*batch, n * n, p * p * C) and tokens.dtype == x.dtype
    for A, i, j, k in itertools.product(range(n * n), range(p), range(p), range(C)):
        np.testing.assert_array_equal(
            tokens[..., A, (i * p + j) * C + k],
            x[..., A // n * p + i, A % n * p + j, k],
        )
    np.testing.assert_array_equal(unpatchify(tokens, S, p), x)


def test_normalize_and_back():
    x = rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
    mean, std = np.float32([0.2, 0.4, 0.6]), np.float32([0.1, 0.2, 0.3])
    z = normalize(x, mean, std)
    assert z.dtype == np.float32 and isinstance(z, np.ndarray)
    np.testing.assert_allclose(z, (x / 255 - mean) / std, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(denormalize(z, mean, std), x / 255, atol=1e-6)
    np.testing.assert_allclose(normalize(x / 255, mean, std), z, atol=1e-5)
    traced = jax.jit(lambda x: normalize(x, mean, std))(x)
    assert traced.dtype == jnp.float32
    np.testing.assert_allclose(traced, z, atol=1e-5)
    # one number for all channels
    one = normalize(jnp.asarray(x[0]), 0.5, 0.5)
    np.testing.assert_allclose(one, x[0] / 127.5 - 1, atol=1e-6)


FLOATS, BYTES, KEY = np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8, 3), np.uint8), 0
digits = np.arange(10)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: patchify(FLOATS, 3), "patch_size: must divide .*8 pixels, got 3"),
        (lambda: patchify(FLOATS, 0), "patch_size: expected a whole number"),
        (lambda: patchify(FLOATS, 2.0), "patch_size: expected a whole number"),
        (lambda: patchify(FLOATS[:, :6], 2), r"images: .*got \(2, 6, 8, 3\)"),
        (lambda: patchify(FLOATS[0, 0], 2), r"images: .*got \(8, 3\)"),
        (lambda: patchify([[1]], 2), "images: "),
        (lambda: unpatchify(np.zeros((2, 15, 12)), 8, 2), r"patches: .*16, 4·C.*15"),
        (lambda: unpatchify(np.zeros((2, 16, 13)), 8, 2), "patches: "),
        (lambda: unpatchify(np.zeros((2, 16, 12)), 8, 3), "patch_size: must divide"),
        (lambda: unpatchify(np.zeros((2, 16, 12)), 0, 2), "image_size: "),
        (lambda: normalize(FLOATS + np.nan, 0.5, 0.5), "images: .*NaN"),
        (lambda: normalize(FLOATS + 255, 0.5, 0.5), "images: .*255; divide by 255"),
        (lambda: normalize(FLOATS - 0.5, 0.5, 0.5), "images: floating pixels"),
        (lambda: normalize(FLOATS.astype(int), 0.5, 0.5), "images: must be uint8 or"),
        (lambda: normalize(BYTES, [0.1, 0.2], 0.5), "mean: must be 3 finite numbers"),
        (lambda: normalize(BYTES, np.nan, 0.5), "mean: must be 3 finite numbers"),
        (lambda: normalize(BYTES, 0.5, [0.1, 0, 0.1]), "std: must be 3 finite pos"),
        (lambda: hide(4, 16, 17), "num_occluded: must be at most num_tokens = 16"),
        (lambda: hide(4, 16, -1), "num_occluded: "),
        (lambda: hide(4, 16, 2.5), "num_occluded: "),
        (lambda: hide(0, 16, 4), "batch_size: "),
        (lambda: hide(4, 0, 0), "num_tokens: "),
        (lambda: hide(4, 16, 4, 1.5), "open_fraction: .*got 1.5"),
        (lambda: hide(4, 16, 4, float("nan")), "open_fraction: "),
        (lambda: batches(digits, 11, seed=0), "batch_size: expected at most 10.*11"),
        (lambda: batches(digits, 0, seed=0), "batch_size: "),
        (lambda: batches(digits, 2, seed=-1), "seed: "),
        (lambda: batches(digits, 2, seed=0, start=-1), "start: "),
        (lambda: batches(digits, 2, seed=0, epochs=0), "epochs: "),
        (lambda: batches(digits, 4, seed=0, part=(0, 3)), "part: "),
        (lambda: load_images("digits", "valid"), "split: must be .*got 'valid'"),
        (lambda: load_images("digits", size=0), "size: "),
        (lambda: load_images("digits", size=True), "size: "),
        (lambda: load_images(""), "name: "),
        (lambda: load_images(None), "name: "),
        (lambda: load_images("digits", data_dir="/no/such"), "data_dir: /no/such is"),
    ],
)
def test_what_is_wrong_is_refused_by_name(call, match):
    with pytest.raises((ValueError, TypeError), match=f"^{match}"):
        call()


def hide(*arguments):
    return occlude(jax.random.key(0), *arguments)


# few shapes: each is compiled
@given(st.data(), st.sampled_from([(1, 1), (3, 2), (2, 7), (5, 30)]), st.floats(0, 1))
def test_occlusion_counts_are_exact(draw, shape, open_fraction):
    B, N = shape
    n = draw.draw(st.integers(0, N))
    occluded, masked = occlude(
        jax.random.key(draw.draw(st.integers(0, 99))), B, N, n, open_fraction
    )
    assert (
        occluded.shape == masked.shape == (B, N)
        and occluded.dtype == masked.dtype == bool
    )
    assert (occluded.sum(1) == n).all() and (
        masked.sum(1) == round((1 - open_fraction) * n)
    ).all()
    assert not (masked & ~occluded).any()


def test_statistics_are_exact_never_zero_and_of_5000_pictures_at_most():
    x = rng.integers(0, 256, (300, 4, 4, 3), np.uint8)
    mean, std = channel_statistics(x)
    assert mean.dtype == std.dtype == np.float32
    np.testing.assert_allclose(mean, (x / 255).mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, (x / 255).std((0, 1, 2)), rtol=1e-6)
    white = channel_statistics(np.full((3, 4, 4, 1), 255, np.uint8))
    np.testing.assert_allclose(white, [[1], [1 / 255]], rtol=1e-6)
    asked = []

    class Many:
        def __len__(self):
            return 123_456

        def __getitem__(self, rows):
            asked.append(rows)
            return np.zeros((len(rows), 2, 2, 1), np.uint8)

    channel_statistics(Many())
    rows = np.concatenate(asked)
    assert len(np.unique(rows)) == len(rows) == 5000
    assert (rows[0], rows[-1]) == (0, 123_455) and max(map(len, asked)) <= 256


def test_the_papers_occlusion():
    occluded, masked = hide(4, 196, 100)
    assert (occluded.sum(1) == 100).all() and (masked.sum(1) == 90).all()
    assert len(np.unique(occluded, axis=0)) == 4, "pictures of a batch share theirs"
    np.testing.assert_array_equal(hide(4, 196, 100)[1], masked)


def off(counts, of, share):
    "The largest deviation from equal shares, in standard deviations."
    return np.abs(counts - of * share).max() / np.sqrt(of * share * (1 - share))


def test_no_token_is_special():
    occluded, masked = map(np.array, hide(20_000, 25, 10, 0.3))
    for chosen, share in (occluded, 0.4), (masked, 0.28), (occluded & ~masked, 0.12):
        assert off(chosen.sum(0), 20_000, share) < 5
    together = (occluded.T.astype(int) @ occluded)[~np.eye(25, dtype=bool)]
    assert off(together, 20_000, 10 * 9 / (25 * 24)) < 6, "some tokens prefer company"
    masked[:1200, 0] = True  # what padding a list of tokens does, in 6 % of pictures
    assert off(masked.sum(0), 20_000, 0.28) > 6


views = jax.jit(augment, static_argnames=("scale", "ratio", "flip", "jitter"))
ramp = np.stack(
    np.broadcast_arrays(
        (np.arange(16) + 0.5)[:, None] / 16,
        (np.arange(16) + 0.5)[None] / 16,
        np.float64(0.5),
    ),
    -1,
)


@pytest.mark.parametrize(
    "scale, ratio", [((0.08, 1.0), (0.75, 4 / 3)), ((0.25, 0.25), (1.0, 1.0))]
)
def test_crops_have_the_area_and_shape_asked_for_and_reach_every_corner(scale, ratio):
    x = np.broadcast_to(ramp, (400, *ramp.shape))
    still = dict(scale=scale, ratio=ratio, flip=0.0, jitter=0.0)
    view = np.asarray(views(jax.random.key(0), x, **still))
    inner = view[:, 4:12, 4:12]  # rims are extended, not extrapolated
    # parts of the picture
    height = 16 * np.diff(inner[..., 0], axis=1).mean((1, 2))
    width = 16 * np.diff(inner[..., 1], axis=2).mean((1, 2))
    free = np.maximum(height, width) < 1 - 1e-3  # not clipped to the picture
    area, shape = height * width, width / height
    assert (area < scale[1] + 1e-3).all() and (area[free] > scale[0] - 1e-3).all()
    assert (np.abs(np.log(shape[free])) < np.log(ratio[1]) + 0.01).all()
    assert view.min() > 0.03 and view.max() < 0.97, "a view reaches beyond the picture"
    np.testing.assert_allclose(view[..., 2], 0.5, atol=1e-5)
    if scale[0] == 0.25:  # half as wide as the picture: it begins between 0 and a half
        begin = view[:, 8, 8, :2] - 8.5 / 32
        assert (begin.min(0) < 0.01).all() and (begin.max(0) > 0.49).all()
        assert (np.abs(begin.mean(0) - 0.25) < 0.04).all()
        assert np.abs(np.corrcoef(begin.T)[0, 1]) < 0.2


def test_parts_of_an_augmentation_do_what_they_are_called():
    close, key = np.testing.assert_allclose, jax.random.key(0)
    x = rng.integers(0, 256, (4, 16, 16, 3), np.uint8)
    off = dict(scale=(1, 1), ratio=(1, 1), jitter=0)
    close(views(key, x, flip=0, **off), x / 255, atol=1e-5)
    close(views(key, x, flip=1, **off), x[:, :, ::-1] / 255, atol=1e-5)
    many = np.asarray(views(key, np.tile(x[:1], (400, 1, 1, 1)), **off))
    same = np.abs(many - x[:1] / 255).max((1, 2, 3)) < 1e-5
    assert 150 < same.sum() < 250, "half are mirrored"
    # a picture's view depends on itself alone
    x = np.tile(rng.random((1, 16, 16, 3), np.float32), (8, 1, 1, 1))
    view = views(key, x)
    assert view.dtype == jnp.float32 and view.min() >= 0 and view.max() <= 1
    assert len(np.unique(np.asarray(view).reshape(8, -1), axis=0)) == 8
    x[1:] = 0
    close(views(key, x)[0], view[0], atol=1e-6)
    # colors: gray stays gray, and saturation changes the distance between channels
    still = dict(scale=(1, 1), ratio=(1, 1), flip=0)
    gray = np.repeat(rng.random((4, 8, 8, 1), np.float32), 3, -1)
    out = np.asarray(views(key, gray, **still))
    close(out, out[..., :1].repeat(3, -1), atol=1e-4)
    assert np.abs(out - gray).max() > 0.05
    flat = np.broadcast_to(np.float32([0.6, 0.5, 0.4]), (50, 8, 8, 3))
    found = np.asarray(views(key, flat, **still))[:, 0, 0]
    spread = (found[:, 0] - found[:, 2]) / found.mean(1)
    assert spread.min() < 0.35 and spread.max() > 0.45
    assert views(key, gray[..., :1]).shape == (4, 8, 8, 1)


# ------------------------------------------------------------------------------------
# fills


def hidden_pixels(occluded, S, p):
    return unpatchify(np.repeat(occluded[..., None], p * p, -1), S, p)[..., 0]


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("C", [1, 3])
def test_fills_leave_what_is_open_and_never_see_what_is_not(name, C):
    x, fill = rng.random((4, 12, 12, C), np.float32), FILLS[name]
    occluded = np.array(occlude(jax.random.key(0), 4, 36, 18)[0])
    occluded[1], occluded[2] = True, False  # all hidden, none hidden
    hidden = hidden_pixels(occluded, 12, 2)
    before, filled = x.copy(), fill(x, occluded, 2)
    assert filled.dtype == np.float32 and filled.shape == x.shape
    assert filled.min() >= 0 and filled.max() <= 1 and (filled[1] == 0.5).all()
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(filled[~hidden], x[~hidden])
    other = np.where(hidden[..., None], rng.random(x.shape, np.float32), x)
    np.testing.assert_array_equal(fill(other, occluded, 2), filled)
    assert (filled != x)[hidden].any()


def test_fills_do_what_they_are_called():
    x = rng.random((2, 8, 8, 3), np.float32)
    occluded = np.asarray(occlude(jax.random.key(1), 2, 16, 8)[0])
    hidden = hidden_pixels(occluded, 8, 2)
    mean, nearest = data.fill_mean(x, occluded, 2), data.fill_nearest(x, occluded, 2)
    for b, i, j in np.argwhere(hidden):
        np.testing.assert_allclose(mean[b, i, j], x[b][~hidden[b]].mean(0), atol=1e-6)
        open_ = np.argwhere(~hidden[b])
        distance = ((open_ - [i, j]) ** 2).sum(1)
        candidates = x[b][tuple(open_[distance == distance.min()].T)]
        assert (candidates == nearest[b, i, j]).all(1).any()
    inside = np.zeros((1, 64), bool)
    inside[0, [27, 36]] = True  # a plane is biharmonic
    np.testing.assert_allclose(
        data.fill_biharmonic(ramp[None], inside, 2)[0], ramp, atol=1e-4
    )


def known_and_hidden(channels):
    "Training pictures, others, and what is hidden of these."
    draw = np.random.default_rng(0)
    known, images = (
        draw.integers(256, size=(n, 6, 6, channels), dtype=np.uint8) for n in (40, 5)
    )
    return known, images, draw.random((5, 9)) < 0.5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "name, k", [("nearest neighbor", 1), ("seven nearest neighbors", 7)]
)
def test_neighbors_are_those_of_the_visible_pixels(name, k, channels):
    known, images, hidden = known_and_hidden(channels)
    found, of = fills_from(known)[name](images, hidden, 2), patchify(known / 255, 2)
    for x, h, y in zip(patchify(images / 255, 2), hidden, patchify(found, 2)):
        near = np.argsort([((t[~h] - x[~h]) ** 2).sum() for t in of])[:k]
        np.testing.assert_allclose(y[h], of[near].mean(0)[h], atol=1e-5)
        np.testing.assert_allclose(y[~h], x[~h], atol=1e-6)


def test_the_mean_and_the_gaussian_are_those_of_the_training_pictures():
    draw = np.random.default_rng(0)
    mixed = draw.normal(size=(3000, 4)) @ draw.normal(size=(4, 36))
    pixels = np.clip(128 + 20 * mixed, 0, 255).astype(np.uint8).reshape(-1, 6, 6, 1)
    known, images, hidden = pixels[:2900], pixels[2900:], draw.random((100, 9)) < 0.5
    fills = fills_from(known)
    mean = fills["mean training picture"](images, hidden, 2)
    y, wanted = patchify(mean, 2)[hidden], patchify(known / 255, 2).mean(0)
    np.testing.assert_allclose(y, np.stack([wanted] * 100)[hidden], atol=1e-5)
    # four numbers make a picture, so what is visible tells the rest
    error = lambda name: np.abs(fills[name](images, hidden, 2) - images / 255).mean()
    assert error("Gaussian") < 0.1 * error("mean training picture")
    assert "Gaussian" not in fills_from(np.zeros((3, 20, 20, 3), np.uint8))


# ------------------------------------------------------------------------------------
# batches


def take(stream, n):
    got = list(itertools.islice(stream, n))
    stream.close()
    return got


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n, B", [(1, 1), (10, 3), (12, 4), (40, 7)])
def test_a_resumed_stream_is_the_same_stream(n, B, shuffle):
    stream = lambda **more: batches(np.arange(n), B, seed=5, shuffle=shuffle, **more)
    whole = take(stream(), 17)
    np.testing.assert_array_equal(take(stream(start=13), 4), whole[13:])
    three = list(stream(epochs=3))
    assert len(three) == 3 * (n // B) and {len(b) for b in three} == {B}
    np.testing.assert_array_equal(
        three, whole[: len(three)] if len(three) < 17 else three
    )
    for epoch in np.split(np.array(three).reshape(-1), 3):
        assert len(np.unique(epoch)) == len(epoch), "a picture twice in an epoch"
    assert list(stream(epochs=2, start=999)) == []


def test_epochs_and_seeds_differ_and_everything_is_seen():
    flat = lambda **o: np.concatenate(list(batches(np.arange(100), 20, **o)))
    one = flat(seed=5, epochs=2).reshape(2, 100)
    assert (np.sort(one) == np.arange(100)).all() and (one[0] != one[1]).any()
    assert (one[0] != flat(seed=6, epochs=1)).any()
    last = list(batches(np.arange(10), 4, seed=0, shuffle=False, epochs=1))
    np.testing.assert_array_equal(np.concatenate(last), np.arange(10))


class Fragile:
    "Asked for row 13, it breaks; it remembers what it was asked."

    def __init__(self, pause=0.0):
        self.asked, self.pause = [], pause

    def __len__(self):
        return 100

    def __getitem__(self, rows):
        self.asked.append(rows)
        time.sleep(self.pause)
        if 13 in rows:
            raise ValueError("images: row 13 is broken")
        return rows


def loaders():
    return [t for t in threading.enumerate() if t.name.startswith("et_nbdev.batches")]


def test_an_error_while_loading_arrives_with_its_message_where_its_batch_would_be():
    stream = batches(Fragile(), 4, seed=0, shuffle=False)
    assert [len(next(stream)) for _ in range(3)] == [4, 4, 4]
    with pytest.raises(ValueError, match="row 13 is broken"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    assert not loaders()


def test_loading_runs_ahead_a_little_and_ends_with_the_consumer():
    slow = Fragile(pause=0.02)
    stream = batches(slow, 2, seed=0, shuffle=False)
    next(stream)
    time.sleep(0.3)
    assert 1 < len(slow.asked) < 20, "nothing, or everything, was loaded ahead"
    begin = time.perf_counter()
    stream.close()
    assert time.perf_counter() - begin < 5 and not loaders()
    abandoned = batches(slow, 2, seed=0, shuffle=False)
    next(abandoned)
    del abandoned
    assert not loaders()


# ------------------------------------------------------------------------------------
# splits


@given(st.integers(3, 500), st.booleans())
def test_carved_splits_are_a_partition_that_never_changes(n, has_test):
    own, tested = data.Source(n, lambda rows: []), data.Source(7, lambda rows: [])
    source = {"train": own, "test": tested} if has_test else {"all": own}
    rows = {s: data.choose(source, s, "x") for s in SPLITS}
    inside = ("train", "validation") if has_test else SPLITS
    whole = np.concatenate([rows[s][0] for s in inside])
    np.testing.assert_array_equal(np.sort(whole), np.arange(n))
    assert len(rows["validation"][0]) == max(1, n // 10)
    assert len(rows["test"][0]) == (7 if has_test else max(1, n // 10))
    assert (rows["test"][1] is tested) == has_test
    for s in SPLITS:
        np.testing.assert_array_equal(data.choose(source, s, "x")[0], rows[s][0])


def test_digits_and_the_fixed_permutation_are_those_of_every_machine():
    from sklearn.datasets import load_digits

    # published splits depend on it
    assert list(data.permutation(10, 2302)) == [2, 0, 5, 7, 8, 6, 4, 9, 3, 1]
    sets = all_rows("digits")
    assert [len(s) for s in sets.values()] == [1197, 200, 400]
    assert list(sets["validation"].rows[:5]) == [4, 7, 21, 25, 27]
    assert len(np.unique(np.concatenate([s.rows for s in sets.values()]))) == 1797
    x = sets["train"][:]
    assert x.shape == (1197, 8, 8, 1) and x.dtype == np.uint8
    levels = load_digits().images[sets["train"].rows]
    np.testing.assert_allclose(x[..., 0] / 255 * 16, levels, atol=0.04)
    assert load_images("digits", size=16)[0].shape == (16, 16, 1)


# ------------------------------------------------------------------------------------
# picture files

HALF = np.zeros((20, 40), np.uint8)
HALF[:, 20:] = 255


def exif(orientation):
    tag = Image.Exif()
    tag[0x0112] = orientation
    return tag


KINDS = {
    "rgb.png": encode(HALF[..., None].repeat(3, -1)),
    "gray.png": encode(HALF),
    "bits.png": encode(Image.fromarray(HALF).convert("1")),
    "16bit.png": encode(HALF.astype(np.uint16) * 257),
    "32bit.tif": encode(Image.fromarray(HALF.astype(np.int32) * 257), "TIFF"),
    "palette.png": encode(Image.fromarray(HALF).convert("P")),
    "cmyk.jpg": encode(Image.fromarray(HALF).convert("CMYK"), "JPEG", quality=95),
    # black, clear on the right: white shows
    "alpha.png": encode(np.dstack([0 * HALF, 0 * HALF, 0 * HALF, 255 - HALF])),
    "gray_alpha.png": encode(Image.fromarray(np.dstack([0 * HALF, 255 - HALF]), "LA")),
    "keyed.png": encode(
        np.dstack([HALF, 0 * HALF, 0 * HALF]), transparency=(255, 0, 0)
    ),
    "gif.gif": encode(Image.fromarray(HALF), "GIF"),
    "webp.webp": encode(Image.fromarray(HALF).convert("RGB"), "WEBP", lossless=True),
    **{
        f"exif{k}.jpg": encode(
            Image.fromarray(turned), "JPEG", exif=exif(k), quality=95
        )
        for k, turned in {
            2: HALF[:, ::-1],
            3: np.rot90(HALF, 2),
            6: np.rot90(HALF),
            8: np.rot90(HALF, 3),
        }.items()
    },
    "bad_exif.jpg": encode(
        Image.fromarray(HALF), "JPEG", exif=b"Exif\0\0MM\0*garbage", quality=95
    ),
    "no_exif.png": encode(Image.fromarray(HALF), exif=b"Exif\0\0this is no tag at all"),
    "UPPER.JPEG": encode(Image.fromarray(HALF), "JPEG", quality=95),
    # the middle is kept
    "tall.png": encode(np.pad(HALF[:, 10:30], ((40, 40), (0, 0)), constant_values=77)),
    "large.jpg": encode(Image.fromarray(HALF).resize((400, 200)), "JPEG", quality=95),
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("size", [8, 20])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_picture_becomes_the_same_pixels(size, channels):
    want = np.where(np.arange(size) < size // 2, 0, 255)
    for kind, content in KINDS.items():
        x = decode(content, size, channels)
        assert x.shape == (size, size, channels) and x.dtype == np.uint8
        error = np.abs(x.astype(int) - want[None, :, None])
        # the edge itself is smoothed
        assert np.delete(error, [size // 2 - 1, size // 2], 1).max() <= 16, kind


def test_sixteen_bits_are_scaled_not_cut():
    x = decode(encode(np.array([[0, 32896], [65535, 400]], np.uint16)), 2, 1)
    np.testing.assert_array_equal(x[..., 0], [[0, 128], [255, 2]])
    with pytest.raises(ValueError, match="gray levels go from 70000"):
        decode(encode(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "TIFF"), 4, 1)
    with pytest.raises(ValueError, match="floating pixels have no agreed range"):
        decode(encode(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF"), 4, 1)


@pytest.mark.parametrize(
    "shape, mode, want",
    [
        ((12, 12), "L", (12, 1)),
        ((12, 12), "RGB", (12, 3)),
        ((12, 14), "L", (32, 1)),
        ((300, 300), "L", (32, 1)),
    ],
)
def test_size_and_channels_of_a_folder_are_found(tmp_path, shape, mode, want):
    folder = folder_of(
        tmp_path, {f"{i}.png": encode(Image.new(mode, shape)) for i in range(5)}
    )
    images = load_images(folder)
    assert (images.size, images.channels) == want and images[:].shape[1:] == (
        want[0],
        want[0],
        want[1],
    )


def refusals(sets):
    "What is said of the pictures that cannot be decoded."
    said = []
    for images in sets.values():
        for i in range(len(images)):
            try:
                images[i]
            except ValueError as e:
                said.append(str(e))
    return said


@pytest.mark.parametrize("bad", ["truncated.jpg", "text.jpg", "empty.png"])
def test_a_damaged_picture_is_refused_by_name(tmp_path, bad):
    photo = encode(rng.integers(0, 256, (64, 64, 3), np.uint8), "JPEG")
    half, text = photo[: len(photo) // 2], b"this is no picture"
    content = {"truncated.jpg": half, "text.jpg": text, "empty.png": b""}[bad]
    files = {f"{i}.png": encode(c) for i, c in enumerate(color(9, 64))}
    sets = all_rows(folder_of(tmp_path, files | {f"class/{bad}": content}))
    (said,) = refusals(sets)
    assert f"images: file class/{bad}" in said and "repair or remove it" in said
    assert "0x" not in said
    broken = next(images for images in sets.values() if refusals({"": images}))
    with pytest.raises(ValueError, match=bad):
        list(batches(broken, len(broken), seed=0, epochs=1))


def test_a_row_without_a_picture_is_refused_by_number(tmp_path):
    pictures = [*color(7), None, b"nonsense", *color(11)]
    said = refusals(all_rows(write_parquet(tmp_path / "x.parquet", pictures)))
    assert sorted(m[: m.index(" of")] for m in said) == [
        "images: row 7", "images: row 8"
    ]  # fmt: skip


def test_folders_that_hold_no_set_of_pictures_are_refused(tmp_path):
    two = folder_of(tmp_path, {"a.png": encode(HALF), "b.png": encode(HALF)}, "two")
    with pytest.raises(ValueError, match="name: .*has 2 pictures to divide; 3 or more"):
        load_images(two)
    text = folder_of(tmp_path, {f"{c}.png": b"text" for c in "cba"}, "text")
    with pytest.raises(ValueError, match="name: no picture of .* decoded .*file c.png"):
        load_images(text)


def test_images_are_indexed_like_an_array():
    images = load_images("digits", "test")
    x = images[:]
    assert "400 pictures, 8×8×1" in repr(images) and images.name == "digits"
    table, even = np.array([[0, 1], [2, 3]]), np.arange(400) % 50 == 0
    for index in (3, -1, np.int64(7), slice(2, 9, 3), [4, 1, 1], table, even):
        np.testing.assert_array_equal(images[index], x[index])
    assert images[0:0].shape == (0, 8, 8, 1)
    with pytest.raises(IndexError):
        images[400]
    unit = x / 255
    np.testing.assert_allclose(
        images.statistics(), [[unit.mean()], [unit.std()]], rtol=1e-5
    )


# ------------------------------------------------------------------------------------
# parquet


def test_known_names_in_the_layout_of_the_data_folder(tmp_path, monkeypatch, asked):
    pics = color(75, 10)
    root = tmp_path / "data"
    write_parquet(
        root / "images/cifar10/train-00000-of-00002.parquet", pics[:30], "img"
    )
    write_parquet(
        root / "images/cifar10/train-00001-of-00002.parquet", pics[30:60], "img"
    )
    write_parquet(root / "images/cifar10/test-00000-of-00001.parquet", pics[60:], "img")
    before = sorted(root.rglob("*"))
    sets = all_rows("cifar10", size=10, data_dir=root)
    assert [len(s) for s in sets.values()] == [54, 6, 15]
    train, validation, test = map(as_set, sets.values())
    assert (
        train | validation == {x.tobytes() for x in pics[:60]}
        and not train & validation
        and test == {x.tobytes() for x in pics[60:]}
    )
    assert sorted(root.rglob("*")) == before, "something was written beside the data"
    assert load_images("cifar10", data_dir=root).size == 32
    for where in (root, root / "images"):
        monkeypatch.setenv("ET_DATA", str(where))
        assert as_set(load_images("cifar10", "validation", size=10)) == validation
    assert as_set(load_images(root / "images/cifar10", "test", size=10)) == test
    assert not asked, "local files need no network"
    write_parquet(tmp_path / "other/cifar10/train.parquet", pics[:20])
    write_parquet(tmp_path / "other/cifar10/test.parquet", pics[:20])
    monkeypatch.setenv("ET_DATA", str(tmp_path / "other"))
    assert len(load_images("cifar10")) == 18
    assert len(load_images("cifar10", data_dir=root)) == 54, "data_dir comes first"


@pytest.mark.parametrize(
    "name, files, counts",
    [
        ("tiny-imagenet", {"train": 30, "valid": 12}, (27, 3, 12)),
        # the hub's test split has no labels
        ("imagenet-1k", {"train": 30, "validation": 12, "test": 9}, (27, 3, 12)),
        ("some/thing", {"train": 30, "validation": 12, "test": 9}, (30, 12, 9)),
        ("some/thing", {"train": 30, "test": 9}, (27, 3, 9)),
        ("some/thing", {"validation": 30}, (24, 3, 3)),
        ("some/thing", {"pictures": 30}, (24, 3, 3)),
    ],
)
def test_which_split_is_which(tmp_path, name, files, counts):
    folder, made = tmp_path / "images" / name.split("/")[-1], {}
    for split, n in files.items():
        made[split] = color(n)
        write_parquet(folder / f"{split}-00000-of-00001.parquet", made[split])
    sets = all_rows(name, size=8, data_dir=tmp_path)
    assert tuple(len(s) for s in sets.values()) == counts
    contents = [as_set(s) for s in sets.values()]
    assert sum(map(len, contents)) == len(set.union(*contents))
    if "valid" in files or name == "imagenet-1k":
        assert contents[2] == {
            x.tobytes() for x in made.get("valid") or made["validation"]
        }


def test_the_column_of_pictures_is_found(tmp_path):
    import pyarrow as pa

    pics = color(10)
    features = datasets.Features(
        {"first": datasets.Value("string"), "look": datasets.Image()}
    )
    datasets.Dataset.from_dict(
        {"first": ["image"] * 10, "look": [Image.fromarray(x) for x in pics]}, features
    ).to_parquet(tmp_path / "f.parquet")
    assert as_set(load_images(tmp_path / "f.parquet", "train")) < {
        x.tobytes() for x in pics
    }
    pq.write_table(
        pa.table({"image": [encode(x) for x in pics]}), tmp_path / "binary.parquet"
    )
    assert as_set(load_images(tmp_path / "binary.parquet", "train")) < {
        x.tobytes() for x in pics
    }
    pq.write_table(pa.table({"text": ["a"] * 10}), tmp_path / "text.parquet")
    with pytest.raises(
        ValueError, match=r"name: .* has no column of pictures among \['text'\]"
    ):
        load_images(tmp_path / "text.parquet")
    pq.write_table(pa.table({"image": [1.0] * 10}), tmp_path / "floats.parquet")
    with pytest.raises(
        ValueError, match="name: the column 'image' .* does not hold encoded pictures"
    ):
        load_images(tmp_path / "floats.parquet")


def test_damaged_parquet_is_named(tmp_path):
    good = write_parquet(tmp_path / "a" / "train-00000-of-00001.parquet", color(200))
    cut = tmp_path / "b" / "train.parquet"
    cut.parent.mkdir()
    cut.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(
        ValueError,
        match=(
            "name: .*b/train.parquet is damaged, or no parquet file .*; fetch it again"
        ),
    ):
        load_images(cut)
    content = bytearray(good.read_bytes())
    # a sound footer, hollow pages
    content[1000 : len(content) - 2000] = bytes(len(content) - 3000)
    cut.write_bytes(content)
    with pytest.raises(ValueError, match="name: .*b cannot be read .*fetch it again"):
        load_images(cut.parent)


def test_a_damaged_cache_is_named_and_deleting_it_helps(tmp_path):
    file = write_parquet(tmp_path / "train.parquet", color(100))
    assert len(load_images(file)) == 80
    (arrow,) = (tmp_path / "cache").rglob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:500])
    with pytest.raises(ValueError, match="its copy below .*cache is, delete the copy"):
        load_images(file)
    arrow.unlink()
    arrow.parent.rename(tmp_path / "deleted")
    assert len(load_images(file)) == 80


def test_a_missing_shard_or_split_is_noticed(tmp_path):
    folder = tmp_path / "images/cifar10"
    write_parquet(folder / "train-00000-of-00003.parquet", color(10))
    write_parquet(folder / "train-00002-of-00003.parquet", color(10))
    with pytest.raises(
        ValueError, match="name: .*cifar10 holds 2 of the 3 shards of 'train'"
    ):
        load_images("cifar10", data_dir=tmp_path)
    write_parquet(folder / "train-00001-of-00003.parquet", color(10))
    with pytest.raises(
        ValueError, match="name: the files found for 'cifar10' lack the split 'test'"
    ):
        load_images("cifar10", data_dir=tmp_path)
    # as a folder of its own it is a set with one split
    assert len(load_images(folder)) == 24
    assert len(load_images(folder / "train-00000-of-00003.parquet")) == 8
    write_parquet(tmp_path / "odd" / "validation.parquet", color(10))
    write_parquet(tmp_path / "odd" / "test.parquet", color(10))
    with pytest.raises(
        ValueError, match=r"name: .* has the splits \['test', 'validation'\]; train"
    ):
        load_images(tmp_path / "odd")


# ------------------------------------------------------------------------------------
# hub


def pretend_cached(tmp_path, repo, splits):
    "What `datasets` leaves in its cache after fetching a set from the hub."
    files = {
        s: str(write_parquet(tmp_path / "made" / f"{s}.parquet", pics))
        for s, pics in splits.items()
    }
    datasets.load_dataset(
        "parquet", data_files=files, cache_dir=str(tmp_path / "build")
    )
    made = next(p.parent for p in (tmp_path / "build").rglob("dataset_info.json"))
    home = (
        tmp_path / "cache" / repo.replace("/", "___") / "default" / "0.0.0" / "abcdef"
    )
    home.parent.mkdir(parents=True)
    made.rename(home)
    for arrow in home.glob("parquet-*.arrow"):
        arrow.rename(home / arrow.name.replace("parquet", repo.split("/")[-1]))
    info = home / "dataset_info.json"
    info.write_text(
        info.read_text().replace(
            '"dataset_name": "parquet"', f'"dataset_name": "{repo.split("/")[-1]}"'
        )
    )
    return home


def test_the_cache_of_the_hub_is_enough_and_no_network_is_asked(tmp_path, asked):
    pics = color(60)
    home = pretend_cached(
        tmp_path,
        "someone/things",
        {"train": pics[:40], "valid": pics[40:50], "test": pics[50:]},
    )
    asked.clear()
    sets = all_rows("someone/things")
    assert [as_set(s) for s in sets.values()] == [
        {x.tobytes() for x in part} for part in (pics[:40], pics[40:50], pics[50:])
    ]
    assert not asked and datasets.config.HF_HUB_OFFLINE == OFFLINE, (
        "the switch was left on"
    )
    for arrow in home.glob("*.arrow"):
        arrow.write_bytes(b"damaged")
    with pytest.raises(FileNotFoundError) as e:
        load_images("someone/things")
    assert "the hub's cache on this machine, someone/things: " in str(
        e.value
    ) and "the hub, someone/things: " in str(e.value)
    assert asked or OFFLINE


PROBE = """
import sys, time
from et_nbdev.vision.data import load_images
begin = time.perf_counter()
for name in sys.argv[1:]:
    try:
        load_images(name)
    except FileNotFoundError as e:
        print(e)
print("seconds", time.perf_counter() - begin)
"""


@pytest.mark.parametrize(
    "how",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["switched off", "unreachable"],
)
def test_offline_says_what_was_tried_and_what_to_do_and_is_quick(tmp_path, how):
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("ET_DATA", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    }
    run = subprocess.run(
        [sys.executable, "-c", PROBE, "cifar10", "nobody/nothing", "nonsense"],
        capture_output=True,
        text=True,
        timeout=120,
        env=env
        | {
            "HF_HOME": str(tmp_path),
            "ET_DATA": str(tmp_path / "none"),
            "JAX_PLATFORMS": "cpu",
        }
        | how,
    )
    assert run.returncode == 0, run.stderr
    cifar, nobody, nonsense = run.stdout.split("name: no pictures called")[1:]
    for words in (
        "'cifar10' were found",
        "data_dir: not set",
        "ET_DATA: /",
        str(tmp_path / "none/images/cifar10"),
        "uoft-cs/cifar10: ",
        "the hub's cache on this machine",
        "What helps: going online",
        "images/cifar10",
        "digits (no network)",
    ):
        assert words in cifar, f"{words!r} is missing in {cifar}"
    assert "a path: " in nobody and "nobody/nothing: " in nobody
    assert (
        "names there have the form user/name" in nonsense
        and "tiny-imagenet" in nonsense
    )
    assert float(run.stdout.split()[-1]) < 20


def test_importing_is_light_and_an_abandoned_stream_does_not_hold_up_the_end():
    code = (
        "import sys, numpy as np, et_nbdev.vision.data as d; heavy = {'datasets',"
        " 'torch', 'dgl', 'matplotlib', 'PIL', 'sklearn', 'skimage', 'dm_pix'};assert"
        " not heavy & set(sys.modules), heavy & set(sys.modules); stream ="
        " d.batches(np.zeros(100), 2, seed=0); next(stream); print('end')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0 and run.stdout.strip() == "end", run.stderr


# ------------------------------------------------------------------------------------
# real data


@pytest.mark.parametrize(
    "name, counts, size",
    [
        ("cifar10", (45_000, 5_000, 10_000), 32),
        ("tiny-imagenet", (70_000, 5_000, 10_000), 64),
        ("imagenet-sample", (240, 30, 30), 224),
    ],
)
def test_real_sets(et_data, monkeypatch, name, counts, size):
    monkeypatch.setenv("ET_DATA", str(et_data))
    sets = all_rows(name)
    assert tuple(len(s) for s in sets.values()) == counts
    assert not set(sets["train"].rows) & set(sets["validation"].rows)
    batch = next(batches(sets["train"], 64, seed=0))
    assert batch.shape == (64, size, size, 3) and batch.std() > 30
    mean, std = sets["validation"].statistics()
    assert ((0.3 < mean) & (mean < 0.6)).all() and ((0.2 < std) & (std < 0.35)).all()
    if name == "tiny-imagenet":  # some of its pictures are gray
        stored = sets["test"].fetch(np.arange(2000))
        gray = [
            i
            for i, (_, picture) in enumerate(stored)
            if data.open_picture(picture).mode == "L"
        ]
        assert gray and sets["test"][gray].shape == (len(gray), 64, 64, 3)


# ------------------------------------------------------------------------------------
# folders as strangers have them: what is read, and what is said of the rest


def paint(file, level=0, mode=np.uint8, side=8):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side), level, mode)).save(file)


def ten(folder, level=0, suffix="png"):
    for i in range(10):
        paint(folder / f"{i}.{suffix}", level)


def everything(folder):
    parts = [load_images(folder, s)[:] for s in ("train", "validation", "test")]
    return np.concatenate([part[:, 0, 0, 0] for part in parts])


def hidden_copies(d):
    ten(d / "cats")
    for place in (".ipynb_checkpoints", ".thumbnails/a", "__MACOSX", ".Trash-0/files"):
        ten(d / "cats" / place, 99)
    for place in ("@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"):
        ten(d / place, 99)
    paint(d / "cats" / "._0.png", 99)


def linked(d):
    ten(d / "cats", 1)
    ten(d.parent / "far", 2)
    (d / "dogs").symlink_to(d.parent / "far")


def linked_twice_and_in_a_circle(d):
    ten(d / "cats", 1)
    (d / "again").symlink_to(d / "cats")
    (d / "cats" / "up").symlink_to(d)


def beside_a_table(d):
    ten(d, 1)
    names = [f"{i}.png" for i in range(10)]
    pd.DataFrame({"file_name": names, "text": "a cat"}).to_parquet(d / "meta.parquet")


def beside_a_table_that_calls_them_images(d):
    ten(d / "a", 1)
    names = [f"{i}.png" for i in range(10)]
    pd.DataFrame({"image": names, "text": "x"}).to_parquet(d / "meta.parquet")


def classes(d, *names):
    for level, name in enumerate(names):
        ten(d / name, level)


def other_suffixes(d):
    for i, suffix in enumerate(("PNG", "jpe", "tga", "webp", "tiff", "JPEG", "bmp")):
        paint(d / f"{i}.{suffix}", 1)
    ten(d, 1)


@pytest.mark.parametrize(
    "make, levels, left_out",
    [
        (hidden_copies, {0: 10}, None),
        (linked, {1: 10, 2: 10}, None),
        (linked_twice_and_in_a_circle, {1: 10}, None),
        (beside_a_table, {1: 10}, r"10 pictures .*left out: 1 .*\.parquet"),
        (beside_a_table_that_calls_them_images, {1: 10}, r"left out: 1 .*\.parquet"),
        (other_suffixes, {1: 17}, None),
        # one word of many, and no split that would fit beside it
        (
            lambda d: classes(d, "flask", "test_tube", "valid-ticket"),
            {0: 10, 1: 10, 2: 10},
            None,
        ),
        (
            lambda d: classes(d, "bus_interior", "train_interior", "gate"),
            {0: 10, 1: 10, 2: 10},
            None,
        ),
        (
            lambda d: classes(
                d, *(f"{s}/{c}" for s in SPLITS for c in ("gun", "test_tube"))
            ),
            dict.fromkeys(range(6), 10),
            None,
        ),
        (
            lambda d: (ten(d), (d / "notes.txt").write_text("-"), (d / "x").touch()),
            {0: 10},
            r"10 pictures .* left out: 2 that are no pictures.* \(.txt, x\)",
        ),
    ],
)
def test_every_picture_of_a_folder_is_read_once(tmp_path, make, levels, left_out):
    (folder := tmp_path / "set").mkdir()
    make(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = np.unique(everything(folder), return_counts=True)
    assert dict(zip(*map(np.ndarray.tolist, found))) == levels
    if left_out is None:
        assert not said
    else:
        assert re.search(left_out, str(said[0].message))


def splits(d, **levels):
    for split, level in levels.items():
        ten(d / split, level)


def tables(d, **pictures):
    for name, count in pictures.items():
        write_parquet(d / f"{name.replace('__', '/')}.parquet", color(count))


def link(here, there):
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(there)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda d: ((d / "train").mkdir(), splits(d, test=9)), "train is the split"),
        (
            lambda d: splits(d, Train=1, training=2),
            "Train, .*training two are the same",
        ),
        (lambda d: splits(d / "xray", train=1, test=2), "xray/t.* inside of .*xray;"),
        (lambda d: splits(d / "train", cats=1, test=2), "train/test is called like"),
        (lambda d: splits(d, test=9), "the split 'test' alone"),
        (
            lambda d: splits(d, train=1, test=2, cats=3),
            "/test is called like a split, and .*/cats beside it is not",
        ),
        (lambda d: splits(d, cats=1, train=2), "/train is called .*/cats beside"),
        (lambda d: splits(d, cats=1, test_images=2), "test_images is called .*/cats"),
        (lambda d: classes(d, "pets", "pets-test", "x"), "pets-test is called .*/pets"),
        (lambda d: splits(d, steam_train=1, test_a=2, b=3), "is called .*/b beside"),
        (lambda d: splits(d, a_train=1, b_train=2), "a_train, .*b_train two are"),
        (lambda d: splits(d, train_val=1, test=2), "train_val names two splits"),
        (
            lambda d: (
                splits(d, train=1, test=2),
                link(d / "test/z.png", d / "train/3.png"),
            ),
            "(test/z|train/3).png and .*(test/z|train/3).png are one file, in two",
        ),
        (
            lambda d: (splits(d, train=1), link(d / "test", d / "train")),
            "0.png and .*0.png are one file, in two splits",
        ),
        (lambda d: tables(d, train=9, val=9, valid=9), "val.*, .*valid.* two are the"),
        (
            lambda d: tables(d, train=9, test=9, extra=9),
            "is called .*/extra.*beside it",
        ),
        (lambda d: tables(d, train__test=9), "test.parquet names two splits"),
        (lambda d: tables(d, train__0=0, test__0=9), "train/0.* 'train' and holds no"),
        (
            lambda d: (
                tables(d, train=9),
                link(d / "test.parquet", d / "train.parquet"),
            ),
            "are one file, in two splits",
        ),
        (
            lambda d: (tables(d, t=9), ten(d / "a")),
            "tables of pictures, as .*/t.parquet, and 10 picture files, as .*/a/",
        ),
        (lambda d: (d / "a.zip").touch(), r"but \.zip; archives have to be unpacked"),
        (lambda d: None, "but nothing"),
    ],
)
def test_a_folder_that_can_be_read_in_two_ways_is_refused(tmp_path, make, words):
    (folder := tmp_path / "set").mkdir()
    make(folder)
    with pytest.raises(ValueError, match=f"^name: .*{words}"):
        load_images(folder, "train")


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "VAL", "Testing"),
        ("train2017", "val2017", "test2017"),
        ("train_images", "valid-images", "ImagesTest"),
        ("pets-trn", "pets.dev", "pets tst"),
        ("seg_trainset", "seg_valset", "seg_evaluation"),
        ("trainval", "validation", "holdout"),
    ],
)
@pytest.mark.parametrize("kind", ["folders", "tables"])
def test_named_splits_are_kept_whatever_they_are_called(tmp_path, names, kind):
    for level, name in enumerate(names, 1):
        if kind == "folders":
            ten(tmp_path / name, level)
        else:
            flat = np.full((8, 8, 3), level, np.uint8)
            write_parquet(tmp_path / f"{name}.parquet", [flat] * 10)
    if kind == "folders":
        for name in ("all", "zz"):  # nothing of its own
            (tmp_path / name).symlink_to(tmp_path / names[0])
        paint(tmp_path / "cover.png", 9)
        said = pytest.warns(match="30 pictures .*10 test.*left out: 1 that ")
    else:
        said = contextlib.nullcontext()
    with said:
        parts = [load_images(tmp_path, s)[:] for s in ("train", "validation", "test")]
    assert [np.unique(part).tolist() for part in parts] == [[1], [2], [3]]
    assert [len(part) for part in parts] == [10] * 3


@pytest.mark.parametrize("name", ["a.png", "a.zip", "a.txt", "a.parquet"])
def test_a_single_file_that_is_no_table_gets_a_plain_answer(tmp_path, name):
    (tmp_path / name).write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=f"^name: .*{name} is damaged.*their folder"):
        load_images(tmp_path / name)


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_deep_gray_levels_are_scaled_by_the_range_in_use(tmp_path, bits):
    ramp = np.linspace(0, 2**bits - 1, 4096).reshape(64, 64).astype(np.uint16)
    for i, part in enumerate((1, 1, 1, 3)):  # one picture is darker, and stays so
        Image.fromarray(ramp // part).save(tmp_path / f"{i}.png")
    found = np.concatenate(
        [load_images(tmp_path, s, size=64)[:] for s in ("train", "validation", "test")]
    )
    assert sorted(found.max((1, 2, 3)).tolist()) == [85, 255, 255, 255]
    assert len(np.unique(found)) == 256
