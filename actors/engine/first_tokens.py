"""The last layer of a step, which needs only the rows from which a token is sampled.

Their queries go to the members that hold KV of their sequences (`query_exchange`), which saves the
attention and the MLP of all other rows. Keys that this step computes are attended to at the member
that computes them, even if another one stores them: a member that stores some of each other's rows
has its own scattered over its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.query_exchange import QueryExchange, QueryRoutes, exchange_queries
from csps.actors.comm.mesh import Tag
from csps.actors.engine.kv_mover import OwnKv
from csps.actors.kv_cache.kv_pool import ResidentRows, SlotsOfSequence
from csps.actors.sampling.batch_sampler import sample_batch
from csps.actors.sampling.token_sampler import TokenSampler, sampler_of
from csps.kernels.arguments import SlotRun, SlotRuns
from csps.kernels.attention import decode_attention
from csps.kernels.merge import merge_into
from csps.protocols.core.errors import CspsError
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import SampledToken
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

FailSequence = Callable[[int, CspsError], None]
"""Function (sequence id, error) that fails a sequence."""


def sample_first_tokens(
    engine: Engine,
    group: SpGroup,
    x_td: Tensor,
    q_thd: Tensor,
    own: OwnKv,
    answered: Callable[[], None],
    fail: FailSequence,
) -> list[SampledToken]:
    """Return the tokens that this rank samples for a step that is about to end.

    Every member must call it, because it answers the queries of the others.

    Args:
        x_td: residual stream of the own rows at the last layer.
        q_thd: their queries there.
        own: their keys and values there; those of history are in the pools.
        answered: called when this member's queries are answered and it has answered others'.
        fail: called with sequences whose token cannot be sampled.
    """
    sampling = [(chunk, row) for chunk, row, owner in _last_rows(group) if owner == group.member]
    rows = [row for _, row in sampling]
    out_thd = _last_attention(engine, group, q_thd[rows], own)
    answered()
    if not sampling:
        return []
    x_td = engine.network.layers[-1].finish(x_td[rows], out_thd.to(q_thd.dtype))
    if engine.tp_rank:
        return []
    logits_tv = engine.network.logits(x_td)
    return _sample(engine, group.step, [index for index, _ in sampling], logits_tv, fail)


def _last_attention(engine: Engine, group: SpGroup, q_thd: Tensor, own: OwnKv) -> Tensor:
    """Return the attention of the own last rows over KV anywhere in the group."""
    last = engine.spec.layers - 1
    window = engine.spec.window_of(last)
    routes, chunks = _last_row_routes(group, window)

    def partial(peer: int | None, q_rhd: Tensor) -> tuple[Tensor, Tensor]:
        asked = [group.step.chunks[index] for index in chunks[peer]]
        runs = SlotRuns(len(asked), list(_computed(group, asked, window)))
        out_rhd, lse_rh = decode_attention(q_rhd, *own, runs, scale=engine.spec.scale)
        if any(group.history_of(chunk, group.member) for chunk in asked):
            history_rhd, history_rh = _history(engine, group, asked, q_rhd, window)
            merge_into(out_rhd, lse_rh.T, history_rhd, history_rh.T)
        return out_rhd, lse_rh

    tags = Tag.LAST_ROW_QUERY, Tag.LAST_ROW_PARTIAL
    heads, head_dim = q_thd.shape[1:]
    exchange = QueryExchange(engine.mesh, routes, q_thd, heads=heads, head_dim=head_dim, tags=tags)
    return exchange_queries(q_thd, exchange, partial, sinks_h=engine.sinks(last))


def _reached(chunk: PrefillChunk, window: int | None) -> Span:
    """Return the positions that the last row of a chunk sees."""
    stop = chunk.start + chunk.length
    return Span(0 if window is None else max(0, stop - window), stop)


def _computed(
    group: SpGroup, chunks: Sequence[PrefillChunk], window: int | None
) -> Iterator[SlotRun]:
    """Yield, for each chunk by its index, which rows of this member its last row sees, as runs."""
    for place, chunk in enumerate(chunks):
        parts = [part for part in group.local if part.chunk is chunk]
        if window is None and parts:
            yield place, parts[0].rows.start, parts[-1].rows.stop
            continue
        for part in parts:
            span = part.span.intersection(_reached(chunk, window))
            if span.length:
                rows = part.within(span).rows
                yield place, rows.start, rows.stop


def _history(
    engine: Engine,
    group: SpGroup,
    chunks: Sequence[PrefillChunk],
    q_rhd: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the attention to KV of each row's chunk that this member held before the step."""
    last = engine.spec.layers - 1
    resident = [
        SlotsOfSequence(
            engine.pool, chunk.sequence_id, [last], group.history_of(chunk, group.member)
        )
        for chunk in chunks
    ]
    hidden = None
    if window is not None:
        hidden = [_reached(chunk, window).start - 1 for chunk in chunks]
    return engine.attend_rows(last, q_rhd, ResidentRows(resident, hidden))


def _sample(
    engine: Engine, step: PrefillStep, indices: Sequence[int], logits_tv: Tensor, fail: FailSequence
) -> list[SampledToken]:
    chunks = [step.chunks[index] for index in indices]
    samplers: dict[int, TokenSampler] = {}
    for row, chunk in enumerate(chunks):
        try:
            samplers[row] = sampler_of(
                step.samplers[chunk.sequence_id], engine.spec.vocab, engine.grammars
            )
        except CspsError as exc:
            fail(chunk.sequence_id, exc)
    first = [chunks[row].first_index for row in samplers]
    samples = sample_batch(list(samplers.values()), logits_tv[list(samplers)], first)
    generated_tokens: list[SampledToken] = []
    for row, index, sample in zip(samplers, first, samples, strict=True):
        if isinstance(sample, CspsError):
            fail(chunks[row].sequence_id, sample)
        else:
            generated_tokens.append(sample.message(chunks[row].sequence_id, index))
    return generated_tokens


def _last_rows(group: SpGroup) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk index, local row at its owner, owner) of every row from which a token is
    sampled. All members are at the same layer, so they yield the same rows."""
    for index, chunk in enumerate(group.step.chunks):
        if chunk.last and group.is_active(chunk):
            owner, row = group.last_row_of(chunk)
            yield index, row, owner


def _last_row_routes(
    group: SpGroup, window: int | None
) -> tuple[QueryRoutes, dict[int | None, list[int]]]:
    """Route last rows to every member that holds KV that they see, history included.

    Returns:
        The routes, and by peer (None for own rows) the chunks whose KV is resident here.
    """
    chunks = group.step.chunks
    mine = [index for index, _, owner in _last_rows(group) if owner == group.member]
    outgoing: dict[int, list[int]] = {}
    resident: dict[int | None, list[int]] = {None: []}
    for index, _, owner in _last_rows(group):
        for member in group.holders_of(chunks[index], _reached(chunks[index], window)):
            if member == group.member:
                peer = None if owner == group.member else group.peers[owner]
                resident.setdefault(peer, []).append(index)
            elif owner == group.member:
                outgoing.setdefault(group.peers[member], []).append(mine.index(index))
    routes = QueryRoutes(
        rows=len(mine),
        resident_here=[mine.index(index) for index in resident[None]],
        outgoing=outgoing,
        incoming={peer: len(chunks_of) for peer, chunks_of in resident.items() if peer is not None},
    )
    return routes, resident
