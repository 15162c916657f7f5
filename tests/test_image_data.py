"""Pictures as tokens: nbs/20_image_data.ipynb and the readers of
nbs/engine/pictures.ipynb, on arrays, on real files and, where there are any, on real
data.
"""

import io
import itertools
import os
import re
import shutil
import socket
import struct
import threading
import time
import warnings
import zlib

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
    Images,
    batches,
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
pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
SPLITS = ("train", "validation", "test")
OFFLINE = datasets.config.HF_HUB_OFFLINE
rng = np.random.default_rng(0)
close, equal = np.testing.assert_allclose, np.testing.assert_array_equal


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No data but the test's own, and an empty cache. A test of real data asks for
    `et_data`, which keeps the folder.
    """
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def encode(img, format="PNG", **options):
    img = Image.fromarray(img) if isinstance(img, np.ndarray) else img
    file = io.BytesIO()
    img.save(file, format, **options)
    return file.getvalue()


def color(n, size=8):
    return [rng.integers(0, 256, (size, size, 3), np.uint8) for _ in range(n)]


def write_parquet(file, pictures):
    encoded = lambda p: p if isinstance(p, bytes) else encode(p)
    made = [None if p is None else dict(bytes=encoded(p), path=None) for p in pictures]
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"label": list(range(len(made))), "image": made}), file)
    return file


def all_rows(name, **options):
    return {s: load_images(name, s, **options) for s in SPLITS}


def as_set(images):
    return {x.tobytes() for x in images[:]}


# --- arrays

DTYPES = st.sampled_from(["uint8", "float32"])
FEW = st.integers(1, 4)


@given(st.lists(st.integers(1, 3), max_size=2), FEW, FEW, FEW, DTYPES)
def test_patches_are_where_the_formula_says_and_the_inverse_is_exact(
    batch, n, p, C, dtype
):
    S = n * p
    x = np.arange(np.prod([*batch, S, S, C])).astype(dtype).reshape(*batch, S, S, C)
    tokens = patchify(x, p)
    assert tokens.shape == (*batch, n * n, p * p * C) and tokens.dtype == x.dtype
    for A, i, j, k in itertools.product(range(n * n), range(p), range(p), range(C)):
        pixel = x[..., A // n * p + i, A % n * p + j, k]
        equal(tokens[..., A, (i * p + j) * C + k], pixel)
    equal(unpatchify(tokens, S, p), x)


def test_normalize_and_back():
    x = rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
    mean, std = np.float32([0.2, 0.4, 0.6]), np.float32([0.1, 0.2, 0.3])
    z = normalize(x, mean, std)
    assert z.dtype == np.float32 and isinstance(z, np.ndarray)
    close(z, (x / 255 - mean) / std, rtol=1e-5, atol=1e-5)
    close(denormalize(z, mean, std), x / 255, atol=1e-6)
    close(normalize(x / 255, mean, std), z, atol=1e-5)
    traced = jax.jit(lambda x: normalize(x, mean, std))(x)
    assert traced.dtype == jnp.float32
    close(traced, z, atol=1e-5)
    one = normalize(jnp.asarray(x[0]), 0.5, 0.5)  # one number for all channels
    close(one, x[0] / 127.5 - 1, atol=1e-6)


# few shapes: each is compiled
@given(st.data(), st.sampled_from([(1, 1), (3, 2), (2, 7), (5, 30)]), st.floats(0, 1))
def test_occlusion_counts_are_exact(draw, shape, share):
    n, key = draw.draw(st.integers(0, shape[1])), draw.draw(st.integers(0, 99))
    occluded, masked = found = occlude(jax.random.key(key), *shape, n, share)
    assert all(a.shape == shape and a.dtype == bool for a in found)
    assert (occluded.sum(1) == n).all() and not (masked & ~occluded).any()
    assert (masked.sum(1) == round((1 - share) * n)).all()


def off(counts, of, share):
    "The largest deviation from equal shares, in standard deviations."
    return np.abs(counts - of * share).max() / np.sqrt(of * share * (1 - share))


def test_no_token_is_special():
    occluded, masked = map(np.array, occlude(jax.random.key(0), 20_000, 25, 10, 0.3))
    for chosen, share in (occluded, 0.4), (masked, 0.28), (occluded & ~masked, 0.12):
        assert off(chosen.sum(0), 20_000, share) < 5
    together = (occluded.T.astype(int) @ occluded)[~np.eye(25, dtype=bool)]
    assert off(together, 20_000, 10 * 9 / (25 * 24)) < 6, "some tokens prefer company"


def test_statistics_are_exact_and_never_zero():
    x = rng.integers(0, 256, (300, 4, 4, 3), np.uint8)
    mean, std = Images.statistics(x)
    assert mean.dtype == std.dtype == np.float32
    close(mean, (x / 255).mean((0, 1, 2)), rtol=1e-6)
    close(std, (x / 255).std((0, 1, 2)), rtol=1e-6)
    white = Images.statistics(np.full((3, 4, 4, 1), 255, np.uint8))
    close(white, [[1], [1 / 255]], rtol=1e-6)


# --- augmentation

views = jax.jit(augment, static_argnames=("scale", "ratio", "flip", "jitter"))
middle = (np.arange(16) + 0.5) / 16
ramp = np.stack(
    [*np.meshgrid(middle, middle, indexing="ij"), np.full((16, 16), 0.5)], -1
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
    close(view[..., 2], 0.5, atol=1e-5)
    if scale[0] == 0.25:  # half as wide as the picture: it begins between 0 and a half
        begin = view[:, 8, 8, :2] - 8.5 / 32
        assert (begin.min(0) < 0.01).all() and (begin.max(0) > 0.49).all()
        assert (np.abs(begin.mean(0) - 0.25) < 0.04).all()
        assert np.abs(np.corrcoef(begin.T)[0, 1]) < 0.2


def test_parts_of_an_augmentation_do_what_they_are_called():
    key, whole = jax.random.key(0), dict(scale=(1, 1), ratio=(1, 1))
    x, plain = rng.integers(0, 256, (4, 16, 16, 3), np.uint8), dict(whole, jitter=0)
    close(views(key, x, flip=0, **plain), x / 255, atol=1e-5)
    close(views(key, x, flip=1, **plain), x[:, :, ::-1] / 255, atol=1e-5)
    many = np.asarray(views(key, np.tile(x[:1], (400, 1, 1, 1)), **plain))
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
    gray = np.repeat(rng.random((4, 8, 8, 1), np.float32), 3, -1)
    out = np.asarray(views(key, gray, flip=0, **whole))
    close(out, out[..., :1].repeat(3, -1), atol=1e-4)
    assert np.abs(out - gray).max() > 0.05
    flat = np.broadcast_to(np.float32([0.6, 0.5, 0.4]), (50, 8, 8, 3))
    found = np.asarray(views(key, flat, flip=0, **whole))[:, 0, 0]
    spread = (found[:, 0] - found[:, 2]) / found.mean(1)
    assert spread.min() < 0.35 and spread.max() > 0.45
    assert views(key, gray[..., :1]).shape == (4, 8, 8, 1)


# --- fills

KNOWN = rng.integers(256, size=(40, 12, 12, 3), dtype=np.uint8)


@pytest.mark.parametrize("C", [1, 3])
def test_fills_leave_what_is_open_and_never_see_what_is_not(C):
    x, known = rng.random((4, 12, 12, C), np.float32), KNOWN[..., :C]
    occluded = np.array(occlude(jax.random.key(0), 4, 36, 18)[0])
    occluded[1], occluded[2] = True, False  # all hidden, none hidden
    hidden = unpatchify(occluded[..., None].repeat(4, -1), 12, 2)[..., 0]
    other = np.where(hidden[..., None], rng.random(x.shape, np.float32), x)
    before = x.copy()
    for name, fill in (FILLS | fills_from(known)).items():
        filled = fill(x, occluded, 2)
        assert filled.dtype == np.float32 and filled.shape == x.shape
        equal(x, before)
        equal(filled[~hidden], x[~hidden])
        equal(fill(other, occluded, 2), filled)
        assert (filled != x)[hidden].any()
        if name in FILLS:
            assert filled.min() >= 0 and filled.max() <= 1 and (filled[1] == 0.5).all()


def test_fills_do_what_they_are_called():
    x, known = rng.random((2, 12, 12, 3), np.float32), KNOWN / 255
    occluded = np.asarray(occlude(jax.random.key(1), 2, 36, 18)[0])
    found = {n: f(x, occluded, 2) for n, f in (FILLS | fills_from(KNOWN)).items()}
    mean, near = found["mean of the open pixels"], found["nearest open pixel"]
    hidden = unpatchify(occluded[..., None].repeat(4, -1), 12, 2)[..., 0]
    for b, i, j in np.argwhere(hidden):
        close(mean[b, i, j], x[b][~hidden[b]].mean(0), atol=1e-6)
        open_ = np.argwhere(~hidden[b])
        distance = ((open_ - [i, j]) ** 2).sum(1)
        candidates = x[b][tuple(open_[distance == distance.min()].T)]
        assert (candidates == near[b, i, j]).all(1).any()
    for name, k in ("nearest neighbor", 1), ("seven nearest neighbors", 7):
        for x_, h, y in zip(x, hidden, found[name]):
            order = np.argsort([((t[~h] - x_[~h]) ** 2).sum() for t in known])
            close(y[h], known[order[:k]].mean(0)[h], atol=1e-5)
    everywhere = np.broadcast_to(known.mean(0), x.shape)
    close(found["mean training picture"][hidden], everywhere[hidden], atol=1e-5)
    inside = np.zeros((1, 64), bool)
    inside[0, [27, 36]] = True  # a plane is biharmonic
    close(data.fill_biharmonic(ramp[None], inside, 2)[0], ramp, atol=1e-4)


def test_a_gaussian_knows_what_four_numbers_make():
    mixed = rng.normal(size=(3000, 4)) @ rng.normal(size=(4, 36))
    pixels = np.clip(128 + 20 * mixed, 0, 255).astype(np.uint8).reshape(-1, 6, 6, 1)
    fills, images = fills_from(pixels[:2900]), pixels[2900:]
    hidden = rng.random((100, 9)) < 0.5
    error = lambda name: np.abs(fills[name](images, hidden, 2) - images / 255).mean()
    assert error("Gaussian") < 0.1 * error("mean training picture")
    assert "Gaussian" not in fills_from(np.zeros((3, 20, 20, 3), np.uint8))


# --- batches


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n, B", [(1, 1), (10, 3), (12, 4), (40, 7)])
def test_a_resumed_stream_is_the_same_stream(n, B, shuffle):
    stream = lambda **more: batches(np.arange(n), B, seed=5, shuffle=shuffle, **more)
    whole = [*itertools.islice(stream(), 17)]
    equal([*itertools.islice(stream(start=13), 4)], whole[13:])
    three = list(stream(epochs=3))
    assert len(three) == 3 * (n // B) and {len(b) for b in three} == {B}
    equal(three[:17], whole[: len(three)])
    for epoch in np.split(np.array(three).reshape(-1), 3):
        assert len(np.unique(epoch)) == len(epoch), "a picture twice in an epoch"
        assert shuffle or (epoch == np.arange(len(epoch))).all()
    assert list(stream(epochs=2, start=999)) == []
    if n == 40 and shuffle:
        other = batches(np.arange(n), B, seed=6)
        first, second = whole[:5], whole[5:10]
        assert not any(map(np.array_equal, first, second)) and not any(
            map(np.array_equal, first, other)
        )


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


def test_loading_runs_ahead_and_ends_with_the_consumer_or_an_error():
    loaders = lambda: [t for t in threading.enumerate() if "et_nbdev.bat" in t.name]
    stream = batches(Fragile(), 4, seed=0, shuffle=False)
    assert [len(next(stream)) for _ in range(3)] == [4, 4, 4]
    with pytest.raises(ValueError, match="row 13 is broken"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
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


# --- splits

TWO, THREE = {"train": 30, "test": 9}, {"train": 30, "validation": 12, "test": 9}


@pytest.mark.parametrize(
    "name, there, found, tested",
    [
        # what the first calls validation; the test split of the second has no labels
        ("tiny-imagenet", {"train": 30, "validation": 12}, (27, 3, 12), "validation"),
        ("imagenet-1k", THREE, (27, 3, 12), "validation"),
        ("some/thing", THREE, (30, 12, 9), "test"),
        ("some/thing", TWO | {"unlabeled": 99}, (27, 3, 9), "test"),
        ("some/thing", {"train": 30, "validation": 12}, (27, 3, 12), "validation"),
        *(
            ("some/thing", {s: 30}, (24, 3, 3), None)
            for s in ("validation", "pictures")
        ),
        ("few", {"pictures": 3}, (1, 1, 1), None),
        ("many", {"train": 200_000, "test": 9}, (190_000, 10_000, 9), "test"),
    ],
)
def test_which_split_is_which(name, there, found, tested):
    "What is carved out of one source is a partition, and never another one."
    source = {s: data.Source(n, lambda rows: []) for s, n in there.items()}
    rows = {s: data.choose(source, s, name) for s in SPLITS}
    assert tuple(len(own) for own, _ in rows.values()) == found
    for source_of in {id(own): own for _, own in rows.values()}.values():
        inside = [rows[s][0] for s in SPLITS if rows[s][1] is source_of]
        equal(np.sort(np.concatenate(inside)), np.arange(source_of.count))
    assert tested is None or rows["test"][1] is source[tested]
    for s in SPLITS:
        equal(data.choose(source, s, name)[0], rows[s][0])


def test_digits_and_the_fixed_permutation_are_those_of_every_machine():
    from sklearn.datasets import load_digits

    # published splits depend on it
    assert list(data.permutation(10, 2302)) == [2, 0, 5, 7, 8, 6, 4, 9, 3, 1]
    sets = all_rows("digits")
    assert [len(s) for s in sets.values()] == [1197, 200, 400]
    assert list(sets["validation"].rows[:5]) == [4, 7, 21, 25, 27]
    x = sets["train"][:]
    assert x.shape == (1197, 8, 8, 1) and x.dtype == np.uint8
    levels = load_digits().images[sets["train"].rows]
    close(x[..., 0] / 255 * 16, levels, atol=0.04)
    assert load_images("digits", size=16)[0].shape == (16, 16, 1)


def test_images_are_indexed_like_an_array():
    images = load_images("digits", "test")
    x = images[:]
    assert "400 pictures, 8×8×1" in repr(images) and images.name == "digits"
    table, even = np.array([[0, 1], [2, 3]]), np.arange(400) % 50 == 0
    for index in (3, -1, np.int64(7), slice(2, 9, 3), [4, 1, 1], table, even):
        equal(images[index], x[index])
    assert images[0:0].shape == (0, 8, 8, 1)
    with pytest.raises(IndexError):
        images[400]


# --- picture files

HALF = np.zeros((20, 40), np.uint8)
HALF[:, 20:] = 255
GRAY, CLEAR = Image.fromarray(HALF), 255 - HALF


TURNED = Image.Exif()
TURNED[0x0112] = 6  # a quarter, clockwise
jpeg = lambda img, **options: encode(img, "JPEG", quality=95, **options)
KINDS = {
    "rgb.png": encode(HALF[..., None].repeat(3, -1)),
    "gray.png": encode(HALF),
    "bits.png": encode(GRAY.convert("1")),
    "16bit.png": encode(HALF.astype(np.uint16) * 257),
    "32bit.tif": encode(Image.fromarray(HALF.astype(np.int32) * 257), "TIFF"),
    "palette.png": encode(GRAY.convert("P")),
    "cmyk.jpg": jpeg(GRAY.convert("CMYK")),
    # black, clear on the right: white shows
    "alpha.png": encode(np.dstack([0 * HALF, 0 * HALF, 0 * HALF, CLEAR])),
    "gray_alpha.png": encode(Image.fromarray(np.dstack([0 * HALF, CLEAR]), "LA")),
    "keyed.png": encode(
        np.dstack([HALF, 0 * HALF, 0 * HALF]), transparency=(255, 0, 0)
    ),
    "gif.gif": encode(GRAY, "GIF"),
    "webp.webp": encode(GRAY.convert("RGB"), "WEBP", lossless=True),
    "exif.jpg": jpeg(Image.fromarray(np.rot90(HALF)), exif=TURNED),
    "bad_exif.jpg": jpeg(GRAY, exif=b"Exif\0\0MM\0*garbage"),
    "no_exif.png": encode(GRAY, exif=b"Exif\0\0this is no tag at all"),
    # the middle is kept
    "tall.png": encode(np.pad(HALF[:, 10:30], ((40, 40), (0, 0)), constant_values=77)),
    "large.jpg": jpeg(GRAY.resize((400, 200))),
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


def test_deep_gray_levels_are_scaled_not_cut(tmp_path):
    x = decode(encode(np.array([[0, 32896], [65535, 400]], np.uint16)), 2, 1)
    equal(x[..., 0], [[0, 128], [255, 2]])
    tiff = lambda level: encode(Image.fromarray(np.full((4, 4), level)), "TIFF")
    for level, said in (np.int32(70_000), "70000 to"), (np.float32(0.5), "floating"):
        with pytest.raises(ValueError, match=said):
            decode(tiff(level), 4, 1)
    for bits in (8, 10, 12, 14, 16):  # by the range in use
        folder = tmp_path / str(bits)
        folder.mkdir()
        slope = np.linspace(0, 2**bits - 1, 4096).reshape(64, 64).astype(np.uint16)
        for i, part in enumerate((1, 1, 1, 3)):  # one picture is darker, and stays so
            Image.fromarray(slope // part).save(folder / f"{i}.png")
        found = np.concatenate([x[:] for x in all_rows(folder, size=64).values()])
        assert sorted(found.max((1, 2, 3)).tolist()) == [85, 255, 255, 255]
        assert len(np.unique(found)) == 256


# --- what is there, and what is said of it: trees of files, as strangers have them


def plant(folder, tree):
    """Files by their names: a level is ten pictures of it, in a folder or, called so, in
    a table; with a suffix it is one picture. "-> x" is a link, None an empty folder.
    Names alone have levels from 0 on.
    """
    folder.mkdir(exist_ok=True)
    tree = {n: i for i, n in enumerate(tree.split())} if isinstance(tree, str) else tree
    for name, what in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        flat = lambda what=what: np.full((8, 8, 3), what, np.uint8)
        if what is None:
            path.mkdir()
        elif isinstance(what, bytes):
            path.write_bytes(what)
        elif isinstance(what, dict):
            pd.DataFrame(what).to_parquet(path)
        elif isinstance(what, str):
            path.symlink_to(folder / what.removeprefix("-> "))
        elif isinstance(what, list) or path.suffix == ".parquet":
            write_parquet(path, what if isinstance(what, list) else [flat()] * 10)
        elif path.suffix:
            Image.fromarray(flat()).save(path)
        else:
            plant(path, {f"{i}.png": what for i in range(10)})
    return folder


LEVELS = {"a.PNG": 1, "b.jpe": 1, "c.tga": 1, "d.webp": 1, "e.tiff": 1, "f.JPEG": 1}
TEN = [f"{i}.png" for i in range(10)]
HIDES = ".ipynb_checkpoints", ".thumbnails/a", "__MACOSX", ".Trash-0/files", "@eaDir"
HIDES = *HIDES, "$RECYCLE.BIN/a", "System Volume Information", "lost+found"
HIDDEN = {f"cats/{folder}": 99 for folder in HIDES}
WITH_TABLE = {"cats": 1, "m.parquet": {"file_name": TEN, "text": "a cat"}}
CLASSES = {f"{s}/{c}": 3 for s in SPLITS for c in ("gun", "test_tube")}


@pytest.mark.parametrize(
    "tree, levels, left_out",
    [
        ({"cats": 0, "cats/._0.png": 99} | HIDDEN, {0: 10}, None),
        ({"cats": 1, "../far": 2, "dogs": "-> ../far"}, {1: 10, 2: 10}, None),
        # twice, and in a circle
        ({"cats": 1, "again": "-> cats", "cats/up": "-> ."}, {1: 10}, None),
        ({"a": 1, "a/z.png": "-> a/3.png"}, {1: 10}, None),
        (WITH_TABLE, {1: 10}, r"10 pictures .*left out: 1 .*\.parquet"),
        (LEVELS | {"x": 1}, {1: 16}, None),
        ({"a": 0, "n.txt": b"-", "x": b""}, {0: 10}, r"out: 2 that are .* \(.txt, x\)"),
        # one word of many, and no split that would fit beside it
        ("flask test_tube valid-ticket", {0: 10, 1: 10, 2: 10}, None),
        ("bus_in train_in gate", {0: 10, 1: 10, 2: 10}, None),
        (CLASSES, {3: 60}, "pictures compared are in two splits, as .*png; remove"),
        # only folders and tables are splits: no pictures, lists or archives
        ({f"a/{c}_{i}.png": 1 for c in ("train", "bus") for i in TEN}, {1: 20}, None),
        ({"a": 1, "test.csv": b"file,split\na/0.png,3"}, {1: 10}, "left out: 1"),
    ],
)
def test_every_picture_of_a_folder_is_read_once(tmp_path, tree, levels, left_out):
    folder = plant(tmp_path / "set", tree)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parts = [x[:, 0, 0, 0] for x in (s[:] for s in all_rows(folder).values())]
    found = np.unique(np.concatenate(parts), return_counts=True)
    assert dict(zip(*map(np.ndarray.tolist, found))) == levels
    assert bool(said) == bool(left_out)
    assert not said or re.search(left_out, str(said[0].message))


@pytest.mark.parametrize("kind", ["", ".parquet"])
@pytest.mark.parametrize(
    "names",
    [
        ("Train", "VAL", "Testing"),
        ("train2017", "val2017", "test2017"),
        ("train_images", "valid-images", "ImagesTest"),
        ("pets-trn", "pets dev", "pets tst"),
        ("seg_trainset", "seg_valset", "seg_evaluation"),
        ("trainval", "validation", "holdout"),
        ("xtrain", "xval", "xtest"),
        ("train", "val", "held_out"),
    ],
)
def test_named_splits_are_kept_whatever_they_are_called(tmp_path, names, kind):
    folder = plant(tmp_path / "set", {n + kind: i for i, n in enumerate(names)})
    if not kind:  # a link has nothing of its own, and a cover is no part of a split
        plant(folder, dict.fromkeys(("all", "zz"), f"-> {names[0]}") | {"cover.png": 9})
        with pytest.warns(match="30 pictures .*10 test.*left out: 1 that "):
            load_images(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [s[:] for s in all_rows(folder).values()]
    assert [np.unique(part).tolist() for part in parts] == [[0], [1], [2]]
    assert [len(part) for part in parts] == [10] * 3


@pytest.mark.parametrize(
    "tree, words",
    [
        ({"train": None, "test": 9}, "split 'train' that holds no"),
        ({"test": "-> train", "train": 1}, "split 'test' that holds no"),
        ("Train training", "training names .*Train names in other"),
        ("train_val test", "train_val names two splits"),
        ("xray/train xray/test", "xray/t.* inside of .*xray;"),
        ("train/cats train/test", "train/test is called like"),
        ("test", "the split 'test' alone"),
        ("train test cats", "/test is called .*/cats beside it is not"),
        ("cats train", "/train is called .*/cats beside"),
        ("cats test_images", "test_images is called .*/cats"),
        ("pets pets-test x", "pets-test is called .*/pets"),
        ("steam_train test_a b", "is called .*/b beside"),
        ("train.parquet val.parquet valid.parquet", "valid.p.* names .*val.parquet n"),
        ("train.parquet extra.parquet test.parquet", "extra.*beside it"),
        ("train/test.parquet", "test.parquet names two splits"),
        ({"train/0.parquet": [], "test/0.parquet": []}, "t/0.* and holds no picture"),
        ("validation.parquet test.parquet", "lacks the split 'train'"),
        ("train-00000-of-00002.parquet", "1 of the 2 shards of 'train'"),
        (
            "t.parquet a",
            "holds tables, as .*/t.parquet, and 10 picture files, as .*/a/",
        ),
        ("images masks", "/masks seems to tell of the pictures beside"),
        ("a/img a/gt", "a/gt seems to tell"),
        ("train train_labels test", "train_labels seems to tell"),
        ({"a.zip": b""}, r"but \.zip; archives have to be unpacked"),
        ({}, "but nothing"),
        ("a.png b.png", "3 or more pictures to divide, got 2"),
        ({f"{c}.png": b"text" for c in "cba"}, "no picture .* decoded .*file c.png"),
        ({"only.parquet": {"text": ["a"]}}, r"no column of pictures among \['text'\]"),
        ({"only.parquet": {"image": [1.0]}}, "column 'image' .* not hold encoded"),
        ({"only.parquet": b"GIF89a"}, "only.parquet cannot be read .*fetch it again;"),
        ({"only.png": b"GIF89a"}, "only.png is one file, and no .*name its folder"),
        ({"only.tar.gz": b"GIF89a"}, "only.tar.gz .*an archive has to be unpacked"),
    ],
)
def test_a_folder_that_holds_no_set_or_two_is_refused(tmp_path, tree, words):
    folder = plant(tmp_path / "set", tree)
    only = next((folder / name for name in tree if name.startswith("only")), folder)
    with pytest.raises(ValueError, match=f"^name: .*{words}"):
        load_images(only, "train")


@pytest.mark.parametrize("how", [os.link, shutil.copy])
def test_a_picture_in_two_splits_is_named(tmp_path, how):
    tree = {f"{s}/{i}.png": k * 20 + i for k, s in enumerate(SPLITS) for i in range(9)}
    folder = plant(tmp_path / "set", tree)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_images(folder)
    how(folder / "train/3.png", folder / "test/x.png")
    with pytest.warns(
        match="1 of the .*two splits, as .*test/x.png and .*train/3.png; "
    ):
        load_images(folder)


def test_colors_of_16_bits_have_to_use_them(tmp_path):
    chunk = lambda kind, data: (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )
    for bits, levels in (12, 16), (16, 256):  # Pillow does not write them
        row = b"\0" + np.linspace(0, 2**bits - 1, 192).astype(">u2").tobytes()
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 16, 2, 0, 0, 0))
        body = chunk(b"IDAT", zlib.compress(row * 64)) + chunk(b"IEND", b"")
        content = b"\x89PNG\r\n\x1a\n" + head + body
        folder = plant(tmp_path / str(bits), {f"{i}.png": content for i in range(5)})
        if levels == 256:
            assert load_images(folder)[:].max() == 255
            continue
        with pytest.raises(ValueError, match=f"^name: .*16 bits.*got {levels} levels"):
            load_images(folder)


def test_a_file_of_several_pages_is_no_picture():
    pages = dict(save_all=True, append_images=[GRAY])
    with pytest.raises(ValueError, match="^pages: expected one in a TIFF .*got 2"):
        decode(encode(GRAY, "TIFF", **pages), 8, 1)
    assert decode(encode(GRAY, "GIF", **pages), 8, 1).shape == (8, 8, 1)


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
    one = encode(Image.new(mode, shape))
    images = load_images(plant(tmp_path / "set", {f"{i}.png": one for i in range(5)}))
    assert (images.size, images.channels) == want
    assert images[:].shape[1:] == (want[0], *want)


PHOTO = encode(rng.integers(0, 256, (64, 64, 3), np.uint8), "JPEG")


@pytest.mark.parametrize(
    "tree, words",
    [
        ({"c/half.jpg": PHOTO[: len(PHOTO) // 2]}, ["file c/half.jpg"]),
        ({"c/text.jpg": b"this is no picture"}, ["file c/text.jpg"]),
        ({"c/empty.png": b""}, ["file c/empty.png"]),
        ({"t.parquet": [*color(7), None, b"nonsense", *color(11)]}, ["row 7", "row 8"]),
    ],
)
def test_a_damaged_picture_is_refused_by_name(tmp_path, tree, words):
    folder, said = plant(tmp_path / "set", tree), []
    if "t.parquet" not in tree:
        plant(folder, {f"{i}.png": encode(x) for i, x in enumerate(color(9, 64))})
    for images, i in ((x, i) for x in all_rows(folder).values() for i in range(len(x))):
        try:
            images[i]
        except ValueError as e:
            said.append(str(e))
    assert sorted(m[: m.index(" of")] for m in said) == [f"images: {w}" for w in words]
    assert all("repair or remove it" in m and "0x" not in m for m in said)


# --- tables, known names and the hub


@pytest.fixture
def asked(monkeypatch):
    "Names that were looked up on the network, which fails."
    names = []

    def getaddrinfo(host, *_, **__):
        names.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def test_known_names_in_the_layout_of_the_data_folder(tmp_path, monkeypatch, asked):
    pics, root = color(75, 10), tmp_path / "data"
    home = root / "images/cifar10"
    write_parquet(home / "train-00000-of-00002.parquet", pics[:30])
    write_parquet(home / "train-00001-of-00002.parquet", pics[30:60])
    write_parquet(home / "test-00000-of-00001.parquet", pics[60:])
    before = sorted(root.rglob("*"))
    monkeypatch.setenv("ET_DATA", str(root))
    sets = all_rows("cifar10", size=10)
    assert [len(s) for s in sets.values()] == [54, 6, 15]
    train, validation, test = map(as_set, sets.values())
    of = lambda pics: {x.tobytes() for x in pics}
    assert train | validation == of(pics[:60]) and not train & validation
    assert test == of(pics[60:])
    assert sorted(root.rglob("*")) == before, "something was written beside the data"
    assert load_images("cifar10").size == 32
    monkeypatch.setenv("ET_DATA", str(root / "images"))
    assert as_set(load_images("cifar10", "validation", size=10)) == validation
    assert as_set(load_images(home, "test", size=10)) == test
    # a single one of the files is a set with one split
    assert len(load_images(home / "train-00000-of-00002.parquet")) == 24
    assert not asked, "local files need no network"
    tree = {"train.parquet": 1, "test.parquet": 2}
    (tmp_path / "other").mkdir()
    plant(tmp_path / "other/cifar10", tree)
    monkeypatch.setenv("ET_DATA", str(tmp_path / "other"))
    assert len(load_images("cifar10")) == 9
    (tmp_path / "other/cifar10/test.parquet").unlink()
    with pytest.raises(ValueError, match="found for 'cifar10' lacks the split 'test'"):
        load_images("cifar10")


def test_the_column_of_pictures_is_found(tmp_path):
    pics = color(10)
    kinds = {"first": datasets.Value("string"), "look": datasets.Image()}
    shown = {"first": ["image"] * 10, "look": [Image.fromarray(x) for x in pics]}
    typed = datasets.Dataset.from_dict(shown, datasets.Features(kinds))
    typed.to_parquet(tmp_path / "typed.parquet")
    raw = pa.table({"image": [encode(x) for x in pics]})
    pq.write_table(raw, tmp_path / "raw.parquet")
    for name in ("typed", "raw"):
        found = as_set(load_images(tmp_path / f"{name}.parquet", "train"))
        assert len(found) == 8 and found < {x.tobytes() for x in pics}


def test_damaged_parquet_and_a_damaged_copy_are_named(tmp_path):
    file = write_parquet(tmp_path / "a/train.parquet", color(200))
    assert len(load_images(file)) == 160
    (arrow,) = (tmp_path / "cache").rglob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:500])
    with pytest.raises(ValueError, match="its copy below .*cache is, delete the copy"):
        load_images(file)
    arrow.unlink()
    arrow.parent.rename(tmp_path / "deleted")
    assert len(load_images(file)) == 160
    content = bytearray(file.read_bytes())
    # a sound footer, hollow pages
    content[1000 : len(content) - 2000] = bytes(len(content) - 3000)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="name: .*a cannot be read .*fetch it again"):
        load_images(file.parent)


def pretend_cached(tmp_path, repo, splits):
    "What `datasets` leaves in its cache after fetching a set from the hub."
    of = lambda s, pics: str(write_parquet(tmp_path / f"made/{s}.parquet", pics))
    files, build = {s: of(s, pics) for s, pics in splits.items()}, tmp_path / "build"
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(build))
    made = next(p.parent for p in build.rglob("dataset_info.json"))
    name = repo.split("/")[-1]
    home = tmp_path / "cache" / repo.replace("/", "___") / "default/0.0.0/abcdef"
    home.parent.mkdir(parents=True)
    made.rename(home)
    for arrow in home.glob("parquet-*.arrow"):
        arrow.rename(home / arrow.name.replace("parquet", name))
    info, key = home / "dataset_info.json", '"dataset_name": "{}"'
    info.write_text(info.read_text().replace(key.format("parquet"), key.format(name)))
    return home


def test_the_cache_of_the_hub_is_enough_and_no_network_is_asked(tmp_path, asked):
    pics = color(60)
    parts = {"train": pics[:40], "valid": pics[40:50], "test": pics[50:]}
    home = pretend_cached(tmp_path, "someone/things", parts)
    asked.clear()
    found = [as_set(s) for s in all_rows("someone/things").values()]
    assert found == [{x.tobytes() for x in part} for part in parts.values()]
    assert not asked and datasets.config.HF_HUB_OFFLINE == OFFLINE, "it was left on"
    for arrow in home.glob("*.arrow"):
        arrow.write_bytes(b"damaged")
    with pytest.raises(FileNotFoundError) as e:
        load_images("someone/things")
    for where in ("the hub's cache on this machine", "the hub"):
        assert f"{where}, someone/things: " in str(e.value)
    assert asked or OFFLINE


def test_without_a_network_it_says_what_was_tried_and_what_to_do(
    tmp_path, monkeypatch, asked
):
    monkeypatch.setenv("ET_DATA", str(tmp_path / "none"))

    def said(name):
        with pytest.raises(FileNotFoundError) as e:
            load_images(name)
        return str(e.value)

    cifar = said("cifar10")
    for words in (
        "name: no pictures called 'cifar10' were found",
        str(tmp_path / "none/images/cifar10"),
        "uoft-cs/cifar10: ",
        "the hub's cache on this machine",
        "What helps: going online",
        "digits (no network)",
    ):
        assert words in cifar, f"{words!r} is missing in {cifar}"
    nobody = said("nobody/nothing")
    assert "a path: " in nobody and "nobody/nothing: " in nobody
    assert "names there have the form user/name" in said("nonsense")


# --- real data


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
    found = next(batches(sets["train"], 64, seed=0))
    assert found.shape == (64, size, size, 3) and found.std() > 30
    mean, std = sets["validation"].statistics()
    assert ((0.3 < mean) & (mean < 0.6)).all() and ((0.2 < std) & (std < 0.35)).all()
