"""Compiled attention reads the structs that XLA's header declares. Where that is not
certain, or something does not compile, XLA computes instead.
"""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.graph import kernels
from et_nbdev.graph.energy import EdgeAttention, EdgeIndex

HEADER = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text("utf-8")
VERSION = re.compile(r"(#define XLA_FFI_API_(?:MAJOR|MINOR)) (\d+)")
# structs that are named by who holds them, and two that XLA never sees
OTHERS = {"_Extension", "_Version", "_Task", "_Counter"}
STRUCTS = {
    name: dtype
    for name, dtype in vars(kernels).items()
    if isinstance(dtype, np.dtype) and dtype.names and name not in OTHERS
}


# -------------------------------------------------------------------------------------
# the header


def layouts(header):
    """{struct: {field: (offset, size, type)}}, as a C compiler lays them out for 64
    bits.
    """
    text = re.sub(r"//.*|/\*(?:.|\n)*?\*/", "", header)
    # pointers to functions, also those that a macro declares
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", text)
    text = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"* \1", text)
    size = {"int": 4, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "size_t": 8}
    size |= dict.fromkeys(re.findall(r"typedef enum \{[^}]*\} (\w+)", text), 4)
    size |= {new: size[old] for old, new in re.findall(r"typedef (\w+_t) (\w+);", text)}
    aligned, found = dict(size), {}
    up = lambda n, step: -(-n // step) * step
    for name, body in re.findall(r"\bstruct (\w+) \{([^{}]*)\}", text):
        found[name], end, widest = {}, 0, 1
        for declared in filter(None, map(str.strip, body.split(";"))):
            kind, stars, field = re.search(r"(\w+)\s*(\**)\s*(\w+)$", declared).groups()
            bytes, step = (8, 8) if stars else (size[kind], aligned[kind])
            offset = up(end, step)
            found[name][field] = offset, bytes, kind
            end, widest = offset + bytes, max(widest, step)
        size[name], aligned[name] = up(end, widest), widest
    return found


def differences(dtype, struct, header):
    "Where a dtype and a struct of the header disagree, in the structs inside as well."
    fields, found = layouts(header).get(struct, {}), []
    for field in dtype.names:
        if field.startswith("_"):
            continue  # stands for what lies between, which is never read
        inner, offset = dtype.fields[field][:2]
        there = fields.get(field, ())
        if there[:2] != (offset, inner.itemsize):
            found.append(f"{struct}.{field}: {(offset, inner.itemsize)}, not {there}")
        elif inner.names:
            found += differences(inner, there[2], header)
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name):
    assert differences(STRUCTS[name], "XLA_FFI" + name, HEADER) == []


def test_a_request_is_whole():
    "XLA compares the size of a request with its own."
    declared = layouts(HEADER)
    name = "_ThreadPool_Schedule_Args"
    assert list(STRUCTS[name].names) == list(declared["XLA_FFI" + name])


def test_numbers_of_the_header():
    kind = re.search(r"XLA_FFI_Extension_Metadata = (\d+)", HEADER)
    double = re.search(r"XLA_FFI_DataType_F64 = (\d+)", HEADER)
    assert (int(kind[1]), int(double[1])) == (kernels._METADATA, kernels._F64)
    version = tuple(int(number) for _, number in VERSION.findall(HEADER))
    assert kernels._OLDEST <= version <= kernels._NEWEST


# -------------------------------------------------------------------------------------
# where they cannot be used


def header_of(version):
    def change(monkeypatch, folder):
        path = folder / "xla/ffi/api/c_api.h"
        path.parent.mkdir(parents=True)
        numbers = iter(version)
        path.write_text(VERSION.sub(lambda m: f"{m[1]} {next(numbers)}", HEADER))
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(folder))

    return change


def no_header(monkeypatch, folder):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(folder))


def no_numba(monkeypatch, folder):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)


def half_the_bits(monkeypatch, folder):
    monkeypatch.setattr(kernels, "_ptr", np.int32)


def code_that_does_not_compile(monkeypatch, folder):
    def work(task):
        return task.no_such_thing

    monkeypatch.setattr(kernels, "_work", work)


def refused_by_xla(monkeypatch, folder):
    def register(*args, **options):
        raise ValueError("API version (0.3) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)


@pytest.mark.parametrize(
    "change, why",
    [
        (header_of((0, 2)), r"from version 0\.3 to 0\.5, but .*c_api\.h says 0\.2"),
        (header_of((0, 99)), r"says 0\.99"),
        (header_of((1, 3)), r"says 1\.3"),
        (no_header, "says nothing"),
        (no_numba, "pip install"),
        (half_the_bits, "64-bit"),
        (code_that_does_not_compile, "did not build"),
        (refused_by_xla, "did not build.*incompatible"),
    ],
)
def test_falls_back_to_xla_and_says_why(change, why, monkeypatch, tmp_path):
    change(monkeypatch, tmp_path)
    monkeypatch.setattr(kernels, "_KEPT", [])
    kernels.available.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=f"(?s)XLA, which .* slower.*{why}"
        ) as said:
            edges = EdgeIndex([0], [1], 2)
        assert len(said) == 1
        assert edges.backend == "xla"
        attention = EdgeAttention(4, 1, 2, rngs=nnx.Rngs(0))
        assert np.isfinite(attention.energy(jnp.ones((2, 4)), edges=edges))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert EdgeIndex([0], [1], 2).backend == "xla"
        error = (ImportError, RuntimeError)
        with pytest.raises(error, match=f"(?s)^backend 'compiled'.*{why}"):
            EdgeIndex([0], [1], 2, backend="compiled")
    finally:
        kernels.available.cache_clear()
