"""Processes that capture models: a config in, a graph out, a line each; one that ends takes only its config with it.

Plain child processes, not a pool of `multiprocessing`: that one imports the caller's main module again, and breaks as a
whole when a child is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import IO

from hpsearch.errors import HpsearchError
from hpsearch.graph import ModelGraph, store

Answer = tuple[str, ModelGraph | str]
"""A config, and its graph or why there is none."""
SERVE = "from hpsearch.validate.workers import serve; serve()"


def capture_all(configs: Sequence[str], seq_len: int, recipe: str, workers: int) -> Iterator[Answer]:
    """The graph of every config (JSON text), or one line that says why there is none, in the order they are ready."""
    waiting: SimpleQueue[str] = SimpleQueue()
    ready: SimpleQueue[Answer] = SimpleQueue()
    for text in configs:
        waiting.put(text)
    for _ in range(min(workers, len(configs))):
        threading.Thread(target=_drive, args=(waiting, ready, seq_len, recipe), daemon=True).start()
    for _ in configs:
        yield ready.get()


def _drive(waiting: SimpleQueue[str], ready: SimpleQueue[Answer], seq_len: int, recipe: str) -> None:
    """One process after another, until no config waits."""
    while not waiting.empty():
        with TemporaryFile("w+") as said, _start(said) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            while not waiting.empty():
                text = waiting.get()
                child.stdin.write(json.dumps([text, seq_len, recipe]) + "\n")
                child.stdin.flush()
                answer = child.stdout.readline()
                if not answer:
                    ready.put((text, _last_words(said)))
                    break
                graph, problem = json.loads(answer)
                ready.put((text, store.graph_from_json(graph) if graph else str(problem)))


def _start(said: IO[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry) or "."
    return subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def _last_words(said: IO[str]) -> str:
    said.seek(0)
    lines = [line.strip() for line in said if line.strip()]
    return f"capture: expected a graph, but the process ended: {lines[-1] if lines else 'without a word'}"


def serve() -> None:
    """Answers configs from stdin, until it ends. What libraries print goes to stderr."""
    from hpsearch.capture import capture_config

    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        text, seq_len, recipe = json.loads(line)
        try:
            graph: ModelGraph = capture_config(json.loads(text), seq_len=seq_len, recipe=recipe).graph
            answer = [store.graph_to_json(graph), ""]
        except HpsearchError as error:
            answer = ["", str(error)]
        out.write(json.dumps(answer) + "\n")
        out.flush()
