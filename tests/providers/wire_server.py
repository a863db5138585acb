"""A loopback server that speaks the exact bodies of OpenAI chat and responses, Anthropic and Gemini.

The model's name chooses the scenario; the request says whether the reply is plain or streamed. It runs in a thread
with an event loop of its own, so that a test may use any loop, and records what it was sent and who hung up.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Json = dict[str, Any]

CHAT_USAGE: Json = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2, "audio_tokens": 0},
}
RESPONSES_USAGE: Json = {
    "input_tokens": 11,
    "input_tokens_details": {"cached_tokens": 8},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 14,
}
RATINGS = [{"category": "HARM_CATEGORY_DANGEROUS_CONTENT", "probability": "HIGH", "blocked": True}]
CALL = '{"city":"Paris"}'
PIECES = ('{"ci', 'ty":"Pa', 'ris"}')
GEMINI_ENDINGS = frozenset(
    {
        "SAFETY",
        "PROHIBITED_CONTENT",
        "RECITATION",
        "BLOCKLIST",
        "SPII",
        "MALFORMED_FUNCTION_CALL",
        "OTHER",
        "LANGUAGE",
        "NO_IMAGE",
    }
)
SECRET_ECHO = "the customer said: my card is 4111"


@dataclass(frozen=True)
class Recorded:
    """One request as it arrived."""

    api: str
    scenario: str
    body: Json
    headers: dict[str, str]


class WireServer:
    """Start it with `with`; `url` is where it listens."""

    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self.reached: queue.Queue[str] = queue.Queue()
        """Scenarios that have begun to hang."""
        self.gone: queue.Queue[str] = queue.Queue()
        """Scenarios whose client hung up before the end."""
        self.url = ""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> WireServer:
        self._thread.start()
        assert self._ready.wait(10), "the wire server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        app = web.Application(client_max_size=50 * 2**20)
        for prefix in ("/v1", ""):
            app.router.add_post(prefix + "/chat/completions", self._chat)
            app.router.add_post(prefix + "/responses", self._responses)
            app.router.add_post(prefix + "/messages", self._messages)
        app.router.add_post("/{version}/models/{rest:.*}", self._gemini)
        # So that a handler learns that its client is gone while it waits.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    # --- sending ------------------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request, api: str, scenario: str | None = None) -> tuple[Json, str]:
        body = await request.json()
        # Behind a real name, where the client library behaves differently for it.
        scenario = (scenario or str(body["model"])).removeprefix("gpt-5.1-")
        self.requests.append(Recorded(api, scenario, body, {k.lower(): v for k, v in request.headers.items()}))
        if scenario == "hang":
            await self._wait(scenario)
        return body, scenario

    async def _wait(self, scenario: str) -> None:
        self.reached.put(scenario)
        try:
            await asyncio.Event().wait()
        finally:
            self.gone.put(scenario)

    async def _sse(
        self, request: web.Request, scenario: str, events: Sequence[Json | str], *, named: bool = False
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        # After some text, in every format.
        drop_after = max(2, len(events) // 2) if scenario == "disc" else None
        stall_after = 5 if request.path.endswith("/responses") else 3
        for position, event in enumerate(events):
            if position == drop_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if scenario == "stall" and position == stall_after:
                await self._wait(scenario)
            text = event if isinstance(event, str) else json.dumps(event)
            head = f"event: {event['type']}\n" if named and not isinstance(event, str) else ""
            await response.write(f"{head}data: {text}\n\n".encode())
        await response.write_eof()
        return response

    # --- OpenAI chat --------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, scenario = await self._begin(request, "chat")
        if (failed := _failure("openai", scenario)) is not None:
            return failed
        message: Json = {"role": "assistant", "content": "hello", "refusal": None, "annotations": []}
        finish = {"length": "length", "content_filter": "content_filter", "tool": "tool_calls"}.get(scenario, "stop")
        calls = [_chat_call("call_1", CALL)] if scenario == "tool" else []
        match scenario:
            case "content_filter":
                message["content"] = ""
            case "filter_text":
                finish = "content_filter"
            case "refusal":
                message.update(content=None, refusal="I can't help with that.")
            case "parallel":
                calls, finish = [_chat_call("call_1", CALL), _chat_call("call_2", '{"city":"Rome"}')], "tool_calls"
            case "noargs":
                calls, finish = [_chat_call("call_1", "")], "tool_calls"
            case "malformed":
                calls, finish = [_chat_call("call_1", '{"city": "Par')], "tool_calls"
            case "cut_call":
                calls, finish = [_chat_call("call_1", '{"city": "Par')], "length"
            case "answer_tool":
                calls, finish = [_chat_call("call_1", CALL, body["tools"][-1]["function"]["name"])], "tool_calls"
            case "fenced":
                message["content"] = 'Here it is:\n```json\n{"city":"Paris"}\n```\n'
            case "json":
                message["content"] = CALL
            case _:
                pass
        if calls:
            message.update(content=None, tool_calls=calls)
        base: Json = {"id": "chatcmpl-1", "created": 1, "model": "gpt-x-2026", "service_tier": "default"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            reply = {**base, "object": "chat.completion", "choices": [choice]}
            if scenario != "nousage":
                reply["usage"] = CHAT_USAGE
            return web.json_response(reply)

        def chunk(delta: Json, finish: str | None = None) -> Json:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return {**base, "object": "chat.completion.chunk", "choices": [choice]}

        events: list[Json | str] = [chunk({"role": "assistant", "content": ""})]
        if scenario == "refusal":
            events += [chunk({"refusal": "I can't "}), chunk({"refusal": "help with that."})]
        elif calls:
            for index, call in enumerate(calls):
                start = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
                events.append(chunk({"tool_calls": [start]}))
            # Pieces of parallel calls in turn: a later call begins before the first is whole.
            streams = [_pieces(call["function"]["arguments"]) for call in calls]
            for row in zip(*streams, strict=True):
                for index, piece in enumerate(row):
                    events.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
        else:
            events += [chunk({"content": piece}) for piece in _halves(message["content"])]
        if scenario == "bad_json":
            events.append("{nothing")
        if scenario not in ("trunc", "nofinish"):
            events.append(chunk({}, finish))
        if scenario not in ("trunc", "nousage"):
            events.append({**base, "object": "chat.completion.chunk", "choices": [], "usage": CHAT_USAGE})
        if scenario != "trunc":
            events.append("[DONE]")
        return await self._sse(request, scenario, events)

    # --- OpenAI responses ---------------------------------------------------------------------------------------------

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body, scenario = await self._begin(request, "responses")
        if (failed := _failure("openai", scenario)) is not None:
            return failed
        text = CALL if scenario == "json" else "hello"
        part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        said: Json = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
        call: Json = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": CALL,
            "status": "completed",
        }
        output, status = [said], "completed"
        incomplete: Json | None = None
        error: Json | None = None
        match scenario:
            case "length":
                status, incomplete = "incomplete", {"reason": "max_output_tokens"}
                said["status"] = "incomplete"
            case "content_filter":
                status, incomplete, output = "incomplete", {"reason": "content_filter"}, []
            case "refusal":
                said["content"] = [{"type": "refusal", "refusal": "I can't help with that."}]
            case "failed":
                status, error, output = "failed", {"code": "server_error", "message": SECRET_ECHO}, []
            case "flagged":
                status, error, output = "failed", {"code": "invalid_prompt", "message": SECRET_ECHO}, []
            case "tool":
                output = [call]
            case "think":
                thought = {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "hm"}],
                    "encrypted_content": "sealed",
                }
                output = [thought, said, call]
            case _:
                pass
        base: Json = {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": "gpt-x-2026",
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "metadata": {},
            "instructions": None,
            "text": {"format": {"type": "text"}},
        }
        final = {**base, "status": status, "incomplete_details": incomplete, "error": error}
        final |= {"output": output, "usage": RESPONSES_USAGE}
        if not body.get("stream"):
            return web.json_response(final)
        events: list[Json | str] = []

        def add(kind: str, **fields: Any) -> None:
            events.append({"type": kind, "sequence_number": len(events), **fields})

        started = {**base, "status": "in_progress", "incomplete_details": None, "error": None, "output": []}
        add("response.created", response={**started, "usage": None})
        add("response.in_progress", response={**started, "usage": None})
        for index, item in enumerate(output):
            at: Json = {"item_id": item["id"], "output_index": index}
            match item["type"]:
                case "message":
                    add("response.output_item.added", output_index=index, item={**item, "content": []})
                    content = item["content"][0]
                    at["content_index"] = 0
                    if content["type"] == "output_text":
                        add("response.content_part.added", **at, part={**content, "text": ""})
                        for piece in _halves(content["text"]):
                            add("response.output_text.delta", **at, delta=piece, logprobs=[])
                        add("response.output_text.done", **at, text=content["text"], logprobs=[])
                    else:
                        add("response.content_part.added", **at, part={"type": "refusal", "refusal": ""})
                        for piece in ("I can't ", "help with that."):
                            add("response.refusal.delta", **at, delta=piece)
                        add("response.refusal.done", **at, refusal=content["refusal"])
                    add("response.content_part.done", **at, part=content)
                case "function_call":
                    add("response.output_item.added", output_index=index, item={**item, "arguments": ""})
                    for piece in PIECES:
                        add("response.function_call_arguments.delta", **at, delta=piece)
                    add("response.function_call_arguments.done", **at, name=item["name"], arguments=CALL)
                case _:
                    add("response.output_item.added", output_index=index, item={**item, "summary": []})
                    at["summary_index"] = 0
                    add("response.reasoning_summary_part.added", **at, part={"type": "summary_text", "text": ""})
                    add("response.reasoning_summary_text.delta", **at, delta="hm")
                    add("response.reasoning_summary_text.done", **at, text="hm")
            add("response.output_item.done", output_index=index, item=item)
        if scenario != "trunc":
            add("response." + status, response=final)
        return await self._sse(request, scenario, events, named=True)

    # --- Anthropic ----------------------------------------------------------------------------------------------------

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body, scenario = await self._begin(request, "messages")
        if (failed := _failure("anthropic", scenario)) is not None:
            return failed
        call: Json = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
        content: list[Json] = [{"type": "text", "text": CALL if scenario == "json" else "hello"}]
        stop, details = "end_turn", None
        match scenario:
            case "length":
                stop = "max_tokens"
            case "refusal":
                stop, content = "refusal", []
                details = {"type": "refusal", "category": "cyber", "explanation": "This request was declined."}
            case "pause":
                stop = "pause_turn"
            case "ctx":
                stop = "model_context_window_exceeded"
            case "tool":
                stop, content = "tool_use", [call]
            case "think":
                thought = {"type": "thinking", "thinking": "hm", "signature": "sealed"}
                stop, content = "tool_use", [thought, *content, call]
            case _:
                pass
        usage: Json = {
            "input_tokens": 11,
            "output_tokens": 3,
            "cache_read_input_tokens": 8,
            "cache_creation_input_tokens": 4,
        }
        reply: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "content": content}
        reply |= {"stop_reason": stop, "stop_sequence": None, "usage": usage}
        ending: Json = {"stop_reason": stop, "stop_sequence": None}
        if details:
            reply["stop_details"] = ending["stop_details"] = details
        if not body.get("stream"):
            return web.json_response(reply)
        opening = {k: v for k, v in reply.items() if k != "stop_details"}
        opening |= {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        events: list[Json | str] = [{"type": "message_start", "message": opening}]
        for index, block in enumerate(content):
            start, deltas = _anthropic_block(block)
            events.append({"type": "content_block_start", "index": index, "content_block": start})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        if scenario == "miderr":
            error = {"type": "overloaded_error", "message": SECRET_ECHO}
            events[3:] = [{"type": "error", "error": error}]
        elif scenario != "trunc":
            events += [{"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]
        return await self._sse(request, scenario, events, named=True)

    # --- Gemini -------------------------------------------------------------------------------------------------------

    async def _gemini(self, request: web.Request) -> web.StreamResponse:
        scenario, verb = request.match_info["rest"].rsplit(":", 1)
        _, scenario = await self._begin(request, "gemini", scenario)
        if (failed := _failure("gemini", scenario)) is not None:
            return failed
        call: Json = {"functionCall": {"name": "get_weather", "args": {"city": "Paris"}}}
        parts: list[Json] | None = [{"text": CALL if scenario == "json" else "hello"}]
        finish, feedback = "STOP", None
        match scenario:
            case "length":
                finish = "MAX_TOKENS"
            case "blocked":
                feedback = {"blockReason": "PROHIBITED_CONTENT", "safetyRatings": RATINGS}
            case "tool":
                parts = [call]
            case "think":
                # Signatures are base64 on the wire.
                parts = [{"text": "hm", "thought": True}, {**call, "thoughtSignature": "c2VhbGVk"}]
            case "picture":
                parts = [{"inlineData": {"mimeType": "image/png", "data": "iVBORw=="}}]
            case _ if scenario in GEMINI_ENDINGS:
                finish, parts = scenario, None
            case _:
                pass
        usage = {
            "promptTokenCount": 11,
            "candidatesTokenCount": 3,
            "totalTokenCount": 14,
            "cachedContentTokenCount": 8,
            "thoughtsTokenCount": 2,
        }

        def reply(parts: list[Json] | None, finish: str | None = None) -> Json:
            whole: Json = {"modelVersion": "gemini-x", "responseId": "r1", "usageMetadata": usage}
            if feedback:
                return {**whole, "promptFeedback": feedback}
            candidate: Json = {"index": 0}
            if parts is not None:
                candidate["content"] = {"role": "model", "parts": parts}
            if finish:
                candidate["finishReason"] = finish
            if finish == "SAFETY":
                candidate |= {"safetyRatings": RATINGS, "finishMessage": "blocked for safety"}
            return {**whole, "candidates": [candidate]}

        if verb == "generateContent":
            return web.json_response(reply(parts, finish))
        events: list[Json | str]
        if parts and set(parts[0]) == {"text"}:
            pieces = _halves(parts[0]["text"])
            events = [reply([{"text": piece}]) for piece in pieces[:-1]]
            events.append(reply([{"text": pieces[-1]}], None if scenario == "trunc" else finish))
            if scenario == "stall":
                events = [reply([{"text": piece}]) for piece in ("h", "e", "l", "l", "o")]
        else:
            events = [reply(parts, finish)]
        if scenario == "disc":
            events = [*events, *events]
        return await self._sse(request, scenario, events)


def _halves(text: str) -> list[str]:
    return [text[:3], text[3:]] if text else []


def _pieces(args: str) -> list[str]:
    third = max(1, len(args) // 3)
    return [args[:third], args[third : 2 * third], args[2 * third :]]


def _chat_call(call: str, args: str, name: str = "get_weather") -> Json:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": args}}


def _anthropic_block(block: Json) -> tuple[Json, Iterable[Json]]:
    match block["type"]:
        case "text":
            return {"type": "text", "text": ""}, [{"type": "text_delta", "text": t} for t in _halves(block["text"])]
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return {"type": "thinking", "thinking": "", "signature": ""}, deltas
        case _:
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *PIECES)]
            return {**block, "input": {}}, deltas


def _failure(provider: str, scenario: str) -> web.Response | None:
    match scenario:
        case "bad_body":
            return web.Response(text="<html>", content_type="text/html")
        case "e429":
            body: Json = {
                "openai": {"error": {"message": SECRET_ECHO, "type": "requests", "code": "rate_limit_exceeded"}},
                "anthropic": {"type": "error", "error": {"type": "rate_limit_error", "message": SECRET_ECHO}},
                "gemini": {"error": {"code": 429, "message": SECRET_ECHO, "status": "RESOURCE_EXHAUSTED"}},
            }[provider]
            return web.json_response(body, status=429, headers={"retry-after": "7"})
        case "e500":
            error = {"message": SECRET_ECHO, "type": "server_error", "code": 500, "status": "INTERNAL"}
            return web.json_response({"error": error}, status=500)
        case "e529":
            error = {"type": "overloaded_error", "message": SECRET_ECHO, "code": 529, "status": "UNAVAILABLE"}
            return web.json_response({"type": "error", "error": error}, status=529)
        case "e401":
            error = {"message": f"Incorrect API key provided: {SECRET_ECHO}", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401)
        case "e400cf":
            filtered = {"hate": {"filtered": True, "severity": "high"}}
            inner = {"code": "ResponsibleAIPolicyViolation", "content_filter_result": filtered}
            error = {"message": SECRET_ECHO, "param": "prompt", "code": "content_filter", "innererror": inner}
            return web.json_response({"error": error}, status=400)
        case _:
            return None
