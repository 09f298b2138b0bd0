"""The objects are what Kubernetes and KubeRay take."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmRenderError, HelmValuesError, lint
from rendered_chart import (
    CHART,
    DOWNLOADED,
    ELASTIC,
    EVERYTHING,
    GPUS,
    PRESETS,
    Rendered,
    Values,
    container,
    environment,
    render,
)

import csps

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = pytest.mark.parametrize(
    "values",
    [{}, EVERYTHING, GPUS, ELASTIC, DOWNLOADED, *PRESETS.values()],
    ids=["defaults", "everything", "gpus", "elastic", "downloaded", *PRESETS],
)
CUSTOM_KINDS = {"RayService", "ServiceMonitor", "PrometheusRule"}
CRD = Path(__file__).parent / "crds" / "ray.io_rayservices.yaml"
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


@cache
def rayservice_schema() -> jsonschema.Draft202012Validator:
    """Return KubeRay's own schema of v1, in which an unknown field is an error: Kubernetes would
    drop it in silence.
    """
    versions = yaml.load(CRD.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1"]
    del schema["properties"]["metadata"]  # any object's, which the definition leaves out
    schema["properties"]["metadata"] = {}
    return jsonschema.Draft202012Validator(closed(schema))


def closed(schema: Any) -> Any:
    """Return the schema with no other properties than those that it names."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(one) for name, one in schema.items()}
    is_open = {"additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(schema)
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not is_open
    ):
        inner["additionalProperties"] = False
    return inner


@VARIANTS
def test_the_rayservice_fits_kuberays_definition(values: Values) -> None:
    rendered = render(values)
    service = rendered.of_kind("RayService")
    assert service["apiVersion"] == "ray.io/v1"
    rayservice_schema().validate(service)
    for group in rendered.groups.values():
        assert all(type(value) is str for value in group["rayStartParams"].values())


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("spec", {"serveConfigv2": ""}),
        ("spec.rayClusterConfig", {"rayVersoin": "2"}),
        ("spec.rayClusterConfig.headGroupSpec", {"rayStartParam": {}}),
        ("spec.rayClusterConfig.headGroupSpec.template.spec", {"initContainer": []}),
        ("spec.rayClusterConfig.authOptions", {"mode": "none"}),
        ("spec.rayClusterConfig.workerGroupSpecs.0", {"replicas": "two"}),
    ],
)
def test_what_kuberay_does_not_know_is_found(path: str, wrong: Values) -> None:
    service = json.loads(json.dumps(render().of_kind("RayService")))
    place = service
    for key in path.split("."):
        place = place[int(key) if key.isdecimal() else key]
    place.update(wrong)
    with pytest.raises(jsonschema.ValidationError):
        rayservice_schema().validate(service)


def test_optional_objects_are_off_by_default() -> None:
    optional = {"Ingress", "ServiceMonitor", "Service", "PersistentVolumeClaim", "PrometheusRule"}
    always = {"RayService", "Secret", "PodDisruptionBudget", "NetworkPolicy", "Pod"}
    assert render().kinds == always
    assert render(EVERYTHING).kinds == always | optional
    off = {"enabled": False}
    without = render({"podDisruptionBudget": off, "networkPolicy": off})
    assert without.kinds == always - {"PodDisruptionBudget", "NetworkPolicy"}


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
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pods_outlive_the_drain() -> None:
    rendered = render({"drainSeconds": 120})
    for group in rendered.groups.values():
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 120


OPEN: Values = {"auth": {"requireApiKey": False}, "haproxy": {"enabled": False}}
"""Without volumes of the chart's own: the file of API keys, and HAProxy's."""


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


def init_containers(group: Any) -> dict[str, Any]:
    """Containers that run before Ray's, by name."""
    return {one["name"]: one for one in group["template"]["spec"].get("initContainers", [])}


def test_a_model_of_the_hub_is_downloaded_before_ray_starts_in_any_pod() -> None:
    rendered = render(DOWNLOADED)
    for group in rendered.groups.values():
        download = init_containers(group)["download-model"]
        assert download["args"][1:] == ["Qwen/Qwen3-8B", ""]
        (mount,) = download["volumeMounts"]
        assert mount == {"name": "model", "mountPath": "/models"}, "it writes"
        variables = {variable["name"]: variable for variable in download["env"]}
        cache = variables["HF_HUB_CACHE"]["value"]
        assert cache.startswith(mount["mountPath"] + "/")
        token = variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert token == {"name": "hub", "key": "token"}
        ray = environment(group)
        assert ray["HF_HUB_CACHE"]["value"] == cache
        assert ray["HF_HUB_OFFLINE"]["value"] == "1"
        assert "HF_TOKEN" not in ray
        (volume,) = [one for one in group["template"]["spec"]["volumes"] if one["name"] == "model"]
        assert volume["persistentVolumeClaim"] == {"claimName": "demo-csps-model"}
    assert rendered.application["args"]["model"] == "Qwen/Qwen3-8B"
    assert '"model": "Qwen/Qwen3-8B"' in rendered.notes


def test_a_pinned_commit_is_served_from_its_folder() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = {"path": "some-org/tiny", "download": {"enabled": True, "revision": commit}}
    rendered = render({"model": model})
    settings = rendered.application["args"]
    assert settings["served_model_name"] == "some-org/tiny"
    assert settings["model"] == f"/models/hub/models--some-org--tiny/snapshots/{commit}"
    head = rendered.groups["head"]
    assert init_containers(head)["download-model"]["args"][1:] == ["some-org/tiny", commit]
    assert {"name": "model", "emptyDir": {}} in head["template"]["spec"]["volumes"]


def test_only_an_id_of_the_hub_can_be_downloaded() -> None:
    with pytest.raises(HelmRenderError, match="must be an id of the Hugging Face Hub"):
        render({"model": {"path": "/models/llama", "download": {"enabled": True}}})


def test_further_init_containers_run_in_every_pod_after_the_charts() -> None:
    for group in render(EVERYTHING).groups.values():
        assert list(init_containers(group)) == ["haproxy", "warm-up"]
    taken = {"pods": {"extraInitContainers": [{"name": "haproxy"}]}}
    with pytest.raises(HelmValuesError, match="extraInitContainers"):
        render(taken)


@VARIANTS
def test_the_policy_lets_the_operator_deploy_and_nobody_else_in(values: Values) -> None:
    """`tests/testbed/test_chart_pods.py` compares the ports with those that processes open."""
    rendered = render(values)
    policy = rendered.of_kind("NetworkPolicy")["spec"]
    selected = policy["podSelector"]
    for group in rendered.groups.values():
        labels = group["template"]["metadata"]["labels"]
        assert selected["matchLabels"].items() <= labels.items()
        assert labels["app.kubernetes.io/component"] in selected["matchExpressions"][0]["values"]
    inside, clients, operator, *monitoring = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": selected["matchLabels"]}}]}
    assert [port["port"] for port in clients["ports"]] == [8000]
    assert [port["port"] for port in operator["ports"]] == [8265, 8000]
    assert all(rule["from"] for rule in (operator, *monitoring)), "an empty list is everybody"
    assert len(monitoring) == ("monitoring" in values.get("networkPolicy", {}))


def test_clients_of_the_policy_may_be_limited() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"team": "llm"}}}]
    policy = render({"networkPolicy": {"clients": peers}}).of_kind("NetworkPolicy")["spec"]
    assert policy["ingress"][1]["from"] == peers


def test_alerts_are_those_of_the_documentation() -> None:
    documented = ROOT / "docs" / "monitoring" / "alerts.yaml"
    rule = render(EVERYTHING).of_kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(documented.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


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
