"""A server that is told to stop: requests under way end, or have their error, and nothing hangs."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import running
from tests.serving.http.test_overload import wait_until

BODY = {"prompt": "letters", "max_tokens": 2000}


def test_what_is_under_way_may_end_and_the_rest_has_its_error() -> None:
    with (
        running(RepeatingEngine(slots=3, step_seconds=0.01), grace_seconds=1.5) as here,
        ThreadPoolExecutor(30) as clients,
    ):
        short = clients.submit(here.complete, prompt="say: a short answer of some letters")
        whole = clients.submit(here.complete, **BODY)
        stream = clients.submit(here.complete, **BODY, stream=True)
        wait_until(lambda: here.engine.load().num_running == 3)
        late = [clients.submit(here.complete, **BODY) for _ in range(24)]  # The engine queues some of them itself.
        wait_until(lambda: len(here.server.loop.tickets()) >= 26)  # The short one may have ended.
        begun = time.monotonic()
        here.serving.should_exit = True
        wait_until(lambda: sum(each.done() for each in late) >= 12)
        assert not whole.done()  # Those that waited get no grace.
        assert short.result().status_code == 200
        for each in (whole, *late):
            answer = each.result()
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is stopping")
        assert json.loads(stream.result().text.strip().split("data: ")[-1])["error"]["code"] == "engine_failed"
        assert 1.4 < time.monotonic() - begun < 9
        wait_until(lambda: here.engine.is_closed)


def test_clients_that_neither_read_nor_send_do_not_keep_a_server_up() -> None:
    with running(RepeatingEngine(slots=2), grace_seconds=0.1) as here:
        address = ("127.0.0.1", int(here.url.rsplit(":", 1)[1]))
        body = json.dumps({**BODY, "stream": True, "n": 16, "return_token_ids": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(address) as deaf, socket.create_connection(address) as slow:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            slow.sendall(head + b"content-length: 99\r\n\r\n{")
            wait_until(lambda: here.engine.load().num_running)
            begun = time.monotonic()
            here.serving.should_exit = True
            wait_until(lambda: here.engine.is_closed)
            assert time.monotonic() - begun < 9


def test_a_second_signal_takes_what_is_under_way_its_time() -> None:
    with (
        running(RepeatingEngine(slots=2, step_seconds=0.01), grace_seconds=60) as here,
        ThreadPoolExecutor(2) as clients,
    ):
        whole = clients.submit(here.complete, **BODY)
        wait_until(lambda: here.engine.load().num_running)
        begun = time.monotonic()
        here.serving.handle_exit(signal.SIGINT, None)
        time.sleep(0.3)
        assert not whole.done()
        here.serving.handle_exit(signal.SIGINT, None)
        assert whole.result().status_code == 503
        wait_until(lambda: here.engine.is_closed)
        assert time.monotonic() - begun < 15
