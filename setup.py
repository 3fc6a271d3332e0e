"""All that a wheel has is in pyproject.toml, but for two things: the examples, which `libra examples` writes, and the
core of the simulator, which is compiled with LIBRA_COMPILED=1.

    LIBRA_COMPILED=1 pip wheel --no-build-isolation --no-deps .    # needs a C compiler and mypy
    make compiled                                                  # the same in build/compiled, to try and to test

mypyc compiles the very modules that run without it, so there is one source, and both give the same bits
(tests/sim/test_compiled.py). What stays interpreted can still import, call and replace what is compiled, but not
derive from it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = Path(__file__).parent / "examples"
SIM, ROUTE = Path("src/libra/sim"), Path("src/libra/route")
INTERPRETED = ("__init__.py", "queues.py")  # of an engine's modules; mypyc takes no class that derives from `deque`
CLUSTER = (
    *("clock", "cluster", "cluster_state", "events", "frontend", "handover", "instances"),
    *("kv_transfers", "link", "placement", "prefill_decode", "pull_frontend", "push_frontend"),
    "workload/caller",
)
LENT = "lend/sim/granted_engine.py"  # an engine of a room of its own
EVIDENCE = ("evidence", "hierarchy", "loads", "remaining", "service_cost", "tool_state")  # of C-MLFQ


def core() -> list[str]:
    """The modules in which a simulation spends its time."""
    modules = sorted((Path(__file__).parent / SIM / "engine").glob("*.py"))
    engine = [SIM / "engine" / module.name for module in modules if module.name not in INTERPRETED]
    others = [folder / f"{name}.py" for folder, names in ((SIM, CLUSTER), (ROUTE, EVIDENCE)) for name in names]
    return [str(module) for module in (*engine, *others, *sorted(Path("src/libra").glob(LENT)))]


class BuildWithExamples(build_py):
    """The packages, and the files of `examples` inside `libra`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "libra" / "examples"
            shutil.copytree(EXAMPLES, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


if __name__ == "__main__":
    extensions = []
    if os.environ.get("LIBRA_COMPILED") == "1":
        from mypyc.build import mypycify

        extensions = mypycify(core(), opt_level="3", debug_level="0", group_name="libra_sim")
    setup(ext_modules=extensions, cmdclass={"build_py": BuildWithExamples})
