"""Faults that a change of the scheduler, the router or the ranks could bring in, and who notices.

`plant.py` puts each of them into a copy of the tree and runs the tests that are named with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake in one file."""

    name: str
    """What goes wrong, in one sentence."""
    file: str
    """Its path in the repository."""
    old: str
    """Sound text, which the file has exactly once."""
    new: str
    """What stands in its place."""
    tests: tuple[str, ...]
    """Files or node ids of tests, at least one of which fails."""


FAULTS: tuple[Fault, ...] = (
    # The scheduler
    Fault(
        name="Steps of a sequence that is over are sent all the same.",
        file="services/scheduling/held_steps.py",
        old=(
            "        for step in [it for it in self._steps.held.values() if "
            "it.sequences[0].over]:\n"
            "            self._drop(step)\n"
        ),
        new="",
        tests=(
            "tests/services/scheduling/test_replanning.py::test_who_leaves_between_chunks_gives_everything_back",
        ),
    ),
    Fault(
        name="An instance that keeps fewer slots gives back as many as it keeps.",
        file="services/scheduling/ledger.py",
        old=".used -= held - count",
        new=".used -= count",
        tests=(
            "tests/services/scheduling/test_prefix_storms.py::test_what_is_kept_is_there_and_what_is_read_stays",
        ),
    ),
    Fault(
        name="An owner that has given everything back stays in the ledger.",
        file="services/scheduling/ledger.py",
        old=("        if not held:\n            del self._held[owner]"),
        new=("        if not held and instance < 0:\n            del self._held[owner]"),
        tests=(
            "tests/services/scheduling/test_scheduler_life.py::test_a_request_runs_from_submission_to_its_last_token",
        ),
    ),
    Fault(
        name="A plan is accepted that starts a request twice.",
        file="services/scheduling/plan_checks.py",
        old="        self._started[request.id] = None\n",
        new="        self._started[-request.id] = None\n",
        tests=(
            "tests/services/scheduling/test_scheduler_chunks.py::test_a_good_plan_is_not_applied_when_another_is_bad",
        ),
    ),
    Fault(
        name=(
            "A use of kept KV on the decode gang is not given up when a start "
            "has to wait for slots."
        ),
        file="services/scheduling/plans.py",
        old="for use in (*uses.values(), *holds.values()):",
        new="for use in uses.values():",
        tests=(
            "tests/services/scheduling/test_prefix_storms.py::test_what_is_kept_is_there_and_what_is_read_stays",
        ),
    ),
    Fault(
        name="The uses of kept KV on the two gangs are taken for one another.",
        file="services/scheduling/plans.py",
        old="use, held = uses.get(request.id), holds.get(request.id)",
        new="held, use = uses.get(request.id), holds.get(request.id)",
        tests=(
            "tests/services/scheduling/test_prefix_storms.py::test_what_is_kept_is_there_and_what_is_read_stays",
        ),
    ),
    Fault(
        name="Steps are sent before the reservations of their sequences.",
        file="services/scheduling/plans.py",
        old="            self._turn.emit(command)\n        return step",
        new="            self._turn.commands.insert(0, command)\n        return step",
        tests=(
            "tests/services/scheduling/test_scheduler_life.py::test_a_request_runs_from_submission_to_its_last_token",
        ),
    ),
    Fault(
        name="The front of a segment of kept KV that is cut loses its users.",
        file="services/scheduling/prefix/tree.py",
        old="            users=segment.users,\n",
        new="",
        tests=(
            "tests/services/scheduling/test_prefix_storms.py::test_what_is_kept_is_there_and_what_is_read_stays",
        ),
    ),
    Fault(
        name="A report of a step does not count as a sign of life.",
        file="services/scheduling/request_events.py",
        old=("        self._gangs.hear(event.instance)\n        step = "),
        new="        step = ",
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_a_step_may_wait_for_what_others_of_the_gang_compute",
        ),
    ),
    Fault(
        name="The deadline of a request that has ended fails it once more.",
        file="services/scheduling/requests.py",
        old=("            self._timers.call_off(timer)\n        if request.sequence"),
        new=("            timer.cancelled = False\n        if request.sequence"),
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_a_request_may_be_cancelled_in_its_pause",
        ),
    ),
    Fault(
        name="A request that has found a place still counts as blocked.",
        file="services/scheduling/requests.py",
        old=("        request.blocked_ns = None\n        self._blocked.pop(request.id, None)\n"),
        new="        request.blocked_ns = None\n",
        tests=(
            "tests/services/scheduling/test_scheduler_life.py::test_a_request_waits_for_slots_until_they_come_back",
        ),
    ),
    Fault(
        name="A request gets one attempt more than is allowed.",
        file="services/scheduling/retries.py",
        old="request.attempts < self._limits.max_attempts",
        new="request.attempts <= self._limits.max_attempts",
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_a_request_is_tried_so_often_and_no_more",
        ),
    ),
    Fault(
        name="A request is restarted before its lost sequence is cancelled.",
        file="services/scheduling/retries.py",
        old=(
            "        self._sequences.close(sequence)\n"
            "        request.sequence = None\n"
            "        if request.output_tokens <= 0:\n"
            "            self._requests.end(request)  # all of its tokens were "
            "delivered\n"
            "        elif retryable and self._may_go_on(request):\n"
            "            self._turn.emit(Restart(request=request.id, "
            "sequence=sequence.id, error=error))\n"
        ),
        new=(
            "        request.sequence = None\n"
            "        if request.output_tokens <= 0:\n"
            "            self._sequences.close(sequence)\n"
            "            self._requests.end(request)  # all of its tokens were "
            "delivered\n"
            "        elif retryable and self._may_go_on(request):\n"
            "            self._turn.emit(Restart(request=request.id, "
            "sequence=sequence.id, error=error))\n"
            "            self._sequences.close(sequence)\n"
        ),
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_prefill_lost_before_the_first_token_is_tried_again",
        ),
    ),
    Fault(
        name=("A waiting request of which a token is delivered late drops out of its line."),
        file="services/scheduling/retries.py",
        old=("        elif queued:\n            self._requests.push(request)"),
        new=(
            "        elif queued and request.waiting_since_ns < 0:\n"
            "            self._requests.push(request)"
        ),
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_a_token_delivered_after_the_fault_in_the_same_turn_is_not_drawn_again",
        ),
    ),
    Fault(
        name="A gang does not owe the tokens of a request that rides.",
        file="services/scheduling/sequences.py",
        old="        gang.owing[sequence.id] = self._turn.now_ns\n",
        new="        gang.owing.pop(sequence.id, None)\n",
        tests=(
            "tests/services/scheduling/test_riders.py::test_a_gang_that_owes_a_rider_its_token_and_is_silent_is_reset",
        ),
    ),
    Fault(
        name="The first token of an attempt after a fault is not counted.",
        file="services/scheduling/sequences.py",
        old="sequence.request.draw(sequence.drawn_before + 1)",
        new="sequence.request.draw(1)",
        tests=(
            "tests/services/scheduling/test_replanning.py::test_plans_are_made_again_in_storms",
        ),
    ),
    Fault(
        name="Any number of tokens may land on an instance that waits for a share.",
        file="services/scheduling/sequences.py",
        old="if tokens != expected:",
        new="if expected is None:",
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_a_wrong_amount_of_kv_is_a_fault",
        ),
    ),
    Fault(
        name="Bounds are shifted by one token.",
        file="services/scheduling/step_shares.py",
        old="first, last = max(start, begin), min(stop, begin + piece.length)",
        new="first, last = max(start, begin), min(stop, begin + piece.length - 1)",
        tests=(
            "tests/services/scheduling/test_scheduler_chunks.py::test_later_chunks_know_where_the_kv_of_earlier_ones_lies",
        ),
    ),
    Fault(
        name="A chunk gives its slots back before later chunks have read them.",
        file="services/scheduling/steps.py",
        old=("        if not step.plan:\n            self.ledger.give_back(step.id, instance.id)"),
        new="        self.ledger.give_back(step.id, instance.id)",
        tests=(
            "tests/services/scheduling/test_scheduler_chunks.py::test_slots_of_all_chunks_are_held_until_the_last_is_computed",
        ),
    ),
    Fault(
        name="The last chunk of a plan never gives its slots back.",
        file="services/scheduling/steps.py",
        old="for step in last.plan:",
        new="for step in last.plan[:-1]:",
        tests=(
            "tests/services/scheduling/test_scheduler_chunks.py::test_slots_of_all_chunks_are_held_until_the_last_is_computed",
        ),
    ),
    Fault(
        name=("A step counts only the last of its instances on which another one is before it."),
        file="services/scheduling/steps.py",
        old="step.behind += instance.long_steps > 0",
        new="step.behind = int(instance.long_steps > 0)",
        tests=(
            "tests/services/scheduling/test_replanning.py::test_a_step_is_sent_shortly_before_it_begins",
        ),
    ),
    Fault(
        name="Requests fail for want of gangs by the time that others have waited.",
        file="services/scheduling/watch.py",
        old="since_ns = max(unready_ns, request.waiting_since_ns)",
        new="since_ns = unready_ns",
        tests=(
            "tests/services/scheduling/test_scheduler_faults.py::test_waiting_for_a_gang_has_an_end",
        ),
    ),
    # Its policies
    Fault(
        name=(
            "chunked_prefill: slots of a request that starts are not taken for "
            "the rest of the round."
        ),
        file="services/scheduling/policies/chunked_prefill.py",
        old="            self._overlay.take(placed, output)\n",
        new="            self._overlay.has_room(prompt, output)\n",
        tests=(
            "tests/services/scheduling/test_riders.py::test_whoever_has_room_rides_at_once_in_order_of_admission",
        ),
    ),
    Fault(
        name="chunked_prefill: younger requests pass one that finds no room.",
        file="services/scheduling/policies/chunked_prefill.py",
        old=(
            "                decisions.append(Blocked(request=request.id))\n                break\n"
        ),
        new=(
            "                decisions.append(Blocked(request=request.id))\n"
            "                continue\n"
        ),
        tests=(
            "tests/services/scheduling/test_riders.py::test_when_the_oldest_finds_no_slots_all_wait",
        ),
    ),
    Fault(
        name=("context_parallel: a master that was chosen in this round does not count as one."),
        file="services/scheduling/policies/context_parallel/keepers.py",
        old="        self._mastered[placed.master] += 1\n",
        new="        self._mastered[placed.master] += 0\n",
        tests=(
            "tests/services/scheduling/test_context_parallel.py::test_kv_is_even_to_within_one_token_at_any_time",
        ),
    ),
    Fault(
        name="context_parallel: keepers of an answer take turns from who has most.",
        file="services/scheduling/policies/context_parallel/keepers.py",
        old="turns = sorted(room, key=lambda it: (held.get(it, 0), -room[it]))",
        new="turns = sorted(room, key=lambda it: (-held.get(it, 0), -room[it]))",
        tests=(
            "tests/services/scheduling/test_context_parallel.py::test_kv_is_even_to_within_one_token_at_any_time",
        ),
    ),
    Fault(
        name="csps: the younger of two lines goes first.",
        file="services/scheduling/policies/csps/policy.py",
        old="take_long = long[next_long].id < urgent[next_urgent].id",
        new="take_long = long[next_long].id > urgent[next_urgent].id",
        tests=(
            "tests/services/scheduling/test_csps_policy.py::test_whoever_is_blocked_is_passed_by_what_ends_within_the_bound",
        ),
    ),
    Fault(
        name=(
            "csps: whoever passes somebody is bound by the latest of several "
            "ends instead of the first."
        ),
        file="services/scheduling/policies/csps/policy.py",
        old="end_by_ns < self._end_by_ns:",
        new="end_by_ns > self._end_by_ns:",
        tests=(
            "tests/services/scheduling/test_csps_policy.py::test_nobody_passes_whom_it_would_delay_beyond_the_bound",
        ),
    ),
    Fault(
        name="fixed_sp: instances that are left over form a group of their own.",
        file="services/scheduling/policies/fixed_sp.py",
        old="for start in range(0, len(spots) - sp + 1, sp):",
        new="for start in range(0, len(spots), sp):",
        tests=(
            "tests/services/scheduling/test_fixed_sp.py::test_what_is_left_over_computes_nothing",
        ),
    ),
    Fault(
        name=("fixed_sp: a group that was given a prompt counts as free when it was before."),
        file="services/scheduling/policies/fixed_sp.py",
        old=(
            "                    heapq.heappush(self._queues, "
            "_Queue(group.free_at_ns, queue.number))"
        ),
        new="                    heapq.heappush(self._queues, queue)",
        tests=(
            "tests/services/scheduling/test_fixed_sp.py::test_every_prompt_goes_to_a_group_of_neighbours_short_ones_too",
        ),
    ),
    Fault(
        name="loongserve: a new master is to hold what the old one has drawn.",
        file="services/scheduling/policies/loongserve/masters.py",
        old="first = max(share.start, min(share.stop, seen))",
        new="first = share.start",
        tests=(
            "tests/services/scheduling/loongserve/test_loongserve_regrouping.py::test_what_was_drawn_stays_when_another_master_goes_on",
        ),
    ),
    Fault(
        name=("loongserve: the rows of an instance that is emptied do not cost an iteration each."),
        file="services/scheduling/policies/loongserve/moving.py",
        old="self._iteration_ns * self._rows.get(migration.source, 0)",
        new="self._iteration_ns * self._rows.get(-1, 0)",
        tests=(
            "tests/services/scheduling/loongserve/test_loongserve_regrouping.py::test_moving_takes_what_the_links_say_of_the_kv_that_there_is",
        ),
    ),
    Fault(
        name=(
            "tetris: an instance that holds history but computes nothing is left out of a group."
        ),
        file="services/scheduling/policies/tetris/policy.py",
        old="for it, part in computing if part or it in holding}",
        new="for it, part in computing if part}",
        tests=(
            "tests/services/scheduling/tetris/test_tetris_policy.py::test_who_holds_history_takes_part_without_slots",
        ),
    ),
    Fault(
        name=("tetris: instances count as busy from the beginning of the clock and not from now."),
        file="services/scheduling/policies/tetris/policy.py",
        old="free_ns = [it.free_at_ns - self._now_ns for it in self._spots]",
        new="free_ns = [it.free_at_ns for it in self._spots]",
        tests=(
            "tests/services/scheduling/test_replanning.py::test_plans_are_made_again_in_storms",
        ),
    ),
    # The router
    Fault(
        name="A cancellation overtakes the reservation that it is about.",
        file="services/router/executor.py",
        old="gang is sequence.decode and sequence.reserved_not_yet:",
        new="gang is sequence.decode and sequence.over:",
        tests=("tests/services/test_request_service.py::test_cancelled_while_slots_are_reserved",),
    ),
    Fault(
        name="Slots that a rank refused count as held.",
        file="services/router/executor.py",
        old="if not isinstance(error, DeadlineExceeded | ConnectionLost):",
        new="if isinstance(error, DeadlineExceeded | ConnectionLost):",
        tests=(
            "tests/services/test_request_service.py::test_refused_slots_are_not_counted_as_taken",
        ),
    ),
    Fault(
        name="A cancelled request that was to ride joins all the same.",
        file="services/router/executor.py",
        old=("        if sequence.over:\n            return\n        message = JoinBatch"),
        new="        message = JoinBatch",
        tests=(
            "tests/services/test_riding_requests.py::test_who_is_cancelled_while_slots_are_reserved_never_joins",
        ),
    ),
    Fault(
        name=("A gang is told the number of the request instead of that of its sequence."),
        file="services/router/executor.py",
        old="rid=number, first_token=sequence.last_token",
        new="rid=sequence.running.number, first_token=sequence.last_token",
        tests=(
            "tests/services/test_request_service.py::test_prefill_lost_before_the_first_token_is_tried_again",
        ),
    ),
    Fault(
        name="A moved row does not wait for the instances that it comes to.",
        file="services/router/moves.py",
        old="sequence.unfreed.expect(it for it in members if it not in known)",
        new=("sequence.unfreed.expect(it for it in members if it in known and it not in members)"),
        tests=(
            "tests/services/test_moved_requests.py::test_a_rank_may_free_what_another_has_not_told_to_have_moved",
        ),
    ),
    Fault(
        name="A sequence that a rank has freed is still moved.",
        file="services/router/reports.py",
        old="        sequence.leaving = True\n",
        new="        sequence.leaving = False\n",
        tests=(
            "tests/services/test_moved_requests.py::test_a_request_whose_last_token_is_on_its_way_is_not_moved",
        ),
    ),
    Fault(
        name=("The first token of an attempt after a fault is not told to the scheduler."),
        file="services/router/reports.py",
        old="first = sequence.next_index == sequence.first_index",
        new="first = sequence.next_index == 0",
        tests=(
            "tests/services/test_request_service.py::test_prefill_lost_after_the_first_token_goes_on_with_the_second",
        ),
    ),
    Fault(
        name="A rank that reports landed KV is taken for an instance.",
        file="services/router/reports.py",
        old=(
            "sequence = self._sequences.serving(landed.rid)\n"
            "        instance = instance_id(number, gang.instance_of(rank))"
        ),
        new=(
            "sequence = self._sequences.serving(landed.rid)\n"
            "        instance = instance_id(number, rank)"
        ),
        tests=(
            "tests/services/test_request_service.py::test_decode_takes_over_when_all_kv_has_landed_and_not_before",
        ),
    ),
    Fault(
        name="A retried request forgets when its first token was drawn.",
        file="services/router/running.py",
        old="            first_token=marks.first_token,\n",
        new="",
        tests=(
            "tests/services/test_request_service.py::test_no_first_token_is_predicted_where_it_has_been_drawn",
        ),
    ),
    Fault(
        name="An attempt after a fault numbers its tokens from zero.",
        file="services/router/sequences.py",
        old="        next_index=running.timings.tokens,\n",
        new="        next_index=0,\n",
        tests=(
            "tests/services/test_request_service.py::test_prefill_lost_after_the_first_token_goes_on_with_the_second",
        ),
    ),
    Fault(
        name="A sequence of a lost gang is remembered for ever.",
        file="services/router/sequences.py",
        old=("            sequence.unfreed.clear()\n            self.end(sequence)"),
        new="            self.end(sequence)",
        tests=(
            "tests/services/test_request_service.py::test_nothing_is_remembered_of_a_request_that_its_decode_gang_took_along",
        ),
    ),
    Fault(
        name="Instances that a trimmed step leaves out are never done.",
        file="services/router/step_launch.py",
        old="        for instance in idle:\n",
        new="        for instance in idle[:0]:\n",
        tests=("tests/services/test_request_service.py::test_cancelled_while_slots_are_reserved",),
    ),
    Fault(
        name="A cancelled sequence is sent in the place of one that is wanted.",
        file="services/router/step_launch.py",
        old="self._send_or_fail(rest, gang, [it for it in sequences if not it.over])",
        new="self._send_or_fail(rest, gang, sequences[: len(rest.pieces)])",
        tests=(
            "tests/services/test_request_service.py::test_one_of_a_batch_is_cancelled_while_slots_are_reserved",
        ),
    ),
    Fault(
        name=("The prompt of a rider goes to the rank with the number of its master instance."),
        file="services/router/step_messages.py",
        old="for rank in sequence.decode.ranks_of(common.master):",
        new="for rank in (common.master,):",
        tests=(
            "tests/services/test_riding_requests.py::test_the_prompt_goes_to_the_ranks_of_the_master_and_to_nobody_else",
        ),
    ),
    Fault(
        name="After a fault the tokens drawn before are not computed again.",
        file="services/router/step_messages.py",
        old="    if running.drawn_tokens.size:\n",
        new="    if running.drawn_tokens.size > running.timings.tokens:\n",
        tests=(
            "tests/services/test_request_service.py::test_prefill_lost_after_the_first_token_goes_on_with_the_second",
        ),
    ),
    Fault(
        name="A retried sequence is reserved without the tokens that it has drawn.",
        file="services/router/step_messages.py",
        old=(
            "        drawn=token_bytes(running.drawn_tokens),\n"
            "        sampling=running.generation.sampling,\n"
            "        prompt_tokens=_penalized_tokens(running),\n"
            "        answer"
        ),
        new=(
            '        drawn=b"",\n'
            "        sampling=running.generation.sampling,\n"
            "        prompt_tokens=_penalized_tokens(running),\n"
            "        answer"
        ),
        tests=(
            "tests/services/test_request_service.py::test_prefill_lost_after_the_first_token_goes_on_with_the_second",
        ),
    ),
    # Ranks
    Fault(
        name="KV that is to stay goes when all of it was sent.",
        file="actors/engine/kv_lifetime.py",
        old="sent = rid in self._sent and rid not in self._staying",
        new="sent = rid in self._sent",
        tests=("tests/actors/test_kv_lifetime.py::test_what_stays_goes_when_it_is_cancelled",),
    ),
    Fault(
        name=("Nobody is told that KV has gone after the stream has left a sequence with a step."),
        file="actors/engine/kv_lifetime.py",
        old=("                self._cancelled.add(rid)\n                self._left.add(rid)\n"),
        new="                self._cancelled.add(rid)\n",
        tests=(
            "tests/actors/test_kv_lifetime.py::test_a_sequence_that_the_stream_leaves_while_it_has_a_step_goes_with_it",
        ),
    ),
    Fault(
        name="A sequence with several steps goes after the first one.",
        file="actors/engine/kv_lifetime.py",
        old="        if self._steps[rid]:\n            return False\n        del",
        new="        del",
        tests=(
            "tests/actors/test_kv_lifetime.py::test_an_earlier_chunk_may_take_longer_to_leave_than_the_last",
        ),
    ),
    Fault(
        name=(
            "A token is looked up by its distance from the beginning of a span and not by its step."
        ),
        file="actors/kv_holding.py",
        old=(
            "            rows = (self._positions[run.start : run.stop] - "
            "span.start) // span.step\n"
            "            slots[rows]"
        ),
        new=(
            "            rows = (self._positions[run.start : run.stop] - "
            "span.start) % span.length\n"
            "            slots[rows]"
        ),
        tests=(
            "tests/actors/test_slot_allocator.py::test_tokens_of_a_striped_request_are_one_slice_with_gaps_in_its_positions",
        ),
    ),
    Fault(
        name="Slots that somebody else still has are given away.",
        file="actors/slot_allocator.py",
        old="runs_of(slots[self._holders[slots] == 0])",
        new="runs_of(slots)",
        tests=(
            "tests/actors/test_kv_pool.py::test_what_is_shared_is_free_when_the_last_one_lets_go",
        ),
    ),
    Fault(
        name=("A request that lets go of what it shares lets go of its own slots as well."),
        file="actors/slot_allocator.py",
        old="self._take(rid, holding, SlotSet(holding.shared))",
        new="self._take(rid, holding, SlotSet(holding.runs))",
        tests=(
            "tests/actors/test_kv_pool.py::test_what_is_shared_is_free_when_the_last_one_lets_go",
        ),
    ),
    # What travels between them
    Fault(
        name="An only token counts as one behind which something is decoded.",
        file="protocols/prefill_job.py",
        old="len(self.drawn) // TOKEN_BYTES > 1",
        new="len(self.drawn) // TOKEN_BYTES > 0",
        tests=(
            "tests/services/test_request_service.py::test_an_answer_of_one_token_asks_no_decode_rank_for_anything",
        ),
    ),
    Fault(
        name="The reason for an end belongs to the token number instead of the row.",
        file="protocols/tokens.py",
        old="finish_reasons={row: it.finish_reason",
        new="finish_reasons={it.index: it.finish_reason",
        tests=("tests/protocols/test_tokens.py::test_rows_come_out_as_they_went_in",),
    ),
    Fault(
        name="Log-probabilities of one row go to all rows before it.",
        file="protocols/tokens.py",
        old="known = logprobs.get(row)",
        new="known = logprobs.get(row, logprobs.get(row + 1))",
        tests=("tests/protocols/test_tokens.py::test_rows_come_out_as_they_went_in",),
    ),
    Fault(
        name="A frame may name the reason for an end of a row that it does not have.",
        file="protocols/tokens.py",
        old="if not 0 <= row < rows:",
        new="if not 0 <= row <= rows:",
        tests=("tests/protocols/test_tokens.py::test_what_does_not_fit_together_is_refused",),
    ),
)
