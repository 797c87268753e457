"""Measurements, and the figures that pages quote from them, as data: bench/claims.yaml.

    python bench/claims.py            says what is wrong, and which files are out of date
    python bench/claims.py --write    rewrites these files

What is written: the figures that README.md and docs/ quote (quotes.py has the comments that mark them), the head of
each bench/results/RUN/log.md, and the index bench/results/README.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path

import yaml

import quotes
from codegen.files import write_if_changed
from codegen.yaml_reader import YamlReader, line_of

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "bench/claims.yaml"
RESULTS = "bench/results"
COMMAND = "python bench/claims.py --write"

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_COMMIT = re.compile(r"\b[0-9a-f]{7}\b|^unknown")
_HEAD = re.compile(r"\A(# [^\n]+\n\n)(?:<!-- run -->\n.*?<!-- end of run -->\n\n)?", re.DOTALL)


# --- what claims.yaml holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One measurement: a folder of bench/results, whose log.md says what was found."""

    name: str
    gpu: str
    commit: str
    command: str
    superseded_by: str = ""  # the name of another run

    @property
    def day(self) -> str:
        """The day in the folder's name."""
        found = _DAY.search(self.name)
        return found[0] if found else ""

    def head(self) -> str:
        """Text below the title of log.md."""
        superseded = f"- superseded by: [{self.superseded_by}](../{self.superseded_by}/log.md)\n" if (
            self.superseded_by) else ""
        return (f"<!-- run -->\n- GPU: {self.gpu}\n- commit: {self.commit}\n- command: `{self.command}`\n{superseded}"
                f"<!-- end of run -->\n\n")


@dataclass(frozen=True)
class Claim:
    """A figure, or a table of figures, that pages may quote."""

    name: str
    what: str
    unit: str
    log: str  # a file below bench/results
    value: str = ""  # a figure, of a claim without a table
    quotient: tuple[str, ...] = ()  # two figures of the log whose quotient the value is
    columns: tuple[str, ...] = ()
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def run(self) -> str:
        return self.log.partition("/")[0]

    def cells(self) -> dict[str, str]:
        """The figures by what a quote calls them: ``NAME``, or ``NAME[ROW, COLUMN]``."""
        if not self.rows:
            return {self.name: self.value}
        return {f"{self.name}[{row}, {column}]": cell for row, cells in self.rows.items()
                for column, cell in zip(self.columns, cells) if cell}

    def table(self) -> str:
        """The rows in Markdown; the unit stands above their names."""
        lines = [("", self.unit, *self.columns, ""), ("", "---", *("---:" for _ in self.columns), "")]
        lines += [("", row, *cells, "") for row, cells in self.rows.items()]
        return "".join(f"{'|'.join(f' {cell} ' if cell else '' for cell in line)}\n" for line in lines)


@dataclass(frozen=True)
class Claims:
    """All runs and claims by name."""

    runs: dict[str, Run]
    claims: dict[str, Claim]

    @cached_property
    def figures(self) -> dict[str, str]:
        """Every figure by what a quote calls it."""
        return {name: figure for claim in self.claims.values() for name, figure in claim.cells().items()}

    @cached_property
    def tables(self) -> dict[str, str]:
        """Every table in Markdown by its claim's name."""
        return {name: claim.table() for name, claim in self.claims.items() if claim.rows}


class ClaimError(Exception):
    """Errors of claims.yaml, a sentence a line."""


# --- reading ----------------------------------------------------------------------------------------------------------


class ClaimReader(YamlReader):
    """Reads claims.yaml. Figures stay the text that they are: 1.50 is not 1.5."""

    def read(self, text: str) -> Claims:
        """ClaimError for everything that is wrong with the text."""
        root = self.document(text)
        top = self.mapping(root, "the claims", ("runs", "claims")) if root else {}
        runs = self.named_mappings(top["runs"], "runs") if "runs" in top else {}
        claims = self.named_mappings(top["claims"], "claims") if "claims" in top else {}
        found = Claims({name: self._run(name, node, runs) for name, node in runs.items()},
                       {name: self._claim(name, node, runs) for name, node in claims.items()})
        if self.problems or root is None:
            raise ClaimError("\n".join(self.problems) or f"{self.file_name}: expected runs and claims, got nothing")
        return found

    def _run(self, name: str, node: yaml.Node, runs: dict[str, yaml.Node]) -> Run:
        entries = self.mapping(node, f"the run {name}", ("gpu", "commit", "command"), ("superseded_by",))
        values = {key: self._text(value) for key, value in entries.items()}
        if not _DAY.search(name):
            self.complain(line_of(node), f"expected a run's name with its day, as h200-2026-11-22-what, got {name!r}")
        if not _COMMIT.search(values.get("commit", "unknown")):
            self.complain(line_of(entries["commit"]), f"expected the hash of a commit in 7 digits, or a text that "
                                                      f"begins with unknown, got {values['commit']!r}")
        if values.get("superseded_by", name) not in runs:
            self.complain(line_of(entries["superseded_by"]), f"expected the name of a run, got "
                                                             f"{values['superseded_by']!r}")
        return Run(name, **{"gpu": "", "commit": "", "command": "", **values})

    def _claim(self, name: str, node: yaml.Node, runs: dict[str, yaml.Node]) -> Claim:
        one, table = ("value",), ("columns", "rows")
        entries = self.mapping(node, f"the claim {name}", ("what", "unit", "log"), (*one, "quotient", *table))
        if set(entries) & {*one, *table} not in ({*one}, {*table}):
            self.complain(line_of(node), f"expected a value, or columns and rows, in the claim {name}, got "
                                         f"{', '.join(entries)}")
        what, unit, log = (self._text(entries[key]) if key in entries else "" for key in ("what", "unit", "log"))
        if log.partition("/")[0] not in runs:
            self.complain(line_of(entries.get("log", node)), f"expected a file of a run, as RUN/log.md, got {log!r}")
        return Claim(name, what, unit, log, self._figure(entries["value"]) if "value" in entries else "",
                     self._figures(entries, "quotient"), self._texts(entries, "columns"), self._rows(name, entries))

    def _rows(self, name: str, entries: dict[str, yaml.Node]) -> dict[str, tuple[str, ...]]:
        if "rows" not in entries:
            return {}
        rows = {row: tuple(self._figure(item, "") for item in self.items(node, f"the row {row}"))
                for row, node in self.named_mappings(entries["rows"], f"the rows of {name}").items()}
        width = len(self._texts(entries, "columns"))
        for row, cells in rows.items():
            if len(cells) != width:
                self.complain(line_of(entries["rows"]), f"expected {width} figures in the row {row} of {name}, got "
                                                        f"{len(cells)}")
        return rows

    def _texts(self, entries: dict[str, yaml.Node], key: str) -> tuple[str, ...]:
        return tuple(self._text(item) for item in self.items(entries[key], key)) if key in entries else ()

    def _figures(self, entries: dict[str, yaml.Node], key: str) -> tuple[str, ...]:
        return tuple(self._figure(item) for item in self.items(entries[key], key)) if key in entries else ()

    def _figure(self, node: yaml.Node, *also: str) -> str:
        text = self._text(node)
        if text not in also and not quotes.FIGURE.fullmatch(text):
            self.complain(line_of(node), f"expected a figure such as 1.50, or 1.24 to 1.28, got {text!r}")
        return text

    def _text(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        self.complain(line_of(node), "expected a single value, got a list or a mapping")
        return ""


def read(root: Path = ROOT) -> Claims:
    """The claims of a source tree. ClaimError for everything that is wrong with the file."""
    return ClaimReader(SOURCE).read((root / SOURCE).read_text("utf-8"))


# --- what the logs say ------------------------------------------------------------------------------------------------


def problems(claims: Claims, root: Path = ROOT) -> list[str]:
    """Runs without a log, folders without a run, and figures that their log does not hold, as sentences."""
    folders = {path.name for path in (root / RESULTS).iterdir() if path.is_dir()}
    found = [f"{SOURCE}: expected a run for each folder of {RESULTS}, got none for {name}"
             for name in sorted(folders - claims.runs.keys())]
    found += [f"{RESULTS}/{name}/log.md: expected the log of the run {name}, got none"
              for name in sorted(claims.runs) if not (root / RESULTS / name / "log.md").is_file()]
    for claim in claims.claims.values():
        log = root / RESULTS / claim.log
        found += _missing(claim, log) if log.is_file() else [
            f"{SOURCE}: expected the log of the claim {claim.name}, got no file {RESULTS}/{claim.log}"]
    return found


def _missing(claim: Claim, log: Path) -> list[str]:
    """The figures of a claim that its log does not hold."""
    scale = 100 if claim.unit.startswith("%") else 1
    numbers = [factor * number for number in quotes.logged(log.read_text("utf-8")) for factor in {1, scale}]
    wanted = dict(enumerate(claim.quotient)) if claim.quotient else claim.cells()
    absent = [f"{SOURCE}: expected the figure {figure} of the claim {claim.name} in {RESULTS}/{claim.log}, got none "
              f"that rounds to it" for figure in wanted.values()
              if not all(_rounds_to(one, numbers) for one in quotes.NUMBER.findall(figure))]
    if claim.quotient and not absent:
        first, second = map(quotes.decimal, claim.quotient)
        if not _rounds_to(claim.value, [scale * first / second]):
            absent.append(f"{SOURCE}: expected {' / '.join(claim.quotient)} as the claim {claim.name}, got "
                          f"{claim.value}")
    return absent


def _rounds_to(figure: str, numbers: list[Decimal]) -> bool:
    """True where one of the numbers is the figure, in the digits that the figure has; signs do not count."""
    wanted = abs(quotes.decimal(figure))
    half = Decimal(5).scaleb(int(wanted.as_tuple().exponent) - 1)
    return any(abs(number - wanted) <= half for number in numbers)


# --- what is written --------------------------------------------------------------------------------------------------


def pages(claims: Claims, root: Path = ROOT) -> dict[Path, str]:
    """The files that follow from the claims, as they should be. ClaimError where a page quotes what is not there."""
    texts: dict[Path, str] = {}
    wrong: list[str] = []
    for path in quotes.documents(root):
        texts[path], complaints = quotes.requoted(path.read_text("utf-8"), claims.figures, claims.tables)
        wrong += [f"{path.relative_to(root).as_posix()}: {complaint}" for complaint in complaints]
    for run in claims.runs.values():
        path = root / RESULTS / run.name / "log.md"
        text = texts[path] = path.read_text("utf-8")
        if title := _HEAD.match(text):
            texts[path] = title[1] + run.head() + text[title.end():]
        else:
            wrong.append(f"{path.relative_to(root).as_posix()}: expected a title, '# ...', and an empty line, got "
                         f"{text[:40]!r}")
    if wrong:
        raise ClaimError("\n".join(wrong))
    texts[root / RESULTS / "README.md"] = _index(claims, root)
    return texts


_INDEX = f"""\
# Measurements

Each row is a folder here, whose `log.md` says what was run and found. [claims.yaml](../claims.yaml) names GPU, commit
and command of each run, and the figures that pages quote: {{quoted}} of its {{claims}} claims are quoted now.
`{COMMAND}` writes this page, the heads of the logs and the quotes.

Output of tests and sanitizers is kept where a proof needs it, raw output of superseded runs where a page quotes it:
`git log --diff-filter=D --name-only -- {RESULTS}` finds it. A superseded run stays while a page cites it.

| day | measurement | GPU | commit | cited by | superseded by |
|---|---|---|---|---|---|
"""


def _index(claims: Claims, root: Path) -> str:
    """bench/results/README.md: every run, newest first."""
    citing = {path.relative_to(root): path.read_text("utf-8") for path in _citing(root)}
    quoted = {path: quotes.quoted(text) for path, text in citing.items() if path.suffix == ".md"}
    runs = sorted(claims.runs.values(), key=lambda run: (run.day, run.name), reverse=True)
    head = _INDEX.format(quoted=len(set().union(*quoted.values())), claims=len(claims.claims))
    return head + "".join(_row(run, (root / RESULTS / run.name / "log.md").read_text("utf-8"), [
        path for path, text in citing.items() if re.search(rf"results/{run.name}(?![\w-])", text)
        or run.name in {claims.claims[name].run for name in quoted.get(path, ())}]) for run in runs)


def _citing(root: Path) -> list[Path]:
    """The files that may cite a run: pages, and sources that go by what was measured."""
    sources = (path for folder in ("sage_aot", "tests") for path in sorted((root / folder).rglob("*.py")))
    return [*quotes.documents(root), *sources]


def _row(run: Run, log: str, citing: list[Path]) -> str:
    title = log.partition("\n")[0].removeprefix("# ")
    pages = ", ".join(f"[{path.stem if path.suffix == '.md' else path.name}](../../{path.as_posix()})"
                      for path in citing)
    newer = f"[{run.superseded_by}]({run.superseded_by}/log.md)" if run.superseded_by else ""
    return f"| {run.day} | [{title}]({run.name}/log.md) | {run.gpu} | {run.commit} | {pages} | {newer} |\n"


# --- command line -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Print what is wrong or out of date, and return 1 where something is."""
    parser = argparse.ArgumentParser(description="Figures that pages quote, from bench/claims.yaml.")
    parser.add_argument("--write", action="store_true", help="rewrite what is out of date")
    arguments = parser.parse_args(argv)
    try:
        claims = read(root)
        wrong = problems(claims, root)
        texts = {} if wrong else pages(claims, root)
    except ClaimError as error:
        wrong, texts = str(error).splitlines(), {}
    for path, text in texts.items():
        if arguments.write:
            write_if_changed(path, text.encode())
        elif not path.is_file() or path.read_text("utf-8") != text:
            wrong.append(f"{path.relative_to(root).as_posix()} is out of date: run {COMMAND}")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
