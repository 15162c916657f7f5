"""Types are checked while the tests run: pytest's option `--jaxtyping-packages` (in
pyproject.toml) has jaxtyping and beartype compare every call of every function of the
library with its annotations.

A function that refuses bad input by itself is asked first, so that a test of bad input
meets the error that a user meets. What it accepts against its annotation is an error of
the type checker: either the annotation or the function is wrong. An array of NumPy
counts as the one that JAX makes of it. The annotations of a dataclass are for what it
holds, after `__post_init__` has checked and converted it.
"""

import contextlib
import dataclasses
import functools
import inspect

import jax
import jaxtyping
import numpy as np

jaxtyped = jaxtyping.jaxtyped  # what the import hook puts around every function


def door_first(fn=None, *, typechecker):
    "`jaxtyping.jaxtyped`, except that the function itself may refuse its arguments."
    if fn is None:
        return functools.partial(door_first, typechecker=typechecker)
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = fields_checked(fn, typechecker)
        return fn
    if not fn.__annotations__:
        return fn  # as it is: numba compiles no function that is wrapped
    checked = jaxtyped(fn, typechecker=typechecker)
    own = f"checking the parameters of {fn.__module__}.{fn.__qualname__}."
    signature, results = inspect.signature(fn), []

    @functools.wraps(fn)
    def result(*args, **kwargs):
        return results.pop()

    check = jaxtyped(result, typechecker=typechecker)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        try:
            return checked(*args, **kwargs)
        except jaxtyping.TypeCheckError as error:
            if own not in str(error).partition("\n")[0]:
                raise  # it is about the result, or about a function called inside
        found = fn(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            if "ndarray" not in str(signature.parameters[name].annotation):
                given.arguments[name] = as_jax(value)
        results[:] = [found]
        return check(*given.args, **given.kwargs)

    return call


def as_jax(x):
    "What JAX makes of an array of NumPy."
    numbers = isinstance(x, np.ndarray) and x.dtype.kind in "biuf"
    return jax.numpy.asarray(x) if numbers else x


def fields_checked(cls, typechecker):
    "`__init__` of a dataclass, with a look at the fields when it is done."
    init, names = cls.__init__, [f.name for f in dataclasses.fields(cls) if f.init]

    @functools.wraps(init)
    def nothing(*args, **kwargs):
        pass

    check = jaxtyped(nothing, typechecker=typechecker)

    @functools.wraps(init)
    def call(self, *args, **kwargs):
        __tracebackhide__ = True
        init(self, *args, **kwargs)
        # JAX makes pytrees anew around whatever stands in for their arrays
        if jax.tree_util.all_leaves([self]):
            check(self, **{name: getattr(self, name) for name in names})

    return call


def check(on):
    "Whether calls are compared with annotations from now on."
    jaxtyping.config.update("jaxtyping_disable", not on)


@contextlib.contextmanager
def unchecked():
    "For bad input that is made in one place and refused in another."
    before = jaxtyping.config.jaxtyping_disable
    check(False)
    try:
        yield
    finally:
        check(not before)


def ask_first():
    "To be called before the library is imported."
    jaxtyping.jaxtyped = door_first
