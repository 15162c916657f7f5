"""The energy of the authors' own JAX code, descended in the library's image model: their
`architecture.py`, as it is, in place of our block. It is no package, so the environment
variable ET_AUTHORS names a folder with a checkout of bhoov/energy-transformer-jax; it
needs equinox.

Their attention includes B = C (Eq. 12), so it is compared with ours under
`self_attention=True`. That changes neither the operations nor the time.
"""

import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from et_nbdev.dynamics import Trajectory
from et_nbdev.vision.data import occlude
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer

FOLDER = os.environ.get("ET_AUTHORS")


@lru_cache(1)
def architecture():
    "Their module."
    path = Path(str(FOLDER)) / "architecture.py"
    spec = importlib.util.spec_from_file_location("authors_architecture", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class AuthorsEnergyTransformer(ImageEnergyTransformer):
    "Our weights, encoder and decoder; their norm, energies and loop."

    def parts(self):
        "Their norm and their energy, with the weights of our block."
        import equinox as eqx

        theirs, block, c = architecture(), self.block, self.config
        sizes = dict(scale_mems=c.num_memories / c.dim)
        own = theirs.ETConfig(c.dim, c.head_dim, c.num_heads, **sizes)
        energy = eqx.filter_eval_shape(theirs.EnergyTransformer, jax.random.key(0), own)
        where = lambda m: (m.attn.Wq, m.attn.Wk, m.hn.Xi)
        weights = (
            block.attention.Wq[...].mT,  # (H, Y, D)
            block.attention.Wk[...].mT,
            block.memory.xi[...].T,  # (D, K)
        )
        norm = theirs.EnergyLayerNorm(c.dim)
        scales = block.norm.gamma[...], block.norm.delta[...]
        norm = eqx.tree_at(lambda m: (m.gamma, m.delta), norm, scales)
        return norm, eqx.tree_at(where, energy, weights)

    def descend(self, patches, masked, **_):
        norm, energy = self.parts()
        slope = jax.value_and_grad(energy.energy)  # their loop computes both

        def settle(x):
            for _ in range(self.config.steps):
                x = x - self.config.step_size * slope(norm(x))[1]
            return x

        return jax.vmap(settle)(self.encode(patches, masked)), Trajectory(None, None)


def authors_difference(config: ImageConfig) -> float:
    "Largest relative difference between its patches and the library's."
    N = config.num_tokens
    patches = jax.random.normal(jax.random.key(0), (2, N, config.patch_dim))
    masked = occlude(jax.random.key(1), 2, N, N // 2, 0.1)[1]

    def predicted(make):
        model = make(config, rngs=nnx.Rngs(0))
        model.block.attention.self_attention = True
        return np.asarray(model(patches, masked))

    ours, theirs = map(predicted, (ImageEnergyTransformer, AuthorsEnergyTransformer))
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())
