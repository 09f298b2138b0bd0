"""The objects are what Kubernetes and KubeRay take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from helm_python import Chart, HelmRenderError, HelmValuesError, lint
from rendered_chart import CHART, ELASTIC, EVERYTHING, GPUS, Rendered, Values, container, render

import csps

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = pytest.mark.parametrize(
    "values",
    [{}, EVERYTHING, GPUS, ELASTIC],
    ids=["defaults", "everything", "gpus", "elastic"],
)
CUSTOM_KINDS = {"RayService", "ServiceMonitor"}
RAYSERVICE_FIELDS = {"upgradeStrategy", "serveService", "serveConfigV2", "rayClusterConfig"}
"""Fields of KubeRay's v1 API that the chart uses, from its reference."""
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS = {"rayStartParams", "template"}
WORKER_FIELDS = HEAD_FIELDS | {"groupName", "replicas", "minReplicas", "maxReplicas"}
MAX_NAME = 47
"""KubeRay appends a suffix to the name of a RayService."""


def validate(manifest: dict[str, Any]) -> None:
    """Strictly: an unknown field is an error."""
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, version, strict=True)


@VARIANTS
def test_lint_finds_nothing(values: Values) -> None:
    report = lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@VARIANTS
def test_built_in_kinds_fit_their_schemas(values: Values) -> None:
    for manifest in render(values).manifests:
        if manifest["kind"] not in CUSTOM_KINDS:
            validate(manifest)


@VARIANTS
def test_pod_templates_and_service_inside_the_rayservice_fit_as_well(values: Values) -> None:
    rendered = render(values)
    service = rendered.of_kind("RayService")["spec"]["serveService"]
    validate({"apiVersion": "v1", "kind": "Service", **service})
    for group in rendered.groups.values():
        named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        validate({**named, "template": group["template"]})


def test_validation_is_strict() -> None:
    misspelled = {"name": "x", "image": "x", "volumeMount": []}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        validate({**pod, "spec": {"containers": [misspelled]}})


@VARIANTS
def test_rayservice_has_only_fields_of_kuberay(values: Values) -> None:
    rendered = render(values)
    service = rendered.of_kind("RayService")
    assert service["apiVersion"] == "ray.io/v1"
    assert set(service["spec"]) == RAYSERVICE_FIELDS
    assert set(rendered.cluster) == CLUSTER_FIELDS
    assert set(rendered.cluster["headGroupSpec"]) == HEAD_FIELDS
    for group in rendered.cluster["workerGroupSpecs"]:
        assert set(group) == WORKER_FIELDS
    for group in rendered.groups.values():
        assert all(type(value) is str for value in group["rayStartParams"].values())


def test_optional_objects_are_off_by_default() -> None:
    optional = {"Ingress", "ServiceMonitor", "Service", "PersistentVolumeClaim"}
    assert render().kinds == {"RayService", "Secret", "PodDisruptionBudget", "Pod"}
    assert render(EVERYTHING).kinds == render().kinds | optional
    without = render({"podDisruptionBudget": {"enabled": False}})
    assert "PodDisruptionBudget" not in without.kinds


def test_no_more_than_one_pod_may_be_disrupted_at_a_time() -> None:
    # head, two prefill pods, one decode pod
    assert render(GPUS).of_kind("PodDisruptionBudget")["spec"]["minAvailable"] == 3
    budget = render(ELASTIC).of_kind("PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 2
    (roles,) = budget["selector"]["matchExpressions"]
    assert roles["values"] == ["head", "elastic"]


def test_budget_and_monitor_select_the_pods_they_mean() -> None:
    rendered = render(EVERYTHING)
    labels = {
        name: group["template"]["metadata"]["labels"] for name, group in rendered.groups.items()
    }
    budget = rendered.of_kind("PodDisruptionBudget")["spec"]["selector"]
    assert all(budget["matchLabels"].items() <= label.items() for label in labels.values())
    assert budget["matchExpressions"][0]["values"] == list(labels)
    scraped = rendered.of_kind("Service")
    selected = [
        name for name, own in labels.items() if scraped["spec"]["selector"].items() <= own.items()
    ]
    assert selected == ["head"]
    wanted = rendered.of_kind("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= scraped["metadata"]["labels"].items()


@VARIANTS
def test_everything_leads_to_the_service_that_the_operator_makes(values: Values) -> None:
    rendered = render(values)
    service = rendered.of_kind("RayService")["spec"]["serveService"]
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    assert rendered.of_kind("Pod")["spec"]["containers"][0]["args"][1] == (
        f"http://{name}:{port['port']}/health"
    )
    for group in rendered.groups.values():
        ports = {port["name"]: port["containerPort"] for port in container(group)["ports"]}
        assert ports["serve"] == port["targetPort"]
    if "Ingress" in rendered.kinds:
        (rule,) = rendered.of_kind("Ingress")["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert backend == {"name": name, "port": {"number": port["port"]}}


def test_worker_takes_traffic_when_its_proxy_does() -> None:
    for name, group in render().groups.items():
        probes = container(group)
        assert probes["livenessProbe"]["httpGet"]["port"] == 52365
        is_head = name == "head"
        path = probes["readinessProbe"]["httpGet"]["path"]
        assert path == ("/api/healthz" if is_head else "/-/healthz")


def test_pods_run_without_privileges() -> None:
    rendered = render()
    pods = [group["template"]["spec"] for group in rendered.groups.values()]
    for spec in [*pods, rendered.of_kind("Pod")["spec"]]:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        (only,) = spec["containers"]
        assert only["securityContext"]["allowPrivilegeEscalation"] is False
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pods_outlive_the_drain() -> None:
    rendered = render({"drainSeconds": 120})
    for group in rendered.groups.values():
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 120


OPEN: Values = {"auth": {"requireApiKey": False}}
"""Without the file of API keys, which is a volume of the head."""


def claim(name: str) -> Values:
    return {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({"existingClaim": "weights"}, claim("weights")),
        ({"hostPath": "/srv/models"}, {"hostPath": {"path": "/srv/models", "type": "Directory"}}),
        ({"create": {"enabled": True}}, claim("demo-csps-model")),
    ],
    ids=["existing claim", "host path", "own claim"],
)
def test_model_volume_is_read_only_in_every_pod(volume: Values, source: Values) -> None:
    rendered = render({"model": {"path": "/models/llama", "volume": volume}, **OPEN})
    for group in rendered.groups.values():
        assert group["template"]["spec"]["volumes"] == [{"name": "model", **source}]
        (mount,) = container(group)["volumeMounts"]
        assert mount == {"name": "model", "mountPath": "/models", "readOnly": True}
    if "create" in volume:
        made = rendered.of_kind("PersistentVolumeClaim")
        assert made["metadata"]["name"] == source["persistentVolumeClaim"]["claimName"]


@pytest.mark.parametrize("path", [None, "/checkpoints"])
def test_volumes_of_the_values_are_in_every_pod(path: str | None) -> None:
    """Beside the model's, or alone."""
    mount = {"name": "times", "mountPath": "/times", "readOnly": True}
    more = {"extraVolumes": [{"name": "times", "emptyDir": {}}], "extraVolumeMounts": [mount]}
    model = {"model": {"volume": {"hostPath": path}}} if path else {}
    rendered = render({"pods": more, **model, **OPEN})
    own = [] if path is None else ["model"]
    for group in rendered.groups.values():
        assert [volume["name"] for volume in group["template"]["spec"]["volumes"]] == [
            *own,
            "times",
        ]
        assert container(group)["volumeMounts"][-1] == mount
        assert len(container(group)["volumeMounts"]) == len(own) + 1
    assert "volumes" not in render(OPEN).groups["head"]["template"]["spec"]


def test_each_section_chooses_the_nodes_of_its_pods() -> None:
    """Each gang and the head choose their nodes."""
    where = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    rendered = render({"prefill": where, "pods": {"serviceAccountName": "llm"}})
    for name, group in rendered.groups.items():
        spec = group["template"]["spec"]
        assert {key: spec.get(key) for key in where} == (
            where if name == "prefill" else dict.fromkeys(where)
        )
        assert spec["serviceAccountName"] == "llm"
        assert spec["automountServiceAccountToken"] is False


def test_two_model_volumes_are_refused() -> None:
    volume = {"existingClaim": "weights", "hostPath": "/srv/models"}
    with pytest.raises(HelmRenderError, match="at most one of existingClaim, hostPath and create"):
        render({"model": {"volume": volume}})


def test_image_names_no_registry_by_default() -> None:
    assert images(render()) == {f"csps:{csps.__version__}"}
    named = {"image": {"repository": "registry.example.org/llm/csps", "tag": "1.2"}}
    assert images(render(named)) == {"registry.example.org/llm/csps:1.2"}


def images(rendered: Rendered) -> set[str]:
    specs = [group["template"]["spec"] for group in rendered.groups.values()]
    specs.append(rendered.of_kind("Pod")["spec"])
    return {container["image"] for spec in specs for container in spec["containers"]}


def test_versions_are_those_of_the_package() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert render().cluster["rayVersion"] == pinned["ray"]
    assert Chart.load(CHART).metadata["appVersion"] == csps.__version__


@pytest.mark.parametrize("name", ["a" * 53, "long-" * 10 + "end"])
def test_long_release_names_stay_within_what_kuberay_takes(name: str) -> None:
    text = Chart.load(CHART).render({}, name=name)["csps/templates/rayservice.yaml"]
    (found,) = re.findall(r"^metadata:\n  name: (\S+)$", text, re.M)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(found) <= MAX_NAME


def test_ingress_needs_a_host() -> None:
    with pytest.raises((HelmValuesError, HelmRenderError), match="host"):
        render({"ingress": {"enabled": True}})


def test_ingress_leads_to_the_api_and_to_nothing_that_needs_no_key() -> None:
    """`/metrics` tells of other clients' prompts, and Ray Serve has routes of its own."""
    (rule,) = render(EVERYTHING).of_kind("Ingress")["spec"]["rules"]
    paths = {path["path"]: path["pathType"] for path in rule["http"]["paths"]}
    assert paths == {"/v1": "Prefix", "/health": "Exact"}


def test_notes_lead_to_a_first_request() -> None:
    notes = render().notes
    assert "port-forward service/demo-csps 8000:8000" in notes
    assert "-n llm get secret demo-csps" in notes
    assert '"model": "needle"' in notes
    assert "https://llm.example.org/v1/completions" in render(EVERYTHING).notes
    assert "auth.requireApiKey is false" in render({"auth": {"requireApiKey": False}}).notes
