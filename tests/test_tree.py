# SPDX-License-Identifier: Apache-2.0
"""Promises that the tree makes as a whole: licences, file sizes, layout, images, documents."""

import ast
import importlib.util
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from nmoe.cli import train_parser
from nmoe.config import load_config

ROOT = Path(__file__).parents[1]
FILES = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
    "\0"
)[:-1]
PYTHON = [name for name in FILES if name.endswith(".py")]
KERNEL = re.compile(r"/ops/(.*/)?(sm90a|sm100a|cuda|_cute/.*)\.py$|/ops/_cute/")


def test_every_python_file_names_its_licence():
    missing = [
        name
        for name in PYTHON
        if not (ROOT / name).read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert missing == []


def test_files_stay_readable_in_length():
    sizes = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in PYTHON}
    assert {name: size for name, size in sizes.items() if size > (900 if KERNEL.search(name) else 400)} == {}


def test_every_package_is_typed_and_every_module_says_what_it_is():
    for package in ("packages/nmoe-core/src/nmoe", "packages/hydra-judge/src/hydra_judge", "packages/nviz/src/nviz"):
        assert f"{package}/py.typed" in FILES
    silent = [
        name
        for name in PYTHON
        if (text := (ROOT / name).read_text(encoding="utf-8")).count("\n") > 3
        and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_nviz_link_leads_to_the_package():
    assert (ROOT / "nviz" / "streamlit_app.py").samefile(ROOT / "packages" / "nviz" / "streamlit_app.py")


def test_lock_names_one_public_index():
    text = (ROOT / "uv.lock").read_text()
    assert len(set(re.findall(r'registry = "([^"]*)"', text))) == 1
    assert not re.search(r"(path|directory) = \"/", text)


IMAGES = sorted(path.name for path in (ROOT / "docker").glob("*.Dockerfile"))
SCRIPTS = {
    name: set(tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]["scripts"])
    for name in ("nmoe-core", "hydra-judge", "nviz")
}
# What an image's base brings: the Python image, and coreutils.
BASE = {"pip", "useradd", "mkdir"}


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "docker" / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


@pytest.mark.parametrize("name", IMAGES)
def test_image_copies_only_files_that_are_there_and_not_ignored(name):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [
        [word for word in rest.split() if not word.startswith("--")]
        for verb, rest in instructions(name)
        if verb == "COPY"
    ]
    assert copies
    for *sources, _ in copies:
        for source in sources:
            assert source in allowed, f"{source} is kept out by .dockerignore"
            assert any(file == source or file.startswith(f"{source}/") for file in FILES), (
                f"{source} is not in the repository"
            )


@pytest.mark.parametrize("name", IMAGES)
def test_image_runs_only_commands_that_its_install_step_brings(name):
    """`uv sync` of an image is a command that tests/test_packages.py runs in a clean environment."""
    steps = instructions(name)
    package = re.search(r"--package (\S+)", (ROOT / "docker" / name).read_text())
    assert package
    commands = [part for verb, rest in steps if verb == "RUN" for part in rest.split("&&")]
    for command in commands:
        program = shlex.split(command)[0]
        assert program in BASE | {"uv"}, command
    (entry,) = [rest for verb, rest in steps if verb == "ENTRYPOINT"]
    assert ast.literal_eval(entry)[0] in SCRIPTS[package[1]]


@pytest.mark.parametrize("name", IMAGES)
def test_image_does_not_run_as_root_and_pins_its_installer(name):
    verbs = instructions(name)
    assert [rest for verb, rest in verbs if verb == "USER"] == ["nmoe"]
    assert next(i for i, (verb, _) in enumerate(verbs) if verb == "USER") < next(
        i for i, (verb, _) in enumerate(verbs) if verb == "ENTRYPOINT"
    )
    assert "uv==" in (ROOT / "docker" / name).read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "docker" / "k8s").glob("*.yaml")), ids=lambda path: path.name)
def test_kubernetes_jobs_run_commands_that_exist_on_configs_that_load(path):
    jobs = [found for found in yaml.safe_load_all(path.read_text()) if found["kind"] == "Job"]
    assert jobs
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        words = container["command"] + container["args"]
        options = train_parser().parse_args(words[words.index("nmoe-train") + 1 :])
        assert load_config(ROOT / options.config, options.overrides).data.train
        if words[0] == "torchrun":
            get_args_parser().parse_args(words[1:])
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        assert pod["securityContext"]["runAsUser"] == 10001, "the user that the image makes"


LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".md")])
def test_document_links_lead_somewhere(name):
    for target in LINK.findall((ROOT / name).read_text(encoding="utf-8")):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def test_readme_tables_are_up_to_date():
    path = ROOT / "docs" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.updated(text) == text, "run: uv run python docs/tables.py"
