"""The instruments themselves: what each assertion lets through and what it must not."""

import jax.numpy as jnp
import numpy as np
import pytest

from et_nbdev.testing import (
    assert_close,
    assert_descends,
    assert_gradient,
    assert_refuses,
    float64,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "actual, expected, says",
    [
        (np.ones((2, 3)), np.ones(3), "shape"),
        (np.ones(3, np.float32), np.ones(3), "dtype"),
        (np.array([1.0, np.nan]), np.ones(2), "not finite"),
        (np.ones(2), np.array([1.0, np.inf]), "expected entries are not finite"),
        (np.full(3, 1e-6), np.zeros(3), "exceeds"),
        (
            np.array([[1.0, 2.0], [3.0, 4.1]]),
            np.array([[1.0, 2.0], [3.0, 4.0]]),
            r"at \(1, 1\)",
        ),
        (np.array([1.0, 1.0 + 2e-9]), np.ones(2), "exceeds"),
    ],
)
def test_what_is_not_close(actual, expected, says):
    with pytest.raises(AssertionError, match=says):
        assert_close(actual, expected)


def test_what_is_close_and_what_descends():
    # small beside the largest entry
    assert_close(np.array([1.0, 1e-12]), np.array([1.0, 0.0]))
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)))
    assert_close(np.array([1.1]), np.array([1.0]), rtol=0, atol=0.11)
    assert_descends([[2.0, 0.0], [1.0, 0.0]])
    assert_descends([1e6, 1e6 * (1 + 1e-7)], rtol=1e-6)  # rounding, in single precision


@pytest.mark.parametrize(
    "energies, rtol, says",
    [
        ([1.0, 1.0 + 1e-9], 1e-12, "step 0"),
        ([[3.0, 1.0], [2.0, 1.0], [1.5, 1.1]], 1e-12, r"step 1, sample \(1,\)"),
        # a large neighbor is no excuse
        ([[1e9, 1.0], [1e9, 1.001]], 1e-6, r"sample \(1,\)"),
        ([1.0, np.nan], 1e-12, "finite"),
    ],
)
def test_what_rises(energies, rtol, says):
    with pytest.raises(AssertionError, match=says):
        assert_descends(energies, rtol)


@pytest.mark.parametrize("energies", [1.0, [1.0], np.zeros((3, 0))])
def test_nothing_to_judge(energies):
    with pytest.raises(ValueError, match="energies"):
        assert_descends(energies)


def test_a_gradient_has_two_judges(x64):
    import jax

    x = jnp.linspace(0.5, 2.0, 6).reshape(2, 3)
    cube = lambda x: jnp.sum(x**3, -1)
    assert_gradient(cube, x, 3 * x**2)
    for wrong in (3 * x**2 + 1e-7, 3 * x[:1] ** 2, x**2):
        with pytest.raises(AssertionError):
            assert_gradient(cube, x, wrong)
    # automatic differentiation alone would say x
    hidden = lambda x: x * jax.lax.stop_gradient(x)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_gradient(hidden, x, x)


def test_single_precision_is_refused():
    with pytest.raises(TypeError, match="float64"):
        assert_gradient(lambda x: x**2, jnp.ones(3), 2 * jnp.ones(3))


def test_double_precision_is_left_behind():
    with float64():
        assert jnp.ones(1).dtype == np.float64
    assert jnp.ones(1).dtype == np.float32


def test_what_is_refused(capsys):
    refuse = lambda: assert_descends([1.0])
    assert_refuses(refuse, "T ≥ 1")
    printed = capsys.readouterr().out
    assert printed == "energies: expected (T+1, ...) with T ≥ 1, got shape (1,)\n"
    with pytest.raises(AssertionError, match="nothing was raised"):
        assert_refuses(lambda: None, "T ≥ 1")
    with pytest.raises(AssertionError, match="expected 'T ≥ 2' in the error, got"):
        assert_refuses(refuse, "T ≥ 2")
    assert not capsys.readouterr().out  # no message that says otherwise is shown
