"""A served model as operators see it: a real Prometheus scrapes it, and the spans of one request
add up to what its client waited for."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployed_server import MODEL, Deployed, deployed
from documented_commands import arguments, documented
from free_ports import free_port

from csps.services.settings.settings import shipped_models
from csps.services.telemetry.traces.spans import RecordedSpan, Trace, read_spans, span_files, traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
POLL_S = 0.2
ABSENT = ("csps:requests_refused_total", "csps:request_ttft_bounds_total", "csps:elastic_")
"""Metrics that are absent here, because no request is rejected, bounded or elastic."""
REQUEST_S = 25
"""A request that takes longer fails."""
PROMPT_TOKENS = 16_000
ANSWER_TOKENS = 32
SHARE = 0.03
"""Share of the client's time that spans may miss or count twice."""
STATES = ("receive", "tokenize", "queue", "plan", "prefill", "transfer", "decode")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(
        shipped_models() / "needle",
        tmp_path_factory.mktemp("run"),
        kv_reuse={"enabled": True},
        slo={"ttft_ms": 60_000, "tpot_ms": 60_000},
        deadlines={"request_s": REQUEST_S},
    ) as server:
        yield server


def eventually(what: str, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := found()):
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)
    return result


# --- traces ------------------------------------------------------------------------------------


def ask(server: Deployed, tokens: int, headers: dict[str, str], **more: Any) -> float:
    """Stream an answer; return the seconds from sending the question to the answer's end."""
    prompt = [5 + (place * place + 7 * place) % 200 for place in range(tokens)]
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True,
        "ignore_eos": True, **more,
    }  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        began = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = [line for line in answer.iter_lines() if line]
        took_s = time.monotonic() - began
    assert (answer.status_code, lines[-1]) == (200, "data: [DONE]")
    return took_s


def traced(server: Deployed, trace_id: str, spans: dict[str, int]) -> Trace:
    """Return the trace, when so many spans of each name have been written."""

    def found() -> Trace | None:
        files = span_files(Path(server.config.settings.telemetry.spans_dir))
        for trace in traces(read_spans(files)):
            if trace.trace_id == trace_id:
                names = [span.name for span in trace.spans]
                if all(names.count(name) >= number for name, number in spans.items()):
                    return trace
        return None

    trace: Trace = eventually(f"trace {trace_id} lacks some of {spans}", found)
    return trace


def seconds(spans: list[RecordedSpan]) -> float:
    return sum(span.duration_ns for span in spans) / 1e9


def test_the_spans_of_a_request_add_up_to_what_its_client_waited_for(server: Deployed) -> None:
    """The router's states one after another, and what each rank did of them."""
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    ask(server, 2_000, {})  # what is made once, on either side
    asked = {"attention": "csa", "levels": 2, "drop_ratio": 0.5}
    took_s = ask(server, PROMPT_TOKENS, headers, csps=asked)
    ranks = {"prefill.compute": 2, "kv.landing": 2, "decode.rank": 2, "configure": 1}
    trace = traced(server, trace_id, {"llm_request": 1, **ranks})
    named = {
        name: [span for span in trace.spans if span.name == name] for name in (*STATES, *ranks)
    }
    within = SHARE * took_s
    states_s = {name: seconds(named[name]) for name in STATES}
    assert sum(states_s.values()) == pytest.approx(took_s, abs=within), states_s
    assert seconds([trace.root]) == pytest.approx(took_s, abs=within)
    for step in named["prefill.compute"]:
        assert seconds([step]) == pytest.approx(states_s["prefill"], abs=within)
    for rank in named["decode.rank"]:
        assert seconds([rank]) == pytest.approx(states_s["decode"], abs=within)
    (transfer,) = named["transfer"]
    received_ns = max(span.end_ns for span in named["kv.landing"])
    assert received_ns / 1e9 == pytest.approx(transfer.end_ns / 1e9, abs=within)
    processes = {(span.service, span.rank) for span in trace.spans}
    assert processes == {
        ("csps-router", None), ("csps-configurator", None),
        ("csps-prefill", 0), ("csps-prefill", 1), ("csps-decode", 0), ("csps-decode", 1),
    }  # fmt: skip


# --- metrics -----------------------------------------------------------------------------------


@contextmanager
def prometheus(server: Deployed, folder: Path) -> Iterator[httpx.Client]:
    """Start Prometheus as documented, except for the server's port, the deadline and the data
    folder.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    (words,) = map(arguments, documented("prometheus"))
    (documented_file,) = [word for word in words if word.endswith(".yml")]
    config = yaml.safe_load((ROOT / documented_file).read_text())
    config["global"]["scrape_interval"] = "1s"
    for rules in config["rule_files"]:
        shutil.copy((ROOT / documented_file).parent / rules, folder)
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.split("/")[2]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            program,
            *(
                word if word != documented_file else str(folder / "prometheus.yml")
                for word in words
            ),
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60.0, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


def result(client: httpx.Client, query: str) -> list[Any]:
    """Return the result of an instant query, or nothing while Prometheus does not listen yet."""
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    body = answer.json()
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return []
    assert body["status"] == "success", body
    found: list[Any] = body["data"]["result"]
    return [sample for sample in found if sample["value"][1] not in ("NaN", "+Inf")]


def fails(server: Deployed) -> None:
    """Send a request that fails by its deadline."""
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 30_000, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == httpx.codes.GATEWAY_TIMEOUT


def test_prometheus_has_data_for_every_query_of_the_dashboard(
    server: Deployed, tmp_path: Path
) -> None:
    panels = json.loads((ROOT / "docs/monitoring/grafana-dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    with prometheus(server, tmp_path) as client:
        eventually("prometheus does not scrape", lambda: result(client, "csps:ready == 1"))
        for tokens in (PROMPT_TOKENS, 3_000):  # on both instances; and begun like the one before
            ask(server, tokens, {})
        fails(server)
        scraped = "csps:request_success_total >= 2"
        eventually("what was asked was not scraped", lambda: result(client, scraped))
        ask(server, 3_500, {})
        for query in queries:
            filled = query.replace("$__rate_interval", "5m").replace("$model", ".*")
            if not any(name in query for name in ABSENT):
                eventually(f"no data for {filled}", lambda filled=filled: result(client, filled))
        (missed,) = result(client, 'csps:request_slo_total{slo="all", met="false"}')
        assert missed["value"][1] == "1"  # the one that failed
