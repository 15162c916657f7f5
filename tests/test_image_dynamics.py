"""Completion whose descent runs on: the field, the growing steps, and the loss that is
met along them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.block import Block, EnergyTransformer
from et_nbdev.dynamics import descend
from et_nbdev.energy import ExternalField
from et_nbdev.solvers import Anderson, Backtracking, solve
from et_nbdev.testing import assert_close, assert_descends, assert_gradient
from et_nbdev.vision._dynamics_scores import (
    _errors_after,
    _errors_in_time,
    _errors_settled,
)
from et_nbdev.vision.data import normalize, occlude, patchify
from et_nbdev.vision.dynamics import (
    _FieldImageEnergyTransformer,
    _growing,
    _loss_at,
    _states_by,
)
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer
from et_nbdev.vision.train import TrainConfig, _completion_loss

pytestmark = pytest.mark.usefixtures("compile_quickly")
CONFIG = TrainConfig(
    ImageConfig(
        image_size=8,
        channels=1,
        patch_size=2,
        dim=12,
        num_heads=2,
        head_dim=4,
        num_memories=16,
        steps=3,
        step_size=0.5,
    )
)
KINDS = pytest.mark.parametrize(
    "kind",
    [ImageEnergyTransformer, _FieldImageEnergyTransformer],
    ids=["plain", "field"],
)


def pictures(n=4):
    return np.random.default_rng(0).integers(0, 256, (n, 8, 8, 1), np.uint8)


def in_field():
    "A block with a field for a term, tokens, and a field for them."
    block = EnergyTransformer(
        6, 2, 3, 8, init_scale=0.5, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    x, h = jax.random.normal(jax.random.key(0), (2, 2, 4, 6))
    return Block(block.norm, **block.terms, field=ExternalField()), x, h


def test_the_field_is_a_term_of_the_energy(x64):
    block, x, h = in_field()
    g, mask = block.norm(x), np.random.default_rng(0).random((4, 4)) < 0.6
    for context in (dict(field=h), dict(field=h, mask=jnp.asarray(mask))):
        assert_gradient(
            lambda g: block.energy(g, **context), g, -block.update(g, **context)
        )
        assert_close(block.energies(g, **context)["field"], -jnp.sum(h * g, (1, 2)))
        assert_descends(descend(block, x, 30, 0.1, **context)[1].energies.total)
    found = solve(block, x, Anderson(), tolerance=1e-4, evaluations=200, field=h)
    assert found.settled.all()


def test_a_strong_field_wins(x64):
    block, x, h = in_field()
    end = solve(block, x, Anderson(), tolerance=1e-6, evaluations=200, field=1e4 * h)
    assert_close(block.norm(end.x), block.norm(1e4 * h), rtol=1e-2)


@KINDS
def test_steps_of_given_sizes_are_steps(kind):
    model, sizes = kind(CONFIG.model, rngs=nnx.Rngs(0)), _growing(4, 0.1, 2.0)
    assert_close(sizes, np.array([0.1, 0.2, 0.4, 0.8]), rtol=1e-14)
    x = jax.random.normal(jax.random.key(0), (2, 16, 12))
    states, context = [x], model.context(x)
    for alpha in sizes:
        states.append(descend(model.block, states[-1], 1, alpha, **context)[0])
    for remat in (False, True):
        assert_close(
            _states_by(model, x, sizes, remat=remat), jnp.stack(states), rtol=1e-5
        )


@KINDS
def test_the_loss_is_met_where_it_says(kind):
    model = kind(CONFIG.model, rngs=nnx.Rngs(0))
    images = jnp.asarray(pictures(64))
    key = jax.random.key(0)
    c, sizes = CONFIG.model, _growing(4, 0.2)
    hide, when = jax.random.split(key)
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)
    occluded, masked = occlude(
        hide, 64, c.num_tokens, CONFIG.num_occluded, CONFIG.open_fraction
    )
    x = model.encode(patches, masked)
    states = _states_by(model, x, sizes)
    at = lambda t: _completion_loss(model.decode(states[t]), patches, occluded)
    value, grads = nnx.value_and_grad(
        lambda m: _loss_at(CONFIG, sizes)(m, images, key)[0]
    )(model)
    np.testing.assert_allclose(value, at(4), rtol=1e-5)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads)), (
        "every weight has a part in it"
    )
    some = float(_loss_at(CONFIG, sizes, first=2)(model, images, key)[0])
    assert (
        min(float(at(t)) for t in (2, 3, 4))
        < some
        < max(float(at(t)) for t in (2, 3, 4))
    )
    np.testing.assert_allclose(
        _loss_at(CONFIG, sizes, first=4)(model, images, key)[0], at(4), rtol=1e-5
    )


def at_rest(n=8):
    """A model in a field, pictures, a key, and what its loss at rest should come from:
    tokens, patches and which of them are hidden.
    """
    model = _FieldImageEnergyTransformer(CONFIG.model, rngs=nnx.Rngs(0))
    images = jnp.asarray(pictures(n))
    key = jax.random.key(0)
    c = CONFIG.model
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)
    occluded, masked = occlude(
        jax.random.split(key)[0],
        n,
        c.num_tokens,
        CONFIG.num_occluded,
        CONFIG.open_fraction,
    )
    return model, images, key, patches, occluded, masked


def test_the_loss_at_the_fixed_point_is_met_where_the_descent_has_settled():
    model, images, key, patches, occluded, masked = at_rest()
    x = model.encode(patches, masked)
    end = solve(
        model.block,
        x,
        Anderson(CONFIG.model.step_size),
        tolerance=1e-3,
        evaluations=100,
        **model.context(x),
    )
    assert end.settled.all()
    (value, metrics), grads = nnx.value_and_grad(
        lambda m: _loss_at(CONFIG)(m, images, key), has_aux=True
    )(model)
    np.testing.assert_allclose(
        value, _completion_loss(model.decode(end.x), patches, occluded), rtol=1e-3
    )
    assert metrics["settled"] == 1
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads)), (
        "every weight has a part in it, the encoder's by the field"
    )


def test_the_gradient_at_the_fixed_point_is_that_of_a_descent_which_gets_there():
    model, images, key, patches, occluded, masked = at_rest()
    # in a strong field a few steps that grow get there as well
    model.strength[...] = jnp.float32(8)

    def unrolled(model):
        x = model.encode(patches, masked)
        return _completion_loss(
            model.decode(_states_by(model, x, _growing(20))[-1]), patches, occluded
        )

    flat = lambda grads: np.concatenate(
        [np.ravel(leaf) for leaf in jax.tree.leaves(grads)]
    )
    implicit = flat(nnx.grad(lambda m: _loss_at(CONFIG)(m, images, key)[0])(model))
    wanted = flat(nnx.grad(unrolled)(model))
    np.testing.assert_allclose(
        np.linalg.norm(implicit - wanted) / np.linalg.norm(wanted), 0, atol=0.003
    )


@KINDS
def test_errors_in_time_are_those_of_the_model_stopped_there(kind):
    model, images = kind(CONFIG.model, rngs=nnx.Rngs(0)), jnp.asarray(pictures())
    c = CONFIG.model
    occluded = occlude(jax.random.key(0), 4, c.num_tokens, CONFIG.num_occluded)[0]
    errors, energies = _errors_in_time(model, images, occluded, 6, 2)
    assert errors.shape == energies.shape == (4, 4)
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)
    for row, steps in zip(errors, (0, 2, 4, 6)):
        e = jnp.mean((model(patches, occluded, steps=steps) - patches) ** 2, -1)
        np.testing.assert_allclose(
            row,
            jnp.sum(jnp.where(occluded, e, 0.0), -1)
            / jnp.sum(occluded, -1, dtype=e.dtype),
            rtol=1e-5,
        )
    path = model.descend(patches, occluded, steps=6)[1].energies.total
    np.testing.assert_allclose(energies, path[::2], rtol=1e-5)
    np.testing.assert_allclose(
        _errors_after(model, images, occluded, [c.step_size] * 6), errors[3], rtol=1e-5
    )
    end, energy, settled, evaluations = _errors_settled(model, images, occluded, 0.02)
    assert (
        settled.all()
        and (energy <= path[-1] + 1e-5 * abs(path[-1])).all()
        and (evaluations < 300).all()
        and jnp.isfinite(end).all()
    )
    x = model.encode(patches, occluded)
    stopped = solve(
        model.block,
        x,
        Backtracking(c.step_size),
        evaluations=2,
        tolerance=0.02,
        **model.context(x),
    )
    _, _, settled, evaluations = _errors_settled(
        model, images, occluded, 0.02, evaluations=2
    )
    assert (
        not settled.any()
        and (stopped.residual > 0.02).all()
        and (evaluations == 2).all()
    )


def test_without_strength_the_field_model_is_the_plain_one():
    plain, field = (
        kind(CONFIG.model, rngs=nnx.Rngs(0))
        for kind in (ImageEnergyTransformer, _FieldImageEnergyTransformer)
    )
    images = jnp.asarray(pictures())
    patches = patchify(normalize(images, (0.5,), (0.5,)), 2)
    masked = jnp.zeros((4, 16), bool).at[:, :8].set(True)
    assert not np.allclose(field(patches, masked), plain(patches, masked), rtol=1e-3)
    field.strength[...] = jnp.float32(0)
    np.testing.assert_allclose(
        field(patches, masked), plain(patches, masked), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "call, match",
    [
        *[(lambda n=n: _growing(n), "^steps: ") for n in (0, -1, 1.5)],
        *[(lambda v=v: _growing(3, v), "^first: ") for v in (0.0, -1.0, float("nan"))],
        *[
            (lambda v=v: _growing(3, 1.0, v), "^factor: ")
            for v in (0.0, -1.0, float("inf"))
        ],
        *[
            (
                lambda v=v: _states_by(
                    ImageEnergyTransformer(CONFIG.model, rngs=nnx.Rngs(0)),
                    jnp.ones((1, 16, 12)),
                    v,
                ),
                "^step_sizes: ",
            )
            for v in ([0.0], [1.0, -1.0], [[1.0]], [float("nan")])
        ],
    ],
)
def test_bad_input_is_refused_by_name(call, match):
    with pytest.raises(ValueError, match=match):
        call()
