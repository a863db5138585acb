"""What the offline model decides, and the gateway around it."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_talk import TODAY, answer, called, request, tool, user
from stepwell.errors import LlmSetupError
from stepwell.messages import AssistantMessage, DirectMessage, ToolCall, ToolResult, UserMessage
from stepwell.models import (
    Finish,
    ModelGateway,
    ModelRequest,
    ModelSelection,
    Providers,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageEvent,
)
from stepwell.models._offline.dialogue import decide
from stepwell.models.offline import OfflineModel
from stepwell.testing import FakeClock

CITY = {"type": "string", "description": "city of the stay", "examples": ["Lisbon", "Porto"]}
PLAN = tool(
    "plan_trip",
    "Note the guest's wishes.",
    city=CITY,
    arrival={"type": "string", "format": "date", "description": "day of arrival"},
    departure={"type": "string", "format": "date", "description": "day of departure"},
    guests={"type": "integer", "description": "number of guests"},
)
SHOW = tool("show_hotels", 'Show the hotels that fit ("show me", "what do you have").')
TAKE = tool(
    "choose_hotel", 'Take the guest\'s choice ("I take", "book").', ["hotel"], hotel="number or name in the list"
)
NAME = tool(
    "capture_name", "Save the full name.", ["name"], name={"type": "string", "description": "the patient's full name"}
)
CONTACT = tool(
    "give_contact",
    "Note name and e-mail.",
    ["name", "email"],
    name={"type": "string", "description": "the guest's full name"},
    email={"type": "string", "format": "email", "description": "the guest's e-mail address"},
)
CONFIRM = tool("confirm_booking", "Book the hotel.")
DESK = [PLAN, SHOW]


# --- calls


def test_a_tool_is_called_with_what_was_said() -> None:
    assert answer("Two guests to Porto, 12 to 15 May", tools=DESK) == (
        "plan_trip",
        {"city": "Porto", "arrival": "2027-05-12", "departure": "2027-05-15", "guests": 2},
    )
    assert answer("show me", tools=DESK) == ("show_hotels", {})
    assert answer("I take the second one", tools=[*DESK, TAKE]) == ("choose_hotel", {"hotel": "2"})


def test_today_comes_from_the_prompt() -> None:
    assert answer("tomorrow", tools=DESK, system="Today is 2030-01-01.")[1]["arrival"] == "2030-01-02"
    assert answer("tomorrow", tools=DESK, system="Today is a fine day, unlike 3 May.")[1]["arrival"] == "2026-12-01"


def test_a_length_completes_a_day_that_was_passed_on_before() -> None:
    before = called("plan_trip", "Noted.", arrival="2027-05-12")
    plan = {"arrival": "2027-05-12", "departure": "2027-05-15"}
    assert answer("12 May", *before, "<Until when?", "3 nights", tools=DESK) == ("plan_trip", plan)
    assert answer("12 May", *before, "<For how many nights?", "3", tools=DESK) == ("plan_trip", plan)
    unknown = called("plan_trip", "Noted.")
    assert answer("12 May", *unknown, "<Until when?", "3 nights", tools=[PLAN]).startswith("Sorry")


def test_required_values_come_from_earlier_messages_and_calls() -> None:
    whole = {"name": "Ada Lovelace", "email": "ada@example.org"}
    ask = "<Which name and e-mail address?"
    assert answer(ask, "I'm Ada Lovelace", "<And the e-mail address?", "ada@example.org", tools=[CONTACT]) == (
        "give_contact",
        whole,
    )
    refused = called("give_contact", "That is no address.", name="Ada Lovelace", email="ada")
    assert answer(ask, "x", *refused, "<What is the e-mail address?", "ada@example.org", tools=[CONTACT]) == (
        "give_contact",
        whole,
    )
    start = user("Start", "code")
    assert (
        answer("I'm Ada Lovelace", start, "<The e-mail address?", "ada@example.org", tools=[CONTACT])
        == "Could you tell me your full name?"
    )


def test_a_missing_value_is_asked_for_with_what_is_possible() -> None:
    choose = tool("choose_city", "Choose the city.", ["city"], city=CITY)
    assert answer("choose", tools=[choose]) == "Could you tell me the city of the stay? Possible: Lisbon and Porto."
    assert answer("choose", tools=[choose], system="Ask next: Which city is it?") == "Which city is it?"
    assert (
        answer("I am Ada", "<Hm", "compare them", tools=[tool("compare", "Compare.", ["a"], a="the first of them")])
        == "Could you tell me the first of them?"
    )


def test_the_answer_to_a_question_is_taken_as_it_is() -> None:
    assert answer("<What is your full name?", "ada", tools=[NAME]) == ("capture_name", {"name": "ada"})
    assert answer("<Well?", "ada lovelace", tools=[NAME]) == ("capture_name", {"name": "ada lovelace"})
    assert (
        answer("<What is your full name?", "what for?", tools=[NAME])
        == "Sorry, I did not get that. Could you tell me your full name?"
    )
    assert (
        answer("<Well.", "ada lovelace", tools=[NAME]) == "Sorry, I did not get that. Could you tell me your full name?"
    )
    both = [tool("a", "", x="colour of the car"), tool("b", "", colour="colour")]
    assert answer("<Which colour?", "blue", tools=both) == ("b", {"colour": "blue"})


def test_a_yes_means_the_tool_that_the_question_was_about() -> None:
    tools = [*DESK, TAKE, CONFIRM]
    assert answer("<Shall I show the hotels that fit?", "yes", tools=tools) == ("show_hotels", {})
    assert answer("<Shall I book it now?", "ok", tools=tools) == ("confirm_booking", {})
    assert answer("<Which city?", "yes", tools=tools, system="Ask next: Which city?") == "Which city?"
    assert answer("<Is it raining?", "yes", tools=[CONFIRM], system="Ask next: Hm?") == "Hm?"
    listed = "1. Casa Aurora\n2. Hotel Tejo"
    assert answer("<Casa Aurora has a pool. Do you want to take it?", "yes", tools=[TAKE], system=listed) == (
        "choose_hotel",
        {"hotel": "Casa Aurora"},
    )
    assert answer("<Casa Aurora has a pool.", "I take it", tools=[TAKE], system=listed) == (
        "choose_hotel",
        {"hotel": "Casa Aurora"},
    )
    assert (
        answer("<Casa Aurora, Hotel Tejo.", "I take it", tools=[TAKE], system=listed)
        == "Could you tell me your number or name in the list?"
    )


def test_a_question_with_two_sides_is_asked_again() -> None:
    either = "<Shall I show the hotels, or do you want to book?"
    assert answer(either, "yes", tools=DESK, system="Ask next: Which?") == "Which?"
    both = "<Do you need a pool? Or shall I show the hotels that fit?"
    assert answer(both, "no", tools=DESK) == ("show_hotels", {})
    assert answer(both, "no, I would rather not do that", tools=DESK) == "All right. What would you like instead?"
    assert answer("<Could you tell me what to show?", "yes", tools=DESK, system="Ask next: Which?") == "Which?"


def test_a_no_calls_nothing_but_what_refuses() -> None:
    cancel = tool("cancel_booking", "Cancel.")
    assert answer("no, don't book it", tools=[CONFIRM]) == "All right. What would you like instead?"
    assert answer("no, cancel the booking", tools=[CONFIRM, cancel]) == ("cancel_booking", {})
    assert answer("no, show me what you have", tools=DESK) == ("show_hotels", {})


def test_what_else_a_message_asks_is_done_next() -> None:
    text = user("show me hotels in Porto")
    plan = called("plan_trip", "Noted: Porto.", city="Porto")
    assert answer(text, tools=DESK) == ("plan_trip", {"city": "Porto"})
    assert answer(text, *plan, tools=DESK) == ("show_hotels", {})
    refused = called("plan_trip", {"accepted": False, "error": "city: no such city"}, city="Porto")
    assert (
        answer(text, *refused, tools=DESK)
        == "That did not work: city: no such city. Could you tell me the city of the stay? Possible: Lisbon and Porto."
    )
    assert (
        answer(user("Porto"), *plan, tools=DESK)
        == "Noted: Porto.\n\nHere I can:\n- note your wishes\n- show the hotels that fit"
    )
    rest = tool("count", "Count people.", guests={"type": "integer", "description": "guests"})
    assert answer(
        user("2 guests to Porto"), *called("plan_trip", "ok", city="Porto", guests=2), tools=[PLAN, rest]
    ) != ("count", {"guests": 2})
    only = tool("place", "", city=CITY)
    assert answer(user("2 guests to Porto"), *called("place", "ok", city="Porto"), tools=[only, rest]) == (
        "count",
        {"guests": 2},
    )


def test_calls_for_one_message_are_limited() -> None:
    text = user("show me hotels in Porto")
    many = [m for _ in range(4) for m in called("plan_trip", "Noted.", city="Porto")]
    assert answer(text, *many, tools=DESK).startswith("Noted.")


def test_a_refused_value_is_tried_in_its_other_reading() -> None:
    text = user("I'm Ada Lovelace, ada at example dot org")
    first = ("give_contact", {"name": "Ada Lovelace", "email": "ada at example dot org"})
    second = ("give_contact", {"name": "Ada Lovelace", "email": "ada@example.org"})
    assert answer(text, tools=[CONTACT]) == first
    refused = called("give_contact", "That is not an e-mail address.", **first[1])
    assert answer(text, *refused, tools=[CONTACT]) == second
    again = called("give_contact", "That is not an e-mail address.", **second[1])
    assert (
        answer(text, *refused, *again, tools=[CONTACT])
        == "That is not an e-mail address. Could you tell me your full name?"
    )
    other = called("give_contact", "Noted.", **first[1])
    assert answer(text, *other, tools=[CONTACT]) == "Noted. Could you tell me your full name?"
    gone = called("other_tool", "Noted.")
    assert answer(text, *gone, tools=[CONTACT]) == first
    raw = (AssistantMessage(calls=(ToolCall("c", "give_contact", "not json"),)), refused[1])
    assert answer(text, *raw, tools=[CONTACT]) == second


# --- words


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Ask for first and last name.", "Could you give me first and last name?"),
        ("Please ask the customer again for their address.", "Could you give me your address?"),
        ("Ask which hotel is meant.", "Could you tell me which hotel is meant?"),
        ("Ask whether they agree.", "Could you tell me whether you agree?"),
        ("Ask them to repeat it.", "Could you repeat it?"),
        ("Tell the guest that the hotel is full.", "The hotel is full."),
        ("Say: all right.", "All right."),
        ("A table:\nAsk for it", "A table:\nAsk for it"),
        ({"feedback": "Too short."}, "Too short."),
        (
            {"rooms": 2, "nice_view": True, "tags": ["a", "b"], "none": None},
            "Rooms: 2\nNice view: yes\nTags: a, b\nNone:",
        ),
        ([{"name": "A", "free": False}, "B"], "- name: A, free: no\n- B"),
        (3.5, "3.5"),
    ],
)
def test_results_become_words(content: Any, said: str) -> None:
    assert answer(user("hm"), *called("x", content), system="Ask next: ?") in (f"{said} ?", f"{said}\n\n?", said)


@pytest.mark.parametrize("content", ["input validated", None, "", True, "done"])
def test_a_result_without_words_leads_on(content: Any) -> None:
    assert answer(user("hm"), *called("x", content), system="Ask next: And now?") == "And now?"


def test_results_that_are_errors() -> None:
    assert (
        answer(user("hm"), *called("x", "The server is down", outcome="error"), tools=[NAME])
        == "The server is down Could you tell me your full name?"
    )
    two = {"accepted": False, "error": "name: Value error, too short\nday: not a date."}
    assert (
        answer(user("hm"), *called("capture_name", two), tools=[NAME])
        == "That did not work: name: too short; day: not a date. Could you tell me your full name?"
    )
    fields = {"accepted": False, "error": "email: wrong"}
    assert (
        answer(user("hm"), *called("give_contact", fields), tools=[CONTACT])
        == "That did not work: email: wrong. Could you tell me your e-mail address?"
    )
    assert (
        answer(user("hm"), *called("x", {"accepted": False}), tools=[CONTACT])
        == "That did not work: Accepted: no. Could you tell me your full name?"
    )
    assert answer(user("hm"), *called("x", "ok"), system="Ask next: ") == "What can I do for you?"


def test_of_two_results_of_one_tool_the_last_is_said() -> None:
    results = (*called("x", "First."), *called("x", "Second?"))
    assert answer(user("hm"), *results) == "Second?"


def test_a_stage_opens_with_its_greeting_and_its_question() -> None:
    system = 'Be kind.\nGreeting: "Welcome!"\nAsk next: Who are you?'
    assert answer(system=system) == "Welcome! Who are you?"
    assert answer(user("Start", "code"), system=system) == "Welcome! Who are you?"
    assert answer("hello", system=system) == "Welcome! Who are you?"
    assert answer("hi", tools=[NAME]) == "Hello! Could you tell me your full name?"
    crossing = (user("I'm Ada"), *called("capture_name", "Noted: Ada."), user("Start", "code"))
    assert answer("<Hello", *crossing, system=system) == "Noted: Ada. Who are you?"
    assert answer("I'm Ada", DirectMessage(text="Fine."), system=system) == "Who are you?"
    assert answer(user("The guest comes back.", "code"), system=system).startswith("Sorry, I did not get that.")
    assert answer(user("Start", "code")) == "What can I do for you?"


def test_a_closing_stage_says_goodbye() -> None:
    assert answer(user("Start", "code"), system="Say: Farewell, Ada.") == "Farewell, Ada."
    assert answer(user("Start", "code"), system="The conversation is over.") == "Thank you, and goodbye!"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("are you human?", "not a language model"),
        ("how are you", "rules never sleep"),
        ("bye", "Goodbye!"),
        ("thanks a lot", "You are welcome. Which city?"),
        ("which cities are there?", "You can choose from Lisbon and Porto."),
        ("what can you do?", "- note your wishes"),
        ("blah", "Sorry, I did not get that. Which city?"),
        ("what time is it?", "Sorry, I did not get that. Which city?"),
    ],
)
def test_small_talk(text: str, part: str) -> None:
    assert part in answer(text, tools=DESK, system="Ask next: Which city?")


def test_what_is_not_understood() -> None:
    colour = tool("paint", "Paint it.", colour={"enum": ["red", "blue"], "description": "the colour"})
    assert (
        answer("<Which colour?", "hmpf", tools=[colour])
        == "Sorry, I did not get that. For the colour you can choose from red and blue."
    )
    assert (
        answer("<Sorry, I did not get that.", "blah", tools=[colour])
        == "Sorry, I did not understand that either.\n\nHere I can:\n- paint it"
    )
    one = tool("paint", "", colour={"const": "red"})
    assert (
        answer("<Which colour?", "hmpf", tools=[one])
        == "Sorry, I did not get that. For your colour you can choose from red."
    )
    assert answer("blah").startswith("Sorry, I did not get that. I am Stepwell's offline model")
    assert answer("help", tools=[tool("URLs_open", "URLs are opened. Fast.")]) == "Here I can:\n- URLs are opened"


def test_questions_are_made_from_descriptions() -> None:
    def ask(description: str, name: str = "x_y") -> str:
        return answer(
            system="", tools=[tool("t", "", [name], **{name: {"type": "string", "description": description}})]
        )

    assert ask("full name") == "Could you tell me your full name?"
    assert ask("The patient's phone; digits only") == "Could you tell me your phone?"
    assert ask("date of birth") == "Could you tell me the date of birth?"
    assert ask("How many (people)") == "Could you tell me how many?"
    assert ask("UK postcode") == "Could you tell me your UK postcode?"
    assert ask("?!") == "Could you tell me your x y?"


def test_an_output_schema_is_filled_from_the_message_or_the_prompt() -> None:
    schema = {"type": "object", "properties": {"city": CITY}}
    assert json.loads(answer("to Porto", schema=schema)) == {"city": "Porto"}
    assert json.loads(answer(user("Start", "code"), schema=schema, system="A trip to Lisbon")) == {"city": "Lisbon"}
    assert json.loads(answer("hm", schema=schema)) == {}


def test_the_phrases_of_other_tools_and_words_without_meaning_call_nothing() -> None:
    assert answer("\u00bf\u00bf\u00bf", tools=DESK).startswith("Sorry")
    assert answer("   ", tools=DESK).startswith("Here I can")


# --- the gateway


async def events(model: OfflineModel, given: ModelRequest) -> list[Any]:
    async with model.stream(given) as stream:
        return [event async for event in stream]


@pytest.mark.anyio
async def test_text_is_streamed_word_by_word() -> None:
    found = await events(OfflineModel(), request("hello", system="Greeting: Good day to you!"))
    texts = [event.text for event in found if isinstance(event, TextDelta)]
    assert len(texts) > 3
    assert "".join(texts).startswith("Good day to you!")
    assert isinstance(found[-2], UsageEvent)
    assert (found[-2].usage.input or 0) > 5
    assert found[-1] == Finish(stop=StopReason.COMPLETE, raw="rules")


@pytest.mark.anyio
async def test_a_call_is_streamed_with_its_arguments_in_pieces() -> None:
    found = await events(OfflineModel(today=date(2030, 1, 1)), request("tomorrow to Porto with 2 guests", tools=DESK))
    assert isinstance(found[0], ToolCallStart)
    assert found[0].name == "plan_trip"
    pieces = [event.args for event in found if isinstance(event, ToolCallDelta)]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == {"city": "Porto", "arrival": "2030-01-02", "guests": 2}
    assert found[-3] == ToolCallEnd(0)
    assert found[-1].stop is StopReason.TOOL_CALLS


@pytest.mark.anyio
async def test_parameters_of_a_selection() -> None:
    params = {"max_tokens": 2, "today": "2030-01-01", "word_delay": 0.5}
    clock = FakeClock(auto_advance=True)
    given = request("hello", tools=DESK)
    cut = ModelRequest(selection=ModelSelection("offline", "rules", params), messages=given.messages, tools=DESK)
    found = await events(OfflineModel(clock=clock), cut)
    assert found[-1] == Finish(stop=StopReason.TRUNCATED, raw="length")
    assert clock.slept[0] == 0.5


@pytest.mark.anyio
async def test_the_day_comes_from_the_clock_otherwise() -> None:
    clock = FakeClock(auto_advance=True)
    found = await events(OfflineModel(clock=clock), request("today", tools=DESK))
    args = json.loads("".join(event.args for event in found if isinstance(event, ToolCallDelta)))
    assert args["arrival"] == date.fromtimestamp(clock.time()).isoformat()  # noqa: DTZ012


@pytest.mark.anyio
async def test_it_can_be_cancelled_between_any_two_words() -> None:
    seen: list[Any] = []
    with anyio.CancelScope() as scope:
        async with OfflineModel().stream(request("hello", tools=DESK)) as stream:
            async for event in stream:
                seen.append(event)
                scope.cancel()
    assert len(seen) == 1
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt", {}),
        ("rules", {"temperature": 1}),
        ("rules", {"max_tokens": 0}),
        ("rules", {"max_tokens": True}),
        ("rules", {"max_tokens": "9"}),
        ("rules", {"word_delay": -1}),
        ("rules", {"today": "soon"}),
    ],
)
def test_a_wrong_selection_is_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(LlmSetupError):
        OfflineModel().validate(ModelSelection("offline", name, params))


def test_it_is_a_provider() -> None:
    model = OfflineModel()
    assert isinstance(model, ModelGateway)
    providers = Providers(model)
    providers.validate("offline:rules", require=["tools", "structured_output"])
    with pytest.raises(LlmSetupError, match="image_input"):
        providers.validate("offline:rules", require=["image_input"])


@pytest.mark.parametrize("piece", ["A", "a.", "1-1-", "May ", "a at ", "\n", "Hotel de ", "12 Baker ", "x: "])
def test_a_message_of_megabytes_is_answered(piece: str) -> None:
    text = piece * (5_000_000 // len(piece))
    assert answer(f"<{text}", text, tools=[PLAN, SHOW, TAKE, NAME, CONTACT, CONFIRM], system=text)


MESSAGE = st.one_of(
    st.builds(UserMessage, content=st.text(), by=st.sampled_from(["user", "code"])),
    st.builds(DirectMessage, text=st.text()),
    st.builds(AssistantMessage, text=st.text(), calls=st.just((ToolCall("c", "plan_trip", {"city": 1}),))),
    st.builds(
        ToolResult,
        call=st.just("c"),
        name=st.sampled_from(["plan_trip", "x"]),
        content=st.one_of(st.text(), st.none(), st.dictionaries(st.text(), st.text()), st.lists(st.integers())),
    ),
)


@settings(deadline=None)
@given(st.lists(MESSAGE, max_size=5), st.text(), st.booleans())
def test_any_history_and_any_prompt_get_a_reply(messages: list[Any], system: str, shaped: bool) -> None:
    tools = [PLAN, SHOW, TAKE, CONTACT, CONFIRM]
    given = request(*messages, tools=tools, system=system, schema=PLAN.parameters if shaped else None)
    reply = decide(given, TODAY)
    assert reply.call or reply.text.strip()
    assert decide(given, TODAY) == reply
