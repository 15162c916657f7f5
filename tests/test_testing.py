"""The instruments themselves: what each assertion lets through and what it must not. More
mistakes that they catch are in nbs/engine/testing.ipynb.
"""

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
cube = lambda x: jnp.sum(x**3, -1)
POINT = np.linspace(0.5, 2.0, 6).reshape(2, 3)
SQUARE = np.array([[1.0, 2.0], [3.0, 4.0]])


def test_what_is_close_and_what_descends(x64):
    # small beside the largest entry
    assert_close(np.array([1.0, 1e-12]), np.array([1.0, 0.0]))
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)))
    assert_close(np.array([1.1]), np.array([1.0]), rtol=0, atol=0.11)
    assert_descends([[2.0, 0.0], [1.0, 0.0]])
    assert_descends([1e6, 1e6 * (1 + 1e-7)], rtol=1e-6)  # rounding, in single precision
    assert_gradient(cube, POINT, 3 * POINT**2)


@pytest.mark.parametrize(
    "check, given, says",
    [
        (assert_close, (np.ones((2, 3)), np.ones(3)), "shape"),
        (assert_close, (np.ones(3, np.float32), np.ones(3)), "dtype"),
        (assert_close, (np.array([1.0, np.nan]), np.ones(2)), "not finite"),
        (assert_close, (np.ones(1), np.array([np.inf])), "entries are not finite"),
        (assert_close, (np.full(3, 1e-6), np.zeros(3)), "exceeds"),
        (assert_close, (SQUARE + 0.1 * (SQUARE == 4), SQUARE), r"at \(1, 1\)"),
        (assert_close, (np.array([1.0, 1.0 + 2e-9]), np.ones(2)), "exceeds"),
        (assert_descends, ([1.0, 1.0 + 1e-9],), "step 0"),
        (assert_descends, ([[3.0, 1.0], [2.0, 1.0], [1.5, 1.1]],), r"step 1, .*\(1,\)"),
        (assert_gradient, (cube, POINT, 3 * POINT**2 + 1e-7), "exceeds"),
        (assert_gradient, (cube, POINT, 3 * POINT[:1] ** 2), "shape"),
    ],
)
def test_what_is_wrong_is_said(x64, check, given, says):
    with pytest.raises(AssertionError, match=says):
        check(*given)


def test_nothing_to_judge():
    for energies in (1.0, [1.0], np.zeros((3, 0))):
        with pytest.raises(ValueError, match="energies"):
            assert_descends(energies)


def test_double_precision_is_left_behind():
    with float64():
        assert jnp.ones(1).dtype == np.float64
    assert jnp.ones(1).dtype == np.float32


def test_what_is_refused(capsys):
    refuse = lambda: assert_descends([1.0])
    assert_refuses(refuse, "T ≥ 1")
    printed = capsys.readouterr().out
    assert printed == "energies: expected (T+1, ...) with T ≥ 1, got shape (1,)\n"
    with pytest.raises(AssertionError, match="expected 'T ≥ 2' in the error, got"):
        assert_refuses(refuse, "T ≥ 2")
    assert not capsys.readouterr().out  # no message that says otherwise is shown
