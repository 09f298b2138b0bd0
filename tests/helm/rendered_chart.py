"""The chart as Helm renders it, offline, and short ways to what tests look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).resolve().parents[2] / "helm" / "csps"
RELEASE, NAMESPACE = "demo", "llm"

Values = dict[str, Any]
Manifest = Any  # parsed YAML

EVERYTHING: Values = {
    "model": {"path": "/models/llama", "volume": {"create": {"enabled": True}}},
    "ingress": {"enabled": True, "host": "llm.example.org", "tlsSecret": "certificate"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"monitoring": [{"namespaceSelector": {}}]},
    "service": {"annotations": {"a": "b"}},
    "telemetry": {"otlpEndpoint": "http://collector:4318/v1/traces"},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "pods": {
        "annotations": {"a": "b"},
        "labels": {"team": "llm"},
        "priorityClassName": "high",
        "serviceAccountName": "csps",
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "times", "persistentVolumeClaim": {"claimName": "times"}}],
        "extraVolumeMounts": [{"name": "times", "mountPath": "/times"}],
        "extraInitContainers": [
            {
                "name": "warm-up",
                "image": "busybox:1",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    },
    "head": {"tolerations": [{"key": "head", "operator": "Exists"}]},
}
"""Every optional object and branch that does not exclude another."""

GPUS: Values = {
    "model": {"dtype": "bfloat16", "device": "cuda"},
    "prefill": {"instances": 4, "tp": 4, "threads": 4, "gpusPerRank": 1, "ranksPerPod": 8},
    "decode": {"instances": 1, "tp": 8, "threads": 2, "gpusPerRank": 1},
    "pods": {"runtimeClassName": "nvidia"},
}
"""16 prefill ranks on two machines of 8 GPUs, 8 decode ranks on a third."""

ELASTIC: Values = {
    "elastic": {"instances": 4, "tp": 2, "threads": 2, "ranksPerPod": 4},
    "scheduling": {"policy": "chunked_prefill"},
}
"""One gang of 8 ranks in two pods."""


DOWNLOADED: Values = {
    "model": {
        "path": "Qwen/Qwen3-8B",
        "download": {"enabled": True, "tokenSecret": "hub", "endpoint": "http://hub.local"},
        "volume": {"create": {"enabled": True}},
    },
}
"""A model of the Hugging Face Hub on a claim of the chart's."""

PRESETS: dict[str, Values] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "presets").glob("*"))
}
"""Files of values that ship with the chart."""


@dataclass(frozen=True)
class Rendered:
    """All objects of one rendering."""

    manifests: tuple[Manifest, ...]
    notes: str

    def of_kind(self, kind: str) -> Manifest:
        """Return the only object of that kind."""
        (found,) = [manifest for manifest in self.manifests if manifest["kind"] == kind]
        return found

    @property
    def kinds(self) -> set[str]:
        return {manifest["kind"] for manifest in self.manifests}

    @property
    def cluster(self) -> Manifest:
        """Specification of the Ray cluster in the RayService."""
        return self.of_kind("RayService")["spec"]["rayClusterConfig"]

    @property
    def groups(self) -> dict[str, Manifest]:
        """Head group and worker groups by name."""
        workers = {group["groupName"]: group for group in self.cluster["workerGroupSpecs"]}
        return {"head": self.cluster["headGroupSpec"], **workers}

    @property
    def serve_config_text(self) -> str:
        return str(self.of_kind("RayService")["spec"]["serveConfigV2"])

    @property
    def application(self) -> Manifest:
        """The only application of the Serve configuration."""
        (application,) = yaml.safe_load(self.serve_config_text)["applications"]
        return application


def render(
    values: Values | None = None,
    *,
    chart: Path = CHART,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
) -> Rendered:
    """Render as `helm install` would."""
    files = Chart.load(chart).render(values or {}, name=release, namespace=namespace)
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    documents = [
        document for text in texts for document in yaml.safe_load_all(text) if document is not None
    ]
    return Rendered(tuple(documents), notes)


def container(group: Manifest) -> Manifest:
    """Ray's container of a group."""
    return group["template"]["spec"]["containers"][0]


def environment(group: Manifest) -> dict[str, Manifest]:
    """Return the variables of Ray's container by name."""
    return {variable["name"]: variable for variable in container(group)["env"]}
