"""The recipe of the conda package: what it says is what pyproject.toml says. ci/test.sh builds it, too."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import conda_recipe
import pytest
import yaml
from wheels import WheelError

from codegen import nvrtc
from codegen.project import ROOT

RECIPE = yaml.safe_load((conda_recipe.CONDA / "recipe.yaml").read_text("utf-8"))
REQUIREMENTS = RECIPE["requirements"]


@pytest.fixture(scope="module")
def settings() -> dict:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def of_conda(requirement: str) -> str:
    """A requirement of pyproject.toml with conda's name and spelling."""
    name, version = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
    names = {of_pypi: name for name, of_pypi in conda_recipe.DISTRIBUTIONS.items()}
    return f"{names.get(name, name)} {version}".strip()


def without(wanted: str, requirements: list[str]) -> set[str]:
    """Requirements without the one of a name, which must be there."""
    assert wanted in {spec.split()[0] for spec in requirements}
    return {spec for spec in requirements if spec.split()[0] != wanted}


def test_the_project_is_pyprojects(settings):
    project, about = settings["project"], RECIPE["about"]
    assert RECIPE["package"]["name"] == project["name"]
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert [about["license_file"]] == project["license-files"] and (ROOT / about["license_file"]).is_file()
    assert RECIPE["build"]["python"]["entry_points"] == [
        f"{name} = {function}" for name, function in project["scripts"].items()]
    assert RECIPE["tests"][0]["python"]["imports"][0] == project["name"].replace("-", "_")


def test_the_least_python_is_pyprojects(settings):
    least = RECIPE["context"]["python_min"]
    assert settings["project"]["requires-python"] == f">={least}"
    assert "python ${{ python_min }}.*" in REQUIREMENTS["host"] and "python >=${{ python_min }}" in REQUIREMENTS["run"]
    assert RECIPE["tests"][0]["python"]["python_version"] == "${{ python_min }}.*"


def test_what_runs_is_pyprojects(settings):
    assert without("python", REQUIREMENTS["run"]) == set(map(of_conda, settings["project"]["dependencies"]))
    least = min(re.fullmatch(r"cupy-cuda1\dx(>=[\d.]+)", requirement)[1]
                for extra in ("cuda12", "cuda13")
                for requirement in settings["project"]["optional-dependencies"][extra])
    assert REQUIREMENTS["run_constraints"] == [f"cupy {least}"]


def test_what_builds_is_pyprojects(settings):
    """All tools of the build; pins but the compiler's are for bytes of the wheel, which the package does not keep."""
    wanted = set(map(of_conda, settings["build-system"]["requires"]))
    found = without("python", without("pip", without("wheel", REQUIREMENTS["host"] + REQUIREMENTS["build"])))
    assert {spec.split()[0] for spec in found} == {spec.split()[0] for spec in wanted}
    compiler = next(spec for spec in wanted if spec.startswith("cuda-nvrtc "))
    assert compiler in REQUIREMENTS["host"] and compiler.split("==")[1] == nvrtc.version().split()[1]
    disassembler = next(spec for spec in wanted if spec.startswith("cuda-nvdisasm "))
    assert f"cuda-nvdisasm {disassembler.split('==')[1].split('.')[0]}.*" in REQUIREMENTS["build"]


def test_ninjas_module_is_that_of_the_constraints():
    of_ninja = RECIPE["source"][1]
    version, = re.findall(r"^ninja==(.*)$", (ROOT / "ci/constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert of_ninja["url"].endswith(f"/ninja-{version}.tar.gz")
    assert f"cp {of_ninja['target_directory']}/ninja-upstream/" in (conda_recipe.CONDA / "build.sh").read_text("utf-8")


def test_a_recipe_is_filled_in_for_an_sdist(tmp_path):
    sdist = tmp_path / "sage_aot-1.2.3rc1.tar.gz"
    sdist.write_bytes(b"an sdist")
    conda_recipe.fill(sdist, "a-name", tmp_path / "out")
    text = (tmp_path / "out" / "recipe.yaml").read_text("utf-8")
    recipe = yaml.safe_load(text)
    assert not re.search(r"VERSION|SHA256|MAINTAINER|^#", text, re.MULTILINE)
    assert recipe["context"]["version"] == "1.2.3rc1" and recipe["extra"]["recipe-maintainers"] == ["a-name"]
    ours = recipe["source"][0]
    assert ours["sha256"] == hashlib.sha256(b"an sdist").hexdigest()
    assert ours["url"].replace("${{ version }}", "1.2.3rc1").endswith(f"/sage-aot/{sdist.name}")
    assert (tmp_path / "out" / "build.sh").read_bytes() == (conda_recipe.CONDA / "build.sh").read_bytes()


@pytest.mark.parametrize("name", ["sage_aot-0.1.0-py3-none-any.whl", "sage_aot_sageattention-0.1.0.tar.gz"])
def test_what_is_no_sdist_is_refused(tmp_path, monkeypatch, capsys, name):
    with pytest.raises(WheelError, match="expected an sdist sage_aot-VERSION.tar.gz, got .*sage_aot"):
        conda_recipe.filled(Path(name), "a-name")
    monkeypatch.setattr(sys, "argv", ["conda_recipe.py", "fill", name, "a-name", str(tmp_path)])
    assert conda_recipe.main() == 1 and "expected an sdist" in capsys.readouterr().err
