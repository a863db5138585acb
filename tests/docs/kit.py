"""Runs the code blocks of a page of the documentation, in the order of the page.

What a block's first line says:

* ` ```python `: run. The blocks of a page share one namespace and one directory.
* ` ```python title="hotel.py" `: written to that file; `title="hotel.py: A, B"` replaces only these top-level
  definitions (`imports` stands for all import statements); what is new goes before what follows it in the block.
* ` ```python {.excerpt} `: code that stands elsewhere; only compiled.
* ` ```console `: the commands behind `$`, run by bash but for `make`; what stands below one is its output. Lines that
  begin with `you > ` are typed. `^C` stops the server. ` ```console {.manual} ` is not run.
* ` ```text {.output} `: what the Python block before it printed.

Output is compared loosely: white space counts as one space, ids, times and durations as equal, `...` as anything.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROVIDERS = ("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_", "STEPWELL_")
"""Prefixes of variables that would change what a page shows."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]+)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_VARYING = (
    (r"\b(?:[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}|k-[0-9a-f]{32})\b", "ID"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+Z?)?", "TIME"),
    (r"\b\d+(?:\.\d+)?(?= ?m?s\b)", "N"),
    (r"\b1\d{9}\.\d+", "SECONDS"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    title: str
    marks: frozenset[str]
    code: str
    where: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        info, indent = match["info"], len(match["indent"])
        code = "".join(line[indent:] if line.strip() else "\n" for line in match["code"].splitlines(keepends=True))
        title = re.search(r'title="([^"]*)"', info)
        found.append(
            Block(
                language=re.split(r"[\s{]", info.strip())[0],
                title=title[1] if title else "",
                marks=frozenset(re.findall(r"\.(\w+)", info.partition("{")[2])),
                code=code,
                where=f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}",
            )
        )
    return found


def edited(source: str, names: str, code: str, where: str) -> str:
    """A module in which the definitions of `names` are those of `code`."""
    new = _definitions(code)
    wanted = {name.strip() for name in names.split(",")}
    assert set(new) == wanted, f"{where}: the title names {sorted(wanted)}, the block has {sorted(new)}"
    for name, text in new.items():
        known = _definitions(source)
        after = next((known[other] for other in list(new)[list(new).index(name) :] if other in known), None)
        if name in known:
            source = source.replace(known[name], text, 1)
        elif name == "imports":
            source = f"{text}\n{source}"
        elif after is not None:
            source = source.replace(after, f"{text}\n\n{after}", 1)
        else:
            source = f"{source.rstrip()}\n\n\n{text}"
    return source


def _definitions(code: str) -> dict[str, str]:
    lines = code.splitlines(keepends=True)
    found: dict[str, str] = {}
    imports: list[ast.stmt] = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
            continue
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        name = getattr(node, "name", None)
        if name is None and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if name is not None:
            found[name] = "".join(lines[first - 1 : node.end_lineno])
    if imports:
        found = {"imports": "".join(lines[imports[0].lineno - 1 : imports[-1].end_lineno]), **found}
    return found


def plain(text: str) -> str:
    """Text without what varies."""
    for pattern, name in _VARYING:
        text = re.sub(pattern, name, text)
    return " ".join(text.split())


def same(shown: str, real: str) -> bool:
    """Whether a page shows what happened."""
    pattern = ".*?".join(re.escape(plain(piece)) for piece in re.split(r"\.\.\.|…", shown))
    pattern = pattern.replace(r".*?\ ", ".*?").replace(r"\ .*?", ".*?")
    return re.fullmatch(rf"\s*{pattern}\s*", plain(real), re.S) is not None


class Runner:
    """Runs pages in one directory.

    Args:
        directory: An empty directory; becomes the current one while a block runs.
        home: Where a shim for a missing `curl` may go.
    """

    def __init__(self, directory: Path, home: Path) -> None:
        self.directory = directory
        self.printed = ""
        self.ran = 0
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._state = home / "shell"
        self._server: subprocess.Popen[str] | None = None
        self._url = ""
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        if shutil.which("curl") is None:
            shim = home / "curl"
            shim.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "curl.py"} "$@"\n')
            shim.chmod(0o755)
            path.insert(0, str(home))
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(PROVIDERS)}
        self._env |= {"PATH": os.pathsep.join(path), "COLUMNS": "120", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
        self._env.pop("PYTEST_ADDOPTS", None)

    def page(self, page: Path) -> None:
        """Run all of a page's blocks."""
        self._namespace = {"__name__": "__main__"}
        for block in blocks(page):
            self.block(block)

    def block(self, block: Block) -> None:
        """Run one block, as its first line says."""
        match block.language:
            case "python" if "excerpt" in block.marks:
                _compiles(block)
            case "python" if block.title:
                self._write(block)
            case "python":
                self._run(block)
            case "console" if "manual" not in block.marks and "$ " in block.code:
                self._type(block)
            case "text" if "output" in block.marks:
                assert same(block.code, self.printed), _differ(block.where, block.code, self.printed)
            case "json" if not block.title:
                if "..." not in block.code:
                    json.loads(block.code)
            case _ if block.title:
                (self.directory / block.title).write_text(block.code, encoding="utf-8")
            case _:
                pass

    def _write(self, block: Block) -> None:
        name, _, names = block.title.partition(": ")
        path = self.directory / name
        code = edited(path.read_text(encoding="utf-8"), names, block.code, block.where) if names else block.code
        compile(code, name, "exec", dont_inherit=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")

    def _run(self, block: Block) -> None:
        self.ran += 1
        lead = "\n" * int(block.where.rpartition(":")[2])
        code = compile(lead + block.code, block.where, "exec", dont_inherit=True)
        out = io.StringIO()
        # A page's own `hotel` must win over the example's, which other tests imported.
        own = {path.stem for path in self.directory.iterdir()}
        aside = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in own}
        before = set(sys.modules)
        sys.path.insert(0, str(self.directory))
        try:
            with contextlib.chdir(self.directory), contextlib.redirect_stdout(out):
                exec(code, self._namespace)
        finally:
            sys.path.remove(str(self.directory))
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if file.startswith(str(self.directory)):
                    del sys.modules[name]
            sys.modules.update(aside)
        self.printed = out.getvalue()

    # -- consoles

    def _type(self, block: Block) -> None:
        for command, shown in _commands(block):
            self.ran += 1
            if command == "^C":
                self.stop()
            elif command.startswith("make "):
                self.ran -= 1  # it would install, or run these very tests
            elif command.startswith("stepwell serve"):
                self._serve(command, shown, block.where)
            else:
                self._shell(command, shown, block.where)

    def _shell(self, command: str, shown: str, where: str) -> None:
        typed = re.findall(r"^you > (.*)$", shown, re.M)
        here = command.replace("http://localhost:8000", self._url).replace("localhost:8000", self._url)
        script = (
            f'[ -f "{self._state}" ] && . "{self._state}" && cd "$PWD"\nset -a\n{here}\ncode=$?\n'
            f'export -p > "{self._state}"\nexit $code'
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.directory,
            env=self._env,
            input="".join(f"{line}\n" for line in typed),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=50,
            check=False,
        )
        real = done.stdout.replace(self._url, "http://localhost:8000") if self._url else done.stdout
        fails = "error" in shown or "failed" in shown
        assert done.returncode == 0 or fails, f"{where}: {command}\nexit code {done.returncode}\n{real}"
        if shown.strip():
            assert same(shown, real), _differ(f"{where}: {command}", shown, real)

    def _serve(self, command: str, shown: str, where: str) -> None:
        self.stop()
        self._server = subprocess.Popen(
            ["bash", "-c", f'[ -f "{self._state}" ] && . "{self._state}"\nexec {command}'],
            cwd=self.directory,
            env={**self._env, "STEPWELL_PORT": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, f"{where}: {command}\ndid not start: {line}"
        self._url = found[0]
        real = line.replace(self._url, "http://127.0.0.1:8000")
        if shown.strip():
            assert same(shown, real), _differ(f"{where}: {command}", shown, real)

    def stop(self) -> None:
        """Stop the server, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
            assert server.stdout is not None
            server.stdout.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        server = self._server
        if server is not None:
            server.terminate()
            server.wait(30)
            assert server.stdout is not None
            server.stdout.close()


def _commands(block: Block) -> list[tuple[str, str]]:
    found: list[tuple[str, list[str]]] = []
    more = False
    for line in block.code.splitlines():
        if more:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() == "^C":
            found.append(("^C", []))
        else:
            assert found, f"{block.where}: a console begins with a command"
            found[-1][1].append(line)
            continue
        more = line.endswith("\\")
    return [(command, "\n".join(lines)) for command, lines in found]


def _compiles(block: Block) -> None:
    try:
        compile(block.code, block.where, "exec", dont_inherit=True)
    except SyntaxError:
        # A method or a piece of a body.
        inside = "".join(f"    {line}\n" for line in block.code.splitlines())
        compile(f"async def excerpt():\n{inside}", block.where, "exec", dont_inherit=True)


def _differ(where: str, shown: str, real: str) -> str:
    return f"{where}\n--- shown\n{shown}\n--- real\n{real}"
