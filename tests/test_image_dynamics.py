"""Completion whose descent runs on: the loss along it and at its end, and its scores, as
experiments/image_dynamics.py has them.
"""

import image_dynamics as dynamics
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.vision.data import normalize, occlude, patchify
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer
from et_nbdev.vision.train import TrainConfig, completion_loss

pytestmark = pytest.mark.usefixtures("compile_quickly")
SIZES = dict(image_size=8, channels=1, patch_size=2, dim=12, num_heads=2, head_dim=4)
CONFIG = TrainConfig(ImageConfig(num_memories=16, steps=3, step_size=0.5, **SIZES))
KEY = jax.random.key(0)


@pytest.fixture(params=[ImageEnergyTransformer, dynamics.FieldModel])
def model(request):
    return request.param(CONFIG.model, rngs=nnx.Rngs(0))


def batch(n):
    "Pictures, their patches, and which of these are occluded and masked."
    c, rng = CONFIG.model, np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (n, 8, 8, 1), np.uint8))
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)
    hide = jax.random.split(KEY)[0]
    share = CONFIG.open_fraction
    hidden = occlude(hide, n, c.num_tokens, CONFIG.num_occluded, share)
    return images, patches, *hidden


def test_the_loss_is_met_where_it_says(model):
    images, patches, occluded, masked = batch(64)
    sizes = dynamics.growing(4, 0.2)
    np.testing.assert_allclose(sizes, [0.2, 0.4, 0.8, 1.6], rtol=1e-14)
    states = dynamics.states_by(model, model.encode(patches, masked), sizes)
    at = [float(completion_loss(model.decode(x), patches, occluded)) for x in states]
    loss = lambda m, **k: dynamics.loss_at(CONFIG, sizes, **k)(m, images, KEY)[0]
    value, grads = nnx.value_and_grad(loss)(model)
    np.testing.assert_allclose(value, at[4], rtol=1e-5)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))
    assert min(at[2:]) < loss(model, first=2) < max(at[2:])
    np.testing.assert_allclose(loss(model, first=4), at[4], rtol=1e-5)


def test_errors_in_time_are_those_of_the_model_stopped_there(model):
    images, patches, occluded, _ = batch(4)
    errors, energies = dynamics.errors_in_time(model, images, occluded, 6, 2)
    for row, steps in zip(errors, (0, 2, 4, 6)):
        predicted = model(patches, occluded, steps=steps)
        assert completion_loss(predicted, patches, occluded) == pytest.approx(
            float(row.mean()), rel=1e-5
        )
    path = model.descend(patches, occluded, steps=6)[1].energies.total
    np.testing.assert_allclose(energies, path[::2], rtol=1e-5)
    sizes = (CONFIG.model.step_size,) * 6
    last = dynamics.errors_after(model, images, occluded, sizes)
    np.testing.assert_allclose(last, errors[3], rtol=1e-5)
    end = dynamics.errors_settled(model, images, occluded, 0.02)
    assert end[2].all() and (end[1] <= path[-1] + 1e-5 * abs(path[-1])).all()
    assert (end[3] < 300).all() and jnp.isfinite(end[0]).all()
    early = dynamics.errors_settled(model, images, occluded, 0.02, evaluations=2)
    assert not early[2].any() and (early[3] == 2).all()
