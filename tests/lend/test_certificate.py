from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from libra.config.yaml_file import ConfigError
from libra.lend.certificate import Certificate, Harvest, ServerLimits, best, certificate_json, load_certificate
from libra.lend.gate import Slo
from libra.lend.traffic.envelope import Envelope

MADE = Certificate(
    model="Qwen/Qwen3-8B",
    hardware="1 x H100",
    slo=Slo(0.5, 0.05),
    use=0.8,
    longest_grant=0.03,
    longest_step=0.035,
    envelope=Envelope(rate=5.0, queued=9000, live=60, context=90_000, window=60.0),
    harvest=(Harvest(1.0, 0.9), Harvest(3.0, 0.7)),
    traffic="made.csv",
    requests=1000,
    missed_alone=2,
)
LIMITED = replace(MADE, parameters=8_000, limits=ServerLimits(16384, 256, 1024))


def test_what_is_saved_is_loaded_equal(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(certificate_json(MADE))
    assert load_certificate(tmp_path / "c.json") == MADE


@pytest.mark.parametrize(("rate", "share"), [(0.0, 0.9), (1.0, 0.9), (1.1, 0.7), (3.0, 0.7), (3.1, 0.0)])
def test_between_two_rates_the_share_is_that_of_the_higher_one(rate: float, share: float) -> None:
    assert MADE.share_at(rate) == share


def test_the_best_lends_most_at_a_rate_and_slows_serving_least() -> None:
    lower = replace(MADE, use=0.6)
    beyond = replace(MADE, use=0.9, harvest=(Harvest(1.0, 0.8), Harvest(4.0, 0.5)))
    assert best([MADE, lower, beyond], 2.0) is lower
    assert best([MADE, lower, beyond], 4.0) is beyond


def test_one_from_before_limits_were_kept_is_loaded_and_says_nothing_of_them(tmp_path: Path) -> None:
    data = json.loads(certificate_json(LIMITED))
    del data["parameters"], data["limits"]
    (tmp_path / "c.json").write_text(json.dumps(data))
    loaded = load_certificate(tmp_path / "c.json")
    assert loaded == MADE
    assert loaded.other_limit(ServerLimits(1, 2, 3)) is None
    assert loaded.mismatch(MADE.model, MADE.hardware, MADE.slo, 5) is None


def test_two_models_of_one_name_are_told_apart() -> None:
    assert LIMITED.mismatch(MADE.model, MADE.hardware, MADE.slo) is None
    assert LIMITED.mismatch(MADE.model, MADE.hardware, MADE.slo, 8_000) is None
    said = "the certificate is for a Qwen/Qwen3-8B of 8,000 parameters, not of 7,999"
    assert LIMITED.mismatch(MADE.model, MADE.hardware, MADE.slo, 7_999) == said


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (ServerLimits(16384, 256, 1024), None),
        (ServerLimits(4096, 256, 1024), None),
        (ServerLimits(16385, 256, 1024), "max_model_len is 16385 at the server and 16384 in the certificate"),
        (ServerLimits(16384, 257, 1024), "max_num_seqs is 257 at the server and 256 in the certificate"),
        (ServerLimits(16384, 255, 1024), "start the server with --max-num-seqs 256, or certify the server with"),
        (ServerLimits(16384, 256, 1025), "start the server with --max-num-batched-tokens 1024, or certify"),
        (ServerLimits(16384, 256, 512), "max_num_batched_tokens is 512 at the server and 1024 in the certificate"),
    ],
)
def test_a_server_with_other_limits_is_not_what_was_certified(limits: ServerLimits, said: str | None) -> None:
    found = LIMITED.other_limit(limits)
    assert found is None if said is None else found is not None and said in found


@pytest.mark.parametrize(
    ("model", "hardware", "slo", "said"),
    [
        ("Qwen/Qwen3-8B", "1 x H100", Slo(0.5, 0.05), None),
        ("Qwen/Qwen3-8B", "1 x H100", Slo(0.9, 0.06), None),
        ("Qwen/Qwen3-4B", "1 x H100", Slo(0.5, 0.05), "is for Qwen/Qwen3-8B, not for Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-8B", "1 x A100", Slo(0.5, 0.05), "is for 1 x H100, not for 1 x A100"),
        ("Qwen/Qwen3-8B", "1 x H100", Slo(0.4, 0.05), "ttft is 0.4 s; the certificate is for 0.5 s"),
        ("Qwen/Qwen3-8B", "1 x H100", Slo(0.5, 0.04), "tpot is 0.04 s; the certificate is for 0.05 s"),
    ],
)
def test_of_what_it_says_nothing(model: str, hardware: str, slo: Slo, said: str | None) -> None:
    found = MADE.mismatch(model, hardware, slo)
    assert found is None if said is None else found is not None and said in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use": 0.0}, "use is 0"),
        ({"harvest": ()}, "harvest is empty"),
        ({"harvest": (Harvest(2.0, 0.5), Harvest(1.0, 0.6))}, "not in the order of rising rates"),
        ({"harvest": (Harvest(2.0, 1.5),)}, "a share outside 0 to 1"),
    ],
)
def test_what_is_no_certificate(change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(MADE, **change)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "c.json: file: Invalid JSON"),
        (certificate_json(MADE).replace('"use"', '"usage"'), "c.json: use: Field required"),
        (certificate_json(MADE).replace("0.8", "-0.8"), "use is -0.8"),
        (None, "c.json: No such file"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_certificate(tmp_path / "c.json")
