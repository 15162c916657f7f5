"""What a user of flax does: the block as one layer of a model that `nnx.Optimizer`
trains.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from et_nbdev import Block, EnergyAttention, EnergyLayerNorm, HopfieldMemory

D, N = 6, 4


class Model(nnx.Module):
    "Three numbers a token in and out, and four steps downhill in between."

    def __init__(self, *, rngs):
        self.up = nnx.Linear(3, D, rngs=rngs)
        self.block = Block(
            EnergyLayerNorm(D),
            attention=EnergyAttention(D, num_heads=2, head_dim=5, rngs=rngs),
            memory=HopfieldMemory(D, num_memories=7, rngs=rngs),
        )
        self.down = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, y):
        return self.down(self.block(self.up(y), steps=4, step_size=0.2))


@nnx.jit
def step(model, optimizer, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(y) - y) ** 2))(model)
    # optax is not written for strict promotion, which the tests run with
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, grads)
    return loss


def test_the_block_is_a_layer_that_trains(seed=0):
    model = Model(rngs=nnx.Rngs(seed))
    before = jax.tree.map(jnp.copy, nnx.state(model.block, nnx.Param))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    y = jax.random.normal(jax.random.key(seed), (4, N, 3))
    losses = [float(step(model, optimizer, y)) for _ in range(60)]
    # over ten seeds .10 ± .04
    assert losses[-1] < losses[0] / 3
    # the block itself has learned, every parameter of it
    after = nnx.state(model.block, nnx.Param)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (a != b).any()
