"""Check the input that a handler receives against the rules that read the input.

Grants and resource rules must permit two forms: the input as it was sent, and the checked form of what the handler
receives. Approval rules apply if either matches.

Rule 1: the input is built once, after validation, and the handler receives exactly what was checked.
Rule 2: without a rule that reads the input, it is not built here.
Rule 3: fail closed: an input without a checked form is denied, and so is one whose defaults cannot be found within the
        budget of a value.
"""

import asyncio
import inspect
import logging
from functools import lru_cache
from typing import Any

import msgspec

from operations.base.errors import CallError
from operations.base.text import printable
from operations.base.work import BudgetSpentError, Work
from operations.contract.access import access_denied
from operations.contract.context import OperationContext
from operations.contract.grant import Complete, Grant
from operations.registry.plan import CallPlan
from operations.schema import CheckedForm, CheckedInput

logger = logging.getLogger("operations")


def reads_input(
    plan: CallPlan, grant: Grant | None, context: OperationContext, *, as_caller: bool
) -> bool:
    """Return whether a rule reads what the handler of this call receives."""
    if isinstance(context.checked, str):
        # A rule of the process that forwards the call has read it.
        return True
    if not plan.is_typed:
        return False
    if plan.operation.approve is not None or (as_caller and plan.permits_input is not None):
        return True
    if grant is None or not (as_caller or grant.is_limited):
        return False
    rules = grant.rules(plan.id)
    return rules.approve or (as_caller and bool(rules.accepts))


async def completion(
    plan: CallPlan, grant: Grant | None, value: Any, *, as_caller: bool
) -> Complete:
    """Return the function that completes this input with its defaults, for the rules that read it.

    The defaults are found here, once: in a thread if that needs much work.

    Raises:
        CallError: `ACCESS_DENIED` if that needs more than the budget.
    """
    rule, filled = plan.operation.approve, value
    try:
        is_read = (rule is not None and rule.when is not None) or (
            as_caller and grant is not None and bool(grant.rules(plan.id).accepts)
        )
        if is_read and plan.has_defaults:
            filled = await _completed(plan, value)
    except Exception as error:
        denied = access_denied(plan.id)
        if isinstance(error, (BudgetSpentError, RecursionError)):
            what = "finding the defaults of this input takes too much work. Send a smaller input"
            denied = CallError(denied.code, f"{denied.message}: {what}")
        denied.operation_id = plan.id
        raise denied from error
    return lambda _: filled


async def _completed(plan: CallPlan, value: Any) -> Any:
    try:
        return plan.completed(value)
    except BudgetSpentError:
        pass
    work = Work()
    try:
        return await asyncio.to_thread(plan.completed, value, work)
    finally:
        work.stop()


async def read_input(plan: CallPlan, value: Any, context: OperationContext) -> CheckedInput:
    """Build what the handler receives.

    Raises:
        CallError: `VALIDATION_ERROR` if a value is not valid for its type.
    """
    # A copy: code in this process may change its input while the call waits.
    value = msgspec.to_builtins(value)
    operation = plan.operation
    if operation.reader is None:
        return CheckedInput(reader=None, input=value, form=CheckedForm(value=value))
    if operation.signature is not None and operation.signature.kind == "sync":
        # Its validators may block as well.
        found: Any = await plan.services.threads.run(operation.reader.read, value, context)
    else:
        found = operation.reader.read(value, context)
    checked: CheckedInput = await found if inspect.isawaitable(found) else found
    if checked.form is None:
        _log_problem(plan.id, checked.problem)
    return checked


def permits_form(
    plan: CallPlan, grant: Grant | None, context: OperationContext, form: Any, complete: Complete
) -> bool:
    """Return whether the resource rule and the grant permit one form of the input."""
    is_permitted = plan.permits_input is None or plan.permits_input(context.identity, form)
    return is_permitted and _accepts(plan, grant, form, complete)


def permits_input(
    plan: CallPlan, grant: Grant | None, context: OperationContext, checked: CheckedInput
) -> bool:
    """Return whether the resource rule and the grant permit what the handler receives."""
    form = checked.form
    if form is None:
        restricts = plan.permits_input is not None
        return not restricts and (grant is None or not grant.rules(plan.id).accepts)
    if plan.permits_input is not None and not plan.permits_input(context.identity, form.value):
        return False
    # Values that the caller did not send are treated as defaults: see `InputRule`.
    return _accepts(plan, grant, form.sent, lambda _: form.value)


def _accepts(plan: CallPlan, grant: Grant | None, form: Any, complete: Complete) -> bool:
    authority = plan.spec.authority
    return grant is None or grant.accepts(plan.id, form, complete, authority=authority)


@lru_cache(maxsize=1_000)
def _log_problem(operation_id: str, problem: str) -> None:
    """Log why an input has no checked form, once."""
    logger.warning(
        "%s: a rule that reads the input rejects it, because it has no checked form: %s",
        operation_id,
        printable(problem),
    )
