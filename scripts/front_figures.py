"""The pictures of the front page into nbs/images/: block.png, what a block is;
board.png, a number puzzle that is solved, for browsers without scripts; descent.gif,
six photographs completed step by step by the weights that ship with the library, for
browsers without scripts; card.jpg, what a link to the site looks like elsewhere.
"""

import io

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyBboxPatch
from modules import NBS
from PIL import Image

from et_nbdev.puzzle import from_pretrained as puzzle_model
from et_nbdev.puzzle import plot_descent, puzzles
from et_nbdev.vision.data import occlude, patchify, photographs, unpatchify
from et_nbdev.vision.model import complete, from_pretrained

OUT = NBS / "images"
ACCENT = "#6a3d9a"


def pixels(fig, dpi=100):
    "A figure as an (h, w, 3) array of bytes."
    with io.BytesIO() as buffer:
        fig.savefig(buffer, format="png", dpi=dpi, facecolor="white")
        plt.close(fig)
        return np.asarray(Image.open(buffer).convert("RGB"))


def block():
    "One block: a norm, a sum of energies, and a step down their gradient, T times."
    fig, ax = plt.subplots(figsize=(9.4, 2.7))
    parts = [  # x, y, width, height, color, text
        (0.4, 0, 0.6, 0.7, "white", "$x$"),
        (2.0, 0, 1.1, 0.7, "0.93", "norm"),
        (3.4, 0, 0.6, 0.7, "white", "$g$"),
        (5.6, 0, 2.5, 2.1, "#C9E8DD", ""),
        (5.6, 0.25, 2.2, 0.55, "#BFDDF0", "energy attention"),
        (5.6, -0.65, 2.2, 0.55, "#F9D5BF", "Hopfield memory"),
        (8.2, 0, 1.5, 0.7, "#C9E8DD", "$-\\,\\partial E/\\partial g$"),
        (10.0, 0, 0.9, 0.7, "0.93", "$\\times\\,\\alpha$"),
        (11.2, 0, 0.5, 0.7, "white", "+"),
        (12.4, 0, 0.6, 0.7, "white", "$x$"),
    ]
    for x, y, width, height, color, text in parts:
        style = dict(boxstyle="round,pad=0.02,rounding_size=0.12", fc=color, ec="0.3")
        corner = (x - width / 2, y - height / 2)
        ax.add_patch(FancyBboxPatch(corner, width, height, **style))
        ax.text(x, y, text, ha="center", va="center", fontsize=11)
    ax.text(5.6, 0.78, "energy $E$", ha="center", va="center", fontsize=13)
    ax.text(5.6, -0.2, "+", ha="center", va="center", fontsize=12)
    head = dict(arrowstyle="-|>", lw=1.3, shrinkA=0, shrinkB=0)
    ends = [p[0] + p[2] / 2 + 0.02 for p in parts if p[1] == 0]
    starts = [p[0] - p[2] / 2 - 0.02 for p in parts if p[1] == 0]
    lines = [[(a, 0), (b, 0)] for a, b in zip(ends, starts[1:])]
    lines += [[(0.95, 0), (0.95, 1.35), (11.2, 1.35), (11.2, 0.37)]]
    lines += [[(12.4, -0.37), (12.4, -1.45), (0.4, -1.45), (0.4, -0.37)]]
    for points in lines:
        color = ACCENT if points[1][1] < 0 else "0.2"
        ax.plot(*zip(*points[:-1]), color=color, lw=1.3)
        ax.annotate("", points[-1], points[-2], arrowprops=head | dict(color=color))
    ax.text(9, -1.22, "T times, the same weights", color=ACCENT, fontsize=12)
    ax.set(xlim=(0, 12.8), ylim=(-1.6, 1.5))
    ax.axis("off")
    fig.subplots_adjust(0, 0, 1, 1)
    picture = Image.fromarray(pixels(fig, 200)).quantize(64)
    picture.save(OUT / "block.png", optimize=True)


def board():
    "A puzzle with as few givens as it can have, on its way downhill."
    fig = plot_descent(puzzle_model("sudoku-4"), puzzles(4, 1, (0, 0))[0][0])
    picture = Image.fromarray(pixels(fig, 200)).quantize(64)
    picture.save(OUT / "board.png", optimize=True)


def row(pictures, scale=2, gap=8):
    "Pictures side by side, every pixel `scale` pixels wide, none of them blended."
    bytes_ = np.clip(pictures * 255 + 0.5, 0, 255).astype(np.uint8)
    big = np.kron(bytes_, np.ones((1, scale, scale, 1), np.uint8))
    space = np.full((big.shape[1], gap, 3), 255, np.uint8)
    return np.concatenate([part for p in big for part in (space, p)][1:], 1)


def descent():
    "Photographs with holes (6, S, S, 3), completed (T+1, 6, S, S, 3), and energies."
    model = from_pretrained("tiny-imagenet")
    c, photos = model.config, photographs(model.config.image_size)
    hidden = occlude(jax.random.key(1), len(photos), c.num_tokens, c.num_tokens // 2)[0]
    done = complete(model, photos, np.asarray(hidden), path=True)
    holes = patchify((photos / 255).astype(np.float32), c.patch_size)
    holes = np.where(np.asarray(hidden)[..., None], 0.82, holes)
    holes = np.asarray(unpatchify(holes, c.image_size, c.patch_size))
    return holes, np.asarray(done.path), np.asarray(done.energies.total)


def animation(holes, path, energies):
    "The pictures at every moment over the curve of their mean energy so far."
    frames, mean = [], energies.mean(1) / 1e3
    for t, pictures in enumerate([holes, *path], -1):
        top = row(pictures)
        fig, ax = plt.subplots(figsize=(top.shape[1] / 100, 2.0))
        ax.plot(mean, color="0.85", lw=2)
        ax.plot(mean[: t + 1], "o-", color=ACCENT, lw=2, ms=5)
        ax.set_ylabel("E / 1000", fontsize=15)
        given = "given: half of each picture is hidden"
        ax.set_xlabel(given if t < 0 else f"step of the descent: {t}", fontsize=15)
        ax.tick_params(labelsize=15)
        ax.spines[["top", "right"]].set_visible(False)
        fig.subplots_adjust(left=0.135, right=0.985, top=0.93, bottom=0.31)
        below = pixels(fig)[:, : top.shape[1]]
        frames.append(Image.fromarray(np.concatenate([top, below])))
    # one palette and no dithering: what does not change is stored once
    sheet = Image.fromarray(np.concatenate([np.asarray(f) for f in frames]))
    palette = sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=3)
    first, *rest = (f.quantize(palette=palette, dither=0) for f in frames)
    times = [1500, *[600] * (len(frames) - 2), 4000]
    options = dict(save_all=True, append_images=rest, loop=0, duration=times)
    first.save(OUT / "descent.gif", **options, optimize=True)


def card(holes, path):
    "1200 × 630, what the cards of social sites show."
    fig = plt.figure(figsize=(12, 6.3))
    fig.text(0.06, 0.81, "Energy Transformer", fontsize=50, weight="bold")
    said = "in JAX, as notebooks: a forward pass is a descent on an energy"
    fig.text(0.06, 0.71, said, fontsize=23, color="0.35")
    for pictures, bottom in ((holes, 0.36), (path[-1], 0.06)):
        for i, picture in enumerate(pictures):
            ax = fig.add_axes([0.06 + 0.15 * i, bottom, 0.1375, 0.262])
            ax.imshow(picture, interpolation="nearest")
            ax.axis("off")
    Image.fromarray(pixels(fig)).save(OUT / "card.jpg", quality=88, optimize=True)


if __name__ == "__main__":
    block()
    board()
    holes, path, energies = descent()
    animation(holes, path, energies)
    card(holes, path)
