"""Pods are sized by the gangs, and every rank finds its place in a pod of its role."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helm_python import HelmRenderError
from rendered_chart import ELASTIC, GPUS, Rendered, Values, container, render

from csps.protocols.core.topology import Topology
from csps.services.app import build
from csps.services.cluster.ray_context import SERVER_LABEL
from csps.services.settings.settings import Settings

ROLES = {"prefill": "PrefillGang", "decode": "DecodeGang", "elastic": "ElasticGang"}


def ray_resources(group: dict[str, Any]) -> dict[str, float]:
    """Return what the nodes of a group offer to Ray, as `ray start` gets it from KubeRay's
    shell."""
    params = group["rayStartParams"]
    quoted = params["resources"]
    assert quoted[0] == quoted[-1] == "'"
    sizes = {"CPU": float(params["num-cpus"]), "GPU": float(params["num-gpus"])}
    return {**sizes, **json.loads(quoted[1:-1])}


def demands(rendered: Rendered) -> dict[str, dict[str, float]]:
    """Return what one replica of each deployment requests of Ray."""
    return {
        deployment["name"]: {
            "CPU": deployment["ray_actor_options"]["num_cpus"],
            "GPU": deployment["ray_actor_options"].get("num_gpus", 0),
            **deployment["ray_actor_options"]["resources"],
        }
        for deployment in rendered.application["deployments"]
    }


def places(offer: dict[str, float], demand: dict[str, float]) -> int:
    """Return the number of replicas that fit on one node."""
    return min(int(offer.get(name, 0) / need) for name, need in demand.items() if need)


@pytest.mark.parametrize(
    "values",
    [{}, GPUS, {"prefill": {"instances": 3, "tp": 2, "threads": 4, "ranksPerPod": 2}}, ELASTIC],
    ids=["defaults", "gpus", "three pods", "elastic"],
)
def test_a_gang_fills_its_pods_and_fits_no_others(values: Values) -> None:
    rendered = render(values)
    settings = Settings.model_validate(rendered.application["args"])
    assert set(rendered.groups) == {"head", *settings.gangs}
    for role, section in settings.gangs.items():
        demand = demands(rendered)[ROLES[role]]
        fits = {
            name: places(ray_resources(group), demand) for name, group in rendered.groups.items()
        }
        group = rendered.groups[role]
        assert fits.pop(role) * group["replicas"] == section.ranks
        assert set(fits.values()) == {0}
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


def test_router_configurator_and_registry_fit_on_the_head_and_nowhere_else() -> None:
    rendered = render()
    shells = {
        name: demand for name, demand in demands(rendered).items() if name not in ROLES.values()
    }
    offers = {name: ray_resources(group) for name, group in rendered.groups.items()}
    for demand in shells.values():
        assert places(offers["head"], demand) >= len(shells)
        assert places(offers["prefill"], demand) == places(offers["decode"], demand) == 0


@pytest.mark.parametrize("values", [{}, ELASTIC], ids=["pair", "elastic"])
def test_deployments_are_those_of_the_application(values: Values) -> None:
    rendered = render(values)
    built = build(Settings.model_validate(rendered.application["args"]))
    router: Any = built._bound_deployment
    _, _, registry, configurator, _ = router.init_args
    bound = (built, registry, configurator, *router.init_kwargs["gangs"])
    assert {application._bound_deployment.name for application in bound} == set(demands(rendered))


def test_cpu_and_memory_follow_from_ranks_and_threads() -> None:
    values = {
        "prefill": {"instances": 2, "tp": 2, "threads": 3, "memoryMiBPerRank": 1000},
        "workerOverhead": {"cpuMillicores": 250, "memoryMiB": 100},
    }
    resources = container(render(values).groups["prefill"])["resources"]
    assert resources["requests"] == {"cpu": "12250m", "memory": "4100Mi"}
    assert resources["limits"] == {"memory": "4100Mi"}


def test_no_gpu_unless_asked_for() -> None:
    for group in render().groups.values():
        assert "nvidia.com/gpu" not in container(group)["resources"]["limits"]
        assert ray_resources(group)["GPU"] == 0


def test_a_gpu_for_each_rank() -> None:
    rendered = render(GPUS)
    settings = Settings.model_validate(rendered.application["args"])
    assert (settings.device, settings.dtype) == ("cuda", "bfloat16")
    assert settings.prefill.num_gpus == settings.decode.num_gpus == 1
    for role in settings.gangs:
        group = rendered.groups[role]
        assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert group["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in container(rendered.groups["head"])["resources"]["limits"]


def test_other_accelerators_by_name() -> None:
    rendered = render({**GPUS, "gpuResourceName": "amd.com/gpu"})
    assert container(rendered.groups["decode"])["resources"]["limits"]["amd.com/gpu"] == "8"


def test_a_gang_that_does_not_fill_its_pods_is_refused() -> None:
    with pytest.raises(HelmRenderError, match=r"a gang of 3 ranks .* does not fill pods of 2"):
        render({"prefill": {"instances": 3, "ranksPerPod": 2}})


def test_pods_are_one_server_unless_configured_otherwise() -> None:
    for group in render(GPUS).groups.values():
        assert "labels" not in group


def test_each_pod_can_be_a_server() -> None:
    """Every group is one labeled pod, and together they run the gang."""
    rendered = render({**GPUS, "topology": {"podsAreServers": True}})
    assert set(rendered.groups) == {"head", "prefill-0", "prefill-1", "decode-0"}
    settings = Settings.model_validate(rendered.application["args"])
    for role in settings.gangs:
        pods = [group for name, group in rendered.groups.items() if name.startswith(role)]
        demand = demands(rendered)[ROLES[role]]
        ranks = [places(ray_resources(pod), demand) for pod in pods]
        assert {pod["replicas"] for pod in pods} == {1}
        assert sum(ranks) == getattr(settings, role).ranks
        servers = [pod["labels"][SERVER_LABEL] for pod in pods]
        ids = [
            f"{server}-{gpu}" for server, n in zip(servers, ranks, strict=True) for gpu in range(n)
        ]
        assert len(Topology.of(ids).servers) == len(pods)


def test_pods_that_split_an_instance_cannot_be_servers() -> None:
    prefill = {"instances": 2, "tp": 4, "ranksPerPod": 2}
    with pytest.raises(HelmRenderError, match=r"pods of 2 ranks cut instances of 4 \(tp\) in two"):
        render({"prefill": prefill, "topology": {"podsAreServers": True}})
    render({"prefill": prefill})
