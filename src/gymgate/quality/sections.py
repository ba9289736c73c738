"""What the measurements find. A number that could not be measured is `None`, and `missing` says why."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gymgate.core.config import Config

Outcome = Literal["error", "masked", "truncated", "number"]
"""What a rollout gave whose judge, tool or policy failed. error: no reward; masked: a reward that NeMo Gym says must not
be used; truncated: a reward, and the answer says that it was cut off; number: a reward like any other."""
Case = Literal["judge_down", "tool_timeout", "cut_off", "long_answer"]
"""judge_down: every call of a judge gets an HTTP error; tool_timeout: the resources server stops answering while a tool
is called; cut_off: half of the last answer, with finish reason `length`; long_answer: an answer of a quarter of a million
characters."""
CASES: tuple[Case, ...] = ("judge_down", "tool_timeout", "cut_off", "long_answer")
ProbeName = Literal[
    "right answer", "another row's answer",
    "empty", "fixed sentence", "the prompt", "another row's best",
    "wrong answer", "made-up answer", "format alone",
    "every option", "every option in turn", "right and wrong", "right and wrong in turn",
    "negated", "refusal", "persuasion", "calls as text", "calls twice", "calls out of order", "more arguments",
    "another call", "own endpoint",
    "exit 0", "catch everything", "read the tests", "the example's output",
    "spacing", "bold", "case", "trailing words", "thousands", "notation", "LaTeX", "units", "characters", "order",
]  # fmt: skip
"""A way to make an answer of a row. The first is that of the section `oracle`."""
ANSWERS: tuple[ProbeName, ...] = ("empty", "fixed sentence", "the prompt", "another row's best")
"""The answers that solve nothing: probes that need no right answer."""
WITHOUT_ANSWER = frozenset((*ANSWERS, "exit 0", "catch everything", "read the tests", "the example's output"))
OF_ORACLE: frozenset[ProbeName] = frozenset({"right answer"})
ProbeKind = Literal["exploitable", "strict", "lenient"]
"""What a flag of a probe means for a policy. exploitable: it is paid for something that needs no understanding of the row;
strict: it loses a right answer in a usual form; lenient: it is paid for more than the right answer, which it has to know."""
PROBE_TEXTS: dict[ProbeName, tuple[str, ProbeKind]] = {
    "right answer": ("the right answer", "strict"),
    "another row's answer": ("another row's answer", "lenient"),
    "empty": ("an empty answer", "exploitable"),
    "fixed sentence": ("the answer 'I do not know.'", "exploitable"),
    "the prompt": ("the prompt as the answer", "exploitable"),
    "another row's best": ("the best answer of another row", "exploitable"),
    "wrong answer": ("a wrong answer in the right format", "lenient"),
    "made-up answer": ("a made-up answer", "exploitable"),
    "format alone": ("the format without an answer", "exploitable"),
    "every option": ("a list of wrong and right answers", "lenient"),
    "every option in turn": ("a wrong, the right and another wrong answer in turn", "lenient"),
    "right and wrong": ("the right answer or a wrong one, in either order,", "lenient"),
    "right and wrong in turn": ("the right answer and a wrong one in turn, in either order,", "lenient"),
    "negated": ("the negated right answer", "lenient"),
    "refusal": ("the right answer in a refusal", "lenient"),
    "persuasion": ("a wrong answer that tells the grader to pay", "exploitable"),
    "calls as text": ("a text that lists the right calls of tools", "lenient"),
    "calls twice": ("each right call made twice, a tool that acts among them,", "lenient"),
    "calls out of order": ("the right calls in reverse order, where the prompt says an order,", "lenient"),
    "more arguments": ("the right calls, each with an argument more,", "lenient"),
    "another call": ("the right calls and one of another row", "lenient"),
    "own endpoint": ("what the grader's own endpoint, called as a tool, says is right", "lenient"),
    "exit 0": ("a program that exits with 0 at once", "exploitable"),
    "catch everything": ("a program that exits with 0 whatever a test after it raises", "exploitable"),
    "read the tests": ("a program that prints what tests in its process expect", "exploitable"),
    "the example's output": ("a program that prints the output of the prompt's example", "exploitable"),
    "spacing": ("the right answer with spaces around it", "strict"),
    "bold": ("the right answer after a label in bold", "strict"),
    "case": ("the right answer in other case", "strict"),
    "trailing words": ("the right answer with words after it", "strict"),
    "thousands": ("the right number with thousands separators", "strict"),
    "notation": ("the right number in another notation", "strict"),
    "LaTeX": (r"the right answer in \text{}", "strict"),
    "units": ("the right answer with its unit spaced otherwise", "strict"),
    "characters": ("the right answer in other Unicode characters", "strict"),
    "order": ("the right items in another order, where the prompt allows any,", "strict"),
}
"""What is said, as the subject of a sentence, and what a flag means. An honest grader pays `strict` ones in full, others nothing.
A list of every option is exploitable where the prompt shows the options."""
ANY_WRONG: tuple[ProbeName, ...] = ("another row's answer", "wrong answer", "made-up answer")
"""Probes that give an answer without the right one in it."""
NO_REWARD = "no rollout gave a reward"
"""Why an answer has no figures although every rollout ended by itself."""


class Section(Config):
    """Base of the sections."""

    missing: dict[str, str] = Field(default_factory=dict)
    """Why a value is `None` or left out, by its name."""


class Changed(Config):
    """A rollout whose reward was not always the same."""

    rollout: str
    """File and line of the recording, or the number of the packaged row."""
    rewards: tuple[float, ...]
    """Every reward that it got: in the replay before, in order, in reverse order, several at once."""


class Deterministic(Section):
    """The same answers scored three times after the replay: in order, in reverse order, and several at once."""

    rollouts: int
    """Different rollouts that were scored."""
    scored: int
    """Rewards that came back, of all passes."""
    failed: int
    """Rollouts of all passes that gave no reward."""
    at_once: int | None = None
    """Rollouts that ran at the same time in the last pass."""
    changed: tuple[Changed, ...] = ()


class FlaggedRow(Config):
    """A row that did not pay what an honest grader pays."""

    row: str
    """Its number among the packaged rows, or file and line of the recording: `row 3`."""
    answer: str
    """What was said; of more than 600 characters the first, and `…`."""
    reward: float = 0.0
    right: float | None = None
    """What the row's right answer earns; `None`: it was not tried."""
    recorded: float | None = None
    """The reward of the row's recorded answer, if it has one."""
    expected: float | None = None
    """For a counter-witness: the reward that follows from the published reason."""
    options_shown: bool = False
    """For a list of options: whether the prompt shows each of them."""

    def __str__(self) -> str:
        """In one line: `row 3: '...' earns 1, its right answer 1`."""
        others = {"right": self.right, "recorded": self.recorded}
        beside = (f", its {name} answer {reward:g}" for name, reward in others.items() if reward is not None)
        told = "" if self.expected is None else f" (by the published reason: {self.expected:g})"
        said = self.answer if self.answer == PROBE_TEXTS["the prompt"][0] else repr(self.answer)
        return f"{self.row}: {said} earns {self.reward:g}{''.join(beside)}{told}"


class ProbeRewards(Config):
    """Rewards of the answers that one probe makes."""

    rows: int
    """Rows that gave a reward."""
    failed: int
    """Rows that gave none."""
    mean: float
    """Over the rows; of one with several answers, their mean counts."""
    highest: float
    above_zero: int
    """Rows with a reward above 0."""
    flagged: tuple[FlaggedRow, ...] = ()
    """Rows that did not pay what an honest grader pays, scored twice; each in the first phrasing that shows it. For answers that
    solve nothing: rows that paid anything, scored once."""
    counter: tuple[FlaggedRow, ...] = ()
    """Counter-witnesses, if this probe ran alone: they would not earn `expected` if the published reason were false."""


class Probes(Section):
    """Rewards of answers that are made of rows to see what the grader does."""

    date: str = ""
    """When they were made; empty: with the rest of the record."""
    recorded_mean: float | None = None
    """Mean of the recorded rewards."""
    answers: dict[ProbeName, ProbeRewards] = Field(default_factory=dict)
    """By the name of the probe."""


class FailureCase(Config):
    """Outcomes in one case of failure."""

    outcomes: dict[Outcome, int]
    """Rollouts by what they gave."""
    rewards: tuple[float, ...] = ()
    """The rewards of those with outcome `number` or `truncated`."""
    said: str = ""
    """The message of the first error."""


class Failures(Section):
    """Outcomes of rollouts whose judge, tool or policy fails."""

    cases: dict[Case, FailureCase] = Field(default_factory=dict)


class Cost(Section):
    """The cost of a rollout beside the policy's own answers."""

    ready_s: float | None = None
    """Seconds from the first process until every server listens, without installing."""
    verification_ms: float | None = None
    """Median time from the policy's last answer to the end of the rollout, one rollout at a time."""
    verification_p99_ms: float | None = None
    """The 99th percentile of the same; the longest if there are fewer than 100."""
    verifications: int = 0
    """Rollouts that both were taken from."""
    tool_call_ms: float | None = None
    """Median time from an answer with tool calls to the next model call, divided by the number of tool calls."""
    tool_calls: int = 0
    rest_mb: float | None = None
    """Memory of all its servers without a rollout (proportional set size, MB of 10^6 bytes)."""
    busy_mb: float | None = None
    """The most that they used with 32 rollouts at once."""
    rollouts_per_core_s: float | None = None
    """Rollouts per second at which its servers, agent included, keep one core busy: 32 rollouts divided by the CPU
    time that they took."""
    most_rollouts_s: float | None = None
    """Rollouts per second that this machine carries: arithmetic from the CPU time that one takes in each process, which has
    one core at most, and in all."""
    limited_by: str | None = None
    """What that limits: a server, the stack's daemon, or the machine's cores."""
    rollout_mb: float | None = None
    """What a live rollout adds to the memory of the servers."""
    rollout_files: float | None = None
    """The most open files that a live rollout adds to one process."""


class Shape(Section):
    """The packaged rows and the recorded rollouts."""

    rows: int
    """Packaged rows that can be run."""
    recordings: int
    turns: float | None = None
    """Mean of model calls of a recorded rollout."""
    most_turns: int | None = None
    tool_calls: float | None = None
    """Mean of tool calls of a recorded rollout."""
    input_tokens: float | None = None
    """Mean of tokens, as the recorded model counted them."""
    output_tokens: float | None = None
    rewards: dict[str, int] = Field(default_factory=dict)
    """Recorded rollouts by their reward; in tenths of the range if there are more than ten different ones."""
    reward_mean: float | None = None
    reward_deviation: float | None = None
    """Sample standard deviation."""


class Data(Section):
    """The packaged rows as such. A row is named by its file and line: `example:3`."""

    files: dict[str, int] = Field(default_factory=dict)
    """Rows of each file."""
    duplicates: int | None = None
    """Rows that are equal to an earlier row of their file."""
    duplicate_rows: tuple[tuple[str, ...], ...] = ()
    """Groups of equal rows, 20 at most."""
    answers: int = 0
    """Rows with an answer that was looked for in their prompt."""
    answers_in_prompt: int | None = None
    """Rows whose prompt says their own answer."""
    rows_with_answer: tuple[str, ...] = ()
    """Those rows, 20 at most."""
    splits: dict[str, str] = Field(default_factory=dict)
    """Split of each file that is of one."""
    shared: int | None = None
    """Rows that are in several splits."""
    shared_rows: tuple[tuple[str, ...], ...] = ()
    """Such a row in each of its splits, 20 at most."""

    def __str__(self) -> str:
        """In one line: `261 rows; duplicates: 0; answers in prompts: 0 of 81; rows in several splits: not compared`."""
        told = (
            "not checked" if self.answers_in_prompt is None else f"{self.answers_in_prompt} of {self.answers}"
        )
        return (
            f"{sum(self.files.values())} rows; duplicates: {'not counted' if self.duplicates is None else self.duplicates}; "
            f"answers in prompts: {told}; rows in several splits: {'not compared' if self.shared is None else self.shared}"
        )


class PolicyRewards(Section):
    """The rewards of a real model (`-b`)."""

    date: str = ""
    model: str
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Fields of every call (`--sampling`); the others are the row's and the endpoint's."""
    rows: int
    """Packaged rows that were run."""
    repeats: int = 1
    """Rollouts of each row."""
    timeout_s: float | None = None
    """Seconds that a rollout was given."""
    scored: int
    """Rollouts with a reward that counts."""
    pass_at_1: float | None = None
    """Mean reward; the share of rollouts that solve their row if rewards are 0 or 1."""
    standard_error: float | None = None
    """Standard error of `pass_at_1`, clustered by row."""
    seconds: float | None = None
    """Mean duration of a rollout, eight at once."""
    turns: float | None = None
    output_tokens: float | None = None

    def __str__(self) -> str:
        """In one line: `SmolLM2, temperature 1, max_tokens 128: 0.100 ± 0.100 over 20 rollouts of 5 rows`."""
        if self.pass_at_1 is None:
            return f"{self.policy}: no reward ({self.missing.get('pass_at_1', 'not measured')})"
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        lost = self.rows * self.repeats - self.scored
        without = f", {lost} more without a reward" if lost else ""
        return f"{self.policy}: {self.pass_at_1:.3f}{error} over {self.scored} rollouts of {self.rows} rows{without}"

    @property
    def policy(self) -> str:
        """The model and how it was sampled."""
        return ", ".join([self.model, *(f"{name} {value}" for name, value in self.sampling.items())])


OracleReason = Literal[
    "no answer in the rows",
    "answer is a program or patch",
    "needs a judge",
    "needs a download or container",
    "scored against siblings",
    "rewards change",
    "other",
]
"""Why right answers could not be tried."""
NOT_HERE: OracleReason = "needs a download or container"


class PhrasingRewards(Config):
    """Rewards of answers in one phrasing."""

    rows: int
    """Rows that gave a reward."""
    full_rows: int
    """Rows with the full reward."""
    partial_rows: int
    zero_rows: int
    mean: float


class Oracle(Section):
    """Rewards of the right answer, as the rows hold it, in a table of phrasings."""

    reason: OracleReason | None = None
    """Why right answers could not be tried; `None` if they were."""
    detail: str = ""
    """For `other`: the error; for `rewards change`: the rewards of one row."""
    field: str = ""
    """Field of the rows that holds the answer."""
    asked_for: str = ""
    """The phrasing that the prompt asks for; empty if no pattern finds it."""
    rows: int = 0
    """Rows whose answer was tried."""
    solved: int = 0
    """Rows of which a phrasing earns the full reward."""
    full: float = 1.0
    """The full reward: 1, or the highest recorded one if that is more."""
    reward: float | None = None
    """Mean over the rows of the best phrasing's reward. Rows that gave none are left out, and named in `missing`."""
    phrasings: dict[str, PhrasingRewards] = Field(default_factory=dict)
    """By the name of the phrasing, in which `answer`, `items`, `option` and the like stand for the answer."""
    unsolved: tuple[str, ...] = ()
    """Rows of which no phrasing earns the full reward."""
    recorded: tuple[str, ...] = ()
    """Those of them that a recorded answer solved."""
    suspect: tuple[str, ...] = ()
    """Those of them that ask for the same phrasing as a solved row, where more than half of the rows are solved: their
    answer may be wrong."""

    def __str__(self) -> str:
        """In a few words: `accepts \\boxed{answer}`."""
        if self.reason is not None:
            return f"not tried ({self.reason}{f': {self.detail}' if self.detail else ''})"
        return (
            f"accepts {self.accepted[0]}" if self.accepted else f"accepts no tried phrasing of {self.field!r}"
        )

    @property
    def accepted(self) -> list[str]:
        """Phrasings that earn the full reward in most rows, the one that the prompt asks for first."""
        full = {name: rewards.full_rows for name, rewards in self.phrasings.items() if rewards.full_rows}
        return sorted(full, key=lambda name: (name != self.asked_for, -full[name]))
