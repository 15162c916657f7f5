"""What the exported modules define: where each public name is explained on the site,
and its signature and documentation, from the source's own text.
"""

import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDEST = 88  # characters of code and of what it prints that the column holds


def identifier(heading):
    "The anchor that Pandoc gives a heading."
    text = re.sub(r"\s*\{[^}]*\}\s*$", "", heading)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(
        r"[^\w\s.-]",
        "",
        text.replace("`", "").replace("*", "").replace("---", "—").replace("--", "–"),
    )
    return (
        re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text.strip().lower())) or "section"
    )


def first_line(node):
    "The beginning of a docstring, up to the first line that ends a sentence."
    said = []
    for line in (ast.get_docstring(node) or "").strip().split("\n\n")[0].split("\n"):
        said.append(line.strip())
        if line.rstrip().endswith((".", ":")):
            break
    return " ".join(said)


def comment_of(lines, node):
    "The comment at the end of an assignment's first line, or on the lines above it."
    beside = re.search(r"\s#\s+(.*)$", lines[node.lineno - 1])
    if beside:
        return beside[1]
    above = []
    for line in reversed(lines[: node.lineno - 1]):
        if not re.match(r"# (?!%%)", line):
            break
        above.insert(0, line[2:])
    return " ".join(above)


def definitions(path):
    "{name: (its definition, the comment of a constant)} of a module's top level."
    text = path.read_text(encoding="utf-8")
    lines, found = text.split("\n"), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node, ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            comment = comment_of(lines, node)
            for target in (
                node.targets if isinstance(node, ast.Assign) else [node.target]
            ):
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        found[name.id] = node, comment
    return ast.parse(text), found


def head(node, lines):
    "The text of a definition above its body, decorators included, without its pragmas."
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    body = node.body[0]
    text = lines[first - 1 : body.lineno]
    text[-1] = text[-1].encode()[: body.col_offset].decode()
    while re.fullmatch(r"\s*(#.*)?", text[-1]):  # what stands between head and body
        text.pop()
    return without_pragmas("\n".join(line.rstrip() for line in text))


def without_pragmas(code):
    "Code without the comments that only tools read."
    return re.sub(r"[ \t]+#\s*(?:pyright|type|noqa|ruff)\b:?[^\n]*", "", code)


def wrapped(text):
    """What a cell printed, broken to fit the column: between columns where there are
    any, else between words. A bar of progress is shortened.
    """
    return "\n".join(part for line in text.split("\n") for part in fitted(line))


def fitted(line):
    "The pieces of a line, of which each fits the column."
    bar = re.search("█+", line)
    if bar and len(line) > WIDEST:
        more = min(len(line) - WIDEST, len(bar[0]) - 1)
        line = line[: bar.start()] + line[bar.start() + more :]
    parts, indent = [], re.match(" *", line)[0] + "    "
    while len(line) > WIDEST:
        gaps = [
            m
            for pattern in (r"(?<=\S) {2,}", r"(?<=\S) ")
            for m in re.finditer(pattern, line[: WIDEST + 1])
            if m.start() > len(indent)
        ]
        wide = [m for m in gaps if len(m[0]) > 1 and m.end() > WIDEST // 2]
        if not gaps:
            break
        gap = (wide or gaps)[-1]
        parts.append(line[: gap.start()])
        line = indent + line[gap.end() :].lstrip(" ")
    return [*parts, line]


def field(node, lines):
    "The text of a field, and the comments above it."
    first = node.lineno - 1
    while re.match(r"\s+# ", lines[first - 1]):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def one_a_line(text):
    """The head of a function with each parameter in a line of its own, where several
    share the line of the `def`, or the one below it.
    """
    *above, first = re.split(r"^(?=\s*def )", text, maxsplit=1, flags=re.M)
    if not first.lstrip().startswith("def ") or "#" in first or first.count("\n") > 2:
        return text
    indent = re.match(" *", first)[0]
    line = re.sub(r"\n *", " ", first).strip().replace("( ", "(").replace(" )", ")")
    depth, cuts = 0, []  # where the brackets of the parameters and their commas are
    for token in tokenize.generate_tokens(io.StringIO(line).readline):
        depth += (token.string in tuple("([{")) - (token.string in tuple(")]}"))
        if (depth == 1 and token.string in ("(", ",")) or (
            depth == 0 and token.string == ")"
        ):
            cuts.append(token.end[1])
            if depth == 0:
                break
    parts = [line[a:b].strip()[:-1] for a, b in zip(cuts, cuts[1:])]
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return text
    inside = "".join(f"{indent}    {part},\n" for part in parts)
    opened = f"{indent}{line[: cuts[0]]}\n{inside}{indent})"
    return "".join(above) + opened + line[cuts[-1] :]


def signature(node, lines, bases=()):
    """How a function is called, a parameter a line. Of a class, its fields (those of
    `bases` first) and how it is made; of a protocol, all it asks for.
    """
    parts = [one_a_line(head(node, lines))]
    for base in bases:
        parts += [field(part, lines) for part in base.body if is_field(part)]
    if isinstance(node, ast.ClassDef):
        protocol = any(ast.unparse(b).startswith("Protocol") for b in node.bases)
        for part in node.body:
            if is_field(part):
                parts.append(field(part, lines))
            elif isinstance(part, ast.FunctionDef) and (
                part.name == "__init__" or protocol
            ):
                parts += ["", one_a_line(head(part, lines))]
    return re.sub(r"(:\n)\n(?=    (?:def|@))", r"\1", "\n".join(parts))


def is_field(part):
    return isinstance(part, ast.AnnAssign)


@cache
def notebook_cells(name):
    return json.loads((ROOT / "nbs" / name).read_text(encoding="utf-8"))["cells"]


def section_of(cells, name):
    "The heading above the cell that assigns `name`."
    heading = ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^##+ (.+)$", source, re.M) or [heading])[-1]
        elif re.search(r"^#\|\s*exports?\b", source, re.M) and re.search(
            rf"^(?:[\w, ]*\b)?{name}\b[\w, ]*(?::[^=\n]+)?=", source, re.M
        ):
            return heading
    return ""


@dataclass(frozen=True)
class Module:
    name: str  # et_nbdev.graph.energy
    path: Path
    notebook: str  # 30_graph_energy.ipynb

    @cached_property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def public(self):
        "{name: (its definition, the comment of a constant)}."
        found = definitions(self.path)[1]
        names = (
            ast.literal_eval(found["__all__"][0].value) if "__all__" in found else ()
        )
        return {name: found[name] for name in names}

    def home(self, name):
        "The notebook that defines a name, where several export to the module."
        above = self.text.split("\n")[: self.public[name][0].lineno]
        cells = re.findall(r"^# %% \S*/nbs/(\S+\.ipynb)", "\n".join(above), re.M)
        return cells[-1] if cells else self.notebook

    def signature(self, name):
        node = self.public[name][0]
        # what a class has from bases that have no page of their own
        found = definitions(self.path)[1]
        bases = [
            found[base.id][0]
            for base in getattr(node, "bases", ())
            if isinstance(base, ast.Name) and base.id[0] == "_" and base.id in found
        ]
        return signature(node, self.text.split("\n"), bases)

    def anchor(self, name):
        "Where on its page a name is explained; empty for the page as a whole."
        if isinstance(self.public[name][0], (ast.FunctionDef, ast.ClassDef)):
            # `split` beside `Split`: the second has a number, as Pandoc would give it
            same = [n for n in self.public if n.lower() == name.lower()]
            return name.lower() + f"-{same.index(name)}" * (name != same[0])
        heading = section_of(notebook_cells(self.home(name)), name)
        return identifier(heading) if heading else ""

    def place(self, path):
        """(notebook, anchor) of a name, or of a member of a class, or of the module;
        None where there is no such thing.
        """
        if not path:
            return self.notebook, ""
        if path[0] not in self.public or len(path) > 2:
            return None
        members = {
            name
            for part in getattr(self.public[path[0]][0], "body", ())
            for name in (
                getattr(part, "name", None),
                getattr(getattr(part, "target", None), "id", None),
            )
        }
        if path[1:] and path[1] not in members:
            return None
        return self.home(path[0]), self.anchor(path[0])


@cache
def modules():
    "Every module that a notebook exports, in the order of the notebooks."
    found = []
    for path in (ROOT / "et_nbdev").rglob("*.py"):
        source = re.search(
            r"File to edit: .*?/nbs/(\S+\.ipynb)", path.read_text(encoding="utf-8")
        )
        if source:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(Module(name, path, source[1]))
    return sorted(found, key=lambda m: m.notebook)


@cache
def imported(notebook):
    "{name: [module, name there]} of what a notebook imports from the library."
    found = {}
    if not (ROOT / "nbs" / notebook).is_file():
        return found
    for cell in notebook_cells(notebook):
        if cell["cell_type"] == "code":
            try:
                tree = ast.parse("".join(cell["source"]))
            except SyntaxError:  # what IPython alone understands
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        found[alias.asname or alias.name] = (
                            f"{node.module}.{alias.name}"
                        )
    return found


def meaning(name, notebook):
    """(notebook, anchor) of what a name means on a page, as it would to the page's
    code: the whole name of something public, something of the page's own module, or
    something that its notebook imports. Else None: a word that some other module
    happens to use as a name is a word.
    """
    path = name.split(".")
    own = next((m for m in modules() if m.notebook == notebook), None)
    if own and path[0] in own.public:
        return own.place(path)
    if path[0] in imported(notebook):
        path[:1] = imported(notebook)[path[0]].split(".")
    for n in range(len(path), 0, -1):
        for module in modules():
            if module.name == ".".join(path[:n]):
                return module.place(path[n:])
    return None
