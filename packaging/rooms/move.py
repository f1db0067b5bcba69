#!/usr/bin/env python3
"""Moves and merges modules of `qerl/` by mapping.json, without rewriting. See README in the same folder.

Usage: python move.py [--root TREE] [--dry]      (the tree must be a git work tree without changes)
"""
from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WARN: list[str] = []
PATCHES: dict[str, list] = {"before": [], "after": []}


def warn(text: str) -> None:
    WARN.append(text)


def before(f, text):
    """The text of a file after the replacements of patches.json that precede the move."""
    for place, old, new in PATCHES["before"]:
        if place == f:
            if old not in text:
                warn(f"PATCH doesn't match any more: {f}: {old[:60]!r}")
            text = text.replace(old, new)
    return text


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, text=True, capture_output=True, check=True).stdout


def dotted(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


# ---------------------------------------------------------------- scopes


class Scope:
    def __init__(self, kind, parent, node):
        self.kind, self.parent, self.node = kind, parent, node
        self.bound: set[str] = set()
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()


def bindings_of(body, scope):
    """Names that statements bind in their own scope."""

    def visit(n):
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bound.add(n.name)
            for d in n.decorator_list:
                visit(d)
            if not isinstance(n, ast.ClassDef):
                for d in [*n.args.defaults, *filter(None, n.args.kw_defaults)]:
                    visit(d)
            return
        if isinstance(n, ast.Lambda):
            return
        if isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            for w in ast.walk(n):
                if isinstance(w, ast.NamedExpr):
                    scope.bound.add(w.target.id)
            return
        if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del)):
            scope.bound.add(n.id)
        elif isinstance(n, ast.alias):
            return
        elif isinstance(n, (ast.Import, ast.ImportFrom)):
            for a in n.names:
                scope.bound.add(a.asname or a.name.split(".")[0])
        elif isinstance(n, ast.ExceptHandler) and n.name:
            scope.bound.add(n.name)
        elif isinstance(n, (ast.MatchAs, ast.MatchStar)) and n.name:
            scope.bound.add(n.name)
        elif isinstance(n, ast.MatchMapping) and n.rest:
            scope.bound.add(n.rest)
        elif isinstance(n, ast.Global):
            scope.globals |= set(n.names)
        elif isinstance(n, ast.Nonlocal):
            scope.nonlocals |= set(n.names)
        for c in ast.iter_child_nodes(n):
            visit(c)

    for n in body:
        visit(n)
    scope.bound -= scope.globals | scope.nonlocals


def resolve(name, scope):
    """The scope that binds a name, seen from `scope`; None if no scope does (a builtin)."""
    s, first = scope, True
    while s is not None:
        if name in s.globals:
            while s.parent is not None:
                s = s.parent
            return s if name in s.bound else None
        if name in s.bound and (first or s.kind != "class"):
            return s
        first = False
        s = s.parent
    return None


class File:
    """A parsed file: its scopes, references of names, and imports."""

    def __init__(self, path, text):
        self.path, self.text = path, text
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.data.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.module = Scope("module", None, self.tree)
        self.refs = []  # (node, scope where it stands, binding scope)
        self.imports = []  # (stmt, scope, context: 'top' | 'type' | 'block' | 'local')
        self.calls = []
        self.attributes = {}
        self.globals_stmts = []
        self.executed = []  # names read as the module is imported
        bindings_of(self.tree.body, self.module)
        self._deep = 0
        self._joined = None
        for n in self.tree.body:
            self._visit(n, self.module, "top", True)

    def at(self, line, column):
        return self.starts[line - 1] + column

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def _function(self, n, scope, ctx):
        new = Scope("function", scope, n)
        a = n.args
        for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]:
            new.bound.add(arg.arg)
        body = n.body if isinstance(n.body, list) else [n.body]
        bindings_of(body, new)
        return new, body

    def _visit(self, n, scope, ctx, run):
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for d in n.decorator_list:
                self._visit(d, scope, ctx, run)
            a = n.args
            for d in [*a.defaults, *filter(None, a.kw_defaults)]:
                self._visit(d, scope, ctx, run)
            for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]:
                if arg.annotation:
                    self._visit(arg.annotation, scope, ctx, False)
            if n.returns:
                self._visit(n.returns, scope, ctx, False)
            new, body = self._function(n, scope, ctx)
            for b in body:
                self._visit(b, new, "local", False)
            return
        if isinstance(n, ast.Lambda):
            a = n.args
            for d in [*a.defaults, *filter(None, a.kw_defaults)]:
                self._visit(d, scope, ctx, run)
            new, body = self._function(n, scope, ctx)
            for b in body:
                self._visit(b, new, "local", False)
            return
        if isinstance(n, ast.ClassDef):
            for d in [*n.decorator_list, *n.bases, *n.keywords]:
                self._visit(d, scope, ctx, run)
            new = Scope("class", scope, n)
            bindings_of(n.body, new)
            for b in n.body:
                self._visit(b, new, "local", run)
            return
        if isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            new = Scope("function", scope, n)
            for g in n.generators:
                for w in ast.walk(g.target):
                    if isinstance(w, ast.Name):
                        new.bound.add(w.id)
            self._visit(n.generators[0].iter, scope, ctx, run)
            for i, g in enumerate(n.generators):
                self._visit(g.target, new, ctx, run)
                if i:
                    self._visit(g.iter, new, ctx, run)
                for c in g.ifs:
                    self._visit(c, new, ctx, run)
            if isinstance(n, ast.DictComp):
                self._visit(n.key, new, ctx, run)
                self._visit(n.value, new, ctx, run)
            else:
                self._visit(n.elt, new, ctx, run)
            return
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            self.imports.append((n, scope, ctx))
            return
        if isinstance(n, ast.Global):
            self.globals_stmts.append(n)
        if isinstance(n, ast.Name):
            b = resolve(n.id, scope)
            self.refs.append((n, scope, b, self._joined))
            if run and b is self.module:
                self.executed.append(n.id)
            return
        if isinstance(n, ast.Call):
            self.calls.append((n, scope))
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
            self.attributes[id(n.value)] = n
        if isinstance(n, ast.JoinedStr):
            before, self._joined = self._joined, n
            for c in ast.iter_child_nodes(n):
                self._visit(c, scope, ctx, run)
            self._joined = before
            return
        if isinstance(n, ast.If) and ctx == "top":
            typing = isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"
            self._visit(n.test, scope, ctx, run)
            for b in [*n.body, *n.orelse]:
                self._visit(b, scope, "type" if typing else "block", run and not typing)
            return
        if isinstance(n, ast.AnnAssign):
            # pydantic and dataclasses read annotations of classes as these are made
            self._visit(n.annotation, scope, ctx, run and scope.kind == "class")
            self._visit(n.target, scope, ctx, run)
            if n.value:
                self._visit(n.value, scope, ctx, run)
            return
        inner = "block" if ctx == "top" and isinstance(n, (ast.Try, ast.With, ast.For, ast.While)) else ctx
        for c in ast.iter_child_nodes(n):
            self._visit(c, scope, inner, run)


# ---------------------------------------------------------------- the plan


class Plan:
    def __init__(self, mapping):
        files = [f for f in git("ls-files").split("\n") if f]
        self.files = files
        self.py = [f for f in files if f.endswith(".py") and f.split("/")[0] in ("qerl", "tests", "docs")]
        self.parsed = {f: File(f, before(f, (ROOT / f).read_text(encoding="utf-8"))) for f in self.py}
        self.mapping = mapping
        self.targets: dict[str, list[str]] = collections.OrderedDict()
        self.new: dict[str, str] = {}  # old path -> new path
        have = set(files)
        for target, spec in mapping["targets"].items():
            sources = ["qerl/" + s for s in spec["sources"] if "qerl/" + s in have]
            for s in spec["sources"]:
                if "qerl/" + s not in have:
                    warn(f"source is gone: {s}")
            if sources:
                self.targets["qerl/" + target] = sources
        for t, ss in self.targets.items():
            for s in ss:
                self.new[s] = t
        self.packages: dict[str, str] = mapping["packages"]  # old dotted package -> new dotted
        self.dropped = []
        for f in self.py:
            if f.startswith("qerl/") and f not in self.new:
                if f.endswith("/__init__.py"):
                    self.dropped.append(f)
                    continue
                folder = dotted(f.rpartition("/")[0] + "/x.py").rpartition(".")[0]
                to = self.packages.get(folder, folder)
                name = f.rpartition("/")[2]
                target = to.replace(".", "/") + "/" + name
                if target in self.targets or not self._is_folder(to):
                    target = target.removesuffix(".py") + "_" + folder.rpartition(".")[2] + ".py"
                    if not self._is_folder(to):
                        target = "qerl/" + name
                warn(f"UNMAPPED {f}: it becomes {target}")
                self.targets[target] = [f]
                self.new[f] = target
        self._tests()
        self.old_mods = {dotted(f): f for f in self.py}
        self.rename: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for target, spec in mapping["targets"].items():
            for s, names in spec.get("rename", {}).items():
                self.rename["qerl/" + s] |= names
        for f in self.py:
            self.parsed[f].defs = self._defs(f)
        self._collisions()
        self.reexports = {}
        for f in self.dropped:
            for stmt, _, _ in self.parsed[f].imports:
                if isinstance(stmt, ast.ImportFrom) and stmt.module in self.old_mods:
                    for a in stmt.names:
                        self.reexports[dotted(f), a.asname or a.name] = (stmt.module, a.name)

    def _is_folder(self, package):
        prefix = package.replace(".", "/") + "/"
        return any(t.startswith(prefix) for t in [*self.targets, *("qerl/" + t for t in self.mapping["targets"])])

    def _tests(self):
        folders = self.mapping["tests"]["folders"]
        single = self.mapping["tests"]["files"]
        taken = set()
        todo = [f for f in self.files if f.startswith("tests/")]
        for f in todo:
            if f in single:
                self.new[f] = single[f]
                taken.add(single[f])
        for f in todo:
            if f in self.new:
                continue
            folder, _, name = f.rpartition("/")
            to = folders.get(folder)
            if to is None:
                continue
            target = f"{to}/{name}"
            if name == "__init__.py":
                self.new[f] = target
                continue
            if target in taken or (target in self.files and folders.get(target.rpartition("/")[0], 1) == 1 and target not in self.new and target != f):
                stem = folder.rpartition("/")[2]
                target = f"{to}/test_{stem}_{name.removeprefix('test_')}" if name != "conftest.py" else f"{to}/{stem}_fixtures.py"
                warn(f"test's name is taken: {f} becomes {target}")
            taken.add(target)
            self.new[f] = target

    def _defs(self, f):
        """Names that a module defines at its top level, other than by imports."""
        p = self.parsed[f]
        imported = set()
        for stmt, scope, _ in p.imports:
            if scope is p.module:
                imported |= {a.asname or a.name.split(".")[0] for a in stmt.names}
        self_defs = set()

        def walk(body):
            for n in body:
                if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                    self_defs.add(n.name)
                elif isinstance(n, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
                    for part in ("body", "orelse", "finalbody", "handlers"):
                        for x in getattr(n, part, []):
                            walk(x.body if isinstance(x, ast.ExceptHandler) else [x])
                    for x in ast.walk(n):
                        pass
                elif not isinstance(n, (ast.Import, ast.ImportFrom)):
                    for x in ast.walk(n):
                        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id in p.module.bound:
                            self_defs.add(x.id)

        walk(p.tree.body)
        p.imported = imported
        return self_defs

    def _collisions(self):
        for t, ss in self.targets.items():
            seen: dict[str, str] = {}
            for s in ss:
                for name in sorted(self.parsed[s].defs):
                    new = self.rename[s].get(name, name)
                    if new == "__all__":
                        continue
                    if new in seen and seen[new] != s:
                        same = self._same_value(s, name, seen[new], new)
                        if same:
                            continue
                        stem = s.rpartition("/")[2].removesuffix(".py")
                        bare = new.lstrip("_")
                        auto = "_" * (len(new) - len(bare)) + (f"{stem.upper()}_{bare}" if bare.isupper() else f"{stem}_{bare}")
                        warn(f"COLLISION in {t}: {name} of {s} and of {seen[new]}; it becomes {auto}: give a name in mapping.json")
                        self.rename[s][name] = auto
                        new = auto
                    seen.setdefault(new, s)

    def _same_value(self, s, name, other, other_name):
        """Whether two sources assign the same constant, so that one of the statements is dropped."""
        def statement(f, n):
            for x in self.parsed[f].tree.body:
                if isinstance(x, ast.Assign) and len(x.targets) == 1 and isinstance(x.targets[0], ast.Name) and x.targets[0].id == n:
                    return x
            return None
        a, b = statement(s, name), statement(other, other_name)
        if a is None or b is None or ast.dump(a) != ast.dump(b):
            return False
        reads = {x.id for x in ast.walk(a.value) if isinstance(x, ast.Name)}
        if reads & (self.parsed[s].defs - {name}):
            return False
        self.parsed[s].drop = getattr(self.parsed[s], "drop", set()) | {id(a)}
        return True

    # ---- lookups

    def newmod(self, old):
        """The new dotted name of an old module."""
        return dotted(self.new.get(self.old_mods[old], self.old_mods[old]))

    def origin(self, module, name):
        """Where a name imported from `module` is defined, through packages that are dropped and modules that import it."""
        module, name = self.reexports.get((module, name), (module, name))
        f = self.old_mods.get(module)
        if f and f.startswith("qerl/") and f != "qerl/__init__.py" and name in self.parsed[f].imported and name not in self.parsed[f].defs:
            for stmt, scope, ctx in self.parsed[f].imports:
                if scope is self.parsed[f].module and isinstance(stmt, ast.ImportFrom) and stmt.module in self.old_mods:
                    for a in stmt.names:
                        if (a.asname or a.name) == name and f"{stmt.module}.{a.name}" not in self.old_mods:
                            return self.origin(stmt.module, a.name)
        return module, name

    def attr(self, module, name):
        """The new name of an attribute of an old module, which defines or imports it."""
        f = self.old_mods[module]
        p = self.parsed[f]
        if name in self.rename[f]:
            return self.rename[f][name]
        if name in p.imported and name not in p.defs:
            for stmt, scope, _ in p.imports:
                if scope is p.module and isinstance(stmt, ast.ImportFrom) and stmt.module in self.old_mods:
                    for a in stmt.names:
                        if a.name == name and a.asname is None:
                            m, n = self.origin(stmt.module, a.name)
                            if m in self.old_mods and f"{m}.{n}" not in self.old_mods:
                                return self.attr(m, n)
        return name

    def split(self, path):
        """A dotted path as (module or package, rest)."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            head = ".".join(parts[:end])
            if head in self.old_mods and not (self.old_mods[head] in self.dropped):
                return head, parts[end:], "module"
            if head in self.packages and end > 1:
                return head, parts[end:], "package"
            if head in self.old_mods:
                return head, parts[end:], "package"
        return None, parts, ""

    def sub_dotted(self, path):
        head, rest, kind = self.split(path)
        if head is None or head in ("qerl", "tests", "docs"):
            return path
        if kind == "package":
            if rest and (head, rest[0]) in self.reexports:
                m, n = self.reexports[head, rest[0]]
                return ".".join([self.newmod(m), self.attr(m, n), *rest[1:]])
            return ".".join([self.packages.get(head, head), *rest])
        to = self.newmod(head)
        if rest:
            rest = [self.attr(head, rest[0]), *rest[1:]]
        return ".".join([to, *rest])

    def sub_text(self, text):
        """Dotted names and paths in comments, strings and pages."""

        def dots(m):
            path, call = m.group(1), m.group(2) or ""
            tail = ""
            while path.endswith("."):
                path, tail = path[:-1], "." + tail
            if call:
                head, rest, kind = self.split(path)
                if kind == "module" and not rest:
                    return f"{self.newmod(head)}:{self.attr(head, call[1:])}"
            return self.sub_dotted(path) + call + tail

        text = re.sub(r"(?<![\w./-])((?:qerl|tests)(?:\.[A-Za-z_]\w*)+)(:[A-Za-z_]\w*)?(?![\w/])", dots, text)

        def path(m):
            p = m.group(0)
            tail = ""
            while p and p[-1] in "./":
                p, tail = p[:-1], p[-1] + tail
            if p in self.new:
                return self.new[p] + tail
            if p in self.mapping["data"]:
                return self.mapping["data"][p] + tail
            package = p.replace("/", ".")
            if package in self.packages:
                to = self.packages[package].replace(".", "/")
                if to + ".py" in self.targets:
                    return to + ".py" + tail.replace("/", "")
                return to + tail
            if p in self.mapping["tests"]["folders"]:
                return self.mapping["tests"]["folders"][p] + tail
            return m.group(0)

        text = re.sub(r"(?<![\w.-])(?:qerl|tests)/[\w./-]*[\w/]", path, text)

        def short(m):  # `kernels/norm.py`, as pages name files of the package
            p = "qerl/" + m.group(1)
            if p in self.new or p.rstrip("/").replace("/", ".") in self.packages and "/" in m.group(1):
                return "`" + path(re.match(".*", p)).removeprefix("qerl/") + "`"
            return m.group(0)

        return re.sub(r"`([a-z_]+/[\w/]+(?:\.py)?)`", short, text)


# ---------------------------------------------------------------- rewriting of one file


class Rewrite:
    """The edits of one file: imports, names, strings."""

    def __init__(self, plan: Plan, f: str, hoist: bool):
        self.plan, self.f, self.p, self.hoist = plan, f, plan.parsed[f], hoist
        self.target = plan.new.get(f, f)
        self.own = dotted(self.target)
        self.edits: list[tuple[int, int, str]] = []
        self.top: list[tuple] = []  # hoisted imports: (kind, module, name, asname)
        self.typed: list[tuple] = []
        self.local_imports: list[tuple] = []
        self.rename_of = plan.rename[f]
        self.bind: dict[tuple[int, str], tuple] = {}
        self.text_protected: list[tuple[int, int]] = []

    def edit(self, start, end, text):
        self.edits.append((start, end, text))

    def run(self):
        p = self.p
        self._plan_bindings()
        self._names()
        self._imports()
        self._definitions()
        self._setattr()
        self._all_list()
        return self

    # every import binding: (scope, local name) -> what becomes of it
    def _plan_bindings(self):
        plan, p = self.plan, self.p
        for stmt, scope, ctx in p.imports:
            for a in stmt.names:
                local = a.asname or (a.name if isinstance(stmt, ast.ImportFrom) else a.name.split(".")[0])
                new = self._resolve_import(stmt, a, scope, local)
                self.bind[id(scope), local] = new
                a._new = new

    def _resolve_import(self, stmt, a, scope, local):
        """(kind, module, name, new local name): kind is 'keep', 'name', 'module', 'own-name' or 'own-module'."""
        plan = self.plan
        if isinstance(stmt, ast.Import):
            if a.name in plan.old_mods and a.asname:
                old, kind = a.name, "module"
            elif a.name in plan.old_mods and a.name.count("."):
                return ("dotted", plan.newmod(a.name), None, local)
            else:
                return ("keep", None, None, local)
        else:
            module = stmt.module or ""
            if stmt.level:
                package = dotted(self.f).split(".")
                package = package if self.f.endswith("__init__.py") else package[:-1]
                package = package[: len(package) - (stmt.level - 1)]
                module = ".".join([*package, *([module] if module else [])])
            full = f"{module}.{a.name}"
            if full in plan.old_mods and plan.old_mods[full] not in plan.dropped:
                old, kind = full, "module"
            else:
                m, n = plan.origin(module, a.name)
                if f"{m}.{n}" in plan.old_mods:
                    old, kind = f"{m}.{n}", "module"
                elif m in plan.old_mods:
                    to, new = plan.newmod(m), plan.attr(m, n)
                    wanted = self.rename_of.get(local)
                    if to == self.own and plan.targets.get(self.target, [])[1:]:
                        return ("own-name", to, new, new)
                    lname = wanted or (a.asname if a.asname and a.asname != a.name else new)
                    lname = self._free(lname, local, scope)
                    return ("name", to, new, lname)
                elif module in plan.packages and not a.name.startswith("_") and module not in plan.old_mods:
                    return ("keep", None, None, local)
                else:
                    return ("keep", None, None, local)
        to = plan.newmod(old)
        if to == self.own and plan.targets.get(self.target, [])[1:]:
            return ("own-module", to, old, None)
        wanted = self.rename_of.get(local)
        last = to.rpartition(".")[2]
        if a.asname and a.asname != a.name.rpartition(".")[2]:
            lname = wanted or a.asname
        else:
            lname = wanted or last
            if lname != local:
                lname = self._free(lname, local, scope)
        return ("module", to, old, lname)

    def _free(self, wanted, local, scope):
        """`wanted` if no other binding is in its way, else the present local name."""
        if wanted == local:
            return local
        names = self._names_of_target() if scope is self.p.module else set()
        if wanted in names and not self._is_import_of_same(wanted, scope):
            warn(f"{self.f}: the name {wanted} is taken; {local} stays")
            return local
        for node, at, b, _ in self.p.refs:
            if b is scope and node.id == local:
                r = resolve(wanted, at)
                if r is not None and not (r is scope and self._is_import_of_same(wanted, scope)):
                    warn(f"{self.f}:{node.lineno}: {wanted} is bound here; {local} stays")
                    return local
        return wanted

    def _is_import_of_same(self, name, scope):
        # a name that is itself an import of a module that becomes the same module
        for stmt, s, _ in self.p.imports:
            if s is scope:
                for a in stmt.names:
                    if (a.asname or a.name) == name and isinstance(stmt, ast.ImportFrom) and f"{stmt.module}.{a.name}" in self.plan.old_mods:
                        return True
        return False

    def _names_of_target(self):
        if not hasattr(self, "_taken"):
            self._taken = set(self.p.module.bound)
            for s in self.plan.targets.get(self.target, []):
                q = self.plan.parsed[s]
                self._taken |= {self.plan.rename[s].get(n, n) for n in q.defs}
        return self._taken

    def _place(self, node, name, joined):
        """The span of a name, checked: positions within f-strings can be wrong in Python 3.11."""
        p = self.p
        start = p.at(node.lineno, node.col_offset)
        end = start + len(name.encode())
        if p.data[start:end] == name.encode():
            return [(start, end)]
        if joined is None:
            warn(f"{self.f}:{node.lineno}: no {name} at its place")
            return []
        a, b = p.span(joined)
        found = []
        for m in re.finditer(rb"\{([^{}]*)\}", p.data[a:b]):
            for k in re.finditer(rb"(?<![\w.\"'])" + name.encode() + rb"\b(?!=[^=])", m.group(1)):
                found.append((a + m.start(1) + k.start(), a + m.start(1) + k.end()))
        return found

    def _names(self):
        p, plan = self.p, self.plan
        for node, at, b, joined in p.refs:
            if b is None:
                continue
            new = self.bind.get((id(b), node.id))
            if new and node.id in b.bound and isinstance(node.ctx, ast.Load):
                kind, module, what, lname = new
                attribute = p.attributes.get(id(node))
                if kind in ("keep", "dotted"):
                    continue
                if kind == "own-module":
                    if attribute is None:
                        warn(f"BY HAND {self.f}:{node.lineno}: module {node.id} is used as a value, but becomes this module")
                        continue
                    to = plan.attr(what, attribute.attr)
                    r = resolve(to, at)
                    if r is not None and r is not p.module:
                        warn(f"SHADOW {self.f}:{node.lineno}: {to} is bound in the function")
                    for s, e in self._place(node, node.id, joined):
                        end = e + len("." + attribute.attr)
                        if p.data[e:end] == ("." + attribute.attr).encode():
                            self.edit(s, end, to)
                        else:
                            warn(f"BY HAND {self.f}:{node.lineno}: {node.id}.{attribute.attr}")
                    continue
                if kind == "module" and attribute is not None:
                    to = plan.attr(what, attribute.attr)
                    for s, e in self._place(node, node.id, joined):
                        end = e + len("." + attribute.attr)
                        if p.data[e:end] == ("." + attribute.attr).encode():
                            self.edit(s, end, f"{lname}.{to}")
                        else:
                            self.edit(s, e, lname)
                            if to != attribute.attr:
                                warn(f"BY HAND {self.f}:{node.lineno}: attribute {attribute.attr} -> {to}")
                    continue
                if lname != node.id:
                    self._check_shadow(lname, node, at, b)
                    for s, e in self._place(node, node.id, joined):
                        self.edit(s, e, lname)
            elif b is p.module and node.id in self.rename_of:
                to = self.rename_of[node.id]
                self._check_shadow(to, node, at, b)
                for s, e in self._place(node, node.id, joined):
                    self.edit(s, e, to)
        for g in p.globals_stmts:
            if set(g.names) & set(self.rename_of):
                s, e = p.span(g)
                self.edit(s, e, "global " + ", ".join(self.rename_of.get(n, n) for n in g.names))

    def _check_shadow(self, name, node, at, b):
        r = resolve(name, at)
        if r is not None and r is not b and r.kind == "function":
            warn(f"SHADOW {self.f}:{node.lineno}: {name} is bound in the function")

    def _definitions(self):
        p = self.p
        for n in p.tree.body:
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name in self.rename_of:
                s, _ = p.span(n)
                m = re.compile(rb"(?:async\s+def|def|class)\s+").match(p.data, s)
                self.edit(m.end(), m.end() + len(n.name.encode()), self.rename_of[n.name])

    def _setattr(self):
        """Names in strings beside a module: setattr(module, "name", ...)."""
        p = self.p
        for call, scope in p.calls:
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in ("setattr", "delattr", "getattr", "object", "hasattr") and len(call.args) >= 2:
                first, second = call.args[:2]
                if isinstance(first, ast.Name) and isinstance(second, ast.Constant) and isinstance(second.value, str):
                    b = resolve(first.id, scope)
                    new = b and self.bind.get((id(b), first.id))
                    if new and new[0] in ("module", "own-module"):
                        to = self.plan.attr(new[2], second.value)
                        if to != second.value:
                            s, e = p.span(second)
                            self.edit(s, e, json.dumps(to))

    def _all_list(self):
        for n in self.p.tree.body:
            if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__":
                for x in ast.walk(n.value):
                    if isinstance(x, ast.Constant) and x.value in self.rename_of:
                        s, e = self.p.span(x)
                        self.edit(s, e, json.dumps(self.rename_of[x.value]))

    def _entry(self, stmt, a):
        kind, module, what, lname = a._new
        if kind in ("own-name", "own-module"):
            return None
        if kind == "keep":
            if isinstance(stmt, ast.Import):
                return ("import", a.name, None, a.asname)
            module = ("." * stmt.level) + (stmt.module or "")
            return ("from", module, a.name, a.asname)
        if kind == "dotted":
            return ("import", module, None, None)
        if kind == "name":
            return ("from", module, what, lname if lname != what else None)
        package, _, last = module.rpartition(".")
        if not package:
            return ("import", module, None, lname if lname != module else None)
        return ("from", package, last, lname if lname != last else None)

    def _imports(self):
        p = self.p
        for stmt, scope, ctx in p.imports:
            entries = [self._entry(stmt, a) for a in stmt.names]
            changed = any(a._new[0] != "keep" for a in stmt.names)
            if isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__":
                if self.hoist:
                    self._remove_line(stmt)
                continue
            if isinstance(stmt, ast.ImportFrom) and stmt.level and changed:
                pass
            elif isinstance(stmt, ast.ImportFrom) and stmt.level and self.target != self.f:
                warn(f"BY HAND {self.f}:{stmt.lineno}: relative import")
            entries = list(dict.fromkeys(e for e in entries if e))
            if ctx in ("top", "type") and scope is p.module and self.hoist:
                comment = p.data[p.span(stmt)[1] : p.starts[stmt.end_lineno] - 1].strip()
                if comment:
                    warn(f"{self.f}:{stmt.lineno}: comment at an import is lost: {comment.decode()}")
                (self.top if ctx == "top" else self.typed).extend(entries)
                if ctx == "top":
                    self._remove_line(stmt)
                continue
            if not changed and not self.hoist:
                s, e = p.span(stmt)
                self.text_protected.append((s, e))
                continue
            if self.hoist and ctx == "local":
                entries = [e for e in entries if e not in self.plan.top_of[self.target]]
            s, e = p.span(stmt)
            self.text_protected.append((s, e))
            if not entries:
                self._remove_line(stmt, scope)
                continue
            by = collections.OrderedDict()
            for k, m, n, asname in entries:
                by.setdefault((k, m) if k == "from" else (k, m, n, asname), []).append((n, asname))
            lines = []
            for key, names in by.items():
                if key[0] == "import":
                    lines.append(f"import {key[1]}" + (f" as {key[3]}" if key[3] else ""))
                else:
                    lines.append(f"from {key[1]} import " + ", ".join(n + (f" as {x}" if x else "") for n, x in names))
            indent = b" " * stmt.col_offset
            self.edit(s, e, ("\n" + indent.decode()).join(lines))

    def _remove_line(self, stmt, scope=None):
        p = self.p
        s, e = p.span(stmt)
        line_start, line_end = p.starts[stmt.lineno - 1], p.starts[stmt.end_lineno]
        if p.data[line_start:s].strip() or (p.data[e:line_end].strip() and not p.data[e:line_end].strip().startswith(b"#")):
            self.edit(s, e, "pass")
            return
        if scope is not None and scope.kind == "function":
            parents = [n for n in ast.walk(scope.node) if any(stmt in getattr(n, part, []) for part in ("body", "orelse", "finalbody") if isinstance(getattr(n, part, None), list))]
            body = next(getattr(parents[0], part) for part in ("body", "orelse", "finalbody") if stmt in getattr(parents[0], part, []))
            gone = [x for x in body if isinstance(x, (ast.Import, ast.ImportFrom))]
            if len(body) == len(gone) == 1:
                self.edit(s, e, "pass")
                return
            # a blank line after the imports of a function goes with them
            if p.data[line_end : line_end + 1] == b"\n" and body[0] is stmt:
                line_end += 1
        self.edit(line_start, line_end, "")

    # ---- output

    def text(self, ranges):
        """The text of ranges of the file after the edits; dotted names and paths elsewhere are replaced."""
        out = []
        edits = []
        last = None
        for s, e, t in sorted(set(self.edits)):
            if last and s < last[1]:
                if (s, e, t) == last or (s >= last[0] and e <= last[1]):
                    continue
                warn(f"{self.f}: edits overlap at {s}: {t!r} and {last[2]!r}")
                continue
            edits.append((s, e, t))
            last = (s, e, t)
        for a, b in ranges:
            at = a
            for s, e, t in edits:
                if s >= b or e <= a:
                    continue
                out.append(self._sub(self.p.data[at:s].decode()))
                out.append(t)
                at = e
            out.append(self._sub(self.p.data[at:b].decode()))
        return "".join(out)

    def _sub(self, text):
        text = self.plan.sub_text(text)

        def ticked(m):
            new = self.bind.get((id(self.p.module), m.group(1)))
            if not new or new[0] not in ("module", "own-module"):
                return m.group(0)
            attr = self.plan.attr(new[2], m.group(2))
            return f"`{attr}" if new[0] == "own-module" else f"`{new[3]}.{attr}"

        text = re.sub(r"`([a-z_]\w*)\.([A-Za-z_]\w*)", ticked, text)
        depth = self.target.count("/") - self.f.count("/")
        if depth:
            text = re.sub(
                r"(Path\((?:\w+\.)?__file__\)(?:\.resolve\(\))?)\.parents\[(\d)\]",
                lambda m: f"{m.group(1)}.parents[{int(m.group(2)) + depth}]",
                text,
            )
        if self.rename_of:
            text = re.sub(r"`([A-Za-z_]\w*)`", lambda m: f"`{self.rename_of.get(m.group(1), m.group(1))}`", text)
        return text


# ---------------------------------------------------------------- a merged module


def docstring(p: File):
    n = p.tree.body[0] if p.tree.body else None
    if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str):
        return n, ast.get_docstring(p.tree)
    return None, ""


def ordered(plan, target, sources):
    """The sources in the mapping's order, except where one reads names of a later one as it is imported."""
    needs = {s: set() for s in sources}
    for s in sources:
        p = plan.parsed[s]
        run = set(p.executed)
        for stmt, scope, ctx in p.imports:
            if scope is not p.module or ctx == "type":
                continue
            for a in stmt.names:
                local = a.asname or a.name
                if local not in run or not isinstance(stmt, ast.ImportFrom):
                    continue
                m, n = plan.origin(stmt.module, a.name)
                for o in (m, f"{m}.{n}"):
                    if o in plan.old_mods and plan.old_mods[o] in needs and plan.old_mods[o] != s:
                        needs[s].add(plan.old_mods[o])
    out, left = [], list(sources)
    while left:
        ready = next((s for s in left if not (needs[s] & set(left))), None)
        if ready is None:
            warn(f"CIRCLE of names read at import in {target}: {left}")
            ready = left[0]
        out.append(ready)
        left.remove(ready)
    if out != sources:
        warn(f"{target}: order {[s.rpartition('/')[2] for s in out]}")
    return out


def comment(text, width=118):
    import textwrap

    lines = []
    for part in text.strip().split("\n\n"):
        if lines:
            lines.append("#")
        if re.search(r"^( {2,}|[*-] |\d+\. |```|\|)", part, re.MULTILINE):
            lines += [("# " + line).rstrip() for line in part.split("\n")]
        else:
            lines += ["# " + line for line in textwrap.wrap(" ".join(part.split()), width, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def build(plan, target, sources):
    spec = plan.mapping["targets"].get(target.removeprefix("qerl/"), {})
    sources = ordered(plan, target, sources)
    rewrites = [Rewrite(plan, s, hoist=True).run() for s in sources]
    merged = len(sources) > 1
    # one local name for one thing
    meaning: dict[str, tuple] = {}
    for r in rewrites:
        for e in [*r.top, *r.typed]:
            local = e[3] or e[2] or e[1].split(".")[0]
            if local in meaning and meaning[local][0] != e:
                other, f = meaning[local]
                if not (e[0] == "import" == other[0]):
                    warn(f"IMPORT CLASH in {target}: {local} is {e[:3]} in {r.f} and {other[:3]} in {f}")
            meaning.setdefault(local, (e, r.f))
    if merged:
        for r in rewrites:
            for s in sources:
                for n in plan.parsed[s].defs:
                    n = plan.rename[s].get(n, n)
                    if n in meaning and meaning[n][1] == r.f:
                        warn(f"IMPORT CLASH in {target}: {n} is imported in {r.f} as {meaning[n][0][:3]} and defined in {s}")
    doc = spec.get("doc", "") if merged or not docstring(plan.parsed[sources[0]])[1] else ""
    head = []
    if doc:
        head.append(f'"""{doc}\n"""' if "\n" in doc or len(doc) > 112 else f'"""{doc}"""')
    elif merged:
        node, text = docstring(plan.parsed[sources[0]])
        warn(f"no docstring for {target}")
        head.append(f'"""{text.splitlines()[0]}"""')
    bodies = []
    for r in rewrites:
        p = r.p
        node, text = docstring(p)
        start = p.starts[node.end_lineno] if node else 0
        if not merged and node and not doc:
            head.append(r._sub(p.data[: p.span(node)[1]].decode()))
        # TYPE_CHECKING blocks of imports alone go; their imports were hoisted
        for n in p.tree.body:
            if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING":
                if all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in n.body) and not n.orelse:
                    r.edit(p.starts[n.lineno - 1], p.starts[n.end_lineno], "")
                else:
                    warn(f"BY HAND {r.f}:{n.lineno}: a TYPE_CHECKING block with more than imports")
            if id(n) in getattr(p, "drop", ()):
                r.edit(p.starts[n.lineno - 1], p.starts[n.end_lineno], "")
            if isinstance(n, ast.If) and "__main__" in ast.dump(n.test) and r is not rewrites[-1]:
                warn(f"BY HAND {r.f}:{n.lineno}: a __main__ block within {target}")
        body = r.text([(start, len(p.data))]).strip("\n")
        if merged and text:
            section = spec.get("section", {}).get(r.f.removeprefix("qerl/"), None)
            if section is None:
                section = "" if "\n" not in text and p.text.count("\n") < 25 else r._sub(text)
            if doc and r is rewrites[0] and section.split("\n\n")[0].split() == doc.split("\n\n")[0].split():
                section = "\n\n".join(section.split("\n\n")[1:])
            if section:
                body = comment(section) + "\n\n" + body
        bodies.append(body)
    top = list(dict.fromkeys(e for r in rewrites for e in r.top))
    typed = [e for e in dict.fromkeys(e for r in rewrites for e in r.typed) if e not in top]
    lines = ["from __future__ import annotations"] if any("from __future__ import annotations" in plan.parsed[s].text for s in sources) else []
    if typed and ("from", "typing", "TYPE_CHECKING", None) not in top:
        top.append(("from", "typing", "TYPE_CHECKING", None))
    lines += [render(e) for e in top]
    if typed:
        lines += ["", "if TYPE_CHECKING:", *("    " + render(e) for e in typed)]
    parts = [*head, "\n".join(lines)] if lines else head
    return "\n\n".join(parts) + "\n\n\n" + "\n\n\n".join(b for b in bodies if b) + "\n"


def render(e):
    kind, module, name, asname = e
    tail = f" as {asname}" if asname else ""
    return f"import {module}{tail}" if kind == "import" else f"from {module} import {name}{tail}"


# ---------------------------------------------------------------- main


def main():
    global ROOT
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default=".")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    ROOT = Path(args.root).resolve()
    mapping = json.loads((HERE / "mapping.json").read_text())
    PATCHES.update(json.loads((HERE / "patches.json").read_text()))
    plan = Plan(mapping)
    # imports at the top of each target, by which imports in functions are dropped
    plan.top_of = collections.defaultdict(set)
    for t, ss in plan.targets.items():
        for s in ss:
            r = Rewrite(plan, s, hoist=False)
            before = len(WARN)
            r._plan_bindings()
            del WARN[before:]
            for stmt, scope, ctx in r.p.imports:
                if scope is r.p.module and ctx == "top":
                    plan.top_of[t] |= {e for a in stmt.names if (e := r._entry(stmt, a))}
    out: dict[str, str] = {}
    for t, ss in plan.targets.items():
        if ss == [t] and not plan.rename[t] and t.endswith("__init__.py"):
            r = Rewrite(plan, t, hoist=False).run()
            out[t] = r.text([(0, len(r.p.data))])
        else:
            out[t] = build(plan, t, ss)
    for f in plan.py:
        if f in plan.dropped or f.startswith("qerl/"):
            continue
        r = Rewrite(plan, f, hoist=False).run()
        out[plan.new.get(f, f)] = r.text([(0, len(r.p.data))])
    # inits of the new folders
    for folder in sorted({str(Path(t).parent) for t in out if t.startswith("qerl/")}):
        init = f"{folder}/__init__.py"
        if init not in out:
            doc = mapping["rooms"].get(folder.removeprefix("qerl/"))
            old = ROOT / init
            if doc is None and old.exists():
                doc = ast.get_docstring(ast.parse(old.read_text()))
            out[init] = f'"""{doc or folder}"""\n'
            if doc is None:
                warn(f"no docstring for {init}")
    # other texts
    skip = tuple(mapping["skip"])
    suffixes = (".md", ".yaml", ".yml", ".toml", ".smk", ".tsv", ".rst", ".cu", ".j2", ".css", ".js", ".txt")
    names = ("Snakefile", "Makefile", "run")
    for f in plan.files:
        if f.endswith(".py") or f.startswith(skip):
            continue
        if f.endswith(suffixes) or f.rpartition("/")[2] in names:
            text = (ROOT / f).read_text(encoding="utf-8")
            new = plan.sub_text(text)
            if f.endswith((".smk", "Snakefile")):
                new = smk(plan, text)
            to = mapping["data"].get(f, plan.new.get(f, f))
            if new != text or to != f:
                out[to] = new
        elif f in mapping["data"] or f in plan.new:
            pass
    after(plan, out)
    print("\n".join(dict.fromkeys(WARN)))
    if args.dry:
        return
    moves = {**mapping["data"], **{k: v for k, v in plan.new.items() if k != v}}
    best = {}
    for old, to in moves.items():  # the largest source carries the history
        if (ROOT / old).exists() and old != to:
            size = (ROOT / old).stat().st_size
            if to not in best or size > best[to][1]:
                best[to] = (old, size)
    staying = set(out) & set(plan.files)
    raw = {}
    for to, (old, _) in best.items():
        if to not in out:
            raw[to] = (ROOT / old).read_bytes()
    gone = {old for old, to in moves.items() if old != to} | set(plan.dropped)
    for old in gone:
        if (ROOT / old).exists():
            (ROOT / old).unlink()
    for to, text in out.items():
        # a folder of the old tree may be in the place of a module, and the other way about
        path = ROOT / to
        if path.is_dir():
            import shutil

            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for to, data in raw.items():
        (ROOT / to).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / to).write_bytes(data)
    for folder, _, _ in os.walk(ROOT / "qerl", topdown=False):
        place = Path(folder)
        if not [x for x in place.iterdir() if x.name != "__pycache__"]:
            import shutil

            shutil.rmtree(place)
    for folder, _, _ in os.walk(ROOT / "tests", topdown=False):
        place = Path(folder)
        rest = [x.name for x in place.iterdir() if x.name != "__pycache__"]
        if rest in ([], ["__init__.py"]) and "unit" in folder:
            import shutil

            shutil.rmtree(place)
    for place in {Path(ROOT / t).parent for t in out if t.startswith("tests/unit/")}:
        init = place / "__init__.py"
        if not init.exists():
            init.touch()


def replaced(pattern, new, text, what):
    text, count = re.subn(pattern, lambda m: new, text, flags=re.MULTILINE | re.DOTALL)
    if count != 1:
        warn(f"PYPROJECT: {what} matched {count} times")
    return text


def after(plan, out):
    """pyproject.toml, and the replacements of patches.json that follow the move."""
    text = out.get("pyproject.toml") or (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rooms = {t.split("/")[1].removesuffix(".py") for t in plan.targets} - {"__init__", "__main__"}
    unknown = rooms - set(plan.mapping["layers"])
    if unknown:
        warn(f"PYPROJECT: rooms without a layer: {unknown}")
    layers = [room for room in plan.mapping["layers"] if room in rooms]
    text = replaced(r"^layers = \[.*?^\]", "layers = [\n" + "".join(f'    "{room}",\n' for room in layers) + "]", text, "layers")
    text = replaced(r'^"qerl/kernels/[^"\n]*" = (?=\["ANN001)', '"qerl/kernels/triton/*" = ', text, "ignores of Triton")
    text = replaced(r'^module = \["qerl\.kernels[^\n]*\]\ndisallow_untyped_defs', 'module = "qerl.kernels.triton.*"\ndisallow_untyped_defs', text, "mypy of Triton")
    text = replaced(r'^module = \["qerl\.kernels[^\n]*\]\ndisable_error_code', 'module = ["qerl.kernels.triton.sampling", "qerl.kernels.triton.attention"]\ndisable_error_code', text, "mypy of Triton's tuples")
    out["pyproject.toml"] = text
    for place, old, new in PATCHES["after"]:
        if place not in out and (ROOT / place).exists():
            out[place] = (ROOT / place).read_text(encoding="utf-8")
        if place not in out or not re.search(old, out[place], re.MULTILINE | re.DOTALL):
            warn(f"PATCH doesn't match any more: {place}: {old[:70]!r}")
            continue
        out[place] = re.sub(old, new, out[place], flags=re.MULTILINE | re.DOTALL)


def smk(plan, text):
    """Imports of a Snakefile, which Python can't parse, line by line."""

    def line(m):
        f = File("x.py", m.group(0).strip() + "\n")
        plan.parsed["x.py"] = f
        f.defs, f.imported = set(), set()
        r = Rewrite(plan, "x.py", hoist=False).run()
        return r.text([(0, len(f.data))]).rstrip("\n")

    parts = re.split(r"(?m)^((?:from|import) .*)$", text)
    out = []
    for i, part in enumerate(parts):
        out.append(line(re.match(r"(?s).*", part)) if i % 2 else plan.sub_text(part))
    return "".join(out)


if __name__ == "__main__":
    main()
