"""The benchmark of configurations: what counts as met, and the bar on those of the installed package."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.models import READ, Read, package_folder, read_folder
from libra.hardware.model_file import load_model

QWEN = Read("Qwen--Qwen3-8B", "qwen3", load_model("Qwen/Qwen3-8B"))


@pytest.mark.parametrize(
    ("name", "published", "bar"),
    [
        ("Qwen--Qwen3-8B", "8.1907", 0.005),
        ("moonshotai--Kimi-K3", "2.8T", 0.05 / 2.8),
        ("moonshotai--Kimi-K2-Instruct", "1026.4", 0.005),
        ("moonshotai--Kimi-K2.5", "1T", 0.5),
        ("zai-org--GLM-5.1-FP8", "744", 0.005),
    ],
)
def test_a_published_total_has_the_precision_of_its_digits(name: str, published: str, bar: float) -> None:
    row = replace(QWEN, name=name)
    assert row.published == published
    assert row.reference is not None
    assert row.reference[1] == pytest.approx(bar)


def test_the_count_of_the_class_must_be_exact() -> None:
    assert QWEN.met
    assert replace(QWEN, made=8_190_735_360).exact
    assert not replace(QWEN, made=8_190_735_361).met
    assert not replace(QWEN, model=None, why="model_type: unknown").met


def test_the_configurations_of_the_package_are_read() -> None:
    folder = package_folder()
    if folder is None:
        pytest.skip("aiconfigurator-core is not installed")
    found = list(read_folder(folder))
    assert sum(it.model is not None for it in found) >= READ
    beyond = {it.name for it in found if it.model is not None and not it.met}
    assert beyond == {"meta-llama--Llama-4-Scout-17B-16E-Instruct"}  # its file leaves out the vision tower
