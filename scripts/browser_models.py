"""What the pages that run a model in a browser load, into nbs/play: the weights that
ship with the library, NAME.safetensors, the larger ones in half precision, and pictures
side by side: photographs.png with six photographs, digits.png with a held-out digit of
each kind.

    python scripts/browser_models.py
"""

import json
import struct
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from et_nbdev.training import atomic_write
from et_nbdev.vision.data import photographs
from et_nbdev.vision.train import CONFIGS as _CONFIGS
from et_nbdev.vision.train import prepare as _prepare

OUT = Path(__file__).resolve().parent.parent / "nbs/play"


def halved(content: bytes) -> bytes:
    "A safetensors file of float32 arrays as one of float16 arrays."
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    parts, end = [], 0
    # the digest is that of the other file
    about = {"meta": header.pop("__metadata__")["meta"]}
    for entry in header.values():
        start, stop = entry["data_offsets"]
        values = np.frombuffer(data[start:stop], np.dtype("<f4")).astype("<f2")
        if not np.isfinite(values).all():
            raise ValueError("a weight does not fit into half precision")
        parts.append(values.tobytes())
        entry |= dict(dtype="F16", data_offsets=[end, end + len(parts[-1])])
        end += len(parts[-1])
    text = json.dumps({"__metadata__": about, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


# small models stay as they are
PACKED = {"tiny-imagenet": halved, "digits": bytes}
PACKED |= {"sudoku-4": bytes, "sudoku-6": halved}


def source(name: str):
    "The file in the library."
    room = "et_nbdev" if name.startswith("sudoku") else "et_nbdev.vision"
    return files(room) / "weights" / f"{name}.safetensors"


def held_out_digits():
    "The first picture of each digit in the test split, 0 to 9."
    pictures = _prepare(_CONFIGS["digits"])[1]["test"]
    pictures = pictures[np.arange(len(pictures))]
    known = load_digits()
    pixels = np.round(known.images * (255 / 16)).astype(np.uint8)
    kinds = {p.tobytes(): kind for p, kind in zip(pixels, known.target)}
    first = {}
    for picture in pictures:
        first.setdefault(kinds[picture.tobytes()], picture[..., 0])
    return [first[kind] for kind in range(10)]


def main():
    OUT.mkdir(exist_ok=True)
    for name, packed in PACKED.items():
        path = OUT / f"{name}.safetensors"
        with atomic_write(path) as temporary:
            temporary.write_bytes(packed(source(name).read_bytes()))
        print(path.name, path.stat().st_size // 1000, "kB")
    sheets = {"photographs": photographs(64), "digits": held_out_digits()}
    for name, pictures in sheets.items():
        sheet = Image.fromarray(np.concatenate(list(pictures), axis=1))
        sheet.save(OUT / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
