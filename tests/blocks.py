"Small blocks and tokens for the tests of descent, solvers and equilibria."

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from et_nbdev.attention import EnergyAttention
from et_nbdev.block import EnergyTransformer
from et_nbdev.graph.energy import EdgeIndex
from et_nbdev.memory import HopfieldMemory
from et_nbdev.norm import EnergyLayerNorm


def block_of(
    seed=0,
    D=6,
    K=8,
    gamma=1.3,
    scale=0.5,
    kind=EnergyTransformer,
    memory="relu",
    **heads,
):
    "A block with random float64 weights, γ and δ, from NumPy: nothing is compiled."
    rng = np.random.default_rng(seed)
    parts = dict(
        attention=partial(kind.Attention, **heads),
        memory=partial(HopfieldMemory, activation=memory),
    )
    options = dict(param_dtype=jnp.float64, **parts)
    make = lambda: kind(D, 2, 3, K, **options, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(nnx.eval_shape(make))
    draw = lambda w: jnp.asarray(scale * rng.normal(size=w.shape))
    block = nnx.merge(graphdef, jax.tree.map(draw, state))
    block.norm.rho[...] = jnp.asarray(np.log(np.expm1(gamma)) if gamma else -800.0)
    return block


def opposed(block):
    "The same block, with keys that oppose their queries."
    block.attention.Wk[...] = -block.attention.Wq[...]
    return block


def tokens(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def ring(N=5):
    "An undirected ring with a chord, as edges."
    a, b = np.r_[np.arange(N), 0], np.r_[(np.arange(N) + 1) % N, 2]
    return EdgeIndex(np.r_[a, b], np.r_[b, a], N, backend="xla")


def repelling_pair():
    """Two equal tokens of one number ±s each, K = −Q: E = 2·g_A·g_B, least where they
    are opposite. ε = 1 keeps the norm soft around 0.
    """
    options = dict(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    heads = partial(EnergyAttention, beta=1.0)
    block = EnergyTransformer(2, 1, 1, 1, attention=heads, **options)
    block.norm = EnergyLayerNorm(2, 1.0, param_dtype=jnp.float64)
    block.attention.Wq[...] = jnp.array([[[1.0], [0.0]]])
    block.memory.xi[...] = jnp.zeros((1, 2))
    return opposed(block), 0.1 * jnp.array([[1.0, -1.0], [1.0, -1.0]])
