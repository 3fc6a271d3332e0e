"""Files that list engines: read, or refused in a line that names the key."""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest
import yaml

from libra.config.yaml_file import ConfigError
from libra.serve.gateway.config import UpstreamSection, load_gateway

EXAMPLE = Path(__file__).parents[3] / "examples" / "gateway.yaml"


def test_the_example_is_read() -> None:
    file = load_gateway(EXAMPLE)
    assert [engine.name for engine in file.engines] == ["a100-0", "a100-1"]
    assert file.engines[0].url == "http://127.0.0.1:8000/engines/a100-0/v1"
    assert file.limits == (4096, 16384) and file.route == "cmlfq"


def engine(**more: Any) -> dict[str, Any]:
    return {"name": "a", "url": "http://127.0.0.1:1/v1/", "max_model_len": 100, **more}


def test_what_is_left_out_has_a_value(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"engines": [engine(), engine(name="b", max_model_len=200)]}), encoding="utf-8")
    file = load_gateway(path)
    assert file.limits is None and not file.priorities
    assert file.engines[0].url == "http://127.0.0.1:1/v1" and file.engines[0].health == "http://127.0.0.1:1/health"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "engines"),
        ({"engines": []}, "engines: give 1 or more, or workers_from"),
        ({"engines": [engine(url="ftp://a")]}, "engines.0.url: must begin with http:// or https://"),
        ({"engines": [engine(url="http:///v1")]}, "engines.0.url: names no host"),
        ({"engines": [engine(url="http://a:b/v1")]}, "engines.0.url: Port could not be cast"),
        (
            {"engines": [engine(url="http://a/engines/b")]},
            "engines.0.url: ends with /engines/b; give the address up to",
        ),
        ({"engines": [engine(url="http://a/v1?b=c")]}, "engines.0.url: is more than an address"),
        ({"engines": [engine(max_model_len=0)]}, "engines.0.max_model_len"),
        ({"engines": [engine(), engine()]}, "engines: a occurs twice; name each once"),
        ({"engines": [engine(bucket=1)]}, "engines.0.bucket is 1, but limits names 1 bucket"),
        ({"engines": [engine()], "limits": [9, 9]}, "limits is [9, 9]; list rising numbers of tokens"),
        ({"engines": [engine()], "route": "best"}, "route: policy is 'best'; choose one of"),
        ({"engines": [engine()], "sticky": False}, "route: cmlfq follows prefixes"),
        ({"engines": [engine()], "wait_seconds": 0}, "wait_seconds"),
        ({"engines": [engine()], "engine_timeout_seconds": 0}, "engine_timeout_seconds"),
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


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_an_address_is_that_of_the_server_or_of_its_api(url: str) -> None:
    section = UpstreamSection(**engine(url=url))
    assert (section.url, section.health) == ("http://a:1/v1", "http://a:1/health")


# Secrets

SECRET = "s3cr3t-t0ken"


def loaded(folder: Path, text: str) -> UpstreamSection:
    path = folder / "gateway.yaml"
    path.write_text(text, encoding="utf-8")
    return load_gateway(path).engines[0]


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"api_key": SECRET}, f"Bearer {SECRET}"),
        ({"api_key_env": "ENGINE_TOKEN"}, f"Bearer {SECRET}"),
        ({"api_key_file": "token"}, f"Bearer {SECRET}"),
        ({"basic_auth": f"me:{SECRET}"}, f"Basic {b64encode(f'me:{SECRET}'.encode()).decode()}"),
        ({"url": f"http://me:{SECRET}@a:1/v1"}, f"Basic {b64encode(f'me:{SECRET}'.encode()).decode()}"),
        ({"url": f"http://me:%40{SECRET}@a:1/v1"}, f"Basic {b64encode(f'me:@{SECRET}'.encode()).decode()}"),
        ({}, None),
    ],
)
def test_an_engine_is_told_its_secret_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], sent: str | None
) -> None:
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)
    (tmp_path / "token").write_text(f"{SECRET}\n", encoding="utf-8")
    section = loaded(tmp_path, yaml.safe_dump({"engines": [engine(**more)]}))
    assert section.authorization() == sent
    assert SECRET not in f"{section!r} {section} {section.model_dump_json()}" and "@" not in section.url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"engines": [engine(api_key=[SECRET])]}, "engines.0.api_key: Input should be a valid string"),
        (
            {"engines": [engine(api_key=f"{SECRET}\nX-Other: 1")]},
            "engines.0.api_key: must be one line of printable ASCII",
        ),
        ({"engines": [engine(api_key="")]}, "engines.0.api_key: must be one line of printable ASCII"),
        ({"engines": [engine(api_keys=SECRET)]}, "engines.0.api_keys: unknown key 'api_keys'; did you mean api_key?"),
        (
            {"engines": [engine(api_key=SECRET, api_key_env="A")]},
            "engines.0: api_key and api_key_env are given; one is",
        ),
        ({"engines": [engine(basic_auth=SECRET)]}, "engines.0: basic_auth is not user:password"),
        ({"engines": [engine(api_key_env=SECRET)]}, "engines.0.api_key_env: the variable is not set"),
        ({"engines": [engine(api_key_file=SECRET)]}, "engines.0.api_key_file: the file cannot be read"),
        (
            {"engines": [engine(api_key_file="fifo")]},
            "engines.0.api_key_file: the file cannot be read, or is not a regular",
        ),
        ({"engines": [engine(api_key_file="/dev/zero")]}, "engines.0.api_key_file: the file cannot be read, or is no"),
        ({"engines": [engine(api_key_file="odd")]}, "engines.0.api_key_file: its token must be one line"),
        ({"engines": [engine(url=f"ftp://me:{SECRET}@a/v1")]}, "engines.0.url: must begin with http:// or https://"),
        ({"engines": [engine(url=f"http://me:{SECRET}/2@a/v1")]}, "engines.0.url: has an @"),
        ({"engines": [engine(url=f"me:{SECRET}@a/v1")]}, "engines.0.url: has an @"),
        ({"engines": [f"http://me:{SECRET}@a/v1"]}, "engines.0: expected a mapping of keys"),
        ({"engines": engine(api_key=SECRET)}, "engines: expected a list"),
        (f"engines: [{{api_key: {SECRET}, url: ]}}", "not YAML: see line 1, column "),
    ],
)
def test_no_message_shows_a_secret(tmp_path: Path, text: Any, says: str) -> None:
    (tmp_path / "odd").write_bytes(b"\xff" + SECRET.encode())
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text if isinstance(text, str) else yaml.safe_dump(text))
    assert says in str(error.value) and SECRET not in "".join(format_exception(error.value))
