"""The body that leads an agent to its input."""

import pytest

from stepwell.errors import InvalidInputError
from stepwell.transport import Invocation


def test_the_body_is_that_of_the_protocol_and_reads_back() -> None:
    one = Invocation(input_event_id="e-1", session_name="conversations:42")
    assert one.to_json() == {"inputEventId": "e-1", "sessionName": "conversations:42"}
    assert Invocation.from_json({**one.to_json(), "mine": [1]}) == one


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"sessionName": "c"}, "/inputEventId"),
        ({"inputEventId": "e"}, "/sessionName"),
        ({"inputEventId": 1, "sessionName": "c"}, "/inputEventId"),
    ],
)
def test_a_body_without_its_fields_is_refused(body: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Invocation.from_json(body)
    assert caught.value.pointer == pointer
