"""`libra plan`, `explain` and `simulate` of a cluster with a pool that serves and lends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.calls import EXAMPLES, assert_refused, libra, write
from click.testing import Result
from tables import by_name

from libra.plan.explain.what_if import assume, assume_otherwise
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.plan import Plan, parse_plan

FILES = ("cluster_lending.yaml", "chat_use_60.json", "chat_use_95.json", "chat.jsonl")
GIVEN = ("--model", "Qwen/Qwen3-14B", "-t", EXAMPLES / "search_agent.jsonl", "-r", EXAMPLES / "request.yaml")


def plan(cluster: Path, *arguments: object) -> Result:
    return libra("plan", cluster, *GIVEN, "-p", "roofline", "--no-simulation", *arguments)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The plan of the example, and what the command printed."""
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    return path, plan(EXAMPLES / "cluster_lending.yaml", "-o", path)


def copied(directory: Path, change: Callable[[dict[str, Any]], object] = lambda lends: None) -> Path:
    """The example with other terms."""
    for name in FILES:
        shutil.copy(EXAMPLES / name, directory)
    data = yaml.safe_load((directory / FILES[0]).read_text())
    change(data["serving"][0]["lends"])
    (directory / FILES[0]).write_text(yaml.safe_dump(data))
    return directory / FILES[0]


def test_a_plan_says_what_it_borrows_and_embeds_the_certificates(planned: tuple[Path, Result]) -> None:
    path, result = planned
    assert result.exit_code == 0, result.stderr
    for words in ("Loans", "chat", "engine times of chat"):
        assert words in " ".join(result.stdout.replace("│", " ").split())
    found = parse_plan(path.read_bytes())
    assert isinstance(found.request, ClusterRequest)
    assert str(EXAMPLES) not in path.read_text()
    assert [it.use for it in found.request.lenders[0].certificates] == [0.6, 0.95]
    assert found.loans
    assert all(loan.pool == "chat" and 0.8 < loan.share < 0.95 and loan.away == 0 for loan in found.loans)
    lent = [group for group in found.placement if group.pool == "chat"]
    assert len(lent) == sum(loan.engines for loan in found.loans) <= 16
    assert {group.role for group in lent} == {"generate"}


def test_an_explanation_says_what_the_loan_is_worth(planned: tuple[Path, Result], tmp_path: Path) -> None:
    path, _ = planned
    result = libra("explain", path, "--html", tmp_path / "p.html")
    assert result.exit_code == 0, result.stderr
    told = " ".join(result.stdout.split())
    assert "chat lends" in told and "shorter; with training as in the best plan without it, the loan would save" in told
    assert "one more node of chat, as busy as the others" in told and "no loan" in told
    page = (tmp_path / "p.html").read_text()
    assert "6 x 8 A800 + 2 x 8 H100 that serve" in page
    assert "Borrowed engines" in page and "chat lends" in page


def test_without_the_pool_the_step_is_what_the_explanation_says(planned: tuple[Path, Result]) -> None:
    path, _ = planned
    (view,) = json.loads(libra("explain", path, "--json").stdout)["lenders"]
    assert view["step"] < view["without"] and view["step"] <= view["kept"] <= view["without"]
    assert view["why_not"] == ""
    without = plan(EXAMPLES / "cluster_lending.yaml", "--what-if", "chat=0", "--json")
    found = parse_plan(without.stdout)
    assert found.loans == ()
    assert found.predicted.step == pytest.approx(view["without"], rel=1e-3)
    plans = parse_plan(path.read_bytes())
    assert isinstance(plans.request, ClusterRequest)
    again = assume_otherwise(plans, *assume(plans.request.cluster, plans.request.recipe, ["chat=0"]))
    assert again.predicted == found.predicted


def test_a_simulation_runs_lent_engines_at_their_share_and_says_so(planned: tuple[Path, Result]) -> None:
    path, _ = planned
    result = libra("simulate", path, "-t", EXAMPLES / "search_agent.jsonl", "--json")
    assert result.exit_code == 0, result.stderr
    assert "lent engines always have their share of the device" in result.stderr
    assert any(engine["name"].startswith("chat-") for engine in json.loads(result.stdout)["engines"])


def rates(*values: float) -> Callable[[dict[str, Any]], object]:
    return lambda lends: lends.update(forecast={"rates": list(values), "seconds": 300})


def replanned(directory: Path, change: Callable[[dict[str, Any]], object]) -> tuple[Plan, Path, Result]:
    result = plan(copied(directory, change), "-o", directory / "plan.json")
    assert result.exit_code == 0, result.stderr
    return parse_plan((directory / "plan.json").read_bytes()), directory / "plan.json", result


LENDER = ("--lender", EXAMPLES / "lender.yaml", "--traffic", EXAMPLES / "chat.jsonl")


def test_a_whole_run_has_the_traffic_of_its_lenders(planned: tuple[Path, Result], tmp_path: Path) -> None:
    run = ("rehearse", planned[0], "-t", EXAMPLES / "search_agent.jsonl", "--steps", 1, "--cold")
    shown = libra(*run, *LENDER, "-o", tmp_path / "run.json")
    assert shown.exit_code == 0, shown.stderr
    assert "serving and recalls are not simulated" not in shown.stdout and "chat-0/0" in shown.stdout
    found = json.loads((tmp_path / "run.json").read_text())
    borrowed = sum(loan.engines for loan in parse_plan(planned[0].read_bytes()).loans)
    assert len(found["lenders"]) == borrowed
    assert len({it["requests"] for it in found["lenders"]}) > 1  # each begins elsewhere in the traffic
    for it in found["lenders"]:
        assert 0 < it["lent"] < 1 and it["due_margin"] > 0 and it["inside_envelope"] == []
        assert it["tpot"] <= 0.95 * 0.1 and it["requests"] > 0.9 * 1.5 * found["seconds"]


def test_memory_of_a_lender_changes_hands_where_that_is_asked_for(planned: tuple[Path, Result], tmp_path: Path) -> None:
    """The serving engine keeps some of its device for the other's weights."""
    data = yaml.safe_load((EXAMPLES / "lender.yaml").read_text())
    data["engines"][0]["gpu_memory_utilization"] = 0.45
    lender = ("--lender", write(tmp_path / "lender.yaml", data), *LENDER[2:])
    run = ("rehearse", planned[0], "-t", EXAMPLES / "search_agent.jsonl", "--steps", 1, "--cold", *lender)
    trace = tmp_path / "trace.json"
    shown = libra(*run, "--kv-quota", "--timeline", trace)
    assert shown.exit_code == 0, shown.stderr
    assert "KV lent" in trace.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-quota",), ("--kv-quota needs --lender",)),
        (
            (*LENDER, "--kv-quota"),
            ("chat: the serving engine leaves", "lower its gpu_memory_utilization"),
        ),
        (LENDER[:2], ("--lender is given 1 times and --traffic 0 times", "give one --traffic for each")),
        (("--lender", EXAMPLES / "engines.yaml", *LENDER[2:]), ("engines has 2 entries", "a file with one")),
        (
            (*LENDER, *LENDER),
            ("2 files describe Qwen/Qwen3-8B on 1 x H100, the engine of pool chat", "give one"),
        ),
    ],
)
def test_lenders_that_do_not_fit_the_plan_are_refused(
    planned: tuple[Path, Result], arguments: tuple[object, ...], words: tuple[str, ...]
) -> None:
    run = ("rehearse", planned[0], "-t", EXAMPLES / "search_agent.jsonl", "--steps", 1, "--cold")
    assert_refused(libra(*run, *arguments), *words)


def test_traffic_that_cannot_go_round_is_refused(planned: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "burst.jsonl").write_text('{"arrival":0,"prompt_tokens":10,"output_tokens":5}\n' * 3)
    run = ("rehearse", planned[0], "-t", EXAMPLES / "search_agent.jsonl", "--steps", 1, *LENDER[:2], "--traffic")
    assert_refused(
        libra(*run, tmp_path / "burst.jsonl"), "burst.jsonl: all requests arrive at one time", "at two times or more"
    )
    assert_refused(libra(*run, tmp_path / "none.jsonl"), "--traffic: ", "No such file or directory; give a file of")


def test_a_lender_that_is_too_busy_is_said_to_lend_nothing(tmp_path: Path) -> None:
    found, path, result = replanned(tmp_path, rates(80))
    assert found.loans == ()
    told = " ".join(result.stdout.replace("│", " ").split())
    assert "5 requests/s or more are expected at an engine" in told
    explained = " ".join(libra("explain", path).stdout.split())
    assert (
        "chat lends nothing: chat/tp1@0.6: 5 requests/s or more are expected at an engine, and lending is" in explained
    )


def test_a_loan_that_may_be_recalled_is_told_with_its_average(tmp_path: Path) -> None:
    found, path, _ = replanned(tmp_path, rates(30, 32, 34, 36, 37, 38, 39, 40, 41, 80))
    assert found.loans and all(loan.away == pytest.approx(0.1) for loan in found.loans)
    explained = " ".join(libra("explain", path).stdout.split())
    assert "In 10.0 % of cases traffic takes the whole loan away" in explained
    (view,) = json.loads(libra("explain", path, "--json").stdout)["lenders"]
    assert view["average"] == pytest.approx(0.9 * view["step"] + 0.1 * view["recalled"])
    assert view["average"] < view["without"] < view["recalled"]


def test_a_loan_that_is_away_too_often_is_not_taken_and_why(tmp_path: Path) -> None:
    found, path, _ = replanned(tmp_path, rates(30, *(80,) * 15))
    assert found.loans == ()
    explained = " ".join(libra("explain", path).stdout.split())
    assert "s on average, as traffic may take them all away; without them it takes" in explained


def test_traffic_is_forecast_from_a_log(tmp_path: Path) -> None:
    def log(lends: dict[str, Any]) -> None:
        del lends["forecast"]
        lends["traffic"] = {"requests": "chat.jsonl", "bin": 8, "season": 80}

    found, _, _ = replanned(tmp_path, log)
    assert isinstance(found.request, ClusterRequest)
    (lender,) = found.request.lenders
    assert lender.period == 8 and len(lender.rates) == 9
    assert 0.5 < sum(lender.rates) * 16 / 9 < 3  # of all engines; the log has 1.5 a second


def other(**keys: object) -> Callable[[dict[str, Any]], object]:
    return lambda lends: lends.update(keys)


def traffic(**keys: object) -> Callable[[dict[str, Any]], object]:
    def change(lends: dict[str, Any]) -> None:
        del lends["forecast"]
        lends["traffic"] = {"requests": "chat.jsonl", "bin": 8, "season": 80, **keys}

    return change


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("another model", other(model="Qwen/Qwen3-14B"), "the certificate is for Qwen/Qwen3-8B, not for Qwen/Qwen3-14B"),
    ("unknown model", other(model="Qwen/Qwen9"), "lends.model: 'Qwen/Qwen9': no such file or known model"),
    ("a stricter SLO", other(tpot=0.05), "tpot is 0.05 s; the certificate is for 0.1 s: certify this pool with"),
    ("other engines", other(tensor_parallel_size=2), "the certificate is for 1 x H100, not for 2 x H100"),
    ("no such certificate", other(certificates=["none.json"]), "lends.certificates: "),
    ("no certificate", other(certificates=["chat.jsonl"]), "give a certificate that `libra lend check` has written"),
    ("one use twice", other(certificates=["chat_use_60.json"] * 2), "certificates: two have use 0.6"),
    ("no such log", traffic(requests="none.jsonl"), "none.jsonl: No such file or directory; give a file of requests"),
    ("a short log", traffic(bin=40, season=80), "the log has 5 whole bins of 40 s; a forecast needs 21: give a longer"),
]  # fmt: skip


@by_name("change, message", REFUSED)
def test_terms_that_do_not_hold_are_refused_by_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    assert_refused(plan(copied(tmp_path, change)), "serving.0.lends.", message)


def test_a_pool_without_terms_is_said_to_lend_nothing() -> None:
    result = plan(EXAMPLES / "cluster_mixed.yaml", "--what-if", "h100=1", "--what-if", "a800=1")
    assert "chat serves users and lends no GPUs, since it has no key `lends`" in " ".join(result.stdout.split())
