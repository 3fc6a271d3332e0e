"""`libra search`: the answer on standard output and in files, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from calls import EXAMPLES, libra

QUESTION = [
    "search",
    str(EXAMPLES / "cluster_mixed.yaml"),
    *("--model", "Qwen/Qwen3-8B"),
    *("--requests", str(EXAMPLES / "serving.jsonl")),
    *("--profile", "roofline"),
    *("--jobs", "1"),
]
SMALL = "architectures: [colocated]\nnodes: [h100, l40s]\ntensor_parallel_size: [1]\nmax_num_seqs: [64]\n"


@pytest.fixture
def menu(tmp_path: Path) -> str:
    path = tmp_path / "menu.yaml"
    path.write_text(SMALL + "max_num_batched_tokens: [2048]\nengines: [1, 2]\n")
    return str(path)


def test_the_answer_is_shown_and_written(menu: str, tmp_path: Path) -> None:
    written, page = tmp_path / "answer.json", tmp_path / "answer.html"
    result = libra(
        *QUESTION, "--slo", "ttft_p99=0.3,tpot_p99=0.02", "--menu", menu, "--rate", 2, "-o", written, "--report", page
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("1 engine of tp1 on 1 H100 serves 2 requests/s: 2 per GPU; nothing with fewer")
    document = json.loads(written.read_text())
    assert document["proven"]
    assert [it["gpus"] for it in document["pareto"]] == [1, 2]
    for point in document["pareto"]:
        assert [it["name"] for it in point["checks"]] == ["longer prompts", "longer answers", "the record"]
        assert point["margin"] == 1 - max(max(it["shares"].values()) for it in point["checks"]) > 0
    assert {it["by"] for it in document["rejected"]} <= {"bound", "simulation", "dominated"}
    html = page.read_text()
    assert "Pareto set" in html
    assert "longer prompts)" in html and "Margin: " in result.stdout
    assert "Each at the given rate. " in html
    assert "1 tp1" in html and "2 tp1" in html  # labels of dots
    assert html.count("<circle") + html.count("<path") > 0
    assert "Rejected deployments" in html


def test_prices_are_what_goodput_is_told_for(menu: str) -> None:
    priced = Path(menu)
    priced.write_text(priced.read_text() + "cost_per_hour: {h100: 2.5, l40s: 1}\n")
    result = libra(*QUESTION, "--slo", "ttft_p99=1", "--menu", priced, "--rate", 2)
    assert result.stdout.startswith("1 engine of tp1 on 1 L40S serves 2 requests/s: 2 per cost/h; ")


def test_the_engines_of_each_point_are_written(menu: str, tmp_path: Path) -> None:
    written, page, folder = tmp_path / "answer.json", tmp_path / "answer.html", tmp_path / "engines"
    asked = (*QUESTION, "--slo", "ttft_p99=0.3,tpot_p99=0.02", "--menu", menu, "--rate", 2, "--engines-out", folder)
    result = libra(*asked, "-o", written, "--report", page)
    assert result.exit_code == 0, result.output
    points = json.loads(written.read_text())["pareto"]
    assert sorted(it.name for it in folder.iterdir()) == ["point-1.yaml", "point-2.yaml"] and len(points) == 2
    again = f"The points' engines are in {folder}/point-1.yaml to point-2.yaml; simulate the best by: libra simulate "
    assert again in result.stdout
    assert f"{folder}/point-2.yaml" in page.read_text()
    for number, point in enumerate(points, start=1):
        command = (folder / f"point-{number}.yaml").read_text().splitlines()[3]
        said = shlex.split(command.removeprefix("#   libra "))
        simulated = libra(*said, "--json")
        assert simulated.exit_code == 0, simulated.output
        metrics = json.loads(simulated.stdout)["metrics"]
        assert (metrics["ttft"]["p99"], metrics["tpot"]["p99"]) == (point["ttft"], point["tpot"])
    for options, said in (
        ((), "engines/point-1.yaml: exists already; give another directory, or remove the file"),
        (("--engines-out", menu), "menu.yaml: is not a directory"),
        (("--engines-out", f"{menu}/engines"), "menu.yaml cannot be written to; give another directory"),
        (("--plan", "--engines-out", tmp_path / "new"), "--engines-out does not apply to --plan"),
    ):
        refused = libra(*asked, *options)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert said in refused.stderr


def test_tiers_are_named_everywhere(tmp_path: Path) -> None:
    requests, menu = tmp_path / "turns.jsonl", tmp_path / "menu.yaml"
    turns = (
        {"arrival": 9.0 * turn + session, "prompt_tokens": 800 * turn, "output_tokens": 8, "prefix": f"{session}"}
        for turn in range(1, 5)
        for session in range(9)
    )
    requests.write_text("".join(json.dumps({**it, "prefix_tokens": it["prompt_tokens"]}) + "\n" for it in turns))
    kept = {"name": "host", "gib": 8, "bandwidth": 25e9, "latency": 1e-4}
    menu.write_text(json.dumps({"nodes": ["l40s"], "tensor_parallel_size": [1], "engines": [1], "kv_tiers": [[kept]]}))
    written, page, folder = tmp_path / "answer.json", tmp_path / "answer.html", tmp_path / "engines"
    asked = (*QUESTION[:4], "--requests", requests, "--profile", "roofline", "--menu", menu, "--slo", "ttft_p99=1")
    result = libra(*asked, "--jobs", 1, "-o", written, "--report", page, "--engines-out", folder)
    assert result.exit_code == 0, result.output
    named = "+ 8 GiB host at 25 GB/s latency 0.0001"
    shown = " ".join(result.stdout.replace("│", " ").split())  # a table folds it
    assert named in shown and named in page.read_text()
    for number, point in enumerate(json.loads(written.read_text())["pareto"], start=1):
        tiers = {it["role"]: it["shape"]["kv_tiers"] for it in point["candidate"]["pools"]}
        tier = {**kept, "policy": "lru", "blocks_per_chunk": 1, "offload_prompt_only": True, "shared": False}
        assert tiers.pop("decode", []) == [] and list(tiers.values()) == [[tier]]
        text = (folder / f"point-{number}.yaml").read_text()
        assert named in text
        simulated = libra(*shlex.split(text.splitlines()[3].removeprefix("#   libra ")), "--json")
        assert simulated.exit_code == 0, simulated.output
        result = json.loads(simulated.stdout)
        assert result["metrics"]["ttft"]["p99"] == point["ttft"]
        assert result["kv_tiers"][0]["name"] == "host"


def test_the_same_question_gives_the_same_bytes(menu: str) -> None:
    asked = (*QUESTION, "--slo", "ttft_p90=0.5", "--menu", menu, "--gpus", 2, "--json")
    first, again = libra(*asked), libra(*asked)
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout
    assert json.loads(first.stdout)["candidates"] == 2


def test_one_of_a_kind_is_told_as_one(menu: str) -> None:
    Path(menu).write_text(Path(menu).read_text().replace("[h100, l40s]", "[h100]").replace("[1, 2]", "[1]"))
    result = libra(*QUESTION, "--slo", "ttft_p90=0.5", "--menu", menu, "--rate", 1)
    assert result.stdout.startswith("1 engine of tp1 on 1 H100 serves 1 request/s: ")
    assert (
        "\n1 candidate: 0 ruled out by the bound (0.0 %), 3 simulations of 300 requests; 1 point on the"
        in result.stdout
    )


def test_a_caution_stands_in_terminal_page_and_answer(menu: str, tmp_path: Path) -> None:
    """A fifth of a second of requests that may wait a second."""
    few, written, page = tmp_path / "few.jsonl", tmp_path / "answer.json", tmp_path / "answer.html"
    few.write_text("".join(f'{{"arrival": {at}, "prompt_tokens": 9, "output_tokens": 2}}\n' for at in range(3)))
    asked = (*QUESTION[:4], "--requests", few, *QUESTION[6:], "--slo", "ttft_p99=1", "--menu", menu, "--rate", 15)
    result = libra(*asked, "-o", written, "--report", page)
    assert result.exit_code == 0, result.output
    caution = json.loads(written.read_text())["caution"]
    assert caution.endswith("give 480 requests or more")
    assert "ttft_p99 of 3 requests is that of the slowest" in caution
    assert result.stdout.startswith(f"note: {caution}\n1 engine ")  # before any figure
    assert caution in page.read_text()


def test_requests_that_are_too_few_to_tell_a_rate_are_status_3(menu: str, tmp_path: Path) -> None:
    few, written, page = tmp_path / "few.jsonl", tmp_path / "answer.json", tmp_path / "answer.html"
    few.write_text("".join(f'{{"arrival": {at}, "prompt_tokens": 1, "output_tokens": 1}}\n' for at in range(3)))
    Path(menu).write_text(Path(menu).read_text().replace("[h100, l40s]", "[h100]").replace("[1, 2]", "[1]"))
    asked = (*QUESTION[:4], "--requests", few, *QUESTION[6:], "--slo", "ttft_p99=600s", "--menu", menu)
    result = libra(*asked, "-o", written, "--report", page, "--engines-out", tmp_path / "engines")
    assert result.exit_code == 3, result.output
    assert result.stderr.splitlines()[-1].startswith(  # a slow machine shows progress before
        "libra: no rate can be given: at 131,072 requests/s the 20,001 requests come within"
    )
    assert result.stdout.startswith("No rate can be given: ") and "No rate can be given: " in page.read_text()
    assert not (tmp_path / "engines").exists()
    assert "rate" not in json.loads(written.read_text())["pareto"][0]


def test_nothing_that_serves_is_status_3(menu: str) -> None:
    result = libra(*QUESTION, "--slo", "ttft_p99=1", "--menu", menu, "--gpus", 1, "--rate", 1000)
    assert result.exit_code == 3
    assert result.stderr.startswith("libra: nothing found: nothing on the menu can (bound); lower --rate, or raise a ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "Qwen/Qwen2.5-72B", "--rate", 2), "nothing on the menu can (bound); 1 x h100 tp1 "),
        (("--model", "Qwen/Qwen2.5-72B", "--rate", 2, "--plan"), "nothing on the menu serves any rate: 1 x h100 tp1 "),
    ],
)
def test_a_model_that_no_engine_holds_is_not_blamed_on_the_rate(
    options: tuple[object, ...], said: str, menu: str
) -> None:
    Path(menu).write_text(Path(menu).read_text().replace("[h100, l40s]", "[h100]"))
    result = libra(*QUESTION, *options, "--slo", "ttft_p99=1", "--menu", menu)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1), result.output
    assert said in result.stderr
    assert "memory leaves KV for " in result.stderr and "; add larger engines" in result.stderr
    assert "rate, or" not in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--slo", "tpot_p99=0.05"), "add an objective for ttft or latency"),
        (("--slo", "ttft_p99=1", "--budget", 10), "a GPU an hour as cost_per_hour of the menu"),
        (("--slo", "ttft_p99=1e-6"), "nothing on the menu is faster than"),
        (
            ("--slo", "ttft_p99=1e-6", "--plan", "--rate", 2),
            "ttft_p99 is 1e-06 s; without any queue nothing on the menu is",
        ),
        (("--slo", "ttft_p99=1", "--gpus", 0), "--gpus is 0; give 1 to 96"),
        (("--slo", "ttft_p99=1", "--menu", EXAMPLES / "engines.yaml"), "engines.yaml: "),
        (
            ("--slo", "ttft_p99=1", "--rate", "1e-9"),
            "--rate is 1e-09: the last of 300 requests would arrive after 106 days",
        ),
        (("--slo", "ttft_p99=1", "--profile", "none.json"), "--profile none.json: No such file or directory; cali"),
        (("--slo", "ttft_p99=1", "--host", "none.json"), "--host none.json: No such file or directory; fit the engine"),
        (("--slo", "ttft_p99=1", "--host", EXAMPLES), f"--host {EXAMPLES}: Is a directory; fit the engine again"),
    ],
)
def test_what_cannot_be_asked_is_status_2(options: tuple[object, ...], said: str, menu: str) -> None:
    result = libra(*QUESTION, *(options if "--menu" in options else (*options, "--menu", menu)))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            "cost_per_hour: {h100: 2, l40s: 1, a800: 1}",
            "cost_per_hour of the menu prices a800, which is not in its nodes",
        ),
        ("cost_per_hour: {h100: 2}", "l40s has no price"),
        ("cost_per_hour: {h100: 2, l40s: 1, b200: 9}", "cost_per_hour of the menu: unknown class of nodes 'b200'"),
        ("cost_per_hour: {h100: true, l40s: 1}", "cost_per_hour: expected a number, not true or false"),
        (
            "cost_per_hour: {h100: 1e308, l40s: 1}",
            "cost_per_hour.h100: Input should be less than or equal to 1000000000",
        ),
        ("afd: 3", "afd: expected a mapping of keys (got 3)"),
        (
            "afd: {ffn: [8]}",
            "menu.yaml: afd is given, but architectures lacks attention-ffn: add attention-ffn, or leave afd out",
        ),
        (
            "max_num_batched_tokens: [1000000000]",
            "max_num_batched_tokens 1000000000 of the menu: Qwen/Qwen3-8B has eng",
        ),
        (
            "kv_tiers: [[{name: host, gib: 1e-3, bandwidth: 1e9}]]",
            "kv_tiers.0.0.gib is 0.001: host has room for 0 tokens",
        ),
        ("kv_tiers: [null, [{nam: host}]]", "kv_tiers.1.0.nam: unknown key 'nam'; did you mean name?"),
    ],
)
def test_a_menu_that_cannot_be_is_status_2(keys: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "menu.yaml"
    path.write_text(SMALL + keys + "\n")
    result = libra(*QUESTION, "--slo", "ttft_p99=1", "--menu", path)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_plan_mixes_and_passes_its_own_simulation(menu: str) -> None:
    asked = (*QUESTION, "--slo", "ttft_p99=1,tpot_p99=0.05", "--menu", menu, "--plan")
    result = libra(*asked, "--rate", 100)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("100 requests/s on ")
    assert "the least for what single engines serve (proven by CP-SAT)" in result.stdout
    assert "Simulated: ttft_p99 " in result.stdout
    refused = libra(*asked)
    assert (refused.exit_code, refused.stderr) == (
        2,
        "libra: --rate is missing: give the rate of requests to plan for\n",
    )
    for rate, shown in ((1000, "1000"), (1e300, "1e+300")):
        impossible = libra(*asked, "--rate", rate, "--gpus", 1)
        assert impossible.exit_code == 3
        assert f"{shown} requests/s need more than the cluster or the limits allow" in impossible.stderr


def test_a_plan_without_the_money_for_one_engine_is_refused_before_any_is_asked(menu: str) -> None:
    priced = Path(menu)
    priced.write_text(priced.read_text() + "cost_per_hour: {h100: 2.5, l40s: 1}\n")
    result = libra(*QUESTION, "--slo", "ttft_p99=1", "--menu", menu, "--rate", 20, "--plan", "--budget", 0.9)
    assert result.exit_code == 3
    assert "no engine of the menu fits: 1 x l40s tp1 " in result.stderr
    assert "costs 1 an hour, of 0.9; raise gpus or budget" in result.stderr
    assert "single engines simulated" not in result.stderr


def test_a_menu_with_more_shapes_than_can_be_looked_at_is_refused_at_once(tmp_path: Path) -> None:
    menu = tmp_path / "menu.yaml"
    keys = {"max_num_seqs": list(range(1, 400)), "max_num_batched_tokens": list(range(2048, 2400))}
    menu.write_text(json.dumps(keys), encoding="utf-8")
    result = libra(*QUESTION, "--slo", "ttft_p99=1", "--menu", menu, "--rate", 20, "--gpus", 8)
    assert result.exit_code == 2
    assert "the menu has more than 2,000 engine settings: list fewer" in result.stderr


@pytest.mark.parametrize("plan", [(), ("--plan",)])
def test_a_name_cannot_drive_the_terminal(plan: tuple[str, ...], tmp_path: Path) -> None:
    cluster, menu = tmp_path / "cluster.yaml", tmp_path / "menu.yaml"
    node = {"name": "[red]h\x1b[2J", "count": 1, "gpus": 8, "gpu": "H100", "inter_bandwidth": "400 Gb/s"}
    cluster.write_text(json.dumps({"nodes": [node]}))
    menu.write_text("architectures: [colocated]\ntensor_parallel_size: [1]\nmax_num_seqs: [64]\nengines: [1, 2]\n")
    asked = ("search", cluster, *QUESTION[2:], "--slo", "ttft_p99=1", "--rate", 2, "--menu", menu)
    result = libra(*asked, *plan)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(r"[red]h\x1b[2J") >= 1 + (not plan)
    assert "\x1b[2J" not in result.output
