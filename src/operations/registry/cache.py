"""The plans of the operations that are called, as many as fit.

Rule 1: finding a plan costs one dictionary lookup: `recent` is read directly. So uses are not recorded one by one.
        Instead, when `recent` is full, its plans become the older ones, and those that are used again return.
Rule 2: a plan that is dropped takes its compiled schemas with it, which are most of its memory. Calls that use it
        continue; the next call prepares the operation again.
"""

from collections.abc import Collection, Iterator

from operations.registry.plan import CallPlan
from operations.registry.services import ChangeLog

MAX_RECENT = 500
"""The number of plans that were used lately. As many older ones are stored."""


class PlanCache:
    """Plans by the ids of their operations.

    Attributes:
        recent: The plans used lately; other plans have to be found with `find`.
    """

    def __init__(self) -> None:
        self.recent: dict[str, CallPlan] = {}
        self._older: dict[str, CallPlan] = {}
        self._logs: dict[str, ChangeLog] = {}

    def find(self, operation_id: str) -> CallPlan | None:
        """Return the plan of an operation, which becomes a recent one; None if it is not stored."""
        plan = self.recent.get(operation_id)
        if plan is None:
            plan = self._older.pop(operation_id, None)
            if plan is not None:
                self.add(operation_id, plan)
        return plan

    def add(self, operation_id: str, plan: CallPlan) -> None:
        """Store a plan."""
        if len(self.recent) >= MAX_RECENT:
            dropped, self._older = self._older, dict(self.recent)
            # Cleared and not replaced, because the registry reads this dictionary.
            self.recent.clear()
            for dropped_id, each in dropped.items():
                if not each.log.is_empty:
                    self._logs[dropped_id] = each.log
                each.spec.input_schema.forget()
                each.spec.output_schema.forget()
        self.recent[operation_id] = plan

    def log(self, operation_id: str) -> ChangeLog | None:
        """Return the log of an operation whose plan was dropped, so that it logs no change again."""
        return self._logs.pop(operation_id, None)

    def remove(self, operation_ids: Collection[str]) -> None:
        """Forget the plans of operations that were removed or replaced."""
        for entries in (self.recent, self._older, self._logs):
            for operation_id in entries.keys() & set(operation_ids):
                del entries[operation_id]

    def __iter__(self) -> Iterator[CallPlan]:
        return iter((*self.recent.values(), *self._older.values()))
