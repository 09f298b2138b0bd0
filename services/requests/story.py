"""What happened to a request, in words for people.

`story` is the only place where the words are made: `explain` in the API returns them, and the
request's span carries them to `csps trace show`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from csps.services.requests.request_handle import AttemptPlacement, RequestHandle

_STRATEGIES = {
    "ulysses": "Ulysses",
    "ring_kv": "ring pass-KV",
    "ring_q": "ring pass-Q",
    "csa": "sparse attention (CSA)",
    "levels": "levels without drops",
    "sp_tp": "SP-TP",
    "sp_tp_flat": "flat SP-TP",
    "gathered_weights": "gathered weights",
}


def story(handle: RequestHandle) -> tuple[str, ...]:
    """Return sentences about what has happened to the request so far, in order."""
    return (*_queue(handle), *_prefill(handle), *_transfer(handle), *_decode(handle), *_end(handle))


def _queue(handle: RequestHandle) -> Iterator[str]:
    timings, line = handle.timings, handle.line
    if timings.attempts > 1:
        yield f"Attempt {timings.attempts}: what ranks had computed before was lost with a fault."
    behind = _behind(line.ahead, line.behind)
    if timings.queue_s is None:
        yield f"It waits in the queue{behind}." if not handle.ended else "It never left the queue."
    else:
        passed = ", passed by nobody"
        if line.passed:
            passed = f", passed by {_count(line.passed, 'request')} that came later"
        yield f"Waited {_time(timings.queue_s)} in the queue{behind}{passed}."
    if timings.plan_s is not None and timings.plan_s > 0.1:
        yield f"Waited {_time(timings.plan_s)} for its KV slots to be reserved."


def _behind(ahead: int, name: str | None) -> str:
    if name is None:
        return f" behind {_count(ahead, 'request')}" if ahead else ""
    others = f" and {_count(ahead - 1, 'other')}" if ahead > 1 else ""
    return f" behind {name}{others}"


def _prefill(handle: RequestHandle) -> Iterator[str]:
    timings, placement, plan = handle.timings, handle.placement, handle.plan
    if placement is None or plan is None:
        return
    tokens = int(handle.spec.prompt.size)
    cached = handle.cached_tokens
    reused = f", {cached} of them from the prefix cache" if cached else ""
    if handle.front_tokens:
        front = f"{handle.front_tokens} of them computed"
        reused += f", {front} while the KV of later tokens was read from files"
    way = _STRATEGIES.get(plan.strategy, plan.strategy)
    where = _instances(placement.group)
    took = "" if timings.prefill_s is None else f" in {_time(timings.prefill_s)}"
    shared = ""
    if placement.batched_with:
        shared = f", together with {_count(placement.batched_with, 'other request')}"
    by = f" by {way}" if len(placement.group) > 1 else ""
    yield f"Prefill of {_count(tokens, 'token')}{reused} on {where}{by}{took}{shared}."
    if timings.yielded_s >= 0.001:
        yield f"Shorter work preempted it for {_time(timings.yielded_s)}."
    if timings.prefill_s and len(placement.group) > 1:
        share = timings.communication_s / timings.prefill_s
        yield f"{share:.0%} of the prefill was communication that computing did not hide."
    if plan.predicted_ttft_ms is not None and timings.ttft_s is not None:
        yield (
            f"First token after {_time(timings.ttft_s)}; "
            f"{_time(plan.predicted_ttft_ms / 1e3)} were predicted."
        )


def _transfer(handle: RequestHandle) -> Iterator[str]:
    timings, placement = handle.timings, handle.placement
    if placement is None or timings.transfer_s is None:
        return
    held = ", ".join(_held(placement))
    if timings.transfer_wait_s is None and timings.transfer_s < 0.001:
        yield f"The prompt's KV stayed where it was computed: {held}."
        return
    waited = ""
    if timings.transfer_wait_s is not None and timings.transfer_wait_s >= 0.001:
        waited = f", of which some waited {_time(timings.transfer_wait_s)} for a transfer slot"
    yield (
        f"The prompt's KV moved to where it is decoded ({held}){waited}; "
        f"{_time(timings.transfer_s)} of that came after the first token."
    )


def _held(placement: AttemptPlacement) -> Iterator[str]:
    by_instance: dict[int, int] = {}
    for kv_slice in placement.slices:
        found = by_instance.get(kv_slice.instance, 0)
        by_instance[kv_slice.instance] = found + kv_slice.span.length
    for instance, tokens in by_instance.items():
        yield f"{_count(tokens, 'token')} on instance {instance}"


def _decode(handle: RequestHandle) -> Iterator[str]:
    timings, placement = handle.timings, handle.placement
    if placement is not None and timings.decode_s is not None and timings.tokens > 1:
        each_s = timings.decode_s / (timings.tokens - 1)
        yield (
            f"Instance {placement.master} decoded {_count(timings.tokens, 'token')}, "
            f"{_time(each_s)} for each after the first."
        )
    for event in handle.elastic:
        moved = f", with the KV of {_count(event.tokens, 'token')}" if event.tokens else ""
        name = event.kind.replace("_", " ")
        yield f"Its group changed ({name}){moved}, which took {_time(event.seconds)}."


def _end(handle: RequestHandle) -> Iterator[str]:
    if handle.error is not None:
        yield f"It failed: {handle.error}"
    elif handle.finish_reason == "cancelled":
        yield f"It was cancelled after {_count(handle.timings.tokens, 'token')}."
    slo, timings = handle.spec.slo, handle.timings
    if slo.ttft_ms is not None and timings.ttft_s is not None:
        kept = "kept" if timings.ttft_s * 1e3 <= slo.ttft_ms else "missed"
        yield f"Its objective of {_time(slo.ttft_ms / 1e3)} to the first token was {kept}."


def _instances(instances: Iterable[int]) -> str:
    names = [str(instance) for instance in instances]
    if len(names) == 1:
        return f"instance {names[0]}"
    return f"instances {', '.join(names[:-1])} and {names[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _time(seconds: float) -> str:
    """Return a time with as many digits as people read."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
