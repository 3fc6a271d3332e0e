"""The file of a loan of a small server, with a certificate for which nothing was replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from libra.lend.certificate import Certificate, Harvest, certificate_json
from libra.lend.gate import Slo
from libra.lend.traffic.envelope import Envelope

ROOMY = Certificate(  # any load of a small server is inside
    model="chat",
    hardware="1 x core",
    slo=Slo(10.0, 20.0),
    use=0.5,
    longest_grant=0.05,
    longest_step=1.0,
    envelope=Envelope(rate=1000.0, queued=10_000, live=64, context=10_000, window=10.0),
    harvest=(Harvest(1.0, 0.5),),
    traffic="none",
    requests=1,
    missed_alone=0,
)


def write_loan(file: Path, certificate: Certificate, served: Path, rollout: dict[str, Any], **more: Any) -> Path:
    """Write the file of a loan for a server of the model in the directory `served`. `more` are other keys of the file.
    The model's certificate is written next to the file."""
    (file.parent / "certificate.json").write_text(certificate_json(replace(certificate, model=served.name)))
    slo = certificate.slo
    loan = {
        "certificate": "certificate.json",
        "serving": {"model": str(served), "hardware": certificate.hardware, "ttft": slo.ttft, "tpot": slo.tpot},
        "rollout": {"dtype": "float32", **rollout},
        **more,
    }
    file.write_text(yaml.safe_dump(loan))
    return file
