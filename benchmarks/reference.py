"""The Energy Transformer as one would first write it down: the energy, `jax.grad` of
it, and a Python loop. What the library is measured against.
"""

import jax
import jax.numpy as jnp

from et_nbdev.dynamics import Trajectory
from et_nbdev.vision.model import ImageEnergyTransformer


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
