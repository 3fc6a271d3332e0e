"""Files that list engines: read, or refused in a line that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from libra.config.yaml_file import ConfigError
from libra.serve.gateway.gateway_file import load_gateway

EXAMPLE = Path(__file__).parents[3] / "examples" / "gateway.yaml"


def test_the_example_is_read() -> None:
    file = load_gateway(EXAMPLE)
    assert [engine.name for engine in file.engines] == ["a100-0", "a100-1"]
    assert file.engines[0].url == "http://127.0.0.1:8000/engines/a100-0/v1"
    assert file.bucket_limits == (4096, 16384) and file.route == "cmlfq"


def engine(**more: Any) -> dict[str, Any]:
    return {"name": "a", "url": "http://127.0.0.1:1/v1/", "max_model_len": 100, **more}


def test_what_is_left_out_has_a_value(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"engines": [engine(), engine(name="b", max_model_len=200)]}), encoding="utf-8")
    file = load_gateway(path)
    assert file.bucket_limits == (200,) and not file.priorities
    assert file.engines[0].url == "http://127.0.0.1:1/v1" and file.engines[0].health == "http://127.0.0.1:1/health"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "engines"),
        ({"engines": []}, "engines"),
        ({"engines": [engine(url="ftp://a")]}, "engines.0.url: must begin with http:// or https://"),
        ({"engines": [engine(max_model_len=0)]}, "engines.0.max_model_len"),
        ({"engines": [engine(), engine()]}, "engines: a is there twice; name each once"),
        ({"engines": [engine(bucket=1)]}, "engines.0.bucket is 1, but limits name 1"),
        ({"engines": [engine()], "limits": [9, 9]}, "limits is [9, 9]; list numbers of tokens that rise"),
        ({"engines": [engine()], "route": "best"}, "route: policy is 'best'; choose one of"),
        ({"engines": [engine()], "sticky": False}, "route: cmlfq follows prefixes"),
        ({"engines": [engine()], "wait_seconds": 0}, "wait_seconds"),
        ({"engines": [engine()], "turn_token": 1}, "turn_token"),
    ],
)
def test_what_cannot_start_is_refused(tmp_path: Path, content: dict[str, Any], says: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_gateway(path)
    text = str(error.value)
    assert says in text and str(path) in text and "\n" not in text
