"""Which memories of the models of `image_pair.py` still act, counted from their kept
weights into results/image-memories.json.

A memory acts if it pulls on some token at some step, on six photographs with fifty sets
of hidden patches each. Beside it: how many memories are shorter than 0.01, their
thresholds, and the sum of rate times weight decay over the training.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from et_nbdev.training import OptimConfig, learning_rate
from et_nbdev.vision.data import normalize, occlude, patchify, photographs
from et_nbdev.vision.model import load_model

RESULTS = Path(__file__).resolve().parent.parent / "results"


@nnx.jit
def largest_pull(model, patches, hidden):
    "Of each memory, on any token on the way: |h| times the length of ξ."
    memory = model.block.memory
    states = model.descend(patches, hidden, states=True)[1].states[:-1]
    h = lambda x: jnp.abs(memory.hidden(model.block.norm(x))).max((0, 1))
    return jax.lax.map(h, states).max(0) * jnp.linalg.norm(memory.xi[...], axis=1)


def count(path, patches, hidden):
    model = load_model(path)
    memory, pull = model.block.memory, np.asarray(largest_pull(model, patches, hidden))
    length = np.linalg.norm(np.asarray(memory.xi[...]), axis=1)
    lost = np.asarray(memory.threshold[...])[length < 0.01]
    run = json.loads(path.with_suffix(".json").read_text())
    optim = OptimConfig(**run["config"]["optim"])
    rate = jax.vmap(learning_rate(optim))(jnp.arange(optim.steps))
    return {
        "run": f"{path.parent.name}/{path.stem}",
        "memories": len(pull),
        "pull": int((pull > 0).sum()),
        "pull_over_a_hundredth": int((pull > 0.01 * pull.max()).sum()),
        "median_length": float(np.median(length)),
        "short": len(lost),
        "thresholds_of_short": [float(f(lost)) for f in (np.min, np.max) if len(lost)],
        "decayed": optim.weight_decay * float(rate.sum()),
    }


def main():
    folders = ("image-pair", "image-rates")
    paths = [p for f in folders for p in RESULTS.glob(f"{f}/*-et-*.safetensors")]
    c = load_model(paths[0]).config
    photos = np.repeat(photographs(c.image_size), 50, axis=0)
    patches = patchify(normalize(photos, c.mean, c.std), c.patch_size)
    hidden = occlude(jax.random.key(0), len(photos), c.num_tokens, c.num_tokens // 2)[0]
    rows = [count(path, patches, hidden) for path in sorted(paths)]
    text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "image-memories.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
