"""The pictures of the front page that show models into nbs/images/, for browsers without
scripts: board.png, a number puzzle that is solved, and descent.gif, six photographs
completed step by step by the weights that ship with the library.
"""

import io

import jax
import matplotlib.pyplot as plt
import numpy as np
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


def board():
    "A puzzle with as few givens as it can have, on its way downhill."
    fig = plot_descent(puzzle_model("sudoku-4"), puzzles(4, 1, (0, 0))[0][0])
    picture = Image.fromarray(pixels(fig, 200)).quantize(64)
    picture.save(OUT / "board.png", optimize=True)


def row(pictures, gap=8):
    "Pictures side by side."
    bytes_ = np.clip(pictures * 255 + 0.5, 0, 255).astype(np.uint8)
    space = np.full((bytes_.shape[1], gap, 3), 255, np.uint8)
    return np.concatenate([part for p in bytes_ for part in (space, p)][1:], 1)


def descent():
    "Photographs with holes (6, S, S, 3), completed (T+1, 6, S, S, 3), and energies."
    model = from_pretrained("photographs")
    c, photos = model.config, photographs(model.config.image_size)
    hidden = occlude(jax.random.key(1), len(photos), c.num_tokens, c.num_tokens // 2)[0]
    hidden = np.asarray(hidden)
    done = complete(model, photos, hidden, path=True)
    holes = patchify((photos / 255).astype(np.float32), c.patch_size)
    holes = np.where(hidden[..., None], 0.82, holes)
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


if __name__ == "__main__":
    board()
    animation(*descent())
