"""What users and stored files depend on, as the product has it now.

Each function of `SECTIONS` computes one section as plain JSON. Where there is something to import,
it is imported and looked at, or made to work once: spans are recorded, a database is made, parsers
are built. Names that exist only as words in the middle of code (attributes of spans that ranks
write, headers, variables of the environment) are read off the product's syntax trees, wherever its
modules lie.

All modules of the product that are needed are imported at the top of this file, a name a line, so
that what moves modules can rewrite them. No other file here knows where a module lies. The only
module paths in strings are those of `IMPORT_PATHS`, which users have in files of their own.
"""

# ruff: noqa: I001 (a name a line, so that a script can rewrite where it comes from)
from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import re
import sqlite3
import tempfile
import types
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import httpx
import msgspec
import numpy as np
import yaml
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from starlette.requests import Request as HttpRequest

import csps
from csps.actors.attention.choice import WITH_PLAN
from csps.actors.attention.choice import WITHOUT_PLAN
from csps.actors.engine.decode_batch import ANSWER_FROM
from csps.actors.engine.decode_batch import ANSWER_TOKENS
from csps.actors.engine.decode_batch import PROMPT_TOKENS
from csps.actors.timing.timeline import StepClock
from csps.actors.worker.startup import model_fingerprint
from csps.actors.comm.layout import name_digest
from csps.actors.timing.timeline import SentBytes
from csps.actors.kv_cache.slot_allocator import NotHeld
from csps.actors.kv_cache.slot_allocator import OutOfSlots
from csps.actors.timing.timeline import PhaseEvent
from csps.actors.timing.timeline import Phase
from csps.actors.timing.timeline import traced_step
from csps.actors.sampling.token_sampler import BadLogits
from csps.cli import COMMANDS
from csps.cli import main as command_line
from csps.configurator.search.space import objectives
from csps.configurator.plan.profiles import NEEDED
from csps.configurator.plan.profiles import STRATEGY
from csps.configurator.regressors.accuracy import KIND
from csps.configurator.regressors.accuracy import MEASURED
from csps.configurator.regressors.direct import FEATURES as DIRECT_FEATURES
from csps.configurator.regressors.direct import DirectSample
from csps.configurator.regressors.direct import fingerprint as direct_fingerprint
from csps.configurator.regressors.direct import output_names
from csps.configurator.regressors.samples import FEATURES as ACCURACY_FEATURES
from csps.configurator.regressors.samples import AccuracySample
from csps.configurator.regressors.samples import Setting
from csps.configurator.regressors.samples import fingerprint as accuracy_fingerprint
from csps.configurator.regressors.saved import DESCRIPTION
from csps.configurator.regressors.saved import VERSION
from csps.configurator.regressors.saved import Description
from csps.configurator.regressors.accuracy import shipped_accuracy
from csps.configurator.model.scaling_information_base import FitRow
from csps.configurator.model.scaling_information_base import Identity
from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.loadgen.planner.hardware_file import HARDWARE
from csps.loadgen.planner.hardware_file import HardwareFile
from csps.loadgen.results.record import RequestRecord
from csps.loadgen.results.result import SCHEMA
from csps.loadgen.results.result import RunDescription as Run
from csps.loadgen.results.result import summarize
from csps.loadgen.workloads.request import Slo as ResultSlo
from csps.loadgen.simulator.cluster_file import CLUSTERS
from csps.loadgen.simulator.cluster_file import ClusterFile
from csps.loadgen.simulator.requests import chained
from csps.loadgen.workloads.named import WORKLOADS
from csps.loadgen.workloads.request import RequestObjective as WorkloadObjective
from csps.loadgen.workloads.request import WorkloadRequest
from csps.loadgen.workloads.traces import read_trace
from csps.loadgen.workloads.traces import write_trace
from csps.models.checkpoints.checkpoint import open_checkpoint
from csps.models.needle_prompts.prompt import NeedleConfig
from csps.models.needle_prompts.prompt import generate
from csps.models.checkpoints.checkpoint import weights_digest
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.errors import CspsError
from csps.protocols.core.errors import FaultError
from csps.protocols.core.errors import QueueFull
from csps.protocols.core.errors import RequestError
from csps.protocols.gang.members import GangRole
from csps.protocols.core.topology import GroupShape
from csps.protocols.openai.requests import ChatCompletionRequest
from csps.protocols.openai.requests import CompletionRequest
from csps.protocols.openai.requests import StreamOptions
from csps.protocols.openai.responses import AnswerDelta, ChatCompletionResponse
from csps.protocols.openai.responses import CompletionResponse
from csps.protocols.openai.responses import TextLogprob
from csps.protocols.openai.responses import error_body
from csps.protocols.openai.responses import ChatStream
from csps.protocols.openai.responses import CompletionStream
from csps.protocols.openai.responses import DONE
from csps.protocols.openai.responses import Part
from csps.protocols.attention.plan import option_name
from csps.protocols.core.placement import KvSlice
from csps.protocols.attention.plan import Objective as PlanObjective
from csps.protocols.attention.plan import AttentionPlan as Plan
from csps.protocols.attention.plan import RequestClass
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.attention.ring_choice import EmpiricalRule
from csps.protocols.attention.ring_choice import FittedRule
from csps.protocols.attention.ring_choice import RingModel
from csps.protocols.attention.ring_choice import RingRules
from csps.protocols.attention.ring_choice import RingSpeeds
from csps.protocols.gang.messages import Sampling
from csps.protocols.gang.messages import FinishReason
from csps.protocols.rpc.trace_context import extract
from csps.services.evaluation.cases import Evaluation
from csps.services.evaluation.cases import cases
from csps.services.evaluation.scores import Answered
from csps.services.evaluation.scores import summary
from csps.services.http.api import HttpApi as Api
from csps.services.http.api import client_request_id_of as request_id_of
from csps.services.http.errors import BodyTooSlow
from csps.services.http.errors import HeadersTooLarge
from csps.services.http.errors import MethodNotAllowed
from csps.services.http.errors import NoSuchRoute
from csps.services.http.errors import PayloadTooLarge
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.http.request_parser import read_slo
from csps.services.http.api import EventStream
from csps.services.settings.credentials import ApiKeys
from csps.services.launch.ray_head import RUN_DIR
from csps.services.launch.ray_head import STATE_FILE
from csps.services.launch.ray_head import RayHead
from csps.services.settings.replicas import GANGS
from csps.services.settings.replicas import ONE_OF_EACH
from csps.services.settings.settings import Settings
from csps.services.settings.settings import TelemetrySettings
from csps.services.profiling.accuracy.questions import QUESTION_KINDS
from csps.services.measured.scheduler_inputs import LATENCY as LATENCY_FIT
from csps.services.measured.attention_options import accuracy_folder
from csps.services.measured.attention_options import direct_folder
from csps.services.measured.attention_options import of_machine
from csps.services.measured.attention_options import regressors_folder
from csps.services.measured.fits import RING as RING_FIT
from csps.services.router.decision_log import DecisionLog
from csps.services.requests.request_spec import RequestSpec
from csps.services.requests.request_spec import PrefixKey
from csps.services.requests.request_handle import ClientTooSlow
from csps.services.requests.request_handle import AttemptPlacement as Placement
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import SloName as SloObjective
from csps.configurator.costs.cost_table import Allowed
from csps.configurator.costs.cost_table import Bucket
from csps.configurator.costs.cost_table import CostTable
from csps.configurator.costs.cost_table import Unmeasured
from csps.services.scheduling.deciding.decisions import digest_of
from csps.configurator.costs.latency_tables import PUBLISHED
from csps.configurator.costs.latency_tables import SHIPPED
from csps.services.scheduling.core.decision_log import DecisionLogHeader as Header
from csps.services.scheduling.policies.registry import check_pairing
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.tetris.options import FIT as TETRIS_FIT
from csps.services.scheduling.core.scheduler import SchedulerCounts as Counts
from csps.configurator.costs.cost_table import stored
from csps.services.requests.request_handle import ElasticEvent
from csps.services.requests.request_handle import ElasticEventKind as ElasticKind
from csps.services.telemetry.request_trace import error_type
from csps.services.telemetry.metrics import Metrics
from csps.services.telemetry.request_trace import record_spans
from csps.services.telemetry.request_trace import RequestTrace
from csps.services.telemetry.traces.span_file import export_request
from csps.services.telemetry.traces.perfetto import trace_events
from csps.services.telemetry.traces.span_file import SpanFile
from csps.services.telemetry.traces.spans import read_spans
from csps.services.telemetry.traces.spans import traces
from csps.services.telemetry.tracing import make_exporter
from csps.services.telemetry.tracing import make_provider

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path(str(csps.__file__)).parent

IMPORT_PATHS = (
    "csps.cli:main",
    "csps.services.app:build",
    "csps.services.http.header_deadline:install",
    "csps.services.router.decision_log:replayed",
)
"""What users name in configuration files, in the environment of Ray, and in programs."""
RUN_AS_MODULES = ("csps.tools.train_needle",)
"""What documents have users start by `python -m`. Those that only the product starts may move."""

TRACEPARENT = {"traceparent": f"00-{7:032x}-{9:016x}-01", "tracestate": "csps=timeline"}
ERRORS_ELSEWHERE = (
    BadLogits,
    BodyTooSlow,
    ClientTooSlow,
    HeadersTooLarge,
    MethodNotAllowed,
    NoSuchRoute,
    NotHeld,
    OutOfSlots,
    PayloadTooLarge,
)
"""Imported for the sake of being known: errors are looked up among the subclasses of their base."""


# --- settings ----------------------------------------------------------------------------------


def settings() -> Json:
    """Keys of the configuration, options of policies, names of deployments, the environment."""
    return {
        "keys": fields_of(Settings),
        "policies": {name: _policy(name) for name in _policies()},
        "deployments": sorted([*ONE_OF_EACH, *GANGS]),
        "models that ship": Settings().model_dir.name,
        "workloads": sorted(WORKLOADS),
        "clusters": sorted(path.stem for path in CLUSTERS.glob("*.yaml")),
        "hardware": sorted(path.stem for path in HARDWARE.glob("*.yaml")),
        "cluster file": fields_of(ClusterFile),
        "hardware file": fields_of(HardwareFile),
        "environment": _words(r"(CSPS|OPENAI|OTEL)_[A-Z_]+"),
        "labels of nodes": _words(r"csps\.io/[a-z]+"),
    }


def _policies() -> list[str]:
    try:
        make_policy("?")
    except ConfigError as error:
        return str(error).partition("allowed: ")[2].split(", ")
    raise AssertionError("there is a policy without a name")


def _policy(name: str) -> Json:
    policy = make_policy(name)
    return {
        "options": fields_of(type(policy.options)),
        "options of decoding": fields_of(type(policy.decode_options)),
        "gangs": [kind for kind in ("pair", "elastic") if _accepts(check_pairing, name, kind)],
        "ends of prompts": _accepts(make_policy, name, {"prefill_tokens_max": 1}),
    }


def _accepts(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except ConfigError:
        return False
    return True


# --- metrics -----------------------------------------------------------------------------------


class _Load:
    counts = Counts(0, 0, 0.0, 0.0, 0.0)
    ready = True


def metrics() -> Json:
    """Series of `/metrics` with types, labels and buckets, and values of labels."""
    registered: list[Any] = []
    register = CollectorRegistry.register

    def noting(self: CollectorRegistry, collector: Any) -> None:
        registered.append(collector)
        register(self, collector)

    CollectorRegistry.register = noting  # type: ignore[method-assign]
    try:
        made = Metrics("m")
        made.watch(_Load())
    finally:
        CollectorRegistry.register = register  # type: ignore[method-assign]
    return {
        "series": dict(map(_series, registered)),
        "samples of gauges": sorted(
            line.split(" ")[0]
            for line in made.render().decode().splitlines()
            if not line.startswith("#") and "kv_cache" in line
        ),
        "values of labels": {
            "role": sorted(get_args(GangRole)),
            "event": sorted(get_args(ElasticKind)),
            "finished_reason": sorted(get_args(FinishReason)),
            "slo": sorted(get_args(SloObjective)),
        },
    }


def _series(collector: Any) -> tuple[str, Json]:
    (family,) = collector.describe()
    told: Json = {"type": family.type, "labels": list(collector._labelnames)}
    if family.type == "histogram":
        told["buckets"] = [str(bucket) for bucket in collector._kwargs["buckets"]]
    return family.name, told


# --- spans -------------------------------------------------------------------------------------


def spans() -> Json:
    """Names of spans with their attributes, and what files of spans and timelines look like."""
    exporter = InMemorySpanExporter()
    told = TelemetrySettings()
    provider = make_provider("csps-router", told, InMemorySpanExporter(), rank=0)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _record_a_request()
    _record_a_step()
    recorded = exporter.get_finished_spans()
    provider.shutdown()
    named: dict[str, set[str]] = {}
    for span in recorded:
        named.setdefault(span.name, set()).update(span.attributes or {})
    return {
        "recorded": {name: sorted(keys) for name, keys in named.items()},
        "resource": sorted(set(recorded[0].resource.attributes) - {"telemetry.sdk.version"}),
        "scopes": _first_arguments("get_tracer"),
        "begun in the code": _first_arguments(
            "begin", "span", "start_span", "start_as_current_span"
        ),
        "dotted words in the code": [
            word
            for word in _words(r"(csps|gen_ai|openinference)(\.[a-z0-9_]+)+")
            if word not in _first_arguments("get_tracer") and not _is_module(word)
        ],
        "phases": sorted(get_args(Phase)),
        "of decoding": sorted([PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_FROM]),
        "elastic": sorted(get_args(ElasticKind)),
        **_span_files(recorded),
    }


def _running() -> RequestHandle:
    """A request that has been through everything."""
    generation = RequestSpec(
        client_request_id="r", prompt=np.arange(100, dtype=np.int32), sampling=Sampling()
    )
    running = RequestHandle(generation, request_id=1, on_cancel=lambda _: None)
    running.plan = Plan(
        csa=CsaPlan(locations=("0-0-0",), levels=1),
        predicted_ttft_ms=1.0,
        predicted_accuracy_loss=0.0,
        bounds_met=True,
        reason="because",
    )
    running.placement = Placement(
        group=(0,), bounds=(0, 100), slices=(KvSlice(0, 0, 100),), master=0
    )
    now = running.marks.submitted
    for name in ("placed", "launched", "prefilled", "first_token", "joined", "last_token", "ended"):
        setattr(running.marks, name, now)
    timings = running.timings
    for field in dataclasses.fields(timings):
        if getattr(timings, field.name) is None:
            setattr(timings, field.name, 1.0)
    running.finish_reason = "length"
    running.elastic.extend(
        ElasticEvent(kind=kind, began=now, ended=now) for kind in get_args(ElasticKind)
    )
    return running


def _record_a_request() -> None:
    request = RequestTrace(TRACEPARENT, operation="chat", client_request_id="r", began_ns=1)
    with request:
        with request.reading():
            running = _running()
        request.parsed(running.spec, "m")
        record_spans(running)
        # The same, ended by a fault in its last state.
        running.marks.last_token, running.error = None, QueueFull("full", retry_after_s=1.0)
        record_spans(running)
    request.answered(running, model="m", response_id="i", reason="stop")
    request.failed(QueueFull("full", retry_after_s=1.0))
    request.end()


def _record_a_step() -> None:
    job = PrefillStep(step_id=1, group=(0,), bounds=(0, 0), chunks=(), trace=TRACEPARENT)
    clock = StepClock()
    with traced_step(job, clock, SentBytes([0, 0]), rank=0):
        for phase in get_args(Phase):
            clock.timeline.add(PhaseEvent(phase, 1, 2, layer=1, level=1, micro=1))


def _span_files(recorded: Sequence[ReadableSpan]) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        written = make_exporter("csps-router", TelemetrySettings(spans_dir=folder))
        assert isinstance(written, SpanFile), "spans go elsewhere without an endpoint"
        written.export(recorded)
        (path,) = Path(folder).iterdir()
        name = path.name.replace(str(os.getpid()), "PID")
        (found,) = traces(read_spans([path]))
    return {
        "file name": name,
        "file": shape(json.loads(json.dumps(export_request(recorded)))),
        "timeline for Perfetto": shape(json.loads(json.dumps(trace_events(found)))),
    }


# --- errors ------------------------------------------------------------------------------------


def errors() -> Json:
    """Each error as clients, metrics and traces know it: by its code, or where it has none by its
    name, which is then what `error.type` and the label `code` say."""
    found: Json = {"ValueError": _error(ValueError("unexpected"))}
    for cls in _subclasses(CspsError):
        error = _example(cls)
        name = error_type(error)
        assert name not in found, f"two errors are called {name}"
        found[name] = _error(error)
    return {
        "errors": found,
        "a mistake in the configuration is a value error": issubclass(ConfigError, ValueError),
    }


def _error(error: Exception) -> Json:
    status, body, headers = error_body(error)
    told = body["error"]
    return {
        "status": status,
        "type": told["type"],
        "code": told["code"],
        "body": shape(body),
        "headers": sorted(headers),
    }


def _example(cls: type[CspsError]) -> CspsError:
    if cls is QueueFull:
        return QueueFull("full", retry_after_s=1.0)
    error = cls.__new__(cls)
    Exception.__init__(error, "told")
    return error


def _subclasses(cls: type[CspsError]) -> Iterator[type[CspsError]]:
    for subclass in cls.__subclasses__():
        if subclass not in (RequestError, FaultError):
            yield subclass
        yield from _subclasses(subclass)


# --- stored files ------------------------------------------------------------------------------


def stored_files() -> Json:
    """What lies on disk: the database, results, traces, logs, what was learned."""
    return {
        "scaling information base": _database(),
        "names of fits": sorted([LATENCY_FIT, RING_FIT, TETRIS_FIT]),
        "strategies": sorted(WITH_PLAN | WITHOUT_PLAN),
        "strategy of phases": STRATEGY,
        "phases that are needed": sorted(NEEDED),
        "kinds of questions": sorted(kind.name for kind in QUESTION_KINDS),
        "results": _results(),
        "trace file": _trace_file(),
        "evaluation": _evaluation(),
        "decision log": _decision_log(),
        "regressors": _regressors(),
        "server that runs": {
            "file": str(RUN_DIR / STATE_FILE),
            "fields": fields_of(RayHead),
        },
    }


def _identity() -> Identity:
    return Identity(
        weights="w", dtype="float32", device="d", cores=1, torch="2", ranks_per_core=1.0
    )


def _database() -> Json:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.sqlite"
        with ScalingInformationBase.create(path, _identity()) as base:
            base.add(FitRow(name="n", digest="d", canonical=b"c", date="2026"))
        with closing(sqlite3.connect(path)) as database:
            tables = [
                name
                for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")
            ]
            return {
                "schema": database.execute("PRAGMA user_version").fetchone()[0],
                "tables": {
                    table: [
                        f"{name} {kind}{' NOT NULL' if not_null else ''}{' KEY' if key else ''}"
                        for _, name, kind, not_null, _, key in database.execute(
                            f"PRAGMA table_info({table})"
                        )
                    ]
                    for table in tables
                },
                "identity": sorted(
                    name for (name,) in database.execute("SELECT name FROM identity")
                ),
            }


def _results() -> Json:
    records = [
        RequestRecord(
            scheduled_ns=0,
            sent_ns=1,
            chunk_ns=(10, 20, 30),
            finished_ns=30,
            input_tokens=100,
            output_tokens=3,
            correct=True,
            objective=WorkloadObjective(objective="ttft", max_ttft_ms=1.0),
            text="t",
        ),
        RequestRecord(
            scheduled_ns=0,
            sent_ns=1,
            chunk_ns=(),
            finished_ns=30,
            input_tokens=100,
            output_tokens=0,
            status="failed",
            error="TimeoutError: late",
        ),
    ]
    slo = ResultSlo(ttft=1.0, tpot=1.0, e2el=1.0)
    result = summarize(records, Run(kind="live", label="l", slo=slo, detailed=True))
    (schema,) = (
        found
        for path in _files("schema.json")
        if (found := json.loads(path.read_text())).get("title") == SCHEMA
    )
    return {
        "schema": SCHEMA,
        "version": result["schema_version"],
        "live": shape(json.loads(json.dumps(result))),
        "schema file": _without(schema, "description", "title"),
        "simulated": _simulated(),
    }


def _without(value: Any, *names: str) -> Any:
    """A schema without what it says to people. Properties may have such names and stay."""
    if isinstance(value, dict):
        return {
            key: {name: _without(value, *names) for name, value in item.items()}
            if key == "properties"
            else _without(item, *names)
            for key, item in value.items()
            if key not in names
        }
    return [_without(item, *names) for item in value] if isinstance(value, list) else value


def _simulated() -> Json:
    words = ["--cluster", "tetris-16", "--policy", "tetris", "--workload", "sharegpt"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        words += ["--requests", "3", "--rate", "1", "--json", str(path)]
        status = command_line(["simulate", *words])
        assert status == 0, "a simulation fails"
        return shape(json.loads(path.read_text()))


def _trace_file() -> Json:
    request = WorkloadRequest(
        arrival_ns=1_000_000,
        input_length=512,
        output_length=2,
        hash_ids=(1,),
        prompt="p",
        answer="a",
        objective=WorkloadObjective(objective="ttft", max_accuracy_loss=0.1, max_ttft_ms=1.0),
        conversation="c",
        delay_ns=2_000_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace([request], path)
        assert read_trace(path) == [request], "a trace is read as something else"
        row = json.loads(path.read_text())
    return {"row": row, "fields of an objective": fields_of(WorkloadObjective)}


def _evaluation() -> Json:
    answered = Answered(kind="single", length=1024, depth=0.5, expected="a", reply="b")
    return {
        "asked": fields_of(Evaluation),
        "summary": shape(json.loads(json.dumps(summary([answered])))),
    }


def _decision_log() -> Json:
    table = CostTable(latencies=SHIPPED)
    with tempfile.TemporaryDirectory() as folder:
        header = Header(policy="csps", policy_digest="p", table_digest=table.digest)
        path = Path(folder) / "log"
        with DecisionLog(path, header, table):
            pass
        # The first four bytes are the header's length.
        record = msgspec.msgpack.decode(path.read_bytes()[4:])
        beside = sorted(
            str(file.relative_to(folder)).replace(table.digest, "DIGEST")
            for file in Path(folder).rglob("*")
        )
    changing = ("schema", "python")
    return {
        "header": shape({name: value for name, value in record.items() if name not in changing}),
        "header says besides": [name for name in changing if name in record],
        "defaults": {
            section: record[section] for section in ("limits", "deadlines", "options", "reuse")
        },
        "files": beside,
    }


def _regressors() -> Json:
    folder = Path("base.sqlite")
    learned = regressors_folder(folder)
    return {
        "description": {"file": DESCRIPTION, "version": VERSION, **fields_of(Description)},
        "folders": [
            str(accuracy_folder(learned)),
            *(str(direct_folder(learned, kind)) for kind in ("ttft", "accuracy")),
        ],
        "trained for": sorted(of_machine(_identity())),
        "kind": KIND,
        "measured": MEASURED,
        "features of accuracy": list(ACCURACY_FEATURES),
        "features of objectives": list(DIRECT_FEATURES),
        "outputs of objectives": list(output_names(2)),
    }


# --- digests -----------------------------------------------------------------------------------

NEEDLE_CONFIGS: tuple[Json, ...] = (
    {},
    {"seed": 1},
    {"length": 300, "kind": "single"},
    {"length": 300, "kind": "multi", "needles": 5},
    {"length": 500, "kind": "two_hop", "needles": 6, "seed": 2},
    {"length": 500, "depth": 0.25},
    {"length": 700, "depth": 1.0, "order": "first"},
    {"length": 700, "filler": "names", "seed": 3},
    {"length": 2048, "filler": "shuffled", "needles": 8, "depth": 0.5},
    {"length": 16_384, "kind": "multi_key", "needles": 16, "depth": 0.0, "seed": 4},
)


def digests() -> Json:
    """What decides whether a stored file still holds, and what is drawn from a seed."""
    model_dir = Settings().model_dir
    weights = weights_digest(model_dir)
    shipped = shipped_accuracy(weights)
    assert shipped is not None, "the regressor that ships is not that of the model that ships"
    return {
        "needle prompts": [_prompt_digest(config) for config in NEEDLE_CONFIGS],
        "evaluation": _evaluation_digest(),
        "weights": weights,
        "weights as read": _fingerprint(model_dir),
        "name": name_digest("needle"),
        "shipped regressor": {
            "trained for": dict(shipped.description.trained_for),
            "training set": shipped.description.training_set,
            "files": {
                "/".join(file.parts[-3:]): sha256(file.read_bytes())
                for path in _files(DESCRIPTION)
                for file in sorted(path.parent.iterdir())
            },
        },
        "training sets": {
            "accuracy": accuracy_fingerprint([_accuracy_sample()]),
            "direct": direct_fingerprint([DirectSample(features=(1.0, 2.0), outputs=(0.5,))]),
        },
        "latencies": {
            "shipped": SHIPPED.digest,
            **{name: table.digest for name, table in PUBLISHED.items()},
            "unmeasured": sha256(Unmeasured().digest.encode()),
        },
        "rings": _rules().digest,
        "cost tables": {
            "empty": CostTable(latencies=SHIPPED).digest,
            "filled": _table().digest,
            "stored": sha256(stored(_table())),
        },
        "policies": {name: sha256(digest_of(make_policy(name)).encode()) for name in _policies()},
        "options": {
            "plain": option_name("csa", None),
            "told": option_name("csa", _csa()),
        },
        "classes": [request_class.key for request_class in _classes()],
        "bounds": [
            objective.key for kind in ("ttft", "accuracy") for objective in _objectives(kind)
        ],
        "kept KV": _prefix_digests(),
        "blocks of traces": [digest.hex() for digest in chained((1, 2, 3))],
    }


def _prompt_digest(config: Json) -> str:
    try:
        prompt = generate(NeedleConfig(**config))
    except TypeError as error:
        return f"cannot be drawn: {error}"
    return sha256(f"{prompt.text}\0{prompt.chat_text}\0{prompt.answer}".encode())


def _evaluation_digest() -> str:
    evaluation = Evaluation(questions=2, needles=4)
    drawn = [
        f"{case.haystack.text}\0{[question.answer for question in case.questions]}"
        for kind in evaluation.kinds
        for case in cases(evaluation, kind, 300)
    ]
    return sha256("\0".join(drawn).encode())


class _Alone:
    """An instance of one rank."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Any) -> Any:
        return tensor


def _fingerprint(model_dir: Path) -> str:
    with open_checkpoint(model_dir) as checkpoint:
        alone: Any = _Alone()
        return model_fingerprint(
            checkpoint,
            alone,
            dtype="float32",
            kv_dtype="auto",
            weight_dtype="auto",
            device="cpu",
            threads=1,
        )


def _csa() -> CsaSettings:
    return CsaSettings(levels=2, drop_ratios=((0.5,),), importance_layer="same")


def _accuracy_sample() -> AccuracySample:
    setting = Setting(tokens=1024, locations=("0-0-0", "0-1-0"), layers=4, csa=_csa())
    return AccuracySample(setting=setting, questions=10, right_exact=9, right=8)


def _rules() -> RingRules:
    speeds = RingSpeeds(flops=1e14, bytes_per_s=1e10)
    rule = EmpiricalRule(alpha=-1.059, beta=1.145, gamma=12.68)
    return RingRules(
        model=RingModel(heads=32, kv_heads=8, element_bytes=2),
        inside=speeds,
        between=speeds,
        fitted=(FittedRule(sp=2, tp=1, rule=rule),),
    )


def _table() -> CostTable:
    buckets = {
        Bucket("bounded", GroupShape((2, 1), 1), 12): (
            Allowed("ulysses"),
            Allowed(option_name("csa", _csa()), 700, 1500),
        ),
        Bucket("auto", GroupShape((2,), 2), 10, 3): (Allowed("ring_q"),),
    }
    return CostTable(latencies=SHIPPED, buckets=buckets, rings=_rules(), overhead_ns=1234)


def _classes() -> list[RequestClass]:
    bounds = PlanObjective(kind="ttft", max_accuracy_loss=0.01)
    return [
        RequestClass(),
        RequestClass(csa=_csa()),
        RequestClass(csa=_csa(), objective=bounds, given=("levels",)),
        RequestClass(objective=bounds),
        RequestClass(strategy="ring"),
    ]


def _objectives(kind: Any) -> Iterator[PlanObjective]:
    return objectives(kind, 1.0)


def _prefix_digests() -> list[str]:
    tokens = np.arange(12, dtype=np.int32)
    keys = (
        PrefixKey.of(owner=b"", salt=None, block=4),
        PrefixKey.of(owner=b"o", salt="s", block=4, bounds="b"),
    )
    return [digest.hex() for key in keys for digest in key.hashes(tokens)]


# --- commands ----------------------------------------------------------------------------------


class _Built(Exception):
    """A command has made its parser."""


def commands() -> Json:
    """Subcommands with their options, positional arguments and defaults."""
    parse = argparse.ArgumentParser.parse_args
    built: list[argparse.ArgumentParser] = []

    def noting(self: argparse.ArgumentParser, *arguments: Any, **more: Any) -> Any:
        built.append(self)
        if len(built) < wanted:
            return parse(self, *arguments, **more)
        raise _Built

    wanted = 1
    found: Json = {}
    with _without_environment():
        argparse.ArgumentParser.parse_args = noting  # type: ignore[method-assign]
        try:
            for words in [["--"], *([name] for name in COMMANDS)]:
                wanted = 1 if words == ["--"] else 2
                built.clear()
                _until_built(words)
                name = "" if wanted == 1 else words[0]
                found[f"csps {name}".strip()] = _parser(built[-1])
                if words == ["bench"]:
                    wanted = 3
                    for action in _choices(built[-1]):
                        built.clear()
                        _until_built([*words, action])
                        found[f"csps bench {action}"] = _parser(built[-1])
        finally:
            argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
    return {"order": list(COMMANDS), "parsers": found}


def _until_built(words: Sequence[str]) -> None:
    try:
        command_line(words)
    except _Built:
        return
    raise AssertionError(f"csps {' '.join(words)} parses nothing")


class _without_environment:
    """No default comes from the environment, whatever there is."""

    def __enter__(self) -> None:
        self._kept = {
            name: os.environ.pop(name)
            for name in list(os.environ)
            if re.match(r"(CSPS|OPENAI|OTEL|RAY)_", name)
        }

    def __exit__(self, *_: object) -> None:
        os.environ.update(self._kept)


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    return [
        str(choice)
        for action in parser._actions
        if not action.option_strings and action.choices
        for choice in action.choices
    ]


def _parser(parser: argparse.ArgumentParser) -> Json:
    told: Json = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                told[name] = _parser(sub)
            continue
        if action.help == argparse.SUPPRESS:
            continue  # vLLM's, which tests/services/test_vllm_options.py holds
        name = " ".join(action.option_strings) or action.dest
        told[name] = {
            "kind": _action_kind(action),
            "type": _converter(action.type),
            "takes": None if action.nargs is None else str(action.nargs),
            "choices": None
            if action.choices is None
            else [str(choice) for choice in action.choices],
            "default": plain(action.default),
            "required": action.required,
        }
    return told


def _action_kind(action: argparse.Action) -> str:
    # argparse's own names of its actions: they say what an option does with its value.
    return type(action).__name__.strip("_").removesuffix("Action")


def _converter(kind: Any) -> str | None:
    if kind is None:
        return None
    return kind.__name__ if kind in (int, float, str, Path) else "checked"


# --- HTTP --------------------------------------------------------------------------------------


class _Service:
    capacity_check = None
    trouble = "t"

    def __init__(self, *, ready: bool) -> None:
        self.ready = ready


class _Asked(dict[str, str]):
    """Headers of which it is noted who asks for them."""

    def __init__(self, **headers: str) -> None:
        super().__init__(headers)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def http() -> Json:
    """Routes, fields of requests and responses, headers."""
    return {
        "completion": fields_of(CompletionRequest),
        "chat": fields_of(ChatCompletionRequest),
        "completion's answer": fields_of(CompletionResponse),
        "chat's answer": fields_of(ChatCompletionResponse),
        "completion's chunks": _chunks(CompletionStream),
        "chat's chunks": _chunks(ChatStream),
        "explained": shape(json.loads(json.dumps(_running().explain()))),
        "answers": asyncio.run(_answers()),
        "headers asked for": _headers(),
        "headers in the code": _words(r"x-[a-z-]+"),
        "headers of a stream": _stream_headers(),
    }


def _chunks(stream: Any) -> list[Json]:
    """Of a stream with all that may be in it."""
    made = stream(
        request_id="i",
        model="m",
        created=1,
        prompt_tokens=2,
        cached_tokens=lambda: 1,
        options=StreamOptions(include_usage=True, continuous_usage_stats=True),
    )
    logprob = TextLogprob(token="t", token_bytes=b"t", logprob=-1.0)
    entry = dataclasses.replace(logprob, top=(logprob,))
    events = [
        made.start(0),
        made.delta(AnswerDelta([Part("content", "t")], 1, logprob=entry)),
        made.delta(AnswerDelta((), 1, finish_reason="stop"), {"plan": None}),
        made.end(1).removesuffix(DONE),
    ]
    return [shape(json.loads(event.removeprefix(b"data: "))) for event in events if event]


async def _answers() -> Json:
    parser = RequestParser(Settings())
    told: Json = {}
    for ready, keys in ((True, []), (False, ["k"])):
        service: Any = _Service(ready=ready)
        api = Api(
            parser=parser,
            parser_pool=ParserPool(parser.body_parser),
            service=service,
            keys=ApiKeys(keys),
            metrics=Metrics("m"),
            max_body_bytes=1000,
        )
        app = api.app()
        told["routes"] = sorted(
            f"{method} {route.path}"  # type: ignore[attr-defined]
            for route in app.routes
            for method in route.methods  # type: ignore[attr-defined]
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            for path in ("/health", "/metrics", "/v1/models", "/v1/models/x", "/v1/x"):
                answer = await client.get(path)
                state = "open" if ready else "not ready, with keys"
                kind = answer.headers["content-type"]
                told[f"{path}, {state}"] = {
                    "status": answer.status_code,
                    "headers": sorted(answer.headers),
                    "content type": kind,
                    "body": shape(answer.json()) if "json" in kind else None,
                }
    told["model"] = {"owner": "csps", "name": parser.model}
    return told


def _headers() -> list[str]:
    of_slo, of_trace, of_id = _Asked(), _Asked(), _Asked()
    read_slo(of_slo)
    extract(of_trace)
    request: Any = types.SimpleNamespace(headers=of_id)
    request_id_of(cast(HttpRequest, request))
    return sorted(of_slo.names | of_trace.names | of_id.names)


def _stream_headers() -> Json:
    async def nothing() -> AsyncGenerator[bytes]:
        for event in list[bytes]():
            yield event

    async def close() -> None: ...

    return dict(EventStream(nothing(), close=close).headers)


# --- import paths ------------------------------------------------------------------------------


def import_paths() -> Json:
    """What users import and run by name, and what the files that they copy name."""
    return {
        "imported": {path: _imported(path) for path in IMPORT_PATHS},
        "run": {
            path: _is_module(path) or _is_module(f"{path}.__main__") for path in RUN_AS_MODULES
        },
        "named to users": _named_to_users(),
    }


def _imported(path: str) -> Json:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return {"missing": str(error)}
    parameters = inspect.signature(found).parameters
    return {
        "parameters": list(parameters),
        # Ray Serve parses the arguments of an application by the class that stands there.
        "by class": [
            parameter.name
            for parameter in parameters.values()
            if isinstance(parameter.annotation, type)
        ],
    }


def _named_to_users() -> list[str]:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    found = {application["import_path"] for application in config["applications"]}
    files = [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").glob("*.md")]
    files += [path for path in (ROOT / "helm").rglob("*") if path.is_file()]
    files += [*(ROOT / "benchmarks").glob("*.yaml"), *_files("README.md")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"\bcsps(?:\.[a-z_]+)+:[a-z_]+", text))
        found |= set(re.findall(r"python3? -m (csps[a-z_.]+)", text))
        imports = re.findall(r"^\s*from (csps[a-z_.]*) import ([a-z_]+)", text, re.MULTILINE)
        found |= {f"{module}:{name}" for module, name in imports}
    return sorted(found)


# --- what the sections are made with -----------------------------------------------------------


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def shape(value: Any, path: str = "") -> Json:
    """Where a JSON value has which kinds of values: `choices[].text` is a `str`."""
    found: dict[str, set[str]] = {}

    def walk(node: Any, at: str) -> None:
        if isinstance(node, dict):
            found.setdefault(at or ".", set()).add("object")
            for name, item in node.items():
                walk(item, f"{at}.{name}" if at else str(name))
        elif isinstance(node, list):
            found.setdefault(at or ".", set()).add("array")
            for item in node:
                walk(item, f"{at}[]")
        else:
            found.setdefault(at or ".", set()).add("null" if node is None else type(node).__name__)

    walk(value, path)
    return {at: " | ".join(sorted(kinds)) for at, kinds in found.items()}


def plain(value: Any) -> Any:
    """A default as JSON; what only the code knows is not told."""
    if isinstance(value, Path):
        text = str(value)
        return text if not value.is_absolute() else f"…/{value.name}"
    if isinstance(value, BaseModel):
        return "object"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "object"
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else "something"


def fields_of(cls: type[Any], path: str = "") -> Json:
    """Each field of a model or a dataclass, and of those in it, by its dotted path."""
    told: Json = {}
    for name, annotation, metadata, default in _fields(cls):
        at = f"{path}.{name}" if path else name
        told[at] = {"type": _type(annotation, metadata), "default": default}
        for inner, suffix in _models_in(annotation, ""):
            told |= fields_of(inner, f"{at}{suffix}")
    return told


def _fields(cls: type[Any]) -> Iterator[tuple[str, Any, Sequence[Any], Any]]:
    if issubclass(cls, BaseModel):
        for name, field in cls.model_fields.items():
            default = "required" if field.is_required() else plain(_default_of(field))
            yield field.alias or name, field.annotation, field.metadata, default
        return
    hints = get_type_hints(cls, include_extras=True)
    for declared in dataclasses.fields(cls):
        default = "required"
        if declared.default is not dataclasses.MISSING:
            default = plain(declared.default)
        elif declared.default_factory is not dataclasses.MISSING:
            default = plain(declared.default_factory())
        yield declared.name, hints[declared.name], (), default


def _default_of(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True, validated_data={})
    return None if default is PydanticUndefined else default


def _is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)
    )


def _models_in(annotation: Any, suffix: str) -> Iterator[tuple[type[Any], str]]:
    if _is_record(annotation):
        yield annotation, suffix
        return
    source = get_origin(annotation)
    if source is Annotated:
        yield from _models_in(get_args(annotation)[0], suffix)
        return
    if source is Literal:
        return
    inner = {list: "[]", tuple: "[]", dict: "{}"}.get(cast(Any, source), "")
    for get_arg in get_args(annotation):
        yield from _models_in(get_arg, suffix + inner)


_BOUNDS = ("gt", "ge", "lt", "le", "min_length", "max_length", "allow_inf_nan")


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    bounds = sorted(
        f"{name} {value}" for item in metadata for name in _BOUNDS for value in _bound(item, name)
    )
    text = _bare_type(annotation)
    return f"{text} ({', '.join(bounds)})" if bounds else text


def _bound(constraint: Any, name: str) -> Iterator[Any]:
    if isinstance(constraint, FieldInfo):
        for item in constraint.metadata:
            yield from _bound(item, name)
    elif (value := getattr(constraint, name, None)) is not None:
        yield value


def _bare_type(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "null"
    if annotation is Any:
        return "anything"
    if _is_record(annotation):
        return "object"
    source, inner = get_origin(annotation), get_args(annotation)
    if source is Annotated:
        return _type(inner[0], inner[1:])
    if source is Literal:
        return " | ".join(sorted(json.dumps(choice) for choice in inner))
    if source in (Union, types.UnionType):
        return " | ".join(sorted(_bare_type(part) for part in inner))
    if source is not None:
        name = "object" if issubclass(source, Mapping) else "array"
        return f"{name} of {', '.join(_bare_type(part) for part in inner if part is not ...)}"
    return str(annotation.__name__)


def _files(ending: str) -> list[Path]:
    """Files of the package with such a name, wherever they lie."""
    return sorted(
        Path(folder) / name
        for folder, _, names in os.walk(PACKAGE, followlinks=True)
        for name in names
        if name.endswith(ending)
    )


@cache
def _code() -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
    """Strings of the product, but of what only builds it; and functions and methods by name, with
    the strings that they are called with first."""
    strings: set[str] = set()
    calls: set[tuple[str, str]] = set()
    for path in _files(".py"):
        if "tools" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
            elif isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    calls.add((name, first.value))
    return frozenset(strings), frozenset(calls)


def _words(pattern: str) -> list[str]:
    """Strings of the code that are such a word from end to end."""
    strings, _ = _code()
    return sorted(string for string in strings if re.fullmatch(pattern, string))


def _first_arguments(*functions: str) -> list[str]:
    """Strings that functions and methods of these names are called with first."""
    _, calls = _code()
    return sorted({first for name, first in calls if name in functions})


def _is_module(path: str) -> bool:
    at = PACKAGE.joinpath(*path.split(".")[1:])
    return at.is_dir() or at.with_suffix(".py").is_file()


SECTIONS: dict[str, Callable[[], Json]] = {
    "settings": settings,
    "metrics": metrics,
    "spans": spans,
    "errors": errors,
    "stored_files": stored_files,
    "digests": digests,
    "commands": commands,
    "http": http,
    "import_paths": import_paths,
}
"""By the name of the file that holds each."""
