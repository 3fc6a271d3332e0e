"""Batch scripts and manifests: what they start, where, and that the router knows it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from random_plans import random_plan

from libra.export.gateway_file import gateway_file
from libra.export.serve_line import FIRST_PORT, TRANSFER, ServeLine
from libra.export.table import LAUNCHERS, launch_file, launched
from libra.serve.gateway.config import GatewayConfig


def line(host: str, gpu: int, port: int, bucket: int = 0, **flags: Any) -> ServeLine:
    given = {"tensor-parallel-size": 1, "max-model-len": 4096 * (1 + bucket), **flags}
    return ServeLine(host, [gpu], port, "org/model", given, bucket=bucket, up_to=4096 * (1 + bucket))


LINES = (
    *(line("a800-3", gpu, FIRST_PORT + gpu) for gpu in range(3)),
    line("a800-5", 0, FIRST_PORT),
    line("h20-0", 7, FIRST_PORT, bucket=1),
)

_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@")" >> "$SEEN"
"""


def carried_out(script: str, folder: Path, groups: dict[str, str]) -> tuple[list[dict[str, str]], Any]:
    """Runs the script with stand-ins for srun, scontrol and libra: options and command of each step, and the gateway's
    file."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in {
        "srun": _SRUN,
        "scontrol": '#!/usr/bin/env bash\ntr "," "\\n" <<< "$3"\n',
        "libra": "#!/usr/bin/env bash\nexit 0\n",
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    seen = folder / "seen"
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SEEN": str(seen), **groups}
    # The first process that ends would end the script: let it wait for all, to see them.
    text = script.replace("wait -n\n", "wait\n")
    subprocess.run(["bash", "-c", text], cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
    steps = []
    for words in map(json.loads, seen.read_text().splitlines()):
        options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
        steps.append({**options, "command": words[-1]})
    return steps, yaml.safe_load((folder / "gateway.yaml").read_text())


def test_a_batch_script_starts_each_engine_on_its_node(tmp_path: Path) -> None:
    script = launched(LINES, "cmlfq", "slurm")
    nodes = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n17,n18", "SLURM_JOB_NODELIST_HET_GROUP_1": "m2"}
    steps, gateway = carried_out(script, tmp_path, nodes)
    hosts = {"a800-3": ("n17", "0"), "a800-5": ("n18", "0"), "h20-0": ("m2", "1")}
    started = sorted((step["command"], step["--nodelist"], step["--het-group"]) for step in steps)
    assert started == sorted((it.command, *hosts[it.host]) for it in LINES)
    routed = GatewayConfig.model_validate(gateway)
    assert {(it.url, it.bucket) for it in routed.engines} == {
        (f"http://{hosts[it.host][0]}:{it.port}/v1", it.bucket) for it in LINES
    }
    assert script.count("#SBATCH hetjob") == 1
    assert "#SBATCH --nodes=2  # a800\n#SBATCH --gpus-per-node=3\n" in script


def test_engines_of_pairs_offer_kv_at_their_own_node(tmp_path: Path) -> None:
    paired = [line("a-0", 0, FIRST_PORT, **{"kv-transfer-config": TRANSFER})]
    steps, _ = carried_out(launched(paired, "cmlfq", "slurm"), tmp_path, {"SLURM_JOB_NODELIST": "n1"})
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=n1 " in shlex.join(shlex.split(steps[0]["command"]))
    [_, workload, *_] = yaml.safe_load_all(launched(paired, "cmlfq", "k8s"))
    environment = workload["spec"]["template"]["spec"]["containers"][0]["env"]
    assert environment[0]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_manifests_have_a_pod_for_each_engine_and_a_route_to_it() -> None:
    documents = list(yaml.safe_load_all(launched(LINES, "sticky", "k8s")))
    sets = [it for it in documents if it["kind"] == "StatefulSet"]
    assert [it["spec"]["replicas"] for it in sets] == [4, 1]
    services = {it["metadata"]["name"]: it for it in documents if it["kind"] == "Service"}
    pods = set()
    for it in sets:
        name, spec = it["spec"]["serviceName"], it["spec"]["template"]
        assert services[name]["spec"]["selector"] == spec["metadata"]["labels"]
        [container] = spec["spec"]["containers"]
        words = dict(pairwise(container["args"]))
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert (words["--model"], words["--tensor-parallel-size"]) == ("org/model", str(gpus))
        pods |= {f"http://{name}-{place}.{name}:{FIRST_PORT}/v1" for place in range(it["spec"]["replicas"])}
    [file] = (it["data"]["gateway.yaml"] for it in documents if it["kind"] == "ConfigMap")
    gateway = GatewayConfig.model_validate(yaml.safe_load(file))
    assert {it.url for it in gateway.engines} == pods
    assert gateway.route == "sticky" and gateway.limits == (4096, 8192)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_gpus_of_random_plans_add_up(launcher: str) -> None:
    seen = 0
    for seed in range(60):
        plan = random_plan(seed)
        if plan is None or plan.of_cluster.recipe.framework != "vllm":
            continue
        seen += 1
        made = launch_file(plan, launcher)
        if launcher == "slurm":
            gpus = sum(len(it.split(" ")[0].split(",")) for it in made.text.split("CUDA_VISIBLE_DEVICES=")[1:])
            subprocess.run(["bash", "-n"], input=made.text, text=True, check=True, timeout=60)
        else:
            sets = [it for it in yaml.safe_load_all(made.text) if it["kind"] == "StatefulSet"]
            limits = [it["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for it in sets]
            each = zip(sets, limits, strict=True)
            gpus = sum(it["spec"]["replicas"] * limit["nvidia.com/gpu"] for it, limit in each)
        assert gpus == made.split.rollout_gpus
    assert seen > 1


def test_what_cannot_be_launched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--launch: unknown launcher 'slrm'; did you mean slurm\?"):
        launched(LINES, "cmlfq", "slrm")
    unknown = ServeLine("a-0", [0], FIRST_PORT, "org/model", {})
    with pytest.raises(ValueError, match="max_model_len of a-0-8000 is missing: the router needs it"):
        gateway_file([unknown], "cmlfq")
