"""Faults that a change of the scheduler, the router or the ranks could bring in, and who notices.

`plant.py` puts each of them into a copy of the tree and runs its test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Mistake in one file."""

    name: str
    """What goes wrong, as a sentence."""
    file: str
    """Path in the repository."""
    old: str
    """Sound text, which the file has exactly once."""
    new: str
    """Text in its place."""
    test: str
    """Test, or file of tests, that fails."""


SCHEDULING = "tests/services/scheduling"
CHUNKS = f"{SCHEDULING}/test_scheduler_chunks.py"
FAULTY = f"{SCHEDULING}/test_scheduler_faults.py"
LIFE = f"{SCHEDULING}/test_scheduler_life.py"
PREFIX_STORMS = f"{SCHEDULING}/test_prefix_storms.py"
PIGGYBACK = f"{SCHEDULING}/test_piggyback.py"
REPLANNING = f"{SCHEDULING}/test_replanning.py"
CORRECTED = f"{SCHEDULING}/test_corrected_ends.py"
PREEMPTION = f"{SCHEDULING}/test_preemption.py"
MOVED = f"{SCHEDULING}/test_scheduler_moves.py"
PLACEMENTS = f"{SCHEDULING}/test_slots_of_placements.py"
REUSE = f"{SCHEDULING}/test_prefix_reuse.py"

SCHEDULER = (
    Fault(
        name="An answer begins before other ranks have reported the prompt's log-probabilities.",
        file="services/router/live_requests.py",
        old="        if known is not None and known.missing:\n",
        new="        if False:\n",
        test="tests/services/test_prompt_logprobs_real_ranks.py"
        "::test_prompt_logprobs_are_those_of_transformers",
    ),
    Fault(
        name="Steps of a sequence that is over are sent all the same.",
        file="services/scheduling/core/steps.py",
        old="            self._drop(step)\n",
        new="            pass\n",
        test=f"{REPLANNING}::test_who_leaves_between_chunks_gives_everything_back",
    ),
    Fault(
        name="An instance that retains fewer tokens frees as many as it retains.",
        file="services/scheduling/state/ledger.py",
        old=".used -= before - count",
        new=".used -= count",
        test=f"{PREFIX_STORMS}::test_what_is_retained_is_there_and_what_is_read_stays",
    ),
    Fault(
        name="An owner that has freed everything stays in the ledger.",
        file="services/scheduling/state/ledger.py",
        old="        if not slots:\n            del self._slots[owner]",
        new="        if not slots and instance < 0:\n            del self._slots[owner]",
        test=f"{LIFE}::test_a_request_runs_from_submission_to_its_last_token",
    ),
    Fault(
        name="A plan is accepted that starts a request twice.",
        file="services/scheduling/core/plan_checks.py",
        old="        self._started[request.id] = None\n",
        new="        self._started[-request.id] = None\n",
        test=f"{CHUNKS}::test_sound_plan_beside_an_unsound_one_is_not_applied",
    ),
    Fault(
        name="The decode gang's reference stays when a start has to wait for slots.",
        file="services/scheduling/core/launcher.py",
        old="for ref in (*prefill_refs.values(), *decode_refs.values()):",
        new="for ref in prefill_refs.values():",
        test=f"{PREFIX_STORMS}::test_what_is_retained_is_there_and_what_is_read_stays",
    ),
    Fault(
        name="References to the prefix caches of the two gangs are taken for one another.",
        file="services/scheduling/core/launcher.py",
        old="prefill_ref, decode_ref = prefill_refs.get(request.id), decode_refs.get(request.id)",
        new="decode_ref, prefill_ref = prefill_refs.get(request.id), decode_refs.get(request.id)",
        test=f"{PREFIX_STORMS}::test_what_is_retained_is_there_and_what_is_read_stays",
    ),
    Fault(
        name="Steps are sent before the reservations of their sequences.",
        file="services/scheduling/core/launcher.py",
        old="            self._round.emit(command)\n        return step",
        new="            self._round.commands.insert(0, command)\n        return step",
        test=f"{LIFE}::test_a_request_runs_from_submission_to_its_last_token",
    ),
    Fault(
        name="The front of a cached segment that is cut loses its references.",
        file="services/scheduling/state/prefix_tree.py",
        old="            refs=segment.refs,\n",
        new="",
        test=f"{PREFIX_STORMS}::test_what_is_retained_is_there_and_what_is_read_stays",
    ),
    Fault(
        name="The report of a step is no sign of life of those that waited for it.",
        file="services/scheduling/core/steps.py",
        old="for waiting in (step, *_waiting_for(step, instance)):",
        new="for waiting in (step,):",
        test=f"{FAULTY}::test_step_that_waits_for_others_of_the_gang_is_not_reset",
    ),
    Fault(
        name="The deadline of a request that has ended fails it once more.",
        file="services/scheduling/core/requests.py",
        old="            self._timers.cancel(timer)\n        if request.sequence",
        new="            timer.cancelled = False\n        if request.sequence",
        test=f"{FAULTY}::test_request_cancelled_in_its_pause_is_over",
    ),
    Fault(
        name="A request that has started still counts as blocked.",
        file="services/scheduling/core/requests.py",
        old="        request.blocked_ns = None\n        self._blocked.pop(request.id, None)\n",
        new="        request.blocked_ns = None\n",
        test=f"{LIFE}::test_request_waits_until_slots_are_free",
    ),
    Fault(
        name="A request gets one attempt more than is allowed.",
        file="services/scheduling/core/faults.py",
        old="request.attempts < self._limits.max_attempts",
        new="request.attempts <= self._limits.max_attempts",
        test=f"{FAULTY}::test_request_is_retried_up_to_the_limit",
    ),
    Fault(
        name="A request is restarted before its lost sequence is cancelled.",
        file="services/scheduling/core/faults.py",
        old=(
            "            self._round.emit("
            "Restart(request_id=request.id, sequence_id=sequence.id, error=error))\n"
        ),
        new=(
            "            self._round.commands.insert(0, "
            "Restart(request_id=request.id, sequence_id=sequence.id, error=error))\n"
        ),
        test=f"{FAULTY}::test_prefill_lost_before_the_first_token_is_retried",
    ),
    Fault(
        name="A waiting request of which a token is delivered late drops out of its queue.",
        file="services/scheduling/core/faults.py",
        old="        elif queued:\n            self._requests.push(request)",
        new=(
            "        elif queued and request.waiting_since_ns < 0:\n"
            "            self._requests.push(request)"
        ),
        test=f"{FAULTY}::test_token_delivered_after_a_fault_of_the_same_round_is_not_sampled_again",
    ),
    Fault(
        name="A gang does not owe the tokens of a piggybacked request.",
        file="services/scheduling/core/sequences.py",
        old="        self._owe(sequence)\n        return self._reuse",
        new="        return self._reuse",
        test=f"{PIGGYBACK}::test_a_gang_that_owes_a_piggybacked_request_its_token_and_is_silent_is_reset",
    ),
    Fault(
        name="The first token of an attempt after a fault is not counted.",
        file="services/scheduling/core/sequences.py",
        old="sequence.request.note_generated(sequence.generated_before + 1)",
        new="sequence.request.note_generated(1)",
        test=f"{REPLANNING}::test_plans_are_made_again_in_storms",
    ),
    Fault(
        name="An instance that waits for a slice may receive any number of tokens.",
        file="services/scheduling/core/sequences.py",
        old="if tokens != expected:",
        new="if expected is None:",
        test=f"{FAULTY}::test_wrong_number_of_received_tokens_is_a_fault",
    ),
    Fault(
        name="Bounds are shifted by one token.",
        file="services/scheduling/deciding/step_layout.py",
        old="first, last = max(start, begin), min(stop, begin + chunk.length)",
        new="first, last = max(start, begin), min(stop, begin + chunk.length - 1)",
        test=f"{CHUNKS}::test_later_chunks_know_where_the_kv_of_earlier_ones_lies",
    ),
    Fault(
        name="A chunk frees its slots before later chunks have read them.",
        file="services/scheduling/core/steps.py",
        old=("        if not step.plan_steps:\n            self.ledger.free(step.id, instance.id)"),
        new="        self.ledger.free(step.id, instance.id)",
        test=f"{CHUNKS}::test_slots_of_all_chunks_are_taken_until_the_last_is_computed",
    ),
    Fault(
        name="The last chunk of a plan never frees its slots.",
        file="services/scheduling/core/steps.py",
        old="for step in last.plan_steps:",
        new="for step in last.plan_steps[:-1]:",
        test=f"{CHUNKS}::test_slots_of_all_chunks_are_taken_until_the_last_is_computed",
    ),
    Fault(
        name="A step is behind another one on the last of its instances only.",
        file="services/scheduling/core/steps.py",
        old="step.behind += instance.low_priority_steps > 0",
        new="step.behind = int(instance.low_priority_steps > 0)",
        test=f"{REPLANNING}::test_a_step_is_sent_shortly_before_it_begins",
    ),
    Fault(
        name="Requests fail without gangs by the time that others have waited.",
        file="services/scheduling/core/faults.py",
        old="since_ns = max(missing_ns, request.waiting_since_ns)",
        new="since_ns = missing_ns",
        test=f"{FAULTY}::test_request_that_waits_too_long_for_gangs_fails",
    ),
)

UNSENT_STEPS = (
    Fault(
        name="A step is sent before an older one of the same instance.",
        file="services/scheduling/core/steps.py",
        old="if due and waiting.keys().isdisjoint(step.undone):",
        new="if due:",
        test=f"{REPLANNING}::test_a_step_is_not_sent_before_an_older_one_of_the_same_instance",
    ),
    Fault(
        name="A step is sent with the end that was predicted when it was planned.",
        file="services/scheduling/core/steps.py",
        old="msgspec.structs.replace(command, ends_ns=step.end_ns)",
        new="command",
        test=f"{REPLANNING}::test_a_step_whose_turn_has_come_early_is_sent_at_once",
    ),
    Fault(
        name="Steps are sent when they begin and not ahead.",
        file="services/scheduling/core/steps.py",
        old="return step.begin_ns - plan.ahead_ns",
        new="return step.begin_ns",
        test=f"{REPLANNING}::test_a_step_is_sent_shortly_before_it_begins",
    ),
    Fault(
        name="A step may begin before it was sent, since it was planned before.",
        file="services/scheduling/core/steps.py",
        old="        step.launched_ns = self._round.now_ns\n",
        new="",
        test=f"{REPLANNING}::test_a_step_begins_no_sooner_than_it_was_sent",
    ),
    Fault(
        name="The first low-priority step of an instance waits for its predicted begin.",
        file="services/scheduling/core/steps.py",
        old="due = not step.behind or self._send_at_ns(step) <= self._round.now_ns",
        new="due = self._send_at_ns(step) <= self._round.now_ns",
        test=(
            f"{REPLANNING}"
            "::test_a_step_that_nothing_but_high_priority_steps_precede_is_sent_at_once"
        ),
    ),
    Fault(
        name="A new plan goes behind all others.",
        file="services/scheduling/core/launcher.py",
        old="            self._steps.move_to_end(step)\n",
        new="            pass\n",
        test=f"{REPLANNING}::test_a_new_plan_keeps_its_place_in_the_line",
    ),
    Fault(
        name="A new plan begins after the time of the old one.",
        file="services/scheduling/core/launcher.py",
        old="        self._steps.requeue(sequence.prefill)\n",
        new="",
        test=f"{REPLANNING}::test_a_new_plan_begins_without_the_time_of_the_old_one",
    ),
    Fault(
        name="Younger steps do not move up when a sequence leaves.",
        file="services/scheduling/core/steps.py",
        old="        self._steps.requeue(step.gang)\n",
        new="",
        test=f"{REPLANNING}::test_younger_steps_move_up_when_a_sequence_leaves",
    ),
)

PREDICTED_ENDS = (
    Fault(
        name="A step that takes another time than predicted changes no other prediction.",
        file="services/scheduling/core/steps.py",
        old="            elif ended_ns != step.end_ns:\n",
        new="            elif ended_ns < 0:\n",
        test=CORRECTED,
    ),
    Fault(
        name="A step begins when the first of its instances comes to it.",
        file="services/scheduling/core/steps.py",
        old="step.begin_ns = max([free_ns[member] for member in step.undone], default=now_ns)",
        new="step.begin_ns = min([free_ns[member] for member in step.undone], default=now_ns)",
        test=CORRECTED,
    ),
    Fault(
        name="A running step begins anew with each correction.",
        file="services/scheduling/core/steps.py",
        old="            if step.behind:\n                step.begin_ns = max(",
        new="            if step.undone:\n                step.begin_ns = max(",
        test=CORRECTED,
    ),
    Fault(
        name="A correction leaves out the time of outstanding steps.",
        file="services/scheduling/core/steps.py",
        old="                free_ns[member] = step.end_ns\n",
        new="                free_ns[member] = now_ns\n",
        test=CORRECTED,
    ),
    Fault(
        name="A step ends when its KV was sent and not when it was computed.",
        file="services/scheduling/core/steps.py",
        old="return min(now_ns, step.begin_ns + took_ns)",
        new="return now_ns",
        test=f"{LIFE}::test_a_step_begins_when_the_one_before_it_is_computed",
    ),
    Fault(
        name="A step begins when it is first on the instance that reported last.",
        file="services/scheduling/core/steps.py",
        old="step.first_ns = max(step.first_ns, at_ns)",
        new="step.first_ns = at_ns",
        test=f"{REPLANNING}::test_a_step_begins_when_all_before_it_were_computed",
    ),
    Fault(
        name="A step begins before it is sent.",
        file="services/scheduling/core/steps.py",
        old="step.begin_ns = max(step.first_ns, step.launched_ns)",
        new="step.begin_ns = step.first_ns",
        test=CORRECTED,
    ),
    Fault(
        name="A late step ends in the past.",
        file="services/scheduling/core/steps.py",
        old="step.end_ns = max(now_ns, step.begin_ns + step.predicted_ns)",
        new="step.end_ns = step.begin_ns + step.predicted_ns",
        test=f"{REPLANNING}::test_steps_behind_a_late_one_are_sent_later",
    ),
    Fault(
        name="The measured time of a high-priority step changes no prediction.",
        file="services/scheduling/core/steps.py",
        old="free_at_ns = instance.free_at_ns + error_ns if instance.steps else now_ns",
        new="free_at_ns = instance.free_at_ns if instance.steps else now_ns",
        test=CORRECTED,
    ),
    Fault(
        name="The measured time of a high-priority step is not charged to delayed steps.",
        file="services/scheduling/core/steps.py",
        old="            other.delayed_ns += error_ns\n",
        new="            other.delayed_ns += 0\n",
        test=f"{PREEMPTION}::test_what_was_measured_takes_the_place_of_what_was_predicted",
    ),
    Fault(
        name="The measured time of a high-priority step is not charged to waiting requests.",
        file="services/scheduling/core/steps.py",
        old="            instance.preemption_delay_ns += error_ns\n",
        new="            instance.preemption_delay_ns += 0\n",
        test=f"{PREEMPTION}::test_what_was_measured_takes_the_place_of_what_was_predicted",
    ),
    Fault(
        name="An instance with preempted steps is free as soon as one of them ends.",
        file="services/scheduling/core/steps.py",
        old="left_ns = sum(other.predicted_ns for other in instance.steps.values())",
        new="left_ns = 0",
        test=f"{LIFE}::test_a_step_ends_after_those_that_a_short_prompt_has_delayed",
    ),
    Fault(
        name="A high-priority step delays other high-priority steps.",
        file="services/scheduling/core/steps.py",
        old="for other in instance.steps.values() if not other.high_priority)",
        new="for other in instance.steps.values())",
        test=PREEMPTION,
    ),
)

MOVES = (
    Fault(
        name="A move names the old master.",
        file="services/scheduling/core/sequences.py",
        old="slices=placement.slices, master=placement.master, answer=placement.answer",
        new="slices=placement.slices, master=sequence.master_id, answer=placement.answer",
        test=f"{MOVED}::test_move_names_the_placement_that_the_policy_chose",
    ),
    Fault(
        name="A move takes no slots at a new master that stores nothing else.",
        file="services/scheduling/core/sequences.py",
        old="            slots.setdefault(instance, 0)\n",
        new="            pass\n",
        test=f"{MOVED}::test_moving_sequence_has_slots_in_both_places",
    ),
    Fault(
        name="A move takes no slots.",
        file="services/scheduling/core/sequences.py",
        old="            slots[instance] += count\n",
        new="            slots[instance] += 0\n",
        test=f"{MOVED}::test_moving_sequence_has_slots_in_both_places",
    ),
    Fault(
        name="A moved sequence keeps its master.",
        file="services/scheduling/core/sequences.py",
        old="        sequence.master = self._gangs.instances[placement.master]\n",
        new="",
        test=f"{MOVED}::test_moved_sequence_is_sampled_by_its_new_master",
    ),
    Fault(
        name="The answer of a moved sequence stays where it was.",
        file="services/scheduling/core/sequences.py",
        old="sequence.slices, sequence.answer = placement.slices, placement.answer",
        new="sequence.slices = placement.slices",
        test=f"{MOVED}::test_moved_sequence_is_sampled_by_its_new_master",
    ),
    Fault(
        name="A move takes slots for KV that is there already.",
        file="services/scheduling/state/ledger.py",
        old="tokens = sum(rest.length for rest in rest_of(kv_slice.span, resident))",
        new="tokens = kv_slice.tokens",
        test=f"{PLACEMENTS}::test_move_needs_a_slot_for_each_position_that_is_not_there_yet",
    ),
    Fault(
        name="A move takes slots for the part of an answer that its master stores already.",
        file="services/scheduling/state/ledger.py",
        old="    if not sequence.answer:\n        present",
        new="    if not sequence.answer and not sequence.slices:\n        present",
        test=f"{PLACEMENTS}::test_move_needs_a_slot_for_each_position_that_is_not_there_yet",
    ),
    Fault(
        name="A sequence that is moving is moved once more.",
        file="services/scheduling/core/plan_checks.py",
        old="assert not sequence.is_moving, ",
        new="assert sequence.id, ",
        test=f"{MOVED}::test_sequence_is_moved_again_only_when_it_has_moved",
    ),
)

WAITING = (
    Fault(
        name="A restarted request waits from its admission on.",
        file="services/scheduling/core/requests.py",
        old="        request.waiting_since_ns = self._round.now_ns\n",
        new="",
        test=f"{FAULTY}::test_restarted_request_waits_for_gangs_from_its_restart_on",
    ),
    Fault(
        name="A request is blocked only since it was found to be.",
        file="services/scheduling/core/requests.py",
        old="return max(request.waiting_since_ns, now_ns if since_ns is None else since_ns)",
        new="return now_ns",
        test=f"{PREEMPTION}::test_a_request_is_blocked_since_it_waits_in_a_blocked_queue",
    ),
    Fault(
        name="A request is blocked since the queue is, although it came later.",
        file="services/scheduling/core/requests.py",
        old="return max(request.waiting_since_ns, now_ns if since_ns is None else since_ns)",
        new="return now_ns if since_ns is None else since_ns",
        test=f"{PREEMPTION}::test_a_request_is_blocked_since_it_waits_in_a_blocked_queue",
    ),
    Fault(
        name="A queue that was blocked once stays blocked.",
        file="services/scheduling/core/requests.py",
        old="            self._blocked_since_ns = None\n        elif",
        new="            pass\n        elif",
        test=f"{PREEMPTION}::test_a_queue_that_moved_on_is_blocked_anew",
    ),
    Fault(
        name="A queue is blocked anew in each round.",
        file="services/scheduling/core/requests.py",
        old="        elif since_ns is None:\n            self._blocked_since_ns",
        new="        else:\n            self._blocked_since_ns",
        test=f"{PREEMPTION}::test_a_request_is_blocked_since_it_waits_in_a_blocked_queue",
    ),
    Fault(
        name="Tokens that were delivered before a failure are not counted.",
        file="services/scheduling/core/scheduler.py",
        old=(
            "        self._retries.delivered(event.sequence_id, event.generated_tokens)\n        if"
        ),
        new="        if",
        test=f"{FAULTY}::test_tokens_generated_before_several_faults_add_up",
    ),
    Fault(
        name="Tokens that were delivered after a failure end the pause.",
        file="services/scheduling/core/faults.py",
        old="        elif queued:\n",
        new="        else:\n",
        test=(
            f"{FAULTY}"
            "::test_token_delivered_after_a_failure_of_the_same_round_does_not_end_the_pause"
        ),
    ),
    Fault(
        name="Tokens that were delivered after a fault are not counted.",
        file="services/scheduling/core/faults.py",
        old=(
            "        request.note_generated(generated_tokens)\n"
            "        if request.output_tokens <= 0:"
        ),
        new="        if request.output_tokens <= 0:",
        test=f"{FAULTY}::test_token_delivered_after_a_fault_of_the_same_round_is_not_sampled_again",
    ),
    Fault(
        name="A request whose answer ended after a fault of the same round is tried again.",
        file="services/scheduling/core/faults.py",
        old="            self._requests.end(sequence.request)\n",
        new="            pass\n",
        test=f"{FAULTY}::test_answer_that_ended_early_after_a_fault_of_the_same_round_is_over",
    ),
    Fault(
        name="A request may have as many positions as the gang with more of them.",
        file="services/scheduling/state/state.py",
        old="return min(self.prefill.max_positions, self.decode.max_positions)",
        new="return max(self.prefill.max_positions, self.decode.max_positions)",
        test=(
            f"{SCHEDULING}/test_scheduler_admission.py"
            "::test_request_with_more_tokens_than_positions_is_not_placed"
        ),
    ),
)

REUSED_KV = (
    Fault(
        name="A sequence waits for KV that it reuses.",
        file="services/scheduling/core/sequences.py",
        old="unreceived = tokens_on(own(placement.slices))",
        new="unreceived = tokens_on(placement.slices)",
        test=f"{REUSE}::test_next_request_receives_what_its_decode_gang_lacks",
    ),
    Fault(
        name="The block of the last token, which has no KV, is retained.",
        file="services/scheduling/core/sequences.py",
        old="whole = (prompt + generated_tokens - 1) //",
        new="whole = (prompt + generated_tokens) //",
        test=f"{REUSE}::test_block_of_the_last_token_is_not_retained",
    ),
    Fault(
        name="Reused KV takes slots.",
        file="services/scheduling/state/ledger.py",
        old="            0 if kv_slice.source else kv_slice.tokens\n",
        new="            kv_slice.tokens\n",
        test=(
            f"{PLACEMENTS}::test_reservation_has_a_slot_for_each_position_that_nobody_has_cached"
        ),
    ),
    Fault(
        name="A request reuses all of its prompt.",
        file="services/scheduling/state/prefix_cache.py",
        old="found = self.beginning(request, gang, request.prompt_tokens - 1)",
        new="found = self.beginning(request, gang, request.prompt_tokens)",
        test=f"{REUSE}::test_last_token_of_a_prompt_is_computed_even_if_it_is_cached",
    ),
    Fault(
        name="A retried request reuses KV.",
        file="services/scheduling/state/prefix_cache.py",
        old="if not request.hashes or request.attempts:",
        new="if not request.hashes:",
        test=f"{REUSE}::test_retried_request_computes_all_of_its_prompt",
    ),
    Fault(
        name="KV that an instance could not read from its files is reused.",
        file="services/scheduling/core/restores.py",
        old="restore.good = restore.good and event.tokens == expected",
        new="restore.good = restore.good and expected >= 0",
        test=f"{SCHEDULING}/test_restores.py::test_a_request_computes_what_could_not_be_read",
    ),
    Fault(
        name="Requests that came before their gang do not wait for the list of its files.",
        file="services/scheduling/core/restores.py",
        old="if not (unlisted and _may_read(request))\n",
        new="if True\n",
        test=f"{SCHEDULING}/test_restores.py::"
        "test_a_request_that_came_before_its_gang_waits_for_the_list_of_its_files",
    ),
    Fault(
        name="What is read behind a front is retained before the front is computed.",
        file="services/scheduling/core/restores.py",
        old="if restore.took_ns is None or not restore.front_over:",
        new="if restore.took_ns is None:",
        test=f"{SCHEDULING}/test_restores.py::"
        "test_a_request_starts_behind_its_front_and_what_was_read",
    ),
    Fault(
        name="A prompt whose front kills its gang has one computed by the next gang, too.",
        file="services/scheduling/core/restores.py",
        old="request.restored = front_started or request.lost_restores > 1",
        new="request.restored = False",
        test=f"{SCHEDULING}/test_restores.py::"
        "test_a_prompt_whose_front_kills_its_gang_kills_one_more",
    ),
    Fault(
        name="The beginning of a prompt, computed while the rest is read, is sampled.",
        file="services/scheduling/core/launcher.py",
        old="== request.prompt_tokens and not request.front,",
        new="== request.prompt_tokens,",
        test=f"{PREFIX_STORMS}::test_what_is_read_follows_fronts_that_were_computed_meanwhile",
    ),
    Fault(
        name="Where a prompt leaves a saved run, the rest of the run is read as well.",
        file="services/scheduling/state/saved_runs.py",
        old="slices += within(self._placed(run), span)",
        new="slices += self._placed(run)",
        test=f"{SCHEDULING}/test_restores.py::test_where_a_prompt_leaves_a_run_another_one_goes_on",
    ),
    Fault(
        name="A changed file of KV is read.",
        file="actors/kv_cache/kv_files.py",
        old="if blake2b(before, digest_size=DIGEST_BYTES).digest() != digest:",
        new="if not digest:",
        test="tests/actors/test_kv_files.py::test_changed_files_are_refused_and_removed",
    ),
    Fault(
        name="The rows of a chunk that begins late are those of an earlier one.",
        file="services/scheduling/deciding/step_layout.py",
        old="offset = chunk.start - begin",
        new="offset = -begin",
        test=f"{SCHEDULING}/test_ring_rows.py::test_the_bounds_cut_all_chunks_laid_end_to_end",
    ),
    Fault(
        name="The rows of a chunk begin with the step's.",
        file="services/scheduling/deciding/step_layout.py",
        old="        begin += chunk.length\n",
        new="        begin += 0\n",
        test=f"{SCHEDULING}/test_ring_rows.py::test_the_bounds_cut_all_chunks_laid_end_to_end",
    ),
)

POLICIES = (
    Fault(
        name="chunked_prefill: slots of a request that starts stay free for the round.",
        file="services/scheduling/policies/chunked_prefill.py",
        old="            self._overlay.take(placed, output)\n",
        new="            self._overlay.has_room(prompt, output)\n",
        test=f"{PIGGYBACK}::test_whoever_has_room_is_piggybacked_at_once_in_order_of_admission",
    ),
    Fault(
        name="chunked_prefill: younger requests pass one without enough slots.",
        file="services/scheduling/policies/chunked_prefill.py",
        old="request_id=request.id))\n                break\n",
        new="request_id=request.id))\n                continue\n",
        test=f"{PIGGYBACK}::test_when_the_oldest_finds_no_slots_all_wait",
    ),
    Fault(
        name="context_parallel: a sequence that starts in the round does not count at its master.",
        file="services/scheduling/policies/context_parallel/pair.py",
        old="        self._mastered[placed.master] += 1\n",
        new="        self._mastered[placed.master] += 0\n",
        test=f"{SCHEDULING}/test_context_parallel.py::test_kv_is_even_to_within_one_token_at_any_time",
    ),
    Fault(
        name="context_parallel: the holder with most tokens gets the first one of an answer.",
        file="services/scheduling/policies/context_parallel/pair.py",
        old="sorted(room, key=lambda instance: (resident.get(instance, 0), -room[instance]))",
        new="sorted(room, key=lambda instance: (-resident.get(instance, 0), -room[instance]))",
        test=f"{SCHEDULING}/test_context_parallel.py::test_kv_is_even_to_within_one_token_at_any_time",
    ),
    Fault(
        name="csps: the younger of the heads of two queues goes first.",
        file="services/scheduling/policies/csps/policy.py",
        old="take_long = order_key(long[next_long]) < order_key(short[next_short])",
        new="take_long = order_key(long[next_long]) > order_key(short[next_short])",
        test=f"{SCHEDULING}/test_csps_policy.py::test_whoever_is_blocked_is_passed_by_what_ends_within_the_bound",
    ),
    Fault(
        name="csps: whoever passes others is bound by the latest of their bounds.",
        file="services/scheduling/policies/csps/policy.py",
        old="end_by_ns < self._end_by_ns:",
        new="end_by_ns > self._end_by_ns:",
        test=f"{SCHEDULING}/test_csps_policy.py::test_nobody_passes_whom_it_would_delay_beyond_the_bound",
    ),
    Fault(
        name="fixed_sp: instances that are left over form a group of their own.",
        file="services/scheduling/policies/fixed_sp.py",
        old="for start in range(0, len(candidates) - sp + 1, sp):",
        new="for start in range(0, len(candidates), sp):",
        test=f"{SCHEDULING}/test_fixed_sp.py::test_what_is_left_over_computes_nothing",
    ),
    Fault(
        name="fixed_sp: a group that was given a prompt is free as early as before.",
        file="services/scheduling/policies/fixed_sp.py",
        old="heapq.heappush(self._queues, _Queue(group.free_at_ns, queue.group))",
        new="heapq.heappush(self._queues, queue)",
        test=f"{SCHEDULING}/test_fixed_sp.py::test_every_prompt_goes_to_a_group_of_neighbours_short_ones_too",
    ),
    Fault(
        name="loongserve: a new master is to store what the old one has sampled.",
        file="services/scheduling/policies/loongserve/scaling.py",
        old="first = max(kv_slice.start, min(kv_slice.stop, seen))",
        new="first = kv_slice.start",
        test=f"{SCHEDULING}/loongserve/test_loongserve_regrouping.py::test_what_was_generated_stays_when_another_master_goes_on",
    ),
    Fault(
        name="loongserve: the sequences of an instance that is emptied cost no iterations.",
        file="services/scheduling/policies/loongserve/allocation.py",
        old="self._iteration_ns * self._sequences.get(migration.source, 0)",
        new="self._iteration_ns * self._sequences.get(-1, 0)",
        test=f"{SCHEDULING}/loongserve/test_loongserve_regrouping.py::test_moving_takes_what_the_links_say_of_the_kv_that_there_is",
    ),
    Fault(
        name="tetris: an instance that holds history but computes nothing is not in the group.",
        file="services/scheduling/policies/tetris/policy.py",
        old="                if size or member in holding\n",
        new="                if size\n",
        test=f"{SCHEDULING}/tetris/test_tetris_policy.py::test_who_holds_history_takes_part_without_slots",
    ),
    Fault(
        name="tetris: instances are busy from the beginning of the clock and not from now.",
        file="services/scheduling/policies/tetris/policy.py",
        old="free_ns = [candidate.free_at_ns - self._now_ns for candidate in self._candidates]",
        new="free_ns = [candidate.free_at_ns for candidate in self._candidates]",
        test=f"{REPLANNING}::test_plans_are_made_again_in_storms",
    ),
)

SERVICE = "tests/services/test_request_service.py"
MOVED_REQUESTS = "tests/services/test_moved_requests.py"
PIGGYBACKED = "tests/services/test_piggyback_requests.py"
CANCELLED_WHILE_RESERVED = (
    f"{SERVICE}::test_a_request_cancelled_while_slots_are_reserved_frees_them"
)
SECOND_TOKEN = (
    f"{SERVICE}::test_a_request_continues_with_the_second_token_if_prefill_dies_after_the_first"
)

ROUTER = (
    Fault(
        name="A cancellation overtakes the reservation that it is about.",
        file="services/router/dispatch.py",
        old="gang is sequence.decode and sequence.reservation_pending:",
        new="gang is sequence.decode and sequence.over:",
        test=CANCELLED_WHILE_RESERVED,
    ),
    Fault(
        name="Slots that a rank refused count as taken.",
        file="services/router/dispatch.py",
        old="if not isinstance(error, DeadlineExceeded | ConnectionLost):",
        new="if isinstance(error, DeadlineExceeded | ConnectionLost):",
        test=f"{SERVICE}::test_refused_slots_are_counted_as_free",
    ),
    Fault(
        name="A cancelled request that was to be piggybacked joins all the same.",
        file="services/router/dispatch.py",
        old="        if sequence.over:\n            return\n        message = ",
        new="        message = ",
        test=f"{PIGGYBACKED}::test_a_request_cancelled_while_slots_are_reserved_never_joins",
    ),
    Fault(
        name="A gang is told the id of the request instead of that of its sequence.",
        file="services/router/dispatch.py",
        old="sequence_id=sequence_id,\n                    first_token=",
        new="sequence_id=sequence.handle.request_id,\n                    first_token=",
        test=f"{SERVICE}::test_a_request_is_retried_if_prefill_dies_before_the_first_token",
    ),
    Fault(
        name="A moved sequence does not wait for the instances that it comes to.",
        file="services/router/lowering.py",
        old="expect(member for member in move.instances if member not in known)",
        new="expect(member for member in move.instances if member in ())",
        test=f"{MOVED_REQUESTS}"
        "::test_a_rank_may_free_a_sequence_before_another_acknowledges_its_move",
    ),
    Fault(
        name="A sequence that a rank has freed is still moved.",
        file="services/router/live_requests.py",
        old="        sequence.decode_ended = True\n",
        new="        sequence.decode_ended = False\n",
        test=f"{MOVED_REQUESTS}::test_a_request_whose_last_token_was_sampled_is_not_moved",
    ),
    Fault(
        name="The scheduler does not learn of the first token of an attempt after a fault.",
        file="services/router/live_requests.py",
        old="first = sequence.next_index == sequence.first_index",
        new="first = sequence.next_index == 0",
        test=SECOND_TOKEN,
    ),
    Fault(
        name="A rank that reports received KV is taken for an instance.",
        file="services/router/rank_notifications.py",
        old=(
            "serving(received.sequence_id)\n"
            "        instance = instance_id(gang_number, gang.instance_of(rank))"
        ),
        new=("serving(received.sequence_id)\n        instance = instance_id(gang_number, rank)"),
        test=f"{SERVICE}::test_decode_starts_once_all_kv_is_received",
    ),
    Fault(
        name="A retried request forgets when its first token was sampled.",
        file="services/requests/request_handle.py",
        old="            first_token=marks.first_token,\n",
        new="",
        test=f"{SERVICE}::test_a_sampled_first_token_is_not_predicted_again",
    ),
    Fault(
        name="An attempt after a fault numbers its tokens from zero.",
        file="services/router/live_sequences.py",
        old="        next_index=handle.timings.tokens,\n",
        new="        next_index=0,\n",
        test=SECOND_TOKEN,
    ),
    Fault(
        name="A sequence of a lost gang is never forgotten.",
        file="services/router/live_requests.py",
        old="            sequence.pending_free.clear()\n            self.end(sequence)",
        new="            self.end(sequence)",
        test=f"{SERVICE}::test_a_dead_decode_gangs_sequences_are_forgotten",
    ),
    Fault(
        name="Instances that only cancelled sequences of a step need are never done.",
        file="services/router/dispatch.py",
        old="self._report_done(command.step, idle)",
        new="self._report_done(command.step, idle[:0])",
        test=CANCELLED_WHILE_RESERVED,
    ),
    Fault(
        name="A cancelled sequence is sent in the place of one that is wanted.",
        file="services/router/dispatch.py",
        old="[sequence for sequence in sequences if not sequence.over],\n",
        new="sequences[: len(rest.chunks)],\n",
        test=f"{SERVICE}::test_a_batch_runs_without_the_request_cancelled_while_slots_were_reserved",
    ),
    Fault(
        name="The prompt of a piggybacked request goes to the rank with its master's number.",
        file="services/router/lowering.py",
        old="for rank in sequence.decode.ranks_of(common.master):",
        new="for rank in (common.master,):",
        test=f"{PIGGYBACKED}::test_the_prompt_goes_to_the_ranks_of_the_master_only",
    ),
    Fault(
        name="After a fault the generated tokens are not computed again.",
        file="services/router/lowering.py",
        old="    if handle.generated_tokens.size:\n",
        new="    if handle.generated_tokens.size > handle.timings.tokens:\n",
        test=SECOND_TOKEN,
    ),
    Fault(
        name="A retried sequence is sampled as if nothing had been generated.",
        file="services/router/live_sequences.py",
        old="generated_tokens=token_bytes(generated),",
        new='generated_tokens=b"",',
        test=SECOND_TOKEN,
    ),
)

EVENTS = "tests/services/test_scheduler_events.py"
PENDING = "tests/services/test_pending_ranks.py"
ALL_ATTEMPTS = f"{EVENTS}::test_an_end_counts_the_tokens_of_all_attempts"
ALL_RANKS = f"{EVENTS}::test_reports_of_all_ranks_of_an_instance_are_one_event"
NEW_MASTER = f"{MOVED_REQUESTS}::test_a_token_of_the_new_master_may_arrive_before_one_of_the_old"

REPORTS = (
    Fault(
        name="A finished answer counts the tokens of its last attempt only.",
        file="services/router/live_requests.py",
        old="generated_tokens=sequence.next_index,\n                    hashes",
        new=(
            "generated_tokens=sequence.next_index - sequence.first_index,\n"
            "                    hashes"
        ),
        test=ALL_ATTEMPTS,
    ),
    Fault(
        name="A failed sequence counts the tokens of former attempts only.",
        file="services/router/live_requests.py",
        old="generated_tokens=sequence.next_index,\n                error",
        new="generated_tokens=sequence.first_index,\n                error",
        test=ALL_ATTEMPTS,
    ),
    Fault(
        name="The last chunk of a retried prompt does not sample a token.",
        file="services/scheduling/core/launcher.py",
        old="planned.length == request.prompt_tokens and",
        new="planned.length == request.prompt_tokens - request.generated_tokens and",
        test=ALL_ATTEMPTS,
    ),
    Fault(
        name="A rank that frees slots is taken for an instance.",
        file="services/router/rank_notifications.py",
        old=(
            "instance = instance_id(gang_number, gang.instance_of(rank))\n"
            "            self._requests.free("
        ),
        new="instance = instance_id(gang_number, rank)\n            self._requests.free(",
        test=ALL_RANKS,
    ),
    Fault(
        name="A rank that reports a step is taken for an instance.",
        file="services/router/rank_notifications.py",
        old=(
            "unpack(PrefillDone, payload)\n"
            "        instance = instance_id(gang_number, gang.instance_of(rank))"
        ),
        new=("unpack(PrefillDone, payload)\n        instance = instance_id(gang_number, rank)"),
        test=ALL_RANKS,
    ),
    Fault(
        name="A heartbeat of a rank is taken for an instance's.",
        file="services/router/rank_notifications.py",
        old=(
            "self._note_heartbeat(gang_number, gang.instance_of(rank))\n"
            "                for token in"
        ),
        new="self._note_heartbeat(gang_number, rank)\n                for token in",
        test=ALL_RANKS,
    ),
    Fault(
        name="A token that a new master sends early is dropped.",
        file="services/router/live_requests.py",
        old="            sequence.move.early[token.index] = token\n",
        new="            sequence.move.early.pop(token.index, None)\n",
        test=NEW_MASTER,
    ),
    Fault(
        name="A token that a new master sent early is kept back for ever.",
        file="services/router/live_requests.py",
        old="            self.deliver(sequence.move.early.pop(sequence.next_index))\n",
        new="            sequence.move.early.pop(sequence.next_index)\n",
        test=NEW_MASTER,
    ),
    Fault(
        name="A moved sequence waits for instances that it has left.",
        file="services/router/live_sequences.py",
        old="discard(instance for instance in before if instance not in after)",
        new="discard(instance for instance in before if instance in ())",
        test=NEW_MASTER,
    ),
    Fault(
        name="A sequence joins an elastic gang without naming its instances.",
        file="services/router/dispatch.py",
        old="    return tuple(sorted(map(index_of, decode_members(sequence.placement))))\n",
        new="    return ()\n",
        test=NEW_MASTER,
    ),
    Fault(
        name="An answer to Retain counts when the first rank of an instance has sent it.",
        file="services/router/live_sequences.py",
        old="        if missing:\n            return False\n",
        new="",
        test=f"{PENDING}::test_an_instance_answers_each_message_with_the_last_of_its_ranks",
    ),
    Fault(
        name="Answers to Retain are expected no more when the first message is answered.",
        file="services/router/rank_notifications.py",
        old="if not any(pending):",
        new="if not all(pending):",
        test=f"{PENDING}::test_an_instance_answers_each_message_with_the_last_of_its_ranks",
    ),
    Fault(
        name="A gang has as many positions as the rank with most.",
        file="services/router/scheduler_driver.py",
        old="max_positions=min(",
        new="max_positions=max(",
        test=f"{EVENTS}::test_a_gang_has_as_many_positions_as_the_rank_with_fewest",
    ),
    Fault(
        name="A high-priority step preempts requests of other high-priority steps.",
        file="services/router/rank_notifications.py",
        old="            if not step.command.step.high_priority\n            and any(",
        new="            if any(",
        test=f"{EVENTS}::test_only_low_priority_steps_count_as_preempted",
    ),
    Fault(
        name="The hashes of an answer are of its last token as well.",
        file="services/requests/request_handle.py",
        old="self.generated_tokens[:-1]",
        new="self.generated_tokens",
        test=(
            "tests/services/test_request_handle.py"
            "::test_an_answers_hashes_are_of_blocks_that_have_kv"
        ),
    ),
    Fault(
        name="The ranks of a step are found by their place in its group.",
        file="services/router/lowering.py",
        old="for rank in gang.ranks_of(index_of(member)):",
        new="for rank in gang.ranks_of(step.group.index(member)):",
        test=f"{SERVICE}::test_every_rank_gets_the_step_with_its_own_tokens",
    ),
    Fault(
        name="A chunk is given the history of another one.",
        file="services/scheduling/core/launcher.py",
        old="map(_chunk, computed, planned.chunks, histories)",
        new="map(_chunk, computed, planned.chunks, histories[::-1])",
        test=f"{CHUNKS}::test_later_chunks_know_where_the_kv_of_earlier_ones_lies",
    ),
    Fault(
        name="An instance that only holds history is left out when a sequence is cancelled.",
        file="services/router/lowering.py",
        old="involved = {**rows, **dict.fromkeys(_holders(remaining, placements))}",
        new="involved = rows",
        test=(
            "tests/services/test_cancelled_chunks.py"
            "::test_others_are_computed_where_they_were_with_their_own_history"
        ),
    ),
    Fault(
        name="A retried sequence numbers its first token from zero.",
        file="services/router/lowering.py",
        old="first_index=sequence.first_index,",
        new="first_index=0,",
        test=SECOND_TOKEN,
    ),
)

TOKENS = "tests/protocols/test_tokens.py"

WIRE = (
    Fault(
        name="An only token counts as one behind which something is decoded.",
        file="services/scheduling/core/launcher.py",
        old="decoded=request.output_tokens > 1,",
        new="decoded=request.output_tokens > 0,",
        test=f"{SERVICE}::test_an_answer_of_one_token_reserves_no_decode_slots",
    ),
    Fault(
        name="A finish reason belongs to a token's index instead of its row.",
        file="protocols/gang/messages.py",
        old="finish_reasons={row: token.finish_reason",
        new="finish_reasons={token.index: token.finish_reason",
        test=f"{TOKENS}::test_rows_come_out_as_they_went_in",
    ),
    Fault(
        name="Log-probabilities of a row go to the row before it as well.",
        file="protocols/gang/messages.py",
        old="known = logprobs.get(row)",
        new="known = logprobs.get(row, logprobs.get(row + 1))",
        test=f"{TOKENS}::test_rows_come_out_as_they_went_in",
    ),
    Fault(
        name="A frame may name the finish reason of a row that it does not have.",
        file="protocols/gang/messages.py",
        old="if not 0 <= row < rows:",
        new="if not 0 <= row <= rows:",
        test=f"{TOKENS}::test_incompatible_options_are_refused",
    ),
)

KV_LIFETIME = "tests/actors/test_kv_lifetime.py"
KV_POOL = "tests/actors/test_kv_pool.py"
SLOT_ALLOCATOR = "tests/actors/test_slot_allocator.py"

RANKS = (
    Fault(
        name="Keys and values are rounded in the pool only, and not for a prompt's own rows.",
        file="models/network/network.py",
        old="            if self.rounds_kv:\n",
        new="            if False:\n",
        test="tests/actors/test_eight_bit_strategies.py",
    ),
    Fault(
        name="Retained KV is freed when all of it was sent.",
        file="actors/engine/kv_lifetime.py",
        old="if cancelled or (whole and chunk.destinations and not retained):",
        new="if cancelled or (whole and chunk.destinations):",
        test=f"{KV_LIFETIME}::test_retained_kv_is_freed_when_it_is_cancelled",
    ),
    Fault(
        name="A sequence that leaves the batch during a step is not reported as freed.",
        file="actors/engine/kv_lifetime.py",
        old=(
            "                self._cancelled.add(sequence_id)\n"
            "                self._left.add(sequence_id)\n"
        ),
        new="                self._cancelled.add(sequence_id)\n",
        test=f"{KV_LIFETIME}::test_a_sequence_that_leaves_the_batch_during_a_step_is_freed_with_it",
    ),
    Fault(
        name="A sequence with several steps is freed after the first one.",
        file="actors/engine/kv_lifetime.py",
        old="        if self._steps[sequence_id]:\n            return False\n        del",
        new="        del",
        test=f"{KV_LIFETIME}::test_an_earlier_chunk_may_be_sent_after_the_last",
    ),
    Fault(
        name="A position is looked up by its distance from a span's start, whatever its step.",
        file="actors/kv_cache/sequence_slots.py",
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
        test=f"{SLOT_ALLOCATOR}::test_tokens_of_a_striped_request_are_one_slice_with_gaps_in_its_positions",
    ),
    Fault(
        name="Slots that another sequence still has are free.",
        file="actors/kv_cache/slot_allocator.py",
        old="runs_of(slots[self._ref_counts[slots] == 0])",
        new="runs_of(slots)",
        test=f"{KV_POOL}::test_shared_slots_are_free_when_the_last_sequence_frees_them",
    ),
    Fault(
        name="A sequence that frees a span frees all of its slots.",
        file="actors/kv_cache/slot_allocator.py",
        old="SlotSet(slot_map.runs if slot_map.kept else slot_map.locate(span))",
        new="SlotSet(slot_map.runs)",
        test=f"{KV_POOL}::test_shared_slots_are_free_when_the_last_sequence_frees_them",
    ),
)

RETAINED_KV = "tests/actors/test_retained_kv.py"

PRODUCTS = (
    Fault(
        name="The last outputs of a product of few rows lie behind its memory.",
        file="kernels/cpu_product_ir.py",
        old="block_start.least(end - BLOCK)",
        new="block_start",
        test="tests/kernels/test_cpu_product.py::test_outputs_alone_are_written",
    ),
    Fault(
        name="Rows of a product that fill no group are computed twice.",
        file="kernels/cpu_product_ir.py",
        old="(row + r).least(count - 1)",
        new="row.least(count - 1)",
        test="tests/kernels/test_cpu_product.py::test_equals_the_product_in_fp64",
    ),
    Fault(
        name="A matrix that compiled code cannot multiply is not packed either.",
        file="models/network/network.py",
        old=" and weight.shape[1] <= SHORT_INNER and has_code(weight):",
        new=" and weight.shape[1] <= SHORT_INNER:",
        test="tests/models/test_network.py::test_large_matrices_are_packed_and_others_stay",
    ),
    Fault(
        name="The engine follows grammars on a thread with the usual stack.",
        file="actors/worker/rank.py",
        old="            start_grammar_thread(thread)\n",
        new="            thread.start()\n",
        test="tests/actors/test_rank.py::test_only_the_engine_has_the_stack_that_follows_grammars",
    ),
)

RANK_GAPS = (
    Fault(
        name="A second eviction during a step replaces the first.",
        file="actors/engine/kv_lifetime.py",
        old="(*self._evict_later.get(sequence_id, ()), *spans)",
        new="spans",
        test=f"{KV_LIFETIME}::test_kv_evicted_twice_too_early_is_freed_after_the_last_step",
    ),
    Fault(
        name="An eviction that was put off is done with every step.",
        file="actors/engine/kv_lifetime.py",
        old="self._evict_later.pop(sequence_id, ())",
        new="self._evict_later.get(sequence_id, ())",
        test=f"{KV_LIFETIME}::test_kv_evicted_too_early_is_freed_after_the_last_step",
    ),
    Fault(
        name="A step shares history that lies on other instances.",
        file="actors/engine/kv_lifetime.py",
        old="if kv_slice.source and kv_slice.instance == self._here:",
        new="if kv_slice.source:",
        test=f"{RETAINED_KV}::test_a_second_turn_sends_what_the_other_gang_lacks",
    ),
    Fault(
        name="A reservation shares KV that lies on other instances.",
        file="actors/engine/reservations.py",
        old="if kv_slice.source and kv_slice.instance == self._engine.instance:",
        new="if kv_slice.source:",
        test=f"{RETAINED_KV}::test_a_second_turn_sends_what_the_other_gang_lacks",
    ),
    Fault(
        name="A sequence may be reserved after it was cancelled.",
        file="actors/engine/reservations.py",
        old="if sequence_id in self._left or owner in self._ended:",
        new="if owner in self._ended:",
        test="tests/actors/test_cancelling.py",
    ),
    Fault(
        name="A router that is gone may still reserve.",
        file="actors/engine/reservations.py",
        old="if sequence_id in self._left or owner in self._ended:",
        new="if sequence_id in self._left:",
        test="tests/actors/test_attachments.py",
    ),
    Fault(
        name="Slots that are shared count once, however many sequences have them.",
        file="actors/kv_cache/slot_allocator.py",
        old="            self._hold(sequence_id, slot_map, runs_of(new))\n",
        new=(
            "            slot_map.add(runs_of(new))\n"
            "            self._slot_maps[sequence_id] = slot_map\n"
        ),
        test=f"{KV_POOL}::test_shared_slots_are_free_when_the_last_sequence_frees_them",
    ),
    Fault(
        name="A sequence shares a span in part, where it has other slots for some of it.",
        file="actors/kv_cache/slot_allocator.py",
        old="if np.isin(self._positions[new], self._positions[known]).any():",
        new="if not len(new):",
        test=f"{SLOT_ALLOCATOR}::test_slots_that_are_not_there_are_not_shared",
    ),
    Fault(
        name="What a sequence shares already is taken for slots of its own.",
        file="actors/kv_cache/slot_allocator.py",
        old="new = slots[np.isin(slots, known, invert=True)]",
        new="new = slots",
        test=f"{SLOT_ALLOCATOR}::test_more_of_a_sequence_may_be_shared_later",
    ),
    Fault(
        name="Pinned slots are free when their sequence is.",
        file="actors/kv_cache/slot_allocator.py",
        old="            self._ref_counts[slots] += 1\n            self._pinned",
        new="            self._pinned",
        test=f"{SLOT_ALLOCATOR}::test_pinned_slots_are_free_when_the_last_pin_is_gone",
    ),
    Fault(
        name="Slots that are unpinned stay pinned.",
        file="actors/kv_cache/slot_allocator.py",
        old="            self._unref(np.sort(pinned.slots))\n",
        new="            np.sort(pinned.slots)\n",
        test=f"{SLOT_ALLOCATOR}::test_pinned_slots_are_free_when_the_last_pin_is_gone",
    ),
)

HANDOVER = "tests/services/test_handover.py"

UPDATES = (
    Fault(
        name="A router attaches to another rollout's gang.",
        file="services/cluster/membership.py",
        old="if (gang.rollout, gang.role) == (member.rollout, member.role) and gang.complete",
        new="if gang.role == member.role and gang.complete",
        test="tests/services/test_membership.py::test_a_gang_serves_in_its_own_rollout_only",
    ),
    Fault(
        name="Gangs that a former router still uses are ended to make room.",
        file="services/cluster/handover.py",
        old="if self._cluster.link is not None or waits:",
        new="if self._cluster.link is not None:",
        test=f"{HANDOVER}::test_gangs_without_a_place_get_that_of_the_former_ones_once_these_are_free",
    ),
    Fault(
        name="A store that does not answer counts as an empty one, and former ranks are killed.",
        file="services/cluster/handover.py",
        old='serves: %s", exc)\n        return True',
        new='serves: %s", exc)\n        return False',
        test=f"{HANDOVER}::test_ranks_live_on_until_it_is_known_that_nobody_uses_the_former_ones",
    ),
    Fault(
        name="Clients need no certificate.",
        file="protocols/rpc/tls.py",
        old="    context.verify_mode = ssl.CERT_REQUIRED\n",
        new="    context.verify_mode = ssl.CERT_OPTIONAL\n",
        test="tests/protocols/test_tls.py::test_a_client_without_a_certificate_is_refused",
    ),
)

SEEN = "tests/actors/test_windows.py"

WINDOWS = (
    Fault(
        name="Members fetch all keys before their rows in layers with a window.",
        file="actors/attention/near_keys.py",
        old="        first = max(0, span.start - window + 1)\n",
        new="        first = 0\n",
        test=f"{SEEN}::test_only_keys_in_reach_are_sent",
    ),
    Fault(
        name="Ranks are asked for history out of the window.",
        file="actors/attention/base/history.py",
        old="        rows = question.rows[: count if spans else 0]\n",
        new="        rows = question.rows[: max(1, count)]\n",
        test=f"{SEEN}::test_history_out_of_reach_is_not_asked_for",
    ),
    Fault(
        name="Ranks out of the window are asked while decoding.",
        file="actors/engine/iteration.py",
        old="sequence.holders_behind(hidden)",
        new="sequence.holders",
        test=f"{SEEN}::test_ranks_out_of_the_window_are_not_asked",
    ),
    Fault(
        name="A decoding row sees one position more than its window.",
        file="actors/engine/iteration.py",
        old="sequence.next - self._window\n",
        new="sequence.next - self._window - 1\n",
        test=f"{SEEN}::test_ranks_out_of_the_window_are_not_asked",
    ),
    Fault(
        name="A window hides the last key that it should show.",
        file="kernels/cpu_attention.py",
        old="visible_keys(q_positions - window, k_positions)",
        new="visible_keys(q_positions - window + 1, k_positions)",
        test="tests/kernels/test_attention.py::test_windows",
    ),
    Fault(
        name="Attention sinks are forgotten while decoding.",
        file="actors/attention/query_exchange.py",
        old="        merge_sink(out_rhd, lse_rh.T, sinks_h)\n",
        new="        pass\n",
        test="tests/actors/test_gangs.py::test_tokens_and_logits_equal_transformers",
    ),
    Fault(
        name="Layers with a window rotate as the others do.",
        file="models/network/network.py",
        old="if self.windowed and rotary.windowed is not None:",
        new="if not self.windowed and rotary.windowed is not None:",
        test="tests/models/test_network.py::test_logits_are_those_of_transformers",
    ),
)

EIGHT_BITS = (
    Fault(
        name="FP8 numbers that files hold are rounded a second time.",
        file="models/checkpoints/checkpoint.py",
        old="            if stored.read_fp8 is not None:\n",
        new="            if False and stored.read_fp8 is not None:\n",
        test="tests/models/test_fp8_weights.py::test_stored_numbers_are_kept",
    ),
    Fault(
        name="Tokens are not quantized before a product in FP8.",
        file="kernels/rowwise_fp8.py",
        old="    return numbers_ti.float(), scales_t1\n",
        new="    return x_ti.float() / scales_t1, scales_t1\n",
        test="tests/kernels/test_rowwise_fp8.py::test_product_by_definition",
    ),
)

OPERATING = (
    Fault(
        name="A chat's default length forgets that its prompt takes slots, too.",
        file="services/http/request_parser.py",
        old="max(quarter - prompt_tokens, quarter // 2)",
        new="quarter",
        test="tests/services/test_http_gangs.py"
        "::test_four_answers_without_max_tokens_run_side_by_side",
    ),
    Fault(
        name="A chat's default length forgets that an answer lies on one instance.",
        file="services/scheduling/deciding/decisions.py",
        old="min(gang.capacity // requests, min(gang.slots_by_order) // on_an_instance)",
        new="gang.capacity // requests",
        test="tests/services/test_http_gangs.py"
        "::test_four_answers_without_max_tokens_run_side_by_side",
    ),
    Fault(
        name="GPUs that cannot multiply FP8 are planned for with it.",
        file="services/planning/plan.py",
        old="raise ConfigError(without_fp8(reason))",
        new="pass",
        test="tests/services/test_planning.py::test_fp8_is_planned_for_gpus_that_multiply_it",
    ),
    Fault(
        name="With vLLM's prefix a full gang hides behind an empty one.",
        file="services/telemetry/metrics.py",
        old="lambda: max(load.counts.prefill_kv",
        new="lambda: min(load.counts.prefill_kv",
        test="tests/services/test_metrics.py"
        "::test_with_vllms_prefix_names_kinds_and_labels_are_vllms",
    ),
    Fault(
        name="The server's figures of a load test are those since its start.",
        file="loadgen/bench/server_metrics.py",
        old="value - before.get(name, 0.0)",
        new="value",
        test="tests/loadgen/test_server_metrics.py"
        "::test_figures_are_of_the_run_alone_and_sum_over_labels",
    ),
)

FAULTS: tuple[Fault, ...] = (
    *SCHEDULER,
    *UNSENT_STEPS,
    *PREDICTED_ENDS,
    *MOVES,
    *WAITING,
    *REUSED_KV,
    *POLICIES,
    *ROUTER,
    *REPORTS,
    *WIRE,
    *RANKS,
    *PRODUCTS,
    *RANK_GAPS,
    *UPDATES,
    *WINDOWS,
    *EIGHT_BITS,
    *OPERATING,
)
