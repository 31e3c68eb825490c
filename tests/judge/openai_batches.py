# SPDX-License-Identifier: Apache-2.0
"""Files and batches of the test server: the Batch API over what `openai_server.py` answers."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any


def store_file(state: Any, head: bytes, body: bytes) -> dict[str, Any]:
    boundary = re.search(rb"boundary=\"?([^\s\";]+)", head)
    parts = body.split(b"--" + boundary[1]) if boundary else []
    content = next(part for part in parts if b'name="file"' in part).partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
    name = f"file-{len(state.files)}"
    state.files[name] = content
    state.counts["files"] += 1
    return {
        "id": name,
        "object": "file",
        "bytes": len(content),
        "created_at": 0,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }


def start_batch(state: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    name = f"batch-{len(state.batches)}"
    state.counts["batches"] += 1
    state.batches[name] = {
        "id": name, "object": "batch", "endpoint": wanted["endpoint"], "input_file_id": wanted["input_file_id"],
        "completion_window": "24h", "created_at": 0, "status": "in_progress", "polls": 0, "metadata": wanted.get("metadata"),
    }  # fmt: skip
    return state.batches[name]


def poll_batch(
    state: Any, name: str, complete: Callable[[Any, str], tuple[int, Any]], transport_faults: Sequence[str]
) -> dict[str, Any]:
    batch = state.batches[name]
    batch["polls"] += 1
    if batch["polls"] > state.options.batch_polls and batch["status"] == "in_progress":
        lines, errors = [], []
        for number, line in enumerate(state.files[batch["input_file_id"]].splitlines()):
            entry = json.loads(line)
            digest = hashlib.sha256(json.dumps(entry["body"]).encode()).digest()
            state.counts["requests"] += 1
            state.asked[digest] += 1
            state.after_answer += state.answered[digest] > 0
            fault = state.draw()
            status, value = (
                (500, {"error": {"message": "lost"}}) if fault in transport_faults else complete(entry["body"], fault)
            )
            state.answered[digest] += status == 200
            result = {
                "id": f"r{number}",
                "custom_id": entry["custom_id"],
                "response": {"status_code": status, "request_id": "x", "body": value},
                "error": None,
            }
            (lines if status == 200 else errors).append(json.dumps(result))
        for key, found in (("output_file_id", lines), ("error_file_id", errors)):
            if found:
                batch[key] = f"file-{len(state.files)}"
                state.files[batch[key]] = "\n".join(found).encode()
        batch["status"] = "completed"
    return batch
