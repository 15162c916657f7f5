"""Fills that know training pictures, beside loops that say what they are."""

import numpy as np
import pytest

from et_nbdev.vision.data import fills_from, patchify

S, P = 6, 2


def some(n, seed, channels=1):
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(n, S, S, channels), dtype=np.uint8)


def occluded(n, seed=3):
    return np.random.default_rng(seed).random((n, (S // P) ** 2)) < 0.5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "name, k", [("nearest neighbor", 1), ("seven nearest neighbors", 7)]
)
def test_neighbors_are_those_of_the_visible_pixels(name, k, channels):
    known, images, hidden = some(40, 0, channels), some(5, 1, channels), occluded(5)
    found = fills_from(known)[name](images, hidden, P)
    for x, h, y in zip(patchify(images / 255, P), hidden, patchify(found, P)):
        of = patchify(known / 255, P)
        near = np.argsort([((t[~h] - x[~h]) ** 2).sum() for t in of])[:k]
        np.testing.assert_allclose(y[h], of[near].mean(0)[h], atol=1e-5)
        np.testing.assert_allclose(y[~h], x[~h], atol=1e-6)


def test_the_mean_and_the_gaussian_are_those_of_the_training_pictures():
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(3000, 4)) @ rng.normal(size=(4, S * S))
    pixels = np.clip(128 + 20 * mixed, 0, 255).astype(np.uint8).reshape(-1, S, S, 1)
    known, images, hidden = pixels[:2900], pixels[2900:], occluded(100)
    fills = fills_from(known)
    mean = fills["mean training picture"](images, hidden, P)
    y, wanted = patchify(mean, P)[hidden], patchify(known / 255, P).mean(0)
    np.testing.assert_allclose(y, np.stack([wanted] * 100)[hidden], atol=1e-5)
    # four numbers make a picture, so what is visible tells the rest
    error = lambda name: np.abs(fills[name](images, hidden, P) - images / 255).mean()
    assert error("Gaussian") < 0.1 * error("mean training picture")


def test_large_pictures_get_no_gaussian():
    assert "Gaussian" not in fills_from(np.zeros((3, 20, 20, 3), np.uint8))
