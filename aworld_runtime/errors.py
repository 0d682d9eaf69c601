"""Every error this product raises, in one tree.

Each says what happened, with the values, and what to do. `UsageError`s are the caller's to mend: the command line
prints them in one line and exits with code 2.

    AWorldError
    ├── UsageError
    │   ├── ConfigError            an unknown key, a wrong value, a file that can't be read
    │   ├── UnknownTaskError       no such task
    │   ├── UnknownProgramError    a `module:attribute` that names no agent or swarm
    │   ├── PredicateError         a breakpoint that can't be read
    │   ├── NotFoundError          no such run, episode or file
    │   └── DamagedFileError       an exported file that can't be imported
    ├── EventError
    │   ├── UnknownEventTypeError
    │   ├── MalformedEventError
    │   │   └── ForgedEventError   not signed, or not by who it says
    │   ├── MissingBlobError       the content that a large event refers to
    │   ├── MissingParentError     what a fork shares with the log it was forked from
    │   └── PayloadTooLargeError
    ├── BusError
    │   ├── BusUnavailableError    the server went away, and stayed away
    │   │   └── NoBusError         no server answers at the URL
    │   ├── BusFullError           it refuses publishers
    │   │   └── QueueFullError     one queue or mailbox does
    │   ├── AccessDeniedError      the server's access list forbids it to this user
    │   ├── Fenced                 another owner appended: drop the work
    │   ├── RequestTimeoutError    no reply before the deadline
    │   └── WorkerRefusedError     a worker of another code version
    ├── StoreError
    │   ├── StoreUnavailableError
    │   └── LogRewoundError        a different event already stands at this position
    ├── ModelError
    │   ├── ModelUnavailableError  the engine can't be reached, or failed
    │   ├── ModelRejectedError     it refused the request; asking again won't help
    │   ├── ModelTimeoutError
    │   └── TemplateError          a chat template that can't be extended turn by turn
    ├── ToolError
    │   ├── UnknownToolError
    │   ├── ToolArgumentsError
    │   └── ToolTimeoutError
    ├── ReplayError
    │   ├── DivergenceError        the code did something else than the record
    │   └── LiveCallError          code that runs again tried to reach outside
    ├── ProcessError               a child process didn't start, or died
    ├── ExportError                a collector does not take spans
    ├── SamplerError               the inference engine didn't start, publish or answer
    └── TrainingError
        ├── NonFiniteLossError     the batch is saved beside it
        ├── StaleSampleError
        ├── RunLostError           the bus has lost the run's log
        └── CheckpointError
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast


class AWorldError(Exception):
    """Root of the tree; catch it to catch all that this product raises on purpose."""


class UsageError(AWorldError):
    """The caller can mend it: the command line exits with code 2."""


class ConfigError(UsageError):
    """A configuration key or value is wrong; names the key, the value and what is allowed."""


class UnknownTaskError(UsageError):
    """No task has this name; lists the known ones."""


class UnknownProgramError(UsageError):
    """A `module:attribute` reference that can't be imported or is neither agent nor swarm."""


class PredicateError(UsageError):
    """A predicate on events can't be read; says where."""


class NotFoundError(UsageError):
    """No run, episode or file has this name."""


class DamagedFileError(UsageError):
    """An exported file is damaged, cut, of a newer format or none at all; names the member."""


class EventError(AWorldError):
    """An event can't be read or written."""


class UnknownEventTypeError(EventError):
    """The event's `type` is not in the registry; names it."""


class MalformedEventError(EventError):
    """The bytes are not a valid event."""


class ForgedEventError(MalformedEventError):
    """It is not from whom it says it is: its signature is missing or wrong, or its role is not its source's."""


class MissingBlobError(EventError):
    """A large event's content isn't where the event says, or is damaged; names it."""


class MissingParentError(EventError):
    """A fork can't be read or run: its parent's events aren't where it is read from; names them."""


class PayloadTooLargeError(EventError):
    """An event above the size that a log accepts."""


class BusError(AWorldError):
    """The event bus failed."""


class BusUnavailableError(BusError):
    """The server can't be reached any more, or the connection broke and the outcome is unknown."""


class NoBusError(BusUnavailableError):
    """No server answers at the bus's URL: it isn't running, or the URL is wrong."""


class BusFullError(BusError):
    """The bus refuses new events (no memory or disk, or too much waits to be sent); reads and acks go on.

    Sending again later may succeed.
    """


class QueueFullError(BusFullError):
    """A queue or a mailbox holds as much as it may; names it, its length and its limit."""


class AccessDeniedError(BusError):
    """The server's access list forbids this to the user of the bus's URL; names both. Asking again won't help."""


class Fenced(BusError):
    """Another owner appended to the log first. Drop the work: it is running elsewhere."""


class EventsMissedError(BusError):
    """A subscription read so slowly that the bus has let events go that it had not come to; names them."""


class RequestTimeoutError(BusError):
    """No reply came before the deadline."""


class WorkerRefusedError(BusError):
    """A worker whose code version differs from the run's may not join it."""


class StoreError(AWorldError):
    """The store failed."""


class StoreUnavailableError(StoreError):
    """The store can't be reached."""


class LogRewoundError(StoreError):
    """A different event is already stored at this log position: the bus lost acknowledged events."""


class ModelError(AWorldError):
    """A model call failed."""


class ModelUnavailableError(ModelError):
    """The engine can't be reached or failed; the call may be tried again."""


class ModelRejectedError(ModelError):
    """The engine refused the request (key, parameters, context length); asking again won't help."""


class ModelTimeoutError(ModelError):
    """The model didn't answer before its deadline."""


class TemplateError(ModelError):
    """The chat template can't be extended turn by turn with exact token ids."""


class ToolError(AWorldError):
    """A tool can't be used as asked. The agent is told and goes on."""


class UnknownToolError(ToolError):
    """No tool has this name; lists the known ones."""


class ToolArgumentsError(ToolError):
    """The arguments don't fit the tool's schema."""


class ToolTimeoutError(ToolError):
    """The tool didn't answer before its deadline."""


class ReplayError(AWorldError):
    """A recorded run can't be replayed."""


class DivergenceError(ReplayError):
    """The code did something else than the record: carries both sides."""

    def __init__(
        self,
        message: str,
        *,
        seq: int,
        recorded: str,
        replayed: str,
        events: tuple[object, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.events = events
        """Recorded and replayed, where it is one event instead of another."""
        self.seq = seq
        self.recorded = recorded
        self.replayed = replayed


class LiveCallError(ReplayError):
    """Code that runs again tried to reach outside past its context, which a replay refuses."""

    def __init__(self, what: str, *, place: str) -> None:
        super().__init__(
            f"a replay makes no live call, and this is one: {what}; go through the context, or make it a tool"
        )
        self.what = what
        self.place = place
        """`file:line`, if it is known."""


class ProcessError(AWorldError):
    """A child process didn't start, or ended when it should not have."""


class ExportError(AWorldError):
    """A collector of spans can't be reached, or refuses them."""


class SamplerError(AWorldError):
    """The inference engine didn't start, didn't take the weights or answered nonsense."""


class TrainingError(AWorldError):
    """The learner can't go on."""


class NonFiniteLossError(TrainingError):
    """The loss is NaN or infinite; names the file that holds the batch."""


class StaleSampleError(TrainingError):
    """A sample is older than `max_staleness` allows."""


class RunLostError(TrainingError):
    """The bus no longer holds the run's log: the run can't go on, or be resumed."""


class CheckpointError(TrainingError):
    """A checkpoint can't be written, or what is there can't be read."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside an exception group, however deep; of any other error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    """The most telling of its leaves: one of ours before any other."""
    found = list(leaves(error))
    return next((e for e in found if isinstance(e, AWorldError)), found[0])
