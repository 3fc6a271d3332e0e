"""The file of a loan whose certificate allows whatever a small server may be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from libra.lend.certificate import Certificate, Harvest, certificate_json
from libra.lend.gate import Slo
from libra.traffic.envelope import Envelope


def write_loan(directory: Path, served: str, rollout: dict[str, Any], **more: str) -> Path:
    """With its certificate. `served` is the model in `directory` that users are served."""
    certificate = Certificate(
        model=served,
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
    (directory / "certificate.json").write_text(certificate_json(certificate))
    loan = {
        "device": str(directory / "device"),
        "certificate": "certificate.json",
        "serving": {"model": str(directory / served), "hardware": "1 x core", "ttft": 10, "tpot": 20},
        "rollout": {"dtype": "float32", **rollout},
        "quiet": 0.2,
        **more,
    }
    (directory / "loan.yaml").write_text(yaml.safe_dump(loan))
    return directory / "loan.yaml"
