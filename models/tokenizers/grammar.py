"""Grammars that answers follow, by llguidance.

llguidance parses an answer's bytes and says which tokens may come next, in some 50 microseconds for
a vocabulary of 150,000. It compiles a grammar while it is used. xgrammar would compile it ahead, in
up to seconds for a large schema, and needs transformers.

A state of a grammar is a function of the tokens that it has taken. So nothing of it is ever sent:
whoever samples an answer's next token rebuilds it from the tokens before.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray

from csps.models.network.checkpoint_json import InvalidTextError, read_eos_token_ids

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
)
"""Bounds of what a client's grammar may cost: some 30 ms to compile the expressions of a grammar,
15 ms and 5 MB for a token. Memory is 2 KB for a state. They do not bound how long it takes to
compile a schema: intersections of its parts take time without end."""
COMPILE_S = 1.0
"""Limit of the processor time in which a grammar compiles. Large sets of tools take 0.1 s."""
CACHED_GRAMMARS = 32
CACHED_TEXT = 2**20
"""Limits of the compiled grammars that are retained: their number, and the characters of all. One
takes up to 160 times as many bytes as it has characters."""
STACK_BYTES = 64 * 2**20
"""Stack of a thread that follows grammars. llguidance recurses into their rules, and a process
whose stack overflows dies. The router's parsers, of which one may, have the usual 8 MiB: what they
have compiled does not overflow a rank's."""

_Result = TypeVar("_Result")
_stack_size = threading.Lock()
"""Guards the size of new threads' stacks, which all of the process share."""


def start_grammar_thread(thread: threading.Thread) -> None:
    """Start a thread whose stack is large enough to follow grammars."""
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


class GrammarThread:
    """A thread that does one thing after another, with a large stack. It ends with the process,
    whatever it does by then."""

    def __init__(self, name: str) -> None:
        self._name, self._starting = name, threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Return the future result of some work."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._start()
        self._queue.put(run)
        return future

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            start_grammar_thread(self._thread)

    def _run(self) -> None:
        while True:
            self._queue.get()()


class Grammars:
    """Makes the states of grammars for one checkpoint's tokenizer. Thread-safe.

    Args:
        vocab: token ids that the model embeds.
    """

    def __init__(self, model_dir: Path, vocab: int) -> None:
        self._model_dir, self._vocab = model_dir, vocab
        self._reading, self._changing = threading.Lock(), threading.Lock()
        self._compiler = GrammarThread("grammar-compiler")
        self._compiled: OrderedDict[bytes, tuple[int, Future[LLMatcher]]] = OrderedDict()
        """Characters and result of the grammars used last, by digest."""

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Vocabulary by bytes; reading it takes a second for one of 150,000."""
        text = (self._model_dir / "tokenizer.json").read_text(encoding="utf-8")
        ends = read_eos_token_ids(self._model_dir)
        return LLTokenizer(text, eos_token=ends[0] if ends else None)

    def check(self, grammar: str) -> None:
        """Compile a grammar once, on this thread.

        Raises:
            InvalidTextError: it is none, or takes more than `LIMITS` or `COMPILE_S`.
        """
        with self._reading:
            _ = self._tokenizer
        began = time.thread_time()
        self.state(grammar)
        if time.thread_time() - began > COMPILE_S:
            raise InvalidTextError(f"the grammar takes longer than {COMPILE_S:g} s to compile")

    def state(self, grammar: str, answered: Sequence[int] = ()) -> GrammarState:
        """Return the state of a grammar after some tokens; compile it on this thread.

        Raises:
            InvalidTextError: the tokens are not a beginning of what it allows.
        """
        state = self._state(self._compile(grammar))
        for token in answered:
            state.advance(token)
        return state

    def compiled(self, grammar: str) -> Future[LLMatcher]:
        """Return what `state_of` copies: a compiled grammar, once another thread has made it."""
        digest = blake2b(grammar.encode(), digest_size=16).digest()
        with self._changing:
            if digest not in self._compiled:
                made = self._compiler.submit(lambda: self._compile(grammar))
                self._compiled[digest] = len(grammar), made
            self._compiled.move_to_end(digest)
            found = self._compiled[digest][1]
            while len(self._compiled) > 1 and (
                len(self._compiled) > CACHED_GRAMMARS
                or sum(size for size, _ in self._compiled.values()) > CACHED_TEXT
            ):
                self._compiled.popitem(last=False)
        return found

    def state_of(self, compiled: LLMatcher) -> GrammarState:
        """Return the state of a compiled grammar before any token.

        Raises:
            InvalidTextError: the grammar cannot be followed.
        """
        return self._state(compiled.deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        with self._reading:
            tokenizer = self._tokenizer
        return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)

    def _state(self, matcher: LLMatcher) -> GrammarState:
        return GrammarState(matcher, self._vocab, self._tokenizer.eos_token)


def no_tokens(vocab: int) -> NDArray[np.uint8]:
    """Return a mask that allows no token, as `GrammarState.allowed` has it."""
    return np.zeros(-(-vocab // 8), np.uint8)


class GrammarState:
    """What may follow the tokens that one answer has so far.

    Args:
        own_end: token that llguidance takes for the end.
    """

    def __init__(self, matcher: LLMatcher, vocab: int, own_end: int) -> None:
        self._matcher, self._vocab, self._own_end = matcher, vocab, own_end
        self._check()

    def advance(self, token: int) -> None:
        """Append a token to the answer.

        Raises:
            InvalidTextError: the grammar does not allow it.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        """Return whether the answer may end here."""
        return self._matcher.is_accepting()

    def allowed(self, ends: Iterable[int]) -> NDArray[np.uint8]:
        """Return which tokens may come next: bit t % 8 of byte t // 8 is token t.

        Args:
            ends: tokens that end the answer, which are also allowed where it may end.

        Raises:
            InvalidTextError: the grammar is too complex.
        """
        # Bits, because writing and reading a number for each token takes longer than finding them.
        bits = no_tokens(self._vocab)
        if not self._matcher.is_stopped():
            known = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(bits)]
            bits[: len(known)] = known
            self._check()
        complete = self.complete
        if self._own_end < self._vocab:  # requests have ends of their own
            bits[self._own_end // 8] &= ~np.uint8(1 << self._own_end % 8)
        for token in ends:
            if complete and token < self._vocab:
                # A stop token may also be text that the grammar allows.
                bits[token // 8] |= np.uint8(1 << token % 8)
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()
            raise InvalidTextError(f"the grammar cannot be followed: {reason[0] if reason else ''}")


# --- making grammars ---------------------------------------------------------------------------

ONE_SPACE = "[ ]?"
"""Whitespace between the parts of JSON, by default. A model that may write any number of blanks and
lines may write nothing else until its answer is cut."""


def lark_grammar(text: str) -> str:
    """Return a grammar in llguidance's variant of Lark's syntax."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def json_grammar(schema: Any, whitespace: str | None = None) -> str:
    """Return the grammar of JSON that a schema allows.

    Args:
        whitespace: regular expression of whitespace between the parts; None is `ONE_SPACE`.
    """
    return lark_grammar(f"start: {json_rule(schema, whitespace)}")


def json_rule(schema: Any, whitespace: str | None = None, *, as_dumped: bool = False) -> str:
    """Return an expression, for a rule of a grammar, of JSON that a schema allows.

    Args:
        whitespace: regular expression of whitespace between the parts; None is `ONE_SPACE`.
        as_dumped: has the blanks of `json.dumps`, and no others.
    """
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    options: dict[str, Any] = {"whitespace_flexible": False}
    if as_dumped:
        options |= {"item_separator": ", ", "key_separator": ": "}
    elif whitespace != "":
        options = {"whitespace_pattern": ONE_SPACE if whitespace is None else whitespace}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def choice_grammar(words: Sequence[str]) -> str:
    """Return the grammar of one of some strings."""
    return lark_grammar("start: " + " | ".join(map(literal, words)))


def regex_grammar(expression: str) -> str:
    """Return the grammar of a regular expression, which matches the whole answer."""
    return str(LLMatcher.grammar_from_regex(expression))


def any_grammar(text: str) -> str:
    """Return a grammar that a client wrote, in Lark's syntax or llama.cpp's.

    Raises:
        InvalidTextError: it is in neither.
    """
    try:
        return str(grammar_from("grammar", text))
    except Exception as error:  # the converter fails in many ways
        raise InvalidTextError(f"the grammar cannot be read: {error}") from error


def after_reasoning(grammar: str, *, begun: bool) -> str:
    """Return a grammar that allows reasoning before what `grammar` allows.

    Args:
        begun: the prompt ends within the reasoning.
    """
    first, *others = json.loads(grammar)["grammars"]
    think = "think" if begun else "think?"
    head = "" if begun else "<think>"
    text = f"start: {think} GAP @answer\nthink[lazy]: /{head}(?s:.*)<\\/think>/\nGAP: /\\n{{0,2}}/"
    named = {**first, "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": text}, named, *others]})


def literal(text: str) -> str:
    """Return an expression, for a rule of a grammar, of a text."""
    return json.dumps(text)
