"""`csps plan`: what is chosen, why, and files that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from measured_rows import add_phases, add_times, link_rows

from csps.configurator.model.scaling_information_base import Identity, ScalingInformationBase
from csps.configurator.regressors.accuracy import train_accuracy
from csps.configurator.regressors.samples import AccuracySample, Setting
from csps.loadgen.planner.command import main
from csps.loadgen.planner.hardware_file import HARDWARE, load_group
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError

CLUSTER = {
    "servers": [
        {"count": 2, "instances": 1, "permissions": ["prefill"], "kv_slots": 1000},
        {"instances": 1, "permissions": ["decode"], "kv_slots": 1000},
    ],
    "links": {"inside": {"gbps": 10}, "between": {"gbps": 0.8, "latency_us": 200}},
    "model": {
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "layers": 3,
        "intermediate": 128,
        "element_bytes": 4,
    },
    "rank": {"product_tflops": 0.08, "attention_tflops": 0.07, "memory_gb_s": 5, "call_us": 20},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path, **changed: object) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**CLUSTER, **changed}))
    return path


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a regressor: with importance scored by the same layer, nothing is lost up to 80 %."""
    samples = [
        AccuracySample(
            setting=Setting(
                tokens=4_096,
                locations=("0-0-0", "0-1-0"),
                layers=3,
                csa=CsaSettings(drop_ratios=((ratio / 100,),), importance_layer=layer),
            ),
            questions=1000,
            right_exact=1000,
            right=1000 if layer == "same" and ratio <= 80 else 900,
        )
        for ratio in range(4, 98, 2)
        for layer in ("same", "previous")
    ]
    folder = tmp_path_factory.mktemp("accuracy")
    train_accuracy(samples, {"weights": "w"}).save(folder)
    return folder


def planned(
    capsys: pytest.CaptureFixture[str], cluster: Path, *more: str, status: int = 0
) -> list[str]:
    assert main(["--length", "4096", "--cluster", str(cluster), *more]) == status
    return capsys.readouterr().out.splitlines()


def test_a_rack_s_servers_are_joined_to_another_s_by_the_link_between_racks(tmp_path: Path) -> None:
    one, two, decoding = (
        {**CLUSTER["servers"][0], "count": 1},  # type: ignore[index]
        {**CLUSTER["servers"][0], "count": 1, "rack": 1},  # type: ignore[index]
        CLUSTER["servers"][1],  # type: ignore[index]
    )
    links = {**CLUSTER["links"], "racks": {"gbps": 0.08}}  # type: ignore[dict-item]
    for given, s_per_byte in ((links, 1e-7), (CLUSTER["links"], 1e-8)):
        group = load_group(str(written(tmp_path, servers=[one, two, decoding], links=given)))
        assert group.locations == ("0-0-0", "1-0-0")
        assert group.wiring.seconds_per_byte_sr[0, 1] == pytest.approx(s_per_byte)


def test_without_measurements_of_accuracy_only_exact_attention_is_safe(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = planned(capsys, cluster, "--max-accuracy-loss", "0.05")
    assert "4096 tokens on 2 instances of 1, 2 servers, 1 rack; " in lines[0]
    chosen = lines[3].split()
    assert chosen[0] == "chosen"
    assert chosen[1] in ("ulysses", "levels", "sp_tp", "ring_kv", "ring_q")
    assert not any(" csa " in line for line in lines)
    assert any("No accuracy was measured" in line for line in lines)


def test_a_lossless_measured_configuration_is_chosen_and_explained(
    cluster: Path, accuracy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ("--max-accuracy-loss", "0.01", "--drop-ratio", "0.5", "--importance-layer", "previous")
    lines = planned(capsys, cluster, "--accuracy", str(accuracy), *wish)
    (by_hand,) = (line for line in lines if line.startswith("by hand"))
    assert by_hand.split()[-1] == "10.0%"
    chosen = lines[3].split()
    assert chosen[:2] == ["chosen", "csa"]
    assert 0.5 < float(chosen[3]) <= 0.82
    assert "same, 64" in lines[3]
    assert lines[4].startswith("2 ")
    assert any("times as long" in line for line in lines)
    assert any("94 measurements" in line for line in lines)


def test_losses_beyond_the_longest_prompt_that_was_measured_are_marked(
    cluster: Path, accuracy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ("--accuracy", str(accuracy), "--max-accuracy-loss", "0.01")
    assert not any("*" in line for line in planned(capsys, cluster, *wish))
    longer = planned(capsys, cluster, *wish, "--length", "8192")
    marked = [line.split()[1] for line in longer if line.endswith("% *")]
    assert marked
    assert set(marked) <= {"csa", "sp_tp"}
    (footnote,) = (line for line in longer if line.startswith("* "))
    assert "No prompt longer than 4096 tokens was measured" in footnote
    assert "never seen at 8192" in footnote


def test_rings_are_compared_as_well(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = planned(capsys, cluster, "--runners-up", "100")
    rows = [line.split() for line in lines[3:] if line.endswith("%")]
    names = {row[1] for row in rows}
    assert names >= {"ulysses", "ring_kv", "ring_q"}
    times = [float(row[-3]) for row in rows]
    assert times == sorted(times)
    assert sum("that is not cut" in line for line in lines) == 1


def test_a_bound_that_cannot_be_kept_is_said_and_is_the_status(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ("--objective", "accuracy", "--max-ttft-ms", "0.01", "--max-accuracy-loss", "0")
    lines = planned(capsys, cluster, *wish, status=1)
    assert lines[3].startswith("nearest")
    assert any("keeps the bounds" in line for line in lines)


@pytest.mark.parametrize("path", sorted(HARDWARE.glob("*.yaml")), ids=lambda path: path.stem)
def test_clusters_that_come_with_csps_are_right(path: Path) -> None:
    group = load_group(path.stem)
    assert group.members > 1
    assert load_group(path.stem, instances=2).members == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": {"sib": "x"}}, r"there is no .*x"),
        ({"rank": {"sib": "x", "product_tflops": 1}}, "rank: either sib, or"),
        ({"rank": {"product_tflops": 1}}, "rank: either sib, or"),
        ({"model": {**CLUSTER["model"], "haeds": 3}}, "unknown key 'haeds'"),
        ({"model": {**CLUSTER["model"], "heads": 3}}, "cannot be split"),
        ({"servers": CLUSTER["servers"][1:]}, "instances that may prefill"),
        ({"links": {}}, r"links\.inside"),
    ],
)
def test_an_invalid_hardware_file_is_rejected_with_its_key(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_group(str(written(tmp_path, **changed)))


def test_one_file_is_for_planning_and_for_simulating(tmp_path: Path) -> None:
    latency = {"steps": {1: [0.01, 1e-5, 0, 1e-9]}, "decode": {1: [0.01, 0, 0]}}
    path = written(tmp_path, latency=latency)
    assert load_group(str(path)).members == 2
    assert load_cluster(str(path)).prefill.instances


def test_measured_phases_are_taken_and_cores_shared(tmp_path: Path) -> None:
    identity = Identity(
        weights="w", dtype="float32", device="cpu", cores=1, torch="2", ranks_per_core=2.0
    )
    with ScalingInformationBase.create(tmp_path / "made.sqlite", identity) as base:
        add_phases(base)
    rank = {"sib": "made.sqlite", "ranks_per_core": 2}
    group = load_group(str(written(tmp_path, rank=rank)))
    assert group.times.qkv.each == pytest.approx(1e-6)
    assert group.machine() == ((0, 1), (0.5, 0.5), 1.0)


def test_links_that_a_file_does_not_name_are_as_measured(tmp_path: Path) -> None:
    identity = Identity(
        weights="w", dtype="float32", device="cpu", cores=1, torch="2", ranks_per_core=2.0
    )
    with ScalingInformationBase.create(tmp_path / "made.sqlite", identity) as base:
        add_times(base)
    file: dict[str, object] = {"rank": {"sib": "made.sqlite"}, "links": {}}

    def seconds_per_byte() -> float:
        wiring = load_group(str(written(tmp_path, **file))).wiring
        return float(wiring.seconds_per_byte_sr[0, 1])  # instances on two servers

    assert seconds_per_byte() == pytest.approx(1e-9)  # as inside: nothing else is known
    with ScalingInformationBase.create(tmp_path / "made.sqlite", identity) as base:
        for row in link_rows("0-0-0", "0-1-0", s_per_byte=25e-9):
            base.add(row)
    assert seconds_per_byte() == pytest.approx(25e-9)
    file["links"] = {"between": {"gbps": 0.8}}
    assert seconds_per_byte() == pytest.approx(1e-8)
