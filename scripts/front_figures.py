"""The pictures of the front page, from the weights that ship with the library, into
nbs/images/.

descent.gif: six photographs completed step by step while their energy falls, above with
the pixels of their open patches as they are, below with all tokens decoded. card.jpg:
what a link to the site looks like elsewhere. favicon.png.
"""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from et_nbdev.vision.data import (
    denormalize,
    normalize,
    occlude,
    patchify,
    photographs,
    unpatchify,
)
from et_nbdev.vision.model import complete, from_pretrained

OUT = Path(__file__).resolve().parent.parent / "nbs/images"
HIDDEN = np.float32([0.80, 0.72, 0.90])
INK, ACCENT = "#222222", "#6a3d9a"


def descent():
    """The photographs with their holes, (6, S, S, 3), what is read off at every time,
    (T+1, 6, S, S, 3), once with the pixels of the open patches pasted back and once as
    all tokens are decoded, and the energies, (T+1, 6).
    """
    model = from_pretrained("tiny-imagenet")
    c, photos = model.config, photographs(model.config.image_size)
    occluded = np.asarray(
        occlude(jax.random.key(1), len(photos), c.num_tokens, c.num_tokens // 2)[0]
    )
    done = complete(model, photos, occluded, path=True)
    picture = lambda patches: unpatchify(patches, c.image_size, c.patch_size)
    hidden = picture(
        np.broadcast_to(occluded[..., None], (*occluded.shape, c.patch_dim))
    )
    patches = patchify(normalize(photos, c.mean, c.std), c.patch_size)
    states = model.descend(patches, jnp.asarray(occluded), states=True)[1].states
    decoded = [denormalize(picture(model.decode(x)), c.mean, c.std) for x in states]
    decoded = np.clip(np.stack(decoded), 0, 1)
    pasted = np.where(hidden, decoded, photos / 255)
    np.testing.assert_allclose(pasted, done.path, atol=1e-5)
    return (
        np.where(hidden, HIDDEN, photos / 255).astype(np.float32),
        np.asarray(done.path),
        decoded,
        np.asarray(done.energies.total),
    )


def pixels(fig):
    "A figure as an (h, w, 3) array of bytes."
    with io.BytesIO() as buffer:
        fig.savefig(
            buffer,
            format="png",
            dpi=100,
            facecolor="white",
            metadata={"Software": None},
        )
        return np.asarray(Image.open(buffer).convert("RGB"))


def row(pictures, scale, gap=8):
    "Pictures side by side, every pixel `scale` pixels wide, none of them blended."
    big = np.kron(
        np.clip(pictures * 255 + 0.5, 0, 255).astype(np.uint8),
        np.ones((1, scale, scale, 1), np.uint8),
    )
    space = np.full((big.shape[1], gap, 3), 255, np.uint8)
    return np.concatenate([part for p in big for part in (space, p)][1:], 1)


def frame(pictures, below, energies, t, total):
    """Two rows of pictures at one moment over the curve of their mean energy so far."""
    top, bottom = row(pictures, 2), row(below, 2)
    space = np.full((8, top.shape[1], 3), 255, np.uint8)
    top = np.concatenate([top, space, bottom])
    fig, ax = plt.subplots(figsize=(top.shape[1] / 100, 2.0))
    mean = energies.mean(1) / 1e3
    ax.plot(mean, color="0.85", lw=2)
    ax.plot(mean[: t + 1], "o-", color=ACCENT, lw=2, ms=5)
    ax.set(xlim=(-0.15, total + 0.15), xticks=range(total + 1))
    ax.locator_params("y", nbins=4)
    ax.set_ylabel("E / 1000", fontsize=15)
    ax.tick_params(labelsize=15)
    ax.set_xlabel(
        (
            "given: half of each picture is hidden"
            if t < 0
            else f"step of the descent: {t}"
        ),
        fontsize=15,
    )
    ax.spines[["top", "right"]].set_visible(False)
    fig.subplots_adjust(left=0.135, right=0.985, top=0.93, bottom=0.31)
    below = pixels(fig)[:, : top.shape[1]]
    plt.close(fig)
    return Image.fromarray(np.concatenate([top, below]))


def animation(holes, path, decoded, energies):
    total = len(energies) - 1
    frames = [frame(holes, holes, energies, -1, total)] + [
        frame(*pair, energies, t, total) for t, pair in enumerate(zip(path, decoded))
    ]
    # One palette for all frames and no dithering: what does not change is then stored
    # once.
    sheet = Image.fromarray(np.concatenate([np.asarray(f) for f in frames]))
    palette = sheet.quantize(
        256, method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
    )
    indexed = [f.quantize(palette=palette, dither=Image.Dither.NONE) for f in frames]
    indexed[0].save(
        OUT / "descent.gif",
        save_all=True,
        append_images=indexed[1:],
        loop=0,
        optimize=True,
        duration=[1500, *[600] * total, 4000],
    )


def card(holes, path):
    "1200 × 630, what the cards of social sites show."
    fig = plt.figure(figsize=(12, 6.3))
    fig.text(
        0.06,
        0.84,
        "Energy Transformer",
        fontsize=50,
        weight="bold",
        color=INK,
        va="center",
    )
    fig.text(
        0.06,
        0.725,
        "in JAX, as notebooks: a forward pass is a descent on an energy",
        fontsize=23,
        color="0.35",
        va="center",
    )
    for pictures, bottom, word in (
        (holes, 0.36, "given"),
        (path[-1], 0.06, "hidden half filled in"),
    ):
        fig.text(
            0.035,
            bottom + 0.13,
            word,
            fontsize=17 if len(word) < 10 else 12,
            color=ACCENT,
            rotation=90,
            ha="center",
            va="center",
        )
        for i, picture in enumerate(pictures):
            ax = fig.add_axes([0.06 + 0.15 * i, bottom, 0.1375, 0.262])
            ax.imshow(picture, interpolation="nearest")
            ax.axis("off")
    Image.fromarray(pixels(fig)).save(OUT / "card.jpg", quality=88, optimize=True)
    plt.close(fig)


def favicon():
    "A ball in a valley."
    fig = plt.figure(figsize=(0.64, 0.64))
    ax = fig.add_axes([0, 0, 1, 1])
    x = np.linspace(-1.5, 1.5, 200)
    ax.plot(
        x, x**4 - 1.4 * x**2 + 0.25 * x, color=ACCENT, lw=4.5, solid_capstyle="round"
    )
    ax.plot(-0.88, -0.38, "o", color="#e08214", ms=13)
    ax.set(xlim=(-1.55, 1.55), ylim=(-1.1, 1.15))
    ax.axis("off")
    fig.savefig(
        OUT / "favicon.png", dpi=100, transparent=True, metadata={"Software": None}
    )
    plt.close(fig)


if __name__ == "__main__":
    holes, path, decoded, energies = descent()
    animation(holes, path, decoded, energies)
    card(holes, path)
    favicon()
    for name in ("descent.gif", "card.jpg", "favicon.png"):
        print(name, (OUT / name).stat().st_size // 1000, "kB")
