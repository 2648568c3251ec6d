"""Plans and states of runs that measure nothing: for the tests of what decides."""

from bench.harness import state as states
from bench.harness.plan import EFFORT
from bench.harness.run_plan import Plan
from bench.harness.scheduler import Scheduler
from bench.harness.state import Asked
from bench.record import Environment


def plan_of(cases, amount=EFFORT["default"], *techniques, **known):
    """The plan of cases of these techniques."""
    by_name = {technique.name: technique for technique in techniques}
    own = {name: [case for case in cases if case.technique == name] for name in by_name}
    return Plan(own, by_name, amount, **known)


def state_of(plan, **environment):
    """The state of a run that has found nothing."""
    about = {"asked": Asked(), "code": "", "command": "pytest bench/", "effort": "default"}
    return states.new(plan.every, environment=Environment(**environment), **about)


def begun(plan):
    """The same, with its first pass."""
    return Scheduler(plan, state_of(plan)).state
