"""Makes a virtual environment for tests inside another trainer, beside the libraries of Libra's own.

    python tools/host.py VENV TARGET PACKAGE [PACKAGE ...] [--with REQUIREMENT ...]

TARGET sees the libraries of VENV after its own, so only what differs is installed. With `--with`, the packages are
installed without what they require, and these requirements beside them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/host.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    parser.add_argument("--with", nargs="+", default=[], metavar="REQUIREMENT", dest="requirements")
    options = parser.parse_args()
    subprocess.run([options.venv / "bin/python", "-m", "venv", "--clear", options.target], check=True)
    [own] = options.target.glob("lib/python*/site-packages")
    [below] = options.venv.absolute().glob("lib/python*/site-packages")
    (own / "zz_below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    pip = [
        options.target / "bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-warn-conflicts",
    ]
    subprocess.run([*pip, *(["--no-deps"] if options.requirements else []), *options.packages], check=True)
    if options.requirements:
        subprocess.run([*pip, *options.requirements], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
