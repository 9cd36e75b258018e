"""A row is lent to one fill at a time, until the worker answered for exactly that fill."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from actors.leases import Lease, Leases
from guided.messages import RowResult, RowStatus

ROWS = 5


def result(lease: Lease, **changes: int) -> RowResult:
    fields = {"sequence": lease.sequence, "position": lease.position, "row": lease.row, **changes}
    return RowResult(fields["sequence"], fields["position"], fields["row"], RowStatus.READY)


class Machine(RuleBasedStateMachine):
    """Leases against a model: which rows the worker may still write, which hold an answer that nobody read yet."""

    leases_taken = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(ROWS)
        self.writable: dict[int, Lease] = {}
        self.unread: dict[int, Lease] = {}

    @rule(target=leases_taken, sequence=st.integers(0, 3), start=st.integers(0, 3), tokens=st.lists(st.just(1)))
    def take(self, sequence: int, start: int, tokens: list[int]) -> Lease:
        lease = self.leases.take(sequence, start, tokens, now=0.0, index=0)
        if lease is None:
            assert len(self.writable) + len(self.unread) == ROWS
            return Lease(0, -1, -1, 0, [], 0.0)
        assert lease.position == start + len(tokens)
        assert lease.row not in self.writable, "lent while the worker may still write it"
        assert lease.row not in self.unread, "lent while its mask was not read"
        self.writable[lease.row] = lease
        self.leases.message += 1
        return lease

    @rule(lease=leases_taken)
    def the_worker_answers(self, lease: Lease) -> None:
        """Once, twice, or for a lease whose row has gone to somebody else long since."""
        self.leases.answered = lease.message
        answered = self.leases.answer(result(lease))
        if self.writable.get(lease.row) is lease:
            del self.writable[lease.row]
            if lease.abandoned:
                assert answered is None
            else:
                assert answered is lease
                self.unread[lease.row] = lease
        else:
            assert answered is None

    @precondition(lambda self: self.writable)
    @rule(data=st.data(), off=st.sampled_from(["sequence", "position", "row", "message"]))
    def an_answer_for_something_else_changes_nothing(self, data: st.DataObject, off: str) -> None:
        lease = data.draw(st.sampled_from(sorted(self.writable.values(), key=lambda lease: lease.row)))
        self.leases.answered = lease.message - (off == "message")
        assert self.leases.answer(result(lease, **{off: 99})) is None

    @rule(lease=leases_taken)
    def nobody_wants_it_any_more(self, lease: Lease) -> None:
        if self.writable.get(lease.row) is lease or self.unread.get(lease.row) is lease:
            self.leases.give_back(lease)
            self.leases.give_back(lease)
            if self.unread.get(lease.row) is lease:
                del self.unread[lease.row]

    @rule(lease=consumes(leases_taken))
    def its_message_never_left(self, lease: Lease) -> None:
        if self.writable.get(lease.row) is lease and not lease.abandoned:
            self.leases.unsent(lease)
            del self.writable[lease.row]

    @invariant()
    def no_row_is_lost(self) -> None:
        assert self.leases.num_free == ROWS - len(self.writable) - len(self.unread)
        assert [lease.row for lease in self.leases.outstanding] == list(self.writable)
        assert self.leases.oldest is next(iter(self.writable.values()), None)


TestLeases = Machine.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
