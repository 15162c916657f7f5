"""What the pages that run a model in a browser load, into nbs/play: the weights that
ship with the library, NAME.safetensors, the larger ones in half precision. The pictures
beside them, six photographs of the library and a held-out digit of each kind, are as
they are.

    python scripts/browser_models.py
"""

import json
import struct
from importlib.resources import files
from pathlib import Path

import numpy as np

from et_nbdev.training import atomic_write

OUT = Path(__file__).resolve().parent.parent / "nbs/play"


def halved(content: bytes) -> bytes:
    "A safetensors file of float32 arrays as one of float16 arrays."
    size = 8 + struct.unpack("<Q", content[:8])[0]
    header, parts, end = json.loads(content[8:size]), [], 0
    # the digest is that of the other file
    about = {"meta": header.pop("__metadata__")["meta"]}
    for entry in header.values():
        start, stop = (size + at for at in entry["data_offsets"])
        with np.errstate(over="raise"):  # every weight fits
            values = np.frombuffer(content[start:stop], "<f4").astype("<f2")
        parts.append(values.tobytes())
        entry |= dict(dtype="F16", data_offsets=[end, end + len(parts[-1])])
        end += len(parts[-1])
    text = json.dumps({"__metadata__": about, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


# small models stay as they are
PACKED = {"photographs": halved, "digits": bytes, "sudoku-4": bytes, "sudoku-6": halved}


def source(name: str):
    "The file in the library."
    room = "et_nbdev" if name.startswith("sudoku") else "et_nbdev.vision"
    return files(room) / "weights" / f"{name}.safetensors"


def main():
    OUT.mkdir(exist_ok=True)
    for name, packed in PACKED.items():
        path = OUT / f"{name}.safetensors"
        with atomic_write(path) as temporary:
            temporary.write_bytes(packed(source(name).read_bytes()))
        print(path.name, path.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main()
