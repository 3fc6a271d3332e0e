"""Engine lines as objects of Kubernetes: a StatefulSet for equal engines, and `libra route` in front of them.

Fields: Kubernetes 1.31, `apps/v1` and `v1`. An engine is a pod, which gets its GPUs from the device plug-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import yaml

from libra.export.gateway_file import gateway_file
from libra.export.serve_line import FIRST_PORT, SIDE_CHANNEL, ServeLine

_IMAGE = "vllm/vllm-openai:v0.32.0"
_ROUTER = "libra"  # an image that the project's Dockerfile builds
_ROUTER_PORT = 9000


def manifests(lines: Sequence[ServeLine], router: str) -> str:
    """YAML documents. The user adds the model's volume, node selectors and the router's token. Raises ValueError like
    `gateway_file`.
    """
    urls: dict[str, str] = {}
    documents: list[dict[str, object]] = []
    for number, its in enumerate(_equal(lines)):
        name = f"engines-{number}"
        documents += _engines(name, its)
        urls |= {line.name: f"http://{name}-{place}.{name}:{FIRST_PORT}" for place, line in enumerate(its)}
    file = gateway_file(lines, router, lambda it: urls[it.name])
    documents += _route(yaml.safe_dump(file, sort_keys=False))
    return "---\n".join(yaml.safe_dump(it, sort_keys=False) for it in documents)


def _equal(lines: Sequence[ServeLine]) -> Iterator[list[ServeLine]]:
    """Groups of adjacent lines that differ only in host and GPUs."""
    for _, its in groupby(lines, lambda it: (it.model, it.arguments, it.bucket, len(it.gpus), dict(it.environment))):
        yield list(its)


def _engines(name: str, lines: Sequence[ServeLine]) -> Iterator[dict[str, object]]:
    first, labels = lines[0], {"app": name}
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": FIRST_PORT}]},
    }
    environment: list[dict[str, object]] = [{"name": key, "value": value} for key, value in first.environment.items()]
    if first.paired:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        environment += [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL)},
        ]
    container = {
        "name": "vllm",
        "image": _IMAGE,
        "args": ["--model", first.model, *first.arguments, "--port", str(FIRST_PORT)],
        **({"env": environment} if environment else {}),
        "ports": [{"containerPort": FIRST_PORT}],
        "resources": {"limits": {"nvidia.com/gpu": len(first.gpus)}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": FIRST_PORT}, "periodSeconds": 5},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # for NCCL, between the GPUs of an engine
    }
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "annotations": {"engines": first.note}},
        "spec": {
            "serviceName": name,
            "replicas": len(lines),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }


def _route(file: str) -> Iterator[dict[str, object]]:
    labels = {"app": "libra-route"}
    yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "libra-route"}, "data": {"gateway.yaml": file}}
    words = ["route", "/etc/libra/gateway.yaml", "--host", "0.0.0.0", "--port", str(_ROUTER_PORT)]
    container = {
        "name": "libra",
        "image": _ROUTER,
        "args": [*words, "--token-file", "/etc/libra-token/token"],
        "ports": [{"containerPort": _ROUTER_PORT}],
        "securityContext": {"runAsUser": 0},  # root owns secret volumes; the router accepts only its user's token
        "volumeMounts": [
            {"name": "file", "mountPath": "/etc/libra"},
            {"name": "token", "mountPath": "/etc/libra-token", "readOnly": True},
        ],
    }
    volumes = [
        {"name": "file", "configMap": {"name": "libra-route"}},
        {"name": "token", "secret": {"secretName": "libra-route", "defaultMode": 0o400}},
    ]
    yield {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "libra-route"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "volumes": volumes},
            },
        },
    }
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "libra-route"},
        "spec": {"selector": labels, "ports": [{"port": _ROUTER_PORT}]},
    }
