"""From the Tiny ImageNet weights and the pictures they were not trained on: what
notebook 13 shows frozen, into results/tiny-imagenet.

dynamics.json: energy and error far past the training depth, and what attention and
memory do to hidden patches in each step. worst.jpg, best.jpg: the paper's Figures 9 and
10. And, for the front page, its Figure 3 on photographs: nbs/images/photographs.png.
These three show every picture twice: all of its tokens decoded, as in the paper, and
with the pixels of the open patches pasted back.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from et_nbdev.training.checkpoint import _atomic_write, _provenance
from et_nbdev.vision.data import (
    _denormalize,
    load_images,
    normalize,
    occlude,
    patchify,
    photographs,
    unpatchify,
)
from et_nbdev.vision.model import complete, from_pretrained
from et_nbdev.vision.train import _held_out, evaluate

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results/tiny-imagenet"


@nnx.jit
def follow(model, images, occluded):
    """Means over a batch, at every time: energy, errors of hidden and open patches,
    contrast of the hidden ones, likeness of the tokens.
    """
    c = model.config
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)

    def halves(x, g, decoded):
        """How far each half of the step alone would move the hidden tokens g and their
        patches.
        """
        sizes = {}
        for name in ("attention", "memory"):
            y = x + c.step_size * getattr(model.block, name).update(g)
            sizes[f"{name}_moves_g"] = hidden(
                jnp.linalg.norm(model.block.norm(y) - g, axis=-1)
            )
            sizes[f"{name}_moves_patch"] = hidden(
                jnp.linalg.norm(model.decode(y) - decoded, axis=-1)
            )
        return sizes

    hidden = lambda a: jnp.sum(jnp.where(occluded, a, 0)) / jnp.sum(occluded)

    def read(x):
        decoded, g = model.decode(x), model.block.norm(x)
        error = jnp.mean((decoded - patches) ** 2, -1)
        unit = g / jnp.linalg.norm(g, axis=-1, keepdims=True)
        N = c.num_tokens
        cosine = (jnp.einsum("bnd,bmd->b", unit, unit) - N) / (N * (N - 1))
        return {
            **halves(x, g, decoded),
            "energy": model.block.energy(g).mean(),
            "mse": hidden(error),
            "mse_open": jnp.sum(jnp.where(occluded, 0, error)) / jnp.sum(~occluded),
            "contrast": hidden(decoded.std(-1)),
            "likeness": cosine.mean(),
            "length": (
                jnp.linalg.norm(x - x.mean(-1, keepdims=True), axis=-1).mean()
                / c.dim**0.5
            ),
        }

    def step(x, _):
        return x + c.step_size * model.block.update(model.block.norm(x)), read(x)

    return jax.lax.scan(step, model.encode(patches, occluded), None, length=201)[1]


def dynamics(model, images, pictures=500):
    rows = [
        follow(model, jnp.asarray(x), jnp.asarray(o))
        for x, o in _held_out(
            images,
            model.config,
            model.config.num_tokens // 2,
            limit=pictures,
            batch_size=100,
        )
    ]
    return {
        "step": list(range(201)),
        **{
            k: np.mean([row[k] for row in rows], 0).astype(float).tolist()
            for k in rows[0]
        },
        "pictures": pictures,
        "split": images.split,
        **_provenance(),
    }


def decoded(model, images, occluded):
    "Pictures in [0, 1] whose tokens all come out of the decoder, the open ones too."
    c = model.config
    patches = model(
        patchify(normalize(images, c.mean, c.std), c.patch_size), jnp.asarray(occluded)
    )
    picture = _denormalize(
        unpatchify(patches, c.image_size, c.patch_size), c.mean, c.std
    )
    return np.clip(picture, 0, 1)


ROWS = ("occluded", "all tokens\ndecoded", "open pixels\npasted", "original")


def gallery(path, model, images, occluded, titles=()):
    "Four rows, those of `ROWS`, into a PNG or JPEG."
    c = model.config
    hidden = unpatchify(
        np.broadcast_to(occluded[..., None], (*occluded.shape, c.patch_dim)),
        c.image_size,
        c.patch_size,
    )
    rows = [
        np.where(hidden, np.float32([0.80, 0.72, 0.90]), images / 255),
        decoded(model, images, occluded),
        complete(model, images, occluded).images,
        images / 255,
    ]
    fig, axes = plt.subplots(
        len(rows),
        len(images),
        figsize=(len(images), len(rows) + 0.3 * bool(len(titles))),
    )
    for axs, row, name in zip(axes, rows, ROWS):
        for ax, picture in zip(axs, row):
            ax.imshow(picture, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        axs[0].set_ylabel(name, fontsize=7)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, fontsize=8)
    fig.tight_layout(pad=0.2)
    with _atomic_write(path) as temporary:
        fig.savefig(
            temporary,
            format=path.suffix[1:].replace("jpg", "jpeg"),
            **(
                dict(dpi=72, pil_kwargs=dict(quality=75))  # a notebook holds it
                if path.suffix == ".jpg"
                else dict(dpi=90)
            ),
        )
    plt.close(fig)


def extremes(model, images, pictures=5000, columns=8):
    """The pictures with the largest and the smallest mean error over ten occlusions,
    and the occlusion of seed 0.
    """
    n = model.config.num_tokens // 2
    mean = np.mean(
        [evaluate(model, images, n, seed=seed, limit=pictures) for seed in range(10)], 0
    )
    occlusions = np.concatenate(
        [o for _, o in _held_out(images, model.config, n, limit=pictures)]
    )
    order = np.argsort(mean)
    for name, chosen in (("best", order[:columns]), ("worst", order[::-1][:columns])):
        gallery(
            OUT / f"{name}.jpg",
            model,
            images[chosen],
            occlusions[chosen],
            [f"{mean[i]:.3f}" for i in chosen],
        )


def main():
    model = from_pretrained("tiny-imagenet")
    test, validation = (
        load_images("tiny-imagenet", split, size=model.config.image_size)
        for split in ("test", "validation")
    )
    photos = photographs(model.config.image_size)
    occluded = occlude(
        jax.random.key(1),
        len(photos),
        model.config.num_tokens,
        model.config.num_tokens // 2,
    )[0]
    gallery(ROOT / "nbs/images/photographs.png", model, photos, np.asarray(occluded))
    with _atomic_write(OUT / "dynamics.json") as path:
        path.write_text(json.dumps(dynamics(model, test)) + "\n")
    extremes(model, validation)


if __name__ == "__main__":
    main()
