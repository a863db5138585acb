"""The stages of the intake."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated, Literal

from pydantic import Field

from stepwell import LogicStep, Outcome, Step, finish, go, stay, tool
from stepwell.outcomes import Go

from . import checks, prompts

Postcode = Annotated[str, Field(description="postcode", pattern=r"^[A-Z]{1,2}\d[A-Z\d]? ?\d[A-Z]{2}$|^\d{4,5}$")]
Detail = Annotated[
    Literal["name", "born", "address", "guardian"],
    Field(description="what is wrong; born = birth, birthday, date; address = street, city; guardian = parent"),
]


def today(step: Step) -> date:
    """The configured day, or the real one."""
    return date.fromisoformat(step.get_context("config.today") or f"{datetime.now(UTC):%Y-%m-%d}")


class IntakeStep(Step):
    """A stage that asks for one detail."""

    question = ""

    def get_prompt(self) -> str:
        return prompts.ask(self.question, today(self))


class NameStep(IntakeStep):
    """Who is it?"""

    question = "What is your full name?"

    @tool
    async def capture_name(self, name: Annotated[str, Field(description="the patient's full name")]) -> Outcome:
        """Save the patient's full name."""
        if problem := checks.name_problem(name):
            return stay(problem)
        self.save_state({"name": name})
        return go(RouteStep)


class BirthStep(IntakeStep):
    """How old?"""

    question = "When were you born?"

    @tool
    async def capture_birth(self, born: Annotated[date, Field(description="date of birth")]) -> Outcome:
        """Save the date of birth."""
        if problem := checks.birth_problem(born, today(self)):
            return stay(problem)
        self.save_state({"born": born.isoformat()})
        return go(RouteStep)


class AddressStep(IntakeStep):
    """Where do they live?"""

    question = "What is your address: street and house number, postcode, city?"

    @tool
    async def capture_address(
        self,
        street: Annotated[str, Field(description="street and house number")],
        postcode: Annotated[
            str, Field(description="postcode", pattern=r"^[A-Z]{1,2}\d[A-Z\d]? ?\d[A-Z]{2}$|^\d{4,5}$")
        ],
        city: Annotated[str, Field(description="city")],
    ) -> Outcome:
        """Save the address."""
        if problem := checks.street_problem(street):
            return stay(problem)
        self.save_state({"address": f"{street}, {postcode} {city}"})
        return go(RouteStep)


class GuardianStep(IntakeStep):
    """Who speaks for a child?"""

    question = "You are not of age yet. What is the full name of your parent or guardian?"

    @tool
    async def capture_guardian(
        self, name: Annotated[str, Field(description="full name of the parent or guardian")]
    ) -> Outcome:
        """Save the name of the parent or guardian."""
        if problem := checks.name_problem(name):
            return stay(problem)
        self.save_state({"name": name})
        return go(RouteStep)


class RouteStep(LogicStep):
    """Code decides what comes next: the first detail that is missing, then the review."""

    async def run_logic(self) -> Go:
        born = self.flow.get_step_state(BirthStep, "born")
        if not self.flow.get_step_state(NameStep, "name"):
            return go(NameStep)
        if not born:
            return go(BirthStep)
        minor = checks.age_on(today(self), date.fromisoformat(born)) < checks.ADULT
        if minor and not self.flow.get_step_state(GuardianStep, "name"):
            return go(GuardianStep)
        if not self.flow.get_step_state(AddressStep, "address"):
            return go(AddressStep)
        return go(ReviewStep).with_state({"guarded": minor})


class ReviewStep(Step):
    """Read everything back, correct it, be done."""

    def details(self) -> dict[str, str]:
        """Everything that was taken down."""
        found = {
            "name": self.flow.get_step_state(NameStep, "name"),
            "born": self.flow.get_step_state(BirthStep, "born"),
            "address": self.flow.get_step_state(AddressStep, "address"),
        }
        if self.get_state("guarded"):
            found["guardian"] = self.flow.get_step_state(GuardianStep, "name")
        return found

    def get_prompt(self) -> str:
        return prompts.review("; ".join(f"{key}: {value}" for key, value in self.details().items()))

    @tool
    async def confirm_details(self) -> Outcome:
        """Finish the intake ("yes", "correct", "that is right")."""
        return finish(self.details())

    @tool
    async def correct_detail(self, detail: Detail) -> Outcome:
        """Ask for one detail again ("wrong", "change", "correct the", "no")."""
        steps = {"name": NameStep, "born": BirthStep, "address": AddressStep, "guardian": GuardianStep}
        return go(steps[detail])
