"""What the library is measured against, in its own image model: the Energy Transformer as
one would first write it down, the energy, `jax.grad` of it, and a Python loop; and the
authors' own JAX code, their `architecture.py` as it is in place of our block. It is no
package, so the environment variable ET_AUTHORS names a folder with a checkout of
bhoov/energy-transformer-jax; it needs equinox.

Their attention includes B = C (Eq. 12), so it is compared with ours under
`self_attention=True`. That changes neither the operations nor the time.
"""

import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from et_nbdev.dynamics import Trajectory
from et_nbdev.vision.data import occlude
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer


def energy(block, g):
    "Eq. (3) and (5), summed over the batch."
    Wq = block.attention.Wq[...]
    Wk = block.attention.Wk[...]
    xi = block.memory.xi[...]
    beta = block.attention.beta
    Q, K = jnp.einsum("bnd,hdy->bhny", g, Wq), jnp.einsum("bnd,hdy->bhny", g, Wk)
    scores = beta[None, :, None, None] * jnp.einsum("bhcy,bhny->bhcn", Q, K)
    scores = jnp.where(jnp.eye(g.shape[1], dtype=bool)[None, None], -jnp.inf, scores)
    attention = -jnp.sum(jax.nn.logsumexp(scores, -1) / beta[None, :, None])
    return attention - 0.5 * jnp.sum(jax.nn.relu(jnp.einsum("bnd,kd->bnk", g, xi)) ** 2)


class PlainEnergyTransformer(ImageEnergyTransformer):
    """The same weights, encoder and decoder; the descent is the loop that Eq. (6)
    describes.
    """

    def descend(self, patches, masked, **_):
        x = self.encode(patches, masked)
        for _ in range(self.config.steps):
            x = x - self.config.step_size * jax.grad(lambda g: energy(self.block, g))(
                self.block.norm(x)
            )
        return x, Trajectory(None, None)


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
        Wq, Wk = block.attention.Wq[...].mT, block.attention.Wk[...].mT  # (H, Y, D)
        weights = Wq, Wk, block.memory.xi[...].T  # (D, K)
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


def difference(config: ImageConfig, theirs, self_attention=False) -> float:
    """Largest relative difference between the patches of the library's model and those
    of `theirs(model)`, a function of patches and masked.
    """
    N, model = config.num_tokens, ImageEnergyTransformer(config, rngs=nnx.Rngs(0))
    model.block.attention.self_attention = self_attention
    patches = jax.random.normal(jax.random.key(0), (2, N, config.patch_dim))
    masked = occlude(jax.random.key(1), 2, N, N // 2, 0.1)[1]
    ours, other = (np.asarray(f(patches, masked)) for f in (model, theirs(model)))
    return float(np.abs(ours - other).max() / np.abs(ours).max())


def authors_difference(config: ImageConfig) -> float:
    theirs = AuthorsEnergyTransformer(config, rngs=nnx.Rngs(0))
    return difference(config, lambda model: theirs, self_attention=True)
