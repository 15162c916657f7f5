"""The block of pictures and of boards with its energy broken on purpose, one thing at a
time:

    key         what a token does as a key is left out, as in common attention
    values      values and an output matrix of their own, as in a transformer
    memory      what a memory adds has weights of its own, as in a transformer
    jacobian    the length of a head counts as a constant under the derivative

Its energy is still reported.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from et_nbdev.block import Block


class BrokenBlock(Block):
    "A block of attention and memory whose update is not the gradient of its energy."

    def __init__(self, block: Block, broken: tuple[str, ...], rngs: nnx.Rngs):
        super().__init__(block.norm, **block.terms)
        self.broken = broken
        H, D, Y = self.attention.Wq.shape
        normal = lambda *shape: jax.random.normal(rngs.params(), shape)
        if "values" in broken:
            self.Wv = nnx.Param(normal(H, D, Y) * D**-0.5)
            self.Wo = nnx.Param(normal(H, Y, D) * (H * Y) ** -0.5)
        if "memory" in broken:
            self.up = nnx.Param(jnp.copy(self.memory.xi[...]))

    def energies_and_update(self, g, **context):
        return self.energies(g), self.attend(g) + self.remember(g)

    def attend(self, g):
        "What attention adds: what tokens do as queries, and as keys."
        P = self.attention.attended(g)
        if "values" in self.broken:
            V = jnp.einsum("...nd,hdy->...hny", g, self.Wv[...])
            return jnp.einsum("...hcb,...hby,hyd->...cd", P, V, self.Wo[...])
        heads = self.attention.queries_and_keys
        if "jacobian" in self.broken:
            weights = self.attention.Wq[...], self.attention.Wk[...]
            bare = lambda g: [jnp.einsum("...nd,hdy->...hny", g, W) for W in weights]
            length = [rms(a) for a in bare(g)]  # a constant of the derivative
            heads = lambda g: tuple(a / l for a, l in zip(bare(g), length))
        (Q, K), back = jax.vjp(heads, g)
        P = jnp.einsum("h,...hcb->...hcb", self.attention.signs, P)
        queries = jnp.einsum("...hcb,...hby->...hcy", P, K)
        keys = jnp.einsum("...hcb,...hcy->...hby", P, Q)
        return back((queries, keys * float("key" not in self.broken)))[0]

    def remember(self, g):
        "What the memory adds."
        if "memory" not in self.broken:
            return self.memory.update(g)
        return self.memory.hidden(g) @ self.up[...]


def rms(a):
    "The root mean square of every head, as attention takes it."
    return jnp.sqrt(jnp.mean(a**2, -1, keepdims=True) + 1e-5)
