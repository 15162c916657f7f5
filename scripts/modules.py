"""What the exported modules define: where each public name is explained on the site,
and its signature and documentation, from the source's own text. And the pieces of a
page's Markdown that are not prose.
"""

import ast
import json
import posixpath
import re
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
WIDEST = 88  # characters of code and of what it prints that the column holds
DEFINED = ast.FunctionDef, ast.ClassDef

# Code, and Pandoc's formulas: an opening dollar has no space after it; a closing one has
# none before it and no digit after it.
FENCE = r"^[ \t]*(?P<fence>`{3,}|~{3,})(?P<kind>[^\n]*)\n(?P<body>.*?)^[ \t]*(?P=fence)[ \t]*$"
CODE = r"(?<!`)(?P<tick>`+)(?!`)(?P<code>.+?)(?<!`)(?P=tick)(?!`)"
MATH = (
    r"(?<!\\)\$\$(?P<display>.+?)\$\$"
    r"|(?<![\\$])\$(?![\s$])(?P<inline>(?:\\.|[^$\\]|\n(?!\n))*?)(?<![\s\\])\$(?![\d$])"
)
PIECE = re.compile(f"{FENCE}|{CODE}|{MATH}", re.M | re.S)
HEADING_OR_LINK = r"^\#+[ ][^\n]*$|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)"
LINK = r"(?P<to>\]\(|(?:src|href)=\")(?P<path>(?![a-z][a-z+.-]*:|[#/])[^)\s\"]+)"
TARGET = re.compile(f"{FENCE}|{CODE}|{MATH}|{LINK}", re.M | re.S)
NAMED = re.compile(f"{FENCE}|{HEADING_OR_LINK}|{MATH}|{CODE}", re.M | re.S)


def settings():
    config = ConfigParser()
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


def in_repository(path):
    "The address of a file of the repository."
    return f"{settings()['git_url']}/blob/{settings()['branch']}/{path}"


def identifier(heading):
    "The anchor that Pandoc gives a heading."
    text = re.sub(r"\s*\{[^}]*\}\s*$|[`*]", "", heading)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"--+|[^\w\s.-]", "", text)
    return re.sub(r"^[^a-z]+", "", "-".join(text.lower().split())) or "section"


def notebooks():
    "Every notebook: the numbered ones and other pages, then the engine room."
    return sorted(NBS.glob("*.ipynb")) + sorted(NBS.glob("engine/*.ipynb"))


def dumped(notebook):
    "The text of a notebook's file, as nbdev writes it."
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    return f"{text}\n"


def on_site(target):
    "A link to a page as the site has it, where all pages lie in one folder."
    target = re.sub(r"^engine/(?=\w+\.ipynb)", "engine_", target)
    return re.sub(r"^records/([\w-]+)\.md", r"records_\1.qmd", target)


def moved(text, folder, write):
    """Markdown with `write(path)` in the place of links that are relative to `folder`;
    addresses, anchors, formulas and code are left alone.
    """

    def move(m):
        if not m["path"]:
            return m[0]
        return m["to"] + write(posixpath.normpath(posixpath.join(folder, m["path"])))

    return TARGET.sub(move, text)


def without_pragmas(code):
    "Code without the comments that only tools read."
    return re.sub(r"[ \t]+#\s*(?:pyright|type|noqa|ruff)\b:?[^\n]*", "", code)


# --- definitions ---


def first_line(node):
    "The beginning of a docstring, up to the first line that ends a sentence."
    said = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return " ".join(re.match(r".*?(?:[.:](?=\n|\Z)|\Z)", said, re.S)[0].split())


def comment_of(lines, node):
    "The comment at the end of the first or the last line of code, or on those above it."
    ends = f"{lines[node.lineno - 1]}\n{lines[node.end_lineno - 1]}"
    if beside := re.search(r"\s#\s+(?!pyright|noqa)(.*)$", ends, re.M):
        return beside[1]
    above = "\n".join(lines[: node.lineno - 1])
    block = re.search(r"(?:^ *# (?!%%).*(?:\n|\Z))+\Z", above, re.M)
    return re.sub(r"\s*(?:^|\n) *# ", " ", block[0]).strip() if block else ""


def definitions(path):
    "{name: (its definition, the comment of a constant)} of a module's top level."
    text = path.read_text(encoding="utf-8")
    lines, found = text.split("\n"), {}
    for node in ast.parse(text).body:
        if isinstance(node, DEFINED):
            found[node.name] = node, ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            stored = (n.id for n in names if isinstance(n.ctx, ast.Store))
            found |= dict.fromkeys(stored, (node, comment_of(lines, node)))
    return found


def head(node, lines):
    "The text of a definition above its body, decorators included, without its pragmas."
    first = min(d.lineno for d in (node, *node.decorator_list))
    body = node.body[0]
    text = lines[first - 1 : body.lineno]
    text[-1] = text[-1].encode()[: body.col_offset].decode()
    return without_pragmas(re.sub(r"(\n\s*(#.*)?)+\Z", "", "\n".join(text)).rstrip())


def signature(node, lines):
    """How a function is called. Of a class, its fields with the comments above them, and
    how it is made; of a protocol, all it asks for.
    """
    parts = [head(node, lines)]
    protocol = any("Protocol" in ast.unparse(b) for b in getattr(node, "bases", ()))
    for part in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(part, ast.AnnAssign):
            first = part.lineno - 1
            while re.match(r"\s+# ", lines[first - 1]):
                first -= 1
            parts.append("\n".join(lines[first : part.end_lineno]))
        elif isinstance(part, ast.FunctionDef):
            if part.name == "__init__" or protocol:
                parts += [""] * (len(parts) > 1) + [head(part, lines)]
    return "\n".join(parts)


@cache
def notebook_cells(name):
    return json.loads((NBS / name).read_text(encoding="utf-8"))["cells"]


@dataclass(frozen=True)
class Module:
    name: str  # et_nbdev.graph.energy
    path: Path
    notebook: str  # 30_graph_energy.ipynb, engine/toy.ipynb

    @cached_property
    def lines(self):
        return self.path.read_text(encoding="utf-8").split("\n")

    @cached_property
    def defined(self):
        return definitions(self.path)

    @cached_property
    def public(self):
        "{name: (its definition, the comment of a constant)}."
        listed = self.defined.get("__all__")
        names = ast.literal_eval(listed[0].value) if listed else ()
        return {name: self.defined[name] for name in names}

    def home(self, name):
        "The notebook that defines a name, where several export to the module."
        above = "\n".join(self.lines[: self.public[name][0].lineno])
        found = re.findall(r"^# %% \S*/nbs/(\S+\.ipynb)", above, re.M)
        return found[-1] if found else self.notebook

    def source(self, name):
        "The address of the line that defines a name."
        file = self.path.relative_to(ROOT).as_posix()
        return f"{in_repository(file)}#L{self.public[name][0].lineno}"

    def signature(self, name):
        return signature(self.public[name][0], self.lines)

    def anchor(self, name):
        "Where on its page a name is explained; empty for the page as a whole."
        if isinstance(self.public[name][0], DEFINED):
            # `split` beside `Split`: the second has a number, as Pandoc would give it
            same = [n for n in self.public if n.lower() == name.lower()]
            return name.lower() + f"-{same.index(name)}" * (name != same[0])
        assigned = re.compile(rf"^(?:[\w, ]*\b)?{name}\b[\w, ]*(?::[^=\n]+)?=", re.M)
        heading = ""
        for cell in notebook_cells(self.home(name)):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                heading = (re.findall(r"^##+ (.+)$", source, re.M) or [heading])[-1]
            elif source.startswith("#| export") and assigned.search(source):
                break
        return identifier(heading) if heading else ""

    def place(self, path):
        """(notebook, anchor) of a name, or of a member of a class, or of the module;
        None where there is no such thing.
        """
        if not path:
            return self.notebook, ""
        if path[0] not in self.public or len(path) > 2:
            return None
        body = getattr(self.public[path[0]][0], "body", ())
        members = {getattr(getattr(p, "target", p), "id", None) for p in body}
        members |= {getattr(part, "name", None) for part in body}
        if members.issuperset(path[1:]):
            return self.home(path[0]), self.anchor(path[0])


@cache
def modules():
    "Every module that a notebook exports, in the order of the notebooks."
    found = []
    for path in (ROOT / "et_nbdev").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if source := re.search(r"File to edit: .*?/nbs/(\S+\.ipynb)", text):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(Module(name, path, source[1]))
    return sorted(found, key=lambda m: m.notebook)


def defined_by(notebook):
    "{name: its module} of the public names that a notebook defines."
    return {n: m for m in modules() for n in m.public if m.home(n) == notebook}


@cache
def imported(notebook):
    "{name: its whole name} of what a notebook imports from the library."
    found = {}
    for cell in notebook_cells(notebook) if (NBS / notebook).is_file() else ():
        try:
            tree = ast.parse("".join(cell["source"]))
        except SyntaxError:  # text, or what IPython alone understands
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    found[name.asname or name.name] = f"{node.module}.{name.name}"
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
    path[:1] = imported(notebook).get(path[0], path[0]).split(".")
    for n in range(len(path), 0, -1):
        for module in modules():
            if module.name == ".".join(path[:n]):
                return module.place(path[n:])


def linked(text, notebook, page=None):
    """Markdown whose names in code are links to where they are explained. What they mean
    is up to the notebook; `page` is where the text stands, if not there. Headings, links,
    formulas and code of several lines stay as they are.
    """

    def link(m):
        name = re.fullmatch(r"([A-Za-z_][\w.]*)(\(\))?", m["code"] or "")
        place = name and meaning(name[1], notebook)
        if not place:
            return m[0]
        target = on_site(place[0]) if place[0] != (page or notebook) else ""
        target += f"#{place[1]}" if place[1] else ""
        return f"[{m[0]}]({target})" if target else m[0]

    return NAMED.sub(link, text)
