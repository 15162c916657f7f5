"""The annotations are true: every call that a test makes is compared with them. These
tests see to it that a wrong one is caught and that bad input
still meets the error that a user meets.
"""

import importlib
import sys
import textwrap

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from et_nbdev.norm import EnergyLayerNorm

PLANTED = textwrap.dedent("""
    from dataclasses import dataclass
    import numpy as np
    from jaxtyping import Array, Float

    def half(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        return x[:, ::2]

    def mean(x: Float[Array, "N D"], weights: Float[Array, "N"]) -> Float[Array, "D"]:
        return (x * weights[:, None]).sum(0)

    def door(x: Float[Array, "N D"]) -> Float[Array, "D"]:
        if x.ndim != 2:
            raise ValueError(f"x: expected (N, D), got {x.shape}")
        return x[0]

    def inside(x: Float[Array, "..."]) -> Float[Array, "..."]:
        return half(x)

    def rows(x: Float[np.ndarray, "D"], y: Float[Array, "N D"]) -> int:
        return len(y)

    @dataclass
    class Held:
        sizes: tuple[int, ...]
        name: str = ""

        def __post_init__(self):
            if len(self.sizes) == 0:
                raise ValueError("sizes: expected at least one")
            self.sizes = tuple(self.sizes)
""")


@pytest.fixture
def checked(request):
    "The tests may run without the hook: `--jaxtyping-packages=`."
    option = request.config.getoption("--jaxtyping-packages")
    assert option is not None, "pyproject.toml no longer has the option"
    if not option:
        pytest.skip("--jaxtyping-packages is empty: no annotation is checked")
    return option.partition(",")[2]


@pytest.fixture
def planted(checked, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("planted", checked):
        yield importlib.import_module("planted")
    del sys.modules["planted"]


def test_a_force_that_would_be_spread_over_the_token_is_caught(checked):
    norm, x = EnergyLayerNorm(4), jnp.ones((2, 3, 4))
    assert norm.turning(x, x).shape == x.shape
    with pytest.raises(jaxtyping.TypeCheckError, match="turning"):
        norm.turning(x, x[..., :1])


def test_wrong_annotations_are_caught(planted):
    x = jnp.ones((3, 4))
    with pytest.raises(jaxtyping.TypeCheckError, match="return value of planted.half"):
        planted.half(x)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters of planted.mean"):
        planted.mean(x, jnp.ones(1))
    with pytest.raises(jaxtyping.TypeCheckError, match="return value of planted.half"):
        planted.inside(x)


def test_a_function_that_refuses_by_itself_is_asked_first(planted):
    with pytest.raises(ValueError, match=r"^x: expected \(N, D\), got \(4,\)"):
        planted.door(jnp.ones(4))
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters of planted.door"):
        planted.door(jnp.ones((3, 4), int))


def test_an_array_of_numpy_counts_as_what_jax_makes_of_it(planted):
    x = np.ones((3, 4))
    assert planted.mean(x, jnp.ones(3)).shape == (4,)
    for weights in (np.ones(1), np.ones(3, int)):
        with pytest.raises(jaxtyping.TypeCheckError, match="of planted.mean"):
            planted.mean(x, weights)
    with pytest.raises(jaxtyping.TypeCheckError, match="return value of planted.half"):
        planted.half(x)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters of planted.rows"):
        planted.rows(jnp.ones(3), x)
    assert planted.rows(x[0], x) == 3


def test_a_dataclass_is_judged_by_what_it_holds(planted):
    assert planted.Held([1, 2]).sizes == (1, 2)
    with pytest.raises(ValueError, match="^sizes"):
        planted.Held([])
    with pytest.raises(jaxtyping.TypeCheckError, match="Held"):
        planted.Held((1, 2), name=3)
