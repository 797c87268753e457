"""The release: what its workflow may do, and the scripts that decide, on a tree of their own and with a `gh` that notes
how it is called."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from codegen.project import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
JOBS = WORKFLOW["jobs"]
VERSION = "0.1.0"

GH = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" > "$NOTED/$2"
case "$*" in
  "release view "*) [ -e "$NOTED/there" ];;
  "release create "*) cat > "$NOTED/notes";;
esac
"""


class Tree:
    """A tree with the scripts, a changelog and files to release; its commit has the version's tag."""

    def __init__(self, root: Path) -> None:
        self.root, self.noted = root, root / "noted"
        files = {"CHANGELOG.md": f"# Changelog\n\n## 0.2.0 (unreleased)\n\nMore.\n\n## {VERSION} (2026-12-01)\n\n"
                                 "The first.\n\n### Attention\n\n- attn\n\n## 0.0.1 (2026-01-01)\n\nBefore.\n",
                 "sage_aot/_version.py": f'__version__ = "{VERSION}"\n', "dist/a.whl": "a wheel", "dist/b.tar.gz": "b",
                 f"release/sage_aot-{VERSION}.attestation.json": "{}", "bin/gh": GH}
        for name, text in files.items():
            self.write(name, text)
        self.write("release/SHA256SUMS", "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
                                                 for path in (root / "dist").iterdir()))
        for script in ("publish.sh", "release.sh", "wheels.py"):
            (root / "ci").mkdir(exist_ok=True)
            shutil.copy(ROOT / "ci" / script, root / "ci")
        (root / "bin/gh").chmod(0o755)
        (root / "bin/python").symlink_to(sys.executable)
        self.noted.mkdir()
        self.git("init", "-q")
        self.commit(f"v{VERSION}")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, "utf-8")

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=self.root, check=True)

    def commit(self, tag: str) -> None:
        self.git("add", "ci", "sage_aot", "CHANGELOG.md")
        self.git("commit", "-q", "-m", tag, "--allow-empty")
        self.git("tag", tag)

    def run(self, script: str, tag: str = f"v{VERSION}") -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "NOTED": str(self.noted)}
        return subprocess.run(["bash", f"ci/{script}", tag], cwd=self.root, env=environment, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def calls(self) -> dict[str, list[str]]:
        """The arguments of gh by its command."""
        return {path.name: path.read_text("utf-8").splitlines() for path in self.noted.iterdir()
                if path.name not in ("there", "notes")}


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path)


ASSETS = ["dist/a.whl", "dist/b.tar.gz", "release/SHA256SUMS", f"release/sage_aot-{VERSION}.attestation.json"]


# --- ci/publish.sh ----------------------------------------------------------------------------------------------------


def test_a_release_is_made_of_all_files_with_the_versions_notes(tree):
    done = tree.run("publish.sh")
    assert done.returncode == 0, done.stdout
    assert tree.calls()["create"] == ["release", "create", "v0.1.0", "--verify-tag", "--title", "sage-aot 0.1.0",
                                      "--notes-file", "-", *ASSETS]
    assert (tree.noted / "notes").read_text("utf-8").strip() == "The first.\n\n### Attention\n\n- attn"


def test_a_release_that_is_there_is_completed(tree):
    (tree.noted / "there").touch()
    assert tree.run("publish.sh").returncode == 0
    assert tree.calls()["upload"] == ["release", "upload", "v0.1.0", "--clobber", *ASSETS]
    assert "create" not in tree.calls()


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda root: (root / "dist/a.whl").write_bytes(b"another"), "a.whl: FAILED"),
    (lambda root: (root / "dist/b.tar.gz").unlink(), "b.tar.gz: FAILED open or read"),
    (lambda root: (root / "release/SHA256SUMS").unlink(), "expected release/SHA256SUMS, got none: run ci/release.sh"),
    (lambda root: (root / f"release/sage_aot-{VERSION}.attestation.json").write_bytes(b""),
     f"expected release/sage_aot-{VERSION}.attestation.json, got none"),
])
def test_nothing_is_published_where_a_file_is_wrong(tree, spoil, message):
    spoil(tree.root)
    done = tree.run("publish.sh")
    assert done.returncode != 0 and message in done.stdout and tree.calls() == {}


# --- ci/release.sh ----------------------------------------------------------------------------------------------------


def test_the_tag_is_the_versions_and_the_commits(tree):
    done = tree.run("release.sh")  # as far as the wheels, which tests of ci/wheels.py make
    assert "expected sage_aot-0.1.0-py3-none-" in done.stdout and "got a.whl, b.tar.gz" in done.stdout
    assert "expected the tag v0.1.0, as sage_aot/_version.py has it" in tree.run("release.sh", "v0.1.1").stdout
    tree.write("sage_aot/_version.py", f'__version__ = "{VERSION}"\n# changed\n')
    assert re.search("expected the commit that v0.1.0 names, unchanged, got .*-dirty", tree.run("release.sh").stdout)
    tree.commit("another")
    assert "expected the commit that v0.1.0 names, unchanged" in tree.run("release.sh").stdout


def test_the_changelog_has_the_versions_day(tree):
    tree.write("sage_aot/_version.py", '__version__ = "0.2.0"\n')
    tree.commit("v0.2.0")
    done = tree.run("release.sh", "v0.2.0")
    assert done.returncode == 1 and "expected the section of 0.2.0 in CHANGELOG.md to have a day" in done.stdout


# --- the workflow -----------------------------------------------------------------------------------------------------


def test_one_job_may_write_to_the_repository_and_another_may_sign():
    writing = {name: {what for what, how in job.get("permissions", {}).items() if how == "write"}
               for name, job in JOBS.items()}
    assert {name: what for name, what in writing.items() if what} == {
        "upload": {"id-token", "attestations"}, "publish": {"contents"}}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert JOBS["upload"]["environment"] == "pypi"


def test_jobs_come_one_after_the_other():
    assert {name: job.get("needs") for name, job in JOBS.items()} == {
        "test": None, "kernels": None, "pack": "kernels", "upload": ["test", "pack"], "publish": "upload"}


def test_what_decides_is_a_script():
    runs = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    scripts = [match[1] for command in runs if (match := re.fullmatch(r"bash (\S+)( \"\$GITHUB_REF_NAME\")?", command))]
    assert [command for command in runs if not command.startswith("bash ")] == [
        'cp "$BUNDLE" "release/sage_aot-${GITHUB_REF_NAME#v}.attestation.json"']
    assert scripts == [".ci/run", "ci/kernels.sh", "ci/pack.sh", "ci/release.sh", "ci/publish.sh"]
    assert all((ROOT / script).is_file() for script in scripts)


def test_what_is_published_is_what_was_attested_and_uploaded():
    steps = JOBS["upload"]["steps"]
    attest = next(i for i, step in enumerate(steps) if "attest" in step.get("uses", ""))
    copy, keep, to_pypi = steps[attest + 1:]
    assert steps[attest - 1]["run"].startswith("bash ci/release.sh")
    assert steps[attest]["with"] == {"subject-path": "dist/*"}
    assert copy["env"] == {"BUNDLE": f"${{{{ steps.{steps[attest]['id']}.outputs.bundle-path }}}}"}
    assert keep["with"]["path"].splitlines() == ["dist/*", "release/*"] and "pypi" in to_pypi["uses"]
    fetch = JOBS["publish"]["steps"][1]["with"]
    assert fetch == {"name": keep["with"]["name"], "path": "."}
