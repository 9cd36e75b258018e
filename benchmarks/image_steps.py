"""Do the steps of `deploy/Dockerfile` make an image with a server that answers? `python -m benchmarks.image_steps`.

For machines without a container engine; needs root. The steps run as they are written, each stage in a chroot of its
own: an overlay over this machine's files, without this checkout and without home directories, and with a new virtual
environment as /usr/local in place of the image python. Then the image's CMD runs as its USER, with a /dev/shm of 64 MiB
as in Docker, until its HEALTHCHECK is content; and one guided request is sent. pip's settings in the environment
(PIP_...) hold in the steps too: name a mirror with PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import fail, machine, write_json

_HIDDEN = {"/root", "/home", "/tmp", "/run", f"/{ROOT.parts[1]}"}
_BASE = "/usr/bin/python3 -m venv --clear /usr/local && sed -i '/:1[0-9][0-9][0-9]:/d' /etc/passwd /etc/group"
"""The base image's Python, and none of this machine's accounts."""
_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_SECONDS = 120.0
_ISOLATED = "GUIDED_OWN_MOUNTS"
"""In the environment of a process with a mount namespace of its own."""


@dataclass
class Stage:
    """One `FROM` of the file, and the instructions after it."""

    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str, arguments: dict[str, str]) -> dict[str, Stage]:
    """Read a Dockerfile; return its stages by name. `arguments` replace the defaults of `ARG`."""
    found: dict[str, Stage] = {}
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text))
    given: dict[str, str] = {}
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "ARG":
            name, _, default = rest.partition("=")
            given[name] = arguments.get(name, default)
        elif word == "FROM":
            image, _, name = re.sub(r"\$\{(\w+)\}", lambda match: given[match[1]], rest).partition(" AS ")
            found[name] = Stage(image)
        else:
            list(found.values())[-1].steps.append((word, rest.strip()))
    return found


class Image:
    """The files of a stage, and what its instructions have set."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.environment = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        self.environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.folder, self.user = "/", "0"
        self.command: list[str] = []
        self.probe: list[str] = []
        for name in ("root", "upper", "work"):
            (directory / name).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={directory / 'upper'},workdir={directory / 'work'}"
        _run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        for hidden in _HIDDEN:
            mode = "mode=1777" if hidden == "/tmp" else "mode=755"
            _run("mount", "-t", "tmpfs", "-o", mode, "tmpfs", f"{self.root}{hidden}")
        _run("mount", "-t", "proc", "proc", f"{self.root}/proc")
        _run("mount", "--bind", "/dev", f"{self.root}/dev")
        _run("mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", f"{self.root}/dev/shm")

    def apply(self, word: str, text: str, images: dict[str, Image]) -> None:
        """Carry out one instruction."""
        match word:
            case "RUN":
                subprocess.run(self.within("sh", "-ec", text), env=self.environment, check=True)
            case "COPY":
                *options, target = text.split()
                source = images[options.pop(0).removeprefix("--from=")].root if "--from=" in text else ROOT
                self._copy(source, options, target)
            case "ENV":
                self.environment |= dict(each.split("=", 1) for each in shlex.split(text))
            case "WORKDIR":
                self.folder = text
                Path(f"{self.root}{text}").mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = text
                self.environment["HOME"] = self.folder
            case "CMD":
                self.command = json.loads(text)
            case "HEALTHCHECK":
                self.probe = json.loads(text.partition(" CMD ")[2])

    def _copy(self, source: Path, names: list[str], target: str) -> None:
        place = Path(f"{self.root}{os.path.join(self.folder, target)}")
        for name in names:
            path = source / name.lstrip("/")
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=ignored)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place if not target.endswith("/") else place / path.name)

    def within(self, *command: str) -> list[str]:
        """Return a command that runs in the image, as its user."""
        user = ["--userspec", f"{self.user}:{self.user}"] if self.user != "0" else []
        inner = f"cd {self.folder} && exec {shlex.join(command)}"
        return ["chroot", *user, str(self.root), "sh", "-c", inner]


def build(target: str, found: dict[str, Stage], directory: Path, images: dict[str, Image]) -> Image:
    """Carry out the stages that `target` needs, each once."""
    if target not in found:
        image = Image(Path(tempfile.mkdtemp(dir=directory)))
        image.apply("RUN", _BASE, images)
        return image
    image = build(found[target].parent, found, directory, images)
    for word, text in found[target].steps:
        if "--from=" in text:
            name = text.split()[0].removeprefix("--from=")
            images[name] = build(name, found, directory, images)
        print(f"{target}: {word} {text[:100]}", flush=True)
        image.apply(word, text, images)
    return image


@contextlib.contextmanager
def running(image: Image) -> Iterator[subprocess.Popen[bytes]]:
    """Run the image's CMD in process and IPC namespaces of its own."""
    isolated = ("unshare", "--pid", "--fork", "--ipc", f"--mount-proc={image.root}/proc")
    process = subprocess.Popen([*isolated, *image.within(*image.command)], env=image.environment)
    try:
        yield process
    finally:
        for first in psutil.Process(process.pid).children():
            first.kill()  # and with it the namespace: `--kill-child` ends with the change of user
        process.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{shlex.join(command)}: {done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scratch", type=Path, default=Path("/var/tmp"), help="folder with some GiB, not a tmpfs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if os.geteuid():
        fail("needs root: it mounts file systems")
    if _ISOLATED not in os.environ:
        command = ["unshare", "--mount", sys.executable, "-m", "benchmarks.image_steps", *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, _ISOLATED: "1"})
    started_on = machine()
    found = stages((ROOT / "deploy" / "Dockerfile").read_text(), {"VARIANT": options.variant})
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as directory:
        begun = time.monotonic()
        image = build(list(found)[-1], found, Path(directory), {})
        result["build_seconds"] = round(time.monotonic() - begun)
        begun = time.monotonic()
        with running(image) as process:
            while subprocess.run(
                image.within(*image.probe), env=image.environment, capture_output=True, check=False
            ).returncode:
                if process.poll() is not None or time.monotonic() - begun > _START_SECONDS:
                    fail("the server does not become healthy")
                time.sleep(1)
            result["healthy_after_seconds"] = round(time.monotonic() - begun)
            body = {"prompt": "A date: ", "regex": "20[0-9]{2}-(0[1-9]|1[0-2])"}
            answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=60).json()
            result["answer"] = answer["choices"][0]["text"]
    print(result)
    write_json(options.out / "image_steps.json", vars(options), result, started_on)


if __name__ == "__main__":
    main()
