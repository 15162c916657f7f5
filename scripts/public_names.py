"""The names that users may rely on, one a line: `python scripts/public_names.py >
tests/public_names.txt` where the change is meant.
"""

from modules import modules


def names():
    "module.name for every name in a public module's `__all__`, sorted."
    public = (m for m in modules() if m.path.name[0] != "_")
    return sorted(f"{m.name}.{name}" for m in public for name in m.public)


if __name__ == "__main__":
    print("\n".join(names()))
