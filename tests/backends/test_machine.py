"""What a run computes in: by its devices' instructions, by timed products where they do not decide, or as told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from libra.backends.machine import Bf16Speed, Choice, bf16_instructions, choose, cpu_limits, served_dtype

NATIVE = Bf16Speed("AVX-512 BF16", 0.25)
NATIVE_IN_A_NOISY_MOMENT = Bf16Speed("AMX", 1.7)
TIMED_FAST, TIMED_EQUAL, SLOW = Bf16Speed("", 0.5), Bf16Speed("", 0.95), Bf16Speed("", 29.4)

ZEN5 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16\nflags\t\t: fpu\n"
SAPPHIRE_RAPIDS = "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
SKYLAKE = "flags\t\t: fpu avx2 avx512f avx512bw avx512vl\n"
HASWELL = "flags\t\t: fpu avx avx2 fma\n"
GRAVITON_3 = "BogoMIPS\t: 2100.00\nFeatures\t: fp asimd sve i8mm bf16\n"
GRAVITON_2 = "Features\t: fp asimd asimddp\n"


@pytest.mark.parametrize(
    ("cpuinfo", "environment", "wanted"),
    [
        (ZEN5, {}, "AVX-512 BF16"),
        (SAPPHIRE_RAPIDS, {}, "AMX"),
        (GRAVITON_3, {}, "Arm BF16"),
        (SKYLAKE, {}, ""),
        (HASWELL, {}, ""),
        (GRAVITON_2, {}, ""),
        ("", {}, ""),
        (ZEN5, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ""),
        (ZEN5, {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, ""),
        (ZEN5, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, ""),
        (ZEN5, {"ATEN_CPU_CAPABILITY": "avx2"}, ""),
        (ZEN5, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"}, "AVX-512 BF16"),
        (ZEN5, {"ONEDNN_MAX_CPU_ISA": "ALL"}, "AVX-512 BF16"),
    ],
)
def test_instructions_that_a_cpu_has_and_may_use(cpuinfo: str, environment: dict[str, str], wanted: str) -> None:
    assert bf16_instructions(cpuinfo, environment) == wanted


@pytest.mark.parametrize(
    ("asked", "devices", "wanted"),
    [
        ("auto", [NATIVE], Choice("bf16", "computes in bf16 (AVX-512 BF16)")),
        ("auto", [NATIVE_IN_A_NOISY_MOMENT], Choice("bf16", "computes in bf16 (AMX)")),
        (
            "auto",
            [TIMED_FAST],
            Choice("bf16", "computes in bf16: matrix products in bf16 take 0.5 times as long as in fp32 here"),
        ),
        (
            "auto",
            [TIMED_EQUAL],
            Choice("fp32", "computes in fp32: matrix products in bf16 take 0.95 times as long as in fp32 here"),
        ),
        (
            "auto",
            [NATIVE_IN_A_NOISY_MOMENT, SLOW, TIMED_FAST],
            Choice(
                "fp32",
                "computes in fp32: matrix products in bf16 take 29 times as long as in fp32 on the slowest of 3 nodes",
            ),
        ),
        (
            "auto",
            [TIMED_EQUAL, NATIVE_IN_A_NOISY_MOMENT],
            Choice(
                "fp32",
                "computes in fp32: matrix products in bf16 take 0.95 times as long as in fp32 on the slowest of 2"
                " nodes",
            ),
        ),
        (
            "bf16",
            [SLOW],
            Choice(
                "bf16",
                "computes in bf16 as configured: matrix products in bf16 take 29 times as long as in fp32 here, auto"
                " would choose fp32",
            ),
        ),
        (
            "fp32",
            [NATIVE],
            Choice(
                "fp32",
                "computes in fp32 as configured: matrix products in bf16 take 0.25 times as long as in fp32 here, auto"
                " would choose bf16",
            ),
        ),
        ("bf16", [NATIVE], Choice("bf16", "computes in bf16 (AVX-512 BF16)")),
    ],
)
def test_the_slowest_device_decides_unless_told(asked: str, devices: list[Bf16Speed], wanted: Choice) -> None:
    assert choose(asked, devices) == wanted  # type: ignore[arg-type]


def test_limits_are_a_part_of_the_hardware() -> None:
    assert cpu_limits({"PATH": "/bin", "ONEDNN_MAX_CPU_ISA": ""}) == ""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert cpu_limits(limits) == "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2"


def test_engines_get_what_trainers_compute_in() -> None:
    assert served_dtype("bf16") == "bfloat16"
    assert served_dtype("fp32") == served_dtype("fp64") == "float32"


def test_libraries_that_are_kept_to_avx2_compute_in_fp32() -> None:
    """As on a CPU that has no more: without a matrix unit for bf16, PyTorch multiplies element by element."""
    script = "from libra.backends.machine import choose, probe; print(choose('auto', [probe('cpu')]).precision)"
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=limited, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fp32"
