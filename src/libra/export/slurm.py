"""Engine lines as a batch script of Slurm: a step for each engine, and `libra route` in front of them.

Directives: Slurm 23.11, `sbatch` and `srun`; nodes of several classes are components of a heterogeneous job.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import yaml

from libra.export.gateway_file import gateway_file
from libra.export.serve_line import ServeLine

_STEPS = """\
# An engine is a step on its node; if an engine ends, the job ends.
run() { srun --overlap --het-group="${group[$1]}" --nodes=1 --ntasks=1 --nodelist="${host[$1]}" bash -c "$2" & }
"""
_PLAIN = _STEPS.replace(' --het-group="${group[$1]}"', "")


def batch_script(lines: Sequence[ServeLine], router: str) -> str:
    """The text of the batch script. The user adds the partition, the account and the time limit. Raises ValueError like
    `gateway_file`.
    """
    classes = list(dict.fromkeys(_class(it) for it in lines))
    hosts = {name: list(dict.fromkeys(it.host for it in lines if _class(it) == name)) for name in classes}
    several = len(classes) > 1
    directives = []
    for name in classes:
        gpus = max(gpu for it in lines if _class(it) == name for gpu in it.gpus) + 1
        directives.append(
            f"#SBATCH --nodes={len(hosts[name])}  # {name}\n#SBATCH --gpus-per-node={gpus}\n"
            "#SBATCH --ntasks-per-node=1\n#SBATCH --exclusive\n"
        )
    text = "#!/usr/bin/env bash\n#SBATCH --job-name=engines\n" + "#SBATCH hetjob\n".join(directives)
    text += "set -euo pipefail\ndeclare -A host group\n"
    for number, name in enumerate(classes):
        variable = f"SLURM_JOB_NODELIST_HET_GROUP_{number}" if several else "SLURM_JOB_NODELIST"
        text += f'mapfile -t nodes < <(scontrol show hostnames "${variable}")\n'
        for place, host in enumerate(hosts[name]):
            text += f"host[{host}]=${{nodes[{place}]}} group[{host}]={number}\n"
    text += _STEPS if several else _PLAIN
    for line in lines:
        command = shlex.quote(line.command).replace(f"HOST={line.host}", f"HOST='\"${{host[{line.host}]}}\"'")
        text += f"run {line.host} {command}\n"
    file = gateway_file(lines, router, lambda it: f"http://${{host[{it.host}]}}:{it.port}")
    document = yaml.safe_dump(file, sort_keys=False, width=1_000)
    text += f"cat > gateway.yaml <<END\n{document}END\n"
    return text + "libra route gateway.yaml &  # on 127.0.0.1; for other hosts see its --help\nwait -n\n"


def _class(line: ServeLine) -> str:
    """The class of nodes: hosts are its name and a number."""
    return line.host.rpartition("-")[0]
